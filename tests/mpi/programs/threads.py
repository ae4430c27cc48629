"""Threads with a communicator each run collectives at the same time."""

import os
from concurrent.futures import ThreadPoolExecutor

# Without hiercoll, too, Intel MPI 2021.18 hangs when threads run its collectives in shared memory at the same time.
os.environ.setdefault("I_MPI_COLL_INTRANODE", "pt2pt")

import numpy as np
from mpi4py import MPI

import hiercoll

assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
comms = [MPI.COMM_WORLD.Dup() for _ in range(3)]
wrong: list[str] = []


def work(number: int, comm: MPI.Intracomm) -> None:
    """Many calls on one communicator."""
    algorithms = ("pairwise", "grouped", "hierarchical", "bruck")
    for turn in range(60):
        send = np.arange(comm.size * 4) + 1000 * comm.rank + turn + number
        got = hiercoll.alltoall(comm, send, algorithm=algorithms[(turn + number) % 4])
        first = np.arange(4) + 4 * comm.rank + turn + number
        want = np.concatenate([first + 1000 * rank for rank in range(comm.size)])
        if not np.array_equal(got, want):
            wrong.append(f"thread {number}, turn {turn}")


with ThreadPoolExecutor(len(comms)) as pool:
    list(pool.map(work, range(len(comms)), comms))  # raises what a thread has raised
assert not wrong, wrong[:3]
