"""Plans, sub-communicators, buffers of all kinds, caches, life and death of communicators."""

from __future__ import annotations

import gc
import os
import weakref
from array import array
from collections.abc import Callable

import numpy as np
import pytest
from conftest import WORLD, nothing_is_under_way
from mpi4py import MPI

import hiercoll
from hiercoll.calls import functions as api
from hiercoll.runtime import compiled, progress
from hiercoll.runtime import session as communicator
from hiercoll.runtime.lifetime import get_session
from hiercoll.tuning.policy import forced_variants

RANK, SIZE = WORLD.rank, WORLD.size
COMPILED = compiled.load()[0] is not None


def expected(collective: str, send: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    """The MPI library's result."""
    if collective == "alltoall":
        want = np.empty_like(send)
        comm.Alltoall(send, want)
    else:
        want = np.empty((comm.size, *send.shape), send.dtype)
        comm.Allgather(send, want)
    return want


@pytest.mark.parametrize("algorithm", ["scatter_destination", "hierarchical", "grouped", "native"])
def test_two_plans_at_once(algorithm: str, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Started in one order, completed in another; a blocking call in between."""
    comm = on_layout(f"{SIZE - SIZE // 2}+{SIZE // 2}" if SIZE > 1 else "1x1")
    first, second = np.arange(SIZE * 100) + RANK * 1000, np.arange(SIZE * 3) - RANK
    a = hiercoll.alltoall_init(comm, first, algorithm=algorithm)
    b = hiercoll.alltoall_init(comm, second, algorithm=algorithm)
    for _ in range(5):
        a.start()
        b.start()
        other = hiercoll.allgather(comm, np.array([RANK]), algorithm="direct")
        assert np.array_equal(b.wait(), expected("alltoall", second, comm))
        assert np.array_equal(a.wait(), expected("alltoall", first, comm))
        assert np.array_equal(other.ravel(), np.arange(SIZE))
        first += 1
        second += 7
    b.free()
    a.free()


def test_two_shared_plans_at_once(on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Each plan has its own window; they are freed in different orders on different ranks."""
    comm = on_layout(f"{SIZE - SIZE // 2}+{SIZE // 2}" if SIZE > 1 else "1x1")
    for _ in range(3):
        sends = [np.arange(SIZE * 5) + RANK * 100 + k for k in range(3)]
        plans = [hiercoll.alltoall_init(comm, send, algorithm="grouped", memory="shared") for send in sends]
        for plan in plans:
            plan.start()
        for plan, send in zip(reversed(plans), reversed(sends), strict=True):
            assert np.array_equal(plan.wait(), expected("alltoall", send, comm))
        for plan in plans if RANK % 2 else reversed(plans):
            plan.free()


def test_plans_take_over_windows(on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """A held plan works in the window that another, with other flags and blocks, has left: nothing of that is seen.
    Where ranks have freed their plans in different orders, windows are still the same on all of them."""
    comm = on_layout(f"{SIZE - SIZE // 2}+{SIZE // 2}" if SIZE > 1 else "1x1")
    windows, made = get_session(comm).windows, 0
    for turn, collective in enumerate(["alltoall", "allgather"] * 3):
        send = np.arange(SIZE * 40, dtype="i8") + 1000 * RANK + turn
        if collective == "alltoall":
            plan = hiercoll.alltoall_init(comm, send, algorithm="grouped", memory="shared")
        else:
            plan = hiercoll.allgather_init(comm, send[: 9 - turn], algorithm="shared")
        with plan:
            for _ in range(turn + 1):
                assert np.array_equal(plan(), expected(collective, send if turn % 2 == 0 else send[: 9 - turn], comm))
                plan.recvbuf[:] = -1
                send += SIZE * 1000
        made = made or windows.made
        assert windows.made == made
    for count in range(4):
        sends = [np.arange(SIZE * (5 - count)) + RANK * 100 + k for k in range(3)]
        plans = [hiercoll.alltoall_init(comm, send, algorithm="grouped", memory="shared") for send in sends]
        assert len(set(WORLD.allgather(windows.made))) == 1
        for _ in range(2):
            for plan, send in zip(plans, sends, strict=True):
                assert np.array_equal(plan(), expected("alltoall", send, comm))
                plan.recvbuf[:] = -1
                send += 1
        for plan in plans if RANK % 2 else reversed(plans):
            plan.free()


def test_test_and_wait(comm: MPI.Intracomm) -> None:
    """`test` makes progress and turns True; `wait` returns the receive array."""
    send = np.arange(SIZE * 1000) * (RANK + 1)
    for algorithm in ("pairwise", "hierarchical", "native", "bruck"):
        with hiercoll.alltoall_init(comm, send, algorithm=algorithm) as plan:
            assert plan.test()
            plan.start()
            while not plan.test():
                pass
            assert np.array_equal(plan.wait(), expected("alltoall", send, comm))


def test_plan_states(comm: MPI.Intracomm) -> None:
    """Starting twice, freeing while active and using a freed plan are refused."""
    send = np.arange(SIZE)
    plan = hiercoll.alltoall_init(comm, send, algorithm="pairwise")
    plan.start()
    with pytest.raises(hiercoll.PlanError, match="active"):
        plan.start()
    with pytest.raises(hiercoll.PlanError, match="active"):
        plan()
    with pytest.raises(hiercoll.PlanError, match="active"):
        plan.free()
    plan.wait()
    assert plan.schedule is not None and plan.schedule.rank == RANK
    plan.free()
    plan.free()
    with pytest.raises(hiercoll.PlanError, match="freed"):
        plan()


@pytest.mark.parametrize("collective", ["alltoall", "allgather"])
def test_sub_communicators(collective: str, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Halves of the world, and the world in reverse, see their part of the nodes."""
    world = on_layout(f"{SIZE - SIZE // 2}+{SIZE // 2}:cyclic" if SIZE > 1 else "1x1")
    whole = hiercoll.get_topology(world)
    parts = [
        (world.Split(RANK % 2, RANK), [r for r in range(SIZE) if r % 2 == RANK % 2]),
        (world.Split(0, -RANK), list(reversed(range(SIZE)))),
    ]
    for part, members in parts:
        nodes = [whole.node_of[member] for member in members]
        topology = hiercoll.get_topology(part)
        assert [len(set(nodes[: i + 1])) for i in range(len(nodes))] == [
            max(topology.node_of[: i + 1]) + 1 for i in range(len(nodes))
        ]
        for algorithm in ("auto", "grouped" if collective == "alltoall" else "node_aware", "hierarchical"):
            send = np.arange(6 * part.size) + 1000 * RANK
            got = getattr(hiercoll, collective)(part, send, algorithm=algorithm)
            assert np.array_equal(got, expected(collective, send, part))
        part.Free()


DTYPES = ["?", "i1", "<u2", "f4", "c16", "f8,i4", "S3", "M8[s]", "V5", ">i8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, comm: MPI.Intracomm) -> None:
    """Any dtype of fixed size; the new result has the shape, type and order of the send array."""
    raw = np.random.default_rng(RANK).integers(0, 2, 4 * SIZE * np.dtype(dtype).itemsize, dtype=np.uint8)
    send = raw.view(dtype).reshape(SIZE, 4)
    both = comm.allgather(send.tobytes())
    got = hiercoll.alltoall(comm, send)
    assert got.dtype == send.dtype and got.shape == send.shape
    block = len(both[0]) // SIZE
    assert got.tobytes() == b"".join(data[RANK * block : (RANK + 1) * block] for data in both)
    every = hiercoll.allgather(comm, send)
    assert every.shape == (SIZE, *send.shape) and every.tobytes() == b"".join(both)


def test_memory_orders(comm: MPI.Intracomm) -> None:
    """Fortran order is kept, so that allgather's parts index like the sender's array."""
    send = np.asfortranarray(np.arange(12).reshape(3, 4) + 100 * RANK)
    every = hiercoll.allgather(comm, send)
    for rank in range(SIZE):
        assert np.array_equal(every[rank], np.arange(12).reshape(3, 4) + 100 * rank)
    scalar = hiercoll.allgather(comm, np.array(RANK))
    assert scalar.shape == (SIZE,) and np.array_equal(scalar, np.arange(SIZE))


def test_mpi4py_spellings(comm: MPI.Intracomm) -> None:
    """[buf, count, type] counts per block; buffers other than NumPy's; counts smaller than the buffer."""
    send, recv = array("i", range(2 * SIZE)), bytearray(8 * SIZE)
    hiercoll.alltoall(comm, [send, 2, MPI.INT], [recv, MPI.INT])
    want = np.empty(2 * SIZE, "i4")
    comm.Alltoall(np.arange(2 * SIZE, dtype="i4"), want)
    assert bytes(recv) == want.tobytes()
    large = np.full(3 * SIZE, -1)
    hiercoll.allgather(comm, [np.array([RANK, 0]), 1, MPI.INT64_T], [large, 1, MPI.INT64_T])
    assert np.array_equal(large, [*range(SIZE), *[-1] * (2 * SIZE)])


def test_known_buffers_reuse_the_plan(comm: MPI.Intracomm) -> None:
    """Same buffers, same plan; other buffers a new plan of the same schedule, or, by the compiled engine, the same one;
    no array is kept alive."""
    send, recv = np.arange(SIZE), np.empty(SIZE, dtype=int)
    for _ in range(3):
        hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
    session = get_session(comm)
    assert len(session.plans) == 1
    other = np.empty(SIZE, dtype=int)
    for _ in range(2):  # a plan is made when a call comes again
        hiercoll.alltoall(comm, send, other, algorithm="pairwise")
    plans = list(session.plans.values())
    assert len(plans) == (1 if COMPILED else 2) and len({id(plan.schedule) for plan in plans}) == 1
    alive = weakref.ref(other)
    del other
    gc.collect()
    assert alive() is None
    hiercoll.alltoall(comm, send.view("f8"), recv.view("f8"), algorithm="pairwise")  # same addresses, other type
    assert np.array_equal(recv, expected("alltoall", send, comm))


@pytest.mark.parametrize("collective", ["alltoall", "allgather"])
def test_parameters_do_not_hide_a_known_plan(
    collective: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that name their algorithm with parameters find their plan at once; what is no parameter is refused, also
    where it equals one."""
    call, variant = getattr(hiercoll, collective), {"algorithm": "ring", "segments": 1}
    if collective == "alltoall":
        variant = {"algorithm": "scatter_destination", "window": 1}
    name = list(variant)[1]
    send = np.arange(SIZE * 2) + RANK
    recv = np.empty((1 if collective == "alltoall" else SIZE) * send.size, send.dtype)
    for _ in range(2):
        call(comm, send, recv, **variant)
        recv[:] = -1
    for wrong in (True, 1.0, [1]):
        with pytest.raises(hiercoll.ParameterError):
            call(comm, send, recv, **{**variant, name: wrong})
    slow: list[object] = []
    monkeypatch.setattr(api, "_call", lambda *arguments: slow.append(arguments))
    call(comm, send, recv, **variant)
    assert not slow
    np.testing.assert_array_equal(recv.reshape(-1), expected(collective, send, comm).reshape(-1))
    call(comm, send, recv, **{**variant, name: 2})
    assert len(slow) == 1


NAMED: dict[str, tuple[str, dict[str, object]]] = {
    "alltoall": ("scatter_destination", {"window": 1}),
    "allgather": ("ring", {"segments": 2}),
    "alltoallv": ("scatter_destination", {"window": 1}),
    "allgatherv": ("ring", {"segments": 2}),
}


@pytest.mark.parametrize("form", ["arrays", "other spellings", "drop-in"])
@pytest.mark.parametrize("collective", NAMED)
def test_one_plan_for_all_calls_with_parameters(
    collective: str, form: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal calls that name their algorithm with parameters make one plan, those with other parameters another one."""
    made, original = [0], hiercoll.Plan.__init__

    def counting(self: hiercoll.Plan, *args: object, **options: object) -> None:
        made[0] += 1
        original(self, *args, **options)

    monkeypatch.setattr(hiercoll.Plan, "__init__", counting)
    algorithm, params = NAMED[collective]
    blocks, counts = SIZE if collective.startswith("alltoall") else 1, np.full(SIZE, 2)
    send, recv = np.arange(2 * blocks) + 100 * RANK, np.full(2 * SIZE, -1)
    sent = 2 * RANK * (blocks > 1)
    want = np.concatenate([np.arange(sent, sent + 2) + 100 * peer for peer in range(SIZE)])
    out, into = (send, recv) if form == "arrays" else ([send, 2, MPI.INT64_T], [recv, 2, MPI.INT64_T])
    if collective == "allgatherv":
        out, into = send, [recv, counts]
    elif collective == "alltoallv":
        out, into = [send, counts], [recv, counts]
    if form == "other spellings" and collective.endswith("v"):
        places = 2 * np.arange(SIZE)
        into = [recv, (counts, places)]
        out = [send, (counts, places)] if collective == "alltoallv" else out

    def call(**params: object) -> None:
        recv[:] = -1
        if form == "drop-in":
            get_session(comm).policy.forced.update(forced_variants({collective: (algorithm, params)}))
            get_session(comm).forget_calls()  # whose arguments name no algorithm
            getattr(hiercoll.Intracomm(comm), collective.capitalize())(out, into)
        else:
            getattr(hiercoll, collective)(comm, out, into, algorithm=algorithm, **params)
        np.testing.assert_array_equal(recv, want)

    number = []
    other = {"window": {"window": 2}, "segments": {"segments": 1}}[next(iter(params))]
    for chosen in (params, params, params, other, other, params):
        made[0] = 0
        call(**chosen)
        number.append(made[0])
    served = SIZE > 1 or form != "drop-in"  # calls of one rank are MPI's
    # The first of its kind may do without one, or have one for itself.
    assert number[2] == number[5] == 0
    assert all(1 <= sum(first) <= 2 if served else not any(first) for first in (number[:2], number[3:5]))


def test_caches_are_bounded(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and windows beyond the limits go, in the same order on all ranks, whatever was rebound."""
    monkeypatch.setattr(communicator, "MAX_PLANS", 4)
    monkeypatch.setattr(communicator, "MAX_WINDOWS", 2)
    fixed = np.arange(SIZE * 8, dtype="u1")
    result = np.empty_like(fixed)
    for turn in range(30):
        items = 1 + turn * 5 % 4
        send = fixed[: SIZE * items]
        # Odd ranks use the same buffers again and again, even ones new ones: hits here, misses there.
        recv = result[: SIZE * items] if RANK % 2 else np.empty(SIZE * items, "u1")
        hiercoll.alltoall(comm, send, recv, algorithm="grouped", memory="shared")
        assert np.array_equal(recv, expected("alltoall", send, comm))
    session = get_session(comm)
    assert len(session.plans) <= 4 and len(session.windows.kept) <= 2


def test_freeing_the_communicator_frees_the_state() -> None:
    """Requests, windows and duplicates go with MPI_Comm_free; the handle can be used again."""
    for turn in range(40):
        comm = WORLD.Dup()
        send = np.arange(SIZE) + turn
        assert np.array_equal(
            hiercoll.alltoall(comm, send, algorithm="grouped", memory="shared"), expected("alltoall", send, comm)
        )
        plan = hiercoll.alltoall_init(comm, send)
        plan()
        comm.Free()
        with pytest.raises(hiercoll.PlanError, match="freed"):
            plan()
        with pytest.raises(hiercoll.CommunicatorError):
            hiercoll.alltoall(comm, send)


def test_attribute_callbacks_of_the_user_do_not_run(comm: MPI.Intracomm) -> None:
    """The private duplicate is no MPI_Comm_dup of the user's communicator."""
    copied = []

    def copy(comm: MPI.Comm, keyval: int, value: object) -> object:
        copied.append(value)
        return value

    keyval = MPI.Comm.Create_keyval(copy_fn=copy)
    comm.Set_attr(keyval, "mine")
    hiercoll.alltoall(comm, np.arange(SIZE))
    comm.Delete_attr(keyval)
    MPI.Comm.Free_keyval(keyval)
    assert not copied


def test_disabled(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """HIERCOLL_DISABLE=1 sends every call to the MPI library."""
    monkeypatch.setenv("HIERCOLL_DISABLE", "1")
    send = np.arange(SIZE)
    plan = hiercoll.alltoall_init(comm, send, algorithm="bruck")
    assert plan.schedule is None
    assert np.array_equal(plan(), expected("alltoall", send, comm))


def test_spellings_that_mean_the_same_bytes(on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Ranks may spell their items differently, and reuse buffers or not: what counts is bytes."""
    comm = on_layout(f"{SIZE - SIZE // 2}+{SIZE // 2}" if SIZE > 1 else "1x1")
    send, recv = np.arange(SIZE, dtype="f8") + 10 * RANK, np.empty(SIZE)
    for algorithm, params in (("grouped", {"memory": "shared"}), ("bruck", {})):
        hiercoll.alltoall(comm, [send, 8, MPI.BYTE], [recv, 8, MPI.BYTE], algorithm=algorithm, **params)
        fresh = (send, recv) if RANK == 0 else (send.copy(), np.empty(SIZE))
        spelled = (8, MPI.BYTE) if RANK == 0 else (1, MPI.DOUBLE)
        hiercoll.alltoall(comm, [fresh[0], *spelled], [fresh[1], *spelled], algorithm=algorithm, **params)
        assert np.array_equal(fresh[1], expected("alltoall", send, comm))
    part = np.arange(7, dtype="u2") + RANK
    spelled = (14, MPI.BYTE) if RANK % 2 else (7, MPI.UINT16_T)
    got = np.empty(7 * SIZE, "u2")
    hiercoll.allgather(comm, [part, *spelled], [got, *spelled], algorithm="ring", segments=3)
    assert np.array_equal(got, expected("allgather", part, comm).ravel())


def test_a_count_smaller_than_the_buffer_makes_a_result_of_that_size(comm: MPI.Intracomm) -> None:
    """The new receive array holds what was sent, not what lies behind it."""
    got = hiercoll.alltoall(comm, [np.arange(5 * SIZE), 2, MPI.INT64_T])
    assert np.array_equal(got, expected("alltoall", np.arange(2 * SIZE), comm))


class Interrupt(BaseException):
    """What a signal handler may raise at any time."""


def interrupt() -> None:
    """In place of a run."""
    raise Interrupt


def test_an_interrupted_plan_is_broken(comm: MPI.Intracomm) -> None:
    """It gives no data any more, says so, and can be freed; the communicator goes on."""
    plan = hiercoll.alltoall_init(comm, np.arange(SIZE), algorithm="pairwise")
    plan._run = interrupt
    with pytest.raises(Interrupt):
        plan()
    for use in (plan, plan.start, plan.wait):
        with pytest.raises(hiercoll.PlanError, match="interrupted"):
            use()
    plan.free()
    assert np.array_equal(hiercoll.alltoall(comm, np.arange(SIZE)), expected("alltoall", np.arange(SIZE), comm))


@pytest.mark.parametrize("where", ["everywhere", "on rank 0"])
def test_an_interrupted_call_breaks_the_communicator(where: str) -> None:
    """Later calls say so at once; a duplicate works; freeing neither raises nor hangs."""
    comm = WORLD.Dup()
    send, recv = np.arange(SIZE), np.empty(SIZE, int)
    for _ in range(2):  # a plan is made when a call comes again
        hiercoll.alltoall(comm, send, recv, algorithm="grouped", memory="shared")
        hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
    if where == "everywhere" or RANK == 0:
        list(get_session(comm).plans.values())[-1]._run = interrupt
        get_session(comm).forget_calls()  # the compiled engine would run the plan without this
        with pytest.raises(Interrupt):
            hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
        for buffers in ((send, recv), (send,)):
            with pytest.raises(hiercoll.CommunicatorError, match=r"pairwise .*was interrupted"):
                hiercoll.alltoall(comm, *buffers, algorithm="pairwise")
    again = comm.Dup()
    assert np.array_equal(hiercoll.alltoall(again, send, recv), expected("alltoall", send, again))
    again.Free()
    comm.Free()


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_freeing_the_communicator_under_an_active_plan(memory: str) -> None:
    """As with MPI's own requests, what is under way completes."""
    comm = WORLD.Dup()
    send = np.arange(SIZE * 2000) + RANK
    plan = hiercoll.alltoall_init(comm, send, algorithm="grouped", memory=memory)
    plan.start()
    want = expected("alltoall", send, comm)
    comm.Free()
    assert np.array_equal(plan.wait(), want)


def test_disabled_on_one_rank_is_disabled_on_all(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers do not forward every variable."""
    if RANK == 0:
        monkeypatch.setenv("HIERCOLL_DISABLE", "1")
    plan = hiercoll.alltoall_init(comm, np.arange(SIZE), algorithm="bruck")
    assert plan.schedule is None
    plan.free()


def test_auto_takes_little_shared_memory(on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Hosts, above all containers, may have little of it."""
    session = get_session(on_layout(f"1x{SIZE}"))
    for collective in ("alltoall", "allgather"):
        hiercoll_call = getattr(hiercoll, f"{collective}_init")
        send = np.zeros((9 << 20) // SIZE * (SIZE if collective == "alltoall" else 1), np.uint8)
        with hiercoll_call(session.comm, send) as plan:
            assert plan.schedule is None or plan.schedule.shared == 0


LARGE = pytest.mark.skipif(not os.environ.get("HIERCOLL_TEST_LARGE"), reason="set HIERCOLL_TEST_LARGE=1: takes 14 GiB")
GIB = 1 << 30


@LARGE
@pytest.mark.ranks({2})
@pytest.mark.parametrize("algorithm", ["direct", "native"])
def test_blocks_beyond_2_gib(algorithm: str, comm: MPI.Intracomm) -> None:
    """One block of more than 2^31 bytes, of which no part is lost or moved."""
    send = np.arange((2 * GIB + 24) // 8, dtype="u8")
    send += np.uint64(RANK << 40)
    recv = np.zeros((2, send.size), "u8")
    hiercoll.allgather(comm, send, recv, algorithm=algorithm)
    send &= np.uint64((1 << 40) - 1)
    for rank in range(2):
        assert (recv[rank, 0], recv[rank, -1]) == (rank << 40, (rank << 40) + send.size - 1)
        recv[rank] -= np.uint64(rank << 40)
        assert np.array_equal(recv[rank], send)


@LARGE
@pytest.mark.ranks({2})
@pytest.mark.parametrize("runs", [((0, GIB + 8), (GIB + 64, GIB + 8)), ((8, 2 * GIB + 9), (0, 3))])
def test_scattered_messages_beyond_2_gib(runs: tuple[tuple[int, int], ...]) -> None:
    """A message of several pieces, together or each of more than 2^31 bytes."""
    from hiercoll.runtime.messages import _datatype

    datatype = _datatype(runs).Commit()
    assert datatype.Get_size() == sum(length for _, length in runs)
    if RANK == 0:
        end = max(offset + length for offset, length in runs)
        send, recv = np.arange(end // 4 + 1, dtype="u4").view("u1"), np.zeros(end + 4, "u1")
        MPI.COMM_SELF.Sendrecv([send, 1, datatype], 0, recvbuf=[recv, 1, datatype], source=0)
        covered = np.zeros(end + 4, bool)
        for offset, length in runs:
            covered[offset : offset + length] = True
            assert np.array_equal(recv[offset : offset + length], send[offset : offset + length])
        assert not recv[~covered].any()
    datatype.Free()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("asks", ["wait", "test"])
@pytest.mark.parametrize("threaded", [False, True])
def test_plans_completed_in_any_order(
    asks: str, threaded: bool, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may complete what they have started in different orders, with other calls between."""
    if threaded:
        progress.want_thread()
    items = 40_000  # messages that wait for their receives
    sends = [np.arange(float(items * comm.size)) + 1e7 * comm.rank + salt for salt in range(2)]
    wants = [np.empty_like(sends[0]) for _ in range(2)]
    for send, want in zip(sends, wants, strict=True):
        MPI.Comm.Alltoall(comm, send, want)
    plans = [hiercoll.alltoall_init(comm, send, algorithm="bruck") for send in sends]
    for turn in range(3):
        for plan in plans:
            plan.start()
        is_first = (comm.rank < comm.size // 2) == (turn % 2 == 0)  # whom the second round is with is of the other kind
        for plan in plans if is_first else plans[::-1]:
            if asks == "test":
                while not plan.test():
                    pass
            plan.wait()
        plans[0].start()
        if is_first:
            plans[0].wait()
        assert hiercoll.allgather(comm, np.array([comm.rank]), algorithm="ring").tolist() == [
            [rank] for rank in range(comm.size)
        ]
        plans[0].wait()
        for plan, want in zip(plans, wants, strict=True):
            np.testing.assert_array_equal(plan.recvbuf, want)
            plan.recvbuf[:] = -1
    assert nothing_is_under_way()
    for plan in plans:
        plan.free()
