"""Communicators that send mpi4py's collectives through hiercoll.

`Intracomm` is mpi4py's, and means what mpi4py's means. Whether a call goes through hiercoll
depends on nothing that may differ between ranks: the collective, and the communicator. What
ranks may well spell differently (datatypes, gaps, counts in other units) each rank brings into
shape for itself. Arguments that mpi4py refuses are mpi4py's to refuse.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from hiercoll.api import Call, allgather, alltoall, known_plan, serve
from hiercoll.buffers import UserBuffer
from hiercoll.communicator import State
from hiercoll.cuda import is_device_array
from hiercoll.errors import ArgumentError, CommunicatorError
from hiercoll.lifetime import by_handle, get_state
from hiercoll.messages import Message, block_message, is_in_place
from hiercoll.transports import DIRECT
from hiercoll.vectors import allgatherv_call, alltoallv, in_regime, side
from hiercoll.work import Work

AnyComm = TypeVar("AnyComm", bound=MPI.Comm)
calls: Counter[str] = Counter()  # by collective, of this process: those that hiercoll served
forced: dict[str, tuple[str, dict[str, Any]]] = {}  # algorithm and parameters instead of "auto", by collective
AUTO: tuple[str, dict[str, Any]] = ("auto", {})


class Collectives:
    """What is different in a drop-in communicator."""

    def Alltoall(self: Any, sendbuf: Any, recvbuf: Any) -> None:  # noqa: N802
        """As mpi4py's."""
        if not _even(self, "alltoall", sendbuf, recvbuf):
            super().Alltoall(sendbuf, recvbuf)  # type: ignore[misc]

    def Allgather(self: Any, sendbuf: Any, recvbuf: Any) -> None:  # noqa: N802
        """As mpi4py's."""
        if not _even(self, "allgather", sendbuf, recvbuf):
            super().Allgather(sendbuf, recvbuf)  # type: ignore[misc]

    def Alltoallv(self: Any, sendbuf: Any, recvbuf: Any) -> None:  # noqa: N802
        """As mpi4py's."""
        native = super().Alltoallv  # type: ignore[misc]
        known = by_handle.get(self.handle)
        if known is not None and known.unwatched and known.regime.is_native and not forced:
            known.regime.left -= 1
            calls["alltoallv, native"] += 1
            native(sendbuf, recvbuf)
            return
        state = _state(self)
        if state is None or _on_device(recvbuf):
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
        try:
            call = (
                None
                if state is None or _on_device(recvbuf)
                else allgatherv_call(state, sendbuf, recvbuf, *forced.get("allgatherv", AUTO))
            )
        except ArgumentError:
            call = None
        if call is None:
            super().Allgatherv(sendbuf, recvbuf)  # type: ignore[misc]
        else:
            calls["allgatherv"] += 1
            call.run()

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


class Intracomm(Collectives, MPI.Intracomm):
    """``hiercoll.Intracomm(comm)``: ``comm`` itself, with its collectives through hiercoll.

    Alltoall, Alltoallv, Allgather and Allgatherv are served by hiercoll, all else by
    mpi4py. Communicators made from it are of its kind. See mpi4py's Intracomm.
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


def _state(comm: Any) -> State | None:
    """The state of a communicator that hiercoll serves; None for one that is left to MPI."""
    if comm == MPI.COMM_NULL:
        return None
    state = get_state(comm)
    return None if state.size == 1 or state.disabled else state


def _even(comm: Any, collective: str, sendbuf: Any, recvbuf: Any) -> bool:
    """Serve a call with equal blocks; False leaves it to MPI, with nothing done."""
    known = by_handle.get(comm.handle)
    if known is not None and known.size == 1:
        return False
    if type(recvbuf) is np.ndarray and type(sendbuf) is np.ndarray:
        state, plan = known_plan(comm, collective, sendbuf, recvbuf, "auto") if not forced else (None, None)
        if state is not None and plan is not None:
            calls[collective] += 1
            state.run(plan)
            return True
    state = _state(comm)
    if state is None or _on_device(recvbuf):
        return state is not None and _on_devices(comm, collective, sendbuf, recvbuf)
    size = state.size
    try:
        into = block_message(recvbuf, size, readonly=False)
        out = (
            None
            if is_in_place(sendbuf)
            else block_message(sendbuf, size if collective == "alltoall" else 0, readonly=True)
        )
    except (TypeError, ValueError, KeyError, BufferError, MPI.Exception):
        return False  # for mpi4py to say
    block = into.counts * into.element.size
    if out is not None and out.counts * out.element.size != block:
        return False  # an error that the MPI library may report
    calls[collective] += 1
    if not block:
        return True
    if _is_plain(into) and (out is None or _is_plain(out)):
        sent = None if out is None else _user_buffer(out, block * (size if collective == "alltoall" else 1))
        received = _user_buffer(into, block * size)
        serve(Call(state, collective, sent, received, block, DIRECT, False, 0), *forced.get(collective, AUTO))
    else:
        _by_copies(state, collective, out, into, block)
    return True


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


def _is_plain(message: Message) -> bool:
    return message.element.plain and bool(message.address)


def _user_buffer(message: Message, nbytes: int) -> UserBuffer:
    """The blocks of a message, which are just bytes in their order."""
    address = message.address + message.displs * message.element.extent
    dtype = getattr(message.buffer, "dtype", np.dtype(np.uint8))
    return UserBuffer(address, nbytes, 1, message.buffer, dtype)


def _by_copies(state: State, collective: str, out: Message | None, into: Message, block: int) -> None:
    """A call on copies, where elements are not just bytes in their order."""
    size = state.size
    received = side(state, into, size, "recvbuf")
    blocks = size if collective == "alltoall" else 1
    sent = None if out is None else side(state, out, blocks, "sendbuf")
    loads = [*sent.copying] if sent else []
    if sent is None and received.copying:
        loads = [*side(state, into, size, "sendbuf", into=received.owner).copying]
    variant = state.select(collective, *forced.get(collective, AUTO), block, out is None)
    work = Work(collective, variant.algorithm, variant.params, block, out is None)
    plan = state.cached_plan(
        work, "host", sent.address + int(sent.at[0]) if sent else 0, received.address + int(received.at[0])
    )
    for transfer in loads:
        transfer.start()
    state.run(plan)
    plan.free()
    for transfer in received.copying:
        transfer.start()
