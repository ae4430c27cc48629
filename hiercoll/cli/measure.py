"""Commands that run under mpiexec or srun: bench."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table

import hiercoll
from hiercoll.algorithms import get_algorithm
from hiercoll.cli.common import (
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
    world,
)
from hiercoll.errors import ArgumentError
from hiercoll.tables import NATIVE, TUNED
from hiercoll.units import format_size, format_time

if TYPE_CHECKING:
    from hiercoll.bench import Bench, Result, Subject


@main.command()
@click.argument("collective", type=click.Choice([*TUNED, "all"]))
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
@click.option("--samples", "-n", type=click.IntRange(1), help="Samples per algorithm and size. Default: see --seconds.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=0.3,
    show_default=True,
    help="Time for each algorithm and size, about.",
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

    Data are checked on every size before they are timed. Times are those of the slowest
    rank, the median over samples that take turns; a sample is some runs in a row.
    """
    comm = world()
    with Together(comm):
        from hiercoll import bench as b

        if json_file and comm.rank == 0:
            json_file.open("a").close()  # not after all the measurements
        if table:
            hiercoll.configure(comm, table=table)
        arrays = b.arrays_of(comm, memory)
        runner = b.Bench(comm, seconds=seconds, samples=samples, rate=link_rate, top=top, arrays=arrays)
        about = b.provenance(comm, runner.topology, memory) | {"link_rate": link_rate}
        if transports and collective == "alltoallv":
            raise ArgumentError("--transport", "none with alltoallv", ", ".join(transports))
        given = {name: _subjects(name, algorithms, control) for name in measured(collective, memory)}
        for name, subjects in given.items():
            results = _bench_one(runner, name, _with_transports(subjects, transports, name), sizes)
            if comm.rank == 0:
                _print_results(name, results, about)
                if json_file:
                    with json_file.open("a") as file:
                        file.writelines(json.dumps(b.record(result, about)) + "\n" for result in results)


def _with_transports(subjects: list[Subject], transports: tuple[str, ...], collective: str) -> list[Subject]:
    """native first (and the control last) as they are, and everything else with each transport, if
    the collective knows them."""
    from hiercoll.bench import CONTROL

    if not transports or collective == "alltoallv":
        return subjects
    last = [subject for subject in subjects[1:] if subject.algorithm == CONTROL]
    own = [replace(each, transport=name) for each in subjects[1:] if each not in last for name in transports]
    return [subjects[0], *own, *last]


def _subjects(collective: str, algorithms: tuple[str, ...], control: bool) -> list[Subject]:
    """native first, then what was asked for, or everything. Raises ArgumentError."""
    from hiercoll import bench as b

    subjects = b.default_subjects(collective)
    if algorithms:
        given = [b.Subject(*parse_algorithm(text)) for text in algorithms]
        for subject in given:
            if subject.algorithm not in (NATIVE, "auto"):
                get_algorithm(collective, subject.algorithm).resolve(subject.params)
        subjects = [b.Subject(NATIVE, {}), *(subject for subject in given if subject.algorithm != NATIVE)]
    return [*subjects, b.Subject(b.CONTROL, {})] if control else subjects


def _bench_one(runner: Bench, collective: str, subjects: list[Subject], sizes: list[int]) -> list[Result]:
    with quiet_progress(runner.comm, TextColumn(collective), BarColumn(), MofNCompleteColumn()) as progress:
        task = progress.add_task("", total=len(sizes))
        return list(runner.run(collective, subjects, sizes, lambda: progress.update(task, advance=1, refresh=True)))


def _print_results(collective: str, results: list[Result], about: dict[str, Any]) -> None:
    """Median times by subject and size, the winner of each size named."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    sizes = list(dict.fromkeys(result.size for result in results))
    best = {size: min((r for r in results if r.size == size), key=lambda r: r.median) for size in sizes}
    virtual = " (virtual nodes)" if about["virtual_nodes"] else ""
    per = {"alltoall": "bytes per pair", "allgather": "bytes per rank"}.get(collective, "mean bytes per pair, uniform")
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
    bounds = {r.size: r.bound for r in results if r.bound is not None}
    if bounds:
        table.add_row("the links' bound", *(f"{bounds[size] * 1e6:.1f}" if size in bounds else "-" for size in sizes))
    console.print(table)
    for size in sizes:
        native = next(r for r in results if r.size == size and str(r.subject) == NATIVE)
        won = best[size]
        gain = f", {won.gain or 0:.2f}x native" + ("" if (won.gain_low or 0) > 1 else " (within the noise)")
        click.echo(
            f"{collective} {format_size(size):>5}: {won.subject} wins with {format_time(won.median)}"
            + (gain if won is not native else "")
        )


@main.command()
def gpus() -> None:
    """How the GPUs of this host are linked with each other and with network adapters."""
    from hiercoll.cuda.nvml import host_links

    found = host_links()
    for number, name in enumerate(found.gpus):
        click.echo(f"GPU{number}: {name}")
    click.echo(str(found))
