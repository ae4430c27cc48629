"""hiercoll can be imported before MPI.Init, and refuses to work until then."""

import mpi4py

mpi4py.rc.initialize = False

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import hiercoll  # noqa: E402
from hiercoll import alltoall  # noqa: E402

try:
    alltoall(MPI.COMM_WORLD, np.arange(4))
    raise SystemExit("served before MPI.Init")
except hiercoll.CommunicatorError:
    pass
MPI.Init()
alltoall(MPI.COMM_WORLD, np.arange(MPI.COMM_WORLD.size))
MPI.Finalize()
