"""Collectives whose blocks differ in size: what the calls of a communicator share."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
from mpi4py import MPI

from hiercoll.buffers import HostMemory, UnevenLayout
from hiercoll.engines import Board, Engine
from hiercoll.executor import REQUEST_BYTES, Binding, Plan, bind
from hiercoll.interpreter import Blocks, Interpreter, Kept, Program, Sizes, Slots
from hiercoll.schedule import BufferName, Schedule
from hiercoll.topology import Topology

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
        self._boards: dict[Hashable, tuple[int, Board]] = {}  # with their room in bytes
        self._programs: dict[Hashable, Program] = {}
        self._slots: dict[Hashable, Slots] = {}
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
        if collective == "alltoallv":
            limit = min(limit, self._most_together)
            plan = Plan(self._engine(schedule, key, blocks, addresses, limit, where, keep), name, schedule, None)
            plan.keep_alive(nbytes=REQUEST_BYTES * len(schedule.ops))
            return plan
        layout, nbytes = allgatherv_layout(schedule, blocks)
        places: dict[BufferName, int] = {"send": addresses[0], "recv": addresses[1]}
        board = self._board(key, schedule, nbytes) if schedule.shared else None
        if board is not None:
            places["shared"] = board.address
        comm, tag = where
        binding = Binding(comm, self._topology.lane_of, self._memory, layout, places, tag, board)
        return bind(schedule, binding, name)

    def _engine(
        self,
        schedule: Schedule,
        key: Hashable,
        blocks: Blocks,
        addresses: tuple[int, int],
        limit: int,
        where: tuple[MPI.Intracomm, int],
        keep: bool,
    ) -> Engine:
        program, slots, board = self._programs.get(key), None, None
        if program is None:
            program = self._programs[key] = Program(schedule)
        if schedule.shared:
            slots = self._slots.get((key, limit))
            if slots is None:
                slots = self._slots[key, limit] = Slots(schedule, self._topology, limit)
            board = self._board((key, limit), schedule, slots.nbytes)
        lane_of = self._topology.lane_of
        interpreter = Interpreter(program, where, lane_of, blocks, addresses, limit, slots, board)
        return Kept(interpreter, program, board, lane_of) if keep else interpreter

    def _board(self, key: Hashable, schedule: Schedule, nbytes: int) -> Board:
        """A shared buffer with at least ``nbytes``, as all mates know. Of the node where it must grow."""
        room, board = self._boards.get(key, (-1, None))
        if board is None or room < nbytes:
            most, node = np.empty(1, np.int64), self._node()
            self._meet(node, "agreement on shared memory")
            if board is not None:
                self._moved()
                del self._boards[key]
                board.free()
            room = max(nbytes, 2 * room)
            node.Allreduce(np.array([schedule.flags]), most, op=MPI.MAX)
            board = Board(self._comm, node, room, int(most[0]), 0, 0)
            self._boards[key] = room, board
        return board

    def give_away(self, key: Hashable, limit: int) -> Board | None:
        """The shared buffer of a plan, which somebody else frees."""
        self._programs.pop(key, None)
        limit = min(limit, self._most_together)
        self._slots.pop((key, limit), None)
        _, board = self._boards.pop(key, None) or self._boards.pop((key, limit), None) or (0, None)
        return board

    def free(self) -> None:
        """Free everything. Of the node."""
        for _, board in self._boards.values():
            board.free()
        self._boards.clear()
