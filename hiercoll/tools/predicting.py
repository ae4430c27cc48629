"""What the model says of a collective on a machine that need not be at hand: all algorithms, at all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hiercoll.algorithms import REGISTRY, Algorithm, Params
from hiercoll.collectives import COLLECTIVES
from hiercoll.errors import ConstraintError
from hiercoll.model.evaluate import Design
from hiercoll.model.fluid import flow_seconds
from hiercoll.model.machine import Machine
from hiercoll.model.profile import profile
from hiercoll.schedule import Schedule
from hiercoll.topology import Topology

MOST_FLUID = 2048  # ranks: some 10 s for each time
TIE = 1.15  # candidates that differ by less are alike to the model: measure them


class Forecast(NamedTuple):
    """Of one algorithm, as it is written on the command line, at one size (bytes): seconds, between which (``low``,
    ``high``) four of five measured times are to lie, what bounds it, and the seconds that each of
    `hiercoll.model.evaluate.BOUNDS` takes."""

    algorithm: str
    size: int
    seconds: float
    low: float
    high: float
    bound: str
    parts: tuple[float, ...]


class Refused(NamedTuple):
    """An algorithm that cannot run on the layout, and why."""

    algorithm: str
    why: str


def candidates(collective: str) -> list[tuple[Algorithm, Params]]:
    """Every algorithm with its default parameters, and as "auto" would try it."""
    found: dict[str, tuple[Algorithm, Params]] = {}
    for entry in REGISTRY[collective].values():
        for given in ({}, *entry.auto):
            params = entry.resolve(dict(given))
            found.setdefault(entry.spelled(params), (entry, params))
    return list(found.values())


def forecast(
    chosen: Iterable[tuple[Algorithm, Params]],
    topology: Topology,
    machine: Machine,
    sizes: Sequence[int],
    done: Callable[[], object] = lambda: None,
    *,
    fluid: bool = False,
) -> tuple[list[Forecast], list[Refused]]:
    """What the model says of each of ``chosen``, by algorithm and size; ``done`` is called after each of them.
    ``fluid``: times of the fluid evaluator (`hiercoll.model.fluid`), which lets flows share links; what bounds them is
    said by the fast one. Collectives with a root are always evaluated so, up to MOST_FLUID ranks. Raises
    ConstraintError for more ranks than that."""
    if fluid and topology.size > MOST_FLUID:
        raise ConstraintError("fluid evaluator", f"at most {MOST_FLUID} ranks", topology.size)
    found: list[Forecast] = []
    refused: list[Refused] = []
    for entry, params in chosen:
        name, why = entry.spelled(params), entry.refusal(topology, params)
        if why:
            refused.append(Refused(name, why))
        else:
            quick = _forecasts(name, entry, params, topology, machine, sizes)
            # A chain from a root goes through other ranks, of which the fast evaluator knows nothing.
            rooted = COLLECTIVES[entry.collective].root and topology.size <= MOST_FLUID
            found += _by_flow(quick, entry, params, topology, machine) if fluid or rooted else quick
        done()
    return found, refused


def _forecasts(
    name: str, entry: Algorithm, params: Params, topology: Topology, machine: Machine, sizes: Sequence[int]
) -> list[Forecast]:
    def emit(rank: int) -> Schedule:
        return entry.schedule(topology, rank, params)

    leaders = params.get("leaders", 1)
    nodes = profile(emit, topology, machine, leaders if isinstance(leaders, int) else 1)
    rows = [(each, size) for size in sizes for each in nodes]
    predicted = Design(rows, machine).evaluate(machine)
    low, high = machine.spread
    found = []
    for index, size in enumerate(sizes):
        own = range(index * len(nodes), (index + 1) * len(nodes))
        at = max(own, key=lambda row: predicted.seconds[row])  # the slowest node
        seconds = float(predicted.seconds[at])
        parts = tuple(map(float, predicted.parts[at]))
        found.append(Forecast(name, size, seconds, low * seconds, high * seconds, predicted.bound(at), parts))
    return found


def _by_flow(
    quick: Sequence[Forecast], entry: Algorithm, params: Params, topology: Topology, machine: Machine
) -> Iterator[Forecast]:
    schedules = [entry.schedule(topology, rank, params) for rank in range(topology.size)]
    low, high = machine.spread
    for each in quick:
        seconds = flow_seconds(schedules, topology, -(-each.size // schedules[0].blocks), machine)
        yield each._replace(seconds=seconds, low=low * seconds, high=high * seconds)


def by_size(found: Iterable[Forecast]) -> dict[int, list[Forecast]]:
    """Those of each size, the fastest first."""
    sizes: dict[int, list[Forecast]] = {}
    for each in found:
        sizes.setdefault(each.size, []).append(each)
    return {size: sorted(listed, key=lambda each: each.seconds) for size, listed in sorted(sizes.items())}
