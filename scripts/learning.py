"""What learning costs, and what it finds: "auto" without a table beside native, native again, and a tuned table.

Run under MPI. For each size a new communicator makes calls one at a time, each after a barrier, in turns with the
others; a call's time is that of the slowest rank. Prints a line of JSON per size: the sums of the first calls' times
over native's ("first"; "control" is native's own repetition), the medians of the calls after that over native's
("after", "table"), and what has been found. ``HIERCOLL_LEARNED`` names where it is kept: a second run begins with it.

    mpiexec -n 16 python scripts/learning.py alltoall --sizes 8,64,512,4K,32K --table docs/lab/table-mpich-4x4.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.cli.common import SizesType
from hiercoll.collectives import COLLECTIVES
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.native import mpi_library
from hiercoll.tuning.policy import Wanted

WORLD = MPI.COMM_WORLD
Call = Callable[[], Any]


def slowest(call: Call) -> float:
    """Seconds of the slowest rank."""
    WORLD.Barrier()
    begin = perf_counter()
    call()
    return float(WORLD.allreduce(perf_counter() - begin, op=MPI.MAX))


def in_turns(calls: dict[str, Call], number: int) -> dict[str, list[float]]:
    """Seconds of so many calls of each, each turn beginning with another one."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(number):
        for name in (names[(turn + place) % len(names)] for place in range(len(names))):
            times[name].append(slowest(calls[name]))
    return times


def measure(name: str, size: int, first: int, after: int, table: Path | None) -> dict[str, Any]:
    """The record of a size."""
    record, ours = COLLECTIVES[name], WORLD.Dup()
    comms = {"native": WORLD.Dup(), "control": WORLD.Dup()}
    send = np.zeros(size * record.blocks(record.send, WORLD.size), np.uint8)
    recv = np.zeros(size * record.blocks(record.recv, WORLD.size), np.uint8)
    buffers = [recv] if record.one_buffer else [send, recv]
    calls: dict[str, Call] = {}
    for label, comm in comms.items():
        calls[label] = partial(getattr(comm, record.native), *buffers)
    call = getattr(hiercoll, name)  # which imports the package, the first time
    calls["auto"] = lambda: call(ours, *buffers)
    times = in_turns(calls, first)
    ratio = {label: sum(each) / sum(times["native"]) for label, each in times.items()}
    cold = times["auto"][0]
    if table is not None:
        comms["table"] = WORLD.Dup()
        hiercoll.configure(comms["table"], table=table)
        calls["table"] = lambda: call(comms["table"], *buffers)
        in_turns({"table": calls["table"]}, 3)
    times = in_turns(calls, after)
    found = get_session(ours).policy.learner(Wanted(record, size, record.one_buffer))
    finding = None if found is None else found.finding
    line = {
        "collective": name, "size": size, "calls": first, "first": ratio["auto"], "control": ratio["control"],
        "first_call": cold, "native": median(times["native"]),
        "after": {label: median(each) / median(times["native"]) for label, each in times.items() if label != "native"},
        "found": None if finding is None else finding.variant.spelled(name),
        "found_after": None if finding is None else finding.calls,
        "chosen": None if found is None else found.current.spelled(name),
        "mpi": mpi_library(), "layout": str(hiercoll.get_topology(ours)), "date": f"{datetime.now(timezone.utc):%F %T}",
    }  # fmt: skip
    for comm in (ours, *comms.values()):
        comm.Free()
    return line


@click.command()
@click.argument("collective", type=click.Choice(["alltoall", "allgather", "bcast"]))
@click.option("--sizes", "-s", type=SizesType(), default="8,64,512,4K,32K", help="Bytes per block.")
@click.option("--first", default=300, help="Calls whose times are added up.")
@click.option("--after", default=60, help="Calls after that, for the medians.")
@click.option("--table", type=click.Path(exists=True, path_type=Path), help="A tuned table to compare with.")
def main(collective: str, sizes: list[int], first: int, after: int, table: Path | None) -> None:
    """See the top of this file."""
    for size in sizes:
        line = measure(collective, size, first, after, table)
        if WORLD.rank == 0:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
