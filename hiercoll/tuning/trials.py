"""Tuning while a program runs (``tune="online"``): its own calls try the candidates.

Native and the candidates serve calls in turns, and the fastest is selected. That one and native then serve
calls in pairs, and it replaces native if these, which did not select it, show it faster beyond chance. A winner
that cuts blocks into segments has their number tuned as Blink does (Wang et al. 2020, section 4.2), step by
step: increased by factors while that helps, then decreased by steps.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Generator, Sequence
from statistics import median
from typing import TypeAlias

from hiercoll.statistics import is_faster
from hiercoll.tables import NATIVE_VARIANT, Variant
from hiercoll.tuner import Spread

TURNS = 3  # timed calls of each candidate that select one, after a first that makes its plan
PAIRS = 13  # of calls that decide between native and what was selected
STEP_PAIRS = 6  # the same between two numbers of segments
MOST_SEGMENTS = 64
FIRST_PERIOD, LONGEST_PERIOD = 32, 256  # calls between two surveys
SURE, FOR_GOOD = 128, sys.maxsize  # after how many calls between two surveys there is none any more

Explorer: TypeAlias = "Generator[list[Variant], list[float], Variant]"


def explore(candidates: Sequence[Variant]) -> Explorer:
    """Yields what is to serve the next calls, in this order, is sent their times, returns what is to serve from
    then on. The first candidate is native."""
    native = candidates[0]
    yield from _warm(candidates)
    best = candidates[1] if len(candidates) == 2 else (yield from _select(candidates))
    if best == native or not (yield from _is_better(best, native, PAIRS)):
        return native
    return (yield from _segment(best)) if "segments" in best.params else best


def _warm(candidates: Sequence[Variant]) -> Generator[list[Variant], list[float], None]:
    """A call of each, which makes its plan; its time says nothing."""
    yield list(candidates)


def _select(candidates: Sequence[Variant]) -> Explorer:
    """The fastest, from some calls of each in turns, each turn beginning with another one."""
    count = len(candidates)
    order = [(turn + place) % count for turn in range(TURNS) for place in range(count)]
    times = yield [candidates[index] for index in order]
    medians = [median(time for at, time in zip(order, times, strict=True) if at == index) for index in range(count)]
    return candidates[min(range(count), key=medians.__getitem__)]


def _is_better(new: Variant, old: Variant, pairs: int) -> Generator[list[Variant], list[float], bool]:
    """Whether calls in pairs, each variant first in every other pair, show ``new`` faster."""
    times = yield [variant for pair in range(pairs) for variant in ((old, new) if pair % 2 else (new, old))]
    firsts, seconds = times[::2], times[1::2]
    ratios = [(a / b if pair % 2 else b / a) for pair, (a, b) in enumerate(zip(firsts, seconds, strict=True))]
    return is_faster(ratios)


def _segment(best: Variant) -> Explorer:
    """The best number of segments."""
    while 2 * (step := int(best.params["segments"])) <= MOST_SEGMENTS:
        if not (yield from _step(more := _segmented(best, 2 * step), best)):
            break
        best = more
    for segments in range(2 * step - 1, step, -max(1, step // 4)):
        if not (yield from _step(fewer := _segmented(best, segments), best)):
            break
        best = fewer
    return best


def _step(new: Variant, best: Variant) -> Generator[list[Variant], list[float], bool]:
    yield from _warm([new])
    return (yield from _is_better(new, best, STEP_PAIRS))


def _segmented(variant: Variant, segments: int) -> Variant:
    return Variant(variant.algorithm, {**variant.params, "segments": segments}, variant.transport)


class Trial:
    """The calls of one size: native, the first of the ``candidates``, and the others. ``agree`` gives the slowest
    rank's seconds of each of some calls; it is collective, and all ranks make the same calls in the same order."""

    def __init__(self, candidates: Sequence[Variant], agree: Callable[[Sequence[float]], list[float]]) -> None:
        self._explorer = explore(candidates)
        self._agree = agree
        self._times: list[float] = []
        self._next = next(self._explorer)
        self.winner: Variant | None = None

    @property
    def current(self) -> Variant:
        """What serves the next call."""
        return self.winner or self._next[len(self._times)]

    def note(self, seconds: float) -> None:
        """The current candidate has served a call. Sets ``winner`` when all is known."""
        self._times.append(seconds)
        if len(self._times) < len(self._next):
            return
        agreed, self._times = self._agree(self._times), []
        try:
            self._next = self._explorer.send(agreed)
        except StopIteration as end:
            self.winner = end.value


class UnevenPolicy:
    """What serves calls of which no rank knows all sizes: native, or another algorithm where it was faster.

    Every so many calls a survey tells what blocks there are, and ``candidates`` what may serve
    them: native, and if another may help, both are tried (each trial by itself takes an equal for
    faster in at most one of twenty). The longer that changes nothing, the rarer it becomes, and for native
    it ends. ``total`` adds numbers up over all ranks; like ``agree``, see `Trial`, it is collective.

    Each call is counted once: by `count`, or by `begin`.
    """

    def __init__(
        self,
        candidates: Callable[[Spread], Sequence[Variant]],
        agree: Callable[[Sequence[float]], list[float]],
        total: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self._candidates, self._agree, self._total = candidates, agree, total
        self._period, self._last = FIRST_PERIOD // 2, Variant("")
        self.left = array("q", [0])  # calls that ``current`` still serves without a question; the engine counts, too
        self._trial: Trial | None = None
        self.current = NATIVE_VARIANT

    @property
    def settled(self) -> Variant:
        """What the last survey has come to, whatever is being tried now."""
        return self._last if self._last.algorithm else self.current

    @property
    def is_settled(self) -> bool:
        """Whether surveys are as rare as they become."""
        return self._period >= LONGEST_PERIOD

    @property
    def is_surely_native(self) -> bool:
        """Whether native has been the choice so often that nobody asks again."""
        return self.left[0] > LONGEST_PERIOD

    @property
    def is_fixed(self) -> bool:
        """Whether ``current`` serves the next call without a question."""
        return self.left[0] > 0

    @property
    def is_native(self) -> bool:
        """Whether the next call is native, without a question."""
        return self.is_fixed and self.current.is_native

    def count(self) -> None:
        """``current`` serves a call for which `is_fixed` holds."""
        self.left[0] -= 1

    def begin(self, own: Callable[[], Spread]) -> Variant:
        """What serves the next call. Where it is time for a survey, ``own`` tells the blocks that this rank sends;
        collective then."""
        if self._trial is None:
            if not self.left[0]:
                self._survey(own())
            if self._trial is None:
                self.count()
        return self.current

    @property
    def is_trying(self) -> bool:
        """Whether the call that `begin` was asked for is to be timed, for `note`."""
        return self._trial is not None

    def whole(self, own: Spread) -> Spread:
        """The blocks of all ranks, from those that each rank sends. Collective."""
        filled, small, nbytes, unfit = self._total([own.filled, own.small, own.nbytes, own.unfit])
        return Spread(filled, small, nbytes, int(self._agree([own.most])[0]), unfit)

    def _survey(self, own: Spread) -> None:
        """Decide on what serves the next calls, by the blocks that each rank sends. Collective."""
        candidates = self._candidates(self.whole(own))
        if len(candidates) == 1:
            self._settle(candidates[0])
        else:
            self._trial = Trial(candidates, self._agree)
            self.current = self._trial.current

    def note(self, seconds: float) -> None:
        """A call has been served while several are tried. Collective."""
        assert self._trial is not None
        self._trial.note(seconds)
        self.current = self._trial.current
        if self._trial.winner is not None:
            self._settle(self._trial.winner)

    def _settle(self, choice: Variant) -> None:
        self._period = min(2 * self._period, LONGEST_PERIOD) if choice == self._last else FIRST_PERIOD
        self._last, self.current, self._trial = choice, choice, None
        sure = choice.is_native and self._period > SURE
        self.left = array("q", [FOR_GOOD if sure else self._period])  # a new one: who counts on the old one is done
