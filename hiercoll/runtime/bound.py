"""How long the links between nodes need for what calls send: no algorithm is faster than that, so where the MPI library
takes little longer, there is little to find.

It is measured before most of hiercoll is imported, so that a program whose calls are such does without.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from mpi4py import MPI

from hiercoll.collectives import Collective, Holds
from hiercoll.loading import is_array
from hiercoll.runtime.arguments import Arguments
from hiercoll.runtime.beginning import largest
from hiercoll.topology import Topology, discover

if TYPE_CHECKING:
    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.float64]"
# Calls, one after the other, that are looked at, since programs make calls of several kinds in turns: most and fewest,
# and seconds that they may take.
MOST, FEWEST, LONGEST = 8, 2, 1.0
NEAR = 1.35  # times as long as links need at most, that calls take which hardly anything makes faster
UNLIKELY = 0.7  # times as long, below which what is known of links, or of what passes them, must be wrong
SMALL, SIZES = 8, (64 << 10, 256 << 10)  # bytes of messages whose time is latency, and of those that show the rate
TIMES = 2  # that they are sent
CLEARLY = 4.0  # times as long as small ones, that large ones take which show the rate


class Bound:
    """What the blocking calls on a communicator take at least, by what some of them send, and by what a node needs for
    each byte that it sends to others. Made collectively. Raises LayoutError as `topology.discover`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        begin = perf_counter()
        self._comm, self._topology = comm, discover(comm).topology
        self._beta = seconds_per_byte(comm, self._topology)
        self._sample: Sample | None = None
        self._seconds = 0.0  # that links need for a call; 0: not known
        self._before = 0.0  # of a call before the sample, equal on all ranks
        self.is_fresh = False  # whether the calls that `is_near` was last asked about are those of a sample
        self.cost = largest(comm, [perf_counter() - begin])[0]  # seconds, equal on all ranks

    @property
    def has_links(self) -> bool:
        """Whether there are nodes, whose links are as fast as it has been measured."""
        return self._beta > 0.0

    def begin(self, seconds: float, collective: Collective | None, given: Arguments | None) -> int:
        """Look at calls from this one on; one of those before took so many seconds. Returns how many. Local."""
        self._before = seconds
        wanted = max(FEWEST, int(min(LONGEST / seconds, MOST))) if seconds else MOST
        self._sample = Sample(self._topology.size, wanted)
        self._sample.add(collective, given)
        return wanted

    def takes(self, collective: Collective | None, given: Arguments | None) -> bool:
        """Whether this call is one that is looked at. Local."""
        if self._sample is None or self._sample.calls >= self._sample.wanted:
            return False
        self._sample.add(collective, given)
        return True

    def is_near(self, seconds: float, calls: int) -> bool:
        """Whether so many calls, which took so many seconds together, took little longer than links need: for those in
        the sample, if there is one. Then the ones before must have, too: calls are shorter at times, as the first ones
        after ranks have met. Collective."""
        sample, self._sample = self._sample, None
        self.is_fresh = sample is not None
        if sample is not None:
            self._seconds = self._needed(sample.sent) / sample.calls
        low, high = UNLIKELY * self._seconds, NEAR * self._seconds
        return low < seconds / calls <= high and (sample is None or low < self._before <= high)

    def _needed(self, sent: Bytes) -> float:
        """Seconds that the busiest node needs for what its ranks send, of which this one sends so much to each."""
        node_of, own = np.array(self._topology.node_of), self._topology.node_of[self._comm.rank]
        out = np.zeros(len(self._topology.nodes))
        out[own] = sent[node_of != own].sum()
        total = np.empty_like(out)
        MPI.Comm.Allreduce(self._comm, out, total)
        return float(total.max()) * self._beta


class Sample:
    """Bytes to each rank, in some calls of this one; none of calls of which that is not known."""

    def __init__(self, size: int, wanted: int) -> None:
        self.calls, self.wanted, self.sent = 0, wanted, np.zeros(size)

    def add(self, collective: Collective | None, given: Arguments | None) -> None:
        """A call comes next."""
        self.calls += 1
        if collective is None or given is None:
            return
        try:
            self.sent += sent_by(collective, given, self.sent.size)
        except (AttributeError, IndexError, TypeError, ValueError):  # arguments are the MPI library's to look at
            return


def sent_by(collective: Collective, given: Arguments, size: int) -> Bytes:
    """Bytes that a call sends to each of so many ranks, where each rank gets data of its own; 0 for other collectives.
    Raises AttributeError, IndexError, TypeError or ValueError where that cannot be told."""
    sent = np.zeros(size)
    if not (collective.send is Holds.EACH is collective.recv) or collective.operation:
        return sent
    spec: Any = given.recv if given.send is MPI.IN_PLACE else given.send
    if is_array(spec):
        sent += spec.nbytes / size
    if is_array(spec) or collective.is_even:
        return sent
    if not isinstance(spec, list | tuple):
        raise TypeError(type(spec))
    buffer, *rest = spec
    datatypes: Any = rest.pop() if collective.typed or isinstance(rest[-1], MPI.Datatype) else None
    counts = 1 if not rest else rest[0][0] if isinstance(rest[0], tuple) and len(rest[0]) == 2 else rest[0]
    if datatypes is None:
        sent += np.multiply(counts, buffer.itemsize)
    else:
        sent += np.multiply(counts, [kind.size for kind in datatypes] if collective.typed else datatypes.size)
    return sent


def seconds_per_byte(comm: MPI.Intracomm, topology: Topology) -> float:
    """That a node needs for what it sends to others, by messages from all ranks of each to those of the next at once; 0
    where there is one node. Collective."""
    if len(topology.nodes) == 1:
        return 0.0
    small, seconds, size = _slowest(comm, topology, SMALL), 0.0, 0
    for size in SIZES:
        seconds = _slowest(comm, topology, size) - small
        if seconds > CLEARLY * small:
            break
    return max(0.0, seconds) / (size * max(topology.node_sizes))


def _slowest(comm: MPI.Intracomm, topology: Topology, size: int) -> float:
    """Seconds that the slowest rank takes for messages of so many bytes, the least of some times."""
    counts, received = (np.zeros(comm.size, int) for _ in range(2))
    counts[neighbour(topology, comm.rank)] = size
    received[[rank for rank in range(comm.size) if neighbour(topology, rank) == comm.rank]] = size
    data, place, times = np.zeros(size, np.uint8), np.empty(received.sum(), np.uint8), []
    for _ in range(TIMES):
        MPI.Comm.Barrier(comm)
        begin = perf_counter()
        # As a collective, so that no message is taken for one of the program's.
        MPI.Comm.Alltoallv(comm, [data, counts], [place, received])
        times.append(perf_counter() - begin)
    return min(largest(comm, times))


def neighbour(topology: Topology, rank: int) -> int:
    """The rank of the next node to which this one sends: that of its lane, or one that several send to."""
    there = topology.nodes[(topology.node_of[rank] + 1) % len(topology.nodes)]
    return there[topology.lane_of[rank] % len(there)]
