"""Threads with a communicator each make shared windows at the same time: one of a process after the other, where the
MPI library needs that."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.runtime import factory, window

factory.crashes_by_threads_windows = lambda: True  # any library will do here
comms = [MPI.COMM_WORLD.Dup() for _ in range(4)]
together = threading.Barrier(len(comms), timeout=60)
making, wrong = [0], list[str]()


class Arena(window.Arena):
    """Notes whether another thread makes one."""

    def __init__(self, *given: Any) -> None:
        making[0] += 1
        if making[0] > 1:
            wrong.append("at the same time")
        super().__init__(*given)
        making[0] -= 1


factory.Arena = Arena  # type: ignore[misc]


def work(number: int, comm: MPI.Intracomm) -> None:
    """First calls whose messages lie in shared memory."""
    for turn in range(3):  # each needs a window of its own
        blocks = 4 + (turn << 16)
        send = np.arange(comm.size * blocks) + 1000 * comm.rank + number
        want = (
            np.concatenate([np.arange(blocks) + comm.rank * blocks + 1000 * rank for rank in range(comm.size)]) + number
        )
        together.wait()
        with hiercoll.alltoall_init(comm, send, algorithm="grouped", memory="shared") as plan:
            if not np.array_equal(plan(), want):
                wrong.append(f"thread {number}, turn {turn}")


with ThreadPoolExecutor(len(comms)) as pool:
    list(pool.map(work, range(len(comms)), comms))  # raises what a thread has raised
assert not wrong, wrong[:3]
