"""Which devices are near, and how ranks share them out."""

from __future__ import annotations

import os
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.cuda.nearness import are_near, share_out

quick = settings(deadline=None, derandomize=True, max_examples=100)


def rows(most_ranks: int, most_devices: int) -> st.SearchStrategy[list[list[bool]]]:
    """What is near, of up to so many ranks and devices."""
    return st.integers(1, most_devices).flatmap(
        lambda devices: st.lists(
            st.lists(st.booleans(), min_size=devices, max_size=devices), min_size=1, max_size=most_ranks
        )
    )


def is_balanced(shares: list[int], devices: int) -> bool:
    """Equally many ranks a device, give or take one."""
    counts = Counter(shares)
    return {counts[device] for device in range(devices)} <= {len(shares) // devices, -(-len(shares) // devices)}


def count_near(near: list[list[bool]], shares: list[int]) -> int:
    return sum(row[device] for row, device in zip(near, shares, strict=True))


@quick
@given(rows(24, 8))
def test_shares_are_equal(near: list[list[bool]]) -> None:
    """Whatever is near; and no rank loses by it against going round."""
    shares, devices = share_out(near), len(near[0])
    assert is_balanced(shares, devices)
    assert count_near(near, shares) >= count_near(near, [rank % devices for rank in range(len(near))])


@quick
@given(rows(5, 4))
def test_no_other_way_has_more_near_devices(near: list[list[bool]]) -> None:
    """Among all ways that are as equal."""
    devices = len(near[0])
    ways = (list(way) for way in product(range(devices), repeat=len(near)))
    best = max(count_near(near, way) for way in ways if is_balanced(way, devices))
    assert count_near(near, share_out(near)) == best


@quick
@given(st.integers(1, 40), st.integers(1, 8), st.booleans())
def test_by_order_where_nothing_is_known(ranks: int, devices: int, near: bool) -> None:
    """All devices alike: going round."""
    assert share_out([[near] * devices] * ranks) == [rank % devices for rank in range(ranks)]


def test_shapes_of_hosts() -> None:
    """Two sockets with two devices each, ranks by socket or in turn; NUMA nodes in the other order; more ranks."""
    low, high = [True, True, False, False], [False, False, True, True]
    assert share_out([low, low, high, high]) == [0, 1, 2, 3]
    assert share_out([low, high, low, high]) == [0, 2, 1, 3]
    assert share_out([[device == 3 - rank for device in range(4)] for rank in range(4)]) == [3, 2, 1, 0]
    assert share_out([low] * 4 + [high] * 4) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert sorted(share_out([low] * 4)) == [0, 1, 2, 3]  # all the ranks on one socket: equal shares come first


def test_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of CPUs by PCI address, in either case; what is not listed is as near as anything."""
    for bus, cpus in {"0000:0a:00.0": "0-3,8-11", "0000:0b:00.0": "4-7,12", "0000:0c:00.0": ""}.items():
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "local_cpulist").write_text(f"{cpus}\n")
    buses = ["0000:0A:00.0", "0000:0b:00.0", "0000:0c:00.0", "0000:0d:00.0"]
    for mine, near in {
        (0, 1): [True, False],
        (12,): [False, True],
        (3, 4): [True, True],
        (40,): [False, False],
    }.items():
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, mine=mine: set(mine))
        assert are_near(buses, tmp_path) == [*near, True, True]
