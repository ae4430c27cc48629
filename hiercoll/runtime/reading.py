"""From a program's arguments to a `Request`: what they mean, whether they are sound, and what is to serve the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from hiercoll.collectives import AUTO, NATIVE, Collective, Holds, Order, Sizes
from hiercoll.contracts import Contract
from hiercoll.cuda import is_device_array
from hiercoll.cuda.arrays import NO_PRODUCERS, Producers, stream_handle
from hiercoll.cuda.kernel import can_combine
from hiercoll.errors import ArgumentError, BufferSizeError, BufferTypeError, ConstraintError, ParameterError
from hiercoll.memory import SINGLE
from hiercoll.runtime.arguments import LIMIT, Arguments, Mode
from hiercoll.runtime.buffers import (
    array_like,
    check_alike,
    check_pair,
    copied_blocks,
    equal_blocks,
    own_block,
    placed_alike,
    put_aside,
    read_message,
    some_blocks,
    uneven_blocks,
)
from hiercoll.runtime.operations import HALF, Operation, accumulated, find_operation
from hiercoll.runtime.request import Data, Request
from hiercoll.runtime.sizes import Sizes as Bytes
from hiercoll.runtime.specifications import (
    Message,
    TypedMessage,
    block_message,
    is_in_place,
    typed_message,
    vector_message,
)
from hiercoll.schedule.transports import DIRECT, Transport, parse_transport
from hiercoll.settings import ORDERS
from hiercoll.tables import Variant
from hiercoll.tuner import FREE, Combining, Spread
from hiercoll.tuning.policy import Wanted

if TYPE_CHECKING:
    from hiercoll.runtime.beginning import Beginning
    from hiercoll.runtime.session import Session


def make_request(
    session: Session | Beginning, collective: Collective, given: Arguments, mode: Mode = Mode.BLOCKING, *, strict: bool
) -> Request:
    """The request that a program's arguments make, if they are sound; ``strict`` as for functions, which take no
    buffers that overlap, differ in the type of elements, or hold less than their counts need.

    Raises BufferSizeError, BufferTypeError, BufferOverlapError, UnknownAlgorithmError, ParameterError,
    ConstraintError, DeviceError. Collective where the choice is.
    """
    make = _equal_request if collective.is_even else _uneven_request
    return make(session, collective, given, mode, strict)


def _equal_request(
    session: Session | Beginning, collective: Collective, given: Arguments, mode: Mode, strict: bool
) -> Request:
    rank = session.rank
    root = _root(session, given.root, strict) if collective.root else 0
    is_read, is_written = _use(collective, session.size, rank, root)
    sent: Data | None
    if collective.is_rooted:
        sent, received = _rooted_data(session, collective, given, root, strict)
    else:
        sent, received = _equal_data(session, collective, given, strict, is_written)
    memory = session.memories[received.place].kind
    size = received.block if given.accumulate is None else 2 * received.block  # of what is combined
    place = received.place if size or not is_device_array(received.owner) else ""
    asked = _transport(session, given.transport, place, mode)
    producers = _producers(session, given, sent, received, memory)
    operation = _operation(session, given, received, memory) if collective.operation else None
    combining = FREE if operation is None else combining_of(session, given.order, operation)
    policy = session.policy
    named = AUTO if memory == "host" else given.transport
    wanted = Wanted(collective, size, sent is None, memory, mode is Mode.HELD, combining, named)
    is_auto = policy.is_auto(collective, given.algorithm)
    learner = policy.learner(wanted) if is_auto and mode is Mode.BLOCKING else None
    is_learned = is_auto and policy.has_found(wanted)
    variant = policy.select(wanted, given.algorithm, given.params)
    if is_learned and mode is not Mode.BACKGROUND and place not in ("", "host"):
        variant = within_reach(session, variant)
    transport = _transport_by(session, given, variant, place, mode) or asked
    before = (received if sent is None else sent).copies(True) if is_read else ()
    returned = received.owner if received.blocks else None
    return Request(
        collective, sent, received, root, size, variant, transport, mode, producers, memory=memory,
        result=returned if given.recv is None or strict else None, before=before,
        after=received.copies(False) if is_written else (), is_auto=is_auto, learner=learner, is_learned=is_learned,
        operation=operation, combining=combining,
    )  # fmt: skip


def _uneven_request(
    session: Session | Beginning, collective: Collective, given: Arguments, mode: Mode, strict: bool
) -> Request:
    rank, size, limit = session.rank, session.size, given.limit
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ParameterError("limit", "a number of bytes, at least 0", repr(limit), rank)
    root = _root(session, given.root, strict) if collective.root else 0
    sent: Data | None
    operation, combining = None, FREE
    if collective.is_rooted:
        sent, received = _rooted_blocks(session, collective, given, root, strict)
    elif collective.operation:
        sent, received, operation = _counted_blocks(session, given, strict)
        combining = combining_of(session, given.order, operation)
    else:
        sent, received = _blocks_for_each(session, collective, given, strict)
    memory = session.memories[received.place].kind
    transport = _transport(session, given.transport, received.place, mode, uneven=True)
    whole = received if sent is None or operation is None else sent
    mean = -(-whole.nbytes // size) if collective.sizes is Sizes.KNOWN else 0
    mean *= 2 if combining.accumulates else 1  # of what is combined
    wanted = Wanted(collective, mean, sent is None and mean > 0, held=mode is Mode.HELD, combining=combining)
    variant = session.policy.select(wanted, given.algorithm, given.params)
    is_auto = session.policy.is_auto(collective, given.algorithm)
    learns = is_auto and mode is Mode.BLOCKING and given.limit == LIMIT
    return Request(
        collective, sent, received, root, mean, variant, transport, mode,
        _producers(session, given, sent, received, memory), memory=memory, limit=limit,
        result=received.owner if received.blocks else None, before=(received if sent is None else sent).copies(True),
        after=received.copies(False), is_auto=is_auto, operation=operation, combining=combining,
        learner=session.policy.learner(wanted) if learns else None,
    )  # fmt: skip


def _equal_data(
    session: Session | Beginning, collective: Collective, given: Arguments, strict: bool, is_written: bool
) -> tuple[Data | None, Data]:
    """What is sent, None in place, and where it is received."""
    size, sent = session.size, None
    if not collective.buffers:
        return Data(0, 1, 0), Data(0, size, 0)
    count = collective.blocks(collective.recv, size)
    if collective.send is Holds.EACH and is_in_place(given.send):
        count = size  # what is combined begins where the result comes to lie
    read = partial(equal_blocks, session, strict=strict, combined=collective.operation)
    if collective.one_buffer:
        return None, read(given.recv, "buf", count, writable=is_written)
    if not is_in_place(given.send):
        sent = read(given.send, "sendbuf", collective.blocks(collective.send, size), writable=False)
    if given.recv is not None:
        received = read(given.recv, "recvbuf", count)
    elif sent is not None and strict:
        received = array_like(sent, count, _axes(collective), session.rank)
    else:
        raise BufferTypeError("recvbuf", "an array, with sendbuf=MPI.IN_PLACE", "None", session.rank)
    if sent is not None:
        check_pair(session, sent, received, strict)
    return sent, received


def _rooted_data(
    session: Session | Beginning, collective: Collective, given: Arguments, root: int, strict: bool
) -> tuple[Data, Data]:
    """The same of a collective with a root, which alone has both buffers: there are no blocks in the one that a rank
    has not, whatever it gives for it. In place, the root's own block is where it is among all, and is not moved."""
    rank, size = session.rank, session.size
    read = partial(equal_blocks, session, strict=strict, combined=collective.operation)
    blocks = collective.blocks(collective.send, size), collective.blocks(collective.recv, size)
    shape = Contract(collective.name, size, root=root).shape(rank)
    moves = collective.send is Holds.EACH  # out of the root: then the root's result may be in place, else its input
    aside = given.recv if moves else given.send
    in_place = rank == root and (aside is MPI.IN_PLACE if moves and strict else is_in_place(aside))
    sent = received = None
    if shape.held and not (in_place and not moves):
        sent = read(given.send, "sendbuf", blocks[0], writable=False)
    if shape.due and not (in_place and moves):
        if given.recv is None and not moves and sent is not None and strict:
            received = array_like(sent, blocks[1], _axes(collective), rank)
        else:
            received = read(given.recv, "recvbuf", blocks[1])
    if sent is not None and received is not None:
        check_pair(session, sent, received, strict)
    elif sent is None and received is not None:
        sent = put_aside(received) if in_place and collective.operation else own_block(received, root, int(in_place))
        if in_place and not collective.operation:  # copied to where the others' blocks will be, and back with them
            sent = sent._replace(copying=received.copying)
    elif sent is not None:
        received = own_block(sent, root, int(in_place))
    assert sent is not None and received is not None
    return sent, received


@lru_cache(maxsize=1024)
def _use(collective: Collective, size: int, rank: int, root: int) -> tuple[bool, bool]:
    """Whether ``rank`` is to read the one buffer of a collective that has one, and to write it; of others: both."""
    return Contract(collective.name, size, root=root).moves(rank) if collective.one_buffer else (True, True)


def _root(session: Session | Beginning, root: Any, strict: bool) -> int:
    """The root as a number; True is none for functions (``strict``), but one for mpi4py, and what is no more than an
    index is one for them, but none for mpi4py. Raises ParameterError."""
    is_refused = isinstance(root, bool) if strict else not hasattr(root, "__int__")
    try:
        number = -1 if is_refused else index(root)
    except TypeError:
        number = -1
    if not 0 <= number < session.size:
        raise ParameterError("root", f"a rank, a whole number from 0 to {session.size - 1}", repr(root), session.rank)
    return number


def _axes(collective: Collective) -> int:
    """How many axes a result has more than what is sent."""
    return (collective.recv is Holds.EACH) - (collective.send is Holds.EACH)


def _blocks_for_each(
    session: Session | Beginning, collective: Collective, given: Arguments, strict: bool
) -> tuple[Data | None, Data]:
    """What is sent, None in place, and where it is received, by collectives in which every rank receives from each."""
    rank, size = session.rank, session.size
    many: Callable[..., Message | TypedMessage] = typed_message if collective.typed else vector_message
    lay = partial(uneven_blocks, session, strict=strict)
    into = read_message(session, many, given.recv, "recvbuf", size, writable=True)
    received, sent = lay(into, size, "recvbuf", writable=True), None
    if not is_in_place(given.send):
        one = collective.send is Holds.ONE
        reader = block_message if one else many
        out = read_message(session, reader, given.send, "sendbuf", 0 if one else size, writable=False)
        sent = lay(out, 1 if one else size, "sendbuf", writable=False)
        sent, received = placed_alike(sent, received)
        if sent.place != received.place:
            raise BufferTypeError("recvbuf", f"memory of {sent.place}, as sendbuf", received.place, rank)
        assert sent.sizes is not None and received.sizes is not None
        own = int(sent.sizes[0 if one else rank])
        if own != received.sizes[rank]:
            expected = f"{own} bytes from rank {rank} itself, as sendbuf has"
            raise BufferSizeError("recvbuf", expected, received.sizes[rank], rank)
    elif collective.send is Holds.EACH:
        sent = copied_blocks(session, into, size, "recvbuf") if received.place == "host" else put_aside(received)
    return sent, received


def _rooted_blocks(
    session: Session | Beginning, collective: Collective, given: Arguments, root: int, strict: bool
) -> tuple[Data, Data]:
    """The same where the root has a block for each rank, or of each, and others have one. See `_rooted_data`."""
    rank, size = session.rank, session.size
    moves = collective.send is Holds.EACH
    (many, its_name), (one, name) = (given.send, "sendbuf"), (given.recv, "recvbuf")
    if not moves:
        (many, its_name), (one, name) = (one, name), (many, its_name)
    in_place = rank == root and (one is MPI.IN_PLACE if moves and strict else is_in_place(one))
    whole = single = None
    if rank == root:
        message = read_message(session, vector_message, many, its_name, size, writable=not moves)
        whole = uneven_blocks(session, message, size, its_name, writable=not moves)
    if not in_place:
        message = read_message(session, block_message, one, name, 0, writable=moves)
        single = uneven_blocks(session, message, 1, name, writable=moves)
    elif whole is not None:
        single = some_blocks(whole, slice(root, root + 1))
        if not moves:  # copied to where the others' blocks will be, and back with them
            single = single._replace(copying=whole.copying)
    assert single is not None
    if whole is None:
        whole = some_blocks(single, slice(0, 0))
        return (whole, single) if moves else (single, whole)
    whole, single = placed_alike(whole, single)
    if whole.place != single.place:
        raise BufferTypeError(name, f"memory of {whole.place}, as {its_name}", single.place, rank)
    if not np.array_equal(whole.each_block()[0][root : root + 1], single.each_block()[0]):
        expected = f"{whole.each_block()[0][root]} bytes, as in {its_name} for the root itself"
        raise BufferSizeError(name, expected, single.nbytes, rank)
    return (whole, single) if moves else (single, whole)


def _counted_blocks(session: Session | Beginning, given: Arguments, strict: bool) -> tuple[Data, Data, Operation]:
    """A vector whose parts, ``recvcounts`` elements each, are reduced on one rank each; and what this rank gets. In
    place the vector is copied before each start."""
    rank, size = session.rank, session.size
    read = partial(equal_blocks, session, blocks=1, strict=strict, combined=True)
    received = read(given.recv, "recvbuf")
    in_place = is_in_place(given.send)
    whole = received if in_place else read(given.send, "sendbuf", writable=False)
    operation = _operation(session, given, received, session.memories[received.place].kind)
    try:
        counts = [index(each) for each in given.recvcounts]
    except TypeError:
        counts = []
    if len(counts) != size or min(counts) < 0:
        raise BufferSizeError("recvcounts", f"{size} numbers of elements", repr(given.recvcounts), rank)
    sizes = np.array(counts, np.int64) * operation.given_item
    for data, name, wanted in ((whole, "sendbuf", int(sizes.sum())), (received, "recvbuf", int(sizes[rank]))):
        if (data.block < wanted) if in_place else (data.block != wanted):
            raise BufferSizeError(name, f"{wanted} bytes, as recvcounts say", data.block, rank)
    if not in_place:
        check_alike(whole, received, rank, strict)
    elif whole.copying is None:
        whole = put_aside(whole)
    parts = np.cumsum(sizes) - sizes
    sent = whole._replace(blocks=size, block=0, sizes=sizes, at=parts)
    return sent, received._replace(block=0, sizes=sizes[rank : rank + 1], at=parts[:1]), operation


def _operation(session: Session | Beginning, given: Arguments, received: Data, memory: str) -> Operation:
    """The operation on elements like those received. Raises ParameterError, and BufferTypeError for elements that it
    cannot combine there."""
    if given.accumulate is not None:
        _check_narrow(given.accumulate, received, session.rank)
        found = accumulated(find_operation(given.op, SINGLE, session.rank), received.type)
    else:
        found = find_operation(given.op, received.type, session.rank)
    if memory != "host" and (found.on_device is None or not can_combine(found.on_device)):
        raise BufferTypeError("op", "SUM, PROD, MIN or MAX of plain numbers, on a device", found.name, session.rank)
    return found


def _check_narrow(accumulate: Any, data: Data, rank: int) -> None:
    """Raises ParameterError, and BufferTypeError for elements that cannot be accumulated in single precision."""
    if accumulate != "float32":
        raise ParameterError("accumulate", "'float32' or None", repr(accumulate), rank)
    if not (isinstance(data.type, np.dtype) and data.type.name in HALF and data.type.isnative):
        raise BufferTypeError("accumulate", f"arrays of {' or '.join(HALF)}", data.type, rank)


def combining_of(session: Session | Beginning, given: Any, operation: Operation) -> Combining:
    """What a reduction asks for: the ``given`` order, or that of the environment, or one that the communicator's calls
    keep to. Raises ParameterError."""
    if given is not None and not (isinstance(given, str) and given in ORDERS):
        raise ParameterError("order", f"{' or '.join(map(repr, ORDERS))}, or None", repr(given), session.rank)
    asked = given or session.order
    order = Order[asked.upper()] if asked else Order.ANY
    native = order is Order.ANY or session.size == 1
    changes = operation.is_exact or asked == "any"
    order = max(order, Order.ANY if operation.commutes else Order.RANK)
    return Combining(order, native, changes, operation.narrow is not None)


def _transport(session: Session | Beginning, given: Any, place: str, mode: Mode, uneven: bool = False) -> Transport:
    """How messages of device memory travel. Collective at the first use of "peer" on a communicator. Raises
    ParameterError, or ConstraintError for direct messages that MPI may not be given, and for "peer" where ranks do not
    know where the others' blocks lie (``uneven``), or may not wait for each other."""
    if isinstance(given, str) and given == AUTO and place == "host":
        return DIRECT
    try:
        name, parts = parse_transport(given)
    except ParameterError as error:
        raise ParameterError(error.argument, error.expected, error.got, session.rank) from None
    if not place:  # an empty array of a device: nothing is moved
        return DIRECT
    if place == "host":
        if name in ("staged", "peer"):
            raise ParameterError("transport", "'auto' or 'direct' for arrays on the host", repr(given), session.rank)
        return DIRECT
    if name == "direct" and session.stages:
        expected = "an MPI library that takes device memory (where it does: HIERCOLL_CUDA_AWARE=1)"
        raise ConstraintError("transport 'direct'", expected, session.library, session.rank)
    if name == "peer" and (uneven or mode is Mode.BACKGROUND):
        expected = "equal blocks, and no call in the background"
        got = "blocks of any sizes" if uneven else "such a call"
        raise ConstraintError("transport 'peer'", expected, got, session.rank)
    if uneven and parts > 1:
        raise ConstraintError(f"transport '{name}:{parts}'", "equal blocks", "blocks of any sizes", session.rank)
    segments = 1 if name == "staged" else int(session.stages)
    near = name == "peer" and session.memories.node_in_reach(place)
    # Windows are made by all ranks together, for blocks that all know.
    shared = not (near or uneven or mode is Mode.BACKGROUND) and max(session.topology.node_sizes) > 1
    return Transport(near, parts or segments, packed=not (parts or segments), shared=shared)


def within_reach(session: Session | Beginning, variant: Variant) -> Variant:
    """What was learned for calls on devices, with a transport that can be had here: else with the one of calls that
    leave it open, so that it is not taken for what it is not. Collective at the first use of "peer" on a
    communicator."""
    name = variant.transport
    is_out = name.startswith("peer") and not session.memories.devices_in_reach()
    return replace(variant, transport=AUTO) if is_out or (name == "direct" and session.stages) else variant


def _transport_by(
    session: Session | Beginning, given: Arguments, variant: Variant, place: str, mode: Mode
) -> Transport | None:
    """The one that belongs to what was chosen; None where it has none, it cannot be had, or another was asked for.
    Collective at the first use of "peer" on a communicator."""
    name = variant.transport
    if name == AUTO or given.transport != AUTO or place in ("", "host") or (name == "direct" and session.stages):
        return None
    if name.startswith("peer") and mode is Mode.BACKGROUND:
        return None
    return _transport(session, name, place, mode)


def served_by(session: Session, request: Request, given: Arguments, variant: Variant, learner: Any) -> Request:
    """The request of a blocking call by "auto", with something else serving it than what is chosen, `within_reach`."""
    transport = request.transport
    if request.collective.is_even:
        where = (request.received.place, request.mode)
        asked = _transport(session, given.transport, *where)
        transport = _transport_by(session, given, variant, *where) or asked
    return request._replace(variant=variant, transport=transport, is_auto=True, learner=learner, is_learned=True)


def _producers(
    session: Session | Beginning, given: Arguments, sent: Data | None, received: Data, memory: str
) -> Producers:
    """What produces the data of a call, on a device. Raises ParameterError."""
    if given.stream is not None:
        try:
            stream_handle(given.stream)
        except ParameterError as error:
            raise ParameterError(error.argument, error.expected, error.got, session.rank) from None
    if memory == "host":
        return NO_PRODUCERS
    owners = [data.owner for data in (sent, received) if data is not None and data.blocks]
    owners = [owner for owner in owners if is_device_array(owner)]  # what is empty may lie anywhere
    made = (owners.pop(),) if given.recv is None else ()
    return Producers(given.stream, tuple(owners), made)


def spread_of(sizes: Bytes) -> Spread:
    """Of blocks of so many bytes each."""
    small = np.count_nonzero((sizes > 0) & (sizes < LIMIT))
    return Spread(int(np.count_nonzero(sizes)), int(small), int(sizes.sum()), int(sizes.max()))


def own_spread(session: Session | Beginning, collective: Collective, given: Arguments) -> Spread:
    """The blocks that this rank sends. Whatever its arguments, every rank takes part in a survey."""
    try:
        request = make_request(session, collective, given._replace(algorithm=NATIVE), strict=False)
    except ArgumentError:
        return Spread(unfit=1)
    return spread_of(request.blocks(session.rank).sent)
