"""What the processors do during a call: is it they or the links that set the time?

    scripts/lab run --layout 4x8 --env ENVIRONMENT -- python scripts/cpu.py alltoall 64,4K ALGORITHM...

Prints for native, the program's own call, and for public calls of each ALGORITHM (name:parameter=value,..), all
in a row, the time of a call, the share of it in which the host's processors were busy, and, per rank and call, the
time on a processor, the part of it in the system (messages, and interrupts that are counted there), and how often it
was given up, by itself (yielding, waiting) and by force.
"""

from __future__ import annotations

import argparse
import os
from resource import RUSAGE_SELF, getrusage
from time import perf_counter

import numpy as np
from mpi4py import MPI

from hiercoll.cli.common import CALLED, SizesType, parse_algorithm
from hiercoll.tables import Variant
from hiercoll.tools.measuring import Contest
from hiercoll.units import format_size

SECONDS = 2.0  # for each figure


def busy() -> float:
    """Seconds that all processors together have been busy since the start of the host."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("collective", choices=tuple(CALLED))
    parser.add_argument("sizes")
    parser.add_argument("algorithms", nargs="*")
    args = parser.parse_args()
    comm, processors = MPI.COMM_WORLD, os.cpu_count() or 1
    if comm.rank == 0:
        print(
            "| size | algorithm | us | busy | us on a processor | in the system | given up | by force |\n"
            "|---|---|---|---|---|---|---|---|"
        )
    for size in SizesType().convert(args.sizes, None, None):
        for text in ("native", *args.algorithms):
            contest = Contest(comm, args.collective, [Variant(*parse_algorithm(text))], size)
            call, once = contest.call(0), contest.look(0)
            runs = max(5, int(SECONDS / once))
            comm.Barrier()
            before, usage, begin = busy(), getrusage(RUSAGE_SELF), perf_counter()
            for _ in range(runs):
                call()
            after, took = getrusage(RUSAGE_SELF), perf_counter() - begin
            share = (busy() - before) / took / processors
            mine = [
                (after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime) * 1e6,
                (after.ru_stime - usage.ru_stime) * 1e6,
                after.ru_nvcsw - usage.ru_nvcsw,
                after.ru_nivcsw - usage.ru_nivcsw,
            ]
            total = comm.reduce(np.array(mine))
            if comm.rank == 0:
                used, inside, given, forced = total / comm.size / runs
                print(
                    f"| {format_size(size)} | {text} | {took / runs * 1e6:.0f} | {share:.0%} | {used:.0f} "
                    f"| {inside / used:.0%} | {given:.1f} | {forced:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
