"""mpi4py's buffer specifications, read as mpi4py reads them.

What is accepted, what is inferred and which built-in error is raised is mpi4py 4's (its
documentation, "Communication of buffer-like objects"), so that a call that hiercoll serves
means what it means to mpi4py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from operator import index
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from hiercoll.memory.regions import NOTHING, Block, Element, packing
from hiercoll.runtime import compiled
from hiercoll.runtime.datatypes import element_of, own_datatype

if TYPE_CHECKING:
    import numpy.typing as npt

_to_oneself = Lock()  # for messages of one thread at a time: they all look the same
# What a specification may raise that mpi4py does not understand, or that names no datatype of its own.
UNREADABLE = (TypeError, ValueError, KeyError, BufferError, OverflowError, AttributeError, MPI.Exception)
Sizes: TypeAlias = "npt.NDArray[np.int64]"


class Message(NamedTuple):
    """A buffer specification. ``counts`` and ``displs`` (in elements) are per block: one number
    each for equal blocks, one after the other. ``nbytes`` is the length of the whole buffer."""

    buffer: Any
    address: int
    nbytes: int
    counts: Any
    displs: Any
    datatype: MPI.Datatype
    element: Element


class TypedMessage(NamedTuple):
    """A buffer specification with a datatype for each block. ``displs`` are in bytes."""

    buffer: Any
    address: int
    nbytes: int
    counts: Sizes
    displs: Sizes
    datatypes: Sequence[MPI.Datatype]


def block_message(spec: Any, blocks: int, *, readonly: bool) -> Message:
    """Equal blocks: a buffer, or ``[buffer, datatype]``, ``[buffer, count]``, ``[buffer, count, datatype]``,
    ``[buffer, (count, displ), datatype]``, ``[buffer, count, displ, datatype]``.

    Raises TypeError, ValueError, KeyError and BufferError as mpi4py does.
    """
    buffer, count, displ, datatype = _unpacked(spec, (list, tuple))
    message = _message(buffer, datatype, readonly)
    element, length, offset = message.element, message.nbytes, 0
    if displ is not None:
        offset = index(displ)
        if offset < 0:
            raise ValueError(f"message: negative displacement {offset}")
        if offset * max(element.extent, 0) > length or (offset and element.extent <= 0):
            raise ValueError(f"message: displacement {offset} out of bounds")
        length -= offset * element.extent
    if count is not None:
        number = index(count)
        if number < 0:
            raise ValueError(f"message: negative count {number}")
        if number and buffer is None:
            raise ValueError(f"message: buffer is None but count is {number}")
    else:
        number = _items(length, element)
        if blocks > 1 and number % blocks:
            raise ValueError(f"message: cannot infer count, {number} entries are not a multiple of {blocks} blocks")
        number //= max(blocks, 1)
    return message._replace(counts=number, displs=offset)


def vector_message(spec: Any, blocks: int, *, readonly: bool) -> Message:
    """Uneven blocks: as `block_message`, with a number or a sequence per block for counts and
    displacements. Without counts, the buffer is divided as evenly as it can be.

    Raises TypeError, ValueError, KeyError and BufferError as mpi4py does.
    """
    buffer, counts, displs, datatype = _unpacked(spec, (tuple,))
    message = _message(buffer, datatype, readonly)
    if counts is None:
        each, rest = divmod(_items(message.nbytes, message.element), blocks)
        numbers = np.full(blocks, each, np.int64)
        numbers[:rest] += 1
    else:
        numbers = _sequence(counts, blocks, 1)
    places = np.cumsum(numbers) - numbers if displs is None else _sequence(displs, blocks, np.arange(blocks))
    return message._replace(counts=numbers, displs=places)


def typed_message(spec: Any, blocks: int, *, readonly: bool) -> TypedMessage:
    """Blocks of datatypes of their own: ``[buffer, datatypes]``, ``[buffer, (counts, displs), datatypes]`` or
    ``[buffer, counts, displs, datatypes]``; displacements in bytes.

    Raises TypeError, ValueError and BufferError as mpi4py does.
    """
    if not isinstance(spec, list | tuple):
        raise TypeError("message: expecting list/tuple")
    if len(spec) not in (2, 3, 4):
        raise ValueError("message: expecting 2 to 4 items")
    buffer, *given, datatypes = spec
    counts: Any
    displs: Any
    counts, displs = given[0] if len(given) == 1 else given or (None, None)
    address = nbytes = 0
    if buffer is not MPI.BOTTOM and buffer is not None:
        found = MPI.buffer.frombuffer(_in_order(buffer), readonly)
        address, nbytes = found.address, found.nbytes
    elif counts is None or displs is None:
        raise ValueError("message: BOTTOM requires counts and displs")
    if counts is None and displs is None:
        numbers, places = np.ones(blocks, np.int64), np.zeros(blocks, np.int64)
    elif np.ndim(counts) and np.ndim(displs):
        numbers, places = _sequence(counts, blocks, 1), _sequence(displs, blocks, 1)
    else:
        raise TypeError("message: expecting sequences of counts and displacements")
    if len(datatypes) != blocks:
        raise ValueError(f"expecting {blocks} items, got {len(datatypes)}")
    if not all(isinstance(each, MPI.Datatype) for each in datatypes):
        raise TypeError("message: expecting MPI datatypes")
    return TypedMessage(buffer, address, nbytes, numbers, places, datatypes)


def is_in_place(spec: Any) -> bool:
    """Whether a send specification says that the data are in the receive buffer: MPI.IN_PLACE, or None."""
    return spec is None or spec is MPI.IN_PLACE


def _unpacked(spec: Any, pairs: tuple[type, ...]) -> tuple[Any, Any, Any, Any]:
    """Buffer, counts, displacements and datatype as given, None where not."""
    if not isinstance(spec, list | tuple):
        if spec is None:
            raise TypeError("message: expecting buffer or list/tuple")
        return spec, None, None, None
    if len(spec) not in (2, 3, 4):
        raise ValueError("message: expecting 2 to 4 items")
    if len(spec) == 4:
        return spec[0], spec[1], spec[2], spec[3]
    buffer, count, datatype = spec[0], spec[1], spec[2] if len(spec) == 3 else None
    if len(spec) == 2 and isinstance(count, MPI.Datatype | str):
        return buffer, None, None, count
    pair: Any = count if isinstance(count, pairs) else (count, None)
    return buffer, *pair, datatype


def _message(buffer: Any, datatype: Any, readonly: bool) -> Message:
    if buffer is MPI.BOTTOM or buffer is None:
        if datatype is None:
            raise KeyError("cannot map None to MPI datatype")
        named = _known(datatype)[0] if isinstance(datatype, str) else datatype
        return Message(buffer, 0, 0, 0, 0, named, element_of(named))
    found = MPI.buffer.frombuffer(_in_order(buffer), readonly)
    if datatype is None or isinstance(datatype, str):
        named, element = _known(_format(buffer) if datatype is None else datatype)
    elif datatype is MPI.BYTE:
        named, element = _known("B")
    else:
        named, element = datatype, element_of(datatype)
    return Message(buffer, found.address, found.nbytes, 0, 0, named, element)


def _in_order(buffer: Any) -> Any:
    """An array in the order of Fortran as one in the order of C: the same bytes."""
    if type(buffer) is np.ndarray and buffer.flags.f_contiguous and not buffer.flags.c_contiguous:
        return buffer.T
    return buffer


def _format(buffer: Any) -> str:
    """The type code of a buffer's elements. Raises KeyError."""
    try:
        return memoryview(buffer).format
    except TypeError:  # an array of a device, or of the host, that only DLPack knows
        if isinstance(interface := getattr(buffer, "__cuda_array_interface__", None), dict):
            return str(interface["typestr"][1:])
        code = _dlpack_format(buffer)
        if not code:
            raise KeyError(f"cannot tell the elements of {type(buffer).__name__}") from None
        return code


class _DLTensor(ctypes.Structure):
    """The beginning of a tensor as DLPack lays it out, up to its type."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}  # DLPack's numbers of kinds of elements
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _dlpack_format(buffer: Any) -> str:
    """The type code of an array that DLPack knows; "" where MPI has none. Read from the capsule itself: NumPy
    prints an error of its own for what it does not import."""
    try:
        tensor = _DLTensor.from_address(_pointer(buffer.__dlpack__(), b"dltensor"))
    except Exception:  # whatever the array's own library raises
        return ""
    kind = _KINDS.get(tensor.kind, "")
    return f"{kind}{tensor.bits // 8}" if kind and tensor.lanes == 1 else ""


@lru_cache(maxsize=256)
def _known(code: str) -> tuple[MPI.Datatype, Element]:
    """The datatype of a type code, and its elements. Raises KeyError."""
    try:
        datatype = MPI.Datatype.fromcode(code[1:] if code[:1] in "@<" else code)
    except (ValueError, TypeError):
        raise KeyError(f"cannot map {code!r} to MPI datatype") from None
    return datatype, element_of(datatype)


def basic_type(datatype: MPI.Datatype) -> str:
    """What a datatype consists of, in words that are the same however it is put together; "" if that
    is not known."""
    while not datatype.is_predefined:
        datatype, combiner, _ = datatype.decode()
        if combiner == "STRUCT":
            return ""  # may be of several
    return datatype.typestr


def _items(nbytes: int, element: Element) -> int:
    """How many elements a buffer holds."""
    if not nbytes:
        return 0
    if element.extent <= 0:
        raise ValueError(f"message: cannot infer count, datatype extent {element.extent}")
    if nbytes % element.extent:
        raise ValueError(f"message: cannot infer count, {nbytes} bytes are not a multiple of {element.extent}")
    return nbytes // element.extent


def _sequence(given: Any, blocks: int, unit: Any) -> Sizes:
    """A number for each block: as given, or ``unit`` times the one that is given."""
    if type(given) is np.ndarray and given.dtype == np.int64 and given.shape == (blocks,):
        return given
    if np.ndim(given) == 0:
        return np.asarray(index(given) * unit, np.int64) + np.zeros(blocks, np.int64)
    values: npt.NDArray[Any] = np.asarray(given)
    if values.ndim != 1 or len(values) != blocks:
        raise ValueError(f"expecting {blocks} items, got {np.shape(given)}")
    if values.dtype.kind not in "iu" and len(values):
        values = np.array([index(value) for value in given])
    return values.astype(np.int64, copy=False)


def each_block(message: Message, blocks: int) -> tuple[Sizes, Sizes]:
    """Count and displacement of every block, in elements."""
    if np.ndim(message.counts):
        return message.counts, message.displs
    counts = np.full(blocks, message.counts, np.int64)
    return counts, message.displs + np.cumsum(counts) - counts


class Apart(NamedTuple):
    """Blocks of elements of any datatypes, about an ``address`` (0: `MPI.BOTTOM`) in a buffer of so many bytes."""

    address: int
    nbytes: int
    blocks: tuple[Block, ...]
    datatypes: Sequence[MPI.Datatype]


def apart(message: Message | TypedMessage, blocks: int) -> Apart:
    """The blocks of a message. Raises ValueError for counts below 0, MPI.Exception for null datatypes."""
    datatypes: Sequence[MPI.Datatype]
    if isinstance(message, TypedMessage):
        datatypes, counts, places = message.datatypes, message.counts.tolist(), message.displs.tolist()
        # A datatype for no elements need not be one.
        elements = [element_of(each) if count else NOTHING for each, count in zip(datatypes, counts, strict=True)]
    else:
        datatypes, elements = [message.datatype] * blocks, [message.element] * blocks
        each, displs = each_block(message, blocks)
        counts, places = each.tolist(), (displs * message.element.extent).tolist()
    if min(counts, default=0) < 0:
        raise ValueError(f"message: negative count {min(counts)}")
    return Apart(message.address, message.nbytes, tuple(map(Block, places, counts, elements)), datatypes)


def lasting(blocks: Apart) -> Apart:
    """The same, to be copied later: with datatypes of its own, where only MPI knows where bytes lie (see
    `own_datatype`)."""
    if all(each.element.pieces is not None for each in blocks.blocks):
        return blocks
    pairs = zip(blocks.blocks, blocks.datatypes, strict=True)
    return blocks._replace(datatypes=[own_datatype(each) if block.nbytes else each for block, each in pairs])


class EngineCopy:
    """A copy of blocks by the compiled engine: (words, where the blocks are, where they lie together, bytes)."""

    def __init__(self, move: tuple[Any, int, int, int], outward: bool) -> None:
        self.move, self._outward = move, outward

    def __call__(self) -> None:
        """Do it."""
        module: Any = compiled.load()[0]
        module.copy_blocks(*self.move, self._outward)


def copying(blocks: Apart, data: npt.NDArray[np.uint8], *, outward: bool) -> Callable[[], None]:
    """What copies blocks, one after the other, to ``data``, or (not ``outward``) from there, whenever it is called; by
    the compiled engine, if there is one. It need not keep ``data`` alive."""
    known = packing(blocks.blocks)
    if known is None:
        return partial(_copy_by_messages, blocks, data, outward)
    where = MPI.Get_address(data)
    if compiled.load()[0] is None:
        return partial(known.copy, blocks.address, where, outward=outward)
    return EngineCopy((known.words, blocks.address, where, known.nbytes), outward)


@cache
def _oneself() -> MPI.Intracomm:
    """A communicator of hiercoll's own, of this rank alone."""
    return MPI.Intracomm(MPI.COMM_SELF).Dup()  # mpi4py's own


def _copy_by_messages(blocks: Apart, data: npt.NDArray[np.uint8], outward: bool) -> None:
    """The same where nobody but MPI knows where their bytes lie: as messages to oneself."""
    at = 0
    for block, datatype in zip(blocks.blocks, blocks.datatypes, strict=True):
        if not block.nbytes:
            continue
        plain: list[Any] = [data[at : at + block.nbytes], block.nbytes, MPI.BYTE]
        start = blocks.address + block.at
        buffer = MPI.buffer.fromaddress(start, max(blocks.address + blocks.nbytes - start, 0))
        place: list[Any] = [buffer, block.number, datatype]  # MPI.BOTTOM is at address 0
        send, recv = (place, plain) if outward else (plain, place)
        with _to_oneself:
            MPI.Comm.Sendrecv(_oneself(), send, 0, 0, recv, 0, 0)
        at += block.nbytes
