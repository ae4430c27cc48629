"""HIERCOLL_CHECK=1: ranks that make different calls are told, all of them; after blocking calls they can go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import WORLD
from mpi4py import MPI
from test_dropin import Strided

import hiercoll
from hiercoll.runtime.lifetime import get_session

RANK, SIZE = WORLD.rank, WORLD.size
needs_threads = pytest.mark.skipif(
    MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="the MPI library gives no MPI_THREAD_MULTIPLE"
)
pytestmark = pytest.mark.mpi(min_size=2)  # one rank agrees with itself


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[hiercoll.Intracomm]:
    monkeypatch.setenv("HIERCOLL_CHECK", "1")
    comm = hiercoll.Intracomm(WORLD.Dup())
    get_session(comm)
    yield comm
    comm.Free()


FORMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "function": lambda comm, send, recv: hiercoll.alltoall(comm, send, recv),
    "background": lambda comm, send, recv: hiercoll.ialltoall(comm, send, recv).wait(),
    "drop-in": lambda comm, send, recv: comm.Alltoall(send, recv),
    "request": lambda comm, send, recv: comm.Ialltoall(send, recv).Wait(),
}
forms = pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=form, marks=needs_threads if form == "request" else ()) for form, call in FORMS.items()],
)


def after(comm: hiercoll.Intracomm, call: Callable[[Any, Any, Any], Any]) -> None:
    """What is possible after a mismatch."""
    if call in (FORMS["function"], FORMS["drop-in"]):
        right(comm, call)
    else:
        with pytest.raises(hiercoll.CommunicatorError):
            right(comm, call)


def right(comm: hiercoll.Intracomm, call: Callable[[Any, Any, Any], Any]) -> None:
    """A call that all ranks agree on."""
    recv = np.full(2 * SIZE, -1)
    call(comm, np.arange(2 * SIZE) + 100 * RANK, recv)
    expected = np.concatenate([np.arange(2) + 2 * RANK + 100 * peer for peer in range(SIZE)])
    np.testing.assert_array_equal(recv, expected)


@forms
@pytest.mark.parametrize("items", [0, 1, 3])
def test_sizes(ours: hiercoll.Intracomm, call: Callable[[Any, Any, Any], Any], items: int) -> None:
    """All ranks are told, of both sides, and none is worse for it."""
    right(ours, call)
    items = items if RANK == 1 else 2
    with pytest.raises(hiercoll.CollectiveMismatch, match=rf"rank 1: .*{8 * items if RANK == 1 else ''} bytes"):
        call(ours, np.zeros(items * SIZE), np.zeros(items * SIZE))
    after(ours, call)


@forms
def test_elements(ours: hiercoll.Intracomm, call: Callable[[Any, Any, Any], Any]) -> None:
    dtype = "f8" if RANK == 1 else "i8"
    with pytest.raises(hiercoll.CollectiveMismatch, match=r"rank 1: .*f"):
        call(ours, np.zeros(SIZE, dtype), np.zeros(SIZE, dtype))
    after(ours, call)


def test_two_in_the_background(ours: hiercoll.Intracomm) -> None:
    """Started in another order on one rank: both are told of."""
    send, into = np.zeros(SIZE), (np.zeros(SIZE), np.zeros((SIZE, SIZE)))
    starts = [lambda: hiercoll.ialltoall(ours, send, into[0]), lambda: hiercoll.iallgather(ours, send, into[1])]
    requests = [start() for start in (reversed(starts) if RANK == 1 else starts)]
    for request in requests:
        with pytest.raises(hiercoll.CollectiveMismatch, match=r"ialltoall.*iallgather|iallgather.*ialltoall"):
            request.wait()


@pytest.mark.parametrize("form", ["drop-in", pytest.param("request", marks=needs_threads)])
def test_other_spellings_of_the_same(ours: hiercoll.Intracomm, form: str) -> None:
    """Bytes, elements, or elements with gaps between them."""
    values, strided = (np.arange(3 * SIZE) + 1000 * RANK).astype("i4"), Strided(3 * SIZE)
    spellings = [values, [values.view("u1"), MPI.BYTE], [values, MPI.INT.Create_contiguous(3).Commit()]]
    FORMS[form](ours, spellings[RANK % 3], [strided.matrix, 3, strided.type] if RANK == 0 else strided.values.copy())
    if RANK == 0:
        expected = np.concatenate([np.arange(3) + 1000 * peer for peer in range(SIZE)])
        np.testing.assert_array_equal(strided.values, expected)


@pytest.mark.parametrize("name", ["alltoallv", "allgatherv", "Alltoallv", "Allgatherv"])
def test_elements_of_uneven_blocks(ours: hiercoll.Intracomm, name: str) -> None:
    """Whose bytes are as many; where nothing is sent, other elements are no mistake, nor are bytes."""
    call, gather = getattr(ours, name, None) or partial(getattr(hiercoll, name), ours), "gather" in name
    ones = np.ones(SIZE, int)
    mine = "f8" if RANK == 1 else "i8"
    send = np.zeros(1 if gather else SIZE, mine)
    with pytest.raises(hiercoll.CollectiveMismatch, match=r"sends elements .8 to rank 1, which receives f8"):
        call(send if gather else [send, ones], [np.zeros(SIZE, mine), ones])
    bytes_of = np.arange(len(send)).astype("i8").view("u1") if RANK == 0 else np.arange(len(send)) + 10 * RANK
    counts, theirs = (8 * ones, 8 * ones) if RANK == 0 else (ones, ones)
    into = np.zeros(SIZE, "i8")
    call(bytes_of if gather else [bytes_of, counts], [into.view("u1") if RANK == 0 else into, theirs])
    expected = 10 * np.arange(SIZE) + (0 if gather else RANK)
    np.testing.assert_array_equal(into, expected)
    if not gather:
        few = np.zeros(SIZE, int)
        call([np.zeros(SIZE, mine), few], [np.zeros(SIZE), few])


def test_uneven_persistent(ours: hiercoll.Intracomm) -> None:
    """Compared when it is made."""
    out, into = np.full(SIZE, 3), np.full(SIZE, 3)
    if RANK == 1:
        out[1], into[:] = 4, 4
    with pytest.raises(hiercoll.CollectiveMismatch, match=r"sends 24 bytes to rank 1, which receives 32"):
        hiercoll.alltoallv_init(ours, [np.zeros(4 * SIZE), out], [np.zeros(4 * SIZE), into], algorithm="pairwise")
    right(ours, FORMS["function"])


def test_persistent_native(ours: hiercoll.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are the MPI library's own are compared, too, when they are made."""
    size = 3 if RANK == 1 else 2
    with pytest.raises(hiercoll.CollectiveMismatch, match=rf"rank 1: .*{24} bytes"):
        hiercoll.alltoall_init(ours, np.zeros(size * SIZE), algorithm="native")
    right(ours, FORMS["function"])


Refused = Callable[[Any, Any, Any, Any], object]
REFUSED: dict[str, Refused] = {  # with too few elements, or with counts of too many blocks
    "function": lambda comm, send, recv, counts: hiercoll.alltoall(comm, send, recv),
    "drop-in": lambda comm, send, recv, counts: comm.Alltoall(send, recv),
    "function, uneven": lambda comm, send, recv, counts: hiercoll.alltoallv(comm, [send, counts], [recv, [1] * SIZE]),
    "drop-in, uneven": lambda comm, send, recv, counts: comm.Alltoallv([send, counts], [recv, [1] * SIZE]),
    "plan": lambda comm, send, recv, counts: hiercoll.alltoall_init(comm, send, recv).free(),
}


@pytest.mark.parametrize("ranks", ["one", "all"])
@pytest.mark.parametrize("form", REFUSED)
def test_arguments_that_are_refused(ours: hiercoll.Intracomm, form: str, ranks: str) -> None:
    """If those of one rank are, all are told; if all are, each what is wrong with its own."""
    is_wrong = int(ranks == "all" or RANK == SIZE - 1)
    call = partial(REFUSED[form], ours, np.arange(SIZE)[is_wrong:], np.zeros(SIZE, int), [1] * (SIZE + is_wrong))
    expected: Any = hiercoll.CollectiveMismatch if ranks == "one" else (ValueError, MPI.Exception)
    for _ in range(2):
        with pytest.raises(expected) as caught:
            call()
        assert ranks == "all" or (f"rank {SIZE - 1}: " in str(caught.value) and "refused" in str(caught.value))
    right(ours, FORMS["drop-in"])


@pytest.mark.parametrize("kind", ["f8", "i4", "c8", "?"])
def test_functions_and_methods_are_one_call(ours: hiercoll.Intracomm, kind: str) -> None:
    """Ranks may call either: elements have the same names."""
    send, recv = np.ones(SIZE, kind), np.zeros(SIZE, kind)
    if RANK % 2:
        ours.Alltoall(send, recv)
    else:
        hiercoll.alltoall(ours, send, recv)
    np.testing.assert_array_equal(recv, send)
