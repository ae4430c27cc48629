"""Exit handlers that come after the report call collectives, too; it does not see these.

Run by: python -m hiercoll --report-file /dev/null
Expect: a report
"""

import atexit


def late() -> None:
    """Collective calls when hiercoll has ended."""
    assert comm.allreduce(1) == comm.size
    comm.Barrier()


atexit.register(late)
from mpi4py import MPI  # noqa: E402

comm = MPI.COMM_WORLD
comm.Barrier()
