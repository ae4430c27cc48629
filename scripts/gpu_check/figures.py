"""Figures beside the bounds that docs/gpu.md states. One below its bound is a warning: timings are noisy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Goal(NamedTuple):
    """A share of the bound of that name. Of figures whose names agree in the pattern's group, the best one counts."""

    pattern: str
    bound: str
    share: float


GOALS = (
    Goal(r"((?:un)?pack evenly spaced, in blocks of \d+ B, \d+ MiB)", "a device copy", 0.85),
    Goal(r"((?:un)?pack scattered, in blocks of \d+ B, \d{3} MiB)", "a device copy", 0.80),
    Goal(r"staged:\d+, ((?:16|64) MiB)", "the slower of these", 0.85),
    Goal(r"alltoall \w+ (peer, 4 ranks, 4 on a device, 16777216 B per pair)", "copies at once", 0.70),
)


def below(figures: Iterable[Mapping[str, Any]]) -> list[str]:
    """What to warn of. Of figures with the same name, the latest counts."""
    latest = {str(each["figure"]): each for each in figures}
    warnings = []
    for goal in GOALS:
        best: dict[str, float] = {}
        for name, figure in latest.items():
            if (match := re.fullmatch(goal.pattern, name)) and goal.bound in figure["bounds"]:
                best[match[1]] = max(best.get(match[1], 0.0), figure["bounds"][goal.bound] / figure["seconds"])
        low = {case: share for case, share in best.items() if share < goal.share}
        warnings += [f"{case}: {share:.0%} of its bound, not {goal.share:.0%}" for case, share in low.items()]
    return warnings
