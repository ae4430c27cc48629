"""Collectives whose blocks differ in size: what the calls of a communicator share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from hiercoll.algorithms.alltoallv import STRAIGHT, TOGETHER
from hiercoll.binding import Binding
from hiercoll.buffers import HostMemory, UnevenLayout
from hiercoll.executor import Plan, plan_of
from hiercoll.lowering import Steps, lower, without
from hiercoll.schedule import BufferName, Schedule, reads, writes
from hiercoll.sizes import Areas, Blocks, Sizes, SizeTable, rows_at
from hiercoll.topology import Topology
from hiercoll.windows import Window

LIMIT = 4096  # bytes: smaller blocks travel together
MOST_SHARED = 64 << 20  # bytes of a node's buffer for them


def allgatherv_layout(schedule: Schedule, blocks: Blocks) -> tuple[UnevenLayout, int]:
    """Where blocks lie, and the bytes of the shared buffer: all ranks know all sizes."""
    held = blocks.received[[source for source, _ in schedule.holds]]
    ends: tuple[tuple[BufferName, Sizes, Sizes], ...] = (
        ("send", blocks.sent_at, blocks.sent),
        ("recv", blocks.received_at, blocks.received),
        ("shared", np.cumsum(held) - held, held),
    )
    layout = UnevenLayout(schedule.segments)
    for name, at, sizes in ends:
        layout.place(name, None, at, sizes)
        for part in range(schedule.segments if schedule.segments > 1 else 0):
            start, end = (sizes * k // schedule.segments for k in (part, part + 1))
            layout.place(name, part, at + start, end - start)
    return layout, int(held.sum())


def alltoallv_layout(schedule: Schedule, blocks: Blocks, limit: int) -> tuple[UnevenLayout, bool]:
    """Where a rank's own blocks lie, and whether some of them are of ``limit`` bytes or more: where small blocks
    travel together, those do not."""
    layout, large = UnevenLayout(schedule.segments), False
    ends: tuple[tuple[BufferName, Sizes, Sizes], ...] = (
        ("send", blocks.sent_at, blocks.sent),
        ("recv", blocks.received_at, blocks.received),
    )
    for name, at, sizes in ends:
        if not schedule.shared:
            layout.place(name, None, at, sizes)
        else:
            small = sizes < limit
            large = large or not small.all()
            layout.place(name, TOGETHER, at, sizes * small)
            layout.place(name, STRAIGHT, at, sizes * ~small)
    return layout, large


class Lowered(NamedTuple):
    """Steps of an alltoallv, and those of them that small blocks need."""

    steps: Steps
    small: Steps

    @classmethod
    def of(cls, schedule: Schedule) -> Lowered:
        """Of a schedule whose blocks are in two segments, or in none."""
        steps = lower(schedule)
        straight = [
            i
            for i, op in enumerate(schedule.ops)
            if any(region.part == STRAIGHT for region in (*reads(op), *writes(op)))
        ]
        return cls(steps, without(steps, straight) if schedule.shared else steps)


class Uneven:
    """What the uneven calls of a communicator share. ``node`` gives the communicator of this
    rank's node; it is collective at its first use. ``meet`` is called before what MPI waits in, ``moved``
    before shared memory moves."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        topology: Topology,
        node: Callable[[], MPI.Intracomm],
        meet: Callable[[MPI.Intracomm, str], None],
        moved: Callable[[], None],
    ) -> None:
        self._meet, self._moved = meet, moved
        self._comm, self._topology, self._node = comm, topology, node
        self._memory = HostMemory()
        self._windows: dict[Hashable, tuple[int, Window]] = {}  # with their room in bytes
        self._lowered: dict[Hashable, Lowered] = {}
        self._areas: dict[Hashable, Areas] = {}
        self._most_together = MOST_SHARED // (2 * max(topology.node_sizes) * topology.size)

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
        keep: bool,
    ) -> Plan:
        """A plan for one call, or (``keep``) for many with the same sizes, on buffers at (send,
        receive) addresses. Of the node where it needs (more) shared memory."""
        places: dict[BufferName, int] = {"send": addresses[0], "recv": addresses[1]}
        window, table = None, None
        if collective == "alltoallv":
            lowered = self._lowered.get(key)
            if lowered is None:
                lowered = self._lowered[key] = Lowered.of(schedule)
            limit = min(limit, self._most_together)
            layout, large = alltoallv_layout(schedule, blocks, limit)
            steps = lowered.steps if large else lowered.small
            if schedule.shared:
                areas = self._areas.get((key, limit))
                if areas is None:
                    areas = self._areas[key, limit] = Areas(schedule, self._topology, limit)
                window = self._window((key, limit), schedule, areas.nbytes)
                shared = cast(Any, MPI.buffer.fromaddress(window.address, areas.nbytes))
                table = SizeTable(areas, rows_at(shared, areas), blocks, limit, layout, TOGETHER)
        else:
            layout, nbytes = allgatherv_layout(schedule, blocks)
            steps = lower(schedule)
            window = self._window(key, schedule, nbytes) if schedule.shared else None
        if window is not None:
            places["shared"] = window.address
        lane_of = self._topology.lane_of
        (comm, tag), once = where, not keep
        binding = Binding(comm, lane_of, self._memory, layout, places, tag, window, once=once, sizes=table)
        return plan_of(steps, binding, name)

    def _window(self, key: Hashable, schedule: Schedule, nbytes: int) -> Window:
        """A shared buffer with at least ``nbytes``, as all ranks of the node know. Of the node where it must grow."""
        room, window = self._windows.get(key, (-1, None))
        if window is None or room < nbytes:
            most, node = np.empty(1, np.int64), self._node()
            self._meet(node, "agreement on shared memory")
            if window is not None:
                self._moved()
                del self._windows[key]
                window.free()
            room = max(nbytes, 2 * room)
            node.Allreduce(np.array([schedule.flags]), most, op=MPI.MAX)
            window = Window(self._comm, node, room, int(most[0]), 0, 0)
            self._windows[key] = room, window
        return window

    def give_away(self, key: Hashable, limit: int) -> Window | None:
        """The shared buffer of a plan, which somebody else frees."""
        self._lowered.pop(key, None)
        limit = min(limit, self._most_together)
        self._areas.pop((key, limit), None)
        _, window = self._windows.pop(key, None) or self._windows.pop((key, limit), None) or (0, None)
        return window

    def free(self) -> None:
        """Free everything. Of the node."""
        for _, window in self._windows.values():
            window.free()
        self._windows.clear()
