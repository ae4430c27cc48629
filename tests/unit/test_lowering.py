"""Steps: rounds, order, overlap; every step names those it waits for, and no dependency is lost."""

from __future__ import annotations

import pytest

from hiercoll.algorithms import REGISTRY
from hiercoll.errors import ScheduleError
from hiercoll.schedule import MESSAGES, RECV, SEND, Builder, Copy, Join, Recv, Schedule, Send, in_order, reads
from hiercoll.schedule.lowering import Kind, Steps, is_sized, lower, without
from hiercoll.topology import parse_layout

LAYOUTS = ("1x1", "1x2", "2x2", "3+2", "2x3:cyclic")


def shape(steps: Steps) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Steps in short."""
    return [(step.kind.name, step.ops, step.after) for step in steps.steps]


def test_rounds() -> None:
    """Messages of a round begin together, before its copies, and all of it is waited for."""
    b = Builder(0)
    with b.round():
        b.copy(SEND[0], RECV[0])
        b.send(1, SEND[1])
        b.recv(1, RECV[1])
    with b.round():
        b.send(1, SEND[1], tag=1)
    steps = lower(b.build())
    assert steps.in_sequence and shape(steps) == [
        ("START", (1, 2), ()),
        ("COPY", (0,), (0,)),
        ("WAIT", (0, 1, 2), (1,)),
        ("START", (4,), (2,)),
        ("WAIT", (4,), (3,)),
    ]


def test_in_order_with_flags() -> None:
    """Messages that follow each other begin together, and are waited for where something needs them."""
    b = Builder(0)
    shared = b.shared(2)
    free = b.wait([1], 1, previous=True)
    arriving = b.recv(2, shared[1], after=[free])
    put = b.copy(SEND[0], shared[0], after=[free])
    b.send(2, shared[0], after=[put])
    b.signal(0, after=[arriving])
    steps = lower(in_order(b.build()))
    assert steps.in_sequence and shape(steps) == [
        ("WAIT_FLAGS", (0,), ()),
        ("START", (1,), (0,)),
        ("COPY", (2,), (1,)),
        ("START", (3,), (2,)),
        ("WAIT", (1,), (3,)),
        ("RAISE_FLAG", (5,), (4,)),
        ("WAIT", (3,), (5,)),
    ]


def test_dataflow() -> None:
    """Messages that wait for the same begin together; each is waited for by itself."""
    b = Builder(0)
    one, two = b.recv(1, RECV[1], after=[]), b.recv(2, RECV[2], after=[])
    b.send(1, RECV[2], after=[two])
    b.copy(RECV[1], RECV[0], after=[b.join([one, two])])
    steps = lower(b.build())
    assert not steps.in_sequence and shape(steps) == [
        ("START", (0, 1), ()),
        ("WAIT", (0,), (0,)),
        ("WAIT", (1,), (0,)),
        ("START", (2,), (2,)),
        ("WAIT", (2,), (3,)),
        ("WAIT", (3,), (1, 2)),
        ("COPY", (4,), (5,)),
    ]
    flow = steps.flow
    assert flow.first == [0] and flow.completes[0] == 1 and flow.number == 5
    assert flow.dependents[2] == [3, 5] and not flow.dependents[0]


def test_by_message() -> None:
    """For traces, a round's messages are waited for one by one."""
    b = Builder(0)
    with b.round():
        b.send(1, SEND[1])
        b.recv(1, RECV[1])
    steps = lower(b.build(), by_message=True)
    assert not steps.in_sequence and sum(step.kind is Kind.WAIT for step in steps.steps) == 3


def test_nothing_to_do() -> None:
    """Steps without operations are left out, and the others follow each other."""
    b = Builder(0)
    with b.round():
        b.copy(SEND[0], RECV[0])
        b.send(1, SEND[1])
    steps = without(lower(b.build()), [1])
    assert shape(steps) == [("COPY", (0,), ()), ("WAIT", (0,), (0,))]
    assert not lower(Schedule(0, ())).steps


def test_remembered() -> None:
    """Lowered once; equal schedules need not be the same one."""
    one, other = Builder(0).build(), Builder(0).build()
    assert lower(one) is lower(one) and lower(one).schedule is one and lower(other).schedule is other


def test_learned_sizes() -> None:
    """What lies where others' sizes say comes after they have been learned; this rank's own does not wait."""
    topology = parse_layout("3+2")
    entry = REGISTRY["alltoallv"]["aggregate"]
    for rank in range(topology.size):
        schedule = entry.schedule(topology, rank, entry.resolve({}))
        steps = lower(schedule)
        sized = [index for index, step in enumerate(steps.steps) if step.sized]
        learning = [
            index
            for index, step in enumerate(steps.steps)
            for op in (schedule.ops[op] for op in step.ops)
            if isinstance(op, Copy) and op.target.buffer == "sizes"
        ]
        assert steps.in_sequence and sized and max(learning) < min(sized)
        own = [op for op in schedule.ops if isinstance(op, Copy) and op.target.buffer == "shared"]
        assert own and not any(is_sized(schedule, op) for op in own)


@pytest.mark.parametrize("layout", ["2x3", "4x4", "3+1+2"])
def test_large_blocks_follow_each_other(layout: str) -> None:
    """At most ``window`` large blocks are under way each way, and no batch is waited for: on equal nodes, when one
    begins, all but one of them still are."""
    topology, window = parse_layout(layout), 2
    for rank in range(topology.size):
        schedule = REGISTRY["alltoallv"]["aggregate"].schedule(topology, rank, {"window": window})
        under_way, most, left = set[int](), 0, list[int]()
        for step in lower(schedule).steps:
            large = {op for op in step.ops if isinstance(schedule.ops[op], Send) and reads(schedule.ops[op])[0].part}
            if step.kind is Kind.START and large:
                left.append(len(under_way))
                under_way |= large
                most = max(most, len(under_way))
            elif step.kind is Kind.WAIT:
                under_way -= large
        assert most == window and not under_way
        if len(set(topology.node_sizes)) == 1:
            assert left == [0] + [window - 1] * (topology.size - 1 - window)


def test_learned_sizes_of_slots() -> None:
    """Messages of them wait for that, copies do not."""
    topology = parse_layout("3+2")
    for collective in ("gatherv", "scatterv"):
        for schedule in REGISTRY[collective]["aggregate"].system(topology, {}).schedules():
            begun = [step for step in lower(schedule).steps if step.sized and step.kind is not Kind.WAIT]
            sized = [schedule.ops[op] for step in begun for op in step.ops]
            message = Send if collective == "gatherv" else Recv
            assert [type(op) for op in sized] == ([message] if schedule.rank == 3 else [])


def test_learned_sizes_in_order_only() -> None:
    """Steps that overlap freely could come before what they need."""
    b = Builder(0)
    arriving = b.recv(1, RECV[1], after=[])
    b.recv(2, RECV[2], after=[])
    b.copy(RECV[1], RECV[0], after=[arriving])
    b.sizes(2)
    with pytest.raises(ScheduleError, match="in order"):
        lower(b.build())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("collective", sorted(REGISTRY))
def test_every_dependency_is_respected(collective: str, layout: str) -> None:
    """Of every algorithm and variant: an operation begins after all that it waits for is complete."""
    topology = parse_layout(layout)
    for entry in REGISTRY[collective].values():
        for params in entry.variants():
            if entry.refusal(topology, params) is None:
                for rank in {0, topology.size - 1}:
                    schedule = entry.schedule(topology, rank, params)
                    for by_message in (False, True):
                        check(lower(schedule, by_message=by_message))


def check(steps: Steps) -> None:
    """Each operation is in the step that begins it and, if it goes on, in the one that waits for it."""
    ops = steps.schedule.ops
    before: list[set[int]] = []
    begins: dict[int, int] = {}
    completes: dict[int, int] = {}
    for index, step in enumerate(steps.steps):
        assert all(other < index for other in step.after) and step.ops
        assert not steps.in_sequence or step.after == ((index - 1,) if index else ())
        before.append(set(step.after).union(*(before[other] for other in step.after)))
        for op in step.ops:
            assert (step.kind is Kind.WAIT) or op not in begins
            begins.setdefault(op, index)
            completes[op] = index
    for index, op in enumerate(ops):
        if isinstance(op, MESSAGES):
            assert steps.steps[begins[index]].kind is Kind.START and steps.steps[completes[index]].kind is Kind.WAIT
        elif not isinstance(op, Join):
            assert index in begins
    needed: list[set[int]] = []  # operations that are not joins, by operation
    for op in ops:
        needed.append(set().union(*({d} if not isinstance(ops[d], Join) else needed[d] for d in op.deps)))
    for index, op in enumerate(ops):
        if not isinstance(op, Join):
            assert all(completes[dep] in before[begins[index]] for dep in needed[index])


def test_flags_out_of_order_are_refused() -> None:
    """Engines raise and await flags one after the other; what does not say so cannot run."""
    b = Builder(0)
    b.signal(0)
    b.copy(SEND[0], RECV[0])
    with pytest.raises(ScheduleError, match="in order"):
        lower(b.build())
    assert lower(in_order(b.build())).in_sequence


def test_steps_are_kept_with_their_schedule() -> None:
    """Asked for twice, made once; those for traces are others."""
    b = Builder(0)
    with b.round():
        b.copy(SEND[0], RECV[0])
    schedule = b.build()
    assert lower(schedule) is lower(schedule)
    assert lower(schedule, by_message=True) is not lower(schedule)
