"""Commands about tuning tables: tune, table, explain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from hiercoll import settings
from hiercoll.cli.common import (
    CALLED,
    SIZES_HELP,
    SizesType,
    SizeType,
    Together,
    layout_option,
    main,
    measured,
    memory_option,
    quiet_progress,
    sizes_of,
    tell_once,
    wide_console,
    world,
)
from hiercoll.cli.learned import append_lines, learned_folder, learned_words, lessons_for, print_learned, read_learned
from hiercoll.collectives import COLLECTIVES, NATIVE, Order, Sizes, called, tuned
from hiercoll.errors import ArgumentError, TableError
from hiercoll.learned import forget, table_of, write_whole
from hiercoll.model.cost import Links
from hiercoll.model.machine import get_machine
from hiercoll.tables import (
    OLD,
    PLAN,
    SINGLE,
    Choice,
    Entry,
    Table,
    Variant,
    describe_timing,
    dump,
    environment_table,
    load,
)
from hiercoll.topology import Topology, parse_layout
from hiercoll.tuner import FREE, ROOT_ALONE, Combining, decide
from hiercoll.tuning.search import Search, Selection, SizeResult, choices
from hiercoll.units import format_size, format_time

if TYPE_CHECKING:
    from mpi4py import MPI

CALLS = [each.name for each in called()]
DEFAULT_SIZES = ", ".join(f"{CALLED[name].tuned} for {name}" for name in tuned())


class _Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, as in 90s, 10m, 1.5h or 90."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value.strip())
        if not match or float(match[1]) == 0:
            self.fail(f"{value!r} is not a time such as 90s, 10m or 1.5h", param, ctx)
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


@main.command()
@click.argument("collective", type=click.Choice([*CALLS, "all"]), default="all")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("table.json"),
    show_default=True,
    help="The table; entries for other settings in it are kept.",
)
@click.option("--budget", "-b", type=_Duration(), default="10m", show_default=True, help="Time to spend, about.")
@click.option(
    "--sizes",
    "-s",
    type=SizesType(),
    help=f"{SIZES_HELP}. Default: {DEFAULT_SIZES}.",
)
@memory_option("; cuda binds each rank to a device, and tries every transport")
@click.option("--fresh", is_flag=True, help="Do not go on from what an interrupted run has left.")
def tune(collective: str, output: Path, budget: float, sizes: list[int] | None, memory: str, fresh: bool) -> None:
    """Measure what is fastest here and write a table; under mpiexec or srun.

    Public calls are measured one at a time, as programs make them. Slow candidates drop out early, and
    sizes between two winners are tried until the crossover is found. What is left replaces native where new
    samples show it faster, beyond chance, and not slower in rows of calls; plans likewise. An
    interrupted run goes on from OUTPUT.part.
    """
    if collective != "all" and not (record := COLLECTIVES[collective]).tuned:
        why = ROOT_ALONE if record.sizes is Sizes.ROOT else f"the table of {record.family} goes for it"
        raise ArgumentError("collective", f"one of {', '.join(tuned())}", f"{collective}: {why}")
    comm = world()
    if comm.size == 1:
        click.echo("One rank has nothing to gain: start this with mpiexec or srun, as the job will be.", err=True)
    with Together(comm):
        _tune(comm, measured(collective, memory), output, budget, sizes, memory, fresh)


def _tune(
    comm: MPI.Intracomm,
    names: list[str],
    output: Path,
    budget: float,
    sizes: list[int] | None,
    memory: str,
    fresh: bool,
) -> None:
    from hiercoll.runtime.session import from_root
    from hiercoll.tools import bench as b
    from hiercoll.tools.measuring import arrays_of

    if sizes and min(sizes) < 1:
        raise ArgumentError("--sizes", "sizes of at least one byte", min(sizes))
    runner = b.Bench(comm, arrays=arrays_of(comm, memory))
    about = b.provenance(comm, runner.topology, memory)
    from_root(comm, lambda: load(output) if output.exists() else Table())  # which is said to be wrong before all work
    notes = _Notes(_notes_of(output, about), about, fresh) if comm.rank == 0 else None
    links, transports = runner.links(), runner.transports()
    begin, entries = runner.clock(), []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[found]}"), TimeElapsedColumn())
    with quiet_progress(comm, *columns) as progress:
        if comm.rank == 0:
            tell_once(progress.console, f"tuning {', '.join(names)} on {comm.size} ranks, for {budget:.0f} s at most")
        for number, name in enumerate(names):
            done = comm.bcast(notes.done(name) if notes is not None else None)
            share = (budget - (runner.clock() - begin)) / (len(names) - number)
            search = Search(
                name, runner.topology, runner.open, runner.clock, share, links, done=done, transports=transports
            )
            wanted = sizes_of(name, sizes or SizesType().convert(CALLED[name].tuned, None, None))
            results = _search(search, wanted, notes, progress)
            entries.append(_entry(name, results, about, runner.topology, links))
    if comm.rank == 0:
        # Another job may have written its own in the meantime.
        table = (load(output) if output.exists() else Table()).merged(Table(tuple(entries)))
        write_whole(output, dump(table))
        assert notes is not None
        notes.remove()
        _print_summary(entries)
        click.echo(f"{output}: {len(table.entries)} entries")


def _search(search: Search, sizes: list[int], notes: _Notes | None, progress: Progress) -> list[SizeResult]:
    """The results; what is selected is noted, and shown with what is decided."""
    name = search.collective
    task = progress.add_task(f"tuning {name}", total=2 * len(set(sizes)), found="")

    def note(selection: Selection) -> None:
        if notes is not None:
            notes.add(name, selection)
        found = f"{format_size(selection.size)}: {len(selection.finalists)} may be faster than native"
        progress.update(task, advance=1, found=found, refresh=True)

    def report(result: SizeResult) -> None:
        found = f"{format_size(result.size)}: {result.winner.spelled(name)}, {result.calls.gain:.2f}x native"
        progress.update(task, advance=1, found=found, refresh=True)

    search.note, search.report = note, report
    return search.run(sizes)


def _entry(
    collective: str, results: list[SizeResult], about: dict[str, Any], topology: Topology, links: Links
) -> Entry:
    return Entry(
        collective=collective,
        mpi=about["mpi"],
        memory=about["memory"],
        nodes=topology.node_sizes,
        placement=topology.placement,
        choices=choices(results),
        figures=tuple(figure for result in results for figure in result.figures),
        about=about,
        links=links,
        plans=() if (plans := choices(results, held=True)) == choices(results) else plans,
    )


def _setting(about: dict[str, Any]) -> dict[str, Any]:
    """In which notes are good."""
    return {name: about[name] for name in ("mpi", "layout", "memory", "hiercoll", "ranks")}


def _notes_of(output: Path, about: dict[str, Any]) -> Path:
    """Where notes lie: apart from those of jobs in other settings that write the same table."""
    return output.with_name(f"{output.name}.{crc32(json.dumps(_setting(about)).encode()):08x}.part")


class _Notes:
    """What has been selected so far, a line per size, so that an interrupted run can go on."""

    def __init__(self, path: Path, about: dict[str, Any], fresh: bool) -> None:
        self._path = path
        self._setting = _setting(about)
        if fresh or self._read_setting() != self._setting:
            path.write_text(json.dumps(self._setting) + "\n", encoding="utf-8")
        elif not path.read_text(encoding="utf-8").endswith("\n"):  # cut off in the middle of a line
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def _read_setting(self) -> Any:
        try:
            with self._path.open(encoding="utf-8") as file:
                return json.loads(file.readline())
        except (OSError, ValueError):
            return None

    def add(self, collective: str, selection: Selection) -> None:
        """Note a size."""
        line = {"collective": collective, **selection.record()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def done(self, collective: str) -> dict[int, Selection]:
        """The sizes noted; a line that was cut off is left out."""
        found = {}
        for line in self._path.read_text(encoding="utf-8").splitlines()[1:]:
            try:
                data = json.loads(line)
                if data["collective"] == collective:
                    found[data["size"]] = Selection.of(data)
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def remove(self) -> None:
        """The table is written."""
        self._path.unlink(missing_ok=True)


def _print_summary(entries: Iterable[Entry]) -> None:
    """Tables in words: per entry, the choices for calls and for plans, and what they gain at the sizes measured."""
    console = wide_console()
    for entry in entries:
        _print_choices(console, entry, entry.choices, SINGLE)
        if entry.plans:
            _print_choices(console, entry, entry.plans, PLAN)


def _print_choices(console: Console, entry: Entry, chosen: Sequence[Choice], timing: str) -> None:
    """The choices for calls, or for plans. Of what was measured otherwise, the times are left out."""
    date = f"; {entry.about['date']}" if "date" in entry.about else ""
    how = f"made from {OLD}: tune again" if entry.is_old else describe_timing(timing)
    where = f"{entry.collective} on {entry.layout} with {entry.mpi}, {entry.memory} memory"
    console.print(f"{where}, {how}{date}", highlight=False)
    grid = Grid()
    for column, justify in (
        ("from", "right"),
        ("algorithm", "left"),
        ("measured at", "right"),
        ("time", "right"),
        ("middle half", "right"),
        ("native's call", "right"),
        ("gain", "right"),
    ):
        grid.add_column(column, justify=justify)  # type: ignore[arg-type]
    for number, choice in enumerate(chosen):
        end = chosen[number + 1].start if number + 1 < len(chosen) else None
        rows = _rows(entry, choice.start, end, choice.variant, timing)
        first = [format_size(choice.start), choice.variant.spelled(entry.collective)]
        for row in rows or [["", "", "", "", ""]]:
            grid.add_row(*first, *row)
            first = ["", ""]
    console.print(grid)


def _rows(entry: Entry, start: int, end: int | None, variant: Variant, timing: str) -> list[list[str]]:
    """What was measured of a choice in its range, beside native's single call."""
    rows = []
    ranked = [figure for figure in entry.figures if figure.ranked]
    for size in sorted({f.size for f in ranked if start <= f.size and (end is None or f.size < end)}):
        here = {(f.variant.key, f.timing): f for f in ranked if f.size == size}
        own, native = here.get((variant.key, timing)), here.get(((NATIVE,), SINGLE))
        if own is None:
            continue
        gain = f"{native.median / own.median:.2f}x" if native and own is not native else ""
        spread = f"{format_time(own.q1)} to {format_time(own.q3)}"
        rows.append(
            [format_size(size), format_time(own.median), spread, format_time(native.median) if native else "", gain]
        )
    return rows


@main.group()
def table() -> None:
    """Look at tuning tables and at what jobs have learned; check, merge and compare tables."""


TABLE_FILE = click.Path(dir_okay=False, path_type=Path)


FOLDER = click.Path(file_okay=False, path_type=Path)


@table.command("show")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--learned", is_flag=True, help="What jobs have learned; FILE: its folder. Default: the user's own.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --learned: append it here (JSON Lines).",
)
def table_show(file: Path | None, learned: bool, json_file: Path | None) -> None:
    """What a table chooses, and what was measured; or what "auto" has learned in programs' own calls."""
    if learned:
        _show_learned(learned_folder(file), json_file)
        return
    if file is None:
        raise click.UsageError("Missing argument 'FILE' (or --learned).")
    if json_file is not None:
        raise click.UsageError("--json needs --learned: a table is JSON already.")
    _print_summary(load(file).entries)


def _show_learned(folder: Path, json_file: Path | None) -> None:
    known = read_learned(folder)
    if not known:
        click.echo(f"{folder}: nothing learned yet")
    elif json_file is not None:
        append_lines(known, json_file)
    else:
        print_learned(known)


@table.command("forget")
@click.argument("folder", type=FOLDER, required=False)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def table_forget(folder: Path | None, yes: bool) -> None:
    """Delete what jobs have learned, in FOLDER or the user's own; "auto" begins anew."""
    place = learned_folder(folder)
    if not yes:
        click.confirm(f"Delete what jobs have learned in {place}?", abort=True)
    count = forget(place)
    click.echo(f"{place}: {count} files deleted" if count else f"{place}: nothing learned yet")


@table.command("check")
@click.argument("files", type=TABLE_FILE, nargs=-1, required=True)
def table_check(files: tuple[Path, ...]) -> None:
    """Say whether tables can be used; exit with 1 if one cannot."""
    wrong = 0
    for file in files:
        try:
            entries = load(file).entries
            old = any(entry.is_old for entry in entries)
            click.echo(f"{file}: good, {len(entries)} entries" + (f", made from {OLD}: tune again" if old else ""))
        except TableError as error:
            wrong += 1
            click.echo(str(error), err=True)
    if wrong:
        raise SystemExit(1)


@table.command("merge")
@click.argument("files", type=TABLE_FILE, nargs=-1)
@click.option("--learned", is_flag=True, help="And what jobs have learned, for settings that the tables lack.")
@click.option("--output", "-o", type=TABLE_FILE, required=True, help="The table to write.")
def table_merge(files: tuple[Path, ...], learned: bool, output: Path) -> None:
    """One table with the entries of all; of two for the same setting, the later one. With --learned, what jobs have
    learned becomes a table."""
    if not files and not learned:
        raise click.UsageError("Missing argument 'FILES...' (or --learned).")
    merged = Table()
    for file in files:
        merged = merged.merged(load(file))
    if learned:
        merged = _with_learned(merged)
    write_whole(output, dump(merged))
    click.echo(f"{output}: {len(merged.entries)} entries")


def _with_learned(table: Table) -> Table:
    """The table's entries, which were measured size by size, and those learned for other settings."""
    folder = learned_folder(None)
    learned = table_of(read_learned(folder))
    if not learned.entries:
        raise TableError(folder, "files", "something that jobs have learned", "nothing")
    present = {entry.setting for entry in table.entries}
    return Table((*table.entries, *(entry for entry in learned.entries if entry.setting not in present)))


@table.command("diff")
@click.argument("one", type=TABLE_FILE)
@click.argument("other", type=TABLE_FILE)
def table_diff(one: Path, other: Path) -> None:
    """Where two tables choose differently; exit with 1 if they do."""
    left, right = ({entry.setting: entry for entry in load(file).entries} for file in (one, other))
    differences = 0
    for setting in dict.fromkeys([*left, *right]):
        a, b = left.get(setting), right.get(setting)
        entry = a or b
        assert entry is not None
        name = f"{entry.collective} on {entry.layout} with {entry.mpi}, {entry.memory} memory"
        if a is None or b is None:
            differences += 1
            click.echo(f"{name}: only in {one if b is None else other}")
            continue
        starts = sorted({choice.start for choice in (*a.choices, *b.choices, *a.plans, *b.plans)})
        for start, held in ((start, held) for held in (False, True) for start in starts):
            mine, theirs = a.choice(start, held=held), b.choice(start, held=held)
            if mine.key != theirs.key and not (held and not a.plans and not b.plans):
                differences += 1
                both = f"{mine.spelled(a.collective)} | {theirs.spelled(a.collective)}"
                click.echo(f"{name}{', plans' if held else ''}: from {format_size(start)}: {both}")
    if differences:
        raise SystemExit(1)


@main.command()
@click.argument("collective", type=click.Choice(CALLS))
@click.option("--size", "-s", type=SizeType(), help="Bytes per block; their mean, if they differ.")
@layout_option("2x4")
@click.option("--table", "table_file", type=TABLE_FILE, help="Default: $HIERCOLL_TABLE, or the user's own table.")
@click.option(
    "--mpi", default="", help='The MPI library, as tables name it ("MPICH 5.0.2"). Default: any in the table.'
)
@memory_option()
@click.option("--in-place", "inplace", is_flag=True, help="With the input in the receive buffer.")
@click.option("--plan", "held", is_flag=True, help="For a plan, as of alltoall_init.")
@click.option("--exact", is_flag=True, help="Of a reduction: of integers, or by MIN or MAX. Default: sums of floats.")
@click.option("--machine", "-m", default="", help="What the model takes the machine for. Default: $HIERCOLL_MACHINE.")
def explain(
    collective: str,
    size: int | None,
    layout: str,
    table_file: Path | None,
    mpi: str,
    memory: str,
    inplace: bool,
    held: bool,
    exact: bool,
    machine: str,
) -> None:
    """What "auto" chooses for a size and layout, why, and the runners-up."""
    if size is None and COLLECTIVES[collective].buffers:
        raise click.UsageError("Missing option '--size' / '-s'.")
    (size,) = sizes_of(collective, [size or 0])
    found = load(table_file) if table_file else environment_table()
    if machine:
        found = replace(found, machine=get_machine(machine))
    topology = parse_layout(layout)
    lessons = lessons_for(collective, topology, size, inplace, memory, mpi, held=held)
    if not mpi:
        names = sorted({entry.mpi for entry in found.entries} | {setting.mpi for setting in lessons})
        mpi = names[0] if len(names) == 1 else ""
        if len(names) > 1:
            raise ArgumentError("--mpi", f"one of {', '.join(names)}", "nothing")
    combining = _combining(collective, exact)
    if not combining.changes:  # what was learned may give other bits; plans keep to the calls' choice
        lessons, held = {}, False
    family = COLLECTIVES[collective].family
    decision = decide(
        family, topology, size, inplace=inplace, table=found, mpi=mpi, memory=memory, held=held, combining=combining
    )
    kind = "" if combining.changes else " of inexact sums, always the same bits,"
    what = f"{collective} of {format_size(size)}{kind}" if COLLECTIVES[collective].buffers else collective
    what = f"{what} on {topology}"
    otherwise = decision.variant.spelled(collective)
    learned = learned_words(collective, lessons)
    is_table = found.decides(family, mpi, memory, topology)
    if learned is not None and (not is_table or COLLECTIVES[collective].sizes is Sizes.OWN):
        name, words = learned
        click.echo(f"{what}: {name}\n{words}\nwithout that: {otherwise}")
    else:
        click.echo(f"{what}: {otherwise}")
    click.echo(f"by {decision.reason}")
    best = decision.ranking[0].seconds if decision.ranking else 0.0
    for candidate in decision.ranking[:6]:
        ratio = f"{candidate.seconds / best:.2f}" if best else ""
        click.echo(f"  {format_time(candidate.seconds):>10}  {ratio:>5}  {candidate.variant.spelled(collective)}")
    if decision.is_measured and decision.ranking and decision.ranking[0].variant.key != decision.variant.key:
        why = "these are times of calls" if held else "it was not faster beyond chance, or slower in rows of calls"
        click.echo(f"not the first of these: {why}")


def _combining(collective: str, exact: bool) -> Combining:
    """What a reduction that names no order asks for: bits that stay the same, where sums are inexact."""
    if not COLLECTIVES[collective].operation:
        return FREE
    asked = settings.order()
    order = Order[asked.upper()] if asked else Order.ANY
    return Combining(order, order is Order.ANY, exact or asked == "any")
