"""Two binary trees at once: what is a leaf in one of them is an inner node of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hiercoll.algorithms.grouping import line_from
from hiercoll.algorithms.reducing import Part, combined
from hiercoll.algorithms.registry import grid, register, segments_parameter
from hiercoll.collectives import ALLREDUCE, BCAST, REDUCE, Order
from hiercoll.schedule import RECV, SEND, Buffer, Builder, Schedule, in_order
from hiercoll.topology import Topology

SEGMENTS = segments_parameter(8, "parts of each half of the vector, for pipelining", 8, 1, 3)


class Branch(NamedTuple):
    """Where a place is in a binary tree: who is above, who is below on either side, and the tree's height."""

    above: int | None
    below: list[int]
    height: int


def in_order_tree(n: int, place: int) -> Branch:
    """A binary tree over ``n`` places in which those to the left of a place are before it, those to the right behind;
    every other place, from the first on, is a leaf."""
    low, size, above = 0, n, None
    while True:
        top = low + (1 << size.bit_length() - 1) - 1
        left, right = (low, top - low), (top + 1, low + size - top - 1)
        if place == top:
            below = [first + (1 << many.bit_length() - 1) - 1 for first, many in (left, right) if many]
            return Branch(above, below, n.bit_length())
        above, (low, size) = top, left if place < top else right


@register(
    ALLREDUCE,
    SEGMENTS,
    in_place=True,
    order=lambda topology, params: Order.ANY if topology.size % 2 else Order.RANK if topology.size > 2 else Order.FIXED,
    auto=({}, {"segments": 32}),
    search=lambda topology: grid(segments=(2, 4, 16, 32, 64)),
)
def double_tree_allreduce(topology: Topology, rank: int, *, segments: int) -> Schedule:
    """Two binary trees, each for half of the vector, up and down; who is a leaf in one has others below in the other.

    Contract: allreduce, by ranks in their order if they are even in number, else in any order.

        node 0: 0 1 2   | one half:             0 -> 1 <- 2,  4 -> 5;  1 -> 3 <- 5;  and down again
        node 1: 3 4 5   | the other, mirrored:  5 -> 4 <- 3,  1 -> 0;  4 -> 2 <- 0;  and down again

    Of an odd number of ranks the other tree's are shifted by one instead.
    Segments follow each other, up and then down. Every rank sends and receives a half three times at most, and both
    together four times.
    Counts (any number of ranks): scratch = 4 if p > 1 else 0
    Constraints: none.
    Reference: Sanders, Speck, Träff 2009 (two-tree algorithm).
    """
    p, b = topology.size, Builder(rank, segments, blocks=2)
    if p == 1:
        b.copy(SEND[0:2], RECV[0:2])
        return b.build()
    spare, trees = b.scratch(4), [_TreeHalf.of(b, half, range(p)) for half in range(2)]
    height = trees[0].branch.height
    for step in range(segments + height):
        for tree in trees:
            if step < segments:
                tree.up(b, step, spare, RECV)
            if step >= height:
                tree.down(b, step - height)
    return in_order(b.build())


@register(
    REDUCE,
    SEGMENTS,
    order=lambda topology, params: Order.FIXED if topology.size == 2 else Order.ANY,
    auto=({}, {"segments": 32}),
    search=lambda topology: grid(segments=(2, 4, 16, 32, 64)),
)
def double_tree_reduce(topology: Topology, rank: int, *, root: int, segments: int) -> Schedule:
    """Two binary trees over all ranks but the root, each for half of the vector; their tops send to the root.

    Contract: reduce in any order; the vector is two blocks.

        node 0: 0 1 2   | to root 0, one half:  1 -> 2 <- 3,  2 -> 4 <- 5,  4 -> 0
        node 1: 3 4 5   | the other, shifted:   2 -> 3 <- 4,  3 -> 5 <- 1,  5 -> 0

    Of an even number of other ranks the second tree is mirrored instead.
    Counts (root; any number of ranks): messages = 0; scratch = 2 if p > 1 else 0
    Constraints: none.
    Reference: Sanders, Speck, Träff 2009 (two-tree algorithm).
    """
    b, others = Builder(rank, segments, blocks=2), line_from(range(topology.size), root)[1:]
    if not others:
        b.copy(SEND[0:2], RECV[0:2])
    elif rank == root:
        spare = b.scratch(2)
        for number in range(segments):
            for half in range(2):
                with b.segment(number):
                    came = [b.recv(_top(others, half), spare[half].of(half), tag=2 * number + half)]
                    combined(b, Part(SEND[half], []), spare[half].of(half), came, RECV[half], others[0] < rank)
    else:
        spare, own, trees = b.scratch(4), b.scratch(2), [_TreeHalf.of(b, half, others) for half in range(2)]
        for number in range(segments):
            for tree in trees:
                tree.up(b, number, spare, own, root)
    return in_order(b.build())


@register(
    BCAST,
    SEGMENTS,
    auto=({}, {"segments": 32}),
    search=lambda topology: grid(segments=(2, 4, 16, 32, 64)),
)
def double_tree_bcast(topology: Topology, rank: int, *, root: int, segments: int) -> Schedule:
    """The root sends half of the vector down each of two binary trees over all other ranks.

    Contract: bcast; the vector is two blocks.

        node 0: 0 1 2   | root 0, one half:     0 -> 4,  4 -> 2, 4 -> 5,  2 -> 1, 2 -> 3
        node 1: 3 4 5   | the other, shifted:   0 -> 5,  5 -> 3, 5 -> 1,  3 -> 2, 3 -> 4

    Of an even number of other ranks the second tree is mirrored instead. Segments follow each other.
    Counts (root; any number of ranks): messages = 2*segments if p > 1 else 0; blocks = 2 if p > 1 else 0; scratch = 0
    Constraints: none.
    Reference: Sanders, Speck, Träff 2009 (two-tree algorithm).
    """
    b, others = Builder(rank, segments, blocks=2), line_from(range(topology.size), root)[1:]
    trees = [] if rank == root else [_TreeHalf.of(b, half, others) for half in range(2)]
    for number in range(segments if others else 0):
        for half in range(2 if rank == root else 0):
            with b.segment(number):
                b.send(_top(others, half), RECV[half], tag=2 * number + half, after=[])
        for tree in trees:
            tree.down(b, number, root)
    return in_order(b.build())


def _shifted(line: Sequence[int], half: int) -> Sequence[int]:
    """The ranks of a line as the tree of that half has them."""
    return line if half == 0 else line[::-1] if len(line) % 2 == 0 else [*line[1:], line[0]]


def _top(line: Sequence[int], half: int) -> int:
    """The rank above all others."""
    return _shifted(line, half)[(1 << len(line).bit_length() - 1) - 1]


class _TreeHalf(NamedTuple):
    """One of the two trees, for one half of the vector: the ranks in its places, and where this one is."""

    half: int
    branch: Branch
    ranks: Sequence[int]
    sums: list[list[int]]  # by segment, what completes the sum that is passed up, or the result

    @classmethod
    def of(cls, b: Builder, half: int, line: Sequence[int]) -> _TreeHalf:
        ranks = _shifted(line, half)
        return cls(half, in_order_tree(len(ranks), ranks.index(b.rank)), ranks, [])

    def above(self, beyond: int | None) -> int | None:
        """The rank above, or ``beyond`` the top."""
        return beyond if self.branch.above is None else self.ranks[self.branch.above]

    def up(self, b: Builder, number: int, spare: Buffer, target: Buffer, beyond: int | None = None) -> None:
        """Add what comes from below to the rank's own, in the order of ranks, and pass it on; two blocks of ``spare``
        are for each half, one of ``target``."""
        slots = [spare[2 * self.half + side].of(self.half) for side in range(2)]
        with b.segment(number):
            part = Part(SEND[self.half], [])
            into = target[self.half] if target.name == "recv" else target[self.half].of(self.half)
            for below, slot in sorted(zip((self.ranks[each] for each in self.branch.below), slots, strict=False)):
                came = [b.recv(below, slot, tag=self._tag(number), after=[])]
                part = combined(b, part, slot, came, into, is_first=below < b.rank)
            above = self.above(beyond)
            if above is not None:
                part.after.append(b.send(above, part.region, tag=self._tag(number), after=part.after))
            self.sums.append(part.after)

    def down(self, b: Builder, number: int, beyond: int | None = None) -> None:
        """Pass the result on."""
        tag = self._tag(number + (b.segments if self.sums else 0))  # behind those of the way up
        with b.segment(number):
            here, above = self.sums[number] if self.sums else [], self.above(beyond)
            if above is not None:
                here = [b.recv(above, RECV[self.half], tag=tag, after=here, partial=False)]
            for below in self.branch.below:
                b.send(self.ranks[below], RECV[self.half], tag=tag, after=here, partial=False)

    def _tag(self, number: int) -> int:
        return 2 * number + self.half
