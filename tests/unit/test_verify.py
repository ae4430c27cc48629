"""The rules of the proof, one small system for each: refuted with the right words, or accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, TypeAlias

import pytest

from hiercoll.algorithms import get_algorithm
from hiercoll.collectives import COLLECTIVES, Order
from hiercoll.contracts import Contract
from hiercoll.errors import HiercollError, VerificationError
from hiercoll.schedule import (
    RECV,
    SCRATCH,
    SEND,
    SHARED,
    SHARED_SIZES,
    SIZES,
    Buffer,
    Builder,
    Copy,
    Get,
    Join,
    Op,
    Region,
    Schedule,
    Send,
    Wait,
    in_place,
    reads,
    size_rows,
    sizes_read,
    writes,
)
from hiercoll.topology import Topology, parse_layout
from hiercoll.verify import Finding, Proof, describe, verify

Fill: TypeAlias = "Callable[[Builder], object]"
PAIR = Contract("alltoall", 2)
NODE = parse_layout("1x2")
EMPTY = RECV[0:0]


def system(*fills: Fill, segments: int = 1) -> list[Schedule]:
    """The schedules of ranks that do what the given functions say."""
    schedules = []
    for rank, fill in enumerate(fills):
        b = Builder(rank, segments)
        fill(b)
        schedules.append(b.build())
    return schedules


def nothing(b: Builder) -> None:
    """A rank that does nothing."""


def refuted(
    schedules: Sequence[Schedule], contract: Contract, kind: str, *words: str, topology: Topology | None = None
) -> Finding:
    """The first finding, which must be of ``kind`` and say all ``words``; findings must be one kind."""
    proof = verify(schedules, contract, topology)
    assert not proof.ok and {finding.kind for finding in proof.findings} == {kind}, proof.findings
    for word in words:
        assert word in str(proof.findings[0])
    return proof.findings[0]


def place(finding: Finding) -> tuple[int | None, int | None]:
    """Rank and operation of a finding."""
    return finding.rank, finding.op


def exchange(b: Builder) -> None:
    """A correct alltoall of two ranks."""
    me, other = b.rank, 1 - b.rank
    with b.round():
        b.copy(SEND[me], RECV[me])
        b.recv(other, RECV[other])
        b.send(other, SEND[other])


# Eight collectives, written as plainly as can be. The contracts are exercised with each.


def fold(b: Builder, operands: list[Region], target: Region) -> None:
    """Reduce in the order given, from left to right, never onto an operand."""
    if len(operands) == 1:
        b.copy(operands[0], target)
        return
    left = operands[0]
    for index, right in enumerate(operands[1:], 2):
        into = target if index == len(operands) else b.scratch(target.size)[0 : target.size]
        with b.round():
            b.reduce(left, right, into)
        left = into


def gather_operands(b: Builder, p: int, own: Region) -> list[Region]:
    """Receive a vector like ``own`` from each other rank; all of them in rank order."""
    operands = []
    for rank in range(p):
        operands.append(own if rank == b.rank else b.scratch(own.size)[0 : own.size])
        if rank != b.rank:
            b.recv(rank, operands[-1])
    return operands


def alltoall(b: Builder, c: Contract) -> None:
    with b.round():
        b.copy(SEND[b.rank], RECV[b.rank])
        for rank in range(c.size):
            if rank != b.rank:
                b.send(rank, SEND[rank])
                b.recv(rank, RECV[rank])


def allgather(b: Builder, c: Contract) -> None:
    """Around a ring, blocks received being passed on."""
    with b.round():
        b.copy(SEND[0], RECV[b.rank])
    for step in range(c.size - 1):
        with b.round():
            b.send((b.rank + 1) % c.size, RECV[(b.rank - step) % c.size], tag=step)
            b.recv((b.rank - 1) % c.size, RECV[(b.rank - step - 1) % c.size], tag=step)


def gather(b: Builder, c: Contract) -> None:
    if b.rank != c.root:
        b.send(c.root, SEND[0])
        return
    for rank in range(c.size):
        b.copy(SEND[0], RECV[rank]) if rank == c.root else b.recv(rank, RECV[rank])


def scatter(b: Builder, c: Contract) -> None:
    if b.rank != c.root:
        b.recv(c.root, RECV[0])
        return
    for rank in range(c.size):
        b.copy(SEND[rank], RECV[0]) if rank == c.root else b.send(rank, SEND[rank])


def bcast(b: Builder, c: Contract) -> None:
    """Down a chain, each block (and segment) on its own."""
    place = (b.rank - c.root) % c.size
    parts: list[int | None] = [None] if c.segments == 1 else list(range(c.segments))
    for tag, (block, part) in enumerate((block, part) for block in range(c.blocks) for part in parts):
        source, target = Region("send", range(block, block + 1), part), Region("recv", range(block, block + 1), part)
        behind = (b.rank + 1) % c.size
        if place == 0:
            b.copy(source, target)
        arrived = [b.recv((b.rank - 1) % c.size, target, tag=tag)] if place else []
        if place < c.size - 1:
            b.send(behind, target if place else source, tag=tag, after=arrived)


def reduce(b: Builder, c: Contract) -> None:
    if b.rank != c.root:
        b.send(c.root, SEND[0 : c.blocks])
        return
    with b.round():
        operands = gather_operands(b, c.size, SEND[0 : c.blocks])
    fold(b, operands, RECV[0 : c.blocks])


def allreduce(b: Builder, c: Contract) -> None:
    with b.round():
        operands = gather_operands(b, c.size, SEND[0 : c.blocks])
        for rank in range(c.size):
            if rank != b.rank:
                b.send(rank, SEND[0 : c.blocks])
    fold(b, operands, RECV[0 : c.blocks])


def reduce_scatter(b: Builder, c: Contract) -> None:
    with b.round():
        operands = gather_operands(b, c.size, SEND[b.rank])
        for rank in range(c.size):
            if rank != b.rank:
                b.send(rank, SEND[rank])
    fold(b, operands, RECV[0])


PROGRAMS: dict[str, Callable[[Builder, Contract], None]] = {
    "alltoall": alltoall,
    "allgather": allgather,
    "gather": gather,
    "scatter": scatter,
    "bcast": bcast,
    "reduce": reduce,
    "allreduce": allreduce,
    "reduce_scatter": reduce_scatter,
}


def program(contract: Contract) -> list[Schedule]:
    """The schedules of a collective's program above."""
    fill = PROGRAMS[contract.collective]
    return system(*[lambda b: fill(b, contract)] * contract.size, segments=contract.segments)


# A barrier's contract is that of an allgather.
EVEN = [name for name, record in COLLECTIVES.items() if record.is_even and record.buffers]


def test_every_contract_has_a_program() -> None:
    """So that no contract is left out below."""
    assert set(PROGRAMS) == set(EVEN)


@pytest.mark.parametrize("collective", PROGRAMS)
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_plain_programs_are_proved(collective: str, p: int) -> None:
    """Any root, one block and several, reductions in rank order."""
    for root in {0, p // 2, p - 1}:
        for blocks in (1, 3):
            contract = Contract(collective, p, root=root, blocks=blocks, order=Order.RANK)
            proof = verify(program(contract), contract)
            assert proof.ok, proof.findings
            assert proof.operations == sum(len(schedule.ops) for schedule in program(contract))


@pytest.mark.parametrize("segments", [2, 3])
def test_a_pipelined_program_is_proved(segments: int) -> None:
    """Segments of a block travel on their own."""
    contract = Contract("bcast", 4, root=3, blocks=2, segments=segments)
    assert verify(program(contract), contract).ok


def without(schedules: list[Schedule], rank: int, index: int) -> list[Schedule]:
    """The schedules with one operation left out: what waited for it waits for what it waited for."""

    def renumbered(op: Op) -> Op:
        deps = [d for dep in op.deps for d in (schedules[rank].ops[index].deps if dep == index else (dep,))]
        return op._replace(deps=tuple(dep - (dep > index) for dep in deps))

    ops = tuple(renumbered(op) for i, op in enumerate(schedules[rank].ops) if i != index)
    return [replace(s, ops=ops) if s.rank == rank else s for s in schedules]


@pytest.mark.parametrize("collective", PROGRAMS)
@pytest.mark.parametrize("segments", [1, 2])
def test_no_operation_can_be_left_out(collective: str, segments: int) -> None:
    """Each operation of the plain programs matters."""
    contract = Contract(collective, 3, segments, root=1, blocks=2)
    schedules = program(contract)
    assert verify(schedules, contract).ok
    for schedule in schedules:
        for index, op in enumerate(schedule.ops):
            if not isinstance(op, Join):
                assert not verify(without(schedules, schedule.rank, index), contract).ok, describe(op)


@pytest.mark.parametrize("collective", PROGRAMS)
@pytest.mark.parametrize("other", EVEN)
def test_a_program_fulfils_its_own_contract_only(collective: str, other: str) -> None:
    """Contracts tell the collectives apart."""
    given = Contract(collective, 3, root=1, blocks=3)
    same = collective == other
    assert verify(program(given), replace(given, collective=other)).ok == same


@pytest.mark.parametrize("collective", ["gather", "scatter", "bcast", "reduce"])
def test_a_program_fulfils_its_own_root_only(collective: str) -> None:
    """Another rank's result is not the root's."""
    given = Contract(collective, 3, root=1)
    assert verify(program(given), given).ok
    assert not verify(program(given), replace(given, root=2)).ok


def test_in_place_is_proved_or_refuted() -> None:
    """A ring allgather may work in place, a direct alltoall overwrites what it still has to send."""
    contract = Contract("allgather", 3, in_place=True)
    plain = program(replace(contract, in_place=False))
    assert verify([in_place(s, True) for s in plain], contract).ok
    assert not verify(plain, contract).ok  # it reads a send buffer that is not there
    contract = Contract("alltoall", 3, in_place=True)
    moved = [in_place(s, False) for s in program(replace(contract, in_place=False))]
    refuted(moved, contract, "race", "no dependency orders them")


def test_the_proof() -> None:
    """What it holds, and what `require` makes of it."""
    proof = verify(system(exchange, exchange), PAIR)
    assert proof.ok and proof.findings == () and proof.contract == PAIR and proof.operations == 8
    assert proof.require() is proof
    bad = verify(system(exchange, nothing), PAIR)
    with pytest.raises(VerificationError) as caught:
        bad.require()
    assert isinstance(caught.value, HiercollError)
    assert caught.value.findings == bad.findings
    assert all(str(finding) in str(caught.value) for finding in bad.findings)


def test_findings_in_words() -> None:
    """Kind, rank, operation and region, as far as they are known."""
    assert str(Finding("race", "is bad", 2, 7, RECV[1])) == "[race] rank 2, op 7, recv[1]: is bad"
    assert str(Finding("contract", "is bad", 2)) == "[contract] rank 2: is bad"
    assert Proof(PAIR, 0, (Finding("x", "y"),)).ok is False


def test_a_few_findings_are_enough() -> None:
    """Of one rule; later rules are not looked at."""

    def wild(b: Builder) -> None:
        for _ in range(9):
            b.copy(SEND[7], RECV[0])

    proof = verify(system(wild, nothing), PAIR)
    assert 1 < len(proof.findings) <= 5 and {f.kind for f in proof.findings} == {"malformed"}


# Malformed


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (lambda b: b.copy(SEND[2], RECV[0]), "send[2] lies outside the buffer of 2 blocks"),
        (lambda b: b.copy(SEND[0], RECV[-1]), "recv[-1] lies outside the buffer of 2 blocks"),
        (lambda b: b.copy(SEND[0], SCRATCH[0]), "scratch[0] lies outside the buffer of 0 blocks"),
        (lambda b: b.copy(SHARED[4], RECV[0]), "shared[4] lies outside the buffer of 0 blocks"),
        (lambda b: b.recv(1, RECV[[1, 0, 2]]), "recv[1,0,2] lies outside the buffer of 2 blocks"),
        (lambda b: b.send(1, SEND[[0, 5, 1]]), "send[0,5,1] lies outside"),
        (lambda b: b.reduce(SEND[0], SEND[3], RECV[0]), "send[3] lies outside"),
        (lambda b: b.send(0, SEND[0]), "rank 0 as its peer"),
        (lambda b: b.recv(2, RECV[0]), "rank 2 as its peer"),
        (lambda b: b.recv(-1, RECV[0]), "rank -1 as its peer"),
        (lambda b: b.copy(SEND[0], RECV[0], after=[0]), "does not come before it"),
        (lambda b: b.copy(SEND[0], RECV[0], after=[1]), "does not come before it"),
        (lambda b: b.join([-1]), "does not come before it"),
        (lambda b: b.recv(1, SEND[0]), "writes to the send buffer"),
        (lambda b: b.copy(RECV[0], SEND[0]), "writes to the send buffer"),
        (lambda b: b.recv(1, RECV[[1, 1]]), "writes a block of recv[1,1] twice"),
        (lambda b: b.copy(SEND[0:2], RECV[[0, 0]]), "writes a block of recv[0,0] twice"),
        (lambda b: b.copy(SEND[0:2], RECV[0]), "differ in size"),
        (lambda b: b.copy(SEND[0].segment(0), RECV[0]), "differ in size"),
        (lambda b: b.reduce(SEND[0], SEND[0:2], RECV[0]), "differ in size"),
        (lambda b: b.reduce(SEND[0], SEND[1], RECV[0:2]), "differ in size"),
        (lambda b: b.send(1, SEND[0].segment(1)), "names a segment of 1"),
        (lambda b: b.wait([1], 0), "on another node"),
    ],
)
def test_malformed_operations(fill: Fill, words: str) -> None:
    """An operation that no rank could carry out is named, with its reason."""

    def second(b: Builder) -> None:  # the first operation is in order, the second is not
        b.send(1, SEND[1], tag=9)
        fill(b)

    first = refuted(system(fill, nothing), PAIR, "malformed", words)
    assert place(first) == (0, 0)
    if "before" not in words:
        assert place(refuted(system(second, nothing), PAIR, "malformed", words)) == (0, 1)


def test_the_same_operations_well_formed() -> None:
    """What the malformed ones are mistaken for is not malformed: blocks read twice, a node's flag."""

    def fill(b: Builder) -> None:
        piece = b.scratch(2)
        b.copy(SEND[[1, 1]], piece[0:2])
        b.join([0])
        b.wait([1], 0)
        b.signal(0)

    assert {f.kind for f in verify(system(fill, fill), PAIR).findings} == {"malformed"}  # each its own node
    assert "malformed" not in {f.kind for f in verify(system(fill, fill), PAIR, NODE).findings}


def test_a_flag_raised_twice() -> None:
    """Flags only grow: a second signal would say nothing new."""

    def fill(b: Builder) -> None:
        b.signal(0)
        b.signal(1)
        b.signal(0)

    assert place(refuted(system(nothing, fill), PAIR, "malformed", "flag 0 is raised twice", topology=NODE)) == (1, 2)


def test_a_flag_that_is_not_there() -> None:
    """A schedule says how many flags it raises."""
    schedules = [replace(s, flags=1) for s in system(lambda b: b.signal(1), nothing)]
    assert place(refuted(schedules, PAIR, "malformed", "raises flag 1 of 1")) == (0, 0)


def test_shared_buffers_are_one_per_node() -> None:
    """All ranks of a node ask for the same size; other nodes may ask for another."""
    sizes = [2, 2, 3, 3]
    contract, nodes = Contract("alltoall", 4), parse_layout("2x2")
    schedules = [replace(s, shared=size) for s, size in zip(program(contract), sizes, strict=True)]
    assert verify(schedules, contract, nodes).ok
    finding = refuted(schedules, contract, "malformed", "different shared buffers", topology=parse_layout("2x2:cyclic"))
    assert place(finding) == (0, None)


def test_not_the_schedules_of_these_ranks() -> None:
    """One schedule per rank, in order, cut into as many segments as the contract."""
    good = system(exchange, exchange)
    assert "1 schedules for 2 ranks" in refuted(good[:1], PAIR, "malformed").message
    assert "3 schedules for 2 ranks" in refuted([*good, good[0]], PAIR, "malformed").message
    assert place(refuted(good[::-1], PAIR, "malformed", "is of rank 1")) == (0, None)
    cut = [good[0], replace(good[1], segments=2)]
    assert place(refuted(cut, PAIR, "malformed", "2 segments")) == (1, None)


@pytest.mark.parametrize("layout", ["1", "1x3"])
def test_not_the_topology_of_these_ranks(layout: str) -> None:
    """A topology of more or fewer ranks is told like schedules of more or fewer."""
    refuted(system(exchange, exchange), PAIR, "malformed", "2 ranks", topology=parse_layout(layout))


# Unmatched


def test_a_message_that_is_never_received() -> None:
    """The send is named, and who should have received."""

    def deaf(b: Builder) -> None:
        b.copy(SEND[1], RECV[1])
        b.send(0, SEND[0])

    finding = refuted(system(exchange, deaf), PAIR, "unmatched", "rank 1 never receives send send[1] to rank 1")
    assert place(finding) == (0, 2)


def test_a_message_that_is_never_sent() -> None:
    """The receive is named, and who should have sent."""

    def mute(b: Builder) -> None:
        b.copy(SEND[1], RECV[1])
        b.recv(0, RECV[0])

    finding = refuted(system(exchange, mute), PAIR, "unmatched", "rank 1 never sends", "receive recv[1] from rank 1")
    assert place(finding) == (0, 1)


def test_another_tag_is_another_message() -> None:
    """A send and a receive with different tags are both alone."""

    def tagged(b: Builder) -> None:
        b.copy(SEND[1], RECV[1])
        b.recv(0, RECV[0])
        b.send(0, SEND[0], tag=1)

    proof = verify(system(exchange, tagged), PAIR)
    assert {(f.kind, f.rank, f.op) for f in proof.findings} == {("unmatched", 0, 1), ("unmatched", 1, 2)}


def test_messages_that_differ_in_size() -> None:
    """In blocks, or in which part of the blocks."""

    def sends(*regions: Region) -> list[Schedule]:
        return system(lambda b: b.send(1, regions[0]), lambda b: b.recv(0, regions[1]), segments=2)

    contract = Contract("alltoall", 2, 2)
    for out, into in ((SEND[0:2], RECV[1]), (SEND[0], RECV[0:2]), (SEND[0].segment(1), RECV[0].segment(0))):
        finding = refuted(sends(out, into), contract, "unmatched", "sizes differ", str(out), str(into))
        assert place(finding) == (1, 0) and finding.region == into
    assert {f.kind for f in verify(sends(SEND[0:2], RECV[[1, 0]]), contract).findings} == {"contract"}


@pytest.mark.parametrize("sending", [True, False])
def test_two_messages_of_one_tag(sending: bool) -> None:
    """Arrival order must never decide which message is which."""

    def twice(b: Builder) -> None:
        for block in range(2):
            if (b.rank == 0) == sending:
                b.send(1 - b.rank, SEND[block])
            else:
                b.recv(1 - b.rank, RECV[block])

    proof = verify(system(twice, twice), PAIR)
    assert {f.kind for f in proof.findings} == {"unmatched"}
    finding = next(f for f in proof.findings if f.rank == 0)
    assert finding.op == 1 and finding.region == (SEND if sending else RECV)[1]
    assert "same source, destination and tag 0" in finding.message and "op 0" in finding.message


def test_tags_tell_messages_apart() -> None:
    """The same two messages with two tags are in order, whatever the order of posting."""

    def fill(b: Builder) -> None:
        if b.rank == 0:
            b.send(1, SEND[0], tag=1)
            b.send(1, SEND[1], tag=0)
        else:
            b.recv(0, RECV[1], tag=0)
            b.recv(0, RECV[0], tag=1)

    contract = Contract("bcast", 2, blocks=2)
    schedules = system(lambda b: (fill(b), b.copy(SEND[0:2], RECV[0:2])), fill)
    assert verify(schedules, contract).ok


@pytest.mark.parametrize("previous", [False, True])
def test_a_flag_that_nobody_raises(previous: bool) -> None:
    """The one who waits is named."""

    def fill(b: Builder) -> None:
        b.signal(0)
        b.wait([0, 1], 1, previous=previous)

    schedules = system(fill, lambda b: b.signal(0))
    assert place(refuted(schedules, PAIR, "unmatched", "rank 1 never raises flag 1", topology=NODE)) == (0, 1)


# Deadlock


def blocking(b: Builder) -> None:
    """Send, and only then receive."""
    with b.round():
        b.copy(SEND[b.rank], RECV[b.rank])
        b.send(1 - b.rank, SEND[1 - b.rank])
    b.recv(1 - b.rank, RECV[1 - b.rank])


def test_sends_that_cross() -> None:
    """Two blocking sends need buffering; the chain names both messages."""
    finding = refuted(
        system(blocking, blocking),
        PAIR,
        "deadlock",
        "without buffering nobody can go on",
        "receive recv[0] from rank 0 (tag 0) (rank 1, op 3)",
        "receive recv[1] from rank 1 (tag 0) (rank 0, op 3)",
        "which waits for",
    )
    assert finding.rank in (0, 1) and finding.op is not None


def test_sends_that_do_not_cross() -> None:
    """If one of the two receives first, all is well."""

    def receiving(b: Builder) -> None:
        with b.round():
            b.copy(SEND[b.rank], RECV[b.rank])
            b.recv(1 - b.rank, RECV[1 - b.rank])
        b.send(1 - b.rank, SEND[1 - b.rank])

    assert verify(system(blocking, receiving), PAIR).ok
    assert verify(system(receiving, blocking), PAIR).ok
    refuted(system(receiving, receiving), PAIR, "deadlock")


def test_a_long_circle() -> None:
    """Round a circle of three; a fourth rank that only waits for it is not to blame."""

    def fill(b: Builder) -> None:
        if b.rank == 3:
            b.recv(0, RECV[0], tag=1)
            return
        with b.round():
            b.send((b.rank + 1) % 3, SEND[0])
        b.recv((b.rank - 1) % 3, RECV[0])
        if b.rank == 0:
            b.send(3, SEND[3], tag=1)

    finding = refuted(system(*[fill] * 4), Contract("alltoall", 4), "deadlock")
    assert all(f"from rank {rank} (tag 0)" in finding.message for rank in range(3))
    assert finding.rank != 3 and "rank 3" not in finding.message


def test_a_circle_of_flags() -> None:
    """Each raises its flag only after the other has."""

    def fill(b: Builder) -> None:
        seen = b.wait([0, 1], 0)
        b.signal(0, after=[seen])

    finding = refuted(system(fill, fill), PAIR, "deadlock", topology=NODE)
    for words in ("raise flag 0 (rank 0, op 1)", "wait for flag 0 of ranks 1 (rank 0, op 0)", "raise flag 0 (rank 1"):
        assert words in finding.message


def test_a_circle_of_a_flag_and_a_message() -> None:
    """Flags and messages may wait for each other."""

    def first(b: Builder) -> None:
        b.wait([1], 0)
        b.send(1, SEND[1], after=[0])

    def second(b: Builder) -> None:
        arrived = b.recv(0, RECV[0])
        b.signal(0, after=[arrived])

    refuted(system(first, second), PAIR, "deadlock", "raise flag 0", topology=NODE)


def test_flags_of_the_start_before_cannot_lock() -> None:
    """They are there, as the start before has ended or will."""

    def fill(b: Builder) -> None:
        seen = b.wait([0, 1], 0, previous=True)
        b.signal(0, after=[seen])
        exchange(b)

    assert verify(system(fill, fill), PAIR, NODE).ok


# Races in private buffers


def race(b: Fill, *words: str, p: int = 2, segments: int = 1) -> Finding:
    """Rank 0 does as it is told, the others serve it: sends of what it receives, receives of what it sends."""
    contract = Contract("alltoall", p, segments)
    mine = Builder(0, segments)
    b(mine)
    schedule = mine.build()

    def serving(other: Builder) -> None:
        spare = other.scratch(len(schedule.ops) * p)
        for index, op in enumerate(schedule.ops):
            if getattr(op, "peer", None) == other.rank:
                region = op.region  # type: ignore[union-attr]
                piece = spare[index * p : index * p + region.size]._replace(part=region.part)
                if type(op).__name__ == "Send":
                    other.recv(0, piece, tag=op.tag)  # type: ignore[union-attr]
                else:
                    other.send(0, SEND[0 : region.size]._replace(part=region.part), tag=op.tag)  # type: ignore[union-attr]

    others = system(nothing, *[serving] * (p - 1), segments=segments)[1:]
    proof = verify([schedule, *others], contract)
    found = [finding for finding in proof.findings if finding.kind == "race"]
    if not words:
        assert not found, found
        return Finding("none", "")
    assert len(found) == len(proof.findings) == 1, proof.findings
    finding = found[0]
    assert "may run while" in finding.message and "no dependency orders them" in finding.message
    assert all(word in finding.message for word in words), finding
    assert finding.rank == 0
    return finding


def test_a_receive_into_what_is_being_sent() -> None:
    """The classic race of an exchange in one buffer."""

    def fill(b: Builder) -> None:
        with b.round():
            b.copy(SEND[0:2], RECV[0:2])
        with b.round():
            b.send(1, RECV[1])
            b.recv(1, RECV[1])

    finding = race(fill, "receive recv[1] from rank 1", "send recv[1] to rank 1 (tag 0) (rank 0, op 2)")
    assert finding.op == 3 and finding.region == RECV[1]


def test_a_send_of_what_is_being_received() -> None:
    """The same the other way round."""

    def fill(b: Builder) -> None:
        b.recv(1, RECV[1])
        b.send(1, RECV[1])

    assert race(fill, "send recv[1] to rank 1", "(rank 0, op 0)").op == 1


def test_a_copy_that_does_not_wait_for_its_receive() -> None:
    """What is copied may not have arrived."""

    def fill(wait: bool) -> Fill:
        def filled(b: Builder) -> None:
            piece = b.scratch(1)
            arrived = b.recv(1, piece[0])
            b.copy(piece[0], RECV[1], after=[arrived] if wait else [])

        return filled

    finding = race(fill(False), "copy scratch[0] to recv[1]", "receive scratch[0] from rank 1")
    assert finding.op == 1 and finding.region == SCRATCH[0]
    race(fill(True))


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (RECV[0:6:2], RECV[0:6:3], True),
        (RECV[0:6:2], RECV[1:6:2], False),
        (RECV[0:6:2], RECV[[5, 4]], True),
        (RECV[0:6:2], RECV[[5, 1, 3]], False),
        (RECV[0:3], RECV[2:5], True),
        (RECV[0:3], RECV[3:6], False),
        (RECV[0:3], RECV[3:3], False),
        (RECV[2].segment(0), RECV[2].segment(1), False),
        (RECV[2].segment(1), RECV[2].segment(1), True),
        (RECV[0:4:2].segment(1), RECV[2], True),
    ],
)
def test_overlapping_writes(one: Region, other: Region, overlap: bool) -> None:
    """Two writes race where their blocks meet, and only there."""

    def fill(wait: bool) -> Fill:
        def filled(b: Builder) -> None:
            first = b.recv(1, one)
            source = SEND[0 : other.size]._replace(part=other.part)
            b.copy(source, other, after=[first] if wait else [])

        return filled

    if overlap:
        finding = race(fill(False), f"to {other}", f"receive {one}", p=6, segments=2)
        assert finding.op == 1 and finding.region == other
    else:
        race(fill(False), p=6, segments=2)
    race(fill(True), p=6, segments=2)


def test_readers_do_not_race() -> None:
    """Any number of operations may read a block, but a write must wait for each of them."""

    def fill(*after: int) -> Fill:
        def filled(b: Builder) -> None:
            with b.round():
                b.copy(SEND[0], RECV[0])
            for tag in range(3):
                b.send(1, RECV[0], tag=tag)
            b.recv(1, RECV[0], tag=5, after=after)

        return filled

    race(fill(2, 3, 4))
    for after in ((2, 3), (2, 4), (3, 4)):
        missing = ({2, 3, 4} - set(after)).pop()
        assert race(fill(*after), f"send recv[0] to rank 1 (tag {missing - 2})").op == 5


def test_paths_of_dependencies() -> None:
    """A dependency of a dependency orders, through a join too; waiting for the same thing does not."""

    def fill(b: Builder, *, path: bool) -> None:
        first = b.recv(1, RECV[0])
        second = b.send(2, SEND[1], after=[first])
        joined = b.join([second])
        b.copy(SEND[0], RECV[0], after=[joined] if path else [])

    race(lambda b: fill(b, path=True), p=3)
    race(lambda b: fill(b, path=False), "copy send[0] to recv[0]", p=3)

    def siblings(b: Builder) -> None:
        first = b.send(2, SEND[1])
        b.recv(1, RECV[0], after=[first])
        b.copy(SEND[0], RECV[0], after=[first])

    race(siblings, "receive recv[0]", p=3)


def test_messages_do_not_order_a_receive_that_is_open() -> None:
    """An answer may only come after the question, but the receive for it is open all the time."""

    def asking(b: Builder) -> None:
        piece = b.scratch(1)
        copied = b.copy(SEND[1], piece[0])
        b.send(1, piece[0], after=[copied])
        b.recv(1, piece[0], after=[])

    def answering(b: Builder) -> None:
        arrived = b.recv(0, RECV[0])
        b.send(0, SEND[0], after=[arrived])

    finding = refuted(system(asking, answering), PAIR, "race", "receive scratch[0]")
    assert place(finding) == (0, 2)


def test_a_copy_onto_its_own_source() -> None:
    """Blocks of one operation are moved in no particular order."""

    def fill(b: Builder) -> None:
        with b.round():
            b.copy(SEND[0:3], RECV[0:3])
        b.copy(RECV[0:2], RECV[1:3])

    finding = refuted(system(fill, nothing, nothing), Contract("alltoall", 3), "malformed", "blocks that it reads")
    assert place(finding) == (0, 2)


def test_reductions_accumulate_in_place() -> None:
    """x = x + y is block by block; x = y + x shifted by a block is not."""

    def root(b: Builder, shift: int) -> None:
        first = b.copy(SEND[0:2], RECV[0:2])
        piece = b.scratch(3)
        got = b.recv(1, piece[0:2])
        b.reduce(RECV[0:2], piece[shift : shift + 2], RECV[0:2], after=[first, got])

    def leaf(b: Builder) -> None:
        b.send(0, SEND[0:2])

    contract = Contract("reduce", 2, blocks=2)
    verify(system(lambda b: root(b, 0), leaf), contract).require()

    def shifted(b: Builder) -> None:
        got = b.recv(1, b.scratch(3)[1:3])
        b.reduce(SEND[0:2], Region("scratch", range(1, 3)), Region("scratch", range(2)), after=[got])

    refuted(system(shifted, leaf), contract, "malformed", "blocks that it reads")


# Races in shared buffers: two starts of all ranks of a node

WRITTEN, READ = range(2)


def board_allgather(
    b: Builder, node_ranks: Sequence[int], *, wait: bool = True, previous: bool = True, early: str = "", p: int = 0
) -> None:
    """Everyone writes to the board, everyone reads it."""
    p = p or len(node_ranks)
    board = b.shared(p)
    last = [b.wait(node_ranks, READ, previous=True)] if previous else []
    if early == "written":
        last = [b.signal(WRITTEN, after=last)]
    last = [b.copy(SEND[0], board[b.rank], after=last)]
    if early != "written":
        last = [b.signal(WRITTEN, after=last)]
    if early == "read":
        last = [b.signal(READ, after=last)]
    if wait:
        last = [b.wait(node_ranks, WRITTEN, after=last)]
    copied = b.copy(board[0:p], RECV[0:p], after=last)
    if early != "read":
        b.signal(READ, after=[copied])


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_a_board_with_flags_is_proved(p: int) -> None:
    """Wait for the readers of the start before, write, raise, wait for the writers, read, raise."""
    contract = Contract("allgather", p)
    schedules = system(*[lambda b: board_allgather(b, range(p))] * p)
    assert verify(schedules, contract, parse_layout(f"1x{p}")).ok


def test_a_board_is_of_one_node() -> None:
    """Between nodes there is no board: what others wrote is not there, and they have no flags to look at."""
    schedules = system(*[lambda b: board_allgather(b, [b.rank], previous=False, p=2)] * 2)
    finding = refuted(schedules, Contract("allgather", 2), "undefined", "reads block 1, which nobody has written")
    assert place(finding) == (0, 3) and finding.region == SHARED[0:2]
    whole = system(*[lambda b: board_allgather(b, range(2))] * 2)
    refuted(whole, Contract("allgather", 2), "malformed", "flag of a rank on another node")


@pytest.mark.parametrize("change", [{"wait": False}, {"early": "written"}])
def test_a_board_read_too_early(change: dict[str, Any]) -> None:
    """Without the wait, or with a flag raised before the write, a read may come first."""
    schedules = system(*[lambda b: board_allgather(b, range(3), **change)] * 3)
    finding = refuted(
        schedules, Contract("allgather", 3), "race", "the node's shared buffer", topology=parse_layout("1x3")
    )
    assert "next start" not in finding.message and finding.region is not None
    assert finding.region.buffer == "shared" and finding.rank in range(3)
    assert re.search(r"copy shared\[0:3\] to recv\[0:3\] \(rank \d, op \d\)", finding.message)


@pytest.mark.parametrize("change", [{"previous": False}, {"early": "read"}])
def test_a_board_overwritten_too_early(change: dict[str, Any]) -> None:
    """One start is right; the next one overwrites what a slow rank still reads."""
    schedules = system(*[lambda b: board_allgather(b, range(2), **change)] * 2)
    finding = refuted(schedules, Contract("allgather", 2), "race", "in the next start", topology=NODE)
    assert re.search(r"in the next start copy send\[0\] to shared\[\d\] \(rank \d", finding.message)
    assert "while copy shared[0:2] to recv[0:2]" in finding.message
    assert finding.rank in (0, 1) and finding.region in (SHARED[0], SHARED[1])


def test_one_slow_reader_is_enough() -> None:
    """Every reader must be waited for, in the start before as in this one."""

    def fill(node_ranks: Sequence[int]) -> Fill:
        return lambda b: board_allgather(b, node_ranks if b.rank == 0 else range(3), p=3)

    contract, nodes = Contract("allgather", 3), parse_layout("1x3")
    assert verify(system(*[fill(range(3))] * 3), contract, nodes).ok
    refuted(system(*[fill([0, 1])] * 3), contract, "race", "(rank 2, ", topology=nodes)


def bell(b: Builder, *, rung: bool = True, answered: bool = True) -> None:
    """A broadcast over the board, rung by an empty message and answered by one."""
    board = b.shared(1)
    if b.rank == 0:
        b.copy(SEND[0], RECV[0])
        written = b.copy(SEND[0], board[0])
        b.send(1, EMPTY, after=[written])
        if answered:
            b.recv(1, EMPTY)
        return
    heard = b.recv(0, EMPTY)
    read = b.copy(board[0], RECV[0], after=[heard] if rung else [])
    if answered:
        b.send(0, EMPTY, after=[read])


def test_messages_order_a_board() -> None:
    """A message within the node does what a flag does."""
    contract = Contract("bcast", 2)
    assert verify(system(bell, bell), contract, NODE).ok
    unheard = system(bell, lambda b: bell(b, rung=False))
    finding = refuted(unheard, contract, "race", "no flag or message orders them", topology=NODE)
    assert place(finding) in {(0, 1), (1, 1)} and finding.region == SHARED[0]
    unanswered = system(*[lambda b: bell(b, answered=False)] * 2)
    assert place(refuted(unanswered, contract, "race", "in the next start", topology=NODE)) == (0, 1)


def test_an_answer_sent_too_early() -> None:
    """A message says only what was done before it was sent."""

    def hasty(b: Builder) -> None:
        board = b.shared(1)
        heard = b.recv(0, EMPTY)
        b.send(0, EMPTY, after=[heard])
        b.copy(board[0], RECV[0], after=[heard])

    refuted(system(bell, hasty), Contract("bcast", 2), "race", "in the next start", topology=NODE)


def test_a_message_may_still_be_leaving_when_it_has_arrived() -> None:
    """A receive says that the send has begun, not that its blocks may be overwritten."""

    def sending(b: Builder) -> None:
        board = b.shared(1)
        written = b.copy(SEND[0], board[0])
        b.send(1, board[0], after=[written])
        b.copy(SEND[0], RECV[0])
        b.recv(1, RECV[1])

    def reusing(b: Builder, own: bool) -> None:
        board, piece = b.shared(1), b.scratch(1)
        arrived = b.recv(0, RECV[0])
        target = piece[0] if own else board[0]
        copied = b.copy(SEND[0], target, after=[arrived])
        b.copy(SEND[0], RECV[1], after=[])
        b.send(0, target, after=[copied])

    contract = Contract("allgather", 2)
    assert verify(system(sending, lambda b: reusing(b, True)), contract, NODE).ok
    schedules = system(sending, lambda b: reusing(b, False))
    finding = refuted(schedules, contract, "race", "send shared[0] to rank 1", topology=NODE)
    assert place(finding) == (1, 1) and "next start" not in finding.message


def test_a_start_ends_with_the_last_of_its_operations() -> None:
    """Not with the one that is written last: the next start comes after all of them."""

    def fill(b: Builder) -> None:
        board_allgather(b, range(2))
        b.send(1 - b.rank, EMPTY, after=[])
        b.recv(1 - b.rank, EMPTY, after=[])

    assert verify(system(fill, fill), Contract("allgather", 2), NODE).ok


def test_boards_of_two_nodes_are_apart() -> None:
    """The same blocks of two nodes' boards are not the same memory."""

    def fill(b: Builder) -> None:
        board, inside, across = b.shared(1), [b.rank ^ 1, b.rank], b.rank ^ 2
        last = [b.wait(inside, READ, previous=True)]
        with b.round():
            b.copy(SEND[b.rank], RECV[b.rank])
            b.send(across, SEND[across], tag=1)
            b.recv(across, RECV[across], tag=1)
            for peer in {0, 1, 2, 3} - {b.rank, across, b.rank ^ 1}:
                b.send(peer, SEND[peer], tag=2)
                b.recv(peer, RECV[peer], tag=2)
        lane = b.rank % 2
        if lane == 0:
            last = [b.copy(SEND[b.rank ^ 1], board[0], after=last)]
            b.signal(WRITTEN, after=last)
            arrived = b.recv(b.rank ^ 1, RECV[b.rank ^ 1], tag=3, after=[])
            b.signal(READ, after=[arrived])
        else:
            seen = b.wait([b.rank ^ 1], WRITTEN, after=[])
            read = b.copy(board[0], RECV[b.rank ^ 1], after=[seen])
            b.signal(READ, after=[read])
            b.send(b.rank ^ 1, SEND[b.rank ^ 1], tag=3, after=[])

    schedules = system(*[fill] * 4)
    assert verify(schedules, Contract("alltoall", 4), parse_layout("2x2")).ok


# Undefined, contract, unused


def test_scratch_that_nobody_has_written() -> None:
    """Uninitialised memory is never read, not even to be sent on."""

    def copies(b: Builder) -> None:
        piece = b.scratch(3)
        with b.round():
            b.copy(SEND[0], piece[0])
            b.copy(SEND[0], piece[2])
        b.copy(piece[0:3], RECV[0:3])

    contract = Contract("alltoall", 3)
    finding = refuted(system(nothing, copies, nothing), contract, "undefined", "reads block 1, which nobody has")
    assert place(finding) == (1, 3) and finding.region == SCRATCH[0:3]

    def sends(b: Builder) -> None:
        b.send(0, b.scratch(1)[0])

    finding = refuted(system(lambda b: b.recv(1, RECV[1]), sends), PAIR, "undefined", "send scratch[0] to rank 0")
    assert place(finding) == (1, 0) and finding.region == SCRATCH[0]


def test_operands_that_nobody_has_written() -> None:
    """Of a reduction, either side."""
    contract = Contract("allreduce", 1)
    for left, right in ((SEND[0], SCRATCH[0]), (SCRATCH[0], SEND[0])):
        schedules = [replace(s, scratch=1) for s in system(lambda b, x=left, y=right: b.reduce(x, y, RECV[0]))]
        assert place(refuted(schedules, contract, "undefined", "reduce")) == (0, 0)


def test_segments_that_nobody_has_written() -> None:
    """One segment of a block is not the block."""

    def fill(b: Builder) -> None:
        piece = b.scratch(2)
        with b.round():
            b.copy(SEND[0], piece[0])
            b.copy(SEND[0].segment(0), piece[1].segment(0))
        b.copy(piece[0:2], RECV[0:2])

    finding = refuted(system(fill, nothing, segments=2), Contract("alltoall", 2, 2), "undefined", "reads block 1")
    assert place(finding) == (0, 3)


def test_swapped_blocks() -> None:
    """A block at the wrong place is named, with what should be there."""

    def swapped(b: Builder) -> None:
        b.copy(SEND[1], RECV[0])
        b.recv(0, RECV[1])
        b.send(0, SEND[0])

    finding = refuted(system(exchange, swapped), PAIR, "contract")
    assert finding.message == ("block 0 of the receive buffer must hold block 1 of rank 0 and holds block 1 of rank 1")
    assert place(finding) == (1, None) and finding.region == RECV[0]


def test_a_missing_segment() -> None:
    """Of a block in segments, the one that is missing is named; it cannot land in the place of another."""

    def fill(b: Builder, *parts: int) -> None:
        for part in parts:
            piece = SEND[0].segment(part)
            if b.rank == 0:
                b.copy(piece, RECV[0].segment(part))
                b.send(1, piece, tag=part)
            else:
                b.recv(0, RECV[0].segment(part), tag=part)

    contract = Contract("bcast", 2, 2)
    assert verify(system(*[lambda b: fill(b, 0, 1)] * 2, segments=2), contract).ok
    half = system(*[lambda b: fill(b, 1)] * 2, segments=2)
    finding = refuted(half, contract, "contract", "must hold block 0 segment 0 of rank 0 and holds nothing")
    assert place(finding) == (0, None) and finding.region == RECV[0]


def test_nothing_delivered() -> None:
    """A receive buffer that was never written holds nothing."""
    refuted(system(nothing, nothing), Contract("allgather", 2), "contract", "rank 0", "and holds nothing")


def summing(*orders: tuple[int, ...]) -> list[Schedule]:
    """An allreduce in which each rank adds up what the others have, in an order of its own."""

    def fill(b: Builder) -> None:
        with b.round():
            operands = gather_operands(b, len(orders), SEND[0])
            for rank in range(len(orders)):
                if rank != b.rank:
                    b.send(rank, SEND[0])
        fold(b, [operands[rank] for rank in orders[b.rank]], RECV[0])

    return system(*[fill] * len(orders))


def test_reductions_in_any_order() -> None:
    """Any order will do for commutative operations; for others, only that of the ranks."""
    given, exact = Contract("allreduce", 3), Contract("allreduce", 3, order=Order.RANK)
    ordered = (0, 1, 2)
    assert verify(summing(ordered, ordered, ordered), exact).ok
    turned = summing(*[(2, 0, 1)] * 3)
    assert verify(turned, given).ok
    finding = refuted(turned, exact, "contract", "is (2 + 0) + 1, which is not in the order 'rank'")
    assert place(finding) == (0, None)


def test_all_ranks_get_the_same_bits() -> None:
    """By one expression tree, whatever the order."""
    turned = summing((0, 1, 2), (2, 0, 1), (0, 1, 2))
    finding = refuted(turned, Contract("allreduce", 3), "contract", "is (2 + 0) + 1 here, and (0 + 1) + 2 on rank 0")
    assert place(finding) == (1, None)


def test_reductions_in_any_grouping() -> None:
    """Left and right operands may be sums themselves: (0 + 1) + (2 + 3)."""

    def fill(b: Builder) -> None:
        with b.round():
            a = gather_operands(b, 4, SEND[0])
            for rank in {0, 1, 2, 3} - {b.rank}:
                b.send(rank, SEND[0])
        piece = b.scratch(2)
        with b.round():
            b.reduce(a[0], a[1], piece[0])
            b.reduce(a[2], a[3], piece[1])
        b.reduce(piece[0], piece[1], RECV[0])

    assert verify(system(*[fill] * 4), Contract("allreduce", 4, order=Order.RANK)).ok


@pytest.mark.parametrize(
    ("order", "holds"),
    [
        ((0, 1, 1, 2), "block 0 of rank 0 + block 0 of rank 1 + block 0 of rank 1 + block 0 of rank 2"),
        ((0, 1, 1), "block 0 of rank 0 + block 0 of rank 1 + block 0 of rank 1"),
        ((0, 1), "block 0 of rank 0 + block 0 of rank 1"),
        ((2,), "block 0 of rank 2"),
    ],
)
def test_contributors_twice_or_missing(order: tuple[int, ...], holds: str) -> None:
    """Each exactly once; the sum that is there is spelled out."""
    schedules = summing((0, 1, 2), order, (0, 1, 2))
    finding = refuted(schedules, Contract("allreduce", 3), "contract", "must hold the reduction of block 0")
    assert finding.message.endswith(f"and holds {holds}") and place(finding) == (1, None)


def test_a_copy_that_nobody_needs() -> None:
    """Work without a use is a mistake, if a harmless one."""

    def busy(b: Builder) -> None:
        exchange(b)
        b.copy(SEND[0], b.scratch(1)[0])

    finding = refuted(system(exchange, busy), PAIR, "unused", "nobody needs the result of copy send[0] to scratch[0]")
    assert place(finding) == (1, 4)


def test_a_message_that_nobody_needs() -> None:
    """Its receive is named, and what it was made of too."""

    def chatty(b: Builder) -> None:
        piece = b.scratch(2)
        exchange(b)
        with b.round():
            b.copy(SEND[0], piece[0])
        b.recv(1 - b.rank, piece[1], tag=1)
        b.send(1 - b.rank, piece[0], tag=1)

    proof = verify(system(chatty, chatty), PAIR)
    assert {(f.kind, f.rank, f.op) for f in proof.findings} == {("unused", r, op) for r in (0, 1) for op in (4, 6)}


def test_a_result_that_is_overwritten() -> None:
    """Written twice in order, the first was for nothing."""

    def fill(b: Builder) -> None:
        with b.round():
            b.copy(SEND[0], RECV[0])
        b.copy(SEND[0], RECV[0])

    assert place(refuted(system(fill), Contract("alltoall", 1), "unused", "nobody needs")) == (0, 0)


def test_empty_operations_are_no_waste() -> None:
    """What moves nothing (a message to wake somebody, a copy made empty) needs no use."""

    def fill(b: Builder) -> None:
        exchange(b)
        b.send(1 - b.rank, EMPTY, tag=1)
        b.recv(1 - b.rank, EMPTY, tag=1)
        b.copy(EMPTY, EMPTY)

    assert verify(system(fill, fill), PAIR).ok


def test_dependencies_of_a_chain_each_matter() -> None:
    """Through scratch and back: of a chain of copies, any dependency left out is a race."""

    def fill(b: Builder, missing: int = -1) -> None:
        pieces: list[Buffer] = [b.scratch(1) for _ in range(4)]
        last = b.copy(SEND[0], pieces[0][0])
        for index, (source, target) in enumerate(pairwise(pieces)):
            last = b.copy(source[0], target[0], after=[] if index == missing else [last])
        b.copy(pieces[-1][0], RECV[0], after=[] if missing == 3 else [last])

    contract = Contract("alltoall", 1)
    assert verify(system(fill), contract).ok
    for missing in range(4):
        finding = refuted(system(lambda b, m=missing: fill(b, m)), contract, "race")
        assert place(finding) == (0, missing + 1) and finding.region == SCRATCH[missing]


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (lambda b: b.send(1, SEND[0], tag=2), "send send[0] to rank 1 (tag 2)"),
        (lambda b: b.recv(1, RECV[0:2]), "receive recv[0:2] from rank 1 (tag 0)"),
        (lambda b: b.copy(SEND[0], RECV[1]), "copy send[0] to recv[1]"),
        (lambda b: b.reduce(SEND[0], SEND[1], RECV[0]), "reduce send[0] (+) send[1] to recv[0]"),
        (lambda b: b.signal(3), "raise flag 3"),
        (lambda b: b.wait([1, 2], 3), "wait for flag 3 of ranks 1, 2"),
        (lambda b: b.wait([1], 3, previous=True), "wait for flag 3 of ranks 1 (start before)"),
        (lambda b: b.join([]), "end of a round"),
    ],
)
def test_operations_in_words(fill: Fill, words: str) -> None:
    """Every kind of operation has words."""
    [schedule] = system(fill)
    assert describe(schedule.ops[0]) == words
    assert not isinstance(schedule.ops[0], Copy) or words.startswith("copy")


def test_what_shared_blocks_are_said_to_hold() -> None:
    """Blocks of uneven sizes lie where their sizes say: what is said must be what is written."""
    topology = parse_layout("2x2")
    entry = get_algorithm("alltoallv", "aggregate")
    right = [entry.schedule(topology, rank) for rank in range(4)]
    contract = Contract("alltoall", 4, right[0].segments)
    assert verify(right, contract, topology).ok and right[0].holds
    turned = right[0].holds[1:] + right[0].holds[:1]
    wrong = [
        replace(schedule, holds=turned) if topology.node_of[schedule.rank] == 0 else schedule for schedule in right
    ]
    finding = refuted(wrong, contract, "holds", "which is said to hold", topology=topology)
    assert finding.rank in topology.nodes[0]
    refuted([replace(right[0], holds=turned), *right[1:]], contract, "malformed", "different shared", topology=topology)
    short = [replace(schedule, holds=schedule.holds[:-1]) for schedule in right]
    refuted(short, contract, "malformed", f"{right[0].shared - 1} of {right[0].shared}", topology=topology)


# Sizes of uneven blocks. 2+1: rank 0 and 1 share memory, and rank 2 sends to both through a carrier.

UNEVEN = parse_layout("2+1")


def uneven_schedules(topology: Topology = UNEVEN) -> list[Schedule]:
    entry = get_algorithm("alltoallv", "aggregate")
    return [entry.schedule(topology, rank, {"form": "leader"}) for rank in range(topology.size)]


def uneven_contract(schedules: list[Schedule]) -> Contract:
    return Contract("alltoall", len(schedules), schedules[0].segments)


def size_copy(schedule: Schedule, source: str) -> int:
    """The copy of sizes from that buffer."""
    return next(i for i, op in enumerate(schedule.ops) if isinstance(op, Copy) and op.source.buffer == source)


def with_op(schedules: list[Schedule], rank: int, index: int, op: Op) -> list[Schedule]:
    """The schedules with one operation of a rank's replaced."""
    ops = schedules[rank].ops
    changed = replace(schedules[rank], ops=(*ops[:index], op, *ops[index + 1 :]))
    return [*schedules[:rank], changed, *schedules[rank + 1 :]]


@pytest.mark.parametrize("layout", ["2+1", "1x2", "2x2", "3+2:cyclic", "3x1"])
def test_sizes_are_published_and_learned(layout: str) -> None:
    """Once each on every rank that shares a node; a rank alone on its node knows what it needs."""
    topology = parse_layout(layout)
    schedules = uneven_schedules(topology)
    assert verify(schedules, uneven_contract(schedules), topology).require().ok
    for rank, schedule in enumerate(schedules):
        lanes, lane = len(topology.node(rank)), topology.lane_of[rank]
        moved = [op for op in schedule.ops if isinstance(op, Copy) and "sizes" in op.source.buffer]
        assert schedule.sizes == lanes and len(moved) == (2 if lanes > 1 else 0)
        if moved:
            assert (moved[0].source, moved[0].target) == (SIZES[lane], SHARED_SIZES[lane])
            others = [other for other in range(lanes) if other != lane]
            assert (moved[1].source, moved[1].target) == (SHARED_SIZES[others], SIZES[others])


@pytest.mark.parametrize("rank", [0, 1])
def test_sizes_that_are_not_learned_are_missed(rank: int) -> None:
    """Before an operation touches blocks whose lengths only another rank of the node knows."""
    right = uneven_schedules()
    index = size_copy(right[rank], "shared_sizes")
    wrong = with_op(right, rank, index, Join(right[rank].ops[index].deps))
    text = f"needs the sizes of lane {1 - rank}, which have not been learned"
    finding = refuted(wrong, uneven_contract(right), "undefined", text, topology=UNEVEN)
    assert finding.rank == rank and finding.region == SIZES[0:2]


@pytest.mark.parametrize("rank", [0, 1])
def test_sizes_that_are_not_published_are_missed(rank: int) -> None:
    """By the rank that reads them."""
    right = uneven_schedules()
    index = size_copy(right[rank], "sizes")
    wrong = with_op(right, rank, index, Join(right[rank].ops[index].deps))
    text = f"reads block {rank}, which nobody has written"
    finding = refuted(wrong, uneven_contract(right), "undefined", text, topology=UNEVEN)
    assert finding.rank == 1 - rank and finding.region == SHARED_SIZES[rank]
    assert finding.op == size_copy(right[1 - rank], "shared_sizes")


@pytest.mark.parametrize("rank", [0, 1])
def test_sizes_that_are_learned_too_soon_are_a_race(rank: int) -> None:
    """Before the flag that says that they have been published."""
    right = uneven_schedules()
    ops = right[rank].ops
    learns = size_copy(right[rank], "shared_sizes")
    wait = max(i for i in range(learns) if isinstance(ops[i], Wait))
    before = ops[wait].deps
    wrong = with_op(right, rank, learns, ops[learns]._replace(deps=before))
    finding = refuted(wrong, uneven_contract(right), "race", "no flag or message orders them", topology=UNEVEN)
    assert finding.region is not None and finding.region.buffer == "shared_sizes"
    assert "copy sizes[" in finding.message and "copy shared_sizes[" in finding.message


@pytest.mark.parametrize("rank", [0, 1])
def test_no_use_of_sizes_may_overtake_their_learning(rank: int) -> None:
    """Each operation that depends on the learning, made to wait for what that waited for instead."""
    right = uneven_schedules()
    ops = right[rank].ops
    learns = size_copy(right[rank], "shared_sizes")
    users = [i for i, op in enumerate(ops) if learns in op.deps and not isinstance(op, Join)]
    assert users
    for user in users:
        deps = tuple(sorted({*ops[user].deps, *ops[learns].deps} - {learns}))
        wrong = with_op(right, rank, user, ops[user]._replace(deps=deps))
        finding = refuted(wrong, uneven_contract(right), "race", "no dependency orders them", topology=UNEVEN)
        assert finding.rank == rank and finding.region is not None and finding.region.buffer == "sizes"


def test_the_publishing_of_sizes_waits_for_those_who_read_the_last() -> None:
    """Else a rank that is still in the start before reads the sizes of this one."""
    right = uneven_schedules()
    index = size_copy(right[0], "sizes")
    publishing, following = right[0].ops[index : index + 2]
    wrong = with_op(right, 0, index, publishing._replace(deps=()))
    wrong = with_op(wrong, 0, index + 1, following._replace(deps=(*publishing.deps, *following.deps)))
    finding = refuted(wrong, uneven_contract(right), "race", "in the next start", topology=UNEVEN)
    assert finding.region == SHARED_SIZES[0]


def test_sizes_that_nobody_reads_are_not_needed() -> None:
    """Published where no block is shared."""
    topology = parse_layout("1x2")
    builders = [Builder(0), Builder(1)]
    for rank, b in enumerate(builders):
        b.sizes(2)
        b.copy(SEND[rank], RECV[rank])
        b.send(1 - rank, SEND[1 - rank])
        b.recv(1 - rank, RECV[1 - rank])
        b.publish_sizes(rank)
    made = [b.build() for b in builders]
    refuted(made, Contract("alltoall", 2), "unused", "copy sizes[1] to shared_sizes[1]", topology=topology)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (Copy(SIZES[0], RECV[0], ()), "otherwise than between sizes and shared_sizes"),
        (Copy(SEND[0], SHARED_SIZES[0], ()), "otherwise than between sizes and shared_sizes"),
        (Copy(SIZES[0], SHARED_SIZES[1], ()), "each to its own place"),
        (Copy(SIZES[0].segment(0), SHARED_SIZES[0].segment(0), ()), "each to its own place"),
        (Send(1, 9, SIZES[0], ()), "otherwise than between sizes and shared_sizes"),
        (Copy(SIZES[2], SHARED_SIZES[2], ()), "lies outside the buffer of 2 blocks"),
        (Get(1, 9, SHARED_SIZES[0], SIZES[0], ()), "which is not for others to map"),
    ],
)
def test_rows_of_sizes_go_to_their_places_only(op: Op, words: str) -> None:
    right = uneven_schedules()
    wrong = [replace(right[0], ops=(*right[0].ops, op)), *right[1:]]
    refuted(wrong, uneven_contract(right), "malformed", words, topology=UNEVEN)


def test_places_that_are_not_known_are_missed() -> None:
    """A rank knows how long its own blocks from other nodes are, and not where they lie: after those of other lanes."""
    topology = parse_layout("2x2")
    right = uneven_schedules(topology)
    learned = size_copy(right[1], "shared_sizes")
    from_far = [
        block for block, (source, target) in enumerate(right[1].holds) if source in topology.nodes[1] and target == 1
    ]
    sources = [right[1].holds[block][0] for block in from_far]
    early = Copy(SHARED[from_far].segment(0), RECV[sources].segment(0), right[1].ops[learned].deps)
    findings = verify(with_op(right, 1, learned, early), uneven_contract(right), topology).findings
    [found] = [str(finding) for finding in findings if place(finding) == (1, learned)]
    assert "needs the sizes of lane 0, which have not been learned" in found


def test_all_ranks_cut_the_vector_alike() -> None:
    """A vector is laid out by each rank's own number of blocks."""

    def part(rank: int, blocks: int) -> Schedule:
        b = Builder(rank, blocks=blocks)
        (b.recv if rank else b.send)(1 - rank, RECV[0])
        return b.build()

    contract = Contract("bcast", 2, in_place=True)
    assert verify([part(0, 1), part(1, 1)], contract, None).ok
    finding = refuted(
        [part(0, 1), part(1, 2)], contract, "malformed", "cuts the vector into 2 blocks, and rank 0 into 1"
    )
    assert finding.rank == 1


def test_how_many_sizes_there_are() -> None:
    """One row for each lane, for blocks of which it is said what they hold."""
    right, ranks = uneven_schedules(), UNEVEN.nodes[0]
    contract = uneven_contract(right)

    def changed(**parts: object) -> list[Schedule]:
        return [replace(s, **parts) if s.rank in ranks else s for s in right]  # type: ignore[arg-type]

    refuted(changed(sizes=3), contract, "malformed", "the sizes of 3 lanes on a node of 2", topology=UNEVEN)
    refuted(changed(holds=()), contract, "malformed", "does not say what its shared blocks hold", topology=UNEVEN)
    foreign = ((2, 2), *right[0].holds[1:])
    refuted(changed(holds=foreign), contract, "malformed", "which is of no rank of its node", topology=UNEVEN)
    lone = [replace(right[0], sizes=0), *right[1:]]
    refuted(lone, contract, "malformed", "different shared buffers", topology=UNEVEN)


def test_whose_sizes_say_where_a_block_lies() -> None:
    """Its source's, if that is of this node; else those of its destination, and of all before it from other nodes."""
    schedule = uneven_schedules(parse_layout("2+2"))[0]
    rows = size_rows(schedule, parse_layout("2+2"))
    before = set[int]()
    for (source, target), found in zip(schedule.holds, rows, strict=True):
        if source not in (0, 1):
            before.add(target)
        assert found == ({source} if source in (0, 1) else before)
    assert before == {0, 1}
    assert size_rows(replace(schedule, sizes=0), parse_layout("2+2")) == ()
    assert sizes_read(Copy(SHARED[0:2], RECV[0:2], ()), rows) == SIZES[sorted(rows[0] | rows[1])]
    assert sizes_read(Copy(SEND[0], RECV[0], ()), rows) is None


@pytest.mark.parametrize("layout", ["2+3", "3x1", "1x4", "3+2:cyclic"])
def test_sizes_of_one_block_of_each_rank(layout: str) -> None:
    """The root knows all. Leaders of other nodes learn those of their node: from its ranks, or from the root."""
    topology = parse_layout(layout)
    for collective, root in product(("gatherv", "scatterv"), range(topology.size)):
        system = get_algorithm(collective, "aggregate").system(topology, {}, root=root)
        assert verify(system).require().ok
        for rank, schedule in enumerate(system.schedules()):
            own = topology.node(rank)
            moved = [op for op in schedule.ops if any("sizes" in each.buffer for each in (*reads(op), *writes(op)))]
            if rank == root:
                told = [SIZES[ranks] for ranks in topology.nodes if root not in ranks and len(ranks) > 1]
                assert [each for op in moved for each in reads(op)] == (told if collective == "scatterv" else [])
            elif root in own or len(own) == 1:
                assert not moved
            elif collective == "gatherv":
                learned = Copy(SHARED_SIZES[own[1:]], SIZES[own[1:]], ())
                published = Copy(SIZES[rank], SHARED_SIZES[rank], ())
                assert [op._replace(deps=()) for op in moved] == [learned if rank == own[0] else published]
            else:
                assert [writes(op) for op in moved] == ([(SIZES[own],)] if rank == own[0] else [])
            for lane, peer in enumerate(own):
                assert sizes_read(Copy(SHARED[lane], RECV[0], ()), size_rows(schedule, topology)) == SIZES[peer]


@pytest.mark.parametrize("collective", ["gatherv", "scatterv"])
def test_wrong_sizes_of_one_block_of_each_rank(collective: str) -> None:
    """Blocks in the order of lanes, a row for each rank in its place, and none known before it is learned."""
    topology = parse_layout("1+3")
    system = get_algorithm(collective, "aggregate").system(topology, {})
    right, contract = system.schedules(), system.contract

    def refute(schedules: list[Schedule], kind: str, words: str) -> None:
        refuted(schedules, contract, kind, words, topology=topology)

    refute([replace(each, holds=each.holds[::-1]) for each in right], "malformed", "the blocks of ranks [3, 2, 1]")
    refute([replace(each, sizes=3) for each in right], "malformed", "the sizes of 3 blocks of 4 ranks")
    boastful = [replace(each, knows=tuple(range(4))) for each in right]
    refute(boastful, "malformed", "says that it knows the sizes of ranks (0, 1, 2, 3)")
    learning = next(i for i, op in enumerate(right[1].ops) for each in writes(op) if each.buffer == "sizes")
    if collective == "gatherv":
        wrong = with_op(right, 1, learning, Join(right[1].ops[learning].deps))
        refute(wrong, "undefined", "needs the sizes of lane 2")
    else:
        telling = next(i for i, op in enumerate(right[0].ops) for each in reads(op) if each.buffer == "sizes")
        op = right[0].ops[telling]
        assert isinstance(op, Send)
        wrong = with_op(right, 0, telling, op._replace(region=SIZES[0:3]))
        refute(wrong, "size", "sizes of other ranks")
        part = with_op(right, 0, telling, op._replace(region=op.region.segment(0)))
        refute(part, "malformed", "moves rows of sizes otherwise")


def test_sizes_in_words() -> None:
    contract = Contract("alltoall", 3, 2)
    assert contract.describe(int(contract.own_sizes(2)[1])) == "the sizes of rank 2"
    assert not any(contract.is_reduction(int(token)) for token in contract.own_sizes(0))


@pytest.mark.parametrize("collective", ["gatherv", "scatterv"])
def test_wrong_places_of_blocks_on_the_way(collective: str) -> None:
    """Each place is for the block of one rank, which comes there, and of which the size is known."""
    topology = parse_layout("1x4")
    system = get_algorithm(collective, "binomial").system(topology, {})
    right, contract = system.schedules(), system.contract
    assert right[2].slots == (2, 3) and all(each.slots == () for each in (right[0], right[1], right[3]))

    def refute(change: Callable[[Region], Region], kind: str, words: str) -> None:
        """With other regions in scratch on rank 2."""
        ops = [
            op._replace(**{
                name: change(region) for name, region in op._asdict().items()
                if isinstance(region, Region) and region.buffer == "scratch"
            })
            for op in right[2].ops
        ]  # fmt: skip
        refuted([*right[:2], replace(right[2], ops=tuple(ops)), right[3]], contract, kind, words, topology=topology)

    refute(lambda region: region._replace(like=None), "malformed", "blocks of ranks [-1, -1] in scratch")
    turned = {(2, 3): (3, 2)}  # where both are named
    refute(lambda region: region.of(turned.get(tuple(region.like or ()), region.like or ())), "malformed", "[-1, -1]")
    swapped = {2: 3, 3: 2}
    refute(lambda region: region.of([swapped[rank] for rank in region.like or ()]), "size", "to a place for block")
    learning = next(i for i, op in enumerate(right[2].ops) for each in writes(op) if each.buffer == "sizes")
    deaf = with_op(right, 2, learning, Join(right[2].ops[learning].deps))
    telling = next(
        (rank, i) for rank in range(4) for i, op in enumerate(right[rank].ops) for each in reads(op)
        if each.buffer == "sizes" and isinstance(op, Send) and op.peer == 2
    )  # fmt: skip
    deaf = with_op(deaf, *telling, Join(right[telling[0]].ops[telling[1]].deps))
    refuted(deaf, contract, "undefined", "which have not been learned", topology=topology)
