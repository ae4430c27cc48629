"""mpi4py.rc is the program's to set, before it imports MPI.

Run by: python -m hiercoll --report-file /dev/null
Expect: a report
"""

import mpi4py

mpi4py.rc(threads=False)
from mpi4py import MPI  # noqa: E402

assert MPI.Query_thread() == MPI.THREAD_SINGLE
assert type(MPI.COMM_WORLD) is not MPI.Intracomm
assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size
MPI.COMM_WORLD.Barrier()
