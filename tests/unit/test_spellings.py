"""Buffer specifications mean to hiercoll what they mean to mpi4py: both are asked, on a communicator of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import hiercoll
from hiercoll.errors import ArgumentError

quick = settings(
    deadline=None, derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
REFUSALS = (TypeError, ValueError, KeyError, BufferError, OverflowError, AttributeError, MPI.Exception)
Outcome: TypeAlias = "tuple[str, bytes]"
ACCEPTED, TYPED = "accepted", ("BufferTypeError", "BufferSizeError")
OWN = {"alltoall": "pairwise", "alltoallv": "pairwise", "allgather": "ring", "allgatherv": "ring", "bcast": "binomial"}
ITEMS, FIRST, ROOM = 8, 256, 512  # of 4 bytes: in every buffer, and in the memory that it is part of
VECTOR = MPI.INT.Create_vector(2, 1, 2).Commit()
PAIR = MPI.INT.Create_contiguous(2).Commit()


@pytest.fixture(scope="module")
def comm() -> Iterator[MPI.Intracomm]:
    """A communicator of this rank."""
    made = MPI.COMM_SELF.Dup()
    made.Set_errhandler(MPI.ERRORS_RETURN)
    yield made
    made.Free()


COUNTS = st.sampled_from([None, 0, 1, 2, 4, 8, -1, np.int64(2), 2.0, "2", True])
TYPES = st.sampled_from([None, "i", "B", MPI.INT, MPI.BYTE, MPI.DOUBLE, MPI.INT64_T, PAIR, VECTOR, "no type", 7])
DISPLS = st.sampled_from([None, 0, 1, 2, 8, 9, -1, 1.5])
OF_VECTORS = st.one_of(
    COUNTS, st.sampled_from([[2], (2,), [2, 2], [], np.array([3]), np.array([3], "i4"), [2.5], [-1]])
)


def spelled(form: int, kind: type, buffer: Any, count: Any, displ: Any, datatype: Any) -> Any:
    """A specification."""
    forms: list[Any] = [
        buffer,
        kind([buffer, datatype]),
        kind([buffer, count]),
        kind([buffer, count, datatype]),
        kind([buffer, (count, displ)]),
        kind([buffer, (count, displ), datatype]),
        kind([buffer, [count, displ], datatype]),
        kind([buffer, count, displ, datatype]),
        kind([buffer]),
        kind([buffer, count, displ, datatype, None]),
    ]
    return forms[form]


SPELLINGS = st.tuples(st.integers(0, 9), st.sampled_from([list, tuple]), COUNTS, DISPLS, TYPES)
VECTORS = st.tuples(st.integers(0, 9), st.sampled_from([list, tuple]), OF_VECTORS, st.one_of(DISPLS, OF_VECTORS), TYPES)


def outcome(call: Callable[[], object], received: npt.NDArray[Any]) -> Outcome:
    """What a call comes to, and what it leaves."""
    try:
        call()
    except ArgumentError as error:
        return type(error).__name__, received.tobytes()
    except REFUSALS:
        return "refused", received.tobytes()
    return ACCEPTED, received.tobytes()


def compared(comm: MPI.Intracomm, name: str, spec: Any, algorithm: str) -> tuple[Outcome, Outcome]:
    """What mpi4py does with a spelling, and what hiercoll does. It is that of both buffers, or, where these are spelled
    differently, of the receive buffer in place."""
    found = []
    form, kind, *rest = spec
    for library in (True, False):
        memory = np.zeros((2, ROOM), "i4")  # what is read or written around a buffer is no crash
        memory[0] = np.arange(ROOM) + 0x01010101  # no byte is 0
        source, target = memory[:, FIRST : FIRST + ITEMS]
        given = [spelled(form, kind, target, *rest)]
        if name != "bcast":
            given.insert(0, MPI.IN_PLACE if name == "allgatherv" else spelled(form, kind, source, *rest))
        function, choice = getattr(hiercoll, name), {"algorithm": algorithm}
        call = (
            partial(getattr(comm, name.capitalize()), *given) if library else partial(function, comm, *given, **choice)
        )
        found.append(outcome(call, memory[1]))
    return found[0], found[1]


def compare(comm: MPI.Intracomm, name: str, spec: Any) -> None:
    """Both refuse a spelling, or both accept it, with the same result; but hiercoll's functions refuse, besides, counts
    for which the buffer is too small."""
    for algorithm in ("native", OWN[name]):
        (theirs, result), (ours, own_result) = compared(comm, name, spec, algorithm)
        if theirs != ACCEPTED:
            assert ours in TYPED, (algorithm, theirs, ours)
        elif ours != ACCEPTED:
            assert ours == "BufferSizeError", (algorithm, ours)
            around = np.delete(np.frombuffer(result, "i4"), range(FIRST, FIRST + ITEMS))
            assert around.any() or name in ("bcast", "allgatherv"), algorithm  # which move nothing here
        else:
            assert result == own_result, algorithm


@pytest.mark.parametrize("name", ["alltoall", "allgather", "bcast"])
@quick
@given(spec=SPELLINGS)
def test_equal_blocks(comm: MPI.Intracomm, name: str, spec: Any) -> None:
    """A count and a displacement, or what is inferred."""
    compare(comm, name, spec)


@pytest.mark.parametrize("name", ["alltoallv", "allgatherv"])
@quick
@given(spec=VECTORS)
def test_uneven_blocks(comm: MPI.Intracomm, name: str, spec: Any) -> None:
    """A count and a displacement for each rank, one for all, or what is inferred."""
    compare(comm, name, spec)


def test_the_comparison_sees_something(comm: MPI.Intracomm) -> None:
    """Of each kind of outcome."""
    accepted = [
        (0, list, None, None, None),
        (5, tuple, 2, 1, MPI.INT),
        (7, list, 2, None, PAIR),
        (3, list, 2, 0, VECTOR),
    ]
    for spec in accepted:
        theirs, ours = compared(comm, "alltoall", spec, "pairwise")
        assert theirs == ours and ours[0] == ACCEPTED and np.frombuffer(ours[1], "i4").any()
    for spec in [
        (8, list, None, None, None),
        (3, list, -1, 0, MPI.INT),
        (3, list, 2, 0, "no type"),
        (3, list, 2.0, 0, "i"),
    ]:
        theirs, ours = compared(comm, "alltoall", spec, "pairwise")
        assert theirs[0] == "refused" and ours[0] == "BufferTypeError" and not np.frombuffer(ours[1], "i4").any()
    theirs, ours = compared(comm, "alltoall", (3, list, 9, 0, "i"), "pairwise")
    assert (theirs[0], ours[0]) == (ACCEPTED, "BufferSizeError")
