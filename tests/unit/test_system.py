"""Systems: emitted when asked for, changed by passes, saved and read back equal, proved as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hiercoll.algorithms import REGISTRY, Algorithm
from hiercoll.contracts import Contract
from hiercoll.errors import ArgumentError, ScheduleError
from hiercoll.schedule import Get, in_order
from hiercoll.schedule.system import System
from hiercoll.schedule.transports import Transport, cut, peer, staged
from hiercoll.tools.proving import system_of
from hiercoll.topology import parse_layout
from hiercoll.verify import verify

ENTRIES = [
    pytest.param(entry, id=f"{entry.collective}-{entry.name}")
    for entries in REGISTRY.values()
    for entry in entries.values()
]


def counting(layout: str = "2x2") -> tuple[System, list[int]]:
    """A system of `scatter_destination`, and the ranks whose schedules have been emitted."""
    topology, emitted = parse_layout(layout), list[int]()
    whole = system_of("alltoall", "scatter_destination", {}, topology)

    def emit(rank: int) -> Any:
        emitted.append(rank)
        return whole[rank]

    return System(topology, Contract("alltoall", topology.size), emit), emitted


@pytest.mark.parametrize("layout", ["1x1", "2x2", "3+2:cyclic", "4x1"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_system_is_read_back_equal(entry: Algorithm, layout: str) -> None:
    """Of every algorithm, with every transport that it can be given; in place where it can be."""
    topology = parse_layout(layout)
    for params in entry.variants():
        if entry.refusal(topology, params) is not None:
            continue
        plain = system_of(entry.collective, entry.name, params, topology)
        some = [plain, *(plain.with_node_pass(Transport(near, 1).schedule) for near in (False, True))]
        some += [plain.in_place()] if entry.in_place else []
        for system in some:
            back = System.from_json(system.to_json())
            assert back == system and back.contract == system.contract
        assert verify(System.from_json(plain.to_json())).require().ok


def test_schedules_are_emitted_when_asked_for() -> None:
    """Once; a pass asks for those that it needs."""
    system, emitted = counting()
    assert system[2] is system[2] and emitted == [2]
    assert system.contract.segments == 1 and emitted == [2]
    changed = system.with_pass(in_order)
    assert changed[1].is_in_order and emitted == [2, 1]
    assert len(changed.schedules()) == 4 and sorted(emitted) == [0, 1, 2, 3]


def test_peer_asks_for_the_ranks_of_its_node_only() -> None:
    system, emitted = counting("2x3")
    assert any(isinstance(op, Get) for op in system.with_node_pass(peer)[4].ops)
    assert sorted(emitted) == [3, 4, 5]


def test_passes_make_systems_that_are_proved() -> None:
    """The contract goes with the number of segments, and with the place of the input."""
    system, _ = counting("3+2")
    parts = system.with_pass(partial(cut, segments=3)).with_pass(staged)
    assert parts.contract.segments == 3 and verify(parts).require().ok
    assert verify(system.with_node_pass(peer).with_pass(in_order)).require().ok
    ring = system_of("allgather", "ring", {}, parse_layout("3+2")).in_place()
    assert ring.contract.in_place and verify(ring).require().ok
    assert ring == system_of("allgather", "ring", {}, parse_layout("3+2"), inplace=True)


def test_a_system_that_is_wrong_is_refuted() -> None:
    """By its own contract and topology, or by those that are given."""
    system, _ = counting()
    lazy = system.with_pass(lambda schedule: replace(schedule, ops=schedule.ops[1:] if schedule.rank else schedule.ops))
    assert not verify(lazy).ok
    assert not verify(system, Contract("allgather", 4)).ok
    with pytest.raises(ArgumentError, match="contract"):
        verify(system.schedules())


def test_systems_differ() -> None:
    system, _ = counting()
    assert system == counting()[0] != counting("4x1")[0]
    assert system != system.with_pass(in_order)
    assert system != "a system"


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(counting("1x2")[0].to_json()), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        edited(version=2),
        edited(node_of=[]),
        edited(node_of=3),
        edited(contract={"collective": "alltoall"}),
        edited(contract={"collective": "gossip", "size": 2}),
        edited(schedules=[]),
        edited(schedules=[{}, {}]),
    ],
)
def test_what_is_no_system_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="not a system"):
        System.from_json(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"op": "Send"', '"op": "Shout"'),
        ('"peer": 1', '"friend": 1'),
        ('"buffer": "send"', '"buffer": "sent"'),
        ('"range": [', '"ranges": {}, "range": ['),
        ('"deps": [', '"deps": ["x", '),
    ],
)
def test_operations_that_cannot_be_are_refused(old: str, new: str) -> None:
    text = counting("1x2")[0].to_json()
    assert old in text
    with pytest.raises(ScheduleError, match="not a system"):
        System.from_json(text.replace(old, new, 1))
