"""The kernels, compiled for GPUs by NVRTC, which needs none. It comes with the wheel nvidia-cuda-nvrtc-cu12."""

from __future__ import annotations

import ctypes
import re
from importlib.metadata import PackageNotFoundError, files
from typing import Any

import numpy as np
import pytest

from hiercoll.cuda.kernel import BLOCKS, ELEMENTS, ROW_BLOCKS, SOURCE, THREADS, WORDS, reduction_source, row_source
from hiercoll.memory import OPERATIONS, Reduction

WHEEL = "nvidia-cuda-nvrtc-cu12"
CAPABILITIES = (80, 90)


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    try:
        found = files(WHEEL) or []
    except PackageNotFoundError:
        pytest.skip(f"{WHEEL} is not installed")
    library = next(path for path in found if re.fullmatch(r"libnvrtc\.so\.\d+", path.name))
    return ctypes.CDLL(str(library.locate()))


def compiled(nvrtc: Any, source: str, *options: str) -> tuple[str, str]:
    """The PTX of a program, and the compiler's messages. Fails with these where it does not compile."""
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) == 0
    given = [option.encode() for option in ("--std=c++11", *options)]  # CuPy 13 compiles as C++11
    status = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
    log = _text(nvrtc, program, "ProgramLog")
    ptx = "" if status else _text(nvrtc, program, "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log
    return ptx, log


def _text(nvrtc: Any, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, text) == 0
    return text.value.decode()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_copies(nvrtc: Any, capability: int) -> None:
    """In words of up to 16 bytes, four of them read before one is written, or shifted by the instruction for that."""
    ptx, log = compiled(nvrtc, SOURCE, f"--gpu-architecture=compute_{capability}")
    assert ".entry copy_pieces" in ptx and f".target sm_{capability}" in ptx and not log
    moves = re.findall(r"\b(ld|st)\.v4\.u32|(shf\.r\.wrap)\.b32", ptx)
    assert [load or shift for load, shift in moves].count("shf.r.wrap") == 8
    assert [load for load, _ in moves if load] == ["ld"] * 4 + ["st"] * 4


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("word", WORDS)
def test_rows(nvrtc: Any, word: int, capability: int) -> None:
    """Four words are read before one is written; the blocks of a multiprocessor are there at once."""
    source = row_source(word)
    ptx, log = compiled(nvrtc, source, f"--gpu-architecture=compute_{capability}")
    assert ".entry copy_rows" in ptx and not log
    assert [len(re.findall(rf"\b{kind}\.(?:global\.)?(?:v\d\.)?[ubf]\d+", ptx)) for kind in ("ld", "st")] == [4, 4]
    _, log = compiled(nvrtc, source, f"--gpu-architecture=sm_{capability}", "--ptxas-options=-v")
    assert "0 bytes stack frame, 0 bytes spill stores" in log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) * THREADS * ROW_BLOCKS <= 1 << 16


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("source", [SOURCE, reduction_source(Reduction(np.dtype("i1"), "sum"))], ids=["copy", "reduce"])
def test_registers_suffice(nvrtc: Any, source: str, capability: int) -> None:
    """The blocks of a multiprocessor are all there at once, and keep nothing of their own in memory."""
    _, log = compiled(nvrtc, source, f"--gpu-architecture=sm_{capability}", "--ptxas-options=-v")
    assert "0 bytes stack frame, 0 bytes spill stores" in log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) * THREADS * BLOCKS <= 1 << 16


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_reductions(nvrtc: Any, dtype: str, operation: str, capability: int) -> None:
    """Vectors of 16 bytes are read and written."""
    source = reduction_source(Reduction(np.dtype(dtype), operation))
    ptx, log = compiled(nvrtc, source, f"--gpu-architecture=compute_{capability}")
    assert ".entry reduce_pieces" in ptx and f".target sm_{capability}" in ptx and not log
    assert re.search(r"\bld\.(v4\.\w32|v2\.\w64)", ptx) and re.search(r"\bst\.(v4\.\w32|v2\.\w64)", ptx)
    assert ".local" not in ptx


def test_errors_are_told(nvrtc: Any) -> None:
    with pytest.raises(AssertionError, match='identifier "nowhere" is undefined'):
        compiled(nvrtc, SOURCE.replace("threadIdx.x", "nowhere"), "--gpu-architecture=compute_80")
