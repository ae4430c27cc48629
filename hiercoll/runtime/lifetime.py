"""Where the session of a communicator is found, and when it is freed.

It is found by the handle of the user's communicator, so through any object for it. By an MPI attribute
hiercoll hears when the communicator is freed, and the session with it, or at the latest at exit,
before MPI_Finalize. The attribute is what ranks have agreed on in the first call, and duplicates take it over:
`Dup` is collective, so all ranks made the call before it, or none. What the ranks of COMM_WORLD have agreed on goes for
all communicators of their processes that begin after it, if none of them had a second thread then: so each rank made
that call before its first one on such a communicator, or none did.
"""

from __future__ import annotations

import atexit
import sys
import threading
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from mpi4py import MPI

from hiercoll import settings
from hiercoll.errors import CollectiveFailed, CollectiveTimeout, CommunicatorError, ThreadError
from hiercoll.loading import REST, is_array, load
from hiercoll.runtime import compiled, progress
from hiercoll.runtime.arguments import Arguments, buffer_of
from hiercoll.runtime.attributes import Attribute
from hiercoll.runtime.beginning import HAS_THREADS, IS_SPECIAL, ONCE, SET_UP, Alike, Beginning, agree, first_watch
from hiercoll.runtime.progress import abandoned
from hiercoll.tuning.share import Before

if TYPE_CHECKING:
    from hiercoll.collectives import Collective
    from hiercoll.runtime.session import Session
    from hiercoll.topology import Topology

PATIENCE = 1.0  # seconds that a rank which ends by an exception waits for the others' word

_lock = threading.Lock()
_live: dict[str, Session] = {}  # by a name that is the same on all ranks
# Sessions by handle, but for those where threads must be checked on each call. A handle is not used again before
# `_deleted` has run.
by_handle: dict[int, Session] = {}
_set_up = 0.0  # seconds that the last set-up took
_has_ended = False


class SetUps:
    """Communicators of this process on which hiercoll was set up, and seconds that this took, waiting included."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0


set_ups = SetUps()


class Unmade(NamedTuple):
    """In place of the session of a communicator whose ranks have not come together to make it."""

    rank: int
    name: str = ""
    broken: str = SET_UP


State: TypeAlias = "Session | Beginning | Unmade"
# By handle, of all communicators on which there was a call but those whose calls only the compiled engine has counted.
_states: dict[int, State] = {}


@cache
def _make_attribute() -> Attribute:
    """What communicators hold, together with what frees sessions at exit."""
    Attribute(_free_all).set(MPI.COMM_SELF, 1)  # an explicit MPI.Finalize()
    atexit.register(_free_all)
    # Python's own clean-up comes before MPI's end, but does not get at what an attribute of mpi4py holds.
    MPI.COMM_WORLD.Set_attr(MPI.Comm.Create_keyval(), abandoned)
    return Attribute(_deleted, _states)


@cache
def _held() -> Attribute:
    """Wishes of all ranks, by communicator: odd where they are special, or ranks have not agreed. Made when MPI has
    been initialised, by whichever thread comes first."""
    with _lock:
        return _make_attribute()


def end_at_exit() -> None:
    """Let hiercoll end when Python does, after what is registered with `atexit` from now on. MPI has begun."""
    _held()


def has_ended() -> bool:
    """Whether it has: nothing is set up any more, nor served."""
    return _has_ended


@cache
def _main_thread() -> int | None:
    """The only thread that may call MPI; None if all may."""
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        return None
    return threading.get_ident() if MPI.Is_thread_main() else threading.main_thread().ident


def forget(comm: MPI.Comm) -> None:
    """A communicator is about to be freed: free its session now, if there is one. The MPI library's own stay."""
    state = _states.get(comm.handle)
    if state is None or isinstance(state, Beginning | Unmade) or comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        return
    if not MPI.Is_finalized():
        _held().take(comm)


def _deleted(handle: int) -> None:
    """The user's communicator is being freed, possibly on one rank in an exception's `finally`."""
    by_handle.pop(handle, None)
    state = _states.pop(handle, None)
    if not isinstance(state, Beginning | Unmade | None) and _live.pop(state.name, None) is not None:
        agreed = state.vote(sys.exc_info()[1] is None)(monotonic() + PATIENCE)
        if agreed:
            state.free()
        if not agreed or state.broken:
            abandoned.append(state)


def _free_all(*_: object) -> None:
    """Free the sessions of all communicators, but for those that an exception has torn apart."""
    global _has_ended
    if MPI.Is_finalized():
        return
    _has_ended = True
    sound = getattr(sys, "last_value", None) is None
    if set_ups.count:  # else nothing was learned
        from hiercoll.learned import flush

        with suppress(Exception):  # other ranks wait for this one
            flush()
    compiled.close()
    by_handle.clear()
    states = [_live.pop(name) for name in sorted(_live)]
    votes = [session.vote(sound) for session in states]
    deadline = monotonic() + PATIENCE
    for session, agreed in zip(states, votes, strict=True):
        if agreed(deadline):
            session.free()
        abandoned.append(session)
    progress.stop()


def first_calls(
    comm: MPI.Intracomm, collective: Collective | None = None, given: Arguments | None = None
) -> Beginning | None:
    """What counts the calls on a communicator on which hiercoll is not set up; None where a session is to serve.
    ``collective``, ``given``: this call, if it is one. Collective, as a blocking call is."""
    state = _states.get(comm.handle) or _goes_on_counting(comm)
    if state is None:
        _check_thread()
        try:
            wishes = agree(comm, first_watch(comm, settings.timeout()), _bytes_of(given), is_first=not set_ups.count)
        except (CollectiveTimeout, CollectiveFailed):
            _keep(comm, Unmade(comm.rank))
            raise
        _held().set(comm, wishes & ~ONCE)
        # A thread that makes the first call on another communicator meanwhile would not know yet.
        if comm == MPI.COMM_WORLD and not wishes & (IS_SPECIAL | HAS_THREADS):
            _held().everywhere(wishes & ~ONCE)
        state = _begin(comm, wishes)
        if state.is_eager:
            get_session(comm)
            return None
    if not isinstance(state, Beginning) or state.is_eager:
        return None
    return state if state.tally[0] > 0 or state.goes_on(_set_up, collective, given) else None


def _bytes_of(given: Arguments | None) -> int:
    """Of the larger one of a call's buffers, where these are arrays, with or without counts."""
    buffers = map(buffer_of, () if given is None else (given.send, given.recv))
    return max((each.nbytes for each in buffers if is_array(each)), default=0)


def _begin(comm: MPI.Intracomm, wishes: int) -> Beginning:
    """Calls are counted from here on, unless a session is to serve the first one; the compiled engine counts those of
    later communicators like this one by itself."""
    state = _states[comm.handle] = Beginning(comm, wishes, compiled.tally(comm.handle))
    if not state.is_eager:
        compiled.register(comm.handle, state.routes, state.tally)
        compiled.begin_so(_held().key, wishes & ~ONCE, state.rank, state.size, state.routes, state.untouched)
    return state


def _goes_on_counting(comm: MPI.Intracomm) -> Beginning | None:
    """What counts the calls on a new communicator that has been made from one whose ranks have agreed, or begins after
    those of COMM_WORLD have. Local."""
    wishes = None if comm.handle in _states else _held().find(comm)
    return None if wishes is None else _begin(comm, wishes)


def inherits(comm: MPI.Intracomm) -> int | None:
    """The wishes that communicators made from ``comm`` begin with, if their ranks need not agree anew. Collective where
    the ranks of ``comm`` have not agreed yet; it comes before what makes them, which is collective, too."""
    held = _held()
    wishes = held.get(comm)
    if wishes is None:
        if comm == MPI.COMM_NULL or _has_ended:
            return None
        first_calls(comm)
        wishes = held.get(comm)
    return None if wishes is None or wishes & IS_SPECIAL else wishes


def begins_with(wishes: int, comm: MPI.Intracomm) -> None:
    """Let a new communicator begin so, unless it does already, as a duplicate. Local."""
    held = _held()
    if held.get(comm) is None:
        held.set(comm, wishes)


def _keep(comm: MPI.Intracomm, state: State) -> None:
    """What is known of the communicator, until it is freed."""
    _states[comm.handle] = state
    compiled.register(comm.handle, None)
    if _held().get(comm) is None:
        _held().set(comm, IS_SPECIAL)


def get_session(comm: MPI.Intracomm) -> Session:
    """The session of ``comm``; collective at the first call for a communicator.

    Raises CommunicatorError for what is not a live intracommunicator or one on which a
    call was interrupted, ThreadError for calls from a second thread without
    MPI_THREAD_MULTIPLE, LayoutError for a bad ``HIERCOLL_NODES``, CollectiveTimeout if ranks
    do not come to the first call by ``HIERCOLL_TIMEOUT``.
    """
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise CommunicatorError("comm", "a call between MPI.Init and MPI.Finalize", "one outside")
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        got = "MPI.COMM_NULL (or a freed one)" if isinstance(comm, MPI.Intracomm) else type(comm).__name__
        raise CommunicatorError("comm", "an intracommunicator", got)
    if _has_ended:
        raise CommunicatorError("comm", "a call before hiercoll is shut down at exit", "one after", comm.rank)
    session: Any = _states.get(comm.handle) or _goes_on_counting(comm)
    if session is None or isinstance(session, Beginning):
        _check_thread()
        session = _make_session(comm, session)
    _check_thread()
    if session.broken:
        got = f"one on which {session.broken} was interrupted; go on with a duplicate, comm.Dup()"
        raise CommunicatorError("comm", "a sound communicator", got, session.rank)
    return cast("Session", session)


def _make_session(comm: MPI.Intracomm, before: Beginning | None) -> Session:
    """Set hiercoll up on a communicator; ``before``: what has counted its calls. Collective. Raises as
    `get_session`."""
    global _set_up
    # Most of hiercoll: a program with few calls, or short ones, does without, on each of its ranks.
    load(REST)
    from hiercoll.runtime.session import Session
    from hiercoll.tuning.policy import forced_variants

    try:
        session = Session(comm, forced_variants(settings.forced), is_met=before is not None and not before.is_special)
        took = session.set_up_seconds, session.meeting_seconds
        session.policy.pay(Before() if before is None else before.paid, *took)
    except (CollectiveTimeout, CollectiveFailed):
        _keep(comm, Unmade(comm.rank))
        raise
    compiled.know_arrays()
    _keep(comm, session)
    _set_up = session.set_up_seconds
    set_ups.count, set_ups.seconds = set_ups.count + 1, set_ups.seconds + _set_up
    _live[session.name] = session
    if not session.threadless:
        by_handle[comm.handle] = session
        compiled.register(comm.handle, session.routes)
    return session


def met_so_far(comm: MPI.Intracomm) -> Session | Beginning | Alike:
    """The session of ``comm``, or what counts its calls, or, of one on which no call has let ranks agree, what lets the
    compiled engine leave calls in the background to the MPI library. Local. Raises as `get_session`."""
    state = _states.get(comm.handle) or _goes_on_counting(comm)
    if state is None:
        compiled.register(comm.handle, _unmet().routes)
        return _unmet()
    return state if isinstance(state, Beginning) else get_session(comm)


@cache
def _unmet() -> Alike:
    """Of all communicators of which nothing is known but that."""
    return Alike(0, 1)


def known_session(comm: MPI.Intracomm) -> Session | None:
    """The session of ``comm`` if a call has made one. Local. Raises as `get_session`."""
    state = _states.get(comm.handle)
    return None if isinstance(state, Beginning | None) else get_session(comm)


def is_settled(comm: MPI.Intracomm) -> bool:
    """Whether hiercoll is not set up on ``comm`` since earlier jobs have found nothing faster. Local."""
    state = _states.get(comm.handle)
    return isinstance(state, Beginning) and state.is_settled


def is_at_bound(comm: MPI.Intracomm) -> bool:
    """Whether hiercoll is not set up on ``comm`` since links between nodes need nearly as long as its calls take.
    Local."""
    state = _states.get(comm.handle)
    return isinstance(state, Beginning) and state.is_at_bound


def is_disabled(comm: MPI.Intracomm) -> bool:
    """Whether hiercoll is not set up on ``comm`` since a rank has set ``HIERCOLL_DISABLE``: so ranks agreed. Local."""
    state = _states.get(comm.handle) or _goes_on_counting(comm)
    return isinstance(state, Beginning) and state.is_disabled


def _check_thread() -> None:
    """Raises ThreadError where this thread may not call MPI."""
    main = _main_thread()
    if main is not None and threading.get_ident() != main:
        raise ThreadError(
            "hiercoll was called from a second thread, but the MPI library was initialised without "
            "MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level)"
        )


def get_topology(comm: MPI.Intracomm) -> Topology:
    """Nodes and lanes of the ranks of ``comm`` (collective at the first call).

    Nodes share memory, or are the virtual ones of ``HIERCOLL_NODES``. Raises
    CommunicatorError and LayoutError.
    """
    return get_session(comm).topology
