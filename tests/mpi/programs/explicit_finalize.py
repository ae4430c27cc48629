"""MPI.Finalize called by the program itself finds everything freed."""

import numpy as np
from mpi4py import MPI

import hiercoll

comm = MPI.COMM_WORLD
plan = hiercoll.alltoall_init(comm, np.arange(comm.size), algorithm="grouped", memory="shared")
plan()
hiercoll.allgather(comm, np.arange(3), algorithm="shared")
MPI.Finalize()
