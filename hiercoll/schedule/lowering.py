"""Schedules as steps: the one form that engines run.

A step is something that an engine does at once: begin some messages together, wait for some,
copy. It names the steps that it waits for. Where the dependencies of a schedule form rounds, or
put its operations in order, the steps are in sequence, each after the one before it; all
others begin when what they name is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from hiercoll.errors import ScheduleError
from hiercoll.schedule import (
    MESSAGES,
    SIZE_BUFFERS,
    AcceptOffer,
    BufferName,
    Copy,
    Get,
    Join,
    Offer,
    Op,
    Recv,
    Reduce,
    Schedule,
    Send,
    Signal,
    Wait,
    reads,
    writes,
)


class Kind(Enum):
    """What a step does.

    START begins messages together; WAIT is complete when operations begun before are. COPY and
    REDUCE are local, TRANSFER copies from another rank's memory (`Get`): they are complete at
    once, or, where a WAIT names them too, with that. COMPUTE is for work of a caller's own.
    """

    START = auto()
    WAIT = auto()
    COPY = auto()
    REDUCE = auto()
    TRANSFER = auto()
    RAISE_FLAG = auto()
    WAIT_FLAGS = auto()
    COMPUTE = auto()


class Step(NamedTuple):
    """``ops`` are indices into the schedule, ``after`` those of steps, all of them before this one.

    ``sized``: lengths or addresses come from the table of sizes that a step before it fills.
    """

    kind: Kind
    ops: tuple[int, ...]
    after: tuple[int, ...]
    sized: bool = False


class Flow(NamedTuple):
    """By step: how many others it needs, and which wait for it; the ``first`` ones wait for none.

    A message is complete with the step that waits for it alone (``completes``, by operation), not with the
    one that begins it. ``number``: of steps that complete something.
    """

    first: list[int]
    needs: list[int]
    dependents: list[list[int]]
    completes: dict[int, int]
    number: int


@dataclass(frozen=True, eq=False, repr=False)
class Steps:
    """A schedule and its steps; ``in_sequence``: each is after the one before it."""

    schedule: Schedule
    steps: tuple[Step, ...]
    in_sequence: bool

    @cached_property
    def constant(self) -> tuple[Step, ...]:
        """Those that do not depend on learned sizes."""
        return tuple(step for step in self.steps if not step.sized)

    @cached_property
    def first_sized(self) -> int:
        """Where the first one is that does; their number, if none does."""
        return next((index for index, step in enumerate(self.steps) if step.sized), len(self.steps))

    @cached_property
    def messages(self) -> tuple[Op, ...]:
        """The messages that they begin."""
        return tuple(self.schedule.ops[op] for step in self.steps if step.kind is Kind.START for op in step.ops)

    @cached_property
    def buffers_of_messages(self) -> frozenset[BufferName]:
        """Those that messages are of, or about."""
        moved = {op.region.buffer for op in self.messages if isinstance(op, (Send, Recv))}
        return frozenset(moved | {op.buffer for op in self.messages if isinstance(op, (Offer, AcceptOffer))})

    @cached_property
    def are_basic(self) -> bool:
        """Whether they are messages, copies, reductions and flags, with lengths that are known."""
        return self._are_simple and not self.schedule.sizes

    @cached_property
    def are_by_block(self) -> bool:
        """Whether sizes and places of the blocks of send and recv may come with each start: nothing else depends on
        them, but for shared blocks, or slots in scratch, where sizes are learned."""
        if any(isinstance(op, Reduce) for op in self.schedule.ops):
            return False
        regions = [region for op in self.schedule.ops for region in (*reads(op), *writes(op))]
        if self.schedule.sizes:
            moved = [each for each in regions if each.buffer not in SIZE_BUFFERS]
            known = {"send", "recv", "scratch" if self.schedule.slots else "shared"}
            return self._are_simple and known.issuperset(each.buffer for each in moved)
        plain = all(each.part is None and each.buffer in ("send", "recv") for each in regions)
        return plain and self._are_simple and not self.schedule.flags

    @property
    def _are_simple(self) -> bool:
        return all(isinstance(op, (Send, Recv, Copy, Reduce, Signal, Wait, Join)) for op in self.schedule.ops)

    @cached_property
    def flow(self) -> Flow:
        """What drives steps that are not in sequence."""
        steps = self.steps
        dependents: list[list[int]] = [[] for _ in steps]
        for index, step in enumerate(steps):
            for before in step.after:
                if steps[before].kind is not Kind.START:
                    dependents[before].append(index)
        return Flow(
            [index for index, step in enumerate(steps) if not step.after],
            [len(step.after) for step in steps],
            dependents,
            {op: index for index, step in enumerate(steps) if step.kind is not Kind.START for op in step.ops},
            sum(step.kind is not Kind.START for step in steps),
        )


_LOCAL: dict[type, Kind] = {
    Copy: Kind.COPY,
    Reduce: Kind.REDUCE,
    Get: Kind.TRANSFER,
    Signal: Kind.RAISE_FLAG,
    Wait: Kind.WAIT_FLAGS,
}


def lower(schedule: Schedule, *, by_message: bool = False) -> Steps:
    """The steps of ``schedule``, which keeps them.

    ``by_message``: not in rounds, so that each message of a round is seen to complete (for traces). Raises
    ScheduleError for schedules with flags, or learned sizes, whose operations are not in order.
    """
    known: dict[bool, Steps] = vars(schedule).setdefault("_lowered", {})  # as functools.cached_property does
    if by_message not in known:
        known[by_message] = _lower(schedule, by_message)
    return known[by_message]


def _lower(schedule: Schedule, by_message: bool) -> Steps:
    rounds = None if schedule.flags or by_message else schedule.rounds
    if rounds is not None:
        steps = _in_rounds(schedule, rounds)
    elif schedule.is_in_order and (schedule.sizes or not (by_message and schedule.rounds is not None)):
        steps = _in_order(schedule)
    else:
        if schedule.sizes or schedule.flags:
            raise ScheduleError("operations with flags, or on learned sizes, must be in order (see in_order)")
        return Steps(schedule, tuple(_by_dependencies(schedule)), False)
    return Steps(schedule, tuple(_chained(schedule, steps)), True)


def without(steps: Steps, idle: Iterable[int]) -> Steps:
    """Steps in sequence, less the operations that have nothing to do, and the steps that then have none."""
    gone = frozenset(idle)
    kept = [(step.kind, tuple(op for op in step.ops if op not in gone)) for step in steps.steps]
    return Steps(steps.schedule, tuple(_chained(steps.schedule, kept)), True)


def is_sized(schedule: Schedule, op: Op) -> bool:
    """Whether what an operation moves lies where the sizes of other ranks' blocks say: where sizes are exchanged,
    blocks of ``shared`` that are not all this rank's own. Those it places from its own sizes alone. Where each rank has
    one block, others' matter to messages only (`Schedule.knows`)."""
    if schedule.knows:
        return isinstance(op, (Send, Recv)) and op.region.buffer in ("shared", "scratch")
    return bool(schedule.sizes) and any(
        schedule.holds[block][0] != schedule.rank
        for region in (*reads(op), *writes(op))
        if region.buffer == "shared"
        for block in region.blocks
    )


Part = tuple[Kind, tuple[int, ...]]


def _chained(schedule: Schedule, parts: Iterable[Part]) -> Iterable[Step]:
    """Steps in sequence, of which those without operations are left out."""
    after: tuple[int, ...] = ()
    for index, (kind, ops) in enumerate(part for part in parts if part[1]):
        yield Step(kind, ops, after, any(is_sized(schedule, schedule.ops[op]) for op in ops))
        after = (index,)


def _in_rounds(schedule: Schedule, rounds: Iterable[tuple[int, ...]]) -> Iterable[Part]:
    """Round by round: messages and transfers begin, copies are done, all are waited for."""
    for members in rounds:
        kinds: dict[Kind, list[int]] = {Kind.START: [], Kind.TRANSFER: []}
        for index in members:
            op = schedule.ops[index]
            kinds.setdefault(Kind.START if isinstance(op, MESSAGES) else _LOCAL[type(op)], []).append(index)
        for kind, ops in kinds.items():
            yield kind, tuple(ops)
        yield Kind.WAIT, members


def _in_order(schedule: Schedule) -> Iterable[Part]:
    """One operation after the other; messages that follow each other begin together. What goes on in the background
    is waited for where a join says so, or at the end."""
    batch: list[int] = []
    outstanding: dict[int, None] = {}
    for index, op in enumerate(schedule.ops):
        if isinstance(op, MESSAGES):
            batch.append(index)
            continue
        yield Kind.START, tuple(batch)
        outstanding.update(dict.fromkeys(batch))
        batch = []
        if isinstance(op, Join):
            yield Kind.WAIT, tuple(dep for dep in op.deps if dep in outstanding)
            for dep in op.deps:
                outstanding.pop(dep, None)
        else:
            yield _LOCAL[type(op)], (index,)
            if index in schedule.overlapping:
                outstanding[index] = None
    yield Kind.START, tuple(batch)
    yield Kind.WAIT, (*outstanding, *batch)


def _by_dependencies(schedule: Schedule) -> Iterable[Step]:
    """Messages that wait for the same operations begin together, and are waited for one by one; a
    join is a step that waits for the steps of what it joins."""
    together: dict[tuple[int, ...], list[int]] = {}
    for index, op in enumerate(schedule.ops):
        if isinstance(op, MESSAGES):
            together.setdefault(op.deps, []).append(index)
    complete: dict[int, int] = {}  # the step with which an operation is
    count = 0
    for index, op in enumerate(schedule.ops):
        if index in complete:
            continue
        after = tuple(complete[dep] for dep in op.deps)
        if isinstance(op, MESSAGES):
            ops = together[op.deps]
            yield Step(Kind.START, tuple(ops), after)
            for each in ops:
                yield Step(Kind.WAIT, (each,), (count,))
            complete.update(zip(ops, range(count + 1, count + 1 + len(ops)), strict=True))
            count += 1 + len(ops)
        else:
            yield Step(Kind.WAIT if isinstance(op, Join) else _LOCAL[type(op)], (index,), after)
            complete[index] = count
            count += 1
