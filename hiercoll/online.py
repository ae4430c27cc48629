"""Tuning while a program runs (``tune="online"``): its own calls try the candidates.

Every candidate serves a few calls of a size; then all ranks agree on its time, and at last
on the winner, which serves the calls that follow. A winner that cuts blocks into segments
has their number tuned as Blink does (Wang et al. 2020, section 4.2): increased by factors
while that helps, then decreased by steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from statistics import median
from typing import TypeAlias

from hiercoll.tables import Variant

CALLS = 3  # timed calls of each candidate, after a first that makes its plan
MOST_SEGMENTS = 64

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

    def __init__(self, candidates: Sequence[Variant], agree: Callable[[float], float]) -> None:
        self._explorer = explore(candidates)
        self._agree = agree
        self._times: list[float] = []
        self.current = next(self._explorer)
        self.winner: Variant | None = None

    def note(self, seconds: float) -> None:
        """The current candidate has served a call. Sets ``winner`` when all have been tried."""
        self._times.append(seconds)
        if len(self._times) <= CALLS:
            return
        agreed = self._agree(median(self._times[1:]))
        self._times = []
        try:
            self.current = self._explorer.send(agreed)
        except StopIteration as end:
            self.winner = self.current = end.value
