"""Our fluid evaluator beside SimGrid's: the same schedules on the same machine.

    python scripts/simgrid_check.py [--layout 8x8 ..] [--record docs/simgrid.jsonl]

Needs smpirun, SimGrid's (Debian: libsimgrid-dev); without it, says so and succeeds. The record has a line about the
run, and one for each schedule: its seconds by both, and by how much ours are more. Exit status 1 if that is more than
``MOST`` anywhere.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hiercoll.algorithms import get_algorithm
from hiercoll.model import simgrid
from hiercoll.model.fluid import flow_seconds
from hiercoll.model.machine import Machine
from hiercoll.topology import Topology, parse_layout

LAYOUTS = ("8x8", "8x8:cyclic", "16x4", "5+3+9+16+1+20+10", "8x8:random=1")
# Slow, so that SimGrid, which prints six digits after the point, says as much as we do. Between nodes a rank is held up
# by its own links where it is alone, by its node's where three others send beside it.
MACHINE = simgrid.star(latency=0.1, byte=1e-6, adapter=0.35e-6)
BLOCK = 100_000  # bytes: as long as a latency
MOST = 0.002


class Case(NamedTuple):
    """A schedule, by name; parameters that are not given are the algorithm's."""

    collective: str
    algorithm: str
    params: dict[str, int | str] = {}  # noqa: RUF012 never changed

    def __str__(self) -> str:
        return " ".join([self.collective, self.algorithm, *(f"{k}={v}" for k, v in self.params.items())])


CASES = (
    Case("alltoall", "pairwise"),
    Case("alltoall", "scatter_destination"),
    Case("alltoall", "bruck"),
    Case("alltoall", "hierarchical"),
    Case("alltoall", "grouped", {"form": "lane"}),
    Case("alltoall", "grouped", {"form": "share"}),
    Case("alltoall", "grouped", {"form": "leader", "leaders": 2}),
    Case("alltoall", "grouped", {"form": "share", "inner": "overlap", "flows": 4}),
    Case("allgather", "ring"),
    Case("allgather", "bruck"),
    Case("allgather", "node_aware"),
    Case("allgather", "hierarchical"),
    Case("allreduce", "ring"),
)


def replay(program: str, traces: list[str], platform: str) -> float:
    """SimGrid's seconds. Raises RuntimeError, with what it printed, where it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "platform.xml").write_text(platform)
        (folder / "hosts").write_text("".join(f"r{rank}\n" for rank in range(len(traces))))
        paths = [folder / f"{rank}.txt" for rank in range(len(traces))]
        for path, text in zip(paths, traces, strict=True):
            path.write_text(text)
        (folder / "traces").write_text("".join(f"{path}\n" for path in paths))
        options = [f"--cfg={key}:{value}" for key, value in simgrid.OPTIONS.items()]
        command = [program, "-np", str(len(traces)), "-platform", "platform.xml", "-hostfile", "hosts", *options]
        job = subprocess.run(
            [*command, "-replay", "traces"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    found = re.findall(r"Simulation time ([0-9.e+-]+)", job.stdout)
    if job.returncode or not found:
        raise RuntimeError(f"smpirun: exit status {job.returncode}: {job.stdout[-2000:]}")
    return max(map(float, found))


def compared(program: str, case: Case, topology: Topology, machine: Machine = MACHINE) -> tuple[float, float]:
    """Seconds by us, and by SimGrid."""
    schedules = get_algorithm(case.collective, case.algorithm).system(topology, case.params).schedules()
    block = -(-BLOCK // schedules[0].blocks)
    ours = flow_seconds(schedules, topology, block, machine)
    texts = list(simgrid.traces(schedules, topology, block, machine))
    return ours, replay(program, texts, simgrid.platform(topology, machine))


def rows(program: str, layouts: list[str]) -> Iterator[dict[str, object]]:
    """What is compared, as it comes."""
    for layout in layouts:
        topology = parse_layout(layout)
        for case in CASES:
            entry = get_algorithm(case.collective, case.algorithm)
            if entry.refusal(topology, case.params) is not None:
                continue
            ours, theirs = compared(program, case, topology)
            more = round(ours / theirs - 1, 6)
            yield {"schedule": str(case), "layout": layout, "fluid": round(ours, 6), "simgrid": theirs, "more": more}


def version(program: str) -> str:
    """SimGrid's."""
    said = subprocess.run([program, "-version"], capture_output=True, text=True).stdout
    found = re.search(r"[\d.]+", said)
    return found[0] if found else "unknown"


def main() -> int:
    """Compare and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", "-l", action="append", help=f"instead of {', '.join(LAYOUTS)}")
    parser.add_argument("--record", type=Path, help="write the record to this file (JSON Lines)")
    given = parser.parse_args()
    program = shutil.which("smpirun")
    if program is None:
        print("not compared with SimGrid: there is no smpirun (Debian: apt-get install libsimgrid-dev)")
        return 0
    about = {"date": time.strftime("%Y-%m-%d"), "simgrid": version(program)}
    found = []
    for row in rows(program, given.layout or list(LAYOUTS)):
        found.append(row)
        print(
            f"{row['more']:+8.2%}  {row['fluid']:10.4f} s  {row['simgrid']:10.4f} s  {row['layout']}  {row['schedule']}"
        )
    if given.record:
        given.record.write_text("".join(json.dumps(each) + "\n" for each in [about, *found]))
    off = sorted(abs(float(str(row["more"]))) for row in found)
    print(f"{len(off)} schedules: median {off[len(off) // 2]:.2%}, most {off[-1]:.2%} off SimGrid {about['simgrid']}")
    return int(off[-1] > MOST)


if __name__ == "__main__":
    sys.exit(main())
