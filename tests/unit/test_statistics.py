"""Statistics that do not flatter: coverage and error rates are what they say, by simulation and by enumeration."""

from __future__ import annotations

import statistics
from itertools import product
from math import exp, inf, log
from operator import mul
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.statistics import (
    LEVEL,
    chance,
    chance_of_pairs,
    discoveries,
    is_faster,
    median,
    median_interval,
    quartiles,
    quotient_interval,
)

TIMES = st.lists(st.floats(0.1, 10), min_size=1, max_size=60)


@given(TIMES)
def test_the_median_is_pythons(values: list[float]) -> None:
    """Of a few values, in any order, however they come."""
    assert median(iter(values)) == pytest.approx(statistics.median(values))
    assert median([1.0, inf, 2.0]) == 2.0 and median([inf, inf]) == median([1.0, inf]) == inf


@settings(max_examples=200, deadline=None)
@given(TIMES)
def test_interval_holds_the_median(values: list[float]) -> None:
    low, high = median_interval(values)
    assert low <= median(values) <= high
    assert (low, high) == (-inf, inf) if len(values) < 6 else {low, high} <= set(values)


@pytest.mark.parametrize("n", [6, 7, 9, 12, 20, 50])
@pytest.mark.parametrize("coverage", [0.8, 0.95, 0.99])
def test_interval_covers_as_often_as_it_says(n: int, coverage: float) -> None:
    generator, inside, runs = Random(n), 0, 2000
    for _ in range(runs):
        low, high = median_interval([generator.expovariate(1.0) for _ in range(n)], coverage)
        inside += low <= log(2) <= high
    assert inside / runs > coverage - 0.015


@pytest.mark.parametrize(("n", "m"), [(7, 7), (9, 40), (50, 12), (200, 200)])
def test_quotient_interval_covers_as_often_as_it_says(n: int, m: int) -> None:
    generator, inside, runs = Random(n), 0, 2000
    for _ in range(runs):
        above, below = ([scale * generator.expovariate(1.0) for _ in range(k)] for scale, k in ((3.0, n), (1.0, m)))
        ratio, low, high = quotient_interval(above, below)
        assert low <= ratio <= high and ratio == median(above) / median(below)
        inside += low <= 3.0 <= high
    assert inside / runs > 0.95 - 0.015
    assert high / low < 3.0 or m < 200  # neither is it everything
    assert quotient_interval([1.0] * 6, [1.0] * 99)[1:] == (0.0, inf) == quotient_interval([1.0] * 99, [1.0] * 6)[1:]


def test_few_samples_have_no_interval() -> None:
    """Five can cover 93.75 % at most."""
    assert median_interval([1.0] * 5) == (-inf, inf)
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0], 0.9375) == (1.0, 5.0)
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    assert median_interval([]) == (-inf, inf)


def by_enumeration(ratios: list[float]) -> float:
    """The signed-rank test from its definition: every assignment of signs is as likely."""
    sizes = [abs(log(ratio)) for ratio in ratios]
    ranks = [sum(other < size for other in sizes) + (sum(other == size for other in sizes) + 1) / 2 for size in sizes]
    observed = sum(rank for rank, ratio in zip(ranks, ratios, strict=True) if ratio > 1)
    signs = list(product((0, 1), repeat=len(ratios)))
    return sum(sum(r * s for r, s in zip(ranks, each, strict=True)) >= observed for each in signs) / len(signs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.5, 2.0, 1.25, 0.8, 1.1, 3.0]), max_size=9))
def test_chance_is_exact(ratios: list[float]) -> None:
    """With ties, too."""
    assert chance(ratios) == pytest.approx(by_enumeration(ratios))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.sampled_from([1.0, 1.5, 2.0, 3.0, inf])] * 2), max_size=8))
def test_chance_of_pairs_is_exact(pairs: list[tuple[float, float]]) -> None:
    """From its definition: the differences of ranks among all, and every turn of the pairs is as likely."""
    times = [seconds for pair in pairs for seconds in pair]
    rank = {each: sum(other < each for other in times) + times.count(each) / 2 for each in times}
    gains = [rank[second] - rank[first] for first, second in pairs]
    turned = [sum(map(mul, gains, signs)) >= sum(gains) for signs in product((1, -1), repeat=len(pairs))]
    assert chance_of_pairs(pairs) == pytest.approx(sum(turned) / len(turned))


def test_few_times_that_are_far_too_long_hide_nothing() -> None:
    """In three of thirteen pairs the faster one took four times as long."""
    pairs = [(20.0 + each % 3, 25.0 + each % 5) for each in range(10)] + [(86.0, 27.0), (88.0, 33.0), (86.0, 27.5)]
    assert chance_of_pairs(pairs) < LEVEL / 2 < LEVEL < chance([second / first for first, second in pairs])


@pytest.mark.parametrize("n", [8, 13, 21])
def test_equal_pairs_are_seldom_told_apart(n: int) -> None:
    """Some of whose times are far too long."""
    generator, runs = Random(n), 1000

    def seconds() -> float:
        return exp(generator.gauss(0, 0.1)) * (4 if generator.random() < 0.15 else 1)

    assert sum(chance_of_pairs([(seconds(), seconds()) for _ in range(n)]) <= LEVEL for _ in range(runs)) / runs < 0.07


def test_chance_has_a_least() -> None:
    assert chance([2.0] * 5) == 2**-5
    assert chance([0.5] * 5) == 1.0
    assert chance([]) == 1.0


@pytest.mark.parametrize("n", [5, 6, 8, 13, 21])
def test_equals_are_seldom_told_apart(n: int) -> None:
    generator, runs = Random(n), 2000
    found = sum(is_faster([exp(generator.gauss(0, 0.1)) for _ in range(n)]) for _ in range(runs))
    assert found / runs < LEVEL + 0.01
    twice = sum(is_faster([2 * exp(generator.gauss(0, 0.1)) for _ in range(n)]) for _ in range(100))
    assert twice == 100


def test_no_gain_in_the_median_is_none() -> None:
    """Three are three times as fast, four a little slower: on average faster, mostly not."""
    ratios = [0.999, 0.998, 0.997, 0.996, *[3.0] * 3]
    assert not is_faster(ratios * 6) and chance(ratios * 6) < LEVEL


def test_discoveries() -> None:
    """Benjamini and Hochberg's own example: four of fifteen."""
    chances = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.324, 0.4262, 0.5719, 0.6528,
               0.759, 1.0]  # fmt: skip
    assert discoveries(chances) == [True] * 4 + [False] * 11
    assert discoveries([]) == [] and discoveries([1.0, 1.0]) == [False, False]
    generator, runs = Random(2), 1000
    any_of = sum(any(discoveries([generator.random() for _ in range(20)])) for _ in range(runs))
    assert any_of / runs < LEVEL + 0.02


def test_quartiles() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
