"""A rank that waits for a flag in shared memory has a large message to finish: it must not hold it up.

Two nodes joined by the network in MPICH's eyes (cliques, and TCP for UCX); elsewhere two virtual ones.
"""

import os

os.environ.update(MPIR_CVAR_NUM_CLIQUES="2", MPIR_CVAR_CLIQUES_BY_BLOCK="1", UCX_TLS="tcp,self")
os.environ["HIERCOLL_NODES"] = "2x2"  # before MPI starts

import numpy as np
from mpi4py import MPI

import hiercoll.calls.functions  # noqa: F401  (MPI must not be looked at before)
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.window import Arena, Window

session = get_session(MPI.COMM_WORLD)
comm = session.comm
large, word = np.full(16 << 20, 7, np.uint8), np.empty(1, np.uint8)
board = Window(comm, session.node, Arena(session.node, 1024, 64), 64, 1, 1, 64)
board.epoch = 1
if comm.rank == 0:
    request = comm.Isend(large, 2)
    board.wait([board.slot(1, 0)], 0)  # rank 1 raises it when rank 2 has got everything
    request.Wait()
elif comm.rank == 1:
    comm.Recv(word, 2)
    board.raise_flag(board.slot(1, 0))
elif comm.rank == 2:
    large[:] = 0
    comm.Recv(large, 0)
    assert (large == 7).all()
    comm.Send(word, 1)
comm.Barrier()
board.free()
