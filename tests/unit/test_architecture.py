"""The picture of the layers in docs/architecture.md is what import-linter checks; the page knows the packages and names
nothing that the code does not have."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hiercoll"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.findall(r"`([\w/]+\.py)(?:: ([\w., ]+))?`", PAGE)  # `file.py`, `file.py: name` or `file.py: name, name`


def checked_layers() -> list[str]:
    """The layers in pyproject.toml, from the top; read without tomllib, which Python 3.10 lacks."""
    found = re.search(r"^layers = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return list(ast.literal_eval(found[1]))


def pictured_layers() -> list[str]:
    """The first column of the page's picture: the block of lines that begins with the highest layer."""
    lines = PAGE.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("    __main__"))
    picture = []
    for line in lines[first:]:
        if not line.startswith("    "):
            break
        picture.append(line.strip().partition("  ")[0])
    return picture


def names_of(node: ast.Module | ast.ClassDef, prefix: str = "") -> set[str]:
    """What a module defines, with the methods and fields of its classes."""
    found: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.ClassDef):
            found |= {prefix + each.name} | names_of(each, f"{each.name}.")
        elif isinstance(each, ast.FunctionDef):
            found.add(prefix + each.name)
        elif isinstance(each, ast.Assign):
            found |= {prefix + target.id for target in each.targets if isinstance(target, ast.Name)}
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(prefix + each.target.id)
    return found


@cache
def defined(path: Path) -> set[str]:
    """What the file defines."""
    return names_of(ast.parse(path.read_text()))


def test_the_picture_shows_the_layers_that_are_checked() -> None:
    assert pictured_layers() == checked_layers()


def test_the_layers_are_all_that_there_is() -> None:
    present = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(re.findall(r"\w+", " ".join(checked_layers()))) == present - {"__init__"}


def test_architecture_names_every_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == {name for name in packages if f"`{name}/`" in PAGE}


@pytest.mark.parametrize(("file", "names"), sorted(set(NAMED)))
def test_architecture_names_what_exists(file: str, names: str) -> None:
    path = next((path for path in (PACKAGE / file, ROOT / file) if path.exists()), None)
    assert path is not None
    wanted = {name.strip() for name in names.split(",")} - {""}
    assert wanted <= defined(path), wanted - defined(path)


def test_a_program_imports_no_more_than_its_calls_need() -> None:
    """Each rank of a job pays for what is imported with its processor: not for what only commands need, nor for modules
    of Python's that bring many more."""
    code = "import mpi4py, sys; mpi4py.rc.initialize = False; import numpy; before = set(sys.modules)\n"
    code += "import hiercoll.calls.dropin, hiercoll.calls.functions; print(*set(sys.modules) - before)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    found = set(told.stdout.split())
    heavy = {"statistics", "random", "secrets", "hashlib", "decimal", "subprocess", "logging", "asyncio"}
    heavy |= {"click", "rich"}
    assert "hiercoll.runtime.session" in found and not found & heavy
    assert not any(name.startswith(("hiercoll.cli", "hiercoll.verify", "hiercoll.tools")) for name in found)


def test_a_program_whose_calls_are_left_to_mpi_imports_little() -> None:
    """Not sessions, plans and algorithms, which take 60 ms; nor NumPy, where the program does not; nor click where
    nothing is to parse, nor what brings many more modules."""
    code = "import gc; assert gc.get_freeze_count() > 10000  # what there was before the program\n"
    code += "import array, sys; from mpi4py import MPI; comm, given = MPI.COMM_WORLD, array.array('d', [1, 2])\n"
    code += "comm.Allreduce(MPI.IN_PLACE, given); comm.Ibcast(given).Wait(); comm.bcast(3); comm.Dup().Free()\n"
    code += "assert hasattr(comm, 'plain'), comm; print(*sys.modules)"
    command = [sys.executable, "-m", "hiercoll", "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    ours = {name for name in told.stdout.split() if name.startswith("hiercoll.")}
    packages = {name.split(".")[1] for name in ours}
    assert "hiercoll.calls.dropin" in ours and len(ours) < 40
    assert not packages & {"algorithms", "model", "schedule", "memory", "tables", "learned", "topology"}
    assert not {"numpy", "click", "tempfile", "random", "importlib.abc"} & set(told.stdout.split())
