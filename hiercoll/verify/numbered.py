"""All ranks' operations, numbered, with what waits for what: what the rules look at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from hiercoll.collectives import Order
from hiercoll.contracts import Contract
from hiercoll.schedule import PRIVATE, SIZE_BUFFERS, Get, Op, Region, Schedule, reads, size_rows, sizes_read, writes
from hiercoll.topology import Topology
from hiercoll.verify.proof import Finding
from hiercoll.verify.words import describe


class Numbered:
    """All ranks' operations, numbered through: what every rule looks at.

    The numbers (gid) count rank by rank. Rules fill in what later ones need: ``signals`` (`form`),
    ``send_of`` (`matching`), ``order`` (`deadlock`), ``combined`` and ``roundings`` (`contents`).
    """

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
        self.combined: Order | None = None  # how contributions to a reduction are
        self.roundings: int | None = None  # how often they are rounded, at most, where wider elements are combined

    def units(self, region: Region) -> Sequence[int]:
        """The segments that ``region`` covers, in order."""
        k = self.segments
        if k == 1:
            return region.blocks
        parts = range(k) if region.part is None else (region.part,)
        return [block * k + part for block in region.blocks for part in parts]

    def finding(self, kind: str, gid: int, message: str, region: Region | None = None) -> Finding:
        """What is wrong with an operation."""
        rank = self.rank_of[gid]
        return Finding(kind, message, rank, gid - self.base[rank], region)

    def name(self, gid: int) -> str:
        """An operation in words."""
        rank, op = self.rank_of[gid], self.ops[gid]
        return f"{describe(op)} (rank {rank}, op {gid - self.base[rank]})"

    @cached_property
    def limits(self) -> list[dict[Any, int]]:
        """Sizes of every rank's buffers, in blocks."""
        return [
            {
                **self.contract.sizes(rank),
                **{name: getattr(own, name) for name in (*PRIVATE, "shared")},
                **dict.fromkeys(SIZE_BUFFERS, own.sizes),
            }
            for rank, own in enumerate(self.schedules)
        ]

    @cached_property
    def sizes_read(self) -> dict[int, Region]:
        """The rows of sizes that operations read, of those that do."""
        found: dict[int, Region] = {}
        for ranks in self.topology.nodes:
            rows = size_rows(self.schedules[ranks[0]], self.topology)  # of all its ranks alike
            for rank in ranks if rows else ():
                regions = (
                    (gid, sizes_read(self.ops[gid], rows)) for gid in range(self.base[rank], self.base[rank + 1])
                )
                found.update((gid, region) for gid, region in regions if region is not None)
        return found

    def touched(self, rank: int, op: Op) -> list[tuple[int, Region, bool]]:
        """Whose regions an operation reads (False) or writes (True)."""
        touched = [(rank, region, False) for region in reads(op)]
        if isinstance(op, Get):
            touched.append((op.peer, op.source, False))
        return touched + [(rank, region, True) for region in writes(op)]

    def differ_in_width(self, *regions: tuple[int, Region]) -> bool:
        """Whether elements of regions of ranks are of different types."""
        return len({self.schedules[rank].is_wide(region) for rank, region in regions if region.blocks}) > 1

    def differ_in_size(self, *regions: tuple[int, Region]) -> bool:
        """Whether regions of ranks differ in blocks, in which part of them (parts may differ in bytes), or in the
        blocks that they are as long as, where that is known."""
        if len({(len(region.blocks), region.part) for _, region in regions}) > 1:
            return True
        like = [tuple(found) for each in regions if (found := self.like(*each)) is not None]
        return len(set(like)) > 1

    def like(self, rank: int, region: Region) -> Sequence[int] | None:
        """The blocks of the whole vector that those of ``region`` are as long as; None where all are of one size, or it
        is not said."""
        record = self.contract.record
        if not record.is_cut or region.like is not None:
            return region.like
        if region.buffer == "shared" and self.schedules[rank].holds:
            return [self.schedules[rank].holds[block][1] for block in region.blocks]
        return self.contract.like(rank, region.buffer, region.blocks)
