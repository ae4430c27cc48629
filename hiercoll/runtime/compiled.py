"""The compiled engine: whether there is one, steps as programs for it (`_engine.c`), and the calls that it serves
(`_calls.c`).

It runs messages, copies and flags on buffers of the host, and begins messages anew at each start. A program is not
bound to the buffers of a call: one serves all buffers of a size. Python's engines run the same steps where there is no
compiled one, and all others.
"""

from __future__ import annotations

import ctypes
import importlib
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from inspect import Parameter, Signature, signature
from itertools import count
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from hiercoll import settings
from hiercoll.errors import EngineWarning
from hiercoll.memory import Layout, common_pieces
from hiercoll.runtime import progress
from hiercoll.runtime.engines import Pending
from hiercoll.runtime.messages import Datatypes, typed
from hiercoll.runtime.window import Window
from hiercoll.schedule import BufferName, Copy, Recv, Region, Send, Signal, Wait
from hiercoll.schedule.lowering import Kind, Steps
from hiercoll.schedule.transports import AUTO

SEND, RECEIVE, WAIT, COPY, RAISE, FLAGS, DONE, SEND_BLOCK, RECEIVE_BLOCK, COPY_BLOCK = range(10)  # as in _engine.c
BASES: tuple[BufferName, ...] = ("send", "recv", "scratch", "shared")
Function = TypeVar("Function", bound="Callable[..., Any]")
observers: list[Any] = []  # of drop-in calls, which do not pass the compiled engine while there are any


@cache
def load() -> tuple[ModuleType | None, str]:
    """The compiled engine, ready for this MPI library; or None, and why Python's engines run everything."""
    wanted = settings.engine()
    if wanted == "python":
        return None, "HIERCOLL_ENGINE=python"
    try:
        module = importlib.import_module("hiercoll.runtime._engine")
        _set_up(module)
    except (ImportError, OSError) as error:
        built = not isinstance(error, ModuleNotFoundError)
        why = str(error) if built else "it was not built: there was no C compiler when hiercoll was installed"
        if built or wanted == "c":
            warnings.warn(EngineWarning(f"no compiled engine, Python's run: {why}"), stacklevel=2)
        return None, why
    return module, ""


def _set_up(module: Any) -> None:
    """Raises OSError where a function of the MPI library is not found, or NumPy's arrays are not as they were."""
    handles = (MPI._sizeof(MPI.REQUEST_NULL), value_of(MPI.REQUEST_NULL), value_of(MPI.BYTE))
    module.setup(MPI.__file__, *handles, MPI.ANY_TAG, MPI._sizeof(MPI.Status), MPI.Exception)
    offset = MPI._addressof(MPI.COMM_SELF) - id(MPI.COMM_SELF)  # of the handle in a communicator object
    known, counts = np.zeros((3, 5), np.int64), (np.dtype(np.int64), np.dtype(np.int32))
    example = (known, known.ctypes.data, known.flags.num)
    module.setup_calls(MPI.Comm, offset, np.ndarray, progress.active, observers, AUTO, example, counts)


def value_of(handle: Any) -> int:
    """An MPI handle as a number."""
    kind = ctypes.c_int32 if MPI._sizeof(handle) == 4 else ctypes.c_int64
    return kind.from_address(MPI._addressof(handle)).value


# ---- Programs


class Code(NamedTuple):
    """Steps in words, and what drives them where they are not in sequence; by slot of a request and by place of a wait
    for flags, the operation; the datatypes are needed as long as it is."""

    words: array[int]
    flow: array[int]
    messages: list[int]
    waits: dict[int, int]
    datatypes: Datatypes


def compile_steps(steps: Steps, layout: Layout | None, window: Window | None, lane_of: Sequence[int]) -> Code:
    """Steps that `Steps.are_basic`, for data that lie like that; without a layout, steps that `Steps.are_by_block`, for
    blocks whose sizes and places come with each start."""
    code, ops, byte = Code(array("q"), array("q"), [], {}, {}), steps.schedule.ops, value_of(MPI.BYTE)
    completes = {} if steps.in_sequence else steps.flow.completes
    slots: dict[int, int] = {}  # of the requests of messages that are under way, by operation
    begins = []  # where each step's words do

    def add(kind: int, *words: int) -> None:
        code.words.extend((kind, len(words) + 2, *words))

    def add_operation(index: int) -> None:
        op: Any = ops[index]
        if layout is None:
            ends = [op.source, op.target] if isinstance(op, Copy) else [op.region]
            places = [number for end in ends for number in (BASES.index(end.buffer), end.blocks[0])]
            if isinstance(op, Copy):
                add(COPY_BLOCK, *places)
            else:
                slots[index] = len(code.messages)
                add(SEND_BLOCK if isinstance(op, Send) else RECEIVE_BLOCK, *places, op.peer, op.tag, slots[index])
                code.messages.append(index)
        elif isinstance(op, (Send, Recv)):
            if runs := layout.runs(op.region):
                offset, number, datatype = typed(runs, code.datatypes)
                kind, base = SEND if isinstance(op, Send) else RECEIVE, BASES.index(op.region.buffer)
                slots[index] = len(code.messages)
                handle = byte if datatype is MPI.BYTE else value_of(datatype)
                add(kind, base, offset, number, handle, op.peer, op.tag, slots[index])
                code.messages.append(index)
            elif completes:
                add(DONE, completes[index])
        elif isinstance(op, Copy):
            base, to = BASES.index(op.source.buffer), BASES.index(op.target.buffer)
            for at, there, length, pieces, distance, apart in _evenly(_pieces(layout, op.source, op.target)):
                add(COPY, base, at, to, there, length, pieces, distance, apart)
        elif isinstance(op, Signal) and window is not None:
            add(RAISE, window.slot(window.lane, op.flag))
        elif isinstance(op, Wait) and window is not None:
            code.waits[len(code.words)] = index
            add(FLAGS, int(op.previous), *(window.slot(lane_of[peer], op.flag) for peer in op.peers))

    for step in steps.steps:
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


def _pieces(layout: Layout, source: Region, target: Region) -> Iterable[tuple[int, ...]]:
    return common_pieces(layout, (0, source), (0, target))


def _evenly(pieces: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(offset, offset, length) of copies, those of equal length and distances put together: offsets, length, number
    and distances."""
    run: list[int] = []
    for at, to, length in pieces:
        if run and length == run[2]:
            number = run[3]
            if number == 1:
                run[4:] = at - run[0], to - run[1]
            if (at, to) == (run[0] + number * run[4], run[1] + number * run[5]):
                run[3] += 1
                continue
        if run:
            yield tuple(run)  # type: ignore[misc]
        run = [at, to, length, 1, 0, 0]
    if run:
        yield tuple(run)  # type: ignore[misc]


class Compiled:
    """Steps run by the compiled engine. See `engines.Engine`. Without a ``layout`` so many
    ``blocks`` of send and recv get their sizes and places with each start."""

    def __init__(
        self,
        steps: Steps,
        layout: Layout | None,
        comm: MPI.Intracomm,
        tag: int,
        addresses: dict[BufferName, int],
        window: Window | None,
        lane_of: Sequence[int],
        blocks: tuple[int, int] = (0, 0),
    ) -> None:
        module: Any = load()[0]
        self._ops, self._window, self._lane_of = steps.schedule.ops, window, lane_of
        self._code = code = compile_steps(steps, layout, window, lane_of)
        bases = tuple(addresses.get(base, 0) for base in BASES)
        flags, counts = (window.flags_address, window.counts.buffer_info()[0]) if window is not None else (0, 0)
        number = 0 if steps.in_sequence else len(steps.steps)
        self.program = module.Program(
            code.words, code.flow, number, len(code.messages), value_of(comm), tag, comm.rank, bases, blocks,
            flags, counts, (window, comm),
        )  # fmt: skip
        self.run: Callable[[], None] = self.program.run
        self._by_block = layout is None

    def move(self, send: int, recv: int, sizes: Sequence[Any] = (), places: Sequence[Any] = ()) -> None:
        """The addresses of the program's buffers from now on; and, for blocks of any sizes, those of send and recv."""
        self.program.move(send, recv)
        if self._by_block:
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
        for datatype in self._code.datatypes.values():
            if datatype:
                datatype.Free()


# ---- Calls


class Routes:
    """In place of the compiled engine's: it knows no call."""

    def __init__(self, *_: Any) -> None:
        self.tick = count(1).__next__

    def clear(self) -> None:
        """Nothing to forget."""

    def remember(self, *_: Any, **params: Any) -> bool:
        """Python serves all calls."""
        return False

    def open(self, _: bool) -> None:
        """Nothing to serve."""

    def limit(self, seconds: float, number: int, record: object) -> None:
        """Nothing that could wait."""


def make_routes(failed: Callable[..., None], rank: int, size: int) -> Any:
    """The calls of a communicator whose programs are known, by their arguments; ``failed`` is called with a program in
    which an exception was raised, the entry of the call in the record (None without a deadline), and the exception."""
    module: Any = load()[0]
    return (Routes if module is None else module.Routes)(failed, rank, size)


def call() -> Callable[..., bool] | None:
    """What serves a call on arrays that is known: of a collective, the communicator, the buffers (None for send where
    there is one buffer), each an array or, for blocks of any sizes, one with its counts, the root, algorithm and
    transport, and by name the parameters. It returns whether it has."""
    module: Any = load()[0]
    return None if module is None else module.call


def method(kind: type, name: str, collective: object, one_buffer: bool, python: Function) -> Function:
    """A method of communicators that serves calls that are known, and leaves all others to ``python``."""
    return _entry(kind, None, name, "As mpi4py's.", collective, one_buffer, (), python) or python


def function(collective: object, one_buffer: bool, python: Function) -> Function:
    """The same for a public function, whose communicator comes first, and whose options have names."""
    found = signature(python)
    bare = [each.replace(annotation=Parameter.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=Signature.empty))
    doc = f"{python.__name__}{text}\n--\n\n{python.__doc__}"
    options = tuple(found.parameters)
    return _entry(None, python.__module__, python.__name__, doc, collective, one_buffer, options, python) or python


def _entry(*given: Any) -> Any:
    """None if there is no compiled engine, or too many of them."""
    module: Any = load()[0]
    return None if module is None else module.entry(*given)


def register(handle: int, routes: Any) -> None:
    """Let the calls of a communicator be served by what its routes know; None: not any more."""
    module = load()[0]
    if module is not None:
        module.register(ctypes.c_int64(handle).value, routes)
