"""Allreduces: around a ring, by doubling, by halving and doubling, from all to all, and for nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from hiercoll.algorithms.grouping import ARRIVED, DONE
from hiercoll.algorithms.registry import Parameter, Params, register
from hiercoll.collectives import ALLREDUCE, Order, fixed_tree
from hiercoll.schedule import RECV, SEND, Buffer, Builder, Region, Schedule, in_order
from hiercoll.topology import Topology

Tree: TypeAlias = "int | tuple[Tree, Tree]"


class Part(NamedTuple):
    """A partial result: where it is, and the operations after which it is there."""

    region: Region
    after: list[int]


class Line(NamedTuple):
    """Ranks that reduce together, in their order: as many of them as a power of two take part in the steps, of which
    ``place`` is this one's number; the second rank of each of the first ``pairs`` gives its part to the one before it,
    and gets the result from there."""

    ranks: Sequence[int]
    pairs: int
    place: int

    @classmethod
    def of(cls, ranks: Sequence[int], rank: int) -> Line:
        pairs = len(ranks) - (1 << len(ranks).bit_length() - 1)
        at = ranks.index(rank)
        return cls(ranks, pairs, at // 2 if at < 2 * pairs else at - pairs)

    @property
    def width(self) -> int:
        """How many take part in the steps: a power of two."""
        return len(self.ranks) - self.pairs

    def rank(self, place: int) -> int:
        """The rank of that number."""
        return self.ranks[2 * place if place < self.pairs else place + self.pairs]

    @property
    def partner(self) -> int | None:
        """The other one of a rank's pair, if it is in one."""
        if self.place >= self.pairs:
            return None
        return self.ranks[2 * self.place + 1]

    def distances(self) -> list[int]:
        """Of the places that exchange in each step, the nearest first."""
        return [1 << step for step in range(self.width.bit_length() - 1)]


def combined(b: Builder, own: Part, other: Region, came: list[int], target: Region, is_first: bool) -> Part:
    """``own`` and what has come, of lower ranks if it ``is_first``, as a new partial result."""
    left, right = (other, own.region) if is_first else (own.region, other)
    return Part(target, [b.reduce(left, right, target, after=[*own.after, *came])])


def folded(b: Builder, line: Line, own: Part, target: Region, spare: Region, tag: int) -> tuple[bool, Part]:
    """Whether this rank takes part in the steps, and what it begins with, or has given to its partner."""
    partner = line.partner
    if partner is None:
        return True, own
    if partner == b.rank:
        return False, Part(own.region, [b.send(line.rank(line.place), own.region, tag=tag, after=own.after)])
    came = [b.recv(partner, spare, tag=tag, after=own.after)]
    return True, combined(b, own, spare, came, target, is_first=False)


def _unfolded(b: Builder, line: Line, takes_part: bool, part: Part, target: Region, tag: int) -> Part:
    """The result, which partners get from those that took part."""
    if not takes_part:
        return Part(target, [b.recv(line.rank(line.place), target, tag=tag, after=part.after)])
    if line.partner is not None:
        b.send(line.partner, target, tag=tag, after=part.after)
    return part


def _doubling(b: Builder, line: Line, own: Part, target: Region, spare: Buffer, tag: int) -> Part:
    """Whole partial results are exchanged, again and again; what comes lies in ``spare``."""
    into = spare[range(len(target.blocks))].of(target.blocks)
    takes_part, part = folded(b, line, own, target, into, tag)
    for step, distance in enumerate(line.distances() if takes_part else [], tag + 1):
        peer = line.rank(line.place ^ distance)
        came = [b.recv(peer, into, tag=step, after=part.after), b.send(peer, part.region, tag=step, after=part.after)]
        part = combined(b, part, into, came, target, is_first=bool(line.place & distance))
    return _unfolded(b, line, takes_part, part, target, tag)


def _halving(b: Builder, line: Line, own: Part, target: Buffer, whole: range, spare: Buffer, tag: int) -> Part:
    """Halves of partial results are exchanged, the nearest ranks first; then what is complete, the other way. Blocks
    of ``whole`` are as many as ranks take part."""
    takes_part, begun = folded(b, line, own, target[whole], spare[range(len(whole))].of(whole), tag)
    if not takes_part:
        return _unfolded(b, line, False, begun, target[whole], tag)
    buffer = SEND if begun.region.buffer == "send" else target
    part, after, steps = whole, begun.after, list[tuple[int, int, range, range]]()
    for step, distance in enumerate(line.distances(), tag + 1):
        peer, half = line.rank(line.place ^ distance), len(part) // 2
        is_upper = bool(line.place & distance)
        kept, given = (part[half:], part[:half]) if is_upper else (part[:half], part[half:])
        into = spare[range(half)].of(kept)
        came = [b.recv(peer, into, tag=step, after=after), b.send(peer, buffer[given], tag=step, after=after)]
        after = combined(b, Part(buffer[kept], after), into, came, target[kept], is_upper).after
        steps.append((peer, step, kept, given))
        part, buffer = kept, target
    for peer, step, kept, given in reversed(steps):
        number = step + len(steps)
        came = [b.recv(peer, target[given], tag=number, after=after)]
        after = [*came, b.send(peer, target[kept], tag=number, after=after)]
    return _unfolded(b, line, True, Part(target[whole], after), target[whole], tag)


def _around(b: Builder, ranks: Sequence[int], own: Part, target: Buffer, whole: range, spare: Buffer, tag: int) -> Part:
    """Sums go around a ring, and then around once more; as many blocks as ranks, times a number."""
    p, me, each = len(ranks), ranks.index(b.rank), len(whole) // len(ranks)
    before, behind = ranks[me - 1], ranks[(me + 1) % p]
    source = SEND if own.region.buffer == "send" else target

    def share(number: int) -> range:
        return whole[number % p * each : (number % p + 1) * each]

    after = own.after
    for step in range(p - 1):
        out, into = share(me - step), share(me - step - 1)
        partial = spare[range(each)].of(into)
        came = [
            b.recv(before, partial, tag=tag + step, after=after),
            b.send(behind, (target if step else source)[out], tag=tag + step, after=after),
        ]
        after = [b.reduce(partial, source[into], target[into], after=came)]
    for step in range(p - 1):
        out, into = share(me + 1 - step), share(me - step)
        after = [
            b.recv(before, target[into], tag=tag + p + step, after=after),
            b.send(behind, target[out], tag=tag + p + step, after=after),
        ]
    return Part(target[whole], after)


@register(ALLREDUCE, in_place=True, auto=({},))
def ring_allreduce(topology: Topology, rank: int) -> Schedule:
    """Reduce-scatter around a ring, then allgather around it; vectors of p blocks.

    Contract: allreduce in any order (block c is combined in the cyclic order that starts
    at rank c).

        node 0: 0 -> 1 -> 2
                ^         v     p-1 steps adding own blocks, p-1 steps passing sums on
        node 1: 5 <- 4 <- 3

    Counts: messages = 2*(p-1); blocks = 2*(p-1); scratch = 1 if p > 1 else 0
    Constraints: none.
    Reference: Thakur, Rabenseifner, Gropp 2005; Patarasuk, Yuan 2009.
    """
    p, b = topology.size, Builder(rank, blocks=topology.size)
    if p == 1:
        b.copy(SEND[0], RECV[0])
    else:
        _around(b, range(p), Part(SEND[0:p], []), RECV, range(p), b.scratch(1), 0)
    return in_order(b.build())


@register(ALLREDUCE, in_place=True, order=Order.FIXED, auto=({},))
def recursive_doubling_allreduce(topology: Topology, rank: int) -> Schedule:
    """Ranks 1, 2, 4, ... apart exchange all that they have, and combine it.

    Contract: allreduce in the fixed order; the vector is one block.

        node 0: 0 1 2   | p=6: 1 -> 0, 3 -> 2;  0 <-> 2, 4 <-> 5;  0 <-> 4, 2 <-> 5;
        node 1: 3 4 5   |      0 -> 1, 2 -> 3

    More ranks than a power of two: the first ones go in pairs, of which one takes part.
    Counts (p a power of two): messages = log2(p); blocks = log2(p); scratch = 1 if p > 1 else 0
    Constraints: none.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4.5.
    """
    b, p = Builder(rank), topology.size
    if p == 1:
        b.copy(SEND[0], RECV[0])
    else:
        _doubling(b, Line.of(range(p), rank), Part(SEND[0], []), RECV[0], b.scratch(1), 0)
    return in_order(b.build())


@register(ALLREDUCE, in_place=True, order=Order.FIXED, auto=({},))
def rabenseifner_allreduce(topology: Topology, rank: int) -> Schedule:
    """Recursive halving, so that every rank has a part of the result, then recursive doubling of the parts.

    Contract: allreduce in the fixed order; as many blocks as the largest power of two <= p.

        node 0: 0 1 2   | p=6, in pairs 1 -> 0, 3 -> 2; halves: 0 <-> 2, 4 <-> 5;
        node 1: 3 4 5   |      quarters: 0 <-> 4, 2 <-> 5; and back; 0 -> 1, 2 -> 3

    The nearest ranks exchange the largest halves.
    Counts (p a power of two): messages = 2*log2(p); blocks = 2*(p-1); scratch = p//2
    Constraints: none.
    Reference: Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005, section 4.5.
    """
    p = topology.size
    line = Line.of(range(p), rank)
    b, whole = Builder(rank, blocks=line.width), range(line.width)
    if p == 1:
        b.copy(SEND[0], RECV[0])
    else:
        spare = b.scratch(line.width if line.pairs else line.width // 2)
        _halving(b, line, Part(SEND[whole], []), RECV, whole, spare, 0)
    return in_order(b.build())


@register(ALLREDUCE, in_place=True, order=Order.FIXED, auto=({},))
def all_pairs_allreduce(topology: Topology, rank: int) -> Schedule:
    """Rank j gets block j of all ranks, combines them, and sends the result to all.

    Contract: allreduce in the fixed order; the vector is p blocks.

        node 0: 0 1 2   | every rank -> every other: the block that is the other's;
                |X|X|   | then every rank -> every other: its block of the result
        node 1: 3 4 5   |

    Counts: messages = 2*(p-1); blocks = 2*(p-1); scratch = p-1
    Constraints: none.
    Reference: Cowan et al. 2022 (GC3), all-pairs.
    """
    p, b = topology.size, Builder(rank, blocks=topology.size)
    spare, others = b.scratch(p - 1), [(rank + step) % p for step in range(1, p)]
    parts = {rank: Part(SEND[rank], [])}
    for slot, peer in enumerate(others):
        parts[peer] = Part(spare[slot].of(rank), [b.recv(peer, spare[slot].of(rank))])
    sent = {peer: b.send(peer, SEND[peer]) for peer in others}
    if p == 1:
        b.copy(SEND[0], RECV[0])
    else:
        result = over_tree(b, [parts[each] for each in range(p)], RECV[rank])
        for peer in others:
            b.send(peer, RECV[rank], tag=1, after=result.after)
            b.recv(peer, RECV[peer], tag=1, after=[sent[peer]])
    return in_order(b.build())


def over_tree(b: Builder, parts: Sequence[Part], target: Region, before: Sequence[int] = ()) -> Part:
    """The fixed tree over several parts, at least two; what is in send stays as it is, and the target until all of
    ``before`` are complete."""
    left = len(parts) - 1

    def combine(one: Part, other: Part) -> Part:
        nonlocal left
        left -= 1
        mine = one if other.region.buffer == "send" else other
        into = mine.region if left else target
        after = [*one.after, *other.after, *([] if left else before)]
        return Part(into, [b.reduce(one.region, other.region, into, after=after)])

    return fixed_tree(parts, combine)


OUTER = Parameter(
    "outer",
    "recursive_doubling",
    ("recursive_doubling", "rabenseifner", "ring"),
    "between nodes",
)


def _order_on_nodes(topology: Topology, params: Params) -> Order:
    """What comes of the fixed tree in each node, and one over the nodes."""
    if params["outer"] == "ring" and len(topology.nodes) > 1:
        return Order.ANY
    nodes: list[Tree] = [fixed_tree(list[Tree](ranks), _pair) for ranks in topology.nodes]
    whole = fixed_tree(nodes, _pair)
    if whole == fixed_tree(list[Tree](range(topology.size)), _pair):
        return Order.FIXED
    return Order.RANK if list(_leaves(whole)) == list(range(topology.size)) else Order.ANY


def _pair(left: Tree, right: Tree) -> Tree:
    return left, right


def _leaves(tree: Tree) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        yield from _leaves(tree[0])
        yield from _leaves(tree[1])


@register(
    ALLREDUCE,
    OUTER,
    in_place=True,
    order=_order_on_nodes,
    auto=tuple({"outer": outer} for outer in OUTER.choices),
)
def hierarchical_allreduce(topology: Topology, rank: int, *, outer: str) -> Schedule:
    """Each lane combines its share of its node's vectors, in shared memory, and exchanges it between nodes.

    Contract: allreduce; by the fixed tree in each node, and (but for a ring) over the nodes;
    as many shares as the smallest node has lanes, each of as many blocks as ``outer`` needs.

        node 0: 0 1 2   | all write their vectors, raise a flag; lane 0, 1, 2 combine thirds;
                | | |   | 0 <-> 3, 1 <-> 4, 2 <-> 5; the thirds go to the shared buffer,
        node 1: 3 4 5   | a flag, all copy those of the others

    Lanes beyond the shares only write and copy.
    Counts (N = 2**k equal nodes of m, outer=recursive_doubling): messages = log2(N);
        network_messages = log2(N); network_blocks = log2(N); shared = m*(m+1) if m > 1 else 0
    Constraints: none.
    Reference: Jain et al. 2018 (shared memory); Bienz, Olson, Gropp 2019 (lanes).
    """
    own, shares = topology.node(rank), min(topology.node_sizes)
    nodes, lane = len(topology.nodes), topology.lane_of[rank]
    each = {"ring": nodes, "rabenseifner": 1 << nodes.bit_length() - 1}.get(outer, 1)
    b = Builder(rank, blocks=shares * each)
    whole, mine = range(b.blocks), range(lane * each, (lane + 1) * each)
    if max(topology.node_sizes) > 1:  # a rank alone on its node asks for one, too
        slots, result = b.shared(len(own) * b.blocks), b.shared(b.blocks)
    if len(own) > 1:
        written = b.copy(SEND[whole], slots[lane * b.blocks : (lane + 1) * b.blocks].of(whole))
        ready = [b.signal(ARRIVED, after=[written])]
        if lane < shares:
            here = [b.wait(own, ARRIVED, after=ready)]
            parts = [Part(slots[[at * b.blocks + i for i in mine]].of(mine), here) for at in range(len(own))]
            part = over_tree(b, parts, RECV[mine])
    else:
        part = Part(SEND[mine], [])
    if lane < shares:
        part = _between(b, topology, part, mine, outer)
        if len(own) > 1:
            out = b.copy(RECV[mine], result[mine].of(mine), after=part.after)
            ready = [b.signal(DONE, after=[out])]
    if len(own) > 1:
        there = [b.wait([own[peer]], DONE, after=ready) for peer in range(shares) if peer != lane]
        others = [block for block in whole if block not in mine or lane >= shares]
        if others:
            b.copy(result[others].of(others), RECV[others], after=[*ready, *there])
    return in_order(b.build())


def _between(b: Builder, topology: Topology, part: Part, mine: range, outer: str) -> Part:
    """A share, exchanged with the same lane of all other nodes."""
    ranks = [node[topology.lane_of[b.rank]] for node in topology.nodes]
    if len(ranks) == 1:
        if part.region.buffer == "send":
            return Part(RECV[mine], [b.copy(part.region, RECV[mine], after=part.after)])
        return part
    if outer == "ring":
        return _around(b, ranks, part, RECV, mine, b.scratch(1), 0)
    line = Line.of(ranks, b.rank)
    if outer == "rabenseifner":
        spare = b.scratch(line.width if line.pairs else line.width // 2)
        return _halving(b, line, part, RECV, mine, spare, 0)
    return _doubling(b, line, part, RECV[mine], b.scratch(1), 0)
