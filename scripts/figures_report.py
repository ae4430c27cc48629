"""The figures of docs/performance.md, from the records that scripts/figures and others have left.

    python scripts/figures_report.py FOLDER [--into docs/performance.md]

Reads FOLDER (bench-*.jsonl, reductions-bench-*.jsonl and host-bench-*.jsonl with the tuning tables beside them,
native-*, overhead-*, uneven-*, transposes-* and raw-links-*.jsonl) and building.jsonl, memory.jsonl and
packing.jsonl of the folder above. Prints Markdown, section by section; with --into puts each between its marks in that
file. Exits with 1 where a record is missing that a section needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from hiercoll.tables import ROW, SINGLE, Variant, describe_timing, load
from hiercoll.tuning.search import FAR
from hiercoll.units import format_size

MARGIN = 0.95  # native/hiercoll that "never slower" allows
TIMINGS = (SINGLE, ROW)
PACKETS = (1500, 9000)  # bytes, for which transposes have been measured
TRANSPOSES = {
    "control": "native again",
    "aggregate form=leader": "aggregate, leaders",
    "aggregate": "shares",
    "aggregate form=lane": "lanes",
    "aggregate window=4": "four at a time",
    "scatter_destination": "scatter_destination",
    "drop-in": "drop-in",
}
Record = dict[str, Any]


class MissingError(Exception):
    """There is no record for a section."""


@dataclass(frozen=True)
class Goals:
    """What is wanted of tuned calls: ``means``, geometric, of native/hiercoll, by collective and layout (or "all"); and
    shares of the bound that links set, by layouts, of the ``bounded`` collectives from ``large`` bytes on."""

    means: dict[str, dict[str, float]]
    bounded: tuple[str, ...]
    efficient: tuple[tuple[tuple[str, ...], float], ...]
    large: int


LAB = Goals(
    {"alltoall": {"all": 1.4, "4x8": 1.7}, "allgather": {"all": 1.7, "4x8": 2.2}},
    ("alltoall", "allgather"),
    ((("4x4", "4x4:cyclic", "5+3+4"), 0.9), (("4x8",), 0.8)),
    4096,
)
REDUCTIONS = Goals(
    {"allreduce": {"4x4": 1.3, "4x8": 1.6}, "bcast": {"all": 1.2}},
    ("allreduce",),
    ((("4x4",), 0.85), (("4x8",), 0.75)),
    256 << 10,
)


def records(folder: Path, pattern: str) -> list[Record]:
    """The lines of all files of that name. Raises MissingError."""
    found = [
        json.loads(line)
        for file in sorted(folder.glob(pattern))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    if not found:
        raise MissingError(f"{folder}: no {pattern}; run scripts/figures")
    return found


@dataclass(frozen=True)
class Point:
    """All that was measured of one collective at one size, timed so, with one library on one layout."""

    records: list[Record]
    held_out: bool

    @property
    def first(self) -> Record:
        """Any of them: for what they have in common."""
        return self.records[0]

    def of(self, algorithm: str) -> Record:
        """The record of that algorithm with its default parameters. Raises MissingError."""
        for record in self.records:
            subject = record["subject"]
            if subject["algorithm"] == algorithm and not subject["params"]:
                return record
        first = self.first
        raise MissingError(f"{first['collective']} {first['size']} on {first['layout']}: no record of {algorithm}")

    @property
    def auto(self) -> Record:
        """What a program gets."""
        return self.of("auto")

    @property
    def chosen(self) -> str:
        """What "auto" ran."""
        return Variant(**self.auto["chosen"]).spelled(self.first["collective"])

    @property
    def efficiency(self) -> float:
        """The share of the bound that auto reaches."""
        return float((self.first["bound"] or 0.0) / self.auto["median"])

    @property
    def behind(self) -> float:
        """auto's time over that of the fastest of itself, native and the table's best."""
        rivals = [record["median"] for record in self.records if record["subject"]["algorithm"] != "control"]
        return float(self.auto["median"] / min(rivals))

    @property
    def name(self) -> str:
        """In words."""
        first = self.first
        return f"{first['collective']} {format_size(first['size'])} {first['layout']} {first['mpi']}"


def read(folder: Path, prefix: str = "") -> list[Point]:
    """All points of the lab, or of files whose names begin so. Raises MissingError."""
    points = []
    for file in sorted(folder.glob(f"{prefix}bench-*.jsonl")):
        path = folder / file.name.replace("bench-", "table-").replace(".jsonl", ".json")
        if not path.exists():
            raise MissingError(f"{path}: missing; run scripts/figures")
        table = load(path)
        tuned = {entry.collective: {figure.size for figure in entry.figures} for entry in table.entries}
        groups: defaultdict[tuple[str, int, str], list[Record]] = defaultdict(list)
        for record in records(folder, file.name):
            groups[record["collective"], record["size"], record["timing"]].append(record)
        points += [Point(group, size not in tuned[name]) for (name, size, _), group in groups.items()]
    if not points:
        raise MissingError(f"{folder}: no {prefix}bench-*.jsonl; run scripts/figures")
    every = {(each.first["collective"], each.first["size"], each.first["timing"]) for each in points}
    files = {(each.first["layout"], each.first["mpi"]) for each in points}
    if len(points) != len(every) * len(files):
        raise MissingError(f"{folder}: {len(points)} points of {len(every)} in {len(files)} files; run scripts/figures")
    return points


Part = Callable[[list[Point]], Iterator[str]]


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs)) if logs else float("nan")


def us(seconds: float) -> str:
    """Microseconds."""
    return f"{seconds * 1e6:.3g}" if seconds < 1e-5 else f"{seconds * 1e6:.0f}"


def interval(middle: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its interval, if there is one."""
    if middle is None:
        return "-"
    return f"{middle:.2f} ({low:.2f} to {high:.2f})" if low is not None and high is not None else f"{middle:.2f} (?)"


def gain(record: Record) -> str:
    """Native's time over that of a record."""
    return interval(record["gain"], record["gain_low"], record["gain_high"])


def slower(records: Iterable[Record]) -> list[Record]:
    """Those that are slower than native by more than the margin, beyond their interval."""
    return [record for record in records if record["gain_high"] is not None and record["gain_high"] < MARGIN]


def row(*cells: object) -> str:
    """Of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def heading(*cells: object) -> Iterator[str]:
    """Of a Markdown table."""
    yield row(*cells)
    yield "|---" * len(cells) + "|"


def lab(folder: Path) -> Iterator[str]:
    """What tuned calls gain on several hosts: what was wanted first, misses before the rest; then everything."""
    yield from several_hosts(folder, "", LAB)


def reductions(folder: Path) -> Iterator[str]:
    """The same of allreduce and bcast."""
    yield from several_hosts(folder, "reductions-", REDUCTIONS)


def several_hosts(folder: Path, prefix: str, goals: Goals) -> Iterator[str]:
    """The points of one kind of files, beside what was wanted."""
    points = read(folder, prefix)
    first = points[0].first
    path = folder / f"{prefix}commit"
    commit = path.read_text().strip() if path.exists() else "not recorded"
    dates = sorted({point.first["date"][:10] for point in points})
    libraries = sorted({point.first["mpi"] for point in points})
    yield (
        f"Measured {' to '.join(sorted({dates[0], dates[-1]}))}, commit {commit}: {', '.join(libraries)}; mpi4py "
        f"{first['mpi4py']}, Python {first['python']}, {first['processor']}, {first['system']}."
    )
    yield ""
    yield from wanted(points, goals)
    summary, efficiency = partial(means, goals=goals), partial(bounds, goals=goals)
    yield from by_timing(points, "", summary, never_slower, efficiency, held_out, disturbed, everything)


def by_timing(points: list[Point], where: str, summary: Part, *parts: Part) -> Iterator[str]:
    """A heading for each timing, a table that sums up, and what else is said of those points."""
    for timing in TIMINGS:
        mine = [point for point in points if point.first["timing"] == timing]
        yield f"\n### {(where + describe_timing(timing)).capitalize()}\n"
        yield from summary(mine)
        yield ""
        for part in parts:
            yield from part(mine)


def bounded(points: list[Point], goals: Goals, layouts: tuple[str, ...]) -> list[Point]:
    """Those on these layouts of which a share of the bound is wanted."""
    kinds = [point for point in points if point.first["collective"] in goals.bounded and point.first["bound"]]
    return [point for point in kinds if point.first["layout"] in layouts and point.first["size"] >= goals.large]


def wanted(points: list[Point], goals: Goals) -> Iterator[str]:
    """A table of goals, those missed first."""
    rows: list[tuple[bool, str, str]] = []
    for timing in TIMINGS:
        mine = [point for point in points if point.first["timing"] == timing]
        if not mine:
            raise MissingError(f"no lab figures of {describe_timing(timing)}")
        lost = len(slower(point.auto for point in mine))
        rows.append((not lost, f"{timing}: never slower than native by more than 5 %, beyond the noise",
                     f"slower at {lost} of {len(mine)} points"))  # fmt: skip
        for collective, by_layout in goals.means.items():
            for layout, least in by_layout.items():
                some = [p for p in mine if p.first["collective"] == collective and layout in ("all", p.first["layout"])]
                got = mean(point.auto["gain"] for point in some)
                where = "on all layouts" if layout == "all" else f"on {layout}"
                rows.append((got >= least, f"{timing}: {collective} {where}, geometric mean {least}", f"{got:.2f}"))
        for layouts, least in goals.efficient:
            large = bounded(mine, goals, layouts)
            short = [point for point in large if point.efficiency < least]
            if large:
                where = f"{goals.large >> 10} KiB on, {', '.join(layouts)}"
                rows.append((not short, f"{timing}: {least:.0%} of the bound from {where}",
                             f"at {len(large) - len(short)} of {len(large)} points"))  # fmt: skip
    yield from heading("wanted (native/hiercoll, public calls)", "there is", "")
    for met, want, got in sorted(rows, key=lambda each: each[0]):
        yield row(want, got, "" if met else "missed")


def means(points: list[Point], goals: Goals) -> Iterator[str]:
    """Geometric means by collective and layout, and the best and the worst point."""
    layouts = list(dict.fromkeys(point.first["layout"] for point in points))
    yield from heading("geometric mean of native/hiercoll", *layouts, "all", "least", "most")
    for collective in goals.means:
        mine = [point for point in points if point.first["collective"] == collective]
        cells = [f"{mean(p.auto['gain'] for p in mine if p.first['layout'] == layout):.2f}" for layout in layouts]
        gains = [point.auto["gain"] for point in mine]
        yield row(collective, *cells, f"{mean(gains):.2f}", f"{min(gains):.2f}", f"{max(gains):.2f}")


def never_slower(points: list[Point]) -> Iterator[str]:
    """Where tuned calls lose, with the margin, the power and the control of that statement."""
    lost = [point for point in points if slower([point.auto])]
    native = [point for point in lost if point.chosen == "native"]
    widths = [p.auto["gain_high"] / p.auto["gain_low"] for p in points if p.auto["gain_low"]]
    sharp = sum(width < 1.05**2 for width in widths)
    control = slower(point.of("control") for point in points)
    yield (
        f"- Slower than native by more than 5 % (95 % interval of native/hiercoll wholly below {MARGIN}): {len(lost)} "
        f"of {len(points)} points. At {len(native)} of them the call *is* native: what is lost is what the call costs."
    )
    others = [point.name for point in lost if point.chosen != "native"]
    if others:
        yield f"- The others: {', '.join(others)}."
    yield (
        f"- Control, native against itself in the same way: {len(control)}. Power: the upper end of the interval is in "
        f"the median {median(widths) ** 0.5 - 1:.0%} from its middle; at {sharp} of {len(widths)} points less than 5 %."
    )


def bounds(points: list[Point], goals: Goals) -> Iterator[str]:
    """How near large messages come to what the links allow."""
    for layouts, _ in goals.efficient:
        large = bounded(points, goals, layouts)
        if large:
            shares = [point.efficiency for point in large]
            yield (
                f"- Share of the bound from {goals.large >> 10} KiB on, {', '.join(layouts)}: median "
                f"{median(shares):.0%}, least {min(shares):.0%}."
            )


def held_out(points: list[Point]) -> Iterator[str]:
    """Whether choices between tuned sizes are right."""
    held = [point for point in points if point.held_out]
    close = sum(point.behind <= 1.05 for point in held)
    alike = sum(abs(log(p.of("native")["median"] / p.of("control")["median"])) <= log(1.05) for p in held)
    if held:
        yield (
            f"- Sizes that were not tuned at: at {close} of {len(held)} auto is within 5 % of the fastest of itself, "
            f"native and the table's best two; native is within 5 % of itself at {alike}."
        )


def series(points: list[Point]) -> dict[tuple[str, str, str], list[Point]]:
    """By collective, layout and library, ascending in size."""
    groups: defaultdict[tuple[str, str, str], list[Point]] = defaultdict(list)
    for point in sorted(points, key=lambda each: int(each.first["size"])):
        groups[point.first["collective"], point.first["layout"], point.first["mpi"]].append(point)
    return dict(sorted(groups.items()))


def disturbed(points: list[Point]) -> Iterator[str]:
    """Where native took far longer than at both neighbouring sizes."""
    found = [
        here.name
        for rows in series(points).values()
        for before, here, after in zip(rows, rows[1:], rows[2:], strict=False)
        if here.of("native")["median"] > FAR * max(each.of("native")["median"] for each in (before, after))
    ]
    if found:
        yield f"- Native took more than {FAR} times as long as at both neighbouring sizes at: {', '.join(found)}."


def everything(points: list[Point]) -> Iterator[str]:
    """All points, by collective, layout and library."""
    for (collective, layout, library), rows in series(points).items():
        yield f"\n**{collective}, {layout}, {library}**, {describe_timing(rows[0].first['timing'])}\n"
        yield from heading(
            "size", "native us", "auto us", "auto is", "native/auto (95 %)", "native/native (95 %)", "bound us", "share"
        )
        for point in rows:
            first = point.first
            yield row(
                f"{format_size(first['size'])}{' *' if point.held_out else ''}",
                us(point.of("native")["median"]),
                us(point.auto["median"]),
                point.chosen,
                gain(point.auto),
                gain(point.of("control")),
                us(first["bound"]) if first["bound"] else "-",
                f"{point.efficiency:.0%}" if first["size"] >= 4096 else "-",
            )


def measured(found: list[Record]) -> str:
    """When, and with what."""
    dates, libraries = (sorted({record[name] for record in found}) for name in ("date", "mpi"))
    days = " to ".join(sorted({dates[0][:10], dates[-1][:10]}))
    return f"Measured {days}: {', '.join(libraries)}; mpi4py {found[0]['mpi4py']}, {found[0]['processor']}."


def one_host(folder: Path) -> Iterator[str]:
    """What tuned calls gain on one host."""
    points = read(folder, "host-")
    first = points[0].first
    libraries = sorted({point.first["mpi"] for point in points})
    yield f"Measured {first['date'][:10]}, {first['layout']}: {', '.join(libraries)}; {first['processor']}."
    yield from by_timing(points, "one host, ", by_library, never_slower, everything)


def by_library(points: list[Point]) -> Iterator[str]:
    """Geometric means by collective and library."""
    libraries = sorted({point.first["mpi"] for point in points})
    yield from heading("geometric mean of native/hiercoll", *libraries)
    for collective in LAB.means:
        mine = [point for point in points if point.first["collective"] == collective]
        yield row(
            collective, *(f"{mean(p.auto['gain'] for p in mine if p.first['mpi'] == each):.2f}" for each in libraries)
        )


def native(folder: Path) -> Iterator[str]:
    """What the benchmarks call native beside a loop written by hand."""
    found = records(folder, "native-*.jsonl")
    yield measured(found)
    agree = sum(record["agree"] for record in found)
    yield f"They agree within the noise of each with itself at {agree} of {len(found)} points.\n"
    yield from heading("", "where", "size", "timing", "loop/bench (95 %)", "loop/loop", "bench/bench", "agree")
    for record in found:
        where = f"{record['layout']}, {record['hosts']} host{'s' if record['hosts'] > 1 else ''}, {record['mpi']}"
        ratios = [interval(*values) for values in record["ratios"].values()]
        size = format_size(record["size"])
        yield row(record["collective"], where, size, record["timing"], *ratios, "yes" if record["agree"] else "no")


def overhead(folder: Path) -> Iterator[str]:
    """What a call costs on 2 ranks."""
    found = records(folder, "overhead-*.jsonl")
    yield measured(found)
    libraries, timings = (list(dict.fromkeys(record[name] for record in found)) for name in ("mpi", "timing"))
    for timing in timings:
        mine = {record["mpi"]: record["seconds"] for record in found if record["timing"] == timing}
        yield f"\n**{describe_timing(timing).removeprefix('public calls, ').capitalize()}**\n"
        yield from heading("us, median (times comm.Alltoall)", *libraries)
        medians = [{name: each["median"] for name, each in mine[library].items()} for library in libraries]
        for name in medians[0]:
            yield row(name, *(f"{us(each[name])} ({each[name] / each['comm.Alltoall']:.2f})" for each in medians))


def uneven(folder: Path) -> Iterator[str]:
    """Alltoallv of the drop-in communicator."""
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    every = records(folder, "uneven-*.jsonl")
    yield measured(every) + "\n"
    for record in every:
        groups[f"{record['layout']}, {record['mpi']}"].append(record)
    yield from heading("", "native us", "drop-in us", "native/drop-in (95 %)", "native/native (95 %)")
    for where, found in groups.items():
        for record in found:
            seconds = record["seconds"]
            yield row(f"{where}, {record['kind']}, mean {format_size(record['mean'])}", us(seconds["native"]),
                      us(seconds["drop-in"]), interval(*record["ratio"]), interval(*record["control"]))  # fmt: skip
        yield row(f"**{where}, geometric mean**", "", "", f"**{mean(each['ratio'][0] for each in found):.2f}**", "")


def building(folder: Path) -> Iterator[str]:
    """The dearest schedules and plans."""
    found = records(folder.parent, "building.jsonl")
    slowest = sorted(found, key=lambda record: -(record["schedule"] + record["plan"]))
    yield (
        f"Measured {found[0]['date'][:10]}, {found[0]['layout']}: the median of {len(found)} variants takes "
        f"{median(record['schedule'] + record['plan'] for record in found) * 1e3:.1f} ms; the slowest:\n"
    )
    yield from heading("", "schedule, ms", "plan, ms")
    for record in slowest[:5]:
        yield row(record["name"], f"{record['schedule'] * 1e3:.1f}", f"{record['plan'] * 1e3:.1f}")


def memory(folder: Path) -> Iterator[str]:
    """Scratch, as stated and as measured."""
    found = records(folder.parent, "memory.jsonl")
    yield f"Measured {found[0]['date'][:10]}, {found[0]['layout']}, blocks of {format_size(found[0]['block'])}.\n"
    yield from heading("", "scratch stated, blocks", "measured", "shared per node, stated")
    for record in found:
        if record["scratch"] or record["shared"]:
            yield row(record["name"], record["scratch"], f"{record['measured']:.1f}", record["shared"])


def packing(folder: Path) -> Iterator[str]:
    """Copies out of and into datatypes, and who takes longest."""
    found = records(folder.parent, "packing.jsonl")
    yield measured(found) + "\n"
    libraries = list(dict.fromkeys(record["mpi"] for record in found))
    yield from heading("us: hiercoll / MPI / NumPy", *libraries)
    points: defaultdict[tuple[str, int, int], dict[str, Record]] = defaultdict(dict)
    for record in found:
        points[record["way"], record["run"], record["stride"]][record["mpi"]] = record["seconds"]
    for (way, run, stride), by_library in points.items():
        cells = (
            " / ".join(us(by_library[library][who]["median"]) for who in ("hiercoll", "MPI", "NumPy"))
            for library in libraries
        )
        yield row(f"{way} runs of {format_size(run)}, every {format_size(stride * run)}", *cells)
    gains = [each["seconds"]["MPI"]["median"] / each["seconds"]["hiercoll"]["median"] for each in found]
    yield f"\nMPI / hiercoll: {min(gains):.2f} to {max(gains):.2f}, geometric mean {mean(gains):.2f}."


def transposes(folder: Path) -> Iterator[str]:
    """Alltoallw of subarrays, beside what the links take, by the bytes of a packet."""
    yield measured(records(folder, "transposes-*.jsonl"))
    for packet in PACKETS:
        yield f"\n**Packets of {packet} bytes**\n"
        found, links = (records(folder, f"{name}-{packet}.jsonl") for name in ("transposes", "raw-links"))
        yield from of_transposes(found, {record["bytes"]: record["seconds"]["median"] for record in links})


def of_transposes(found: list[Record], links: dict[int, float]) -> Iterator[str]:
    """With the seconds that links alone take, by the bytes from one host to another."""
    yield from heading("hosts, N", "calls before", "native, ms", "links alone, ms", *TRANSPOSES.values())
    beyond: defaultdict[str, list[float]] = defaultdict(list)
    gains: defaultdict[str, list[float]] = defaultdict(list)
    for record in sorted(found, key=lambda record: (record["layout"], record["mpi"], record["number"])):
        native, alone = record["median"]["native"], links[8 * record["number"] ** 3 // record["hosts"] ** 2]
        beyond[f"on {record['layout']}"].append(native / alone)
        gains[f"for N = {record['number']}"].append(record["gain"]["drop-in"][0])
        cells = (interval(*record["gain"].get(name, (None, None, None))) for name in TRANSPOSES)
        where = f"{record['layout']}, {record['mpi']}, {record['number']}"
        yield row(where, record["first"], f"{native * 1e3:.1f}", f"{alone * 1e3:.1f}", *cells)
    yield f"\nGeometric means of native / drop-in: {by_group(gains)}; of native / links alone: {by_group(beyond)}."


def by_group(values: dict[str, list[float]]) -> str:
    """Geometric means, of all and of each group."""
    every = mean(value for group in values.values() for value in group)
    return f"{every:.2f} ({', '.join(f'{mean(group):.2f} {name}' for name, group in values.items())})"


SECTIONS: dict[str, Callable[[Path], Iterator[str]]] = {
    each.__name__: each
    for each in (lab, native, overhead, uneven, reductions, building, memory, packing, transposes, one_host)
}


def section(name: str, folder: Path) -> str:
    """One section between its marks. Raises MissingError."""
    return "\n".join([f"<!-- {name}: begin -->", *SECTIONS[name](folder), f"<!-- {name}: end -->"])


def replaced(page: str, name: str, text: str) -> str:
    """The page with another text between the marks of a section. Raises MissingError."""
    before, begin, rest = page.partition(f"<!-- {name}: begin -->")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not begin or not end:
        raise MissingError(f"the page has no marks for {name}")
    return f"{before}{text}{after}"


def main() -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path)
    args = parser.parse_args()
    try:
        page = args.into.read_text(encoding="utf-8") if args.into else ""
        for name in SECTIONS:
            text = section(name, args.folder)
            if args.into:
                page = replaced(page, name, text)
            else:
                print(text, end="\n\n")
    except MissingError as error:
        sys.exit(str(error))
    except KeyError as error:
        sys.exit(f"{args.folder}: a record without {error}, of an older version: remove it and run scripts/figures")
    if args.into:
        args.into.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
