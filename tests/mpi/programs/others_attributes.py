"""A communicator is freed that holds attributes of others beside that of hiercoll.

MPICH deletes them one by one, and mpi4py looks among them in between for the communicator's topology; a process without
free places for attributes ends by that. Only the compiled engine hears of the end without mpi4py: with Python's
engines there are no others' attributes here.
"""

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.runtime import compiled

others = compiled.load()[0] is not None
MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size]).Free()  # from then on there may be topologies
keys = [MPI.Comm.Create_keyval() for _ in range(2)]
for turn in range(60):
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(), turn)  # so that each place is the last free one once
    comm = MPI.COMM_WORLD.Dup()
    if others:
        comm.Set_attr(keys[0], turn)
    assert hiercoll.get_topology(comm).size == comm.size
    if others:
        comm.Set_attr(keys[1], turn)
    assert (hiercoll.allgather(comm, np.array([comm.rank])).ravel() == np.arange(comm.size)).all()
    comm.Free()
    assert comm == MPI.COMM_NULL
