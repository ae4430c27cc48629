"""Exit handlers make collective calls, whenever they were registered: hiercoll serves them, or once it has ended itself
leaves them to the MPI library.

Run by: python -m hiercoll
"""

import atexit
import sys

import numpy as np

served = []


def calls(expected: bool) -> None:
    """In a handler an exception would only be printed; that is seen, too."""
    size, before = comm.size, counted.total()
    for each in (comm, comm.Dup(), never_called):
        mine, theirs = np.arange(size) + 10 * each.rank, np.full(size, -1)
        each.Barrier()
        each.Alltoall(mine, theirs)
        assert theirs.tolist() == [10 * rank + each.rank for rank in range(size)], theirs
        theirs[:] = -1
        each.Ialltoall(mine, theirs).Wait()
        assert theirs.tolist() == [10 * rank + each.rank for rank in range(size)], theirs
        theirs[:] = -1
        each.Alltoallv([mine, [1] * size], [theirs, [1] * size])
        assert theirs.tolist() == [10 * rank + each.rank for rank in range(size)], theirs
        assert each.allgather(each.rank) == list(range(size))
    assert counted.total() > before
    by_hiercoll = sum(number for name, number in counted.items() if not name.endswith("native"))
    assert (by_hiercoll > served[-1]) is expected, counted
    served.append(by_hiercoll)


atexit.register(calls, False)  # after hiercoll's own
from mpi4py import MPI  # noqa: E402

from hiercoll.calls import dropin  # noqa: E402

counted = dropin.Calls()
dropin.observe(counted)
comm = MPI.COMM_WORLD
never_called = comm.Split()
atexit.register(calls, True)  # before hiercoll's own, though it comes before the first call
comm.Alltoall(np.arange(comm.size), np.empty(comm.size, int))
served.append(counted["alltoall"])
if not served[-1]:
    sys.exit("not served by hiercoll")
