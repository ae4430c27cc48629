"""Calls in the background: several at once, completed in any order, among others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import WORLD, layouts, nothing_is_under_way
from mpi4py import MPI

import hiercoll
from hiercoll import ConstraintError
from hiercoll.runtime import progress
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.plan import Plan
from hiercoll.schedule import most_tags
from hiercoll.tables import Choice, Entry, Figure, Table, Variant

RANK, SIZE = WORLD.rank, WORLD.size
needs_threads = pytest.mark.skipif(
    MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="the MPI library gives no MPI_THREAD_MULTIPLE"
)


def started(comm: MPI.Intracomm, kind: str, salt: int, **options: Any) -> tuple[hiercoll.Request, Any, Any]:
    """A call under way, what it must give, and its buffers."""
    table = np.random.default_rng(salt).integers(0, 9, (SIZE, SIZE))
    if kind == "alltoall":
        send = (np.arange(3 * SIZE) + 1000 * RANK + salt).reshape(SIZE, 3)
        expected = np.stack([np.arange(3) + 3 * RANK + 1000 * peer + salt for peer in range(SIZE)])
        return hiercoll.ialltoall(comm, send, **options), expected, send
    if kind == "allgather":
        send = np.arange(5) + 1000 * RANK + salt
        expected = np.stack([np.arange(5) + 1000 * peer + salt for peer in range(SIZE)])
        return hiercoll.iallgather(comm, send, **options), expected, send
    if kind == "allgatherv":
        send, recv = np.full(table[0, RANK], RANK + salt), np.full(table[0].sum(), -1)
        return (
            hiercoll.iallgatherv(comm, send, [recv, table[0]], **options),
            np.repeat(np.arange(SIZE) + salt, table[0]),
            send,
        )
    send = np.concatenate([np.full(table[RANK, peer], 100 * RANK + peer + salt) for peer in range(SIZE)])
    recv = np.full(table[:, RANK].sum(), -1)
    expected = np.concatenate([np.full(table[peer, RANK], 100 * peer + RANK + salt) for peer in range(SIZE)])
    return hiercoll.ialltoallv(comm, [send, table[RANK]], [recv, table[:, RANK]], **options), expected, send


KINDS = ["alltoall", "allgather", "alltoallv", "allgatherv"]


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("kind", KINDS)
def test_many_at_once(on_layout: Callable[[str], MPI.Intracomm], kind: str, layout: str) -> None:
    """Started in one order, completed in another one on each rank."""
    comm = on_layout(layout)
    under_way = [started(comm, kind, salt) for salt in range(7)]
    for index in np.random.default_rng(RANK).permutation(7):
        request, expected, _ = under_way[index]
        np.testing.assert_array_equal(request.wait(), expected)
        assert request.done and request.test()
    assert nothing_is_under_way()


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("alltoall", "bruck"), ("alltoall", "hierarchical"), ("alltoall", "native"), ("alltoall", "eager"),
        ("allgather", "ring"), ("allgather", "native"), ("alltoallv", "scatter_destination"), ("allgatherv", "direct"),
        ("allgatherv", "native"),
    ],
)  # fmt: skip
def test_algorithms(on_layout: Callable[[str], MPI.Intracomm], kind: str, algorithm: str) -> None:
    comm = on_layout(layouts()[-1])
    under_way = [started(comm, kind, salt, algorithm=algorithm) for salt in range(3)]
    for (_, expected, _), result in zip(under_way, hiercoll.waitall([r for r, *_ in under_way]), strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("layout", layouts())
def test_among_blocking_calls(on_layout: Callable[[str], MPI.Intracomm], layout: str) -> None:
    """Half of the ranks complete a call before a blocking one, the others after it: MPI allows
    that, so a blocking call must let others go on."""
    comm = on_layout(layout)
    for salt, algorithm in enumerate(["hierarchical", "bruck", "scatter_destination"] * 2):
        request, expected, _ = started(comm, "alltoall", salt, algorithm=algorithm)
        plan = hiercoll.allgather_init(comm, np.array([RANK]))
        if RANK % 2:
            request.wait()
        gathered = hiercoll.allgather(comm, np.array([RANK + salt]), algorithm="ring" if salt % 2 else "auto")
        np.testing.assert_array_equal(gathered.ravel(), np.arange(SIZE) + salt)
        np.testing.assert_array_equal(plan().ravel(), np.arange(SIZE))
        np.testing.assert_array_equal(request.wait(), expected)
        plan.free()


@pytest.mark.parametrize("layout", layouts())
@needs_threads
def test_among_calls_of_the_library(on_layout: Callable[[str], MPI.Intracomm], layout: str) -> None:
    """The same, where the blocking call is the MPI library's: on ranks with something under way it
    must be the same call as on the others, and let it go on."""
    comm = on_layout(layout)
    dropin, sizes = hiercoll.Intracomm(comm), np.full(SIZE, 2)
    blocking: list[Callable[[Any, Any], Any]] = [
        lambda send, recv: hiercoll.alltoall(comm, send, recv, algorithm="native"),
        lambda send, recv: hiercoll.alltoallv(comm, [send, sizes], [recv, sizes], algorithm="native"),
        lambda send, recv: hiercoll.alltoallv(comm, [send, sizes], [recv, sizes]),
        lambda send, recv: dropin.Alltoallv([send, sizes], [recv, sizes]),
    ]
    for turn in range(24):
        request, expected, _ = started(comm, "alltoall", turn, algorithm="bruck")
        if RANK % 2:
            request.wait()
        send, recv = np.repeat(np.arange(SIZE) + 100 * RANK + turn, 2), np.full(2 * SIZE, -1)
        blocking[turn % 4](send, recv)
        np.testing.assert_array_equal(recv, np.repeat(100 * np.arange(SIZE) + RANK + turn, 2))
        with hiercoll.alltoall_init(comm, send, recv, algorithm="native") as plan:
            if RANK % 2:
                plan()
            else:
                plan.start()
                plan.wait()
        np.testing.assert_array_equal(request.wait(), expected)


@needs_threads
def test_thread(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a progress thread a call of several rounds completes while this rank does something else."""
    monkeypatch.setenv("HIERCOLL_PROGRESS", "thread")
    request, expected, _ = started(comm, "alltoall", 1, algorithm="bruck")
    patience = time.monotonic() + 30
    while not request.done and time.monotonic() < patience:
        time.sleep(0.01)  # no call of hiercoll
    assert request.done
    np.testing.assert_array_equal(request.wait(), expected)


def test_freed_with_calls_under_way(comm: MPI.Intracomm) -> None:
    """They are completed first, as MPI_Comm_free has it."""
    duplicate = comm.Dup()
    request, expected, _ = started(duplicate, "alltoall", 3, algorithm="bruck")
    duplicate.Free()
    np.testing.assert_array_equal(request.wait(), expected)


def test_tags_differ(comm: MPI.Intracomm) -> None:
    """Calls that are under way together never share tags: what arrives cannot be mistaken."""
    session = get_session(comm)
    calls = [started(comm, "allgather", salt, algorithm="ring") for salt in range(3)]
    assert session.tags.background_next == 3 * most_tags(SIZE, 1)
    hiercoll.waitall([request for request, *_ in calls])


def test_shared_memory_is_refused(on_layout: Callable[[str], MPI.Intracomm]) -> None:
    comm = on_layout(layouts()[-1])
    with pytest.raises(ConstraintError, match="shares no memory"):
        hiercoll.ialltoall(comm, np.arange(SIZE), algorithm="grouped", memory="shared")
    with pytest.raises(ConstraintError, match="shares no memory"):
        hiercoll.iallgather(comm, np.arange(2), algorithm="shared")
    counts = np.ones(SIZE, int)
    with pytest.raises(ConstraintError, match="shares no memory"):
        hiercoll.ialltoallv(comm, [np.arange(SIZE), counts], [np.empty(SIZE, int), counts], algorithm="aggregate")


def test_more_tags_than_there_are(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused on all ranks; a small range of tags is used again and again."""
    session = get_session(comm)
    monkeypatch.setattr(session.tags, "background_next", 0)
    monkeypatch.setattr(session.tags, "count", 2 * most_tags(SIZE, 1))
    for salt in range(5):
        request, expected, _ = started(comm, "alltoall", salt, algorithm="bruck")
        assert session.tags.background_next <= 2 * most_tags(SIZE, 1)
        np.testing.assert_array_equal(request.wait(), expected)
    with pytest.raises(ConstraintError, match=r"at most .* tags"):
        hiercoll.iallgather(comm, np.zeros(8), algorithm="ring", segments=8)


@pytest.mark.mpi(min_size=2)  # for one rank there is nothing to choose
@pytest.mark.parametrize("drop_in", [False, pytest.param(True, marks=needs_threads)])
def test_uneven_blocks_without_shared_memory(on_layout: Callable[[str], MPI.Intracomm], drop_in: bool) -> None:
    """Where what a table chooses has shared memory, the next best for blocks of this size serves, as with even ones."""
    comm = on_layout(f"1x{SIZE}")
    best, small, large = Variant("shared"), Variant("ring"), Variant("direct")
    figures = [
        Figure(size, variant, seconds, seconds, seconds, 8)
        for size, ranking in ((1, (best, small, large)), (4096, (best, large, small)))
        for seconds, variant in enumerate(ranking, 1)
    ]
    topology = hiercoll.get_topology(comm)
    setting = ("allgather", mpi_library(), "host", topology.node_sizes, topology.placement)
    hiercoll.configure(comm, table=Table((Entry(*setting, (Choice(1, best),), tuple(figures)),)))
    ran = {}
    for size in (1, 4096):
        send, recv = np.full(size, RANK, "u1"), np.empty((2, SIZE, size), "u1")
        counts = np.full(SIZE, size)
        if size > 1:
            counts[:2] += (7, -7)  # the mean is the same
            send = np.full(counts[RANK], RANK, "u1")
        even = hiercoll.iallgather(comm, np.full(size, RANK, "u1"), recv[0])
        if drop_in:
            uneven = hiercoll.Intracomm(comm).Iallgatherv(send, [recv[1], counts])
            ran[size] = even.name.split()[1], uneven.stand_in.name.split()[1]
            uneven.Wait()
        else:
            uneven = hiercoll.iallgatherv(comm, send, [recv[1], counts])
            ran[size] = even.name.split()[1], uneven.name.split()[1]
            uneven.wait()
        even.wait()
        np.testing.assert_array_equal(recv[1].ravel(), np.repeat(np.arange(SIZE), counts))
    assert ran == {1: ("ring", "ring"), 4096: ("direct", "direct")}


class Held:
    """An engine that has something to do until it is let go."""

    done = False

    def start(self) -> None: ...

    run = free = start

    def progress(self, block: bool) -> bool:
        return self.done


@needs_threads
def test_a_thread_whatever_other_communicators_may_have(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator with a rank that has no MPI_THREAD_MULTIPLE is made while a call on another one is under way: a
    rank that waits in the MPI library lets that call go on in a thread nevertheless."""
    assert progress.may_have_thread()  # from here on that is known, whatever is patched
    engine, other = Held(), comm.Dup()
    request = hiercoll.Request(get_session(comm), Plan(engine, "held", None, None))  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
        get_session(other)
    wanted: list[None] = []
    with monkeypatch.context() as patch:
        patch.setattr(progress, "want_thread", lambda: wanted.append(None))
        hiercoll.alltoall(comm, np.arange(SIZE), algorithm="native")
    engine.done = True
    request.wait()
    other.Free()
    assert wanted
