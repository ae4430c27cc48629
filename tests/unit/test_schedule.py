"""Regions, the builder, rounds, and the in-place transform."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.algorithms import REGISTRY
from hiercoll.errors import HiercollError, ScheduleError
from hiercoll.schedule import (
    RECV,
    SCRATCH,
    SEND,
    SHARED,
    Buffer,
    Builder,
    Copy,
    Join,
    Recv,
    Reduce,
    Region,
    Schedule,
    Send,
    Signal,
    Wait,
    in_order,
    in_place,
    reads,
    writes,
)
from hiercoll.tools.proving import generate
from hiercoll.topology import parse_layout

# Regions


@pytest.mark.parametrize(
    ("index", "blocks"),
    [
        (3, [3]),
        (slice(2, 5), [2, 3, 4]),
        (slice(None, 3), [0, 1, 2]),
        (slice(1, 8, 3), [1, 4, 7]),
        (slice(0, 8, 3), [0, 3, 6]),
        (slice(4, 4), []),
        ([], []),
        ([5], [5]),
        ([1, 2, 3], [1, 2, 3]),
        ([6, 7, 0, 1], [6, 7, 0, 1]),
        ([3, 2, 1], [3, 2, 1]),
        ([0, 1, 3], [0, 1, 3]),
        ([2, 2], [2, 2]),
        ((7, 4), [7, 4]),
        (range(1, 9, 4), [1, 5]),
        (range(3, 0, -1), [3, 2, 1]),
        ((block for block in (0, 2)), [0, 2]),
    ],
)
def test_indexing_a_buffer(index: Any, blocks: list[int]) -> None:
    """Integers, slices and collections name their blocks in order."""
    region = RECV[index]
    assert region.buffer == "recv" and region.part is None
    assert list(region.blocks) == blocks
    assert region.size == len(blocks)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RECV[3], RECV[3:4]),
        (RECV[3], RECV[[3]]),
        (RECV[0:8:2], RECV[[0, 2, 4, 6]]),
        (RECV[0:8:2], RECV[0:7:2]),
        (RECV[4:4], RECV[[]]),
        (Buffer("recv", 4)[0:3], RECV[4:7]),
        (Buffer("recv", 4)[[0, 5]], RECV[[4, 9]]),
    ],
)
def test_equal_regions(one: Region, other: Region) -> None:
    """What covers the same blocks in the same order is the same region, however it was written."""
    assert one == other and hash(one) == hash(other)


@pytest.mark.parametrize(
    "other", [SEND[0:3], RECV[0:2], RECV[[2, 1, 0]], RECV[0:6:2], RECV[0:3].segment(0), RECV[1:4], RECV[[0, 1, 1]]]
)
def test_different_regions(other: Region) -> None:
    """Buffer, blocks, their order and the part all matter."""
    assert RECV[0:3] != other


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 30), max_size=8), st.integers(0, 40))
def test_any_list_of_blocks(blocks: list[int], offset: int) -> None:
    """Order and offset are kept; evenly and upwards spaced blocks, and only those, become a range."""
    region = Buffer("scratch", offset)[blocks]
    assert list(region.blocks) == [block + offset for block in blocks]
    steps = {b - a for a, b in pairwise(blocks)}
    regular = not steps or (len(steps) == 1 and min(steps) > 0)
    assert isinstance(region.blocks, range) == regular
    assert isinstance(region.blocks, range | tuple)


def test_an_open_end_is_refused() -> None:
    """A buffer does not know its size, so a slice has to."""
    with pytest.raises(ScheduleError, match="end") as caught:
        RECV[2:]
    assert isinstance(caught.value, HiercollError | ValueError)


def test_segments() -> None:
    """A segment is the same part of each block."""
    region = SCRATCH[0:6:2].segment(1)
    assert region == Region("scratch", range(0, 6, 2), 1)
    assert region.size == 3
    assert region != SCRATCH[0:6:2] and region != region.segment(0)


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (RECV[3], "recv[3]"),
        (SEND[2:5], "send[2:5]"),
        (SHARED[0:9:4], "shared[0:9:4]"),
        (SCRATCH[[5, 1]], "scratch[5,1]"),
        (RECV[[9, 8, 7, 6, 5, 4, 3]], "recv[9,8,7,6,5,4,.. 7 blocks]"),
        (RECV[1].segment(2), "recv[1]/2"),
    ],
)
def test_regions_in_words(region: Region, text: str) -> None:
    """Regions read as they are written."""
    assert str(region) == text


def test_pieces_of_a_buffer() -> None:
    """Each call hands out blocks that nobody else has."""
    b = Builder(0)
    first, second = b.scratch(3), b.scratch(2)
    board, other = b.shared(4), b.shared(1)
    assert first[0:3] == SCRATCH[0:3] and second[0:2] == SCRATCH[3:5]
    assert second[[1, 0]] == SCRATCH[[4, 3]]
    assert board[3] == SHARED[3] and other[0] == SHARED[4]
    schedule = b.build()
    assert (schedule.scratch, schedule.shared) == (5, 5)


# Operations and the builder


@pytest.mark.parametrize(
    ("op", "read", "written"),
    [
        (Send(1, 0, SEND[0], ()), (SEND[0],), ()),
        (Recv(1, 0, RECV[0], ()), (), (RECV[0],)),
        (Copy(SEND[0], RECV[1], ()), (SEND[0],), (RECV[1],)),
        (Reduce(SEND[0], SCRATCH[0], RECV[0], ()), (SEND[0], SCRATCH[0]), (RECV[0],)),
        (Signal(0, ()), (), ()),
        (Wait((1,), 0, False, ()), (), ()),
        (Join(()), (), ()),
    ],
)
def test_what_operations_read_and_write(op: Any, read: tuple[Region, ...], written: tuple[Region, ...]) -> None:
    """Sends only read, receives only write, flags do neither."""
    assert reads(op) == read and writes(op) == written


def test_rounds_wait_for_the_round_before() -> None:
    """Operations of a round run together, and all after those of the round before."""
    b = Builder(2)
    with b.round():
        first = [b.copy(SEND[0], RECV[0]), b.send(1, SEND[1])]
    with b.round():
        second = [b.recv(0, RECV[1]), b.send(0, SEND[2])]
    last = b.send(1, RECV[1], tag=4)
    ops = b.build().ops
    assert [ops[i].deps for i in first] == [(), ()]
    [gate] = {ops[i].deps for i in second}
    assert [ops[i] for i in gate] == [Join(tuple(first))]
    assert [ops[i] for i in ops[last].deps] == [Join(tuple(second))]


def test_an_empty_round_changes_nothing() -> None:
    """What follows an empty round waits for what it would have waited for without it."""
    b = Builder(0)
    with b.round():
        b.send(1, SEND[0])
    before = b.gated
    with b.round():
        pass
    assert b.gated == before and len(b.build().ops) == 2


def test_after() -> None:
    """``after`` replaces the gate: just these, or nothing at all."""
    b = Builder(0)
    with b.round():
        one = b.recv(1, SCRATCH[0])
        two = b.recv(2, SCRATCH[1])
    gate = b.gated
    by_default = b.send(1, SCRATCH[1], tag=1)
    early = b.send(2, SCRATCH[0], after=[one])
    free = b.send(3, SEND[0], after=[])
    both = b.copy(SCRATCH[0:2], RECV[0:2], after=(two, one))
    ops = b.build().ops
    assert list(ops[by_default].deps) == gate
    assert ops[early].deps == (one,) and ops[free].deps == () and set(ops[both].deps) == {one, two}


def test_gate() -> None:
    """From a gate on, operations wait for its members, until the next gate."""
    b = Builder(0)
    assert b.gated == []
    one = b.recv(1, RECV[1])
    two = b.recv(2, RECV[2])
    b.gate([two])
    inside = b.send(1, RECV[2])
    b.gate([one, inside])
    behind = b.send(2, RECV[1])
    ops = b.build().ops
    assert [ops[i] for i in ops[inside].deps] == [Join((two,))]
    assert [ops[i] for i in ops[behind].deps] == [Join((one, inside))]


def test_operations_hold_what_they_were_given() -> None:
    """Each call returns the index of an operation with its arguments."""
    b = Builder(1, segments=2)
    indices = [
        b.send(0, SEND[0].segment(1), tag=3),
        b.recv(2, RECV[2], tag=5),
        b.reduce(SEND[1], SCRATCH[0], RECV[1]),
        b.signal(2),
        b.wait([0, 1, 2], 1, previous=True),
        b.join([0, 1]),
    ]
    schedule = b.build()
    assert [schedule.ops[i] for i in indices] == [
        Send(0, 3, SEND[0].segment(1), ()),
        Recv(2, 5, RECV[2], ()),
        Reduce(SEND[1], SCRATCH[0], RECV[1], ()),
        Signal(2, ()),
        Wait((0, 2), 1, True, ()),
        Join((0, 1)),
    ]
    assert (schedule.rank, schedule.segments, schedule.tags, schedule.flags) == (1, 2, 6, 3)


def test_a_wait_for_oneself_is_no_wait() -> None:
    """It still orders what it was to order."""
    b = Builder(3)
    one = b.send(0, SEND[0])
    alone = b.wait([3], 0, after=[one])
    assert b.build().ops[alone] == Join((one,))


def test_tags_and_flags_of_nothing() -> None:
    """A schedule without messages raises no flag and reserves the one tag it could use."""
    b = Builder(0)
    b.copy(SEND[0], RECV[0])
    assert (b.build().tags, b.build().flags) == (1, 0)


def test_schedules_are_immutable() -> None:
    """Neither a schedule nor what it holds can be changed, not even through its builder."""
    b = Builder(0)
    b.send(1, SEND[0])
    schedule = b.build()
    b.recv(1, RECV[1])
    b.scratch(7)
    assert len(schedule.ops) == 1 and schedule.scratch == 0
    with pytest.raises(FrozenInstanceError):
        schedule.ops = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        schedule.ops[0].deps = (1,)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        schedule.ops[0].region.part = 1  # type: ignore[union-attr]
    with pytest.raises(TypeError):
        schedule.ops[0] = Join(())  # type: ignore[index]


# Rounds


def test_rounds_are_found() -> None:
    """Indices by round, the ends of rounds left out; a last round needs no end."""
    b = Builder(0)
    with b.round():
        b.copy(SEND[0], RECV[0])
        b.send(1, SEND[1])
    with b.round():
        b.recv(1, RECV[1])
    b.send(2, SEND[2])
    b.recv(2, RECV[2])
    assert b.build().rounds == ((0, 1), (3,), (5, 6))


def test_rounds_of_little() -> None:
    """No operation is no round; operations that wait for nothing are one."""
    assert Builder(0).build().rounds == ()
    b = Builder(0)
    b.send(1, SEND[1])
    b.recv(1, RECV[1])
    assert b.build().rounds == ((0, 1),)


def _skips_the_gate(b: Builder) -> None:
    with b.round():
        b.recv(1, RECV[1])
    b.send(1, SEND[1], after=[])


def _waits_within_its_round(b: Builder) -> None:
    with b.round():
        first = b.recv(1, RECV[1])
        b.send(1, RECV[1], after=[first])


def _waits_for_part_of_a_round(b: Builder) -> None:
    with b.round():
        first = b.recv(1, RECV[1])
        b.recv(2, RECV[2])
    b.send(2, RECV[1], after=[first])


def _waits_for_an_old_round(b: Builder) -> None:
    with b.round():
        first = b.recv(1, RECV[1])
    gate = b.gated
    with b.round():
        b.recv(2, RECV[2])
    assert first not in gate
    b.send(2, RECV[1], after=gate)


def _gates_on_a_part(b: Builder) -> None:
    first = b.recv(1, RECV[1])
    b.recv(2, RECV[2])
    b.gate([first])
    b.send(2, RECV[1])


def _waits_for_a_flag(b: Builder) -> None:
    with b.round():
        b.wait([1], 0)
    with b.round():
        b.copy(SHARED[0], RECV[0])


def _joins_a_subset_last(b: Builder) -> None:
    first = b.recv(1, RECV[1])
    b.recv(2, RECV[2])
    b.join([first])


def _waits_for_nothing_from_here(b: Builder) -> None:
    with b.round():
        b.recv(1, RECV[1])
    b.gate([])
    b.send(1, SEND[1])


@pytest.mark.parametrize(
    "fill",
    [
        _skips_the_gate,
        _waits_within_its_round,
        _waits_for_part_of_a_round,
        _waits_for_an_old_round,
        _gates_on_a_part,
        _waits_for_a_flag,
        _joins_a_subset_last,
        _waits_for_nothing_from_here,
    ],
)
def test_what_has_no_rounds(fill: Any) -> None:
    """Operations that are more or less free than rounds would have them are a graph."""
    b = Builder(0)
    fill(b)
    assert b.build().rounds is None


def ancestors(schedule: Schedule) -> list[frozenset[int]]:
    """All operations that each operation waits for, the ends of rounds left out."""
    found: list[frozenset[int]] = []
    for op in schedule.ops:
        direct = {dep for dep in op.deps if not isinstance(schedule.ops[dep], Join)}
        found.append(frozenset(direct).union(*(found[dep] for dep in op.deps)))
    return found


def test_running_rounds_is_what_the_dependencies_say() -> None:
    """Of every algorithm: an operation of a round waits for exactly the rounds before."""
    with_rounds = without = 0
    for collective, entries in REGISTRY.items():
        for name, entry in entries.items():
            schedule = generate(collective, name, entry.resolve({}), parse_layout("2x2"))[1]
            if schedule.rounds is None:
                without += 1
                continue
            with_rounds += 1
            waits_for = ancestors(schedule)
            before: frozenset[int] = frozenset()
            for members in schedule.rounds:
                assert all(waits_for[index] == before for index in members), (collective, name)
                before |= set(members)
            moving = {i for i, op in enumerate(schedule.ops) if not isinstance(op, Join)}
            assert before == moving and sum(map(len, schedule.rounds)) == len(moving)
    assert with_rounds and without  # the test has something to say about both


# In place


def example(rank: int = 2) -> Schedule:
    """Every kind of operation once, on the send buffer where it can be."""
    b = Builder(rank, segments=2)
    piece, _ = b.scratch(2), b.shared(3)
    b.copy(SEND[2], RECV[2])
    b.send(0, SEND[0:3].segment(1), tag=1)
    b.copy(SEND[[3, 1]], piece[0:2], after=[])
    b.reduce(SEND[0], piece[0], RECV[0], after=[2])
    b.reduce(piece[1], SEND[1].segment(0), RECV[1], after=[2])
    b.recv(1, RECV[1], tag=2, after=[0, 1])
    b.signal(1)
    b.wait([0], 0)
    b.join([0])
    return b.build()


def test_in_place_reads_the_receive_buffer() -> None:
    """What was send[i] lies in recv[i]; nothing else moves."""
    plain = example()
    moved = in_place(plain, False)
    assert all(region.buffer != "send" for op in moved.ops for region in reads(op))
    assert moved.ops[1] == Send(0, 1, RECV[0:3].segment(1), ())
    assert moved.ops[2] == Copy(RECV[[3, 1]], SCRATCH[0:2], ())
    assert moved.ops[3] == Reduce(RECV[0], SCRATCH[0], RECV[0], (2,))
    assert moved.ops[4] == Reduce(SCRATCH[1], RECV[1].segment(0), RECV[1], (2,))
    assert moved.ops[5:] == plain.ops[5:]
    assert [op.deps for op in moved.ops] == [op.deps for op in plain.ops]
    assert (moved.rank, moved.scratch, moved.shared, moved.flags, moved.segments) == (2, 2, 3, 2, 2)
    assert plain == example()


def test_in_place_allgather_reads_its_own_block() -> None:
    """The contribution of rank r lies in recv[r], whatever it was called."""
    b = Builder(2)
    copied = b.copy(SEND[0], RECV[2])
    b.send(0, SEND[0], after=[copied])
    b.send(1, RECV[2].segment(0))
    moved = in_place(b.build(), True)
    assert moved.ops[1] == Send(0, 0, RECV[2], (copied,))
    assert moved.ops[2] == Send(1, 0, RECV[2].segment(0), ())


@pytest.mark.parametrize(("collective", "source", "rank"), [("alltoall", SEND[0:4:3], 1), ("allgather", SEND[0], 3)])
def test_in_place_copies_onto_themselves_are_empty(collective: str, source: Region, rank: int) -> None:
    """They stay as operations, so that what waits for them still can."""
    b = Builder(rank)
    target = RECV[[0, 3]] if collective == "alltoall" else RECV[3]
    with b.round():
        copied = b.copy(source, target)
    b.copy(source, RECV[[1, 2][: source.size]])
    op, _, other = in_place(b.build(), own_block=collective == "allgather").ops
    assert isinstance(op, Copy) and op.source.size == op.target.size == 0
    assert isinstance(other, Copy) and other.source == target and other.deps == (1,)
    assert copied == 0


@pytest.mark.parametrize("own_block", [False, True])
def test_in_place_twice_is_in_place(own_block: bool) -> None:
    """Nothing is left to be moved."""
    once = in_place(example(), own_block)
    assert in_place(once, own_block) == once


# Operations in order


def test_in_order_completes_messages_when_they_are_needed() -> None:
    b = Builder(0)
    got = b.recv(1, RECV[1], after=[])
    sent = b.send(1, SEND[1], after=[])
    other = b.recv(2, RECV[2], after=[])
    joined = b.join([got, sent])
    b.copy(RECV[1], RECV[0], after=[joined])
    b.signal(0, after=[other])
    ordered = in_order(b.build())
    assert ordered.ops == (
        Recv(1, 0, RECV[1], ()),
        Send(1, 0, SEND[1], ()),
        Recv(2, 0, RECV[2], ()),
        Join((0, 1)),
        Copy(RECV[1], RECV[0], (3,)),
        Join((4, 2)),
        Signal(0, (5,)),
    )
    assert ordered.is_in_order
    assert (ordered.flags, ordered.rank) == (1, 0)
    assert not b.build().is_in_order


@pytest.mark.parametrize("collective", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", ["2x3", "3+1", "1x4", "4+2+1:cyclic"])
def test_in_order_keeps_every_operation_and_dependency(collective: str, layout: str) -> None:
    """Each operation still follows all that it waited for, and what is in order stays as it is."""
    topology = parse_layout(layout)
    for name, entry in REGISTRY[collective].items():
        for params in entry.variants():
            if entry.refusal(topology, params):
                continue
            for schedule in generate(collective, name, params, topology):
                ordered = in_order(schedule)
                assert ordered.is_in_order
                assert in_order(ordered).ops == ordered.ops
                real = [op._replace(deps=()) for op in schedule.ops if not isinstance(op, Join)]
                assert [op._replace(deps=()) for op in ordered.ops if not isinstance(op, Join)] == real
                assert schedule.is_in_order or not schedule.flags


def test_what_is_not_in_order() -> None:
    """A message used before a join completes it, or local operations side by side."""
    for build in (
        lambda b: b.copy(RECV[1], RECV[0], after=[b.recv(1, RECV[1])]),
        lambda b: (b.copy(SEND[0], RECV[0]), b.copy(SEND[1], RECV[1])),
        lambda b: b.gate([b.copy(SEND[0], RECV[0]), b.copy(SEND[1], RECV[1])]),
    ):
        b = Builder(0)
        build(b)
        assert not b.build().is_in_order
        assert in_order(b.build()).is_in_order
    assert Builder(0).build().is_in_order
