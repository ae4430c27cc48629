"""What "auto" finds in a first job, and what that costs, simulated without MPI: rules of learning can be compared in
seconds, by hundreds of jobs, where the lab takes an hour for one of each setting, and hides a few more in its noise.

    python scripts/learning_simulated.py docs/lab/table-mpich-*.json --jobs 40 --set CROWD=5

A job makes calls of several sizes of two collectives in turns on one communicator, as ``learning.py --together`` does
in the lab, and learns by the code that programs run. Times are drawn:

- a call's, around what a tuned table has measured of its variant; of one that it has not, of the most similar one;
- of what ranks do besides (`Machine`), around what traces in the lab have shown.

Candidates are the cost model's, told of links as they are measured there. Prints a line for each table, and for all:

- found: at how many sizes that serves in the end which is within 10 % of the best of the table's ranked figures
- total: the time of all calls over native's; and the most of that in a job
- spent: of that time, by the budget's account
- serves: the time of what serves in the end over the table's best (geometric mean)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, inf
from pathlib import Path
from random import Random
from statistics import fmean, geometric_mean
from unittest.mock import patch

import click

from hiercoll.cli.common import SizesType
from hiercoll.collectives import COLLECTIVES
from hiercoll.model.cost import Link, Links
from hiercoll.tables import NATIVE_VARIANT, Entry, Variant, load
from hiercoll.topology import Topology, parse_layout
from hiercoll.tuner import FREE, modelled
from hiercoll.tuning import budget, learning, policy
from hiercoll.tuning.budget import Budget
from hiercoll.tuning.learning import FEW, Learner
from hiercoll.tuning.policy import offered, variants_like

NEAR = 1.1  # times the time of the table's best that is near enough
UNKNOWN = 1.5  # times native's, of an algorithm of which a table has no figure
# Of parameters that differ, how much they do: the more, the less is said of a variant by the figure of another.
APART = {"memory": 4, "form": 3, "window": 3, "outer": 3, "radix": 3}
# Seconds of native's call, the standard deviation of the logarithm of such calls, and how many times as long they take
# the slowest rank as the one that waits the least; on two cores for all ranks.
NOISE = ((1e-3, 0.5, 2.3), (3e-3, 0.4, 2.0), (1e-2, 0.3, 1.6), (inf, 0.2, 1.4))


@dataclass(frozen=True)
class Machine:
    """Seconds that it takes ranks to meet, to think in a call in which they look at their times, to make a plan, and to
    ask the model about a collective; the network as a probe measures it, and cores of each rank."""

    meeting: float
    thinking: float
    plan: float
    asking: float
    network: Link
    cores: float


# As traced with MPICH on two cores and links of 200 Mbit/s, by ranks.
MACHINES = {
    16: Machine(2.3e-3, 9e-3, 35e-3, 60e-3, Link(3e-4, 1.7e-8), 1 / 2),
    32: Machine(5e-3, 20e-3, 80e-3, 150e-3, Link(6e-4, 3.8e-8), 1 / 4),
}
SET_UP = 20e-3  # seconds


@dataclass
class Clock:
    """Seconds so far; what it is told to pass takes about so long."""

    random: Random
    now: float = 0.0

    def pass_by(self, seconds: float, sigma: float = 0.3) -> float:
        """Seconds that it took."""
        self.now += (took := seconds * self.random.lognormvariate(0, sigma))
        return took


@dataclass
class Size:
    """Calls of a size, as a table knows them: seconds of native, times native's time of variants, of the best one that
    is ranked, and the candidates."""

    collective: str
    native: float
    ratios: Mapping[tuple[object, ...], float]
    best: float
    candidates: Sequence[Variant]
    measured: Sequence[Variant]

    def ratio(self, variant: Variant) -> float:
        """Times native's time."""
        alike = [other for other in self.measured if other.algorithm == variant.algorithm]
        if not alike:
            return UNKNOWN
        return self.ratios[min(alike, key=partial(_apart, variant)).key]


def _apart(one: Variant, other: Variant) -> int:
    return sum(APART.get(name, 1) for name, value in one.params.items() if other.params.get(name) != value)


def sizes_of(entry: Entry, sizes: Iterable[int], slower: float, topology: Topology, machine: Machine) -> Iterator[Size]:
    """Those of a table for which it has figures of single calls, native's among them, at that size or the nearest."""
    links = Links(Link(1e-6, 1 / 8e9), machine.network, cores=machine.cores)
    for size in sizes:
        ranked = entry.measured(size)
        native = entry.native_seconds(size)
        if not ranked or native is None:
            continue
        single = [each for each in entry.figures if each.timing == "single" and each.size == ranked[0].size]
        # Those that are ranked say more than others, and those of more samples.
        seconds = {
            each.variant.key: each.median for each in sorted(single, key=lambda each: (each.ranked, each.samples))
        }
        if NATIVE_VARIANT.key not in seconds:
            continue
        whole = seconds[NATIVE_VARIANT.key]
        ranking = modelled(entry.collective, topology, size, False, FREE, links=links)
        candidates = offered(entry.collective, [each.variant for each in ranking], FEW)
        yield Size(
            entry.collective, slower * native, {key: each / whole for key, each in seconds.items()},
            min(1.0, ranked[0].median / whole), candidates, [each.variant for each in single],
        )  # fmt: skip


@dataclass
class Job:
    """Calls of sizes in turns on one communicator."""

    sizes: Sequence[Size]
    topology: Topology
    machine: Machine
    clock: Clock
    budget: Budget = field(init=False)
    learners: list[Learner] = field(init=False)
    asked: set[str] = field(default_factory=set)  # collectives that the model has been asked about
    native: float = 0.0  # seconds that all calls would take by native

    def __post_init__(self) -> None:
        machine = self.machine
        once = {"cost": SET_UP, "set_up": SET_UP}
        self.budget = Budget(budget.SHARE, **once, meeting=machine.meeting, cores=machine.cores)
        self.learners = [
            Learner(
                lambda own, size=size: self._asked(size), self._agree, self.budget,
                asking=partial(self._asking, size.collective),
                alike=partial(variants_like, size.collective, self.topology, False),
            )
            for size in self.sizes
        ]  # fmt: skip
        self._made = [{NATIVE_VARIANT.key} for _ in self.sizes]

    def _agree(self, values: Sequence[float]) -> list[float]:
        self.clock.pass_by(self.machine.meeting)
        return list(values)

    def _asking(self, collective: str) -> float:
        """Seconds that it is expected to take, which is too little (`Budget.dearer`)."""
        return 0.0 if collective in self.asked else self.machine.asking / 3

    def _asked(self, size: Size) -> Sequence[Variant]:
        if size.collective not in self.asked:
            self.asked.add(size.collective)
            self.clock.pass_by(self.machine.asking)
        return size.candidates

    def run(self, calls: int) -> None:
        """Make so many calls of each size."""
        for turn in range(calls):
            for place in range(len(self.sizes)):
                self._call((turn + place) % len(self.sizes))

    def _call(self, place: int) -> None:
        size, learner, clock = self.sizes[place], self.learners[place], self.clock
        sigma, late = next((sigma, late) for below, sigma, late in NOISE if size.native < below)
        asks = not learner.is_fixed
        variant = learner.begin() if asks else learner.current
        if asks and not learner.is_trying:
            clock.pass_by(self.machine.thinking)
        waited = clock.pass_by(self.machine.meeting) if asks and learner.is_trying else 0.0
        seconds = clock.pass_by(size.native * size.ratio(variant), sigma)
        if variant.key not in self._made[place]:
            self._made[place].add(variant.key)
            seconds += clock.pass_by(self.machine.plan, 0.4)
        if asks and learner.is_trying:
            learner.note(seconds, waited)
        elif asks:
            learner.note(seconds / late)
        else:
            learner.count(seconds / late)
        self.native += size.native * exp(sigma**2 / 2)

    def over_best(self) -> list[float]:
        """By size, what serves its calls now over the best of the table."""
        return [size.ratio(each.current) / size.best for size, each in zip(self.sizes, self.learners, strict=True)]


def simulated(sizes: Sequence[Size], topology: Topology, machine: Machine, calls: int, seed: int) -> Job:
    """A job that is over."""
    job = Job(sizes, topology, machine, clock := Clock(Random(seed)))
    with (
        patch.object(learning, "perf_counter", lambda: clock.now),
        patch.object(budget, "perf_counter", lambda: clock.now),
    ):
        job.run(calls)
    return job


def line(name: str, jobs: Sequence[Job]) -> str:
    """What they have found, and what that took."""
    over = [each for job in jobs for each in job.over_best()]
    found = sum(each <= NEAR for each in over)
    took = [job.clock.now / job.native for job in jobs]
    spent = fmean(job.budget.cost / job.clock.now for job in jobs)
    return (
        f"{name:32} found {100 * found / len(over):5.1f} %, total {fmean(took):.3f} (at most {max(took):.3f}), "
        f"spent {100 * spent:.1f} %, serves {geometric_mean(over):.3f}"
    )


def change(setting: str) -> None:
    """Give a constant of learning another value, wherever it is known. Raises UsageError."""
    name, _, value = setting.partition("=")
    known = [module for module in (learning, budget, policy) if isinstance(getattr(module, name, None), int | float)]
    try:
        for module in known:
            setattr(module, name, type(getattr(module, name))(float(value)))
    except ValueError:
        known = []
    if not known:
        raise click.UsageError(
            f"--set: expected NAME=NUMBER, a constant of learning, budget or policy, got {setting!r}"
        )


@click.command()
@click.argument("tables", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--sizes", "-s", type=SizesType(), default="64,512,4K,16K", help="Bytes per block.")
@click.option("--jobs", default=20, show_default=True, help="Of each table.")
@click.option("--calls", default=300, show_default=True, help="Of each size in a job.")
@click.option("--slower", default=1.3, show_default=True, help="Times the table's, that native's calls take.")
@click.option("--set", "changes", multiple=True, metavar="NAME=NUMBER", help="Change a constant, such as CROWD.")
def main(
    tables: tuple[Path, ...], sizes: list[int], jobs: int, calls: int, slower: float, changes: tuple[str, ...]
) -> None:
    """See the top of this file."""
    for each in changes:
        change(each)
    everything: list[Job] = []
    for file in tables:
        entries = [entry for entry in load(file).entries if COLLECTIVES[entry.collective].is_even]
        topology = parse_layout(entries[0].layout)
        machine = MACHINES[min(MACHINES, key=lambda ranks: abs(ranks - topology.size))]
        known = [size for entry in entries for size in sizes_of(entry, sizes, slower, topology, machine)]
        done = [simulated(known, topology, machine, calls, seed) for seed in range(jobs)]
        print(line(file.stem, done), flush=True)
        everything += done
    print(line("all", everything))


if __name__ == "__main__":
    sys.exit(main())
