"""One rank of an unmodified program leaves with an exit status while others wait: the job ends.

Expect: failure
Run by: python -m hiercoll --algorithm alltoall=bruck
"""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
recv = np.empty(comm.size)
comm.Alltoall(np.arange(float(comm.size)), recv)
assert (recv == comm.rank).all()
if comm.rank == 2:
    sys.exit("on purpose")
comm.Barrier()
