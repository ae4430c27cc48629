"""The kernels' arithmetic, compiled as C++ for the host: every thread of every block, one after the other."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiercoll.cuda.kernel import (
    BLOCKS,
    ELEMENTS,
    PROCESSORS,
    ROW_BLOCKS,
    SOURCE,
    SPAN,
    THREADS,
    WORDS,
    conversion_source,
    launch_shape,
    reduction_source,
    row_launch_shape,
    row_source,
    span_table,
)
from hiercoll.errors import DeviceError
from hiercoll.memory import OPERATIONS, SINGLE, Reduction

HOST = """
struct uint2 { unsigned x, y; } __attribute__((aligned(8)));
struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16)));
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
#define __device__
#define __global__
#define __launch_bounds__(threads, blocks)
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits)
{
    return (((unsigned long long)high << 32 | low) >> (bits & 31));
}
static unsigned __float_as_uint(float number)
{
    unsigned bits;
    __builtin_memcpy(&bits, &number, sizeof bits);
    return bits;
}
static float __uint_as_float(unsigned bits)
{
    float number;
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
}
"""
RUN = """
extern "C" void run(
    const Bytes* table, Bytes count, Bytes span, unsigned blocks, unsigned threads, unsigned first, unsigned last)
{
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = first; blockIdx.x <= last; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            KERNEL(table, count, span);
}
"""
Run = Callable[..., None]
POISON = 0xA5


def compiled_for_host(source: str, kernel: str, folder: Path) -> Run:
    """The kernel, given a table with its last row."""
    compiled = built_for_host(source + RUN.replace("KERNEL", kernel), folder)

    def run(
        table: npt.NDArray[np.uint64], span: int = SPAN, blocks: int = 2, threads: int = 64, only: int | None = None
    ) -> None:
        count, some = ctypes.c_ulonglong(len(table) - 1), (0, blocks - 1) if only is None else (only, only)
        compiled(ctypes.c_void_p(table.ctypes.data), count, ctypes.c_ulonglong(span), blocks, threads, *some)

    return run


RUN_ROWS = """
extern "C" void run(
    Bytes source, Bytes source_step, Bytes target, Bytes target_step, unsigned each, unsigned words, unsigned blocks)
{
    gridDim.x = blocks; blockDim.x = 64;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 64; threadIdx.x++)
            copy_rows(source, source_step, target, target_step, each, words);
}
"""


def built_for_host(source: str, folder: Path) -> Any:
    """A library whose ``run`` goes through all threads; words must be aligned (the sanitizer looks)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (folder / "kernel.cpp").write_text(HOST + source)
    flags = ["-O1", "-fno-strict-aliasing", "-fsanitize=alignment", "-fno-sanitize-recover=all"]
    flags += ["-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas"]
    built = folder / "kernel.so"
    subprocess.run([compiler, *flags, "-o", str(built), str(folder / "kernel.cpp")], check=True)
    return ctypes.CDLL(str(built)).run


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled_for_host(SOURCE, "copy_pieces", tmp_path_factory.mktemp("kernel"))


def check(copy: Run, pieces: list[tuple[int, int, int]], span: int = SPAN, **shape: int) -> None:
    """Each (offset of the source, of the target, length) is copied, and nothing beside it is written."""
    room = -(-(max(length for _, _, length in pieces) + 80) // 64) * 64
    noise = Random(len(pieces)).randbytes(len(pieces) * room + 64)
    values, copied = np.frombuffer(noise, np.uint8), np.full(len(noise), POISON, np.uint8)
    expected, table = copied.copy(), []
    starts = [-array.ctypes.data % 64 for array in (values, copied)]
    for number, (a, b, length) in enumerate(pieces):
        source, target = (start + number * room + at for start, at in zip(starts, (a, b), strict=True))
        table.append((values.ctypes.data + source, copied.ctypes.data + target, length))
        expected[target : target + length] = values[source : source + length]
    copy(span_table(table, span), span, **shape)
    np.testing.assert_array_equal(copied, expected)


AROUND = sorted({max(0, unit + by) for unit in (0, 4, 16, 128, 512, SPAN, 2 * SPAN) for by in (-1, 0, 1)})


@pytest.mark.parametrize("length", [*AROUND, SPAN - 16, SPAN - 15, SPAN + 15, 3 * SPAN + 5])
def test_every_alignment(copy: Run, length: int) -> None:
    """Of source and target, for lengths around those of words, of what a warp reads at once, and of spans."""
    check(copy, [(a, b, length) for a in range(16) for b in range(16)])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 17), st.integers(0, 17), st.integers(0, 3000)), min_size=1, max_size=12),
    st.sampled_from([16, 256, SPAN]),
    st.integers(1, 4),
    st.sampled_from([32, 64, THREADS]),
)
def test_pieces_and_grids_of_every_kind(
    copy: Run, pieces: list[tuple[int, int, int]], span: int, blocks: int, threads: int
) -> None:
    check(copy, pieces, span, blocks=blocks, threads=threads)


@pytest.mark.parametrize("blocks", [1, 7, 300])
def test_pieces_of_very_different_sizes(copy: Run, blocks: int) -> None:
    """One is longer than all others together; more warps than spans, and fewer."""
    lengths = [1, 3, 200_001, 5000, *([8, 0, 4096] * 20), 1]
    check(copy, [(5 * n % 16, 3 * n % 16, length) for n, length in enumerate(lengths)], blocks=blocks, threads=64)


def test_no_pieces(copy: Run) -> None:
    """A table of the last row only."""
    copy(np.zeros((1, 4), np.uint64))


def test_work_is_shared_evenly(copy: Run) -> None:
    """Each warp of a grid, run alone, copies four spans, whether they are of one piece or of many small ones."""
    source, target = np.ones(20 * SPAN, np.uint8), np.zeros(20 * SPAN, np.uint8)
    begins, pieces = [-array.ctypes.data % 16 for array in (source, target)], []
    for at, length in [(0, 8), (16, 8), (32, 11 * SPAN), *((12 * SPAN + 16 * n, 8) for n in range(7))]:
        pieces.append((source.ctypes.data + begins[0] + at, target.ctypes.data + begins[1] + at, length))
    table = span_table(pieces)
    assert table[:, -1].tolist() == [0, 1, 2, *range(13, 21)]
    for warp in range(5):
        target[:] = 0
        copy(table, blocks=5, threads=32, only=warp)
        large, small = divmod(int(target.sum()), SPAN)
        assert large + small // 8 == 4


class Guarded:
    """A page of memory between two that cannot be read."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, 3 * mmap.PAGESIZE)
        self.begin = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + mmap.PAGESIZE
        self.end = self.begin + mmap.PAGESIZE
        self.protect(0)

    def protect(self, mode: int) -> None:
        """Set what may be done with the pages around."""
        change: Any = ctypes.CDLL(None, use_errno=True).mprotect
        for page in (self.begin - mmap.PAGESIZE, self.end):
            assert change(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), mode) == 0


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    yield made
    made.protect(mmap.PROT_READ | mmap.PROT_WRITE)


def test_reads_stay_within_the_words_of_the_source(copy: Run, guarded: Guarded) -> None:
    """A source that begins in the first word of a page, or ends in the last: the process dies if a kernel
    reads a word beyond, where there is no byte of the source."""
    values = np.frombuffer((ctypes.c_uint8 * mmap.PAGESIZE).from_address(guarded.begin), np.uint8)
    values[:] = np.random.default_rng(1).integers(0, 255, mmap.PAGESIZE)
    target = np.zeros(mmap.PAGESIZE + 16, np.uint8)
    for length in (*range(1, 40), 128, 131, 512, 515, 1000):
        for by in range(4):
            for source in (guarded.begin + by, guarded.end - by - length):
                for shift in range(16):
                    copy(span_table([(source, target.ctypes.data + shift, length)]))
                    at = source - guarded.begin
                    np.testing.assert_array_equal(target[shift : shift + length], values[at : at + length])


@pytest.mark.parametrize("word", WORDS)
def test_rows(tmp_path: Path, word: int) -> None:
    """Of one word to many, in a grid of one block to more than there is work for; nothing beside them is written."""
    run, size = built_for_host(row_source(word) + RUN_ROWS, tmp_path), 6000
    values = np.frombuffer(Random(word).randbytes(size * word + 16), np.uint8)
    start = -values.ctypes.data % 16
    for each, rows, steps in [
        (1, 1, (1, 1)),
        (1, 999, (2, 1)),
        (3, 50, (3, 7)),
        (40, 33, (41, 44)),
        (700, 8, (701, 700)),
    ]:
        for blocks in (1, 3, 40):
            copied = np.full(size * word + 16, POISON, np.uint8)
            expected, end = copied.copy(), -copied.ctypes.data % 16
            for row in range(rows):
                source, target = start + row * steps[0] * word, end + row * steps[1] * word
                expected[target : target + each * word] = values[source : source + each * word]
            places = ((values, start, steps[0]), (copied, end, steps[1]))
            given = [at for array, by, step in places for at in (array.ctypes.data + by, step * word)]
            run(*map(ctypes.c_ulonglong, given), each, each * rows, blocks)
            np.testing.assert_array_equal(copied, expected)


def test_a_launch_over_rows_is_no_larger_than_the_device() -> None:
    """Each thread takes four words."""
    assert [row_launch_shape(words, 132)[0][0] for words in (1, 1024, 1025, 1 << 30)] == [1, 1, 2, ROW_BLOCKS * 132]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_reductions(tmp_path: Path, operation: str, dtype: str) -> None:
    """Pieces of several lengths, by vectors and by elements; the target is new, or one of the operands."""
    how = Reduction(np.dtype(dtype), operation)
    run, item = compiled_for_host(reduction_source(how), "reduce_pieces", tmp_path), how.dtype.itemsize
    lengths = (1, 700, 33, 4096, 1500, 0, 16)
    offsets = [(0, 0, 0), (1, 1, 1), (0, 1, 0), (0, 0, 1), (1, 2, 3)]  # of left, right and target, in elements
    room = max(lengths) + 16
    for into in (None, 0, 1):
        arrays = [np.random.default_rng(seed).integers(1, 9, 40 * room).astype(dtype) for seed in (1, 2, 3)]
        ends = [0, 1, 2 if into is None else into]
        expected, table = arrays[ends[2]].copy(), []
        for number, length in enumerate(lengths * len(offsets)):
            shift = offsets[number % len(offsets)]
            starts = [number * room + shift[end] + -arrays[end].ctypes.data % 16 // item for end in ends]
            left, right = (arrays[end][at : at + length].copy() for end, at in zip(ends[:2], starts, strict=False))
            OPERATIONS[operation](left, right, out=expected[starts[2] : starts[2] + length])
            addresses = [arrays[end].ctypes.data + at * item for end, at in zip(ends, starts, strict=True)]
            table.append((*addresses, length * item))
        run(span_table(table), blocks=3)
        np.testing.assert_array_equal(arrays[ends[2]], expected)


@pytest.mark.parametrize("operation", ["min", "max"])
def test_elements_that_are_no_numbers(tmp_path: Path, operation: str) -> None:
    """Where two cannot be compared, the left one stays, by vectors as by elements."""
    run = compiled_for_host(reduction_source(Reduction(np.dtype("f4"), operation)), "reduce_pieces", tmp_path)
    left, right, target = (np.zeros(72, np.float32) for _ in range(3))
    left[::2], right[::3] = np.nan, np.nan
    for shift in (0, 1):
        starts = [-array.ctypes.data % 16 // 4 + shift for array in (left, right, target)]
        addresses = [array.ctypes.data + 4 * at for array, at in zip((left, right, target), starts, strict=True)]
        run(span_table([(*addresses, 4 * 64)]))
        np.testing.assert_array_equal(target[starts[2] : starts[2] + 64], left[starts[0] : starts[0] + 64])


HALF = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("kind", HALF, ids=str)
def test_conversions(tmp_path: Path, kind: np.dtype[Any]) -> None:
    """Of every number of two bytes, and of many of four: those that lie between two of these, and those between these;
    as NumPy and ml_dtypes convert them. NaN stay so."""
    for name in ("wider", "narrower"):
        (tmp_path / name).mkdir()
    widen = compiled_for_host(conversion_source(kind, SINGLE), "convert_pieces", tmp_path / "wider")
    narrow = compiled_for_host(conversion_source(SINGLE, kind), "convert_pieces", tmp_path / "narrower")
    every = np.arange(1 << 16, dtype="u2").view(kind)
    wide = np.zeros(every.shape, SINGLE)
    widen(span_table([(every.ctypes.data, wide.ctypes.data, wide.nbytes)]), blocks=3)
    is_number = ~np.isnan(every.astype(SINGLE))
    assert (wide.view("u4") == every.astype(SINGLE).view("u4"))[is_number].all() and np.isnan(wide[~is_number]).all()
    step = 1 << (13 if kind == np.float16 else 16)  # bits that are lost
    near = (wide.view("u4")[:, None] + np.array([0, 1, step // 2 - 1, step // 2, step // 2 + 1, step - 1], "u4")).view(
        SINGLE
    )
    noise = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype="u4").view(SINGLE)
    given = np.concatenate([near.reshape(-1), noise])
    found = np.zeros(given.shape, kind)
    narrow(span_table([(given.ctypes.data, found.ctypes.data, found.nbytes)]), blocks=3)
    with np.errstate(all="ignore"):
        want = given.astype(kind)
    is_number = ~np.isnan(given)
    assert (found.view("u2") == want.view("u2"))[is_number].all()
    assert np.isnan(found[~is_number].astype(SINGLE)).all()


@pytest.mark.parametrize("wider", [True, False])
def test_conversions_of_pieces(tmp_path: Path, wider: bool) -> None:
    """By vectors and by elements, of several lengths and alignments; what lies between the pieces stays as it is."""
    types = (HALF[0], SINGLE) if wider else (SINGLE, HALF[0])
    run = compiled_for_host(conversion_source(*types), "convert_pieces", tmp_path)
    lengths = (1, 700, 33, 4096, 1500, 0, 16)
    room, shifts = max(lengths) + 16, [(a, b) for a in range(5) for b in range(5)]
    source = np.random.default_rng(1).normal(0, 1, len(lengths) * len(shifts) * room + 16).astype(types[0])
    target = np.full(source.shape, 7, types[1])
    expected, table = target.copy(), []
    for number, (shift, length) in enumerate((shift, length) for length in lengths for shift in shifts):
        at, to = (number * room + by for by in shift)
        expected[to : to + length] = source[at : at + length]
        ends = source.ctypes.data + at * types[0].itemsize, target.ctypes.data + to * types[1].itemsize
        table.append((*ends, length * types[1].itemsize))
    for span in (16, SPAN):
        target[:] = 7
        run(span_table(table, span), span, blocks=3)
        np.testing.assert_array_equal(target, expected)


def test_types_without_a_kernel() -> None:
    for types in ((SINGLE, SINGLE), (np.dtype("f8"), SINGLE), (SINGLE, np.dtype("i2"))):
        with pytest.raises(DeviceError, match="conversion: expected float16 or bfloat16, and float32"):
            conversion_source(*types)
    assert all(np.dtype(name) for name in ELEMENTS)
    for dtype in ("complex64", ">f8", "float16"):
        with pytest.raises(DeviceError, match="float64"):
            reduction_source(Reduction(np.dtype(dtype), "sum"))


def test_launches_fit_on_the_device() -> None:
    """A few blocks for each multiprocessor, whole warps, and no blocks without work."""
    assert launch_shape(1_000_000, 132) == ((132 * BLOCKS,), (THREADS,))
    assert launch_shape(1_000_000) == ((PROCESSORS * BLOCKS,), (THREADS,))
    assert launch_shape(5, 132) == ((5,), (THREADS,))
    assert launch_shape(0, 132) == ((1,), (THREADS,))
    assert THREADS % 32 == 0 and THREADS * BLOCKS <= 2048
