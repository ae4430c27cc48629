"""Alltoallv's schedules on blocks of any sizes, and what the ranks of a node tell each other of them.

A rank knows the sizes of its own blocks from its arguments, at both ends of a message alike.
What is put together in a node's shared buffer also depends on the blocks of the mates: they
write their sizes beside their data, and read them when the flags say that the data are there.
Nothing about sizes crosses the network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hiercoll.algorithms.alltoallv import STRAIGHT, TOGETHER
from hiercoll.buffers import HostMemory, UnevenLayout
from hiercoll.engines import Board, Bound, Pending, Step, pending, steps_in_order
from hiercoll.executor import Binding, bind_operations, message
from hiercoll.schedule import (
    SIZE_BUFFERS,
    BufferName,
    Copy,
    Join,
    Op,
    Recv,
    Region,
    Schedule,
    Send,
    Signal,
    Wait,
    reads,
    writes,
)
from hiercoll.topology import Topology

Sizes: TypeAlias = "npt.NDArray[np.int64]"
MOST_KNOWN = 16  # sizes of the mates for which a call that comes again keeps its operations bound


class Blocks(NamedTuple):
    """Lengths and offsets in bytes of a rank's blocks, by peer, in its send and its receive buffer."""

    sent: Sizes
    sent_at: Sizes
    received: Sizes
    received_at: Sizes


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
        self.lanes, self.size = lanes, size
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

    def told(self, shared: Any) -> tuple[Any, list[Any]]:
        """Where lanes tell what they send to, and receive from, each rank, in bytes; lane by lane."""
        row = 16 * self.size
        return shared[: self.lanes * row], [shared[lane * row : (lane + 1) * row] for lane in range(self.lanes)]

    def own(self, sizes: Sizes, limit: int) -> tuple[Sizes, Sizes]:
        """Offsets and sizes of all blocks, of which those that this lane writes are right."""
        at, length = np.zeros((2, self.count), np.int64)
        taken = sizes[self._own_peers]
        if taken.max() >= limit:
            taken = taken * (taken < limit)
        at[self._own] = self._bases[self.lane] + np.cumsum(taken) - taken
        length[self._own] = taken
        return at, length

    def all(self, told: bytes, limit: int) -> tuple[Sizes, Sizes]:
        """The same of all, from what the lanes have said."""
        at, length = np.empty((2, self.count), np.int64)
        taken = np.frombuffer(told, np.int64)[self._told]
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
        for index, op in enumerate(schedule.ops):
            regions = [region for region in (*reads(op), *writes(op)) if region.blocks]
            straight = bool(regions) and regions[0].part != TOGETHER and not moves_sizes(op)
            (large if straight else small).append(index)
        ops = schedule.ops
        self.publishes = next((i for i, op in enumerate(ops) if moves_sizes(op) and publishes(op)), -1)
        self.learns = next((i for i, op in enumerate(ops) if moves_sizes(op) and not publishes(op)), -1)
        known = self.learns if self.learns >= 0 else len(ops)
        # Up to here operations depend on nothing but this rank's sizes.
        self.boundary = max((i + 1 for i in range(known) if isinstance(ops[i], Wait)), default=0)
        if self.learns < 0:
            self.boundary = known
        into_shared = (i for i, op in enumerate(ops) if isinstance(op, Copy) and op.target.buffer == "shared")
        self.writes = next(into_shared, -1)  # the first operation that writes this rank's blocks
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


def moves_sizes(op: Op | None) -> bool:
    """Whether an operation publishes or learns sizes."""
    return isinstance(op, Copy) and op.source.buffer in SIZE_BUFFERS


def publishes(op: Op) -> bool:
    """Whether it publishes them."""
    return isinstance(op, Copy) and op.target.buffer == "shared_sizes"


class Stepwise(ABC):
    """An engine that makes its steps as it goes."""

    def __init__(self, program: Program, board: Board | None, lane_of: Sequence[int]) -> None:
        self._program, self._board, self._lane_of = program, board, lane_of
        self._under_way: dict[int, MPI.Request] = {}  # by operation
        self._steps: Iterator[Step] = iter(())
        self._current: Step | None = None

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """The steps of one start; each is done before the next is asked for."""

    def run(self) -> None:
        for step in self.steps():
            step.run()

    def start(self) -> None:
        self._steps = self.steps()
        self._current = next(self._steps, None)
        self.progress(False)

    def progress(self, block: bool) -> bool:
        while self._current is not None:
            if not block and self._current.ready is not None and not self._current.ready():
                return False
            self._current.run()
            self._current = next(self._steps, None)
        return True

    def pending(self) -> list[Pending]:
        ops = self._program.schedule.ops
        now = () if self._current is None else self._current.ends
        bound = [self._under_way.get(i, None if i in now else 0) for i in range(len(ops))]
        return pending(ops, bound, self._board, self._lane_of)

    @abstractmethod
    def free(self) -> None:
        """Free what is kept."""


class Interpreter(Stepwise):
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
        super().__init__(program, board, lane_of)
        self._where, self._slots, self._limit, self._blocks = where, slots, limit, blocks
        self.heard = b""  # the sizes that the mates have told in this start
        self._views: dict[BufferName, Any] = {}
        self._places: dict[BufferName, int] = {"send": addresses[0], "recv": addresses[1]}
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
            self._places["shared"] = board.address
            self._told, rows = slots.told(self._views["shared"])
            self._own_row = rows[slots.lane]
            self._row = np.concatenate([blocks.sent, blocks.received]).astype(np.int64).tobytes()

    def steps(self) -> Iterator[Step]:
        if self._board is not None:
            self._board.epoch += 1
        self._under_way = {}
        return self.steps_from(0, self._under_way)

    def steps_from(self, first: int, under_way: dict[int, MPI.Request]) -> Iterator[Step]:
        """The steps from an operation on; only what has to be waited for is a step. ``under_way``:
        messages by operation, at first those of the operations before."""
        program, board, (comm, tag) = self._program, self._board, self._where
        ops, lane_of, views, runs = program.schedule.ops, self._lane_of, self._views, self._layout.runs
        datatypes: dict[object, MPI.Datatype] = {}
        for index in self._live:
            if index < first:
                continue
            op = ops[index]
            if isinstance(op, (Send, Recv)):
                if pieces := runs(op.region):
                    make = comm.Isend if isinstance(op, Send) else comm.Irecv
                    under_way[index] = make(_message(views[op.region.buffer], pieces, datatypes), op.peer, op.tag + tag)
            elif isinstance(op, Copy):
                if index == program.writes:
                    self.place_own()
                if index == program.publishes:
                    self.tell()
                elif index == program.learns:
                    self.learn()
                else:
                    self._copy(op.source, op.target)
            elif isinstance(op, Join):
                waited = [under_way[dep] for dep in op.deps if dep in under_way]
                if waited:
                    yield Step(partial(MPI.Request.Waitall, waited), partial(MPI.Request.Testall, waited))
                    for dep in op.deps:
                        under_way.pop(dep, None)
            elif isinstance(op, (Signal, Wait)):
                assert board is not None
                if isinstance(op, Signal):
                    board.raise_flag(board.slot(board.lane, op.flag))
                else:
                    flags, back = [board.slot(lane_of[peer], op.flag) for peer in op.peers], int(op.previous)
                    wait, ready = partial(board.wait, flags, back), partial(board.all_raised, flags, back)
                    yield Step(wait, ready, (), [index])
        if under_way:
            waited = list(under_way.values())
            yield Step(partial(MPI.Request.Waitall, waited), partial(MPI.Request.Testall, waited))
        for datatype in datatypes.values():
            datatype.Free()

    def free(self) -> None:
        """Nothing is kept."""

    def place_own(self) -> None:
        """Place this rank's own blocks in the shared buffer."""
        if self._slots is not None:
            self._layout.place("shared", TOGETHER, *self._slots.own(self._blocks.sent, self._limit))

    def tell(self) -> None:
        """Tell the mates this rank's sizes."""
        if self._slots is not None:
            self._own_row[:] = self._row

    def learn(self) -> None:
        """Place the mates' blocks as they say."""
        if self._slots is not None and self._program.learns >= 0:
            self.heard = self.hear()
            self._layout.place("shared", TOGETHER, *self._slots.all(self.heard, self._limit))

    def hear(self) -> bytes:
        """The sizes of all of the node, as they have been told."""
        return bytes(self._told) if self._slots is not None and self._program.learns >= 0 else b""

    def bind(self, first: int, end: int) -> list[Bound]:
        """Requests and actions of the operations from ``first`` to before ``end``, as blocks lie now."""
        live, (comm, tag) = set(self._live), self._where
        listed = enumerate(self._program.schedule.ops[first:end], first)
        ops = [op if i in live and not moves_sizes(op) else None for i, op in listed]
        binding = Binding(comm, self._lane_of, HostMemory(), self._layout, self._places, tag, self._board)
        return bind_operations(ops, binding)

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


class Kept(Stepwise):
    """A call that may come again with the same sizes in the same buffers.

    From the second start on, operations are bound once for many starts: first those that depend on
    this rank's sizes alone, and, whenever the mates have told what they told before, the rest.
    """

    def __init__(self, interpreter: Interpreter, program: Program, board: Board | None, lane_of: Sequence[int]) -> None:
        super().__init__(program, board, lane_of)
        self._interpreter = interpreter
        self._begun = False
        self._first: list[Bound] = []
        self._first_steps: list[Step] = []
        self._requests: dict[int, MPI.Request] = {}  # of these, by operation
        self._rest: dict[bytes, tuple[list[Step], dict[int, MPI.Request]]] = {}  # by what the mates have told
        self._heard: set[bytes] = set()

    def steps(self) -> Iterator[Step]:
        interpreter = self._interpreter
        if self._board is not None:
            self._board.epoch += 1
        if not self._begun:
            self._begun, self._under_way = True, {}
            yield from interpreter.steps_from(0, self._under_way)
            self._heard.add(interpreter.heard)
            return
        if not self._first_steps:
            self._bind_first()
        self._under_way = {**self._requests}
        yield from self._first_steps
        heard = interpreter.hear()
        if heard in self._rest or self._bind_rest(heard):
            steps, self._under_way = self._rest[heard]
            yield from steps
        else:
            yield from interpreter.steps_from(self._program.boundary, self._under_way)

    def _bind_first(self) -> None:
        program, interpreter = self._program, self._interpreter
        interpreter.place_own()
        self._first = interpreter.bind(0, program.boundary)
        if program.publishes >= 0:
            self._first[program.publishes] = interpreter.tell
        self._first_steps, self._requests = self._steps_of([])[0], _requests(self._first)

    def _bind_rest(self, heard: bytes) -> bool:
        """Bind what depends on the mates' sizes, unless they are new."""
        if heard not in self._heard or len(self._rest) >= MOST_KNOWN:
            if len(self._heard) < 4 * MOST_KNOWN:
                self._heard.add(heard)
            return False
        self._interpreter.learn()
        bound = self._interpreter.bind(self._program.boundary, len(self._program.schedule.ops))
        self._rest[heard] = self._steps_of(bound)[1], _requests(self._first + bound)
        return True

    def _steps_of(self, rest: list[Bound]) -> tuple[list[Step], list[Step]]:
        """The steps up to the boundary, and from there on."""
        ops, boundary = self._program.schedule.ops, self._program.boundary
        bound = self._first + (rest or [None] * (len(ops) - boundary))
        steps = list(steps_in_order(ops, bound, self._board, self._lane_of))
        if boundary == len(ops):
            return steps, []
        split = 1 + next((i for i, step in enumerate(steps) if boundary - 1 in step.ends), -1)
        return steps[:split], steps[split:]

    def free(self) -> None:
        rest = (requests.items() for _, requests in self._rest.values())
        own = [request for items in rest for index, request in items if index >= self._program.boundary]
        for request in [*self._requests.values(), *own]:
            request.Free()
        self._first_steps, self._requests, self._rest = [], {}, {}


def _requests(bound: Sequence[Bound]) -> dict[int, MPI.Request]:
    return {i: each for i, each in enumerate(bound) if isinstance(each, MPI.Prequest)}
