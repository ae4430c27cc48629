"""What hiercoll asks of a device, and the shapes of its copies, conversions and reductions.

All of these are asynchronous: they run in the order of their stream, some time between
their call and the completion of an event recorded after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import gcd
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from hiercoll.memory import Layout, Reduction, WideLayout, common_pieces, evenly_spaced
from hiercoll.schedule import Region
from hiercoll.schedule.transports import ON_HOST

NARROW = 128  # bytes of a row: see docs/gpu.md, and `scripts/gpu_bench.py`, which has both ways
FEW = 2  # copies by copy engines that take the place of a launch
MOST_STEP = 2**31 - 1  # bytes between rows of a 2-D copy (cudaDevAttrMaxPitch)


class Rows(NamedTuple):
    """``number`` rows of ``length`` bytes, ``source_step`` and ``target_step`` bytes apart; ``with_host``: to the host,
    or from it."""

    source: int
    target: int
    length: int
    number: int = 1
    source_step: int = 0
    target_step: int = 0
    with_host: bool = False

    @property
    def is_for_engine(self) -> bool:
        """Whether a copy engine is the fastest way: for one row, and for those to the host and from it, unless they are
        narrow. On the device a kernel is faster: twice with long rows, 13 times with rows of 8 bytes."""
        return self.number == 1 or (self.with_host and self.length >= NARROW)

    @property
    def word(self) -> int:
        """Bytes of the largest words, of up to 16, that all of it consists of."""
        ends = (self.source, self.target, self.source_step, self.target_step, self.length)
        return gcd(16, *ends)

    def pieces(self) -> Pieces:
        """The same, each by itself."""
        at, to, length = self.source, self.target, self.length
        steps = self.source_step, self.target_step
        return Pieces(tuple((at + row * steps[0], to + row * steps[1], length) for row in range(self.number)))


class Together(NamedTuple):
    """Few copies of evenly spaced rows to the host, or from it, each by a copy engine, one after the other."""

    rows: tuple[Rows, ...]


class Pieces(NamedTuple):
    """(source, target, length) of pieces that are not evenly spaced: one launch over a table."""

    table: tuple[tuple[int, int, int], ...]


class Conversion(NamedTuple):
    """(source, target, length at the target) of pieces whose elements become those of another type: one launch over a
    table."""

    table: tuple[tuple[int, int, int], ...]
    source: np.dtype[Any]
    target: np.dtype[Any]


class Pairs(NamedTuple):
    """(left, right, target, length) of pieces whose elements are combined: one launch over a table."""

    table: tuple[tuple[int, int, int, int], ...]
    how: Reduction


Shape: TypeAlias = "Rows | Together | Pieces | Conversion | Pairs"


class Allocation(NamedTuple):
    """Device memory that other processes may map: the process that has it (by a number that no other has), where it
    begins there, its bytes, and the driver's number of it."""

    process: int
    base: int
    size: int
    number: int

    def overlaps(self, other: Allocation) -> bool:
        """Whether both are of one process, and have an address in common."""
        ends = min(self.base + self.size, other.base + other.size)
        return self.process == other.process and max(self.base, other.base) < ends


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the stream has come there."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Stream(Protocol):
    """Work in order. Events are those of the same device."""

    def record(self, event: Any = None) -> Event:
        """The point after all that has been enqueued so far; in ``event``, if one is given."""

    def wait(self, event: Any) -> None:
        """What is enqueued from now on waits for ``event``; the host does not."""


class Device(Protocol):
    """One GPU, as this process sees it."""

    name: str

    @property
    def bus(self) -> str:
        """Its name among the devices of the host, as in `Devices.visible`. Raises DeviceError."""

    def sees(self, bus: str) -> bool:
        """Whether this process sees the device of that name. Raises DeviceError."""

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Address of device memory, and the object that keeps it. Raises DeviceMemoryError."""

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        """The same of host memory that the device can copy from and to on its own."""

    def register(self, address: int, nbytes: int) -> object:
        """Let the device reach memory of the host, while the result lives. Raises DeviceMemoryError."""

    def number(self, address: int) -> int:
        """A number of the allocation around ``address`` that no other one of this process ever
        has. Raises DeviceError for what is no memory of a device."""

    def export(self, address: int) -> tuple[bytes, Allocation]:
        """What another process of this host needs to map the allocation around ``address``: a
        handle of at most 64 bytes, and the allocation. Raises DeviceError where that cannot be."""

    def open(self, handle: bytes) -> tuple[int, object]:
        """Map an allocation of another process: its address here, and the object that keeps it
        mapped. Raises DeviceError where that cannot be, AlreadyMappedError where an older mapping is in the way."""

    def new_stream(self) -> Stream:
        """A stream that does not wait for the legacy default stream."""

    def stream_of(self, handle: int) -> Stream:
        """A stream of the caller's: 1 and 2 are the legacy and the per-thread default streams."""

    def is_capturing(self, handle: int) -> bool:
        """Whether what is enqueued on a stream of the caller's is captured into a graph, instead of being run."""

    def synchronize(self) -> None:
        """Wait for all that has been enqueued on any stream. Raises DeviceError while one is being captured."""

    def prepare(self, shape: Shape) -> Task:
        """A copy, conversion or reduction, to be enqueued as often as wanted. Raises DeviceError for
        types that the device has no kernel for."""


class Devices(Protocol):
    """The devices that this process sees."""

    def visible(self) -> list[str]:
        """Names of them, by number, that all processes of the host understand. Raises DeviceError."""

    def select(self, number: int) -> None:
        """Make one the current device."""


class Task(Protocol):
    """A copy or reduction that is ready to be enqueued."""

    def enqueue(self, stream: Any) -> None:
        """Let ``stream`` do it."""


def copy_shape(
    layout: Layout, source: tuple[int, Region], target: tuple[int, Region]
) -> Rows | Together | Pieces | Conversion | None:
    """A copy between regions of the buffers at two addresses, in the fewest pieces; None if it moves nothing. Between
    elements of two types it converts."""
    if isinstance(layout, WideLayout) and (types := layout.types_of(source[1], target[1])) is not None:
        found = layout.conversion(source, target)
        return Conversion(tuple((s, t, n * types[1].itemsize) for s, t, n in found), *types) if found else None
    pieces = _joined(sorted((s, t, n) for s, t, n in common_pieces(layout, source, target)))
    if not pieces:
        return None
    with_host = source[1].buffer in ON_HOST or target[1].buffer in ON_HOST
    rows = tuple(islice(_rows(pieces, with_host), FEW + 1))
    if len(rows) == 1:
        return rows[0]
    if with_host and len(rows) <= FEW and all(each.is_for_engine for each in rows):
        return Together(rows)
    return Pieces(tuple(pieces))


Piece: TypeAlias = "tuple[int, int, int]"


def _joined(pieces: list[Piece]) -> list[Piece]:
    """(source, target, length) of pieces in order, those put together that follow each other on both sides."""
    joined = pieces[:1]
    for source, target, length in pieces[1:]:
        at, to, before = joined[-1]
        if (source, target) == (at + before, to + before):
            joined[-1] = at, to, before + length
        else:
            joined.append((source, target, length))
    return joined


def _are_rows(length: int, source_step: int, target_step: int) -> bool:
    """Whether a 2-D copy can have such distances."""
    return length <= min(source_step, target_step) and max(source_step, target_step) <= MOST_STEP


def _rows(pieces: list[Piece], with_host: bool) -> Iterator[Rows]:
    """The same as rows, each of as many pieces as are alike and evenly spaced."""
    for first, to, length, number, *steps in evenly_spaced(pieces, _are_rows):
        source_step, target_step = steps if number > 1 else (length, length)
        yield Rows(first, to, length, number, source_step, target_step, with_host)


def reduction_shape(
    layout: Layout, how: Reduction, left: tuple[int, Region], right: tuple[int, Region], target: tuple[int, Region]
) -> Pairs | None:
    """A reduction of regions of the buffers at three addresses; None if there is nothing in them."""
    pieces = tuple((a, b, t, n) for a, b, t, n in common_pieces(layout, left, right, target))
    return Pairs(pieces, how) if pieces else None
