"""Collectives whose blocks differ in size, and what ranks tell each other of sizes.

A rank knows the sizes of its own blocks from its arguments, at both ends of a message alike.
What is put together in a node's shared buffer also depends on the blocks of the mates: they
write their sizes beside their data, and read them when the flags say that the data are there.
Nothing about sizes crosses the network.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hiercoll.algorithms.alltoallv import STRAIGHT, TOGETHER
from hiercoll.buffers import HostMemory, UnevenLayout
from hiercoll.engines import Board, Pending, Wake, pending
from hiercoll.executor import Binding, Plan, bind, message
from hiercoll.schedule import BufferName, Copy, Join, Recv, Region, Schedule, Send, Signal, Wait, reads, writes
from hiercoll.topology import Topology

Sizes: TypeAlias = "npt.NDArray[np.int64]"
LIMIT = 4096  # bytes: smaller blocks travel together
MOST_SHARED = 64 << 20  # bytes of a node's buffer for them


class Blocks(NamedTuple):
    """Lengths and offsets in bytes of a rank's blocks, by peer, in its send and its receive buffer."""

    sent: Sizes
    sent_at: Sizes
    received: Sizes
    received_at: Sizes


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


class Slots:
    """Where the blocks of an alltoallv's shared buffer lie, whatever their sizes.

    The buffer begins with the sizes that each lane sends and receives. Each lane then has an
    area for what it writes, so that it need not know the others' sizes, and one area is for what
    comes from other nodes. ``most``: bytes that a block there may have.
    """

    def __init__(self, schedule: Schedule, topology: Topology, most: int) -> None:
        node, lane_of = topology.node_of[schedule.rank], topology.lane_of
        lanes, size = len(topology.nodes[node]), topology.size
        self.lane = lane_of[schedule.rank]
        self.shape = (lanes, 2, size)
        self.nbytes = 16 * lanes * size + 2 * lanes * size * most
        # Who tells the size of a block: its lane, whether by what it sends (0) or receives (1), the other end.
        told = [(lane_of[s], 0, d) if topology.node_of[s] == node else (lane_of[d], 1, s) for s, d in schedule.holds]
        by_lane, by_end, by_peer = np.array(told, dtype=np.intp).reshape(-1, 3).T
        area = np.where(by_end == 0, by_lane, lanes)
        self._order = np.argsort(area, kind="stable")  # blocks, area by area
        self._told = ((by_lane * 2 + by_end) * size + by_peer)[self._order]
        self._area = area[self._order]
        self._first = np.searchsorted(self._area, np.arange(lanes + 1))
        self._bases = 16 * lanes * size + np.arange(lanes + 1) * size * most
        own = np.flatnonzero((by_end == 0) & (by_lane == self.lane))
        self._own, self._own_peers = own, by_peer[own]
        self.count = len(told)

    def told(self, shared: Any) -> Sizes:
        """What each lane sends to, and receives from, each rank, in bytes."""
        return np.frombuffer(shared, np.int64, 2 * self.shape[0] * self.shape[2]).reshape(self.shape)

    def own(self, sizes: Sizes, limit: int) -> tuple[Sizes, Sizes]:
        """Offsets and sizes of all blocks, of which those that this lane writes are right."""
        at, length = np.zeros((2, self.count), np.int64)
        taken = sizes[self._own_peers]
        if taken.max() >= limit:
            taken = taken * (taken < limit)
        at[self._own] = self._bases[self.lane] + np.cumsum(taken) - taken
        length[self._own] = taken
        return at, length

    def all(self, told: Sizes, limit: int) -> tuple[Sizes, Sizes]:
        """The same of all, from what the lanes have said."""
        at, length = np.empty((2, self.count), np.int64)
        taken = told.reshape(-1)[self._told]
        if taken.max() >= limit:
            taken = taken * (taken < limit)
        before = np.cumsum(taken) - taken
        first = np.append(before, 0)[self._first]
        at[self._order] = before + (self._bases - first)[self._area]
        length[self._order] = taken
        return at, length


class Program:
    """What of an alltoallv's schedule does not depend on sizes."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        small: list[int] = []
        large: list[int] = []
        self.needs_mates: set[int] = set()
        for index, op in enumerate(schedule.ops):
            regions = [region for region in (*reads(op), *writes(op)) if region.blocks]
            straight = bool(regions) and regions[0].part != TOGETHER
            (large if straight else small).append(index)
            held = [schedule.holds[block] for region in regions if region.buffer == "shared" for block in region.blocks]
            if any(source != schedule.rank for source, _ in held):
                self.needs_mates.add(index)
        self._small = small
        self._large = [(index, *self._end(index)) for index in large]

    def _end(self, index: int) -> tuple[bool, int]:
        """Whether an operation on one large block receives it, and its peer."""
        op = self.schedule.ops[index]
        region = writes(op)[0] if isinstance(op, Recv) else reads(op)[0]
        return isinstance(op, Recv), region.blocks[0]

    def live(self, sent: list[int], received: list[int]) -> Sequence[int]:
        """Operations that have something to do, given the sizes of large blocks."""
        if not any(sent) and not any(received):
            return self._small
        ends = {True: received, False: sent}
        large = [index for index, incoming, peer in self._large if ends[incoming] and ends[incoming][peer]]
        return sorted(self._small + large)


class Interpreter:
    """Runs an alltoallv's schedule, its operations as they are listed, on blocks of any sizes.

    Messages are completed where a join names them. ``slots`` and ``board`` are None for
    schedules without shared memory.
    """

    def __init__(
        self,
        program: Program,
        where: tuple[MPI.Intracomm, int],
        lane_of: Sequence[int],
        blocks: Blocks,
        addresses: tuple[int, int],
        limit: int,
        slots: Slots | None,
        board: Board | None,
    ) -> None:
        self._program, self._where, self._lane_of, self._limit = program, where, lane_of, limit
        self._slots, self._board, self._blocks = slots, board, blocks
        self._views: dict[BufferName, Any] = {}
        self._layout = layout = UnevenLayout(program.schedule.segments)
        ends: tuple[tuple[BufferName, int, Sizes, Sizes], ...] = (
            ("send", addresses[0], blocks.sent_at, blocks.sent),
            ("recv", addresses[1], blocks.received_at, blocks.received),
        )
        for name, address, at, sizes in ends:
            self._views[name] = _view(address, int((at + sizes).max()))
            if slots is None:
                layout.place(name, None, at, sizes)
            elif sizes.max() < limit:
                layout.place(name, TOGETHER, at, sizes)
            else:
                small = sizes < limit
                layout.place(name, TOGETHER, at, sizes * small)
                layout.place(name, STRAIGHT, at, sizes * ~small)
        part = None if slots is None else STRAIGHT
        self._live = program.live(layout.lengths("send", part), layout.lengths("recv", part))
        if slots is not None and board is not None:
            self._views["shared"] = _view(board.address, slots.nbytes)
            self._told = slots.told(self._views["shared"])
        self._under_way: dict[int, MPI.Request] = {}
        self._steps: Iterator[Wake] = iter(())
        self._current: Wake | None = None

    def run(self) -> None:
        for wake in self._go():
            wake.run()

    def start(self) -> None:
        self._steps = self._go()
        self._current = next(self._steps, None)
        self.progress(False)

    def progress(self, block: bool) -> bool:
        while self._current is not None:
            if block:
                self._current.run()
            elif not self._current.ready():
                return False
            self._current = next(self._steps, None)
        return True

    def pending(self) -> list[Pending]:
        now = [
            0 if self._current is None or i != self._current.step else None
            for i in range(len(self._program.schedule.ops))
        ]
        bound = [self._under_way.get(i, each) for i, each in enumerate(now)]
        return pending(self._program.schedule.ops, bound, self._board, self._lane_of)

    def free(self) -> None:
        """Nothing is kept."""

    def _go(self) -> Iterator[Wake]:
        """One start; yields what has to be waited for."""
        program, board, (comm, tag) = self._program, self._board, self._where
        ops, lane_of, views, runs = program.schedule.ops, self._lane_of, self._views, self._layout.runs
        self._under_way = under_way = dict[int, MPI.Request]()
        datatypes: dict[object, MPI.Datatype] = {}
        learned = told = self._slots is None
        if board is not None:
            board.epoch += 1
        for index in self._live:
            op = ops[index]
            if not learned and index in program.needs_mates:
                self._learn()
                learned = True
            if isinstance(op, (Send, Recv)):
                if pieces := runs(op.region):
                    make = comm.Isend if isinstance(op, Send) else comm.Irecv
                    under_way[index] = make(_message(views[op.region.buffer], pieces, datatypes), op.peer, op.tag + tag)
            elif isinstance(op, Copy):
                if not told and op.target.buffer == "shared":
                    self._tell()
                    told = True
                self._copy(op.source, op.target)
            elif isinstance(op, Join):
                waited = [under_way[dep] for dep in op.deps if dep in under_way]
                if waited:
                    yield Wake(partial(MPI.Request.Waitall, waited), partial(MPI.Request.Testall, waited))
                    for dep in op.deps:
                        under_way.pop(dep, None)
            elif isinstance(op, (Signal, Wait)):
                assert board is not None
                if isinstance(op, Signal):
                    board.raise_flag(board.slot(board.lane, op.flag))
                else:
                    flags, back = [board.slot(lane_of[peer], op.flag) for peer in op.peers], int(op.previous)
                    yield Wake(partial(board.wait, flags, back), partial(board.all_raised, flags, back), index)
        if under_way:
            waited = list(under_way.values())
            yield Wake(partial(MPI.Request.Waitall, waited), partial(MPI.Request.Testall, waited))
        for datatype in datatypes.values():
            datatype.Free()

    def _tell(self) -> None:
        """Tell the mates this rank's sizes, and place its own blocks."""
        assert self._slots is not None
        mine = self._told[self._slots.lane]
        mine[0], mine[1] = self._blocks.sent, self._blocks.received
        self._layout.place("shared", TOGETHER, *self._slots.own(self._blocks.sent, self._limit))

    def _learn(self) -> None:
        """Place the mates' blocks."""
        assert self._slots is not None
        self._layout.place("shared", TOGETHER, *self._slots.all(self._told, self._limit))

    def _copy(self, source: Region, target: Region) -> None:
        """Block by block, those that lie together at both ends at once."""
        here, there = self._views[source.buffer], self._views[target.buffer]
        for at, to, length in self._layout.pairs(source, target):
            there[to : to + length] = here[at : at + length]


def _view(address: int, nbytes: int) -> Any:
    """Memory that Python slices at little cost."""
    return memoryview(cast(Any, MPI.buffer.fromaddress(address, nbytes))).cast("B") if nbytes else memoryview(b"")


def _message(view: Any, pieces: list[tuple[int, int]], datatypes: dict[object, MPI.Datatype]) -> list[Any]:
    """Pieces of a buffer as an mpi4py message."""
    if len(pieces) == 1:
        at, length = pieces[0]
        return [view[at : at + length], length, MPI.BYTE]
    return message(MPI.Get_address(view), pieces, datatypes)


class Uneven:
    """What the uneven calls of a communicator share. ``node`` gives the communicator of this
    rank's node; it is collective at its first use."""

    def __init__(self, comm: MPI.Intracomm, topology: Topology, node: Callable[[], MPI.Intracomm]) -> None:
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
    ) -> Plan:
        """A plan for one call, or for many with the same sizes, on buffers at (send, receive)
        addresses. Of the node where it needs (more) shared memory."""
        if collective == "alltoallv":
            engine = self._interpreter(schedule, key, blocks, addresses, min(limit, self._most_together), where)
            return Plan(engine, name, schedule, None)
        layout, nbytes = allgatherv_layout(schedule, blocks)
        places: dict[BufferName, int] = {"send": addresses[0], "recv": addresses[1]}
        board = self._board(key, schedule, nbytes) if schedule.shared else None
        if board is not None:
            places["shared"] = board.address
        comm, tag = where
        binding = Binding(comm, self._topology.lane_of, self._memory, layout, places, tag, board)
        return bind(schedule, binding, name)

    def _interpreter(
        self,
        schedule: Schedule,
        key: Hashable,
        blocks: Blocks,
        addresses: tuple[int, int],
        limit: int,
        where: tuple[MPI.Intracomm, int],
    ) -> Interpreter:
        program, slots, board = self._programs.get(key), None, None
        if program is None:
            program = self._programs[key] = Program(schedule)
        if schedule.shared:
            slots = self._slots.get((key, limit))
            if slots is None:
                slots = self._slots[key, limit] = Slots(schedule, self._topology, limit)
            board = self._board((key, limit), schedule, slots.nbytes)
        return Interpreter(program, where, self._topology.lane_of, blocks, addresses, limit, slots, board)

    def _board(self, key: Hashable, schedule: Schedule, nbytes: int) -> Board:
        """A shared buffer with at least ``nbytes``, as all mates know. Of the node where it must grow."""
        room, board = self._boards.get(key, (-1, None))
        if board is None or room < nbytes:
            if board is not None:
                board.free()
            room = max(nbytes, 2 * room)
            most = np.empty(1, np.int64)
            self._node().Allreduce(np.array([schedule.flags]), most, op=MPI.MAX)
            board = Board(self._comm, self._node(), room, int(most[0]), 0, 0)
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
