"""What jobs have learned, kept for the jobs after them: what "auto" settled on in a program's own calls.

It lies in a folder of the user's (`settings.learned_folder`), in a sub-folder for each setting: MPI library, layout,
memory and network. There each job that learns something writes one file of its own (format "hiercoll learned", version
1, JSON), whole and anew whenever a size settles, so that a job that is killed leaves what it had, and jobs at the same
time do not disturb each other. Reading merges all files of a setting; where there are many, the oldest are put together.

Nothing here needs MPI, and nothing raises for what it finds on disk: what cannot be read is left out, and what cannot be
written is lost, with a warning per process.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from math import sqrt
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

from hiercoll import settings
from hiercoll.collectives import called, tuned
from hiercoll.errors import LearnedWarning, TableError
from hiercoll.model.adapters import adapters
from hiercoll.tables import (
    MEMORIES,
    NATIVE,
    NATIVE_VARIANT,
    Choice,
    Entry,
    Figure,
    Reader,
    Table,
    Variant,
    no_constant,
    read_variant,
)
from hiercoll.topology import MOST_RANKS, Topology

FORMAT, VERSION = "hiercoll learned", 1
MOST_FILES = 64  # of a setting; with more, the oldest are put together until half as many are left
MOST_BYTES = 1 << 20  # of a file
STALE = 24 * 3600.0  # seconds after which nobody goes on with a file that is half written

Key: TypeAlias = tuple[str, int, bool]  # collective, size, in place
Lessons: TypeAlias = "dict[Key, Lesson]"
Known: TypeAlias = "dict[Setting, Lessons]"


@dataclass(frozen=True)
class Setting:
    """What lessons hold for; see `setting_of`."""

    mpi: str
    layout: str
    memory: str
    fabric: str

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(_nodes(self.layout))

    @property
    def folder(self) -> str:
        """The name of its sub-folder: one to read, and a digest that no other setting has."""
        digest = sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return f"{_plain(self.mpi)}_{self.ranks}_{_plain(self.layout)}_{self.memory}_{digest}"


@dataclass(frozen=True)
class Lesson:
    """What "auto" has settled on for blocks from ``size`` bytes on (the least of those that learning does not tell
    apart): the seconds of a call by ``variant`` and by native, from so many ``calls``; see `now` for the ``date``."""

    collective: str
    size: int
    in_place: bool
    variant: Variant
    seconds: float
    native: float
    calls: int
    date: str

    @property
    def key(self) -> Key:
        """What it is about."""
        return (self.collective, self.size, self.in_place)


def setting_of(mpi: str, topology: Topology, memory: str, fabric: str) -> Setting:
    """The setting of a communicator: ``mpi`` as in tables ("MPICH 5.0.2"), ``fabric`` as of rank 0's host.

    Where the placement of ranks is irregular, the layout has a digest of the nodes of all of them: two such layouts are
    the same only if each rank has the same node.
    """
    raise NotImplementedError


def fabric() -> str:
    """What this host's network is, in short: "InfiniBand 200 x4", "Ethernet 25", with "virtual nodes" before it where
    ``HIERCOLL_NODES`` makes some up; "" where nothing is known."""
    raise NotImplementedError


def now() -> str:
    """The date of what is learned now, as ISO 8601 has it, in UTC: later ones are greater as texts, too."""
    raise NotImplementedError


def known_ranks(mpi: str, folder: Path | None = None) -> frozenset[int]:
    """The sizes of communicators for which there may be something, with this MPI library: from the names in one folder,
    so that a program for which there is nothing reads no files."""
    raise NotImplementedError


def read(setting: Setting, folder: Path | None = None) -> Lessons:
    """All that is known for a setting; of several lessons about the same, the one of the latest date, or else of the most
    calls. Files that cannot be used are left out, with one LearnedWarning in a process; lessons with an algorithm or
    parameters that this hiercoll does not have are left out without."""
    raise NotImplementedError


def read_all(folder: Path | None = None) -> Known:
    """All that is known, by setting; see `read`."""
    raise NotImplementedError


class JobFile:
    """The file of this job for a setting; made with the first lesson. What cannot be written is a LearnedWarning, one in
    a process."""

    def __init__(self, setting: Setting, folder: Path | None = None) -> None:
        raise NotImplementedError

    def keep(self, lesson: Lesson) -> None:
        """Write the lesson, instead of what this job has learned about the same before. Never raises."""
        raise NotImplementedError


@lru_cache(maxsize=None)
def job_file(setting: Setting) -> JobFile:
    """The one that this process writes to, whatever number of communicators has the setting."""
    return JobFile(setting)


def forget(folder: Path | None = None) -> int:
    """Delete what jobs have learned, and say how many files that were. Raises OSError."""
    raise NotImplementedError


def table_of(known: Mapping[Setting, Mapping[Key, Lesson]]) -> Table:
    """What was learned, as a tuning table."""
    raise NotImplementedError


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+=-]+", "-", text)[:60]


def _nodes(layout: str) -> tuple[int, ...]:
    raise NotImplementedError
