"""Collectives whose blocks differ in size, and what ranks tell each other of sizes.

An uneven call binds a schedule to an `UnevenLayout`. A rank knows the sizes of its own
blocks from its arguments, at both ends of a message alike. What is put together in a node's
shared buffer also depends on the blocks of the mates: they tell each other, by an allgather
through shared memory, before each call. Nothing about sizes crosses the network.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hiercoll.algorithms import get_algorithm
from hiercoll.algorithms.alltoallv import STRAIGHT, TOGETHER
from hiercoll.buffers import BlockLayout, HostMemory, Transfer, UnevenLayout
from hiercoll.engines import Board
from hiercoll.executor import Binding, Plan, bind
from hiercoll.schedule import BufferName, Schedule
from hiercoll.topology import Topology

Sizes: TypeAlias = "npt.NDArray[np.int64]"
Around: TypeAlias = "tuple[list[Transfer], list[Transfer]]"
LIMIT = 4096  # bytes: smaller blocks travel together
MOST_SHARED = 64 << 20  # bytes of a node's buffer for them
LEAST_SHARED = 64 << 10


class Blocks(NamedTuple):
    """Lengths and offsets in bytes of a rank's blocks, by peer, in its send and its receive buffer."""

    sent: Sizes
    sent_at: Sizes
    received: Sizes
    received_at: Sizes


def segment_places(at: Sizes, sizes: Sizes, segments: int) -> dict[int | None, tuple[Sizes, Sizes]]:
    """Offsets and lengths of whole blocks, and of their segments, as equal as they can be."""
    places: dict[int | None, tuple[Sizes, Sizes]] = {None: (at, sizes)}
    for part in range(segments if segments > 1 else 0):
        start, end = (sizes * k // segments for k in (part, part + 1))
        places[part] = (at + start, end - start)
    return places


def allgatherv_layout(schedule: Schedule, blocks: Blocks) -> tuple[UnevenLayout, int]:
    """Where blocks lie, and the bytes of the shared buffer: all ranks know all sizes."""
    shared = _one_after_the_other(blocks.received[[source for source, _ in schedule.holds]])
    own = {"send": (blocks.sent_at, blocks.sent), "recv": (blocks.received_at, blocks.received), "shared": shared}
    places = {
        (name, part): place
        for name, (at, sizes) in own.items()
        for part, place in segment_places(at, sizes, schedule.segments).items()
    }
    return UnevenLayout(places, schedule.segments), int(shared[1].sum())  # type: ignore[arg-type]


def alltoallv_layout(
    schedule: Schedule, topology: Topology, blocks: Blocks, mates: Sizes, limit: int
) -> tuple[UnevenLayout, int]:
    """Where blocks lie, and the bytes of the shared buffer. Blocks below ``limit`` bytes fill their
    segment `TOGETHER`, others `STRAIGHT`. ``mates[lane]``: what each lane sends, and receives."""
    if schedule.segments == 1:
        own = {("send", None): (blocks.sent_at, blocks.sent), ("recv", None): (blocks.received_at, blocks.received)}
        return UnevenLayout(own), 0  # type: ignore[arg-type]
    sizes = mates[_known_sizes(schedule.holds, topology, schedule.rank)]
    shared = _one_after_the_other(np.where(sizes < limit, sizes, 0))
    places: dict[tuple[BufferName, int | None], tuple[Sizes, Sizes]] = {("shared", TOGETHER): shared}
    ends: tuple[tuple[BufferName, Sizes, Sizes], ...] = (
        ("send", blocks.sent_at, blocks.sent),
        ("recv", blocks.received_at, blocks.received),
    )
    for name, at, sizes in ends:
        small = sizes < limit
        places[name, TOGETHER] = (at, np.where(small, sizes, 0))
        places[name, STRAIGHT] = (at, np.where(small, 0, sizes))
    return UnevenLayout(places, 2), int(shared[1].sum())


def _one_after_the_other(sizes: Sizes) -> tuple[Sizes, Sizes]:
    return np.cumsum(sizes) - sizes, sizes


@lru_cache(maxsize=64)
def _known_sizes(
    holds: tuple[tuple[int, int], ...], topology: Topology, rank: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """For each (source, destination), the mate that tells its size: lane, 0 if it sends it or
    1 if it receives it, and the other end."""
    node, lane_of = topology.node_of[rank], topology.lane_of
    known = [(lane_of[s], 0, d) if topology.node_of[s] == node else (lane_of[d], 1, s) for s, d in holds]
    lanes, ends, others = np.array(known, dtype=np.intp).reshape(-1, 3).T
    return lanes, ends, others


class Uneven:
    """What the uneven calls of a communicator share. ``node`` gives the communicator of this
    rank's node; it is collective at its first use."""

    def __init__(self, comm: MPI.Intracomm, topology: Topology, node: Callable[[], MPI.Intracomm]) -> None:
        self._comm, self._topology, self._node = comm, topology, node
        self._memory = HostMemory()
        self._boards: dict[Hashable, Board] = {}
        self._room: dict[Hashable, int] = {}
        self._counts: tuple[Plan, Sizes, Sizes, Board | None] | None = None
        self._rank = comm.rank
        lanes = max(topology.node_sizes)
        self.most_together = MOST_SHARED // (2 * lanes * topology.size)

    def mates(self, sent: Sizes, received: Sizes) -> Sizes:
        """What each lane of this node sends to, and receives from, every rank, in bytes. Of the
        node; a view that the next call overwrites."""
        if self._counts is None:
            self._counts = self._make_counts()
        plan, mine, everyone, _ = self._counts
        mine[0], mine[1] = sent, received
        plan()
        return everyone

    def _make_counts(self) -> tuple[Plan, Sizes, Sizes, Board | None]:
        """An allgather among mates, through shared memory, as any other: proved, and bound once."""
        size, lanes = self._topology.size, len(self._topology.node(self._rank))
        mine, everyone = np.zeros((2, size), np.int64), np.zeros((lanes, 2, size), np.int64)
        node, topology = self._node(), Topology((0,) * lanes)
        schedule = get_algorithm("allgather", "shared").schedule(topology, node.rank)
        board = Board(self._comm, node, lanes * mine.nbytes, self._flags(schedule), 0, 0)
        places: dict[BufferName, int] = {
            "send": mine.ctypes.data,
            "recv": everyone.ctypes.data,
            "shared": board.address,
        }
        layout = BlockLayout(mine.nbytes)
        binding = Binding(node, topology.lane_of, self._memory, layout, places, 0, board)
        return bind(schedule, binding, "sizes of the node"), mine, everyone, board

    def board(self, key: Hashable, schedule: Schedule, nbytes: int) -> Board:
        """A shared buffer with at least ``nbytes``, as all mates know. Of the node where it must grow."""
        if key in self._boards and nbytes <= self._room[key]:
            return self._boards[key]
        if key in self._boards:
            self._boards.pop(key).free()
        self._room[key] = max(LEAST_SHARED, 1 << max(nbytes - 1, 0).bit_length())
        self._boards[key] = Board(self._comm, self._node(), self._room[key], self._flags(schedule), 0, 0)
        return self._boards[key]

    def give_away(self, key: Hashable) -> Board | None:
        """The shared buffer of that key, which somebody else frees."""
        self._room.pop(key, None)
        return self._boards.pop(key, None)

    def _flags(self, schedule: Schedule) -> int:
        """How many flags a rank of this node raises at most. Of the node."""
        most = np.empty(1, np.int64)
        self._node().Allreduce(np.array([schedule.flags]), most, op=MPI.MAX)
        return int(most[0])

    def plan(
        self,
        collective: str,
        schedule: Schedule,
        key: Hashable,
        blocks: Blocks,
        addresses: tuple[int, int],
        limit: int,
        where: tuple[MPI.Intracomm, int],
        name: str,
        around: Around,
    ) -> Plan:
        """A plan for blocks of these sizes; see `bind`. Of the node where sizes of mates matter."""
        if collective == "allgatherv":
            layout, nbytes = allgatherv_layout(schedule, blocks)
        else:
            mates = self.mates(blocks.sent, blocks.received) if schedule.segments > 1 else blocks.sent
            layout, nbytes = alltoallv_layout(schedule, self._topology, blocks, mates, min(limit, self.most_together))
        board = self.board(key, schedule, nbytes) if schedule.shared else None
        return self.bind(schedule, layout, addresses, name, board, where, around)

    def bind(
        self,
        schedule: Schedule,
        layout: UnevenLayout,
        addresses: tuple[int, int],
        name: str,
        board: Board | None,
        where: tuple[MPI.Intracomm, int],
        around: Around,
    ) -> Plan:
        """The plan of one call, or of many with the same sizes, on buffers at (send, receive) addresses."""
        places: dict[BufferName, int] = {"send": addresses[0], "recv": addresses[1]}
        if board is not None:
            places["shared"] = board.address
        comm, tag = where
        binding = Binding(comm, self._topology.lane_of, self._memory, layout, places, tag, board, around)
        return bind(schedule, binding, name)

    def free(self) -> None:
        """Free everything. Of the node."""
        if self._counts is not None:
            plan, _, _, board = self._counts
            plan.free()
            if board is not None:
                board.free()
        for board in self._boards.values():
            board.free()
        self._counts, self._boards = None, {}
