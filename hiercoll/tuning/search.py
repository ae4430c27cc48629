"""Finding out what is fastest: the search behind ``hiercoll tune``.

Candidates are selected size by size: the cost model sets aside what is hopeless, and the rest takes part in
successive halving (Jamieson, Talwalkar 2016): all are measured a little, the slow ones drop out, the others are
measured more. Each size begins with what was good at the size before; then, downwards, each whose favourite is not
that of the size above tries what is good there. Between neighbours that still differ, sizes in between follow. When
all sizes have their finalists, these are measured anew with native, in single calls and in rows. One replaces native
if these samples, which did not select it, show it faster: beyond chance, with as many finalists and sizes as there
were, and not slower in rows. What looks disturbed then is measured once more. Plans are treated alike, for themselves.
Measuring is handed in as a callable; every decision is made from values that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from math import inf, sqrt
from statistics import median
from typing import Any, Protocol, TypeAlias

from hiercoll.algorithms import REGISTRY
from hiercoll.algorithms.registry import searched
from hiercoll.collectives import AUTO, NATIVE
from hiercoll.model.cost import DEFAULT_LINKS, Links
from hiercoll.statistics import LEVEL, chance, discoveries, quartiles
from hiercoll.tables import (
    COLD,
    NATIVE_FORMS,
    NATIVE_VARIANT,
    PLAN,
    PLAN_ROW,
    ROW,
    SINGLE,
    TIMINGS,
    Choice,
    Figure,
    Variant,
)
from hiercoll.topology import Topology
from hiercoll.tuner import Candidate, rank_by_model

HOPELESS = 5.0  # times the best prediction from which on a variant is not measured
FIXED = 4.0  # seconds that a size gets besides those in proportion to the time of one run, if the budget allows
RUNS = 30  # times the best prediction that it gets besides
MOST_SHARED = 128 << 20  # bytes of shared memory per node that a measured variant may take
LOOK = 2.0  # times the fastest at first look from which on a variant drops out
ROUNDS = ((1, LOOK, 12), (2, 1.3, 7), (3, 1.15, 4))  # samples; slower than the best by which drops out; most that stay
FINALISTS = 2  # for calls, and for plans
FEWEST, FINAL = 8, 22  # samples of finalists, at least and (time permitting) at most
CLEARLY = 1.1  # times native's speed from which on a favourite makes for measurements between sizes
CLOSE = 1.3  # ratio of neighbouring sizes below which nothing between them is measured
FAR = 1.25  # times native's time at both neighbouring sizes from which on a size looks disturbed
SELECTING, DOWNWARDS, BETWEEN, DECIDING = 0.35, 0.43, 0.53, 0.92  # of the budget is over when these are
NONBLOCKING, PERSISTENT = (Variant(NATIVE, {"form": form}) for form in NATIVE_FORMS)

Key: TypeAlias = "tuple[object, ...]"
Kind: TypeAlias = Key


class Contest(Protocol):
    """Measurements at one size."""

    def able(self, index: int, timing: str = SINGLE) -> bool:
        """Whether the variant with this number can run so."""

    def look(self, index: int, timing: str = SINGLE) -> float:
        """Its seconds, about, from a few runs; infinite if it cannot run."""

    def cost(self, index: int, timing: str) -> float:
        """Seconds that a sample takes, about."""

    def times(self, which: Sequence[tuple[int, str]], turns: int) -> list[list[float]]:
        """Seconds of these variants, timed so, ``turns`` samples of each, taking turns."""

    def close(self) -> None:
        """No more measurements."""


Open: TypeAlias = "Callable[[str, int, Sequence[Variant]], Contest]"


@dataclass(frozen=True)
class Selection:
    """What may be the best at a size, in calls and in plans, and what was measured to find that out."""

    size: int
    finalists: tuple[Variant, ...]
    held: tuple[Variant, ...]
    figures: tuple[Figure, ...]

    @property
    def favourite(self) -> Kind:
        """What kind of variant seems clearly the fastest; native if none does."""
        seconds = {figure.variant.key: figure.median for figure in self.figures}
        native = NATIVE_VARIANT.key
        if self.finalists and CLEARLY * seconds[self.finalists[0].key] < seconds[native]:
            return _kind(self.finalists[0])
        return _kind(NATIVE_VARIANT)

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        figures = [{**figure._asdict(), "variant": asdict(figure.variant)} for figure in self.figures]
        variants = {name: list(map(asdict, getattr(self, name))) for name in ("finalists", "held")}
        return {"size": self.size, **variants, "figures": figures}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Selection:
        """From JSON data. Raises KeyError or TypeError for what is none."""
        finalists, held = (tuple(Variant(**each) for each in record[name]) for name in ("finalists", "held"))
        figures = tuple(Figure(**{**each, "variant": Variant(**each["variant"])}) for each in record["figures"])
        return cls(record["size"], finalists, held, figures)


@dataclass(frozen=True)
class Verdict:
    """What was found the best of calls, or of plans: with the time of native's call, or plan, over its own, and the
    probability that chance made it look so."""

    winner: Variant = NATIVE_VARIANT
    gain: float = 1.0
    chance: float = 1.0


@dataclass(frozen=True)
class SizeResult:
    """What was found at a size, with the figures, those of single calls that can be compared first."""

    size: int
    calls: Verdict
    plans: Verdict
    figures: tuple[Figure, ...]
    native: float  # seconds of native's single call

    @property
    def winner(self) -> Variant:
        """What was found the best for calls."""
        return self.calls.winner


def variants(collective: str, topology: Topology) -> list[Variant]:
    """Everything that may be worth measuring, as the algorithms' registry entries say, each once."""
    found: dict[tuple[object, ...], Variant] = {}
    for name, params in searched(collective, topology):
        variant = Variant(name, REGISTRY[collective][name].resolve(params))
        found.setdefault(variant.key, variant)
    return list(found.values())


@dataclass
class Search:
    """The search for one collective on one communicator.

    ``open`` begins measurements at a size, ``clock`` gives seconds, the same on all ranks. ``note`` is given what
    has been selected at a size, ``report`` what has been decided; ``done`` is what was noted before.
    ``budget`` is in seconds from ``run``. ``transports`` are those that every variant is tried with.
    """

    collective: str
    topology: Topology
    open: Open
    clock: Callable[[], float]
    budget: float
    links: Links = DEFAULT_LINKS
    note: Callable[[Selection], None] = lambda selection: None
    report: Callable[[SizeResult], None] = lambda result: None
    done: dict[int, Selection] = field(default_factory=dict)
    transports: Sequence[str] = (AUTO,)
    unable: set[Key] = field(default_factory=set)  # forms of native that have failed at some size

    def run(self, sizes: Sequence[int]) -> list[SizeResult]:
        """Results by size: of ``sizes``, as far as the budget goes, and of sizes between them.

        Of a budget that does not suffice for all, every size gets its share.
        """
        begin = self.clock()
        for size, seconds in self._shares([s for s in sizes if s not in self.done], begin + self.budget * SELECTING):
            self._select(size, seconds)
        for size, above in reversed(list(pairwise(sorted(self.done)))):
            rest = begin + self.budget * DOWNWARDS - self.clock()
            if rest > 0 and self.done[size].favourite != self.done[above].favourite:
                self._select(size, min(rest, self._needed(size)), only_seeds=True)
        for size in islice(self._between(), len(sizes)):
            rest = begin + self.budget * BETWEEN - self.clock()
            if rest <= 0:
                break
            self._select(size, min(rest, self._needed(size)), only_seeds=True)
        found: dict[int, SizeResult] = {}
        for size, seconds in self._shares(list(self.done), begin + self.budget * DECIDING):
            found[size] = self._decide(self.done[size], seconds)
        doubtful = disturbed([found[size] for size in sorted(found)])
        for size, seconds in self._shares(doubtful, begin + self.budget):
            found[size] = self._decide(self._with_neighbours(size, found), seconds)
        return believed([self._trusted(found[size]) for size in sorted(found)])

    def _with_neighbours(self, size: int, found: dict[int, SizeResult]) -> Selection:
        """What has been selected at a size, and what has won at the sizes beside it."""
        sizes, own = sorted(found), self.done[size]
        near = [found[other] for other in sizes[max(sizes.index(size) - 1, 0) : sizes.index(size) + 2] if other != size]
        calls = {each.key: each for each in (*own.finalists, *(result.calls.winner for result in near))}
        plans = {each.key: each for each in (*own.held, *(result.plans.winner for result in near))}
        for chosen in (calls, plans):
            chosen.pop(NATIVE_VARIANT.key, None)
        return replace(own, finalists=tuple(calls.values()), held=tuple(plans.values()))

    def _trusted(self, result: SizeResult) -> SizeResult:
        """A result without forms of native that have delivered wrong data, be it at other sizes."""
        calls, plans = (Verdict() if each.winner.key in self.unable else each for each in (result.calls, result.plans))
        return replace(result, calls=calls, plans=plans)

    def _shares(self, sizes: Iterable[int], until: float) -> Iterator[tuple[int, float]]:
        """The sizes, ascending, each with its share of the seconds that are left until then."""
        left = sorted(set(sizes))
        weights = {size: self._needed(size) for size in left}
        while left:
            rest = max(0.0, until - self.clock())
            yield left[0], rest * weights[left[0]] / sum(weights[size] for size in left)
            del left[0]

    def _needed(self, size: int) -> float:
        """Seconds that measuring at a size takes, about."""
        ranked = rank_by_model(self.collective, self.topology, size, links=self.links)
        return FIXED + RUNS * (ranked[0].seconds if ranked else 0.0)

    def _between(self) -> Iterator[int]:
        """Sizes in the middle of neighbours with different favourites, while there are any; widest gap first."""
        while True:
            known = sorted(self.done)
            gaps = [
                (b / a, a, b)
                for a, b in pairwise(known)
                if b / a > CLOSE and self.done[a].favourite != self.done[b].favourite
            ]
            middles = [(ratio, round(sqrt(a * b))) for ratio, a, b in gaps if a < round(sqrt(a * b)) < b]
            if not middles:
                return
            yield max(middles)[1]

    def _seeds(self, size: int) -> list[Variant]:
        """The finalists of each of the neighbouring sizes that are known, and its own."""
        below = [self.done[max(known)]] if (known := [s for s in self.done if s < size]) else []
        above = [self.done[min(known)]] if (known := [s for s in self.done if s > size]) else []
        own = [self.done[size]] if size in self.done else []
        return [variant for each in own + below + above for variant in (*each.finalists, *each.held)]

    def _field(self, size: int, only_seeds: bool) -> tuple[list[Variant], int]:
        """What may be measured, and how much of it is looked at first: native, the seeds, and of
        each kind of what the model does not find hopeless the one that it finds the best; in turns
        the fastest and that with the fewest messages at a time, since the model knows no contention."""
        everyone = [] if only_seeds else [(v.algorithm, v.params) for v in variants(self.collective, self.topology)]
        ranked = rank_by_model(
            self.collective, self.topology, size, links=self.links, variants=everyone, most_shared=MOST_SHARED
        )
        promising = [each for each in ranked if each.seconds <= HOPELESS * ranked[0].seconds]
        kinds: dict[Kind, Candidate] = {}
        for each in promising:
            kinds.setdefault(_kind(each.variant), each)
        few_flows = sorted(kinds.values(), key=lambda each: each.flows)
        in_turns = [each.variant for pair in zip(kinds.values(), few_flows, strict=True) for each in pair]
        heads = [NATIVE_VARIANT, NONBLOCKING, *self._seeds(size), *self._transported([NATIVE_VARIANT, *in_turns])]
        first = {variant.key: variant for variant in heads if variant.key != PERSISTENT.key}
        found = self._transported(each.variant for each in promising)
        rest = {variant.key: variant for variant in found if variant.key not in first}
        return [*first.values(), *rest.values()], len(first)

    def _transported(self, variants: Iterable[Variant]) -> list[Variant]:
        """Each of them with every transport; native knows neither its node's ranks nor parts."""
        return [
            replace(variant, transport=transport)
            for variant in variants
            for transport in self.transports
            if variant.algorithm != NATIVE or transport in (AUTO, "staged")
        ]

    def _select(self, size: int, seconds: float, only_seeds: bool = False) -> None:
        """Find the finalists of a size in about ``seconds``."""
        begin = self.clock()
        chosen, heads = self._field(size, only_seeds)
        contest = self.open(self.collective, size, chosen)
        samples: dict[int, list[float]] = {}
        looks: dict[int, float] = {}

        def so_far(index: int) -> float:
            return median(samples[index]) if index in samples else looks[index]

        def look(which: Iterable[int], share: float) -> None:
            for index in which:
                if len(looks) > 3 and self.clock() - begin > share * seconds:
                    break
                looks[index] = contest.look(index)

        look(range(heads), 0.4)
        best = {_kind(chosen[index]) for index in sorted(list(looks)[1:], key=so_far)[:2]}
        look([index for index in range(heads, len(chosen)) if _kind(chosen[index]) in best], 0.5)
        self.unable |= {chosen[i].key for i, time in looks.items() if time == inf and chosen[i].algorithm == NATIVE}
        alive = list(looks)
        for count, slower, most in ROUNDS:
            alive = _survivors(alive, so_far, slower, most)
            if samples and self.clock() - begin > 0.8 * seconds:
                break
            for index, row in zip(alive, contest.times([(index, SINGLE) for index in alive], count), strict=True):
                samples.setdefault(index, []).extend(row)
        contest.close()
        ranked = sorted(samples, key=so_far)
        faster = [chosen[index] for index in ranked[: ranked.index(0)]]
        others = [chosen[index] for index in ranked if chosen[index].algorithm != NATIVE]
        figures = tuple(_figure(size, chosen[index], samples[index], SINGLE, ranked=False) for index in ranked)
        finalists, held = tuple(faster[:FINALISTS]), (*others[:FINALISTS], PERSISTENT)
        self.done[size] = Selection(size, finalists, held, figures)
        self.note(self.done[size])

    def _decide(self, selection: Selection, seconds: float) -> SizeResult:
        """Measure native and the finalists anew in about ``seconds``, and say which is the best."""
        begin, size = self.clock(), selection.size
        both = {variant.key: variant for variant in (NATIVE_VARIANT, *selection.finalists, *selection.held)}
        place, field = {key: index for index, key in enumerate(both)}, list(both.values())
        contest = self.open(self.collective, size, field)
        calls = [index for each in selection.finalists if contest.able(index := place[each.key])]
        entries = [(index, timing) for index in (0, *calls) for timing in (SINGLE, ROW)]
        plans: list[int] = []  # if there is no time for them, plans take what calls take
        if sum(contest.cost(*entry) for entry in entries) * FEWEST < seconds / 2 and contest.able(0, PLAN):
            plans = [index for each in selection.held if contest.able(index := place[each.key], PLAN)]
            entries += [(index, timing) for index in (0, *plans) for timing in (PLAN, PLAN_ROW)]
            if not contest.able(place[PERSISTENT.key], PLAN):
                self.unable.add(PERSISTENT.key)
        cold = [(index, COLD) for index in (0, *calls)]  # to be looked at in the table; decides nothing
        if sum(contest.cost(*entry) for entry in cold) * FEWEST < seconds / 4:
            entries += cold
        times: dict[tuple[int, str], list[float]] = {entry: [] for entry in entries}
        while (taken := len(times[0, SINGLE])) < FEWEST or (taken < FINAL and self.clock() - begin < seconds):
            for entry, row in zip(entries, contest.times(entries, 2), strict=True):
                times[entry] += row
        contest.close()
        figures = [_figure(size, field[index], row, timing, ranked=True) for (index, timing), row in times.items()]
        figures.sort(key=lambda figure: (TIMINGS.index(figure.timing), figure.median))
        verdict = _verdict(field, calls, times, (SINGLE, ROW))
        plan = _verdict(field, plans, times, (PLAN, PLAN_ROW)) if plans else verdict
        result = SizeResult(size, verdict, plan, (*figures, *selection.figures), median(times[0, SINGLE]))
        self.report(result)
        return result


def _kind(variant: Variant) -> Kind:
    """The algorithm with its transport and what is not a number among its parameters."""
    return (
        variant.algorithm,
        variant.transport,
        *((name, value) for name, value in variant.params.items() if isinstance(value, str)),
    )


def _survivors(alive: list[int], seconds: Callable[[int], float], slower: float, most: int) -> list[int]:
    """native, and the fastest of ``alive``, by their times so far."""
    limit = slower * min(map(seconds, alive))
    able = [index for index in alive if index and seconds(index) <= limit]
    return [0, *sorted(able, key=seconds)[:most]]


def _figure(size: int, variant: Variant, times: Sequence[float], timing: str, *, ranked: bool) -> Figure:
    q1, middle, q3 = quartiles(times)
    return Figure(size, variant, middle, q1, q3, len(times), timing, ranked)


def _verdict(
    field: Sequence[Variant],
    candidates: Sequence[int],
    times: dict[tuple[int, str], list[float]],
    timings: tuple[str, str],
) -> Verdict:
    """The fastest candidate that is faster than native, the first of the ``field``, beyond chance and not slower
    in rows. Any of several would have been taken, so each has its share of the level."""
    found = []
    for index in candidates:
        single, row = (
            [native / own for native, own in zip(times[0, timing], times[index, timing], strict=True)]
            for timing in timings
        )
        doubt = min(1.0, len(candidates) * chance(single))
        if doubt <= LEVEL and median(single) > 1.0 and median(row) >= 1.0:
            found.append((median(times[index, timings[0]]), index, Verdict(field[index], median(single), doubt)))
    return min(found)[2] if found else Verdict()


def disturbed(results: Sequence[SizeResult]) -> list[int]:
    """Sizes, of ascending results, that something else may have disturbed: one whose winner stands alone between
    neighbours that agree, or at which native took far longer than at both."""
    return [
        here.size
        for before, here, after in zip(results, results[1:], results[2:], strict=False)
        if any(a.winner.key == c.winner.key != b.winner.key for a, b, c in _beside(before, here, after))
        or here.native > FAR * max(before.native, after.native)
    ]


def _beside(*results: SizeResult) -> list[list[Verdict]]:
    """The verdicts on calls of these results, and those on plans."""
    return [[each.calls for each in results], [each.plans for each in results]]


def believed(results: Sequence[SizeResult]) -> list[SizeResult]:
    """Results with what may be chance, as so many sizes were looked at, left to native: if nothing is faster, in 95 %
    of searches everything; else about 95 % of what replaces native is faster."""
    chances = [verdict.chance for result in results for verdict in (result.calls, result.plans)]
    sure = iter(discoveries(chances))
    kept = [[verdict if next(sure) else Verdict() for verdict in (each.calls, each.plans)] for each in results]
    return [replace(result, calls=calls, plans=plans) for result, (calls, plans) in zip(results, kept, strict=True)]


def choices(results: Sequence[SizeResult], *, held: bool = False) -> tuple[Choice, ...]:
    """From which size on which winner is chosen, in calls or (``held``) plans: halfway, as a factor, between its
    first size and the one before."""
    found: list[Choice] = []
    before = 0
    for result in results:
        winner = (result.plans if held else result.calls).winner
        if not found or winner.key != found[-1].variant.key:
            start = max(round(sqrt(before * result.size)), before + 1) if found else min(result.size, 1)
            found.append(Choice(start, winner))
        before = result.size
    return tuple(found)
