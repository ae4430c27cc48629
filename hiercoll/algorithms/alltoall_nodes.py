"""Alltoall algorithms that know nodes: the paper's hierarchical one and the grouping family."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from hiercoll.algorithms.alltoall import bruck_exchange
from hiercoll.algorithms.grouping import (
    ARRIVED,
    DONE,
    FORM,
    LEADERS,
    WRITTEN,
    Grouping,
    Messages,
    Pair,
    far_ranks,
    node_traffic,
    ranks_before,
    split,
    steps,
)
from hiercoll.algorithms.registry import Parameter, grid, register, window_parameter
from hiercoll.collectives import ALLTOALL
from hiercoll.schedule import RECV, SEND, Buffer, BufferName, Builder, Region, Schedule, in_order
from hiercoll.topology import Topology

NEAR, OUTER, CHUNK = 0, 1, 2  # tags: within the node, between nodes, first of the gathers and scatters


def near_exchange(b: Builder, node_ranks: Sequence[int], lane: int) -> None:
    """Every rank's blocks for its own node, straight to their destinations, all at once."""
    b.copy(SEND[node_ranks[lane]], RECV[node_ranks[lane]])
    for i in range(1, len(node_ranks)):
        source, target = node_ranks[lane - i], node_ranks[(lane + i) % len(node_ranks)]
        b.recv(source, RECV[source])
        b.send(target, SEND[target])


@register(ALLTOALL, window_parameter(1, "node distances in flight per leader, 0 = all", 0, 1, 2, minimum=0), auto=({},))
def hierarchical_alltoall(topology: Topology, rank: int, *, window: int) -> Schedule:
    """The paper's Algorithm 3: leaders exchange pairwise, one message per local rank,
    while the data of the next rank gather and those received scatter within the node.

    Contract: alltoall.

        node 0: [0] 1 2   | near: 0,1,2 all to all    gather 1 -> 0   0 => 3 (data of 0)
                 |        | gather 2 -> 0    0 => 3 (data of 1)   scatter 3 -> 4, 5
        node 1: [3] 4 5   | 0 => 3 (data of 2)   scatter 3 -> 4, 5   ..

    Nodes pair by rotation where the paper uses xor, for any number of nodes of any
    sizes. The paper starts all distances at once (window=0); text and figures go node
    by node (window=1).
    Counts (leader; N equal nodes of m): messages = (m-1)+(N-1)*m+(N-1)*m*(m-1);
        blocks = (m-1)+(N-1)*m*m+(N-1)*m*(m-1); network_messages = (N-1)*m;
        scratch = (N-1)*m*(2*m-1)
    Constraints: none. Not in place.
    Reference: Khorassani et al. 2021, section III-C, Algorithm 3.
    """
    b, node_ranks, nodes = Builder(rank), topology.node(rank), topology.nodes
    node, lane, leader = topology.node_of[rank], topology.lane_of[rank], node_ranks[0]
    near_exchange(b, node_ranks, lane)
    around = [(i, nodes[(node + i) % len(nodes)], nodes[(node - i) % len(nodes)]) for i in range(1, len(nodes))]
    if rank != leader:
        for i, targets, _ in around:
            b.send(leader, SEND[targets], tag=i)
        for tag, source in enumerate(far_ranks(topology, rank), 1):
            b.recv(leader, RECV[source], tag=tag)
        return b.build()
    scatter_tag = {source: tag for tag, source in enumerate(far_ranks(topology, rank), 1)}
    distances: list[list[int]] = []
    for i, targets, sources in around:
        after = distances[i - 1 - window] if window and i > window else []
        sent = []
        for j, source in enumerate(sources):
            chunk = b.scratch(len(node_ranks))
            arrived = b.recv(sources[0], chunk[0 : len(node_ranks)], tag=j)
            b.copy(chunk[0], RECV[source], after=[arrived])
            for k, node_rank in enumerate(node_ranks[1:], 1):
                b.send(node_rank, chunk[k], tag=scatter_tag[source], after=[arrived])
        for j, node_rank in enumerate(node_ranks):
            ready, region = list(after), SEND[targets]
            if node_rank != rank:
                region = b.scratch(len(targets))[0 : len(targets)]
                ready.append(b.recv(node_rank, region, tag=i))
            sent.append(b.send(targets[0], region, tag=j, after=ready))
        distances.append(sent)
    return b.build()


def _grouping_constraint(topology: Topology, params: dict[str, int | str]) -> str | None:
    one_carrier = params["form"] == "lane" or (params["form"] == "leader" and params["leaders"] == 1)
    if params["outer"] == "bruck" and not (one_carrier and topology.is_even):
        return "equal nodes and the lane form, or one leader, for outer=bruck"
    if params["memory"] == "shared" and params["outer"] == "bruck":
        return "private memory for outer=bruck"
    if params["memory"] == "shared" and params["inner"] == "overlap":
        return "private memory for inner=overlap"
    return None


@register(
    ALLTOALL,
    FORM,
    LEADERS,
    Parameter("inner", "direct", ("direct", "pairwise", "overlap"), "exchange within the node"),
    Parameter("outer", "direct", ("direct", "pairwise", "bruck"), "exchange between nodes"),
    Parameter("flows", 0, (0, 4), "messages in flight out of a node, at least 1 per carrier, 0 = all", 0),
    Parameter("memory", "private", ("private", "shared"), "where a node's data are put together"),
    constraint=_grouping_constraint,
    together=(
        {"form": "leader", "leaders": 2},
        {"form": "leader", "leaders": 2, "inner": "overlap"},
        {"form": "leader", "inner": "pairwise", "outer": "pairwise"},
        {"form": "leader", "outer": "bruck"},
        {"form": "leader", "leaders": 2, "memory": "shared"},
        {"form": "share", "inner": "overlap", "flows": 4},
        {"form": "share", "memory": "shared"},
        {"form": "share", "memory": "shared", "outer": "pairwise"},
        {"outer": "pairwise", "flows": 4},
    ),
    auto=(
        {"form": "lane"},
        {"form": "share"},
        {"form": "leader"},
        {"form": "share", "memory": "shared"},
        {"form": "lane", "memory": "shared"},
        {"form": "leader", "memory": "shared"},
        {"form": "lane", "outer": "bruck"},
    ),
    search=lambda topology: [
        *grid(form=FORM.choices, flows=(0, 1, 4), memory=("private", "shared")),
        *grid(form=FORM.choices, inner=("overlap",), outer=("direct", "pairwise")),
        {"form": "leader", "leaders": 2, "memory": "shared"},
    ],
)
def grouped(
    topology: Topology, rank: int, *, form: str, leaders: int, inner: str, outer: str, flows: int, memory: str
) -> Schedule:
    """Node-aware alltoall: carriers gather for other nodes, exchange, and scatter.

    Contract: alltoall. form=lane is two_step (GC3, Figure 8); form=leader with 1 leader
    is hierarchical, with l multi-leader; form=share sends one message per node pair.

        node 0: 0 1 2   | gather: 0 -> 1: what goes to lane 1 anywhere, 0 -> 2: .. lane 2
                | | |   | outer:  0 <=> 3, 1 <=> 4, 2 <=> 5, three blocks each
        node 1: 3 4 5   | scatter: none (lane), leader -> its node (leader), carrier -> its node (share)

    inner: all at once, pairwise, or `overlap` (a gather and a scatter for each outer
    message). outer: all sends at once, pairwise, or Bruck. memory=shared: one copy into
    the node's buffer, one contiguous message per pair of carriers, one copy out.
    Counts (lane form, N equal nodes of m): network_messages = N-1;
        messages = (N-1)+((m-1)*(2 if N > 1 else 1)); network_blocks = (N-1)*m;
        blocks = (N-1)*m+(m-1)+(m-1)*(N-1); scratch = (N-1)*m if m > 1 else 0
    Constraints: outer=bruck needs equal nodes, one carrier per block, private memory.
    Uneven nodes: see `Grouping` for who carries. Not in place.
    Reference: Cowan et al. 2022, section 7.3; Bienz et al., arXiv 2601.17606.
    """
    relay = Relay(topology, rank, Grouping(topology, form, leaders), flows)
    if memory == "shared":
        return relay.through_shared(outer == "pairwise")
    return relay.through_bruck(inner) if outer == "bruck" else relay.through_scratch(inner, outer == "pairwise")


class _Places:
    """Where in a buffer the blocks lie that are on their way through this node."""

    def __init__(self, name: BufferName) -> None:
        self._buffer = Buffer(name)
        self.at: dict[Pair, int] = {}

    def add(self, start: int, pairs: Sequence[Pair]) -> None:
        """``pairs`` lie one after the other from block ``start`` on."""
        self.at.update(zip(pairs, range(start, start + len(pairs)), strict=True))

    def region(self, pairs: list[Pair]) -> Region:
        """Where ``pairs`` lie."""
        return self._buffer[list(map(self.at.__getitem__, pairs))]

    def source(self, pairs: list[Pair]) -> Region:
        """Where an outgoing message lies: here, or in send if its carrier sends only its own blocks."""
        return self.region(pairs) if pairs[0] in self.at else SEND[[target for _, target in pairs]]

    def target(self, pairs: list[Pair]) -> Region:
        """Where an incoming message goes: here, or to recv if it is for its carrier only."""
        return self.region(pairs) if pairs[0] in self.at else RECV[[source for source, _ in pairs]]


class Relay:
    """One rank's part of `grouped`, in phases."""

    def __init__(self, topology: Topology, rank: int, grouping: Grouping, flows: int, segments: int = 1) -> None:
        self.b = Builder(rank, segments)
        self.rank, self.topology, self.grouping = rank, topology, grouping
        self.node_ranks, self.lane = topology.node(rank), topology.lane_of[rank]
        self.traffic = node_traffic(grouping, topology.node_of[rank])
        self.outgoing: Messages = self.traffic.outgoing.get(rank, {})
        self.incoming: Messages = self.traffic.incoming.get(rank, {})
        self.window = max(1, flows // max(1, len(self.traffic.outgoing))) if flows else 0

    def through_scratch(self, inner: str, pairwise: bool) -> Schedule:
        """Gather, exchange and scatter through private scratch."""
        relayed, collected = self.traffic.relayed(self.rank), self.traffic.collected(self.rank)
        outbox, inbox = _Places("scratch"), _Places("scratch")
        for places, messages in ((outbox, relayed), (inbox, collected)):
            pairs = [pair for message in messages.values() for pair in message]
            places.add(self.b.scratch(len(pairs)).offset, pairs)
        ready = self.inner_exchange(inner, outbox, relayed)
        _, arrived = self.outer_exchange(outbox, ready, inbox, [], pairwise)
        self.scatter(inner, inbox, collected, arrived)
        return self.b.build()

    def through_bruck(self, inner: str) -> Schedule:
        """As through_scratch, the carriers of a lane forwarding for each other (see `bruck_exchange`)."""
        b, nodes, node = self.b, self.topology.nodes, self.topology.node_of[self.rank]
        width = max((len(pairs) for pairs in self.outgoing.values()), default=0)
        data = b.scratch(2 * len(nodes) * width)
        outbox, inbox = _Places("scratch"), _Places("scratch")
        for peer, pairs in self.outgoing.items():
            outbox.add(data.offset + self.distance(peer) * width, pairs)
        ready = self.inner_exchange(inner, outbox, self.outgoing)
        if width:
            b.gate([op for ops in ready.values() for op in ops])
            at = bruck_exchange(b, [ranks[self.lane] for ranks in nodes], node, data, width, 2)
            for peer, pairs in self.incoming.items():
                inbox.add(data.offset + at[-self.distance(peer) % len(nodes)], pairs)
        self.scatter(inner, inbox, self.incoming, dict.fromkeys(self.incoming, b.gated))
        return b.build()

    def through_shared(self, pairwise: bool) -> Schedule:
        """See `share`."""
        self.share(pairwise)
        return in_order(self.b.build())

    def share(self, pairwise: bool, *, uneven: bool = False) -> None:
        """Write into the node's buffer once, one contiguous message per pair of carriers, read once.

        ``uneven``: sizes are published with the data and learned before others' blocks are touched.
        """
        b, node_ranks, me, others = self.b, self.node_ranks, self.rank, ranks_before(self.topology, self.rank)
        outbox, inbox = self._boxes()
        b.gate([b.wait(others, DONE, previous=True)])
        put = [b.copy(SEND[node_ranks], inbox.region([(me, target) for target in node_ranks]))]
        if mine := [pair for pair in outbox.at if pair[0] == me]:
            put.append(b.copy(SEND[[target for _, target in mine]], outbox.region(mine)))
        learned, exchanges_sizes = list[int](), uneven and bool(others)
        if uneven:
            b.sizes(len(node_ranks))
        if exchanges_sizes:
            put.append(b.publish_sizes(self.lane))
        b.signal(WRITTEN, after=put)
        due = [pair for pair in inbox.at if pair[1] == me]
        carriers = {self.grouping.into(*pair) for pair in due if pair[0] not in node_ranks}
        if self.outgoing or self.incoming or not carriers:  # else: a carrier's ARRIVED says that all have written
            b.gate([b.wait(others, WRITTEN), *put])
            if exchanges_sizes:
                learned = [b.learn_sizes(self.lane)]
                b.gate(learned)
        sent, arrived = self.outer_exchange(outbox, dict.fromkeys(self.outgoing, b.gated), inbox, b.gated, pairwise)
        exchanged = [*sent, *(op for ops in arrived.values() for op in ops)]
        if self.traffic.collected(me):
            b.signal(ARRIVED, after=exchanged)
        there = [b.wait([node_rank for node_rank in others if node_rank in carriers], ARRIVED), *exchanged, *learned]
        if exchanges_sizes and not learned:
            there = [b.learn_sizes(self.lane, after=there)]
        b.signal(DONE, after=[b.copy(inbox.region(due), RECV[[source for source, _ in due]], after=there)])

    def _boxes(self) -> tuple[_Places, _Places]:
        """Where in the node's buffer outgoing and incoming blocks lie: message by message, by
        node, so that what one rank writes or reads is evenly spaced. The node's own blocks, a
        row per source, lie among those that come in."""
        incoming: list[list[Pair]] = [[(source, target) for target in self.node_ranks] for source in self.node_ranks]
        outgoing: list[list[Pair]] = []
        for carrier in self.node_ranks:
            incoming += self.traffic.collected(carrier).values()
            outgoing += self.traffic.relayed(carrier).values()
        node_of, outbox, inbox = self.topology.node_of, _Places("shared"), _Places("shared")
        for places, messages, end in ((outbox, outgoing, 1), (inbox, incoming, 0)):
            for pairs in sorted(messages, key=lambda pairs: (node_of[pairs[0][end]], pairs[0])):
                places.add(self.b.shared(len(pairs), pairs).offset, pairs)
        return outbox, inbox

    def distance(self, peer: int) -> int:
        """Nodes from this rank's to that of ``peer``."""
        node_of = self.topology.node_of
        return (node_of[peer] - node_of[self.rank]) % len(self.topology.nodes)

    def inner_exchange(self, inner: str, outbox: _Places, relayed: Messages) -> dict[int, list[int]]:
        """The node's own blocks, and those for other nodes to their carriers.

        Returns for each outgoing message the operations that complete it.
        """
        b, me, m = self.b, self.rank, len(self.node_ranks)
        ready: dict[int, list[int]] = {peer: [] for peer in self.outgoing}
        last: list[int] = []
        overlap = inner == "overlap"
        gathered = split(relayed, 0, overlap)
        for i in range(m):
            source, target = self.node_ranks[self.lane - i], self.node_ranks[(self.lane + i) % m]
            step = [] if i else [b.copy(SEND[me], RECV[me])]
            if i:
                step += [b.recv(source, RECV[source], after=last), b.send(target, SEND[target], after=last)]
            for part in gathered.get(source, ()):
                if source == me:
                    done = b.copy(SEND[[d for _, d in part.pairs]], outbox.region(part.pairs))
                else:
                    done = b.recv(source, outbox.region(part.pairs), tag=CHUNK + 2 * part.number, after=last)
                step.append(done)
                for peer in part.peers:
                    ready[peer].append(done)
            for part in self.traffic.parts(target, 0, overlap).get(me, ()) if i else ():
                region = SEND[[d for _, d in part.pairs]]
                step.append(b.send(target, region, tag=CHUNK + 2 * part.number, after=last))
            last = step if inner == "pairwise" else []
        return ready

    def outer_exchange(
        self, outbox: _Places, ready: dict[int, list[int]], inbox: _Places, free: list[int], pairwise: bool
    ) -> tuple[list[int], dict[int, list[int]]]:
        """The messages between nodes, sent when ``ready``, received in the inbox when that is ``free``.

        Returns the sends, and the receive of each message.
        """
        order = sorted(
            [(step, 1, peer) for peer, step in steps(self.grouping, self.rank, True).items() if peer in self.outgoing]
            + [
                (step, 0, peer)
                for peer, step in steps(self.grouping, self.rank, False).items()
                if peer in self.incoming
            ]
        )
        sent: list[int] = []
        arrived: dict[int, list[int]] = {}
        taken: list[list[int]] = []  # operations of each step so far
        window = max(1, self.window)
        for _, entries in groupby(order, key=itemgetter(0)):
            gate = taken[-window] if pairwise and len(taken) >= window else []
            ops = []
            for _, is_send, peer in entries:
                if is_send:
                    bound = [sent[-self.window]] if self.window and not pairwise and len(sent) >= self.window else []
                    region = outbox.source(self.outgoing[peer])
                    sent.append(self.b.send(peer, region, tag=OUTER, after=[*ready[peer], *bound, *gate]))
                    ops.append(sent[-1])
                else:
                    region = inbox.target(self.incoming[peer])
                    after = [*(free if region.buffer != "recv" else ()), *gate]
                    arrived[peer] = [self.b.recv(peer, region, tag=OUTER, after=after)]
                    ops += arrived[peer]
            taken.append(ops)
        return sent, arrived

    def scatter(self, inner: str, inbox: _Places, collected: Messages, arrived: dict[int, list[int]]) -> None:
        """What this rank received for ranks of its node to them, and what others received for it."""
        b, me, m = self.b, self.rank, len(self.node_ranks)
        last: list[int] = []
        overlap = inner == "overlap"
        scattered = split(collected, 1, overlap)
        for i in range(m):
            source, target = self.node_ranks[self.lane - i], self.node_ranks[(self.lane + i) % m]
            for part in scattered.get(target, ()):
                after = [op for peer in part.peers for op in arrived[peer]]
                if target == me:
                    b.copy(inbox.region(part.pairs), RECV[[s for s, _ in part.pairs]], after=after)
                else:
                    tag = CHUNK + 2 * part.number + 1
                    sent = b.send(target, inbox.region(part.pairs), tag=tag, after=after + last)
                    last = [sent] if inner == "pairwise" else []
            for part in self.traffic.parts(source, 1, overlap).get(me, ()) if i else ():
                region = RECV[[s for s, _ in part.pairs]]
                b.recv(source, region, tag=CHUNK + 2 * part.number + 1, after=[])
