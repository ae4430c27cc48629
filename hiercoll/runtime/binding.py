"""Steps become calls: requests, copies and flags of one rank on its buffers.

Messages whose addresses and lengths are constants have persistent requests. Those that depend on
sizes that are learned, or of a plan that runs once, are begun anew at each start. Binding is
local; what is collective (communicators, tags, windows) comes from the session, by way of `factory`.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from hiercoll.errors import PlanError
from hiercoll.memory import Layout, Memory, common_pieces
from hiercoll.runtime.addresses import Addresses
from hiercoll.runtime.compiled import load
from hiercoll.runtime.engines import Dataflow, Flags, Message, Notice, Part, Section, free_parts
from hiercoll.runtime.engines import Sequence as InSequence
from hiercoll.runtime.messages import INT_MAX, Datatypes, message
from hiercoll.runtime.operations import Operation
from hiercoll.runtime.programs import Compiled
from hiercoll.runtime.sizes import GivenSizes, SizeTable
from hiercoll.runtime.window import Window
from hiercoll.schedule import (
    MESSAGES,
    OUTGOING,
    SIZE_BUFFERS,
    BufferName,
    Copy,
    Get,
    Op,
    Recv,
    Reduce,
    Send,
    Signal,
    Wait,
)
from hiercoll.schedule.lowering import Kind, Step, Steps

MOST_KNOWN = 16  # tables of sizes for which a plan keeps its steps bound


class Binding(NamedTuple):
    """Everything that turns steps into calls.

    ``lane_of`` gives the lane of each rank, for flags; ``tag`` is added to all tags. ``peers``: where the buffers of
    ranks of the node lie, for schedules that copy from them.
    ``operation``: what reductions do. ``once``: the plan runs only once.
    ``sizes``: of uneven blocks, for schedules that exchange them. ``traced``: operations are to be timed.
    ``given``: blocks whose sizes come with each start. ``sleeps``: where there are fewer cores than ranks, they sleep
    while they wait for others of their node: it pays where all wait for all, not along the way from or to a root.
    """

    comm: MPI.Intracomm
    lane_of: Sequence[int]
    memory: Memory
    layout: Layout
    addresses: dict[BufferName, int]
    tag: int
    window: Window | None = None
    peers: Addresses | None = None
    operation: Operation | None = None
    once: bool = False
    sizes: SizeTable | None = None
    traced: bool = False
    given: GivenSizes | None = None
    sleeps: bool = False


def bind_engine(steps: Steps, binding: Binding) -> InSequence | Dataflow | Compiled:
    """What runs ``steps``."""
    if not binding.traced and can_compile(steps, binding.memory.kind, binding.given is not None):
        where = (binding.comm, binding.tag, binding.addresses, binding.window, binding.lane_of)
        return Compiled(steps, binding.layout, *where, binding.given, binding.operation, binding.sleeps)
    parts: dict[int, Part] = {}
    bind_steps(steps, steps.constant, binding, parts)
    if not steps.in_sequence:
        return Dataflow(steps, parts, binding.window)
    first = steps.first_sized
    rest = None if first == len(steps.steps) else SizedSteps(steps, first, binding, parts)
    return InSequence(steps.schedule.ops, Section(steps.steps[:first], parts), parts, binding.window, rest)


def can_compile(steps: Steps, memory: str, by_block: bool = False) -> bool:
    """Whether the compiled engine, if there is one, runs ``steps`` on data in that memory; ``by_block``: on blocks
    whose sizes come with each start."""
    return memory == "host" and (steps.are_by_block if by_block else steps.are_basic) and load()[0] is not None


class Once:
    """What runs once, with the ``owners`` of the memory that it needs; ``watch`` is for plans."""

    def __init__(self, run: Callable[[], None], name: str, owners: object = None) -> None:
        self.name, self._run, self._owners = name, run, owners
        self.watch: object = None

    def __call__(self) -> None:
        """Run it."""
        self._run()


def run_once(steps: Steps, binding: Binding) -> None:
    """Run steps in sequence, which are bound as they come."""
    ops, window, sizes = steps.schedule.ops, binding.window, binding.sizes
    begun: dict[int, MPI.Request] = {}
    messages: list[Message] = []
    if window is not None:
        window.counts[0] += 1
    for step in steps.steps:
        if step.sized and sizes is not None:  # learned by now
            sizes.place()
            sizes = None
        if step.kind is Kind.START:
            made = _bind_messages([ops[op] for op in step.ops], binding, {}, True)
            for index, part in zip(step.ops, made, strict=True):
                if isinstance(part, Message):
                    part.begin()
                    begun[index] = part.request
                    messages.append(part)
        elif step.kind is Kind.WAIT:
            MPI.Request.Waitall([begun.pop(op) for op in step.ops if op in begun])
        else:
            for op in step.ops:
                part = _bind_local(ops[op], binding)
                if isinstance(part, Flags):
                    part.window.wait(part.slots, part.back)
                elif part is not None:
                    part()  # type: ignore[operator]
    for begun_message in messages:
        begun_message.free()


class Piece(NamedTuple):
    """Bytes that lie together: a message of the operation, or a copy to ``target``."""

    op: Send | Recv | Copy
    buffer: BufferName
    offset: int
    length: int
    target: BufferName = "recv"
    target_offset: int = 0


class Relocatable(NamedTuple):
    """Rounds of messages and copies between the program's own buffers, wherever these lie, for calls with new ones all
    the time: what binding finds out is the same for all."""

    groups: list[tuple[Kind, list[Piece]]]

    @classmethod
    def of(cls, steps: Steps, layout: Layout) -> Relocatable | None:
        """None for steps with anything else, with pieces apart, or in which a message outlasts its round."""
        ops, groups, begun = steps.schedule.ops, list[tuple[Kind, list[Piece]]](), set[int]()
        for step in steps.steps if steps.in_sequence else ():
            pieces = [_piece(ops[op], layout) for op in step.ops] if step.kind in (Kind.START, Kind.COPY) else []
            begun = begun | set(step.ops) if step.kind is Kind.START else begun - set(step.ops)
            if None in pieces or not (pieces or step.kind is Kind.WAIT) or (step.kind is Kind.WAIT and begun):
                return None
            groups.append((step.kind, [piece for piece in pieces if piece is not None]))
        return cls(groups) if steps.in_sequence else None

    def run(self, comm: MPI.Intracomm, tag: int, addresses: Mapping[BufferName, int]) -> None:
        """Run them once."""
        requests: list[MPI.Request] = []
        for kind, pieces in self.groups:
            if kind is Kind.WAIT:
                MPI.Request.Waitall(requests)
                requests = []
            for op, buffer, offset, length, target, target_offset in pieces:
                address = addresses[buffer] + offset
                if isinstance(op, Copy):
                    ctypes.memmove(addresses[target] + target_offset, address, length)
                else:
                    begin = comm.Isend if isinstance(op, Send) else comm.Irecv
                    spec: Any = [MPI.buffer.fromaddress(address, length), length, MPI.BYTE]
                    requests.append(begin(spec, op.peer, op.tag + tag))


def _piece(op: Op, layout: Layout) -> Piece | None:
    """The one piece of an operation on the program's buffers; None for anything else."""
    if not isinstance(op, (Send, Recv, Copy)):
        return None
    regions = (op.source, op.target) if isinstance(op, Copy) else (op.region,)
    runs = [(region.buffer, *run) for region in regions for run in layout.runs(region)]
    if len(runs) != len(regions) or any(buffer not in ("send", "recv") or n > INT_MAX for buffer, _, n in runs):
        return None
    to, at, _ = runs[-1]
    return Piece(op, *runs[0], to, at)


class SizedSteps:
    """The steps of a sequence from the first on that depends on learned sizes, bound anew for sizes that have
    not been learned lately."""

    def __init__(self, steps: Steps, first: int, binding: Binding, parts: dict[int, Part]) -> None:
        self._steps, self._which, self._binding, self._parts = steps, steps.steps[first:], binding, parts
        self._known: OrderedDict[bytes, tuple[Section, dict[int, Part]]] = (
            OrderedDict()
        )  # by the sizes, last at the end

    def __call__(self) -> tuple[Section, dict[int, Part]]:
        """For the sizes as they are in this start."""
        table, known = self._binding.sizes, self._known
        assert table is not None
        rows = table.rows
        if rows in known:
            known.move_to_end(rows)
            return known[rows]
        if len(known) >= MOST_KNOWN:
            free_parts(known.popitem(last=False)[1][1])
        table.place()
        parts = dict[int, Part]()
        bind_steps(self._steps, [step for step in self._which if step.sized], self._binding, parts)
        known[rows] = Section(self._which, {**self._parts, **parts}), parts
        return known[rows]

    def free(self) -> None:
        """Free what is kept."""
        for _, parts in self._known.values():
            free_parts(parts)
        self._known.clear()


def bind_steps(steps: Steps, which: Iterable[Step], binding: Binding, parts: dict[int, Part]) -> None:
    """Add to ``parts`` what the operations of some of the steps become."""
    ops = steps.schedule.ops
    shared: Datatypes = {}
    try:
        for step in which:
            if step.kind is Kind.START:
                made = _bind_messages([ops[op] for op in step.ops], binding, shared, step.sized or binding.once)
                parts.update(zip(step.ops, made, strict=True))
            elif step.kind is not Kind.WAIT:
                for op in step.ops:
                    parts[op] = _bind_local(ops[op], binding)
    finally:
        for datatype in shared.values():  # requests keep what they need
            datatype.Free()


def _bind_messages(ops: Iterable[Op], binding: Binding, shared: Datatypes, again: bool) -> list[Part]:
    """Messages that begin together; None for those of blocks without bytes, as their other ends know.
    ``again``: they are made anew at each start, with datatypes of their own; else with those ``shared``."""
    comm, tag, addresses, runs_of = binding.comm, binding.tag, binding.addresses, binding.layout.runs
    datatypes: Datatypes = {} if again else shared
    made: list[Part] = []
    spec: Any
    for op in ops:
        if isinstance(op, (Send, Recv)):
            region = op.region
            runs = runs_of(region)
            if not runs:
                made.append(None)
                continue
            spec = message(addresses[region.buffer], runs, datatypes)
        elif (told := _by_flag(op, binding)) is not None:
            made.append(told)
            continue
        else:
            spec = [None, 0, MPI.BYTE]  # an offer, or a notice, says no more than that it comes
        outgoing = isinstance(op, OUTGOING)
        where: tuple[int, int] = (op.peer, op.tag + tag)  # type: ignore[union-attr]
        if again:
            derived = spec[2] if datatypes and spec[2] != MPI.BYTE else None
            made.append(Message(comm.Isend if outgoing else comm.Irecv, (spec, *where), derived))
        else:
            made.append((comm.Send_init if outgoing else comm.Recv_init)(spec, *where))
    return made


def _by_flag(op: Op, binding: Binding) -> Part:
    """An offer, or a notice, by a flag of the node, if it has one."""
    window = binding.window
    if window is None or not isinstance(op, MESSAGES):
        return None
    outgoing = isinstance(op, OUTGOING)
    source, target = (binding.comm.rank, op.peer) if outgoing else (op.peer, binding.comm.rank)
    slot = window.notices.get((source, target, op.tag))
    if slot is None:
        return None
    return partial(window.raise_flag, slot) if outgoing else Notice(window, slot)


def _bind_local(op: Op, binding: Binding) -> Part:
    """What an operation on this node becomes; None where there is nothing to do."""
    if isinstance(op, Copy):
        if not op.source.blocks:
            return None
        if op.source.buffer in SIZE_BUFFERS:
            if binding.sizes is None:
                raise PlanError("a schedule that exchanges sizes needs a table of them (Binding.sizes)")
            return binding.sizes.copy(op)
        source = (binding.addresses[op.source.buffer], op.source)
        return binding.memory.copy(binding.layout, source, (binding.addresses[op.target.buffer], op.target))
    if isinstance(op, Get):
        if binding.peers is None:
            raise PlanError("a schedule that copies from other ranks needs their addresses (Binding.peers)")
        handle = binding.peers.handle(op.peer, op.source.buffer)
        target = (binding.addresses[op.target.buffer], op.target)
        return binding.memory.get(binding.layout, handle, op.source, target, op.peer)
    if isinstance(op, Reduce):
        return _bind_reduction(op, binding)
    window = binding.window
    if window is None:
        raise PlanError("a schedule with flags needs a shared buffer (Binding.window)")
    if isinstance(op, Signal):
        return partial(window.raise_flag, window.slot(window.lane, op.flag))
    assert isinstance(op, Wait)
    slots = [window.slot(binding.lane_of[peer], op.flag) for peer in op.peers]
    return Flags(window, op.peers, slots, int(op.previous))


def _bind_reduction(op: Reduce, binding: Binding) -> Part:
    if binding.operation is None:
        raise PlanError("a schedule with reductions needs an operation (Binding.operation)")
    left, right, target = ((binding.addresses[region.buffer], region) for region in (op.left, op.right, op.target))
    if binding.memory.kind == "host":
        return binding.operation.combining(common_pieces(binding.layout, left, right, target))
    assert binding.operation.on_device is not None
    return binding.memory.reduce(binding.layout, binding.operation.on_device, left, right, target)
