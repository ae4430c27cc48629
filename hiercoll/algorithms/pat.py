"""PAT: trees for all blocks at once whose messages, and with them buffers, are bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hiercoll.algorithms.reducing import Part
from hiercoll.algorithms.registry import Parameter, grid, register
from hiercoll.collectives import ALLGATHER, REDUCE_SCATTER
from hiercoll.schedule import RECV, SEND, Buffer, Builder, Region, Schedule, in_order
from hiercoll.topology import Topology

AGGREGATION = Parameter("aggregation", 8, (8, 1, 2), "blocks in a message, at most (a power of two of them)", 1)


class Trees(NamedTuple):
    """The binomial trees of all blocks: that of block c has rank c + q in place q, and place q is below q without its
    lowest bit. Messages are of all places that are equal in their bits below ``stride``."""

    p: int
    stride: int

    @classmethod
    def of(cls, p: int, aggregation: int) -> Trees:
        return cls(p, max((1 << (p - 1).bit_length()) >> aggregation.bit_length() - 1, 1))

    def places(self, low: int) -> list[int]:
        """Those with these low bits."""
        return list(range(low, self.p, self.stride))

    def blocks(self, rank: int, places: list[int]) -> list[int]:
        """The blocks in whose trees the rank is in these places."""
        return [(rank - place) % self.p for place in places]

    def distances(self) -> list[int]:
        """Of the steps in which messages shrink, or grow: the nearest first."""
        found, distance = list[int](), self.stride
        while distance < self.p:
            found.append(distance)
            distance *= 2
        return found


def _below(place: int, stride: int) -> Iterator[int]:
    """How far those below a place are, among places below ``stride``; the nearest first."""
    distance = 1
    while distance < (place & -place if place else stride):
        yield distance
        distance *= 2


@register(ALLGATHER, AGGREGATION, in_place=True, auto=({},), search=lambda topology: grid(aggregation=(4, 16, 64)))
def pat(topology: Topology, rank: int, *, aggregation: int) -> Schedule:
    """Blocks travel along binomial trees, those to far ranks first and together, then a few at a time.

    Contract: allgather.

        node 0: 0 1 2   | aggregation=2, every rank: 4 ranks on its own block; 2 on its own; 1 on
        node 1: 3 4 5   | what came from 2 back; 1 on its own block and what came from 4 back

    Counts (p a power of two): messages = max(p//8, 1)-1+min(3, log2(p)); blocks = p-1; scratch = 0
    Constraints: none.
    Reference: Jeaugey 2025 (PAT).
    """
    p, b = topology.size, Builder(rank)
    trees = Trees.of(p, aggregation)
    came = {0: b.copy(SEND[0], RECV[rank])}  # by place

    def step(distance: int, places: list[int]) -> None:
        """What goes to places that far on, and what comes."""
        above = [place - distance for place in places]
        after = sorted({came[place] for place in above})
        b.send((rank + distance) % p, RECV[trees.blocks(rank, above)], tag=places[0], after=after)
        arrived = b.recv((rank - distance) % p, RECV[trees.blocks(rank, places)], tag=places[0], after=[])
        came.update(dict.fromkeys(places, arrived))

    for distance in reversed(trees.distances()):
        step(distance, list(range(distance, p, 2 * distance)))

    def descend(low: int) -> None:
        for distance in reversed(list(_below(low, trees.stride))):
            if low + distance < p:
                step(distance, trees.places(low + distance))
                descend(low + distance)

    descend(0)
    return in_order(b.build())


@register(REDUCE_SCATTER, AGGREGATION, auto=({},), search=lambda topology: grid(aggregation=(4, 16, 64)))
def pat_reduce_scatter(topology: Topology, rank: int, *, aggregation: int) -> Schedule:
    """Sums of blocks travel up binomial trees, from near ranks first and a few at a time, then from far ones.

    Contract: reduce_scatter in any order.

        node 0: 0 1 2   | aggregation=2, every rank: 1 rank back two blocks; 1 back a third one; 2 back
        node 1: 3 4 5   | the sum of one and what came for it; 4 back that of the last one

    Partial sums are as many as a message has, for each bit of the number of messages.
    Counts (p a power of two): messages = max(p//8, 1)-1+min(3, log2(p)); blocks = p-1
    Constraints: none. Not in place.
    Reference: Jeaugey 2025 (PAT).
    """
    p, b = topology.size, Builder(rank)
    trees = Trees.of(p, aggregation)
    if p == 1:
        b.copy(SEND[0], RECV[0])
        return b.build()
    own = trees.blocks(rank, trees.places(0))
    levels = [Level.of(b, len(own)) for _ in range(trees.stride.bit_length())]
    part, left = _climbed(b, trees, levels, 0), list(range(len(own)))
    for distance in trees.distances():
        given, left = left[1::2], left[::2]
        b.send((rank - distance) % p, levels[0].region(part, own, given), tag=distance, after=part.after)
        come = left[: len(given)]
        part = levels[0].with_more(b, part, own, left, come, (rank + distance) % p, distance)
    b.copy(levels[0].sums[0].of(rank), RECV[0], after=part.after)
    return in_order(b.build())


class Level(NamedTuple):
    """Room for the sums of as many blocks as a message has, and for what comes for them; what has used it last."""

    sums: Buffer
    spare: Buffer
    used: list[int]

    @classmethod
    def of(cls, b: Builder, width: int) -> Level:
        return cls(b.scratch(width), b.scratch(width), [])

    def region(self, part: Part, own: list[int], numbers: list[int]) -> Region:
        """Of the blocks with these numbers: in the program's vector as long as nothing has come for any."""
        blocks = [own[number] for number in numbers]
        return SEND[blocks] if part.region.buffer == "send" else self.sums[numbers].of(blocks)

    def with_more(
        self, b: Builder, part: Part, own: list[int], kept: list[int], come: list[int], peer: int, tag: int
    ) -> Part:
        """The sums of the blocks of ``own`` with the numbers ``kept``, with what comes from a peer for some of them."""
        blocks, before = [own[number] for number in come], [*part.after, *self.used]
        into, target = self.spare[come].of(blocks), self.sums[come].of(blocks)
        came = b.recv(peer, into, tag=tag, after=before)
        after = [b.reduce(self.region(part, own, come), into, target, after=[came])]
        rest = [number for number in kept if number not in come]
        if rest and part.region.buffer == "send":
            others = [own[number] for number in rest]
            after.append(b.copy(SEND[others], self.sums[rest].of(others), after=before))
        return Part(self.sums[kept].of([own[number] for number in kept]), after)


def _climbed(b: Builder, trees: Trees, levels: Sequence[Level], low: int) -> Part:
    """The sums in all places with these low bits, after those in the places below them."""
    own = trees.blocks(b.rank, trees.places(low))
    part, kept = Part(SEND[own], []), list(range(len(own)))
    for distance in _below(low, trees.stride):
        come = kept[: len(trees.places(low + distance))]
        if not come:
            continue
        below = _climbed(b, trees, levels[1:], low + distance)
        down, up = (b.rank - distance) % trees.p, (b.rank + distance) % trees.p
        sent = b.send(down, below.region, tag=low + distance, after=below.after)
        if below.region.buffer != "send":
            levels[1].used[:] = [sent]
        part = levels[0].with_more(b, part, own, kept, come, up, low + distance)
    return part
