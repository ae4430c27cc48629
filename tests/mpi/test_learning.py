"""Learning in real calls: what a communicator costs before it is set up, trials among all that programs do, and what is
kept between jobs."""

from __future__ import annotations

import random
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HAS_PERSISTENT, WORLD
from mpi4py import MPI

import hiercoll
from hiercoll import learned, settings
from hiercoll.algorithms import REGISTRY
from hiercoll.calls import dropin, served
from hiercoll.collectives import ALLGATHER, ALLTOALL, ALLTOALLV, BCAST, Collective
from hiercoll.errors import BufferSizeError, CommunicatorError, LearnedWarning
from hiercoll.learned import Lesson, known_ranks, read_all
from hiercoll.model.cost import DEFAULT_LINKS, Link, Links
from hiercoll.runtime import beginning, bound, compiled, lifetime, progress
from hiercoll.runtime.arguments import Arguments
from hiercoll.runtime.library import may_copy, mpi_library
from hiercoll.runtime.lifetime import first_calls, get_session, known_session
from hiercoll.runtime.session import Session
from hiercoll.tables import NATIVE_VARIANT, Variant
from hiercoll.topology import Surroundings, Topology
from hiercoll.tuning import policy
from hiercoll.tuning.budget import FIRST
from hiercoll.tuning.learning import FEWER, Finding, Learner
from hiercoll.tuning.policy import Policy, Wanted

RANK, SIZE = WORLD.rank, WORLD.size
# What Python does with blocking calls of drop-in communicators that the compiled engine does not know.
LOOKS = ((dropin, "serve_first"), (served, "_serve"), (served, "serve_native"))
several = pytest.mark.mpi(min_size=2)  # for one rank there is nothing to learn


@pytest.fixture(autouse=True)
def newcomer(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Nothing is known: no table, nothing from earlier jobs. Where jobs keep what they learn."""
    monkeypatch.delenv("HIERCOLL_TABLE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.setenv("HIERCOLL_LEARNED", str(folder / "learned"))
    monkeypatch.setattr(beginning, "LOOK", 0.0)
    return folder / "learned"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning may cost what it does."""
    if RANK == SIZE - 1:
        monkeypatch.setenv("HIERCOLL_LEARN", "online")


def buffers(salt: int, items: int = 5) -> tuple[Any, Any, Any]:
    """Of an alltoall of so many numbers per block, and what it is to give."""
    send = np.arange(SIZE * items) + 1000 * RANK + 1_000_000 * salt
    want = np.concatenate([np.arange(RANK * items, (RANK + 1) * items) + 1000 * peer for peer in range(SIZE)])
    return send, np.full(SIZE * items, -1), want + 1_000_000 * salt


def alltoall(comm: MPI.Intracomm, salt: int, items: int = 5) -> None:
    send, recv, want = buffers(salt, items)
    hiercoll.alltoall(comm, send, recv)
    np.testing.assert_array_equal(recv, want)


def is_set_up(comm: MPI.Intracomm) -> bool:
    return known_session(comm) is not None


def learner(comm: MPI.Intracomm, collective: Collective = ALLTOALL, size: int = 40) -> Learner:
    found = get_session(comm).policy.learner(Wanted(collective, size, collective.one_buffer))
    assert found is not None
    return found


def settle(comm: MPI.Intracomm) -> None:
    """Calls until all has been tried."""
    get_session(comm)
    for salt in range(1500):
        alltoall(comm, salt)
        if learner(comm).is_settled:
            return
    raise AssertionError("not settled")


# ---- before the set-up


def test_first_calls_are_native(comm: MPI.Intracomm, calls: dropin.Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of functions and methods, whatever they are, and right; nothing is set up for them."""
    monkeypatch.setattr(lifetime, "_set_up", 1e6)
    ours, ones = hiercoll.Intracomm(comm), np.ones(SIZE, int)
    for salt in range(3):
        alltoall(comm, salt)
        send, recv, want = buffers(salt)
        ours.Alltoall(send, recv)
        np.testing.assert_array_equal(recv, want)
        mine = np.array([RANK + salt])
        np.testing.assert_array_equal(hiercoll.allgather(comm, mine).ravel(), np.arange(SIZE) + salt)
        everyone = np.full(SIZE, -1)
        hiercoll.alltoallv(comm, [np.arange(SIZE) + 10 * RANK, ones], [everyone, ones])
        np.testing.assert_array_equal(everyone, 10 * np.arange(SIZE) + RANK)
        hiercoll.allgatherv(comm, mine, [everyone, ones])
        np.testing.assert_array_equal(everyone, np.arange(SIZE) + salt)
        root = salt % SIZE
        buf = np.full(3, RANK)
        hiercoll.bcast(comm, buf, root=root)
        np.testing.assert_array_equal(buf, [root] * 3)
        hiercoll.alltoall(comm, MPI.IN_PLACE, send)
        np.testing.assert_array_equal(send, want)
        assert hiercoll.alltoall(comm, np.zeros((SIZE, 0))).shape == (SIZE, 0)
    assert not is_set_up(comm) and set(calls) == {"alltoall, native"}


@pytest.mark.parametrize("others", ["none", "an array that does not matter"])
def test_first_rooted_calls_are_native(others: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranks that have but one buffer, too; only the root gets a result."""
    monkeypatch.setattr(lifetime, "_set_up", 1e6)
    whole = np.arange(SIZE * 3).reshape(SIZE, 3)
    for turn in range(4):
        root = turn % SIZE
        spare = None if others == "none" else np.full((SIZE, 3), -1)
        into = np.full((SIZE, 3), -1) if root == RANK else spare
        found = hiercoll.gather(comm, whole[RANK] + turn, into, root=root)
        assert found is (into if root == RANK else None)
        own = np.full(3, -1)
        assert hiercoll.scatter(comm, whole + turn if root == RANK else spare, own, root=root) is own
        np.testing.assert_array_equal(own, whole[RANK] + turn)
        total = hiercoll.reduce(comm, whole[RANK] + turn, None if spare is None else spare[0], root=root)
        if root == RANK:
            np.testing.assert_array_equal(into, whole + turn)
            np.testing.assert_array_equal(total, whole.sum(axis=0) + SIZE * turn)
        else:
            assert total is None and (spare is None or (spare == -1).all())
    with pytest.raises(hiercoll.ParameterError, match="root"):
        hiercoll.gather(comm, np.zeros(3), root=SIZE)
    assert not is_set_up(comm)


@several
def test_reductions_are_learned_where_bits_stay_the_same(comm: MPI.Intracomm, at_once: None) -> None:
    """Of whole numbers, and of sums that may be taken in any order; not of others."""
    policy = get_session(comm).policy
    whole, real = np.arange(6) + RANK, np.arange(9) / 3 + RANK
    for _ in range(40):
        hiercoll.allreduce(comm, real)
    assert not [each for each in policy._learners.values() if each is not None]
    for turn in range(1500):
        np.testing.assert_array_equal(
            hiercoll.allreduce(comm, whole + turn), sum(range(SIZE)) + SIZE * (np.arange(6) + turn)
        )
        np.testing.assert_allclose(
            hiercoll.allreduce(comm, real, order="any"), sum(range(SIZE)) + SIZE * np.arange(9) / 3
        )
        if policy.is_settled:
            break
    assert policy.is_settled and len([each for each in policy._learners.values() if each is not None]) == 2


def test_first_half_precision_however_it_is_spelled(comm: MPI.Intracomm) -> None:
    """Ranks set hiercoll up together for it, though one has no array of NumPy's."""
    half = np.full(4, RANK, np.float16)
    for _ in range(3):
        result = np.full(4, -1, np.float16)
        hiercoll.allreduce(comm, half if RANK else half.data, result, accumulate="float32")
        np.testing.assert_array_equal(result, sum(range(SIZE)))
    assert is_set_up(comm)


def test_ranks_agree_on_what_looks_cost(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a root's calls are known by their arrays, and those of others, which have one array, are not."""
    monkeypatch.setattr(lifetime, "_set_up", 1e6)
    own, into = np.ones(4), np.empty((SIZE, 4)) if RANK == 0 else None
    for _ in range(600):
        hiercoll.gather(comm, own, into)
    first = first_calls(comm)
    assert first is not None and (first.cost > 0.0 or SIZE == 1)
    assert len(set(WORLD.allgather((first.cost, first._calls, *first.paid)))) == 1


def test_wrong_arguments_before_the_set_up(comm: MPI.Intracomm) -> None:
    """Typed errors, as ever."""
    with pytest.raises(BufferSizeError, match="recvbuf"):
        hiercoll.alltoall(comm, np.zeros(SIZE), np.zeros(SIZE + 1))
    with pytest.raises(hiercoll.ParameterError, match="root"):
        hiercoll.bcast(comm, np.zeros(3), root=SIZE)
    with pytest.raises(hiercoll.BufferTypeError):
        hiercoll.alltoallv(comm, "text", [np.zeros(SIZE), np.ones(SIZE, int)])
    with pytest.raises(hiercoll.ParameterError, match="none with algorithm='auto'"):
        hiercoll.alltoall(comm, np.zeros(SIZE), radix=2)
    alltoall(comm, 1)


@pytest.mark.parametrize("how", ["plan", "name", "I-call", "topology", "configure", "transport"])
def test_what_sets_up_at_once(comm: MPI.Intracomm, how: str) -> None:
    send, recv, want = buffers(0)
    alltoall(comm, 0)
    assert not is_set_up(comm)
    if how == "plan":
        with hiercoll.alltoall_init(comm, send, recv) as plan:
            plan()
    elif how == "name":
        hiercoll.alltoall(comm, send, recv, algorithm="pairwise")
    elif how == "I-call":
        hiercoll.ialltoall(comm, send, recv).wait()
    elif how == "transport":
        hiercoll.alltoall(comm, send, recv, transport="direct")
    elif how == "topology":
        hiercoll.get_topology(comm)
    else:
        hiercoll.configure(comm)
    assert is_set_up(comm) and (how in ("topology", "configure") or np.array_equal(recv, want))
    alltoall(comm, 2)


@several
@pytest.mark.parametrize("name", ["HIERCOLL_CHECK", "HIERCOLL_TIMEOUT", "HIERCOLL_DISABLE"])
def test_what_one_rank_wants(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is so for all, from the first call on."""
    if RANK == SIZE - 1:
        monkeypatch.setenv(name, "1" if name != "HIERCOLL_TIMEOUT" else "30")
    alltoall(comm, 0)
    session = get_session(comm)
    assert (session.check, session.watch is not None, session.disabled) == tuple(
        each in name for each in ("CHECK", "TIMEOUT", "DISABLE")
    )


@several
@pytest.mark.parametrize("other", [None, "HIERCOLL_CHECK", "HIERCOLL_TIMEOUT", "HIERCOLL_LEARN"])
def test_nothing_is_set_up_where_one_rank_disables_it(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    """Whatever other ranks want; nor on communicators that are made from it."""
    monkeypatch.setattr(lifetime, "_set_up", 1e-9)
    monkeypatch.setattr(beginning, "SHARE", 1e9)
    if RANK == SIZE - 1:
        monkeypatch.setenv("HIERCOLL_DISABLE", "1")
    elif other is not None:
        monkeypatch.setenv(other, "online" if other == "HIERCOLL_LEARN" else "30" if "TIMEOUT" in other else "1")
    ours = hiercoll.Intracomm(comm)
    made = [ours, ours.Split(RANK % 2), ours.Dup()]
    for each in made:
        own = np.full(each.size, RANK)
        for _ in range(2 * beginning.FIRST):
            recv = np.full(each.size, -1)
            each.Alltoall(own, recv)
            np.testing.assert_array_equal(recv, each.plain.allgather(RANK))
        for start in (each.Ialltoall, *([each.Alltoall_init] if HAS_PERSISTENT else [])):
            recv = np.full(each.size, -1)
            request = start(own, recv)
            if isinstance(request, MPI.Prequest):
                request.Start()
            request.Wait()
            np.testing.assert_array_equal(recv, each.plain.allgather(RANK))
            if isinstance(request, MPI.Prequest):
                request.Free()
        hiercoll.allgather(each, own)
        each.Barrier()
        assert each.allgather(RANK) == each.plain.allgather(RANK) and not is_set_up(each)
    for each in made[1:]:
        each.Free()


@several
def test_calls_pay_for_the_set_up(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look at the time of calls after 48 and 384 of them, however these are made."""
    ours, looks = hiercoll.Intracomm(comm), (beginning.FIRST, beginning.GROWTH * beginning.FIRST)
    monkeypatch.setattr(lifetime, "_set_up", 1e6)
    for salt in range(looks[0] + 5):
        send, recv, want = buffers(salt)
        ours.Alltoall(send, recv) if (salt + RANK) % 2 else hiercoll.alltoall(comm, send, recv)
        np.testing.assert_array_equal(recv, want)
        assert not is_set_up(comm)
    monkeypatch.setattr(lifetime, "_set_up", 0.0 if RANK else 1e-9)
    monkeypatch.setattr(beginning, "SHARE", 1e9)  # agreements cost what they do
    for salt in range(looks[0] + 5, looks[1] + 1):
        assert not is_set_up(comm)
        alltoall(comm, salt)
    assert is_set_up(comm) and get_session(comm).policy.budget.calls > 0


@several
@pytest.mark.parametrize("drops_in", [False, True])
@pytest.mark.parametrize(("nbytes", "halvings"), [(1 << 10, 0), (1 << 16, 1), (1 << 18, 3), (1 << 21, 4)])
def test_long_first_calls_are_looked_at_early(comm: MPI.Intracomm, nbytes: int, halvings: int, drops_in: bool) -> None:
    """By the bytes of the rank that has most; communicators that are made of this one begin as ever."""
    alltoallv = hiercoll.Intracomm(comm).Alltoallv if drops_in else partial(hiercoll.alltoallv, comm)
    counts = np.zeros((SIZE, SIZE), int)
    counts[SIZE - 1, 0] = nbytes
    send, recv = np.full(counts[RANK].sum(), 7, np.int8), np.zeros(counts[:, RANK].sum(), np.int8)
    alltoallv([send, counts[RANK]], [recv, counts[:, RANK].copy()])
    assert (recv == 7).all()
    first = first_calls(comm)
    assert first is not None and first.tally[0] == (beginning.FIRST >> halvings) - 1
    child = hiercoll.Intracomm(comm).Dup()
    exchange(child)
    begun = first_calls(child)
    assert begun is not None and begun.tally[0] == beginning.FIRST - 1 and begun._calls == beginning.FIRST
    child.Free()


@several
def test_looks_follow_soon_where_calls_are_long(comm: MPI.Intracomm) -> None:
    """As soon as calls will have paid for what is missing, however few these are."""
    alltoall(comm, 0)
    first = first_calls(comm)
    assert first is not None
    first.tally[:] = array("q", (0, beginning.FIRST * 10**9))  # calls of a second
    assert first.goes_on(1.05 * beginning.SHARE * beginning.FIRST)
    assert 1 <= first.tally[0] < beginning.FIRST // 4


def test_no_learning_no_set_up(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one rank will not learn, nobody does."""
    monkeypatch.setattr(lifetime, "_set_up", 1e-9)
    if RANK == 0:
        monkeypatch.setenv("HIERCOLL_LEARN", "0")
    for salt in range(5 * beginning.FIRST):
        alltoall(comm, salt)
    assert not is_set_up(comm)
    assert get_session(comm).policy.learner(Wanted(ALLTOALL, 40, False)) is None


@pytest.mark.parametrize("is_plain_free", [False, True])
@pytest.mark.parametrize("kind", [MPI.Intracomm, hiercoll.Intracomm])
def test_many_short_lives(comm: MPI.Intracomm, kind: type[MPI.Intracomm], is_plain_free: bool) -> None:
    """Nothing is left of communicators that have been freed; handles come again, and what counts calls does not."""
    parent = kind(comm)
    makers = (parent.Dup, partial(parent.Split, 0, -RANK), partial(parent.Create, parent.group))
    exchange(hiercoll.Intracomm(comm))
    before = len(lifetime._states)
    for salt in range(200):
        made = makers[salt % 3]()
        for _ in range(salt % 4):
            exchange(hiercoll.Intracomm(made))
            mine, due = np.arange(SIZE) + 10 * made.rank, 10 * np.arange(SIZE) + made.rank
            assert np.array_equal(hiercoll.alltoall(made, mine, np.empty_like(mine)), due)
        if salt % 4:
            first = first_calls(made)
            calls = beginning.FOR_GOOD if SIZE == 1 else beginning.FIRST
            assert first is not None and first.tally[0] == calls - 2 * (salt % 4)
        MPI.Intracomm(made).Free() if is_plain_free else made.Free()
    assert len(lifetime._states) == before


@several
@pytest.mark.skipif(compiled.load()[0] is None, reason="needs the compiled engine")
def test_no_state_in_python(comm: MPI.Intracomm) -> None:
    """The compiled engine counts calls on communicators like one before, until Python asks; nothing is left of them."""
    ours = hiercoll.Intracomm(comm)
    exchange(ours)
    for number in range(1, 5):
        made = ours.Dup()
        for _ in range(number):
            exchange(made)
        handle = made.handle
        tally = compiled.tally(handle)
        assert handle not in lifetime._states and tally is not None and tally[0] == beginning.FIRST - number
        if number % 2:
            first = first_calls(made)
            assert first is not None and first.tally is tally
        made.Free()
        assert compiled.tally(handle) is None and handle not in lifetime._states


def spelled(how: str) -> tuple[str, list[Any], Any]:
    """A call of a drop-in communicator as programs spell it: the method, its arguments, and what the last one is to
    hold."""
    ones, places, kinds = [1] * SIZE, list(range(SIZE)), [MPI.INT64_T] * SIZE
    mine, send, recv = np.array([RANK]), np.arange(SIZE) + 10 * RANK, np.full(SIZE, -1)
    turned, everyone = 10 * np.arange(SIZE) + RANK, np.arange(SIZE)
    calls: dict[str, tuple[str, list[Any], Any]] = {
        "count and type": ("Alltoall", [[send, 1, MPI.INT64_T], [recv, 1, MPI.INT64_T]], turned),
        "type": ("Alltoall", [[send, MPI.INT64_T], (recv, MPI.INT64_T)], turned),
        "name": ("Allgather", [[mine, "l"], [recv, 1, "l"]], everyone),
        "one": ("Bcast", [[recv, SIZE, MPI.INT64_T]], np.full(SIZE, -1)),
        "reduction": ("Allreduce", [[mine, MPI.INT64_T], [recv[:1], MPI.INT64_T]], [sum(range(SIZE))]),
        "rooted": ("Gather", [[mine, 1, MPI.INT64_T], [recv, 1, MPI.INT64_T] if RANK == 0 else None], everyone),
        "counts": ("Alltoallv", [[send, ones, places, MPI.INT64_T], [recv, (ones, places), MPI.INT64_T]], turned),
        "counts in place": ("Allgatherv", [MPI.IN_PLACE, [np.full(SIZE, RANK), ones]], everyone),
        "types": ("Alltoallw", [[send, kinds], [recv, (ones, [8 * at for at in places]), kinds]], turned),
        "derived": ("Alltoall", [[send, 1, PAIR], [recv, 1, PAIR]], turned),
        "counts of derived": ("Allgatherv", [[mine, 1, PAIR], [recv, ones, places, PAIR]], everyone),
        "rooted counts": ("Gatherv", [mine, [recv, ones] if RANK == 0 else None], everyone),
        "bytes": ("Allgather", [bytearray([RANK]), bytearray(SIZE)], everyone),
        "bytes in place": ("Allgather", [MPI.IN_PLACE, [bytearray([RANK] * SIZE), 1, MPI.BYTE]], everyone),
        "other arrays": ("Alltoall", [array("q", send), [array("q", recv), 1, "q"]], turned),
    }
    if how == "types":
        calls[how][1][0] = [send, ones, [8 * at for at in places], kinds]
    return calls[how]


EVEN = ["count and type", "type", "name", "one", "reduction", "rooted", "bytes", "bytes in place", "other arrays"]
SPELLINGS = [*EVEN, "counts", "counts in place", "types", "rooted counts", "derived", "counts of derived"]
PAIR = MPI.INT32_T.Create_contiguous(2).Commit()  # as long as the elements of arrays


def emptied(given: list[Any]) -> Any:
    """The buffer of the last argument of a call, if there is one, with nothing left of an earlier one."""
    buffer = given[-1][0] if isinstance(given[-1], list | tuple) else given[-1]
    for at in range(0 if buffer is None or given[0] is MPI.IN_PLACE or len(given) == 1 else len(buffer)):
        buffer[at] = 99
    return buffer


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("state", ["early", "learning", "not learning", "never learning", "disabled"])
def test_native_calls_as_programs_spell_them(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, how: str, state: str
) -> None:
    """They go to mpi4py without a look in Python, once they are known to be native."""
    if compiled.load()[0] is None:
        pytest.skip("there is no compiled engine")
    monkeypatch.setattr(lifetime, "_set_up", 1e6)
    if state in ("not learning", "never learning"):
        monkeypatch.setenv("HIERCOLL_LEARN", "0")
    if state == "disabled":
        monkeypatch.setenv("HIERCOLL_DISABLE", "1")
    ours = hiercoll.Intracomm(comm)
    if state in ("learning", "not learning"):
        get_session(comm)
    method, given, due = spelled(how)
    for _ in range(6):
        getattr(ours, method)(*given)
    looked: list[object] = []
    for module, name in LOOKS:
        serve = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, serve=serve: (looked.append(args[1:3]), serve(*args))[1])
    buffer = emptied(given)
    getattr(ours, method)(*given)
    assert not looked
    if buffer is not None:
        np.testing.assert_array_equal(buffer, due)


@several
@pytest.mark.parametrize("how", ["plain", "in place", "with a datatype"])
def test_calls_of_nothing(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """They go to mpi4py without a look in Python, too, from the second on."""
    if compiled.load()[0] is None:
        pytest.skip("there is no compiled engine")
    monkeypatch.setenv("HIERCOLL_LEARN", "online")
    ours = hiercoll.Intracomm(comm)
    get_session(comm)
    nothing = np.empty(0)
    send = {"plain": nothing, "in place": MPI.IN_PLACE, "with a datatype": [bytearray(8), 0, MPI.DOUBLE]}[how]
    recv = [bytearray(8), 0, MPI.DOUBLE] if how == "with a datatype" else np.empty(0)
    for name in ("Allgather", "Alltoall", "Allreduce"):
        getattr(ours, name)(send, recv)
        with monkeypatch.context() as patch:
            for looks in LOOKS:
                patch.setattr(*looks, None)
            getattr(ours, name)(send, recv)


@several
@pytest.mark.parametrize("how", EVEN)
def test_calls_of_algorithms_as_programs_spell_them(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """They go to their programs without a look in Python, wherever their buffers are."""
    if compiled.load()[0] is None:
        pytest.skip("there is no compiled engine")
    algorithms = {
        "allgather": "ring",
        "alltoall": "pairwise",
        "bcast": "binomial",
        "allreduce": "ring",
        "gather": "linear",
    }
    for name, algorithm in algorithms.items():
        monkeypatch.setitem(settings.forced, name, (algorithm, {}))
    ours = hiercoll.Intracomm(comm)
    for _ in range(3):
        method, given, due = spelled(how)  # in other places each time
        getattr(ours, method)(*given)
    monkeypatch.setattr(served, "_serve", None)
    others = [spelled(how) for _ in range(3)]
    for method, given, due in others:
        buffer = emptied(given)
        getattr(ours, method)(*given)
        if buffer is not None:
            np.testing.assert_array_equal(buffer, due)


@several
def test_calls_that_are_spelled_almost_alike(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by a program of its own; what mpi4py refuses, it refuses after calls that were served, too."""
    monkeypatch.setitem(settings.forced, "allgather", ("ring", {}))
    monkeypatch.setitem(settings.forced, "bcast", ("binomial", {}))
    ours, pair = hiercoll.Intracomm(comm), MPI.INT8_T.Create_contiguous(2).Commit()
    mine, kinds = bytearray(range(RANK, RANK + 4)), (MPI.INT8_T, MPI.INT16_T, pair)
    for count, kind in [(1, MPI.INT8_T), (2, MPI.INT8_T), *((1, kind) for kind in kinds), (4, MPI.INT8_T)] * 3:
        everyone = bytearray(b"\xff" * (4 * SIZE))
        ours.Allgather([mine, count, kind], [everyone, count, kind])
        due = b"".join(bytes(range(rank, rank + count * kind.Get_size())) for rank in range(SIZE))
        assert everyone == due + b"\xff" * (4 * SIZE - len(due))
    pair.Free()
    with pytest.raises(MPI.Exception):
        comm.Allgather([mine, 1, pair], [everyone, 1, pair])
    with pytest.raises((MPI.Exception, hiercoll.errors.HiercollError)):
        ours.Allgather([mine, 1, pair], [everyone, 1, pair])
    with pytest.raises(BufferError):
        ours.Allgather([mine, 1, MPI.INT8_T], [bytes(4 * SIZE), 1, MPI.INT8_T])
    for size in (1, 2, 3) * 3:
        everyone = bytearray(size * SIZE)
        ours.Allgather(mine[:size], everyone)
        assert everyone == b"".join(bytes(range(rank, rank + size)) for rank in range(SIZE))


def exchange(comm: MPI.Intracomm) -> None:
    """A call of a drop-in communicator; right data."""
    mine = np.arange(comm.size) + 10 * comm.rank
    everyone = np.full(comm.size, -1)
    comm.Alltoall(mine, everyone)
    np.testing.assert_array_equal(everyone, 10 * np.arange(comm.size) + comm.rank)


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks have agreed on in first calls, one entry each time."""
    found, wait_for = list[str](), beginning.wait_for
    monkeypatch.setattr(beginning, "wait_for", lambda *given: (found.append(given[1]), wait_for(*given)))
    return found


@several
def test_families_agree_once(comm: MPI.Intracomm, agreed: list[str]) -> None:
    """What is made from a communicator begins as that one, however it is made, and however often."""
    ours = hiercoll.Intracomm(comm)
    grid = ours.Create_cart([SIZE])
    made = [ours.Split(0, -RANK), ours.Dup(), ours.Clone(), grid, grid.Sub([True]), ours.Create(ours.group)]
    made += [each.Split(RANK % 2) for each in made]
    for each in (*made, MPI.Intracomm(made[0])):  # another object of a communicator is the same one
        exchange(each if isinstance(each, dropin.Collectives) else hiercoll.Intracomm(each))
    assert len(agreed) == 1
    later, request = comm.Idup()
    request.Wait()
    duplicates = [comm.Dup(), later, made[0].plain.Dup()]  # made by mpi4py
    for each in duplicates:
        exchange(hiercoll.Intracomm(each))
    assert len(agreed) == (1 if may_copy() else 1 + len(duplicates))
    agreed.clear()
    alone = [ours.Create_group(ours.group), comm.Split(0)]  # not all ranks make it; it is mpi4py's
    alone.append(alone[1].Dup())  # before the ranks of that one have agreed
    for each in alone:
        exchange(hiercoll.Intracomm(each))
    assert len(agreed) == len(alone)
    for each in (*made, *duplicates, *alone):
        each.Free()


class OtherWorld(MPI.Intracomm):
    """A communicator that stands for COMM_WORLD: the largest tag is the MPI library's."""

    def Get_attr(self, keyval: int) -> Any:  # noqa: N802  (MPI's name)
        return (WORLD if keyval == MPI.TAG_UB else super()).Get_attr(keyval)


@pytest.fixture
def as_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[MPI.Intracomm], None]]:
    """Lets a communicator stand for COMM_WORLD, until the end of the test."""
    yield lambda comm: monkeypatch.setattr(MPI, "COMM_WORLD", OtherWorld(comm))
    lifetime._held().everywhere(None)


@several
def test_world_agrees_for_all(
    comm: MPI.Intracomm,
    as_world: Callable[[MPI.Intracomm], None],
    agreed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a first call on COMM_WORLD communicators of its processes need no agreement, whoever makes them."""
    early = comm.Split()
    as_world(comm)
    alltoall(comm, 0)
    monkeypatch.setenv("HIERCOLL_CHECK", "1" if RANK else "0")  # which comes too late
    for salt, made in enumerate([early, comm.Dup(), comm.Split(RANK % 2, -RANK), comm.Create_group(comm.group)]):
        mine = np.arange(made.size) + 10 * made.rank + salt
        due = 10 * np.arange(made.size) + made.rank + salt
        for _ in range(2):
            assert np.array_equal(hiercoll.alltoall(made, mine, np.empty_like(mine)), due)
        tally = compiled.tally(made.handle) or lifetime._states[made.handle].tally
        assert tally[0] == (beginning.FIRST if made.size > 1 else beginning.FOR_GOOD) - 2
        assert not is_set_up(made)
        made.Free()
    assert len(agreed) == 1


@several
def test_world_is_not_everybody(
    comm: MPI.Intracomm, as_world: Callable[[MPI.Intracomm], None], agreed: list[str]
) -> None:
    """Where processes of others are in a communicator, or it is an intercommunicator, nothing is taken over."""
    part = comm.Split(RANK % 2)
    as_world(part)
    hiercoll.alltoall(part, np.zeros(part.size))
    before = len(agreed)
    alltoall(comm, 0)
    assert len(agreed) == before + 1
    between = part.Create_intercomm(0, comm, 1 - RANK % 2)
    with pytest.raises(CommunicatorError):
        hiercoll.alltoall(between, np.zeros(between.remote_size), np.zeros(between.remote_size))  # type: ignore[arg-type]
    assert lifetime._held().get(between) is None
    between.Free()
    part.Free()


@several
@pytest.mark.parametrize("why", ["a second thread", "a wish"])
def test_world_does_not_agree_for_all(
    comm: MPI.Intracomm, as_world: Callable[[MPI.Intracomm], None], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Where one rank has a second thread, which may be about to make a first call, or wishes something from the first
    call on, each communicator agrees for itself."""
    as_world(comm)
    done = threading.Event()
    second = threading.Thread(target=done.wait)
    if RANK == SIZE - 1:
        if why == "a wish":
            monkeypatch.setenv("HIERCOLL_CHECK", "1")
        else:
            second.start()
    alltoall(comm, 0)
    done.set()
    monkeypatch.setenv("HIERCOLL_CHECK", "1" if RANK else "0")
    made = comm.Split()
    alltoall(made, 0)
    assert is_set_up(made)
    made.Free()


@several
def test_families_where_something_is_known(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first communicator is set up at once; those that are made from it once calls have taken as long as that."""
    monkeypatch.setattr(beginning, "_gaining", lambda most, is_first: frozenset([SIZE]))
    monkeypatch.setattr(lifetime, "set_ups", lifetime.SetUps())
    ours = hiercoll.Intracomm(comm)
    exchange(ours)
    assert is_set_up(comm)
    monkeypatch.setattr(lifetime, "_set_up", 1e6)
    child = ours.Dup()
    for _ in range(2 * beginning.FIRST):
        exchange(child)
    assert not is_set_up(child)
    monkeypatch.setattr(lifetime, "_set_up", 1e-9)
    for _ in range(26 * beginning.FIRST):  # these pay for the agreements, too
        exchange(child)
    assert is_set_up(child)
    child.Free()


@pytest.mark.mpi(min_size=3)
def test_communicators_side_by_side(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """What learning may cost is divided among them. One that does not lead is set up when something is known, or for
    far more calls."""
    monkeypatch.setattr(lifetime, "_set_up", 0.0)
    turned = WORLD.Split(0, -RANK)
    assert get_session(comm).learns == get_session(turned).learns == beginning.SHARE
    turned.Free()
    beside = comm.Split(RANK > 0)  # of all ranks but one; that one leads
    exchange(beside)
    state = first_calls(beside)
    assert state is not None
    if RANK > 0:
        calls = array("q", (0, beginning.FIRST * 10**9))  # of a second
        paid = 0.9 * beginning.SHARE * beginning.FIRST  # enough for one that leads
        for known in (paid, 2 * paid):
            state.tally[:] = calls
            assert state.goes_on(known)
        assert state.tally[0] <= 3 * (beginning.SOONER - 1) * beginning.FIRST
        monkeypatch.setattr(beginning, "_gaining", lambda most, is_first: frozenset([SIZE - 1]))
        state.tally[:] = calls
        assert not state.goes_on(2 * paid)
        part = 0.25 * (SIZE - 1) / SIZE
        assert abs(get_session(beside).policy.budget.share - part * beginning.SHARE) < 1e-9
    beside.Free()


@several
def test_importing_is_paid_for_too(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes on the slowest rank; more where earlier jobs have found nothing."""
    exchange(comm)
    state = first_calls(comm)
    assert state is not None
    paid = 0.9 * beginning.SHARE * beginning.FIRST
    state.tally[:] = calls = array("q", (0, beginning.FIRST * 10**9))  # of a second
    monkeypatch.setattr(beginning.loading, "to_pay", lambda: 2 * paid * (RANK == SIZE - 1))
    assert state.goes_on(paid / 4)
    state.tally[:] = calls
    monkeypatch.setattr(beginning.loading, "to_pay", lambda: 3 * paid / beginning.PATIENCE)
    monkeypatch.setattr(beginning, "_is_settled", lambda size: size == SIZE)
    assert state.goes_on(paid / beginning.PATIENCE)
    state.tally[:] = calls
    monkeypatch.setattr(beginning, "_is_settled", lambda size: False)
    assert not state.goes_on(paid / 4)


@several
def test_looks_before_a_set_up(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is half way to what is missing, if that is much. One in which ranks were late costs no more."""
    exchange(comm)
    state = first_calls(comm)
    assert state is not None
    state.tally[:] = calls = array("q", (0, beginning.FIRST * 10**8))  # of a tenth of a second
    monkeypatch.setattr(beginning.loading, "to_pay", lambda: 0.4 * beginning.FIRST * beginning.SHARE)  # 4 times as long
    assert state.goes_on(0.0)
    assert 1.4 * beginning.FIRST < state.tally[0] < 1.9 * beginning.FIRST
    for seconds in (0.0, 0.0, 1.0, 0.0):
        state.tally[:] = calls
        monkeypatch.setattr(beginning.loading, "to_pay", lambda: 1e3)
        state._aside = seconds
        assert state.goes_on(0.0)
    assert 0.0 < state.cost < 0.5
    assert state.tally[0] == min((beginning.GROWTH - 1) * state._served, beginning.LONGEST)


@several
def test_how_long_ranks_take_to_meet(comm: MPI.Intracomm) -> None:
    """Is measured where none of them is late, and neither it nor a set-up is longer since one was."""
    exchange(hiercoll.Intracomm(comm))
    assert not is_set_up(comm)
    if RANK == SIZE - 1:
        time.sleep(0.3)
    session = get_session(comm)
    assert 0.0 < session.policy.budget.meeting < 0.1 and 0.0 < session.set_up_seconds < 0.2
    assert len(set(WORLD.allgather((session.policy.budget.meeting, session.set_up_seconds)))) == 1


@several
def test_where_nothing_was_found_before(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more calls are left to the MPI library, until it is looked for again."""
    exchange(comm)
    state = first_calls(comm)
    assert state is not None
    monkeypatch.setattr(beginning, "_is_settled", lambda size: size == SIZE)
    paid = 0.9 * beginning.SHARE * beginning.FIRST
    state.tally[:] = calls = array("q", (0, beginning.FIRST * 10**9))  # of a second
    assert state.goes_on(paid)
    state.tally[:] = calls
    assert not state.goes_on(1.9 * paid / beginning.PATIENCE)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it is asked what links need, the first rank has a node of its own."""
    nodes = Topology((0, *[1] * (SIZE - 1)))
    monkeypatch.setattr(bound, "discover", lambda comm: Surroundings(nodes, 1.0, []))


def look(state: beginning.Beginning, seconds: float, nbytes: int) -> bool:
    """A look, and if it is a closer one those at the calls that follow, which take so many seconds each and send so
    many bytes to each rank: what the last one says."""
    paid = 0.9 * beginning.SHARE * state._calls * seconds
    state.tally[:] = array("q", (0, int(state._calls * seconds * 1e9)))
    goes_on = state.goes_on(paid, ALLTOALL, given := Arguments(np.zeros(SIZE * nbytes, np.int8), None))
    calls = 0
    while goes_on and state.tally[0] == 1:
        calls += 1
        state.tally[:] = array("q", (0, int(calls * seconds * 1e9)))
        goes_on = state.goes_on(paid, ALLTOALL, given)
    assert calls in (0, max(bound.FEWEST, min(bound.MOST, int(bound.LONGEST / seconds))))
    return goes_on


@several
@pytest.mark.parametrize(("ratio", "waits"), [(0.55, False), (1.1, True), (1.5, False)])
def test_calls_that_take_as_long_as_links_need(
    ratio: float, waits: bool, comm: MPI.Intracomm, two_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more of them are left to the MPI library. Not of those that take longer, nor where it makes no sense."""
    monkeypatch.setattr(bound, "seconds_per_byte", lambda comm, topology: 1e-3)
    exchange(comm)
    state = first_calls(comm)
    assert state is not None
    seconds = 1e-3 * 100 * (SIZE - 1)  # of what leaves a node: so many bytes to all other nodes' ranks
    assert look(state, ratio * seconds, 100) == waits == state.is_at_bound
    if waits:
        assert state.tally[0] <= state._served and lifetime.is_at_bound(comm)
        assert look(state, ratio * seconds, 100) and state.is_at_bound
        assert not look(state, 3 * seconds, 100) and not state.is_at_bound
    assert not is_set_up(comm)


@several
def test_calls_of_other_kinds_are_no_transfers(
    comm: MPI.Intracomm, two_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are set up for as ever; nor are links measured where there are none, or something is known."""
    measured: list[Topology] = []
    monkeypatch.setattr(bound, "seconds_per_byte", lambda comm, topology: (measured.append(topology), 1e-3)[1])
    exchange(comm)
    state = first_calls(comm)
    assert state is not None
    assert not look(state, 1.0, 0) and len(measured) == 1
    other = hiercoll.Intracomm(comm).Dup()
    exchange(other)
    state = first_calls(other)
    assert state is not None
    state.is_informed = True
    assert not look(state, 1.0, 100) and len(measured) == 1
    other.Free()


@several
def test_links_are_measured(comm: MPI.Intracomm, two_nodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks know the same, and no message is left over; one node has none."""
    made = bound.Bound(comm)
    found = WORLD.allgather((made._beta, made.cost, made.has_links))
    assert len(set(found)) == 1 and made.cost > 0.0 and made.has_links == (made._beta > 0.0)
    assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    monkeypatch.setattr(bound, "discover", lambda comm: Surroundings(Topology((0,) * SIZE), 1.0, []))
    assert not bound.Bound(comm).has_links


@several
def test_families_with_a_wish(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank's environment asks for goes for what is made from a communicator, too."""
    if RANK == SIZE - 1:
        monkeypatch.setenv("HIERCOLL_TIMEOUT", "60")
    ours = hiercoll.Intracomm(comm)
    child = ours.Dup()
    exchange(child)
    assert get_session(child).watch is not None
    child.Free()


# ---- trials


@several
def test_among_all_that_programs_do(comm: MPI.Intracomm, at_once: None) -> None:
    """Other collectives, sizes, roots, communicators with some of the ranks, I-calls and plans between trials: right
    data, one choice on all ranks."""
    odd = comm.Split(RANK % 2, -RANK)
    get_session(comm), get_session(odd)
    draw = random.Random(7)  # the same on all ranks
    held = buffers(0)
    plan = hiercoll.alltoall_init(comm, held[0], held[1])
    for salt in range(600):
        match draw.randrange(7):
            case 0 | 1 | 2:
                alltoall(comm, salt)
            case 3:
                got = hiercoll.allgather(comm, np.full(2, RANK + salt))
                np.testing.assert_array_equal(got[:, 1], np.arange(SIZE) + salt)
            case 4:
                members = odd.allgather(RANK)
                got = hiercoll.allgather(odd, np.full(3, RANK + salt))
                np.testing.assert_array_equal(got[:, 0], np.array(members) + salt)
            case 5:
                buf, root = np.full(9, RANK + salt), draw.randrange(SIZE)
                send, recv, want = buffers(salt, 2)
                call = hiercoll.ialltoall(comm, send, recv)
                hiercoll.bcast(comm, buf, root=root)
                call.wait()
                np.testing.assert_array_equal(buf, [root + salt] * 9)
                np.testing.assert_array_equal(recv, want)
            case 6:
                held[1][:] = -1
                plan()
                np.testing.assert_array_equal(held[1], held[2])
    plan.free()
    settle(comm)
    both = learner(comm), learner(comm, ALLGATHER, 16)
    keys = [each.current.key for each in both]
    assert WORLD.allgather(keys) == [keys] * SIZE
    odd.Free()


@several
def test_from_threads(at_once: None) -> None:
    """Each with a communicator of its own."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("the MPI library was not initialised for several threads")
    comms, problems = [WORLD.Dup() for _ in range(2)], list[BaseException]()

    def work(made: MPI.Intracomm, items: int) -> None:
        try:
            for salt in range(60):
                alltoall(made, salt, items)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(made, 3 + at)) for at, made in enumerate(comms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in comms:
        made.Free()
    assert not problems


@pytest.fixture
def slow_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MPI library's alltoall takes two milliseconds longer than it does; ten where ranks may outnumber cores."""
    original = MPI.Intracomm.Alltoall

    class Slow(MPI.Intracomm):
        def Alltoall(self, *given: Any) -> None:  # noqa: N802  (MPI's name)
            time.sleep(2e-3 if SIZE < 4 else 1e-2)
            original(self, *given)

    made = Session.__init__

    def init(self: Session, comm: MPI.Intracomm, *rest: Any, **more: Any) -> None:
        made(self, comm, *rest, **more)
        self.user = Slow(comm)

    monkeypatch.setattr(Session, "__init__", init)


@several
@pytest.mark.parametrize("seed", range(3))
def test_late_ranks_change_nothing(
    comm: MPI.Intracomm,
    at_once: None,
    slow_native: None,
    offer: Callable[[Variant], None],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Ranks that come late by ten times the time of a call, at random: what is faster by itself is found."""
    bruck = Variant("bruck", {"radix": 2})
    offer(bruck)
    get_session(comm)
    own, salt = random.Random(10 * RANK + seed), 0
    while not learner(comm).is_settled and salt < 200:
        if own.random() < 0.3:
            time.sleep(own.random() * (2e-2 if SIZE < 4 else 1e-1))
        alltoall(comm, salt)
        salt += 1
    found = learner(comm).finding
    assert found is not None and found.variant == bruck and found.native > 2e-3


@several
def test_what_cannot_run(comm: MPI.Intracomm, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native serves such calls, and what has served others stays: it is not the time of native that counts."""
    noted, note = [], Learner.note

    def noting(self: Learner, seconds: float, waited: float = 0.0) -> None:
        noted.append((self.current.params.get("memory"), seconds))
        note(self, seconds, waited)

    monkeypatch.setattr(Learner, "note", noting)
    monkeypatch.setattr("hiercoll.runtime.session.Session.node", property(_no_room))
    settle(comm)
    found = learner(comm).finding
    assert found is not None and found.variant.params.get("memory") != "shared"
    assert {seconds for memory, seconds in noted if memory == "shared"} == ({float("inf")} if SIZE > 2 else set())


def _no_room(session: Session) -> MPI.Intracomm:
    raise hiercoll.ConstraintError("grouped", "places in /dev/shm", "none", session.rank)


@several
def test_what_is_found_serves_the_same_arrays(
    comm: MPI.Intracomm, slow_native: None, offer: Callable[[Variant], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has served calls with them before."""
    bruck = Variant("bruck", {"radix": 2})
    offer(bruck)
    policy, (send, recv, want) = get_session(comm).policy, buffers(0)
    for salt in range(300):
        if salt == 3 * FIRST:  # native serves the first calls, in several terms, and keeps a plan for them
            policy.hurry()
        hiercoll.alltoall(comm, send, recv)
        if learner(comm).is_settled:
            break
    assert learner(comm).current == bruck
    ran: list[str] = []
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda self, plan: (ran.append(plan.name), run(self, plan))[1])
    for _ in range(5):
        recv[:] = -1
        hiercoll.alltoall(comm, send, recv)
        np.testing.assert_array_equal(recv, want)
    assert learner(comm).is_fixed and set(ran) <= {"alltoall bruck radix=2"}


# ---- between jobs


@several
def test_what_is_kept(comm: MPI.Intracomm, at_once: None, newcomer: Path) -> None:
    """Rank 0 writes what has been found; a communicator that comes later begins with that, at its first call."""
    settle(comm)
    WORLD.Barrier()
    ((setting, lessons),) = read_all(newcomer).items()
    lesson = lessons["alltoall", 40, False]
    found = learner(comm).finding
    assert found is not None and (lesson.variant, lesson.calls) == (found.variant, found.calls)
    assert setting.mpi == mpi_library() and setting.ranks == SIZE and known_ranks(mpi_library(), newcomer) == {SIZE}
    later = WORLD.Dup()
    alltoall(later, 1)
    assert is_set_up(later) and learner(later).current == found.variant and learner(later).is_fixed
    assert get_session(later).policy.select(Wanted(ALLTOALL, 44, False, held=True), "auto", {}) == found.variant
    later.Free()


@several
def test_a_lesson_is_followed(
    comm: MPI.Intracomm, newcomer: Path, calls: dropin.Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By calls of the size and those near it, until it proves wrong; others are native. On the first communicator from
    the first call on; on others once calls have taken as long as a set-up."""
    other = WORLD.Dup()
    get_session(other)._keep(Wanted(ALLTOALL, 40, False), _finding()) if RANK == 0 else get_session(other)
    WORLD.Barrier()
    later = hiercoll.Intracomm(WORLD.Dup())
    exchange(later)
    assert not is_set_up(later)
    later.Free()
    calls.clear()
    if RANK == SIZE - 1:  # one rank is enough
        monkeypatch.setattr(lifetime, "set_ups", lifetime.SetUps())
    ours = hiercoll.Intracomm(comm)
    for salt in range(10):
        for items in (5, 50):
            send, recv, want = buffers(salt, items)
            ours.Alltoall(send, recv)
            np.testing.assert_array_equal(recv, want)
    assert dict(calls) == {"alltoall": 10, "alltoall, native": 10}
    other.Free()


@several
def test_a_late_rank_makes_no_set_up_longer(comm: MPI.Intracomm) -> None:
    """By how long it took, questions to the model and first plans are estimated: where calls come first that are set up
    at once, as those on device arrays, MPI may connect ranks in it, and one may be late."""
    if RANK == SIZE - 1:
        time.sleep(0.5)
    begin = time.perf_counter()
    hiercoll.get_topology(comm)
    waited = WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)
    assert waited > 0.4 > get_session(comm).set_up_seconds > 0.0


@several
def test_a_lesson_that_cannot_run(comm: MPI.Intracomm, newcomer: Path) -> None:
    """As of an algorithm that does not work in place, it is left out on all ranks."""
    other = WORLD.Dup()
    session = get_session(other)
    if RANK == 0:
        name = next(name for name, entry in REGISTRY["alltoall"].items() if not entry.in_place)
        session._keep(Wanted(ALLTOALL, 40, True), Finding(Variant(name), 1e-6, 1e-3, 100))
        session._keep(Wanted(ALLTOALL, 8, False), _finding())
    WORLD.Barrier()
    assert set(get_session(comm).policy.known) == {Wanted(ALLTOALL, 8, False).key}
    send, _, want = buffers(1)
    hiercoll.alltoall(comm, MPI.IN_PLACE, send)
    np.testing.assert_array_equal(send, want)
    other.Free()


@several
def test_links_are_measured_before_the_model_is_asked(
    comm: MPI.Intracomm, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once on a communicator; it goes by them where it names candidates."""
    measured: list[Links] = []
    asked: list[Links] = []
    slow = DEFAULT_LINKS._replace(network=Link(1e-3, 1e-6))
    monkeypatch.setattr(Session, "_probe", lambda session, known: (measured.append(known), slow)[1])
    modelled = policy.modelled
    monkeypatch.setattr(policy, "modelled", lambda *given: (asked.append(given[-1]), modelled(*given))[1])
    settle(comm)
    for items in (50, 500):
        for salt in range(3 * FIRST):
            alltoall(comm, salt, items)
    assert len(measured) == 1 and len(asked) > 1 and {*asked} == {slow}


@several
def test_a_later_job_goes_on(comm: MPI.Intracomm, newcomer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the candidates that an earlier one has not tried, without asking the model; what it finds is kept."""
    untried = (Variant("bruck", {"radix": 2}), Variant("pairwise", {"exchange": "rotation"}))
    monkeypatch.setattr("hiercoll.tuning.learning.FAR", inf)  # whatever native takes here
    other = WORLD.Dup()
    if (session := get_session(other)) and RANK == 0:
        session._keep(Wanted(ALLTOALL, 40, False), Finding(NATIVE_VARIANT, 1e-4, 1e-4, 100, untried=untried))
    other.Free()
    WORLD.Barrier()
    if RANK == SIZE - 1:
        monkeypatch.setenv("HIERCOLL_LEARN", "online")
    asked, modelled = [], Policy._modelled
    monkeypatch.setattr(Policy, "_modelled", lambda *given: (asked.append(given), modelled(*given))[1])
    known = get_session(comm).policy.known
    assert known[Wanted(ALLTOALL, 40, False).key].untried == untried
    settle(comm)
    assert not asked and learner(comm).trials >= 2 * (1 + 2 * FEWER)
    WORLD.Barrier()
    ((_, lessons),) = read_all(newcomer).items()
    lesson = lessons["alltoall", 40, False]
    assert lesson.untried == () and lesson.calls > 100 and lesson.variant in (NATIVE_VARIANT, *untried)


def _finding() -> Finding:
    return Finding(Variant("bruck", {"radix": 2}), 1e-6, 1e-3, 100)


@several
@pytest.mark.parametrize("broken", ["text", "folder", "foreign"])
def test_broken_memory(comm: MPI.Intracomm, newcomer: Path, broken: str, at_once: None) -> None:
    """Nothing stops a program: what cannot be read is left out, what cannot be written is lost."""
    if RANK == 0 and broken == "folder":
        newcomer.write_text("a file in the folder's place")
    elif RANK == 0:
        get_session(MPI.COMM_SELF)
        lesson = Lesson("alltoall", 40, False, Variant("no_such_algorithm"), 1e-6, 1e-5, 9, "2026-11-22")
        setting = learned.setting_of(mpi_library(), get_session(MPI.COMM_SELF).topology, "host", "")
        folder = newcomer / setting.folder.replace("_1_", f"_{SIZE}_")
        folder.mkdir(parents=True)
        (folder / "job.json").write_text("{" if broken == "text" else str(lesson))
    WORLD.Barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LearnedWarning)
        settle(comm)


@several
def test_conditions_change(
    comm: MPI.Intracomm, at_once: None, offer: Callable[[Variant], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has become slow is replaced within 500 calls."""
    bruck = Variant("bruck", {"radix": 2})
    offer(bruck)
    get_session(comm).user = slow = _slower(comm)
    for salt in range(60):
        alltoall(comm, salt)
    assert learner(comm).current == bruck
    monkeypatch.setattr(type(slow), "seconds", 0.0)
    run = Session.run

    def delayed(self: Session, plan: Any) -> None:
        # Far longer than its calls have taken so far, on a busy machine, too.
        time.sleep(15e-3 if getattr(plan, "schedule", None) is not None else 0.0)
        run(self, plan)

    monkeypatch.setattr(Session, "run", delayed)
    get_session(comm).routes.clear()
    monkeypatch.setattr(get_session(comm).routes.__class__, "remember", lambda *_, **__: False, raising=False)
    for salt in range(500):
        alltoall(comm, salt)
        if learner(comm).current.is_native and not learner(comm).is_trying:
            break
    assert learner(comm).current.is_native


def _slower(comm: MPI.Intracomm) -> Any:
    class Slow(MPI.Intracomm):
        seconds = 5e-3  # far longer than what may come between on a busy machine

        def Alltoall(self, *given: Any) -> None:  # noqa: N802  (MPI's name)
            time.sleep(Slow.seconds)  # mpi4py's own object may come here, too
            MPI.Intracomm.Alltoall(self, *given)

    return Slow(comm)


@several
@pytest.mark.parametrize("collective", [ALLTOALL, ALLGATHER, BCAST, ALLTOALLV], ids=str)
def test_calls_with_what_was_learned(comm: MPI.Intracomm, at_once: None, collective: Collective) -> None:
    """Whatever is tried, and found: the same calls by functions and methods, from one array or the next, are right."""
    ours, ones = hiercoll.Intracomm(comm), np.full(SIZE, 4)
    get_session(comm)

    def data(salt: int) -> tuple[list[Any], Callable[[], Any], Any]:
        everyone = np.repeat(np.arange(SIZE), 4) + salt
        if collective is BCAST:
            buf = np.full(4, RANK + salt)
            return [buf], lambda: buf, np.full(4, SIZE - 1 + salt)
        recv = np.full(4 * SIZE, -1)
        send = np.full(4 if collective is ALLGATHER else 4 * SIZE, RANK + salt)
        given = [[send, ones], [recv, ones]] if collective is ALLTOALLV else [send, recv]
        return given, lambda: recv, everyone

    for salt in range(200):
        given, got, want = data(salt)
        root = {"root": SIZE - 1} if collective is BCAST else {}
        if salt % 3:
            getattr(hiercoll, collective.name)(comm, *given, **root)
        else:
            getattr(ours, collective.native)(*given, **root)
        np.testing.assert_array_equal(got(), want)


@several
@pytest.mark.parametrize("cores", [1.0, 0.5])
def test_who_waits_for_others_that_have_more_to_do(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, cores: float
) -> None:
    """Sleeps, if they share cores, but with Open MPI; the agreement is the same."""
    session, rests, rest = get_session(comm), [], progress.rest_until
    session.policy.links = session.policy.links._replace(cores=cores)
    monkeypatch.setattr(progress, "rest_until", lambda is_over: (rests.append(cores), rest(is_over)))
    for salt in range(3):
        if RANK == SIZE - 1:
            time.sleep(0.02)
        assert session.agreement.slowest_of_some([RANK + salt, -RANK]) == [SIZE - 1 + salt, 0.0]
    assert len(rests) == (3 if cores < 1.0 and not mpi_library().startswith("Open MPI") else 0)


@several
def test_ctrl_c_at_rest(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is raised when the agreement is over: others wait for it, and the next one is another."""
    session = get_session(comm)
    session.policy.links = session.policy.links._replace(cores=0.5)
    rest = progress.rest_until

    def interrupted(is_over: Callable[[], bool]) -> None:
        raise KeyboardInterrupt

    is_hit = RANK == 0 and not mpi_library().startswith("Open MPI")
    monkeypatch.setattr(progress, "rest_until", interrupted if is_hit else rest)
    if is_hit:
        with pytest.raises(KeyboardInterrupt):
            session.agreement.slowest_of_some([1.0])
    else:
        assert session.agreement.slowest_of_some([RANK + 1.0]) == [SIZE]
    monkeypatch.setattr(progress, "rest_until", rest)
    assert session.agreement.slowest_of_some([RANK + 2.0]) == [SIZE + 1]
