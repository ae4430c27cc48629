"""A simulated run in which messages are flows that share ranks and adapters: contention as it comes about.

A message begins when its sender may (up to ``eager`` bytes), or when both ends may (above: ``rendezvous``). A rank
begins its messages in order, out and in apart, each ``posted`` times its step after the one before: LogP's gap (Culler
et al. 1993). A step after its begin a message flows, at a rate that is max-min fair in bytes per second
(`hiercoll.model.fairness`):

- all that flow out of a rank share its time, each at the time per byte of its level; so do all that flow into it;
- those between nodes share the adapters of both nodes, out and in apart: each takes ``adapter`` per byte, and
  ``adapter_message`` at least, so that no more messages a second leave a node, or enter one.

Gaps and bytes of a rank's messages go on side by side, where the closed form adds them up: between the two, runs of
many messages at once differ by up to a factor of 2.

Both ends of a message are complete when its last byte is there, a receive not before it was begun. A `Get` is a message
that its rank alone begins and pays for. Copies, reductions and flags take their rank's time one after the other, a wait
from when the last of its flags is up; messages go on beside them. Memory is in cache, and the network between adapters
is never full. ``congestion``, ``socket_link`` and the parameters of roots (``root_..``), by which
`hiercoll.model.evaluate` stands in for contention, are not used.

All that happens at one instant is worked off together, in NumPy arrays.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hiercoll.errors import ArgumentError, ScheduleError
from hiercoll.model.fairness import Floats, Ints, fair_rates
from hiercoll.model.flat import IS_WORK, Messages, Operations, are, flatten
from hiercoll.model.machine import Machine
from hiercoll.schedule import INCOMING, OUTGOING, Get, Schedule
from hiercoll.topology import Topology

INSTANT = 1e-9  # of the time: what lies no farther apart is simultaneous
NONE = np.zeros(0, np.int64)
BEGINS, POSTS, WORKS = 1, 2, 4  # of an operation that may run: its message may begin, is received; its rank works
DOES = BEGINS * are(*OUTGOING, Get) + POSTS * are(*INCOMING, Get) + WORKS * IS_WORK


def flow_seconds(
    schedules: Iterable[Schedule], topology: Topology, block: int, machine: Machine, *, grain: float = 0.0
) -> float:
    """Seconds until the last rank is done; 0 where nobody does anything. Arguments, and errors, are `end_seconds`'s."""
    return max(end_seconds(schedules, topology, block, machine, grain=grain), default=0.0)


def end_seconds(
    schedules: Iterable[Schedule], topology: Topology, block: int, machine: Machine, *, grain: float = 0.0
) -> list[float]:
    """Seconds until each rank is done with one start.

    ``schedules``: of all ranks, in order; ``block``: bytes of one of their blocks; ``grain``: seconds within which
    events count as simultaneous. Above 0 it makes runs faster whose ranks are out of step, such as those on scattered
    layouts; each event may then be early by so much.

    Raises ScheduleError where a message has one end, a flag is never raised, or operations wait for each other;
    ArgumentError for a block of less than 0 bytes, a grain below 0, or another number of schedules than of ranks.
    """
    if not grain >= 0:  # nor a NaN
        raise ArgumentError("grain", "at least 0 s", grain)
    run = _run(schedules, topology, block, machine, grain)
    ends = np.zeros(topology.size)
    np.maximum.at(ends, run.operations.rank, run.ended)
    found: list[float] = ends.tolist()
    return found


def ready_seconds(schedules: Iterable[Schedule], topology: Topology, block: int, machine: Machine) -> list[Floats]:
    """When each operation of each rank may begin: all that it waits for is complete. Arguments, and errors, are
    `end_seconds`'s."""
    run = _run(schedules, topology, block, machine, 0.0)
    operations = run.operations
    ready = np.zeros(len(operations.rank))
    np.maximum.at(ready, operations.after, np.repeat(run.ended, np.diff(operations.starts)))
    return np.split(ready, np.searchsorted(operations.rank, np.arange(1, topology.size)))


def _run(schedules: Iterable[Schedule], topology: Topology, block: int, machine: Machine, grain: float) -> _Run:
    """A run that has come to its end."""
    operations, messages = flatten(schedules, topology, block, machine)
    run = _Run(operations, _Network(messages, topology, machine), machine, topology.size, grain)
    with np.errstate(divide="ignore"):
        run.run()
    return run


class _Timers:
    """Things that are due at some time, in sorted runs."""

    def __init__(self) -> None:
        self._runs: list[tuple[float, int, int, Floats, Ints]] = []  # next time, run, index, times, things
        self._count = 0

    @property
    def next(self) -> float:
        """When the first is due."""
        return self._runs[0][0] if self._runs else np.inf

    def add(self, times: Floats, things: Ints) -> None:
        if len(things):
            order = np.argsort(times, kind="stable")
            times, things = times[order], things[order]
            self._push(0, times, things)

    def _push(self, at: int, times: Floats, things: Ints) -> None:
        self._count += 1
        heapq.heappush(self._runs, (float(times[at]), self._count, at, times, things))

    def pop(self, until: float) -> Ints:
        """What is due, in ascending order."""
        due: list[Ints] = []
        while self._runs and self._runs[0][0] <= until:
            _, _, at, times, things = heapq.heappop(self._runs)
            end = int(np.searchsorted(times, until, "right"))
            due.append(things[at:end])
            if end < len(times):
                self._push(end, times, things)
        return np.sort(np.concatenate(due)) if due else NONE


class _Network:
    """What each message pays: its ``step`` (seconds), its ``size`` (bytes that count where it shares a link; none flow
    where it is 0), its ``links``, with the seconds per byte that it takes of each.

    The links: ranks, out and in; adapters, out and in; at the end, one that is none.
    """

    def __init__(self, messages: Messages, topology: Topology, machine: Machine) -> None:
        p, self.messages, self._topology = machine.parameters, messages, topology
        level, nbytes = levels(messages.source, messages.target, topology, machine), messages.nbytes
        is_far, is_get = level == 3, messages.sends < 0
        is_large = nbytes > np.where(is_far, p.network_eager, p.eager)
        self.is_rendezvous = is_large & ~is_get
        self.step = np.array([p.domain, p.socket, p.node, p.network])[level]
        self.step += is_large * np.where(is_far, p.network_rendezvous, p.rendezvous)
        self.gap = p.posted * self.step
        self.beginner = np.where(is_get, messages.target, messages.source)
        byte = np.array([p.domain_byte, p.node_byte, p.node_byte, p.network_byte])[level]
        byte += is_far * ~is_large * p.network_small_byte
        at_rank = nbytes * byte  # seconds
        at_adapter = np.where(is_far, np.maximum(nbytes * p.adapter, p.adapter_message), 0.0)
        seconds = np.stack([np.where(is_get, 0.0, at_rank), at_rank, at_adapter, at_adapter], 1)
        size = np.maximum(nbytes, at_adapter / p.adapter if p.adapter else 0.0)
        size = np.where(seconds.any(1), np.maximum(size, 1.0), 0.0)
        self.size, self.weights = size, seconds / np.maximum(size, 1.0)[:, None]
        self.links, self.count = self._links(seconds > 0)

    def _links(self, uses: npt.NDArray[np.bool_]) -> tuple[Ints, int]:
        """Those of each message, and how many there are; messages that do not use one have the last instead."""
        source, target, ranks = self.messages.source, self.messages.target, self._topology.size
        node, nodes = np.array(self._topology.node_of), len(self._topology.nodes)
        none = 2 * (ranks + nodes)
        ends = [source, ranks + target, 2 * ranks + node[source], 2 * ranks + nodes + node[target]]
        return np.where(uses, np.stack(ends, 1), none), none + 1

    def rates(self, flows: Ints) -> Floats:
        """Bytes per second of these messages."""
        return fair_rates(self.links[flows], self.weights[flows], self.count)


def levels(source: Ints, target: Ints, topology: Topology, machine: Machine) -> Ints:
    """`hiercoll.model.machine.level` of many pairs of ranks."""
    node, lane = np.array(topology.node_of), np.array(topology.lane_of)
    socket = np.full(topology.size, machine.socket) if machine.socket else np.array(topology.node_sizes)[node]
    domain = np.full(topology.size, machine.domain) if machine.domain else socket
    near = [(lane // part)[source] == (lane // part)[target] for part in (domain, socket)]
    found: Ints = np.select([node[source] != node[target], *near], [3, 0, 1], 2)
    return found


class _Run:
    """``waiting``: by operation, what it waits for; ``missing``: by message, ends that have to come to it yet."""

    def __init__(self, operations: Operations, network: _Network, machine: Machine, ranks: int, grain: float) -> None:
        self.operations, self.messages, self.network = operations, network.messages, network
        self.ops, self.grain, self.now = len(operations.rank), grain, 0.0
        self.does, self.message = _uses(operations, network)
        self.waiting, self.missing = operations.waiting.copy(), 1 + network.is_rendezvous
        self.ended = np.full(self.ops, np.nan)
        self.posted, self.arrived = np.zeros((2, len(network.size)), bool)
        self.working, self.sending, self.receiving = np.zeros((3, ranks))  # until when: on copies and flags, on begins
        # Operations that are complete; from ops on, messages that come to their receiver; then, that begin to flow.
        self.timers = _Timers()
        self.flows, self.left, self.rates = NONE, np.zeros(0), np.zeros(0)

    def run(self) -> None:
        """To the end. Raises ScheduleError if there is none."""
        self.work_off(self.enter(np.flatnonzero(self.waiting == 0)), NONE)
        while self.advance():
            pass
        if len(stuck := np.flatnonzero(np.isnan(self.ended))):
            raise ScheduleError(f"{self.operations.name(int(stuck[0]))} never comes to its end")

    def advance(self) -> bool:
        """On to the next instant at which something happens, if there is one."""
        needed = self.left / self.rates
        then = min(self.now + float(needed.min(initial=np.inf)), self.timers.next)
        if then == np.inf:
            return False
        until = then + max(then * INSTANT, self.grain)
        self.left = self.left - self.rates * (then - self.now)
        done = needed <= until - self.now
        self.now = then
        arrived = self.flows[done]
        if len(arrived):
            self.flows, self.left = self.flows[~done], self.left[~done]
        due = self.timers.pop(until)
        last = self.ops + len(self.arrived)
        complete, reaching, flowing = np.split(due, np.searchsorted(due, (self.ops, last)))
        self.reach(reaching - self.ops)
        started = self.work_off(np.concatenate([complete, self.arrive(arrived)]), flowing - last)
        if len(arrived) or started:
            self.rates = self.network.rates(self.flows)
        return True

    def work_off(self, complete: Ints, flowing: Ints) -> bool:
        """Operations that are complete, messages whose bytes begin to flow, and all that comes of it at this instant.
        Whether there are more flows."""
        size = self.network.size[flowing]
        flows = flowing[size > 0]
        if len(flows):
            self.flows, self.left = np.concatenate([self.flows, flows]), np.concatenate([self.left, size[size > 0]])
        complete = np.concatenate([complete, self.arrive(flowing[size == 0])])
        while len(complete):
            self.ended[complete] = self.now
            complete = self.enter(self.released(complete))
        return len(flows) > 0

    def released(self, complete: Ints) -> Ints:
        """Operations that waited for the last of these."""
        followers = np.sort(self.operations.followers(complete))
        last = np.flatnonzero(np.diff(followers, append=-1))
        found = followers[last]
        self.waiting[found] -= np.diff(last, prepend=-1)
        ready: Ints = found[self.waiting[found] == 0]
        return ready

    def arrive(self, messages: Ints) -> Ints:
        """The operations that are complete with messages whose last byte is there."""
        if not len(messages):
            return NONE
        self.arrived[messages] = True
        sends = self.messages.sends[messages]
        return np.concatenate([sends[sends >= 0], self.messages.receives[messages[self.posted[messages]]]])

    def enter(self, ops: Ints) -> Ints:
        """Operations that may run now, in ascending order. Returns those that are complete at once."""
        does = self.does[ops]
        works = ops[does & WORKS > 0]
        if len(works):
            seconds = self.operations.seconds[works]
            self.timers.add(self.in_turn(self.working, self.operations.rank[works], seconds) + seconds, works)
        posts = self.message[ops[does & POSTS > 0]]
        self.posted[posts] = True
        self.begin(self.message[ops[does & BEGINS > 0]])
        return np.concatenate([ops[does == 0], self.messages.receives[posts[self.arrived[posts]]]])

    def begin(self, messages: Ints) -> None:
        """One end has come to these messages, or, where a message is named twice, both."""
        if not len(messages):
            return
        np.subtract.at(self.missing, messages, 1)
        messages = np.unique(messages[self.missing[messages] == 0])
        starts = self.in_turn(self.sending, self.network.beginner[messages], self.network.gap[messages])
        is_now = starts <= self.now
        self.timers.add(starts[~is_now], messages[~is_now] + self.ops)
        self.reach(messages[is_now])

    def reach(self, messages: Ints) -> None:
        """Their senders have begun these messages: they are their receivers' to begin."""
        if len(messages):
            starts = self.in_turn(self.receiving, self.messages.target[messages], self.network.gap[messages])
            self.timers.add(starts + self.network.step[messages], messages + self.ops + len(self.arrived))

    def in_turn(self, free: Floats, ranks: Ints, seconds: Floats) -> Floats:
        """When each begins what takes so long of its rank's time, in the order given. ``free``: from when on each rank
        has time."""
        order = np.argsort(ranks, kind="stable")
        sorted_ranks, lasting = ranks[order], seconds[order]
        before = np.cumsum(lasting) - lasting
        is_first = np.diff(sorted_ranks, prepend=-1) > 0
        others = before[is_first][np.cumsum(is_first) - 1]  # of ranks before this one
        starts = np.empty(len(ranks))
        starts[order] = np.maximum(self.now, free[sorted_ranks]) + before - others
        free[ranks] = starts + seconds  # the last of each rank stays
        return starts


def _uses(operations: Operations, network: _Network) -> tuple[Ints, Ints]:
    """What each operation does, and the message that it does it with, or -1."""
    messages, does = network.messages, DOES[operations.code]
    does[messages.receives[network.is_rendezvous]] |= BEGINS
    message = np.full(len(does), -1)
    for ends in (messages.sends, messages.receives):
        message[ends[ends >= 0]] = np.flatnonzero(ends >= 0)
    return does, message
