"""Scratch that each algorithm states, and memory that its plan takes.

    mpiexec -n 8 python scripts/memory.py [--block 1M] [--json FILE]

Stated: blocks of scratch, and of shared memory per node. Measured: growth of the
resident set of the rank with the most scratch (anonymous pages; shared pages are told
apart) from before the plan is made until after its first run, in blocks.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import re
from pathlib import Path

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY
from hiercoll.collectives import get_collective
from hiercoll.units import parse_size


def resident() -> tuple[int, int]:
    """Bytes of anonymous and of shared pages of this process."""
    status = Path("/proc/self/status").read_text()
    anonymous, shared = (int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) << 10 for name in ("RssAnon", "RssShmem"))
    return anonymous, shared


def main() -> None:
    """Measure every algorithm and variant that can run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", default="1M")
    parser.add_argument("--json", help="append the records to this file (JSON Lines)")
    options = parser.parse_args()
    comm, block = MPI.COMM_WORLD, parse_size(options.block)
    m_mmap_threshold = -3  # glibc's mallopt: large allocations come from the system and go back to it
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)
    topology = hiercoll.get_topology(comm)
    for collective, plainest in (("alltoall", "eager"), ("allgather", "direct")):
        record = get_collective(collective)
        send = np.ones(block * record.blocks(record.send, comm.size), np.uint8)
        recv = np.ones(block * comm.size, np.uint8)
        init = getattr(hiercoll, f"{collective}_init")
        with init(comm, send, recv, algorithm=plainest) as warm:
            warm()  # what the MPI library allocates for messages of this size
        for entry in REGISTRY[collective].values():
            for params in entry.variants():
                if entry.refusal(topology, params) is not None:
                    continue
                gc.collect()
                before = resident()
                with init(comm, send, recv, algorithm=entry.name, **params) as plan:
                    plan()
                    after = resident()
                    stated = (plan.schedule.scratch, plan.schedule.shared)
                grown = tuple((b - a) / block for a, b in zip(before, after, strict=True))
                rows = comm.gather((*stated, *grown))
                if comm.rank == 0:
                    scratch, shared, anonymous, mapped = max(rows)
                    name = f"{collective} {entry.spelled(params)}"
                    print(
                        f"{name:62} scratch {scratch:3d} blocks, measured {anonymous:5.1f};"
                        f"  shared {shared:3d} per node, mapped by the rank {mapped:5.1f}"
                    )
                    if options.json:
                        line = {
                            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                            "benchmark": "memory",
                            "layout": str(topology),
                            "block": block,
                            "name": name,
                            "scratch": scratch,
                            "measured": anonymous,
                            "shared": shared,
                            "mapped": mapped,
                            "mpi": " ".join(map(str, MPI.get_vendor())),
                        }
                        with open(options.json, "a") as file:
                            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
