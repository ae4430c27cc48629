"""Calls on device arrays that come again, on all ranks or on some only, whose arguments need not be looked at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from machines import BEFORE, BLOCK, RANK, SIZE, Machine, telling
from mpi4py import MPI

import hiercoll
from hiercoll.calls import functions, served, serving
from hiercoll.collectives import ALLTOALL
from hiercoll.runtime import factory
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.tables import Choice, Entry, Table, Variant
from hiercoll.tools.workload import buffers
from hiercoll.tuning.learning import Finding
from hiercoll.tuning.policy import Wanted


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collectives of calls whose arguments are looked at."""
    found, make = list[str](), functions.make_request

    def counted(session: Any, collective: Any, *given: Any, **options: Any) -> Any:
        found.append(collective.name)
        return make(session, collective, *given, **options)

    for module in (functions, served, serving):
        monkeypatch.setattr(module, "make_request", counted)
    return found


@pytest.mark.parametrize("how", ["function", "new result", "drop-in"])
def test_calls_that_come_again(
    machine: Machine, comm: MPI.Intracomm, transport: str, how: str, looks: list[str]
) -> None:
    """With arrays at the same addresses nothing is looked at; they come after the streams that are current now."""
    hiercoll.configure(comm, table=Table(), tune="off")
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv, ours = machine.empty(values.shape), machine.empty(expected.shape), hiercoll.Intracomm(comm)
    for salt in range(8):
        with machine.on(machine.stream()):
            machine.fill(recv, np.full_like(expected, BEFORE))
            machine.fill(send, values + np.uint8(salt))
            if how == "new result":
                result = hiercoll.alltoall(comm, send, algorithm="scatter_destination", transport=transport)
            elif how == "function":
                result = hiercoll.alltoall(comm, send, recv, algorithm="scatter_destination", transport=transport)
                assert result is recv
            else:
                ours.Alltoall(send, recv)
                result = recv
            np.testing.assert_array_equal(machine.get(result).reshape(-1), expected + np.uint8(salt))
            del result
    assert how == "new result" or looks == ["alltoall"]  # a new one may lie elsewhere each time


class Viewed:
    """The memory of an array as elements of another type."""

    def __init__(self, array: Any, dtype: str, **changed: Any) -> None:
        self.array, self.dtype, self.changed = array, np.dtype(dtype), changed

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.array.__cuda_array_interface__, "typestr": self.dtype.str, **self.changed}


def test_calls_that_look_alike(machine: Machine, comm: MPI.Intracomm, transport: str, looks: list[str]) -> None:
    """At the same addresses as a call that is known: other elements, and what may not be written."""
    numbers = np.array([1.5, 2.5, -3.0], np.float32)
    send, recv = machine.put(numbers.view("i4")), machine.put(np.zeros(3, "i4"))
    how: dict[str, Any] = {"algorithm": "ring", "transport": transport}
    for dtype in ("i4", "f4", "i4", "f4"):
        given = Viewed(send, dtype), Viewed(recv, dtype)
        hiercoll.allreduce(comm, *given, **how)
        due = sum(numbers.view(dtype) for _ in range(SIZE))
        np.testing.assert_array_equal(machine.get(recv).view(dtype), due)
    assert looks == ["allreduce"] * 2
    address = recv.__cuda_array_interface__["data"][0]
    with pytest.raises(hiercoll.BufferTypeError, match="a writable array"):
        hiercoll.allreduce(comm, Viewed(send, "i4"), Viewed(recv, "i4", data=(address, True)), **how)
    with pytest.raises(hiercoll.BufferTypeError, match="a contiguous array"):
        hiercoll.allreduce(comm, Viewed(send, "i4"), Viewed(recv, "i4", strides=(8,)), **how)


def exchange(
    machine: Machine,
    comm: MPI.Intracomm,
    mine: str,
    then: str = "",
    by: dict[str, Any] | None = None,
    between: Callable[[], None] = lambda: None,
    **how: Any,
) -> None:
    """Calls of which rank 0 makes each on the arrays that ``mine`` names, the others always on the same ones: where
    rank 0 looks anew, they need not, and the other way round. ``then``: more of them, called ``by`` other options,
    after what is to be done ``between``."""
    arrays = {name: (machine.empty((SIZE, BLOCK)), machine.empty((SIZE, BLOCK))) for name in "abc"}
    for turn, name in enumerate(mine + then):
        options = how if turn < len(mine) else by or {}
        if turn == len(mine):
            between()
        send, recv = arrays[name if RANK == 0 else "a"]
        machine.fill(recv, np.full((SIZE, BLOCK), BEFORE, np.uint8))
        machine.fill(send, np.full((SIZE, BLOCK), 10 * turn + RANK, np.uint8))
        hiercoll.alltoall(comm, send, recv, **options)
        due = np.repeat(np.arange(SIZE, dtype=np.uint8)[:, None], BLOCK, 1) + np.uint8(10 * turn)
        np.testing.assert_array_equal(machine.get(recv), due)


@pytest.mark.parametrize("name", ["scatter_destination", "native", "grouped"])
def test_one_rank_comes_back_to_other_arrays(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], transport: str, name: str
) -> None:
    """What it knows from then says nothing of where others have theirs now."""
    if transport == "peer" and name == "native":
        pytest.skip("not to be had")
    comm = on_layout(f"1x{SIZE}")
    hiercoll.configure(comm, table=Table(), tune="off")
    exchange(machine, comm, "abacbbaca", algorithm=name, transport=transport)


@pytest.mark.parametrize("chosen", ["by a table", "by name"])
def test_no_room_in_a_nodes_memory(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    """Ranks find that out together once, and then know: those that know the call do not come there again."""
    comm = on_layout(f"1x{SIZE}")
    topology = hiercoll.get_topology(comm)
    variant = Variant("grouped", {"memory": "shared"})
    where = (mpi_library(), "cuda", topology.node_sizes, topology.placement)
    table = Table((Entry("alltoall", *where, (Choice(1, variant),)),)) if chosen == "by a table" else Table()
    hiercoll.configure(comm, table=table, tune="off")
    monkeypatch.setattr(factory, "free_shared_memory", lambda: 10)
    how = {} if chosen == "by a table" else {"algorithm": "scatter_destination", "transport": "staged"}
    exchange(machine, comm, "aabbcab", **how)


def test_no_room_for_a_plan(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a plan that the program holds has no room for says nothing of calls that had it before."""
    comm = on_layout(f"1x{SIZE}")
    hiercoll.configure(comm, table=Table(), tune="off")
    named = {"algorithm": "scatter_destination", "transport": "staged"}
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = machine.put(values), machine.empty(expected.shape)

    def hold() -> None:
        monkeypatch.setattr(factory, "free_shared_memory", lambda: 10)
        with hiercoll.alltoall_init(comm, send, recv, **named) as plan:
            plan()
        np.testing.assert_array_equal(machine.get(recv).reshape(-1), expected)

    exchange(machine, comm, "aa", "aabcab", by=named, between=hold, **named)


@pytest.mark.parametrize("name", ["gather", "reduce"])
def test_a_new_result_on_the_root_alone(machine: Machine, comm: MPI.Intracomm, transport: str, name: str) -> None:
    """Each call makes one; those before stay as they are."""
    values, results = np.arange(9, dtype=np.int32) + 100 * RANK, []
    send = machine.put(values)
    for turn in range(3):
        machine.fill(send, values + turn)
        how: dict[str, Any] = {"algorithm": "linear" if name == "gather" else "binomial", "transport": transport}
        results.append(getattr(hiercoll, name)(comm, send, root=SIZE - 1, **how))
    for turn, result in enumerate(results):
        assert (result is None) == (RANK != SIZE - 1)
        if result is not None:
            each = [np.arange(9, dtype=np.int32) + 100 * rank + turn for rank in range(SIZE)]
            due = np.concatenate(each) if name == "gather" else np.sum(each, axis=0)
            np.testing.assert_array_equal(machine.get(result).reshape(-1), due)


def test_scattered_in_place(machine: Machine, comm: MPI.Intracomm, transport: str) -> None:
    """The root's result is its part of what it sends, in every call."""
    send, recv = machine.put(np.arange(SIZE * 8).reshape(SIZE, 8)), machine.empty(8, np.int64)
    for _ in range(3):
        ends = (send, MPI.IN_PLACE) if RANK == 0 else (None, recv)
        result = hiercoll.scatter(comm, *ends, algorithm="linear", transport=transport)
        assert result is (send if RANK == 0 else recv)
        np.testing.assert_array_equal(machine.get(recv if RANK else send).reshape(-1, 8)[0], np.arange(8) + 8 * RANK)


@pytest.mark.usefixtures("peers")
def test_what_is_learned_is_for_calls_that_leave_the_transport_open(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm]
) -> None:
    """Others are served as before, whichever rank knows them."""
    comm = on_layout(f"1x{SIZE}")
    hiercoll.configure(comm, table=Table())
    policy = get_session(comm).policy
    exchange(machine, comm, "a", transport="staged")
    wanted = Wanted(ALLTOALL, BLOCK, False, "cuda")
    policy.known[wanted.key] = Finding(Variant("scatter_destination", {}, "peer"), 1e-3, 2e-3, 100)
    policy.forget()
    exchange(machine, comm, "aab")
    exchange(machine, comm, "abcab", transport="staged")
    assert policy.has_found(wanted) and not policy.has_found(wanted._replace(transport="staged"))


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("in_reach", [True, False])
def test_what_is_learned_is_asked_for(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, in_reach: bool
) -> None:
    """By name, with the transport that was learned: ranks that know it from then, and one that does not, make the same
    call, also where it cannot be had."""
    comm = on_layout(f"1x{SIZE}")
    hiercoll.configure(comm, table=Table())
    session = get_session(comm)
    policy = session.policy
    if not in_reach:
        monkeypatch.setattr(session.memories, "_try_node", lambda memory: "" if RANK else "hidden")
    named: dict[str, Any] = {"algorithm": "scatter_destination", "window": 32, "transport": "peer"}
    policy.known[Wanted(ALLTOALL, BLOCK, False, "cuda").key] = Finding(
        Variant("scatter_destination", {"window": 32}, "peer"), 1e-3, 2e-3, 100
    )
    policy.forget()
    with telling() if not in_reach else nullcontext():
        exchange(machine, comm, "aa", "abcab", by=named)
        exchange(machine, comm, "aa", "abcab", by={}, **named)


@pytest.mark.parametrize("held", [False, True])
def test_an_earlier_jobs_peers_that_are_out_of_reach(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Nobody is warned of what nobody has asked for: neither of memory that cannot be mapped, nor of such arrays."""
    comm = on_layout(f"1x{SIZE}")
    hiercoll.configure(comm, table=Table())
    session = get_session(comm)
    wanted = Wanted(ALLTOALL, BLOCK, False, "cuda")
    session.policy.known[wanted.key] = Finding(Variant("scatter_destination", {}, "peer"), 1e-3, 2e-3, 100)
    session.policy.forget()
    if not held:
        monkeypatch.setattr(session.memories, "_try_node", lambda memory: "" if RANK else "hidden")
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    with machine.private():
        send, recv = machine.empty(values.shape), machine.empty(expected.shape)
    with telling() as told:
        for salt in range(3):
            machine.fill(send, values + np.uint8(salt))
            if held:
                with hiercoll.alltoall_init(comm, send, recv) as plan:
                    plan()
            else:
                hiercoll.alltoall(comm, send, recv)
            np.testing.assert_array_equal(machine.get(recv), expected + np.uint8(salt))
    assert not told
