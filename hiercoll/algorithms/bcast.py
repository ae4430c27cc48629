"""Broadcasts: along a tree, by scatter and allgather, and for nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from hiercoll.algorithms.allgather import doubling_steps
from hiercoll.algorithms.grouping import ARRIVED, DONE, line_from, ranks_before
from hiercoll.algorithms.registry import Parameter, grid, register, segments_parameter
from hiercoll.collectives import BCAST
from hiercoll.schedule import RECV, Buffer, Builder, Schedule, in_order
from hiercoll.topology import Topology

SEGMENTS = segments_parameter(1, "parts of a block, for pipelining", 1, 3)
STEPS = ("ring", "recursive_doubling")

# Each of these takes a builder, a line of ranks that begins with the one that has everything, what all
# blocks lie in on this rank, the first tag, and what a receive must wait for; it returns what brings the blocks here.
Part: TypeAlias = "Callable[[Builder, Sequence[int], Buffer, int, list[int]], list[int]]"


def above(me: int, radix: int = 2) -> tuple[int, int]:
    """The position above ``me`` in a k-nomial tree, which is me with its lowest digit that is not 0 made 0, and the
    weight of that digit."""
    weight = 1
    while me // weight % radix == 0:
        weight *= radix
    return me - me // weight % radix * weight, weight


def _weights(n: int, me: int, radix: int) -> list[int]:
    """Of the digits in which those below ``me`` differ from it, the largest first."""
    limit = above(me, radix)[1] if me else n
    found = [1]
    while found[-1] < limit:
        found.append(found[-1] * radix)
    return found[-2::-1]


def branches(n: int, me: int, radix: int = 2) -> Iterator[int]:
    """Whom position ``me`` of ``n`` serves in a k-nomial tree, the largest subtrees first."""
    for weight in _weights(n, me, radix):
        yield from (peer for peer in range(me + weight, me + radix * weight, weight) if peer < n)


def subtree(n: int, me: int, radix: int = 2) -> range:
    """The positions below ``me`` in a k-nomial tree, with itself."""
    return range(me, min(me + above(me, radix)[1], n) if me else n)


def _along_tree(
    b: Builder, line: Sequence[int], buffer: Buffer, tag: int, after: list[int], radix: int = 2
) -> list[int]:
    """All blocks down a k-nomial tree."""
    n, me = len(line), line.index(b.rank)
    region = buffer[0 : b.blocks]
    here = [b.recv(line[above(me, radix)[0]], region, tag=tag, after=after)] if me else after
    for peer in branches(n, me, radix):
        b.send(line[peer], region, tag=tag, after=here)
    return here


def _scattered(steps: str) -> Part:
    """As many blocks as there are ranks down a binomial tree, to each rank those of its subtree, then an allgather in
    ``steps`` that leaves out what a rank has."""

    def part(b: Builder, line: Sequence[int], buffer: Buffer, tag: int, after: list[int]) -> list[int]:
        n, me = len(line), line.index(b.rank)
        here = [b.recv(line[above(me)[0]], buffer[subtree(n, me)], tag=tag, after=after)] if me else after
        held = dict.fromkeys(subtree(n, me), here)  # by what each block comes
        for peer in branches(n, me):
            b.send(line[peer], buffer[subtree(n, peer)], tag=tag, after=here)
        for step, peer, sends, receives in _steps(n, me, steps):
            lacking = [block for block in receives if block not in subtree(n, me)]
            wanted = [block for block in sends if block not in subtree(n, peer)]
            own = {op for block in wanted for op in held[block]}
            if lacking:
                came = [b.recv(line[peer], buffer[lacking], tag=tag + step, after=after)]
                held |= dict.fromkeys(lacking, came)
            if wanted:
                b.send(line[peer], buffer[wanted], tag=tag + step, after=sorted(own))
        return sorted({op for ops in held.values() for op in ops})

    return part


def _steps(n: int, me: int, steps: str) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """An allgather of a block from each of ``n``, step by step: a number that tells it from others with the same peer,
    the peer, the blocks that go out, and those that come in."""
    if steps == "recursive_doubling":
        yield from ((1, *step) for step in doubling_steps(n, me))
        return
    for step in range(1, n):
        yield step, (me - 1) % n, [], [(me - step) % n]
        yield step, (me + 1) % n, [(me - step + 1) % n], []


RADIX = Parameter("radix", 2, (2, 3, 4), "of the tree: those that have it become so many times more in a round", 2)


@register(BCAST, RADIX, SEGMENTS, auto=({},), search=lambda topology: grid(radix=(2, 4, 8), segments=(1, 2, 4, 8)))
def binomial(topology: Topology, rank: int, *, root: int, radix: int, segments: int) -> Schedule:
    """The ranks that have the vector double in each round; or become ``radix`` times more (k-nomial).

    Contract: bcast; the vector is one block.

        node 0: 0 1 2   | 0 -> 4;  0 -> 2, 4 -> (6);  0 -> 1, 2 -> 3, 4 -> 5
        node 1: 3 4 5   | (ranks counted from the root)

    A segment is passed on as soon as it is there.
    Counts (root; any number of ranks): messages = ceil(log2(p))*segments;
        blocks = ceil(log2(p)); scratch = 0
    Constraints: none.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 5; Wilkins et al. 2023 (k-nomial).
    """
    b, line = Builder(rank, segments), line_from(range(topology.size), root)
    for tag in parts_of(b):
        _along_tree(b, line, RECV, tag, [], radix)
    return in_order(b.build())


def parts_of(b: Builder) -> Iterator[int]:
    """Each segment in turn; what is added meanwhile is on that one."""
    for part in range(b.segments):
        with b.segment(part):
            yield part


@register(
    BCAST,
    segments_parameter(8, "parts of the vector, for pipelining", 8, 1, 3),
    auto=({"segments": 64},),
    search=lambda topology: grid(segments=(4, 16, 32, 64)),
)
def chain(topology: Topology, rank: int, *, root: int, segments: int) -> Schedule:
    """Each rank passes the vector on to the next, segment by segment.

    Contract: bcast; the vector is one block.

        node 0: 0 -> 1 -> 2   | while 0 sends the third segment to 1, 1 sends the second to 2,
                          v   | and 2 the first to 3  (ranks counted from the root)
        node 1: 5 <- 4 <- 3   |

    Counts (root; any number of ranks): messages = segments if p > 1 else 0; blocks = 1 if p > 1 else 0; scratch = 0
    Constraints: none.
    Reference: Pjesivac-Grbovic et al. 2007 (pipeline, chain with fanout 1).
    """
    b, line = Builder(rank, segments), line_from(range(topology.size), root)
    me = line.index(rank)
    for tag in parts_of(b):
        here = [b.recv(line[me - 1], RECV[0], tag=tag)] if me else []
        if me + 1 < len(line):
            b.send(line[me + 1], RECV[0], tag=tag, after=here)
    return in_order(b.build())


@register(
    BCAST,
    Parameter("steps", "ring", STEPS, "of the allgather"),
    auto=({}, {"steps": "recursive_doubling"}),
)
def scatter_allgather(topology: Topology, rank: int, *, root: int, steps: str) -> Schedule:
    """The vector in p blocks: scattered down a binomial tree, then gathered on all ranks.

    Contract: bcast; the vector is p blocks.

        node 0: 0 1 2   | scatter: 0 -> 4 blocks 4, 5;  0 -> 2 blocks 2, 3;  0 -> 1, 2 -> 3, 4 -> 5
                  v     | ring: 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 0, the block received last goes on,
        node 1: 3 4 5   |     but not to a rank that has it  (ranks counted from the root)

    Every rank receives each block once, the root nothing.
    Counts (root; any number of ranks): messages = ceil(log2(p))+(p-1); blocks = 2*(p-1); scratch = 0
    Constraints: none.
    Reference: van de Geijn's, in Thakur, Rabenseifner, Gropp 2005, section 5; without what is
        there already: Zhou et al. 2015 ("bandwidth-saving" ring).
    """
    b = Builder(rank, blocks=topology.size)
    _scattered(steps)(b, line_from(range(topology.size), root), RECV, 0, [])
    return in_order(b.build())


@register(
    BCAST,
    Parameter(
        "outer", "binomial", ("binomial", *STEPS), "between nodes: a tree, or scatter and allgather in such steps"
    ),
    Parameter(
        "memory", "private", ("private", "shared"), "within the node: a tree of messages, or a buffer that it shares"
    ),
    SEGMENTS,
    together=(
        {"outer": "ring", "memory": "shared"},
        {"outer": "recursive_doubling", "memory": "shared", "segments": 3},
        {"memory": "shared", "segments": 3},
    ),
    auto=tuple(grid(outer=("binomial", "ring", "recursive_doubling"), memory=("private", "shared"))),
    search=lambda topology: grid(outer=("binomial", "ring"), memory=("private", "shared"), segments=(2, 4, 8)),
)
def hierarchical(topology: Topology, rank: int, *, root: int, outer: str, memory: str, segments: int) -> Schedule:
    """One rank of each node receives the vector for its node, and the node takes it from there.

    Contract: bcast; the vector is one block, or as many as nodes where it is scattered.

        node 0: [0] 1 2   | outer: 0 -> 3, the leaders' tree (or scatter and allgather)
                 v        | inner: 0 -> 2, 0 -> 1;  3 -> 5, 3 -> 4, a tree, or, shared,
        node 1: [3] 4 5   |     3 receives into the node's buffer, raises a flag, all copy

    The root leads its node, lane 0 every other. Segments are passed on one by one.
    Counts (root; N equal nodes of m): messages = (ceil(log2(N))+ceil(log2(m)))*segments;
        network_messages = ceil(log2(N))*segments; network_blocks = ceil(log2(N)); scratch = 0
    Constraints: none.
    Reference: Karonis et al. 2000 (multilevel broadcast); flags in shared memory as in MPICH's release-gather.
    """
    nodes = line_from(range(len(topology.nodes)), topology.node_of[root])
    leaders = [root, *(topology.nodes[node][0] for node in nodes[1:])]
    own = leaders[nodes.index(topology.node_of[rank])]
    b = Builder(rank, segments, blocks=1 if outer == "binomial" else len(nodes))
    between = _along_tree if outer == "binomial" else _scattered(outer)
    if memory == "shared":
        return _through_shared(b, topology, leaders, own, between)
    for part in parts_of(b):
        here = between(b, leaders, RECV, part * (len(nodes) + 1), []) if rank == own else []
        _along_tree(b, line_from(topology.node(rank), own), RECV, part, here)
    return in_order(b.build())


def _through_shared(b: Builder, topology: Topology, leaders: list[int], own: int, between: Part) -> Schedule:
    """As `hierarchical`, by way of a buffer in which the node's leader, ``own``, receives."""
    root, others, whole = leaders[0], ranks_before(topology, b.rank), range(b.blocks)
    shared = b.shared(b.blocks, [(root, block) for block in whole])
    if b.rank != own:
        copies = []
        for part in parts_of(b):
            copies.append(b.copy(shared[whole], RECV[whole], after=[b.wait([own], ARRIVED + part)]))
        b.signal(DONE, after=copies)
        return in_order(b.build())
    free = [b.wait(others, DONE, previous=True)] if others else []
    place = shared if others and b.rank != root else RECV
    for part in parts_of(b):
        here = between(b, leaders, place, part * (len(leaders) + 1), free if place is shared else [])
        if others:
            written = [b.copy(RECV[whole], shared[whole], after=free)] if place is RECV else here
            b.signal(ARRIVED + part, after=written)
        if place is shared:
            b.copy(shared[whole], RECV[whole], after=here)
    return in_order(b.build())
