"""Host memory: how its blocks are copied and reduced."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from math import gcd
from operator import setitem
from typing import Any

import numpy as np

from hiercoll.errors import DeviceError
from hiercoll.memory.interface import OPERATIONS, Action, Array, Reduction, Transfer
from hiercoll.memory.layouts import BlockLayout, Layout, UnevenLayout, WideLayout, common_chunk, common_pieces
from hiercoll.schedule import Region


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
        if isinstance(layout, WideLayout):
            return _copy_wide(layout, source, target)
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
        pieces, item = common_pieces(layout, left, right, target), how.dtype.itemsize
        views = [[elements(address, piece[-1] // item, how.dtype) for address in piece[:-1]] for piece in pieces]
        return partial(_combine, OPERATIONS[how.operation], views)

    def address_handle(self, address: int) -> Array:
        """Only the shared buffer is of several processes."""
        raise DeviceError("transport 'peer'", "memory of a device", "memory of the host")

    def get(self, layout: Layout, handle: Array, source: Region, target: tuple[int, Region], peer: int) -> Transfer:
        """See `address_handle`."""
        raise DeviceError("transport 'peer'", "memory of a device", "memory of the host")

    def settle(self) -> None:
        """Nothing ever is."""

    def before_messages(self, handles: Iterable[int], direct: bool) -> None:
        """Nothing to do."""

    def of_plan(self) -> HostMemory:
        """Copies are done at once: nobody waits."""
        return self


_ALL = slice(None)


def _memory(address: int, nbytes: int) -> memoryview:
    """Bytes at an address, to be set or read at little cost."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _copy_wide(layout: WideLayout, source: tuple[int, Region], target: tuple[int, Region]) -> Action | None:
    """What copies, and converts, between regions of a layout."""
    types = layout.types_of(source[1], target[1])
    if types is None:
        return _copy_pieces([(here, there, n) for here, there, n in common_pieces(layout, source, target)])
    pieces = layout.conversion(source, target)
    return partial(convert, [(elements(s, n, types[0]), elements(t, n, types[1])) for s, t, n in pieces])


def elements(address: int, count: int, dtype: np.dtype[Any]) -> Array:
    """So many elements at an address, as an array."""
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def convert(pairs: Iterable[tuple[Array, Array]]) -> None:
    """Convert (source, target) arrays; what is too large becomes infinite, as in reductions, without a warning."""
    with np.errstate(all="ignore"):
        for source, target in pairs:
            np.copyto(target, source, casting="unsafe")


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


def _scatter(dst: Array, where: Array, src: Array, which: Array) -> None:
    dst[where] = src[which]


def _bytes(view: Array) -> memoryview:
    return memoryview(view.view(np.uint8).reshape(-1))  # type: ignore[arg-type]


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
