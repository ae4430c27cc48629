"""Commands with a time limit, after which nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_check.results import FAILED, PASSED, TIMEOUT

MARK = "HIERCOLL_CHECK_ROW"  # a variable that tells what belongs to a command
# Prefixes of what schedulers set. With it, mpiexec would start ranks by the scheduler, as steps that may have to wait
# or get no GPU, and a rank without mpiexec would take itself for one of the scheduler's.
SCHEDULERS = ("SLURM_", "PMI_", "PMIX_", "PALS_", "PBS_", "LSB_", "JSM_", "FLUX_", "SGE_", "COBALT_")
PATIENCE = 5.0  # seconds for killed processes to end: one may be held up in a driver


class Outcome(NamedTuple):
    """How a command ended."""

    status: str
    seconds: float
    output: str


def run(command: Sequence[str], folder: Path, settings: Mapping[str, str], limit: float, log: Path) -> Outcome:
    """Run a command in a folder. Its output goes to a file: processes that stay on would hold a pipe open."""
    begin = time.monotonic()
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with log.open("w", encoding="utf-8") as out:
        job = subprocess.Popen(
            command,
            cwd=folder,
            env={**unscheduled(os.environ), **settings, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = FAILED if job.wait(limit) else PASSED
        except subprocess.TimeoutExpired:
            status = TIMEOUT
        finally:  # also when this program itself is told to end
            end(mark)
            job.wait()
    seconds = time.monotonic() - begin
    output = log.read_text(encoding="utf-8", errors="replace")
    if status == TIMEOUT:
        output += f"\nno end after {limit:.0f} s\n"
    return Outcome(status, seconds, output)


def unscheduled(environment: Mapping[str, str]) -> dict[str, str]:
    """The same without the scheduler's variables: all ranks are on this host, started by mpiexec itself."""
    return {name: value for name, value in environment.items() if not name.startswith(SCHEDULERS)}


def end(mark: str) -> None:
    """Kill what a command has started and is still there: ranks in groups of their own, and those whose mpiexec is
    gone, as after a time limit of tests/mpi/launch.py. They would hold a GPU."""
    deadline, calm = time.monotonic() + PATIENCE, 0
    while calm < 3 and time.monotonic() < deadline:  # one that begins to run another program has no environment then
        left = started(mark)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        calm = 0 if left else calm + 1
        time.sleep(0.02)


def started(mark: str) -> list[int]:
    """The processes with this mark in their environment, which all that a command starts inherit."""
    found, entry = [], f"{MARK}={mark}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if entry in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def last_lines(output: str, number: int = 40) -> tuple[str, ...]:
    """The end of an output, for the record."""
    return tuple(line[:300] for line in output.replace("\0", "").strip().splitlines()[-number:])
