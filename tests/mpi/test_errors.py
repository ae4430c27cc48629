"""Bad input: a typed error that names rank, argument, expected and got, before data move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import WORLD
from mpi4py import MPI

import hiercoll
from hiercoll import (
    BufferOverlapError,
    BufferSizeError,
    BufferTypeError,
    CommunicatorError,
    ConstraintError,
    LayoutError,
    ParameterError,
    UnknownAlgorithmError,
)
from hiercoll.runtime import factory
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.watch import SECONDS
from hiercoll.runtime.window import untouched_bytes
from hiercoll.tables import Choice, Entry, Table, Variant

RANK, SIZE = WORLD.rank, WORLD.size
GOOD = np.zeros(4 * SIZE)


def read_only() -> np.ndarray:
    """An array that must not be written."""
    array = np.zeros(4 * SIZE)
    array.flags.writeable = False
    return array


def overlapping() -> tuple[np.ndarray, np.ndarray]:
    """Two arrays that share memory."""
    whole = np.zeros(6 * SIZE)
    return whole[: 4 * SIZE], whole[2 * SIZE :]


BAD: list[tuple[str, type[Exception], str, Callable[[], tuple[Any, Any, dict[str, Any]]]]] = [
    ("recv too small", BufferSizeError, "recvbuf", lambda: (GOOD, np.zeros(3 * SIZE), {})),
    ("recv too large", BufferSizeError, "recvbuf", lambda: (GOOD, np.zeros(5 * SIZE), {})),
    ("dtypes differ in size", BufferSizeError, "recvbuf", lambda: (GOOD, np.zeros(4 * SIZE, "f4"), {})),
    ("dtypes differ in kind", BufferTypeError, "recvbuf", lambda: (GOOD, np.zeros(4 * SIZE, "i8"), {})),
    ("send not contiguous", BufferTypeError, "sendbuf", lambda: (np.zeros((4 * SIZE, 2))[:, 0], None, {})),
    ("recv not contiguous", BufferTypeError, "recvbuf", lambda: (GOOD, np.zeros((4 * SIZE, 2))[:, 0], {})),
    ("recv read-only", BufferTypeError, "recvbuf", lambda: (GOOD, read_only(), {})),
    ("recv read-only bytes", BufferTypeError, "recvbuf", lambda: (GOOD, bytes(32 * SIZE), {})),
    ("objects", BufferTypeError, "sendbuf", lambda: (np.array([None] * SIZE), None, {})),
    ("not a buffer", BufferTypeError, "sendbuf", lambda: (17, None, {})),
    ("a list of numbers", BufferTypeError, "sendbuf", lambda: ([1.0, 2.0, 3.0], None, {})),
    ("overlap", BufferOverlapError, "recvbuf", lambda: (*overlapping(), {})),
    ("the same buffer", BufferOverlapError, "recvbuf", lambda: (GOOD, GOOD, {})),
    ("in place without recv", BufferTypeError, "recvbuf", lambda: (MPI.IN_PLACE, None, {})),
    ("count too large", BufferSizeError, "sendbuf", lambda: ([GOOD, 5, MPI.DOUBLE], np.zeros(5 * SIZE), {})),
    ("displacement", BufferSizeError, "sendbuf", lambda: ([GOOD, (4, 1), MPI.DOUBLE], np.zeros(4 * SIZE), {})),
    (
        "counts differ",
        BufferSizeError,
        "recvbuf",
        lambda: ([GOOD, 4, MPI.DOUBLE], [np.zeros(4 * SIZE), 3, MPI.DOUBLE], {}),
    ),
    ("a mask", BufferTypeError, "sendbuf", lambda: (np.ma.masked_array(GOOD, GOOD > 1), None, {})),
    ("null datatype", BufferTypeError, "sendbuf", lambda: ([GOOD, 2, MPI.DATATYPE_NULL], np.zeros(4 * SIZE), {})),
    ("not a name", UnknownAlgorithmError, "algorithm", lambda: (GOOD, None, {"algorithm": ["bruck"]})),
    ("a list", ParameterError, "radix", lambda: (GOOD, None, {"algorithm": "bruck", "radix": [2]})),
    ("unknown algorithm", UnknownAlgorithmError, "algorithm", lambda: (GOOD, None, {"algorithm": "brook"})),
    ("unknown parameter", ParameterError, "speed", lambda: (GOOD, None, {"algorithm": "bruck", "speed": 3})),
    ("parameter of auto", ParameterError, "radix", lambda: (GOOD, None, {"radix": 2})),
    ("parameter of native", ParameterError, "radix", lambda: (GOOD, None, {"algorithm": "native", "radix": 2})),
    ("out of range", ParameterError, "radix", lambda: (GOOD, None, {"algorithm": "bruck", "radix": 1})),
    ("wrong type", ParameterError, "radix", lambda: (GOOD, None, {"algorithm": "bruck", "radix": 2.5})),
    ("not a choice", ParameterError, "form", lambda: (GOOD, None, {"algorithm": "grouped", "form": "ring"})),
    ("not in place", ConstraintError, "pairwise", lambda: (MPI.IN_PLACE, np.zeros(SIZE), {"algorithm": "pairwise"})),
]


@pytest.mark.parametrize("init", [False, True], ids=["call", "init"])
@pytest.mark.parametrize(("error", "named", "make"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_bad_input(
    error: type[Exception],
    named: str,
    make: Callable[[], tuple[Any, Any, dict[str, Any]]],
    init: bool,
    comm: MPI.Intracomm,
) -> None:
    """Refused on every rank, receive buffer untouched, and the communicator still works."""
    send, recv, options = make()
    before = recv.tobytes() if isinstance(recv, np.ndarray) else None
    call = hiercoll.alltoall_init if init else hiercoll.alltoall
    with pytest.raises(error, match=named) as raised:
        call(comm, send, recv, **options)
    assert isinstance(raised.value, hiercoll.ArgumentError)
    assert raised.value.expected and raised.value.argument
    if before is not None:
        assert recv.tobytes() == before
    assert np.array_equal(hiercoll.allgather(comm, np.array([RANK])).ravel(), np.arange(SIZE))


@pytest.mark.mpi(min_size=2)  # one rank divides everything
def test_elements_that_the_ranks_do_not_divide(comm: MPI.Intracomm) -> None:
    """Send buffers of any other number of elements than a multiple of the ranks."""
    for send in (np.zeros(SIZE + 1), np.zeros(SIZE - 1)):
        with pytest.raises(BufferSizeError, match="sendbuf") as raised:
            hiercoll.alltoall(comm, send)
        assert raised.value.rank == RANK


HOW: list[dict[str, Any]] = [{"transport": "nonsense"}, {"transport": "staged"}, {"stream": "x"}, {"stream": True}]
each_wrong_way = pytest.mark.parametrize("how", HOW, ids=str)
each_collective = pytest.mark.parametrize("collective", ["alltoall", "allgather"])


def way_is_refused(comm: MPI.Intracomm, collective: str, items: int, how: dict[str, Any], *, known: bool) -> None:
    """A call, of which an earlier one may have left the plan, with a wrong transport or stream."""
    call, (name,) = getattr(hiercoll, collective), how
    send = np.arange(items * (SIZE if collective == "alltoall" else 1))
    recv = np.full(items * SIZE, -1)
    if known:
        call(comm, send, recv)
    with pytest.raises(ParameterError, match=name) as raised:
        call(comm, send, recv, **how)
    assert raised.value.rank == RANK


@each_wrong_way
@each_collective
def test_ways_of_unknown_buffers(comm: MPI.Intracomm, collective: str, how: dict[str, Any]) -> None:
    """What is no transport for such buffers, or no stream, is refused."""
    way_is_refused(comm, collective, 2, how, known=False)


@each_wrong_way
@each_collective
def test_ways_of_known_buffers(comm: MPI.Intracomm, collective: str, how: dict[str, Any]) -> None:
    """The same for buffers of an earlier call."""
    way_is_refused(comm, collective, 2, how, known=True)


@pytest.mark.parametrize("how", HOW[:2], ids=str)
@each_collective
def test_ways_of_empty_blocks(comm: MPI.Intracomm, collective: str, how: dict[str, Any]) -> None:
    """The same where there is nothing to be sent."""
    way_is_refused(comm, collective, 0, how, known=False)


@pytest.mark.mpi(min_size=2)
def test_constraint(on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """The constraint that does not hold is named, alike on all ranks."""
    comm = on_layout("+".join(["1", str(SIZE - 1)]))
    with pytest.raises(ConstraintError, match="leaders <= the smallest node"):
        hiercoll.allgather(comm, np.zeros(1), algorithm="hierarchical", leaders=2)


def test_communicators() -> None:
    """Null, freed, and not communicators at all."""
    freed = WORLD.Dup()
    freed.Free()
    for comm in (freed, MPI.COMM_NULL, None, 3, WORLD.group):
        with pytest.raises(CommunicatorError, match="comm"):
            hiercoll.alltoall(comm, GOOD)
        with pytest.raises(CommunicatorError, match="comm"):
            hiercoll.get_topology(comm)


@pytest.mark.mpi(min_size=2)
def test_intercommunicator() -> None:
    """An intercommunicator is refused."""
    half = WORLD.Split(RANK % 2, RANK)
    inter = half.Create_intercomm(0, WORLD, 1 - RANK % 2)
    with pytest.raises(CommunicatorError, match="Intercomm"):
        hiercoll.alltoall(inter, GOOD)
    inter.Free()
    half.Free()


@pytest.mark.parametrize("layout", ["2y2", "0x3", "3+", "2x2:spiral", "-1", "1,2,x", f"{SIZE + 1}x1", f"1x{SIZE + 1}"])
def test_layouts(layout: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A malformed HIERCOLL_NODES is refused by name."""
    monkeypatch.setenv("HIERCOLL_NODES", layout)
    with pytest.raises(LayoutError, match="HIERCOLL_NODES") as raised:
        hiercoll.get_topology(comm)
    assert raised.value.rank == RANK


def test_empty_layout(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as unset."""
    monkeypatch.setenv("HIERCOLL_NODES", "")
    assert hiercoll.get_topology(comm).size == SIZE


@pytest.mark.mpi(min_size=2)  # one rank agrees with itself
def test_layouts_that_differ(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Different values on different ranks are an error on all, not a hang."""
    monkeypatch.setenv("HIERCOLL_NODES", f"{SIZE}x1" if RANK else f"1x{SIZE}")
    with pytest.raises(LayoutError, match="the same value on every rank"):
        hiercoll.get_topology(comm)


@pytest.mark.mpi(min_size=2)  # one rank agrees with itself
def test_sizes_that_differ_in_shared_memory(comm: MPI.Intracomm) -> None:
    """Found when the window is made, on all ranks, before anything is written to it."""
    send = np.zeros(SIZE * (2 if RANK else 1))
    with pytest.raises(BufferSizeError, match="the same on all ranks"):
        hiercoll.alltoall(comm, send, algorithm="grouped", memory="shared")
    with pytest.raises(BufferSizeError, match="the same on all ranks"):
        hiercoll.alltoall_init(comm, send, algorithm="pairwise")


def test_too_little_shared_memory(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that the host cannot hold is refused on all ranks instead of killing the job."""
    monkeypatch.setattr(factory, "free_shared_memory", lambda: 1000)
    with pytest.raises(ConstraintError, match="places in /dev/shm"):
        hiercoll.alltoall(comm, np.zeros(SIZE * 1000), algorithm="grouped", memory="shared")
    assert hiercoll.alltoall(comm, np.zeros(SIZE * 1000), algorithm="grouped").shape == (SIZE * 1000,)


@pytest.mark.parametrize("call", [hiercoll.alltoall, hiercoll.alltoall_init])
def test_too_little_shared_memory_on_one_host(
    on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    """Refused on the other hosts too."""
    comm = on_layout(f"{SIZE}x1")
    monkeypatch.setattr(factory, "free_shared_memory", lambda: 1000 if RANK == 0 else None)
    with pytest.raises(ConstraintError, match="places in /dev/shm"):
        call(comm, np.zeros(SIZE * 1000), algorithm="grouped", memory="shared")
    assert hiercoll.alltoall(comm, np.zeros(SIZE), algorithm="grouped").shape == (SIZE,)


@pytest.mark.mpi(min_size=2)  # one rank needs no window
def test_shared_memory_that_is_promised(
    on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system counts pages as taken when they are touched: windows that are made and not used yet need room, too."""
    comm, send = on_layout(f"1x{SIZE}"), np.arange(60 * 512.0) + RANK
    before = untouched_bytes()
    monkeypatch.setattr(factory, "free_shared_memory", lambda: before + 100 * 4096 * SIZE)
    first = hiercoll.allgather_init(comm, send, algorithm="shared")
    with pytest.raises(ConstraintError, match="places in /dev/shm"):
        hiercoll.allgather_init(comm, send, algorithm="shared")
    first()
    with hiercoll.allgather_init(comm, send, algorithm="shared") as second:
        np.testing.assert_array_equal(second(), np.arange(60 * 512.0) + np.arange(SIZE)[:, None])
    first.free()


@pytest.mark.parametrize("collective", ["allgather", "alltoall"])
@pytest.mark.parametrize("timeout", [0, 30])
def test_auto_does_without_shared_memory(
    on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, collective: str, timeout: float
) -> None:
    """Where a table chooses it and one host has too little, calls and plans are the MPI library's own, on all ranks."""
    comm = on_layout(f"{SIZE}x1")
    topology = hiercoll.get_topology(comm)
    variant = Variant("shared") if collective == "allgather" else Variant("grouped", {"memory": "shared"})
    where = (collective, mpi_library(), "host", topology.node_sizes, topology.placement)
    entry = Entry(*where, (Choice(1, variant),))
    hiercoll.configure(comm, table=Table((entry,)), timeout=timeout)
    monkeypatch.setattr(factory, "free_shared_memory", lambda: 1000 if RANK == 0 else None)
    ours, rows = hiercoll.Intracomm(comm), np.arange(1000 * SIZE) + 10**6 * RANK
    for _ in range(3):
        if collective == "alltoall":
            recv, want = np.empty_like(rows), np.arange(1000) + 1000 * RANK + 10**6 * np.arange(SIZE)[:, None]
            np.testing.assert_array_equal(hiercoll.alltoall(comm, rows).reshape(SIZE, -1), want)
            ours.Alltoall(rows, recv)
            np.testing.assert_array_equal(recv.reshape(SIZE, -1), want)
            with hiercoll.alltoall_init(comm, rows) as plan:
                np.testing.assert_array_equal(plan().reshape(SIZE, -1), want)
        else:
            recv, counts = np.empty(1000 * SIZE, int), np.full(SIZE, 1000)
            want = np.arange(1000) + 10**6 * np.arange(SIZE)[:, None]
            np.testing.assert_array_equal(hiercoll.allgather(comm, rows[:1000]), want)
            ours.Allgatherv(rows[:1000], [recv, counts])
            np.testing.assert_array_equal(recv.reshape(SIZE, -1), want)
            request = ours.Allgather_init(rows[:1000], recv)
            request.Start()
            request.Wait()
            request.Free()
    assert hiercoll.alltoall(comm, np.zeros(SIZE), algorithm="grouped").shape == (SIZE,)


@pytest.mark.parametrize("timeout", [30, 30.5])
def test_deadlines_do_not_disturb(comm: MPI.Intracomm, timeout: float) -> None:
    """With a deadline set, everything works as before; 0 takes it away."""
    hiercoll.configure(comm, timeout=timeout)
    send = np.arange(comm.size) + 10 * comm.rank
    counts = np.ones(comm.size, int)
    for algorithm in ("auto", "native", "bruck", "eager"):
        result = hiercoll.alltoall(comm, send, algorithm=algorithm)
        np.testing.assert_array_equal(result, np.arange(comm.size) * 10 + comm.rank)
        hiercoll.alltoallv(comm, [send, counts], [result, counts])
    with hiercoll.allgather_init(comm, send) as plan:
        assert plan()[-1, 0] == 10 * (comm.size - 1)
    for algorithm in ("auto", "native", "pairwise"):
        with hiercoll.alltoallv_init(comm, [send, counts], [result, counts], algorithm=algorithm) as uneven:
            uneven()
            assert uneven.watch is get_session(comm).watch
    np.testing.assert_array_equal(hiercoll.ialltoall(comm, send).wait(), np.arange(comm.size) * 10 + comm.rank)
    watch = get_session(comm).watch
    assert watch is not None and watch.number >= 10 and all(entry[SECONDS] is not None for entry in watch.record)
    hiercoll.configure(comm, timeout=0)
    assert get_session(comm).watch is None
    for wrong in (-1, float("inf"), "x", [1]):
        with pytest.raises(ParameterError, match="timeout"):
            hiercoll.configure(comm, timeout=wrong)
