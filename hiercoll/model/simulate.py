"""A simulated run of all ranks' schedules, event by event, with the cost model's parameters.

A message starts when both sides have come to it, or, below ``eager`` bytes, when its
sender has. It pays its link's latency; bytes between nodes queue at the link out of the
sender's node and at the link into the receiver's, bytes within a node at the two ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hiercoll.memory import BlockLayout
from hiercoll.model.cost import DEFAULT_LINKS, Link, Links
from hiercoll.schedule import (
    MESSAGES,
    OUTGOING,
    SIZE_BUFFERS,
    Copy,
    Get,
    Incoming,
    Join,
    Outgoing,
    Recv,
    Reduce,
    Region,
    Schedule,
    Send,
    Signal,
    Wait,
)
from hiercoll.topology import Topology


class Event(NamedTuple):
    """An operation of a rank, and the seconds between which it ran."""

    rank: int
    op: int
    begin: float
    end: float


@dataclass(frozen=True)
class Settings:
    """Of a simulation: link parameters, and the size up to which sends do not wait (bytes)."""

    links: Links = DEFAULT_LINKS
    eager: int = 8192


UNIT = Settings(Links(Link(1.0, 0.0), Link(1.0, 0.0), overhead=0.0, gap=0.0, operation=0.0), eager=-1)


def count_rounds(schedules: Sequence[Schedule], topology: Topology) -> int:
    """Length of the longest chain of messages, each of which waits for the one before."""
    return round(max((event.end for event in simulate(schedules, topology, 1, UNIT)), default=0.0))


def simulate(
    schedules: Sequence[Schedule], topology: Topology, block: int, settings: Settings = Settings()
) -> list[Event]:
    """The events of one start with blocks of ``block`` bytes, in order of their end.

    The schedules must be free of deadlock (see `verify`): what cannot run is left out.
    """
    return _Simulation(schedules, topology, block, settings).run()


Message: TypeAlias = "tuple[int, int, int]"  # source, destination, tag
Posted: TypeAlias = "tuple[int, float, float]"  # operation, when it was begun, when its rank was done with it


class _Simulation:
    def __init__(self, schedules: Sequence[Schedule], topology: Topology, block: int, settings: Settings) -> None:
        self.schedules, self.topology, self.settings = schedules, topology, settings
        self.layout = BlockLayout(block, 1, schedules[0].segments)
        self.waiting = [[len(op.deps) for op in schedule.ops] for schedule in schedules]
        self.dependents: list[list[list[int]]] = [[[] for _ in schedule.ops] for schedule in schedules]
        self.busy: dict[tuple[str, int], float] = {}  # link or rank -> when it is free again
        self.sending: dict[Message, Posted] = {}  # large messages that wait for their receive
        self.receiving: dict[Message, Posted] = {}
        self.arrived: dict[Message, float] = {}  # small messages that wait for their receive
        self.flags: dict[tuple[int, int], float] = {}
        self.watchers: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
        self.missing: dict[tuple[int, int], int] = {}
        self.queue: list[tuple[float, int, int, float]] = []  # (end, rank, op, begin)
        self.events: list[Event] = []

    def run(self) -> list[Event]:
        for rank, schedule in enumerate(self.schedules):
            for index, op in enumerate(schedule.ops):
                for dep in op.deps:
                    self.dependents[rank][dep].append(index)
        for rank, schedule in enumerate(self.schedules):
            for index, op in enumerate(schedule.ops):
                if not op.deps:
                    self.begin(rank, index, 0.0)
        while self.queue:
            end, rank, index, begin = heapq.heappop(self.queue)
            self.events.append(Event(rank, index, begin, end))
            op = self.schedules[rank].ops[index]
            if isinstance(op, Signal):
                self.flags[rank, op.flag] = end
                for watcher, waiter, since in self.watchers.pop((rank, op.flag), []):
                    self.missing[watcher, waiter] -= 1
                    if not self.missing[watcher, waiter]:
                        self.finish(watcher, waiter, since, end + self.settings.links.operation)
            for dependent in self.dependents[rank][index]:
                self.waiting[rank][dependent] -= 1
                if not self.waiting[rank][dependent]:
                    self.begin(rank, dependent, end)
        return self.events

    def finish(self, rank: int, index: int, begin: float, end: float) -> None:
        heapq.heappush(self.queue, (end, rank, index, begin))

    def begin(self, rank: int, index: int, now: float) -> None:
        """All that the operation waited for has completed."""
        op, links = self.schedules[rank].ops[index], self.settings.links
        if isinstance(op, MESSAGES):
            self.post(rank, index, op, now)
        elif isinstance(op, Wait) and not op.previous:
            pending = [(peer, op.flag) for peer in op.peers if (peer, op.flag) not in self.flags]
            self.missing[rank, index] = len(pending)
            for flag in pending:
                self.watchers.setdefault(flag, []).append((rank, index, now))
            if not pending:
                self.finish(rank, index, now, now + links.operation)
        elif isinstance(op, Join):
            self.finish(rank, index, now, now)
        elif isinstance(op, Get):
            self.finish(rank, index, now, now + links.node.alpha + self.bytes(op.target) * links.node.beta)
        else:
            moved = self.bytes(op.target) if isinstance(op, (Copy, Reduce)) else 0
            self.finish(rank, index, now, now + links.operation + moved * links.gap)

    def post(self, rank: int, index: int, op: Outgoing | Incoming, begin: float) -> None:
        """One side of a message has come to it."""
        now = self.occupy(("cpu", rank), begin, self.settings.links.overhead)
        is_send, size = isinstance(op, OUTGOING), self.bytes(op.region) if isinstance(op, (Send, Recv)) else 0
        source, target = (rank, op.peer) if is_send else (op.peer, rank)
        key = (source, target, op.tag)
        if is_send and size <= self.settings.eager:
            left, arrived = self.transfer(source, target, size, now)
            self.finish(rank, index, begin, left)
            if key in self.receiving:
                self.receive(target, self.receiving.pop(key), arrived)
            else:
                self.arrived[key] = arrived
        elif not is_send and key in self.arrived:
            self.receive(rank, (index, begin, now), self.arrived.pop(key))
        elif is_send and key in self.receiving:
            self.rendezvous(source, (index, begin, now), target, self.receiving.pop(key), size)
        elif not is_send and key in self.sending:
            self.rendezvous(source, self.sending.pop(key), target, (index, begin, now), size)
        else:
            (self.sending if is_send else self.receiving)[key] = (index, begin, now)

    def receive(self, rank: int, posted: Posted, arrived: float) -> None:
        index, begin, ready = posted
        self.finish(rank, index, begin, max(ready, arrived))

    def rendezvous(self, source: int, send: Posted, target: int, recv: Posted, size: int) -> None:
        """Both sides of a large message are there."""
        _, arrived = self.transfer(source, target, size, max(send[2], recv[2]))
        self.finish(source, send[0], send[1], arrived)
        self.receive(target, recv, arrived)

    def transfer(self, source: int, target: int, size: int, begin: float) -> tuple[float, float]:
        """When the last byte has left, and when it has arrived."""
        a, b = self.topology.node_of[source], self.topology.node_of[target]
        link = self.settings.links.node if a == b else self.settings.links.network
        ends = (("rank out", source), ("rank in", target)) if a == b else (("out", a), ("in", b))
        left = self.occupy(ends[0], begin, size * link.beta)
        entered = self.occupy(ends[1], left - size * link.beta, size * link.beta)
        return left, max(left, entered) + link.alpha

    def occupy(self, what: tuple[str, int], now: float, seconds: float) -> float:
        """Use a serial resource for some time from ``now`` on, or as soon as it is free."""
        self.busy[what] = max(now, self.busy.get(what, 0.0)) + seconds
        return self.busy[what]

    def bytes(self, region: Region) -> int:
        if region.buffer in SIZE_BUFFERS:
            return region.size * self.schedules[0].row_bytes(self.topology.size)
        return region.size * self.layout.extent(region.part)[1] * (1 + self.schedules[0].is_wide(region))
