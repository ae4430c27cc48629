"""What it takes to copy bytes out of and into an MPI datatype: hiercoll's compiled engine, MPI and NumPy.

    python scripts/packing.py [--json docs/packing.jsonl]

One process. A vector of doubles, 1 MiB in all: runs of so many bytes, each a multiple of that from one to the next.
Out of it (to bytes one after the other) and into it, by hiercoll's compiled engine (`runtime/_regions.c`), by MPI_Pack
and MPI_Unpack, and by NumPy's copy of a strided view. They take turns in random order; reported is the median of a
turn's copies, each the mean of some, with its quartiles.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.memory.regions import Block
from hiercoll.runtime import compiled
from hiercoll.runtime.datatypes import element_of
from hiercoll.runtime.specifications import Apart, copying
from hiercoll.statistics import quartiles
from hiercoll.tools.bench import provenance
from hiercoll.units import format_size, format_time

RUNS, STRIDES, TOTAL = (8, 16, 64, 256, 1024, 4096), (2, 8), 1 << 20
TURNS, COPIES = 101, 4
Copy = Callable[[], object]


def subjects(run: int, stride: int, outward: bool) -> tuple[dict[str, Copy], Callable[[], None]]:
    """Who copies, and what frees the datatype."""
    number = TOTAL // run
    datatype = MPI.DOUBLE.Create_vector(number, run // 8, stride * run // 8).Commit()
    random = np.random.default_rng(run)
    apart = random.integers(0, 256, number * stride * run, np.uint8)
    packed = random.integers(0, 256, TOTAL, np.uint8)
    blocks = Apart(MPI.Get_address(apart), apart.nbytes, (Block(0, 1, element_of(datatype)),), [datatype])
    view, flat = apart.view(f"V{run}")[::stride], packed.view(f"V{run}")
    pack: Copy = partial(datatype.Pack, apart, packed, 0, MPI.COMM_SELF)
    unpack: Copy = partial(datatype.Unpack, packed, 0, apart, MPI.COMM_SELF)
    found: dict[str, Copy] = {
        "hiercoll": copying(blocks, packed, outward=outward),
        "MPI": pack if outward else unpack,
        "NumPy": partial(np.copyto, flat, view) if outward else partial(np.copyto, view, flat),
    }
    return _checked(found, apart, packed), datatype.Free


def _checked(found: dict[str, Copy], apart: Any, packed: Any) -> dict[str, Copy]:
    """All of them leave the same bytes."""
    results = []
    before = apart.copy(), packed.copy()
    for copy in found.values():
        apart[:], packed[:] = before
        copy()
        results.append((apart.copy(), packed.copy()))
    for result in results[1:]:
        np.testing.assert_array_equal(result[0], results[0][0])
        np.testing.assert_array_equal(result[1], results[0][1])
    return found


def measure(copies: dict[str, Copy]) -> dict[str, tuple[float, float, float]]:
    """Quartiles of the seconds of a copy."""
    times: dict[str, list[float]] = {name: [] for name in copies}
    order = Random(0)
    for _ in range(TURNS):
        for name in order.sample(list(copies), len(copies)):
            copy = copies[name]
            copy()
            begin = perf_counter()
            for _ in range(COPIES):
                copy()
            times[name].append((perf_counter() - begin) / COPIES)
    return {name: quartiles(values) for name, values in times.items()}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the records to this file (JSON Lines)")
    arguments = parser.parse_args()
    engine, why = compiled.load()
    if engine is None:
        parser.error(f"there is no compiled engine: {why}")
    about = {"benchmark": "packing", "bytes": TOTAL, **provenance(MPI.COMM_SELF, hiercoll.get_topology(MPI.COMM_SELF))}
    for outward in (True, False):
        for run in RUNS:
            for stride in STRIDES:
                copies, free = subjects(run, stride, outward)
                result = measure(copies)
                free()
                way = "out of" if outward else "into"
                each = "  ".join(
                    f"{name} {format_time(middle)} ({format_time(low)} .. {format_time(high)})"
                    for name, (low, middle, high) in result.items()
                )
                ratio = result["MPI"][1] / result["hiercoll"][1]
                print(f"{way:6} {format_size(run):>6} x{stride}  {each}  MPI / hiercoll {ratio:.2f}", flush=True)
                if arguments.json:
                    seconds = {name: {"q1": q[0], "median": q[1], "q3": q[2]} for name, q in result.items()}
                    record = {"way": way, "run": run, "stride": stride, "seconds": seconds, **about}
                    with arguments.json.open("a") as file:
                        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
