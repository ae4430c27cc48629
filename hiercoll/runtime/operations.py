"""What a reduction does with elements: an operation and a datatype of MPI's, checked to go together, and applied here.

Whatever the MPI library can combine, its ``MPI_Reduce_local`` combines (MPI 4.1, 6.9.7): predefined operations on basic
datatypes and pairs, and operations that programs define.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from hiercoll.errors import BufferTypeError, ParameterError
from hiercoll.memory import OPERATIONS, Reduction
from hiercoll.runtime.datatypes import element_of, own_datatype

HALF = ("float16", "bfloat16")  # types that can be widened; the second is of the package ml_dtypes
PREDEFINED = ("MAX", "MIN", "SUM", "PROD", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR", "MAXLOC", "MINLOC")
_names: dict[int, str] = {getattr(MPI, name).handle: name for name in PREDEFINED}
_no_reductions = {getattr(MPI, name).handle: f"MPI.{name}" for name in ("OP_NULL", "REPLACE", "NO_OP")}
INEXACT = ("SUM", "PROD")  # of floating-point numbers: other brackets, other bits
CHUNK = 32768  # bytes that are copied and combined at a time: so many stay in the caches
Pieces: TypeAlias = "Sequence[tuple[int, ...]]"  # addresses of left, right and target, and a length in bytes


class Operation(NamedTuple):
    """``name``: equal on all ranks, with the type of the elements, each of ``item`` bytes. ``commutes``: whether
    operands may change places; ``is_exact``: whether every order of contributions gives the same bits (of
    floating-point numbers, but for the signs of zeros and NaN); ``on_device``: what a device does, if it can.
    ``narrow``: the type of the program's elements, if those that are combined are wider."""

    op: MPI.Op
    datatype: MPI.Datatype
    item: int
    name: str
    commutes: bool
    is_exact: bool
    on_device: Reduction | None = None
    narrow: np.dtype[Any] | None = None

    @property
    def given_item(self) -> int:
        """Bytes of an element as the program has it."""
        return self.item if self.narrow is None else self.narrow.itemsize

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others in this process, as long as it is kept: a program's own may be freed, and their
        handles be others'."""
        handles = [each.handle if each.is_predefined else (each.handle, id(each)) for each in (self.op, self.datatype)]
        return (*handles, self.narrow)

    @property
    def lasting(self) -> Operation:
        """The same for a plan: with a datatype of its own, unless it is one of MPI's (see `own_datatype`)."""
        return self if self.datatype.is_predefined else self._replace(datatype=own_datatype(self.datatype))

    def combining(self, pieces: Pieces) -> partial[None]:
        """What puts left (+) right into the target, piece by piece."""
        return partial(_combine, self, pieces)


def _combine(how: Operation, pieces: Pieces) -> None:
    for left, right, target, nbytes in pieces:
        if target == left != right and how.commutes:
            left, right = right, left
        kept = ctypes.create_string_buffer(ctypes.string_at(left, nbytes), nbytes) if target == left != right else None
        for at in range(0, nbytes, step := max(CHUNK // how.item, 1) * how.item):
            length = min(step, nbytes - at)
            first = (ctypes.addressof(kept) if kept is not None else left) + at
            if target != right:
                ctypes.memmove(target + at, right + at, length)
            _reduce_local(how, first, target + at, length)


def _reduce_local(how: Operation, left: int, target: int, nbytes: int) -> None:
    """The MPI library's: target = left (+) target."""
    count, ends = nbytes // how.item, (MPI.buffer.fromaddress(each, nbytes) for each in (left, target))
    operand, result = ([each, count, how.datatype] for each in ends)
    how.op.Reduce_local(operand, result)


def find_operation(op: Any, elements: Any, rank: int) -> Operation:
    """The operation on elements of NumPy's or MPI's type ``elements``.

    Raises ParameterError for what is no operation of MPI's for reductions, BufferTypeError for elements that it cannot
    combine, or that reach beyond their extent.
    """
    if not isinstance(op, MPI.Op) or op.handle in _no_reductions:
        got = _no_reductions[op.handle] if isinstance(op, MPI.Op) else repr(op)
        raise ParameterError("op", "an operation of MPI's for reductions, such as MPI.SUM", got, rank)
    if op.is_predefined and not (isinstance(elements, MPI.Datatype) and not elements.is_predefined):
        kind = elements.handle if isinstance(elements, MPI.Datatype) else elements
        if (op.handle, kind) not in _found:
            _found[op.handle, kind] = _find(op, elements, rank)
        return _found[op.handle, kind]
    return _find(op, elements, rank)


def accumulated(how: Operation, narrow: np.dtype[Any]) -> Operation:
    """The operation on elements of a ``narrow`` type, which are widened before, and rounded once."""
    return how._replace(name=f"{how.name}, rounded to {narrow.name}", narrow=narrow)


_found: dict[tuple[int, Any], Operation] = {}  # of predefined operations on predefined types


def _find(op: MPI.Op, elements: Any, rank: int) -> Operation:
    datatype = elements if isinstance(elements, MPI.Datatype) else _datatype(elements)
    name, spelled = _names.get(op.handle, ""), _spelled(elements)
    if datatype is None or (name and not _go_together(op.handle, datatype.handle)):
        hint = " (or accumulate='float32')" if spelled in HALF and name in INEXACT else ""
        what = f"an operation that combines {spelled}{hint}"
        raise BufferTypeError("op", what, name or "one of the program's", rank)
    element = element_of(datatype)
    lower, extent = datatype.Get_true_extent()
    if element.lower or lower < 0 or not 0 < lower + extent <= element.extent:
        raise BufferTypeError("op", "elements that lie within their extent", spelled, rank)
    is_number = datatype.is_predefined and not name.endswith("LOC")
    floats = not is_number or datatype.typechar in "efdgFDG"
    commutes = op.Is_commutative()
    words = name or f"an operation of the program's{'' if commutes else ', which does not commute'}"
    is_exact = bool(name) and not (floats and name in INEXACT)
    dtype = _dtype(elements)
    device = Reduction(dtype, name.lower()) if dtype is not None and name.lower() in OPERATIONS else None
    return Operation(op, datatype, element.extent, f"{words} of {spelled}", commutes, is_exact, device)


def _spelled(elements: Any) -> str:
    """A type of elements in words that are the same on all ranks."""
    if not isinstance(elements, MPI.Datatype):
        return str(elements)
    if not elements.is_predefined:
        return f"elements of {elements.Get_extent()[1]} bytes"
    dtype = _dtype(elements)
    return str(elements.typestr if dtype is None else dtype)  # as of an array


def _dtype(elements: Any) -> np.dtype[Any] | None:
    """NumPy's type for elements; None if it has none."""
    if not isinstance(elements, MPI.Datatype):
        return elements  # type: ignore[no-any-return]
    try:
        return np.dtype(elements.typestr) if elements.is_predefined else None
    except TypeError:
        return None


def _datatype(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    """MPI's type for numbers of NumPy's; None if it has none."""
    try:
        return MPI.Datatype.fromcode(dtype.char) if dtype.isnative and dtype.isbuiltin == 1 else None
    except (ValueError, TypeError):
        return None


@lru_cache(maxsize=1024)
def _go_together(op: int, datatype: int) -> bool:
    """Whether the MPI library combines elements of that type so: it does, or says that it does not, on one of each."""
    kind = MPI.Datatype.fromhandle(datatype)
    room = np.zeros((2, max(kind.Get_extent()[1], 1)), np.uint8)
    with _errors_raised():
        try:
            MPI.Op.fromhandle(op).Reduce_local([room[0], 1, kind], [room[1], 1, kind])
        except MPI.Exception:
            return False
    return True


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Let errors in calls without a communicator be exceptions, whatever the program has asked for: they are those of
    MPI_COMM_SELF, in older libraries of MPI_COMM_WORLD (MPI 4.1, 9.3)."""
    asked = [(comm, MPI.Comm.Get_errhandler(comm)) for comm in (MPI.COMM_SELF, MPI.COMM_WORLD)]
    try:
        for comm, _ in asked:
            MPI.Comm.Set_errhandler(comm, MPI.ERRORS_RETURN)
        yield
    finally:
        for comm, handler in asked:
            MPI.Comm.Set_errhandler(comm, handler)
            if handler not in (MPI.ERRORS_RETURN, MPI.ERRORS_ARE_FATAL, MPI.ERRORS_ABORT):
                handler.Free()  # this reference
