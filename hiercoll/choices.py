"""What serves the calls of a communicator: what was asked for, or what "auto" means there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hiercoll.algorithms import REGISTRY, get_algorithm
from hiercoll.errors import ParameterError, UnknownAlgorithmError
from hiercoll.online import Regime, Trial
from hiercoll.tables import NATIVE, NATIVE_FORMS, NATIVE_VARIANT, Table, Variant
from hiercoll.topology import Topology
from hiercoll.transports import AUTO
from hiercoll.tuner import Decision, Spread, decide, uneven_choices
from hiercoll.work import Key

ONLINE = 6  # candidates besides native that online tuning tries


class Choices:
    """The choices of a communicator; the same on all ranks. ``slowest`` gives the largest of the ranks'
    seconds, for each of several, ``total`` adds numbers up; both are collective."""

    def __init__(
        self,
        rank: int,
        topology: Topology,
        library: str,
        disabled: bool,
        slowest: Callable[[Sequence[float]], list[float]],
        total: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self._rank, self._topology, self._library, self._disabled = rank, topology, library, disabled
        self._slowest, self._total = slowest, total
        self.table = Table()
        self.online = False  # whether "auto" tries candidates in the program's own calls
        self._trials: dict[Key, Trial] = {}
        # Collective and bytes received of drop-in calls that are native, and that nobody watches.
        self.native_sizes: set[tuple[str, int]] = set()
        self.forget()

    def forget(self) -> None:
        """Let "auto" decide anew for every size."""
        self._trials.clear()
        self.native_sizes.clear()
        self.regime = Regime(self.uneven, self._slowest, self._total)

    def select(
        self,
        collective: str,
        algorithm: str,
        params: dict[str, Any],
        block: int,
        inplace: bool,
        kind: str = "host",
        held: bool = False,
    ) -> Variant:
        """The algorithm to run with all its parameters, in a call or a plan (``held``); equal on all ranks by
        construction.

        Raises UnknownAlgorithmError or ParameterError.
        """
        if not isinstance(algorithm, str):
            raise UnknownAlgorithmError("algorithm", "a name", repr(algorithm), self._rank)
        if algorithm == "auto" and params:
            name, value = next(iter(params.items()))
            raise ParameterError(f"parameter {name!r}", "none with algorithm='auto'", repr(value), self._rank)
        if algorithm == NATIVE:
            self._check_form(params, held)
        if self._disabled:
            return Variant(NATIVE)
        transport = AUTO
        if algorithm == "auto":
            trial = self._trials.get((collective, block, inplace, kind))
            tried = trial and (trial.winner if held else trial.current)  # a plan tries nothing
            chosen = tried or self.decide(collective, block, inplace, kind, held).variant
            algorithm, params, transport = chosen.algorithm, dict(chosen.params), chosen.transport
        if algorithm == NATIVE:
            return Variant(NATIVE, params, transport)
        if algorithm not in REGISTRY[collective]:
            expected = f"auto, native, {', '.join(REGISTRY[collective])}"
            raise UnknownAlgorithmError("algorithm", expected, repr(algorithm), self._rank)
        try:
            return Variant(algorithm, get_algorithm(collective, algorithm).resolve(params), transport)
        except ParameterError as error:
            raise ParameterError(error.argument, error.expected, error.got, self._rank) from None

    def _check_form(self, params: dict[str, Any], held: bool) -> None:
        """The one parameter of native. Raises ParameterError."""
        forms = NATIVE_FORMS if held else NATIVE_FORMS[:1]
        for name, value in params.items():
            if name != "form" or value not in forms:
                expected = (
                    f"form={' or '.join(forms)} at most with algorithm='native' in a {'plan' if held else 'call'}"
                )
                raise ParameterError(f"parameter {name!r}", expected, repr(value), self._rank)

    def select_uneven(
        self, work_of: str, algorithm: str, params: dict[str, Any], block: int, inplace: bool, held: bool = False
    ) -> Variant:
        """As `select`, for "alltoallv" and "allgatherv"; ``block``: their mean size if all ranks know it."""
        if work_of == "allgatherv":
            chosen = self.select("allgather", algorithm, params, block, inplace, held=held)
            return (
                NATIVE_VARIANT if algorithm == "auto" and chosen.algorithm == NATIVE else chosen
            )  # of which forms differ
        if algorithm == "auto" and not params and not self._disabled:
            return self.regime.current
        return self.select(work_of, algorithm, params, block, inplace, held=held)

    def uneven(self, spread: Spread) -> tuple[Variant, ...]:
        """What to try for an alltoallv: native, and what else may be faster."""
        return uneven_choices("alltoallv", self._topology, spread, self.table, self._library)

    def uneven_for_good(self, spread: Spread) -> Variant:
        """What to take for an alltoallv where nothing can be tried."""
        return uneven_choices("alltoallv", self._topology, spread, self.table, self._library, held=True)[-1]

    def decide(self, collective: str, block: int, inplace: bool, kind: str = "host", held: bool = False) -> Decision:
        """What "auto" means for blocks of ``block`` bytes."""
        return decide(
            collective,
            self._topology,
            block,
            inplace=inplace,
            table=self.table,
            mpi=self._library,
            memory=kind,
            held=held,
        )

    def trial(self, collective: str, block: int, inplace: bool, kind: str = "host") -> Trial | None:
        """The trial for calls like this one by "auto", if these are tried online and it goes on."""
        if not self.online or not block or self._disabled:
            return None
        key = (collective, block, inplace, kind)
        if key not in self._trials:
            ranking = self.decide(collective, block, inplace, kind).ranking
            resolve = REGISTRY[collective]
            able = [c for c in ranking if c.algorithm != NATIVE][:ONLINE]
            full = [Variant(c.algorithm, resolve[c.algorithm].resolve(c.params), c.transport) for c in able]
            self._trials[key] = Trial([Variant(NATIVE), *full], self._slowest)
        return self._trials[key] if self._trials[key].winner is None else None
