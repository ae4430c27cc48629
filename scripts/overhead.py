"""What a call of hiercoll costs: plans and public calls beside native and a loop written by hand.

    mpiexec -n 2 python scripts/overhead.py [--json FILE]

8 bytes per pair, as programs call: one at a time after a barrier (single), in a row, and one at a time after
other code and data (cold). Subjects take turns in random order; of each call, or row, the slowest rank's time
counts. Reported is the median over turns with its quartiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.runtime.native import mpi_library
from hiercoll.statistics import quartiles
from hiercoll.tables import COLD, ROW, SINGLE, Choice, Entry, Table, Variant
from hiercoll.tools.bench import provenance
from hiercoll.tools.measuring import OtherWork, take
from hiercoll.units import format_time

TURNS = 31
CALLS = {SINGLE: 20, ROW: 400, COLD: 4}  # in a turn
Call = Callable[[], object]
NAME = "scatter_destination"


def hand_written(comm: MPI.Intracomm, send: Any, recv: Any) -> Call:
    """Scatter-destination on persistent requests, as one would write it for one size."""
    size, rank = comm.size, comm.rank
    send, recv = send.reshape(size, -1), recv.reshape(size, -1)
    requests = []
    for i in range(1, size):
        source, target = (rank - i) % size, (rank + i) % size
        requests += [comm.Recv_init(recv[source], source), comm.Send_init(send[target], target)]
    startall, waitall = MPI.Prequest.Startall, MPI.Request.Waitall
    own_send, own_recv = send[rank], recv[rank]

    def run() -> None:
        startall(requests)
        own_recv[:] = own_send
        waitall(requests)

    return run


def measure(comm: MPI.Intracomm, subjects: dict[str, Call], timing: str) -> dict[str, tuple[float, float, float]]:
    """Quartiles, in seconds per call, of each subject."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order, other = Random(0), OtherWork()
    for _ in range(TURNS):
        for name in order.sample(list(subjects), len(subjects)):
            mine = np.array(take(comm, subjects[name], timing, CALLS[timing], other))
            comm.Allreduce(MPI.IN_PLACE, mine, op=MPI.MAX)
            times[name].append(float(np.median(mine)))
    return {name: quartiles(values) for name, values in times.items()}


def drop_ins(comm: MPI.Intracomm, send: Any, recv: Any) -> dict[str, Call]:
    """Calls of drop-in communicators: served, with a deadline, and left to the MPI library."""
    topology = hiercoll.get_topology(comm)
    subjects: dict[str, Call] = {}
    for name, algorithm, timeout in (
        (f"drop-in Alltoall, {NAME}", NAME, 0),
        (f"drop-in Alltoall, {NAME}, deadline", NAME, 60),
        ("drop-in Alltoall, native", "native", 0),
    ):
        choice = Choice(1, Variant(algorithm))
        entry = Entry("alltoall", mpi_library(), "host", topology.node_sizes, topology.placement, (choice,))
        ours = hiercoll.Intracomm(comm.Dup())
        hiercoll.configure(ours, table=Table((entry,)), timeout=timeout)
        subjects[name] = partial(ours.Alltoall, send, recv)
    ones, total = np.ones(comm.size, int), np.zeros_like(send)
    for _ in range(400):
        ours.Alltoallv([send, ones], [recv, ones])
    subjects["comm.Alltoallv"] = lambda: comm.Alltoallv([send, ones], [recv, ones])
    subjects["drop-in Alltoallv, native"] = lambda: ours.Alltoallv([send, ones], [recv, ones])
    subjects["comm.Allreduce"] = partial(comm.Allreduce, send, total)
    subjects["drop-in Allreduce"] = partial(ours.Allreduce, send, total)
    return subjects


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the records to this file (JSON Lines)")
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    hiercoll.configure(comm, table=Table())  # not one that this user has
    send, recv = np.arange(comm.size, dtype="i8"), np.zeros(comm.size, dtype="i8")
    plan = hiercoll.alltoall_init(comm, send, recv, algorithm=NAME)
    native_plan = hiercoll.alltoall_init(comm, send, recv, algorithm="native")
    pairs = itertools.cycle([(np.zeros_like(send), np.zeros_like(recv)) for _ in range(4096)])  # more than are cached
    alltoall = hiercoll.alltoall
    subjects: dict[str, Call] = {
        "comm.Alltoall": partial(comm.Alltoall, send, recv),
        "comm.Alltoall again": partial(comm.Alltoall, send, recv),
        "loop of persistent requests": hand_written(comm.Dup(), send, recv),
        f"plan, {NAME}": plan,
        "plan, native": native_plan,
        "alltoall, auto without a table": partial(alltoall, comm, send, recv),
        f"alltoall, {NAME}": partial(alltoall, comm, send, recv, algorithm=NAME),
        f"alltoall, {NAME} window=2": partial(alltoall, comm, send, recv, algorithm=NAME, window=2),
        f"alltoall, {NAME}, new arrays": lambda: alltoall(comm, *next(pairs), algorithm=NAME),
        "alltoall, native": partial(alltoall, comm, send, recv, algorithm="native"),
        **drop_ins(comm, send, recv),
    }
    about = {"benchmark": "overhead", "bytes": send.itemsize, **provenance(comm, hiercoll.get_topology(comm))}
    for timing in (SINGLE, ROW, COLD):
        result = measure(comm, subjects, timing)
        if comm.rank:
            continue
        for name, (low, middle, high) in result.items():
            print(f"{timing:6}  {name:50} {format_time(middle):>10}  ({format_time(low)} .. {format_time(high)})")
        if arguments.json:
            seconds = {name: {"q1": q[0], "median": q[1], "q3": q[2]} for name, q in result.items()}
            with arguments.json.open("a") as file:
                file.write(json.dumps({"timing": timing, "seconds": seconds, **about}) + "\n")
    plan.free()
    native_plan.free()


if __name__ == "__main__":
    main()
