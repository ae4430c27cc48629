"""Figures of a GPU: copies and packing (1 rank), messages through the host (2), gets from ranks of the node (4).

    mpiexec -n 1|2|4 python scripts/gpu_bench.py --json FILE
    mpiexec -n N python scripts/gpu_bench.py --json FILE --calls

Each figure stands beside its bounds, measured in the same run on the same device: one rank's copy
alone, and all ranks copying at once. Where each rank has a GPU of its own and CuPy finds NCCL,
NCCL stands beside them. With ``--calls``: calls one at a time, as programs make them, beside what programs would do by
hand, and when "auto" has found what. Data are random. Times are the slowest rank's, the median of some
repetitions. ``scripts/gpu-check`` runs all of it.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import nccl, runtime
from mpi4py import MPI

import hiercoll
from hiercoll import cuda
from hiercoll.collectives import COLLECTIVES
from hiercoll.cuda.cupy_device import CupyDevice, CupyRowKernel, CupyRows
from hiercoll.cuda.device import Pieces, Rows, Shape, copy_shape
from hiercoll.memory import BlockLayout
from hiercoll.runtime.lifetime import get_session
from hiercoll.schedule import RECV, SEND, Region
from hiercoll.tables import NATIVE_VARIANT
from hiercoll.tools import bench
from hiercoll.tuning.policy import Wanted

WORLD = MPI.COMM_WORLD
MIB = 1 << 20
MOST_PIECES = 1 << 19  # of a table that is made here: of more it takes long
REPETITIONS = 15
ON_DEVICE, TO_HOST, FROM_HOST = 3, 2, 1  # kinds of cudaMemcpy


def noise(nbytes: int) -> cupy.ndarray:
    """Random bytes on the device, others on each rank."""
    return cupy.asarray(np.frombuffer(np.random.default_rng(WORLD.rank).bytes(nbytes), np.uint8))


def slowest(run: Callable[[], object]) -> float:
    """Seconds of ``run`` on the slowest rank, the median of some repetitions after two more."""
    times = []
    for _ in range(REPETITIONS + 2):
        WORLD.Barrier()
        begin = perf_counter()
        run()
        times.append(perf_counter() - begin)
    most = np.empty(len(times))
    WORLD.Allreduce(np.array(times), most, op=MPI.MAX)
    return float(np.median(most[2:]))


DELAY = cupy.RawKernel(
    """extern "C" __global__ void delay(long long cycles)
    {
        const long long end = clock64() + cycles;
        while (clock64() < end) {}
    }""",
    "delay",
)


def on_stream(stream: cupy.cuda.Stream, enqueue: Callable[[], object], count: int = 10) -> float:
    """Seconds that the device takes for what is enqueued, by its own clock, in the mean of a row;
    all of the row is enqueued while the device is kept waiting, so that it is not the host's time."""
    begin, end, times = cupy.cuda.Event(), cupy.cuda.Event(), []
    for _ in range(REPETITIONS):
        with stream:
            DELAY((1,), (1,), (np.int64(5_000_000),))  # some 3 ms
        begin.record(stream)
        for _ in range(count):
            enqueue()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1000 / count)
    return float(np.median(times))


def figure(name: str, seconds: float, nbytes: int, bounds: dict[str, float] | None = None) -> dict[str, Any]:
    """A line: seconds, bytes, and the seconds of each bound, by what it is of."""
    return {"figure": name, "seconds": seconds, "bytes": nbytes, "bounds": bounds or {}}


def uneven(source: int, target: int, total: int) -> Pieces:
    """``total`` bytes in pieces of 1 B to 1 MiB, as many of 1 to 2 B as of 512 KiB to 1 MiB; they lie together
    in the target, and with a byte between them in the source."""
    choice, table, at = Random(2), list[tuple[int, int, int]](), 0
    while at < total:
        length = min(int(2 ** choice.uniform(0, 20)), total - at)
        table.append((source + at + len(table), target + at, length))
        at += length
    choice.shuffle(table)
    return Pieces(tuple(table))


def packing() -> Iterator[dict[str, Any]]:
    """Regions packed and unpacked, against a plain copy of as many bytes on the device: of a size that
    may stay in its L2 cache, and of sizes that do not."""
    device = CupyDevice(runtime.getDevice())
    on = device.new_stream()
    stream = on.own
    assert stream is not None
    for total in (16 * MIB, 256 * MIB, 512 * MIB):
        source, target = noise(2 * total), noise(2 * total)
        plain = on_stream(stream, copying(source, target, total, stream))
        yield figure(f"device copy, {total // MIB} MiB", plain, 2 * total)
        for name, shape in packed(source.data.ptr, target.data.ptr, total):
            ways = {name: device.prepare(shape)}
            if isinstance(shape, Rows):
                ways[f"by a copy engine: {name}"] = CupyRows(shape)
                if shape.number < MOST_PIECES:
                    ways[f"over a table: {name}"] = device.prepare(shape.pieces())
            for way, copy in ways.items():
                seconds = on_stream(stream, partial(copy.enqueue, on))
                yield figure(f"{way}, {total // MIB} MiB", seconds, 2 * total, {"a device copy": plain})
        del source, target  # before the next are made


def on_one_rank() -> Iterator[dict[str, Any]]:
    """What one rank does by itself."""
    yield from packing()
    yield from narrow_rows()


def packed(source: int, target: int, total: int) -> Iterator[tuple[str, Shape]]:
    """Copies of ``total`` bytes between buffers of twice as many at these addresses."""
    for width in (8, 64):
        yield f"pack rows of {width} B", Rows(source, target, width, total // width, 2 * width, width)
        yield f"unpack rows of {width} B", Rows(source, target, width, total // width, width, 2 * width)
    for block in (1 << 10, 1 << 13, 1 << 16, 1 << 20):
        blocks = total // block
        scattered = Random(1).sample(range(2 * blocks), blocks)
        cases: dict[str, tuple[Region, Region]] = {
            "pack evenly spaced": (SEND[0 : 2 * blocks : 2], RECV[0:blocks]),
            "unpack evenly spaced": (SEND[0:blocks], RECV[0 : 2 * blocks : 2]),
            "pack scattered": (SEND[scattered], RECV[0:blocks]),
            "unpack scattered": (SEND[0:blocks], RECV[scattered]),
        }
        for name, (read, write) in cases.items():
            shape = copy_shape(BlockLayout(block), (source, read), (target, write))
            assert shape is not None
            yield f"{name}, in blocks of {block} B", shape
            if name == "pack scattered":
                shape = copy_shape(BlockLayout(block), (source, read), (target + 3, write))
                assert shape is not None
                yield f"{name}, 3 B off, in blocks of {block} B", shape
    yield "pieces of 1 B to 1 MiB", uneven(source, target, total)


def copying(source: cupy.ndarray, target: cupy.ndarray, nbytes: int, stream: cupy.cuda.Stream) -> Callable[[], None]:
    """A plain copy on the device, to be enqueued."""
    return partial(runtime.memcpyAsync, target.data.ptr, source.data.ptr, nbytes, ON_DEVICE, stream.ptr)


def narrow_rows() -> Iterator[dict[str, Any]]:
    """Rows that lie apart, to pinned memory of the host and from it: by a copy engine, and by the kernel, which packs
    them on the way; against one plain copy. Which of the two plans take is for `hiercoll.cuda.device.NARROW` to say."""
    device, total = CupyDevice(runtime.getDevice()), 16 * MIB
    on, source = device.new_stream(), noise(2 * total)
    pinned, owner = device.allocate_pinned(total)
    assert on.own is not None
    plain = on_stream(on.own, partial(device.prepare(Rows(source.data.ptr, pinned, total)).enqueue, on), 1)
    yield figure(f"plain copy to the host, {total // MIB} MiB", plain, total)
    for width in (4, 8, 16, 32, 64, 256, 1024):
        out = Rows(source.data.ptr, pinned, width, total // width, 2 * width, width)
        into = Rows(pinned, source.data.ptr, width, total // width, width, 2 * width)
        for name, rows in (("to the host", out), ("from the host", into)):
            for how, task in (("a copy engine", CupyRows(rows)), ("the kernel", CupyRowKernel(device, rows))):
                seconds = on_stream(on.own, partial(task.enqueue, on), 1)
                yield figure(f"rows of {width} B {name}, by {how}", seconds, total, {"a plain copy": plain})
    assert owner is not None


def through_the_host() -> Iterator[dict[str, Any]]:
    """An exchange between two ranks on different nodes, in parts, against the copies to and from
    pinned memory at the same time, and against the MPI library's exchange of host memory."""
    os.environ["HIERCOLL_NODES"] = "2x1"
    comm, out, back = WORLD.Dup(), cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    for block in (4 * MIB, 16 * MIB, 64 * MIB):
        send, recv = noise(2 * block), noise(2 * block)
        pinned = [cupy.cuda.alloc_pinned_memory(block) for _ in range(2)]

        def copies(send: Any = send, recv: Any = recv, pinned: Any = pinned, block: int = block) -> None:
            runtime.memcpyAsync(pinned[0].ptr, send.data.ptr, block, TO_HOST, out.ptr)
            runtime.memcpyAsync(recv.data.ptr, pinned[1].ptr, block, FROM_HOST, back.ptr)
            out.synchronize()
            back.synchronize()

        host = cupy.asnumpy(send), cupy.asnumpy(recv)
        both, mpi = slowest(copies), slowest(partial(comm.Alltoall, *host))
        yield figure(f"pinned copies out and in at once, {block // MIB} MiB", both, block)
        yield figure(f"the MPI library, host memory, {block // MIB} MiB", mpi, block)
        bounds = {"the slower of these": max(both, mpi), "copies": both, "MPI library": mpi}
        for parts in (1, 2, 4, 8, 16, 32):
            with hiercoll.alltoall_init(
                comm, send, recv, algorithm="scatter_destination", transport=f"staged:{parts}"
            ) as plan:
                seconds = slowest(plan)
            yield figure(f"staged:{parts}, {block // MIB} MiB", seconds, block, bounds)


ALGORITHMS = {"alltoall": ("scatter_destination", "pairwise", "grouped"), "allgather": ("direct", "ring")}
PLANS = {"alltoall": hiercoll.alltoall_init, "allgather": hiercoll.allgather_init}
CALLS = {"alltoall": hiercoll.alltoall, "allgather": hiercoll.allgather}


def within_a_node() -> Iterator[dict[str, Any]]:
    """Alltoall and allgather within a node by gets, against device copies of as many bytes as each rank receives:
    one by one for the ranks that share the device, by the time of one rank's alone, and all ranks' at once.
    NCCL, where it can be; and small messages by every transport. Plans are held; calls, as programs make them, are
    beside what they would do by hand without hiercoll."""
    os.environ["HIERCOLL_NODES"] = f"1x{WORLD.size}"
    comm, stream = WORLD.Dup(), cupy.cuda.Stream(non_blocking=True)
    devices = comm.allgather(runtime.deviceGetPCIBusId(runtime.getDevice()))
    sharing = devices.count(devices[comm.rank])
    other = Nccl(comm, stream) if nccl.available and sharing == 1 else None
    for block in (8, 1 << 10, 1 << 13, 1 << 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB):
        send, recv = noise(comm.size * block), noise(comm.size * block)
        whole = comm.size * block
        bounds = {}
        if block >= MIB:
            alone, together = copies_of_ranks(comm, copying(send, recv, whole, stream), stream)
            yield figure(f"one rank's copy alone, {whole} B", alone, whole)
            yield figure(f"all ranks copying at once, {whole} B each", together, whole)
            bounds = {"copies one by one": sharing * alone, "copies at once": together}
        for collective, algorithms in ALGORITHMS.items():
            what = f"{comm.size} ranks, {sharing} on a device, {block} B per pair"
            first = send[:block] if collective == "allgather" else send
            for transport in ("peer", "staged"):
                for algorithm in algorithms:
                    chosen = {"algorithm": algorithm, "transport": transport}
                    with PLANS[collective](comm, first, recv, **chosen) as plan:
                        seconds = slowest(plan)
                    against = bounds if transport == "peer" else {}
                    yield figure(f"{collective} {algorithm} {transport}, {what}", seconds, whole, against)
                with_name = {"algorithm": algorithms[0], "transport": transport}
                seconds = slowest(partial(CALLS[collective], comm, first, recv, **with_name))
                yield figure(f"{collective} {algorithms[0]} {transport} as a call, {what}", seconds, whole)
            seconds = slowest(partial(CALLS[collective], comm, first, recv, algorithm="native"))
            yield figure(f"{collective} native as a call, {what}", seconds, whole)
            seconds = slowest(partial(by_hand, comm, collective, first, recv))
            yield figure(f"{collective} by hand, {what}", seconds, whole)
            if other is not None:
                seconds = slowest(partial(other.run, collective, first, recv, block))
                yield figure(f"{collective} NCCL, {what}", seconds, whole, bounds)


WAYS = {
    "native": {"algorithm": "native"},
    "staged": {"algorithm": "scatter_destination", "transport": "staged"},
    "peer": {"algorithm": "scatter_destination", "transport": "peer"},
}
PATIENCE = 3.0  # seconds for which "auto" is called


def as_programs_call() -> Iterator[dict[str, Any]]:
    """Alltoall calls one at a time: by hand, by name, and by "auto", which begins with nothing learned on a
    communicator of its own, at first and at last, and in how many calls and seconds it has come to that."""
    os.environ["HIERCOLL_NODES"] = f"1x{WORLD.size}"
    os.environ["HIERCOLL_LEARNED"] = folder = mkdtemp()
    atexit.register(rmtree, folder, ignore_errors=True)
    for block in (1 << 10, 1 << 16, MIB, 4 * MIB):
        comm = WORLD.Dup()
        send, recv = noise(comm.size * block), noise(comm.size * block)
        call, what = partial(hiercoll.alltoall, comm, send, recv), f"{comm.size} ranks, {block} B per pair"
        yield figure(f"by hand, {what}", slowest(partial(by_hand, comm, "alltoall", send, recv)), send.nbytes)
        hiercoll.configure(comm, tune="off")
        for name, chosen in WAYS.items():
            yield figure(f"{name}, {what}", slowest(partial(call, **chosen)), send.nbytes)
        comm.Free()
        comm = WORLD.Dup()
        call = partial(hiercoll.alltoall, comm, send, recv)
        yield figure(f"auto at first, {what}", slowest(call), send.nbytes)
        by, calls, since = learned(comm, call, block)
        yield {**figure(f"auto at last, {what}", slowest(call), send.nbytes), "by": by, "calls": calls, "after": since}
        comm.Free()


def learned(comm: MPI.Intracomm, call: Callable[[], object], block: int) -> tuple[str, int, float]:
    """Call for a while: what "auto" has found in the end, and in how many calls and seconds."""
    policy, wanted = get_session(comm).policy, Wanted(COLLECTIVES["alltoall"], block, False, memory="cuda")
    begin, calls, last = perf_counter(), 0, ("native", 0, 0.0)
    while comm.bcast(perf_counter() - begin) < PATIENCE:
        for _ in range(20):
            call()
        calls += 20
        learner = policy.known_learner(wanted.key)
        found = learner.finding.variant if learner is not None and learner.finding is not None else NATIVE_VARIANT
        if (now := found.spelled("alltoall")) != last[0]:
            last = now, calls, perf_counter() - begin
    return last


def by_hand(comm: MPI.Intracomm, collective: str, send: cupy.ndarray, recv: cupy.ndarray) -> None:
    """What programs do without hiercoll, where the MPI library takes no device memory."""
    result = np.empty(recv.shape, recv.dtype)
    getattr(comm, collective.capitalize())(cupy.asnumpy(send), result)
    recv.set(result)
    cupy.cuda.get_current_stream().synchronize()


def copies_of_ranks(comm: MPI.Intracomm, copy: Callable[[], None], stream: cupy.cuda.Stream) -> tuple[float, float]:
    """Seconds of a copy that one rank does alone, and of all ranks' at once."""

    def at_once() -> None:
        copy()
        stream.synchronize()

    alone = float(comm.bcast(on_stream(stream, copy) if comm.rank == 0 else 0.0))
    return alone, slowest(at_once)


class Nccl:
    """NCCL on a stream. It takes no two ranks on one device."""

    def __init__(self, comm: MPI.Intracomm, stream: cupy.cuda.Stream) -> None:
        number = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
        self._own, self._size, self._stream = nccl.NcclCommunicator(comm.size, number, comm.rank), comm.size, stream

    def run(self, collective: str, send: cupy.ndarray, recv: cupy.ndarray, block: int) -> None:
        """Start and wait."""
        if collective == "allgather":
            self._own.allGather(send.data.ptr, recv.data.ptr, block, nccl.NCCL_UINT8, self._stream.ptr)
        else:
            self._alltoall(send.data.ptr, recv.data.ptr, block)
        self._stream.synchronize()

    def _alltoall(self, send: int, recv: int, block: int) -> None:
        nccl.groupStart()
        for peer in range(self._size):
            self._own.send(send + peer * block, block, nccl.NCCL_UINT8, peer, self._stream.ptr)
            self._own.recv(recv + peer * block, block, nccl.NCCL_UINT8, peer, self._stream.ptr)
        nccl.groupEnd()


def mps() -> bool:
    """Whether the control daemon of MPS has its pipe here. With MPS, ranks use a GPU at once, else in turns."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


def main() -> None:
    """Print a table; append JSON Lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--calls", action="store_true", help="calls as programs make them")
    options = parser.parse_args()
    cuda.bind(WORLD)
    properties = runtime.getDeviceProperties(runtime.getDevice())
    about = {
        **bench.provenance(WORLD, hiercoll.get_topology(WORLD)),
        "memory": "cuda",
        "device": properties["name"].decode(),
        "cuda": runtime.runtimeGetVersion(),
        "driver": runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "l2": properties["l2CacheSize"],
        "mps": mps(),
        "nccl": nccl.get_version() if nccl.available else None,
    }
    if WORLD.rank == 0:
        print(f"L2 cache of {about['l2'] // MIB} MiB; MPS: {about['mps']}; NCCL: {about['nccl']}", flush=True)
    series = {1: on_one_rank, 2: through_the_host}.get(WORLD.size, within_a_node)
    for line in (as_programs_call if options.calls else series)():
        if WORLD.rank == 0:
            rate = line["bytes"] / line["seconds"] / 1e9
            shares = ", ".join(f"{bound / line['seconds']:4.0%} of {of}" for of, bound in line["bounds"].items())
            found = f"by {line['by']}, found in {line['calls']} calls, {line['after']:.2f} s" if "by" in line else ""
            print(f"{line['figure']:<90} {line['seconds'] * 1e6:10.1f} us {rate:8.1f} GB/s {shares}{found}", flush=True)
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, **about}) + "\n")


if __name__ == "__main__":
    main()
