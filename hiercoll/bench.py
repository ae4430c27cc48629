"""Benchmarks under mpiexec or srun, in the manner of osu_alltoall and osu_allgather.

All algorithms of a size are measured interleaved in one run with the MPI library's own
collective. Every plan's data are checked with unique tokens before it is timed. A
figure is the median over iterations of the slowest rank's time, with quartiles.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import mpi4py
import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY, Params, get_algorithm
from hiercoll.api import Plan, allgather_init, alltoall_init
from hiercoll.communicator import Work
from hiercoll.errors import ConstraintError, HiercollError
from hiercoll.lifetime import get_state
from hiercoll.simulate import Event
from hiercoll.topology import Topology
from hiercoll.tuner import CANDIDATES, NATIVE

Bytes = npt.NDArray[np.uint8]
POISON = 0xA5


class DataError(HiercollError):
    """An algorithm delivered wrong data."""


@dataclass(frozen=True)
class Subject:
    """An algorithm with the parameters that differ from its defaults."""

    algorithm: str
    params: Params

    def __str__(self) -> str:
        return " ".join([self.algorithm, *(f"{name}={value}" for name, value in self.params.items())])


@dataclass(frozen=True)
class Result:
    """One line of a benchmark; times in seconds, sizes in bytes."""

    collective: str
    subject: Subject
    size: int
    median: float
    q1: float
    q3: float
    iterations: int


def tokens(source: int, target: int, size: int) -> Bytes:
    """``size`` bytes that no other (source, target) pair has from 8 bytes on; as different as
    so few bytes can be below."""
    words = np.arange(-(-size // 8), dtype=np.uint64)
    words += np.uint64((source << 44) + (target << 24))
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # one to one, and every bit changes every byte
        words ^= words >> np.uint64(31)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words.view(np.uint8)[:size]


def buffers(collective: str, size: int, rank: int, ranks: int) -> tuple[Bytes, Bytes]:
    """A send buffer filled with tokens, and the receive buffer that is expected."""
    peers = range(ranks)
    if collective == "alltoall":
        send = np.concatenate([tokens(rank, peer, size) for peer in peers])
        return send, np.concatenate([tokens(peer, rank, size) for peer in peers])
    return tokens(rank, 0, size).copy(), np.concatenate([tokens(peer, 0, size) for peer in peers])


def default_subjects(collective: str) -> list[Subject]:
    """native, auto, every algorithm with its defaults, and what "auto" chooses from."""
    subjects = [Subject(NATIVE, {}), Subject("auto", {}), *(Subject(name, {}) for name in REGISTRY[collective])]
    for name, params in CANDIDATES[collective]:
        spelled = {k: v for k, v in params.items() if get_algorithm(collective, name).resolve({})[k] != v}
        if Subject(name, spelled) not in subjects:
            subjects.append(Subject(name, spelled))
    return subjects


class Bench:
    """A series of measurements on a communicator. All methods are collective."""

    def __init__(self, comm: MPI.Intracomm, *, seconds: float = 0.3, iterations: int | None = None) -> None:
        self.comm = comm
        self.seconds, self.iterations = seconds, iterations
        state = get_state(comm)
        if state.disabled:
            raise HiercollError("HIERCOLL_DISABLE is set: every algorithm would be the MPI library's own")
        self.topology: Topology = state.topology

    def run(
        self,
        collective: str,
        subjects: Sequence[Subject],
        sizes: Sequence[int],
        advance: Callable[[], None] = lambda: None,
    ) -> Iterator[Result]:
        """Results of all subjects, size by size; ``advance`` is called after each subject.

        Subjects whose constraints do not hold here are left out. Raises DataError.
        """
        for size in sizes:
            send, expected = buffers(collective, size, self.comm.rank, self.comm.size)
            recv = np.empty_like(expected)
            plans: dict[str, tuple[Subject, Plan]] = {}
            for subject in subjects:
                plan = self._plan(collective, subject, send, recv)
                if plan is not None:
                    self._check(collective, subject, plan, recv, expected)
                    plans[str(subject)] = (subject, plan)
                advance()
            times = self._time([plan for _, plan in plans.values()])
            for (subject, plan), samples in zip(plans.values(), times, strict=True):
                plan.free()
                q1, median, q3 = np.quantile(samples, [0.25, 0.5, 0.75])
                yield Result(collective, subject, size, float(median), float(q1), float(q3), len(samples))

    def _plan(self, collective: str, subject: Subject, send: Bytes, recv: Bytes) -> Plan | None:
        init = alltoall_init if collective == "alltoall" else allgather_init
        try:
            return init(self.comm, send, recv, algorithm=subject.algorithm, **subject.params)
        except ConstraintError:
            return None

    def _check(self, collective: str, subject: Subject, plan: Plan, recv: Bytes, expected: Bytes) -> None:
        """Two starts, the receive buffer poisoned before each. Raises DataError on every rank."""
        wrong = 0
        for _ in range(2):
            recv[:] = POISON
            plan()
            wrong += int(np.count_nonzero(recv != expected))
        total = self.comm.allreduce(wrong)
        if total:
            size = expected.size // self.comm.size
            raise DataError(f"{collective} {subject} with blocks of {size} bytes: {total} wrong bytes on all ranks")

    def _time(self, plans: list[Plan]) -> list[list[float]]:
        """Seconds of each iteration of each plan, the slowest rank's, the plans taking turns."""
        comm, samples = self.comm, [[] for _ in plans]  # type: tuple[MPI.Intracomm, list[list[float]]]
        rounds = self.iterations or self._affordable(plans)
        for turn in range(rounds):
            for shift in range(len(plans)):
                index = (turn + shift) % len(plans)
                comm.Barrier()
                begin = perf_counter()
                plans[index]()
                samples[index].append(perf_counter() - begin)
        slowest = np.empty((len(plans), rounds))
        comm.Allreduce(np.array(samples), slowest, op=MPI.MAX)
        return [list(row) for row in slowest]

    def _affordable(self, plans: list[Plan]) -> int:
        """Iterations of every plan that fit in ``seconds`` per plan, between 5 and 200."""
        self.comm.Barrier()
        begin = perf_counter()
        for plan in plans:
            plan()
        once = (perf_counter() - begin) / len(plans)
        return int(self.comm.bcast(min(200, max(5, int(self.seconds / max(once, 1e-6))))))


def provenance(comm: MPI.Intracomm, topology: Topology) -> dict[str, Any]:
    """What a figure means nothing without. Collective."""
    hosts = comm.allgather(platform.node())
    vendor, version = MPI.get_vendor()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hiercoll": hiercoll.__version__,
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "mpi4py": mpi4py.__version__,
        "python": platform.python_version(),
        "ranks": comm.size,
        "hosts": len(set(hosts)),
        "layout": str(topology),
        "virtual_nodes": len(topology.nodes) != len(set(hosts)),
        "memory": "host",
        "processor": platform.machine(),
    }


def record(result: Result, about: dict[str, Any]) -> dict[str, Any]:
    """A line for a JSON Lines file; times in seconds."""
    return {**asdict(result), **about}


def measured_events(
    comm: MPI.Intracomm, collective: str, algorithm: str, params: Params, size: int
) -> list[Event] | None:
    """The events of one traced run on ``comm``, on rank 0; None on the others. Collective.

    Times count from the first event of any rank where all ranks share a host's clock,
    else from each rank's leaving of a barrier.
    """
    state = get_state(comm)
    send, expected = buffers(collective, size, comm.rank, comm.size)
    recv = np.empty_like(expected)
    work = Work(collective, algorithm, get_algorithm(collective, algorithm).resolve(params), size, False)
    plan = state.own_plan(work, send.ctypes.data, recv.ctypes.data, traced=True)
    plan()
    comm.Barrier()
    origin = perf_counter()
    log = plan.trace()
    plan.free()
    same_clock = len(set(comm.allgather(platform.node()))) == 1
    if same_clock:
        origin = comm.allreduce(min((entry.begin for entry in log), default=origin), op=MPI.MIN)
    events = [Event(comm.rank, entry.op, entry.begin - origin, entry.end - origin) for entry in log]
    gathered = comm.gather(events)
    return None if gathered is None else [event for events in gathered for event in events]
