"""MPI's datatypes taken apart: where the bytes of an element lie (MPI 4.1, chapter 5).

What is found is kept as an attribute of the datatype: its handle may be another's once it is freed.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import finalize

from mpi4py import MPI

from hiercoll.memory.regions import Element, Piece, Pieces, TooManyPiecesError, joined, moved, repeated

# Of a value and an int, with a gap between or behind them (MPI 4.1, 6.9.4).
PAIRS = (MPI.FLOAT_INT, MPI.DOUBLE_INT, MPI.LONG_INT, MPI.SHORT_INT, MPI.LONG_DOUBLE_INT, MPI.TWOINT)


def element_of(datatype: MPI.Datatype) -> Element:
    """What an element of a datatype is. Raises MPI.Exception for the null datatype."""
    known: Any = datatype.Get_attr(_key())
    if isinstance(known, Element):
        return known
    made = _element(datatype)
    datatype.Set_attr(_key(), made)
    return made


@cache
def _key() -> int:
    """Under which an element is an attribute of its datatype."""
    return int(MPI.Datatype.Create_keyval())


def _element(datatype: MPI.Datatype) -> Element:
    lower, extent = datatype.Get_extent()
    size = datatype.Get_size()
    try:
        pieces = _pieces(datatype)
    except (TooManyPiecesError, NotImplementedError):
        pieces = None
    if pieces is not None and sum(piece.nbytes for piece in pieces) != size:
        pieces = None  # a type that this library lays out in another way
    plain = lower == 0 and extent == size and (pieces == (Piece(0, size),) or (pieces == () and not size))
    return Element(size, lower, extent, plain, pieces)


def _pieces(datatype: MPI.Datatype) -> Pieces:
    """Where its bytes lie, in the order of its type map. Raises NotImplementedError, TooManyPiecesError."""
    if datatype.is_predefined:
        return _predefined(datatype)
    inner, combiner, how = datatype.decode()
    made = how.get("datatypes", [inner])
    try:
        if combiner == "STRUCT":
            return joined(
                moved(_several(each, count), at)
                for each, count, at in zip(made, how["blocklengths"], how["displacements"], strict=True)
            )
        return _derived(inner, combiner, how)
    finally:
        for each in made:  # new handles of the types that it is made of
            if not each.is_predefined:
                each.Free()


def _predefined(datatype: MPI.Datatype) -> Pieces:
    """Of one of MPI's own types."""
    size, (_, extent) = datatype.Get_size(), datatype.Get_true_extent()
    if datatype in PAIRS and size != extent:
        value = size - MPI.INT.Get_size()
        return joined([(Piece(0, value),), (Piece(max(value, MPI.INT.Get_size()), MPI.INT.Get_size()),)])
    if size != extent:
        raise NotImplementedError
    return (Piece(0, size),) if size else ()


def _several(datatype: MPI.Datatype, count: int) -> Pieces:
    """Of so many elements, one extent after the other."""
    return repeated(_pieces(datatype), count, datatype.Get_extent()[1])


def _derived(inner: MPI.Datatype, combiner: str, how: dict[str, Any]) -> Pieces:
    """Of a type made of one other type. Raises NotImplementedError for those that distribute arrays."""
    extent = inner.Get_extent()[1]
    if combiner in ("DUP", "RESIZED"):
        return _pieces(inner)
    if combiner == "CONTIGUOUS":
        return _several(inner, how["count"])
    if combiner == "SUBARRAY":
        return _subarray(inner, how)
    unit = 1 if combiner.startswith("H") else extent  # of displacements and strides, in bytes
    if combiner in ("VECTOR", "HVECTOR"):
        return repeated(_several(inner, how["blocklength"]), how["count"], how["stride"] * unit)
    if combiner in ("INDEXED_BLOCK", "HINDEXED_BLOCK"):
        block = _several(inner, how["blocklength"])
        return joined(moved(block, at * unit) for at in how["displacements"])
    if combiner in ("INDEXED", "HINDEXED"):
        pieces = _pieces(inner)
        both = zip(how["blocklengths"], how["displacements"], strict=True)
        return joined(moved(repeated(pieces, count, extent), at * unit) for count, at in both)
    raise NotImplementedError


def _subarray(inner: MPI.Datatype, how: dict[str, Any]) -> Pieces:
    """Of a part of an array."""
    axes = list(zip(how["sizes"], how["subsizes"], how["starts"], strict=True))
    if how["order"] == MPI.ORDER_C:
        axes.reverse()  # the last one varies fastest
    pieces, stride, offset = _pieces(inner), inner.Get_extent()[1], 0
    for size, count, start in axes:
        pieces = repeated(pieces, count, stride)
        offset += start * stride
        stride *= size
    return moved(pieces, offset)


def own_datatype(datatype: MPI.Datatype) -> MPI.Datatype:
    """A duplicate that is freed with this object: a program may free its own one while a call is under way, or after it
    has made a plan (MPI 4.1, 5.1.9), and its handle may be another one's then."""
    own = datatype.Dup()
    finalize(own, _free, own.handle).atexit = False
    return own


def _free(handle: int) -> None:
    if not MPI.Is_finalized():
        MPI.Datatype.fromhandle(handle).Free()
