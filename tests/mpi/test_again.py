"""Calls that come again, spelled in ways that are rarely seen: they mean what they meant the first time."""

from __future__ import annotations

import gc
import signal
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll import settings
from hiercoll.runtime import compiled
from hiercoll.runtime.lifetime import get_session

RANK, SIZE = WORLD.rank, WORLD.size
several = pytest.mark.mpi(min_size=2)
needs_engine = pytest.mark.skipif(compiled.call() is None, reason="there is no compiled engine")
EVERY_OTHER = 2  # elements from one to the next in derived datatypes


@pytest.fixture(params=layouts()[-1:])
def comm(request: pytest.FixtureRequest, on_layout: Callable[[str], MPI.Intracomm]) -> MPI.Intracomm:
    """On which hiercoll is set up."""
    made = on_layout(request.param)
    get_session(made)
    return made


@pytest.fixture
def forced(on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A drop-in communicator whose collectives are served by what is named for them."""

    def make(**choices: str) -> hiercoll.Intracomm:
        for collective, algorithm in choices.items():
            monkeypatch.setitem(settings.forced, collective, (algorithm, {}))
        made = on_layout(layouts()[-1])
        get_session(made)
        return hiercoll.Intracomm(made)

    return make


@pytest.fixture
def ours(comm: MPI.Intracomm) -> hiercoll.Intracomm:
    """The same as a drop-in communicator."""
    return hiercoll.Intracomm(comm)


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch) -> Iterator[hiercoll.Intracomm]:
    """A drop-in communicator on which hiercoll is not set up, nor needs to be."""
    monkeypatch.delenv("HIERCOLL_TABLE", raising=False)
    made = hiercoll.Intracomm(MPI.Intracomm(WORLD).Dup())
    yield made
    made.Free()


def strided(items: int, extent: int) -> MPI.Datatype:
    """So many doubles, every other one, of an extent in doubles."""
    made = MPI.DOUBLE.Create_vector(items, 1, EVERY_OTHER)
    return made.Create_resized(0, 8 * extent).Commit()


def test_results_like_an_array_of_fortran(comm: MPI.Intracomm) -> None:
    """A result that is made has the order of the array that is sent."""
    send = np.asfortranarray(np.arange(SIZE * 4.0).reshape(SIZE, 4) + 100 * RANK)
    want = np.empty(send.size)
    comm.Alltoall(send.ravel("K").copy(), want)
    for _ in range(3):
        np.testing.assert_array_equal(hiercoll.alltoall(comm, send, algorithm="pairwise").ravel("K"), want)


@pytest.mark.parametrize("algorithm", ["native", "binomial", "linear"])
@pytest.mark.parametrize("left_out", [None, MPI.IN_PLACE], ids=str)
def test_rooted_calls_in_place(comm: MPI.Intracomm, algorithm: str, left_out: Any) -> None:
    """On the root; None means that, too."""
    for root in (0, SIZE - 1):
        for turn in range(3):
            own, whole = np.full(3, RANK + turn), np.zeros((SIZE, 3), int)
            whole[root] = root + turn
            send, recv = (left_out, whole) if root == RANK else (own, None)
            hiercoll.gather(comm, send, recv, root=root, algorithm=algorithm)
            if root == RANK:
                np.testing.assert_array_equal(whole, np.arange(turn, SIZE + turn)[:, None] + np.zeros(3, int))


@pytest.mark.parametrize("left_out", [None, MPI.IN_PLACE], ids=str)
@pytest.mark.parametrize("choices", [{}, {"gather": "linear", "scatter": "linear"}], ids=["auto", "linear"])
def test_drop_in_rooted_calls_in_place(forced: Callable[..., Any], left_out: Any, choices: dict[str, str]) -> None:
    """As mpi4py takes them, where hiercoll is set up."""
    ours = forced(**choices)
    for turn in range(4):
        for root in (0, SIZE - 1):
            whole = np.full((SIZE, 3), RANK + turn)
            send, recv = (left_out, whole) if root == RANK else (whole[0], None)
            ours.Gather(send, recv, root=root)
            total = np.full(3, RANK + 1)
            ours.Reduce(left_out if root == RANK else total, total if root == RANK else None, root=root)
            if root == RANK:
                np.testing.assert_array_equal(whole[:, 0], np.arange(SIZE) + turn)
                assert total.tolist() == [SIZE * (SIZE + 1) // 2] * 3
            mine = np.full(3, -1)
            ours.Scatter(whole if root == RANK else None, left_out if root == RANK else mine, root=root)
            assert root == RANK or mine.tolist() == [RANK + turn] * 3


@pytest.mark.parametrize("algorithm", ["auto", "native", "linear"])
@pytest.mark.parametrize("is_first", [True, False])
def test_in_place_of_datatypes(
    algorithm: str, is_first: bool, comm: MPI.Intracomm, on_layout: Callable[[str], MPI.Intracomm]
) -> None:
    """The root's own block stays, as does what lies between the elements; before hiercoll is set up, too."""
    comm, kind = on_layout("") if is_first else comm, strided(2, 4)
    for _ in range(2):
        for name in ("gather", "gatherv"):
            whole = np.full((SIZE, 4), -9.0)
            whole[0, ::EVERY_OTHER] = 1, 2
            spec = [whole, 1, kind] if name == "gather" else [whole, [1] * SIZE, kind]
            send, recv = (MPI.IN_PLACE, spec) if RANK == 0 else (np.full(2, float(RANK)), None)
            how = {} if algorithm == "auto" else {"algorithm": algorithm}
            getattr(hiercoll, name)(comm, send, recv, root=0, **how)
            if RANK == 0:
                due = np.full((SIZE, 4), -9.0)
                due[:, ::EVERY_OTHER] = np.arange(SIZE)[:, None]
                due[0, ::EVERY_OTHER] = 1, 2
                np.testing.assert_array_equal(whole, due)
    kind.Free()


def test_results_of_datatypes(comm: MPI.Intracomm) -> None:
    """The program's array; of calls that come again, too."""
    kind, whole = strided(5, 10), np.zeros(10)
    for _ in range(3):
        assert hiercoll.bcast(comm, [whole, 1, kind], algorithm="binomial") is whole
        out, into = np.ones(SIZE), np.empty(SIZE)
        spec = [into, 1, MPI.DOUBLE]
        assert hiercoll.alltoall(comm, [out, 1, MPI.DOUBLE], spec, algorithm="pairwise") is into
        assert hiercoll.alltoall(comm, [out, 1, MPI.DOUBLE], spec) is into
        memory = bytearray(8)
        assert isinstance(hiercoll.bcast(comm, memory), np.ndarray)
    kind.Free()


def test_buffers_of_plans_live(comm: MPI.Intracomm) -> None:
    """A plan, or a call in the background, keeps the program's arrays, though it copies from them."""
    kind, array = strided(500, 1000), np.full(1000, float(RANK))
    alive = weakref.ref(array)
    plan = hiercoll.bcast_init(comm, [array, 1, kind], algorithm="binomial")
    request = hiercoll.ibcast(comm, [array, 1, kind], algorithm="binomial")
    del array
    gc.collect()
    assert alive() is not None
    request.wait()
    plan()
    assert (alive()[::EVERY_OTHER] == 0).all()  # type: ignore[index]
    plan.free()
    del plan, request
    gc.collect()
    assert alive() is None
    kind.Free()


def test_calls_that_are_known_keep_no_array(comm: MPI.Intracomm) -> None:
    """A blocking alltoallw leaves nothing of the program's memory behind."""
    kind = strided(2, 4)
    arrays = [np.zeros((SIZE, 4)) for _ in range(2)]
    specs = [[array, [1] * SIZE, [32 * rank for rank in range(SIZE)], [kind] * SIZE] for array in arrays]
    for _ in range(3):
        hiercoll.alltoallw(comm, *specs, algorithm="pairwise")
    del specs
    assert [sys.getrefcount(array) for array in arrays] == [3, 3]  # the list, the loop, the argument
    kind.Free()


def test_copies_are_no_messages_of_the_program(newcomer: hiercoll.Intracomm) -> None:
    """A datatype that only MPI can pack, in the first call on a communicator on which a receive waits for anything."""
    comm, got = newcomer.plain, np.zeros(100)
    waiting = comm.Irecv(got, MPI.ANY_SOURCE, MPI.ANY_TAG)
    kind = MPI.DOUBLE.Create_darray(1, 0, [8], [MPI.DISTRIBUTE_CYCLIC], [2], [1]).Commit()
    data = np.arange(8.0) if RANK == 0 else np.zeros(8)
    hiercoll.bcast(comm, [data, 1, kind])
    np.testing.assert_array_equal(data, np.arange(8.0))
    assert not waiting.Test()
    comm.Send(np.ones(1), RANK)
    waiting.Wait()
    assert got[0] == 1
    kind.Free()


@pytest.mark.parametrize("kind", ["vector", "distributed"])
def test_datatypes_that_are_freed_while_calls_are_under_way(comm: MPI.Intracomm, kind: str) -> None:
    """As programs in C do; of those that hiercoll takes apart, and of those that only MPI can copy."""
    made = {
        "vector": lambda: MPI.DOUBLE.Create_vector(4, 1, 2),
        "distributed": lambda: MPI.DOUBLE.Create_darray(1, 0, [8], [MPI.DISTRIBUTE_CYCLIC], [2], [1]),
    }[kind]
    rows = 8
    for _ in range(3):
        datatype = made().Commit()
        size = datatype.Get_size() // 8
        send, recv = np.arange(1.0 * SIZE * rows) + 1000 * RANK, np.zeros((SIZE, rows))
        places = [8 * rows * rank for rank in range(SIZE)]
        spec: list[Any] = [send, [1] * SIZE, places, [datatype] * SIZE]
        into: list[Any] = [recv, [1] * SIZE, places, [datatype] * SIZE]
        request = hiercoll.ialltoallw(comm, spec, into, algorithm="pairwise")
        datatype.Free()
        others = [MPI.INT.Create_vector(3, 1, 2).Commit() for _ in range(3)]  # whose handles may be that one's
        request.wait()
        for other in others:
            other.Free()
        expected = np.arange(rows * RANK, rows * (RANK + 1)) + 1000.0 * np.arange(SIZE)[:, None]
        moved = slice(None, None, 2) if kind == "vector" else slice(None)
        assert size == expected[:, moved].shape[1]
        np.testing.assert_array_equal(recv[:, moved], expected[:, moved])


@several
@pytest.mark.parametrize("displaced", [False, True])
def test_sizes_tell_native_calls_apart(displaced: bool, newcomer: hiercoll.Intracomm) -> None:
    """Calls of other sizes are other calls, though a rank's own block is the same, and however ranks spell them: they
    are counted as such, so that ranks agree at the same ones."""
    hiercoll.configure(newcomer)
    recv = np.empty(1000 + 10 * SIZE)

    def call(items: list[int]) -> None:
        counts, own = np.array(items), items[RANK]
        places = np.cumsum(counts) - counts
        spec: list[Any] = [recv, counts, places, MPI.DOUBLE]
        if not displaced:
            spec = [recv, counts] if RANK else [recv, counts.tolist(), MPI.DOUBLE]
        newcomer.Allgatherv(np.full(own, float(RANK)), spec)
        np.testing.assert_array_equal(recv[: counts.sum()], np.repeat(np.arange(SIZE), counts))

    small = [10] * SIZE
    for _ in range(3):
        call(small)
    for turn in range(80):
        call([1000, *small[1:]])
        if turn % 3 == 0:
            call(small)


def test_arrays_of_fortran_that_only_their_bytes_tell(forced: Callable[..., Any]) -> None:
    """mpi4py takes an array in either order; one rank's may be the only one in this."""
    ours = forced(bcast="binomial")
    array = np.full((3, 2), RANK + 1, np.longdouble, order="F" if RANK == 0 else "C")
    array.flags.writeable = RANK != 0
    ours.Bcast(array, root=0)
    assert (array == 1).all()


def test_null_datatypes_for_nothing(ours: hiercoll.Intracomm) -> None:
    """Where nothing is learned, too."""
    hiercoll.configure(ours, tune="off")
    kinds, counts = [MPI.DATATYPE_NULL] * SIZE, [int(peer == RANK) for peer in range(SIZE)]
    kinds[RANK] = MPI.DOUBLE
    found = np.zeros(1)
    try:
        ours.plain.Alltoallw([np.ones(1), counts, [0] * SIZE, kinds], [found, counts, [0] * SIZE, kinds])
    except MPI.Exception:
        pytest.skip("this MPI library takes no null datatype for nothing")
    found[:] = 0
    ours.Alltoallw([np.ones(1), counts, [0] * SIZE, kinds], [found, counts, [0] * SIZE, kinds])
    assert found[0] == 1


def test_roots_are_whole_numbers(forced: Callable[..., Any]) -> None:
    """However one rank spells them."""
    ours, root = forced(bcast="binomial"), SIZE - 1
    for spelled in (np.array(root), np.int8(root), root):
        array = np.full(3, RANK)
        ours.Bcast(array, root=spelled if RANK == 0 else root)
        assert (array == root).all()
        assert ours.bcast(RANK, spelled if RANK == 0 else root) == root


@several
@pytest.mark.parametrize("hurried", [False, True])
def test_calls_that_are_refused_and_made_again(
    hurried: bool, newcomer: hiercoll.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank catches an error and makes the call as it should be: it is counted once, and meets the others once."""
    if hurried:
        monkeypatch.setenv("HIERCOLL_LEARN", "online")
    send, recv = np.arange(float(SIZE)), np.empty(SIZE)
    for turn in range(120):
        counts = [1] * SIZE
        if turn % 7 == 5 and turn % SIZE == RANK:
            with pytest.raises(ValueError, match="expecting"):
                newcomer.Alltoallv([send, [*counts, 1]], [recv, counts])
        newcomer.Alltoallv([send + turn, counts], [recv, counts])
        assert (recv == RANK + turn).all()


@several
def test_elements_are_spelled_as_one_likes(comm: MPI.Intracomm) -> None:
    """A reduction through shared memory by NumPy's type on one rank, and by MPI's on others: the same call."""
    data, total = np.ones(1000), np.empty(1000)
    for turn in range(4):
        spec: Any = [total, MPI.DOUBLE] if (RANK + turn) % 3 == 0 and turn else total
        hiercoll.allreduce(comm, data, spec, algorithm="hierarchical")
        assert (total == SIZE).all()


def test_tables_that_cannot_be_read_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads them; all ranks are told."""
    monkeypatch.setenv("HIERCOLL_TABLE", "/nonexistent/table.json")
    comm = MPI.Intracomm(WORLD).Dup()
    with pytest.raises(hiercoll.TableWarning):
        hiercoll.get_topology(comm)
    comm.Free()


@pytest.mark.parametrize("keep", [False, True])
def test_operations_in_other_objects(keep: bool, ours: hiercoll.Intracomm) -> None:
    """One of MPI's own in an object that lives as long as the call is what it is, whatever comes in its place."""
    kept, found = list[MPI.Op](), np.empty(8)
    for turn in range(60):
        for op, want in ((MPI.MAX, SIZE), (MPI.SUM, SIZE * (SIZE + 1) // 2)):
            other = MPI.Op(op)
            if keep and RANK:
                kept.append(other)
            ours.Allreduce(np.full(8, RANK + 1.0), found, other)
            assert (found == want).all(), turn
            del other


def test_operations_that_are_freed(comm: MPI.Intracomm) -> None:
    """Another one may have the handle of one before."""

    def least(left: MPI.buffer, right: MPI.buffer, datatype: MPI.Datatype) -> None:
        into = np.frombuffer(right)
        np.minimum(np.frombuffer(left), into, out=into)

    def most(left: MPI.buffer, right: MPI.buffer, datatype: MPI.Datatype) -> None:
        into = np.frombuffer(right)
        np.maximum(np.frombuffer(left), into, out=into)

    data, found = np.full(9, RANK + 1.0), np.empty(9)
    for _ in range(4):
        for function, want in ((least, 1), (most, SIZE)):
            op = MPI.Op.Create(function, commute=True)
            for _ in range(3):
                hiercoll.allreduce(comm, data, found, op=op, algorithm="ring")
                assert (found == want).all()
            op.Free()


@pytest.mark.parametrize("kind", [">i4", ">f8"])
def test_numbers_in_the_order_of_other_machines(
    kind: str, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are moved as they lie, the first time and ever after, by the MPI library's own, too."""
    monkeypatch.delenv("HIERCOLL_TABLE")
    before, after = on_layout(layouts()[-1]), on_layout(layouts()[-1])
    get_session(after)
    own = (np.arange(2 * SIZE) + 100 * RANK).astype(kind)
    everyone = np.arange(2 * SIZE) + 100 * np.arange(SIZE)[:, None]
    for made in (before, after):
        for _ in range(4):
            root = own.copy()
            hiercoll.bcast(made, root)
            assert (root == everyone[0]).all()
            assert (hiercoll.allgather(made, own, np.empty((SIZE, 2 * SIZE), kind)) == everyone).all()
            given = hiercoll.alltoall(made, own, np.empty(2 * SIZE, kind)).reshape(SIZE, 2)
            assert (given == everyone.reshape(SIZE, SIZE, 2)[:, RANK]).all()


class AlarmError(Exception):
    """A signal has come."""


@contextmanager
def on_alarm(act: Callable[[], object], after: float = 0.2) -> Iterator[None]:
    """Something happens in a while, whatever is waited for."""
    before = signal.signal(signal.SIGALRM, lambda *_: act())
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@several
@pytest.mark.parametrize("algorithm", ["pairwise", "native"])
def test_a_list_that_loses_its_array_in_the_call(comm: MPI.Intracomm, algorithm: str) -> None:
    """What it receives into, and returns, is the array that was in there when it began."""
    counts, send = [2] * SIZE, np.arange(2 * SIZE) + 100 * RANK
    due = np.concatenate([2 * RANK + 100 * peer + np.arange(2) for peer in range(SIZE)])
    for turn in range(6):
        recv: list[Any] = [np.full(2 * SIZE, -1), counts]
        if turn == 5 and RANK == 1:
            time.sleep(0.5)
        with on_alarm(recv.clear) if turn == 5 and RANK != 1 else nullcontext():
            found = hiercoll.alltoallv(comm, [send, counts], recv, algorithm=algorithm)
        np.testing.assert_array_equal(found, due)
    assert algorithm == "native" or len(recv) == (2 if RANK == 1 else 0)


@several
@needs_engine
@pytest.mark.parametrize("kind", [bytearray, lambda size: array("B", bytes(size))])
def test_memory_of_an_interrupted_call_stays(kind: Callable[[int], Any]) -> None:
    """MPI may still write to it: whoever wants to give it back is told."""
    made = WORLD.Dup()
    send, recv = kind(64 * SIZE), kind(64 * SIZE)
    for _ in range(5):
        hiercoll.alltoall(made, send, recv, algorithm="pairwise")

    def interrupt() -> None:
        raise AlarmError

    if RANK:  # rank 0 never makes that call
        with pytest.raises(AlarmError), on_alarm(interrupt):
            hiercoll.alltoall(made, send, recv, algorithm="pairwise")
        with pytest.raises(BufferError):
            recv.pop()
    made.Free()


@needs_engine
def test_what_comes_from_outside_is_not_lost(comm: MPI.Intracomm) -> None:
    """An exception in what the compiled engine asks for is of no interest, unless it is Ctrl-C."""
    routes, what = get_session(comm).routes, (None, None, 0, "auto", "auto", None, None, None, None)

    class Record:
        """Of a collective, when Ctrl-C is pressed."""

        @property
        def is_private(self) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        routes.remember(MPI.Intracomm.Barrier, None, Record(), *what)
