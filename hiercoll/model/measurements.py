"""Measured times, in the CSV format of published logs: what the model is fitted to, and held against.

Columns: ``system, nodes, ranks_per_node, collective, algorithm, parameters`` (tokens joined by ``;``),
``bytes_per_pair`` (alltoall) or ``bytes_per_rank`` (what a rank contributes to an allgather, keeps of a
reduce_scatter, or reduces in an allreduce), ``seconds_median, seconds_min, seconds_max, repeats, phase``
(``total``, or the part that was timed alone), ``source``. Seconds and bytes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

from hiercoll.errors import MachineError

NEEDED = ("system", "nodes", "ranks_per_node", "collective", "algorithm", "bytes_per_pair", "phase")
MOST_SECONDS, MOST_BYTES = 1e4, 2**50  # of one call: more are other units
CONTRADICTION = 100  # times that differ so much are not of the same thing
Statistic: TypeAlias = Literal["seconds_min", "seconds_median"]


class Measurement(NamedTuple):
    """``seconds`` of a call, of its repetitions the least or the median, as `read` was told; ``size``: bytes of a
    block, for allreduce of the vector; ``worst``: of those measured elsewhere, where rows are pooled."""

    system: str
    nodes: int
    lanes: int
    collective: str
    algorithm: str
    parameters: tuple[str, ...]
    size: float
    seconds: float
    phase: str
    source: str
    worst: float = 0.0


def read(path: Path, statistic: Statistic = "seconds_min") -> list[Measurement]:
    """The rows of a file. Raises MachineError, which names file and row, also where two rows of a source contradict
    each other: the same schedule and size, and times that differ by more than a factor of `CONTRADICTION`.

    ``statistic``: the column that ``seconds`` comes from. The least where repetitions are a few jobs, of which some
    stall; the median where they are many calls of one job, each timed on its own: the least of thousands is luck."""
    needed = (*NEEDED, statistic)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if lacking := [name for name in needed if name not in (reader.fieldnames or ())]:
                raise MachineError(path, "columns", ", ".join(needed), f"none called {', '.join(lacking)}")
            found = [_measurement(path, number, row, statistic) for number, row in enumerate(reader, 2)]
    except (OSError, UnicodeError, csv.Error) as error:
        raise MachineError(path, "file", "a CSV file that can be read", str(error)) from None
    if not found:
        raise MachineError(path, "rows", "at least one", "none")
    _check(path, statistic, found)
    return found


def _check(path: Path, statistic: Statistic, rows: Iterable[Measurement]) -> None:
    """Raises MachineError for rows that contradict each other."""
    first: dict[Measurement, tuple[int, float]] = {}
    for number, row in enumerate(rows, 2):
        other, seconds = first.setdefault(row._replace(seconds=0.0), (number, row.seconds))
        if max(seconds, row.seconds) > CONTRADICTION * min(seconds, row.seconds):
            expected = f"about {seconds:g}, as in row {other} for the same schedule and size"
            raise MachineError(path, f"row {number}, {statistic}", expected, f"{row.seconds:g}")


def _measurement(path: Path, number: int, row: dict[str, str], statistic: Statistic) -> Measurement:
    where = f"row {number}"
    size = row["bytes_per_pair"] or row.get("bytes_per_rank") or ""
    return Measurement(
        row["system"],
        int(_number(path, where, "nodes", row["nodes"], 1, 1e6)),
        int(_number(path, where, "ranks_per_node", row["ranks_per_node"], 1, 1e5)),
        row["collective"],
        row["algorithm"],
        tuple(token for token in (row.get("parameters") or "").split(";") if token),
        _number(path, where, "bytes", size, 0, MOST_BYTES),
        _number(path, where, statistic, row[statistic], 1e-9, MOST_SECONDS),
        row["phase"] or "total",
        row.get("source") or "",
    )


def _number(path: Path, where: str, column: str, text: str | None, least: float, most: float) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise MachineError(path, f"{where}, {column}", f"a number between {least:g} and {most:g}", repr(text))
    return value


def pooled(rows: Iterable[Measurement]) -> list[Measurement]:
    """One for each schedule and size: the least time of all jobs, and the largest as ``worst``. A gather or scatter is
    one schedule in whatever algorithm."""
    found: dict[tuple[object, ...], Measurement] = {}
    for row in rows:
        name = "multileader-node-aware" if row.phase in ("gather", "scatter") else row.algorithm
        key = (row.system, row.nodes, row.lanes, row.collective, name, row.parameters, row.phase, row.size)
        other = found.get(key)
        worst = max(row.seconds, other.worst if other else 0)
        least = min(row.seconds, other.seconds if other else row.seconds)
        found[key] = row._replace(algorithm=name, seconds=least, worst=worst)
    return list(found.values())


def typical(rows: Iterable[Measurement]) -> list[Measurement]:
    """One for each schedule and size, as `pooled`: the median over jobs."""
    found: dict[tuple[object, ...], list[Measurement]] = {}
    for row in rows:
        found.setdefault(row._replace(seconds=0, source="", worst=0), []).append(row)
    return [
        same[0]._replace(seconds=median(row.seconds for row in same), worst=max(row.seconds for row in same))
        for same in found.values()
    ]
