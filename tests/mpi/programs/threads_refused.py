"""Without MPI_THREAD_MULTIPLE a second thread is refused, before anything is sent."""

import threading

import mpi4py

mpi4py.rc.thread_level = "funneled"

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import hiercoll  # noqa: E402

comm = MPI.COMM_WORLD
assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
send, recv = np.arange(comm.size), np.empty(comm.size, int)
hiercoll.alltoall(comm, send, recv)
errors: list[Exception] = []


def work() -> None:
    """Two calls that must not be served: known buffers and new ones."""
    for arguments in ((send, recv), (send,)):
        try:
            hiercoll.alltoall(comm, *arguments)
        except hiercoll.ThreadError as error:
            errors.append(error)


thread = threading.Thread(target=work)
thread.start()
thread.join()
assert len(errors) == 2
hiercoll.alltoall(comm, send, recv)
