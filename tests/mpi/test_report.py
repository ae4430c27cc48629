"""The report on a program's collectives: calls, bytes and what ran, by call site."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll.calls import dropin
from hiercoll.collectives import called, get_collective
from hiercoll.tools.report import Recorder, received

RANK, SIZE = WORLD.rank, WORLD.size


@pytest.fixture(params=layouts())
def ours(request: pytest.FixtureRequest, on_layout: Callable[[str], MPI.Intracomm]) -> hiercoll.Intracomm:
    return hiercoll.Intracomm(on_layout(request.param))


@pytest.fixture
def recorders() -> Iterator[Callable[..., Recorder]]:
    """Makes recorders that watch, while the test runs."""
    made: list[Recorder] = []

    def watching(*, sync: bool = False, trace: bool = False) -> Recorder:
        made.append(Recorder(sync=sync, trace=trace))
        made[-1].install()
        return made[-1]

    yield watching
    for recorder in made:
        recorder.remove()


def test_recorders_come_and_go(ours: hiercoll.Intracomm, recorders: Callable[..., Recorder]) -> None:
    """Each counts every call once, however often it was installed, and at the program's own place."""
    names = [name for each in called() for name in (each.native, each.nonblocking, each.persistent)]
    recorders().remove()  # of tests that put methods back themselves, others may still be there
    before = {name: getattr(dropin.Collectives, name) for name in names}
    first, recv = recorders(), np.empty(SIZE)
    first.install()
    ours.Alltoall(np.arange(1.0 * SIZE), recvbuf=recv)
    second = recorders()
    for _ in range(2):
        ours.Alltoall(np.arange(1.0 * SIZE), recv)
    first.remove()
    ours.Alltoall(np.arange(1.0 * SIZE), recv)
    for recorder, lines in ((first, [1, 2]), (second, [2, 1])):
        assert [site.calls for site in recorder.sites.values()] == lines
        assert all(__file__ in place for place, _ in recorder.sites)
    second.remove()
    second.remove()
    ours.Alltoall(np.arange(1.0 * SIZE), recv)
    assert sum(site.calls for site in second.sites.values()) == 3
    assert before == {name: getattr(dropin.Collectives, name) for name in names}


def test_bytes_received() -> None:
    """By the record: of one block or many, of a vector, on the root or elsewhere."""

    def bytes_of(name: str, *args: object, rank: int = 1) -> int:
        return received(get_collective(name), 4, rank, args)

    eight, ones = np.empty(8), np.ones(4, int)
    assert bytes_of("alltoall", None, eight) == bytes_of("allgather", None, [eight, 2]) == 64
    assert bytes_of("alltoallv", None, [eight, ones]) == bytes_of("allgatherv", None, [eight, ones]) == 32
    assert bytes_of("gather", None, None) == 0 and bytes_of("gather", None, eight, rank=0) == 64
    assert bytes_of("gather", None, eight, 1) == 64 == 64
    assert bytes_of("scatter", None, eight) == bytes_of("allreduce", None, eight) == 64
    assert bytes_of("reduce", None, eight) == 0 and bytes_of("reduce", None, eight, None, 1) == 64
