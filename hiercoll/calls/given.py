"""What of the arguments of a call can be told at little cost."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hiercoll.collectives import Collective
from hiercoll.cuda import is_device_array
from hiercoll.loading import is_array
from hiercoll.runtime.arguments import Arguments, buffer_of
from hiercoll.runtime.messages import INT_MAX


def are_arrays(collective: Collective, send: Any, recv: Any) -> bool:
    """Whether the buffers of a call are arrays, or None where only the root has them, or on all ranks in place; of one
    buffer, ``recv``; where there is no buffer: always."""
    if not collective.buffers:
        return True
    if is_array(recv):
        if is_array(send) or collective.one_buffer:
            return True
        return send is (None if collective.is_rooted else MPI.IN_PLACE)
    return recv is None and collective.is_rooted and is_array(send)


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


def has_datatype(spec: Any) -> bool:
    """Whether a buffer specification ends with a datatype."""
    return type(spec) in (list, tuple) and len(spec) > 1 and isinstance(spec[-1], MPI.Datatype)


def is_in_elements(spec: Any) -> bool:
    """Whether what says which blocks a buffer has counts its elements: with no datatype, or with one of MPI's own that
    is as long, which nobody can free."""
    if not has_datatype(spec):
        return True
    array, datatype = spec[0], spec[-1]
    if not is_array(array) or not datatype.is_predefined:
        return False
    return bool(array.itemsize == datatype.size == datatype.extent)


def arrays_of(collective: Collective, given: Arguments) -> list[Any]:
    """Of the buffers that a call has, without the counts or datatypes that they may come with: mpi4py reads them."""
    left_out = None if collective.is_rooted else MPI.IN_PLACE
    ends = [given.recv] if collective.one_buffer else [given.send, given.recv]
    return [buffer_of(each) for each in ends if each is not left_out]


def suits_mpi4py(buffer: Any) -> bool:
    """Whether it is, if it is an array of NumPy's, in the order of C, with elements that mpi4py knows, and no more than
    the MPI library counts (from MPI 4.0 on there is no limit)."""
    if not is_array(buffer):
        return True
    known: Any = MPI._typedict
    if buffer.size > INT_MAX and MPI.Get_version() < (4, 0):
        return False
    return bool(buffer.flags.c_contiguous and buffer.dtype.isnative and buffer.dtype.char in known)
