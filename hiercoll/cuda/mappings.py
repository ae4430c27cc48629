"""Device memory of other processes of the host, as it is mapped into this one (CUDA IPC).

One cache for the whole process, whatever communicators ask: two mappings of memory that overlaps are an error in CUDA.
An allocation is known by its process, its place there and the driver's number of it, not by the bytes of its handle:
CUDA may give another handle for memory that was given out again at the same address, and the old mapping then stands in
the way of the new one.

A mapping ends when a newer allocation of the same process overlaps it, when others push it out of the cache, when
`Mappings.clear` is called (`hiercoll.cuda.unmap`), or with the process; and not before the last copy from it is
complete. Until then CUDA leaves open what happens if the other process frees the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

from hiercoll.cuda.device import Allocation, Device
from hiercoll.errors import AlreadyMappedError

MOST, MOST_BYTES = 256, 256 << 30  # allocations, and bytes of them, that stay mapped per device


class Mapping(NamedTuple):
    """Memory of another process: its address here, and what keeps it mapped."""

    address: int
    owner: object


class Mappings:
    """What a device of this process has mapped. Threads may share it."""

    def __init__(self, device: Device, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._device, self._most, self._most_bytes = ref(device), most, most_bytes
        self._known: OrderedDict[Allocation, Mapping] = OrderedDict()  # used last at the end
        self._lock = RLock()

    def find(self, handle: bytes, allocation: Allocation) -> Mapping:
        """An allocation as it is mapped here; it is mapped if it is not. Raises DeviceError."""
        with self._lock:
            if allocation not in self._known:
                for other in [each for each in self._known if each.overlaps(allocation)]:
                    del self._known[other]  # is gone: its memory was given out again
                self._known[allocation] = self._mapped(handle, allocation.process)
                self._shrink()
            self._known.move_to_end(allocation)
            return self._known[allocation]

    def clear(self) -> None:
        """End all mappings that no copy is under way from."""
        with self._lock:
            self._known.clear()

    def _mapped(self, handle: bytes, process: int) -> Mapping:
        device = self._device()
        assert device is not None  # else nobody could ask
        try:
            return Mapping(*device.open(handle))
        except AlreadyMappedError:  # by a mapping whose place CUDA sees otherwise
            for other in [each for each in self._known if each.process == process]:
                del self._known[other]
            return Mapping(*device.open(handle))

    def _shrink(self) -> None:
        while len(self._known) > self._most or (
            len(self._known) > 1 and sum(each.size for each in self._known) > self._most_bytes
        ):
            self._known.popitem(last=False)


_of_device: WeakKeyDictionary[Device, Mappings] = WeakKeyDictionary()


def mappings_of(device: Device) -> Mappings:
    """Those of a device, for the whole process."""
    return _of_device.setdefault(device, Mappings(device))


def clear_all() -> None:
    """See `Mappings.clear`, for all devices."""
    for mappings in list(_of_device.values()):
        mappings.clear()
