"""To one rank from all, and from one rank to all: blocks for each, along a tree or at once."""

from __future__ import annotations

from hiercoll.algorithms.bcast import above, branches, subtree
from hiercoll.algorithms.registry import Parameter, grid, register
from hiercoll.collectives import GATHER, SCATTER
from hiercoll.schedule import RECV, SEND, Builder, Schedule, in_order
from hiercoll.topology import Topology

RADIX = Parameter("radix", 2, (2, 3, 4), "of the tree (k-nomial): rounds are fewer where it is larger", 2)


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
    p, b = topology.size, Builder(rank)
    me, ranks = (rank - root) % p, [(root + place) % p for place in range(p)]
    below = subtree(p, me, radix)
    if me == 0:
        b.copy(SEND[0], RECV[root])
        for peer in branches(p, 0, radix):
            b.recv(ranks[peer], RECV[[ranks[place] for place in subtree(p, peer, radix)]])
    elif len(below) == 1:
        b.send(ranks[above(me, radix)[0]], SEND[0])
    else:
        piece = b.scratch(len(below))
        here = [b.copy(SEND[0], piece[0])]
        for peer in branches(p, me, radix):
            here.append(b.recv(ranks[peer], piece[[place - me for place in subtree(p, peer, radix)]]))
        b.send(ranks[above(me, radix)[0]], piece[0 : len(below)], after=here)
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
    p, b = topology.size, Builder(rank)
    me, ranks = (rank - root) % p, [(root + place) % p for place in range(p)]
    below = subtree(p, me, radix)
    if me == 0:
        for peer in branches(p, 0, radix):
            b.send(ranks[peer], SEND[[ranks[place] for place in subtree(p, peer, radix)]])
        b.copy(SEND[root], RECV[0])
    elif len(below) == 1:
        b.recv(ranks[above(me, radix)[0]], RECV[0])
    else:
        piece = b.scratch(len(below))
        here = [b.recv(ranks[above(me, radix)[0]], piece[0 : len(below)])]
        for peer in branches(p, me, radix):
            b.send(ranks[peer], piece[[place - me for place in subtree(p, peer, radix)]], after=here)
        b.copy(piece[0], RECV[0], after=here)
    return in_order(b.build())


WINDOW = Parameter("window", 32, (32, 1, 4), "messages that the root has under way at a time", 1)


@register(GATHER, WINDOW, auto=({},), search=lambda topology: grid(window=(8, 128)), own_sizes=True)
def linear_gather(topology: Topology, rank: int, *, root: int, window: int) -> Schedule:
    """Every rank sends its block to the root.

    Contract: gather.

        node 0: 0 1 2   | 1 -> 0, 2 -> 0, 3 -> 0, 4 -> 0, 5 -> 0  (to root 0)
        node 1: 3 4 5   |

    Counts (root; any number of ranks): messages = 0; scratch = 0
    Constraints: none.
    Reference: MPI 4.1, section 6.5 (its definition).
    """
    b, came = Builder(rank), list[int]()
    if rank == root:
        for peer in (other for other in range(topology.size) if other != root):
            came.append(b.recv(peer, RECV[peer], after=came[-window : len(came) - window + 1]))
        b.copy(SEND[0], RECV[root])
    else:
        b.send(root, SEND[0])
    return in_order(b.build())


@register(SCATTER, WINDOW, auto=({},), search=lambda topology: grid(window=(8, 128)), own_sizes=True)
def linear_scatter(topology: Topology, rank: int, *, root: int, window: int) -> Schedule:
    """The root sends its block to every rank.

    Contract: scatter.

        node 0: 0 1 2   | 0 -> 1, 0 -> 2, 0 -> 3, 0 -> 4, 0 -> 5  (from root 0)
        node 1: 3 4 5   |

    Counts (root; any number of ranks): messages = p-1; blocks = p-1; scratch = 0
    Constraints: none.
    Reference: MPI 4.1, section 6.6 (its definition).
    """
    b, sent = Builder(rank), list[int]()
    if rank == root:
        for peer in (other for other in range(topology.size) if other != root):
            sent.append(b.send(peer, SEND[peer], after=sent[-window : len(sent) - window + 1]))
        b.copy(SEND[root], RECV[0])
    else:
        b.recv(root, RECV[0])
    return in_order(b.build())


def _leader(topology: Topology, node: int, root: int) -> int:
    """The root leads its node, lane 0 every other."""
    return root if topology.node_of[root] == node else topology.nodes[node][0]


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
        for node, ranks in enumerate(topology.nodes):
            if node != topology.node_of[root]:
                b.recv(_leader(topology, node, root), RECV[ranks])
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
        for node, ranks in enumerate(topology.nodes):
            if node != topology.node_of[root]:
                b.send(_leader(topology, node, root), SEND[ranks])
        for peer in own:
            if peer != root:
                b.send(peer, SEND[peer])
        b.copy(SEND[root], RECV[0])
    return in_order(b.build())
