"""The MPI library's own collectives as engines."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hiercoll.binding import native_message
from hiercoll.engines import Engine, Native, NativePersistent
from hiercoll.errors import ConstraintError
from hiercoll.sizes import Blocks
from hiercoll.work import Work


def even(comm: MPI.Intracomm, work: Work, send: int, recv: int, *, held: bool) -> Engine:
    """Equal blocks in buffers at these addresses; ``held``: see `Native`."""
    sendbuf: Any = MPI.IN_PLACE
    datatypes = []
    if not work.inplace:
        sendbuf, datatype = native_message(send, work.block, comm.size if work.collective == "alltoall" else 1)
        datatypes.append(datatype)
    recvbuf, datatype = native_message(recv, work.block, comm.size)
    datatypes.append(datatype)
    return _engine(comm, work, (sendbuf, recvbuf), [datatype for datatype in datatypes if datatype], held)


def uneven(comm: MPI.Intracomm, work: Work, blocks: Blocks, addresses: tuple[int, int], *, held: bool) -> Engine:
    """Blocks of any sizes in buffers at (send, receive) addresses."""
    ends = ((addresses[0], blocks.sent, blocks.sent_at), (addresses[1], blocks.received, blocks.received_at))
    sendbuf, recvbuf = (
        [MPI.buffer.fromaddress(at, int((sizes + places).max(initial=0)) if at else 0), sizes, places, MPI.BYTE]
        for at, sizes, places in ends
    )
    mine: Any = sendbuf
    if work.collective == "allgatherv":
        mine = MPI.IN_PLACE
        if not work.inplace:
            length = int(blocks.sent[0])
            mine = [MPI.buffer.fromaddress(addresses[0] + int(blocks.sent_at[0]), length), length, MPI.BYTE]
    return _engine(comm, work, (mine, recvbuf), [], held)


def _engine(
    comm: MPI.Intracomm, work: Work, args: tuple[Any, ...], datatypes: list[MPI.Datatype], held: bool
) -> Engine:
    """The form of the collective that the call names. Raises ConstraintError where the library lacks it."""
    name, form = work.collective.capitalize(), work.params.get("form", "")
    if form == "persistent":
        try:
            return NativePersistent(getattr(comm, f"{name}_init"), args, datatypes)
        except NotImplementedError:
            expected = "an MPI library with persistent collectives (MPI 4.0)"
            raise ConstraintError("native form=persistent", expected, MPI.get_vendor()[0], comm.rank) from None
    blocking, nonblocking = getattr(comm, name), getattr(comm, f"I{work.collective}")
    return Native(blocking, nonblocking, args, datatypes, held or form == "nonblocking")
