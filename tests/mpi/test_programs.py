"""Random programs: collectives on random communicators, sizes and types, blocking, persistent,
dropped in and in the background, against the MPI library's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import WORLD, layouts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import hiercoll

RANK, SIZE = WORLD.rank, WORLD.size
PROGRAMS = 500 if SIZE == 3 else 60
KINDS = ("alltoall", "allgather", "alltoallv", "allgatherv")


class Step(NamedTuple):
    """A call, the same on all ranks."""

    kind: str
    mode: str
    communicator: int
    items: int
    dtype: str
    inplace: bool
    salt: int
    completes: int  # how many of those under way are completed afterwards, the last first if odd


STEPS = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(["blocking", "drop-in", "plan", "background", "request", "persistent"]),
    communicator=st.integers(0, 5),
    items=st.sampled_from([0, 1, 2, 7, 40, 3000]),
    dtype=st.sampled_from(["u1", "i4", "f8", "c16"]),
    inplace=st.booleans(),
    salt=st.integers(0, 99),
    completes=st.integers(0, 3),
)


@pytest.fixture(scope="module")
def communicators() -> Iterator[list[tuple[MPI.Intracomm, MPI.Intracomm]]]:
    """(for hiercoll, for MPI): all ranks on several layouts, halves, and all in reverse, whose calls are checked."""
    made = [(WORLD.Dup(), {"HIERCOLL_NODES": layout}) for layout in [*layouts(), *layouts()][:4]]
    made += [(WORLD.Split(RANK % 2), {}), (WORLD.Split(0, -RANK), {"HIERCOLL_CHECK": "1"})]
    for comm, environment in made:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            hiercoll.get_topology(hiercoll.Intracomm(comm))
    pairs = [(comm, comm.Dup()) for comm, _ in made]
    yield pairs
    for pair in pairs:
        for comm in pair:
            comm.Free()


class Case:
    """A step's buffers on this rank, and what the MPI library makes of them."""

    def __init__(self, step: Step, comm: MPI.Intracomm) -> None:
        size, rank = comm.size, comm.rank
        table = np.random.default_rng(step.salt).integers(0, step.items + 1, (size, size))
        self.step, uneven = step, step.kind.endswith("v")
        if uneven and step.inplace and step.kind == "alltoallv":
            table = table + table.T
        if step.kind == "allgatherv":
            table = np.broadcast_to(table[:, :1], (size, size))
        if not uneven:
            table = np.full((size, size), step.items)
        out = table[rank] if step.kind.startswith("alltoall") else table[rank, :1]
        into = table[:, rank]
        self.send = (np.arange(out.sum()) * 7 + 31 * rank + step.salt).astype(step.dtype)
        self.recv = np.full(into.sum(), 99, step.dtype)
        if step.inplace:
            own = slice(None) if step.kind.startswith("alltoall") else slice(into[:rank].sum(), into[: rank + 1].sum())
            self.recv[own] = self.send
        self.expected = self.recv.copy()
        self.out, self.into = out, into

    def arguments(self, recv: Any) -> tuple[Any, Any]:
        """As mpi4py takes them."""
        send: Any = MPI.IN_PLACE if self.step.inplace else self.send
        if self.step.kind == "alltoallv" and not self.step.inplace:
            send = [self.send, self.out]
        return send, [recv, self.into] if self.step.kind.endswith("v") else recv


def perform(case: Case, ours: MPI.Intracomm) -> Callable[[], Any] | None:
    """Do the step; what completes it, if it is under way."""
    kind, send, recv = case.step.kind, *case.arguments(case.recv)
    if case.step.mode == "blocking":
        getattr(hiercoll, kind)(ours, send, recv)
    elif case.step.mode == "drop-in":
        getattr(hiercoll.Intracomm(ours), kind.capitalize())(send, recv)
    elif case.step.mode == "background":
        return getattr(hiercoll, f"i{kind}")(ours, send, recv).wait  # type: ignore[no-any-return]
    elif case.step.mode == "request":
        return getattr(hiercoll.Intracomm(ours), f"I{kind}")(send, recv).Wait  # type: ignore[no-any-return]
    elif case.step.mode == "persistent":
        request = getattr(hiercoll.Intracomm(ours), f"{kind.capitalize()}_init")(send, recv)
        request.Start()
        return lambda: (MPI.Request.Waitall([request]), request.Free())
    else:
        plan = getattr(hiercoll, f"{kind}_init")(ours, send, recv)
        plan.start()
        return lambda: (plan.wait(), plan.free())
    return None


@settings(
    max_examples=PROGRAMS, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(program=st.lists(STEPS, min_size=1, max_size=8))
def test_random_programs(communicators: list[tuple[MPI.Intracomm, MPI.Intracomm]], program: list[Step]) -> None:
    """Right data, whatever is mixed. (Derandomized: all ranks draw the same programs.)"""
    under_way: list[tuple[Case, Callable[[], Any]]] = []
    for step in program:
        ours, plain = communicators[step.communicator % len(communicators)]
        case = Case(step, ours)
        send, recv = case.arguments(case.expected)
        getattr(plain, step.kind.capitalize())(send, recv)
        complete = perform(case, ours)
        if complete is None:
            np.testing.assert_array_equal(case.recv, case.expected, err_msg=str(step))
        else:
            under_way.append((case, complete))
        for _ in range(min(step.completes, len(under_way))):
            finish(under_way.pop(-1 if step.completes % 2 else 0))
    while under_way:
        finish(under_way.pop(0))


def finish(pair: tuple[Case, Callable[[], Any]]) -> None:
    """Complete a call, and look at its data."""
    case, complete = pair
    complete()
    np.testing.assert_array_equal(case.recv, case.expected, err_msg=str(case.step))
