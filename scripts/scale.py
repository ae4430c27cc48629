"""How good the model is: writes docs/scale.md and its pictures from published timings.

    python scripts/scale.py --data FOLDER [--out docs]

FOLDER has alltoall-clusters.csv and pico.csv (see `hiercoll.tools.published`). Machines are those that come with
hiercoll; `scripts/fit_machines.py` fits them, to fewer nodes than those that are predicted here.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hiercoll.model.machine import get_machine, parameter_fields, shipped
from hiercoll.tools.plots.figure import MARKERS, PALETTE, log_ticks, matplotlib_settings
from hiercoll.tools.published import SYSTEMS, Held, excluded, held_out, score
from hiercoll.topology import parse_layout
from hiercoll.units import format_size, format_time

SHOWN = (
    ("Dane", ("alltoall",)),
    ("Tuolumne", ("alltoall",)),
    ("LUMI", ("allgather", "reduce_scatter")),
    ("Leonardo", ("allgather", "allreduce", "reduce_scatter")),
    ("Fugaku", ("allgather", "allreduce", "reduce_scatter")),
    ("Lassen", ("allgather",)),
)
SIMGRID = Path(__file__).parents[1] / "docs" / "simgrid.jsonl"
STALLED = 3.0  # times the least time of the same schedule in another job
INTRODUCTION = """# How good the model is

`hiercoll predict` says how long a collective takes on a machine that need not be at hand. This page holds the model
against timings that others have published, of more nodes than it was fitted to. `python scripts/scale.py --data
FOLDER` writes it anew.

**The model.** A schedule is counted by distance: messages and bytes within a domain (cores that share a cache or a
memory controller), a socket, a node, and between nodes; copies by pieces and bytes. A time is the sum of

- the steps of the busiest rank: latency, bytes, and a rendezvous for large messages, by distance,
- all bytes that leave or enter a node, by its adapters, with more of it the more nodes it speaks with,
- bytes that miss the caches, and bytes between sockets,
- copies, flags, and the first touch of fresh memory.

A sum explains the timings better than the largest of these, or a p-norm. `hiercoll machines dane` lists the
parameters with their units; `hiercoll.model.evaluate` has the equations. A second evaluator (`predict --fluid`) lets
flows share links; the two agree where nothing is shared (a test).

**How to read it.** *Error* is |model / measured - 1|. *tau* is Kendall's rank correlation of the algorithms' times
at one size. *Choice* is the share of sizes at which the algorithm that the model takes for the fastest is within 15
% of the fastest measured; *worst* is how much slower the choice was at most. Rows of several jobs that ran the same
schedule count once: the least time for Dane and Tuolumne (some jobs stall), the median of the calls for the others.

**What it was not.** The rows that are predicted here took no part in any fit. But their scores were seen while the
model's terms were chosen, so they are not blind. Ask for less confidence than the tables show.
"""
AFTERWARDS = """
## Where it fails, and why

- **Rankings at small sizes on Dane and Tuolumne.** tau is below 0.8 at some sizes. Two campaigns of the same program
  on Dane agree with each other no better there (0.57 to 1.0): algorithms are within 10 % of each other. `hiercoll
  predict` calls these ties.
- **One leader on Dane.** Its exchange jumps by 2.5 to 5.5 ms when messages pass half a megabyte, in both campaigns.
  No count of the schedule orders that; errors up to 6 times there.
- **Scatter in the hierarchical form on Dane** takes 3 to 25 times what the same scatter takes in the multileader
  form. Rows are pooled by schedule, so the fast one is what is predicted: the table of stalled rows lists the
  others.
- **Leonardo beyond 64 nodes.** A step takes 2.0 us on up to 32 nodes and 3.6 us on 128 to 254, for neighbours in a
  ring as well. Small jobs cannot show that. Large vectors are predicted well. One curve measured at that scale mends
  it: `hiercoll calibrate`.
- **Fugaku beyond 64 nodes.** A torus: neighbours in a ring are predicted on 512 nodes, unless messages are large. What
  goes to far ranks shares the links in between and takes two to four times as long as the model says, the more nodes
  the longer.
- **Lassen on 32 nodes of 32 ranks.** The fit has seen up to 16 ranks a node, those of one socket. Which of Bruck's
  three forms is the fastest is mostly right; where the model is wrong, its choice takes up to 1.7 times the best.
- **Tuolumne's adapters.** What each rank sends and what a node sends cannot be told apart in these jobs: the sum is
  determined, not its parts. Two campaigns differ by a factor of 3 below 64 B; the machine is fitted to the later
  one.
- **Batches of messages** (`nonblocking` forms) stall on Dane by 0.1 s and more. No model of messages explains that;
  they are left out, as are the MPI libraries' own collectives, whose algorithms nobody states.
- **Chains through other ranks.** The fast evaluator sees one rank's schedule, and takes ranks to do alike. For
  collectives with a root the fluid one is used, up to 2,048 ranks.
- **The lab**, emulated hosts whose ranks share two cores ([lab.md](lab.md)). Of the algorithms that were tuned there,
  the one that the model puts first is within 15 % of the best at 68 % of 175 points (four layouts, three MPI
  libraries), with the parameters of `hiercoll calibrate` on 4x4; with the default links at 71 %. Processors that
  ranks share are no part of the model: the machine `lab` is off by half in the median.
- **Not modelled**: hops and shared links of a torus, pipelining within a message (`segment=`), MPI
  datatypes' packing.

Machines whose parameters are assumed, not fitted, say so: `hiercoll machines generic-100g`. GPU machines, and a
paper's figures in the model: [scale-gpu.md](scale-gpu.md).

## Sources

alltoall on Dane and Tuolumne, allgather on Lassen: mpi-advance/locality_aware, BSD 3-Clause, (c) 2021 MPI Advance
Project. Leonardo, LUMI, Fugaku: HLC-Lab/pico, MIT, (c) 2025 Daniele De Sensi and Saverio Pasqualoni. Ping-pongs on
Lassen and Summit: bienz2/BenchPress, BSD 2-Clause. Figures only; machine files name the campaigns.
"""


def cells(values: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a table, and an empty one."""
    yield cells(head)
    yield cells("---" for _ in head)
    yield from map(cells, rows)
    yield ""


def summary(known: dict[tuple[str, str], list[Held]]) -> Iterator[str]:
    """A line for each system and collective."""
    rows = []
    for (system, collective), held in known.items():
        found = score(held)
        shapes: dict[int, set[int]] = defaultdict(set)
        for each in held:
            shapes[each.row.lanes].add(each.row.nodes)
        of = "; ".join(f"{', '.join(map(str, sorted(nodes)))} x {lanes}" for lanes, nodes in sorted(shapes.items()))
        ranked = found.tau_median == found.tau_median  # not NaN
        ranking = (f"{found.tau_median:.2f}", f"{found.chosen:.0%}", f"{found.worst:.2f}x") if ranked else ("", "", "")
        inside = np.mean([each.low <= each.row.seconds <= each.high for each in held])
        rows.append([
            f"{system} {collective}", f"<= {SYSTEMS[system].nodes}", of, found.rows, f"{found.median:.0%}",
            f"{found.p90:.0%}", *ranking, f"{inside:.0%}",
        ])  # fmt: skip
    head = ("", "fitted to nodes", "predicted, nodes x ranks", "rows", "median error", "90 % of errors below",
            "median tau", "choice", "worst", "in the interval (80 %)")  # fmt: skip
    yield from table(head, rows)


def by(held: Sequence[Held], key: Callable[[Held], Any], name: Callable[[Any], str], title: str) -> Iterator[str]:
    """Scores of the rows with each key."""
    groups: dict[Any, list[Held]] = defaultdict(list)
    for each in held:
        groups[key(each)].append(each)
    rows = []
    for value, listed in sorted(groups.items()):
        found = score(listed)
        ranked = found.rankings and found.tau_median == found.tau_median  # not NaN
        taus = (f"{found.tau_median:.2f}", f"{found.worst:.2f}x") if ranked else ("", "")
        rows.append([name(value), found.rows, f"{found.median:.0%}", f"{found.p90:.0%}", *taus])
    yield from table((title, "rows", "median error", "90 % below", "tau", "worst choice"), rows)


def family(each: Held) -> str:
    return f"{each.row.algorithm}, {each.row.phase}"


def machines() -> Iterator[str]:
    """A line for each machine that comes with hiercoll."""
    rows = []
    for name in shipped():
        machine = get_machine(name)
        fitted, known = machine.fitted, len(parameter_fields()) - len(machine.assumed)
        quality = f"{fitted['rows']:.0f} rows, {fitted['median']:.0%}" if "rows" in fitted else ""
        beyond = f"{fitted['held out median']:.0%}" if "held out median" in fitted else ""
        rows.append([f"`{name}`", machine.about.partition(". ")[0], known, quality, beyond])
    yield "Of each: how many parameters sources or data determine (`hiercoll machines NAME` says which, and how), to"
    yield "how many rows it is fitted with what median error, and the error on rows that took no part in it."
    yield ""
    yield from table(("machine", "", "determined", "fit", "others"), rows)


def beside_simgrid(path: Path) -> Iterator[str]:
    """The record of `scripts/simgrid_check.py` in a few lines."""
    about, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    yield f"`make sweep` runs schedules of {parse_layout(layouts[0]).size} ranks in SimGrid as well (https://simgrid.org),"
    yield "where it is installed: another program that shares links by max-min fairness. The machine is a star of"
    yield "hosts: one latency, links of one rate for ranks, of another for nodes, nothing else. By how much the fluid"
    yield f"evaluator says more than SimGrid {about['simgrid']} ({about['date']}, [simgrid.jsonl](simgrid.jsonl)):"
    yield ""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        found[row["schedule"]][row["layout"]] = row["more"]
    shown = ([name, *(f"{by[x]:+.3%}" if x in by else "" for x in layouts)] for name, by in found.items())
    yield from table(("", *layouts), shown)


def left_out(data: Path, systems: Iterable[str]) -> Iterator[str]:
    """How many rows each rule leaves out."""
    rows = []
    for system in systems:
        for rule, listed in excluded(data, system).items():
            if listed:
                rows.append([system, f"`{rule}`", len(listed)])
    yield "Rows that the model says nothing about, by the rule that leaves them out (see `hiercoll.tools.published`):"
    yield ""
    yield from table(("", "rule", "rows"), rows)


def stalled(known: dict[tuple[str, str], list[Held]]) -> Iterator[str]:
    """Schedules that took much longer in some job than in another: they are in the tables above with the least time."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (system, _), held in known.items():
        for each in held:
            row = each.row
            if row.worst > STALLED * row.seconds:
                words = f"{format_size(int(row.size))} ({row.worst / row.seconds:.0f}x)"
                found[system, f"{row.algorithm}, {row.phase}", ";".join(row.parameters)].append(words)
    yield f"Schedules that took over {STALLED:g} times the least time in another job, among the rows above:"
    yield ""
    yield from table(("", "schedule", "parameters", "block sizes"), ([*key, ", ".join(w)] for key, w in found.items()))


def picture(held: Sequence[Held], title: str, path: Path) -> None:
    """Predicted against measured, a colour for each algorithm."""
    with matplotlib_settings():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 5), layout="constrained")
        axes = figure.add_subplot()
        names = sorted({each.row.algorithm for each in held})
        for index, name in enumerate(names):
            own = [each for each in held if each.row.algorithm == name]
            style = {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)]}
            x, y = [each.row.seconds for each in own], [each.seconds for each in own]
            axes.scatter(x, y, s=12, label=name, **style, linewidths=0)
        ends = [f(each.row.seconds for each in held) for f in (min, max)]
        axes.plot(ends, ends, color="#444444", linewidth=1)
        for factor in (0.5, 2):
            axes.plot(ends, [factor * end for end in ends], color="#AAAAAA", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", yscale="log", title=title, xlabel="measured", ylabel="predicted (dashed: factor of 2)")
        log_ticks(axes.xaxis, format_time)
        log_ticks(axes.yaxis, format_time)
        axes.tick_params(axis="x", rotation=45)
        axes.grid(alpha=0.25)
        axes.legend(fontsize="x-small")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Write the page and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    known = {
        (system, collective): held_out(given.data, system, collective)
        for system, collectives in SHOWN
        for collective in collectives
    }
    lines = [INTRODUCTION, "## All systems", "", *summary(known)]
    for (system, collective), held in known.items():
        name = f"scale/{system.lower()}-{collective}.svg"
        machine = get_machine(SYSTEMS[system].machine)
        nodes = ", ".join(map(str, sorted({each.row.nodes for each in held})))
        title = f"{system}, {collective}, {nodes} nodes"
        picture(held, title, given.out / name)
        lines += [f"## {title}", "", f"![predicted against measured]({name})", ""]
        unsure = ", ".join(machine.assumed) or "none"
        lines += [f"Parameters that the data do not determine, or that are assumed: {unsure}.", ""]
        lines += by(held, lambda each: each.row.size, lambda size: format_size(int(size)), "bytes")
        lines += by(held, family, str, "algorithm, phase")
    lines += ["## Machines that come with hiercoll", "", *machines()]
    lines += ["## The fluid evaluator beside SimGrid", "", *beside_simgrid(SIMGRID)]
    lines += [
        "## Rows that are left out, and rows that stalled",
        "",
        *left_out(given.data, dict(SHOWN)),
        *stalled(known),
    ]
    text = "\n".join(lines).rstrip() + "\n" + AFTERWARDS
    (given.out / "scale.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
