"""Gather, scatter, reduce and reduce_scatter: every algorithm, every root, and every way to call them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY
from hiercoll.calls import dropin
from hiercoll.collectives import Order, fixed_tree
from hiercoll.runtime.lifetime import get_session

RANK, SIZE = WORLD.rank, WORLD.size
ITEMS = 5
Array = npt.NDArray[Any]
several = pytest.mark.mpi(min_size=2)


def variants(collective: str) -> list[Any]:
    """All algorithms in all variants, and what "auto" and the MPI library do."""
    found = [(name, params) for name, entry in REGISTRY[collective].items() for params in entry.variants()]
    return [pytest.param(*each, id=f"{each[0]} {each[1]}") for each in [("auto", {}), ("native", {}), *found]]


def is_refused(call: Callable[..., Any], comm: MPI.Intracomm, *buffers: Any, algorithm: str, **params: Any) -> bool:
    """Whether an algorithm does not suit the ranks of ``comm``, and says so, on all of them."""
    name = call.__name__.removesuffix("v")
    if algorithm not in REGISTRY[name]:
        return False
    if (reason := REGISTRY[name][algorithm].refusal(get_session(comm).topology, params)) is None:
        return False
    with pytest.raises(hiercoll.ConstraintError, match=reason):
        call(comm, *buffers, algorithm=algorithm, **params)
    return True


@pytest.fixture(params=layouts())
def comm(request: pytest.FixtureRequest, on_layout: Callable[[str], MPI.Intracomm]) -> MPI.Intracomm:
    return on_layout(request.param)


def block(rank: int, salt: int = 0) -> Array:
    """A rank's own: no two are alike."""
    return np.arange(ITEMS) + 100 * rank + 10_000 * salt


@pytest.mark.parametrize(("name", "params"), variants("gather"))
def test_gather(comm: MPI.Intracomm, name: str, params: Any) -> None:
    """Blocks in the order of ranks, on the root alone; its own may be in place."""
    for root in range(SIZE):
        for salt in range(3):
            want = np.array([block(rank, salt) for rank in range(SIZE)])
            found = hiercoll.gather(comm, block(RANK, salt), root=root, algorithm=name, **params)
            whole = np.full((SIZE, ITEMS), -1)
            whole[root] = block(root, salt)
            if root == RANK:
                np.testing.assert_array_equal(found, want)
                assert hiercoll.gather(comm, MPI.IN_PLACE, whole, root=root, algorithm=name, **params) is whole
                np.testing.assert_array_equal(whole, want)
            else:
                assert found is None
                assert hiercoll.gather(comm, block(RANK, salt), None, root=root, algorithm=name, **params) is None


@pytest.mark.parametrize(("name", "params"), variants("scatter"))
def test_scatter(comm: MPI.Intracomm, name: str, params: Any) -> None:
    """From the root alone, which may leave its own block where it is."""
    for root in range(SIZE):
        for salt in range(3):
            whole = np.array([block(rank, salt) for rank in range(SIZE)]) if root == RANK else None
            own = np.full(ITEMS, -1)
            assert hiercoll.scatter(comm, whole, own, root=root, algorithm=name, **params) is own
            np.testing.assert_array_equal(own, block(RANK, salt))
            own[:] = -1
            into = MPI.IN_PLACE if root == RANK else own
            hiercoll.scatter(comm, whole, into, root=root, algorithm=name, **params)
            np.testing.assert_array_equal(own, -1 if root == RANK else block(RANK, salt))


COUNTS = {  # elements per rank
    "growing": np.arange(SIZE) + 1,
    "some none": np.arange(SIZE) % 2 * 3,
    "one": np.arange(SIZE) * 0 + (np.arange(SIZE) == SIZE - 1) * 7,
    "small and large": 511 + np.arange(SIZE) % 3,
    "nothing": np.zeros(SIZE, int),
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", ["auto", "native", "linear", "aggregate", "binomial"])
def test_blocks_of_any_sizes(comm: MPI.Intracomm, name: str, counts: Array) -> None:
    """Gatherv and scatterv: with gaps between the root's blocks, in place or not, in all forms but that what needs
    shared memory does not go on in the background."""
    places = np.cumsum(counts + 1) - counts  # after a gap each
    whole = np.full(int((counts + 1).sum()), -1)
    for rank in range(SIZE):
        whole[places[rank] : places[rank] + counts[rank]] = block(rank, 1)[0] + np.arange(counts[rank])
    own = slice(places[RANK], places[RANK] + counts[RANK])
    for root in range(SIZE):
        how: Any = {"root": root, "algorithm": name}
        into, many = np.full_like(whole, -1), whole.copy()
        gathered: Any = [into, (counts, places)] if root == RANK else None
        scattered: Any = [many, (counts, places)] if root == RANK else None
        result = hiercoll.gatherv(comm, whole[own].copy(), gathered, **how)
        assert (result is into) if root == RANK else result is None
        with refusal_in_background(name):
            hiercoll.igatherv(comm, whole[own].copy(), gathered, **how).wait()
        with hiercoll.gatherv_init(comm, whole[own].copy(), gathered, **how) as plan:
            plan()
            into[:] = -1
            plan()
        np.testing.assert_array_equal(into, whole if root == RANK else -1)
        into[:] = -1
        into[own] = whole[own]
        hiercoll.gatherv(comm, MPI.IN_PLACE if root == RANK else whole[own].copy(), gathered, **how)
        np.testing.assert_array_equal(into[own] if root != RANK else into, whole[own] if root != RANK else whole)
        part = np.full(counts[RANK], -1)
        assert hiercoll.scatterv(comm, scattered, part, **how) is part
        np.testing.assert_array_equal(part, whole[own])
        part[:] = -1
        with refusal_in_background(name):
            hiercoll.iscatterv(comm, scattered, part, **how).wait()
            np.testing.assert_array_equal(part, whole[own])
        part[:] = -1
        with hiercoll.scatterv_init(comm, scattered, MPI.IN_PLACE if root == RANK else part, **how) as plan:
            plan()
        np.testing.assert_array_equal(part, -1 if root == RANK else whole[own])
        np.testing.assert_array_equal(many, whole)


def refusal_in_background(name: str) -> Any:
    """What is expected of a call in the background by that algorithm."""
    needs_memory = name == "aggregate"
    return pytest.raises(hiercoll.ConstraintError, match="shares no memory") if needs_memory else nullcontext()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "params"), [("aggregate", {}), ("binomial", {}), ("binomial", {"radix": 3})])
def test_random_sizes_from_and_to_any_rank(comm: MPI.Intracomm, name: str, params: Any, seed: int) -> None:
    """Call after call, nobody waiting for others between them: blocks that are small, large, empty, and
    lie in any order; of plain numbers, or of a type with gaps."""
    same = np.random.default_rng(seed)  # on all ranks
    pairs = MPI.DOUBLE.Create_vector(2, 1, 2).Create_resized(0, 32).Commit()
    for turn in range(20):
        root, window, in_place = int(same.integers(SIZE)), int(same.choice([1, 4, 32])), bool(same.random() < 0.3)
        counts, order = same.choice([0, 1, 30, 255, 256, 257, 900], SIZE), same.permutation(SIZE)
        places, count, at = np.zeros(SIZE, int), int(counts[RANK]), 0
        for rank in order:
            places[rank], at = at + 1, at + 1 + counts[rank]
        whole = np.full((at + 1, 4), -1.0)  # of which a pair has the first and the third
        for rank in range(SIZE):
            whole[places[rank] : places[rank] + counts[rank], ::2] = 1e6 * rank + 1e3 * turn + seed
        own, found = whole[places[RANK] : places[RANK] + count].copy(), np.full_like(whole, -1)
        how: Any = {"root": root, "algorithm": name, "window": window, **params}
        many: Any = [found, (counts, places), pairs] if root == RANK else None
        aside = in_place and root == RANK
        if aside:
            found[places[RANK] : places[RANK] + count] = own
        hiercoll.gatherv(comm, MPI.IN_PLACE if aside else [own, count, pairs], many, **how)
        if root == RANK:
            np.testing.assert_array_equal(found, whole)
        part = np.full(2 * count, -1.0)
        hiercoll.scatterv(comm, many, MPI.IN_PLACE if aside else part, **how)
        np.testing.assert_array_equal(part, -1 if aside else own[:, ::2].ravel())
    pairs.Free()


@pytest.mark.parametrize("name", ["linear", "aggregate", "binomial", "native"])
@pytest.mark.parametrize("limit", [0, 8, 24, 10**7])
def test_limits_of_what_travels_together(comm: MPI.Intracomm, name: str, limit: int) -> None:
    """Right data whatever the limit is, from call to call, and in all forms."""
    for turn in range(3):
        counts, root = np.arange(SIZE) + turn, turn % SIZE
        whole, how = np.repeat(np.arange(SIZE), counts) + turn, dict[str, Any](root=root, algorithm=name, limit=limit)
        own, into = np.full(counts[RANK], RANK + turn), np.full_like(whole, -1)
        many: Any = [into, counts] if root == RANK else None
        hiercoll.gatherv(comm, own, many, **how)
        assert root != RANK or (into == whole).all()
        part = np.full_like(own, -1)
        hiercoll.scatterv(comm, many, part, **how)
        np.testing.assert_array_equal(part, own)
        if name != "aggregate":
            into[:] = -1
            hiercoll.igatherv(comm, own, many, **how).wait()
            part[:] = -1
            hiercoll.iscatterv(comm, many, part, **how).wait()
            np.testing.assert_array_equal(part, own)
        for plan in (
            hiercoll.gatherv_init(comm, own, many, **how),
            hiercoll.scatterv_init(comm, many, part, **how),
        ):
            into[:], part[:] = (whole if root == RANK else -1), own
            plan()
            plan.free()
            assert root != RANK or (into == whole).all()
            np.testing.assert_array_equal(part, own)
    with pytest.raises(hiercoll.ParameterError, match="limit"):
        hiercoll.gatherv(comm, own, many, root=root, algorithm=name, limit=-1)


@several
@pytest.mark.parametrize("root", [0, SIZE - 1])
def test_who_has_written_leaves_a_gather(comm: MPI.Intracomm, root: int) -> None:
    """Ranks that are neither root nor leader do not wait for the root: it comes when they tell it that they left."""
    nodes = get_session(comm).topology.nodes
    leaders = [root if root in ranks else ranks[0] for ranks in nodes]
    recv: Any = [np.zeros(SIZE), np.ones(SIZE, int)] if root == RANK else None
    how: Any = {"root": root, "algorithm": "aggregate"}
    hiercoll.gatherv(comm, np.ones(1), recv, **how)  # windows are made by all
    if root == RANK:
        for rank in set(range(SIZE)).difference(leaders):
            assert comm.recv(source=rank, tag=7) == "left"
    hiercoll.gatherv(comm, np.full(1, float(RANK)), recv, **how)
    if RANK not in leaders:
        comm.send("left", root, tag=7)
    assert root != RANK or (recv[0] == np.arange(SIZE)).all()


@several
@pytest.mark.parametrize("root", [0, SIZE - 1])
def test_a_scatter_waits_for_root_and_leader_only(comm: MPI.Intracomm, root: int) -> None:
    """Ranks come one by one, each when the one before has left: the root, leaders of other nodes, all others."""
    nodes = get_session(comm).topology.nodes
    first = [root, *(ranks[0] for ranks in nodes if root not in ranks)]
    line = [*first, *(rank for rank in range(SIZE) if rank not in first)]
    place, own = line.index(RANK), np.zeros(1)
    send: Any = [np.arange(float(SIZE)), np.ones(SIZE, int)] if root == RANK else None
    hiercoll.scatterv(comm, send, own, root=root, algorithm="aggregate")  # windows are made by all
    own[:] = -1
    if place:
        comm.recv(source=line[place - 1], tag=7)
    hiercoll.scatterv(comm, send, own, root=root, algorithm="aggregate")
    assert own[0] == RANK
    if place + 1 < SIZE:
        comm.send("left", line[place + 1], tag=7)


@several
def test_algorithms_that_need_all_sizes(comm: MPI.Intracomm) -> None:
    """Are refused on all ranks, before any data move."""
    recv: Any = [np.zeros(SIZE), np.ones(SIZE, int)] if RANK == 0 else None
    with pytest.raises(hiercoll.UnknownAlgorithmError, match="auto, native, linear, aggregate, binomial, got 'ring'"):
        hiercoll.gatherv(comm, np.ones(1), recv, algorithm="ring")


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("name", "params"), variants("reduce_scatter"))
def test_reduce_scatter_to_any_sizes(comm: MPI.Intracomm, name: str, params: Any, counts: Array) -> None:
    """The bits of the fixed tree, where that is the algorithm's order; in place, in the background, by a plan."""
    topology, entry = get_session(comm).topology, REGISTRY["reduce_scatter"].get(name)
    given = inputs(int(counts.sum()), 3)
    start = int(counts[:RANK].sum())
    want = fixed_tree(given, np.add)[start : start + counts[RANK]]
    is_fixed = entry is not None and entry.order(topology, params) is Order.FIXED
    check = np.testing.assert_array_equal if is_fixed else np.testing.assert_allclose
    how: Any = {"algorithm": name, **params}
    ones = np.ones(SIZE, int)
    if is_refused(hiercoll.reduce_scatterv, comm, np.ones(SIZE), np.empty(1), ones, **how):
        return

    def fresh() -> Array:
        return np.full(counts[RANK], np.nan)

    found = fresh()
    assert hiercoll.reduce_scatterv(comm, given[RANK], found, counts, **how) is found
    check(found, want)
    both = given[RANK].copy()
    hiercoll.reduce_scatterv(comm, MPI.IN_PLACE, both, counts, **how)
    check(both[: counts[RANK]], want)
    if entry is None or not entry.schedule(topology, RANK, params).shared:
        found = fresh()
        hiercoll.ireduce_scatterv(comm, given[RANK], found, counts, **how).wait()
        check(found, want)
    with hiercoll.reduce_scatterv_init(comm, given[RANK], found, counts, **how) as plan:
        plan()
        found[:] = np.nan
        plan()
    check(found, want)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("name", "params"), variants("reduce_scatter"))
def test_sums_in_a_wider_type_to_any_sizes(comm: MPI.Intracomm, name: str, params: Any, counts: Array) -> None:
    """The bits of the same algorithm on float32, rounded; in place, in the background, by a plan."""
    topology, entry = get_session(comm).topology, REGISTRY["reduce_scatter"].get(name)
    how: Any = {"algorithm": name, **params}
    if entry is not None and entry.refusal(topology, params) is not None:
        return
    for kind in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        given = np.random.default_rng(RANK).normal(0, 3, int(counts.sum())).astype(kind)
        sums = np.zeros(counts[RANK], "f4")
        hiercoll.reduce_scatterv(comm, given.astype("f4"), sums, counts, **how)
        want, found = sums.astype(kind).tobytes(), np.zeros(counts[RANK], kind)
        for _ in range(2):
            found[:] = 0
            hiercoll.reduce_scatterv(comm, given, found, counts, accumulate="float32", **how)
            assert found.tobytes() == want
        both = given.copy()
        hiercoll.reduce_scatterv(comm, MPI.IN_PLACE, both, counts, accumulate="float32", **how)
        assert both[: counts[RANK]].tobytes() == want
        if entry is None or not entry.schedule(topology, RANK, params).shared:
            found[:] = 0
            hiercoll.ireduce_scatterv(comm, given, found, counts, accumulate="float32", **how).wait()
            assert found.tobytes() == want
        with hiercoll.reduce_scatterv_init(comm, given, found, counts, accumulate="float32", **how) as plan:
            plan()
            found[:] = 0
            plan()
        assert found.tobytes() == want


def inputs(items: int, salt: int) -> list[Array]:
    """Of all ranks: numbers of which sums in other orders have other bits."""
    return [np.random.default_rng((salt, rank)).normal(0, 10.0**rank, items) for rank in range(SIZE)]


@pytest.mark.parametrize(("name", "params"), variants("reduce"))
def test_reduce(comm: MPI.Intracomm, name: str, params: Any) -> None:
    """The bits of the fixed tree, where that is the algorithm's order; on the root alone."""
    topology, entry = get_session(comm).topology, REGISTRY["reduce"].get(name)
    if is_refused(hiercoll.reduce, comm, np.ones(1), algorithm=name, **params):
        return
    for root in range(SIZE):
        for salt, items in enumerate((1, SIZE + 2, 300)):
            given = inputs(items, salt)
            want = fixed_tree(given, np.add)
            found = hiercoll.reduce(comm, given[RANK], root=root, algorithm=name, **params)
            kept = given[RANK].copy()
            own: Any = MPI.IN_PLACE if root == RANK else kept
            hiercoll.reduce(comm, own, kept if root == RANK else None, root=root, algorithm=name, **params)
            if root != RANK:
                assert found is None
                continue
            np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12 * 10.0**SIZE)
            np.testing.assert_allclose(kept, want, rtol=1e-12, atol=1e-12 * 10.0**SIZE)
            if entry is not None and entry.order(topology, entry.resolve(params)) is Order.FIXED:
                assert found.tobytes() == kept.tobytes() == want.tobytes()


@pytest.mark.parametrize(("name", "params"), variants("reduce_scatter"))
def test_reduce_scatter(comm: MPI.Intracomm, name: str, params: Any) -> None:
    """Rank j gets block j, in place too, or in a new array with the shape of a row."""
    topology, entry = get_session(comm).topology, REGISTRY["reduce_scatter"].get(name)
    if is_refused(hiercoll.reduce_scatter, comm, np.ones(SIZE), algorithm=name, **params):
        return
    for salt, items in enumerate((1, 3, 200)):
        given = inputs(items * SIZE, salt)
        want = fixed_tree(given, np.add)[RANK * items : (RANK + 1) * items]
        for _ in range(3):
            found = hiercoll.reduce_scatter(comm, given[RANK], algorithm=name, **params)
            np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12 * 10.0**SIZE)
        if entry is not None and entry.order(topology, entry.resolve(params)) is Order.FIXED:
            assert found.tobytes() == want.tobytes()
        rows = given[RANK].reshape(SIZE, 1, items)
        assert hiercoll.reduce_scatter(comm, rows, algorithm=name, **params).shape == (1, items)
        if entry is None or entry.in_place:
            kept = given[RANK].copy()
            hiercoll.reduce_scatter(comm, MPI.IN_PLACE, kept, algorithm=name, **params)
            np.testing.assert_allclose(kept[:items], want, rtol=1e-12, atol=1e-12 * 10.0**SIZE)


def test_drop_in(comm: MPI.Intracomm) -> None:
    """As mpi4py's: positional and named arguments, requests, plans; counted."""
    ours, calls = hiercoll.Intracomm(comm), dropin.Calls()
    hiercoll.configure(comm, table="model")
    dropin.observe(calls)
    try:
        for root in range(SIZE):
            for salt in range(3):
                _drop_in_round(ours, root, salt)
    finally:
        dropin.ignore(calls)
    assert SIZE == 1 or not any(name.endswith("native") for name in calls), calls
    assert sum(calls.values()) == 3 * SIZE * 10


def test_drop_in_with_any_sizes(comm: MPI.Intracomm) -> None:
    """As mpi4py's, counted; the choice for blocks of which only the root knows the sizes is native."""
    ours, calls, counts = hiercoll.Intracomm(comm), dropin.Calls(), np.arange(SIZE) + 1
    total = int(counts.sum())
    dropin.observe(calls)
    try:
        for root in range(SIZE):
            whole = np.zeros(total) if root == RANK else None
            recv: Any = [whole, counts] if root == RANK else None
            ours.Gatherv(np.full(RANK + 1, float(RANK)), recv, root)
            ours.Igatherv(np.full(RANK + 1, float(RANK)), recv, root=root).Wait()
            assert whole is None or (whole == np.repeat(np.arange(SIZE), counts)).all()
            own = np.zeros(RANK + 1)
            ours.Scatterv(recv, own, root=root)
            assert (own == RANK).all()
            for given in ((counts,), (counts.tolist(), MPI.SUM), ()):  # without counts those of recvbuf are asked for
                own[:] = -1
                ours.Reduce_scatter(np.ones(total), own, *given)
                assert (own == SIZE).all()
                ours.Ireduce_scatter(np.full(total, 2.0), own, *given).Wait()
                assert (own == 2 * SIZE).all()
    finally:
        dropin.ignore(calls)
    counted = Counter[str]()
    for name, number in calls.items():
        counted[name.removesuffix(", native")] += number
    assert counted == {
        "gatherv": SIZE, "igatherv": SIZE, "scatterv": SIZE, "reduce_scatterv": 3 * SIZE, "ireduce_scatterv": 3 * SIZE
    }  # fmt: skip


def _drop_in_round(ours: hiercoll.Intracomm, root: int, salt: int) -> None:
    every = np.array([block(rank, salt) for rank in range(SIZE)])
    whole, own = np.zeros_like(every) if root == RANK else None, np.zeros(ITEMS, int)
    ours.Gather(block(RANK, salt), whole, root)
    ours.Scatter(whole, own, root=root)
    np.testing.assert_array_equal(own, block(RANK, salt))
    ours.Igather(block(RANK, salt), whole, root=root).Wait()
    assert whole is None or (whole == every).all()
    total = np.zeros(ITEMS, int) if root == RANK else None
    ours.Reduce(block(RANK, salt), total, MPI.SUM, root)
    assert total is None or (total == every.sum(axis=0)).all()
    ours.Reduce(block(RANK, salt), total, op=MPI.MAX, root=root)
    assert total is None or (total == every.max(axis=0)).all()
    ours.Ireduce(block(RANK, salt), total, root=root).Wait()
    assert total is None or (total == every.sum(axis=0)).all()
    mine = np.zeros(ITEMS, int)
    ours.Reduce_scatter_block(every + RANK, mine)
    np.testing.assert_array_equal(mine, SIZE * every[RANK] + sum(range(SIZE)))
    ours.Ireduce_scatter_block(every + RANK, mine, MPI.MIN).Wait()
    np.testing.assert_array_equal(mine, every[RANK])
    ours.Iscatter(whole, own, root=root).Wait()
    request = ours.Scatter_init(whole, own, root=root)
    for _ in range(2):
        own[:] = -1
        request.Start()
        request.Wait()
        np.testing.assert_array_equal(own, block(RANK, salt))
    request.Free()


@several
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda comm: hiercoll.gather(comm, np.ones(3), root=SIZE), "root: expected a rank, a whole number from 0 to"),
        (lambda comm: hiercoll.scatter(comm, np.ones(3 * SIZE), None), "recvbuf"),
        (lambda comm: hiercoll.reduce(comm, np.ones(3), op=None), "op: expected an operation of MPI's"),
        (lambda comm: hiercoll.reduce_scatter(comm, np.ones(SIZE + 1)), "elements that [0-9]+ ranks divide"),
        (lambda comm: hiercoll.reduce_scatter(comm, np.ones(SIZE), np.ones(2)), "recvbuf: expected 8 bytes"),
        (lambda comm: hiercoll.reduce_scatterv(comm, np.ones(3), np.ones(1), 3), "recvcounts: expected [0-9]+ numbers"),
        (lambda comm: hiercoll.reduce_scatterv(comm, np.ones(3), np.ones(1), [1] * (SIZE + 1)), "recvcounts"),
        (lambda comm: hiercoll.reduce_scatterv(comm, np.ones(1), np.ones(1), [1] * SIZE), "sendbuf: expected [0-9]+ b"),
        (lambda comm: hiercoll.reduce_scatterv(comm, np.ones(SIZE), np.ones(2), [1] * SIZE), "recvbuf: expected 8 b"),
        (lambda comm: hiercoll.gatherv(comm, np.ones(1), [np.ones(2)], root=RANK), "recvbuf"),
        (
            lambda comm: hiercoll.gatherv(comm, np.ones(2), [np.ones(SIZE), [1] * SIZE], root=RANK),
            "8 bytes, as in recv",
        ),
        (
            lambda comm: hiercoll.scatterv(comm, [np.ones(1), [1] * SIZE], np.ones(1), root=RANK),
            "displacements that fit",
        ),
    ],
)
def test_what_is_refused(comm: MPI.Intracomm, call: Callable[[MPI.Intracomm], Any], message: str) -> None:
    """Before data move, on every rank by itself."""
    with pytest.raises(hiercoll.ArgumentError, match=message):
        call(comm)
    total = reduce(np.add, [np.full(2, float(rank)) for rank in range(SIZE)])
    np.testing.assert_array_equal(hiercoll.allreduce(comm, np.full(2, float(RANK))), total)
