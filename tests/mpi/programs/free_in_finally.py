"""An exception on one rank is told and ends the job, although `finally` frees the communicator.

Run by: python -m mpi4py. Expect: failure.
"""

import numpy as np
from mpi4py import MPI

import hiercoll

comm = MPI.COMM_WORLD.Dup()
try:
    hiercoll.alltoall(comm, np.arange(comm.size), algorithm="grouped", memory="shared")
    if comm.rank == 1:
        raise RuntimeError("on purpose")
    hiercoll.alltoall(comm, np.arange(comm.size), algorithm="grouped", memory="shared")
finally:
    comm.Free()
