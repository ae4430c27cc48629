"""The report on a program's collectives: calls, bytes and what ran, by call site."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll import settings
from hiercoll.calls import dropin, serving
from hiercoll.collectives import ALLTOALL, NATIVE, called, get_collective
from hiercoll.runtime import beginning, compiled, lifetime
from hiercoll.runtime.lifetime import get_session, known_session
from hiercoll.runtime.session import Session
from hiercoll.tables import NATIVE_VARIANT, Choice, Entry, Table, Variant
from hiercoll.tools.reasons import Reason
from hiercoll.tools.report import Recorder, received
from hiercoll.topology import Topology
from hiercoll.tuning.learning import Finding, Learner
from hiercoll.tuning.policy import Policy, Wanted

RANK, SIZE = WORLD.rank, WORLD.size


@pytest.fixture(params=layouts())
def ours(request: pytest.FixtureRequest, on_layout: Callable[[str], MPI.Intracomm]) -> hiercoll.Intracomm:
    return hiercoll.Intracomm(on_layout(request.param))


@pytest.fixture
def ready(ours: hiercoll.Intracomm, bruck: None) -> hiercoll.Intracomm:
    """hiercoll is set up on it, and a table chooses bruck for everything."""
    get_session(ours)
    return ours


@pytest.fixture
def recorders() -> Iterator[Callable[..., Recorder]]:
    """Makes recorders that watch, while the test runs."""
    made: list[Recorder] = []

    def watching(*, sync: bool = False, trace: bool = False) -> Recorder:
        made.append(Recorder(sync=sync, trace=trace))
        made[-1].install()
        return made[-1]

    yield watching
    for recorder in made:
        recorder.remove()


def test_recorders_come_and_go(ours: hiercoll.Intracomm, recorders: Callable[..., Recorder]) -> None:
    """Each counts every call once, however often it was installed, and at the program's own place."""
    names = [name for each in called() for name in (each.native, each.nonblocking, each.persistent)]
    recorders().remove()  # of tests that put methods back themselves, others may still be there
    before = {name: getattr(dropin.Collectives, name) for name in names}
    first, recv = recorders(), np.empty(SIZE)
    first.install()
    ours.Alltoall(np.arange(1.0 * SIZE), recvbuf=recv)
    second = recorders()
    for _ in range(2):
        ours.Alltoall(np.arange(1.0 * SIZE), recv)
    first.remove()
    ours.Alltoall(np.arange(1.0 * SIZE), recv)
    for recorder, lines in ((first, [1, 2]), (second, [2, 1])):
        assert [site.calls for site in recorder.sites.values()] == lines
        assert all(__file__ in place for place, _ in recorder.sites)
    second.remove()
    second.remove()
    ours.Alltoall(np.arange(1.0 * SIZE), recv)
    assert sum(site.calls for site in second.sites.values()) == 3
    assert before == {name: getattr(dropin.Collectives, name) for name in names}


def test_bytes_received() -> None:
    """By the record: of one block or many, of a vector, on the root or elsewhere."""

    def bytes_of(name: str, *args: object, rank: int = 1) -> int:
        return received(get_collective(name), 4, rank, args)

    eight, ones = np.empty(8), np.ones(4, int)
    assert bytes_of("alltoall", None, eight) == bytes_of("allgather", None, [eight, 2]) == 64
    assert bytes_of("alltoallv", None, [eight, ones]) == bytes_of("allgatherv", None, [eight, ones]) == 32
    assert bytes_of("gather", None, None) == 0 and bytes_of("gather", None, eight, rank=0) == 64
    assert bytes_of("gather", None, eight, 1) == 64 == 64
    assert bytes_of("scatter", None, eight) == bytes_of("allreduce", None, eight) == 64
    assert bytes_of("reduce", None, eight) == 0 and bytes_of("reduce", None, eight, None, 1) == 64


# ---- native and hiercoll compared

several = pytest.mark.mpi(min_size=2)  # one rank has nothing to choose from
BRUCK = Variant("bruck", {"radix": 2})


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no table, and nothing is known."""
    monkeypatch.delenv("HIERCOLL_TABLE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.setattr(beginning, "LOOK", 0.0)
    monkeypatch.setattr("hiercoll.learned.JobFile.keep", lambda *_: None)


@pytest.fixture
def bruck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that chooses bruck for everything."""
    monkeypatch.setattr(Policy, "_automatic", lambda self, wanted: BRUCK)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native takes turns with what is chosen; one rank says so."""
    monkeypatch.setattr(settings, "compares", RANK == 0)


def alltoalls(comm: MPI.Intracomm, calls: int) -> None:
    """At one place, with the same arrays."""
    send, recv = np.arange(2 * SIZE) + 100 * RANK, np.empty(2 * SIZE, int)
    want = np.concatenate([np.arange(2 * RANK, 2 * RANK + 2) + 100 * peer for peer in range(SIZE)])
    for salt in range(calls):
        send += salt
        want += salt
        comm.Alltoall(send, recv)
        np.testing.assert_array_equal(recv, want)


def only_record(recorder: Recorder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the one site, and of its one kind of calls, on all ranks."""
    records = WORLD.bcast(recorder.gather(WORLD))
    (record,) = records
    (kind,) = record["kinds"]
    return record, kind


def until_settled(comm: MPI.Intracomm, calls: int) -> tuple[Learner, int]:
    """So many calls, and more if a candidate happens to be faster, for then others are tried: what learns from them,
    and their number."""
    learner, number = None, 0
    while number < 4000 and (learner is None or not learner.is_settled):
        alltoalls(hiercoll.Intracomm(comm), calls)
        number += calls
        learner = get_session(comm).policy.learner(Wanted(ALLTOALL, 16, False))
    assert learner is not None and learner.is_settled
    return learner, number


def test_a_reduction_is_of_one_kind_before_a_set_up_and_after_it(
    comm: MPI.Intracomm, newcomer: None, recorders: Callable[..., Recorder]
) -> None:
    """What it asks of algorithms is known only then."""
    recorder, send, recv = recorders(), np.full(1000, 0.1 + RANK), np.empty(1000)
    for _ in range(2):
        hiercoll.Intracomm(comm).Allreduce(send, recv)
        hiercoll.get_topology(comm)
    record, kind = only_record(recorder)
    assert record["calls"] == 2 and kind["operation"] == "SUM of float64"


@pytest.mark.parametrize("sync", [False, True])
def test_a_report_sets_nothing_up(
    comm: MPI.Intracomm, newcomer: None, recorders: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    monkeypatch.setattr(lifetime, "_set_up", 1e6)
    recorder = recorders(sync=sync)
    alltoalls(hiercoll.Intracomm(comm), 40)
    assert known_session(comm) is None and not recorder.budgets
    record, kind = only_record(recorder)
    assert list(kind["ran"]) == [NATIVE] and kind["ran"][NATIVE]["calls"] == record["calls"] == 40
    assert kind["learned"] is None is kind["gain"] and kind["bytes_per_block"] == [16, 16]
    assert 0.0 < kind["ran"][NATIVE]["median"] <= kind["ran"][NATIVE]["seconds"] <= record["seconds"]["most"]
    assert (record["waited"]["most"] > 0.0) == sync


@several
def test_trials_are_counted_apart(
    comm: MPI.Intracomm,
    newcomer: None,
    recorders: Callable[..., Recorder],
    offer: Callable[[Variant], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So is the call that sets hiercoll up; what was learned is told."""
    monkeypatch.setattr("hiercoll.runtime.session.SHARE", float("inf"))
    monkeypatch.setattr("hiercoll.runtime.beginning.SHARE", 1e9)
    offer(BRUCK)
    monkeypatch.setattr(lifetime, "_set_up", 1e-9)
    before, recorder = lifetime.set_ups.count, recorders()
    learner, number = until_settled(comm, 200)
    assert learner.finding is not None
    _, kind = only_record(recorder)
    assert kind["trials"]["calls"] == learner.trials - 1 >= 4  # the first of them is the call with the set-up
    served = sum(each["calls"] for each in kind["ran"].values())
    assert served + kind["trials"]["calls"] == number - 1
    assert kind["learned"]["calls"] == learner.finding.calls and kind["learned"]["settled"]
    assert kind["learned"]["algorithm"] == learner.finding.variant.spelled("alltoall")
    costs = WORLD.bcast(recorder.costs(WORLD))
    assert costs["set_ups"] > before and costs["set_up_seconds"] > 0.0
    budget = get_session(comm).policy.budget
    assert costs["calls_seconds"] == pytest.approx(budget.calls) and costs["saved_seconds"] == pytest.approx(
        budget.saved
    )


@several
def test_native_takes_turns(
    turns: None, ready: hiercoll.Intracomm, recorders: Callable[..., Recorder], folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With what a table chooses, through the whole run; what is said is what was measured."""
    recorder, file = recorders(), folder / "report.json"
    alltoalls(ready, 400)
    record, kind = only_record(recorder)
    name = "bruck radix=2"
    assert record["ran"] == {NATIVE: 200 * SIZE, name: 200 * SIZE} and kind["trials"]["calls"] == 0
    low, high = kind["gain"]["interval"]
    assert kind["gain"]["algorithm"] == name and low <= kind["gain"]["ratio"] <= high
    assert kind["gain"]["ratio"] == pytest.approx(kind["ran"][NATIVE]["median"] / kind["ran"][name]["median"])
    recorder.finish(WORLD, file, None, compares=True)
    printed = capsys.readouterr().err
    assert bool(printed) == (RANK == 0)
    if RANK == 0:
        assert f"native / {name}: {kind['gain']['ratio']:.2f} (" in printed and "took turns" in printed
        found = json.loads(file.read_text())
        assert found["compared"] and found["sites"] == json.loads(json.dumps([record]))


@several
def test_native_takes_turns_however_ranks_call(turns: None, ready: hiercoll.Intracomm) -> None:
    """Ranks that spell a call differently, and other collectives between: the same turns on all ranks, right data."""
    ours, again = ready, (np.empty(SIZE, int), np.empty(SIZE, int))
    for salt in range(240):
        send, recv = again if salt % 5 else (np.empty(SIZE, int), np.empty(SIZE, int))
        send[:], recv[:] = np.arange(SIZE) + 10 * RANK + salt, -1
        if (salt // 3 + RANK) % 3 == 0:
            hiercoll.alltoall(ours, send, recv)
        elif (salt // 3 + RANK) % 3 == 1:
            ours.Alltoall([send, MPI.LONG], [recv, MPI.LONG])
        else:
            ours.Alltoall(send, recv)
        np.testing.assert_array_equal(recv, 10 * np.arange(SIZE) + RANK + salt)
        if salt % 7 == 0:
            ours.plain.Barrier()
            ours.Ialltoall(send, recv).Wait()
            np.testing.assert_array_equal(recv, 10 * np.arange(SIZE) + RANK + salt)
    learner = get_session(ours).policy.learner(Wanted(ALLTOALL, 8, False))
    assert learner is not None and learner.compares and not learner.trials


@several
def test_native_takes_turns_while_auto_learns(
    comm: MPI.Intracomm,
    newcomer: None,
    turns: None,
    calls: dropin.Calls,
    offer: Callable[[Variant], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trials are as they are otherwise."""
    monkeypatch.setattr("hiercoll.runtime.session.SHARE", float("inf"))
    offer(BRUCK)
    ours = hiercoll.Intracomm(comm)
    get_session(comm)
    learner, _ = until_settled(comm, 160)
    assert learner.trials > 4
    monkeypatch.setattr(type(learner), "_chosen", BRUCK)  # whatever is faster here
    learner.current = BRUCK
    calls.clear()
    trials = learner.trials
    alltoalls(ours, 100)
    trials = learner.trials - trials
    assert sum(calls.values()) == 100 and abs(calls["alltoall, native"] - 50) <= trials + 1


@several
def test_nothing_takes_turns_unasked(ready: hiercoll.Intracomm, calls: dropin.Calls) -> None:
    alltoalls(ready, 50)
    assert calls == {"alltoall": 50}


def tried(comm: MPI.Intracomm, is_settled: bool) -> None:
    """Alltoalls of 8 bytes have been tried."""
    session = get_session(comm)
    session.policy.learn()
    learner = session.policy.learner(Wanted(ALLTOALL, 8, False))
    assert learner is not None
    learner.trials, learner.is_settled = 5, is_settled
    learner.tally[0] = 10


def known_before(date: str, comm: MPI.Intracomm) -> None:
    """An earlier job has found that native is best, or, without a date, this one on another communicator."""
    session = get_session(comm)
    wanted = Wanted(ALLTOALL, 8, False)
    session.policy.learn()
    session.policy.known[wanted.key] = Finding(NATIVE_VARIANT, 1e-5, 1e-5, 100, date)
    assert session.policy.learner(wanted) is not None


def begun_earlier(comm: MPI.Intracomm) -> None:
    """An earlier job has not tried everything."""
    session = get_session(comm)
    wanted = Wanted(ALLTOALL, 8, False)
    session.policy.learn()
    session.policy.known[wanted.key] = Finding(NATIVE_VARIANT, 1e-5, 1e-5, 100, untried=(BRUCK,))
    assert session.policy.learner(wanted) is not None


def turns_next(comm: MPI.Intracomm) -> None:
    """Native takes turns with what an earlier job has found, and the next one is native's."""
    policy, wanted = get_session(comm).policy, Wanted(ALLTOALL, 8, False)
    policy.learn()
    policy.compares, policy.known[wanted.key] = True, Finding(BRUCK, 1e-6, 1e-5, 100)
    learner = policy.learner(wanted)
    assert learner is not None
    while not learner.begin().is_native:
        learner.note(1e-5)


def table_says(comm: MPI.Intracomm, collective: str = "alltoall", variant: Variant = NATIVE_VARIANT) -> None:
    """The MPI library's own, or another one."""
    session = get_session(comm)
    sizes = tuple(len(node) for node in session.topology.nodes)
    entry = Entry(collective, session.library, "host", sizes, "block", (Choice(0, variant),))
    session.policy.table = Table((entry,))


def learns(comm: MPI.Intracomm) -> None:
    get_session(comm).policy.learn()


def call_alltoall(comm: MPI.Intracomm) -> None:
    comm.Alltoall(np.arange(SIZE), np.empty(SIZE, int))


def call_allgather(comm: MPI.Intracomm) -> None:
    comm.Allgather(np.arange(8), np.empty((SIZE, 8), int))


def wait_allgather(comm: MPI.Intracomm) -> None:
    comm.Iallgather(np.arange(8), np.empty((SIZE, 8), int)).Wait()


def wait_alltoall(comm: MPI.Intracomm) -> None:
    comm.Ialltoall(np.arange(SIZE), np.empty(SIZE, int)).Wait()


def call_gatherv(comm: MPI.Intracomm) -> None:
    comm.Gatherv(np.arange(2), [np.empty(2 * SIZE, int), [2] * SIZE] if RANK == 0 else None)


def call_own_operation(comm: MPI.Intracomm) -> None:
    def add(one: Any, other: Any, kind: Any) -> None:
        numbers = np.frombuffer(other, int)
        numbers += np.frombuffer(one, int)

    operation = MPI.Op.Create(add, commute=True)
    comm.Allreduce(np.arange(3), np.empty(3, int), operation)
    operation.Free()


def call_lower_bound(comm: MPI.Intracomm) -> None:
    """Elements that begin after their address, by an operation of the program's."""
    late = MPI.INT.Create_hindexed([1], [4]).Commit()
    operation = MPI.Op.Create(lambda one, other, kind: None, commute=True)
    comm.Allreduce([np.zeros(8, "i4"), 1, late], [np.zeros(8, "i4"), 1, late], operation)
    operation.Free()
    late.Free()


def call_sum(comm: MPI.Intracomm) -> None:
    comm.Allreduce(np.ones(3), np.empty(3))


def call_gather(comm: MPI.Intracomm) -> None:
    comm.Gather(np.ones(3), np.empty((SIZE, 3)) if RANK == 0 else None)


def call_scatter(comm: MPI.Intracomm) -> None:
    comm.Scatter(np.ones((SIZE, 3)) if RANK == 0 else None, np.empty(3))


def call_reduce(comm: MPI.Intracomm) -> None:
    comm.Reduce(np.ones(3, int), np.empty(3, int) if RANK == 0 else None)


def call_integers(comm: MPI.Intracomm) -> None:
    comm.Allreduce(np.ones(3, int), np.empty(3, int))


def one_node(comm: MPI.Intracomm) -> None:
    """As far as it matters for objects."""
    get_session(comm).topology = Topology((0,) * SIZE)


def threadless(comm: MPI.Intracomm) -> None:
    get_session(comm).threadless = True


LEFT: dict[str, tuple[Reason, Callable[[MPI.Intracomm], None], Callable[[MPI.Intracomm], None]]] = {
    "not tried": (Reason.NOT_TRIED, learns, call_alltoall),
    "trying": (Reason.TRYING, lambda comm: tried(comm, False), call_alltoall),
    "tried": (Reason.NOT_FASTER, lambda comm: tried(comm, True), call_alltoall),
    "earlier": (Reason.EARLIER_JOB, partial(known_before, "2026-11-22"), call_alltoall),
    "elsewhere": (Reason.NOT_FASTER, partial(known_before, ""), call_alltoall),
    "begun earlier": (Reason.TRYING, begun_earlier, call_alltoall),
    "turn": (Reason.TURN, turns_next, call_alltoall),
    "table": (Reason.TABLE, table_says, call_alltoall),
    "not learning": (Reason.NOT_LEARNING, lambda comm: get_session(comm).policy.learn(0.0), call_alltoall),
    "background": (Reason.BLOCKING_ONLY, learns, wait_alltoall),
    "root": (Reason.ROOT_SIZES, learns, call_gatherv),
    "bcast of objects": (Reason.OBJECTS_OF_NODE, one_node, lambda comm: comm.bcast(RANK)),
    "allgather of objects": (Reason.OBJECTS_OF_NODE, one_node, lambda comm: comm.allgather(RANK)),
    "alltoall of objects": (Reason.OBJECTS_OF_NODE, one_node, lambda comm: comm.alltoall([1] * SIZE)),
    "gather of objects": (Reason.OBJECTS, learns, lambda comm: comm.gather(RANK)),
    "scatter of objects": (Reason.OBJECTS, learns, lambda comm: comm.scatter([1] * SIZE)),
    "operation": (Reason.ORDER, learns, call_own_operation),
    "sum": (Reason.ORDER, learns, call_sum),
    "sum by a table": (Reason.TABLE, lambda comm: table_says(comm, "allreduce", Variant("ring")), call_sum),
    "integers": (Reason.NOT_TRIED, learns, call_integers),
    "gather": (Reason.NOT_TRIED, learns, call_gather),
    "scatter": (Reason.NOT_TRIED, learns, call_scatter),
    "reduce": (Reason.NOT_TRIED, learns, call_reduce),
    "threads": (Reason.THREADS, threadless, wait_alltoall),
    "empty": (Reason.EMPTY, learns, lambda comm: comm.Alltoall(np.empty(0), np.empty(0))),
}


@several
@pytest.mark.parametrize("how", LEFT)
def test_why_calls_are_left_to_the_library(
    newcomer: None,
    ours: hiercoll.Intracomm,
    recorders: Callable[..., Recorder],
    how: str,
) -> None:
    """Each reason by its name, on all ranks."""
    due, prepare, call = LEFT[how]
    prepare(ours)
    session = get_session(ours) if how == "sum by a table" else None
    # A table of this layout serves sums, too; for ranks that are placed otherwise, it says that nothing is faster.
    is_served = session is not None and session.policy.table.entries[0].is_for(session.topology)
    counts = {} if is_served else {due.value: 1}
    recorder = recorders()
    call(ours)
    left = [site.left for site in recorder.sites.values()]
    assert left == [counts]
    records = recorder.gather(WORLD)
    assert RANK or (records is not None and records[0]["left"] == dict.fromkeys(counts, SIZE))


def test_traces_of_ranks_are_by_one_clock(recorders: Callable[..., Recorder]) -> None:
    """However late a rank began to watch; every call ends after the last rank has begun it."""
    comm, recv = hiercoll.Intracomm(WORLD.Dup()), np.empty(SIZE)
    sleep(0.05 * RANK)
    recorder = recorders(trace=True)
    for _ in range(3):
        comm.Alltoall(np.arange(1.0 * SIZE), recv)
    everyone = recorder.all_events(WORLD)
    comm.Free()
    assert (everyone is None) == (RANK > 0)
    for calls in zip(*(everyone or []), strict=True):
        assert {call.name for call in calls} == {"alltoall"}
        assert 0 <= max(call.begin for call in calls) <= min(call.begin + call.seconds for call in calls)


@several
@pytest.mark.parametrize("how", ["native", "bruck"])
def test_watched_calls_are_served_as_others_are(
    comm: MPI.Intracomm, recorders: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """By the compiled engine, once they are known; so that their times are those without a report."""
    if compiled.load()[0] is None:
        pytest.skip("there is no compiled engine")
    ours, made = hiercoll.Intracomm(comm), list[object]()
    table_says(ours, "alltoall", Variant(how))
    make = serving.make_request
    monkeypatch.setattr(serving, "make_request", lambda *args, **options: made.append(args) or make(*args, **options))
    send, recv = np.arange(3.0 * SIZE), np.empty(3 * SIZE)
    recorder = recorders()
    for _ in range(6):
        ours.Alltoall(send, recv)
    assert len(made) <= 2
    [site] = recorder.sites.values()
    [(ran, calls)] = site.ran.items()
    assert ran.startswith(how) and calls == site.calls == 6
    recorder.remove()
    total = np.empty(3 * SIZE)
    recorder.install()
    for _ in range(4):
        ours.Allreduce(send, total)
        ours.Bcast(recv, 0)
    assert {name: site.calls for (_, name), site in recorder.sites.items()} == {
        "alltoall": 6,
        "allreduce": 4,
        "bcast": 4,
    }
    for site in recorder.sites.values():
        assert sum(site.left.values()) == site.ran[NATIVE]


def test_calls_from_code_without_a_name(ours: hiercoll.Intracomm, recorders: Callable[..., Recorder]) -> None:
    """As exec runs it, with names of one's own."""
    recorder, names = recorders(), {"comm": ours, "send": np.arange(1.0 * SIZE), "recv": np.empty(SIZE)}
    exec("comm.Alltoall(send, recv)", names)
    [(place, _)] = recorder.sites
    assert place == "<string>:1"


@several
@pytest.mark.parametrize("call", [call_allgather, wait_allgather])
def test_what_a_table_chooses_cannot_run(
    newcomer: None,
    on_layout: Callable[[str], MPI.Intracomm],
    recorders: Callable[..., Recorder],
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[MPI.Intracomm], None],
) -> None:
    """There is no room for buffers that a node shares; calls in the background share none."""
    ours = hiercoll.Intracomm(on_layout(layouts()[0]))
    table_says(ours, "allgather", Variant("shared"))
    if call is call_allgather:
        monkeypatch.setattr(Session, "node", property(_no_room))
    recorder = recorders()
    call(ours)
    assert [dict(site.left) for site in recorder.sites.values()] == [{Reason.CANNOT_RUN.value: 1}]


def _no_room(session: Session) -> MPI.Intracomm:
    raise hiercoll.ConstraintError("shared", "places in /dev/shm", "none", session.rank)


@several
def test_a_table_and_uneven_blocks(
    newcomer: None, ours: hiercoll.Intracomm, recorders: Callable[..., Recorder]
) -> None:
    """No rank can look into a table by sizes: what it says is tried."""
    learns(ours)
    table_says(ours, "alltoallv", Variant("pairwise"))
    recorder = recorders()
    ours.Alltoallv([np.arange(SIZE), [1] * SIZE], [np.empty(SIZE, int), [1] * SIZE])
    assert [dict(site.left) for site in recorder.sites.values()] == [{Reason.NOT_TRIED.value: 1}]


@several
def test_arguments_that_the_library_alone_takes(
    newcomer: None, ours: hiercoll.Intracomm, recorders: Callable[..., Recorder]
) -> None:
    """The report says which; of the next call, nothing of it."""
    learns(ours)
    recorder = recorders()
    call_lower_bound(ours)
    call_sum(ours)
    left = [dict(site.left) for site in recorder.sites.values()]
    assert left == [
        {f"{Reason.REFUSED.value}: op, expected elements that lie within their extent": 1},
        {Reason.ORDER.value: 1},
    ]


@several
def test_calls_among_different_ranks_are_apart(
    comm: MPI.Intracomm, newcomer: None, recorders: Callable[..., Recorder]
) -> None:
    """On communicators of different sizes."""
    alone, everyone = hiercoll.Intracomm(comm).Split(RANK), hiercoll.Intracomm(comm)
    for each in (alone, everyone):
        get_session(each)
    recorder = recorders()
    for each in (everyone, alone, everyone):
        each.Allreduce(np.ones(3, int), np.empty(3, int))
    (record,) = WORLD.bcast(recorder.gather(WORLD))
    found = {kind["ranks"]: kind["ran"][NATIVE]["calls"] for kind in record["kinds"]}
    assert record["calls"] == 3 and found == {SIZE: 2, 1: 1}
    alone.Free()


@several
def test_objects_before_a_set_up(comm: MPI.Intracomm, newcomer: None, recorders: Callable[..., Recorder]) -> None:
    """Are seen, once, whatever keeps their buffers."""
    for made in (hiercoll.Intracomm(comm), hiercoll.Pkl5Intracomm(comm)):
        recorder = recorders()
        made.bcast(RANK)
        made.allgather(RANK)
        made.alltoall([RANK] * SIZE)
        found = {key[1]: dict(site.left) for key, site in recorder.sites.items() if "objects" in key[1]}
        names = ("bcast", "allgather", "alltoall")
        assert found == {f"{name} of objects": {Reason.TOO_SHORT.value: 1} for name in names}
        recorder.remove()


@several
def test_a_new_communicator(
    newcomer: None, comm: MPI.Intracomm, recorders: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On which nothing is set up, for want of time, since earlier jobs have found nothing, or since links are what
    takes long."""
    monkeypatch.setattr(lifetime, "_set_up", 1e6)
    monkeypatch.setattr(beginning, "_is_settled", lambda size: True)
    recorder, ours = recorders(), hiercoll.Intracomm(comm)
    for _ in range(beginning.FIRST + 2):  # ranks look at it once
        call_alltoall(ours)
    state = lifetime.first_calls(comm)
    assert state is not None
    state.is_at_bound = True
    call_alltoall(ours)
    left: Counter[str] = sum((Counter(site.left) for site in recorder.sites.values()), Counter())
    assert left == {Reason.TOO_SHORT.value: beginning.FIRST, Reason.EARLIER_JOB.value: 2, Reason.AT_BOUND.value: 1}


def test_one_rank(newcomer: None, recorders: Callable[..., Recorder]) -> None:
    recorder = recorders()
    hiercoll.Intracomm(MPI.COMM_SELF).Alltoall(np.arange(1), np.empty(1, int))
    assert [dict(site.left) for site in recorder.sites.values()] == [{Reason.ONE_RANK.value: 1}]


@several
def test_switched_off(
    newcomer: None, ours: hiercoll.Intracomm, recorders: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    if RANK == SIZE - 1:  # for all
        monkeypatch.setenv("HIERCOLL_DISABLE", "1")
    recorder = recorders()
    call_alltoall(ours)
    assert [dict(site.left) for site in recorder.sites.values()] == [{Reason.DISABLED.value: 1}]
    assert known_session(ours) is None


@several
def test_native_by_name(
    newcomer: None, ours: hiercoll.Intracomm, recorders: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--algorithm alltoall=native` has it."""
    monkeypatch.setitem(settings.forced, "alltoall", (NATIVE, {}))
    get_session(ours)
    recorder = recorders()
    call_alltoall(ours)
    assert [dict(site.left) for site in recorder.sites.values()] == [{Reason.FORCED.value: 1}]
