"""The options of ``python -m hiercoll [options] program.py [arguments]``; of use only where there are some, since click
takes a while to import, on each rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from hiercoll import settings
from hiercoll.collectives import NATIVE, called
from hiercoll.errors import ArgumentError
from hiercoll.tools.program import run

REPORT = Path("hiercoll-report.json")


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    help=f"""Run PROGRAM (a script, or -m MODULE, or -c CODE) with MPI.COMM_WORLD, and what is made from it,
    replaced by communicators whose collectives go through hiercoll: {", ".join(each.native for each in called())}.

    An exception that nobody catches aborts the job, as with python -m mpi4py.""",
)
@click.option("--report", is_flag=True, help="Print at exit what each collective did, and write it as JSON.")
@click.option("--sync", is_flag=True, help="With --report: measure the wait for late ranks too (--report=sync).")
@click.option(
    "--compare",
    is_flag=True,
    help="With a report: let the MPI library's own collectives and hiercoll's choices take turns, call by call.",
)
@click.option(
    "--report-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Write the report's JSON there, which implies --report.  [default: {REPORT}]",
)
@click.option("--table", type=click.Path(exists=True, dir_okay=False), help="A tuning table.")
@click.option(
    "--algorithm",
    multiple=True,
    metavar="COLLECTIVE=NAME[:PARAMETER=VALUE]",
    help='Instead of what would be chosen, such as "native"; may be given for several collectives.',
)
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a Chrome/Perfetto trace.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def main(
    report: bool,
    sync: bool,
    compare: bool,
    report_file: Path | None,
    table: str | None,
    algorithm: tuple[str, ...],
    trace: Path | None,
    program: tuple[str, ...],
) -> Callable[[], None]:
    """What runs the program; not run here, since click treats exceptions of its own in its own way."""
    if program[0].startswith("-") and program[0] not in ("-m", "-c"):
        raise click.UsageError(f"no such option: {program[0]}")
    if program[0] in ("-m", "-c") and len(program) == 1:
        raise click.UsageError(f"{program[0]} needs an argument")
    if program[0] not in ("-m", "-c") and not Path(program[0]).exists():
        raise click.UsageError(f"there is no file {program[0]}")
    try:
        settings.check()
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    if table is not None:
        os.environ["HIERCOLL_TABLE"] = table
    file = report_file or (REPORT if report or sync or compare else None)
    return partial(run, list(program), _forced(algorithm), file, sync, compare, trace)


def _forced(given: tuple[str, ...]) -> dict[str, tuple[str, dict[str, Any]]]:
    """What ``--algorithm`` says, by collective."""
    forced: dict[str, tuple[str, dict[str, Any]]] = {}
    if given:  # all commands come with it, which programs would wait for
        from hiercoll.cli.common import known_algorithm
    for text in given:
        collective, found, name = text.partition("=")
        if not found or collective not in (names := [each.name for each in called()]):
            wanted = f"COLLECTIVE=NAME, with one of {', '.join(names)}" if found else "COLLECTIVE=NAME"
            raise click.BadParameter(f"expected {wanted}, got {text!r}", param_hint="--algorithm")
        if name == NATIVE:
            forced[collective] = (NATIVE, {})
            continue
        try:
            entry, params = known_algorithm(collective, name)
        except ArgumentError as error:
            raise click.BadParameter(str(error), param_hint="--algorithm") from None
        forced[collective] = (entry.name, {**params})
    return forced


def _own_words(words: list[str]) -> int:
    """How many words come before the program."""
    options = [each for each in main.params if isinstance(each, click.Option) and not each.is_flag]
    valued, at = {name for each in options for name in each.opts}, 0
    while at < len(words) and words[at].startswith("--"):
        at += 2 if words[at] in valued else 1
    return at


def parsed(words: list[str]) -> Callable[[], None] | None:
    """What runs the program that these words name; None where they ask for help. Ends the process where they are
    wrong."""
    # click has no options with an optional value before a program's name.
    end = _own_words(words)
    own = [part for word in words[:end] for part in (("--report", "--sync") if word == "--report=sync" else (word,))]
    try:
        found = main.main([*own, *words[end:]], prog_name="python -m hiercoll", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    return found if callable(found) else None
