"""The drop-in communicator: mpi4py's semantics, whatever ranks do differently."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI
from mpi4py.util import pkl5

import hiercoll
from hiercoll import settings
from hiercoll.calls import dropin
from hiercoll.collectives import Collective, called
from hiercoll.runtime.lifetime import get_session

RANK, SIZE = WORLD.rank, WORLD.size
ITEMS = 6


@pytest.fixture(params=layouts())
def ours(request: pytest.FixtureRequest, on_layout: Callable[[str], MPI.Intracomm]) -> hiercoll.Intracomm:
    return hiercoll.Intracomm(on_layout(request.param))


class Strided:
    """Items with gaps between them: a column of a matrix."""

    def __init__(self, items: int) -> None:
        self.matrix = np.full((items, 2), -9, "i4")
        self.values = self.matrix[:, 0]
        self.type = MPI.INT.Create_resized(0, 8).Commit()


def spelled(kind: int, values: np.ndarray[Any, Any], count: int) -> tuple[Any, np.ndarray[Any, Any], Any]:
    """A buffer specification of one of many kinds, the array behind it, and what keeps it."""
    if kind == 0:
        return values, values, None
    if kind == 1:
        return [values, MPI.INT], values, None
    if kind == 2:
        return (values, count, "i"), values, None
    if kind == 3:
        places = np.full(len(values) + 5, -9, "i4")
        places[5:] = values
        return [places, count, 5, MPI.INT32_T], places[5:], None
    if kind == 4:
        pair = MPI.INT.Create_contiguous(2).Commit()
        return [values, count // 2, pair], values, pair
    if kind == 5:
        strided = Strided(len(values))
        strided.values[:] = values
        return [strided.matrix, count, strided.type], strided.values, strided.type
    if kind == 6:
        address = MPI.INT.Create_hindexed([count], [MPI.Get_address(values)])
        extent = address.Create_resized(0, count * 4).Commit()
        address.Free()
        return [MPI.BOTTOM, 1, extent], values, extent
    return [memoryview(values).cast("B"), count * 4, MPI.BYTE], values, None


KINDS = 8


@pytest.mark.parametrize("turn", range(KINDS))
def test_ranks_spell_differently(ours: hiercoll.Intracomm, calls: dropin.Calls, turn: int) -> None:
    """Every rank in its own way, legally: all are served, none natively."""
    send = (np.arange(SIZE * ITEMS) + 1000 * RANK).astype("i4")
    expected = np.concatenate([np.arange(ITEMS) + RANK * ITEMS + 1000 * peer for peer in range(SIZE)])
    out, _, a = spelled((RANK + turn) % KINDS, send, ITEMS)
    into, recv, b = spelled((RANK * 3 + turn) % KINDS, np.full(SIZE * ITEMS, -1, "i4"), ITEMS)
    ours.Alltoall(out, into)
    np.testing.assert_array_equal(recv, expected)
    own, _, c = spelled((RANK + turn + 1) % KINDS, send[:ITEMS], ITEMS)
    into, recv, d = spelled((RANK + turn) % KINDS, np.full(SIZE * ITEMS, -1, "i4"), ITEMS)
    ours.Allgather(own, into)
    np.testing.assert_array_equal(recv, np.concatenate([np.arange(ITEMS) + 1000 * peer for peer in range(SIZE)]))
    for datatype in (a, b, c, d):
        if datatype is not None:
            datatype.Free()
    if SIZE > 1:
        assert calls == {"alltoall": 1, "allgather": 1}


@pytest.mark.parametrize("kind", [0, 3, 4, 5])
def test_in_place(ours: hiercoll.Intracomm, kind: int) -> None:
    """MPI.IN_PLACE, and None, which is the same to mpi4py; ranks spell the buffer differently."""
    start = (np.arange(SIZE * ITEMS) + 1000 * RANK).astype("i4")
    into, recv, a = spelled(kind if RANK % 2 else 0, start.copy(), ITEMS)
    ours.Alltoall(MPI.IN_PLACE, into)
    np.testing.assert_array_equal(
        recv, np.concatenate([np.arange(ITEMS) + RANK * ITEMS + 1000 * peer for peer in range(SIZE)])
    )
    own = np.where(np.arange(SIZE * ITEMS) // ITEMS == RANK, start, -1).astype("i4")
    into, recv, b = spelled(kind if RANK % 2 else 0, own, ITEMS)
    ours.Allgather(None, into)
    np.testing.assert_array_equal(
        recv, np.concatenate([start[peer * ITEMS : (peer + 1) * ITEMS] + 1000 * (peer - RANK) for peer in range(SIZE)])
    )
    for datatype in (a, b):
        if datatype is not None:
            datatype.Free()


def test_uneven(ours: hiercoll.Intracomm) -> None:
    """Counts that change on every call, long enough for surveys and trials."""
    for call in range(30):
        table = np.random.default_rng(call).integers(0, 9, (SIZE, SIZE))
        send = np.concatenate([np.full(table[RANK, peer], 100 * RANK + peer + call) for peer in range(SIZE)])
        recv = np.full(table[:, RANK].sum(), -1)
        ours.Alltoallv([send, table[RANK]], [recv, table[:, RANK]])
        expected = np.concatenate([np.full(table[peer, RANK], 100 * peer + RANK + call) for peer in range(SIZE)])
        np.testing.assert_array_equal(recv, expected)
        recv = np.full(table[0].sum(), -1)
        ours.Allgatherv(np.full(table[0, RANK], RANK), [recv, table[0]])
        np.testing.assert_array_equal(recv, np.repeat(np.arange(SIZE), table[0]))


def completed(made: MPI.Intracomm, request: MPI.Request) -> MPI.Intracomm:
    """A communicator that is made in the background, when it is there."""
    request.Wait()
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda c: c.Dup(),
        lambda c: c.Clone(),
        lambda c: c.Split(0, -RANK),
        lambda c: c.Split_type(MPI.COMM_TYPE_SHARED),
        lambda c: c.Create(c.Get_group()),
        lambda c: c.Create_group(c.Get_group()),
        lambda c: c.Create_cart([SIZE]),
        lambda c: c.Create_cart([SIZE, 1]).Sub([True, False]),
        lambda c: c.Create_graph(list(range(1, SIZE + 1)), [(r + 1) % SIZE for r in range(SIZE)]),
        lambda c: c.Create_dist_graph_adjacent([(RANK - 1) % SIZE], [(RANK + 1) % SIZE]),
        lambda c: c.Create_dist_graph([RANK], [1], [(RANK + 1) % SIZE]),
        lambda c: c.Dup_with_info(MPI.INFO_NULL),
        lambda c: completed(*c.Idup()),
        lambda c: completed(*c.Idup_with_info(MPI.INFO_NULL)),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_made_of_it(comm: MPI.Intracomm, make: Callable[[Any], Any], is_first: bool) -> None:
    """Communicators made from a drop-in one are drop-in ones, of mpi4py's kind, before and after its first call."""
    if not is_first:
        hiercoll.Intracomm(comm).Barrier()
    made = make(hiercoll.Intracomm(comm))
    plain = make(comm)
    assert isinstance(made, dropin.Collectives) and isinstance(made, type(plain))
    assert not isinstance(plain, dropin.Collectives)
    recv = np.empty(made.size, int)
    made.Allgather(np.array([made.rank]), recv)
    np.testing.assert_array_equal(recv, np.arange(made.size))
    for each in (made, plain):
        each.Free()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    "make",
    [
        lambda c: c.Create_cart([SIZE - 1]),
        lambda c: c.Create_graph(list(range(1, SIZE)), [(r + 1) % (SIZE - 1) for r in range(SIZE - 1)]),
    ],
)
def test_made_of_fewer_ranks(comm: MPI.Intracomm, make: Callable[[Any], Any]) -> None:
    """Of which MPICH's group has all those of the communicator that it was made from."""
    made = make(hiercoll.Intracomm(comm))
    if made == MPI.COMM_NULL:
        return
    send, recv = np.arange(made.size) + 10 * made.rank, np.full(made.size, -1)
    expected = made.rank + 10 * np.arange(made.size)
    for algorithm in ("native", "bruck"):
        recv.fill(-1)
        hiercoll.alltoall(made, send, recv, algorithm=algorithm)
        np.testing.assert_array_equal(recv, expected)
    assert get_session(made).topology.size == made.size == get_session(made).comm.size
    recv.fill(-1)
    plan = made.Alltoall_init(send, recv)
    plan.Start()
    plan.Wait()
    plan.Free()
    np.testing.assert_array_equal(recv, expected)
    made.Free()


class Derived(hiercoll.Intracomm):
    """A program's own kind."""


def test_of_a_kind_of_the_programs_own(comm: MPI.Intracomm) -> None:
    """Duplicates are of it, as mpi4py's are; others of the drop-in's."""
    derived = Derived(comm)
    derived.note = "what Python's classes take"  # type: ignore[attr-defined]
    derived.Barrier()
    kinds = {
        Derived: [derived.Dup(), derived.Clone()],
        hiercoll.Intracomm: [derived.Split(), derived.Create(comm.group)],
    }
    for kind, made in kinds.items():
        for each in made:
            assert type(each) is kind
            each.Free()


def test_making_and_freeing_as_mpi4py(comm: MPI.Intracomm) -> None:
    """Arguments by name, no communicator for some ranks, and mpi4py's errors, with mpi4py's words."""
    ours = hiercoll.Intracomm(comm)
    ours.Barrier()
    backwards = ours.Split(color=0, key=-RANK)
    assert backwards.rank == SIZE - 1 - RANK
    nobody = ours.Split(MPI.UNDEFINED if RANK else 0)
    assert (nobody == MPI.COMM_NULL) == (RANK > 0)
    wrong: list[Callable[[Any], Any]] = [
        lambda c: c.Split("red"),
        lambda c: c.Split(0, 0, 0),
        lambda c: c.Split(colour=0),
        lambda c: c.Create_cart("grid"),
        lambda c: c.Free(0),
        lambda c: c.Free(now=True),
    ]
    for call in wrong:
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            call(comm)
        with pytest.raises(Exception) as found:  # noqa: PT011
            call(ours)
        assert type(found.value) is type(theirs.value) and str(found.value) == str(theirs.value)
    backwards.Free()
    assert backwards == MPI.COMM_NULL and not backwards
    with pytest.raises(MPI.Exception):
        backwards.Free()
    if not RANK:
        nobody.Free()
    with pytest.raises((TypeError, AttributeError)):
        hiercoll.Intracomm.Split(3)


def test_identity(comm: MPI.Intracomm) -> None:
    """It is the communicator: attributes, name, handle, equality, module of its type, pickling of predefined ones."""
    ours = hiercoll.Intracomm(comm)
    assert ours == comm and ours.handle == comm.handle and hiercoll.Intracomm.fromhandle(comm.handle) == comm
    key = MPI.Comm.Create_keyval()
    ours.Set_attr(key, "value")
    ours.Set_name("mine")
    assert comm.Get_attr(key) == "value" and comm.Get_name() == "mine"
    comm.Delete_attr(key)
    MPI.Comm.Free_keyval(key)
    made = [comm, comm.Create_cart([SIZE]), comm.Create_dist_graph_adjacent([], [])]
    for plain in [*made, pkl5.Intracomm(comm)]:
        kind = type(dropin.drop_in(plain))
        assert kind is not type(plain)
        assert kind.__module__ == type(plain).__module__  # as petsc4py asks
    for each in made[1:]:
        each.Free()
    world = pickle.loads(pickle.dumps(hiercoll.Intracomm(MPI.COMM_WORLD)))
    assert world == MPI.COMM_WORLD and isinstance(world, hiercoll.Intracomm)
    with pytest.raises(ValueError, match="serialize"):
        pickle.dumps(ours)
    assert hiercoll.Intracomm(comm).Split(MPI.UNDEFINED) == MPI.COMM_NULL
    for each in (ours, comm):
        with pytest.raises(AttributeError):
            each.nmae = "mine"  # type: ignore[attr-defined]


ARRAY = np.zeros(2 * SIZE, "i4")
FIXED = np.zeros(2 * SIZE, "i4")
FIXED.flags.writeable = False
BAD: list[tuple[str, Any, Any]] = [
    ("Alltoall", ARRAY, None),
    ("Alltoall", ARRAY, "text"),
    ("Alltoall", ARRAY, FIXED),
    ("Alltoall", 3, ARRAY.copy()),
    ("Alltoall", [ARRAY, "no type"], ARRAY.copy()),
    ("Alltoall", [ARRAY], ARRAY.copy()),
    ("Alltoall", [ARRAY, -1, MPI.INT], ARRAY.copy()),
    ("Alltoall", [ARRAY, 1, 99 * SIZE, MPI.INT], ARRAY.copy()),
    ("Alltoall", np.zeros((2, SIZE, 2))[:, :, 0], ARRAY.copy()),
    ("Alltoall", np.array([None] * SIZE), ARRAY.copy()),
    ("Allgather", ARRAY, [ARRAY.copy(), 1, 2, 3, 4]),
    ("Allgather", [None, 3, MPI.INT], ARRAY.copy()),
    ("Allgatherv", ARRAY[:2], [ARRAY.copy(), [1] * (SIZE + 1)]),
    ("Alltoallv", [ARRAY, [2] * (SIZE + 2)], [ARRAY.copy(), [2] * SIZE]),
    ("Alltoallv", [ARRAY, [1.5] * SIZE], [ARRAY.copy(), [2] * SIZE]),
]


@pytest.mark.parametrize(("name", "send", "recv"), BAD)
def test_errors_are_mpi4pys(comm: MPI.Intracomm, name: str, send: Any, recv: Any) -> None:
    """The same kind of error as without hiercoll, and the communicator works on."""
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        getattr(comm, name)(send, recv)
    with pytest.raises(Exception) as ours:  # noqa: PT011
        getattr(hiercoll.Intracomm(comm), name)(send, recv)
    assert type(ours.value) is type(theirs.value) and str(ours.value) == str(theirs.value)
    recv = np.empty(SIZE, int)
    hiercoll.Intracomm(comm).Allgather(np.array([RANK]), recv)
    np.testing.assert_array_equal(recv, np.arange(SIZE))


class Ran(list[str]):
    """An observer that notes what serves calls."""

    def begin(self, *call: object) -> None:
        """See `dropin.Observer`."""

    def end(self, begun: object, ran: str) -> None:
        self.append(ran)


@pytest.mark.parametrize("collective", called(), ids=str)
def test_arguments_that_are_too_many(comm: MPI.Intracomm, collective: Collective) -> None:
    """mpi4py refuses them, in all forms; persistent ones take an ``info``."""
    ours, buffers = hiercoll.Intracomm(comm), [np.zeros(SIZE)] * (collective.buffers + len(collective.more))
    persistent = [*buffers, MPI.INFO_NULL]
    for name, most in (
        (collective.native, buffers),
        (collective.nonblocking, buffers),
        (collective.persistent, persistent),
    ):
        for more, options in (((0,), {}), ((), {"other": 0})):
            with pytest.raises(TypeError):
                getattr(ours, name)(*most, *more, **options)


@pytest.mark.parametrize("collective", [each for each in called() if each.buffers], ids=str)
def test_arguments_that_are_missing(comm: MPI.Intracomm, collective: Collective) -> None:
    """mpi4py says so, in its words."""
    ours = hiercoll.Intracomm(comm)
    for name in (collective.native, collective.nonblocking, collective.persistent):
        for given in ((), (np.zeros(SIZE),))[: collective.buffers]:
            said = []
            for each in (comm, ours):
                with pytest.raises(TypeError) as caught:
                    getattr(each, name)(*given)
                said.append(str(caught.value))
            assert said[0] == said[1]


@pytest.mark.mpi(min_size=2)  # calls of one rank are MPI's
def test_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``--algorithm`` says is what runs."""
    ours, ran = hiercoll.Intracomm(WORLD.Dup()), Ran()
    dropin.observe(ran)
    monkeypatch.setitem(settings.forced, "alltoall", ("bruck", {"radix": 3}))
    monkeypatch.setitem(settings.forced, "alltoallv", ("aggregate", {"form": "leader", "window": 2}))
    recv = np.empty(SIZE)
    ours.Alltoall(np.full(SIZE, float(RANK)), recv)
    np.testing.assert_array_equal(recv, np.arange(SIZE))
    ours.Alltoallv([np.full(SIZE, float(RANK)), [1] * SIZE], [recv, [1] * SIZE])
    np.testing.assert_array_equal(recv, np.arange(SIZE))
    assert ran == ["alltoall bruck radix=3", "alltoallv aggregate form=leader window=2"]
    dropin.ignore(ran)
    ours.Free()


@pytest.mark.parametrize("timeout", [0, 30])
def test_native_by_choice(monkeypatch: pytest.MonkeyPatch, calls: dropin.Calls, timeout: float) -> None:
    """What a table, or the user, leaves to the MPI library does not come back to hiercoll."""
    for name in ("alltoall", "allgather", "alltoallv", "allgatherv"):
        monkeypatch.setitem(settings.forced, name, ("native", {}))
    ours, ones = hiercoll.Intracomm(WORLD.Dup()), np.ones(SIZE, int)
    hiercoll.configure(ours, timeout=timeout)
    for _ in range(3):
        send, recv = np.full(SIZE, float(RANK)), np.empty((4, SIZE))
        ours.Alltoall(send, recv[0])
        ours.Allgather(send[:1], recv[1])
        ours.Alltoallv([send, ones], [recv[2], ones])
        ours.Allgatherv(send[:1], [recv[3], ones])
        np.testing.assert_array_equal(recv, np.tile(np.arange(SIZE), (4, 1)))
    ours.Free()
    assert calls.total() == 12 and (timeout or set(calls.values()) == {3})


@pytest.mark.parametrize("how", ["Free", "free", "Disconnect"])
def test_freed_with_attributes_of_others(how: str) -> None:
    """MPICH deletes them one by one, and mpi4py looks at them in between."""
    keys = [MPI.Comm.Create_keyval(delete_fn=lambda *_: gone.append(1)) for _ in range(3)]
    for turn in range(50):
        gone: list[int] = []
        made = hiercoll.Intracomm(MPI.Intracomm(WORLD).Dup())
        made.Set_attr(keys[0], turn)
        hiercoll.get_topology(made)
        made.Set_attr(keys[1], turn)
        getattr(made, how)()
        assert len(gone) == 2 and made == MPI.COMM_NULL
    for key in keys:
        MPI.Comm.Free_keyval(key)


def test_what_python_says_of_methods_and_functions() -> None:
    """mpi4py's own words and names of arguments; signatures of functions, which may be compiled."""
    for collective in called():
        for name in (collective.native, collective.nonblocking, collective.persistent):
            method, theirs = getattr(hiercoll.Intracomm, name), getattr(MPI.Intracomm, name)
            assert method.__doc__ == theirs.__doc__
            taken = inspect.signature(method).parameters.values()
            given = [each.name for each in taken if each.kind < each.VAR_POSITIONAL]
            assert given == [each for each in inspect.signature(theirs).parameters if each != "info"]
        for name in (collective.name, f"i{collective.name}", f"{collective.name}_init"):
            assert "comm" in inspect.signature(getattr(hiercoll, name)).parameters
    assert hiercoll.Intracomm.Dup.__doc__ == MPI.Intracomm.Dup.__doc__


@pytest.mark.parametrize("method", ["Allreduce", "Allgather", "Alltoallv"])
def test_what_is_raised_is_mpi4pys_alone(ours: hiercoll.Intracomm, method: str) -> None:
    """No error of hiercoll's comes before it in a traceback."""
    ours.Alltoall(np.zeros(SIZE), np.zeros(SIZE))  # sets hiercoll up
    wrong = [np.zeros(SIZE, "i4"), MPI.DATATYPE_NULL]
    with pytest.raises((MPI.Exception, ValueError)) as found:
        getattr(ours, method)(wrong, wrong)
    assert found.value.__context__ is None
