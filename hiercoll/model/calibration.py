"""From times measured on the machine at hand to the parameters of the model: what ``hiercoll calibrate`` concludes.

A `Sample` is the time of one measurement (`hiercoll.tools.calibrating` takes them). Each parameter follows from one or
a few of them by the model's own equations (`hiercoll.model.evaluate`): what a measurement holds besides is subtracted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hiercoll.errors import MachineError
from hiercoll.model.evaluate import Floats, switch
from hiercoll.model.machine import LEVELS, Machine, Parameters

NOISE = 0.05  # by how much times differ that should be equal
JUMP = 4 * NOISE  # share of a time that a protocol must add to be told from noise
LARGE = 1 << 20  # bytes of messages that show a bandwidth
AT_ONCE = 16  # small messages
ROOTED = 64 << 10  # bytes of messages to and from a root


class Key(NamedTuple):
    """A measurement: ``amount`` of messages, pairs, pieces or ranks; ``back``: bytes on the way back."""

    what: str
    level: str = ""
    size: int = 1
    amount: int = 1
    back: int = 0

    def __str__(self) -> str:
        size = f"{self.size}+{self.back}" if self.back else f"{self.size}"
        return " ".join(
            filter(None, (self.what, self.level, f"{size} B", f"x{self.amount}" if self.amount > 1 else ""))
        )


@dataclass(frozen=True)
class Sample:
    """Seconds of a measurement, the slowest rank's: the median of ``number``, quartiles, the least and the most."""

    key: Key
    median: float
    q1: float
    q3: float
    least: float
    most: float
    number: int

    def record(self) -> dict[str, Any]:
        """A line for a file."""
        return {**self.key._asdict(), **{k: v for k, v in asdict(self).items() if k != "key"}}

    @staticmethod
    def of(line: Mapping[str, Any]) -> Sample:
        """What `record` gave. Raises KeyError, TypeError or ValueError."""
        times = [float(line[name]) for name in ("median", "q1", "q3", "least", "most")]
        if not all(0 < time < float("inf") for time in times):
            raise ValueError("times that are not positive")
        key = Key(*(kind(line[name]) for name, kind in zip(Key._fields, (str, str, int, int, int), strict=True)))
        return Sample(key, times[0], times[1], times[2], times[3], times[4], int(line["number"]))


@dataclass(frozen=True)
class Setting:
    """Where samples were taken. ``lanes``: of a node; ``domain``, ``socket``: ranks in each, 0 if not known, with
    ``unknown`` to say why; ``caches``: bytes of a rank's and a socket's, as the kernel says, 0 if it does not."""

    mpi: str
    layout: str
    hosts: int
    nodes: int
    lanes: int
    domain: int = 0
    socket: int = 0
    unknown: str = ""
    caches: tuple[int, int] = (0, 0)


class Notes:
    """A JSON Lines file: where samples were taken, then a line for each.

    Raises MachineError for a file that holds something else, or samples of another setting.
    """

    def __init__(self, path: Path, setting: Setting, fresh: bool = False) -> None:
        self._path = path
        first = {"hiercoll": "calibration", **asdict(setting), "caches": list(setting.caches)}
        text = path.read_text(encoding="utf-8") if path.exists() and not fresh else ""
        lines = text.splitlines()
        self.samples = {} if not lines else self._read(lines, first)
        if not lines:
            path.write_text(json.dumps(first) + "\n", encoding="utf-8")
        elif not text.endswith("\n"):  # cut off in the middle of a line
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def _read(self, lines: list[str], first: dict[str, Any]) -> dict[Key, Sample]:
        try:
            there = json.loads(lines[0])
        except ValueError:
            there = None
        if there != first:
            same = isinstance(there, dict) and there.get("hiercoll") == "calibration"
            differ = [name for name in first if there.get(name) != first[name]] if same else []
            expected = f"samples taken on {first['layout']} with {first['mpi']} (or --fresh, to start anew)"
            got = "; ".join(f"{name} {there.get(name)!r}, not {first[name]!r}" for name in differ) or "something else"
            raise MachineError(self._path, "row 1", expected, got)
        found: dict[Key, Sample] = {}
        for number, line in enumerate(lines[1:], 2):
            try:
                sample = Sample.of(json.loads(line))
                found[sample.key] = sample
            except (ValueError, KeyError, TypeError) as error:
                # A line that was cut off is measured again.
                if number < len(lines) and _is_whole(line):
                    raise MachineError(self._path, f"row {number}", "a sample", str(error) or line[:40]) from None
        return found

    def add(self, samples: Iterable[Sample]) -> None:
        """Write them down."""
        found = {sample.key: sample for sample in samples}
        self.samples |= found
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(sample.record()) + "\n" for sample in found.values())


def _is_whole(line: str) -> bool:
    """Whether a line is whole."""
    return line.rstrip().endswith("}")


class Curve(NamedTuple):
    """Time by size: ``latency`` (s) + size * ``byte`` (s/B) + ``rendezvous`` (s) from ``threshold`` (B) on, 0 where
    there is no jump."""

    latency: float
    byte: float
    rendezvous: float = 0.0
    threshold: float = 0.0


def curve(points: Sequence[tuple[float, float]]) -> Curve:
    """The curve through (size, seconds), with a jump where one explains the times far better than none.

    Thresholds are sought at the sizes and between them, so that these must be close to each other. Single times that
    are far off count little (Huber's weights). Raises ValueError for fewer than 5 points.
    """
    if len(points) < 5:
        raise ValueError(f"{len(points)} points: at least 5 are needed")
    size, seconds = np.array(sorted(points), float).T
    straight, loss = _fitted(size, seconds, None)
    best, least = straight, loss
    between = np.sqrt(size[:-1] * size[1:])
    for threshold in sorted([*size[2:-1], *between[1:-1]]):
        found, cost = _fitted(size, seconds, float(threshold))
        at = found.latency + found.byte * found.threshold
        if cost < least and found.rendezvous > JUMP * at and cost < 0.6 * loss:
            best, least = found, cost
    return best


def _fitted(size: Floats, seconds: Floats, threshold: float | None) -> tuple[Curve, float]:
    """Latency, time per byte and jump of at least 0, and Huber's loss of relative errors in units of `NOISE`."""
    columns = [np.ones_like(size), size]
    if threshold is not None:
        columns.append(switch(size, threshold))
    matrix = np.stack(columns, 1) / seconds[:, None]
    weight = np.ones_like(size)
    for _ in range(8):
        found = _not_negative(matrix * weight[:, None], weight)
        off = np.abs(matrix @ found - 1) / NOISE
        weight = np.sqrt(1 / np.maximum(off, 1))
    loss = float(np.where(off < 1, off**2 / 2, off - 0.5).sum())
    values = [float(value) for value in found]
    return Curve(values[0], values[1], *([] if threshold is None else [values[2], threshold])), loss


def _not_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares with no value below 0, of a few unknowns: the best over all sets of them that are 0."""
    count = matrix.shape[1]
    best, least = np.zeros(count), np.inf
    for number in range(1, count + 1):
        for chosen in map(list, combinations(range(count), number)):
            values = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            cost = float(((matrix[:, chosen] @ values - target) ** 2).sum())
            if values.min() >= 0 and cost < least:
                best, least = np.zeros(count), cost
                best[chosen] = values
    return best


def parted(one: float, together: float, count: int) -> tuple[float, float]:
    """What each of ``count`` pays for itself, and what all share, where alone takes ``one`` and all at once take
    ``together``: own + shared, and own + count * shared. Neither is below 0."""
    shared = (together - one) / (count - 1)
    if shared > one:
        return 0.0, together / count
    return (one, 0.0) if shared < 0 else (one - shared, shared)


@dataclass
class Calibrated:
    """``values`` of parameters that were measured; ``reasons`` why others were not."""

    values: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def machine(self, name: str, setting: Setting, sources: tuple[str, ...] = (), about: str = "") -> Machine:
        """With the defaults for parameters without a value; all with a reason are listed as assumed."""
        why = [f"{reason}: {', '.join(sorted(names))}" for reason, names in self.by_reason().items()]
        text = ". ".join([*filter(None, [about]), *(f"Assumed, {each}" for each in why)])
        values = {key: float(f"{value:.4g}") for key, value in self.values.items()}
        assumed = tuple(sorted(self.reasons))
        return Machine(name, Parameters(**values), setting.domain, setting.socket, sources, assumed, about=text)

    def by_reason(self) -> dict[str, list[str]]:
        """Parameters that were not measured, by why."""
        found: dict[str, list[str]] = {}
        for name, reason in self.reasons.items():
            found.setdefault(reason, []).append(name)
        return found


def analyse(samples: Mapping[Key, Sample], setting: Setting) -> Calibrated:
    """Parameters from samples. Raises MachineError where one is missing that the setting should have."""
    return _Analysis(samples, setting).run()


class _Analysis:
    def __init__(self, samples: Mapping[Key, Sample], setting: Setting) -> None:
        self._samples, self._setting, self._found = samples, setting, Calibrated()
        self._values, self._reasons = self._found.values, self._found.reasons
        self._curves = {level: curve(points) for level in LEVELS if (points := self._points(level))}
        self._near = [level for level in LEVELS[:3] if level in self._curves]

    def run(self) -> Calibrated:
        """All that there are samples for."""
        self._within_node()
        self._within_sockets()
        self._between_nodes()
        self._many_nodes()
        self._several_at_once()
        self._roots()
        self._copies()
        self._caches()
        self._flags()
        for each in fields(Parameters):
            if each.name not in self._values:
                self._reasons.setdefault(each.name, "not measured")
        return self._found

    def _points(self, level: str) -> list[tuple[float, float]]:
        return [(k.size, s.median) for k, s in self._samples.items() if k.what == "ping-pong" and k.level == level]

    def _seconds(self, *key: Any) -> float:
        wanted = Key(*key)
        if wanted not in self._samples:
            raise MachineError("calibration", str(wanted), "a sample", "none")
        return self._samples[wanted].median

    def _assume(self, reason: str, *names: str) -> None:
        for name in names:
            self._reasons[name] = reason

    def _jump(self, level: str, rendezvous: str, threshold: str) -> bool:
        """Set the two, if there is a jump."""
        found = self._curves[level]
        if found.rendezvous:
            self._values |= {rendezvous: found.rendezvous, threshold: found.threshold}
        return found.rendezvous > 0

    def _within_node(self) -> None:
        """domain, socket, node, domain_byte, node_byte, rendezvous, eager"""
        names = ("domain", "socket", "node", "domain_byte", "node_byte", "rendezvous", "eager")
        if not self._near:
            self._assume("one rank a node", *names)
            return
        for index, level in enumerate(LEVELS[:3]):
            nearest = [each for each in self._near if LEVELS.index(each) <= index] or self._near
            self._values[level] = self._seconds("ping-pong", nearest[-1], 1)
            byte = "domain_byte" if level == "domain" else "node_byte"
            self._values[byte] = self._curves[nearest[-1]].byte
        if len(self._near) < 3:
            reason = self._setting.unknown or "ranks are not in several sockets and domains"
            lacking = [level for level in LEVELS[:3] if level not in self._near]
            self._assume(reason, *lacking, *([] if len(self._near) > 1 else ["node_byte"]))
            if self._setting.unknown:
                self._assume(reason, "domain", "domain_byte")
        if not any(self._jump(level, "rendezvous", "eager") for level in self._near):
            self._values["rendezvous"] = 0.0
            self._assume("no jump of times within a node", "rendezvous", "eager")

    def _within_sockets(self) -> None:
        """socket_link, and what of node_byte it explains"""
        pairs = self._most("pairs", "node")
        if pairs < 2:
            self._assume("no two pairs of ranks in different sockets", "socket_link")
            return
        # Both ways at once: each pair moves twice its bytes over the link.
        own, shared = parted(self._slope("node", 1), self._slope("node", pairs), pairs)
        self._values |= {"socket_link": shared / 2, "node_byte": own}

    def _between_nodes(self) -> None:
        """network, network_byte, network_rendezvous, network_eager, adapter, adapter_message"""
        names = ("network", "network_byte", "network_rendezvous", "network_eager", "adapter", "adapter_message")
        self._assume("not sought: kept at no change", "network_small_byte")
        if "network" not in self._curves:
            self._assume("no second node", *names)
            return
        self._values["network"] = self._seconds("ping-pong", "network", 1)
        pairs = self._most("pairs", "network")
        own, shared = 0.0, self._curves["network"].byte
        if pairs > 1:
            own, shared = parted(self._slope("network", 1), self._slope("network", pairs), pairs)
            one, every = (self._seconds("messages", "network", 1, amount) / AT_ONCE for amount in (1, pairs))
            self._values["adapter_message"] = parted(one, every, pairs)[1]
        else:
            self._assume("one rank a node: not told apart", "network_byte", "adapter")
            self._assume("one rank a node", "adapter_message")
        self._values |= {"network_byte": own, "adapter": shared}
        if not self._jump("network", "network_rendezvous", "network_eager"):
            self._values["network_rendezvous"] = 0.0
            self._assume("no jump of times between nodes", "network_rendezvous", "network_eager")

    def _most(self, what: str, level: str) -> int:
        return max((key.amount for key in self._samples if (key.what, key.level) == (what, level)), default=0)

    def _slope(self, level: str, pairs: int) -> float:
        """Seconds per byte of each of so many pairs at once."""
        return self._per_byte(self._seconds("pairs", level, LARGE, pairs), level)

    def _per_byte(self, seconds: float, level: str) -> float:
        """Of a message of `LARGE` bytes: without the time of a small one, and what the protocol adds."""
        start = self._seconds("ping-pong", level, 1) + self._curves[level].rendezvous
        return max(seconds - start, 0.0) / LARGE

    def _many_nodes(self) -> None:
        """congestion"""
        peers = self._setting.nodes - 1
        large = Key("all nodes", "network", LARGE, self._setting.lanes)
        if large not in self._samples or not self._values.get("adapter"):
            self._assume("no third node" if self._setting.nodes < 3 else "nodes of different sizes", "congestion")
            return
        slope = self._per_byte(self._seconds(*large) / peers, "network")
        more = (slope - self._values["network_byte"]) / (self._setting.lanes * self._values["adapter"]) - 1
        self._values["congestion"] = max(more, 0.0) / (1 - 1 / peers)

    def _several_at_once(self) -> None:
        """posted"""
        found = [key for key in self._samples if key.what == "posted" and key.amount > 1]
        if not found:
            self._assume("one rank", "posted")
            return
        many = self._seconds(*found[0])
        single = self._seconds(*found[0]._replace(amount=1))
        self._values["posted"] = min(max((many / single - 1) / (found[0].amount - 1), 0.0), 1.0)

    def _roots(self) -> None:
        """root_message, root_in, root_out, root_out_domain"""
        self._assume("not sought: kept at no change", "root_large", "root_factor")
        count = self._most("rooted", "node")
        if count < 2:
            self._assume("fewer than three ranks a node", "root_message", "root_in", "root_out", "root_out_domain")
            return
        far = self._curves[self._near[-1]]
        start = self._values[self._near[-1]]
        message = (self._seconds("rooted", "node", 1, count, 1) - 2 * start) / 2 / (count - 1)
        self._values["root_message"] = max(message, 0.0)
        self._values["root_in"] = self._root_byte("node", count, far, (ROOTED, 1))
        self._values["root_out"] = self._root_byte("node", count, far, (1, ROOTED))
        within = self._most("rooted", "domain")
        if within < 2:
            self._values["root_out_domain"] = self._values["root_out"]
            self._assume("as root_out: no domain of three ranks that is known", "root_out_domain")
            return
        near = self._curves["domain"]
        self._values["root_out_domain"] = self._root_byte("domain", within, near, (1, ROOTED))

    def _root_byte(self, level: str, count: int, near: Curve, sizes: tuple[int, int]) -> float:
        """Per byte of each message after the first, one way."""
        more = self._seconds("rooted", level, sizes[0], count, sizes[1]) - self._seconds("rooted", level, 1, count, 1)
        jump = float(near.rendezvous * switch(np.array(float(ROOTED)), near.threshold)) if near.rendezvous else 0.0
        return max((more - jump - ROOTED * near.byte) / ROOTED / (count - 1), 0.0)

    def _copies(self) -> None:
        """piece, line, copy_byte, reduce_byte, memory, bus, fresh"""
        self._values["reduce_byte"] = self._in_cache("sum")
        byte = self._in_cache("copy")
        pieces = {key.size: (s.median / key.amount) for key, s in self._samples.items() if key.what == "pieces"}
        piece = max(pieces[8] - 8 * byte, 0.0)
        self._values |= {"copy_byte": byte, "piece": piece, "line": max(pieces[64] - 64 * byte - piece, 0.0)}
        beyond = {
            key.amount: s.median / key.size for key, s in self._samples.items() if key.what == "copy beyond cache"
        }
        ranks = max(beyond)
        if ranks > 1:
            own, bus = parted(max(beyond[1] - byte, 0.0), max(beyond[ranks] - byte, 0.0), ranks)
            self._values |= {"memory": own, "bus": bus}
        else:
            self._values["memory"] = max(beyond[1] - byte, 0.0)
            self._assume("one rank a node", "bus")
        touched = next((key, s.median) for key, s in self._samples.items() if key.what == "first touch")
        self._values["fresh"] = touched[1] / touched[0].size / touched[0].amount

    def _in_cache(self, what: str) -> float:
        """Seconds per byte."""
        times = sorted((key.size, sample.median) for key, sample in self._samples.items() if key.what == what)
        (small, quick), (large, slow) = times[0], times[-1]
        return max((slow - quick) / (large - small), 0.0)

    def _caches(self) -> None:
        """cache_rank, cache_socket"""
        for name, value in zip(("cache_rank", "cache_socket"), self._setting.caches, strict=True):
            if value:
                self._values[name] = float(value)
            self._assume("as the kernel says" if value else "the kernel does not say", name)

    def _flags(self) -> None:
        """flag"""
        found = [(key, s.median) for key, s in self._samples.items() if key.what == "flags"]
        if not found:
            self._assume("one rank a node", "flag")
            return
        self._values["flag"] = found[0][1] / found[0][0].amount
