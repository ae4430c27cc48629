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

from hiercoll.cuda.kernel import MOST_BLOCKS, SOURCE, SPAN, THREADS, launch_shape

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
                copy_pieces(table, count, span);
}
"""
Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(HOST + SOURCE + RUN)
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


def test_launches_are_within_limits() -> None:
    """Of CUDA: 65,535 rows of a grid, 1,024 threads of a block; whole warps."""
    assert launch_shape(1_000_000, 1) == ((1, MOST_BLOCKS[1]), (32,))
    assert launch_shape(4, 1 << 30) == ((MOST_BLOCKS[0], 4), (THREADS,))
    assert launch_shape(4, 1024) == ((1, 4), (64,))
    assert all(launch_shape(1, length)[1][0] % 32 == 0 for length in range(1, 9000, 7))
