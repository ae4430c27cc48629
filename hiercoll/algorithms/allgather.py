"""Allgather algorithms that know at most the order of ranks along the nodes."""

from __future__ import annotations

from hiercoll.algorithms.registry import Parameter, grid, register, segments_parameter, window_parameter
from hiercoll.collectives import ALLGATHER
from hiercoll.schedule import RECV, SEND, Builder, Schedule
from hiercoll.topology import Topology


@register(
    ALLGATHER,
    window_parameter(32, "messages outstanding per rank, each way", 1, 4, 32),
    in_place=True,
    auto=({},),
)
def direct(topology: Topology, rank: int, *, window: int) -> Schedule:
    """Every rank sends its block straight to every other, ``window`` messages at a time.

    Contract: allgather, in place too.

        node 0: 0 1 2   | round 1 (window 2): 0 -> 1, 0 -> 2;  1 -> 2, 1 -> 3; ..
        node 1: 3 4 5   | round 2:            0 -> 3, 0 -> 4;  1 -> 4, 1 -> 5; ..

    Counts: rounds = ceil((p-1)/window); messages = p-1; blocks = p-1;
        network_messages = p-m; scratch = 0
    Constraints: none.
    Reference: the paper's Table I (Direct).
    """
    p, b = topology.size, Builder(rank)
    for first in range(0, p, window):
        with b.round():
            if first == 0:
                b.copy(SEND[0], RECV[rank])
            for distance in range(first + 1, min(first + window, p - 1) + 1):
                source = (rank - distance) % p
                b.recv(source, RECV[source])
                b.send((rank + distance) % p, SEND[0])
    return b.build()


@register(ALLGATHER, in_place=True, auto=({},))
def bruck_allgather(topology: Topology, rank: int) -> Schedule:
    """The blocks held double in each round, for any number of ranks.

    Contract: allgather, in place too. Blocks land where they belong, in regions that
    wrap around the end of recv, so nothing is rotated and no scratch is used.

        node 0: 0 1 2   | round 1: r -> r-1, 1 block;   round 2: r -> r-2, 2 blocks
        node 1: 3 4 5   | round 3: r -> r-4, 2 blocks

    Counts: rounds = ceil(log2(p)); messages = ceil(log2(p)); blocks = p-1; scratch = 0
    Constraints: none.
    Reference: Bruck et al. 1997 (concatenation).
    """
    p, b = topology.size, Builder(rank)
    with b.round():
        b.copy(SEND[0], RECV[rank])
        if p > 1:
            b.recv((rank + 1) % p, RECV[(rank + 1) % p])
            b.send((rank - 1) % p, SEND[0])
    have = 2
    while have < p:
        count = min(have, p - have)
        with b.round():
            b.recv((rank + have) % p, RECV[[(rank + have + i) % p for i in range(count)]])
            b.send((rank - have) % p, RECV[[(rank + i) % p for i in range(count)]])
        have += count
    return b.build()


@register(ALLGATHER, in_place=True, auto=({},))
def recursive_doubling(topology: Topology, rank: int) -> Schedule:
    """Partners 1, 2, 4, .. apart exchange all that they hold.

    Contract: allgather, in place too. With q the largest power of two <= p, rank
    r >= q gives its block to r - q before, and receives the others from it after.

        node 0: 0 1 2   | before: 4 -> 0, 5 -> 1;  step 0: 0 <-> 1, 2 <-> 3
        node 1: 3 4 5   | step 1: 0 <-> 2, 1 <-> 3;  after: 0 -> 4, 1 -> 5

    Counts (p a power of two): rounds = log2(p); messages = log2(p); blocks = p-1; scratch = 0
    Constraints: none (the steps themselves need a power of two).
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4.1.
    """
    b = Builder(rank)
    with b.round():
        b.copy(SEND[0], RECV[rank])
    for peer, sends, receives in doubling_steps(topology.size, rank):
        with b.round():
            if receives:
                b.recv(peer, RECV[receives])
            if sends:
                b.send(peer, RECV[sends])
    return b.build()


def doubling_steps(n: int, me: int) -> list[tuple[int, list[int], list[int]]]:
    """Recursive doubling among any number n: (peer, whose blocks go out, whose come in) by step."""
    q = 1 << (n.bit_length() - 1)
    others = [x for x in range(n) if x != me]
    if me >= q:
        return [(me - q, [me], []), (me - q, [], others)]
    steps: list[tuple[int, list[int], list[int]]] = [(me + q, [], [me + q])] if me + q < n else []
    for bit in (1 << k for k in range(q.bit_length() - 1)):
        ours, theirs = ([x for x in range(n) if (x % q ^ y) < bit] for y in (me, me ^ bit))
        steps.append((me ^ bit, ours, theirs))
    return [*steps, (me + q, [x for x in range(n) if x != me + q], [])] if me + q < n else steps


def node_order(topology: Topology) -> list[int]:
    """All ranks, node after node: the ring that crosses each node boundary once."""
    return [rank for ranks in topology.nodes for rank in ranks]


@register(
    ALLGATHER,
    segments_parameter(1, "parts of a block, for pipelining", 1, 3),
    in_place=True,
    auto=({},),
    search=lambda topology: grid(segments=(2, 4)),
)
def ring(topology: Topology, rank: int, *, segments: int) -> Schedule:
    """Blocks travel around a ring of ranks, one hop per step.

    Contract: allgather, in place too. The ring goes node by node whatever the
    placement, so a block enters each other node once.

        node 0: 0 -> 1 -> 2
                ^         v     each step: the block received last goes on
        node 1: 5 <- 4 <- 3

    A block's segment is passed on as soon as it is there; receives are posted early.
    Counts: rounds = p-1; messages = (p-1)*segments; blocks = p-1; scratch = 0
    Constraints: none.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4.1.
    """
    p, b = topology.size, Builder(rank, segments)
    order = node_order(topology)
    me = order.index(rank)
    before, behind = order[me - 1], order[(me + 1) % p]
    b.copy(SEND[0], RECV[rank])
    arrived: dict[tuple[int, int], int] = {}
    for step in range(1, p):
        for part in range(segments):
            tag, region = (step - 1) * segments + part, RECV[order[me - step]]
            arrived[step, part] = b.recv(before, region.segment(part) if segments > 1 else region, tag=tag)
    for step in range(1, p):
        for part in range(segments):
            tag, region = (step - 1) * segments + part, RECV[order[me - step + 1]] if step > 1 else SEND[0]
            after = [arrived[step - 1, part]] if step > 1 else []
            b.send(behind, region.segment(part) if segments > 1 else region, tag=tag, after=after)
    return b.build()


def _in_groups(topology: Topology, params: dict[str, int | str]) -> str | None:
    return "a number of ranks that radix divides" if topology.size % int(params["radix"]) else None


@register(
    ALLGATHER,
    Parameter("radix", 2, (2, 3, 4), "ranks in a group", 1),
    constraint=_in_groups,
    in_place=True,
    search=lambda topology: grid(radix=(2, 4, 8)),
)
def k_ring(topology: Topology, rank: int, *, radix: int) -> Schedule:
    """Rings of ``radix`` neighbours; from ring to ring each block passes to the same place of the next one.

    Contract: allgather, in place too. Positions are along the nodes, as for ring: with as
    many ranks in a group as on a node, only N-1 of p-1 steps are between nodes.

        node 0: 0 -> 1 -> 2 -> 0   | 2 steps around each node;  0 -> 3, 1 -> 4, 2 -> 5 and back;
        node 1: 3 -> 4 -> 5 -> 3   | 2 steps around each node

    Counts: rounds = p-1; messages = p-1; blocks = p-1; scratch = 0
    Constraints: a number of ranks that radix divides.
    Reference: Wilkins et al. 2023 (k-ring).
    """
    order, b = node_order(topology), Builder(rank)
    rings = [order[first : first + radix] for first in range(0, topology.size, radix)]
    mine, place = divmod(order.index(rank), radix)
    with b.round():
        b.copy(SEND[0], RECV[rank])
    before, own, behind = (rings[(mine + turn) % len(rings)] for turn in (-1, 0, 1))
    for far in range(len(rings)):
        moved, last = rings[mine - far], rings[(mine - far + 1) % len(rings)]  # whose blocks travel, and did so before
        steps = [(before[place], behind[place], moved[place], last[place])] if far else []
        for step in range(1, radix):
            ends = own[place - 1], own[(place + 1) % radix]
            steps.append((*ends, moved[place - step], moved[place - step + 1]))
        for tag, (source, target, received, sent) in enumerate(steps, start=far * radix):
            with b.round():
                b.recv(source, RECV[received], tag=tag)
                b.send(target, RECV[sent], tag=tag)
    return b.build()


def _even(topology: Topology, params: dict[str, int | str]) -> str | None:
    return "an even number of ranks" if topology.size % 2 else None


@register(ALLGATHER, constraint=_even, in_place=True)
def neighbor_exchange(topology: Topology, rank: int) -> Schedule:
    """Neighbours swap two blocks at a time, to the left and to the right in turn.

    Contract: allgather, in place too. Positions are along the nodes, as for ring.

        node 0: 0 1 2   | step 0: 0 <-> 1, 2 <-> 3, 4 <-> 5  (own block)
        node 1: 3 4 5   | step 1: 1 <-> 2, 3 <-> 4, 5 <-> 0  (two blocks); step 2 as 0

    Counts: rounds = p/2; messages = p/2; blocks = p-1; scratch = 0
    Constraints: an even number of ranks.
    Reference: Chen et al. 2005, as known from Open MPI's `coll/tuned`.
    """
    p, b = topology.size, Builder(rank)
    order = node_order(topology)
    me = order.index(rank)
    with b.round():
        b.copy(SEND[0], RECV[rank])
    for step in range(p // 2):
        turn = 1 if (me + step) % 2 == 0 else -1
        partner = order[(me + turn) % p]
        # A pair of blocks keeps its direction of travel, one hop per step.
        theirs = (me + step * turn) // 2 * 2 % p
        ours = (me - (step - 1) * turn) // 2 * 2 % p
        with b.round():
            if step == 0:
                b.recv(partner, RECV[partner])
                b.send(partner, RECV[rank])
            else:
                b.recv(partner, RECV[[order[theirs], order[theirs + 1]]], tag=step)
                b.send(partner, RECV[[order[ours], order[ours + 1]]], tag=step)
    return b.build()
