"""Allgather algorithms that know nodes: the paper's, the lane form, the shared-memory form."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hiercoll.algorithms.allgather import doubling_steps, node_order
from hiercoll.algorithms.grouping import ARRIVED, DONE, FORM, LEADERS, WRITTEN, Grouping, ranks_before
from hiercoll.algorithms.registry import Parameter, grid, register, segments_parameter
from hiercoll.collectives import ALLGATHER
from hiercoll.schedule import RECV, SEND, Builder, Region, Schedule, in_order
from hiercoll.topology import Topology


def _as_many_leaders(topology: Topology, params: dict[str, int | str]) -> str | None:
    least = min(topology.node_sizes)
    return None if int(params["leaders"]) <= least else f"leaders <= the smallest node ({least} ranks)"


@register(
    ALLGATHER,
    LEADERS,
    segments_parameter(1, "parts of a block, for pipelining", 1, 2),
    constraint=_as_many_leaders,
    in_place=True,
    together=({"leaders": 2, "segments": 2},),
    auto=({},),
)
def hierarchical(topology: Topology, rank: int, *, leaders: int, segments: int) -> Schedule:
    """The paper's Algorithm 1: leaders do recursive doubling while gather and broadcast
    run inside the node, block by block.

    Contract: allgather, in place too.

        node 0: [0] 1 2   | gather 1 -> 0, 2 -> 0      0 <=> 3: own block
                 |        | 0 => 3 each gathered block as it arrives, and 3 => 0
        node 1: [3] 4 5   | each block that a leader has goes to its node at once

    With l leaders a node has l groups; leader g handles the blocks of group g in every
    node. The paper has 2^k equal nodes; here, with q the largest power of two <= nodes,
    node n >= q passes its blocks to node n - q before, and receives the rest after.
    Counts (leader; N = 2**k equal nodes of m, 1 leader): network_messages = (N-1)*m*segments;
        network_blocks = (N-1)*m; blocks = (N-1)*m+(m-1)*(N*m-1); scratch = 0
    Every block enters each foreign node exactly once.
    Constraints: no more leaders than ranks in the smallest node.
    Reference: Khorassani et al. 2021, section III-A, Algorithm 1.
    """
    b, node = Builder(rank, segments), topology.node_of[rank]
    groups = [topology.groups(n, leaders) for n in range(len(topology.nodes))]
    b.copy(SEND[0], RECV[rank])
    for g, group in enumerate(groups[node]):
        blocks = [groups[n][g] for n in range(len(groups))]
        if group[0] == rank:
            _lead(b, topology, [groups[n][g][0] for n in range(len(groups))], blocks)
            continue
        for block in (block for ranks in blocks for block in ranks):
            for tag, region in _parts(b, block):
                if block != rank:
                    b.recv(group[0], region, tag=tag)
                else:
                    b.send(group[0], region, tag=tag)
    return b.build()


def _parts(b: Builder, block: int) -> list[tuple[int, Region]]:
    """Tag of each segment of ``block``, and where it lies on this rank."""
    region = SEND[0] if block == b.rank else RECV[block]
    if b.segments == 1:
        return [(block, region)]
    return [(block * b.segments + part, region.segment(part)) for part in range(b.segments)]


def _lead(b: Builder, topology: Topology, leaders: list[int], blocks: list[tuple[int, ...]]) -> None:
    """A leader's part: gather ``blocks`` of its node, exchange with the ``leaders`` of the
    other nodes, and hand each block on within the node as soon as it is there."""
    node_ranks, node = topology.node(b.rank), topology.node_of[b.rank]
    held: dict[int, list[int]] = {}

    def obtain(block: int, source: int) -> None:
        for tag, region in _parts(b, block):
            held[tag] = [] if source == b.rank else [b.recv(source, region, tag=tag)]
            for node_rank in node_ranks:
                if node_rank not in (b.rank, block):
                    b.send(node_rank, region, tag=tag, after=held[tag])

    for block in blocks[node]:
        obtain(block, block)
    for peer, sends, receives in doubling_steps(len(leaders), node):
        for block in (block for n in sends for block in blocks[n]):
            for tag, region in _parts(b, block):
                b.send(leaders[peer], region, tag=tag, after=held[tag])
        for block in (block for n in receives for block in blocks[n]):
            obtain(block, leaders[peer])


def _even_for_steps(topology: Topology, params: dict[str, int | str]) -> str | None:
    if params["outer"] != "direct" and not topology.is_even:
        return f"equal nodes for outer={params['outer']}"
    return None


@register(
    ALLGATHER,
    Parameter("inner", "direct", ("direct", "pairwise", "overlap"), "exchange within the node"),
    Parameter("outer", "direct", ("direct", "ring", "recursive_doubling"), "exchange between nodes"),
    Parameter("flows", 0, (0, 4), "messages in flight out of a node, at least 1 per lane, 0 = all", 0),
    constraint=_even_for_steps,
    in_place=True,
    together=({"inner": "overlap", "outer": "ring"}, {"inner": "overlap", "outer": "recursive_doubling"}),
    auto=({}, {"outer": "ring"}, {"outer": "recursive_doubling"}),
    search=lambda topology: [
        {"inner": "overlap", "flows": 1},
        *grid(outer=("direct", "ring", "recursive_doubling"), inner=("direct", "pairwise", "overlap")),
    ],
)
def node_aware(topology: Topology, rank: int, *, inner: str, outer: str, flows: int) -> Schedule:
    """Each lane carries its share between nodes, then the node exchanges what its lanes have.

    Contract: allgather, in place too.

        node 0: 0 1 2   | outer: 0 <=> 3, 1 <=> 4, 2 <=> 5, one block each
                | | |   | inner: 0 -> 1, 2 the blocks 0 and 3;  1 -> 0, 2 the blocks 1 and 4; ..
        node 1: 3 4 5   |

    The block of lane i enters a node of m ranks at lane i mod m, once.
    outer: straight to all nodes, ring, or recursive doubling. inner: all at once after the
    outer exchange, pairwise, or `overlap` (each block passed on as it arrives).
    Counts (N equal nodes of m): messages = (N-1)+(m-1); network_messages = N-1;
        blocks = (N-1)+(m-1)*N; network_blocks = N-1; scratch = 0
    Constraints: outer=ring and recursive_doubling need equal nodes.
    Reference: Bienz et al., arXiv 2206.03564 (locality-aware Bruck allgather's lane form).
    """
    b, node_ranks, lane = Builder(rank), topology.node(rank), topology.lane_of[rank]
    window = max(1, flows // len(node_ranks)) if flows else 0
    held: dict[int, list[int]] = {rank: [b.copy(SEND[0], RECV[rank])]}
    sent: list[int] = []
    for step in lane_steps(topology, rank, outer):
        if step.receives:
            done = b.recv(step.peer, RECV[step.receives], tag=step.tag)
            held.update((block, [done]) for block in step.receives)
        if step.sends:
            bound = [sent[-window]] if window and len(sent) >= window else []
            region, after = _holding(rank, step.sends, held)
            sent.append(b.send(step.peer, region, tag=step.tag, after=[*bound, *after]))
    last: list[int] = []
    for i in range(1, len(node_ranks)):
        source, target = node_ranks[lane - i], node_ranks[(lane + i) % len(node_ranks)]
        now = []
        for tag, blocks in enumerate(_passed_on(topology, rank, outer, inner), len(topology.nodes)):
            region, after = _holding(rank, blocks, held)
            now.append(b.send(target, region, tag=tag, after=[*after, *last]))
        for tag, blocks in enumerate(_passed_on(topology, source, outer, inner), len(topology.nodes)):
            now.append(b.recv(source, RECV[blocks], tag=tag, after=last))
        last = now if inner == "pairwise" else []
    return b.build()


class LaneStep(NamedTuple):
    """A message each way between a rank and ``peer`` on another node, empty lists for none."""

    peer: int
    sends: list[int]
    receives: list[int]
    tag: int = 0


def lane_steps(topology: Topology, rank: int, outer: str) -> list[LaneStep]:
    """How the blocks of a lane get from node to node."""
    nodes, me, lane = topology.nodes, topology.node_of[rank], topology.lane_of[rank]
    n, m = len(nodes), len(nodes[me])
    steps: list[LaneStep] = []
    if outer == "recursive_doubling":
        for peer, sends, receives in doubling_steps(n, me):
            steps.append(
                LaneStep(nodes[peer][lane], [nodes[x][lane] for x in sends], [nodes[x][lane] for x in receives])
            )
        return steps
    for i in range(1, n):
        if outer == "ring":
            steps.append(LaneStep(nodes[me - 1][lane], [], [nodes[me - i][lane]], i))
            steps.append(LaneStep(nodes[(me + 1) % n][lane], [nodes[me - i + 1][lane]], [], i))
        else:
            target, source = nodes[(me + i) % n], nodes[me - i]
            steps.append(LaneStep(target[lane % len(target)], [rank], []))
            steps += [LaneStep(peer, [], [peer]) for j, peer in enumerate(source) if j % m == lane]
    return steps


def _passed_on(topology: Topology, rank: int, outer: str, inner: str) -> list[list[int]]:
    """The messages that ``rank`` sends to each rank of its node, as lists of blocks."""
    arrivals = [step.receives for step in lane_steps(topology, rank, outer) if step.receives]
    if inner == "overlap":
        return [[rank], *arrivals]
    return [sorted([rank, *(block for blocks in arrivals for block in blocks)])]


def _holding(rank: int, blocks: list[int], held: dict[int, list[int]]) -> tuple[Region, list[int]]:
    """Where ``blocks`` lie on this rank, and the operations that bring them."""
    if blocks == [rank]:
        return SEND[0], []
    return RECV[blocks], sorted({op for block in blocks for op in held[block]})


@register(
    ALLGATHER,
    FORM,
    LEADERS,
    Parameter("inner", "direct", ("direct", "overlap"), "read all at the end, or each node's blocks as they arrive"),
    Parameter("flows", 0, (0, 4), "messages in flight out of a node, at least 1 per carrier, 0 = all", 0),
    in_place=True,
    together=(
        {"form": "leader", "leaders": 2},
        {"form": "share", "flows": 4},
        {"inner": "overlap", "flows": 1},
        {"inner": "overlap", "form": "share"},
        {"inner": "overlap", "form": "leader", "flows": 1},
        {"inner": "overlap", "form": "leader", "leaders": 2},
    ),
    auto=({"form": "share"}, {"form": "lane"}, {"form": "leader"}),
    search=lambda topology: [
        *grid(form=FORM.choices, flows=(0, 1, 4), inner=("direct", "overlap")),
        {"form": "leader", "leaders": 2},
    ],
)
def shared(topology: Topology, rank: int, *, form: str, leaders: int, inner: str, flows: int) -> Schedule:
    """Through a buffer that the node shares: write once, one message per carrier, read once.

    Contract: allgather, in place too.

        node 0: 0 1 2 -> [0 1 2 . . .]  | each rank writes its block, raises a flag
                 |||          ||        | carriers send the node's blocks, receive those
        node 1: 3 4 5 -> [. . . 3 4 5]  | of other nodes, raise a flag; all read all

    Carriers: form=leader, each group's leader; form=lane, every rank for its own block;
    form=share, for two nodes at distance i the lanes (i-1) modulo lanes.
    Counts (lane form, N equal nodes of m): messages = N-1; network_messages = N-1;
        blocks = N-1; network_blocks = N-1; scratch = 0; shared = N*m
    Constraints: none.
    Reference: hiercoll's own; flags in shared memory as in MPICH's release-gather.
    """
    b, order, others = Builder(rank), node_order(topology), ranks_before(topology, rank)
    place = {block: i for i, block in enumerate(order)}
    buffer = b.shared(topology.size, [(block, 0) for block in order])
    grouping = Grouping(topology, form, leaders)
    steps = _shared_steps(grouping, rank, inner == "overlap")
    relaying = {node_rank for node_rank in topology.node(rank) if _relays(grouping, node_rank)}
    b.gate([b.wait(others, DONE, previous=True)])
    b.gate([b.copy(SEND[0], buffer[place[rank]])])
    b.signal(WRITTEN)
    if rank in relaying or not any(step.relays for step in steps):
        b.gate([b.wait(others, WRITTEN)])
    written = b.gated
    arrivals = [
        [b.recv(peer, buffer[[place[x] for x in blocks]]) for peer, blocks in step.incoming.items()] for step in steps
    ]
    window = max(1, flows // _carriers(grouping, topology.node_of[rank])) if flows else topology.size
    sent: list[int] = []
    for number, (step, received) in enumerate(zip(steps, arrivals, strict=True)):
        for peer, blocks in step.outgoing.items():
            bound = [sent[-window]] if len(sent) >= window else []
            sent.append(b.send(peer, buffer[[place[x] for x in blocks]], after=[*bound, *written]))
        if received:
            b.signal(ARRIVED + number, after=received if inner == "overlap" else [*received, *sent])
        here = [b.wait([node_rank for node_rank in others if node_rank in step.relays], ARRIVED + number), *received]
        if number == 0 and not relaying & {rank, *step.relays}:  # else one of these has waited for that
            here.append(b.wait(others, WRITTEN))
        b.copy(buffer[[place[x] for x in step.blocks]], RECV[step.blocks], after=here)
    b.signal(DONE, after=[*b.gated, *sent])
    return in_order(b.build())


class BoardStep(NamedTuple):
    """Messages of one rank, by peer, and the blocks that its node then has, by whom of it."""

    outgoing: dict[int, list[int]]
    incoming: dict[int, list[int]]
    relays: set[int]
    blocks: list[int]


def _shared_steps(grouping: Grouping, rank: int, overlap: bool) -> list[BoardStep]:
    """What goes out and comes in, node by node at growing distance, or (not ``overlap``) all at once.

    When a step's blocks are read, the messages of the next one are under way.
    """
    topology, nodes = grouping.topology, grouping.topology.nodes
    node, count = topology.node_of[rank], len(nodes)
    outgoing, incoming = _board_messages(grouping, rank)
    relays = [set[int]() for _ in nodes]  # by distance
    for node_rank in nodes[node]:
        for peer in _board_messages(grouping, node_rank)[1]:
            relays[(node - topology.node_of[peer]) % count].add(node_rank)
    if not overlap:
        return [BoardStep(outgoing, incoming, set().union(*relays), node_order(topology))]
    return [
        BoardStep(
            {peer: blocks for peer, blocks in outgoing.items() if topology.node_of[peer] == (node + i + 1) % count},
            {peer: blocks for peer, blocks in incoming.items() if topology.node_of[peer] == (node - i) % count},
            relays[i],
            list(nodes[(node - i) % count]),
        )
        for i in range(count)
    ]


def _relays(grouping: Grouping, rank: int) -> bool:
    """Whether ``rank`` sends blocks of others, and so waits until its node has written them."""
    return any(blocks != [rank] for blocks in _board_messages(grouping, rank)[0].values())


def _carriers(grouping: Grouping, node: int) -> int:
    """How many ranks of a node send to other nodes, at least 1."""
    return max(1, sum(bool(_board_messages(grouping, node_rank)[0]) for node_rank in grouping.topology.nodes[node]))


@lru_cache(maxsize=1024)
def _board_messages(grouping: Grouping, rank: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Blocks that ``rank`` sends to, and receives from, each rank of another node, by node distance."""
    t, nodes = grouping.topology, grouping.topology.nodes
    node, n = t.node_of[rank], len(t.nodes)
    leaders = list(map(grouping.leaders_of, range(n))) if grouping.form == "leader" else []

    def ends(block: int, to: int) -> tuple[int, int]:
        """The ranks that send and receive ``block`` on its way to node ``to``."""
        if grouping.form == "lane":
            return block, nodes[to][t.lane_of[block] % len(nodes[to])]
        if grouping.form == "share":
            return grouping.out(block, nodes[to][0]), grouping.into(block, nodes[to][0])
        leader, theirs = grouping.leader(block), leaders[to]
        return leader, theirs[leaders[t.node_of[block]].index(leader) % len(theirs)]

    outgoing: dict[int, list[int]] = {}
    incoming: dict[int, list[int]] = {}
    for i in range(1, n):
        to, origin = (node + i) % n, (node - i) % n
        for block in nodes[node]:
            source, target = ends(block, to)
            if source == rank:
                outgoing.setdefault(target, []).append(block)
        for block in nodes[origin]:
            source, target = ends(block, node)
            if target == rank:
                incoming.setdefault(source, []).append(block)
    return outgoing, incoming
