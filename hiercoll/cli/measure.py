"""Commands that run under mpiexec or srun: bench."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table as Grid

import hiercoll
from hiercoll.algorithms import REGISTRY, get_algorithm
from hiercoll.cli.common import (
    CALLED,
    SIZES_HELP,
    RateType,
    SizesType,
    Together,
    TransportType,
    main,
    measured,
    memory_option,
    parse_algorithm,
    quiet_progress,
    sizes_of,
    wide_console,
    world,
)
from hiercoll.collectives import NATIVE
from hiercoll.errors import ArgumentError
from hiercoll.tables import NATIVE_FORMS, NATIVE_VARIANT, ROW, SINGLE, TIMINGS, Variant, describe_timing
from hiercoll.units import format_size, format_time

if TYPE_CHECKING:
    from hiercoll.tools.bench import Bench, Result
    from hiercoll.topology import Topology


@main.command()
@click.argument("collective", type=click.Choice([*CALLED, "all"]))
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
    type=SizesType(),
    default="8:64K:8",
    show_default=True,
    help=f"{SIZES_HELP}.",
)
@click.option(
    "--timing",
    "timings",
    type=click.Choice(TIMINGS),
    multiple=True,
    default=(SINGLE, ROW),
    show_default=True,
    help="single: one call after a barrier; row: calls in a row; cold: after other code and data; of public calls, or "
    "of held plans. May be repeated.",
)
@click.option("--samples", "-n", type=click.IntRange(1), help="Samples per algorithm and size. Default: see --seconds.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=0.3,
    show_default=True,
    help="Time for each algorithm, size and timing, about.",
)
@memory_option("; cuda binds each rank to a device")
@click.option(
    "--transport",
    "transports",
    type=TransportType(),
    multiple=True,
    help="For device arrays: direct, staged[:PARTS], peer[:PARTS]; may be repeated. Default: auto.",
)
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="What auto chooses by.")
@click.option("--link-rate", type=RateType(), help="Of each node's link, as 200mbit or 25gbit: shows its bound.")
@click.option("--top", type=click.IntRange(0), default=0, help="Also what auto finds best at each size, so many.")
@click.option("--control", is_flag=True, help="Measure native twice, to show the noise.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Append results (JSON Lines)."
)
def bench(
    collective: str,
    algorithms: tuple[str, ...],
    sizes: list[int],
    timings: tuple[str, ...],
    samples: int | None,
    seconds: float,
    memory: str,
    transports: tuple[str, ...],
    table: Path | None,
    link_rate: float | None,
    top: int,
    control: bool,
    json_file: Path | None,
) -> None:
    """Compare algorithms with each other and the MPI library; under mpiexec or srun.

    native is the program's own call, comm.Alltoall or the like; the others are public calls of hiercoll. Data
    are checked on every size before they are timed. Times are those of the slowest rank, the median over samples
    that take turns.
    """
    comm = world()
    with Together(comm):
        from hiercoll.tools import bench as b
        from hiercoll.tools.measuring import arrays_of

        if json_file and comm.rank == 0:
            json_file.open("a").close()  # not after all the measurements
        if table:
            hiercoll.configure(comm, table=table)
        options: dict[str, Any] = {"seconds": seconds, "samples": samples, "timings": timings, "rate": link_rate}
        runner = b.Bench(comm, **options, top=top, arrays=arrays_of(comm, memory))
        about = b.provenance(comm, runner.topology, memory) | {"link_rate": link_rate}
        if transports and collective in CALLED and not CALLED[collective].is_on_devices:
            raise ArgumentError("--transport", f"none with {collective}", ", ".join(transports))
        given = {name: _subjects(name, algorithms, control) for name in measured(collective, memory)}
        for name, subjects in given.items():
            if algorithms and comm.rank == 0:
                _tell_refusals(name, subjects, runner.topology)
            results = _bench_one(runner, name, _with_transports(subjects, transports, name), sizes_of(name, sizes))
            if comm.rank == 0:
                _print_results(name, results, about)
                if json_file:
                    with json_file.open("a") as file:
                        file.writelines(json.dumps(b.record(result, about)) + "\n" for result in results)


def _with_transports(subjects: list[Variant], transports: tuple[str, ...], collective: str) -> list[Variant]:
    """native first (and the control last) as they are, and everything else with each transport, if
    the collective knows them."""
    from hiercoll.tools.measuring import CONTROL

    if not transports or not CALLED[collective].is_on_devices:
        return subjects
    last = [subject for subject in subjects[1:] if subject.algorithm == CONTROL]
    own = [
        replace(each, transport=name)
        for each in subjects[1:]
        for name in transports
        if each not in last and (each.algorithm != NATIVE or name in ("auto", "staged"))
    ]
    return [subjects[0], *own, *last]


def _subjects(collective: str, algorithms: tuple[str, ...], control: bool) -> list[Variant]:
    """native first, then what was asked for, or everything. Raises ArgumentError."""
    from hiercoll.tools import bench as b

    subjects = b.default_subjects(collective)
    if algorithms:
        given = [Variant(*parse_algorithm(text)) for text in algorithms]
        for subject in given:
            if subject.algorithm == NATIVE and subject.params:
                if subject.params not in [{"form": form} for form in NATIVE_FORMS]:
                    raise ArgumentError(NATIVE, f"no parameter but form={' or '.join(NATIVE_FORMS)}", subject.params)
                continue
            if subject.params or subject.algorithm not in (NATIVE, "auto"):
                get_algorithm(CALLED[collective].family, subject.algorithm).resolve(subject.params)
        subjects = [NATIVE_VARIANT, *(subject for subject in given if not subject.is_native)]
    return [*subjects, b.CONTROL_VARIANT] if control else subjects


def _tell_refusals(collective: str, subjects: list[Variant], topology: Topology) -> None:
    """Which algorithms that were asked for are not measured, and why."""
    for each in subjects:
        entry = REGISTRY[CALLED[collective].family].get(each.algorithm)
        if entry is not None and (why := entry.refusal(topology, each.params)) is not None:
            click.echo(f"{each.spelled(collective)} is left out: it needs {why}, and ranks lie as {topology}", err=True)


def _bench_one(runner: Bench, collective: str, subjects: list[Variant], sizes: list[int]) -> list[Result]:
    with quiet_progress(runner.comm, TextColumn(collective), BarColumn(), MofNCompleteColumn()) as progress:
        task = progress.add_task("", total=len(sizes))
        return list(runner.run(collective, subjects, sizes, lambda: progress.update(task, advance=1, refresh=True)))


def _print_results(collective: str, results: list[Result], about: dict[str, Any]) -> None:
    """By timing: what a program gets with "auto" beside its own call; then the others."""
    console = wide_console()
    virtual = " (virtual nodes)" if about["virtual_nodes"] else ""
    per = CALLED[collective].size_of + ("" if CALLED[collective].is_even else ", uniform")
    where = f"{about['ranks']} ranks as {about['layout']}{virtual}; {about['mpi']}"
    console.print(f"\n{collective}, {per}; {where}", highlight=False)
    for timing in dict.fromkeys(result.timing for result in results):
        mine = [result for result in results if result.timing == timing]
        autos = [result for result in mine if result.subject.algorithm == "auto"]
        if autos:
            _print_auto(console, autos, mine)
        if len(mine) > 2 * len(autos):
            _print_others(console, collective, mine)


def _gain(result: Result) -> str:
    """Native's time over this one's, with the interval where there is one."""
    if result.gain is None:
        return ""
    known = result.gain_low is not None and result.gain_high is not None
    return f"{result.gain:.2f}" + (f" ({result.gain_low:.2f} to {result.gain_high:.2f})" if known else "")


def _print_auto(console: Console, autos: list[Result], mine: list[Result]) -> None:
    """What a program that calls hiercoll gets, size by size, beside what it had."""
    console.print(f"auto, {describe_timing(autos[0].timing)}", highlight=False)
    grid = Grid()
    for column in ("size", "native", "auto", "native/auto (95 %)", "native/native", "auto is"):
        grid.add_column(column, justify="left" if column == "auto is" else "right", no_wrap=True)
    for auto in autos:
        here = [result for result in mine if result.size == auto.size]
        native = next((result for result in here if result.subject.is_native), None)
        control = next((result for result in here if result.subject.algorithm == "control"), None)
        chosen = auto.chosen.spelled(auto.collective) if auto.chosen else ""
        grid.add_row(
            format_size(auto.size),
            format_time(native.median) if native else "",
            format_time(auto.median),
            _gain(auto),
            _gain(control) if control else "",
            f"{chosen}: nothing faster is known here" if chosen == NATIVE else chosen,
        )
    console.print(grid)


def _print_others(console: Console, collective: str, mine: list[Result]) -> None:
    """Median times by subject and size, marked only where they differ from native's beyond chance."""
    sizes = list(dict.fromkeys(result.size for result in mine))
    what = f"microseconds, {describe_timing(mine[0].timing)}; + faster than native beyond chance, - slower"
    console.print(what, highlight=False)
    table = Grid()
    table.add_column("algorithm")
    for size in sizes:
        table.add_column(format_size(size), justify="right", no_wrap=True)
    for name in dict.fromkeys(result.name for result in mine if result.subject.algorithm not in ("auto", "control")):
        row = {result.size: result for result in mine if result.name == name}
        marks = {1: " +", 0: "  ", -1: " -"}
        table.add_row(
            name,
            *(f"{r.median * 1e6:.1f}{marks[r.clear]}" if (r := row.get(size)) else "-  " for size in sizes),
        )
    bounds = {r.size: r.bound for r in mine if r.bound is not None}
    if bounds:
        cells = (f"{bounds[size] * 1e6:.1f}  " if size in bounds else "-  " for size in sizes)
        table.add_row("the links' bound", *cells)
    console.print(table)


@main.command()
def gpus() -> None:
    """How the GPUs of this host are linked with each other and with network adapters."""
    from hiercoll.cuda.nvml import host_links

    found = host_links()
    for number, name in enumerate(found.gpus):
        click.echo(f"GPU{number}: {name}")
    click.echo(str(found))
