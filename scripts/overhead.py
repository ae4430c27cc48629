"""What a call of hiercoll costs: plans and public calls beside native and a loop written by hand.

    mpiexec -n 2 python scripts/overhead.py [--left] [--json FILE]

8 bytes per pair, as programs call: one at a time after a barrier (single), in a row, and one at a time after
other code and data (cold). Subjects take turns in random order; of each call, or row, the slowest rank's time
counts. Reported is the median over turns with its quartiles.

``--left``: in rows, what calls of drop-in communicators cost that are left to the MPI library, by collective, blocking
and in the background: on one where hiercoll is not set up, on one where it is, and on one on which there are none but
calls in the background; and by how much that is more than mpi4py's. With HIERCOLL_LEARN=0 all of them are left.
On a busy machine the least of all turns is what to compare; on one rank, which waits for nobody, the way through
hiercoll is all that differs.
"""

from __future__ import annotations

import argparse
import json
from array import array
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll import settings
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.statistics import quartiles
from hiercoll.tables import COLD, ROW, SINGLE, Choice, Entry, Table, Variant
from hiercoll.tools.bench import provenance
from hiercoll.tools.measuring import OtherWork, take
from hiercoll.units import format_time

TURNS = 31
CALLS = {SINGLE: 20, ROW: 400, COLD: 4}  # in a turn
Call = Callable[[], object]
NAME = "scatter_destination"
COMM = "comm"  # mpi4py's own


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


def measure(comm: MPI.Intracomm, subjects: dict[str, Call], timing: str) -> dict[str, list[float]]:
    """Seconds per call of each subject, by turns."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order, other = Random(0), OtherWork()
    for _ in range(TURNS):
        for name in order.sample(list(subjects), len(subjects)):
            mine = np.array(take(comm, subjects[name], timing, CALLS[timing], other))
            comm.Allreduce(MPI.IN_PLACE, mine, op=MPI.MAX)
            times[name].append(float(np.median(mine)))
    return times


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


def left(comm: MPI.Intracomm) -> dict[str, Call]:
    """Calls of mpi4py's communicator, twice, and of drop-in ones."""
    size, is_root = comm.size, comm.rank == 0
    send, recv, one = np.arange(size, dtype="i8"), np.zeros(size, "i8"), np.zeros(1, "i8")
    column = MPI.INT.Create_vector(2, 1, 2).Create_resized(0, 16).Commit()
    spread = np.zeros(4 * size, "i4")
    typed = [spread, ([1] * size, [16 * peer for peer in range(size)]), [column] * size]
    into = [spread.copy(), *typed[1:]]
    ones = [1] * size
    arguments: dict[str, tuple[Any, ...]] = {
        "Alltoall": (send, recv),
        "Alltoall of array.array": (array("q", send), array("q", recv)),
        "Alltoall of memoryview": (memoryview(send), memoryview(recv)),
        "Alltoall of bytearray": ([bytearray(send), MPI.INT64_T], [bytearray(recv), MPI.INT64_T]),
        "Alltoall of columns": ([spread, 1, column], [spread.copy(), 1, column]),
        "Allgatherv of columns": ([spread[:4], 1, column], [spread.copy(), ones, list(range(size)), column]),
        "Allgatherv": (one, [recv, ones]),
        "Alltoallv": ([send, ones], [recv, ones]),
        "Alltoallw": (typed, into),
        "Allgather": (one, recv),
        "Allreduce": (send, recv),
        "Bcast": (send,),
        "Gather": (one, recv if is_root else None),
        "Scatter": (send if is_root else None, one),
    }
    new, ready, unmet = (hiercoll.Intracomm(each) for each in (comm.Dup(), comm.Dup(), comm.Split()))
    get_session(ready)
    subjects: dict[str, Call] = {}
    users = {
        COMM: comm,
        "comm again": comm,
        "drop-in": new,
        "drop-in, set up": ready,
        "drop-in, background alone": unmet,
    }
    for (name, given), (who, each) in product(arguments.items(), users.items()):
        method, *kind = name.split(maxsplit=1)
        if each is not unmet:
            subjects[f"{name}, {who}"] = partial(getattr(each, method), *given)
        begin = partial(getattr(each, f"I{method.lower()}"), *given)
        subjects[f"{' '.join([f'I{method.lower()}', *kind])}, {who}"] = partial(_waited, begin)
    return subjects


def _waited(begin: Callable[[], MPI.Request]) -> None:
    begin().Wait()


def report(times: dict[str, list[float]], timing: str, about: dict[str, Any], file: Path | None) -> None:
    """Print and record."""
    seconds = {}
    for name, values in times.items():
        (low, middle, high), least = quartiles(values), min(values)
        seconds[name] = {"q1": low, "median": middle, "q3": high, "least": least}
        words = f"({format_time(low)} .. {format_time(high)}), least {format_time(least)}"
        call, _, who = name.partition(", ")
        if who and who != COMM and (plain := times.get(f"{call}, {COMM}")):
            more, leasts = 1e6 * (middle - quartiles(plain)[1]), 1e6 * (least - min(plain))
            words = f"{words}; {more:+.2f} us, of the least {leasts:+.2f}"
        print(f"{timing:6}  {name:50} {format_time(middle):>10}  {words}")
    if file:
        with file.open("a") as opened:
            opened.write(json.dumps({"timing": timing, "seconds": seconds, **about}) + "\n")


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the records to this file (JSON Lines)")
    parser.add_argument("--left", action="store_true", help="calls that are left to the MPI library")
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    about = {"benchmark": "overhead", "bytes": 8, **provenance(comm, hiercoll.get_topology(comm))}
    if arguments.left:
        result = measure(comm, left(comm), ROW)
        if not comm.rank:
            report(result, ROW, about | {"left": True, "learns": settings.learns()}, arguments.json)
        return
    hiercoll.configure(comm, table=Table())  # not one that this user has
    send, recv = np.arange(comm.size, dtype="i8"), np.zeros(comm.size, dtype="i8")
    plan = hiercoll.alltoall_init(comm, send, recv, algorithm=NAME)
    native_plan = hiercoll.alltoall_init(comm, send, recv, algorithm="native")
    pairs = cycle([(np.zeros_like(send), np.zeros_like(recv)) for _ in range(4096)])  # more than are cached
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
    for timing in (SINGLE, ROW, COLD):
        result = measure(comm, subjects, timing)
        if not comm.rank:
            report(result, timing, about, arguments.json)
    plan.free()
    native_plan.free()


if __name__ == "__main__":
    main()
