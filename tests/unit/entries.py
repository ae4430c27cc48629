"""Algorithms of the registry, as parameters of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hiercoll.algorithms import REGISTRY, Algorithm
from hiercoll.schedule import Schedule
from hiercoll.tools.proving import generate
from hiercoll.topology import Topology, parse_layout

ENTRIES = [entry for entries in REGISTRY.values() for entry in entries.values()]


def entries_of(*collectives: str, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A test of each algorithm of some collectives, or of all, without those of some names: ``entry``."""
    chosen = [e for e in ENTRIES if (not collectives or e.collective in collectives) and e.name not in but]
    return pytest.mark.parametrize("entry", chosen, ids=[f"{e.collective} {e.name}" for e in chosen])


each_entry = entries_of()


def small_systems(entry: Algorithm) -> Iterator[tuple[Topology, dict[str, int | str], list[Schedule]]]:
    """All variants of an algorithm on two nodes, even and uneven: topology, parameters, all ranks' schedules."""
    for layout in ("2x3", "3+2"):
        topology = parse_layout(layout)
        for params in entry.variants():
            if entry.refusal(topology, params) is None:
                yield topology, params, generate(entry.collective, entry.name, params, topology)
