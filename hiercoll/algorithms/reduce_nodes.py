"""Reductions for nodes: lanes combine their shares of their node's vectors, and exchange them between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from hiercoll.algorithms.grouping import ARRIVED, DONE, WRITTEN
from hiercoll.algorithms.reducing import (
    Course,
    Line,
    Part,
    all_to_all,
    around,
    at,
    doubling,
    halved_to_one,
    halving,
    in_turns,
    over_tree,
    to_one,
)
from hiercoll.algorithms.registry import Parameter, Params, grid, register, segments_parameter
from hiercoll.collectives import ALLREDUCE, REDUCE, REDUCE_SCATTER, Order, fixed_tree
from hiercoll.schedule import RECV, SEND, Buffer, Builder, Region, Schedule, in_order
from hiercoll.topology import Topology

Tree: TypeAlias = "int | tuple[Tree, Tree]"

OUTER = Parameter(
    "outer",
    "recursive_doubling",
    ("recursive_doubling", "rabenseifner", "all_pairs", "ring"),
    "between nodes",
)
SEGMENTS = segments_parameter(1, "parts of the vector, for pipelining", 1, 3)

LEADERS = Parameter("leaders", 0, (0, 1), "lanes of a node that exchange; 0: as many as the smallest node has")


def _shares(topology: Topology, leaders: int) -> int:
    """Of how many lanes each has a share of the vector."""
    lanes = min(topology.node_sizes)
    return min(leaders, lanes) or lanes


def _order_on_nodes(topology: Topology, params: Params) -> Order:
    """What comes of the fixed tree in each node, and one over the nodes."""
    if params.get("outer") == "ring" and len(topology.nodes) > 1:
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
    LEADERS,
    SEGMENTS,
    in_place=True,
    together=({"outer": "rabenseifner", "segments": 3}, {"outer": "all_pairs", "leaders": 2, "segments": 3}),
    order=_order_on_nodes,
    auto=tuple(grid(outer=OUTER.choices, segments=(1, 4))) + tuple(grid(leaders=(1, 2))),
    search=lambda topology: [
        *grid(outer=("rabenseifner", "all_pairs"), segments=(2, 4, 16)),
        *grid(outer=OUTER.choices, leaders=(1, 2, 4)),
        *grid(outer=("rabenseifner", "all_pairs"), leaders=(2, 4), segments=(2, 4, 16)),
    ],
)
def hierarchical_allreduce(topology: Topology, rank: int, *, outer: str, leaders: int, segments: int) -> Schedule:
    """Each lane combines its share of its node's vectors, in shared memory, and exchanges it between nodes.

    Contract: allreduce; by the fixed tree in each node, and (but for a ring) over the nodes;
    as many shares as there are leaders, each of as many blocks as ``outer`` needs.

        node 0: 0 1 2   | all write their vectors, raise a flag; lane 0, 1, 2 combine thirds;
                | | |   | 0 <-> 3, 1 <-> 4, 2 <-> 5; the thirds go to the shared buffer,
        node 1: 3 4 5   | a flag, all copy those of the others

    Lanes beyond the shares only write and copy. Segments do not wait for each other.
    Counts (N = 2**k equal nodes of m, leaders=0, outer=recursive_doubling): messages = log2(N)*segments;
        network_messages = log2(N)*segments; network_blocks = log2(N); shared = m*(m+1) if m > 1 else 0
    Constraints: none.
    Reference: Jain et al. 2018 (shared memory); Bayatpour et al. 2017 (leaders); Bienz, Olson, Gropp 2019 (lanes).
    """
    nodes, shares = len(topology.nodes), _shares(topology, leaders)
    each = {"ring": nodes, "all_pairs": nodes, "rabenseifner": 1 << nodes.bit_length() - 1}.get(outer, 1)
    b = Builder(rank, segments, blocks=shares * each)
    shared = _node_buffer(b, topology, (len(topology.node(rank)) + 1) * b.blocks)
    spare = b.scratch({"ring": 1, "recursive_doubling": 1, "rabenseifner": each}.get(outer, nodes - 1))
    in_turns(b, lambda number: _on_nodes(b, topology, number, shares, outer, shared, spare))
    return in_order(b.build())


def _node_buffer(b: Builder, topology: Topology, blocks: int) -> Buffer:
    """So many blocks that the node shares. A rank alone on its node asks for them, too."""
    return b.shared(blocks) if max(topology.node_sizes) > 1 else SEND


def _slot(shared: Buffer, n: int, which: int, blocks: Sequence[int]) -> Region:
    """Blocks of one of the vectors, of ``n`` blocks each, in a buffer that the node shares."""
    return shared[[which * n + block for block in blocks]].of(blocks)


def _on_nodes(
    b: Builder, topology: Topology, number: int, shares: int, outer: str, shared: Buffer, spare: Buffer
) -> Course[None]:
    """The allreduce of a segment; in the node's buffer are the vectors of its ranks, and then the result."""
    own, lane, n = topology.node(b.rank), topology.lane_of[b.rank], b.blocks
    arrived, done, each = ARRIVED + 2 * number, DONE + 2 * number, n // shares
    whole, mine = range(n), range(lane * each, (lane + 1) * each)

    if len(own) == 1:
        yield from _between(b, topology, Part(SEND[mine], []), mine, outer, spare, number)
        return
    ready = [b.signal(arrived, after=[b.copy(SEND[whole], _slot(shared, n, lane, whole))])]
    yield
    if lane < shares:
        here = [b.wait(own, arrived, after=ready)]
        part = over_tree(b, [Part(_slot(shared, n, peer, mine), here) for peer in range(len(own))], RECV[mine])
        part = yield from _between(b, topology, part, mine, outer, spare, number)
        ready = [b.signal(done, after=[b.copy(RECV[mine], _slot(shared, n, len(own), mine), after=part.after)])]
    yield
    there = [b.wait([own[peer]], done, after=ready) for peer in range(shares) if peer != lane]
    others = [block for block in whole if block not in mine or lane >= shares]
    if others:
        b.copy(_slot(shared, n, len(own), others), RECV[others], after=[*ready, *there])


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
        return (yield from around(b, ranks, part, RECV, mine, spare, tag))
    if outer == "all_pairs":
        return (yield from all_to_all(b, ranks, part, RECV, mine, spare, tag))
    line = Line.of(ranks, b.rank)
    if outer == "rabenseifner":
        return (yield from halving(b, line, part, RECV, mine, spare, tag))
    return (yield from doubling(b, line, part, RECV[mine], spare, tag))


@register(
    REDUCE,
    Parameter("outer", "binomial", ("binomial", "rabenseifner"), "between nodes"),
    LEADERS,
    SEGMENTS,
    order=_order_on_nodes,
    together=({"outer": "rabenseifner", "leaders": 2, "segments": 3},),
    auto=tuple(grid(outer=("binomial", "rabenseifner"), segments=(1, 4))) + tuple(grid(leaders=(1, 2))),
    search=lambda topology: [
        *grid(outer=("binomial", "rabenseifner"), segments=(2, 4, 16)),
        *grid(outer=("binomial", "rabenseifner"), leaders=(1, 2, 4)),
    ],
)
def hierarchical_reduce(
    topology: Topology, rank: int, *, root: int, outer: str, leaders: int, segments: int
) -> Schedule:
    """Each lane combines its share of its node's vectors, in shared memory; lanes reduce them to the root's node.

    Contract: reduce, by the fixed tree in each node and over the nodes; as many shares as
    there are leaders, each of as many blocks as ``outer`` needs.

        node 0: 0 1 2   | all write their vectors, raise a flag; lane 0, 1, 2 combine thirds;
                ^ ^ ^   | 3 -> 0, 4 -> 1, 5 -> 2; the thirds go to the shared buffer of node 0,
        node 1: 3 4 5   | a flag, root 0 copies those of the others

    Lanes beyond the shares only write. Segments do not wait for each other.
    Counts (root; N = 2**k equal nodes of m): messages = 0; network_messages = 0; shared = m*(m+1) if m > 1 else 0
    Constraints: none.
    Reference: Jain et al. 2018 (shared memory); Bayatpour et al. 2017 (leaders); Bienz, Olson, Gropp 2019 (lanes).
    """
    nodes, shares, own = len(topology.nodes), _shares(topology, leaders), topology.node(rank)
    each = 1 << nodes.bit_length() - 1 if outer == "rabenseifner" else 1
    b = Builder(rank, segments, blocks=shares * each)
    shared = _node_buffer(b, topology, (len(own) + 1) * b.blocks)
    spare, keep = b.scratch(each), RECV if rank == root else b.scratch(b.blocks)
    in_turns(b, lambda number: _to_root(b, topology, number, root, shares, outer, shared, spare, keep))
    return in_order(b.build())


def _to_root(
    b: Builder, topology: Topology, number: int, root: int, shares: int, outer: str, shared: Buffer, spare: Buffer,
    keep: Buffer,
) -> Course[None]:  # fmt: skip
    """The reduce of a segment; in the node's buffer are the vectors of its ranks, and then the result."""
    own, lane, n = topology.node(b.rank), topology.lane_of[b.rank], b.blocks
    arrived, done, result = range(3 * number, 3 * number + 3)
    whole, mine = range(n), range(lane * n // shares, (lane + 1) * n // shares)

    part, others = Part(SEND[mine], []), [peer for peer in own[:shares] if peer != b.rank]
    if len(own) > 1:
        free = b.wait(others, done, previous=True)
        ready = b.signal(arrived, after=[b.copy(SEND[whole], _slot(shared, n, lane, whole), after=[free])])
        yield
        if lane < shares:
            here = [b.wait(own, arrived, after=[ready])]
            part = over_tree(b, [Part(_slot(shared, n, peer, mine), here) for peer in range(len(own))], at(keep, mine))
            b.signal(done, after=part.after)
    if lane < shares:
        line, end = Line.of([node[lane] for node in topology.nodes], b.rank), topology.node(root)
        tag = number * 2 * (len(topology.nodes) + 1)
        if outer == "rabenseifner":
            part = yield from halved_to_one(b, line, part, end[lane], keep, mine, spare, tag)
        else:
            into = spare[range(len(mine))].of(mine)
            part = yield from to_one(b, line, part, end[lane], at(keep, mine), into, tag)
    yield
    if b.rank == root:
        there = [b.wait([peer], result, after=part.after) for peer in others]
        rest = [block for block in whole if block not in mine or lane >= shares]
        if rest:
            b.copy(_slot(shared, n, len(own), rest), RECV[rest], after=there)
        elif part.region.buffer == "send":
            b.copy(part.region, RECV[mine])
    elif lane < shares and root in own:
        b.signal(result, after=[b.copy(at(keep, mine), _slot(shared, n, len(own), mine), after=part.after)])


@register(REDUCE_SCATTER, order=_order_on_nodes, auto=({},))
def hierarchical_reduce_scatter(topology: Topology, rank: int) -> Schedule:
    """Lanes combine the blocks of their node's vectors that are for the same lane, and send each node its own.

    Contract: reduce_scatter, by the fixed tree in each node and over the nodes.

        node 0: 0 1 2   | all write their vectors, raise a flag; lane 0 combines blocks 0 and 3,
                | | |   | 1 blocks 1 and 4, 2 blocks 2 and 5;  0 <-> 3, 1 <-> 4, 2 <-> 5: the block
        node 1: 3 4 5   | of the other

    Where nodes have more lanes than the smallest one, lanes take turns in carrying for those.
    Counts (N equal nodes of m): messages = N-1; network_messages = N-1; network_blocks = N-1;
        shared = m*(N*m+1) if m > 1 else 0
    Constraints: none. Not in place.
    Reference: Bienz, Olson, Gropp 2019 (lanes).
    """
    p, b, own, lane = topology.size, Builder(rank), topology.node(rank), topology.lane_of[rank]
    whole, shares, here = range(topology.size), min(topology.node_sizes), list[int]()
    shared = _node_buffer(b, topology, len(own) * (p + 1))

    def result_of(ranks: Sequence[int]) -> Region:
        return shared[[len(own) * p + topology.lane_of[peer] for peer in ranks]].of(ranks)

    if len(own) > 1:
        free = b.wait(own[:shares], DONE, previous=True)
        ready = b.signal(WRITTEN, after=[b.copy(SEND[whole], _slot(shared, p, lane, whole), after=[free])])
        if lane >= shares:
            b.copy(result_of([rank]), RECV[0], after=[b.wait([own[lane % shares]], ARRIVED, after=[ready])])
            return in_order(b.build())
        here = [b.wait(own, WRITTEN, after=[ready])]
    mine = _carried(topology, topology.node_of[rank], lane)
    out, at_home = b.scratch(len(mine)), RECV[0]
    if len(mine) > 1:
        at_home = out[0 : len(mine)].of(mine)
    result = _between_nodes(b, topology, shared, here, mine, at_home)
    if result.region.buffer == "send":
        b.copy(result.region, RECV[0])
    if len(mine) > 1:
        b.copy(out[0].of(rank), RECV[0], after=result.after)
        rest = b.copy(out[1 : len(mine)].of(mine[1:]), result_of(mine[1:]), after=result.after)
        b.signal(ARRIVED, after=[rest])
    return in_order(b.build())


def _carried(topology: Topology, node: int, lane: int) -> list[int]:
    """The ranks of a node whose blocks that lane carries."""
    shares = min(topology.node_sizes)
    return [peer for peer in topology.nodes[node] if topology.lane_of[peer] % shares == lane]


def _between_nodes(
    b: Builder, topology: Topology, shared: Buffer, here: list[int], mine: list[int], target: Region
) -> Part:
    """Every node gets what this one has of its blocks; the sum of what comes for this one's."""
    p, nodes, me = topology.size, topology.nodes, topology.node_of[b.rank]
    lane, lanes = topology.lane_of[b.rank], len(nodes[me])

    def at_node(blocks: list[int], into: Region) -> Part:
        if lanes == 1:
            return Part(SEND[blocks], [])
        return over_tree(b, [Part(_slot(shared, p, peer, blocks), here) for peer in range(lanes)], into)

    parts, read = {}, list[int]()
    others = [(me + step) % len(nodes) for step in range(1, len(nodes))]
    for node in others:
        into = b.scratch(len(mine))[range(len(mine))].of(mine)
        parts[node] = Part(into, [b.recv(nodes[node][lane], into, after=[])])
    for node in others:
        blocks = _carried(topology, node, lane)
        part = at_node(blocks, b.scratch(len(blocks))[range(len(blocks))].of(blocks))
        b.send(nodes[node][lane], part.region, after=part.after)
        read += part.after
    parts[me] = at_node(mine, target)
    if lanes > 1:
        b.signal(DONE, after=[*read, *parts[me].after])
    return over_tree(b, [parts[node] for node in sorted(parts)], target) if len(parts) > 1 else parts[me]
