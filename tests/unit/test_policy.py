"""What serves a call: as asked for, forced, disabled, by a table, by what a program's own calls have shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hiercoll.algorithms import REGISTRY
from hiercoll.collectives import ALLGATHER, ALLGATHERV, ALLTOALL, ALLTOALLV, BCAST, Collective, called
from hiercoll.errors import ArgumentError, ParameterError, UnknownAlgorithmError
from hiercoll.tables import NATIVE, NATIVE_VARIANT, Choice, Entry, Table, Variant
from hiercoll.topology import parse_layout
from hiercoll.tuner import Spread
from hiercoll.tuning.policy import ONLINE, Policy, Wanted, forced_variants
from hiercoll.tuning.trials import FIRST_PERIOD, PAIRS, TURNS, Trial, UnevenPolicy

MPI = "MPICH 5.0.2"
LAYOUT = "2x4"


def policy(
    *,
    disabled: bool = False,
    forced: Mapping[str, Variant] | None = None,
    layout: str = LAYOUT,
    table: Table | None = None,
) -> Policy:
    """Of rank 3, alone."""

    def slowest(seconds: Sequence[float]) -> list[float]:
        return list(seconds)

    def total(numbers: Sequence[int]) -> list[int]:
        return [8 * number for number in numbers]

    made = Policy(3, parse_layout(layout), MPI, disabled, slowest, total, forced)
    made.table = table or Table()
    return made


def entry(
    collective: str, *choices: tuple[int, Variant], memory: str = "host", plans: Sequence[tuple[int, Variant]] = ()
) -> Entry:
    """For the layout of all the tests."""
    calls, held = ([Choice(*each) for each in some] for some in (choices, plans))
    return Entry(collective, MPI, memory, (4, 4), "block", tuple(calls), plans=tuple(held))


def full(collective: Collective, algorithm: str, **params: Any) -> Variant:
    """With all parameters."""
    return Variant(algorithm, REGISTRY[collective.family][algorithm].resolve(params))


def wanted(collective: Collective = ALLTOALL, size: int = 64, **how: Any) -> Wanted:
    return Wanted(collective, size, how.pop("in_place", False), **how)


# As asked for


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("collective", called(), ids=str)
def test_what_is_asked_for(collective: Collective, held: bool) -> None:
    """An algorithm's name means it, with the parameters as given and the others by default; whatever is forced."""
    chosen = policy(forced={collective.name: NATIVE_VARIANT})
    for name, algorithm in REGISTRY[collective.family].items():
        found = chosen.select(wanted(collective, held=held), name, {})
        assert found == full(collective, name) and set(found.params) == {each.name for each in algorithm.parameters}
        for parameter in algorithm.parameters:
            for value in parameter.choices:
                given = {parameter.name: value}
                assert chosen.select(wanted(collective, held=held), name, given) == full(collective, name, **given)


@pytest.mark.parametrize(
    ("algorithm", "params", "error", "words"),
    [
        ("nonesuch", {}, UnknownAlgorithmError, "expected auto, native, .*pairwise.*, got 'nonesuch'"),
        ("neighbor_exchange", {}, UnknownAlgorithmError, "got 'neighbor_exchange'"),
        (None, {}, UnknownAlgorithmError, "a name, got None"),
        (7, {}, UnknownAlgorithmError, "a name, got 7"),
        (["pairwise"], {}, UnknownAlgorithmError, "a name"),
        ("auto", {"radix": 2}, ParameterError, "'radix': expected none with algorithm='auto', got 2"),
        ("bruck", {"radius": 2}, ParameterError, "one that bruck takes"),
        ("bruck", {"radix": 1}, ParameterError, "at least 2, got 1"),
        ("bruck", {"radix": True}, ParameterError, "got True"),
        ("native", {"form": "blocking"}, ParameterError, "form=nonblocking at most .* in a call, got 'blocking'"),
        ("native", {"form": "persistent"}, ParameterError, "in a call, got 'persistent'"),
        ("native", {"from": "nonblocking"}, ParameterError, "parameter 'from'"),
        ("native", {"radix": 2}, ParameterError, "parameter 'radix'"),
    ],
)
@pytest.mark.parametrize("collective", [ALLTOALL])
def test_what_cannot_be_asked_for(
    collective: Collective, algorithm: Any, params: dict[str, Any], error: type[ArgumentError], words: str
) -> None:
    """A typed error that names the rank."""
    with pytest.raises(error, match=words) as refused:
        policy().select(wanted(collective), algorithm, params)
    assert type(refused.value) is error and refused.value.rank == 3


def test_forms_of_native() -> None:
    """The blocking and the nonblocking one in calls, and in plans the persistent one, too."""
    chosen = policy()
    assert chosen.select(wanted(), NATIVE, {}) == NATIVE_VARIANT
    assert chosen.select(wanted(), NATIVE, {"form": "nonblocking"}) == Variant(NATIVE, {"form": "nonblocking"})
    held = wanted(held=True)
    for form in ("nonblocking", "persistent"):
        assert chosen.select(held, NATIVE, {"form": form}) == Variant(NATIVE, {"form": form})
    with pytest.raises(ParameterError, match=r"nonblocking or persistent at most .* in a plan"):
        chosen.select(held, NATIVE, {"form": "blocking"})


# Forced and disabled


def test_forced_algorithms_are_auto() -> None:
    """For their collective only; and nothing is tried."""
    forced = forced_variants({"alltoall": ("bruck", {"radix": 4}), "allgatherv": ("ring", {})})
    assert forced == {"alltoall": full(ALLTOALL, "bruck", radix=4), "allgatherv": full(ALLGATHER, "ring")}
    chosen = policy(forced=forced, table=Table((entry("alltoall", (1, Variant("pairwise"))),)))
    chosen.online = True
    assert chosen.select(wanted(), "auto", {}) == forced["alltoall"]
    assert chosen.select(wanted(held=True), "auto", {}) == forced["alltoall"]
    assert chosen.select(wanted(ALLGATHERV), "auto", {}) == forced["allgatherv"]
    assert chosen.select(wanted(ALLGATHER), "auto", {}) == NATIVE_VARIANT
    assert chosen.select(wanted(), "pairwise", {}) == full(ALLTOALL, "pairwise")
    assert not chosen.is_auto(ALLTOALL, "auto") and chosen.is_auto(ALLGATHER, "auto")
    assert chosen.trial(wanted()) is None and chosen.trial(wanted(ALLGATHER)) is not None
    with pytest.raises(ParameterError, match="none with algorithm='auto'"):
        chosen.select(wanted(), "auto", {"radix": 4})


def test_forced_native() -> None:
    """It is no algorithm, and beats what a table says."""
    forced = forced_variants({"alltoall": (NATIVE, {})})
    assert forced == {"alltoall": NATIVE_VARIANT}
    chosen = policy(forced=forced, table=Table((entry("alltoall", (1, Variant("pairwise"))),)))
    assert chosen.select(wanted(), "auto", {}) == NATIVE_VARIANT


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (("nonesuch", {}), UnknownAlgorithmError),
        (("bruck", {"radix": 0}), ParameterError),
        (("auto", {}), UnknownAlgorithmError),
    ],
)
def test_what_cannot_be_forced(given: tuple[str, dict[str, Any]], error: type[ArgumentError]) -> None:
    """Said when it is set."""
    with pytest.raises(error):
        forced_variants({"alltoall": given})


@pytest.mark.parametrize("algorithm", ["auto", "pairwise", NATIVE])
def test_disabled(algorithm: str) -> None:
    """Everything is native, whatever is asked for or forced."""
    table = Table((entry("alltoall", (1, Variant("pairwise"))),))
    chosen = policy(disabled=True, forced={"alltoall": full(ALLTOALL, "bruck")}, table=table)
    chosen.online = True
    for collective in called():
        assert chosen.select(wanted(collective), algorithm, {}) == NATIVE_VARIANT
        assert not chosen.is_auto(collective, "auto") and chosen.trial(wanted(collective)) is None
    assert chosen.select(wanted(), NATIVE, {"form": "nonblocking"}) == NATIVE_VARIANT


# By a table

PAIRWISE, LANES = Variant("pairwise"), Variant("grouped", {}, "peer")
PLANS = [(1, Variant(NATIVE, {"form": "persistent"})), (1000, Variant("bruck", {"radix": 4}))]


def test_a_table_for_calls_and_plans() -> None:
    """By the size, with all parameters and the transport; plans have choices of their own, where there are any."""
    cuda = entry("alltoall", (1, PAIRWISE), memory="cuda")
    host = entry("alltoall", (1, Variant(NATIVE)), (100, PAIRWISE), (5000, LANES), plans=PLANS)
    chosen = policy(table=Table((host, cuda, entry("bcast", (1, Variant("binomial"))))))
    calls = [chosen.select(wanted(size=size), "auto", {}) for size in (1, 99, 100, 4999, 5000)]
    pairwise, lanes = full(ALLTOALL, "pairwise"), Variant("grouped", full(ALLTOALL, "grouped").params, "peer")
    assert calls == [NATIVE_VARIANT, NATIVE_VARIANT, pairwise, pairwise, lanes]
    plans = [chosen.select(wanted(size=size, held=True), "auto", {}) for size in (1, 999, 1000)]
    assert plans == [PLANS[0][1], PLANS[0][1], full(ALLTOALL, "bruck", radix=4)]
    assert [chosen.select(wanted(memory="cuda", held=held), "auto", {}) for held in (False, True)] == [pairwise] * 2
    assert chosen.select(wanted(BCAST), "auto", {}) == full(BCAST, "binomial")
    assert chosen.select(wanted(ALLGATHER), "auto", {}) == NATIVE_VARIANT
    assert policy(layout="1x1", table=chosen.table).select(wanted(), "auto", {}) == NATIVE_VARIANT


def test_what_cannot_work_in_place() -> None:
    """It is native then."""
    able = {name for name, each in REGISTRY["alltoall"].items() if each.in_place}
    assert able < set(REGISTRY["alltoall"])
    for name in REGISTRY["alltoall"]:
        chosen = policy(table=Table((entry("alltoall", (1, Variant(name))),)))
        found = chosen.select(wanted(in_place=True), "auto", {})
        assert found == (full(ALLTOALL, name) if name in able else NATIVE_VARIANT)


def test_blocks_whose_sizes_all_know() -> None:
    """As the equal ones of their mean; forms of native are not meant for them."""
    choices = [(1, Variant(NATIVE, {"form": "nonblocking"})), (100, Variant("ring"))]
    chosen = policy(table=Table((entry("allgather", *choices, plans=[(1, Variant(NATIVE, {"form": "persistent"}))]),)))
    assert chosen.select(wanted(ALLGATHERV, 10), "auto", {}) == NATIVE_VARIANT
    assert chosen.select(wanted(ALLGATHER, 10), "auto", {}) == choices[0][1]
    assert chosen.select(wanted(ALLGATHERV, 100), "auto", {}) == full(ALLGATHER, "ring")
    assert chosen.select(wanted(ALLGATHERV, 100, held=True), "auto", {}) == NATIVE_VARIANT


# Tried in a program's own calls


def serve(trial: Trial, seconds: Mapping[str, float], calls: int) -> None:
    """So many calls by what the trial says, or until there is a winner."""
    for _ in range(calls):
        if trial.winner is None:
            trial.note(seconds.get(trial.current.algorithm, 9.0))


def test_trials_are_by_size_place_and_memory() -> None:
    """Calls alike share one; plans share its outcome, and try nothing; a winner is kept until all is forgotten."""
    chosen = policy()
    assert chosen.trial(wanted()) is None
    chosen.online = True
    trial = chosen.trial(wanted())
    assert trial is not None and chosen.trial(wanted()) is trial
    others = [wanted(size=65), wanted(in_place=True), wanted(memory="cuda"), wanted(ALLGATHER)]
    assert len({id(chosen.trial(other)) for other in others} | {id(trial)}) == 5
    assert chosen.trial(wanted(size=0)) is None
    assert chosen.select(wanted(), "auto", {}) == trial.current == NATIVE_VARIANT
    trial.note(1.0)
    assert chosen.select(wanted(), "auto", {}) == trial.current != NATIVE_VARIANT
    assert chosen.select(wanted(held=True), "auto", {}) == NATIVE_VARIANT  # as without a trial
    best = trial.current.algorithm
    serve(trial, {best: 1.0}, (ONLINE + 1) * (TURNS + 1) + 2 * PAIRS + 500)
    assert trial.winner is not None and trial.winner.algorithm == best
    for held in (False, True):
        assert chosen.select(wanted(held=held), "auto", {}) == trial.winner
    assert chosen.trial(wanted()) is None
    chosen.native_sizes.add((ALLTOALL, 8))
    chosen.forget()
    assert chosen.trial(wanted()) is not trial and not chosen.native_sizes
    assert chosen.select(wanted(), "auto", {}) == NATIVE_VARIANT


def test_candidates_of_a_trial() -> None:
    """native and the few that the model likes best, with all parameters."""
    chosen = policy()
    chosen.online = True
    trial = chosen.trial(wanted())
    assert trial is not None
    seen = []
    for _ in range(ONLINE + 1):
        seen.append(trial.current)
        trial.note(1.0)
    assert seen[0] == NATIVE_VARIANT and len({each.key for each in seen}) == ONLINE + 1
    assert all(each == full(ALLTOALL, each.algorithm, **each.params) for each in seen[1:])


# Sizes that no rank knows


def test_sizes_that_no_rank_knows() -> None:
    """Calls by a policy of their own, one for each collective; plans are native, if nobody asks for good."""
    chosen = policy(table=Table((entry("alltoallv", (1, Variant("pairwise"))),)))
    uneven = chosen.uneven(ALLTOALLV)
    assert uneven is chosen.uneven(ALLTOALLV) and isinstance(uneven, UnevenPolicy)
    assert chosen.select(wanted(ALLTOALLV, 0), "auto", {}) == NATIVE_VARIANT
    spread = Spread(8, 0, 8000, 1000)
    uneven.begin(lambda: spread)
    assert uneven.is_trying and uneven.current == NATIVE_VARIANT
    uneven.note(1.0)
    assert chosen.select(wanted(ALLTOALLV, 0), "auto", {}) == uneven.current != NATIVE_VARIANT
    assert chosen.select(wanted(ALLTOALLV, 0, held=True), "auto", {}) == NATIVE_VARIANT
    assert chosen.uneven_for_good(ALLTOALLV, Spread(64, 0, 64000, 1000)).algorithm == "pairwise"
    assert chosen.uneven_for_good(ALLTOALLV, Spread(64, 0, 64000, 9000)) == NATIVE_VARIANT
    chosen.forget()
    assert chosen.uneven(ALLTOALLV) is not uneven


def test_few_blocks_are_native() -> None:
    """Where most are empty, or arguments are not for hiercoll, nothing is tried; calls are counted."""
    for spread in (Spread(), Spread(4, 4, 32, 8), Spread(8, 8, 64, 8, unfit=1)):
        uneven = policy().uneven(ALLTOALLV)
        assert uneven.begin(lambda spread=spread: spread) == NATIVE_VARIANT and uneven.is_native
        for _ in range(FIRST_PERIOD - 1):
            assert uneven.is_fixed
            uneven.count()
        assert not uneven.is_fixed
