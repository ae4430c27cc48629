"""What a program gives a call, before anything of it is looked at."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from mpi4py import MPI

from hiercoll.collectives import AUTO, Collective

LIMIT = 4096  # bytes: blocks of uneven sizes below it travel together
NO_PARAMS: dict[str, Any] = {}


class Mode(Enum):
    """Who starts what serves a call: the call itself, whoever looks after what is under way, the program, or mpi4py, to
    which messages of objects are left."""

    BLOCKING = ""
    BACKGROUND = "i"
    HELD = "persistent "
    OBJECTS = "objects "


class Arguments(NamedTuple):
    """What a program gives. ``recv`` is the one buffer of collectives that have one; ``limit`` is in bytes; ``op`` and
    ``order`` are of reductions."""

    send: Any
    recv: Any
    root: Any = 0
    algorithm: Any = "auto"
    params: dict[str, Any] = NO_PARAMS
    transport: Any = AUTO
    stream: Any = None
    limit: Any = LIMIT
    op: Any = MPI.SUM
    order: Any = None
    recvcounts: Any = None  # in elements, of reductions to blocks of any sizes
    accumulate: Any = None  # the type that elements of half precision are combined in

    @property
    def named(self) -> dict[str, Any]:
        """What the program gives by names that tell calls apart, besides those that all calls have."""
        return self.params if self.accumulate is None else {**self.params, "accumulate": self.accumulate}


def spelled(collective: Collective, algorithm: Any, params: dict[str, Any]) -> str:
    """Collective and algorithm in words."""
    return " ".join([collective.name, str(algorithm), *(f"{name}={value}" for name, value in params.items())])


def buffer_of(spec: Any) -> Any:
    """What a specification is of, without the counts or datatypes that it may come with."""
    return spec[0] if type(spec) in (list, tuple) and spec else spec
