"""Alltoall algorithms that know nodes: the paper's hierarchical one and the grouping family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from hiercoll.algorithms.alltoall import bruck_exchange
from hiercoll.algorithms.grouping import (
    ARRIVED,
    FORM,
    LEADERS,
    READ,
    SENT,
    WRITTEN,
    Grouping,
    Pair,
    far_ranks,
    node_traffic,
    steps,
)
from hiercoll.algorithms.registry import Parameter, register, window_parameter
from hiercoll.schedule import RECV, SEND, Buffer, Builder, Region, Schedule
from hiercoll.topology import Topology

Places: TypeAlias = "dict[Pair, tuple[Buffer, int]]"
Messages: TypeAlias = "dict[int, list[Pair]]"  # pairs of blocks by the rank they go to or come from

NEAR, OUTER, CHUNK = 0, 1, 2  # tags: within the node, between nodes, first of the gathers and scatters


def near_exchange(b: Builder, mates: Sequence[int], lane: int, ordered: bool = False) -> None:
    """Every rank's blocks for its own node, straight to their destinations.

    ``ordered``: one partner after the other instead of all at once.
    """
    b.copy(SEND[mates[lane]], RECV[mates[lane]])
    last: list[int] = []
    for i in range(1, len(mates)):
        source, target = mates[lane - i], mates[(lane + i) % len(mates)]
        done = [b.recv(source, RECV[source], after=last), b.send(target, SEND[target], after=last)]
        last = done if ordered else []


@register("alltoall", window_parameter(1, "node distances in flight per leader, 0 = all", 0, 1, 2, minimum=0))
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
    b, mates, nodes = Builder(rank), topology.node(rank), topology.nodes
    node, lane, leader = topology.node_of[rank], topology.lane_of[rank], mates[0]
    near_exchange(b, mates, lane)
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
            chunk = b.scratch(len(mates))
            arrived = b.recv(sources[0], chunk[0 : len(mates)], tag=j)
            b.copy(chunk[0], RECV[source], after=[arrived])
            for k, mate in enumerate(mates[1:], 1):
                b.send(mate, chunk[k], tag=scatter_tag[source], after=[arrived])
        for j, mate in enumerate(mates):
            ready, region = list(after), SEND[targets]
            if mate != rank:
                region = b.scratch(len(targets))[0 : len(targets)]
                ready.append(b.recv(mate, region, tag=i))
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
    "alltoall",
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
)
def grouped(
    topology: Topology, rank: int, *, form: str, leaders: int, inner: str, outer: str, flows: int, memory: str
) -> Schedule:
    """Node-aware alltoall: carriers gather for other nodes, exchange, and scatter.

    Contract: alltoall. form=lane is two_step (GC3, Figure 8); form=leader with 1 leader
    is hierarchical, with l multi-leader; form=share sends one message per node pair.

        node 0: 0 1 2   | gather: 0 -> 1: what goes to lane 1 anywhere, 0 -> 2: .. lane 2
                | | |   | outer:  0 <=> 3, 1 <=> 4, 2 <=> 5, three blocks each
        node 1: 3 4 5   | scatter: none (lane), leader -> mates (leader), carrier -> mates (share)

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
    relay = _Relay(topology, rank, Grouping(topology, form, leaders), flows)
    if memory == "shared":
        return relay.through_shared(outer == "pairwise")
    return relay.through_bruck(inner) if outer == "bruck" else relay.through_scratch(inner, outer == "pairwise")


class _Relay:
    """One rank's part of `grouped`, in phases.

    A pair (source, destination) names a block on its way; ``outbox`` and ``inbox``
    say where the blocks that this rank carries lie.
    """

    def __init__(self, topology: Topology, rank: int, grouping: Grouping, flows: int) -> None:
        self.b = Builder(rank)
        self.rank, self.topology, self.grouping = rank, topology, grouping
        self.mates, self.lane = topology.node(rank), topology.lane_of[rank]
        self.traffic = node_traffic(grouping, topology.node_of[rank])
        self.outgoing: Messages = self.traffic.outgoing.get(rank, {})
        self.incoming: Messages = self.traffic.incoming.get(rank, {})
        self.window = max(1, flows // max(1, len(self.traffic.outgoing))) if flows else 0

    def through_scratch(self, inner: str, pairwise: bool) -> Schedule:
        """Gather, exchange and scatter through private scratch."""
        relayed = {peer: pairs for peer, pairs in self.outgoing.items() if not _all_from(self.rank, pairs)}
        outbox = self.place(self.b.scratch(sum(map(len, relayed.values()))), relayed)
        collected = {peer: pairs for peer, pairs in self.incoming.items() if not _all_to(self.rank, pairs)}
        inbox = self.place(self.b.scratch(sum(map(len, collected.values()))), collected)
        ready = self.inner_exchange(inner, outbox, relayed)
        sources = {
            peer: region_of(outbox, pairs) if peer in relayed else SEND[[d for _, d in pairs]]
            for peer, pairs in self.outgoing.items()
        }
        targets = {
            peer: region_of(inbox, pairs) if peer in collected else RECV[[s for s, _ in pairs]]
            for peer, pairs in self.incoming.items()
        }
        _, arrived = self.outer_exchange(sources, ready, targets, {}, pairwise)
        self.scatter(inner, inbox, collected, arrived)
        return self.b.build()

    def through_bruck(self, inner: str) -> Schedule:
        """As through_scratch, the carriers of a lane forwarding for each other (see `bruck_exchange`)."""
        b, nodes, node = self.b, self.topology.nodes, self.topology.node_of[self.rank]
        width = max((len(pairs) for pairs in self.outgoing.values()), default=0)
        data = b.scratch(2 * len(nodes) * width)
        outbox = {
            pair: (data, self.distance(peer) * width + i)
            for peer, pairs in self.outgoing.items()
            for i, pair in enumerate(pairs)
        }
        ready = self.inner_exchange(inner, outbox, self.outgoing)
        inbox: Places = {}
        if width:
            b.gate([op for ops in ready.values() for op in ops])
            peers = [ranks[self.lane] for ranks in nodes]
            at = bruck_exchange(b, peers, node, data, width, 2)
            inbox = {
                pair: (data, at[-self.distance(peer) % len(nodes)] + i)
                for peer, pairs in self.incoming.items()
                for i, pair in enumerate(pairs)
            }
        arrived = dict.fromkeys(self.incoming, b.gated)
        self.scatter(inner, inbox, self.incoming, arrived)
        return b.build()

    def through_shared(self, pairwise: bool) -> Schedule:
        """Write into the node's buffer once, one contiguous message per pair of carriers, read once."""
        b, mates, traffic, me = self.b, self.mates, self.traffic, self.rank
        near = b.shared(len(mates) ** 2)
        outbox, inbox = {}, {}
        for carrier in mates:
            out = {k: v for k, v in traffic.outgoing.get(carrier, {}).items() if not _all_from(carrier, v)}
            outbox.update(self.place(b.shared(sum(map(len, out.values()))), out))
            into = {k: v for k, v in traffic.incoming.get(carrier, {}).items() if not _all_to(carrier, v)}
            inbox.update(self.place(b.shared(sum(map(len, into.values()))), into))
        all_read, all_sent = b.wait(mates, READ, previous=True), b.wait(mates, SENT, previous=True)
        mine, row = [pair for pair in outbox if pair[0] == me], self.lane * len(mates)
        put = [b.copy(SEND[mates], near[row : row + len(mates)], after=[all_read])]
        if mine:
            put.append(b.copy(SEND[[d for _, d in mine]], region_of(outbox, mine), after=[all_sent]))
        b.signal(WRITTEN, after=put)
        written = [b.wait(mates, WRITTEN), *put]
        sources = {
            peer: region_of(outbox, pairs) if pairs[0] in outbox else SEND[[d for _, d in pairs]]
            for peer, pairs in self.outgoing.items()
        }
        targets = {
            peer: region_of(inbox, pairs) if pairs[0] in inbox else RECV[[s for s, _ in pairs]]
            for peer, pairs in self.incoming.items()
        }
        free = {peer: [all_read] for peer, region in targets.items() if region.buffer == "shared"}
        sent, arrived = self.outer_exchange(sources, dict.fromkeys(sources, written), targets, free, pairwise)
        b.signal(SENT, after=sent)
        arrivals = [op for ops in arrived.values() for op in ops]
        b.signal(ARRIVED, after=arrivals)
        got = [b.copy(near[[i * len(mates) + self.lane for i in range(len(mates))]], RECV[mates], after=written)]
        due = [pair for pair in inbox if pair[1] == me]
        if due:
            carriers = sorted({self.grouping.into(*pair) for pair in due})
            there = [b.wait(carriers, ARRIVED), *arrivals]
            got.append(b.copy(region_of(inbox, due), RECV[[s for s, _ in due]], after=there))
        b.signal(READ, after=got)
        return b.build()

    def place(self, piece: Buffer, messages: Messages) -> Places:
        """Consecutive places in ``piece`` for the blocks of ``messages``."""
        pairs = [pair for message in messages.values() for pair in message]
        return {pair: (piece, i) for i, pair in enumerate(pairs)}

    def distance(self, peer: int) -> int:
        """Nodes from this rank's to that of ``peer``."""
        node_of = self.topology.node_of
        return (node_of[peer] - node_of[self.rank]) % len(self.topology.nodes)

    def inner_exchange(self, inner: str, outbox: Places, relayed: Messages) -> dict[int, list[int]]:
        """The node's own blocks, and those for other nodes to their carriers.

        Returns for each outgoing message the operations that complete it.
        """
        b, me, m = self.b, self.rank, len(self.mates)
        ready: dict[int, list[int]] = {peer: [] for peer in self.outgoing}
        chunks = _chunks(relayed, inner)
        for peers in chunks:
            pairs = [pair for peer in peers for pair in relayed[peer] if pair[0] == me]
            if pairs:
                done = b.copy(SEND[[d for _, d in pairs]], region_of(outbox, pairs))
                _append(ready, peers, done)
        b.copy(SEND[me], RECV[me])
        last: list[int] = []
        for i in range(1, m):
            source, target = self.mates[self.lane - i], self.mates[(self.lane + i) % m]
            step = [b.recv(source, RECV[source], after=last), b.send(target, SEND[target], after=last)]
            for k, peers in enumerate(chunks):
                pairs = [pair for peer in peers for pair in relayed[peer] if pair[0] == source]
                if pairs:
                    done = b.recv(source, region_of(outbox, pairs), tag=CHUNK + 2 * k, after=last)
                    _append(ready, peers, done)
                    step.append(done)
            for k, region in self.handed_over(target, inner):
                step.append(b.send(target, region, tag=CHUNK + 2 * k, after=last))
            last = step if inner == "pairwise" else []
        return ready

    def handed_over(self, carrier: int, inner: str) -> Iterator[tuple[int, Region]]:
        """This rank's blocks that ``carrier`` takes to other nodes, by chunk."""
        messages = self.traffic.outgoing.get(carrier, {})
        relayed = {peer: pairs for peer, pairs in messages.items() if not _all_from(carrier, pairs)}
        for k, peers in enumerate(_chunks(relayed, inner)):
            targets = [d for peer in peers for s, d in relayed[peer] if s == self.rank]
            if targets:
                yield k, SEND[targets]

    def outer_exchange(
        self,
        sources: dict[int, Region],
        ready: dict[int, list[int]],
        targets: dict[int, Region],
        free: dict[int, list[int]],
        pairwise: bool,
    ) -> tuple[list[int], dict[int, list[int]]]:
        """The messages between nodes, each sent when ``ready`` and received when ``free``.

        Returns the sends, and the receive of each message.
        """
        order = sorted(
            [(step, 1, peer) for peer, step in steps(self.grouping, self.rank, True).items() if peer in sources]
            + [(step, 0, peer) for peer, step in steps(self.grouping, self.rank, False).items() if peer in targets]
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
                    sent.append(self.b.send(peer, sources[peer], tag=OUTER, after=[*ready[peer], *bound, *gate]))
                    ops.append(sent[-1])
                else:
                    arrived[peer] = [self.b.recv(peer, targets[peer], tag=OUTER, after=[*free.get(peer, ()), *gate])]
                    ops += arrived[peer]
            taken.append(ops)
        return sent, arrived

    def scatter(self, inner: str, inbox: Places, collected: Messages, arrived: dict[int, list[int]]) -> None:
        """What this rank received for its mates to them, and what others received for it."""
        b, me, m = self.b, self.rank, len(self.mates)
        last: list[int] = []
        for i in range(m):
            source, target = self.mates[self.lane - i], self.mates[(self.lane + i) % m]
            for k, peers in enumerate(_chunks(collected, inner)):
                pairs = [pair for peer in peers for pair in collected[peer] if pair[1] == target]
                after = [op for peer in peers for op in arrived[peer]]
                if pairs and target == me:
                    b.copy(region_of(inbox, pairs), RECV[[s for s, _ in pairs]], after=after)
                elif pairs:
                    sent = b.send(target, region_of(inbox, pairs), tag=CHUNK + 2 * k + 1, after=after + last)
                    last = [sent] if inner == "pairwise" else []
            for k, region in self.taken_over(source, inner) if source != me else ():
                b.recv(source, region, tag=CHUNK + 2 * k + 1, after=[])

    def taken_over(self, carrier: int, inner: str) -> Iterator[tuple[int, Region]]:
        """This rank's blocks that ``carrier`` brings from other nodes, by chunk."""
        messages = self.traffic.incoming.get(carrier, {})
        collected = {peer: pairs for peer, pairs in messages.items() if not _all_to(carrier, pairs)}
        for k, peers in enumerate(_chunks(collected, inner)):
            sources = [s for peer in peers for s, d in collected[peer] if d == self.rank]
            if sources:
                yield k, RECV[sources]


def region_of(places: Places, pairs: list[Pair]) -> Region:
    """The region, within one piece of buffer or several of the same, where ``pairs`` lie."""
    buffer = places[pairs[0]][0]
    return Buffer(buffer.name)[[places[pair][0].offset + places[pair][1] for pair in pairs]]


def _all_from(rank: int, pairs: list[Pair]) -> bool:
    """Whether a message holds only blocks of ``rank``: it is sent from the send buffer itself."""
    return all(source == rank for source, _ in pairs)


def _all_to(rank: int, pairs: list[Pair]) -> bool:
    """Whether a message holds only blocks for ``rank``: it is received in the receive buffer itself."""
    return all(target == rank for _, target in pairs)


def _chunks(messages: Messages, inner: str) -> list[list[int]]:
    """Outer messages gathered (or scattered) together: one by one to overlap, else all."""
    if not messages:
        return []
    return [[peer] for peer in messages] if inner == "overlap" else [list(messages)]


def _append(ready: dict[int, list[int]], peers: Iterable[int], done: int) -> None:
    for peer in peers:
        ready[peer].append(done)
