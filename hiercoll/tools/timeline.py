"""Pictures of a run of all ranks, simulated or measured: a space-time diagram, a trace, a traffic matrix.

The diagram (SVG) has a row per rank, grouped by node, and an arrow per message. The trace
is for https://ui.perfetto.dev or chrome://tracing. Rows and threads are split into as
few sub-lanes as keep apart what runs at the same time.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hiercoll.errors import ArgumentError
from hiercoll.model.simulate import Event
from hiercoll.schedule import (
    INCOMING,
    MESSAGES,
    OUTGOING,
    Copy,
    Get,
    Join,
    Op,
    Recv,
    Reduce,
    Schedule,
    Send,
    reads,
    writes,
)
from hiercoll.topology import Topology
from hiercoll.units import format_time
from hiercoll.verify import describe

# Okabe and Ito's palette: its hues stay apart for all common kinds of colour blindness.
KINDS = {
    "near": ("send within a node", "#0072B2"),
    "far": ("send between nodes", "#D55E00"),
    "recv": ("receive", "#9FD3F2"),
    "copy": ("copy", "#009E73"),
    "reduce": ("reduce", "#CC79A7"),
    "flag": ("flag, wait", "#8C8C8C"),
}
ARROWS = {"near": ("message within a node", "#1F6FA8"), "far": ("message between nodes", "#B02A00")}

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1200, 104, 24, 66, 42  # of the picture and its margins, in pixels
LANE, ROW, GAP, NODE_GAP = 9.0, 12.0, 3.0, 6.0  # height of a sub-lane at most, of a row at least; space between
HEIGHT = 1600  # that all sub-lanes together may take
SLIVER = 1.5  # width of the shortest bar, in pixels


class _Bar(NamedTuple):
    """An operation as it is drawn, in a sub-lane of its rank; times count from the first event."""

    rank: int
    op: Op
    kind: str
    begin: float
    end: float
    lane: int


def to_svg(schedules: Sequence[Schedule], topology: Topology, events: Sequence[Event], title: str) -> str:
    """A space-time diagram of ``events`` (seconds), as a self-contained SVG document.

    Time runs to the right from the first event on. Raises ArgumentError if schedules,
    topology and events do not belong together.
    """
    title = "".join(filter(str.isprintable, title))  # XML has no way to write control characters
    span = max((e.end for e in events), default=0.0) - min((e.begin for e in events), default=0.0) or 1e-6
    bars = _bars(schedules, topology, events, least=span * SLIVER / (WIDTH - LEFT - RIGHT))
    frame = _frame(topology, bars, span)
    size = {"width": str(WIDTH), "height": _px(frame.bottom + BOTTOM)}
    box = f"0 0 {WIDTH} {size['height']}"
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, "role": "img", **size})
    root.set("font-family", "Helvetica, Arial, sans-serif")
    ET.SubElement(root, "title").text = title
    for kind, (_, colour) in ARROWS.items():
        _arrow_head(root, kind, colour)
    ET.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    _text(root, 12, 24, title, {"font-size": "15", "font-weight": "bold"})
    messages = _messages(bars)
    _legend(root, {bar.kind for bar in bars}, {send.kind for send, _ in messages})
    _rows(root, frame, topology)
    _axis(root, frame)
    for bar in bars:
        _draw_bar(root, frame, bar)
    _draw_messages(root, frame, messages)
    return ET.tostring(root).decode("ascii")  # other characters as references: right in a file of any encoding


def to_trace(schedules: Sequence[Schedule], topology: Topology, events: Sequence[Event], name: str) -> dict[str, Any]:
    """``events`` (seconds) as a Chrome trace, to be written as JSON; times in it are in us.

    A process per node, named after it, and for each rank a thread per sub-lane. Flow
    events need slices on threads to hold on to, so operations that overlap are complete
    events in sub-lanes of their own and not asynchronous events: those would be drawn
    apart from their rank, and without arrows. Raises ArgumentError as `to_svg` does.
    """
    whole = [Event(e.rank, e.op, round(e.begin * 1e9), round(e.end * 1e9)) for e in events]  # ns: the viewer's unit
    bars = _bars(schedules, topology, whole, least=1)
    lanes = max((bar.lane + 1 for bar in bars), default=1)
    place = {bar: _thread(topology, bar.rank, bar.lane, lanes) for bar in bars}
    trace: list[dict[str, Any]] = []
    for bar in bars:
        times = {"ts": _us(bar.begin), "dur": _us(bar.end - bar.begin)}
        label = {"name": _short(bar.op), "cat": KINDS[bar.kind][0], "args": _args(bar.op)}
        trace.append({"ph": "X", **label, **place[bar], **times})
    for number, (send, recv) in enumerate(_messages(bars), 1):
        flow = {"name": "message", "cat": ARROWS[send.kind][0], "id": number, "bp": "e"}
        trace.append({"ph": "s", **flow, **place[send], "ts": _us(send.begin)})
        trace.append({"ph": "f", **flow, **place[recv], "ts": _us(max(recv.begin, recv.end - 1))})
    trace.sort(key=lambda event: float(event["ts"]))  # stable: a slice stays before the arrows that begin with it
    return {
        "traceEvents": _names(topology, bars, lanes) + trace,
        "displayTimeUnit": "ns",
        "otherData": {"name": name, "layout": str(topology)},
    }


def traffic_matrix(schedules: Sequence[Schedule]) -> npt.NDArray[np.float64]:
    """Blocks sent, by [source, destination]; fractions where segments travel alone, and double ones of elements that
    are twice as long."""
    blocks = np.zeros((len(schedules), len(schedules)))
    for rank, schedule in enumerate(schedules):
        for op in schedule.ops:
            if isinstance(op, Send):
                blocks[rank, op.peer] += schedule.extent(op.region)
    return blocks


def matrix_text(schedules: Sequence[Schedule], topology: Topology) -> str:
    """The traffic matrix in blocks, to be printed: rank by rank up to 32 ranks, else node by node.

    Rows are sources. Ranks of a node stand together. Raises ArgumentError if there is not
    one schedule per rank.
    """
    _check(schedules, topology, ())
    matrix = traffic_matrix(schedules)
    if topology.size > 32:
        member = np.eye(len(topology.nodes))[list(topology.node_of)]  # [rank, node]: 1 where the rank is of the node
        names = [str(node) for node in range(len(topology.nodes))]
        return "blocks from node (row) to node (column)\n" + _grid(member.T @ matrix @ member, names, [len(names)])
    order = [rank for ranks in topology.nodes for rank in ranks]
    grid = _grid(matrix[np.ix_(order, order)], list(map(str, order)), topology.node_sizes)
    return "blocks from rank (row) to rank (column)\n" + grid


def _grid(matrix: npt.NDArray[np.float64], names: Sequence[str], groups: Sequence[int]) -> str:
    """A table with lines between groups of rows and of columns."""
    cells = [[f"{value:.4g}" if value else "." for value in row] for row in matrix]
    width = 1 + max(len(text) for text in (*names, *(cell for row in cells for cell in row)))
    ends = np.cumsum(groups).tolist()

    def line(head: str, entries: Sequence[str]) -> str:
        pieces = [
            "".join(text.rjust(width) for text in entries[end - n : end]) for n, end in zip(groups, ends, strict=False)
        ]
        return head.rjust(width) + " |" + " |".join(pieces)

    rule = "-" * (width + 1) + "+" + "-+".join("-" * (n * width) for n in groups)
    lines = [line("", names)]
    for i, row in enumerate(cells):
        lines += [rule] if i in (0, *ends) else []
        lines.append(line(names[i], row))
    return "\n".join(lines)


# What is drawn.


def _check(schedules: Sequence[Schedule], topology: Topology, events: Sequence[Event]) -> None:
    if len(schedules) != topology.size:
        raise ArgumentError("schedules", f"one for each of {topology.size} ranks", len(schedules))
    for event in events:
        if not (0 <= event.rank < len(schedules) and 0 <= event.op < len(schedules[event.rank].ops)):
            raise ArgumentError("events", "operations of the schedules", event)


def _kind(topology: Topology, rank: int, op: Op) -> str | None:
    """The class of an operation, None for those that take no time."""
    if isinstance(op, OUTGOING):
        return "near" if topology.node_of[rank] == topology.node_of[op.peer] else "far"
    if isinstance(op, INCOMING):
        return "recv"
    if isinstance(op, (Copy, Get)):
        return "copy" if op.source.blocks else None
    if isinstance(op, Reduce):
        return "reduce"
    return None if isinstance(op, Join) else "flag"


def _bars(schedules: Sequence[Schedule], topology: Topology, events: Sequence[Event], least: float) -> list[_Bar]:
    """Operations that take time, by their begin, at least ``least`` long, in the fewest sub-lanes."""
    _check(schedules, topology, events)
    origin = min((event.begin for event in events), default=0.0)
    busy: list[list[float]] = [[] for _ in schedules]  # until when each sub-lane of each rank is taken
    bars = []
    for event in sorted(events, key=lambda event: (event.begin, event.end)):
        op = schedules[event.rank].ops[event.op]
        kind = _kind(topology, event.rank, op)
        if kind is None:
            continue
        begin, lanes = event.begin - origin, busy[event.rank]
        end = max(event.end - origin, begin + least)
        lane = next((i for i, until in enumerate(lanes) if until <= begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        bars.append(_Bar(event.rank, op, kind, begin, end, lane))
    return bars


def _messages(bars: Sequence[_Bar]) -> list[tuple[_Bar, _Bar]]:
    """Each send with its receive, where both were recorded."""
    recvs = {(bar.op.peer, bar.rank, bar.op.tag): bar for bar in bars if isinstance(bar.op, INCOMING)}
    sends = {(bar.rank, bar.op.peer, bar.op.tag): bar for bar in bars if isinstance(bar.op, OUTGOING)}
    return [(send, recvs[key]) for key, send in sends.items() if key in recvs]


# The space-time diagram.


@dataclass(frozen=True)
class _Frame:
    """Where things are, in pixels."""

    span: float  # seconds
    lane: float  # height of a sub-lane
    rows: dict[int, tuple[float, float]]  # rank -> top and height
    bottom: float

    def x(self, seconds: float) -> float:
        return LEFT + seconds / self.span * (WIDTH - LEFT - RIGHT)

    def y(self, bar: _Bar) -> float:
        """The middle of the bar."""
        return self.rows[bar.rank][0] + (bar.lane + 0.5) * self.lane


def _frame(topology: Topology, bars: Sequence[_Bar], span: float) -> _Frame:
    lanes = [1] * topology.size
    for bar in bars:
        lanes[bar.rank] = max(lanes[bar.rank], bar.lane + 1)
    lane = min(LANE, HEIGHT / sum(lanes))
    rows, y = {}, float(TOP)
    for ranks in topology.nodes:
        y += NODE_GAP
        for rank in ranks:
            rows[rank] = (y, max(ROW, lanes[rank] * lane))
            y += rows[rank][1] + GAP
    return _Frame(span, lane, rows, y)


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(parent: ET.Element, x: float, y: float, text: str, style: dict[str, str]) -> None:
    element = ET.SubElement(parent, "text", {"x": _px(x), "y": _px(y), "font-size": "11", "fill": "#222222", **style})
    element.text = text


def _line(
    parent: ET.Element, start: tuple[float, float], end: tuple[float, float], style: dict[str, str]
) -> ET.Element:
    ends = {"x1": _px(start[0]), "y1": _px(start[1]), "x2": _px(end[0]), "y2": _px(end[1])}
    return ET.SubElement(parent, "line", {**ends, **style})


def _rect(parent: ET.Element, x: float, y: float, size: tuple[float, float], style: dict[str, str]) -> ET.Element:
    box = {"x": _px(x), "y": _px(y), "width": _px(size[0]), "height": _px(size[1])}
    return ET.SubElement(parent, "rect", {**box, **style})


def _arrow_head(root: ET.Element, kind: str, colour: str) -> None:
    shape = {"viewBox": "0 0 8 8", "refX": "8", "refY": "4", "markerWidth": "5", "markerHeight": "5", "orient": "auto"}
    head = ET.SubElement(ET.SubElement(root, "defs"), "marker", {"id": f"head-{kind}", **shape})
    ET.SubElement(head, "path", {"d": "M0,0.5 L8,4 L0,7.5 z", "fill": colour})


def _legend(root: ET.Element, kinds: set[str], messages: set[str]) -> None:
    """A line above the diagram, with what occurs in it."""
    x, y, group = 12.0, 48.0, ET.SubElement(root, "g", {"class": "legend"})
    for kind, (label, colour) in KINDS.items():
        if kind in kinds:
            _rect(group, x, y - 9, (14, 9), {"fill": colour})
            _text(group, x + 19, y, label, {})
            x += 19 + 6.4 * len(label) + 16
    for kind, (label, colour) in ARROWS.items():
        if kind in messages:
            _line(group, (x, y - 4), (x + 22, y - 4), _message_style(kind, colour, 1))
            _text(group, x + 27, y, label, {})
            x += 27 + 6.4 * len(label) + 16


def _rows(root: ET.Element, frame: _Frame, topology: Topology) -> None:
    """A band per node and a line above each rank but the first, with their names."""
    for node, ranks in enumerate(topology.nodes):
        top, (last, height) = frame.rows[ranks[0]][0] - GAP / 2, frame.rows[ranks[-1]]
        size = (WIDTH - RIGHT - 8, last + height + GAP / 2 - top)
        _rect(root, 8, top, size, {"fill": "#EEF1F5" if node % 2 == 0 else "#F8F5EE", "class": "node"})
        _text(root, 14, top + size[1] / 2 + 4, f"node {node}", {"font-weight": "bold"})
        for rank in ranks:
            y, height = frame.rows[rank]
            if rank != ranks[0]:
                _line(root, (60, y - GAP / 2), (WIDTH - RIGHT, y - GAP / 2), {"stroke": "white"})
            _text(root, LEFT - 6, y + height / 2 + 3.5, f"rank {rank}", {"text-anchor": "end", "font-size": "10"})


def _axis(root: ET.Element, frame: _Frame) -> None:
    """Round times along the bottom, with faint lines through the rows."""
    unit, factor = next(
        (u, f) for u, f, limit in (("us", 1e6, 1e-3), ("ms", 1e3, 1), ("s", 1, math.inf)) if frame.span < limit
    )
    step = _round_step(frame.span / 8)
    for i in range(int(frame.span / step * (1 + 1e-9)) + 1):
        x = frame.x(i * step)
        _line(root, (x, TOP), (x, frame.bottom + 4), {"stroke": "#C4C8CE", "stroke-width": "0.6"})
        label = f"{i * step * factor:g}" + (f" {unit}" if i == 0 else "")
        _text(root, x, frame.bottom + 18, label, {"text-anchor": "middle"})


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, .. that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)


def _draw_bar(root: ET.Element, frame: _Frame, bar: _Bar) -> None:
    x, height = frame.x(bar.begin), frame.lane * 0.8
    size = (frame.x(bar.end) - x, height)
    rect = _rect(root, x, frame.y(bar) - height / 2, size, {"fill": KINDS[bar.kind][1], "class": f"bar {bar.kind}"})
    times = f"{format_time(bar.begin)} to {format_time(bar.end)}"
    ET.SubElement(rect, "title").text = f"rank {bar.rank}: {describe(bar.op)}, {times}"


def _message_style(kind: str, colour: str, count: int) -> dict[str, str]:
    """The more messages there are, the fainter is each."""
    strength = min(1.0, math.sqrt(60 / count))
    width, opacity = (1.5, 0.95) if kind == "far" else (1.0, 0.7)
    width, opacity = max(0.4, width * strength), max(0.1, opacity * strength)
    style = {"stroke": colour, "stroke-width": f"{width:.2f}", "stroke-opacity": f"{opacity:.2f}"}
    return {**style, "marker-end": f"url(#head-{kind})"}


def _draw_messages(root: ET.Element, frame: _Frame, messages: Sequence[tuple[_Bar, _Bar]]) -> None:
    """Arrows from a send's begin to its receive's end, those between nodes on top."""
    for kind in ("near", "far"):
        style = {"class": f"message {kind}", **_message_style(kind, ARROWS[kind][1], len(messages) or 1)}
        for send, recv in messages:
            if send.kind == kind and isinstance(send.op, OUTGOING):
                start, end = (frame.x(send.begin), frame.y(send)), (frame.x(recv.end), frame.y(recv))
                what = send.op.region if isinstance(send.op, Send) else type(send.op).__name__.lower()
                text = f"rank {send.rank} to rank {recv.rank}: {what} (tag {send.op.tag})"
                ET.SubElement(_line(root, start, end, style), "title").text = text


# The trace.


def _thread(topology: Topology, rank: int, lane: int, lanes: int) -> dict[str, int]:
    """Process and thread of a sub-lane. Both count from 1: viewers take 0 for the kernel's idle task."""
    return {"pid": topology.node_of[rank] + 1, "tid": rank * 10 ** len(str(lanes)) + lane + 1}


def _us(ns: float) -> float:
    """us with a bit on top: viewers cut off at whole ns, where 12.345 may be a bit less than that."""
    return round(ns / 1000 + 0.0002, 4)


def _short(op: Op) -> str:
    """The operation in a few words that fit a slice."""
    words = {"Send": "send to", "Offer": "offer to", "Notify": "notify", "Recv": "receive from"}
    words |= {"AcceptOffer": "offer from", "AwaitNotice": "notice from"}
    return f"{words[type(op).__name__]} {op.peer}" if isinstance(op, MESSAGES) else describe(op).split(" of ")[0]


def _args(op: Op) -> dict[str, Any]:
    """What the viewer shows of a chosen operation."""
    args: dict[str, Any] = {"operation": describe(op)}
    if isinstance(op, Send | Recv):
        return {**args, "region": str(op.region), "peer": op.peer, "tag": op.tag}
    if isinstance(op, MESSAGES):
        return {**args, "peer": op.peer, "tag": op.tag}
    regions = {"reads": " ".join(map(str, reads(op))), "writes": " ".join(map(str, writes(op)))}
    return {**args, **{key: text for key, text in regions.items() if text}}


def _names(topology: Topology, bars: Sequence[_Bar], lanes: int) -> list[dict[str, Any]]:
    """Metadata: the names of nodes and ranks, and their order."""
    used = sorted({(bar.rank, bar.lane) for bar in bars} | {(rank, 0) for rank in range(topology.size)})
    names: list[dict[str, Any]] = []
    for node, ranks in enumerate(topology.nodes):
        process = _thread(topology, ranks[0], 0, lanes)
        names.append({"ph": "M", "name": "process_name", **process, "args": {"name": f"node {node}"}})
        names.append({"ph": "M", "name": "process_sort_index", **process, "args": {"sort_index": node}})
    for index, (rank, lane) in enumerate(used):
        thread, name = _thread(topology, rank, lane, lanes), f"rank {rank}" + (f" ({lane + 1})" if lane else "")
        names.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": name}})
        names.append({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": index}})
    return names
