"""Transforms of schedules: proved for every algorithm, and nothing of private memory is sent any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hiercoll.algorithms import REGISTRY
from hiercoll.contracts import Contract
from hiercoll.errors import ConstraintError, ScheduleError
from hiercoll.memory import BlockLayout
from hiercoll.model.cost import count_rank
from hiercoll.model.simulate import simulate
from hiercoll.schedule import (
    INCOMING,
    RECV,
    SEND,
    AcceptOffer,
    AwaitNotice,
    Copy,
    Get,
    Join,
    Notify,
    Offer,
    Op,
    Recv,
    Schedule,
    Send,
)
from hiercoll.schedule.lowering import Kind, lower
from hiercoll.schedule.transports import ON_HOST, Transport, cut, packed, staged
from hiercoll.tools.loopback import run
from hiercoll.tools.proving import prove
from hiercoll.tools.timeline import to_svg, to_trace
from hiercoll.topology import Topology, parse_layout
from hiercoll.verify import verify

LAYOUTS = ("1", "2x3", "3+1", "2x4:cyclic", "5+3")
CASES = [
    (collective, name, tuple(params.items()))
    for collective in ("alltoall", "allgather")
    for name, entry in REGISTRY[collective].items()
    for params in entry.variants()
]


def schedules(collective: str, name: str, params: object, topology: Topology, inplace: bool) -> list[Schedule]:
    entry = REGISTRY[collective][name]
    given = dict(params)  # type: ignore[call-overload]
    if entry.refusal(topology, given) or (inplace and not entry.in_place):
        pytest.skip("cannot run so")
    return [entry.schedule(topology, rank, given, inplace=inplace) for rank in range(topology.size)]


def proved(made: list[Schedule], collective: str, topology: Topology, inplace: bool) -> bool:
    contract = Contract(collective, topology.size, made[0].segments, in_place=inplace)
    return verify(made, contract, topology).require().ok


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("collective", "name", "params"), CASES)
@pytest.mark.parametrize("inplace", [False, True])
def test_staged(collective: str, name: str, params: object, layout: str, inplace: bool) -> None:
    """Proved; messages are of the host's memory only, and rounds stay rounds."""
    topology = parse_layout(layout)
    plain = schedules(collective, name, params, topology, inplace)
    made = [staged(schedule) for schedule in plain]
    assert proved(made, collective, topology, inplace)
    for before, after in zip(plain, made, strict=True):
        assert {op.region.buffer for op in after.ops if isinstance(op, Send | Recv)} <= set(ON_HOST)
        assert (before.rounds is None) == (after.rounds is None)
        assert before.is_in_order <= after.is_in_order or not before.flags
        assert (before.scratch, before.shared, before.flags, before.tags) == (
            after.scratch, after.shared, after.flags, after.tags,
        )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("collective", "name", "params"), CASES)
@pytest.mark.parametrize("inplace", [False, True])
def test_packed(collective: str, name: str, params: object, layout: str, inplace: bool) -> None:
    """Proved; each message is of blocks that lie together, and nothing else has changed."""
    topology = parse_layout(layout)
    plain = schedules(collective, name, params, topology, inplace)
    made = [packed(schedule) for schedule in plain]
    assert proved(made, collective, topology, inplace)
    for before, after in zip(plain, made, strict=True):
        messages = [op for op in after.ops if isinstance(op, Send | Recv)]
        assert all(op.region.is_whole for op in messages if op.region.buffer not in ON_HOST)
        assert (before.rounds is None) == (after.rounds is None) and before.tags == after.tags
        apart = [op for op in before.ops if isinstance(op, Send | Recv) and op.region.buffer not in ON_HOST]
        assert (after == before) == all(op.region.is_whole for op in apart)


@pytest.mark.parametrize(("collective", "name", "params"), CASES)
def test_staged_in_parts(collective: str, name: str, params: object) -> None:
    """Three segments, each on its own."""
    topology = parse_layout("2x3")
    plain = schedules(collective, name, params, topology, False)
    if plain[0].flags or plain[0].segments > 1:
        with pytest.raises(ConstraintError, match="without segments and flags"):
            staged(plain[0], 3)
        return
    made = [staged(schedule, 3) for schedule in plain]
    assert proved(made, collective, topology, False)
    assert made[0].host == staged(plain[0]).host or made[0].rounds is None


def through_node(plain: list[Schedule], topology: Topology, segments: int = 1) -> list[Schedule]:
    transport = Transport(False, segments, shared=True)
    return [transport.schedule(plain.__getitem__, topology, rank) for rank in range(topology.size)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("collective", "name", "params"), CASES)
@pytest.mark.parametrize("inplace", [False, True])
def test_staged_through_the_node(collective: str, name: str, params: object, layout: str, inplace: bool) -> None:
    """Proved, in parts too; within a node, no private memory is sent any more, and rounds stay rounds."""
    topology = parse_layout(layout)
    plain = schedules(collective, name, params, topology, inplace)
    made = through_node(plain, topology)
    assert proved(made, collective, topology, inplace)
    for rank, (before, after) in enumerate(zip(plain, made, strict=True)):
        messages = [op for op in after.ops if isinstance(op, Send | Recv)]
        near = [op for op in messages if topology.node_of[op.peer] == topology.node_of[rank]]
        assert {op.region.buffer for op in near} <= {"shared"}
        assert (before.rounds is None) == (after.rounds is None)
    if not plain[0].flags and plain[0].segments == 1:
        assert proved(through_node(plain, topology, 3), collective, topology, inplace)


def test_places_of_the_node() -> None:
    """One for each block, where what goes to several ranks has one for all of them."""
    topology = parse_layout("2x3")
    for collective, name, blocks in (("alltoall", "pairwise", 6), ("allgather", "direct", 3)):
        made = through_node(schedules(collective, name, (), topology, False), topology)
        assert [schedule.shared for schedule in made] == [blocks] * 6


def test_a_lost_notice_is_found() -> None:
    """Without what a sender is told at the end, it would write over what has not been read, in the next start; without
    what a receiver is told, it would read too early."""
    topology = parse_layout("1x3")
    made = through_node(schedules("alltoall", "scatter_destination", (), topology, False), topology)
    for tags in ([1], [0]):
        ops = [
            [Join(op.deps) if isinstance(op, Notify | AwaitNotice) and op.tag in tags else op for op in schedule.ops]
            for schedule in made
        ]
        mutants = [replace(schedule, ops=tuple(own)) for schedule, own in zip(made, ops, strict=True)]
        assert "may run while" in str(verify(mutants, Contract("alltoall", 3), topology).findings[0])


def test_copies_with_flags_go_on_in_the_background() -> None:
    """In scripts, what is ready is copied while others are waited for."""
    topology = parse_layout("2x4")
    plain = schedules("allgather", "shared", (), topology, False)
    made = through_node(plain, topology)
    assert all(schedule.overlapping and schedule.is_in_order for schedule in made)
    assert not any(schedule.overlapping for schedule in plain)
    steps = lower(made[0])
    waits = [set(step.ops) for step in steps.steps if step.kind is Kind.WAIT]
    assert all(any(index in ops for ops in waits) for index in made[0].overlapping)


def test_a_copy_that_is_not_waited_for_is_found() -> None:
    """The proof says whether what goes on in the background is waited for in time."""
    topology = parse_layout("2x4")
    made = through_node(
        schedules("alltoall", "grouped", {"form": "share", "memory": "shared"}.items(), topology, False), topology
    )
    found = 0
    for index, op in enumerate(made[1].ops):
        for dep in op.deps if isinstance(op, Join) else ():
            if dep in made[1].overlapping:
                changed = op._replace(deps=tuple(each for each in op.deps if each != dep))
                ops = (*made[1].ops[:index], changed, *made[1].ops[index + 1 :])
                mutant = [made[0], replace(made[1], ops=ops), *made[2:]]
                assert not verify(mutant, Contract("alltoall", 8), topology).ok
                found += 1
    assert found


def test_one_copy_out_and_one_in() -> None:
    """What a round sends from one buffer is copied out at once, and what it receives is copied in at once."""
    topology = parse_layout("2x3")
    made = staged(REGISTRY["alltoall"]["scatter_destination"].schedule(topology, 0))
    copies = [op for op in made.ops if isinstance(op, Copy)]
    assert sorted((op.source.buffer, op.target.buffer, op.source.size) for op in copies) == [
        ("host", "recv", 5), ("send", "host", 5), ("send", "recv", 1),
    ]  # fmt: skip


def test_what_goes_to_several_is_copied_out_once() -> None:
    """An allgather's own block."""
    made = staged(REGISTRY["allgather"]["direct"].schedule(parse_layout("2x3"), 0))
    out = [op for op in made.ops if isinstance(op, Copy) and op.target.buffer == "host"]
    assert [op.source.size for op in out] == [1]
    assert made.host == 1 + 5


def test_a_lost_copy_is_found() -> None:
    """The proof covers the host's buffer: without waiting for the copy out, it is refuted."""
    topology = parse_layout("2x3")
    made = [staged(REGISTRY["alltoall"]["eager"].schedule(topology, rank)) for rank in range(6)]
    ops = list(made[2].ops)
    at = next(i for i, op in enumerate(ops) if isinstance(op, Send))
    ops[at] = ops[at]._replace(deps=())
    made[2] = Schedule(2, tuple(ops), made[2].scratch, host=made[2].host)
    assert not verify(made, Contract("alltoall", 6), topology).ok


def test_cut_keeps_segments_apart() -> None:
    """Operations of one segment depend on, and touch, that segment only."""
    made = cut(REGISTRY["alltoall"]["bruck"].schedule(parse_layout("2x3"), 1), 4)
    part = {}
    for index, op in enumerate(made.ops):
        own = {part[dep] for dep in op.deps} | {r.part for r in (getattr(op, "region", None) and [op.region]) or []}  # type: ignore[union-attr]
        part[index] = index // (len(made.ops) // 4)
        assert own <= {part[index]}
    assert np.unique(list(part.values())).tolist() == [0, 1, 2, 3]


def by_peer(plain: list[Schedule], topology: Topology, segments: int = 0) -> list[Schedule]:
    transport = Transport(True, segments)
    return [transport.schedule(plain.__getitem__, topology, rank) for rank in range(topology.size)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("collective", "name", "params"), CASES)
@pytest.mark.parametrize("inplace", [False, True])
def test_peer(collective: str, name: str, params: object, layout: str, inplace: bool) -> None:
    """Proved, staged between nodes too; within a node, nothing of private memory is sent any more."""
    topology = parse_layout(layout)
    plain = schedules(collective, name, params, topology, inplace)
    made = by_peer(plain, topology)
    assert proved(made, collective, topology, inplace)
    assert proved(by_peer(plain, topology, 1), collective, topology, inplace)
    for rank, schedule in enumerate(made):
        messages = [op for op in schedule.ops if isinstance(op, Send | Recv)]
        near = [op for op in messages if topology.node_of[op.peer] == topology.node_of[rank]]
        assert not [op for op in near if op.region.buffer not in ON_HOST]
        gets = [op for op in schedule.ops if isinstance(op, Get)]
        assert len(gets) == sum(isinstance(op, Notify) for op in schedule.ops)


@pytest.mark.parametrize("layout", ["1x7", "5+3:cyclic", "7x1"])
@pytest.mark.parametrize(
    ("collective", "name"), [*(("bcast", name) for name in REGISTRY["bcast"]), ("allreduce", "ring")]
)
def test_vectors(collective: str, name: str, layout: str) -> None:
    """Ranks that only send have rounds even by peer; their offers do not pass through the host."""
    topology = parse_layout(layout)
    for params in REGISTRY[collective][name].variants():
        if REGISTRY[collective][name].refusal(topology, params) is not None:
            continue
        for transport in (Transport(True, 0), Transport(True, 1), Transport(False, 1)):
            for root in (0, topology.size // 2):
                assert prove(collective, name, params, topology, transport=transport, root=root).require().ok


@pytest.mark.parametrize(("collective", "name", "params"), CASES)
def test_peer_in_parts(collective: str, name: str, params: object) -> None:
    """Gets and messages of three segments, each on its own."""
    topology = parse_layout("2x3")
    plain = schedules(collective, name, params, topology, False)
    if plain[0].flags or plain[0].segments > 1:
        pytest.skip("not cut in parts")
    assert proved(by_peer(plain, topology, 3), collective, topology, False)


@pytest.mark.parametrize("name", ["scatter_destination", "bruck", "hierarchical", "grouped", "eager"])
def test_peer_in_the_loopback(name: str) -> None:
    """Real bytes."""
    topology, ranks, block = parse_layout("3+2"), 5, 24
    made = by_peer(schedules("alltoall", name, (), topology, False), topology)
    values = np.random.default_rng(1).integers(0, 255, (ranks, ranks, block), dtype=np.uint8)
    recvs = [np.empty((ranks, block), np.uint8) for _ in range(ranks)]
    run(made, topology, list(values), recvs, layout=BlockLayout(block))
    np.testing.assert_array_equal(np.array(recvs), values.transpose(1, 0, 2))


def without_one_dependency(made: list[Schedule]) -> Iterator[tuple[Op, Op, list[Schedule]]]:
    """All mutants of rank 1 that lack a dependency of a get, or on a get or a notice."""
    own = made[1]
    for index, op in enumerate(own.ops):
        for dep in op.deps:
            other = own.ops[dep]
            if isinstance(op, Get) or isinstance(other, Get | AwaitNotice):
                changed = op._replace(deps=tuple(each for each in op.deps if each != dep))
                yield (
                    op,
                    other,
                    [made[0], replace(own, ops=(*own.ops[:index], changed, *own.ops[index + 1 :])), *made[2:]],
                )


@pytest.mark.parametrize(("collective", "name"), [("alltoall", "bruck"), ("allgather", "ring"), ("allgather", "bruck")])
def test_a_lost_dependency_of_a_get_is_found(collective: str, name: str) -> None:
    """A get that does not wait for its offer, a notice that does not wait for its get; and ends
    of rounds that do not wait for a get or a notice, where a later round needs that."""
    topology = parse_layout("2x4")
    made = by_peer(schedules(collective, name, (), topology, False), topology)
    later = 0  # mutants of what comes after gets and notices
    for op, other, mutant in without_one_dependency(made):
        ok = verify(mutant, Contract(collective, 8), topology).ok
        assert not ok or isinstance(op, (Join, *INCOMING)), (op, other)
        later += not ok and not isinstance(op, Get | Notify)
    assert later > 0


def test_what_others_get_they_get_in_time() -> None:
    """Without the notice, the caller could write to its buffer while another rank copies from it."""
    topology = parse_layout("1x2")
    made = by_peer(schedules("alltoall", "scatter_destination", (), topology, False), topology)
    assert verify(made, Contract("alltoall", 2), topology).ok
    silent = [
        replace(s, ops=tuple(Join(op.deps) if isinstance(op, Notify | AwaitNotice) else op for op in s.ops))
        for s in made
    ]
    proof = verify(silent, Contract("alltoall", 2), topology)
    assert "may run when that rank has ended" in str(proof.findings[0])
    unasked = [replace(s, ops=tuple(op._replace(deps=()) if isinstance(op, Get) else op for op in s.ops)) for s in made]
    assert "says that it may" in str(verify(unasked, Contract("alltoall", 2), topology).findings[0])


def test_nobody_gets_from_another_node() -> None:
    made = by_peer(schedules("alltoall", "scatter_destination", (), parse_layout("1x2"), False), parse_layout("1x2"))
    proof = verify(made, Contract("alltoall", 2), parse_layout("2x1"))
    assert "which is no other rank of its node" in str(proof.findings[0])


def two_ends(out: Op, into: Op) -> list[Schedule]:
    """Rank 0 sends something, rank 1 receives something, and both their own block."""
    own = [Copy(SEND[0], RECV[0], ()), Copy(SEND[0], RECV[1], ())]
    return [Schedule(0, (own[0], out)), Schedule(1, (own[1], into))]


@pytest.mark.parametrize(
    ("out", "into"),
    [
        (Offer(1, 0, "send", ()), AcceptOffer(0, 0, "recv", ())),
        (Offer(1, 0, "send", ()), AwaitNotice(0, 0, ())),
        (Notify(1, 0, ()), AcceptOffer(0, 0, "send", ())),
        (Notify(1, 0, ()), Recv(0, 0, RECV[0], ())),
        (Send(1, 0, SEND[0], ()), AwaitNotice(0, 0, ())),
    ],
)
def test_messages_of_two_kinds_do_not_match(out: Op, into: Op) -> None:
    """By the proof, and in the loopback."""
    topology, made = parse_layout("1x2"), two_ends(out, into)
    finding = verify(made, Contract("allgather", 2), topology).findings[0]
    assert finding.kind == "unmatched" and "are not the two ends of one message" in finding.message
    assert (finding.rank, finding.op) == (1, 1)
    values, recvs = np.zeros((2, 1, 8), np.uint8), [np.empty((2, 8), np.uint8) for _ in range(2)]
    with pytest.raises(ScheduleError, match="are not the two ends of one message"):
        run(made, topology, list(values), recvs, layout=BlockLayout(8))


@pytest.mark.parametrize("op", [Offer(0, 0, "send", ()), AcceptOffer(5, 0, "send", ()), Notify(0, 0, ())])
def test_offers_and_notices_need_another_rank(op: Op) -> None:
    made = [Schedule(0, (op,)), Schedule(1, ())]
    assert "as its peer" in str(verify(made, Contract("allgather", 2), parse_layout("1x2")).findings[0])


def test_an_offer_that_nobody_accepts_is_found() -> None:
    made = [Schedule(0, (Offer(1, 7, "send", ()),)), Schedule(1, (AwaitNotice(0, 8, ()),))]
    texts = [str(each) for each in verify(made, Contract("allgather", 2), parse_layout("1x2")).findings]
    assert "rank 1 never receives offer send to rank 1 (tag 7) (rank 0, op 0)" in texts[0]
    assert "rank 0 never sends what await the notice from rank 0 (tag 8) (rank 1, op 0) waits for" in texts[1]


def test_what_a_peer_schedule_offers_is_counted_and_drawn() -> None:
    """Offers and notices are messages without blocks."""
    topology = parse_layout("1x2")
    made = by_peer(schedules("alltoall", "scatter_destination", (), topology, False), topology)
    assert [schedule.offered for schedule in made] == [{"send"}, {"send"}] and made[0].tags == 2
    counts = count_rank(made[0], topology)
    assert (counts.messages, counts.received, counts.blocks, counts.copies) == (2, 2, 0, 2)
    events = simulate(made, topology, 64)
    assert len(events) == sum(len(schedule.ops) for schedule in made)
    trace = to_trace(made, topology, events, "peer")["traceEvents"]
    names = {event["name"] for event in trace if event["ph"] == "X" and event["pid"] == 1}
    assert {"offer to 1", "offer from 1", "notify 1", "notice from 1"} <= names
    assert sum(event["ph"] == "s" for event in trace) == 4
    assert "rank 0 to rank 1: offer (tag 0)" in to_svg(made, topology, events, "peer")
