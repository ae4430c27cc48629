"""Alltoallv against the MPI library's own, side by side, for blocks of several distributions.

    mpiexec -n 16 python scripts/uneven.py [--json FILE] [--mean 16,256,4096,16384]

Each repetition runs every subject once, interleaved, after a barrier; the time of a call is the
longest of all ranks. With --row it is that of a call among so many in a row: where ranks outnumber
cores, they leave a barrier at very different times. Counts are the same in each call of a line, or
(--fresh) drawn anew. Calls on a communicator of its own come before each line is measured, until the
drop-in communicator has settled. Prints medians in microseconds, and the ratio of native to the drop-in
communicator with its 90 % interval over repetitions; the last column is native against itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.bench import provenance

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
SETTLED = 256  # calls after which the drop-in communicator has mostly made up its mind
KINDS = ("uniform", "power law", "90 % empty")


def table(kind: str, mean: int, seed: int) -> Any:
    """Bytes from each rank (row) to each rank, with this mean."""
    choice = np.random.default_rng(seed)
    if kind == "uniform":
        return choice.integers(0, 2 * mean + 1, (SIZE, SIZE))
    if kind == "power law":
        drawn = np.minimum(choice.pareto(1.2, (SIZE, SIZE)) + 1, 100.0)
        return (drawn * mean / drawn.mean()).astype(int)
    return np.where(choice.random((SIZE, SIZE)) < 0.1, choice.integers(0, 20 * mean + 1, (SIZE, SIZE)), 0)


def subjects(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is compared."""
    known: dict[str, dict[str, Any]] = {"native": {}, "drop-in": {}, "auto": {}}
    for text in options.subjects.split(";") if options.subjects else ():
        name, *params = text.split(":")
        values = dict(param.split("=") for param in params)
        known[text] = {
            "algorithm": name,
            **{key: int(value) if value.isdigit() else value for key, value in values.items()},
        }
    return {**known, "again": {}}


def measure(
    kind: str, mean: int, cases: dict[str, dict[str, Any]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each call, by subject."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    comm = COMM.Dup()  # decisions of its own
    dropin = hiercoll.Intracomm(comm)
    # Looked up in each call, as a program does: where native has won, dropin's method is mpi4py's.
    methods: dict[str, Callable[..., None]] = {
        "native": lambda *sizes: comm.Alltoallv(*sizes),
        "again": lambda *sizes: comm.Alltoallv(*sizes),
        "drop-in": lambda *sizes: dropin.Alltoallv(*sizes),
    }
    most = int(max(table(kind, mean, seed).sum(axis=axis).max() for seed in range(64) for axis in (0, 1)))
    send, recv = np.zeros(2 * most, np.uint8), np.zeros(2 * most, np.uint8)
    tables = (table(kind, mean, seed) for seed in itertools.count())
    fixed = table(kind, mean, 0)

    def given() -> tuple[list[Any], list[Any]]:
        sizes = next(tables) if options.fresh else fixed
        return [send, sizes[RANK].copy()], [recv, sizes[:, RANK].copy()]

    def until(seconds: float, least: int, most: int, once: Callable[[int], None]) -> int:
        begin, done = time.perf_counter(), 0
        while True:
            once(done)
            done += 1
            over = np.array([done >= most or (time.perf_counter() - begin > seconds and done >= least)])
            if done % 8 == 0:
                COMM.Bcast(over)
                if over[0]:
                    return done

    def all_once(repetition: int) -> None:
        names = list(cases)
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            calls = [given() for _ in range(options.row)]
            call = methods.get(name) or partial(hiercoll.alltoallv, comm, **cases[name])
            COMM.Barrier()
            start = time.perf_counter()
            for sizes in calls:
                call(*sizes)
            times[name].append((time.perf_counter() - start) / options.row)

    until(options.warm, 8, SETTLED, lambda _: dropin.Alltoallv(*given()))
    repetitions = until(options.seconds, 16, 100_000, all_once)
    worst = {name: np.empty(repetitions) for name in cases}
    for name, own in times.items():
        COMM.Allreduce(np.array(own), worst[name], op=MPI.MAX)
    comm.Free()
    return {name: values[4:].tolist() for name, values in worst.items()}


def ratio(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """Of the medians, with a 90 % interval (bootstrap over repetitions)."""
    a, b = np.array(above), np.array(below)
    picks = np.random.default_rng(0).integers(0, len(a), (400, len(a)))
    spread = np.median(a[picks], axis=1) / np.median(b[picks], axis=1)
    low, high = np.quantile(spread, [0.05, 0.95])
    return float(np.median(a) / np.median(b)), float(low), float(high)


def main() -> None:
    """Print, and write, one line per distribution and mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mean", default="16,64,256,1024,4096,16384", help="bytes")
    parser.add_argument("--seconds", type=float, default=3, help="for each line")
    parser.add_argument("--warm", type=float, default=6, help="most seconds of calls before each line")
    parser.add_argument("--row", type=int, default=1, help="calls in a row that are timed together")
    parser.add_argument("--fresh", action="store_true", help="other counts in each call")
    parser.add_argument("--subjects", default="", help="more of them: aggregate:window=2;scatter_destination")
    options = parser.parse_args()
    cases = subjects(options)
    gains: list[float] = []
    about = provenance(COMM, hiercoll.get_topology(COMM))
    for kind in KINDS:
        for mean in map(int, options.mean.split(",")):
            times = measure(kind, mean, cases, options)
            if RANK:
                continue
            medians = {name: float(np.median(values)) * 1e6 for name, values in times.items()}
            gain, low, high = ratio(times["native"], times["drop-in"])
            control = ratio(times["native"], times["again"])
            gains.append(gain)
            others = "  ".join(f"{name} {value:.0f}" for name, value in medians.items() if name != "again")
            print(
                f"{kind:>11} {mean:>6} B  {others}  ratio {gain:.2f} ({low:.2f}-{high:.2f})  control {control[0]:.2f}",
                flush=True,
            )
            if options.json:
                figures = {"ratio": [gain, low, high], "control": control, "repetitions": len(times["native"])}
                record = {
                    "kind": kind,
                    "mean": mean,
                    "fresh": options.fresh,
                    "row": options.row,
                    "microseconds": medians,
                    **figures,
                    **about,
                }
                with options.json.open("a") as file:
                    file.write(json.dumps(record) + os.linesep)
    if RANK == 0:
        print(f"geometric mean {math.exp(float(np.mean(np.log(gains)))):.2f}")


if __name__ == "__main__":
    main()
