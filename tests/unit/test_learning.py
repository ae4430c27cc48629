"""Learning from a program's own calls: finds what is fastest, within its budget, whatever the program does between."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from math import exp, inf

import pytest

from hiercoll.collectives import NATIVE
from hiercoll.tables import NATIVE_VARIANT, Variant
from hiercoll.tuner import Spread
from hiercoll.tuning import budget, learning
from hiercoll.tuning.budget import (
    FIRST,
    LONGEST_WAIT,
    MEETINGS,
    REINVESTED,
    THINKING,
    Budget,
    Kind,
)
from hiercoll.tuning.learning import CHANGED, FEWER, LONGEST, LOOKS, MOST_ALIKE, ROUNDS, Finding, Learner
from hiercoll.tuning.share import LEADS, SHARE, part_of_share

RADICES = [NATIVE_VARIANT, Variant("bruck", {"radix": 2}), Variant("bruck", {"radix": 8})]
BRUCK = RADICES[1]
Cost = Callable[[Variant, int], float]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thinking, which takes 20 us whatever these cores do: calls are simulated, and so is this."""
    looks = count()
    monkeypatch.setattr(learning, "perf_counter", lambda: 20e-6 * next(looks))


@dataclass
class Job:
    """Ranks that make calls of one kind; a call takes what ``cost`` says of its variant and number."""

    cost: Cost
    candidates: Sequence[Variant] = tuple(RADICES)
    ranks: int = 2
    share: float = SHARE
    meeting: float = 1e-5
    plan: float = 1e-4
    late: Callable[[int, int], float] = lambda rank, call: 0.0  # seconds by which a rank comes late to a call
    known: Finding | None = None
    rarely: bool = False
    alike: Callable[[Variant], Sequence[Variant]] = lambda variant: ()
    slack: float = 1.0  # how much longer a call takes the slowest rank than the one that waits the least
    tried: list[Variant] = field(default_factory=list)
    seconds: float = 0.0  # of all calls, trials and agreements included, without what ranks wait for late ones
    native: float = 0.0  # that they would take by native
    calls: int = 0

    def __post_init__(self) -> None:
        self._words: list[list[float]] = []  # that ranks have agreed on
        self._heard = [0] * self.ranks  # how many of them each has heard
        self._made: set[tuple[object, ...]] = {NATIVE_VARIANT.key}
        self.findings: list[Finding] = []
        self.learners = [
            Learner(
                lambda own: self.candidates, partial(self._agree, rank), Budget(self.share),
                self.findings.append if rank == 0 else lambda finding: None, self.known, self.rarely,
                alike=self.alike,
            )
            for rank in range(self.ranks)
        ]  # fmt: skip

    def _agree(self, rank: int, values: Sequence[float]) -> list[float]:
        """What the first rank says, since ranks are driven alike; but they take different times to think."""
        self.seconds += self.meeting / self.ranks
        if self._heard[rank] == len(self._words):
            self._words.append(list(values))
        self._heard[rank] += 1
        agreed = self._words[self._heard[rank] - 1]
        assert len(agreed) == len(values)
        return agreed

    def run(self, calls: int) -> Job:
        """Make so many calls."""
        for _ in range(calls):
            chosen = [learner.begin() for learner in self.learners]
            assert len({each.key for each in chosen}) == 1
            (variant, trying) = chosen[0], self.learners[0].is_trying
            took = self.cost(variant, self.calls) + (0.0 if variant.key in self._made else self.plan)
            self._made.add(variant.key)
            if trying:
                self.tried.append(variant)
                self.seconds += self.meeting
            self.seconds += took
            self.native += self.cost(NATIVE_VARIANT, self.calls)
            for learner in self.learners:
                learner.note(took if trying else took / self.slack, self.meeting if trying else 0.0)
            self.calls += 1
        return self

    @property
    def finding(self) -> Finding | None:
        return self.learners[0].finding


def steady(**seconds: float) -> Cost:
    """By algorithm."""
    return lambda variant, call: seconds[variant.algorithm]


def noisy(cost: Cost, sigma: float, seed: int = 0) -> Cost:
    generator = random.Random(seed)
    return lambda variant, call: cost(variant, call) * exp(generator.gauss(0, sigma))


def by_radix(variant: Variant, call: int, native: int = 9) -> float:
    return 1e-3 * (1.0 + 0.1 * int(variant.params.get("radix", native)))


@pytest.mark.parametrize("slack", [1.0, 0.5], ids=["alike", "shorter"])
def test_trials_cost_what_they_take_longer_than_the_programs_own_calls(slack: float) -> None:
    """Where calls that begin together are shorter than those of the program, they cost nothing, nor do they earn."""
    job = Job(steady(native=1e-2, bruck=1.09e-2), RADICES[:2], slack=slack, plan=0.0, meeting=1e-6).run(4000)
    tried = [each for each in job.tried if not each.is_native]
    assert job.finding is not None and job.finding.variant.is_native and len(tried) > LOOKS
    cost, dearer = job.learners[0].budget.cost, 0.9e-3 * len(tried)
    assert cost > 0.9 * dearer if slack == 1.0 else 0.0 < cost < 0.2 * dearer


@pytest.mark.parametrize("sizes", [[16], [4] * 4, [5, 3, 4], [1] * 7])
def test_parts_add_up(sizes: list[int]) -> None:
    """Of what finding out may cost, for communicators side by side; those of other jobs' ranks have no more."""
    whole = sum(sizes)
    parts = [part_of_share(size, whole, leads=number == 0) for number, size in enumerate(sizes)]
    assert abs(sum(parts) - 1.0) < 1e-9 and parts[0] >= LEADS > max(parts[1:], default=0.0)
    assert part_of_share(2 * whole, whole, leads=True) == 1.0


@pytest.mark.parametrize(("native", "pairs"), [(9, LOOKS), (4, ROUNDS[0])])
def test_takes_the_fastest(native: int, pairs: int) -> None:
    """One candidate after the other: a call that makes its plan, some pairs, and, if these are not all clearly shorter,
    those that decide."""
    job = Job(partial(by_radix, native=native), share=inf).run(100)
    assert job.finding is not None and job.finding.variant == BRUCK == job.learners[0].current
    first, second = 1 + 2 * pairs, 1 + 2 * LOOKS  # the second is slower than the first at first sight
    assert len(job.tried) == first + second
    assert job.tried[0] == BRUCK and job.tried[first] == RADICES[2]
    tried = job.tried[1:first]
    assert all({a.algorithm, b.algorithm} == {NATIVE, "bruck"} for a, b in zip(tried[::2], tried[1::2], strict=True))
    assert {tried[0].algorithm, tried[2].algorithm} == {NATIVE, "bruck"}  # neither is always the first
    assert job.finding.seconds == pytest.approx(1.2e-3)
    assert job.finding.native == pytest.approx(1e-3 * (1.0 + 0.1 * native))
    then, last = job.findings
    assert then == job.finding._replace(calls=first, untried=(RADICES[2],)) and last == job.finding


@pytest.mark.parametrize("left", [4, 3, 2, 1])
def test_a_later_job_goes_on_where_one_has_ended(left: int) -> None:
    """With the candidates that have not been tried, without asking which there are; calls of both count."""
    rest = (Variant("bruck", {"radix": 4}), Variant("ring", {}))
    candidates = [*RADICES, *rest]

    def cost(variant: Variant, call: int) -> float:
        return 2e-2 if variant.algorithm == "ring" else 10 * by_radix(variant, call)

    first = Job(cost, candidates).run(FIRST + 1)
    while len(first.findings[-1].untried) > left:
        first.run(1)
    known = first.findings[-1]
    assert known.untried == tuple(candidates[-left:]) and not first.learners[0].is_settled
    later = Job(cost, [NATIVE_VARIANT], known=known)
    assert later.learners[0].begin() == known.variant and not later.learners[0].is_settled
    later.run(2000)
    assert later.finding is not None and later.finding.variant == BRUCK and later.learners[0].is_settled
    wanted = [NATIVE_VARIANT, BRUCK, *known.untried]
    assert {each.key for each in later.tried} == {each.key for each in wanted}
    last = later.findings[-1]
    assert last.untried == () and known.calls < last.calls < known.calls + later.calls


def test_what_an_earlier_job_has_begun_and_is_slower_here() -> None:
    """It begins anew, with the candidates that there are here."""
    known = Finding(BRUCK, 5e-3, 1e-2, 300, "2026-11-22", (RADICES[2],))
    job = Job(lambda variant, call: {2: 2e-2, 8: 3e-2, 3: 5e-3}.get(variant.params.get("radix", 0), 1e-2),
              [NATIVE_VARIANT, Variant("bruck", {"radix": 3})], known=known).run(1000)  # fmt: skip
    assert job.finding is not None and job.finding.variant.params == {"radix": 3} and RADICES[2] not in job.tried
    assert job.findings[0].calls < known.calls  # not those that said otherwise


def test_what_an_earlier_job_has_begun_and_cannot_run() -> None:
    """Native serves, and the other candidates are tried."""

    def cost(variant: Variant, call: int) -> float:
        return inf if variant == BRUCK else 1e-2 if variant.is_native else 5e-3

    job = Job(cost, [NATIVE_VARIANT], known=Finding(BRUCK, 5e-3, 1e-2, 300, "2026-11-22", (RADICES[2],)))
    job.native = job.seconds = 0.0
    job.run(1000)
    assert job.finding is not None and job.finding.variant == RADICES[2] and job.learners[0].is_settled


@pytest.mark.parametrize("seconds", [1e-2, 1e-3])
def test_what_an_earlier_job_has_found_is_checked_soon(seconds: float) -> None:
    """However much longer calls took there."""
    known = Finding(BRUCK, 5e-1, 5.0, 300, "2026-11-22")
    job = Job(steady(native=seconds, bruck=seconds / 10), RADICES[:2], meeting=1e-6, known=known).run(1000)
    assert job.tried and job.finding is not None and job.finding.native == pytest.approx(seconds)


def test_what_is_found_of_blocks_of_any_sizes_is_gone_on_with() -> None:
    """But for candidates that other blocks of a later job do not have."""
    other = Variant("bruck", {"radix": 4})

    def findings(candidates: Sequence[Variant], known: Finding | None) -> tuple[list[Finding], set[str]]:
        found: list[Finding] = []
        learner, tried = Learner(lambda own: candidates, list, Budget(inf), found.append, known), set()
        for call in range(100):
            chosen = learner.begin(lambda: Spread(1, 1, 1, 1, 0))
            tried |= {str(chosen)} if learner.is_trying else set()
            learner.note(by_radix(chosen, call))
        return found, tried

    found, _ = findings([*RADICES, other], None)
    assert [len(each.untried) for each in found] == [2, 1, 0] and all(each.variant == BRUCK for each in found)
    later, tried = findings(RADICES, found[0])
    assert [each.untried for each in later] == [()] and later[0].variant == BRUCK and str(other) not in tried


def beside(variant: Variant) -> list[Variant]:
    """Radices next to a variant's."""
    radix = int(variant.params["radix"])
    return [Variant("bruck", {"radix": each}) for each in (radix - 1, radix + 1) if each >= 0]


def radices(tried: Sequence[Variant]) -> list[int]:
    return list(dict.fromkeys(int(each.params["radix"]) for each in tried if not each.is_native))


def test_what_differs_from_the_winner_in_one_parameter_is_tried_then() -> None:
    """And what differs from that, if it is faster, each once; an earlier job's is gone on with."""
    job = Job(by_radix, alike=beside, share=inf).run(400)
    assert radices(job.tried) == [2, 8, 1, 3, 0] and job.learners[0].is_settled
    assert job.finding is not None and job.finding.variant.params == {"radix": 0}
    assert [[each.params["radix"] for each in found.untried] for found in job.findings] == [[8], [1, 3], [3], [0], []]
    later = Job(lambda *call: 10 * by_radix(*call), alike=beside, known=job.findings[1]).run(2000)
    assert set(radices(later.tried)) == {2, 1, 3, 0} and later.finding is not None
    assert later.finding.variant.params == {"radix": 0} and later.learners[0].is_settled


def test_only_so_many_are_tried_besides_the_candidates() -> None:
    """However far the best is from the winner; none where native stays."""
    job = Job(lambda variant, call: 1e-3 * (1 + 0.5 * int(variant.params.get("radix", 99))),
              [NATIVE_VARIANT, Variant("bruck", {"radix": 50})], alike=beside, share=inf).run(1500)  # fmt: skip
    assert len(radices(job.tried)) == 1 + MOST_ALIKE and job.learners[0].is_settled
    stays = Job(steady(native=1e-3, bruck=2e-3), alike=beside, share=inf).run(400)
    assert radices(stays.tried) == [2, 8] and stays.learners[0].is_settled


def test_a_better_one_replaces_the_first() -> None:
    """What it gains is against native."""
    job = Job(by_radix, [NATIVE_VARIANT, RADICES[2], Variant("bruck", {"radix": 0})], share=inf).run(200)
    assert job.finding is not None and job.finding.variant.params == {"radix": 0}
    assert job.finding.seconds == pytest.approx(1e-3) and job.finding.native == pytest.approx(1.9e-3)


def test_candidates_are_tried_in_their_order() -> None:
    """Whatever wins: the model's order is the best guess."""
    candidates = [*RADICES, Variant("ring", {})]
    job = Job(
        lambda variant, call: {NATIVE: 1e-3, "bruck": 5e-4, "ring": 2e-3}[variant.algorithm], candidates, share=inf
    )
    job.run(200)
    tried = [each.params.get("radix", each.algorithm) for each in job.tried if not each.is_native]
    assert list(dict.fromkeys(tried)) == [2, 8, "ring"]


def test_keeps_native_where_nothing_is_faster() -> None:
    """What is hopeless has a few calls."""
    job = Job(lambda variant, call: 1e-3 * (1.0 + (variant.algorithm != NATIVE)), share=inf).run(100)
    assert job.finding is not None and job.finding.variant == NATIVE_VARIANT
    assert len(job.tried) == 2 * (1 + 2 * LOOKS)
    alone = Job(steady(native=1e-3), [NATIVE_VARIANT]).run(100)
    assert alone.finding is not None and alone.finding.variant == NATIVE_VARIANT and not alone.tried


@pytest.mark.parametrize(
    ("native", "slower", "calls"),
    [
        (1.0, 5.0, 1), (1.0, 3.0, 1 + 4 * FEWER), (1.0, 1.2, 1 + 4 * LOOKS),
        (1e-2, 5.0, 1 + 2 * FEWER), (1e-2, 1.2, 1 + 2 * LOOKS),
    ],
)  # fmt: skip
def test_what_is_far_too_slow_has_fewer_calls(native: float, slower: float, calls: int) -> None:
    """Where a call takes longer than to agree on what is next, or far longer than a plan to make."""
    job = Job(steady(native=native, bruck=native * slower), RADICES[:2]).run(1000)
    assert job.finding is not None and job.finding.variant == NATIVE_VARIANT
    assert len(job.tried) == calls


def test_what_is_slow_after_another_is_judged_after_its_own() -> None:
    """A candidate that is slow in the call after native's only: there connections have lost data."""
    before = [NATIVE]

    def cost(variant: Variant, call: int) -> float:
        if variant.algorithm == NATIVE:  # the job's own question of what native takes is no call
            return 1.4
        return 1.1 if before[0] == variant.algorithm else 1.8

    job = Job(cost, RADICES[:2])
    for _ in range(300):
        tried = len(job.tried)
        job.run(1)
        before[0] = job.tried[-1].algorithm if len(job.tried) > tried else job.learners[0].current.algorithm
    assert job.finding is not None and job.finding.variant == BRUCK
    assert job.finding.seconds == pytest.approx(1.1)


def test_what_a_first_call_has_shown_is_not_paid_for_twice() -> None:
    """Of long calls, one that is no slower than native lets pairs follow at once; for others there must be more."""

    def calls_between(seconds: float) -> int:
        job = Job(steady(native=1.0, bruck=seconds), RADICES[:2])
        for learner in job.learners:
            learner.budget.call = 1.0  # so that few calls come first
        when = list[int]()
        while len(job.tried) < 2:
            tried = len(job.tried)
            job.run(1)
            when += [job.calls] * (len(job.tried) - tried)
        return when[1] - when[0] - 1

    assert calls_between(0.9) == 0
    assert calls_between(1.5) > FEWER * 0.5 / SHARE


def test_a_few_calls_that_take_far_too_long_hide_nothing() -> None:
    """One in seven takes four times as long, whatever serves it."""
    found = 0
    for seed in range(20):
        generator = random.Random(seed)

        def cost(variant: Variant, call: int, generator: random.Random = generator) -> float:
            seconds = {NATIVE: 1.4e-3, "bruck": 1e-3}[variant.algorithm] * exp(generator.gauss(0, 0.1))
            return seconds * (4 if generator.random() < 1 / 7 else 1)

        finding = Job(cost, RADICES[:2], share=inf).run(100).finding
        found += finding is not None and finding.variant == BRUCK
    assert found >= 16


def test_a_first_look_forgives() -> None:
    """Two of its four calls by the faster one take far too long."""
    seconds = {NATIVE: 1.4e-3, "bruck": 1e-3}

    def cost(variant: Variant, call: int) -> float:
        return seconds[variant.algorithm] * (9 if call in (1, 4) else 1)

    job = Job(cost, RADICES[:2], share=inf).run(100)
    assert job.tried[:7] == [BRUCK, BRUCK, NATIVE_VARIANT, NATIVE_VARIANT, BRUCK, BRUCK, NATIVE_VARIANT]
    assert job.finding is not None and job.finding.variant == BRUCK


def test_what_ranks_wait_for_each_other_is_no_cost_of_trials() -> None:
    """The slowest rank takes three times as long as the one by whose time calls are counted."""
    job = Job(steady(native=2e-3, bruck=1.8e-3), RADICES[:2], slack=3.0).run(220)
    assert job.finding is not None and job.finding.variant == BRUCK


@pytest.mark.parametrize("count", [1, 2, 6])
def test_equals_replace_native_seldom(count: int) -> None:
    """Each in at most 5 % of trials; what is twice as fast always does."""
    candidates = [NATIVE_VARIANT, *(Variant("bruck", {"radix": 2 + number}) for number in range(count))]
    runs, replaced = 400, 0
    for seed in range(runs):
        job = Job(noisy(lambda variant, call: 1e-3, 0.2, seed), candidates, ranks=1, share=inf).run(200)
        replaced += job.finding is not None and not job.finding.variant.is_native
    assert replaced / runs <= 1.01 - 0.95**count

    def twice(variant: Variant, call: int) -> float:
        return 1e-3 * (0.5 if variant.params.get("radix") == 2 else 1)

    jobs = [Job(noisy(twice, 0.1, seed), candidates, share=inf, ranks=1).run(300) for seed in range(40)]
    assert all(job.finding is not None and job.finding.variant == candidates[1] for job in jobs)


def test_slower_ones_hardly_ever_replace_native() -> None:
    """Five that take a tenth longer, where calls vary by a fifth."""
    candidates = [NATIVE_VARIANT, *(Variant("bruck", {"radix": 2 + number}) for number in range(5))]
    runs, replaced = 200, 0
    for seed in range(runs):
        cost = noisy(steady(native=1e-3, bruck=1.1e-3), 0.2, seed)
        finding = Job(cost, candidates, ranks=1, share=inf).run(200).finding
        replaced += finding is not None and not finding.variant.is_native
    assert replaced / runs <= 0.02


@pytest.mark.parametrize(
    ("gain", "sigma", "least"), [(1.1, 0.1, 0.5), (1.2, 0.1, 0.92), (1.3, 0.3, 0.6), (1.5, 0.5, 0.55)]
)
def test_what_is_faster_is_found(gain: float, sigma: float, least: float) -> None:
    """In so many jobs at least, where calls vary so."""
    runs, found = 100, 0
    for seed in range(runs):
        cost = noisy(steady(native=1e-3, bruck=1e-3 / gain), sigma, seed)
        finding = Job(cost, [NATIVE_VARIANT, BRUCK], ranks=1, share=inf).run(120).finding
        found += finding is not None and not finding.variant.is_native
    assert found / runs >= least


@pytest.mark.parametrize("best", [1, 2, 3, 5, 8, 13, 32])
def test_segments_up_by_factors_down_by_steps(best: int) -> None:
    """Blink's way ends at, or next to, the best number of segments."""

    def cost(variant: Variant, call: int) -> float:
        return 1.0 if variant.algorithm == NATIVE else 0.01 + 0.01 * abs(int(variant.params["segments"]) - best)

    job = Job(cost, [NATIVE_VARIANT, Variant("ring", {"segments": 1})], share=inf).run(400)
    assert abs(int(job.learners[0].current.params["segments"]) - best) <= max(1, best // 2)
    begun, last = job.findings  # a later job is to tune their number, too
    assert begun.untried == (begun.variant,) and last.untried == () and begun.native == last.native == 1.0


@pytest.mark.parametrize("native", [2e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("better", [True, False])
def test_cost_is_bounded(native: float, better: bool) -> None:
    """Trials, agreements and plans take at most the share, at any time but for the plan that is being made, and what
    ranks will tell each other next; and where there is something to be gained, it is found in time."""
    cost = steady(native=native, bruck=native * (0.6 if better else 1.3))
    job = Job(cost, meeting=min(native, 3e-4), plan=5 * native)
    for calls in range(100, 2000, 100):
        job.run(100)
        assert job.seconds <= (1 + SHARE) * job.native + job.plan + 2 * job.meeting, calls
    if better and native > 1e-3:
        assert job.finding is not None and job.finding.variant == BRUCK
        assert job.findings[0].calls <= 300
    if not better:
        assert job.learners[0].begin().is_native or job.learners[0].is_trying


def test_what_has_been_found_pays_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it saves a part: later candidates are tried sooner, and all calls still take no longer than native's and
    the share."""
    cost = steady(native=1e-3, bruck=0.3e-3, ring=0.28e-3, pairwise=0.31e-3, grouped=0.2e-3)
    candidates = [NATIVE_VARIANT, *map(Variant, ("bruck", "pairwise", "ring", "grouped"))]
    after = []
    for part in (0.0, REINVESTED):
        monkeypatch.setattr("hiercoll.tuning.budget.REINVESTED", part)
        job = Job(cost, candidates, meeting=3e-4, plan=5e-3)
        while job.learners[0].current.algorithm != "grouped" or job.learners[0].is_trying:
            job.run(10)
            assert job.seconds <= (1 + SHARE) * job.native + job.plan + 2 * job.meeting
        after.append(job.calls)
    assert after[1] < 0.7 * after[0]


def test_calls_of_other_kinds_pay_for_trials() -> None:
    """Soon after other calls of the communicator have earned what a trial costs, and without asking other ranks, short
    ones try what they could not afford."""
    agreements, budget = [0], Budget(plan=0.1)

    def agree(values: Sequence[float]) -> list[float]:
        agreements[0] += 1
        return list(values)

    short, long = Learner(lambda own: RADICES, agree, budget), Learner(lambda own: RADICES[:1], agree, budget)

    def serve(learner: Learner, seconds: float) -> None:
        learner.begin()
        learner.note(seconds)

    for _ in range(1100):
        serve(short, 1e-4)
    assert not short.trials
    asked = agreements[0]
    calls = 0
    while not short.trials:
        serve(short, 1e-4)
        serve(long, 1e-1)
        calls += 1
    assert calls <= 2.0 / 0.1 + 2 * FIRST  # of which each pays for 5 ms
    assert agreements[0] <= asked + 3


def test_conditions_change() -> None:
    """What was best is no longer: within 500 calls the choice follows. Where the program alone is slower, but not calls
    that begin together, nothing is tried anew."""

    def cost(variant: Variant, call: int) -> float:
        return 1e-2 * (1.0 if variant.is_native else 0.5 if call < 800 else 4.0)

    job = Job(cost, [NATIVE_VARIANT, BRUCK]).run(800)
    assert job.learners[0].current == BRUCK
    job.run(500)
    assert job.finding is not None and job.finding.variant == NATIVE_VARIANT
    assert [each.variant for each in job.findings if not each.untried] == [BRUCK, NATIVE_VARIANT]
    job = Job(steady(native=1e-2, bruck=5e-3), [NATIVE_VARIANT, BRUCK]).run(800)
    before = len(job.tried)
    for learner in job.learners:  # calls that the program makes late, but together
        learner._kind.typical *= 2
    job.run(400)
    assert len(job.tried) == before


@pytest.mark.parametrize(
    ("call", "known", "enough"),
    [(0.0, inf, 16), (1e-4, inf, 16), (2e-3, inf, 10), (1.0, inf, 3), (1e-4, 1.0, 3), (1.0, 1e-4, 16)],
)
def test_few_long_calls_say_enough(call: float, known: float, enough: int) -> None:
    """So few that looking at their time costs no more than the share; an earlier job knows how long they are."""
    budget = Budget(meeting=(1e-3 - THINKING) / MEETINGS, cores=1.0, call=call)
    finding = None if known == inf else Finding(BRUCK, known, known, 300)
    learner = Learner(lambda own: RADICES, list, budget, known=finding)
    learner.begin()
    assert learner.tally[0] == (enough if finding is None else 4 * enough)


def test_looks_become_rare() -> None:
    """Ranks look at their times every so many calls; where they need not wait for each other, ever more seldom."""
    agreements, served = [0], [0]

    def agree(values: Sequence[float]) -> list[float]:
        agreements.append(served[0])
        return list(values)

    for rarely in (False, True):
        agreements.clear()
        learner = Learner(lambda own: [NATIVE_VARIANT], agree, Budget(), rarely=rarely)
        for served[0] in range(20000):
            learner.begin()
            learner.note(1e-3)
        gaps = [b - a for a, b in pairwise(agreements)]
        assert gaps[:2] == [2 * FIRST, 4 * FIRST]
        assert max(gaps) == LONGEST if not rarely else all(b == 2 * a for a, b in pairwise(gaps))


@pytest.mark.parametrize(("faster", "kept"), [(True, True), (False, False)])
def test_what_an_earlier_job_has_found(faster: bool, kept: bool) -> None:
    """It serves from the first call on, and is compared with native after some."""
    known = Finding(BRUCK, 5e-3, 1e-2, 300, "2026-11-22")
    job = Job(steady(native=1e-2, bruck=5e-3 if faster else 2e-2), [NATIVE_VARIANT, BRUCK], known=known)
    assert job.learners[0].begin() == BRUCK and job.finding == known
    job.run(500)
    assert (job.learners[0].current == BRUCK) == kept
    assert job.findings == [] if kept else job.findings[0].variant == NATIVE_VARIANT


@pytest.mark.parametrize(("seconds", "anew"), [(4e-3, False), (2e-2, False), (1e-3, True), (1e-1, True)])
def test_what_an_earlier_job_has_found_elsewhere(seconds: float, anew: bool) -> None:
    """That native serves best on links of another rate does not keep candidates from being tried."""
    job = Job(
        steady(native=seconds, bruck=seconds / 2), [NATIVE_VARIANT, BRUCK],
        known=Finding(NATIVE_VARIANT, 1e-2, 1e-2, 300, "2026-11-22"),
    ).run(200)  # fmt: skip
    assert (BRUCK in job.tried) == anew


def test_what_cannot_run_is_not_taken() -> None:
    """Nor served by again, where an earlier job has found it."""

    def cost(variant: Variant, call: int) -> float:
        return 1e-3 if variant.is_native else inf

    job = Job(cost, share=inf)
    job.native = 0.0
    job.run(100)
    assert job.finding is not None and job.finding.variant == NATIVE_VARIANT
    known = Job(cost, known=Finding(BRUCK, 1e-3, 2e-3, 9))
    assert known.learners[0].begin() == BRUCK
    before = known.learners[0].tally
    left = before[0]
    known.run(3)
    assert known.learners[0].current == NATIVE_VARIANT
    assert before[0] == 0 and known.learners[0].tally[0] == left - 3


def test_candidates_by_the_blocks_of_a_call() -> None:
    """They are asked for anew at each look; others than before begin a new trial."""
    spreads, asked = [Spread(3, 3, 30, 10)], []

    def candidates(own: Callable[[], Spread] | None) -> list[Variant]:
        assert own is not None
        asked.append(own())
        return [NATIVE_VARIANT, BRUCK] if own().filled > 9 else [NATIVE_VARIANT]

    learner = Learner(candidates, list, Budget(inf))
    calls = 0
    for calls in range(3000):
        variant = learner.begin(lambda: spreads[0])
        learner.note(1.0 if variant.is_native else 0.5)
        if calls == 1000:
            assert learner.finding is not None and learner.finding.variant.is_native
            spreads[0] = Spread(16, 16, 160, 10)
        if learner.current == BRUCK and not learner.is_trying:
            break
    assert 1000 < calls < 1000 + LONGEST + 60 and len(set(asked)) == 2


def test_changes_are_seen_from_both_sides() -> None:
    """A little more is noise."""
    for factor, anew in ((1.1, False), (1.5, True), (0.9, False), (0.5, True)):
        assert (not 1 / CHANGED < factor < CHANGED) == anew

        def cost(variant: Variant, call: int, factor: float = factor) -> float:
            return 1e-2 * (factor if call > 1000 else 1.0) * (1.0 if variant.is_native else 0.8)

        job = Job(cost, [NATIVE_VARIANT, BRUCK]).run(1000)
        before = len(job.findings)
        job.run(700)
        assert (len(job.findings) > before) == anew


def test_first_candidates_of_all_kinds_come_first() -> None:
    """Where savings are scarce, and others look for something, a later candidate waits; alone it does not."""

    def tried_by(kinds: int) -> list[int]:
        """How many candidates each kind of calls has tried when the first one tries its third."""
        budget = Budget(meeting=1e-4, plan=1e-2, call=1e-3)
        candidates = [NATIVE_VARIANT, *(Variant("bruck", {"radix": radix}) for radix in (2, 3, 4))]
        learners = [Learner(lambda own: candidates, list, budget) for _ in range(kinds)]
        tried: list[list[Variant]] = [[] for _ in learners]
        for _ in range(20_000):
            for learner, found in zip(learners, tried, strict=True):
                variant = learner.begin()
                is_new = not variant.is_native and variant not in found
                found.extend([variant] if is_new else [])
                if len(found) == 3:
                    return sorted(map(len, tried))
                learner.note((1e-3 if variant.is_native else 1.5e-3) + 1e-2 * is_new, 1e-4 * learner.is_trying)
        raise AssertionError

    assert tried_by(1) == [3]
    assert tried_by(4)[0] == 2


def test_kinds_whose_calls_come_no_more_make_nobody_wait() -> None:
    budget = Budget(meeting=1e-4, plan=1e-2, call=1e-3)
    learners = [Learner(lambda own: RADICES, list, budget) for _ in range(3)]

    def behind() -> int:
        kind = Kind(lambda calls: None)
        kind.place = 3
        return budget.behind(kind)

    for call in range(5000):
        for learner in learners[: 3 if call < 40 else 1]:
            learner.begin()
            learner.note(1e-3 if not learner.is_trying else 1.5e-3)
        if call == 40:
            assert behind() == 3
    assert learners[1]._kind.seeks and behind() == 0


@dataclass
class Clock:
    """Calls of several kinds, one after the other; those in which ranks meet, or think, take longer, and so do those
    that make a plan."""

    monkeypatch: pytest.MonkeyPatch
    budget: Budget
    kinds: int
    seconds: float
    visit: float
    plan: float = 0.0
    now: float = 0.0
    spent: float = 0.0
    visits: int = 0
    meetings: int = 0

    def __post_init__(self) -> None:
        self.monkeypatch.setattr(learning, "perf_counter", lambda: self.now)
        self.made: set[tuple[object, ...]] = set()
        at_once = Budget.visit

        def visit(budget: Budget, asker: Kind, agree: Callable[[Sequence[float]], list[float]]) -> None:
            self.now += self.visit
            self.spent += self.visit
            self.visits += 1
            at_once(budget, asker, agree)

        self.monkeypatch.setattr(Budget, "visit", visit)
        self.learners = [Learner(lambda own: RADICES, self._agree, self.budget) for _ in range(self.kinds)]

    def _agree(self, values: Sequence[float]) -> list[float]:
        self.meetings += 1
        return list(values)

    def run(self, rounds: int) -> Clock:
        """So many calls of each kind."""
        for _ in range(rounds):
            for learner in self.learners:
                variant = learner.begin()
                plan = 0.0 if variant.is_native or (id(learner), variant.key) in self.made else self.plan
                self.made.add((id(learner), variant.key))
                self.now += self.seconds + plan
                self.spent += plan
                learner.note(self.seconds + plan)
        return self


@dataclass
class Sharing:
    """Calls on cores that ranks share: the program computes ``between`` them, longer if calls begin together."""

    monkeypatch: pytest.MonkeyPatch
    between: float
    together: float
    cores: float = 0.5
    seconds: float = 1e-3
    now: float = 0.0
    tried: int = 0

    def __post_init__(self) -> None:
        for module in (learning, budget):
            self.monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        self.budget = Budget(cores=self.cores, plan=1e-4)
        self.learner = Learner(lambda own: RADICES[:2], list, self.budget)

    def run(self, calls: int) -> Sharing:
        """So many calls."""
        for _ in range(calls):
            self.now += self.together if self.learner.is_trying else self.between
            self.learner.begin()
            self.tried += self.learner.is_trying
            self.now += self.seconds
            self.learner.note(self.seconds)
        return self


def test_where_ranks_share_cores_trials_cost_what_the_program_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calls take most of its time."""
    sharing = Sharing(monkeypatch, 0.2e-3, 0.6e-3).run(2000)
    assert sharing.tried and sharing.budget.cost == pytest.approx(sharing.tried * 0.4e-3, rel=0.25)


@pytest.mark.parametrize(("cores", "between"), [(0.5, 5e-3), (1.0, 0.2e-3)], ids=["seldom", "alone"])
def test_what_a_program_does_between_calls_is_no_cost_of_trials(
    monkeypatch: pytest.MonkeyPatch, cores: float, between: float
) -> None:
    """Where that is most of its time, nobody knows how long; where ranks have cores of their own, nothing changes."""
    sharing = Sharing(monkeypatch, between, between + 0.4e-3, cores).run(2000)
    assert sharing.tried and sharing.budget.cost < sharing.tried * 0.1e-3


def test_calls_in_which_ranks_look_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take longer than others is spent."""
    clock = Clock(monkeypatch, Budget(plan=1e3, meeting=1e-5), 1, 1e-3, 5e-3).run(8000)
    assert clock.visits > 5
    agreed = clock.visits - clock.budget.visits
    assert 5e-3 * (agreed - 1) - 1e-9 <= clock.budget.cost <= 5e-3 * clock.visits + 1e-9


def test_ranks_meet_for_all_kinds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, many = (Clock(monkeypatch, Budget(plan=1e3), kinds, 1e-3, 0.0).run(2000) for kinds in (1, 20))
    assert 3 <= many.meetings <= 2 * alone.meetings
    assert all(learner._kind.typical == pytest.approx(1e-3) for learner in many.learners)
    assert many.budget.calls > 10 * alone.budget.calls


@pytest.mark.parametrize("kinds", [1, 5, 40])
def test_meetings_wait_until_calls_pay_for_them(monkeypatch: pytest.MonkeyPatch, kinds: int) -> None:
    """However many kinds there are, and though a meeting takes as long as fifty calls."""
    clock = Clock(monkeypatch, Budget(plan=1e3, meeting=1e-3, call=1e-4), kinds, 1e-4, 5e-3)
    for calls in range(2000, 20_000, 2000):
        clock.run(2000 // kinds)
        assert clock.visits and 5e-3 * clock.visits <= SHARE * 1e-4 * calls + 2 * 5e-3


@pytest.mark.parametrize("kinds", [1, 20])
def test_kinds_that_think_in_one_call_do_not_spend_the_same_twice(monkeypatch: pytest.MonkeyPatch, kinds: int) -> None:
    """What one of them is going to spend is not there for the others."""
    clock = Clock(monkeypatch, Budget(plan=2e-2, meeting=1e-4, call=1e-3), kinds, 1e-3, 1e-3, plan=2e-2)
    for calls in range(500, 20_000, 500):
        clock.run(500 // kinds)
        assert clock.spent <= SHARE * 1e-3 * calls + 2e-2 + 2e-3
    assert clock.spent > 2e-2 * min(kinds, 5)


def test_a_look_counts_before_it_is_agreed_on() -> None:
    """The one that goes on now, too; and not a trial, for which ranks have met."""
    budget = Budget(meeting=1e-3, cores=0.5)
    each = MEETINGS * 1e-3 + THINKING / 0.5
    assert budget.visit_seconds == pytest.approx(each) and budget.unseen_visits == 0.0
    seen: list[float] = []
    budget.join(kind := Kind(lambda missing: seen.append(budget.unseen_visits)))
    budget.visit(kind, list)
    assert seen == [pytest.approx(each)]
    budget.visited(5e-3)
    assert budget.unseen_visits == pytest.approx(each)
    budget.meet(list)
    assert budget.unseen_visits == 0.0 and budget.cost == pytest.approx(5e-3) == budget.visit_seconds


def test_what_some_rank_always_takes_longer_costs_nothing() -> None:
    """In any call some rank does: of a look, what it takes the slowest rank and the fastest one counts alike."""
    for slowest, fastest, due in ((5e-3, -3e-3, 1e-3), (5e-3, 5e-3, 5e-3), (1e-3, -2e-3, 0.0)):
        budget = Budget()
        budget.visited(fastest)
        others = [slowest, -slowest, 0.0, 0.0, 0.0]
        budget.meet(partial(_largest, others))
        assert budget.cost == pytest.approx(due) and budget.visit_seconds == pytest.approx(due)


def test_a_question_counts_once() -> None:
    """Who comes late to it has thought longer before, and waits less: that is no time besides what others wait."""
    budget = Budget()
    budget.visited(5e-3)
    budget.asking = 45e-3
    late = [45e-3 + 5e-3, -50e-3, 5e-3, -5e-3, 0.0]
    budget.meet(partial(_largest, late))
    assert budget.cost == pytest.approx(50e-3) and budget.visit_seconds == pytest.approx(25e-3)


def test_where_ranks_meet_nearly_enough_calls_of_others_are_enough() -> None:
    """Kinds whose calls take turns have not all had the last one then."""
    budget, kinds = Budget(), [Kind(lambda missing: None) for _ in range(3)]
    for kind, left in zip(kinds, (0, 1, 5), strict=True):
        budget.join(kind)
        tally = kind.plan(FIRST, wants=True)
        tally[0], tally[1] = left, (FIRST - left) * 1_000_000
    budget.visit(kinds[0], list)
    assert [kind.typical for kind in kinds] == [pytest.approx(1e-3), pytest.approx(1e-3), inf]


def _largest(others: Sequence[float], mine: Sequence[float]) -> list[float]:
    return [max(*each) for each in zip(others, mine, strict=True)]


def test_what_keeping_takes_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """But is no part of what a look takes."""
    monkeypatch.setattr(learning, "perf_counter", time.perf_counter)
    learner = Learner(lambda own: RADICES, list, budget := Budget(calls=1e3), lambda finding: time.sleep(5e-3))
    for _ in range(100):
        learner.begin()
        learner.note(1e-3)
    assert budget.cost + budget.keeping >= 5e-3 and budget.visit_seconds < 4e-3


@pytest.mark.parametrize("between", [0.5e-3, 10e-3], ids=["dense", "seldom"])
def test_what_is_saved_is_no_more_than_calls_show(between: float) -> None:
    """Nor more than trials did: here twice as fast. Where calls are most of the time, all of it shows that."""
    kind = Kind(lambda missing: None)

    def see(seconds: float) -> float:
        kind.forget()
        kind.see(100, 100 * seconds, 100 * seconds, 100 * (seconds + between))
        return kind.gain

    see(1e-3)
    kind.promise(1.0, was_native=True)
    assert kind.gain == 1.0 and see(0.2e-3) == 1.0
    assert see(0.8e-3) == pytest.approx(1.5 / 1.3 - 1.0 if between < 1e-3 else 1.0 / 0.8 - 1.0) and see(1.1e-3) == 0.0
    kind.promise(0.0, was_native=False)
    assert see(0.5e-3) == 0.0


def test_calls_that_take_no_time_that_a_clock_sees() -> None:
    kind = Kind(lambda missing: None)
    kind.promise(1.0, was_native=True)
    kind.see(16, 0.0, 0.0, 1e-3)
    assert kind.gain == 1.0


def test_what_was_pledged_is_free_again() -> None:
    """After what it was for, and where no such calls come any more."""
    budget = Budget(meeting=1e-4, plan=1e-2, call=1e-3)
    learners = [Learner(lambda own: RADICES, list, budget) for _ in range(3)]
    for call in range(3000):
        for learner in learners[: 1 if learners[1].is_trying else 3]:  # the others' trials never come
            learner.begin()
            learner.note(1e-3, 1e-4 * learner.is_trying)
        assert budget.pledged < 4e-2
        if call > 2900:
            assert sum(learner._kind.pledged for learner in learners) == pytest.approx(budget.pledged)
    assert learners[1].is_trying and learners[1]._kind.pledged == 0.0 and learners[0].is_settled


def test_a_first_plan_says_nothing_of_those_of_other_algorithms() -> None:
    """It also makes what later ones find, such as memory of the node."""
    budget, shared = Budget(plan=0.02), Variant("grouped", {"memory": "shared"})
    budget.planned(shared, 0.25)
    assert budget.plan_seconds(shared) == 0.25
    assert budget.plan_seconds(Variant("pairwise")) == 0.02
    budget.planned(Variant("pairwise"), 0.005)
    assert budget.plan_seconds(Variant("bruck")) == 0.005


def test_an_error_is_raised_once() -> None:
    """In asking for candidates; from then on calls go on as they were served."""

    def failing(own: object) -> Sequence[Variant]:
        raise ZeroDivisionError

    budget, errors = Budget(meeting=1e-4, call=1e-3), 0
    learners = [Learner(failing, list, budget), Learner(lambda own: RADICES, list, budget)]
    for _ in range(6000):
        for learner in learners:
            try:
                learner.begin()
            except ZeroDivisionError:
                errors += 1
            learner.note(1e-3, 1e-4 * learner.is_trying)
    assert errors == 1 and learners[0].current.is_native and learners[1].is_settled


# ---- in turns with native


def served(learner: Learner, calls: int) -> list[tuple[Variant, bool]]:
    """What serves so many calls, and whether they are trials."""
    found = []
    for call in range(calls):
        found.append((learner.begin(), learner.is_trying))
        assert not learner.is_fixed
        learner.note(by_radix(found[-1][0], call))
    return found


def comparing(**more: object) -> Learner:
    return Learner(lambda own: RADICES, list, Budget(inf), compares=True, **more)  # type: ignore[arg-type]


def test_native_takes_turns() -> None:
    """One of each two calls is native's, now the first, now the second; what is learned is as it is otherwise."""
    learner = comparing()
    trials = [each for each, is_trial in served(learner, 60) if is_trial]
    alone = Job(by_radix, share=inf).run(60)
    assert trials == alone.tried and learner.trials == len(trials)
    assert learner.is_settled and learner.current == BRUCK and alone.finding == learner.finding
    before = len(trials)
    calls = served(learner, 2000)
    own = [each for each, is_trial in calls if not is_trial]
    assert set(map(str, own)) == {str(NATIVE_VARIANT), str(BRUCK)} and learner.trials - before < 20
    assert 0.45 < sum(each.is_native for each in own) / len(own) < 0.55
    same = sum(a == b for a, b in pairwise(own))
    assert len(own) * 0.15 < same < len(own) * 0.35  # 0 if they alternated, half if each were drawn by itself
    again = comparing()
    assert [each for each, _ in served(again, 60)[-1:] + served(again, 2000)][1:] == [each for each, _ in calls]


def test_native_takes_turns_with_what_a_table_chooses() -> None:
    """Nothing is tried, and nobody is asked."""
    asked: list[object] = []
    learner = Learner(asked.append, asked.append, Budget(), compares=True, given=BRUCK)  # type: ignore[arg-type]
    calls = served(learner, 3 * LONGEST_WAIT)
    assert not asked and learner.is_settled and not any(is_trial for _, is_trial in calls)
    assert sum(each.is_native for each, _ in calls) == len(calls) / 2
    assert all(each == BRUCK for each, _ in calls if not each.is_native)
    learner.note(inf)  # it cannot run here
    assert all(each.is_native for each, _ in served(learner, 10))
