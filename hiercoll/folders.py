"""The folders of what jobs have learned, one for each setting, by their names: they tell a program whether there may be
something for it, at little cost. See `learned`."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

from hiercoll.errors import LearnedWarning

_FOLDER = re.compile(r"[^_]+_(\d{1,7})_[^_]+_[a-z]+_[0-9a-f]{12}")  # see `learned.Setting.folder`
_warned: set[str] = set()  # in what this process has had a problem: "read", "keep"


def places(base: Path | None) -> list[Path]:
    """The sub-folders of settings."""
    return [base / name for name in listed(base) if ranks_of(name)] if base is not None else []


def places_of(mpi: str, base: Path | None) -> list[Path]:
    """Those of one MPI library."""
    return [place for place in places(base) if place.name.startswith(f"{plain(mpi)}_")]


def ranks_of(folder: str) -> int:
    """Of a setting with a sub-folder of this name; 0 if it is the name of something else."""
    match = _FOLDER.fullmatch(folder)
    return int(match[1]) if match else 0


def listed(folder: Path | None) -> list[str]:
    """The names in a folder, in order; none if there is no such folder."""
    try:
        return [] if folder is None else sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        warn("read", f"{folder}: {error.strerror}; what earlier jobs have learned there is not used")
        return []


def plain(text: str) -> str:
    """The text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.+=-]+", "-", text)[:60]


def warn(what: str, problem: str) -> None:
    """Once in a process, and never as an error, whatever the filters say: this happens on one rank, in the middle of
    calls in which the others wait for it."""
    if what in _warned:
        return
    _warned.add(what)
    try:
        warnings.warn(LearnedWarning(problem), stacklevel=2)
    except LearnedWarning:
        print(f"LearnedWarning: {problem}", file=sys.stderr)
