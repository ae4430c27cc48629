"""Contracts: what each buffer holds before a collective and must hold after it.

Contents are *tokens*, integers that are unique per (rank, block, segment), so a
block delivered to the wrong place can never pass for the right one. Following the
definitions of MPI 4.1, chapter 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hiercoll.errors import ArgumentError
from hiercoll.schedule import BufferName

Tokens: TypeAlias = npt.NDArray[np.int64]
UNDEFINED = -1


class Shape(NamedTuple):
    """A collective's buffers for one rank: sizes in blocks, and the token each block holds.

    ``held[i]`` is (rank, block) of what send block i holds; ``due[i]`` that of what
    recv block i must hold, where rank None stands for the reduction over all ranks.
    """

    held: list[tuple[int, int]]
    due: list[tuple[int | None, int]]


ShapeOf: TypeAlias = "Callable[[Contract, int], Shape]"


@dataclass(frozen=True)
class Contract:
    """The contract of ``collective`` among ``size`` ranks.

    ``root`` matters to rooted collectives, ``blocks`` (length of the vector in
    blocks) to bcast, reduce and allreduce. ``in_place``: the input lies in the
    receive buffer. ``commutative``: reductions may combine ranks in any order.
    """

    collective: str
    size: int
    segments: int = 1
    root: int = 0
    blocks: int = 1
    in_place: bool = False
    commutative: bool = True

    def __post_init__(self) -> None:
        if self.collective not in SHAPES:
            raise ArgumentError("collective", f"one of {', '.join(SHAPES)}", repr(self.collective))
        for name in ("size", "segments", "blocks"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, "at least 1", getattr(self, name))
        if not 0 <= self.root < self.size:
            raise ArgumentError("root", f"a rank below {self.size}", self.root)

    def shape(self, rank: int) -> Shape:
        """The buffers of ``rank``."""
        return SHAPES[self.collective](self, rank)

    def sizes(self, rank: int) -> dict[BufferName, int]:
        """Size of the rank's send and recv buffer in blocks."""
        shape = self.shape(rank)
        recv = len(shape.due)
        if self.in_place and self.collective != "allgather":
            recv = max(recv, len(shape.held))
        return {"send": 0 if self.in_place else len(shape.held), "recv": recv}

    @property
    def _width(self) -> int:
        """An upper bound of blocks per rank, to number tokens."""
        return max(self.size, self.blocks)

    def units(self, entries: list[tuple[int, int]]) -> Tokens:
        """Token of each segment of each (rank, block)."""
        pairs = np.array(entries, dtype=np.int64).reshape(-1, 2)
        base = (pairs[:, 0] * self._width + pairs[:, 1]) * self.segments
        tokens: Tokens = (base[:, None] + np.arange(self.segments)).ravel()
        return tokens

    def initial(self, rank: int) -> dict[BufferName, Tokens]:
        """Tokens in send and recv, one per segment, before the first operation."""
        sizes = self.sizes(rank)
        held = self.units(self.shape(rank).held)
        recv = np.full(sizes["recv"] * self.segments, UNDEFINED, dtype=np.int64)
        if not self.in_place:
            return {"send": held, "recv": recv}
        start = rank * self.segments if self.collective == "allgather" else 0
        recv[start : start + len(held)] = held
        return {"send": np.empty(0, dtype=np.int64), "recv": recv}

    def expected(self, rank: int) -> Tokens:
        """Tokens that recv must hold at the end; see `contributors` for reductions."""
        due = self.shape(rank).due
        return self.units([(self.size if source is None else source, block) for source, block in due])

    def is_reduction(self, token: int) -> bool:
        """Whether ``token`` stands for a reduction over all ranks."""
        first = self.size * self._width * self.segments
        return first <= token < first + self._width * self.segments

    def own_sizes(self, rank: int) -> Tokens:
        """Tokens of what the rank knows at the beginning: its own row of the buffer ``sizes``."""
        return self.units([(self.size + 1, 0)]) + rank * self.segments

    def contributors(self, token: int) -> list[int]:
        """The tokens, in rank order, that make up the reduction ``token``."""
        stride = self._width * self.segments
        return [rank * stride + token % stride for rank in range(self.size)]

    def describe(self, token: int) -> str:
        """``token`` in words."""
        if token == UNDEFINED:
            return "nothing"
        first = int(self.own_sizes(0)[0])
        if token >= first:
            return f"the sizes of rank {(token - first) // self.segments}"
        block, part = divmod(token, self.segments)
        rank, block = divmod(block, self._width)
        what = f"block {block}" + (f" segment {part}" if self.segments > 1 else "")
        return f"the reduction of {what}" if rank == self.size else f"{what} of rank {rank}"


def _alltoall(c: Contract, rank: int) -> Shape:
    return Shape([(rank, j) for j in range(c.size)], [(j, rank) for j in range(c.size)])


def _allgather(c: Contract, rank: int) -> Shape:
    return Shape([(rank, 0)], [(j, 0) for j in range(c.size)])


def _gather(c: Contract, rank: int) -> Shape:
    return Shape([(rank, 0)], [(j, 0) for j in range(c.size)] if rank == c.root else [])


def _scatter(c: Contract, rank: int) -> Shape:
    return Shape([(rank, j) for j in range(c.size)] if rank == c.root else [], [(c.root, rank)])


def _bcast(c: Contract, rank: int) -> Shape:
    blocks = range(c.blocks)
    return Shape([(rank, j) for j in blocks] if rank == c.root else [], [(c.root, j) for j in blocks])


def _reduce(c: Contract, rank: int) -> Shape:
    blocks = range(c.blocks)
    return Shape([(rank, j) for j in blocks], [(None, j) for j in blocks] if rank == c.root else [])


def _allreduce(c: Contract, rank: int) -> Shape:
    blocks = range(c.blocks)
    return Shape([(rank, j) for j in blocks], [(None, j) for j in blocks])


def _reduce_scatter(c: Contract, rank: int) -> Shape:
    return Shape([(rank, j) for j in range(c.size)], [(None, rank)])


SHAPES: dict[str, ShapeOf] = {
    "alltoall": _alltoall,
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "bcast": _bcast,
    "reduce": _reduce,
    "allreduce": _allreduce,
    "reduce_scatter": _reduce_scatter,
}

# What blocks hold, not how long they are, is in a contract: it is the same for uneven ones.
WITH_EVEN_BLOCKS = {"alltoallv": "alltoall", "allgatherv": "allgather"}
