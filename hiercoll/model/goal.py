"""Schedules in GOAL, the text format of the simulators LogGOPSim and ATLAHS.

The format, and what it means: Hoefler, Siebert, Lumsdaine, "Group operation assembly language" (ICPP 2009); Hoefler,
Schneider, Lumsdaine, "LogGOPSim" (LSAP 2010); Shen et al., "ATLAHS" (SC 2025). Each operation is a line with a label,
``send``, ``recv`` or ``calc``; ``a requires b`` says that a begins when b is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from hiercoll.errors import ArgumentError, ScheduleError
from hiercoll.model.durations import Durations
from hiercoll.model.machine import Machine, level
from hiercoll.schedule import MESSAGES, OUTGOING, Copy, Get, Op, Recv, Reduce, Schedule, Send, Signal, Wait
from hiercoll.topology import Topology

Flag: TypeAlias = "tuple[int, int]"  # rank, number

DEFAULT = Machine("default")


def to_goal(schedules: Sequence[Schedule], topology: Topology, block: int, machine: Machine = DEFAULT) -> str:
    """One start of all ranks' schedules, in order, with blocks of ``block`` bytes.

    Operation i of a rank has the label ``l<i + 1>``. Messages keep their tags and bytes; offers and notices have no
    bytes. Copies, reductions and gets are ``calc``, for as many ns as they take on ``machine``; a get is no message,
    and its source no part of it. A flag is a message without bytes to each rank that waits for it, under a tag above
    all others; a wait for the flag of the start before is for nothing. LogGOPSim charges n bytes as n - 1, so that
    messages without bytes come one byte's time early. Which ranks share a node is not written.

    Raises ScheduleError where a flag is never raised; ArgumentError for a block of less than 0 bytes, or where the
    schedules are not those of all ranks, in order.
    """
    if [schedule.rank for schedule in schedules] != list(range(topology.size)):
        raise ArgumentError("schedules", f"those of ranks 0 to {topology.size - 1}", [s.rank for s in schedules])
    watchers = _watchers(schedules)
    first = max(schedule.tags for schedule in schedules)  # tag of flag 0
    lines = [f"num_ranks {topology.size}"]
    for schedule in schedules:
        rank = _Rank(schedule, topology, block, machine)
        lines += ["", f"rank {schedule.rank} {{", *rank.lines(watchers, first), "}"]
    return "\n".join(lines) + "\n"


def _watchers(schedules: Sequence[Schedule]) -> dict[Flag, list[int]]:
    """Ranks that wait for each flag. Raises ScheduleError."""
    found: dict[Flag, list[int]] = {(s.rank, op.flag): [] for s in schedules for op in s.ops if isinstance(op, Signal)}
    for schedule in schedules:
        for rank, flag in _awaited(schedule):
            if (rank, flag) not in found:
                raise ScheduleError(f"rank {schedule.rank} waits for flag {flag} of rank {rank}, which is never raised")
            found[rank, flag].append(schedule.rank)
    return found


def _awaited(schedule: Schedule) -> Iterable[Flag]:
    """Flags that a rank waits for, each once."""
    waits = (op for op in schedule.ops if isinstance(op, Wait) and not op.previous)
    return dict.fromkeys((peer, op.flag) for op in waits for peer in op.peers)


class _Rank:
    """One rank's lines."""

    def __init__(self, schedule: Schedule, topology: Topology, block: int, machine: Machine) -> None:
        self.schedule, self.topology, self.machine = schedule, topology, machine
        self.durations = Durations(topology, block, schedule, machine)

    def lines(self, watchers: Mapping[Flag, Sequence[int]], first: int) -> Iterator[str]:
        """``watchers``: ranks that wait for each flag; ``first``: tag of flag 0."""
        labels = {flag: f"f{number}" for number, flag in enumerate(_awaited(self.schedule), 1)}
        raised = set[int]()
        for (peer, flag), label in labels.items():
            yield f"{label}: recv 0b from {peer} tag {first + flag}"
        for index, op in enumerate(self.schedule.ops):
            label = f"l{index + 1}"
            yield f"{label}: {self._line(op)}"
            yield from (f"{label} requires l{dep + 1}" for dep in dict.fromkeys(op.deps))
            if isinstance(op, Wait) and not op.previous:
                yield from (f"{label} requires {labels[peer, op.flag]}" for peer in op.peers)
            elif isinstance(op, Signal) and op.flag not in raised:
                raised.add(op.flag)
                for watcher in watchers[self.schedule.rank, op.flag]:
                    yield f"{label}to{watcher}: send 0b to {watcher} tag {first + op.flag}"
                    yield f"{label}to{watcher} requires {label}"

    def _line(self, op: Op) -> str:
        """What an operation is."""
        durations = self.durations
        if isinstance(op, MESSAGES):
            nbytes = durations.nbytes(op.region) if isinstance(op, (Send, Recv)) else 0
            way = "send {}b to {} tag {}" if isinstance(op, OUTGOING) else "recv {}b from {} tag {}"
            return way.format(nbytes, op.peer, op.tag)
        seconds = 0.0
        if isinstance(op, (Copy, Reduce)):
            seconds = durations.copy(op)
        elif isinstance(op, Get):
            distance = level(self.machine, self.topology, self.schedule.rank, op.peer)
            seconds = durations.message(distance, durations.nbytes(op.target))
        return f"calc {round(seconds * 1e9)}"
