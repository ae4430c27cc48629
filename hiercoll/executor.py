"""Plans: a schedule bound to a communicator and to addresses, started as often as wanted.

Binding makes all persistent requests and copies once. A start is then two MPI calls per
round where the schedule has rounds, and otherwise reacts to completions: whatever has
become ready is started together. Binding is local; what is collective (duplicates, tags,
windows) comes from `communicator`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeAlias

from mpi4py import MPI

from hiercoll.buffers import Action, BlockLayout, Memory
from hiercoll.errors import PlanError
from hiercoll.schedule import BufferName, Copy, Join, Op, Recv, Region, Schedule, Send, Signal, Wait

INT_MAX = 2**31 - 1
NEEDS_FENCE = platform.machine() not in ("x86_64", "AMD64", "i686")
LINE = 8  # flags (of 8 bytes) per cache line
_numbers = count()


class Board:
    """The ``shared`` buffer and the flags of a node, in an MPI shared-memory window.

    Each rank has a line of flags of its own. A flag holds the number of the last start
    that raised it; ``epoch`` counts this rank's starts. Collective over the node.
    """

    def __init__(self, node: MPI.Intracomm, nbytes: int, flags: int) -> None:
        self.number = next(_numbers)
        self._width = -(-max(flags, 1) // LINE) * LINE
        header = node.size * self._width * 8
        size = -(-(header + nbytes) // 64) * 64 if node.rank == 0 else 0
        self.window = MPI.Win.Allocate_shared(size, 1, comm=node)
        base, _ = self.window.Shared_query(0)
        self.window.Lock_all(MPI.MODE_NOCHECK)
        address = MPI.Get_address(base)
        self.flags = memoryview(MPI.buffer.fromaddress(address, header)).cast("q")
        own = node.rank * self._width
        self.flags[own : own + self._width] = memoryview(bytes(self._width * 8)).cast("q")
        self.address = address + header
        self.nbytes = header + nbytes
        self.lane, self.epoch = node.rank, 0
        self.window.Sync()
        node.Barrier()
        self.window.Sync()

    def slot(self, lane: int, flag: int) -> int:
        """Index in ``flags`` of a lane's flag."""
        return lane * self._width + flag

    def free(self) -> None:
        """Free the window (collective over the node)."""
        self.flags.release()
        self.window.Unlock_all()
        self.window.Free()


@dataclass(frozen=True)
class Binding:
    """Everything that turns a schedule into calls.

    ``lane_of`` gives the lane of each rank, for flags; ``tag`` is added to all tags.
    """

    comm: MPI.Intracomm
    lane_of: Sequence[int]
    memory: Memory
    layout: BlockLayout
    addresses: dict[BufferName, int]
    tag: int
    board: Board | None = None


class _Traced(NamedTuple):
    """When an operation was started and completed, in seconds since the start of the plan."""

    op: int
    begin: float
    end: float


class Engine(Protocol):
    """Runs a bound schedule."""

    def start(self) -> None:
        """Begin a start."""

    def progress(self, block: bool) -> bool:
        """Go on; True when everything has completed. ``block``: wait for it."""

    def free(self) -> None:
        """Free the requests."""


class Plan:
    """A collective, ready to run on fixed buffers.

    ``plan()`` runs it once and returns the receive array; ``plan.start()`` begins it,
    ``plan.test()`` says whether it has completed, ``plan.wait()`` completes it. All ranks
    of the communicator start the same plans in the same order. A context manager that
    frees it. Raises PlanError if started while active, or used after `free`.

    ``schedule`` is this rank's schedule (None for native plans), ``nbytes`` the bytes of
    scratch it holds.
    """

    def __init__(self, engine: Engine, name: str, schedule: Schedule | None, memory: Memory | None) -> None:
        self.name = name
        self.schedule = schedule
        self.recvbuf: Any = None
        self.active = False
        self.nbytes = 0
        self.board_key: Hashable = None  # of the shared window that it uses, if cached
        self.on_free: Callable[[Plan], None] | None = None
        self._engine: Engine | None = engine
        self._owners: tuple[object, ...] = ()
        # Host memory needs no synchronisation: leave its two calls out of the hot path.
        self._memory = memory if memory is not None and memory.kind != "host" else None

    def keep_alive(self, *owners: object, nbytes: int = 0) -> None:
        """Hold on to ``owners``, with ``nbytes`` of scratch, until the plan is freed."""
        self._owners += owners
        self.nbytes += nbytes

    def start(self) -> None:
        """Begin a start. Returns at once; nothing may touch the buffers until `wait`."""
        engine = self._checked()
        if self._memory:
            self._memory.before_messages()
        self.active = True
        engine.start()

    def test(self) -> bool:
        """Whether the current start has completed (True if none is active); makes progress."""
        if not self.active:
            return True
        assert self._engine is not None
        if not self._engine.progress(False):
            return False
        self._finish()
        return True

    def wait(self) -> Any:
        """Complete the current start. Returns the receive array."""
        if self.active:
            assert self._engine is not None
            self._engine.progress(True)
            self._finish()
        return self.recvbuf

    def __call__(self) -> Any:
        """Run once: start and wait. Returns the receive array."""
        engine = self._engine
        if engine is None or self.active:
            self._checked()
        if self._memory:
            self._memory.before_messages()
        self.active = True
        engine.start()  # type: ignore[union-attr]
        engine.progress(True)  # type: ignore[union-attr]
        self.active = False
        if self._memory:
            self._memory.after_messages()
        return self.recvbuf

    def free(self) -> None:
        """Free requests and scratch. Raises PlanError while a start is active."""
        if self._engine is not None:
            if self.active:
                raise PlanError(f"plan {self.name} is active: wait for it before freeing it")
            self._engine.free()
            self._engine, self._owners = None, ()
            if self.on_free:
                self.on_free(self)

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *error: object) -> None:
        if self.active and error[0] is None:
            self.wait()
        if not self.active:
            self.free()

    def trace(self) -> list[_Traced]:
        """Run once and record when each operation began and ended (slower than a plain run)."""
        engine = self._checked()
        if not isinstance(engine, _Dataflow):
            raise PlanError(f"plan {self.name} was not bound for tracing")
        engine.log = []
        self()
        log, engine.log = engine.log, None
        return log

    def _checked(self) -> Engine:
        if self._engine is None:
            raise PlanError(f"plan {self.name} has been freed")
        if self.active:
            raise PlanError(f"plan {self.name} is active: wait for it before starting it again")
        return self._engine

    def _finish(self) -> None:
        self.active = False
        if self._memory:
            self._memory.after_messages()


def bind(schedule: Schedule, binding: Binding, name: str, *, traced: bool = False) -> Plan:
    """The plan that runs ``schedule`` on the given addresses. Local.

    Scratch is at ``binding.addresses['scratch']``; whoever allocated it keeps it alive.
    """
    rounds = None if traced else schedule.rounds
    with _datatypes() as cache:
        bound = [_bind_op(op, binding, cache) for op in schedule.ops]
    engine: Engine
    if rounds is not None and schedule.flags == 0:
        engine = _Rounds([[bound[index] for index in members] for members in rounds])
    else:
        engine = _Dataflow(schedule.ops, bound, binding)
    return Plan(engine, name, schedule, binding.memory)


Bound: TypeAlias = "MPI.Prequest | Action | None"
Datatypes: TypeAlias = "dict[object, MPI.Datatype]"


@contextmanager
def _datatypes() -> Iterator[Datatypes]:
    """A cache of derived datatypes, freed at the end (requests keep what they need)."""
    cache: Datatypes = {}
    try:
        yield cache
    finally:
        for datatype in cache.values():
            datatype.Free()


def _bind_op(op: Op, binding: Binding, cache: Datatypes) -> Bound:
    """The request or action of an operation; None where there is nothing to do."""
    if isinstance(op, Send | Recv):
        address = binding.addresses[op.region.buffer]
        make = binding.comm.Send_init if isinstance(op, Send) else binding.comm.Recv_init
        return make(_message(address, op.region, binding.layout, cache), op.peer, op.tag + binding.tag)
    if isinstance(op, Copy):
        if not op.source.blocks:
            return None
        source = (binding.addresses[op.source.buffer], op.source)
        return binding.memory.copy(binding.layout, source, (binding.addresses[op.target.buffer], op.target))
    if isinstance(op, Signal | Wait | Join):
        return None
    raise PlanError("reductions cannot be executed yet: no collective of this version needs them")


def _message(address: int, region: Region, layout: BlockLayout, cache: Datatypes) -> list[Any]:
    """``region`` as an mpi4py message; given by address, so that no array is kept alive."""
    runs = layout.runs(region)
    start = min(offset for offset, _ in runs)
    span = max(offset + length for offset, length in runs) - start
    buffer = MPI.buffer.fromaddress(address + start, span)
    if len(runs) == 1 and span <= INT_MAX:
        return [buffer, span, MPI.BYTE]
    key = (tuple((offset - start, length) for offset, length in runs))
    if key not in cache:
        cache[key] = _datatype(key).Commit()
    return [buffer, 1, cache[key]]


def _datatype(runs: tuple[tuple[int, int], ...]) -> MPI.Datatype:
    """An uncommitted datatype of the given (offset, length) pieces, of any size."""
    lengths = [length for _, length in runs]
    offsets = [offset for offset, _ in runs]
    steps = {b - a for a, b in zip(offsets, offsets[1:], strict=False)}
    if max(lengths) > INT_MAX:  # MPI counts are ints: a piece in units of 1 MiB, and the rest
        unit = MPI.BYTE.Create_contiguous(1 << 20)
        pieces = [(unit, offset, length >> 20) for offset, length in runs]
        pieces += [(MPI.BYTE, offset + (length >> 20 << 20), length & (1 << 20) - 1) for offset, length in runs]
        datatype = MPI.Datatype.Create_struct([p[2] for p in pieces], [p[1] for p in pieces], [p[0] for p in pieces])
        unit.Free()
        return datatype
    if len(set(lengths)) == 1 and len(steps) == 1 and offsets[0] == 0 < max(offsets):
        return MPI.BYTE.Create_hvector(len(runs), lengths[0], steps.pop())
    return MPI.BYTE.Create_hindexed(lengths, offsets)


class _Rounds:
    """Round by round: start all requests, do the copies, wait for all requests."""

    def __init__(self, rounds: list[list[Bound]]) -> None:
        self._rounds = []
        for members in rounds:
            requests = [bound for bound in members if isinstance(bound, MPI.Prequest)]
            actions = [bound for bound in members if bound is not None and not isinstance(bound, MPI.Prequest)]
            if requests or actions:
                self._rounds.append((requests, actions))
        self._first = self._rounds[0] if self._rounds else ([], [])
        self._current = len(self._rounds)

    def start(self) -> None:
        requests, actions = self._first
        self._current = 0
        if requests:
            MPI.Prequest.Startall(requests)
        for action in actions:
            action()

    def progress(self, block: bool) -> bool:
        rounds, current = self._rounds, self._current
        while current < len(rounds):
            requests = rounds[current][0]
            if requests:
                if block:
                    MPI.Request.Waitall(requests)
                elif not MPI.Request.Testall(requests):
                    self._current = current
                    return False
            current += 1
            if current < len(rounds):
                requests, actions = rounds[current]
                if requests:
                    MPI.Prequest.Startall(requests)
                for action in actions:
                    action()
        self._current = current
        return True

    def free(self) -> None:
        for requests, _ in self._rounds:
            for request in requests:
                request.Free()


class _Dataflow:
    """Completion-driven: an operation starts when all that it waits for have completed."""

    def __init__(self, ops: Sequence[Op], bound: list[Bound], binding: Binding) -> None:
        self._bound = bound
        self._requests = {i: b for i, b in enumerate(bound) if isinstance(b, MPI.Prequest)}
        self._needs = [len(op.deps) for op in ops]
        self._dependents: list[list[int]] = [[] for _ in ops]
        for index, op in enumerate(ops):
            for dep in op.deps:
                self._dependents[dep].append(index)
        self._first = [index for index, op in enumerate(ops) if not op.deps]
        self._board = binding.board
        self._signal: dict[int, int] = {}
        self._flags: dict[int, tuple[list[int], int]] = {}
        if self._board is not None:
            for index, op in enumerate(ops):
                if isinstance(op, Signal):
                    self._signal[index] = self._board.slot(self._board.lane, op.flag)
                elif isinstance(op, Wait):
                    slots = [self._board.slot(binding.lane_of[peer], op.flag) for peer in op.peers]
                    self._flags[index] = (slots, int(op.previous))
        self._waiting: list[int] = []
        self._active: list[MPI.Prequest] = []
        self._active_ops: list[int] = []
        self._polled: list[int] = []
        self.log: list[_Traced] | None = None
        self._begun: dict[int, float] = {}

    def start(self) -> None:
        self._waiting = self._needs.copy()
        if self._board is not None:
            self._board.epoch += 1
        self._launch(self._first)

    def progress(self, block: bool) -> bool:
        while True:
            if not self._active and not self._polled:
                return True
            done = self._completed(block)
            if done:
                self._launch(self._released(done))
            elif not block:
                return False
            elif self._polled:
                os.sched_yield()

    def _completed(self, block: bool) -> list[int]:
        """Operations that have completed; waits for one if that is all there is to wait for."""
        done = []
        if self._active:
            wait = MPI.Request.Waitsome if block and not self._polled else MPI.Request.Testsome
            for position in sorted(wait(self._active) or (), reverse=True):
                done.append(self._active_ops[position])
                last, last_op = self._active.pop(), self._active_ops.pop()
                if position < len(self._active):
                    self._active[position], self._active_ops[position] = last, last_op
        if self._polled:
            raised = [index for index in self._polled if self._raised(index)]
            if raised:
                self._polled = [index for index in self._polled if index not in raised]
                done += raised
        return done

    def _raised(self, index: int) -> bool:
        """Whether all the flags of a wait have been raised."""
        slots, previous = self._flags[index]
        board = self._board
        assert board is not None
        if NEEDS_FENCE:
            board.window.Sync()
        goal = board.epoch - previous
        return all(board.flags[slot] >= goal for slot in slots)

    def _released(self, done: list[int]) -> list[int]:
        """Operations that waited for nothing but ``done``."""
        if self.log is not None:
            now = perf_counter()
            self.log += [_Traced(index, self._begun[index], now) for index in done]
        waiting, ready = self._waiting, []
        for index in done:
            for dependent in self._dependents[index]:
                waiting[dependent] -= 1
                if not waiting[dependent]:
                    ready.append(dependent)
        return ready

    def _launch(self, ready: list[int]) -> None:
        """Start all that is ready, and what becomes ready by that without waiting."""
        requests = self._requests
        while ready:
            if self.log is not None:
                self._begun.update(dict.fromkeys(ready, perf_counter()))
            messages = [index for index in ready if index in requests]
            if messages:  # first, so that they travel while this rank copies
                batch = [requests[index] for index in messages]
                MPI.Prequest.Startall(batch)
                self._active += batch
                self._active_ops += messages
            done: list[int] = []
            for index in ready:
                if index in requests:
                    continue
                if index in self._flags:
                    (done if self._raised(index) else self._polled).append(index)
                else:
                    self._act(index)
                    done.append(index)
            ready = self._released(done)

    def _act(self, index: int) -> None:
        """Do what completes at once: a copy, a signal, a join."""
        action = self._bound[index]
        if index in self._signal:
            board = self._board
            assert board is not None
            if NEEDS_FENCE:
                board.window.Sync()
            board.flags[self._signal[index]] = board.epoch
        elif callable(action):
            action()

    def free(self) -> None:
        for request in self._requests.values():
            request.Free()


class NativePlan(Plan):
    """The MPI library's own collective, in the shape of a plan."""

    def __init__(
        self,
        blocking: Callable[..., None],
        nonblocking: Callable[..., MPI.Request],
        args: tuple[Any, ...],
        datatypes: list[MPI.Datatype],
    ) -> None:
        super().__init__(_Native(nonblocking, args, datatypes), "native", None, None)
        self._blocking, self._args = blocking, args

    def __call__(self) -> Any:
        """Run once, by the blocking call. Returns the receive array."""
        if self._engine is None or self.active:
            self._checked()
        self._blocking(*self._args)
        return self.recvbuf


class _Native:
    """A non-blocking collective as an engine."""

    def __init__(
        self, nonblocking: Callable[..., MPI.Request], args: tuple[Any, ...], datatypes: list[MPI.Datatype]
    ) -> None:
        self._nonblocking, self._args, self._datatypes = nonblocking, args, datatypes
        self._request = MPI.REQUEST_NULL

    def start(self) -> None:
        self._request = self._nonblocking(*self._args)

    def progress(self, block: bool) -> bool:
        if block:
            self._request.Wait()
            return True
        return bool(self._request.Test())

    def free(self) -> None:
        for datatype in self._datatypes:
            datatype.Free()


def native_message(address: int, block: int, blocks: int) -> tuple[list[Any], MPI.Datatype | None]:
    """A buffer of equal blocks for the MPI library's collectives, and a datatype to free with it."""
    buffer = MPI.buffer.fromaddress(address, block * blocks)
    if block <= INT_MAX:
        return [buffer, block, MPI.BYTE], None
    datatype = _datatype(((0, block),)).Commit()
    return [buffer, 1, datatype], datatype
