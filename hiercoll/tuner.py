"""Choosing an algorithm, from values that are equal on all ranks: by a table, else the MPI library's own.

A table's entry for the same layout decides. The entry of another layout is used with the
model's help: what the model says of an algorithm here is corrected by how wrong it was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hiercoll.algorithms import REGISTRY, Algorithm, Params, get_algorithm
from hiercoll.algorithms.registry import Value, automatic, tried
from hiercoll.collectives import COLLECTIVES, NATIVE, Order, Sizes
from hiercoll.model.cost import DEFAULT_LINKS, Links, RankCounts, count_rank, predict
from hiercoll.schedule import Schedule
from hiercoll.statistics import median
from hiercoll.tables import NATIVE_VARIANT, Entry, Table, Variant
from hiercoll.topology import Topology, parse_layout

if TYPE_CHECKING:  # few programs are told of a machine, and all would wait for what models it
    from hiercoll.model.machine import Machine
    from hiercoll.model.profile import Profile


class Combining(NamedTuple):
    """What a reduction asks of algorithms: an ``order``; whether the MPI library's own may serve it (``native``), which
    promises none but that of operations that do not commute; and whether one algorithm may serve a call and another the
    next one, though they give other bits (``changes``); whether partial sums are in elements twice as long as the
    program's (``accumulates``)."""

    order: Order = Order.ANY
    native: bool = True
    changes: bool = True
    accumulates: bool = False

    @property
    def of_auto(self) -> Order:
        """The order of algorithms that "auto" may choose, unless by a table for the very layout: where bits are to stay
        the same, that of one tree."""
        return self.order if self.changes else Order.FIXED

    def __str__(self) -> str:
        wide = "wide" if self.accumulates else ""
        return "" if self == FREE else f"{self.order.name.lower()}{self.native:d}{self.changes:d}{wide}"


FREE = Combining()


class Candidate(NamedTuple):
    """A variant, its predicted time in seconds, and how many messages to other nodes a rank may have under way."""

    variant: Variant
    seconds: float
    flows: float = 0.0

    @property
    def algorithm(self) -> str:
        """Of the variant."""
        return self.variant.algorithm

    @property
    def params(self) -> Params:
        """Of the variant."""
        return self.variant.params


EVEN = 4  # times the mean that the largest of blocks of uneven sizes may have to be like those of a table


Given: TypeAlias = "tuple[tuple[str, Value], ...]"
SHORTEST = 512  # bytes of a segment, below which messages cost more than pipelining can gain
SAMPLE = 8  # lanes of a node that are looked at
# Seconds that it takes to look at a lane's schedule, about, over ranks, and over segments.
EACH_RANK = 10e-6
EACH_SEGMENT = 50e-6
MOST_SHARED = 8 << 20  # bytes of shared memory per node that "auto" may take; containers have 64 MiB


@lru_cache(maxsize=1024)
def _counted(
    collective: str,
    topology: Topology,
    inplace: bool,
    name: str,
    given: Given,
    order: Order,
    accumulates: bool = False,
) -> list[list[RankCounts]] | None:
    """The counts of the ranks of a largest node and, where there is a root, of that of root 0; None if the variant
    cannot run there.

    Of a node with many lanes, some are counted and stand for those that follow them;
    lane 0, the leader, stands for itself.
    """
    params = dict(given)
    entry = REGISTRY[collective][name]
    if not is_able(collective, topology, inplace, Variant(name, params), order):
        return None
    nodes = [max(topology.nodes, key=len)]
    if COLLECTIVES[collective].root and topology.node(0) not in nodes:
        nodes.append(topology.node(0))
    emit = _emitting(entry, topology, params, inplace, accumulates)
    return [_sampled(emit, topology, ranks) for ranks in nodes]


def _emitting(
    entry: Algorithm, topology: Topology, params: Params, inplace: bool, accumulates: bool
) -> Callable[[int], Schedule]:
    """What gives each rank's schedule."""
    if accumulates:
        return entry.system(topology, params, inplace=inplace, accumulate=True).__getitem__
    return partial(entry.schedule, topology, params=params, inplace=inplace)


def _sampled(emit: Callable[[int], Schedule], topology: Topology, ranks: Sequence[int]) -> list[RankCounts]:
    """The counts of the ``ranks`` of a node."""
    others = len(ranks) - 1
    sample = sorted({1 + i * others // SAMPLE for i in range(SAMPLE)}) if others else []
    weights = [b - a for a, b in pairwise([*sample, others + 1])]
    counts: list[RankCounts] = []
    for lane, weight in [(0, 1), *zip(sample, weights, strict=True)]:
        counts += [count_rank(emit(ranks[lane]), topology)] * weight
    return counts


@lru_cache(maxsize=1024)
def _profiled(
    collective: str,
    topology: Topology,
    inplace: bool,
    name: str,
    given: Given,
    machine: Machine,
    accumulates: bool,
) -> list[Profile]:
    """What the ranks of the nodes that differ do."""
    from hiercoll.model.profile import profile

    entry, params = REGISTRY[collective][name], dict(given)
    leaders = params.get("leaders", 1)
    emit = _emitting(entry, topology, params, inplace, accumulates)
    return profile(emit, topology, machine, leaders if isinstance(leaders, int) else 1)


def _seconds_on(machine: Machine, profiles: Sequence[Profile], block: int) -> float:
    """Of the slowest of these."""
    from hiercoll.model.evaluate import Design

    return float(Design([(each, block) for each in profiles], machine).evaluate(machine).seconds.max())


def rank_by_model(
    collective: str,
    topology: Topology,
    block: int,
    *,
    inplace: bool = False,
    links: Links = DEFAULT_LINKS,
    variants: Iterable[tuple[str, Params]] | None = None,
    most_shared: int = MOST_SHARED,
    machine: Machine | None = None,
    order: Order = Order.ANY,
    accumulates: bool = False,
) -> list[Candidate]:
    """The ``variants`` (default: `automatic` ones), fastest first by the cost model, for blocks of ``block`` bytes, or
    a vector of so many: on a ``machine``, else with ``links``. Reductions: those that combine in that ``order``.
    ``accumulates``: partial sums have so many bytes, contributions and results half of them. What would cut a vector
    into very short segments is left out.

    Deterministic in its arguments, so all ranks that call it alike choose alike.
    """
    ranked, known = [], (order, accumulates)
    block = block // 2 if accumulates else block  # of the program's elements
    for name, params in automatic(collective, inplace) if variants is None else variants:
        if _is_too_short(collective, name, params, block):
            continue  # the model would say so, too, but takes long to count so many messages
        nodes = _counted(collective, topology, inplace, name, tuple(params.items()), *known)
        if nodes and nodes[0][0].nbytes(nodes[0][0].shared, block) <= most_shared:
            flows = max(each.network_messages / max(each.network_chain, 1) for counts in nodes for each in counts)
            if machine is None:
                seconds = max(predict(counts, block, links) for counts in nodes)
            else:
                found = _profiled(collective, topology, inplace, name, tuple(params.items()), machine, accumulates)
                seconds = _seconds_on(machine, found, block)
            ranked.append(Candidate(Variant(name, params), seconds, flows))
    return sorted(ranked, key=lambda candidate: candidate.seconds)


def effort(collective: str, topology: Topology, block: int, name: str, params: Params) -> float:
    """Seconds that it takes to rank a variant by the model for the first time, about."""
    if _is_too_short(collective, name, params, block):
        return 0.0
    lanes = min(max(topology.node_sizes), SAMPLE + 1)
    return lanes * (EACH_RANK * topology.size + EACH_SEGMENT * _segments(collective, name, params))


def _is_too_short(collective: str, name: str, params: Params, block: int) -> bool:
    """Whether a vector is too short for the segments into which a variant cuts it."""
    return COLLECTIVES[collective].is_cut and 1 < _segments(collective, name, params) > block / SHORTEST


def _segments(collective: str, name: str, params: Params) -> int:
    """Into how many a variant cuts what it sends; 1 for those that do not."""
    segments = REGISTRY[collective][name].resolve(params).get("segments", 1)
    return segments if isinstance(segments, int) else 1


def modelled(
    collective: str,
    topology: Topology,
    block: int,
    inplace: bool,
    combining: Combining,
    machine: Machine | None = None,
    variants: Iterable[tuple[str, Params]] | None = None,
    links: Links = DEFAULT_LINKS,
) -> list[Candidate]:
    """The model's ranking of what may combine so, of the ``variants``: see `rank_by_model`."""
    order, accumulates = combining.of_auto, combining.accumulates
    return rank_by_model(
        collective,
        topology,
        block,
        inplace=inplace,
        links=links,
        variants=variants,
        machine=machine,
        order=order,
        accumulates=accumulates,
    )


class Decision(NamedTuple):
    """What is run and why; ``ranking`` is what was compared, fastest first, in seconds of calls; ``is_measured``: by
    times that were measured for this very layout."""

    variant: Variant
    reason: str
    ranking: tuple[Candidate, ...] = ()
    is_measured: bool = False


ROOT_ALONE = "its nature: the root alone knows all sizes, so that ranks cannot choose by them"


@lru_cache(maxsize=4096)
def _decide(
    collective: str,
    topology: Topology,
    block: int,
    inplace: bool,
    table: Table,
    mpi: str,
    memory: str,
    held: bool,
    combining: Combining,
    explains: bool,
    links: Links,
) -> Decision:
    if COLLECTIVES[collective].sizes is Sizes.ROOT:
        names = ", ".join(REGISTRY[collective])
        return Decision(Variant(NATIVE), f"{ROOT_ALONE}; by name there are {names}")
    if topology.size == 1 or not automatic(collective):
        return Decision(Variant(NATIVE), "one rank" if topology.size == 1 else "no candidates")
    entry = table.find(collective, mpi, memory, topology)
    if COLLECTIVES[collective].sizes is Sizes.OWN and (entry is None or not entry.is_for(topology)):
        names = " and ".join(dict.fromkeys(name for name, _ in tried(collective, topology, mean=1, are_small=True)))
        then = f"; a program's own calls try {names} where blocks are small" if names else ""
        why = f"no table for {collective}, {topology} and {mpi or 'this MPI library'}{then}"
        return Decision(Variant(NATIVE), why)
    if entry is None:
        ranked = []
        if explains or table.by_model or not combining.native:
            ranked = modelled(collective, topology, block, inplace, combining, table.machine, links=links)
        if ranked and table.by_model:
            return Decision(ranked[0].variant, "the cost model, as asked for", tuple(ranked))
        if ranked and not combining.native:
            return Decision(ranked[0].variant, f"the cost model, for {_ORDERED[combining.of_auto]}", tuple(ranked))
        why = f"default: no table for {collective}, {memory} memory and {mpi or 'this MPI library'}"
        name = f" of {table.machine.name}" if table.machine is not None else ""
        why += f"; what the cost model{name} says of hiercoll's own:" if ranked else ""
        return Decision(Variant(NATIVE), why, tuple(ranked))
    if entry.is_for(topology):
        return _by_entry(entry, topology, block, inplace, table.source, held, combining, links)
    return _by_neighbour(entry, topology, block, inplace, table.source, combining, links)


def decide(
    collective: str,
    topology: Topology,
    block: int,
    *,
    inplace: bool = False,
    table: Table | None = None,
    mpi: str = "",
    memory: str = "host",
    held: bool = False,
    combining: Combining = FREE,
    explains: bool = True,
    links: Links = DEFAULT_LINKS,
) -> Decision:
    """What ``algorithm="auto"`` runs for blocks of ``block`` bytes, in calls or (``held``) in plans.

    ``table`` is consulted for the MPI library ``mpi``, as "MPICH 5.0.2". Without one it is the MPI library's own
    collective: the model knows nothing of that one, and its ranking of the others says what may be worth a try. Where
    that one may not serve a reduction (``combining``), the model's first does. ``explains``: with the model's ranking
    where it decides nothing, too, which takes milliseconds. ``links``: what the model goes by, unless the table has
    links or a machine.
    Deterministic in its arguments, so all ranks that call it alike choose alike.
    """
    if COLLECTIVES[collective].sizes is Sizes.OWN:
        inplace = False  # what is in place is copied before
    known = table or _NO_TABLE
    return _decide(collective, topology, block, inplace, known, mpi, memory, held, combining, explains, links)


class Spread(NamedTuple):
    """What blocks of uneven sizes there are: how many are not empty, how many of these are small (they can
    travel together), the bytes of all, and those of the largest. ``unfit``: how many ranks have
    arguments that only the MPI library can serve, or refuse."""

    filled: int = 0
    small: int = 0
    nbytes: int = 0
    most: int = 0
    unfit: int = 0


def uneven_choices(
    collective: str,
    topology: Topology,
    spread: Spread,
    table: Table,
    mpi: str,
    *,
    held: bool = False,
    packs: bool = False,
) -> tuple[Variant, ...]:
    """native, and what may be faster, if anything, for a collective with such blocks on all ranks together. ``packs``:
    whether native packs what lies apart, which may be what takes it long, whatever the sizes.

    A table says what that is where it was made for this layout and the blocks are like those it
    was made with; other counts may have other needs, so that calls try it. In plans (``held``), which try nothing,
    what comes last is taken.
    """
    native = NATIVE_VARIANT
    if topology.size == 1 or spread.unfit or 2 * spread.filled <= topology.size**2:
        return (native,)
    mean = spread.nbytes // spread.filled
    entry = table.find(collective, mpi, "host", topology)
    if entry is not None and entry.is_for(topology) and spread.most <= EVEN * mean:
        choice = entry.choice(mean, held=held)
        return (native,) if choice.is_native else (native, choice)
    are_small = 10 * spread.small > 9 * spread.filled
    if held or not (packs or are_small):
        return (native,)
    return (native, *(Variant(*each) for each in tried(collective, topology, mean, are_small)))


_NO_TABLE = Table()


def is_able(
    collective: str, topology: Topology, inplace: bool, variant: Variant, order: Order = Order.ANY, native: bool = True
) -> bool:
    """Whether the variant can run so; ``native``: whether the MPI library's own may."""
    if variant.algorithm == NATIVE:
        return native
    entry = get_algorithm(collective, variant.algorithm)
    if (inplace and not entry.in_place) or entry.refusal(topology, variant.params) is not None:
        return False
    return order is Order.ANY or order <= entry.order(topology, entry.resolve(variant.params))


def _by_entry(
    entry: Entry,
    topology: Topology,
    block: int,
    inplace: bool,
    source: str,
    held: bool,
    combining: Combining,
    links: Links,
) -> Decision:
    """By an entry for this very layout. It chooses one algorithm for a size, so that the bits of a sum stay the same,
    in whatever order, if calls in place choose as others do."""
    alike = inplace or not combining.changes
    able = partial(is_able, entry.collective, topology, alike, order=combining.order, native=combining.native)
    ranking = tuple(Candidate(f.variant, f.median) for f in entry.measured(block) if able(f.variant))
    variant, why = entry.choice(block, held=held), f"{source}: measured for {entry.layout} with {entry.mpi}"
    if not able(variant):
        what = "work in place" if combining.order is Order.ANY else f"give {_ORDERED[combining.order]}"
        variant, why = NATIVE_VARIANT, f"{why}; the choice there cannot {what}"
    if not able(variant):
        others = ranking or modelled(entry.collective, topology, block, inplace, combining, links=links)
        variant = others[0].variant
    return Decision(variant, why, ranking, is_measured=True)


_ORDERED = {Order.ANY: "one order", Order.RANK: "the order of ranks", Order.FIXED: "the fixed order"}


def _by_neighbour(
    entry: Entry, topology: Topology, block: int, inplace: bool, source: str, combining: Combining, links: Links
) -> Decision:
    """By an entry for another layout: the model's times here, times measured over modelled there, of what was chosen
    there and of native.

    native, of which the model knows nothing, is taken to change as the others do on average.
    """
    there = entry_topology(entry)
    corrected: list[Candidate] = []
    growth: list[float] = []
    figures = [each for each in entry.measured(block) if each.variant.key == entry.choice(each.size).key]
    for figure in figures:
        variant = figure.variant
        if variant.algorithm == NATIVE:
            continue
        own = [(variant.algorithm, variant.params)]
        known = rank_by_model(entry.collective, there, figure.size, links=entry.links, variants=own)
        here = rank_by_model(
            entry.collective, topology, block, inplace=inplace, links=entry.links, variants=own, order=combining.of_auto
        )
        if known and here and known[0].seconds > 0:
            factor = here[0].seconds / known[0].seconds
            growth.append(factor)
            corrected.append(here[0]._replace(variant=variant, seconds=figure.median * factor))
    natives = [figure.median for figure in entry.measured(block) if figure.variant == NATIVE_VARIANT]
    if natives and combining.native:
        corrected.append(Candidate(NATIVE_VARIANT, natives[0] * (median(growth) if growth else 1.0)))
    corrected.sort(key=lambda candidate: candidate.seconds)
    why = f"{source}: nearest entry, {entry.layout} with {entry.mpi}, carried over to {topology} by the cost model"
    if not corrected and not combining.native:
        corrected = modelled(entry.collective, topology, block, inplace, combining, links=links)
    if not corrected:
        return Decision(Variant(NATIVE), f"{why}; nothing that was measured there can run here")
    return Decision(corrected[0].variant, why, tuple(corrected))


def entry_topology(entry: Entry) -> Topology:
    """A layout of the entry's kind."""
    return parse_layout(entry.layout.replace(":irregular", ":random"))
