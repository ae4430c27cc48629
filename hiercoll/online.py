"""Tuning while a program runs (``tune="online"``): its own calls try the candidates.

Every candidate serves a few calls of a size; then all ranks agree on its time, and at last
on the winner, which serves the calls that follow. A winner that cuts blocks into segments
has their number tuned as Blink does (Wang et al. 2020, section 4.2): increased by factors
while that helps, then decreased by steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from statistics import median
from typing import TypeAlias

from hiercoll.tables import NATIVE, Variant
from hiercoll.tuner import Spread

CALLS = 3  # timed calls of each candidate, after a first that makes its plan
REGIME_CALLS = 5  # the same, where only two are tried
MOST_SEGMENTS = 64
FIRST_PERIOD, LONGEST_PERIOD = 32, 256  # calls between two surveys
GAIN = 1.1  # by which others must be faster than native, so that noise does not choose them
SURE, FOR_GOOD = 128, sys.maxsize  # after how many calls between two surveys there is none any more

Explorer: TypeAlias = "Generator[Variant, float, Variant]"


def explore(candidates: Sequence[Variant]) -> Explorer:
    """Yields what to try next, is sent its time, returns the fastest."""
    best, least = candidates[0], float("inf")
    for candidate in candidates:
        seconds = yield candidate
        if seconds < least:
            best, least = candidate, seconds
    if "segments" not in best.params:
        return best
    step = int(best.params["segments"])
    while 2 * (step := int(best.params["segments"])) <= MOST_SEGMENTS:
        more = _segmented(best, 2 * step)
        seconds = yield more
        if seconds >= least:
            break
        best, least = more, seconds
    for segments in range(2 * step - 1, step, -max(1, step // 4)):
        fewer = _segmented(best, segments)
        seconds = yield fewer
        if seconds >= least:
            break
        best, least = fewer, seconds
    return best


def _segmented(variant: Variant, segments: int) -> Variant:
    return Variant(variant.algorithm, {**variant.params, "segments": segments}, variant.transport)


class Trial:
    """The calls of one size. ``agree`` gives the slowest rank's seconds; it is collective,
    and all ranks make the same calls in the same order."""

    def __init__(self, candidates: Sequence[Variant], agree: Callable[[float], float], calls: int = CALLS) -> None:
        self._calls = calls
        self._explorer = explore(candidates)
        self._agree = agree
        self._times: list[float] = []
        self.current = next(self._explorer)
        self.winner: Variant | None = None

    def note(self, seconds: float) -> None:
        """The current candidate has served a call. Sets ``winner`` when all have been tried."""
        self._times.append(seconds)
        if len(self._times) <= self._calls:
            return
        agreed = self._agree(median(self._times[1:]))
        self._times = []
        try:
            self.current = self._explorer.send(agreed)
        except StopIteration as end:
            self.winner = self.current = end.value


class Regime:
    """What serves calls of which no rank knows all sizes: native, or another algorithm where it was faster.

    Every so many calls a survey tells what blocks there are, and ``candidates`` what may serve
    them: native, and if another may help, both are tried. The longer that changes nothing, the rarer
    it becomes, and for native it ends. ``total`` adds numbers up over all ranks; like ``agree``,
    see `Trial`, it is collective.
    """

    def __init__(
        self,
        candidates: Callable[[Spread], Sequence[Variant]],
        agree: Callable[[float], float],
        total: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self._candidates, self._agree, self._total = candidates, agree, total
        self._period, self._last = FIRST_PERIOD // 2, Variant("")
        self.left = 0  # calls that ``current`` still serves without a question
        self.current = Variant(NATIVE)
        self.trial: Trial | None = None

    @property
    def is_surely_native(self) -> bool:
        """Whether native has been the choice so often that nobody asks again."""
        return self._serves_native and self._period > SURE

    @property
    def is_native(self) -> bool:
        """Whether the next call is native, without a question."""
        return self.left > 0 and self._serves_native

    @property
    def _serves_native(self) -> bool:
        return self.current.algorithm == NATIVE

    def whole(self, own: Spread) -> Spread:
        """The blocks of all ranks, from those that each rank sends. Collective."""
        filled, small, nbytes, unfit = self._total([own.filled, own.small, own.nbytes, own.unfit])
        return Spread(filled, small, nbytes, int(self._agree(own.most)), unfit)

    def survey(self, own: Spread) -> None:
        """Decide on what serves the next calls, by the blocks that each rank sends. Collective."""
        candidates = self._candidates(self.whole(own))
        if len(candidates) == 1:
            self._settle(candidates[0])
        else:
            self.trial = Trial(candidates, self._agree, REGIME_CALLS)
            self.current = self.trial.current

    def note(self, seconds: float) -> None:
        """A call has been served while several are tried. Collective."""
        assert self.trial is not None
        self.trial.note(seconds if self._serves_native else GAIN * seconds)
        self.current = self.trial.current
        if self.trial.winner is not None:
            self._settle(self.trial.winner)

    def _settle(self, choice: Variant) -> None:
        self._period = min(2 * self._period, LONGEST_PERIOD) if choice == self._last else FIRST_PERIOD
        self._last, self.current, self.trial, self.left = choice, choice, None, self._period
        if self.is_surely_native:
            self.left = FOR_GOOD
