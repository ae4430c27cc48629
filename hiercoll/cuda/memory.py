"""Device memory for plans: copies on streams of their own, ordered after what the caller produced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from struct import Struct

import numpy as np

from hiercoll.cuda.device import Allocation, Device, Event, Stream, Task, copy_shape, reduction_shape
from hiercoll.cuda.mappings import Mapping, mappings_of
from hiercoll.errors import DeviceError, ParameterError
from hiercoll.memory import HANDLE_BYTES, Array, Layout, Reduction, Transfer
from hiercoll.schedule import Region
from hiercoll.schedule.transports import ON_HOST

MOST_HANDLES = 256  # that are remembered
_packed = Struct("<H64s6xQQQQQ")  # bytes of the handle, the handle, offset, and the allocation
assert _packed.size == HANDLE_BYTES


class DeviceMemory:
    """`memory.Memory` on a device.

    Copies out to the host, in from it, on the device, and from each rank of the node have a stream, so that they
    overlap; those of a plan (see `of_plan`) are its own, so that what one plan waits for holds up no other one.
    Plans wait for each copy before what depends on it, so nothing is left under way when a plan has completed, and the
    caller's stream need not wait.
    """

    kind = "cuda"

    def __init__(self, device: Device, plan_of: DeviceMemory | None = None) -> None:
        self.device = device
        self._produced: list[Event] = []  # an event for each stream of the caller's: of its last record
        self._streams: dict[Hashable, Stream] = {}
        # By address, with the number of the allocation.
        self._handles: dict[int, tuple[int, Array]] = plan_of._handles if plan_of is not None else {}
        self._idle: list[Stream] = plan_of._idle if plan_of is not None else []  # streams of plans that were freed
        weakref.finalize(self, _give_back, self._streams, self._idle)

    def of_plan(self) -> DeviceMemory:
        """See `Memory.of_plan`."""
        return DeviceMemory(self.device, self)

    def stream(self, use: Hashable) -> Stream:
        """The stream for a use."""
        if use not in self._streams:
            stream = self._streams[use] = self._idle.pop() if self._idle else self.device.new_stream()
            for event in self._produced:  # of a start that is under way
                stream.wait(event)
        return self._streams[use]

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
            exported, allocation = self.device.export(address)
            packed = _packed.pack(len(exported), exported, address - allocation.base, *allocation)
            handle = np.frombuffer(packed, np.uint8)
            while len(self._handles) >= MOST_HANDLES:
                del self._handles[next(iter(self._handles))]
            self._handles[address] = (number, handle)
        return handle

    def get(self, layout: Layout, handle: Array, source: Region, target: tuple[int, Region], peer: int) -> PeerCopy:
        """See `Memory.get`."""
        return PeerCopy(self, layout, handle, source, target, self.stream(("get", peer)))

    def find(self, handle: Array) -> Mapping:
        """Where the buffer of an address handle lies here, and what keeps it mapped. Raises DeviceError."""
        length, exported, offset, *allocation = _packed.unpack(handle.tobytes())
        if not length:
            raise DeviceError("transport 'peer'", "memory of a rank of the node", "nothing that could be mapped")
        found = mappings_of(self.device).find(exported[:length], Allocation(*allocation))
        return Mapping(found.address + offset, found.owner)

    def copy(self, layout: Layout, source: tuple[int, Region], target: tuple[int, Region]) -> DeviceCopy | None:
        """See `Memory.copy`: one 2-D copy, or one launch over a table of pieces, which converts where types differ."""
        to_host, from_host = target[1].buffer in ON_HOST, source[1].buffer in ON_HOST
        return self.copy_on(self.stream("out" if to_host else "in" if from_host else "within"), layout, source, target)

    def copy_on(
        self, stream: Stream, layout: Layout, source: tuple[int, Region], target: tuple[int, Region]
    ) -> DeviceCopy | None:
        """The same on a stream."""
        shape = copy_shape(layout, source, target)
        return None if shape is None else DeviceCopy(self.device.prepare(shape), stream)

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
        return None if shape is None else DeviceCopy(self.device.prepare(shape), self.stream("within"))

    def settle(self) -> None:
        """See `Memory.settle`."""
        self.device.synchronize()

    def before_messages(self, handles: Iterable[int], direct: bool) -> None:
        """Copies come after what the caller has enqueued on the streams with these handles; so do
        messages, if they are of device memory. Raises ParameterError for streams that are being captured."""
        for index, handle in enumerate(dict.fromkeys(handles)):
            if self.device.is_capturing(handle):
                expected = "one that is not being captured into a graph: MPI would not run again with that"
                raise ParameterError("stream", expected, f"a stream that is, {handle:#x}")
            before = self._produced[index] if index < len(self._produced) else None
            event = self.device.stream_of(handle).record(before)
            self._produced[index:] = [event, *self._produced[index + 1 :]]
            for stream in self._streams.values():
                stream.wait(event)
            if direct:
                event.synchronize()


def _give_back(streams: dict[Hashable, Stream], idle: list[Stream]) -> None:
    idle += streams.values()


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


def _nobody() -> None:
    """No owner."""


class PeerCopy(Transfer):
    """A copy from the buffer of an address handle, which may be of another one at each start."""

    def __init__(
        self,
        memory: DeviceMemory,
        layout: Layout,
        handle: Array,
        source: Region,
        target: tuple[int, Region],
        stream: Stream,
    ) -> None:
        self._memory, self._layout, self._packed = memory, layout, handle
        self._source, self._target, self._stream = source, target, stream
        self._address = 0
        self._copy: DeviceCopy | None = None
        self._owner: object = None  # what keeps the buffer mapped, held while the copy is under way
        self._found: Callable[[], object] = _nobody  # the same, if it is there, of the handle that was last
        self._last = b""

    def start(self) -> None:
        """Enqueue the copy; the buffer has been mapped before."""
        handle = self._packed.tobytes()
        self._owner = self._found() if handle == self._last else None
        if self._owner is None:
            self._look_up(handle)
        if self._copy is not None:
            self._copy.start()

    def _look_up(self, handle: bytes) -> None:
        address, self._owner = self._memory.find(self._packed)
        self._found, self._last = weakref.ref(self._owner), handle
        if self._copy is None or address != self._address:
            self._address = address
            self._copy = self._memory.copy_on(self._stream, self._layout, (address, self._source), self._target)

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
