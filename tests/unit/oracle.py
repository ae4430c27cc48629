"""An operational judge of schedules: runs them in every order of events and looks at what comes out.

It shares no code and no idea with `hiercoll.verify`: no happens-before rule decides here,
only the contents that the receive buffers end with. It is meant for tiny layouts.

The machine. Every operation has two events, its beginning and its end. It may begin once all
that it waits for has ended.

- Receive, copy and reduction leave garbage in their target at the beginning and the result at
  the end: MPI may write a receive buffer at any moment in between.
- A copy or reduction reads at its beginning, which may come as late as one likes.
- A send reads at its beginning, joins the queue of its (source, destination, tag), and reads
  again at its end: if the two differ, what the message holds is anyone's guess.
- A receive joins the queue of its (source, destination, tag) at its beginning. The n-th receive
  of a queue takes the n-th message; it can end once that message's send has begun.
- Buffered, a send ends whenever it likes; unbuffered, only after its receive has begun.
- What begins on shared blocks of a schedule that exchanges sizes must find their lengths, those of
  its own start, in the rows of the rank's buffer `sizes`. The user writes the rank's own row.
- A signal raises a flag to the number of the start, a wait ends when all its flags are there.

Between two starts the user reads the receive buffer and writes new tokens to the send buffer,
each rank as soon as its own operations have ended. Two starts are run where there are flags or
shared buffers. For private buffers one is enough: all of a rank's operations of a start end
before its next start begins, messages queue up in order, and a token left over in a buffer can
only reach the output of the next start through a block that was read without having been
written, which the first start shows.

The meaning has changed if in some order of events a rank gets stuck (judged unbuffered), or
(judged buffered) something is read that is not there, a message and its receive differ in size,
or a receive buffer differs from the contract: of a reduction, holds a value that does not combine each contribution
once, in the order asked for, or not as another rank's does.

Orders that cannot matter are left out. An event that can happen now happens at once if no other
event that may still come before it touches the same data; otherwise every event that can happen
now is tried. That loses nothing: what can happen stays possible, so such an event is in every
continuation and can be moved to its front. States that were seen before are not visited again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from hiercoll.collectives import Order
from hiercoll.contracts import Contract
from hiercoll.schedule import Copy, Op, Recv, Reduce, Region, Schedule, Send, Signal, Wait, reads, writes
from hiercoll.topology import Topology

Value: TypeAlias = "int | tuple[Value, Value]"  # what a cell holds: a token, or how one was made of two
Key: TypeAlias = "tuple[int, int, int]"  # source, destination, tag

NEVER_WRITTEN = -1
GARBAGE = -2
START = 1_000_000  # added to the tokens of the second start


class Verdict(NamedTuple):
    """What the oracle says; ``why`` names one order of events that goes wrong."""

    kind: Literal["same", "changed", "undecided"]
    why: str
    states: int


def judge(
    schedules: Sequence[Schedule],
    contract: Contract,
    topology: Topology,
    *,
    limit: int = 20_000,
    every_order: bool = False,
) -> Verdict:
    """Whether ``schedules`` fulfil ``contract`` in every order of events.

    ``undecided`` if more than ``limit`` states had to be told apart. ``every_order`` visits also
    the orders that are known not to matter, to check that they do not.
    """
    unbuffered = _Machine(schedules, contract, topology, buffered=False, every_order=every_order).explore(limit)
    if unbuffered.kind != "same":
        return unbuffered
    return _Machine(schedules, contract, topology, buffered=True, every_order=every_order).explore(limit)


class _WrongError(Exception):
    """The order of events at hand goes wrong."""


class _Run:
    """A state of the machine: which events have happened, and what they left behind."""

    __slots__ = ("done", "held", "memory", "queues", "results")

    def __init__(
        self,
        done: int,
        memory: list[Value],
        held: dict[int, list[Value]],
        queues: dict[tuple[bool, Key], list[int]],
        results: dict[tuple[int, int], Value],
    ) -> None:
        self.done, self.memory, self.held, self.queues = done, memory, held, queues
        self.results = results  # of reductions, that ranks have received: by start and token

    def copy(self) -> _Run:
        queues = {key: queue.copy() for key, queue in self.queues.items()}
        return _Run(self.done, self.memory.copy(), self.held.copy(), queues, self.results.copy())

    def key(self) -> object:
        """Equal for states with the same future."""
        held = tuple((event, *self.held[event]) for event in sorted(self.held))
        queues = tuple((key, *self.queues[key]) for key in sorted(self.queues))
        return self.done, tuple(self.memory), held, queues, tuple(sorted(self.results.items()))


class _Machine:
    """All ranks' operations in all starts. Operation i has the events 2i (begins) and 2i+1 (ends)."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        contract: Contract,
        topology: Topology,
        *,
        buffered: bool,
        every_order: bool,
    ) -> None:
        self.contract, self.buffered = contract, buffered
        self.ranks = range(contract.size)
        self.starts = 2 if any(s.shared or s.flags for s in schedules) else 1
        self._lay_out(schedules, topology)
        self._number(schedules)
        self.lengths = [self._lengths(i, schedules, topology) for i in range(len(self.ops))]
        self._connect()
        self._find_races()
        if every_order:
            self.racing = [~0] * self.events

    def _lay_out(self, schedules: Sequence[Schedule], topology: Topology) -> None:
        """Where each buffer begins and ends among all cells; a node's ranks have one shared buffer."""
        self.pieces: dict[tuple[int, str], range] = {}
        self.cells = 0
        for rank, schedule in zip(self.ranks, schedules, strict=True):
            for name, blocks in {**self.contract.sizes(rank), "scratch": schedule.scratch}.items():
                self._piece(rank, name, blocks)
            self._piece(rank, "sizes", schedule.sizes)
        for ranks in topology.nodes:
            for name, blocks in (("shared", schedules[ranks[0]].shared), ("shared_sizes", schedules[ranks[0]].sizes)):
                self._piece(ranks[0], name, blocks)
                for rank in ranks:
                    self.pieces[rank, name] = self.pieces[ranks[0], name]
        self.known_rows = {  # of sizes: whose a rank knows, and where they lie; none if it exchanges none
            rank: {owner: self._cells(rank, Region("sizes", (row,))) for owner, row in self._known(schedule, topology)}
            for rank, schedule in zip(self.ranks, schedules, strict=True)
        }

    def _known(self, schedule: Schedule, topology: Topology) -> list[tuple[int, int]]:
        if schedule.knows:  # a row for each rank
            return [(rank, rank) for rank in schedule.knows]
        return [(schedule.rank, topology.lane_of[schedule.rank])] if schedule.sizes else []

    def _piece(self, rank: int, name: str, blocks: int) -> None:
        end = self.cells + blocks * self.contract.segments
        self.pieces[rank, name] = range(self.cells, end)
        self.cells = end

    def _cells(self, rank: int, region: Region) -> list[int]:
        """The cells of a region, one per segment of a block."""
        k = self.contract.segments
        parts = range(k) if region.part is None else (region.part,)
        piece = self.pieces[rank, region.buffer]
        return [piece[block * k + part] for block in region.blocks for part in parts]

    def _number(self, schedules: Sequence[Schedule]) -> None:
        """Events: two for each operation of each start, then one user for each rank and start."""
        self.ops: list[Op] = []
        self.where: list[tuple[int, int, int]] = []  # start, rank, index
        self.first: dict[tuple[int, int], int] = {}
        for start in range(self.starts):
            for rank, schedule in enumerate(schedules):
                self.first[start, rank] = len(self.ops)
                self.ops += schedule.ops
                self.where += [(start, rank, index) for index in range(len(schedule.ops))]
        self.sources = [[self._cells(w[1], r) for r in reads(op)] for op, w in zip(self.ops, self.where, strict=True)]
        self.targets = [
            [cell for region in writes(op) for cell in self._cells(w[1], region)]
            for op, w in zip(self.ops, self.where, strict=True)
        ]
        self.users = 2 * len(self.ops)
        self.events = self.users + self.starts * len(self.ranks)
        self.never = self.events

    def _user(self, start: int, rank: int) -> int:
        """The event in which the user reads what ``start`` brought, and writes for the next."""
        return self.users + start * len(self.ranks) + rank

    def _lengths(self, i: int, schedules: Sequence[Schedule], topology: Topology) -> list[tuple[int, Value]]:
        """The cells of ``sizes`` that operation ``i`` needs, and what must be there: of each shared block,
        its source's sizes if that is of the node, else its destination's."""
        start, rank, _ = self.where[i]
        schedule, here = schedules[rank], topology.node(rank)
        if not schedule.sizes:
            return []
        regions = [region for region in (*reads(self.ops[i]), *writes(self.ops[i])) if region.buffer == "shared"]
        ends = [schedule.holds[block] for region in regions for block in region.blocks]
        owners = {source if source in here else target for source, target in ends}
        if schedule.knows:  # each lane has a block
            owners = {here[block] for region in regions for block in region.blocks}
        return [
            (cell, token + start * START)
            for owner in owners
            for cell, token in zip(
                self._cells(rank, Region("sizes", (owner if schedule.knows else topology.lane_of[owner],))),
                self.contract.own_sizes(owner).tolist(),
                strict=True,
            )
        ]

    def _connect(self) -> None:
        """What must have happened before each event, as far as that is the same in every run."""
        self.needs: list[set[int]] = [set() for _ in range(self.events)]
        ends: dict[tuple[bool, Key, int], list[int]] = defaultdict(list)
        raised = {(*self.where[i][:2], op.flag): i for i, op in enumerate(self.ops) if isinstance(op, Signal)}
        for i, op in enumerate(self.ops):
            start, rank, _ = self.where[i]
            base = self.first[start, rank]
            self.needs[2 * i] |= {2 * (base + dep) + 1 for dep in op.deps}
            if start:
                self.needs[2 * i].add(self._user(start - 1, rank))
            self.needs[2 * i + 1].add(2 * i)
            self.needs[self._user(start, rank)].add(2 * i + 1)
            if isinstance(op, Send | Recv):
                ends[isinstance(op, Send), _key(rank, op), start].append(i)
            elif isinstance(op, Wait) and start - op.previous >= 0:
                for peer in op.peers:
                    signal = raised.get((start - op.previous, peer, op.flag))
                    self.needs[2 * i + 1].add(self.never if signal is None else 2 * signal + 1)
        for start in range(1, self.starts):
            for rank in self.ranks:
                self.needs[self._user(start, rank)].add(self._user(start - 1, rank))
        self._connect_messages(ends)

    def _connect_messages(self, ends: dict[tuple[bool, Key, int], list[int]]) -> None:
        """A key with one message per start always matches alike; for others the queues decide at run time."""
        self.message: dict[int, int] = {}  # receive -> its send
        self.contested = {key for (_, key, _), ops in ends.items() if len(ops) > 1}
        for (is_send, key, start), ops in ends.items():
            if key in self.contested:
                continue
            partner = ends.get((not is_send, key, start))
            if not is_send or not self.buffered:
                self.needs[2 * ops[0] + 1].add(2 * partner[0] if partner else self.never)
            if not is_send and partner:
                self.message[ops[0]] = partner[0]

    def _find_races(self) -> None:
        """For each event those that touch the same data and may come before it as well as after it."""
        before, after = self._closure()
        readers, writers = [0] * self.cells, [0] * self.cells
        touched: list[tuple[set[int], set[int]]] = []
        for event in range(self.users if self.buffered else 0):
            i, ending = divmod(event, 2)
            sending = isinstance(self.ops[i], Send)
            read = {cell for cells in self.sources[i] for cell in cells} if sending or not ending else set()
            if not ending:
                read |= {cell for cell, _ in self.lengths[i]}
            touched.append((read, set(self.targets[i])))
            for cell in read:
                readers[cell] |= 1 << event
            for cell in self.targets[i]:
                writers[cell] |= 1 << event
        posts: dict[tuple[bool, Key], int] = defaultdict(int)
        for i, op in enumerate(self.ops):
            if isinstance(op, Send | Recv):
                posts[isinstance(op, Send), _key(self.where[i][1], op)] |= 1 << 2 * i
        self.racing = [0] * self.events
        for event in range(self.users):
            op, others = self.ops[event // 2], 0
            if self.buffered:
                read, written = touched[event]
                for cell in read:
                    others |= writers[cell]
                for cell in written:
                    others |= writers[cell] | readers[cell]
            if event % 2 == 0 and isinstance(op, Send | Recv):
                others |= posts[isinstance(op, Send), _key(self.where[event // 2][1], op)]
            self.racing[event] = others & ~(before[event] | after[event] | 1 << event)

    def _closure(self) -> tuple[list[int], list[int]]:
        """For each event those that must happen before it, and those that cannot happen before it."""
        needed_by: list[list[int]] = [[] for _ in range(self.events + 1)]
        missing = [len(needs) for needs in self.needs]
        for event, needs in enumerate(self.needs):
            for need in needs:
                needed_by[need].append(event)
        order = [event for event in range(self.events) if not missing[event]]
        before, after = [0] * self.events, [0] * self.events
        for event in order:  # grows while it is walked through
            for need in self.needs[event]:
                before[event] |= before[need] | 1 << need
            for other in needed_by[event]:
                missing[other] -= 1
                if not missing[other]:
                    order.append(other)
        for event in reversed(order):
            for other in needed_by[event]:
                after[event] |= after[other] | 1 << other
        self.masks = [sum(1 << need for need in needs) for needs in self.needs]
        return before, after

    # Running.

    def explore(self, limit: int) -> Verdict:
        """All orders of events that can matter."""
        memory: list[Value] = [NEVER_WRITTEN] * self.cells
        self._write_inputs(memory, 0)
        stack, seen = [_Run(0, memory, {}, {}, {})], set()
        while stack:
            run = stack.pop()
            try:
                possible = self._settle(run)
                key = run.key()
                if not possible:
                    self._check_finished(run)
                if not possible or key in seen:
                    continue
                seen.add(key)
                if len(seen) > limit:
                    return Verdict("undecided", f"more than {limit} states", len(seen))
                for event in possible:
                    child = run.copy()
                    self._happen(child, event)
                    stack.append(child)
            except _WrongError as wrong:
                return Verdict("changed", str(wrong), len(seen))
        return Verdict("same", "", len(seen))

    def _settle(self, run: _Run) -> list[int]:
        """Let happen what no other event races with. Returns the possible events that are left."""
        waiting = [event for event in range(self.events) if not run.done >> event & 1]
        while True:
            left, possible, happened = [], [], False
            for event in waiting:
                if self.masks[event] & ~run.done or not self._matched(run, event):
                    left.append(event)
                elif self.racing[event] & ~run.done:
                    left.append(event)
                    possible.append(event)
                else:
                    self._happen(run, event)
                    happened = True
            if not happened:
                return possible
            waiting = left

    def _matched(self, run: _Run, event: int) -> bool:
        """Whether the other end of a message whose key is contested is there, if it must be."""
        if event % 2 == 0 or event >= self.users or not self.contested:
            return True
        op = self.ops[event // 2]
        if not isinstance(op, Send | Recv) or (isinstance(op, Send) and self.buffered):
            return True
        key = _key(self.where[event // 2][1], op)
        if key not in self.contested:
            return True
        mine = run.queues[isinstance(op, Send), key].index(event // 2)
        return mine < len(run.queues.get((not isinstance(op, Send), key), ()))

    def _happen(self, run: _Run, event: int) -> None:
        """Let ``event`` happen."""
        run.done |= 1 << event
        if event >= self.users:
            if self.buffered:
                self._use(run, *divmod(event - self.users, len(self.ranks)))
            return
        i, ending = divmod(event, 2)
        op = self.ops[i]
        if isinstance(op, Send | Recv) and not ending:
            key = _key(self.where[i][1], op)
            if key in self.contested:
                run.queues.setdefault((isinstance(op, Send), key), []).append(i)
        if not self.buffered:
            return
        if not ending and any(run.memory[cell] != due for cell, due in self.lengths[i]):
            raise _WrongError(f"{self._name(i)}: does not know how long its blocks are")
        if isinstance(op, Send):
            self._send(run, i, bool(ending))
        elif isinstance(op, Recv) and ending:
            self._write(run, i, run.held.pop(2 * self._message(run, i, op) + 1))
        elif isinstance(op, Copy | Reduce) and ending:
            self._write(run, i, run.held.pop(2 * i))
        elif isinstance(op, Recv | Copy | Reduce):
            if not isinstance(op, Recv):  # which may write what it reads, block by block
                run.held[2 * i] = self._combined(run, i)
            for cell in self.targets[i]:
                run.memory[cell] = GARBAGE

    def _send(self, run: _Run, i: int, ending: bool) -> None:
        """A send keeps what it read twice: for itself until it ends, and for its receive."""
        cells = self.sources[i][0]
        if not ending:
            run.held[2 * i] = run.held[2 * i + 1] = self._read(run, i, cells)
        elif run.held.pop(2 * i) != [run.memory[cell] for cell in cells]:
            raise _WrongError(f"{self._name(i)}: its blocks change while they are sent")

    def _message(self, run: _Run, i: int, op: Recv) -> int:
        """The send whose message receive ``i`` takes."""
        if i in self.message:
            return self.message[i]
        key = _key(self.where[i][1], op)
        return run.queues[True, key][run.queues[False, key].index(i)]

    def _combined(self, run: _Run, i: int) -> list[Value]:
        """What a copy or reduction makes of what it reads."""
        operands = [self._read(run, i, cells) for cells in self.sources[i]]
        if len(operands) == 1:
            return operands[0]
        return list(zip(*operands, strict=True))

    def _read(self, run: _Run, i: int, cells: list[int]) -> list[Value]:
        values = [run.memory[cell] for cell in cells]
        if NEVER_WRITTEN in values or GARBAGE in values:
            raise _WrongError(f"{self._name(i)}: reads what is not there")
        return values

    def _write(self, run: _Run, i: int, values: list[Value]) -> None:
        if len(values) != len(self.targets[i]):
            raise _WrongError(f"{self._name(i)}: gets {len(values)} blocks for {len(self.targets[i])}")
        for cell, value in zip(self.targets[i], values, strict=True):
            run.memory[cell] = value

    def _use(self, run: _Run, start: int, rank: int) -> None:
        """The user's turn: look at the output, write the next input."""
        due = self.contract.expected(rank).tolist()
        for cell, token in zip(self.pieces[rank, "recv"], due, strict=False):
            value = run.memory[cell]
            first = run.results.setdefault((start, token), value)
            if value != first or not self._is_due(value, token, start):
                raise _WrongError(f"rank {rank}, start {start}: receives {value} for {token}, others {first}")
        if start + 1 < self.starts:
            self._write_inputs(run.memory, start + 1, [rank])

    def _is_due(self, value: Value, token: int, start: int) -> bool:
        """Whether this is the block, or a reduction of it in the order that the contract asks for."""
        if not self.contract.is_reduction(token):
            return value == token + start * START
        parts: list[Value] = [part + start * START for part in self.contract.contributors(token)]
        found = list(_leaves(value))
        if self.contract.order is Order.FIXED:
            return value == _fixed(parts)
        return found == parts if self.contract.order is Order.RANK else sorted(found) == parts

    def _write_inputs(self, memory: list[Value], start: int, ranks: Sequence[int] | None = None) -> None:
        """The tokens that the user writes before ``start``, all different from those of other starts."""
        for rank in self.ranks if ranks is None else ranks:
            for name, tokens in self.contract.initial(rank).items():
                for cell, token in zip(self.pieces[rank, name], tokens.tolist(), strict=True):
                    if token >= 0:
                        memory[cell] = token + start * START
            for owner, cells in self.known_rows[rank].items():
                for cell, token in zip(cells, self.contract.own_sizes(owner).tolist(), strict=True):
                    memory[cell] = token + start * START

    def _check_finished(self, run: _Run) -> None:
        for i in range(len(self.ops)):
            if not run.done >> (2 * i + 1) & 1:
                raise _WrongError(f"{self._name(i)}: never ends")

    def _name(self, i: int) -> str:
        start, rank, index = self.where[i]
        return f"rank {rank}, op {index} ({type(self.ops[i]).__name__}), start {start}"


def _key(rank: int, op: Send | Recv) -> Key:
    return (rank, op.peer, op.tag) if isinstance(op, Send) else (op.peer, rank, op.tag)


def _leaves(value: Value) -> Iterator[int]:
    if isinstance(value, tuple):
        yield from _leaves(value[0])
        yield from _leaves(value[1])
    else:
        yield value


def _fixed(parts: list[Value]) -> Value:
    """The tree of `Order.FIXED`, from its root: if there are more than a power of two, pairs come first; then each
    half by itself."""
    n = len(parts)
    if n == 1:
        return parts[0]
    if n & (n - 1) == 0:
        return _fixed(parts[: n // 2]), _fixed(parts[n // 2 :])
    pairs = n - 2 ** int(math.log2(n))
    return _fixed([*zip(parts[: 2 * pairs : 2], parts[1 : 2 * pairs : 2], strict=True), *parts[2 * pairs :]])
