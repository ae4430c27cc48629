"""Alltoallw: blocks of any datatypes, by functions and drop-in communicators, give what the MPI library's own gives."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import layouts
from mpi4py import MPI
from random_types import bounds, data, place, random_type

import hiercoll
from hiercoll import settings
from hiercoll.calls import dropin, functions
from hiercoll.errors import BufferSizeError, BufferTypeError
from hiercoll.runtime import compiled
from hiercoll.runtime.lifetime import get_session

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
POISON = 0xA5
ALGORITHMS = [
    ("scatter_destination", {"window": 1}), ("scatter_destination", {}), ("pairwise", {}), ("native", {}),
    ("aggregate", {}), ("aggregate", {"form": "lane", "limit": 64}), ("aggregate", {"form": "leader"}), ("auto", {}),
]  # fmt: skip


class Ends(NamedTuple):
    """Buffers with counts, displacements and datatypes: what is sent, where it is received, and what is due there."""

    send: list[Any]
    recv: list[Any]
    due: Any

    def check(self, call: Callable[..., object]) -> None:
        """Make a call; what lies between the blocks stays as it was."""
        self.recv[0][:] = POISON
        before = self.send[0].copy()
        call(self.send, self.recv)
        np.testing.assert_array_equal(self.recv[0], self.due)
        np.testing.assert_array_equal(self.send[0], before)


# Open MPI 5.0.11's own ends a lone rank with a segmentation fault where it sends blocks of some types to itself.
several = pytest.mark.mpi(min_size=2)


def side(random: np.random.Generator, items: list[int]) -> list[Any]:
    """A buffer with a block for each rank, of so many ints, in elements of a random datatype."""
    counts = [int(random.choice([each for each in range(1, n + 1) if n % each == 0])) if n else 0 for n in items]
    types = [random_type(random, n // max(count, 1)) for n, count in zip(items, counts, strict=True)]
    displs, nbytes = place(random, [bounds(each, count) for each, count in zip(types, counts, strict=True)])
    return [data(random, nbytes), counts, displs, types]


@contextmanager
def random_ends(seed: int, *, most: int = 25) -> Iterator[Ends]:
    """Random blocks between all ranks, some of them empty."""
    items = np.random.default_rng(seed).integers(0, most, (SIZE, SIZE)).tolist()
    random = np.random.default_rng([seed, RANK])
    send, recv = side(random, items[RANK]), side(random, [items[peer][RANK] for peer in range(SIZE)])
    recv[0][:] = POISON
    WORLD.Alltoallw(send, recv)
    yield Ends(send, recv, recv[0].copy())
    for _, _, _, types in (send, recv):
        for each in types:
            each.Free()


@contextmanager
def transpose(number: int) -> Iterator[Ends]:
    """An array of so many indices along each axis, from slabs along its first axis to slabs along its second, as
    mpi4py-fft spells it."""
    cuts = [number * rank // SIZE for rank in range(SIZE + 1)]
    length = cuts[RANK + 1] - cuts[RANK]
    whole = np.arange(number**3, dtype=float).reshape([number] * 3)
    source, target = whole[cuts[RANK] : cuts[RANK + 1]].copy(), np.zeros((number, length, number))
    types: list[list[MPI.Datatype]] = [[], []]
    for peer in range(SIZE):
        part = cuts[peer + 1] - cuts[peer]
        for axis, side in ((1, source), (0, target)):
            sizes, starts = list(side.shape), [0, 0, 0]
            sizes[axis], starts[axis] = part, cuts[peer]
            kind = MPI.DOUBLE.Create_subarray(side.shape, sizes, starts) if part and length else MPI.DOUBLE.Dup()
            types[1 - axis].append(kind.Commit())
    counts = [int(length > 0 and cuts[peer + 1] > cuts[peer]) for peer in range(SIZE)], [0] * SIZE
    yield Ends([source, counts, types[0]], [target, counts, types[1]], whole[:, cuts[RANK] : cuts[RANK + 1]])
    for each in (*types[0], *types[1]):
        each.Free()


@several
def test_random_types(on_layout: Callable[[str], MPI.Intracomm]) -> None:
    for layout in layouts():
        comm = on_layout(layout)
        for seed in range(6):
            for name, params in ALGORITHMS:
                with random_ends(seed) as ends:
                    for _ in range(3):  # without a plan, with one, and with arguments that are known
                        ends.check(partial(hiercoll.alltoallw, comm, algorithm=name, **params))


@several
@pytest.mark.parametrize("learns", ["1", "online"])
def test_drop_in(comm: MPI.Intracomm, calls: dropin.Calls, monkeypatch: pytest.MonkeyPatch, learns: str) -> None:
    """Whatever is learned meanwhile, and whatever the MPI library's own are."""
    monkeypatch.setenv("HIERCOLL_LEARN", learns)
    ours = hiercoll.Intracomm(comm)
    for seed in range(40):
        with random_ends(seed, most=9) as ends:
            for _ in range(3):
                ends.check(ours.Alltoallw)
                assert ours.Ialltoallw(ends.send, ends.recv).Wait()
                np.testing.assert_array_equal(ends.recv[0], ends.due)
    assert sum(calls.values()) == 40 * 6
    if learns == "online" and SIZE > 1:
        assert calls["alltoallw"]


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls of functions that the compiled engine has left to Python."""
    if compiled.load()[0] is None:
        pytest.skip(f"no compiled engine: {compiled.load()[1]}")
    seen: list[object] = []
    original = functions._uneven_call

    def call(*given: Any) -> Any:
        seen.append(given)
        return original(*given)

    monkeypatch.setattr(functions, "_uneven_call", call)
    return seen


@several
@pytest.mark.parametrize("algorithm", ["auto", "pairwise", "aggregate"])
def test_known_by_what_is_passed(comm: MPI.Intracomm, by_python: list[object], algorithm: str) -> None:
    """The compiled engine serves calls with the very objects of earlier ones, as long as these are as they were."""
    call = partial(hiercoll.alltoallw, comm, algorithm=algorithm)

    def is_left(send: list[Any], recv: list[Any]) -> bool:
        """Whether a call is left to Python; its data are right."""
        by_python.clear()
        Ends(send, recv, due).check(call)
        return bool(by_python)

    with transpose(SIZE + 1) as ends:
        due = ends.due.copy()
        for _ in range(4):
            ends.check(call)
        assert not is_left(ends.send, ends.recv) and not is_left(list(ends.send), list(ends.recv))
        ends.send[0][:] += 1
        due += 1
        assert not is_left(ends.send, ends.recv)
        assert not is_left([ends.send[0].view(type("Kind", (np.ndarray,), {})), *ends.send[1:]], ends.recv)
        moved = np.zeros_like(ends.recv[0])
        assert is_left(ends.send, [moved, *ends.recv[1:]])
        types, own = ends.send[2], ends.send[2][RANK]
        types[RANK] = own.Dup()
        assert is_left(ends.send, ends.recv)
        types[RANK].Free()
        types[RANK] = own
        assert not is_left(ends.send, ends.recv)
        ends.send[1][0][RANK] = 0  # the same list is of what is received: nothing goes to oneself
        due[ends_of(RANK)] = POISON
        assert is_left(ends.send, ends.recv)
        ends.send[1][0][RANK] = 1
        types[RANK] = own.Dup()
        types[RANK].Free()
        with pytest.raises(BufferTypeError):
            call(ends.send, ends.recv)
        types[RANK] = own


@several
@pytest.mark.parametrize("algorithm", ["auto", "aggregate"])
def test_new_lists_for_each_call(comm: MPI.Intracomm, by_python: list[object], algorithm: str) -> None:
    """The compiled engine knows none of them when they come, and goes on to know other calls."""
    counts = np.ones(SIZE, int)
    send, recv = [np.arange(SIZE) + SIZE * RANK, counts], [np.zeros(SIZE, int), counts]
    for _ in range(4):
        hiercoll.alltoallv(comm, send, recv, algorithm="pairwise")
    with transpose(SIZE) as ends:
        for _ in range(300):
            ends.check(lambda *given: hiercoll.alltoallw(comm, *map(anew, given), algorithm=algorithm))
    by_python.clear()
    recv[0][:] = -1
    hiercoll.alltoallv(comm, send, recv, algorithm="pairwise")
    assert not by_python and (recv[0] == SIZE * np.arange(SIZE) + RANK).all()


def anew(spec: list[Any]) -> list[Any]:
    """The same with a new list of datatypes."""
    return [*spec[:-1], list(spec[-1])]


def ends_of(rank: int) -> slice:
    """The part of a rank of an axis of SIZE + 1 indices; see `transpose`."""
    cuts = [(SIZE + 1) * each // SIZE for each in range(SIZE + 1)]
    return slice(cuts[rank], cuts[rank + 1])


def test_drop_in_served(comm: MPI.Intracomm, calls: dropin.Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.forced, "alltoallw", ("pairwise", {"exchange": "rotation"}))
    ours = hiercoll.Intracomm(comm)
    with transpose(7) as ends:
        for _ in range(3):
            ends.check(ours.Alltoallw)
        request = ours.Alltoallw_init(ends.send, ends.recv)
        for _ in range(3):
            ends.recv[0][:] = POISON
            request.Start()
            request.Wait()
            np.testing.assert_array_equal(ends.recv[0], ends.due)
        request.Free()
        ends.recv[0][:] = POISON
        ours.Ialltoallw(ends.send, ends.recv).Wait()
        np.testing.assert_array_equal(ends.recv[0], ends.due)
    expected = {"alltoallw": 3, "alltoallw_init": 1, "ialltoallw": 1}
    assert calls == expected if SIZE > 1 else not any(calls[name] for name in expected)


@several
def test_plans_and_background(comm: MPI.Intracomm) -> None:
    for algorithm in ("pairwise", "native", "auto"):
        with random_ends(3) as ends:
            with hiercoll.alltoallw_init(comm, ends.send, ends.recv, algorithm=algorithm) as plan:
                ends.check(lambda *_, plan=plan: plan())
                ends.check(lambda *_, plan=plan: plan())
            ends.check(lambda *given, by=algorithm: hiercoll.ialltoallw(comm, *given, algorithm=by).wait())


@pytest.mark.parametrize("algorithm", ["pairwise", "aggregate", "native", "auto"])
def test_transpose(comm: MPI.Intracomm, algorithm: str) -> None:
    """Arrays that do not divide by the number of ranks; and types that come again as others, with the same handles."""
    for number in (1, 3, 8, 11, 8, 5):
        with transpose(number) as ends:
            for _ in range(3):
                ends.check(partial(hiercoll.alltoallw, comm, algorithm=algorithm))


def test_nothing_is_packed_that_is_one_run(comm: MPI.Intracomm) -> None:
    """The slabs along the first axis are received where they belong."""
    hiercoll.configure(comm)
    if SIZE == 1:
        return
    with transpose(2 * SIZE) as ends:
        for _ in range(3):
            ends.check(partial(hiercoll.alltoallw, comm, algorithm="pairwise"))
        (known,) = get_session(comm).copied.values()
        assert known.request.before and not known.request.after and known.nbytes == ends.send[0].nbytes


@several
def test_in_place(comm: MPI.Intracomm) -> None:
    """What a rank sends to another one, and receives from it, is as long; what is received comes in its place."""
    random, ones = np.random.default_rng([2, RANK]), [1] * SIZE
    types = [random_type(random, 7 + peer + RANK) for peer in range(SIZE)]
    displs, nbytes = place(random, [bounds(each, 1) for each in types])
    before = data(random, nbytes)
    due = before.copy()
    WORLD.Alltoallw([before, ones, displs, types], [due, ones, displs, types])
    for algorithm in ("pairwise", "native", "auto"):
        for _ in range(3):
            given = before.copy()
            hiercoll.alltoallw(comm, MPI.IN_PLACE, [given, ones, displs, types], algorithm=algorithm)
            np.testing.assert_array_equal(given, due)
    for each in types:
        each.Free()


@pytest.mark.parametrize("end", [0, 1])
def test_absolute_addresses(comm: MPI.Intracomm, end: int) -> None:
    """MPI.BOTTOM, with displacements that are addresses. (Open MPI's own refuses it.)"""
    arrays, kinds = [np.arange(SIZE) + 10 * RANK, np.full(SIZE, -1)], [MPI.INT64_T] * SIZE
    given: list[list[Any]] = [[array, [1] * SIZE, [8 * peer for peer in range(SIZE)], kinds] for array in arrays]
    given[end][0], given[end][2] = MPI.BOTTOM, [MPI.Get_address(arrays[end]) + 8 * peer for peer in range(SIZE)]
    calls: list[Callable[..., object]] = [partial(hiercoll.alltoallw, comm, algorithm="pairwise")]
    if MPI.get_vendor()[0] != "Open MPI":
        calls += [partial(hiercoll.alltoallw, comm, algorithm="native"), hiercoll.Intracomm(comm).Alltoallw]
    for call in calls:
        arrays[1][:] = -1
        call(*given)
        np.testing.assert_array_equal(arrays[1], RANK + 10 * np.arange(SIZE))


def test_types_for_nothing(comm: MPI.Intracomm) -> None:
    """What no element is of is not looked at."""
    empty, types = np.zeros(1), [MPI.DATATYPE_NULL] * SIZE
    spec = [empty, ([0] * SIZE, [0] * SIZE), types]
    hiercoll.alltoallw(comm, spec, [empty, ([0] * SIZE, [0] * SIZE), types], algorithm="pairwise")
    assert empty[0] == 0


ONES, ZEROS = [1] * SIZE, [0] * SIZE
DOUBLES = [MPI.DOUBLE] * SIZE
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no list": (np.zeros(SIZE), BufferTypeError, "list/tuple"),
    "one item": ([np.zeros(SIZE)], BufferTypeError, "2 to 4 items"),
    "too few types": ([np.zeros(SIZE), (ONES, ZEROS), DOUBLES[1:]], BufferTypeError, f"expecting {SIZE} items"),
    "no types": ([np.zeros(SIZE), (ONES, ZEROS), ["d"] * SIZE], BufferTypeError, "datatypes"),
    "too many counts": ([np.zeros(SIZE), ([1] * (SIZE + 1), ZEROS), DOUBLES], BufferTypeError, "items"),
    "a number": ([np.zeros(SIZE), (1, 0), DOUBLES], BufferTypeError, "sequences"),
    "below 0": ([np.zeros(SIZE), ([-1] * SIZE, ZEROS), DOUBLES], BufferSizeError, "at least 0"),
    "beyond the end": ([np.zeros(SIZE), (ONES, [8 * SIZE] * SIZE), DOUBLES], BufferSizeError, "fit the buffer"),
    "before the beginning": ([np.zeros(SIZE), (ONES, [-8] * SIZE), DOUBLES], BufferSizeError, "fit the buffer"),
    "a null type": ([np.zeros(SIZE), (ONES, ZEROS), [MPI.DATATYPE_NULL] * SIZE], BufferTypeError, "datatypes"),
    "other bytes": ([np.zeros(SIZE), (ONES, ZEROS), [MPI.FLOAT] * SIZE], BufferSizeError, "from rank"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("algorithm", ["pairwise", "native", "auto"])
def test_wrong_arguments(comm: MPI.Intracomm, what: str, algorithm: str) -> None:
    """On all ranks; the communicator stays sound."""
    wrong, error, words = WRONG[what]
    source, target = np.arange(SIZE) + 10.0 * RANK, np.zeros(SIZE)
    there = [8 * peer for peer in range(SIZE)]
    good = [source, (ONES, there), DOUBLES]
    for _ in range(2):
        with pytest.raises(error, match=words) as caught:
            hiercoll.alltoallw(comm, good, wrong, algorithm=algorithm)
        assert caught.value.argument == "recvbuf"
        hiercoll.alltoallw(comm, good, [target, (ONES, there), DOUBLES], algorithm=algorithm)
        np.testing.assert_array_equal(target, RANK + 10.0 * np.arange(SIZE))


def test_drop_in_leaves_wrong_arguments_to_mpi4py(comm: MPI.Intracomm) -> None:
    ours, array = hiercoll.Intracomm(comm), np.zeros(SIZE)
    for wrong in (array, [array], [array, DOUBLES[1:]], [array, (1, 0), DOUBLES]):
        raised = []
        for each in (comm, ours):
            with pytest.raises((TypeError, ValueError, BufferError)) as caught:
                each.Alltoallw([array, DOUBLES], wrong)
            raised.append((caught.type, str(caught.value)))
        assert raised[0] == raised[1]


def test_counts_of_other_bytes_than_before(comm: MPI.Intracomm) -> None:
    """Arguments that look alike but for their counts, displacements or types are looked at anew."""
    source = np.arange(4.0 * SIZE) + 100 * RANK
    for counts, step, kind in (([1] * SIZE, 8, MPI.DOUBLE), ([2] * SIZE, 16, MPI.DOUBLE), ([2] * SIZE, 8, MPI.FLOAT)):
        spec = (counts, [step * peer for peer in range(SIZE)]), [kind] * SIZE
        due, target = np.full(4 * SIZE, -1.0), np.full(4 * SIZE, -1.0)
        WORLD.Alltoallw([source, *spec], [due, *spec])
        for _ in range(3):
            hiercoll.alltoallw(comm, [source, *spec], [target, *spec], algorithm="pairwise")
            np.testing.assert_array_equal(target, due)


class Subclass(np.ndarray[Any, Any]):
    """An array of a program's own kind."""


NUMBERS: dict[str, Callable[[list[int]], Any]] = {
    "a list": list,
    "an array": lambda numbers: np.array(numbers, "i4"),
    "an array.array": lambda numbers: array.array("i", numbers),
    "a memoryview": lambda numbers: memoryview(array.array("i", numbers)),
    "an array of another class": lambda numbers: np.array(numbers, "i4").view(Subclass),
}


@pytest.mark.parametrize("algorithm", ["pairwise", "native"])
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_that_change_in_place(comm: MPI.Intracomm, kind: str, algorithm: str) -> None:
    """Calls with the very same objects are served by what these say now."""
    source, target = np.arange(2.0 * SIZE) + 100 * RANK, np.zeros(SIZE)
    counts, types = [1] * SIZE, [MPI.DOUBLE] * SIZE
    places, due_at = NUMBERS[kind]([16 * peer for peer in range(SIZE)]), [8 * peer for peer in range(SIZE)]
    send, recv = [source, (counts, places), types], [target, (counts, due_at), types]
    for turn in range(12):
        for peer in range(SIZE) if turn in (6, 9) else ():
            places[peer] += 8 if turn == 6 else -8
        target[:] = -1
        hiercoll.alltoallw(comm, send, recv, algorithm=algorithm)
        ahead = int(6 <= turn < 9)
        np.testing.assert_array_equal(target, [100 * peer + 2 * RANK + ahead for peer in range(SIZE)])


def test_other_types_with_the_same_handles(comm: MPI.Intracomm) -> None:
    """A type that is freed leaves its handle to the next one; calls on the same arrays tell them apart."""
    source, target = np.arange(8.0 * SIZE) + 100 * RANK, np.zeros(8 * SIZE)
    ones, places, handles = [1] * SIZE, [64 * peer for peer in range(SIZE)], list[int]()
    for stride in (2, 3, 1, 2, 3):
        kind = MPI.DOUBLE.Create_vector(3, 1, stride).Commit()
        handles.append(kind.handle)
        spec, due = ((ones, places), [kind] * SIZE), np.full(8 * SIZE, -1.0)
        WORLD.Alltoallw([source, *spec], [due, *spec])
        for _ in range(3):
            target[:] = -1
            hiercoll.alltoallw(comm, [source, *spec], [target, *spec], algorithm="pairwise")
            np.testing.assert_array_equal(target, due)
        kind.Free()
    assert len(set(handles)) < len(handles)
