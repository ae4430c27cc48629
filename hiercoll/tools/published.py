"""Published timings beside the model: which rows it can say something about, which it was fitted to, how it does on the
others.

    held = held_out(Path("shared/data"), "LUMI", "allgather")   # rows with measured and predicted seconds
    score(held)                                                 # errors and rankings

The CSV files are those of the folder's README: `alltoall-clusters.csv` (mpi-advance/locality_aware, BSD 3-Clause,
(c) 2021 MPI Advance Project) and `pico.csv` (HLC-Lab/pico, MIT, (c) 2025 Daniele De Sensi and Saverio Pasqualoni).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hiercoll.algorithms import REGISTRY
from hiercoll.collectives import ALLGATHER, ALLREDUCE, ALLTOALL
from hiercoll.errors import ArgumentError
from hiercoll.model import benchmarks, gathers, rounds
from hiercoll.model.evaluate import Floats
from hiercoll.model.fit import Rows
from hiercoll.model.machine import Machine, get_machine
from hiercoll.model.measurements import Measurement, Statistic, pooled, read, typical
from hiercoll.model.profile import Profile, of_node
from hiercoll.schedule import Schedule
from hiercoll.topology import Topology

CLUSTERS, PICO = "alltoall-clusters.csv", "pico.csv"
# Clusters: three jobs a row, and some stall. pico: thousands of calls of one job, each timed on its own.
STATISTICS: dict[str, Statistic] = {CLUSTERS: "seconds_min", PICO: "seconds_median"}
# Where the registry has the very algorithm. Not the allgather ring, whose receives are posted early there, and not
# Bruck's, which needs no copy at the end there.
REGISTERED = {
    (ALLGATHER.name, "recursive-doubling"): "recursive_doubling",
    (ALLGATHER.name, "neighbor"): "neighbor_exchange",
    (ALLREDUCE.name, "ring"): "ring",
}
EXCHANGED = ("total", "exchange", "inter")  # phases whose exchange is named in a row
MOST_BLOCK = 4096  # bytes: larger alltoalls were not fitted
LARGE_VECTOR = 65536  # bytes
ELEMENT = 4  # bytes


class System(NamedTuple):
    """A system of the files: its machine file, where its rows are, of which campaigns, and up to how many nodes the
    machine was fitted; the rows of more are held out."""

    machine: str
    file: str
    campaigns: tuple[str, ...]
    nodes: int


SYSTEMS = {
    "Dane": System("dane", CLUSTERS, ("dane08", "dane10"), 8),
    "Tuolumne": System("tuolumne", CLUSTERS, ("tuo10",), 8),
    "Leonardo": System("leonardo", PICO, ("",), 64),
    "LUMI": System("lumi", PICO, ("",), 64),
    "MareNostrum5": System("marenostrum5", PICO, ("",), 64),
    "Fugaku": System("fugaku", PICO, ("",), 64),
    "Lassen": System("lassen", CLUSTERS, ("lassen",), 16),
}


def is_host_message_passing(row: Measurement) -> bool:
    """One rank a node, host memory, over MPI: the model of a machine knows one kind of memory and one way to send."""
    tokens = ("memory=cuda", "layer=utofu", "impl=nccl")
    return row.lanes == 1 and not any(token in row.parameters for token in tokens)


def has_known_messages(row: Measurement) -> bool:
    """The name says which messages are sent. It does not for ``native`` and ``non-blocking`` (the library chooses),
    ``allgather-reduce`` (which allgather?), ``k-bruck`` (the radix is not recorded), or
    ``recursive-doubling`` of a reduce_scatter, nor of other than powers of two in an allgather (what does it do?)."""
    try:
        rounds.known(row.collective, row.algorithm.removesuffix("-dtype").removesuffix("-segmented"), row.nodes)
    except ArgumentError:
        return False
    return True


def is_unsegmented(row: Measurement) -> bool:
    """Messages go out whole: the model does not know pipelining within a round (``..-segmented``, ``segment=..``)."""
    return not row.algorithm.endswith("-segmented") and not any(p.startswith("segment=") for p in row.parameters)


def is_contiguous(row: Measurement) -> bool:
    """Messages do not use MPI datatypes (``..-dtype``), whose packing the model does not know."""
    return not row.algorithm.endswith("-dtype")


def is_as_named(row: Measurement) -> bool:
    """What ran is what the name says. Cray MPICH's ``recursive-doubling`` allreduce takes a third to a half of the
    time that its messages need from 64 KiB on, already on 8 nodes: the library runs something else. So does Fujitsu's
    MPI instead of a ``ring`` allreduce, where there are fewer elements than ranks: it takes as long as recursive
    doubling then."""
    if row.collective != ALLREDUCE.name:
        return True
    if row.algorithm == "recursive-doubling" and "impl=mpich" in row.parameters:
        return row.size < LARGE_VECTOR
    return row.algorithm != "ring" or "impl=fjmpi" not in row.parameters or row.size >= ELEMENT * row.nodes


RULES: tuple[Callable[[Measurement], bool], ...] = (
    is_host_message_passing,
    has_known_messages,
    is_unsegmented,
    is_contiguous,
    is_as_named,
)
COLLECTIVES = tuple(rounds.KNOWN)


def is_predictable_alltoall(row: Measurement) -> bool:
    """An alltoall whose exchanges are pairwise, of up to ``MOST_BLOCK`` bytes: batches of messages stall on Dane by
    0.1 s and more, and need a cost of their own elsewhere. Gather and scatter have none."""
    if row.collective != ALLTOALL.name or row.algorithm not in benchmarks.ALGORITHMS or row.size > MOST_BLOCK:
        return False
    exchanges = [token for token in row.parameters if token in ("nonblocking", "pairwise", "blocking")]
    return "pairwise" in exchanges or (row.phase not in EXCHANGED and not exchanges)


def is_predictable_allgather(row: Measurement) -> bool:
    """An allgather between many ranks a node, whose messages are known. They are not of ``hierarchical-bruck``, whose
    gather and broadcast are the MPI library's, as is all of ``native``."""
    return row.collective == ALLGATHER.name and row.lanes > 1 and gathers.is_known(row)


def is_predictable(row: Measurement) -> bool:
    """A row of the clusters' file: one of either."""
    return is_predictable_alltoall(row) or is_predictable_allgather(row)


def rows_of(data: Path, system: str) -> list[Measurement]:
    """All rows of a system that the model can say something about, those of several jobs as one. ``data``: the folder
    of the CSV files. Raises MachineError for a file that cannot be used, ArgumentError for an unknown system."""
    about = _system(system)
    rows = _rows(data, about, system)
    if about.file == PICO:
        return typical(row for row in rows if row.collective in COLLECTIVES and all(rule(row) for rule in RULES))
    return predictable(rows)


def predictable(rows: Iterable[Measurement]) -> list[Measurement]:
    """The rows that are `is_predictable`, of their parameters only how many groups or leaders there are, and
    those of several jobs as one."""
    kept = [row for row in rows if is_predictable(row)]
    groups = [tuple(t for t in row.parameters if t.startswith(("groups=", "leaders="))) for row in kept]
    return pooled(row._replace(parameters=own) for row, own in zip(kept, groups, strict=True))


def excluded(data: Path, system: str) -> dict[str, list[Measurement]]:
    """The rows that `rows_of` leaves out, by the first rule that does so; of pico.csv, those of ``COLLECTIVES``. Raises
    likewise."""
    about = _system(system)
    if about.file == CLUSTERS:
        rows = _rows(data, about, system)
        return {is_predictable.__name__: [row for row in rows if not is_predictable(row)]}
    found: dict[str, list[Measurement]] = {rule.__name__: [] for rule in RULES}
    for row in _rows(data, about, system):
        broken = next((rule.__name__ for rule in RULES if not rule(row)), None)
        if broken and row.collective in COLLECTIVES:
            found[broken].append(row)
    return found


def _system(name: str) -> System:
    if name not in SYSTEMS:
        raise ArgumentError("system", f"one of {', '.join(SYSTEMS)}", repr(name))
    return SYSTEMS[name]


def _rows(data: Path, about: System, system: str) -> list[Measurement]:
    rows = read(data / about.file, STATISTICS[about.file])
    return [row for row in rows if row.system == system and row.source.startswith(about.campaigns)]


def profiles(machine: Machine, row: Measurement) -> list[Profile]:
    """What a row ran: from the registry where it has the very algorithm, else as `hiercoll.model.rounds`,
    `hiercoll.model.benchmarks` or `hiercoll.model.gathers` have it. Raises ArgumentError."""
    if row.collective == ALLTOALL.name:
        return benchmarks.of_row(machine, row)
    if row.lanes > 1:
        return gathers.of_row(machine, row)
    return [_profile(row.collective, row.algorithm, row.nodes)]


@lru_cache(maxsize=1024)
def _profile(collective: str, name: str, nodes: int) -> Profile:
    topology = Topology(tuple(range(nodes)))
    return of_node(lambda rank: schedule_of(collective, name, topology), topology, Machine(""), 0)


def schedule_of(collective: str, name: str, topology: Topology) -> Schedule:
    """Rank 0's schedule of a published algorithm, one rank a node. Raises ArgumentError."""
    registered = REGISTERED.get((collective, name))
    if registered is None:
        return rounds.schedule(collective, name, topology.size)
    return REGISTRY[collective][registered].schedule(topology, 0)


class Held(NamedTuple):
    """A row, and the seconds that the model says, between which (``low``, ``high``) four of five are to lie."""

    row: Measurement
    seconds: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Model / measured - 1."""
        return self.seconds / self.row.seconds - 1


def compared(rows: Sequence[Measurement], machine: Machine) -> list[Held]:
    """Rows beside what a machine's parameters say. Raises ArgumentError for an algorithm that nobody knows."""
    low, high = machine.spread
    said = Rows(machine, rows, profiles).seconds(machine).tolist()
    return [Held(row, each, low * each, high * each) for row, each in zip(rows, said, strict=True)]


def held_out(data: Path, system: str, collective: str, machine: Machine | None = None) -> list[Held]:
    """The rows that the shipped machine of ``system`` was not fitted to, since they are of more nodes, beside what it
    (or ``machine``) says of them. Raises as `rows_of`."""
    about = _system(system)
    rows = [row for row in rows_of(data, system) if row.collective == collective and row.nodes > about.nodes]
    return compared(rows, machine or get_machine(about.machine))


class Score(NamedTuple):
    """How well rows are predicted: their number; median and 90 % quantile of the absolute relative error; by how many
    rankings (of three algorithms or more, at one number of nodes and size) Kendall's tau was taken, their median and
    mean; share of them in which the model's choice takes at most 1.15 times the fastest, and the worst of these."""

    rows: int
    median: float
    p90: float
    rankings: int
    tau_median: float
    tau_mean: float
    chosen: float
    worst: float


def score(held: Sequence[Held]) -> Score:
    """Errors and rankings of totals. Schedules of several libraries that the model cannot tell apart rank as one."""
    errors = np.abs([each.error for each in held])
    taus, regrets = [], []
    for ranked in _rankings(held):
        measured, said = np.array(ranked).T
        taus.append(_tau(measured, said))
        regrets.append(measured[said.argmin()] / measured.min())
    if not taus:
        taus = regrets = [float("nan")]
    return Score(
        len(held),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        len(taus),
        float(np.median(taus)),
        float(np.mean(taus)),
        float(np.mean(np.array(regrets) <= 1.15)),
        float(max(regrets)),
    )


def _rankings(held: Iterable[Held]) -> list[list[tuple[float, float]]]:
    """(measured, predicted) of the algorithms at each number of nodes and size, where there are three or more."""
    found: dict[object, dict[str, list[Held]]] = {}
    for each in held:
        if each.row.phase == "total":
            key = (each.row.system, each.row.collective, each.row.nodes, each.row.lanes, each.row.size)
            found.setdefault(key, {}).setdefault(f"{each.seconds:.6g}", []).append(each)
    alike = [list(group.values()) for group in found.values() if len(group) >= 3]
    return [[(float(np.median([h.row.seconds for h in same])), same[0].seconds) for same in each] for each in alike]


def _tau(a: Floats, b: Floats) -> float:
    """Kendall's tau of values without ties."""
    first, second = np.triu_indices(len(a), 1)
    return float(np.mean(np.sign(a[first] - a[second]) * np.sign(b[first] - b[second])))
