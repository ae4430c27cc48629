"""Random programs: collectives on random communicators, sizes and types, blocking, persistent,
dropped in and in the background, against the MPI library's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import HAS_PERSISTENT, WORLD, layouts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import hiercoll
from hiercoll.collectives import COLLECTIVES, Holds, InPlace

RANK, SIZE = WORLD.rank, WORLD.size
PROGRAMS = 500 if SIZE == 3 else 60
KINDS = (
    "alltoall",
    "allgather",
    "alltoallv",
    "allgatherv",
    "allreduce",
    "reduce_scatter",
    "reduce",
    "gather",
    "scatter",
    "gatherv",
    "scatterv",
    "reduce_scatterv",
)
REDUCE_SCATTERS = ("reduce_scatter", "reduce_scatterv")


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
    mode=st.sampled_from(["blocking", "drop-in", "plan", "background", "request", *["persistent"] * HAS_PERSISTENT]),
    communicator=st.integers(0, 5),
    items=st.sampled_from([0, 1, 2, 7, 40, 3000]),
    dtype=st.sampled_from(["u1", "i4", "f8", "c16"]),
    inplace=st.booleans(),
    salt=st.integers(0, 99),
    completes=st.integers(0, 3),
)


@pytest.fixture(scope="module", params=[{}, {"HIERCOLL_TABLE": "", "HIERCOLL_LEARN": "0"}], ids=["model", "native"])
def communicators(request: pytest.FixtureRequest) -> Iterator[list[tuple[MPI.Intracomm, MPI.Intracomm]]]:
    """(for hiercoll, for MPI): all ranks on several layouts, halves, and all in reverse, whose calls are checked;
    "auto" chooses by the cost model, or the MPI library's own."""
    made = [(WORLD.Dup(), {"HIERCOLL_NODES": layout}) for layout in [*layouts(), *layouts()][:4]]
    made += [(WORLD.Split(RANK % 2), {}), (WORLD.Split(0, -RANK), {"HIERCOLL_CHECK": "1"})]
    for comm, environment in made:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**request.param, **environment}.items():
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
        self.step, self.record, self.root = step, COLLECTIVES[step.kind], step.salt % size
        self.alone = self.record.is_rooted and rank != self.root  # has one of the buffers only
        table = np.random.default_rng(step.salt).integers(0, step.items + 1, (size, size))
        uneven = not self.record.is_even
        if uneven and step.inplace and step.kind == "alltoallv":
            table = table + table.T
        if step.kind in ("allgatherv", "gatherv"):
            table = np.broadcast_to(table[:, :1], (size, size))
        if step.kind in ("scatterv", "reduce_scatterv"):
            table = np.broadcast_to(table[:1], (size, size))
        if not uneven:
            table = np.full((size, size), step.items)
        out = table[rank] if self.record.send is Holds.EACH else table[rank, :1]
        into = table[:, rank] if self.record.recv is Holds.EACH else table[:1, rank]
        self.due = int(into.sum())
        if step.kind in REDUCE_SCATTERS and step.inplace:
            into = table[rank]
        self.send = ((np.arange(out.sum()) * 7 + 31 * rank + step.salt) % 50).astype(step.dtype)
        self.recv = np.full(into.sum(), 99, step.dtype)
        if step.inplace and not self.alone:
            own = slice(into[:rank].sum(), into[: rank + 1].sum())
            if step.kind in ("scatter", "scatterv"):
                self.recv = self.send[out[:rank].sum() : out[: rank + 1].sum()]
            else:
                is_own = self.record.in_place is InPlace.OWN or step.kind in ("gather", "gatherv")
                self.recv[own if is_own else slice(None)] = self.send
        self.expected = self.recv.copy()
        self.out, self.into = out, into

    def arguments(self, recv: Any) -> tuple[list[Any], dict[str, Any]]:
        """As mpi4py takes them."""
        send, step = self.send, self.step
        more: dict[str, Any] = {"root": self.root} if self.record.root else {}
        if self.record.operation:
            more["op"] = MPI.MAX if step.dtype == "u1" else MPI.SUM  # sums of bytes may stop at 255
        is_scattered = self.record.root and self.record.send is Holds.EACH
        sent: Any = send
        if not self.record.is_even and not self.record.operation:
            sent = [send, self.out] if self.record.send is Holds.EACH else send
            recv = [recv, self.into] if self.record.recv is Holds.EACH else recv
        elif not self.record.is_even:
            more["recvcounts"] = self.out
        if step.inplace and not self.alone:
            return [sent, MPI.IN_PLACE] if is_scattered else [MPI.IN_PLACE, recv], more
        if self.alone:
            return [None, recv] if is_scattered else [sent, None], more
        return [sent, recv], more

    def check(self) -> None:
        """What is due has come, and nothing else."""
        end = self.due if self.step.kind in REDUCE_SCATTERS else len(self.recv)
        np.testing.assert_array_equal(self.recv[:end], self.expected[:end], err_msg=str(self.step))


def perform(case: Case, ours: MPI.Intracomm) -> Callable[[], Any] | None:
    """Do the step; what completes it, if it is under way."""
    kind, record, (buffers, more) = case.step.kind, case.record, case.arguments(case.recv)
    if case.step.mode == "blocking":
        getattr(hiercoll, kind)(ours, *buffers, **more)
    elif case.step.mode == "drop-in":
        getattr(hiercoll.Intracomm(ours), record.native)(*buffers, **more)
    elif case.step.mode == "background":
        return getattr(hiercoll, f"i{kind}")(ours, *buffers, **more).wait  # type: ignore[no-any-return]
    elif case.step.mode == "request":
        return getattr(hiercoll.Intracomm(ours), record.nonblocking)(*buffers, **more).Wait  # type: ignore[no-any-return]
    elif case.step.mode == "persistent":
        request = getattr(hiercoll.Intracomm(ours), record.persistent)(*buffers, **more)
        request.Start()
        return lambda: (MPI.Request.Waitall([request]), request.Free())
    else:
        plan = getattr(hiercoll, f"{kind}_init")(ours, *buffers, **more)
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
        buffers, more = case.arguments(case.expected)
        getattr(plain, case.record.native)(*buffers, **more)
        complete = perform(case, ours)
        if complete is None:
            case.check()
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
    case.check()
