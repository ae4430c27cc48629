"""What flight records tell: diagnose."""

from __future__ import annotations

from pathlib import Path

import click

from hiercoll.cli.common import main
from hiercoll.tools.diagnosis import diagnose as lines_of


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
def diagnose(folder: Path) -> None:
    """Say which ranks are silent, in another call, or behind.

    DIR is what HIERCOLL_DIAG_DIR named when calls ran into their deadline (HIERCOLL_TIMEOUT).
    """
    for line in lines_of(folder):
        click.echo(line)
