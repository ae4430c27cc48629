"""Device memory for plans: copies on streams of their own, ordered after what the caller produced."""

from __future__ import annotations

from collections import OrderedDict
from struct import Struct
from typing import NamedTuple

import numpy as np

from hiercoll.cuda.device import Device, Event, Stream, Task, copy_shape, reduction_shape
from hiercoll.errors import DeviceError
from hiercoll.memory import HANDLE_BYTES, Array, Layout, Reduction, Transfer
from hiercoll.schedule import Region
from hiercoll.schedule.transports import ON_HOST

MOST_HANDLES = 256  # that are remembered
MAPPINGS = 64  # allocations of other processes that are kept mapped
_packed = Struct("<H64s6xQQ")  # bytes of the handle, the handle, offset, number
assert _packed.size == HANDLE_BYTES


class DeviceMemory:
    """`memory.Memory` on a device.

    Copies out to the host, in from it, and on the device each have a stream, so that
    they overlap. Plans wait for each copy before what depends on it, so nothing is left
    under way when a plan has completed, and the caller's stream need not wait.
    """

    kind = "cuda"

    def __init__(self, device: Device) -> None:
        self.device = device
        self._produced: Event | None = None  # one event for all calls: a stream waits for its last record
        self._handles: dict[int, tuple[int, Array]] = {}  # by address, with the number of the allocation
        self._mapped: OrderedDict[tuple[bytes, int], Mapping] = OrderedDict()  # used last at the end
        self._out, self._in, self._within = (device.new_stream() for _ in range(3))

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Device memory. Raises DeviceMemoryError."""
        return self.device.allocate(nbytes)

    def allocate_host(self, nbytes: int) -> tuple[int, object]:
        """Pinned host memory. Raises DeviceMemoryError."""
        return self.device.allocate_pinned(nbytes)

    def share(self, address: int, nbytes: int) -> object:
        """Let the device reach the node's buffer on the host."""
        return self.device.register(address, nbytes)

    def address_handle(self, address: int) -> Array:
        """See `Memory.address_handle`."""
        number, (known, handle) = self.device.number(address), self._handles.get(address, (-1, None))
        if handle is None or known != number:
            exported, offset = self.device.export(address)
            handle = np.frombuffer(_packed.pack(len(exported), exported, offset, number), np.uint8)
            while len(self._handles) >= MOST_HANDLES:
                del self._handles[next(iter(self._handles))]
            self._handles[address] = (number, handle)
        return handle

    def get(self, layout: Layout, handle: Array, source: Region, target: tuple[int, Region]) -> PeerCopy:
        """See `Memory.get`."""
        return PeerCopy(self, layout, handle, source, target)

    def find(self, handle: Array) -> tuple[int, object]:
        """Where the buffer of an address handle lies here, and what keeps it mapped. Raises DeviceError."""
        length, exported, offset, number = _packed.unpack(handle.tobytes())
        if not length:
            raise DeviceError("transport 'peer'", "memory of a rank of the node", "nothing that could be mapped")
        mapping = self.mapping(exported[:length], number)
        return mapping.address + offset, mapping.owner

    def mapping(self, handle: bytes, number: int) -> Mapping:
        """Another process's allocation as mapped here. An older allocation with the same handle
        is gone, as its number shows: memory is given out again at addresses used before."""
        key = (handle, number)
        if key not in self._mapped:
            for stale in [known for known in self._mapped if known[0] == handle]:
                del self._mapped[stale]
            self._mapped[key] = Mapping(*self.device.open(handle))
            if len(self._mapped) > MAPPINGS:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(key)
        return self._mapped[key]

    def copy(self, layout: Layout, source: tuple[int, Region], target: tuple[int, Region]) -> DeviceCopy | None:
        """See `Memory.copy`: one 2-D copy, or one launch over a table of pieces."""
        shape = copy_shape(layout, source, target)
        if shape is None:
            return None
        from_host, to_host = source[1].buffer in ON_HOST, target[1].buffer in ON_HOST
        stream = self._out if to_host else self._in if from_host else self._within
        return DeviceCopy(self.device.prepare(shape), stream)

    def reduce(
        self,
        layout: Layout,
        how: Reduction,
        left: tuple[int, Region],
        right: tuple[int, Region],
        target: tuple[int, Region],
    ) -> DeviceCopy | None:
        """See `Memory.reduce`: one launch. Raises DeviceError for types without a kernel."""
        shape = reduction_shape(layout, how, left, right, target)
        return None if shape is None else DeviceCopy(self.device.prepare(shape), self._within)

    def before_messages(self, handle: int, direct: bool) -> None:
        """Copies come after what the caller has enqueued on the stream with that handle; so do
        messages, if they are of device memory."""
        self._produced = event = self.device.stream_of(handle).record(self._produced)
        for stream in (self._out, self._in, self._within):
            stream.wait(event)
        if direct:
            event.synchronize()


class DeviceCopy(Transfer):
    """A copy, or reduction, that goes on in the background."""

    def __init__(self, task: Task, stream: Stream) -> None:
        self._task, self._stream = task, stream
        self._event: Event | None = None

    def start(self) -> None:
        """Enqueue it."""
        self._task.enqueue(self._stream)
        self._event = self._stream.record(self._event)

    def done(self) -> bool:
        """Whether it is complete."""
        return self._event is None or self._event.done()

    def wait(self) -> None:
        """Until it is complete."""
        if self._event is not None:
            self._event.synchronize()


class Mapping(NamedTuple):
    """Memory of another process: its address here, and what keeps it mapped."""

    address: int
    owner: object


class PeerCopy(Transfer):
    """A copy from the buffer of an address handle, which may be of another one at each start."""

    def __init__(
        self, memory: DeviceMemory, layout: Layout, handle: Array, source: Region, target: tuple[int, Region]
    ) -> None:
        self._memory, self._layout, self._packed = memory, layout, handle
        self._source, self._target = source, target
        self._address = 0
        self._copy: DeviceCopy | None = None
        self._owner: object = None  # what keeps the buffer mapped, held while the copy is under way

    def start(self) -> None:
        """Map the buffer, if it is not, and enqueue the copy."""
        address, self._owner = self._memory.find(self._packed)
        if self._copy is None or address != self._address:
            self._address = address
            self._copy = self._memory.copy(self._layout, (address, self._source), self._target)
        if self._copy is not None:
            self._copy.start()

    def done(self) -> bool:
        """Whether it is complete."""
        if self._copy is not None and not self._copy.done():
            return False
        self._owner = None
        return True

    def wait(self) -> None:
        """Until it is complete."""
        if self._copy is not None:
            self._copy.wait()
        self._owner = None
