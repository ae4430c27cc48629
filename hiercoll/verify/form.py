"""Rule 0: the schedules are well formed, and ask for buffers alike."""

from __future__ import annotations

from collections.abc import Iterator

from hiercoll.schedule import (
    MESSAGES,
    OF_NODE,
    SIZE_BUFFERS,
    Copy,
    Get,
    Op,
    Recv,
    Reduce,
    Region,
    Schedule,
    Send,
    Signal,
    Wait,
    reads,
    writes,
)
from hiercoll.schedule.transports import HOST_ALONE
from hiercoll.verify.numbered import Numbered
from hiercoll.verify.proof import Finding


def malformed(given: Numbered) -> Iterator[Finding]:
    """What is no schedule. Fills in ``signals``."""
    if len(given.schedules) != given.contract.size:
        yield Finding("malformed", f"{len(given.schedules)} schedules for {given.contract.size} ranks")
        return
    if given.topology.size != given.contract.size:
        yield Finding("malformed", f"a topology of {given.topology.size} ranks for {given.contract.size} ranks")
        return
    shared = {
        node: {(given.schedules[r].shared, given.schedules[r].holds, given.schedules[r].sizes) for r in ranks}
        for node, ranks in enumerate(given.topology.nodes)
    }
    for rank, schedule in enumerate(given.schedules):
        if schedule.rank != rank or schedule.segments != given.segments:
            yield Finding("malformed", f"is of rank {schedule.rank} with {schedule.segments} segments", rank)
            return
        if schedule.blocks != given.schedules[0].blocks:
            text = f"cuts the vector into {schedule.blocks} blocks, and rank 0 into {given.schedules[0].blocks}"
            yield Finding("malformed", text, rank)
            return
        if schedule.accumulates != given.schedules[0].accumulates:
            yield Finding("malformed", "accumulates in other elements than rank 0", rank)
            return
        if len(shared[given.topology.node_of[rank]]) > 1:
            yield Finding("malformed", "the ranks of its node ask for different shared buffers", rank)
            return
        if schedule.holds and len(schedule.holds) != schedule.shared:
            text = f"says what {len(schedule.holds)} of {schedule.shared} shared blocks hold"
            yield Finding("malformed", text, rank)
            return
        known = range(given.contract.size) if rank == given.contract.root else [rank]
        if schedule.knows and schedule.knows != tuple(known):
            yield Finding("malformed", f"says that it knows the sizes of ranks {schedule.knows}", rank)
            return
        is_first = rank == given.topology.node(rank)[0]  # the others of its node ask alike
        if (is_first or schedule.scratch) and schedule.sizes and (text := _wrong_sizes(given, schedule)):
            yield Finding("malformed", text, rank)
            return
        for index, op in enumerate(schedule.ops):
            problem = _problem(given, rank, index, op)
            if problem:
                yield given.finding("malformed", given.base[rank] + index, problem)
            if isinstance(op, Signal):
                if (rank, op.flag) in given.signals:
                    yield given.finding("malformed", given.base[rank] + index, f"flag {op.flag} is raised twice")
                given.signals[rank, op.flag] = given.base[rank] + index


def _wrong_sizes(given: Numbered, schedule: Schedule) -> str:
    """What is wrong with the rows of sizes that a schedule asks for; nothing is ""."""
    ranks = given.topology.node(schedule.rank)
    if schedule.knows:
        return _wrong_slots(given, schedule, list(ranks))
    if schedule.sizes != len(ranks):
        return f"exchanges the sizes of {schedule.sizes} lanes on a node of {len(ranks)}"
    if len(schedule.holds) != schedule.shared:
        return "exchanges sizes and does not say what its shared blocks hold"
    for source, target in schedule.holds:
        ends = {source, target}
        if not (0 <= min(ends) <= max(ends) < given.contract.size and ends.intersection(ranks)):
            return f"shares block {target} of rank {source}, which is of no rank of its node"
    return ""


def _wrong_slots(given: Numbered, schedule: Schedule, ranks: list[int]) -> str:
    """The same, where each rank has one block, and its size is a row."""
    contract = given.contract
    if schedule.sizes != contract.size:
        return f"has the sizes of {schedule.sizes} blocks of {contract.size} ranks"
    if not schedule.shared:
        return "" if -1 not in schedule.slots else f"has blocks of ranks {list(schedule.slots)} in scratch"
    own = [source if contract.record.everywhere == "send" else target for source, target in schedule.holds]
    return "" if own == ranks else f"shares the blocks of ranks {own} on a node of ranks {ranks}"


def _problem(given: Numbered, rank: int, index: int, op: Op) -> str | None:
    """What is wrong with an operation by itself."""
    if op.deps and not 0 <= min(op.deps) <= max(op.deps) < index:
        return "waits for an operation that does not come before it"
    if isinstance(op, MESSAGES) and (op.peer == rank or not 0 <= op.peer < given.contract.size):
        return f"has rank {op.peer} as its peer"
    if isinstance(op, Signal) and not 0 <= op.flag < given.schedules[rank].flags:
        return f"raises flag {op.flag} of {given.schedules[rank].flags}"
    if isinstance(op, Wait) and not set(op.peers) <= set(given.topology.node(rank)):
        return "waits for the flag of a rank on another node"
    if isinstance(op, Get) and (op.peer == rank or op.peer not in given.topology.node(rank)):
        return f"gets from rank {op.peer}, which is no other rank of its node"
    if isinstance(op, Get) and op.source.buffer in (*HOST_ALONE, *OF_NODE, *SIZE_BUFFERS):
        return f"gets from {op.source.buffer}, which is not for others to map"
    for owner, region, _ in given.touched(rank, op):
        blocks, limits = region.blocks, given.limits[owner]
        if region.buffer not in limits:
            return f"names the buffer {region.buffer!r}"
        ends = (blocks[0], blocks[-1]) if blocks and isinstance(blocks, range) else blocks
        if ends and (min(ends) < 0 or max(ends) >= limits[region.buffer]):
            return f"{region} lies outside the buffer of {limits[region.buffer]} blocks"
        if region.like is not None and len(region.like) != len(blocks):
            return f"{region} says of {len(region.like)} blocks how long they are"
        if region.part is not None and not 0 <= region.part < given.segments:
            return f"{region} names a segment of {given.segments}"
        if region.buffer in SIZE_BUFFERS and not _moves_rows(op, bool(given.schedules[rank].knows)):
            return "moves rows of sizes otherwise than between sizes and shared_sizes, each to its own place"
    for region in writes(op):
        if region.buffer == "send" and region.blocks:
            return "writes to the send buffer, which belongs to the user"
        if not isinstance(region.blocks, range) and len(set(region.blocks)) < len(region.blocks):
            return f"writes a block of {region} twice"
    source = op.peer if isinstance(op, Get) else rank
    if isinstance(op, (Copy, Get)) and given.differ_in_size((source, op.source), (rank, op.target)):
        return f"copies {op.source} to {op.target}, which differ in size"
    if isinstance(op, Reduce) and given.differ_in_size(*((rank, each) for each in (op.left, op.right, op.target))):
        return "reduces regions that differ in size"
    if (
        isinstance(op, Reduce)
        and given.schedules[rank].accumulates
        and not all(map(given.schedules[rank].is_wide, op[:3]))
    ):
        return "reduces elements of the program's type, which are to be accumulated in a wider one"
    if isinstance(op, Get) and given.differ_in_width((op.peer, op.source), (rank, op.target)):
        return f"gets {op.source} into {op.target}, whose elements are of another type"
    if isinstance(op, (Copy, Reduce)) and any(_clash(given, region, op.target) for region in reads(op)):
        return "writes to blocks that it reads elsewhere in the region"
    return None


def _moves_rows(op: Op, by_rank: bool) -> bool:
    """Whether an operation publishes or learns sizes: whole rows, each to its own place. There may be messages where
    there is a row for each rank; what they put where, `contents` looks at."""
    if isinstance(op, (Send, Recv)):
        return by_rank and op.region.buffer == "sizes" and op.region.part is None
    if not isinstance(op, Copy) or {op.source.buffer, op.target.buffer} != set(SIZE_BUFFERS):
        return False
    return op.source[1:] == op.target[1:] and op.source.part is None


def _clash(given: Numbered, read: Region, written: Region) -> bool:
    """Whether the regions share blocks, unless it is block by block (``x = x + y``)."""
    if read == written or read.buffer != written.buffer:
        return False
    return not set(given.units(read)).isdisjoint(given.units(written))
