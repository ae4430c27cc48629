"""A program's own settings of mpi4py hold: MPI does not begin before it says so, nor with other threads.

Run by: python -m hiercoll
"""

import mpi4py

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

assert not MPI.Is_initialized()
assert MPI.Init_thread(MPI.THREAD_FUNNELED) == MPI.Query_thread() == MPI.THREAD_FUNNELED

import numpy as np  # noqa: E402

comm = MPI.COMM_WORLD
assert type(comm) is not MPI.Intracomm
given = np.full(3, comm.rank)
comm.Allreduce(MPI.IN_PLACE, given)
assert given.tolist() == [sum(range(comm.size))] * 3
MPI.Finalize()
