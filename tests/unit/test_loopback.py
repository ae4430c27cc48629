"""Loopback: real bytes through every algorithm, in random orders, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hiercoll.algorithms import REGISTRY, Algorithm, Params
from hiercoll.collectives import COLLECTIVES, InPlace
from hiercoll.contracts import Contract
from hiercoll.errors import ArgumentError, BufferTypeError, ScheduleError
from hiercoll.memory import Array, BlockLayout
from hiercoll.schedule import RECV, SEND, Builder, Copy, Join, Region, Schedule
from hiercoll.tools import loopback
from hiercoll.topology import Topology, parse_layout

LAYOUTS = [parse_layout(text) for text in ("2x3", "5+3", "1x4", "3+5:cyclic", "3x1", "1x1")]
ITEMS = 7  # per block, of 8 bytes: not a multiple of any number of segments


def cases(in_place: bool = False) -> list[object]:
    """All algorithms, parameters and layouts that go together."""
    everything = (
        (algorithm, params, topology)
        for entries in REGISTRY.values()
        for algorithm in entries.values()
        for params in algorithm.variants()
        for topology in LAYOUTS
    )
    return [
        pytest.param(a, params, t, id=f"{a.collective}-{a.spelled(params)}-{t}".replace(" ", "-"))
        for a, params, t in everything
        if in_place in a.in_places and a.refusal(t, params) is None
    ]


def schedules_of(
    algorithm: Algorithm, params: Params, topology: Topology, inplace: bool = False, root: int = 0
) -> list[Schedule]:
    return [algorithm.schedule(topology, rank, params, inplace=inplace, root=root) for rank in range(topology.size)]


def inputs(collective: str, p: int, items: int, blocks: int, root: int = 0) -> list[Array]:
    """Send arrays [block, item] of all ranks, no two items alike; vectors of so many ``blocks``."""
    contract = Contract(collective, p, blocks=blocks, root=root)
    lengths = [contract.sizes(rank)["send"] for rank in range(p)]
    return [1_000_000 * rank + np.arange(n * items, dtype=np.int64).reshape(n, items) for rank, n in enumerate(lengths)]


def outcome(collective: str, sends: list[Array], root: int = 0) -> list[Array]:
    """What NumPy says the receive arrays must be."""
    p = len(sends)
    if collective in ("alltoall", "alltoallv"):
        return list(np.stack(sends).swapaxes(0, 1))
    if collective in ("allgather", "barrier"):
        return [np.concatenate(sends)] * p
    if collective == "allreduce":
        return [np.sum(sends, axis=0)] * p
    if collective == "reduce_scatter":
        return list(np.sum(sends, axis=0)[:, None])
    if collective in ("gather", "gatherv", "reduce"):
        due = np.sum(sends, axis=0) if collective == "reduce" else np.concatenate(sends)
        return [due if rank == root else due[:0] for rank in range(p)]
    if collective in ("scatter", "scatterv"):
        return list(sends[root][:, None])
    assert collective == "bcast", f"no expected result for {collective}"
    return [sends[root]] * p


@pytest.mark.parametrize(("algorithm", "params", "topology"), cases())
def test_every_algorithm_does_what_numpy_does(algorithm: Algorithm, params: Params, topology: Topology) -> None:
    schedules = schedules_of(algorithm, params, topology)
    sends = inputs(algorithm.collective, topology.size, ITEMS, schedules[0].blocks)
    before = [send.copy() for send in sends]
    due = outcome(algorithm.collective, sends)
    layout = BlockLayout(ITEMS * 8, 8, schedules[0].segments)
    for seed in range(3):
        recvs = [np.zeros_like(array) for array in due]
        loopback.run(schedules, topology, sends, recvs, layout=layout, combine=np.add, seed=seed)
        for rank in range(topology.size):
            np.testing.assert_array_equal(recvs[rank], due[rank], err_msg=f"rank {rank}, seed {seed}")
            np.testing.assert_array_equal(sends[rank], before[rank])


@pytest.mark.parametrize(("algorithm", "params", "topology"), cases(in_place=True))
def test_in_place(algorithm: Algorithm, params: Params, topology: Topology) -> None:
    record = COLLECTIVES[algorithm.collective]
    for root in {0, topology.size // 2, topology.size - 1} if record.root else {0}:
        schedules = schedules_of(algorithm, params, topology, inplace=True, root=root)
        sends = inputs(algorithm.collective, topology.size, ITEMS, schedules[0].blocks, root)
        due = outcome(algorithm.collective, sends, root)
        recvs = [np.full_like(due[r] if len(due[r]) >= len(sends[r]) else sends[r], -1) for r in range(topology.size)]
        for rank, (send, recv) in enumerate(zip(sends, recvs, strict=True)):
            if len(send):
                recv[rank if record.in_place is InPlace.OWN else slice(None)] = send
        layout = BlockLayout(ITEMS * 8, 8, schedules[0].segments)
        loopback.run(schedules, topology, [], recvs, layout=layout, in_place=True, combine=np.add, seed=root)
        for rank in range(topology.size):
            np.testing.assert_array_equal(recvs[rank][: len(due[rank])], due[rank])


@pytest.mark.parametrize("collective", REGISTRY)
def test_empty_blocks(collective: str) -> None:
    topology = parse_layout("2x2")
    for algorithm in REGISTRY[collective].values():
        schedules = schedules_of(algorithm, algorithm.resolve({}), topology)
        arrays = [np.empty(0, dtype=np.int64) for _ in range(4)]
        loopback.run(schedules, topology, arrays, arrays, layout=BlockLayout(0, 8), combine=np.add)


def exchange(second: Schedule | None = None) -> list[Schedule]:
    """Two ranks that swap a block."""
    schedules = []
    for rank in range(2):
        b = Builder(rank)
        b.recv(1 - rank, RECV[0])
        b.send(1 - rank, SEND[0])
        schedules.append(b.build())
    return schedules if second is None else [schedules[0], second]


def attempt(schedules: list[Schedule], seed: int = 0, **options: object) -> list[Array]:
    sends, recvs = ([np.full(3, 10 * k + rank, dtype=np.int16) for rank in range(2)] for k in (1, 2))
    loopback.run(schedules, Topology((0, 0)), sends, recvs, layout=BlockLayout(6, 2), seed=seed, **options)  # type: ignore[arg-type]
    return recvs


def test_unwritten_memory_is_poisoned() -> None:
    recvs = attempt([Builder(rank).build() for rank in range(2)])
    assert {byte for recv in recvs for byte in recv.tobytes()} == {loopback.FILL}
    recvs = attempt([Builder(rank).build() for rank in range(2)], in_place=True)
    assert [recv[0] for recv in recvs] == [20, 21]


def test_scratch_and_shared_are_poisoned() -> None:
    schedules = []
    for rank in range(2):
        b = Builder(rank)
        b.copy((b.scratch(1) if rank else b.shared(1))[0], RECV[0])
        schedules.append(b.build())
    recvs = attempt(schedules)
    assert {byte for recv in recvs for byte in recv.tobytes()} == {loopback.FILL}


def test_shared_is_one_buffer_per_node_and_waits_are_obeyed() -> None:
    for seed in range(20):
        schedules = []
        for rank in range(2):
            b = Builder(rank)
            board = b.shared(1)
            if rank == 0:
                b.signal(0, after=[b.copy(SEND[0], board[0])])
            else:
                b.copy(board[0], RECV[0], after=[b.wait([0], 0)])
            schedules.append(b.build())
        assert attempt(schedules, seed)[1][0] == 10


def test_seeds_give_different_orders() -> None:
    """Two unordered copies to one block: a race, which some seeds decide one way and some the other."""
    results = set()
    for seed in range(20):
        b = Builder(0)
        b.copy(SEND[0], RECV[0])
        scratch = b.scratch(1)
        b.copy(scratch[0], RECV[0])
        results.add(attempt([b.build(), Builder(1).build()], seed)[0][0])
    assert len(results) == 2


def test_reduce_keeps_left_and_right_apart() -> None:
    b = Builder(0)
    b.reduce(SEND[0], RECV[0], RECV[0])
    recvs = attempt([b.build(), Builder(1).build()], in_place=False, combine=np.subtract)
    fill = np.frombuffer(bytes([loopback.FILL] * 2), np.int16)[0]
    np.testing.assert_array_equal(recvs[0], np.full(3, 10, np.int16) - fill)


def test_stuck_operations_are_named() -> None:
    schedules = exchange(Builder(1).build())
    with pytest.raises(ScheduleError, match=r"2 operations cannot run: receive recv\[0\] from rank 1 "):
        attempt(schedules)


def test_a_cycle_is_stuck_with_its_cause() -> None:
    """Both ranks receive before they send: only the receives are named."""
    schedules = []
    for rank in range(2):
        b = Builder(rank)
        got = b.recv(1 - rank, RECV[0])
        b.send(1 - rank, SEND[0], after=[got])
        schedules.append(b.build())
    with pytest.raises(ScheduleError, match="4 operations cannot run") as error:
        attempt(schedules)
    assert "receive" in str(error.value) and "send send" not in str(error.value)


def test_a_flag_that_nobody_raises_is_named() -> None:
    b = Builder(1)
    b.recv(0, RECV[0], after=[b.wait([0], 3)])
    b.send(0, SEND[0])
    with pytest.raises(ScheduleError, match=r"wait for flag 3 of ranks 0 \(rank 1, op 0\)"):
        attempt(exchange(b.build()))


def test_many_stuck_operations_are_counted() -> None:
    b = Builder(0)
    for tag in range(9):
        b.send(1, SEND[0], tag=tag)
    with pytest.raises(ScheduleError, match=r"9 operations .*; and 3 more"):
        attempt([b.build(), Builder(1).build()])


@pytest.mark.parametrize("second", [RECV[1], RECV[-1]])
def test_regions_outside_their_buffers_are_refused(second: Region) -> None:
    b = Builder(1)
    b.copy(SEND[0], second)
    with pytest.raises(ScheduleError, match="lies outside its 6 bytes"):
        attempt(exchange(b.build()))


def test_sizes_that_differ_are_refused() -> None:
    b = Builder(0)
    b.copy(b.scratch(2)[0:2], RECV[0])
    with pytest.raises(ScheduleError, match="differ in size"):
        attempt([b.build(), Builder(1).build()])
    b = Builder(0)
    b.reduce(b.scratch(2)[0:2], SEND[0], RECV[0])
    with pytest.raises(ScheduleError, match="differ in size"):
        attempt([b.build(), Builder(1).build()], combine=np.add)


def test_a_reduction_needs_combine() -> None:
    b = Builder(0)
    b.reduce(SEND[0], SEND[0], RECV[0])
    with pytest.raises(ScheduleError, match="needs the argument combine"):
        attempt([b.build(), Builder(1).build()])


def test_arguments_are_checked() -> None:
    topology, layout = Topology((0, 0)), BlockLayout(8)
    arrays = [np.zeros(1, dtype=np.int64) for _ in range(2)]
    with pytest.raises(ArgumentError, match="schedules: expected one for each of 2 ranks, got 1"):
        loopback.run(exchange()[:1], topology, arrays, arrays, layout=layout)
    with pytest.raises(ArgumentError, match="recvs: expected one for each of 2 ranks, got 1"):
        loopback.run(exchange(), topology, arrays, arrays[:1], layout=layout)
    with pytest.raises(ArgumentError, match="sends: expected"):
        loopback.run(exchange(), topology, [], arrays, layout=layout)
    constant = np.zeros(1, dtype=np.int64)
    constant.flags.writeable = False
    with pytest.raises(BufferTypeError, match=r"recvs\[0\]: expected a writable array"):
        loopback.run(exchange(), topology, arrays, [constant, constant], layout=layout)


def test_sizes_that_have_not_been_learned_are_missed() -> None:
    """What is done on shared blocks looks for their lengths."""
    topology = parse_layout("1x2")
    right = [REGISTRY["alltoallv"]["aggregate"].schedule(topology, rank) for rank in range(2)]
    sends, recvs = np.zeros((2, 2, 8), np.uint8), [np.empty((2, 8), np.uint8) for _ in range(2)]
    layout = BlockLayout(8, segments=2)
    loopback.run(right, topology, list(sends), recvs, layout=layout)
    ops = tuple(
        Join(op.deps) if isinstance(op, Copy) and op.source.buffer == "shared_sizes" else op for op in right[0].ops
    )
    with pytest.raises(ScheduleError, match=r"\(rank 0\): sizes\[1\] has not been learned"):
        loopback.run([replace(right[0], ops=ops), right[1]], topology, list(sends), recvs, layout=layout)
