"""An exit handler that comes after the report ends MPI, and the report is not asked for again.

Run by: python -m hiercoll --report-file /dev/null
Expect: a report
"""

import atexit

import mpi4py

mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI  # noqa: E402


@atexit.register
def late() -> None:
    """Registered before MPI begins."""
    assert MPI.COMM_WORLD.allgather(1) == [1] * MPI.COMM_WORLD.size
    MPI.Finalize()
    assert MPI.Is_finalized()


MPI.Init_thread(MPI.THREAD_MULTIPLE)
MPI.COMM_WORLD.Barrier()
