"""Times of calls at one place, kept within bounds and put side by side: the numbers, and what words say of them."""

from __future__ import annotations

import json
from random import Random
from statistics import mean, median

import pytest

from hiercoll.collectives import NATIVE
from hiercoll.options import main
from hiercoll.statistics import median_interval
from hiercoll.tables import NATIVE_VARIANT, Variant
from hiercoll.tools.comparison import MOST_TIMES, Kind, Learned, Sample, compared, lines, ran_words
from hiercoll.tuning.budget import Budget
from hiercoll.tuning.learning import Finding, Learner

BRUCK = Variant("bruck", {"radix": 2})


def sample(values: list[float]) -> Sample:
    made = Sample()
    for value in values:
        made.add(value)
    return made


def test_a_sample_is_bounded_even_and_the_same_again() -> None:
    few = [float(number) for number in range(MOST_TIMES)]
    assert sample(few).values == few
    many = [float(number) for number in range(40 * MOST_TIMES)]
    kept = sample(many)
    assert len(kept.values) == MOST_TIMES == len(set(kept.values)) and kept.calls == len(many)
    assert kept.seconds == sum(many) and kept.values == sample(many).values
    assert mean(kept.values) == pytest.approx(mean(many), rel=0.08)  # of 1 / sqrt(3 * 500) = 0.026, three times
    tenths = [sum(low <= value / len(many) < low + 0.1 for value in kept.values) for low in (0.0, 0.3, 0.6, 0.9)]
    assert all(28 < count < 75 for count in tenths)


def kind(**seconds: list[float]) -> Kind:
    """Calls with blocks of 64 bytes, by what ran."""
    made = Kind(4, 64, 64)
    for name, values in seconds.items():
        for value in values:
            made.add(name, 64, value, is_trial=False)
    return made


def spread(around: float, calls: int, seed: int) -> list[float]:
    generator = Random(seed)
    return [around * generator.uniform(0.9, 1.1) for _ in range(calls)]


def test_the_slowest_ranks_medians() -> None:
    quick, slow = (
        kind(native=spread(2e-4, 40, 1), bruck=[1e-4] * 40),
        kind(native=spread(3e-4, 40, 2), bruck=[5e-5] * 40),
    )
    slow.add("pairwise", 48, 9.0, is_trial=True)
    slow.add("pairwise", 48, 9.0, is_trial=False)
    found = compared([quick, slow])
    values = slow.by[NATIVE].values
    assert found["bytes_per_block"] == [48, 64] and list(found["ran"]) == [NATIVE, "bruck", "pairwise"]
    assert found["ran"][NATIVE]["median"] == median(values)
    assert found["ran"][NATIVE]["interval"] == list(median_interval(values))
    assert found["ran"]["bruck"]["median"] == 1e-4 and found["ran"]["pairwise"]["interval"] is None
    gain = found["gain"]
    assert gain["algorithm"] == "bruck" and gain["ratio"] == median(values) / 1e-4  # of what ran most often
    assert gain["interval"][0] < gain["ratio"] < gain["interval"][1]
    assert found["trials"] == {"calls": 1, "seconds": 9.0}
    assert compared([kind(native=[1.0])])["gain"] is None is compared([kind(bruck=[1.0])])["gain"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("native", "words"),
    [(3e-4, "hiercoll is faster"), (1e-4, "no difference shown"), (5e-5, "native is faster")],
)
def test_words(native: float, words: str) -> None:
    record = compared([kind(native=spread(native, 60, 1), bruck=spread(1e-4, 60, 2))])
    said = list(lines("alltoall", "program.py:3", record))
    assert said[0] == "program.py:3, alltoall, blocks of 64, 4 ranks"
    assert said[1].startswith("    native: 60 calls, median ") and " us to " in said[1]
    assert said[3].startswith("    native / bruck: ") and said[3].endswith(f": {words}")


def test_short_calls_get_no_verdict() -> None:
    """It takes a report as long to see them."""
    record = compared([kind(native=spread(6e-6, 60, 1), bruck=spread(3e-6, 60, 2))])
    said = list(lines("alltoall", "program.py:3", record))
    assert said[3].startswith("    native / bruck: ") and said[3].endswith(
        "no verdict, since the report takes as long as such calls do"
    )


def test_calls_are_those_of_the_rank_that_made_most() -> None:
    """Whichever was slowest."""
    slow, many = kind(native=[3e-4] * 2, bruck=[1e-5] * 9), kind(native=[1e-4] * 7, bruck=[2e-5] * 3, ring=[1e-5] * 5)
    found = compared([slow, many])
    assert {name: each["calls"] for name, each in found["ran"].items()} == {"native": 7, "bruck": 9, "ring": 5}
    assert {name: each["median"] for name, each in found["ran"].items()} == {
        "native": 3e-4,
        "bruck": 2e-5,
        "ring": 1e-5,
    }
    assert found["gain"]["algorithm"] == "bruck"


def test_reductions_are_told_apart_by_what_combines() -> None:
    found = Kind(4, 8, 8, "SUM of float64")
    found.add(NATIVE, 8, 1.0, is_trial=False)
    record = compared([found])
    assert record["operation"] == "SUM of float64" and compared([kind(native=[1.0])])["operation"] == ""
    said = "program.py:3, allreduce by SUM of float64, blocks of 8, 4 ranks"
    assert next(lines("allreduce", "program.py:3", record)) == said


def test_few_calls_show_nothing() -> None:
    said = list(lines("alltoall", "program.py:3", compared([kind(native=[2.0] * 60, bruck=[1.0] * 6)])))
    assert said[-1] == "    native / bruck: 2.00 (too few calls for an interval)"


def test_what_was_learned() -> None:
    learner = Learner(lambda own: [NATIVE_VARIANT], list, Budget())
    assert Learned.by(None, "alltoall") is None is Learned.by(learner, "alltoall")
    learner.finding = so_far_found = Finding(BRUCK, 6.1e-5, 1e-4, 324)
    so_far = Learned.by(learner, "alltoall")
    assert so_far is not None and so_far.words() == "learned, so far: bruck, in 0.61 of native's time, from 324 calls"
    learner.finding = Finding(NATIVE_VARIANT, 1e-4, 1e-4, 32, untried=(BRUCK,))
    begun = Learned.by(learner, "alltoall")
    assert (
        begun is not None and begun.words() == "learned, so far: native, with 1 candidates to be tried, from 32 calls"
    )
    learner.finding = so_far_found
    learner.is_settled = True
    made = kind(native=[1.0])
    made.learned = Learned.by(learner, "alltoall")
    found = compared([kind(native=[1.0]), made])
    assert found["learned"]["native"] == 1e-4
    assert list(lines("alltoall", "a", found))[-1] == "    learned: bruck, in 0.61 of native's time, from 324 calls"
    learner.finding = Finding(NATIVE_VARIANT, float("inf"), float("inf"), 99, "2026-11-22T10:00:00+00:00")
    made.learned = Learned.by(learner, "alltoall")
    found = compared([made])
    assert found["learned"]["seconds"] is None and json.dumps(found, allow_nan=False)
    assert found["words"] == "learned: no candidate is faster than native, from 99 calls of an earlier job, 2026-11-22"


@pytest.mark.parametrize(
    ("options", "reports", "compares"), [([], False, False), (["--report"], True, False), (["--compare"], True, True)]
)
def test_options(options: list[str], reports: bool, compares: bool) -> None:
    """Comparing is reporting."""
    run = main.main([*options, "-c", "pass"], standalone_mode=False)
    _, _, file, sync, compare, trace = run.args
    assert (file is not None, sync, compare, trace) == (reports, False, compares, None)


def test_algorithms_by_name() -> None:
    """Native, too."""
    options = ["--algorithm", "alltoallw=native", "--algorithm", "bcast=binomial:radix=4"]
    run = main.main([*options, "-c", "pass"], standalone_mode=False)
    assert run.args[1] == {"alltoallw": (NATIVE, {}), "bcast": ("binomial", {"radix": 4, "segments": 1})}


def test_what_ran_seldom_has_no_name() -> None:
    assert ran_words({NATIVE: 7}) == NATIVE
    assert ran_words({"bruck radix=2": 900, NATIVE: 100}) == "bruck radix=2 90 %, native 10 %"
    assert ran_words({"bruck": 190, NATIVE: 40, "pairwise": 4}) == "bruck 81 %, native 17 %, 1 other"
    assert ran_words({"bruck": 190, NATIVE: 4, "pairwise": 4}) == "bruck 96 %, 2 others"
    many = {str(number): 1 for number in range(21)}
    assert ran_words(many) == "21 algorithms"
