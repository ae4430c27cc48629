"""The search: finds what is fastest of what it is shown, keeps its budget, is the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.online import CALLS, FOR_GOOD, Regime, Trial, explore
from hiercoll.tables import NATIVE, Choice, Entry, Figure, Table, Variant
from hiercoll.topology import parse_layout
from hiercoll.tuner import AGGREGATE, Spread, uneven_choices
from hiercoll.tuning import Search, SizeResult, _steadier, choices, interval, variants

Cost = Callable[[int, Variant], float]


@dataclass
class Machine:
    """Times by formula, with noise, on a clock of its own."""

    cost: Cost
    noise: float = 0.02
    now: float = 0.0
    measured: dict[int, dict[str, int]] = field(default_factory=dict)
    closed: int = 0
    opened: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(1)

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

    def look(self, index: int) -> float:
        return self.times([index], 1)[0][0]

    def times(self, which: Sequence[int], samples: int) -> list[list[float]]:
        rows: list[list[float]] = [[] for _ in which]
        for _ in range(samples):
            for row, index in zip(rows, which, strict=True):
                variant = self.field[index]
                seconds = self.machine.cost(self.size, variant) * self.machine.random.gauss(1, self.machine.noise)
                row.append(max(seconds, 1e-9))
                self.machine.now += max(seconds, 1e-9)
                counts = self.machine.measured.setdefault(self.size, {})
                name = variant.spelled(self.collective)
                counts[name] = counts.get(name, 0) + 1
        return rows

    def close(self) -> None:
        self.machine.closed += 1


def search(machine: Machine, budget: float, collective: str = "alltoall", layout: str = "2x4") -> Search:
    return Search(collective, parse_layout(layout), machine.open, machine.clock, budget)


def crossing(size: int, variant: Variant) -> float:
    """bruck is fastest below 1,000 bytes, the lane form above."""
    base = {"bruck": 1e-3 + 1e-6 * size, "grouped": 2e-3}.get(variant.algorithm, 5e-3 + 1e-6 * size)
    extra = (
        0.0
        if variant.algorithm == NATIVE
        else 1e-4 * sum(isinstance(v, int) and v > 2 for v in variant.params.values())
    )
    return base + extra


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


def test_native_stays_unless_beaten_beyond_noise() -> None:
    """All alike within the noise: native everywhere; native slower by more: never native."""
    results = search(Machine(lambda size, variant: 1e-3, noise=0.1), 60.0).run([8, 4096])
    assert {result.winner.algorithm for result in results} == {NATIVE}
    slower = Machine(lambda size, variant: 2e-3 if variant.algorithm == NATIVE else 1e-3, noise=0.1)
    assert NATIVE not in {result.winner.algorithm for result in search(slower, 60.0).run([8, 4096])}


def test_a_phase_of_the_machine_is_not_believed() -> None:
    """What is faster for a while, and slower when it is measured again, is not chosen; what is so twice is."""
    for passes, expected in ((True, NATIVE), (False, "bruck")):
        machine = Machine(lambda size, variant: 1e-3, noise=0.01)

        def cost(size: int, variant: Variant, machine: Machine = machine, passes: bool = passes) -> float:
            better = 1.2 if passes and machine.opened > 1 else 0.8
            return 1e-3 * {NATIVE: 1.0, "bruck": better}.get(variant.algorithm, 3.0)

        machine.cost = cost
        found = search(machine, 20.0).run([8])
        assert [result.winner.algorithm for result in found] == [expected]
        assert found[0].again == pytest.approx(1 / 1.2 if passes else 1 / 0.8, rel=0.05)


@pytest.mark.parametrize("budget", [1.0, 10.0, 60.0])
def test_budget_is_kept(budget: float) -> None:
    """Up to the least that decides at each size."""
    machine = Machine(lambda size, variant: 0.01)
    results = search(machine, budget).run([8, 64, 512, 4096])
    assert [r.size for r in results if r.size in (8, 64, 512, 4096)] == [8, 64, 512, 4096]
    assert machine.now < 1.2 * budget + 4 * 0.01 * 60


def test_slow_ones_drop_out_early() -> None:
    machine = Machine(lambda size, variant: 1e-3 if variant.algorithm in (NATIVE, "bruck") else 1e-2)
    search(machine, 100.0).run([64])
    counts = machine.measured[64]
    assert counts["native"] > 8
    assert max(count for name, count in counts.items() if not name.startswith(("bruck", "native"))) <= 2


def test_goes_on_where_it_was() -> None:
    machine = Machine(crossing)
    told: list[SizeResult] = []
    first = search(machine, 60.0)
    first.report = told.append
    first.run([8, 64])
    measured = {size: dict(counts) for size, counts in machine.measured.items()}
    again = search(machine, 60.0)
    again.done = {result.size: result for result in told}
    results = again.run([8, 64, 512])
    assert {8, 64, 512} <= {result.size for result in results}
    assert all(machine.measured[size] == counts for size, counts in measured.items())


@pytest.mark.parametrize("layout", ["2x4", "4x4:cyclic", "5+3+4", "7x1", "1x3"])
@pytest.mark.parametrize("collective", ["alltoall", "allgather"])
def test_variants_can_run_and_differ(collective: str, layout: str) -> None:
    found = variants(collective, parse_layout(layout))
    assert len({variant.key for variant in found}) == len(found) > 5


def test_every_transport_is_tried() -> None:
    """On devices: one that is faster for all variants is found, with its best variant."""

    def cost(size: int, variant: Variant) -> float:
        return {"auto": 3e-3, "staged": 3e-3, "staged:4": 2e-3, "peer": 1e-3}[variant.transport] + crossing(
            size, variant
        )

    machine = Machine(cost)
    wanted = search(machine, 60.0)
    wanted.transports = ("auto", "staged", "staged:4", "peer")
    found = wanted.run([8, 4096])
    assert {each.winner.transport for each in found} == {"peer"}
    assert [found[end].winner.algorithm for end in (0, -1)] == ["bruck", "grouped"]
    assert {name for name in machine.measured[8] if name.startswith("native")} == {"native", "native staged"}


def test_what_is_now_fast_and_now_slow_gives_way() -> None:
    """native takes five times as long as the others in three starts of five, and as long in two."""
    starts = cycle((5e-2, 1e-2, 5e-2, 1e-2, 5e-2))

    def cost(size: int, variant: Variant) -> float:
        return next(starts) if variant.algorithm == NATIVE else 1.02e-2

    (found,) = search(Machine(cost, noise=0.002), 60.0).run([64])
    assert found.winner.algorithm != NATIVE
    natives = [1.0, 5.0, 1.0, 5.0, 5.0]
    assert _steadier(natives, [1.02] * 5)
    assert not _steadier([1.02] * 5, natives) and not _steadier([1.1] * 5, [1.02] * 5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=60))
def test_interval_holds_the_median(values: list[float]) -> None:
    low, high = interval(values)
    assert min(values) <= low <= median(values) <= high <= max(values)
    if len(values) <= 5:
        assert (low, high) == (min(values), max(values))


def test_interval_covers_as_often_as_it_says() -> None:
    generator = random.Random(3)
    for n in (6, 9, 20):
        inside = 0
        for _ in range(2000):
            low, high = interval([generator.expovariate(1.0) for _ in range(n)])
            inside += low <= 0.6931 <= high
        assert inside / 2000 > 0.94


def test_choices_start_halfway() -> None:
    a, b = Variant("bruck", {"radix": 2}), Variant(NATIVE)
    results = [SizeResult(size, winner, (), 1.0) for size, winner in ((8, a), (64, a), (256, b), (1024, a))]
    assert [(choice.start, choice.variant) for choice in choices(results)] == [(1, a), (128, b), (512, a)]


def run_trial(candidates: list[Variant], cost: Callable[[Variant], float]) -> tuple[Variant, list[Variant]]:
    """The winner, and what was tried call by call."""
    trial = Trial(candidates, lambda seconds: seconds)
    tried = []
    while trial.winner is None:
        tried.append(trial.current)
        trial.note(cost(trial.current))
        assert len(tried) < 10_000
    return trial.winner, tried


def test_online_takes_the_fastest() -> None:
    candidates = [Variant(NATIVE), Variant("bruck", {"radix": 2}), Variant("bruck", {"radix": 4})]
    winner, tried = run_trial(candidates, lambda variant: 1.0 + int(variant.params.get("radix", 9)))
    assert winner == candidates[1]
    assert len(tried) == len(candidates) * (CALLS + 1)


@pytest.mark.parametrize("best", [1, 2, 3, 5, 8, 13, 32])
def test_online_segments_up_by_factors_down_by_steps(best: int) -> None:
    """Blink's way ends at, or next to, the best number of segments."""

    def cost(variant: Variant) -> float:
        return 1.0 + abs(int(variant.params["segments"]) - best)

    winner, tried = run_trial([Variant("ring", {"segments": 1})], cost)
    assert abs(int(winner.params["segments"]) - best) <= max(1, best // 2)
    assert len(tried) <= 20 * (CALLS + 1)


def test_online_explorer_needs_no_segments() -> None:
    explorer = explore([Variant(NATIVE)])
    assert next(explorer) == Variant(NATIVE)
    with pytest.raises(StopIteration) as stop:
        explorer.send(1.0)
    assert stop.value.value == Variant(NATIVE)


@pytest.mark.parametrize("faster", [True, False])
def test_regime(faster: bool) -> None:
    """Tries both where small blocks abound, keeps what is faster, and asks more and more seldom; in the
    end no more, if that is native."""
    other, many, few = Variant("aggregate", {}), Spread(16, 16, 160, 10), Spread(3, 3, 30, 10)

    def candidates(spread: Spread) -> list[Variant]:
        return [Variant(NATIVE), other] if spread == many else [Variant(NATIVE)]

    regime = Regime(candidates, lambda seconds: seconds, lambda numbers: numbers)
    periods = []
    for _ in range(4):
        assert not regime.left
        regime.survey(many)
        while regime.trial is not None:
            regime.note(1.0 if (regime.current is other) == faster else 2.0)
        assert (regime.current == other) == faster and regime.is_native == (not faster)
        periods.append(regime.left)
        regime.left = 0
    assert periods == [32, 64, 128, 256 if faster else FOR_GOOD] and regime.is_surely_native == (not faster)
    regime.survey(few)  # the library's own, without a trial
    assert regime.trial is None and regime.is_native


FOUR = parse_layout("2x2")
MANY = Spread(filled=16, small=16, nbytes=1600, most=200)  # of 4 ranks
UNEVEN = Entry("alltoallv", "MPICH 5.0.2", "host", (2, 2), "block", (), ())


def uneven_table(*choices: Choice) -> Table:
    """With an entry for alltoallv on 2x2."""
    figures = [Figure(choice.start, choice.variant, 1e-5, 1e-5, 1e-5, 5) for choice in choices]
    return Table((replace(UNEVEN, choices=choices, figures=tuple(figures)),))


@pytest.mark.parametrize(
    ("spread", "tried"),
    [
        (MANY, True),
        (MANY._replace(filled=8), False),  # sparse
        (MANY._replace(small=14), False),  # large
        (MANY._replace(unfit=1), False),  # what a rank has only the MPI library can serve
        (MANY._replace(filled=0, small=0, nbytes=0, most=0), False),
    ],
)
def test_uneven_without_table(spread: Spread, tried: bool) -> None:
    """Where small blocks abound, putting them together is tried."""
    found = uneven_choices(FOUR, spread, Table(), "MPICH 5.0.2")
    assert found == ((Variant(NATIVE), AGGREGATE) if tried else (Variant(NATIVE),))
    kept = uneven_choices(FOUR, spread, Table(), "MPICH 5.0.2", tried=False)
    assert kept == found
    assert uneven_choices(FOUR, MANY._replace(nbytes=16_000), Table(), "", tried=False) == (Variant(NATIVE),)
    assert uneven_choices(parse_layout("1x1"), MANY, Table(), "MPICH 5.0.2") == (Variant(NATIVE),)


def test_uneven_by_table() -> None:
    """By total, maximum and number of the blocks: a table decides for blocks like those it was made with."""
    pairwise = Variant("pairwise", {"exchange": "rotation"})
    table = uneven_table(Choice(1, pairwise), Choice(1000, Variant(NATIVE)))

    def found(spread: Spread, layout: str = "2x2", mpi: str = "MPICH 5.0.2") -> tuple[Variant, ...]:
        return uneven_choices(parse_layout(layout), spread, table, mpi)

    native, together = (Variant(NATIVE),), (Variant(NATIVE), AGGREGATE)
    assert found(MANY) == (Variant(NATIVE), pairwise)
    assert found(MANY._replace(nbytes=16000, most=2000)) == native  # large ones
    assert found(MANY._replace(most=2000)) == together  # one much larger than the others: not what was measured
    assert found(MANY._replace(filled=8)) == native  # sparse ones
    assert found(MANY, mpi="Open MPI 5.0.11") == found(MANY._replace(filled=36, small=36), "2x3") == together
