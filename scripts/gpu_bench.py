"""Figures of a GPU: copies and packing (1 rank), messages through the host (2), gets from ranks of the node (4).

    mpiexec -n 1|2|4 python scripts/gpu_bench.py --json FILE

Each figure stands beside its bound, measured in the same run on the same device. Times are the
slowest rank's, the median of some repetitions. ``scripts/gpu-check`` runs all of it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from mpi4py import MPI

import hiercoll
from hiercoll import cuda
from hiercoll.cuda.device import Pieces, Rows, copy_shape
from hiercoll.memory import BlockLayout
from hiercoll.schedule import RECV, SEND, Region
from hiercoll.tools import bench

WORLD = MPI.COMM_WORLD
MIB = 1 << 20
REPETITIONS = 15
ON_DEVICE, TO_HOST, FROM_HOST = 3, 2, 1  # kinds of cudaMemcpy


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


def on_stream(stream: Any, enqueue: Callable[[], object], count: int = 10) -> float:
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


def figure(name: str, seconds: float, nbytes: int, bound: float | None, of: str) -> dict[str, Any]:
    """A line: seconds, bytes, and the share of the bound, which is ``of`` what."""
    share = {} if bound is None else {"bound": bound, "share": bound / seconds, "of": of}
    return {"figure": name, "seconds": seconds, "bytes": nbytes, **share}


def as_pieces(rows: Rows) -> Pieces:
    """The same copy as a table."""
    starts = [(rows.source + i * rows.source_step, rows.target + i * rows.target_step) for i in range(rows.number)]
    return Pieces(tuple((source, target, rows.length) for source, target in starts))


def packing() -> Iterator[dict[str, Any]]:
    """Regions packed and unpacked, against a plain copy of as many bytes on the device."""
    for total in (16 * MIB, 64 * MIB, 256 * MIB):
        source, target = cupy.zeros(2 * total, np.uint8), cupy.zeros(2 * total, np.uint8)
        device = cuda.device_at(source.data.ptr)
        on = device.new_stream()
        stream = on.own
        ends = (target.data.ptr, source.data.ptr, total)
        plain = on_stream(stream, lambda ends=(*ends, ON_DEVICE, stream.ptr): runtime.memcpyAsync(*ends))
        yield figure(f"device copy, {total // MIB} MiB", plain, 2 * total, None, "")
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
                shape = copy_shape(BlockLayout(block), (source.data.ptr, read), (target.data.ptr, write))
                assert shape is not None
                shapes = {name: shape}
                if isinstance(shape, Rows):  # which of the two is faster?
                    shapes[f"{name}, by the kernel"] = as_pieces(shape)
                for form, each in shapes.items():
                    copy = device.prepare(each)
                    seconds = on_stream(stream, lambda copy=copy, on=on: copy.enqueue(on))
                    what = f"{form}, {total // MIB} MiB in blocks of {block} B"
                    yield figure(what, seconds, 2 * total, plain, "a device copy")


def through_the_host() -> Iterator[dict[str, Any]]:
    """An exchange between two ranks on different nodes, in parts, against the copies to and from
    pinned memory at the same time, and against the MPI library's exchange of host memory."""
    os.environ["HIERCOLL_NODES"] = "2x1"
    comm, out, back = WORLD.Dup(), cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    for block in (4 * MIB, 16 * MIB, 64 * MIB):
        send, recv = cupy.zeros(2 * block, np.uint8), cupy.zeros(2 * block, np.uint8)
        pinned = [cupy.cuda.alloc_pinned_memory(block) for _ in range(2)]

        def copies(send: Any = send, recv: Any = recv, pinned: Any = pinned, block: int = block) -> None:
            runtime.memcpyAsync(pinned[0].ptr, send.data.ptr, block, TO_HOST, out.ptr)
            runtime.memcpyAsync(recv.data.ptr, pinned[1].ptr, block, FROM_HOST, back.ptr)
            out.synchronize()
            back.synchronize()

        host = np.zeros(2 * block, np.uint8), np.zeros(2 * block, np.uint8)
        both, mpi = slowest(copies), slowest(lambda host=host: comm.Alltoall(*host))
        yield figure(f"pinned copies out and in at once, {block // MIB} MiB", both, block, None, "")
        yield figure(f"the MPI library, host memory, {block // MIB} MiB", mpi, block, None, "")
        for parts in (1, 2, 4, 8, 16, 32):
            with hiercoll.alltoall_init(
                comm, send, recv, algorithm="scatter_destination", transport=f"staged:{parts}"
            ) as plan:
                seconds = slowest(plan)
            what = f"staged:{parts}, {block // MIB} MiB"
            yield figure(what, seconds, block, max(both, mpi), "the slower of copies and MPI library")


def from_mates() -> Iterator[dict[str, Any]]:
    """An alltoall within a node by gets, against a device copy of as many bytes as all ranks
    move that share the device; and small messages by every transport."""
    os.environ["HIERCOLL_NODES"] = f"1x{WORLD.size}"
    comm, stream = WORLD.Dup(), cupy.cuda.Stream(non_blocking=True)
    devices = comm.allgather(runtime.deviceGetPCIBusId(runtime.getDevice()))
    sharing = devices.count(devices[comm.rank])
    for block in (8, 1 << 10, 1 << 13, 1 << 16, MIB, 4 * MIB, 16 * MIB):
        send, recv = cupy.zeros(comm.size * block, np.uint8), cupy.zeros(comm.size * block, np.uint8)
        bound = None
        if block >= MIB:
            ends = (recv.data.ptr, send.data.ptr, comm.size * block, ON_DEVICE, stream.ptr)
            alone = on_stream(stream, lambda ends=ends: runtime.memcpyAsync(*ends)) if comm.rank == 0 else 0.0
            bound = sharing * float(comm.bcast(alone))
        for transport in ("peer", "staged"):
            for algorithm in ("scatter_destination", "pairwise", "grouped"):
                with hiercoll.alltoall_init(comm, send, recv, algorithm=algorithm, transport=transport) as plan:
                    seconds = slowest(plan)
                what = f"alltoall {algorithm} {transport}, {comm.size} ranks, {sharing} on a device, {block} B per pair"
                against = bound if transport == "peer" else None
                yield figure(what, seconds, comm.size * block, against, "device copies")


def main() -> None:
    """Print a table; append JSON Lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
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
    }
    series = {1: packing, 2: through_the_host}.get(WORLD.size, from_mates)
    for line in series():
        if WORLD.rank == 0:
            rate = line["bytes"] / line["seconds"] / 1e9
            share = f"{line['share']:6.0%} of {line['of']}" if "share" in line else ""
            print(f"{line['figure']:<90} {line['seconds'] * 1e6:10.1f} us {rate:8.1f} GB/s {share}", flush=True)
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, **about}) + "\n")


if __name__ == "__main__":
    main()
