"""Every collective, as one record: what it means, what its arguments are, and what MPI calls it.

Whatever hiercoll does for a collective follows from its record: which arguments are checked and how, the shape of a
result, what native calls are made, what a proof has to show, what a benchmark sends and expects. A new collective is a
record here and algorithms under `hiercoll.algorithms`; no other module asks for a collective's name.

What each buffer holds before a collective, and must hold after it, is its contract (`hiercoll.contracts`).
Definitions follow MPI 4.1, chapter 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

from hiercoll.errors import ArgumentError

if TYPE_CHECKING:
    from hiercoll.contracts import Contract

End: TypeAlias = Literal["send", "recv"]
Made = TypeVar("Made")
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


class Collective:
    """A collective. There is one record of each, compared by identity.

    ``contract`` gives the contents of each rank's buffers; ``send`` and ``recv`` what the arguments hold, ``root`` and
    ``operation`` whether it takes those, ``in_place`` where the input lies if it lies in the receive buffer, ``sizes``
    who knows the sizes of blocks, ``typed`` whether each block has a datatype of its own. ``native`` is MPI's name of
    the blocking form; without one there are algorithms to be proved, but no calls. ``family``: the collective whose
    algorithms serve it, if they are not its own. ``tuned``: the sizes that ``hiercoll tune`` measures (see
    `cli.common.SizesType`); none: it has no table of its own.
    ``size_of`` says in words of what a size in bytes is. ``section``: of MPI 4.1.
    """

    begins = False  # its blocking calls return when they are done

    def __init__(
        self,
        name: str,
        contract: ShapeOf,
        *,
        send: Holds,
        recv: Holds,
        in_place: InPlace = InPlace.SAME,
        root: bool = False,
        operation: bool = False,
        sizes: Sizes = Sizes.EQUAL,
        typed: bool = False,
        native: str = "",
        family: str = "",
        tuned: str = "",
        size_of: str = "bytes per block",
        section: str = "",
    ) -> None:
        self.name, self.native, self.family, self.number = name, native, family or name, len(COLLECTIVES)
        self.contract, self.send, self.recv, self.in_place = contract, send, recv, in_place
        self.root, self.operation, self.sizes, self.typed = root, operation, sizes, typed
        self.tuned, self.size_of, self.section = tuned, size_of, section
        COLLECTIVES[name] = self

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
