"""The memories that a communicator's plans work on, and what its ranks find out about them together."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI

from hiercoll import settings
from hiercoll.errors import ConstraintError, DeviceError, DeviceMemoryError, TransportWarning
from hiercoll.memory import HANDLE_BYTES, Array, BlockLayout, HostMemory, Memory, Transfer
from hiercoll.runtime.agreement import Agreement
from hiercoll.schedule import RECV, SEND, Buffer, BufferName, Schedule

if TYPE_CHECKING:
    from hiercoll.cuda.device import Device
    from hiercoll.cuda.memory import DeviceMemory

HOST_INSTEAD = "transport 'peer' passes through the host instead"
MIRRORED = "transport 'peer' copies buffers that other processes cannot map"
ALL_VISIBLE = (
    "start the ranks so that each sees all GPUs of its node (Slurm: --gpu-bind=none, and no --gpus-per-task), "
    "and let hiercoll.cuda.bind(comm) choose"
)
MAPPABLE = "memory of cudaMalloc is not copied: PyTorch's without expandable_segments, CuPy's of its default pool"


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
        self._tried: list[object] = []  # memory of trials
        self._far: int | None = None  # the first rank that cannot map memory of its node; None: not tried
        self._why_far = ""  # if it is this one
        self._told_far = False
        self._told = False  # that buffers are mirrored; the same on all ranks

    def __getitem__(self, place: str) -> Memory:
        """The memory of a place: "host", or the name of a device."""
        return self._known[place]

    def place(self, device: Device) -> str:
        """Where that device's memory is found from now on."""
        if device.name not in self._known:
            from hiercoll.cuda.memory import DeviceMemory  # where there are devices

            self._known[device.name] = DeviceMemory(device)
        return device.name

    def forget(self) -> None:
        """Let go of devices, and of what is mapped of other ranks' memory."""
        self._known.clear()
        self._tried.clear()

    def node_in_reach(self, place: str) -> bool:
        """Whether the ranks of every node can map each other's memory at ``place``: tried once.
        Collective at its first use. The first rank that cannot warns; where warnings are
        errors, raises TransportWarning on all ranks."""
        first = self._first_far(place)
        if first < self._size and not self._told_far:
            self._told_far = True
            self._warn(first, HOST_INSTEAD, self._why_far)
        return first == self._size

    def devices_in_reach(self) -> bool:
        """The same of the device that this rank has met first, for those who have not asked for it: without a warning.
        Collective at its first use."""
        return self._first_far(next(place for place in self._known if place != "host")) == self._size

    def _first_far(self, place: str) -> int:
        if self._far is None:
            self._why_far = self._try_node(self._known[place])
            self._far = self._least(self._rank if self._why_far else self._size)
        return self._far

    def _warn(self, first: int, what: str, why: str) -> None:
        """Let rank ``first`` warn, which alone knows ``why``. Collective, so that no rank is left waiting
        where warnings are errors: all raise TransportWarning then."""
        warned = True
        if first == self._rank:
            what = f"{what}: {why}"
            try:
                _warn_program(TransportWarning(f"rank {first}: {what}"))
            except TransportWarning:
                warned = False
        if not self._least(warned):
            raise TransportWarning(f"rank {first}: {what}")

    def _least(self, value: int) -> int:
        """The smallest value of all ranks. Collective."""
        return self._agreement.least(value, "agreement on device memory")

    def _try_node(self, memory: Memory) -> str:
        """What keeps this rank from the other ranks' memory, in words. Collective over the node."""
        from hiercoll.cuda.memory import DeviceMemory

        assert isinstance(memory, DeviceMemory)
        node, problem, own, owner, bus = self._node(), "", np.zeros(HANDLE_BYTES, np.uint8), None, ""
        handles = np.empty((node.size, HANDLE_BYTES), np.uint8)
        try:
            bus = memory.device.bus
            address, owner = memory.allocate(1)
            own = memory.address_handle(address)
        except DeviceError as error:
            problem = str(error)
        node.Allgather(own, handles)
        buses = node.allgather(bus)
        for node_rank in range(node.size):
            if node_rank != node.rank and not problem:
                problem = _mapping_problem(memory, handles[node_rank], buses[node_rank])
        self._tried.append(owner)  # as long as others may have it mapped
        return problem

    def reserve(
        self,
        schedule: Schedule,
        host: int,
        memory: Memory,
        scratch: Callable[[], tuple[int, object]],
        user: dict[BufferName, tuple[int, int]],
        *,
        aside: Callable[[], tuple[int, object]] | None,
        together: bool,
        may_mirror: bool,
    ) -> Places:
        """Where a plan's buffers lie: those of the ``user`` (addresses, and bytes), or what takes their
        place, and what is allocated for it; ``host``: the bytes of what lies on the host beside a device's memory.

        ``aside``: what allocates a copy of what is sent, made before each start, as results come to lie there; None:
        nothing is copied. ``together``: too little of a device's memory on one rank is an error on all, and the first
        rank whose buffers are mirrored warns; collective then, where there are devices. Raises DeviceMemoryError;
        TransportWarning on all ranks, where warnings are errors; ConstraintError on all instead of a warning, unless
        they ``may_mirror``.
        """
        problem, cost = None, ""
        places = Places({name: address for name, (address, _) in user.items()}, [], [], [])
        try:
            places.places["scratch"], owner = scratch()
            places.owners.append(owner)
            if schedule.host or schedule.wide_host:
                places.places["host"], owner = memory.allocate_host(host)
                places.owners.append(owner)
            if aside is not None:
                places.before.append(_replaced(SEND, memory, user["send"], places, aside)[0])
                user = {**user, "send": (places.places["send"], user["send"][1])}
            cost = _mirror(schedule, memory, user, places)
        except DeviceMemoryError as error:
            problem = error
        if together and memory.kind != "host":
            self.check(problem, cost, may_mirror=may_mirror)
        elif problem is not None:
            raise problem
        return places

    def check(self, problem: DeviceError | None, cost: str = "", *, may_mirror: bool = True) -> None:
        """Raise this rank's problem, or that another rank has one. The first rank that mirrors buffers, at a ``cost``
        (in words), warns, once per communicator; all raise ConstraintError unless they ``may_mirror`` them. Collective.
        """
        first = self._least(-1 if problem is not None else self._rank if cost else self._size)
        if problem is not None:
            raise problem
        if first < 0:
            got = "too little on another one"
            raise DeviceMemoryError("device memory", "enough on every rank", got, self._rank)
        if first < self._size and not may_mirror:
            got = f"memory of rank {first} that they cannot map"
            raise ConstraintError("transport 'peer'", "memory that other ranks can map", got, self._rank)
        if first < self._size and not self._told:
            self._told = True
            self._warn(first, MIRRORED, cost)


def _warn_program(message: Warning) -> None:
    """Warn at the line of the program that has called this library, even if it was told the same there before: the
    warning may be of another communicator, and Python's own filter shows a text only once per line."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hiercoll":
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "?")
    # Without a registry, in which Python would note what has been shown.
    warnings.warn_explicit(message, type(message), frame.f_code.co_filename, frame.f_lineno, module)


def _mirror(schedule: Schedule, memory: Memory, user: dict[BufferName, tuple[int, int]], places: Places) -> str:
    """Put buffers in place of those of the user's that other ranks of the node are to get from and cannot map. What
    that costs, in words; "" where there are none."""
    total, why = 0, ""
    for buffer in (SEND, RECV):
        if buffer.name not in schedule.offered:
            continue
        address, nbytes = user[buffer.name]
        problem = _export_problem(memory, address)
        if not problem:
            continue
        total, why = total + nbytes, problem
        there, back = _replaced(buffer, memory, (address, nbytes), places, partial(memory.allocate, nbytes))
        places.before.extend([there] if buffer is SEND or "send" not in user else [])
        places.after.extend([back] if buffer is RECV else [])
    return f"{total} bytes more of device memory, and a copy of them in each call ({why}); {MAPPABLE}" if why else ""


def _replaced(
    buffer: Buffer,
    memory: Memory,
    user: tuple[int, int],
    places: Places,
    allocate: Callable[[], tuple[int, object]],
) -> tuple[Transfer, Transfer]:
    """Put a buffer on a device in place of the user's: what copies there, and back. Raises DeviceMemoryError."""
    address, nbytes = user
    region, layout = buffer[0], BlockLayout(nbytes)
    place, owner = allocate()
    there = memory.copy(layout, (address, region), (place, region))
    back = memory.copy(layout, (place, region), (address, region))
    assert isinstance(there, Transfer) and isinstance(back, Transfer)
    places.places[buffer.name] = place
    places.owners.append(owner)
    return there, back


def _export_problem(memory: Memory, address: int) -> str:
    """What keeps other processes from mapping the memory at ``address``, in words; "" if they can."""
    try:
        memory.address_handle(address)
    except DeviceError as error:
        return str(error)
    return ""


def _mapping_problem(memory: DeviceMemory, handle: Array, bus: str) -> str:
    """What keeps this rank from memory of the GPU at ``bus``, in words; "" if nothing does."""
    try:
        memory.find(handle)
    except DeviceError as error:
        hidden = bus and not memory.device.sees(bus)
        return f"{error}; GPU {bus} is hidden from this rank: {ALL_VISIBLE}" if hidden else str(error)
    return ""


def takes_device_memory(comm: MPI.Intracomm) -> bool:
    """Whether this process may give device addresses to its MPI library.

    The user's word (``HIERCOLL_CUDA_AWARE``), or what the library says under the key
    ``mpi_memory_alloc_kinds`` (MPI 4.1, section 12.4.3) or in its own way (see below). Silence is a no.
    """
    word = settings.is_cuda_aware()
    if word is not None:
        return word
    info = comm.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    said = any(kind.partition(":")[0] == "cuda" for kind in kinds.split(","))
    return said or _open_mpi_says_so() or _cray_mpich_says_so()


def _open_mpi_says_so() -> bool:
    """By a function of its own (which some builds of MPICH end the program in)."""
    if MPI.get_vendor()[0] != "Open MPI":
        return False
    try:
        library = ctypes.CDLL("libmpi.so.40", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return bool(library.MPIX_Query_cuda_support())
    except (OSError, AttributeError):  # another name, or built without
        return False


def _cray_mpich_says_so() -> bool:
    """It takes device memory if its environment says so and its GPU layer is linked or preloaded."""
    # Not MPI.get_vendor: an mpi4py that was built with another MPICH calls it by that one's name.
    is_cray = "CRAY MPICH" in MPI.Get_library_version().upper()
    return is_cray and settings.cray_takes_devices() and _is_loaded("libmpi_gtl_cuda.so")


def _is_loaded(library: str, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether a shared library whose file's name begins like this is in this process."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return False
    return any(line.rpartition("/")[2].startswith(library) for line in lines)


def free_shared_memory() -> int | None:
    """Free bytes of /dev/shm, where MPI libraries put shared windows; None where there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
