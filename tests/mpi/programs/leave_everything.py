"""Plans, windows and communicators that nobody frees are freed at exit, in silence."""

import os

import numpy as np
from mpi4py import MPI

import hiercoll

world = MPI.COMM_WORLD
os.environ["HIERCOLL_NODES"] = f"{world.size // 2}+{world.size - world.size // 2}"
parts = [world, world.Split(world.rank % 2, world.rank), world.Dup()]
plans = []
for comm in parts:
    send = np.arange(comm.size * 3)
    for algorithm, params in (("grouped", {"memory": "shared"}), ("pairwise", {}), ("native", {})):
        hiercoll.alltoall(comm, send, algorithm=algorithm, **params)
        plans.append(hiercoll.alltoall_init(comm, send, algorithm=algorithm, **params))
        plans[-1]()
    hiercoll.allgather(comm, send, algorithm="shared")
