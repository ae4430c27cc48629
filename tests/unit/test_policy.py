"""What serves a call: as asked for, forced, disabled, by a table, by what a program's own calls have shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import pytest

from hiercoll import tuner
from hiercoll.algorithms import REGISTRY
from hiercoll.algorithms.registry import automatic
from hiercoll.collectives import (
    ALLGATHER,
    ALLGATHERV,
    ALLREDUCE,
    ALLTOALL,
    ALLTOALLV,
    BARRIER,
    BCAST,
    COLLECTIVES,
    NATIVE,
    Collective,
    Order,
    called,
)
from hiercoll.errors import ArgumentError, ConstraintError, ParameterError, UnknownAlgorithmError
from hiercoll.model.cost import DEFAULT_LINKS, Link, Links
from hiercoll.model.machine import get_machine
from hiercoll.tables import NATIVE_VARIANT, Choice, Entry, Table, Variant
from hiercoll.topology import parse_layout
from hiercoll.tuner import Combining, Spread
from hiercoll.tuning.budget import FIRST
from hiercoll.tuning.learning import FEW, MANY, Finding, Learner
from hiercoll.tuning.policy import AGAIN, ASKING, OF_A_KIND, PROBING, Policy, Wanted, forced_variants, size_class

MPI = "MPICH 5.0.2"
LAYOUT = "2x4"


def policy(
    *,
    disabled: bool = False,
    forced: Mapping[str, Variant] | None = None,
    layout: str = LAYOUT,
    table: Table | None = None,
    rank: int = 3,
) -> Policy:
    """Of one rank, alone."""

    def slowest(seconds: Sequence[float]) -> list[float]:
        return list(seconds)

    def total(numbers: Sequence[int]) -> list[int]:
        return [8 * number for number in numbers]

    made = Policy(rank, parse_layout(layout), MPI, disabled, slowest, total, forced)
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


@pytest.mark.parametrize("collective", called(), ids=str)
def test_the_model_is_not_asked_for_what_it_does_not_decide(
    collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each rank, for each size that a program comes with."""
    asked: list[int] = []
    monkeypatch.setattr(tuner, "rank_by_model", lambda collective, topology, block, **_: asked.append(block) or [])
    chosen = policy()
    chosen.learn()
    assert chosen.select(wanted(collective, size=12345), "auto", {}).is_native and not asked
    chosen.decide(wanted(collective, size=54321))
    assert asked == ([54321] if collective.is_even else asked)


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


def test_forced_native_keeps_to_the_order() -> None:
    """As one that a call names: its order is not known."""
    chosen = policy(forced={"allreduce": NATIVE_VARIANT})
    with pytest.raises(ConstraintError, match="order 'any'"):
        chosen.select(Wanted(ALLREDUCE, 64, False, combining=Combining(Order.FIXED, native=False)), "auto", {})


def test_forced_algorithms_are_auto() -> None:
    """For their collective only; and nothing is tried."""
    forced = forced_variants({"alltoall": ("bruck", {"radix": 4}), "allgatherv": ("ring", {})})
    assert forced == {"alltoall": full(ALLTOALL, "bruck", radix=4), "allgatherv": full(ALLGATHER, "ring")}
    chosen = policy(forced=forced, table=Table((entry("alltoall", (1, Variant("pairwise"))),)))
    chosen.learn(inf)
    assert chosen.select(wanted(), "auto", {}) == forced["alltoall"]
    assert chosen.select(wanted(held=True), "auto", {}) == forced["alltoall"]
    assert chosen.select(wanted(ALLGATHERV), "auto", {}) == forced["allgatherv"]
    assert chosen.select(wanted(ALLGATHER), "auto", {}) == NATIVE_VARIANT
    assert chosen.select(wanted(), "pairwise", {}) == full(ALLTOALL, "pairwise")
    assert not chosen.is_auto(ALLTOALL, "auto") and chosen.is_auto(ALLGATHER, "auto")
    assert chosen.learner(wanted()) is None and chosen.learner(wanted(ALLGATHER)) is not None
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
    chosen.learn(inf)
    for collective in called():
        assert chosen.select(wanted(collective), algorithm, {}) == NATIVE_VARIANT
        assert not chosen.is_auto(collective, "auto") and chosen.learner(wanted(collective)) is None
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


def serve(learner: Learner, seconds: Mapping[str, float], calls: int) -> None:
    """So many calls by what is learned, or until all has been tried."""
    for _ in range(calls):
        if not learner.is_settled:
            learner.note(seconds.get(learner.begin().algorithm, 9.0))


def test_learning_is_by_class_of_size_place_and_memory() -> None:
    """Calls alike share one learner; plans share its outcome, and try nothing; it is kept until all is forgotten."""
    chosen = policy(rank=0)
    assert chosen.learner(wanted()) is None
    chosen.learn(inf)
    learner = chosen.learner(wanted())
    assert learner is not None and chosen.learner(wanted()) is learner and chosen.learner(wanted(size=79)) is learner
    others = [wanted(size=80), wanted(in_place=True), wanted(memory="cuda"), wanted(ALLGATHER)]
    assert len({id(chosen.learner(other)) for other in others} | {id(learner)}) == 5
    assert chosen.learner(wanted(size=0)) is None and chosen.learner(wanted(BARRIER, 0)) is not None
    best = "bruck"
    for held in (False, True):
        assert chosen.select(wanted(held=held), "auto", {}) == NATIVE_VARIANT  # as without
    serve(learner, {best: 1.0}, 500)
    assert learner.finding is not None and learner.finding.variant.algorithm == best
    for held in (False, True):
        assert chosen.select(wanted(held=held), "auto", {}) == learner.finding.variant
    chosen.by_bytes[ALLTOALL, 8] = learner
    chosen.forget()
    assert chosen.learner(wanted()) is not learner and not chosen.by_bytes
    assert chosen.select(wanted(), "auto", {}) == NATIVE_VARIANT


def test_classes_of_sizes() -> None:
    """A fifth apart at most, the powers of two and what lies a quarter, half and three quarters between begin them."""
    assert [size_class(size) for size in (0, 1, 2, 3, 5, 7, 8, 9, 10, 64, 79, 80, 95, 127)] == [
        0, 1, 2, 3, 5, 7, 8, 8, 10, 64, 64, 80, 80, 112,
    ]  # fmt: skip
    assert all(
        size_class(size_class(size)) == size_class(size) <= size < 1.25 * size_class(size) for size in range(1, 5000)
    )


def asked(layout: str, cores: float = 1.0) -> list[list[float]]:
    """What each rank tells the others of what the model says."""
    told: list[list[float]] = []

    def tell(seconds: Sequence[float]) -> list[float]:
        told.append(list(seconds))
        return list(seconds)

    for each in (policy(rank=rank, layout=layout) for rank in range(parse_layout(layout).size)):
        each.learn()
        each.links = each.links._replace(cores=cores)
        each.slowest_of_some = tell
        each._offered(wanted(), None)
    return told


def test_candidates() -> None:
    """native and the few that the model likes best, of each algorithm not all, with all parameters; each rank asks the
    model about some."""
    told = asked(LAYOUT)
    assert max(sum(seconds > 0 for seconds in row) for row in told) <= len(told[0]) / 8 + 1
    ranking = tuner.rank_by_model("alltoall", parse_layout(LAYOUT), wanted().size)
    for share, most in ((inf, MANY), (0.05, FEW)):
        chosen = policy()
        chosen.learn(share)
        chosen.slowest_of_some = lambda seconds: [max(row) for row in zip(*told, strict=True)]
        native, *others = chosen._offered(wanted(), None)
        assert native == NATIVE_VARIANT and len({each.key for each in others}) == len(others)
        assert 2 < len(others) <= most
        assert others[0] == full(ALLTOALL, ranking[0].algorithm, **ranking[0].params)
        assert all(each == full(ALLTOALL, each.algorithm, **each.params) for each in others)
        assert max(Counter(each.algorithm for each in others).values()) <= OF_A_KIND


def test_the_model_is_asked_about_all_sizes_at_once() -> None:
    """Of calls that have been made, and are alike but for their size."""
    chosen, asked_for = policy(rank=0, layout="1x3"), []
    chosen.learn()

    def tell(seconds: Sequence[float]) -> list[float]:
        asked_for.append(len(seconds))
        return list(seconds)

    chosen.slowest_of_some = tell
    calls = [wanted(size=1 << 20), wanted(size=8), wanted(ALLGATHER, 8), wanted(size=64, memory="cuda")]
    learners = [chosen.learner(each) for each in (*calls, wanted(size=4096))]
    for learner in learners[: len(calls)]:  # none of the last ones
        assert learner is not None
        learner.begin()
    offered = {each.key: chosen._offered(each, None) for each in calls[:2]}
    assert asked_for == [2 * len(automatic("alltoall", inplace=False))]
    alone = policy(rank=0, layout="1x3")
    alone.learn()
    alone.slowest_of_some = tell
    assert offered == {each.key: alone._offered(each, None) for each in calls[:2]}
    assert asked_for[1:] == [len(automatic("alltoall", inplace=False))] * 2
    chosen._offered(wanted(size=4096), None)
    assert asked_for[3:] == [len(automatic("alltoall", inplace=False))]


@pytest.mark.parametrize(("cores", "form"), [(1.0, "lane"), (0.25, "leader")])
def test_ranks_that_share_cores(cores: float, form: str) -> None:
    """Where they do, one rank of a node does best what could be shared out."""
    chosen, told = policy(layout="3x3"), asked("3x3", cores)
    chosen.learn()
    chosen.links = chosen.links._replace(cores=cores)
    chosen.slowest_of_some = lambda seconds: [max(row) for row in zip(*told, strict=True)]
    assert chosen._offered(wanted(), None)[1].params["form"] == form
    assert chosen.decide(wanted()).ranking[0].variant.params["form"] == form


@pytest.mark.parametrize("is_slow", [False, True])
def test_links_are_found_out_once(is_slow: bool) -> None:
    """Before the model is first asked. Where they are slow, bytes count, and other candidates come first. What the
    model decides stays."""
    found: list[Links] = []
    slow, size, shared = Link(50e-6, 40e-9), 4096, DEFAULT_LINKS._replace(cores=0.125)

    def probe(known: Links) -> Links:
        found.append(known)
        return known._replace(network=slow) if is_slow else known

    chosen = policy(rank=0, layout="4x4")
    chosen.learn()
    chosen._shares = lambda _: [[*range(len(automatic("allgather")))]]  # type: ignore[method-assign]
    chosen.links, chosen.probe = shared, probe
    decided = chosen.decide(wanted(ALLGATHER, size))
    assert not found
    offers = [chosen._offered(wanted(ALLGATHER, each), None) for each in (size, 64, 8)]
    assert found == [shared] and all(len(offer) == 1 + FEW for offer in offers)
    assert chosen.decide(wanted(ALLGATHER, size)) == decided
    links = shared._replace(network=slow) if is_slow else shared
    (first, *_) = tuner.rank_by_model("allgather", parse_layout("4x4"), size, links=links)
    assert offers[0][1].algorithm == first.algorithm
    assert (first.algorithm == "bine") is not is_slow


def test_measuring_links_is_part_of_what_a_question_takes() -> None:
    chosen = policy(rank=0, layout="2x2")
    chosen.learn()
    chosen.budget.meeting = 1e-3
    each = wanted()
    without = chosen._asking(each, each.key)
    chosen.learn()
    chosen.budget.meeting, chosen.probe = 1e-3, lambda known: known
    assert chosen._asking(each, each.key) == pytest.approx(without + PROBING * 1e-3)


def test_a_machine_says_what_links_are_like() -> None:
    """Then none is found out."""
    chosen = policy(rank=0, layout="1x3", table=Table(machine=get_machine("generic-100g")))
    chosen.learn()
    chosen.probe = lambda known: pytest.fail("links are found out")
    assert len(chosen._offered(wanted(), None)) > 1


def test_what_the_model_knows_takes_no_time() -> None:
    """What a question takes: of vectors that are cut, the many segments are what takes long; a longer vector has some
    more."""
    long, short, other = (wanted(ALLREDUCE, size) for size in (1 << 16, 1 << 12, 1 << 14))

    def new() -> Policy:
        chosen = policy(rank=0, layout="1x3")
        chosen.learn()
        return chosen

    def asking(chosen: Policy, each: Wanted) -> float:
        return chosen._asking(each, each.key)

    assert AGAIN < asking(new(), short) < asking(new(), long)
    chosen = new()
    chosen._offered(short, None)
    assert asking(chosen, short) == 0.0
    begun = asking(chosen, long) - AGAIN
    assert 0.0 < begun < asking(new(), long) - ASKING
    chosen._offered(long, None)
    assert asking(chosen, long) == 0.0
    assert AGAIN < asking(chosen, other) < AGAIN + begun / 10
    assert asking(chosen, wanted(ALLTOALL, 8)) > asking(chosen, other)


@pytest.mark.parametrize("collective", ["allreduce", "alltoall"])
def test_each_rank_looks_at_the_same_algorithms_always(collective: str) -> None:
    """What takes the longest is not looked at by one of them alone."""
    chosen = policy(rank=0, layout="1x3")
    chosen.learn()
    each = wanted(COLLECTIVES[collective], 1 << 16)
    shares = [list(share) for share in chosen._shares(each)]
    assert sorted(at for share in shares for at in share) == list(range(len(automatic(collective, each.in_place))))
    efforts = chosen._efforts(each)
    assert {share[0] for share in shares} == set(sorted(range(len(efforts)), key=lambda at: -efforts[at])[:3])
    chosen._offered(each, None)
    assert chosen._shares(wanted(COLLECTIVES[collective], 8)) == shares


def test_what_decides_where_nothing_is_learned() -> None:
    """A table, or the model as asked for; unless all calls are to try (with a table)."""
    table = Table((entry("alltoall", (1, Variant("pairwise"))),))
    for given in (table, Table(by_model=True)):
        chosen = policy(table=given)
        chosen.learn()
        assert chosen.learner(wanted()) is None
        assert chosen.learner(wanted(ALLTOALLV, 0)) is not None
    chosen = policy(table=table)
    chosen.learn(inf)
    assert chosen.learner(wanted()) is not None
    assert policy(layout="1x1").learner(wanted()) is None


def test_what_an_earlier_job_has_found() -> None:
    """It serves from the first call on, plans too; and is lost where nothing is to be learned."""
    chosen, found = policy(), full(ALLTOALL, "bruck")
    chosen.known[wanted().key] = Finding(found, 1.0, 2.0, 300, "2026-11-22")
    assert chosen.select(wanted(), "auto", {}) == NATIVE_VARIANT
    chosen.learn()
    for held in (False, True):
        assert chosen.select(wanted(held=held), "auto", {}) == found
    learner = chosen.learner(wanted())
    assert learner is not None and learner.begin() == found and learner.is_fixed
    assert chosen.select(wanted(size=8), "auto", {}) == NATIVE_VARIANT


def test_a_table_comes_before_what_earlier_jobs_have_found() -> None:
    """As does the model that was asked for; nobody knows sizes of which each rank knows its own beforehand."""
    found = full(ALLTOALL, "bruck")
    table = Table((entry("alltoall", (1, Variant("pairwise"))), entry("alltoallv", (1, Variant("pairwise")))))
    for given, due in ((table, "pairwise"), (Table(by_model=True), None)):
        chosen = policy(table=given)
        for each in (wanted(), wanted(ALLTOALLV, 0)):
            chosen.known[each.key] = Finding(found, 1.0, 2.0, 300, "2026-11-22")
        chosen.learn()
        for held in (False, True):
            selected = chosen.select(wanted(held=held), "auto", {})
            assert selected.algorithm == (due or chosen.decide(wanted(held=held)).variant.algorithm)
            assert selected != found
        assert chosen.select(wanted(ALLTOALLV, 0), "auto", {}) == found
        chosen.learn(inf)
        learner = chosen.learner(wanted())
        assert learner is not None and learner.known is None


# Sizes that no rank knows


def test_sizes_that_no_rank_knows() -> None:
    """One learner for each collective; plans are native, if nobody asks for good."""
    chosen = policy(table=Table((entry("alltoallv", (1, Variant("pairwise"))),)))
    chosen.learn(inf)
    uneven = chosen.learner(wanted(ALLTOALLV, 0))
    assert uneven is not None and uneven is chosen.learner(wanted(ALLTOALLV, 0, in_place=False))
    assert chosen.select(wanted(ALLTOALLV, 0), "auto", {}) == NATIVE_VARIANT
    spread = Spread(8, 0, 8000, 1000)
    seen = set()
    while uneven.finding is None:
        variant = uneven.begin(lambda: spread)
        seen.add(variant.algorithm)
        uneven.note(1.0 if variant.is_native else 0.5)
    assert seen == {NATIVE, "pairwise"} == {NATIVE, uneven.finding.variant.algorithm}
    assert chosen.select(wanted(ALLTOALLV, 0), "auto", {}) == uneven.finding.variant
    assert chosen.select(wanted(ALLTOALLV, 0, held=True), "auto", {}) == NATIVE_VARIANT
    assert chosen.uneven_for_good(ALLTOALLV, Spread(64, 0, 64000, 1000)).algorithm == "pairwise"
    assert chosen.uneven_for_good(ALLTOALLV, Spread(64, 0, 64000, 9000)) == NATIVE_VARIANT


def test_few_blocks_are_native() -> None:
    """Where most are empty, or arguments are not for hiercoll, nothing is tried; calls are counted."""
    for spread in (Spread(), Spread(4, 4, 32, 8), Spread(8, 8, 64, 8, unfit=1)):
        chosen = policy()
        chosen.learn()
        uneven = chosen.learner(wanted(ALLTOALLV, 0))
        assert uneven is not None
        for _ in range(900):
            assert uneven.begin(lambda spread=spread: spread) == NATIVE_VARIANT and uneven.is_fixed
            uneven.count(1e-3)
        assert uneven.tally[0] > FIRST


@pytest.mark.parametrize("layout", ["2x4", "5+3", "8"])
def test_what_is_alike_differs_in_one_parameter_and_can_run_there(layout: str) -> None:
    """Of all automatic variants; numbers of segments are tuned otherwise."""
    chosen, several = policy(layout=layout), 0
    for collective in (each for each in called() if each.is_even):
        wanted = Wanted(collective, 4096, False)
        for name, params in automatic(collective.family, inplace=False):
            variant = full(collective, name, **params)
            alike = chosen._alike(wanted, variant)
            several = max(several, len(alike))
            assert len({each.key for each in alike} - {variant.key}) == len(alike)
            for other in alike:
                entry = REGISTRY[collective.family][name]
                changed = [key for key in variant.params if variant.params[key] != other.params[key]]
                assert other.algorithm == name and len(changed) == 1 and changed != ["segments"]
                assert entry.refusal(parse_layout(layout), other.params) is None
    assert several > 2
    some, same = Variant("bruck"), full(ALLTOALL, "bruck")  # as a file of an earlier version may name it
    assert chosen._alike(Wanted(ALLTOALL, 64, False), some) == chosen._alike(Wanted(ALLTOALL, 64, False), same) != []
    assert chosen._alike(Wanted(ALLTOALLV, 0, False), full(ALLTOALLV, "pairwise")) == []
