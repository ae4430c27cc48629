"""All ranks' schedules as arrays: operations in one row, what comes after each of them, and the messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from hiercoll.errors import ArgumentError, ScheduleError
from hiercoll.model.durations import Durations
from hiercoll.model.fairness import Floats, Ints
from hiercoll.model.machine import Machine
from hiercoll.schedule import INCOMING, LOCAL, OUTGOING, Copy, Get, Op, Reduce, Schedule, Send, Signal, Wait
from hiercoll.topology import Topology

TYPES = (*OUTGOING, *INCOMING, *LOCAL)
CODES = {kind: code for code, kind in enumerate(TYPES)}


def are(*kinds: type[Op]) -> npt.NDArray[np.bool_]:
    """For each code, whether it is one of these types'."""
    return np.array([kind in kinds for kind in TYPES])


HAS_PEER = are(*OUTGOING, *INCOMING, Get)
IS_WORK = are(Copy, Reduce, Signal, Wait)


class Operations(NamedTuple):
    """Numbered through, rank by rank.

    Of each: its ``rank``, its type (``code``, of ``TYPES``), how many others it is ``waiting`` for, the ``seconds`` of
    its rank's time that it takes itself. ``after[starts[i]:starts[i + 1]]`` wait for operation i: those that depend on
    it and, where it raises a flag, those that wait for that.
    """

    rank: Ints
    code: Ints
    waiting: Ints
    seconds: Floats
    starts: Ints
    after: Ints

    def followers(self, ops: Ints) -> Ints:
        """All that wait for some of the operations, as often as they do."""
        first = self.starts[ops]
        lengths = self.starts[ops + 1] - first
        last = np.cumsum(lengths)
        found: Ints = self.after[np.arange(lengths.sum()) + np.repeat(first - last + lengths, lengths)]
        return found

    def name(self, index: int) -> str:
        """An operation as an error names it."""
        rank = int(self.rank[index])
        first = int(np.searchsorted(self.rank, rank))
        return f"rank {rank}: operation {index - first} ({TYPES[self.code[index]].__name__})"


class Messages(NamedTuple):
    """In the order of their sends; then what each `Get` copies.

    Of each: the operations that are complete with it (for a `Get` ``sends`` is -1), the ranks, and the bytes.
    """

    sends: Ints
    receives: Ints
    source: Ints
    target: Ints
    nbytes: Ints


def flatten(
    schedules: Iterable[Schedule], topology: Topology, block: int, machine: Machine
) -> tuple[Operations, Messages]:
    """The schedules of all ranks, in order; they are asked for one by one, and not kept.

    Raises ScheduleError where a message has one end, or a flag is never raised; ArgumentError where there are not as
    many schedules as ranks.
    """
    rows = _Rows(topology, block, machine)
    for schedule in schedules:
        rows.add(schedule)
    if len(rows.first) != topology.size + 1:
        raise ArgumentError("schedules", f"one for each of {topology.size} ranks", len(rows.first) - 1)
    return rows.operations(), rows.messages()


class _Rows:
    def __init__(self, topology: Topology, block: int, machine: Machine) -> None:
        self.topology, self.block, self.machine = topology, block, machine
        self.first = [0]  # operation of each rank
        self.codes: list[Ints] = []
        self.seconds: list[Floats] = []
        self.edges: list[Ints] = []  # 2 rows: operations, and those that wait for them
        self.ends: list[Ints] = []  # 5 rows: operation, rank, peer, tag, bytes
        self.waits: list[tuple[int, int, int]] = []  # operation, rank and flag that it waits for
        self.signals: dict[tuple[int, int], int] = {}

    def add(self, schedule: Schedule) -> None:
        """The next rank's schedule."""
        ops, base, rank = schedule.ops, self.first[-1], len(self.first) - 1
        if schedule.rank != rank:
            raise ArgumentError("schedules", f"that of rank {rank} next", f"that of rank {schedule.rank}")
        durations = Durations(self.topology, self.block, schedule, self.machine)
        code = np.fromiter(map(CODES.__getitem__, map(type, ops)), np.int64, len(ops))
        deps = [op.deps for op in ops]
        numbers = np.fromiter(map(len, deps), np.int64, len(ops))
        befores = np.fromiter(chain.from_iterable(deps), np.int64, int(numbers.sum()))
        seconds = np.zeros(len(ops))
        for index in np.flatnonzero(IS_WORK[code]).tolist():
            seconds[index] = self._work(ops[index], rank, base + index, durations)
        self.codes.append(code)
        self.seconds.append(seconds)
        self.edges.append(np.stack([befores, np.repeat(np.arange(len(ops)), numbers)]) + base)
        self.ends.append(self._ends(ops, np.flatnonzero(HAS_PEER[code]), rank, durations))
        self.first.append(base + len(ops))

    def _work(self, op: Op, rank: int, index: int, durations: Durations) -> float:
        """Seconds of its rank's time that an operation takes; flags are noted."""
        if isinstance(op, (Copy, Reduce)):
            return durations.copy(op)
        if isinstance(op, Signal):
            self.signals.setdefault((rank, op.flag), index)
        if isinstance(op, Wait) and not op.previous:
            self.waits += [(index, peer, op.flag) for peer in op.peers]
        return durations.flag

    def _ends(self, ops: tuple[Op, ...], indices: Ints, rank: int, durations: Durations) -> Ints:
        """Operations that have a peer."""
        chosen: list[Any] = [ops[index] for index in indices.tolist()]
        nbytes = durations.nbytes
        sizes = [
            nbytes(op.region) if type(op) is Send else nbytes(op.target) if type(op) is Get else 0 for op in chosen
        ]
        named = np.array([[op.peer for op in chosen], [op.tag for op in chosen], sizes], np.int64)
        return np.concatenate([np.stack([indices + self.first[-1], np.full(len(chosen), rank)]), named])

    def operations(self) -> Operations:
        """Of all ranks."""
        code, count = np.concatenate(self.codes), self.first[-1]
        befores, afters = np.concatenate([*self.edges, self._flag_edges()], 1)
        return Operations(
            rank=np.repeat(np.arange(len(self.codes)), np.diff(self.first)),
            code=code,
            waiting=np.bincount(afters, minlength=count),
            seconds=np.concatenate(self.seconds),
            starts=np.concatenate([[0], np.cumsum(np.bincount(befores, minlength=count))]),
            after=afters[np.argsort(befores, kind="stable")],
        )

    def _flag_edges(self) -> Ints:
        for index, rank, flag in self.waits:
            if (rank, flag) not in self.signals:
                waiter = int(np.searchsorted(self.first, index, "right")) - 1
                raise ScheduleError(f"rank {waiter} waits for flag {flag} of rank {rank}, which is never raised")
        edges = [(self.signals[rank, flag], index) for index, rank, flag in self.waits]
        found: Ints = np.array(edges, np.int64).reshape(-1, 2).T
        return found

    def messages(self) -> Messages:
        """Of all ranks."""
        code, ends = np.concatenate(self.codes), np.concatenate(self.ends, 1)
        kind = code[ends[0]]
        sent, received, got = (ends[:, chosen[kind]] for chosen in (are(*OUTGOING), are(*INCOMING), are(Get)))
        received = received[[0, 2, 1, 3, 4]]  # source, then target
        sent_order, received_order = (np.lexsort(each[[3, 2, 1]]) for each in (sent, received))
        one, other = sent[1:4, sent_order], received[1:4, received_order]
        if one.shape != other.shape or (one != other).any():
            self._unmatched(one, other)
        receives = np.empty(len(sent_order), np.int64)
        receives[sent_order] = received[0, received_order]
        return Messages(
            sends=np.concatenate([sent[0], np.full(len(got[0]), -1)]),
            receives=np.concatenate([receives, got[0]]),
            source=np.concatenate([sent[1], got[2]]),
            target=np.concatenate([sent[2], got[1]]),
            nbytes=np.concatenate([sent[4], got[4]]),
        )

    @staticmethod
    def _unmatched(one: Ints, other: Ints) -> NoReturn:
        """Raise an error that names a message with one end."""
        sent, received = (Counter(zip(*each.tolist(), strict=True)) for each in (one, other))
        source, target, tag = min((sent - received) + (received - sent))
        raise ScheduleError(f"the message from rank {source} to rank {target} with tag {tag} lacks one end")
