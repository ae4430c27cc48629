"""To one rank from all, and from one rank to all: blocks for each, along a tree or at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hiercoll.algorithms.alltoallv import STRAIGHT, TOGETHER
from hiercoll.algorithms.bcast import above, branches, subtree
from hiercoll.algorithms.grouping import ARRIVED, DONE, WRITTEN, line_from, ranks_before
from hiercoll.algorithms.registry import Parameter, grid, register
from hiercoll.collectives import GATHER, GATHERV, SCATTER, SCATTERV
from hiercoll.schedule import RECV, SEND, SIZES, Builder, Region, Schedule, in_order
from hiercoll.topology import Topology

RADIX = Parameter("radix", 2, (2, 3, 4), "of the tree (k-nomial): rounds are fewer where it is larger", 2)


class _Tree(NamedTuple):
    """A rank's place in a k-nomial tree: who is above it, the ranks of its subtree, itself first, and whom it serves,
    each with the ranks of theirs, the largest subtrees first. Nobody is above the root: it has itself there."""

    up: int
    below: list[int]
    under: list[tuple[int, list[int]]]


def _tree(topology: Topology, rank: int, root: int, radix: int) -> _Tree:
    line = line_from(range(topology.size), root)
    p, me = topology.size, line.index(rank)

    def ranks_below(position: int) -> list[int]:
        return [line[each] for each in subtree(p, position, radix)]

    up = line[above(me, radix)[0]] if me else root
    return _Tree(up, ranks_below(me), [(line[peer], ranks_below(peer)) for peer in branches(p, me, radix)])


@register(GATHER, RADIX, auto=({},), search=lambda topology: grid(radix=(4, 8)))
def binomial_gather(topology: Topology, rank: int, *, root: int, radix: int) -> Schedule:
    """Up a binomial tree; the blocks of a subtree travel together.

    Contract: gather.

        node 0: 0 1 2   | 1 -> 0, 3 -> 2, 5 -> 4;  2 -> 0 two blocks;  4 -> 0 two blocks
        node 1: 3 4 5   | (ranks counted from the root)

    Counts (root; any number of ranks): messages = 0; scratch = 0
    Constraints: none.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4; Bruck et al. 1997.
    """
    b, (up, below, under) = Builder(rank), _tree(topology, rank, root, radix)
    if rank == root:
        b.copy(SEND[0], RECV[root])
        for peer, ranks in under:
            b.recv(peer, RECV[ranks])
    elif not under:
        b.send(up, SEND[0])
    else:
        piece = b.scratch(len(below))
        here = [b.copy(SEND[0], piece[0])]
        for peer, ranks in under:
            here.append(b.recv(peer, piece[[below.index(each) for each in ranks]]))
        b.send(up, piece[0 : len(below)], after=here)
    return in_order(b.build())


@register(SCATTER, RADIX, auto=({},), search=lambda topology: grid(radix=(4, 8)))
def binomial_scatter(topology: Topology, rank: int, *, root: int, radix: int) -> Schedule:
    """Down a binomial tree; the blocks of a subtree travel together.

    Contract: scatter.

        node 0: 0 1 2   | 0 -> 4 two blocks;  0 -> 2 two blocks;  0 -> 1, 2 -> 3, 4 -> 5
        node 1: 3 4 5   | (ranks counted from the root)

    Counts (root; any number of ranks): messages = ceil(log2(p)); blocks = p-1; scratch = 0
    Constraints: none.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4.
    """
    b, (up, below, under) = Builder(rank), _tree(topology, rank, root, radix)
    if rank == root:
        for peer, ranks in under:
            b.send(peer, SEND[ranks])
        b.copy(SEND[root], RECV[0])
    elif not under:
        b.recv(up, RECV[0])
    else:
        piece = b.scratch(len(below))
        here = [b.recv(up, piece[0 : len(below)])]
        for peer, ranks in under:
            b.send(peer, piece[[below.index(each) for each in ranks]], after=here)
        b.copy(piece[0], RECV[0], after=here)
    return in_order(b.build())


WINDOW = Parameter("window", 32, (32, 1, 4), "messages that the root has under way at a time", 1)


@register(GATHER, WINDOW, auto=({},), search=lambda topology: grid(window=(8, 128)))
@register(GATHERV, WINDOW, auto=({},), search=lambda topology: grid(window=(8, 128)))
def linear_gather(topology: Topology, rank: int, *, root: int, window: int) -> Schedule:
    """Every rank sends its block to the root.

    Contract: gather.

        node 0: 0 1 2   | 1 -> 0, 2 -> 0, 3 -> 0, 4 -> 0, 5 -> 0  (to root 0)
        node 1: 3 4 5   |

    Counts (root; any number of ranks): messages = 0; scratch = 0
    Constraints: none.
    Reference: MPI 4.1, section 6.5 (its definition).
    """
    b = Builder(rank)
    _straight_gather(b, topology, root, window)
    return in_order(b.build())


def _straight_gather(b: Builder, topology: Topology, root: int, window: int) -> None:
    """To the root from every rank, ``window`` messages at a time."""
    if b.rank != root:
        b.send(root, SEND[0], after=[])
        return
    came = list[int]()
    for peer in (other for other in range(topology.size) if other != root):
        came.append(b.recv(peer, RECV[peer], after=came[-window : len(came) - window + 1]))
    b.copy(SEND[0], RECV[root], after=[])


@register(SCATTER, WINDOW, auto=({},), search=lambda topology: grid(window=(8, 128)))
@register(SCATTERV, WINDOW, auto=({},), search=lambda topology: grid(window=(8, 128)))
def linear_scatter(topology: Topology, rank: int, *, root: int, window: int) -> Schedule:
    """The root sends its block to every rank.

    Contract: scatter.

        node 0: 0 1 2   | 0 -> 1, 0 -> 2, 0 -> 3, 0 -> 4, 0 -> 5  (from root 0)
        node 1: 3 4 5   |

    Counts (root; any number of ranks): messages = p-1; blocks = p-1; scratch = 0
    Constraints: none.
    Reference: MPI 4.1, section 6.6 (its definition).
    """
    b = Builder(rank)
    _straight_scatter(b, topology, root, window)
    return in_order(b.build())


def _straight_scatter(b: Builder, topology: Topology, root: int, window: int) -> None:
    """From the root to every rank, ``window`` messages at a time."""
    if b.rank != root:
        b.recv(root, RECV[0], after=[])
        return
    sent = list[int]()
    for peer in (other for other in range(topology.size) if other != root):
        sent.append(b.send(peer, SEND[peer], after=sent[-window : len(sent) - window + 1]))
    b.copy(SEND[root], RECV[0], after=[])


def _leader(topology: Topology, node: int, root: int) -> int:
    """The root leads its node, lane 0 every other."""
    return root if topology.node_of[root] == node else topology.nodes[node][0]


def _other_nodes(topology: Topology, root: int) -> list[tuple[int, Sequence[int]]]:
    """Leaders and ranks of nodes but the root's."""
    return [(ranks[0], ranks) for ranks in topology.nodes if root not in ranks]


@register(GATHER, auto=({},))
def hierarchical_gather(topology: Topology, rank: int, *, root: int) -> Schedule:
    """One rank of each node gathers the blocks of its node, and sends them to the root together.

    Contract: gather.

        node 0: [0] 1 2   | 1 -> 0, 2 -> 0;  4 -> 3, 5 -> 3, and then
        node 1: [3] 4 5   | 3 -> 0 three blocks  (to root 0)

    Counts (root; any number of ranks): messages = 0; scratch = 0
    Constraints: none.
    Reference: Karonis et al. 2000 (multilevel collectives).
    """
    b, own = Builder(rank), topology.node(rank)
    leader = _leader(topology, topology.node_of[rank], root)
    if rank != leader:
        b.send(leader, SEND[0])
    elif rank != root:
        piece = b.scratch(len(own))
        here = [
            b.recv(peer, piece[lane]) if peer != rank else b.copy(SEND[0], piece[lane]) for lane, peer in enumerate(own)
        ]
        b.send(root, piece[0 : len(own)], after=here)
    else:
        for peer, ranks in _other_nodes(topology, root):
            b.recv(peer, RECV[ranks])
        for peer in own:
            if peer != root:
                b.recv(peer, RECV[peer])
        b.copy(SEND[0], RECV[root])
    return in_order(b.build())


@register(SCATTER, auto=({},))
def hierarchical_scatter(topology: Topology, rank: int, *, root: int) -> Schedule:
    """One rank of each node receives the blocks of its node together, and hands them out.

    Contract: scatter.

        node 0: [0] 1 2   | 0 -> 3 three blocks, 0 -> 1, 0 -> 2, and then
        node 1: [3] 4 5   | 3 -> 4, 3 -> 5  (from root 0)

    Counts (root; N equal nodes of m): messages = (N-1)+(m-1); network_messages = N-1; scratch = 0
    Constraints: none.
    Reference: Karonis et al. 2000 (multilevel collectives).
    """
    b, own = Builder(rank), topology.node(rank)
    leader = _leader(topology, topology.node_of[rank], root)
    if rank != leader:
        b.recv(leader, RECV[0])
    elif rank != root:
        piece = b.scratch(len(own))
        here = [b.recv(root, piece[0 : len(own)])]
        for lane, peer in enumerate(own):
            if peer != rank:
                b.send(peer, piece[lane], after=here)
        b.copy(piece[own.index(rank)], RECV[0], after=here)
    else:
        for peer, ranks in _other_nodes(topology, root):
            b.send(peer, SEND[ranks])
        for peer in own:
            if peer != root:
                b.send(peer, SEND[peer])
        b.copy(SEND[root], RECV[0])
    return in_order(b.build())


NODE, TOLD = 1, 2  # tags of the small blocks of a node, and of their sizes; what goes straight has 0


def _of_any_sizes(topology: Topology, rank: int, root: int) -> Builder:
    """For blocks in two segments, whose sizes the root knows, and each rank its own."""
    b = Builder(rank, 2)
    b.sizes(topology.size, knows=range(topology.size) if rank == root else [rank])
    return b


@register(GATHERV, WINDOW, auto=({},), search=lambda topology: grid(window=(8, 128)))
def aggregate_gather(topology: Topology, rank: int, *, root: int, window: int) -> Schedule:
    """Small blocks through a buffer that their node shares, and on to the root together; large ones straight.

    Contract: gatherv. A block has two segments, one of which is empty: its rank and the root know
    its size, so both know which. A leader learns the sizes of its node's, to send them.

        node 0: [0] 1 2   | small: 1, 2 write, 0 reads;  4, 5 write, 3 -> 0 three blocks  (to root 0)
        node 1: [3] 4 5   | large: 1 -> 0, 2 -> 0, 3 -> 0, 4 -> 0, 5 -> 0

    Who is neither root nor leader may leave when it has written, and its large block is sent.
    Counts (root; any number of ranks): messages = 0; scratch = 0
    Constraints: none.
    Reference: hiercoll's own; for equal blocks Karonis et al. 2000 (multilevel collectives).
    """
    b, own = _of_any_sizes(topology, rank, root), topology.node(rank)
    lane, others = topology.lane_of[rank], ranks_before(topology, rank)
    leader, slots = _leader(topology, topology.node_of[rank], root), b.shared(len(own), [(peer, 0) for peer in own])
    with b.segment(TOGETHER):
        if rank == root:
            for peer, ranks in _other_nodes(topology, root):
                b.recv(peer, RECV[ranks], tag=NODE)
            b.copy(SEND[0], RECV[root])
        elif not others:
            b.send(root, SEND[0], tag=NODE)
    with b.segment(STRAIGHT):
        _straight_gather(b, topology, root, window)
    with b.segment(TOGETHER):
        if rank != leader:
            b.wait([leader], DONE, previous=True)
            if leader != root:
                b.publish_sizes(rank)
            b.copy(SEND[0], slots[lane])
            b.signal(WRITTEN)
        elif others:
            b.wait(others, WRITTEN)
            if rank == root:
                b.copy(slots[[topology.lane_of[peer] for peer in others]], RECV[others])
                b.signal(DONE)
            else:
                b.copy(SEND[0], slots[lane])
                b.learn_sizes(rank, others)
                b.signal(DONE, after=[b.send(root, slots[0 : len(own)], tag=NODE)])
    return in_order(b.build())


@register(SCATTERV, WINDOW, auto=({},), search=lambda topology: grid(window=(8, 128)))
def aggregate_scatter(topology: Topology, rank: int, *, root: int, window: int) -> Schedule:
    """Small blocks to a node together, and on through a buffer that it shares; large ones straight.

    Contract: scatterv. Segments as in gatherv. The root tells leaders the sizes of their node's
    blocks, so that nobody waits for other ranks than the root and the leader.

        node 0: [0] 1 2   | small: 0 -> 3 three blocks, 0 writes, 1, 2 read;  4, 5 read  (from root 0)
        node 1: [3] 4 5   | large: 0 -> 1, 0 -> 2, 0 -> 3, 0 -> 4, 0 -> 5

    Counts (root; N equal nodes of m): messages = 2*(N-1)+(N*m-1); scratch = 0
    Constraints: none.
    Reference: hiercoll's own; for equal blocks Karonis et al. 2000 (multilevel collectives).
    """
    b, own = _of_any_sizes(topology, rank, root), topology.node(rank)
    lane, others = topology.lane_of[rank], ranks_before(topology, rank)
    leader, slots = _leader(topology, topology.node_of[rank], root), b.shared(len(own), [(root, peer) for peer in own])
    for peer, ranks in _other_nodes(topology, root) if rank == root else ():
        if len(ranks) > 1:
            b.send(peer, SIZES[ranks], tag=TOLD)
        with b.segment(TOGETHER):
            b.send(peer, SEND[ranks], tag=NODE)
    if rank != root:
        with b.segment(STRAIGHT):
            _straight_scatter(b, topology, root, window)
        if rank == leader and others:
            b.gate([b.recv(root, SIZES[own], tag=TOLD)])
    with b.segment(TOGETHER):
        if rank == root:
            b.copy(SEND[root], RECV[0])
        elif not others:
            b.recv(root, RECV[0], tag=NODE)
        if rank != leader:
            b.wait([leader], ARRIVED)
            b.copy(slots[lane], RECV[0])
            b.signal(DONE)
        elif others:
            b.wait(others, DONE, previous=True)
            if rank == root:
                b.copy(SEND[others], slots[[topology.lane_of[peer] for peer in others]])
                b.signal(ARRIVED)
            else:
                b.signal(ARRIVED, after=[b.recv(root, slots[0 : len(own)], tag=NODE)])
                b.copy(slots[lane], RECV[0])
    if rank == root:
        with b.segment(STRAIGHT):
            _straight_scatter(b, topology, root, window)
    return in_order(b.build())


@register(GATHERV, RADIX, WINDOW, auto=({},), search=lambda topology: grid(radix=(4, 8)))
def binomial_gatherv(topology: Topology, rank: int, *, root: int, radix: int, window: int) -> Schedule:
    """Up a binomial tree, the small blocks of a subtree together, and before them their sizes; large ones straight.

    Contract: gatherv. Segments as in `aggregate`. Who is between others and the root learns the sizes
    of its subtree's blocks, and has a place for each.

        node 0: 0 1 2   | sizes: 3 -> 2, 5 -> 4;  small: 1 -> 0, 3 -> 2, 5 -> 4;  2 -> 0, 4 -> 0 two blocks each
        node 1: 3 4 5   | large: 1 -> 0, 2 -> 0, 3 -> 0, 4 -> 0, 5 -> 0  (ranks counted from the root)

    Counts (root; any number of ranks): messages = 0; scratch = 0
    Constraints: none. On the host only.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4, for equal blocks; for others Traff 2017, arXiv 1702.05967.
    """
    b, (up, below, under) = _of_any_sizes(topology, rank, root), _tree(topology, rank, root, radix)
    if rank != root and under:
        b.gate([b.recv(peer, SIZES[ranks], tag=TOLD) for peer, ranks in under])
    if up != root:
        b.send(up, SIZES[below], tag=TOLD)
    with b.segment(TOGETHER):
        if rank == root:
            for peer, ranks in under:
                b.recv(peer, RECV[ranks], tag=NODE)
            b.copy(SEND[0], RECV[root])
        elif not under:
            b.send(up, SEND[0], tag=NODE)
        else:
            slots = _slots(b, below)
            here = [b.recv(peer, slots(ranks), tag=NODE) for peer, ranks in under]
            b.send(up, slots(below), tag=NODE, after=[*here, b.copy(SEND[0], slots([rank]))])
    with b.segment(STRAIGHT):
        _straight_gather(b, topology, root, window)
    return in_order(b.build())


def _slots(b: Builder, ranks: list[int]) -> Callable[[list[int]], Region]:
    """A place in scratch for the block of each of the ``ranks``: what gives those of some."""
    piece = b.scratch(len(ranks))
    return lambda some: piece[[ranks.index(rank) for rank in some]].of(some)


@register(SCATTERV, RADIX, WINDOW, auto=({},), search=lambda topology: grid(radix=(4, 8)))
def binomial_scatterv(topology: Topology, rank: int, *, root: int, radix: int, window: int) -> Schedule:
    """Down a binomial tree, the sizes of a subtree's blocks and the small ones together; large ones straight.

    Contract: scatterv. Segments as in `aggregate`; sizes and places as in gatherv.

        node 0: 0 1 2   | small: 0 -> 4, 0 -> 2 sizes, and two blocks;  0 -> 1, 2 -> 3, 4 -> 5
        node 1: 3 4 5   | large: 0 -> 1, 0 -> 2, 0 -> 3, 0 -> 4, 0 -> 5  (ranks counted from the root)

    Counts (root; p a power of two): messages = p-1+max(2*log2(p)-1, 0); scratch = 0
    Constraints: none. On the host only.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4, for equal blocks; for others Traff 2017, arXiv 1702.05967.
    """
    b, (up, below, under) = _of_any_sizes(topology, rank, root), _tree(topology, rank, root, radix)
    if rank != root and under:
        b.gate([b.recv(up, SIZES[below], tag=TOLD)])
    for peer, ranks in under:
        if len(ranks) > 1:
            b.send(peer, SIZES[ranks], tag=TOLD)
    with b.segment(TOGETHER):
        if rank == root:
            for peer, ranks in under:
                b.send(peer, SEND[ranks], tag=NODE)
            b.copy(SEND[root], RECV[0])
        elif not under:
            b.recv(up, RECV[0], tag=NODE)
        else:
            slots = _slots(b, below)
            here = [b.recv(up, slots(below), tag=NODE)]
            for peer, ranks in under:
                b.send(peer, slots(ranks), tag=NODE, after=here)
            b.copy(slots([rank]), RECV[0], after=here)
    with b.segment(STRAIGHT):
        _straight_scatter(b, topology, root, window)
    return in_order(b.build())
