"""Engines: they run bound steps, one after the other or driven by completions, or the MPI library's own collective."""

from __future__ import annotations

import os
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from mpi4py import MPI

from hiercoll.memory import Action, Transfer
from hiercoll.runtime.window import Window
from hiercoll.schedule import OUTGOING, Op
from hiercoll.schedule.lowering import Kind, Step, Steps


class Message:
    """A message that is begun anew at each start. ``datatype``: what is freed with it, and may be of others, too."""

    __slots__ = ("_args", "_datatype", "_make", "request")

    def __init__(self, make: Callable[..., MPI.Request], args: tuple[Any, ...], datatype: MPI.Datatype | None) -> None:
        self._make, self._args, self._datatype = make, args, datatype
        self.request = MPI.REQUEST_NULL

    def begin(self) -> None:
        """Begin it; from then on ``request`` is of this start."""
        self.request = self._make(*self._args)

    def free(self) -> None:
        """Free its datatype."""
        if self._datatype:  # which is null once it has been freed
            self._datatype.Free()


class Flags(NamedTuple):
    """Flags of ``peers`` that are waited for: raised in the current start, or ``back`` starts before."""

    window: Window
    peers: abc.Sequence[int]
    slots: list[int]
    back: int

    def lacking(self) -> list[int]:
        """The peers whose flags are not raised."""
        window, back = self.window, self.back
        return [peer for peer, slot in zip(self.peers, self.slots, strict=True) if not window.all_raised([slot], back)]


class Notice(Transfer):
    """What another rank of the node tells by a flag: nothing is begun, and it is complete when the flag is raised."""

    def __init__(self, window: Window, slot: int) -> None:
        self._window, self._slots = window, [slot]

    def start(self) -> None:
        """Nothing: the other rank may have told already."""

    def done(self) -> bool:
        """Whether it has told."""
        return self._window.all_raised(self._slots, 0)

    def wait(self) -> None:
        """Until it has."""
        self._window.wait(self._slots, 0)


Part: TypeAlias = "MPI.Prequest | Message | Flags | Transfer | Action | None"


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


class Engine(Protocol):
    """Runs what has been bound."""

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


def _all_complete(requests: abc.Sequence[MPI.Request], testall: Callable[..., bool] = MPI.Request.Testall) -> bool:
    """Whether requests are complete, after a few looks: what is about to be is seen soonest here."""
    return testall(requests) or testall(requests) or testall(requests) or testall(requests)


def _is_complete(request: MPI.Request) -> bool:
    """Whether a request is complete; one that has failed is not."""
    try:
        return bool(request.Test())
    except MPI.Exception:
        return False


def _pending_messages(ops: abc.Sequence[Op], parts: Mapping[int, Part]) -> Iterator[Pending]:
    """Messages that have been begun and are not complete."""
    for index, part in parts.items():
        request = part.request if isinstance(part, Message) else part
        if isinstance(request, MPI.Request) and not _is_complete(request):
            op: Any = ops[index]
            yield Pending(index, "a send to" if isinstance(op, OUTGOING) else "a receive from", op.peer)
        elif isinstance(part, Notice) and not part.done():
            yield Pending(index, "a notice from", cast(Any, ops[index]).peer)


class Call(NamedTuple):
    """A step in a sequence: ``run`` does it, or waits until it is done; ``ready`` looks whether what
    it waits for is complete: where that is True, the step is done. None: it never waits.
    ``begins`` and ``ends``: operations."""

    run: Callable[[], object]
    ready: Callable[[], bool] | None = None
    begins: abc.Sequence[int] = ()
    ends: abc.Sequence[int] = ()


class Section:
    """Bound steps that follow each other, ready to be called. ``parts``: what their operations have become."""

    def __init__(self, steps: abc.Sequence[Step], parts: Mapping[int, Part]) -> None:
        self.calls = calls = list[Call]()
        for position, step in enumerate(steps):
            ops = step.ops
            if step.kind is Kind.START:
                _add_starting(calls, ops, [parts[op] for op in ops])
            elif step.kind is Kind.WAIT:
                _add_waiting(calls, ops, [parts[op] for op in ops])
            else:
                for op in ops:
                    part = parts[op]
                    if isinstance(part, partial):  # most are, and it is quickly seen
                        calls.append(Call(part, None, (op,), (op,)))
                    elif part is not None:
                        _add_local(calls, op, part, steps[position + 1 :])


def free_parts(parts: Mapping[int, Part]) -> None:
    """Free the requests, and the datatypes, of messages."""
    for part in parts.values():
        if isinstance(part, MPI.Prequest):
            part.Free()
        elif isinstance(part, Message):
            part.free()


def _add_starting(calls: list[Call], ops: abc.Sequence[int], parts: abc.Sequence[Part]) -> None:
    requests = [part for part in parts if isinstance(part, MPI.Prequest)]
    if requests:
        calls.append(Call(partial(MPI.Prequest.Startall, requests), None, ops))
    if len(requests) < len(parts):
        messages = [part for part in parts if isinstance(part, Message)]
        if messages:
            calls.append(Call(messages[0].begin if len(messages) == 1 else partial(_begin, messages), None, ops))
        told = [(op, part) for op, part in zip(ops, parts, strict=True) if isinstance(part, partial)]
        calls.extend(Call(tell, None, (op,), (op,)) for op, tell in told)


def _begin(messages: list[Message]) -> None:
    for message in messages:
        message.begin()


def _add_waiting(calls: list[Call], ops: abc.Sequence[int], parts: abc.Sequence[Part]) -> None:
    """Persistent requests are the same at each start; others, and transfers, have to be asked for."""
    background = [part for part in parts if part is not None and not isinstance(part, partial)]
    requests = [part for part in background if isinstance(part, MPI.Prequest)]
    if len(requests) < len(background):
        messages = [part for part in background if isinstance(part, Message)]
        awaited = _Awaited(requests, messages, [part for part in background if isinstance(part, Transfer)])
        calls.append(Call(awaited.wait, awaited.ready, (), _ends(ops, parts)))
    elif requests:
        calls.append(
            Call(partial(MPI.Request.Waitall, requests), partial(_all_complete, requests), (), _ends(ops, parts))
        )


def _ends(ops: abc.Sequence[int], parts: abc.Sequence[Part]) -> list[int]:
    """The operations that go on in the background."""
    return [op for op, part in zip(ops, parts, strict=True) if part is not None and not isinstance(part, partial)]


class _Awaited(NamedTuple):
    requests: list[MPI.Prequest]
    messages: list[Message]
    transfers: list[Transfer]

    def wait(self) -> None:
        MPI.Request.Waitall([*self.requests, *(message.request for message in self.messages)])
        for transfer in self.transfers:
            transfer.wait()

    def ready(self) -> bool:
        requests = [*self.requests, *(message.request for message in self.messages)]
        return _all_complete(requests) and all(transfer.done() for transfer in self.transfers)


def _add_local(calls: list[Call], op: int, part: Part, later: abc.Sequence[Step]) -> None:
    """A transfer is waited for here, if it is by none of the ``later`` steps."""
    if isinstance(part, Flags):
        waited = (part.slots, part.back)
        calls.append(Call(partial(part.window.wait, *waited), partial(part.window.all_raised, *waited), (op,), (op,)))
    elif isinstance(part, Transfer):
        calls.append(Call(part.start, None, (op,)))
        if not any(step.kind is Kind.WAIT and op in step.ops for step in later):
            calls.append(Call(part.wait, part.done, (), (op,)))
    elif not isinstance(part, (MPI.Request, Message)) and part is not None:
        calls.append(Call(part, None, (op,), (op,)))


class Rest(Protocol):
    """The steps of a sequence that depend on what the steps before them have learned."""

    def __call__(self) -> tuple[Section, Mapping[int, Part]]:
        """As they are in this start, with what they begin, by operation; the steps before are done."""

    def free(self) -> None:
        """Free what is kept of them."""


class Sequence:
    """One step after the other.

    ``parts``: what the steps begin, by operation. ``window``: for schedules with flags. ``rest``: the steps after
    the ``first`` ones, where they are not the same at each start.
    """

    def __init__(
        self,
        ops: abc.Sequence[Op],
        first: Section,
        parts: Mapping[int, Part],
        window: Window | None = None,
        rest: Rest | None = None,
    ) -> None:
        self._ops, self._first, self._parts, self._window, self._rest = ops, first.calls, parts, window, rest
        self._runs = [call.run for call in first.calls]
        waits = (index for index, call in enumerate(first.calls) if call.ready is not None)
        self._opening = self._runs[: next(waits, len(self._runs))]  # up to the first step that may wait
        self._calls: list[Call] = []  # of the section that the current start has come to
        self._current = 0
        self._follows: Rest | None = None  # what comes after that section
        self._begun = parts  # of the current start
        self.log: list[Traced] | None = None

    def run(self) -> None:
        if self._window is not None:
            self._window.counts[0] += 1
        if self.log is not None:
            return self._run_traced(self.log)
        for run in self._runs:
            run()
        if self._rest is not None:
            for call in self._rest()[0].calls:
                call.run()

    def _run_traced(self, log: list[Traced]) -> None:
        begun: dict[int, float] = {}
        for section in (self._first, None):
            calls = section if section is not None else self._rest()[0].calls if self._rest is not None else ()
            for call in calls:
                begun.update(dict.fromkeys(call.begins, perf_counter()))
                call.run()
                end = perf_counter()
                log += [Traced(op, begun[op], end) for op in call.ends]

    def start(self) -> None:
        if self._window is not None:
            self._window.counts[0] += 1
        self._calls, self._current, self._follows, self._begun = self._first, 0, self._rest, self._parts
        for run in self._opening:
            run()
        self._current = len(self._opening)
        if self._window is not None:  # flags may have been raised before; messages have only just begun
            self._advance(block=False, look=False)

    def progress(self, block: bool) -> bool:
        return self._advance(block)

    def _advance(self, block: bool, look: bool = True) -> bool:
        """Go on. Without a ``look`` at messages, where they have only just begun."""
        while True:
            calls, current = self._calls, self._current
            while current < len(calls):
                run, ready, begins, _ = calls[current]
                if ready is None or block:
                    run()
                elif not (look or begins) or not ready():
                    return False
                self._current = current = current + 1
            if self._follows is None:
                return True
            section, parts = self._follows()
            self._calls, self._current, self._follows = section.calls, 0, None
            self._begun = {**self._begun, **parts}

    def pending(self) -> list[Pending]:
        found = list(_pending_messages(self._ops, self._begun))
        for op in self._calls[self._current].ends if self._current < len(self._calls) else ():
            part = self._begun.get(op)
            if isinstance(part, Flags):
                found += [Pending(op, "the flag of", peer) for peer in part.lacking()]
        return found

    def free(self) -> None:
        free_parts(self._parts)
        if self._rest is not None:
            self._rest.free()


class _Group(NamedTuple):
    """What a step begins together, and for each of it the step that is complete with it."""

    requests: list[MPI.Prequest]
    requests_end: list[int]
    messages: list[Message]
    messages_end: list[int]
    idle: list[int]  # steps that are complete at once: nothing is to be sent, or received, or it is told by a flag
    telling: list[partial[None]]
    notices: list[tuple[int, Transfer]]


class Dataflow:
    """Completion-driven: a step begins when all that it waits for are complete."""

    def __init__(self, steps: Steps, parts: Mapping[int, Part], window: Window | None = None) -> None:
        self._ops, self._steps, self._flow, self._parts = steps.schedule.ops, steps.steps, steps.flow, parts
        self._window = window
        self._groups: list[_Group | None] = [None] * len(steps.steps)
        self._actions: list[Action | None] = [None] * len(steps.steps)
        self._transfers: list[Transfer | None] = [None] * len(steps.steps)
        for index, step in enumerate(steps.steps):
            if step.kind is Kind.START:
                self._groups[index] = self._group(step.ops)
            elif step.kind is not Kind.WAIT:
                part = parts[step.ops[0]]
                if isinstance(part, Transfer):
                    self._transfers[index] = part
                else:
                    self._actions[index] = cast("Action | None", part)
        self._waiting: list[int] = []
        self._left = 0  # of these steps, in the current start
        self._active: list[MPI.Request] = []
        self._active_ends: list[int] = []
        self._moving: list[tuple[int, Transfer]] = []
        self.log: list[Traced] | None = None
        self._begun: dict[int, float] = {}

    def _group(self, ops: abc.Sequence[int]) -> _Group:
        group, parts, completes = _Group([], [], [], [], [], [], []), self._parts, self._flow.completes
        for op in ops:
            part = parts[op]
            if isinstance(part, MPI.Prequest):
                group.requests.append(part)
                group.requests_end.append(completes[op])
            elif isinstance(part, Message):
                group.messages.append(part)
                group.messages_end.append(completes[op])
            elif isinstance(part, Notice):
                group.notices.append((completes[op], part))
            else:
                group.idle.append(completes[op])
                if isinstance(part, partial):
                    group.telling.append(part)
        return group

    def start(self) -> None:
        if self._window is not None:
            self._window.counts[0] += 1
        self._waiting = self._flow.needs.copy()
        self._left = self._flow.number
        self._launch(self._flow.first)

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
        """Steps that have completed since; all, if nothing else is to be started and ``block``."""
        if block and len(self._active) == self._left:
            MPI.Request.Waitall(self._active)
            done, self._active, self._active_ends = self._active_ends, [], []
            return done
        done = []
        # Not Waitsome: MPICH polls in it without yielding, which costs dearly on shared cores.
        found = MPI.Request.Testsome(self._active) if self._active else None
        for position in sorted(found, reverse=True) if found else ():
            done.append(self._active_ends[position])
            last, last_end = self._active.pop(), self._active_ends.pop()
            if position < len(self._active):
                self._active[position], self._active_ends[position] = last, last_end
        if self._moving:
            moving = []
            for each in self._moving:
                if each[1].done():
                    done.append(each[0])
                else:
                    moving.append(each)
            self._moving = moving
        return done

    def _released(self, done: list[int]) -> list[int]:
        """Steps that waited for nothing but ``done``."""
        if self.log is not None:
            now = perf_counter()
            self.log += [Traced(self._steps[index].ops[0], self._begun[index], now) for index in done]
        self._left -= len(done)
        waiting, dependents, ready = self._waiting, self._flow.dependents, []
        for index in done:
            for dependent in dependents[index]:
                waiting[dependent] -= 1
                if not waiting[dependent]:
                    ready.append(dependent)
        return ready

    def _launch(self, ready: list[int]) -> None:
        """Start all that is ready, and what becomes ready by that without waiting."""
        groups, actions, transfers = self._groups, self._actions, self._transfers
        while ready:
            begun = [group for index in ready if (group := groups[index]) is not None]
            local = [index for index in ready if groups[index] is None] if begun else ready
            if self.log is not None:
                ends = [end for group in begun for each in (group[1], group.messages_end, group.idle) for end in each]
                ends += [end for group in begun for end, _ in group.notices]
                self._begun.update(dict.fromkeys([*ends, *local], perf_counter()))
            done: list[int] = []
            if begun:  # first, so that messages travel while this rank copies
                done = self._begin(begun)
            for index in local:
                if (transfer := transfers[index]) is not None:
                    transfer.start()
                    self._moving.append((index, transfer))
            for index in local:
                if transfers[index] is None:
                    done.append(index)
                    action = actions[index]
                    if action is not None:
                        action()
            ready = self._released(done)

    def _begin(self, groups: list[_Group]) -> list[int]:
        """Begin messages. Returns the steps that are complete because nothing is to be sent, or received."""
        started: list[MPI.Prequest] = []
        idle: list[int] = []
        for group in groups:
            started += group.requests
            self._active_ends += group.requests_end
            idle += group.idle
            self._moving += group.notices
        if started:
            MPI.Prequest.Startall(started)
            self._active += started
        for group in groups:
            for message in group.messages:
                message.begin()
                self._active.append(message.request)
            self._active_ends += group.messages_end
            for tell in group.telling:
                tell()
        return idle

    def pending(self) -> list[Pending]:
        return list(_pending_messages(self._ops, self._parts))

    def free(self) -> None:
        free_parts(self._parts)


class Between:
    """An engine on buffers of its own, between transfers to them and from them."""

    def __init__(self, before: abc.Sequence[Transfer], engine: Engine, after: abc.Sequence[Transfer]) -> None:
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


def _do(transfers: abc.Sequence[Transfer]) -> None:
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
