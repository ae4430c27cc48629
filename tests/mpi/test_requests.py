"""Requests of the drop-in communicator, among MPI's own, by whatever waits for requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from time import sleep
from typing import Any

import numpy as np
import pytest
from conftest import WORLD, layouts, nothing_is_under_way
from mpi4py import MPI
from test_dropin import ITEMS, KINDS, spelled

import hiercoll
from hiercoll import settings
from hiercoll.calls import dropin, requests
from hiercoll.calls.background import Request
from hiercoll.runtime import progress
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.plan import Plan
from hiercoll.runtime.session import duplicate

RANK, SIZE = WORLD.rank, WORLD.size
needs_threads = pytest.mark.skipif(
    MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="the MPI library gives no MPI_THREAD_MULTIPLE"
)
pytestmark = [needs_threads, pytest.mark.mpi(min_size=2)]  # calls of one rank are MPI's
FORMS = ["alltoall", "allgather", "alltoallv", "allgatherv"]
# Algorithms with rounds, so that somebody must let them go on.
SLOW = {"alltoall": ("bruck", {}), "allgather": ("ring", {}), "alltoallv": ("pairwise", {}), "allgatherv": ("ring", {})}


@pytest.fixture(params=layouts())
def ours(
    request: pytest.FixtureRequest, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch
) -> hiercoll.Intracomm:
    for collective, choice in SLOW.items():
        monkeypatch.setitem(settings.forced, collective, choice)
    comm = hiercoll.Intracomm(on_layout(request.param))
    get_session(comm)
    return comm


class Prepared:
    """A call of one of the forms: arguments, and what is to be sent and received in its ``n``-th start."""

    def __init__(self, form: str, spelling: int = 0) -> None:
        self.form, table = form, np.random.default_rng(17).integers(0, 9, (SIZE, SIZE))
        sent, received = {
            "alltoall": ([ITEMS] * SIZE, [ITEMS] * SIZE),
            "allgather": ([ITEMS], [ITEMS] * SIZE),
            "alltoallv": (table[RANK], table[:, RANK]),
            "allgatherv": (table[0, RANK : RANK + 1], table[0]),
        }[form]
        self.sizes = [int(size) for size in sent], [int(size) for size in received]
        send, recv = (np.full(sum(sizes), -1, "i4") for sizes in self.sizes)
        if form == "alltoallv":
            self.args: tuple[Any, Any] = ([send, table[RANK]], [recv, table[:, RANK]])
        elif form == "allgatherv":
            self.args = (send, [recv, table[0]])
        else:
            out, send, self._a = spelled(spelling % KINDS, send, ITEMS)
            into, recv, self._b = spelled((spelling * 3) % KINDS, recv, ITEMS)
            self.args = (out, into)
        self.send, self.recv = send, recv

    def fill(self, n: int) -> None:
        self.recv[:] = -1
        to_all = len(self.sizes[0]) == 1
        self.send[:] = np.concatenate(
            [self._tokens(RANK, 0 if to_all else peer, size, n) for peer, size in enumerate(self.sizes[0])]
        )

    def check(self, n: int) -> None:
        to_all = len(self.sizes[0]) == 1
        expected = [self._tokens(peer, 0 if to_all else RANK, size, n) for peer, size in enumerate(self.sizes[1])]
        np.testing.assert_array_equal(self.recv, np.concatenate(expected))

    @staticmethod
    def _tokens(source: int, target: int, size: int, n: int) -> Any:
        return np.arange(size) + 100 * source + 10_000 * target + 1_000_000 * n

    def start(self, comm: Any) -> MPI.Request:
        request: MPI.Request = getattr(comm, f"I{self.form}")(*self.args)
        assert isinstance(request, requests.Nonblocking)
        return request

    def init(self, comm: Any) -> MPI.Prequest:
        request: MPI.Prequest = getattr(comm, f"{self.form.capitalize()}_init")(*self.args)
        assert isinstance(request, requests.Persistent)
        return request


def wait_by_test(request: MPI.Request) -> None:
    while not request.Test():
        pass


def wait_by_status(request: MPI.Request) -> None:
    while not request.Get_status():
        pass
    request.Wait()


def wait_by_any(request: MPI.Request) -> None:
    assert MPI.Request.Waitany([MPI.REQUEST_NULL, request]) == 1


def wait_by_some(request: MPI.Request) -> None:
    own = WORLD.Irecv([None, 0, MPI.BYTE], RANK, 99)
    left = [own, request]
    while not MPI.Request.Testall([request]):
        MPI.Request.Testsome([request])
    WORLD.Send([None, 0, MPI.BYTE], RANK, 99)
    MPI.Request.Waitall(left)


WAYS: list[Callable[[Any], Any]] = [
    lambda request: request.Wait(),
    lambda request: request.wait(),
    lambda request: MPI.Request.Waitall([request]),
    lambda request: MPI.Request.waitall([request]),
    wait_by_test,
    wait_by_status,
    wait_by_any,
    wait_by_some,
]


@pytest.mark.parametrize("form", FORMS)
def test_nonblocking(ours: hiercoll.Intracomm, form: str) -> None:
    """Each way to wait, another one on every rank."""
    for turn in range(len(WAYS)):
        call = Prepared(form, RANK + turn)
        call.fill(turn)
        request = call.start(ours)
        WAYS[(turn + RANK) % len(WAYS)](request)
        call.check(turn)
        assert request == MPI.REQUEST_NULL
    assert nothing_is_under_way()


@pytest.mark.parametrize("form", FORMS)
def test_persistent(ours: hiercoll.Intracomm, form: str) -> None:
    """Started in each way, completed in each way; a request that is not active is complete."""
    call = Prepared(form, RANK)
    request = call.init(ours)
    request.Wait()
    assert request.Test() and request.Get_status()
    for turn in range(2 * len(WAYS)):
        call.fill(turn)
        if (turn + RANK) % 2:
            request.Start()
        else:
            MPI.Prequest.Startall([request])
        WAYS[(turn // 2 + RANK) % len(WAYS)](request)
        call.check(turn)
        assert request != MPI.REQUEST_NULL
    request.Free()
    assert request == MPI.REQUEST_NULL and nothing_is_under_way()


def test_many_together(ours: hiercoll.Intracomm) -> None:
    """All forms at once, with messages of the program's own, completed by one Waitall."""
    for turn in range(3):
        nonblocking, persistent = [Prepared(form) for form in FORMS], [Prepared(form) for form in FORMS]
        prepared = [call.init(ours) for call in persistent]
        for call in nonblocking + persistent:
            call.fill(turn)
        value = np.full(1, -1)
        own = [ours.Irecv(value, (RANK - 1) % SIZE, 5), ours.Isend(np.array([RANK]), (RANK + 1) % SIZE, 5)]
        started = [call.start(ours) for call in nonblocking]
        MPI.Prequest.Startall(prepared[::-1] if RANK % 2 else prepared)  # MPI has no order for these
        MPI.Request.Waitall([*started, *own, *prepared])
        for call in nonblocking + persistent:
            call.check(turn)
        assert value[0] == (RANK - 1) % SIZE
        for request in prepared:
            request.Free()


@pytest.mark.parametrize("known", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("form", FORMS)
def test_waits_for_nobody(comm: MPI.Intracomm, form: str, known: bool) -> None:
    """A rank that has started a call does something that others need before they start it."""
    ours = hiercoll.Intracomm(comm.Dup())
    if known:
        ours.Allgather(np.array([RANK]), np.empty(SIZE, int))
    call = Prepared(form)
    call.fill(0)
    if RANK:
        ours.Recv([None, 0, MPI.BYTE], RANK - 1, 7)
    request = getattr(ours, f"I{form}")(*call.args)
    if RANK < SIZE - 1:
        ours.Send([None, 0, MPI.BYTE], RANK + 1, 7)
    request.Wait()
    call.check(0)
    ours.Free()


def test_counted(ours: hiercoll.Intracomm, calls: dropin.Calls) -> None:
    for form in FORMS:
        call = Prepared(form)
        call.start(ours).Wait()
        call.init(ours).Free()
    assert all(calls[name] == 1 for form in FORMS for name in (f"i{form}", f"{form}_init"))


def test_cannot_be_cancelled(ours: hiercoll.Intracomm) -> None:
    request = Prepared("alltoall").start(ours)
    with pytest.raises(MPI.Exception):
        request.Cancel()
    request.Wait()


class Failing:
    """An engine that fails on the way."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def start(self) -> None: ...

    run = start

    def progress(self, block: bool) -> bool:
        raise self.error("on purpose")


@pytest.mark.parametrize("wait", [lambda request: request.Wait(), wait_by_test])
def test_failures_are_told_once(ours: hiercoll.Intracomm, wait: Callable[[Any], Any]) -> None:
    """By the request's own methods; then nobody waits for somebody to ask."""
    session = get_session(ours)
    request = requests.nonblocking(session, Plan(Failing(RuntimeError), "failing", None, None))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="on purpose"):
        wait(request)
    assert not progress.listening and session.broken == "failing"
    session.broken = None
    requests._self().Recv(requests.NOTHING, 0, request.stand_in.tag)  # tidy up
    MPI.Request.Wait(request)


def test_interrupts_reach_who_waits_for_another_call(ours: hiercoll.Intracomm) -> None:
    """Ctrl-C comes while this rank looks at whatever is under way."""
    session = get_session(ours)
    with progress.lock:  # else the thread may look first
        failing = Request(session, Plan(Failing(KeyboardInterrupt), "failing", None, None))  # type: ignore[arg-type]
        other = hiercoll.iallgather(ours, np.arange(3))
        with pytest.raises(KeyboardInterrupt):
            other.wait()
    assert failing.error is not None and failing not in progress.active and session.broken == "failing"
    session.broken = None
    assert (other.wait() == np.arange(3)).all()


def test_starts_that_are_refused(ours: hiercoll.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A persistent request whose plan is gone tells who asks for it, not other calls, nor the thread."""
    monkeypatch.setitem(settings.forced, "alltoall", ("pairwise", {}))
    made, sent, got = ours.Dup(), np.arange(float(SIZE)), np.empty(SIZE)
    get_session(made)
    request: Any = made.Alltoall_init(sent, got)
    assert isinstance(request, requests.Persistent)
    stand_in = request.stand_in
    with progress.lock:
        stand_in._plan.free()
        MPI.Prequest.Startall([request])
        progress.advance_all()
    other = ours.Ialltoall(sent, got)
    MPI.Request.Waitall([other])
    assert (got == RANK).all()
    with pytest.raises(hiercoll.PlanError, match="freed"):
        request.Wait()
    requests._self().Recv(requests.NOTHING, 0, stand_in.tag)  # tidy up
    MPI.Prequest.Wait(request)
    MPI.Prequest.Free(request)
    made.Free()


def test_interrupted_and_waited_for_again(ours: hiercoll.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between looks leaves a call as it is."""
    call = Prepared("allgather")
    call.fill(0)
    with progress.lock, monkeypatch.context() as patch:
        request = call.start(ours)
        patch.setattr(progress, "advance_all", lambda: None)
        patch.setattr(Request, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            request.Wait()
    request.Wait()
    call.check(0)


def test_a_send_that_is_found_late(ours: hiercoll.Intracomm) -> None:
    """A library may need some looks for what has been sent."""

    class Late(MPI.Intracomm):
        looks = 0

        def Iprobe(self, *given: Any) -> bool:  # noqa: N802
            Late.looks += 1
            return Late.looks > 5 and super().Iprobe(*given)

    call = Prepared("allgather")
    call.fill(0)
    with progress.lock:
        request = call.start(ours)
        request.stand_in.comm = Late(requests._self())
    request.Wait()
    call.check(0)
    assert Late.looks > 5


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_one_place_for_all_threads(ours: hiercoll.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends are received where they are sent, from the first request of a process on."""
    made: list[MPI.Intracomm] = []

    def slowly(parent: MPI.Intracomm) -> MPI.Intracomm:
        if parent != MPI.COMM_SELF:  # a session's
            return duplicate(parent)
        sleep(0.1)
        made.append(duplicate(parent))
        return made[-1]

    monkeypatch.setattr(hiercoll.runtime.session, "duplicate", slowly)
    monkeypatch.setattr(requests, "_self", cache(requests._self.__wrapped__))
    call = Prepared("alltoall")
    request = call.init(ours)
    for n in range(2):
        call.fill(n)
        MPI.Prequest.Startall([request])
        MPI.Request.Waitall([request])
        call.check(n)
    request.Free()
    assert len(made) == 1
    made[0].Free()


class Done:
    """An engine with nothing to do."""

    def start(self) -> None: ...

    run = free = start

    def progress(self, block: bool) -> bool:
        return True


class SlowInt(int):
    """A limit of tags at which the first thread that computes with it stops until others have had their turn."""

    def __new__(cls, value: int) -> SlowInt:
        made = super().__new__(cls, value)
        made.reached, made.go_on, made._first = threading.Event(), threading.Event(), [True]
        return made

    def __rmod__(self, left: int) -> int:
        if self._first:
            self._first.clear()
            self.reached.set()
            self.go_on.wait(1)  # in vain where the others are kept out meanwhile, as they should be
        return left % int(self)


def test_tags_that_come_round(ours: hiercoll.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are still there keep their tags when the MPI library has no more."""
    limit = 7 + len(requests.StandIn._tags)  # other tests may have left some

    class World(MPI.Intracomm):
        def Get_attr(self, keyval: int) -> Any:  # noqa: N802
            return limit if keyval == MPI.TAG_UB else super().Get_attr(keyval)

    monkeypatch.setattr(MPI, "COMM_WORLD", World(MPI.COMM_WORLD))
    monkeypatch.setattr(requests.StandIn, "_last_tag", 0)
    calls = [Prepared(form) for form in FORMS]
    kept = [call.init(ours) for call in calls]
    for turn in range(9):
        call = Prepared(FORMS[turn % len(FORMS)])
        call.fill(turn)
        started = call.start(ours)
        assert len({request.stand_in.tag for request in [*kept, started]}) == len(kept) + 1
        for each in calls:
            each.fill(turn)
        MPI.Prequest.Startall(kept)
        MPI.Request.Waitall([*kept, started])
        for each in [*calls, call]:
            each.check(turn)
        with progress.lock:  # the thread may have the request's last word still to say
            progress.advance_all()
    for request in kept:
        request.Free()
    assert nothing_is_under_way()


@pytest.mark.parametrize("other", ["nonblocking", "persistent"])
def test_tags_of_two_threads(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """A thread makes a persistent request, and another one any request just then: the sends that stand for them are
    told apart by their tags."""
    session, limit = get_session(comm), SlowInt(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))

    class World(MPI.Intracomm):
        def Get_attr(self, keyval: int) -> Any:  # noqa: N802
            return limit if keyval == MPI.TAG_UB else super().Get_attr(keyval)

    def make(kind: str) -> Any:
        return getattr(requests, kind)(session, Plan(Done(), "nothing", None, None))  # type: ignore[arg-type]

    made: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(progress, "advance_all", lambda: None)  # one would take the other's send for its own
        patch.setattr(MPI, "COMM_WORLD", World(MPI.COMM_WORLD))
        first = threading.Thread(target=lambda: made.append(make("persistent")))
        first.start()
        assert limit.reached.wait(10), "nobody computes with the limit: this test must find another place to stop at"
        made.append(make(other))
        limit.go_on.set()
        first.join()
        tags = [request.stand_in.tag for request in made]
        for request in made:
            if isinstance(request, MPI.Prequest):
                request.Free()
    for request in made:
        request.Wait()
    assert nothing_is_under_way()
    assert len(set(tags)) == 2
