"""Blocks as bytes, copies between regions, and which objects can be communicated."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.errors import ArgumentError, BufferTypeError
from hiercoll.memory import (
    BlockLayout,
    HostMemory,
    UnevenLayout,
    host_buffer,
)
from hiercoll.schedule import RECV, SCRATCH, SEND, Buffer, Region

Bytes = npt.NDArray[np.uint8]
ROOM = 12  # blocks of a buffer in the tests of copies

# Blocks as bytes

LAYOUTS = st.builds(
    lambda items, item, segments: BlockLayout(items * item, item, segments),
    st.integers(0, 9),
    st.sampled_from([1, 2, 8, 12]),
    st.integers(1, 5),
)


@settings(deadline=None, derandomize=True)
@given(LAYOUTS)
def test_segments_are_the_block(layout: BlockLayout) -> None:
    """One after another, cut between items, as equal as can be."""
    pieces = [layout.extent(part) for part in range(layout.segments)]
    end = 0
    for offset, length in pieces:
        assert offset == end and length >= 0 and length % layout.item == 0
        end += length
    assert end == layout.block
    items = [length // layout.item for _, length in pieces]
    assert max(items) - min(items) <= 1
    assert layout.extent(None) == (0, layout.block)


def test_segments_of_items_of_no_bytes() -> None:
    """Zero bytes in items of zero bytes are segments of zero bytes."""
    assert [BlockLayout(0, 0, 2).extent(part) for part in (None, 0, 1)] == [(0, 0)] * 3


@pytest.mark.parametrize(
    ("layout", "region", "runs"),
    [
        (BlockLayout(8), RECV[3], [(24, 8)]),
        (BlockLayout(8), RECV[2:5], [(16, 24)]),
        (BlockLayout(8), RECV[0:5:2], [(0, 8), (16, 8), (32, 8)]),
        (BlockLayout(8), RECV[[4, 5, 6, 0, 1]], [(32, 24), (0, 16)]),
        (BlockLayout(8), RECV[[2, 1]], [(16, 8), (8, 8)]),
        (BlockLayout(8), RECV[0:0], []),
        (BlockLayout(12, 4, 2), RECV[0:2].segment(0), [(0, 4), (12, 4)]),
        (BlockLayout(12, 4, 2), RECV[0:2].segment(1), [(4, 8), (16, 8)]),
        (BlockLayout(12, 4, 2), RECV[0:2], [(0, 24)]),
    ],
)
def test_runs(layout: BlockLayout, region: Region, runs: list[tuple[int, int]]) -> None:
    """Neighbouring blocks are one run."""
    assert layout.runs(region) == runs


@settings(deadline=None, derandomize=True)
@given(LAYOUTS, st.lists(st.integers(0, 9), max_size=6), st.data())
def test_runs_cover_the_region(layout: BlockLayout, blocks: list[int], data: st.DataObject) -> None:
    """All its bytes, in order, in as few runs as there are gaps."""
    part = data.draw(st.sampled_from([None, *range(layout.segments)]))
    region = RECV[blocks]._replace(part=part)
    runs = layout.runs(region)
    offset, length = layout.extent(part)
    wanted = [block * layout.block + offset + i for block in blocks for i in range(length)]
    assert [start + i for start, size in runs for i in range(size)] == wanted
    jumps = sum(after != before + 1 for before, after in pairwise(wanted))
    if length:
        assert len(runs) == jumps + bool(wanted)


# Copies


@st.composite
def blocks_of(draw: st.DrawFn, count: int, *, distinct: bool) -> list[int]:
    """``count`` blocks of a buffer: in a row, at a stride, or anyhow."""
    form = draw(st.sampled_from(["contiguous", "strided", "irregular"]))
    if form == "irregular":
        return draw(st.lists(st.integers(0, ROOM - 1), min_size=count, max_size=count, unique=distinct))
    step = 1 if form == "contiguous" else draw(st.integers(1, max(1, (ROOM - 1) // max(count, 1))))
    first = draw(st.integers(0, ROOM - 1 - max(0, count - 1) * step))
    return [first + step * i for i in range(count)]


def filled(layout: BlockLayout, seed: int) -> Bytes:
    """A buffer of random bytes."""
    return np.random.default_rng(seed).integers(0, 256, ROOM * layout.block, dtype=np.uint8)


def moved(layout: BlockLayout, source: Bytes, src: Region, target: Bytes, dst: Region) -> Bytes:
    """What ``target`` holds after a copy, block by block."""
    offset, length = layout.extent(src.part)
    result = target.copy()
    for a, b in zip(src.blocks, dst.blocks, strict=True):
        at, to = a * layout.block + offset, b * layout.block + offset
        result[to : to + length] = source[at : at + length]
    return result


def copier(layout: BlockLayout, source: Bytes, src: Region, target: Bytes, dst: Region) -> Callable[[], object]:
    """The callable that copies."""
    return HostMemory().copy(layout, (source.ctypes.data, src), (target.ctypes.data, dst))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(LAYOUTS, st.integers(0, 5), st.data())
def test_copies(layout: BlockLayout, count: int, data: st.DataObject) -> None:
    """Between any two regions, any segment; whenever it is called, and nothing else is touched."""
    part = data.draw(st.sampled_from([None, *range(layout.segments)]))
    src = SEND[data.draw(blocks_of(count, distinct=False))]._replace(part=part)
    dst = RECV[data.draw(blocks_of(count, distinct=True))]._replace(part=part)
    source, target = filled(layout, 1), filled(layout, 2)
    copy = copier(layout, source, src, target, dst)
    assert np.array_equal(target, filled(layout, 2))  # not before it is called
    for seed in (3, 4):
        source[:] = filled(layout, seed)
        expected = moved(layout, source, src, target, dst)
        copy()
        assert np.array_equal(target, expected)
        assert np.array_equal(source, filled(layout, seed))


FORMS: dict[str, Sequence[int]] = {"contiguous": range(2, 6), "strided": range(1, 8, 2), "irregular": (7, 0, 3, 1)}


@pytest.mark.parametrize("src", FORMS)
@pytest.mark.parametrize("dst", FORMS)
@pytest.mark.parametrize("part", [None, 0, 1])
@pytest.mark.parametrize("item", [1, 4])
def test_copies_of_each_form(src: str, dst: str, part: int | None, item: int) -> None:
    """Every combination of forms, so that none depends on luck."""
    layout = BlockLayout(3 * item, item, 2)
    source, target = filled(layout, 1), filled(layout, 2)
    a, b = SEND[FORMS[src]]._replace(part=part), RECV[FORMS[dst]]._replace(part=part)
    expected = moved(layout, source, a, target, b)
    assert not np.array_equal(expected, target)
    copier(layout, source, a, target, b)()
    assert np.array_equal(target, expected)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(LAYOUTS, st.permutations(range(ROOM)), st.integers(0, ROOM // 2))
def test_copies_within_a_buffer(layout: BlockLayout, blocks: list[int], count: int) -> None:
    """Between different blocks of one buffer."""
    src, dst = SCRATCH[blocks[:count]], SCRATCH[blocks[count : 2 * count]]
    memory = filled(layout, 1)
    expected = moved(layout, memory, src, memory, dst)
    copier(layout, memory, src, memory, dst)()
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("block", [1, 8, 1 << 16])
def test_copies_are_of_plain_bytes(block: int) -> None:
    """No byte has a meaning: zeros at the end, or what would be not-a-number, arrive as they are."""
    layout = BlockLayout(block)
    for byte in (0, 255):
        source = np.full(ROOM * block, byte, np.uint8)
        for blocks in FORMS.values():
            target = filled(layout, 2)
            expected = moved(layout, source, SEND[0:4], target, RECV[blocks])
            copier(layout, source, SEND[0:4], target, RECV[blocks])()
            assert np.array_equal(target, expected)


def test_a_region_past_others() -> None:
    """Memory behind the last block of a region is not looked at, nor any of an empty one."""
    layout = BlockLayout(4)
    source, target = np.arange(8, dtype=np.uint8), np.zeros(4, np.uint8)
    copier(layout, source, SEND[1], target, RECV[0])()
    assert target.tolist() == [4, 5, 6, 7]
    nowhere = HostMemory().copy(layout, (0, Buffer("send")[0:0]), (0, RECV[0:0]))
    nowhere()
    HostMemory().copy(BlockLayout(0), (0, SEND[0:3]), (0, RECV[[2, 1, 0]]))()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 100_000])
def test_scratch(nbytes: int) -> None:
    """Aligned to a cache line, all of it within what is kept alive."""
    memory = HostMemory()
    address, owner = memory.allocate(nbytes)
    assert address % 64 == 0 and memory.kind == "host"
    assert isinstance(owner, np.ndarray)
    start = owner.ctypes.data
    assert start <= address and address + nbytes <= start + owner.nbytes
    other, _ = memory.allocate(nbytes)
    assert not nbytes or abs(other - address) >= nbytes


# Objects


class Device:
    """Something in device memory."""

    __cuda_array_interface__ = {"version": 3}  # noqa: RUF012


def test_arrays() -> None:
    """Address, size and type of what can be communicated."""
    matrix = np.arange(6, dtype=np.float64).reshape(2, 3)
    buffer = host_buffer(matrix, "sendbuf", 0, writable=False)
    assert (buffer.address, buffer.nbytes, buffer.item, buffer.items) == (matrix.ctypes.data, 48, 8, 6)
    assert buffer.array.base is matrix.base or buffer.array is matrix
    for fine in (np.asfortranarray(matrix), np.zeros(0), np.ones(()), np.zeros(3, "i4,f8")):
        assert host_buffer(fine, "recvbuf", 0, writable=True).nbytes == fine.nbytes


@pytest.mark.parametrize("obj", [bytearray(b"abcdef"), array("h", [1, 2, 3]), memoryview(bytearray(6))])
def test_buffers(obj: Any) -> None:
    """Anything with the buffer protocol is used where it lies."""
    buffer = host_buffer(obj, "recvbuf", 0, writable=True)
    assert buffer.nbytes == 6
    buffer.array.view(np.uint8)[:] = 1
    assert bytes(memoryview(obj)) == b"\1" * 6


def read_only() -> npt.NDArray[Any]:
    found = np.zeros(4)
    found.flags.writeable = False
    return found


@pytest.mark.parametrize("obj", [read_only(), b"abcd", memoryview(b"abcd")])
def test_read_only(obj: Any) -> None:
    """May be sent, not received into."""
    assert host_buffer(obj, "sendbuf", 0, writable=False).nbytes
    with pytest.raises(BufferTypeError, match="rank 3: recvbuf: expected a writable array, got a read-only one"):
        host_buffer(obj, "recvbuf", 3, writable=True)


@pytest.mark.parametrize(
    ("obj", "expected", "got"),
    [
        ([1, 2, 3], "a NumPy array, a buffer", "list"),
        (None, "a NumPy array, a buffer", "NoneType"),
        (7, "a NumPy array, a buffer", "int"),
        ("text", "a NumPy array, a buffer", "str"),
        (np.array([{}, 1], dtype=object), "elements of a fixed size", "dtype object"),
        (np.zeros(2, [("a", "i4"), ("b", "O")]), "elements of a fixed size", "Python objects"),
        (np.zeros((4, 4))[:, ::2], "a contiguous array (see numpy.ascontiguousarray)", "strides (32, 16)"),
        (np.zeros((4, 4, 4)).transpose(1, 0, 2), "contiguous", "shape (4, 4, 4)"),
        (np.zeros(4)[::-1], "contiguous", "strides (-8,)"),
        (memoryview(bytearray(8))[::2], "contiguous", "strides (2,)"),
        (Device(), "an array in host memory", "a device array (Device)"),
    ],
)
def test_what_cannot_be_communicated(obj: Any, expected: str, got: str) -> None:
    """The error names rank, argument, what was expected and what was given."""
    with pytest.raises(BufferTypeError) as caught:
        host_buffer(obj, "sendbuf", 5, writable=False)
    error = caught.value
    assert (error.rank, error.argument) == (5, "sendbuf")
    assert expected in error.expected and got in str(error.got)
    assert isinstance(error, ArgumentError) and isinstance(error, TypeError) and isinstance(error, ValueError)


def test_uneven_layout() -> None:
    """Pieces that lie together are one; empty ones are none."""
    layout = UnevenLayout()
    at, sizes = np.array([0, 4, 4, 9, 12]), np.array([4, 0, 5, 3, 1])
    layout.place("send", None, at, sizes)
    layout.place("recv", None, np.array([0, 4, 4, 20, 23]), sizes)
    assert layout.runs(SEND[0:5]) == [(0, 13)] and layout.runs(SEND[[3, 0]]) == [(9, 3), (0, 4)]
    assert layout.runs(SEND[1]) == []
    assert list(layout.pairs(SEND[0:5], RECV[0:5])) == [(0, 0, 9), (9, 20, 4)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_uneven_copies(sizes: list[int], choice: random.Random) -> None:
    """Any order of blocks, at both ends: each block arrives, and nothing else is touched."""
    lengths = np.array(sizes)
    order = list(range(len(sizes)))
    choice.shuffle(order)
    at = np.zeros(len(sizes), int)
    at[order] = np.cumsum(lengths[order]) - lengths[order]
    layout = UnevenLayout()
    layout.place("send", None, np.cumsum(lengths) - lengths, lengths)
    layout.place("recv", None, at + 1, lengths)
    source = np.arange(1, lengths.sum() + 1, dtype=np.uint8)
    target, expected = (np.zeros(lengths.sum() + 2, np.uint8) for _ in range(2))
    for block, length in enumerate(sizes):
        start = int(lengths[:block].sum())
        expected[at[block] + 1 : at[block] + 1 + length] = source[start : start + length]
    blocks = range(len(sizes))
    copy = HostMemory().copy(layout, (source.ctypes.data, SEND[blocks]), (target.ctypes.data, RECV[blocks]))
    assert (copy is None) == (not lengths.any())
    if copy is not None:
        copy()
    np.testing.assert_array_equal(target, expected)
