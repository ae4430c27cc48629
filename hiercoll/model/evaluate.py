"""The fast evaluator: seconds of many profiles and sizes at once, in closed form.

For each phase of a node, with messages of m bytes:

    step(level, m) = latency + m * (byte + miss * memory) + rendezvous * switch(m, eager)
                     between nodes latency + m * (byte + small_byte * (1 - switch)) + rendezvous * switch
    chain          = the largest over the ranks of the sum of their steps
                     at the root of many: one step, then per message and per byte (root_..)
    wire           = bytes out of the node (into it, if more) * adapter
                     + messages out of it * adapter_message
                     * (1 + congestion * (1 - 1 / nodes that it speaks with))
    bus            = bytes through the node's memory * miss * bus + bytes between sockets * socket_link
    miss           = switch(bytes that the node's ranks touch, their caches)

A time is the sum of chain, wire and bus, of copies, flags, and the first touch of fresh memory. Latency, overhead and
bandwidth add up as in Hockney's model and LogGP (Alexandrov et al. 1995); wire and bus are the max-rate model's shared
limits (Gropp, Olson, Samfass 2016; ``miss`` adds nothing there to a rank's own time: adapters read memory at the
link's rate), added instead of the maximum taken, which explains published timings better
(docs/scale.md). Messages under way beside others cost a share (``posted``) of their latency.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hiercoll.model.machine import Machine
from hiercoll.model.profile import Phase, Profile

Floats = npt.NDArray[np.float64]
BOUNDS = ("latency", "bandwidth of a rank", "adapter", "memory", "copies")


class Predicted(NamedTuple):
    """Seconds by row, and of them what each of ``BOUNDS`` takes (rows x bounds)."""

    seconds: Floats
    parts: Floats

    def bound(self, row: int) -> str:
        """What takes most of a row's time."""
        return BOUNDS[int(self.parts[row].argmax())]


class Design:
    """Profiles at sizes (bytes of a block, or of a vector), as arrays: evaluated again and again as parameters change.
    ``rows``: a node's profile and a size."""

    def __init__(self, rows: Iterable[tuple[Profile, float]], machine: Machine) -> None:
        entries: list[tuple[float, ...]] = []  # unit, level, bytes, number
        units: list[tuple[float, ...]] = []  # class, phase, kind, share of messages that wait for each other
        phases: list[tuple[float, ...]] = []  # row, and Totals
        classes: list[int] = []  # row
        copies: list[tuple[float, ...]] = []  # class, pieces, bytes, ranks, whether they reduce
        flags: list[int] = []
        fresh: list[float] = []
        for row, (profile, size) in enumerate(rows):
            block = size / profile.pieces
            first = len(phases)
            phases += [
                (
                    row,
                    max(t.out, t.into) * block,
                    t.peers,
                    *[each * block for each in (t.near, t.across, t.working)],
                    t.active,
                    t.sockets,
                    t.messages,
                )
                for t in profile.totals
            ]
            fresh.append(profile.fresh * block)
            for each, ranks in profile.classes:
                copies += [(len(classes), c.pieces, c.blocks * block, ranks, c.reduced) for c in each.copies]
                for index, phase in enumerate(each.phases):
                    kind, sizes, waiting = _use(phase)
                    entries += [(len(units), far, blocks * block, n) for (far, blocks), n in sizes]
                    units.append((len(classes), first + index, kind, waiting))
                flags.append(each.flags)
                classes.append(row)
        self.rows, self._domain = len(fresh), machine
        self._entries, self._units = _columns(entries, 4), _columns(units, 4)
        self._phases, self._copies = _columns(phases, 9), _columns(copies, 5)
        self._classes, self._flags, self._fresh = np.array(classes, int), np.array(flags, float), np.array(fresh)

    def evaluate(self, machine: Machine) -> Predicted:
        """With this machine's parameters."""
        p = machine.parameters
        row, out, peers, near, across, working, active, sockets, messages = self._phases
        miss = switch(working, p.cache_socket * sockets + p.cache_rank * active, 3)
        latency, transfer = self._chains(machine, miss)
        pieces, nbytes, ranks, reduced = self._copies[1:]
        of = self._copies[0].astype(int)
        used = np.ceil(ranks / machine.socket) if machine.socket else 1
        beyond = switch((2 + reduced) * nbytes * ranks, p.cache_socket * used + p.cache_rank * ranks, 3)
        length = nbytes / np.maximum(pieces, 1)
        byte = np.where(reduced > 0, p.reduce_byte, p.copy_byte) + beyond * p.memory
        copied = pieces * (p.piece + p.line * np.minimum(length / 64, 1)) + nbytes * byte
        copied += nbytes * ranks * beyond * p.bus
        own = _sum(of, copied, len(self._classes))
        latency = latency + self._flags * p.flag
        slowest = np.full(self.rows, -1)
        whole = latency + transfer + own
        for index in np.argsort(whole, kind="stable"):
            slowest[self._classes[index]] = index
        at = row.astype(int)
        crowded = 1 + p.congestion * (1 - 1 / np.maximum(peers, 1))
        wire = _sum(at, out * p.adapter * crowded + messages * p.adapter_message, self.rows)
        bus = _sum(at, (near + out) * miss * p.bus + across * p.socket_link, self.rows)
        memory = bus + self._fresh * p.fresh
        parts = np.stack([latency[slowest], transfer[slowest], wire, memory, own[slowest]], 1)
        return Predicted(parts.sum(1), parts)

    def _chains(self, machine: Machine, miss: Floats) -> tuple[Floats, Floats]:
        """Latency, and the time of bytes, of each class of ranks."""
        p = machine.parameters
        unit, far, m, n = self._entries
        unit, far = unit.astype(int), far.astype(int)
        of, phase, kind, waiting = self._units
        near = far < 3
        lost = np.where(near, miss[phase.astype(int)][unit] * p.memory, 0)
        large = switch(m, p.network_eager)
        rendezvous = np.where(near, p.rendezvous * switch(m, p.eager), p.network_rendezvous * large)
        start = np.array([p.domain, p.socket, p.node, p.network])[far] + rendezvous
        byte = np.array([p.domain_byte, p.node_byte, p.node_byte, p.network_byte])[far] + lost
        byte += np.where(near, 0, (1 - large) * p.network_small_byte)
        # An exchange: each message, those that others are under way beside cheaper.
        each = waiting[unit] + (1 - waiting[unit]) * p.posted
        count = len(self._units[0])
        latency = _sum(unit, n * each * start, count)
        transfer = _sum(unit, n * m * byte, count)
        # At a root: one whole message, and what each other one adds.
        number = _sum(unit, n, count)
        longest, whole = np.zeros(count), np.zeros(count)
        np.maximum.at(longest, unit, start)
        np.maximum.at(whole, unit, m * byte)
        into = p.root_in + lost
        outward = np.where(far == 0, p.root_out_domain, np.where(far == 3, p.network_byte, p.root_out))
        cheap = 1 - switch(m, p.root_large) * (1 - p.root_factor)
        added = n * m * cheap * np.where(kind[unit] == 1, into, outward)
        share = (number - 1) / np.maximum(number, 1)
        rooted = kind > 0
        latency = np.where(rooted, longest + (number - 1) * p.root_message, latency)
        transfer = np.where(rooted, whole + share * _sum(unit, added, count), transfer)
        classes, index = len(self._classes), of.astype(int)
        return _sum(index, latency, classes), _sum(index, transfer, classes)


def _use(phase: Phase) -> tuple[int, Sequence[tuple[tuple[int, float], int]], float]:
    """Of a phase: 0 for an exchange, 1 for a root that receives, 2 for one that sends; its messages, the larger way;
    and the share of them that wait for each other."""
    sent, received = sum(phase.sent.values()), sum(phase.received.values())
    sizes = phase.sent if sent >= received else phase.received
    number = max(sent, received)
    kind = 0 if number <= 1 or (sent and received) else 1 if received else 2
    return kind, sorted(sizes.items()), min(1.0, phase.chain / number) if number else 1.0


def _sum(index: npt.NDArray[np.int64], values: Floats, count: int) -> Floats:
    """Sums of the values with each index."""
    sums: Floats = np.bincount(index, values, count).astype(np.float64)
    return sums


def _columns(rows: list[tuple[float, ...]], width: int) -> Floats:
    columns: Floats = np.array(rows, float).reshape(-1, width).T
    return columns


def switch(x: Floats, at: Floats | float, sharpness: float = 4) -> Floats:
    """From 0 for x well below ``at`` to 1 well above it."""
    ratio = np.power(np.maximum(at, 1e-9) / np.maximum(x, 1e-9), sharpness)
    share: Floats = np.reciprocal(1 + ratio)
    return share
