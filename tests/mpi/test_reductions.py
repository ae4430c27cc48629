"""Reductions: results to the bit, in every order, by every algorithm and in every way to call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY
from hiercoll.calls import dropin
from hiercoll.collectives import Order, fixed_tree
from hiercoll.runtime import binding, operations, programs
from hiercoll.runtime.lifetime import get_session

RANK, SIZE = WORLD.rank, WORLD.size
ITEMS = (1, 2, SIZE, 2 * SIZE + 1, 1000)
Array = npt.NDArray[Any]
VARIANTS = [(name, params) for name, entry in REGISTRY["allreduce"].items() for params in entry.variants()]
several = pytest.mark.mpi(min_size=2)


@pytest.fixture(params=layouts())
def comm(request: pytest.FixtureRequest, on_layout: Callable[[str], MPI.Intracomm]) -> MPI.Intracomm:
    return on_layout(request.param)


def inputs(items: int, dtype: Any = "f4", salt: int = 0) -> list[Array]:
    """Of all ranks; numbers of which sums in other orders have other bits."""
    made = [np.random.default_rng((salt, rank)).normal(0, 10.0**rank, items) for rank in range(SIZE)]
    return [each.astype(dtype) for each in made]


def same_everywhere(comm: MPI.Intracomm, result: Array) -> bool:
    """Whether all ranks have the same bits."""
    return len(set(comm.allgather(result.tobytes()))) == 1


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=[f"{name} {params}" for name, params in VARIANTS])
def test_bits_of_every_algorithm(comm: MPI.Intracomm, name: str, params: dict[str, Any]) -> None:
    """Those of the fixed tree where that is the algorithm's order; the same on all ranks whatever it is."""
    topology, entry = get_session(comm).topology, REGISTRY["allreduce"][name]
    if entry.refusal(topology, params) is not None:
        return
    for salt, items in enumerate(ITEMS):
        given = inputs(items, salt=salt)
        fixed = fixed_tree(given, np.add)
        result = np.full(items, np.nan, "f4")
        for _ in range(3):
            result[:] = np.nan
            hiercoll.allreduce(comm, given[RANK], result, algorithm=name, **params)
            assert same_everywhere(comm, result)
            np.testing.assert_allclose(result, fixed, rtol=1e-5, atol=1e-5 * 10.0**SIZE)
            if entry.order(topology, params) is Order.FIXED:
                assert result.tobytes() == fixed.tobytes()
        in_place = given[RANK].copy()
        hiercoll.allreduce(comm, MPI.IN_PLACE, in_place, algorithm=name, **params)
        assert in_place.tobytes() == result.tobytes()


def _multiply(left: Any, right: Any, datatype: MPI.Datatype) -> None:
    """Of 2 x 2 matrices: it does not commute."""
    a, b = (np.frombuffer(each, "i8").reshape(-1, 2, 2) for each in (left, right))
    b[:] = a @ b


@pytest.fixture(scope="module")
def product() -> Any:
    made = MPI.Op.Create(_multiply, commute=False)
    yield made
    made.Free()


@pytest.fixture(scope="module")
def matrix() -> Any:
    made = MPI.INT64_T.Create_contiguous(4).Commit()
    yield made
    made.Free()


@pytest.mark.parametrize(("name", "params"), VARIANTS, ids=[f"{name} {params}" for name, params in VARIANTS])
def test_operations_that_do_not_commute(
    comm: MPI.Intracomm, name: str, params: dict[str, Any], product: Any, matrix: Any
) -> None:
    """In the order of ranks, or not at all."""
    topology, entry = get_session(comm).topology, REGISTRY["allreduce"][name]
    if entry.refusal(topology, params) is not None:
        return
    for items in (1, SIZE + 1):
        own = np.random.default_rng(RANK).integers(-9, 9, (items, 2, 2))
        result = np.zeros_like(own)
        call = (comm, [own, matrix], [result, matrix])
        if entry.order(topology, params) is Order.ANY:
            with pytest.raises(hiercoll.ConstraintError, match="expected order 'any', got order 'rank'"):
                hiercoll.allreduce(*call, op=product, algorithm=name, **params)
            continue
        want = np.broadcast_to(np.eye(2, dtype=int), own.shape)
        for each in comm.allgather(own):
            want = want @ each
        hiercoll.allreduce(*call, op=product, algorithm=name, **params)
        np.testing.assert_array_equal(result, want)


EXACT = [(op, dtype) for op in ("SUM", "PROD", "BXOR") for dtype in "bHiQ"]
EXACT += [(op, dtype) for op in ("MAX", "MIN") for dtype in "Bhlfdg"] + [("LXOR", "?"), ("LAND", "i"), ("BOR", "H")]


@pytest.mark.parametrize(("op", "dtype"), EXACT)
def test_operations_and_types(comm: MPI.Intracomm, op: str, dtype: str) -> None:
    """What is exact is what the MPI library makes of it, by whatever algorithm."""
    for algorithm in ("auto", "ring"):
        own = np.random.default_rng(RANK).integers(0, 7, 37).astype(dtype)
        want, result = np.zeros_like(own), np.zeros_like(own)
        MPI.COMM_WORLD.Allreduce(own, want, getattr(MPI, op))
        hiercoll.allreduce(comm, own, result, op=getattr(MPI, op), algorithm=algorithm)
        np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("kind", ["DOUBLE_INT", "FLOAT_INT", "TWOINT", "LONG_INT"])
def test_pairs(comm: MPI.Intracomm, kind: str) -> None:
    """A value and where it is, with a gap between elements of some types."""
    datatype = getattr(MPI, kind)
    value = {"DOUBLE_INT": "f8", "FLOAT_INT": "f4", "TWOINT": "i4", "LONG_INT": "i8"}[kind]
    pairs = np.zeros(SIZE + 2, np.dtype([("value", value), ("index", "i4")], align=True))
    pairs["value"], pairs["index"] = (np.arange(SIZE + 2) * 7 + RANK) % SIZE, RANK
    want, result = np.zeros_like(pairs), np.zeros_like(pairs)
    for op in (MPI.MAXLOC, MPI.MINLOC):
        MPI.COMM_WORLD.Allreduce([pairs, datatype], [want, datatype], op)
        hiercoll.allreduce(comm, [pairs, datatype], [result, datatype], op=op, algorithm="ring")
        for field in ("value", "index"):
            np.testing.assert_array_equal(result[field], want[field])


def ways_to_call(
    comm: MPI.Intracomm, own: Array, result: Array, op: MPI.Op, how: dict[str, Any]
) -> list[Callable[[], object]]:
    """All that put the reduction into ``result``; ``how``: the operation by name, or nothing."""
    ours, named = hiercoll.Intracomm(comm), {"algorithm": "ring", **how}
    return [
        lambda: hiercoll.allreduce(comm, own, result, **how),
        lambda: hiercoll.allreduce(comm, own, result, **named),
        lambda: hiercoll.iallreduce(comm, own, result, **how).wait(),
        lambda: hiercoll.iallreduce(comm, own, result, **named).wait(),
        lambda: ours.Allreduce(own, result, **how),
        lambda: ours.Allreduce(own, result, op),
        lambda: ours.Iallreduce(own, result, **how).Wait(),
    ]


def test_ways_to_call(comm: MPI.Intracomm) -> None:
    """Blocking, in the background, as a plan; by functions and drop-in; with the operation named or not."""
    ours = hiercoll.Intracomm(comm)
    hiercoll.configure(comm, table="model")
    for salt in range(4):
        own = inputs(50, "i8", salt)[RANK]
        want, result = np.zeros_like(own), np.zeros_like(own)
        for op, named in ((MPI.SUM, False), (MPI.MAX, True)):
            WORLD.Allreduce(own, want, op)
            how: dict[str, Any] = {"op": op} if named else {}
            with hiercoll.allreduce_init(comm, own, result, algorithm="ring", **how) as plan:
                for way in [*ways_to_call(comm, own, result, op, how), plan]:
                    for _ in range(2):
                        result[:] = -1
                        way()
                        np.testing.assert_array_equal(result, want)
            request = ours.Allreduce_init(own, result, **how)
            for _ in range(3):
                result[:] = -1
                request.Start()
                request.Wait()
                np.testing.assert_array_equal(result, want)
            request.Free()
        np.testing.assert_array_equal(hiercoll.allreduce(comm, own), sum(comm.allgather(own)))


@several
def test_drop_in_calls_run_here(comm: MPI.Intracomm) -> None:
    """And are counted, whether operations are named or not."""
    ours, calls = hiercoll.Intracomm(comm), dropin.Calls()
    hiercoll.configure(comm, table="model")
    own, result = np.full(9, RANK), np.zeros(9, int)
    dropin.observe(calls)
    try:
        for _ in range(3):
            ours.Allreduce(own, result)
            ours.Allreduce(own, result, op=MPI.MAX)
            ours.Allreduce(MPI.IN_PLACE, result, MPI.MIN)
            ours.Iallreduce(own, result).Wait()
    finally:
        dropin.ignore(calls)
    assert calls == {"allreduce": 9, "iallreduce": 3}


def test_fixed_order_is_the_same_for_all_sizes(comm: MPI.Intracomm) -> None:
    """An element has the same bits whatever is beside it, and whatever serves the call."""
    given = inputs(4000)
    want = fixed_tree(given, np.add)
    for items in (1, 7, 500, 4000):
        result = hiercoll.allreduce(comm, given[RANK][:items], order="fixed")
        assert result.tobytes() == want[:items].tobytes()
        own, result = given[RANK][:items].copy(), np.zeros(items, "f4")
        hiercoll.iallreduce(comm, own, result, order="fixed").wait()
        assert result.tobytes() == want[:items].tobytes()


@several
def test_one_tree_for_inexact_sums(comm: MPI.Intracomm) -> None:
    """By whatever table: blocking or not, in place or not, a communicator's calls give the same bits."""
    hiercoll.configure(comm, table="model")
    for items in (5, 3000):
        own = inputs(items)[RANK]
        bits = {hiercoll.allreduce(comm, own).tobytes() for _ in range(3)}
        in_place = own.copy()
        hiercoll.allreduce(comm, MPI.IN_PLACE, in_place)
        with hiercoll.allreduce_init(comm, own) as plan:
            bits |= {in_place.tobytes(), plan().tobytes(), hiercoll.iallreduce(comm, own).wait().tobytes()}
        assert len(bits) == 1


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (
            {"op": "sum"},
            hiercoll.ParameterError,
            "op: expected an operation of MPI's for reductions, such as MPI.SUM, got 'sum'",
        ),
        ({"op": MPI.OP_NULL}, hiercoll.ParameterError, "op: expected an operation of MPI's"),
        ({"op": MPI.REPLACE}, hiercoll.ParameterError, "op: expected an operation of MPI's .* got MPI.REPLACE"),
        ({"op": MPI.BAND}, hiercoll.BufferTypeError, "op: expected an operation that combines float64, got BAND"),
        ({"op": MPI.MAXLOC}, hiercoll.BufferTypeError, "op: expected an operation that combines float64, got MAXLOC"),
        ({"order": "best"}, hiercoll.ParameterError, "order: expected 'any' or 'rank' or 'fixed', or None, got 'best'"),
        ({"algorithm": "no"}, hiercoll.UnknownAlgorithmError, "expected auto, native, ring"),
    ],
)
def test_what_is_refused(comm: MPI.Intracomm, how: Any, error: type[Exception], message: str) -> None:
    """Before data move, on every rank by itself."""
    result = np.full(4, -1.0)
    with pytest.raises(error, match=message):
        hiercoll.allreduce(comm, np.ones(4), result, **how)
    assert (result == -1).all()
    assert (hiercoll.allreduce(comm, np.ones(4)) == SIZE).all()


@pytest.mark.parametrize("drops_in", [False, True])
def test_what_is_refused_is_the_programs_to_handle(comm: MPI.Intracomm, drops_in: bool) -> None:
    """Whatever it has asked for where there is no communicator."""
    seen: list[int] = []
    handler = MPI.Comm.Create_errhandler(lambda comm, error: seen.append(error))
    before = MPI.COMM_SELF.Get_errhandler(), WORLD.Get_errhandler()
    operations._go_together.cache_clear()
    try:
        MPI.COMM_SELF.Set_errhandler(handler)
        WORLD.Set_errhandler(MPI.ERRORS_ARE_FATAL)
        error: type[Exception] = MPI.Exception if drops_in else hiercoll.BufferTypeError
        reduce = hiercoll.Intracomm(comm).Allreduce if drops_in else partial(hiercoll.allreduce, comm)
        get_session(comm)
        with pytest.raises(error):
            reduce(np.ones(4), np.ones(4), op=MPI.BAND)
        assert not seen
        after = MPI.COMM_SELF.Get_errhandler(), WORLD.Get_errhandler()
        assert after == (handler, MPI.ERRORS_ARE_FATAL)
    finally:
        MPI.COMM_SELF.Set_errhandler(before[0])
        WORLD.Set_errhandler(before[1])
        handler.Free()


@several
def test_orders_that_cannot_be_had(comm: MPI.Intracomm) -> None:
    """Neither from the MPI library, which promises none, nor from an algorithm that has another."""
    for algorithm, expected in (("native", "order 'any'"), ("ring", "order 'any'")):
        with pytest.raises(hiercoll.ConstraintError, match=f"{algorithm}.*expected {expected}, got .*'fixed'"):
            hiercoll.allreduce(comm, np.ones(4), order="fixed", algorithm=algorithm)


@pytest.mark.parametrize("dtype", [np.dtype([("a", "i4")]), np.dtype("U3"), np.dtype(">f8"), object])
def test_elements_that_mpi_does_not_know(comm: MPI.Intracomm, dtype: Any) -> None:
    """Have no operation."""
    with pytest.raises(hiercoll.BufferTypeError):
        hiercoll.allreduce(comm, np.zeros(3, dtype))


def half_types() -> list[Any]:
    """NumPy's, and that of ml_dtypes."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 is a type of ml_dtypes")
    return [np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("name", ["auto", "native", "recursive_doubling", "all_pairs", "ring"])
def test_half_precision_is_rounded_once(comm: MPI.Intracomm, name: str) -> None:
    """What single precision makes of it, to the bit where the order is known; in place, by plans, on a root."""
    for kind in half_types():
        given = [np.random.default_rng(rank).normal(1, 1, SIZE * 9).astype(kind) for rank in range(SIZE)]
        want = fixed_tree([each.astype("f4") for each in given], np.add)
        bits = name in ("recursive_doubling", "all_pairs") or SIZE == 1

        def check(found: Array, want: Array = want, bits: bool = bits) -> None:
            if bits:
                assert found.tobytes() == want.astype(found.dtype).tobytes()
            np.testing.assert_allclose(found.astype("f4"), want, rtol=1e-2, atol=1e-3)

        how: Any = {"accumulate": "float32", "algorithm": name}
        for _ in range(3):
            found = hiercoll.allreduce(comm, given[RANK], **how)
            assert found.dtype == kind
            check(found)
            both = given[RANK].copy()
            assert hiercoll.allreduce(comm, MPI.IN_PLACE, both, **how) is both
            check(both)
        hiercoll.iallreduce(comm, given[RANK], both, **how).wait()
        check(both)
        with hiercoll.allreduce_init(comm, given[RANK], both, **how) as plan:
            plan()
            both[:] = 0
            plan()
        check(both)
        root = SIZE - 1
        total = hiercoll.reduce(comm, given[RANK], root=root, accumulate="float32")
        assert (total is None) == (root != RANK)
        if total is not None:
            check(total, bits=False)
        part = hiercoll.reduce_scatter(comm, given[RANK], accumulate="float32", algorithm="direct")
        check(part, want[9 * RANK : 9 * RANK + 9], bits=True)


WAYS = [
    (collective, name, params)
    for collective in ("allreduce", "reduce", "reduce_scatter")
    for name, entry in REGISTRY[collective].items()
    for params in entry.variants()
] + [(collective, "native", {}) for collective in ("allreduce", "reduce", "reduce_scatter")]


def name_of(way: Any) -> str:
    return " ".join(map(str, way))


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_accumulated_bits_of_every_algorithm(comm: MPI.Intracomm, way: Any) -> None:
    """Those of the same algorithm on float32, rounded: in place or not, called once or again, on buffers that move."""
    collective, name, params = way
    entry = REGISTRY[collective].get(name)
    if entry is not None and entry.refusal(get_session(comm).topology, params) is not None:
        return
    function, root = getattr(hiercoll, collective), SIZE // 2
    how: Any = {"algorithm": name, **params, **({"root": root} if collective == "reduce" else {})}
    has_result = collective != "reduce" or root == RANK
    for kind in half_types():
        for items in (1, 2 * SIZE + 1, 600):
            shape = (SIZE, items) if collective == "reduce_scatter" else (items,)
            given = np.random.default_rng(RANK).normal(0, 10.0 ** (RANK % 4), shape).astype(kind)  # within float16
            want = function(comm, given.astype("f4"), np.zeros(shape[-1], "f4"), **how)
            for turn in range(3):
                result = np.full(shape[-1], np.nan, kind)
                found = function(comm, given.copy(), result, accumulate="float32", **how)
                assert (found is result) == has_result
                if has_result:
                    assert result.tobytes() == want.astype(kind).tobytes(), (items, turn)
                else:
                    assert np.isnan(result.astype("f4")).all()
            if entry is not None and collective != "reduce" and not entry.in_place:
                continue
            both = given.copy()
            ends = (MPI.IN_PLACE, both) if has_result else (both, None)
            function(comm, *ends, accumulate="float32", **how)
            if has_result:
                assert both.reshape(-1)[: shape[-1]].tobytes() == want.astype(kind).tobytes()
            else:
                assert both.tobytes() == given.tobytes()


@pytest.mark.parametrize("kind", range(2), ids=["float16", "bfloat16"])
def test_every_number_of_two_bytes(comm: MPI.Intracomm, kind: int) -> None:
    """All of them are widened, and come back as they were; sums are rounded as NumPy rounds them."""
    dtype = half_types()[kind]
    every = np.arange(1 << 16, dtype="u2")
    numbers = every.view(dtype)
    is_number = ~np.isnan(numbers.astype("f4"))
    found = hiercoll.allreduce(comm, numbers, op=MPI.MAX, accumulate="float32", algorithm="all_pairs")
    assert (found.view("u2") == every)[is_number].all() and np.isnan(found[~is_number].astype("f4")).all()
    shuffled = [np.random.default_rng(rank).permutation(every[is_number]).view(dtype) for rank in range(SIZE)]
    with np.errstate(all="ignore"):
        sums = fixed_tree([each.astype("f4") for each in shuffled], np.add)
        want = sums.astype(dtype)
    found = hiercoll.allreduce(comm, shuffled[RANK], accumulate="float32", algorithm="all_pairs")
    same = found.view("u2") == want.view("u2")
    assert (same | (np.isnan(sums) & np.isnan(found.astype("f4")))).all()


@pytest.mark.parametrize("kind", ["i4", "f8", "c8", "V2", ">f2"])
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter", "reduce_scatterv"])
def test_elements_that_are_no_halves(comm: MPI.Intracomm, collective: str, kind: Any) -> None:
    """Refused in every form, before data move; and so is what is no name of a type."""
    send, recv = np.zeros(3 * SIZE, kind), np.zeros(3 * SIZE if collective[-6:] == "reduce" else 3, kind)
    counts = ([3] * SIZE,) if collective.endswith("v") else ()
    before = recv.tobytes()
    for name in (collective, f"i{collective}", f"{collective}_init"):
        call = getattr(hiercoll, name)
        with pytest.raises(hiercoll.BufferTypeError):
            call(comm, send, recv, *counts, accumulate="float32")
        for wrong in ("float64", 32, np.float32, True, ["float32"], b"float32"):
            halves = np.zeros(3 * SIZE, "f2")
            with pytest.raises(hiercoll.ParameterError, match="accumulate: expected 'float32' or None"):
                call(comm, halves, np.zeros(recv.shape, "f2"), *counts, accumulate=wrong)
    assert recv.tobytes() == before


def test_auto_asks_for_what_accumulates(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of elements of single precision, so many bytes of which travel."""
    policy, asked = get_session(comm).policy, list[tuple[int, bool]]()
    select = policy.select

    def selecting(wanted: Any, *how: Any) -> Any:
        asked.append((wanted.size, wanted.combining.accumulates))
        return select(wanted, *how)

    monkeypatch.setattr(policy, "select", selecting)
    hiercoll.allreduce(comm, np.ones(100, "f2"), accumulate="float32")
    hiercoll.allreduce(comm, np.ones(100, "f4"))
    assert asked == [(400, True), (400, False)]


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each message that either engine prepares, sent or received."""
    found: list[int] = []
    in_words, in_python = programs.LaidOut.message, binding.message

    def words(self: Any, op: Any) -> Any:
        made: Any = in_words(self, op)
        found.append(made[3])
        return made

    def spec(*given: Any) -> Any:
        made = in_python(*given)
        found.append(made[1])
        return made

    monkeypatch.setattr(programs.LaidOut, "message", words)
    monkeypatch.setattr(binding, "message", spec)
    return found


@several
@pytest.mark.parametrize(
    ("collective", "name", "sums"),
    [
        ("allreduce", "all_pairs", 0),
        ("reduce_scatter", "direct", 0),
        ("reduce_scatter", "pairwise", 0),
        ("reduce_scatter", "ring", SIZE - 2),
    ],
)
def test_bytes_of_accumulated_messages(
    comm: MPI.Intracomm, handed_over: list[int], collective: str, name: str, sums: int
) -> None:
    """Contributions and results have two bytes an element, partial sums four."""
    is_whole = collective == "allreduce"
    send, recv = np.ones(12 * SIZE, "f2"), np.zeros(12 * SIZE if is_whole else 12, "f2")
    how: Any = {"algorithm": name, "accumulate": "float32"}
    with getattr(hiercoll, f"{collective}_init")(comm, send, recv, **how) as plan:
        plan()
    np.testing.assert_array_equal(recv, SIZE)
    blocks = (SIZE - 1) * (2 if is_whole else 1)
    assert sum(handed_over) == 2 * 12 * (2 * (blocks - sums) + 4 * sums)  # sent and received


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"accumulate": "float64"}, "accumulate: expected 'float32' or None"),
        ({"accumulate": "float32"}, "accumulate: expected arrays of float16 or bfloat16"),
    ],
)
def test_what_cannot_be_widened(comm: MPI.Intracomm, how: Any, message: str) -> None:
    """Other types, and others to combine them in."""
    with pytest.raises(hiercoll.ArgumentError, match=message):
        hiercoll.allreduce(comm, np.ones(3), **how)
    with pytest.raises(hiercoll.ArgumentError, match="accumulate: expected"):
        hiercoll.allreduce(comm, np.ones(3, ">f2" if how["accumulate"] == "float32" else "f2"), **how)


def _add(left: MPI.buffer, right: MPI.buffer, datatype: MPI.Datatype) -> None:
    """Of every int32, or of those between which gaps of as many bytes lie."""
    step = 1 + (datatype.size < datatype.extent)
    ours, theirs = (np.frombuffer(each, np.int32) for each in (left, right))
    theirs[::step] += ours[::step]


@pytest.fixture
def added() -> Iterator[MPI.Op]:
    op = MPI.Op.Create(_add, commute=True)
    yield op
    op.Free()


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "native"])
@pytest.mark.parametrize("form", ["allreduce_init", "iallreduce"])
def test_datatypes_that_are_freed_before_the_call_is_over(
    comm: MPI.Intracomm, added: MPI.Op, algorithm: str, form: str
) -> None:
    """Whose handles are another one's then (MPI 4.1, 5.1.9)."""
    send, recv = np.arange(8, dtype=np.int32), np.full(8, -1, np.int32)
    pair = MPI.INT32_T.Create_contiguous(2).Commit()
    call = getattr(hiercoll, form)(comm, [send, 4, pair], [recv, 4, pair], op=added, algorithm=algorithm)
    pair.Free()
    other = MPI.INT32_T.Create_vector(1, 1, 1).Commit()
    for _ in range(2 if form == "allreduce_init" else 1):
        if form == "allreduce_init":
            recv.fill(-1)
            call()
        else:
            call.wait()
        np.testing.assert_array_equal(recv, SIZE * send)
    if form == "allreduce_init":
        call.free()
    other.Free()


@pytest.mark.parametrize("how", [{"order": "fixed"}, {"algorithm": "ring"}, {"algorithm": "native"}])
def test_what_lies_between_elements_stays(comm: MPI.Intracomm, added: MPI.Op, how: dict[str, str]) -> None:
    """Of a datatype with gaps no byte is written that is none of its own (MPI 4.1, 5.1.1)."""
    kind = MPI.INT32_T.Create_resized(0, 8).Commit()
    send, expected = np.full((SIZE, 4, 2), 1, np.int32), np.full((4, 2), -1, np.int32)
    send[..., 1], expected[:, 0] = 7777 + RANK, SIZE
    one = [send[0], 4, kind]

    def result(of: int = -1) -> tuple[Array, list[Any]]:
        made = np.full((4, 2), -1, np.int32)
        made[:, 0] = of
        return made, [made, 4, kind]

    for _ in range(3):  # new, kept, known
        recv, spec = result()
        hiercoll.allreduce(comm, one, spec, op=added, **how)
        np.testing.assert_array_equal(recv, expected)
    recv, spec = result(1)
    hiercoll.allreduce(comm, MPI.IN_PLACE, spec, op=added, **how)
    np.testing.assert_array_equal(recv, expected)
    recv, spec = result()
    hiercoll.iallreduce(comm, one, spec, op=added, **how).wait()
    np.testing.assert_array_equal(recv, expected)
    recv, spec = result()
    with hiercoll.allreduce_init(comm, one, spec, op=added, **how) as plan:
        for factor in (1, 2):
            send[..., 0] = factor
            plan()
            np.testing.assert_array_equal(recv, expected * [factor, 1])
    send[..., 0] = 1
    if "algorithm" in how and how["algorithm"] == "ring":
        how = {}
    recv, spec = result()
    hiercoll.reduce(comm, one, spec if RANK == 0 else None, op=added, **how)
    np.testing.assert_array_equal(recv, expected if RANK == 0 else np.full((4, 2), -1))
    recv, spec = result()
    hiercoll.reduce_scatter(comm, [send, 4, kind], spec, op=added, **how)
    np.testing.assert_array_equal(recv, expected)
    kind.Free()
