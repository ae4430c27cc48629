"""What a figure shows, computed from records."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median

from hiercoll.tables import describe_timing
from hiercoll.tools.plots.records import AUTO, CONTROL, Point, Record, Setting

NATIVE = "native"
FEWEST = 6  # samples that say something
MOST = 8  # subjects with a colour of their own, besides native and auto


@dataclass(frozen=True)
class Comparison:
    """What a figure shows: points and bounds by size, of one setting; ``dates`` are days, the first and the last."""

    setting: Setting
    dates: tuple[str, str]
    sizes: tuple[int, ...]
    points: dict[str, dict[int, Point]]
    bounds: dict[int, float]
    chosen: dict[int, str]

    @property
    def title(self) -> str:
        """Collective, layout, ranks, MPI library, timing and dates in words."""
        setting, (first, last) = self.setting, self.dates
        layout = f"{setting.layout} ({setting.ranks} ranks{', virtual nodes' if setting.virtual else ''})"
        memory = [] if setting.memory == "host" else [f"{setting.memory} memory"]
        dates = first if first == last else f"{first} to {last}"
        return ", ".join([setting.collective, layout, *memory, setting.mpi, describe_timing(setting.timing), dates])


@dataclass(frozen=True)
class Span:
    """Sizes from ``low`` to ``high`` (no whole numbers) with one subject.

    ``measured``: it is the fastest measured, else what "auto" chose. ``clear``: its third
    quartile is below native's first (or it is native, or chosen, or native was not measured).
    """

    low: float
    high: float
    subject: str
    measured: bool
    clear: bool


def compare(records: Iterable[Record]) -> list[Comparison]:
    """One comparison for each setting, sorted; records of one subject and size become their medians.

    Sizes of 0 bytes have no place on a logarithmic axis and are left out, as is the control, which is native again.
    """
    settings: defaultdict[Setting, list[Record]] = defaultdict(list)
    for record in records:
        if record.size and record.subject != CONTROL:
            settings[record.setting].append(record)
    return [_compare_one(setting, settings[setting]) for setting in sorted(settings)]


def _compare_one(setting: Setting, records: list[Record]) -> Comparison:
    samples: defaultdict[tuple[str, int], list[Point]] = defaultdict(list)
    bounds: defaultdict[int, list[float]] = defaultdict(list)
    chosen: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for record in records:
        samples[record.subject, record.size].append(record.point)
        if record.bound is not None:
            bounds[record.size].append(record.bound)
    for record in reversed(records):  # of equally frequent choices the latest counts
        if record.chosen is not None:
            chosen[record.size][record.chosen] += 1
    points: defaultdict[str, dict[int, Point]] = defaultdict(dict)
    for (subject, size), several in sorted(samples.items(), key=lambda item: item[0][1]):
        middle, q1, q3 = (median(getattr(p, name) for p in several) for name in ("median", "q1", "q3"))
        points[subject][size] = Point(middle, q1, q3, sum(p.samples for p in several))
    dates = sorted(record.date for record in records)
    return Comparison(
        setting,
        (dates[0], dates[-1]),
        tuple(sorted({record.size for record in records})),
        {subject: points[subject] for subject in dict.fromkeys(record.subject for record in records)},
        {size: median(values) for size, values in sorted(bounds.items())},
        {size: counts.most_common(1)[0][0] for size, counts in sorted(chosen.items())},
    )


def speedups(comparison: Comparison) -> dict[str, dict[int, float]]:
    """Native's median by the subject's, by subject and size; only sizes at which native was measured."""
    native = comparison.points.get(NATIVE, {})
    return {
        subject: {size: native[size].median / point.median for size, point in points.items() if size in native}
        for subject, points in comparison.points.items()
        if subject != NATIVE
    }


def ranking(comparison: Comparison, size: int) -> list[str]:
    """Subjects that were measured at ``size`` often enough to be ranked, the fastest first, without "auto", which is
    one of the others."""
    measured = [
        subject
        for subject, points in comparison.points.items()
        if size in points and points[size].samples >= FEWEST and subject != AUTO
    ]
    return sorted(measured, key=lambda subject: comparison.points[subject][size].median)


def spans(comparison: Comparison) -> list[Span]:
    """What to use at which sizes: what "auto" chose, or the fastest subject where that is not known.

    A span ends midway (geometrically) to the next size. A size with nothing but "auto", or with nothing that was
    measured often enough, is "auto"'s.
    """
    sizes = comparison.sizes
    inner = [math.sqrt(a * b) for a, b in pairwise(sizes)]
    first, last = (sizes[0] / inner[0], sizes[-1] / inner[-1]) if inner else (2**-0.5, 2**0.5)
    edges = [sizes[0] * first, *inner, sizes[-1] * last]
    cells = [_span(comparison, size, low, high) for size, (low, high) in zip(sizes, pairwise(edges), strict=True)]
    groups = [list(group) for _, group in groupby(cells, key=lambda cell: (cell.subject, cell.measured, cell.clear))]
    return [replace(group[0], high=group[-1].high) for group in groups]


def _span(comparison: Comparison, size: int, low: float, high: float) -> Span:
    if size in comparison.chosen:
        return Span(low, high, comparison.chosen[size], measured=False, clear=True)
    subject = [*ranking(comparison, size), AUTO][0]
    native = comparison.points.get(NATIVE, {}).get(size)
    clear = native is None or subject in (NATIVE, AUTO) or comparison.points[subject][size].q3 < native.q1
    return Span(low, high, subject, measured=True, clear=clear)


def shown(comparison: Comparison) -> list[str]:
    """Subjects with a colour, in the order of the file: native, auto and at most eight more.

    If there are more, those of the spans come first, then those that most often are the
    fastest or second of the algorithms other than native.
    """
    wanted = [span.subject for span in spans(comparison)]
    every = dict.fromkeys([*comparison.points, *wanted])
    others = [subject for subject in every if subject not in (NATIVE, AUTO)]
    if len(others) > MOST:
        places: Counter[str] = Counter()
        for size in comparison.sizes:
            best = [subject for subject in ranking(comparison, size) if subject != NATIVE][:2]
            places.update({subject: 3 - place for place, subject in enumerate(best)})
        good = dict.fromkeys([*wanted, *(subject for subject, _ in places.most_common())])
        kept = [subject for subject in good if subject not in (NATIVE, AUTO)][:MOST]
        others = [subject for subject in others if subject in kept]
    return [*(subject for subject in (NATIVE, AUTO) if subject in every), *others]
