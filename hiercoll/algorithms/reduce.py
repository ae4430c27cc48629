"""Reductions to one rank, and reductions whose result is scattered."""

from __future__ import annotations

from hiercoll.algorithms.reducing import (
    Line,
    Part,
    at_once,
    combined,
    folded,
    halved_to_one,
    in_turns,
    over_tree,
    to_one,
)
from hiercoll.algorithms.registry import grid, register, segments_parameter
from hiercoll.collectives import REDUCE, REDUCE_SCATTER, Order
from hiercoll.schedule import RECV, SEND, Builder, Schedule, in_order
from hiercoll.topology import Topology

SEGMENTS = segments_parameter(1, "parts of the vector, for pipelining", 1, 3)


@register(REDUCE, SEGMENTS, order=Order.FIXED, auto=({},), search=lambda topology: grid(segments=(2, 4, 8)))
def binomial_reduce(topology: Topology, rank: int, *, root: int, segments: int) -> Schedule:
    """Along a binomial tree to rank 0, and from there to the root.

    Contract: reduce in the fixed order; the vector is one block.

        node 0: 0 1 2   | p=6: 1 -> 0, 3 -> 2;  2 -> 0, 5 -> 4;  4 -> 0;  0 -> root
        node 1: 3 4 5   |

    More ranks than a power of two: the first ones are combined in pairs before. Operands are in
    the order of ranks, so that the tree cannot begin at another root.
    Counts (root; p a power of two): messages = 0; blocks = 0
    Constraints: none.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4.4.
    """
    b, line = Builder(rank, segments), Line.of(range(topology.size), rank)
    spare, own = b.scratch(1)[0].of(0), b.scratch(1)[0].of(0)
    target, tags = RECV[0] if rank == root else own, topology.size.bit_length() + 2
    if topology.size == 1:
        b.copy(SEND[0], RECV[0])
    else:
        in_turns(b, lambda number: to_one(b, line, Part(SEND[0], []), root, target, spare, number * tags))
    return in_order(b.build())


@register(REDUCE, order=Order.FIXED, auto=({},))
def rabenseifner_reduce(topology: Topology, rank: int, *, root: int) -> Schedule:
    """Recursive halving, so that every rank has a part of the result, then a gather of the parts.

    Contract: reduce in the fixed order; as many blocks as the largest power of two <= p.

        node 0: 0 1 2   | p=6, in pairs 1 -> 0, 3 -> 2; halves: 0 <-> 2, 4 <-> 5; quarters: 0 <-> 4,
        node 1: 3 4 5   |      2 <-> 5; to root 0: 4 -> 0, 5 -> 2;  2 -> 0

    Counts (root; p a power of two): messages = log2(p); blocks = p-1; scratch = 2*p if p > 1 else 0
    Constraints: none.
    Reference: Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005, section 4.4.
    """
    p = topology.size
    line = Line.of(range(p), rank)
    b, whole = Builder(rank, blocks=line.width), range(line.width)
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    spare, own = b.scratch(line.width), b.scratch(line.width)
    target = RECV if rank == root else own
    at_once(halved_to_one(b, line, Part(SEND[whole], []), root, target, whole, spare, 0))
    return in_order(b.build())


@register(REDUCE_SCATTER, in_place=True, order=Order.FIXED, auto=({},))
def direct_reduce_scatter(topology: Topology, rank: int) -> Schedule:
    """Every rank gets its block of all ranks, and combines them.

    Contract: reduce_scatter in the fixed order.

        node 0: 0 1 2   | every rank -> every other: the block that is the other's
                |X|X|   |
        node 1: 3 4 5   |

    Counts: messages = p-1; blocks = p-1; scratch = p-1
    Constraints: none.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4.3 (pairwise exchange); operands kept for the fixed tree.
    """
    b, p = Builder(rank), topology.size
    spare, others = b.scratch(p - 1), [(rank + step) % p for step in range(1, p)]
    parts = {rank: Part(SEND[rank], [])}
    for slot, peer in enumerate(others):
        parts[peer] = Part(spare[slot].of(rank), [b.recv(peer, spare[slot].of(rank), partial=False)])
    sent = {peer: b.send(peer, SEND[peer], partial=False) for peer in others}
    if p == 1:
        b.copy(SEND[0], RECV[0])
    else:  # in place, block 0 lies where the result comes to lie
        over_tree(b, [parts[each] for each in range(p)], RECV[0], [sent[0]] if rank else [])
    return in_order(b.build())


@register(REDUCE_SCATTER, order=lambda topology, params: Order.FIXED if topology.size < 3 else Order.ANY, auto=({},))
def pairwise_reduce_scatter(topology: Topology, rank: int) -> Schedule:
    """In step k, rank i gets its block from rank i-k, and adds it.

    Contract: reduce_scatter in any order.

        node 0: 0 1 2   | k = 1: 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 0;  k = 2: 0 -> 2, 1 -> 3, ...
        node 1: 3 4 5   |

    Counts: messages = p-1; blocks = p-1; scratch = 1 if p > 1 else 0
    Constraints: none. Not in place.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4.3.
    """
    b, p = Builder(rank), topology.size
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    spare, part = b.scratch(1)[0].of(rank), Part(SEND[rank], [])
    for step in range(1, p):
        out, into = (rank + step) % p, (rank - step) % p
        came = [
            b.recv(into, spare, after=part.after, partial=False),
            b.send(out, SEND[out], after=part.after, partial=False),
        ]
        part = combined(b, part, spare, came, RECV[0], is_first=into < rank)
    return in_order(b.build())


@register(REDUCE_SCATTER, auto=({},))
def ring_reduce_scatter(topology: Topology, rank: int) -> Schedule:
    """Sums of blocks go around a ring, and end where they are due.

    Contract: reduce_scatter in any order (block c is combined in the cyclic order that starts behind rank c).

        node 0: 0 -> 1 -> 2
                ^         v     p-1 steps adding own blocks
        node 1: 5 <- 4 <- 3

    Counts: messages = p-1; blocks = p-1; scratch = 2 if p > 1 else 0
    Constraints: none. Not in place.
    Reference: Patarasuk, Yuan 2009.
    """
    b, p = Builder(rank), topology.size
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    came, own = b.scratch(1)[0], b.scratch(1)[0]
    part = Part(SEND[(rank - 1) % p], [])
    for step in range(p - 1):
        into = (rank - 2 - step) % p
        after = [
            b.recv((rank - 1) % p, came.of(into), tag=step, after=part.after, partial=step > 0),
            b.send((rank + 1) % p, part.region, tag=step, after=part.after, partial=step > 0),
        ]
        target = own.of(into) if step < p - 2 else RECV[0]
        part = Part(target, [b.reduce(came.of(into), SEND[into], target, after=after)])
    return in_order(b.build())


@register(REDUCE_SCATTER, order=Order.FIXED, auto=({},))
def recursive_halving_reduce_scatter(topology: Topology, rank: int) -> Schedule:
    """Ranks 1, 2, 4, ... apart exchange the half of the blocks that is for the other's side.

    Contract: reduce_scatter in the fixed order.

        node 0: 0 1 2   | p=6, in pairs 1 -> 0, 3 -> 2;  0 <-> 2, 4 <-> 5: every other block of
        node 1: 3 4 5   |      those of the pairs;  0 <-> 4, 2 <-> 5;  0 -> 1, 2 -> 3

    Counts (p a power of two): messages = log2(p); blocks = p-1
    Constraints: none. Not in place.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4.3.
    """
    b, p = Builder(rank), topology.size
    line = Line.of(range(p), rank)
    place_of = [block // 2 if block < 2 * line.pairs else block - line.pairs for block in range(p)]
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    spare, own = b.scratch(p), b.scratch(p)
    whole = range(p)
    takes_part, part = at_once(folded(b, line, Part(SEND[whole], []), own[whole].of(whole), spare[whole].of(whole), 0))
    if not takes_part:
        b.recv(line.rank(line.place), RECV[0], tag=0, after=part.after, partial=False)
        return in_order(b.build())
    kept, after, buffer = list(whole), part.after, SEND if part.region.buffer == "send" else own
    for step, distance in enumerate(line.distances(), 1):
        peer, side = line.rank(line.place ^ distance), line.place & distance
        given = [block for block in kept if place_of[block] & distance != side]
        kept = [block for block in kept if place_of[block] & distance == side]
        into = spare[kept].of(kept)
        out = buffer[given] if buffer is SEND else own[given].of(given)
        mine = buffer[kept] if buffer is SEND else own[kept].of(kept)
        came = [b.recv(peer, into, tag=step, after=after), b.send(peer, out, tag=step, after=after)]
        last = distance == line.distances()[-1] and line.partner is None
        target = RECV[0] if last else own[kept].of(kept)
        after, buffer = combined(b, Part(mine, after), into, came, target, is_first=bool(side)).after, own
    if line.partner is not None:
        b.copy(own[rank].of(rank), RECV[0], after=after)
        b.send(line.partner, own[rank + 1].of(rank + 1), tag=0, after=after, partial=False)
    return in_order(b.build())
