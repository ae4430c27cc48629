"""Layouts of blocks that differ in size: all sizes known, a rank's own known, or a vector that is cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hiercoll.algorithms.alltoallv import STRAIGHT, TOGETHER
from hiercoll.errors import ConstraintError
from hiercoll.memory import BlockLayout, Layout, UnevenLayout
from hiercoll.runtime.sizes import Blocks, Sizes
from hiercoll.schedule import BufferName, Copy, Schedule, reads, writes
from hiercoll.schedule.lowering import Steps, lower, without


def _place(layout: UnevenLayout, name: BufferName, at: Sizes, sizes: Sizes) -> None:
    """Blocks, and the segments that they are cut into."""
    layout.place(name, None, at, sizes)
    for part in range(layout.segments if layout.segments > 1 else 0):
        start, end = (sizes * k // layout.segments for k in (part, part + 1))
        layout.place(name, part, at + start, end - start)


def known_layout(schedule: Schedule, blocks: Blocks) -> tuple[UnevenLayout, int]:
    """Where blocks lie of which every rank knows all sizes, and the bytes of the node's buffer."""
    held = blocks.received[[source for source, _ in schedule.holds]]
    layout = UnevenLayout(schedule.segments)
    _place(layout, "send", blocks.sent_at, blocks.sent)
    _place(layout, "recv", blocks.received_at, blocks.received)
    _place(layout, "shared", np.cumsum(held) - held, held)
    return layout, int(held.sum())


def own_layout(schedule: Schedule, blocks: Blocks, limit: int) -> tuple[UnevenLayout, bool]:
    """Where a rank's own blocks lie, and whether some of them are of ``limit`` bytes or more: where small blocks
    travel together, those do not."""
    layout, large = UnevenLayout(schedule.segments), False
    ends: tuple[tuple[BufferName, Sizes, Sizes], ...] = (
        ("send", blocks.sent_at, blocks.sent),
        ("recv", blocks.received_at, blocks.received),
    )
    for name, at, sizes in ends:
        if not schedule.shared:
            layout.place(name, None, at, sizes)
        else:
            small = sizes < limit
            large = large or not small.all()
            layout.place(name, TOGETHER, at, sizes * small)
            layout.place(name, STRAIGHT, at, sizes * ~small)
    return layout, large


def vector_layout(schedule: Schedule, nbytes: int) -> tuple[Layout, int, int]:
    """Where the blocks of a vector lie that is cut as evenly as it can be, the bytes of the largest, and those of the
    node's buffer. Raises ConstraintError for schedules that need scratch for blocks of unequal sizes."""
    count = schedule.blocks
    if nbytes % count == 0:
        block = nbytes // count
        return BlockLayout(block, 1, schedule.segments), block, schedule.shared * block
    if schedule.scratch:
        raise ConstraintError("buf", f"a multiple of {count} bytes, with this algorithm", nbytes, schedule.rank)
    ends = np.arange(count + 1, dtype=np.int64) * nbytes // count
    sizes, layout = np.diff(ends), UnevenLayout(schedule.segments)
    _place(layout, "recv", ends[:-1], sizes)
    held = sizes[[block for _, block in schedule.holds]]
    _place(layout, "shared", np.cumsum(held) - held, held)
    on_host = _sizes_on_host(schedule, {"recv": sizes, "shared": held})
    _place(layout, "host", np.cumsum(on_host) - on_host, on_host)
    return layout, int(sizes.max()), int(held.sum())


def _sizes_on_host(schedule: Schedule, sizes: dict[BufferName, Sizes]) -> Sizes:
    """Bytes of the blocks of the buffer ``host``, by those of the blocks that are copied there, or from there: each
    is for one block of a message (see `transports.staged`)."""
    found = np.zeros(schedule.host, np.int64)
    for op in schedule.ops:
        if isinstance(op, Copy):
            for here, there in ((op.source, op.target), (op.target, op.source)):
                if here.buffer == "host":
                    found[list(here.blocks)] = sizes[there.buffer][list(there.blocks)]
    return found


class Lowered(NamedTuple):
    """Steps for blocks of uneven sizes, and those of them that small blocks need."""

    steps: Steps
    small: Steps

    @classmethod
    def of(cls, schedule: Schedule) -> Lowered:
        """Of a schedule whose blocks are in two segments, or in none."""
        steps = lower(schedule)
        straight = [
            index
            for index, op in enumerate(schedule.ops)
            if any(region.part == STRAIGHT for region in (*reads(op), *writes(op)))
        ]
        return cls(steps, without(steps, straight) if schedule.shared else steps)
