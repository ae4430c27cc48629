"""The one description of communication: regions, operations, schedules.

A schedule is ONE rank's part of a collective: operations on regions of named
buffers, each with the operations it waits for. It counts in blocks; a block may
be cut into ``segments`` equal parts for pipelining. It knows no communicator,
pointer, byte or environment, so the same schedule can be proved (`verify`), costed
(`model`), drawn (`timeline`) and run (`runtime`, `loopback`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from hiercoll.errors import ScheduleError
from hiercoll.topology import Topology

BufferName: TypeAlias = Literal[
    "send", "recv", "scratch", "narrow", "shared", "host", "wide_host", "sizes", "shared_sizes"
]
Blocks: TypeAlias = "range | tuple[int, ...]"


class Region(NamedTuple):
    """An ordered set of blocks of one buffer, e.g. seven blocks, sixteen apart.

    ``blocks`` is a ``range`` where the blocks are evenly spaced (so that it binds
    to one strided copy or datatype), else a tuple. ``part`` selects one segment
    of every block; None means whole blocks. ``like``: the blocks of a vector that
    those of a buffer of hiercoll's own are as long as, if they are there for such.
    """

    buffer: BufferName
    blocks: Blocks
    part: int | None = None
    like: Blocks | None = None

    @property
    def size(self) -> int:
        """Number of blocks (or of block parts)."""
        return len(self.blocks)

    @property
    def is_whole(self) -> bool:
        """Whether all of it lies together, where blocks are of one size."""
        together = isinstance(self.blocks, range) and self.blocks.step == 1 and self.part is None
        return together or self.size <= 1

    def segment(self, part: int) -> Region:
        """The given segment of each block of this region."""
        return self._replace(part=part)

    def of(self, blocks: int | Iterable[int]) -> Region:
        """The same, for these blocks of a vector."""
        return self._replace(like=as_blocks([blocks] if isinstance(blocks, int) else blocks))

    def __str__(self) -> str:
        blocks = self.blocks
        if isinstance(blocks, range):
            step = "" if blocks.step == 1 else f":{blocks.step}"
            text = str(blocks[0]) if len(blocks) == 1 else f"{blocks.start}:{blocks.stop}{step}"
        else:
            text = ",".join(map(str, blocks[:6])) + (f",.. {len(blocks)} blocks" if len(blocks) > 6 else "")
        return f"{self.buffer}[{text}]" + ("" if self.part is None else f"/{self.part}")


NOTHING = Region("recv", range(0))


def as_blocks(blocks: Iterable[int]) -> Blocks:
    """``blocks`` as a range where evenly and upwards spaced, else as a tuple."""
    if isinstance(blocks, range) and blocks.step > 0:
        return blocks
    listed = tuple(blocks)
    if not listed:
        return range(0)
    step = listed[1] - listed[0] if len(listed) > 1 else 1
    if step > 0:
        regular = range(listed[0], listed[-1] + 1, step)
        if len(regular) == len(listed) and tuple(regular) == listed:
            return regular
    return listed


class Buffer:
    """A named buffer, indexed to give regions: ``RECV[3]``, ``RECV[0:8:2]``, ``RECV[ranks]``.

    ``offset`` shifts all indices: one buffer can be handed out in pieces.
    """

    def __init__(self, name: BufferName, offset: int = 0) -> None:
        self.name = name
        self.offset = offset

    def __getitem__(self, index: int | slice | Iterable[int]) -> Region:
        offset = self.offset
        if isinstance(index, int):
            return Region(self.name, range(index + offset, index + offset + 1))
        if isinstance(index, slice):
            if index.stop is None:
                raise ScheduleError("a region needs an explicit end")
            step = 1 if index.step is None else index.step
            if step < 1:
                raise ScheduleError(f"a region's step is at least 1, not {step}")
            index = range(index.start or 0, index.stop, step)
        if offset:
            index = [block + offset for block in index]
        return Region(self.name, as_blocks(index))


SEND = Buffer("send")
RECV = Buffer("recv")
SCRATCH = Buffer("scratch")
SHARED = Buffer("shared")
HOST = Buffer("host")
WIDE_HOST = Buffer("wide_host")
SIZES = Buffer("sizes")
SHARED_SIZES = Buffer("shared_sizes")
SIZE_BUFFERS = ("sizes", "shared_sizes")  # of rows of sizes instead of blocks
PRIVATE: tuple[BufferName, ...] = ("scratch", "narrow", "host", "wide_host")  # a rank's own, besides the program's
OF_NODE = ("shared", "shared_sizes")  # one for the ranks of a node together
# Of elements in the type that they are combined in, where that is another (`accumulated`).
WIDE = ("scratch", "shared", "wide_host")

Deps: TypeAlias = "tuple[int, ...]"


class Send(NamedTuple):
    """Send ``region`` to rank ``peer``; (source, destination, tag) is unique in a schedule. ``partial``: it may hold
    partial sums, as both ends know; else contributions, or results (see `accumulated`, and
    `without_partial_contributions`, which finds contributions)."""

    peer: int
    tag: int
    region: Region
    deps: Deps
    partial: bool = True


class Recv(NamedTuple):
    """Receive into ``region`` from rank ``peer``; ``partial`` as of its `Send`."""

    peer: int
    tag: int
    region: Region
    deps: Deps
    partial: bool = True


class Offer(NamedTuple):
    """Tell rank ``peer``, of the same node, where this rank's ``buffer`` lies: it may `Get` from there."""

    peer: int
    tag: int
    buffer: BufferName
    deps: Deps


class AcceptOffer(NamedTuple):
    """Receive from rank ``peer`` where its ``buffer`` lies."""

    peer: int
    tag: int
    buffer: BufferName
    deps: Deps


class Notify(NamedTuple):
    """A message to rank ``peer`` that says no more than that this rank has come so far."""

    peer: int
    tag: int
    deps: Deps


class AwaitNotice(NamedTuple):
    """Wait for the `Notify` of rank ``peer``."""

    peer: int
    tag: int
    deps: Deps


class Copy(NamedTuple):
    """Copy ``source`` to ``target``, block by block in order."""

    source: Region
    target: Region
    deps: Deps


class Reduce(NamedTuple):
    """``target = left (+) right``, block by block; the order matters."""

    left: Region
    right: Region
    target: Region
    deps: Deps


class Get(NamedTuple):
    """Copy ``source`` of rank ``peer``, of the same node, to ``target``.

    That rank's offer of the source's buffer, with ``tag``, has been accepted before (`AcceptOffer`).
    """

    peer: int
    tag: int
    source: Region
    target: Region
    deps: Deps


class Signal(NamedTuple):
    """Raise this rank's flag ``flag`` to the number of the current start."""

    flag: int
    deps: Deps


class Wait(NamedTuple):
    """Wait until flag ``flag`` of every rank in ``peers`` has reached the number of the
    current start, or of the start before it if ``previous``."""

    peers: tuple[int, ...]
    flag: int
    previous: bool
    deps: Deps


class Join(NamedTuple):
    """Nothing but a point that waits for others: the end of a round."""

    deps: Deps


Outgoing: TypeAlias = "Send | Offer | Notify"
Incoming: TypeAlias = "Recv | AcceptOffer | AwaitNotice"
Op: TypeAlias = "Outgoing | Incoming | Copy | Reduce | Get | Signal | Wait | Join"

OUTGOING = (Send, Offer, Notify)  # the two ends of messages, in pairs
INCOMING = (Recv, AcceptOffer, AwaitNotice)
MESSAGES = OUTGOING + INCOMING
LOCAL = (Copy, Reduce, Get, Signal, Wait, Join)  # all other operations


def are_two_ends(out: Op, into: Op) -> bool:
    """Whether the operations can be the ends of one message: of one kind, an offer of one buffer.

    Peers, tags and sizes are not looked at.
    """
    if isinstance(out, Offer) and isinstance(into, AcceptOffer):
        return out.buffer == into.buffer
    return (type(out), type(into)) in ((Send, Recv), (Notify, AwaitNotice))


def reads(op: Op) -> tuple[Region, ...]:
    """Regions of this rank's that the operation reads."""
    if isinstance(op, Send):
        return (op.region,)
    if isinstance(op, Copy):
        return (op.source,)
    return (op.left, op.right) if isinstance(op, Reduce) else ()


def writes(op: Op) -> tuple[Region, ...]:
    """Regions that the operation writes."""
    if isinstance(op, Recv):
        return (op.region,)
    return (op.target,) if isinstance(op, (Copy, Reduce, Get)) else ()


@dataclass(frozen=True)
class Schedule:
    """One rank's operations, in an order in which every operation follows its ``deps``.

    ``scratch``, ``shared`` and ``host`` are the sizes of those buffers in blocks (``host`` is
    private memory of the host where the others are a device's), ``flags`` the number of flags
    that this rank raises, ``tags`` one more than the largest tag. ``holds``: for each block of
    ``shared`` the (source, block) that it is for, where the algorithm says so; blocks of uneven
    sizes need it. ``blocks``: into how many a collective's vector is cut.

    ``sizes`` is the number of rows of the buffers ``sizes`` (private) and ``shared_sizes`` (of the
    node), one per lane: how many bytes the lane sends to, and receives from, each rank. 0 where no
    sizes are exchanged. A rank's own row of ``sizes`` is there from the beginning; an operation on
    blocks of ``shared`` reads the rows that give their lengths, too (`sizes_read`).

    ``knows``: where each rank has one block only, and the root of the collective all: there is a row for every rank,
    which is the size of its block; these are the rows that this rank knows at the beginning. Then each lane has one
    block of ``shared``, in a place of its own that is as long as such a block may be; or, where nothing is shared,
    ranks have such places in ``scratch`` (`slots`).

    ``accumulates``: the elements of the buffers `WIDE` are twice as long as all others, which copies convert (see
    `accumulated`); then ``narrow`` and ``wide_host`` are the sizes of the buffers of these names, in blocks: what
    ``scratch`` and ``host`` are for elements of the other type.
    """

    rank: int
    ops: tuple[Op, ...]
    scratch: int = 0
    shared: int = 0
    flags: int = 0
    segments: int = 1
    host: int = 0
    holds: tuple[tuple[int, int], ...] = ()
    blocks: int = 1
    sizes: int = 0
    knows: tuple[int, ...] = ()
    accumulates: bool = False
    narrow: int = 0
    wide_host: int = 0

    def is_wide(self, region: Region) -> bool:
        """Whether elements of that region are those that are twice as long."""
        return self.accumulates and region.buffer in WIDE

    def extent(self, region: Region) -> float:
        """Size of a region in whole blocks of the program's elements; rows of sizes count as none."""
        if region.buffer in SIZE_BUFFERS:
            return 0
        blocks = len(region.blocks) * (1 + self.is_wide(region))
        return blocks if region.part is None else blocks / self.segments

    def row_bytes(self, ranks: int) -> int:
        """Of a row of sizes, which are 8 bytes each, among so many ranks."""
        return 8 if self.knows else 16 * ranks

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Where there is a row for every rank, and nothing is shared: the rank whose block lies in each block of
        scratch, as regions say (`Region.like`); -1 where none does, or where they differ. Else none."""
        if not self.knows or self.shared:
            return ()
        found = dict[int, set[int]]()
        for op in self.ops:
            for region in (*reads(op), *writes(op)):
                if region.buffer == "scratch":
                    for block, rank in zip(region.blocks, region.like or [-1] * region.size, strict=False):
                        found.setdefault(block, set()).add(rank)
        return tuple(found[block].pop() if len(found.get(block, ())) == 1 else -1 for block in range(self.scratch))

    @property
    def tags(self) -> int:
        """Number of tags that a plan must reserve."""
        return 1 + max((op.tag for op in self.ops if isinstance(op, MESSAGES)), default=0)

    @cached_property
    def offered(self) -> frozenset[BufferName]:
        """Buffers that other ranks of the node get from."""
        return frozenset(op.buffer for op in self.ops if isinstance(op, Offer))

    @cached_property
    def notices(self) -> tuple[tuple[int, int], ...]:
        """Peer and tag of what this rank tells others of its node: messages that have no more to say than that."""
        return tuple((op.peer, op.tag) for op in self.ops if isinstance(op, (Offer, Notify)))

    @property
    def all_flags(self) -> int:
        """Flags that this rank raises where one stands for each notice."""
        return self.flags + len(self.notices)

    @cached_property
    def rounds(self) -> tuple[tuple[int, ...], ...] | None:
        """Operation indices by round, or None where operations overlap freely.

        The dependencies are rounds if each operation waits for exactly the whole
        round before it; running round by round is then no stricter than the schedule.
        """
        rounds: list[tuple[int, ...]] = []
        current: list[int] = []
        gate: Deps = ()
        for index, op in enumerate(self.ops):
            if isinstance(op, Join):
                if op.deps != tuple(current) or not current:
                    return None  # what waits for nothing does not wait for the round before, either
                rounds.append(tuple(current))
                current, gate = [], (index,)
            elif op.deps != gate or isinstance(op, Wait):
                return None
            else:
                current.append(index)
        return (*rounds, tuple(current)) if current else tuple(rounds)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether each operation begins when all local ones before it are done, as `in_order` makes it.

        Local are copies, reductions, flags, and joins that complete messages; a message, or one of
        the `overlapping`, goes on in the background until a join names it.
        """
        last: Deps = ()
        outstanding: set[int] = set()
        for index, op in enumerate(self.ops):
            if isinstance(op, Join):
                completed = op.deps[len(last) :]
                if op.deps[: len(last)] != last or not outstanding.issuperset(completed):
                    return False
                outstanding.difference_update(completed)
            elif op.deps != last:
                return False
            if isinstance(op, MESSAGES) or index in self.overlapping:
                outstanding.add(index)
            else:
                last = (index,)
        return True

    @cached_property
    def overlapping(self) -> frozenset[int]:
        """Copies and reductions that the operation after them does not wait for, where flags are raised
        (see `passes.overlapped`): they go on in the background."""
        pairs = enumerate(zip(self.ops, self.ops[1:], strict=False))
        copies = (Copy, Get, Reduce)
        return frozenset(
            i for i, (op, after) in pairs if isinstance(op, copies) and after.deps[:1] != (i,) and self.flags
        )


def size_rows(schedule: Schedule, topology: Topology) -> tuple[frozenset[int], ...]:
    """For each block of ``shared`` the rows of ``sizes`` that give its length and its place. A lane knows those of what
    it writes from its own row. Blocks from other nodes lie one after the other: their places depend on the rows of the
    destinations of all before them. Empty where no sizes are exchanged."""
    if not schedule.sizes:
        return ()
    if schedule.knows:
        return tuple(frozenset([rank]) for rank in topology.node(schedule.rank))
    node_of, lane_of = topology.node_of, topology.lane_of
    own, rows, before = node_of[schedule.rank], list[frozenset[int]](), frozenset[int]()
    for source, target in schedule.holds:
        if node_of[source] == own:
            rows.append(frozenset([lane_of[source]]))
        else:
            before |= {lane_of[target]}
            rows.append(before)
    return tuple(rows)


def sizes_read(op: Op, rows: Sequence[frozenset[int]]) -> Region | None:
    """What an operation on ``shared``, or on slots in scratch, reads besides its blocks: the ``rows`` (`size_rows`)
    that say where they lie."""
    if not rows:
        return None
    regions = (*reads(op), *writes(op))
    blocks = [region.blocks for region in regions if region.buffer == "shared"]
    needed = frozenset[int]().union(*{rows[block] for listed in blocks for block in listed})
    needed |= {row for region in regions if region.buffer == "scratch" for row in region.like or ()}
    return SIZES[sorted(needed)] if needed else None


def most_tags(size: int, segments: int) -> int:
    """As many tags as no algorithm exceeds on any of ``size`` ranks."""
    return 4 * (size + 2) * segments + 2
