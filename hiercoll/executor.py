"""Plans: a schedule bound to a communicator and to addresses, started as often as wanted.

Binding makes all persistent requests and copies once. A start is then two MPI calls per
round where the schedule has rounds, and otherwise reacts to completions: whatever has
become ready is started together. Binding is local; what is collective (duplicates, tags,
windows) comes from `communicator`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import time
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from hiercoll import progress
from hiercoll.buffers import CARD, Array, Layout, Memory, Reduction, Transfer
from hiercoll.engines import Between, Board, Bound, Dataflow, Engine, Pending, Rounds, Script, Traced
from hiercoll.errors import PlanError
from hiercoll.schedule import (
    AcceptOffer,
    AwaitNotice,
    BufferName,
    Copy,
    Get,
    Join,
    Notify,
    Offer,
    Op,
    Recv,
    Reduce,
    Schedule,
    Send,
    Signal,
    Wait,
)
from hiercoll.watch import BEGAN, SECONDS, Entry, Watch

INT_MAX = 2**31 - 1
REQUEST_BYTES = 1200  # that an MPI library keeps for a persistent request, measured: 0.9 to 1.3 kB
abandoned: list[object] = []  # what MPI may still use; kept until it has ended (see `lifetime`)


@dataclass(frozen=True)
class Binding:
    """Everything that turns a schedule into calls.

    ``lane_of`` gives the lane of each rank, for flags; ``tag`` is added to all tags.
    ``cards`` are filled by messages from mates, by rank and tag, with what tells of their
    buffers; ``offers`` are what this rank tells of its own, with the buffers' addresses.
    ``reduction``: what reductions do.
    """

    comm: MPI.Intracomm
    lane_of: Sequence[int]
    memory: Memory
    layout: Layout
    addresses: dict[BufferName, int]
    tag: int
    board: Board | None = None
    cards: dict[tuple[int, int], Array] = field(default_factory=dict)
    offers: list[tuple[Array, int]] = field(default_factory=list)
    reduction: Reduction | None = None


class Plan:
    """A collective, ready to run on fixed buffers.

    ``plan()`` runs it once and returns the receive array; ``plan.start()`` begins it,
    ``plan.test()`` says whether it has completed, ``plan.wait()`` completes it. All ranks
    of the communicator start the same plans in the same order. A context manager that
    frees it. Raises PlanError if started while active, or used after `free`.

    ``schedule`` is this rank's schedule (None for native plans), ``nbytes`` the bytes of
    scratch it holds.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        schedule: Schedule | None,
        memory: Memory | None,
        direct: bool = False,
        offers: Sequence[tuple[Array, int]] = (),
    ) -> None:
        self.name = name
        self.schedule = schedule
        self.recvbuf: Any = None
        self.stream = 0  # handle of the stream that produces what is sent, on devices
        self.active = False
        self.broken = False  # interrupted: nobody knows which messages are under way
        self.nbytes = 0
        self.dtypes: tuple[Any, Any] = (None, None)  # of the buffers it was made for, if cached
        self.board_key: tuple[Hashable, ...] | None = None  # of the shared window that it uses, if cached
        self.on_free: Callable[[Plan], None] | None = None
        self.watch: Watch | None = None  # deadlines, if they are wanted
        self.entry: Entry | None = None  # of the current start, in the watch's record
        self._engine: Engine | None = engine
        self._owners: tuple[object, ...] = ()
        # Host memory needs no synchronisation: leave the call out of the hot path.
        self._memory = memory if memory is not None and memory.kind != "host" else None
        self._direct = direct  # whether messages are of, or about, that memory itself
        self._offers = offers
        self._run: Callable[[], None] | None = self._run_ordered if self._memory else engine.run

    def keep_alive(self, *owners: object, nbytes: int = 0) -> None:
        """Hold on to ``owners``, with ``nbytes`` of scratch, until the plan is freed."""
        self._owners += owners
        self.nbytes += nbytes

    def surround(self, before: Sequence[Transfer], after: Sequence[Transfer]) -> None:
        """Let transfers come before, and after, each start."""
        if self._engine is not None and (before or after):
            self._engine = Between(before, self._engine, after)
            self._run = self._run_ordered if self._memory else self._engine.run

    def start(self) -> None:
        """Begin a start. Returns at once; nothing may touch the buffers until `wait`."""
        engine = self._checked()
        if self.watch is not None:
            self.entry = self.watch.begin(self)
        if self._memory:
            self._prepare(self._memory)
        self.active = True
        try:
            engine.start()
        except BaseException:
            self.interrupt()
            raise

    def test(self) -> bool:
        """Whether the current start has completed (True if none is active); makes progress."""
        if not self.active:
            return True
        if not self._progress(False):
            return False
        self.active = False
        return True

    def wait(self) -> Any:
        """Complete the current start. Returns the receive array."""
        if self.active:
            if self.watch is not None:
                self.watch.complete(self)
            elif not progress.active:
                self._progress(True)
            else:  # others may wait for what is under way here before they come to this call
                while not self._progress(False):
                    progress.wait_politely()
            self.active = False
        elif self.broken:
            self._checked()
        return self.recvbuf

    def pending(self) -> list[Pending]:
        """What the current start waits for. It cannot go on after that."""
        self.interrupt()
        return self._engine.pending() if self._engine is not None else []

    def interrupt(self) -> None:
        """It cannot go on: nobody knows what is under way."""
        self.active, self.broken = False, True

    def _progress(self, block: bool) -> bool:
        """Let the active start go on; an exception on the way breaks the plan for good."""
        engine = self._engine
        assert engine is not None
        try:
            return engine.progress(block)
        except BaseException:
            self.interrupt()
            raise

    def __call__(self) -> Any:
        """Run once: start and wait. Returns the receive array."""
        if self.watch is not None or progress.active:
            if self.watch is not None and not progress.active:
                return self._run_watched(self.watch)
            if self.watch is not None or self.schedule is not None:
                self.start()
                return self.wait()
            # No start() here: on other ranks nothing may be under way, and in MPI a blocking collective
            # does not match a nonblocking one.
            progress.before_blocking()
        run = self._run
        if run is None or self.active or self.broken:
            self._checked()
        try:
            run()  # type: ignore[misc]
        except BaseException:
            self.broken = True
            raise
        return self.recvbuf

    def _run_watched(self, watch: Watch) -> Any:
        """Start and wait, with a deadline, in few steps."""
        engine = self._engine
        if engine is None or self.active or self.broken:
            engine = self._checked()
        self.entry = entry = watch.begin(self)
        if self._memory:
            self._prepare(self._memory)
        self.active = True
        try:
            engine.start()
            if engine.progress(False):
                entry[SECONDS] = time() - entry[BEGAN]
            else:
                watch.complete(self)
        except BaseException:
            self.interrupt()
            raise
        self.active = False
        return self.recvbuf

    def _run_ordered(self) -> None:
        """Run once on memory that must be synchronised with."""
        assert self._engine is not None and self._memory is not None
        self._prepare(self._memory)
        self._engine.run()

    def _prepare(self, memory: Memory) -> None:
        """Order a start after what the caller has produced, and tell of the buffers that are there
        now: between calls, memory may have been freed and given out again at the same address."""
        memory.before_messages(self.stream, self._direct)
        for offer, address in self._offers:
            offer[:] = memory.card(address)

    def free(self) -> None:
        """Free requests and scratch. Raises PlanError while a start is active."""
        if self._engine is not None:
            if self.active:
                raise PlanError(f"plan {self.name} is active: wait for it before freeing it")
            if self.broken:  # messages may be under way: MPI keeps the requests, we keep what they use
                abandoned.append((self._engine, self._owners))
            else:
                self._engine.free()
            self._engine, self._run, self._owners = None, None, ()
            if self.on_free:
                self.on_free(self)

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *error: object) -> None:
        if self.active and error[0] is None:
            self.wait()
        if not self.active:
            self.free()

    def trace(self) -> list[Traced]:
        """Run once and record when each operation began and ended (slower than a plain run)."""
        engine = self._checked()
        if not isinstance(engine, (Dataflow, Script)):
            raise PlanError(f"plan {self.name} was not bound for tracing")
        engine.log = []
        self()
        log, engine.log = engine.log, None
        return log

    def _checked(self) -> Engine:
        if self._engine is None:
            raise PlanError(f"plan {self.name} has been freed")
        if self.broken:
            raise PlanError(f"plan {self.name} was interrupted and cannot be continued: free it")
        if self.active:
            raise PlanError(f"plan {self.name} is active: wait for it before starting it again")
        return self._engine


def bind(schedule: Schedule, binding: Binding, name: str, *, traced: bool = False) -> Plan:
    """The plan that runs ``schedule`` on the given addresses. Local.

    Scratch is at ``binding.addresses['scratch']``; whoever allocated it keeps it alive.
    """
    if schedule.flags and not (schedule.is_in_order and binding.board):
        raise PlanError(f"{name}: a schedule with flags needs a shared buffer and operations in order (see in_order)")
    rounds = None if traced else schedule.rounds
    bound = bind_operations(schedule.ops, binding)
    engine: Engine
    if binding.board is not None:
        engine = Script(schedule.ops, bound, binding.board, binding.lane_of)
    elif rounds is not None:
        engine = Rounds([[bound[index] for index in members] for members in rounds], schedule.ops, bound)
    else:
        engine = Dataflow(schedule.ops, bound)
    messages = {op.region.buffer for op in schedule.ops if isinstance(op, (Send, Recv))}
    messages |= {op.buffer for op in schedule.ops if isinstance(op, (Offer, AcceptOffer))}
    direct = not messages <= {"host", "shared"}
    plan = Plan(engine, name, schedule, binding.memory, direct, binding.offers)
    plan.keep_alive(nbytes=REQUEST_BYTES * sum(isinstance(each, MPI.Prequest) for each in bound))
    return plan


def bind_operations(ops: Sequence[Op | None], binding: Binding) -> list[Bound]:
    """The requests and actions of operations; None where there is nothing to do."""
    with _datatypes() as cache:
        return [None if op is None else _bind_op(op, binding, cache) for op in ops]


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
    if isinstance(op, (Send, Recv)):
        runs = binding.layout.runs(op.region)
        if not runs:  # of blocks without bytes, as its other end knows
            return None
        make = binding.comm.Send_init if isinstance(op, Send) else binding.comm.Recv_init
        return make(message(binding.addresses[op.region.buffer], runs, cache), op.peer, op.tag + binding.tag)
    if isinstance(op, (Offer, AcceptOffer, Notify, AwaitNotice)):
        return _bind_empty(op, binding)
    if isinstance(op, Copy):
        if not op.source.blocks:
            return None
        source = (binding.addresses[op.source.buffer], op.source)
        return binding.memory.copy(binding.layout, source, (binding.addresses[op.target.buffer], op.target))
    if isinstance(op, Get):
        card, target = binding.cards[op.peer, op.tag], (binding.addresses[op.target.buffer], op.target)
        return binding.memory.get(binding.layout, card, op.source, target)
    if isinstance(op, (Signal, Wait, Join)):
        return None
    return _bind_reduction(op, binding)


def _bind_reduction(op: Reduce, binding: Binding) -> Bound:
    if binding.reduction is None:
        raise PlanError("a schedule with reductions needs a type and an operation (Binding.reduction)")
    left, right, target = ((binding.addresses[region.buffer], region) for region in (op.left, op.right, op.target))
    return binding.memory.reduce(binding.layout, binding.reduction, left, right, target)


def _bind_empty(op: Offer | AcceptOffer | Notify | AwaitNotice, binding: Binding) -> MPI.Prequest:
    """A message without blocks: where an offered buffer lies, or nothing at all."""
    comm, tag = binding.comm, op.tag + binding.tag
    if isinstance(op, (Notify, AwaitNotice)):
        make = comm.Send_init if isinstance(op, Notify) else comm.Recv_init
        return make([None, 0, MPI.BYTE], op.peer, tag)
    if isinstance(op, Offer):
        address = binding.addresses[op.buffer]
        offer = binding.memory.card(address).copy()
        binding.offers.append((offer, address))
        return comm.Send_init(offer, op.peer, tag)
    card = binding.cards[op.peer, op.tag] = np.empty(CARD, np.uint8)
    return comm.Recv_init(card, op.peer, tag)


def message(address: int, runs: list[tuple[int, int]], cache: Datatypes) -> list[Any]:
    """Pieces of a buffer as an mpi4py message; given by address, so that no array is kept alive."""
    start = min(offset for offset, _ in runs)
    span = max(offset + length for offset, length in runs) - start
    buffer = MPI.buffer.fromaddress(address + start, span)
    if len(runs) == 1 and span <= INT_MAX:
        return [buffer, span, MPI.BYTE]
    key = tuple((offset - start, length) for offset, length in runs)
    if key not in cache:
        cache[key] = _datatype(key).Commit()
    return [buffer, 1, cache[key]]


def _datatype(runs: tuple[tuple[int, int], ...]) -> MPI.Datatype:
    """An uncommitted datatype of the given (offset, length) pieces, of any size."""
    lengths = [length for _, length in runs]
    offsets = [offset for offset, _ in runs]
    steps = {b - a for a, b in pairwise(offsets)}
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


def native_message(address: int, block: int, blocks: int) -> tuple[list[Any], MPI.Datatype | None]:
    """A buffer of equal blocks for the MPI library's collectives, and a datatype to free with it."""
    buffer = MPI.buffer.fromaddress(address, block * blocks)
    if block <= INT_MAX:
        return [buffer, block, MPI.BYTE], None
    datatype = _datatype(((0, block),)).Commit()
    return [buffer, 1, datatype], datatype
