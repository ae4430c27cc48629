"""A call as one value: the collective, the buffers as they lie in memory, and what is to serve it (`reading` makes it).

Every call becomes a `Request`, whoever makes it: functions and drop-in communicators differ in who reports errors,
blocking calls, background calls and plans in who starts what serves them, equal and uneven blocks in where bytes lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hiercoll.collectives import NATIVE, Collective
from hiercoll.cuda.arrays import NO_PRODUCERS, Producers
from hiercoll.memory import Transfer
from hiercoll.runtime.arguments import Arguments, Mode, spelled
from hiercoll.runtime.checking import Description
from hiercoll.runtime.operations import Operation
from hiercoll.runtime.sizes import Blocks
from hiercoll.runtime.sizes import Sizes as Bytes
from hiercoll.runtime.specifications import basic_type
from hiercoll.schedule.transports import DIRECT, Transport
from hiercoll.tables import Variant
from hiercoll.tuner import FREE, Combining
from hiercoll.tuning.learning import Learner


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
        if isinstance(self.type, MPI.Datatype):
            return basic_type(self.type)
        is_known = isinstance(self.type, np.dtype) and self.type.isnative and self.type.kind in "biufc"
        return self.type.str[1:] if is_known else str(self.type or "")  # as MPI's types say it

    def copies(self, outward: bool) -> tuple[Transfer, ...]:
        """What copies data here, or back, if anything."""
        return () if self.copying is None else (self.copying(outward),)


class Common(NamedTuple):
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


class Key(NamedTuple):
    """What a plan is kept under: requests with equal keys are served by the same one."""

    common: Common
    place: str
    sent: tuple[object, ...]
    received: tuple[object, ...]
    operation: tuple[object, ...] = ()


class Request(NamedTuple):
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
    def owners(self) -> tuple[object, object]:
        """Of the memory of both buffers."""
        return self.received.owner, None if self.sent is None else self.sent.owner

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
        return self._replace(transport=self.transport._replace(shared=False))

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
        return self._replace(sent=sent, received=self.received._replace(owner=None), result=None)

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
