"""The MPI library's own collectives as engines."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hiercoll.engines import Engine, Native
from hiercoll.executor import native_message
from hiercoll.interpreter import Blocks
from hiercoll.work import Work


def even(comm: MPI.Intracomm, work: Work, send: int, recv: int, *, own: bool) -> Engine:
    """Equal blocks in buffers at these addresses; ``own``: see `Native`."""
    alltoall = work.collective == "alltoall"
    sendbuf: Any = MPI.IN_PLACE
    datatypes = []
    if not work.inplace:
        sendbuf, datatype = native_message(send, work.block, comm.size if alltoall else 1)
        datatypes.append(datatype)
    recvbuf, datatype = native_message(recv, work.block, comm.size)
    datatypes.append(datatype)
    calls = (comm.Alltoall, comm.Ialltoall) if alltoall else (comm.Allgather, comm.Iallgather)
    return Native(*calls, (sendbuf, recvbuf), [datatype for datatype in datatypes if datatype], own)


def uneven(comm: MPI.Intracomm, work: Work, blocks: Blocks, addresses: tuple[int, int], *, own: bool) -> Engine:
    """Blocks of any sizes in buffers at (send, receive) addresses."""
    ends = ((addresses[0], blocks.sent, blocks.sent_at), (addresses[1], blocks.received, blocks.received_at))
    sendbuf, recvbuf = (
        [MPI.buffer.fromaddress(at, int((sizes + places).max(initial=0)) if at else 0), sizes, places, MPI.BYTE]
        for at, sizes, places in ends
    )
    if work.collective == "alltoallv":
        return Native(comm.Alltoallv, comm.Ialltoallv, (sendbuf, recvbuf), [], own)
    mine: Any = MPI.IN_PLACE
    if not work.inplace:
        length = int(blocks.sent[0])
        mine = [MPI.buffer.fromaddress(addresses[0] + int(blocks.sent_at[0]), length), length, MPI.BYTE]
    return Native(comm.Allgatherv, comm.Iallgatherv, (mine, recvbuf), [], own)
