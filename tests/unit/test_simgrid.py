"""Traces for SimGrid, read back: every message has two ends that are waited for, and no rank waits for ever."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from entries import each_entry, small_systems

from hiercoll.algorithms import Algorithm
from hiercoll.errors import ArgumentError, ConstraintError
from hiercoll.model.machine import Machine, Parameters
from hiercoll.model.simgrid import platform, star, traces
from hiercoll.schedule import RECV, SEND, SIZE_BUFFERS, Builder, Copy, Reduce, Region, Schedule, Send
from hiercoll.schedule.transports import Transport
from hiercoll.tools.proving import generate
from hiercoll.topology import Topology, parse_layout

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import simgrid_check
import sweep

STAR = star(latency=1.0, byte=0.5, adapter=0.25)


def replayed(texts: list[str]) -> Counter[tuple[int, int, int, int]]:
    """Source, target, tag and bytes of the messages of traces, in which a send ends only with its receive."""
    begun: set[tuple[str, int, int, int]] = set()
    sizes: dict[tuple[int, int, int], set[int]] = {}
    waited: Counter[tuple[int, tuple[int, int, int]]] = Counter()

    def run(rank: int, text: str) -> Iterator[None]:
        lines = [line.split() for line in text.splitlines()]
        assert {line[0] for line in lines} == {str(rank)}
        assert lines[0][1:] == ["init"] and lines[-1][1:] == ["finalize"]
        for _, what, *values in lines[1:-1]:
            if what in ("isend", "irecv"):
                peer, tag, size = map(int, values)
                key = (rank, peer, tag) if what == "isend" else (peer, rank, tag)
                assert (what, *key) not in begun
                begun.add((what, *key))
                sizes.setdefault(key, set()).add(size)
            elif what == "wait":
                key = (int(values[0]), int(values[1]), int(values[2]))
                waited[rank, key] += 1
                while not {("isend", *key), ("irecv", *key)} <= begun:
                    yield
            else:
                assert what == "compute" and float(values[0]) > 0

    running = [run(rank, text) for rank, text in enumerate(texts)]
    while running:
        before = len(begun) + waited.total()
        running = [each for each in running if next(each, "done") != "done"]
        assert not running or len(begun) + waited.total() > before, "no rank goes on"
    assert len(begun) == 2 * len(sizes) == waited.total() and set(waited.values()) <= {1}
    return Counter((*key, size) for key, both in sizes.items() for size in both)


def bytes_of(region: Region, schedule: Schedule, topology: Topology) -> int:
    """Of a message: blocks of 120 bytes, parts of such, or rows of sizes."""
    if region.buffer in SIZE_BUFFERS:
        return region.size * schedule.row_bytes(topology.size)
    return region.size * 120 // (1 if region.part is None else schedule.segments)


@each_entry
def test_every_algorithm_can_be_replayed(entry: Algorithm) -> None:
    """But those with flags. Messages and bytes are those of the schedules."""
    for topology, _, schedules in small_systems(entry):
        if any(s.flags for s in schedules):
            with pytest.raises(ConstraintError, match=r"(Signal|Wait) of rank"):
                list(traces(schedules, topology, 120, STAR))
            continue
        found = replayed(list(traces(schedules, topology, 120, STAR)))
        sent = Counter(
            (s.rank, op.peer, op.tag, bytes_of(op.region, s, topology))
            for s in schedules
            for op in s.ops
            if isinstance(op, Send)
        )
        assert found == sent


def test_a_trace_in_full() -> None:
    """Messages go on until something waits for them; copies take their time; the last are waited for at the end."""
    b, other = Builder(0), Builder(1)
    arrived = b.recv(1, RECV[0], tag=3)
    b.send(1, SEND[0:2], tag=4)
    b.copy(RECV[0], RECV[1], after=[arrived])
    other.send(0, SEND[0], tag=3)
    other.recv(0, RECV[0:2], tag=4)
    slow = Machine("slow", Parameters(piece=2e-9, line=0.0, copy_byte=1e-9))
    schedules = [b.build(), other.build()]
    text, _ = traces(schedules, parse_layout("2"), 10, slow)
    assert text.splitlines() == [
        "0 init",
        "0 irecv 1 3 10",
        "0 isend 1 4 20",
        "0 wait 1 0 3",
        "0 compute 12.000",
        "0 wait 0 1 4",
        "0 finalize",
    ]
    free, _ = traces(schedules, parse_layout("2"), 10, STAR)
    assert "compute" not in free


def test_the_order_is_that_of_a_run() -> None:
    """What is listed first need not come first: rank 0 is done with rank 2 before rank 1 has anything to send."""
    first, second, third = (Builder(rank) for rank in range(3))
    late = first.recv(1, RECV[0], tag=1)
    first.send(1, SEND[0], tag=2, after=[late])
    early = first.recv(2, RECV[1], tag=3)
    first.send(2, SEND[1], tag=4, after=[early])
    second.send(0, SEND[0], tag=1, after=[second.recv(2, RECV[0], tag=5)])
    second.recv(0, RECV[1], tag=2)
    third.send(0, SEND[0], tag=3)
    third.send(1, SEND[1], tag=5, after=[third.recv(0, RECV[0], tag=4)])
    schedules = [b.build() for b in (first, second, third)]
    texts = list(traces(schedules, parse_layout("3"), 10, STAR))
    assert len(replayed(texts)) == 5
    lines = texts[0].splitlines()
    assert lines.index("0 wait 2 0 3") < lines.index("0 isend 2 4 10") < lines.index("0 wait 1 0 1")


def test_computations_are_those_of_the_schedule() -> None:
    """One for each copy and reduction."""
    topology = parse_layout("2x2")
    schedules = generate("allreduce", "ring", {}, topology)
    for schedule, text in zip(schedules, traces(schedules, topology, 8, Machine("usual")), strict=True):
        assert text.count("compute") == sum(isinstance(op, (Copy, Reduce)) for op in schedule.ops) > 0


def test_what_cannot_be_replayed() -> None:
    """Gets, and machines of which SimGrid has no words for something."""
    topology = parse_layout("2x2")
    schedules = generate("alltoall", "pairwise", {"exchange": "rotation"}, topology, transport=Transport(peer=True))
    with pytest.raises(ConstraintError, match="Get of rank 0"):
        list(traces(schedules, topology, 100, STAR))
    posted = replace(STAR, parameters=replace(STAR.parameters, posted=0.4))
    for machine in (Machine("usual"), posted):
        with pytest.raises(ArgumentError, match="one that `star` has made"):
            platform(topology, machine)


def test_a_platform() -> None:
    """Links of ranks on all routes, those of nodes between nodes; rates and latencies are the machine's."""
    root = ElementTree.fromstring(platform(parse_layout("2+1"), STAR))
    zone = root.find("zone")
    assert zone is not None and [host.get("id") for host in zone.iter("host")] == ["r0", "r1", "r2"]
    rates = {link.get("id"): link.get("bandwidth") for link in zone.iter("link")}
    assert rates["r2-in"] == "2.0Bps" and rates["n1-out"] == "4.0Bps" and len(rates) == 1 + 2 * 3 + 2 * 2
    latencies = {link.get("latency") for link in zone.iter("link") if link.get("id") != "latency"}
    assert latencies == {"0s"} and zone.find("link[@id='latency']").get("latency") == "1.0s"  # type: ignore[union-attr]
    routes = {(route.get("src"), route.get("dst")): [link.get("id") for link in route] for route in zone.iter("route")}
    assert len(routes) == 6 and routes["r0", "r1"] == ["latency", "r0-out", "r1-in"]
    assert routes["r2", "r0"] == ["latency", "r2-out", "r0-in", "n1-out", "n0-in"]


def test_the_sweep_says_that_simgrid_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, and goes on; where it is there, the sweep compares with it."""
    monkeypatch.setattr(simgrid_check.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["simgrid_check.py"])
    assert simgrid_check.main() == 0
    assert "there is no smpirun" in capsys.readouterr().out
    commands = [step.command for step in sweep.steps(Path("a"), Path("b"), Path("c"))]
    assert any("scripts/simgrid_check.py" in command for command in commands)
