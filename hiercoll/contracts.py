"""What each buffer of a collective holds before it, and must hold after it: its contract.

Contents are *tokens*, integers that are unique per (rank, block, segment), so that a block delivered to the wrong place
can never pass for the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hiercoll.collectives import COLLECTIVES, Collective, End, Holds, InPlace, Order, Shape, get_collective
from hiercoll.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Tokens: TypeAlias = "npt.NDArray[np.int64]"
UNDEFINED = -1


@dataclass(frozen=True)
class Contract:
    """The contract of ``collective`` among ``size`` ranks.

    ``root`` matters to rooted collectives, ``blocks`` (length of the vector in
    blocks) to bcast, reduce and allreduce. ``in_place``: the input lies in the
    receive buffer. ``order``: the one that reductions must have, at least. ``accumulate``: they
    are made of wider elements than the program's, and rounded once.
    """

    collective: str
    size: int
    segments: int = 1
    root: int = 0
    blocks: int = 1
    in_place: bool = False
    order: Order = Order.ANY
    accumulate: bool = False

    def __post_init__(self) -> None:
        get_collective(self.collective)
        object.__setattr__(self, "order", Order(self.order))  # a number in JSON
        for name in ("size", "segments", "blocks"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, "at least 1", getattr(self, name))
        if not 0 <= self.root < self.size:
            raise ArgumentError("root", f"a rank, a whole number from 0 to {self.size - 1}", self.root)

    @property
    def record(self) -> Collective:
        """What the collective is."""
        return COLLECTIVES[self.collective]

    def shape(self, rank: int) -> Shape:
        """The buffers of ``rank``."""
        return self.record.contract(self, rank)

    def moves(self, rank: int) -> tuple[bool, bool]:
        """Whether anything that ``rank`` holds is due somewhere, and whether anything is due on it that it does not
        hold in that place already; of one buffer that says whether it is read, and whether it is written."""
        shape = self.shape(rank)
        return bool(shape.held), shape.due != shape.held[: len(shape.due)]

    def sizes(self, rank: int) -> dict[End, int]:
        """Size of the rank's send and recv buffer in blocks."""
        shape = self.shape(rank)
        recv = len(shape.due)
        if self.in_place and self.record.in_place is not InPlace.OWN:
            recv = max(recv, len(shape.held))
        return {"send": 0 if self.in_place else len(shape.held), "recv": recv}

    @property
    def _width(self) -> int:
        """An upper bound of blocks per rank, to number tokens."""
        return max(self.size, self.blocks)

    def units(self, entries: list[tuple[int, int]]) -> Tokens:
        """Token of each segment of each (rank, block)."""
        import numpy as np  # here: the package can be imported, for its names, without it

        pairs = np.array(entries, dtype=np.int64).reshape(-1, 2)
        base = (pairs[:, 0] * self._width + pairs[:, 1]) * self.segments
        tokens: Tokens = (base[:, None] + np.arange(self.segments)).ravel()
        return tokens

    def initial(self, rank: int) -> dict[End, Tokens]:
        """Tokens in send and recv, one per segment, before the first operation."""
        import numpy as np

        sizes = self.sizes(rank)
        held = self.units(self.shape(rank).held)
        recv = np.full(sizes["recv"] * self.segments, UNDEFINED, dtype=np.int64)
        if not self.in_place:
            return {"send": held, "recv": recv}
        start = rank * self.segments if self.record.in_place is InPlace.OWN else 0
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

    def block_of(self, token: int) -> int:
        """The number of the block that ``token`` is of, or is a reduction of."""
        return token // self.segments % self._width

    def rank_of(self, token: int) -> int:
        """The rank that contributes ``token``."""
        return token // self.segments // self._width

    def like(self, rank: int, buffer: str, blocks: Sequence[int]) -> Sequence[int] | None:
        """The blocks of the whole vector that blocks of the rank's send or recv are as long as; None where all are of
        one size, or it is not said, as of any other buffer."""
        holds = {"send": self.record.send, "recv": self.record.recv}.get(buffer)
        if holds is None or not self.record.is_cut:
            return None
        if holds is not Holds.ONE:
            return blocks
        # In place blocks are of one size: what is put to the front may end elsewhere otherwise.
        return None if self.in_place else [rank] * len(blocks)

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
