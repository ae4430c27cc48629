"""What a published benchmark of allgather ran, as profiles: Bruck's algorithm, flat and in two forms that know nodes.

N nodes of q ranks, blocks of what one rank contributes:

    bruck           all N q ranks double what they have
    lane-bruck      the N ranks of one lane double what they have; then the q ranks of a node, N blocks each
    locality-bruck  the q ranks of a node double what they have; then, until a node has all: lane l exchanges with the
                    node that is l times as far as so many have been put together, and the node's ranks double again

Sources: Bruck et al. 1997; Bienz, Gautam, Kharel, "A Locality-Aware Bruck Allgather" (EuroMPI 2022). Only sizes and
distances count here: which blocks they are is left open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from hiercoll.errors import ParameterError
from hiercoll.model.machine import Machine
from hiercoll.model.measurements import Measurement
from hiercoll.model.profile import Profile, of_node
from hiercoll.model.rounds import doubling
from hiercoll.schedule import RECV, SEND, Builder, Schedule
from hiercoll.topology import Topology


def _double(b: Builder, ranks: Sequence[int], width: int) -> None:
    """Bruck's allgather of ``ranks``, which have ``width`` blocks each; at its end all blocks are put in order."""
    own, have = ranks.index(b.rank), 1
    for count in doubling(len(ranks)):
        _exchange(b, ranks[own - have], ranks[(own + have) % len(ranks)], count * width)
        have += count
    if len(ranks) > 1:
        with b.round():
            b.copy(SEND[0 : have * width], RECV[0 : have * width])


def _exchange(b: Builder, target: int, source: int, blocks: int) -> None:
    with b.round():
        b.recv(source, RECV[0:blocks])
        b.send(target, SEND[0:blocks])


def _flat(topology: Topology, rank: int) -> Schedule:
    b = Builder(rank)
    _double(b, range(topology.size), 1)
    return b.build()


def _lanes(topology: Topology, rank: int) -> Schedule:
    b, lane = Builder(rank), topology.lane_of[rank]
    _double(b, [ranks[lane] for ranks in topology.nodes], 1)
    _double(b, topology.node(rank), len(topology.nodes))
    return b.build()


def _local(topology: Topology, rank: int) -> Schedule:
    b, node, lane = Builder(rank), topology.node_of[rank], topology.lane_of[rank]
    near, nodes = topology.node(rank), topology.nodes
    _double(b, near, 1)
    have = 1  # nodes whose blocks are together
    while have < len(nodes):
        far = lane * have
        if far:
            _exchange(b, nodes[node - far][lane], nodes[(node + far) % len(nodes)][lane], have * len(near))
        _double(b, near, have * len(near))
        have *= len(near)
    return b.build()


ALGORITHMS: dict[str, Callable[[Topology, int], Schedule]] = {
    "bruck": _flat,
    "lane-bruck": _lanes,
    "locality-bruck": _local,
}


@lru_cache(maxsize=256)
def _profiled(name: str, nodes: int, q: int, domain: int, socket: int) -> Profile:
    topology = Topology(tuple(rank // q for rank in range(nodes * q)))
    return of_node(partial(ALGORITHMS[name], topology), topology, Machine("", domain=domain, socket=socket), 0)


def is_known(row: Measurement) -> bool:
    """Whether it is one of these, and on nodes that it is known for: locality-bruck, on a power of the ranks of one."""
    if row.algorithm == "locality-bruck":
        return _is_power(row.nodes, row.lanes)
    return row.algorithm in ALGORITHMS


def of_row(machine: Machine, row: Measurement) -> list[Profile]:
    """What a published row of an allgather ran. Raises ParameterError where it is not known."""
    if not is_known(row):
        raise ParameterError("algorithm", f"one of {', '.join(ALGORITHMS)}", f"{row.algorithm!r} on {row.nodes} nodes")
    return [_profiled(row.algorithm, row.nodes, row.lanes, machine.domain, machine.socket)]


def _is_power(number: int, base: int) -> bool:
    while base > 1 and number % base == 0:
        number //= base
    return number == 1
