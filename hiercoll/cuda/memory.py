"""Device memory for plans: copies on streams of their own, ordered after what the caller produced."""

from __future__ import annotations

from hiercoll.buffers import BlockLayout, Transfer
from hiercoll.cuda.device import Copy, Device, Event, Stream, copy_shape
from hiercoll.schedule import Region
from hiercoll.transports import ON_HOST


class DeviceMemory:
    """`buffers.Memory` on a device.

    Copies out to the host, in from it, and on the device each have a stream, so that
    they overlap. Plans wait for each copy before what depends on it, so nothing is left
    under way when a plan has completed, and the caller's stream need not wait.
    """

    kind = "cuda"

    def __init__(self, device: Device) -> None:
        self.device = device
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

    def copy(self, layout: BlockLayout, source: tuple[int, Region], target: tuple[int, Region]) -> Transfer | None:
        """See `Memory.copy`: one 2-D copy, or one launch over a table of pieces."""
        shape = copy_shape(layout, source, target)
        if shape is None:
            return None
        from_host, to_host = source[1].buffer in ON_HOST, target[1].buffer in ON_HOST
        stream = self._out if to_host else self._in if from_host else self._within
        return DeviceCopy(self.device.prepare(shape), stream)

    def before_messages(self, handle: int, direct: bool) -> None:
        """Copies come after what the caller has enqueued on the stream with that handle; so do
        messages, if they are of device memory."""
        event = self.device.stream_of(handle).record()
        for stream in (self._out, self._in, self._within):
            stream.wait(event)
        if direct:
            event.synchronize()


class DeviceCopy(Transfer):
    """A copy that goes on in the background."""

    def __init__(self, copy: Copy, stream: Stream) -> None:
        self._copy, self._stream = copy, stream
        self._event: Event | None = None

    def start(self) -> None:
        """Enqueue it."""
        self._copy.enqueue(self._stream)
        self._event = self._stream.record(self._event)

    def done(self) -> bool:
        """Whether it is complete."""
        return self._event is None or self._event.done()

    def wait(self) -> None:
        """Until it is complete."""
        if self._event is not None:
            self._event.synchronize()
