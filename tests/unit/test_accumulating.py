"""Reductions accumulated in a wider type: rounded once, as is proved, with the bytes that are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hiercoll.algorithms import REGISTRY, Algorithm, Params
from hiercoll.collectives import COLLECTIVES, fixed_tree
from hiercoll.errors import ConstraintError, ScheduleError
from hiercoll.memory import SINGLE, Array, BlockLayout
from hiercoll.model.cost import count_rank
from hiercoll.model.simulate import simulate
from hiercoll.schedule import (
    RECV,
    SCRATCH,
    SEND,
    Builder,
    Copy,
    Op,
    Recv,
    Reduce,
    Schedule,
    Send,
    accumulated,
    reads,
    without_partial_contributions,
    writes,
)
from hiercoll.schedule.accumulating import _contributed
from hiercoll.schedule.system import System
from hiercoll.schedule.transports import Transport, named
from hiercoll.tools import loopback
from hiercoll.tools.timeline import traffic_matrix
from hiercoll.topology import Topology, parse_layout
from hiercoll.verify import verify

LAYOUTS = ("1x1", "1x2", "1x5", "2x3:cyclic", "2x4", "3+1", "3x1")
VARIANTS = [
    pytest.param(entry, params, id=f"{entry.collective} {entry.spelled(params)}")
    for collective in ("allreduce", "reduce", "reduce_scatter")
    for entry in REGISTRY[collective].values()
    for params in entry.variants()
]
each_variant = pytest.mark.parametrize(("entry", "params"), VARIANTS)


def systems(entry: Algorithm, params: Params) -> Iterator[tuple[Topology, bool, int, System]]:
    """In every way, on layouts that suit it: topology, in place or not, root, and the schedules."""
    for topology in map(parse_layout, LAYOUTS):
        if entry.refusal(topology, params) is not None:
            continue
        for inplace in entry.in_places:
            for root in range(0, topology.size if COLLECTIVES[entry.collective].root else 1, 2):
                how: Any = {"inplace": inplace, "root": root, "accumulate": True}
                yield topology, inplace, root, entry.system(topology, params, **how)


@each_variant
def test_rounded_once(entry: Algorithm, params: Params) -> None:
    """In the order of the algorithm; what one rank has is not rounded."""
    for topology, _, _, system in systems(entry, params):
        proof = verify(system).require()
        assert proof.roundings == (topology.size > 1)
        assert proof.order is not None and proof.order >= entry.order(topology, params)
        assert System.from_json(system.to_json()) == system


@each_variant
def test_bits(entry: Algorithm, params: Params) -> None:
    """Sums of float16 are those of the same contributions in float32, rounded."""
    for topology, inplace, root, system in systems(entry, params):
        plain = entry.system(topology, params, inplace=inplace, root=root)
        items = 3 * system[0].segments * system[0].blocks
        contract = system.contract
        given = [np.random.default_rng(rank).normal(0, 1, (topology.size, items)) for rank in range(topology.size)]
        sides = [contract.sizes(rank) for rank in range(topology.size)]
        blocks, each = system[0].blocks, items // system[0].blocks
        found: list[list[Array]] = []
        for schedules, kind in ((plain.schedules(), SINGLE), (system.schedules(), np.dtype(np.float16))):
            values = [one.astype(np.float16).astype(kind).reshape(-1) for one in given]
            sends = [value[: side["send"] * each].copy() for value, side in zip(values, sides, strict=True)]
            recvs = [value[: side["recv"] * each].copy() for value, side in zip(values, sides, strict=True)]
            layout = BlockLayout(each * kind.itemsize, kind.itemsize, schedules[0].segments)
            how: Any = {"layout": layout, "combine": np.add, "in_place": inplace}
            loopback.run(schedules, topology, sends, recvs, **how, seed=blocks)
            due = [len(contract.shape(rank).due) * each for rank in range(topology.size)]
            found.append([recv[:n] for recv, n in zip(recvs, due, strict=True)])
        for wide, narrow in zip(*found, strict=True):
            assert narrow.dtype == np.float16
            assert narrow.tobytes() == wide.astype(np.float16).tobytes()


@pytest.mark.parametrize("transport", ["staged", "staged:2", "peer"])
@each_variant
def test_rounded_once_on_devices(entry: Algorithm, params: Params, transport: str) -> None:
    """Whatever way messages go; each has as many bytes as between host arrays, but those of the node's buffer."""
    for layout in ("1x4", "3x1", "2+1"):
        topology = parse_layout(layout)
        if entry.refusal(topology, params) is not None:
            continue
        plain = entry.system(topology, params, accumulate=True)
        made = entry.system(topology, params, accumulate=True, transport=named(transport))
        try:
            schedules = made.schedules()
        except ConstraintError:
            assert transport == "staged:2"
            continue
        assert verify(made).require().roundings == 1
        assert System.from_json(made.to_json()) == made
        far = [
            [count_rank(schedule, topology).network_blocks for schedule in each]
            for each in (plain.schedules(), schedules)
        ]
        assert far[0] == far[1]
        messages = {op.region.buffer for each in schedules for op in each.ops if isinstance(op, Send)}
        assert transport == "peer" or messages <= {"host", "wide_host", "shared"}


@each_variant
def test_packed_messages_keep_their_width(entry: Algorithm, params: Params) -> None:
    """Blocks that lie apart, on a device whose memory the MPI library takes."""
    for layout in ("1x4", "2x3:cyclic"):
        topology = parse_layout(layout)
        if entry.refusal(topology, params) is None:
            made = entry.system(topology, params, accumulate=True, transport=Transport(packed=True))
            assert verify(made).require().roundings == 1


def flipped(system: System, source: int, target: int, tag: int, ends: tuple[type, ...] = (Send, Recv)) -> System:
    """With another statement of what one message holds, at those of its ends."""

    def each(schedule: Schedule) -> Schedule:
        def changed(op: Op) -> Op:
            is_source = isinstance(op, Send) and Send in ends and (schedule.rank, op.peer) == (source, target)
            is_target = isinstance(op, Recv) and Recv in ends and (op.peer, schedule.rank) == (source, target)
            if isinstance(op, (Send, Recv)) and (is_source or is_target) and op.tag == tag:
                return op._replace(partial=not op.partial)
            return op

        return replace(schedule, ops=tuple(map(changed, schedule.ops)))

    return system.with_pass(each)


@each_variant
def test_partial_sums_that_are_rounded(entry: Algorithm, params: Params) -> None:
    """Each message that is said not to be of partial sums, one after the other: refuted unless it is of none; each
    that may be of them may be so in any case; and both ends must know. What one rank contributes they find out."""
    for layout in ("1x3", "2x2"):
        topology = parse_layout(layout)
        if entry.refusal(topology, params) is not None:
            continue
        plain = entry.system(topology, params)
        for rank, schedule in enumerate(plain.schedules()):
            own = _contributed(schedule)
            for op in schedule.ops:
                if not isinstance(op, Send) or op.region.buffer == "shared":
                    continue
                message = rank, op.peer, op.tag
                proof = verify(flipped(plain, *message).accumulated())
                if not op.partial or message[1:] in own:
                    proof.require()
                elif proof.findings:
                    found = proof.findings[0].message  # or one rank has rounded what another has not
                    assert "rounded 2 times" in found or "other bits" in found
                else:
                    assert entry.name == "pat"  # which passes on some contributions
                one_end = verify(flipped(plain, *message, ends=(Send,)).accumulated())
                if message[1:] in own and op.partial:
                    one_end.require()
                elif message[1:] not in own:
                    assert "the sizes differ" in one_end.findings[0].message


def test_what_a_rank_contributes() -> None:
    """Copies of it, too, and, in place, what lies in recv before anything is written; not into the node's buffer."""

    def emit(rank: int) -> Schedule:
        b, peer = Builder(rank, blocks=2), 1 - rank
        spare, shared = b.scratch(2), b.shared(2)
        copied = b.copy(SEND[0], spare[0])
        b.send(peer, SEND[0:2], tag=0)
        b.send(peer, spare[0], tag=1, after=[copied])
        b.send(peer, RECV[1], tag=2)
        b.send(peer, RECV[0:2], tag=3, after=[b.recv(peer, RECV[0], tag=5)])
        b.send(peer, SEND[1], tag=4)  # which comes to lie in shared
        b.send(peer, shared[0], tag=6, after=[b.copy(SEND[0], shared[0])])
        b.recv(peer, shared[1], tag=4)
        for tag in (0, 1, 2, 3, 6):
            b.recv(peer, (SCRATCH if tag else spare)[0:1], tag=tag)
        return b.build()

    made = without_partial_contributions(emit, 0)
    said = {(type(op), op.tag): op.partial for op in made.ops if isinstance(op, (Send, Recv))}
    assert [tag for tag in range(7) if not said.get((Send, tag), True)] == [0, 1, 2]
    assert [tag for tag in range(7) if not said.get((Recv, tag), True)] == [0, 1, 2]


def test_sums_are_rounded_where_they_are_made() -> None:
    """The proof finds every partial sum of a chain that is not wide."""
    entry = REGISTRY["allreduce"]["ring"]
    plain = entry.system(parse_layout("1x4"), {})
    partial = [
        (rank, op.peer, op.tag)
        for rank, schedule in enumerate(plain.schedules())
        for op in schedule.ops
        if isinstance(op, Send) and op.partial
    ]
    assert len(partial) == 4 * 2  # but for the first step
    for message in partial:
        assert not verify(flipped(plain, *message).accumulated()).ok


def test_reductions_of_the_programs_elements() -> None:
    """A schedule that combines them as they are is not accumulated, though it says so; nor is one that says nothing."""
    system = REGISTRY["allreduce"]["all_pairs"].system(parse_layout("1x3"), {}, accumulate=True)

    def narrow(schedule: Schedule) -> Schedule:
        """Its last reduction into recv, where all of them are to be wide."""
        at = max(index for index, op in enumerate(schedule.ops) if isinstance(op, Reduce))
        op: Any = schedule.ops[at]
        target = RECV[schedule.rank]
        ops = [*schedule.ops[:at], op._replace(target=target), *schedule.ops[at + 1 :]]
        return replace(schedule, ops=tuple(each for each in ops))

    finding = verify(system.with_pass(narrow)).findings[0]
    assert finding.kind == "malformed" and "reduces elements of the program's type" in finding.message
    plain = REGISTRY["allreduce"]["all_pairs"].system(parse_layout("1x3"), {}).schedules()
    finding = verify(plain, system.contract, system.topology).findings[0]
    assert finding.kind == "contract" and finding.message.endswith("which has been rounded 2 times")
    mixed = [*system.schedules()[:2], replace(plain[2])]
    assert "accumulates in other elements" in verify(mixed, system.contract, system.topology).findings[0].message


@pytest.mark.parametrize(
    ("collective", "name", "times"),
    [
        ("allreduce", "all_pairs", 1.0),  # as many bytes as without
        ("reduce_scatter", "direct", 1.0),
        ("reduce_scatter", "pairwise", 1.0),
        ("reduce_scatter", "ring", (1 + 2 * 6) / 7),
        ("allreduce", "ring", (1 + 2 * 6 + 7) / 14),  # contributions, sums, results
        ("allreduce", "recursive_doubling", (1 + 2 + 2) / 3),
        ("reduce_scatter", "recursive_halving", (4 + 2 * 3) / 7),
        ("allreduce", "rabenseifner", (4 + 2 * 3 + 7) / 14),
        ("allreduce", "swing", (4 + 2 * 3 + 7) / 14),
    ],
)
def test_bytes(collective: str, name: str, times: float) -> None:
    """What is sent, in blocks of the program's elements: of 8 ranks, those times as many as without."""
    topology, entry = parse_layout("2x4"), REGISTRY[collective][name]
    plain, wide = (entry.system(topology, {}, accumulate=accumulate).schedules() for accumulate in (False, True))
    for before, after in zip(plain, wide, strict=True):
        ones, others = count_rank(before, topology), count_rank(after, topology)
        assert others.blocks == pytest.approx(times * ones.blocks) and others.messages == ones.messages
        assert others.received_blocks == pytest.approx(times * ones.received_blocks)
        assert others.nbytes(others.blocks, 2000) == pytest.approx(times * ones.nbytes(ones.blocks, 2000))
    np.testing.assert_allclose(traffic_matrix(wide).sum(axis=1), times * traffic_matrix(plain).sum(axis=1))
    if times == 1:
        assert {region.buffer for each in wide for op in each.ops if isinstance(op, Send) for region in reads(op)} <= {
            "send",
            "recv",
        }
    ends = [simulate(each, topology, 1 << 20)[-1].end for each in (plain, wide)]
    assert ends[1] > ends[0]


def test_forms_of_blocks() -> None:
    """What is there in a form is not converted again; what is written anew is; results are rounded at the end."""
    b = Builder(0, blocks=2)
    spare = b.scratch(1)
    came = b.recv(1, spare[0], partial=False)
    first = b.reduce(SEND[0], spare[0], RECV[0], after=[came])
    second = b.reduce(SEND[0], RECV[0], RECV[0], after=[first])
    sent = b.send(1, RECV[0], after=[second], partial=False)
    third = b.reduce(RECV[0], SEND[1], RECV[0], after=[sent])
    b.copy(SEND[1], RECV[1], after=[third])
    made = accumulated(b.build(), lambda region: region.blocks)
    moved = [(op.source.buffer, op.target.buffer) for op in made.ops if isinstance(op, Copy)]
    assert moved == [
        *[("send", "scratch"), ("narrow", "scratch")],  # for the first reduction
        ("scratch", "recv"),  # to be sent
        ("send", "scratch"),  # for the third
        ("send", "recv"),
        ("scratch", "recv"),
    ]
    assert (made.scratch, made.narrow, made.accumulates) == (4, 1, True)
    places = {region for op in made.ops for region in (*reads(op), *writes(op)) if region.buffer == "scratch"}
    assert all(region.like is not None for region in places if region.blocks[0])


def test_segments_in_two_forms() -> None:
    """Of a block of which one part is there in the program's form, the other in the wide one."""
    b = Builder(0, segments=2, blocks=1)
    with b.segment(0):
        b.copy(SEND[0], RECV[0])
    with b.segment(1):
        b.reduce(SEND[0], SEND[0], RECV[0])
    b.send(1, RECV[0])  # converts the one, and the end the other
    made = accumulated(b.build(), lambda region: region.blocks)
    copies = [op for op in made.ops if isinstance(op, Copy)]
    assert [(op.source.part, op.target.part) for op in copies] == [(0, 0), (1, 1), (0, 0), (1, 1)]
    assert [op.region.buffer for op in made.ops if isinstance(op, Send)] == ["scratch"]


def test_results_in_the_nodes_buffer() -> None:
    """Its elements are wide, and messages of it, too."""
    b = Builder(0)
    b.send(1, b.shared(1)[0], partial=False)
    with pytest.raises(ScheduleError, match="the node's buffer are of partial sums"):
        accumulated(b.build(), lambda region: region.blocks)


def test_a_sum_by_hand() -> None:
    """What is proved is what comes out: a sum in which float16 would lose a contribution."""
    topology, entry = parse_layout("1x4"), REGISTRY["allreduce"]["all_pairs"]
    system = entry.system(topology, {}, accumulate=True)
    given = [np.full(4, value, np.float16) for value in (2048, 1, 1, 1)]
    recvs = [np.zeros(4, np.float16) for _ in given]
    loopback.run(system.schedules(), topology, given, recvs, layout=BlockLayout(2, 2), combine=np.add)
    assert {float(each) for recv in recvs for each in recv} == {2052.0}  # to even, of 2051
    assert float(fixed_tree(given, np.add)[0]) == 2050.0
