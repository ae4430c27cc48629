"""Diagrams, traces and traffic matrices: everything that ran is in them, once, where it belongs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hiercoll.algorithms import get_algorithm
from hiercoll.errors import ArgumentError
from hiercoll.model.cost import count_rank
from hiercoll.model.simulate import Event, simulate
from hiercoll.schedule import Copy, Join, Recv, Reduce, Schedule, Send
from hiercoll.tools import timeline
from hiercoll.topology import Topology, parse_layout

SVG = "{http://www.w3.org/2000/svg}"
CASES = [
    (collective, name, params, layout)
    for layout in ("2x3", "5+3:cyclic")
    for collective, name, params in (
        ("alltoall", "hierarchical", {}),
        ("alltoall", "grouped", {"memory": "shared"}),
        ("alltoall", "bruck", {}),
        ("allgather", "hierarchical", {}),
        ("allgather", "ring", {"segments": 3}),
        ("allgather", "shared", {}),
        ("allreduce", "ring", {}),
        ("bcast", "binomial", {"segments": 3}),
    )
]
every_case = pytest.mark.parametrize(("collective", "name", "params", "layout"), CASES)


def schedules_of(topology: Topology, collective: str, name: str, **params: int | str) -> list[Schedule]:
    algorithm = get_algorithm(collective, name)
    return [algorithm.schedule(topology, rank, params) for rank in range(topology.size)]


def drawn(schedules: list[Schedule]) -> list[tuple[int, object]]:
    """(rank, op) of the operations that take time."""
    ops = [(rank, op) for rank, schedule in enumerate(schedules) for op in schedule.ops]
    return [
        (r, op) for r, op in ops if not isinstance(op, Join) and not (isinstance(op, Copy) and not op.source.blocks)
    ]


def is_far(topology: Topology, rank: int, op: Send | Recv) -> bool:
    return topology.node_of[rank] != topology.node_of[op.peer]


def of_class(root: ET.Element, tag: str, name: str) -> list[ET.Element]:
    return [e for e in root.iter(SVG + tag) if name in e.get("class", "").split()]


def number(element: ET.Element, key: str) -> float:
    return float(element.attrib[key])


def tooltip(element: ET.Element) -> str:
    return element.findtext(SVG + "title", "")


def texts(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(SVG + "text")]


def check_disjoint(intervals: Iterable[tuple[float, float]], slack: float = 0.0) -> None:
    for (_, end), (begin, _) in pairwise(sorted(intervals)):
        assert begin >= end - slack


@every_case
def test_the_diagram_has_a_bar_per_operation(
    collective: str, name: str, params: dict[str, int | str], layout: str
) -> None:
    topology = parse_layout(layout)
    schedules = schedules_of(topology, collective, name, **params)
    root = ET.fromstring(timeline.to_svg(schedules, topology, simulate(schedules, topology, 3000), "a title"))
    bars = of_class(root, "rect", "bar")
    due = Counter(
        ("far" if is_far(topology, rank, op) else "near")
        if isinstance(op, Send)
        else "recv"
        if isinstance(op, Recv)
        else "copy"
        if isinstance(op, Copy)
        else "reduce"
        if isinstance(op, Reduce)
        else "flag"
        for rank, op in drawn(schedules)
    )
    assert Counter(bar.attrib["class"].split()[1] for bar in bars) == due
    lanes = defaultdict(list)
    for bar in bars:
        lanes[number(bar, "y")].append((number(bar, "x"), number(bar, "x") + number(bar, "width")))
        assert number(bar, "x") >= timeline.LEFT
        assert number(bar, "x") + number(bar, "width") <= timeline.WIDTH - timeline.RIGHT + 2
        assert number(bar, "width") >= timeline.SLIVER - 0.02
    for intervals in lanes.values():
        check_disjoint(intervals, slack=0.05)  # coordinates have two decimals


@every_case
def test_the_diagram_has_an_arrow_per_message(
    collective: str, name: str, params: dict[str, int | str], layout: str
) -> None:
    topology = parse_layout(layout)
    schedules = schedules_of(topology, collective, name, **params)
    root = ET.fromstring(timeline.to_svg(schedules, topology, simulate(schedules, topology, 3000), "a title"))
    sends = [(rank, op) for rank, op in drawn(schedules) if isinstance(op, Send)]
    arrows = of_class(root, "line", "message")
    assert len(arrows) == len(sends)
    assert len(of_class(root, "line", "far")) == sum(is_far(topology, rank, op) for rank, op in sends)
    expected = {f"rank {rank} to rank {op.peer}: {op.region} (tag {op.tag})" for rank, op in sends}
    assert {tooltip(arrow) for arrow in arrows} == expected
    starts = {
        (b.attrib["x"], round(number(b, "y") + number(b, "height") / 2, 1)) for b in of_class(root, "rect", "bar")
    }
    for arrow in arrows:
        assert (arrow.attrib["x1"], round(number(arrow, "y1"), 1)) in starts
        assert number(arrow, "x2") >= number(arrow, "x1")


def test_rows_and_words() -> None:
    topology = parse_layout("5+3:cyclic")
    schedules = schedules_of(topology, "alltoall", "hierarchical")
    root = ET.fromstring(timeline.to_svg(schedules, topology, simulate(schedules, topology, 64), "hierarchical"))
    words = texts(root)
    order = [f"rank {rank}" for rank in (0, 2, 4, 6, 7, 1, 3, 5)]
    assert [word for word in words if word.startswith("rank ")] == order
    assert [word for word in words if word.startswith("node ")] == ["node 0", "node 1"]
    assert "hierarchical" in words and "0 us" in words
    assert "send between nodes" in words and "message within a node" in words
    assert "reduce" not in words and "flag, wait" not in words  # the legend has what occurs
    assert "rank 0: copy send[0] to recv[0], 0 us to " in tooltip(of_class(root, "rect", "copy")[0])
    bands = of_class(root, "rect", "node")
    legend = [number(text, "y") for group in of_class(root, "g", "legend") for text in group.iter(SVG + "text")]
    assert len(bands) == 2 and max(legend) < min(number(band, "y") for band in bands)


def test_a_large_diagram_stays_within_bounds() -> None:
    topology = parse_layout("8x8")
    schedules = schedules_of(topology, "alltoall", "hierarchical")
    events = simulate(schedules, topology, 4096)
    root = ET.fromstring(timeline.to_svg(schedules, topology, events, "64 ranks"))
    assert number(root, "height") < 2500
    ys = sorted(number(text, "y") for text in root.iter(SVG + "text") if (text.text or "").startswith("rank "))
    assert len(ys) == 64 and min(b - a for a, b in pairwise(ys)) >= 12  # labels of 10 pixels do not touch
    faint = of_class(root, "line", "far")[0]
    few = schedules_of(parse_layout("2x2"), "alltoall", "hierarchical")
    small = ET.fromstring(timeline.to_svg(few, parse_layout("2x2"), simulate(few, parse_layout("2x2"), 64), ""))
    assert number(faint, "stroke-opacity") < number(of_class(small, "line", "far")[0], "stroke-opacity") / 2


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (60e-6, ["0 us", "10", "60"]),
        (7.9e-3, ["0 ms", "1", "7"]),
        (3.0, ["0 s", "0.5", "3"]),
        (1.5e-6, ["0 us", "0.2"]),
    ],
)
def test_the_axis_has_round_times(seconds: float, labels: list[str]) -> None:
    topology = Topology((0,))
    schedules = schedules_of(topology, "alltoall", "pairwise")
    words = texts(ET.fromstring(timeline.to_svg(schedules, topology, [Event(0, 0, 100.0, 100.0 + seconds)], "")))
    ticks = words[words.index("rank 0") + 1 :]
    assert ticks[0] == labels[0] and set(labels) <= set(ticks) and len(ticks) <= 9


def test_titles_are_escaped() -> None:
    topology = parse_layout("1x2")
    schedules = schedules_of(topology, "alltoall", "pairwise")
    title = "a<b & \"c\" > 'd' \u00b5s"
    text = timeline.to_svg(schedules, topology, simulate(schedules, topology, 8), title + "\x00\n")
    root = ET.fromstring(text)
    assert text.isascii()
    assert tooltip(root) == title and title in texts(root)


def test_nothing_to_draw() -> None:
    topology = Topology((0,))
    schedules = schedules_of(topology, "bcast", "binomial")
    root = ET.fromstring(timeline.to_svg(schedules, topology, [], "nothing"))
    assert "rank 0" in texts(root) and not of_class(root, "rect", "bar")
    assert [event["ph"] for event in timeline.to_trace(schedules, topology, [], "nothing")["traceEvents"]] == ["M"] * 4


def test_messages_of_which_one_side_was_not_recorded_have_no_arrow() -> None:
    topology = parse_layout("2x2")
    schedules = schedules_of(topology, "allgather", "ring")
    events = [event for event in simulate(schedules, topology, 64) if event.rank != 2]
    root = ET.fromstring(timeline.to_svg(schedules, topology, events, ""))
    due = sum(isinstance(op, Send) and 2 not in (rank, op.peer) for rank, op in drawn(schedules))
    assert len(of_class(root, "line", "message")) == due
    flows = [event for event in timeline.to_trace(schedules, topology, events, "")["traceEvents"] if event["ph"] == "s"]
    assert len(flows) == due


@every_case
def test_the_trace_is_whole(collective: str, name: str, params: dict[str, int | str], layout: str) -> None:
    topology = parse_layout(layout)
    schedules = schedules_of(topology, collective, name, **params)
    started = [e._replace(begin=e.begin + 5, end=e.end + 5) for e in simulate(schedules, topology, 3000)]
    trace = json.loads(json.dumps(timeline.to_trace(schedules, topology, started, name)))
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(drawn(schedules))
    assert 0 <= min(event["ts"] for event in slices) < 1  # us since the first event
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    nodes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = defaultdict(list)
    for event in slices:
        rank = int(names[event["pid"], event["tid"]].split()[1])
        assert nodes[event["pid"]] == f"node {topology.node_of[rank]}"
        assert event["pid"] > 0 and event["tid"] > 0
        # As viewers read them: whole ns, the rest cut off.
        begin, duration = int(event["ts"] * 1000), int(event["dur"] * 1000)
        assert duration > 0
        threads[event["tid"]].append((begin, begin + duration))
        if event["name"].startswith(("send", "receive")):
            assert {"region", "peer", "tag", "operation"} == event["args"].keys()
    for intervals in threads.values():
        check_disjoint(intervals)
    check_flows(events, threads, sum(isinstance(op, Send) for _, op in drawn(schedules)))


def check_flows(events: list[dict[str, Any]], threads: dict[int, list[tuple[int, int]]], messages: int) -> None:
    """Each flow begins and ends once, in that order in the file, within slices."""
    flows = [event for event in events if event["ph"] in "sf"]
    assert len(flows) == 2 * messages
    phases: dict[int, str] = defaultdict(str)
    for flow in flows:
        phases[flow["id"]] += flow["ph"]
        at = int(flow["ts"] * 1000)
        assert any(begin <= at < end for begin, end in threads[flow["tid"]])
        assert flow["bp"] == "e"
    assert set(phases.values()) <= {"sf"}
    assert [event.get("ts", -1) for event in events] == sorted(event.get("ts", -1) for event in events)


@every_case
def test_the_traffic_matrix_agrees_with_the_counts(
    collective: str, name: str, params: dict[str, int | str], layout: str
) -> None:
    topology = parse_layout(layout)
    schedules = schedules_of(topology, collective, name, **params)
    matrix = timeline.traffic_matrix(schedules)
    counts = [count_rank(schedule, topology) for schedule in schedules]
    np.testing.assert_allclose(matrix.sum(axis=1), [count.blocks for count in counts])
    np.testing.assert_allclose(matrix.sum(axis=0), [count.received_blocks for count in counts])
    node_of = np.array(topology.node_of)
    far = np.where(node_of[:, None] != node_of, matrix, 0)
    np.testing.assert_allclose(far.sum(axis=1), [count.network_blocks for count in counts])
    assert not matrix.diagonal().any()


def test_the_matrix_in_text() -> None:
    topology = parse_layout("2+1:cyclic")
    schedules = schedules_of(topology, "allgather", "direct")
    assert timeline.matrix_text(schedules, topology).splitlines() == [
        "blocks from rank (row) to rank (column)",
        "   | 0 2 | 1",
        "---+-----+--",
        " 0 | . 1 | 1",
        " 2 | 1 . | 1",
        "---+-----+--",
        " 1 | 1 1 | .",
    ]


def test_a_large_matrix_in_text_goes_by_nodes() -> None:
    topology = parse_layout("20+13:cyclic")
    schedules = schedules_of(topology, "alltoall", "pairwise")
    assert timeline.matrix_text(schedules, topology).splitlines() == [
        "blocks from node (row) to node (column)",
        "     |   0   1",
        "-----+--------",
        "   0 | 380 260",
        "   1 | 260 156",
    ]


def test_arguments_are_checked() -> None:
    topology = parse_layout("1x2")
    schedules = schedules_of(topology, "alltoall", "pairwise")
    with pytest.raises(ArgumentError, match="schedules: expected one for each of 2 ranks, got 1"):
        timeline.to_svg(schedules[:1], topology, [], "")
    with pytest.raises(ArgumentError, match="schedules: expected"):
        timeline.matrix_text(schedules[:1], topology)
    for event in (Event(2, 0, 0, 1), Event(0, 99, 0, 1), Event(-1, 0, 0, 1)):
        with pytest.raises(ArgumentError, match="events: expected operations of the schedules"):
            timeline.to_trace(schedules, topology, [event], "")
