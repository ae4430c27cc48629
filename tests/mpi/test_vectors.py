"""Blocks of uneven sizes: every algorithm on every layout, counts that change, buffers of every spelling."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import HAS_PERSISTENT, WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll import BufferSizeError, BufferTypeError, DeviceError, ParameterError, cuda
from hiercoll.algorithms import REGISTRY
from hiercoll.collectives import ALLTOALLV
from hiercoll.cuda.late import LateDevice
from hiercoll.tuner import Spread
from hiercoll.tuning.policy import Wanted

RANK, SIZE = WORLD.rank, WORLD.size
V_CASES: list[tuple[str, dict[str, Any]]] = [
    ("auto", {}),
    ("native", {}),
    *((name, params) for name, entry in REGISTRY["alltoallv"].items() for params in entry.variants()),
    ("aggregate", {"limit": 0}),
    ("aggregate", {"limit": 60, "window": 2}),
    ("aggregate", {"limit": 1 << 20}),
]
G_CASES: list[tuple[str, dict[str, Any]]] = [
    ("auto", {}),
    ("native", {}),
    *((name, params) for name, entry in REGISTRY["allgather"].items() for params in entry.variants()),
]
KINDS = ["uniform", "skewed", "sparse", "empty", "one"]


def counts(kind: str, seed: int) -> np.ndarray[Any, Any]:
    """Items from each rank (row) to each rank, the same on all ranks."""
    choice = np.random.default_rng(seed)
    made = {
        "uniform": lambda: choice.integers(0, 40, (SIZE, SIZE)),
        "skewed": lambda: np.minimum(choice.zipf(1.5, (SIZE, SIZE)), 5000),
        "sparse": lambda: choice.integers(1, 40, (SIZE, SIZE)) * (choice.random((SIZE, SIZE)) < 0.1),
        "empty": lambda: np.zeros((SIZE, SIZE), int),
        "one": lambda: np.where(np.arange(SIZE * SIZE).reshape(SIZE, SIZE) == seed % (SIZE * SIZE), 700, 0),
    }
    return made[kind]().astype(int)


def items(source: int, target: int, number: int, salt: int) -> np.ndarray[Any, Any]:
    """What a rank sends to another: no two alike."""
    return (np.arange(number) + 1000 * (source * SIZE + target) + salt).astype("i4")


def alltoallv(comm: MPI.Intracomm, table: np.ndarray[Any, Any], salt: int, gap: int = 0, **options: Any) -> None:
    """One call, checked, the receive buffer poisoned, ``gap`` items between blocks, which stay as they are."""
    scounts, rcounts = table[RANK], table[:, RANK]
    sdispls, rdispls = ((np.cumsum(n + gap) - n - gap)[::1] for n in (scounts, rcounts))
    send = np.full(int((scounts + gap).sum()), -7, "i4")
    expected = np.full(int((rcounts + gap).sum()), -1, "i4")
    for peer in range(SIZE):
        send[sdispls[peer] : sdispls[peer] + scounts[peer]] = items(RANK, peer, scounts[peer], salt)
        expected[rdispls[peer] : rdispls[peer] + rcounts[peer]] = items(peer, RANK, rcounts[peer], salt)
    recv = np.full_like(expected, -1)
    result = hiercoll.alltoallv(comm, [send, (scounts, sdispls)], [recv, (rcounts, rdispls)], **options)
    assert result is recv
    np.testing.assert_array_equal(recv, expected)


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize(("algorithm", "params"), V_CASES)
def test_alltoallv(
    on_layout: Callable[[str], MPI.Intracomm], algorithm: str, params: dict[str, Any], layout: str
) -> None:
    """Counts that change on every call, with and without gaps."""
    comm = on_layout(layout)
    for seed, kind in enumerate(KINDS * 2):
        alltoallv(comm, counts(kind, seed), seed, gap=seed % 3, algorithm=algorithm, **params)


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize(("algorithm", "params"), G_CASES)
def test_allgatherv(
    on_layout: Callable[[str], MPI.Intracomm], algorithm: str, params: dict[str, Any], layout: str
) -> None:
    """The same, in place too."""
    comm = on_layout(layout)
    entry = REGISTRY["allgather"].get(algorithm)
    if entry and entry.refusal(hiercoll.get_topology(comm), params) is not None:
        pytest.skip("not on this layout")
    for seed, kind in enumerate(KINDS):
        numbers, gap = counts(kind, seed)[0], seed % 3
        displs = np.cumsum(numbers + gap) - numbers - gap
        expected = np.full(int((numbers + gap).sum()), -1, "i4")
        for peer in range(SIZE):
            expected[displs[peer] : displs[peer] + numbers[peer]] = items(peer, 0, numbers[peer], seed)
        for inplace in (False, True):
            recv = np.full_like(expected, -1)
            own = items(RANK, 0, numbers[RANK], seed)
            if inplace:
                recv[displs[RANK] : displs[RANK] + numbers[RANK]] = own
            send: Any = MPI.IN_PLACE if inplace else own
            hiercoll.allgatherv(comm, send, [recv, (numbers, displs)], algorithm=algorithm, **params)
            np.testing.assert_array_equal(recv, expected)


@pytest.mark.parametrize("algorithm", ["auto", "native", "scatter_destination", "aggregate"])
def test_in_place(on_layout: Callable[[str], MPI.Intracomm], algorithm: str) -> None:
    """The same sizes both ways, as MPI has it."""
    comm = on_layout(layouts()[-1])
    table = counts("uniform", 1)
    table = table + table.T
    numbers, at = table[RANK], np.cumsum(table[RANK]) - table[RANK]
    recv = np.concatenate([items(RANK, peer, table[RANK, peer], 0) for peer in range(SIZE)])
    expected = np.concatenate([items(peer, RANK, table[RANK, peer], 0) for peer in range(SIZE)])
    hiercoll.alltoallv(comm, MPI.IN_PLACE, [recv, (numbers, at)], algorithm=algorithm)
    np.testing.assert_array_equal(recv, expected)


@pytest.mark.parametrize("algorithm", ["auto", "native", "scatter_destination"])
def test_other_elements_on_one_side(on_layout: Callable[[str], MPI.Intracomm], algorithm: str) -> None:
    """A column of a matrix sent, and received as plain items, on some ranks only: legal, and no
    rank knows of the others'."""
    comm = on_layout(layouts()[-1])
    column = MPI.INT.Create_vector(3, 1, 2).Create_resized(0, 24).Commit()
    plain = items(RANK, 0, 3 * SIZE, 5)
    matrix = np.full((3 * SIZE, 2), -9, "i4")
    matrix[:, 0] = plain
    spread = RANK % 2 == 0
    send: Any = [matrix, [1] * SIZE, None, column] if spread else [plain, [3] * SIZE, None, MPI.INT]
    into = np.full((3 * SIZE, 2), -1, "i4")
    recv: Any = (
        [into, [1] * SIZE, None, column] if not spread else [into.reshape(-1)[: 3 * SIZE], [3] * SIZE, None, MPI.INT]
    )
    hiercoll.alltoallv(comm, send, recv, algorithm=algorithm)
    expected = np.concatenate([items(peer, 0, 3 * SIZE, 5)[3 * RANK : 3 * RANK + 3] for peer in range(SIZE)])
    np.testing.assert_array_equal(into[:, 0] if not spread else into.reshape(-1)[: 3 * SIZE], expected)
    if not spread:
        assert (into[:, 1] == -1).all()
    column.Free()


@pytest.mark.parametrize("algorithm", ["auto", "native", "scatter_destination", "aggregate"])
def test_plans(on_layout: Callable[[str], MPI.Intracomm], algorithm: str) -> None:
    """Several, started in turn and overlapping, between blocking calls."""
    comm = on_layout(layouts()[-1])
    made = []
    for seed in (1, 2):
        table = counts("uniform", seed)
        send = np.empty(table[RANK].sum(), "i4")
        recv = np.empty(table[:, RANK].sum(), "i4")
        plan = hiercoll.alltoallv_init(comm, [send, table[RANK]], [recv, table[:, RANK]], algorithm=algorithm)
        made.append((plan, table, send, recv))
    for salt in range(3):
        for plan, table, send, recv in made:
            send[:] = np.concatenate([items(RANK, peer, table[RANK, peer], salt) for peer in range(SIZE)])
            recv[:] = -1
            plan.start()
        alltoallv(comm, counts("skewed", salt), salt, algorithm=algorithm)
        for plan, table, _, recv in made:
            assert plan.wait() is recv
            expected = np.concatenate([items(peer, RANK, table[peer, RANK], salt) for peer in range(SIZE)])
            np.testing.assert_array_equal(recv, expected)
    for plan, *_ in made:
        plan.free()
    numbers = counts("uniform", 3)[0]
    recv = np.full(numbers.sum(), -1, "i4")
    displaced = np.concatenate([np.full(3, -5, "i4"), items(RANK, 0, numbers[RANK], 0)])
    hiercoll.allgatherv(
        comm,
        [displaced, numbers[RANK], 3, MPI.INT],
        [recv, numbers],
        algorithm=algorithm if algorithm == "native" else "auto",
    )
    np.testing.assert_array_equal(recv, np.concatenate([items(peer, 0, numbers[peer], 0) for peer in range(SIZE)]))
    recv[:] = -1
    with hiercoll.allgatherv_init(comm, items(RANK, 0, numbers[RANK], 0), [recv, numbers]) as plan:
        plan()
    np.testing.assert_array_equal(recv, np.concatenate([items(peer, 0, numbers[peer], 0) for peer in range(SIZE)]))


@pytest.mark.parametrize("numbers", [list, np.array])
@pytest.mark.parametrize("settled", [False, True])
def test_bad_arguments(comm: MPI.Intracomm, numbers: Callable[[list[int]], Any], settled: bool) -> None:
    """Typed errors before anything moves, where native has won too; the communicator stays usable."""
    array, ones = np.zeros(SIZE, "i4"), numbers([1] * SIZE)
    other = np.zeros(SIZE, "i4")
    if settled:
        learner = hiercoll.runtime.lifetime.get_session(comm).policy.learner(Wanted(ALLTOALLV, 0, False))
        if learner is not None:
            learner.begin(Spread)
            assert learner.is_fixed
    with pytest.raises(BufferSizeError, match="fit the buffer"):
        hiercoll.alltoallv(comm, [array, numbers([2] * SIZE)], [other, numbers([2] * SIZE)])
    with pytest.raises(BufferTypeError, match="items"):
        hiercoll.alltoallv(comm, [array, numbers([1] * (SIZE + 1))], [other, ones])
    with pytest.raises(BufferTypeError, match="sendbuf"):
        hiercoll.alltoallv(comm, "text", [other, ones])
    for strange in (5, {}, object()):
        with pytest.raises(BufferTypeError, match="sendbuf"):
            hiercoll.alltoallv(comm, [array, ones, None, strange], [other, ones])
    with pytest.raises(BufferTypeError, match="recvbuf"):
        hiercoll.alltoallv(comm, [array, ones], [other, 2**70])
    with pytest.raises(BufferSizeError, match="itself"):
        hiercoll.alltoallv(comm, [array, numbers([0] * SIZE)], [other, ones])
    with pytest.raises(BufferSizeError, match="at least 0"):
        hiercoll.alltoallv(comm, [array, numbers([-1] * SIZE)], [other, ones])
    with pytest.raises(BufferSizeError, match="itself"):
        hiercoll.allgatherv(comm, array[:0], [other, ones])
    with pytest.raises(ParameterError, match="limit"):
        hiercoll.alltoallv(comm, [array, ones], [other, ones], limit=-1)
    with pytest.raises(ParameterError, match="window"):
        hiercoll.alltoallv(comm, [array, ones], [other, ones], algorithm="aggregate", window=0)
    alltoallv(comm, counts("uniform", 1), 1)


@pytest.mark.skipif(not HAS_PERSISTENT, reason="this MPI library has no persistent collectives")
def test_a_view_on_one_rank(comm: MPI.Intracomm) -> None:
    """Of what hiercoll does not serve, a displacement before the start of the buffer, all ranks leave a
    plan to the MPI library."""
    dropin = hiercoll.Intracomm(comm)
    ones, places = np.ones(SIZE, int), np.arange(SIZE)
    whole, back = np.full(SIZE + 1, -1), int(RANK == SIZE - 1)
    request = dropin.Alltoallv_init([10 * RANK + places, ones], [whole[back:], ones, places - back, MPI.INT64_T])
    request.Start()
    request.Wait()
    request.Free()
    np.testing.assert_array_equal(whole[:SIZE], 10 * places + RANK)


class Again:
    """Tables of counts that come again, in the same buffers; of some, only the rows of other ranks differ."""

    def __init__(self, seed: int) -> None:
        choice = np.random.default_rng(seed)
        first = choice.integers(0, 40, (SIZE, SIZE))
        self.tables = [first]
        for changed in range(4):
            table = self.tables[-1].copy()
            row = changed % SIZE
            table[row] = choice.permutation(table[row]) * int(choice.integers(0, 3))
            self.tables.append(table)
        self.tables.append(first * 60)  # large blocks
        most = max(int(table.sum(axis=axis).max()) for table in self.tables for axis in (0, 1))
        self.send, self.recv = np.empty(most, "i4"), np.empty(most, "i4")

    def fill(self, which: int, salt: int) -> tuple[list[Any], list[Any]]:
        """Arguments of a call."""
        table = self.tables[which]
        scounts, rcounts = table[RANK].copy(), table[:, RANK].copy()
        sent = [items(RANK, peer, scounts[peer], salt) for peer in range(SIZE)]
        self.send[: scounts.sum()] = np.concatenate(sent)
        self.recv[:] = -1
        return [self.send, scounts], [self.recv, rcounts]

    def check(self, which: int, salt: int) -> None:
        rcounts = self.tables[which][:, RANK]
        expected = np.concatenate([items(peer, RANK, rcounts[peer], salt) for peer in range(SIZE)])
        np.testing.assert_array_equal(self.recv[: len(expected)], expected)
        assert (self.recv[len(expected) :] == -1).all()


ORDER = [0, 0, 0, 0, 1, 1, 0, 2, 1, 5, 5, 3, 5, 4, 0, 0, 4, 3, 2, 1, 0, 5, 5, 1, 1, 4]
REPEATED = [case for case in V_CASES if case[0] not in ("auto",)]


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize(("algorithm", "params"), REPEATED)
def test_counts_that_come_again(
    on_layout: Callable[[str], MPI.Intracomm], algorithm: str, params: dict[str, Any], layout: str
) -> None:
    """Calls are kept by their sizes; what changes with the sizes of other ranks of the node is noticed."""
    comm, calls = on_layout(layout), Again(3)
    for salt, which in enumerate(ORDER):
        hiercoll.alltoallv(comm, *calls.fill(which, salt), algorithm=algorithm, **params)
        calls.check(which, salt)


@pytest.mark.parametrize("layout", layouts())
def test_kept_allgatherv(on_layout: Callable[[str], MPI.Intracomm], layout: str) -> None:
    """Shared memory that grows moves: what was kept there is forgotten."""
    comm = on_layout(layout)
    for algorithm in ("shared", "ring", "auto"):
        recv = np.empty(700 * SIZE * SIZE)
        for salt, size in enumerate([3, 3, 5, 3, 700, 700, 3, 5, 3]):
            sizes = np.arange(1, SIZE + 1) * size
            recv[:] = -1
            hiercoll.allgatherv(comm, np.full(sizes[RANK], 10.0 * RANK + salt), [recv, sizes], algorithm=algorithm)
            expected = np.repeat(10.0 * np.arange(SIZE) + salt, sizes)
            np.testing.assert_array_equal(recv[: len(expected)], expected)


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("limit", [60, 4096])
def test_deadlines_and_calls_that_come_again(
    on_layout: Callable[[str], MPI.Intracomm], layout: str, limit: int
) -> None:
    """The same step by step, as a deadline has it, and with counts that are overwritten between starts."""
    comm = on_layout(layout)
    hiercoll.configure(comm, timeout=60)
    calls = [Again(1), Again(2)]
    for salt, which in enumerate(ORDER[:16]):
        for each in calls:
            hiercoll.alltoallv(comm, *each.fill(which, salt), algorithm="aggregate", limit=limit)
            each.check(which, salt)
    hiercoll.configure(comm, timeout=0)
    sendbuf, recvbuf = ([array.view("u1"), 4 * sizes] for array, sizes in calls[0].fill(2, 0))
    with hiercoll.alltoallv_init(comm, sendbuf, recvbuf, algorithm="aggregate", limit=limit) as plan:
        sendbuf[1][:] = recvbuf[1][:] = 0
        for salt in range(5):
            calls[0].fill(2, salt)
            plan.start()
            while not plan.test():
                pass
            calls[0].check(2, salt)


def test_kept_calls_are_few(comm: MPI.Intracomm) -> None:
    """They hold no arrays, and go when there are too many."""
    session = hiercoll.runtime.lifetime.get_session(comm)
    session.plans.drop_all()
    for size in range(200):
        sizes = np.full(SIZE, size)
        send, recv = np.zeros(size * SIZE), np.zeros(size * SIZE)
        before = sys.getrefcount(send), sys.getrefcount(recv), sys.getrefcount(sizes)
        for _ in range(2):  # a plan is made when a call comes again
            hiercoll.alltoallv(comm, [send, sizes], [recv, sizes], algorithm="aggregate")
        assert before == (sys.getrefcount(send), sys.getrefcount(recv), sys.getrefcount(sizes))
    assert 1 <= len(session.plans) <= 128


def test_arrays_are_not_taken_for_specifications(comm: MPI.Intracomm) -> None:
    """An array of two rows is a buffer of even blocks, not a buffer with counts; one may be empty."""
    for _ in range(3):
        send, recv = np.arange(2 * SIZE).reshape(2, SIZE) + 100 * RANK, np.full((2, SIZE), -1)
        hiercoll.alltoallv(comm, send, recv, algorithm="aggregate")
        expected = np.stack([np.arange(2) + 2 * RANK + 100 * peer for peer in range(SIZE)])
        np.testing.assert_array_equal(recv.ravel(), expected.ravel())
        for algorithm in ("ring", "auto"):
            hiercoll.allgatherv(comm, np.full(2, RANK), recv, algorithm=algorithm)
            np.testing.assert_array_equal(recv.ravel(), np.repeat(np.arange(SIZE), 2))
            hiercoll.allgatherv(comm, np.empty(0), np.empty(0), algorithm=algorithm)


class OnDevice:
    """What says that it is in the memory of a device."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.__cuda_array_interface__ = {**array.__array_interface__, "version": 3}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("turns", [1, 3])
def test_sizes_that_ranks_do_not_agree_on(on_layout: Callable[[str], MPI.Intracomm], turns: int) -> None:
    """Within a node, through its buffer: what is more than the receiver has said goes nowhere."""
    comm = on_layout(f"1x{SIZE}")
    sent, received = np.full(SIZE, 5), np.full(SIZE, 3)
    sent[RANK] = received[RANK]
    for turn in range(turns):
        send, recv = np.full(5 * SIZE, RANK + turn), np.full(3 * SIZE + 5, -1)
        hiercoll.alltoallv(comm, [send, sent], [recv, received], algorithm="aggregate")
        np.testing.assert_array_equal(recv[3 * SIZE :], -1)
        np.testing.assert_array_equal(recv[: 3 * SIZE], np.repeat(np.arange(SIZE), 3) + turn)


@pytest.mark.parametrize("algorithm", ["ring", "native"])
def test_device_memory_is_refused(comm: MPI.Intracomm, algorithm: str) -> None:
    """However it is given, where there is none; and beside the host's, whatever there is."""
    send, recv, ones = OnDevice(np.zeros(1)), np.zeros(SIZE), np.ones(SIZE, int)
    for given in (send, [send, 1, MPI.DOUBLE]):
        with pytest.raises(DeviceError, match="CuPy and a CUDA driver"):
            hiercoll.allgatherv(comm, given, [recv, ones], algorithm=algorithm)
        with cuda.use(lambda address: LateDevice()), pytest.raises(BufferTypeError, match="as sendbuf, got host"):
            hiercoll.allgatherv(comm, given, [recv, ones], algorithm=algorithm)
    with pytest.raises(DeviceError, match="CuPy and a CUDA driver"):
        hiercoll.alltoallv(comm, [OnDevice(recv), ones], [recv, ones], algorithm="pairwise")
