"""Tools go by records: none of them names a collective."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hiercoll
from hiercoll.collectives import COLLECTIVES, called

ROOT = Path(hiercoll.__file__).parent
TOOLS = sorted(
    [
        *(ROOT / f"{name}.py" for name in ("__main__", "bench", "measuring", "proving", "report", "tables", "tuning")),
        *(ROOT / f"{name}.py" for name in ("loopback", "workload")),
        *(ROOT / "cli").glob("*.py"),
        *(ROOT / "plots").glob("*.py"),
    ]
)


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_tool_names_a_collective(path: Path) -> None:
    """No text is the name of one, in hiercoll's words or in MPI's."""
    names = set(COLLECTIVES) | {name for each in called() for name in (each.native, each.nonblocking, each.persistent)}
    tree = ast.parse(path.read_text())
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not found & names
