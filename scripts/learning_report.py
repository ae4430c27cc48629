"""The tables of docs/learning.md, from the records of scripts/learning.py.

    python scripts/learning_report.py docs/lab [--into docs/learning.md]

Reads learning.jsonl (a communicator for each size), learning-together.jsonl (one for all of a layout and library),
learning-second.jsonl (the same by a later job) and learning-longer.jsonl (until all has been tried) in the folder.
Prints Markdown, table by table; with --into puts each between its marks in that file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from figures_report import heading, replaced, row

NEAR = 1.1  # times the table's time that is near enough
SLOWER = 1.05  # times native's from which on it is slower
WHERE = ("hosts", "MPI library", "collective", "bytes per block", "native, ms")
AFTER = ("then: auto over native", "with trials", "native", "table", "serves then")
Record = dict[str, Any]


def read(file: Path) -> list[Record]:
    """Its records."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def where(record: Record) -> list[object]:
    """The first cells of a row; see WHERE."""
    return [record[name] for name in ("layout", "mpi", "collective", "size")] + [f"{1e3 * record['native']:.2f}"]


def after(record: Record) -> list[str]:
    """Those of calls after the first ones; see AFTER."""
    auto, *figures = [f"{record['after'][label]:.2f}" for label in ("auto", "control", "table")]
    late = f"{record['late']:.2f}" if "late" in record and record["tried"] else "-"
    return [auto, late, *figures, "-" if record["chosen"] == "native" else record["chosen"]]


def early(records: list[Record], is_alone: bool) -> Iterator[str]:
    """The first calls, and those after them."""
    calls = f"first {records[0]['calls']} calls: auto over native"
    yield from heading(*WHERE, calls, "native over native", *AFTER)
    for record in records:
        yield row(*where(record), f"{record['first']:.2f}", f"{record['control']:.2f}", *after(record))
    yield ""
    yield from summary(records) if is_alone else totals(records)


def summary(records: list[Record]) -> Iterator[str]:
    """Of all rows."""
    firsts, controls = ([record[name] for record in records] for name in ("first", "control"))
    counts = ", ".join(f"at most {most} at {sum(first <= most for first in firsts)}" for most in (1.05, 1.06, 1.10))
    yield (
        f"Of {len(records)} rows: first calls, median {median(firsts):.2f}, {counts} (native over native: "
        f"{min(controls):.2f} to {max(controls):.2f}). {near(records)}"
    )


def counts(records: Iterable[Record]) -> tuple[int, int]:
    """After the first calls: how many rows are near the table, and how many slower than native, whose own repetition
    is granted."""
    found = [record["after"] for record in records]
    slower = (each["auto"] > SLOWER * max(1.0, each["control"]) for each in found)
    return sum(each["auto"] <= NEAR * each["table"] for each in found), sum(slower)


def near(records: list[Record]) -> str:
    """The same in words."""
    (count, slower), rows = counts(records), len(records)
    return f"After that {count} of {rows} are within 10 % of the table; {slower} are slower than native by over 5 %."


def totals(records: list[Record]) -> Iterator[str]:
    """Of each layout and library, whose calls were made on one communicator."""
    yield from heading(
        "hosts",
        "MPI library",
        "native, s",
        "all first calls: auto over native",
        "native over native",
        "first of each size, ms: auto",
        "native",
        "finding out, s",
        "within 10 % of the table",
        "not slower than native",
    )
    for layout, library in dict.fromkeys((record["layout"], record["mpi"]) for record in records):
        mine = [record for record in records if (record["layout"], record["mpi"]) == (layout, library)]
        auto, native, control = (sum(each["seconds"][who] for each in mine) for who in ("auto", "native", "control"))
        count, slower = counts(mine)
        yield row(
            layout,
            library,
            f"{(native + control) / 2:.1f}",
            f"{2 * auto / (native + control):.2f}",
            f"{control / native:.2f}",
            *(f"{1e3 * sum(each['first_call'][who] for each in mine):.0f}" for who in ("auto", "native")),
            f"{mine[0]['spent'].get('all', 0.0):.2f}",
            f"{count} of {len(mine)}",
            f"{len(mine) - slower} of {len(mine)}",
        )
    yield f"\n{near(records)}"


def longer(records: list[Record]) -> Iterator[str]:
    """After many more calls."""
    yield from heading(*WHERE, "all tried after calls", *AFTER)
    for record in records:
        yield row(*where(record), record["settled"] or "-", *after(record))


TABLES: dict[str, tuple[str, Callable[[list[Record]], Iterator[str]]]] = {
    "alone": ("learning.jsonl", lambda records: early(records, True)),
    "together": ("learning-together.jsonl", lambda records: early(records, False)),
    "second": ("learning-second.jsonl", totals),
    "longer": ("learning-longer.jsonl", longer),
}


def main() -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path)
    args = parser.parse_args()
    page = args.into.read_text(encoding="utf-8") if args.into else ""
    for name, (file, table) in TABLES.items():
        lines = [f"<!-- {name}: begin -->", *table(read(args.folder / file)), f"<!-- {name}: end -->"]
        if args.into:
            page = replaced(page, name, "\n".join(lines))
        else:
            print("\n".join(lines), end="\n\n")
    if args.into:
        args.into.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
