"""The first calls on a communicator, before hiercoll is set up on it.

A set-up (a duplicate, what ranks have in common, the topology) takes far longer than a short call, and many
communicators do not live long. So as long as "auto" is the MPI library's own anyway, since there is no table and
nothing is known from earlier jobs, blocking calls are left to it, and counted. Ranks set hiercoll up when the share
that learning may cost of the time of these calls pays for that, or when a call asks for anything else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from time import monotonic

import numpy as np
from mpi4py import MPI

from hiercoll import settings
from hiercoll.learned import known_ranks
from hiercoll.runtime import compiled
from hiercoll.runtime.agreement import Agreement
from hiercoll.runtime.memories import Memories
from hiercoll.runtime.native import mpi_library
from hiercoll.topology import Topology
from hiercoll.tuning.learning import FIRST, SHARE
from hiercoll.tuning.policy import Policy

FOR_GOOD = 1 << 62  # calls, where hiercoll is never set up
LONGEST = 1 << 16  # calls between two looks at their time
LOOK = 1.0  # seconds after which files are looked for again
MEMORIES = Memories(lambda: MPI.COMM_SELF, Agreement(0, np.copy, np.copy, lambda what: None), 0, 1)


class Beginning:
    """A communicator on which hiercoll is not set up; so far as `make_request` asks, it is like a session."""

    stages, check, library, unwatched = False, False, "", True
    memories = MEMORIES

    def __init__(self, comm: MPI.Intracomm, calls: int) -> None:
        self.user = self.comm = MPI.Intracomm(comm)  # mpi4py's own
        self.rank, self.size = comm.rank, comm.size
        self.tally = array("q", [calls, 0])  # calls that are left, and nanoseconds that they took
        self._calls, self.seconds = calls, 0.0
        self.set_up = 0.0  # seconds that this is about to take
        self.routes = compiled.make_routes(_cannot_fail, self.rank, self.size)
        self.routes.open(True)

    @cached_property
    def topology(self) -> Topology:
        """Not known yet: as if there were one node."""
        return Topology((0,) * self.size)

    @cached_property
    def policy(self) -> Policy:
        """Native for everything."""
        return Policy(self.rank, self.topology, "", True, list, list)

    def count(self, seconds: float) -> None:
        """A call has taken so long."""
        self.tally[0] -= 1
        self.tally[1] += int(seconds * 1e9)

    def goes_on(self, set_up: float) -> bool:
        """Whether it is too early for a set-up, which takes about so many ``seconds`` by what this rank knows.
        Collective."""
        least, self.set_up = _largest(self.comm, [-self.tally[1] * 1e-9, set_up])
        self.seconds -= least
        if SHARE * self.seconds >= self.set_up:
            return False
        self._calls = min(2 * self._calls, LONGEST)
        self.tally = array("q", [self._calls, 0])
        return True


def begin(comm: MPI.Intracomm) -> Beginning | None:
    """A communicator that hiercoll has not met; None where it is to be set up at once. Collective."""
    if comm.size == 1 and not settings.is_special():
        return Beginning(comm, FOR_GOOD)
    mine = settings.is_special() or (comm.rank == 0 and _is_anything_known(comm.size))
    is_special, is_still = _largest(comm, [mine, not settings.learns()])
    return None if is_special else Beginning(comm, FOR_GOOD if is_still else FIRST)


_known: tuple[float, bool, frozenset[int]] = (-LOOK, False, frozenset())  # when that was looked up, and what there was


def _is_anything_known(size: int) -> bool:
    """Whether this user has a table, or earlier jobs have learned something on so many ranks."""
    global _known
    now = monotonic()
    if now > _known[0] + LOOK:
        _known = (now, settings.own_table().exists(), known_ranks(mpi_library()))
    return _known[1] or size in _known[2]


def _cannot_fail(*_: object) -> None:
    """No programs are run here."""


def _largest(comm: MPI.Intracomm, values: Sequence[float]) -> list[float]:
    mine = np.array(values, float)
    most = np.empty_like(mine)
    MPI.Comm.Allreduce(comm, mine, most, op=MPI.MAX)
    found: list[float] = most.tolist()
    return found
