"""What a measured call works on, by its collective's record: unique tokens in every block, and what is due of them.

Blocks are of one size or, where the record lets them differ, of sizes with that mean. A reduction is a sum of numbers
that all orders give alike, of single precision where blocks divide into such, else of bytes; every contribution counts.
What must pass the links of nodes follows from the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hiercoll.collectives import Collective, Holds, Sizes, get_collective
from hiercoll.contracts import Contract
from hiercoll.topology import Topology

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Counts: TypeAlias = "npt.NDArray[np.int64]"
Blocks: TypeAlias = "Iterable[tuple[int | None, int]]"  # (rank, block), as in `collectives.Shape`
POISON = 0xA5  # in bytes of a receive buffer that nothing has been delivered to


def tokens(source: int, block: int, size: int) -> Bytes:
    """``size`` bytes that no other block of any rank has from 8 bytes on; as different as so few bytes can be below."""
    words = np.arange(-(-size // 8), dtype=np.uint64)
    words += np.uint64((source << 44) + (block << 24))
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # one to one, and every bit changes every byte
        words ^= words >> np.uint64(31)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words.view(np.uint8)[:size]


@lru_cache(maxsize=1)  # asked for by every call of a size
def block_sizes(collective: Collective, size: int, ranks: int) -> Counts:
    """Bytes of each block, by the rank that contributes it (row) and its number there: all of ``size``, or uniform with
    that mean. Where all ranks know the sizes, one is drawn for each rank, else for each block. Read-only."""
    each = (ranks, ranks)
    if collective.is_even:
        return np.broadcast_to(np.int64(size), each)
    known = collective.sizes is Sizes.KNOWN
    drawn = np.random.default_rng(size).integers(0, 2 * size + 1, ranks if known else each)
    if collective.operation and size % 4 == 0:
        drawn = drawn // 4 * 4
    return np.broadcast_to(drawn[:, None] if known and collective.send is not Holds.EACH else drawn, each)


@dataclass(frozen=True)
class Workload:
    """A call of ``collective`` among so many ``ranks``, with blocks (or a vector) of ``size`` bytes or that mean."""

    collective: Collective
    size: int
    ranks: int
    root: int = 0

    @property
    def contract(self) -> Contract:
        """What each rank holds, and what is due on it; a vector is one block."""
        return Contract(self.collective.name, self.ranks, root=self.root)

    def before(self, rank: int) -> Bytes:
        """What the send buffer of ``rank`` holds before the call, or the only buffer."""
        held = self._data(self.contract.shape(rank).held)
        if not self.collective.one_buffer:
            return held
        whole = np.full(max(held.size, self.due(rank).size), POISON, np.uint8)
        whole[: held.size] = held
        return whole

    def due(self, rank: int) -> Bytes:
        """What the receive buffer of ``rank``, or the only one, holds after the call."""
        return self._data(self.contract.shape(rank).due)

    def arguments(self, rank: int, send: Any, recv: Any) -> tuple[list[Any], dict[str, Any]]:
        """What ``rank`` passes, to a method of mpi4py or to hiercoll's function, with arrays like `before` and `due`;
        those that the collective does not take are left out."""
        record, shape = self.collective, self.contract.shape(rank)
        if record.operation:
            send, recv = (each.view(self.elements) for each in (send, recv))
        ends = ((record.send, send, shape.held), (record.recv, recv, shape.due))
        if record.operation and not record.is_even:
            return [send, recv], {"recvcounts": self._sizes(shape.held) // self.elements.itemsize}
        buffers = [
            array if record.is_even or holds is not Holds.EACH else [array, self._sizes(blocks)]
            for holds, array, blocks in ends[2 - record.buffers :]
        ]
        return buffers, {"root": self.root} if record.root else {}

    @property
    def elements(self) -> np.dtype[Any]:
        """Of what is combined."""
        return np.dtype(np.uint8 if self.size % 4 else np.float32)

    def sent(self) -> Counts:
        """Bytes of every block that any rank holds before the call."""
        shapes = map(self.contract.shape, range(self.ranks))
        return np.concatenate([self._sizes(shape.held) for shape in shapes])

    def busiest(self, topology: Topology) -> int:
        """Bytes that must pass the busiest node's link, each way by itself: the distinct blocks due on the ranks of a
        node that none of them holds, and those that they hold and others lack. Of a reduction that is one block each
        way, since the ranks of a node may combine theirs first; and no less than the mean of all nodes' (of allreduce
        that is more; Patarasuk, Yuan 2009)."""
        nodes, p = len(topology.nodes), self.ranks
        node_of, weights = np.array([*topology.node_of, -1]), block_sizes(self.collective, self.size, p)
        lacking, inward, outward = [], [0], np.zeros(nodes, np.int64)
        for node, ranks in enumerate(topology.nodes):
            due = np.unique(np.concatenate([self._numbers(rank) for rank in ranks]))
            lacking.append(due[(node_of[due // p] != node) & (nodes > 1)])
            inward.append(int(self._bytes(weights, lacking[-1]).sum()))
        wanted, times = np.unique(np.concatenate(lacking), return_counts=True)
        nbytes, holder = self._bytes(weights, wanted), node_of[wanted // p]
        np.add.at(outward, holder[holder >= 0], nbytes[holder >= 0])
        reduced = holder < 0
        for node, own in enumerate(lacking if reduced.any() else ()):  # its part of reductions that are due elsewhere
            outward[node] += nbytes[reduced][times[reduced] > np.isin(wanted[reduced], own)].sum()
        # Partial results of a block pass between nodes until there is one, and that to all other nodes where it is due.
        total = (nbytes[reduced] * (nodes + times[reduced] - 2)).sum()
        return int(max(*inward, *outward, -(-total // nodes)))

    def _numbers(self, rank: int) -> Counts:
        """A number for each block due on ``rank``: that of its rank, times the number of ranks, plus the block's."""
        due = self.contract.shape(rank).due
        return np.array([(self.ranks if source is None else source) * self.ranks + block for source, block in due], int)

    def _bytes(self, weights: Counts, numbers: Counts) -> Counts:
        """Of the blocks with these numbers; what is reduced is as long as any rank's contribution."""
        source, block = np.divmod(numbers, self.ranks)
        found: Counts = weights[source % self.ranks, block]
        return found

    def _sizes(self, blocks: Blocks) -> Counts:
        weights = block_sizes(self.collective, self.size, self.ranks)
        return np.array([weights[source or 0, block] for source, block in blocks], np.int64)

    def _data(self, blocks: Blocks) -> Bytes:
        """The contents of blocks, one after the other."""
        weights = block_sizes(self.collective, self.size, self.ranks)
        pieces = [np.empty(0, np.uint8)]
        for source, block in blocks:
            ranks = range(self.ranks) if source is None else (source,)
            every = [tokens(rank, block, weights[rank, block]) for rank in ranks]
            pieces.append(self._total(every) if self.collective.operation else every[0])
        return np.concatenate(pieces)

    def _total(self, contributions: list[Bytes]) -> Bytes:
        """The sum of numbers made of tokens, so small that it is exact: Open MPI's sums of bytes stop at 255,
        others go on from 0, and those of single precision are rounded from 2**24 on."""
        floats = self.elements == np.float32
        most = ((1 << 24) if floats else 256) // self.ranks
        words = [each.view(np.uint32) if floats else each for each in contributions]
        total: Counts = np.sum([each.astype(np.int64) % most for each in words], axis=0)
        return total.astype(self.elements).view(np.uint8)


def buffers(collective: str, size: int, rank: int, ranks: int) -> tuple[Bytes, Bytes]:
    """What the send buffer (or the only one) holds before a call, and what the receive buffer must hold after it."""
    work = Workload(get_collective(collective), size, ranks)
    return work.before(rank), work.due(rank)
