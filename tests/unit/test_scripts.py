"""Names of hiercoll in what no other test imports here: scripts, examples, tests that need a GPU."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for folder in ("scripts", "examples", "tests/gpu", "tests/device", "tests/lab", "tests/mpi/programs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix == ".py" or (path.is_file() and not path.suffix and path.read_bytes().startswith(b"#!"))
)
NEEDS_CUPY = ("hiercoll.cuda.cupy_device",)


def is_python(path: Path) -> bool:
    """By its name, or by its first line."""
    return path.suffix == ".py" or "python" in path.read_text().partition("\n")[0]


def there_is(module: str, name: str) -> bool:
    """Whether a module has it, or is a package with such a module."""
    if hasattr(import_module(module), name):
        return True
    try:
        import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("path", list(filter(is_python, FILES)), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    imported = [
        (node.module, each.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hiercoll"
        for each in node.names
        if node.module not in NEEDS_CUPY
    ]
    assert [each for each in imported if not there_is(*each)] == []
