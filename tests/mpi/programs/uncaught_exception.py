"""A rank that dies of an exception while others wait for it ends the job with an error.

Run by: python -m mpi4py (without, mpi4py programs wait for ever). Expect: failure.
"""

import numpy as np
from mpi4py import MPI

import hiercoll

comm = MPI.COMM_WORLD
hiercoll.alltoall(comm, np.arange(comm.size), algorithm="grouped", memory="shared")
if comm.rank == 1:
    raise RuntimeError("on purpose")
hiercoll.alltoall(comm, np.arange(comm.size), algorithm="grouped", memory="shared")
