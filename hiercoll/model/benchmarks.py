"""What published benchmarks ran, as profiles: the alltoall algorithms of MPI Advance's `alltoall_topology`.

N nodes of q ranks, P = N q ranks in all; L groups or leaders on a node, g = q / L ranks each. Each algorithm is a few
phases, timed alone too, with copies between them:

    flat                    exchange (P ranks, 1 block)
    node- and               inter (the N L ranks of one place in their groups, g blocks), intra (g ranks, N L blocks)
      locality-aware        copies: 2 of P blocks in P pieces, on all ranks
    hierarchical            gather (g ranks, P blocks), exchange (N L leaders, g g blocks), scatter
                            copies: g P blocks in P and in g P pieces, on leaders
    multileader-node-aware  gather, inter (N leaders of one place, q g blocks), intra (L leaders, N g g blocks), scatter
                            copies: g P blocks in P, L N and g P pieces, on leaders

Exchanges are pairwise: one send and one receive at a time. Staging buffers are allocated in each call. Facts of the
program are those of its source, mpi-advance/locality_aware, `src/collective/alltoall.c` (BSD 3-Clause).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from hiercoll.errors import ParameterError
from hiercoll.model.machine import Machine
from hiercoll.model.measurements import Measurement
from hiercoll.model.profile import Copied, Profile, RankProfile, of_node
from hiercoll.schedule import RECV, SEND, Builder, Schedule
from hiercoll.topology import Topology

ALGORITHMS = ("flat", "node-aware", "locality-aware", "hierarchical", "multileader-node-aware")
Phase = Callable[[Topology, int], Schedule]


def _exchange(members: Callable[[int], Sequence[int]], blocks: int, topology: Topology, rank: int) -> Schedule:
    """Pairwise among the ``members`` that a rank gives; none for those that are not among theirs."""
    b, ranks = Builder(rank), members(rank)
    if rank in ranks:
        own = ranks.index(rank)
        for step in range(1, len(ranks)):
            with b.round():
                b.send(ranks[(own + step) % len(ranks)], SEND[0:blocks])
                b.recv(ranks[own - step], RECV[0:blocks])
    return b.build()


def _rooted(group: int, blocks: int, gather: bool, topology: Topology, rank: int) -> Schedule:
    """Each rank of a group of ``group`` lanes to its first one, or from there."""
    b, lane, node = Builder(rank), topology.lane_of[rank], topology.node(rank)
    others = node[lane + 1 : lane + group] if lane % group == 0 else (node[lane - lane % group],)
    with b.round():
        for peer in others:
            if (lane % group == 0) == gather:
                b.recv(peer, RECV[0:blocks])
            else:
                b.send(peer, SEND[0:blocks])
    return b.build()


def _phases(name: str, nodes: int, q: int, groups: int) -> dict[str, Phase]:
    """The phases of an algorithm."""
    size, g = nodes * q, q // groups
    everyone = range(size)
    alike = lambda rank: range(rank % g, size, g)  # noqa: E731 ranks of one place in their groups
    group = lambda rank: range(rank - rank % g, rank - rank % g + g)  # noqa: E731
    leaders = lambda rank: range(rank - rank % q, rank - rank % q + q, g)  # noqa: E731 of the rank's node
    gather, scatter = (partial(_rooted, g, size, gather) for gather in (True, False))
    if name == "flat":
        return {"exchange": partial(_exchange, lambda rank: everyone, 1)}
    if name in ("node-aware", "locality-aware"):
        return {"inter": partial(_exchange, alike, g), "intra": partial(_exchange, group, nodes * groups)}
    if name == "hierarchical":
        exchange = partial(_exchange, lambda rank: range(0, size, g), g * g)
        return {"gather": gather, "exchange": exchange, "scatter": scatter}
    if name == "multileader-node-aware":
        between = lambda rank: range(rank % q, size, q) if rank % g == 0 else ()  # noqa: E731
        inter, intra = partial(_exchange, between, q * g), partial(_exchange, leaders, nodes * g * g)
        return {"gather": gather, "inter": inter, "intra": intra, "scatter": scatter}
    raise ParameterError("algorithm", f"one of {', '.join(ALGORITHMS)}", repr(name))


def _copies(name: str, nodes: int, q: int, groups: int) -> tuple[list[Copied], float, float]:
    """Copies of a rank, how many of a node's ranks make them, and blocks that it allocates."""
    size, g = nodes * q, q // groups
    if name == "flat":
        return [], 0, 0
    if name in ("node-aware", "locality-aware"):
        return [Copied(size, size)] * 2, q, size
    pieces = [size, g * size] if name == "hierarchical" else [size, groups * nodes, g * size]
    return [Copied(count, g * size) for count in pieces], groups, 2 * g * size


@lru_cache(maxsize=1024)
def _profiled(name: str, phase: str, nodes: int, q: int, groups: int, domain: int, socket: int) -> Profile:
    topology = Topology(tuple(rank // q for rank in range(nodes * q)))
    emit = partial(_phases(name, nodes, q, groups)[phase], topology)
    return of_node(emit, topology, Machine("", domain=domain, socket=socket), 0, groups)


def profiled(machine: Machine, name: str, phase: str, nodes: int, q: int, groups: int = 1) -> list[Profile]:
    """An algorithm's ``phase``, or its "total", on ``nodes`` nodes of ``q`` ranks with so many groups or leaders: parts
    whose times add up. Raises ParameterError."""
    phases = _phases(name, nodes, q, groups)
    if phase != "total" and phase not in phases:
        raise ParameterError("phase", f"total, or one of {', '.join(phases)} for {name}", repr(phase))
    wanted = list(phases) if phase == "total" else [phase]
    found = [_profiled(name, each, nodes, q, groups, machine.domain, machine.socket) for each in wanted]
    copies, ranks, fresh = _copies(name, nodes, q, groups)
    if phase == "total" and copies:
        first = found[0]
        # A class of its own: it has nothing else to wait for.
        found.append(replace(first, classes=[(RankProfile(copies=copies), ranks)], totals=[], fresh=fresh * ranks))
    return found


def of_row(machine: Machine, row: Measurement) -> list[Profile]:
    """`profiled` for a published row of an alltoall. Raises ParameterError."""
    return profiled(machine, row.algorithm, row.phase, row.nodes, row.lanes, groups_of(row.parameters))


def groups_of(parameters: Iterable[str]) -> int:
    """Groups, or leaders, as the published rows spell them (``groups=4``); 1 if they do not."""
    for each in parameters:
        name, _, value = each.partition("=")
        if name in ("groups", "leaders") and value.isdecimal():
            return int(value)
    return 1
