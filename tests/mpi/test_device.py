"""Device arrays, on a simulated device that is as late, or as early, as CUDA's rules permit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll import BufferTypeError, ConstraintError, DeviceMemoryError, ParameterError, cuda
from hiercoll.algorithms import REGISTRY
from hiercoll.bench import buffers
from hiercoll.cuda.late import LateArray, LateDevice
from hiercoll.cuda.memory import DeviceCopy, DeviceMemory

RANK, SIZE = WORLD.rank, WORLD.size
VARIANTS = [
    (collective, name, params)
    for collective in ("alltoall", "allgather")
    for name, entry in REGISTRY[collective].items()
    for params in entry.variants()
]
CALLS = {"alltoall": hiercoll.alltoall, "allgather": hiercoll.allgather}
BLOCK = 200  # bytes, no multiple of 16
OWN_STREAM = 7


@pytest.fixture(params=["late", "early", "random"])
def device(request: pytest.FixtureRequest) -> Iterator[LateDevice]:
    made = LateDevice(order=request.param, seed=RANK)
    with cuda.use(lambda address: made):
        yield made


def check(device: LateDevice, comm: MPI.Intracomm, collective: str, **options: Any) -> None:
    """Two calls on the same arrays, with other data in the second."""
    send, recv = (
        LateArray(device, array.shape, np.uint8, OWN_STREAM) for array in buffers(collective, BLOCK, RANK, SIZE)
    )
    for salt in (0, 1):
        values, expected = buffers(collective, BLOCK, RANK, SIZE)
        recv.fill(np.full(expected.shape, 0xA5, np.uint8))
        send.fill(values + salt)
        result = CALLS[collective](comm, send, recv, **options)
        assert result is recv
        np.testing.assert_array_equal(recv.get(), expected + salt)


@pytest.mark.ranks([1, 3, 4])
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("transport", ["staged", "direct"])
def test_every_algorithm(
    device: LateDevice,
    on_layout: Callable[[str], MPI.Intracomm],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    layout: str,
) -> None:
    """Right data, whenever the device does its work."""
    device.aware = transport == "direct"
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", str(int(device.aware)))
    comm = on_layout(layout)
    topology = hiercoll.get_topology(comm)
    for collective, name, params in VARIANTS:
        if REGISTRY[collective][name].refusal(topology, params) is None:
            check(device, comm, collective, algorithm=name, transport=transport, **params)
    for collective in CALLS:
        for name in ("native", "auto"):
            check(device, comm, collective, algorithm=name, transport=transport)


@pytest.mark.parametrize("name", ["scatter_destination", "bruck", "eager", "hierarchical", "grouped", "native"])
def test_staged_in_parts(device: LateDevice, on_layout: Callable[[str], MPI.Intracomm], name: str) -> None:
    """Parts that overlap."""
    check(device, on_layout(f"1x{SIZE}"), "alltoall", algorithm=name, transport="staged:3")


@pytest.mark.parametrize("collective", CALLS)
@pytest.mark.parametrize("name", ["native", "auto", "inplace", "ring"])
def test_in_place(device: LateDevice, comm: MPI.Intracomm, collective: str, name: str) -> None:
    """The input in the receive buffer."""
    if name in ("inplace", "ring") and name not in REGISTRY[collective]:
        pytest.skip("not of this collective")
    values, expected = buffers(collective, BLOCK, RANK, SIZE)
    start = values if collective == "alltoall" else np.where(np.arange(SIZE * BLOCK) // BLOCK == RANK, expected, 0xA5)
    recv = device.array(start.astype(np.uint8), OWN_STREAM)
    CALLS[collective](comm, MPI.IN_PLACE, recv, algorithm=name)
    np.testing.assert_array_equal(recv.get(), expected)


@pytest.mark.parametrize("name", ["scatter_destination", "eager", "native"])
def test_plans(device: LateDevice, comm: MPI.Intracomm, name: str) -> None:
    """Start and wait, with work in between."""
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = device.array(values, OWN_STREAM), LateArray(device, expected.shape, np.uint8, OWN_STREAM)
    with hiercoll.alltoall_init(comm, send, recv, algorithm=name) as plan:
        for salt in range(3):
            send.fill(values + salt)
            plan.start()
            while not plan.test():
                pass
            np.testing.assert_array_equal(recv.get(), expected + salt)


def test_a_stream_of_the_callers(device: LateDevice, comm: MPI.Intracomm) -> None:
    """``stream=`` counts, not what the array says."""
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = LateArray(device, values.shape, np.uint8, OWN_STREAM), LateArray(device, expected.shape, np.uint8)
    send.stream = 9
    send.fill(values)
    send.stream = OWN_STREAM
    hiercoll.alltoall(comm, send, recv, stream=9)
    np.testing.assert_array_equal(recv.get(), expected)


def test_new_arrays(device: LateDevice, comm: MPI.Intracomm) -> None:
    """The result is of the caller's kind, with its type and shape."""
    values = np.arange(SIZE * 6, dtype=np.float32).reshape(SIZE, 2, 3) + 100 * RANK
    result = hiercoll.alltoall(comm, device.array(values))
    assert isinstance(result, LateArray) and result.shape == (SIZE, 2, 3) and result.dtype == np.float32
    np.testing.assert_array_equal(
        result.get(), [np.arange(RANK * 6, RANK * 6 + 6).reshape(2, 3) + 100 * r for r in range(SIZE)]
    )
    gathered = hiercoll.allgather(comm, device.array(values[0]))
    assert gathered.shape == (SIZE, 2, 3)
    assert hiercoll.alltoall(comm, device.array(np.empty((SIZE, 0)))).nbytes == 0


MUTATIONS = {
    "waiting for copies": (DeviceCopy, "wait", lambda self: None),
    "ordering after the caller's stream": (DeviceMemory, "before_messages", lambda self, handle, direct: None),
}


@pytest.mark.parametrize("lost", MUTATIONS)
@pytest.mark.parametrize("name", ["scatter_destination", "native"])
def test_a_lost_synchronisation_is_seen(
    on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, lost: str, name: str
) -> None:
    """The simulated device would have found it."""
    device = LateDevice()
    monkeypatch.setattr(*MUTATIONS[lost])
    with cuda.use(lambda address: device), pytest.raises(AssertionError):
        check(device, on_layout(f"{SIZE}x1"), "alltoall", algorithm=name)


def test_what_cannot_be(device: LateDevice, comm: MPI.Intracomm) -> None:
    """Typed errors, and the communicator goes on."""
    there, here = device.array(np.zeros(SIZE)), np.zeros(SIZE)
    with pytest.raises(BufferTypeError, match=r"memory of a simulated device \(.*\), as sendbuf, got host"):
        hiercoll.alltoall(comm, there, here)
    with pytest.raises(BufferTypeError, match="memory of the host, as sendbuf, got a simulated"):
        hiercoll.alltoall(comm, here, there)
    with pytest.raises(ConstraintError, match="HIERCOLL_CUDA_AWARE=1"):
        hiercoll.alltoall(comm, there, transport="direct")
    for transport in ("peer", "staged:0", "staged:x", "direct:2", 3):
        with pytest.raises(ParameterError, match="'auto', 'direct', 'staged'"):
            hiercoll.alltoall(comm, there, transport=transport)
    with pytest.raises(ParameterError, match="for arrays on the host"):
        hiercoll.alltoall(comm, here, transport="staged")
    with pytest.raises(ParameterError, match="a CUDA stream"):
        hiercoll.alltoall(comm, there, stream="mine")
    device.limit = device.used
    with pytest.raises(DeviceMemoryError, match="left"):
        hiercoll.alltoall(comm, there)
    device.limit = 1 << 30
    check(device, comm, "alltoall")
