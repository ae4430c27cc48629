"""Calls in the background: they return before they are done, and are waited for later."""

from __future__ import annotations

from collections.abc import Iterable
from time import time
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hiercoll import settings
from hiercoll.collectives import NATIVE
from hiercoll.errors import ThreadError
from hiercoll.runtime import progress
from hiercoll.runtime.progress import abandoned
from hiercoll.runtime.watch import BEGAN, SECONDS

if TYPE_CHECKING:
    from hiercoll.runtime.checking import Describe
    from hiercoll.runtime.engines import Pending
    from hiercoll.runtime.plan import Plan
    from hiercoll.runtime.session import Session


class BackgroundCall:
    """A call under way. It goes on whenever hiercoll is called (this rank's other calls, `test`,
    `wait`), and in a thread if ``HIERCOLL_PROGRESS=thread`` is set where the first one is made
    and MPI gives MPI_THREAD_MULTIPLE; not while the program computes or waits elsewhere."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        result: Any = None,
        *,
        in_thread: bool = False,
        described: Describe | None = None,
    ) -> None:
        in_thread = in_thread or settings.wants_thread()
        if in_thread and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise ThreadError("HIERCOLL_PROGRESS=thread needs MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level)")
        self.name = plan.name
        self._session, self._plan, self._result = session, plan, result
        self.error: BaseException | None = None
        self.done = False
        self.entry = session.watch.begin(self) if session.watch is not None else None
        with progress.lock:
            self._check = session.compare_later(described)
            if self._check is None:
                try:
                    plan.begin()
                except BaseException:
                    if plan.broken:
                        abandoned.append(plan)  # messages may be under way
                    raise
            else:
                plan.producers = plan.producers.now()  # which streams are current is another matter later
            progress.active.append(self)
            session.background += 1
        if in_thread:
            progress.want_thread()

    def advance(self) -> None:
        """See `progress.Background`."""
        try:
            if self._check is not None:
                if not self._check.test():
                    return
                self._check = None
                self._plan.begin()
            self.done = self._plan.test()
        except BaseException as error:
            # After a mismatch, too: ranks may have taken other tags from then on.
            self._plan.interrupt()
            self.error = error
            self._session.break_off(self.name)
        if self.done or self.error is not None:
            if self.entry is not None:
                self.entry[SECONDS] = time() - self.entry[BEGAN]
            self._leave()
            self._session.end_plan(self._plan)
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error  # Ctrl-C is not only for who asks for this call

    def _leave(self) -> None:
        progress.active.remove(self)
        self._session.background -= 1

    def pending(self) -> list[Pending]:
        """What it waits for; it cannot go on after that."""
        with progress.lock:
            if self in progress.active:
                self._leave()
            abandoned.append(self._plan)  # its messages may still be under way
            return self._plan.pending()

    def test(self) -> bool:
        """Whether it is complete. Raises what went wrong."""
        progress.advance_all()
        if self.error is not None:
            raise self.error
        return self.done

    def wait(self) -> Any:
        """Until it is complete. Returns the receive array. Raises what went wrong, CollectiveTimeout too."""
        if self._session.watch is not None and not self.test():
            self._session.watch.complete(self)
        while not self.test():
            progress.wait_politely()
        return self._result


class NativeCall(BackgroundCall):
    """A call that was left to the MPI library: it lets it go on."""

    def __init__(self, request: MPI.Request, result: Any) -> None:
        self.name, self.error, self.done = NATIVE, None, False
        self._request, self._result = request, result

    def __del__(self) -> None:
        if not self.done:  # nobody has waited: MPI may still use the buffers, which the request keeps
            abandoned.append(self._request)

    def pending(self) -> list[Pending]:
        """Nothing: what it waits for is known to the MPI library alone."""
        return []

    def test(self) -> bool:
        """See `BackgroundCall`."""
        if progress.active or progress.listening:
            progress.advance_all()
        self.done = self.done or self._request.Test()
        return self.done

    def wait(self) -> Any:
        """See `BackgroundCall`."""
        while not self.test():
            progress.wait_politely()
        return self._result


class Again:
    """Plans of calls in the background that are over, for such calls that come again: see `compiled.Routes`."""

    def __init__(self, session: Session, plans: list[Plan], is_by_block: bool) -> None:
        self.session, self._plans, self._is_by_block = session, plans, is_by_block

    def plan(self, send: Any, recv: Any) -> Plan | None:
        """One of them, for a call on these arrays that the compiled engine has found; None, with nothing done, if the
        last one has gone meanwhile, or the call does not say where all blocks lie."""
        with progress.lock:
            if self._is_by_block and not (self._plans and self.session.routes.fill(self._plans[-1].program)):
                return None
            plan = self.session.idle_plan(self._plans, send, recv)
        if plan is not None and plan.program is not None:
            plan.program.move(*(0 if each is None else MPI.Get_address(each) for each in (send, recv)))
        return plan


def begun(what: MPI.Request | Again, send: Any, recv: Any) -> BackgroundCall:
    """A call on these arrays that the compiled engine knows, and has left to the MPI library or found plans for;
    NotImplemented where these cannot serve it."""
    if isinstance(what, Again):
        plan = what.plan(send, recv)
        return NotImplemented if plan is None else BackgroundCall(what.session, plan, recv)
    return NativeCall(what, recv)


Request = BackgroundCall  # its public name


def waitall(requests: Iterable[BackgroundCall]) -> list[Any]:
    """Wait for all of them. Returns their receive arrays."""
    return [request.wait() for request in requests]
