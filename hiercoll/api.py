"""The calls that users make."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from hiercoll.buffers import Array, UserBuffer, check_disjoint, counted_buffer, host_buffer
from hiercoll.checking import Said
from hiercoll.communicator import State
from hiercoll.cuda import device_at, is_device_array
from hiercoll.cuda.arrays import LEGACY, device_array, new_like
from hiercoll.errors import BufferSizeError, BufferTypeError, ConstraintError, ParameterError
from hiercoll.executor import Plan
from hiercoll.lifetime import by_handle, get_state, get_topology
from hiercoll.online import Trial
from hiercoll.tables import Table, Variant
from hiercoll.transports import AUTO, DIRECT, Transport, parse_transport
from hiercoll.work import Work

Buffer: TypeAlias = Any  # an array, a buffer, or a list [buffer, count, MPI datatype]

__all__ = ["Plan", "allgather", "allgather_init", "alltoall", "alltoall_init", "configure", "get_topology"]

_address = MPI.Get_address
_PLAIN = frozenset((int, str))  # types of parameters


def alltoall(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Send block j of ``sendbuf`` to rank j, receive block i of the result from rank i.

    ``sendbuf``: a contiguous array of any fixed-size dtype whose elements divide into
    comm.size equal blocks (in memory order), an mpi4py buffer specification
    ``[buffer, count per block, MPI datatype]``, or ``MPI.IN_PLACE``. ``recvbuf``: an
    array of as many bytes and the same dtype; None for a new one like ``sendbuf``.
    ``algorithm`` and ``params``: see ``hiercoll list``; "auto" picks by a tuning table (see `configure`) and is
    "native" without one, which is ``comm.Alltoall`` itself. All ranks pass the same ones.

    Device arrays (anything with the CUDA array interface) on all ranks alike: what has been
    enqueued on ``stream`` (a stream or its handle; by default that of sendbuf) comes first,
    and the result is there at return. ``transport``: "direct" gives device memory to MPI,
    "staged" takes messages through the host, "staged:4" in four parts; "peer" lets the ranks
    of a node copy from each other's memory (and does between nodes what "auto" does); "auto" is
    direct where the library says that it takes device memory (or HIERCOLL_CUDA_AWARE=1 does),
    else staged.

    Returns the receive array (a NumPy view of it where recvbuf is another kind of buffer).
    Raises an ArgumentError before any data moves:
    BufferSizeError, BufferTypeError, BufferOverlapError, CommunicatorError,
    UnknownAlgorithmError, ParameterError, ConstraintError. Collective (MPI 4.1, 6.8).
    """
    if type(recvbuf) is np.ndarray and type(sendbuf) is np.ndarray:
        state, plan = known_plan(comm, "alltoall", sendbuf, recvbuf, algorithm, params)
        if state is not None and plan is not None:
            state.run(plan)
            return recvbuf
    return _call(comm, "alltoall", sendbuf, recvbuf, algorithm, params, Way(transport, stream))


def allgather(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Gather the ``sendbuf`` of every rank, in rank order, on every rank.

    As `alltoall`, with ``sendbuf`` as the rank's one block; the result has comm.size
    blocks, and when new the shape ``(comm.size, *sendbuf.shape)``. With
    ``MPI.IN_PLACE`` the rank's block lies in its place in ``recvbuf``. Collective
    (MPI 4.1, 6.7).
    """
    if type(recvbuf) is np.ndarray and type(sendbuf) is np.ndarray:
        state, plan = known_plan(comm, "allgather", sendbuf, recvbuf, algorithm, params)
        if state is not None and plan is not None:
            state.run(plan)
            return recvbuf
    return _call(comm, "allgather", sendbuf, recvbuf, algorithm, params, Way(transport, stream))


def alltoall_init(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `alltoall` on these buffers, to be started as often as wanted.

    Arguments and errors as for `alltoall`. Collective; all ranks make their plans in
    the same order. The plan keeps the buffers alive until `Plan.free`.
    """
    return _plan(comm, "alltoall", sendbuf, recvbuf, algorithm, params, Way(transport, stream))


def allgather_init(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `allgather` on these buffers; see `alltoall_init`."""
    return _plan(comm, "allgather", sendbuf, recvbuf, algorithm, params, Way(transport, stream))


def configure(
    comm: MPI.Intracomm,
    *,
    table: Table | str | Path | None = None,
    tune: Literal["online"] | None = None,
    timeout: float | None = None,
) -> None:
    """How ``algorithm="auto"`` decides on ``comm`` from now on. Collective.

    ``table``: a tuning table or its file, read by rank 0; None for the one that
    ``HIERCOLL_TABLE`` names or that lies in the user's configuration folder, if any; where
    there is none, "auto" is "native". The name "model" instead of a file's lets the cost model decide, which
    knows nothing of the MPI library's own collectives. ``tune="online"``: the first calls of each size try
    candidates, and one that has proved faster than native serves the later ones; for long jobs. `alltoall_init`
    and `allgather_init` use what was found, but try nothing. ``timeout``: seconds that a call may wait before
    it raises CollectiveTimeout, 0 for ever; None leaves it as it is (at first ``HIERCOLL_TIMEOUT``).

    Raises TableError (on all ranks) for a table that cannot be used, ParameterError for
    another ``tune`` or ``timeout``.
    """
    state = get_state(comm)
    if tune not in (None, "online"):
        raise ParameterError("tune", "'online' or None", repr(tune), state.rank)
    if timeout is not None and not 0 <= timeout < float("inf"):
        raise ParameterError("timeout", "a number of seconds, 0 for no deadline", repr(timeout), state.rank)
    state.use_table(table)
    state.choices.online = tune == "online"
    if timeout is not None:
        state.set_timeout(float(timeout))


def known_plan(
    comm: MPI.Intracomm, collective: str, send: Array, recv: Array, algorithm: str, params: dict[str, Any]
) -> tuple[State, Plan] | tuple[None, None]:
    """The state, and the cached plan, of a call seen before with arrays at these addresses.

    Equal addresses, sizes and types need no second check; contiguity is checked by
    `MPI.Get_address`, and that recv is writable below. The slow path says what is wrong.
    """
    try:
        state = by_handle[comm.handle]
        key = (collective, algorithm, _address(send), _address(recv), send.nbytes, recv.nbytes)
        if params:
            if not _PLAIN.issuperset(map(type, params.values())):  # True and 2.0 equal numbers, but are refused
                return None, None
            key += tuple(params.items())  # type: ignore[assignment]
        plan: Plan = state.plans[key]
    except (KeyError, AttributeError, BufferError, TypeError, MPI.Exception):
        return None, None
    if plan.dtypes[0] is not send.dtype or plan.dtypes[1] is not recv.dtype or not recv.flags.writeable:
        return None, None
    if state.check or state.broken is not None:
        return None, None
    state.touch(key, plan)
    return state, plan


class Way(NamedTuple):
    """How messages of device memory travel, and the stream that produces them: as given."""

    transport: Any
    stream: Any

    def chosen(self, state: State, place: str) -> Transport:
        """Collective at the first use of "peer" on a communicator. Raises ParameterError, or
        ConstraintError for direct messages that MPI may not be given."""
        try:
            name, parts = parse_transport(self.transport)
        except ParameterError as error:
            raise ParameterError(error.argument, error.expected, error.got, state.rank) from None
        if place == "host":
            if name in ("staged", "peer"):
                expected = "'auto' or 'direct' for arrays on the host"
                raise ParameterError("transport", expected, repr(self.transport), state.rank)
            return DIRECT
        if name == "direct" and state.stages:
            expected = "an MPI library that takes device memory (where it does: HIERCOLL_CUDA_AWARE=1)"
            raise ConstraintError("transport 'direct'", expected, state.library, state.rank)
        segments = 1 if name == "staged" else int(state.stages)
        return Transport(name == "peer" and state.memories.mates_in_reach(place), parts or segments)

    def handle(self, state: State, array: UserBuffer) -> int:
        """The stream: as given, else that of the input."""
        if self.stream is None:
            return array.stream
        for name in ("ptr", "cuda_stream", "handle"):  # CuPy, PyTorch, cuda.core
            if hasattr(self.stream, name):
                return int(getattr(self.stream, name)) or LEGACY
        if isinstance(self.stream, int) and not isinstance(self.stream, bool):
            return self.stream or LEGACY
        raise ParameterError("stream", "a CUDA stream, or its handle", repr(self.stream), state.rank)


def said(collective: str, algorithm: str, params: dict[str, Any], inplace: bool, block: int, elements: str) -> Said:
    """A call with equal blocks, as ranks compare it."""
    given = " ".join([str(algorithm), *(f"{name}={value}" for name, value in params.items())])
    place = "in place" if inplace else "not in place"
    return Said(f"{collective} {given}, {place}, {block} bytes per block", elements)


class Call(NamedTuple):
    """A call that is sound: buffers (``sent`` None for in place), bytes per block, transport
    (``free``: "auto" may choose another) and stream."""

    state: State
    collective: str
    sent: UserBuffer | None
    received: UserBuffer
    block: int
    transport: Transport
    free: bool
    stream: int

    @property
    def inplace(self) -> bool:
        """Whether the input lies in the receive buffer."""
        return self.sent is None

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the two buffers."""
        return self.sent.address if self.sent else 0, self.received.address

    @property
    def dtypes(self) -> tuple[Any, Any]:
        """Of the two buffers."""
        return self.sent.dtype if self.sent else None, self.received.dtype

    def key(self, algorithm: str, params: dict[str, Any]) -> tuple[Any, ...]:
        """What the plan of a blocking call is kept under; see `known_plan`."""
        name = algorithm if isinstance(algorithm, str) else repr(algorithm)  # to be refused by `select`
        given = [(name, value if type(value) in _PLAIN else repr(value)) for name, value in params.items()]
        sizes = (self.sent.nbytes if self.sent else 0, self.received.nbytes)
        key = (self.collective, name, *self.addresses, *sizes, *given)
        return key if self.received.place == "host" else (*key, self.received.place, self.transport)

    def said(self, collective: str, algorithm: str, params: dict[str, Any]) -> Said:
        """As ranks compare it."""
        elements = str(self.received.dtype) if self.received.typed else ""
        return said(collective, algorithm, params, self.inplace, self.block, elements)

    def chosen(self, algorithm: str, params: dict[str, Any], *, held: bool = False) -> Work:
        """What runs, in a call or a plan (``held``). Raises UnknownAlgorithmError or ParameterError."""
        kind = self.state.memories[self.received.place].kind
        select = self.state.choices.select
        return self.work(select(self.collective, algorithm, params, self.block, self.inplace, kind, held))

    def work(self, variant: Variant) -> Work:
        """The call with this algorithm, and with its transport where that is free and can be."""
        place, transport = self.received.place, self.transport
        other = variant.transport != AUTO and not (variant.transport == "direct" and self.state.stages)
        if self.free and other and place != "host":
            transport = Way(variant.transport, None).chosen(self.state, place)
        kind = self.state.memories[place].kind
        return Work(self.collective, variant.algorithm, variant.params, self.block, self.inplace, kind, transport)

    def cached_plan(self, work: Work) -> Plan:
        """A plan for a blocking call."""
        return self.state.cached_plan(work, self.received.place, *self.addresses)

    def run(self, plan: Plan) -> Any:
        """Run a cached plan. Returns the receive array."""
        plan.stream = self.stream
        self.state.run(plan)
        return self.received.array


def _call(
    comm: MPI.Intracomm,
    collective: str,
    send: Buffer,
    recv: Buffer,
    algorithm: str,
    params: dict[str, Any],
    way: Way,
) -> Any:
    """A blocking call, with all checks."""
    call = checked(comm, collective, send, recv, way)
    if call.state.check:
        call.state.same_call(call.said(collective, algorithm, params))
    return serve(call, algorithm, params)


def serve(call: Call, algorithm: str, params: dict[str, Any]) -> Any:
    """Run a call that is sound, by a plan that is kept. Returns the receive array."""
    state, key = call.state, call.key(algorithm, params)
    if algorithm == "auto" and state.choices.online:
        trial = state.choices.trial(call.collective, call.block, call.inplace, state.memories[call.received.place].kind)
        if trial is not None:
            return _try(call, trial)
    plan = state.plans.get(key)
    if plan is None or plan.dtypes != call.dtypes:
        plan = call.cached_plan(call.chosen(algorithm, params))
        plan.dtypes = call.dtypes
        state.plans.keep(key, plan)
    else:
        state.touch(key, plan)
    return call.run(plan)


def _try(call: Call, trial: Trial) -> Any:
    """A blocking call that is served, and timed, by what is being tried."""
    work = call.work(trial.current)
    key = ("trial", *work.key, *call.addresses)
    plan = call.state.plans.get(key)
    if plan is None:
        plan = call.cached_plan(work)
        call.state.plans.keep(key, plan)
    else:
        call.state.touch(key, plan)
    begin = perf_counter()
    result = call.run(plan)
    trial.note(perf_counter() - begin)
    return result


def _plan(
    comm: MPI.Intracomm,
    collective: str,
    send: Buffer,
    recv: Buffer,
    algorithm: str,
    params: dict[str, Any],
    way: Way,
) -> Plan:
    call = checked(comm, collective, send, recv, way)
    plan = call.state.own_plan(call.chosen(algorithm, params, held=True), call.received.place, *call.addresses)
    plan.recvbuf, plan.stream = call.received.array, call.stream
    plan.keep_alive(call.sent, call.received)
    return plan


def checked(comm: MPI.Intracomm, collective: str, send: Buffer, recv: Buffer, way: Way) -> Call:
    """The call, if it is sound."""
    state = get_state(comm)
    rank, size = state.rank, state.size
    sent = None
    if send is not MPI.IN_PLACE:
        sent = _buffer(state, send, "sendbuf", size if collective == "alltoall" else 1, writable=False)
    if recv is None:
        if sent is None:
            raise BufferTypeError("recvbuf", "an array, with sendbuf=MPI.IN_PLACE", "None", rank)
        received = _new_like(sent, size if collective == "allgather" else None, rank)
    else:
        received = _buffer(state, recv, "recvbuf", size, writable=True)
    if sent is not None:
        _check_pair(state, collective, sent, received)
    if received.nbytes % size or (received.item and received.nbytes // size % received.item):
        expected = f"a number of elements that {size} ranks divide"
        raise BufferSizeError("recvbuf", expected, received.items, rank)
    block = received.nbytes // size
    transport = way.chosen(state, received.place) if block else DIRECT
    free, stream = way.transport == AUTO, way.handle(state, sent or received)
    return Call(state, collective, sent, received, block, transport, free, stream)


def _check_pair(state: State, collective: str, sent: UserBuffer, received: UserBuffer) -> None:
    """Place, size, type and overlap of a send and a receive buffer."""
    if sent.place != received.place and sent.nbytes and received.nbytes:
        expected = "memory of the host, as sendbuf" if sent.place == "host" else f"memory of {sent.place}, as sendbuf"
        raise BufferTypeError("recvbuf", expected, received.place, state.rank)
    factor = state.size if collective == "allgather" else 1
    if collective == "alltoall" and sent.item and sent.nbytes // sent.item % state.size:
        expected = f"a number of elements that {state.size} ranks divide"
        raise BufferSizeError("sendbuf", expected, sent.items, state.rank)
    if sent.nbytes * factor != received.nbytes:
        got = f"{received.nbytes} bytes"
        expected = (
            f"{sent.nbytes * factor} bytes ({factor} x sendbuf)" if factor > 1 else f"{sent.nbytes} bytes, as sendbuf"
        )
        raise BufferSizeError("recvbuf", expected, got, state.rank)
    if sent.item != received.item or (sent.typed and received.typed and sent.dtype != received.dtype):
        raise BufferTypeError("recvbuf", f"the type of sendbuf, {sent.type_name}", received.type_name, state.rank)
    check_disjoint(sent, received, state.rank)


def _buffer(state: State, obj: Buffer, argument: str, blocks: int, *, writable: bool) -> UserBuffer:
    read = partial(_array, state)
    if isinstance(obj, list | tuple):
        return counted_buffer(obj, argument, state.rank, blocks, writable=writable, read=read)
    return read(obj, argument, state.rank, writable=writable)


def _array(state: State, obj: Any, argument: str, rank: int, *, writable: bool) -> UserBuffer:
    """Of the host or of a device."""
    if not is_device_array(obj):
        return host_buffer(obj, argument, rank, writable=writable)
    found = device_array(obj, argument, rank, writable=writable)
    place = place_of(state, obj)
    return UserBuffer(
        found.address, found.nbytes, found.dtype.itemsize, obj, found.dtype, place=place, stream=found.stream
    )


def place_of(state: State, array: Any) -> str:
    """Where an array lies: "host", which goes for empty arrays too, or the name of a device. Raises DeviceError."""
    if not is_device_array(array):
        return "host"
    found = device_array(array, "array", state.rank, writable=False)
    return state.memories.place(device_at(found.address)) if found.nbytes else "host"


def _new_like(sent: UserBuffer, copies: int | None, rank: int) -> UserBuffer:
    """A new array like that of ``sent``, with ``copies`` of it along a new first axis if given.

    Memory order is kept within a block, so that what arrives has the sender's indices.
    """
    array = sent.array
    if is_device_array(array):
        shape = tuple(array.shape)
        if sent.nbytes != device_array(array, "sendbuf", rank, writable=False).nbytes:  # as below
            shape = (sent.nbytes // max(sent.dtype.itemsize, 1),)
        shape = (copies, *shape) if copies else shape
        made = new_like(array, shape, rank)
        found = device_array(made, "recvbuf", rank, writable=True)
        return replace(sent, address=found.address, nbytes=found.nbytes, array=made)
    if sent.nbytes != array.nbytes:  # a count smaller than the buffer: only so much, as a plain array
        items = sent.nbytes // max(array.dtype.itemsize, 1)
        new = view = np.empty((copies, items) if copies else items, array.dtype)
    elif copies is None:
        new = view = np.empty_like(array, subok=False)
    elif array.flags.c_contiguous:
        new = view = np.empty((copies, *array.shape), array.dtype)
    else:
        new = np.empty((copies, *array.shape[::-1]), array.dtype)
        view = new.transpose(0, *range(array.ndim, 0, -1))
    return UserBuffer(MPI.Get_address(new), new.nbytes, sent.item, view, view.dtype, sent.typed)
