"""What tests of device arrays need of a device, so that the same ones run on a simulated and on a real one.

The modules beside this one hold those tests, by subject: tests/mpi/test_device_claims.py runs them on the simulated
device, tests/gpu/test_claims.py on a real one (`machines_gpu`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import hiercoll
from hiercoll.cuda.arrays import LEGACY
from hiercoll.cuda.device import Device, Task
from hiercoll.cuda.late import LateArray, LateDevice
from hiercoll.errors import TransportWarning
from hiercoll.tools.workload import buffers

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
BLOCK = 200  # bytes, no multiple of 16
BEFORE = 0xA5  # every byte of a result before the call


class Machine(Protocol):
    """A device, and arrays on it that are produced on the stream that is current, as CuPy's are. It does for
    `measuring.Arrays`."""

    kind: str
    device: Device

    def stream(self) -> Any:
        """A new stream; ``ptr`` is its handle."""

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Makes a stream the current one."""

    def capturing(self, stream: Any) -> AbstractContextManager[object]:
        """What is enqueued on the stream is captured into a graph."""

    def empty(self, shape: Any, dtype: Any = np.uint8) -> Any:
        """A new array."""

    def put(self, values: npt.NDArray[Any]) -> Any:
        """A new array with these values."""

    def fill(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Overwrite an array on the current stream, late."""

    def get(self, array: Any) -> npt.NDArray[Any]:
        """The values, as the current stream sees them."""

    def private(self) -> AbstractContextManager[object]:
        """New arrays are in memory that other processes cannot map."""

    def soil(self, nbytes: int) -> None:
        """What `empty` gives next, of so many bytes, lies where work is still under way on the current stream, as pools
        give memory out again."""

    def was_soiled(self, array: Any) -> bool:
        """Whether an array is the one that `soil` has spoken of."""

    def full(self) -> AbstractContextManager[object]:
        """There is no more device memory for plans than is in use."""

    def give_back(self) -> None:
        """Memory of freed arrays is given back to the driver."""

    def launches(self, task: Task) -> int:
        """How many copies and kernels a task is."""

    def why_no_peers(self) -> str:
        """What keeps the ranks of this host from each other's memory; nothing, if they can map it. Collective."""

    def why_not_direct(self) -> str:
        """What keeps the MPI library from device memory; nothing, if it takes it. Collective."""

    def serve_commands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ``hiercoll bench`` and ``hiercoll tune`` measure on this device."""


class SimulatedArray(LateArray):
    """Produced on the stream that is current, whichever that is."""

    def __init__(self, machine: Simulated, shape: Any, dtype: Any) -> None:
        self.machine = machine
        super().__init__(machine.device, shape if isinstance(shape, tuple) else (shape,), dtype)

    @property
    def stream(self) -> int:  # type: ignore[override]
        """The handle of the current stream."""
        return self.machine.current

    @stream.setter
    def stream(self, handle: int) -> None:
        """It cannot be another one."""

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return SimpleNamespace(empty=self.machine.empty)


class Current(threading.local):
    """The current stream of each thread, as CuPy and PyTorch have it."""

    handle = LEGACY


class Simulated:
    """`Machine` on the simulated device."""

    kind = "cuda"

    def __init__(self, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        self._current, self._streams = Current(), 7
        self.current = 7
        self._monkeypatch = monkeypatch
        self._soiled_bytes, self._soiled_address = 0, 0

    @property
    def current(self) -> int:
        """The handle of this thread's current stream; it is the default stream until a thread chooses another."""
        return self._current.handle

    @current.setter
    def current(self, handle: int) -> None:
        self._current.handle = handle

    def stream(self) -> Any:
        """See `Machine`."""
        self._streams += 1
        return SimpleNamespace(ptr=self._streams)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """See `Machine`."""
        before, self.current = self.current, stream.ptr
        yield
        self.current = before

    @contextmanager
    def capturing(self, stream: Any) -> Iterator[None]:
        """See `Machine`."""
        self.device.capturing.add(stream.ptr)
        yield
        self.device.capturing.clear()

    def empty(self, shape: Any, dtype: Any = np.uint8) -> SimulatedArray:
        """See `Machine`."""
        made = SimulatedArray(self, shape, dtype)
        if self._soiled_bytes == made.nbytes:
            self._soiled_bytes, self._soiled_address = 0, made.address
            made.fill(np.full(made.shape, 1, made.dtype))
        return made

    def put(self, values: npt.NDArray[Any]) -> SimulatedArray:
        """See `Machine`."""
        made = SimulatedArray(self, values.shape, values.dtype)
        made.fill(values)
        return made

    def fill(self, array: LateArray, values: npt.NDArray[Any]) -> None:
        """See `Machine`."""
        array.fill(values)

    def get(self, array: LateArray) -> npt.NDArray[Any]:
        """See `Machine`."""
        return array.get()

    @contextmanager
    def private(self) -> Iterator[None]:
        """See `Machine`."""
        self.device.private = True
        yield
        self.device.private = False

    def soil(self, nbytes: int) -> None:
        """See `Machine`."""
        self._soiled_bytes = nbytes

    def was_soiled(self, array: LateArray) -> bool:
        """See `Machine`."""
        return array.address == self._soiled_address

    @contextmanager
    def full(self) -> Iterator[None]:
        """See `Machine`."""
        before, self.device.limit = self.device.limit, self.device.used
        yield
        self.device.limit = before

    def give_back(self) -> None:
        """See `Machine`; it always is."""

    def launches(self, task: Task) -> int:
        """See `Machine`."""
        before = self.device.counts.total()
        task.enqueue(self.device.new_stream())
        return self.device.counts.total() - before

    def why_no_peers(self) -> str:
        """See `Machine`."""
        return ""

    def why_not_direct(self) -> str:
        """See `Machine`."""
        self.device.aware = True
        self._monkeypatch.setenv("HIERCOLL_CUDA_AWARE", "1")
        return ""

    def serve_commands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """See `Machine`."""
        monkeypatch.setattr("hiercoll.tools.measuring.arrays_of", lambda comm, memory: self)


class Produced:
    """An array that says it is produced on a stream of one's own choice, whichever is current."""

    def __init__(self, machine: Machine, array: Any, stream: Any) -> None:
        self.machine, self.array, self.stream = machine, array, stream
        self.dtype = array.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.array.__cuda_array_interface__, "stream": self.stream.ptr}

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return SimpleNamespace(empty=self.machine.empty)


def address_of(array: Any) -> int:
    """Where a device array lies."""
    return int(array.__cuda_array_interface__["data"][0])


@pytest.fixture(params=["staged", "peer"])
def transport(request: pytest.FixtureRequest, machine: Machine) -> str:
    """Those between which a program chooses by calls."""
    if request.param == "peer" and (why := machine.why_no_peers()):
        pytest.skip(why)
    return str(request.param)


@pytest.fixture(params=["staged", "direct"])
def messages(request: pytest.FixtureRequest, machine: Machine) -> str:
    """How messages travel where no rank gets from another's memory."""
    if request.param == "direct" and (why := machine.why_not_direct()):
        pytest.skip(why)
    return str(request.param)


@pytest.fixture
def peers(machine: Machine) -> None:
    """For tests where ranks map each other's memory."""
    if why := machine.why_no_peers():
        pytest.skip(why)


def check(machine: Machine, comm: MPI.Intracomm, collective: str, block: int = BLOCK, **options: Any) -> None:
    """Right data in two calls on the same arrays, with other data in the second."""
    values, expected = buffers(collective, block, RANK, SIZE)
    send, recv = machine.empty(values.shape), machine.empty(expected.shape)
    for salt in (0, 1):
        machine.fill(recv, np.full_like(expected, BEFORE))
        machine.fill(send, values + np.uint8(salt))
        result = getattr(hiercoll, collective)(comm, send, recv, **options)
        assert result is recv
        np.testing.assert_array_equal(machine.get(recv), expected + np.uint8(salt))


@contextmanager
def telling(action: Any = "always") -> Iterator[list[str]]:
    """What all ranks warn of transports, with this filter: there at the end. Collective."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        yield told
    own = [str(each.message) for each in caught if each.category is TransportWarning]
    told.extend(text for texts in WORLD.allgather(own) for text in texts)
