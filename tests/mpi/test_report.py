"""The report on a program's collectives: calls, bytes and what ran, by call site."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll import dropin
from hiercoll.collectives import called, get_collective
from hiercoll.communicator import mpi_library
from hiercoll.report import Recorder, received
from hiercoll.tables import Choice, Entry, Figure, Table, Variant

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


@pytest.mark.parametrize("sync", [False, True])
def test_report(ours: hiercoll.Intracomm, recorders: Callable[..., Recorder], sync: bool) -> None:
    """Calls, bytes and what ran, by call site."""
    recorder = recorders(sync=sync, trace=True)
    recv = np.empty(2 * SIZE)
    for _ in range(3):
        ours.Alltoall(np.arange(2.0 * SIZE), recv)
    ours.Allgather(np.arange(2.0), recv)
    ours.Iallgatherv(np.arange(2.0), [recv, 2]).Wait()
    records = recorder.gather(ours)
    assert (records is None) == (RANK > 0)
    if records is None:
        return
    by_name = {record["collective"]: record for record in records}
    assert by_name["alltoall"]["calls"] == 3 and by_name["allgather"]["calls"] == 1
    assert by_name["alltoall"]["bytes_per_call"] == [16 * SIZE] * 2
    assert by_name["alltoall"]["bytes"] == 3 * 16 * SIZE * SIZE and len(recorder.events) == 5
    assert by_name["iallgatherv"]["bytes_per_call"] == [16 * SIZE] * 2 and by_name["iallgatherv"]["calls"] == 1
    assert all(__file__ in record["site"] and record["seconds"]["most"] > 0 for record in records)
    assert (by_name["alltoall"]["waited"]["most"] > 0) == sync


def test_recorders_come_and_go(ours: hiercoll.Intracomm, recorders: Callable[..., Recorder]) -> None:
    """Each counts every call once, however often it was installed, and at the program's own place."""
    names = [name for each in called() for name in (each.native, each.nonblocking, each.persistent)]
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

    def bytes_of(name: str, *args: object, rank: int = 1, **options: object) -> int:
        return received(get_collective(name), 4, rank, args, options)

    eight, ones = np.empty(8), np.ones(4, int)
    assert bytes_of("alltoall", None, eight) == bytes_of("allgather", None, [eight, 2]) == 64
    assert bytes_of("alltoallv", None, [eight, ones]) == bytes_of("allgatherv", None, recvbuf=[eight, ones]) == 32
    assert bytes_of("gather", None, None) == 0 and bytes_of("gather", None, eight, rank=0) == 64
    assert bytes_of("gather", None, eight, 1) == bytes_of("gather", None, eight, root=1) == 64
    assert bytes_of("scatter", None, eight) == bytes_of("allreduce", None, eight) == 64
    assert bytes_of("reduce", None, eight) == 0 and bytes_of("reduce", None, eight, None, 1) == 64


@pytest.mark.skipif(SIZE == 1, reason="calls of one rank are MPI's")
def test_report_compares_like_with_like(ours: hiercoll.Intracomm, recorders: Callable[..., Recorder]) -> None:
    """Native's time is known for sizes that the table was made with, and stands beside those calls' time alone."""
    comm = hiercoll.Intracomm(ours.Dup())
    topology, native = hiercoll.get_topology(comm), Variant("native")
    figures = tuple(Figure(size, native, seconds, seconds, seconds, 8) for size, seconds in ((16, 1.0), (64, 4.0)))
    other = Figure(16, Variant("native", {"form": "nonblocking"}), 9.0, 9.0, 9.0, 8)
    setting = ("alltoall", mpi_library(), "host", topology.node_sizes, topology.placement)
    hiercoll.configure(comm, table=Table((Entry(*setting, (Choice(1, native),), (*figures, other)),)))
    recorder = recorders()
    for doubles in (1, 2, 4, 8, 9):  # 8 and 72 bytes were not measured
        comm.Alltoall(np.arange(float(doubles * SIZE)), np.empty(doubles * SIZE))
    comm.Allgather(np.arange(2.0), np.empty(2 * SIZE))
    records = recorder.gather(comm)
    if records is not None:
        by_name = {record["collective"]: record for record in records}
        alltoall = by_name["alltoall"]
        assert alltoall["estimated_calls"] == 3 and alltoall["native"]["most"] == pytest.approx(1 + 2 + 4)
        assert 0 < alltoall["compared"]["most"] < alltoall["seconds"]["most"]
        assert by_name["allgather"]["estimated_calls"] == 0 and by_name["allgather"]["native"]["most"] == 0
    comm.Free()
