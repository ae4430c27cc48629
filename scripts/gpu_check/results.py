"""What is known of the rows: a file of JSON Lines that grows with each row, and a summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gpu_check.rows import Row

PASSED, FAILED, TIMEOUT = "passed", "failed", "timeout"


class Result(NamedTuple):
    """How a row ended."""

    row: str
    status: str
    seconds: float
    date: str = ""
    version: str = ""  # of the code, if git can tell
    gpu: str = ""
    cut: bool = False  # it did not end in the time that the budget left, which was less than its own limit
    last: tuple[str, ...] = ()  # lines, unless it passed


def append(file: Path, result: Result) -> None:
    """Add a line. It begins on a line of its own even if an earlier call was ended while it wrote."""
    torn = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" * torn + json.dumps(result._asdict()) + "\n")


def read(file: Path) -> dict[str, Result]:
    """The latest result of each row. One that the budget cut off says nothing of its row, and is left out."""
    found = (Result(**{**entry, "last": tuple(entry["last"])}) for entry in lines(file))
    return {result.row: result for result in found if not result.cut}


def lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON Lines; none if it is not there."""
    found = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:  # torn: the writer was ended
            continue
    return found


def exit_status(rows: Sequence[Row], results: Mapping[str, Result]) -> int:
    """1 if a row that counts has failed, now or in an earlier call that no later one has put right."""
    return int(any(row.counts and row.name in results and results[row.name].status != PASSED for row in rows))


def summary(
    about: str, rows: Sequence[Row], results: Mapping[str, Result], notes: Mapping[str, str], warnings: Sequence[str]
) -> str:
    """The text of summary.md. ``notes`` say why rows were not run."""
    known = [results[row.name] for row in rows if row.name in results]
    passed = sum(result.status == PASSED for result in known)
    counts = f"{passed} passed, {len(known) - passed} failed, {len(rows) - len(known)} **not run**"
    text = [
        "# GPU check",
        "",
        about,
        "",
        counts,
        "",
        "| row | result | time | date | version |",
        "|---|---|---|---|---|",
    ]
    text += [_line(row, results.get(row.name), notes.get(row.name, "")) for row in rows]
    problems = [*warnings, *_several(known)]
    text += ["", "Warnings:", "", *(f"- {each}" for each in problems)] if problems else []
    for result in known:
        if result.status != PASSED:
            text += ["", f"## {result.row}: {result.status}", "", *(f"    {each}" for each in result.last)]
    return "\n".join(text) + "\n"


def _line(row: Row, result: Result | None, note: str) -> str:
    """A row of the table."""
    if result is None:
        return f"| {row.name} | **not run**{note and f': {note}'} | | | |"
    word = result.status if result.status == PASSED else result.status.upper()
    remark = "" if row.counts or result.status == PASSED else " (an experiment, no failure of the check)"
    return f"| {row.name} | {word}{remark} | {result.seconds:.0f} s | {result.date} | {result.version or '?'} |"


def _several(results: Sequence[Result]) -> list[str]:
    """Warnings where results are not all of the same code, or the same GPU."""
    of = {"versions of the code": {each.version for each in results}, "GPUs": {each.gpu for each in results}}
    return [f"the rows are of several {what}: {', '.join(sorted(seen))}" for what, seen in of.items() if len(seen) > 1]
