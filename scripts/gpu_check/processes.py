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


class Outcome(NamedTuple):
    """How a command ended."""

    status: str
    seconds: float
    output: str


def run(command: Sequence[str], folder: Path, settings: Mapping[str, str], limit: float, log: Path) -> Outcome:
    """Run a command in a folder. Its output goes to a file: processes that stay on would hold a pipe open."""
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        job = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **settings},
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
            end(job.pid)
            job.wait()
    seconds = time.monotonic() - begin
    output = log.read_text(encoding="utf-8", errors="replace")
    if status == TIMEOUT:
        output += f"\nno end after {limit:.0f} s\n"
    return Outcome(status, seconds, output)


def end(leader: int) -> None:
    """Kill a process group, and the children that have made groups of their own, as those of mpiexec do."""
    children = descendants(leader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def descendants(process: int) -> list[int]:
    """The children of a process, and theirs."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    found = [process]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def last_lines(output: str, number: int = 40) -> tuple[str, ...]:
    """The end of an output, for the record."""
    return tuple(line[:300] for line in output.replace("\0", "").strip().splitlines()[-number:])
