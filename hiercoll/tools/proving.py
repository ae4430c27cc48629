"""Algorithms put to the proof on layouts, many at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple

from hiercoll.algorithms import REGISTRY, Params, get_algorithm
from hiercoll.collectives import COLLECTIVES, Order
from hiercoll.errors import ConstraintError
from hiercoll.schedule import Schedule
from hiercoll.schedule.system import System
from hiercoll.schedule.transports import DIRECT, Transport
from hiercoll.topology import Topology, parse_layout
from hiercoll.verify import Proof, verify

SHAPES = ("1x1", "1x2", "1x7", "2x1", "2x4", "3x5", "4x4", "5+3", "3+1", "1+4+2", "7x1", "16x8")
PLACEMENTS = ("block", "cyclic", "random=1", "random=2", "random=3")
EVERY_ROOT = 7  # ranks, at most, among which each is tried as the root
ALL_LAYOUTS = tuple(f"{shape}:{placement}" for shape in SHAPES for placement in PLACEMENTS)


class Case(NamedTuple):
    """What is to be proved: an algorithm with parameters on a layout."""

    collective: str
    algorithm: str
    params: Params
    layout: str
    inplace: bool = False
    transport: Transport = DIRECT
    root: int = 0
    accumulate: bool = False

    def __str__(self) -> str:
        spelled = get_algorithm(self.collective, self.algorithm).spelled(self.params)
        root = f", root {self.root}" if COLLECTIVES[self.collective].root else ""
        how = (" in place" if self.inplace else "") + (", accumulated" if self.accumulate else "")
        return f"{self.collective} {spelled} on {self.layout}{root}{how}"


@dataclass(frozen=True)
class Outcome:
    """Of a case: proved, refused by the algorithm's constraint, or refuted by findings."""

    case: Case
    refusal: str | None = None
    findings: tuple[str, ...] = ()
    operations: int = 0
    order: Order | None = None  # in which a reduction has been proved to combine contributions
    roundings: int | None = None  # of each, where wider elements are accumulated

    @property
    def verdict(self) -> str:
        """``proved``, ``refused`` or ``refuted``."""
        return "refuted" if self.findings else "refused" if self.refusal else "proved"


def system_of(collective: str, name: str, params: Params, topology: Topology, **options: Any) -> System:
    """An algorithm's schedules, and the contract that they are to fulfil; ``options`` as of `Algorithm.system`."""
    return get_algorithm(collective, name).system(topology, params, **options)


def generate(collective: str, name: str, params: Params, topology: Topology, **options: Any) -> list[Schedule]:
    """The schedules of all ranks. Raises as `Algorithm.system` does."""
    return system_of(collective, name, params, topology, **options).schedules()


def prove(collective: str, name: str, params: Params, topology: Topology, **options: Any) -> Proof:
    """Generate and verify. Raises ConstraintError where the algorithm refuses, or cannot be cut in parts."""
    return verify(system_of(collective, name, params, topology, **options))


def decide(case: Case) -> Outcome:
    """Prove one case, or say why not."""
    topology = parse_layout(case.layout)
    refusal = get_algorithm(case.collective, case.algorithm).refusal(topology, case.params)
    if refusal is not None:
        return Outcome(case, refusal)
    # Many small tuples and no cycles: the collector would only look at them again and again.
    gc.disable()
    try:
        collective, name, params, _, inplace, transport, root, accumulate = case
        options: dict[str, Any] = {"inplace": inplace, "transport": transport, "root": root, "accumulate": accumulate}
        proof = prove(collective, name, params, topology, **options)
    except ConstraintError as error:  # parts
        return Outcome(case, error.expected)
    finally:
        gc.enable()
    return Outcome(case, None, tuple(map(str, proof.findings)), proof.operations, proof.order, proof.roundings)


def cases(
    algorithms: Iterable[tuple[str, str, Params | None]],
    layouts: Iterable[str],
    transport: Transport = DIRECT,
    accumulate: bool = False,
) -> Iterator[Case]:
    """Cases for (collective, name, parameters; None for all variants) on distinct topologies, in place too where the
    algorithm says that it can. Where there is a root: every one on small topologies, else the first, the last and one
    between. ``accumulate``: reductions, of wider elements than the program's."""
    distinct: dict[Topology, str] = {}
    for layout in layouts:
        distinct.setdefault(parse_layout(layout), layout)
    for collective, name, params in algorithms:
        entry = get_algorithm(collective, name)
        for variant in entry.variants() if params is None else [entry.resolve(params)]:
            for topology, layout in distinct.items():
                p = topology.size
                roots = range(p) if p <= EVERY_ROOT else (0, p // 2, p - 1)
                for root in roots if COLLECTIVES[collective].root else (0,):
                    for inplace in entry.in_places:
                        yield Case(collective, name, variant, layout, inplace, transport, root, accumulate)


def every_algorithm(combinations: bool = False) -> list[tuple[str, str, Params | None]]:
    """All registry entries, in all variants (None), or in all combinations of their parameters."""
    entries = [entry for entries in REGISTRY.values() for entry in entries.values()]
    if not combinations:
        return [(entry.collective, entry.name, None) for entry in entries]
    return [(entry.collective, entry.name, params) for entry in entries for params in entry.all_combinations()]


def decide_all(todo: list[Case], workers: int) -> Iterator[Outcome]:
    """Outcomes as they come, from ``workers`` processes; large layouts first."""
    size = {layout: parse_layout(layout).size for layout in {case.layout for case in todo}}
    ordered = sorted(todo, key=lambda case: -size[case.layout])
    if workers <= 1:
        yield from map(decide, ordered)
        return
    with ProcessPoolExecutor(workers) as pool:
        futures = [pool.submit(decide, case) for case in ordered]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # else the end of the pool waits for all of them
            pool.shutdown(wait=False, cancel_futures=True)
            raise
