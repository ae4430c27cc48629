"""The buffers of a call as they lie in memory: what a program gives, read into `Data`.

Equal blocks are one run of bytes, others have sizes and places. What is not just its bytes lies in a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from mpi4py import MPI

from hiercoll.cuda import device_at, is_device_array
from hiercoll.cuda.arrays import device_array, new_like, with_axes_reversed
from hiercoll.errors import BufferOverlapError, BufferSizeError, BufferTypeError
from hiercoll.memory import Now, Transfer, host_buffer
from hiercoll.memory.regions import packing
from hiercoll.runtime.datatypes import own_datatype
from hiercoll.runtime.request import Data
from hiercoll.runtime.specifications import (
    UNREADABLE,
    Apart,
    Message,
    TypedMessage,
    apart,
    block_message,
    copying,
    each_block,
    lasting,
)

if TYPE_CHECKING:
    from hiercoll.runtime.beginning import Beginning
    from hiercoll.runtime.session import Session

Spec = TypeVar("Spec", bound=Message | TypedMessage)
NUMBERS = "biufc"  # kinds of NumPy's types of numbers


def equal_blocks(
    session: Session | Beginning,
    spec: Any,
    argument: str,
    blocks: int,
    *,
    strict: bool,
    combined: bool = False,
    writable: bool = True,
) -> Data:
    """Equal blocks in a buffer that is given as mpi4py takes it or, ``strict``, in an array of any fixed-size type.
    Elements that are to be ``combined`` stay as they are, with what lies between their parts; where these are
    ``writable``, in a copy, of which their parts alone come back."""
    if strict and not isinstance(spec, list | tuple):
        return _array(session, spec, argument, blocks, writable)
    message = read_message(session, block_message, spec, argument, blocks, writable=writable)
    element, start = message.element, message.displs * message.element.extent
    if combined:
        element = replace(element, size=element.extent, plain=True)
    block = message.counts * element.size
    if strict and element.plain and start + block * blocks > message.nbytes:
        got = f"{message.counts} items of {element.size} bytes in each of {blocks} blocks"
        got += f" from byte {start} on, with a buffer of {message.nbytes} bytes"
        raise BufferSizeError(argument, "counts that fit the buffer", got, session.rank)
    if block and not (element.plain and (message.address or combined)):
        return copied_blocks(session, message, blocks, argument, block)
    place = _device(session, message.buffer, argument, writable)
    data = Data(message.address + start, blocks, block, message.datatype, message.buffer, place=place)
    has_gaps = message.element.size < message.element.extent and not message.datatype.is_predefined
    if combined and writable and block and has_gaps and place == "host":  # devices do not combine such elements
        return _between_gaps(data, message.datatype)
    return data


def _between_gaps(data: Data, datatype: MPI.Datatype) -> Data:
    """Elements that are combined in a copy, with whatever lies between their parts there; the parts come back."""
    copied = put_aside(data)
    own = own_datatype(datatype)
    elements = data.nbytes // datatype.extent
    packed = np.empty(own.Pack_size(elements, MPI.COMM_SELF), np.uint8)
    theirs, ours = (MPI.buffer.fromaddress(address, data.nbytes) for address in (data.address, copied.address))

    def parts_back() -> None:
        own.Pack(ours, packed, 0, MPI.COMM_SELF)
        own.Unpack(packed, 0, theirs, MPI.COMM_SELF)

    def start(outward: bool) -> Transfer:
        assert copied.copying is not None
        return copied.copying(outward) if outward else Now(parts_back)

    return copied._replace(copying=start)


def _array(session: Session | Beginning, array: Any, argument: str, blocks: int, writable: bool) -> Data:
    """All of an array, on the host or on a device, in equal blocks."""
    if type(array) is np.ndarray and array.dtype.kind in NUMBERS and array.nbytes:  # the usual ones, at less cost
        flags, dtype, items = array.flags, array.dtype, array.size
        fits = not items % blocks and (flags.writeable or not writable)
        if fits and (flags.c_contiguous or flags.f_contiguous):
            return Data(MPI.Get_address(array), blocks, array.nbytes // blocks, dtype, array)
    place = _device(session, array, argument, writable)
    if is_device_array(array):
        found = device_array(array, argument, session.rank, writable=writable)
        address, nbytes, dtype, owner = found.address, found.nbytes, found.dtype, array
    else:
        buffer = host_buffer(array, argument, session.rank, writable=writable)
        address, nbytes, dtype, owner = buffer.address, buffer.nbytes, buffer.dtype, buffer.array
    items = nbytes // dtype.itemsize if dtype.itemsize else 0
    if items % blocks:
        raise BufferSizeError(argument, f"a number of elements that {blocks} ranks divide", items, session.rank)
    return Data(address, blocks, nbytes // blocks, dtype, owner, place=place)


def _device(session: Session | Beginning, array: Any, argument: str, writable: bool) -> str:
    """Where an array lies. Raises DeviceError, and BufferTypeError for one of a device that cannot be used."""
    if is_device_array(array):
        device_array(array, argument, session.rank, writable=writable)
    return place_of(session, array)


def place_of(session: Session | Beginning, array: Any) -> str:
    """Where an array lies: "host", which goes for empty arrays too, or the name of a device. Raises DeviceError."""
    if not is_device_array(array):
        return "host"
    found = device_array(array, "array", session.rank, writable=False)
    return session.memories.place(device_at(found.address)) if found.nbytes else "host"


def check_pair(session: Session | Beginning, sent: Data, received: Data, strict: bool) -> None:
    """Sizes of a send and a receive buffer, and what `check_alike` looks at."""
    if sent.block != received.block:
        factor = received.blocks // sent.blocks
        what = f" ({factor} x sendbuf)" if factor > 1 else ", as sendbuf"
        expected = f"{sent.block * received.blocks} bytes{what}"
        raise BufferSizeError("recvbuf", expected, f"{received.nbytes} bytes", session.rank)
    check_alike(sent, received, session.rank, strict)


def check_alike(sent: Data, received: Data, rank: int, strict: bool) -> None:
    """Places of a send and a receive buffer and, ``strict``, their types and overlap."""
    if sent.place != received.place and sent.nbytes and received.nbytes:
        expected = "memory of the host, as sendbuf" if sent.place == "host" else f"memory of {sent.place}, as sendbuf"
        raise BufferTypeError("recvbuf", expected, received.place, rank)
    if not strict:
        return
    ours, theirs = sent.type, received.type
    if isinstance(ours, np.dtype) and isinstance(theirs, np.dtype) and ours != theirs:
        raise BufferTypeError("recvbuf", f"the type of sendbuf, {ours}", str(theirs), rank)
    ends = sent.address + sent.nbytes, received.address + received.nbytes
    shared = min(ends) - max(sent.address, received.address)
    if shared > 0 and sent.nbytes and not sent.copying and not received.copying:
        expected = "a buffer apart from sendbuf (or sendbuf=MPI.IN_PLACE)"
        raise BufferOverlapError("recvbuf", expected, f"{shared} shared bytes", rank)


def array_like(sent: Data, blocks: int, axes: int, rank: int) -> Data:
    """A new array like that of ``sent``, with so many of it along a new first axis, if there are more ``axes``; if
    there are fewer, one of its rows, or so much in one axis.

    Memory order is kept within a block, so that what arrives has the sender's indices.
    """
    array, first, stacked = sent.owner, (blocks,) if axes > 0 else (), axes > 0
    if is_device_array(array):
        found = device_array(array, "sendbuf", rank, writable=False)
        is_whole = sent.nbytes == found.nbytes
        shape = found.shape if is_whole else (sent.nbytes // max(found.dtype.itemsize, 1),)
        if axes < 0:
            rows = is_whole and found.in_c_order and shape[0] == sent.blocks
            shape = shape[1:] if rows else (sent.block // found.dtype.itemsize,)
        is_reversed = axes >= 0 and is_whole and not found.in_c_order
        made = new_like(array, (*first, *(shape[::-1] if is_reversed else shape)), rank)
        address = device_array(made, "recvbuf", rank, writable=True).address
        result = with_axes_reversed(made, len(first), rank) if is_reversed else made
        return sent._replace(address=address, blocks=blocks, owner=result)
    if not isinstance(array, np.ndarray):
        array = np.asarray(memoryview(array))
    if axes < 0:
        rows = sent.nbytes == array.nbytes and array.shape[0] == sent.blocks and array.flags.c_contiguous
        shape = array.shape[1:] if rows else (sent.block // max(array.dtype.itemsize, 1),)
        new = view = np.empty(shape, array.dtype)
    elif sent.nbytes != array.nbytes:  # a count smaller than the buffer: only so much, as a plain array
        new = view = np.empty((*first, sent.nbytes // max(array.dtype.itemsize, 1)), array.dtype)
    elif not stacked:
        new = view = np.empty_like(array, subok=False)
    elif array.flags.c_contiguous:
        new = view = np.empty((*first, *array.shape), array.dtype)
    else:
        new = np.empty((*first, *array.shape[::-1]), array.dtype)
        view = new.transpose(0, *range(array.ndim, 0, -1))
    return Data(MPI.Get_address(new), blocks, sent.block, sent.type, view)


def own_block(data: Data, root: int, blocks: int) -> Data:
    """The root's own block of ``data``, or no block (``blocks`` is 0), as a buffer of its own."""
    address = data.address + root * data.block if blocks else 0
    return Data(address, blocks, data.block, data.type, data.owner if blocks else None, place=data.place)


def put_aside(data: Data) -> Data:
    """Data that are overwritten: on the host in a copy that is made before each start."""
    if data.place != "host":
        return data._replace(overwritten=True)
    kept = np.empty(data.nbytes, np.uint8)
    address = MPI.Get_address(kept)

    def copying(outward: bool) -> Transfer:
        source, target = (data.address, address) if outward else (address, data.address)
        return Now(partial(memmove, target, source, data.nbytes))

    return data._replace(address=address, owner=kept, copying=copying)


def uneven_blocks(
    session: Session | Beginning,
    message: Message | TypedMessage,
    blocks: int,
    argument: str,
    *,
    writable: bool,
    strict: bool = False,
) -> Data:
    """Blocks of the sizes that a message gives: where they lie, or in a copy where their bytes lie apart. Raises
    BufferSizeError if they do not fit the buffer, BufferTypeError for such bytes on a device."""
    place = "host"
    if is_device_array(message.buffer):
        found = device_array(message.buffer, argument, session.rank, writable=writable)
        place = session.memories.place(device_at(found.address if found.nbytes else 0))
    if isinstance(message, TypedMessage) or not (message.element.plain and (message.address or place != "host")):
        return _apart(session, message, blocks, argument, strict, place)
    sizes, at = each_block(message, blocks)
    if message.element.size != 1:
        sizes, at = sizes * message.element.size, at * message.element.size
    if sizes.min() < 0:
        least = sizes.min() // message.element.size
        raise BufferSizeError(argument, "counts of at least 0", least, session.rank)
    if at.min() < 0 or (at + sizes).max() > message.nbytes:  # in which empty blocks do not count
        outside = (sizes > 0) & ((at < 0) | (at + sizes > message.nbytes))
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            got = f"{sizes[first]} bytes at {at[first]} for block {first}, with a buffer of {message.nbytes} bytes"
            raise BufferSizeError(argument, "counts and displacements that fit the buffer", got, session.rank)
        at = at * (sizes > 0)
    return Data(message.address, blocks, 0, message.datatype, message.buffer, sizes, at, place)


def _apart(
    session: Session | Beginning,
    message: Message | TypedMessage,
    blocks: int,
    argument: str,
    strict: bool,
    place: str = "host",
) -> Data:
    """Blocks of any datatypes: where they lie, if each is one run of bytes, else in a copy. ``strict``: what lies
    outside of the buffer is refused, as far as that is known. Raises BufferSizeError, BufferTypeError."""
    lying = _lying(session, message, blocks, argument)
    known = packing(lying.blocks)
    low, high = (0, 0) if known is None else known.bounds
    if strict and message.address and (low < 0 or high > message.nbytes):
        got = f"bytes {low} to {high}, with a buffer of {message.nbytes} bytes"
        raise BufferSizeError(argument, "datatypes that fit the buffer", got, session.rank)
    has_place = bool(message.address) or (place != "host" and high == low)  # an empty array of a device may have none
    if known is not None and known.runs is not None and low >= 0 and has_place:
        kind = None if isinstance(message, TypedMessage) else message.datatype
        return Data(message.address, blocks, 0, kind, message.buffer, known.sizes, known.runs, place)
    if place != "host":
        expected = "elements that are just their bytes, in the memory of a device"
        raise BufferTypeError(argument, expected, "a datatype whose bytes lie apart", session.rank)
    return copied_blocks(session, message, blocks, argument)


def placed_alike(one: Data, other: Data) -> tuple[Data, Data]:
    """Blocks without any bytes are wherever the others are."""
    if not one.nbytes:
        return one._replace(place=other.place), other
    return one, other if other.nbytes else other._replace(place=one.place)


def some_blocks(data: Data, which: slice) -> Data:
    """Some of the blocks; none have no address."""
    sizes, at = (each[which] for each in data.each_block())
    some = len(sizes) > 0
    return Data(data.address if some else 0, len(sizes), 0, data.type, data.owner, sizes, at, data.place)


def read_message(
    session: Session | Beginning,
    reader: Callable[..., Spec],
    spec: Any,
    argument: str,
    blocks: int,
    *,
    writable: bool,
) -> Spec:
    """The message. Raises BufferTypeError."""
    try:
        return reader(spec, blocks, readonly=not writable)
    except UNREADABLE as error:
        expected = "a buffer on the host with mpi4py's counts, displacements and datatype"
        raise BufferTypeError(argument, expected, str(error), session.rank) from None


def copied_blocks(
    session: Session | Beginning,
    message: Message | TypedMessage,
    blocks: int,
    argument: str,
    block: int | None = None,
) -> Data:
    """Where the blocks of a message are copied to, of whatever elements they consist, one after the other; of
    ``block`` bytes each if given. Raises BufferSizeError."""
    lying = _lying(session, message, blocks, argument)
    sizes = np.array([each.nbytes for each in lying.blocks], np.int64)
    data = np.empty(int(sizes.sum()), np.uint8)
    lying = lasting(lying)

    def start(outward: bool) -> Transfer:
        return Now(copying(lying, data, outward=outward), data)

    at = np.cumsum(sizes) - sizes
    kind = None if isinstance(message, TypedMessage) else message.datatype
    copied = Data(MPI.Get_address(data), blocks, block or 0, kind, message.buffer, copying=start)
    return copied if block is not None else copied._replace(sizes=sizes, at=at)


def _lying(session: Session | Beginning, message: Message | TypedMessage, blocks: int, argument: str) -> Apart:
    """Where the blocks of a message lie. Raises BufferSizeError, BufferTypeError."""
    try:
        return apart(message, blocks)
    except ValueError as error:
        raise BufferSizeError(argument, "counts of at least 0", str(error), session.rank) from None
    except MPI.Exception as error:
        raise BufferTypeError(argument, "datatypes of MPI's, for what has elements", str(error), session.rank) from None
