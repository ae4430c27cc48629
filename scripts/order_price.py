"""What an order, and a wider type to accumulate in, cost allreduce: calls that ask for them, in turns.

    scripts/lab run -l 4x4 --env .venv/mpich -- python scripts/order_price.py [--sizes 8,4K,256K] [--json FILE]

In each turn every subject is called once after a barrier, in random order; the time of a call is the longest of all
ranks. Subjects reduce vectors of as many elements: float32 in any order, in that of the ranks and by the fixed tree;
and float16, accumulated in float32. "auto" chooses by the table that HIERCOLL_TABLE names. Sizes are bytes of the
float32 vector. Prints medians in microseconds, and ratios to the first subject, the median over turns with its 95 %
interval; the last subject is the first one again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.statistics import ratio_interval
from hiercoll.tools.bench import provenance
from hiercoll.units import format_size, parse_size

COMM = MPI.COMM_WORLD
FEWEST, SECONDS = 12, 2.0  # turns, and for each size


def subjects(size: int) -> dict[str, Callable[[], object]]:
    """What is called, by name."""
    single = np.random.default_rng(COMM.rank).random(max(size // 4, 1), np.float32)
    half, into, into_half = single.astype(np.float16), np.empty_like(single), np.empty(single.shape, np.float16)

    def by(order: str) -> Callable[[], object]:
        return lambda: hiercoll.allreduce(COMM, single, into, order=order)  # type: ignore[arg-type]

    return {
        "any": by("any"),
        "rank": by("rank"),
        "fixed": by("fixed"),
        "float16 in float32": lambda: hiercoll.allreduce(COMM, half, into_half, order="any", accumulate="float32"),
        "any again": by("any"),
    }


def measure(size: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, turn by turn."""
    calls, taken, turns = subjects(size), dict[str, list[float]](), Random(size)
    for name, call in calls.items():
        taken[name] = []
        for _ in range(3):
            call()
    while True:
        for name in turns.sample(list(calls), len(calls)):
            COMM.Barrier()
            begin = time.perf_counter()
            calls[name]()
            taken[name].append(COMM.allreduce(time.perf_counter() - begin, op=MPI.MAX))
        if len(taken["any"]) >= FEWEST and sum(map(sum, taken.values())) > SECONDS:
            return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="8,256,4K,32K,256K,1M")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = provenance(COMM, hiercoll.get_topology(COMM))
    for size in map(parse_size, args.sizes.split(",")):
        taken = measure(size)
        if COMM.rank:
            continue
        ratios = {name: ratio_interval(seconds, taken["any"]) for name, seconds in taken.items()}
        cells = [f"{name} {median(seconds) * 1e6:.0f} ({ratios[name][0]:.2f})" for name, seconds in taken.items()]
        print(f"{format_size(size):>5}: {'  '.join(cells)}", flush=True)
        if args.json:
            line = {"size": size, "seconds": {name: median(each) for name, each in taken.items()}, "ratios": ratios}
            with args.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | about) + "\n")


if __name__ == "__main__":
    main()
