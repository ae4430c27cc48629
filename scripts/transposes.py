"""Transposes of distributed arrays, as FFT codes make them: `Alltoallw` on parts of an array, beside hiercoll's.

Run under MPI. An N x N x N array of doubles lies in slabs along its first axis, and comes to lie in slabs along its
second; each rank's part for another one is a subarray type, as mpi4py-fft makes them. Each call is made by itself after
a barrier, in turns with the others, in another order each time, after one of its own kind, as in a program: a call that
loses data leaves TCP connections slow for the next one. Its time is that of the slowest rank. Ranks that share cores
are moved between them from turn to turn, and while "auto" learns, too: what is the fastest depends on who shares one.
Prints a line of JSON per N: medians in seconds, native's over each, and the interval of the middle half of native's
over its own repetition ("control").

    mpiexec -n 16 python scripts/transposes.py --sizes 32,64,128,256 --algorithm aggregate
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.tools.bench import provenance
from hiercoll.tools.cores import Cores

WORLD = MPI.COMM_WORLD
STAY = 10  # calls of "auto" before ranks are moved again: about as many as a turn has
Array = Any


def parts(number: int) -> list[tuple[int, int]]:
    """First index and length of each rank's part of an axis."""
    bounds = [number * rank // WORLD.size for rank in range(WORLD.size + 1)]
    return [(low, high - low) for low, high in pairwise(bounds)]


def subarrays(array: Array, axis: int) -> list[MPI.Datatype]:
    """A type for each rank's part of an array along an axis."""
    found = []
    for first, length in parts(array.shape[axis]):
        sizes, starts = list(array.shape), [0] * array.ndim
        sizes[axis], starts[axis] = length, first
        found.append(MPI.DOUBLE.Create_subarray(array.shape, sizes, starts).Commit())
    return found


def slowest(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    WORLD.Barrier()
    begin = perf_counter()
    call()
    return float(WORLD.allreduce(perf_counter() - begin, op=MPI.MAX))


def measure(number: int, algorithms: list[str], seconds: float, first: int) -> dict[str, Any]:
    """The record of an array of so many indices along each axis; "auto" learns in so many calls before."""
    mine = parts(number)[WORLD.rank][1]
    # A page of each array is touched before it is timed.
    source, target = np.random.default_rng(WORLD.rank).random((mine, number, number)), np.zeros((number, mine, number))
    send, recv = [source, subarrays(source, 1)], [target, subarrays(target, 0)]
    comms = {name: WORLD.Dup() for name in ("native", "control", *algorithms)}
    calls: dict[str, Callable[[], object]] = {}
    for name, comm in comms.items():
        if name in ("native", "control"):
            calls[name] = partial(comm.Alltoallw, send, recv)
        elif name == "drop-in":
            calls[name] = partial(hiercoll.Intracomm(comm).Alltoallw, send, recv)
        else:
            words = name.split()
            params = {key: int(value) if value.isdigit() else value for key, value in (w.split("=") for w in words[1:])}
            calls[name] = partial(hiercoll.alltoallw, comm, send, recv, algorithm=words[0], **params)
    calls["native"]()
    due = target.copy()
    for name, call in calls.items():
        target[:] = np.nan
        call()
        assert np.array_equal(target, due), name
    cores = Cores(WORLD)
    once = max(slowest(calls["native"]) for _ in range(3))
    for name in ("auto", "drop-in") if first else ():
        if name not in calls:
            continue
        for call_number in range(first):
            if call_number % STAY == 0:
                cores.shuffle()
            calls[name]()
    turns = WORLD.bcast(max(5, int(seconds / once / (2 * len(calls)))))
    names, times = list(calls), {name: list[float]() for name in calls}
    for turn in range(turns):
        cores.shuffle()
        # In one order each kind would always follow the same other.
        for name in Random(turn).sample(names, len(names)):
            calls[name]()
            times[name].append(slowest(calls[name]))
    for _, types in (send, recv):
        for each in types:
            each.Free()
    native = np.array(times["native"])
    ratios = {name: np.percentile(native / np.array(each), [50, 25, 75]).tolist() for name, each in times.items()}
    nodes = hiercoll.get_topology(WORLD)
    for comm in comms.values():
        comm.Free()
    return {
        "number": number, "bytes_per_pair": 8 * number**3 // WORLD.size**2, "first": first, "turns": turns,
        "median": {name: float(np.median(each)) for name, each in times.items()}, "gain": ratios,
        **provenance(WORLD, nodes),
    }  # fmt: skip


@click.command(help=__doc__.splitlines()[0] if __doc__ else "")
@click.option("--sizes", default="32,64,128,256", show_default=True, help="indices along each axis")
@click.option("--algorithm", "algorithms", multiple=True, default=("aggregate", "auto", "drop-in"), show_default=True)
@click.option("--seconds", default=10.0, show_default=True, help="of calls for each size")
@click.option("--first", default=0, show_default=True, help="calls of auto before it is timed")
def main(sizes: str, algorithms: tuple[str, ...], seconds: float, first: int) -> None:
    """Measure each size."""
    for number in map(int, sizes.split(",")):
        record = measure(number, list(algorithms), seconds, first)
        if WORLD.rank == 0:
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
