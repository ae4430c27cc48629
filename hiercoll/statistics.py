"""What samples of times say, and what they do not.

Nothing here assumes a distribution of times: intervals are order statistics, and whether one
thing is faster than another is asked of ratios of times that were taken in the same turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, inf, log
from statistics import median, quantiles

LEVEL = 0.05  # how often chance alone may make something look faster than its equal


def median_interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float]:
    """An interval that holds the median of what ``values`` are samples of, with this probability at least.

    By order statistics (David, Nagaraja, Order Statistics, 7.1). Everything, ``(-inf, inf)``, where there
    are too few samples for any other: at 95 %, fewer than six.
    """
    ordered, n = sorted(values), len(values)
    outside, depth = 0.0, 0
    while depth < n // 2:
        outside += comb(n, depth) / 2**n
        if 2 * outside > 1 - coverage:
            break
        depth += 1
    return (ordered[depth - 1], ordered[n - depth]) if depth else (-inf, inf)


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """The median of the ratios of times that were taken in the same turns, with its 95 % interval."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return median(ratios), *median_interval(ratios)


def quotient_interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of the medians of positive values that were taken apart, with its 95 % interval at least: from the
    intervals of both at 97.5 %. Everything, ``0`` to ``inf``, where there are too few: fewer than seven.
    """
    (low, high), (least, most) = (median_interval(values, 0.975) for values in (above, below))
    if -inf in (low, least):
        return median(above) / median(below), 0.0, inf
    return median(above) / median(below), low / most, high / least


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile; of one value, three times that."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def chance(ratios: Sequence[float]) -> float:
    """How probable ratios of times at least as favourable (above 1) are between two things that are equal.

    The one-sided signed-rank test (Wilcoxon 1945) of the logarithms, exact (meant for some
    dozen ratios): between equals each ratio is as likely as its inverse. 1.0 without any ratio. No less than 2^-n.
    """
    sized = sorted((abs(log(ratio)), ratio > 1.0) for ratio in ratios)
    ranks = [2 * rank for rank in range(1, len(sized) + 1)]  # doubled, so that those of ties are whole numbers
    begin = 0
    for end in range(1, len(sized) + 1):
        if end == len(sized) or sized[end][0] != sized[begin][0]:
            ranks[begin:end] = [begin + 1 + end] * (end - begin)
            begin = end
    observed = sum(rank for rank, (_, faster) in zip(ranks, sized, strict=True) if faster)
    ways = [1] + [0] * sum(ranks)  # to reach each sum of ranks
    reached = 0
    for rank in ranks:
        reached += rank
        for total in range(reached, rank - 1, -1):
            ways[total] += ways[total - rank]
    return float(sum(ways[observed:]) / 2 ** len(ranks))


def is_faster(ratios: Sequence[float], level: float = LEVEL) -> bool:
    """Whether ratios of times show a gain: not by chance (at this level), and in the median."""
    return bool(ratios) and median(ratios) > 1.0 and chance(ratios) <= level


def discoveries(chances: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Which of several results are believed, so that of those about a share of ``level`` is chance; and if all
    are chance, the probability that any is believed is ``level``. (Benjamini, Hochberg 1995.)
    """
    limit = 0.0
    for number, value in enumerate(sorted(chances), 1):
        if value <= level * number / len(chances):
            limit = value
    return [value <= limit for value in chances]
