"""Every collective, as one record: what it means, what its arguments are, and what MPI calls it.

Whatever hiercoll does for a collective follows from its record: which arguments are checked and how, the shape of a
result, what native calls are made, what a proof has to show, what a benchmark sends and expects. A new collective is a
record here and algorithms under `hiercoll.algorithms`; no other module asks for a collective's name.

A *contract* says what each buffer holds before a collective and must hold after it. Contents are *tokens*, integers
that are unique per (rank, block, segment), so that a block delivered to the wrong place can never pass for the right
one. Definitions follow MPI 4.1, chapter 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

from hiercoll.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Tokens: TypeAlias = "npt.NDArray[np.int64]"
End: TypeAlias = Literal["send", "recv"]
Made = TypeVar("Made")
UNDEFINED = -1
# In place of the name of an algorithm, or of a transport: what hiercoll finds best, and the MPI library's own.
AUTO, NATIVE = "auto", "native"


class Holds(Enum):
    """What an argument of a collective holds."""

    EACH = "a block for each rank"
    ONE = "one block"
    VECTOR = "a vector, which an algorithm may cut into blocks"
    NOTHING = "blocks without bytes, for which there is no argument"


class InPlace(Enum):
    """Where the input lies if it lies in the receive buffer."""

    SAME = "block i of the input is block i there"
    OWN = "the rank's one block is in its place among those of all ranks"
    ROOT = "on the root alone, whose input or result is in its place in the other buffer"
    ALWAYS = "as SAME, and there is only one buffer"


class Sizes(Enum):
    """Who knows the sizes of a collective's blocks."""

    EQUAL = "all blocks have one size"
    KNOWN = "blocks differ, and every rank knows the sizes of all"
    OWN = "blocks differ, and a rank knows the sizes of those that it sends and receives"
    ROOT = "as OWN: the root knows all, others that of their block"


class Order(IntEnum):
    """How the ranks' contributions to a reduction are combined; each order is one of those before it, too.

    Whatever the order, all ranks that get a result get it by one expression tree: the same bits (MPI 4.1, 6.9.6).
    """

    ANY = 0  # each contribution once
    RANK = 1  # in the order of ranks, with brackets anywhere: right for operations that do not commute
    FIXED = 2  # by `fixed_tree`, which depends on the number of ranks alone


def fixed_tree(leaves: Sequence[Made], combine: Callable[[Made, Made], Made]) -> Made:
    """What `Order.FIXED` makes of the contributions of ranks, at least one, in rank order.

    Of more than a power of two the first ones are combined in pairs, until it is one; then neighbours are, again and
    again: as by recursive doubling (Thakur, Rabenseifner, Gropp 2005, section 4.5).
    """
    pairs = len(leaves) - (1 << len(leaves).bit_length() - 1)
    level = [combine(leaves[2 * i], leaves[2 * i + 1]) for i in range(pairs)] + list(leaves[2 * pairs :])
    while len(level) > 1:
        level = [combine(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


class Shape(NamedTuple):
    """A collective's buffers for one rank: sizes in blocks, and the token each block holds.

    ``held[i]`` is (rank, block) of what send block i holds; ``due[i]`` that of what
    recv block i must hold, where rank None stands for the reduction over all ranks.
    """

    held: list[tuple[int, int]]
    due: list[tuple[int | None, int]]


ShapeOf: TypeAlias = "Callable[[Contract, int], Shape]"


class InBackground(NamedTuple):
    """A collective's calls in the background: the compiled engine tells them from blocking ones by this. The fields are
    those of `Collective`."""

    buffers: int
    of_root: int
    is_even: bool
    is_private: bool
    is_counted: bool
    typed: bool

    @property
    def begins(self) -> bool:
        """They return before they are done."""
        return True


@dataclass(frozen=True, eq=False)  # one of each: compared by identity
class Collective:
    """A collective.

    ``contract`` gives the contents of each rank's buffers; ``send`` and ``recv`` what the arguments hold, ``root`` and
    ``operation`` whether it takes those, ``in_place`` where the input lies if it lies in the receive buffer, ``sizes``
    who knows the sizes of blocks, ``typed`` whether each block has a datatype of its own. ``native`` is MPI's name of
    the blocking form; without one there are algorithms to be proved, but no calls. ``family``: the collective whose
    algorithms serve it, if they are not its own. ``tuned``: the sizes that ``hiercoll tune`` measures (see
    `cli.common.SizesType`); none: it has no table of its own.
    ``size_of`` says in words of what a size in bytes is. ``section``: of MPI 4.1.
    """

    name: str
    contract: ShapeOf
    send: Holds
    recv: Holds
    in_place: InPlace = InPlace.SAME
    root: bool = False
    operation: bool = False
    sizes: Sizes = Sizes.EQUAL
    typed: bool = False
    native: str = ""
    family: str = ""
    tuned: str = ""
    size_of: str = "bytes per block"
    section: str = ""
    number: int = field(init=False)  # of the record, for tags
    begins = False  # its blocking calls return when they are done

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", len(COLLECTIVES))
        object.__setattr__(self, "family", self.family or self.name)
        COLLECTIVES[self.name] = self

    def __str__(self) -> str:
        return self.name

    @property
    def is_even(self) -> bool:
        """Whether all blocks have one size."""
        return self.sizes is Sizes.EQUAL

    @property
    def is_on_devices(self) -> bool:
        """Whether tables are made for memory of devices: of what moves blocks of one size."""
        return self.is_even and self.buffers > 0

    @property
    def is_private(self) -> bool:
        """Whether no rank knows all sizes, so that "auto" is one choice for calls with whatever blocks."""
        return self.sizes in (Sizes.OWN, Sizes.ROOT)

    @property
    def is_counted(self) -> bool:
        """Whether the sizes of blocks, which are parts of a vector, are an argument of their own."""
        return self.operation and not self.is_even

    @property
    def is_cut(self) -> bool:
        """Whether blocks may be parts of a vector, whose sizes differ and are known to all ranks."""
        return self.operation or Holds.VECTOR in (self.send, self.recv)

    @property
    def buffers(self) -> int:
        """How many buffers calls name."""
        return 0 if self.recv is Holds.NOTHING else 1 if self.one_buffer else 2

    @property
    def one_buffer(self) -> bool:
        """Whether input and result are the same argument."""
        return self.in_place is InPlace.ALWAYS

    @property
    def is_rooted(self) -> bool:
        """Whether there are two buffers, of which only the root has both."""
        return self.root and not self.one_buffer

    @property
    def everywhere(self) -> End:
        """The buffer that every rank has."""
        return "send" if self.is_rooted and self.send is not Holds.EACH else "recv"

    @cached_property
    def of_root(self) -> int:
        """Which buffer only the root has, send (0) or recv (1); -1: none."""
        return -1 if not self.is_rooted else 1 if self.everywhere == "send" else 0

    @property
    def more(self) -> tuple[str, ...]:
        """The arguments of MPI's functions after the buffers."""
        counts = ("recvcounts",) if self.is_counted else ()
        return counts + (("op",) if self.operation else ()) + (("root",) if self.root else ())

    @property
    def nonblocking(self) -> str:
        """MPI's name of the form that returns a request: "Ialltoall"."""
        return f"I{self.native.lower()}"

    @cached_property
    def in_background(self) -> InBackground:
        """Its calls that return a request."""
        of_blocks = (self.is_even, self.is_private, self.is_counted, self.typed)
        return InBackground(self.buffers, self.of_root, *of_blocks)

    @property
    def persistent(self) -> str:
        """MPI's name of the form that returns a persistent request: "Alltoall_init"."""
        return f"{self.native}_init"

    def blocks(self, holds: Holds, size: int) -> int:
        """The number of blocks in an argument, of ``size`` ranks; a vector counts as one."""
        return size if holds is Holds.EACH else 1


COLLECTIVES: dict[str, Collective] = {}


def get_collective(name: str) -> Collective:
    """The record of that name. Raises ArgumentError naming those that exist."""
    if name not in COLLECTIVES:
        raise ArgumentError("collective", f"one of {', '.join(COLLECTIVES)}", repr(name))
    return COLLECTIVES[name]


def called() -> list[Collective]:
    """Those that can be called."""
    return [each for each in COLLECTIVES.values() if each.native]


def tuned() -> list[str]:
    """The names of those that tables are made for."""
    return [each.name for each in COLLECTIVES.values() if each.tuned]


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


ALLTOALL = Collective(
    "alltoall",
    _alltoall,
    send=Holds.EACH,
    recv=Holds.EACH,
    native="Alltoall",
    tuned="8:64K,24,192,1536,12K",
    size_of="bytes per pair of ranks",
    section="6.8",
)
ALLGATHER = Collective(
    "allgather",
    _allgather,
    send=Holds.ONE,
    recv=Holds.EACH,
    in_place=InPlace.OWN,
    native="Allgather",
    tuned="8:256K,24,192,1536,12K,96K",
    size_of="bytes per rank",
    section="6.7",
)
ALLTOALLV = Collective(
    "alltoallv",
    _alltoall,
    send=Holds.EACH,
    recv=Holds.EACH,
    sizes=Sizes.OWN,
    native="Alltoallv",
    tuned="8:64K:4,192,12K",
    size_of="mean bytes per pair of ranks",
    section="6.8",
)
ALLGATHERV = Collective(
    "allgatherv",
    _allgather,
    send=Holds.ONE,
    recv=Holds.EACH,
    in_place=InPlace.OWN,
    sizes=Sizes.KNOWN,
    native="Allgatherv",
    family="allgather",
    size_of="mean bytes per rank",
    section="6.7",
)
ALLTOALLW = Collective(
    "alltoallw",
    _alltoall,
    send=Holds.EACH,
    recv=Holds.EACH,
    sizes=Sizes.OWN,
    typed=True,
    native="Alltoallw",
    family="alltoallv",
    size_of="mean bytes per pair of ranks",
    section="6.8",
)
GATHER = Collective(
    "gather",
    _gather,
    send=Holds.ONE,
    recv=Holds.EACH,
    in_place=InPlace.ROOT,
    root=True,
    native="Gather",
    tuned="8:64K:4,192,12K",
    size_of="bytes per rank",
    section="6.5",
)
SCATTER = Collective(
    "scatter",
    _scatter,
    send=Holds.EACH,
    recv=Holds.ONE,
    in_place=InPlace.ROOT,
    root=True,
    native="Scatter",
    tuned="8:64K:4,192,12K",
    size_of="bytes per rank",
    section="6.6",
)
BCAST = Collective(
    "bcast",
    _bcast,
    send=Holds.VECTOR,
    recv=Holds.VECTOR,
    in_place=InPlace.ALWAYS,
    root=True,
    native="Bcast",
    tuned="8:2M:4,192,12K,96K,4M",
    size_of="bytes per rank",
    section="6.4",
)
REDUCE = Collective(
    "reduce",
    _reduce,
    send=Holds.VECTOR,
    recv=Holds.VECTOR,
    in_place=InPlace.ROOT,
    root=True,
    operation=True,
    native="Reduce",
    tuned="8:1M:4,192,12K,96K",
    size_of="bytes per rank",
    section="6.9.1",
)
ALLREDUCE = Collective(
    "allreduce",
    _allreduce,
    send=Holds.VECTOR,
    recv=Holds.VECTOR,
    operation=True,
    native="Allreduce",
    tuned="8:2M:4,192,12K,96K,4M",
    size_of="bytes per rank",
    section="6.9.6",
)
REDUCE_SCATTER = Collective(
    "reduce_scatter",
    _reduce_scatter,
    send=Holds.EACH,
    recv=Holds.ONE,
    operation=True,
    native="Reduce_scatter_block",
    tuned="8:64K:4,192,12K",
    size_of="bytes per rank's result",
    section="6.10.1",
)
GATHERV = Collective(
    "gatherv",
    _gather,
    send=Holds.ONE,
    recv=Holds.EACH,
    in_place=InPlace.ROOT,
    root=True,
    sizes=Sizes.ROOT,
    native="Gatherv",
    size_of="mean bytes per rank",
    section="6.5",
)
SCATTERV = Collective(
    "scatterv",
    _scatter,
    send=Holds.EACH,
    recv=Holds.ONE,
    in_place=InPlace.ROOT,
    root=True,
    sizes=Sizes.ROOT,
    native="Scatterv",
    size_of="mean bytes per rank",
    section="6.6",
)
REDUCE_SCATTERV = Collective(
    "reduce_scatterv",
    _reduce_scatter,
    send=Holds.EACH,
    recv=Holds.ONE,
    operation=True,
    sizes=Sizes.KNOWN,
    native="Reduce_scatter",
    family="reduce_scatter",
    size_of="mean bytes per rank's result",
    section="6.10.2",
)
BARRIER = Collective(  # an allgather of blocks without bytes: what ends with those of all ranks comes after all of them
    "barrier",
    _allgather,
    send=Holds.NOTHING,
    recv=Holds.NOTHING,
    native="Barrier",
    tuned="0",
    size_of="no bytes",
    section="6.3",
)
