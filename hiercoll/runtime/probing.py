"""How fast links are, by a few messages between two ranks: what the cost model goes by where nothing else is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hiercoll.model.cost import Link
from hiercoll.runtime import progress
from hiercoll.runtime.checking import wait_for
from hiercoll.runtime.plan import abandoned
from hiercoll.runtime.watch import Watch
from hiercoll.topology import Topology

SMALL = 8  # bytes of a message whose time is latency
LARGE, STEP, LARGEST = 32 << 10, 8, 2 << 20  # bytes of others: the first one, times as many in the next, the last one
CLEARLY = 1.5  # times as long as a small message, that a large one takes whose time is the rate's
FASTEST = 1e-12  # seconds per byte


@dataclass(frozen=True)
class Probe:
    """Messages between two ranks of a communicator, with a ``tag`` that nothing else uses; of each size there and back
    so many ``times``. ``agree`` gives the largest of all ranks' values, each of several; ``watch`` keeps the deadline
    of calls, if they have one: then methods raise CollectiveTimeout and CollectiveFailed."""

    comm: MPI.Intracomm
    tag: int
    times: int
    agree: Callable[[Sequence[float]], list[float]]
    watch: Watch | None = None
    large: int = LARGE

    def network(self, topology: Topology, known: Link) -> Link:
        """That between the first two nodes; as it is ``known`` if there is one only. Collective."""
        return self._between([node[0] for node in topology.nodes[:2]], known)

    def node(self, topology: Topology, known: Link) -> Link:
        """That between the first two ranks of the first node; as it is ``known`` if there is one only. Collective."""
        return self._between(topology.nodes[0][:2], known)

    def _between(self, pair: Sequence[int], known: Link) -> Link:
        if len(pair) < 2:
            return known
        progress.before_blocking()
        own = 0.0, 0.0
        if self.comm.rank == pair[0]:
            own = self._lead(pair[1])
        elif self.comm.rank == pair[1]:
            self._follow(pair[0])
        return Link(*self.agree(own))

    def _lead(self, other: int) -> tuple[float, float]:
        """Seconds per message, and per byte."""
        small, size = self._one_way(SMALL, other), self.large
        while (large := self._one_way(size, other)) < CLEARLY * small and size < LARGEST:
            size *= STEP
        self._send(np.zeros(1, np.int64), other)
        return small, max((large - small) / size, FASTEST)

    def _one_way(self, size: int, other: int) -> float:
        """Seconds that a message takes, the least of some."""
        data, times = np.zeros(size, np.uint8), []
        self._send(np.array([size], np.int64), other)
        for _ in range(self.times):
            begin = perf_counter()
            self._send(data, other)
            self._receive(data, other)
            times.append((perf_counter() - begin) / 2)
        return min(times)

    def _follow(self, other: int) -> None:
        """Send back what comes, of sizes that are told before, until one is 0."""
        size = np.zeros(1, np.int64)
        self._receive(size, other)
        while size[0]:
            data = np.zeros(size[0], np.uint8)
            for _ in range(self.times):
                self._receive(data, other)
                self._send(data, other)
            self._receive(size, other)

    def _send(self, data: npt.NDArray[np.generic], other: int) -> None:
        self._wait(self.comm.Isend(data.view(np.uint8), other, self.tag))

    def _receive(self, data: npt.NDArray[np.generic], other: int) -> None:
        self._wait(self.comm.Irecv(data.view(np.uint8), other, self.tag))

    def _wait(self, request: MPI.Request) -> None:
        try:
            if self.watch is None:
                request.Wait()
            else:
                wait_for(request, "messages that show how fast links are", self.watch)
        except BaseException:
            abandoned.append(request)  # MPI may still use its buffer
            raise
