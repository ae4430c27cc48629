"""Benchmarks, tuning and tables on device memory; plans with reductions; how many launches a copy is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import WORLD, layouts  # type: ignore[attr-defined]
from machines import RANK, SIZE, Machine, address_of, check
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY
from hiercoll.cli import main
from hiercoll.cuda.device import copy_shape, reduction_shape
from hiercoll.memory import BlockLayout, Reduction
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.native import mpi_library
from hiercoll.schedule import RECV, SEND, Get
from hiercoll.tables import Choice, Entry, Table, Variant, load
from hiercoll.tools.bench import Bench
from hiercoll.tools.measuring import Contest
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
    """The table's choice, with its transport, is what "auto" runs."""
    comm = on_layout(f"1x{SIZE}")
    chosen, topology = Variant("scatter_destination", {"window": 32}, "peer"), hiercoll.get_topology(comm)
    entry = Entry("alltoall", mpi_library(), "cuda", topology.node_sizes, topology.placement, (Choice(1, chosen),))
    hiercoll.configure(comm, table=Table((entry,)))
    check(machine, comm, "alltoall")
    plans = [plan for plan in get_session(comm).plans.values() if plan.schedule]
    gets = [op for plan in plans for op in plan.schedule.ops if isinstance(op, Get)]
    assert len(gets) == (SIZE - 1) * len(plans)


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


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("transport", ["direct", "staged", "staged:2", "peer"])
@pytest.mark.parametrize("algorithm", REGISTRY["allreduce"])
def test_tools_reductions(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], algorithm: str, transport: str, layout: str
) -> None:
    """Elements of a device are combined there, whatever way they go; vectors need not divide by the number of ranks."""
    why = machine.why_no_peers() if transport == "peer" else machine.why_not_direct() if transport == "direct" else ""
    if why:
        pytest.skip(why)
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


def test_tools_reductions_that_a_device_cannot_do(machine: Machine, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Typed errors, before data move."""
    comm = on_layout(f"1x{SIZE}")
    send, recv = machine.put(np.ones(6, "i4")), machine.put(np.full(6, -1, "i4"))
    with pytest.raises(hiercoll.BufferTypeError, match="op: expected SUM, PROD, MIN or MAX of plain numbers"):
        hiercoll.allreduce(comm, send, recv, op=MPI.BXOR)
    np.testing.assert_array_equal(machine.get(recv), -1)


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
