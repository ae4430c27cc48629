"""Alltoall with uneven blocks: algorithms that need to know no sizes but those of their own node."""

from __future__ import annotations

from hiercoll.algorithms.alltoall import pairwise, scatter_destination
from hiercoll.algorithms.alltoall_nodes import Relay
from hiercoll.algorithms.grouping import Grouping, distinct_forms
from hiercoll.algorithms.registry import Choices, Parameter, grid, register, window_parameter
from hiercoll.collectives import ALLTOALLV
from hiercoll.schedule import RECV, SEND, Builder, Schedule, in_order
from hiercoll.topology import Topology

TOGETHER, STRAIGHT = range(2)  # segments of a block, of which the size of the block fills one
BY_LANES = 512  # bytes of a block from which on lanes mostly are faster carriers than leaders
FILLS_A_LINK = 128 << 10  # bytes of a block that does so: all at once may take ten times as long as a few


register(
    ALLTOALLV,
    window_parameter(32, "messages outstanding per rank, each way", 1, 4, 32),
    auto=({"window": 4}, {}),
    search=lambda topology: grid(window=(2, 4, 8, 16)),
    trials=lambda topology, mean, are_small: [] if are_small or mean >= FILLS_A_LINK else [{}],
)(scatter_destination)
register(ALLTOALLV, Parameter("exchange", "rotation", ("rotation",), "partner of step i: rank +/- i"), auto=({},))(
    pairwise
)


def _trials(topology: Topology, mean: int, are_small: bool) -> Choices:
    """Large blocks go straight in any form. Of small ones the fewest messages are the fastest first, later those that
    the most ranks carry."""
    if not are_small:
        return grid(form=("share",), window=(8, 4) if mean >= FILLS_A_LINK else (8,))
    forms = distinct_forms(topology)
    return grid(form=forms if mean < BY_LANES else forms[::-1], window=(8,))


@register(
    ALLTOALLV,
    Parameter("form", "share", ("lane", "leader", "share"), "who carries between nodes"),
    window_parameter(8, "large blocks outstanding per rank, each way", 1, 4, 8),
    auto=({"form": "share"}, {"form": "lane"}, {"form": "leader"}),
    search=lambda topology: grid(form=("lane", "share", "leader"), window=(1, 4, 16)),
    trials=_trials,
)
def aggregate(topology: Topology, rank: int, *, form: str, window: int) -> Schedule:
    """Small blocks together through the node's shared buffer, large ones straight.

    Contract: alltoallv. A block has two segments, one of which is empty: both ends know its
    size, so both know which. Sizes of other ranks' blocks matter within the node only: they are
    published beside the data, and learned when the flags allow reading those.

        node 0: 0 1 2 -> [to node 1]  | small: write, one message per pair of nodes, read
                 | | |        ||      | large: 0 -> 1, 0 -> 2;  0 -> 3, 0 -> 4; ..
        node 1: 3 4 5 <- [of node 0]  |        ``window`` at a time, node by node

    Carriers: as in `grouped`. Large blocks meet by (node distance, lane distance); a step begins
    when the one ``window`` before it is complete, so that no link waits for the last of a batch.
    Counts (share form, N equal nodes of m): shared = m*m+2*m*m*(N-1); scratch = 0
    Constraints: none. Not in place.
    Reference: hiercoll's own; node-aware aggregation: Bienz et al., arXiv 2601.17606.
    """
    relay = Relay(topology, rank, Grouping(topology, form), 0, segments=2)
    b, meetings = relay.b, _meetings(topology, rank)
    with b.segment(STRAIGHT):
        begun = [_exchange(b, peers, []) for peers in meetings[:window]]
        b.copy(SEND[rank], RECV[rank], after=[])
    with b.segment(TOGETHER):
        relay.share(pairwise=False, uneven=True)
    with b.segment(STRAIGHT):
        for peers in meetings[window:]:
            begun.append(_exchange(b, peers, begun[-window]))
    return in_order(b.build())


def _meetings(topology: Topology, rank: int) -> list[list[tuple[int, bool]]]:
    """(peer, whether it is sent to) of each step that has some; both ends of a message see it in the same step."""
    lanes, nodes = max(topology.node_sizes), len(topology.nodes)
    steps: dict[int, list[tuple[int, bool]]] = {}
    for peer in range(topology.size):
        for outgoing in (False, True) if peer != rank else ():
            sign = 1 if outgoing else -1
            far = sign * (topology.node_of[peer] - topology.node_of[rank]) % nodes
            step = far * lanes + sign * (topology.lane_of[peer] - topology.lane_of[rank]) % lanes
            steps.setdefault(step, []).append((peer, outgoing))
    return [steps[step] for step in sorted(steps)]


def _exchange(b: Builder, peers: list[tuple[int, bool]], after: list[int]) -> list[int]:
    """Messages with ``peers``. Returns the operations."""
    return [
        b.send(peer, SEND[peer], after=after) if outgoing else b.recv(peer, RECV[peer], after=after)
        for peer, outgoing in peers
    ]
