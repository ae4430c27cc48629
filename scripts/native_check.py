"""Is what hiercoll's benchmarks call native what a program's own loop takes?

    mpiexec -n 8 python scripts/native_check.py [--json FILE] [--sizes 8,512,4K,32K]

``native`` of `hiercoll.tools.measuring`, which bench and tune use, and a loop written by hand around ``comm.Alltoall``
or ``comm.Allgather`` take turns on the same arrays, in random order, each twice. Says by how much the two differ, with
95 % intervals over turns, and by how much each differs from itself; they agree where the interval of the two
reaches into that of one with itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.cli.common import SizesType
from hiercoll.collectives import get_collective
from hiercoll.statistics import ratio_interval
from hiercoll.tables import NATIVE_VARIANT
from hiercoll.tools.bench import CONTROL_VARIANT, provenance
from hiercoll.tools.measuring import Contest
from hiercoll.units import format_size

TURNS, SECONDS = 40, 4.0


def loop_single(comm: MPI.Intracomm, call: Callable[[Any, Any], None], send: Any, recv: Any, calls: int) -> float:
    """As osu_alltoall times it: the median of single calls after a barrier, the slowest rank's."""
    times = np.empty(calls)
    for turn in range(calls):
        comm.Barrier()
        begin = perf_counter()
        call(send, recv)
        times[turn] = perf_counter() - begin
    comm.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
    return float(np.median(times))


def loop_row(comm: MPI.Intracomm, call: Callable[[Any, Any], None], send: Any, recv: Any, calls: int) -> float:
    """A row of calls."""
    comm.Barrier()
    begin = perf_counter()
    for _ in range(calls):
        call(send, recv)
    times = np.array([(perf_counter() - begin) / calls])
    comm.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
    return float(times[0])


def compare(comm: MPI.Intracomm, collective: str, size: int, timing: str) -> dict[str, Any]:
    """Ratios of the loop's time to that of the benchmark, and of each to itself, with intervals; seconds."""
    contest = Contest(comm, collective, [NATIVE_VARIANT, CONTROL_VARIANT], size)
    call = getattr(comm, get_collective(collective).native)
    loop, calls = {"single": loop_single, "row": loop_row}[timing], contest.calls(timing)
    subjects: dict[str, Callable[[], float]] = {
        "bench": lambda: contest.times([(0, timing)], 1)[0][0],
        "bench again": lambda: contest.times([(1, timing)], 1)[0][0],
        "loop": lambda: loop(comm, call, contest.send, contest.recv, calls),
        "loop again": lambda: loop(comm, call, contest.send, contest.recv, calls),
    }
    turns = max(8, min(TURNS, int(SECONDS / (8 * contest.cost(0, timing)))))
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order = Random(size)
    for _ in range(turns):
        for name in order.sample(list(subjects), len(subjects)):
            times[name].append(subjects[name]())
    contest.close()
    ratios = {}
    for above, below in (("loop", "bench"), ("loop", "loop again"), ("bench", "bench again")):
        ratios[f"{above} / {below}"] = ratio_interval(times[above], times[below])
    (_, low, high), *own = ratios.values()
    return {
        "collective": collective,
        "size": size,
        "timing": timing,
        "seconds": {name: median(values) for name, values in times.items()},
        "turns": turns,
        "ratios": ratios,
        "agree": any(low <= upper and lower <= high for _, lower, upper in own),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="append records (JSON Lines)")
    parser.add_argument("--sizes", default="8,512,4K,32K")
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    about = {"benchmark": "native check", **provenance(comm, hiercoll.get_topology(comm))}
    for collective in ("alltoall", "allgather"):
        for size in SizesType().convert(arguments.sizes, None, None):
            for timing in ("single", "row"):
                found = compare(comm, collective, size, timing)
                if comm.rank:
                    continue
                words = "  ".join(f"{name} {a:.2f} ({b:.2f}-{c:.2f})" for name, (a, b, c) in found["ratios"].items())
                agree = "agree" if found["agree"] else "DIFFER"
                print(f"{collective:>9} {format_size(size):>4} {timing:>6}  {words}  {agree}", flush=True)
                if arguments.json:
                    with arguments.json.open("a") as file:
                        file.write(json.dumps({**found, **about}) + "\n")


if __name__ == "__main__":
    main()
