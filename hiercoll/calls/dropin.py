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
from contextlib import suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from mpi4py import MPI
from mpi4py.util import pkl5

from hiercoll import settings
from hiercoll.calls import requests
from hiercoll.calls.given import uses_device
from hiercoll.calls.native import serve_first
from hiercoll.calls.objects import BuffersOutOfBand, ObjectMessages
from hiercoll.calls.routes import remember_all_begun
from hiercoll.collectives import NATIVE, Collective, called
from hiercoll.errors import ArgumentError
from hiercoll.loading import LazyModule, load
from hiercoll.runtime import compiled
from hiercoll.runtime.arguments import Arguments, Mode
from hiercoll.runtime.beginning import Alike, Beginning
from hiercoll.runtime.lifetime import (
    begins_with,
    by_handle,
    first_calls,
    forget,
    has_ended,
    inherits,
    is_disabled,
    met_so_far,
)

if TYPE_CHECKING:
    from hiercoll.calls import served
else:  # it brings most of hiercoll, which short programs do without
    served = LazyModule("hiercoll.calls.served")

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

    __slots__ = ()  # as mpi4py's: a misspelled name is an error

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
        return reduced(self)


class Intracomm(Collectives, MPI.Intracomm):
    """``hiercoll.Intracomm(comm)``: ``comm`` itself, with its collectives through hiercoll.

    What `hiercoll.collectives.called` lists is served by hiercoll, with the nonblocking and persistent forms (see
    `requests`), and so are some messages of objects (see `objects`), all else by mpi4py. Communicators made from it are
    of its kind. See mpi4py's Intracomm.
    """

    __slots__ = ()


class Cartcomm(Collectives, MPI.Cartcomm):
    """`Intracomm` with a Cartesian topology."""

    __slots__ = ()


class Graphcomm(Collectives, MPI.Graphcomm):
    """`Intracomm` with a graph topology."""

    __slots__ = ()


class Distgraphcomm(Collectives, MPI.Distgraphcomm):
    """`Intracomm` with a distributed graph topology."""

    __slots__ = ()


class Pkl5Intracomm(BuffersOutOfBand, Collectives, pkl5.Intracomm):
    """``hiercoll.Pkl5Intracomm(comm)``: `Intracomm` with the messages of objects of `mpi4py.util.pkl5`, which keep
    large buffers out of pickles."""


class Intercomm(MPI.Intercomm):
    """mpi4py's; what it is merged to is an `Intracomm`."""

    __slots__ = ()


_KINDS: dict[type[MPI.Comm], type[MPI.Comm]] = {
    MPI.Cartcomm: Cartcomm,
    MPI.Graphcomm: Graphcomm,
    MPI.Distgraphcomm: Distgraphcomm,
    MPI.Intercomm: Intercomm,
    pkl5.Intracomm: Pkl5Intracomm,
    MPI.Intracomm: Intracomm,  # the last: others are of this kind, too
}
for _plain, _ours in _KINDS.items():  # petsc4py, for one, takes communicators by the module of their type
    _ours.__module__ = _plain.__module__


def drop_in(comm: AnyComm) -> AnyComm:
    """The same communicator with its collectives through hiercoll."""
    if isinstance(comm, Collectives) or comm == MPI.COMM_NULL:
        return comm
    ours = _KINDS.get(type(comm)) or next((ours for kind, ours in _KINDS.items() if isinstance(comm, kind)), None)
    return comm if ours is None else ours(comm)  # type: ignore[return-value]


def _describe(method: Callable[..., Any], name: str, native: Native) -> None:
    """Give a method the name of mpi4py's own, which a TypeError says, and what Python's help says of that."""
    method.__name__ = method.__qualname__ = name
    method.__doc__ = native.__doc__


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

        _describe(method, name, native)
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


def reduced(comm: Any) -> Any:
    """What pickles a communicator, one of mpi4py's or a drop-in one. Where the module's own is a drop-in one, it is
    nothing of hiercoll's, so that any process can read it, as mpi4py's. Raises ValueError, as mpi4py does, for others
    than the predefined ones."""
    name = _predefined(comm)
    found = None if name is None else getattr(MPI, name)
    if found is comm:
        return name
    if isinstance(found, Collectives) and type(comm) in (type(found), MPI.Intracomm):
        from copy import copy  # which few programs need

        return copy, (found,)
    if found is None or not isinstance(comm, Collectives):
        return MPI.Comm.__reduce__(comm)
    kind: Any = type(comm)
    return _revive, (kind.__name__ if kind in _KINDS.values() else kind, name)


def _revive(kind: str | type[MPI.Comm], name: str) -> MPI.Comm:
    wanted, found = globals()[kind] if isinstance(kind, str) else kind, getattr(MPI, name)
    return found if isinstance(found, wanted) else wanted(found)


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

    def serve_call(self: Any, arguments: Arguments, given: tuple[Any, ...]) -> str:
        if self.handle not in by_handle:
            if _is_left(self, arguments):
                native(self, *given)  # which raises what is wrong
                return NATIVE
            first = None if uses_device(arguments) else first_calls(self, collective, arguments)
            if first is not None:
                serve_first(first, collective, arguments, partial(native, self, *given))
                return NATIVE
        return served.blocking(self, collective, arguments, given, native)

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


def _is_left(comm: Any, given: Arguments) -> bool:
    """Whether a call is mpi4py's, whatever other ranks do: on COMM_NULL, which it refuses, or from an exit handler when
    hiercoll has ended, but not with arrays of devices, which the MPI library may not be given."""
    return bool(comm == MPI.COMM_NULL) or (has_ended() and not uses_device(given))


def _nonblocking(comm: Any, collective: Collective, given: Arguments) -> MPI.Request | None:
    """Start a call; None leaves it to MPI, with nothing done."""
    if _is_left(comm, given):
        return None
    # MPI lets no nonblocking call wait for other ranks: a session must have been made before. With arrays of devices,
    # which MPI may not be given, the first call waits.
    if not uses_device(given) and isinstance(state := met_so_far(comm), Beginning | Alike):
        remember_all_begun(state, collective)
        return None
    return served.nonblocking(comm, collective, given)


def _persistent(comm: Any, collective: Collective, given: Arguments) -> MPI.Request | None:
    """A persistent call; None leaves it to MPI, with nothing done."""
    if _is_left(comm, given):
        return None
    if not uses_device(given) and is_disabled(comm):
        return None
    return served.persistent(comm, collective, given)


def _known_begun(comm: Any, collective: Collective, given: Arguments) -> MPI.Request | None:
    """Start a call that is watched as the compiled engine does where nobody looks on, if it is known."""
    return served.known_begun(comm, collective, given)


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


def _with_words(method: Method, native: Native, least: int) -> Method:
    """A method that lets mpi4py's own say that arguments are missing."""

    @wraps(method)
    def checked(self: Any, *given: Any, **options: Any) -> Any:
        if len(given) + len(options) < least:
            native(self, *given, **options)
        return method(self, *given, **options)

    return checked


def _add_methods() -> None:
    """Give drop-in communicators the methods of all collectives, in their three forms, with mpi4py's words."""
    for collective in called():
        methods = {
            collective.native: _blocking(collective),
            collective.nonblocking: _returning(collective, collective.nonblocking, Mode.BACKGROUND),
            collective.persistent: _returning(collective, collective.persistent, Mode.HELD),
        }
        for name, served_method in methods.items():
            native = getattr(MPI.Comm, name)
            method = _with_words(served_method, native, collective.buffers)
            for each in (served_method, method):
                _describe(each, name, native)
            forms = {collective.native: collective, collective.nonblocking: collective.in_background}
            if name in forms:
                more, begun = (collective.buffers, collective.more), requests.begun
                method = compiled.method(MPI.Intracomm, name, forms[name], *more, method, begun)
            setattr(Collectives, name, method)


_add_methods()

with suppress(ArgumentError):  # the first call raises it
    if settings.is_special():  # it sets hiercoll up: what that takes to import is not to be waited for by other ranks
        load("hiercoll.calls.served")
