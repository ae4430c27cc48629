"""Drawing a prediction: seconds against size, one line for each algorithm, and how sure the model is of the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hiercoll.tools.plots.figure import MARKERS, OTHER, PALETTE, log_ticks, matplotlib_settings, size_ticks
from hiercoll.tools.predicting import Forecast, by_size
from hiercoll.units import format_size, format_time

MOST_LINES = len(PALETTE)


def draw_prediction(found: Sequence[Forecast], title: str, path: Path) -> None:
    """Write a picture (PNG, SVG or PDF, by the file's name). Algorithms that are nowhere among the fastest are grey.
    Raises PlotError without matplotlib."""
    sizes = by_size(found)
    fastest = list(dict.fromkeys(each.algorithm for listed in sizes.values() for each in listed[:1]))
    others = [name for name in dict.fromkeys(each.algorithm for each in found) if name not in fastest]
    named = [*fastest, *others][:MOST_LINES]
    with matplotlib_settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for name in [*others[::-1], *fastest[::-1]]:
            line = [each for each in found if each.algorithm == name]
            at = named.index(name) if name in named else None
            colour, marker = (OTHER, "") if at is None else (PALETTE[at], MARKERS[at])
            label = name if at is not None else None
            x, y = [each.size for each in line], [each.seconds for each in line]
            axes.plot(x, y, color=colour, marker=marker, markersize=4, label=label)
        best = [listed[0] for listed in sizes.values()]
        x = [each.size for each in best]
        low, high = [each.low for each in best], [each.high for each in best]
        axes.fill_between(x, low, high, color=PALETTE[0], alpha=0.15, label="fastest: 4 of 5 measured times")
        axes.set(xscale="log", yscale="log", title=title, xlabel="bytes of a block", ylabel="predicted time")
        log_ticks(axes.yaxis, format_time)
        ticks = size_ticks(x)
        axes.set_xticks(ticks, [format_size(size) for size in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.25)
        axes.legend(fontsize="small")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
