"""What hiercoll asks of a device, and the two shapes of copies.

All copies are asynchronous: they run in the order of their stream, some time between
their call and the completion of an event recorded after them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

from hiercoll.buffers import BlockLayout
from hiercoll.schedule import Region

MOST_STEP = 2**31 - 1  # bytes between rows of a 2-D copy (cudaDevAttrMaxPitch)


class Rows(NamedTuple):
    """``number`` rows of ``length`` bytes, ``source_step`` and ``target_step`` bytes apart: one 2-D copy."""

    source: int
    target: int
    length: int
    number: int = 1
    source_step: int = 0
    target_step: int = 0


class Pieces(NamedTuple):
    """(source, target, length) of pieces that are not evenly spaced: one launch over a table."""

    table: tuple[tuple[int, int, int], ...]


Shape: TypeAlias = "Rows | Pieces | None"


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

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Address of device memory, and the object that keeps it. Raises DeviceMemoryError."""

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        """The same of host memory that the device can copy from and to on its own."""

    def register(self, address: int, nbytes: int) -> object:
        """Let the device reach memory of the host, while the result lives. Raises DeviceMemoryError."""

    def number(self, address: int) -> int:
        """A number of the allocation around ``address`` that no other one of this process ever
        has. Raises DeviceError for what is no memory of a device."""

    def export(self, address: int) -> tuple[bytes, int]:
        """What another process of this host needs to map the allocation around ``address``: a
        handle of at most 64 bytes, and where in it the address lies. Raises DeviceError where
        that cannot be."""

    def open(self, handle: bytes) -> tuple[int, object]:
        """Map an allocation of another process: its address here, and the object that keeps it
        mapped. Raises DeviceError where that cannot be."""

    def new_stream(self) -> Stream:
        """A stream that does not wait for the legacy default stream."""

    def stream_of(self, handle: int) -> Stream:
        """A stream of the caller's: 1 and 2 are the legacy and the per-thread default streams."""

    def prepare(self, shape: Rows | Pieces) -> Copy:
        """A copy, to be enqueued as often as wanted."""


class Devices(Protocol):
    """The devices that this process sees."""

    def visible(self) -> list[str]:
        """Names of them, by number, that all processes of the host understand. Raises DeviceError."""

    def select(self, number: int) -> None:
        """Make one the current device."""


class Copy(Protocol):
    """A copy that is ready to be enqueued."""

    def enqueue(self, stream: Any) -> None:
        """Let ``stream`` do it."""


def copy_shape(layout: BlockLayout, source: tuple[int, Region], target: tuple[int, Region]) -> Shape:
    """A copy between regions of the buffers at two addresses, in the fewest pieces; None if it moves nothing."""
    pieces = [(s, t, n) for s, t, n in _common(_runs(layout, *source), _runs(layout, *target)) if n]
    if not pieces:
        return None
    (first, to, length), *_ = pieces
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(pieces)}
    if len(steps) <= 1 and {n for _, _, n in pieces} == {length}:
        source_step, target_step = steps.pop() if steps else (length, length)
        if length <= source_step <= MOST_STEP and length <= target_step <= MOST_STEP:
            return Rows(first, to, length, len(pieces), source_step, target_step)
    return Pieces(tuple(pieces))


def _runs(layout: BlockLayout, address: int, region: Region) -> list[tuple[int, int]]:
    return [(address + offset, length) for offset, length in layout.runs(region)]


def _common(sources: list[tuple[int, int]], targets: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, target, length) of pieces that are contiguous at both ends."""
    pieces: list[tuple[int, int, int]] = []
    rest = iter(targets)
    to, room = 0, 0
    for at, length in sources:
        while length:
            if not room:
                to, room = next(rest)
            n = min(length, room)
            pieces.append((at, to, n))
            at, length, to, room = at + n, length - n, to + n, room - n
    return pieces
