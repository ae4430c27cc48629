"""Time to build one rank's schedule and plan, as on a machine with many ranks.

    python scripts/building.py [--layout 64x4] [--json FILE]

One process: the schedule is generated and bound as it would be on that rank, its
requests made with MPI_PROC_NULL in place of the peers that are not there. The median
of five, for the leader (rank 0) and for the last rank of a node, the slower one told.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from hiercoll.algorithms import REGISTRY, Algorithm, Params
from hiercoll.algorithms.grouping import node_traffic
from hiercoll.memory import BlockLayout, HostMemory
from hiercoll.runtime.binding import Binding
from hiercoll.runtime.plan import plan_of
from hiercoll.schedule.lowering import lower
from hiercoll.topology import Topology, parse_layout

BLOCK = 64


class Absent:
    """A communicator whose peers are not there."""

    def Send_init(self, message: Any, peer: int, tag: int) -> MPI.Prequest:  # noqa: N802 - mpi4py's name
        """A request to nobody."""
        return MPI.COMM_SELF.Send_init(message, MPI.PROC_NULL, tag)

    def Recv_init(self, message: Any, peer: int, tag: int) -> MPI.Prequest:  # noqa: N802
        """A request from nobody."""
        return MPI.COMM_SELF.Recv_init(message, MPI.PROC_NULL, tag)


def build(entry: Algorithm, topology: Topology, rank: int, params: Params) -> tuple[float, float]:
    """Seconds for the schedule and for its plan."""
    node_traffic.cache_clear()
    memory = HostMemory()
    send, recv = np.zeros(topology.size * BLOCK, np.uint8), np.zeros(topology.size * BLOCK, np.uint8)
    begin = perf_counter()
    schedule = entry.schedule(topology, rank, params)
    scheduled = perf_counter()
    scratch, owner = memory.allocate(schedule.scratch * BLOCK)
    shared, shared_owner = memory.allocate(schedule.shared * BLOCK)
    addresses = {"send": send.ctypes.data, "recv": recv.ctypes.data, "scratch": scratch, "shared": shared}
    layout = BlockLayout(BLOCK, 8, schedule.segments)
    plan = plan_of(lower(schedule), Binding(Absent(), topology.lane_of, memory, layout, addresses, 0), entry.name)
    bound = perf_counter()
    plan.keep_alive(owner, shared_owner)
    plan.free()
    return scheduled - begin, bound - scheduled


def main() -> None:
    """Measure every algorithm and variant that can run on the layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="64x4")
    parser.add_argument("--json", help="append the records to this file (JSON Lines)")
    options = parser.parse_args()
    topology = parse_layout(options.layout)
    records = []
    for collective in ("alltoall", "allgather"):
        for entry in REGISTRY[collective].values():
            for params in entry.variants():
                if entry.refusal(topology, params) is not None:
                    continue
                worst = (0.0, 0.0)
                for rank in (0, topology.nodes[-1][-1]):
                    both = [build(entry, topology, rank, params) for _ in range(5)]
                    worst = max(worst, tuple(statistics.median(part) for part in zip(*both, strict=True)), key=sum)
                name = f"{collective} {entry.spelled(params)}"
                print(f"{name:62} schedule {worst[0] * 1e3:6.1f} ms  plan {worst[1] * 1e3:6.1f} ms")
                records.append({"name": name, "schedule": worst[0], "plan": worst[1]})
    slowest = max(records, key=lambda record: record["schedule"] + record["plan"])
    total = (slowest["schedule"] + slowest["plan"]) * 1e3
    print(f"slowest on {options.layout}: {slowest['name']}, {total:.1f} ms in all")
    if options.json:
        about = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "benchmark": "building",
            "layout": options.layout,
            "mpi": " ".join(map(str, MPI.get_vendor())),
        }
        with open(options.json, "a") as file:
            file.writelines(json.dumps({**about, **record}) + "\n" for record in records)


if __name__ == "__main__":
    main()
