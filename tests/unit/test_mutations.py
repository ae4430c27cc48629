"""Every small mistake that changes what a schedule does must be refuted by `verify`.

Each algorithm's schedules on tiny layouts are broken in one place, in every way listed in
`EDITS`. Whether the meaning has changed is not for `verify` to say but for `oracle`, which
runs the schedules in every order of events that can matter.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple, TypeAlias, TypeVar

import pytest
from oracle import judge

from hiercoll.algorithms import REGISTRY, Algorithm, Params, get_algorithm
from hiercoll.collectives import Contract
from hiercoll.schedule import RECV, SCRATCH, SEND, SHARED, Builder, Join, Op, Recv, Schedule, Send, Signal, Wait
from hiercoll.topology import Topology, parse_layout
from hiercoll.verify import verify

SAMPLE = 6  # mutants per algorithm variant, layout and kind of edit; the same ones every time

Place: TypeAlias = "tuple[int, int]"  # rank, index of an operation
Edit: TypeAlias = "dict[Place, Op]"  # operations to put in the place of others
AnOp = TypeVar("AnOp", Send, Recv)


def places(schedules: list[Schedule]) -> Iterator[tuple[Place, Op]]:
    """All operations of all ranks."""
    return (((s.rank, index), op) for s in schedules for index, op in enumerate(s.ops))


def pairs(schedules: list[Schedule], kind: type[AnOp]) -> Iterator[tuple[tuple[Place, AnOp], tuple[Place, AnOp]]]:
    """All pairs of operations of that kind on the same rank."""
    for schedule in schedules:
        yield from combinations(
            [((schedule.rank, i), op) for i, op in enumerate(schedule.ops) if isinstance(op, kind)], 2
        )


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
        names = [name for name in ("region", "source", "left", "right", "target") if hasattr(op, name)]
        regions = [getattr(op, name) for name in names]
        if regions and all(region.size for region in regions):
            yield {
                place: op._replace(**{n: r._replace(blocks=r.blocks[:-1]) for n, r in zip(names, regions, strict=True)})
            }


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

    def __str__(self) -> str:
        name = f"{self.algorithm.collective} {self.algorithm.spelled(self.params)} on {self.layout}"
        return name + (" in place" if self.in_place else "")

    @property
    def topology(self) -> Topology:
        return parse_layout(self.layout)

    def schedules(self) -> list[Schedule]:
        """All ranks' schedules."""
        t = self.topology
        return [self.algorithm.schedule(t, rank, self.params, inplace=self.in_place) for rank in range(t.size)]

    def contract(self, segments: int) -> Contract:
        """What the schedules must do."""
        size, collective = self.topology.size, self.algorithm.collective
        blocks = size if collective == "allreduce" else 1
        return Contract(collective, size, segments, blocks=blocks, in_place=self.in_place)


def cases(algorithm: Algorithm) -> Iterator[Case]:
    """The default parameters on many layouts, every other variant where nodes are uneven and where they are even."""
    for number, params in enumerate(algorithm.variants()):
        for layout in ("1x2", "3x1", "2+1", "2x2") if number == 0 else ("2+1", "2x2"):
            if algorithm.refusal(parse_layout(layout), params) is None:
                yield Case(algorithm, params, layout, False)
                if algorithm.in_place and number == 0 and layout in ("2+1", "2x2"):
                    yield Case(algorithm, params, layout, True)


class Mutant(NamedTuple):
    """A broken schedule and what was said about it."""

    case: Case
    kind: str
    edit: Edit
    verdict: str
    why: str
    accepted: bool
    found: str

    def __str__(self) -> str:
        return f"{self.case}, {self.kind} {self.edit}: {self.why}"


@lru_cache(maxsize=None)
def mutants(collective: str, name: str) -> list[Mutant]:
    """A sample of the mutants of all cases of an algorithm, judged."""
    result = []
    for case in cases(get_algorithm(collective, name)):
        schedules, topology = case.schedules(), case.topology
        contract = case.contract(schedules[0].segments)
        for edits in EDITS:
            candidates = list(edits(schedules))
            chosen = random.Random(f"{case} {edits.__name__}").sample(candidates, min(SAMPLE, len(candidates)))
            for edit in chosen:
                mutant = applied(schedules, edit)
                verdict, proof = judge(mutant, contract, topology), verify(mutant, contract, topology)
                found = proof.findings[0].kind if proof.findings else ""
                result.append(Mutant(case, edits.__name__, edit, verdict.kind, verdict.why, proof.ok, found))
    return result


ENTRIES = [(collective, name) for collective, entries in REGISTRY.items() for name in entries]


@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_oracle_and_verify_accept_what_is_right(collective: str, name: str) -> None:
    for case in cases(get_algorithm(collective, name)):
        schedules = case.schedules()
        contract = case.contract(schedules[0].segments)
        assert verify(schedules, contract, case.topology).ok, str(case)
        verdict = judge(schedules, contract, case.topology)
        assert verdict.kind == "same", f"{case}: {verdict.why}"


@pytest.mark.parametrize(("collective", "name"), ENTRIES)
def test_mutants_that_change_the_meaning_are_refuted(collective: str, name: str) -> None:
    judged = mutants(collective, name)
    survivors = [str(m) for m in judged if m.verdict == "changed" and m.accepted]
    assert not survivors, f"{len(survivors)} of {len(judged)}, such as {survivors[0]}"
    undecided = [m for m in judged if m.verdict == "undecided"]
    assert len(undecided) < 0.05 * len(judged)


def test_enough_mutants_of_every_kind() -> None:
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for collective, name in ENTRIES:
        judged = mutants(collective, name)
        assert any(m.verdict == "changed" for m in judged)
        for m in judged:
            by_kind[m.kind][m.verdict if m.verdict != "same" else "harmless " + (m.found or "accepted")] += 1
    for kind, counts in by_kind.items():
        print(f"{kind:18}", ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    total = sum(by_kind.values(), Counter())
    print(f"{total.total()} mutants:", ", ".join(f"{count} {what}" for what, count in total.most_common()))
    assert total.total() - total["undecided"] >= 1000
    assert by_kind.keys() == {edits.__name__ for edits in EDITS}
    assert all(counts["changed"] for counts in by_kind.values())
