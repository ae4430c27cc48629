"""A report waits for no rank before the program's own exit handlers have run: other ranks may wait for what these do.

Run by: python -m hiercoll --report-file /dev/null
Expect: a report
"""

import atexit
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
assert comm.allreduce(1) == comm.size


def close() -> None:
    """Let the first rank end, as dask-mpi does."""
    comm.send("end", dest=0)


if comm.rank:
    atexit.register(close)
else:
    sys.last_value = ValueError("of a test that pytest expects to fail")  # says nothing of how the program ends
    for source in range(1, comm.size):
        assert comm.recv(source=source) == "end"
