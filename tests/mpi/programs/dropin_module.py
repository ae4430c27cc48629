"""A program that knows nothing of hiercoll, and finalizes MPI itself.

Run by: python -m hiercoll --trace /dev/null
"""

import copy
import pickle
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD.Dup()
assert type(comm) is not MPI.Intracomm and type(comm).__module__ == "mpi4py.MPI" and sys.argv[1:] == []
world = MPI.COMM_WORLD
for each in (world, MPI.Intracomm(world), MPI.Comm.f2py(world.py2f()), MPI.Intracomm.fromhandle(world.handle)):
    text = pickle.dumps(each)
    assert pickle.loads(text) is world is copy.copy(world) is copy.deepcopy(world) and b"hiercoll" not in text
recv = np.empty((comm.size, 2))
comm.Allgather(np.full(2, comm.rank, "d"), recv)
assert (recv == np.arange(comm.size)[:, None]).all()
comm.Free()
MPI.Finalize()
