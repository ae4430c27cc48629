"""The share of the time of calls that hiercoll may cost: what is needed before hiercoll is set up; see `budget`."""

from __future__ import annotations

from array import array
from typing import NamedTuple

SHARE = 0.05  # of the time of calls, that finding out may cost
LEADS = 0.75  # of that, or more, which is for the communicator that finds out for others like it


class Before(NamedTuple):
    """Seconds that the calls before a set-up took, of one of them, and of what ranks agreed on then and on the set-up.
    Equal on all ranks."""

    calls: float = 0.0
    call: float = 0.0
    agreements: float = 0.0


def part_of_share(size: int, whole: int, *, leads: bool) -> float:
    """Which part of ``SHARE`` finding out may cost on a communicator of so many of the ``whole`` job's ranks.

    What takes longer on one communicator may let all ranks wait, as of a grid of processes the rows wait for each other
    by way of the columns: parts of communicators that are there side by side add up to one. `LEADS` of it is for the
    one that ``leads``, from which others take over what it has found; the rest is divided among all by size.
    """
    return LEADS * leads + (1 - LEADS) * min(size / whole, 1.0)


def in_common(slowest: float, fastest: float, least: float) -> float:
    """Seconds that it costs what ranks do in some calls, at ``least`` so many: the middle of the slowest and the
    fastest rank's excess over their usual call. The slowest's alone would count noise: in any call some rank is late.
    """
    return max(least, (slowest + fastest) / 2)


def count(tally: array[int], seconds: float) -> None:
    """A call has taken so long, of those that a tally counts: how many are left, and nanoseconds that they took."""
    tally[0] -= 1
    tally[1] += int(seconds * 1e9)
