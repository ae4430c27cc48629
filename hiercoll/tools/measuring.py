"""Times of collectives, taken as programs meet them.

A `Contest` measures several variants of a collective on the same data in one run, taking turns in an order
that changes from turn to turn. ``native`` is the user's blocking call on the user's communicator, through mpi4py;
everything else is a public call of hiercoll, or a plan of it where that is stated. The data of each are checked with
unique tokens before it is timed. A figure is the slowest rank's, call by call.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll import cuda
from hiercoll.calls.dropin import Collectives
from hiercoll.calls.functions import Plan
from hiercoll.collectives import AUTO, NATIVE, Sizes, get_collective
from hiercoll.errors import ConstraintError, DeviceError, HiercollError, NativeWarning
from hiercoll.runtime.lifetime import get_session
from hiercoll.tables import COLD, ROW, SINGLE, Variant
from hiercoll.tools.cores import Cores
from hiercoll.tools.workload import POISON, Bytes, Workload

Call: TypeAlias = "Callable[[], object]"
Entry: TypeAlias = "tuple[int, str]"  # number of a variant, and the timing
CONTROL = "control"  # native once more, under another name, to show what noise looks like
MOST = {SINGLE: 10, ROW: 50, COLD: 3}  # calls in a sample, the same number for all that are compared
LEAST = {SINGLE: 1, ROW: 2, COLD: 1}
SAMPLE = 0.03  # seconds of a sample, so long as that is not more calls
LONG = 0.1  # seconds from which on a call counts as long
SETTLED, SETTLING = 32, 3.0  # calls at a time, and seconds about, in which "auto" settles
CACHES = 16 << 20  # bytes that are written between cold calls


class DataError(HiercollError):
    """An algorithm delivered wrong data."""


class Arrays(Protocol):
    """Arrays in the memory that is measured."""

    kind: str

    def put(self, values: Bytes) -> Any:
        """A new array with these values."""

    def fill(self, array: Any, values: Bytes) -> None:
        """Overwrite every byte with these."""

    def get(self, array: Any) -> Any:
        """The values, on the host, as bytes in a NumPy array."""


class HostArrays:
    """NumPy's."""

    kind = "host"

    def put(self, values: Bytes) -> Any:
        """See `Arrays`."""
        return values.copy()

    def fill(self, array: Any, values: Bytes) -> None:
        """See `Arrays`."""
        array[:] = values

    def get(self, array: Any) -> Any:
        """See `Arrays`."""
        return array


def arrays_of(comm: MPI.Intracomm, memory: str) -> Arrays:
    """Arrays of a kind of memory: "host", or "cuda", for which each rank is bound to a device
    of its host. Collective. Raises DeviceError on all ranks if one of them has no CuPy, or no device."""
    if memory == "host":
        return HostArrays()
    problem = None
    try:
        cuda.bind(comm)
    except DeviceError as error:
        problem = error
    problems = [each for each in comm.allgather(problem) if each is not None]
    if problems:
        raise problems[0]
    made: Arrays = cuda.arrays()
    return made


class OtherWork:
    """What a program does between its calls: other data in the caches, other code."""

    def __init__(self) -> None:
        self._data = np.zeros(CACHES // 8)
        self._names = {f"name {number}": [number, str(number)] for number in range(200)}
        self._matrix = np.eye(48) + 0.1

    def __call__(self) -> None:
        self._data += 1.0
        text = json.dumps(json.loads(json.dumps(self._names)), sort_keys=True)
        zlib.compress(re.sub(r"name (\d+)", r"\1", text).encode())
        np.linalg.solve(self._matrix, self._matrix[0])


def take(comm: MPI.Intracomm, call: Call, way: str, calls: int, other: Call) -> list[float]:
    """This rank's seconds of each of some ``calls`` (one after a barrier, with ``other`` work before it if ``way`` is
    "cold"), or of one in the mean of a row of them. Collective."""
    if way == ROW:
        comm.Barrier()
        begin = perf_counter()
        for _ in range(calls):
            call()
        return [(perf_counter() - begin) / calls]
    times = []
    for _ in range(calls):
        if way == COLD:
            other()
        comm.Barrier()
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return times


@dataclass
class _Subject:
    """One way to run a variant, and the seconds that a call of it takes, about."""

    call: Call
    plan: Plan | None = None
    once: float = inf


class Contest:
    """Several variants on the same data, taking turns. All methods are collective.

    ``variants`` may name "auto" and, besides ``native``, the "control", which is the same call.
    Each is made, and its data checked, when it is first needed. All work on the arrays ``send`` and ``recv``, which
    are the same where the collective has only one buffer.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        collective: str,
        variants: Sequence[Variant],
        size: int,
        *,
        sample: float = SAMPLE,
        arrays: Arrays | None = None,
    ) -> None:
        self.comm, self.collective, self.variants, self.size = comm, collective, variants, size
        self._plain = comm.plain if isinstance(comm, Collectives) else comm
        self._session = get_session(comm)
        self._sample = sample
        self._order = Random(size)  # the same on all ranks; a fixed order would let each disturb the same next one
        self._arrays = arrays or HostArrays()
        self._record = get_collective(collective)
        work = Workload(self._record, size, comm.size)
        self._expected, before = work.due(comm.rank), work.before(comm.rank)
        self._unserved = before if self._record.one_buffer else np.full_like(self._expected, POISON)
        self.recv = self._arrays.put(self._unserved)
        self.send = self.recv if self._record.one_buffer else self._arrays.put(before)
        self._arguments, self._options = work.arguments(comm.rank, self.send, self.recv)
        self._subjects: dict[tuple[int, bool], _Subject | None] = {}
        self._other, self._other_seconds = OtherWork(), 0.0
        self._cores = Cores(self._plain)
        if self._record.sizes is Sizes.OWN:
            self._session.forget_choices()  # those made for blocks of other sizes

    def able(self, index: int, timing: str = SINGLE) -> bool:
        """Whether that variant can run so here. Raises DataError if it delivers wrong data."""
        return self._subject(index, timing) is not None

    def look(self, index: int, timing: str = SINGLE) -> float:
        """Seconds of one run, about; infinite if the variant cannot run here. Raises DataError."""
        subject = self._subject(index, timing)
        return subject.once if subject else inf

    def call(self, index: int) -> Call:
        """What runs that variant once, as a public call. Raises ConstraintError where it cannot run here."""
        subject = self._subject(index, SINGLE)
        if subject is None:
            name = self.variants[index].spelled(self.collective)
            raise ConstraintError(name, "what can run here", str(self._session.topology), self.comm.rank)
        return subject.call

    def cost(self, index: int, timing: str) -> float:
        """Seconds that a sample takes, about."""
        if not self.able(index, timing):
            return 0.0
        if timing.endswith(COLD) and not self._other_seconds:
            begin = perf_counter()
            self._other()
            self._other_seconds = self.comm.allreduce(perf_counter() - begin, op=MPI.MAX)
        return (self.look(index, timing) + timing.endswith(COLD) * self._other_seconds) * self.calls(timing)

    def times(self, which: Sequence[Entry], turns: int) -> list[list[float]]:
        """Seconds of these variants, timed so, ``turns`` samples of each; infinite where one cannot run. Each turn has
        ranks on other cores (`Cores`).

        A sample is the median of some single calls, or the mean of a row of them; of each call, or row, the
        slowest rank's time counts.
        """
        able = [(place, *entry) for place, entry in enumerate(which) if self.able(*entry)]
        taken: dict[int, list[list[float]]] = {place: [] for place, *_ in able}
        for _ in range(turns):
            self._cores.shuffle()
            for place, index, timing in self._order.sample(able, len(able)):
                taken[place].append(self._take(index, timing))
        own = np.array([time for rows in taken.values() for row in rows for time in row])
        slowest = np.empty_like(own)
        self.comm.Allreduce(own, slowest, op=MPI.MAX)
        result, at = [[inf] * turns for _ in which], 0
        for place, rows in taken.items():
            for turn, row in enumerate(rows):
                result[place][turn] = float(np.median(slowest[at : at + len(row)]))
                at += len(row)
        return result

    def close(self) -> None:
        """Free the plans, those that public calls have left too, with their windows."""
        for subject in self._subjects.values():
            if subject and subject.plan:
                subject.plan.free()
        self._session.forget_plans()

    def calls(self, timing: str) -> int:
        """How many make a sample: as many for all variants, since the first ones after something else take
        longer; by the pace of the first variant."""
        way = timing.removeprefix("plan-")
        return max(LEAST[way], min(MOST[way], round(self._sample / max(self.look(0), 1e-6))))

    def _take(self, index: int, timing: str) -> list[float]:
        """This rank's seconds of each of some calls, or of one in the mean of a row."""
        subject = self._subject(index, timing)
        assert subject is not None
        return take(self.comm, subject.call, timing.removeprefix("plan-"), self.calls(timing), self._other)

    def _subject(self, index: int, timing: str) -> _Subject | None:
        key = (index, timing.startswith("plan"))
        if key not in self._subjects:
            self._subjects[key] = None
            with suppress(ConstraintError):
                self._subjects[key] = self._checked(self.variants[index], held=key[1])
        return self._subjects[key]

    def _checked(self, variant: Variant, *, held: bool) -> _Subject | None:
        """How it is run, with its data checked; None for what cannot. Raises DataError and ConstraintError."""
        subject = self._make(variant, held=held)
        if subject is None:
            return None
        try:
            self._check(subject, variant)
        except DataError as error:
            if variant.algorithm != NATIVE or not (variant.params or held):
                raise
            # A form of the MPI library's own that it does not get right. On all ranks alike.
            warnings.warn(NativeWarning(f"{error}; {self._session.library} delivers them in that form"), stacklevel=2)
            if subject.plan is not None:
                subject.plan.free()
            return None
        return subject

    def _make(self, variant: Variant, *, held: bool) -> _Subject | None:
        """How it is run; None for what exists for plans only. On devices, whose memory a library may not take, native
        is hiercoll's call of it. Raises ConstraintError."""
        algorithm = NATIVE if variant.algorithm == CONTROL else variant.algorithm
        if algorithm == NATIVE and not (variant.params or held) and self._arrays.kind == "host":
            return _Subject(partial(getattr(self._plain, self._record.native), *self._arguments, **self._options))
        given = {**self._options, "algorithm": algorithm, **variant.params}
        if variant.transport != AUTO:
            given["transport"] = variant.transport
        if held:
            plan = getattr(hiercoll, f"{self._record.name}_init")(self.comm, *self._arguments, **given)
            return _Subject(plan, plan)
        if algorithm == NATIVE and variant.params.get("form") == "persistent":
            return None
        return _Subject(partial(getattr(hiercoll, self._record.name), self.comm, *self._arguments, **given))

    def _check(self, subject: _Subject, variant: Variant) -> None:
        """Run it three times with its data checked (if it takes long, once; a plan twice): the last for how long one
        takes in a row. Raises DataError."""
        if variant.algorithm == "auto" and subject.plan is None and self._session.policy.share:
            self._settle(subject.call)
        for number, count in enumerate((1, 1, 4)):
            self._arrays.fill(self.recv, self._unserved)
            self.comm.Barrier()
            begin = perf_counter()
            for _ in range(count):
                subject.call()
            seconds = (perf_counter() - begin) / count
            received = self._arrays.get(self.recv)[: self._expected.size]
            mine = np.array([seconds, np.count_nonzero(received != self._expected)])
            most = np.empty_like(mine)
            self.comm.Allreduce(mine, most, op=MPI.MAX)
            if most[1]:
                what = f"{self.collective} {variant.spelled(self.collective)} with blocks of {self.size} bytes"
                raise DataError(f"{what}: up to {most[1]:.0f} wrong bytes on a rank")
            subject.once = float(most[0])
            if subject.once > LONG and (number or subject.plan is None):
                break

    def _settle(self, call: Call) -> None:
        """Let "auto" learn what there is to learn from such calls, for some seconds at most."""
        policy, seconds = self._session.policy, 0.0
        policy.hurry()
        while not seconds or (not policy.is_settled and seconds < SETTLING):
            begin = perf_counter()
            for _ in range(SETTLED):
                call()
            seconds += self.comm.allreduce(perf_counter() - begin, op=MPI.MAX)
