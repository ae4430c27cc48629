"""Times of native's and of hiercoll's calls at one place of a program, gathered from all ranks and put side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

from hiercoll.collectives import COLLECTIVES, NATIVE
from hiercoll.statistics import median_interval, quotient_interval
from hiercoll.tuning.learning import Learner
from hiercoll.units import format_size, format_time

MOST_TIMES = 500  # that a sample keeps
MOST_KINDS = 8  # of calls that are told apart at a place
SHORT = 20e-6  # seconds of a call, from which on it takes clearly longer than a report does, and than taking turns
SELDOM = 0.05  # of calls, less than which an algorithm that ran has no name
TOO_SHORT = ": no verdict, since the report takes as long as such calls do"


class Sample:
    """Times of calls in seconds: all of them, and once they are too many as many, drawn evenly from all (Vitter 1985,
    algorithm R). Ranks that make as many calls keep the times of the same ones."""

    __slots__ = ("_state", "calls", "seconds", "values")

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0
        self.values: list[float] = []
        self._state = 0

    def add(self, seconds: float) -> None:
        """Take up a time."""
        self.calls, self.seconds = self.calls + 1, self.seconds + seconds
        if len(self.values) < MOST_TIMES:
            self.values.append(seconds)
            return
        # Knuth's linear congruential generator: the module random would change what the program draws from it.
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        place = (self._state >> 32) * self.calls >> 32
        if place < MOST_TIMES:
            self.values[place] = seconds


class Learned(NamedTuple):
    """What calls have taught: the seconds of a call by an algorithm, and by native, in calls that began together;
    infinite where that is not known. ``date``: of an earlier job; ``untried``: candidates that are left."""

    algorithm: str
    seconds: float
    native: float
    calls: int
    settled: bool
    date: str = ""
    untried: int = 0

    @staticmethod
    def by(learner: Learner | None, collective: str) -> Learned | None:
        """What a learner knows, if anything."""
        if learner is None or learner.finding is None:
            return None
        found = learner.finding
        name = found.variant.spelled(collective)
        times, calls = (found.seconds, found.native), found.calls
        return Learned(name, *times, calls, learner.is_settled, found.date, len(found.untried))

    def words(self) -> str:
        """In a line."""
        so_far = "" if self.settled else ", so far"
        source = f"from {self.calls} calls" + (f" of an earlier job, {self.date[:10]}" if self.date else "")
        if self.algorithm == NATIVE and self.settled:
            return f"learned: no candidate is faster than native, {source}"
        if self.algorithm == NATIVE and self.untried:
            return f"learned, so far: native, with {self.untried} candidates to be tried, {source}"
        if not isfinite(self.native) or not isfinite(self.seconds):
            return f"learned{so_far}: {self.algorithm}, {source}"
        return f"learned{so_far}: {self.algorithm}, in {self.seconds / self.native:.2f} of native's time, {source}"


@dataclass
class Kind:
    """Blocking calls at one place among so many ranks, with blocks of about one size, on one rank: by what ran; trials
    are counted apart, and calls that set hiercoll up are left out. ``operation``: by which a reduction combines, "" of
    other calls."""

    ranks: int
    least: int
    most: int
    operation: str = ""
    by: dict[str, Sample] = field(default_factory=dict)
    trials: Sample = field(default_factory=Sample)
    learned: Learned | None = None

    def add(self, ran: str, size: int, seconds: float, is_trial: bool) -> None:
        """A call with blocks of so many bytes."""
        self.least, self.most = min(self.least, size), max(self.most, size)
        (self.trials if is_trial else self.by.setdefault(ran, Sample())).add(seconds)


def compared(kinds: Sequence[Kind]) -> dict[str, Any]:
    """The record of a kind of calls that these ranks made, from each its own; times are those of the slowest rank, and
    numbers those of the one that made most."""
    names = dict.fromkeys(name for kind in kinds for name in kind.by)
    samples = {name: [kind.by[name] for kind in kinds if name in kind.by] for name in names}
    slowest = {name: max(each, key=lambda sample: median(sample.values)) for name, each in samples.items()}
    calls = {name: max(sample.calls for sample in each) for name, each in samples.items()}
    learned = next((kind.learned for kind in kinds if kind.learned is not None), None)
    return {
        "ranks": kinds[0].ranks,
        "operation": kinds[0].operation,
        "bytes_per_block": [min(kind.least for kind in kinds), max(kind.most for kind in kinds)],
        "ran": {name: {"calls": calls[name], **_summary(sample)} for name, sample in slowest.items()},
        "gain": _gain(slowest, calls),
        "trials": {
            "calls": max(kind.trials.calls for kind in kinds),
            "seconds": max(kind.trials.seconds for kind in kinds),
        },
        "learned": None if learned is None else {name: _finite(each) for name, each in learned._asdict().items()},
        "words": "" if learned is None else learned.words(),
    }


def _summary(sample: Sample) -> dict[str, Any]:
    interval = [_finite(bound) for bound in median_interval(sample.values)]
    return {
        "seconds": sample.seconds,
        "median": median(sample.values),
        "interval": interval if None not in interval else None,
    }


def _gain(slowest: Mapping[str, Sample], calls: Mapping[str, int]) -> dict[str, Any] | None:
    """How many times native's time is that of the algorithm which served most calls; None without both."""
    others = [name for name in slowest if name != NATIVE]
    if NATIVE not in slowest or not others:
        return None
    name = max(others, key=calls.__getitem__)
    ratio, low, high = quotient_interval(slowest[NATIVE].values, slowest[name].values)
    return {"algorithm": name, "ratio": ratio, "interval": [low, high] if high < inf else None}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


# ---- in words


def ran_words(ran: Mapping[str, int]) -> str:
    """Which algorithms ran, by calls, the most frequent first, with their parts of the calls; those that served few, as
    most of those that were tried, as a number."""
    if len(ran) == 1:
        return next(iter(ran))
    calls = sum(ran.values())
    words = [f"{name} {100 * times / calls:.0f} %" for name, times in ran.items() if times >= SELDOM * calls]
    if not words:
        return f"{len(ran)} algorithms"
    if rest := len(ran) - len(words):
        words.append("1 other" if rest == 1 else f"{rest} others")
    return ", ".join(words)


def lines(collective: str, site: str, kind: dict[str, Any]) -> Iterator[str]:
    """A kind's record in words."""
    least, most = kind["bytes_per_block"]
    size = format_size(most) if least == most else f"{format_size(least)} to {format_size(most)}"
    blocks = f", blocks of {size if most else 'any sizes'}" if COLLECTIVES[collective].buffers else ""
    operation = f" by {kind['operation']}" if kind["operation"] else ""
    ranks = "one rank" if kind["ranks"] == 1 else f"{kind['ranks']} ranks"
    yield f"{site}, {collective}{operation}{blocks}, {ranks}"
    for name, found in sorted(kind["ran"].items(), key=lambda item: (item[0] != NATIVE, -item[1]["calls"])):
        yield f"    {name}: {found['calls']} calls, median {format_time(found['median'])}{_between(found['interval'])}"
    if gain := kind["gain"]:
        low, high = gain["interval"] or (None, None)
        within = " (too few calls for an interval)" if low is None else f" ({low:.2f} to {high:.2f})"
        both = [kind["ran"][name]["median"] for name in (NATIVE, gain["algorithm"])]
        verdict = TOO_SHORT if min(both) < SHORT else _verdict(low, high)
        yield f"    native / {gain['algorithm']}: {gain['ratio']:.2f}{within}{verdict}"
    if kind["trials"]["calls"]:
        yield f"    trials: {kind['trials']['calls']} calls, {format_time(kind['trials']['seconds'])}"
    if kind["words"]:
        yield f"    {kind['words']}"


def _between(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" ({format_time(interval[0])} to {format_time(interval[1])})"


def _verdict(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return ": hiercoll is faster" if low > 1.0 else ": native is faster" if high < 1.0 else ": no difference shown"
