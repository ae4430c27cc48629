"""Collectives with reductions and roots, written against the same model and contracts."""

from __future__ import annotations

from hiercoll.algorithms.registry import Parameter, register
from hiercoll.collectives import ALLREDUCE, BCAST
from hiercoll.schedule import RECV, SEND, Builder, Schedule
from hiercoll.topology import Topology


@register(ALLREDUCE)
def ring_allreduce(topology: Topology, rank: int) -> Schedule:
    """Reduce-scatter around a ring, then allgather around it; vectors of p blocks.

    Contract: allreduce, commutative operations only (block c is combined in the cyclic
    order that starts behind rank c).

        node 0: 0 -> 1 -> 2
                ^         v     p-1 steps adding own blocks, p-1 steps passing sums on
        node 1: 5 <- 4 <- 3

    Counts: rounds = 2*(p-1); messages = 2*(p-1); blocks = 2*(p-1); scratch = 1 if p > 1 else 0
    Constraints: none. Not in place.
    Reference: Thakur, Rabenseifner, Gropp 2005; Patarasuk, Yuan 2009.
    """
    p, b = topology.size, Builder(rank, blocks=topology.size)
    before, behind = (rank - 1) % p, (rank + 1) % p
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    partial = b.scratch(1)[0]
    for step in range(p - 1):
        out, into = (rank - step) % p, (rank - step - 1) % p
        with b.round():
            b.recv(before, partial, tag=step)
            b.send(behind, SEND[out] if step == 0 else RECV[out], tag=step)
        with b.round():
            b.reduce(partial, SEND[into], RECV[into])
    for step in range(p - 1):
        out, into = (rank + 1 - step) % p, (rank - step) % p
        with b.round():
            b.recv(before, RECV[into], tag=p + step)
            b.send(behind, RECV[out], tag=p + step)
    return b.build()


@register(BCAST, Parameter("segments", 1, (1, 3), "parts of a block, for pipelining", 1))
def binomial(topology: Topology, rank: int, *, segments: int, root: int = 0) -> Schedule:
    """The ranks that have the block double in each round; one block.

    Contract: bcast.

        node 0: 0 1 2   | 0 -> 4;  0 -> 2, 4 -> (6);  0 -> 1, 2 -> 3, 4 -> 5
        node 1: 3 4 5   | (ranks counted from the root)

    A segment is passed on as soon as it is there.
    Counts (root; p a power of two): messages = log2(p)*segments; blocks = log2(p); scratch = 0
    Constraints: none. Not in place.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 5.
    """
    p, b = topology.size, Builder(rank, segments)
    me = (rank - root) % p
    lowest = me & -me if me else 1 << (p - 1).bit_length()
    parts = [None] if segments == 1 else list(range(segments))
    if me == 0:
        b.copy(SEND[0], RECV[0])
    source = SEND[0] if me == 0 else RECV[0]
    for tag, part in enumerate(parts):
        region = source._replace(part=part)
        after = [b.recv((me - lowest + root) % p, region, tag=tag)] if me else []
        bit = lowest >> 1
        while bit:
            if me + bit < p:
                b.send((me + bit + root) % p, region, tag=tag, after=after)
            bit >>= 1
    return b.build()
