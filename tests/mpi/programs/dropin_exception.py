"""An exception on one rank of an unmodified program ends the job.

Expect: failure
Run by: python -m hiercoll --algorithm alltoall=bruck
"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
recv = np.empty(comm.size)
comm.Alltoall(np.arange(float(comm.size)), recv)
assert (recv == comm.rank).all()
if comm.rank == 2:
    raise ValueError("on purpose")
comm.Barrier()
