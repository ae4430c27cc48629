"""Drawing a comparison: three panels that share the axis of sizes.

Figures are matplotlib objects without pyplot; settings are matplotlib's defaults, not
the user's, so that the same records give the same file.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hiercoll.collectives import COLLECTIVES
from hiercoll.tools.plots.comparison import NATIVE, Comparison, shown, spans, speedups
from hiercoll.tools.plots.records import AUTO, PlotError, Setting
from hiercoll.units import format_size, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# At least 21 apart (CIELAB), any two, also as seen with each of the three colour vision deficiencies.
PALETTE = ("#56B4E9", "#999933", "#882255", "#332288", "#CC6677", "#6B3E1D", "#DDCC77", "#FFAABB")
MARKERS = "o^vDPX<>"
OTHER = "#CCCCCC"
RC: Any = {"svg.fonttype": "none", "svg.hashsalt": "hiercoll", "text.parse_math": False, "font.size": 9.0}


@contextmanager
def matplotlib_settings() -> Iterator[None]:
    """matplotlib with its defaults and ours, put back afterwards. Raises PlotError without it."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise PlotError(f"drawing needs matplotlib ({error}): pip install 'hiercoll[plot]'") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def stems(settings: Sequence[Setting]) -> list[str]:
    """A file name without extension for each setting: safe characters, no two alike."""
    names: list[str] = []
    for setting in settings:
        words = f"{setting.collective}-{setting.layout}-{setting.mpi}-{setting.timing}".lower()
        stem = re.sub(r"[^a-z0-9.+]+", "-", words).strip("-.")[:100] or "plot"
        copies = (stem if number == 1 else f"{stem}-{number}" for number in range(1, len(settings) + 1))
        names.append(next(name for name in copies if name not in names))
    return names


def save(comparison: Comparison, folder: Path, stem: str, formats: Sequence[str]) -> list[Path]:
    """Draw ``comparison`` into ``folder``, once for each of ``formats`` (png, svg).

    Raises PlotError without matplotlib, OSError where nothing can be written.
    """
    paths = [folder / f"{stem}.{extension}" for extension in formats]
    with matplotlib_settings():
        figure = draw(comparison)
        for path, extension in zip(paths, formats, strict=True):
            metadata = {"Date": None} if extension == "svg" else {}
            figure.savefig(path, format=extension, dpi=150, metadata=metadata)
    return paths


def draw(comparison: Comparison) -> Figure:
    """The figure: latency, speed-up over native, choice. Raises PlotError without matplotlib."""
    with matplotlib_settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 8.5), layout="constrained")
        latency, speedup, choice = figure.subplots(3, 1, sharex=True, height_ratios=[10, 7, 1.4])
        styles = _styles(comparison)
        _draw_latency(latency, comparison, styles)
        _draw_speedup(speedup, comparison, styles)
        _draw_choice(choice, comparison, styles)
        _size_axis(choice, comparison)
        figure.suptitle(textwrap.fill(comparison.title, 110))
        handles, labels = latency.get_legend_handles_labels()
        labels = ["\n".join(_wrap(part) for part in label.split("\n")) for label in labels]
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        figure.draw_without_rendering()  # makes the layout
        _drop_wide_texts(choice, comparison)
        return figure


class _Style(NamedTuple):
    color: str
    marker: str
    width: float
    zorder: float


def _styles(comparison: Comparison) -> dict[str, _Style]:
    """Of the subjects that are shown; the same in all panels."""
    fixed = {NATIVE: _Style("#000000", "s", 2.4, 4), AUTO: _Style("#0072B2", "*", 2.0, 3.5)}
    free = iter(_Style(color, marker, 1.3, 3) for color, marker in zip(PALETTE, MARKERS, strict=True))
    return {subject: fixed.get(subject) or next(free) for subject in shown(comparison)}


def _draw_latency(axes: Axes, comparison: Comparison, styles: dict[str, _Style]) -> None:
    for subject, style in styles.items():
        points = comparison.points.get(subject, {})
        x = list(points)
        bands = [point.q1 for point in points.values()], [point.q3 for point in points.values()]
        if len(x) > 1:
            alpha = 0.12 if subject in (NATIVE, AUTO) else 0.08
            axes.fill_between(x, *bands, color=style.color, alpha=alpha, linewidth=0, zorder=1)
        elif x:
            axes.vlines(x, *bands, color=style.color, alpha=0.4, zorder=1)
        label = subject if x else f"{subject}\n(chosen, not measured)"
        _line(axes, x, [point.median for point in points.values()], style, label)
    others = [points for subject, points in comparison.points.items() if subject not in styles]
    for index, points in enumerate(others):
        label = "_" if index else f"{len(others)} more"  # one line in the legend for all
        y = [point.median for point in points.values()]
        axes.plot(list(points), y, color=OTHER, linewidth=0.8, zorder=2, label=label)
    if comparison.bounds:
        x, y = list(comparison.bounds), list(comparison.bounds.values())
        marker = "_" if len(x) == 1 else ""
        axes.plot(x, y, "--", color="#444444", marker=marker, label="bound of the link", zorder=3)
    axes.set_yscale("log")
    axes.set_ylabel("time of the slowest rank\n(median; shaded: middle half)")
    log_ticks(axes.yaxis, format_time)
    axes.grid(alpha=0.25)


def _draw_speedup(axes: Axes, comparison: Comparison, styles: dict[str, _Style]) -> None:
    ratios = speedups(comparison)
    for subject, values in ratios.items():
        if subject in styles:
            _line(axes, list(values), list(values.values()), styles[subject], subject)
        else:
            axes.plot(list(values), list(values.values()), color=OTHER, linewidth=0.8, zorder=2)
    native = comparison.points.get(NATIVE, {})
    if native:
        low = [point.median / point.q3 for point in native.values()]
        high = [point.median / point.q1 for point in native.values()]
        axes.fill_between(list(native), low, high, color="#000000", alpha=0.08, linewidth=0, zorder=1)
        axes.axhline(1, color="#000000", linewidth=1.5, zorder=2.5)
    axes.set_yscale("log")
    low_end, high_end = axes.get_ylim() if native else (0.5, 2)
    axes.set_ylim(min(low_end, 0.5), max(high_end, 2))  # noise of a few per cent looks like it
    if not any(ratios.values()):
        text = "nothing but native was measured" if native else "native was not measured: nothing to compare with"
        axes.text(0.01, 0.9, text, transform=axes.transAxes, color="#444444")
    axes.set_ylabel("speed-up over native\n(shaded: native's middle half)")
    log_ticks(axes.yaxis, lambda value: f"{value:.3g}x")
    axes.grid(alpha=0.25)


def _draw_choice(axes: Axes, comparison: Comparison, styles: dict[str, _Style]) -> None:
    found = spans(comparison)
    kinds = {span.measured for span in found}
    for span in found:
        color = _tint(styles[span.subject].color if span.subject in styles else OTHER, 1.0 if span.clear else 0.4)
        hatch = "//" if span.measured and len(kinds) > 1 else None
        axes.axvspan(span.low, span.high, facecolor=color, edgecolor="white", hatch=hatch, linewidth=1)
        box = {"facecolor": color, "edgecolor": "none", "pad": 1.5}  # no hatching behind the words
        words, middle = span.subject.replace(" ", "\n"), math.sqrt(span.low * span.high)
        axes.text(middle, 0.5, words, color=_ink(color), ha="center", va="center", fontsize=8, bbox=box)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    label = "auto's choice" if False in kinds else "fastest measured"
    label += "\nhatched: fastest measured" if len(kinds) > 1 else ""
    label += "" if all(span.clear for span in found) else "\npale: native is\nwithin the spread"
    axes.set_ylabel(label.replace("fastest measured", "fastest\nmeasured"), rotation=0, ha="right", va="center")


def _drop_wide_texts(axes: Axes, comparison: Comparison) -> None:
    """Take away the names that are larger than their spans; the legend has them too."""
    for text, span in zip(list(axes.texts), spans(comparison), strict=True):
        corners = axes.transData.transform([(span.low, 0), (span.high, 1)])
        (width, height), box = corners[1] - corners[0], text.get_window_extent()
        if box.width > width - 4 or box.height > height:
            text.remove()


def _tint(color: str, strength: float) -> str:
    """``color`` mixed with white: itself with a strength of 1."""
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02X}" for part in parts)


def _wrap(label: str) -> str:
    return textwrap.fill(label, 24, break_long_words=False, break_on_hyphens=False)


def _ink(color: str) -> str:
    """Black or white, whichever is legible on ``color``."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#FFFFFF"


def _line(axes: Axes, x: list[int], y: list[float], style: _Style, label: str) -> None:
    axes.plot(
        x, y, label=label, color=style.color, marker=style.marker, linewidth=style.width, zorder=style.zorder,
        markersize=9 if style.marker == "*" else 5, markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip


def log_ticks(axis: Axis, spell: Callable[[float], str]) -> None:
    """Labels at round values, closer where the axis is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 15 * low else (1, 1.5, 2, 3, 5, 7)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: spell(value)))


def _size_axis(axes: Axes, comparison: Comparison) -> None:
    found = spans(comparison)
    axes.set_xscale("log", base=2)
    axes.set_xlim(found[0].low, found[-1].high)
    ticks = size_ticks(comparison.sizes)
    axes.set_xticks(ticks, [format_size(size) for size in ticks])
    axes.set_xticks([], minor=True)
    record = COLLECTIVES.get(comparison.setting.collective)  # records may be of another version
    axes.set_xlabel(f"block size, {record.size_of if record else 'bytes'}")


def size_ticks(sizes: Sequence[int], most: int = 16) -> list[int]:
    """Those of ``sizes`` (ascending) that have space for a label on a logarithmic axis, the first always."""
    step = math.log2(sizes[-1] / sizes[0]) / most
    ticks = [sizes[0]]
    for size in sizes[1:]:
        if math.log2(size / ticks[-1]) >= step:
            ticks.append(size)
    return ticks
