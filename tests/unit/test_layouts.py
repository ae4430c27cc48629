"""Where the bytes of a vector lie that is cut into blocks."""

from __future__ import annotations

import pytest

from hiercoll.errors import ConstraintError
from hiercoll.memory import BlockLayout, UnevenLayout
from hiercoll.runtime.layouts import vector_layout
from hiercoll.schedule import HOST, RECV, SHARED, Builder, Schedule
from hiercoll.schedule.transports import staged


def relayed(scratch: int = 0) -> Schedule:
    """A rank that passes on two of three blocks, by way of the node's buffer."""
    b = Builder(0, blocks=3)
    shared = b.shared(2, [(0, 2), (0, 0)])
    b.scratch(scratch)
    got = b.recv(1, RECV[[2, 0]])
    b.copy(RECV[[2, 0]], shared[0:2], after=[got])
    b.send(2, RECV[1:3], after=[got])
    return b.build()


def test_even() -> None:
    """As blocks of one size."""
    layout, block, shared = vector_layout(relayed(4), 12)
    assert layout == BlockLayout(4) and (block, shared) == (4, 8)


@pytest.mark.parametrize("nbytes", [0, 1, 2, 4, 5, 10, 1000])
def test_blocks_cover_the_vector(nbytes: int) -> None:
    """In order, without gaps, none longer than a byte more than another; the same bytes in other buffers."""
    layout, block, shared = vector_layout(relayed(), nbytes)
    places = [layout.runs(RECV[index]) for index in range(3)]
    lengths = [sum(length for _, length in runs) for runs in places]
    assert sum(lengths) == nbytes and max(lengths) == block <= min(lengths) + 1
    assert layout.runs(RECV[0:3]) == ([(0, nbytes)] if nbytes else []) or nbytes % 3 == 0
    assert shared == lengths[2] + lengths[0]
    assert [sum(n for _, n in layout.runs(SHARED[index])) for index in (0, 1)] == [lengths[2], lengths[0]]


def test_messages_by_way_of_the_host() -> None:
    """What is copied there is as long as the blocks that it is for, and lies together."""
    schedule = staged(relayed())
    layout, block, _ = vector_layout(schedule, 11)
    assert isinstance(layout, UnevenLayout) and schedule.host == 4 and block == 4
    assert [length for index in range(4) for _, length in layout.runs(HOST[index])] == [4, 3, 4, 4]
    assert layout.runs(HOST[0:4]) == [(0, 15)]


def test_scratch() -> None:
    """Of whatever blocks: there, they must be of one size."""
    with pytest.raises(ConstraintError, match="buf: expected a multiple of 3 bytes"):
        vector_layout(relayed(1), 11)
