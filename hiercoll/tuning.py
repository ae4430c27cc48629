"""Finding out what is fastest: the search behind ``hiercoll tune``.

Per size, the cost model sets aside what is hopeless, and the rest takes part in successive
halving (Jamieson, Talwalkar 2016): all are measured a little, the slow ones drop out, the
others are measured more. ``native`` stays to the end, and is replaced only by what is faster
beyond the noise, and again so some time later: machines have phases that favour one or the
other. Between neighbouring sizes with different winners, sizes in between follow.
Measuring is handed in as a callable; every decision is made from values that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import comb, isqrt, sqrt
from statistics import median, quantiles
from typing import Any, Protocol, TypeAlias

from hiercoll.algorithms import REGISTRY, Params
from hiercoll.cost import DEFAULT_LINKS, Links
from hiercoll.tables import NATIVE, Choice, Figure, Variant
from hiercoll.topology import Topology
from hiercoll.transports import AUTO
from hiercoll.tuner import CANDIDATES, Candidate, rank_by_model

HOPELESS = 5.0  # times the best prediction from which on a variant is not measured
FIXED = 4.0  # seconds that a size gets besides those in proportion to the time of one run, if the budget allows
RUNS = 30  # times the best prediction that it gets besides
MOST_SHARED = 128 << 20  # bytes of shared memory per node that a measured variant may take
LOOK = 2.0  # times the fastest at first look from which on a variant drops out
ROUNDS = ((1, LOOK, 12), (2, 1.3, 7), (3, 1.15, 4))  # samples; slower than the best by which drops out; most that stay
FEWEST, FINAL = 5, 21  # samples of those that are left, at least and (time permitting) at most
STEADIER = 1.2  # times a variant's upper quartile from which on native's makes up for no gain in the median
CERTAIN = 1.5  # times native's speed from which on a winner is not measured once more at the end
CLOSE = 1.3  # ratio of neighbouring sizes below which nothing between them is measured
NATIVE_VARIANT = Variant(NATIVE)


class Contest(Protocol):
    """Measurements at one size."""

    def look(self, index: int) -> float:
        """Seconds of the variant with this number, about, from a few runs; infinite if it cannot run."""

    def times(self, which: Sequence[int], samples: int) -> list[list[float]]:
        """Seconds of the variants with these numbers, ``samples`` of each, taking turns."""

    def close(self) -> None:
        """No more measurements."""


Kind: TypeAlias = "tuple[object, ...]"
Open: TypeAlias = "Callable[[str, int, Sequence[Variant]], Contest]"


def variants(collective: str, topology: Topology) -> list[Variant]:
    """Everything that may be worth measuring: each algorithm with the values of each parameter
    that are proved and tuned, combinations that mean something, and what "auto" considers."""
    found: dict[tuple[object, ...], Variant] = {}
    more: list[tuple[str, Params]] = [(name, dict(params)) for name, params in CANDIDATES[collective]]
    if collective == "alltoall":
        more += [("bruck", {"radix": radix}) for radix in (3, 4, 8, isqrt(topology.size)) if radix > 1]
        for form in ("lane", "share", "leader"):
            for flows in (0, 1, 4):
                more.append(("grouped", {"form": form, "flows": flows}))
                more.append(("grouped", {"form": form, "flows": flows, "memory": "shared"}))
            more.append(("grouped", {"form": form, "inner": "overlap"}))
            more.append(("grouped", {"form": form, "inner": "overlap", "outer": "pairwise"}))
        more += [("grouped", {"form": "leader", "leaders": 2, "memory": "shared"})]
        more += [(name, {"window": window}) for name in ("scatter_destination", "eager") for window in (2, 4, 8, 16)]
    elif collective == "alltoallv":
        more += [("aggregate", {"form": form, "window": w}) for form in ("lane", "share", "leader") for w in (1, 4, 16)]
        more += [("scatter_destination", {"window": window}) for window in (2, 4, 8, 16)]
    else:
        for form in ("lane", "share", "leader"):
            for flows in (0, 1, 4):
                more += [("shared", {"form": form, "flows": flows, "inner": inner}) for inner in ("direct", "overlap")]
        more += [("node_aware", {"inner": "overlap", "flows": 1}), ("shared", {"form": "leader", "leaders": 2})]
        for outer in ("direct", "ring", "recursive_doubling"):
            more += [("node_aware", {"outer": outer, "inner": inner}) for inner in ("direct", "pairwise", "overlap")]
        more += [("ring", {"segments": segments}) for segments in (2, 4)]
    for name, entry in REGISTRY[collective].items():
        more += [(name, params) for params in entry.variants()]
    for name, params in more:
        entry = REGISTRY[collective][name]
        if entry.refusal(topology, params) is None:
            variant = Variant(name, entry.resolve(params))
            found.setdefault(variant.key, variant)
    return list(found.values())


@dataclass
class Search:
    """The search for one collective on one communicator.

    ``open`` begins measurements at a size, ``clock`` gives seconds, the same on all ranks.
    ``report`` is told each size as it is done; ``budget`` is in seconds from ``begin``.
    ``transports`` are those that every variant is tried with.
    """

    collective: str
    topology: Topology
    open: Open
    clock: Callable[[], float]
    budget: float
    links: Links = DEFAULT_LINKS
    report: Callable[[SizeResult], None] = lambda result: None
    done: dict[int, SizeResult] = field(default_factory=dict)
    transports: Sequence[str] = (AUTO,)

    def run(self, sizes: Sequence[int]) -> list[SizeResult]:
        """Results by size: of ``sizes``, as far as the budget goes, and of sizes between them.

        Of a budget that does not suffice for all, every size gets its share.
        """
        begin = self.clock()
        left = [size for size in sorted(set(sizes)) if size not in self.done]
        weights = {size: self._needed(size) for size in left}
        share, with_between = 0.7, 0.85  # of the budget: for the sizes that were asked for, and with those between
        while left:
            size = left.pop(0)
            rest = self.budget * share - (self.clock() - begin)
            total = weights[size] + sum(weights[other] for other in left)
            self._contest(size, max(0.0, rest * weights[size] / total), self._seeds(size))
        for size in self._between():
            rest = self.budget * with_between - (self.clock() - begin)
            if rest <= 0:
                break
            self._contest(size, min(rest, self._needed(size)), self._seeds(size), only_seeds=True)
        self._look_again(self.budget - (self.clock() - begin))
        return [self.done[size] for size in sorted(self.done)]

    def _look_again(self, seconds: float) -> None:
        """Measure winners that are not far ahead once more, now that time has passed; one that
        is not faster again gives way to native."""
        begin = self.clock()
        doubtful = [
            result
            for result in self.done.values()
            if result.winner.key != NATIVE_VARIANT.key and result.gain < CERTAIN and result.again is None
        ]
        for number, result in enumerate(doubtful, 1):
            contest = self.open(self.collective, result.size, [NATIVE_VARIANT, result.winner])
            natives: list[float] = []
            own: list[float] = []
            while self._go_on(len(own), begin + seconds * number / len(doubtful)):
                for samples, more in zip((natives, own), contest.times((0, 1), 2), strict=True):
                    samples += more
            contest.close()
            again = median(native / other for native, other in zip(natives, own, strict=True))
            looked = replace(result, again=again)
            if again <= 1.0 and not _steadier(natives, own):
                looked = replace(looked, winner=NATIVE_VARIANT, gain=1.0)
            self.done[result.size] = looked
            self.report(looked)

    def _go_on(self, samples: int, until: float) -> bool:
        """Whether to take more samples: the fewest in any case, the most if time permits."""
        return samples < FEWEST or (samples < FINAL and self.clock() < until)

    def _needed(self, size: int) -> float:
        """Seconds that measuring at a size takes, about."""
        ranked = rank_by_model(self.collective, self.topology, size, links=self.links)
        return FIXED + RUNS * (ranked[0].seconds if ranked else 0.0)

    def _between(self) -> Iterator[int]:
        """Sizes in the middle of neighbours with different winners, while there are any; widest gap first."""
        while True:
            known = sorted(self.done)
            gaps = [
                (b / a, a, b)
                for a, b in pairwise(known)
                if b / a > CLOSE and self.done[a].winner.key != self.done[b].winner.key
            ]
            middles = [(ratio, round(sqrt(a * b))) for ratio, a, b in gaps if a < round(sqrt(a * b)) < b]
            if not middles:
                return
            yield max(middles)[1]

    def _seeds(self, size: int) -> list[Variant]:
        """The best three of each of the neighbouring sizes that are known."""
        below = [self.done[max(known)]] if (known := [s for s in self.done if s < size]) else []
        above = [self.done[min(known)]] if (known := [s for s in self.done if s > size]) else []
        return [figure.variant for result in below + above for figure in result.figures[:3]]

    def _field(self, size: int, seeds: Iterable[Variant], only_seeds: bool) -> tuple[list[Variant], int]:
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
        found = self._transported([NATIVE_VARIANT, *(each.variant for each in promising)])
        heads = [NATIVE_VARIANT, *seeds, *self._transported([NATIVE_VARIANT, *in_turns])]
        first = {variant.key: variant for variant in heads}
        rest = {variant.key: variant for variant in found if variant.key not in first}
        return [*first.values(), *rest.values()], len(first)

    def _transported(self, variants: Iterable[Variant]) -> list[Variant]:
        """Each of them with every transport; native knows no mates and no parts."""
        return [
            replace(variant, transport=transport)
            for variant in variants
            for transport in self.transports
            if variant.algorithm != NATIVE or transport in (AUTO, "staged")
        ]

    def _contest(self, size: int, seconds: float, seeds: list[Variant], only_seeds: bool = False) -> None:
        """Measure at one size for about ``seconds``."""
        begin = self.clock()
        chosen, heads = self._field(size, seeds, only_seeds)
        contest = self.open(self.collective, size, chosen)
        samples: list[list[float]] = [[] for _ in chosen]
        paired: list[list[float]] = [[] for _ in chosen]  # native's time in the same turn over that of the variant

        def measure(which: list[int], count: int) -> None:
            times = contest.times(which, count)
            for position, index in enumerate(which):
                samples[index] += times[position]
                if which[0] == 0:
                    paired[index] += [own / other for own, other in zip(times[0], times[position], strict=True)]

        def so_far(index: int) -> float:
            return median(samples[index]) if samples[index] else looks[index]

        def look(which: Iterable[int], share: float) -> None:
            for index in which:
                if len(looks) > 3 and self.clock() - begin > share * seconds:
                    break
                looks[index] = contest.look(index)

        looks: dict[int, float] = {}
        look(range(heads), 0.4)
        best = {_kind(chosen[index]) for index in sorted(list(looks)[1:], key=so_far)[:2]}
        look([index for index in range(heads, len(chosen)) if _kind(chosen[index]) in best], 0.5)
        alive = list(looks)
        for count, slower, most in ROUNDS:
            alive = _survivors(alive, so_far, slower, most)
            if self.clock() - begin > 0.8 * seconds:
                break
            measure(alive, count)
        alive = _survivors(alive, so_far, 1.06, 4)
        while self._go_on(len(paired[0]), begin + seconds):
            measure(alive, 2)
        contest.close()
        self.done[size] = _result(size, [(chosen[i], samples[i], paired[i]) for i in range(len(chosen)) if samples[i]])
        self.report(self.done[size])


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


@dataclass(frozen=True)
class SizeResult:
    """What was found at a size: the winner, and the figures, the fastest first."""

    size: int
    winner: Variant
    figures: tuple[Figure, ...]
    gain: float  # native's time over the winner's
    again: float | None = None  # the same some time later, where that was measured

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> SizeResult:
        """From JSON data. Raises KeyError or TypeError for what is no result."""
        figures = tuple(Figure(**{**figure, "variant": Variant(**figure["variant"])}) for figure in record["figures"])
        return cls(record["size"], Variant(**record["winner"]), figures, record["gain"], record["again"])


def _result(size: int, measured: list[tuple[Variant, list[float], list[float]]]) -> SizeResult:
    """Of what is better than native, what three in four samples show as the fastest: medians
    alone do not tell what is now fast and now slow. Else native.

    Better is what is faster beyond the noise, or no slower in the median and clearly faster in
    the upper quartile: an algorithm that floods a link may take the same time at one start and
    five times as long at the next, as TCP falls behind.
    """
    figures: list[Figure] = []
    most = max(len(times) for _, times, _ in measured)
    for variant, times, _ in measured:
        q1, middle, q3 = _quartiles(times)
        figures.append(Figure(size, variant, middle, q1, q3, len(times)))
    natives = measured[0][1]
    finalists = [
        number
        for number, (figure, (_, times, ratios)) in enumerate(zip(figures, measured, strict=True))
        if figure.variant.key != NATIVE_VARIANT.key
        and 2 * figure.samples >= most
        and (interval(ratios)[0] > 1.0 or (median(ratios) >= 1.0 and _steadier(natives, times)))
    ]
    winner, gain = NATIVE_VARIANT, 1.0
    if finalists:
        best = min(finalists, key=lambda number: figures[number].q3)
        winner, gain = figures[best].variant, median(measured[best][2])
    figures.sort(key=lambda figure: (2 * figure.samples < most, figure.median))
    return SizeResult(size, winner, tuple(figures), gain)


def _quartiles(times: list[float]) -> list[float]:
    return quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3


def _steadier(natives: list[float], own: list[float]) -> bool:
    """Whether native is clearly slower in its upper quartile."""
    return _quartiles(natives)[2] > STEADIER * _quartiles(own)[2]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median of what ``values`` are samples of, without
    assumptions about its distribution (order statistics; all values if there are few)."""
    ordered, n = sorted(values), len(values)
    tail, index = 0.0, 0
    while index < n // 2:
        tail += comb(n, index) / 2**n
        if tail > 0.025:
            break
        index += 1
    index = max(index - 1, 0)
    return ordered[index], ordered[n - 1 - index]


def choices(results: Sequence[SizeResult]) -> tuple[Choice, ...]:
    """From which size on which winner is chosen: halfway, as a factor, between its first size and the one before."""
    found: list[Choice] = []
    before = 0
    for result in results:
        if not found or result.winner.key != found[-1].variant.key:
            start = round(sqrt(before * result.size)) if before else 1
            found.append(Choice(max(start, before + 1), result.winner))
        before = result.size
    return tuple(found)
