"""Whether MPI may be given device memory, as libraries that are not here would tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from hiercoll.runtime import memories
from hiercoll.runtime.memories import takes_device_memory

VARIABLE = "MPICH_GPU_SUPPORT_ENABLED"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.30.8 (ANL base 3.4a2)\nMPI BUILD INFO : of a test\n"
MPICH = "MPICH Version:      4.2.2\nMPICH Release date: of a test\n"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS\n"
GTL = "7f00 r-xp 0 0:1 7 /opt/cray/pe/mpich/8.1.30/gtl/lib/libmpi_gtl_cuda.so.0.0.0\n"
OTHERS = "7e00 r-xp 0 0:1 8 /usr/lib64/libc.so.6\n7d00 rw-p 0 0:0 0 [heap]\n7c00 r-xp 0 0:1 9 /lib/libmpi_gtl_hsa.so\n"


def comm(kinds: str = "") -> Any:
    """A communicator whose library says this."""
    info = SimpleNamespace(Get=lambda key: kinds if key == "mpi_memory_alloc_kinds" else None, Free=lambda: None)
    return SimpleNamespace(Get_info=lambda: info)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An MPI library that can be given another version, and whose process has other libraries."""
    made = SimpleNamespace(version=MPICH, vendor="MPICH", loaded=set[str]())
    fake = SimpleNamespace(Get_library_version=lambda: made.version, get_vendor=lambda: (made.vendor, (4, 0, 0)))
    monkeypatch.setattr(memories, "MPI", fake)
    monkeypatch.setattr(memories, "_is_loaded", lambda name: name in made.loaded)
    for name in ("HIERCOLL_CUDA_AWARE", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.mark.parametrize("version", [CRAY, MPICH, INTEL])
@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize("loaded", [False, True])
def test_cray_mpich(
    library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str, value: str | None, loaded: bool
) -> None:
    """It takes device memory if it is told to and its GPU layer is there; no other library does."""
    library.version = version
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    if loaded:
        library.loaded.add("libmpi_gtl_cuda.so")
    assert takes_device_memory(comm()) == (version is CRAY and value == "1" and loaded)


def test_the_users_word_comes_first(library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what the library says, too."""
    library.version = CRAY
    library.loaded.add("libmpi_gtl_cuda.so")
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", "0")
    assert not takes_device_memory(comm("mpi,system,cuda"))
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", "1")
    assert takes_device_memory(comm())


@pytest.mark.parametrize("kinds", ["mpi,system", "mpi,system,cuda", "cuda:device,mpi", "", "rocm,system"])
def test_kinds_of_memory(library: SimpleNamespace, kinds: str) -> None:
    """By the standard's key."""
    assert takes_device_memory(comm(kinds)) == ("cuda" in kinds)


@pytest.mark.parametrize("says", [None, 0, 1])
def test_open_mpi(library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, says: int | None) -> None:
    """By its own function, if it has one."""
    library.vendor, library.version = "Open MPI", "Open MPI v5.0.8"
    functions = SimpleNamespace() if says is None else SimpleNamespace(MPIX_Query_cuda_support=lambda: says)
    monkeypatch.setattr(memories.ctypes, "CDLL", lambda name, mode: functions)
    assert takes_device_memory(comm()) == (says == 1)


def test_loaded_libraries(tmp_path: Path) -> None:
    """As the kernel lists them; this process has a C library, and no GPU layer of an MPI library."""
    maps = tmp_path / "maps"
    assert not memories._is_loaded("libmpi_gtl_cuda.so", maps)
    for text, there in {OTHERS: False, OTHERS + GTL: True}.items():
        maps.write_text(text)
        assert memories._is_loaded("libmpi_gtl_cuda.so", maps) == there
    assert MPI.Get_library_version() and memories._is_loaded("libc.so") != memories._is_loaded("libmpi_gtl_cuda.so")
