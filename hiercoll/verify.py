"""Proof that schedules fulfil a contract, or a counter-example in words.

The rules, for all ranks' schedules together:

1. every (source, destination, tag) is unique, and every send has exactly one receive
   of the same size;
2. there is no deadlock when a send completes only together with its receive;
3. there is no data race when messages are buffered without limit: two operations that
   touch the same block, one of them writing, are ordered by dependencies. In ``shared``
   buffers, and in those that ranks of the node get from, the path may run through flags
   and messages between the ranks of the node, and two consecutive starts are looked at,
   since nothing separates them. What others get from a rank they get during its start;
4. nothing is read that was not written before;
5. the receive buffer ends with exactly the tokens of the contract;
6. every operation's result is needed by somebody;
7. what a schedule says that a block of ``shared`` holds is what is written there.

Where sizes are exchanged, an operation on blocks of ``shared`` reads, besides, the rows of
``sizes`` that give their lengths: rules 3, 4 and 6 hold for those as for blocks.

Why one start of private buffers is enough: an operation of the next start begins after
all of this rank's have completed, messages of one (source, destination, tag) match in
order, and by rule 4 nothing left over from the start before is ever read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hiercoll.collectives import UNDEFINED, Contract
from hiercoll.errors import ArgumentError, VerificationError
from hiercoll.schedule import (
    INCOMING,
    MESSAGES,
    OF_NODE,
    OUTGOING,
    SIZE_BUFFERS,
    AcceptOffer,
    AwaitNotice,
    Copy,
    Get,
    Join,
    Notify,
    Offer,
    Op,
    Recv,
    Reduce,
    Region,
    Schedule,
    Send,
    Signal,
    Wait,
    are_two_ends,
    reads,
    size_rows,
    sizes_read,
    writes,
)
from hiercoll.system import System
from hiercoll.topology import Topology


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, and what would happen."""

    kind: str
    message: str
    rank: int | None = None
    op: int | None = None
    region: Region | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}" + ("" if self.op is None else f", op {self.op}")
        region = "" if self.region is None else f", {self.region}"
        return f"[{self.kind}] {where}{region}: {self.message}"


@dataclass(frozen=True)
class Proof:
    """What `verify` found; ``ok`` if nothing."""

    contract: Contract
    operations: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the schedules are proved."""
        return not self.findings

    def require(self) -> Proof:
        """This proof; raises VerificationError if it failed."""
        if self.findings:
            raise VerificationError(self.findings)
        return self


def verify(
    schedules: System | Sequence[Schedule], contract: Contract | None = None, topology: Topology | None = None
) -> Proof:
    """Prove that a system, or ``schedules`` (one per rank, in order), fulfil ``contract``.

    A system has a contract and a topology of its own; schedules need a contract, and
    ``topology`` says which ranks share memory (default: none do). Findings stop at the
    first rule that is broken, with at most a few findings of it. Raises ArgumentError for
    schedules without a contract.
    """
    if isinstance(schedules, System):
        contract, topology = contract or schedules.contract, topology or schedules.topology
        schedules = schedules.schedules()
    if contract is None:
        raise ArgumentError("contract", "what the schedules are to fulfil", None)
    topology = topology or Topology(tuple(range(contract.size)))
    findings: list[Finding] = []
    system = _System(schedules, contract, topology)
    checks = (system.malformed, system.unmatched, system.deadlocks, system.races, system.shared_races, system.contents)
    for check in checks:
        for finding in check():
            findings.append(finding)
            if len(findings) >= 5:
                break
        if findings:
            break
    return Proof(contract, len(system.ops), tuple(findings))


@dataclass
class _Memory:
    """Contents of one buffer during replay: token and last writer of each segment."""

    tokens: list[int]
    writers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.writers = [-1] * len(self.tokens)


class _System:
    """All ranks' operations, numbered through."""

    def __init__(self, schedules: Sequence[Schedule], contract: Contract, topology: Topology) -> None:
        self.schedules, self.contract, self.topology = schedules, contract, topology
        self.segments = contract.segments
        self.ops: list[Op] = [op for schedule in schedules for op in schedule.ops]
        self.rank_of = [rank for rank, schedule in enumerate(schedules) for _ in schedule.ops]
        self.base = [0]
        for schedule in schedules:
            self.base.append(self.base[-1] + len(schedule.ops))
        self.send_of: dict[int, int] = {}  # receive -> its send
        self.signals: dict[tuple[int, int], int] = {}  # (rank, flag) -> signal
        self.order: list[int] = []

    def units(self, region: Region) -> Sequence[int]:
        """The segments that ``region`` covers, in order."""
        k = self.segments
        if k == 1:
            return region.blocks
        parts = range(k) if region.part is None else (region.part,)
        return [block * k + part for block in region.blocks for part in parts]

    def finding(self, kind: str, gid: int, message: str, region: Region | None = None) -> Finding:
        rank = self.rank_of[gid]
        return Finding(kind, message, rank, gid - self.base[rank], region)

    def name(self, gid: int) -> str:
        """An operation in words."""
        rank, op = self.rank_of[gid], self.ops[gid]
        return f"{describe(op)} (rank {rank}, op {gid - self.base[rank]})"

    # Rule 0: the schedules are schedules.

    def malformed(self) -> Iterator[Finding]:
        if len(self.schedules) != self.contract.size:
            yield Finding("malformed", f"{len(self.schedules)} schedules for {self.contract.size} ranks")
            return
        if self.topology.size != self.contract.size:
            yield Finding("malformed", f"a topology of {self.topology.size} ranks for {self.contract.size} ranks")
            return
        shared = {
            node: {(self.schedules[r].shared, self.schedules[r].holds, self.schedules[r].sizes) for r in ranks}
            for node, ranks in enumerate(self.topology.nodes)
        }
        for rank, schedule in enumerate(self.schedules):
            if schedule.rank != rank or schedule.segments != self.segments:
                yield Finding("malformed", f"is of rank {schedule.rank} with {schedule.segments} segments", rank)
                return
            if len(shared[self.topology.node_of[rank]]) > 1:
                yield Finding("malformed", "the ranks of its node ask for different shared buffers", rank)
                return
            if schedule.holds and len(schedule.holds) != schedule.shared:
                text = f"says what {len(schedule.holds)} of {schedule.shared} shared blocks hold"
                yield Finding("malformed", text, rank)
                return
            if schedule.sizes and (text := self._wrong_sizes(schedule)):
                yield Finding("malformed", text, rank)
                return
            for index, op in enumerate(schedule.ops):
                problem = self._problem(rank, index, op)
                if problem:
                    yield self.finding("malformed", self.base[rank] + index, problem)
                if isinstance(op, Signal):
                    if (rank, op.flag) in self.signals:
                        yield self.finding("malformed", self.base[rank] + index, f"flag {op.flag} is raised twice")
                    self.signals[rank, op.flag] = self.base[rank] + index

    def _wrong_sizes(self, schedule: Schedule) -> str:
        """What is wrong with the rows of sizes that a schedule asks for; nothing is ""."""
        ranks = self.topology.node(schedule.rank)
        if schedule.sizes != len(ranks):
            return f"exchanges the sizes of {schedule.sizes} lanes on a node of {len(ranks)}"
        if len(schedule.holds) != schedule.shared:
            return "exchanges sizes and does not say what its shared blocks hold"
        for source, target in schedule.holds:
            ends = {source, target}
            if not (0 <= min(ends) <= max(ends) < self.contract.size and ends.intersection(ranks)):
                return f"shares block {target} of rank {source}, which is of no rank of its node"
        return ""

    @cached_property
    def _size_rows(self) -> list[tuple[int, ...]]:
        """For each rank, `size_rows`."""
        return [size_rows(schedule, self.topology) for schedule in self.schedules]

    @cached_property
    def _limits(self) -> list[dict[Any, int]]:
        """Sizes of every rank's buffers, in blocks."""
        return [
            {
                **self.contract.sizes(rank),
                **{"scratch": own.scratch, "shared": own.shared, "host": own.host},
                **dict.fromkeys(SIZE_BUFFERS, own.sizes),
            }
            for rank, own in enumerate(self.schedules)
        ]

    def _problem(self, rank: int, index: int, op: Op) -> str | None:
        if op.deps and not 0 <= min(op.deps) <= max(op.deps) < index:
            return "waits for an operation that does not come before it"
        if isinstance(op, MESSAGES) and (op.peer == rank or not 0 <= op.peer < self.contract.size):
            return f"has rank {op.peer} as its peer"
        if isinstance(op, Signal) and not 0 <= op.flag < self.schedules[rank].flags:
            return f"raises flag {op.flag} of {self.schedules[rank].flags}"
        if isinstance(op, Wait) and not set(op.peers) <= set(self.topology.node(rank)):
            return "waits for the flag of a rank on another node"
        if isinstance(op, Get) and (op.peer == rank or op.peer not in self.topology.node(rank)):
            return f"gets from rank {op.peer}, which is no other rank of its node"
        if isinstance(op, Get) and op.source.buffer in ("host", *OF_NODE, *SIZE_BUFFERS):
            return f"gets from {op.source.buffer}, which is not for others to map"
        for owner, region, _ in self._touched(rank, op):
            blocks, limits = region.blocks, self._limits[owner]
            if region.buffer not in limits:
                return f"names the buffer {region.buffer!r}"
            ends = (blocks[0], blocks[-1]) if blocks and isinstance(blocks, range) else blocks
            if ends and (min(ends) < 0 or max(ends) >= limits[region.buffer]):
                return f"{region} lies outside the buffer of {limits[region.buffer]} blocks"
            if region.part is not None and not 0 <= region.part < self.segments:
                return f"{region} names a segment of {self.segments}"
        for region in writes(op):
            if region.buffer == "send" and region.blocks:
                return "writes to the send buffer, which belongs to the user"
            if not isinstance(region.blocks, range) and len(set(region.blocks)) < len(region.blocks):
                return f"writes a block of {region} twice"
        if any(region.buffer in SIZE_BUFFERS for _, region, _ in self._touched(rank, op)) and not (
            isinstance(op, Copy)
            and {op.source.buffer, op.target.buffer} == set(SIZE_BUFFERS)
            and op.source[1:] == op.target[1:]
            and op.source.part is None
        ):
            return "moves rows of sizes otherwise than between sizes and shared_sizes, each to its own place"
        if isinstance(op, (Copy, Get)) and self._width(op.source) != self._width(op.target):
            return f"copies {op.source} to {op.target}, which differ in size"
        if isinstance(op, Reduce) and len({self._width(r) for r in (op.left, op.right, op.target)}) > 1:
            return "reduces regions that differ in size"
        if isinstance(op, (Copy, Reduce)) and any(self._clash(region, op.target) for region in reads(op)):
            return "writes to blocks that it reads elsewhere in the region"
        return None

    def _touched(self, rank: int, op: Op) -> list[tuple[int, Region, bool]]:
        """Whose regions an operation reads (False) or writes (True)."""
        touched = [(rank, region, False) for region in reads(op)]
        if isinstance(op, Get):
            touched.append((op.peer, op.source, False))
        return touched + [(rank, region, True) for region in writes(op)]

    def _clash(self, read: Region, written: Region) -> bool:
        """Whether the regions share blocks, unless it is block by block (``x = x + y``)."""
        if read == written or read.buffer != written.buffer:
            return False
        return not set(self.units(read)).isdisjoint(self.units(written))

    def _width(self, region: Region) -> tuple[int, int | None]:
        """Size of a region: blocks, and which part of them (parts may differ in bytes)."""
        return len(region.blocks), region.part

    # Rule 1: messages match.

    def unmatched(self) -> Iterator[Finding]:
        sends: dict[tuple[int, int, int], int] = {}
        recvs: dict[tuple[int, int, int], int] = {}
        for gid, op in enumerate(self.ops):
            if isinstance(op, MESSAGES):
                rank, out = self.rank_of[gid], isinstance(op, OUTGOING)
                known, key = (sends, (rank, op.peer, op.tag)) if out else (recvs, (op.peer, rank, op.tag))
                if key in known:
                    yield self.finding(
                        "unmatched",
                        gid,
                        f"{self.name(gid)} and {self.name(known[key])} have the same source, destination and tag "
                        f"{op.tag}: arrival order would decide which is which",
                        op.region if isinstance(op, (Send, Recv)) else None,
                    )
                known[key] = gid
        for key in sends.keys() - recvs.keys():
            gid = sends[key]
            yield self.finding("unmatched", gid, f"rank {key[1]} never receives {self.name(gid)}")
        for key in recvs.keys() - sends.keys():
            gid = recvs[key]
            yield self.finding("unmatched", gid, f"rank {key[0]} never sends what {self.name(gid)} waits for")
        for key, recv in recvs.items():
            if key in sends:
                send, into = self.ops[sends[key]], self.ops[recv]
                if not are_two_ends(send, into):
                    ends = f"{self.name(sends[key])} and {self.name(recv)} are not the two ends of one message"
                    yield self.finding("unmatched", recv, ends)
                elif (
                    isinstance(send, Send)
                    and isinstance(into, Recv)
                    and self._width(send.region) != self._width(into.region)
                ):
                    yield self.finding(
                        "unmatched",
                        recv,
                        f"{self.name(sends[key])} has {send.region}, its receive has {into.region}: the sizes differ",
                        into.region,
                    )
                self.send_of[recv] = sends[key]
        for gid, op in enumerate(self.ops):
            if isinstance(op, Wait):
                for peer in op.peers:
                    if (peer, op.flag) not in self.signals:
                        yield self.finding("unmatched", gid, f"rank {peer} never raises flag {op.flag}: waits for ever")

    # Rule 2: no deadlock without buffering. Also finds the order in which to replay.

    def deadlocks(self) -> Iterator[Finding]:
        transfer = {send: recv for recv, send in self.send_of.items()}  # a message is one event, its receive
        waiting = [0] * len(self.ops)
        dependents: list[list[int]] = [[] for _ in self.ops]
        for gid, op in enumerate(self.ops):
            event = transfer.get(gid, gid)
            base = self.base[self.rank_of[gid]]
            waiting[event] += len(op.deps)
            for dep in op.deps:
                dependents[transfer.get(base + dep, base + dep)].append(event)
            if isinstance(op, Wait) and not op.previous:
                waiting[event] += len(op.peers)
                for peer in op.peers:
                    dependents[self.signals[peer, op.flag]].append(event)
        ready = [gid for gid in range(len(self.ops)) if not waiting[gid] and gid not in transfer]
        for gid in ready:  # grows while it is walked through
            for event in dependents[gid]:
                waiting[event] -= 1
                if not waiting[event]:
                    ready.append(event)
        self.order = ready
        if len(ready) + len(transfer) < len(self.ops):
            yield self._cycle({gid for gid in range(len(self.ops)) if waiting[gid]}, transfer)

    def _cycle(self, stuck: set[int], transfer: dict[int, int]) -> Finding:
        """A chain of operations that wait for each other."""
        blocked_by: dict[int, int] = {}
        for gid, op in enumerate(self.ops):
            event, base = transfer.get(gid, gid), self.base[self.rank_of[gid]]
            needs = [base + dep for dep in op.deps]
            if isinstance(op, Wait) and not op.previous:
                needs += [self.signals[peer, op.flag] for peer in op.peers]
            for need in needs:
                if event in stuck and transfer.get(need, need) in stuck:
                    blocked_by[event] = transfer.get(need, need)
        seen: dict[int, None] = {}
        gid = min(stuck)
        while gid not in seen:
            seen[gid] = None
            gid = blocked_by[gid]
        chain = list(seen)
        chain = chain[chain.index(gid) :]
        text = ", which waits for ".join(self.name(g) for g in [*chain[:6], gid] if not isinstance(self.ops[g], Join))
        return self.finding("deadlock", gid, f"without buffering nobody can go on: {text}")

    # Rule 3: no data race with unlimited buffering.

    def races(self) -> Iterator[Finding]:
        """Private buffers: an operation's ancestors as bits, against the last users of each block."""
        for rank, schedule in enumerate(self.schedules):
            written = {region.buffer for op in schedule.ops for region in writes(op)} - set(OF_NODE)
            writer: dict[str, dict[int, int]] = {buffer: {} for buffer in written}
            readers: dict[str, defaultdict[int, list[int]]] = {buffer: defaultdict(list) for buffer in written}
            done: list[int] = []  # bits of what has completed when the operation has
            offers: dict[tuple[int, int, str], int] = {}
            for index, op in enumerate(schedule.ops):
                before = 0
                for dep in op.deps:
                    before |= done[dep]
                done.append(before | 1 << index)
                if isinstance(op, AcceptOffer):
                    offers[op.peer, op.tag, op.buffer] = index
                if isinstance(op, Get):
                    offer = offers.get((op.peer, op.tag, op.source.buffer), -1)
                    if offer < 0 or not before >> offer & 1:
                        missing = f"nothing before {self.name(self.base[rank] + index)} says that it may"
                        yield self.finding("race", self.base[rank] + index, missing, op.source)
                        return
                for region in self._read_at_home(rank, op):
                    if region.buffer in written:
                        last, users = writer[region.buffer], readers[region.buffer]
                        for unit in self.units(region):
                            other = last.get(unit, -1)
                            if other >= 0 and not before >> other & 1:
                                yield self._race(rank, other, index, region)
                                return
                            users[unit].append(index)
                for region in writes(op):
                    if region.buffer in written:
                        last, users = writer[region.buffer], readers[region.buffer]
                        for unit in self.units(region):
                            for other in (last.get(unit, -1), *users.pop(unit, ())):
                                if other >= 0 and other != index and not before >> other & 1:
                                    yield self._race(rank, other, index, region)
                                    return
                            last[unit] = index

    def _read_at_home(self, rank: int, op: Op) -> tuple[Region, ...]:
        """What an operation reads of its rank's buffers, rows of sizes too."""
        rows = sizes_read(op, self._size_rows[rank])
        return reads(op) if rows is None else (*reads(op), rows)

    def _race(self, rank: int, first: int, second: int, region: Region) -> Finding:
        a, b = self.base[rank] + first, self.base[rank] + second
        return self.finding(
            "race",
            b,
            f"{self.name(b)} may run while {self.name(a)} still uses the same blocks: "
            "no dependency orders them, so the contents depend on timing",
            region,
        )

    def shared_races(self) -> Iterator[Finding]:
        """Shared buffers, and those that others get from: the same over two starts of all ranks of a node."""
        for ranks in self.topology.nodes:
            gets = [op for rank in ranks for op in self.schedules[rank].ops if isinstance(op, Get)]
            if self.schedules[ranks[0]].shared or gets:
                common: set[tuple[int, str]] = {(op.peer, op.source.buffer) for op in gets}
                common |= {(rank, name) for rank in ranks for name in OF_NODE}
                yield from self._node_races(set(ranks), common)

    def _node_races(self, ranks: set[int], common: set[tuple[int, str]]) -> Iterator[Finding]:
        """``common``: whose buffers several ranks touch."""
        order = [gid for gid in self._with_sends(self.order) if self.rank_of[gid] in ranks]
        bit_of: dict[tuple[int, int], int] = {}  # (start, operation that touches them, or ~rank: its begin) -> bit
        seen_by: dict[tuple[int, int], int] = {}  # what has completed before it begins
        done: dict[tuple[int, int], int] = {}  # what has completed when it has
        finished = dict.fromkeys(ranks, 0)  # what has completed when a rank's last start has
        writer: dict[tuple[int, str, int], tuple[int, int]] = {}
        readers: defaultdict[tuple[int, str, int], list[tuple[int, int]]] = defaultdict(list)
        for start in (0, 1):
            for rank in ranks:
                bit_of[start, ~rank] = 1 << len(bit_of)
                finished[rank] |= bit_of[start, ~rank]
            entered = dict(finished)
            for gid in order:
                op, rank, base = self.ops[gid], self.rank_of[gid], self.base[self.rank_of[gid]]
                before = entered[rank]
                for dep in op.deps:
                    before |= done[start, base + dep]
                seen_by[start, gid] = after = before
                if isinstance(op, INCOMING) and op.peer in ranks:
                    after |= seen_by[start, self.send_of[gid]]
                elif isinstance(op, Wait) and start - op.previous >= 0:
                    for peer in op.peers:
                        after |= seen_by[start - op.previous, self.signals[peer, op.flag]]
                touched = [each for each in self._touched(rank, op) if (each[0], each[1].buffer) in common]
                if touched:
                    bit_of[start, gid] = 1 << len(bit_of)
                    after |= bit_of[start, gid]
                done[start, gid] = after
                finished[rank] |= after
                if isinstance(op, Get) and not before & bit_of[start, ~op.peer]:
                    yield self.finding("race", gid, f"{self.name(gid)} may run before that rank has begun", op.source)
                    return
                for owner, region, writing in touched:
                    whose = -1 if region.buffer in OF_NODE else owner
                    for each in self.units(region):
                        unit = (whose, region.buffer, each)
                        others = [writer[unit]] if unit in writer else []
                        others += readers.pop(unit, ()) if writing else ()
                        for other in others:
                            if not before & bit_of[other]:
                                yield self._shared_race(other, (start, gid), region)
                                return
                        if writing:
                            writer[unit] = (start, gid)
                        else:
                            readers[unit].append((start, gid))
            for gid in order:
                op = self.ops[gid]
                if isinstance(op, Get) and not finished[op.peer] & bit_of[start, gid]:
                    late = f"{self.name(gid)} may run when that rank has ended, and its caller writes to its buffers"
                    yield self.finding("race", gid, late, op.source)
                    return

    def _with_sends(self, order: list[int]) -> Iterator[int]:
        """The replay order, in which a message is its receive, with the sends put in."""
        for gid in order:
            if gid in self.send_of:
                yield self.send_of[gid]
            yield gid

    def _shared_race(self, first: tuple[int, int], second: tuple[int, int], region: Region) -> Finding:
        whose = " of the node's shared buffer" if region.buffer in OF_NODE else ""
        when = "in the next start " if second[0] > first[0] else ""
        return self.finding(
            "race",
            second[1],
            f"{when}{self.name(second[1])} may run while {self.name(first[1])} still uses the same "
            f"blocks{whose}: no flag or message orders them",
            region,
        )

    # Rules 4, 5 and 6: what is read, what is delivered, what is needed.

    def contents(self) -> Iterator[Finding]:
        memory = self._memory()
        sources: dict[int, list[int]] = {}  # operation -> the writers of what it read
        sums = _Sums(self.contract)
        for gid in self.order:
            op, rank = self.ops[gid], self.rank_of[gid]
            read = self._read(gid)
            if read is None:
                continue
            values: list[list[int]] = []
            used: list[int] = []
            for owner, region in read:
                cells = memory[owner, region.buffer]
                units = self.units(region)
                tokens = _pick(cells.tokens, units)
                if UNDEFINED in tokens:
                    block = units[tokens.index(UNDEFINED)] // self.segments
                    reader = self.send_of.get(gid, gid)
                    yield self.finding(
                        "undefined",
                        reader,
                        f"{self.name(reader)} reads block {block}, which nobody has written",
                        region,
                    )
                    return
                values.append(tokens)
                used += _pick(cells.writers, units)
            sources[gid] = used
            result = values[0] if len(values) == 1 else [sums.add(a, b) for a, b in zip(*values, strict=True)]
            target = writes(op)[0]
            cells = memory[rank, target.buffer]
            units = self.units(target)
            if target.buffer == "shared" and self.schedules[rank].holds:
                stated = _pick(self._held[rank], units)
                if result != stated:
                    wrong_at = next(i for i, (a, b) in enumerate(zip(result, stated, strict=True)) if a != b)
                    text = (
                        f"writes {self.contract.describe(result[wrong_at])} to block {units[wrong_at] // self.segments}"
                    )
                    text += f", which is said to hold {self.contract.describe(stated[wrong_at])}"
                    yield self.finding("holds", gid, text, target)
                    return
            for reader, region in self._sizes_read(gid):
                rows, places = memory[self.rank_of[reader], "sizes"], self.units(region)
                tokens = _pick(rows.tokens, places)
                if UNDEFINED in tokens:
                    lane = places[tokens.index(UNDEFINED)] // self.segments
                    text = f"{self.name(reader)} needs the sizes of lane {lane}, which have not been learned"
                    yield self.finding("undefined", reader, text, region)
                    return
                used += _pick(rows.writers, places)
            _put(cells.tokens, units, result)
            _put(cells.writers, units, [gid] * len(result))
        wrong = list(self._undelivered(memory, sums))
        yield from wrong or self._unneeded(memory, sources)

    @cached_property
    def _held(self) -> list[list[int]]:
        """The tokens that each rank's schedule says lie in its node's shared buffer."""
        return [self.contract.units(list(schedule.holds)).tolist() for schedule in self.schedules]

    def _memory(self) -> dict[tuple[int, str], _Memory]:
        """Every rank's buffers before the start; ranks of a node have one shared buffer."""
        memory: dict[tuple[int, str], _Memory] = {}
        for rank, schedule in enumerate(self.schedules):
            for buffer, tokens in self.contract.initial(rank).items():
                memory[rank, buffer] = _Memory(tokens.tolist())
            memory[rank, "scratch"] = _Memory([UNDEFINED] * (schedule.scratch * self.segments))
            memory[rank, "host"] = _Memory([UNDEFINED] * (schedule.host * self.segments))
            memory[rank, "sizes"] = rows = _Memory([UNDEFINED] * (schedule.sizes * self.segments))
            if schedule.sizes:
                own = Region("sizes", range(self.topology.lane_of[rank], self.topology.lane_of[rank] + 1))
                _put(rows.tokens, self.units(own), self.contract.own_sizes(rank).tolist())
        for ranks in self.topology.nodes:
            first = self.schedules[ranks[0]]
            for name, blocks in zip(OF_NODE, (first.shared, first.sizes), strict=True):
                cells = _Memory([UNDEFINED] * (blocks * self.segments))
                memory.update(((rank, name), cells) for rank in ranks)
        return memory

    def _sizes_read(self, gid: int) -> Iterator[tuple[int, Region]]:
        """Rows of sizes that the event reads, with the operation that does."""
        for reader in (gid, self.send_of.get(gid, -1)):
            if reader >= 0 and (rows := self._size_rows[self.rank_of[reader]]):
                region = sizes_read(self.ops[reader], rows)
                if region is not None:
                    yield reader, region

    def _read(self, gid: int) -> list[tuple[int, Region]] | None:
        """Whose regions the event reads; None if it moves nothing."""
        op, rank = self.ops[gid], self.rank_of[gid]
        if isinstance(op, Recv):
            send = self.send_of[gid]
            return [(self.rank_of[send], region) for region in reads(self.ops[send])]
        if not isinstance(op, (Copy, Reduce, Get)):
            return None
        return [(owner, region) for owner, region, writing in self._touched(rank, op) if not writing]

    def _undelivered(self, memory: dict[tuple[int, str], _Memory], sums: _Sums) -> Iterator[Finding]:
        for rank in range(self.contract.size):
            due = self.contract.expected(rank).tolist()
            got = memory[rank, "recv"].tokens[: len(due)]
            if got == due:
                continue
            for unit, (want, have) in enumerate(zip(due, got, strict=True)):
                if not sums.same(want, have):
                    block = unit // self.segments
                    yield Finding(
                        "contract",
                        f"block {block} of the receive buffer must hold {self.contract.describe(want)} "
                        f"and holds {sums.describe(have)}",
                        rank,
                        None,
                        Region("recv", range(block, block + 1)),
                    )
                    break

    def _unneeded(self, memory: dict[tuple[int, str], _Memory], sources: dict[int, list[int]]) -> Iterator[Finding]:
        needed = {-1}
        for rank in range(self.contract.size):
            needed.update(memory[rank, "recv"].writers[: len(self.contract.expected(rank))])
        for gid in reversed(self.order):
            if gid in sources:
                if gid in needed:
                    needed.update(sources[gid])
                elif sources[gid]:
                    yield self.finding("unused", gid, f"nobody needs the result of {self.name(gid)}")


class _Sums:
    """Tokens of partial reductions: the contributors of each, in order."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._parts: dict[int, tuple[int, ...]] = {}
        self._known: dict[tuple[int, ...], int] = {}

    def add(self, left: int, right: int) -> int:
        """The token of left (+) right."""
        parts = self._parts.get(left, (left,)) + self._parts.get(right, (right,))
        token = self._known.setdefault(parts, -2 - len(self._known))
        self._parts[token] = parts
        return token

    def same(self, want: int, have: int) -> bool:
        """Whether the token ``have`` is what the contract calls ``want``."""
        if not self._contract.is_reduction(want):
            return want == have
        parts = list(self._parts.get(have, (have,)))
        if self._contract.commutative:
            parts.sort()
        return parts == self._contract.contributors(want)

    def describe(self, token: int) -> str:
        """The token in words."""
        parts = self._parts.get(token)
        return " + ".join(map(self._contract.describe, parts)) if parts else self._contract.describe(token)


def _pick(cells: list[int], units: Sequence[int]) -> list[int]:
    if isinstance(units, range):
        return cells[units.start : units.stop : units.step]
    return [cells[unit] for unit in units]


def _put(cells: list[int], units: Sequence[int], values: list[int]) -> None:
    if isinstance(units, range):
        cells[units.start : units.stop : units.step] = values
    else:
        for unit, value in zip(units, values, strict=True):
            cells[unit] = value


def describe(op: Op) -> str:
    """An operation in words."""
    match op:
        case Send():
            return f"send {op.region} to rank {op.peer} (tag {op.tag})"
        case Recv():
            return f"receive {op.region} from rank {op.peer} (tag {op.tag})"
        case Offer():
            return f"offer {op.buffer} to rank {op.peer} (tag {op.tag})"
        case AcceptOffer():
            return f"accept the offer of {op.buffer} from rank {op.peer} (tag {op.tag})"
        case Notify():
            return f"notify rank {op.peer} (tag {op.tag})"
        case AwaitNotice():
            return f"await the notice from rank {op.peer} (tag {op.tag})"
        case Copy():
            return f"copy {op.source} to {op.target}"
        case Get():
            return f"get {op.source} of rank {op.peer} into {op.target} (tag {op.tag})"
        case Reduce():
            return f"reduce {op.left} (+) {op.right} to {op.target}"
        case Signal():
            return f"raise flag {op.flag}"
        case Wait():
            return f"wait for flag {op.flag} of ranks {', '.join(map(str, op.peers))}" + (
                " (start before)" if op.previous else ""
            )
        case Join():
            return f"complete {', '.join(map(str, op.deps))}" if op.deps else "end of a round"
