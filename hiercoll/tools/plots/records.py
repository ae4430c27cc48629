"""Reading benchmark records: JSON Lines, every field checked."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiercoll.algorithms import get_algorithm
from hiercoll.collectives import get_collective
from hiercoll.errors import ArgumentError, HiercollError
from hiercoll.tables import OLD

AUTO = "auto"
CONTROL = "control"  # native once more, which shows the noise


class PlotError(HiercollError):
    """Nothing can be drawn: no records, or no matplotlib."""


class RecordError(PlotError, ValueError):
    """A line is no benchmark record. Attributes: ``file``, ``line`` (from 1), ``field``, ``expected``, ``got``."""

    def __init__(self, file: Path, line: int, field: str, expected: str, got: str) -> None:
        self.file, self.line, self.field, self.expected, self.got = file, line, field, expected, got
        super().__init__(f"{file}, line {line}: {field}: expected {expected}, got {got}")


@dataclass(frozen=True, order=True)
class Setting:
    """What records must have in common to share a figure; ``timing`` is one of `hiercoll.tables`."""

    collective: str
    layout: str
    mpi: str
    ranks: int
    virtual: bool
    memory: str
    timing: str = OLD


@dataclass(frozen=True)
class Point:
    """Median and quartiles in seconds, of so many samples."""

    median: float
    q1: float
    q3: float
    samples: int = 1


@dataclass(frozen=True)
class Record:
    """A line of a benchmark; ``chosen`` is what "auto" ran, ``bound`` the least seconds its link allows."""

    setting: Setting
    subject: str
    size: int
    point: Point
    date: str
    bound: float | None
    chosen: str | None


_KINDS: dict[str, Callable[[Any], bool]] = {
    "printable text": lambda v: isinstance(v, str) and v != "" and v.isprintable(),
    "a whole number of bytes from 0": lambda v: type(v) is int and 0 <= v < 1 << 60,
    "a whole number from 1": lambda v: type(v) is int and 1 <= v < 1 << 31,
    "seconds from 1e-12 to 1e9": lambda v: type(v) in (int, float) and 1e-12 <= v <= 1e9,
    "seconds from 0 to 1e9, or null": lambda v: v is None or (type(v) in (int, float) and 0 <= v <= 1e9),
    "true or false": lambda v: isinstance(v, bool),
    "an object": lambda v: isinstance(v, dict),
    "an object or null": lambda v: v is None or isinstance(v, dict),
}
TEXT, BYTES, COUNT, SECONDS, BOUND, FLAG, OBJECT, MAYBE = _KINDS
_MISSING = object()


class _Line:
    """The fields of one line, checked as they are taken."""

    def __init__(self, file: Path, number: int, raw: bytes) -> None:
        self.file, self.number = file, number
        try:
            self.values = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError):
            raise self.error("record", "a JSON object", reprlib.repr(raw)) from None
        if not isinstance(self.values, dict):
            raise self.error("record", "a JSON object", reprlib.repr(self.values))

    def error(self, field: str, expected: str, got: str) -> RecordError:
        return RecordError(self.file, self.number, field, expected, got)

    def take(self, field: str, kind: str, default: Any = _MISSING) -> Any:
        """The value of ``field``, which may be in an object: ``"subject.algorithm"``."""
        value: Any = self.values
        for name in field.split("."):
            value = value.get(name, default)
        if value is _MISSING:
            raise self.error(field, kind, "nothing")
        if value is not default and not _KINDS[kind](value):
            raise self.error(field, kind, reprlib.repr(value))
        return value

    def subject(self, field: str, collective: str) -> str:
        """Algorithm and parameters in words, without those at their defaults: one subject, one spelling."""
        self.take(field, OBJECT)
        name = self.take(f"{field}.algorithm", TEXT)
        params = self.take(f"{field}.params", OBJECT, {})
        try:
            defaults = get_algorithm(get_collective(collective).family, name).resolve({})
        except ArgumentError:  # native, auto, or a collective or an algorithm of another version
            defaults = {}
        words = [f"{key}={value}" for key, value in sorted(params.items()) if defaults.get(key, _MISSING) != value]
        transport = self.take(f"{field}.transport", TEXT, AUTO)
        text = " ".join([name, *words, *([] if transport == AUTO else [transport])])
        if not text.isprintable():
            raise self.error(f"{field}.params", TEXT, reprlib.repr(text))
        return text

    def record(self) -> Record:
        collective = self.take("collective", TEXT)
        setting = Setting(
            collective,
            self.take("layout", TEXT),
            self.take("mpi", TEXT),
            self.take("ranks", COUNT),
            self.take("virtual_nodes", FLAG, False),
            self.take("memory", TEXT, "host"),
            self.take("timing", TEXT, OLD),
        )
        subject = self.subject("subject", collective)
        size = self.take("size", BYTES)
        middle, q1, q3 = (float(self.take(name, SECONDS)) for name in ("median", "q1", "q3"))
        point = Point(middle, q1, q3, self.take("samples", COUNT))
        chosen = self.subject("chosen", collective) if self.take("chosen", MAYBE, None) is not None else None
        bound, date = self.take("bound", BOUND, None), self.take("date", TEXT)
        return Record(setting, subject, size, point, date[:10], bound or None, chosen if subject == AUTO else None)


def parse_records(text: bytes, file: Path) -> list[Record]:
    """Records of JSON Lines; ``file`` is for messages.

    Raises RecordError for a malformed line, PlotError if there is no record.
    """
    records = [_Line(file, number, raw).record() for number, raw in enumerate(text.split(b"\n"), 1) if raw.strip()]
    if not records:
        raise PlotError(f"{file}: no benchmark records in it")
    return records


def read_records(file: Path) -> list[Record]:
    """Records of a JSON Lines file. Raises as `parse_records` does, and OSError."""
    return parse_records(file.read_bytes(), file)
