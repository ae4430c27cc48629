"""Calls of drop-in communicators on which hiercoll is set up; imported when there is the first one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from hiercoll.calls import requests
from hiercoll.calls.given import are_arrays, uses_device
from hiercoll.calls.known import begin_known, remember, remember_begun, remember_plan, run_known, run_known_on_device
from hiercoll.calls.native import serve_native
from hiercoll.calls.plain import by_bytes
from hiercoll.calls.routes import remember_all_begun
from hiercoll.calls.serving import (
    MOST_SPELLINGS,
    checked_request,
    held_request,
    learner_of_unknown,
    or_native,
    remember_plain,
    repeat,
    serve,
    serve_plain,
    serve_unknown_sizes,
    sizes_are_unknown,
    take_turn,
)
from hiercoll.collectives import AUTO, NATIVE, Collective, Sizes
from hiercoll.errors import ArgumentError, DeviceError
from hiercoll.runtime import progress
from hiercoll.runtime.arguments import NO_PARAMS, Arguments, Mode
from hiercoll.runtime.datatypes import element_of
from hiercoll.runtime.factory import Lifetime
from hiercoll.runtime.lifetime import by_handle, get_session
from hiercoll.runtime.reading import make_request
from hiercoll.runtime.session import Session

Native = Callable[..., Any]  # mpi4py's own method, which takes the communicator first


def blocking(self: Any, collective: Collective, arguments: Arguments, given: tuple[Any, ...], native: Native) -> str:
    """Serve a blocking call. Returns what ran; ``given`` are mpi4py's arguments. Collective."""
    known = by_handle.get(self.handle)
    if known is not None:
        ran = (_equal_blocks if collective.is_even else _uneven_blocks)(
            self, known, collective, arguments, given, native
        )
        if ran:
            return ran
    return _serve(self, collective, arguments, partial(native, self, *given))


def _equal_blocks(
    self: Any, known: Session, collective: Collective, arguments: Arguments, given: tuple[Any, ...], native: Native
) -> str:
    """Serve a call with equal blocks the shortest way, if it is known; "" if it is not."""
    send, recv = arguments[:2]
    if not are_arrays(collective, send, recv):
        return ""
    learner = known.policy.by_bytes.get(by_bytes(collective, arguments))
    if learner is not None and learner.is_fixed and learner.current.is_native and known.unwatched:
        serve_native(known, collective, arguments, partial(native, self, *given), learner.tally)
        return NATIVE
    call: Any = partial(native, self, *given)
    compares = learner is not None and learner.compares and known.unwatched
    if learner is not None and compares and (ran := take_turn(learner, collective, self, arguments, call)):
        return ran
    asks = learner is not None and not learner.is_fixed
    if asks and (ran := serve_plain(known, collective, arguments, learner, call, strict=False)):
        return ran
    # Not a native one, unless calls are watched: ranks without it would go to the user's communicator.
    how = (arguments.op, arguments.order) if collective.operation else (None, None)
    choice = (arguments.root, "auto", AUTO, *how, NO_PARAMS)
    return run_known(self, collective, send, recv, *choice, passes_native=not known.unwatched)


def _uneven_blocks(
    self: Any, known: Session, collective: Collective, arguments: Arguments, given: tuple[Any, ...], native: Native
) -> str:
    """The same of a call with blocks of any sizes."""
    if not known.unwatched or known.is_plain:
        return ""
    is_left = collective.sizes is Sizes.ROOT and known.policy.is_auto(collective, AUTO)
    if is_left and not uses_device(arguments):
        progress.before_blocking()
        native(self, *given)
        known.routes.remember_all(native, None, collective)
        return NATIVE
    learner = learner_of_unknown(known, collective, arguments)
    learner = learner or known.by_sizes.get(_by_sizes(collective, arguments))
    is_native = learner is not None and learner.is_fixed and learner.current.is_native
    if learner is not None and is_native and not uses_device(arguments):
        serve_native(known, collective, arguments, partial(native, self, *given), learner.tally)
        return NATIVE
    return repeat(known, self, collective, arguments) or ""


def _serve(comm: Any, collective: Collective, given: Arguments, native: Callable[[], object]) -> str:
    """Serve a blocking call, or leave it to MPI: where hiercoll does not serve the communicator, where mpi4py, or the
    MPI library, is to say what is wrong, and, on all ranks alike, where it is the choice."""
    on_device = uses_device(given)
    session = _session(comm, on_device)
    if session is None:
        if on_device:
            native()
        else:
            serve_native(get_session(comm), collective, given, native, None)
        return NATIVE
    if on_device and collective.is_even and (ran := run_known_on_device(session, collective, given)):
        return ran
    try:
        if (learner := learner_of_unknown(session, collective, given)) is not None:
            return serve_unknown_sizes(session, collective, given, learner, native, strict=False)
        request = checked_request(session, collective, given, strict=on_device)
    except ArgumentError as error:
        _refuse(session, error, given)
        request = None
    if request is None:  # out of the handler: what the MPI library raises has nothing of hiercoll's in it
        native()
        return NATIVE
    # Calls that are left to MPI are on the user's communicator, on all ranks, however they spell it.
    passes = session.unwatched and request.memory == "host"
    if passes and request.is_auto and request.is_empty:
        serve_native(session, collective, given, native, None)
        return NATIVE
    passes = passes and not request.is_empty
    if passes:
        remember_plain(session, request, given)
    learner = request.learner
    if passes and request.is_auto and request.variant.is_native and (learner is None or learner.is_fixed):
        if collective.is_even and are_arrays(collective, given.send, given.recv):
            remember(session, request, given, None)
        serve_native(session, collective, given, native, None if learner is None else learner.tally)
        key = None if learner is None or collective.is_even else _by_sizes(collective, given)
        if learner is not None and key is not None:
            if len(session.by_sizes) >= MOST_SPELLINGS:
                session.by_sizes.clear()
            session.by_sizes[key] = learner
        return NATIVE
    if passes and learner is None and request.variant.is_native:
        progress.before_blocking()
        native()
        return NATIVE
    return serve(session, request, given, native)


def _session(comm: Any, on_device: bool) -> Session | None:
    """The session of a communicator that hiercoll serves; None for one that is left to MPI: that of one rank, too, but
    with arrays of devices, which MPI may not be given."""
    session = get_session(comm)
    return None if session.disabled or (session.is_plain and not on_device) else session


def _by_sizes(collective: Collective, arguments: Arguments) -> Any:
    """What calls with blocks of any sizes have in common from which the same is learned, by how they are spelled; None
    for other than NumPy's arrays, and for reductions. Datatypes are told apart by what they are."""
    if collective.more:
        return None
    try:
        return collective, _spelled(arguments.send), _spelled(arguments.recv)
    except (TypeError, ValueError, AttributeError, IndexError, MPI.Exception):
        return None


def _spelled(given: Any) -> Any:
    if type(given) is np.ndarray:
        return given.nbytes, given.dtype
    if type(given) is int or type(given) is str or given is MPI.IN_PLACE:
        return given
    if isinstance(given, MPI.Datatype):
        return element_of(given)
    if type(given) is not list and type(given) is not tuple:
        raise TypeError
    if given and type(given[0]) is int:
        return tuple(given)
    buffer, *numbers = given
    return (type(given), _spelled(buffer), *map(_spelled_numbers, numbers))


def _spelled_numbers(given: Any) -> Any:
    """Counts or displacements, or both, or a datatype."""
    if type(given) is np.ndarray:
        return tuple(given.tolist())
    if type(given) is tuple and given and type(given[0]) is not int:
        return tuple(map(_spelled_numbers, given))
    return _spelled(given)


# ---- calls that return requests


def nonblocking(comm: Any, collective: Collective, given: Arguments) -> requests.Nonblocking | None:
    """Start a call; None leaves it to MPI, with nothing done."""
    on_device = uses_device(given)
    session, asked = get_session(comm), given
    if session.disabled or (session.is_plain and not on_device):
        if not on_device:
            remember_all_begun(session, collective)
        return None
    if session.threadless:
        return None
    if collective.is_private and session.unwatched and session.policy.is_auto(collective, AUTO) and not on_device:
        remember_all_begun(session, collective)
        return None
    if sizes_are_unknown(session, collective, given):
        given = given._replace(algorithm=NATIVE)
    request = _sound(session, collective, given, Mode.BACKGROUND)
    if request is None or (request.is_empty and not session.check):
        return None
    private = session.factory.private(request)
    if private.is_native and not session.check and private.memory == "host":
        remember_begun(session, private, asked)
        return None
    plan, described = session.begun_plan(private), partial(request.described, given, session.rank, session.size)
    remember_plan(session, private, asked, plan)
    return requests.nonblocking(session, plan, described)


def known_begun(comm: Any, collective: Collective, given: Arguments) -> MPI.Request | None:
    """Start a call that is watched as the compiled engine does where nobody looks on, if it is known."""
    known = begin_known(comm, collective, given)
    if known is None or isinstance(known[0], MPI.Request):
        return known and known[0]
    request = requests.begun(*known)
    return None if request is NotImplemented else request


def persistent(comm: Any, collective: Collective, given: Arguments) -> requests.Persistent | None:
    """A persistent call; None leaves it to MPI, with nothing done."""
    session = _session(comm, uses_device(given))
    if session is None or session.threadless:
        return None
    try:
        request = held_request(session, collective, given, strict=False)
    except ArgumentError as error:
        _refuse(session, error, given)
        return None
    if request.is_empty or (request.is_native and request.memory == "host"):
        return None
    make = partial(session.factory.make, lifetime=Lifetime.HELD)
    return requests.persistent(session, or_native(session, make, request))


def _sound(session: Session, collective: Collective, given: Arguments, mode: Mode) -> Any:
    """The request, if it is sound; with arrays of devices, which MPI may not be given, raises what is wrong."""
    try:
        return make_request(session, collective, given, mode, strict=False)
    except ArgumentError as error:
        _refuse(session, error, given)
        return None


def _refuse(session: Session, error: ArgumentError, given: Arguments) -> None:
    """Let MPI say what is wrong, if anything is. Raises the error with arrays of devices, which MPI may not be given,
    unless hiercoll knows no device (that takes CuPy)."""
    if uses_device(given) and type(error) is not DeviceError:
        raise error
    session.refused = f"{error.argument}, expected {error.expected}"
