"""Layouts of blocks that differ in size: all sizes known, a rank's own known, or a vector that is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hiercoll.algorithms.alltoallv import STRAIGHT, TOGETHER
from hiercoll.errors import ConstraintError
from hiercoll.memory import BlockLayout, Layout, UnevenLayout
from hiercoll.runtime.sizes import Blocks, Sizes
from hiercoll.schedule import BufferName, Copy, Schedule, reads, writes
from hiercoll.schedule.lowering import Steps, lower, without

# What messages pass through, besides the node's buffer.
PASSED: tuple[BufferName, ...] = ("host", "wide_host", "scratch", "narrow")


def _place(layout: UnevenLayout, name: BufferName, at: Sizes, sizes: Sizes, item: int = 1) -> None:
    """Blocks, and the segments that they are cut into, between items of so many bytes."""
    layout.place(name, None, at, sizes)
    for part in range(layout.segments if layout.segments > 1 else 0):
        start, end = (sizes // item * k // layout.segments * item for k in (part, part + 1))
        layout.place(name, part, at + start, end - start)


def known_layout(schedule: Schedule, blocks: Blocks, item: int = 1) -> tuple[UnevenLayout, dict[BufferName, int]]:
    """Where blocks lie of which every rank knows all sizes, and the bytes of buffers that are not the program's. They
    are cut between items of ``item`` bytes. Raises ConstraintError for schedules with scratch that is for no block
    (`Region.like`), nor just to pack messages."""
    held = blocks.received[[source for source, _ in schedule.holds]]
    layout = UnevenLayout(schedule.segments)
    _place(layout, "send", blocks.sent_at, blocks.sent, item)
    _place(layout, "recv", blocks.received_at, blocks.received, item)
    slot = int(blocks.sent.max(initial=0))
    layout.slots("scratch", slot, "send")
    layout.slots("narrow", slot, "send")
    if len(held) == schedule.shared:
        _place(layout, "shared", np.cumsum(held) - held, held, item)
        shared = int(held.sum())
    else:
        layout.slots("shared", slot, "send")
        shared = schedule.shared * slot
    known: dict[BufferName, Sizes] = {"send": blocks.sent, "recv": blocks.received, "shared": held}
    nbytes: dict[BufferName, int] = {
        "scratch": schedule.scratch * slot,
        "narrow": schedule.narrow * slot,
        "shared": shared,
    }
    return layout, {**nbytes, **_place_passed(layout, schedule, {None: known}, _passing(schedule), item, behind=slot)}


def own_layout(schedule: Schedule, blocks: Blocks, limit: int) -> tuple[UnevenLayout, bool, dict[BufferName, int]]:
    """Where a rank's own blocks lie, and whether some of them are of ``limit`` bytes or more: where small blocks
    travel together, those do not. And the bytes of buffers that are not the program's."""
    layout, large = UnevenLayout(schedule.segments), False
    ends: tuple[tuple[BufferName, Sizes, Sizes], ...] = (
        ("send", blocks.sent_at, blocks.sent),
        ("recv", blocks.received_at, blocks.received),
    )
    for name, at, sizes in ends:
        if schedule.segments == 1:
            layout.place(name, None, at, sizes)
        else:
            small = sizes < limit
            large = large or not small.all()
            layout.place(name, TOGETHER, at, sizes * small)
            layout.place(name, STRAIGHT, at, sizes * ~small)
    every: dict[BufferName, Sizes] = {name: sizes for name, _, sizes in ends}
    if schedule.segments == 1:
        return layout, large, _place_passed(layout, schedule, {None: every})
    small_ones = {name: sizes * (sizes < limit) for name, sizes in every.items()}
    large_ones = {name: sizes * (sizes >= limit) for name, sizes in every.items()}
    names = [name for name in PASSED if name != "scratch" or not schedule.slots]  # which sizes that come place
    return layout, large, _place_passed(layout, schedule, {TOGETHER: small_ones, STRAIGHT: large_ones}, names)


def _place_passed(
    layout: UnevenLayout,
    schedule: Schedule,
    known: dict[int | None, dict[BufferName, Sizes]],
    names: Sequence[BufferName] = PASSED,
    item: int = 1,
    step: int | None = None,
    behind: int = 0,
) -> dict[BufferName, int]:
    """Place the blocks that messages pass through, on the host or in scratch, by those that are copied there, or from
    there; these are ``known`` by their part (None: whole ones, cut between items of ``item`` bytes). Each begins
    where the one before ends; in scratch with slots (`UnevenLayout.slots`) ``step`` bytes apart, as these do, or
    ``behind`` the slots, which are that many bytes apart. Returns the bytes of these buffers. Raises ConstraintError
    for blocks that are not copied."""
    nbytes: dict[BufferName, int] = {}
    for name in names:
        blocks: int = getattr(schedule, name)
        by_part = {part: _sizes_of_copies(schedule, name, blocks, sizes, part) for part, sizes in known.items()}
        most = np.max(list(by_part.values()), axis=0)
        if (most < 0).any():
            expected = "an algorithm without scratch, for blocks of unequal sizes"
            raise ConstraintError("algorithm", expected, "one that needs some", schedule.rank)
        slots = _slots(schedule, name)
        start, lengths = behind * (max(slots, default=-1) + 1), most.copy()
        lengths[slots] = 0
        at = start + np.cumsum(lengths) - lengths
        if name in ("scratch", "narrow") and step is not None:
            at = np.arange(blocks, dtype=np.int64) * step
        for part, sizes in by_part.items():
            if part is None:
                _place(layout, name, at, sizes, item)
            else:
                layout.place(name, part, at, np.maximum(sizes, 0))
        nbytes[name] = start + int(lengths.sum())
    return nbytes


def _slots(schedule: Schedule, name: BufferName) -> list[int]:
    """The blocks of a buffer of which operations say which ones they are like."""
    regions = [region for op in schedule.ops for region in (*reads(op), *writes(op)) if region.buffer == name]
    return sorted({block for region in regions if region.like is not None for block in region.blocks})


def vector_layout(schedule: Schedule, nbytes: int, item: int = 1) -> tuple[Layout, int, int]:
    """Where the blocks of a vector lie, the bytes of a place for the largest, and those of the node's buffer. They are
    cut between items of ``item`` bytes, all as long as the first but for the last ones, which may be shorter or empty.
    Raises ConstraintError for schedules with scratch that is for no block (`Region.like`), nor to pack messages."""
    count = schedule.blocks
    block = -(-nbytes // (count * item)) * item
    shared = schedule.shared * block
    if nbytes == count * block:
        return BlockLayout(block, item, schedule.segments), block, shared
    ends = np.minimum(np.arange(count + 1, dtype=np.int64) * block, nbytes)
    sizes, layout = np.diff(ends), UnevenLayout(schedule.segments)
    _place(layout, "recv", ends[:-1], sizes, item)
    _place(layout, "send", ends[:-1], sizes, item)
    part = -(-block // (item * schedule.segments)) * item if _hold_parts_of_several(schedule) else 0
    slot = part * schedule.segments or block
    layout.slots("scratch", slot, "recv", part)
    layout.slots("narrow", slot, "recv", part)
    layout.slots("shared", block, "recv")
    # What algorithms share is said by block; places of messages within the node (see `transports.staged`) are not.
    known: dict[BufferName, Sizes] = {"recv": sizes, "send": sizes}
    held = _sizes_of_copies(schedule, "shared", schedule.shared, known, None)
    held[: len(schedule.holds)] = sizes[[each for _, each in schedule.holds]]
    known["shared"] = np.maximum(held, 0)
    _place(layout, "shared", np.arange(schedule.shared, dtype=np.int64) * block, known["shared"], item)
    try:
        _place_passed(layout, schedule, {None: known}, _passing(schedule), item, slot)
    except ConstraintError:
        raise ConstraintError(
            "buf", f"a multiple of {count * item} bytes, with this algorithm", nbytes, schedule.rank
        ) from None
    return layout, slot, shared


def _hold_parts_of_several(schedule: Schedule) -> bool:
    """Whether a place in scratch, of which all uses are of segments, is for different blocks: while one segment is of
    one block, another one may be of the next."""
    like: dict[tuple[BufferName, int], int] = {}
    several = False
    for op in schedule.ops:
        for region in (*reads(op), *writes(op)):
            if region.buffer in ("scratch", "narrow") and region.like is not None:
                if region.part is None:
                    return False
                for block, alike in zip(region.blocks, region.like, strict=True):
                    several = like.setdefault((region.buffer, block), alike) != alike or several
    return several


def _passing(schedule: Schedule) -> list[BufferName]:
    """The buffers besides those of the program and the node in which blocks lie of which nothing is said."""
    regions = [region for op in schedule.ops for region in (*reads(op), *writes(op)) if region.like is None]
    used = {region.buffer for region in regions if region.blocks}
    return [name for name in PASSED if name in used]


def _sizes_of_copies(
    schedule: Schedule, name: BufferName, blocks: int, known: dict[BufferName, Sizes], part: int | None
) -> Sizes:
    """Bytes of the blocks of a buffer: of those of which an operation says so (`Region.like`), and, by the blocks that
    are copied there, or from there, in that part, of what messages pass through (see `transports.staged`): each is for
    one block of a message. -1 for others; 0 for those that no operation is on."""
    found = np.zeros(blocks, np.int64)
    for op in schedule.ops:
        for region in (*reads(op), *writes(op)):
            if region.buffer == name:
                found[list(region.blocks)] = -1
    for op in schedule.ops:
        for region in (*reads(op), *writes(op)):
            if region.buffer == name and region.like is not None:
                found[list(region.blocks)] = known["send"][list(region.like)]
        if isinstance(op, Copy) and part in (None, op.source.part):
            for here, there in ((op.source, op.target), (op.target, op.source)):
                if here.buffer != name or here.like is not None:
                    continue
                if there.like is not None:
                    found[list(here.blocks)] = known["send"][list(there.like)]
                elif there.buffer in known:
                    found[list(here.blocks)] = known[there.buffer][list(there.blocks)]
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
        return cls(steps, without(steps, straight) if schedule.segments > 1 else steps)
