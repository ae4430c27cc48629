"""MPI requests that stand for calls of hiercoll.

A request of the drop-in communicator is a synchronous send of nothing from this rank to itself.
It is complete when it is received, which hiercoll does when the call is complete; a persistent
one has been started when its send is there. So whatever takes MPI requests takes these, among
others: `MPI.Request.Waitall`, `MPI.Prequest.Startall`. As these know nothing of hiercoll, a
thread looks after the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

from mpi4py import MPI

from hiercoll.calls.background import Again, BackgroundCall
from hiercoll.runtime import progress

if TYPE_CHECKING:
    from hiercoll.runtime.checking import Describe
    from hiercoll.runtime.plan import Plan
    from hiercoll.runtime.session import Session

PATIENCE = 10.0  # seconds until a call that has failed, and that nobody asks for, ends the job
NOTHING = [None, 0, MPI.BYTE]


@cache
def _self() -> MPI.Intracomm:
    """Where the sends are. Under the lock: two threads would each make one."""
    from hiercoll.runtime.session import duplicate

    return duplicate(MPI.COMM_SELF)


class Refused:
    """A call that could not be started."""

    done = False

    def __init__(self, error: Exception) -> None:
        self.error: BaseException | None = error

    def test(self) -> bool:
        """Raises why."""
        assert self.error is not None
        raise self.error

    wait = test


class StandIn:
    """The call behind a request: one that has been started, or (``persistent``) is whenever the request is."""

    _last_tag = 0
    _tags: ClassVar[set[int]] = set()  # of sends that are not received yet, or may come again

    def __init__(self, session: Session, plan: Plan, *, persistent: bool, described: Describe | None = None) -> None:
        self.name = plan.name
        self._session, self._plan, self._persistent = session, plan, persistent
        limit: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self._failed = float("inf")
        self._receives = False  # the send of the call, or has: Ctrl-C may come after that
        with progress.lock:  # of several threads, each has a tag of its own
            self.tag = (StandIn._last_tag + 1) % limit
            while self.tag in StandIn._tags:
                self.tag = (self.tag + 1) % limit
            StandIn._last_tag = self.tag
            StandIn._tags.add(self.tag)
            self.comm = _self()
            self.call: BackgroundCall | Refused | None
            self.call = None if persistent else BackgroundCall(session, plan, in_thread=True, described=described)
            progress.listening.append(self)
        progress.want_thread()

    def advance(self) -> None:
        """See `progress.Background`."""
        if self.call is None:
            if self.comm.Iprobe(0, self.tag):
                self.start(by_mpi=True)
        elif self.call.done:
            if self.comm.Iprobe(0, self.tag):
                self._receives = True
                self.comm.Recv(NOTHING, 0, self.tag)
            elif not self._receives:  # an MPI library may take some looks to find it
                return
            self.call = None
            if not self._persistent:
                self._received()
        elif self.call.error is not None and not isinstance(self.call.error, Exception):
            self._leave()  # Ctrl-C: it has been raised already
        elif self.call.error is not None:
            self._failed = min(self._failed, monotonic())
            if monotonic() - self._failed > PATIENCE:
                print(f"hiercoll: {self.name} has failed: {self.call.error}", flush=True)
                MPI.COMM_WORLD.Abort(1)

    def start(self, *, by_mpi: bool = False) -> None:
        """Begin the call, after what is enqueued on the streams that are current in this thread. Where MPI has started
        it (`MPI.Prequest.Startall`), this may be another thread than the caller's: then after all that the device has
        been given."""
        self._receives = False
        try:
            if by_mpi:
                self._plan.settle()
            self.call = BackgroundCall(self._session, self._plan, in_thread=True)
        except Exception as error:  # who asks for this one is told, not who lets it go on
            self.call = Refused(error)

    def wait(self) -> None:
        """Until the call, if there is one, is complete. Raises what went wrong."""
        progress.advance_all()
        if (call := self.call) is not None:
            self._ask(call.wait)
            while self.call is call and call.done:
                progress.advance_all()
        progress.advance_all()

    def test(self) -> None:
        """Let it go on. Raises what went wrong."""
        progress.advance_all()
        if (call := self.call) is not None:
            self._ask(call.test)
            progress.advance_all()

    def _ask(self, question: Callable[[], object]) -> None:
        """Once somebody knows what went wrong, nobody looks after it any more."""
        try:
            question()
        except BaseException as problem:
            if isinstance(problem, Exception) or (self.call is not None and self.call.error is not None):
                self._leave()  # else Ctrl-C came between: it goes on
            raise

    def _leave(self) -> None:
        with progress.lock:
            if self in progress.listening:
                progress.listening.remove(self)

    def _received(self) -> None:
        """There is no send of it any more."""
        StandIn._tags.discard(self.tag)
        self._leave()

    def free(self) -> None:
        """It is not started any more."""
        with progress.lock:
            self._plan.free()
            self._received()


class Driven:
    """What a request of the drop-in communicator does beside what mpi4py's does: let its call go on."""

    stand_in: StandIn

    def Wait(self: Any, status: Any = None) -> Any:  # noqa: N802
        """As mpi4py's. Raises what went wrong, CollectiveTimeout too."""
        self.stand_in.wait()
        return super().Wait(status)  # type: ignore[misc]

    def Test(self: Any, status: Any = None) -> Any:  # noqa: N802
        """As mpi4py's. Raises what went wrong."""
        self.stand_in.test()
        return super().Test(status)  # type: ignore[misc]

    def Get_status(self: Any, status: Any = None) -> Any:  # noqa: N802
        """As mpi4py's. Raises what went wrong."""
        self.stand_in.test()
        return super().Get_status(status)  # type: ignore[misc]

    def wait(self: Any, status: Any = None) -> Any:
        """As mpi4py's. Raises what went wrong, CollectiveTimeout too."""
        self.stand_in.wait()
        return super().wait(status)  # type: ignore[misc]

    def test(self: Any, status: Any = None) -> Any:
        """As mpi4py's. Raises what went wrong."""
        self.stand_in.test()
        return super().test(status)  # type: ignore[misc]

    def Cancel(self) -> None:  # noqa: N802
        """Collectives cannot be cancelled (MPI 4.1, 6.12)."""
        raise MPI.Exception(MPI.ERR_REQUEST)


class Nonblocking(Driven, MPI.Request):
    """mpi4py's Request, for a call of hiercoll."""


class Persistent(Driven, MPI.Prequest):
    """mpi4py's Prequest, for a call of hiercoll."""

    def Start(self) -> None:  # noqa: N802
        """As mpi4py's."""
        with progress.lock:  # the thread must not be the one that begins it: streams are current in one thread only
            super().Start()
            self.stand_in.start()
        progress.advance_all()

    def Free(self) -> None:  # noqa: N802
        """As mpi4py's. Raises PlanError while it is active."""
        if self != MPI.REQUEST_NULL:
            self.stand_in.free()
        super().Free()


def nonblocking(session: Session, plan: Plan, described: Describe | None = None) -> Nonblocking:
    """Start a plan; where calls are checked, once all ranks are known to have ``described`` the same call."""
    with progress.lock:
        stand_in = StandIn(session, plan, persistent=False, described=described)
        request = Nonblocking(stand_in.comm.Issend(NOTHING, 0, stand_in.tag))
    request.stand_in = stand_in
    return request


def begun(idle: Again, send: Any, recv: Any) -> Nonblocking:
    """Start one of the plans that the compiled engine has found for a call on these arrays; NotImplemented where these
    cannot serve it."""
    plan = idle.plan(send, recv)
    return NotImplemented if plan is None else nonblocking(idle.session, plan)


def persistent(session: Session, plan: Plan) -> Persistent:
    """Let a plan be started as often as wanted."""
    plan.watch = None  # the calls are watched
    stand_in = StandIn(session, plan, persistent=True)
    request = Persistent(stand_in.comm.Ssend_init(NOTHING, 0, stand_in.tag))
    request.stand_in = stand_in
    return request
