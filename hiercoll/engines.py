"""What runs a bound schedule: round by round, or driven by completions; and the flags of a node."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from mpi4py import MPI

from hiercoll.buffers import Action, Memory, Transfer
from hiercoll.schedule import MESSAGES, OUTGOING, Join, Op, Signal, Wait

NEEDS_FENCE = platform.machine() not in ("x86_64", "AMD64", "i686")
LINE = 8  # flags (of 8 bytes) per cache line
PROGRESS_EVERY = 8  # looks at flags between calls that let the MPI library make progress
Bound: TypeAlias = "MPI.Prequest | Action | Transfer | None"


class Board:
    """The ``shared`` buffer and the flags of a node, in an MPI shared-memory window.

    Each rank has a line of flags of its own. A flag holds the number of the last start
    that raised it; ``epoch`` counts this rank's starts. ``number`` names it on all ranks
    of the node; ``counted`` is the size that all nodes take it for when they make room for
    others. ``comm`` is of all ranks. Collective over the node.
    """

    def __init__(
        self, comm: MPI.Intracomm, node: MPI.Intracomm, nbytes: int, flags: int, number: int, counted: int
    ) -> None:
        self.number, self.nbytes = number, counted
        # A probe for what nobody sends. Not on MPI_COMM_SELF: there MPICH does not look at the network.
        self._make_progress = partial(comm.Iprobe, comm.rank)
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
        self.lane, self.epoch = node.rank, 0
        self._known: dict[int, object] = {}  # by memory, what keeps the buffer known to it
        self._elsewhere: object = None  # what keeps the buffer, if it is not in the window
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
                self._make_progress()  # as in `wait`
                return False
        if NEEDS_FENCE:
            self.window.Sync()  # what is read next is read after the flags
        return True

    def wait(self, slots: list[int], back: int) -> None:
        """Until `all_raised`."""
        flags, goal, looks = self.flags, self.epoch - back, 0
        for slot in slots:
            while flags[slot] < goal:
                looks += 1
                if looks % PROGRESS_EVERY == 0:
                    # What others wait for may still be in the MPI library's queues: a send that
                    # has completed need not have left, and a large one needs its receiver.
                    self._make_progress()
                os.sched_yield()
        if NEEDS_FENCE:
            self.window.Sync()  # what is read next is read after the flags

    def put_elsewhere(self, address: int, owner: object) -> None:
        """The buffer lies at ``address`` here, not in the window; the flags do."""
        self.address, self._elsewhere = address, owner

    def share_with(self, memory: Memory, nbytes: int) -> None:
        """Make ``nbytes`` of the buffer known to the memory that is copied from and to."""
        if self._elsewhere is None and id(memory) not in self._known:
            self._known[id(memory)] = memory.share(self.address, nbytes)

    def free(self) -> None:
        """Free the window (collective over the node)."""
        self._known.clear()
        if self.lane:
            self._elsewhere = None  # a mapping of what lane 0 has
        self.flags.release()
        self.window.Unlock_all()
        self.window.Free()
        self._elsewhere = None


class Traced(NamedTuple):
    """When an operation was started and completed, in seconds of time.perf_counter."""

    op: int
    begin: float
    end: float


class Pending(NamedTuple):
    """What a rank waits for: an operation of its schedule, in words, and the other rank."""

    step: int
    verb: str
    peer: int


def pending(ops: Sequence[Op], bound: Sequence[object], board: Board | None, lane_of: Sequence[int]) -> list[Pending]:
    """Messages that have been started and are not complete, and the flags of the waits that are
    given as None in ``bound``. Only for an engine that is not to go on."""
    found = []
    for index, (op, each) in enumerate(zip(ops, bound, strict=True)):
        if isinstance(each, MPI.Request) and isinstance(op, MESSAGES) and not _is_complete(each):
            found.append(Pending(index, "a send to" if isinstance(op, OUTGOING) else "a receive from", op.peer))
        elif isinstance(op, Wait) and each is None and board is not None:
            lacking = [
                peer
                for peer in op.peers
                if not board.all_raised([board.slot(lane_of[peer], op.flag)], int(op.previous))
            ]
            found += [Pending(index, "the flag of", peer) for peer in lacking]
    return found


def _is_complete(request: MPI.Request) -> bool:
    """Whether a request is complete; one that has failed is not."""
    try:
        return bool(request.Test())
    except MPI.Exception:
        return False


class Engine(Protocol):
    """Runs a bound schedule."""

    def pending(self) -> list[Pending]:
        """What it waits for; it cannot go on after that."""

    def start(self) -> None:
        """Begin a start."""

    def progress(self, block: bool) -> bool:
        """Go on; True when everything has completed. ``block``: wait for it."""

    def run(self) -> None:
        """Start and complete."""

    def free(self) -> None:
        """Free the requests."""


def _all_complete(requests: list[MPI.Prequest], testall: Callable[..., bool] = MPI.Request.Testall) -> bool:
    """Whether requests are complete, after a few looks: what is about to be is seen soonest here."""
    return testall(requests) or testall(requests) or testall(requests) or testall(requests)


class Rounds:
    """Round by round: start all requests and transfers, do the copies, wait for all."""

    def __init__(self, rounds: list[list[Bound]], ops: Sequence[Op] = (), bound: Sequence[Bound] = ()) -> None:
        self._ops, self._bound = ops, bound
        self._rounds: list[tuple[list[MPI.Prequest], list[Action], list[Transfer]]] = []
        for members in rounds:
            requests = [bound for bound in members if isinstance(bound, MPI.Prequest)]
            transfers = [bound for bound in members if isinstance(bound, Transfer)]
            actions = [
                bound for bound in members if bound is not None and not isinstance(bound, (MPI.Prequest, Transfer))
            ]
            if requests or actions or transfers:
                self._rounds.append((requests, [*(each.start for each in transfers), *actions], transfers))
        self._current = len(self._rounds)

    def run(self, startall: Any = MPI.Prequest.Startall, waitall: Any = MPI.Request.Waitall) -> None:
        for requests, actions, transfers in self._rounds:
            if requests:
                startall(requests)
            for action in actions:
                action()
            if requests:
                waitall(requests)
            for transfer in transfers:
                transfer.wait()

    def start(self) -> None:
        self._current = 0
        if self._rounds:
            self._enter(0)

    def _enter(self, current: int, startall: Any = MPI.Prequest.Startall) -> None:
        requests, actions, _ = self._rounds[current]
        if requests:
            startall(requests)
        for action in actions:
            action()

    def progress(self, block: bool) -> bool:
        rounds, current = self._rounds, self._current
        while current < len(rounds):
            requests, _, transfers = rounds[current]
            if block:
                MPI.Request.Waitall(requests)
                for transfer in transfers:
                    transfer.wait()
            elif not _all_complete(requests) or (transfers and not all(each.done() for each in transfers)):
                self._current = current
                return False
            current += 1
            if current < len(rounds):
                self._enter(current)
        self._current = current
        return True

    def pending(self) -> list[Pending]:
        return pending(self._ops, self._bound, None, ())

    def free(self) -> None:
        for requests, _, _ in self._rounds:
            for request in requests:
                request.Free()


class Step(NamedTuple):
    """A step of a script: ``run`` does it, or waits until it is done; ``ready`` asks whether
    running it would not wait (None: it never waits)."""

    run: Callable[[], object]
    ready: Callable[[], bool] | None = None
    begins: Sequence[int] = ()  # operations, for traces
    ends: Sequence[int] = ()


class Script:
    """One step after the other: for schedules that are in order (`Schedule.is_in_order`)."""

    def __init__(self, ops: Sequence[Op], bound: list[Bound], board: Board, lane_of: Sequence[int]) -> None:
        self._board = board
        self._ops, self._bound, self._lane_of = ops, bound, lane_of
        self._requests = [each for each in bound if isinstance(each, MPI.Prequest)]
        self._steps = [*steps_in_order(ops, bound, board, lane_of)]
        self._calls = [step.run for step in self._steps]
        self._current = len(self._steps)
        self.log: list[Traced] | None = None

    def run(self) -> None:
        self._board.epoch += 1
        if self.log is not None:
            return self._run_traced(self.log)
        for call in self._calls:
            call()

    def _run_traced(self, log: list[Traced]) -> None:
        begun: dict[int, float] = {}
        for step in self._steps:
            begun.update(dict.fromkeys(step.begins, perf_counter()))
            step.run()
            end = perf_counter()
            log += [Traced(op, begun[op], end) for op in step.ends]

    def start(self) -> None:
        self._board.epoch += 1
        self._current = 0
        self.progress(False)

    def progress(self, block: bool) -> bool:
        steps = self._steps
        while self._current < len(steps):
            step = steps[self._current]
            if step.ready is not None and not block and not step.ready():
                return False
            step.run()
            self._current += 1
        return True

    def pending(self) -> list[Pending]:
        now = self._steps[self._current].ends if self._current < len(self._steps) else ()
        bound = [each if isinstance(each, MPI.Prequest) or i in now else 0 for i, each in enumerate(self._bound)]
        return pending(self._ops, bound, self._board, self._lane_of)

    def free(self) -> None:
        for request in self._requests:
            request.Free()


def steps_in_order(
    ops: Sequence[Op], bound: Sequence[Bound], board: Board | None, lane_of: Sequence[int]
) -> Iterator[Step]:
    """The steps of a schedule in order; ``board`` for those with flags."""
    batch: dict[int, MPI.Prequest] = {}  # to be started together
    outstanding: dict[int, MPI.Prequest] = {}
    for index, (op, each) in enumerate(zip(ops, bound, strict=True)):
        if isinstance(each, MPI.Prequest):
            batch[index] = outstanding[index] = each
            continue
        if batch:
            yield _starting(batch)
            batch = {}
        if isinstance(op, Join):
            if done := {dep: outstanding.pop(dep) for dep in op.deps if dep in outstanding}:
                yield _completion(done)
        elif isinstance(op, Signal):
            assert board is not None
            raising = partial(board.raise_flag, board.slot(board.lane, op.flag))
            yield Step(raising, None, [index], [index])
        elif isinstance(op, Wait):
            assert board is not None
            slots, back = [board.slot(lane_of[peer], op.flag) for peer in op.peers], int(op.previous)
            yield Step(partial(board.wait, slots, back), partial(board.all_raised, slots, back), [index], [index])
        elif isinstance(each, Transfer):
            yield Step(each.start, None, [index])
            yield Step(each.wait, each.done, (), [index])
        elif each is not None:
            yield Step(each, None, [index], [index])
    if batch:
        yield _starting(batch)
    if outstanding:
        yield _completion(outstanding)


def _starting(requests: dict[int, MPI.Prequest]) -> Step:
    return Step(partial(MPI.Prequest.Startall, list(requests.values())), None, list(requests))


def _completion(requests: dict[int, MPI.Prequest]) -> Step:
    waited = list(requests.values())
    return Step(partial(MPI.Request.Waitall, waited), partial(MPI.Request.Testall, waited), (), list(requests))


class Dataflow:
    """Completion-driven: an operation starts when all that it waits for have completed."""

    def __init__(self, ops: Sequence[Op], bound: list[Bound]) -> None:
        self._ops, self._bound = ops, bound
        self._requests = [b if isinstance(b, MPI.Prequest) else None for b in bound]
        self._actions = [None if isinstance(b, (MPI.Prequest, Transfer)) else b for b in bound]
        self._transfers = [b if isinstance(b, Transfer) else None for b in bound]
        self._needs = [len(op.deps) for op in ops]
        self._dependents: list[list[int]] = [[] for _ in ops]
        for index, op in enumerate(ops):
            for dep in op.deps:
                self._dependents[dep].append(index)
        self._first = [index for index, op in enumerate(ops) if not op.deps]
        self._waiting: list[int] = []
        self._left = 0  # operations that have not completed
        self._active: list[MPI.Prequest] = []
        self._active_ops: list[int] = []
        self._moving: list[tuple[int, Transfer]] = []
        self.log: list[Traced] | None = None
        self._begun: dict[int, float] = {}

    def start(self) -> None:
        self._waiting = self._needs.copy()
        self._left = len(self._needs)
        self._launch(self._first)

    def run(self) -> None:
        self.start()
        self.progress(True)

    def progress(self, block: bool) -> bool:
        while self._active or self._moving:
            done = self._completed(block)
            if done:
                self._launch(self._released(done))
            elif not block:
                return False
            else:
                os.sched_yield()
        return True

    def _completed(self, block: bool) -> list[int]:
        """Operations that have completed since; all, if nothing else is to be started and ``block``."""
        if block and len(self._active) == self._left:
            MPI.Request.Waitall(self._active)
            done, self._active, self._active_ops = self._active_ops, [], []
            return done
        done = []
        # Not Waitsome: MPICH polls in it without yielding, which costs dearly on shared cores.
        for position in sorted(MPI.Request.Testsome(self._active) or (), reverse=True):
            done.append(self._active_ops[position])
            last, last_op = self._active.pop(), self._active_ops.pop()
            if position < len(self._active):
                self._active[position], self._active_ops[position] = last, last_op
        if self._moving:
            arrived = [index for index, transfer in self._moving if transfer.done()]
            self._moving = [(index, transfer) for index, transfer in self._moving if index not in arrived]
            done += arrived
        return done

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
        requests, actions, transfers = self._requests, self._actions, self._transfers
        while ready:
            if self.log is not None:
                self._begun.update(dict.fromkeys(ready, perf_counter()))
            batch = [index for index in ready if requests[index] is not None]
            moving = [(index, transfer) for index in ready if (transfer := transfers[index]) is not None]
            done = [index for index in ready if requests[index] is None and transfers[index] is None]
            if batch:  # first, so that messages travel while this rank copies
                started: list[Any] = [requests[index] for index in batch]
                MPI.Prequest.Startall(started)
                self._active += started
                self._active_ops += batch
            for _, transfer in moving:
                transfer.start()
            self._moving += moving
            for index in done:
                action = actions[index]
                if action is not None:
                    action()
            ready = self._released(done)

    def pending(self) -> list[Pending]:
        return pending(self._ops, self._bound, None, ())

    def free(self) -> None:
        for request in self._requests:
            if request is not None:
                request.Free()


class Between:
    """An engine on buffers of its own, between transfers to them and from them."""

    def __init__(self, before: Sequence[Transfer], engine: Engine, after: Sequence[Transfer]) -> None:
        self._before, self._engine, self._after = before, engine, after
        self._leaving = False

    def run(self) -> None:
        _do(self._before)
        self._engine.run()
        _do(self._after)

    def start(self) -> None:
        _do(self._before)
        self._leaving = False
        self._engine.start()

    def progress(self, block: bool) -> bool:
        if not self._leaving:
            if not self._engine.progress(block):
                return False
            for transfer in self._after:
                transfer.start()
            self._leaving = True
        if block:
            for transfer in self._after:
                transfer.wait()
        return all(transfer.done() for transfer in self._after)

    def pending(self) -> list[Pending]:
        return self._engine.pending()

    def free(self) -> None:
        self._engine.free()


def _do(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.start()
    for transfer in transfers:
        transfer.wait()


class Native:
    """The MPI library's own collective as an engine: run as the blocking call, or (``held``) as the nonblocking
    one and a wait. Where users hold a plan, ``run`` on one rank may meet ``start`` on another one, and MPI
    does not match the two."""

    def __init__(
        self,
        blocking: Callable[..., None],
        nonblocking: Callable[..., MPI.Request],
        args: tuple[Any, ...],
        datatypes: list[MPI.Datatype],
        held: bool,
    ) -> None:
        self.run = self._start_and_wait if held else partial(blocking, *args)
        self._begin = partial(nonblocking, *args)
        self._datatypes = datatypes
        self._request = MPI.REQUEST_NULL

    def start(self) -> None:
        self._request = self._begin()

    def _start_and_wait(self) -> None:
        self.start()
        self._request.Wait()

    def progress(self, block: bool) -> bool:
        if block:
            self._request.Wait()
            return True
        return bool(self._request.Test())

    def pending(self) -> list[Pending]:
        return []

    def free(self) -> None:
        for datatype in self._datatypes:
            datatype.Free()


class NativePersistent(Native):
    """The MPI library's own persistent collective (MPI 4.1, 6.13). Making it is collective."""

    def __init__(self, init: Callable[..., MPI.Prequest], args: tuple[Any, ...], datatypes: list[MPI.Datatype]) -> None:
        self._made = init(*args)
        super().__init__(self._made.Start, self._started, (), datatypes, held=True)

    def _started(self) -> MPI.Request:
        self._made.Start()
        return self._made

    def free(self) -> None:
        self._made.Free()
        super().free()
