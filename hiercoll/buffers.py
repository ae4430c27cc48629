"""User arrays as blocks, and the memory that plans work on.

`BlockLayout` turns the blocks of a schedule into bytes. `Memory` is what a plan asks
of a kind of memory: who allocates scratch, who copies, who synchronises. Host memory
is here; device memory implements the same interface.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import gcd
from operator import setitem
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.ma import MaskedArray  # here: NumPy loads it at first use, slow in the middle of a call

from hiercoll.errors import BufferOverlapError, BufferSizeError, BufferTypeError, DeviceError
from hiercoll.schedule import BufferName, Region

Array: TypeAlias = npt.NDArray[Any]
Action: TypeAlias = "Callable[[], object]"
Combine: TypeAlias = "Callable[[Array, Array, Array], object]"
CARD = 88  # bytes that tell of a buffer of another process


class BlockLayout(NamedTuple):
    """Bytes of a block, of one item in it, and the number of segments it is cut into.

    Segments are cut between items, as equal as they can be.
    """

    block: int
    item: int = 1
    segments: int = 1

    def extent(self, part: int | None) -> tuple[int, int]:
        """Offset and length, in bytes, of a segment within its block."""
        if part is None:
            return 0, self.block
        item = max(self.item, 1)  # items of no bytes make blocks of no bytes
        start, end = (self.block // item * i // self.segments * item for i in (part, part + 1))
        return start, end - start

    def runs(self, region: Region) -> list[tuple[int, int]]:
        """(offset, length) in bytes of the contiguous pieces of ``region``, in order."""
        offset, length = self.extent(region.part)
        whole = length == self.block
        runs: list[tuple[int, int]] = []
        for block in region.blocks:
            start = block * self.block + offset
            if whole and runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((start, length))
        return runs


class Reduction(NamedTuple):
    """How elements are combined: a type of NumPy's, and one of `OPERATIONS`."""

    dtype: np.dtype[Any]
    operation: str


OPERATIONS: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class UnevenLayout:
    """Bytes of blocks that differ in size, and of their ``segments``, buffer by buffer."""

    def __init__(self, segments: int = 1) -> None:
        self._places: dict[tuple[BufferName, int | None], tuple[list[int], list[int]]] = {}
        self.segments = segments

    def place(self, buffer: BufferName, part: int | None, at: Array, sizes: Array) -> None:
        """Say where every block's part (None: all of it) lies: offset and length in bytes."""
        self._places[buffer, part] = at.tolist(), sizes.tolist()

    def pairs(self, source: Region, target: Region) -> Iterator[tuple[int, int, int]]:
        """(offset, offset, length) of the pieces that are contiguous in both regions."""
        starts, lengths = self._places[source.buffer, source.part]
        ends = self._places[target.buffer, target.part][0]
        at = to = length = 0
        for block, other in zip(source.blocks, target.blocks, strict=True):
            if more := lengths[block]:
                start, end = starts[block], ends[other]
                if start == at + length and end == to + length:
                    length += more
                else:
                    if length:
                        yield at, to, length
                    at, to, length = start, end, more
        if length:
            yield at, to, length

    def runs(self, region: Region) -> list[tuple[int, int]]:
        """(offset, length) in bytes of the contiguous pieces of ``region``, in order; none are empty."""
        offsets, lengths = self._places[region.buffer, region.part]
        runs: list[tuple[int, int]] = []
        end = -1
        for block in region.blocks:
            start, length = offsets[block], lengths[block]
            if not length:
                continue
            if start == end:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((start, length))
            end = start + length
        return runs


Layout: TypeAlias = "BlockLayout | UnevenLayout"


class Transfer(ABC):
    """A copy that goes on in the background; it may be started again when it is done."""

    @abstractmethod
    def start(self) -> None:
        """Begin."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it is complete."""

    @abstractmethod
    def wait(self) -> None:
        """Until it is complete."""


class Now(Transfer):
    """Work on the host that is done when it is started."""

    def __init__(self, action: Action) -> None:
        self._action = action

    def start(self) -> None:
        """All of it."""
        self._action()

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class Memory(Protocol):
    """What a plan needs of the memory that its buffers lie in; ``shared`` and ``host`` lie on the host."""

    kind: str

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Address of ``nbytes`` of scratch, and the object that keeps it alive."""

    def allocate_host(self, nbytes: int) -> tuple[int, object]:
        """The same for the ``host`` buffer."""

    def share(self, address: int, nbytes: int) -> object:
        """Make host memory at ``address`` known as a ``shared`` buffer, while the result lives."""

    def copy(self, layout: Layout, source: tuple[int, Region], target: tuple[int, Region]) -> Action | Transfer | None:
        """What copies between regions of the buffers at two addresses; None if there is nothing to do."""

    def reduce(
        self,
        layout: Layout,
        how: Reduction,
        left: tuple[int, Region],
        right: tuple[int, Region],
        target: tuple[int, Region],
    ) -> Action | Transfer | None:
        """What puts ``left (+) right``, element by element, into ``target``; None if there is
        nothing to do. ``layout.item`` is the size of an element."""

    def card(self, address: int) -> Array:
        """`CARD` bytes that tell another process of this host how to `get` from the buffer at
        ``address``. Raises DeviceError for memory that only its own process can reach."""

    def get(self, layout: Layout, card: Array, source: Region, target: tuple[int, Region]) -> Transfer:
        """What copies ``source`` of the buffer that ``card`` tells of, at each start, to a region
        of the buffer at an address."""

    def before_messages(self, handle: int, direct: bool) -> None:
        """Order what the caller has produced on the stream ``handle`` before the first copy and,
        if ``direct``, before messages of (or about) this memory itself."""


class HostMemory:
    """Memory that NumPy arrays live in: copies happen when called, nothing to synchronise."""

    kind = "host"

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Uninitialised bytes, aligned to 64."""
        owner = np.empty(nbytes + 64, dtype=np.uint8)
        return -(-owner.ctypes.data // 64) * 64, owner

    def allocate_host(self, nbytes: int) -> tuple[int, object]:
        """All of it is on the host."""
        return self.allocate(nbytes)

    def share(self, address: int, nbytes: int) -> object:
        """Nothing to do."""
        return None

    def copy(self, layout: Layout, source: tuple[int, Region], target: tuple[int, Region]) -> Action | None:
        """See `Memory.copy`; strided and scattered regions of even blocks without work per block."""
        if isinstance(layout, UnevenLayout):
            (here, regions), (there, targets) = source, target
            return _copy_pieces([(here + at, there + to, n) for at, to, n in layout.pairs(regions, targets)])
        ends = layout.runs(source[1]), layout.runs(target[1])
        if len(ends[0]) == len(ends[1]) == 1 and ends[0][0][1]:  # at less cost
            [(at, length)], [(to, _)] = ends
            views = _memory(source[0] + at, length), _memory(target[0] + to, length)
            return partial(setitem, views[1], _ALL, views[0])
        chunk = common_chunk(source[1], target[1]) if layout.segments == 1 else 1
        (src_view, src), (dst_view, dst) = blocks_view(layout, *source, chunk), blocks_view(layout, *target, chunk)
        if isinstance(src, slice):
            src_view = src_view[src]
            if isinstance(dst, slice):
                dst_view = dst_view[dst]
                if src_view.flags.c_contiguous and dst_view.flags.c_contiguous and src_view.nbytes:
                    return partial(setitem, _bytes(dst_view), slice(None), _bytes(src_view))
                return partial(np.copyto, dst_view, src_view)
            return partial(setitem, dst_view, dst, src_view)
        if isinstance(dst, slice):
            return partial(np.take, src_view, src, axis=0, out=dst_view[dst], mode="clip")
        return partial(_scatter, dst_view, dst, src_view, src)

    def reduce(
        self,
        layout: Layout,
        how: Reduction,
        left: tuple[int, Region],
        right: tuple[int, Region],
        target: tuple[int, Region],
    ) -> Action:
        """See `Memory.reduce`."""

        def elements(address: int, nbytes: int) -> Array:
            memory: Any = (ctypes.c_char * nbytes).from_address(address)
            return np.frombuffer(memory, how.dtype)

        pieces = common_pieces(layout, left, right, target)
        views = [[elements(address, piece[-1]) for address in piece[:-1]] for piece in pieces]
        return partial(_combine, OPERATIONS[how.operation], views)

    def card(self, address: int) -> Array:
        """Only the shared buffer is of several processes."""
        raise DeviceError("transport 'peer'", "memory of a device", "memory of the host")

    def get(self, layout: Layout, card: Array, source: Region, target: tuple[int, Region]) -> Transfer:
        """See `card`."""
        raise DeviceError("transport 'peer'", "memory of a device", "memory of the host")

    def before_messages(self, handle: int, direct: bool) -> None:
        """Nothing to do."""


_ALL = slice(None)


def _memory(address: int, nbytes: int) -> memoryview:
    """Bytes at an address, to be set or read at little cost."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _copy_pieces(pieces: list[tuple[int, int, int]]) -> Action | None:
    """What copies (source, target, length) pieces."""
    if not pieces:
        return None
    first, to = (min(piece[end] for piece in pieces) for end in (0, 1))
    span, room = (max(piece[end] + piece[2] for piece in pieces) - start for end, start in ((0, first), (1, to)))
    source, target = (
        memoryview((ctypes.c_char * size).from_address(start)).cast("B") for start, size in ((first, span), (to, room))
    )
    slices = [(slice(t - to, t - to + n), slice(s - first, s - first + n)) for s, t, n in pieces]
    if len(slices) == 1:
        return partial(setitem, target, slices[0][0], source[slices[0][1]])
    return partial(_set_slices, target, source, slices)


def _set_slices(target: memoryview, source: memoryview, slices: list[tuple[slice, slice]]) -> None:
    for there, here in slices:
        target[there] = source[here]


def _combine(operation: np.ufunc, views: list[list[Array]]) -> None:
    for left, right, target in views:
        operation(left, right, out=target)


def common_pieces(layout: Layout, *ends: tuple[int, Region]) -> list[tuple[int, ...]]:
    """Regions of buffers at addresses, cut into pieces that are contiguous in all of them:
    the addresses, and the length in bytes."""
    pieces: list[tuple[int, ...]] = []
    rests = [iter([(at + offset, n) for offset, n in layout.runs(region) if n]) for at, region in ends]
    heads = [next(rest, (0, 0)) for rest in rests]
    while length := min(n for _, n in heads):
        pieces.append((*(at for at, _ in heads), length))
        moved = [(at + length, n - length) for at, n in heads]
        heads = [head if head[1] else next(rest, (0, 0)) for head, rest in zip(moved, rests, strict=True)]
    return pieces


def _scatter(dst: Array, where: Array, src: Array, which: Array) -> None:
    dst[where] = src[which]


def _bytes(view: Array) -> memoryview:
    return memoryview(view.view(np.uint8).reshape(-1))  # type: ignore[arg-type]


def common_chunk(one: Region, other: Region) -> int:
    """The largest number of blocks by which both regions can be cut into pieces that lie together."""
    chunk = one.size
    for blocks in (one.blocks, other.blocks):
        if isinstance(blocks, range):
            chunk = chunk if blocks.step == 1 else min(chunk, 1)
        else:
            chunk = gcd(chunk, *(i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1))
    return chunk


def blocks_view(layout: BlockLayout, address: int, region: Region, chunk: int = 1) -> tuple[Array, slice | Array]:
    """``region`` of the buffer at ``address``, in pieces of ``chunk`` blocks (or of one segment
    of a block), as a 1-D array of opaque items and the index that selects the pieces."""
    offset, length = layout.extent(region.part)
    starts = [block * layout.block + offset for block in region.blocks[::chunk]] if chunk else []
    if not starts or not length:
        return np.empty(0, dtype="V1"), slice(0, 0)
    length += (chunk - 1) * layout.block
    first, distances = min(starts), {b - a for a, b in pairwise(starts)}
    memory: Any = (ctypes.c_char * (max(starts) + length)).from_address(address)
    evenly = len(distances) <= 1 and min(distances, default=1) > 0
    step = gcd(*(start - first for start in starts)) or length
    count = (max(starts) - first) // step + 1
    if length < 1 << 30:
        view: Array = np.ndarray((count,), f"V{length}", memory, first, (step,))
    else:  # NumPy's items are limited to 2 GiB
        view = np.ndarray((count, length), np.uint8, memory, first, (step, 1))
    return view, slice(None) if evenly else np.array([(start - first) // step for start in starts])


@dataclass(frozen=True)
class UserBuffer:
    """A contiguous user array; ``place`` is "host" or the name of a device."""

    address: int
    nbytes: int
    item: int
    array: Any
    dtype: np.dtype[Any]
    typed: bool = True  # False where an MPI datatype says what the elements are
    place: str = "host"
    stream: int = 0  # handle of the stream that produces it, on devices

    @property
    def type_name(self) -> str:
        """The type of the elements in words."""
        return str(self.dtype) if self.typed else f"items of {self.item} bytes"

    @property
    def items(self) -> int:
        """Number of elements."""
        return self.nbytes // self.item if self.item else 0


class Read(Protocol):
    """What makes a UserBuffer of an object."""

    def __call__(self, obj: Any, argument: str, rank: int, *, writable: bool) -> UserBuffer:
        """See `host_buffer`."""


def host_buffer(obj: object, argument: str, rank: int, *, writable: bool) -> UserBuffer:
    """The array behind ``obj``: an ndarray or anything with the buffer protocol.

    Raises BufferTypeError for other objects, for arrays that are not contiguous, hold
    Python objects, or are read-only where they must be written.
    """
    if hasattr(obj, "__cuda_array_interface__"):
        raise BufferTypeError(argument, "an array in host memory", f"a device array ({type(obj).__name__})", rank)
    if isinstance(obj, MaskedArray):
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


def counted_buffer(
    spec: Sequence[Any], argument: str, rank: int, blocks: int, *, writable: bool, read: Read = host_buffer
) -> UserBuffer:
    """The buffer of an mpi4py specification ``[buf, MPI.TYPE]``, ``[buf, count, MPI.TYPE]``
    or ``[buf, (count, None), MPI.TYPE]`` with ``count`` items in each of ``blocks`` blocks.

    ``read`` makes a UserBuffer of ``buf``. Raises BufferTypeError for displacements and types
    with gaps, BufferSizeError for counts that the buffer does not hold.
    """
    expected = "[buffer, MPI datatype] or [buffer, count, MPI datatype]"
    if len(spec) not in (2, 3):
        raise BufferTypeError(argument, expected, f"{len(spec)} entries", rank)
    buffer = read(spec[0], argument, rank, writable=writable)
    count, datatype = (None, spec[1]) if len(spec) == 2 else (spec[1], spec[2])
    if isinstance(count, tuple | list) and len(count) == 2 and (count[1] is None or np.array_equal(count[1], 0)):
        count = count[0]
    if isinstance(datatype, str):
        item = _item_size(datatype, argument, rank)
    elif hasattr(datatype, "Get_extent"):
        if not is_plain(datatype):
            raise BufferTypeError(argument, "a predefined datatype, or contiguous ones of it", "another one", rank)
        item = datatype.Get_size()
    else:
        raise BufferTypeError(argument, expected, f"a {type(datatype).__name__} as the datatype", rank)
    if count is None:
        if item == 0 or buffer.nbytes % item:
            raise BufferSizeError(argument, f"a multiple of {item} bytes", f"{buffer.nbytes} bytes", rank)
        count = buffer.nbytes // item // blocks if buffer.nbytes // item % blocks == 0 else -1
        if count < 0:
            raise BufferSizeError(argument, f"a multiple of {blocks} items", f"{buffer.nbytes // item}", rank)
    if not isinstance(count, int | np.integer) or count < 0:
        raise BufferTypeError(argument, "a count per block, and no displacement", repr(spec[1]), rank)
    nbytes = int(count) * item * blocks
    if nbytes > buffer.nbytes:
        got = f"{count} items of {item} bytes in each of {blocks} blocks, with a buffer of {buffer.nbytes} bytes"
        raise BufferSizeError(argument, "counts that fit the buffer", got, rank)
    return replace(buffer, nbytes=nbytes, item=item, typed=False)


def is_plain(datatype: Any) -> bool:
    """Whether an MPI datatype is just consecutive bytes in their order: predefined without
    gaps, or a contiguous one or a duplicate of such."""
    try:
        while not datatype.is_predefined:
            datatype, combiner, _ = datatype.decode()
            if combiner not in ("CONTIGUOUS", "DUP"):
                return False
        return bool(datatype.Get_extent() == (0, datatype.Get_size()))
    except RuntimeError:  # mpi4py's own class: a null or freed datatype
        return False


def _item_size(datatype: str, argument: str, rank: int) -> int:
    """Bytes of an element of a type by name. Raises BufferTypeError."""
    try:
        dtype = np.dtype(datatype)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.hasobject:
        raise BufferTypeError(argument, "the name of a type of fixed size", repr(datatype), rank)
    return dtype.itemsize


def check_disjoint(send: UserBuffer, recv: UserBuffer, rank: int) -> None:
    """Raises BufferOverlapError if the two buffers share bytes."""
    overlap = min(send.address + send.nbytes, recv.address + recv.nbytes) - max(send.address, recv.address)
    if overlap > 0 and send.nbytes and recv.nbytes:
        expected = "a buffer apart from sendbuf (or sendbuf=MPI.IN_PLACE)"
        raise BufferOverlapError("recvbuf", expected, f"{overlap} shared bytes", rank)
