"""Regions of memory in which bytes lie apart, as MPI's datatypes name them, and how they are copied.

A datatype's bytes, in the order of its type map (MPI 4.1, 5.1), are a few *pieces*: runs of bytes that loops with
strides repeat. Blocks that consist of such bytes are packed one after the other, and unpacked, without work per run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from hiercoll.memory.interface import Array

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_PIECES = 1 << 16  # of a datatype; those of more are not taken apart
Words: TypeAlias = "npt.NDArray[np.int64]"


class TooManyPiecesError(Exception):
    """A region consists of more than `MOST_PIECES`."""


class Piece(NamedTuple):
    """Runs of ``length`` bytes: one for each index of the ``loops``, outermost first, each of (count, stride in bytes).
    The first is ``offset`` bytes from where the region begins."""

    offset: int
    length: int
    loops: tuple[tuple[int, int], ...] = ()

    @property
    def bounds(self) -> tuple[int, int]:
        """The first byte, and the one behind the last."""
        reach = [(count - 1) * stride for count, stride in self.loops]
        below, above = sum(min(each, 0) for each in reach), sum(max(each, 0) for each in reach)
        return self.offset + below, self.offset + above + self.length

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.length * prod(count for count, _ in self.loops)


Pieces: TypeAlias = tuple[Piece, ...]  # in the order in which they are packed


def moved(pieces: Pieces, offset: int) -> Pieces:
    """The same, so many bytes further on."""
    return tuple(piece._replace(offset=piece.offset + offset) for piece in pieces) if offset else pieces


def repeated(pieces: Pieces, count: int, stride: int) -> Pieces:
    """So many of them, ``stride`` bytes from one to the next. Raises TooManyPiecesError."""
    if count == 1 or not pieces:
        return pieces
    if count == 0:
        return ()
    if len(pieces) == 1:
        return (_looped(pieces[0], count, stride),)
    if len(pieces) * count > MOST_PIECES:
        raise TooManyPiecesError
    return joined(moved(pieces, number * stride) for number in range(count))


def joined(parts: Iterable[Pieces]) -> Pieces:
    """One after the other; runs that touch are one. Raises TooManyPiecesError."""
    found: list[Piece] = []
    for piece in chain.from_iterable(parts):
        last = found[-1] if found else None
        if last is not None and not (last.loops or piece.loops) and last.offset + last.length == piece.offset:
            found[-1] = last._replace(length=last.length + piece.length)
        else:
            found.append(piece)
        if len(found) > MOST_PIECES:
            raise TooManyPiecesError
    return tuple(found)


def _looped(piece: Piece, count: int, stride: int) -> Piece:
    """A piece with a loop around it, which is part of the run, or of the outermost loop, where it goes on with that."""
    if not piece.loops:
        if stride == piece.length:
            return piece._replace(length=count * stride)
        return piece._replace(loops=((count, stride),))
    (outer, step), *inner = piece.loops
    if stride == outer * step:
        return piece._replace(loops=((count * outer, step), *inner))
    return piece._replace(loops=((count, stride), *piece.loops))


@dataclass(frozen=True, eq=False, repr=False)  # compared by identity, at less cost: there may be many pieces
class Element:
    """An MPI datatype: bytes of data, lower bound and extent, and whether it is just its bytes in their order.
    ``pieces``: where they lie; None if that is not known."""

    size: int
    lower: int
    extent: int
    plain: bool
    pieces: Pieces | None


NOTHING = Element(0, 0, 0, True, ())


class Block(NamedTuple):
    """``number`` elements, one extent from one to the next, ``at`` bytes from where a buffer begins."""

    at: int
    number: int
    element: Element

    @property
    def nbytes(self) -> int:
        """Bytes that are packed."""
        return self.number * self.element.size

    @property
    def pieces(self) -> Pieces:
        """Of an element; of all of them, where they are one piece."""
        pieces = self.element.pieces or ()
        return repeated(pieces, self.number, self.element.extent) if len(pieces) == 1 else pieces

    @property
    def repeats(self) -> tuple[int, int]:
        """How often the pieces come, and how many bytes from one to the next."""
        return (1, 0) if len(self.pieces) == 1 else (self.number, self.element.extent)

    @property
    def bounds(self) -> tuple[int, int]:
        """The first byte, and the one behind the last; (0, 0) if there are none."""
        if not self.nbytes:
            return 0, 0
        count, stride = self.repeats
        ends = [piece.bounds for piece in self.pieces]
        low, high, reach = min(low for low, _ in ends), max(high for _, high in ends), (count - 1) * stride
        return self.at + low + min(reach, 0), self.at + high + max(reach, 0)


class Packing:
    """Blocks that are packed one after the other.

    ``sizes`` and ``at``: bytes of each, and where it lies among the packed ``nbytes``; ``bounds``: of all blocks where
    they lie apart, the first byte, and the one behind the last; ``runs``: where each block begins, if each is one run
    of bytes, so that nothing needs to be packed, else None.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = [each for each in blocks if each.nbytes]
        self.sizes = np.array([each.nbytes for each in blocks], np.int64)
        self.at = np.cumsum(self.sizes) - self.sizes
        self.nbytes = int(self.sizes.sum())
        bounds = [each.bounds for each in self._blocks]
        self.bounds = min((low for low, _ in bounds), default=0), max((high for _, high in bounds), default=0)
        self.runs = np.array([_run(each) for each in blocks], np.int64) if all(map(_is_run, self._blocks)) else None

    @cached_property
    def words(self) -> Words:
        """All blocks for the compiled engine: where it begins, how often its pieces come and how far from each other,
        and number of pieces, then of each piece offset, length, and number of loops, then of each loop count and
        stride."""
        found: list[int] = []
        for block in self._blocks:
            found += [block.at, *block.repeats, len(block.pieces)]
            for offset, length, loops in block.pieces:
                found += [offset, length, len(loops), *chain.from_iterable(loops)]
        return np.array(found, np.int64)

    def copy(self, address: int, packed: int, *, outward: bool) -> None:
        """Copy the blocks that lie about ``address`` to the bytes at ``packed``, or (not ``outward``) from there."""
        for block in self._blocks:
            start = packed
            for piece in block.pieces:
                apart = piece._replace(offset=block.at + piece.offset, loops=(block.repeats, *piece.loops))
                together = Piece(0, piece.length, ((block.repeats[0], block.element.size), *_contiguous(piece)))
                ends = _view(start, together), _view(address, apart)
                np.copyto(*(ends if outward else ends[::-1]))
                start += piece.nbytes
            packed += block.nbytes


def _is_run(block: Block) -> bool:
    """Whether its bytes lie one after the other, in order."""
    return block.repeats[0] == 1 and len(block.pieces) == 1 and not block.pieces[0].loops


def _run(block: Block) -> int:
    """Where such a block begins; 0 if it has no bytes."""
    return block.at + block.pieces[0].offset if block.nbytes else 0


def _contiguous(piece: Piece) -> tuple[tuple[int, int], ...]:
    """The loops of a piece whose runs lie one after the other."""
    stride, found = piece.length, list[tuple[int, int]]()
    for count, _ in reversed(piece.loops):
        found.insert(0, (count, stride))
        stride *= count
    return tuple(found)


def _view(address: int, piece: Piece) -> Array:
    """The runs of a piece as an array, with an axis for each loop."""
    low, high = piece.bounds
    if high <= low or not piece.nbytes:
        return np.empty((0,), np.uint8)
    memory: Any = (ctypes.c_char * (high - low)).from_address(address + low)
    counts, strides = [count for count, _ in piece.loops], [stride for _, stride in piece.loops]
    if piece.length < 1 << 30:
        view: Array = np.ndarray(counts, f"V{piece.length}", memory, piece.offset - low, strides)
    else:  # NumPy's items are limited to 2 GiB
        view = np.ndarray((*counts, piece.length), np.uint8, memory, piece.offset - low, (*strides, 1))
    return view


@lru_cache(maxsize=256)
def packing(blocks: tuple[Block, ...]) -> Packing | None:
    """Of blocks that come again; None where it is not known where their bytes lie."""
    return None if any(each.element.pieces is None for each in blocks) else Packing(blocks)
