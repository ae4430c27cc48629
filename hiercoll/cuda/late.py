"""A simulated device for tests: as late, or as early, as CUDA's rules permit.

Its memory cannot be touched by the host (its pages are mapped without access, so a
stray read ends the process), its streams run nothing until they must, and what must run
runs alone: whoever forgets to wait for something finds old data. The rules (CUDA C++
Programming Guide, "Asynchronous Concurrent Execution"; Runtime API, "Event Management"):

- work of one stream runs in order, work of different streams in any order;
- an event is complete when all work enqueued before its last record is; a stream that
  waits for an event waits for the record that was the last when it began to wait;
- work reads and writes memory when it runs, between its call and its completion;
- (Driver API, "cuIpcOpenMemHandle") memory that was freed must not be used by those who have mapped it: here that ends
  their process; and what overlaps an older mapping of the same process cannot be mapped.
"""

from __future__ import annotations

import ctypes
import os
import random
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container
from copy import copy
from functools import partial
from struct import Struct
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hiercoll.cuda.device import Allocation, Conversion, Pairs, Pieces, Rows, Shape, Together
from hiercoll.errors import AlreadyMappedError, DeviceError, DeviceMemoryError
from hiercoll.memory import OPERATIONS, convert

Work: TypeAlias = "Callable[[], None]"
Order: TypeAlias = Literal["late", "early", "random"]
PAGE = 4096
PROT_NONE, PROT_ACCESS, MAP_SHARED = 0, 3, 1
_exported = Struct("<16sIIQQQQQ")  # bus of the device, process and file, its inode, and the allocation

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class LateDevice:
    """`cuda.device.Device` on host memory.

    ``order``: when enqueued work runs: only when somebody waits for it, at once (in so far
    as what its stream waits for has run), or at random by ``seed``. ``aware``: MPI may be
    given its addresses, as a CUDA-aware library takes a real device's. ``limit``: bytes of
    device memory. ``private``: other processes cannot map what is allocated from now on.
    ``bus``: its name on the host; ``hidden``: names of devices whose memory this process
    cannot map, as where control groups give each process a device of its own.
    ``counts``: copies, launches, synchronisations, mappings so far.
    """

    def __init__(self, *, order: Order = "late", seed: int = 0, aware: bool = False, limit: int = 1 << 30) -> None:
        self.name = f"a simulated device ({order})"
        self.order, self.aware, self.limit, self.private = order, aware, limit, False
        self.bus = "0000:00:00.0"
        self.hidden: Container[str] = ()
        self.choice = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.used = 0
        self._streams: dict[int, LateStream] = {}
        self._starts: list[int] = []  # addresses of what the device can reach, sorted
        self._reachable: dict[int, tuple[int, int]] = {}  # size, and how far on it can be accessed, by address
        self._files: dict[int, tuple[int, Allocation]] = {}  # and the allocation, by its address
        self._left: list[tuple[int, int]] = []  # where memory was freed last, and how much: it is given out again there
        self._process, self._numbers = int.from_bytes(os.urandom(8), "little"), 0
        self._mapped: dict[int, tuple[int, Allocation]] = {}  # inode and allocation of what is mapped, by address
        self.capturing: set[int] = set()  # streams of the caller's, by their handles

    def sees(self, bus: str) -> bool:
        """See `Device.sees`."""
        return bus not in self.hidden

    # ---- memory

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Pages that the host cannot touch, and the same ones where the device does."""
        size = -(-max(nbytes, 1) // PAGE) * PAGE
        if self.used + size > self.limit:
            raise DeviceMemoryError(f"device memory ({self.name})", f"{nbytes} bytes", f"{self.limit - self.used} left")
        file = os.memfd_create("late device")
        os.ftruncate(file, size)
        outside, inside = self._map(file, size, next((at for at, room in self._left if size <= room), None))
        ctypes.memset(inside, 0xA5, size)
        self.used += size
        self._numbers += 1
        if not self.private:
            self._files[outside] = file, Allocation(self._process, outside, size, self._numbers)
        owner = _Owner()
        weakref.finalize(owner, self._free, file, outside, inside, size)
        return outside, owner

    def _map(self, file: int, size: int, at: int | None = None) -> tuple[int, int]:
        """Where the host, and the device, see a file's pages; the host ``at`` that place if it is free."""
        outside = int(_libc.mmap(at, size, PROT_ACCESS if self.aware else PROT_NONE, MAP_SHARED, file, 0))
        inside = int(_libc.mmap(None, size, PROT_ACCESS, MAP_SHARED, file, 0))
        self._enter(outside, size, inside - outside)
        return outside, inside

    def _free(self, file: int, outside: int, inside: int, size: int) -> None:
        self.used -= size
        self._files.pop(outside, None)
        self._left = [(outside, size), *self._left[:7]]
        os.ftruncate(file, 0)  # whoever still reads or writes there ends
        os.close(file)
        self._unmap(outside, inside, size)

    def _unmap(self, outside: int, inside: int, size: int) -> None:
        self._leave(outside)
        for address in (outside, inside):
            _libc.munmap(address, size)

    def number(self, address: int) -> int:
        """See `Device.number`; of what other processes can map."""
        start = self._start(address)
        if start not in self._files:
            raise DeviceError("address", "device memory that other processes can map", f"{address:#x}")
        return self._files[start][1].number

    def export(self, address: int) -> tuple[bytes, Allocation]:
        """The file behind an allocation, as other processes of this user can open it; one for each allocation."""
        self.number(address)
        file, allocation = self._files[self._start(address)]
        return _exported.pack(self.bus.encode(), os.getpid(), file, os.fstat(file).st_ino, *allocation), allocation

    def open(self, handle: bytes) -> tuple[int, object]:
        """Map the file. Raises DeviceError for memory that is gone, AlreadyMappedError."""
        packed, process, number, inode, *rest = _exported.unpack(handle)
        bus, allocation = packed.rstrip(b"\0").decode(), Allocation(*rest)
        if not self.sees(bus):
            raise DeviceError("handle", "memory of a device that is not hidden", f"that of {bus}")
        if any(known != inode and allocation.overlaps(other) for known, other in self._mapped.values()):
            raise AlreadyMappedError("handle", "memory apart from all that is mapped", "memory given out again")
        try:
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        except OSError as error:
            raise DeviceError("handle", "memory of a running process", str(error)) from None
        if os.fstat(file).st_ino != inode:
            os.close(file)
            raise DeviceError("handle", "memory of a running process", "memory that was freed")
        self.counts["mappings"] += 1
        outside, inside = self._map(file, allocation.size)
        os.close(file)
        self._mapped[outside] = inode, allocation
        owner = _Owner()
        weakref.finalize(owner, self._close, outside, inside, allocation.size)
        return outside, owner

    def _close(self, outside: int, inside: int, size: int) -> None:
        del self._mapped[outside]
        self._unmap(outside, inside, size)

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        """Host memory."""
        owner = np.full(nbytes + 64, 0xA5, dtype=np.uint8)
        address = -(-owner.ctypes.data // 64) * 64
        self._enter(address, nbytes, 0)
        weakref.finalize(owner, self._leave, address)
        return address, owner

    def register(self, address: int, nbytes: int) -> object:
        """See `Device.register`."""
        if not nbytes:
            raise DeviceMemoryError("pinned memory of the host", "more than 0 bytes, as CUDA does", "0")
        self._enter(address, nbytes, 0)
        owner = _Owner()
        weakref.finalize(owner, self._leave, address)
        return owner

    def _enter(self, address: int, size: int, shift: int) -> None:
        self._reachable[address] = (size, shift)
        self._starts = sorted(self._reachable)

    def _leave(self, address: int) -> None:
        self._reachable.pop(address, None)
        self._starts = sorted(self._reachable)

    def _start(self, address: int) -> int:
        """Where what the device can reach, and may hold ``address``, begins."""
        at = bisect_right(self._starts, address) - 1
        return self._starts[at] if at >= 0 else 0

    def view(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes as the device sees them. Raises DeviceError for what it cannot reach."""
        start = self._start(address)
        size, shift = self._reachable.get(start, (0, 0))
        if address + nbytes > start + size:
            raise DeviceError("address", "device memory, or pinned memory of the host", f"{address:#x}, {nbytes} bytes")
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address + shift))

    # ---- work

    def new_stream(self) -> LateStream:
        """A stream that nobody else knows."""
        return LateStream(self)

    def stream_of(self, handle: int) -> LateStream:
        """The stream with this number."""
        return self._streams.setdefault(handle, LateStream(self))

    def is_capturing(self, handle: int) -> bool:
        """See `Device.is_capturing`."""
        return handle in self.capturing

    def synchronize(self) -> None:
        """See `Device.synchronize`; of the caller's streams."""
        if self.capturing:
            raise DeviceError("device", "no stream that is being captured into a graph", "one that is")
        for stream in self._streams.values():
            stream.synchronize()

    def prepare(self, shape: Shape) -> LateTask:
        """See `Device.prepare`."""
        return LateTask(self, shape)

    # ---- arrays

    def array(self, values: npt.NDArray[Any], stream: int = 1) -> LateArray:
        """A device array whose values come late, on the stream with this number."""
        made = LateArray(self, values.shape, values.dtype, stream)
        made.fill(values)
        return made


class _Owner:
    """What keeps memory known to the device."""


class LateStream:
    """Work that waits until it must run."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.work: list[Work | None] = []
        self.ran = 0

    def enqueue(self, work: Work) -> None:
        """Add work; whether it runs now is the device's ``order``."""
        self.work.append(work)
        order, choice = self.device.order, self.device.choice
        if order == "early" or (order == "random" and choice.random() < 0.5):
            self.run(len(self.work) if order == "early" else choice.randint(self.ran, len(self.work)))

    def run(self, end: int) -> None:
        """Let the first ``end`` pieces of work run."""
        while self.ran < end:
            work = self.work[self.ran]
            self.work[self.ran] = None  # what it holds may be freed
            self.ran += 1
            assert work is not None
            work()

    def record(self, event: LateEvent | None = None) -> LateEvent:
        """See `Stream.record`."""
        event = event or LateEvent(self)
        event.stream, event.position = self, len(self.work)
        return event

    def wait(self, event: LateEvent) -> None:
        """See `Stream.wait`."""
        self.enqueue(partial(event.stream.run, event.position))

    def synchronize(self) -> None:
        """Wait for all of it."""
        self.device.counts["synchronisations"] += 1
        self.run(len(self.work))


class LateEvent:
    """A point in a stream."""

    def __init__(self, stream: LateStream) -> None:
        self.stream, self.position = stream, 0

    def done(self) -> bool:
        """Seldom at once; whoever asks again and again makes the work run in the end."""
        if self.stream.ran < self.position and self.stream.device.choice.random() < 0.3:
            self.stream.run(self.position)
        return self.stream.ran >= self.position

    def synchronize(self) -> None:
        """Let all work before it run."""
        self.stream.device.counts["synchronisations"] += 1
        self.stream.run(self.position)


class LateTask:
    """A copy or reduction that reads and writes when it runs."""

    def __init__(self, device: LateDevice, shape: Shape) -> None:
        self._device, self._shape = device, shape

    def enqueue(self, stream: LateStream) -> None:
        """See `cuda.device.Task`."""
        self._device.counts["copies" if isinstance(self._shape, Rows | Together) else "launches"] += 1
        stream.enqueue(self._run)

    def _run(self) -> None:
        shape, view = self._shape, self._device.view
        if isinstance(shape, Pairs):
            operation, dtype = OPERATIONS[shape.how.operation], shape.how.dtype
            for left, right, result, length in shape.table:
                ends = (view(address, length).view(dtype) for address in (left, right))
                operation(*ends, out=view(result, length).view(dtype))
            return
        if isinstance(shape, Conversion):
            for source, target, length in shape.table:
                read = view(source, length // shape.target.itemsize * shape.source.itemsize).view(shape.source)
                convert([(read, view(target, length).view(shape.target))])
            return
        if isinstance(shape, Pieces):
            table = shape.table
        else:
            parts = shape.rows if isinstance(shape, Together) else (shape,)
            table = tuple(piece for rows in parts for piece in rows.pieces().table)
        for source, target, length in table:
            view(target, length)[:] = view(source, length)


class LateArray:
    """A contiguous array in the device's memory, produced on a stream of the caller's."""

    def __init__(self, device: LateDevice, shape: tuple[int, ...], dtype: npt.DTypeLike, stream: int = 1) -> None:
        self.device, self.shape, self.dtype, self.stream = device, shape, np.dtype(dtype), stream
        self.nbytes = int(np.prod(shape, dtype=int)) * self.dtype.itemsize
        self.address, self._owner = device.allocate(self.nbytes)
        self.strides: tuple[int, ...] | None = None

    def transpose(self, axes: tuple[int, ...]) -> LateArray:
        """A view of an array in C's order."""
        view, strides = copy(self), np.empty(self.shape, np.dtype(f"V{self.dtype.itemsize}")).strides
        view.shape, view.strides = (tuple(each[axis] for axis in axes) for each in (self.shape, strides))
        return view

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.nbytes else 0, False),
            "version": 3,
            "strides": self.strides,
            "stream": self.stream,
        }

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        """What makes arrays of this kind, as the array API standard has it."""
        return SimpleNamespace(empty=lambda shape, dtype: LateArray(self.device, shape, dtype, self.stream))

    def fill(self, values: npt.NDArray[Any]) -> None:
        """A kernel on the array's stream that writes ``values``."""
        data = np.frombuffer(values.tobytes(), np.uint8)
        self.device.counts["launches"] += 1
        self.device.stream_of(self.stream).enqueue(partial(self._write, data))

    def _write(self, data: npt.NDArray[np.uint8]) -> None:
        self.device.view(self.address, self.nbytes)[:] = data

    def get(self) -> npt.NDArray[Any]:
        """The values, as work on the array's stream sees them."""
        self.device.stream_of(self.stream).synchronize()
        values: npt.NDArray[Any] = self.device.view(self.address, self.nbytes).copy()
        shaped: npt.NDArray[Any] = np.ndarray(self.shape, self.dtype, values, strides=self.strides)
        return shaped
