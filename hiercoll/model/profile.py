"""What the ranks of a node do in a schedule, counted by distance: all that the model needs of it.

Counts are in blocks, so that one profile serves all sizes. Ranks that do the same are one class; on large nodes, only
so many schedules are looked at as it takes to tell the classes apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from hiercoll.model.durations import pieces_of
from hiercoll.model.machine import FAR, Machine, level
from hiercoll.schedule import Copy, Get, Recv, Reduce, Region, Schedule, Send, Signal, Wait
from hiercoll.topology import Topology

MOST_PHASES = 8  # that are told apart; the rest is one
MANY_LANES = 16  # on smaller nodes, all ranks are looked at

Sizes: TypeAlias = "Counter[tuple[int, float]]"  # messages by level and blocks


class Copied(NamedTuple):
    """``blocks`` that a rank copies in so many contiguous ``pieces``; or, if ``reduced``, that it combines with others
    into so many blocks."""

    pieces: float
    blocks: float
    reduced: bool = False


@dataclass
class Phase:
    """Messages of one rank without a copy between them; ``chain`` of them wait for each other."""

    sent: Sizes = field(default_factory=Counter)
    received: Sizes = field(default_factory=Counter)
    chain: int = 0
    peers: set[int] = field(default_factory=set)  # nodes

    @property
    def blocks(self) -> float:
        """Sent and received."""
        return sum(blocks * number for sizes in (self.sent, self.received) for (_, blocks), number in sizes.items())


@dataclass
class RankProfile:
    """One rank's phases, copies and reductions, and flags that it raises or waits for."""

    phases: list[Phase] = field(default_factory=list)
    copies: list[Copied] = field(default_factory=list)
    flags: int = 0

    @property
    def key(self) -> object:
        """Equal for ranks that do the same."""
        phases = [(sorted(p.sent.items()), sorted(p.received.items()), p.chain, len(p.peers)) for p in self.phases]
        return repr((phases, self.copies, self.flags))


class Totals(NamedTuple):
    """A phase of all ranks of a node together, in blocks: what leaves it (``out``), to how many ``peers`` (nodes),
    and what enters it (``into``); what is received within it, and ``across`` its sockets; what its ranks touch
    (``working``), how many ranks hold that, in how many sockets; and the number of ``messages`` that leave it."""

    out: float
    peers: int
    near: float
    across: float
    working: float
    active: float
    sockets: int
    into: float
    messages: float


@dataclass
class Profile:
    """Of a node: its classes of ranks with the number of each, its phases; ``pieces``: blocks of a collective's vector;
    ``fresh``: blocks of memory that are allocated in each call, by all ranks of the node together."""

    classes: list[tuple[RankProfile, float]]
    totals: list[Totals]
    pieces: int = 1
    fresh: float = 0.0


def profile(emit: Callable[[int], Schedule], topology: Topology, machine: Machine, leaders: int = 1) -> list[Profile]:
    """Of the nodes that differ: the first one where all are alike, else the first, a middle one and the last.
    ``leaders`` of a node may do other things than the ranks beside them."""
    alike = topology.is_even and topology.placement in ("block", "cyclic")
    last = len(topology.nodes) - 1
    nodes = [0] if alike else sorted({0, last // 2, last})
    return [of_node(emit, topology, machine, node, leaders) for node in nodes]


def of_node(
    emit: Callable[[int], Schedule], topology: Topology, machine: Machine, node: int, leaders: int = 1
) -> Profile:
    """Of one node, from the schedules of its ranks: on large ones, of those beside leaders; where two of these do the
    same, all between them are taken to do so."""
    ranks, pieces = topology.nodes[node], 1
    known: dict[int, tuple[RankProfile, object]] = {}

    def look(lane: int) -> object:
        nonlocal pieces
        if lane not in known:
            schedule = emit(ranks[lane])
            pieces = schedule.blocks
            found = count(schedule, topology, machine)
            known[lane] = found, found.key
        return known[lane][1]

    def between(low: int, high: int) -> None:
        if high - low > 1 and look(low) != look(high):
            between(low, (low + high) // 2)
            between((low + high) // 2, high)

    last, firsts = len(ranks) - 1, [group[0] for group in topology.groups(node, leaders)]
    beside = {min(max(topology.lane_of[first] + step, 0), last) for first in firsts for step in (-1, 0, 1)}
    marks = sorted({0, last, *beside}) if len(ranks) > MANY_LANES else list(range(len(ranks)))
    for low, high in pairwise([*marks, last]):
        look(low)
        between(low, high)
    ends = [*sorted(known), len(ranks)]
    spans = [(known[low][0], range(low, high)) for low, high in pairwise(ends)]
    return Profile(_classes(spans), _totals(spans, machine.socket or len(ranks)), pieces)


Spans: TypeAlias = "Sequence[tuple[RankProfile, range]]"  # lanes that do the same


def _classes(spans: Spans) -> list[tuple[RankProfile, float]]:
    known: dict[object, tuple[RankProfile, float]] = {}
    for each, lanes in spans:
        key = each.key
        known[key] = (each, len(lanes) + (known[key][1] if key in known else 0))
    return list(known.values())


def count(schedule: Schedule, topology: Topology, machine: Machine) -> RankProfile:
    """One rank's part."""
    rank = schedule.rank
    found, phase = RankProfile(), Phase()
    depth: list[int] = []  # messages that an operation comes after
    before, deepest, copied = 0, 0, False
    levels: dict[int, int] = {}
    ends = _Ends()
    for op in schedule.ops:
        after = max([depth[dep] for dep in op.deps], default=0)
        if isinstance(op, (Send, Recv, Get)):
            if copied and len(found.phases) < MOST_PHASES:
                phase.chain, before = deepest - before, deepest
                found.phases.append(phase)
                phase, copied = Phase(), False
            region = op.target if isinstance(op, Get) else op.region
            if op.peer not in levels:
                levels[op.peer] = level(machine, topology, rank, op.peer)
            sizes = phase.sent if isinstance(op, Send) else phase.received
            sizes[levels[op.peer], _blocks(schedule, region)] += 1
            if levels[op.peer] == FAR:
                phase.peers.add(topology.node_of[op.peer])
            after = ends.depth((levels[op.peer], region.size), isinstance(op, Send), len(depth), after + 1, depth)
            deepest = max(deepest, after)
        elif isinstance(op, (Copy, Reduce)):
            copied = copied or deepest > before
            sources = (op.source,) if isinstance(op, Copy) else (op.left, op.right)
            pieces = max(pieces_of(region) for region in (*sources, op.target))
            found.copies.append(Copied(pieces, _blocks(schedule, op.target), isinstance(op, Reduce)))
        elif isinstance(op, (Signal, Wait)):
            found.flags += 1  # the flags of all that a rank waits for are raised at once
        depth.append(after)
    phase.chain = deepest - before
    found.phases.append(phase)
    return found


def _blocks(schedule: Schedule, region: Region) -> float:
    """The size of a region in whole blocks of the program's elements."""
    return region.size * (1 + schedule.is_wide(region)) / (1 if region.part is None else schedule.segments)


class _Ends:
    """How deep messages are in their chains, where ranks do alike: the k-th message of a size and distance that a rank
    receives has waited, where it comes from, for as much as the k-th that it sends."""

    def __init__(self) -> None:
        self._sent: defaultdict[object, list[int]] = defaultdict(list)  # depths
        self._received: defaultdict[object, list[int]] = defaultdict(list)  # operations

    def depth(self, kind: tuple[int, int], is_send: bool, index: int, known: int, depths: list[int]) -> int:
        """Of operation ``index``, which is at least as deep as is ``known``; a receive before it may be deeper then."""
        sent, received = self._sent[kind], self._received[kind]
        if is_send:
            if len(sent) < len(received):
                other = received[len(sent)]
                depths[other] = max(depths[other], known)
            sent.append(known)
        else:
            if len(received) < len(sent):
                known = max(known, sent[len(received)])
            received.append(index)
        return known


def _totals(spans: Spans, socket: int) -> list[Totals]:
    return [_total(spans, socket, index) for index in range(max(len(each.phases) for each, _ in spans))]


def _total(spans: Spans, socket: int, index: int) -> Totals:
    out = into = near = across = working = messages = 0.0
    peers: set[int] = set()
    held: list[tuple[float, range]] = []
    for each, lanes in spans:
        if index < len(each.phases):
            phase, ranks = each.phases[index], len(lanes)
            peers |= phase.peers
            out += ranks * sum(blocks * n for (far, blocks), n in phase.sent.items() if far == FAR)
            messages += ranks * sum(n for (far, _), n in phase.sent.items() if far == FAR)
            into += ranks * sum(blocks * n for (far, blocks), n in phase.received.items() if far == FAR)
            near += ranks * sum(blocks * n for (far, blocks), n in phase.received.items() if far < FAR)
            across += ranks * sum(blocks * n for (far, blocks), n in phase.received.items() if far == 2)
            working += ranks * phase.blocks
            held.append((phase.blocks, lanes))
    most = max((blocks for blocks, _ in held), default=0.0)
    holding = [lanes for blocks, lanes in held if 2 * blocks >= most]
    used = {lane // socket for lanes in holding for lane in lanes}
    holders = sum(map(len, holding))
    return Totals(out, max(len(peers), 1), near, across, working, holders, len(used), into, messages)
