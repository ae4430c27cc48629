"""Every small mistake that changes what a schedule does must be refuted by `verify`.

Each algorithm's schedules on tiny layouts are broken in one place, in every way listed in
`EDITS`. Whether the meaning has changed is not for `verify` to say but for `oracle`, which
runs the schedules in every order of events that can matter.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias, TypeVar

import pytest
from oracle import Verdict, judge

from hiercoll.algorithms import REGISTRY, Algorithm, Params, get_algorithm
from hiercoll.contracts import Contract
from hiercoll.schedule import RECV, SEND, Builder, Copy, Join, Op, Recv, Reduce, Region, Schedule, Send, Signal, Wait
from hiercoll.topology import Topology, parse_layout
from hiercoll.verify import verify

SAMPLE = 3  # mutants per algorithm variant, layout and kind of edit; the same ones every time

Place: TypeAlias = "tuple[int, int]"  # rank, index of an operation
Edit: TypeAlias = "Mapping[Place, Op]"  # operations to put in the place of others
AnOp = TypeVar("AnOp", Send, Recv, Reduce)


def places(schedules: list[Schedule]) -> Iterator[tuple[Place, Op]]:
    """All operations of all ranks."""
    return (((s.rank, index), op) for s in schedules for index, op in enumerate(s.ops))


def pairs(schedules: list[Schedule], kind: type[AnOp]) -> Iterator[tuple[tuple[Place, AnOp], tuple[Place, AnOp]]]:
    """All pairs of operations of that kind on the same rank."""
    for schedule in schedules:
        ops = [((schedule.rank, index), op) for index, op in enumerate(schedule.ops) if isinstance(op, kind)]
        yield from combinations(ops, 2)


def drop_dependency(schedules: list[Schedule]) -> Iterator[Edit]:
    """An operation does not wait for one of those that it should wait for."""
    for place, op in places(schedules):
        for k in range(len(op.deps)):
            yield {place: op._replace(deps=op.deps[:k] + op.deps[k + 1 :])}


def swap_destinations(schedules: list[Schedule]) -> Iterator[Edit]:
    """Two sends of a rank go to each other's destination."""
    for (a, first), (b, second) in pairs(schedules, Send):
        if first.peer != second.peer:
            yield {a: first._replace(peer=second.peer), b: second._replace(peer=first.peer)}


def swap_targets(schedules: list[Schedule]) -> Iterator[Edit]:
    """Two receives of a rank write to each other's blocks."""
    for (a, first), (b, second) in pairs(schedules, Recv):
        if first.region != second.region and first.region.size == second.region.size:
            yield {a: first._replace(region=second.region), b: second._replace(region=first.region)}


def drop_receive(schedules: list[Schedule]) -> Iterator[Edit]:
    """A receive is missing."""
    return ({place: Join(op.deps)} for place, op in places(schedules) if isinstance(op, Recv))


def shrink_count(schedules: list[Schedule]) -> Iterator[Edit]:
    """An operation leaves out the last block."""
    for place, op in places(schedules):
        regions = {name: value for name, value in op._asdict().items() if isinstance(value, Region)}
        if regions and all(region.size for region in regions.values()):
            smaller: dict[str, Any] = {
                name: region._replace(blocks=region.blocks[:-1]) for name, region in regions.items()
            }
            yield {place: op._replace(**smaller)}


def reuse_tag(schedules: list[Schedule]) -> Iterator[Edit]:
    """Two messages between the same ranks have the same tag at both ends, or the two ends of one differ."""
    messages: dict[tuple[int, int], dict[int, dict[Place, Send | Recv]]] = defaultdict(lambda: defaultdict(dict))
    for (rank, index), op in places(schedules):
        if isinstance(op, Send | Recv):
            way = (rank, op.peer) if isinstance(op, Send) else (op.peer, rank)
            messages[way][op.tag][rank, index] = op
    for by_tag in messages.values():
        for tag, ends in by_tag.items():
            for other in by_tag.keys() - {tag}:
                yield {place: op._replace(tag=other) for place, op in ends.items()}
            if len(by_tag) == 1:
                yield from ({place: op._replace(tag=tag + 1)} for place, op in ends.items())


def drop_wait(schedules: list[Schedule]) -> Iterator[Edit]:
    """An operation that waits for flags does not wait."""
    return ({place: Join(op.deps)} for place, op in places(schedules) if isinstance(op, Wait))


def drop_peer(schedules: list[Schedule]) -> Iterator[Edit]:
    """An operation that waits for the flags of several ranks leaves one out."""
    for place, op in places(schedules):
        if isinstance(op, Wait) and len(op.peers) > 1:
            yield from ({place: op._replace(peers=tuple(p for p in op.peers if p != peer))} for peer in op.peers)


def shift_wait(schedules: list[Schedule]) -> Iterator[Edit]:
    """An operation waits for a flag of the start before instead of this one, or the other way round."""
    return ({place: op._replace(previous=not op.previous)} for place, op in places(schedules) if isinstance(op, Wait))


def drop_signal(schedules: list[Schedule]) -> Iterator[Edit]:
    """A flag is not raised."""
    return ({place: Join(op.deps)} for place, op in places(schedules) if isinstance(op, Signal))


def swap_operands(schedules: list[Schedule]) -> Iterator[Edit]:
    """A reduction takes its operands the other way round."""
    for place, op in places(schedules):
        if isinstance(op, Reduce):
            yield {place: op._replace(left=op.right, right=op.left)}


def reduce_twice(schedules: list[Schedule]) -> Iterator[Edit]:
    """A reduction takes one operand twice."""
    for place, op in places(schedules):
        if isinstance(op, Reduce):
            yield from ({place: op._replace(left=each, right=each)} for each in (op.left, op.right))


def skip_contributor(schedules: list[Schedule]) -> Iterator[Edit]:
    """A reduction leaves one operand out."""
    for place, op in places(schedules):
        if isinstance(op, Reduce):
            yield from ({place: Copy(each, op.target, op.deps)} for each in (op.left, op.right) if each != op.target)


def break_tree(schedules: list[Schedule]) -> Iterator[Edit]:
    """Two reductions of a rank take each other's right operand, so that values are combined in another order."""
    for (a, first), (b, second) in pairs(schedules, Reduce):
        if first.right != second.right and first.right.size == second.right.size:
            yield {a: first._replace(right=second.right), b: second._replace(right=first.right)}


EDITS: tuple[Callable[[list[Schedule]], Iterator[Edit]], ...] = (
    drop_dependency,
    swap_destinations,
    swap_targets,
    drop_receive,
    shrink_count,
    reuse_tag,
    drop_wait,
    drop_peer,
    shift_wait,
    drop_signal,
    swap_operands,
    reduce_twice,
    skip_contributor,
    break_tree,
)


def applied(schedules: list[Schedule], edit: Edit) -> list[Schedule]:
    """The schedules with the edit made."""
    result = list(schedules)
    for (rank, index), op in edit.items():
        ops = result[rank].ops
        result[rank] = replace(result[rank], ops=(*ops[:index], op, *ops[index + 1 :]))
    return result


class Case(NamedTuple):
    """One algorithm variant on one layout."""

    algorithm: Algorithm
    params: Params
    layout: str
    in_place: bool

    @property
    def root(self) -> int:
        """The last rank, where there is one: not lane 0 of its node, if that has others."""
        return self.topology.size - 1

    def __str__(self) -> str:
        name = f"{self.algorithm.collective} {self.algorithm.spelled(self.params)} on {self.layout}"
        return name + (" in place" if self.in_place else "")

    @property
    def topology(self) -> Topology:
        return parse_layout(self.layout)

    def schedules(self) -> list[Schedule]:
        """All ranks' schedules."""
        t = self.topology
        emit = partial(self.algorithm.schedule, t, params=self.params, inplace=self.in_place, root=self.root)
        return [emit(rank) for rank in range(t.size)]

    def contract(self, one: Schedule) -> Contract:
        """What the schedules must do, of which this is ``one``."""
        size, collective = self.topology.size, self.algorithm.collective
        order = self.algorithm.order(self.topology, self.params)
        return Contract(collective, size, one.segments, self.root, one.blocks, self.in_place, order)


def cases(algorithm: Algorithm) -> Iterator[Case]:
    """The default parameters on five layouts, in place on one; other variants on even and on uneven nodes."""
    for number, params in enumerate(algorithm.variants()):
        for layout in ("2x2", "3+1") if number else ("1x2", "3x1", "2+1", "2x2", "3+1"):
            if algorithm.refusal(parse_layout(layout), params) is None:
                first, *others = algorithm.in_places
                yield Case(algorithm, params, layout, first)
                if others and number == 0 and layout == "2x2":
                    yield Case(algorithm, params, layout, True)


class Mutant(NamedTuple):
    """A broken schedule and what was said about it."""

    case: Case
    kind: str
    edit: Edit
    verdict: Verdict
    refuted: str  # by which rule of verify; empty if it accepts

    def __str__(self) -> str:
        return f"{self.case}, {self.kind} {self.edit}: {self.verdict.why}"


@cache
def mutants(collective: str, name: str) -> list[Mutant]:
    """A sample of the mutants of all cases of an algorithm, judged."""
    result = []
    for case in cases(get_algorithm(collective, name)):
        schedules, topology = case.schedules(), case.topology
        contract = case.contract(schedules[0])
        for edits in EDITS:
            candidates = list(edits(schedules))
            chosen = random.Random(f"{case} {edits.__name__}").sample(candidates, min(SAMPLE, len(candidates)))
            for edit in chosen:
                mutant = applied(schedules, edit)
                findings = verify(mutant, contract, topology).findings
                refuted = findings[0].kind if findings else ""
                result.append(Mutant(case, edits.__name__, edit, judge(mutant, contract, topology), refuted))
    return result


ENTRIES = [(collective, name) for collective, entries in REGISTRY.items() for name in entries]


@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_oracle_and_verify_accept_what_is_right(collective: str, name: str) -> None:
    for case in cases(get_algorithm(collective, name)):
        schedules = case.schedules()
        contract = case.contract(schedules[0])
        assert verify(schedules, contract, case.topology).ok, str(case)
        verdict = judge(schedules, contract, case.topology)
        assert verdict.kind == "same", f"{case}: {verdict.why}"


@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_mutants_that_change_the_meaning_are_refuted(collective: str, name: str) -> None:
    judged = mutants(collective, name)
    survivors = [str(m) for m in judged if m.verdict.kind == "changed" and not m.refuted]
    assert not survivors, f"{len(survivors)} of {len(judged)}, such as {survivors[0]}"
    assert any(m.verdict.kind == "changed" for m in judged)


def test_enough_mutants_of_every_kind() -> None:
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in ENTRIES:
        for m in mutants(*entry):
            harmless = f"harmless but refuted ({m.refuted})" if m.refuted else "harmless and accepted"
            by_kind[m.kind][harmless if m.verdict.kind == "same" else m.verdict.kind] += 1
    total = sum(by_kind.values(), Counter())
    for kind, counts in [*by_kind.items(), ("all", total)]:
        print(f"{kind:18}{counts.total():6}:", ", ".join(f"{n} {what}" for what, n in counts.most_common()))
    assert total.total() - total["undecided"] >= 1000
    assert total["undecided"] < 0.05 * total.total()
    assert by_kind.keys() == {edits.__name__ for edits in EDITS}
    assert all(counts["changed"] for counts in by_kind.values())


# The oracle itself: it must see what goes wrong in schedules whose fault is known.

PAIR = parse_layout("1x2")
ALLGATHER = Contract("allgather", 2)


def scratch_exchange(rank: int, *, ordered: bool) -> Schedule:
    """Allgather of two ranks by way of scratch; unordered, the send may come before the copy."""
    b = Builder(rank)
    spare = b.scratch(1)[0]
    b.copy(SEND[0], RECV[rank])
    saved = b.copy(SEND[0], spare)
    b.recv(1 - rank, RECV[1 - rank])
    b.send(1 - rank, spare, after=[saved] if ordered else [])
    return b.build()


def overtaken_exchange(rank: int, *, ordered: bool) -> Schedule:
    """Allgather of two ranks; unordered, rank 0 changes what it sends when the answer is there already."""
    b = Builder(rank)
    if rank:
        b.copy(SEND[0], RECV[1])
        b.send(0, SEND[0], after=[b.recv(0, RECV[0])])
        return b.build()
    b.copy(SEND[0], RECV[0])
    sent = b.send(1, RECV[1], after=[b.copy(SEND[0], RECV[1])])
    spare = b.scratch(1)[0]
    b.copy(spare, RECV[1], after=[b.recv(1, spare), sent][: 1 + ordered])
    return b.build()


def mutual_exchange(rank: int, *, ordered: bool) -> Schedule:
    """Allgather of two ranks; unordered, both send first and would hang without buffering."""
    b = Builder(rank)
    b.copy(SEND[0], RECV[rank])
    if ordered and rank:
        b.send(0, SEND[0], after=[b.recv(0, RECV[0])])
    else:
        b.recv(1 - rank, RECV[1 - rank], after=[b.send(1 - rank, SEND[0])])
    return b.build()


def board_exchange(rank: int, *, ordered: bool) -> Schedule:
    """Allgather of two ranks through shared memory; unordered, the next start overtakes the reader."""
    b = Builder(rank)
    board = b.shared(2)
    free = [b.wait([1 - rank], 1, previous=True)] if ordered else []
    put = b.copy(SEND[0], board[rank], after=free)
    b.signal(0, after=[put])
    b.signal(1, after=[b.copy(board[0:2], RECV[0:2], after=[put, b.wait([1 - rank], 0)])])
    return b.build()


def queued_exchange(rank: int, *, ordered: bool) -> Schedule:
    """Alltoall of two ranks that sends every block to the other, under one tag."""
    b = Builder(rank)
    spare = b.scratch(1)[0]
    b.copy(SEND[rank], RECV[rank])
    first = [b.send(1 - rank, SEND[0]), b.recv(1 - rank, RECV[1 - rank] if rank == 0 else spare)]
    after = first if ordered else []
    b.send(1 - rank, SEND[1], after=after)
    b.recv(1 - rank, RECV[1 - rank] if rank == 1 else spare, after=after)
    return b.build()


@pytest.mark.parametrize(
    ("exchange", "collective", "symptom"),
    [
        (scratch_exchange, "allgather", "reads what is not there"),
        (overtaken_exchange, "allgather", "change while they are sent"),
        (mutual_exchange, "allgather", "never ends"),
        (board_exchange, "allgather", "reads what is not there"),
        (queued_exchange, "alltoall", "receives"),
    ],
)
def test_oracle_has_teeth(exchange: Callable[..., Schedule], collective: str, symptom: str) -> None:
    contract = Contract(collective, 2)
    right, wrong = ([exchange(rank, ordered=ordered) for rank in range(2)] for ordered in (True, False))
    assert judge(right, contract, PAIR).kind == "same"
    verdict = judge(wrong, contract, PAIR)
    assert verdict.kind == "changed" and symptom in verdict.why
    assert not verify(wrong, contract, PAIR).ok


def test_oracle_leaves_out_only_orders_that_do_not_matter() -> None:
    right = [scratch_exchange(rank, ordered=True) for rank in range(2)]
    for edits in EDITS:
        for edit in edits(right):
            mutant = applied(right, edit)
            assert judge(mutant, ALLGATHER, PAIR).kind == judge(mutant, ALLGATHER, PAIR, every_order=True).kind
    assert judge(right, ALLGATHER, PAIR, every_order=True).kind == "same"
