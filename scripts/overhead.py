"""What hiercoll's Python costs: plans, calls and rebinding against hand-written loops.

    mpiexec -n 2 python scripts/overhead.py [--json FILE]

Interleaved in one run; per repetition the mean over many iterations, maximum over
ranks; reported is the median over repetitions with the quartiles, in microseconds.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter

import mpi4py
import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.communicator import mpi_library
from hiercoll.tables import Choice, Entry, Table, Variant

ITERATIONS, REPETITIONS = 400, 31


def hand_written(comm: MPI.Intracomm, send: np.ndarray, recv: np.ndarray) -> Callable[[], None]:
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


def measure(comm: MPI.Intracomm, subjects: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float, float]]:
    """Quartiles, in microseconds per call, of each subject."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(REPETITIONS):
        for name, call in subjects.items():
            comm.Barrier()
            begin = perf_counter()
            for _ in range(ITERATIONS):
                call()
            took = (perf_counter() - begin) / ITERATIONS * 1e6
            times[name].append(comm.allreduce(took, op=MPI.MAX))
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in times.items()}
    return {name: (q[0], q[1], q[2]) for name, q in quartiles.items()}


def drop_ins(comm: MPI.Intracomm, send: np.ndarray, recv: np.ndarray) -> dict[str, Callable[[], object]]:
    """Calls of drop-in communicators: served, with a deadline, and left to the MPI library."""
    topology = hiercoll.get_topology(comm)
    subjects: dict[str, Callable[[], object]] = {}
    for name, algorithm, timeout in (
        ("drop-in Alltoall", "scatter_destination", 0),
        ("drop-in Alltoall, deadline", "scatter_destination", 60),
        ("drop-in Alltoall, table says native", "native", 0),
    ):
        choice = Choice(1, Variant(algorithm))
        entry = Entry("alltoall", mpi_library(), "host", topology.node_sizes, topology.placement, (choice,))
        ours = hiercoll.Intracomm(comm.Dup())
        hiercoll.configure(ours, table=Table((entry,)), timeout=timeout)
        subjects[name] = partial(ours.Alltoall, send, recv)
    ones, total = np.ones(comm.size, int), np.zeros_like(send)
    for _ in range(400):
        ours.Alltoallv([send, ones], [recv, ones])
    subjects["drop-in Alltoallv, trials over"] = lambda: ours.Alltoallv([send, ones], [recv, ones])
    subjects["mpi4py Alltoallv"] = lambda: comm.Alltoallv([send, ones], [recv, ones])
    subjects["drop-in Allreduce"] = partial(ours.Allreduce, send, total)
    subjects["mpi4py Allreduce"] = partial(comm.Allreduce, send, total)
    return subjects


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="append the record to this file (JSON Lines)")
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    send, recv = np.arange(comm.size, dtype="i8"), np.zeros(comm.size, dtype="i8")
    plan = hiercoll.alltoall_init(comm, send, recv, algorithm="scatter_destination")
    fresh = [(np.zeros_like(send), np.zeros_like(recv)) for _ in range(4096)]
    pairs = itertools.cycle(fresh)  # more pairs than plans are kept: always a rebinding
    name = "scatter_destination"

    subjects: dict[str, Callable[[], object]] = {
        "hand-written persistent loop": hand_written(comm.Dup(), send, recv),
        "plan()": plan,
        "hiercoll.alltoall, known buffers": lambda: hiercoll.alltoall(
            comm, send, recv, algorithm="scatter_destination"
        ),
        "hiercoll.alltoall, new buffers": lambda: hiercoll.alltoall(comm, *next(pairs), algorithm=name),
        "mpi4py Alltoall": lambda: comm.Alltoall(send, recv),
        "hiercoll.alltoall native": lambda: hiercoll.alltoall(comm, send, recv, algorithm="native"),
        **drop_ins(comm, send, recv),
    }
    result = measure(comm, subjects)
    plan.free()
    if comm.rank == 0:
        for name, (low, median, high) in result.items():
            print(f"{name:36} {median:8.2f} us  ({low:.2f} .. {high:.2f})")
        record = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "benchmark": "overhead",
            "ranks": comm.size,
            "bytes": send.itemsize,
            "mpi": MPI.Get_library_version().split("\n")[0].strip(),
            "mpi4py": mpi4py.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "hiercoll": hiercoll.__version__,
            "microseconds": {name: {"q1": q[0], "median": q[1], "q3": q[2]} for name, q in result.items()},
        }
        if arguments.json:
            with open(arguments.json, "a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
