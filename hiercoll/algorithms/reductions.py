"""Collectives with reductions, as schedules that are proved by the same contracts."""

from __future__ import annotations

from hiercoll.algorithms.registry import register
from hiercoll.collectives import ALLREDUCE
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
