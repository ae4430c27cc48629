"""What calls are told apart by: keys of their arguments, equal for calls that one plan, or one method, serves."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from hiercoll.calls.devices import Ends, ends_of
from hiercoll.calls.given import are_arrays, has_datatype, has_known_operation, is_in_elements, operation_and_order
from hiercoll.collectives import Collective, Holds
from hiercoll.runtime.arguments import Arguments
from hiercoll.runtime.datatypes import element_of

Alias: TypeAlias = "tuple[object, ...]"
_address = MPI.Get_address
PLAIN_PARAMS = frozenset((int, str))  # types of parameters


def equal_alias(collective: Collective, given: Arguments) -> Alias | None:
    """What `run_known`, or `run_known_on_device`, asks for, of arguments that have been found sound; None for what
    they do not know."""
    if not may_come_again(collective, given):
        return None
    send, recv = given.send, given.recv
    if not are_arrays(collective, send, recv):
        ends = ends_of(collective, given)
        return None if ends is None else device_key(collective, given, ends)
    if collective.one_buffer:
        send = None
    how = operation_and_order(collective, given)
    return equal_key(collective, given.algorithm, given.transport, *how, given.root, send, recv, given.named)


def may_come_again(collective: Collective, given: Arguments) -> bool:
    """Whether a call is told from others by its buffers and by arguments that can be compared."""
    return (
        given.stream is None
        and type(given.root) is int
        and has_known_operation(collective, given)
        and PLAIN_PARAMS.issuperset(map(type, given.params.values()))
    )


def equal_key(
    collective: Collective,
    algorithm: Any,
    transport: Any,
    op: Any,
    order: Any,
    root: int,
    send: Any,
    recv: Any,
    params: dict[str, Any],
) -> Alias:
    """The key of a call on arrays; ``send`` is None where one buffer serves, and either one where the rank has none.
    AttributeError: not arrays. Operations are MPI's own, whose handles stay."""
    ends = [
        (each,) if each is None or each is MPI.IN_PLACE else (_address(each), each.nbytes, each.dtype)
        for each in (recv, send)
    ]
    return (collective, algorithm, transport, op and op.handle, order, root, *ends, *params.items())


def device_key(collective: Collective, given: Arguments, ends: Ends) -> Alias:
    """The key of a call on device arrays, of which this is told by ``ends``."""
    op, order = operation_and_order(collective, given)
    how = (given.algorithm, given.transport, op and op.handle, order, given.root)
    return (collective, *how, *ends.places, *given.named.items())


def uneven_alias(collective: Collective, given: Arguments) -> Alias | None:
    """What a call is, if its buffers are arrays with counts of the common kinds; else None. Calls with
    equal aliases have equal sizes in equal places of the same memory."""
    send, recv = given.send, given.recv
    if given.stream is not None or type(given.transport) is not str or collective.is_rooted:
        return None
    if collective.typed:
        return _typed_alias(collective, given)
    if collective.is_counted:
        return _parts_alias(collective, given)
    send, recv = _without_datatype(send), _without_datatype(recv)
    in_place, kinds = send is MPI.IN_PLACE, (np.ndarray,) if collective.send is Holds.ONE else (list, tuple)
    if type(recv) not in (list, tuple) or not (in_place or type(send) in kinds):
        return None
    try:
        if in_place:
            sent: Alias = ("in place",)
        else:
            sent = (_address(send), send.nbytes, send.itemsize) if type(send) is np.ndarray else _counted(*send)
        if not recv[0].flags.writeable:
            return None
        key = (collective, given.algorithm, given.transport, given.limit, *given.params.items(), sent, _counted(*recv))
        hash(key)
    except (TypeError, ValueError, AttributeError, BufferError, MPI.Exception):
        return None
    return key


def _without_datatype(spec: Any) -> Any:
    """An array with counts, (counts, displacements) or neither, as it may be spelled; as it is if it counts others than
    its elements."""
    if not has_datatype(spec) or not is_in_elements(spec):
        return spec
    array, *which, _ = spec
    return array if not which else [array, which[0] if len(which) == 1 else tuple(which)]


def _parts_alias(collective: Collective, given: Arguments) -> Alias | None:
    """The same of a vector in an array whose parts, of so many elements each, are combined on one rank each."""
    if not may_come_again(collective, given) or not are_arrays(collective, given.send, given.recv):
        return None
    try:
        if not given.recv.flags.writeable:
            return None
        how = (given.algorithm, given.transport, given.op, given.order, given.limit)
        key = equal_key(collective, *how, given.send, given.recv, given.named)
        key = (*key, *_numbers(given.recvcounts))
        hash(key)
    except (TypeError, ValueError, AttributeError, BufferError, MPI.Exception):
        return None
    return key


def _typed_alias(collective: Collective, given: Arguments) -> Alias | None:
    """The same of blocks with datatypes of their own. An element says what a datatype is, whatever its handle."""
    try:
        ends = [spec if spec is MPI.IN_PLACE else _typed(*spec) for spec in (given.send, given.recv)]
        if not given.recv[0].flags.writeable:
            return None
        key = (collective, given.algorithm, given.transport, given.limit, *given.params.items(), *ends)
        hash(key)
    except (TypeError, ValueError, AttributeError, BufferError, MPI.Exception):
        return None
    return key


def _typed(array: Any, *how: Any) -> Alias:
    """Raises what there is to raise for others than arrays."""
    *numbers, datatypes = how
    given = numbers[0] if len(numbers) == 1 else numbers
    each = [tuple(one) if type(one) is list else (one.itemsize, one.tobytes()) for one in given]
    return _address(array), array.nbytes, *each, *map(element_of, datatypes)


def _counted(array: Any, counts: Any) -> Alias:
    """Raises what there is to raise for others than an array with counts, or (counts, displacements), in arrays or in
    lists of whole numbers."""
    each = counts if type(counts) is tuple else (counts,)
    return _address(array), array.nbytes, array.itemsize, *map(_numbers, each)


def _numbers(given: Any) -> Alias:
    if type(given) is not list:
        return given.itemsize, given.tobytes()
    if not all(type(number) is int for number in given):  # 2.0 equals 2, and is refused
        raise TypeError
    return tuple(given)
