"""The MPI library's own collectives, called or as engines, on the buffers of a request."""

from __future__ import annotations

from functools import cache
from typing import Any

from mpi4py import MPI

from hiercoll.collectives import Holds
from hiercoll.errors import ConstraintError
from hiercoll.runtime.engines import Engine, Native, NativePersistent
from hiercoll.runtime.messages import native_message
from hiercoll.runtime.operations import Operation
from hiercoll.runtime.request import Request


@cache
def mpi_library() -> str:
    """Name and version of the MPI library, as in tables: "MPICH 5.0.2"."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def engine(comm: MPI.Intracomm, request: Request, rank: int, sent: int, received: int, *, held: bool) -> Engine:
    """The form of the collective that the request names, on buffers at these addresses; ``held``: see `Native`.

    Raises ConstraintError where the library lacks it.
    """
    record, form = request.collective, request.variant.params.get("form", "")
    args, datatypes = (_equal if record.is_even else _uneven)(request, rank, sent, received)
    if request.operation is not None:
        args = (*args, request.operation.op)
    if record.root:
        args = (*args, request.root)
    if form == "persistent":
        try:
            return NativePersistent(getattr(comm, record.persistent), args, datatypes)
        except NotImplementedError:
            expected = "an MPI library with persistent collectives (MPI 4.0)"
            raise ConstraintError("native form=persistent", expected, MPI.get_vendor()[0], comm.rank) from None
    blocking, nonblocking = getattr(comm, record.native), getattr(comm, record.nonblocking)
    return Native(blocking, nonblocking, args, datatypes, held or form == "nonblocking")


def call(comm: MPI.Intracomm, request: Request, rank: int) -> None:
    """The library's blocking call."""
    sent = 0 if request.sent is None else request.sent.address
    made = engine(comm, request, rank, sent, request.received.address, held=False)
    made.run()
    made.free()


Parts = tuple[tuple[Any, ...], list[MPI.Datatype]]


def _equal(request: Request, rank: int, sent: int, received: int) -> Parts:
    """Buffers of equal blocks as arguments, and datatypes to free with them."""
    block, data, record = request.received.block, request.received, request.collective
    ends = [(received, data.blocks)]
    if request.sent is not None:
        ends.insert(0, (sent, request.sent.blocks))
    made = [_message(request, address, block, blocks) for address, blocks in ends]
    args: list[Any] = [message if blocks else None for (message, _), (_, blocks) in zip(made, ends, strict=True)]
    if request.sent is None and not record.one_buffer:
        args.insert(0, MPI.IN_PLACE)
    elif record.is_rooted and request.root == rank and not record.operation and _overlap(ends, block):
        args[1 if record.send is Holds.EACH else 0] = MPI.IN_PLACE
    return tuple(args), [datatype for _, datatype in made if datatype is not None]


def _overlap(ends: list[tuple[int, int]], block: int) -> bool:
    """Whether one of two buffers lies in the other."""
    (one, few), (other, more) = ends
    return one < other + more * block and other < one + few * block


def _message(request: Request, address: int, block: int, blocks: int) -> tuple[list[Any], MPI.Datatype | None]:
    """A buffer of equal blocks, and a datatype to free with it."""
    if request.operation is None:
        return native_message(address, block, blocks)
    return _elements(request.operation, address, block, blocks), None


def _elements(how: Operation, address: int, block: int, blocks: int) -> list[Any]:
    """A buffer of equal blocks of elements that are to be combined."""
    return [MPI.buffer.fromaddress(address, block * blocks), block // how.item, how.datatype]


def _uneven(request: Request, rank: int, sent: int, received: int) -> Parts:
    """The same of blocks of any sizes."""
    blocks = request.blocks(rank)
    ends = ((sent, blocks.sent, blocks.sent_at), (received, blocks.received, blocks.received_at))
    out, into = (
        [MPI.buffer.fromaddress(at, int((sizes + places).max(initial=0)) if at else 0), sizes, places, MPI.BYTE]
        for at, sizes, places in ends
    )
    if request.sent is None:
        return (MPI.IN_PLACE, into), []
    if request.collective.send is Holds.ONE:
        length = int(blocks.sent[0])
        out = [MPI.buffer.fromaddress(sent + int(blocks.sent_at[0]), length), length, MPI.BYTE]
    return (out, into), []
