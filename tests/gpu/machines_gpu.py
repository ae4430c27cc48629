"""A real GPU for the tests of tests/device. Importing this where there is none skips the module that does."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import WORLD  # type: ignore[attr-defined]
from machines import BEFORE, address_of

from hiercoll import cuda
from hiercoll.cuda.device import Device, Task
from hiercoll.runtime.buffers import place_of
from hiercoll.runtime.lifetime import get_session

if find_spec("cupy") is None:
    pytest.skip("CuPy is not installed", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("default")  # a warning of CuPy's is no reason to skip, or to fail
    import cupy
    import cupyx  # noqa: F401  (for the modules that import this one)
    from cupy.cuda import runtime


def why_no_gpu() -> str:
    """Why there is none; nothing, if there is one. Raises what CuPy raises where a GPU does not work."""
    try:
        return "" if runtime.getDeviceCount() else "no device"
    except runtime.CUDARuntimeError as error:
        if not str(error).startswith(("cudaErrorNoDevice", "cudaErrorInsufficientDriver")):  # the latter: no driver
            raise
        return str(error)


if why_no_gpu():
    pytest.skip(f"there is no GPU: {why_no_gpu()}", allow_module_level=True)

LATE = 2_000_000  # cycles, some 1 ms: longer than the host takes in a call whose plan is there
DELAY = cupy.RawKernel(
    """extern "C" __global__ void delay(long long cycles)
    {
        const long long end = clock64() + cycles;
        while (clock64() < end) {}
    }""",
    "delay",
)


@cache
def why_no_peers() -> str:
    """What keeps the ranks of this host from each other's memory; nothing, if they can map it."""
    state, array = get_session(WORLD.Dup()), cupy.zeros(1, np.uint8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reach = state.memories.node_in_reach(place_of(state, array))
    return "" if reach else str(caught[0].message) if caught else "another rank cannot map memory of its node"


@cache
def why_not_direct() -> str:
    """What keeps the MPI library from device memory; nothing, if it takes it."""
    return "this MPI library is not known to take device memory" if get_session(WORLD.Dup()).stages else ""


class Gpu:
    """`Machine` on the current GPU, by CuPy."""

    kind = "cuda"

    def __init__(self) -> None:
        self._soiled: Any = None  # the memory that `soil` has spoken of
        self._soiled_address = 0

    @cached_property
    def device(self) -> Device:
        """See `Machine`."""
        return cuda.device_at(address_of(cupy.zeros(1)))

    def stream(self) -> cupy.cuda.Stream:
        """See `Machine`; it does not wait for the default stream."""
        return cupy.cuda.Stream(non_blocking=True)

    def on(self, stream: cupy.cuda.Stream) -> AbstractContextManager[object]:
        """See `Machine`."""
        entered: AbstractContextManager[object] = stream
        return entered

    @contextmanager
    def capturing(self, stream: cupy.cuda.Stream) -> Iterator[None]:
        """See `Machine`. In the mode that leaves other streams alone."""
        runtime.streamBeginCapture(stream.ptr, runtime.streamCaptureModeRelaxed)
        try:
            yield
        finally:
            runtime.graphDestroy(runtime.streamEndCapture(stream.ptr))

    def empty(self, shape: Any, dtype: Any = np.uint8) -> cupy.ndarray:
        """See `Machine`."""
        soiled = self._soiled
        if soiled is not None and soiled.nbytes == np.empty(shape, dtype).nbytes:
            self._soiled = None
            return soiled.view(dtype).reshape(shape)
        return cupy.empty(shape, dtype)

    def put(self, values: npt.NDArray[Any]) -> cupy.ndarray:
        """See `Machine`."""
        return cupy.asarray(values)

    def fill(self, array: cupy.ndarray, values: npt.NDArray[Any]) -> None:
        """See `Machine`; after a kernel that takes its time."""
        source = cupy.asarray(values)
        DELAY((1,), (1,), (np.int64(LATE),))
        array[...] = source

    def get(self, array: cupy.ndarray) -> npt.NDArray[Any]:
        """See `Machine`."""
        values: npt.NDArray[Any] = cupy.asnumpy(array)
        return values

    def private(self) -> AbstractContextManager[object]:
        """See `Machine`: memory of the driver's own asynchronous pool."""
        allocator: AbstractContextManager[object] = cupy.cuda.using_allocator(cupy.cuda.malloc_async)
        return allocator

    def soil(self, nbytes: int) -> None:
        """See `Machine`. The memory is handed out by `empty`: which of its free blocks CuPy's pool takes is its own
        choice."""
        self._soiled = cupy.empty(nbytes, np.uint8)
        self._soiled_address = address_of(self._soiled)
        DELAY((1,), (1,), (np.int64(50 * LATE),))  # longer than a call that makes its plan
        self._soiled.fill(BEFORE)

    def was_soiled(self, array: cupy.ndarray) -> bool:
        """See `Machine`."""
        return address_of(array) == self._soiled_address

    @contextmanager
    def full(self) -> Iterator[None]:
        """See `Machine`."""
        pool = self.device._pool  # type: ignore[attr-defined]
        pool.free_all_blocks()
        pool.set_limit(size=max(pool.total_bytes(), 1))
        try:
            yield
        finally:
            pool.set_limit(size=0)  # none

    def give_back(self) -> None:
        """See `Machine`."""
        cupy.get_default_memory_pool().free_all_blocks()

    def launches(self, task: Task) -> int:
        """See `Machine`: the nodes of the graph that the task is captured into."""
        stream = self.device.new_stream()
        task.enqueue(stream)  # kernels are loaded now
        stream.record().synchronize()
        handle = stream.handle  # type: ignore[attr-defined]
        runtime.streamBeginCapture(handle, runtime.streamCaptureModeRelaxed)
        task.enqueue(stream)
        graph, number = runtime.streamEndCapture(handle), ctypes.c_size_t()
        status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(number))
        runtime.graphDestroy(graph)
        assert not status, f"CUDA driver error {status}"
        return number.value

    def why_no_peers(self) -> str:
        """See `Machine`."""
        return why_no_peers()

    def why_not_direct(self) -> str:
        """See `Machine`."""
        return why_not_direct()

    def serve_commands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """See `Machine`; they find it by themselves."""
