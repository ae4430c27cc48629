"""Shapes of device copies, device arrays, and the simulated device itself."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiercoll import cuda
from hiercoll.cuda.arrays import Producers, device_array, is_device_array, new_like, stream_handle
from hiercoll.cuda.device import Pieces, Rows, Together, copy_shape, reduction_shape
from hiercoll.cuda.late import LateArray, LateDevice
from hiercoll.cuda.mappings import Mappings
from hiercoll.cuda.memory import DeviceMemory
from hiercoll.errors import BufferTypeError, DeviceError, DeviceMemoryError, ParameterError
from hiercoll.memory import OPERATIONS, BlockLayout, HostMemory, Reduction
from hiercoll.schedule import HOST, RECV, SEND

BLOCKS = st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True)


@given(st.data(), st.integers(1, 40), st.sampled_from([None, 0, 1, 2]))
def test_device_copies_are_host_copies(data: st.DataObject, block: int, part: int | None) -> None:
    """Any regions: the device copies what the host would."""
    layout = BlockLayout(block, 1, 3)
    source = data.draw(BLOCKS)
    target = data.draw(BLOCKS.map(lambda blocks: (blocks + [b for b in range(10) if b not in blocks])[: len(source)]))
    regions = SEND[source]._replace(part=part), RECV[target]._replace(part=part)
    values = np.random.default_rng(0).integers(0, 255, 10 * block, dtype=np.uint8)
    expected = np.zeros_like(values)
    HostMemory().copy(layout, (values.ctypes.data, regions[0]), (expected.ctypes.data, regions[1]))()
    device = LateDevice()
    send, recv = device.array(values), device.array(np.zeros_like(values))
    shape = copy_shape(layout, (send.address, regions[0]), (recv.address, regions[1]))
    if shape is not None:
        device.prepare(shape).enqueue(device.stream_of(1))
    np.testing.assert_array_equal(recv.get(), expected)


@given(
    st.data(), st.sampled_from(sorted(OPERATIONS)), st.sampled_from(["int16", "float64"]), st.sampled_from([None, 1])
)
def test_device_reductions_are_host_reductions(
    data: st.DataObject, operation: str, dtype: str, part: int | None
) -> None:
    """Any regions, the target apart from the others: element by element."""
    how = Reduction(np.dtype(dtype), operation)
    layout = BlockLayout(5 * how.dtype.itemsize, how.dtype.itemsize, 3)
    left = data.draw(BLOCKS)
    right, target = (data.draw(st.permutations(range(10)))[: len(left)] for _ in range(2))
    regions = [buffer[blocks]._replace(part=part) for buffer, blocks in ((SEND, left), (SEND, right), (RECV, target))]
    values = np.random.default_rng(0).integers(-9, 9, 50).astype(dtype)
    device, out = LateDevice(), np.zeros_like(values)
    send, recv = device.array(values), device.array(out)
    HostMemory().reduce(layout, how, *zip([values.ctypes.data] * 2 + [out.ctypes.data], regions, strict=True))()
    shape = reduction_shape(layout, how, *zip([send.address] * 2 + [recv.address], regions, strict=True))
    assert shape is not None
    device.prepare(shape).enqueue(device.stream_of(1))
    np.testing.assert_array_equal(recv.get(), out)
    expected = np.zeros((10, 5), dtype)
    begin, end = (
        (0, 5) if part is None else (layout.extent(part)[0] // layout.item, sum(layout.extent(part)) // layout.item)
    )
    rows = values.reshape(10, 5)
    expected[target, begin:end] = OPERATIONS[operation](rows[left], rows[right])[:, begin:end]
    np.testing.assert_array_equal(out.reshape(10, 5), expected)


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        (SEND[0:4], RECV[0:4], Rows(0, 1000, 32, 1, 32, 32)),
        (SEND[0:8:2], RECV[0:4], Rows(0, 1000, 8, 4, 16, 8)),
        (SEND[0:4], RECV[1:8:2], Rows(0, 1008, 8, 4, 8, 16)),
        (SEND[[0, 1, 4, 5]], RECV[0:4], Rows(0, 1000, 16, 2, 32, 16)),
        (SEND[[3, 0]], RECV[0:2], Pieces(((0, 1008, 8), (24, 1000, 8)))),
        (SEND[[5, 3, 1]], RECV[[4, 2, 0]], Rows(8, 1000, 8, 3, 16, 16)),
        (SEND[[3, 1, 2]], RECV[[3, 1, 2]], Rows(8, 1008, 24, 1, 24, 24)),
        (SEND[[0, 2, 3, 7]], RECV[0:4], Pieces(((0, 1000, 8), (16, 1008, 16), (56, 1024, 8)))),
        (SEND[0:0], RECV[0:0], None),
    ],
)
def test_the_fewest_copies(source: Any, target: Any, shape: object) -> None:
    """One 2-D copy where pieces are evenly spaced, in whatever order they are named, else one table."""
    assert copy_shape(BlockLayout(8), (0, source), (1000, target)) == shape


def test_few_copies_to_the_host() -> None:
    """Blocks of which one is missing are two copies by the copy engine, each of evenly spaced rows; narrow ones, those
    that lie in more than two parts, and those that stay on the device are one launch."""
    blocks = [0, 2, 6, 8, 10]
    for block, source, target, expected in (
        (128, SEND[blocks], HOST[0:5], [(0, 2, 256), (768, 3, 256)]),
        (128, HOST[0:5], RECV[blocks], [(0, 2, 128), (256, 3, 128)]),
        (127, SEND[blocks], HOST[0:5], None),
        (128, SEND[[0, 2, 6, 8, 15, 17]], HOST[0:6], None),
        (128, SEND[blocks], RECV[0:5], None),
    ):
        shape = copy_shape(BlockLayout(block), (0, source), (4096, target))
        if expected is None:
            assert isinstance(shape, Pieces)
        else:
            assert isinstance(shape, Together)
            assert [(rows.source, rows.number, rows.source_step) for rows in shape.rows] == expected


def test_late_work_is_late() -> None:
    """Nothing runs before somebody waits, and then no more than must."""
    device = LateDevice()
    array, other = device.array(np.arange(4.0), stream=5), device.array(np.arange(4.0), stream=6)
    assert (device.view(array.address, 32) == 0xA5).all()
    np.testing.assert_array_equal(array.get(), np.arange(4.0))
    assert (device.view(other.address, 32) == 0xA5).all()
    assert device.counts == {"launches": 2, "synchronisations": 1}


def test_a_stream_that_waits_for_an_event() -> None:
    """It waits for the last record before it began to wait, and for nothing else."""
    device = LateDevice()
    one, two = device.stream_of(1), device.stream_of(2)
    ran: list[str] = []
    one.enqueue(lambda: ran.append("before"))
    event = one.record()
    one.enqueue(lambda: ran.append("after"))
    two.wait(event)
    one.record(event)
    two.enqueue(lambda: ran.append("two"))
    two.synchronize()
    assert ran == ["before", "two"]
    event.synchronize()
    assert ran == ["before", "two", "after"]


def test_an_event_is_done_in_the_end() -> None:
    """Whoever asks again and again gets there."""
    device = LateDevice(seed=2)
    stream = device.stream_of(1)
    stream.enqueue(lambda: None)
    event = stream.record()
    asked = [event.done() for _ in range(100)]
    assert asked == sorted(asked) and asked[-1] and not all(asked)


def test_the_host_cannot_touch_device_memory() -> None:
    """It ends the process, as on a real device; a freed array is unknown to the device."""
    code = (
        "import ctypes, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
        "from hiercoll.cuda.late import LateDevice; at, owner = LateDevice().allocate(8); ctypes.string_at(at, 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGSEGV
    device = LateDevice()
    array = device.array(np.zeros(4))
    address = array.address
    array.get()
    used = device.used
    del array
    assert device.used < used
    with pytest.raises(DeviceError, match="device memory, or pinned"):
        device.view(address, 1)
    with pytest.raises(DeviceError):
        device.view(np.zeros(8).ctypes.data, 1)


def test_device_memory_runs_out() -> None:
    with pytest.raises(DeviceMemoryError, match="5000 bytes, got 4096 left"):
        LateDevice(limit=4096).allocate(5000)


class Fake:
    """What some library's arrays say of themselves."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3, **interface,
        }  # fmt: skip


def test_arrays() -> None:
    """Any contiguous order, which is told; the stream as it says, else the legacy default one, which waits for all."""
    found = device_array(Fake(strides=(4, 8), stream=77), "sendbuf", 0, writable=True)
    assert found == (4096, (2, 3), np.dtype("<f4"), 77, False) and found.nbytes == 24
    assert device_array(Fake(stream=None), "sendbuf", 0, writable=True).stream == 1
    assert device_array(Fake(shape=(0, 3), strides=(99, 99)), "sendbuf", 0, writable=True).nbytes == 0
    assert is_device_array(Fake()) and not is_device_array(np.zeros(1))


def test_streams_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interface has none: the one that is current on the tensor's device counts, each time."""
    current = [SimpleNamespace(cuda_stream=0), SimpleNamespace(cuda_stream=5)]
    cuda_module = SimpleNamespace(current_stream=lambda device: current[device])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda_module))
    tensor: Any = type("Tensor", (Fake,), {"__module__": "torch", "device": 1})()
    assert device_array(tensor, "sendbuf", 0, writable=True).stream == 5
    producers = Producers(arrays=(tensor,))
    assert producers.streams() == [5]
    tensor.device = 0  # whose current stream is the default one
    assert producers.streams() == [1]


@pytest.mark.parametrize("typestr", ["<f2", "<V2"])
def test_types_that_the_interface_has_no_name_for(typestr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 is what the array's own type is called, as PyTorch and ml_dtypes call it; else the interface counts."""
    array: Any = Fake(typestr=typestr)
    assert device_array(array, "sendbuf", 0, writable=True).dtype == np.dtype(typestr)
    for name in ("torch.bfloat16", "bfloat16"):
        array.dtype = name
        assert device_array(array, "sendbuf", 0, writable=True).dtype == ml_dtypes.bfloat16
    array.dtype = "torch.float16"
    assert device_array(array, "sendbuf", 0, writable=True).dtype == np.dtype(typestr)
    array.dtype = "torch.bfloat16"
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert device_array(array, "sendbuf", 0, writable=True).dtype == np.dtype("V2")  # by no means float16


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ({"strides": (24, 4)}, r"a contiguous array, got shape \(2, 3\) with strides \(24, 4\)"),
        ({"mask": object()}, "without a mask"),
        ({"data": (4096, True)}, "a writable array"),
    ],
)
def test_arrays_that_cannot_be(interface: dict[str, Any], words: str) -> None:
    with pytest.raises(BufferTypeError, match=words):
        device_array(Fake(**interface), "recvbuf", 0, writable=True)


def test_new_arrays() -> None:
    """Of the same library; without one that is known, recvbuf must be given."""
    like = new_like(LateDevice().array(np.zeros(3, np.int16)), (4, 3), 0)
    assert isinstance(like, LateArray) and like.shape == (4, 3) and like.dtype == np.int16
    with pytest.raises(
        BufferTypeError, match="expected a device array that can be written, for a sendbuf of test_cuda"
    ):
        new_like(Fake(), (3,), 0)


class Capsule:
    """An array that speaks DLPack and nothing else."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by way of CuPy; without it, the error says so. Arrays of the host are not of a device."""
    assert is_device_array(Capsule()) and not is_device_array(np.zeros(3))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="expected CuPy and a CUDA driver"):
        device_array(Capsule(), "sendbuf", 0, writable=False)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(from_dlpack=lambda array: Fake(stream=5)))
    assert device_array(Capsule(), "sendbuf", 0, writable=False) == (4096, (2, 3), np.dtype("<f4"), 5, True)


def test_arrays_that_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's can be sent, not received into, nor made for a result."""
    monkeypatch.setattr(Fake, "__module__", "jaxlib.xla_extension")
    assert device_array(Fake(), "sendbuf", 0, writable=False).nbytes == 24
    with pytest.raises(BufferTypeError, match="an array of jaxlib, which never changes"):
        device_array(Fake(), "recvbuf", 0, writable=True)
    with pytest.raises(BufferTypeError, match="that can be written, for a sendbuf of jaxlib"):
        new_like(Fake(), (3,), 0)


def test_memory_of_another_process() -> None:
    """A device maps what another one has exported, at another address, and sees what is written there."""
    one, other = LateDevice(), LateDevice()
    array = one.array(np.arange(2000.0))
    array.get()
    handle, allocation = one.export(array.address + 800)
    address, owner = other.open(handle)
    offset = array.address + 800 - allocation.base
    assert offset == 800 and one.number(array.address + 800) == one.number(array.address) and owner
    np.testing.assert_array_equal(other.view(address + offset, 16).view(float), [100.0, 101.0])
    del array, owner
    with pytest.raises(DeviceError, match="memory of a running process"):
        other.open(handle)
    other.hidden = {one.bus}
    with pytest.raises(DeviceError, match=f"that is not hidden, got that of {one.bus}"):
        other.open(handle)
    one.private = True
    with pytest.raises(DeviceError, match="that other processes can map"):
        one.export(one.array(np.zeros(3)).address)


def test_handles_find_buffers() -> None:
    """An allocation is mapped once for the process, whatever communicator asks."""
    one, other = LateDevice(), LateDevice()
    memory, there, elsewhere = DeviceMemory(one), DeviceMemory(other), DeviceMemory(other)
    address, owner = memory.allocate(5000)
    first = there.find(memory.address_handle(address))
    assert elsewhere.find(memory.address_handle(address + 100)) == (first.address + 100, first.owner)
    assert other.counts["mappings"] == 1 and owner


def test_handles_follow_the_allocation() -> None:
    """Memory that was freed and given out again at the same address has another handle, and is mapped anew: what
    overlaps it is let go of before, as CUDA refuses to map it twice."""
    one, other = LateDevice(), LateDevice()
    memory, there = DeviceMemory(one), DeviceMemory(other)
    address, owner = memory.allocate(8 << 20)
    before = memory.address_handle(address)
    assert memory.address_handle(address) is before and there.find(before).address
    del owner
    again, owner = memory.allocate(5 << 20)
    assert again <= address < again + (5 << 20) or address <= again < address + (8 << 20)  # where it was
    handle = memory.address_handle(again)
    assert handle.tobytes() != before.tobytes()
    there.find(handle)
    with pytest.raises(DeviceError, match="memory of a running process"):
        there.find(before)
    assert owner and len(other._mapped) == 0  # what is gone pushed out what is there, and could not be mapped


def test_a_mapping_in_the_way() -> None:
    """Another one of the same process, whose place is not known: all of that process go, once."""
    one, other = LateDevice(), LateDevice()
    mappings = Mappings(other)
    (address, first), (_, second) = one.allocate(5000), one.allocate(5000)
    handle, allocation = one.export(address)
    mappings.find(handle, allocation._replace(base=1, size=1))  # as if it lay elsewhere
    del first
    again, third = one.allocate(5000)
    handle, allocation = one.export(again)
    assert mappings.find(handle, allocation).address and other.counts["mappings"] == 2
    assert second and third


def test_few_mappings_are_kept() -> None:
    """So many, and so many bytes of them; the last one always."""
    one, other = LateDevice(), LateDevice()
    made = [one.allocate(size << 12) for size in (1, 2, 3, 4)]
    for most, most_bytes, left in ((3, 1 << 30, 3), (99, 7 << 12, 2), (99, 1, 1)):
        mappings = Mappings(other, most, most_bytes)
        for address, _ in made:
            mappings.find(*one.export(address))
        assert len(other._mapped) == left
        mappings.clear()
        assert not other._mapped


def test_copies_from_memory_that_was_freed_end_the_process() -> None:
    """What CUDA leaves open, the simulated device fails."""
    one, other = LateDevice(), LateDevice()
    address, owner = one.allocate(5000)
    there, mapped = other.open(one.export(address)[0])
    child = os.fork()
    if not child:
        faulthandler.disable()
        del owner
        gc.collect()
        other.view(there, 1).sum()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGBUS and owner and mapped


@pytest.mark.parametrize("wrong", ["mine", True, 1.5, SimpleNamespace()])
def test_no_streams(wrong: Any) -> None:
    with pytest.raises(ParameterError, match="a CUDA stream, or its handle"):
        stream_handle(wrong)


def test_arrays_of_jax_are_ready() -> None:
    """They have streams of their own, of which nobody is told."""
    asked = []
    array: Any = type("Array", (Fake,), {"__module__": "jaxlib", "block_until_ready": lambda self: asked.append(1)})()
    assert device_array(array, "sendbuf", 0, writable=False).stream == 1 and asked


def test_the_gate_says_what_to_install() -> None:
    """Without CuPy, or without a driver, by a typed error."""
    with pytest.raises(DeviceError):
        cuda.device_at(4096)
