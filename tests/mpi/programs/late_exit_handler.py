"""A call from an exit handler that runs after hiercoll's own is refused, not a crash."""

import atexit

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD


def late() -> None:
    """Registered before hiercoll is imported, hence run after it has freed everything."""
    try:
        hiercoll.alltoall(comm, np.arange(comm.size))
    except hiercoll.CommunicatorError as error:
        if "at exit" not in str(error):
            print(error)
    else:
        print("served after the end")


atexit.register(late)
import hiercoll  # noqa: E402

hiercoll.alltoall(comm, np.arange(comm.size))
