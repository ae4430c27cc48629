"""Arrays, and what else has the buffer protocol, as memory of the host."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from hiercoll.errors import BufferTypeError
from hiercoll.memory.interface import Array


class UserBuffer(NamedTuple):
    """A contiguous array: its address, its bytes, and those of an element."""

    address: int
    nbytes: int
    item: int
    array: Any
    dtype: np.dtype[Any]

    @property
    def items(self) -> int:
        """Number of elements."""
        return self.nbytes // self.item if self.item else 0


def host_buffer(obj: object, argument: str, rank: int, *, writable: bool) -> UserBuffer:
    """The array behind ``obj``: an ndarray or anything with the buffer protocol.

    Raises BufferTypeError for other objects, for arrays that are not contiguous, hold
    Python objects, or are read-only where they must be written.
    """
    if hasattr(obj, "__cuda_array_interface__"):
        raise BufferTypeError(argument, "an array in host memory", f"a device array ({type(obj).__name__})", rank)
    masked = sys.modules.get("numpy.ma")  # there are none without it, and it is slow to load
    if masked is not None and isinstance(obj, masked.MaskedArray):
        raise BufferTypeError(argument, "an array without a mask", "a masked array", rank)
    if isinstance(obj, np.ndarray):
        array: Array = obj
    else:
        try:
            array = np.asarray(memoryview(obj))  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError):
            expected = "a NumPy array, a buffer, or [buffer, count, MPI datatype]"
            raise BufferTypeError(argument, expected, type(obj).__name__, rank) from None
    if array.dtype.hasobject:
        raise BufferTypeError(argument, "elements of a fixed size", f"Python objects (dtype {array.dtype})", rank)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        got = f"shape {array.shape} with strides {array.strides}"
        raise BufferTypeError(argument, "a contiguous array (see numpy.ascontiguousarray)", got, rank)
    if writable and not array.flags.writeable:
        raise BufferTypeError(argument, "a writable array", "a read-only one", rank)
    return UserBuffer(array.__array_interface__["data"][0], array.nbytes, array.dtype.itemsize, array, array.dtype)
