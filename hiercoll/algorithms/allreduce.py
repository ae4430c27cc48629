"""Allreduces: around a ring, by doubling, by halving and doubling, and from all to all."""

from __future__ import annotations

from typing import Any

from hiercoll.algorithms.reducing import Line, Part, all_to_all, around, at_once, doubling, halving, over_tree
from hiercoll.algorithms.registry import Parameter, Params, grid, register
from hiercoll.collectives import ALLREDUCE, Order
from hiercoll.schedule import RECV, SEND, Builder, Schedule, in_order
from hiercoll.topology import Topology


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
        at_once(around(b, range(p), Part(SEND[0:p], []), RECV, range(p), b.scratch(1), 0, partial=False))
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
        at_once(doubling(b, Line.of(range(p), rank), Part(SEND[0], []), RECV[0], b.scratch(1), 0))
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
        at_once(halving(b, line, Part(SEND[whole], []), RECV, whole, spare, 0))
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
        at_once(all_to_all(b, range(p), Part(SEND[0:p], []), RECV, range(p), b.scratch(p - 1), 0, partial=False))
    return in_order(b.build())


def factors(p: int, radix: int) -> list[int]:
    """Numbers of at most ``radix``, the largest first, whose product is ``p``; none where there are none."""
    found = list[int]()
    while p > 1:
        factor = max((each for each in range(2, radix + 1) if p % each == 0), default=0)
        if not factor:
            return []
        found.append(factor)
        p //= factor
    return found


def _lacks_factors(topology: Topology, params: Params) -> str | None:
    radix = int(params["radix"])
    if topology.size == 1 or factors(topology.size, radix):
        return None
    return f"a number of ranks without prime factors above radix={radix}"


@register(
    ALLREDUCE,
    Parameter("radix", 4, (4, 2, 3), "ranks that exchange in a step, at most", 2),
    constraint=_lacks_factors,
    in_place=True,
    order=lambda topology, params: Order.RANK if topology.size & topology.size - 1 else Order.FIXED,
    auto=({},),
    search=lambda topology: grid(radix=(8, 16)),
)
def recursive_multiplying_allreduce(topology: Topology, rank: int, *, radix: int) -> Schedule:
    """Groups of neighbours exchange all that they have, and combine it; then groups of such groups do.

    Contract: allreduce; in the fixed order for a power of two of ranks, else by ranks in their order; the vector is
    one block.

        node 0: 0 1 2   | p=6, groups of 3: 0 <-> 1 <-> 2 <-> 0,  3 <-> 4 <-> 5 <-> 3;
        node 1: 3 4 5   |      groups of 2: 0 <-> 3,  1 <-> 4,  2 <-> 5

    Counts (p a power of two): messages = 3*(log2(p)//2)+log2(p)%2; blocks = 3*(log2(p)//2)+log2(p)%2;
        scratch = min(p, 4)-1
    Constraints: p is a product of numbers of at most radix.
    Reference: Ruefenacht, Bull, Booth 2017 (recursive multiplying).
    """
    b, p, reach = Builder(rank), topology.size, 1
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    steps = factors(p, radix)
    spare, part = b.scratch(max(steps) - 1), Part(SEND[0], [])
    for tag, factor in enumerate(steps):
        first = rank - rank // reach % factor * reach
        others = [peer for peer in range(first, first + factor * reach, reach) if peer != rank]
        into = dict(zip(others, (spare[slot].of(0) for slot in range(len(others))), strict=True))
        how: Any = {"tag": tag, "after": part.after, "partial": tag > 0}
        came = {peer: Part(into[peer], [b.recv(peer, into[peer], **how)]) for peer in others}
        sent = [b.send(peer, part.region, **how) for peer in others]
        came[rank] = Part(part.region, [*part.after, *sent])
        part = over_tree(b, [came[peer] for peer in sorted(came)], RECV[0])
        reach *= factor
    return in_order(b.build())
