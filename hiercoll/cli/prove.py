"""Commands that need no MPI: list, verify, show, timeline (which can also trace a real run)."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import hiercoll
from hiercoll.algorithms import REGISTRY, Algorithm, Params, get_algorithm
from hiercoll.cli.common import (
    CALLED,
    FamilyType,
    LayoutType,
    SizeType,
    Together,
    TransportType,
    known_algorithm,
    layout_option,
    main,
    sizes_of,
    tell_once,
    world,
)
from hiercoll.collectives import COLLECTIVES, NATIVE
from hiercoll.model.cost import count_rank
from hiercoll.model.goal import to_goal
from hiercoll.model.simulate import Event, count_rounds, simulate
from hiercoll.schedule import Join, Schedule
from hiercoll.schedule.transports import named
from hiercoll.tables import NATIVE_FORMS
from hiercoll.tools.proving import ALL_LAYOUTS, Case, Outcome, cases, decide_all, every_algorithm, generate
from hiercoll.tools.timeline import matrix_text, to_svg, to_trace
from hiercoll.topology import LAYOUT_HELP, Topology, parse_layout
from hiercoll.units import format_size, format_time
from hiercoll.verify import describe

transport_option = click.option(
    "--transport",
    type=TransportType(),
    default="direct",
    show_default=True,
    help="As messages of device memory travel: direct, staged[:PARTS] or peer[:PARTS].",
)

accumulate_option = click.option(
    "--accumulate",
    type=click.Choice(["float32"]),
    help="Of reductions of half precision: the type that is combined, and rounded once.",
)


def doc_section(entry: Algorithm, name: str) -> str:
    """What an algorithm's docstring says under ``name``, on one line."""
    text = inspect.cleandoc(entry.function.__doc__ or "")
    match = re.search(rf"^{name}[^:\n]*: (.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(match[1].split()) if match else ""


@main.command("list")
@click.argument("collective", required=False, type=FamilyType())
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
        if name in CALLED:
            form = f"none: the blocking call; form={NATIVE_FORMS[0]}: with a wait; form={NATIVE_FORMS[1]}: for plans"
            table.add_row(NATIVE, "The MPI library's own collective.", form, "none")
        console.print(table)


@main.command()
@click.argument("collective", required=False, type=FamilyType())
@click.argument("algorithm", required=False)
@click.option("--all", "everything", is_flag=True, help="Every algorithm, each parameter at every choice.")
@click.option("--combinations", is_flag=True, help="Every combination of every algorithm's parameters (long).")
@click.option(
    "--layout",
    "-l",
    "layouts",
    type=LayoutType(),
    multiple=True,
    help=f"{LAYOUT_HELP}; may be repeated. Default: a set of even, uneven and odd ones, block, cyclic and random.",
)
@transport_option
@accumulate_option
@click.option("--sample", type=click.IntRange(1), default=1, metavar="N", help="One case of N; all by default.")
@click.option(
    "--workers", "-j", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True, help="Processes."
)
def verify(
    collective: str | None,
    algorithm: str | None,
    everything: bool,
    combinations: bool,
    layouts: tuple[str, ...],
    transport: str,
    accumulate: str | None,
    sample: int,
    workers: int,
) -> None:
    """Prove algorithms: no deadlock, no race, every block delivered; reductions by one expression tree on all ranks.

    Of reductions it says in which order they were proved to combine contributions: any, that of the ranks, or fixed;
    with --accumulate how often a result is rounded. Exits with 1 if anything is refuted.
    """
    if sum([everything, combinations, bool(collective)]) > 1:
        raise click.UsageError("a collective, --all and --combinations exclude each other")
    if not (everything or combinations or collective):
        raise click.UsageError("name a collective (and an algorithm), or say --all or --combinations")
    chosen = every_algorithm(combinations)
    if algorithm and collective:
        entry, params = known_algorithm(collective, algorithm)
        chosen = [(collective, entry.name, params if ":" in algorithm else None)]
    elif collective:
        chosen = [entry for entry in chosen if entry[0] == collective]
    if accumulate:
        chosen = [entry for entry in chosen if COLLECTIVES[entry[0]].operation]
        if not chosen:
            raise click.UsageError(f"{collective} combines nothing")
    todo = list(cases(chosen, layouts or ALL_LAYOUTS, named(transport), bool(accumulate)))[::sample]
    outcomes = _decide_with_progress(todo, workers)
    _print_outcomes(outcomes)
    if any(outcome.findings for outcome in outcomes):
        raise SystemExit(1)


def _decide_with_progress(todo: list[Case], workers: int) -> list[Outcome]:
    columns = (TextColumn("proving"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tell_once(progress.console, f"proving {len(todo)} cases")
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
    orders: defaultdict[str, Counter[str]] = defaultdict(Counter)
    roundings: Counter[str] = Counter()
    for outcome in outcomes:
        case = outcome.case
        name = f"{case.collective} {get_algorithm(case.collective, case.algorithm).spelled(case.params)}"
        verdicts[name][outcome.verdict] += 1
        if outcome.order is not None:
            orders[name][outcome.order.name.lower()] += 1
        if outcome.roundings is not None:
            roundings[name] = max(roundings[name], outcome.roundings)
        if outcome.refusal:
            refusals[name].add(outcome.refusal)
    for name in sorted(verdicts):
        count = verdicts[name]
        text = ", ".join(
            f"{count[verdict]} {verdict}" for verdict in ("proved", "refused", "refuted") if count[verdict]
        )
        needs = f" (needs {'; '.join(sorted(refusals[name]))})" if refusals[name] else ""
        ways = ", ".join(f"{way} {orders[name][way]}" for way in ("fixed", "rank", "any") if orders[name][way])
        rounded = f"; rounded {('never', 'once')[roundings[name]]}" if name in roundings else ""
        click.echo(f"{name}: {text}{needs}" + (f" (order: {ways}{rounded})" if ways else ""))
    total = sum(verdicts.values(), Counter())
    operations = sum(outcome.operations for outcome in outcomes)
    click.echo(
        f"{total['proved']} proved ({operations} operations), {total['refused']} refused, {total['refuted']} refuted"
    )


@main.command()
@click.argument("collective", type=FamilyType())
@click.argument("algorithm")
@layout_option("2x3")
@click.option("--rank", "-r", type=click.IntRange(0), default=0, show_default=True, help="Whose schedule to print.")
@click.option("--in-place", "inplace", is_flag=True, help="With the input in the receive buffer.")
@transport_option
@accumulate_option
def show(
    collective: str, algorithm: str, layout: str, rank: int, inplace: bool, transport: str, accumulate: str | None
) -> None:
    """A schedule in words, counts per link class, and who sends how much to whom."""
    topology = parse_layout(layout)
    if rank >= topology.size:
        raise click.UsageError(f"rank {rank} of {topology.size}")
    entry, params = known_algorithm(collective, algorithm)
    if accumulate and not COLLECTIVES[collective].operation:
        raise click.UsageError(f"{collective} combines nothing")
    options: dict[str, Any] = {"inplace": inplace, "transport": named(transport), "accumulate": bool(accumulate)}
    schedules = generate(collective, entry.name, params, topology, **options)
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
    if any(schedule.accumulates for schedule in schedules):
        click.echo("blocks of 4 bytes an element (scratch, shared, wide_host) count as two of 2 bytes (all others)\n")
    lines = [f"{'':36}{f'rank {rank}':>10}{'most':>10}{'all ranks':>12}"]
    for title, field in rows:
        values = [getattr(count, field) for count in counts]
        whole = "" if field == "shared" else f"{sum(values):g}"
        lines.append(f"{title:36}{values[rank]:>10g}{max(values):>10g}{whole:>12}")
    return "\n".join(lines)


@main.command()
@click.argument("collective", type=FamilyType())
@click.argument("algorithm")
@layout_option("2x4")
@click.option("--size", "-s", type=SizeType(), default="4K", show_default=True, help="Bytes per block.")
@click.option("--measured", is_flag=True, help="Trace a real run; under mpiexec, which then sets the layout.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Picture to write.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Chrome/Perfetto trace to write.")
@click.option("--goal", type=click.Path(dir_okay=False, path_type=Path), help="Schedules in GOAL, for LogGOPSim.")
def timeline(
    collective: str,
    algorithm: str,
    layout: str,
    size: int,
    measured: bool,
    svg: Path | None,
    trace: Path | None,
    goal: Path | None,
) -> None:
    """Draw a simulated or a measured run: SVG, or a trace for ui.perfetto.dev; or export it to other simulators."""
    entry, params = known_algorithm(collective, algorithm)
    (size,) = sizes_of(collective, [size])
    if svg is None and trace is None and goal is None:
        svg = Path(f"{collective}-{entry.name}.svg")
    if measured:
        traced = _trace_run(collective, entry, params, size)
        if traced is None:
            return
        topology, events = traced
    else:
        topology = parse_layout(layout)
        schedules = generate(collective, entry.name, params, topology)
        events = simulate(schedules, topology, -(-size // schedules[0].blocks))  # a vector is cut
    schedules = generate(collective, entry.name, params, topology)
    name = f"{collective} {entry.spelled(params)} on {topology}, {format_size(size)} per block"
    title = f"{name}, {'measured' if measured else 'simulated'}"
    if svg:
        svg.write_text(to_svg(schedules, topology, events, title), encoding="utf-8")
        first = min((event.begin for event in events), default=0.0)
        seconds = max((event.end for event in events), default=0.0) - first
        click.echo(f"{svg}: {title}, {format_time(seconds)}")
    if goal:
        goal.write_text(to_goal(schedules, topology, -(-size // schedules[0].blocks)), encoding="utf-8")
        click.echo(f"{goal}: {name}, in GOAL")
    if trace:
        trace.write_text(json.dumps(to_trace(schedules, topology, events, title)), encoding="utf-8")
        click.echo(f"{trace}: open it at ui.perfetto.dev or chrome://tracing")


def _trace_run(collective: str, entry: Algorithm, params: Params, size: int) -> tuple[Topology, list[Event]] | None:
    """Topology and events of a traced run under MPI, on rank 0."""
    able = [name for name, record in CALLED.items() if record.is_even]
    if collective not in able or (size < 1 and CALLED[collective].buffers):
        raise click.UsageError(f"--measured serves {', '.join(able)}, of at least one byte")
    comm = world()
    with Together(comm):
        from hiercoll.tools.bench import measured_events

        topology = hiercoll.get_topology(comm)
        events = measured_events(comm, collective, entry.name, params, size)
    return None if events is None else (topology, events)
