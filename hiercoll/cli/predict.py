"""What the model says of machines that need not be at hand: predict, machines."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from hiercoll.algorithms import REGISTRY
from hiercoll.cli.common import SizesType, known_algorithm, layout_option, main, sizes_of, wide_console
from hiercoll.collectives import COLLECTIVES
from hiercoll.model.evaluate import BOUNDS
from hiercoll.model.machine import Machine, Parameters, get_machine, shipped
from hiercoll.tools.predicting import TIE, Forecast, Refused, by_size, candidates, forecast
from hiercoll.topology import Topology, parse_layout
from hiercoll.units import format_size, format_time

PICTURES = (".png", ".svg", ".pdf")
NAMES = "a file that `hiercoll calibrate` has written, or a name: hiercoll machines lists them"


@main.command()
@click.argument("collective", type=click.Choice([name for name in REGISTRY if COLLECTIVES[name].is_even]))
@click.option("--machine", "-m", default="generic-100g", show_default=True, metavar="MACHINE", help=f"{NAMES}.")
@layout_option("8x16")
@click.option("--sizes", "-s", type=SizesType(), default="8:64K:2", show_default=True, help="Bytes of a block.")
@click.option("--algorithm", "-a", "wanted", multiple=True, help="Only these. Default: all, as auto tries them.")
@click.option("--fluid", is_flag=True, help="By the fluid evaluator, in which flows share links: slow.")
@click.option("--every", is_flag=True, help="The times of all algorithms, too.")
@click.option("--json", "record", type=click.Path(dir_okay=False, path_type=Path), help="Append JSON Lines here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture to write: .png, .svg or .pdf.")
def predict(
    collective: str,
    machine: str,
    layout: str,
    sizes: list[int],
    wanted: tuple[str, ...],
    fluid: bool,
    every: bool,
    record: Path | None,
    plot: Path | None,
) -> None:
    """The fastest algorithm at each size by the model, on a machine that need not be at hand.

    Times are those of messages between C programs; on the machine itself, `hiercoll bench` measures, and
    `hiercoll tune` decides. Four of five measured times are to lie in the interval. Where others are within 15 %,
    the model cannot tell: these are ties.
    """
    topology, described = parse_layout(layout), get_machine(machine)
    if plot and plot.suffix not in PICTURES:
        raise click.UsageError(f"--plot: expected a name that ends in {', '.join(PICTURES)}, got {plot}")
    sizes = sizes_of(collective, sizes)
    if min(sizes) < 1 and COLLECTIVES[collective].buffers:
        raise click.UsageError("--sizes: at least one byte")
    chosen = [known_algorithm(collective, text) for text in wanted] or candidates(collective)
    columns = (TextColumn("profiles"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        given = (topology, described, sorted(set(sizes)), lambda: progress.advance(task))
        found, refused = forecast(chosen, *given, fluid=fluid)
    if not found:
        raise click.ClickException("; ".join(f"{each.algorithm}: {each.why}" for each in refused))
    _print(collective, described, topology, found, refused)
    if every:
        wide_console(40 + 11 * len(sizes)).print(_times(found))
    if record:
        with record.open("a", encoding="utf-8") as file:
            for each in found:
                about = {"collective": collective, "machine": described.name, "layout": str(topology)}
                file.write(json.dumps({**about, **_recorded(each)}) + "\n")
    if plot:
        from hiercoll.tools.plots.prediction import draw_prediction

        draw_prediction(found, f"{collective} on {described.name}, {topology}: predicted", plot)
        click.echo(f"{plot}: written")


def _print(
    collective: str, machine: Machine, topology: Topology, found: list[Forecast], refused: list[Refused]
) -> None:
    table = Table(title=f"{collective} on {machine.name}, {topology}: by the model")
    for name in ("bytes", "fastest", "time", "interval", "bound by", "next", "slower by"):
        table.add_column(name, justify="left" if name in ("fastest", "bound by", "next") else "right")
    for size, listed in by_size(found).items():
        best, *others = listed
        ties = [each for each in others if each.seconds < TIE * best.seconds]
        interval = f"{format_time(best.low)} to {format_time(best.high)}"
        row = [format_size(size), best.algorithm, format_time(best.seconds), interval, best.bound]
        if others:
            more = f" and {len(ties) - 1} more" if len(ties) > 1 else ""
            row += [others[0].algorithm + more, "tie" if ties else f"{others[0].seconds / best.seconds:.2f}x"]
        table.add_row(*row)
    wide_console().print(table)
    for each in refused:
        click.echo(f"left out: {each.algorithm}: {each.why}")
    if machine.assumed:
        click.echo(f"assumed, not measured: {', '.join(machine.assumed)}")


def _times(found: list[Forecast]) -> Table:
    sizes = by_size(found)
    table = Table(title="all algorithms")
    table.add_column("algorithm")
    for size in sizes:
        table.add_column(format_size(size), justify="right")
    for name in dict.fromkeys(each.algorithm for each in found):
        times = [format_time(each.seconds) for listed in sizes.values() for each in listed if each.algorithm == name]
        table.add_row(name, *times)
    return table


def _recorded(each: Forecast) -> dict[str, Any]:
    return {**each._asdict(), "parts": dict(zip(BOUNDS, each.parts, strict=True))}


@main.command()
@click.argument("name", required=False)
def machines(name: str | None) -> None:
    """The machines that come with hiercoll; of one of them, or of a file, the parameters with units and sources."""
    if name is None:
        for known in shipped():
            click.echo(f"{known:16} {get_machine(known).about}")
        return
    machine = get_machine(name)
    table = Table(title=machine.name, caption=machine.about)
    for column in ("parameter", "value", "unit", "what it is", "measured by"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for field in fields(Parameters):
        about = field.metadata
        value = f"{getattr(machine.parameters, field.name):.4g}"
        how = "assumed" if field.name in machine.assumed else about["measured"]
        table.add_row(field.name, value, about["unit"], about["meaning"], how)
    wide_console().print(table)
    quality = ", ".join(f"{key} {value:g}" for key, value in machine.fitted.items())
    click.echo(
        f"fit: {quality or 'none'}; 4 of 5 measured times are {machine.spread[0]:g} to {machine.spread[1]:g} of it"
    )
    for source in machine.sources:
        click.echo(f"source: {source}")
