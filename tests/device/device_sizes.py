"""Blocks of any sizes, calls in the background, and the methods of drop-in communicators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from machines import BLOCK, RANK, SIZE, Machine
from mpi4py import MPI

import hiercoll
from hiercoll.tools.workload import buffers


class Vectors:
    """Blocks of sizes drawn for each turn, a device array for each end; the first rank receives nothing in turn 1."""

    def __init__(self, machine: Machine, turn: int, form: str) -> None:
        self.machine, draw = machine, np.random.default_rng(turn)
        sizes = draw.integers(0, 9, (SIZE, SIZE)) + 900 * (draw.random((SIZE, SIZE)) < 0.2)
        sizes[:, 0] *= turn != 1
        if form == "allgatherv":
            sizes[:] = sizes[:, -1:]
        sent, received = sizes[RANK], sizes[:, RANK].copy()
        gaps = draw.integers(0, 2, SIZE)
        at = np.cumsum(received + gaps) - received
        values = np.concatenate(
            [np.full(n, 100.0 * RANK + peer * (form == "alltoallv")) for peer, n in enumerate(sent)]
        )
        self.expected = np.full(int((received + gaps).sum()) if received.any() else 0, -1.0)
        for peer in range(SIZE if received.any() else 0):
            self.expected[at[peer] : at[peer] + received[peer]] = 100 * peer + RANK * (form == "alltoallv")
        self.result = machine.put(np.full(len(self.expected), -1.0))
        values = values if form == "alltoallv" else values[: sent[0]]
        array = machine.empty(values.shape, values.dtype)
        machine.fill(array, values)
        self.send: Any = [array, sent] if form == "alltoallv" else array
        self.recv = [self.result, (received, at if received.any() else at * 0)]

    def check(self) -> None:
        """What lies in the gaps has stayed."""
        np.testing.assert_array_equal(self.machine.get(self.result), self.expected)


@pytest.mark.parametrize("how", ["call", "in the background", "plan", "drop-in", "drop-in, request", "drop-in, plan"])
@pytest.mark.parametrize("form", ["alltoallv", "allgatherv"])
@pytest.mark.parametrize("algorithm", ["auto", "native", "straight", "shared"])
def test_blocks_of_any_sizes(
    machine: Machine,
    messages: str,
    on_layout: Callable[[str], MPI.Intracomm],
    algorithm: str,
    form: str,
    how: str,
) -> None:
    """Other sizes in each turn, gaps between blocks, in all forms."""
    comm = on_layout(f"{SIZE - SIZE // 2}+{SIZE // 2}" if SIZE > 1 else "1x1")
    ours = hiercoll.Intracomm(comm)
    options: dict[str, Any] = {"algorithm": algorithm}
    if algorithm == "straight":
        options = {"algorithm": "pairwise" if form == "alltoallv" else "ring"}
    if algorithm == "shared":
        options = {"algorithm": "aggregate" if form == "alltoallv" else "shared", "limit": 600}
        if form == "allgatherv":
            del options["limit"]
    if (algorithm == "shared" and how == "in the background") or ("drop-in" in how and algorithm != "auto"):
        pytest.skip("not to be had")
    if how != "in the background":
        options["transport"] = messages
    for turn in range(4):
        given = Vectors(machine, turn, form)
        if how == "call":
            getattr(hiercoll, form)(comm, given.send, given.recv, **options)
        elif how == "in the background":
            getattr(hiercoll, f"i{form}")(comm, given.send, given.recv, **options).wait()
        elif how == "plan":
            with getattr(hiercoll, f"{form}_init")(comm, given.send, given.recv, **options) as plan:
                plan()
        elif how == "drop-in":
            getattr(ours, form.capitalize())(given.send, given.recv)
        elif how == "drop-in, request":
            getattr(ours, f"I{form}")(given.send, given.recv).Wait()
        else:
            request = getattr(ours, f"{form.capitalize()}_init")(given.send, given.recv)
            request.Start()
            request.Wait()
            request.Free()
        given.check()


@pytest.mark.parametrize("name", ["auto", "native"])
def test_calls_in_the_background(machine: Machine, messages: str, comm: MPI.Intracomm, name: str) -> None:
    """Three at once, completed in another order than they were begun in; in the second round with other data."""
    given = {kind: buffers(kind, BLOCK, RANK, SIZE) for kind in ("alltoall", "allgather")}
    arrays = {kind: (machine.empty(v.shape), machine.empty(e.shape)) for kind, (v, e) in given.items()}
    root = np.random.default_rng(1).integers(0, 200, 999).astype(np.uint8)
    whole = machine.empty(root.shape)
    for salt in (0, 1):
        for kind, (send, _) in arrays.items():
            machine.fill(send, given[kind][0] + np.uint8(salt))
        machine.fill(whole, root + np.uint8(salt) if RANK == 0 else np.zeros_like(root))
        begun = [
            hiercoll.ialltoall(comm, *arrays["alltoall"], algorithm=name),
            hiercoll.iallgather(comm, *arrays["allgather"], algorithm=name),
            hiercoll.ibcast(comm, whole, algorithm=name),
        ]
        for call in reversed(begun):
            call.wait()
        for kind, (_, recv) in arrays.items():
            np.testing.assert_array_equal(machine.get(recv), given[kind][1] + np.uint8(salt))
        np.testing.assert_array_equal(machine.get(whole), root + np.uint8(salt))


@pytest.mark.parametrize("how", ["call", "request", "plan", "plan that MPI starts"])
def test_drop_in_methods(machine: Machine, messages: str, comm: MPI.Intracomm, how: str) -> None:
    """Of equal blocks, in all forms, and on one rank too: nothing is left to a library that may not have them."""
    ours = hiercoll.Intracomm(comm)
    for turn in range(3):
        for name in ("alltoall", "allgather", "bcast"):
            values, expected = (array + np.uint8(turn) for array in buffers(name, BLOCK, RANK, SIZE))
            if name == "bcast":
                expected = np.random.default_rng(turn).integers(0, 255, 99).astype(np.uint8)
                values = expected if RANK == 0 else expected * 0
            given = [machine.empty(values.shape)]
            machine.fill(given[0], values)
            if name != "bcast":
                given.append(machine.empty(expected.shape))
            if how == "call":
                getattr(ours, name.capitalize())(*given)
            elif how == "request":
                getattr(ours, f"I{name}")(*given).Wait()
            else:
                request = getattr(ours, f"{name.capitalize()}_init")(*given)
                if how == "plan":
                    request.Start()
                    request.Wait()
                else:  # of these hiercoll is not told: its thread finds out, in which another stream is current
                    MPI.Prequest.Startall([request])
                    MPI.Request.Waitall([request])
                request.Free()
            np.testing.assert_array_equal(machine.get(given[-1]), expected)


FORMS = {"call": "{}", "request": "I{}", "plan": "{}_init"}


@pytest.mark.parametrize("how", FORMS)
def test_drop_in_reductions_and_rooted_methods(machine: Machine, messages: str, comm: MPI.Intracomm, how: str) -> None:
    """The same of methods that combine, and of those with a root."""
    ours, items, root = hiercoll.Intracomm(comm), 15, SIZE - 1
    spelled = {"request": str.lower}.get(how, str)
    for turn in range(3):
        each = [np.arange(items * SIZE, dtype="f8") * (1 + rank) + turn for rank in range(SIZE)]
        own, total, part = each[RANK], np.sum(each, axis=0), slice(RANK * items, (RANK + 1) * items)
        at_root, counts = root == RANK, [items] * SIZE
        first = np.concatenate([one[:items] for one in each])
        calls: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
            "Allreduce": (own, total, (), {}),
            "Reduce": (own, total if at_root else None, (), {"root": root}),
            "Reduce_scatter_block": (own, total[part], (), {}),
            "Reduce_scatter": (own, total[part], (counts,), {}),
            "Gather": (own[:items], first if at_root else None, (), {"root": root}),
            "Scatter": (own if at_root else None, each[root][part], (), {"root": root}),
        }
        for name, (send, due, more, options) in calls.items():
            given = None if send is None else machine.put(send)
            result = None if due is None else machine.put(np.full(due.shape, -1.0))
            made = getattr(ours, FORMS[how].format(spelled(name)))(given, result, *more, **options)
            if how == "plan":
                made.Start()
            if how != "call":
                made.Wait()
            if how == "plan":
                made.Free()
            if result is not None:
                np.testing.assert_array_equal(machine.get(result), due, name)
