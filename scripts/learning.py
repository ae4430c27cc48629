"""What learning costs, and what it finds: "auto" without a table beside native, native again, and a tuned table.

Run under MPI. For each size a new communicator makes calls one at a time, each after a barrier, in turns with the
others; a call's time is that of the slowest rank. Prints a line of JSON per size:

- "first": the sum of the first calls' times over the mean of native's, which takes two turns, and "control" the one of
  these over the other; "first_call": the seconds of each subject's first call; "spent": seconds of the set-up within
  them, and of all that finding out cost, by the budget's account
- "settled": after how many calls all had been tried, if it had
- "after": medians of the calls after that over native's; "found": what is known then to serve best

``HIERCOLL_LEARNED`` names where it is kept: a second run begins with it.

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
from hiercoll.runtime.lifetime import get_session, known_session
from hiercoll.runtime.native import mpi_library
from hiercoll.tools.cores import Cores
from hiercoll.tuning.policy import Wanted

WORLD = MPI.COMM_WORLD
Call = Callable[[], Any]
STRIDE = 20  # calls between two looks at whether all has been tried


def slowest(call: Call) -> float:
    """Seconds of the slowest rank."""
    WORLD.Barrier()
    begin = perf_counter()
    call()
    return float(WORLD.allreduce(perf_counter() - begin, op=MPI.MAX))


def in_turns(calls: dict[str, Call], number: int, between: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    """Seconds of so many calls of each, each turn beginning with another one, with what is to be done ``between``."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(number):
        between()
        for name in (names[(turn + place) % len(names)] for place in range(len(names))):
            times[name].append(slowest(calls[name]))
    return times


def spent_on(comm: MPI.Intracomm) -> dict[str, float]:
    """Seconds that setting it up took, and of all that learning has cost on it."""
    session = known_session(comm)
    return {} if session is None else {"set_up": session.set_up_seconds, "all": session.policy.budget.cost}


def is_settled(comm: MPI.Intracomm) -> bool:
    """Whether all that calls of a communicator may try has been."""
    session = known_session(comm)
    return session is not None and session.policy.is_settled


def settle(comm: MPI.Intracomm, call: Call, calls: int, most: int) -> int | None:
    """Make calls on a communicator until all has been tried, so many in all at most, of which ``calls`` are made. After
    how many that was; None if it was not."""
    while not WORLD.allreduce(is_settled(comm), op=MPI.LAND):
        if calls >= most:
            return None
        for _ in range(STRIDE):
            WORLD.Barrier()
            call()
        calls += STRIDE
    return calls


def measure(name: str, size: int, first: int, after: int, patience: int, table: Path | None) -> dict[str, Any]:
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
    cores = Cores(WORLD)
    cores.shuffle()  # once: a program's ranks stay where they are
    times = in_turns(calls, first)
    native = (sum(times["native"]) + sum(times["control"])) / 2
    ratio = {"auto": sum(times["auto"]) / native, "control": sum(times["control"]) / sum(times["native"])}
    cold = {label: each[0] for label, each in times.items()}
    spent = spent_on(ours)
    settled = settle(ours, calls["auto"], first, patience)
    if table is not None:
        comms["table"] = WORLD.Dup()
        hiercoll.configure(comms["table"], table=table)
        calls["table"] = lambda: call(comms["table"], *buffers)
        in_turns({"table": calls["table"]}, 3)
    times = in_turns(calls, after, cores.shuffle)
    found = get_session(ours).policy.learner(Wanted(record, size, record.one_buffer))
    finding = None if found is None else found.finding
    line = {
        "collective": name, "size": size, "calls": first, "first": ratio["auto"], "control": ratio["control"],
        "first_call": cold, "spent": spent, "settled": settled, "native": median(times["native"]),
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
@click.option(
    "--patience", default=0, help="Calls in all, at most, until all has been tried; before those for the medians."
)
@click.option("--table", type=click.Path(exists=True, path_type=Path), help="A tuned table to compare with.")
def main(collective: str, sizes: list[int], first: int, after: int, patience: int, table: Path | None) -> None:
    """See the top of this file."""
    for size in sizes:
        line = measure(collective, size, first, after, patience, table)
        if WORLD.rank == 0:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
