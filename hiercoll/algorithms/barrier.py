"""Barriers: allgathers of blocks without bytes, in which whoever has all blocks knows that all ranks have come."""

from __future__ import annotations

from collections.abc import Sequence

from hiercoll.algorithms.grouping import ARRIVED, WRITTEN
from hiercoll.algorithms.registry import Parameter, grid, register
from hiercoll.collectives import BARRIER
from hiercoll.schedule import RECV, SEND, Buffer, Builder, Schedule, in_order
from hiercoll.topology import Topology

RADIX = Parameter("radix", 2, (2, 3, 4), "of the rounds: everybody has heard of so many times more after each", 2)


@register(BARRIER, RADIX, auto=({}, {"radix": 4}), search=lambda topology: grid(radix=(2, 3, 4, 8)))
def dissemination(topology: Topology, rank: int, *, radix: int) -> Schedule:
    """Every rank tells the one 1, 2, 4, .. places on of all those that it has heard of.

    Contract: barrier.

        node 0: 0 1 2   | round 1: r -> r+1;   round 2: r -> r+2
        node 1: 3 4 5   | round 3: r -> r+4

    With a larger radix: fewer rounds, in which each rank tells radix-1 others.
    Counts: rounds = ceil(log2(p)); messages = ceil(log2(p)); blocks = p-1; scratch = 0
    Constraints: none.
    Reference: Hensgen, Finkel, Manber 1988; Hoefler et al. 2006 (n-way dissemination).
    """
    b = Builder(rank)
    with b.round():
        b.copy(SEND[0], RECV[rank])
    _disseminate(b, [(each,) for each in range(topology.size)], RECV, radix)
    return b.build()


def _disseminate(b: Builder, groups: Sequence[Sequence[int]], buffer: Buffer, radix: int) -> None:
    """Let the first rank of each group, of which this is one, hear of the blocks of all groups."""
    n, me = len(groups), [group[0] for group in groups].index(b.rank)
    heard = 1
    while heard < n:
        with b.round():
            for distance in range(heard, min(radix * heard, n), heard):
                source, target = (me - distance) % n, (me + distance) % n
                before = range(min(heard, n - distance))  # beyond that, blocks that the receiver has
                b.recv(groups[source][0], buffer[[rank for i in before for rank in groups[source - i]]])
                b.send(groups[target][0], buffer[[rank for i in before for rank in groups[me - i]]])
        heard *= radix


@register(BARRIER, RADIX, auto=({}, {"radix": 4}), search=lambda topology: grid(radix=(2, 3, 4, 8)))
def hierarchical(topology: Topology, rank: int, *, radix: int) -> Schedule:
    """Flags within the node, messages between the nodes' leaders alone.

    Contract: barrier.

        node 0: [0] 1 2   | 1, 2 raise flags, which 0 waits for;  4, 5 likewise, and 3
                 |        | 0 <=> 3, as in dissemination, of whole nodes
        node 1: [3] 4 5   | 0 and 3 raise a flag, which their nodes wait for

    What the node has to tell lies in one place on its way out, and in another on its way in: nobody overwrites what
    others still read, so no flag says that they are done.
    Counts (leader; N equal nodes of m): messages = ceil(log2(N)); network_messages = ceil(log2(N)); scratch = 0
    Constraints: none.
    Reference: Karonis et al. 2000 (multilevel barrier); flags in shared memory as in MPICH's release-gather.
    """
    b, node_ranks, lane = Builder(rank), topology.node(rank), topology.lane_of[rank]
    leader, others = node_ranks[0], node_ranks[1:]
    out, everything = b.shared(max(topology.node_sizes)), range(topology.size)
    into = b.shared(topology.size)
    b.gate([b.copy(SEND[0], out[lane])])
    if rank != leader:
        b.signal(WRITTEN)
        b.gate([b.wait([leader], ARRIVED)])
    else:
        b.gate([b.wait(others, WRITTEN)])
        b.gate([b.copy(out[0 : len(node_ranks)], into[node_ranks])])
        _disseminate(b, topology.nodes, into, radix)
        b.signal(ARRIVED)
    b.copy(into[everything], RECV[everything])
    return in_order(b.build())
