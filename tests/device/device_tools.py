"""Benchmarks, tuning and tables on device memory; plans with reductions; how many launches a copy is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import WORLD, layouts  # type: ignore[attr-defined]
from machines import BEFORE, BLOCK, RANK, SIZE, Machine, address_of, check, telling
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY
from hiercoll.cli import main
from hiercoll.cuda.arrays import Producers
from hiercoll.cuda.device import copy_shape, reduction_shape
from hiercoll.cuda.memory import DeviceMemory
from hiercoll.memory import SINGLE, BlockLayout, Reduction, Transfer, WideLayout
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.schedule import RECV, SCRATCH, SEND, Get
from hiercoll.tables import Choice, Entry, Table, Variant, load
from hiercoll.tools.bench import Bench
from hiercoll.tools.measuring import Contest
from hiercoll.tools.workload import buffers
from hiercoll.tuning.search import Search


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.usefixtures("peers")
def test_tools_bench_and_search(machine: Machine, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Benchmarks, and the search with every transport."""
    bench = Bench(on_layout(f"1x{SIZE}"), seconds=0.05, arrays=machine)
    subjects = [Variant("native"), Variant("scatter_destination"), Variant("bruck", {}, "staged:2")]
    results = list(bench.run("alltoall", subjects, [64, 1000]))
    assert [result.name for result in results[:3]] == ["native", "scatter_destination", "bruck staged:2"]
    transports = bench.transports()
    assert ("peer" in transports) == (SIZE > 1)
    tried: set[str] = set()

    def opened(collective: str, size: int, field: Sequence[Variant]) -> Contest:
        tried.update(variant.transport for variant in field)
        return bench.open(collective, size, field)

    Search("alltoall", bench.topology, opened, bench.clock, 1.0, bench.links(), transports=transports).run([256])
    assert tried >= {transport for transport in transports if SIZE > 1 or transport in ("auto", "staged")}


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.usefixtures("peers")
def test_tools_tables_with_transports(machine: Machine, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """The table's choice, with its transport, is what "auto" runs; in the background without it, which cannot be."""
    comm = on_layout(f"1x{SIZE}")
    chosen, topology = Variant("scatter_destination", {"window": 32}, "peer"), hiercoll.get_topology(comm)
    entry = Entry("alltoall", mpi_library(), "cuda", topology.node_sizes, topology.placement, (Choice(1, chosen),))
    hiercoll.configure(comm, table=Table((entry,)))
    check(machine, comm, "alltoall")
    plans = [plan for plan in get_session(comm).plans.values() if plan.schedule]
    gets = [op for plan in plans for op in plan.schedule.ops if isinstance(op, Get)]
    assert len(gets) == (SIZE - 1) * len(plans)
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    np.testing.assert_array_equal(
        machine.get(hiercoll.ialltoall(comm, machine.put(values)).wait()).reshape(-1), expected
    )


@pytest.mark.ranks([2, 3, 4])
@pytest.mark.parametrize("can_map", [True, False])
def test_tools_auto_learns(machine: Machine, on_layout: Callable[[str], MPI.Intracomm], can_map: bool) -> None:
    """Gets are tried where ranks can map each other's memory. Arrays that they cannot map are served another way, and
    nobody is warned of what he has not asked for."""
    comm = on_layout(f"1x{SIZE}")
    hiercoll.configure(comm, table=Table(), tune="online")
    policy = get_session(comm).policy
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    with nullcontext() if can_map else machine.private():
        send, recv = machine.empty(values.shape), machine.empty(expected.shape)
    with telling() as told:
        for salt in range(1000):
            if salt >= 400 and policy.is_settled:
                break
            machine.fill(recv, np.full_like(expected, BEFORE))
            machine.fill(send, values + np.uint8(salt % 50))
            hiercoll.alltoall(comm, send, recv)
            np.testing.assert_array_equal(machine.get(recv), expected + np.uint8(salt % 50))
    (offered,) = policy._offers.values()
    assert policy.is_settled and not told
    assert ("peer" in {each.transport for each in offered}) == (not machine.why_no_peers())
    ran = {type(op) for plan in get_session(comm).plans.values() if plan.schedule for op in plan.schedule.ops}
    assert (Get in ran) == (can_map and not machine.why_no_peers())
    found = policy.known_learner(next(iter(policy._offers)))
    assert found is not None and found.finding is not None
    assert found.tally[0] >= 0  # calls that are known ask again, too, when it is time to
    assert can_map or found.finding.variant.transport == "auto"


@pytest.mark.ranks([2, 4])
@pytest.mark.usefixtures("peers")
def test_tools_bench_and_tune_commands(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """``--memory cuda``: times of every transport, and a table that calls of the device then follow."""
    comm, path = on_layout(f"1x{SIZE}"), folder / "table.json"
    for module in ("tune", "measure"):
        monkeypatch.setattr(f"hiercoll.cli.{module}.world", lambda: comm)
    machine.serve_commands(monkeypatch)
    words = ["--transport", "staged", "--transport", "peer", "-a", "scatter_destination", "--seconds", ".05"]
    told = []
    for command in (["bench", "alltoall", *words], ["tune", "alltoall", "--budget", "3s", "-o", str(path)]):
        done = CliRunner().invoke(main, [*command, "--memory", "cuda", "--sizes", "256,32K"])
        WORLD.Barrier()  # the table is there
        assert done.exit_code == 0, done.output
        told.append(done.output)
    (entry,) = load(path).entries
    assert entry.memory == "cuda" and {256, 32768} <= {figure.size for figure in entry.figures}
    hiercoll.configure(comm, table=path)
    check(machine, comm, "alltoall", 256)
    check(machine, comm, "alltoall", 32768)
    assert RANK or {"staged", "peer"} <= set(told[0].split())


def skip_without(machine: Machine, transport: str) -> None:
    """Skip a test where device memory cannot travel so."""
    why = machine.why_no_peers() if transport == "peer" else machine.why_not_direct() if transport == "direct" else ""
    if why:
        pytest.skip(why)


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("transport", ["direct", "staged", "staged:2", "peer"])
@pytest.mark.parametrize("algorithm", REGISTRY["allreduce"])
def test_tools_reductions(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], algorithm: str, transport: str, layout: str
) -> None:
    """Elements of a device are combined there, whatever way they go; vectors need not divide by the number of ranks."""
    skip_without(machine, transport)
    comm = on_layout(layout)
    topology = hiercoll.get_topology(comm)
    if REGISTRY["allreduce"][algorithm].refusal(topology, {}) is not None:
        return
    for items, op, numpy_op in ((6 * SIZE, MPI.SUM, np.add), (6 * SIZE, MPI.MAX, np.maximum), (601, MPI.SUM, np.add)):
        values = [np.arange(items, dtype="i4") * (1 + rank) for rank in range(SIZE)]
        want = reduce(numpy_op, values)
        send, recv = machine.put(values[RANK]), machine.put(np.full(items, -1, "i4"))
        for salt in (0, 1):
            machine.fill(send, values[RANK] + np.int32(salt))
            has_flags = algorithm == "hierarchical" and max(topology.node_sizes) > 1
            if transport == "staged:2" and (has_flags or algorithm == "double_tree"):
                with pytest.raises(hiercoll.ConstraintError, match="without segments and flags"):
                    hiercoll.allreduce(comm, send, recv, algorithm=algorithm, transport=transport)
                return
            hiercoll.allreduce(comm, send, recv, op=op, algorithm=algorithm, transport=transport)
            expected = want + (SIZE * salt if op == MPI.SUM else salt)
            np.testing.assert_array_equal(machine.get(recv), expected)


HALF = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


class OfHalf:
    """An array of numbers of half precision, made as one of words of two bytes: not all libraries have bfloat16."""

    def __init__(self, machine: Machine, values: np.ndarray[Any, Any]) -> None:
        self.machine, self.dtype = machine, values.dtype
        self.words = machine.put(values.view("u2"))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr = "<f2"  # as PyTorch says of both
        return {**self.words.__cuda_array_interface__, "typestr": typestr}

    def fill(self, values: np.ndarray[Any, Any]) -> None:
        self.machine.fill(self.words, values.view("u2"))

    def words_of(self) -> np.ndarray[Any, Any]:
        return self.machine.get(self.words)


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("transport", ["direct", "staged", "staged:2", "peer"])
@pytest.mark.parametrize("algorithm", [*REGISTRY["allreduce"], "native"])
def test_tools_sums_in_a_wider_type(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], algorithm: str, transport: str, layout: str
) -> None:
    """The same bits as of arrays on the host, whatever way messages go; vectors need not divide."""
    skip_without(machine, transport)
    comm = on_layout(layout)
    entry, topology = REGISTRY["allreduce"].get(algorithm), hiercoll.get_topology(comm)
    if entry is not None and entry.refusal(topology, {}) is not None:
        return
    has_flags = algorithm == "hierarchical" and max(topology.node_sizes) > 1
    if transport == "staged:2" and (has_flags or algorithm == "double_tree"):
        return  # as without a wider type
    how: dict[str, Any] = {"algorithm": algorithm, "accumulate": "float32"}
    for kind in HALF:
        for items in (6 * SIZE, 601):
            send, recv = (OfHalf(machine, np.zeros(items, kind)) for _ in range(2))
            for turn in (0, 1):
                values = np.random.default_rng(2 * RANK + turn).normal(0, 3, items).astype(kind)
                want = hiercoll.allreduce(comm, values, **how)
                send.fill(values)
                hiercoll.allreduce(comm, send, recv, transport=transport, **how)
                np.testing.assert_array_equal(recv.words_of(), want.view("u2"))


@pytest.mark.parametrize("collective", ["reduce", "reduce_scatter"])
def test_tools_sums_in_a_wider_type_of_every_form(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], transport: str, collective: str
) -> None:
    """Called, held, in the background, in place; reduced to one rank, and to each."""
    comm, root = on_layout(f"1x{SIZE}"), SIZE - 1
    to_one, items = {"root": root} if collective == "reduce" else {}, 60
    given, has_result = (items,) if to_one else (SIZE, items), not to_one or root == RANK
    for kind in HALF:
        values = np.random.default_rng(RANK).normal(0, 3, given).astype(kind)
        want = np.zeros(items, kind)
        algorithm = "binomial" if to_one else "direct"
        how: dict[str, Any] = {"algorithm": algorithm, "accumulate": "float32", **to_one}
        getattr(hiercoll, collective)(comm, values, want, **how)
        send = OfHalf(machine, values)

        def check(call: Callable[[OfHalf], object], kind: np.dtype[Any] = kind, want: Any = want) -> None:
            recv = OfHalf(machine, np.zeros(items, kind))
            call(recv)
            if has_result:
                np.testing.assert_array_equal(recv.words_of(), want.view("u2"))

        def held(recv: OfHalf, send: OfHalf = send, how: Any = how) -> None:
            init = getattr(hiercoll, f"{collective}_init")
            with init(comm, send, recv, transport=transport, **how) as plan:
                plan()
                plan()

        check(
            lambda recv, send=send, how=how: getattr(hiercoll, collective)(comm, send, recv, transport=transport, **how)
        )
        check(held)
        check(lambda recv, send=send, how=how: getattr(hiercoll, f"i{collective}")(comm, send, recv, **how).wait())
        if not to_one:
            getattr(hiercoll, collective)(comm, MPI.IN_PLACE, send, transport=transport, **how)
            np.testing.assert_array_equal(send.words_of().reshape(-1)[:items], want.view("u2"))


def test_tools_reductions_that_a_device_cannot_do(machine: Machine, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Typed errors, before data move."""
    comm = on_layout(f"1x{SIZE}")
    send, recv = machine.put(np.ones(6, "i4")), machine.put(np.full(6, -1, "i4"))
    with pytest.raises(hiercoll.BufferTypeError, match="op: expected SUM, PROD, MIN or MAX of plain numbers"):
        hiercoll.allreduce(comm, send, recv, op=MPI.BXOR)
    np.testing.assert_array_equal(machine.get(recv), -1)
    half, into = (OfHalf(machine, np.ones(6, "f2")) for _ in range(2))
    with pytest.raises(hiercoll.BufferTypeError, match="op: expected an operation that combines float32"):
        hiercoll.allreduce(comm, half, into, op=MPI.LAND, accumulate="float32")
    with pytest.raises(hiercoll.BufferTypeError, match="accumulate: expected arrays of float16 or bfloat16, got int32"):
        hiercoll.allreduce(comm, send, recv, accumulate="float32")
    with pytest.raises(hiercoll.ParameterError, match="accumulate: expected 'float32' or None, got 'float64'"):
        hiercoll.allreduce(comm, half, into, accumulate="float64")
    np.testing.assert_array_equal(into.words_of(), np.ones(6, "f2").view("u2"))


SCATTERED = [7, 0, 3, 5]
REGIONS = {
    "one piece": (SEND[0:9], RECV[0:9]),
    "evenly spaced": (SEND[0:9:2], RECV[0:5]),
    "packed": (SEND[SCATTERED], RECV[0:4]),
    "unpacked": (SEND[0:4], RECV[SCATTERED]),
}


@pytest.mark.ranks([1])
@pytest.mark.parametrize("regions", REGIONS)
def test_kernel_or_copy_is_one_launch(machine: Machine, regions: str) -> None:
    """However many pieces, and of whatever size."""
    source, target = REGIONS[regions]
    for block in (3, 1000, 300_001):
        send, recv = machine.empty(9 * block), machine.empty(9 * block)
        shape = copy_shape(BlockLayout(block), (address_of(send), source), (address_of(recv), target))
        assert shape is not None
        assert machine.launches(machine.device.prepare(shape)) == 1


@pytest.mark.ranks([1])
def test_kernel_of_a_reduction_is_one_launch(machine: Machine) -> None:
    """Of blocks in any order."""
    send, recv, how = machine.empty(90, "i4"), machine.empty(90, "i4"), Reduction(np.dtype("i4"), "sum")
    ends = [(address_of(send), SEND[SCATTERED]), (address_of(recv), RECV[0:4])]
    shape = reduction_shape(BlockLayout(40, 4), how, ends[0], ends[1], ends[1])
    assert shape is not None
    assert machine.launches(machine.device.prepare(shape)) == 1


@pytest.mark.ranks([1])
@pytest.mark.parametrize("kind", HALF, ids=str)
def test_kernel_converts_every_number(machine: Machine, kind: np.dtype[Any]) -> None:
    """To single precision and back, and what lies in between: the bits that the host makes; blocks in any order, in one
    launch."""
    numbers = np.arange(1 << 16, dtype="u2").reshape(16, -1)
    order, block = [5, 0, 3, 15, 1, *range(6, 12)], numbers[0].nbytes
    layout, memory = WideLayout(BlockLayout(block), kind), DeviceMemory(machine.device)
    with np.errstate(all="ignore"):
        wide = numbers.view(kind).astype(SINGLE)
        between = np.nextafter(wide, np.random.default_rng(1).normal(0, 1e30, wide.shape).astype(SINGLE))
        halves = (wide.view("u4") + (0x1000 if kind == np.float16 else 0x8000)).view(SINGLE)
        for values in (wide, between, halves):
            send, recv = machine.put(numbers), machine.put(np.zeros(wide.shape, SINGLE))
            given, back = machine.put(values), machine.put(np.zeros_like(numbers))
            widened = memory.copy(layout, (address_of(send), SEND[order]), (address_of(recv), SCRATCH[order]))
            rounded = memory.copy(layout, (address_of(given), SCRATCH[order]), (address_of(back), RECV[order]))
            memory.before_messages(Producers(arrays=(send, recv, given, back)).streams(), True)
            for made in (widened, rounded):
                assert isinstance(made, Transfer)
                made.start()
                made.wait()
            found, were = machine.get(recv)[order], wide[order]
            assert (found.view("u4") == were.view("u4"))[~np.isnan(were)].all() and np.isnan(
                found[np.isnan(were)]
            ).all()
            found, want = machine.get(back)[order], values.astype(kind)[order].view("u2")
            is_number = ~np.isnan(values[order])
            assert (found == want)[is_number].all() and np.isnan(found.view(kind).astype(SINGLE)[~is_number]).all()
    ends = (address_of(send), SEND[order]), (address_of(recv), SCRATCH[order])
    shape = copy_shape(layout, *ends)
    assert shape is not None and machine.launches(machine.device.prepare(shape)) == 1
