"""Calls that are left to the MPI library, by the compiled engine without mpi4py's method."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import WORLD
from mpi4py import MPI

import hiercoll
from hiercoll.calls import routes
from hiercoll.calls.given import suits_mpi4py
from hiercoll.collectives import BCAST, get_collective
from hiercoll.runtime import compiled
from hiercoll.runtime.arguments import Arguments
from hiercoll.runtime.direct import COMBINE, COMBINE_AT, EXCHANGE, ROOTED, SPREAD, Direct, direct
from hiercoll.runtime.lifetime import get_session

SIZE, RANK = WORLD.size, WORLD.rank
ITEMS = 3
compiled_only = pytest.mark.skipif(compiled.load()[0] is None, reason="no compiled engine: mpi4py's methods are called")


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Iterator[MPI.Intracomm]:
    """On which "auto" stays native."""
    monkeypatch.setenv("HIERCOLL_LEARN", "0")
    monkeypatch.delenv("HIERCOLL_TABLE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    made = WORLD.Dup()
    yield made
    made.Free()


def tokens(rank: int, turn: int, items: int, kind: Any) -> Any:
    return (np.arange(items) + items * (rank + SIZE * turn)).astype(kind)


@pytest.mark.parametrize("name", ["alltoall", "allgather", "bcast", "allreduce", "gather", "scatter", "reduce"])
def test_what_the_function_is_called_with(name: str) -> None:
    """As mpi4py would; nothing where mpi4py's method has more to say."""
    record = get_collective(name)
    items = ITEMS * SIZE
    one, every = np.zeros(ITEMS), np.zeros(items)
    send, recv = {"allgather": (one, every), "gather": (one, every), "scatter": (every, one)}.get(
        name, (every, every + 1)
    )
    of_double = compiled.value_of(MPI.DOUBLE)
    count = items if name in ("bcast", "allreduce", "reduce") else ITEMS
    made = direct(WORLD, record, Arguments(send, recv))
    assert made is not None
    shapes = {"bcast": SPREAD, "allreduce": COMBINE, "gather": ROOTED, "scatter": ROOTED, "reduce": COMBINE_AT}
    assert made.shape == shapes.get(name, EXCHANGE)
    assert (made.name, made.recv_count, made.recv_type) == (name.capitalize(), count, of_double)
    if name != "bcast":
        assert (made.send_count, made.send_type) == (count, of_double)
    as_bytes = direct(WORLD, record, Arguments([bytearray(send), MPI.BYTE], [recv, MPI.BYTE]))
    assert as_bytes is not None and as_bytes.recv_count == 8 * count
    fewer = direct(WORLD, record, Arguments([send, count - 1, MPI.DOUBLE], [recv, count - 1, MPI.DOUBLE]))
    assert fewer is not None and fewer.recv_count == count - 1
    for kind in (memoryview, partial(array, "d")):
        assert direct(WORLD, record, Arguments(kind(send), kind(recv))) == made
    pair = MPI.DOUBLE.Create_contiguous(1).Commit()
    others: list[tuple[Any, Any]] = [
        ([send, count + 1, MPI.DOUBLE], [recv, count + 1, MPI.DOUBLE]),
        ([send, -1, MPI.DOUBLE], [recv, -1, MPI.DOUBLE]),
        ([send, True, MPI.DOUBLE], [recv, True, MPI.DOUBLE]),
        ([send, "d"], [recv, "d"]),
        ([send, pair], [recv, pair]),  # may be freed
        (send.astype(">f8"), recv.astype(">f8")),
        (memoryview(np.zeros(items, "S3")), memoryview(np.zeros(items, "S3"))),  # of no datatype
        (memoryview(np.zeros(2 * items))[::2], memoryview(np.zeros(2 * items))[::2]),
        (np.zeros((items, 2))[:, 0], np.zeros((items, 2))[:, 0]),
        ("a" * items, "a" * items),
    ]
    assert [direct(WORLD, record, Arguments(*each)) for each in others] == [None] * len(others)
    pair.Free()
    if name in ("alltoall", "allgather") and SIZE > 1:
        assert direct(WORLD, record, Arguments(send, np.zeros(items + 1))) is None
    if name == "allreduce":
        assert direct(WORLD, record, Arguments(send, recv[1:])) is None
        assert direct(WORLD, record, Arguments(send, np.zeros(items, "i8"))) is None
    in_place = Arguments(MPI.IN_PLACE, recv) if name != "scatter" else Arguments(send, MPI.IN_PLACE)
    if RANK == 0 and name != "bcast":
        assert direct(WORLD, record, in_place) == made
    wrong = Arguments(in_place.recv, in_place.send)  # the other one
    if RANK == 0 or name not in ("gather", "reduce", "scatter"):
        assert direct(WORLD, record, wrong) is None
    elif name != "scatter":
        assert direct(WORLD, record, in_place) is None
    if name in ("gather", "scatter", "reduce") and RANK == 0:
        for nothing in ((None, recv), (send, None)):  # as mpi4py takes it, in place, or wrong
            assert direct(WORLD, record, Arguments(*nothing)) is None
    for other in ("barrier", "alltoallv", "reduce_scatter"):
        assert direct(WORLD, get_collective(other), Arguments(send, recv)) is None


Spelled = Callable[[Any, int], Any]
SPELLINGS: list[Spelled] = [
    lambda values, blocks: values,
    lambda values, blocks: memoryview(values),
    lambda values, blocks: [memoryview(values).cast("B"), MPI._typedict[values.dtype.char]],
    lambda values, blocks: [values, MPI._typedict[values.dtype.char]],
    lambda values, blocks: (values, values.size // blocks, MPI._typedict[values.dtype.char]),
]


@pytest.mark.parametrize("kind", ["f8", "f4", "i4", "u1", "c16", "?"])
@pytest.mark.parametrize("spelled", SPELLINGS)
@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_data(comm: MPI.Intracomm, kind: str, spelled: Spelled, algorithm: str) -> None:
    """Of calls that come again, in other arrays, as drop-in methods and as functions."""
    ours, root = hiercoll.Intracomm(comm), SIZE - 1
    for turn in range(4):
        blocks, recv, one = tokens(RANK, turn, ITEMS * SIZE, kind), np.empty(ITEMS * SIZE, kind), np.empty(ITEMS, kind)
        every = [tokens(rank, turn, ITEMS * SIZE, kind) for rank in range(SIZE)]
        own = own_of(RANK)
        op = MPI.LOR if kind == "?" else MPI.SUM
        total = np.logical_or.reduce(every) if kind == "?" else np.asarray(sum(every)).astype(kind)
        firsts = np.concatenate([each[:ITEMS] for each in every])
        is_drop_in = turn % 2 and algorithm == "auto"

        def call(name: str, *buffers: tuple[Any, int], is_drop_in: bool = bool(is_drop_in), **more: Any) -> None:
            given = [None if values is None else spelled(values, blocks) for values, blocks in buffers]
            if given[-1] is not None and name != "bcast":
                buffers[-1][0][...] = 99
            if is_drop_in:
                getattr(ours, name.capitalize())(*given, **more)
            else:
                getattr(hiercoll, name)(comm, *given, **more, algorithm=algorithm)

        call("alltoall", (blocks, SIZE), (recv, SIZE))
        assert np.array_equal(recv, np.concatenate([each[own] for each in every]))
        call("allgather", (blocks[:ITEMS].copy(), 1), (recv, SIZE))
        assert np.array_equal(recv, firsts)
        recv[:] = every[root] if root == RANK else 99
        call("bcast", (recv, 1), root=root)
        assert np.array_equal(recv, every[root])
        call("allreduce", (blocks, 1), (recv, 1), op=op)
        assert np.array_equal(recv, total)
        here = root == RANK
        call("reduce", (blocks, 1), (recv if here else None, 1), op=op, root=root)
        assert not here or np.array_equal(recv, total)
        call("gather", (blocks[:ITEMS].copy(), 1), (recv if here else None, SIZE), root=root)
        assert not here or np.array_equal(recv, firsts)
        call("scatter", (blocks if here else None, SIZE), (one, 1), root=root)
        assert np.array_equal(one, every[root][own])


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_in_place(comm: MPI.Intracomm, spelled: Spelled) -> None:
    """On the ranks where MPI takes that."""
    ours, root = hiercoll.Intracomm(comm), SIZE - 1
    own, here, place = own_of(RANK), root == RANK, MPI.IN_PLACE
    for turn in range(4):
        every = [tokens(rank, turn, ITEMS * SIZE, "f8") for rank in range(SIZE)]
        firsts = np.concatenate([each[own_of(rank)] for rank, each in enumerate(every)])
        buffer = every[RANK].copy()
        ours.Allreduce(place, spelled(buffer, 1), MPI.SUM)
        assert np.array_equal(buffer, sum(every))
        buffer = every[RANK].copy()
        ours.Alltoall(place, spelled(buffer, SIZE))
        assert np.array_equal(buffer, np.concatenate([each[own] for each in every]))
        buffer = every[RANK].copy()
        ours.Allgather(place, spelled(buffer, SIZE))
        assert np.array_equal(buffer, firsts)
        buffer = every[RANK].copy()
        given = (place, spelled(buffer, 1)) if here else (spelled(buffer, 1), None)
        ours.Reduce(*given, MPI.SUM, root)
        assert np.array_equal(buffer, sum(every) if here else every[RANK])
        buffer, one = every[RANK].copy(), every[RANK][own].copy()
        ours.Gather(*((place, spelled(buffer, SIZE)) if here else (spelled(one, 1), None)), root)
        assert np.array_equal(buffer, firsts if here else every[RANK])
        ours.Scatter(*((spelled(every[root], SIZE), place) if here else (None, spelled(one, 1))), root)
        assert np.array_equal(one, every[root][own] if not here else every[RANK][own])


def own_of(rank: int) -> slice:
    """A rank's own block."""
    return slice(ITEMS * rank, ITEMS * (rank + 1))


@compiled_only
@pytest.mark.parametrize(
    "kind", [np.array, memoryview, partial(array, "d"), lambda values: [bytearray(values), MPI.DOUBLE]]
)
def test_the_function_is_called(comm: MPI.Intracomm, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by giving it another operation."""

    def other(*given: Any) -> Direct | None:
        made = direct(*given)
        return made and made._replace(operation=compiled.value_of(MPI.MAX))

    monkeypatch.setattr(routes, "direct", other)
    results = []
    for _ in range(3):
        result = kind(np.full(1237, -1.0))  # a size of its own: others may be known
        hiercoll.allreduce(comm, kind(np.full(1237, RANK + 1.0)), result)
        results.append(np.frombuffer(result[0] if isinstance(result, list) else result)[0])
    assert results == [SIZE * (SIZE + 1) / 2, *[float(SIZE)] * 2]


@compiled_only
def test_errors_are_mpi4pys(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library refuses in a call that is known is MPI.Exception; seen by giving it a wrong root."""
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    monkeypatch.setattr(routes, "direct", lambda *given: (made := direct(*given)) and made._replace(root=SIZE))
    buffer = np.ones(1237)
    hiercoll.bcast(comm, buffer)
    if SIZE > 1:  # some libraries do not look at it on one rank
        with pytest.raises(MPI.Exception) as caught:
            hiercoll.bcast(comm, buffer)
        assert caught.value.Get_error_class() == MPI.ERR_ROOT


@compiled_only
def test_more_elements_than_the_library_counts(comm: MPI.Intracomm) -> None:
    """Where MPI's functions count by int, no call with more elements is passed to them as it is."""
    is_countable = MPI.Get_version() >= (4, 0)
    many, few = np.zeros(2**31 + 8, np.uint8), np.zeros(8, np.uint8)  # which nobody touches: they take no memory
    assert suits_mpi4py(few) and suits_mpi4py(many) is is_countable
    routes, native = get_session(comm).routes, MPI.Intracomm.Bcast
    for vector, expected in ((few, True), (many, is_countable)):
        how = direct(comm, BCAST, Arguments(None, vector, 0))
        assert how is not None
        kept = routes.remember(native, None, BCAST, None, vector, 0, "native", "auto", None, None, None, how)
        assert kept is expected
