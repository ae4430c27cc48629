"""Ranks initialise MPI with different support of threads; what one of them lacks, all do without."""

import os

import mpi4py

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
mpi4py.rc.thread_level = "funneled" if rank == 1 else "multiple"

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import hiercoll  # noqa: E402

os.environ.pop("HIERCOLL_TABLE", None)
comm = hiercoll.Intracomm(MPI.COMM_WORLD)
duplicate = comm.Dup()
for each in (comm, duplicate, comm.Split(rank % 2)):
    total = np.empty(2)
    for _ in range(3):
        each.Allreduce(np.ones(2), total)
        assert (total == each.size).all()
    assert each.allgather(rank)[each.rank] == rank
    assert each.bcast(rank if each.rank == 0 else None) % 2 in (0, rank % 2)
    recv = np.empty(each.size)
    each.Ialltoall(np.arange(float(each.size)), recv).Wait()
    assert (recv == each.rank).all()
