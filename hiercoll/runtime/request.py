"""A call as one value: the collective, the buffers as they lie in memory, and what is to serve it.

Every call becomes a `Request`, whoever makes it: functions and drop-in communicators differ in who reports errors,
blocking calls, background calls and plans in who starts what serves them, equal and uneven blocks in where bytes lie.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from hiercoll.collectives import Collective, Contract, Holds, Order, Sizes
from hiercoll.cuda import device_at, is_device_array
from hiercoll.cuda.arrays import NO_PRODUCERS, Producers, device_array, new_like, stream_handle, with_axes_reversed
from hiercoll.cuda.kernel import can_combine
from hiercoll.errors import (
    ArgumentError,
    BufferOverlapError,
    BufferSizeError,
    BufferTypeError,
    ConstraintError,
    ParameterError,
)
from hiercoll.memory import SINGLE, Now, Transfer, host_buffer
from hiercoll.memory.regions import packing
from hiercoll.runtime.checking import Description
from hiercoll.runtime.operations import Operation, accumulated, find_operation
from hiercoll.runtime.sizes import Blocks
from hiercoll.runtime.sizes import Sizes as Bytes
from hiercoll.runtime.specifications import (
    UNREADABLE,
    Apart,
    Message,
    TypedMessage,
    apart,
    basic_type,
    block_message,
    copying,
    each_block,
    is_in_place,
    lasting,
    typed_message,
    vector_message,
)
from hiercoll.schedule.transports import AUTO, DIRECT, Transport, parse_transport
from hiercoll.settings import ORDERS
from hiercoll.tables import NATIVE, Variant
from hiercoll.tuner import FREE, Combining, Spread
from hiercoll.tuning.learning import Learner
from hiercoll.tuning.policy import Wanted

if TYPE_CHECKING:
    from hiercoll.runtime.beginning import Beginning
    from hiercoll.runtime.session import Session

Spec = TypeVar("Spec", bound=Message | TypedMessage)
LIMIT = 4096  # bytes: blocks of uneven sizes below it travel together
NO_PARAMS: dict[str, Any] = {}
HALF = ("float16", "bfloat16")  # types that can be widened; the second is of the package ml_dtypes
NUMBERS = "biufc"  # kinds of NumPy's types of numbers


class Mode(Enum):
    """Who starts what serves a call: the call itself, whoever looks after what is under way, the program, or mpi4py, to
    which messages of objects are left."""

    BLOCKING = ""
    BACKGROUND = "i"
    HELD = "persistent "
    OBJECTS = "objects "


class Arguments(NamedTuple):
    """What a program gives. ``recv`` is the one buffer of collectives that have one; ``limit`` is in bytes; ``op`` and
    ``order`` are of reductions."""

    send: Any
    recv: Any
    root: Any = 0
    algorithm: Any = "auto"
    params: dict[str, Any] = NO_PARAMS
    transport: Any = AUTO
    stream: Any = None
    limit: Any = LIMIT
    op: Any = MPI.SUM
    order: Any = None
    recvcounts: Any = None  # in elements, of reductions to blocks of any sizes
    accumulate: Any = None  # the type that elements of half precision are combined in

    @property
    def named(self) -> dict[str, Any]:
        """What the program gives by names that tell calls apart, besides those that all calls have."""
        return self.params if self.accumulate is None else {**self.params, "accumulate": self.accumulate}


class Data(NamedTuple):
    """A rank's blocks in one buffer.

    ``blocks`` of ``block`` bytes each, one after the other from ``address`` on; or, where ``sizes`` are given, of
    so many bytes each, ``at`` so many from there. ``type`` is that of the elements, NumPy's or MPI's. ``place``:
    "host", or the name of a device. ``owner`` keeps the program's memory. ``copying``: what copies
    data from the program's buffer to here (True), or back (False), if this is a copy, whose memory it keeps.
    ``overwritten``: results come to lie there, too, so that what serves the call, unless it is the MPI library in
    place, copies the data before each start.
    """

    address: int
    blocks: int
    block: int
    type: Any = None
    owner: Any = None
    sizes: Bytes | None = None
    at: Bytes | None = None
    place: str = "host"
    copying: Callable[[bool], Transfer] | None = None
    overwritten: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block if self.sizes is None else int(self.sizes.sum())

    def each_block(self) -> tuple[Bytes, Bytes]:
        """Bytes of each block, and where it begins."""
        if self.sizes is not None and self.at is not None:
            return self.sizes, self.at
        sizes = np.full(self.blocks, self.block, np.int64)
        return sizes, np.arange(self.blocks, dtype=np.int64) * self.block

    @property
    def span(self) -> int:
        """Bytes from the address to the end of the last block."""
        sizes, at = self.each_block()
        return int((at + sizes).max(initial=0))

    @property
    def key(self) -> tuple[object, ...]:
        """Address, sizes and type, and whether they are overwritten."""
        kind = self.type.handle if isinstance(self.type, MPI.Datatype) else self.type
        if self.sizes is None or self.at is None:
            return (self.address, self.blocks, self.block, kind, self.overwritten)
        return (self.address, self.sizes.tobytes(), self.at.tobytes(), kind, self.overwritten)

    @property
    def elements(self) -> str:
        """The type of the elements in words that are the same on all ranks, "" if that is not known."""
        return basic_type(self.type) if isinstance(self.type, MPI.Datatype) else str(self.type or "")

    def copies(self, outward: bool) -> tuple[Transfer, ...]:
        """What copies data here, or back, if anything."""
        return () if self.copying is None else (self.copying(outward),)


@dataclass(frozen=True, slots=True)
class Common:
    """What of a request is equal on all ranks. ``size``: bytes per block, None for uneven ones."""

    collective: str
    variant: tuple[object, ...]
    transport: Transport
    memory: str
    in_place: bool
    root: int
    operation: str
    size: int | None
    limit: int


@dataclass(frozen=True, slots=True)
class Key:
    """What a plan is kept under: requests with equal keys are served by the same one."""

    common: Common
    place: str
    sent: tuple[object, ...]
    received: tuple[object, ...]
    operation: tuple[object, ...] = ()


@dataclass(frozen=True)
class Request:
    """A call that is sound.

    ``sent`` is None where the input lies in the receive buffer; ``size`` is the bytes of a block (of what is combined,
    if that is wider), their mean where they differ and all ranks know it, else 0; ``before`` and ``after`` are what
    comes before and after each start; ``result`` is what the call returns; ``producers`` is what starts come after, on
    devices. ``is_auto``: whether the choice was left to hiercoll; ``learner``, if given, is to be asked for it;
    ``is_learned``: whether calls have taught it, or do now, so that nobody has asked for what it needs.
    Reductions have an ``operation``, and ask for an order (``combining``).
    """

    collective: Collective
    sent: Data | None
    received: Data
    root: int
    size: int
    variant: Variant
    transport: Transport = DIRECT
    mode: Mode = Mode.BLOCKING
    producers: Producers = NO_PRODUCERS
    limit: int = 0
    memory: str = "host"
    operation: Operation | None = None
    combining: Combining = FREE
    result: Any = None
    before: tuple[Transfer, ...] = ()
    after: tuple[Transfer, ...] = ()
    is_auto: bool = False
    learner: Learner | None = None
    is_learned: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the input lies in the receive buffer."""
        return self.sent is None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to be moved, as all ranks know, though the collective moves data."""
        return self.collective.is_even and self.received.block == 0 and self.collective.buffers > 0

    @property
    def is_native(self) -> bool:
        """Whether the MPI library serves it, in whatever form."""
        return self.variant.algorithm == NATIVE

    @property
    def accumulates(self) -> bool:
        """Whether wider elements than the program's are combined."""
        return self.operation is not None and self.operation.narrow is not None

    @property
    def is_plain(self) -> bool:
        """Whether blocks are moved from and to the program's own buffers."""
        return not self.before and not self.after

    @property
    def sending(self) -> Request:
        """The request with messages instead of places in the node's memory."""
        return replace(self, transport=self.transport._replace(shared=False))

    @property
    def common(self) -> Common:
        """See `Common`."""
        block = self.received.block if self.collective.is_even else None
        # Not the transport by which the variant was found: who names both makes the same request, and ranks that know
        # such a call, from whichever of the two, do not look again.
        settled = (self.collective.name, self.variant.scheduled, self.transport, self.memory, self.sent is None)
        operation = "" if self.operation is None else self.operation.name
        return Common(*settled, self.root, operation, block, self.limit)

    @property
    def key(self) -> Key:
        """See `Key`."""
        sent = () if self.sent is None else self.sent.key
        return Key(self.common, self.received.place, sent, self.received.key, self._combines)

    @property
    def _combines(self) -> tuple[object, ...]:
        return () if self.operation is None else self.operation.key

    @property
    def item(self) -> int:
        """Bytes that stay together where a block is cut: of an element, where elements are combined."""
        return 1 if self.operation is None else self.operation.given_item

    @property
    def moving_key(self) -> Key:
        """The key of a plan that serves such requests wherever their buffers lie."""
        if not self.collective.is_even:
            return Key(self.common, self.received.place, (), ())
        sent = () if self.sent is None else self.sent.key[1:]
        return Key(self.common, self.received.place, sent, self.received.key[1:], self._combines)

    @property
    def counts_are_ints(self) -> bool:
        """Whether there are two buffers, whose blocks are not larger than MPI counts."""
        both = [] if self.sent is None else [self.sent.sizes, self.received.sizes]
        return bool(both) and all(sizes is not None and sizes.max(initial=0) < 2**31 for sizes in both)

    def place(self, move: Callable[..., None]) -> None:
        """Move a plan that serves such requests wherever their buffers lie."""
        received, sent = self.received, self.sent
        where = (0 if sent is None else sent.address, received.address)
        if self.collective.is_even or sent is None:
            move(*where)
        else:
            move(*where, (sent.sizes, received.sizes), (sent.at, received.at))

    def without_arrays(self) -> Request:
        """The same, but for the program's memory, which is not kept: for calls that come again with the same."""
        sent = None if self.sent is None else self.sent._replace(owner=None)
        return replace(self, sent=sent, received=self.received._replace(owner=None), result=None)

    @property
    def name(self) -> str:
        """Collective and algorithm in words."""
        return spelled(self.collective, self.variant.algorithm, self.variant.params)

    def blocks(self, rank: int) -> Blocks:
        """Where blocks of uneven sizes lie, by peer; in place, that of this ``rank`` in the receive buffer."""
        received, sent = self.received, self.sent
        assert received.sizes is not None and received.at is not None
        if sent is None:
            own = slice(rank, rank + 1)
            return Blocks(received.sizes[own], received.at[own], received.sizes, received.at)
        assert sent.sizes is not None and sent.at is not None
        return Blocks(sent.sizes, sent.at, received.sizes, received.at)

    def described(self, given: Arguments, rank: int, size: int) -> Description:
        """As ranks compare it, of which there are ``size``."""
        name = self.mode.value + spelled(self.collective, given.algorithm, given.params)
        out, received = self.sent or self.received, self.received
        if not self.collective.buffers:
            return Description(name, "")
        if self.collective.is_even:
            root = f", root {self.root}" if self.collective.root else ""
            place = ", in place" if self.in_place else ", not in place"
            place = "" if self.collective.one_buffer or self.collective.is_rooted else place
            how = "" if self.operation is None else f", {self.operation.name}, order {given.order or 'not given'}"
            elements = (received if received.blocks else out).elements
            return Description(f"{name}{root}{how}{place}, {received.block} bytes per block", elements)
        if self.operation is not None:
            how = f", {self.operation.name}, order {given.order or 'not given'}"
            return Description(f"{name}{how}, blocks of {', '.join(map(str, out.each_block()[0]))} bytes", out.elements)
        blocks, root = self.blocks(rank), f", root {self.root}" if self.collective.root else ""
        ends = self._by_peer(blocks.sent, size), self._by_peer(blocks.received, size)
        return Description(name + root, "", ends, (out.elements, received.elements))

    def _by_peer(self, sizes: Bytes, size: int) -> Bytes:
        """Bytes to, or from, each of ``size`` ranks: of blocks for each, of one for all or the root, or of none."""
        each = np.zeros(size, np.int64)
        is_for_root = self.collective.is_rooted and len(sizes) < size
        each[slice(self.root, self.root + 1) if is_for_root else slice(None)] = sizes if len(sizes) else 0
        return each


def spelled(collective: Collective, algorithm: Any, params: dict[str, Any]) -> str:
    """Collective and algorithm in words."""
    return " ".join([collective.name, str(algorithm), *(f"{name}={value}" for name, value in params.items())])


def make_request(
    session: Session | Beginning, collective: Collective, given: Arguments, mode: Mode = Mode.BLOCKING, *, strict: bool
) -> Request:
    """The request that a program's arguments make, if they are sound; ``strict`` as for functions, which take no
    buffers that overlap, differ in the type of elements, or hold less than their counts need.

    Raises BufferSizeError, BufferTypeError, BufferOverlapError, UnknownAlgorithmError, ParameterError,
    ConstraintError, DeviceError. Collective where the choice is.
    """
    make = _equal_blocks if collective.is_even else _uneven_blocks
    return make(session, collective, given, mode, strict)


# ---- equal blocks


def _equal_blocks(
    session: Session | Beginning, collective: Collective, given: Arguments, mode: Mode, strict: bool
) -> Request:
    rank = session.rank
    root = _root(session, given.root, strict) if collective.root else 0
    is_read, is_written = _use(collective, session.size, rank, root)
    sent: Data | None
    if collective.is_rooted:
        sent, received = _rooted_data(session, collective, given, root, strict)
    else:
        sent, received = _equal_data(session, collective, given, strict, is_written)
    memory = session.memories[received.place].kind
    size = received.block if given.accumulate is None else 2 * received.block  # of what is combined
    place = received.place if size or not is_device_array(received.owner) else ""
    asked = _transport(session, given.transport, place, mode)
    producers = _producers(session, given, sent, received, memory)
    operation = _operation(session, given, received, memory) if collective.operation else None
    combining = FREE if operation is None else combining_of(session, given.order, operation)
    policy = session.policy
    named = AUTO if memory == "host" else given.transport
    wanted = Wanted(collective, size, sent is None, memory, mode is Mode.HELD, combining, named)
    is_auto = policy.is_auto(collective, given.algorithm)
    learner = policy.learner(wanted) if is_auto and mode is Mode.BLOCKING else None
    is_learned = is_auto and policy.has_found(wanted)
    variant = policy.select(wanted, given.algorithm, given.params)
    if is_learned and mode is not Mode.BACKGROUND and place not in ("", "host"):
        variant = within_reach(session, variant)
    transport = _transport_by(session, given, variant, place, mode) or asked
    before = (received if sent is None else sent).copies(True) if is_read else ()
    returned = received.owner if received.blocks else None
    return Request(
        collective, sent, received, root, size, variant, transport, mode, producers, memory=memory,
        result=returned if given.recv is None or strict else None, before=before,
        after=received.copies(False) if is_written else (), is_auto=is_auto, learner=learner, is_learned=is_learned,
        operation=operation, combining=combining,
    )  # fmt: skip


def _operation(session: Session | Beginning, given: Arguments, received: Data, memory: str) -> Operation:
    """The operation on elements like those received. Raises ParameterError, and BufferTypeError for elements that it
    cannot combine there."""
    if given.accumulate is not None:
        _check_narrow(given.accumulate, received, session.rank)
        found = accumulated(find_operation(given.op, SINGLE, session.rank), received.type)
    else:
        found = find_operation(given.op, received.type, session.rank)
    if memory != "host" and (found.on_device is None or not can_combine(found.on_device)):
        raise BufferTypeError("op", "SUM, PROD, MIN or MAX of plain numbers, on a device", found.name, session.rank)
    return found


def combining_of(session: Session | Beginning, given: Any, operation: Operation) -> Combining:
    """What a reduction asks for: the ``given`` order, or that of the environment, or one that the communicator's calls
    keep to. Raises ParameterError."""
    if given is not None and not (isinstance(given, str) and given in ORDERS):
        raise ParameterError("order", f"{' or '.join(map(repr, ORDERS))}, or None", repr(given), session.rank)
    asked = given or session.order
    order = Order[asked.upper()] if asked else Order.ANY
    native = order is Order.ANY or session.size == 1
    changes = operation.is_exact or asked == "any"
    order = max(order, Order.ANY if operation.commutes else Order.RANK)
    return Combining(order, native, changes, operation.narrow is not None)


@lru_cache(maxsize=1024)
def _use(collective: Collective, size: int, rank: int, root: int) -> tuple[bool, bool]:
    """Whether ``rank`` is to read the one buffer of a collective that has one, and to write it; of others: both."""
    return Contract(collective.name, size, root=root).moves(rank) if collective.one_buffer else (True, True)


def _equal_data(
    session: Session | Beginning, collective: Collective, given: Arguments, strict: bool, is_written: bool
) -> tuple[Data | None, Data]:
    """What is sent, None in place, and where it is received."""
    size, sent = session.size, None
    if not collective.buffers:
        return Data(0, 1, 0), Data(0, size, 0)
    count = collective.blocks(collective.recv, size)
    if collective.send is Holds.EACH and is_in_place(given.send):
        count = size  # what is combined begins where the result comes to lie
    read = partial(_equal, session, strict=strict, combined=collective.operation)
    if collective.one_buffer:
        return None, read(given.recv, "buf", count, writable=is_written)
    if not is_in_place(given.send):
        sent = read(given.send, "sendbuf", collective.blocks(collective.send, size), writable=False)
    if given.recv is not None:
        received = read(given.recv, "recvbuf", count)
    elif sent is not None and strict:
        received = _new_like(sent, count, _axes(collective), session.rank)
    else:
        raise BufferTypeError("recvbuf", "an array, with sendbuf=MPI.IN_PLACE", "None", session.rank)
    if sent is not None:
        _check_pair(session, sent, received, strict)
    return sent, received


def _rooted_data(
    session: Session | Beginning, collective: Collective, given: Arguments, root: int, strict: bool
) -> tuple[Data, Data]:
    """The same of a collective with a root, which alone has both buffers: there are no blocks in the one that a rank
    has not, whatever it gives for it. In place, the root's own block is where it is among all, and is not moved."""
    rank, size = session.rank, session.size
    read = partial(_equal, session, strict=strict, combined=collective.operation)
    blocks = collective.blocks(collective.send, size), collective.blocks(collective.recv, size)
    shape = Contract(collective.name, size, root=root).shape(rank)
    moves = collective.send is Holds.EACH  # out of the root: then the root's result may be in place, else its input
    aside = given.recv if moves else given.send
    in_place = rank == root and (aside is MPI.IN_PLACE if moves and strict else is_in_place(aside))
    sent = received = None
    if shape.held and not (in_place and not moves):
        sent = read(given.send, "sendbuf", blocks[0], writable=False)
    if shape.due and not (in_place and moves):
        if given.recv is None and not moves and sent is not None and strict:
            received = _new_like(sent, blocks[1], _axes(collective), rank)
        else:
            received = read(given.recv, "recvbuf", blocks[1])
    if sent is not None and received is not None:
        _check_pair(session, sent, received, strict)
    elif sent is None and received is not None:
        sent = _put_aside(received) if in_place and collective.operation else _alias(received, root, int(in_place))
        if in_place and not collective.operation:  # copied to where the others' blocks will be, and back with them
            sent = sent._replace(copying=received.copying)
    elif sent is not None:
        received = _alias(sent, root, int(in_place))
    assert sent is not None and received is not None
    return sent, received


def _alias(data: Data, root: int, blocks: int) -> Data:
    """The root's own block of ``data``, or no block (``blocks`` is 0), as a buffer of its own."""
    address = data.address + root * data.block if blocks else 0
    return Data(address, blocks, data.block, data.type, data.owner if blocks else None, place=data.place)


def _check_narrow(accumulate: Any, data: Data, rank: int) -> None:
    """Raises ParameterError, and BufferTypeError for elements that cannot be accumulated in single precision."""
    if accumulate != "float32":
        raise ParameterError("accumulate", "'float32' or None", repr(accumulate), rank)
    if not (isinstance(data.type, np.dtype) and data.type.name in HALF and data.type.isnative):
        raise BufferTypeError("accumulate", f"arrays of {' or '.join(HALF)}", data.type, rank)


def _put_aside(data: Data) -> Data:
    """Data that are overwritten: on the host in a copy that is made before each start."""
    if data.place != "host":
        return data._replace(overwritten=True)
    kept = np.empty(data.nbytes, np.uint8)
    address = MPI.Get_address(kept)

    def copying(outward: bool) -> Transfer:
        source, target = (data.address, address) if outward else (address, data.address)
        return Now(partial(memmove, target, source, data.nbytes))

    return data._replace(address=address, owner=kept, copying=copying)


def _root(session: Session | Beginning, root: Any, strict: bool) -> int:
    """The root as a number; True is none for functions (``strict``), but one for mpi4py. Raises ParameterError."""
    try:
        number = -1 if strict and isinstance(root, bool) else index(root)
    except TypeError:
        number = -1
    if not 0 <= number < session.size:
        raise ParameterError("root", f"a rank below {session.size}", repr(root), session.rank)
    return number


def _equal(
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
    Elements that are to be ``combined`` stay as they are, with what lies between their parts."""
    if strict and not isinstance(spec, list | tuple):
        return _array(session, spec, argument, blocks, writable)
    message = _read(session, block_message, spec, argument, blocks, writable=writable)
    element, start = message.element, message.displs * message.element.extent
    if combined:
        element = replace(element, size=element.extent, plain=True)
    block = message.counts * element.size
    if strict and element.plain and start + block * blocks > message.nbytes:
        got = f"{message.counts} items of {element.size} bytes in each of {blocks} blocks"
        got += f" from byte {start} on, with a buffer of {message.nbytes} bytes"
        raise BufferSizeError(argument, "counts that fit the buffer", got, session.rank)
    if block and not (element.plain and (message.address or combined)):
        return _copied(session, message, blocks, argument, block)
    place = _device(session, message.buffer, argument, writable)
    return Data(message.address + start, blocks, block, message.datatype, message.buffer, place=place)


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


def _check_pair(session: Session | Beginning, sent: Data, received: Data, strict: bool) -> None:
    """Sizes of a send and a receive buffer, and what `_check_alike` looks at."""
    if sent.block != received.block:
        factor = received.blocks // sent.blocks
        what = f" ({factor} x sendbuf)" if factor > 1 else ", as sendbuf"
        expected = f"{sent.block * received.blocks} bytes{what}"
        raise BufferSizeError("recvbuf", expected, f"{received.nbytes} bytes", session.rank)
    _check_alike(sent, received, session.rank, strict)


def _check_alike(sent: Data, received: Data, rank: int, strict: bool) -> None:
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


def _axes(collective: Collective) -> int:
    """How many axes a result has more than what is sent."""
    return (collective.recv is Holds.EACH) - (collective.send is Holds.EACH)


def _new_like(sent: Data, blocks: int, axes: int, rank: int) -> Data:
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


def _transport(session: Session | Beginning, given: Any, place: str, mode: Mode, uneven: bool = False) -> Transport:
    """How messages of device memory travel. Collective at the first use of "peer" on a communicator. Raises
    ParameterError, or ConstraintError for direct messages that MPI may not be given, and for "peer" where ranks do not
    know where the others' blocks lie (``uneven``), or may not wait for each other."""
    if isinstance(given, str) and given == AUTO and place == "host":
        return DIRECT
    try:
        name, parts = parse_transport(given)
    except ParameterError as error:
        raise ParameterError(error.argument, error.expected, error.got, session.rank) from None
    if not place:  # an empty array of a device: nothing is moved
        return DIRECT
    if place == "host":
        if name in ("staged", "peer"):
            raise ParameterError("transport", "'auto' or 'direct' for arrays on the host", repr(given), session.rank)
        return DIRECT
    if name == "direct" and session.stages:
        expected = "an MPI library that takes device memory (where it does: HIERCOLL_CUDA_AWARE=1)"
        raise ConstraintError("transport 'direct'", expected, session.library, session.rank)
    if name == "peer" and (uneven or mode is Mode.BACKGROUND):
        expected = "equal blocks, and no call in the background"
        got = "blocks of any sizes" if uneven else "such a call"
        raise ConstraintError("transport 'peer'", expected, got, session.rank)
    if uneven and parts > 1:
        raise ConstraintError(f"transport '{name}:{parts}'", "equal blocks", "blocks of any sizes", session.rank)
    segments = 1 if name == "staged" else int(session.stages)
    near = name == "peer" and session.memories.node_in_reach(place)
    # Windows are made by all ranks together, for blocks that all know.
    shared = not (near or uneven or mode is Mode.BACKGROUND) and max(session.topology.node_sizes) > 1
    return Transport(near, parts or segments, packed=not (parts or segments), shared=shared)


def within_reach(session: Session | Beginning, variant: Variant) -> Variant:
    """What was learned for calls on devices, with a transport that can be had here: else with the one of calls that
    leave it open, so that it is not taken for what it is not. Collective at the first use of "peer" on a
    communicator."""
    name = variant.transport
    is_out = name.startswith("peer") and not session.memories.devices_in_reach()
    return replace(variant, transport=AUTO) if is_out or (name == "direct" and session.stages) else variant


def _transport_by(
    session: Session | Beginning, given: Arguments, variant: Variant, place: str, mode: Mode
) -> Transport | None:
    """The one that belongs to what was chosen; None where it has none, it cannot be had, or another was asked for.
    Collective at the first use of "peer" on a communicator."""
    name = variant.transport
    if name == AUTO or given.transport != AUTO or place in ("", "host") or (name == "direct" and session.stages):
        return None
    if name.startswith("peer") and mode is Mode.BACKGROUND:
        return None
    return _transport(session, name, place, mode)


def served_by(session: Session, request: Request, given: Arguments, variant: Variant, learner: Any) -> Request:
    """The request of a blocking call by "auto", with something else serving it than what is chosen, `within_reach`."""
    transport = request.transport
    if request.collective.is_even:
        where = (request.received.place, request.mode)
        asked = _transport(session, given.transport, *where)
        transport = _transport_by(session, given, variant, *where) or asked
    return replace(request, variant=variant, transport=transport, is_auto=True, learner=learner, is_learned=True)


def _producers(
    session: Session | Beginning, given: Arguments, sent: Data | None, received: Data, memory: str
) -> Producers:
    """What produces the data of a call, on a device. Raises ParameterError."""
    if given.stream is not None:
        try:
            stream_handle(given.stream)
        except ParameterError as error:
            raise ParameterError(error.argument, error.expected, error.got, session.rank) from None
    if memory == "host":
        return NO_PRODUCERS
    owners = [data.owner for data in (sent, received) if data is not None and data.blocks]
    owners = [owner for owner in owners if is_device_array(owner)]  # what is empty may lie anywhere
    made = (owners.pop(),) if given.recv is None else ()
    return Producers(given.stream, tuple(owners), made)


# ---- blocks of any sizes


def _uneven_blocks(
    session: Session | Beginning, collective: Collective, given: Arguments, mode: Mode, strict: bool
) -> Request:
    rank, size, limit = session.rank, session.size, given.limit
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ParameterError("limit", "a number of bytes, at least 0", repr(limit), rank)
    root = _root(session, given.root, strict) if collective.root else 0
    sent: Data | None
    operation, combining = None, FREE
    if collective.is_rooted:
        sent, received = _rooted_blocks(session, collective, given, root, strict)
    elif collective.operation:
        sent, received, operation = _counted_blocks(session, given, strict)
        combining = combining_of(session, given.order, operation)
    else:
        sent, received = _blocks_for_each(session, collective, given, strict)
    memory = session.memories[received.place].kind
    transport = _transport(session, given.transport, received.place, mode, uneven=True)
    whole = received if sent is None or operation is None else sent
    mean = -(-whole.nbytes // size) if collective.sizes is Sizes.KNOWN else 0
    mean *= 2 if combining.accumulates else 1  # of what is combined
    wanted = Wanted(collective, mean, sent is None and mean > 0, held=mode is Mode.HELD, combining=combining)
    variant = session.policy.select(wanted, given.algorithm, given.params)
    is_auto = session.policy.is_auto(collective, given.algorithm)
    learns = is_auto and mode is Mode.BLOCKING and given.limit == LIMIT
    return Request(
        collective, sent, received, root, mean, variant, transport, mode,
        _producers(session, given, sent, received, memory), memory=memory, limit=limit,
        result=received.owner if received.blocks else None, before=(received if sent is None else sent).copies(True),
        after=received.copies(False), is_auto=is_auto, operation=operation, combining=combining,
        learner=session.policy.learner(wanted) if learns else None,
    )  # fmt: skip


def _blocks_for_each(
    session: Session | Beginning, collective: Collective, given: Arguments, strict: bool
) -> tuple[Data | None, Data]:
    """What is sent, None in place, and where it is received, by collectives in which every rank receives from each."""
    rank, size = session.rank, session.size
    many: Callable[..., Message | TypedMessage] = typed_message if collective.typed else vector_message
    lay = partial(_uneven, session, strict=strict)
    into = _read(session, many, given.recv, "recvbuf", size, writable=True)
    received, sent = lay(into, size, "recvbuf", writable=True), None
    if not is_in_place(given.send):
        one = collective.send is Holds.ONE
        reader = block_message if one else many
        out = _read(session, reader, given.send, "sendbuf", 0 if one else size, writable=False)
        sent = lay(out, 1 if one else size, "sendbuf", writable=False)
        sent, received = _placed_alike(sent, received)
        if sent.place != received.place:
            raise BufferTypeError("recvbuf", f"memory of {sent.place}, as sendbuf", received.place, rank)
        assert sent.sizes is not None and received.sizes is not None
        own = int(sent.sizes[0 if one else rank])
        if own != received.sizes[rank]:
            expected = f"{own} bytes from rank {rank} itself, as sendbuf has"
            raise BufferSizeError("recvbuf", expected, received.sizes[rank], rank)
    elif collective.send is Holds.EACH:
        sent = _copied(session, into, size, "recvbuf") if received.place == "host" else _put_aside(received)
    return sent, received


def _rooted_blocks(
    session: Session | Beginning, collective: Collective, given: Arguments, root: int, strict: bool
) -> tuple[Data, Data]:
    """The same where the root has a block for each rank, or of each, and others have one. See `_rooted_data`."""
    rank, size = session.rank, session.size
    moves = collective.send is Holds.EACH
    (many, its_name), (one, name) = (given.send, "sendbuf"), (given.recv, "recvbuf")
    if not moves:
        (many, its_name), (one, name) = (one, name), (many, its_name)
    in_place = rank == root and (one is MPI.IN_PLACE if moves and strict else is_in_place(one))
    whole = single = None
    if rank == root:
        message = _read(session, vector_message, many, its_name, size, writable=not moves)
        whole = _uneven(session, message, size, its_name, writable=not moves)
    if not in_place:
        message = _read(session, block_message, one, name, 0, writable=moves)
        single = _uneven(session, message, 1, name, writable=moves)
    elif whole is not None:
        single = _part(whole, slice(root, root + 1))
        if not moves:  # copied to where the others' blocks will be, and back with them
            single = single._replace(copying=whole.copying)
    assert single is not None
    if whole is None:
        whole = _part(single, slice(0, 0))
        return (whole, single) if moves else (single, whole)
    whole, single = _placed_alike(whole, single)
    if whole.place != single.place:
        raise BufferTypeError(name, f"memory of {whole.place}, as {its_name}", single.place, rank)
    if not np.array_equal(whole.each_block()[0][root : root + 1], single.each_block()[0]):
        expected = f"{whole.each_block()[0][root]} bytes, as in {its_name} for the root itself"
        raise BufferSizeError(name, expected, single.nbytes, rank)
    return (whole, single) if moves else (single, whole)


def _placed_alike(one: Data, other: Data) -> tuple[Data, Data]:
    """Blocks without any bytes are wherever the others are."""
    if not one.nbytes:
        return one._replace(place=other.place), other
    return one, other if other.nbytes else other._replace(place=one.place)


def _part(data: Data, which: slice) -> Data:
    """Some of the blocks; none have no address."""
    sizes, at = (each[which] for each in data.each_block())
    some = len(sizes) > 0
    return Data(data.address if some else 0, len(sizes), 0, data.type, data.owner, sizes, at, data.place)


def _counted_blocks(session: Session | Beginning, given: Arguments, strict: bool) -> tuple[Data, Data, Operation]:
    """A vector whose parts, ``recvcounts`` elements each, are reduced on one rank each; and what this rank gets. In
    place the vector is copied before each start."""
    rank, size = session.rank, session.size
    read = partial(_equal, session, blocks=1, strict=strict, combined=True)
    received = read(given.recv, "recvbuf")
    in_place = is_in_place(given.send)
    whole = received if in_place else read(given.send, "sendbuf", writable=False)
    operation = _operation(session, given, received, session.memories[received.place].kind)
    try:
        counts = [index(each) for each in given.recvcounts]
    except TypeError:
        counts = []
    if len(counts) != size or min(counts) < 0:
        raise BufferSizeError("recvcounts", f"{size} numbers of elements", repr(given.recvcounts), rank)
    sizes = np.array(counts, np.int64) * operation.given_item
    for data, name, wanted in ((whole, "sendbuf", int(sizes.sum())), (received, "recvbuf", int(sizes[rank]))):
        if (data.block < wanted) if in_place else (data.block != wanted):
            raise BufferSizeError(name, f"{wanted} bytes, as recvcounts say", data.block, rank)
    if not in_place:
        _check_alike(whole, received, rank, strict)
    elif whole.copying is None:
        whole = _put_aside(whole)
    parts = np.cumsum(sizes) - sizes
    sent = whole._replace(blocks=size, block=0, sizes=sizes, at=parts)
    return sent, received._replace(block=0, sizes=sizes[rank : rank + 1], at=parts[:1]), operation


def _uneven(
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
        raise BufferSizeError(argument, "counts of at least 0", sizes.min(), session.rank)
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
    return _copied(session, message, blocks, argument)


def spread_of(sizes: Bytes) -> Spread:
    """Of blocks of so many bytes each."""
    small = np.count_nonzero((sizes > 0) & (sizes < LIMIT))
    return Spread(int(np.count_nonzero(sizes)), int(small), int(sizes.sum()), int(sizes.max()))


def own_spread(session: Session | Beginning, collective: Collective, given: Arguments) -> Spread:
    """The blocks that this rank sends. Whatever its arguments, every rank takes part in a survey."""
    try:
        request = make_request(session, collective, given._replace(algorithm=NATIVE), strict=False)
    except ArgumentError:
        return Spread(unfit=1)
    return spread_of(request.blocks(session.rank).sent)


# ---- buffers


def _read(
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


def _copied(
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
    lying = lasting(lying, data)

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
