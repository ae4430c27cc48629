"""The command line of ``python -m hiercoll``."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from click.testing import CliRunner

from hiercoll.__main__ import start
from hiercoll.cli import main
from hiercoll.options import _own_words

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("program.py --report", 0),
        ("--report=sync program.py --table t", 1),
        ("--trace t.json --report=sync program.py", 3),
        ("--table=t --algorithm alltoall=bruck --compare -m module --trace t", 4),
        ("--report", 1),
    ],
)
def test_where_the_program_begins(words: str, own: int) -> None:
    """Options with values have them after them, or in them."""
    assert _own_words(words.split()) == own


@pytest.mark.parametrize("words", [[__file__], ["--report", __file__]])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ENGINE", "rust", "python or c"),
        ("LEARN", "always", "online, 1 or 0"),
        ("TIMEOUT", "-1", "a number of seconds, 0 for no deadline"),
        ("ORDER", "rising", "any or rank or fixed"),
        ("PROGRESS", "fast", "thread or 0"),
        ("CHECK", "2", "1 or 0"),
        ("DISABLE", "maybe", "1 or 0"),
        ("CUDA_AWARE", "maybe", "1 or 0"),
    ],
)
def test_a_variable_that_cannot_be(
    name: str,
    value: str,
    expected: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No traceback: the program has not begun."""
    monkeypatch.setenv(f"HIERCOLL_{name}", value)
    with pytest.raises(SystemExit, match="2"):
        start(words)
    assert f"Error: HIERCOLL_{name}: expected {expected}, got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict alltoall", "tune alltoall", "bench alltoall"])
def test_ranges_without_a_size(command: str, tmp_path: Path) -> None:
    said = CliRunner().invoke(main, [*command.split(), "--sizes", "64K:8"])
    assert said.exit_code == 2 and "FROM at most TO" in said.output


def started(folder: Path, path: object, command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command in a folder, which finds modules in ``path``."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("nodes", "said"), [("1+1", "the 1 ranks of MPI_COMM_WORLD, got '1+1'"), ("x", "got 'x'")])
def test_virtual_nodes_of_other_ranks(nodes: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said when MPI begins, not in the first call, where each rank would show a traceback."""
    monkeypatch.setenv("HIERCOLL_NODES", nodes)
    (tmp_path / "program.py").write_text("from mpi4py import MPI; print('begun')")
    ran = started(tmp_path, ROOT, [sys.executable, "-m", "hiercoll", "program.py"])
    assert ran.returncode == 1 and not ran.stdout and "Traceback" not in ran.stderr
    assert "python -m hiercoll: rank 0: HIERCOLL_NODES: expected" in ran.stderr and said in ran.stderr
    monkeypatch.setenv("HIERCOLL_DISABLE", "1")
    assert started(tmp_path, ROOT, [sys.executable, "-m", "hiercoll", "program.py"]).stdout == "begun\n"


ALONE = """
try:
    from mpi4py import MPI
except ImportError:
    print("one rank alone")
"""


def test_no_program_takes_what_is_missing_for_a_missing_mpi(tmp_path: Path) -> None:
    """What a report needs is missing."""
    (tmp_path / "program.py").write_text(ALONE)
    code = "import sys; sys.modules['rich'] = None; from hiercoll.__main__ import start"
    command = [sys.executable, "-c", f"{code}; start(['--report', 'program.py'])"]
    ran = started(tmp_path, ROOT, command)
    assert ran.returncode == 1 and not ran.stdout
    assert "python -m hiercoll:" in ran.stderr and "rich" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize(("given", "status"), [("3", 3), ("'wrong'", 1), ("0", 0), ("", 0)])
def test_no_report_of_a_program_that_fails(given: str, status: int, tmp_path: Path) -> None:
    """It is said that there is none; ranks that go on are not waited for."""
    (tmp_path / "program.py").write_text(f"import sys; sys.exit({given})")
    command = [sys.executable, "-m", "hiercoll", "--report", "program.py"]
    ran = started(tmp_path, ROOT, command)
    assert ran.returncode == status
    assert (f"no report, since the program ends with exit status {status}" in ran.stderr) == (status > 0)


@pytest.mark.parametrize(
    ("version", "found"), [("__version__ = '3.1.6'", "3.1.6"), ("raise ModuleNotFoundError", "none")]
)
@pytest.mark.parametrize(
    "code",
    [
        "import hiercoll; hiercoll.alltoall",
        "from hiercoll.__main__ import start; start(['program.py'])",
        "from hiercoll.__main__ import start; start(['--report', 'program.py'])",
        "from hiercoll.cli import main; main(['tune', 'alltoall', '--output', 'table.json'])",
        "from hiercoll.cli import main; main(['show', 'alltoall', 'bruck', '--layout', '1x2'])",
    ],
)
def test_another_mpi4py(version: str, found: str, code: str, tmp_path: Path) -> None:
    """It is said what is missing; a command shows no traceback, and may need none."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(version)
    ran = started(tmp_path, f"{tmp_path}{os.pathsep}{ROOT}", [sys.executable, "-c", code])
    if "show" in code:
        assert ran.returncode == 0, ran.stderr
        return
    assert ran.returncode == 1 and not ran.stdout
    said = f"hiercoll needs mpi4py 4.0 or newer, and finds {found}: pip install 'mpi4py>=4.0'"
    assert said in " ".join(ran.stderr.split())
    assert "main" not in code or "Traceback" not in ran.stderr


OWN_NAMES = """
import atexit, inspect, os, pickle, sys
from mpi4py import MPI

class Own: pass

def source(): return inspect.getsource(source)

atexit.register(lambda: print("exit", pickle.loads(pickle.dumps(Own())).__class__ is Own))
os.chdir("/")
names = {name: globals()[name] for name in ("__package__", "__spec__", "__name__", "__doc__")}
print(sorted(globals()))
print(__file__, sys.argv, sys.path[0], names, type(__builtins__), type(__loader__), source())
print(sys.modules["__main__"].Own is Own)
"""


def both(folder: Path, options: list[str], program: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """A program by itself, and through hiercoll."""
    ways: tuple[list[str], ...] = ([], ["-m", "hiercoll"])
    return [started(folder, ROOT, [sys.executable, *options, *words, *program]) for words in ways]


def test_a_program_is_main_as_python_makes_it(tmp_path: Path) -> None:
    """Though it changes its folder: its file has its whole path."""
    (tmp_path / "own.py").write_text(OWN_NAMES)
    plain, ours = both(tmp_path, [], ["own.py", "word"])
    assert plain.returncode == ours.returncode == 0 and ours.stdout == plain.stdout
    assert plain.stdout.splitlines()[1].startswith(str(tmp_path / "own.py")) and plain.stdout.endswith("exit True\n")


def test_folders_archives_and_compiled_code_are_programs(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "__main__.py"
    file.write_text("print('runs', __name__)")
    shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path / "folder")
    zipapp.create_archive(tmp_path / "folder", tmp_path / "archive.pyz", "/usr/bin/env python3")
    py_compile.compile(str(file), str(tmp_path / "compiled.pyc"))
    for name in ("folder", "archive.zip", "archive.pyz", "compiled.pyc"):
        assert started(tmp_path, ROOT, [sys.executable, "-m", "hiercoll", name]).stdout == "runs __main__\n"


def test_too_few_arguments(tmp_path: Path) -> None:
    """A TypeError names mpi4py's method."""
    buffers = ["Allreduce", "Bcast", "Allgather", "Gather", "Reduce", "Reduce_scatter", "Ialltoall"]
    names = [*buffers, "bcast", "allgather", "Split"]
    words = f"for name in {names}:\n try: getattr(MPI.COMM_WORLD, name)(opp=1)\n except TypeError as e: print(e)"
    (tmp_path / "few.py").write_text(f"from mpi4py import MPI\n{words}")
    lines = started(tmp_path, ROOT, [sys.executable, "-m", "hiercoll", "few.py"]).stdout.splitlines()
    assert [line.partition("()")[0] for line in lines] == names


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no option -P before 3.11")
def test_a_safe_path_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "path.py").write_text("import sys\nprint(sys.path)")
    plain, ours = both(tmp_path, ["-P"], ["path.py"])
    assert ours.stdout == plain.stdout and str(tmp_path) not in plain.stdout


def test_what_is_no_python_is_told_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("x = = 1")
    plain, ours = both(tmp_path, [], ["wrong.py"])
    assert ours.returncode == plain.returncode == 1 and ours.stderr == plain.stderr
