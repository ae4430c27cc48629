"""Pictures of what bench measured: plot."""

from __future__ import annotations

from pathlib import Path

import click

from hiercoll.cli.common import main
from hiercoll.tables import OLD, TIMINGS
from hiercoll.tools.plots import PlotError, compare, read_records, save, stems

FORMATS = {"png": ("png",), "svg": ("svg",), "both": ("png", "svg")}


@main.command()
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--output",
    "-o",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    show_default=True,
    metavar="DIR",
    help="Where to write; made if missing.",
)
@click.option("--timing", "timings", type=click.Choice([*TIMINGS, OLD]), multiple=True, help="Only these.")
@click.option("--format", "form", type=click.Choice(list(FORMATS)), default="both", show_default=True)
def plot(files: tuple[Path, ...], folder: Path, timings: tuple[str, ...], form: str) -> None:
    """Draw bench results (JSON Lines): latency, speed-up over native, best algorithm.

    One figure for each collective, layout, MPI library and timing in the FILEs. Repeated
    measurements become their median. Needs matplotlib: pip install 'hiercoll[plot]'.
    """
    every = [record for file in files for record in read_records(file)]
    records = [record for record in every if not timings or record.setting.timing in timings]
    comparisons = compare(records)
    empty = sum(record.size == 0 for record in records)
    if empty:
        click.echo(
            f"left out, having no place on a logarithmic axis: {empty} of {len(records)} records, with 0 bytes",
            err=True,
        )
    if not comparisons:
        raise PlotError("no records with more than 0 bytes: nothing to draw")
    folder.mkdir(parents=True, exist_ok=True)
    for comparison, stem in zip(comparisons, stems([c.setting for c in comparisons]), strict=True):
        for path in save(comparison, folder, stem, FORMATS[form]):
            click.echo(f"{path}: {comparison.title}")
