"""Messages that show how fast links are: alike on all ranks, and never waited for longer than calls may take."""

from __future__ import annotations

from typing import Any, cast

import pytest
from conftest import WORLD
from mpi4py import MPI

import hiercoll
from hiercoll.errors import CollectiveTimeout
from hiercoll.model.cost import DEFAULT_LINKS, Link
from hiercoll.runtime import probing, progress
from hiercoll.runtime.checking import Successive, wait_for
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.probing import LARGE, LARGEST, SMALL, STEP, Probe
from hiercoll.runtime.watch import Watch
from hiercoll.topology import Topology

RANK, SIZE = WORLD.rank, WORLD.size
TAG, TIMES = 7, 2
KNOWN = Link(3.0, 4.0)
several = pytest.mark.mpi(min_size=2)


class Counting:
    """A communicator that counts the bytes of messages."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self.rank = comm, comm.rank
        self.sent: list[int] = []
        self.received: list[int] = []

    def Isend(self, data: Any, peer: int, tag: int) -> MPI.Request:  # noqa: N802
        self.sent.append(data.size)
        return self._comm.Isend(data, peer, tag)

    def Irecv(self, data: Any, peer: int, tag: int) -> MPI.Request:  # noqa: N802
        self.received.append(data.size)
        return self._comm.Irecv(data, peer, tag)


def on(nodes: int) -> Topology:
    """The ranks, dealt to so many nodes in turns."""
    return Topology(tuple(rank % nodes for rank in range(SIZE)))


def probe(comm: Any, watch: Watch | None = None) -> Probe:
    return Probe(comm, TAG, TIMES, get_session(WORLD).agreement.slowest, watch)


@several
@pytest.mark.parametrize("factor", [0.0, 1e9])
def test_sizes(comm: MPI.Intracomm, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks send each other a small message, then large ones, until one takes clearly longer; if none does, nothing
    is known of the rate. The others send nothing, and all know the same."""
    monkeypatch.setattr(probing, "CLEARLY", factor)
    counting = Counting(comm)
    link = probe(counting).network(on(2), KNOWN)
    assert link.alpha > 0 and link.alpha != KNOWN.alpha and (link.beta == KNOWN.beta) == bool(factor)
    assert WORLD.allgather(link) == [link] * SIZE
    large = [LARGE] if not factor else [LARGE * STEP**power for power in range(3)]
    assert large[-1] == (LARGE if not factor else LARGEST)
    trips = [size for size in (SMALL, *large) for _ in range(TIMES)]
    told = 8 * (2 + len(large))  # the sizes, and that there are no more
    here, there = (counting.sent, counting.received) if RANK == 0 else (counting.received, counting.sent)
    assert sum(here) == (sum(trips) + told if RANK < 2 else 0)
    assert there == (trips if RANK < 2 else [])


@several
def test_nothing_to_be_found_out(comm: MPI.Intracomm) -> None:
    """Of links that there are not, nothing is sent."""
    counting = Counting(comm)
    assert probe(counting).network(on(1), KNOWN) == KNOWN == probe(counting).node(on(SIZE), KNOWN)
    assert not counting.sent and not counting.received


@several
def test_within_a_node(comm: MPI.Intracomm) -> None:
    """Between its first two ranks."""
    counting = Counting(comm)
    link = probe(counting).node(on(1), KNOWN)
    assert link != KNOWN and bool(counting.sent) == (RANK < 2)


@several
def test_deadline(comm: MPI.Intracomm) -> None:
    """Of a rank that does not answer, the other one says so; what MPI may still write to is kept."""
    get_session(WORLD)  # which all ranks make together
    topology = on(2)
    watch = Watch(0.3, "0" * 16, RANK, topology.node_of, range(SIZE), lambda what: None)
    before = len(progress.abandoned)
    if RANK == 0:
        with pytest.raises(CollectiveTimeout, match="how fast links are"):
            probe(comm, watch).network(topology, KNOWN)
        assert len(progress.abandoned) == before + 1
    WORLD.Barrier()
    if RANK < 2:  # it comes late: nothing is left under way
        running = cast(Successive, progress.abandoned.pop()) if RANK == 0 else Successive(probe(comm)._follow(0))
        wait_for(running.is_over, "a late rank", Watch(20, "0" * 16, RANK, topology.node_of, range(SIZE), print))
        assert (running.result is None) == (RANK == 1)
    WORLD.Barrier()


@several
def test_ranks_number_calls_alike(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they send such messages or not: reports of hangs go by these numbers."""
    hiercoll.configure(comm, timeout=30)
    session = get_session(comm)
    monkeypatch.setattr(session, "topology", on(2))
    session._probe(DEFAULT_LINKS)
    assert session.watch is not None
    assert len({tuple(each) for each in WORLD.allgather(list(session.watch.numbers[:1]))}) == 1


@several
def test_links_of_a_communicator(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several nodes: the network is measured, the rest is as it was known."""
    session = get_session(comm)
    monkeypatch.setattr(session, "topology", on(2))
    links = session._probe(DEFAULT_LINKS)
    assert links.network != DEFAULT_LINKS.network and links.node == DEFAULT_LINKS.node
    assert WORLD.allgather((links, session.tags.background_next)) == [(links, session.tags.background_next)] * SIZE
