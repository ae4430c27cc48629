"""What an algorithm is to the rest of hiercoll: a name, a function, parameters, constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import inf
from operator import index
from typing import Any, NamedTuple, TypeAlias

from hiercoll.collectives import COLLECTIVES, Collective, InPlace, Order
from hiercoll.contracts import Contract
from hiercoll.errors import ConstraintError, ParameterError, UnknownAlgorithmError
from hiercoll.schedule import Schedule, in_place
from hiercoll.schedule.system import System
from hiercoll.schedule.transports import DIRECT, Transport
from hiercoll.topology import Topology

Value: TypeAlias = "int | str"
Params: TypeAlias = "dict[str, Value]"
Constraint: TypeAlias = "Callable[[Topology, Params], str | None]"
Choices: TypeAlias = "Sequence[Params]"
ChoicesOn: TypeAlias = "Callable[[Topology], Choices]"
Trials: TypeAlias = "Callable[[Topology, int, bool], Choices]"
OrderOn: TypeAlias = "Callable[[Topology, Params], Order]"


class Parameter(NamedTuple):
    """A parameter: its default, the values worth trying, and its meaning.

    A string parameter takes only ``choices``; an integer takes any value from
    ``minimum`` on, up to ``maximum`` if there is one, ``choices`` being those that are proved and tuned.
    """

    name: str
    default: Value
    choices: tuple[Value, ...]
    help: str
    minimum: int = 0
    maximum: float = inf

    def check(self, value: object) -> Value:
        """``value`` if this parameter takes it, else ParameterError."""
        if isinstance(self.default, str):
            if value in self.choices:
                return str(value)
            raise ParameterError(self.name, f"one of {', '.join(map(str, self.choices))}", repr(value))
        try:
            number = self.minimum - 1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
        except TypeError:
            number = self.minimum - 1
        if self.minimum <= number <= self.maximum:
            return number
        most = "" if self.maximum == inf else f", at most {self.maximum}"
        raise ParameterError(self.name, f"a whole number, at least {self.minimum}{most}", repr(value))


class Algorithm(NamedTuple):
    """A registry entry.

    ``in_place`` says whether the schedule is still right when its input lies in the
    receive buffer, as it always does in collectives with one buffer; ``constraint`` names what
    a topology lacks, or returns None;
    ``together`` lists parameters that mean something only in company.

    ``auto``: the parameters that the cost model ranks where nothing has been measured, since some machine, size or
    layout makes them the best; with ``auto_in_place`` only where the input lies in the receive buffer. ``search``: what
    ``hiercoll tune`` measures besides those and `variants`;
    ``trials``: what a program's own calls try where nobody knows all sizes, by topology, bytes of a block on average,
    and whether most blocks are small;
    ``order``: in which reductions combine contributions, on a topology.
    """

    collective: str
    name: str
    function: Callable[..., Schedule]
    parameters: tuple[Parameter, ...] = ()
    constraint: Constraint = lambda topology, params: None
    in_place: bool = False
    together: tuple[Params, ...] = ()
    auto: tuple[Params, ...] = ()
    auto_in_place: bool = False
    search: ChoicesOn = lambda topology: ()
    trials: Trials = lambda topology, mean, are_small: ()
    order: OrderOn = lambda topology, params: Order.ANY

    @property
    def in_places(self) -> tuple[bool, ...]:
        """In place or not: the ways in which it can be called."""
        if COLLECTIVES[self.collective].one_buffer:
            return (True,)
        return (False, True) if self.in_place else (False,)

    def resolve(self, given: Mapping[str, object]) -> Params:
        """All parameters with their values. Raises ParameterError."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                takes = ", ".join(known) or "none"
                raise ParameterError(f"parameter {name!r}", f"one that {self.name} takes ({takes})", repr(given[name]))
        return {name: p.check(given.get(name, p.default)) for name, p in known.items()}

    def refusal(self, topology: Topology, params: Mapping[str, object]) -> str | None:
        """The constraint that does not hold on ``topology``, or None."""
        return self.constraint(topology, self.resolve(params))

    def schedule(
        self,
        topology: Topology,
        rank: int,
        params: Mapping[str, object] | None = None,
        *,
        inplace: bool = False,
        root: int = 0,
        order: Order = Order.ANY,
    ) -> Schedule:
        """The schedule of ``rank``, in a collective with a root for that ``root``, in a reduction in that ``order`` or
        one that it includes.

        Raises ParameterError, or ConstraintError if the topology (or in-place use, or the order)
        does not suit the algorithm.
        """
        resolved = self.resolve(params or {})
        refusal = self.constraint(topology, resolved)
        if refusal is None and inplace and not self.in_place:
            refusal = "separate send and receive buffers"
        if refusal is not None:
            got = f"{topology}, {'in place' if inplace else 'not in place'}, {spelled(resolved)}"
            raise ConstraintError(f"algorithm {self.name!r}", refusal, got, rank)
        own = self.order(topology, resolved)
        if order > own:
            got = f"order {order.name.lower()!r} on {topology}"
            raise ConstraintError(f"algorithm {self.name!r}", f"order {own.name.lower()!r}", got, rank)
        rooted = {"root": root} if COLLECTIVES[self.collective].root else {}
        schedule = self.function(topology, rank, **resolved, **rooted)
        return in_place(schedule, COLLECTIVES[self.collective].in_place is InPlace.OWN) if inplace else schedule

    def system(
        self,
        topology: Topology,
        params: Mapping[str, object],
        *,
        inplace: bool = False,
        transport: Transport = DIRECT,
        root: int = 0,
        order: Order | None = None,
        accumulate: bool = False,
    ) -> System:
        """The schedules of all ranks, and the contract that they are to fulfil: in place, too, where there is only one
        buffer; ``order``: None for the algorithm's own; ``accumulate``: a reduction, of wider elements than the
        program's. Each schedule raises, when it is asked for, as `schedule` and `transports.cut` do."""
        inplace = inplace or self.in_places == (True,)
        order = self.order(topology, self.resolve(params)) if order is None else order
        contract = Contract(self.collective, topology.size, root=root, in_place=inplace, order=order)
        options: dict[str, Any] = {"inplace": inplace, "root": root, "order": order}
        plain = System(topology, contract, lambda rank: self.schedule(topology, rank, params, **options))
        if accumulate:
            plain = plain.accumulated()
        if not COLLECTIVES[self.collective].is_even:  # a rank knows no places of blocks that are not its own
            transport = transport._replace(shared=False)
        return plain if transport == DIRECT else plain.with_node_pass(transport.schedule)

    def variants(self) -> Iterator[Params]:
        """The default parameters, every other choice of each one at a time, and those of ``together``."""
        default = self.resolve({})
        yield default
        for parameter in self.parameters:
            for choice in parameter.choices:
                if choice != parameter.default:
                    yield {**default, parameter.name: choice}
        for params in self.together:
            yield {**default, **params}

    def all_combinations(self) -> Iterator[Params]:
        """Every combination of the parameters' choices."""
        names = [parameter.name for parameter in self.parameters]
        for values in product(*(parameter.choices for parameter in self.parameters)):
            yield dict(zip(names, values, strict=True))

    def changed(self, params: Mapping[str, Value]) -> Params:
        """Those of ``params`` that differ from the defaults."""
        return {p.name: params[p.name] for p in self.parameters if params.get(p.name, p.default) != p.default}

    def spelled(self, params: Mapping[str, Value]) -> str:
        """The name with those parameters that differ from the defaults: ``bruck radix=4``."""
        return f"{self.name} {spelled(self.changed(params))}".strip()


def spelled(params: Mapping[str, Value]) -> str:
    """Parameters in words: ``radix=4 order=ring``."""
    return " ".join(f"{name}={value}" for name, value in params.items())


REGISTRY: dict[str, dict[str, Algorithm]] = {}


def register(
    collective: Collective,
    *parameters: Parameter,
    constraint: Constraint | None = None,
    in_place: bool = False,
    together: tuple[Params, ...] = (),
    auto: tuple[Params, ...] = (),
    auto_in_place: bool = False,
    search: ChoicesOn | None = None,
    trials: Trials | None = None,
    order: Order | OrderOn = Order.ANY,
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Enter the decorated function into the registry under its own name, less that of the collective (or, for gatherv,
    of gather); see `Algorithm`."""

    def kind(topology: Topology, params: Params) -> Order:
        if topology.size == 1:
            return Order.FIXED
        return order(topology, params) if callable(order) else order

    def enter(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
        name = function.__name__.removesuffix(f"_{collective.name}").removesuffix(
            f"_{collective.name.removesuffix('v')}"
        )
        always, nothing = constraint or (lambda topology, params: None), (lambda topology: ())
        able = in_place or collective.one_buffer
        entry = Algorithm(
            collective.name, name, function, parameters, always, able, together, auto, auto_in_place,
            search or nothing, trials or (lambda topology, mean, are_small: ()), kind,
        )  # fmt: skip
        REGISTRY.setdefault(collective.name, {})[name] = entry
        return function

    return enter


def grid(**values: Sequence[Value]) -> list[Params]:
    """Every combination of these parameters' values."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def automatic(collective: str, inplace: bool = True) -> list[tuple[str, Params]]:
    """What the cost model ranks for a collective: names and parameters; less what is for calls in place, if this is
    none."""
    entries = REGISTRY.get(collective, {}).values()
    return [(e.name, dict(params)) for e in entries if inplace or not e.auto_in_place for params in e.auto]


def searched(collective: str, topology: Topology) -> list[tuple[str, Params]]:
    """What may be worth measuring on ``topology``: `automatic`, what entries name for a search, and their variants."""
    found = automatic(collective)
    for entry in REGISTRY[collective].values():
        found += [(entry.name, dict(params)) for params in entry.search(topology)]
    for entry in REGISTRY[collective].values():
        found += [(entry.name, params) for params in entry.variants()]
    return [(name, params) for name, params in found if REGISTRY[collective][name].refusal(topology, params) is None]


def neighbours(collective: str, topology: Topology, name: str, params: Mapping[str, Value]) -> list[Params]:
    """What may be worth measuring of an algorithm, whether it can run there or not, that differs in one parameter from
    ``params``, which are all of them."""
    entry, found = get_algorithm(collective, name), list[Params]()
    for given in (*entry.auto, *entry.search(topology), *entry.variants()):
        whole = entry.resolve(given)
        if sum(whole[each] != params[each] for each in whole) == 1 and whole not in found:
            found.append(whole)
    return found


def tried(collective: str, topology: Topology, mean: int, are_small: bool) -> list[tuple[str, Params]]:
    """What calls try where nobody knows all sizes (`Algorithm`): names, and all parameters."""
    entries = REGISTRY.get(collective, {}).values()
    return [(e.name, e.resolve(each)) for e in entries for each in e.trials(topology, mean, are_small)]


def get_algorithm(collective: str, name: str) -> Algorithm:
    """The entry of that name. Raises UnknownAlgorithmError naming those that exist."""
    entries = REGISTRY.get(collective, {})
    if name not in entries:
        raise UnknownAlgorithmError("algorithm", f"one of {', '.join(entries)} for {collective}", repr(name))
    return entries[name]


def segments_parameter(default: int, help: str, *choices: int) -> Parameter:
    """The parameter ``segments``: into how many parts a block or a vector is cut. A schedule has operations for each,
    all of them at once, so that there is a most."""
    return Parameter("segments", default, choices, help, 1, 1 << 16)


def window_parameter(default: int, help: str, *choices: int, minimum: int = 1) -> Parameter:
    """The parameter ``window``: how many messages may be outstanding."""
    return Parameter("window", default, choices, help, minimum)
