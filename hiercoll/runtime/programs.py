"""Steps as programs for the compiled engine (`_engine.c`), with blocks that it packs (`_regions.c`).

Messages begin anew at each start. A program is not bound to the buffers of a call: one serves all buffers of a size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from hiercoll.algorithms.alltoallv import TOGETHER
from hiercoll.memory import BlockLayout, Layout, WideLayout, common_pieces, evenly_spaced
from hiercoll.runtime.compiled import load, value_of
from hiercoll.runtime.engines import Pending
from hiercoll.runtime.messages import INT_MAX, Datatypes, typed
from hiercoll.runtime.operations import Operation
from hiercoll.runtime.sizes import Areas, GivenSizes, Places, Slots
from hiercoll.runtime.window import Window
from hiercoll.schedule import SIZE_BUFFERS, BufferName, Copy, Recv, Reduce, Send, Signal, Wait
from hiercoll.schedule.lowering import Kind, Steps

SEND, RECEIVE, WAIT, COPY, RAISE, FLAGS, DONE, *_REST = range(13)  # kinds of words, as in _engine.c
SEND_BLOCKS, RECEIVE_BLOCKS, COPY_BLOCKS, PLACE, REDUCE, CONVERT = _REST
CONVERSIONS = ("float16", "bfloat16")  # types that are converted to single precision, and back; as in _engine.c
BASES: tuple[BufferName, ...] = ("send", "recv", "scratch", "narrow", "shared", "sizes")
ANY_SIZE = 2**63 - 1  # no block is as large
BYTE = value_of(MPI.BYTE)


class Code(NamedTuple):
    """Steps in words, and what drives them where they are not in sequence; by slot of a request and by place of a wait
    for flags, the operation."""

    words: array[int]
    flow: array[int]
    messages: list[int]
    waits: dict[int, int]


class Data(Protocol):
    """How a program says where the blocks of operations lie: words, the first of them their kind."""

    def message(self, op: Send | Recv) -> tuple[int, ...] | None:
        """Of a message, but for its peer, tag and slot; None if it never has a byte."""

    def copies(self, op: Copy) -> Iterable[tuple[int, ...]]:
        """Of a copy."""

    def reductions(self, op: Reduce) -> Iterable[tuple[int, ...]]:
        """Of a reduction, but for what it does."""

    def learned(self) -> Iterable[tuple[int, ...]]:
        """Of what is to be done once the sizes of others' blocks are learned."""


class LaidOut:
    """Blocks that lie where a layout says. See `Data`."""

    def __init__(self, layout: Layout, datatypes: Datatypes) -> None:
        self._layout, self._datatypes = layout, datatypes

    def message(self, op: Send | Recv) -> tuple[int, ...] | None:
        """See `Data`."""
        runs = self._layout.runs(op.region)
        return _message(op, runs, self._datatypes) if runs else None

    def copies(self, op: Copy) -> Iterator[tuple[int, ...]]:
        """See `Data`."""
        base, to = (BASES.index(region.buffer) for region in (op.source, op.target))
        if isinstance(self._layout, WideLayout) and self._layout.types_of(op.source, op.target) is not None:
            how = 2 * CONVERSIONS.index(self._layout.of.name) + (self._layout.type_of(op.target) is self._layout.of)
            for at, there, number in self._layout.conversion((0, op.source), (0, op.target)):
                yield CONVERT, how, base, at, to, there, number
            return
        pieces = common_pieces(self._layout, (0, op.source), (0, op.target))
        for at, there, *rest in evenly_spaced(pieces):
            yield COPY, base, at, to, there, *rest

    def reductions(self, op: Reduce) -> Iterator[tuple[int, ...]]:
        """See `Data`."""
        ends = op.left, op.right, op.target
        bases = [BASES.index(each.buffer) for each in ends]
        for *places, nbytes in common_pieces(self._layout, *((0, each) for each in ends)):
            yield nbytes, *(word for end in zip(bases, places, strict=True) for word in end)

    def learned(self) -> Iterable[tuple[int, ...]]:
        """See `Data`."""
        return ()


def _message(op: Send | Recv, runs: Sequence[tuple[int, int]], datatypes: Datatypes) -> tuple[int, ...]:
    """Words of a message of bytes that lie where ``runs`` say."""
    offset, number, datatype = typed(runs, datatypes)
    handle = BYTE if datatype is MPI.BYTE else value_of(datatype)
    return SEND if isinstance(op, Send) else RECEIVE, BASES.index(op.region.buffer), offset, number, handle


class Tabulated:
    """Blocks that lie where tables say, which each start fills. See `Data`."""

    def __init__(self, given: GivenSizes, datatypes: Datatypes) -> None:
        self._areas, self._limit, self._datatypes = given.areas, given.limit, datatypes
        self._tables: dict[tuple[BufferName, int | None], int] = {}
        # Of all tables: an earlier one that it is like, or itself; blocks; least and most bytes; whether in rows.
        self.rows = array("q")
        for buffer, blocks in zip(("send", "recv"), given.blocks, strict=True):
            self._add((buffer, None), blocks, in_row=self._areas is None or buffer in self._areas.ends)

    def _add(
        self,
        key: Any,
        blocks: int,
        like: int | None = None,
        least: int = 0,
        below: int = ANY_SIZE,
        in_row: bool = False,
    ) -> int:
        number = self._tables[key] = len(self._tables)
        self.rows.extend((number if like is None else like, blocks, least, below, in_row))
        return number

    def _table(self, buffer: BufferName, part: int | None) -> int:
        """Where small blocks travel together, they are a part of their own."""
        key = (buffer, part)
        if key in self._tables:
            return self._tables[key]
        if self._areas is not None and buffer == self._areas.buffer:
            return self._add(key, self._areas.blocks, below=self._limit)
        least, below = (0, self._limit) if part == TOGETHER else (self._limit, ANY_SIZE)
        return self._add(key, 0, self._tables[buffer, None], least, below)

    def message(self, op: Send | Recv) -> tuple[int, ...]:
        """See `Data`."""
        region = op.region
        if region.buffer == "sizes" and self._areas is not None:
            return _message(op, BlockLayout(8 * self._areas.width).runs(region), self._datatypes)
        kind = SEND_BLOCKS if isinstance(op, Send) else RECEIVE_BLOCKS
        return kind, BASES.index(region.buffer), self._table(region.buffer, region.part), *region.blocks

    def copies(self, op: Copy) -> Iterator[tuple[int, ...]]:
        """See `Data`."""
        ends = op.source, op.target
        if op.source.buffer in SIZE_BUFFERS and self._areas is not None:
            bases = [BASES.index("shared" if each.buffer == "shared_sizes" else each.buffer) for each in ends]
            row = BlockLayout(8 * self._areas.width)
            for at, there, *rest in evenly_spaced(common_pieces(row, *((0, each) for each in ends))):
                yield COPY, bases[0], at, bases[1], there, *rest
            return
        places = [word for each in ends for word in (BASES.index(each.buffer), self._table(each.buffer, each.part))]
        yield COPY_BLOCKS, *places, *op.source.blocks, *op.target.blocks

    def reductions(self, op: Reduce) -> Iterable[tuple[int, ...]]:
        """See `Data`: there are none of such blocks."""
        return ()

    def at_first(self) -> Iterable[tuple[int, ...]]:
        """Words that place blocks (`Areas.buffer`) by what is known before others' sizes are learned."""
        return () if self._areas is None else self._placed(self._areas, self._areas.at_first())

    def learned(self) -> Iterable[tuple[int, ...]]:
        """See `Data`."""
        return () if self._areas is None else self._placed(self._areas, self._areas.learned())

    def _placed(self, areas: Areas | Slots, places: Places) -> Iterator[tuple[int, ...]]:
        for start, entries in places:
            yield PLACE, self._table(areas.buffer, TOGETHER), BASES.index("sizes"), start, *entries


def compile_steps(
    steps: Steps, data: Data, window: Window | None, lane_of: Sequence[int], operation: Operation | None = None
) -> Code:
    """Steps that `Steps.are_basic`, or, with tables, that `Steps.are_by_block`; ``operation``: what reductions do."""
    code, ops = Code(array("q"), array("q"), [], {}), steps.schedule.ops
    completes = {} if steps.in_sequence else steps.flow.completes
    slots: dict[int, int] = {}  # of the requests of messages that are under way, by operation
    begins = []  # where each step's words do
    is_learned = False  # whether the words that place what others' sizes place have come

    def add(kind: int, *words: int) -> None:
        code.words.extend((kind, len(words) + 2, *words))

    def add_operation(index: int) -> None:
        op: Any = ops[index]
        if isinstance(op, (Send, Recv)):
            if words := data.message(op):
                slots[index] = len(code.messages)
                add(words[0], op.peer, op.tag, slots[index], *words[1:])
                code.messages.append(index)
            elif completes:
                add(DONE, completes[index])
        elif isinstance(op, Copy):
            for words in data.copies(op):
                add(*words)
        elif isinstance(op, Reduce) and operation is not None:
            how = (value_of(operation.op), value_of(operation.datatype), operation.item, operation.commutes)
            for words in data.reductions(op):
                add(REDUCE, *how, *words)
        elif isinstance(op, Signal) and window is not None:
            add(RAISE, window.slot(window.lane, op.flag))
        elif isinstance(op, Wait) and window is not None:
            code.waits[len(code.words)] = index
            add(FLAGS, int(op.previous), *(window.slot(lane_of[peer], op.flag) for peer in op.peers))

    if isinstance(data, Tabulated):
        for words in data.at_first():
            add(*words)
    for step in steps.steps:
        if step.sized and not is_learned:
            for words in data.learned():
                add(*words)
            is_learned = True
        begins.append(len(code.words))
        if step.kind is not Kind.WAIT:
            for index in step.ops:
                add_operation(index)
        elif steps.in_sequence and (awaited := [slots.pop(op) for op in step.ops if op in slots]):
            add(WAIT, *awaited)
    if not steps.in_sequence:
        _add_flow(code, steps, [*begins, len(code.words)])
    return code


def _add_flow(code: Code, steps: Steps, begins: Sequence[int]) -> None:
    """By step its words, how many others it needs, which need it, and whether it begins messages; by slot the step that
    is complete with the message; and steps that need others."""
    flow, dependents = steps.flow, list[int]()
    for index, step in enumerate(steps.steps):
        first = len(dependents)
        dependents += flow.dependents[index]
        begun = step.kind is Kind.START
        code.flow.extend((begins[index], begins[index + 1], flow.needs[index], first, len(dependents), begun))
    code.flow.extend([*(flow.completes[op] for op in code.messages), *dependents])


OPEN = 0  # in the place of a datatype
IN_BYTES = {SEND: (6, 7), RECEIVE: (6, 7), COPY: (3, 5, 6, 8, 9)}  # by kind, which of the words are


class InBlocks(LaidOut):
    """As if each block had one byte. See `Data`."""

    def __init__(self) -> None:
        super().__init__(BlockLayout(1), {})
        self.scattered: list[Sequence[tuple[int, int]]] = []  # runs of messages whose blocks lie apart

    def message(self, op: Send | Recv) -> tuple[int, ...] | None:
        """See `Data`; where blocks lie apart, the datatype is left open."""
        runs = self._layout.runs(op.region)
        if len(runs) < 2:
            return super().message(op)
        self.scattered.append(runs)
        return SEND if isinstance(op, Send) else RECEIVE, BASES.index(op.region.buffer), 0, 0, OPEN


class Scaled:
    """Words for equal blocks of any size: those for blocks of one byte, times the size. So the program for another size
    costs little."""

    def __init__(self, steps: Steps, window: Window | None, lane_of: Sequence[int]) -> None:
        data = InBlocks()
        self._code = code = compile_steps(steps, data, window, lane_of)
        self._words, words = np.array(code.words, np.int64), code.words
        in_bytes, messages, at = [], [], 0
        while at < len(words):
            in_bytes += [at + place for place in IN_BYTES.get(words[at], ())]
            if words[at] in (SEND, RECEIVE):
                messages.append(at)
            at += words[at + 1]
        self._in_bytes = np.array(in_bytes, np.intp)
        self._longest = max((words[at + 7] for at in messages), default=0)  # blocks that lie together
        self._scattered = list(zip([at for at in messages if words[at + 8] == OPEN], data.scattered, strict=True))

    def code(self, block: int, datatypes: Datatypes) -> Code | None:
        """For blocks of so many bytes; None where messages are longer than MPI's counts."""
        if self._longest * block > INT_MAX:
            return None
        words = self._words.copy()
        words[self._in_bytes] *= block
        for at, runs in self._scattered:
            offset, number, datatype = typed([(block * start, block * length) for start, length in runs], datatypes)
            words[at + 6 : at + 9] = offset, number, value_of(datatype)
        return self._code._replace(words=array("q", words.tobytes()))


def _scaled(
    steps: Steps, layout: Layout, window: Window | None, lane_of: Sequence[int], datatypes: Datatypes
) -> Code | None:
    """The words of steps that move equal whole blocks, by what they keep for blocks of any size; None for others."""
    if not isinstance(layout, BlockLayout) or layout.segments > 1 or not layout.block:
        return None
    flags = None if window is None else (window.slot(window.lane, 0), window.slot(window.lane + 1, 0))
    known: dict[object, Scaled] = vars(steps).setdefault("_scaled", {})  # as functools.cached_property does
    if flags not in known:
        known[flags] = Scaled(steps, window, lane_of)
    return known[flags].code(layout.block, datatypes)


class Compiled:
    """Steps run by the compiled engine. See `engines.Engine`. Blocks lie as the ``layout`` says; or, with ``given``, as
    each start does."""

    def __init__(
        self,
        steps: Steps,
        layout: Layout,
        comm: MPI.Intracomm,
        tag: int,
        addresses: dict[BufferName, int],
        window: Window | None,
        lane_of: Sequence[int],
        given: GivenSizes | None = None,
        operation: Operation | None = None,
        sleeps: bool = True,
    ) -> None:
        module: Any = load()[0]
        self._ops, self._window, self._lane_of = steps.schedule.ops, window, lane_of
        self._datatypes: Datatypes = {}  # needed as long as the program is
        tables = Tabulated(given, self._datatypes) if given is not None else None
        data = tables or LaidOut(layout, self._datatypes)
        is_fixed = given is None and operation is None
        known = _scaled(steps, layout, window, lane_of, self._datatypes) if is_fixed else None
        self._code = code = known or compile_steps(steps, data, window, lane_of, operation)
        bases = tuple(addresses.get(base, 0) for base in BASES[:-1])
        of_window = (0, 0, 0) if window is None else window.addresses(sleeps)
        number = 0 if steps.in_sequence else len(steps.steps)
        areas = given.areas if given is not None else None
        lanes = (0, 1) if areas is None else (areas.lane, areas.lanes)
        self.program = module.Program(
            code.words, code.flow, number, len(code.messages), value_of(comm), tag, comm.rank, bases,
            tables.rows if tables is not None else b"", *lanes, *of_window, (window, comm, operation),
        )  # fmt: skip
        self.run: Callable[[], None] = self.program.run
        self.by_block = given is not None

    def move(self, send: int, recv: int, sizes: Sequence[Any] = (), places: Sequence[Any] = ()) -> None:
        """The addresses of the program's buffers from now on; and, for blocks of any sizes, those of send and recv."""
        self.program.move(send, recv)
        if self.by_block:
            self.program.place(*(np.concatenate(each).astype(np.int64) for each in (sizes, places)))

    def start(self) -> None:
        """Begin a start."""
        self.program.start()

    def progress(self, block: bool) -> bool:
        """Go on; whether everything is done."""
        return bool(self.program.progress(block))

    def pending(self) -> list[Pending]:
        """What it waits for; it cannot go on after that."""
        slots, flags, at = self.program.pending()
        found = []
        for slot in slots:
            op: Any = self._ops[self._code.messages[slot]]
            words = "a send to" if isinstance(op, Send) else "a receive from"
            found.append(Pending(self._code.messages[slot], words, op.peer))
        if flags and self._window is not None:
            index = self._code.waits[at]
            wait: Any = self._ops[index]
            lacking = {peer for peer in wait.peers if self._window.slot(self._lane_of[peer], wait.flag) in flags}
            found += [Pending(index, "the flag of", peer) for peer in wait.peers if peer in lacking]
        return found

    def free(self) -> None:
        """It is not started any more."""
        self.program.free()
        for datatype in self._datatypes.values():
            if datatype:
                datatype.Free()
