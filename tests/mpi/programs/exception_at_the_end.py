"""A rank that dies of an exception after its last call: the others do not wait for it to free windows.

Expect: failure.
"""

import numpy as np
from mpi4py import MPI

import hiercoll

comm = MPI.COMM_WORLD
hiercoll.alltoall(comm, np.arange(comm.size), algorithm="grouped", memory="shared")
plan = hiercoll.alltoall_init(comm, np.arange(comm.size), algorithm="pairwise")
plan()
if comm.rank == 1:
    raise RuntimeError("on purpose")
