"""Calls in place whose results come to lie where their input is: what is sent is copied on the device before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from device_tools import skip_without
from machines import RANK, SIZE, Machine
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY
from hiercoll.collectives import COLLECTIVES

ROOT = SIZE - 1
COUNTS = np.arange(SIZE) % 3 * 20  # elements, none on some ranks
REFUSALS = ("shares no memory", "on the host")  # of some algorithms: in the background, and of devices
FORMS = ["call", "in the background", "plan", "drop-in", "drop-in, request", "drop-in, plan"]


def given_and_due(collective: str, turn: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What is in this rank's buffer before, and in its first elements after."""
    inputs = [np.arange(60 * SIZE, dtype="i4") * (1 + rank) + turn for rank in range(SIZE)]
    if collective == "reduce":
        return inputs[RANK], sum(inputs) if RANK == ROOT else inputs[RANK]
    if collective == "reduce_scatterv":
        ends = np.cumsum(COUNTS)
        return inputs[RANK], sum(inputs)[ends[RANK] - COUNTS[RANK] : ends[RANK]]
    each = [np.repeat(np.arange(SIZE) * SIZE + rank + turn, COUNTS[rank] + COUNTS).astype("i4") for rank in range(SIZE)]
    return each[RANK], np.concatenate([values[values == RANK * SIZE + rank + turn] for rank, values in enumerate(each)])


@contextmanager
def calling(comm: MPI.Intracomm, collective: str, array: Any, form: str, options: dict[str, Any]) -> Iterator[Any]:
    """What makes the call of that form in place, on an array."""
    ours, counts = hiercoll.Intracomm(comm), COUNTS[RANK] + COUNTS
    send: Any = array if collective == "reduce" and RANK != ROOT else MPI.IN_PLACE
    root = {"root": ROOT} if collective == "reduce" else {}
    args: tuple[Any, ...] = (send, [array, counts])
    if collective == "reduce":
        args = (send, array if RANK == ROOT else None)
    elif collective == "reduce_scatterv":
        args = (send, array, COUNTS)
    record = COLLECTIVES[collective]
    if form == "plan":
        with getattr(hiercoll, f"{collective}_init")(comm, *args, **root, **options) as plan:
            yield plan
    elif form == "drop-in, plan":
        request = getattr(ours, record.persistent)(*args, **root)
        yield lambda: (request.Start(), request.Wait())
        request.Free()
    elif form == "drop-in, request":
        yield lambda: getattr(ours, record.nonblocking)(*args, **root).Wait()
    elif form == "drop-in":
        yield lambda: getattr(ours, record.native)(*args, **root)
    elif form == "in the background":
        yield lambda: getattr(hiercoll, f"i{collective}")(comm, *args, **root, **options).wait()
    else:
        yield lambda: getattr(hiercoll, collective)(comm, *args, **root, **options)


@pytest.mark.parametrize("way", ["staged", "direct", "peer"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("collective", ["reduce", "reduce_scatterv", "alltoallv"])
def test_what_is_overwritten(
    machine: Machine, way: str, on_layout: Callable[[str], MPI.Intracomm], collective: str, form: str
) -> None:
    """Right data by every algorithm, in a second start with other data, too."""
    if way == "peer" and (collective != "reduce" or form == "in the background"):
        return  # not to be had
    skip_without(machine, way)
    comm = on_layout(f"{SIZE - SIZE // 2}+{SIZE // 2}" if SIZE > 1 else "1x1")
    family, topology = COLLECTIVES[collective].family, hiercoll.get_topology(comm)
    for name in ["auto"] if form.startswith("drop-in") else ["auto", "native", *REGISTRY[family]]:
        entry = REGISTRY[family].get(name)
        if entry is not None and entry.refusal(topology, {}) is not None:
            continue
        options: dict[str, Any] = {"algorithm": name}
        if form != "in the background":
            options["transport"] = way
        array = machine.put(given_and_due(collective, 0)[0])
        try:
            with calling(comm, collective, array, form, options) as call:
                for turn in (0, 1, 2):
                    before, due = given_and_due(collective, turn)
                    machine.fill(array, before)
                    call()
                    np.testing.assert_array_equal(machine.get(array)[: len(due)], due)
        except hiercoll.ConstraintError as error:
            if not any(why in str(error) for why in REFUSALS):
                raise


@pytest.mark.ranks([2, 3])
def test_too_little_memory_for_the_copy(machine: Machine, comm: MPI.Intracomm) -> None:
    """An error on all ranks, and the communicator goes on."""
    values = np.ones(1 << 16, "i4")
    array = machine.put(values)
    send, recv = (MPI.IN_PLACE, array) if RANK == ROOT else (array, None)
    how: dict[str, Any] = {"algorithm": "binomial", "root": ROOT}
    with machine.full(), pytest.raises(hiercoll.DeviceMemoryError):
        hiercoll.reduce(comm, send, recv, **how)
    np.testing.assert_array_equal(machine.get(array), values)
    hiercoll.reduce(comm, send, recv, **how)
    np.testing.assert_array_equal(machine.get(array), values * (SIZE if RANK == ROOT else 1))


@pytest.mark.parametrize("name", ["auto", "native", "pairwise"])
def test_blocks_of_any_datatypes(machine: Machine, messages: str, comm: MPI.Intracomm, name: str) -> None:
    """Where each is one run of bytes."""
    counts = COUNTS[RANK] + COUNTS
    at = 4 * (np.cumsum(counts) - counts)
    types = [MPI.INT.Create_contiguous(1).Commit() for _ in range(SIZE)]
    for turn in range(3):
        before, due = given_and_due("alltoallw", turn)
        array = machine.put(before)
        how: dict[str, Any] = {} if name == "auto" else {"transport": messages}
        hiercoll.alltoallw(comm, MPI.IN_PLACE, [array, (counts, at), types], algorithm=name, **how)
        np.testing.assert_array_equal(machine.get(array), due)
    for each in types:
        each.Free()
