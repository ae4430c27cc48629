"""Where the bytes of blocks lie in a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hiercoll.memory.interface import Array
from hiercoll.schedule import WIDE, BufferName, Region


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
        """(offset, length) in bytes of the contiguous pieces of ``region``, in order. Blocks without bytes are one
        piece: a message of them is sent, and says no more than that it comes."""
        offset, length = self.extent(region.part)
        blocks, step = region.blocks, self.block
        if length != step:
            return [(block * step + offset, length) for block in blocks]
        if isinstance(blocks, range) and blocks:
            if blocks.step == 1 or not step:
                return [(blocks[0] * step, len(blocks) * step)]
            return [(block * step, step) for block in blocks]
        runs: list[tuple[int, int]] = []
        end = -1
        for block in blocks:
            start = block * step
            if start == end:
                runs[-1] = (runs[-1][0], runs[-1][1] + step)
            else:
                runs.append((start, step))
            end = start + step
        return runs


class UnevenLayout:
    """Bytes of blocks that differ in size, and of their ``segments``, buffer by buffer."""

    def __init__(self, segments: int = 1) -> None:
        self._places: dict[tuple[BufferName, int | None], tuple[list[int], list[int]]] = {}
        self._slots: dict[BufferName, tuple[int, BufferName, int]] = {}
        self.segments = segments

    def place(self, buffer: BufferName, part: int | None, at: Array, sizes: Array) -> None:
        """Say where every block's part (None: all of it) lies: offset and length in bytes."""
        self._places[buffer, part] = at.tolist(), sizes.tolist()

    def slots(self, buffer: BufferName, block: int, like: BufferName, part: int = 0) -> None:
        """Say that blocks of a buffer begin ``block`` bytes apart, each as long as the one of the buffer ``like`` that
        regions name (`Region.like`). Their segments begin ``part`` bytes apart, whatever block they are of, so that
        those of two blocks may be there at a time; or, if that is 0, where those of whole blocks do."""
        self._slots[buffer] = block, like, part

    def _located(self, region: Region) -> Iterator[tuple[int, int]]:
        """Offset and length of each block."""
        if region.like is None or region.buffer not in self._slots:
            starts, lengths = self._places[region.buffer, region.part]
            return ((starts[block], lengths[block]) for block in region.blocks)
        step, like, part = self._slots[region.buffer]
        (starts, lengths), (wholes, _) = self._places[like, region.part], self._places[like, None]
        both = zip(region.blocks, region.like, strict=True)
        if part and region.part is not None:
            ahead = region.part * part
            return ((slot * step + ahead, lengths[block]) for slot, block in both)
        return ((slot * step + starts[block] - wholes[block], lengths[block]) for slot, block in both)

    def pairs(self, source: Region, target: Region) -> Iterator[tuple[int, int, int]]:
        """(offset, offset, length) of the pieces that are contiguous in both regions; of blocks of which another rank
        says another size, as much as there is room for."""
        at = to = length = 0
        for (start, most), (end, room) in zip(self._located(source), self._located(target), strict=True):
            if more := min(most, room):
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
        runs: list[tuple[int, int]] = []
        end = -1
        for start, length in self._located(region):
            if not length:
                continue
            if start == end:
                runs[-1] = (runs[-1][0], runs[-1][1] + length)
            else:
                runs.append((start, length))
            end = start + length
        return runs


class WideLayout(NamedTuple):
    """Blocks of another layout, the ``narrow`` one, of elements ``of`` a type of two bytes; in the buffers `WIDE` they
    are in float32."""

    narrow: BlockLayout | UnevenLayout
    of: np.dtype[Any]

    def type_of(self, region: Region) -> np.dtype[Any]:
        """The type of the elements of a region."""
        return SINGLE if region.buffer in WIDE else self.of

    def types_of(self, source: Region, target: Region) -> tuple[np.dtype[Any], np.dtype[Any]] | None:
        """The types that a copy between regions converts from and to; None if they are the same."""
        types = self.type_of(source), self.type_of(target)
        return None if types[0] == types[1] else types

    def runs(self, region: Region) -> list[tuple[int, int]]:
        """(offset, length) in bytes of the contiguous pieces of ``region``, in order."""
        times = 1 + (region.buffer in WIDE)
        return [(times * offset, times * length) for offset, length in self.narrow.runs(region)]

    def conversion(self, source: tuple[int, Region], target: tuple[int, Region]) -> list[tuple[int, ...]]:
        """Addresses, and the number of elements, of the pieces that are contiguous in both regions."""
        return _cut(self, (source, target), [self.type_of(region).itemsize for _, region in (source, target)])


SINGLE = np.dtype(np.float32)
Layout: TypeAlias = "BlockLayout | UnevenLayout | WideLayout"


def common_pieces(layout: Layout, *ends: tuple[int, Region]) -> list[tuple[int, ...]]:
    """Regions of buffers at addresses, cut into pieces that are contiguous in all of them:
    the addresses, and the length in bytes."""
    return _cut(layout, ends, [1] * len(ends))


def _cut(layout: Layout, ends: Sequence[tuple[int, Region]], items: Sequence[int]) -> list[tuple[int, ...]]:
    """The same, with the length in items of so many bytes at each end."""
    pieces: list[tuple[int, ...]] = []
    runs = [
        [(at + offset, n // item) for offset, n in layout.runs(region) if n]
        for (at, region), item in zip(ends, items, strict=True)
    ]
    lengths = [n for _, n in runs[0]]
    if all([n for _, n in each] == lengths for each in runs[1:]):  # they are cut alike
        return [(*(at for at, _ in together), n) for *together, n in zip(*runs, lengths, strict=True)]
    rests = [iter(each) for each in runs]
    heads = [next(rest, (0, 0)) for rest in rests]
    while length := min(n for _, n in heads):
        pieces.append((*(at for at, _ in heads), length))
        moved = [(at + length * item, n - length) for (at, n), item in zip(heads, items, strict=True)]
        heads = [head if head[1] else next(rest, (0, 0)) for head, rest in zip(moved, rests, strict=True)]
    return pieces


def evenly_spaced(
    pieces: Iterable[tuple[int, ...]], fits: Callable[[int, int, int], bool] = lambda *_: True
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(place, place, length) of copies, those put together that follow each other with equal lengths and distances:
    the first one's, their number, and the distances (0 of one), if length and distances are ones that ``fits``."""
    run: tuple[int, int, int, int, int, int] | None = None
    for at, to, length in pieces:
        if run is not None:
            first, there, each, number, *distances = run
            apart, beyond = (at - first, to - there) if number == 1 else distances
            if (
                length == each
                and fits(length, apart, beyond)
                and (at, to) == (first + number * apart, there + number * beyond)
            ):
                run = first, there, each, number + 1, apart, beyond
                continue
            yield run
        run = at, to, length, 1, 0, 0
    if run is not None:
        yield run


def common_chunk(one: Region, other: Region) -> int:
    """The largest number of blocks by which both regions can be cut into pieces that lie together."""
    chunk = one.size
    for blocks in (one.blocks, other.blocks):
        if isinstance(blocks, range):
            chunk = chunk if blocks.step == 1 else min(chunk, 1)
        else:
            chunk = gcd(chunk, *(i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1))
    return chunk
