"""Alltoallv against the MPI library's own, side by side, for blocks of several distributions.

    mpiexec -n 16 python scripts/uneven.py [--json FILE] [--mean 16,256,4096,16384]

In each turn every subject is called with the same counts on the same arrays, after a barrier, in random order; the
time of a call is the longest of all ranks. With --row it is that of a call among so many in a row. Counts are the
same in all turns of a line or, with --fresh, drawn anew. The data of every call are unique tokens, and checked. Before
a line is measured, calls on a communicator of its own let the drop-in communicator settle. Prints medians in
microseconds, and the ratio of native to the drop-in communicator, the median over turns with its 95 % interval; the
last column is native against itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.cli.common import parse_algorithm
from hiercoll.statistics import ratio_interval
from hiercoll.tools.bench import provenance
from hiercoll.tools.cores import Cores
from hiercoll.tools.measuring import DataError
from hiercoll.tools.workload import POISON, tokens

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
SETTLED = 256  # calls after which the drop-in communicator has mostly made up its mind
KINDS = ("uniform", "power law", "90 % empty")
FEWEST = 12  # turns
Call = Callable[[Any, Any], object]


def table(kind: str, mean: int, seed: int) -> Any:
    """Bytes from each rank (row) to each rank, with this mean."""
    choice = np.random.default_rng(seed)
    if kind == "uniform":
        return choice.integers(0, 2 * mean + 1, (SIZE, SIZE))
    if kind == "power law":
        drawn = np.minimum(choice.pareto(1.2, (SIZE, SIZE)) + 1, 100.0)
        return (drawn * mean / drawn.mean()).astype(int)
    return np.where(choice.random((SIZE, SIZE)) < 0.1, choice.integers(0, 20 * mean + 1, (SIZE, SIZE)), 0)


class Exchange(NamedTuple):
    """Arguments of a call, and what is to be received."""

    send: list[Any]
    recv: list[Any]
    expected: Any

    @classmethod
    def of(cls, sizes: Any) -> Exchange:
        """With tokens for blocks of these sizes."""
        send = np.concatenate([tokens(RANK, peer, sizes[RANK, peer]) for peer in range(SIZE)])
        expected = np.concatenate([tokens(peer, RANK, sizes[peer, RANK]) for peer in range(SIZE)])
        return cls([send, sizes[RANK].copy()], [np.empty_like(expected), sizes[:, RANK].copy()], expected)


def subjects(options: argparse.Namespace, comm: MPI.Intracomm, other: MPI.Intracomm) -> dict[str, Call]:
    """What is compared, the function on an ``other`` communicator: each decides for itself. Methods are looked up in
    each call, as a program does: where native has won, the drop-in communicator's is mpi4py's."""
    dropin = hiercoll.Intracomm(comm)
    known: dict[str, Call] = {
        "native": lambda send, recv: comm.Alltoallv(send, recv),
        "drop-in": lambda send, recv: dropin.Alltoallv(send, recv),
        "auto": partial(hiercoll.alltoallv, other),
    }
    for text in options.subjects.split(";") if options.subjects else ():
        name, params = parse_algorithm(text)
        known[text] = partial(hiercoll.alltoallv, comm, algorithm=name, **params)
    return {**known, "again": known["native"]}


def exchanges(kind: str, mean: int, fresh: bool) -> Iterator[Exchange]:
    """One for each call: always the same, or with counts drawn anew."""
    if not fresh:
        return itertools.repeat(Exchange.of(table(kind, mean, 0)))
    return (Exchange.of(table(kind, mean, seed)) for seed in itertools.count())


def goes_on(begin: float, seconds: float, done: int, least: int) -> bool:
    """Whether there is to be another turn; the same on all ranks."""
    return bool(COMM.bcast(done < least or time.perf_counter() - begin < seconds))


def measure(kind: str, mean: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each call, by subject. Raises DataError."""
    comm, other = COMM.Dup(), COMM.Dup()  # decisions of their own
    calls, order, source = subjects(options, comm, other), Random(mean), exchanges(kind, mean, options.fresh)
    for name in ("drop-in", "auto"):  # each by itself: what it tries must not be disturbed by what the other tries
        begin = time.perf_counter()
        for done in range(SETTLED):
            if done % 8 == 0:
                if not goes_on(begin, options.warm / 2, done, 8):
                    break
                drawn = [next(source) for _ in range(8)]  # what ranks do between calls is no part of those
            timed(calls[name], drawn[done % 8 : done % 8 + 1])
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, turns, cores = time.perf_counter(), 0, Cores(COMM)
    while goes_on(begin, options.seconds, turns, FEWEST):
        row = [next(source) for _ in range(options.row)]
        cores.shuffle()
        for name in order.sample(list(calls), len(calls)):
            times[name].append(timed(calls[name], row) / options.row)
            wrong = any(not np.array_equal(each.recv[0], each.expected) for each in row)
            if COMM.allreduce(wrong, op=MPI.LOR):
                raise DataError(f"alltoallv, {name}, {kind} with a mean of {mean} bytes: wrong data")
        turns += 1
    comm.Free()
    other.Free()
    worst = {name: np.empty(turns) for name in calls}
    for name, own in times.items():
        COMM.Allreduce(np.array(own), worst[name], op=MPI.MAX)
    return {name: list(map(float, values)) for name, values in worst.items()}


def timed(call: Call, row: list[Exchange]) -> float:
    """Seconds of calls in a row, after a barrier, into receive buffers that hold something else."""
    for each in row:
        each.recv[0][:] = POISON
    COMM.Barrier()
    begin = time.perf_counter()
    for each in row:
        call(each.send, each.recv)
    return time.perf_counter() - begin


def main() -> None:
    """Print, and write, one line per distribution and mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mean", default="16,256,4096", help="bytes")
    parser.add_argument("--seconds", type=float, default=3, help="for each line")
    parser.add_argument("--warm", type=float, default=12, help="most seconds of calls before each line")
    parser.add_argument("--row", type=int, default=1, help="calls in a row that are timed together")
    parser.add_argument("--fresh", action="store_true", help="other counts in each call")
    parser.add_argument("--subjects", default="", help="more of them: aggregate:window=2;scatter_destination")
    options = parser.parse_args()
    gains: list[float] = []
    about = {"benchmark": "alltoallv", **provenance(COMM, hiercoll.get_topology(COMM))}
    for kind in KINDS:
        for mean in map(int, options.mean.split(",")):
            times = measure(kind, mean, options)
            if RANK:
                continue
            medians = {name: median(values) for name, values in times.items()}
            gain, control = (ratio_interval(times["native"], times[name]) for name in ("drop-in", "again"))
            gains.append(gain[0])
            others = "  ".join(f"{name} {value * 1e6:.0f}" for name, value in medians.items() if name != "again")
            print(
                f"{kind:>11} {mean:>6} B  {others}  ratio {gain[0]:.2f} ({gain[1]:.2f}-{gain[2]:.2f})"
                f"  control {control[0]:.2f}",
                flush=True,
            )
            if options.json:
                how = {"kind": kind, "mean": mean, "fresh": options.fresh, "row": options.row}
                figures = {"seconds": medians, "ratio": gain, "control": control, "turns": len(times["native"])}
                with options.json.open("a") as file:
                    file.write(json.dumps({**how, **figures, **about}) + "\n")
    if RANK == 0:
        print(f"geometric mean {math.exp(sum(map(math.log, gains)) / len(gains)):.2f}")


if __name__ == "__main__":
    main()
