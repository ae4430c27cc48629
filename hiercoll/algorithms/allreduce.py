"""Allreduces: around a ring, by doubling, by halving and doubling, from all to all, and for nodes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias, TypeVar

from hiercoll.algorithms.grouping import ARRIVED, DONE
from hiercoll.algorithms.registry import Parameter, Params, grid, register
from hiercoll.collectives import ALLREDUCE, Order, fixed_tree
from hiercoll.schedule import RECV, SEND, Buffer, Builder, Region, Schedule, in_order
from hiercoll.topology import Topology

Tree: TypeAlias = "int | tuple[Tree, Tree]"
END = object()


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


# What takes several steps is a generator: it yields where it has begun messages that it waits for next, so that other
# segments can begin theirs.
Made = TypeVar("Made")
Course: TypeAlias = "Generator[None, None, Made]"


def at_once(course: Course[Made]) -> Made:
    """All steps, one after the other; what they come to."""
    while True:
        try:
            next(course)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def idle(steps: int) -> Course[None]:
    """Ranks that have nothing to do keep step: else segments of one would wait for other ones of the next."""
    for _ in range(steps):
        yield


def in_turns(b: Builder, course: Callable[[int], Course[object]]) -> None:
    """The steps of each segment, those of all segments in turns."""
    left = {number: course(number) for number in range(b.segments)}
    while left:
        for number in list(left):
            with _segment(b, number):
                if next(left[number], END) is END:
                    del left[number]


def _segment(b: Builder, number: int) -> AbstractContextManager[object]:
    return b.segment(number) if b.segments > 1 else nullcontext()


def combined(b: Builder, own: Part, other: Region, came: list[int], target: Region, is_first: bool) -> Part:
    """``own`` and what has come, of lower ranks if it ``is_first``, as a new partial result."""
    left, right = (other, own.region) if is_first else (own.region, other)
    return Part(target, [b.reduce(left, right, target, after=[*own.after, *came])])


def folded(b: Builder, line: Line, own: Part, target: Region, spare: Region, tag: int) -> Course[tuple[bool, Part]]:
    """Whether this rank takes part in the steps, and what it begins with, or has given to its partner."""
    partner = line.partner
    if partner is None:
        yield from idle(line.pairs > 0)
        return True, own
    if partner == b.rank:
        part = Part(own.region, [b.send(line.rank(line.place), own.region, tag=tag, after=own.after)])
        yield
        return False, part
    came = [b.recv(partner, spare, tag=tag, after=own.after)]
    yield
    return True, combined(b, own, spare, came, target, is_first=False)


def _unfolded(b: Builder, line: Line, takes_part: bool, part: Part, target: Region, tag: int) -> Part:
    """The result, which partners get from those that took part."""
    if not takes_part:
        return Part(target, [b.recv(line.rank(line.place), target, tag=tag, after=part.after)])
    if line.partner is not None:
        b.send(line.partner, target, tag=tag, after=part.after)
    return part


def _doubling(b: Builder, line: Line, own: Part, target: Region, spare: Buffer, tag: int) -> Course[Part]:
    """Whole partial results are exchanged, again and again; what comes lies in ``spare``."""
    into = spare[range(len(target.blocks))].of(target.blocks)
    takes_part, part = yield from folded(b, line, own, target, into, tag)
    yield from idle(0 if takes_part else len(line.distances()))
    for step, distance in enumerate(line.distances() if takes_part else [], tag + 1):
        peer = line.rank(line.place ^ distance)
        came = [b.recv(peer, into, tag=step, after=part.after), b.send(peer, part.region, tag=step, after=part.after)]
        yield
        part = combined(b, part, into, came, target, is_first=bool(line.place & distance))
    return _unfolded(b, line, takes_part, part, target, tag)


class Exchange(NamedTuple):
    """Of halves with a peer, in a step of so much: the blocks that this rank keeps, and those that the peer does."""

    peer: int
    distance: int
    kept: range
    given: range


def at(buffer: Buffer, blocks: range) -> Region:
    """Those blocks of the vector in the program's buffer, or in hiercoll's own."""
    return buffer[blocks] if buffer.name in ("send", "recv") else buffer[blocks].of(blocks)


def halved(
    b: Builder, line: Line, own: Part, target: Buffer, whole: range, spare: Buffer, tag: int
) -> Course[tuple[list[int], list[Exchange]]]:
    """Halves of partial results are exchanged, the nearest ranks first, until a rank has one block of the result.
    Blocks of ``whole`` are as many as ranks take part. Returns after what it is there, and the exchanges."""
    buffer = SEND if own.region.buffer == "send" else target
    part, after, steps = whole, own.after, list[Exchange]()
    for step, distance in enumerate(line.distances(), tag + 1):
        peer, half = line.rank(line.place ^ distance), len(part) // 2
        is_upper = bool(line.place & distance)
        kept, given = (part[half:], part[:half]) if is_upper else (part[:half], part[half:])
        into = spare[range(half)].of(kept)
        came = [b.recv(peer, into, tag=step, after=after), b.send(peer, at(buffer, given), tag=step, after=after)]
        yield
        after = combined(b, Part(at(buffer, kept), after), into, came, at(target, kept), is_upper).after
        steps.append(Exchange(peer, distance, kept, given))
        part, buffer = kept, target
    return after, steps


def _halving(b: Builder, line: Line, own: Part, target: Buffer, whole: range, spare: Buffer, tag: int) -> Course[Part]:
    """`halved`, and then what is complete is exchanged, the other way."""
    takes_part, begun = yield from folded(b, line, own, target[whole], spare[range(len(whole))].of(whole), tag)
    if not takes_part:
        yield from idle(2 * len(line.distances()))
        return _unfolded(b, line, False, begun, target[whole], tag)
    after, steps = yield from halved(b, line, begun, target, whole, spare, tag)
    for number, (peer, _, kept, given) in enumerate(reversed(steps), tag + len(steps) + 1):
        came = [b.recv(peer, target[given], tag=number, after=after)]
        after = [*came, b.send(peer, target[kept], tag=number, after=after)]
        yield
    return _unfolded(b, line, True, Part(target[whole], after), target[whole], tag)


def _around(
    b: Builder, ranks: Sequence[int], own: Part, target: Buffer, whole: range, spare: Buffer, tag: int
) -> Course[Part]:
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
        yield
        after = [b.reduce(partial, source[into], target[into], after=came)]
    for step in range(p - 1):
        out, into = share(me + 1 - step), share(me - step)
        after = [
            b.recv(before, target[into], tag=tag + p + step, after=after),
            b.send(behind, target[out], tag=tag + p + step, after=after),
        ]
        yield
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
        at_once(_around(b, range(p), Part(SEND[0:p], []), RECV, range(p), b.scratch(1), 0))
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
        at_once(_doubling(b, Line.of(range(p), rank), Part(SEND[0], []), RECV[0], b.scratch(1), 0))
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
        at_once(_halving(b, line, Part(SEND[whole], []), RECV, whole, spare, 0))
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
    if p == 1:
        b.copy(SEND[0], RECV[0])
    else:
        at_once(_all_to_all(b, range(p), Part(SEND[0:p], []), RECV, range(p), b.scratch(p - 1), 0))
    return in_order(b.build())


def _all_to_all(
    b: Builder, ranks: Sequence[int], own: Part, target: Buffer, whole: range, spare: Buffer, tag: int
) -> Course[Part]:
    """Every rank gets its block of all others, combines them by the fixed tree, and sends the result to all."""
    p, me = len(ranks), ranks.index(b.rank)
    source = SEND if own.region.buffer == "send" else target
    others = [(me + step) % p for step in range(1, p)]
    parts = {me: Part(source[whole[me]], own.after)}
    for slot, other in enumerate(others):
        into = spare[slot].of(whole[me])
        parts[other] = Part(into, [b.recv(ranks[other], into, tag=tag)])
    sent = {other: b.send(ranks[other], source[whole[other]], tag=tag, after=own.after) for other in others}
    yield
    result = over_tree(b, [parts[each] for each in range(p)], target[whole[me]])
    after = list(result.after)
    for other in others:
        after.append(b.send(ranks[other], target[whole[me]], tag=tag + 1, after=result.after))
        after.append(b.recv(ranks[other], target[whole[other]], tag=tag + 1, after=[sent[other]]))
    yield
    return Part(target[whole], after)


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


def swing_peer(place: int, step: int) -> int:
    """Whom Swing lets a rank meet: 1, 1, 3, 5, 11, ... ranks away, on alternate sides."""
    distance = (1 - int((-2) ** (step + 1))) // 3
    return place - distance if place % 2 else place + distance


def _met(p: int, place: int, step: int) -> list[int]:
    """Those that a rank is to reach from that step on, with itself."""
    peers = [swing_peer(place, later) % p for later in range(step, p.bit_length() - 1)]
    return sorted([place, *(each for later, peer in enumerate(peers, step + 1) for each in _met(p, peer, later))])


@register(
    ALLREDUCE,
    in_place=True,
    constraint=lambda topology, params: "a power of two of ranks" if topology.size & topology.size - 1 else None,
    order=lambda topology, params: Order.FIXED if topology.size <= 4 else Order.ANY,
    auto=({},),
)
def swing_allreduce(topology: Topology, rank: int) -> Schedule:
    """As rabenseifner, with peers whose distance on a ring, or a torus of links, grows more slowly.

    Contract: allreduce in any order; the vector is p blocks.

        node 0: 0 1 2 3   | 0 <-> 1, 2 <-> 3, 4 <-> 5, 6 <-> 7: four blocks each
        node 1: 4 5 6 7   | 1 <-> 2, 3 <-> 4, 5 <-> 6, 7 <-> 0: two;
                          | 0 <-> 3, 1 <-> 6, 2 <-> 5, 4 <-> 7: one; and back

    A rank gives a peer the blocks of those that the peer is still to reach.
    Counts (p a power of two): messages = 2*log2(p); blocks = 2*(p-1); scratch = p//2
    Constraints: a power of two of ranks.
    Reference: De Sensi et al. 2024 (Swing), the variant that is optimal in bandwidth.
    """
    p = topology.size
    b, after, buffer = Builder(rank, blocks=p), list[int](), SEND
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    spare, steps = b.scratch(p // 2), list[tuple[int, list[int], list[int]]]()
    for step in range(p.bit_length() - 1):
        peer = swing_peer(rank, step) % p
        given, kept = _met(p, peer, step + 1), _met(p, rank, step + 1)
        into = spare[range(len(kept))].of(kept)
        came = [b.recv(peer, into, tag=step, after=after), b.send(peer, buffer[given], tag=step, after=after)]
        after = combined(b, Part(buffer[kept], after), into, came, RECV[kept], is_first=peer < rank).after
        steps.append((peer, given, kept))
        buffer = RECV
    for number, (peer, given, kept) in enumerate(reversed(steps), len(steps)):
        came = [b.recv(peer, RECV[given], tag=number, after=after)]
        after = [*came, b.send(peer, RECV[kept], tag=number, after=after)]
    return in_order(b.build())


class Branch(NamedTuple):
    """Where a place is in a binary tree: who is above, who is below on either side, and the tree's height."""

    above: int | None
    below: list[int]
    height: int


def in_order_tree(n: int, place: int) -> Branch:
    """A binary tree over ``n`` places in which those to the left of a place are before it, those to the right behind;
    every other place, from the first on, is a leaf."""
    low, size, above = 0, n, None
    while True:
        top = low + (1 << size.bit_length() - 1) - 1
        left, right = (low, top - low), (top + 1, low + size - top - 1)
        if place == top:
            below = [first + (1 << many.bit_length() - 1) - 1 for first, many in (left, right) if many]
            return Branch(above, below, n.bit_length())
        above, (low, size) = top, left if place < top else right


@register(
    ALLREDUCE,
    Parameter("segments", 8, (8, 1, 3), "parts of each half of the vector, for pipelining", 1),
    in_place=True,
    order=lambda topology, params: Order.ANY if topology.size % 2 else Order.RANK if topology.size > 2 else Order.FIXED,
    auto=({}, {"segments": 32}),
    search=lambda topology: grid(segments=(2, 4, 16, 32, 64)),
)
def double_tree_allreduce(topology: Topology, rank: int, *, segments: int) -> Schedule:
    """Two binary trees, each for half of the vector, up and down; who is a leaf in one has others below in the other.

    Contract: allreduce, by ranks in their order if they are even in number, else in any order.

        node 0: 0 1 2   | one half:             0 -> 1 <- 2,  4 -> 5;  1 -> 3 <- 5;  and down again
        node 1: 3 4 5   | the other, mirrored:  5 -> 4 <- 3,  1 -> 0;  4 -> 2 <- 0;  and down again

    Of an odd number of ranks the other tree's are shifted by one instead.
    Segments follow each other, up and then down. Every rank sends and receives each half twice at most.
    Counts (any number of ranks): scratch = 4 if p > 1 else 0
    Constraints: none.
    Reference: Sanders, Speck, Träff 2009 (two-tree algorithm).
    """
    p, b = topology.size, Builder(rank, segments, blocks=2)
    if p == 1:
        b.copy(SEND[0:2], RECV[0:2])
        return b.build()
    spare, trees = b.scratch(4), [_TreeHalf.of(b, half, p) for half in range(2)]
    height = trees[0].branch.height
    for step in range(segments + height):
        for tree in trees:
            if step < segments:
                tree.up(b, step, [spare[2 * tree.half + side].of(tree.half) for side in range(2)])
            if step >= height:
                tree.down(b, step - height)
    return in_order(b.build())


class _TreeHalf(NamedTuple):
    """One of the two trees, for one half of the vector; places in it, and back to ranks."""

    half: int
    branch: Branch
    place: int
    ranks: list[int]
    sums: list[list[int]]  # by segment, what completes the sum that is passed up, or the result

    @classmethod
    def of(cls, b: Builder, half: int, p: int) -> _TreeHalf:
        ranks = list(range(p)) if half == 0 else list(range(p))[::-1] if p % 2 == 0 else [*range(1, p), 0]
        place = ranks.index(b.rank)
        return cls(half, in_order_tree(p, place), place, ranks, [])

    def up(self, b: Builder, number: int, spare: Sequence[Region]) -> None:
        """Add what comes from below to the rank's own, in the order of ranks, and pass it on."""
        with _segment(b, number):
            part = Part(SEND[self.half], [])
            for below, into in sorted(zip((self.ranks[each] for each in self.branch.below), spare, strict=False)):
                came = [b.recv(below, into, tag=self._tag(b, number), after=[])]
                part = combined(b, part, into, came, RECV[self.half], is_first=below < b.rank)
            if self.branch.above is not None:
                above = self.ranks[self.branch.above]
                part.after.append(b.send(above, part.region, tag=self._tag(b, number), after=part.after))
            self.sums.append(part.after)

    def down(self, b: Builder, number: int) -> None:
        """Pass the result on."""
        tag = self._tag(b, b.segments + number)
        with _segment(b, number):
            here = self.sums[number]
            if self.branch.above is not None:
                here = [b.recv(self.ranks[self.branch.above], RECV[self.half], tag=tag, after=here)]
            for below in self.branch.below:
                b.send(self.ranks[below], RECV[self.half], tag=tag, after=here)

    def _tag(self, b: Builder, number: int) -> int:
        return 2 * number + self.half


OUTER = Parameter(
    "outer",
    "recursive_doubling",
    ("recursive_doubling", "rabenseifner", "all_pairs", "ring"),
    "between nodes",
)
SEGMENTS = Parameter("segments", 1, (1, 3), "parts of the vector, for pipelining", 1)


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
    SEGMENTS,
    in_place=True,
    together=tuple(grid(outer=("rabenseifner", "all_pairs"), segments=(3,))),
    order=_order_on_nodes,
    auto=tuple(grid(outer=OUTER.choices, segments=(1, 4))),
    search=lambda topology: grid(outer=("rabenseifner", "all_pairs"), segments=(2, 4, 16)),
)
def hierarchical_allreduce(topology: Topology, rank: int, *, outer: str, segments: int) -> Schedule:
    """Each lane combines its share of its node's vectors, in shared memory, and exchanges it between nodes.

    Contract: allreduce; by the fixed tree in each node, and (but for a ring) over the nodes;
    as many shares as the smallest node has lanes, each of as many blocks as ``outer`` needs.

        node 0: 0 1 2   | all write their vectors, raise a flag; lane 0, 1, 2 combine thirds;
                | | |   | 0 <-> 3, 1 <-> 4, 2 <-> 5; the thirds go to the shared buffer,
        node 1: 3 4 5   | a flag, all copy those of the others

    Lanes beyond the shares only write and copy. Segments do not wait for each other.
    Counts (N = 2**k equal nodes of m, outer=recursive_doubling): messages = log2(N)*segments;
        network_messages = log2(N)*segments; network_blocks = log2(N); shared = m*(m+1) if m > 1 else 0
    Constraints: none.
    Reference: Jain et al. 2018 (shared memory); Bienz, Olson, Gropp 2019 (lanes).
    """
    nodes, shares = len(topology.nodes), min(topology.node_sizes)
    each = {"ring": nodes, "all_pairs": nodes, "rabenseifner": 1 << nodes.bit_length() - 1}.get(outer, 1)
    b = Builder(rank, segments, blocks=shares * each)
    # A rank alone on its node asks for shared memory, too.
    shared = b.shared((len(topology.node(rank)) + 1) * b.blocks) if max(topology.node_sizes) > 1 else SEND
    spare = b.scratch({"ring": 1, "recursive_doubling": 1, "rabenseifner": each}.get(outer, nodes - 1))
    in_turns(b, lambda number: _on_nodes(b, topology, number, shares, outer, shared, spare))
    return in_order(b.build())


def _on_nodes(
    b: Builder, topology: Topology, number: int, shares: int, outer: str, shared: Buffer, spare: Buffer
) -> Course[None]:
    """The allreduce of a segment; in the node's buffer are the vectors of its ranks, and then the result."""
    own, lane, n = topology.node(b.rank), topology.lane_of[b.rank], b.blocks
    arrived, done, each = ARRIVED + 2 * number, DONE + 2 * number, n // shares
    whole, mine = range(n), range(lane * each, (lane + 1) * each)

    def slot(which: int, blocks: Sequence[int]) -> Region:
        return shared[[which * n + block for block in blocks]].of(blocks)

    if len(own) == 1:
        yield from _between(b, topology, Part(SEND[mine], []), mine, outer, spare, number)
        return
    ready = [b.signal(arrived, after=[b.copy(SEND[whole], slot(lane, whole))])]
    yield
    if lane < shares:
        here = [b.wait(own, arrived, after=ready)]
        part = over_tree(b, [Part(slot(peer, mine), here) for peer in range(len(own))], RECV[mine])
        part = yield from _between(b, topology, part, mine, outer, spare, number)
        ready = [b.signal(done, after=[b.copy(RECV[mine], slot(len(own), mine), after=part.after)])]
    yield
    there = [b.wait([own[peer]], done, after=ready) for peer in range(shares) if peer != lane]
    others = [block for block in whole if block not in mine or lane >= shares]
    if others:
        b.copy(slot(len(own), others), RECV[others], after=[*ready, *there])


def _between(
    b: Builder, topology: Topology, part: Part, mine: range, outer: str, spare: Buffer, number: int
) -> Course[Part]:
    """A share, exchanged with the same lane of all other nodes."""
    ranks = [node[topology.lane_of[b.rank]] for node in topology.nodes]
    tag = number * 2 * len(ranks)
    if len(ranks) == 1:
        if part.region.buffer == "send":
            return Part(RECV[mine], [b.copy(part.region, RECV[mine], after=part.after)])
        return part
    if outer == "ring":
        return (yield from _around(b, ranks, part, RECV, mine, spare, tag))
    if outer == "all_pairs":
        return (yield from _all_to_all(b, ranks, part, RECV, mine, spare, tag))
    line = Line.of(ranks, b.rank)
    if outer == "rabenseifner":
        return (yield from _halving(b, line, part, RECV, mine, spare, tag))
    return (yield from _doubling(b, line, part, RECV[mine], spare, tag))
