"""What runs a bound schedule: round by round, or driven by completions; and the flags of a node."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from mpi4py import MPI

from hiercoll.buffers import Action
from hiercoll.schedule import Op, Signal, Wait

NEEDS_FENCE = platform.machine() not in ("x86_64", "AMD64", "i686")
LINE = 8  # flags (of 8 bytes) per cache line
PROGRESS_EVERY = 8  # looks at flags between calls that let the MPI library make progress
Bound: TypeAlias = "MPI.Prequest | Action | None"


class Board:
    """The ``shared`` buffer and the flags of a node, in an MPI shared-memory window.

    Each rank has a line of flags of its own. A flag holds the number of the last start
    that raised it; ``epoch`` counts this rank's starts. ``number`` names it on all ranks
    of the node. Collective over the node.
    """

    def __init__(self, node: MPI.Intracomm, nbytes: int, flags: int, number: int) -> None:
        self.number = number
        self._width = -(-max(flags, 1) // LINE) * LINE
        header = node.size * self._width * 8
        size = -(-(header + nbytes) // 64) * 64 if node.rank == 0 else 0
        self.window = MPI.Win.Allocate_shared(size, 1, comm=node)
        base, _ = self.window.Shared_query(0)
        self.window.Lock_all(MPI.MODE_NOCHECK)
        address = MPI.Get_address(base)
        self.flags = memoryview(cast(Any, MPI.buffer.fromaddress(address, header))).cast("q")
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

    def raise_flag(self, slot: int) -> None:
        """Raise a flag of this rank to the number of the current start."""
        if NEEDS_FENCE:
            self.window.Sync()  # what was written and read before is done before the flag is seen
        self.flags[slot] = self.epoch

    def all_raised(self, slots: list[int], back: int) -> bool:
        """Whether flags have been raised in the current start, or ``back`` starts before."""
        flags, goal = self.flags, self.epoch - back
        for slot in slots:
            if flags[slot] < goal:
                return False
        if NEEDS_FENCE:
            self.window.Sync()  # what is read next is read after the flags
        return True

    def free(self) -> None:
        """Free the window (collective over the node)."""
        self.flags.release()
        self.window.Unlock_all()
        self.window.Free()


class Traced(NamedTuple):
    """When an operation was started and completed, in seconds of time.perf_counter."""

    op: int
    begin: float
    end: float


class Engine(Protocol):
    """Runs a bound schedule."""

    def start(self) -> None:
        """Begin a start."""

    def progress(self, block: bool) -> bool:
        """Go on; True when everything has completed. ``block``: wait for it."""

    def run(self) -> None:
        """Start and complete."""

    def free(self) -> None:
        """Free the requests."""


class Rounds:
    """Round by round: start all requests, do the copies, wait for all requests."""

    def __init__(self, rounds: list[list[Bound]]) -> None:
        self._rounds = []
        for members in rounds:
            requests = [bound for bound in members if isinstance(bound, MPI.Prequest)]
            actions = [bound for bound in members if bound is not None and not isinstance(bound, MPI.Prequest)]
            if requests or actions:
                self._rounds.append((requests, actions))
        self._current = len(self._rounds)

    def run(self, startall: Any = MPI.Prequest.Startall, waitall: Any = MPI.Request.Waitall) -> None:
        for requests, actions in self._rounds:
            if requests:
                startall(requests)
            for action in actions:
                action()
            if requests:
                waitall(requests)

    def start(self) -> None:
        self._current = 0
        if self._rounds:
            self._enter(*self._rounds[0])

    def _enter(self, requests: list[MPI.Prequest], actions: list[Action]) -> None:
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
                self._enter(*rounds[current])
        self._current = current
        return True

    def free(self) -> None:
        for requests, _ in self._rounds:
            for request in requests:
                request.Free()


class Dataflow:
    """Completion-driven: an operation starts when all that it waits for have completed."""

    def __init__(self, ops: Sequence[Op], bound: list[Bound], board: Board | None, lane_of: Sequence[int]) -> None:
        self._requests = [b if isinstance(b, MPI.Prequest) else None for b in bound]
        self._actions = [None if isinstance(b, MPI.Prequest) else b for b in bound]
        self._flags: list[tuple[list[int], int] | None] = [None] * len(ops)  # slots, and how many starts back
        self._needs = [len(op.deps) for op in ops]
        self._dependents: list[list[int]] = [[] for _ in ops]
        for index, op in enumerate(ops):
            for dep in op.deps:
                self._dependents[dep].append(index)
            if board is not None and isinstance(op, Signal):
                self._actions[index] = partial(board.raise_flag, board.slot(board.lane, op.flag))
            elif board is not None and isinstance(op, Wait):
                self._flags[index] = ([board.slot(lane_of[peer], op.flag) for peer in op.peers], int(op.previous))
        self._first = [index for index, op in enumerate(ops) if not op.deps]
        self._board = board
        self._waiting: list[int] = []
        self._left = 0  # operations that have not completed
        self._active: list[MPI.Prequest] = []
        self._active_ops: list[int] = []
        self._polled: list[int] = []
        self._idled = 0
        self.log: list[Traced] | None = None
        self._begun: dict[int, float] = {}

    def start(self) -> None:
        self._waiting = self._needs.copy()
        self._left = len(self._needs)
        if self._board is not None:
            self._board.epoch += 1
        self._launch(self._first)

    def run(self) -> None:
        self.start()
        self.progress(True)

    def progress(self, block: bool) -> bool:
        while True:
            if not self._active and not self._polled:
                return True
            done = self._completed(block)
            if done:
                self._launch(self._released(done))
            elif not block:
                return False
            else:
                self._idle()

    def _idle(self) -> None:
        """Nothing has happened since the last look."""
        self._idled += 1
        if not self._active and self._idled % PROGRESS_EVERY == 0:
            # Only flags are waited for, but what others wait for may still be in the MPI
            # library's queues: a send that has completed need not have left.
            MPI.COMM_SELF.Iprobe()
        os.sched_yield()

    def _completed(self, block: bool) -> list[int]:
        """Operations that have completed since; all, if nothing else is to be started and ``block``."""
        done = []
        if block and len(self._active) == self._left:
            MPI.Request.Waitall(self._active)
            done, self._active, self._active_ops = self._active_ops, [], []
        elif self._active:
            # Not Waitsome: MPICH polls in it without yielding, which costs dearly on shared cores.
            for position in sorted(MPI.Request.Testsome(self._active) or (), reverse=True):
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
        flags, board = self._flags[index], self._board
        assert flags is not None and board is not None
        return board.all_raised(*flags)

    def _released(self, done: list[int]) -> list[int]:
        """Operations that waited for nothing but ``done``."""
        if self.log is not None:
            now = perf_counter()
            self.log += [Traced(index, self._begun[index], now) for index in done]
        self._left -= len(done)
        waiting, ready = self._waiting, []
        for index in done:
            for dependent in self._dependents[index]:
                waiting[dependent] -= 1
                if not waiting[dependent]:
                    ready.append(dependent)
        return ready

    def _launch(self, ready: list[int]) -> None:
        """Start all that is ready, and what becomes ready by that without waiting."""
        requests, actions, flags = self._requests, self._actions, self._flags
        while ready:
            if self.log is not None:
                self._begun.update(dict.fromkeys(ready, perf_counter()))
            batch: list[MPI.Prequest] = []
            started: list[int] = []
            done: list[int] = []
            for index in ready:
                request = requests[index]
                if request is None:
                    done.append(index)
                else:
                    batch.append(request)
                    started.append(index)
            if batch:  # first, so that messages travel while this rank copies
                MPI.Prequest.Startall(batch)
                self._active += batch
                self._active_ops += started
            waits = [index for index in done if flags[index] is not None and not self._raised(index)]
            if waits:
                self._polled += waits
                done = [index for index in done if index not in waits]
            for index in done:
                action = actions[index]
                if action is not None:
                    action()
            ready = self._released(done)

    def free(self) -> None:
        for request in self._requests:
            if request is not None:
                request.Free()


class Native:
    """The MPI library's own collective as an engine."""

    def __init__(
        self,
        blocking: Callable[..., None],
        nonblocking: Callable[..., MPI.Request],
        args: tuple[Any, ...],
        datatypes: list[MPI.Datatype],
    ) -> None:
        self.run = partial(blocking, *args)
        self.start = partial(self._start, nonblocking, args)
        self._datatypes = datatypes
        self._request = MPI.REQUEST_NULL

    def _start(self, nonblocking: Callable[..., MPI.Request], args: tuple[Any, ...]) -> None:
        self._request = nonblocking(*args)

    def progress(self, block: bool) -> bool:
        if block:
            self._request.Wait()
            return True
        return bool(self._request.Test())

    def free(self) -> None:
        for datatype in self._datatypes:
            datatype.Free()
