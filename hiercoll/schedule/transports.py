"""How messages of a device's memory travel: transforms of schedules, proved like any schedule.

- *direct*: the MPI library is given device addresses, of blocks that lie together: others are `packed` first.
- *staged*: every message passes through the ``host`` buffer at both ends, by copies that
  are operations of the schedule. With ``segments`` the copies of one part overlap the
  messages of another.
- *peer*: within a node, the receiver copies from the sender's memory to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

from hiercoll.errors import ConstraintError, ParameterError
from hiercoll.schedule import (
    HOST,
    MESSAGES,
    SCRATCH,
    AcceptOffer,
    AwaitNotice,
    Buffer,
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
)
from hiercoll.topology import Topology

Moves: TypeAlias = "Callable[[Region], bool]"  # whether messages of a region are to pass through copies
ON_HOST = ("host", "shared")  # buffers that lie on the host whatever the others do; with `peer`, shared does not


class Transport(NamedTuple):
    """``peer``: within a node by `peer`. ``segments``: other messages `staged` in so many parts;
    0 for messages of the buffers' own memory, ``packed`` if they are of a device."""

    peer: bool = False
    segments: int = 0
    packed: bool = False

    def schedule(self, emit: Callable[[int], Schedule], topology: Topology, rank: int) -> Schedule:
        """What a rank runs instead of ``emit(rank)``. Raises ConstraintError as `cut` does."""
        schedule = peer(emit, topology, rank) if self.peer else emit(rank)
        on_host = ("host",) if self.peer else ON_HOST
        if self.segments:
            return staged(schedule, self.segments, on_host)
        return packed(schedule, on_host) if self.packed else schedule


DIRECT = Transport()
AUTO = "auto"
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
    return DIRECT if name in (AUTO, "direct") else Transport(name == "peer", parts or 1)


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


def staged(schedule: Schedule, segments: int = 1, on_host: Sequence[str] = ON_HOST) -> Schedule:
    """``schedule`` with its messages sent from, and received into, the ``host`` buffer.

    A schedule in rounds stays one: what a round sends is copied out together, in as few
    copies as buffers, and what it receives is copied in together. Others keep their
    dependencies. ``segments``: see `cut`; ``on_host``: buffers that are there anyway.
    Raises ConstraintError as `cut` does.
    """
    moves = partial(_is_elsewhere, on_host)
    if segments > 1:
        return _by_dependencies(cut(schedule, segments), HOST, moves)
    return _through_copies(schedule, HOST, moves)


def _is_elsewhere(on_host: Sequence[str], region: Region) -> bool:
    return region.buffer not in on_host


def packed(schedule: Schedule, on_host: Sequence[str] = ON_HOST) -> Schedule:
    """``schedule`` with messages of blocks that lie apart sent from, and received into, ``scratch``, where they lie
    together: MPI libraries copy pieces of device memory one by one. As `staged`, but for what lies on the host."""
    return _through_copies(schedule, SCRATCH, lambda region: region.buffer not in on_host and not region.is_whole)


def _through_copies(schedule: Schedule, buffer: Buffer, moves: Moves) -> Schedule:
    if not any(isinstance(op, (Send, Recv)) and moves(op.region) for op in schedule.ops):
        return schedule
    if schedule.rounds is not None:
        return _by_rounds(schedule, schedule.rounds, buffer, moves)
    through = _by_dependencies(schedule, buffer, moves)
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
    """Hands out places of a buffer, after what the schedule has there; the parts of one message share theirs."""

    def __init__(self, schedule: Schedule, buffer: Buffer) -> None:
        self._buffer, self._schedule = buffer, schedule
        self.blocks, self._segments = schedule.scratch if buffer is SCRATCH else schedule.host, schedule.segments
        self._known: dict[tuple[object, ...], int] = {}

    def place(self, op: Send | Recv) -> Region:
        """Where a message lies there."""
        key = (type(op), op.peer, op.tag // self._segments, op.region._replace(part=None))
        start = self._known.setdefault(key, self.blocks)
        if start == self.blocks:
            self.blocks += op.region.size
        return self._buffer[start : start + op.region.size]._replace(part=op.region.part)

    def made(self, ops: Iterable[Op]) -> Schedule:
        """The schedule with these operations, and this buffer as large as it has become."""
        if self._buffer is SCRATCH:
            return replace(self._schedule, ops=tuple(ops), scratch=self.blocks)
        return replace(self._schedule, ops=tuple(ops), host=self.blocks)


def _by_dependencies(schedule: Schedule, buffer: Buffer, moves: Moves) -> Schedule:
    """A copy before each send, and one after each receive, just before what waits for it first:
    schedules that run in order must not wait for a receive before its time."""
    stage, ops = _Stage(schedule, buffer), list[Op]()
    done: dict[int, int] = {}  # where the operation with this number is complete
    arriving: dict[int, Copy] = {}  # copies that are due, by the number of the receive

    def settled(index: int) -> int:
        if index in arriving:
            ops.append(arriving.pop(index))
            done[index] = len(ops) - 1
        return done[index]

    for index, op in enumerate(schedule.ops):
        deps = tuple(settled(dep) for dep in op.deps)
        if isinstance(op, Send) and moves(op.region):
            place = stage.place(op)
            ops += [Copy(op.region, place, deps), op._replace(region=place, deps=(len(ops),))]
        elif isinstance(op, Recv) and moves(op.region):
            place = stage.place(op)
            arriving[index] = Copy(place, op.region, (len(ops),))
            ops.append(op._replace(region=place, deps=deps))
        else:
            ops.append(op._replace(deps=deps))
        done[index] = len(ops) - 1
    ops += arriving.values()
    return stage.made(ops)


def _by_rounds(schedule: Schedule, rounds: Sequence[Sequence[int]], buffer: Buffer, moves: Moves) -> Schedule:
    """Each round as three: copies out, messages, copies in."""
    stage, ops = _Stage(schedule, buffer), list[Op]()
    gate: Deps = ()
    for members in rounds:
        old = [schedule.ops[index] for index in members]
        sends = [op for op in old if isinstance(op, Send) and moves(op.region)]
        recvs = [op for op in old if isinstance(op, Recv) and moves(op.region)]
        of_region = {op.region: op for op in reversed(sends)}  # what is sent to several is copied out once
        out = {region: stage.place(op) for region, op in reversed(of_region.items())}
        places = {op.region: stage.place(op) for op in recvs}
        messages = [_through(op, out if isinstance(op, Send) else places) for op in old]
        copies_out = [Copy(source, target, ()) for source, target in _together(out.items())]
        copies_in = [Copy(source, target, ()) for target, source in _together(places.items())]
        for step in (copies_out, messages, copies_in):
            if step:
                first = len(ops)
                ops += [op._replace(deps=gate) for op in step]
                ops.append(Join(tuple(range(first, len(ops)))))
                gate = (len(ops) - 1,)
    return stage.made(ops)


def _through(op: Op, places: dict[Region, Region]) -> Op:
    """A message by way of its region's place, if it has one; other operations as they are."""
    return op._replace(region=places.get(op.region, op.region)) if isinstance(op, (Send, Recv)) else op


def _together(pairs: Iterable[tuple[Region, Region]]) -> list[tuple[Region, Region]]:
    """Pairs of a region and its place, those of one buffer and segment as one."""
    groups: dict[tuple[str, int | None], list[tuple[Region, Region]]] = {}
    for region, place in pairs:
        groups.setdefault((region.buffer, region.part), []).append((region, place))
    return [(_joined(r for r, _ in group), _joined(p for _, p in group)) for group in groups.values()]


def _joined(regions: Iterable[Region]) -> Region:
    """The blocks of several regions of one buffer, one region after the other."""
    listed = list(regions)
    return listed[0]._replace(blocks=as_blocks([block for region in listed for block in region.blocks]))
