"""A real GPU, through CuPy. The only place that imports it."""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache, partial
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from hiercoll.cuda.device import Allocation, Conversion, Pairs, Pieces, Rows, Shape, Task, Together
from hiercoll.cuda.kernel import (
    MOST_WORDS,
    PROCESSORS,
    SOURCE,
    SPAN,
    conversion_source,
    launch_shape,
    reduction_source,
    row_launch_shape,
    row_source,
    span_table,
)
from hiercoll.errors import AlreadyMappedError, DeviceError, DeviceMemoryError
from hiercoll.memory import Reduction

runtime = cupy.cuda.runtime
OF_DEVICE = (2, 3)  # cudaMemoryTypeDevice, cudaMemoryTypeManaged
ANY = 4  # cudaMemcpyDefault: the direction is inferred from the addresses
ALREADY_MAPPED = 208  # cudaErrorAlreadyMapped
OF_CAPTURES = range(900, 909)  # cudaErrorStreamCaptureUnsupported and the like
DEFAULTS = (0, 1, 2)  # handles of streams that each device has of its own: the current one's is meant
AS_IT_IS = nullcontext()
WORTH_A_TABLE = 64  # bytes of a row: the kernel over a table copies bytes that are off in words of 4


def device_number(address: int) -> int:
    """The device whose memory is at ``address``. Raises DeviceError."""
    try:
        found = runtime.pointerGetAttributes(address)
    except runtime.CUDARuntimeError as error:
        raise DeviceError("device array", "memory that the driver knows", f"{address:#x} ({error})") from None
    if found.type not in OF_DEVICE:
        raise DeviceError("device array", "memory of a device", f"{address:#x}, which is the host's or nobody's")
    return int(found.device)


class CupyArrays:
    """`measuring.Arrays` on the current device."""

    kind = "cuda"

    def put(self, values: npt.ArrayLike) -> cupy.ndarray:
        """See `measuring.Arrays`."""
        return cupy.asarray(values)

    def fill(self, array: cupy.ndarray, values: npt.NDArray[Any]) -> None:
        """See `measuring.Arrays`."""
        array.set(values)

    def get(self, array: cupy.ndarray) -> npt.NDArray[Any]:
        """See `measuring.Arrays`."""
        return cupy.asnumpy(array)


class CupyDevices:
    """`cuda.device.Devices`."""

    def visible(self) -> list[str]:
        """PCI bus numbers."""
        try:
            return [runtime.deviceGetPCIBusId(number) for number in range(runtime.getDeviceCount())]
        except runtime.CUDARuntimeError as error:
            raise DeviceError("devices", "a CUDA driver with a device", str(error)) from None

    def current(self) -> int:
        """The number of this thread's current device."""
        return int(runtime.getDevice())

    def select(self, number: int) -> None:
        """For CuPy, and for the CUDA runtime of this thread."""
        cupy.cuda.Device(number).use()


class CupyDevice:
    """`cuda.device.Device` for the GPU with this number."""

    def __init__(self, number: int) -> None:
        self.ordinal, self.name = number, f"cuda:{number}"
        self._pool = cupy.cuda.MemoryPool()  # of cudaMalloc, whatever the program uses: what it gives can be exported

    @property
    def bus(self) -> str:
        """Its PCI address."""
        return CupyDevices().visible()[self.ordinal]

    def sees(self, bus: str) -> bool:
        """Whether a device of this process has that PCI address: not, if a control group hides it."""
        return bus in CupyDevices().visible()

    def current(self) -> AbstractContextManager[object]:
        """A context in which this is the current device: in most programs it is."""
        return AS_IT_IS if runtime.getDevice() == self.ordinal else cupy.cuda.Device(self.ordinal)

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Memory of a pool of this device's own. CuPy's pools keep what is freed for the stream that was current when
        it was allocated: here that is one of ours, whatever the caller's is."""
        with self.current(), self.uploads:
            try:
                memory = self._pool.malloc(max(nbytes, 1))
            except cupy.cuda.memory.OutOfMemoryError as error:
                raise DeviceMemoryError(f"memory of {self.name}", f"{nbytes} bytes", str(error)) from None
        return int(memory.ptr), memory

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        """Memory of CuPy's pinned pool."""
        with self.current():
            try:
                memory = cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
            except (runtime.CUDARuntimeError, MemoryError) as error:
                raise DeviceMemoryError("pinned memory of the host", f"{nbytes} bytes", str(error)) from None
        return int(memory.ptr), memory

    def register(self, address: int, nbytes: int) -> object:
        """cudaHostRegister: the device can then copy from and to it on its own."""
        with self.current():
            try:
                runtime.hostRegister(address, nbytes, 0)
            except runtime.CUDARuntimeError as error:
                raise DeviceMemoryError("pinned memory of the host", f"{nbytes} bytes", str(error)) from None
        owner = _Registered()
        weakref.finalize(owner, partial(runtime.hostUnregister, address))
        return owner

    def number(self, address: int) -> int:
        """The driver's number of the buffer."""
        number, pointer = ctypes.c_uint64(), ctypes.c_uint64(address)
        with self.current():
            try:
                _check(_driver().cuPointerGetAttribute(ctypes.byref(number), BUFFER_ID, pointer))
            except OSError as error:
                raise DeviceError("transport 'peer'", "memory of a device", str(error)) from None
        return number.value

    def export(self, address: int) -> tuple[bytes, Allocation]:
        """A CUDA IPC handle; it stands for the whole allocation, of which the driver knows begin and size."""
        base, size, pointer = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(address)
        with self.current():
            try:
                _check(_driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer))
                handle = bytes(runtime.ipcGetMemHandle(base.value))
            except (runtime.CUDARuntimeError, OSError) as error:
                expected = "device memory that other processes can map (cudaMalloc)"
                raise DeviceError("transport 'peer'", expected, str(error)) from None
        return handle, Allocation(process_number(), base.value, size.value, self.number(address))

    def open(self, handle: bytes) -> tuple[int, object]:
        """cudaIpcOpenMemHandle."""
        with self.current():
            try:
                address = int(runtime.ipcOpenMemHandle(handle))
            except runtime.CUDARuntimeError as error:
                kind = AlreadyMappedError if error.status == ALREADY_MAPPED else DeviceError
                raise kind("transport 'peer'", "access to another process's memory", str(error)) from None
        owner = _Registered()
        weakref.finalize(owner, self._close, address)
        return address, owner

    def _close(self, address: int) -> None:
        with self.current():
            runtime.ipcCloseMemHandle(address)

    def new_stream(self) -> CupyStream:
        """A non-blocking stream."""
        with self.current():
            own = cupy.cuda.Stream(non_blocking=True)
        return CupyStream(self, own.ptr, own)

    def stream_of(self, handle: int) -> CupyStream:
        """A stream of the caller's."""
        return CupyStream(self, handle)

    def is_capturing(self, handle: int) -> bool:
        """See `Device.is_capturing`."""
        with self.current():
            try:
                return bool(runtime.streamIsCapturing(handle))
            except runtime.CUDARuntimeError:  # of the legacy default stream, while another one is captured
                return True

    def synchronize(self) -> None:
        """cudaDeviceSynchronize."""
        with self.current():
            try:
                runtime.deviceSynchronize()
            except runtime.CUDARuntimeError as error:
                captures = error.status in OF_CAPTURES
                expected = "no stream that is being captured into a graph" if captures else "work that runs"
                raise DeviceError("device", expected, str(error)) from None

    def prepare(self, shape: Shape) -> Task:
        """See `Device.prepare`."""
        if isinstance(shape, Rows):
            return self._prepare_rows(shape)
        if isinstance(shape, Together):
            return CupyRows(*shape.rows)
        if isinstance(shape, Pieces):
            return CupyTable(self, shape, self.copy_pieces)
        if isinstance(shape, Conversion):
            return CupyTable(self, shape, self.convert_pieces(shape.source, shape.target))
        return CupyTable(self, shape, self.reduce_pieces(shape.how))

    def _prepare_rows(self, rows: Rows) -> Task:
        """By a copy engine, or by a kernel: over a table, where bytes lie so that words would be tiny."""
        if rows.is_for_engine:
            return CupyRows(rows)
        if (rows.word >= 4 or rows.length < WORTH_A_TABLE) and rows.length // rows.word * rows.number <= MOST_WORDS:
            return CupyRowKernel(self, rows)
        return CupyTable(self, rows.pieces(), self.copy_pieces)

    @cached_property
    def processors(self) -> int:
        """How many multiprocessors it has."""
        return cupy.cuda.Device(self.ordinal).attributes.get("MultiProcessorCount", PROCESSORS)

    @cached_property
    def uploads(self) -> cupy.cuda.Stream:
        """A stream for what plans need on the device: none of that on a stream of the caller's."""
        with self.current():
            return cupy.cuda.Stream(non_blocking=True)

    @cached_property
    def copy_pieces(self) -> cupy.RawKernel:
        """The kernel."""
        return cupy.RawKernel(SOURCE, "copy_pieces")

    def copy_rows(self, word: int) -> cupy.RawKernel:
        """The kernel for words of so many bytes; CuPy compiles it once."""
        return cupy.RawKernel(row_source(word), "copy_rows")

    def reduce_pieces(self, how: Reduction) -> cupy.RawKernel:
        """The kernel for a type and an operation; CuPy compiles it once."""
        return cupy.RawKernel(reduction_source(how), "reduce_pieces")

    def convert_pieces(self, source: np.dtype[Any], target: np.dtype[Any]) -> cupy.RawKernel:
        """The kernel for two types; CuPy compiles it once."""
        return cupy.RawKernel(conversion_source(source, target), "convert_pieces")


@lru_cache(maxsize=1)
def _number_of(pid: int) -> int:
    return int.from_bytes(os.urandom(8), "little")


def process_number() -> int:
    """A number that no other process has: those of containers may have the same pid."""
    return _number_of(os.getpid())


@lru_cache(maxsize=1)
def _driver() -> Any:
    """The driver's own interface, for what the runtime's does not tell. Raises OSError."""
    return ctypes.CDLL("libcuda.so.1")


BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID


def _check(status: int) -> None:
    """Raise for a status of the driver that is no success."""
    if status:
        raise OSError(f"CUDA driver error {status}")


class _Registered:
    """What keeps memory registered, or mapped."""


class CupyStream:
    """`cuda.device.Stream`: by its handle, since CuPy has no lasting way to wrap a stream of the
    caller's; ``own`` is CuPy's object of one that was made here, which kernels need.

    Whatever device is current, CUDA takes copies, and events of the stream's device, on any stream (CUDA C++
    Programming Guide, "Stream and Event Behavior"); not kernels, and a default stream is the current device's."""

    def __init__(self, device: CupyDevice, handle: int, own: cupy.cuda.Stream | None = None) -> None:
        self.device, self.handle, self.own = device, handle, own
        self._is_default = handle in DEFAULTS

    def record(self, event: CupyEvent | None = None) -> CupyEvent:
        """See `Stream.record`."""
        if event is not None and not self._is_default:
            runtime.eventRecord(event.event.ptr, self.handle)
            return event
        with self.device.current():
            event = event or CupyEvent()
            runtime.eventRecord(event.event.ptr, self.handle)
        return event

    def wait(self, event: CupyEvent) -> None:
        """See `Stream.wait`; of a stream of the device's own."""
        runtime.streamWaitEvent(self.handle, event.event.ptr)


class CupyEvent:
    """`cuda.device.Event`."""

    def __init__(self) -> None:
        self.event = cupy.cuda.Event(block=False, disable_timing=True)
        self.synchronize = self.event.synchronize  # see `Event.synchronize`

    def done(self) -> bool:
        """See `Event.done`."""
        return bool(self.event.done)


class CupyRowKernel:
    """One launch that copies evenly spaced rows."""

    def __init__(self, device: CupyDevice, rows: Rows) -> None:
        self._device, self._kernel = device, device.copy_rows(rows.word)
        each = rows.length // rows.word
        self._grid, self._block = row_launch_shape(each * rows.number, device.processors)
        ends = (rows.source, rows.source_step, rows.target, rows.target_step)
        self._given = (*map(np.uint64, ends), np.uint32(each), np.uint32(each * rows.number))

    def enqueue(self, stream: CupyStream) -> None:
        """See `cuda.device.Task`; on a stream of the device's own."""
        assert stream.own is not None
        with self._device.current(), stream.own:
            self._kernel(self._grid, self._block, self._given)


class CupyRows:
    """Copies by a copy engine, each of one piece or of evenly spaced ones."""

    def __init__(self, *shapes: Rows) -> None:
        self._shapes = shapes

    def enqueue(self, stream: CupyStream) -> None:
        """See `cuda.device.Task`."""
        handle = stream.handle
        for rows in self._shapes:
            if rows.number == 1:
                runtime.memcpyAsync(rows.target, rows.source, rows.length, ANY, handle)
            else:
                steps = (rows.target, rows.target_step, rows.source, rows.source_step)
                runtime.memcpy2DAsync(*steps, rows.length, rows.number, ANY, handle)


class CupyTable:
    """One launch of a kernel over a table that lies on the device."""

    def __init__(self, device: CupyDevice, shape: Pieces | Conversion | Pairs, kernel: cupy.RawKernel) -> None:
        self._device, self._kernel = device, kernel
        table = span_table(shape.table)
        self._grid, self._block = launch_shape(int(table[-1, -1]), device.processors)
        self._numbers = np.uint64(len(shape.table)), np.uint64(SPAN)
        with device.current(), device.uploads:
            self._table = cupy.asarray(table)
            device.uploads.synchronize()  # the table is there before the first launch

    def enqueue(self, stream: CupyStream) -> None:
        """See `cuda.device.Task`; on a stream of the device's own."""
        assert stream.own is not None
        with self._device.current(), stream.own:
            self._kernel(self._grid, self._block, (self._table, *self._numbers))
