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
from time import perf_counter
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from hiercoll import progress, requests
from hiercoll.api import Call, allgather, alltoall, known_plan, said, serve
from hiercoll.buffers import UserBuffer
from hiercoll.checking import Said
from hiercoll.communicator import State
from hiercoll.cuda import is_device_array
from hiercoll.errors import ArgumentError, CommunicatorError
from hiercoll.executor import Plan
from hiercoll.lifetime import by_handle, get_state, known_state
from hiercoll.messages import UNREADABLE, Message, basic_type, block_message, is_in_place
from hiercoll.tables import NATIVE
from hiercoll.transports import DIRECT
from hiercoll.vectors import Call as VectorCall
from hiercoll.vectors import (
    Side,
    allgatherv_call,
    alltoallv,
    alltoallv_call,
    chosen_for_good,
    in_regime,
    run_again,
    serve_vector,
    side,
)
from hiercoll.work import Work

AnyComm = TypeVar("AnyComm", bound=MPI.Comm)
calls: Counter[str] = Counter()  # by collective, of this process: those that hiercoll served
forced: dict[str, tuple[str, dict[str, Any]]] = {}  # algorithm and parameters instead of "auto", by collective
AUTO: tuple[str, dict[str, Any]] = ("auto", {})
_NO_PARAMS: dict[str, Any] = {}
_ALLTOALL, _ALLGATHER = MPI.Comm.Alltoall, MPI.Comm.Allgather
_NATIVE_CALLS = {name: f"{name}, native" for name in ("alltoall", "allgather")}  # as counted


class Collectives:
    """What is different in a drop-in communicator."""

    def Alltoall(self: Any, sendbuf: Any, recvbuf: Any) -> None:  # noqa: N802
        """As mpi4py's."""
        if not _even(self, "alltoall", sendbuf, recvbuf):
            _ALLTOALL(self, sendbuf, recvbuf)

    def Allgather(self: Any, sendbuf: Any, recvbuf: Any) -> None:  # noqa: N802
        """As mpi4py's."""
        if not _even(self, "allgather", sendbuf, recvbuf):
            _ALLGATHER(self, sendbuf, recvbuf)

    def Alltoallv(self: Any, sendbuf: Any, recvbuf: Any) -> None:  # noqa: N802
        """As mpi4py's."""
        native = super().Alltoallv  # type: ignore[misc]
        known = by_handle.get(self.handle)
        if known is not None and known.unwatched and known.choices.regime.is_native and not forced:
            known.choices.regime.left -= 1
            if known.choices.regime.is_surely_native:
                _go_past(self, native)
            calls["alltoallv, native"] += 1
            if progress.active:
                progress.before_blocking()
            native(sendbuf, recvbuf)
            return
        if known is not None and not forced and run_again(known, sendbuf, recvbuf):
            calls["alltoallv"] += 1
            return
        state = _state(self)
        if state is None or (forced and _on_device(recvbuf)):
            native(sendbuf, recvbuf)
            return
        calls["alltoallv"] += 1
        try:
            if "alltoallv" in forced:
                name, params = forced["alltoallv"]
                alltoallv(self, MPI.IN_PLACE if sendbuf is None else sendbuf, recvbuf, algorithm=name, **params)
            else:
                in_regime(state, sendbuf, recvbuf, native)
        except CommunicatorError:
            raise
        except ArgumentError:
            native(sendbuf, recvbuf)

    def Allgatherv(self: Any, sendbuf: Any, recvbuf: Any) -> None:  # noqa: N802
        """As mpi4py's."""
        state = _state(self)
        if state is not None and not _on_device(recvbuf):
            try:
                serve_vector(state, "allgatherv", sendbuf, recvbuf, *forced.get("allgatherv", AUTO))
            except CommunicatorError:
                raise
            except ArgumentError:
                state = None
            else:
                calls["allgatherv"] += 1
                return
        super().Allgatherv(sendbuf, recvbuf)  # type: ignore[misc]

    @property
    def plain(self: Any) -> MPI.Intracomm:
        """The same communicator with mpi4py's own collectives."""
        return MPI.Intracomm(self)

    def free(self: Any) -> None:
        """As mpi4py's: the predefined communicators of the module stay."""
        if self is not MPI.COMM_WORLD and self is not MPI.COMM_SELF:
            super().free()  # type: ignore[misc]

    @classmethod
    def fromhandle(cls: Any, handle: int) -> Any:
        """As mpi4py's, of this kind."""
        return drop_in(super().fromhandle(handle))  # type: ignore[misc]

    def __reduce__(self: Any) -> Any:
        name = _predefined(self)
        return super().__reduce__() if name is None else (_revive, (type(self), name))


_ALLTOALLV = Collectives.Alltoallv


class Intracomm(Collectives, MPI.Intracomm):
    """``hiercoll.Intracomm(comm)``: ``comm`` itself, with its collectives through hiercoll.

    Alltoall, Alltoallv, Allgather and Allgatherv are served by hiercoll, with their
    nonblocking and persistent forms (see `requests`), all else by mpi4py.
    Communicators made from it are of its kind. See mpi4py's Intracomm.
    """


class Cartcomm(Collectives, MPI.Cartcomm):
    """`Intracomm` with a Cartesian topology."""


class Graphcomm(Collectives, MPI.Graphcomm):
    """`Intracomm` with a graph topology."""


class Distgraphcomm(Collectives, MPI.Distgraphcomm):
    """`Intracomm` with a distributed graph topology."""


class Intercomm(MPI.Intercomm):
    """mpi4py's; what it is merged to is an `Intracomm`."""


_KINDS: tuple[tuple[type[MPI.Comm], type[MPI.Comm]], ...] = (
    (MPI.Cartcomm, Cartcomm),
    (MPI.Graphcomm, Graphcomm),
    (MPI.Distgraphcomm, Distgraphcomm),
    (MPI.Intercomm, Intercomm),
    (MPI.Intracomm, Intracomm),
)


def drop_in(comm: AnyComm) -> AnyComm:
    """The same communicator with its collectives through hiercoll."""
    if comm == MPI.COMM_NULL or isinstance(comm, Collectives):
        return comm
    for kind, ours in _KINDS:
        if isinstance(comm, kind):
            return ours(comm)  # type: ignore[return-value]
    return comm


def _keep(owner: type, *names: str) -> None:
    """Let methods that make communicators make those of this kind."""
    for name in names:

        def method(self: Any, *args: Any, _name: str = name, **options: Any) -> Any:
            return drop_in(getattr(super(owner, self), _name)(*args, **options))

        method.__name__, method.__doc__ = name, "As mpi4py's, of this kind."
        setattr(owner, name, method)


def _serve(name: str, collective: str, serve_by: Callable[[Any, str, Any, Any], MPI.Request | None]) -> None:
    """Let a method that returns a request be served by hiercoll."""

    def method(self: Any, sendbuf: Any, recvbuf: Any, *args: Any, **options: Any) -> MPI.Request:
        request = serve_by(self, collective, sendbuf, recvbuf)
        native = getattr(super(Collectives, self), name)
        return native(sendbuf, recvbuf, *args, **options) if request is None else request

    method.__name__, method.__doc__ = name, "As mpi4py's."
    setattr(Collectives, name, method)


_keep(Collectives, "Create", "Create_cart", "Create_dist_graph", "Create_dist_graph_adjacent", "Create_graph")
_keep(Collectives, "Create_group", "Create_intercomm", "Split", "Split_type")
_keep(Cartcomm, "Sub")
_keep(Intercomm, "Merge")


def _predefined(comm: MPI.Comm) -> str | None:
    """The name of one of MPI's own communicators."""
    return next((name for name in ("COMM_NULL", "COMM_SELF", "COMM_WORLD") if comm == getattr(MPI, name)), None)


def _revive(kind: type[MPI.Comm], name: str) -> MPI.Comm:
    found = getattr(MPI, name)
    return found if isinstance(found, kind) else kind(found)


def _go_past(comm: Any, native: Callable[..., None]) -> None:
    """Let this object's Alltoallv be mpi4py's own from now on: what nobody sees costs nothing. Not
    where somebody watches the calls, and until somebody does (see `progress`)."""
    if type(comm).Alltoallv is _ALLTOALLV:
        progress.take_shortcut(partial(_come_back, ref(comm)))
        comm.Alltoallv = native


def _come_back(comm: Callable[[], Any]) -> None:
    if (alive := comm()) is not None:
        vars(alive).pop("Alltoallv", None)


def _state(comm: Any) -> State | None:
    """The state of a communicator that hiercoll serves; None for one that is left to MPI."""
    if comm == MPI.COMM_NULL:
        return None
    state = get_state(comm)
    return None if state.size == 1 or state.disabled else state


class Blocks(NamedTuple):
    """A sound call with equal blocks of ``block`` bytes: what is sent (None: in place), and where it is received."""

    state: State
    collective: str
    out: Message | None
    into: Message
    block: int

    @property
    def sent(self) -> int:
        """How many blocks this rank sends."""
        return self.state.size if self.collective == "alltoall" else 1

    @property
    def is_plain(self) -> bool:
        """Whether blocks are just bytes in their order, in both buffers."""
        return all(message.element.plain and message.address for message in (self.out, self.into) if message)

    def work(self, *, held: bool = False) -> Work:
        """What runs, in a call or (``held``) as a persistent request."""
        name, params = forced.get(self.collective, AUTO)
        variant = self.state.choices.select(self.collective, name, params, self.block, self.out is None, held=held)
        return Work(self.collective, variant.algorithm, variant.params, self.block, self.out is None)

    def said(self, collective: str) -> Said:
        """As ranks compare it. The smallest parts of a datatype are what must be the same on all of them."""
        name, params = forced.get(self.collective, AUTO)
        return said(collective, name, params, self.out is None, self.block, basic_type(self.into.datatype))

    def sides(self) -> tuple[Side, Side]:
        """Where data lie to be sent and received: in the user's buffers, or in copies of them."""
        received = side(self.state, self.into, self.state.size, "recvbuf")
        if self.out is not None:
            return side(self.state, self.out, self.sent, "sendbuf"), received
        if not received.copying:
            return received, received
        return side(self.state, self.into, self.state.size, "sendbuf", into=received.owner), received

    def plan(self, make: Callable[[Work, str, int, int], Plan], work: Work) -> Plan:
        """A plan that the state makes."""
        sent, received = self.sides()
        plan = make(work, "host", sent.address + int(sent.at[0]), received.address + int(received.at[0]))
        plan.surround(sent.copying, received.copying)
        plan.keep_alive(sent.owner, received.owner)
        return plan


def _blocks(state: State, collective: str, sendbuf: Any, recvbuf: Any) -> Blocks | None:
    """The call, if it is sound; else mpi4py, or the MPI library, says what is wrong."""
    size = state.size
    try:
        into = block_message(recvbuf, size, readonly=False)
        out = (
            None
            if is_in_place(sendbuf)
            else block_message(sendbuf, size if collective == "alltoall" else 0, readonly=True)
        )
    except UNREADABLE:
        return None
    block = into.counts * into.element.size
    if out is not None and out.counts * out.element.size != block:
        return None
    return Blocks(state, collective, out, into, block)


def _even(comm: Any, collective: str, sendbuf: Any, recvbuf: Any) -> bool:
    """Serve a call with equal blocks; False leaves it to MPI, with nothing done."""
    known = by_handle.get(comm.handle)
    if known is not None and (known.size == 1 or known.disabled):
        return False
    if type(recvbuf) is ndarray and type(sendbuf) is ndarray and not forced:
        if known is not None and (collective, recvbuf.nbytes) in known.choices.native_sizes and known.broken is None:
            calls[_NATIVE_CALLS[collective]] += 1
            if progress.active:
                progress.before_blocking()
            return False
        state, plan = known_plan(comm, collective, sendbuf, recvbuf, "auto", _NO_PARAMS)
        # Not a native one, unless calls are watched: ranks without it would go to the user's communicator.
        if state is not None and plan is not None and (plan.schedule is not None or not state.unwatched):
            calls[collective] += 1
            state.run(plan)
            return True
    state = _state(comm)
    if state is None or _on_device(recvbuf):
        return state is not None and _on_devices(comm, collective, sendbuf, recvbuf)
    call = _blocks(state, collective, sendbuf, recvbuf)
    return call is not None and _serve_blocks(call)


def _serve_blocks(call: Blocks) -> bool:
    """Serve a call that is sound; False leaves it to MPI, as do all ranks."""
    state, collective = call.state, call.collective
    trial = None if collective in forced else state.choices.trial(collective, call.block, call.out is None)
    if call.block and state.unwatched and trial is None and call.work().is_native:
        if call.out is not None and not forced:
            state.choices.native_sizes.add((collective, call.block * state.size))
        calls[_NATIVE_CALLS[collective]] += 1
        progress.before_blocking()
        return False  # on the user's communicator, on all ranks, however they spell it
    calls[collective] += 1
    if state.check:
        state.same_call(call.said(collective))
    if not call.block:
        return True
    if call.is_plain:
        sent = None if call.out is None else _user_buffer(call.out, call.block * call.sent)
        received = _user_buffer(call.into, call.block * state.size)
        serve(Call(state, collective, sent, received, call.block, DIRECT, False, 0), *forced.get(collective, AUTO))
        return True
    begin = perf_counter()
    plan = call.plan(state.cached_plan, call.work())
    state.run(plan)
    plan.free()
    if trial is not None:
        trial.note(perf_counter() - begin)
    return True


def _even_nonblocking(comm: Any, collective: str, sendbuf: Any, recvbuf: Any) -> MPI.Request | None:
    """Start a call with equal blocks; None leaves it to MPI, with nothing done."""
    state = _state_for_background(comm, recvbuf)
    call = state and _blocks(state, collective, sendbuf, recvbuf)
    if not state or not call or not (call.block or state.check):
        return None
    work = state.without_shared(call.work(), free=collective not in forced)
    if state.leaves_to_mpi(work):
        return None
    calls[f"i{collective}"] += 1
    plan = call.plan(state.background_plan, work)
    return requests.nonblocking(state, plan, partial(call.said, f"i{collective}"))


def _even_persistent(comm: Any, collective: str, sendbuf: Any, recvbuf: Any) -> MPI.Prequest | None:
    """A persistent call with equal blocks; None leaves it to MPI, with nothing done."""
    state = _state(comm)
    if state is None or state.threadless or _on_device(recvbuf):
        return None
    call = _blocks(state, collective, sendbuf, recvbuf)
    if call is None or not call.block:
        return None
    work = call.work(held=True)
    if work.algorithm == NATIVE:
        return None
    calls[f"{collective}_init"] += 1
    return requests.persistent(state, call.plan(state.own_plan, work))


def _uneven_nonblocking(comm: Any, collective: str, sendbuf: Any, recvbuf: Any) -> MPI.Request | None:
    """Start a call with uneven blocks; None leaves it to MPI, with nothing done."""
    state = _state_for_background(comm, recvbuf)
    call = state and _uneven(state, collective, sendbuf, recvbuf, forced.get(collective, AUTO))
    if not state or not call:
        return None
    work = state.without_shared(call.work, free=collective not in forced)
    if state.leaves_to_mpi(work):
        return None
    calls[f"i{collective}"] += 1
    call = call._replace(work=work)
    return requests.nonblocking(state, call.plan(background=True), partial(call.said, "i"))


def _uneven_persistent(comm: Any, collective: str, sendbuf: Any, recvbuf: Any) -> MPI.Prequest | None:
    """A persistent call with uneven blocks; None leaves it to MPI, with nothing done."""
    state = _state(comm)
    if state is None or state.threadless:
        return None
    chosen = forced.get(collective)
    if chosen is None and collective == "alltoallv":
        chosen = chosen_for_good(state, sendbuf, recvbuf)  # native for all where one rank cannot be served
    call = _uneven(state, collective, sendbuf, recvbuf, chosen or AUTO, held=True)
    if call is None or call.work.algorithm == NATIVE:
        return None
    calls[f"{collective}_init"] += 1
    return requests.persistent(state, call.plan(own=True))


def _uneven(
    state: State,
    collective: str,
    sendbuf: Any,
    recvbuf: Any,
    chosen: tuple[str, dict[str, Any]],
    *,
    held: bool = False,
) -> VectorCall | None:
    """The call, if it is sound."""
    make = alltoallv_call if collective == "alltoallv" else allgatherv_call
    try:
        return make(state, sendbuf, recvbuf, *chosen, held=held)
    except CommunicatorError:
        raise
    except ArgumentError:
        return None


def _state_for_background(comm: Any, recvbuf: Any) -> State | None:
    """The state, if a call has made one (MPI lets no nonblocking call wait for other ranks), and there
    can be a thread."""
    state = None if comm == MPI.COMM_NULL else known_state(comm)
    if state is None or state.size == 1 or state.disabled or state.threadless or _on_device(recvbuf):
        return None
    return state


def _on_device(spec: Any) -> bool:
    """Whether a buffer specification is of device memory."""
    return is_device_array(spec[0] if isinstance(spec, list | tuple) and spec else spec)


def _on_devices(comm: Any, collective: str, sendbuf: Any, recvbuf: Any) -> bool:
    """Serve a call on device arrays; False leaves it to MPI, with nothing done."""
    try:
        (alltoall if collective == "alltoall" else allgather)(
            comm, MPI.IN_PLACE if sendbuf is None else sendbuf, recvbuf
        )
    except CommunicatorError:
        raise
    except ArgumentError:
        return False
    calls[collective] += 1
    return True


def _user_buffer(message: Message, nbytes: int) -> UserBuffer:
    """The blocks of a message, which are just bytes in their order."""
    address = message.address + message.displs * message.element.extent
    dtype = getattr(message.buffer, "dtype", np.dtype(np.uint8))
    return UserBuffer(address, nbytes, 1, message.buffer, dtype)


for _collective in ("alltoall", "allgather"):
    _serve(f"I{_collective}", _collective, _even_nonblocking)
    _serve(f"{_collective.capitalize()}_init", _collective, _even_persistent)
for _collective in ("alltoallv", "allgatherv"):
    _serve(f"I{_collective}", _collective, _uneven_nonblocking)
    _serve(f"{_collective.capitalize()}_init", _collective, _uneven_persistent)
