"""A rank killed in the middle of a series of calls ends the job with an error. Expect: failure."""

import os
import signal

import numpy as np
from mpi4py import MPI

import hiercoll

comm = MPI.COMM_WORLD
for turn in range(1000):
    if comm.rank == comm.size - 1 and turn == 500:
        os.kill(os.getpid(), signal.SIGKILL)
    hiercoll.alltoall(comm, np.arange(comm.size * 50), algorithm="hierarchical")
