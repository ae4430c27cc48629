"""Which devices of a host are near a rank, and how ranks share devices out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hiercoll.cuda.nvml import PCI


def are_near(buses: Sequence[str], pci: Path = PCI) -> list[bool]:
    """For each device, by its PCI address, whether this process may run on a CPU that is near it: on one of the
    device's NUMA node. All are, where the kernel does not say."""
    mine = os.sched_getaffinity(0)
    return [not (cpus := _local_cpus(pci / bus.lower())) or not mine.isdisjoint(cpus) for bus in buses]


def _local_cpus(device: Path) -> set[int]:
    """The CPUs near a PCI device, as the kernel lists them ("0-15,64-79"); none where it does not."""
    try:
        ranges = (device / "local_cpulist").read_text().strip()
    except OSError:
        return set()
    ends = [part.partition("-") for part in ranges.split(",") if part]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def share_out(near: Sequence[Sequence[bool]]) -> list[int]:
    """The device of each rank, where ``near[rank][device]``.

    Devices get equally many ranks, give or take one; of all such ways, as many ranks as can be
    get a near device; of those, as many as can be get the one that going round gives them.
    """
    ranks, devices = np.shape(near)
    turn, device = np.divmod(np.arange(-(-ranks // devices) * devices), devices)  # seats: each turn has all devices
    far = ~np.array(near, bool)[:, device]
    elsewhere = device != (np.arange(ranks) % devices)[:, None]
    weight = ranks + 1  # more than all ranks together can cost at the level below
    return [int(device[seat]) for seat in cheapest((turn * weight + far) * weight + elsewhere)]


def cheapest(cost: npt.NDArray[np.int64]) -> list[int]:
    """A column for each row, no column twice, that cost the least together.

    Rows come in one by one. Each takes the column at the end of the cheapest chain in which
    a row takes the column of another one, which takes that of a third, and so on to a free one.
    """
    rows, columns = cost.shape
    row_of = np.full(columns, -1)
    for row in range(rows):
        paid, before = cost[row].copy(), np.full(columns, -1)  # to have a column free; which one came before it
        taken = np.flatnonzero(row_of >= 0)
        while len(taken):
            ways = (paid[taken] - cost[row_of[taken], taken])[:, None] + cost[row_of[taken]]
            better = ways.min(axis=0) < paid
            if not better.any():
                break
            before[better] = taken[ways.argmin(axis=0)[better]]
            paid = np.minimum(paid, ways.min(axis=0))
        column = int(np.where(row_of < 0, paid, paid.max() + 1).argmin())
        while before[column] >= 0:
            row_of[column] = row_of[before[column]]
            column = int(before[column])
        row_of[column] = row
    return [int(np.flatnonzero(row_of == row)[0]) for row in range(rows)]
