"""Reductions whose elements are combined in a wider type than the program's, and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeAlias

from hiercoll.errors import ScheduleError
from hiercoll.schedule.ops import (
    WIDE,
    Blocks,
    BufferName,
    Copy,
    Deps,
    Op,
    Recv,
    Reduce,
    Region,
    Schedule,
    Send,
    as_blocks,
    reads,
    writes,
)
from hiercoll.schedule.passes import in_order

Like: TypeAlias = "Callable[[Region], Blocks | None]"  # the blocks that those of send or recv are as long as
Unit: TypeAlias = "tuple[BufferName, int, int | None]"  # a block, or a segment of it


def accumulated(schedule: Schedule, like: Like) -> Schedule:
    """``schedule``, a reduction, with partial sums in elements twice as long as the program's, in order.

    The buffers `WIDE` have such elements; ``send``, ``recv`` and ``narrow`` have the program's. A block may lie in two
    places, in either form. Reductions are of wide ones; a message is if it may hold partial sums (`Send.partial`). A
    copy from one form to the other converts; there is one where an operation needs a form in which a block is not there
    yet, and in the end for what is not in ``recv``. So only results are rounded: that nothing else is, and the same on
    all ranks, is for `verify` to say. Raises ScheduleError for messages of ``shared`` that hold no partial sums.
    """
    forms = _Forms(schedule, like)
    for index, op in enumerate(schedule.ops):
        forms.add(index, op)
    return in_order(forms.finished())


def without_partial_contributions(emit: Callable[[int], Schedule], rank: int) -> Schedule:
    """``emit(rank)``, in which messages that hold what their sender contributes, and nothing else, are said to be no
    partial sums (`Send.partial`): the receiver widens them. Both ends find that in the schedule of the sender; and in
    that of the receiver whether it has them in the node's buffer, whose elements are wide."""
    schedule = emit(rank)
    own = _contributed(schedule)
    sent_by = cache(lambda peer: _contributed(emit(peer)))
    shared_by = cache(lambda peer: _received_in_shared(emit(peer)) if schedule.shared else frozenset())

    def said(op: Op) -> Op:
        if not isinstance(op, (Send, Recv)) or not op.partial or op.region.buffer == "shared":
            return op
        if isinstance(op, Send):
            return op._replace(partial=(op.peer, op.tag) not in own or (rank, op.tag) in shared_by(op.peer))
        return op._replace(partial=(rank, op.tag) not in sent_by(op.peer))

    return replace(schedule, ops=tuple(map(said, schedule.ops)))


def _contributed(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Peers and tags of messages that hold what this rank contributes, and nothing else: what lies in send or, in
    place, in recv, as long as nothing is written there; and copies of it."""
    found, known = set[tuple[int, int]](), dict[Unit, bool]()

    def are_own(region: Region) -> list[bool]:
        return [known.get(unit, unit[0] in ("send", "recv")) for unit in _units(schedule, region)]

    for op in schedule.ops:
        if isinstance(op, Send) and all(are_own(op.region)):
            found.add((op.peer, op.tag))
        for target in writes(op):
            units = _units(schedule, target)
            copied = are_own(op.source) if isinstance(op, Copy) else [False] * len(units)
            known.update((unit, is_own and unit[0] != "shared") for unit, is_own in zip(units, copied, strict=True))
    return frozenset(found)


def _received_in_shared(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Peers and tags of messages that a rank receives in the node's buffer."""
    received = (op for op in schedule.ops if isinstance(op, Recv))
    return frozenset((op.peer, op.tag) for op in received if op.region.buffer == "shared")


def _units(schedule: Schedule, region: Region) -> list[Unit]:
    """The segments of a region."""
    parts = (region.part,) if region.part is not None or schedule.segments == 1 else range(schedule.segments)
    return [(region.buffer, block, part) for block in region.blocks for part in parts]


class _Forms:
    """The operations so far, the forms in which blocks are there after them, and where."""

    def __init__(self, schedule: Schedule, like: Like) -> None:
        self._schedule, self._like = schedule, like
        self._ops: list[Op] = []
        self._moved: list[int] = []  # by operation of ``schedule``
        self._forms: dict[Unit, set[bool]] = {}  # wide or not; if it is not said, that of the buffer
        self._slots: dict[tuple[BufferName, int], int] = {}  # where blocks lie in the form that is not their buffer's
        self._sizes: dict[BufferName, int] = {"scratch": schedule.scratch, "narrow": 0}
        touched = ((index, region) for index, op in enumerate(schedule.ops) for region in (*reads(op), *writes(op)))
        self._last = {unit: index for index, region in touched for unit in self._units(region)}

    def add(self, index: int, op: Op) -> None:
        """An operation, after the copies that it needs: these wait for what it waits for."""
        deps = tuple(self._moved[dep] for dep in op.deps)
        if isinstance(op, Send):
            op = op._replace(region=self._read(op.region, op.partial, deps))
        elif isinstance(op, Recv):
            op = op._replace(region=self._written(op.region, op.partial))
        elif isinstance(op, Reduce):
            left, right = (self._read(region, True, deps) for region in (op.left, op.right))
            op = Reduce(left, right, self._written(op.target, True), deps)
        elif isinstance(op, Copy) and op.source.blocks:
            # To recv for good: in the program's form. What is copied elsewhere may be combined with more.
            ends = op.target.buffer == "recv" and all(self._last[unit] == index for unit in self._units(op.target))
            is_narrow = self._is_there(op.source, False) and (ends or not self._is_there(op.source, True))
            source = self._read(op.source, not is_narrow, deps)
            op = Copy(source, self._written(op.target, not ends), deps)
        self._ops.append(op._replace(deps=deps))
        self._moved.append(len(self._ops) - 1)

    def finished(self) -> Schedule:
        """The schedule, with copies of what is not in recv yet."""
        missing: dict[int | None, list[int]] = {}
        for (buffer, block, part), forms in self._forms.items():
            if buffer == "recv" and False not in forms:
                missing.setdefault(part, []).append(block)
        before = tuple(index for index, op in enumerate(self._ops) if not isinstance(op, Send))
        for part, blocks in missing.items():
            self._read(Region("recv", as_blocks(sorted(blocks)), part), False, before)
        scratch, narrow = self._sizes["scratch"], self._sizes["narrow"]
        return replace(self._schedule, ops=tuple(self._ops), scratch=scratch, narrow=narrow, accumulates=True)

    def _units(self, region: Region) -> list[Unit]:
        return _units(self._schedule, region)

    def _are_there(self, unit: Unit) -> set[bool]:
        own = unit[0] in WIDE
        return {own} if unit[0] == "shared" else self._forms.setdefault(unit, {own})

    def _is_there(self, region: Region, is_wide: bool) -> bool:
        return all(is_wide in self._are_there(unit) for unit in self._units(region))

    def _read(self, region: Region, is_wide: bool, deps: Deps) -> Region:
        """Where a region is to be read in a form; what is not there in it is converted."""
        lacking = [unit for unit in self._units(region) if is_wide not in self._are_there(unit)]
        by_part: dict[int | None, list[int]] = {}
        for _, block, part in lacking:
            by_part.setdefault(part, []).append(block)
        together = len(lacking) == len(self._units(region))
        for part, blocks in [(region.part, list(region.blocks))] if together and lacking else by_part.items():
            some = _of_blocks(region, blocks, part)
            self._ops.append(Copy(self._placed(some, not is_wide), self._placed(some, is_wide), deps))
        for unit in lacking:
            self._forms[unit].add(is_wide)
        return self._placed(region, is_wide)

    def _written(self, region: Region, is_wide: bool) -> Region:
        """Where a region is to be written in a form: in the other it is not there any more."""
        for unit in self._units(region):
            if unit[0] != "shared":
                self._forms[unit] = {is_wide}
        return self._placed(region, is_wide)

    def _placed(self, region: Region, is_wide: bool) -> Region:
        """Where a region lies in a form."""
        name = region.buffer
        if (name in WIDE) == is_wide:
            return region
        if name == "shared":
            raise ScheduleError("messages of the node's buffer are of partial sums")
        buffer: BufferName = "scratch" if is_wide else "narrow"
        for block in region.blocks:
            if (name, block) not in self._slots:
                self._slots[name, block] = self._sizes[buffer]
                self._sizes[buffer] += 1
        slots = as_blocks([self._slots[name, block] for block in region.blocks])
        return Region(buffer, slots, region.part, self._like(region))


def _of_blocks(region: Region, blocks: list[int], part: int | None) -> Region:
    """Some blocks of a region, or a segment of them."""
    like = None if region.like is None else dict(zip(region.blocks, region.like, strict=True))
    alike = None if like is None else as_blocks([like[block] for block in blocks])
    return Region(region.buffer, as_blocks(blocks), part, alike)
