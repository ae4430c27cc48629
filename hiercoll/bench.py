"""Benchmarks under mpiexec or srun, in the manner of osu_alltoall and osu_allgather.

All algorithms of a size are measured interleaved in one run with the MPI library's own
collective. Every plan's data are checked with unique tokens before it is timed. A
figure is the median over samples of the slowest rank's time, with quartiles.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import inf
from random import Random
from time import perf_counter
from typing import Any, Protocol

import mpi4py
import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import hiercoll
from hiercoll import cuda
from hiercoll.algorithms import REGISTRY, Params, get_algorithm
from hiercoll.api import Plan, allgather_init, alltoall_init, place_of
from hiercoll.communicator import mpi_library
from hiercoll.cost import Link, Links
from hiercoll.errors import ConstraintError, HiercollError
from hiercoll.lifetime import get_state
from hiercoll.simulate import Event
from hiercoll.tables import NATIVE, Variant
from hiercoll.topology import Topology
from hiercoll.transports import AUTO
from hiercoll.tuner import CANDIDATES
from hiercoll.tuning import interval
from hiercoll.vectors import alltoallv_init, spread_of
from hiercoll.work import Work

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
POISON = 0xA5
CONTROL = "control"  # native once more, under another name, to show what noise looks like
SAMPLE = 0.06  # seconds of a sample, at least, so long as that is at most 50 runs
FEWEST = 5  # samples
LONG = 0.1  # seconds from which on a run counts as long
PROBE = 1 << 16  # bytes of a message that shows a link's rate
PAYLOAD, FRAME = 1448, 1514  # bytes of data in a full Ethernet frame of TCP/IP, and of the frame


class DataError(HiercollError):
    """An algorithm delivered wrong data."""


@dataclass(frozen=True)
class Subject:
    """An algorithm with the parameters that differ from its defaults, and a transport for device arrays."""

    algorithm: str
    params: Params
    transport: str = AUTO

    @classmethod
    def of(cls, collective: str, variant: Variant) -> Subject:
        """For an algorithm with some or all of its parameters, or native."""
        entry = REGISTRY[collective].get(variant.algorithm)
        return cls(variant.algorithm, entry.changed(variant.params) if entry else {}, variant.transport)

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in self.params.items()]
        return " ".join([self.algorithm, *given, *([] if self.transport == AUTO else [self.transport])])


@dataclass(frozen=True)
class Result:
    """One line of a benchmark; times in seconds, sizes in bytes.

    ``gain`` is native's time over this one's, the median over turns, with its 95 % interval;
    ``bound`` the time that the links set, if their rate is known; ``chosen`` what "auto" was.
    """

    collective: str
    subject: Subject
    size: int
    median: float
    q1: float
    q3: float
    samples: int
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    bound: float | None = None
    chosen: Variant | None = None

    @classmethod
    def of(
        cls,
        collective: str,
        subject: Subject,
        size: int,
        times: list[float],
        natives: list[float] | None,
        bound: float | None,
        chosen: Variant | None,
    ) -> Result:
        """From samples, and native's of the same turns."""
        q1, median, q3 = map(float, np.quantile(times, [0.25, 0.5, 0.75]))
        gain = low = high = None
        if natives is not None:
            gains = [native / own for native, own in zip(natives, times, strict=True)]
            gain, (low, high) = float(np.median(gains)), interval(gains)
        return cls(collective, subject, size, median, q1, q3, len(times), gain, low, high, bound, chosen)


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


@lru_cache(maxsize=1)  # asked for by every plan of a size
def block_sizes(size: int, ranks: int) -> Counts:
    """Bytes of the blocks of an alltoallv from each rank (row) to each: uniform, with mean ``size``. Read-only."""
    sizes = np.random.default_rng(size).integers(0, 2 * size + 1, (ranks, ranks))
    sizes.flags.writeable = False
    return sizes


def buffers(collective: str, size: int, rank: int, ranks: int) -> tuple[Bytes, Bytes]:
    """A send buffer filled with tokens, and the receive buffer that is expected."""
    peers = range(ranks)
    if collective == "alltoallv":
        sizes = block_sizes(size, ranks)
        send = np.concatenate([tokens(rank, peer, sizes[rank, peer]) for peer in peers])
        return send, np.concatenate([tokens(peer, rank, sizes[peer, rank]) for peer in peers])
    if collective == "alltoall":
        send = np.concatenate([tokens(rank, peer, size) for peer in peers])
        return send, np.concatenate([tokens(peer, rank, size) for peer in peers])
    return tokens(rank, 0, size).copy(), np.concatenate([tokens(peer, 0, size) for peer in peers])


class Arrays(Protocol):
    """Arrays in the memory that is measured."""

    kind: str

    def put(self, values: Bytes) -> Any:
        """A new array with these values."""

    def fill(self, array: Any, value: int) -> None:
        """Overwrite every byte."""

    def get(self, array: Any) -> Any:
        """The values, on the host, as bytes in a NumPy array."""


class HostArrays:
    """NumPy's."""

    kind = "host"

    def put(self, values: Bytes) -> Any:
        """See `Arrays`."""
        return values.copy()

    def fill(self, array: Any, value: int) -> None:
        """See `Arrays`."""
        array[:] = value

    def get(self, array: Any) -> Any:
        """See `Arrays`."""
        return array


def arrays_of(comm: MPI.Intracomm, memory: str) -> Arrays:
    """Arrays of a kind of memory: "host", or "cuda", for which each rank is bound to a device
    of its host. Collective. Raises DeviceError without CuPy, or a device."""
    if memory == "host":
        return HostArrays()
    cuda.bind(comm)
    made: Arrays = cuda.arrays()
    return made


def default_subjects(collective: str) -> list[Subject]:
    """native, auto, every algorithm with its defaults, and what "auto" chooses from."""
    subjects = [Subject(NATIVE, {}), Subject("auto", {}), *(Subject(name, {}) for name in REGISTRY[collective])]
    for name, params in CANDIDATES[collective]:
        subject = Subject.of(collective, Variant(name, params))
        if subject not in subjects:
            subjects.append(subject)
    return subjects


class Contest:
    """Several algorithms on the same data, taking turns. All methods are collective.

    Plans are made when first needed, and their data checked before they are timed. A
    sample is the time of some runs in a row divided by their number: so few runs that
    ranks leave a barrier at different times is small beside it.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        collective: str,
        subjects: Sequence[Subject],
        size: int,
        sample: float = SAMPLE,
        arrays: Arrays | None = None,
    ) -> None:
        self.comm, self.collective, self.subjects, self.size = comm, collective, subjects, size
        self._sample = sample
        self._order = Random(size)  # the same on all ranks; a fixed order would let each disturb the same next one
        self._arrays = arrays or HostArrays()
        values, self._expected = buffers(collective, size, comm.rank, comm.size)
        self._send, self._recv = self._arrays.put(values), self._arrays.put(np.full_like(self._expected, POISON))
        self._plans: dict[int, tuple[Plan, int] | None] = {}  # with the number of runs in a sample
        self.once: dict[int, float] = {}  # seconds of one run, about

    def able(self, index: int) -> bool:
        """Whether that subject can run here. Raises DataError if it delivers wrong data."""
        return self._plan(index) is not None

    def look(self, index: int) -> float:
        """Seconds of one run, about; infinite if the subject cannot run here. Raises DataError."""
        return self.once[index] if self.able(index) else inf

    def times(self, which: Sequence[int], samples: int) -> list[list[float]]:
        """Seconds of the subjects with these numbers, the slowest rank's; infinite if one cannot run.

        They take turns, in another order in each turn.
        """
        ready = [(position, made) for position, index in enumerate(which) if (made := self._plan(index))]
        measured = np.full((len(which), samples), inf)
        for turn in range(samples):
            for position, (plan, runs) in self._order.sample(ready, len(ready)):
                self.comm.Barrier()
                begin = perf_counter()
                for _ in range(runs):
                    plan()
                measured[position, turn] = (perf_counter() - begin) / runs
        slowest = np.empty_like(measured)
        self.comm.Allreduce(measured, slowest, op=MPI.MAX)
        return [list(map(float, row)) for row in slowest]

    def close(self) -> None:
        """Free the plans."""
        for ready in self._plans.values():
            if ready:
                ready[0].free()

    def _plan(self, index: int) -> tuple[Plan, int] | None:
        if index not in self._plans:
            self._plans[index] = None
            with suppress(ConstraintError):
                plan = self._make(self.subjects[index])
                self._plans[index] = plan, self._runs(index, plan)
        return self._plans[index]

    def _make(self, subject: Subject) -> Plan:
        given: dict[str, Any] = dict(subject.params)
        given["algorithm"] = NATIVE if subject.algorithm == CONTROL else subject.algorithm
        if self.collective == "alltoallv":
            sizes = block_sizes(self.size, self.comm.size)
            sent, received = sizes[self.comm.rank], sizes[:, self.comm.rank].copy()
            return alltoallv_init(self.comm, [self._send, sent], [self._recv, received], **given)
        init = alltoall_init if self.collective == "alltoall" else allgather_init
        return init(self.comm, self._send, self._recv, transport=subject.transport, **given)

    def _runs(self, index: int, plan: Plan) -> int:
        """Runs in a sample, after two runs whose data are checked (one if it takes long)."""
        for count in (1, 1, 4):  # the last to see how long one takes in a row of them
            self._arrays.fill(self._recv, POISON)
            self.comm.Barrier()
            begin = perf_counter()
            for _ in range(count):
                plan()
            seconds = (perf_counter() - begin) / count
            mine = np.array([seconds, np.count_nonzero(self._arrays.get(self._recv) != self._expected)])
            most = np.empty_like(mine)
            self.comm.Allreduce(mine, most, op=MPI.MAX)
            if most[1]:
                what = f"{self.collective} {self.subjects[index]} with blocks of {self.size} bytes"
                raise DataError(f"{what}: up to {most[1]:.0f} wrong bytes on a rank")
            self.once[index] = float(most[0])
            if most[0] > LONG:
                return 1
        return max(1, min(50, round(self._sample / max(self.once[index], 1e-6))))


class Bench:
    """A series of measurements on a communicator. All methods are collective.

    ``seconds``: for each subject and size, about, unless the number of samples is given as
    ``samples``; ``rate``: bytes per second of each node's link, for the bound that it
    sets; ``top``: how many of those that "auto" compares take part at each size;
    ``arrays``: of the memory to be measured, default that of the host.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        seconds: float = 0.3,
        samples: int | None = None,
        rate: float | None = None,
        top: int = 0,
        arrays: Arrays | None = None,
    ) -> None:
        self.comm = comm
        self.arrays = arrays or HostArrays()
        self.seconds, self.samples, self.rate, self.top = seconds, samples, rate, top
        self._sample = min(SAMPLE, seconds / FEWEST)
        self.state = get_state(comm)
        if self.state.disabled:
            raise HiercollError("HIERCOLL_DISABLE is set: every algorithm would be the MPI library's own")
        self.topology: Topology = self.state.topology

    def run(
        self,
        collective: str,
        given: Sequence[Subject],
        sizes: Sequence[int],
        advance: Callable[[], None] = lambda: None,
    ) -> Iterator[Result]:
        """Results of the given subjects, size by size; ``advance`` is called after each size.

        Subjects whose constraints do not hold here are left out. Raises DataError.
        """
        for size in sizes:
            subjects = [*given, *self._best(collective, size, given)]
            contest = Contest(self.comm, collective, subjects, size, self._sample, self.arrays)
            able = [index for index in range(len(subjects)) if contest.able(index)]
            times = contest.times(able, self._samples(contest))
            contest.close()
            bound = link_bound(collective, self.topology, size, self.rate) if self.rate else None
            natives = [row for row, index in zip(times, able, strict=True) if subjects[index] == Subject(NATIVE, {})]
            for row, index in zip(times, able, strict=True):
                chosen = None
                if subjects[index].algorithm == "auto":
                    chosen = self._chosen(collective, size)
                yield Result.of(collective, subjects[index], size, row, natives[0] if natives else None, bound, chosen)
            advance()

    def _chosen(self, collective: str, size: int) -> Variant:
        """What "auto" is."""
        if collective == "alltoallv":
            return self.state.choices.uneven_for_good(spread_of(block_sizes(size, self.comm.size)))
        return self.state.choices.decide(collective, size, False, self.arrays.kind).variant

    def _best(self, collective: str, size: int, given: Sequence[Subject]) -> list[Subject]:
        """The ``top`` of what "auto" compares at this size that are not among the given."""
        known = {str(subject) for subject in given}
        ranking = self.state.choices.decide(collective, size, False, self.arrays.kind).ranking[: self.top]
        best = [Subject.of(collective, candidate.variant) for candidate in ranking]
        return [subject for subject in best if str(subject) not in known]

    def _samples(self, contest: Contest) -> int:
        """Samples of each subject that fit in ``seconds`` per subject, between 5 and 200."""
        if self.samples:
            return self.samples
        each = sum(max(once, self._sample) for once in contest.once.values()) / max(len(contest.once), 1)
        return int(min(200, max(FEWEST, self.seconds / max(each, 1e-6))))

    def open(self, collective: str, size: int, variants: Sequence[Variant]) -> Contest:
        """Measurements for `tuning.Search`."""
        subjects = [Subject(v.algorithm, v.params, v.transport) for v in variants]
        return Contest(self.comm, collective, subjects, size, arrays=self.arrays)

    def transports(self) -> tuple[str, ...]:
        """Those worth trying for this memory. Collective."""
        if self.arrays.kind == "host":
            return (AUTO,)
        near = max(self.topology.node_sizes) > 1
        array = self.arrays.put(np.zeros(1, np.uint8))  # lies where mates must be able to reach it
        reach = near and self.state.memories.mates_in_reach(place_of(self.state, array))
        return (
            AUTO,
            "staged:4",
            *(["staged"] if not self.state.stages else []),
            *(["peer", "peer:4"] if reach else []),
        )

    def clock(self) -> float:
        """Seconds, the same on all ranks."""
        now = np.array([perf_counter()])
        self.comm.Bcast(now)
        return float(now[0])

    def links(self) -> Links:
        """The cost model's parameters of messages within a node and between nodes, as measured
        by messages to and fro between two ranks; the defaults where there are no such ranks."""
        first = self.topology.nodes[0]
        near = first[1] if len(first) > 1 else None
        far = self.topology.nodes[1][0] if len(self.topology.nodes) > 1 else None
        default = Links()
        return replace(
            default, node=self._link(first[0], near, default.node), network=self._link(first[0], far, default.network)
        )

    def _link(self, one: int, other: int | None, default: Link) -> Link:
        if other is None:
            return default
        small, large = (self._one_way(one, other, size) for size in (8, PROBE))
        return Link(small, max((large - small) / PROBE, 1e-12))

    def _one_way(self, one: int, other: int, size: int) -> float:
        """Seconds that a message takes between two ranks, the median of some."""
        rank, buffer, times = self.comm.rank, np.zeros(size, np.uint8), []
        for _ in range(20 if rank in (one, other) else 0):
            begin = perf_counter()
            if rank == one:
                self.comm.Send(buffer, other)
                self.comm.Recv(buffer, other)
            else:
                self.comm.Recv(buffer, one)
                self.comm.Send(buffer, one)
            times.append((perf_counter() - begin) / 2)
        middle = np.array([np.median(times) if times else 0.0])
        self.comm.Bcast(middle, one)
        return float(middle[0])


def link_bound(collective: str, topology: Topology, size: int, rate: float) -> float:
    """Seconds that no algorithm can beat: what must pass the busiest node's link, each way by
    itself, at ``rate`` bytes per second, with the headers of Ethernet, IP and TCP."""
    p, most = topology.size, 0
    if collective == "alltoallv":
        sizes, node_of = block_sizes(size, p), np.array(topology.node_of)
        across = sizes * (node_of[:, None] != node_of)
        each_way = [np.bincount(node_of, across.sum(axis=axis)).max() for axis in (0, 1)]
        return float(max(each_way)) * FRAME / PAYLOAD / rate
    for m in topology.node_sizes:
        most = max(most, m * (p - m) if collective == "alltoall" else max(p - m, m if len(topology.nodes) > 1 else 0))
    return most * size * FRAME / PAYLOAD / rate


def provenance(comm: MPI.Intracomm, topology: Topology, memory: str = "host") -> dict[str, Any]:
    """What a figure means nothing without. Collective."""
    hosts = comm.allgather(platform.node())
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hiercoll": hiercoll.__version__,
        "mpi": mpi_library(),
        "mpi4py": mpi4py.__version__,
        "python": platform.python_version(),
        "ranks": comm.size,
        "hosts": len(set(hosts)),
        "layout": str(topology),
        "virtual_nodes": len(topology.nodes) != len(set(hosts)),
        "memory": memory,
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
    plan = state.own_plan(work, "host", send.ctypes.data, recv.ctypes.data, traced=True)
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
