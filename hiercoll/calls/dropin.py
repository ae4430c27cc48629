"""Communicators that send mpi4py's collectives through hiercoll.

`Intracomm` is mpi4py's, and means what mpi4py's means. Whether a call goes through hiercoll
depends on nothing that may differ between ranks: the collective, and the communicator. What
ranks may well spell differently (datatypes, gaps, counts in other units) each rank brings into
shape for itself. Arguments that mpi4py refuses are mpi4py's to refuse. There are two exceptions,
which all ranks must make alike: device arrays, and uneven blocks outside of the buffer that they are
given with, at which MPI does not look. (Alltoallv_init, and Alltoallv where it asks all ranks, find
those on one rank, and leave the call to the MPI library on all.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5

from hiercoll.calls import requests
from hiercoll.calls.aliases import are_arrays, uses_device
from hiercoll.calls.known import (
    begin_known,
    remember,
    remember_all_begun,
    remember_begun,
    remember_plan,
    run_known,
    run_known_on_device,
)
from hiercoll.calls.objects import BuffersOutOfBand, ObjectMessages
from hiercoll.calls.plain import by_bytes
from hiercoll.calls.serving import (
    MOST_SPELLINGS,
    checked_request,
    held_request,
    learner_of_unknown,
    or_native,
    remember_plain,
    repeat,
    serve,
    serve_first,
    serve_native,
    serve_plain,
    serve_unknown_sizes,
    sizes_are_unknown,
    take_turn,
)
from hiercoll.collectives import Collective, Sizes, called
from hiercoll.errors import ArgumentError, DeviceError
from hiercoll.runtime import compiled, progress
from hiercoll.runtime.datatypes import element_of
from hiercoll.runtime.factory import Lifetime
from hiercoll.runtime.lifetime import begins_with, by_handle, first_calls, forget, get_session, inherits, known_state
from hiercoll.runtime.reading import make_request
from hiercoll.runtime.request import NO_PARAMS, Arguments, Mode
from hiercoll.runtime.session import Session
from hiercoll.schedule.transports import AUTO
from hiercoll.tables import NATIVE

AnyComm = TypeVar("AnyComm", bound=MPI.Comm)
Native: TypeAlias = "Callable[..., Any]"  # mpi4py's own method


class Observer(Protocol):
    """Somebody who watches the calls of this process."""

    def begin(self, comm: Any, collective: Collective, mode: Mode, buffers: tuple[Any, ...]) -> object:
        """A call is about to be served; what this returns comes back with `end`. Of objects there are no buffers."""

    def end(self, begun: object, ran: str) -> None:
        """It has been, or it has been started; ``ran``: by what, "native" where it was left to the MPI library."""


observers: list[Observer] = compiled.observers


def observe(observer: Observer) -> None:
    """Let an observer watch all calls of drop-in communicators, beside others."""
    if observer not in observers:
        observers.append(observer)


def ignore(observer: Observer) -> None:
    """Let it watch no longer."""
    if observer in observers:
        observers.remove(observer)


class Calls(Counter[str]):
    """An observer that counts calls by their names, such as "ialltoall", with ", native" for what was left to the
    MPI library."""

    def begin(self, comm: Any, collective: Collective, mode: Mode, buffers: tuple[Any, ...]) -> object:
        """See `Observer`."""
        return call_name(collective, mode)

    def end(self, begun: object, ran: str) -> None:
        """See `Observer`."""
        self[f"{begun}, {NATIVE}" if ran == NATIVE else str(begun)] += 1


def call_name(collective: Collective, mode: Mode) -> str:
    """Of a call, as functions are called."""
    if mode is Mode.BLOCKING:
        return collective.name
    if mode is Mode.OBJECTS:
        return f"{collective.name} of objects"
    return f"i{collective.name}" if mode is Mode.BACKGROUND else f"{collective.name}_init"


class Collectives(ObjectMessages):
    """What is different in a drop-in communicator; the methods of the collectives are added below."""

    @property
    def plain(self: Any) -> MPI.Intracomm:
        """The same communicator with mpi4py's own collectives."""
        return MPI.Intracomm(self)

    def free(self: Any) -> None:
        """As mpi4py's: the predefined communicators of the module stay."""
        forget(self)
        if self is not MPI.COMM_WORLD and self is not MPI.COMM_SELF:
            super().free()  # type: ignore[misc]

    def Disconnect(self: Any) -> None:  # noqa: N802
        """As mpi4py's."""
        forget(self)
        super().Disconnect()  # type: ignore[misc]

    @classmethod
    def fromhandle(cls: Any, handle: int) -> Any:
        """As mpi4py's, of this kind."""
        return drop_in(super().fromhandle(handle))  # type: ignore[misc]

    def __reduce__(self: Any) -> Any:
        name = _predefined(self)
        return super().__reduce__() if name is None else (_revive, (type(self), name))


class Intracomm(Collectives, MPI.Intracomm):
    """``hiercoll.Intracomm(comm)``: ``comm`` itself, with its collectives through hiercoll.

    What `hiercoll.collectives.called` lists is served by hiercoll, with the nonblocking and persistent forms (see
    `requests`), and so are some messages of objects (see `objects`), all else by mpi4py. Communicators made from it are
    of its kind. See mpi4py's Intracomm.
    """


class Cartcomm(Collectives, MPI.Cartcomm):
    """`Intracomm` with a Cartesian topology."""


class Graphcomm(Collectives, MPI.Graphcomm):
    """`Intracomm` with a graph topology."""


class Distgraphcomm(Collectives, MPI.Distgraphcomm):
    """`Intracomm` with a distributed graph topology."""


class Pkl5Intracomm(BuffersOutOfBand, Collectives, pkl5.Intracomm):
    """``hiercoll.Pkl5Intracomm(comm)``: `Intracomm` with the messages of objects of `mpi4py.util.pkl5`, which keep
    large buffers out of pickles."""


class Intercomm(MPI.Intercomm):
    """mpi4py's; what it is merged to is an `Intracomm`."""


_KINDS: dict[type[MPI.Comm], type[MPI.Comm]] = {
    MPI.Cartcomm: Cartcomm,
    MPI.Graphcomm: Graphcomm,
    MPI.Distgraphcomm: Distgraphcomm,
    MPI.Intercomm: Intercomm,
    pkl5.Intracomm: Pkl5Intracomm,
    MPI.Intracomm: Intracomm,  # the last: others are of this kind, too
}


def drop_in(comm: AnyComm) -> AnyComm:
    """The same communicator with its collectives through hiercoll."""
    if isinstance(comm, Collectives) or comm == MPI.COMM_NULL:
        return comm
    ours = _KINDS.get(type(comm)) or next((ours for kind, ours in _KINDS.items() if isinstance(comm, kind)), None)
    return comm if ours is None else ours(comm)  # type: ignore[return-value]


def _keep(owner: type, *names: str, together: bool = True) -> None:
    """Let methods that make communicators make those of this kind; ``together``: all ranks call them, so that what they
    have agreed on goes for what they make, too."""
    kind = owner if issubclass(owner, MPI.Comm) else MPI.Intracomm
    for name in names:
        native = getattr(kind, name)

        def method(self: Any, *args: Any, _native: Native = native, **options: Any) -> Any:
            wishes = inherits(self) if together else None
            made = drop_in(_native(self, *args, **options))
            if wishes is not None:
                begins_with(wishes, made)
            return made

        method.__name__, method.__doc__ = name, native.__doc__
        setattr(owner, name, compiled.makes(kind, name, native, method) if together else method)


compiled.set_up_kinds(_KINDS, drop_in)
_keep(Collectives, "Create", "Create_cart", "Create_dist_graph", "Create_dist_graph_adjacent", "Create_graph")
_keep(Collectives, "Split", "Split_type", "Dup", "Clone")
_keep(Collectives, "Create_group", "Create_intercomm", together=False)
_keep(Cartcomm, "Sub")
_keep(Intercomm, "Merge", together=False)


def _free(self: Any, *wrong: Any, **options: Any) -> None:
    """As mpi4py's, which takes no arguments."""
    if not wrong and not options:
        forget(self)
    MPI.Comm.Free(self, *wrong, **options)


Collectives.Free = compiled.frees(MPI.Comm, "Free", MPI.Comm.Free, _free)  # type: ignore[attr-defined]


def _predefined(comm: MPI.Comm) -> str | None:
    """The name of one of MPI's own communicators."""
    return next((name for name in ("COMM_NULL", "COMM_SELF", "COMM_WORLD") if comm == getattr(MPI, name)), None)


def _revive(kind: type[MPI.Comm], name: str) -> MPI.Comm:
    found = getattr(MPI, name)
    return found if isinstance(found, kind) else kind(found)


# ---- blocking calls: functions that serve them, and return what ran; ``given`` are mpi4py's arguments

Serving: TypeAlias = "Callable[[Any, Arguments, tuple[Any, ...]], str]"


def _equal_blocks(collective: Collective, native: Native) -> Serving:
    """For a collective with equal blocks."""

    def serve_call(self: Any, arguments: Arguments, given: tuple[Any, ...]) -> str:
        known, (send, recv) = by_handle.get(self.handle), arguments[:2]
        if known is not None and are_arrays(collective, send, recv):
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
            ran = run_known(self, collective, send, recv, *choice, passes_native=not known.unwatched)
            if ran:
                return ran
        return _serve(self, collective, arguments, partial(native, self, *given))

    return serve_call


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


def _uneven_blocks(collective: Collective, native: Native) -> Serving:
    """For a collective with blocks of any sizes."""

    def serve_call(self: Any, arguments: Arguments, given: tuple[Any, ...]) -> str:
        known = by_handle.get(self.handle)
        if known is not None and known.unwatched and not known.is_plain:
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
            if (ran := repeat(known, self, collective, arguments)) is not None:
                return ran
        return _serve(self, collective, arguments, partial(native, self, *given))

    return serve_call


def _serve(comm: Any, collective: Collective, given: Arguments, native: Callable[[], object]) -> str:
    """Serve a blocking call, or leave it to MPI: where hiercoll does not serve the communicator, where mpi4py, or the
    MPI library, is to say what is wrong, and, on all ranks alike, where it is the choice."""
    on_device = uses_device(given)
    if not on_device and comm != MPI.COMM_NULL and (first := first_calls(comm, given)) is not None:
        serve_first(first, collective, given, native)
        return NATIVE
    session = _session(comm, on_device)
    if session is None:
        if on_device or comm == MPI.COMM_NULL:
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
    if comm == MPI.COMM_NULL:
        return None
    session = get_session(comm)
    return None if session.disabled or (session.is_plain and not on_device) else session


# ---- calls that return requests


def _nonblocking(comm: Any, collective: Collective, given: Arguments) -> requests.Nonblocking | None:
    """Start a call; None leaves it to MPI, with nothing done."""
    # MPI lets no nonblocking call wait for other ranks: a session must have been made before. With arrays of devices,
    # which MPI may not be given, the first call waits.
    on_device = uses_device(given)
    state = None if comm == MPI.COMM_NULL else get_session(comm) if on_device else known_state(comm)
    if not isinstance(state, Session) or state.disabled or (state.is_plain and not on_device):
        if state is not None and not on_device:
            remember_all_begun(state, collective)
        return None
    session, asked = state, given
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


def _known_begun(comm: Any, collective: Collective, given: Arguments) -> MPI.Request | None:
    """Start a call that is watched as the compiled engine does where nobody looks on, if it is known."""
    known = begin_known(comm, collective, given)
    if known is None or isinstance(known[0], MPI.Request):
        return known and known[0]
    request = requests.begun(*known)
    return None if request is NotImplemented else request


def _persistent(comm: Any, collective: Collective, given: Arguments) -> requests.Persistent | None:
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


# ---- the methods


Method: TypeAlias = "Callable[..., Any]"
Serve: TypeAlias = "Callable[[Any, Arguments, tuple[Any, ...], dict[str, Any]], Any]"


def _method(collective: Collective, serve: Serve) -> Method:
    """A method with mpi4py's arguments, which also come as they are given; ``more`` of them are mpi4py's to look at."""

    def no_buffer(self: Any, *more: Any, **options: Any) -> Any:
        return serve(self, Arguments(None, None), more, options)

    def one_buffer(self: Any, buf: Any, root: int = 0, *more: Any, **options: Any) -> Any:
        return serve(self, Arguments(None, buf, root), (buf, root, *more), options)

    def two_buffers(self: Any, sendbuf: Any, recvbuf: Any, *more: Any, **options: Any) -> Any:
        return serve(self, Arguments(sendbuf, recvbuf), (sendbuf, recvbuf, *more), options)

    def reduction(self: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *more: Any, **options: Any) -> Any:
        return serve(self, Arguments(sendbuf, recvbuf, op=op), (sendbuf, recvbuf, op, *more), options)

    def counted_reduction(
        self: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM, *more: Any, **options: Any
    ) -> Any:
        given = (sendbuf, recvbuf, recvcounts, op, *more)
        return serve(self, Arguments(sendbuf, recvbuf, op=op, recvcounts=recvcounts), given, options)

    def rooted(self: Any, sendbuf: Any, recvbuf: Any, root: int = 0, *more: Any, **options: Any) -> Any:
        return serve(self, Arguments(sendbuf, recvbuf, root), (sendbuf, recvbuf, root, *more), options)

    def rooted_reduction(
        self: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0, *more: Any, **options: Any
    ) -> Any:
        given = (sendbuf, recvbuf, op, root, *more)
        return serve(self, Arguments(sendbuf, recvbuf, root, op=op), given, options)

    if collective.buffers < 2:
        return one_buffer if collective.buffers else no_buffer
    return {
        (): two_buffers, ("op",): reduction, ("root",): rooted, ("op", "root"): rooted_reduction,
        ("recvcounts", "op"): counted_reduction,
    }[collective.more]  # fmt: skip


def _most_arguments(collective: Collective) -> int:
    """Of mpi4py's blocking and nonblocking methods; persistent ones take an ``info``, too."""
    return collective.buffers + len(collective.more)


def _blocking(collective: Collective) -> Method:
    """mpi4py's blocking method, served by hiercoll."""
    native = getattr(MPI.Comm, collective.native)
    serve_call = (_equal_blocks if collective.is_even else _uneven_blocks)(collective, native)
    number = _most_arguments(collective)

    def serve(self: Any, arguments: Arguments, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        if options or len(given) > number:
            native(self, *given, **options)  # raises what is wrong
        begun = [observer.begin(self, collective, Mode.BLOCKING, given) for observer in observers]
        ran = ""
        if begun and _watched is not None:  # as the compiled engine serves it where nobody looks on
            operation = arguments.op if collective.operation else None
            ran = _watched(collective, self, arguments.send, arguments.recv, arguments.root, operation)
        ran = ran or serve_call(self, arguments, given)
        for observer, each in zip(observers, begun, strict=True):
            observer.end(each, ran)

    return _method(collective, serve)


_watched = compiled.watched()


def _returning(collective: Collective, name: str, mode: Mode) -> Method:
    """mpi4py's method that returns a request, served by hiercoll."""
    native, make = getattr(MPI.Comm, name), _persistent if mode is Mode.HELD else _nonblocking
    last = ("info",) if mode is Mode.HELD else ()
    most = _most_arguments(collective) + len(last)

    def serve(self: Any, arguments: Arguments, given: tuple[Any, ...], options: dict[str, Any]) -> MPI.Request:
        if len(given) > most or not options.keys() <= set(last):
            native(self, *given, **options)  # raises what is wrong
        begun = [observer.begin(self, collective, mode, given) for observer in observers]
        known = _known_begun(self, collective, arguments) if begun and mode is Mode.BACKGROUND else None
        request: Any = make(self, collective, arguments) if known is None else known
        if request is None:
            request = native(self, *given, **options)
        ran = request.stand_in.name if isinstance(request, requests.Driven) else NATIVE
        for observer, each in zip(observers, begun, strict=True):
            observer.end(each, ran)
        return request  # type: ignore[no-any-return]

    return _method(collective, serve)


def _add_methods() -> None:
    """Give drop-in communicators the methods of all collectives, in their three forms, with mpi4py's words."""
    for collective in called():
        methods = {
            collective.native: _blocking(collective),
            collective.nonblocking: _returning(collective, collective.nonblocking, Mode.BACKGROUND),
            collective.persistent: _returning(collective, collective.persistent, Mode.HELD),
        }
        for name, method in methods.items():
            method.__name__, method.__doc__ = name, getattr(MPI.Comm, name).__doc__
            forms = {collective.native: collective, collective.nonblocking: collective.in_background}
            if name in forms:
                more, begun = (collective.buffers, collective.more), requests.begun
                method = compiled.method(MPI.Intracomm, name, forms[name], *more, method, begun)
            setattr(Collectives, name, method)


_add_methods()
