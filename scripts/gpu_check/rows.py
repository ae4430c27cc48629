"""The rows of the check: small units in a fixed order, and which of them a budget of time lets start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpu_check.results import PASSED, Result

PARTS = ("smoke", "kernels", "figures", "peer", "tests", "links", "sanitizer", "direct")
LIBRARIES = ("mpich", "openmpi")
KERNELS = "kernel"
GROUPS = {  # what pytest selects by -k; each test is in one group
    "kernels": KERNELS,
    "peer, every algorithm": "peer and every_algorithm",
    "peer, the rest": "peer and not every_algorithm",
    "staged, every algorithm": "staged and every_algorithm",
    "staged, the rest": "staged and not every_algorithm",
    "errors, tools and direct": "not kernel and not peer and not staged",
}


class Row(NamedTuple):
    """A command of its own, of at most ``limit`` seconds."""

    name: str
    part: str
    library: str
    ranks: int
    limit: float
    tests: str = ""  # what pytest selects by -k
    counts: bool = True  # if not, it is an experiment: its failure is a warning
    gpus: int = 0  # that the ranks see, or that there must be where that is more than one; 0: whatever there is


def select(parts: Sequence[str], libraries: Sequence[str], ranks: Sequence[int]) -> list[Row]:
    """The rows of some parts, in order. A row that two parts have comes once, with the first."""
    found: dict[str, Row] = {}
    for part in PARTS:
        if part in parts:
            for row in _of_part(part, libraries, ranks):
                found.setdefault(row.name, row)
    return list(found.values())


def _of_part(part: str, libraries: Sequence[str], ranks: Sequence[int]) -> Iterator[Row]:
    """The rows of one part. What is tried with one MPI library only is tried with the first."""
    first = libraries[0]
    if part == "smoke":
        yield _smoke(first)
    elif part == "kernels":
        yield _tests("kernels", part, first, 1)
    elif part == "figures":
        for each in (1, 2):
            yield Row(f"figures, {first}, {each} ranks", part, first, each, 120)
        yield Row(f"figures, {first}, 4 ranks on one GPU", part, first, 4, 120, gpus=1)  # of which a bound is stated
    elif part == "peer":
        for each in (2, 4):
            if each in ranks:
                yield from (_tests(group, part, first, each) for group in GROUPS if group.startswith("peer"))
    elif part == "tests":
        for library in libraries:
            yield _smoke(library)
            yield _tests("kernels", part, library, 1)
            for each in ranks:
                yield from (_tests(group, part, library, each) for group in GROUPS if group != "kernels")
    elif part == "links":
        yield Row(f"figures, {first}, 4 ranks on 4 GPUs", part, first, 4, 120, gpus=4)
    elif part == "sanitizer":
        yield Row(f"compute-sanitizer on the kernels, {first}", part, first, 1, 240, tests=KERNELS)
    elif part == "direct":
        name = "direct, openmpi over a UCX that knows CUDA, 2 ranks"
        yield Row(name, part, "openmpi", 2, 120, tests="direct", counts=False)


def _smoke(library: str) -> Row:
    return Row(f"smoke, {library}, 2 ranks", "smoke", library, 2, 20)


def _tests(group: str, part: str, library: str, ranks: int) -> Row:
    return Row(f"{group}, {library}, {ranks} ranks", part, library, ranks, 120, tests=GROUPS[group])


def order(rows: Sequence[Row], results: Mapping[str, Result], again: bool = False) -> list[Row]:
    """What is left to do: rows without a result, then those that failed. With ``again``, all."""
    if again:
        return list(rows)
    new = [row for row in rows if row.name not in results]
    failed = [row for row in rows if row.name in results and results[row.name].status != PASSED]
    return new + failed


def time_for(row: Row, left: float) -> float:
    """Seconds that a row gets of those left; 0 where less than a quarter of its limit is left: it would hardly end."""
    return min(row.limit, left) if left >= row.limit / 4 else 0.0


def go(
    rows: Sequence[Row],
    left: Callable[[], float],
    obstacle: Callable[[Row], str],
    attempt: Callable[[Row, float], Result],
    done: Callable[[Row, Result], None],
) -> dict[str, str]:
    """Attempt the rows while the budget lasts; tell ``done`` of each result. Returns, by row, why one was not run."""
    notes: dict[str, str] = {}
    for row in rows:
        seconds, why = time_for(row, left()), obstacle(row)
        if why:
            notes[row.name] = why
        elif not seconds:
            notes[row.name] = f"{max(left(), 0):.0f} s of the budget were left"
        else:
            result = attempt(row, seconds)
            if result.cut:
                notes[row.name] = f"the budget ended it after {result.seconds:.0f} s"
            done(row, result)
    return notes
