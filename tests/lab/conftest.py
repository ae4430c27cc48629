"""Runs scripts/lab. HIERCOLL_LAB_ENV names the virtual environment whose MPI library the
jobs use; without it, the one that runs pytest.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "lab")]
ENVIRONMENT = Path(os.environ.get("HIERCOLL_LAB_ENV", sys.prefix))
LIBRARIES = {"openmpi": "ompi_info", "impi": "impi_info", "mpich": "mpichversion"}


def library() -> str | None:
    """The MPI library of the environment."""
    return next((name for name, program in LIBRARIES.items() if (ENVIRONMENT / "bin" / program).exists()), None)


def start(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, temporary files in ``folder``, as from a
    terminal: whatever runs these tests in the background may have made them deaf to Ctrl-C."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Wait for a command's end; it is killed if that takes too long."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"no end after {timeout:.0f} s:\n{output}\n{errors}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


class Lab:
    """Runs scripts/lab with temporary files in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, action: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return start([*SCRIPT, action, *arguments], self.folder, **variables)

    def run(self, action: str, *arguments: str, timeout: float = 60, **variables: str) -> str:
        """What a command that must succeed prints."""
        done = self.call(action, *arguments, timeout=timeout, **variables)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def call(
        self, action: str, *arguments: str, timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return finish(self.start(action, *arguments, **variables), timeout)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a name short enough for the sockets of MPI libraries; pytest's are too long.

    The "pe" is on purpose: Open MPI 5 takes it for a modifier where a path stands in an argument of --map-by."""
    path = Path(tempfile.mkdtemp(prefix="lab-pe-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def abilities() -> str:
    """What `lab check` says."""
    return subprocess.run([*SCRIPT, "check"], capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def lab(abilities: str, short_path: Path) -> Lab:
    if "the lab can run here" not in abilities:
        pytest.skip(f"the lab cannot run here: {abilities.strip()}")
    return Lab(short_path)


@pytest.fixture
def mpi_lab(lab: Lab) -> Lab:
    if library() is None:
        pytest.skip(f"{ENVIRONMENT} has no MPI library; set HIERCOLL_LAB_ENV")
    return lab


@pytest.fixture
def slurm_lab(mpi_lab: Lab, abilities: str) -> Lab:
    if "Slurm can run in it" not in abilities:
        pytest.skip(f"no Slurm here: {abilities.strip()}")
    return mpi_lab


def marked_processes(mark: str) -> list[str]:
    """Command lines of the machine's processes in which ``mark`` occurs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            found.append(line)
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
