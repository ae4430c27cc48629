"""The search: finds what is fastest of what it is shown, keeps its budget, is the same on every rank."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, inf

import pytest

from hiercoll.algorithms.registry import get_algorithm, tried
from hiercoll.collectives import NATIVE
from hiercoll.tables import COLD, PLAN, PLAN_ROW, ROW, SINGLE, Choice, Entry, Figure, Table, Variant
from hiercoll.topology import parse_layout
from hiercoll.tuner import Spread, rank_by_model, uneven_choices
from hiercoll.tuning.search import (
    NATIVE_VARIANT,
    NONBLOCKING,
    PERSISTENT,
    Search,
    Selection,
    SizeResult,
    Verdict,
    believed,
    choices,
    disturbed,
    variants,
)

Cost = Callable[[int, Variant, str], float]
LEAST = 1e-9


@dataclass
class Machine:
    """Times by formula, with noise, on a clock of its own."""

    cost: Cost
    noise: float = 0.02
    seed: int = 1
    now: float = 0.0
    measured: dict[int, dict[str, int]] = field(default_factory=dict)
    closed: int = 0
    opened: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def clock(self) -> float:
        return self.now

    def open(self, collective: str, size: int, field: Sequence[Variant]) -> MachineContest:
        self.opened += 1
        return MachineContest(self, collective, size, list(field))


@dataclass
class MachineContest:
    machine: Machine
    collective: str
    size: int
    field: list[Variant]

    def able(self, index: int, timing: str = SINGLE) -> bool:
        return True

    def look(self, index: int, timing: str = SINGLE) -> float:
        return self.sample(index, timing)

    def cost(self, index: int, timing: str) -> float:
        return max(self.machine.cost(self.size, self.field[index], timing), LEAST)

    def sample(self, index: int, timing: str) -> float:
        variant = self.field[index]
        noise = exp(self.machine.random.gauss(0, self.machine.noise))
        seconds = max(self.machine.cost(self.size, variant, timing) * noise, LEAST)
        self.machine.now += seconds
        counts = self.machine.measured.setdefault(self.size, {})
        name = variant.spelled(self.collective)
        counts[name] = counts.get(name, 0) + 1
        return seconds

    def times(self, which: Sequence[tuple[int, str]], turns: int) -> list[list[float]]:
        taken = [[self.sample(*entry) for entry in which] for _ in range(turns)]
        return [list(row) for row in zip(*taken, strict=True)]

    def close(self) -> None:
        self.machine.closed += 1


def search(machine: Machine, budget: float, collective: str = "alltoall", layout: str = "2x4") -> Search:
    return Search(collective, parse_layout(layout), machine.open, machine.clock, budget)


def crossing(size: int, variant: Variant, timing: str) -> float:
    """bruck is fastest below 1,000 bytes, the lane form above."""
    base = {"bruck": 1e-3 + 1e-6 * size, "grouped": 2e-3}.get(variant.algorithm, 5e-3 + 1e-6 * size)
    extra = (
        0.0
        if variant.algorithm == NATIVE
        else 1e-4 * sum(isinstance(v, int) and v > 2 for v in variant.params.values())
    )
    return base + extra


def test_what_has_no_sizes() -> None:
    """One choice, from 0 on."""

    def cost(size: int, variant: Variant, timing: str) -> float:
        return {"hierarchical": 1e-3}.get(variant.algorithm, 2e-3)

    results = search(Machine(cost), 2.0, "barrier").run([0])
    (choice,) = choices(results)
    assert choice.start == 0 and choice.variant.algorithm == "hierarchical"


def test_finds_the_fastest_and_the_crossover() -> None:
    machine = Machine(crossing)
    results = search(machine, 600.0).run([8, 64, 512, 4096, 32768])
    winners = {result.size: result.winner.algorithm for result in results}
    assert all(winners[size] == "bruck" for size in (8, 64, 512))
    assert all(winners[size] == "grouped" for size in (4096, 32768))
    found = [choice for choice in choices(results) if choice.variant.algorithm == "grouped"]
    assert 750 < found[0].start < 1300  # refined between 512 and 4096
    assert len(results) > 5
    assert machine.closed == machine.opened
    figures = [figure for result in results for figure in result.figures if figure.ranked]
    assert all(figure.samples >= 8 for figure in figures)
    assert {figure.timing for figure in figures} == {SINGLE, ROW, COLD, PLAN, PLAN_ROW}


def replaced(cost: Cost, runs: int, sizes: Sequence[int] = (64,), noise: float = 0.1, budget: float = 0.6) -> float:
    """In what share of searches something replaced native, for calls or plans, at any size."""
    found = 0
    for seed in range(runs):
        results = search(Machine(cost, noise, seed), budget * len(sizes)).run(sizes)
        found += any(each.winner.key != (NATIVE,) for result in results for each in (result.calls, result.plans))
    return found / runs


def like_bruck(factor: float, timings: Sequence[str] = (SINGLE, ROW, PLAN, PLAN_ROW)) -> Cost:
    """All alike, but for one algorithm with whatever parameters."""
    return lambda size, variant, timing: 1e-3 / (factor if variant.algorithm == "bruck" and timing in timings else 1)


searches = pytest.mark.slow(reason="hundreds of searches, for their errors to be rare enough")


@searches
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
def test_equal_candidates_replace_native_seldom(noise: float) -> None:
    """In at most 5 % of searches."""
    assert replaced(like_bruck(1.0), 300, noise=noise) <= 0.05


@searches
def test_equal_candidates_replace_native_seldom_at_any_of_several_sizes() -> None:
    assert replaced(like_bruck(1.0), 200, (8, 64, 512, 4096)) <= 0.05


@searches
def test_some_are_faster_and_some_are_equal() -> None:
    """Of what replaces native, about 5 % at most is no faster: one algorithm is, at half of the sizes."""
    sizes, right, wrong = (8, 64, 512, 4096, 32768, 1 << 18), 0, 0

    def cost(size: int, variant: Variant, timing: str) -> float:
        return 1e-3 / (1.5 if variant.algorithm == "bruck" and size < 1000 else 1)

    for seed in range(100):
        for each in search(Machine(cost, 0.1, seed), 0.6 * len(sizes)).run(sizes):
            for verdict in (each.calls, each.plans):
                truly = verdict.winner.algorithm == "bruck" and each.size < 1000
                right += truly
                wrong += verdict.winner.key != (NATIVE,) and not truly
    assert right > 400 and wrong / (right + wrong) <= 0.05


@pytest.mark.parametrize("form", [NONBLOCKING, PERSISTENT])
def test_a_form_that_fails_somewhere_is_trusted_nowhere(form: Variant) -> None:
    """Of the library's own: it delivers wrong data at one size, and would be the fastest at the others."""

    class Failing(MachineContest):
        def able(self, index: int, timing: str = SINGLE) -> bool:
            return not (self.size == 64 and self.field[index].key == form.key)

        def look(self, index: int, timing: str = SINGLE) -> float:
            return super().look(index, timing) if self.able(index, timing) else inf

        def times(self, which: Sequence[tuple[int, str]], turns: int) -> list[list[float]]:
            rows = super().times(which, turns)
            return [row if self.able(*entry) else [inf] * turns for row, entry in zip(rows, which, strict=True)]

    def cost(size: int, variant: Variant, timing: str) -> float:
        return 1e-3 if variant.key == form.key else 2e-3

    for failing in (False, True):
        machine = Machine(cost, 0.02)
        wanted = search(machine, 6.0)
        if failing:
            wanted.open = lambda collective, size, field, machine=machine: Failing(machine, collective, size, [*field])
        found = wanted.run([8, 64, 512])
        winners = {each.size: (each.plans if form is PERSISTENT else each.calls).winner for each in found}
        assert {8, 64, 512} <= set(winners)
        assert all(winner == (NATIVE_VARIANT if failing else form) for winner in winners.values())


def test_faster_candidates_replace_native() -> None:
    """By what they gain: nothing wrong for 5 % in noise of 10 %, most of the time 20 %, always twice as fast."""
    for seed in range(40):
        (found,) = search(Machine(like_bruck(1.05), 0.1, seed), 0.6).run([64])
        assert found.winner.algorithm in (NATIVE, "bruck") and found.winner.params.keys() != {"form"}
    assert replaced(like_bruck(1.05), 20, noise=0.02) >= 0.8
    assert replaced(like_bruck(1.2), 40) >= 0.8
    assert replaced(like_bruck(2.0), 40) == 1.0


def test_native_stays_unless_faster_in_rows_too() -> None:
    def slower(size: int, variant: Variant, timing: str) -> float:
        return like_bruck(2.0)(size, variant, timing) * (2.4 if timing == ROW and variant.algorithm != NATIVE else 1)

    (found,) = search(Machine(slower, 0.02), 0.6).run([64])
    assert found.winner.key == (NATIVE,)
    assert found.plans.winner.algorithm == "bruck"


def test_plans_have_choices_of_their_own() -> None:
    """A plan of bruck is faster than native's, a call is not; and the library's persistent form may win."""

    def plans_of_bruck(size: int, variant: Variant, timing: str) -> float:
        held = timing in (PLAN, PLAN_ROW)
        return {NATIVE: 1e-3, "bruck": 0.5e-3 if held else 1.2e-3}.get(variant.algorithm, 1.6e-3)

    (found,) = search(Machine(plans_of_bruck, 0.02), 0.6).run([64])
    assert choices([found]) == (Choice(1, NATIVE_VARIANT),)
    assert found.plans.winner.algorithm == "bruck" and found.plans.gain == pytest.approx(2, rel=0.1)
    assert choices([found], held=True) == (Choice(1, found.plans.winner),)

    def cost(size: int, variant: Variant, timing: str) -> float:
        return 1e-3 if variant.key == PERSISTENT.key else 2e-3

    (found,) = search(Machine(cost, 0.02), 1.2).run([64])
    assert found.plans.winner == PERSISTENT and found.winner == NATIVE_VARIANT


def test_the_nonblocking_form_is_a_candidate() -> None:
    def cost(size: int, variant: Variant, timing: str) -> float:
        return 1e-3 if variant.key == NONBLOCKING.key else 5e-3

    (found,) = search(Machine(cost, 0.02), 3.0).run([64])
    assert found.winner == NONBLOCKING and not found.winner.is_native


def test_a_phase_of_the_machine_is_not_believed() -> None:
    """What was faster when it was selected, and is not when it is measured again, is not chosen."""
    machine = Machine(lambda size, variant, timing: 1e-3, noise=0.01)

    def cost(size: int, variant: Variant, timing: str) -> float:
        return 1e-3 * {NATIVE: 1.0, "bruck": 1.2 if machine.opened > 1 else 0.8}.get(variant.algorithm, 3.0)

    machine.cost = cost
    assert [result.winner.algorithm for result in search(machine, 20.0).run([8])] == [NATIVE]


def test_what_was_disturbed_is_measured_again() -> None:
    """Native three times as slow while one size is decided: that size is looked at again, and stays native."""
    machine = Machine(lambda size, variant, timing: 1e-3, noise=0.02)
    decided: list[int] = []

    def cost(size: int, variant: Variant, timing: str) -> float:
        slow = size == 64 and variant.is_native and decided.count(64) == 0 and len(decided) >= 1
        return 1e-3 * (3.0 if slow else 1.0) * (1.0 if variant.algorithm in (NATIVE, "bruck") else 2.0)

    machine.cost = cost
    wanted = search(machine, 6.0)
    wanted.report = lambda result: decided.append(result.size)
    results = wanted.run([8, 64, 512])
    assert decided == [8, 64, 512, 64]
    assert [result.winner.algorithm for result in results] == [NATIVE] * 3


def result(size: int, winner: Variant = NATIVE_VARIANT, native: float = 1.0, chance: float = 0.0) -> SizeResult:
    return SizeResult(size, Verdict(winner, 2.0, chance), Verdict(), (), native)


def test_disturbed() -> None:
    """What stands alone between neighbours that agree; where native took far longer than at both neighbours."""
    a, b = Variant("bruck", {"radix": 2}), Variant("pairwise")
    assert disturbed([result(8), result(16, a), result(32)]) == [16]
    assert disturbed([result(8, a), result(16), result(32, a), result(64, b)]) == [16]
    assert disturbed([result(8, a), result(16), result(32, b)]) == []
    assert disturbed([result(8, native=5.5), result(16, native=7.5), result(32, native=2.3)]) == [16]
    assert disturbed([result(8, native=1), result(16, native=2), result(32, native=4)]) == []
    plans = [replace(result(size), plans=Verdict(a if size == 16 else NATIVE_VARIANT)) for size in (8, 16, 32)]
    assert disturbed(plans) == [16]
    assert disturbed([]) == disturbed([result(8)]) == []


def test_believed() -> None:
    """Of many sizes, one that is just beyond chance is left to native; with many such ones all are believed."""
    a = Variant("bruck", {"radix": 2})
    one = believed([result(8, a, chance=0.04), *(result(size, chance=1.0) for size in (16, 32, 64))])
    assert [each.winner for each in one] == [NATIVE_VARIANT] * 4 and one[0].calls == Verdict()
    both = Verdict(a, 2.0, 0.04)
    every = believed([SizeResult(size, both, both, (), 1.0) for size in (8, 16, 32, 64)])
    assert [each.winner for each in every] == [a] * 4


def test_short_vectors_try_what_is_good_for_longer_ones() -> None:
    """At the first size there is time for four looks, and the fastest is the last that the model expects."""
    expected = [each.variant.algorithm for each in rank_by_model("alltoall", parse_layout("2x4"), 8)]
    last = list(dict.fromkeys(expected))[-1]

    def cost(size: int, variant: Variant, timing: str) -> float:
        if variant.algorithm == last or variant.is_native:
            return 1e-3 if variant.algorithm == last else 2e-3
        return 0.5 if size == 8 else 4e-3

    machine = Machine(cost)
    results = search(machine, 6.0).run([8, 4096])
    assert sum(not name.startswith(("native", last)) for name in machine.measured[8]) == 2
    assert [each.winner.algorithm for each in results] == [last] * len(results)


@pytest.mark.parametrize("budget", [1.0, 10.0, 60.0])
def test_budget_is_kept(budget: float) -> None:
    """Up to the least that decides at each size."""
    machine = Machine(lambda size, variant, timing: 0.01)
    results = search(machine, budget).run([8, 64, 512, 4096])
    assert [r.size for r in results if r.size in (8, 64, 512, 4096)] == [8, 64, 512, 4096]
    assert machine.now < 1.2 * budget + 4 * 0.01 * 110


def test_slow_ones_drop_out_early() -> None:
    machine = Machine(lambda size, variant, timing: 1e-3 if variant.algorithm in (NATIVE, "bruck") else 1e-2)
    search(machine, 100.0).run([64])
    counts = machine.measured[64]
    assert counts["native"] > 8
    slow = {name: count for name, count in counts.items() if not name.startswith(("bruck", "native"))}
    assert sorted(slow.values())[-3] <= 2  # but for two that are tried as plans


def test_goes_on_where_it_was() -> None:
    """What was selected is not looked for again; it is decided about anew."""
    machine = Machine(crossing)
    told: list[Selection] = []
    first = search(machine, 60.0)
    first.note = told.append
    first.run([8, 64])
    assert all(Selection.of(json.loads(json.dumps(each.record()))) == each for each in told)
    before = machine.opened
    again = search(machine, 60.0)
    again.done = {each.size: each for each in told}
    again.note = lambda selection: selected.append(selection.size)
    selected: list[int] = []
    results = again.run([8, 64, 512])
    assert {8, 64, 512} <= {each.size for each in results}
    assert not {8, 64} & set(selected) and machine.opened == before + len(selected) + len(results)


@pytest.mark.parametrize("layout", ["2x4", "4x4:cyclic", "5+3+4", "7x1", "1x3"])
@pytest.mark.parametrize("collective", ["alltoall", "allgather"])
def test_variants_can_run_and_differ(collective: str, layout: str) -> None:
    found = variants(collective, parse_layout(layout))
    assert len({variant.key for variant in found}) == len(found) > 5


def test_every_transport_is_tried() -> None:
    """On devices: one that is faster for all variants is found, with its best variant."""

    def cost(size: int, variant: Variant, timing: str) -> float:
        return {"auto": 3e-3, "staged": 3e-3, "staged:4": 2e-3, "peer": 1e-3}[variant.transport] + crossing(
            size, variant, timing
        )

    machine = Machine(cost)
    wanted = search(machine, 60.0)
    wanted.transports = ("auto", "staged", "staged:4", "peer")
    found = wanted.run([8, 4096])
    assert {each.winner.transport for each in found} == {"peer"}
    assert [found[end].winner.algorithm for end in (0, -1)] == ["bruck", "grouped"]
    assert {"native", "native staged"} <= set(machine.measured[8])


def test_choices_start_halfway() -> None:
    a, b = Variant("bruck", {"radix": 2}), Variant(NATIVE)
    results = [result(size, winner) for size, winner in ((8, a), (64, a), (256, b), (1024, a))]
    assert [(choice.start, choice.variant) for choice in choices(results)] == [(1, a), (128, b), (512, a)]
    assert choices(results, held=True) == (Choice(1, b),)


FOUR = parse_layout("2x2")
MANY = Spread(filled=16, small=16, nbytes=1600, most=200)  # of 4 ranks
UNEVEN = Entry("alltoallv", "MPICH 5.0.2", "host", (2, 2), "block", (), ())


def uneven_table(*choices: Choice) -> Table:
    """With an entry for alltoallv on 2x2."""
    figures = [Figure(choice.start, choice.variant, 1e-5, 1e-5, 1e-5, 5) for choice in choices]
    return Table((replace(UNEVEN, choices=choices, figures=tuple(figures)),))


TOGETHER = tuple(Variant("aggregate", {"form": form, "window": 8}) for form in ("leader", "lane"))
STRAIGHT = (Variant("scatter_destination", {"window": 32}), Variant("aggregate", {"form": "share", "window": 8}))


@pytest.mark.parametrize(
    ("spread", "is_tried"),
    [
        (MANY, True),
        (MANY._replace(filled=8), False),  # sparse
        (MANY._replace(small=14), False),  # large
        (MANY._replace(unfit=1), False),  # what a rank has only the MPI library can serve
        (MANY._replace(filled=0, small=0, nbytes=0, most=0), False),
    ],
)
def test_uneven_without_table(spread: Spread, is_tried: bool) -> None:
    """Where small blocks abound, putting them together is tried."""
    found = uneven_choices("alltoallv", FOUR, spread, Table(), "MPICH 5.0.2")
    assert found == ((Variant(NATIVE), *TOGETHER) if is_tried else (Variant(NATIVE),))
    kept = uneven_choices("alltoallv", FOUR, spread, Table(), "MPICH 5.0.2", held=True)
    assert kept == (Variant(NATIVE),)  # what nobody has tried is not taken for good
    assert uneven_choices("alltoallv", parse_layout("1x1"), MANY, Table(), "MPICH 5.0.2") == (Variant(NATIVE),)


@pytest.mark.parametrize("layout", ["1x4", "4x1", "2x3", "3+1", "1+3", "3x2", "4+2+3", "3x3:cyclic"])
def test_each_way_to_put_blocks_together_is_tried_once(layout: str) -> None:
    """Forms that are left out have the schedules of one that is tried, on all ranks."""
    topology, entry = parse_layout(layout), get_algorithm("alltoallv", "aggregate")

    def schedules(form: str) -> str:
        return str([entry.schedule(topology, rank, {"form": form, "window": 4}) for rank in range(topology.size)])

    forms = [str(params["form"]) for _, params in tried("alltoallv", topology, 16, True)]
    assert len({schedules(form) for form in forms}) == len(forms)
    assert {schedules(form) for form in forms} == {schedules(form) for form in ("leader", "share", "lane")}


def test_order_of_trials_goes_by_size() -> None:
    """The fewest messages first for short blocks, the most carriers for longer ones."""

    def forms(mean: int) -> list[object]:
        return [params["form"] for _, params in tried("alltoallv", parse_layout("3x2"), mean, True)]

    assert forms(16) == ["leader", "share", "lane"] == forms(2048)[::-1]


def test_uneven_where_native_packs() -> None:
    """Large blocks, too, unless most are empty, or in plans."""
    large = MANY._replace(small=0)
    found = partial(uneven_choices, "alltoallv", FOUR, table=Table(), mpi="MPICH 5.0.2", packs=True)
    assert found(spread=MANY) == (Variant(NATIVE), *TOGETHER)
    assert found(spread=large) == (Variant(NATIVE), *STRAIGHT)
    a_few = tuple(Variant("aggregate", {"form": "share", "window": window}) for window in (8, 4))
    assert found(spread=large._replace(nbytes=16 << 20)) == (Variant(NATIVE), *a_few)
    assert found(spread=large._replace(filled=8)) == found(spread=large, held=True) == (Variant(NATIVE),)


def test_uneven_by_table() -> None:
    """By total, maximum and number of the blocks: a table decides for blocks like those it was made with."""
    pairwise = Variant("pairwise", {"exchange": "rotation"})
    table = uneven_table(Choice(1, pairwise), Choice(1000, Variant(NATIVE)))

    def found(spread: Spread, layout: str = "2x2", mpi: str = "MPICH 5.0.2") -> tuple[Variant, ...]:
        return uneven_choices("alltoallv", parse_layout(layout), spread, table, mpi)

    native, together = (Variant(NATIVE),), (Variant(NATIVE), *TOGETHER)
    assert found(MANY) == (Variant(NATIVE), pairwise)
    assert found(MANY._replace(nbytes=16000, most=2000)) == native  # large ones
    assert found(MANY._replace(most=2000)) == together  # one much larger than the others: not what was measured
    assert found(MANY._replace(filled=8)) == native  # sparse ones
    assert found(MANY, mpi="Open MPI 5.0.11") == found(MANY._replace(filled=36, small=36), "2x3") == together
