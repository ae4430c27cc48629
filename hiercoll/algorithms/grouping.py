"""Who carries data between nodes: the leader, lane and share forms, for any layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from hiercoll.algorithms.registry import Parameter
from hiercoll.topology import Topology

Pair: TypeAlias = "tuple[int, int]"  # source and destination of a block
Messages: TypeAlias = "dict[int, list[Pair]]"  # blocks by the rank they go to, or come from

WRITTEN, DONE, ARRIVED = range(3)  # flags of the shared-memory forms; ARRIVED + i: those of step i

FORM = Parameter("form", "lane", ("lane", "leader", "share"), "who carries between nodes")
LEADERS = Parameter("leaders", 1, (1, 2), "leaders per node (leader form)", 1)


class Grouping(NamedTuple):
    """The two ranks that carry a block from its source's node to its destination's.

    - ``leader``: each node has ``leaders`` groups; the leader of the source's group
      sends to the leader of the destination's group (a node with fewer ranks than
      leaders has one group per rank).
    - ``lane``: the source's node hands the block to its lane (destination lane modulo
      lanes of the node), which sends straight to the destination. Between equal nodes
      every lane talks to the same lane only.
    - ``share``: the pair of nodes at distance i belongs to lane (i-1) modulo lanes, at
      both ends, so that one message goes between two nodes.
    """

    topology: Topology
    form: str
    leaders: int = 1

    def leader(self, rank: int) -> int:
        """Leader of the group of ``rank``."""
        return _leaders(self.topology, self.leaders)[rank]

    def leaders_of(self, node: int) -> list[int]:
        """Leaders of the groups of a node."""
        return [group[0] for group in self.topology.groups(node, self.leaders)]

    def out(self, source: int, target: int) -> int:
        """The rank of the source's node that sends the block."""
        t = self.topology
        if self.form == "leader":
            return self.leader(source)
        node_ranks = t.node(source)
        lane = t.lane_of[target] if self.form == "lane" else self._distance(source, target) - 1
        return node_ranks[lane % len(node_ranks)]

    def into(self, source: int, target: int) -> int:
        """The rank of the destination's node that receives the block."""
        if self.form == "leader":
            return self.leader(target)
        if self.form == "lane":
            return target
        node_ranks = self.topology.node(target)
        return node_ranks[(self._distance(source, target) - 1) % len(node_ranks)]

    def _distance(self, source: int, target: int) -> int:
        t = self.topology
        return (t.node_of[target] - t.node_of[source]) % len(t.nodes)


def distinct_forms(topology: Topology) -> tuple[str, ...]:
    """The forms (with one leader each) that differ on a topology. With two nodes the leader carries all shares; with
    one node, or one rank on each, all forms are the same."""
    if len(topology.nodes) == 1 or max(topology.node_sizes) == 1:
        return ("leader",)
    return ("leader", "lane") if len(topology.nodes) == 2 else ("leader", "share", "lane")


@lru_cache(maxsize=64)
def _leaders(topology: Topology, count: int) -> tuple[int, ...]:
    leader = [0] * topology.size
    for node in range(len(topology.nodes)):
        for group in topology.groups(node, count):
            for rank in group:
                leader[rank] = group[0]
    return tuple(leader)


def line_from(ranks: Sequence[int], first: int) -> list[int]:
    """The ranks in their order, from ``first`` on, and around."""
    at = ranks.index(first)
    return [*ranks[at:], *ranks[:at]]


def ranks_before(topology: Topology, rank: int) -> list[int]:
    """The other ranks of the node, from the lane before this one backwards.

    Whoever looks at their flags in this order is held up by the first, which on shared
    cores mostly runs just before it, and then finds the others done.
    """
    node_ranks, lane = topology.node(rank), topology.lane_of[rank]
    return [node_ranks[lane - i] for i in range(1, len(node_ranks))]


def far_ranks(topology: Topology, rank: int) -> list[int]:
    """Ranks of the other nodes, by node distance, then lane."""
    node, nodes = topology.node_of[rank], topology.nodes
    return [peer for i in range(1, len(nodes)) for peer in nodes[(node + i) % len(nodes)]]


class Part(NamedTuple):
    """What one rank has of the ``number``-th chunk of outer messages: those to (or from) ``peers``."""

    number: int
    peers: list[int]
    pairs: list[Pair]


Parts: TypeAlias = "dict[int, list[Part]]"  # by the rank that they come from, or go to


def split(messages: Messages, end: int, overlap: bool) -> Parts:
    """The blocks of ``messages`` by their source (``end`` 0) or destination (1): of each message by itself to
    ``overlap``, else of all together."""
    chunks = [[peer] for peer in messages] if overlap else [list(messages)]
    found: Parts = {}
    for number, peers in enumerate(chunks):
        own: dict[int, list[Pair]] = {}
        for peer in peers:
            for pair in messages[peer]:
                own.setdefault(pair[end], []).append(pair)
        for rank, pairs in own.items():
            found.setdefault(rank, []).append(Part(number, peers, pairs))
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Traffic:
    """What passes through the ranks of one node, as (source, destination) pairs in message order.

    ``outgoing[c][peer]`` is the message that c sends to ``peer`` on another node,
    ``incoming[c][peer]`` the one it receives. Both ends list a message's pairs alike.
    """

    outgoing: dict[int, Messages]
    incoming: dict[int, Messages]
    _parts: dict[tuple[int, int, bool], Parts] = field(default_factory=dict)

    def relayed(self, carrier: int) -> Messages:
        """What ``carrier`` sends for others; a message of its own blocks alone needs no relay."""
        messages = self.outgoing.get(carrier, {})
        return {peer: pairs for peer, pairs in messages.items() if any(s != carrier for s, _ in pairs)}

    def collected(self, carrier: int) -> Messages:
        """What ``carrier`` receives for others."""
        messages = self.incoming.get(carrier, {})
        return {peer: pairs for peer, pairs in messages.items() if any(d != carrier for _, d in pairs)}

    def parts(self, carrier: int, end: int, overlap: bool) -> Parts:
        """`split` of what ``carrier`` relays (``end`` 0) or collects (1): once for all ranks of the node, each of which
        has a part."""
        key = carrier, end, overlap
        if key not in self._parts:
            messages = self.collected(carrier) if end else self.relayed(carrier)
            self._parts[key] = split(messages, end, overlap)
        return self._parts[key]


@lru_cache(maxsize=256)
def node_traffic(grouping: Grouping, node: int) -> Traffic:
    """The messages between ``node`` and the others."""
    node_ranks = grouping.topology.nodes[node]
    far = far_ranks(grouping.topology, node_ranks[0])
    outgoing: dict[int, dict[int, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    incoming: dict[int, dict[int, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for node_rank in node_ranks:
        for peer in far:
            outgoing[grouping.out(node_rank, peer)][grouping.into(node_rank, peer)].append((node_rank, peer))
    for peer in far:
        for node_rank in node_ranks:
            incoming[grouping.into(peer, node_rank)][grouping.out(peer, node_rank)].append((peer, node_rank))
    return Traffic(outgoing, incoming)


def steps(grouping: Grouping, rank: int, outgoing: bool) -> dict[int, Pair]:
    """The step in which ``rank`` meets each rank of another node: (node distance, lane distance).

    Both ends of a message see the same step, so taking steps in order cannot deadlock.
    """
    t = grouping.topology
    most = max(t.node_sizes)
    sign = 1 if outgoing else -1
    return {
        peer: (
            sign * (t.node_of[peer] - t.node_of[rank]) % len(t.nodes),
            sign * (t.lane_of[peer] - t.lane_of[rank]) % most,
        )
        for peer in far_ranks(t, rank)
    }
