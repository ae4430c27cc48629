"""Benchmarks under mpiexec or srun, in the manner of osu_alltoall and osu_allgather.

All algorithms of a size are measured in turns in one run with the MPI library's own collective, as
`measuring` describes. A figure is the median over samples, with quartiles.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from time import perf_counter
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY, Params
from hiercoll.algorithms.registry import automatic
from hiercoll.collectives import AUTO, NATIVE, Collective, Sizes, get_collective
from hiercoll.errors import HiercollError
from hiercoll.model.cost import Links
from hiercoll.model.simulate import Event
from hiercoll.runtime.arguments import Arguments, Mode
from hiercoll.runtime.buffers import place_of
from hiercoll.runtime.factory import Lifetime
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.operations import find_operation
from hiercoll.runtime.probing import Probe
from hiercoll.runtime.reading import combining_of, make_request, spread_of
from hiercoll.statistics import LEVEL, median_interval, quartiles, ratio_interval
from hiercoll.tables import NATIVE_VARIANT, SINGLE, Variant
from hiercoll.tools.measuring import CONTROL, SAMPLE, Arrays, Contest, HostArrays
from hiercoll.tools.workload import Workload
from hiercoll.topology import Topology
from hiercoll.tuning.policy import Wanted

FEWEST = 6  # samples: of fewer there is no 95 % interval
AUTO_VARIANT, CONTROL_VARIANT = Variant("auto"), Variant(CONTROL)
PROBED = 20  # messages there and back, of each size, that show how fast links are
PAYLOAD, FRAME = 1448, 1514  # bytes of data in a full Ethernet frame of TCP/IP, and of the frame


@dataclass(frozen=True)
class Result:
    """One line of a benchmark; times in seconds, sizes in bytes.

    ``gain`` is the time of native's call over this one's, the median over turns, with its 95 % interval (None
    where there are too few samples for one); ``clear``: which of the two is faster, 1 this one, -1 native, 0 where
    that may be chance, with as many subjects and sizes as were measured; ``bound`` the time that the links set, if
    their rate is known; ``chosen`` what "auto" was.
    """

    collective: str
    subject: Variant
    size: int
    timing: str
    median: float
    q1: float
    q3: float
    samples: int
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    clear: int = 0
    bound: float | None = None
    chosen: Variant | None = None

    @property
    def name(self) -> str:
        """The subject in words."""
        return self.subject.spelled(self.collective)

    def compared(self, times: Sequence[float], natives: Sequence[float], rivals: int) -> Result:
        """With native's samples of the same turns; one of so many ``rivals`` that it is compared with."""
        gains = [native / own for native, own in zip(natives, times, strict=True)]
        gain, low, high = ratio_interval(natives, times)
        surely_low, surely_high = median_interval(gains, 1 - LEVEL / max(rivals, 1))
        known = isfinite(low)
        return replace(
            self,
            gain=gain,
            gain_low=low if known else None,
            gain_high=high if known else None,
            clear=1 if surely_low > 1 else -1 if surely_high < 1 else 0,
        )


def default_subjects(collective: str) -> list[Variant]:
    """native, auto, every algorithm with its defaults, what may be the fastest somewhere, and native's other form."""
    family = get_collective(collective).family
    every: list[tuple[str, Params]] = [(name, {}) for name in (NATIVE, "auto", *REGISTRY[family])]
    every += [(name, REGISTRY[family][name].changed(params)) for name, params in automatic(family)]
    subjects = [Variant(name, params) for name, params in every] + [Variant(NATIVE, {"form": "nonblocking"})]
    return [subject for number, subject in enumerate(subjects) if subject not in subjects[:number]]


class Bench:
    """A series of measurements on a communicator. All methods are collective.

    ``seconds``: for each subject, size and timing, about, unless the number of samples is given as
    ``samples``; ``timings``: see `tables.TIMINGS`; ``rate``: bytes per second of each node's link, for the
    bound that it sets; ``top``: how many of those that "auto" compares take part at each size;
    ``arrays``: of the memory to be measured, default that of the host.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        seconds: float = 0.3,
        samples: int | None = None,
        timings: Sequence[str] = (SINGLE,),
        rate: float | None = None,
        top: int = 0,
        arrays: Arrays | None = None,
    ) -> None:
        self.comm = comm
        self.arrays = arrays or HostArrays()
        self.seconds, self.samples, self.timings, self.rate, self.top = seconds, samples, timings, rate, top
        self.session = get_session(comm)
        if self.session.disabled:
            raise HiercollError("HIERCOLL_DISABLE is set: every algorithm would be the MPI library's own")
        self.topology: Topology = self.session.topology

    def run(
        self,
        collective: str,
        given: Sequence[Variant],
        sizes: Sequence[int],
        advance: Callable[[], None] = lambda: None,
    ) -> Iterator[Result]:
        """Results of the given subjects, size by size, by timings; ``advance`` is called after each size.

        Subjects whose constraints do not hold here are left out. Raises DataError.
        """
        for size in sizes:
            subjects = [*given, *self._best(collective, size, given)]
            contest = Contest(
                self.comm, collective, subjects, size, sample=min(SAMPLE, self.seconds / FEWEST), arrays=self.arrays
            )
            for timing in self.timings:
                yield from self._results(contest, timing, len(sizes))
            contest.close()
            advance()

    def _results(self, contest: Contest, timing: str, sizes: int) -> Iterator[Result]:
        """Of all subjects with one timing. native, and the control, are calls, also where the others are plans (its
        plan is that of its nonblocking form)."""
        subjects, collective, size = contest.variants, contest.collective, contest.size
        entries = [
            (index, timing.removeprefix("plan-") if subject in (NATIVE_VARIANT, CONTROL_VARIANT) else timing)
            for index, subject in enumerate(subjects)
        ]
        entries = [entry for entry in entries if contest.able(*entry)]
        rows = dict(zip(entries, contest.times(entries, self._turns(contest, entries)), strict=True))
        natives = next((times for (index, _), times in rows.items() if subjects[index] == NATIVE_VARIANT), None)
        bound = link_bound(collective, self.topology, size, self.rate) if self.rate else None
        rivals = sizes * sum(subjects[index] not in (NATIVE_VARIANT, CONTROL_VARIANT) for index, _ in entries)
        for (index, _), times in rows.items():
            q1, middle, q3 = quartiles(times)
            result = Result(collective, subjects[index], size, timing, middle, q1, q3, len(times), bound=bound)
            if subjects[index] == AUTO_VARIANT:
                result = replace(result, chosen=self._chosen(collective, size, timing.startswith("plan")))
            yield result if natives is None else result.compared(times, natives, rivals)

    def _turns(self, contest: Contest, entries: Sequence[tuple[int, str]]) -> int:
        """Samples of each subject that fit in ``seconds`` per subject, between 6 and 100."""
        if self.samples:
            return self.samples
        each = sum(contest.cost(*entry) for entry in entries) / max(len(entries), 1)
        return int(min(100, max(FEWEST, self.seconds / max(each, 1e-6))))

    def _chosen(self, collective: str, size: int, held: bool) -> Variant:
        """What "auto" is."""
        policy, record = self.session.policy, get_collective(collective)
        if record.sizes is Sizes.OWN and held:
            return policy.uneven_for_good(record, spread_of(Workload(record, size, self.comm.size).sent()))
        if record.sizes is Sizes.OWN and (learner := policy.known_learner(Wanted(record, 0, False).key)) is not None:
            return learner.current  # one choice for calls with whatever blocks
        wanted = self._wanted(record, size, held)
        if record.operation:
            elements = Workload(record, size, self.comm.size).elements
            operation = find_operation(MPI.SUM, elements, self.comm.rank)
            wanted = wanted._replace(combining=combining_of(self.session, None, operation))
        return policy.select(wanted, AUTO_VARIANT.algorithm, {})

    def _wanted(self, record: Collective, size: int, held: bool = False) -> Wanted:
        return Wanted(record, size, record.one_buffer, self.arrays.kind, held)

    def _best(self, collective: str, size: int, given: Sequence[Variant]) -> list[Variant]:
        """The ``top`` of what "auto" compares at this size that are not among the given."""
        known = {subject.spelled(collective) for subject in given}
        ranking = self.session.policy.decide(self._wanted(get_collective(collective), size)).ranking[: self.top]
        return [each.variant for each in ranking if each.variant.spelled(collective) not in known]

    def open(self, collective: str, size: int, variants: Sequence[Variant]) -> Contest:
        """Measurements for `tuning.search.Search`."""
        return Contest(self.comm, collective, variants, size, arrays=self.arrays)

    def transports(self) -> tuple[str, ...]:
        """Those worth trying for this memory. Collective."""
        if self.arrays.kind == "host":
            return (AUTO,)
        near = max(self.topology.node_sizes) > 1
        array = self.arrays.put(np.zeros(1, np.uint8))  # lies where the ranks of its node must be able to reach it
        reach = near and self.session.memories.node_in_reach(place_of(self.session, array))
        return (
            AUTO,
            "staged:4",
            *(["staged"] if not self.session.stages else []),
            *(["peer", "peer:4"] if reach else []),
        )

    def clock(self) -> float:
        """Seconds, the same on all ranks."""
        now = np.array([perf_counter()])
        self.comm.Bcast(now)
        return float(now[0])

    def links(self) -> Links:
        """The cost model's parameters of messages within a node and between nodes, as measured; the defaults where
        there are none. Collective."""
        probe, default = Probe(self.comm, 0, PROBED, self.session.agreement.slowest), Links()
        node, network = probe.node(self.topology, default.node), probe.network(self.topology, default.network)
        return default._replace(node=node, network=network)


def link_bound(collective: str, topology: Topology, size: int, rate: float) -> float:
    """Seconds that no algorithm can beat: what must pass the busiest node's link, each way by
    itself, at ``rate`` bytes per second, with the headers of Ethernet, IP and TCP."""
    return Workload(get_collective(collective), size, topology.size).busiest(topology) * FRAME / PAYLOAD / rate


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
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
    }


def record(result: Result, about: dict[str, Any]) -> dict[str, Any]:
    """A line for a JSON Lines file; times in seconds."""
    chosen = {"chosen": result.chosen.record()} if result.chosen else {}
    return {**asdict(result), "subject": result.subject.record(), **chosen, **about}


def measured_events(
    comm: MPI.Intracomm, collective: str, algorithm: str, params: Params, size: int
) -> list[Event] | None:
    """The events of one traced run on ``comm``, on rank 0; None on the others. Collective.

    Times count from the first event of any rank where all ranks share a host's clock,
    else from each rank's leaving of a barrier.
    """
    session, record = get_session(comm), get_collective(collective)
    load = Workload(record, size, comm.size)
    send, recv = load.before(comm.rank), np.empty_like(load.due(comm.rank))
    arguments = Arguments(
        None if record.one_buffer else send, send if record.one_buffer else recv, 0, algorithm, params
    )
    request = make_request(session, record, arguments, Mode.HELD, strict=True)
    plan = session.factory.make(request, Lifetime.HELD, traced=True)
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
