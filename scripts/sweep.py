"""The long rest of the tests: what `make test` has no time for, one step after the other, and a record of it.

    python scripts/sweep.py MPICH OPENMPI IMPI [--record docs/sweep.jsonl] [--only TEXT]

The arguments are environments with hiercoll and an MPI library each; the first has the tests' tools, too. A step that
fails does not keep the next ones from running. The record has a line per step: its command, its exit status, the
seconds that it took and its last line, with the commit and the versions. Exit status 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

HERE = Path(__file__).parent.parent
SOME_LAYOUTS = "-l 2x4 -l 3x5:cyclic -l 5+3 -l 1+4+2:random -l 4x4"


class Step(NamedTuple):
    """A command (its first word lies in an environment's bin), and what is set for it."""

    environment: Path
    command: str
    settings: Mapping[str, str] = MappingProxyType({})

    @property
    def words(self) -> str:
        """The command with its settings, free of folders."""
        settings = "".join(f"{key}={Path(value).name} " for key, value in self.settings.items())
        return f"{self.environment.name}: {settings}{self.command}"


def steps(mpich: Path, openmpi: Path, impi: Path) -> Iterator[Step]:
    """All steps."""
    yield Step(mpich, "python -m pytest -q -n auto tests/unit")
    yield Step(mpich, "hiercoll verify --all")
    yield Step(mpich, "hiercoll verify --all --layout 64x4")
    yield Step(mpich, "hiercoll verify --all --accumulate float32")
    yield Step(mpich, f"hiercoll verify --combinations {SOME_LAYOUTS}")
    yield Step(mpich, "python tests/mpi/launch.py --ranks 3,4,5,6,7,8 --timeout 3600")
    yield Step(mpich, "python tests/mpi/launch.py --ranks 2,13 --timeout 3600", {"HIERCOLL_TEST_LARGE": "1"})
    yield Step(mpich, "python tests/mpi/launch.py --ranks 1,2,4,8 --timeout 3600", {"HIERCOLL_ENGINE": "python"})
    for environment in (mpich, openmpi):
        tests = "python tests/mpi/launch.py --ranks 2,3 --timeout 3600 --no-programs -k test_what_the_library_gives"
        yield Step(environment, tests, {"HIERCOLL_TEST_EXAMPLES": "2000"})
    yield Step(mpich, "python scripts/sanitize.py --ranks 1,2,3")
    yield Step(openmpi, "python tests/mpi/launch.py --ranks 1,3,4,5,6,7,8,13 --timeout 3600")
    yield Step(openmpi, "python tests/mpi/launch.py --ranks 2,5 --timeout 3600", {"HIERCOLL_ENGINE": "python"})
    yield Step(openmpi, "python scripts/sanitize.py --ranks 2")
    yield Step(impi, "python tests/mpi/launch.py --ranks 1,2,4,7 --timeout 3600")
    yield Step(impi, "python tests/mpi/launch.py --ranks 2,4 --timeout 3600", {"HIERCOLL_ENGINE": "python"})
    for environment in (mpich, openmpi):
        tests = "python tests/mpi4py/launch.py --timeout 3600 --ranks"
        yield Step(environment, f"{tests} 1,2,3,4,5")
        yield Step(environment, f"{tests} 5", {"HIERCOLL_NODES": "3+2:cyclic"})
        yield Step(environment, f"{tests} 8 --arrays ArrayArray,ArrayNumPy")  # with all kinds it is more than an hour
        yield Step(environment, f"{tests} 8 --arrays ArrayNumPy", {"HIERCOLL_NODES": "2x4:cyclic"})
        yield Step(environment, "python -m pytest -q -rs tests/faults tests/instruments")
    yield Step(mpich, "python scripts/simgrid_check.py --record docs/simgrid.jsonl")
    for environment in (mpich, openmpi, impi):
        yield Step(mpich, "python -m pytest -q -rs tests/lab", {"HIERCOLL_LAB_ENV": str(environment.resolve())})


def run(step: Step) -> tuple[int, float, str]:
    """Exit status, seconds, and the last line; all output goes on to the terminal."""
    program, *arguments = step.command.split()
    command, begin, last = [str(step.environment.absolute() / "bin" / program), *arguments], time.monotonic(), ""
    settings = {**os.environ, **step.settings}
    job = subprocess.Popen(
        command, cwd=HERE, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert job.stdout is not None
    for line in job.stdout:
        sys.stdout.write(line)
        last = line.strip() or last
    return job.wait(), time.monotonic() - begin, last


def versions(environments: list[Path]) -> dict[str, str]:
    """Of Python, mpi4py and the MPI library, by environment."""
    code = "import platform, mpi4py; from mpi4py import MPI; name, number = MPI.get_vendor()\n"
    code += "print(name, '.'.join(map(str, number)), 'mpi4py', mpi4py.__version__, 'Python', platform.python_version())"
    found = {}
    for each in environments:
        told = subprocess.run([str(each / "bin/python"), "-c", code], capture_output=True, text=True, check=True)
        found[each.name] = told.stdout.strip()
    return found


def main() -> int:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs=3, type=Path)
    parser.add_argument("--record", type=Path, help="append the record to this file (JSON Lines)")
    parser.add_argument("--only", default="", help="the steps whose words contain this")
    options = parser.parse_args()
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    about = {"commit": told.stdout.strip(), "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    records: list[dict[str, object]] = []

    def note(record: dict[str, object]) -> None:
        if options.record:
            with options.record.open("a") as file:
                file.write(json.dumps(record) + "\n")

    note(about | versions(options.environments))
    for step in steps(*options.environments):
        if options.only in step.words:
            print(f"==== {step.words}", flush=True)
            code, seconds, last = run(step)
            records.append({"step": step.words, "status": code, "seconds": round(seconds), "last": last[:200]})
            note(records[-1])
    for record in records:
        print("ok    " if record["status"] == 0 else "FAILED", f"{record['seconds']:6} s ", record["step"])
    return int(any(record["status"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
