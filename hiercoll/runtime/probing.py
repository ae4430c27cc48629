"""How fast links are, by a few messages between two ranks: what the cost model goes by where nothing else is known."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI

from hiercoll.model.cost import Link
from hiercoll.runtime.checking import Successive
from hiercoll.runtime.progress import abandoned
from hiercoll.runtime.waiting import wait_for
from hiercoll.runtime.watch import Watch
from hiercoll.topology import Topology

if TYPE_CHECKING:
    import numpy.typing as npt

SMALL = 8  # bytes of a message whose time is latency
LARGE, STEP, LARGEST = 32 << 10, 8, 2 << 20  # bytes of others: the first one, times as many in the next, the last one
CLEARLY = 1.5  # times as long as a small message, that a large one takes whose time says something of the rate


class Probe(NamedTuple):
    """Messages between two ranks of a communicator, with a ``tag`` that nothing else uses; of each size there and back
    so many ``times``. ``agree`` gives the largest of all ranks' values, each of several; ``watch`` keeps the deadline
    of calls, if they have one: then `network` and `node` raise CollectiveTimeout and CollectiveFailed."""

    comm: MPI.Intracomm
    tag: int
    times: int
    agree: Callable[[Sequence[float]], list[float]]
    watch: Watch | None = None

    def network(self, topology: Topology, known: Link) -> Link:
        """The link between the first two nodes; ``known`` if there is only one node. Collective."""
        return self._between([node[0] for node in topology.nodes[:2]], known)

    def node(self, topology: Topology, known: Link) -> Link:
        """The link between the first two ranks of the first node; ``known`` if there is only one. Collective."""
        return self._between(topology.nodes[0][:2], known)

    def _between(self, pair: Sequence[int], known: Link) -> Link:
        if len(pair) < 2:
            return known
        rank = self.comm.rank
        own: Iterator[MPI.Request] = iter(())
        if rank in pair:
            own = self._lead(pair[1], known) if rank == pair[0] else self._follow(pair[0])
        messages = Successive(own)
        try:  # on all ranks: they number what they wait for
            wait_for(messages.is_over, "messages that show how fast links are", self.watch)
        except BaseException:
            abandoned.append(messages)  # MPI may still use their buffers
            raise
        found = messages.result or Link(0.0, 0.0)
        return Link(*self.agree([found.alpha, found.beta]))

    def _lead(self, other: int, known: Link) -> Generator[MPI.Request, None, Link]:
        """The link to another rank that follows."""
        small, size = (yield from self._one_way(SMALL, other)), LARGE
        large = yield from self._one_way(size, other)
        while large < CLEARLY * small and size < LARGEST:
            size *= STEP
            large = yield from self._one_way(size, other)
        yield self._send(np.zeros(1, np.int64), other)
        is_clear = large >= CLEARLY * small
        return Link(min(small, large), (large - small) / size if is_clear else known.beta)

    def _one_way(self, size: int, other: int) -> Generator[MPI.Request, None, float]:
        """Seconds that a message takes, the least of some."""
        data, times = np.zeros(size, np.uint8), []
        yield self._send(np.array([size], np.int64), other)
        for _ in range(self.times):
            begin = perf_counter()
            yield self._send(data, other)
            yield self._receive(data, other)
            times.append((perf_counter() - begin) / 2)
        return min(times)

    def _follow(self, other: int) -> Iterator[MPI.Request]:
        """Send back what comes, of sizes that are told before, until one is 0."""
        size = np.zeros(1, np.int64)
        yield self._receive(size, other)
        while size[0]:
            data = np.zeros(size[0], np.uint8)
            for _ in range(self.times):
                yield self._receive(data, other)
                yield self._send(data, other)
            yield self._receive(size, other)

    def _send(self, data: npt.NDArray[np.generic], other: int) -> MPI.Request:
        return self.comm.Isend(data.view(np.uint8), other, self.tag)

    def _receive(self, data: npt.NDArray[np.generic], other: int) -> MPI.Request:
        return self.comm.Irecv(data.view(np.uint8), other, self.tag)
