"""Streams of the caller's, and what is made of specifications of buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machines import BEFORE, BLOCK, RANK, SIZE, Machine, Produced
from mpi4py import MPI

import hiercoll
from hiercoll import ParameterError
from hiercoll.tools.workload import buffers


@pytest.mark.parametrize("kind", ["object", "number"])
def test_a_stream_of_the_callers(machine: Machine, comm: MPI.Intracomm, transport: str, kind: str) -> None:
    """``stream=`` counts, not the one that is current, which the arrays name."""
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = machine.put(values), machine.put(np.full_like(expected, BEFORE))
    machine.get(recv)  # nothing is under way on the stream that does not count
    mine = machine.stream()
    for salt in (0, 1):
        with machine.on(mine):
            machine.fill(send, values + np.uint8(salt))
        stream = mine if kind == "object" else mine.ptr
        assert hiercoll.alltoall(comm, send, recv, stream=stream, transport=transport) is recv
        np.testing.assert_array_equal(machine.get(recv), expected + np.uint8(salt))


def test_streams_that_change(machine: Machine, comm: MPI.Intracomm, transport: str) -> None:
    """A plan comes after the streams that are the arrays' when it is started, not when it was made: after what
    produces the data, and after what is under way where the result will be."""
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send = Produced(machine, machine.put(values), machine.stream())
    recv = Produced(machine, machine.put(np.full_like(expected, BEFORE)), machine.stream())
    with hiercoll.alltoall_init(comm, send, recv, algorithm="scatter_destination", transport=transport) as plan:
        for salt in range(3):
            send.stream, recv.stream = machine.stream(), machine.stream()
            with machine.on(recv.stream):
                machine.fill(recv.array, np.full_like(expected, BEFORE))
            with machine.on(send.stream):
                machine.fill(send.array, values + np.uint8(salt))
            plan()
            with machine.on(recv.stream):
                np.testing.assert_array_equal(machine.get(recv.array), expected + np.uint8(salt))


def test_a_stream_that_is_captured(machine: Machine, comm: MPI.Intracomm, transport: str) -> None:
    """It is refused before anything moves, in calls and in plans, and then they go on."""
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    array, stream = machine.put(values), machine.stream()
    machine.get(array)
    send, how = Produced(machine, array, stream), {"transport": transport}
    hiercoll.alltoall(comm, array, stream=stream, **how)
    with hiercoll.alltoall_init(comm, send, **how) as plan:
        for _ in range(2):
            with machine.capturing(stream):
                with pytest.raises(
                    ParameterError, match="stream: expected one that is not being captured into a graph"
                ):
                    hiercoll.alltoall(comm, array, stream=stream, **how)
                with pytest.raises(ParameterError, match="that is not being captured"):
                    plan()
            for result in (hiercoll.alltoall(comm, array, stream=stream, **how), plan()):
                np.testing.assert_array_equal(machine.get(result), expected)


@pytest.mark.parametrize("how", ["stream given", "call", "in the background", "plan"])
@pytest.mark.parametrize("name", ["scatter_destination", "native"])
def test_a_new_array_comes_after_its_allocation(
    machine: Machine, comm: MPI.Intracomm, transport: str, name: str, how: str
) -> None:
    """Pools give memory out again as soon as it is freed, ordered on the stream that is current then: what its last
    owner has enqueued there may still be under way, and must not overwrite the result."""
    if transport == "peer" and (how == "in the background" or name == "native"):
        pytest.skip("not to be had")
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    array, other = machine.put(values), machine.stream()
    machine.get(array)  # it is there for any stream
    send, options = Produced(machine, array, other), {"algorithm": name, "transport": transport}
    for _ in range(2):
        machine.soil(expected.nbytes)
        if how == "stream given":
            result = hiercoll.alltoall(comm, send, stream=other, **options)
        elif how == "call":
            result = hiercoll.alltoall(comm, send, **options)
        elif how == "in the background":
            result = hiercoll.ialltoall(comm, send, algorithm=name).wait()
        else:
            with hiercoll.alltoall_init(comm, send, **options) as plan:
                result = plan()
        assert machine.was_soiled(result)
        np.testing.assert_array_equal(machine.get(result).reshape(-1), expected)


def test_counted_buffers(machine: Machine, comm: MPI.Intracomm, transport: str) -> None:
    """mpi4py's ``[array, count, type]``, with device arrays; a count smaller than the buffer too."""
    values = np.arange(SIZE * 3, dtype=np.float64) + 100 * RANK
    expected = np.concatenate([np.arange(RANK * 3, RANK * 3 + 3) + 100.0 * rank for rank in range(SIZE)])
    send, recv = machine.put(values), machine.put(np.full(SIZE * 3 + 5, -1.0))
    given: list[Any] = [[send, 3, MPI.DOUBLE], [recv, 3, MPI.DOUBLE]]
    assert hiercoll.alltoall(comm, *given, transport=transport) is recv
    np.testing.assert_array_equal(machine.get(recv), [*expected, *[-1.0] * 5])
    longer = machine.put(np.concatenate([values, values]))
    new = hiercoll.alltoall(comm, [longer, 3, MPI.DOUBLE], transport=transport)
    assert type(new) is type(send) and new.shape == (SIZE * 3,)
    np.testing.assert_array_equal(machine.get(new), expected)
