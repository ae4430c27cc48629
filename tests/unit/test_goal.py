"""GOAL files, read back: every send has its receive, nothing waits in a circle, and the bytes are the schedule's."""

from __future__ import annotations

import re
from collections import Counter
from graphlib import TopologicalSorter

import pytest
from entries import each_entry, small_systems

from hiercoll.algorithms import Algorithm
from hiercoll.errors import ArgumentError, ScheduleError
from hiercoll.model.goal import to_goal
from hiercoll.model.machine import Machine, Parameters
from hiercoll.schedule import MESSAGES, RECV, SEND, Builder, Join, Schedule, Send
from hiercoll.schedule.transports import Transport
from hiercoll.tools.proving import generate
from hiercoll.topology import parse_layout

LINES = {
    "operation": re.compile(r"(?P<label>[a-zA-Z][a-zA-Z0-9_]*): (?P<what>.*)"),
    "requires": re.compile(r"(?P<label>[a-zA-Z][a-zA-Z0-9_]*) requires (?P<other>[a-zA-Z][a-zA-Z0-9_]*)"),
    "rank": re.compile(r"rank (?P<rank>\d+) \{"),
    "end": re.compile(r"\}"),
    "empty": re.compile(r""),
}
WHAT = re.compile(
    r"calc (?P<ns>\d+)|(?P<way>send (?=\d+b to)|recv (?=\d+b from))(?P<size>\d+)b \w+ (?P<peer>\d+) tag (?P<tag>\d+)"
)


class Goal:
    """A file as the simulators' reader takes it: labels are known before they are named."""

    def __init__(self, text: str) -> None:
        head, *lines = text.splitlines()
        self.ranks = int(head.removeprefix("num_ranks "))
        self.ops: dict[tuple[int, str], re.Match[str]] = {}
        self.after: dict[tuple[int, str], set[tuple[int, str]]] = {}
        self.blocks: list[int] = []
        rank = -1
        for line in lines:
            [(kind, found)] = [(kind, m) for kind, form in LINES.items() if (m := form.fullmatch(line))]
            assert (kind in ("rank", "empty")) == (rank < 0), line
            if kind == "rank":
                rank = int(found["rank"])
                self.blocks.append(rank)
            elif kind == "end":
                rank = -1
            elif kind == "operation":
                assert (rank, found["label"]) not in self.ops
                what = WHAT.fullmatch(found["what"])
                assert what, line
                self.ops[rank, found["label"]], self.after[rank, found["label"]] = what, set()
            elif kind == "requires":
                assert (rank, found["other"]) in self.ops
                self.after[rank, found["label"]].add((rank, found["other"]))
        assert rank == -1

    def ends(self, way: str) -> dict[tuple[int, int, int], tuple[int, tuple[int, str]]]:
        """Bytes and label of the operations that send, or receive, by source, destination and tag."""
        found = {}
        for (rank, label), what in self.ops.items():
            if what["way"] == f"{way} ":
                pair = (rank, int(what["peer"])) if way == "send" else (int(what["peer"]), rank)
                key = (*pair, int(what["tag"]))
                assert key not in found, key
                found[key] = int(what["size"]), (rank, label)
        return found

    def check(self) -> None:
        """Every message has both ends and one size; no operation comes after itself."""
        sends, receives = self.ends("send"), self.ends("recv")
        assert sends.keys() == receives.keys()
        assert {key: size for key, (size, _) in sends.items()} == {key: size for key, (size, _) in receives.items()}
        graph = {op: set(before) for op, before in self.after.items()}
        for key, (_, into) in receives.items():
            graph[into].add(sends[key][1])
        list(TopologicalSorter(graph).static_order())


def sizes(schedules: list[Schedule], block: int) -> Counter[tuple[int, int, int]]:
    """Bytes of each message that has any: blocks, or sizes of blocks."""
    found: Counter[tuple[int, int, int]] = Counter()
    for s in schedules:
        for op in s.ops:
            if isinstance(op, Send):
                nbytes = 8 if op.region.buffer == "sizes" else block // (1 if op.region.part is None else s.segments)
                found[s.rank, op.peer, op.tag] = op.region.size * nbytes
    return found


@each_entry
def test_every_algorithm_can_be_read_back(entry: Algorithm) -> None:
    """In all variants; operations, dependencies and bytes are those of the schedules."""
    for topology, _, schedules in small_systems(entry):
        goal = Goal(to_goal(schedules, topology, 120))
        goal.check()
        assert goal.ranks == topology.size and goal.blocks == list(range(topology.size))
        found = Counter({key: size for key, (size, _) in goal.ends("send").items()})
        assert +found == +sizes(schedules, 120)
        for s in schedules:
            for index, op in enumerate(s.ops):
                before = {(s.rank, f"l{dep + 1}") for dep in op.deps}
                assert before <= goal.after[s.rank, f"l{index + 1}"]
                assert (goal.ops[s.rank, f"l{index + 1}"]["ns"] is None) == isinstance(op, MESSAGES)
                if isinstance(op, Join):
                    assert goal.ops[s.rank, f"l{index + 1}"]["ns"] == "0"


@pytest.mark.parametrize("transport", [Transport(peer=True), Transport(segments=1, shared=True)], ids=str)
def test_gets_and_notices(transport: Transport) -> None:
    """Of messages within a node, nothing but notices is left."""
    topology = parse_layout("2x2")
    schedules = generate("alltoall", "pairwise", {"exchange": "rotation"}, topology, transport=transport)
    goal = Goal(to_goal(schedules, topology, 100))
    goal.check()
    for (source, target, _), (size, _) in goal.ends("send").items():
        assert size == (0 if topology.node_of[source] == topology.node_of[target] else 100)


def test_a_file_in_full() -> None:
    """A message, a copy of 10 bytes (2 s, and 1 s a byte), a flag that two wait for, one of them twice."""
    first, second, third = (Builder(rank) for rank in range(3))
    first.send(1, SEND[0], tag=3)
    first.signal(1, after=[first.copy(SEND[0], RECV[0])])
    second.recv(0, RECV[0], tag=3)
    second.wait([0], 1, after=[second.wait([0], 1)])
    third.wait([0], 1, after=[third.wait([0], 0, previous=True)])
    machine = Machine("slow", Parameters(piece=2.0, line=0.0, copy_byte=1.0))
    schedules = [b.build() for b in (first, second, third)]
    text = """\
num_ranks 3

rank 0 {
l1: send 10b to 1 tag 3
l2: calc 12000000000
l3: calc 0
l3 requires l2
l3to1: send 0b to 1 tag 5
l3to1 requires l3
l3to2: send 0b to 2 tag 5
l3to2 requires l3
}

rank 1 {
f1: recv 0b from 0 tag 5
l1: recv 10b from 0 tag 3
l2: calc 0
l2 requires f1
l3: calc 0
l3 requires l2
l3 requires f1
}

rank 2 {
f1: recv 0b from 0 tag 5
l1: calc 0
l2: calc 0
l2 requires l1
l2 requires f1
}
"""
    assert to_goal(schedules, parse_layout("3"), 10, machine) == text
    Goal(text).check()


def test_what_cannot_be_written() -> None:
    """Flags that nobody raises, too few schedules, negative sizes."""
    waiting = Builder(0)
    waiting.wait([1], 0)
    schedules = [waiting.build(), Builder(1).build()]
    with pytest.raises(ScheduleError, match="rank 0 waits for flag 0 of rank 1, which is never raised"):
        to_goal(schedules, parse_layout("2"), 8)
    with pytest.raises(ArgumentError, match="schedules: expected those of ranks 0 to 2"):
        to_goal(schedules, parse_layout("3"), 8)
    with pytest.raises(ArgumentError, match="block: expected at least 0 bytes"):
        to_goal([Builder(0).build()], parse_layout("1"), -1)
