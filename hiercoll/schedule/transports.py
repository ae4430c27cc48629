"""How messages of a device's memory travel: transforms of schedules, proved like any schedule.

- *direct*: the MPI library is given device addresses, of blocks that lie together: others are `packed` first.
- *staged*: every message passes through the host at both ends, by copies that are
  operations of the schedule: through the ``host`` buffer, or, within a node, through its
  ``shared`` buffer, so that nothing of it is left to send but a notice. With ``segments``
  the copies of one part overlap the messages of another.
- *peer*: within a node, the receiver copies from the sender's memory to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from hiercoll.collectives import AUTO
from hiercoll.errors import ConstraintError, ParameterError
from hiercoll.schedule import (
    MESSAGES,
    SHARED,
    AcceptOffer,
    AwaitNotice,
    Buffer,
    BufferName,
    Copy,
    Deps,
    Get,
    Join,
    Notify,
    Offer,
    Op,
    Recv,
    Reduce,
    Region,
    Schedule,
    Send,
    as_blocks,
    in_order,
    overlapped,
)
from hiercoll.topology import Topology

Moves: TypeAlias = "Callable[[Region], bool]"  # whether messages of a region are to pass through copies
HOST_ALONE = ("host", "wide_host", "sizes")  # buffers that lie on the host whatever the others do
ON_HOST = (*HOST_ALONE, "shared")  # the same; with `peer`, shared does not


class Transport(NamedTuple):
    """``peer``: within a node by `peer`. ``segments``: other messages `staged` in so many parts, ``shared`` through
    the node's memory within it; 0 for messages of the buffers' own memory, ``packed`` if they are of a device."""

    peer: bool = False
    segments: int = 0
    packed: bool = False
    shared: bool = False

    @property
    def has_notices(self) -> bool:
        """Whether ranks of a node tell each other how far their copies are."""
        return self.peer or self.shared

    def schedule(self, emit: Callable[[int], Schedule], topology: Topology, rank: int) -> Schedule:
        """What a rank runs instead of ``emit(rank)``. Raises ConstraintError as `cut` does, on all ranks alike."""
        if self == DIRECT:
            return emit(rank)
        if self.segments > 1:  # a rank alone on its node raises no flags where others do
            cut(emit(max(topology.nodes, key=len)[0]), self.segments)
        schedule = peer(emit, topology, rank) if self.peer else emit(rank)
        on_host = HOST_ALONE if self.peer else ON_HOST
        if self.segments:
            near = places_on_node(emit, topology, rank) if self.shared and not self.peer else None
            schedule = staged(schedule, self.segments, on_host, near)
        elif self.packed:
            schedule = packed(schedule, on_host)
        return overlapped(schedule) if schedule.flags and not schedule.sizes else schedule


class Places(NamedTuple):
    """Where in the node's buffer the messages within the node lie, by source, destination and tag; ``blocks`` is what
    the buffer has with them, in all."""

    at: Mapping[tuple[int, int, int], int]
    blocks: int


def places_on_node(emit: Callable[[int], Schedule], topology: Topology, rank: int) -> Places:
    """Places for all messages of private memory within the node of ``rank``, behind what the schedules have there: the
    same on all of its ranks. What is sent to several at once has one place."""
    at: dict[tuple[int, int, int], int] = {}
    of_data: dict[tuple[object, ...], int] = {}
    node, blocks = topology.node(rank), emit(rank).shared
    for source in node:
        for op in emit(source).ops:
            if isinstance(op, Send) and op.peer in node and op.region.buffer not in ON_HOST:
                is_part = op.region.part is not None  # parts of a message have its place together
                data = (op.peer, op.region._replace(part=None)) if is_part else (op.region, op.deps)
                start = of_data.setdefault((source, *data), blocks)
                blocks = max(blocks, start + op.region.size)
                at[source, op.peer, op.tag] = start
    return Places(at, blocks)


DIRECT = Transport()
FREED = 1  # the tag of the notice that a rank has read another one's places of the node's buffer: all others are even
MOST_SEGMENTS = 64  # parts of a message that passes through the host


def parse_transport(text: object) -> tuple[str, int]:
    """What users call a transport: its name, and the number of parts (0 if not given). Raises ParameterError."""
    name, colon, parts = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name in (AUTO, "direct", "staged", "peer") and not colon:
        return name, 0
    if name in ("staged", "peer") and parts.isdecimal() and 1 <= int(parts) <= MOST_SEGMENTS:
        return name, int(parts)
    expected = f"'auto', 'direct', 'staged', 'peer', 'staged:PARTS' or 'peer:PARTS' (1 to {MOST_SEGMENTS})"
    raise ParameterError("transport", expected, repr(text))


def named(text: str) -> Transport:
    """The transport of that name on an MPI library that takes no device memory; "direct": of the host's memory. Raises
    ParameterError."""
    name, parts = parse_transport(text)
    return DIRECT if name in (AUTO, "direct") else Transport(name == "peer", parts or 1, shared=name == "staged")


def peer(emit: Callable[[int], Schedule], topology: Topology, rank: int) -> Schedule:
    """``emit(rank)`` without messages of private memory within the node: the receiver copies
    from the sender's buffer (`Get`), which the sender has offered, and notifies it
    when it has. The send is complete with that notice, the receive with the copy.

    ``emit`` gives any rank's schedule: where a message's blocks lie, only its sender knows.
    """
    sources = {
        (node_rank, op.tag): op.region
        for node_rank in topology.node(rank)
        for op in (emit(node_rank).ops if node_rank != rank else ())
        if isinstance(op, Send) and op.peer == rank and op.region.buffer not in ON_HOST
    }
    schedule, ops = emit(rank), list[Op]()
    done: dict[int, int] = {}  # where the operation with this number is complete
    arriving: dict[int, Get] = {}  # copies that are due, by the number of the receive

    def settled(index: int) -> int:
        if index in arriving:
            get = arriving.pop(index)
            done[index] = len(ops)
            ops.extend([get, Notify(get.peer, get.tag + 1, (len(ops),))])
        return done[index]

    for index, op in enumerate(schedule.ops):
        deps = tuple(settled(dep) for dep in op.deps)
        near = isinstance(op, (Send, Recv)) and topology.node_of[op.peer] == topology.node_of[rank]
        if near and isinstance(op, Send) and op.region.buffer not in ON_HOST:
            ops.append(Offer(op.peer, 2 * op.tag, op.region.buffer, deps))
            ops.append(AwaitNotice(op.peer, 2 * op.tag + 1, deps))
        elif near and isinstance(op, Recv) and (op.peer, op.tag) in sources:
            source = sources[op.peer, op.tag]
            arriving[index] = Get(op.peer, 2 * op.tag, source, op.region, (len(ops),))
            ops.append(AcceptOffer(op.peer, 2 * op.tag, source.buffer, deps))
        elif isinstance(op, MESSAGES):
            ops.append(op._replace(tag=2 * op.tag, deps=deps))
        else:
            ops.append(op._replace(deps=deps))
        done[index] = len(ops) - 1
    for index in list(arriving):
        settled(index)
    made = replace(schedule, ops=tuple(ops))
    return in_order(made) if schedule.flags else made


def staged(
    schedule: Schedule, segments: int = 1, on_host: Sequence[str] = ON_HOST, near: Places | None = None
) -> Schedule:
    """``schedule`` with its messages sent from, and received into, the ``host`` buffer.

    A schedule in rounds stays one: what a round sends is copied out together, in as few
    copies as buffers, and what it receives is copied in together. Others keep their
    dependencies. ``segments``: see `cut`; ``on_host``: buffers that are there anyway.
    Messages with a place in ``near`` are copied there by the sender, who notifies the receiver, and from there by
    the receiver, who notifies the sender at the end: then the place is free for the next start.
    Raises ConstraintError as `cut` does.
    """
    moves = partial(_is_elsewhere, on_host)
    if segments > 1:
        parts = cut(schedule, segments)
        return _by_dependencies(parts, _Stage(parts, True, near, segments), moves)
    return _through_copies(schedule, _Stage(schedule, True, near), moves)


def _is_elsewhere(on_host: Sequence[str], region: Region) -> bool:
    return region.buffer not in on_host


def packed(schedule: Schedule, on_host: Sequence[str] = ON_HOST) -> Schedule:
    """``schedule`` with messages of blocks that lie apart sent from, and received into, ``scratch``, where they lie
    together: MPI libraries copy pieces of device memory one by one. As `staged`, but for what lies on the host."""
    return _through_copies(schedule, _Stage(schedule, False), partial(_is_apart, on_host))


def _is_apart(on_host: Sequence[str], region: Region) -> bool:
    return region.buffer not in on_host and not region.is_whole


def _through_copies(schedule: Schedule, stage: _Stage, moves: Moves) -> Schedule:
    if not any(isinstance(op, (Send, Recv)) and _passes(op, stage, moves) for op in schedule.ops):
        return schedule if stage.near is None else stage.made(stage.message(op, None, op.deps) for op in schedule.ops)
    if schedule.rounds is not None:
        return _by_rounds(schedule, schedule.rounds, stage, moves)
    through = _by_dependencies(schedule, stage, moves)
    return in_order(through) if schedule.flags else through


def cut(schedule: Schedule, segments: int) -> Schedule:
    """``schedule`` as so many independent ones, each for one segment of every block.

    What one segment waits for another need not. Raises ConstraintError for schedules that
    are cut already, or that raise flags.
    """
    if schedule.segments > 1 or schedule.flags:
        got = "segments of its own" if schedule.segments > 1 else "flags in shared memory"
        raise ConstraintError("segments", "a schedule without segments and flags", got, schedule.rank)
    count = len(schedule.ops)
    ops = [_part(op, part, segments, count * part) for part in range(segments) for op in schedule.ops]
    return replace(schedule, ops=tuple(ops), segments=segments)


def _part(op: Op, part: int, segments: int, shift: int) -> Op:
    """An operation on one segment of its blocks, ``shift`` operations further on."""
    deps = tuple(dep + shift for dep in op.deps)
    if isinstance(op, (Send, Recv)):
        return op._replace(tag=op.tag * segments + part, region=op.region.segment(part), deps=deps)
    if isinstance(op, MESSAGES):  # offers and notices
        return op._replace(tag=op.tag * segments + part, deps=deps)
    if isinstance(op, Copy):
        return Copy(op.source.segment(part), op.target.segment(part), deps)
    if isinstance(op, Get):
        source, target = op.source.segment(part), op.target.segment(part)
        return Get(op.peer, op.tag * segments + part, source, target, deps)
    if isinstance(op, Reduce):
        return Reduce(op.left.segment(part), op.right.segment(part), op.target.segment(part), deps)
    return op._replace(deps=deps)


class _Stage:
    """Hands out places on the host, or of scratch, after what the schedule has there: for elements of the type that the
    message is of. The parts of one message share theirs. Messages within the node may have places in its buffer instead
    (``near``)."""

    def __init__(self, schedule: Schedule, on_host: bool, near: Places | None = None, parts: int = 1) -> None:
        self.near, self._schedule, self._parts = near, schedule, parts
        plain: BufferName = "host" if on_host else "narrow" if schedule.accumulates else "scratch"
        wide: BufferName = "wide_host" if on_host else "scratch"
        self._buffers = plain, wide
        self._sizes: dict[BufferName, int] = {name: getattr(schedule, name) for name in self._buffers}
        self._known: dict[tuple[object, ...], int] = {}
        self._at = near.at if near is not None else {}
        ends = [(source, target) for source, target, _ in self._at]
        self.sources = list(dict.fromkeys(source for source, target in ends if target == schedule.rank))
        self.readers = list(dict.fromkeys(target for source, target in ends if source == schedule.rank))

    def is_near(self, op: Send | Recv) -> bool:
        """Whether a message lies in the node's buffer."""
        return self._ends(op) in self._at

    def _ends(self, op: Send | Recv) -> tuple[int, int, int]:
        rank, tag = self._schedule.rank, op.tag // self._parts
        return (rank, op.peer, tag) if isinstance(op, Send) else (op.peer, rank, tag)

    def place(self, op: Send | Recv) -> Region:
        """Where a message lies."""
        start, name = self._at.get(self._ends(op)), SHARED.name
        if start is None:
            name = self._buffers[self._schedule.is_wide(op.region)]
            key = (type(op), op.peer, op.tag // self._schedule.segments, op.region._replace(part=None))
            start = self._known.setdefault(key, self._sizes[name])
            if start == self._sizes[name]:
                self._sizes[name] += op.region.size
        return Buffer(name)[start : start + op.region.size]._replace(part=op.region.part)

    def message(self, op: Op, place: Region | None, deps: Deps) -> Op:
        """What is left of an operation whose message lies in a place, if it has one."""
        if not isinstance(op, (Send, Recv)):
            return op._replace(deps=deps)
        tag = op.tag if self.near is None else 2 * op.tag  # so that FREED is no other's
        if self.is_near(op):
            return Notify(op.peer, tag, deps) if isinstance(op, Send) else AwaitNotice(op.peer, tag, deps)
        return op._replace(tag=tag, region=place or op.region, deps=deps)

    def made(self, ops: Iterable[Op]) -> Schedule:
        """The schedule with these operations, and the buffers as large as they have become."""
        shared = self._schedule.shared if self.near is None else self.near.blocks
        sizes: Any = self._sizes
        return replace(self._schedule, ops=tuple(ops), shared=shared, **sizes)


def _by_dependencies(schedule: Schedule, stage: _Stage, moves: Moves) -> Schedule:
    """A copy before each send, and one after each receive, just before what waits for it first:
    schedules that run in order must not wait for a receive before its time."""
    ops = list[Op]()
    done: dict[int, int] = {}  # where the operation with this number is complete
    arriving: dict[int, Copy] = {}  # copies that are due, by the number of the receive
    copied: dict[Region, int] = {}  # copies to places that several read
    read: dict[int, list[int]] = {}  # copies from the places of a rank of the node

    def settled(index: int) -> int:
        if index in arriving:
            ops.append(arriving.pop(index))
            done[index] = len(ops) - 1
            op = schedule.ops[index]
            assert isinstance(op, Recv)
            if stage.is_near(op):
                read.setdefault(op.peer, []).append(len(ops) - 1)
        return done[index]

    for index, op in enumerate(schedule.ops):
        deps = tuple(settled(dep) for dep in op.deps)
        place = stage.place(op) if isinstance(op, (Send, Recv)) and _passes(op, stage, moves) else None
        if isinstance(op, Send) and place is not None:
            if place not in copied or not stage.is_near(op):
                copied[place] = len(ops)
                ops.append(Copy(op.region, place, deps))
            ops.append(stage.message(op, place, (copied[place],)))
            done[index] = copied[place] if stage.is_near(op) else len(ops) - 1
            continue
        if isinstance(op, Recv) and place is not None:
            arriving[index] = Copy(place, op.region, (len(ops),))
        ops.append(stage.message(op, place, deps))
        done[index] = len(ops) - 1
    for index in list(arriving):
        settled(index)
    ops += [Notify(peer, FREED, tuple(read[peer])) for peer in stage.sources]
    ops += [AwaitNotice(peer, FREED, ()) for peer in stage.readers]
    return stage.made(ops)


def _passes(op: Send | Recv, stage: _Stage, moves: Moves) -> bool:
    """Whether a message passes through copies."""
    return moves(op.region) or stage.is_near(op)


def _by_rounds(schedule: Schedule, rounds: Sequence[Sequence[int]], stage: _Stage, moves: Moves) -> Schedule:
    """Each round as three: copies out, messages, copies in. Places of the node are free after another one."""
    ops = list[Op]()
    gate: Deps = ()

    def add(step: Sequence[Op]) -> None:
        nonlocal gate
        if step:
            first = len(ops)
            ops.extend(op._replace(deps=gate) for op in step)
            ops.append(Join(tuple(range(first, len(ops)))))
            gate = (len(ops) - 1,)

    for members in rounds:
        out: dict[Region, Region] = {}  # what is copied there, by place
        into: dict[Region, Region] = {}
        of_region: dict[Region, Region] = {}  # what is sent to several is copied out once
        messages = list[Op]()
        for op in (schedule.ops[index] for index in members):
            place = None
            if isinstance(op, (Send, Recv)) and _passes(op, stage, moves):
                known = of_region if isinstance(op, Send) and not stage.is_near(op) else {}
                place = known[op.region] = known.get(op.region) or stage.place(op)
                (out if isinstance(op, Send) else into)[place] = op.region
            messages.append(stage.message(op, place, ()))
        add([Copy(region, place, ()) for region, place in _together((r, p) for p, r in out.items())])
        add(messages)
        add([Copy(place, region, ()) for place, region in _together(into.items())])
    add(
        [
            *(Notify(peer, FREED, ()) for peer in stage.sources),
            *(AwaitNotice(peer, FREED, ()) for peer in stage.readers),
        ]
    )
    return stage.made(ops)


def _together(pairs: Iterable[tuple[Region, Region]]) -> list[tuple[Region, Region]]:
    """Copies, as source and target, those between the same buffers and segments as one."""
    groups: dict[tuple[object, ...], list[tuple[Region, Region]]] = {}
    for source, target in pairs:
        groups.setdefault((source.buffer, target.buffer, source.part), []).append((source, target))
    return [(_joined(s for s, _ in group), _joined(t for _, t in group)) for group in groups.values()]


def _joined(regions: Iterable[Region]) -> Region:
    """The blocks of several regions of one buffer, one region after the other."""
    listed = list(regions)
    return listed[0]._replace(blocks=as_blocks([block for region in listed for block in region.blocks]))
