"""Passes that need no more than a rank's own schedule."""

from __future__ import annotations

from dataclasses import replace

from hiercoll.schedule.ops import (
    MESSAGES,
    NOTHING,
    Copy,
    Deps,
    Get,
    Join,
    Notify,
    Offer,
    Op,
    Reduce,
    Region,
    Schedule,
    Send,
    Signal,
    reads,
    writes,
)


def in_order(schedule: Schedule) -> Schedule:
    """``schedule`` with its operations one after the other, as they are listed.

    Messages are started in their turn and completed by a join just before the first
    operation that waits for them. What runs so needs no bookkeeping, which is what
    flags in shared memory are for; that nothing waits for ever is for `verify` to say.
    """
    ops: list[Op] = []
    completes: list[frozenset[int]] = []  # per operation of ``schedule``: messages that it stands for
    outstanding: set[int] = set()
    last: Deps = ()
    for op in schedule.ops:
        deps = op.deps
        needed = completes[deps[0]] if len(deps) == 1 else frozenset[int]().union(*map(completes.__getitem__, deps))
        if isinstance(op, Join):
            completes.append(needed)
            continue
        if due := sorted(needed & outstanding):
            ops.append(Join((*last, *due)))
            outstanding.difference_update(due)
            last = (len(ops) - 1,)
        is_message = isinstance(op, MESSAGES)
        ops.append(op._replace(deps=last))
        completes.append(frozenset({len(ops) - 1} if is_message else ()))
        if is_message:
            outstanding.add(len(ops) - 1)
        else:
            last = (len(ops) - 1,)
    return replace(schedule, ops=tuple(ops))


def overlapped(schedule: Schedule) -> Schedule:
    """``schedule``, whose operations are in order, with its copies, gets and reductions going on in the background: a
    join waits for those that an operation clashes with (both use a block, and one writes it), and for all of them
    before anything is told to others. For memory that is copied asynchronously."""
    ops: list[Op] = []
    moved: list[int] = []  # by operation of ``schedule``
    running: dict[int, Op] = {}
    last: Deps = ()

    def settle(due: list[int]) -> None:
        nonlocal last
        if due:
            ops.append(Join((*last, *due)))
            last = (len(ops) - 1,)
            for index in due:
                del running[index]

    for op in schedule.ops:
        tells = isinstance(op, (Offer, Notify, Signal))
        settle([index for index, other in running.items() if tells or _clash(op, other)])
        index = len(ops)
        if isinstance(op, Join):
            messages = [moved[dep] for dep in op.deps if isinstance(schedule.ops[dep], MESSAGES)]
            ops.append(Join((*last, *messages)))
        else:
            ops.append(op._replace(deps=last))
        moved.append(index)
        if isinstance(op, (Copy, Get, Reduce)):
            running[index] = op
        elif not isinstance(op, MESSAGES):
            last = (index,)
    return replace(schedule, ops=tuple(ops))


def _clash(one: Op, other: Op) -> bool:
    """Whether both use a block of a buffer, and one writes it."""
    mine, theirs = [*reads(one), *writes(one)], [*reads(other), *writes(other)]
    return any(
        a.buffer == b.buffer and (a in writes(one) or b in writes(other)) and not set(a.blocks).isdisjoint(b.blocks)
        for a in mine
        for b in theirs
    )


def in_place(schedule: Schedule, own_block: bool) -> Schedule:
    """``schedule`` with its input already lying in the receive buffer (MPI_IN_PLACE).

    What was ``send[i]`` lies in ``recv[i]`` or, where the input is the rank's ``own_block`` among those of all ranks,
    in ``recv[rank]``. Copies of a region onto itself become empty. Whether the result is still right is for
    `verify` to say.
    """

    def moved(region: Region) -> Region:
        if region.buffer != "send":
            return region
        blocks = range(schedule.rank, schedule.rank + 1) if own_block else region.blocks
        return Region("recv", blocks, region.part, region.like)

    def rewritten(op: Op) -> Op:
        if isinstance(op, Send):
            return op._replace(region=moved(op.region))
        if isinstance(op, Copy):
            op = op._replace(source=moved(op.source))
            return Copy(NOTHING, NOTHING, op.deps) if op.source == op.target else op
        if isinstance(op, Reduce):
            return op._replace(left=moved(op.left), right=moved(op.right))
        return op

    return replace(schedule, ops=tuple(map(rewritten, schedule.ops)))
