"""All ranks of a collective in one process, on NumPy arrays, without MPI.

Whatever is ready runs in a random order. A run moves real bytes where `verify` moves
tokens, and with a few seeds it is a test; it proves nothing.
"""

from __future__ import annotations

import ctypes
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from hiercoll.errors import ArgumentError, ScheduleError
from hiercoll.memory import SINGLE, Array, BlockLayout, Combine, HostMemory, Layout, WideLayout, elements, host_buffer
from hiercoll.schedule import (
    MESSAGES,
    OUTGOING,
    PRIVATE,
    SIZE_BUFFERS,
    SIZES,
    WIDE,
    BufferName,
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
    are_two_ends,
    reads,
    size_rows,
    sizes_read,
    writes,
)
from hiercoll.topology import Topology
from hiercoll.verify import describe

FILL = 0xA5  # every byte of memory whose contents nobody may rely on
Place: TypeAlias = "tuple[int, int]"  # rank, and index of an operation
NOBODY: Place = (-1, -1)


def run(
    schedules: Sequence[Schedule],
    topology: Topology,
    sends: Sequence[Array],
    recvs: Sequence[Array],
    *,
    layout: BlockLayout,
    combine: Combine | None = None,
    in_place: bool = False,
    seed: int = 0,
) -> None:
    """One start of ``schedules``, from the arrays ``sends`` to ``recvs`` (by rank).

    ``layout`` gives the bytes of a block. A reduction calls ``combine(left, right, out)``
    for each block or segment, on 1-D arrays of the receive array's dtype, or of float32 where a schedule accumulates
    what has two bytes: ``np.add``.
    All memory but ``sends`` is overwritten first; in place, ``recvs`` is not either, and
    ``sends`` is not looked at. ``seed`` chooses among the orders in which operations may
    run, where a send completes together with its receive.

    Raises ArgumentError for arrays that cannot serve, and ScheduleError if a region lies
    outside its buffer, if sizes differ or have not been learned, or, naming them, if operations
    cannot run.
    """
    for argument, given in (("schedules", schedules), ("recvs", recvs), *([] if in_place else [("sends", sends)])):
        if len(given) != topology.size:
            raise ArgumentError(argument, f"one for each of {topology.size} ranks", len(given))
    memory = _Memory(layout, combine, topology.size, schedules[0].accumulates)
    memory.map_arrays("recv", recvs, fill=not in_place)
    memory.map_arrays("send", [] if in_place else sends, fill=False)
    for ranks in topology.nodes:
        shared = memory.allocate(max(schedules[rank].shared for rank in ranks), wide=True)
        shared_sizes = memory.allocate(max(schedules[rank].sizes for rank in ranks), memory.row)
        for rank in ranks:
            memory.map_sizes(rank, schedules[rank], topology)
            memory.mapped[rank, "shared_sizes"] = shared_sizes
            memory.mapped[rank, "shared"] = shared
            for name in PRIVATE:
                memory.mapped[rank, name] = memory.allocate(getattr(schedules[rank], name), wide=name in WIDE)
    for rank, schedule in enumerate(schedules):
        for index, op in enumerate(schedule.ops):
            memory.check(rank, index, op)
    for places in _order(schedules, random.Random(seed)):
        memory.perform([(rank, schedules[rank].ops[index]) for rank, index in places])


class _Memory:
    """The buffers of all ranks, by address, and what operations do to them."""

    def __init__(self, layout: BlockLayout, combine: Combine | None, ranks: int, accumulates: bool) -> None:
        self.layout, self.combine, self.accumulates = layout, combine, accumulates
        self.row = BlockLayout(16 * ranks)  # bytes sent to, and received from, each rank
        self.rows: dict[int, tuple[frozenset[int], ...]] = {}  # of each rank, see `size_rows`
        self.mapped: dict[tuple[int, BufferName], tuple[int, int]] = {}  # address and number of bytes
        self.dtypes: list[np.dtype[np.generic]] = []
        self.owners: list[object] = []
        self.host = HostMemory()

    def map_arrays(self, name: BufferName, arrays: Sequence[Array], fill: bool) -> None:
        for rank, array in enumerate(arrays):
            buffer = host_buffer(array, f"{name}s[{rank}]", rank, writable=name == "recv")
            self.mapped[rank, name] = (buffer.address, buffer.nbytes)
            if name == "recv":
                self.dtypes.append(buffer.array.dtype)
            if fill:
                ctypes.memset(buffer.address, FILL, buffer.nbytes)

    def map_sizes(self, rank: int, schedule: Schedule, topology: Topology) -> None:
        """The buffer ``sizes`` of a rank, the rows filled that it knows."""
        self.rows[rank] = size_rows(schedule, topology)
        self.mapped[rank, "sizes"] = address, _ = self.allocate(schedule.sizes, self.row)
        for known in schedule.knows or [topology.lane_of[rank]][: schedule.sizes]:
            row = self.row_of_equal_blocks()
            ctypes.memmove(address + known * self.row.block, row, self.row.block)

    def row_of_equal_blocks(self) -> bytes:
        """What is true of each rank: the same bytes to and from each."""
        return np.full(self.row.block // 8, self.layout.block, np.int64).tobytes()

    def allocate(self, blocks: int, layout: BlockLayout | None = None, wide: bool = False) -> tuple[int, int]:
        nbytes = blocks * (layout or self.layout).block * (1 + (wide and self.accumulates))
        address, owner = self.host.allocate(nbytes)
        ctypes.memset(address, FILL, nbytes)
        self.owners.append(owner)
        return address, nbytes

    def check(self, rank: int, index: int, op: Op) -> None:
        """Regions must lie in their buffers: a stray address would end the process, or go unnoticed."""
        touched = [(rank, region) for region in (*reads(op), *writes(op))]
        if isinstance(op, Get):
            touched.append((op.peer, op.source))
        for owner, region in touched:
            nbytes = self.mapped.get((owner, region.buffer), (0, 0))[1]
            block = self.layout_of(region).block * (1 + self.is_wide(region))
            if region.blocks and (min(region.blocks) < 0 or (max(region.blocks) + 1) * block > nbytes):
                raise ScheduleError(f"{_name(rank, index, op)}: {region} lies outside its {nbytes} bytes")
        if isinstance(op, Reduce) and self.combine is None:
            raise ScheduleError(f"{_name(rank, index, op)}: needs the argument combine")

    def is_wide(self, region: Region) -> bool:
        return self.accumulates and region.buffer in WIDE

    def layout_of(self, region: Region) -> BlockLayout:
        return self.row if region.buffer in SIZE_BUFFERS else self.layout

    def check_sizes(self, rank: int, op: Op) -> None:
        """What gives the lengths of shared blocks must have been learned."""
        needed = sizes_read(op, self.rows[rank])
        for lane in () if needed is None else needed.blocks:
            address = self.mapped[rank, "sizes"][0] + lane * self.row.block
            if ctypes.string_at(address, self.row.block) != self.row_of_equal_blocks():
                raise ScheduleError(f"{describe(op)} (rank {rank}): {SIZES[lane]} has not been learned")

    def perform(self, together: list[tuple[int, Op]]) -> None:
        """An operation, or a send and its receive."""
        for rank, op in together:
            self.check_sizes(rank, op)
        match together:
            case [(rank, Copy() as op)]:
                self.copy(op, rank, op.source, rank, op.target)
            case [(rank, Get() as op)]:
                self.copy(op, op.peer, op.source, rank, op.target)
            case [(rank, Reduce() as op)]:
                self.reduce(op, rank)
            case [(rank, Send() as op), (other, Recv() as into)]:
                self.copy(op, rank, op.region, other, into.region)
            case [(rank, op), (other, into)] if not are_two_ends(op, into):
                ends = f"{describe(op)} (rank {rank}) and {describe(into)} (rank {other})"
                raise ScheduleError(f"{ends} are not the two ends of one message")

    def copy(self, op: Op, rank: int, source: Region, other: int, target: Region) -> None:
        if (source.size, source.part) != (target.size, target.part):
            raise ScheduleError(f"{describe(op)} (rank {rank}): {source} and {target} differ in size")
        if source.blocks:
            ends = (self.mapped[rank, source.buffer][0], source), (self.mapped[other, target.buffer][0], target)
            layout: Layout = self.layout_of(source)
            if self.accumulates:
                layout = WideLayout(self.layout, self.dtypes[rank])
            copy = self.host.copy(layout, *ends)
            if copy is not None:
                copy()

    def reduce(self, op: Reduce, rank: int) -> None:
        if len({(region.size, region.part) for region in (op.left, op.right, op.target)}) > 1:
            raise ScheduleError(f"{describe(op)} (rank {rank}): the regions differ in size")
        assert self.combine is not None
        for views in zip(*(self.views(rank, region) for region in (op.left, op.right, op.target)), strict=True):
            self.combine(*views)

    def views(self, rank: int, region: Region) -> Iterator[Array]:
        """Each block of the region as an array."""
        offset, length = self.layout.extent(region.part)
        dtype, base, times = self.dtypes[rank], self.mapped[rank, region.buffer][0], 1 + self.is_wide(region)
        for block in region.blocks:
            start = base + times * (block * self.layout.block + offset)
            yield elements(start, length // dtype.itemsize, SINGLE if times > 1 else dtype)


def _order(schedules: Sequence[Schedule], choice: random.Random) -> Iterator[list[Place]]:
    """What to perform next, at random among what is ready: an operation, or a send and its receive."""
    ops = {(rank, index): op for rank, schedule in enumerate(schedules) for index, op in enumerate(schedule.ops)}
    signals = {(rank, op.flag): (rank, index) for (rank, index), op in ops.items() if isinstance(op, Signal)}
    needs = {(rank, index): [(rank, dep) for dep in op.deps] for (rank, index), op in ops.items()}
    for place, op in ops.items():
        if isinstance(op, Wait) and not op.previous:  # every flag stands at the start before this one
            needs[place] += [signals.get((peer, op.flag), NOBODY) for peer in op.peers]
    dependents: defaultdict[Place, list[Place]] = defaultdict(list)
    for place, needed in needs.items():
        for need in needed:
            dependents[need].append(place)
    waiting = {place: len(needed) for place, needed in needs.items()}
    ready = [place for place in ops if not waiting[place]]
    posted: dict[tuple[bool, int, int, int], Place] = {}  # sides of messages that wait for the other side
    while ready:
        chosen = choice.randrange(len(ready))
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        place = ready.pop()
        op, together = ops[place], [place]
        if isinstance(op, MESSAGES):
            out = isinstance(op, OUTGOING)
            other = posted.pop((not out, op.peer, place[0], op.tag), None)
            if other is None:
                posted[out, place[0], op.peer, op.tag] = place
                continue
            together = [place, other] if out else [other, place]
        yield together
        for done in together:
            del ops[done]
            for dependent in dependents[done]:
                waiting[dependent] -= 1
                if not waiting[dependent]:
                    ready.append(dependent)
    if ops:  # name the causes: operations that nothing in their own rank holds up
        causes = [(place, op) for place, op in ops.items() if not any((place[0], dep) in ops for dep in op.deps)]
        names = [_name(*place, op) for place, op in causes or ops.items()]
        more = f"; and {len(names) - 6} more" if len(names) > 6 else ""
        raise ScheduleError(f"{len(ops)} operations cannot run: {'; '.join(names[:6])}{more}")


def _name(rank: int, index: int, op: Op) -> str:
    return f"{describe(op)} (rank {rank}, op {index})"
