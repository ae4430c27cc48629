"""What calls are told apart by: keys of their arguments, equal for calls that one plan, or one method, serves."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from hiercoll.calls.devices import Ends, ends_of
from hiercoll.collectives import Collective, Holds
from hiercoll.cuda import is_device_array
from hiercoll.runtime.datatypes import element_of
from hiercoll.runtime.messages import INT_MAX
from hiercoll.runtime.request import Arguments
from hiercoll.runtime.specifications import buffer_of

Alias: TypeAlias = "tuple[object, ...]"
_address = MPI.Get_address
PLAIN_PARAMS = frozenset((int, str))  # types of parameters


def are_arrays(collective: Collective, send: Any, recv: Any) -> bool:
    """Whether the buffers of a call are arrays, or None where only the root has them, or on all ranks in place; of one
    buffer, ``recv``; where there is no buffer: always."""
    if not collective.buffers:
        return True
    if type(recv) is np.ndarray:
        if type(send) is np.ndarray or collective.one_buffer:
            return True
        return send is (None if collective.is_rooted else MPI.IN_PLACE)
    return recv is None and collective.is_rooted and type(send) is np.ndarray


def is_on_device(spec: Any) -> bool:
    """Whether a buffer specification is of device memory."""
    return is_device_array(spec[0] if isinstance(spec, list | tuple) and spec else spec)


def uses_device(given: Arguments) -> bool:
    """Whether a call is on device memory. Ranks may have but one of the buffers."""
    return is_on_device(given.recv) or is_on_device(given.send)


def operation_and_order(collective: Collective, given: Arguments) -> tuple[Any, Any]:
    """Operation and order of a reduction."""
    return (given.op, given.order) if collective.operation else (None, None)


def has_known_operation(collective: Collective, given: Arguments) -> bool:
    """Whether a reduction's operation is one of MPI's own: others may be freed, and mean something else later."""
    return not collective.operation or (isinstance(given.op, MPI.Op) and bool(given.op.is_predefined))


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


def _has_datatype(spec: Any) -> bool:
    return type(spec) in (list, tuple) and len(spec) > 1 and isinstance(spec[-1], MPI.Datatype)


def is_in_elements(spec: Any) -> bool:
    """Whether what says which blocks a buffer has counts its elements: with no datatype, or with one of MPI's own that
    is as long, which nobody can free."""
    if not _has_datatype(spec):
        return True
    array, datatype = spec[0], spec[-1]
    if type(array) is not np.ndarray or not datatype.is_predefined:
        return False
    return bool(array.itemsize == datatype.size == datatype.extent)


def _without_datatype(spec: Any) -> Any:
    """An array with counts, (counts, displacements) or neither, as it may be spelled; as it is if it counts others than
    its elements."""
    if not _has_datatype(spec) or not is_in_elements(spec):
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


def arrays_of(collective: Collective, given: Arguments) -> list[Any]:
    """Of the buffers that a call has, without the counts or datatypes that they may come with: mpi4py reads them."""
    left_out = None if collective.is_rooted else MPI.IN_PLACE
    ends = [given.recv] if collective.one_buffer else [given.send, given.recv]
    return [buffer_of(each) for each in ends if each is not left_out]


def suits_mpi4py(buffer: Any) -> bool:
    """Whether it is, if it is an array of NumPy's, in the order of C, with elements that mpi4py knows, and no more than
    the MPI library counts (from MPI 4.0 on there is no limit)."""
    if type(buffer) is not np.ndarray:
        return True
    known: Any = MPI._typedict
    if buffer.size > INT_MAX and MPI.Get_version() < (4, 0):
        return False
    return bool(buffer.flags.c_contiguous and buffer.dtype.isnative and buffer.dtype.char in known)
