"""The kernel's arithmetic, compiled as C++ for the host: every thread of every block, one after the other."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiercoll.cuda.kernel import ELEMENTS, MOST_BLOCKS, SOURCE, SPAN, THREADS, launch_shape, reduction_source
from hiercoll.errors import DeviceError
from hiercoll.memory import OPERATIONS, Reduction

HOST = """
struct uint2 { unsigned x, y; } __attribute__((aligned(8)));
struct uint4 { unsigned x, y, z, w; } __attribute__((aligned(16)));
struct Three { unsigned long long x, y, z; };
static Three threadIdx, blockIdx, blockDim, gridDim;
#define __device__ static
#define __global__
#define __restrict__
"""
RUN = """
extern "C" void run(const Bytes* table, Bytes count, Bytes span, Bytes columns, Bytes rows, Bytes threads)
{
    gridDim.x = columns; gridDim.y = rows; blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < rows; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < columns; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
                KERNEL;
}
"""
Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled_for_host(SOURCE, "copy_pieces(table, count, span)", tmp_path_factory.mktemp("kernel"))


def compiled_for_host(source: str, call: str, folder: Path) -> Run:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (folder / "kernel.cpp").write_text(HOST + source + RUN.replace("KERNEL", call))
    flags = ["-O1", "-fsanitize=alignment", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    built = folder / "kernel.so"
    subprocess.run([compiler, *flags, "-o", str(built), str(folder / "kernel.cpp")], check=True)
    compiled: Run = ctypes.CDLL(str(Path(built))).run
    return compiled


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 17), st.integers(0, 17)), min_size=1, max_size=12),
    st.sampled_from([16, 256, SPAN]),
    st.integers(1, 4),
)
def test_pieces_of_every_length_and_alignment(
    run: Run, capfd: pytest.CaptureFixture[str], pieces: list[tuple[int, int, int]], span: int, columns: int
) -> None:
    """Each piece is copied, and nothing beside it is written; words are aligned (the sanitizer looks)."""
    room = 3100
    values = np.random.default_rng(len(pieces)).integers(0, 255, len(pieces) * room, dtype=np.uint8)
    copied = np.full_like(values, 0xA5)
    expected, table = copied.copy(), []
    for number, (length, a, b) in enumerate(pieces):
        source, target = number * room + a, number * room + b
        table.append((values.ctypes.data + source, copied.ctypes.data + target, length))
        expected[target : target + length] = values[source : source + length]
    numbers = np.array(table, dtype=np.uint64)
    (_, rows), (threads,) = launch_shape(len(pieces), max(length for length, _, _ in pieces))
    shape = [ctypes.c_ulonglong(value) for value in (len(pieces), span, columns, -(-rows // 2), threads)]
    run(ctypes.c_void_p(numbers.ctypes.data), *shape)
    np.testing.assert_array_equal(copied, expected)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["uint8", "int32", "float64"])
def test_reductions(tmp_path: Path, operation: str, dtype: str) -> None:
    """Pieces of several lengths; the target may be one of the operands."""
    how = Reduction(np.dtype(dtype), operation)
    run = compiled_for_host(reduction_source(how), "reduce_pieces(table, count)", tmp_path)
    left, right = (np.random.default_rng(seed).integers(1, 9, 3000).astype(dtype) for seed in (1, 2))
    expected, table, at = left.copy(), [], 0
    for length in (1, 700, 33, 1500):
        table.append([array.ctypes.data + at * how.dtype.itemsize for array in (left, right, left)])
        table[-1].append(length * how.dtype.itemsize)
        OPERATIONS[operation](left[at : at + length], right[at : at + length], out=expected[at : at + length])
        at += length + 5
    numbers = np.array(table, dtype=np.uint64)
    shape = [ctypes.c_ulonglong(value) for value in (len(table), 0, 2, 3, 64)]
    run(ctypes.c_void_p(numbers.ctypes.data), *shape)
    np.testing.assert_array_equal(left, expected)


def test_types_without_a_kernel() -> None:
    assert all(np.dtype(name) for name in ELEMENTS)
    for dtype in ("complex64", ">f8", "float16"):
        with pytest.raises(DeviceError, match="float64"):
            reduction_source(Reduction(np.dtype(dtype), "sum"))


def test_launches_are_within_limits() -> None:
    """Of CUDA: 65,535 rows of a grid, 1,024 threads of a block; whole warps."""
    assert launch_shape(1_000_000, 1) == ((1, MOST_BLOCKS[1]), (32,))
    assert launch_shape(4, 1 << 30) == ((MOST_BLOCKS[0], 4), (THREADS,))
    assert launch_shape(4, 1024) == ((1, 4), (64,))
    assert all(launch_shape(1, length)[1][0] % 32 == 0 for length in range(1, 9000, 7))
