"""Tuning tables: which algorithm to run, by MPI library, collective, memory, layout and size.

A table is a JSON file (format "hiercoll table", version 1) with an entry per collective and
setting. An entry says from which block size on which algorithm is chosen, and keeps what was
measured to find that out, so that tables can be checked, compared and used for layouts near
the one that they were made on. Sizes are bytes per block, times seconds.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hiercoll import settings
from hiercoll.algorithms import REGISTRY, Params, get_algorithm
from hiercoll.algorithms.registry import spelled
from hiercoll.collectives import AUTO, COLLECTIVES, NATIVE, tuned
from hiercoll.errors import ArgumentError, MachineError, TableError
from hiercoll.model.cost import DEFAULT_LINKS, Link, Links
from hiercoll.schedule.transports import parse_transport
from hiercoll.topology import MOST_RANKS, Topology

if TYPE_CHECKING:
    from hiercoll.model.machine import Machine

FORMAT, VERSION = "hiercoll table", 1
MODEL = "model"  # in place of a table's name
NATIVE_FORMS = ("nonblocking", "persistent")  # besides the blocking one; the second for plans only
# Libraries, and forms of their own collectives, that deliver wrong data. Intel MPI 2021.18.1 on 8 ranks of one host,
# started again and again by mpi4py alone: Allgather_init of 8 bytes is wrong, and crashes with 1 KiB; Bcast_init of
# 32 KiB ends in "Invalid communicator".
UNSOUND = {("Intel MPI", "persistent")}
PLACEMENTS = ("block", "cyclic", "irregular")
MEMORIES = ("host", "cuda")
# One call after a barrier; calls in a row; one call after other code and data: of public calls, and of held plans.
TIMINGS = SINGLE, ROW, COLD, PLAN, PLAN_ROW, PLAN_COLD = (
    "single", "row", "cold", "plan-single", "plan-row", "plan-cold"
)  # fmt: skip
OLD = "held plans in a row"  # the timing of figures that do not say theirs, native's too: not to be compared with calls
WAYS = {SINGLE: "one at a time", ROW: "in a row", COLD: "one at a time, after other code and data"}


@dataclass(frozen=True)
class Variant:
    """An algorithm with its parameters, on devices with the transport of its messages; or ``native``, the MPI library's
    own blocking call (``form=nonblocking``: the nonblocking one and a wait; ``form=persistent``: for plans)."""

    algorithm: str
    params: Params = field(default_factory=dict)
    transport: str = AUTO

    @property
    def is_native(self) -> bool:
        """Whether it is the MPI library's own call as a program makes it, the blocking one."""
        return self.algorithm == NATIVE and not self.params

    def is_sound(self, mpi: str) -> bool:
        """Whether an MPI library, by its name and version, delivers right data in that form of its own."""
        form = self.params.get("form") if self.algorithm == NATIVE else None
        return (mpi.rsplit(" ", 1)[0], form) not in UNSOUND

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies it."""
        return self.scheduled if self.transport == AUTO else (*self.scheduled, self.transport)

    @property
    def scheduled(self) -> tuple[object, ...]:
        """The same, however messages travel: the algorithm and its parameters."""
        return (self.algorithm, *sorted(self.params.items()))

    def spelled(self, collective: str) -> str:
        """The name with those parameters that differ from the defaults, and the transport."""
        record = COLLECTIVES.get(collective)
        entry = REGISTRY.get(record.family, {}).get(self.algorithm) if record else None
        name = entry.spelled(self.params) if entry else f"{self.algorithm} {spelled(self.params)}".strip()
        return name if self.transport == AUTO else f"{name} {self.transport}"

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        data: dict[str, Any] = {"algorithm": self.algorithm, "params": self.params}
        return data if self.transport == AUTO else {**data, "transport": self.transport}


NATIVE_VARIANT = Variant(NATIVE)


class Choice(NamedTuple):
    """``variant`` is chosen for blocks from ``start`` bytes on, up to the next choice."""

    start: int
    variant: Variant

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        return {"from": self.start, **self.variant.record()}


class Figure(NamedTuple):
    """What was measured of a variant: median and quartiles of ``samples`` times.

    ``timing``: of public calls one at a time ("single"), in a row ("row") or after other code and data
    ("cold"), or of a held plan ("plan-single" and "plan-row", started likewise). ``ranked``: measured anew after
    it had been selected, so that it can be compared with others of its timing and size.
    """

    size: int
    variant: Variant
    median: float
    q1: float
    q3: float
    samples: int
    timing: str = SINGLE
    ranked: bool = True


@dataclass(frozen=True)
class Entry:
    """The choices for one collective in one setting, for calls and for ``plans`` (where none: as for calls), which
    replace native's plan, the nonblocking call and a wait.

    ``nodes`` are the numbers of ranks of the nodes, ``placement`` is `Topology.placement`,
    ``mpi`` the library's name and version, ``about`` where and when it was measured,
    ``links`` the parameters of the cost model as measured there.
    """

    collective: str
    mpi: str
    memory: str
    nodes: tuple[int, ...]
    placement: str
    choices: tuple[Choice, ...]
    figures: tuple[Figure, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)
    links: Links = DEFAULT_LINKS
    plans: tuple[Choice, ...] = ()

    @property
    def setting(self) -> tuple[object, ...]:
        """What it is for; two entries for the same replace each other."""
        return (self.collective, self.mpi, self.memory, self.nodes, self.placement)

    def is_about(self, mpi: str) -> bool:
        """Whether it was measured with this MPI library, of whatever version."""
        return self.mpi.split(" ")[0] == mpi.split(" ")[0]

    @property
    def is_old(self) -> bool:
        """Whether it was made from timings that are not to be compared with calls."""
        return any(figure.timing == OLD for figure in self.figures)

    @property
    def layout(self) -> str:
        """The layout in words."""
        even = len(set(self.nodes)) == 1
        text = f"{len(self.nodes)}x{self.nodes[0]}" if even else "+".join(map(str, self.nodes))
        return text if self.placement == "block" else f"{text}:{self.placement}"

    def is_for(self, topology: Topology) -> bool:
        """Whether it was made for this very layout, up to the order of nodes."""
        return layout_distance(self, topology) == (0.0, 0.0)

    def choice(self, size: int, *, held: bool = False) -> Variant:
        """What is chosen for blocks of ``size`` bytes, in calls or (``held``) in plans; native instead of a form of
        it that the library has and does not get right."""
        choices = (held and self.plans) or self.choices
        at = bisect_right([choice.start for choice in choices], size) - 1
        variant = choices[max(at, 0)].variant
        return variant if variant.is_sound(self.mpi) else NATIVE_VARIANT

    def measured(self, size: int) -> list[Figure]:
        """The figures of single calls that can be compared, of the size nearest to ``size``, fastest first."""
        able = [figure for figure in self.figures if figure.ranked and figure.timing == SINGLE]
        if not able:
            return []
        near = min({figure.size for figure in able}, key=lambda known: (_distance(known, size), known))
        return sorted((figure for figure in able if figure.size == near), key=lambda figure: figure.median)

    def native_seconds(self, size: int) -> float | None:
        """What a single call of the MPI library's own takes for blocks of ``size`` bytes, in between what was
        measured (on logarithmic scales); None outside of that."""
        known = sorted(
            (figure.size, figure.median)
            for figure in self.figures
            if figure.variant.is_native and figure.ranked and figure.timing == SINGLE
        )
        for (below, less), (above, more) in pairwise([*known, *known[-1:]]):
            if below <= size <= above and less > 0:
                share = log2(size / below) / log2(above / below) if above > below else 0.0
                return float(less * (more / less) ** share)
        return None


@dataclass(frozen=True, eq=False)  # compared by identity: one is read once and asked often
class Table:
    """Entries, each for another setting; ``source`` says where they come from. Where there is none, the MPI
    library's own collective runs or, with ``by_model``, what the cost model finds the fastest; ``machine`` is what the
    model takes this one for, instead of the default links."""

    entries: tuple[Entry, ...] = ()
    source: str = ""
    by_model: bool = False
    machine: Machine | None = None

    def find(self, collective: str, mpi: str, memory: str, topology: Topology) -> Entry | None:
        """The most specific entry: of this MPI library (the same version if there is one),
        with this layout, or else the nearest; None without any for collective, library and memory."""
        if not self.entries:
            return None

        def distance(entry: Entry) -> tuple[float, ...]:
            return (*layout_distance(entry, topology), entry.mpi != mpi)

        suited = [
            entry
            for entry in self.entries
            if (entry.collective, entry.memory) == (collective, memory) and entry.is_about(mpi)
        ]
        return min(suited, key=distance, default=None)

    def knows(self, mpi: str) -> bool:
        """Whether an entry is about this MPI library, of whatever version."""
        return any(entry.is_about(mpi) for entry in self.entries)

    def decides(self, collective: str, mpi: str, memory: str, topology: Topology) -> bool:
        """Whether it says what "auto" means there: an entry, or the model."""
        return self.by_model or self.find(collective, mpi, memory, topology) is not None

    def merged(self, other: Table) -> Table:
        """Both tables' entries; where both have one for a setting, the later date's, else ``other``'s."""
        entries = {entry.setting: entry for entry in self.entries}
        for entry in other.entries:
            mine = entries.get(entry.setting)
            if mine is None or str(entry.about.get("date", "")) >= str(mine.about.get("date", "")):
                entries[entry.setting] = entry
        return Table(tuple(entries.values()), self.source)


def describe_timing(timing: str) -> str:
    """A timing in words."""
    way = WAYS.get(timing.removeprefix("plan-"))
    return timing if way is None else f"{'held plans' if timing.startswith('plan') else 'public calls'}, {way}"


def layout_distance(entry: Entry, topology: Topology) -> tuple[float, float]:
    """How far a layout is from an entry's: (0, 0) if it is the same, up to the order of nodes.

    First in ranks per node, nodes and evenness (in powers of two), then in placement.
    """
    sizes, others = topology.node_sizes, entry.nodes
    if sorted(sizes) == sorted(others):
        shape = 0.0
    else:
        shape = _distance(max(sizes), max(others)) + _distance(len(sizes), len(others))
        shape += 0.5 * (topology.is_even != (len(set(others)) == 1)) + 0.01
    return shape, float(entry.placement != topology.placement)


def _distance(a: int, b: int) -> float:
    return abs(log2(max(a, 1)) - log2(max(b, 1)))


# ---- files


def environment_table() -> Table:
    """The table that ``HIERCOLL_TABLE`` names, or the user's own, or an empty one; with the machine that
    ``HIERCOLL_MACHINE`` names. Raises TableError."""
    path = settings.table() or settings.own_table()
    found = Table() if path is None else load(path)
    try:
        if name := settings.machine():
            from hiercoll.model.machine import get_machine  # few programs are told of one, and all would wait for it

            return replace(found, machine=get_machine(name))
        return found
    except MachineError as error:
        raise TableError("HIERCOLL_MACHINE", error.field, error.expected, error.got) from None


def load(path: str | Path) -> Table:
    """The table in a file; for "model", none, and the cost model. Raises TableError, which names file and field."""
    if str(path) == MODEL:
        return Table(source="the cost model", by_model=True)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise TableError(path, "file", "a readable table", str(reason)) from None
    return parse(text, str(path))


def parse(text: str, source: str = "table") -> Table:
    """The table that a JSON text holds. Raises TableError."""
    try:
        data = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise TableError(source, "file", "JSON", str(error)) from None
    reader = Reader(source)
    top = reader.mapping(data, "")
    if top.get("format") != FORMAT:
        raise TableError(source, "format", repr(FORMAT), repr(top.get("format")))
    if top.get("version") != VERSION:
        raise TableError(source, "version", f"{VERSION} (written by this hiercoll)", repr(top.get("version")))
    entries = [_entry(reader, each, at) for at, each in reader.items(top, "entries", "")]
    settings = [entry.setting for entry in entries]
    for number, setting in enumerate(settings):
        if setting in settings[:number]:
            raise TableError(source, f"entries[{number}]", "one entry for each setting", "a second one")
    return Table(tuple(entries), source)


def no_constant(name: str) -> float:
    """For `json.loads`: refuses NaN and infinities, which JSON does not have."""
    raise ValueError(f"{name} is not a number")


Read: TypeAlias = Callable[[Any], bool]


class Reader:
    """Takes values out of parsed JSON, with errors that name file and field."""

    def __init__(self, source: str) -> None:
        self._source = source

    def wrong(self, where: str, expected: str, got: object) -> TableError:
        text = repr(got)
        return TableError(self._source, where or "file", expected, text if len(text) < 80 else text[:77] + "..")

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(where, "an object", value)
        return value

    def get(self, data: dict[str, Any], name: str, at: str, expected: str, holds: Read) -> Any:
        where = f"{at}.{name}" if at else name
        if name not in data:
            raise self.wrong(where, expected, "nothing")
        if not holds(data[name]):
            raise self.wrong(where, expected, data[name])
        return data[name]

    def text(self, data: dict[str, Any], name: str, at: str) -> str:
        return str(self.get(data, name, at, "a text", lambda value: isinstance(value, str) and bool(value)))

    def one_of(self, data: dict[str, Any], name: str, at: str, choices: Iterable[str]) -> str:
        expected = f"one of {', '.join(choices)}"
        return str(self.get(data, name, at, expected, lambda value: isinstance(value, str) and value in choices))

    def whole(self, data: dict[str, Any], name: str, at: str, least: int) -> int:
        return int(self.get(data, name, at, f"a whole number, at least {least}", lambda value: _whole(value, least)))

    def seconds(self, data: dict[str, Any], name: str, at: str) -> float:
        return float(self.get(data, name, at, "a number of seconds, at least 0", _seconds))

    def items(self, data: dict[str, Any], name: str, at: str) -> list[tuple[str, Any]]:
        values = self.get(data, name, at, "a list", lambda value: isinstance(value, list))
        where = f"{at}.{name}" if at else name
        return [(f"{where}[{number}]", value) for number, value in enumerate(values)]


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 62


FOREVER = 1e9  # seconds


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= FOREVER


def _entry(reader: Reader, value: Any, at: str) -> Entry:
    data = reader.mapping(value, at)
    collective = reader.one_of(data, "collective", at, tuned())
    nodes = [(where, size) for where, size in reader.items(data, "nodes", at)]
    for where, size in nodes:
        if not _whole(size, 1):
            raise reader.wrong(where, "a number of ranks, at least 1", size)
    if not nodes:
        raise reader.wrong(f"{at}.nodes", "at least one node", [])
    if (ranks := sum(size for _, size in nodes)) > MOST_RANKS:
        raise reader.wrong(f"{at}.nodes", f"at most {MOST_RANKS} ranks on all nodes", ranks)
    choices = _choices(reader, data, "choices", at, collective)
    for number, choice in enumerate(choices):
        if choice.variant.algorithm == NATIVE and choice.variant.params.get("form") == "persistent":
            raise reader.wrong(f"{at}.choices[{number}].params", "no persistent form for calls", choice.variant.params)
    links = DEFAULT_LINKS
    if "links" in data:
        where, pairs = f"{at}.links", reader.mapping(data["links"], f"{at}.links")
        links = links._replace(node=_link(reader, pairs, "node", where), network=_link(reader, pairs, "network", where))
    return Entry(
        collective=collective,
        mpi=reader.text(data, "mpi", at),
        memory=reader.one_of(data, "memory", at, MEMORIES),
        nodes=tuple(size for _, size in nodes),
        placement=reader.one_of(data, "placement", at, PLACEMENTS),
        choices=choices,
        figures=tuple(_figure(reader, each, where, collective) for where, each in reader.items(data, "figures", at)),
        about=reader.mapping(data.get("about", {}), f"{at}.about"),
        links=links,
        plans=_choices(reader, data, "plans", at, collective) if "plans" in data else (),
    )


def _link(reader: Reader, data: dict[str, Any], name: str, at: str) -> Link:
    link = reader.mapping(reader.get(data, name, at, "an object", lambda value: True), f"{at}.{name}")
    return Link(reader.seconds(link, "alpha", f"{at}.{name}"), reader.seconds(link, "beta", f"{at}.{name}"))


def read_variant(reader: Reader, data: dict[str, Any], at: str, collective: str) -> Variant:
    """The variant that parsed JSON names, with all its parameters. Raises TableError."""
    family = COLLECTIVES[collective].family
    name = reader.one_of(data, "algorithm", at, (NATIVE, *REGISTRY[family]))
    given = reader.mapping(data.get("params", {}), f"{at}.params")
    transport = data.get("transport", AUTO)
    if not COLLECTIVES[collective].is_on_devices and transport != AUTO:
        raise reader.wrong(f"{at}.transport", f"none for {collective}", transport)
    try:
        parse_transport(transport)
    except ArgumentError as error:
        raise reader.wrong(f"{at}.transport", error.expected, transport) from None
    if name == NATIVE:
        if given and (set(given) != {"form"} or given["form"] not in NATIVE_FORMS):
            raise reader.wrong(f"{at}.params", f"none for native, or form: {' or '.join(NATIVE_FORMS)}", given)
        return Variant(NATIVE, given, transport)
    try:
        return Variant(name, get_algorithm(family, name).resolve(given), transport)
    except ArgumentError as error:
        raise reader.wrong(f"{at}.params", f"{error.argument}: {error.expected}", given) from None


def _choices(reader: Reader, data: dict[str, Any], name: str, at: str, collective: str) -> tuple[Choice, ...]:
    choices = [_choice(reader, each, where, collective) for where, each in reader.items(data, name, at)]
    starts = [choice.start for choice in choices]
    if not starts or starts != sorted(set(starts)):
        raise reader.wrong(f"{at}.{name}", "at least one, with growing 'from'", starts)
    return tuple(choices)


def _choice(reader: Reader, value: Any, at: str, collective: str) -> Choice:
    data = reader.mapping(value, at)
    return Choice(reader.whole(data, "from", at, 0), read_variant(reader, data, at, collective))


def _figure(reader: Reader, value: Any, at: str, collective: str) -> Figure:
    data = reader.mapping(value, at)
    median, q1, q3 = (reader.seconds(data, name, at) for name in ("median", "q1", "q3"))
    least = min(COLLECTIVES[collective].buffers, 1)  # without buffers, the only size is 0
    size, samples = reader.whole(data, "size", at, least), reader.whole(data, "samples", at, 1)
    timing = reader.one_of(data, "timing", at, TIMINGS) if "timing" in data else OLD
    ranked = data.get("ranked", timing != OLD)
    if not isinstance(ranked, bool):
        raise reader.wrong(f"{at}.ranked", "true or false", ranked)
    return Figure(size, read_variant(reader, data, at, collective), median, q1, q3, samples, timing, ranked)


def dump(table: Table) -> str:
    """The table as JSON text, an entry's lists with one item on a line."""

    def lines(items: Iterable[dict[str, Any]]) -> str:
        return "[\n      " + ",\n      ".join(json.dumps(item) for item in items) + "\n    ]" if items else "[]"

    entries = []
    for entry in table.entries:
        data: dict[str, str] = {
            "collective": json.dumps(entry.collective),
            "mpi": json.dumps(entry.mpi),
            "memory": json.dumps(entry.memory),
            "nodes": json.dumps(entry.nodes),
            "placement": json.dumps(entry.placement),
            "about": json.dumps(entry.about),
            "links": json.dumps({"node": entry.links.node._asdict(), "network": entry.links.network._asdict()}),
            "choices": lines([choice.record() for choice in entry.choices]),
            **({"plans": lines([choice.record() for choice in entry.plans])} if entry.plans else {}),
            "figures": lines([figure_record(figure) for figure in entry.figures]),
        }
        entries.append("  {\n" + ",\n".join(f'    "{name}": {text}' for name, text in data.items()) + "\n  }")
    body = ",\n".join(entries)
    return f'{{\n"format": "{FORMAT}",\n"version": {VERSION},\n"entries": [\n{body}\n]\n}}\n'


def figure_record(figure: Figure) -> dict[str, Any]:
    """A figure as JSON data."""
    rest: dict[str, Any] = {"median": figure.median, "q1": figure.q1, "q3": figure.q3, "samples": figure.samples}
    if figure.timing != OLD:
        rest |= {"timing": figure.timing, "ranked": figure.ranked}
    return {"size": figure.size, **figure.variant.record(), **rest}
