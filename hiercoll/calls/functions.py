"""The functions that programs call: one per collective in three forms, `configure` and `get_topology`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from mpi4py import MPI

from hiercoll.calls.aliases import uneven_alias
from hiercoll.calls.background import BackgroundCall, begun, waitall
from hiercoll.calls.devices import new_on_device
from hiercoll.calls.given import operation_and_order, uses_device
from hiercoll.calls.known import begin_known, call_known, known_by_name, run_known_on_device
from hiercoll.calls.native import own_method, serve_first, serve_native
from hiercoll.calls.plain import is_plain, new_result
from hiercoll.calls.routes import remember_typed
from hiercoll.calls.serving import (
    begin,
    checked_request,
    hold,
    learner_of_plain,
    learner_of_unknown,
    remember_plain,
    repeat,
    serve,
    serve_plain,
    serve_unknown_sizes,
    sizes_are_unknown,
)
from hiercoll.collectives import (
    ALLGATHER,
    ALLGATHERV,
    ALLREDUCE,
    ALLTOALL,
    ALLTOALLV,
    ALLTOALLW,
    AUTO,
    BARRIER,
    BCAST,
    GATHER,
    GATHERV,
    NATIVE,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTERV,
    SCATTER,
    SCATTERV,
    Collective,
)
from hiercoll.cuda import is_device_array
from hiercoll.errors import BufferTypeError, ParameterError
from hiercoll.memory.arrays import host_buffer
from hiercoll.runtime import compiled, native, progress
from hiercoll.runtime.arguments import LIMIT, Arguments
from hiercoll.runtime.beginning import Beginning
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import by_handle, first_calls, get_session, get_topology
from hiercoll.runtime.plan import Plan
from hiercoll.runtime.reading import make_request
from hiercoll.runtime.session import Session
from hiercoll.tables import Table

Function = TypeVar("Function", bound="Callable[..., Any]")
MOST_SOUND = 256  # calls of which it is remembered
LEARN = {"online": inf, "off": 0.0}  # share of the time of calls that learning may cost, by the word for it
Order: TypeAlias = Literal["any", "rank", "fixed"] | None  # of a reduction
Accumulate: TypeAlias = Literal["float32"] | None
Buffer: TypeAlias = Any  # an array, a buffer, or a list [buffer, count, MPI datatype]

__all__ = [
    "Plan",
    "allgather",
    "allgather_init",
    "allgatherv",
    "allgatherv_init",
    "allreduce",
    "allreduce_init",
    "alltoall",
    "alltoall_init",
    "alltoallv",
    "alltoallv_init",
    "alltoallw",
    "alltoallw_init",
    "barrier",
    "barrier_init",
    "bcast",
    "bcast_init",
    "config",
    "configure",
    "gather",
    "gather_init",
    "gatherv",
    "gatherv_init",
    "get_topology",
    "iallgather",
    "iallgatherv",
    "iallreduce",
    "ialltoall",
    "ialltoallv",
    "ialltoallw",
    "ibarrier",
    "ibcast",
    "igather",
    "igatherv",
    "ireduce",
    "ireduce_scatter",
    "ireduce_scatterv",
    "iscatter",
    "iscatterv",
    "reduce",
    "reduce_init",
    "reduce_scatter",
    "reduce_scatter_init",
    "reduce_scatterv",
    "reduce_scatterv_init",
    "scatter",
    "scatter_init",
    "scatterv",
    "scatterv_init",
    "waitall",
]


def _quick(collective: Collective) -> Callable[[Function], Function]:
    """A blocking function, by the compiled engine where it knows the call."""
    return partial(compiled.function, collective, collective.buffers, None)


def _quickly_begun(collective: Collective) -> Callable[[Function], Function]:
    """A function in the background, by the compiled engine where it knows the call."""
    return partial(compiled.function, collective.in_background, collective.buffers, begun)


@_quick(ALLTOALL)
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

    ``sendbuf``: a contiguous array of any fixed-size dtype whose elements divide into comm.size equal blocks (in memory
    order), whatever ``comm.Alltoall`` takes (``[buffer, count per block, MPI datatype]`` and the like), or
    ``MPI.IN_PLACE``. ``recvbuf``: likewise, with as many bytes; None for a new array like ``sendbuf``.
    ``algorithm`` and ``params``: see ``hiercoll list``; "auto" picks by a tuning table (see `configure`) and is
    "native" without one, which is ``comm.Alltoall`` itself. All ranks pass the same ones.

    Device arrays (anything with the CUDA array interface) on all ranks alike: what has been
    enqueued on ``stream`` (a stream or its handle; by default that of sendbuf) comes first,
    and the result is there at return. ``transport``: "direct" gives device memory to MPI,
    "staged" takes messages through the host, "staged:4" in four parts; "peer" lets the ranks
    of a node copy from each other's memory, and does between nodes what "auto" does. "auto" is what a
    table or earlier calls have shown to be fast; without these direct, where the library says that it
    takes device memory (or HIERCOLL_CUDA_AWARE=1 does), else staged.

    Returns the receive array (a NumPy view of it where recvbuf is another kind of buffer).
    Raises an ArgumentError before any data moves:
    BufferSizeError, BufferTypeError, BufferOverlapError, CommunicatorError,
    UnknownAlgorithmError, ParameterError, ConstraintError. Collective (MPI 4.1, 6.8).
    """
    if stream is None:
        into = new_result(ALLTOALL, comm, sendbuf) if recvbuf is None else recvbuf
        if call_known(ALLTOALL, comm, sendbuf, into, 0, algorithm, transport, **params):
            return _result(into)
    return _call(comm, ALLTOALL, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream))


@_quick(ALLGATHER)
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
    if stream is None:
        into = new_result(ALLGATHER, comm, sendbuf) if recvbuf is None else recvbuf
        if call_known(ALLGATHER, comm, sendbuf, into, 0, algorithm, transport, **params):
            return _result(into)
    return _call(comm, ALLGATHER, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream))


@_quick(ALLTOALLV)
def alltoallv(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Any,
    *,
    algorithm: str = "auto",
    limit: int = LIMIT,
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Send block j of ``sendbuf`` to rank j, receive block i of ``recvbuf`` from rank i; blocks of any sizes.

    Buffers are mpi4py's: ``[array, counts]``, ``[array, (counts, displs)]``, ``[array,
    counts, displs, MPI datatype]``, counts and displacements in elements, one per rank;
    displacements default to blocks one after the other. ``sendbuf`` may be ``MPI.IN_PLACE``.
    What a rank sends to another one is as long as what that one receives from it.

    ``limit`` (bytes, equal on all ranks): smaller blocks travel together (algorithm
    "aggregate"). Counts may change on every call. "auto" is native, or "aggregate" (or what
    a table for this layout says) where the program's own calls have shown it to be faster:
    of every 32 to 256 calls the first is looked at, and if small blocks abound (or the table
    says so), the next 28 try both in turns; what has been native all the while stays so.

    Arrays are on the host or, on all ranks, on a device; ``transport`` ("auto", "direct" or "staged") and ``stream``
    as for `alltoall`.

    Returns the array in ``recvbuf``. Raises an ArgumentError before any data moves:
    BufferSizeError, BufferTypeError, UnknownAlgorithmError, ParameterError.
    Collective (MPI 4.1, 6.8).
    """
    return _uneven_call(comm, ALLTOALLV, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream, limit))


@_quick(ALLTOALLW)
def alltoallw(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Any,
    *,
    algorithm: str = "auto",
    limit: int = LIMIT,
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Send block j of ``sendbuf`` to rank j, receive block i of ``recvbuf`` from rank i; blocks of any datatypes, such
    as the parts of an array that a transpose exchanges.

    Buffers are mpi4py's: ``[array, datatypes]``, ``[array, (counts, displs), datatypes]`` or ``[array, counts, displs,
    datatypes]``, one of each per rank, displacements in bytes; counts default to 1, displacements to 0. ``sendbuf`` may
    be ``MPI.IN_PLACE``. What a rank sends to another one has as many bytes as what that one receives from it.

    Blocks of which each is one run of bytes travel from and to where they lie. Others are packed, one after the other,
    and unpacked: datatypes are taken apart once, and copied by the compiled engine. Then they go the ways of
    `alltoallv`; ``algorithm``, ``limit`` and ``params`` as there. On a device blocks must be runs of bytes.

    Returns the array in ``recvbuf``. Raises an ArgumentError before any data moves: BufferSizeError, BufferTypeError,
    UnknownAlgorithmError, ParameterError. Collective (MPI 4.1, 6.8).
    """
    return _uneven_call(comm, ALLTOALLW, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream, limit))


@_quick(ALLGATHERV)
def allgatherv(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Any,
    *,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Gather the ``sendbuf`` of every rank, each of its own size, in ``recvbuf`` on every rank.

    ``recvbuf`` as for `alltoallv`, with the same counts on all ranks. ``sendbuf``: an
    array, ``[array, count, MPI datatype]``, or ``MPI.IN_PLACE``. Algorithms are those of
    `allgather`; "auto" chooses by the mean size. Devices as for `alltoallv`. Collective (MPI 4.1, 6.7).
    """
    return _uneven_call(comm, ALLGATHERV, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream))


@_quick(BCAST)
def bcast(
    comm: MPI.Intracomm,
    buf: Buffer,
    *,
    root: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Send what ``buf`` holds on rank ``root`` to ``buf`` on every rank.

    ``buf``: a contiguous array of any fixed-size dtype, or whatever ``comm.Bcast`` takes (``[buffer, count, MPI
    datatype]`` and the like); a device array on all ranks alike. It has as many bytes on all ranks. On ``root`` it is
    only read, and may be read-only. ``root``: an int, the same on all ranks. All else as for `alltoall`.

    Returns the array. Raises an ArgumentError before any data moves: BufferSizeError, BufferTypeError,
    CommunicatorError, UnknownAlgorithmError, ParameterError (``root`` too), ConstraintError. Collective (MPI 4.1, 6.4).
    """
    if stream is None and call_known(BCAST, comm, None, buf, root, algorithm, transport, **params):
        return _result(buf)
    return _call(comm, BCAST, Arguments(None, buf, root, algorithm, params, transport, stream))


@_quick(BARRIER)
def barrier(comm: MPI.Intracomm, *, algorithm: str = "auto", **params: Any) -> None:
    """Return when all ranks have called it.

    ``algorithm`` and ``params``: as for `alltoall`. Raises CommunicatorError, UnknownAlgorithmError, ParameterError,
    ConstraintError. Collective (MPI 4.1, 6.3).
    """
    if not call_known(BARRIER, comm, None, None, 0, algorithm, AUTO, **params):
        _call(comm, BARRIER, Arguments(None, None, 0, algorithm, params))


@_quick(ALLREDUCE)
def allreduce(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Combine the ``sendbuf`` of all ranks, element by element, on every rank: the same bits on all.

    ``sendbuf``: a contiguous array of numbers, whatever ``comm.Allreduce`` takes, or ``MPI.IN_PLACE``, with the input
    in ``recvbuf``. ``recvbuf``: likewise, with as many elements of the same type; None for a new array. ``op``:
    one of MPI's operations, or one that the program has made (``MPI.Op.Create``), on all ranks alike.

    ``order``: in which contributions are combined. "rank": in that of the ranks, with brackets anywhere. "fixed": by
    one tree that depends on the number of ranks alone: the same bits whatever the size, the algorithm and the placement
    of ranks. "any": each once, as is fastest. None (or ``HIERCOLL_ORDER``): operations that do not commute in the order
    of ranks. For sums and products of floating-point numbers, and operations of the program's, "auto" is the MPI
    library's own or, where a table says so, an algorithm with that one tree; for all others, of which every order gives
    the same bits, any.

    ``accumulate="float32"``: elements of half precision (float16, or bfloat16 of ml_dtypes) are combined in single
    precision, and rounded once: arrays on the host or on a device. What may hold partial sums travels in single
    precision, all else as it is.

    All else as for `alltoall`. Returns the receive array. Raises an ArgumentError before any data moves:
    BufferSizeError, BufferTypeError (``op`` cannot combine such elements, too), BufferOverlapError, CommunicatorError,
    UnknownAlgorithmError, ParameterError (``op`` and ``order``, too), ConstraintError (of the order, too).
    Collective (MPI 4.1, 6.9.6).
    """
    given = Arguments(
        sendbuf, recvbuf, 0, algorithm, params, transport, stream, op=op, order=order, accumulate=accumulate
    )
    if stream is None:
        into = new_result(ALLREDUCE, comm, sendbuf) if recvbuf is None else recvbuf
        if call_known(ALLREDUCE, comm, sendbuf, into, 0, algorithm, transport, op, order, **given.named):
            return _result(into)
    return _call(comm, ALLREDUCE, given)


@_quick(REDUCE_SCATTER)
def reduce_scatter(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Combine block j of all ranks' ``sendbuf``, element by element, on rank j.

    ``sendbuf``: comm.size equal blocks, as for `alltoall`, of numbers. ``recvbuf``: one block; None for a new array,
    like ``sendbuf[0]`` if that has comm.size rows, else of one axis. With ``MPI.IN_PLACE`` the blocks are in
    ``recvbuf``, and the result comes to its beginning. ``op``, ``order``, ``accumulate`` and all else: see
    `allreduce`.
    Collective (MPI 4.1, 6.10.1: MPI_Reduce_scatter_block).
    """
    given = Arguments(
        sendbuf, recvbuf, 0, algorithm, params, transport, stream, op=op, order=order, accumulate=accumulate
    )
    if stream is None:
        into = new_result(REDUCE_SCATTER, comm, sendbuf) if recvbuf is None else recvbuf
        if call_known(REDUCE_SCATTER, comm, sendbuf, into, 0, algorithm, transport, op, order, **given.named):
            return _result(into)
    return _call(comm, REDUCE_SCATTER, given)


@_quick(REDUCE)
def reduce(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    root: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Combine the ``sendbuf`` of all ranks, element by element, on rank ``root``.

    As `allreduce`, but that ``recvbuf`` matters on ``root`` alone, and so does ``MPI.IN_PLACE``. Returns the receive
    array on ``root``, None elsewhere. Collective (MPI 4.1, 6.9.1).
    """
    given = Arguments(
        sendbuf, recvbuf, root, algorithm, params, transport, stream, op=op, order=order, accumulate=accumulate
    )
    return _rooted_call(comm, REDUCE, given)


@_quick(GATHER)
def gather(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    root: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Gather the ``sendbuf`` of every rank, in rank order, on rank ``root``.

    As `allgather`, but that ``recvbuf`` matters on ``root`` alone, and so does ``MPI.IN_PLACE``: there the root's block
    is in its place. Returns the receive array on ``root``, None elsewhere. Collective (MPI 4.1, 6.5).
    """
    return _rooted_call(comm, GATHER, Arguments(sendbuf, recvbuf, root, algorithm, params, transport, stream))


@_quick(SCATTER)
def scatter(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    root: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Send block j of the ``sendbuf`` of rank ``root`` to rank j.

    ``sendbuf`` matters on ``root`` alone: comm.size equal blocks, as for `alltoall`. ``recvbuf``: one block; or, on
    ``root``, ``MPI.IN_PLACE``: its block stays where it is. All else as for `bcast`. Returns the receive array.
    Collective (MPI 4.1, 6.6).
    """
    return _rooted_call(comm, SCATTER, Arguments(sendbuf, recvbuf, root, algorithm, params, transport, stream))


@_quick(GATHERV)
def gatherv(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Any = None,
    *,
    root: int = 0,
    algorithm: str = "auto",
    limit: int = LIMIT,
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Gather the ``sendbuf`` of every rank, each of its own size, on rank ``root``.

    ``recvbuf``, on ``root`` alone, as for `alltoallv`. Algorithms are "linear", "aggregate" and "binomial"; "auto" is
    native. ``limit`` (bytes, equal on all ranks): by the last two smaller blocks travel together. All else as for
    `gather`. Collective (MPI 4.1, 6.5).
    """
    return _call(comm, GATHERV, Arguments(sendbuf, recvbuf, root, algorithm, params, transport, stream, limit))


@_quick(SCATTERV)
def scatterv(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Buffer,
    *,
    root: int = 0,
    algorithm: str = "auto",
    limit: int = LIMIT,
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Send block j of the ``sendbuf`` of rank ``root``, of any size, to rank j.

    ``sendbuf``, on ``root`` alone, as for `alltoallv`. Algorithms and ``limit`` as for `gatherv`, all else as for
    `scatter`. Collective (MPI 4.1, 6.6).
    """
    return _call(comm, SCATTERV, Arguments(sendbuf, recvbuf, root, algorithm, params, transport, stream, limit))


def reduce_scatterv(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer,
    recvcounts: Any,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Any:
    """Combine all ranks' ``sendbuf``, element by element, of which rank j gets ``recvcounts[j]``, one after the other.

    ``recvcounts``: numbers of elements, the same on all ranks. ``sendbuf`` has as many as all together, ``recvbuf`` as
    many as are this rank's; with ``MPI.IN_PLACE`` the input is in ``recvbuf``, and the result comes to its beginning.
    Algorithms are those of `reduce_scatter`; "auto" chooses by the mean size. All else as for `reduce_scatter`.
    Collective (MPI 4.1, 6.10.2: MPI_Reduce_scatter).
    """
    how: dict[str, Any] = {"op": op, "order": order, "accumulate": accumulate, "recvcounts": recvcounts}
    given = Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream, **how)
    session = _ready(comm)
    if session is not None and repeat(session, comm, REDUCE_SCATTERV, given) is not None:
        return _result(recvbuf)
    return _call(comm, REDUCE_SCATTERV, given)


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
    return _init(comm, ALLTOALL, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream))


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
    return _init(comm, ALLGATHER, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream))


def alltoallv_init(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Any,
    *,
    algorithm: str = "auto",
    limit: int = LIMIT,
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `alltoallv` on these buffers with these counts; see `alltoall_init`.

    "auto" looks at the blocks of all ranks: where most are empty, or the largest is more than four
    times the mean, or there is no table for this layout, it is native; else what the table says.
    """
    return _init(comm, ALLTOALLV, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream, limit))


def alltoallw_init(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Any,
    *,
    algorithm: str = "auto",
    limit: int = LIMIT,
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `alltoallw` on these buffers with these datatypes; see `alltoallv_init`."""
    return _init(comm, ALLTOALLW, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream, limit))


def allgatherv_init(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Any,
    *,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `allgatherv` on these buffers with these counts; see `alltoall_init`."""
    return _init(comm, ALLGATHERV, Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream))


def bcast_init(
    comm: MPI.Intracomm,
    buf: Buffer,
    *,
    root: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `bcast` of this buffer from ``root``; see `alltoall_init`."""
    return _init(comm, BCAST, Arguments(None, buf, root, algorithm, params, transport, stream))


def barrier_init(comm: MPI.Intracomm, *, algorithm: str = "auto", **params: Any) -> Plan:
    """A plan for `barrier`; see `alltoall_init`."""
    return _init(comm, BARRIER, Arguments(None, None, 0, algorithm, params))


def allreduce_init(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `allreduce` on these buffers; see `alltoall_init`."""
    given = Arguments(
        sendbuf, recvbuf, 0, algorithm, params, transport, stream, op=op, order=order, accumulate=accumulate
    )
    return _init(comm, ALLREDUCE, given)


def reduce_scatter_init(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `reduce_scatter` on these buffers; see `alltoall_init`."""
    given = Arguments(
        sendbuf, recvbuf, 0, algorithm, params, transport, stream, op=op, order=order, accumulate=accumulate
    )
    return _init(comm, REDUCE_SCATTER, given)


def reduce_init(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    root: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `reduce` on these buffers; see `alltoall_init`."""
    given = Arguments(
        sendbuf, recvbuf, root, algorithm, params, transport, stream, op=op, order=order, accumulate=accumulate
    )
    return _init(comm, REDUCE, given)


def gather_init(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    root: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `gather` on these buffers; see `alltoall_init`."""
    given = Arguments(sendbuf, recvbuf, root, algorithm, params, transport, stream)
    return _init(comm, GATHER, given)


def scatter_init(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    root: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `scatter` on these buffers; see `alltoall_init`."""
    given = Arguments(sendbuf, recvbuf, root, algorithm, params, transport, stream)
    return _init(comm, SCATTER, given)


def gatherv_init(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Any = None,
    *,
    root: int = 0,
    algorithm: str = "auto",
    limit: int = LIMIT,
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `gatherv` on these buffers with these counts; see `alltoall_init`."""
    return _init(comm, GATHERV, Arguments(sendbuf, recvbuf, root, algorithm, params, transport, stream, limit))


def scatterv_init(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Buffer,
    *,
    root: int = 0,
    algorithm: str = "auto",
    limit: int = LIMIT,
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `scatterv` on these buffers with these counts; see `alltoall_init`."""
    return _init(comm, SCATTERV, Arguments(sendbuf, recvbuf, root, algorithm, params, transport, stream, limit))


def reduce_scatterv_init(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer,
    recvcounts: Any,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    algorithm: str = "auto",
    transport: str = "auto",
    stream: Any = None,
    **params: Any,
) -> Plan:
    """A plan for `reduce_scatterv` on these buffers with these counts; see `alltoall_init`."""
    how: dict[str, Any] = {"op": op, "order": order, "accumulate": accumulate, "recvcounts": recvcounts}
    given = Arguments(sendbuf, recvbuf, 0, algorithm, params, transport, stream, **how)
    return _init(comm, REDUCE_SCATTERV, given)


@_quickly_begun(ALLTOALL)
def ialltoall(
    comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any = None, *, algorithm: str = "auto", **params: Any
) -> BackgroundCall:
    """`alltoall` that returns at once; buffers must be left alone until it is complete.

    "auto" takes algorithms without shared memory only, and of devices no transport "peer". Several may be
    under way; all ranks start them in the same order. Waits for no other rank, but
    in the first call of hiercoll on a communicator. Errors as `alltoall`,
    and ConstraintError for algorithms with shared memory. Collective (MPI 4.1, 6.12.6).
    """
    return _begin(comm, ALLTOALL, Arguments(sendbuf, recvbuf, 0, algorithm, params))


@_quickly_begun(ALLGATHER)
def iallgather(
    comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any = None, *, algorithm: str = "auto", **params: Any
) -> BackgroundCall:
    """`allgather` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.5)."""
    return _begin(comm, ALLGATHER, Arguments(sendbuf, recvbuf, 0, algorithm, params))


@_quickly_begun(ALLTOALLV)
def ialltoallv(
    comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", **params: Any
) -> BackgroundCall:
    """`alltoallv` that returns at once; see `ialltoall`. "auto" is native."""
    return _begin(comm, ALLTOALLV, Arguments(sendbuf, recvbuf, 0, algorithm, params))


@_quickly_begun(ALLTOALLW)
def ialltoallw(
    comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", **params: Any
) -> BackgroundCall:
    """`alltoallw` that returns at once; see `ialltoall`. "auto" is native."""
    return _begin(comm, ALLTOALLW, Arguments(sendbuf, recvbuf, 0, algorithm, params))


@_quickly_begun(ALLGATHERV)
def iallgatherv(
    comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", **params: Any
) -> BackgroundCall:
    """`allgatherv` that returns at once; see `ialltoall`."""
    return _begin(comm, ALLGATHERV, Arguments(sendbuf, recvbuf, 0, algorithm, params))


@_quickly_begun(BCAST)
def ibcast(comm: MPI.Intracomm, buf: Any, *, root: int = 0, algorithm: str = "auto", **params: Any) -> BackgroundCall:
    """`bcast` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.2)."""
    return _begin(comm, BCAST, Arguments(None, buf, root, algorithm, params))


@_quickly_begun(BARRIER)
def ibarrier(comm: MPI.Intracomm, *, algorithm: str = "auto", **params: Any) -> BackgroundCall:
    """`barrier` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.1)."""
    return _begin(comm, BARRIER, Arguments(None, None, 0, algorithm, params))


@_quickly_begun(ALLREDUCE)
def iallreduce(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Any = None,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    algorithm: str = "auto",
    **params: Any,
) -> BackgroundCall:
    """`allreduce` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.8)."""
    return _begin(
        comm, ALLREDUCE, Arguments(sendbuf, recvbuf, 0, algorithm, params, op=op, order=order, accumulate=accumulate)
    )


@_quickly_begun(REDUCE_SCATTER)
def ireduce_scatter(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    algorithm: str = "auto",
    **params: Any,
) -> BackgroundCall:
    """`reduce_scatter` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.9)."""
    return _begin(
        comm,
        REDUCE_SCATTER,
        Arguments(sendbuf, recvbuf, 0, algorithm, params, op=op, order=order, accumulate=accumulate),
    )


@_quickly_begun(REDUCE)
def ireduce(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    root: int = 0,
    algorithm: str = "auto",
    **params: Any,
) -> BackgroundCall:
    """`reduce` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.7)."""
    return _begin(
        comm, REDUCE, Arguments(sendbuf, recvbuf, root, algorithm, params, op=op, order=order, accumulate=accumulate)
    )


@_quickly_begun(GATHER)
def igather(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer = None,
    *,
    root: int = 0,
    algorithm: str = "auto",
    **params: Any,
) -> BackgroundCall:
    """`gather` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.3)."""
    return _begin(comm, GATHER, Arguments(sendbuf, recvbuf, root, algorithm, params))


@_quickly_begun(SCATTER)
def iscatter(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer,
    *,
    root: int = 0,
    algorithm: str = "auto",
    **params: Any,
) -> BackgroundCall:
    """`scatter` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.4)."""
    return _begin(comm, SCATTER, Arguments(sendbuf, recvbuf, root, algorithm, params))


@_quickly_begun(GATHERV)
def igatherv(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Any = None,
    *,
    root: int = 0,
    algorithm: str = "auto",
    limit: int = LIMIT,
    **params: Any,
) -> BackgroundCall:
    """`gatherv` that returns at once; see `ialltoall`."""
    return _begin(comm, GATHERV, Arguments(sendbuf, recvbuf, root, algorithm, params, limit=limit))


@_quickly_begun(SCATTERV)
def iscatterv(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Buffer,
    *,
    root: int = 0,
    algorithm: str = "auto",
    limit: int = LIMIT,
    **params: Any,
) -> BackgroundCall:
    """`scatterv` that returns at once; see `ialltoall`."""
    return _begin(comm, SCATTERV, Arguments(sendbuf, recvbuf, root, algorithm, params, limit=limit))


def ireduce_scatterv(
    comm: MPI.Intracomm,
    sendbuf: Buffer,
    recvbuf: Buffer,
    recvcounts: Any,
    *,
    op: MPI.Op = MPI.SUM,
    order: Order = None,
    accumulate: Accumulate = None,
    algorithm: str = "auto",
    **params: Any,
) -> BackgroundCall:
    """`reduce_scatterv` that returns at once; see `ialltoall`. Collective (MPI 4.1, 6.12.10)."""
    how: dict[str, Any] = {"op": op, "order": order, "accumulate": accumulate, "recvcounts": recvcounts}
    given = Arguments(sendbuf, recvbuf, 0, algorithm, params, **how)
    return _begin(comm, REDUCE_SCATTERV, given)


def config() -> dict[str, str]:
    """What runs here, in words: versions of ``hiercoll``, ``mpi4py`` and the ``MPI library``; which ``engine`` runs
    plans on host memory ("c" or "python", see ``HIERCOLL_ENGINE``), and ``why`` it is Python's, "" if it is not. Local.
    """
    from importlib.metadata import version  # here: it takes long to import

    module, why = compiled.load()
    return {
        "hiercoll": version("hiercoll"),
        "mpi4py": version("mpi4py"),
        "MPI library": mpi_library(),
        "engine": "python" if module is None else "c",
        "why": why,
    }


def configure(
    comm: MPI.Intracomm,
    *,
    table: Table | str | Path | None = None,
    tune: Literal["online", "off"] | None = None,
    timeout: float | None = None,
) -> None:
    """How ``algorithm="auto"`` decides on ``comm`` from now on. Collective.

    ``table``: a tuning table or its file, read by rank 0; None for the one that
    ``HIERCOLL_TABLE`` names or that lies in the user's configuration folder, if any; where
    there is none, "auto" is "native", and learns. The name "model" instead of a file's lets the cost model decide,
    which knows nothing of the MPI library's own collectives.

    ``tune``: None to learn where there is no table: blocking calls try candidates, within 5 % of the time of all calls,
    and one that has proved faster than native serves the later ones; "online" to try them at once, whatever that costs,
    with a table, too; "off" to learn nothing. ``HIERCOLL_LEARN`` (0 or online, on one rank) says so for all
    communicators. I-calls and plans take what was found, but try nothing.

    ``timeout``: seconds that a call may wait before it raises CollectiveTimeout, 0 for ever; None leaves it as it is
    (at first ``HIERCOLL_TIMEOUT``).

    Raises TableError (on all ranks) for a table that cannot be used, ParameterError for
    another ``tune`` or ``timeout``.
    """
    session = get_session(comm)
    if tune is not None and tune not in LEARN:
        raise ParameterError("tune", "'online', 'off' or None", repr(tune), session.rank)
    if timeout is not None and not _is_deadline(timeout):
        raise ParameterError("timeout", "a number of seconds, 0 for no deadline", repr(timeout), session.rank)
    session.use_table(table)
    session.policy.learn(LEARN[tune] if tune is not None else session.learns)
    if timeout is not None:
        session.set_timeout(float(timeout))


def _is_deadline(seconds: Any) -> bool:
    return isinstance(seconds, Real) and 0 <= float(seconds) < inf


def _result(given: Any) -> Any:
    """What a call that was known returns: of a receive buffer, the array, as other calls do."""
    if type(given) is np.ndarray:
        return given
    if isinstance(given, list | tuple):
        return given[0]
    return given if is_device_array(given) else host_buffer(given, "recvbuf", 0, writable=True).array


def _ready(comm: Any) -> Session | None:
    """The session of a communicator on which hiercoll is set up, and that any thread may use."""
    return by_handle.get(comm.handle) if isinstance(comm, MPI.Comm) else None


def _call(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> Any:
    """A blocking call with equal blocks, with all checks."""
    session = _ready(comm)
    if session is None or session.broken is not None:
        if (first := _first(comm, collective, given)) is not None:
            return _early_call(first, collective, given)
        session = get_session(comm)
    if given.recv is None and given.stream is None and collective in (ALLTOALL, ALLGATHER, ALLREDUCE):
        given = given._replace(recv=new_on_device(collective, comm, given.send))
    is_on_host = type(given.recv) is np.ndarray or given.recv is MPI.IN_PLACE
    if not is_on_host and run_known_on_device(session, collective, given):
        return _plain_result(session, collective, given)
    is_left = _is_left(given)
    learner = learner_of_plain(session, collective, given) if is_left else None
    if serve_plain(session, collective, given, learner, strict=True):
        return _plain_result(session, collective, given)
    request = checked_request(session, collective, given, strict=True)
    if is_left:
        remember_plain(session, request, given)
    serve(session, request, given)
    return request.result


def _rooted_call(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> Any:
    """The same of a collective whose root gives or gets what others do not. Known calls on arrays do not come here."""
    choice = (given.root, given.algorithm, given.transport, *operation_and_order(collective, given))
    is_plain = given.stream is None and given.recv is not MPI.IN_PLACE
    if is_plain and call_known(collective, comm, given.send, given.recv, *choice, **given.named):
        return _result(given.recv) if collective.everywhere == "recv" or comm.rank == given.root else None
    return _call(comm, collective, given)


def _plain_result(state: Session | Beginning, collective: Collective, given: Arguments) -> Any:
    """What a call on plain arrays returns."""
    return given.recv if collective.everywhere == "recv" or state.rank == given.root else None


def _is_left(given: Arguments) -> bool:
    """Whether all that there is to choose is left to hiercoll."""
    return not (
        not isinstance(given.algorithm, str)
        or given.algorithm != AUTO
        or given.transport != AUTO
        or given.params
        or given.stream is not None
        or given.order is not None
        or given.accumulate is not None
        or given.limit != LIMIT
    )


def _first(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> Beginning | None:
    """What counts this call, if hiercoll is not set up on the communicator and this is no reason for it."""
    if not _is_left(given) or not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        return None
    if uses_device(given) or not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    return first_calls(comm, collective, given)


def _early_call(first: Beginning, collective: Collective, given: Arguments) -> Any:
    """A call by the MPI library's own, with all checks."""
    is_known = type(given.recv) is np.ndarray and known_by_name(first.user, collective, given)  # of others alike
    if is_known or is_plain(first, collective, given):
        if is_known:
            first.served()
        else:
            serve_first(first, collective, given, own_method(first, collective, given))
        return _plain_result(first, collective, given)
    request = make_request(first, collective, given, strict=True)
    for copy in request.before:
        copy.start()
    if given.recv is None:
        given = given._replace(recv=request.result)
    serve_first(first, collective, given, partial(native.call, first.user, request, first.rank))
    for copy in request.after:
        copy.start()
    return request.result


def _uneven_call(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> Any:
    """A blocking call with blocks of any sizes."""
    session = _ready(comm)
    if session is None and (first := _first(comm, collective, given)) is not None:
        if collective.typed or _sound(first, collective, given):
            serve_first(first, collective, given, partial(_checked_native, first, collective, given))
        else:
            _early_call(first, collective, given)
        return given.recv[0] if isinstance(given.recv, list | tuple) else given.recv
    if session is None or not session.unwatched:
        session = get_session(comm)
    learner = learner_of_unknown(session, collective, given)
    is_native = learner is not None and learner.is_fixed and learner.current.is_native and session.unwatched
    is_left = learner is None and sizes_are_unknown(session, collective, given)  # where nothing is learned
    on_host = session.unwatched and not uses_device(given)
    if collective.typed and (is_left or given.algorithm == NATIVE) and on_host:
        progress.before_blocking()
        _checked_native(session, collective, given)
        remember_typed(session, collective, given, None)
    elif learner is not None and is_native and _sound(session, collective, given):
        serve_native(session, collective, given, partial(_native, session, collective, given), learner.tally)
    elif repeat(session, comm, collective, given) is not None:
        pass
    elif learner is not None:
        own = partial(_checked_native, session, collective, given)
        serve_unknown_sizes(session, collective, given, learner, own, strict=True)
    else:
        request = checked_request(session, collective, given, strict=True)
        serve(session, request, given)
    return given.recv[0] if isinstance(given.recv, list | tuple) else given.recv


def _init(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> Plan:
    """A plan for the program to hold."""
    return hold(get_session(comm), collective, given, strict=True)


def _begin(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> BackgroundCall:
    """A call in the background."""
    if given.recv is None and collective in (ALLTOALL, ALLGATHER, ALLREDUCE, REDUCE_SCATTER):
        given = given._replace(recv=new_result(collective, comm, given.send))
    if (known := begin_known(comm, collective, given)) is not None:
        what, send, recv = known
        has_result = collective.buffers and (collective.everywhere == "recv" or comm.rank == given.root)
        call = begun(what, send, _result(given.recv) if recv is None and has_result else recv)
        if call is not NotImplemented:
            return call
    return begin(get_session(comm), collective, given)


def _native(session: Session | Beginning, collective: Collective, given: Arguments) -> None:
    """The MPI library's own, without a look at the arguments. Raises as the function does."""
    try:
        getattr(session.user, collective.native)(given.send, given.recv)
    except (TypeError, ValueError, KeyError, BufferError) as error:
        _check(session, collective, given)  # says what is wrong
        raise BufferTypeError("sendbuf, recvbuf", "what mpi4py takes", str(error), session.rank) from None


def _checked_native(session: Session | Beginning, collective: Collective, given: Arguments) -> None:
    """`_native`, after a look at the arguments; what else serves a call has its own."""
    if not _sound(session, collective, given):
        _check(session, collective, given)
        if collective.typed and (alias := uneven_alias(collective, given)) is not None:
            if len(session.sound) >= MOST_SOUND:
                session.sound.clear()
            session.sound.add(alias)
    _native(session, collective, given)


def _check(session: Session | Beginning, collective: Collective, given: Arguments) -> None:
    """Raises what is wrong with the arguments, if anything is."""
    make_request(session, collective, given._replace(algorithm=NATIVE), strict=True)


def _sound(session: Session | Beginning, collective: Collective, given: Arguments) -> bool:
    """Whether both buffers are of the common kind, an array and one count per rank, hold their blocks,
    and this rank receives from itself what it sends: the checks of `make_request`, at less cost. With datatypes for
    blocks: whether such a call has been found sound before."""
    if collective.typed:
        return uneven_alias(collective, given) in session.sound
    sent, received = _counts(session, given.send), _counts(session, given.recv)
    own = session.rank
    return bool(sent and received and sent[own] * given.send[0].itemsize == received[own] * given.recv[0].itemsize)


def _counts(session: Session | Beginning, spec: Any) -> list[int] | None:
    """The counts of a buffer of the common kind, if it holds them. In Python: of few numbers NumPy takes
    longer for one question."""
    if type(spec) is not list or len(spec) != 2:
        return None
    array, counts = spec
    if type(array) is not np.ndarray or type(counts) is not np.ndarray or counts.dtype.kind != "i":
        return None
    found: list[int] = counts.tolist()
    fit = counts.shape == (session.size,) and min(found) >= 0 and sum(found) <= array.size
    return found if fit else None
