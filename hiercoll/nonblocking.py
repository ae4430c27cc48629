"""Calls that return before they are done."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from time import time
from typing import Any

from mpi4py import MPI

from hiercoll import progress
from hiercoll.api import Way, checked
from hiercoll.checking import Saying
from hiercoll.communicator import State
from hiercoll.engines import Pending
from hiercoll.errors import BufferTypeError, ThreadError
from hiercoll.executor import Plan
from hiercoll.lifetime import get_state
from hiercoll.uneven import LIMIT
from hiercoll.vectors import Call, allgatherv_call, alltoallv_call
from hiercoll.watch import BEGAN, SECONDS


class Request:
    """A call under way. It goes on whenever hiercoll is called (this rank's other calls, `test`,
    `wait`), and in a thread if ``HIERCOLL_PROGRESS=thread`` is set where the first one is made
    and MPI gives MPI_THREAD_MULTIPLE; not while the program computes or waits elsewhere."""

    def __init__(
        self, state: State, plan: Plan, result: Any = None, *, in_thread: bool = False, said: Saying | None = None
    ) -> None:
        in_thread = in_thread or os.environ.get("HIERCOLL_PROGRESS", "") == "thread"
        if in_thread and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise ThreadError("HIERCOLL_PROGRESS=thread needs MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level)")
        self.name = plan.name
        self._state, self._plan, self._result = state, plan, result
        self.error: BaseException | None = None
        self.done = False
        self.entry = state.watch.begin(self) if state.watch is not None else None
        with progress.lock:
            self._check = state.compare_later(said)
            if self._check is None:
                plan.start()
            progress.active.append(self)
            state.background += 1
        if in_thread:
            progress.want_thread()
        elif progress.are_shortcuts():
            progress.before_blocking()

    def advance(self) -> None:
        """See `progress.Background`."""
        try:
            if self._check is not None:
                if not self._check.test():
                    return
                self._check = None
                self._plan.start()
            self.done = self._plan.test()
        except BaseException as error:
            # After a mismatch, too: ranks may have taken other tags from then on.
            self._plan.interrupt()
            self.error, self._state.broken = error, self.name
        if self.done or self.error is not None:
            if self.entry is not None:
                self.entry[SECONDS] = time() - self.entry[BEGAN]
            self._leave()
            if self._plan.on_free is None:  # else it is somebody's, for more starts
                self._plan.free()
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error  # Ctrl-C is not only for who asks for this call

    def _leave(self) -> None:
        progress.active.remove(self)
        self._state.background -= 1

    def pending(self) -> list[Pending]:
        """What it waits for; it cannot go on after that."""
        with progress.lock:
            if self in progress.active:
                self._leave()
            return self._plan.pending()

    def test(self) -> bool:
        """Whether it is complete. Raises what went wrong."""
        progress.advance_all()
        if self.error is not None:
            raise self.error
        return self.done

    def wait(self) -> Any:
        """Until it is complete. Returns the receive array. Raises what went wrong, CollectiveTimeout too."""
        if self._state.watch is not None and not self.test():
            self._state.watch.complete(self)
        while not self.test():
            progress.wait_politely()
        return self._result


def waitall(requests: Iterable[Request]) -> list[Any]:
    """Wait for all of them. Returns their receive arrays."""
    return [request.wait() for request in requests]


def ialltoall(
    comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any = None, *, algorithm: str = "auto", **params: Any
) -> Request:
    """`hiercoll.alltoall` that returns at once; buffers must be left alone until it is complete.

    Arrays on the host. "auto" takes algorithms without shared memory only. Several may be
    under way; all ranks start them in the same order. Waits for no other rank, but
    in the first call of hiercoll on a communicator. Errors as `alltoall`,
    and ConstraintError for algorithms with shared memory. Collective (MPI 4.1, 6.12.6).
    """
    return _even(comm, "alltoall", sendbuf, recvbuf, algorithm, params)


def iallgather(
    comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any = None, *, algorithm: str = "auto", **params: Any
) -> Request:
    """`hiercoll.allgather` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.5)."""
    return _even(comm, "allgather", sendbuf, recvbuf, algorithm, params)


def ialltoallv(comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", **params: Any) -> Request:
    """`hiercoll.alltoallv` that returns at once; see `ialltoall`. "auto" is native."""
    chosen = "native" if algorithm == "auto" else algorithm
    return _uneven(alltoallv_call(get_state(comm), sendbuf, recvbuf, chosen, params, LIMIT), algorithm)


def iallgatherv(comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", **params: Any) -> Request:
    """`hiercoll.allgatherv` that returns at once; see `ialltoall`."""
    return _uneven(allgatherv_call(get_state(comm), sendbuf, recvbuf, algorithm, params), algorithm)


def _even(
    comm: MPI.Intracomm, collective: str, sendbuf: Any, recvbuf: Any, algorithm: str, params: dict[str, Any]
) -> Request:
    call = checked(comm, collective, sendbuf, recvbuf, Way("auto", None))
    state = call.state
    if call.received.place != "host":
        expected = "memory of the host, for calls in the background"
        raise BufferTypeError("recvbuf", expected, call.received.place, state.rank)
    work = state.without_shared(call.chosen(algorithm, params), algorithm == "auto")
    plan = state.background_plan(work, "host", *call.addresses)
    plan.keep_alive(call.sent, call.received)
    said = partial(call.said, f"i{collective}", algorithm, params)
    return Request(state, plan, call.received.array, said=said)


def _uneven(call: Call, algorithm: str) -> Request:
    work = call.state.without_shared(call.work, algorithm == "auto")
    plan = call._replace(work=work).plan(background=True)
    return Request(call.state, plan, call.result, said=partial(call.said, "i"))
