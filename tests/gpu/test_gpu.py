"""What only a real GPU can say: every algorithm, kernels, CuPy's and PyTorch's memory, streams of the program's.

Run by ``scripts/gpu-check``, which starts 1 to 8 ranks; they share GPUs where there are fewer. The other claims of
docs/gpu.md are in test_claims.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import CALLS, VARIANTS, layouts  # type: ignore[attr-defined]
from machines import BLOCK, RANK, SIZE, Machine
from machines_gpu import cupy, cupyx, runtime, why_not_direct
from mpi4py import MPI

import hiercoll
from hiercoll import DeviceError, DeviceMemoryError, cuda
from hiercoll.algorithms import REGISTRY
from hiercoll.cli import main
from hiercoll.cuda.device import Pieces, Rows, copy_shape, reduction_shape
from hiercoll.cuda.kernel import ELEMENTS
from hiercoll.memory import OPERATIONS, BlockLayout, HostMemory, Reduction
from hiercoll.schedule import RECV, SEND, Region
from hiercoll.tools.workload import buffers


def check(comm: MPI.Intracomm, collective: str, block: int = BLOCK, **options: Any) -> None:
    """Two calls on the same arrays, with other data in the second, which a kernel writes late."""
    values, expected = buffers(collective, block, RANK, SIZE)
    send, recv = cupy.empty(values.shape, np.uint8), cupy.empty(expected.shape, np.uint8)
    source = cupy.asarray(values)
    for salt in (0, 1):
        recv.fill(0xA5)
        cupy.add(source, np.uint8(salt), out=send)
        result = CALLS[collective](comm, send, recv, **options)
        assert result is recv
        np.testing.assert_array_equal(cupy.asnumpy(recv), expected + np.uint8(salt))


@pytest.mark.parametrize("layout", layouts())
def test_every_algorithm(on_layout: Callable[[str], MPI.Intracomm], transport: str, layout: str) -> None:
    """Bit-exact."""
    comm = on_layout(layout)
    topology = hiercoll.get_topology(comm)
    for collective, name, params in VARIANTS:
        if REGISTRY[collective][name].refusal(topology, params) is None:
            check(comm, collective, algorithm=name, transport=transport, **params)
    for collective in CALLS:
        for name in ("native", "auto"):
            check(comm, collective, algorithm=name, transport=transport)


@pytest.mark.parametrize("name", ["scatter_destination", "bruck", "eager", "hierarchical", "grouped"])
def test_large_and_in_parts(on_layout: Callable[[str], MPI.Intracomm], transport: str, name: str) -> None:
    """4 MB in three parts, which overlap."""
    check(on_layout(f"1x{SIZE}"), "alltoall", 4_000_003 // SIZE, algorithm=name, transport=f"{transport}:3")


def test_in_place_and_plans(comm: MPI.Intracomm, transport: str) -> None:
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    recv = cupy.asarray(values)
    hiercoll.alltoall(comm, MPI.IN_PLACE, recv, algorithm="inplace", transport=transport)
    np.testing.assert_array_equal(cupy.asnumpy(recv), expected)
    source, send = cupy.asarray(values), cupy.empty(values.shape, np.uint8)
    with hiercoll.alltoall_init(comm, send, recv, transport=transport) as plan:
        for salt in range(3):
            cupy.add(source, np.uint8(salt), out=send)
            plan.start()
            while not plan.test():
                pass
            np.testing.assert_array_equal(cupy.asnumpy(recv), expected + np.uint8(salt))


def test_new_arrays_at_addresses_used_before(on_layout: Callable[[str], MPI.Intracomm], transport: str) -> None:
    """CuPy's pool hands the same memory out again, and gives it back to the driver between calls."""
    comm = on_layout(f"1x{SIZE}")
    values, expected = buffers("alltoall", 70_000, RANK, SIZE)
    for salt in range(6):
        send = cupy.asarray(values + np.uint8(salt))
        result = hiercoll.alltoall(comm, send, transport=transport)
        assert isinstance(result, cupy.ndarray)
        np.testing.assert_array_equal(cupy.asnumpy(result), expected + np.uint8(salt))
        del send, result
        if salt % 2:
            cupy.get_default_memory_pool().free_all_blocks()


def test_pytorch(comm: MPI.Intracomm, transport: str) -> None:
    """Tensors in, a tensor out, on PyTorch's current stream."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    device = f"cuda:{runtime.getDevice()}"
    with torch.cuda.stream(torch.cuda.Stream(device)):
        send = torch.arange(SIZE * 1000, device=device, dtype=torch.float32).reshape(SIZE, 1000) + 1e5 * RANK
        result = hiercoll.alltoall(comm, send, transport=transport)
        assert isinstance(result, torch.Tensor) and result.dtype == torch.float32
        row = np.arange(RANK * 1000, RANK * 1000 + 1000, dtype=np.float32)
        np.testing.assert_array_equal(result.cpu().numpy(), [row + np.float32(1e5 * r) for r in range(SIZE)])


REGIONS: dict[str, tuple[Region, Region]] = {
    "one piece": (SEND[0:9], RECV[0:9]),
    "evenly spaced": (SEND[0:9:2], RECV[0:5]),
    "scattered": (SEND[[7, 0, 3, 5]], RECV[[1, 8, 2, 4]]),
    "of different lengths": (SEND[[0, 1, 2, 6, 8]], RECV[[4, 5, 6, 7, 0]]),
}


@pytest.mark.ranks([1])
@pytest.mark.parametrize("shift", [0, 1, 3, 7, 11, 16])  # of the target; the source is 3 bytes off
@pytest.mark.parametrize("block", [1, 3, 16, 1000, 65536, 300_001])
@pytest.mark.parametrize("regions", REGIONS)
def test_kernel_and_copies(regions: str, block: int, shift: int) -> None:
    """Every alignment and length; the bytes around stay as they are."""
    source, target = REGIONS[regions]
    layout = BlockLayout(block)
    values = np.random.default_rng(block).integers(0, 255, 9 * block + 32, dtype=np.uint8)
    expected = np.full_like(values, 0xA5)
    HostMemory().copy(layout, (values.ctypes.data + 3, source), (expected.ctypes.data + shift, target))()
    send, recv = cupy.asarray(values), cupy.full(values.shape, 0xA5, np.uint8)
    device = cuda.device_at(send.data.ptr)
    shape = copy_shape(layout, (send.data.ptr + 3, source), (recv.data.ptr + shift, target))
    assert isinstance(shape, (Rows, Pieces))
    stream = device.new_stream()
    stream.wait(device.stream_of(cupy.cuda.get_current_stream().ptr).record())
    device.prepare(shape).enqueue(stream)
    stream.record().synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(recv), expected)


@pytest.mark.ranks([1])
@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
def test_kernel_of_rows(word: int) -> None:
    """On the device, to the host and from it: rows of one word to many, few and many, by words of each size."""
    device = cuda.device_at(cupy.zeros(1).data.ptr)
    stream, (pinned, owner) = device.new_stream(), device.allocate_pinned(1 << 22)
    host = np.ctypeslib.as_array((ctypes.c_uint8 * (1 << 22)).from_address(pinned))
    for each, number in [(1, 1000), (3, 77), (40, 33), (5000, 3), (1, 30_000)]:
        length, step = each * word, (each + 1) * word
        values = np.random.default_rng(each).integers(0, 255, number * step, dtype=np.uint8)
        packed = values.reshape(number, step)[:, :length]
        send = cupy.asarray(values)
        between, recv = (cupy.full(values.shape, 0xA5, np.uint8) for _ in range(2))
        host[:] = 0xA5
        stream.wait(device.stream_of(cupy.cuda.get_current_stream().ptr).record())
        for rows in (
            Rows(send.data.ptr, between.data.ptr, length, number, step, length),
            Rows(between.data.ptr, pinned, length, number, length, length, True),
            Rows(pinned, recv.data.ptr, length, number, length, step, True),
        ):
            device.prepare(rows).enqueue(stream)
            stream.record().synchronize()
        np.testing.assert_array_equal(host[: number * length].reshape(number, length), packed)
        unpacked = cupy.asnumpy(recv).reshape(number, step)
        np.testing.assert_array_equal(unpacked[:, :length], packed)
        assert (unpacked[:, length:] == 0xA5).all()
    assert owner is not None


@pytest.mark.ranks([1])
def test_kernel_on_pieces_of_every_size() -> None:
    """From one byte to more than all others together, in any order; what lies between them stays as it is."""
    lengths = [1, 3, 20_000_001, *([8, 4096, 70_000, 15] * 500)]
    starts = np.cumsum([0, *(length + 5 for length in lengths)])
    values = np.random.default_rng(1).integers(0, 255, int(starts[-1]) + 16, dtype=np.uint8)
    send, recv = cupy.asarray(values), cupy.full(values.shape, 0xA5, np.uint8)
    expected, table = np.full_like(values, 0xA5), []
    for number, (at, length) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        source = at + number % 16
        table.append((send.data.ptr + source, recv.data.ptr + at, length))
        expected[at : at + length] = values[source : source + length]
    device = cuda.device_at(send.data.ptr)
    stream = device.new_stream()
    stream.wait(device.stream_of(cupy.cuda.get_current_stream().ptr).record())
    device.prepare(Pieces(tuple(table))).enqueue(stream)
    stream.record().synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(recv), expected)


@pytest.mark.parametrize("items", [50, 5000])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernel_of_reductions(operation: str, dtype: str, items: int) -> None:
    """Every type and operation, on blocks in any order, most of which begin where vectors do."""
    how, total = Reduction(np.dtype(dtype), operation), 9 * items
    layout, regions = BlockLayout(items * how.dtype.itemsize), (SEND[[7, 0, 3]], SEND[1:4], RECV[[1, 8, 2]])
    values, expected = np.random.default_rng(1).integers(1, 9, total).astype(dtype), np.zeros(total, dtype)
    ends = zip((values.ctypes.data, values.ctypes.data, expected.ctypes.data), regions, strict=True)
    HostMemory().reduce(layout, how, *ends)()
    send, recv = cupy.asarray(values), cupy.zeros(total, dtype)
    device = cuda.device_at(send.data.ptr)
    shape = reduction_shape(layout, how, *zip((send.data.ptr, send.data.ptr, recv.data.ptr), regions, strict=True))
    assert shape is not None
    stream = device.new_stream()
    stream.wait(device.stream_of(cupy.cuda.get_current_stream().ptr).record())
    device.prepare(shape).enqueue(stream)
    stream.record().synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(recv), expected)


@pytest.mark.parametrize("name", ["scatter_destination", "bruck", "grouped"])
def test_memory_is_as_stated(comm: MPI.Intracomm, transport: str, name: str) -> None:
    """A plan takes its scratch, rounded up to what the pool gives, and nothing else of the device."""
    block = 1 << 16
    send, recv = cupy.zeros(SIZE * block, np.uint8), cupy.empty(SIZE * block, np.uint8)
    hiercoll.alltoall(comm, send, recv, algorithm=name, transport=transport)  # whatever is made once
    pool = cuda.device_at(send.data.ptr)._pool  # type: ignore[attr-defined]
    before = pool.used_bytes()
    with hiercoll.alltoall_init(comm, send, recv, algorithm=name, transport=transport) as plan:
        assert plan.schedule is not None
        assert pool.used_bytes() - before <= plan.schedule.scratch * block + 512
    assert pool.used_bytes() == before


SPIN = cupy.RawKernel('extern "C" __global__ void spin(volatile int* go) { while (!*go) {} }', "spin")


@pytest.mark.ranks([1, 2])
def test_nothing_on_the_legacy_stream(comm: MPI.Intracomm, transport: str) -> None:
    """A call comes to its end while a kernel occupies the legacy default stream."""
    send, recv = cupy.ones(SIZE * 1000), cupy.zeros(SIZE * 1000)
    for algorithm in ("scatter_destination", "bruck"):
        hiercoll.alltoall(comm, send, recv, algorithm=algorithm, transport=transport)
    go = cupyx.zeros_pinned(1, np.int32)
    late = threading.Timer(20.0, go.fill, [1])  # so that a failure ends
    late.start()
    with cupy.cuda.Stream.null:
        SPIN((1,), (1,), (np.uintp(go.ctypes.data),))
    for algorithm in ("scatter_destination", "bruck"):
        hiercoll.alltoall(comm, send, recv, algorithm=algorithm, transport=transport)
    waited = bool(go[0])
    late.cancel()
    go[0] = 1
    cupy.cuda.Stream.null.synchronize()
    assert not waited


def test_errors(machine: Machine, comm: MPI.Intracomm) -> None:
    """Typed, and the communicator goes on."""
    there, large = cupy.zeros(SIZE * 1000), cupy.zeros(SIZE << 22)
    with pytest.raises(hiercoll.BufferTypeError, match="as sendbuf, got host"):
        hiercoll.alltoall(comm, there, np.zeros(SIZE * 1000))
    with pytest.raises(DeviceError):
        cuda.device_at(np.zeros(4).ctypes.data)
    if SIZE > 1:  # else there is no scratch
        with machine.full(), pytest.raises(DeviceMemoryError):
            hiercoll.alltoall_init(comm, large, algorithm="bruck")
    check(comm, "alltoall")


@pytest.mark.ranks([1])
def test_tools_gpus() -> None:
    """``hiercoll gpus`` lists those of the host, at least the ones that this process sees."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    done = CliRunner().invoke(main, ["gpus"])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("GPU") and ": " in line]
    assert len(lines) >= runtime.getDeviceCount()
    assert any(runtime.getDeviceProperties(runtime.getDevice())["name"].decode() in line for line in lines)


def test_direct(on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Where the MPI library takes device memory, or is said to."""
    if why := why_not_direct():
        pytest.skip(why)
    comm = on_layout(f"{SIZE}x1")
    for collective, name, params in VARIANTS:
        if REGISTRY[collective][name].refusal(hiercoll.get_topology(comm), params) is None:
            check(comm, collective, algorithm=name, transport="direct", **params)
    check(comm, "alltoall", 1 << 20, algorithm="scatter_destination", transport="direct")
