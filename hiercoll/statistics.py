"""What samples of times say, and what they do not.

Nothing here assumes a distribution of times: intervals are order statistics, and whether one
thing is faster than another is asked of ratios of times that were taken in the same turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb, inf, log

LEVEL = 0.05  # how often chance alone may make something look faster than its equal


def median(values: Iterable[float]) -> float:
    """The middle one of so many values, one at least, or the mean of both that are. (Python's own brings modules that
    take a while to import, for each rank of a job.)"""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


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
    from statistics import quantiles

    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def chance(ratios: Sequence[float]) -> float:
    """How probable ratios of times at least as favourable (above 1) are between two things that are equal.

    The one-sided signed-rank test (Wilcoxon 1945) of the logarithms, exact (meant for some
    dozen ratios): between equals each ratio is as likely as its inverse. 1.0 without any ratio. No less than 2^-n.
    """
    return _by_signs(_ranks([abs(log(ratio)) for ratio in ratios]), [ratio > 1.0 for ratio in ratios])


def chance_of_pairs(pairs: Sequence[tuple[float, float]]) -> float:
    """As `chance`, of pairs of times where the first are to be the shorter ones and a few may be far too long: by the
    differences of their ranks among all times (the paired rank transform of Conover, Iman 1981), exact.

    A pair in which one time is far too long weighs no more than one whose times are as far apart as most.
    """
    ranks = _ranks([seconds for pair in pairs for seconds in pair])
    gains = [second - first for first, second in zip(ranks[::2], ranks[1::2], strict=True)]
    return _by_signs([abs(gain) for gain in gains], [gain > 0 for gain in gains])


def _ranks(values: Sequence[float]) -> list[int]:
    """The rank of each value, doubled, so that those of ties, their means, are whole numbers."""
    order = sorted(range(len(values)), key=lambda each: values[each])
    ranks, begin = [0] * len(values), 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[order[end]] != values[order[begin]]:
            for each in order[begin:end]:
                ranks[each] = begin + 1 + end
            begin = end
    return ranks


def _by_signs(weights: Sequence[int], favourable: Sequence[bool]) -> float:
    """How probable it is that the favourable weights reach their sum if each is favourable or not by a coin."""
    observed = sum(weight for weight, counts in zip(weights, favourable, strict=True) if counts)
    # How many ways there are to reach each sum: digits of one number, each of so many bits that they do not overflow.
    bits, ways = len(weights) + 2, 1
    for weight in weights:
        ways += ways << weight * bits
    reached = (ways >> observed * bits) % ((1 << bits) - 1)  # the sum of the digits from there on
    return reached / float(2 ** len(weights))


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
