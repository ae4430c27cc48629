"""The command line: list, verify, show, timeline, bench."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import hiercoll
from hiercoll.algorithms import REGISTRY, Algorithm, Params, get_algorithm
from hiercoll.cost import count_rank
from hiercoll.errors import ArgumentError, HiercollError
from hiercoll.proving import ALL_LAYOUTS, Case, Outcome, cases, decide_all, every_algorithm, generate
from hiercoll.schedule import Join, Schedule
from hiercoll.simulate import Event, count_rounds, simulate
from hiercoll.timeline import matrix_text, to_svg, to_trace
from hiercoll.topology import LAYOUT_HELP, Topology, parse_layout
from hiercoll.tuner import NATIVE
from hiercoll.units import format_size, format_time, parse_size
from hiercoll.verify import describe

if TYPE_CHECKING:
    from mpi4py import MPI

    from hiercoll.bench import Result

COLLECTIVES = ("alltoall", "allgather")
F = TypeVar("F", bound=Callable[..., object])


class _Group(click.Group):
    """Turns hiercoll's errors into messages, never tracebacks."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HiercollError as error:
            raise click.ClickException(str(error)) from None
        except OSError as error:
            raise click.ClickException(f"{error.filename}: {error.strerror}") from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hiercoll.__version__, prog_name="hiercoll")
def main() -> None:
    """Hierarchical alltoall and allgather for mpi4py programs, every schedule proved.

    An ALGORITHM is written as its name with parameters: bruck:radix=4 or
    grouped:form=share,memory=shared. A layout of ranks on nodes is written as 2x4 (2
    nodes of 4 ranks), 3+5, 2x4:cyclic, 3+5:random=7, or the node of each rank, 0,0,1,1.
    """


class _Layout(click.ParamType):  # type: ignore[type-arg]
    name = "layout"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parse_layout(value)
        except ArgumentError as error:
            self.fail(str(error), param, ctx)
        return value


class _Size(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ArgumentError as error:
            self.fail(str(error), param, ctx)


class _Sizes(click.ParamType):  # type: ignore[type-arg]
    """``8,64,4K`` or ``8:64K`` (powers of two from, to) or ``8:64K:8`` (factor)."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            sizes: list[int] = []
            for piece in value.split(","):
                bounds = [parse_size(text) for text in piece.split(":")]
                if len(bounds) == 1:
                    sizes += bounds
                    continue
                low, high, factor = [*bounds, 2][:3]
                if factor < 2 or low < 1 or len(bounds) > 3:
                    raise ArgumentError("sizes", "FROM:TO or FROM:TO:FACTOR, FROM >= 1, FACTOR >= 2", repr(piece))
                while low <= high:
                    sizes.append(low)
                    low *= factor
            return sizes
        except ArgumentError as error:
            self.fail(str(error), param, ctx)


def layout_option(default: str) -> Callable[[F], F]:
    """The option --layout."""
    return click.option("--layout", "-l", type=_Layout(), default=default, show_default=True, help=LAYOUT_HELP + ".")


def parse_algorithm(text: str) -> tuple[str, Params]:
    """Name and given parameters of ``name:key=value,key=value``. Raises ArgumentError."""
    name, _, rest = text.partition(":")
    params: Params = {}
    for piece in filter(None, rest.split(",")):
        key, equals, value = piece.partition("=")
        if not equals or not key:
            raise ArgumentError("algorithm", "name:parameter=value,parameter=value", repr(text))
        params[key] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return name, params


def known_algorithm(collective: str, text: str) -> tuple[Algorithm, Params]:
    """The registry entry and all parameters of an algorithm as written. Raises ArgumentError."""
    name, params = parse_algorithm(text)
    entry = get_algorithm(collective, name)
    return entry, entry.resolve(params)


def doc_section(entry: Algorithm, name: str) -> str:
    """What an algorithm's docstring says under ``name``, on one line."""
    text = inspect.cleandoc(entry.function.__doc__ or "")
    match = re.search(rf"^{name}[^:\n]*: (.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(match[1].split()) if match else ""


@main.command("list")
@click.argument("collective", required=False, type=click.Choice(list(REGISTRY)))
def list_(collective: str | None) -> None:
    """Algorithms, their parameters and constraints."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    for name in [collective] if collective else REGISTRY:
        table = Table(title=name, title_justify="left", expand=True)
        for column in ("algorithm", "what it does", "parameters (default first)", "constraints"):
            table.add_column(column, overflow="fold")
        for entry in REGISTRY[name].values():
            parameters = [
                f"{p.name}={p.default}" + "".join(f"|{c}" for c in p.choices if c != p.default) + f": {p.help}"
                for p in entry.parameters
            ]
            summary = inspect.cleandoc(entry.function.__doc__ or "").split("\n\n")[0].replace("\n", " ")
            table.add_row(entry.name, summary, "\n".join(parameters), doc_section(entry, "Constraints"))
        if name in COLLECTIVES:
            table.add_row(NATIVE, "The MPI library's own collective.", "", "none")
        console.print(table)


@main.command()
@click.argument("collective", required=False, type=click.Choice(list(REGISTRY)))
@click.argument("algorithm", required=False)
@click.option("--all", "everything", is_flag=True, help="Every algorithm, each parameter at every choice.")
@click.option("--combinations", is_flag=True, help="Every combination of every algorithm's parameters (long).")
@click.option(
    "--layout",
    "-l",
    "layouts",
    type=_Layout(),
    multiple=True,
    help=f"{LAYOUT_HELP}; may be repeated. Default: a set of even, uneven and odd ones, block, cyclic and random.",
)
@click.option(
    "--workers", "-j", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True, help="Processes."
)
def verify(
    collective: str | None,
    algorithm: str | None,
    everything: bool,
    combinations: bool,
    layouts: tuple[str, ...],
    workers: int,
) -> None:
    """Prove algorithms: no deadlock, no race, every block delivered.

    Exits with 1 if anything is refuted.
    """
    if sum([everything, combinations, bool(collective)]) != 1:
        raise click.UsageError("name a collective (and an algorithm), or say --all or --combinations")
    chosen = every_algorithm(combinations)
    if algorithm and collective:
        entry, params = known_algorithm(collective, algorithm)
        chosen = [(collective, entry.name, params if ":" in algorithm else None)]
    elif collective:
        chosen = [entry for entry in chosen if entry[0] == collective]
    todo = list(cases(chosen, layouts or ALL_LAYOUTS))
    outcomes = _decide_with_progress(todo, workers)
    _print_outcomes(outcomes)
    if any(outcome.findings for outcome in outcomes):
        raise SystemExit(1)


def _decide_with_progress(todo: list[Case], workers: int) -> list[Outcome]:
    columns = (TextColumn("proving"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(todo))
        outcomes = []
        for outcome in decide_all(todo, workers):
            outcomes.append(outcome)
            progress.advance(task)
            if outcome.findings:
                progress.console.print(f"REFUTED {outcome.case}: {outcome.findings[0]}", markup=False)
    return outcomes


def _print_outcomes(outcomes: list[Outcome]) -> None:
    verdicts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    refusals: defaultdict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        case = outcome.case
        name = f"{case.collective} {get_algorithm(case.collective, case.algorithm).spelled(case.params)}"
        verdicts[name][outcome.verdict] += 1
        if outcome.refusal:
            refusals[name].add(outcome.refusal)
    for name in sorted(verdicts):
        count = verdicts[name]
        text = ", ".join(
            f"{count[verdict]} {verdict}" for verdict in ("proved", "refused", "refuted") if count[verdict]
        )
        needs = f" (needs {'; '.join(sorted(refusals[name]))})" if refusals[name] else ""
        click.echo(f"{name}: {text}{needs}")
    total = sum(verdicts.values(), Counter())
    operations = sum(outcome.operations for outcome in outcomes)
    click.echo(
        f"{total['proved']} proved ({operations} operations), {total['refused']} refused, {total['refuted']} refuted"
    )


@main.command()
@click.argument("collective", type=click.Choice(list(REGISTRY)))
@click.argument("algorithm")
@layout_option("2x3")
@click.option("--rank", "-r", type=click.IntRange(0), default=0, show_default=True, help="Whose schedule to print.")
@click.option("--in-place", "inplace", is_flag=True, help="With the input in the receive buffer.")
def show(collective: str, algorithm: str, layout: str, rank: int, inplace: bool) -> None:
    """A schedule in words, counts per link class, and who sends how much to whom."""
    topology = parse_layout(layout)
    if rank >= topology.size:
        raise click.UsageError(f"rank {rank} of {topology.size}")
    entry, params = known_algorithm(collective, algorithm)
    schedules = generate(collective, entry.name, params, topology, inplace=inplace)
    schedule = schedules[rank]
    click.echo(
        f"{collective} {entry.spelled(params)} on {topology}, rank {rank} "
        f"(node {topology.node_of[rank]}, lane {topology.lane_of[rank]}), segments {schedule.segments}"
    )
    for line in _in_words(schedule):
        click.echo(line)
    click.echo(f"\nlongest chain of messages over all ranks: {count_rounds(schedules, topology)}")
    click.echo(_counts_text(schedules, topology, rank))
    click.echo("")
    click.echo(matrix_text(schedules, topology))


def _in_words(schedule: Schedule) -> Iterable[str]:
    width = len(str(len(schedule.ops)))
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Join) and schedule.rounds is not None:
            yield f"{'':{width}}  -- end of a round --"
            continue
        after = f"  [after {', '.join(map(str, op.deps))}]" if op.deps and schedule.rounds is None else ""
        yield f"{index:{width}}  {describe(op)}{after}"


def _counts_text(schedules: list[Schedule], topology: Topology, rank: int) -> str:
    counts = [count_rank(schedule, topology) for schedule in schedules]
    rows = [
        ("messages sent", "messages"),
        ("  of them between nodes", "network_messages"),
        ("blocks sent", "blocks"),
        ("  of them between nodes", "network_blocks"),
        ("copies", "copies"),
        ("blocks copied", "copied_blocks"),
        ("flags raised or waited for", "synchronisations"),
        ("blocks of scratch", "scratch"),
        ("blocks of shared memory (per node)", "shared"),
    ]
    lines = [f"{'':36}{f'rank {rank}':>10}{'most':>10}{'all ranks':>12}"]
    for title, field in rows:
        values = [getattr(count, field) for count in counts]
        whole = "" if field == "shared" else f"{sum(values):g}"
        lines.append(f"{title:36}{values[rank]:>10g}{max(values):>10g}{whole:>12}")
    return "\n".join(lines)


@main.command()
@click.argument("collective", type=click.Choice(list(REGISTRY)))
@click.argument("algorithm")
@layout_option("2x4")
@click.option("--size", "-s", type=_Size(), default="4K", show_default=True, help="Bytes per block.")
@click.option("--measured", is_flag=True, help="Trace a real run; under mpiexec, which then sets the layout.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Picture to write.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Chrome/Perfetto trace to write.")
def timeline(
    collective: str, algorithm: str, layout: str, size: int, measured: bool, svg: Path | None, trace: Path | None
) -> None:
    """Draw a simulated or a measured run: SVG, or a trace for ui.perfetto.dev."""
    entry, params = known_algorithm(collective, algorithm)
    if svg is None and trace is None:
        svg = Path(f"{collective}-{entry.name}.svg")
    if measured:
        traced = _trace_run(collective, entry, params, size)
        if traced is None:
            return
        topology, events = traced
    else:
        topology = parse_layout(layout)
        events = simulate(generate(collective, entry.name, params, topology), topology, size)
    schedules = generate(collective, entry.name, params, topology)
    name = f"{collective} {entry.spelled(params)} on {topology}, {format_size(size)} per block"
    title = f"{name}, {'measured' if measured else 'simulated'}"
    if svg:
        svg.write_text(to_svg(schedules, topology, events, title), encoding="utf-8")
        click.echo(f"{svg}: {title}, {format_time(max((event.end for event in events), default=0.0))}")
    if trace:
        trace.write_text(json.dumps(to_trace(schedules, topology, events, title)), encoding="utf-8")
        click.echo(f"{trace}: open it at ui.perfetto.dev or chrome://tracing")


def _trace_run(collective: str, entry: Algorithm, params: Params, size: int) -> tuple[Topology, list[Event]] | None:
    """Topology and events of a traced run under MPI, on rank 0."""
    if collective not in COLLECTIVES or size < 1:
        raise click.UsageError(f"--measured serves {' and '.join(COLLECTIVES)} of at least one byte")
    comm = _world()
    with _Together(comm):
        from hiercoll.bench import measured_events

        topology = hiercoll.get_topology(comm)
        events = measured_events(comm, collective, entry.name, params, size)
    return None if events is None else (topology, events)


def _world() -> MPI.Intracomm:
    """MPI_COMM_WORLD, or a message about what is missing."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise click.ClickException(
            f"this command needs mpi4py and an MPI library ({error}); try: pip install 'hiercoll[mpich]', "
            "and start it with mpiexec or srun"
        ) from None
    return MPI.COMM_WORLD


class _Together:
    """What all ranks do: an error that all have is told once, an error of one ends the job."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        if isinstance(error, HiercollError):  # raised from values that are equal on all ranks
            if self.comm.rank == 0:
                raise click.ClickException(str(error)) from None
            raise SystemExit(1)
        if isinstance(error, OSError):
            click.echo(f"Error: {error.filename}: {error.strerror}", err=True)
        elif not isinstance(error, KeyboardInterrupt):
            sys.excepthook(kind or type(error), error, error.__traceback__)
        sys.stderr.flush()
        self.comm.Abort(1)


@main.command()
@click.argument("collective", type=click.Choice([*COLLECTIVES, "all"]))
@click.option(
    "--algorithm",
    "-a",
    "algorithms",
    multiple=True,
    metavar="ALGORITHM",
    help="May be repeated; native always takes part. Default: all that can run.",
)
@click.option(
    "--sizes",
    "-s",
    type=_Sizes(),
    default="8:64K:8",
    show_default=True,
    help="Bytes per pair (alltoall) or per rank (allgather): 8,64,4K or FROM:TO[:FACTOR].",
)
@click.option("--iterations", "-i", type=click.IntRange(1), help="Per algorithm and size. Default: see --seconds.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=0.3,
    show_default=True,
    help="Time for each algorithm and size, about.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Append results (JSON Lines)."
)
def bench(
    collective: str,
    algorithms: tuple[str, ...],
    sizes: list[int],
    iterations: int | None,
    seconds: float,
    json_file: Path | None,
) -> None:
    """Compare algorithms with each other and the MPI library; under mpiexec or srun.

    Data are checked on every size before they are timed. Times are those of the slowest
    rank, the median over iterations that take turns.
    """
    comm = _world()
    with _Together(comm):
        if json_file and comm.rank == 0:
            json_file.open("a").close()  # not after all the measurements
        for name in COLLECTIVES if collective == "all" else (collective,):
            _bench_one(comm, name, algorithms, sizes, iterations, seconds, json_file)


def _bench_one(
    comm: MPI.Intracomm,
    collective: str,
    algorithms: tuple[str, ...],
    sizes: list[int],
    iterations: int | None,
    seconds: float,
    json_file: Path | None,
) -> None:
    from hiercoll import bench as b

    subjects = b.default_subjects(collective)
    if algorithms:
        given = [b.Subject(*parse_algorithm(text)) for text in algorithms]
        for subject in given:
            if subject.algorithm not in (NATIVE, "auto"):
                get_algorithm(collective, subject.algorithm).resolve(subject.params)
        subjects = [b.Subject(NATIVE, {}), *(subject for subject in given if subject.algorithm != NATIVE)]
    runner = b.Bench(comm, seconds=seconds, iterations=iterations)
    about = b.provenance(comm, runner.topology)
    console = Console(stderr=True, quiet=comm.rank > 0)
    with Progress(TextColumn(f"{collective}"), BarColumn(), MofNCompleteColumn(), console=console) as progress:
        task = progress.add_task("", total=len(subjects) * len(sizes))
        results = list(runner.run(collective, subjects, sizes, lambda: progress.advance(task)))
    if comm.rank == 0:
        _print_results(collective, results, about)
        if json_file:
            with json_file.open("a") as file:
                file.writelines(json.dumps(b.record(result, about)) + "\n" for result in results)


def _print_results(collective: str, results: list[Result], about: dict[str, Any]) -> None:
    """Median times by subject and size, the winner of each size named."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    sizes = list(dict.fromkeys(result.size for result in results))
    best = {size: min((r for r in results if r.size == size), key=lambda r: r.median) for size in sizes}
    virtual = " (virtual nodes)" if about["virtual_nodes"] else ""
    per = "bytes per pair" if collective == "alltoall" else "bytes per rank"
    table = Table(
        title=f"{collective}: us (spread of the middle half), {per}; {about['ranks']} ranks as "
        f"{about['layout']}{virtual}; {about['mpi']}",
        title_justify="left",
    )
    table.add_column("algorithm")
    for size in sizes:
        table.add_column(format_size(size), justify="right", no_wrap=True)
    for subject in dict.fromkeys(str(result.subject) for result in results):
        row = {r.size: r for r in results if str(r.subject) == subject}
        cells = []
        for size in sizes:
            r = row.get(size)
            text = f"{r.median * 1e6:.1f} ({(r.q3 - r.q1) * 1e6:.0f})" if r else "-"
            cells.append(f"[bold]{text}[/bold]" if r is best[size] else text)
        table.add_row(subject, *cells)
    console.print(table)
    for size in sizes:
        native = next(r for r in results if r.size == size and r.subject.algorithm == NATIVE)
        won = best[size]
        clear = won.q3 < native.q1
        gain = f", {native.median / won.median:.2f}x native" + ("" if clear else " (within the spread)")
        click.echo(
            f"{collective} {format_size(size):>5}: {won.subject} wins with {format_time(won.median)}"
            + (gain if won is not native else "")
        )


if __name__ == "__main__":
    main()
