"""A program that knows nothing of hiercoll, and finalizes MPI itself.

Run by: python -m hiercoll --trace /dev/null
"""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD.Dup()
assert type(comm).__module__ == "hiercoll.calls.dropin" and sys.argv[1:] == []
recv = np.empty((comm.size, 2))
comm.Allgather(np.full(2, comm.rank, "d"), recv)
assert (recv == np.arange(comm.size)[:, None]).all()
comm.Free()
MPI.Finalize()
