"""Instructions that a cached call executes, which do not depend on how busy the machine is.

    python scripts/instructions.py [--json docs/overhead.jsonl]

Needs valgrind. One rank calls each subject ten thousand times under callgrind, and again with twice as many calls;
the difference is what the calls execute. One rank moves no message and waits for nobody: what is counted is the way
from the arguments to the plan, and a copy of 64 bytes. ``comm.Alltoall`` is mpi4py's own call with the MPI library's
part.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
CALLS = 10_000
SUBJECTS = {
    "comm.Alltoall": "comm.Alltoall(send, recv)",
    "alltoall": "hiercoll.alltoall(comm, send, recv, algorithm='pairwise')",
    "alltoall, parameters named": "hiercoll.alltoall(comm, send, recv, algorithm='scatter_destination', window=2)",
    "alltoall, a new result": "hiercoll.alltoall(comm, send, algorithm='pairwise')",
    "alltoall, native": "hiercoll.alltoall(comm, send, recv, algorithm='native')",
    "alltoallv": "hiercoll.alltoallv(comm, [send, counts], [recv, counts], algorithm='pairwise')",
    "plan": "plan()",
}
PROGRAM = """
import numpy as np, hiercoll
from mpi4py import MPI
comm = MPI.COMM_WORLD
send, recv, counts = np.arange(8), np.empty(8, int), np.array([8])
plan = hiercoll.alltoall_init(comm, send, recv, algorithm="pairwise")
for _ in range({calls}):
    {call}
"""


def counted(call: str, calls: int) -> int:
    """Instructions of a program that makes so many calls."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-c"]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(HERE)}
    program = PROGRAM.format(calls=calls, call=call)
    told = subprocess.run([*command, program], env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"Collected\s*:\s*(\d+)", told.stderr)
    assert found is not None, told.stderr
    return int(found[1])


def main() -> None:
    """Count, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the record to this file (JSON Lines)")
    options = parser.parse_args()
    figures = {}
    for subject, call in SUBJECTS.items():
        figures[subject] = round((counted(call, 2 * CALLS) - counted(call, CALLS)) / CALLS)
        print(f"{subject:28} {figures[subject]:7}", flush=True)
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    code = "import hiercoll, json; print(json.dumps(hiercoll.config()))"
    about = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    record = {"timing": "instructions", "commit": told.stdout.strip(), "date": time.strftime("%Y-%m-%d"), **about}
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps({**record, "python": sys.version.split()[0], "instructions": figures}) + "\n")


if __name__ == "__main__":
    main()
