"""What serves the calls of a communicator: what was asked for, or what "auto" means there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from hiercoll.algorithms import REGISTRY, get_algorithm
from hiercoll.collectives import COLLECTIVES, Collective, Sizes
from hiercoll.errors import ParameterError, UnknownAlgorithmError
from hiercoll.tables import NATIVE, NATIVE_FORMS, NATIVE_VARIANT, Table, Variant
from hiercoll.topology import Topology
from hiercoll.tuner import Decision, Spread, decide, uneven_choices
from hiercoll.tuning.trials import Trial, UnevenPolicy

ONLINE = 6  # candidates besides native that online tuning tries

Key: TypeAlias = "tuple[str, int, bool, str]"


class Wanted(NamedTuple):
    """What is to be chosen for: ``size`` is the bytes of a block (their mean, 0 where not all ranks know it),
    ``memory`` a kind of memory, ``held`` a plan that a program holds. Equal on all ranks."""

    collective: Collective
    size: int
    in_place: bool
    memory: str = "host"
    held: bool = False

    @property
    def key(self) -> Key:
        """What calls are tried for together."""
        return (self.collective.name, self.size, self.in_place, self.memory)


class Policy:
    """The choices of a communicator; the same on all ranks.

    ``slowest`` gives the largest of the ranks' seconds, for each of several, ``total`` adds numbers up; both are
    collective. ``forced``: algorithm and parameters instead of "auto", by collective.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        library: str,
        disabled: bool,
        slowest: Callable[[Sequence[float]], list[float]],
        total: Callable[[Sequence[int]], Sequence[int]],
        forced: Mapping[str, Variant] | None = None,
    ) -> None:
        self._rank, self._topology, self._library, self._disabled = rank, topology, library, disabled
        self._slowest, self._total = slowest, total
        self.forced = dict(forced or {})
        self.table = Table()
        self.online = False  # whether "auto" tries candidates in the program's own calls
        self._trials: dict[Key, Trial] = {}
        self._uneven: dict[str, UnevenPolicy] = {}
        # Collective and bytes received of drop-in calls that are native, and that nobody watches.
        self.native_sizes: set[tuple[Collective, int]] = set()

    def forget(self) -> None:
        """Let "auto" decide anew for every size."""
        self._trials.clear()
        self._uneven.clear()
        self.native_sizes.clear()

    def is_auto(self, collective: Collective, algorithm: Any) -> bool:
        """Whether the choice is this policy's."""
        is_left = isinstance(algorithm, str) and algorithm == "auto"
        return is_left and not self._disabled and collective.name not in self.forced

    def select(self, wanted: Wanted, algorithm: Any, params: Mapping[str, Any]) -> Variant:
        """The algorithm to run with all its parameters. Raises UnknownAlgorithmError or ParameterError."""
        collective, rank = wanted.collective, self._rank
        if not isinstance(algorithm, str):
            raise UnknownAlgorithmError("algorithm", "a name", repr(algorithm), rank)
        if algorithm == "auto" and params:
            name, value = next(iter(params.items()))
            raise ParameterError(f"parameter {name!r}", "none with algorithm='auto'", repr(value), rank)
        if algorithm == NATIVE:
            self._check_form(params, wanted.held)
        if self._disabled:
            return NATIVE_VARIANT
        if algorithm == "auto":
            forced = self.forced.get(collective.name)
            return forced if forced is not None else self._automatic(wanted)
        if algorithm == NATIVE:
            return Variant(NATIVE, dict(params))
        entries = REGISTRY[collective.family]
        if algorithm not in entries:
            expected = f"auto, native, {', '.join(entries)}"
            raise UnknownAlgorithmError("algorithm", expected, repr(algorithm), rank)
        try:
            return Variant(algorithm, get_algorithm(collective.family, algorithm).resolve(params))
        except ParameterError as error:
            raise ParameterError(error.argument, error.expected, error.got, rank) from None

    def _automatic(self, wanted: Wanted) -> Variant:
        """What "auto" means."""
        if wanted.collective.sizes is Sizes.OWN:
            return NATIVE_VARIANT if wanted.held else self.uneven(wanted.collective).current
        trial = self._trials.get(wanted.key)
        tried = trial and (trial.winner if wanted.held else trial.current)  # a plan tries nothing
        chosen = tried or self.decide(wanted).variant
        if chosen.algorithm == NATIVE:
            # Forms of native are measured for equal blocks.
            return chosen if wanted.collective.is_even else NATIVE_VARIANT
        entry = get_algorithm(wanted.collective.family, chosen.algorithm)
        return Variant(chosen.algorithm, entry.resolve(chosen.params), chosen.transport)

    def _check_form(self, params: Mapping[str, Any], held: bool) -> None:
        """The one parameter of native. Raises ParameterError."""
        forms = NATIVE_FORMS if held else NATIVE_FORMS[:1]
        for name, value in params.items():
            if name != "form" or value not in forms:
                what = "plan" if held else "call"
                expected = f"form={' or '.join(forms)} at most with algorithm='native' in a {what}"
                raise ParameterError(f"parameter {name!r}", expected, repr(value), self._rank)

    def decide(self, wanted: Wanted) -> Decision:
        """What "auto" means, by the table, and why."""
        return decide(
            wanted.collective.family,
            self._topology,
            wanted.size,
            inplace=wanted.in_place,
            table=self.table,
            mpi=self._library,
            memory=wanted.memory,
            held=wanted.held,
        )

    def trial(self, wanted: Wanted) -> Trial | None:
        """The trial for calls like this one by "auto", if these are tried online and it goes on."""
        if not self.online or not wanted.size or not self.is_auto(wanted.collective, "auto"):
            return None
        trial = self._trials.get(wanted.key)
        if trial is None:
            entries = REGISTRY[wanted.collective.family]
            able = [each.variant for each in self.decide(wanted).ranking if each.variant.algorithm != NATIVE][:ONLINE]
            full = [Variant(v.algorithm, entries[v.algorithm].resolve(v.params), v.transport) for v in able]
            trial = self._trials[wanted.key] = Trial([NATIVE_VARIANT, *full], self._slowest)
        return trial if trial.winner is None else None

    def uneven(self, collective: Collective) -> UnevenPolicy:
        """What serves the calls of a collective of which no rank knows all sizes."""
        found = self._uneven.get(collective.name)
        if found is None:
            name = collective.name

            def candidates(spread: Spread) -> tuple[Variant, ...]:
                return uneven_choices(name, self._topology, spread, self.table, self._library)

            found = self._uneven[name] = UnevenPolicy(candidates, self._slowest, self._total)
        return found

    def uneven_for_good(self, collective: Collective, whole: Spread) -> Variant:
        """What to take for a plan, where nothing can be tried, by the blocks of all ranks."""
        return uneven_choices(collective.name, self._topology, whole, self.table, self._library, held=True)[-1]


def forced_variants(given: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Variant]:
    """Algorithms with all their parameters, by collective. Raises UnknownAlgorithmError or ParameterError."""
    return {
        name: Variant(algorithm, get_algorithm(COLLECTIVES[name].family, algorithm).resolve(params))
        if algorithm != NATIVE
        else NATIVE_VARIANT
        for name, (algorithm, params) in given.items()
    }
