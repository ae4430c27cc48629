"""Where the bytes of a vector lie that is cut into blocks."""

from __future__ import annotations

import numpy as np
import pytest

from hiercoll.algorithms import REGISTRY
from hiercoll.errors import ConstraintError
from hiercoll.memory import BlockLayout, UnevenLayout
from hiercoll.runtime.layouts import known_layout, vector_layout
from hiercoll.runtime.sizes import Blocks
from hiercoll.schedule import HOST, RECV, SHARED, Builder, Region, Schedule, reads, writes
from hiercoll.schedule.transports import Transport, staged
from hiercoll.topology import parse_layout


def relayed(scratch: int = 0) -> Schedule:
    """A rank that passes on two of three blocks, by way of the node's buffer, and so many by way of scratch."""
    b = Builder(0, blocks=3)
    shared = b.shared(2, [(0, 2), (0, 0)])
    piece = b.scratch(scratch)
    got = b.recv(1, RECV[[2, 0]])
    b.copy(RECV[[2, 0]], shared[0:2], after=[got])
    b.send(2, RECV[1:3], after=[got])
    if scratch:
        b.recv(3, piece[0:scratch])
    return b.build()


def test_even() -> None:
    """As blocks of one size."""
    layout, block, shared = vector_layout(relayed(4), 12)
    assert layout == BlockLayout(4) and (block, shared) == (4, 8)


@pytest.mark.parametrize("item", [1, 3, 8])
@pytest.mark.parametrize("items", [0, 1, 2, 4, 5, 7, 10, 1000])
def test_blocks_cover_the_vector(items: int, item: int) -> None:
    """In order, without gaps, cut between items, as long as the first but for the last ones; the same bytes in other
    buffers."""
    layout, block, shared = vector_layout(relayed(), items * item, item)
    places = [layout.runs(RECV[index]) for index in range(3)]
    lengths = [sum(length for _, length in runs) for runs in places]
    assert sum(lengths) == items * item and not any(length % item for length in lengths)
    assert lengths[0] == block < (items / 3 + 1) * item and sorted(lengths, reverse=True) == lengths
    assert layout.runs(RECV[0:3]) == ([(0, items * item)] if items else []) or items % 3 == 0
    assert shared == 2 * block
    assert [sum(n for _, n in layout.runs(SHARED[index])) for index in (0, 1)] == [lengths[2], lengths[0]]


def test_messages_by_way_of_the_host() -> None:
    """What is copied there is as long as the blocks that it is for, and lies together."""
    schedule = staged(relayed())
    layout, block, _ = vector_layout(schedule, 11)
    assert isinstance(layout, UnevenLayout) and schedule.host == 4 and block == 4
    assert [length for index in range(4) for _, length in layout.runs(HOST[index])] == [3, 4, 4, 3]
    assert layout.runs(HOST[0:4]) == [(0, 14)]


def test_scratch() -> None:
    """Of which nothing is said: there, blocks must be of one size."""
    with pytest.raises(ConstraintError, match="buf: expected a multiple of 6 bytes"):
        vector_layout(relayed(1), 22, 2)


def test_scratch_like_blocks() -> None:
    """As long as the blocks, or parts of blocks, that are named; those in slots side by side lie together."""
    b = Builder(0, segments=2, blocks=4)
    piece = b.scratch(3)
    b.recv(1, piece[0:3].of([1, 2, 3]))
    layout, block, _ = vector_layout(b.build(), 7 * 8, 8)
    assert block == 16
    assert layout.runs(piece[0:3].of([1, 2, 3])) == [(0, 40)]
    assert layout.runs(piece[1].of(3)) == [(16, 8)]
    assert layout.runs(piece[1].of(2).segment(1)) == [(24, 8)]
    assert layout.runs(piece[1].of(3).segment(0)) == [] and layout.runs(piece[1].of(3).segment(1)) == [(16, 8)]
    assert list(layout.pairs(RECV[3], piece[0].of(3))) == [(48, 0, 8)]


def test_segments_of_several_blocks_in_one_place() -> None:
    """While one segment of a place is of a block, another one may be of a shorter block."""
    b = Builder(0, segments=2, blocks=4)
    piece = b.scratch(2)
    for block in (0, 3):
        for part in (0, 1):
            b.recv(1, piece[1].of(block).segment(part), tag=2 * block + part)
    layout, slot, _ = vector_layout(b.build(), 9 * 8, 8)  # blocks of 3, 3, 3 and no items
    assert slot == 32
    longer, shorter = ([layout.runs(piece[1].of(block).segment(part)) for part in (0, 1)] for block in (0, 2))
    assert longer == shorter == [[(32, 8)], [(48, 16)]]
    layout, slot, _ = vector_layout(b.build(), 7 * 8, 8)  # of 2, 2, 2 and 1
    assert slot == 16
    assert [layout.runs(piece[1].of(3).segment(part)) for part in (0, 1)] == [[], [(24, 8)]]
    assert layout.runs(piece[1].of(0).segment(0)) == [(16, 8)]


@pytest.mark.parametrize("transport", [Transport(), Transport(packed=True), Transport(segments=1)], ids=str)
@pytest.mark.parametrize("name", REGISTRY["reduce_scatter"])
def test_scratch_for_known_sizes(name: str, transport: Transport) -> None:
    """Partial sums, and messages that are packed beside them, lie apart, and in the bytes that are asked for."""
    sizes, entry = np.array([0, 20, 40, 0, 12]), REGISTRY["reduce_scatter"][name]
    topology = parse_layout("3+2")
    if entry.refusal(topology, {}) is not None:
        pytest.skip("not on this layout")
    for rank in range(topology.size):
        schedule = entry.system(topology, entry.resolve({}), transport=transport)[rank]
        try:
            layout, nbytes = known_layout(
                schedule, Blocks(sizes, np.cumsum(sizes) - sizes, sizes[rank : rank + 1], sizes[:1])
            )
        except ConstraintError:
            continue
        regions = {region for op in schedule.ops for region in (*reads(op), *writes(op)) if region.buffer == "scratch"}
        used: dict[int, set[int]] = {}
        for region in regions:
            each = region.like if region.like is not None else [None] * region.size
            for block, like in zip(region.blocks, each, strict=True):
                one = Region("scratch", (block,), like=None if like is None else (like,))
                for start, length in layout.runs(one):
                    assert start >= 0 and start + length <= nbytes["scratch"]
                    used.setdefault(block, set()).update(range(start, start + length))
        assert sum(map(len, used.values())) == len(set().union(*used.values()))
