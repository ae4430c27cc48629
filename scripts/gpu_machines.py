"""Two machines of V100 GPUs as the model sees them, Lassen and Summit: each value with where it comes from.

    python scripts/gpu_machines.py [--into hiercoll/model/machines]

Writes lassen-gpu.json and summit-gpu.json. Nothing is fitted to times of collectives. Values are of three kinds:

- measured by others, on the machine, between two GPUs or between all GPUs of two nodes (``*_SECONDS``): the medium's
  rate is the slope between two sizes, the latency is the time of 4 bytes, what large messages cost more is the rest;
- name-plates (``*_RATE``);
- assumed (`ASSUMED`): what nobody says, or what has no meaning on a GPU.

All times are one way, in seconds; all sizes in bytes.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from math import sqrt
from pathlib import Path

from hiercoll.model.machine import SHIPPED, Machine, Parameters

PAPER = "Khorassani, Chu, Anthony, Subramoni, Panda 2021: NVLink, X-Bus, dual-rail EDR, fat tree; GPUs a node; no rates"
BENCHPRESS = (
    "github.com/bienz2/BenchPress (BSD 2-Clause), logs of ping-pongs between GPUs, half a round trip, counts of 4-byte "
    "floats; figures only"
)
PING_PONG = "Lassen, MVAPICH2, job 2422312, 2021-04-13: rates and latencies within a node"
MAX_RATE = "Lassen, MVAPICH2 with its own settings, job 2427559, 2021-04-14: the same between nodes"
SUMMIT_PING_PONG = "Summit, Spectrum MPI, job 315486, 2020-09-01: rates within a node (its latencies are not used)"
OLCF = "OLCF, Summit User Guide: NVLink 25 GB/s a link and direction, 2 links; 23 GB/s into a node; HBM2 900 GB/s"
LINKS = "NVLink on Lassen: 3 links of 25 GB/s between GPUs of a socket; EDR: 12.5 GB/s a port, 2 ports (name-plates)"
X_BUS = "X-Bus: 4 bytes at 16 GT/s (WikiChip, Summit), 64 GB/s each way, as 41 GB/s one way were measured"

MIB = 1 << 20
# Lassen, MVAPICH2: GPUs 0 and 1 (one socket), 0 and 2 (two sockets); of two nodes, one pair alone.
SOCKET_SECONDS = {4: 7.843971e-07, 64 << 10: 1.539779e-05, 16 * MIB: 2.572179e-04, 32 * MIB: 4.985809e-04}
CROSS_SECONDS = {4: 1.075625e-06, 64 << 10: 1.654315e-05, 16 * MIB: 4.249692e-04, 32 * MIB: 8.333087e-04}
NETWORK_SECONDS = {4: 2.181411e-06, 64 << 10: 1.055956e-05, MIB: 5.668044e-05, 2 * MIB: 1.028204e-04}
# Summit, Spectrum MPI: GPUs 0 and 1, 0 and 3. Its fixed costs are those of another library.
SUMMIT_SOCKET_SECONDS = {256 << 10: 2.163097e-05, 512 << 10: 2.713860e-05}
SUMMIT_CROSS_SECONDS = {256 << 10: 2.392285e-05, 512 << 10: 2.995893e-05}
# Between which sizes the times of MVAPICH2 step up: within a node, between nodes.
NEAR_STEP, FAR_STEP = (8 << 10, 16 << 10), (2 << 10, 4 << 10)

EDR_RATE = 2 * 12.5e9  # bytes/s out of a node, two ports
SUMMIT_NODE_RATE = 23e9  # bytes/s into a node, as the OLCF states
X_BUS_RATE = 64e9  # bytes/s each way
HBM_RATE = 900e9  # bytes/s of a GPU's memory

NEVER = 1e18  # bytes: a threshold that nothing reaches
# What no source determines. Memory of a GPU has one speed, and the copies that the schedules ask for are one kernel
# each, whose start the model has no parameter for: caches, pieces and first touches are set so that they cost nothing.
ASSUMED = {
    "posted": 0.4,
    "adapter_message": 5e-9,
    "network_small_byte": 0.0,
    "congestion": 0.0,  # a fat tree that carries every pattern at full rate
    "cache_socket": NEVER,
    "cache_rank": NEVER,
    "memory": 0.0,
    "bus": 0.0,
    "root_large": NEVER,
    "root_factor": 1.0,
    "piece": 0.0,
    "line": 0.0,
    "fresh": 0.0,
    "flag": 1e-6,
}


def slope(seconds: dict[int, float]) -> float:
    """Seconds per byte between the two largest sizes."""
    small, large = sorted(seconds)[-2:]
    return (seconds[large] - seconds[small]) / (large - small)


def more(seconds: dict[int, float]) -> float:
    """Seconds that a message of 64 KiB costs more than one of 4 bytes, and its bytes."""
    return seconds[64 << 10] - (64 << 10) * slope(seconds) - seconds[4]


def parameters(socket_byte: float, cross_byte: float, node_rate: float) -> Parameters:
    """Of a machine whose messages step as those of MVAPICH2 on Lassen do. Seconds per byte; bytes per second.

    A root's bytes cost what its links cost; a root's message, its share of a step, as for all messages at once."""
    near = SOCKET_SECONDS[4]
    return Parameters(
        domain=near,
        socket=near,
        node=CROSS_SECONDS[4],
        network=NETWORK_SECONDS[4],
        domain_byte=socket_byte,
        node_byte=cross_byte,
        network_byte=slope(NETWORK_SECONDS),
        rendezvous=more(SOCKET_SECONDS),
        eager=sqrt(NEAR_STEP[0] * NEAR_STEP[1]),
        network_rendezvous=more(NETWORK_SECONDS),
        network_eager=sqrt(FAR_STEP[0] * FAR_STEP[1]),
        adapter=1 / node_rate,
        socket_link=1 / (2 * X_BUS_RATE),  # the model counts bytes of both directions
        root_message=ASSUMED["posted"] * CROSS_SECONDS[4],
        root_in=cross_byte,
        root_out=cross_byte,
        root_out_domain=socket_byte,
        copy_byte=2 / HBM_RATE,  # read and written
        reduce_byte=3 / HBM_RATE,  # two read, one written
        **ASSUMED,
    )


ROOTS = ("root_message", "root_in", "root_out", "root_out_domain")


def lassen() -> Machine:
    """4 GPUs a node, 2 a socket."""
    return Machine(
        "lassen-gpu",
        parameters(slope(SOCKET_SECONDS), slope(CROSS_SECONDS), EDR_RATE),
        domain=2,
        socket=2,
        sources=(PAPER, f"{BENCHPRESS}. {PING_PONG}. {MAX_RATE}", LINKS, X_BUS),
        assumed=(*ASSUMED, *ROOTS),
        spread=(0.4, 2.5),
        about="4 V100 a node, MVAPICH2: published ping-pongs and name-plates; not fitted to collectives",
    )


def summit() -> Machine:
    """6 GPUs a node, 3 a socket. Latencies are Lassen's: the same library, and nodes of the same make."""
    steps = ("domain", "socket", "node", "network", "network_byte", "rendezvous", "network_rendezvous")
    return Machine(
        "summit-gpu",
        parameters(slope(SUMMIT_SOCKET_SECONDS), slope(SUMMIT_CROSS_SECONDS), SUMMIT_NODE_RATE),
        domain=3,
        socket=3,
        sources=(PAPER, f"{BENCHPRESS}. {SUMMIT_PING_PONG}. {PING_PONG}. {MAX_RATE}", OLCF, X_BUS),
        assumed=(*ASSUMED, *ROOTS, *steps, "eager", "network_eager"),
        spread=(0.4, 2.5),
        about="6 V100 a node: published ping-pongs and name-plates, latencies as on Lassen; not fitted to collectives",
    )


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--into", type=Path, default=SHIPPED, help="folder of the files")
    folder = parser.parse_args().into
    for machine in (lassen(), summit()):
        path = folder / f"{machine.name}.json"
        path.write_text(machine.to_json(), encoding="utf-8")
        rates = {name: value for name, value in asdict(machine.parameters).items() if name.endswith("_byte")}
        print(path, *(f"{name} {1e-9 / value:.1f} GB/s" for name, value in rates.items() if value))


if __name__ == "__main__":
    main()
