"""Two machines of Power9 hosts, Lassen and Summit, as published ping-pongs between their cores say.

    python scripts/host_machines.py [--into hiercoll/model/machines]

Writes summit.json: nothing of it is fitted to times of collectives. Lassen's values are where `fit_machines.py` begins,
which has timings of an allgather there. Values are of three kinds:

- measured by others, on the machine: between two cores (``SOCKET_SECONDS``, ..), and between as many pairs of cores
  of two nodes as ``PAIRS`` says (``NODE_SECONDS``): rates are the slopes between the two largest sizes, latencies the
  times of 16 bytes (smaller messages are timed first there, and take longer), what large messages cost more is the
  rest;
- name-plates (``CORES``: of a socket, for jobs);
- assumed (`ASSUMED`): the defaults, of which these logs say nothing.

All times are one way, in seconds; all sizes in bytes.
"""

from __future__ import annotations

import argparse
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from hiercoll.model.machine import SHIPPED, Machine, Parameters

BENCHPRESS = (
    "github.com/bienz2/BenchPress (BSD 2-Clause), logs of ping-pongs between cores, half a round trip, counts of "
    "4-byte floats; figures only"
)
KIB, MIB = 1 << 10, 1 << 20
ROOTS = ("root_message", "root_in", "root_out", "root_out_domain", "root_large", "root_factor")
COPIES = ("piece", "line", "copy_byte", "reduce_byte", "fresh", "flag")
CACHES = ("cache_socket", "cache_rank", "memory", "bus", "socket_link")
ASSUMED = (*ROOTS, *COPIES, *CACHES, "posted", "adapter_message", "congestion")


class Logs(NamedTuple):
    """Of a machine: seconds by size of a message between two cores of one socket, of two sockets, of two nodes; and
    between ``pairs`` pairs of cores of two nodes at once."""

    socket: dict[int, float]
    cross: dict[int, float]
    network: dict[int, float]
    node: dict[int, float]
    pairs: int


# Ranks 0 and 2, 0 and 20, 0 and 42. Of more than 20 pairs at once, some send while others receive: the time stays as
# it is until there are 40.
LASSEN = Logs(
    {16: 5.278530e-07, 64 * KIB: 9.154267e-06, MIB: 7.646648e-05, 2 * MIB: 1.466530e-04},
    {16: 9.507405e-07, 64 * KIB: 1.741513e-05, MIB: 1.622794e-04, 2 * MIB: 3.196151e-04},
    {16: 1.295686e-06, 4 * KIB: 3.545900e-06, 64 * KIB: 1.213384e-05, MIB: 8.330705e-05, 2 * MIB: 1.592163e-04},
    {256 * KIB: 2.497150e-04, 512 * KIB: 4.736835e-04},
    20,
)
# Ranks 0 and 2, 0 and 3, 0 and 8.
SUMMIT = Logs(
    {16: 4.873865e-07, 64 * KIB: 7.004349e-06, 256 * KIB: 2.077652e-05, 512 * KIB: 3.675337e-05},
    {16: 9.434685e-07, 64 * KIB: 1.590520e-05, 256 * KIB: 4.647891e-05, 512 * KIB: 8.423145e-05},
    {16: 1.379458e-06, 4 * KIB: 3.635824e-06, 64 * KIB: 1.241693e-05, 256 * KIB: 2.980656e-05, 512 * KIB: 5.106395e-05},
    {256 * KIB: 4.325394e-04, 512 * KIB: 8.640684e-04},
    40,
)
# Between which sizes times step up, on both and at all distances.
STEP = (8 * KIB, 16 * KIB)
LASSEN_CORES, SUMMIT_CORES = 20, 21  # a socket has, for jobs


def slope(seconds: dict[int, float]) -> float:
    """Seconds per byte between the two largest sizes."""
    small, large = sorted(seconds)[-2:]
    return (seconds[large] - seconds[small]) / (large - small)


def more(seconds: dict[int, float], size: int) -> float:
    """Seconds that a message of ``size`` costs more than one of 16 bytes, and its bytes."""
    return seconds[size] - size * slope(seconds) - seconds[16]


def parameters(logs: Logs) -> Parameters:
    """What the logs say; the defaults for the rest."""
    return Parameters(
        domain=logs.socket[16],
        socket=logs.socket[16],
        node=logs.cross[16],
        network=logs.network[16],
        domain_byte=slope(logs.socket),
        node_byte=slope(logs.cross),
        network_byte=slope(logs.network),
        network_small_byte=more(logs.network, 4 * KIB) / (4 * KIB),
        rendezvous=more(logs.socket, 64 * KIB),
        eager=sqrt(STEP[0] * STEP[1]),
        network_rendezvous=more(logs.network, 64 * KIB),
        network_eager=sqrt(STEP[0] * STEP[1]),
        adapter=slope(logs.node) / logs.pairs,
    )


def lassen() -> Machine:
    """40 cores a node. Ranks fill the first socket first, as in these logs."""
    logs = "Lassen, jobs 2412201 (pairs of cores) and 2412163 (up to 40 pairs), 2021-04-08; MPI library not recorded"
    return Machine(
        "Lassen",
        parameters(LASSEN),
        domain=LASSEN_CORES,
        socket=LASSEN_CORES,
        sources=(f"{BENCHPRESS}. {logs}",),
        assumed=ASSUMED,
        about="hosts: two sockets of 20 cores, dual-rail EDR",
    )


def summit() -> Machine:
    """42 cores a node."""
    logs = "Summit, Spectrum MPI, jobs 315490 (pairs of cores, 2020-09-01) and 305656 (up to 40 pairs, 2020-08-27)"
    return Machine(
        "Summit",
        parameters(SUMMIT),
        domain=SUMMIT_CORES,
        socket=SUMMIT_CORES,
        sources=(f"{BENCHPRESS}. {logs}",),
        assumed=ASSUMED,
        spread=(0.4, 2.5),
        about="hosts: two sockets of 21 cores, dual-rail EDR; published ping-pongs; not fitted to collectives",
    )


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--into", type=Path, default=SHIPPED, help="folder of the file")
    path = parser.parse_args().into / "summit.json"
    path.write_text(summit().to_json(), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
