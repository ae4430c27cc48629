"""The compiled engine: which calls it serves, and that it runs steps as Python's engines do."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from conftest import WORLD
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY, get_algorithm
from hiercoll.calls import dropin, served
from hiercoll.collectives import ALLTOALL, ALLTOALLV
from hiercoll.runtime import binding, compiled
from hiercoll.runtime.lifetime import get_session
from hiercoll.tables import Table, Variant
from hiercoll.tuning.policy import Wanted, forced_variants

RANK, SIZE = WORLD.rank, WORLD.size
pytestmark = pytest.mark.skipif(compiled.load()[0] is None, reason=f"no compiled engine: {compiled.load()[1]}")


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever calls take, conditions have not changed."""
    monkeypatch.setattr("hiercoll.tuning.learning.CHANGED", float("inf"))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The requests of calls that the compiled engine has left to Python."""
    seen: list[Any] = []
    original = hiercoll.runtime.session.Session.plan

    def plan(self: Any, request: Any) -> Any:
        seen.append(request)
        return original(self, request)

    monkeypatch.setattr(hiercoll.runtime.session.Session, "plan", plan)
    return seen


@pytest.fixture
def python_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of drop-in communicators that Python has looked at, by collective."""
    seen: Counter[str] = Counter()
    for module, name in ((served, "_serve"), (dropin, "serve_first")):
        original = getattr(module, name)

        def serve(where: Any, collective: Any, *rest: Any, original: Any = original) -> Any:
            seen[collective.name] += 1
            return original(where, collective, *rest)

        monkeypatch.setattr(module, name, serve)
    return seen


def blocks(items: int, dtype: str = "i8") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What to send, where to receive, and what is to be there, of alltoall."""
    send = (np.arange(SIZE * items) + 1000 * RANK).astype(dtype)
    want = np.concatenate([(np.arange(RANK * items, (RANK + 1) * items) + 1000 * peer) for peer in range(SIZE)])
    return send, np.full(SIZE * items, -1).astype(dtype), want.astype(dtype)


def test_other_buffers_are_the_same_call(comm: MPI.Intracomm, slow: list[Any]) -> None:
    """Wherever they lie, whatever they hold; one plan serves them all, and keeps none of them."""
    for turn in range(20):
        send, recv, want = blocks(3)
        hiercoll.alltoall(comm, send + turn, recv, algorithm="pairwise")
        np.testing.assert_array_equal(recv, want + turn)
    assert len(slow) == 1 and len(get_session(comm).plans) == 1


CHANGES: dict[str, Callable[[np.ndarray, np.ndarray], tuple[Any, Any, dict[str, Any]]]] = {
    "size": lambda send, recv: (send[: SIZE * 2], recv[: SIZE * 2], {}),
    "type": lambda send, recv: (send.view("f8"), recv.view("f8"), {}),
    "algorithm": lambda send, recv: (send, recv, {"algorithm": "bruck"}),
    "parameter": lambda send, recv: (send, recv, {"algorithm": "scatter_destination", "window": 2}),
    "huge parameter": lambda send, recv: (send, recv, {"algorithm": "scatter_destination", "window": 2**70}),
    "transport": lambda send, recv: (send, recv, {"transport": "direct"}),
    "other kinds of buffers": lambda send, recv: (send.data, recv.data, {}),
    "specifications": lambda send, recv: ([send, 4, MPI.INT64_T], [recv, 4, MPI.INT64_T], {}),
    "memory order": lambda send, recv: (send.reshape(SIZE, 4), recv.reshape(4, SIZE), {}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_calls_are_looked_at(what: str, comm: MPI.Intracomm, slow: list[Any]) -> None:
    """Whatever differs from a known call: each is right, and the known one stays known."""
    send, recv, _ = blocks(4)
    for _ in range(2):
        hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
    assert len(slow) == 1
    other_send, other_recv, options = CHANGES[what](send, recv)
    hiercoll.alltoall(comm, other_send, other_recv, **{"algorithm": "pairwise", **options})
    assert len(slow) == (1 if what == "memory order" else 2)
    hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
    assert len(slow) <= 2


@pytest.mark.parametrize("others", ["none", "an array that does not matter"])
@pytest.mark.parametrize("root", sorted({0, SIZE - 1}))
def test_rooted_calls(root: int, others: str, comm: MPI.Intracomm, slow: list[Any]) -> None:
    """The root has two buffers, others may have one: each kind of call is looked at once."""
    whole, spare = np.arange(SIZE * 3).reshape(SIZE, 3), np.full((SIZE, 3), -1)
    unused = None if others == "none" else spare
    is_root = root == RANK
    for turn in range(6):
        one, into = whole[RANK] + turn, np.full((SIZE, 3), -1) if is_root else unused
        assert hiercoll.gather(comm, one, into, root=root, algorithm="binomial") is (into if is_root else None)
        if is_root:
            np.testing.assert_array_equal(into, whole + turn)
        own, source = np.full(3, -1), whole + turn if is_root else unused
        assert hiercoll.scatter(comm, source, own, root=root, algorithm="binomial") is own
        np.testing.assert_array_equal(own, whole[RANK] + turn)
        total = np.full(3, -1) if is_root or unused is not None else None
        found = hiercoll.reduce(comm, one, total, op=MPI.SUM, root=root, algorithm="binomial")
        assert found is (total if is_root else None)
        np.testing.assert_array_equal(spare, -1)
        if is_root:
            np.testing.assert_array_equal(found, whole.sum(axis=0) + SIZE * turn)
        elif total is not None:
            np.testing.assert_array_equal(total, -1)
    assert len(slow) == (3 if SIZE > 1 else len(slow))


@pytest.mark.parametrize("others", ["none", "an array that does not matter"])
def test_rooted_native_calls(others: str, comm: MPI.Intracomm, python_calls: Counter[str]) -> None:
    """Native calls of drop-in communicators go to mpi4py's methods at once, on ranks with one buffer, too."""
    whole = np.arange(SIZE * 3).reshape(SIZE, 3)
    root, unused = SIZE - 1, None if others == "none" else np.full((SIZE, 3), -1)
    ready = hiercoll.Intracomm(comm)
    get_session(comm).policy.learn(0.0)
    for turn in range(6):
        into = np.full((SIZE, 3), -1) if root == RANK else unused
        ready.Gather(whole[RANK] + turn, into, root)
        own = np.full(3, -1)
        ready.Scatter(whole + turn if root == RANK else unused, own, root)
        np.testing.assert_array_equal(own, whole[RANK] + turn)
        total = np.full(3, -1) if root == RANK or unused is not None else None
        ready.Reduce(whole[RANK] + turn, total, MPI.SUM, root)
        if root == RANK:
            np.testing.assert_array_equal(into, whole + turn)
            np.testing.assert_array_equal(total, whole.sum(axis=0) + SIZE * turn)
    if SIZE > 1:
        assert python_calls == dict.fromkeys(("gather", "scatter", "reduce"), 1)


def test_calls_in_place(comm: MPI.Intracomm, slow: list[Any]) -> None:
    """By algorithms that work in place, each is looked at once, and is not that of two buffers."""
    send, recv, want = blocks(3)
    for turn in range(6):
        both = send + turn
        assert hiercoll.alltoall(comm, MPI.IN_PLACE, both, algorithm="inplace") is both
        np.testing.assert_array_equal(both, want + turn)
        hiercoll.alltoall(comm, send + turn, recv, algorithm="inplace")
        np.testing.assert_array_equal(recv, want + turn)
        total = np.arange(5) + RANK + turn
        assert hiercoll.allreduce(comm, MPI.IN_PLACE, total, algorithm="recursive_doubling") is total
        np.testing.assert_array_equal(total, SIZE * (np.arange(5) + turn) + sum(range(SIZE)))
    assert len([each for each in slow if each.collective is ALLTOALL]) <= 2


def test_native_calls_in_place(comm: MPI.Intracomm, python_calls: Counter[str]) -> None:
    """They go to mpi4py's methods at once."""
    ours = hiercoll.Intracomm(comm)
    get_session(comm).policy.learn(0.0)
    get_session(comm).use_table(hiercoll.tables.Table())
    for turn in range(6):
        total = np.arange(5) + RANK + turn
        ours.Allreduce(MPI.IN_PLACE, total)
        np.testing.assert_array_equal(total, SIZE * (np.arange(5) + turn) + sum(range(SIZE)))
        apart, result = np.arange(5) + RANK + turn, np.full(5, -1)
        ours.Allreduce(apart, result)
        np.testing.assert_array_equal(result, total)
        every = np.where(np.arange(SIZE) == RANK, RANK + turn, -1)
        ours.Allgather(MPI.IN_PLACE, every)
        np.testing.assert_array_equal(every, np.arange(SIZE) + turn)
    if SIZE > 1:
        assert python_calls == {"allreduce": 2, "allgather": 1}


WRONG: dict[str, tuple[Callable[[np.ndarray, np.ndarray], tuple[Any, Any, dict[str, Any]]], type[Exception]]] = {
    "read-only": (lambda send, recv: (send, _read_only(recv), {}), hiercoll.BufferTypeError),
    "overlapping": (lambda send, recv: (recv, recv, {}), hiercoll.BufferOverlapError),
    "partly overlapping": (lambda send, recv: (recv[:-SIZE], recv[SIZE:], {}), hiercoll.BufferOverlapError),
    "with gaps": (lambda send, recv: (send[::2], recv[::2], {}), hiercoll.BufferTypeError),
    "of two types": (lambda send, recv: (send.view("f8"), recv, {}), hiercoll.BufferTypeError),
    "of two sizes": (lambda send, recv: (send[:-SIZE], recv, {}), hiercoll.BufferSizeError),
    "a number instead": (lambda send, recv: (send, 3, {}), hiercoll.BufferTypeError),
    "a truth for a number": (lambda send, recv: (send, recv, {"window": True}), hiercoll.ParameterError),
    "a fraction for a number": (lambda send, recv: (send, recv, {"window": 1.0}), hiercoll.ParameterError),
    "no parameter": (lambda send, recv: (send, recv, {"windows": 1}), hiercoll.ParameterError),
    "no transport": (lambda send, recv: (send, recv, {"transport": "x" * 600}), hiercoll.ParameterError),
}


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array[:]
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_of_known_calls(what: str, comm: MPI.Intracomm) -> None:
    """They are refused as those of a first call are, with the same words, and leave the call as it was."""
    send, recv, want = blocks(4)
    change, error = WRONG[what]
    known = {"algorithm": "scatter_destination", "window": 1}
    other_send, other_recv, options = change(send, recv)
    texts = []
    for _ in range(2):
        with pytest.raises(error) as raised:
            hiercoll.alltoall(comm, other_send, other_recv, **{**known, **options})
        texts.append(str(raised.value))
        for _ in range(2):
            hiercoll.alltoall(comm, send, recv, **known)
            np.testing.assert_array_equal(recv, want)
            recv[:] = -1
    assert texts[0] == texts[1]


def test_drop_in_methods(comm: MPI.Intracomm, slow: list[Any], calls: dropin.Calls) -> None:
    """They are served where nobody looks on, seen where somebody does, and mpi4py's where that is the choice."""
    ours = hiercoll.Intracomm(comm)
    dropin.ignore(calls)
    get_session(comm).policy.forced.update(forced_variants({"alltoall": ("pairwise", {})}))
    for items in (1, 2, 3):
        send, recv, want = blocks(items)
        for _ in range(3):
            ours.Alltoall(send, recv)
            np.testing.assert_array_equal(recv, want)
            recv[:] = -1
        ours.Alltoall(recvbuf=recv, sendbuf=send)
        np.testing.assert_array_equal(recv, want)
    served = SIZE > 1  # calls of one rank are MPI's
    assert len(slow) == 6 * served  # once by its size, and where arguments are named
    dropin.observe(calls)
    ours.Alltoall(send, recv)
    ours.Allgather(send, np.empty((SIZE, send.size), send.dtype))
    assert calls["alltoall" if served else "alltoall, native"] == 1 and sum(calls.values()) == 2


def test_calls_left_to_mpi(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a table they are mpi4py's own, of functions and of methods, also with other buffers of the size; a table
    is followed from when it is there."""
    hiercoll.configure(comm, table=hiercoll.tables.Table())
    ours = hiercoll.Intracomm(comm)
    for _ in range(3):
        send, recv, want = blocks(5)
        for call in (ours.Alltoall, lambda *given: hiercoll.alltoall(comm, *given)):
            recv[:] = -1
            call(send, recv)
            np.testing.assert_array_equal(recv, want)
    session = get_session(comm)
    assert len(session.routes) == 1
    session.policy.forced.update(forced_variants({"alltoall": ("pairwise", {})}))
    session.forget_choices()
    assert len(session.routes) == 0
    hiercoll.alltoall(comm, send, recv)
    assert len(session.plans) == 1


def test_calls_with_a_deadline_are_recorded(comm: MPI.Intracomm, slow: list[Any]) -> None:
    """They are known like others; what a deadline's report needs of them is there."""
    send, recv, want = blocks(2)
    for _ in range(2):
        hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
    hiercoll.configure(comm, timeout=60)
    for _ in range(3):
        recv[:] = -1
        hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
        np.testing.assert_array_equal(recv, want)
    session = get_session(comm)
    assert session.watch is not None and session.watch.number == 3 and len(session.routes) == 1
    for number, entry in enumerate(session.watch.record, 1):
        assert (
            entry[:2] == [number, "alltoall pairwise exchange=rotation"]
            and abs(time.time() - entry[2]) < 60
            and 0 <= entry[3] < 60
        )
    hiercoll.configure(comm, timeout=0)
    hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
    assert session.watch is None and len(slow) == 3


@pytest.mark.mpi(min_size=2)  # one rank alone is the MPI library's
def test_calls_that_are_watched_go_no_shorter_way(comm: MPI.Intracomm) -> None:
    """With a deadline drop-in calls on arrays that functions were called with are recorded, too."""
    hiercoll.configure(comm, table=hiercoll.tables.Table(), timeout=60)  # an empty one: then calls teach something
    (send, recv, want), ours = blocks(3), hiercoll.Intracomm(comm)
    session = get_session(comm)
    assert session.watch is not None
    for _ in range(50):
        hiercoll.alltoall(comm, send, recv)
        before = session.watch.number
        ours.Alltoall(send, recv)
        assert session.watch.number > before
    assert not session.policy.by_bytes
    np.testing.assert_array_equal(recv, want)


@pytest.mark.parametrize(
    ("collective", "algorithm", "params"),
    [
        ("alltoall", "grouped", {"memory": "shared"}),
        ("alltoall", "hierarchical", {}),
        ("alltoall", "eager", {}),
        ("allgather", "shared", {}),
        ("allgather", "ring", {"segments": 3}),
    ],
)
def test_ranks_with_different_engines(
    collective: str, algorithm: str, params: dict[str, Any], on_layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd ranks run by Python's engines what the others run compiled: messages and flags are the same."""
    if RANK % 2:
        for module in (binding, compiled):
            monkeypatch.setattr(module, "load", lambda: (None, "a test"))
    comm = on_layout(f"{SIZE - SIZE // 2}+{SIZE // 2}" if SIZE > 1 else "1x1")
    with getattr(hiercoll, f"{collective}_init")(comm, np.empty(SIZE * 7), algorithm=algorithm, **params) as plan:
        assert (plan.program is None) == bool(RANK % 2)
    for turn in range(6):
        send = np.arange(SIZE * 7) + 1000 * RANK + turn
        recv = getattr(hiercoll, collective)(comm, send, algorithm=algorithm, **params)
        want = np.empty_like(recv)
        getattr(comm, collective.capitalize())(send, want)
        np.testing.assert_array_equal(recv, want)


class Alarm(Exception):  # noqa: N818
    """In place of KeyboardInterrupt."""


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["pairwise", "grouped"])
def test_signals_end_a_wait(algorithm: str) -> None:
    """A handler that raises ends the call within 0.1 s, here and now, though the other ranks do not come; the
    communicator is broken, and says so."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Alarm

    comm = WORLD.Dup()
    send, recv, _ = blocks(4)
    params = {"memory": "shared"} if algorithm == "grouped" else {}
    for _ in range(2):
        hiercoll.alltoall(comm, send, recv, algorithm=algorithm, **params)
    if RANK == 0:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begin = time.monotonic()
        with pytest.raises(Alarm):
            hiercoll.alltoall(comm, send, recv, algorithm=algorithm, **params)
        took = time.monotonic() - begin
        signal.signal(signal.SIGALRM, before)
        assert 0.15 < took < 2, took  # machines may be busy
        with pytest.raises(hiercoll.CommunicatorError, match="was interrupted"):
            hiercoll.alltoall(comm, send, recv, algorithm=algorithm, **params)
    comm.Barrier()
    comm.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_arrays_of_interrupted_calls_stay(calls: int) -> None:
    """What comes late is written to memory that nobody else has, though the program has dropped its arrays."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Alarm

    comm, items = WORLD.Dup(), 1 << 14
    send = np.full(SIZE * items, 1.0 + RANK)
    hiercoll.get_topology(comm)
    for _ in range(calls):
        hiercoll.alltoall(comm, send, algorithm="pairwise")
    recv = np.zeros(SIZE * items)
    alive = weakref.ref(recv)
    if RANK == 0:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Alarm):
            hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
        signal.signal(signal.SIGALRM, before)
        del recv
        gc.collect()
        assert alive() is not None
    comm.Barrier()
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_freeing_where_all_ranks_have_failed_at_different_times() -> None:
    """Ranks that give up waiting for others, and those that come later, agree that nothing is freed together."""
    comm = WORLD.Dup()
    hiercoll.alltoall(comm, np.arange(SIZE), algorithm="grouped", memory="shared")

    def fail() -> None:
        try:
            time.sleep(1.5 * min(RANK, 1))
            raise Alarm
        finally:
            comm.Free()

    with pytest.raises(Alarm):
        fail()
    WORLD.Barrier()


def test_freed_communicators_are_not_found(slow: list[Any]) -> None:
    """Handles are used again right after they are freed."""
    for turn in range(4):
        comm = WORLD.Dup()
        send, recv, want = blocks(2)
        for _ in range(2):
            recv[:] = -1
            hiercoll.alltoall(comm, send + turn, recv, algorithm="pairwise")
            np.testing.assert_array_equal(recv, want + turn)
        assert len(slow) == turn + 1
        comm.Free()
        with pytest.raises(hiercoll.CommunicatorError):
            hiercoll.alltoall(comm, send, recv, algorithm="pairwise")


def test_many_calls_are_forgotten_in_the_end(comm: MPI.Intracomm) -> None:
    """Plans beyond the limit go, and so does what finds them: nothing grows without bound."""
    session = get_session(comm)
    for items in range(1, 300):
        send, recv, want = blocks(items, "i4")
        hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
        np.testing.assert_array_equal(recv, want)
    assert len(session.plans) <= hiercoll.runtime.session.MAX_PLANS
    assert len(session.routes) <= 2 * hiercoll.runtime.session.MAX_PLANS


@pytest.mark.mpi(min_size=2)  # one rank alone is the MPI library's
@pytest.mark.parametrize("is_dropin", [False, True])
def test_vectors_that_are_native_are_counted(comm: MPI.Intracomm, is_dropin: bool, steady: None) -> None:
    """The compiled engine leaves them to mpi4py as long as nothing is to be learned, and counts them: the learner
    asks after as many calls as without it."""
    ours, learner = hiercoll.Intracomm(comm), get_session(comm).policy.learner(Wanted(ALLTOALLV, 0, False))
    assert learner is not None
    learner.budget.calls = 1e3  # seconds: they pay for all that ranks want to know
    draw, asked, passed = np.random.default_rng(RANK), 0, 0
    tables = draw.integers(5000, 9000, (110, SIZE, SIZE))
    WORLD.Bcast(tables)
    for sizes in tables:
        send = np.concatenate([np.full(sizes[RANK, peer], 10 * RANK + peer) for peer in range(SIZE)])
        recv, before = np.full(sizes[:, RANK].sum(), -1), learner.tally[0]
        given = [send, sizes[RANK].copy()], [recv, sizes[:, RANK].copy()]
        passed += hiercoll.runtime.compiled.call()(ALLTOALLV, comm, *given, 0, "auto", "auto")  # type: ignore[misc]
        if (recv == -1).all():
            ours.Alltoallv(*given) if is_dropin else hiercoll.alltoallv(comm, *given)
        np.testing.assert_array_equal(recv, np.repeat(10 * np.arange(SIZE) + RANK, sizes[:, RANK]))
        asked += before == 0
        assert learner.tally[0] == before - 1 or before == 0
    assert asked == 3 and passed == 110 - asked - 1  # the call after the first one is not known yet


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_dropin", [False, True])
def test_vectors_by_what_has_been_found_are_counted(
    comm: MPI.Intracomm, is_dropin: bool, slow: list[Any], steady: None
) -> None:
    """The compiled engine serves them as long as the learner asks for nothing: of each term only the first call is
    Python's."""
    ours, learner = hiercoll.Intracomm(comm), get_session(comm).policy.learner(Wanted(ALLTOALLV, 0, False))
    assert learner is not None
    learner.budget.calls = 1e3  # seconds: they pay for all that ranks want to know
    aggregate = Variant("aggregate", get_algorithm("alltoallv", "aggregate").resolve({}))
    learner.candidates = lambda own: (aggregate,)
    tables = np.random.default_rng(3).integers(0, 9, (100, SIZE, SIZE))
    asked = 0
    for sizes in tables:
        send = np.concatenate([np.full(sizes[RANK, peer], 10 * RANK + peer) for peer in range(SIZE)])
        recv, before = np.full(sizes[:, RANK].sum(), -1), learner.tally[0]
        given = [send, sizes[RANK].copy()], [recv, sizes[:, RANK].copy()]
        ours.Alltoallv(*given) if is_dropin else hiercoll.alltoallv(comm, *given)
        np.testing.assert_array_equal(recv, np.repeat(10 * np.arange(SIZE) + RANK, sizes[:, RANK]))
        asked += before == 0
        assert learner.tally[0] == before - 1 or before == 0
    assert asked == 3 and len(slow) == asked - 1  # the first of all are native


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", list(REGISTRY["barrier"]))
def test_barriers_are_known(comm: MPI.Intracomm, slow: list[Any], algorithm: str) -> None:
    """Though they have no buffers by which calls are told from each other."""
    for _ in range(9):
        hiercoll.barrier(comm, algorithm=algorithm)
    assert len(slow) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["native", "shared", "ring", "auto"])
@pytest.mark.parametrize(
    "kind", [lambda counts: [counts], lambda counts: [np.array(counts)], lambda counts: [counts, MPI.DOUBLE]]
)
def test_vectors_are_known(
    comm: MPI.Intracomm, slow: list[Any], algorithm: str, kind: Callable[[list[int]], list[Any]]
) -> None:
    """By name, whether counts are in lists or arrays, and whether sizes come with each start or a plan has them."""
    if algorithm == "auto":  # it goes by the sum of sizes
        hiercoll.configure(comm, table="model", tune="off")
    counts = [[3 + (rank + turn) % 2 for rank in range(SIZE)] for turn in range(2)]
    sends, recv, number = [np.empty(sizes[RANK]) for sizes in counts], np.empty(4 * SIZE), 0
    for salt in range(12):
        sizes, send = counts[salt % 2], sends[salt % 2]
        send[:], recv[:] = salt + 100.0 * RANK, -1
        hiercoll.allgatherv(comm, send, [recv, *kind(sizes)], algorithm=algorithm)
        want = np.repeat(salt + 100.0 * np.arange(SIZE), sizes)
        np.testing.assert_array_equal(recv, [*want, *[-1] * (recv.size - want.size)])
        number = len(slow) if salt == 5 else number
    assert len(slow) == number


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["native", "pairwise", "aggregate", "auto"])
@pytest.mark.parametrize("spelling", ["type", "displacements, type", "(counts, displacements), type"])
def test_vectors_with_a_datatype_are_known(comm: MPI.Intracomm, slow: list[Any], algorithm: str, spelling: str) -> None:
    """As most programs that use mpi4py spell them; sizes may differ from call to call. By "auto" where an algorithm is
    forced."""
    get_session(comm).policy.forced = forced_variants({"alltoallv": ("pairwise", {})} if algorithm == "auto" else {})

    def given(array: Any, counts: list[int]) -> list[Any]:
        starts = [sum(counts[:rank]) for rank in range(SIZE)]
        each = {"type": [counts], "displacements, type": [counts, starts]}.get(spelling, [(counts, starts)])
        return [array, *each, MPI.DOUBLE]

    for salt in range(12):
        tables = [[1 + (source + target + salt) % 3 for target in range(SIZE)] for source in range(SIZE)]
        sent, got = tables[RANK], [row[RANK] for row in tables]
        send = np.repeat(salt + 100.0 * RANK + np.arange(SIZE), sent)
        recv = np.full(sum(got), -1.0)
        hiercoll.alltoallv(comm, given(send, sent), given(recv, got), algorithm=algorithm)
        np.testing.assert_array_equal(recv, np.repeat(salt + 100.0 * np.arange(SIZE) + RANK, got))
        if salt == 5:
            slow.clear()
    assert not slow


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["gather", "scatter", "reduce", "allgatherv"])
@pytest.mark.parametrize("algorithm", ["native", "hierarchical"])
def test_buffers_with_a_datatype_are_known(comm: MPI.Intracomm, slow: list[Any], name: str, algorithm: str) -> None:
    """Also where ranks have different ones, and for what is in place."""
    one, every, into = np.empty(3), np.empty(3 * SIZE), np.empty(3)
    for salt in range(12):
        one[:], every[:], into[:] = salt + 10.0 * RANK, np.repeat(salt + 10.0 * np.arange(SIZE), 3), -1
        if name == "scatter":
            sent = [every, MPI.DOUBLE] if RANK == SIZE - 1 else None
            got = hiercoll.scatter(comm, sent, [into, MPI.DOUBLE], root=SIZE - 1, algorithm=algorithm)
            assert got is into
            np.testing.assert_array_equal(into, 3 * [salt + 10.0 * RANK])
        elif name == "allgatherv":
            every[: 3 * RANK], every[3 * RANK + 3 :] = -1, -1
            hiercoll.allgatherv(comm, MPI.IN_PLACE, [every, [3] * SIZE], algorithm=algorithm)
            np.testing.assert_array_equal(every, np.repeat(salt + 10.0 * np.arange(SIZE), 3))
        else:
            result = every if name == "gather" else into
            want = every.copy() if name == "gather" else np.full(3, sum(salt + 10.0 * rank for rank in range(SIZE)))
            result[:] = -1
            given = [result, MPI.DOUBLE] if RANK == 0 else None
            got = getattr(hiercoll, name)(comm, [one, MPI.DOUBLE], given, algorithm=algorithm)
            assert got is (result if RANK == 0 else None)
            np.testing.assert_array_equal(result, want if RANK == 0 else np.full(result.shape, -1.0))
        if salt == 5:
            slow.clear()
    assert not slow


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["native", "pairwise"])
def test_datatypes_that_count_otherwise(comm: MPI.Intracomm, algorithm: str) -> None:
    """Of bytes that are counted in doubles: what is too much for the buffer is refused, as from the first call on."""
    send, recv = np.arange(8 * SIZE, dtype=np.uint8) + np.uint8(RANK), np.zeros(8 * SIZE, np.uint8)
    for _ in range(5):
        recv[:] = 0
        hiercoll.alltoallv(comm, [send, [1] * SIZE, MPI.DOUBLE], [recv, [1] * SIZE, MPI.DOUBLE], algorithm=algorithm)
        want = [(np.arange(8) + 8 * RANK + rank) % 256 for rank in range(SIZE)]
        np.testing.assert_array_equal(recv, np.concatenate(want))
    for counts in ([2] * SIZE, [8] * SIZE):
        with pytest.raises(hiercoll.ArgumentError):
            hiercoll.alltoallv(comm, [send, counts, MPI.DOUBLE], [recv, counts, MPI.DOUBLE], algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["native", "shared", "ring"])
def test_counts_that_only_equal_known_ones(comm: MPI.Intracomm, algorithm: str) -> None:
    """Are refused, as from the first call on."""
    send, recv = np.ones(1), np.empty(SIZE + 1)
    for _ in range(4):
        hiercoll.allgatherv(comm, send, [recv, [1] * SIZE], algorithm=algorithm)
    for wrong in ([1.0] * SIZE, [1] * (SIZE - 1) + [3], [1] * (SIZE + 1), [-1] * SIZE):
        with pytest.raises(hiercoll.ArgumentError):
            hiercoll.allgatherv(comm, send, [recv, wrong], algorithm=algorithm)


def test_wrong_counts_are_not_left_to_mpi(comm: MPI.Intracomm) -> None:
    """Of a function, as from the first call on."""
    counts = np.full(SIZE, 9000)
    send, recv = np.arange(9000 * SIZE), np.empty(9000 * SIZE, int)
    for _ in range(3):
        hiercoll.alltoallv(comm, [send, counts], [recv, counts])
    for wrong in (counts + 1, counts - 9001, counts[:-1], counts + 0.5):
        with pytest.raises(hiercoll.ArgumentError):
            hiercoll.alltoallv(comm, [send, wrong], [recv, counts])
    with pytest.raises(hiercoll.ArgumentError):
        hiercoll.alltoallv(comm, [send, counts], [recv, counts], streams=None)
    hiercoll.alltoallv(comm, [send, counts], [recv, counts])


def test_programs_refuse_misuse(comm: MPI.Intracomm) -> None:
    """Typed errors, not crashes: of wrong numbers of arguments, and of freed programs."""
    module: Any = compiled.load()[0]
    routes = module.Routes(None, 0, 1)
    for call in (lambda: module.call(ALLTOALL), lambda: routes.remember(1), lambda: module.Program(b"")):
        with pytest.raises(TypeError):
            call()
    plan = hiercoll.alltoall_init(comm, np.arange(SIZE), algorithm="pairwise")
    program = plan.program
    plan.free()
    assert program is not None
    with pytest.raises(RuntimeError, match="freed"):
        program.run()


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_new_results(shape: tuple[int, ...], comm: MPI.Intracomm, slow: list[Any]) -> None:
    """A call without a receive array is known, too; each has a new one, of the shape that a first call gives."""
    last: list[np.ndarray] = []
    for turn in range(4):
        send = np.arange(SIZE * np.prod(shape)).reshape((SIZE, *shape)) + 1000 * RANK + turn
        got = hiercoll.alltoall(comm, send, algorithm="pairwise")
        every = hiercoll.allgather(comm, send[0], algorithm="ring")
        want = np.empty_like(send)
        comm.Alltoall(send, want)
        np.testing.assert_array_equal(got, want)
        want = np.empty((SIZE, *shape), send.dtype)
        comm.Allgather(send[0], want)
        np.testing.assert_array_equal(every, want)
        assert not any(np.shares_memory(got, other) for other in last)
        last += [got, every]
    assert len(slow) == 2
    turned = hiercoll.alltoall(comm, np.asfortranarray(send), algorithm="pairwise")  # made in another way
    assert turned.shape == send.shape and len(slow) == (2 if send.flags.f_contiguous else 3)


@pytest.mark.parametrize("spelling", ["counts", "displacements", "a list", "int32", "tuples"])
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [("alltoallv", "pairwise"), ("alltoallv", "aggregate"), ("allgatherv", "ring")],
)
def test_blocks_of_any_sizes(
    collective: str, algorithm: str, spelling: str, comm: MPI.Intracomm, slow: list[Any]
) -> None:
    """Counts drawn anew for every call are the same call; zeros, too, and such beyond what travels together."""
    random = np.random.default_rng(5)
    for _ in range(24):
        table = random.integers(0, 7, (SIZE, SIZE)) + 700 * (random.random((SIZE, SIZE)) < random.choice([0, 0.2]))
        if collective == "allgatherv":
            table = np.repeat(table[:, :1], SIZE, 1)
        sent, received = table[RANK], table[:, RANK].copy()
        gaps = random.integers(0, 3, SIZE) if spelling == "displacements" else np.zeros(SIZE, int)
        at = np.cumsum(received + gaps) - received
        recv = np.full(int((received + gaps).sum()) + 1, -1)
        whole = np.arange(int(sent.sum())) + 1000 * RANK
        counts: Any = {"a list": received.tolist(), "int32": received.astype("i4")}.get(spelling, received)
        into: Any = [recv, (received, at) if spelling == "displacements" else counts]
        out: Any = [whole, sent] if collective == "alltoallv" else whole[: sent[0]]
        if spelling == "tuples":
            into, out = tuple(into), tuple(out) if isinstance(out, list) else out
        getattr(hiercoll, collective)(comm, out, into, algorithm=algorithm)
        for peer in range(SIZE):
            first = int(table[peer, :RANK].sum()) if collective == "alltoallv" else 0
            got = recv[at[peer] : at[peer] + received[peer]]
            np.testing.assert_array_equal(got, first + np.arange(received[peer]) + 1000 * peer)
    assert len(slow) == 1


WRONG_BLOCKS: dict[str, Any] = {
    "a negative count": [-1] + [2] * (SIZE - 1),
    "counts beyond the buffer": [100] * SIZE,
    "too few counts": [1] * (SIZE - 1),
    "an own block of two sizes": [2 + (peer == RANK) for peer in range(SIZE)],
    "a huge count": [2**62] * SIZE,
    "words": ["x"] * SIZE,
    "negative displacements": ([1] * SIZE, [-1] * SIZE),
}


@pytest.mark.parametrize("what", WRONG_BLOCKS)
def test_wrong_blocks_of_known_calls(what: str, comm: MPI.Intracomm) -> None:
    """They are refused as those of a first call, on every rank, and leave the call as it was."""
    counts = np.full(SIZE, 2)
    send, recv = np.arange(2 * SIZE) + 100 * RANK, np.full(2 * SIZE, -1)
    for _ in range(2):
        hiercoll.alltoallv(comm, [send, counts], [recv, counts], algorithm="pairwise")
        with pytest.raises(hiercoll.ArgumentError):
            hiercoll.alltoallv(comm, [send, counts], [recv, WRONG_BLOCKS[what]], algorithm="pairwise")
    recv[:] = -1
    hiercoll.alltoallv(comm, [send, counts], [recv, counts], algorithm="pairwise")
    want = np.concatenate([[2 * RANK, 2 * RANK + 1] + 100 * np.array([peer, peer]) for peer in range(SIZE)])
    np.testing.assert_array_equal(recv, want)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of functions whose arguments Python has looked at, by collective."""
    seen: Counter[str] = Counter()
    original = hiercoll.calls.functions.make_request

    def make(session: Any, collective: Any, *rest: Any, **options: Any) -> Any:
        seen[collective.name] += 1
        return original(session, collective, *rest, **options)

    for module in (hiercoll.calls.functions, hiercoll.calls.serving):
        monkeypatch.setattr(module, "make_request", make)
    return seen


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_new_results_of_reductions(algorithm: str, rows: bool, comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """Are found again, each in an array of its own, of the shape that the first one had."""
    get_session(comm)
    send = np.arange(6.0 * SIZE).reshape((SIZE, 2, 3) if rows else (2 * SIZE, 3)) + 100 * RANK
    found = [hiercoll.reduce_scatter(comm, send + turn, algorithm=algorithm) for turn in range(5)]
    own = np.arange(6.0) + 6 * RANK
    for turn, result in enumerate(found):
        assert result.shape == ((2, 3) if rows else (6,)) or SIZE == 1
        np.testing.assert_array_equal(result.ravel(), SIZE * (own + turn) + 100 * sum(range(SIZE)))
    assert looked_at["reduce_scatter"] <= 2  # once it is known that it comes again


def parts_of(comm: Any, counts: Any, turn: int, **how: Any) -> None:
    """A vector whose parts are summed up on one rank each, by the function, or by the drop-in communicator's method."""
    sizes, item = np.array(counts), how.pop("item", 1.0)
    whole = (np.arange(sizes.sum()) + 100 * RANK + turn) * item
    mine, first = np.full(sizes[RANK], -item), int(sizes[:RANK].sum())
    if isinstance(comm, hiercoll.Intracomm):
        comm.Reduce_scatter(whole, mine, counts, **how)
    else:
        assert hiercoll.reduce_scatterv(comm, whole, mine, counts, **how) is mine
    own = (np.arange(first, first + sizes[RANK]) + turn) * SIZE + 100 * sum(range(SIZE))
    np.testing.assert_array_equal(mine, own * item)


COUNTS_OF_PARTS: dict[str, Callable[[int], Any]] = {
    "a list": lambda turn: [2] * SIZE,
    "an array": lambda turn: np.full(SIZE, 2),
    "other counts of one sum": lambda turn: np.roll([3] + [2] * (SIZE - 1), turn),
    "other sums": lambda turn: np.full(SIZE, 1 + turn % 3),
    "another type": lambda turn: [2] * SIZE,
}


@pytest.mark.parametrize("what", COUNTS_OF_PARTS)
@pytest.mark.parametrize("algorithm", ["native", "ring", "auto", "a method"])
def test_parts_of_a_vector(what: str, algorithm: str, comm: MPI.Intracomm) -> None:
    """Whatever was known before: with other counts, or elements, calls are others."""
    hiercoll.configure(comm, tune="off")
    ours: Any = hiercoll.Intracomm(comm) if algorithm == "a method" else comm
    how = {} if algorithm == "a method" else {"algorithm": algorithm}
    for turn in range(8):
        item = 1j if what == "another type" and turn % 2 else 1.0
        parts_of(ours, COUNTS_OF_PARTS[what](turn), turn, item=item, **how)


@pytest.mark.mpi(min_size=2)
def test_methods_of_parts_are_known(comm: MPI.Intracomm, python_calls: Counter[str]) -> None:
    """Where "auto" is the MPI library's own: whatever counts, if they have one sum, and this rank's is the same."""
    hiercoll.configure(comm, tune="off", table=Table())
    ours = hiercoll.Intracomm(comm)
    for turn in range(5):
        parts_of(ours, [2] * SIZE, turn)
    assert python_calls == {"reduce_scatterv": 1}
    mine = np.empty(2)
    with pytest.raises((MPI.Exception, ValueError)):
        ours.Reduce_scatter(np.zeros(2 * SIZE), mine, [2] * (SIZE - 1))


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_functions_of_parts_are_known(algorithm: str, comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """By arrays at the same place; wrong counts are refused."""
    get_session(comm)
    whole, mine = np.ones(2 * SIZE), np.empty(2)
    for _ in range(6):
        hiercoll.reduce_scatterv(comm, whole, mine, [2] * SIZE, algorithm=algorithm)
        assert mine.tolist() == [SIZE] * 2
    assert looked_at["reduce_scatterv"] == 2 or SIZE == 1
    for counts in ([2] * (SIZE + 1), [1] * SIZE, [2.0] * SIZE, None):
        with pytest.raises(hiercoll.ArgumentError):
            hiercoll.reduce_scatterv(comm, whole, mine, counts, algorithm=algorithm)


@pytest.mark.parametrize("name", ["alltoallv", "alltoallw"])
def test_nothing_is_learned_of_any_blocks(name: str, comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """Calls by "auto" are the MPI library's then, and looked at once; by other counts they are other calls."""
    hiercoll.configure(comm, tune="off")
    types, counts = [MPI.DOUBLE] * SIZE, np.ones(SIZE, int)
    send, recv = np.arange(float(SIZE)) + 10 * RANK, np.empty(SIZE)
    how = (counts, 8 * np.arange(SIZE)), types
    ends = ([send, *how], [recv, *how]) if name == "alltoallw" else ([send, counts], [recv, counts])
    for turn in range(5):
        recv[:] = -1
        send += 1
        getattr(hiercoll, name)(comm, *ends)
        np.testing.assert_array_equal(recv, 10 * np.arange(SIZE) + RANK + turn + 1)
    assert looked_at[name] == 1
    counts[:] = 0
    recv[:] = -1
    getattr(hiercoll, name)(comm, *ends)
    assert recv.tolist() == [-1] * SIZE


def a_root_and_its_blocks(comm: MPI.Intracomm, turn: int, others: str, spelling: str, **how: Any) -> None:
    """Gatherv and scatterv with counts drawn anew, which the root alone has; ``others``: what other ranks give."""
    random = np.random.default_rng(turn)
    root, counts = how["root"], random.integers(0, 7, SIZE) + 700 * (random.random(SIZE) < random.choice([0, 0.3]))
    gaps = random.integers(0, 3, SIZE) if spelling == "displacements" else np.zeros(SIZE, int)
    at, whole = np.cumsum(counts + gaps) - counts, np.full(int((counts + gaps).sum()) + 1, -1)
    for rank in range(SIZE):
        whole[at[rank] : at[rank] + counts[rank]] = np.arange(counts[rank]) + 1000 * rank + turn
    own, into = whole[at[RANK] : at[RANK] + counts[RANK]].copy(), np.full_like(whole, -1)
    given: Any = {"a list": counts.tolist(), "int32": counts.astype("i4")}.get(spelling, counts)
    given = (counts, at) if spelling == "displacements" else given
    spare = np.full(3, -1)
    unused: Any = {"none": None, "wrong counts": [spare, [9] * 9], "no array": [None, counts]}[others]
    many = [into, given] if root == RANK else unused
    found = hiercoll.gatherv(comm, [own, own.size] if spelling == "a number" else own, many, **how)
    assert found is (into if root == RANK else None)
    if root == RANK:
        np.testing.assert_array_equal(into, whole)
    part = np.full(own.size, -1)
    assert hiercoll.scatterv(comm, many, (part, own.size) if spelling == "a number" else part, **how) is part
    np.testing.assert_array_equal(part, own)
    np.testing.assert_array_equal(spare, -1)


@pytest.mark.parametrize("others", ["none", "wrong counts", "no array"])
@pytest.mark.parametrize("spelling", ["counts", "displacements", "a list", "int32", "a number"])
@pytest.mark.parametrize("algorithm", ["auto", "native", "linear", "aggregate", "binomial"])
def test_blocks_of_which_the_root_knows_the_sizes(
    algorithm: str, spelling: str, others: str, comm: MPI.Intracomm, looked_at: Counter[str]
) -> None:
    """Whatever counts the root gives, and whatever others give for what only the root has: each is looked at once."""
    get_session(comm)
    for turn in range(12):
        a_root_and_its_blocks(comm, turn, others, spelling, root=SIZE - 1, algorithm=algorithm)
    assert looked_at == {"gatherv": 1, "scatterv": 1}


def test_roots_of_any_sizes_in_turns(comm: MPI.Intracomm, looked_at: Counter[str]) -> None:
    """A call with another root is another call; without a recvbuf on other ranks it is the same."""
    for turn in range(4 * SIZE):
        a_root_and_its_blocks(comm, turn, "none", "counts", root=turn % SIZE, algorithm="linear")
    assert looked_at == {"gatherv": SIZE, "scatterv": SIZE}
    if RANK != 0:
        assert hiercoll.gatherv(comm, np.full(1, RANK), root=0, algorithm="linear") is None
    else:
        whole = np.full(SIZE, -1)
        hiercoll.gatherv(comm, np.full(1, RANK), [whole, [1] * SIZE], root=0, algorithm="linear")
        assert whole.tolist() == list(range(SIZE))
    assert looked_at["gatherv"] == SIZE


@pytest.mark.parametrize("choices", [{}, {"gatherv": ("linear", {}), "scatterv": ("aggregate", {})}], ids=str)
def test_drop_in_methods_of_any_sizes(choices: Any, comm: MPI.Intracomm, python_calls: Counter[str]) -> None:
    """Counts on the root alone, with or without mpi4py's datatypes; each is looked at once."""
    ours, root = hiercoll.Intracomm(comm), SIZE - 1
    get_session(comm).policy.forced.update(forced_variants(choices))
    for turn in range(6):
        counts = (np.arange(SIZE) + turn) % 4
        whole, own = np.repeat(np.arange(SIZE), counts) + turn, np.full(counts[RANK], RANK + turn)
        into = np.full_like(whole, -1)
        ours.Gatherv(own, [into, counts] if root == RANK else None, root)
        part = np.full_like(own, -1)
        ours.Scatterv([whole, counts] if root == RANK else None, part, root)
        np.testing.assert_array_equal(part, own)
        if root == RANK:
            np.testing.assert_array_equal(into, whole)
    assert python_calls == (dict.fromkeys(("gatherv", "scatterv"), 1) if choices or SIZE == 1 else {})


@pytest.mark.parametrize("algorithm", ["native", "linear"])
@pytest.mark.parametrize("what", WRONG_BLOCKS)
def test_wrong_blocks_of_a_known_root(what: str, algorithm: str, comm: MPI.Intracomm) -> None:
    """Each rank is the root of calls of its own; they are refused there, and leave the call as it was."""
    alone = comm.Split(RANK)
    for each in (alone, comm):
        size, root = each.size, each.rank if each is alone else 0
        counts, whole, own = np.full(size, 2), np.full(2 * size, -1), np.arange(2) + 100 * each.rank
        how: Any = {"root": root, "algorithm": algorithm}
        many = [whole, counts] if root == each.rank else None
        for _ in range(2):
            hiercoll.gatherv(each, own, many, **how)
            hiercoll.scatterv(each, many, own, **how)
            if root != each.rank:
                continue
            wrong = WRONG_BLOCKS[what] if each is comm else [[3], [-1], [10**20], ["x"], ([2], [9])][len(what) % 5]
            with pytest.raises(hiercoll.ArgumentError):
                hiercoll.gatherv(each, own, [whole, wrong], **how)
            with pytest.raises(hiercoll.ArgumentError):
                hiercoll.scatterv(each, [whole, wrong], own, **how)
            with pytest.raises(hiercoll.ArgumentError):
                hiercoll.scatterv(each, many, [own, 3], **how)
            with pytest.raises(hiercoll.ArgumentError):  # less than what others have, all within the buffers
                hiercoll.gatherv(each, own, [whole, [2 - (peer == root) for peer in range(size)]], **how)
        assert own.tolist() == [100 * each.rank, 100 * each.rank + 1]
    alone.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("cores", [1, 10**6])
def test_more_ranks_than_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Ranks that wait for others of their node sleep there; where each has a core, they do not."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    comm = WORLD.Dup()
    send, recv = np.zeros(1000, np.int64), np.zeros(1000, np.int64)
    plan = hiercoll.allreduce_init(comm, send, recv, algorithm="hierarchical")
    for number in range(50):
        if number % 10 == RANK:
            time.sleep(2e-3)  # longer than others sleep
        send[:] = np.arange(1000) + number * comm.rank
        recv[:] = -1
        plan.start()
        plan.wait()
        assert (recv == comm.size * np.arange(1000) + number * sum(range(comm.size))).all()
    plan.free()
    comm.Free()
