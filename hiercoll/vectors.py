"""The calls for blocks of uneven sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hiercoll import progress
from hiercoll.buffers import Now, Transfer
from hiercoll.checking import Said
from hiercoll.communicator import State
from hiercoll.cuda import is_device_array
from hiercoll.errors import ArgumentError, BufferSizeError, BufferTypeError, ParameterError
from hiercoll.executor import Plan
from hiercoll.lifetime import by_handle, get_state
from hiercoll.messages import (
    UNREADABLE,
    Message,
    basic_type,
    block_message,
    copy_data,
    each_block,
    is_in_place,
    vector_message,
)
from hiercoll.sizes import Blocks, Sizes
from hiercoll.tables import NATIVE
from hiercoll.tuner import Spread
from hiercoll.uneven import LIMIT
from hiercoll.work import Work


def alltoallv(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Any,
    *,
    algorithm: str = "auto",
    limit: int = LIMIT,
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
    says so), the next 28 try both in turns; what has been native all the while stays so. Arrays
    are on the host.

    Returns the array in ``recvbuf``. Raises an ArgumentError before any data moves:
    BufferSizeError, BufferTypeError, UnknownAlgorithmError, ParameterError.
    Collective (MPI 4.1, 6.8).
    """
    plain = algorithm == "auto" and not params and limit == LIMIT
    known = by_handle.get(comm.handle) if plain and isinstance(comm, MPI.Comm) else None
    if known is not None and known.unwatched and known.choices.regime.is_native and _sound(known, sendbuf, recvbuf):
        known.choices.regime.left -= 1
        progress.before_blocking()
        return _native(known, sendbuf, recvbuf)
    if known is not None and run_again(known, sendbuf, recvbuf):
        return recvbuf[0]
    state = get_state(comm)
    if plain and not state.disabled:
        return in_regime(state, sendbuf, recvbuf, partial(_checked_native, state))
    return serve_vector(state, "alltoallv", sendbuf, recvbuf, algorithm, params, limit)


def allgatherv(comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", **params: Any) -> Any:
    """Gather the ``sendbuf`` of every rank, each of its own size, in ``recvbuf`` on every rank.

    ``recvbuf`` as for `alltoallv`, with the same counts on all ranks. ``sendbuf``: an
    array, ``[array, count, MPI datatype]``, or ``MPI.IN_PLACE``. Algorithms are those of
    `allgather`; "auto" chooses by the mean size. Collective (MPI 4.1, 6.7).
    """
    return serve_vector(get_state(comm), "allgatherv", sendbuf, recvbuf, algorithm, params)


def alltoallv_init(
    comm: MPI.Intracomm,
    sendbuf: Any,
    recvbuf: Any,
    *,
    algorithm: str = "auto",
    limit: int = LIMIT,
    **params: Any,
) -> Plan:
    """A plan for `alltoallv` on these buffers with these counts; see `hiercoll.alltoall_init`.

    "auto" looks at the blocks of all ranks: where most are empty, or the largest is more than four
    times the mean, or there is no table for this layout, it is native; else what the table says.
    """
    state = get_state(comm)
    if algorithm == "auto" and not params and not state.disabled:
        algorithm, params = chosen_for_good(state, sendbuf, recvbuf)
    return alltoallv_call(state, sendbuf, recvbuf, algorithm, params, limit, held=True).plan(own=True)


def chosen_for_good(state: State, sendbuf: Any, recvbuf: Any) -> tuple[str, dict[str, Any]]:
    """What serves a plan for an alltoallv, where nothing can be tried. Collective."""
    _compare(state, "persistent alltoallv")
    own = _looked_at(state, sendbuf, recvbuf)
    choice = state.choices.uneven_for_good(state.choices.regime.whole(own))
    return choice.algorithm, dict(choice.params)


def allgatherv_init(comm: MPI.Intracomm, sendbuf: Any, recvbuf: Any, *, algorithm: str = "auto", **params: Any) -> Plan:
    """A plan for `allgatherv` on these buffers with these counts; see `hiercoll.alltoall_init`."""
    return allgatherv_call(get_state(comm), sendbuf, recvbuf, algorithm, params, held=True).plan(own=True)


_address = MPI.Get_address


class Side(NamedTuple):
    """A rank's blocks in one buffer: its address, their lengths and offsets in bytes, what keeps
    it, and, if it is a copy of the user's, what makes it that before, or brings it back after."""

    address: int
    sizes: Sizes
    at: Sizes
    owner: Any
    copying: tuple[Transfer, ...] = ()


def side(state: State, message: Message, blocks: int, argument: str, into: Any = None) -> Side:
    """The blocks of a message: in place, or by way of a copy (``into`` an array, if given) where
    elements are not just bytes in order.

    Raises BufferSizeError if they do not fit the buffer.
    """
    sizes, at = each_block(message, blocks)
    if message.element.plain and message.address:
        if message.element.size != 1:
            sizes, at = sizes * message.element.size, at * message.element.size
        if sizes.min() < 0:
            raise BufferSizeError(argument, "counts of at least 0", sizes.min(), state.rank)
        if at.min() < 0 or (at + sizes).max() > message.nbytes:  # in which empty blocks do not count
            outside = (sizes > 0) & ((at < 0) | (at + sizes > message.nbytes))
            if not outside.any():
                return Side(message.address, sizes, at * (sizes > 0), message.buffer)
            first = int(np.flatnonzero(outside)[0])
            got = f"{sizes[first]} bytes at {at[first]} for block {first}, with a buffer of {message.nbytes} bytes"
            raise BufferSizeError(argument, "counts and displacements that fit the buffer", got, state.rank)
        return Side(message.address, sizes, at, message.buffer)
    sizes = sizes * message.element.size
    data = np.empty(int(sizes.sum()), np.uint8) if into is None else into
    transfer = Now(partial(copy_data, state.comm, message, blocks, data, outward=argument == "sendbuf"))
    return Side(MPI.Get_address(data), sizes, np.cumsum(sizes) - sizes, data, (transfer,))


class Call(NamedTuple):
    """An uneven call that is sound."""

    state: State
    work: Work
    sent: Side
    received: Side
    result: Any
    limit: int = LIMIT
    kinds: tuple[str, str] = ("", "")  # elements that are sent, and received, if calls are checked

    def plan(self, *, own: bool = False, background: bool = False, keep: bool = False) -> Plan:
        """See `State.uneven_plan`; one to ``keep`` holds neither the buffers nor the counts."""
        if own and self.state.check:
            self.state.same_call(self.said("persistent "))
        blocks = Blocks(self.sent.sizes, self.sent.at, self.received.sizes, self.received.at)
        if own or background or keep:
            blocks = Blocks(*(values.copy() for values in blocks))
        addresses = (self.sent.address, self.received.address)
        options = {"own": own, "background": background, "keep": keep}
        plan = self.state.uneven_plan(self.work, blocks, addresses, self.limit, **options)
        plan.surround(self.sent.copying, self.received.copying)
        if not keep:
            plan.keep_alive(self.sent.owner, self.received.owner)
            plan.recvbuf = self.result
        return plan

    def said(self, prefix: str = "") -> Said:
        """As ranks compare it."""
        sent = self.sent.sizes if self.work.collective == "alltoallv" else np.repeat(self.sent.sizes, self.state.size)
        return Said(f"{prefix}{self.work.name}", "", (sent.copy(), self.received.sizes.copy()), self.kinds)


def serve_vector(
    state: State,
    collective: str,
    sendbuf: Any,
    recvbuf: Any,
    algorithm: str,
    params: dict[str, Any],
    limit: int = LIMIT,
) -> Any:
    """A blocking call, by a plan that is kept for those with the same sizes and buffers. Returns the
    receive buffer."""
    key = None if state.check else _key(collective, sendbuf, recvbuf, algorithm, params, limit)
    plan = None if key is None else state.vectors.get(key)
    if plan is None:
        if collective == "alltoallv":
            call = alltoallv_call(state, sendbuf, recvbuf, algorithm, params, limit)
        else:
            call = allgatherv_call(state, sendbuf, recvbuf, algorithm, params)
        if state.check:
            state.same_call(call.said())
        if call.sent.copying or call.received.copying:
            key = None
        plan = call.plan(keep=key is not None)
        if key is not None:
            state.vectors.keep(key, plan)
    elif key is not None:
        state.vectors.move_to_end(key)
    state.run(plan)
    if key is None:
        plan.free()
    return recvbuf[0] if isinstance(recvbuf, list | tuple) else recvbuf


def _key(
    collective: str, sendbuf: Any, recvbuf: Any, algorithm: str, params: dict[str, Any], limit: int
) -> tuple[Any, ...] | None:
    """What a call is, if its buffers are arrays with counts of the common kinds; else None. Calls with
    equal keys have equal sizes in equal places of the same memory."""
    alltoallv = collective == "alltoallv"
    if type(recvbuf) not in (list, tuple) or type(sendbuf) not in ((list, tuple) if alltoallv else (np.ndarray,)):
        return None
    try:
        sent = _key_of(*sendbuf) if alltoallv else (_address(sendbuf), sendbuf.nbytes, sendbuf.itemsize)
        if not recvbuf[0].flags.writeable:
            return None
        key = (collective, algorithm, limit, tuple(params.items()), sent, _key_of(*recvbuf))
        hash(key)
    except (TypeError, ValueError, AttributeError, BufferError, MPI.Exception):
        return None
    return key


def _key_of(array: Any, counts: Any) -> tuple[Any, ...]:
    """Raises what there is to raise for others than an array with counts, or (counts, displacements), in arrays."""
    if type(counts) is not tuple:
        return _address(array), array.nbytes, array.itemsize, counts.itemsize, counts.tobytes()
    told = [(each.itemsize, each.tobytes()) for each in counts]
    return _address(array), array.nbytes, array.itemsize, *told


def run_again(state: State, sendbuf: Any, recvbuf: Any) -> bool:
    """Run a call as one that is kept, in a regime that holds for now. False: nothing has been done."""
    regime = state.choices.regime
    if regime.left <= 0 or not state.unwatched:
        return False
    choice = regime.current
    key = _key("alltoallv", sendbuf, recvbuf, choice.algorithm, choice.params, LIMIT)
    if key is None or key not in state.vectors:
        return False
    plan = state.vectors[key]
    state.vectors.move_to_end(key)
    regime.left -= 1
    state.run(plan)
    return True


def in_regime(state: State, sendbuf: Any, recvbuf: Any, native: Callable[[Any, Any], Any]) -> Any:
    """A call that may be looked at, or timed; see `online.Regime`. ``native`` is the MPI library's."""
    regime = state.choices.regime
    if not regime.left and regime.trial is None:
        _compare(state, "alltoallv")
        regime.survey(_looked_at(state, sendbuf, recvbuf))
    begin, current = perf_counter(), regime.current
    if current.is_native and state.unwatched:
        progress.before_blocking()
        result = native(sendbuf, recvbuf)
    else:
        result = serve_vector(state, "alltoallv", sendbuf, recvbuf, current.algorithm, dict(current.params))
    if regime.trial is not None:
        regime.note(perf_counter() - begin)
    else:
        regime.left -= 1
    return result


def _compare(state: State, what: str) -> None:
    """If calls are checked, see whether all ranks are about to look at their blocks together."""
    if state.check:
        state.same_call(Said(f"{what}, agreement on algorithms"))


def _looked_at(state: State, sendbuf: Any, recvbuf: Any) -> Spread:
    """The blocks that this rank sends. Whatever its arguments, every rank takes part in a survey."""
    try:
        return spread_of(alltoallv_call(state, sendbuf, recvbuf, NATIVE, {}).sent.sizes)
    except ArgumentError:
        return Spread(unfit=1)


def spread_of(sizes: Sizes) -> Spread:
    """Of blocks of so many bytes each."""
    small = np.count_nonzero((sizes > 0) & (sizes < LIMIT))
    return Spread(int(np.count_nonzero(sizes)), int(small), int(sizes.sum()), int(sizes.max()))


def _native(state: State, sendbuf: Any, recvbuf: Any) -> Any:
    """The MPI library's own, without a look at the arguments. Raises as `alltoallv` does."""
    try:
        state.user.Alltoallv(sendbuf, recvbuf)
    except (TypeError, ValueError, KeyError, BufferError) as error:
        alltoallv_call(state, sendbuf, recvbuf, NATIVE, {}, LIMIT)  # says what is wrong
        raise BufferTypeError("sendbuf, recvbuf", "what mpi4py takes", str(error), state.rank) from None
    return recvbuf[0] if isinstance(recvbuf, list | tuple) else recvbuf


def _checked_native(state: State, sendbuf: Any, recvbuf: Any) -> Any:
    """`_native`, after a look at the arguments; what else serves a call has its own."""
    if not _sound(state, sendbuf, recvbuf):
        alltoallv_call(state, sendbuf, recvbuf, NATIVE, {})
    return _native(state, sendbuf, recvbuf)


def _sound(state: State, sendbuf: Any, recvbuf: Any) -> bool:
    """Whether both buffers are of the common kind, an array and one count per rank, hold their blocks,
    and this rank receives from itself what it sends: the checks of `alltoallv_call`, at less cost."""
    sent, received = _counts(state, sendbuf), _counts(state, recvbuf)
    own = state.rank
    return bool(sent and received and sent[own] * sendbuf[0].itemsize == received[own] * recvbuf[0].itemsize)


def _counts(state: State, spec: Any) -> list[int] | None:
    """The counts of a buffer of the common kind, if it holds them. In Python: of few numbers NumPy takes
    longer for one question."""
    if type(spec) is not list or len(spec) != 2:
        return None
    array, counts = spec
    if type(array) is not np.ndarray or type(counts) is not np.ndarray or counts.dtype.kind != "i":
        return None
    found: list[int] = counts.tolist()
    fit = counts.shape == (state.size,) and min(found) >= 0 and sum(found) <= array.size
    return found if fit else None


def alltoallv_call(
    state: State,
    sendbuf: Any,
    recvbuf: Any,
    algorithm: str,
    params: dict[str, Any],
    limit: int = LIMIT,
    held: bool = False,
) -> Call:
    """The call, if it is sound; for a plan that a user holds if ``held``."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ParameterError("limit", "a number of bytes, at least 0", repr(limit), state.rank)
    variant = state.choices.select_uneven("alltoallv", algorithm, params, 0, False, held)
    into = _read(state, vector_message, recvbuf, "recvbuf", state.size)
    received = side(state, into, state.size, "recvbuf")
    out = into
    if is_in_place(sendbuf):
        sent = side(state, into._replace(element=into.element._replace(plain=False)), state.size, "sendbuf")
    else:
        out = _read(state, vector_message, sendbuf, "sendbuf", state.size)
        sent = side(state, out, state.size, "sendbuf")
    own = int(sent.sizes[state.rank])
    if own != received.sizes[state.rank]:
        expected = f"{own} bytes from rank {state.rank} itself, as sendbuf has"
        raise BufferSizeError("recvbuf", expected, received.sizes[state.rank], state.rank)
    work = Work("alltoallv", variant.algorithm, variant.params, 0, False)
    return Call(state, work, sent, received, into.buffer, limit, _kinds(state, out, into))


def allgatherv_call(
    state: State, sendbuf: Any, recvbuf: Any, algorithm: str, params: dict[str, Any], held: bool = False
) -> Call:
    """As `alltoallv_call`."""
    into = _read(state, vector_message, recvbuf, "recvbuf", state.size)
    received, inplace = side(state, into, state.size, "recvbuf"), is_in_place(sendbuf)
    mean = -(-int(received.sizes.sum()) // state.size)
    variant = state.choices.select_uneven("allgatherv", algorithm, params, mean, inplace, held)
    own, out = slice(state.rank, state.rank + 1), into
    if inplace:
        sent = Side(received.address, received.sizes[own], received.at[own], None)
        if received.copying:  # brought there before, as well as back after
            load = Now(partial(copy_data, state.comm, into, state.size, received.owner, outward=True))
            sent = sent._replace(copying=(load,))
    else:
        out = _read(state, block_message, sendbuf, "sendbuf", 0)
        sent = side(state, out, 1, "sendbuf")
    if int(sent.sizes[0]) != int(received.sizes[state.rank]):
        expected = f"{sent.sizes[0]} bytes from rank {state.rank} itself, as sendbuf has"
        raise BufferSizeError("recvbuf", expected, received.sizes[state.rank], state.rank)
    work = Work("allgatherv", variant.algorithm, variant.params, 0, inplace)
    return Call(state, work, sent, received, into.buffer, kinds=_kinds(state, out, into))


def _kinds(state: State, out: Message, into: Message) -> tuple[str, str]:
    """What is sent and received consists of these, for ranks to compare."""
    return (basic_type(out.datatype), basic_type(into.datatype)) if state.check else ("", "")


def _read(state: State, reader: Callable[..., Message], spec: Any, argument: str, blocks: int) -> Message:
    """The message. Raises BufferTypeError."""
    try:
        message = reader(spec, blocks, readonly=argument == "sendbuf")
        if is_device_array(message.buffer):
            raise TypeError(f"{type(message.buffer).__name__}, in the memory of a device")
        return message
    except UNREADABLE as error:
        expected = "a buffer on the host with mpi4py's counts, displacements and datatype"
        raise BufferTypeError(argument, expected, str(error), state.rank) from None
