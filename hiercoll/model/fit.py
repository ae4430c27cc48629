"""The parameters of a machine, fitted to measured times (needs SciPy: ``pip install 'hiercoll[model]'``).

Least squares on the logarithms of parameters and of times, with a soft-L1 loss, since some jobs stall; weak priors
keep parameters near their defaults that the data do not determine, and these are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hiercoll.errors import MachineError
from hiercoll.model import benchmarks
from hiercoll.model.evaluate import Design, Floats
from hiercoll.model.machine import Machine
from hiercoll.model.measurements import Measurement
from hiercoll.model.profile import Profile

USUAL = 0.15  # by how much logarithms of times differ without anything being wrong
LOOSE = ("eager", "network_eager", "cache_socket", "root_large", "root_factor")  # held nearer: switches
TIGHT = ("adapter",)  # held nearest: name-plates are right
UNDETERMINED = 0.5  # of a prior's spread: what is wider than that the data do not say
Profiles: TypeAlias = "Callable[[Machine, Measurement], list[Profile]]"  # parts of a row, whose times add up


class Fitted(NamedTuple):
    """``errors``: model / measured - 1, by row; ``undetermined``: parameters that the data do not say."""

    machine: Machine
    errors: Floats
    undetermined: tuple[str, ...]


class Rows:
    """Measured times beside what the model says of them."""

    def __init__(self, machine: Machine, rows: Sequence[Measurement], profiles: Profiles = benchmarks.of_row) -> None:
        self.rows, self.machine = list(rows), machine
        self.measured = np.array([row.seconds for row in rows])
        parts: list[tuple[Profile, float]] = []
        owner: list[int] = []
        for index, row in enumerate(rows):
            for each in profiles(machine, row):
                parts.append((each, row.size))
                owner.append(index)
        self._design, self._owner = Design(parts, machine), np.array(owner, int)

    def seconds(self, machine: Machine) -> Floats:
        """What the model says."""
        parts = self._design.evaluate(machine).seconds
        return np.bincount(self._owner, parts, len(self.rows)).astype(np.float64)

    def errors(self, machine: Machine) -> Floats:
        """Model / measured - 1."""
        errors: Floats = self.seconds(machine) / self.measured - 1
        return errors


def fit(
    machine: Machine,
    rows: Sequence[Measurement],
    fixed: Mapping[str, float | str],
    profiles: Profiles = benchmarks.of_row,
) -> Fitted:
    """The machine with its parameters fitted to ``rows``, but for those that are ``fixed``: at a value, or to be as
    another one. ``profiles`` knows what each row ran. Raises MachineError for too few rows, ImportError
    without SciPy."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    free = [name for name, value in asdict(machine.parameters).items() if name not in fixed and value > 0]
    if len(rows) < 2 * len(free):
        expected = f"at least {2 * len(free)} to fit {len(free)} parameters"
        raise MachineError(machine.name, "rows", expected, str(len(rows)))
    data = Rows(machine, rows, profiles)
    start = np.log([getattr(machine.parameters, name) for name in free])
    spread = np.array([0.3 if name in TIGHT else 0.7 if name in LOOSE else 1.0 for name in free])

    def made(logs: Floats) -> Machine:
        values = dict(zip(free, np.exp(logs).tolist(), strict=True))
        values |= {name: value for name, value in fixed.items() if not isinstance(value, str)}
        values |= {name: values[value] for name, value in fixed.items() if isinstance(value, str)}
        return replace(machine, parameters=replace(machine.parameters, **values))

    def residuals(logs: Floats) -> Floats:
        off = np.log(data.seconds(made(logs)) / data.measured) / USUAL
        off = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([off, (logs - start) / spread])

    found: Any = least_squares(residuals, start, max_nfev=200)
    deviation = np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac)))
    wide = tuple(name for name, d, s in zip(free, deviation, spread, strict=True) if d > UNDETERMINED * s)
    best = made(found.x)
    errors = data.errors(best)
    low, high = np.quantile(1 / (1 + errors), (0.1, 0.9))
    median, most = np.quantile(abs(errors), (0.5, 0.9))
    quality = {"rows": float(len(rows)), "median": _round(median), "p90": _round(most)}
    assumed = tuple(sorted({*machine.assumed, *wide}))
    return Fitted(replace(best, assumed=assumed, spread=(_round(low), _round(high)), fitted=quality), errors, wide)


def without_influence(
    machine: Machine, rows: Sequence[Measurement], profiles: Profiles = benchmarks.of_row
) -> tuple[str, ...]:
    """Parameters that change the time of no row by more than 1 %, were they four times as large or as small."""
    data = Rows(machine, rows, profiles)
    usual, found = data.seconds(machine), []
    for name, value in asdict(machine.parameters).items():
        changed = [replace(machine.parameters, **{name: value * factor}) for factor in (0.25, 4)]
        ratios = [data.seconds(replace(machine, parameters=each)) / usual for each in changed]
        if np.abs(np.log(ratios)).max() < 0.01:
            found.append(name)
    return tuple(found)


def _round(value: Any) -> float:
    return float(f"{value:.3g}")
