"""The builder of schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hiercoll.schedule.ops import (
    SHARED_SIZES,
    SIZES,
    Buffer,
    Copy,
    Deps,
    Join,
    Op,
    Recv,
    Reduce,
    Region,
    Schedule,
    Send,
    Signal,
    Wait,
)


class Builder:
    """Writes one rank's schedule in the words of a paper.

    Operations added inside ``with b.round():`` run together, after the whole round
    before. An operation given ``after=[...]`` (results of earlier calls) waits for
    just those. Each call returns the operation's index.
    """

    def __init__(self, rank: int, segments: int = 1, blocks: int = 1) -> None:
        self.rank = rank
        self.segments = segments
        self.blocks = blocks  # of a collective's vector
        self._ops: list[Op] = []
        self._gate: Deps = ()
        self._scratch = 0
        self._shared = 0
        self._flags = 0
        self._holds: list[tuple[int, int]] = []
        self._sizes = 0
        self._knows: tuple[int, ...] = ()
        self._part: int | None = None

    def scratch(self, blocks: int) -> Buffer:
        """A new private piece of the scratch buffer, ``blocks`` long."""
        piece = Buffer("scratch", self._scratch)
        self._scratch += blocks
        return piece

    def shared(self, blocks: int, holds: Iterable[tuple[int, int]] = ()) -> Buffer:
        """A new piece of the node's shared buffer; every rank of the node asks alike.

        ``holds``: the (source, block) that each of its blocks is for, if it never holds another."""
        piece = Buffer("shared", self._shared)
        self._shared += blocks
        self._holds += holds
        return piece

    def sizes(self, rows: int, *, knows: Iterable[int] = ()) -> None:
        """The ranks of the node exchange the sizes of their blocks, a row for each of its lanes; or, where this rank
        ``knows`` the rows of some ranks, for each rank (`Schedule`). Every rank of it asks alike."""
        self._sizes, self._knows = rows, tuple(knows)

    @contextmanager
    def segment(self, part: int) -> Iterator[None]:
        """The operations added inside are on this segment of their blocks; on all of them if there is but one."""
        before, self._part = self._part, part if self.segments > 1 else None
        yield
        self._part = before

    def _cut(self, region: Region) -> Region:
        return region if self._part is None else region.segment(self._part)

    def _add(self, op: Op) -> int:
        self._ops.append(op)
        return len(self._ops) - 1

    def _deps(self, after: Iterable[int] | None) -> Deps:
        return self._gate if after is None else tuple(after)

    def send(
        self, peer: int, region: Region, *, tag: int = 0, after: Iterable[int] | None = None, partial: bool = True
    ) -> int:
        """Send ``region`` to ``peer``; not ``partial``: contributions or results of a reduction, no partial sums."""
        return self._add(Send(peer, tag, self._cut(region), self._deps(after), partial))

    def recv(
        self, peer: int, region: Region, *, tag: int = 0, after: Iterable[int] | None = None, partial: bool = True
    ) -> int:
        """Receive ``region`` from ``peer``; ``partial`` as it is sent."""
        return self._add(Recv(peer, tag, self._cut(region), self._deps(after), partial))

    def copy(self, source: Region, target: Region, *, after: Iterable[int] | None = None) -> int:
        """Copy ``source`` to ``target``."""
        return self._add(Copy(self._cut(source), self._cut(target), self._deps(after)))

    def reduce(self, left: Region, right: Region, target: Region, *, after: Iterable[int] | None = None) -> int:
        """``target = left (+) right``."""
        left, right, target = map(self._cut, (left, right, target))
        return self._add(Reduce(left, right, target, self._deps(after)))

    def publish_sizes(self, lane: int, *, after: Iterable[int] | None = None) -> int:
        """Let the ranks of the node read the sizes of this rank's blocks (`sizes`); ``lane`` is its own."""
        return self._add(Copy(SIZES[lane], SHARED_SIZES[lane], self._deps(after)))

    def learn_sizes(self, lane: int, others: Iterable[int] | None = None, *, after: Iterable[int] | None = None) -> int:
        """Read what the other ranks of the node have published; ``lane`` is this rank's own, ``others`` are their rows
        if these are not all."""
        others = [other for other in range(self._sizes) if other != lane] if others is None else sorted(others)
        return self._add(Copy(SHARED_SIZES[others], SIZES[others], self._deps(after)))

    def signal(self, flag: int, *, after: Iterable[int] | None = None) -> int:
        """Raise this rank's flag ``flag`` for the ranks of its node."""
        self._flags = max(self._flags, flag + 1)
        return self._add(Signal(flag, self._deps(after)))

    def wait(
        self, peers: Iterable[int], flag: int, *, previous: bool = False, after: Iterable[int] | None = None
    ) -> int:
        """Wait for flag ``flag`` of other ranks of the node (of the start before, if ``previous``)."""
        others = tuple(peer for peer in peers if peer != self.rank)
        if not others:
            return self.join(self._deps(after))
        return self._add(Wait(others, flag, previous, self._deps(after)))

    def join(self, after: Iterable[int]) -> int:
        """A point that waits for all of ``after``."""
        return self._add(Join(tuple(after)))

    def gate(self, after: Iterable[int]) -> None:
        """From here on, operations without ``after`` wait for all of these."""
        self._gate = (self.join(after),)

    @property
    def gated(self) -> list[int]:
        """What an operation without ``after`` waits for."""
        return list(self._gate)

    @contextmanager
    def round(self) -> Iterator[None]:
        """The operations added inside run together; what follows waits for all of them."""
        first = len(self._ops)
        yield
        members = tuple(range(first, len(self._ops)))
        if members:
            self._gate = (self._add(Join(members)),)

    def build(self) -> Schedule:
        """The finished, immutable schedule."""
        sizes = (self._scratch, self._shared, self._flags, self.segments)
        return Schedule(
            self.rank, tuple(self._ops), *sizes, holds=tuple(self._holds), blocks=self.blocks, sizes=self._sizes,
            knows=self._knows,
        )  # fmt: skip
