"""Calls in the background that come again: without another look, as long as "auto" means the same."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll import settings
from hiercoll.calls import dropin, serving
from hiercoll.calls.background import NativeCall
from hiercoll.collectives import ALLTOALL, called
from hiercoll.runtime import compiled
from hiercoll.runtime.beginning import Beginning
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.progress import abandoned
from hiercoll.tables import Choice, Entry, Table, Variant
from hiercoll.tuning.learning import Finding
from hiercoll.tuning.policy import Wanted

RANK, SIZE = WORLD.rank, WORLD.size
ITEMS, TURNS = 3, 5
Arrays: TypeAlias = "list[np.ndarray[Any, Any]]"
needs_engine = pytest.mark.skipif(compiled.call() is None, reason="there is no compiled engine")
needs_threads = pytest.mark.skipif(
    MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="the MPI library gives no MPI_THREAD_MULTIPLE"
)
pytestmark = [needs_engine, pytest.mark.mpi(min_size=2)]  # one rank leaves all to the MPI library


@pytest.fixture
def comm(on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch) -> MPI.Intracomm:
    """On which hiercoll is set up, and "auto" is the MPI library's own."""
    monkeypatch.delenv("HIERCOLL_TABLE", raising=False)
    made = on_layout(layouts()[-1])
    get_session(made)
    return made


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls in the background that Python has looked at."""
    seen: Counter[str] = Counter()
    begin, met_so_far = serving.begin, dropin.met_so_far

    def of_function(session: Any, collective: Any, given: Any) -> Any:
        seen["functions"] += 1
        return begin(session, collective, given)

    def of_method(comm: Any) -> Any:
        seen["methods"] += 1
        return met_so_far(comm)

    monkeypatch.setattr(hiercoll.calls.functions, "begin", of_function)
    monkeypatch.setattr(dropin, "met_so_far", of_method)
    return seen


def arrays(turn: int) -> Arrays:
    """A block of this rank, blocks for all ranks, and where these, and one, are received; new ones in each turn."""
    one = np.arange(ITEMS) + 100.0 * RANK + turn
    many = np.concatenate([one + 10 * peer for peer in range(SIZE)])
    return [one, many, np.full(SIZE * ITEMS, -1.0), np.full(ITEMS, -1.0)]


COUNTS, PLACES = [ITEMS] * SIZE, [ITEMS * rank for rank in range(SIZE)]
BYTES = [8 * place for place in PLACES]
BLOCKS = [np.arange(ITEMS) + 100.0 * peer for peer in range(SIZE)]  # of turn 0
GATHERED = np.concatenate(BLOCKS)
EXCHANGED = np.concatenate([block + 10 * RANK for block in BLOCKS])
# By MPI's name: arguments, the buffer that receives, on which rank, what is there in turn 0, what each turn adds.
Case: TypeAlias = "tuple[Callable[[Arrays], tuple[Any, ...]], int, int | None, Any, int]"
LAST, W = SIZE - 1, [MPI.DOUBLE] * SIZE
CASES: dict[str, Case] = {
    "Ialltoall": (lambda a: (a[1], a[2]), 2, None, EXCHANGED, 1),
    "Iallgather": (lambda a: (a[0], a[2]), 2, None, GATHERED, 1),
    "Iallreduce": (lambda a: (a[0], a[3]), 3, None, sum(BLOCKS), SIZE),
    "Ireduce_scatter_block": (lambda a: (a[1], a[3]), 3, None, sum(BLOCKS) + 10 * SIZE * RANK, SIZE),
    "Ibcast": (lambda a: (a[0], LAST), 0, None, BLOCKS[-1], 1),
    "Ireduce": (lambda a: (a[0], a[3], MPI.SUM, LAST), 3, LAST, sum(BLOCKS), SIZE),
    "Igather": (lambda a: (a[0], a[2], LAST), 2, LAST, GATHERED, 1),
    "Iscatter": (lambda a: (a[1], a[3], LAST), 3, None, BLOCKS[-1] + 10 * RANK, 1),
    "Ialltoallv": (lambda a: ([a[1], COUNTS, PLACES, MPI.DOUBLE], [a[2], COUNTS]), 2, None, EXCHANGED, 1),
    "Iallgatherv": (lambda a: (a[0], [a[2], (COUNTS, PLACES)]), 2, None, GATHERED, 1),
    "Igatherv": (lambda a: (a[0], [a[2], COUNTS], LAST), 2, LAST, GATHERED, 1),
    "Iscatterv": (lambda a: ([a[1], COUNTS], a[3], LAST), 3, None, BLOCKS[-1] + 10 * RANK, 1),
    "Ialltoallw": (lambda a: ([a[1], (COUNTS, BYTES), W], [a[2], (COUNTS, BYTES), W]), 2, None, EXCHANGED, 1),
    "Ibarrier": (lambda a: (), 0, None, BLOCKS[RANK], 1),
}
METHODS = CASES | {"Ireduce_scatter": (lambda a: (a[1], a[3], COUNTS), *CASES["Ireduce_scatter_block"][1:])}


def call_of(comm: Any, name: str, turn: int, **how: Any) -> Any:
    """A call of a communicator, or (of mpi4py's) the function of hiercoll; its result is looked at."""
    make, place, root, due, step = METHODS[name]
    buffers = arrays(turn)
    given = make(buffers)
    if isinstance(comm, hiercoll.Intracomm):
        call = getattr(comm, name)(*given)
        call.Wait()
    else:
        function = {"Ireduce_scatter_block": "ireduce_scatter"}.get(name, name.lower())
        number = 1 if name == "Ibcast" else min(len(given), 2)
        how |= {"root": LAST} if len(given) > number else {}
        call = getattr(hiercoll, function)(comm, *given[:number], **how)
        found = call.wait()
        if root in (None, RANK) and name != "Ibarrier":
            assert found is buffers[place]
    if root in (None, RANK):
        np.testing.assert_array_equal(buffers[place], due + turn * step)
    return call


@pytest.mark.parametrize("name", CASES)
def test_functions(name: str, comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """Each is looked at once, whatever arrays it is given; of datatypes for each block, once for each array."""
    calls = [call_of(comm, name, turn) for turn in range(TURNS)]
    if name != "Ialltoallw":
        assert looked_at.total() == 1
        assert all(type(call) is NativeCall and call.test() and call.done for call in calls[1:])


@needs_threads
@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str, comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """Likewise; they return mpi4py's own requests."""
    ours = hiercoll.Intracomm(comm)
    calls = [call_of(ours, name, turn) for turn in range(TURNS)]
    assert looked_at.total() == 1
    assert {type(call) for call in calls} == {MPI.Request}


@needs_threads
@pytest.mark.parametrize("is_met", [True, False], ids=["counted", "unmet"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_before_hiercoll_is_set_up(
    name: str, is_met: bool, monkeypatch: pytest.MonkeyPatch, looked_at: Counter[str]
) -> None:
    """Before a blocking call has been counted, and after it; they do not count."""
    monkeypatch.delenv("HIERCOLL_TABLE", raising=False)
    ours = hiercoll.Intracomm(MPI.Intracomm(WORLD).Dup() if is_met else MPI.Intracomm(WORLD).Split())
    if is_met:
        ours.Barrier()
    left = (compiled.tally(ours.handle) or [0])[0]
    for turn in range(TURNS):
        call_of(ours, name, turn)
    assert looked_at.total() <= 1
    assert (compiled.tally(ours.handle) or [0])[0] == left
    if not is_met:
        ours.Barrier()
        assert isinstance(dropin.met_so_far(ours), Beginning)
        call_of(ours, name, TURNS)
    ours.Free()


# By MPI's name: arguments in units of a derived datatype, the buffer that receives, on which rank.
DERIVED: dict[str, tuple[Callable[[Arrays, MPI.Datatype], tuple[Any, ...]], int, int | None]] = {
    "Ialltoall": (lambda a, kind: ([a[1], 1, kind], [a[2], 1, kind]), 2, None),
    "Iallgather": (lambda a, kind: ([a[0], kind], [a[2], 1, kind]), 2, None),
    "Ibcast": (lambda a, kind: ([a[0], 1, kind], LAST), 0, None),
    "Igather": (lambda a, kind: ([a[0], 1, kind], [a[2], 1, kind], LAST), 2, LAST),
    "Iallgatherv": (lambda a, kind: ([a[0], 1, kind], [a[2], ONES, list(range(SIZE)), kind]), 2, None),
}
ONES = [1] * SIZE


@needs_threads
@pytest.mark.parametrize("name", DERIVED)
def test_methods_of_derived_datatypes(name: str, comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """Those that are left to the MPI library are looked at once, too: with gaps, and by types that are freed."""
    ours = hiercoll.Intracomm(comm)
    make, place, root = DERIVED[name]
    _, _, _, due, step = CASES[name]
    for number in range(2):
        first = MPI.DOUBLE.Create_vector(2, 1, ITEMS - 1)
        kind = first.Create_resized(0, ITEMS * MPI.DOUBLE.extent).Commit()
        first.Free()
        for turn in range(TURNS):
            buffers = arrays(turn)
            before = buffers[place].copy()
            getattr(ours, name)(*make(buffers, kind)).Wait()
            if root not in (None, RANK):
                continue
            want = due + turn * step
            gaps = slice(1, None, ITEMS)
            want[gaps] = before[gaps]
            np.testing.assert_array_equal(buffers[place], want)
        assert looked_at.total() == number + 1
        kind.Free()
    with pytest.raises((MPI.Exception, ValueError)):  # the latter where mpi4py is to count
        getattr(ours, name)(*make(arrays(0), kind))


def test_counts_of_derived_datatypes(comm: MPI.Intracomm) -> None:
    """Functions refuse what lies outside of a buffer, also where methods of the communicator have made such calls."""
    kind = MPI.DOUBLE.Create_contiguous(ITEMS).Commit()
    places = list(range(SIZE))
    for _ in range(3):
        _, _, recv, _ = arrays(0)
        hiercoll.Intracomm(comm).Allgatherv([arrays(0)[0], 1, kind], [recv, ONES, places, kind])
        np.testing.assert_array_equal(recv, GATHERED)
        hiercoll.allgatherv(comm, [arrays(0)[0], 1, kind], [recv, ONES, places, kind])
    for wrong in ([*places[:-1], SIZE], [*places[:-1], 1 << 60], [*places[:-1], -1]):
        for function in (hiercoll.allgatherv, hiercoll.iallgatherv):
            with pytest.raises(hiercoll.HiercollError):
                function(comm, [arrays(0)[0], 1, kind], [recv, ONES, wrong, kind])
    kind.Free()


NAMED = dict.fromkeys(("Igather", "Iscatter", "Igatherv", "Iscatterv"), "linear") | {
    "Ialltoall": "pairwise", "Iallgather": "ring", "Iallreduce": "recursive_doubling", "Ialltoallv": "pairwise",
    "Iallgatherv": "ring", "Ireduce_scatter_block": "ring", "Ibarrier": "dissemination", "Ibcast": "binomial",
    "Ireduce": "binomial",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_functions_by_algorithms(name: str, comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """The plan of the first one, which is over, serves those after it, each with tags of its own."""
    tags = get_session(comm).tags
    used = [tags.background_next]
    for turn in range(TURNS):
        call = call_of(comm, name, turn, algorithm=NAMED[name])
        assert type(call) is hiercoll.Request and NAMED[name] in call.name
        used.append(tags.background_next)
    assert looked_at.total() == 1 and get_session(comm).idle.count == 1
    assert len(set(used)) == TURNS + 1


@needs_threads
@pytest.mark.parametrize("name", NAMED)
def test_methods_by_algorithms(
    name: str, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, looked_at: Counter[str]
) -> None:
    """Likewise, as somebody has chosen for the program."""
    collective = {"Ireduce_scatter_block": "reduce_scatter"}.get(name, name[1:].lower())
    monkeypatch.setitem(settings.forced, collective, (NAMED[name], {}))
    made = on_layout(layouts()[-1])
    get_session(made)
    ours = hiercoll.Intracomm(made)
    for turn in range(TURNS):
        assert NAMED[name] in call_of(ours, name, turn).stand_in.name
    assert looked_at.total() == 1


def test_datatypes_for_each_block(comm: MPI.Intracomm) -> None:
    """The same objects with other counts, or other calls between, are another call."""
    counts = np.ones(SIZE, int)
    send, recv = np.empty(ITEMS * SIZE), np.empty(ITEMS * SIZE)
    ends = [send, (counts, BYTES), W], [recv, (counts, BYTES), W]
    for turn in range(6):
        recv[:], counts[:] = -1, 1 + turn % 2
        send[:] = np.arange(send.size) + 100 * RANK + turn
        hiercoll.ialltoallv(comm, [send, COUNTS], [recv.copy(), COUNTS], algorithm="pairwise").wait()
        hiercoll.ialltoallw(comm, *ends, algorithm="pairwise").wait()
        for peer in range(SIZE):
            got = recv[ITEMS * peer :][: counts[peer]]
            np.testing.assert_array_equal(got, np.arange(len(got)) + ITEMS * RANK + 100 * peer + turn)
            assert (recv[ITEMS * peer + counts[peer] : ITEMS * (peer + 1)] == -1).all()


def test_more_at_once_than_before(comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """As many plans as there are calls under way; all of them serve later calls, and none keeps an array."""
    idle = get_session(comm).idle
    for number in (1, 3, 5, 5):
        ends = [(np.arange(SIZE) + 10 * RANK + turn, np.full(SIZE, -1)) for turn in range(number)]
        calls = [hiercoll.ialltoall(comm, *each, algorithm="bruck") for each in ends]
        for turn in np.random.default_rng(RANK).permutation(number):
            calls[turn].wait()
            np.testing.assert_array_equal(ends[turn][1], 10 * np.arange(SIZE) + RANK + turn)
        assert idle.count == looked_at.total() == number
    kept = weakref.ref(ends[0][0])
    del ends, calls
    gc.collect()
    assert kept() is None


def test_other_buffers(comm: MPI.Intracomm) -> None:
    """In place, and in memory that is no array of NumPy's."""
    for turn in range(4):
        both = np.arange(SIZE) + 10 * RANK + turn
        hiercoll.ialltoall(comm, MPI.IN_PLACE, both, algorithm="bruck").wait()
        np.testing.assert_array_equal(both, 10 * np.arange(SIZE) + RANK + turn)
        out, into = bytearray([10 * RANK + turn] * SIZE), bytearray(SIZE)
        for algorithm in ("pairwise", "auto"):
            found = hiercoll.ialltoall(comm, out, into, algorithm=algorithm).wait()
            assert found.tolist() == list(into) == [10 * rank + turn for rank in range(SIZE)]
            into[:] = bytes(SIZE)


@needs_threads
@pytest.mark.parametrize("name", METHODS)
def test_methods_that_are_watched(name: str, comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """Whoever watches does not change how calls are served, and is told by what they are."""
    ours, seen = hiercoll.Intracomm(comm), dropin.Calls()
    dropin.observe(seen)
    try:
        for turn in range(TURNS):
            call_of(ours, name, turn)
    finally:
        dropin.ignore(seen)
    collective = next(each for each in called() if each.nonblocking == name)
    assert seen == {f"i{collective.name}, native": TURNS}
    if not (collective.is_private or collective.is_counted):  # of which the first looks are enough
        assert looked_at.total() == 1


def table_of(comm: MPI.Intracomm, name: str, variant: Variant) -> Table:
    """One that chooses a variant for all sizes."""
    topology = hiercoll.get_topology(comm)
    setting = (name, mpi_library(), "host", topology.node_sizes, topology.placement)
    return Table((Entry(*setting, (Choice(1, variant),), ()),))


@pytest.mark.parametrize("drop_in", [False, pytest.param(True, marks=needs_threads)])
@pytest.mark.parametrize("name", ["Ialltoall", "Iallgatherv"])
def test_another_choice(name: str, drop_in: bool, comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """With a table calls are served by what it says, and without one they are left to the MPI library again."""
    ours: Any = hiercoll.Intracomm(comm) if drop_in else comm
    chosen = Variant("pairwise") if name == "Ialltoall" else Variant("ring")
    for _ in range(2):
        before = looked_at.total()
        for turn in range(TURNS):
            assert type(call_of(ours, name, turn)) in (NativeCall, hiercoll.Request, MPI.Request)
        assert looked_at.total() == before + 1
        table = table_of(comm, "alltoall" if name == "Ialltoall" else "allgather", chosen)
        hiercoll.configure(comm, table=table)
        for turn in range(2):
            call = call_of(ours, name, turn)
            assert chosen.algorithm in (call.stand_in.name if drop_in else call.name)
        hiercoll.configure(comm, table=Table())


def test_what_is_learned(comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """Calls in the background take what blocking calls have found since they came last."""
    session, wanted = get_session(comm), Wanted(ALLTOALL, 8 * ITEMS, False)
    session.policy.learn(1.0)
    learner = session.policy.learner(wanted)
    assert learner is not None
    for turn in range(TURNS):
        call_of(comm, "Ialltoall", turn)
    assert looked_at.total() == 1
    learner.finding = Finding(Variant("pairwise"), 1.0, 2.0, 9)
    assert call_of(comm, "Ialltoall", 0).name.startswith("alltoall pairwise")
    learner.finding = None
    assert [type(call_of(comm, "Ialltoall", turn)) for turn in range(3)][1:] == [NativeCall] * 2


def test_deadlines(comm: MPI.Intracomm) -> None:
    """Calls that are known are under a deadline as soon as there is one."""
    for turn in range(2):
        call_of(comm, "Ialltoall", turn)
    hiercoll.configure(comm, timeout=60.0)
    assert type(call_of(comm, "Ialltoall", 0)) is hiercoll.Request
    hiercoll.configure(comm, timeout=0.0)
    assert [type(call_of(comm, "Ialltoall", turn)) for turn in range(2)] == [hiercoll.Request, NativeCall]


@needs_threads
def test_progress_in_a_thread(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread lets all calls of functions go on, also those that come again."""
    monkeypatch.setenv("HIERCOLL_PROGRESS", "thread")
    assert {type(call_of(comm, "Ialltoall", turn)) for turn in range(3)} == {hiercoll.Request}


def test_several_at_once(comm: MPI.Intracomm) -> None:
    """Calls that are known beside others, by an algorithm of hiercoll's, completed in another order on each rank."""
    ends = [(np.arange(SIZE) + 10 * RANK + turn, np.full(SIZE, -1)) for turn in range(8)]
    for _ in range(3):
        calls = [
            hiercoll.ialltoall(comm, send, recv, algorithm="bruck" if turn % 3 else "auto")
            for turn, (send, recv) in enumerate(ends)
        ]
        for turn in np.random.default_rng(RANK).permutation(len(calls)):
            assert calls[turn].wait() is ends[turn][1]
        for turn, (_, recv) in enumerate(ends):
            np.testing.assert_array_equal(recv, 10 * np.arange(SIZE) + RANK + turn)
            recv[:] = -1


@pytest.mark.parametrize("drop_in", [False, pytest.param(True, marks=needs_threads)])
def test_blocks_that_calls_do_not_count(
    drop_in: bool, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays without counts, of nothing, too, and what is in place, after calls with other blocks."""
    for name in ("allgatherv", "gatherv", "scatterv"):
        monkeypatch.setitem(settings.forced, name, ("ring" if name == "allgatherv" else "linear", {}))
    comm = on_layout(layouts()[-1])
    get_session(comm)

    def call(name: str, *given: Any, **how: Any) -> None:
        if drop_in:
            getattr(hiercoll.Intracomm(comm), name)(*given, **how).Wait()
        else:
            getattr(hiercoll, name.lower())(comm, *given, **how).wait()

    for turn, items in enumerate([2, 0, 3, 0, 1, 2, 0]):
        send, counted, whole = np.full(items, RANK + turn), np.full(SIZE, -1), np.full(items * SIZE, -1)
        call("Iallgatherv", np.full(1, RANK), [counted, [1] * SIZE])
        call("Iallgatherv", send, whole if drop_in else [whole, [items] * SIZE])  # functions want counts
        np.testing.assert_array_equal(whole, np.repeat(np.arange(SIZE) + turn, items))
        np.testing.assert_array_equal(counted, np.arange(SIZE))
        for root in (0, LAST):
            rows = np.full((SIZE, 2), RANK + turn)
            own = MPI.IN_PLACE if root == RANK else rows[0]
            call("Igatherv", own, [rows, [2] * SIZE] if root == RANK else None, root=root)
            if root == RANK:
                np.testing.assert_array_equal(rows[:, 0], np.arange(SIZE) + turn)
            into = np.full(2, -1)
            many = [rows, [2] * SIZE] if root == RANK else None
            call("Iscatterv", many, MPI.IN_PLACE if root == RANK else into, root=root)
            assert root == RANK or into.tolist() == [RANK + turn] * 2


def test_nobody_waits(comm: MPI.Intracomm) -> None:
    """What is received lives as long as MPI may write there."""
    for turn in range(3):
        call_of(comm, "Ialltoall", turn)
    arrays_of_call = arrays(0)
    kept = weakref.ref(arrays_of_call[2])
    hiercoll.ialltoall(comm, *arrays_of_call[1:3])
    del arrays_of_call
    gc.collect()
    assert kept() is not None
    request = abandoned.pop()
    assert isinstance(request, MPI.Request)
    request.Wait()
    del request
    assert kept() is None


def overlapping(buffers: Arrays) -> tuple[Any, Any]:
    """Two of the right size that differ by an element in place."""
    both = np.concatenate([buffers[1], buffers[3]])
    return both[: SIZE * ITEMS], both[1 : SIZE * ITEMS + 1]


WRONG: dict[str, Callable[[Arrays], tuple[Any, Any]]] = {
    "too short": lambda a: (a[1], a[2][:-1]),
    "both the same": lambda a: (a[1], a[1]),
    "overlapping": overlapping,
    "backwards": lambda a: (a[1], a[2][::-1]),
    "another type": lambda a: (a[1], a[2].view("i8").astype("f4")),
    "no array": lambda a: (a[1], "text"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what: str, comm: MPI.Intracomm) -> None:
    """They are refused, on all ranks, whatever is known; and the call stays known."""
    call_of(comm, "Ialltoall", 0)
    with pytest.raises(hiercoll.ArgumentError):
        hiercoll.ialltoall(comm, *WRONG[what](arrays(0)))
    readonly = arrays(0)[2]
    readonly.flags.writeable = False
    with pytest.raises(hiercoll.ArgumentError):
        hiercoll.ialltoall(comm, arrays(0)[1], readonly)
    assert type(call_of(comm, "Ialltoall", 1)) is NativeCall
