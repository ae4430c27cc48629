"""Objects as messages of drop-in communicators: what mpi4py gives, in as few collectives as can be."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI
from mpi4py.util import pkl5

import hiercoll
from hiercoll.calls import dropin
from hiercoll.calls.objects import FIRST
from hiercoll.runtime.lifetime import forget, get_session

RANK, SIZE = WORLD.rank, WORLD.size
several = pytest.mark.mpi(min_size=2)
SMALL = FIRST - 8  # bytes of a pickled object that one message takes


@pytest.fixture(params=layouts())
def ours(request: pytest.FixtureRequest, on_layout: Callable[[str], MPI.Intracomm]) -> hiercoll.Intracomm:
    """On which hiercoll is set up."""
    comm = on_layout(request.param)
    get_session(comm)
    return hiercoll.Intracomm(comm)


def total(calls: dropin.Calls, name: str) -> int:
    """Whatever served them."""
    return calls[name] + calls[f"{name}, native"]


def pickled(nbytes: int, salt: int) -> bytes:
    """An object whose pickle has so many bytes."""
    frame = len(MPI.pickle.dumps(bytes(200))) - 200 if nbytes < 260 else len(MPI.pickle.dumps(bytes(nbytes))) - nbytes
    return bytes([salt % 256]) * (nbytes - frame)


OBJECTS: dict[str, Callable[[int], Any]] = {
    "nothing": lambda rank: None,
    "numbers": lambda rank: rank * 1000,
    "trees": lambda rank: {"rank": rank, "list": list(range(rank)), "more": ("x" * rank, None, 1.5)},
    "just fits": lambda rank: pickled(SMALL, rank),
    "one byte too long": lambda rank: pickled(SMALL + 1, rank),
    "long": lambda rank: list(range(rank, 3000)),
    "long on one": lambda rank: "x" * 100_000 if rank == SIZE - 1 else rank,
    "arrays": lambda rank: np.arange(rank * 100).reshape(-1, 10),
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_as_mpi4py_does(ours: hiercoll.Intracomm, make: Callable[[int], Any]) -> None:
    """The same results, again and again; the root of a broadcast gets a copy, too."""
    for turn in range(3):
        np.testing.assert_equal(ours.allgather(make(RANK + turn)), [make(rank + turn) for rank in range(SIZE)])
        mine = [make(RANK + peer) for peer in range(SIZE)]
        np.testing.assert_equal(ours.alltoall(mine), [make(rank + RANK) for rank in range(SIZE)])
        for root in range(SIZE):
            one = make(root + turn)
            found = ours.bcast(one if root == RANK else object, root)
            np.testing.assert_equal(found, one)
            assert found is not one or type(one) in (int, type(None), str, bytes)


def test_no_objects(ours: hiercoll.Intracomm) -> None:
    """A rank that has none for anybody."""
    found = ours.alltoall(None if RANK == 0 else list(range(SIZE)))
    assert found == [None, *[RANK] * (SIZE - 1)]


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_to_and_from_one_rank(ours: hiercoll.Intracomm, calls: dropin.Calls, make: Callable[[int], Any]) -> None:
    """By mpi4py, and observers see it."""
    for root in range(SIZE):
        expected = [make(rank) for rank in range(SIZE)] if root == RANK else None
        np.testing.assert_equal(ours.gather(make(RANK), root), expected)
        np.testing.assert_equal(ours.scatter(expected, root=root), make(RANK))
    assert calls == {"gather of objects, native": SIZE, "scatter of objects, native": SIZE}


@several
def test_small_objects_take_one_collective(ours: hiercoll.Intracomm, calls: dropin.Calls) -> None:
    """Larger ones a second one, even if that is on one rank only; within a node mpi4py serves them."""
    if len(get_session(ours).topology.nodes) == 1:
        ours.allgather(RANK)
        assert calls == {"allgather of objects, native": 1}
        return
    ours.allgather(RANK)
    ours.bcast(RANK)
    assert total(calls, "allgather") == total(calls, "bcast") == 1 and total(calls, "allgatherv") == 0
    ours.allgather("x" * 1000 if RANK == 0 else None)
    ours.bcast("x" * 1000)
    assert (total(calls, "allgather"), total(calls, "allgatherv"), total(calls, "bcast")) == (2, 1, 3)


def test_spelling_of_the_root_does_not_matter(ours: hiercoll.Intracomm) -> None:
    """It may differ between ranks."""
    root: Any = np.int64(SIZE - 1) if RANK else SIZE - 1
    assert ours.bcast(RANK, root) == SIZE - 1


def test_any_iterable(ours: hiercoll.Intracomm) -> None:
    """As mpi4py takes them, each as often as there are ranks."""
    assert ours.alltoall(RANK for _ in range(SIZE)) == list(range(SIZE))


@pytest.fixture
def pkl5s(ours: hiercoll.Intracomm) -> Iterator[pkl5.Intracomm]:
    """What pkl5 makes, as a drop-in communicator."""
    made = dropin.drop_in(pkl5.Intracomm(ours))
    assert type(made) is hiercoll.Pkl5Intracomm and isinstance(made, pkl5.Intracomm)
    part = made.Split()
    assert type(part) is hiercoll.Intracomm  # as pkl5's is mpi4py's
    part.Free()
    yield made
    forget(made)  # which has an attribute of pkl5's, too, and is freed by another name


LARGE = pkl5.pickle.THRESHOLD  # bytes of a buffer that is kept out of pickles
BUFFERS: dict[str, Callable[[int], Any]] = {
    "none": lambda rank: {"rank": rank},
    "one": lambda rank: np.full(LARGE // 8 + rank, rank, float),
    "several": lambda rank: [np.full(LARGE + 13 * number, rank + number, np.uint8) for number in range(rank % 3)],
    "on one": lambda rank: bytearray(b"x" * LARGE) if rank == SIZE - 1 else rank,
    "mixed": lambda rank: {"large": np.arange(LARGE, dtype=float), "small": np.arange(rank), "own": "x" * 1000},
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_buffers_out_of_band(pkl5s: pkl5.Intracomm, make: Callable[[int], Any]) -> None:
    """What pkl5 gives: equal objects, of which arrays are aligned and may be written to, and no two share memory."""
    for root in (0, SIZE - 1):
        one = make(root)
        np.testing.assert_equal(pkl5s.bcast(one if root == RANK else None, root), one)
        everyones = [make(rank) for rank in range(SIZE)] if root == RANK else None
        np.testing.assert_equal(pkl5s.gather(make(RANK), root), everyones)
        np.testing.assert_equal(pkl5s.scatter(everyones, root), make(RANK))
    every = pkl5s.allgather(make(RANK))
    np.testing.assert_equal(every, [make(rank) for rank in range(SIZE)])
    for each in every:
        if isinstance(each, np.ndarray):
            assert each.flags.aligned
            each[:] = -1
    mine = pkl5s.alltoall(make(RANK + peer) for peer in range(SIZE))
    np.testing.assert_equal(mine, [make(rank + RANK) for rank in range(SIZE)])


@several
def test_large_buffers_are_not_pickled(pkl5s: pkl5.Intracomm, calls: dropin.Calls) -> None:
    """They are broadcast where they lie, and gathered in one collective."""
    if len(get_session(pkl5s).topology.nodes) == 1:
        pkl5s.allgather(RANK)
        assert calls == {"allgather of objects, native": 1}
        return
    data = np.zeros(LARGE, np.uint8)
    pkl5s.bcast([data, data + 1, RANK])
    assert total(calls, "bcast") == 3
    pkl5s.allgather(data)
    assert (total(calls, "allgather"), total(calls, "allgatherv")) == (1, 1)
    pkl5s.alltoall([data] * SIZE)
    assert total(calls, "alltoall") == 1 and total(calls, "alltoallv") == 2


def test_pickles_of_the_programs_own(ours: hiercoll.Intracomm) -> None:
    """What unpickles gets what mpi4py gives it; what pickles gives bytes, or is refused as by mpi4py."""
    types = set()

    def loads(data: Any) -> Any:
        types.add(type(data))
        return pickle.loads(data) if data else None

    MPI.pickle.__init__(pickle.dumps, loads)  # type: ignore[misc]
    try:
        assert ours.allgather(RANK) == ours.alltoall([RANK] * SIZE) == list(range(SIZE)) and ours.bcast("x") == "x"
        assert types <= {MPI.buffer, bytes}
        MPI.pickle.__init__(lambda obj, protocol=None: bytearray(pickle.dumps(obj)), loads)  # type: ignore[misc]
        for call in (lambda: ours.allgather(RANK), lambda: ours.alltoall([RANK] * SIZE)):
            with pytest.raises(TypeError, match="expected bytes, bytearray found"):
                call()
    finally:
        MPI.pickle.__init__(pickle.dumps, pickle.loads)  # type: ignore[misc]
    with pytest.raises(Exception) as its:  # noqa: PT011
        ours.bcast(RANK, type("Index", (), {"__index__": lambda self: 0})())
    assert type(its.value) is TypeError


def test_other_pickles(ours: hiercoll.Intracomm) -> None:
    """As the program has configured them."""
    seen: list[Any] = []

    def dumps(obj: Any, protocol: Any = None) -> bytes:
        seen.append(obj)
        return pickle.dumps(("ours", obj), protocol)

    MPI.pickle.__init__(dumps, lambda data: pickle.loads(data)[1])  # type: ignore[misc]
    try:
        assert ours.allgather(RANK) == list(range(SIZE))
        assert ours.bcast("x" * 500) == "x" * 500
    finally:
        MPI.pickle.__init__(pickle.dumps, pickle.loads)  # type: ignore[misc]
    assert RANK in seen


def test_errors_are_mpi4pys(ours: hiercoll.Intracomm) -> None:
    """Before anything is sent; the communicator goes on."""
    with pytest.raises(ValueError, match=f"expecting {SIZE} items, got {SIZE + 1}"):
        ours.alltoall([None] * (SIZE + 1))
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        ours.allgather(lambda: None)
    ours.Set_errhandler(MPI.ERRORS_RETURN)
    with pytest.raises(MPI.Exception):
        ours.bcast(1, root=SIZE)
    with pytest.raises(MPI.Exception):
        ours.gather(1, SIZE)
    with pytest.raises(MPI.Exception):
        ours.scatter([1] * SIZE, SIZE)
    assert ours.allgather(RANK) == list(range(SIZE))
