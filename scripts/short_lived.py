"""What a communicator costs that lives for three calls of 8 bytes, beside one of mpi4py's.

    mpiexec -n 2 python scripts/short_lived.py [--turns 100]

In each turn every subject makes 50 communicators one after the other by `Dup`, and by `Split`, calls Allgather,
Alltoall and Allreduce on each, and frees it: by mpi4py alone (twice), by a drop-in communicator, and by functions.
Prints the least and the median time per communicator, and the ratio to mpi4py's, the median over turns with its
quartiles. No set-up is due in so few calls, and nothing should be known from earlier jobs: set HIERCOLL_LEARNED to a
new folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.statistics import quartiles
from hiercoll.units import format_time

WORLD = MPI.COMM_WORLD
OURS = hiercoll.Intracomm(WORLD)
ROW = 50
ONE, MANY = np.zeros(1), np.zeros(WORLD.size)
SUM, EVERYONE = np.empty(1), np.empty(WORLD.size)
MAKERS: dict[str, Callable[[Any], Any]] = {
    "Dup": lambda comm: comm.Dup(),
    "Split": lambda comm: comm.Split(0, comm.rank),
}


def by_methods(comm: Any) -> None:
    """Three calls."""
    comm.Allgather(ONE, EVERYONE)
    comm.Alltoall(MANY, EVERYONE)
    comm.Allreduce(ONE, SUM)


def by_functions(comm: Any) -> None:
    """The same."""
    hiercoll.allgather(comm, ONE, EVERYONE)
    hiercoll.alltoall(comm, MANY, EVERYONE)
    hiercoll.allreduce(comm, ONE, SUM)


SUBJECTS: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "mpi4py": (WORLD, by_methods),
    "mpi4py again": (WORLD, by_methods),
    "drop-in": (OURS, by_methods),
    "functions": (WORLD, by_functions),
}


def measure(make: Callable[[Any], Any], turns: int) -> dict[str, list[float]]:
    """Seconds per communicator, by turns."""
    taken: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for _ in range(turns):
        for name, (parent, call) in SUBJECTS.items():
            WORLD.Barrier()
            since = perf_counter()
            for _ in range(ROW):
                made = make(parent)
                call(made)
                made.Free()
            taken[name].append((perf_counter() - since) / ROW)
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100)
    turns = parser.parse_args().turns
    by_functions(WORLD)  # as a program does: ranks have agreed there
    for how, make in MAKERS.items():
        measure(make, 2)
        taken = measure(make, turns)
        for name, values in taken.items():
            ratios = [value / base for value, base in zip(values, taken["mpi4py"], strict=True)]
            low, middle, high = quartiles(ratios)
            if WORLD.rank == 0:
                words = f"least {format_time(min(values)):>8}  median {format_time(median(values)):>8}"
                print(f"{how:6} {name:13} {words}  ratio {middle:.2f} ({low:.2f} .. {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
