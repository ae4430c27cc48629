"""The MPI library's own collectives, called or as engines, on the buffers of a request."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from hiercoll.collectives import Holds
from hiercoll.errors import ConstraintError
from hiercoll.memory import SINGLE, Array, Now, convert, elements
from hiercoll.runtime.engines import Between, Engine, Native, NativePersistent
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.messages import native_message
from hiercoll.runtime.operations import Operation
from hiercoll.runtime.request import Data, Request


def engine(comm: MPI.Intracomm, request: Request, rank: int, sent: int, received: int, *, held: bool) -> Engine:
    """The form of the collective that the request names, on buffers at these addresses; ``held``: see `Native`.

    Raises ConstraintError where the library lacks it, or delivers wrong data in it.
    """
    if request.operation is not None and request.operation.narrow is not None:
        return _in_single(comm, request, request.operation, rank, sent, received, held=held)
    record, form = request.collective, request.variant.params.get("form", "")
    args, datatypes = (_equal if record.is_even else _uneven)(request, rank, sent, received)
    if request.operation is not None:
        args = (*args, request.operation.op)
    if record.root:
        args = (*args, request.root)
    if form == "persistent":
        lacking = "an MPI library with persistent collectives (MPI 4.0)"
        if not request.variant.is_sound(mpi_library()):
            raise ConstraintError("native form=persistent", f"{lacking} that deliver right data", mpi_library(), rank)
        try:
            return NativePersistent(getattr(comm, record.persistent), args, datatypes)
        except NotImplementedError:
            raise ConstraintError("native form=persistent", lacking, mpi_library(), rank) from None
    blocking, nonblocking = getattr(comm, record.native), getattr(comm, record.nonblocking)
    return Native(blocking, nonblocking, args, datatypes, held or form == "nonblocking")


def _in_single(
    comm: MPI.Intracomm, request: Request, how: Operation, rank: int, sent: int, received: int, *, held: bool
) -> Engine:
    """The same on copies of the buffers in single precision, which are made, and rounded, in each start."""

    def side(address: int, data: Data) -> tuple[Data, Array, Array]:
        narrow = elements(address, data.nbytes // request.item, data.type)
        wide, times = np.empty(narrow.shape, SINGLE), SINGLE.itemsize // request.item
        sizes, at = (None if each is None else times * each for each in (data.sizes, data.at))
        made = data._replace(address=wide.ctypes.data, block=times * data.block, sizes=sizes, at=at)
        return made, narrow, wide

    into, result, sums = side(received, request.received)
    out, given, widened = (into, result, sums) if request.sent is None else side(sent, request.sent)
    ends: dict[str, Any] = {"sent": None if request.sent is None else out, "received": into}
    inner = engine(
        comm, request._replace(operation=how._replace(narrow=None), **ends), rank, out.address, into.address, held=held
    )
    before, after = ([(given, widened)], [(sums, result)])
    return Between([Now(partial(convert, before))], inner, [Now(partial(convert, after))])


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
    in_place = _in_place(request, sent, received)
    if not record.buffers:
        return (), []
    ends = [(received, data.blocks)]
    if request.sent is not None and not in_place:
        ends.insert(0, (sent, request.sent.blocks))
    made = [_message(request, address, block, blocks) for address, blocks in ends]
    args: list[Any] = [message if blocks else None for (message, _), (_, blocks) in zip(made, ends, strict=True)]
    if in_place and not record.one_buffer:
        args.insert(0, MPI.IN_PLACE)
    elif record.is_rooted and request.root == rank and not record.operation and _overlap(ends, block):
        args[1 if record.send is Holds.EACH else 0] = MPI.IN_PLACE
    return tuple(args), [datatype for _, datatype in made if datatype is not None]


def _in_place(request: Request, sent: int, received: int) -> bool:
    """Whether what is sent lies where results come to lie, and was not copied."""
    return request.sent is None or (request.sent.overwritten and sent == received)


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
    record, blocks = request.collective, request.blocks(rank)
    if request.operation is not None:
        elements, counts = partial(_elements, request.operation), blocks.sent // request.operation.item
        whole = elements(sent, int(blocks.sent.sum()), 1)
        if _in_place(request, sent, received):
            return (MPI.IN_PLACE, whole, counts), []
        return (whole, elements(received, int(blocks.received[0]), 1), counts), []
    ends = [
        (record.send, sent, blocks.sent, blocks.sent_at), (record.recv, received, blocks.received, blocks.received_at)
    ]  # fmt: skip
    if _in_place(request, sent, received):
        return (MPI.IN_PLACE, _blocks(*ends[1], typed=record.typed)), []
    made: list[Any] = [_blocks(*each, typed=record.typed) for each in ends]
    if record.is_rooted and rank == request.root:
        own = slice(rank, rank + 1)
        places = [at + where[own if holds is Holds.EACH else slice(1)] for holds, at, _, where in ends]
        if places[0] == places[1]:
            made[1 if record.send is Holds.EACH else 0] = MPI.IN_PLACE
    return tuple(made), []


def _blocks(holds: Holds, address: int, sizes: Any, places: Any, *, typed: bool = False) -> Any:
    """A buffer of blocks of any sizes; None if there are none. ``typed``: with a datatype for each."""
    if not len(sizes):
        return None
    if holds is Holds.ONE:
        length = int(sizes[0])
        return [MPI.buffer.fromaddress(address + int(places[0]), length), length, MPI.BYTE]
    span = int((sizes + places).max(initial=0)) if address else 0
    return [MPI.buffer.fromaddress(address, span), sizes, places, [MPI.BYTE] * len(sizes) if typed else MPI.BYTE]
