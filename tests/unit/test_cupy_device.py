"""The part that speaks to CuPy, with a stand-in for CuPy on host memory: names, arguments and their
order are CuPy 14's; what a GPU does with them, only ``scripts/gpu-check`` can tell."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from hiercoll.cuda.device import NARROW, Conversion, Pieces, Rows, copy_shape
from hiercoll.cuda.kernel import WORDS
from hiercoll.cuda.mappings import clear_all
from hiercoll.cuda.memory import DeviceMemory
from hiercoll.errors import AlreadyMappedError, DeviceError, DeviceMemoryError
from hiercoll.memory import BlockLayout, HostMemory, Reduction, WideLayout
from hiercoll.schedule import HOST, RECV, SCRATCH, SEND

NAME = "hiercoll.cuda.cupy_device"


class CUDARuntimeError(RuntimeError):
    """As CuPy has it."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class OutOfMemoryError(MemoryError):
    """As CuPy has it."""


class Runtime:
    """``cupy.cuda.runtime``."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory: dict[int, int] = {}  # sizes of device allocations

    def base(self, address: int) -> int:
        return next((start for start, size in self.memory.items() if start <= address < start + size), 0)

    def pointerGetAttributes(self, ptr: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(
            device=0, devicePointer=ptr, type=2 if self.base(ptr) else 1
        )  # 1: registered, the host's

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        assert kind == 4 and stream
        self.calls.append("1-D")
        ctypes.memmove(dst, src, size)

    def memcpy2DAsync(  # noqa: N802
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        assert kind == 4 and stream and width <= min(dpitch, spitch)
        self.calls.append("2-D")
        for row in range(height):
            ctypes.memmove(dst + row * dpitch, src + row * spitch, width)

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        assert stream and (stream > 2 or Event.known[event].device == Device.current)  # 1 and 2 are the current one's
        Event.known[event].recorded = True

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:  # noqa: N802
        assert stream and Event.known[event].recorded

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802
        if stream == 13:
            raise CUDARuntimeError("cudaErrorStreamCaptureImplicit")
        return stream == 12

    def deviceSynchronize(self) -> None:  # noqa: N802
        self.calls.append("device")
        status = {2: 900, 3: 700}.get(self.calls.count("device"))
        if status is not None:
            raise CUDARuntimeError("that cannot be", status)

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:  # noqa: N802
        self.calls.append("register")

    def hostUnregister(self, ptr: int) -> None:  # noqa: N802
        self.calls.append("unregister")

    def ipcGetMemHandle(self, ptr: int) -> bytes:  # noqa: N802
        return ptr.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:  # noqa: N802
        address = int.from_bytes(handle, "little")
        if not address & 0xFFF and address < 1 << 16:
            raise CUDARuntimeError("cudaErrorAlreadyMapped", 208)
        if address not in self.memory:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle")
        return address

    def ipcCloseMemHandle(self, ptr: int) -> None:  # noqa: N802
        self.calls.append("close")

    def getDevice(self) -> int:  # noqa: N802
        return Device.current

    def getDeviceCount(self) -> int:  # noqa: N802
        return 2

    def deviceGetPCIBusId(self, device: int) -> str:  # noqa: N802
        return f"0000:0{device}:00.0"


class Device:
    """``cupy.cuda.Device``."""

    current = 0

    def __init__(self, number: int) -> None:
        self.number, self.attributes = number, {"MultiProcessorCount": 132}
        self.before = 0

    def __enter__(self) -> None:
        self.before, Device.current = Device.current, self.number

    def __exit__(self, *error: object) -> None:
        Device.current = self.before

    def use(self) -> None:
        Device.current = self.number


class Stream:
    """``cupy.cuda.Stream``; work is done at once."""

    ptr = 77

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking
        self.device = Device.current

    def __enter__(self) -> None:
        assert self.device == Device.current

    def __exit__(self, *error: object) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """Nothing to do."""


class Event:
    """``cupy.cuda.Event``."""

    known: ClassVar[dict[int, Event]] = {}

    def __init__(self, block: bool, disable_timing: bool) -> None:
        self.recorded, self.ptr, self.device = False, len(Event.known) + 1, Device.current
        Event.known[self.ptr] = self

    def synchronize(self) -> None:
        assert self.recorded

    @property
    def done(self) -> bool:
        return self.recorded


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A CuPy and a driver with memory of 1 MB."""
    made = Runtime()

    class Memory:
        def __init__(self, nbytes: int) -> None:
            self.values = np.zeros(nbytes, np.uint8)
            self.ptr = self.values.ctypes.data

    class Pool:
        def malloc(self, nbytes: int) -> Memory:
            if nbytes > 1_000_000:
                raise OutOfMemoryError(f"{nbytes} bytes")
            memory = Memory(nbytes)
            made.memory[memory.ptr] = nbytes
            return memory

    class RawKernel:
        def __init__(self, source: str, name: str) -> None:
            assert f" {name}(" in source and source.count("__global__") == 1
            self.word = next((size for size, name in WORDS.items() if f"#define Word {name}\n" in source), 0)

        def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            if len(args) == 6:
                made.calls.append("kernel of rows")
                source, source_step, target, target_step, each, words = (int(number) for number in args)
                for row in range(words // each):
                    ctypes.memmove(target + row * target_step, source + row * source_step, each * self.word)
                return
            made.calls.append("kernel")
            table, count, span = args
            assert (grid, block, span, len(table)) == ((table[-1, -1],), (256,), 4096, count + 1)
            for source, *other, target, length, _ in table[:-1].tolist():
                ctypes.memmove(target, source, length)
                for address in other:  # the sum of bytes
                    ends = (
                        np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(at)) for at in (target, address)
                    )
                    np.add(*ends, out=np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(target)))

    def address_range(base: Any, size: Any, address: Any) -> int:
        base._obj.value = made.base(address.value)
        return 0 if base._obj.value else 1

    def attribute(value: Any, name: int, address: Any) -> int:
        assert name == 7
        value._obj.value = 5
        return 0

    cupy: Any = ModuleType("cupy")
    cupy.asarray, cupy.RawKernel = np.asarray, RawKernel
    cupy.cuda = SimpleNamespace(
        runtime=made, Device=Device, Stream=Stream, Event=Event, MemoryPool=Pool,
        alloc_pinned_memory=Memory, memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    sys.modules.pop(NAME, None)
    driver = SimpleNamespace(cuMemGetAddressRange_v2=address_range, cuPointerGetAttribute=attribute)
    monkeypatch.setattr(import_module(NAME), "_driver", lambda: driver)
    yield made
    sys.modules.pop(NAME)
    Device.current = 0


@pytest.mark.parametrize("block", [24, NARROW, NARROW + 1])
@pytest.mark.parametrize("current", [0, 1])
def test_copies(runtime: Runtime, block: int, current: int) -> None:
    """One call to the runtime, or one launch, for each shape of regions, whichever device is current (the stand-in
    looks at it where CUDA does): rows to and from pinned memory by the copy engine, unless they are narrow; else by the
    kernel for rows, or over a table where words would be tiny."""
    memory = DeviceMemory(import_module(NAME).CupyDevice(0))
    Device.current = current
    layout, nbytes = BlockLayout(block), 9 * block
    values = np.random.default_rng(2).integers(0, 255, nbytes, dtype=np.uint8)
    (there, one), (here, two), (pinned, three) = (
        memory.allocate(nbytes),
        memory.allocate(nbytes),
        memory.allocate_host(nbytes),
    )
    ctypes.memmove(there, values.ctypes.data, nbytes)
    cases = [
        (SEND[0:4], RECV[2:6], "1-D"),
        (SEND[0:8:2], RECV[0:4], "kernel" if block % 4 else "kernel of rows"),
        (SEND[[7, 0, 3]], RECV[[1, 8, 2]], "kernel"),
        (SEND[0:4], HOST[0:4], "1-D"),
        (SEND[0:8:2], HOST[0:4], "2-D" if block >= NARROW else "kernel of rows"),
        (SEND[[0, 2, 5, 7]], HOST[0:4], "2-D" if block >= NARROW else "kernel"),
    ]
    for source, target, how in cases:
        at = pinned if target.buffer == "host" else here
        expected = np.full(nbytes, 0xA5, np.uint8)
        ctypes.memset(at, 0xA5, nbytes)
        HostMemory().copy(layout, (values.ctypes.data, source), (expected.ctypes.data, target))()
        memory.before_messages([1], True)
        copy = memory.copy(layout, (there, source), (at, target))
        assert copy is not None
        copy.start()
        copy.wait()
        assert copy.done() and runtime.calls[-1] == how
        np.testing.assert_array_equal(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(at)), expected)
    assert one and two and three


def test_reductions(runtime: Runtime) -> None:
    """One launch over a table of left, right and target."""
    memory, layout, how = (
        DeviceMemory(import_module(NAME).CupyDevice(0)),
        BlockLayout(24),
        Reduction(np.dtype("u1"), "sum"),
    )
    values = np.random.default_rng(2).integers(0, 99, 9 * 24, dtype=np.uint8)
    (there, one), (here, two) = memory.allocate(216), memory.allocate(216)
    ctypes.memmove(there, values.ctypes.data, 216)
    regions = SEND[[7, 0, 3]], SEND[1:4], RECV[[1, 8, 2]]
    expected = np.zeros(216, np.uint8)
    ends = zip((values.ctypes.data, values.ctypes.data, expected.ctypes.data), regions, strict=True)
    HostMemory().reduce(layout, how, *ends)()
    transfer = memory.reduce(layout, how, *zip((there, there, here), regions, strict=True))
    assert transfer is not None
    transfer.start()
    transfer.wait()
    np.testing.assert_array_equal(np.ctypeslib.as_array((ctypes.c_uint8 * 216).from_address(here)), expected)
    assert one and two and runtime.calls[-1] == "kernel"


def test_conversions(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch over a table of source and target, of the kernel for the two types; within one, a copy."""
    module, sources = import_module(NAME), list[str]()
    kernel = module.cupy.RawKernel
    monkeypatch.setattr(module.cupy, "RawKernel", lambda source, name: (sources.append(name), kernel(source, name))[1])
    memory, layout = DeviceMemory(module.CupyDevice(0)), WideLayout(BlockLayout(24), np.dtype("f2"))
    shape = copy_shape(layout, (1 << 20, SEND[[7, 0, 3]]), (1 << 24, SCRATCH[[1, 8, 2]]))
    assert isinstance(shape, Conversion) and (shape.source, shape.target) == (np.dtype("f2"), np.dtype("f4"))
    assert shape.table[0] == ((1 << 20) + 7 * 24, (1 << 24) + 48, 48)
    assert isinstance(memory.device.prepare(shape), module.CupyTable) and sources == ["convert_pieces"]
    back = copy_shape(layout, (1 << 24, SCRATCH[1:3]), (1 << 20, RECV[0:2]))
    assert isinstance(back, Conversion) and back.table == (((1 << 24) + 48, 1 << 20, 48),)
    assert isinstance(copy_shape(layout, (1 << 24, SCRATCH[1:3]), (1 << 20, SCRATCH[4:6])), Rows)
    assert copy_shape(layout, (1 << 24, SCRATCH[0:0]), (1 << 20, RECV[0:0])) is None


def test_launches_go_by_the_multiprocessors(runtime: Runtime) -> None:
    """No more blocks than three for each of them."""
    module = import_module(NAME)
    device = module.CupyDevice(0)
    many = Pieces(tuple((1 << 20, 1 << 24, 1 << 20) for _ in range(9)))
    assert module.CupyTable(device, many, device.copy_pieces)._grid == (3 * 132,)


def test_memory(runtime: Runtime) -> None:
    """Registered, exported and mapped; let go of with its owner; errors are typed."""
    module = import_module(NAME)
    device = module.CupyDevice(0)
    owner = device.register(4096, 100)
    del owner
    gc.collect()
    assert runtime.calls == ["register", "unregister"]
    memory = DeviceMemory(device)
    address, kept = memory.allocate(5000)
    found, mapping = memory.find(memory.address_handle(address + 300))
    assert found == address + 300 and mapping and kept
    del mapping, memory
    clear_all()
    gc.collect()
    assert runtime.calls[-1] == "close"
    with pytest.raises(AlreadyMappedError):
        device.open((4096).to_bytes(64, "little"))
    assert [device.is_capturing(handle) for handle in (1, 12, 13)] == [False, True, True]
    assert module.device_number(address) == 0
    with pytest.raises(DeviceError, match="memory of a device"):
        module.device_number(4096)
    with pytest.raises(DeviceError, match="that other processes can map"):
        device.export(4096)
    with pytest.raises(DeviceError, match="access to another process's memory"):
        device.open(bytes(64))
    with pytest.raises(DeviceMemoryError, match="2000000 bytes"):
        device.allocate(2_000_000)


def test_the_whole_device(runtime: Runtime) -> None:
    """Is waited for; not while a stream is captured."""
    memory = DeviceMemory(import_module(NAME).CupyDevice(0))
    memory.settle()
    assert runtime.calls == ["device"]
    for words in ("no stream that is being captured into a graph", "work that runs"):
        with pytest.raises(DeviceError, match=words):
            memory.settle()


def test_devices(runtime: Runtime) -> None:
    """By names that all processes of the host know."""
    devices = import_module(NAME).CupyDevices()
    assert devices.visible() == ["0000:00:00.0", "0000:01:00.0"]
    devices.select(1)
    assert Device.current == 1
    one = import_module(NAME).CupyDevice(1)
    assert one.bus == "0000:01:00.0" and one.sees("0000:00:00.0") and not one.sees("0000:02:00.0")
