"""Random calls on arrays of the simulated device, or of a GPU: right data, and an end, whoever has made a call before.

    mpiexec -n 2 python scripts/device_fuzz.py SEED [--seconds 7] [--layout 1x2] [--tune online] [--gpu]

All ranks make the same calls (collective, sizes, algorithm, transport, form); each has its own arrays, streams and
allocations, so that some ranks find a plan that they know while others make one. Nothing is kept of what "auto" learns,
unless ``HIERCOLL_LEARNED`` names a folder. Ends with status 1 and what was wrong, or, some seconds after its time, with
the stacks of ranks that hang.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import os
import warnings
from collections.abc import Sequence
from random import Random
from shutil import rmtree
from tempfile import mkdtemp
from time import monotonic
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import hiercoll
from hiercoll import cuda
from hiercoll.algorithms import REGISTRY
from hiercoll.cuda.late import LateArray, LateDevice
from hiercoll.tables import Table

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
GRACE = 20.0  # seconds after which what has not ended hangs
TUNES = ("off", "online", "default")
COLLECTIVES = ("alltoall", "allgather", "allreduce", "bcast", "gather", "reduce", "scatter", "reduce_scatter")
REDUCING = ("allreduce", "reduce", "reduce_scatter")
ROOTED = ("bcast", "gather", "reduce", "scatter")
Values = npt.NDArray[Any]


def result_of(collective: str, every: list[Values], root: int) -> Values:
    """What comes to lie in this rank's receive buffer, if it has one, by what all ranks send."""
    if collective in ("alltoall", "scatter"):
        return np.stack([each[RANK] for each in every]) if collective == "alltoall" else every[root][RANK]
    if collective in ("allgather", "gather"):
        return np.stack(every)
    if collective == "bcast":
        return every[root]
    total: Values = np.sum(every, axis=0, dtype=every[0].dtype)
    return total[RANK] if collective == "reduce_scatter" else total


class Array(Protocol):
    """An array of a device, with the stream on which it is produced."""

    stream: int

    def fill(self, values: Values) -> None:
        """Write values, some time later."""

    def get(self) -> Values:
        """The values, as work on the array's stream sees them."""


class Machine(Protocol):
    """A device, and streams on it, by their handles."""

    name: str
    streams: Sequence[int]

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A new one."""

    def synchronize(self, stream: int) -> None:
        """Wait for what is enqueued on a stream."""


class Simulated:
    """The simulated device."""

    streams = (7, 8, 9)

    def __init__(self, device: LateDevice) -> None:
        self.device, self.name = device, device.name

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> LateArray:
        """See `Machine`."""
        return LateArray(self.device, shape, dtype)

    def synchronize(self, stream: int) -> None:
        """See `Machine`."""
        self.device.stream_of(stream).synchronize()


class Gpu:
    """This rank's GPU."""

    def __init__(self) -> None:
        import cupy

        cuda.bind(WORLD)
        self.cupy, self.name = cupy, f"GPU {cuda.current_device()}"
        made = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        self.by_handle = {stream.ptr: stream for stream in made}
        self.streams = tuple(self.by_handle)
        self.delay = cupy.RawKernel(
            'extern "C" __global__ void delay(long long n) { for (long long t = clock64() + n; clock64() < t;) {} }',
            "delay",
        )

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> GpuArray:
        """See `Machine`."""
        return GpuArray(self, shape, np.dtype(dtype))

    def put(self, values: Values) -> Any:
        """An array of CuPy's that is there."""
        array = self.cupy.asarray(values)
        self.cupy.cuda.get_current_stream().synchronize()
        return array

    def synchronize(self, stream: int) -> None:
        """See `Machine`."""
        self.by_handle[stream].synchronize()


class GpuArray:
    """An array of CuPy's with a stream of its own choice."""

    def __init__(self, gpu: Gpu, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int | None = None) -> None:
        self.gpu, self.stream, self.shape, self.dtype = gpu, stream or gpu.streams[0], shape, dtype
        self.own = self.source = gpu.put(np.zeros(shape, dtype))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        at = self.own.data.ptr
        given = {"shape": self.shape, "typestr": self.dtype.str, "data": (at, False), "version": 3}
        return {**given, "strides": None, "stream": self.stream}

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        """What makes arrays of this kind, as the array API standard has it."""
        return SimpleNamespace(empty=lambda shape, dtype: GpuArray(self.gpu, shape, np.dtype(dtype), self.stream))

    def fill(self, values: Values) -> None:
        """See `Array`."""
        self.source = self.gpu.put(values)  # kept until the next time
        with (on := self.gpu.by_handle[self.stream]):
            self.gpu.delay((1,), (1,), (np.int64(50_000),))
            nbytes = self.own.nbytes
            self.gpu.cupy.cuda.runtime.memcpyAsync(self.own.data.ptr, self.source.data.ptr, nbytes, 3, on.ptr)

    def get(self) -> Values:
        """See `Array`."""
        self.gpu.synchronize(self.stream)
        return self.gpu.cupy.asnumpy(self.own)


class Fuzz:
    """The calls; ``same`` chooses alike on all ranks, ``own`` on each by itself."""

    def __init__(self, machine: Machine, same: Random, own: Random, tune: str) -> None:
        self.machine, self.same, self.own = machine, same, own
        self.comm = WORLD.Dup()
        self.ours = hiercoll.Intracomm(self.comm)
        self.arrays: dict[object, Array] = {}
        self.refused = 0  # calls
        hiercoll.configure(self.comm, table=Table(), tune=None if tune == "default" else tune)

    def array(self, use: str, values: Values) -> Array:
        """One of this rank's arrays, a new one now and then, produced on one of some streams."""
        key = (use, self.own.choice("ab"), values.shape, values.dtype)
        if key not in self.arrays or self.own.random() < 0.15:
            self.arrays[key] = self.machine.array(values.shape, values.dtype)
        found = self.arrays[key]
        self.machine.synchronize(found.stream)  # as programs do that go on on another stream
        found.stream = self.own.choice(self.machine.streams)
        found.fill(values)
        return found

    def call(self) -> str:
        """Make one. Returns what was wrong."""
        same, name, root = self.same, self.same.choice(COLLECTIVES), self.same.randrange(SIZE)
        dtype, block, salt = same.choice(["i4", "f4"]), same.choice([1, 8, 100]), same.randrange(50)
        shape = (SIZE, block) if name in ("alltoall", "scatter", "reduce_scatter") else (block,)
        every = [
            (np.arange(np.prod(shape)) % 50 + 3 * rank + salt).astype(dtype).reshape(shape) for rank in range(SIZE)
        ]
        due = result_of(name, every, root)
        poison = np.full(due.shape, 77, dtype)
        send = self.array("send", every[RANK])
        recv = self.array("recv", every[root] if name == "bcast" and root == RANK else poison)
        has_result = root == RANK or name not in ("gather", "reduce")
        ends: list[Any] = [send if root == RANK or name != "scatter" else None, recv if has_result else None]
        if name == "bcast":
            del ends[0]
        options: dict[str, Any] = {"root": root} if name in ROOTED else {}
        form = same.choice(["function", "function", "new result", "drop-in", "plan", "in the background"])
        chosen = self.choice(name)
        if name in REDUCING and form != "drop-in" and same.random() < 0.1:
            options["order"] = same.choice(["any", "rank", "fixed"])
        result: Any = recv
        try:
            if form == "new result" and name not in ("bcast", "scatter"):
                result = getattr(hiercoll, name)(self.comm, ends[0], **chosen, **options)
            elif form in ("function", "new result"):
                getattr(hiercoll, name)(self.comm, *ends, **chosen, **options)
            elif form == "drop-in":
                own_name = "Reduce_scatter_block" if name == "reduce_scatter" else name.capitalize()
                getattr(self.ours, own_name)(*ends, **options)
            elif form == "plan":
                with getattr(hiercoll, f"{name}_init")(self.comm, *ends, **chosen, **options) as plan:
                    plan()
            else:
                getattr(hiercoll, f"i{name}")(self.comm, *ends, **options).wait()
            if has_result and not np.array_equal(result.get().reshape(due.shape), due):
                return f"{form} {name}, root {root}, {chosen}: {result.get().ravel()[:6]} instead of {due.ravel()[:6]}"
        except hiercoll.ConstraintError:
            self.refused += 1
        return ""

    def choice(self, collective: str) -> dict[str, Any]:
        """An algorithm, now and then with all its parameters, as calls that "auto" tries name them, and a transport."""
        name = self.algorithm(collective)
        entry = REGISTRY[collective].get(name)
        params = {} if entry is None or self.same.random() < 0.5 else entry.resolve({})
        return {"algorithm": name, "transport": self.same.choice(["auto", "auto", "staged", "peer"]), **params}

    def algorithm(self, collective: str) -> str:
        """One of those that there are here; "auto" more often than others."""
        topology, entries = hiercoll.get_topology(self.comm), REGISTRY[collective]
        able = [name for name, entry in entries.items() if entry.refusal(topology, {}) is None]
        return self.same.choice(["auto", "auto", "auto", "native", self.same.choice(able)])


def main() -> None:
    """Call until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seconds", type=float, default=7.0)
    parser.add_argument("--layout", help="Of virtual nodes; one of some by chance.")
    parser.add_argument("--tune", choices=["off", "online", "default"], help="As of hiercoll.configure; by chance.")
    parser.add_argument("--gpu", action="store_true", help="On a GPU.")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds + GRACE, exit=True)
    warnings.simplefilter("ignore")
    same, own = Random(options.seed), Random(1000 * options.seed + RANK)
    layout, tune = same.choice([f"1x{SIZE}", f"{SIZE}x1", f"{SIZE - SIZE // 2}+{SIZE // 2}"]), same.choice(TUNES)
    os.environ["HIERCOLL_NODES"] = options.layout or layout
    order = same.choice(["late", "early", "random"])
    os.environ.setdefault("HIERCOLL_LEARNED", folder := mkdtemp())
    atexit.register(rmtree, folder)  # after hiercoll has written what it learned
    machine: Machine
    if options.gpu:
        machine = Gpu()
        calls = run(Fuzz(machine, same, own, options.tune or tune), options.seed, options.seconds)
    else:
        machine = Simulated(device := LateDevice(order=order, seed=RANK))
        with cuda.use(lambda address: device):
            calls = run(Fuzz(machine, same, own, options.tune or tune), options.seed, options.seconds)
    faulthandler.cancel_dump_traceback_later()
    if RANK == 0:
        print(f"seed {options.seed}: {calls} calls, {os.environ['HIERCOLL_NODES']}, {machine.name}")


def run(fuzz: Fuzz, seed: int, seconds: float) -> int:
    """Call so long. Returns how many calls that were."""
    calls, end = 0, monotonic() + seconds
    while WORLD.bcast(monotonic() < end):
        calls += 1
        wrong = fuzz.call()
        if calls % 50 == 0 and len(set(WORLD.allgather(fuzz.refused))) > 1:
            wrong = "refused on some ranks only, lately"
        if wrong:
            print(f"seed {seed}, call {calls}, rank {RANK}: {wrong}", flush=True)
            WORLD.Abort(1)
    return calls


if __name__ == "__main__":
    main()
