"""Rule 3: no data race with unlimited buffering."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hiercoll.schedule import INCOMING, OF_NODE, AcceptOffer, Get, Region, Wait, reads, writes
from hiercoll.verify.numbered import Numbered
from hiercoll.verify.proof import Finding


def races(given: Numbered) -> Iterator[Finding]:
    """Private buffers: an operation's ancestors as bits, against the last users of each block."""
    sizes = given.sizes_read
    for rank, schedule in enumerate(given.schedules):
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
                    missing = f"nothing before {given.name(given.base[rank] + index)} says that it may"
                    yield given.finding("race", given.base[rank] + index, missing, op.source)
                    return
            regions = reads(op)
            if given.base[rank] + index in sizes:
                regions += (sizes[given.base[rank] + index],)
            for region in regions:
                if region.buffer in written:
                    last, users = writer[region.buffer], readers[region.buffer]
                    for unit in given.units(region):
                        other = last.get(unit, -1)
                        if other >= 0 and not before >> other & 1:
                            yield _race(given, rank, other, index, region)
                            return
                        users[unit].append(index)
            for region in writes(op):
                if region.buffer in written:
                    last, users = writer[region.buffer], readers[region.buffer]
                    for unit in given.units(region):
                        for other in (last.get(unit, -1), *users.pop(unit, ())):
                            if other >= 0 and other != index and not before >> other & 1:
                                yield _race(given, rank, other, index, region)
                                return
                        last[unit] = index


def _race(given: Numbered, rank: int, first: int, second: int, region: Region) -> Finding:
    a, b = given.base[rank] + first, given.base[rank] + second
    return given.finding(
        "race",
        b,
        f"{given.name(b)} may run while {given.name(a)} still uses the same blocks: "
        "no dependency orders them, so the contents depend on timing",
        region,
    )


def shared_races(given: Numbered) -> Iterator[Finding]:
    """Shared buffers, and those that others get from: the same over two starts of all ranks of a node."""
    for ranks in given.topology.nodes:
        gets = [op for rank in ranks for op in given.schedules[rank].ops if isinstance(op, Get)]
        if given.schedules[ranks[0]].shared or gets:
            common: set[tuple[int, str]] = {(op.peer, op.source.buffer) for op in gets}
            common |= {(rank, name) for rank in ranks for name in OF_NODE}
            yield from _node_races(given, set(ranks), common)


def _node_races(given: Numbered, ranks: set[int], common: set[tuple[int, str]]) -> Iterator[Finding]:
    """``common``: whose buffers several ranks touch."""
    order = [gid for gid in _with_sends(given, given.order) if given.rank_of[gid] in ranks]
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
            op, rank, base = given.ops[gid], given.rank_of[gid], given.base[given.rank_of[gid]]
            before = entered[rank]
            for dep in op.deps:
                before |= done[start, base + dep]
            seen_by[start, gid] = after = before
            if isinstance(op, INCOMING) and op.peer in ranks:
                after |= seen_by[start, given.send_of[gid]]
            elif isinstance(op, Wait) and start - op.previous >= 0:
                for peer in op.peers:
                    after |= seen_by[start - op.previous, given.signals[peer, op.flag]]
            touched = [each for each in given.touched(rank, op) if (each[0], each[1].buffer) in common]
            if touched:
                bit_of[start, gid] = 1 << len(bit_of)
                after |= bit_of[start, gid]
            done[start, gid] = after
            finished[rank] |= after
            if isinstance(op, Get) and not before & bit_of[start, ~op.peer]:
                yield given.finding("race", gid, f"{given.name(gid)} may run before that rank has begun", op.source)
                return
            for owner, region, writing in touched:
                whose = -1 if region.buffer in OF_NODE else owner
                for each in given.units(region):
                    unit = (whose, region.buffer, each)
                    others = [writer[unit]] if unit in writer else []
                    others += readers.pop(unit, ()) if writing else ()
                    for other in others:
                        if other != (start, gid) and not before & bit_of[other]:  # x = x (+) y
                            yield _shared_race(given, other, (start, gid), region)
                            return
                    if writing:
                        writer[unit] = (start, gid)
                    else:
                        readers[unit].append((start, gid))
        for gid in order:
            op = given.ops[gid]
            if isinstance(op, Get) and not finished[op.peer] & bit_of[start, gid]:
                late = f"{given.name(gid)} may run when that rank has ended, and its caller writes to its buffers"
                yield given.finding("race", gid, late, op.source)
                return


def _with_sends(given: Numbered, order: list[int]) -> Iterator[int]:
    """The replay order, in which a message is its receive, with the sends put in."""
    for gid in order:
        if gid in given.send_of:
            yield given.send_of[gid]
        yield gid


def _shared_race(given: Numbered, first: tuple[int, int], second: tuple[int, int], region: Region) -> Finding:
    whose = " of the node's shared buffer" if region.buffer in OF_NODE else ""
    when = "in the next start " if second[0] > first[0] else ""
    return given.finding(
        "race",
        second[1],
        f"{when}{given.name(second[1])} may run while {given.name(first[1])} still uses the same "
        f"blocks{whose}: no flag or message orders them",
        region,
    )
