"""Swing and Bine: peers that lie less far apart, on a ring or a torus of links, than those of powers of two."""

from __future__ import annotations

from hiercoll.algorithms.bcast import parts_of
from hiercoll.algorithms.grouping import line_from
from hiercoll.algorithms.reducing import Part, combined
from hiercoll.algorithms.registry import Params, grid, register, segments_parameter
from hiercoll.collectives import ALLGATHER, ALLREDUCE, BCAST, REDUCE, REDUCE_SCATTER, Order
from hiercoll.schedule import RECV, SEND, Builder, Region, Schedule, in_order
from hiercoll.topology import Topology

SEGMENTS = segments_parameter(1, "parts of the vector, for pipelining", 1, 3)


def _is_uneven(topology: Topology, params: Params) -> str | None:
    return "a power of two of ranks" if topology.size & topology.size - 1 else None


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
    constraint=_is_uneven,
    in_place=True,
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
    Reference: De Sensi et al. 2024 (Swing), the variant that is optimal in bandwidth; in the other, which exchanges
        whole vectors, ranks combine by different trees, and get different bits.
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
        came = [b.recv(peer, RECV[given], tag=number, after=after, partial=False)]
        after = [*came, b.send(peer, RECV[kept], tag=number, after=after, partial=False)]
    return in_order(b.build())


@register(
    REDUCE_SCATTER,
    constraint=_is_uneven,
    order=lambda topology, params: Order.FIXED if topology.size <= 4 else Order.ANY,
    auto=({},),
)
def bine_reduce_scatter(topology: Topology, rank: int) -> Schedule:
    """As recursive_halving, with the distances of Swing: the first half of its allreduce.

    Contract: reduce_scatter in any order.

        node 0: 0 1 2 3   | 0 <-> 1, 2 <-> 3, 4 <-> 5, 6 <-> 7: four blocks each
        node 1: 4 5 6 7   | 1 <-> 2, 3 <-> 4, 5 <-> 6, 7 <-> 0: two;  0 <-> 3, 1 <-> 6, 2 <-> 5, 4 <-> 7: one

    Counts (p a power of two): messages = log2(p); blocks = p-1; scratch = p if p > 1 else 0
    Constraints: a power of two of ranks. Not in place.
    Reference: De Sensi et al. 2025 (Bine butterflies, distance-doubling).
    """
    p = topology.size
    b, after, slots = Builder(rank), list[int](), dict[int, int]()
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    spare, own = b.scratch(p // 2), b.scratch(p // 2)

    def held(blocks: list[int]) -> Region:
        return own[[slots[block] for block in blocks]].of(blocks) if slots else SEND[blocks]

    for step in range(p.bit_length() - 1):
        peer = swing_peer(rank, step) % p
        given, kept = _met(p, peer, step + 1), _met(p, rank, step + 1)
        into = spare[range(len(kept))].of(kept)
        came = [b.recv(peer, into, tag=step, after=after), b.send(peer, held(given), tag=step, after=after)]
        mine = held(kept)
        slots = slots or {block: slot for slot, block in enumerate(kept)}
        target = held(kept) if len(kept) > 1 else RECV[0]
        after = combined(b, Part(mine, after), into, came, target, is_first=peer < rank).after
    return in_order(b.build())


@register(ALLGATHER, constraint=_is_uneven, in_place=True, auto=({},))
def bine_allgather(topology: Topology, rank: int) -> Schedule:
    """As recursive_doubling, with the distances of Swing: the second half of its allreduce.

    Contract: allgather, in place too.

        node 0: 0 1 2 3   | 0 <-> 3, 1 <-> 6, 2 <-> 5, 4 <-> 7: one block each
        node 1: 4 5 6 7   | 1 <-> 2, 3 <-> 4, 5 <-> 6, 7 <-> 0: two;  0 <-> 1, 2 <-> 3, 4 <-> 5, 6 <-> 7: four

    Counts (p a power of two): rounds = log2(p); messages = log2(p); blocks = p-1; scratch = 0
    Constraints: a power of two of ranks.
    Reference: De Sensi et al. 2025 (Bine butterflies, distance-halving).
    """
    p, b = topology.size, Builder(rank)
    with b.round():
        b.copy(SEND[0], RECV[rank])
    for step in reversed(range(p.bit_length() - 1)):
        peer = swing_peer(rank, step) % p
        with b.round():
            b.recv(peer, RECV[_met(p, peer, step + 1)])
            b.send(peer, RECV[_met(p, rank, step + 1)])
    return b.build()


def _neighbours(p: int, me: int) -> list[tuple[int, bool]]:
    """Whom a place meets in a Bine tree from place 0, the farthest first, and whether it is below."""
    reached, found = {0}, list[tuple[int, bool]]()
    for step in reversed(range(p.bit_length() - 1)):
        peer = swing_peer(me, step) % p
        if me in reached or peer in reached:
            found.append((peer, me in reached))
        reached |= {swing_peer(each, step) % p for each in reached}
    return found


@register(BCAST, SEGMENTS, constraint=_is_uneven, auto=({},), search=lambda topology: grid(segments=(2, 4, 8)))
def bine_bcast(topology: Topology, rank: int, *, root: int, segments: int) -> Schedule:
    """A binomial tree in which the distances of Swing fall: less of it crosses between groups of neighbours.

    Contract: bcast; the vector is one block.

        node 0: 0 1 2 3   | 0 -> 3;  0 -> 7, 3 -> 4;  0 -> 1, 3 -> 2, 4 -> 5, 7 -> 6
        node 1: 4 5 6 7   | (ranks counted from the root)

    Counts (root; p a power of two): messages = log2(p)*segments; blocks = log2(p); scratch = 0
    Constraints: a power of two of ranks.
    Reference: De Sensi et al. 2025 (Bine trees, distance-halving).
    """
    p, b, line = topology.size, Builder(rank, segments), line_from(range(topology.size), root)
    met = _neighbours(p, line.index(rank))
    for tag in parts_of(b):
        here = list[int]()
        for peer, is_below in met:
            if is_below:
                b.send(line[peer], RECV[0], tag=tag, after=here)
            else:
                here = [b.recv(line[peer], RECV[0], tag=tag, after=[])]
    return in_order(b.build())


@register(
    REDUCE,
    SEGMENTS,
    constraint=_is_uneven,
    order=lambda topology, params: Order.FIXED if topology.size == 2 else Order.ANY,
    auto=({},),
    search=lambda topology: grid(segments=(2, 4, 8)),
)
def bine_reduce(topology: Topology, rank: int, *, root: int, segments: int) -> Schedule:
    """Up a binomial tree in which the distances of Swing grow: less of it crosses between groups of neighbours.

    Contract: reduce in any order; the vector is one block.

        node 0: 0 1 2 3   | 1 -> 0, 2 -> 3, 5 -> 4, 6 -> 7;  7 -> 0, 4 -> 3;  3 -> 0
        node 1: 4 5 6 7   | (ranks counted from the root)

    Counts (root; p a power of two): messages = 0; blocks = 0; scratch = 1 if p > 1 else 0
    Constraints: a power of two of ranks.
    Reference: De Sensi et al. 2025 (Bine trees, distance-halving).
    """
    p, b, line = topology.size, Builder(rank, segments), line_from(range(topology.size), root)
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    spare, target = b.scratch(1)[0].of(0), RECV[0] if rank == root else b.scratch(1)[0].of(0)
    met = _neighbours(p, line.index(rank))
    for tag in parts_of(b):
        part = Part(SEND[0], [])
        for peer, is_below in reversed(met):
            if is_below:
                came = [b.recv(line[peer], spare, tag=tag, after=part.after)]
                part = combined(b, part, spare, came, target, is_first=line[peer] < rank)
            else:
                b.send(line[peer], part.region, tag=tag, after=part.after)
    return in_order(b.build())
