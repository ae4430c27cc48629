"""Pictures of benchmarks: latency, speed-up and choice against size, from JSON Lines.

Times are in seconds and sizes in bytes throughout. Reading (`records`) and computing
(`comparison`) need the standard library alone; matplotlib is imported when a figure is
drawn (`figure`).
"""

from hiercoll.tools.plots.comparison import Comparison, Span, compare, ranking, shown, spans, speedups
from hiercoll.tools.plots.figure import draw, save, stems
from hiercoll.tools.plots.records import PlotError, Point, Record, RecordError, Setting, parse_records, read_records

__all__ = [
    "Comparison",
    "PlotError",
    "Point",
    "Record",
    "RecordError",
    "Setting",
    "Span",
    "compare",
    "draw",
    "ranking",
    "parse_records",
    "read_records",
    "save",
    "shown",
    "spans",
    "speedups",
    "stems",
]
