"""What a schedule costs: messages and blocks per link class, and seconds by an alpha-beta model.

The model (Hockney's, one set of parameters per link class): a rank pays ``overhead`` for
each message that it sends or receives and ``gap`` per byte copied; a chain of dependent
messages pays each link's ``alpha``; all that leaves or enters a node shares the node's
link at ``beta`` per byte, and within the node each rank moves its own bytes at the node's
``beta``. The time is the latency of the longest chain plus the busiest rank's overhead
plus the larger of the two transfer times plus copies. A node's link through which one rank
alone sends is idle a little longer than one that several share. Where ranks share cores, what all ranks of
a node do takes as long as its cores need for it, which copy what enters or leaves the node, too. It
ranks algorithms; it does not know contention inside the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hiercoll.schedule import (
    MESSAGES,
    OUTGOING,
    Copy,
    Get,
    Recv,
    Reduce,
    Schedule,
    Send,
    Signal,
    Wait,
)
from hiercoll.topology import Topology


class Link(NamedTuple):
    """A class of links: ``alpha`` seconds per message, ``beta`` seconds per byte."""

    alpha: float
    beta: float


class Links(NamedTuple):
    """Parameters of the model; seconds, and seconds per byte.

    The defaults stand for ranks on hosts with 100 Gbit/s between nodes and about
    8 GB/s through shared memory, driven from Python.
    """

    node: Link = Link(1.0e-6, 1 / 8e9)
    network: Link = Link(3.0e-6, 1 / 12.5e9)
    overhead: float = 0.5e-6
    gap: float = 1 / 10e9
    operation: float = 0.5e-6  # per copy, signal or wait
    dispatch: float = 1.0e-6  # per operation of a schedule that is driven by completions
    cores: float = 1.0  # of each rank: less than 1 where ranks share them


DEFAULT_LINKS = Links()
ALONE = 0.03  # of the time that a rank's bytes take between nodes, for which the link is idle besides


class RankCounts(NamedTuple):
    """What one rank does, in messages and blocks (fractions where segments travel alone; those of elements twice as
    long as the program's count twice)."""

    messages: int = 0  # sent, of any class
    blocks: float = 0
    network_messages: int = 0  # sent to other nodes
    network_blocks: float = 0
    received: int = 0
    received_blocks: float = 0
    network_received_blocks: float = 0
    copies: int = 0
    copied_blocks: float = 0
    synchronisations: int = 0
    dispatched: int = 0  # operations, if the schedule has neither rounds nor an order, so that completions drive it
    chain: int = 0  # messages that follow one upon another, as far as this rank can see
    network_chain: int = 0
    scratch: int = 0  # blocks
    shared: int = 0  # blocks per node
    pieces: int = 1  # blocks into which a collective's vector is cut

    def nbytes(self, blocks: float, size: int) -> float:
        """Bytes of so many blocks, where ``size`` is the bytes of a block as callers have it: of a whole vector, which
        the schedule cuts."""
        return blocks * size / self.pieces

    def seconds(self, size: int, links: Links) -> float:
        """Latency, overhead and copies of this rank, for blocks or a vector of ``size`` bytes."""
        return self.latency(links) + self.work(size, links)

    def latency(self, links: Links) -> float:
        """Seconds of the longest chain of messages."""
        return (self.chain - self.network_chain) * links.node.alpha + self.network_chain * links.network.alpha

    def work(self, size: int, links: Links) -> float:
        """Seconds for which this rank needs a core."""
        operations = self.copies + self.synchronisations
        return (
            (self.messages + self.received) * links.overhead
            + operations * links.operation
            + self.dispatched * links.dispatch
            + self.nbytes(self.copied_blocks, size) * links.gap
        )


def count_rank(schedule: Schedule, topology: Topology) -> RankCounts:
    """Count one rank's schedule."""
    node_of, own = topology.node_of, topology.node_of[schedule.rank]
    messages = network_messages = received = copies = synchronisations = 0
    blocks = network_blocks = received_blocks = network_received_blocks = copied_blocks = 0.0
    depth: list[tuple[int, int]] = []  # longest chain that ends with each operation: messages, of them far
    last: dict[int, tuple[int, int]] = {}  # of the last message received from each peer
    for op in schedule.ops:
        deps = op.deps
        chain = depth[deps[0]] if len(deps) == 1 else max(map(depth.__getitem__, deps), default=(0, 0))
        if isinstance(op, MESSAGES):
            far = node_of[op.peer] != own
            extent = schedule.extent(op.region) if isinstance(op, (Send, Recv)) else 0
            if isinstance(op, OUTGOING):
                chain = (chain[0] + 1, chain[1] + far)
                messages += 1
                blocks += extent
                if far:
                    network_messages += 1
                    network_blocks += extent
            else:
                before = max(chain, last.get(op.peer, chain))
                last[op.peer] = chain = (before[0] + 1, before[1] + far)
                received += 1
                received_blocks += extent
                if far:
                    network_received_blocks += extent
        elif isinstance(op, (Copy, Reduce, Get)):
            copies += 1
            copied_blocks += schedule.extent(op.target)
        elif isinstance(op, (Signal, Wait)):
            synchronisations += 1
        depth.append(chain)
    longest, far_of_it = max(depth, default=(0, 0))
    width = 1 + schedule.accumulates
    return RankCounts(
        messages=messages,
        blocks=blocks,
        network_messages=network_messages,
        network_blocks=network_blocks,
        received=received,
        received_blocks=received_blocks,
        network_received_blocks=network_received_blocks,
        copies=copies,
        copied_blocks=copied_blocks,
        synchronisations=synchronisations,
        dispatched=0 if schedule.rounds is not None or schedule.is_in_order else len(schedule.ops),
        chain=longest,
        network_chain=far_of_it,
        scratch=width * schedule.scratch + schedule.narrow,
        shared=width * schedule.shared,
        pieces=schedule.blocks,
    )


def predict(counts: Sequence[RankCounts], size: int, links: Links = DEFAULT_LINKS) -> float:
    """Seconds for blocks of ``size`` bytes, or a vector of so many, which the schedules cut into their blocks; from the
    counts of all ranks of the busiest node."""
    far = max(sum(c.network_blocks for c in counts), sum(c.network_received_blocks for c in counts))
    near = max(max(c.blocks - c.network_blocks, c.received_blocks - c.network_received_blocks) for c in counts)
    far, near = (counts[0].nbytes(blocks, size) for blocks in (far, near))
    seconds = max(c.seconds(size, links) for c in counts)
    if links.cores < 1.0:
        moved = counts[0].nbytes(sum(c.network_blocks + c.network_received_blocks for c in counts), size)
        work = sum(c.work(size, links) for c in counts) + moved * links.gap
        seconds = max(seconds, work / (links.cores * len(counts)) + max(c.latency(links) for c in counts))
    alone = counts[0].nbytes(max(max(c.network_blocks, c.network_received_blocks) for c in counts), size)
    return seconds + max((far + ALONE * alone) * links.network.beta, near * links.node.beta)
