"""Rules 4 to 7: what is read, what is delivered, what is needed, what shared blocks hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hiercoll.collectives import Order
from hiercoll.contracts import UNDEFINED, Contract
from hiercoll.schedule import OF_NODE, PRIVATE, SIZE_BUFFERS, Copy, Get, Recv, Reduce, Region, reads, writes
from hiercoll.verify.numbered import Numbered
from hiercoll.verify.proof import Finding
from hiercoll.verify.tokens import Sums


@dataclass
class _Memory:
    """Contents of one buffer during replay: token and last writer of each segment."""

    tokens: list[int]
    writers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.writers = [-1] * len(self.tokens)


def contents(given: Numbered) -> Iterator[Finding]:
    """The first thing that is read, written, delivered or left over wrongly when tokens move in ``order``."""
    memory = _memory(given)
    sources: dict[int, list[int]] = {}  # operation -> the writers of what it read
    sums = Sums(given.contract)
    held = _held(given)
    for gid in given.order:
        op, rank = given.ops[gid], given.rank_of[gid]
        read = _read(given, gid)
        if read is None:
            continue
        values: list[list[int]] = []
        used: list[int] = []
        for owner, region in read:
            cells = memory[owner, region.buffer]
            units = given.units(region)
            tokens = _pick(cells.tokens, units)
            if UNDEFINED in tokens:
                block = units[tokens.index(UNDEFINED)] // given.segments
                reader = given.send_of.get(gid, gid)
                yield given.finding(
                    "undefined",
                    reader,
                    f"{given.name(reader)} reads block {block}, which nobody has written",
                    region,
                )
                return
            values.append(tokens)
            used += _pick(cells.writers, units)
        sources[gid] = used
        result = values[0] if len(values) == 1 else [sums.add(a, b) for a, b in zip(*values, strict=True)]
        target = writes(op)[0]
        if given.contract.accumulate and not given.schedules[rank].is_wide(target):
            result = [sums.rounded(token) for token in result]
        cells = memory[rank, target.buffer]
        units = given.units(target)
        if target.buffer == "shared" and given.schedules[rank].holds:
            stated = _pick(held[rank], units)
            if result != stated:
                wrong_at = next(i for i, (a, b) in enumerate(zip(result, stated, strict=True)) if a != b)
                text = (
                    f"writes {given.contract.describe(result[wrong_at])} to block {units[wrong_at] // given.segments}"
                )
                text += f", which is said to hold {given.contract.describe(stated[wrong_at])}"
                yield given.finding("holds", gid, text, target)
                return
        if target.buffer in SIZE_BUFFERS and given.schedules[rank].knows:
            stated = [token for row in target.blocks for token in given.contract.own_sizes(row).tolist()]
            if result != stated:
                yield given.finding("size", gid, f"writes sizes of other ranks to {target}", target)
                return
        if (like := given.like(rank, target)) is not None:
            whole = result[:: given.segments if target.part is None else 1]
            blocks = [_block_of(given, sums, token) for token in whole]
            if blocks != list(like):
                wrong_at = next(i for i, (a, b) in enumerate(zip(blocks, like, strict=True)) if a != b)
                text = f"writes data of block {blocks[wrong_at]} to a place for block {like[wrong_at]}"
                yield given.finding("size", gid, text, target)
                return
        for reader, region in _sizes_read(given, gid) if given.sizes_read else ():
            rows, places = memory[given.rank_of[reader], "sizes"], given.units(region)
            tokens = _pick(rows.tokens, places)
            if UNDEFINED in tokens:
                lane = places[tokens.index(UNDEFINED)] // given.segments
                text = f"{given.name(reader)} needs the sizes of lane {lane}, which have not been learned"
                yield given.finding("undefined", reader, text, region)
                return
            used += _pick(rows.writers, places)
        _put(cells.tokens, units, result)
        _put(cells.writers, units, [gid] * len(result))
    wrong = list(_undelivered(given, memory, sums))
    yield from wrong or _unneeded(given, memory, sources)


def _block_of(given: Numbered, sums: Sums, token: int) -> int:
    """The number of the block that a value is of; where each rank has one, and it is for the root, of the rank."""
    record = given.contract.record
    by_rank = record.is_rooted and not record.is_cut and record.everywhere == "send"
    return given.contract.rank_of(token) if by_rank else sums.block_of(token)


def _held(given: Numbered) -> list[list[int]]:
    """The tokens that each rank's schedule says lie in its node's shared buffer."""
    return [given.contract.units(list(schedule.holds)).tolist() for schedule in given.schedules]


def _memory(given: Numbered) -> dict[tuple[int, str], _Memory]:
    """Every rank's buffers before the start; ranks of a node have one shared buffer."""
    memory: dict[tuple[int, str], _Memory] = {}
    for rank, schedule in enumerate(given.schedules):
        for buffer, tokens in given.contract.initial(rank).items():
            memory[rank, buffer] = _Memory(tokens.tolist())
        for name in PRIVATE:
            memory[rank, name] = _Memory([UNDEFINED] * (getattr(schedule, name) * given.segments))
        memory[rank, "sizes"] = rows = _Memory([UNDEFINED] * (schedule.sizes * given.segments))
        known = {row: row for row in schedule.knows} or {given.topology.lane_of[rank]: rank}
        for row, owner in known.items() if schedule.sizes else ():
            _put(rows.tokens, given.units(Region("sizes", (row,))), given.contract.own_sizes(owner).tolist())
    for ranks in given.topology.nodes:
        first = given.schedules[ranks[0]]
        for of_node, blocks in zip(OF_NODE, (first.shared, first.sizes), strict=True):
            cells = _Memory([UNDEFINED] * (blocks * given.segments))
            memory.update(((rank, of_node), cells) for rank in ranks)
    return memory


def _sizes_read(given: Numbered, gid: int) -> Iterator[tuple[int, Region]]:
    """Rows of sizes that the event reads, with the operation that does."""
    for reader in (gid, given.send_of.get(gid, -1)):
        if reader in given.sizes_read:
            yield reader, given.sizes_read[reader]


def _read(given: Numbered, gid: int) -> list[tuple[int, Region]] | None:
    """Whose regions the event reads; None if it moves nothing."""
    op, rank = given.ops[gid], given.rank_of[gid]
    if isinstance(op, Recv):
        send = given.send_of[gid]
        return [(given.rank_of[send], region) for region in reads(given.ops[send])]
    if not isinstance(op, (Copy, Reduce, Get)):
        return None
    return [(owner, region) for owner, region, writing in given.touched(rank, op) if not writing]


def _undelivered(given: Numbered, memory: dict[tuple[int, str], _Memory], sums: Sums) -> Iterator[Finding]:
    """What receive buffers hold that is not due: the first block of each. Fills in ``combined``."""
    reduced = _Reduced(given.contract, sums)
    for rank in range(given.contract.size):
        due = given.contract.expected(rank).tolist()
        got = memory[rank, "recv"].tokens[: len(due)]
        if got == due:
            continue
        for unit, (want, have) in enumerate(zip(due, got, strict=True)):
            problem = "" if want == have else reduced.problem(rank, want, have)
            if problem:
                block = unit // given.segments
                region = Region("recv", range(block, block + 1))
                yield Finding("contract", f"block {block} of the receive buffer {problem}", rank, None, region)
                break
    given.combined = min(reduced.orders, default=None)
    given.roundings = max(reduced.roundings, default=0) if given.contract.accumulate else None


class _Reduced:
    """What ranks get by reductions, in which orders, and how often rounded."""

    def __init__(self, contract: Contract, sums: Sums) -> None:
        self._contract, self._sums = contract, sums
        self._trees: dict[int, tuple[int, int]] = {}  # of each reduction: the first rank that gets it, and its tree
        self.orders: set[Order] = set()
        self.roundings: set[int] = set()

    def problem(self, rank: int, want: int, have: int) -> str:
        """What is wrong with the token ``have``, where another one is due; "" if it is that reduction."""
        sums, contract = self._sums, self._contract
        if want in self._trees:
            first, tree = self._trees[want]
            if tree == have:
                return ""
            if contract.is_reduction(want) and sums.order(want, have) is not None:
                return f"is {sums.tree(have)} here, and {sums.tree(tree)} on rank {first}: other bits"
        elif contract.is_reduction(want) and (order := sums.order(want, have)) is not None:
            self._trees[want] = rank, have
            self.orders.add(order)
            self.roundings.add(often := sums.roundings(have))
            if often > 1:
                return f"is {sums.tree(have)}, which has been rounded {often} times"
            asked = contract.order
            return "" if order >= asked else f"is {sums.tree(have)}, which is not in the order {asked.name.lower()!r}"
        return f"must hold {contract.describe(want)} and holds {sums.describe(have)}"


def _unneeded(
    given: Numbered, memory: dict[tuple[int, str], _Memory], sources: dict[int, list[int]]
) -> Iterator[Finding]:
    """Operations whose results do not lead to what is due."""
    needed = {-1}
    for rank in range(given.contract.size):
        needed.update(memory[rank, "recv"].writers[: len(given.contract.expected(rank))])
    for gid in reversed(given.order):
        if gid in sources:
            if gid in needed:
                needed.update(sources[gid])
            elif sources[gid]:
                yield given.finding("unused", gid, f"nobody needs the result of {given.name(gid)}")


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
