"""What jobs have learned, in words, for the commands about tables."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table as Grid

from hiercoll import settings
from hiercoll.cli.common import wide_console
from hiercoll.collectives import COLLECTIVES, NATIVE, Sizes
from hiercoll.errors import ArgumentError, LearnedWarning
from hiercoll.learned import Known, Lesson, Setting, read_all, setting_of
from hiercoll.topology import Topology
from hiercoll.tuner import is_able
from hiercoll.tuning.policy import size_class
from hiercoll.units import format_size, format_time

COLUMNS = ("size", "in place", "algorithm", "time", "native's call", "gain", "calls", "date", "to be tried")


def learned_folder(given: Path | None) -> Path:
    """The folder that is given, or the user's. Raises ArgumentError where there is none."""
    folder = given or settings.learned_folder()
    if folder is None:
        raise ArgumentError("HIERCOLL_LEARNED", "a folder", "nothing, and there is no home to have one")
    return folder


def read_learned(folder: Path) -> Known:
    """All that is known there; files that cannot be used are told of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", LearnedWarning)
        known = read_all(folder)
    for each in found:
        click.echo(f"Warning: {each.message}", err=True)
    return known


def lessons_for(
    collective: str, topology: Topology, size: int, in_place: bool, memory: str, mpi: str, *, held: bool = False
) -> dict[Setting, Lesson]:
    """By setting what the user's jobs have learned that serves such calls, or plans that are ``held``; of any MPI
    library if ``mpi`` is ""."""
    folder, record = settings.learned_folder(), COLLECTIVES[collective]
    if folder is None or not settings.learns() or (held and record.sizes is Sizes.OWN):
        return {}
    whole = 0 if record.sizes is Sizes.OWN else size_class(size)
    key = (collective, whole, whole > 0 and (in_place or record.one_buffer))
    layout = setting_of("", topology, memory, "").layout
    return {
        setting: lesson
        for setting, lessons in read_learned(folder).items()
        if (setting.layout, setting.memory) == (layout, memory) and mpi in ("", setting.mpi)
        if (lesson := lessons.get(key)) is not None
        and is_able(record.family, topology, lesson.in_place, lesson.variant)
    }


def learned_words(collective: str, lessons: dict[Setting, Lesson]) -> tuple[str, str] | None:
    """Of what was learned last, what serves calls, and how that is known; None if nothing was."""
    if not lessons:
        return None
    setting, lesson = max(lessons.items(), key=lambda item: (item[1].date, item[1].calls))
    where = ", ".join(filter(None, (setting.mpi, setting.fabric)))
    so_far = f" so far, with {len(lesson.untried)} more to be tried," if lesson.untried else ""
    words = f"learned{so_far} on {lesson.date[:10]} from {lesson.calls} calls ({where}), "
    if lesson.variant.is_native:
        return NATIVE, words + (
            "in which nothing has been found yet" if lesson.untried else "in which nothing was faster than native"
        )
    ratio = f"in {lesson.seconds / lesson.native:.2f} of native's time"
    return lesson.variant.spelled(collective), words + ratio


def print_learned(known: Known) -> None:
    """Per setting and collective, what was learned."""
    console = wide_console()
    for setting in sorted(known, key=lambda each: (each.mpi, each.ranks, each.layout)):
        lessons = sorted(known[setting].values(), key=lambda lesson: lesson.key)
        for collective in dict.fromkeys(lesson.collective for lesson in lessons):
            _print(console, setting, collective, [each for each in lessons if each.collective == collective])


def _print(console: Console, setting: Setting, collective: str, lessons: list[Lesson]) -> None:
    fabric = f", {setting.fabric}" if setting.fabric else ""
    where = f"{collective} on {setting.layout} with {setting.mpi}, {setting.memory} memory{fabric}"
    console.print(f"{where}, learned from programs' own calls", highlight=False)
    grid = Grid()
    for column in COLUMNS:
        grid.add_column(column, justify="left" if column in ("in place", "algorithm") else "right")
    for lesson in lessons:
        grid.add_row(*_row(lesson))
    console.print(grid)


def _row(lesson: Lesson) -> list[str]:
    gain = "" if lesson.variant.is_native else f"{lesson.native / lesson.seconds:.2f}x"
    times = [format_time(lesson.seconds), format_time(lesson.native), gain]
    what = [format_size(lesson.size), "yes" if lesson.in_place else "", lesson.variant.spelled(lesson.collective)]
    return [*what, *times, str(lesson.calls), lesson.date[:10], str(len(lesson.untried) or "")]


def append_lines(known: Known, path: Path) -> None:
    """A JSON line for each lesson, with its setting. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        for setting, lessons in known.items():
            for lesson in lessons.values():
                data: dict[str, Any] = {**setting._asdict(), "ranks": setting.ranks, **lesson.record()}
                file.write(json.dumps(data) + "\n")
