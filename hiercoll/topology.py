"""Which ranks share a node: the only fact about a machine that algorithms see.

A :class:`Topology` is a value: it has no communicator and can be made for any
layout, so that schedules for machines one does not have can be proved and costed.
"""

from __future__ import annotations

import os
import platform
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from hiercoll import settings
from hiercoll.errors import ArgumentError, LayoutError

if TYPE_CHECKING:
    from mpi4py import MPI

LAYOUT_HELP = (
    "NODESxLANES (2x4), a sum of node sizes (3+5), either with :block, :cyclic or :random[=SEED], "
    "or the node of every rank (0,0,1,1)"
)

MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Topology:
    """The node of every rank.

    ``node_of[r]`` is the node of rank r; nodes are numbered 0.. in the order of
    their lowest rank. Equal topologies compare and hash equal.
    """

    node_of: tuple[int, ...]

    def __post_init__(self) -> None:
        order = list(dict.fromkeys(self.node_of))
        if not order:
            raise LayoutError("layout", "at least one rank", "none")
        number = {node: i for i, node in enumerate(order)}
        object.__setattr__(self, "node_of", tuple(number[node] for node in self.node_of))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.node_of)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.node_of)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in lane order (ascending rank)."""
        members: list[list[int]] = [[] for _ in range(max(self.node_of) + 1)]
        for rank, node in enumerate(self.node_of):
            members[node].append(rank)
        return tuple(map(tuple, members))

    @cached_property
    def lane_of(self) -> tuple[int, ...]:
        """Index of each rank within its node."""
        lanes = [0] * self.size
        for ranks in self.nodes:
            for lane, rank in enumerate(ranks):
                lanes[rank] = lane
        return tuple(lanes)

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Number of ranks of each node."""
        return tuple(map(len, self.nodes))

    @property
    def is_even(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len(set(self.node_sizes)) == 1

    def node(self, rank: int) -> tuple[int, ...]:
        """The ranks that share a node with ``rank``, itself included."""
        return self.nodes[self.node_of[rank]]

    def groups(self, node: int, count: int) -> tuple[tuple[int, ...], ...]:
        """The node's ranks in ``count`` contiguous, nearly equal groups.

        A node with fewer ranks than ``count`` has one group per rank. The first
        rank of a group is its leader. Raises ArgumentError for no groups.
        """
        if count < 1:
            raise ArgumentError("groups", "at least one group per node", count)
        ranks = self.nodes[node]
        count = min(count, len(ranks))
        bounds = [i * len(ranks) // count for i in range(count + 1)]
        return tuple(ranks[a:b] for a, b in pairwise(bounds))

    @cached_property
    def placement(self) -> str:
        """``block`` (nodes hold consecutive ranks), ``cyclic`` (dealt in turn) or ``irregular``."""
        if list(self.node_of) == sorted(self.node_of):
            return "block"
        return "cyclic" if self.node_of == _deal(self.node_sizes) else "irregular"

    def __str__(self) -> str:
        sizes = self.node_sizes
        text = f"{len(sizes)}x{sizes[0]}" if self.is_even else "+".join(map(str, sizes))
        return text if self.placement == "block" else f"{text}:{self.placement}"


def _deal(sizes: Sequence[int]) -> tuple[int, ...]:
    """Nodes of ranks dealt to nodes in turn, skipping the full ones."""
    left = list(sizes)
    nodes: list[int] = []
    while any(left):
        for node, room in enumerate(left):
            if room:
                nodes.append(node)
                left[node] -= 1
    return tuple(nodes)


def parse_layout(text: str) -> Topology:
    """Topology of a layout as written on a command line or in ``HIERCOLL_NODES``.

    Forms: ``2x4`` (2 nodes of 4 ranks), ``3+5`` (a node of 3 and one of 5), both
    with an optional placement ``:block`` (default), ``:cyclic`` or
    ``:random[=SEED]``; or the node of each rank, ``0,0,1,1``. Raises LayoutError.
    """
    wrong = LayoutError("layout", LAYOUT_HELP, repr(text))
    shape, _, placement = text.strip().partition(":")
    if re.fullmatch(r"\d{1,7}(,\d{1,7})+", shape) and not placement:
        return Topology(tuple(map(int, shape.split(","))))
    if match := re.fullmatch(r"(\d{1,7})x(\d{1,7})", shape):
        nodes, lanes = map(int, match.groups())
        sizes = [lanes] * nodes if nodes * lanes <= MOST_RANKS else []
    elif re.fullmatch(r"\d{1,7}(\+\d{1,7})*", shape):
        sizes = list(map(int, shape.split("+")))
    else:
        raise wrong
    if not sizes or 0 in sizes or sum(sizes) > MOST_RANKS:
        raise wrong
    blocks = [node for node, size in enumerate(sizes) for _ in range(size)]
    if placement in ("", "block"):
        return Topology(tuple(blocks))
    if placement == "cyclic":
        return Topology(_deal(sizes))
    if match := re.fullmatch(r"random(?:=(\d+))?", placement):
        import random  # which takes a while, and few need it

        random.Random(int(match[1] or 0)).shuffle(blocks)
        return Topology(tuple(blocks))
    raise wrong


class Surroundings(NamedTuple):
    """Of a communicator: where its ranks are; how many cores there are to each (see `cores_of_each`); and the largest
    of the numbers that they told, each of several."""

    topology: Topology
    cores: float
    largest: list[float]


def discover(comm: MPI.Intracomm, tell: Callable[[], Sequence[float]] = tuple) -> Surroundings:
    """Topology and cores of an MPI communicator; and the largest of the numbers that all ranks ``tell``, each of
    several, since one exchange serves for all (collective).

    Nodes are hosts (`_host`), or what ``MPI_Comm_split_type(SHARED)`` says where a rank cannot tell its own; or, where
    the environment variable ``HIERCOLL_NODES`` is set, the virtual nodes that it describes for
    MPI_COMM_WORLD. Raises LayoutError, on every rank alike, if the layout is
    malformed, has another number of ranks than MPI_COMM_WORLD, differs between
    ranks, or lets a virtual node span hosts.
    """
    import numpy as np  # here: scripts/lab reads layouts without it
    from mpi4py import MPI

    text = settings.nodes()
    (world_rank,) = translated([comm.rank], comm, MPI.COMM_WORLD)
    mine = [_host(), world_rank, -1 if text is None else zlib.crc32(text.encode()), *_own_cores(), *tell()]
    # Not an Allgather: the first one on a communicator may take as long as ten later ones, and there have been some of
    # these, if hiercoll has counted calls before.
    table = np.full((comm.size, len(mine)), -np.inf)
    everyone = np.empty_like(table)
    table[comm.rank] = mine
    comm.Allreduce(table, everyone, op=MPI.MAX)
    hosts, world_ranks, texts, names, numbers = everyone[:, :5].astype(int).T.tolist()
    largest = everyone[:, 5:].max(axis=0).tolist()
    if UNKNOWN in hosts:
        hosts = _hosts_by_mpi(comm)
    cores = cores_of_each(hosts, names, numbers)
    if text is None and len(set(texts)) == 1:
        return Surroundings(Topology(tuple(hosts)), cores, largest)
    if len(set(texts)) > 1:
        got = ", ".join(sorted(set(map(repr, comm.allgather(text)))))
        raise LayoutError("HIERCOLL_NODES", "the same value on every rank", got, comm.rank)
    return Surroundings(_virtual(str(text), hosts, world_ranks, MPI.COMM_WORLD.size, comm.rank), cores, largest)


def _own_cores() -> tuple[int, int]:
    """A number for the cores that this process may run on, and how many these are; 0 where the system does not say."""
    cores = sorted(cpus_here())
    return zlib.crc32(repr(cores).encode()), len(cores)


def cpus_here() -> set[int]:
    """Those that this process may run on; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def cores_of_each(hosts: Sequence[int], names: Sequence[int], numbers: Sequence[int]) -> float:
    """Cores to each rank on the host where there are the fewest, 1 at most; from each rank's host, a name for the cores
    on which it may run, and the number of these. Of ranks that are not of the communicator nothing is known."""
    if 0 in numbers:
        return 1.0
    ranks = Counter(hosts)
    cores: dict[int, dict[int, int]] = {host: {} for host in hosts}
    for host, name, number in zip(hosts, names, numbers, strict=True):
        cores[host][name] = number
    return min(1.0, *(sum(known.values()) / ranks[host] for host, known in cores.items()))


UNKNOWN = 0  # number of a host


@cache
def _host() -> int:
    """A number for what shares memory with this process, below 2^53: a running system, and what is mounted there for
    shared memory, which containers may have of their own; `UNKNOWN` where the system does not say. Processes that share
    memory in MPI's eyes are asked for by a call that takes 4 to 60 ms at first."""
    try:
        text = f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text()} {os.stat('/dev/shm').st_dev}"
    except OSError:
        return UNKNOWN
    return (zlib.crc32(text.encode()) | zlib.crc32(text[::-1].encode()) << 32) % (1 << 53) or 1


def _hosts_by_mpi(comm: MPI.Intracomm) -> list[int]:
    """By rank the first one that shares memory with it, as the MPI library sees it. Collective."""
    from mpi4py import MPI

    host = cast("MPI.Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank))
    (first,) = translated([0], host, comm)
    host.Free()
    return list(comm.allgather(first))


def translated(ranks: Iterable[int], comm: MPI.Intracomm, other: MPI.Intracomm) -> list[int]:
    """The ranks in ``other`` of these ranks of ``comm``. Local."""
    here, there = comm.Get_group(), other.Get_group()
    found = list(here.Translate_ranks(list(ranks), there))
    here.Free()
    there.Free()
    return found


def virtual_nodes(text: str, world: int, rank: int) -> Topology:
    """The layout that ``text``, the value of ``HIERCOLL_NODES``, gives the ranks of MPI_COMM_WORLD. ``rank`` is who
    asks. Raises LayoutError."""
    try:
        layout = parse_layout(text)
    except LayoutError:
        raise LayoutError("HIERCOLL_NODES", LAYOUT_HELP, repr(text), rank) from None
    if layout.size != world:
        got = f"{text!r}, which describes {layout.size}"
        raise LayoutError("HIERCOLL_NODES", f"a layout of the {world} ranks of MPI_COMM_WORLD", got, rank)
    return layout


def _virtual(text: str, hosts: list[int], world_ranks: list[int], world: int, rank: int) -> Topology:
    """The part of the layout ``text`` of MPI_COMM_WORLD that these world ranks see."""
    layout = virtual_nodes(text, world, rank)
    if not all(0 <= r < world for r in world_ranks):
        got = "a communicator with ranks outside it"
        raise LayoutError("HIERCOLL_NODES", "only ranks of MPI_COMM_WORLD", got, rank)
    nodes = [layout.node_of[r] for r in world_ranks]
    host_of: dict[int, int] = {}
    for node, host in zip(nodes, hosts, strict=True):
        if host_of.setdefault(node, host) != host:
            got = f"{text!r}, whose node {node} spans hosts"
            raise LayoutError("HIERCOLL_NODES", "virtual nodes within one host each", got, rank)
    return Topology(tuple(nodes))
