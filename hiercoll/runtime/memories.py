"""The memories that a communicator's plans work on, and what its ranks find out about them together."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from hiercoll import settings
from hiercoll.cuda import Device, DeviceMemory
from hiercoll.errors import DeviceError, DeviceMemoryError, TransportWarning
from hiercoll.memory import HANDLE_BYTES, BlockLayout, HostMemory, Memory, Transfer
from hiercoll.runtime.agreement import Agreement
from hiercoll.schedule import RECV, SEND, BufferName, Schedule


class Places(NamedTuple):
    """Where a plan's buffers lie, what keeps those that are not the user's, and the copies to and
    from those that take the place of the user's; ``nbytes`` of them are scratch."""

    places: dict[BufferName, int]
    owners: list[object]
    before: list[Transfer]
    after: list[Transfer]
    nbytes: int = 0


class Memories:
    """Memory of the host, and of devices as they are met. ``node`` gives the communicator of this
    rank's node; it is collective at its first use."""

    def __init__(self, node: Callable[[], MPI.Intracomm], agreement: Agreement, rank: int, size: int) -> None:
        self._node, self._agreement, self._rank, self._size = node, agreement, rank, size
        self._known: dict[str, Memory] = {"host": HostMemory()}
        self._reach: bool | None = None  # whether ranks of a node can map each other's device memory; None: not tried

    def __getitem__(self, place: str) -> Memory:
        """The memory of a place: "host", or the name of a device."""
        return self._known[place]

    def place(self, device: Device) -> str:
        """Where that device's memory is found from now on."""
        if device.name not in self._known:
            self._known[device.name] = DeviceMemory(device)
        return device.name

    def forget(self) -> None:
        """Let go of devices, and of what is mapped of other ranks' memory."""
        self._known.clear()

    def node_in_reach(self, place: str) -> bool:
        """Whether the ranks of every node can map each other's memory at ``place``: tried once.
        Collective at its first use. The first rank that cannot warns; where warnings are
        errors, raises TransportWarning on all ranks."""
        if self._reach is None:
            problem = self._try_node(self._known[place])
            first = self._least(self._rank if problem else self._size)
            self._reach = first == self._size
            warned = True
            if first == self._rank:
                text = f"rank {self._rank}: transport 'peer' passes through the host instead: {problem}"
                try:
                    warnings.warn(TransportWarning(text), stacklevel=6)
                except TransportWarning:
                    warned = False
            if not self._reach and not self._least(warned):
                raise TransportWarning(f"rank {first}: transport 'peer' cannot be used")
        return self._reach

    def _least(self, value: int) -> int:
        """The smallest value of all ranks. Collective."""
        return self._agreement.least(value, "agreement on device memory")

    def _try_node(self, memory: Memory) -> str:
        """What keeps this rank from the other ranks' memory, in words. Collective over the node."""
        assert isinstance(memory, DeviceMemory)
        node, problem, own, owner = self._node(), "", np.zeros(HANDLE_BYTES, np.uint8), None
        handles = np.empty((node.size, HANDLE_BYTES), np.uint8)
        try:
            address, owner = memory.allocate(1)
            own = memory.address_handle(address)
        except DeviceError as error:
            problem = str(error)
        node.Allgather(own, handles)
        try:
            for node_rank in range(node.size):
                if node_rank != node.rank and not problem:
                    memory.find(handles[node_rank])
        except DeviceError as error:
            problem = str(error)
        node.Barrier()  # what the others look at stays until they have
        del owner
        return problem

    def reserve(
        self,
        schedule: Schedule,
        block: int,
        place: str,
        scratch: Callable[[], tuple[int, object]],
        user: dict[BufferName, tuple[int, int]],
        *,
        together: bool,
    ) -> Places:
        """Where a plan's buffers lie: those of the ``user`` (addresses, and bytes), or what takes their
        place, and what is allocated for it; ``block``: the bytes of a block of the host's.

        ``together``: too little of a device's memory on one rank is an error on all; collective
        then, where there are devices. Raises DeviceMemoryError.
        """
        memory, problem = self._known[place], None
        places = Places({name: address for name, (address, _) in user.items()}, [], [], [])
        try:
            places.places["scratch"], owner = scratch()
            places.owners.append(owner)
            if schedule.host:
                places.places["host"], owner = memory.allocate_host(schedule.host * block)
                places.owners.append(owner)
            _mirror(schedule, memory, user, places)
        except DeviceMemoryError as error:
            problem = error
        if together and memory.kind != "host":
            self.check(problem)
        elif problem is not None:
            raise problem
        return places

    def check(self, problem: DeviceError | None) -> None:
        """Raise this rank's problem, or that another rank has one. Collective."""
        good = self._least(problem is None)
        if problem is not None:
            raise problem
        if not good:
            got = "too little on another one"
            raise DeviceMemoryError("device memory", "enough on every rank", got, self._rank)


def _mirror(schedule: Schedule, memory: Memory, user: dict[BufferName, tuple[int, int]], places: Places) -> None:
    """Put buffers in place of those of the user's that other ranks of the node are to get from and cannot map."""
    for buffer in (SEND, RECV):
        if buffer.name not in schedule.offered or _can_be_mapped(memory, user[buffer.name][0]):
            continue
        address, nbytes = user[buffer.name]
        region, layout = buffer[0], BlockLayout(nbytes)
        mirror, owner = memory.allocate(nbytes)
        there = memory.copy(layout, (address, region), (mirror, region))
        back = memory.copy(layout, (mirror, region), (address, region))
        assert isinstance(there, Transfer) and isinstance(back, Transfer)
        places.before.extend([there] if buffer is SEND or "send" not in user else [])
        places.after.extend([back] if buffer is RECV else [])
        places.places[buffer.name] = mirror
        places.owners.append(owner)


def _can_be_mapped(memory: Memory, address: int) -> bool:
    """Whether other processes can map the memory at ``address``."""
    try:
        memory.address_handle(address)
    except DeviceError:
        return False
    return True


def takes_device_memory(comm: MPI.Intracomm) -> bool:
    """Whether this process may give device addresses to its MPI library.

    The user's word (``HIERCOLL_CUDA_AWARE``), or what the library says under the key
    ``mpi_memory_alloc_kinds`` (MPI 4.1, section 12.4.3) or, of Open MPI, by its own function
    (which some builds of MPICH end the program in). Silence is a no.
    """
    word = settings.is_cuda_aware()
    if word is not None:
        return word
    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return any(kind.partition(":")[0] == "cuda" for kind in kinds.split(",")) or _open_mpi_says_so()


def _open_mpi_says_so() -> bool:
    if MPI.get_vendor()[0] != "Open MPI":
        return False
    try:
        library = ctypes.CDLL("libmpi.so.40", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return bool(library.MPIX_Query_cuda_support())
    except (OSError, AttributeError):  # another name, or built without
        return False


def free_shared_memory() -> int | None:
    """Free bytes of /dev/shm, where MPI libraries put shared windows; None where there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
