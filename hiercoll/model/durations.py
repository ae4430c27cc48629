"""Bytes of regions, and seconds that a rank takes for its own operations, whatever else is under way.

The meanings are those of `hiercoll.model.machine.Parameters`; memory is taken to be in cache, as in
`hiercoll.model.evaluate` where its ``miss`` is 0.
"""

from __future__ import annotations

from itertools import pairwise

from hiercoll.errors import ArgumentError
from hiercoll.memory import BlockLayout
from hiercoll.model.machine import Machine
from hiercoll.schedule import SIZE_BUFFERS, Copy, Reduce, Region, Schedule
from hiercoll.topology import Topology


class Durations:
    """Of the operations of a schedule with blocks of ``block`` bytes. All results are in seconds, or in bytes.

    Raises ArgumentError for a block of less than 0 bytes.
    """

    def __init__(self, topology: Topology, block: int, schedule: Schedule, machine: Machine) -> None:
        if block < 0:
            raise ArgumentError("block", "at least 0 bytes", block)
        self._row, self._block = schedule.row_bytes(topology.size), block
        self._layout = BlockLayout(block, 1, schedule.segments)
        self._parameters = machine.parameters
        self.flag = machine.parameters.flag

    def nbytes(self, region: Region) -> int:
        """Bytes of a region."""
        if region.buffer in SIZE_BUFFERS:
            return len(region.blocks) * self._row
        part = region.part
        return len(region.blocks) * (self._block if part is None else self._layout.extent(part)[1])

    def copy(self, op: Copy | Reduce) -> float:
        """Of a copy or a reduction: per contiguous piece, and per byte."""
        p, nbytes = self._parameters, self.nbytes(op.target)
        sources = (op.source,) if isinstance(op, Copy) else (op.left, op.right)
        pieces = max(pieces_of(region) for region in (*sources, op.target))
        byte = p.reduce_byte if isinstance(op, Reduce) else p.copy_byte
        lines = min(nbytes / pieces / 64, 1.0) if pieces else 0.0
        return pieces * (p.piece + p.line * lines) + nbytes * byte

    def message(self, level: int, nbytes: int) -> float:
        """Of a message that is alone: its step, and its bytes; ``level`` as `hiercoll.model.machine.level` has it."""
        p, is_far = self._parameters, level == 3
        step = (p.domain, p.socket, p.node, p.network)[level]
        if nbytes > (p.network_eager if is_far else p.eager):
            step += p.network_rendezvous if is_far else p.rendezvous
        elif is_far:
            step += nbytes * p.network_small_byte
        return step + nbytes * (p.domain_byte, p.node_byte, p.node_byte, p.network_byte)[level]


def pieces_of(region: Region) -> int:
    """Contiguous pieces of a region, where blocks are of one size."""
    if not region.size:
        return 0
    if region.is_whole:
        return 1
    if region.part is not None or isinstance(region.blocks, range):
        return region.size
    return 1 + sum(b != a + 1 for a, b in pairwise(region.blocks))
