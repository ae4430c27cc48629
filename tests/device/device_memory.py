"""Memory of other ranks of the node: mapped, not mappable, given out again; errors before data move."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from machines import BEFORE, BLOCK, RANK, SIZE, Machine, check, telling
from mpi4py import MPI

import hiercoll
from hiercoll import ConstraintError, DeviceError, DeviceMemoryError, cuda
from hiercoll.errors import TransportWarning
from hiercoll.tools.workload import buffers

OTHERS = "some that another rank cannot"
PEER: dict[str, Any] = {"algorithm": "pairwise", "transport": "peer"}


@pytest.mark.ranks([2, 4])
@pytest.mark.usefixtures("peers")
def test_peer_memory_that_is_given_out_again_and_again(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm]
) -> None:
    """Of 4 MiB and more, in sizes that vary, over two communicators: one cache of mappings serves both, and what
    overlaps is not mapped twice."""
    comms = [on_layout(f"1x{SIZE}"), on_layout(f"1x{SIZE}")]
    for turn in range(8):
        items = (1 << 22) // SIZE + 4096 * (turn * 7 % 5)
        send, recv = machine.put(np.full(SIZE * items, 16 * RANK + turn, np.uint8)), machine.empty(SIZE * items)
        for comm in comms:
            machine.fill(recv, np.full(SIZE * items, BEFORE, np.uint8))
            hiercoll.alltoall(comm, send, recv, **PEER)
            expected = np.repeat(np.arange(SIZE) * 16 + turn, items).astype(np.uint8)
            np.testing.assert_array_equal(machine.get(recv), expected)
        del send, recv
        if turn % 3 == 2:  # as docs/gpu.md says that programs do
            cuda.unmap(comms[0])
            machine.give_back()
    cuda.unmap(comms[0])


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.usefixtures("peers")
def test_peer_mapping_that_fails_on_one_rank(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """All ranks raise before data move, and go on."""
    comm = on_layout(f"1x{SIZE}")
    check(machine, comm, "alltoall", **PEER)
    cuda.unmap(comm)

    def refuse(handle: bytes) -> Any:
        raise DeviceError("handle", "memory that can be mapped", "no room for it")

    send, recv = machine.put(np.zeros(SIZE * 8)), machine.put(np.ones(SIZE * 8))
    call = hiercoll.alltoall_init if held else hiercoll.alltoall
    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            patch.setattr(machine.device, "open", refuse)
        with pytest.raises(DeviceError, match="no room" if RANK == SIZE - 1 else OTHERS):
            call(comm, send, recv, **PEER)
    np.testing.assert_array_equal(machine.get(recv), np.ones(SIZE * 8))
    check(machine, comm, "alltoall", **PEER)


@pytest.mark.parametrize("name", ["scatter_destination", "bruck", "grouped"])
@pytest.mark.usefixtures("peers")
def test_peer_memory_that_others_cannot_map(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], name: str
) -> None:
    """Another buffer takes its place, on that rank only; it warns, once."""
    comm = on_layout(f"1x{SIZE}")
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    gathered = buffers("allgather", BLOCK, RANK, SIZE)[1]
    start = np.where(np.arange(SIZE * BLOCK) // BLOCK == RANK, gathered, BEFORE).astype(np.uint8)
    with machine.private() if RANK == 0 else nullcontext():
        send, inplace = machine.put(values), machine.put(start)
    recv = machine.empty(expected.shape)
    with telling() as told:
        for salt in (0, 1):
            machine.fill(send, values + np.uint8(salt))
            hiercoll.alltoall(comm, send, recv, algorithm=name, transport="peer")
            np.testing.assert_array_equal(machine.get(recv), expected + np.uint8(salt))
        hiercoll.allgather(comm, MPI.IN_PLACE, inplace, algorithm="ring", transport="peer")
        np.testing.assert_array_equal(machine.get(inplace), gathered)
    assert len(told) == min(SIZE - 1, 1) and all("rank 0: transport 'peer' copies" in text for text in told)
    assert all("bytes more of device memory" in text and "expandable_segments" in text for text in told)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("peers")
def test_peer_warning_of_mirrors_is_once_per_communicator(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm]
) -> None:
    """Also by Python's own filter, which shows a text once per line of a program: calls of other sizes on a
    communicator add none, another communicator's first call does."""
    comms = [on_layout(f"1x{SIZE}"), on_layout(f"1x{SIZE}")]
    with machine.private():
        arrays = [machine.put(np.full(SIZE * items, RANK, np.uint8)) for items in (100, 300)]
    with telling("default") as told:
        for comm in comms:
            for send in arrays:
                hiercoll.alltoall(comm, send, machine.empty(send.shape), **PEER)
                hiercoll.alltoall_init(comm, send, **PEER).free()
    assert len(told) == len(comms) and told[0] == told[1] and "rank 0" in told[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("peers")
def test_peer_warning_names_the_line_of_the_program(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm]
) -> None:
    """In calls and plans, which come there by ways of different lengths."""
    with machine.private():
        send, recv = machine.put(np.zeros(SIZE)), machine.empty(SIZE, np.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hiercoll.alltoall(on_layout(f"1x{SIZE}"), send, recv, **PEER)
        hiercoll.alltoall_init(on_layout(f"1x{SIZE}"), send, recv, **PEER).free()
    assert [each.filename for each in caught] == [__file__, __file__] * (RANK == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.usefixtures("peers")
def test_peer_warning_as_an_error(machine: Machine, on_layout: Callable[[str], MPI.Intracomm], held: bool) -> None:
    """Where warnings are errors, what one rank mirrors is one error on all ranks, and then the calls go on."""
    comm = on_layout(f"1x{SIZE}")
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    with machine.private() if RANK == 1 else nullcontext():
        send, recv = machine.put(values), machine.empty(expected.shape)
    call: Callable[..., Any] = hiercoll.alltoall_init if held else hiercoll.alltoall
    with pytest.raises(TransportWarning, match="rank 1: transport 'peer' copies buffers"):
        call(comm, send, recv, **PEER)
    hiercoll.alltoall(comm, send, recv, **PEER)
    np.testing.assert_array_equal(machine.get(recv), expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["inplace", "grouped"])
def test_no_memory_on_one_rank(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], name: str, transport: str
) -> None:
    """Too little on one rank is an error on all, for plans and calls, and the communicator goes on."""
    comm = on_layout(f"1x{SIZE}")
    there = machine.put(np.zeros(SIZE * 4096))
    source = MPI.IN_PLACE if name == "inplace" else machine.put(np.zeros(SIZE * 4096))
    given: dict[str, Any] = {"algorithm": name, "transport": transport}
    if name == "grouped":
        given["memory"] = "shared"
    if name == "grouped" and transport == "staged":
        given = {"algorithm": "bruck", "transport": transport}
    check(machine, comm, "alltoall", transport=transport)
    with machine.full() if RANK == 0 else nullcontext():
        for call in (hiercoll.alltoall_init, hiercoll.alltoall):
            with pytest.raises(DeviceMemoryError, match=None if RANK == 0 else "too little on another one"):
                call(comm, source, there, **given)
    hiercoll.alltoall(comm, source, there, **given)
    check(machine, comm, "alltoall", transport=transport)


def test_errors_of_direct_messages(machine: Machine, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MPI may not be given device memory, in calls and plans; nothing moves, and the host's memory serves."""
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", "0")
    send, recv = machine.put(np.ones(SIZE)), machine.put(np.zeros(SIZE))
    counts = np.ones(SIZE, int)
    for call in (hiercoll.alltoall, hiercoll.alltoall_init):
        with pytest.raises(ConstraintError, match="HIERCOLL_CUDA_AWARE=1"):
            call(comm, send, recv, transport="direct")
    with pytest.raises(ConstraintError, match="HIERCOLL_CUDA_AWARE=1"):
        hiercoll.alltoallv(comm, [send, counts], [recv, counts], transport="direct")
    np.testing.assert_array_equal(machine.get(recv), np.zeros(SIZE))
    check(machine, comm, "alltoall")
