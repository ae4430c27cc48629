"""Benchmarks, tuning and tables on device memory; plans with reductions; how many launches a copy is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import WORLD, layouts  # type: ignore[attr-defined]
from machines import RANK, SIZE, Machine, address_of, check
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY
from hiercoll.cli import main
from hiercoll.cuda.arrays import Producers
from hiercoll.cuda.device import copy_shape, reduction_shape
from hiercoll.cuda.memory import DeviceMemory
from hiercoll.errors import PlanError
from hiercoll.memory import BlockLayout, HostMemory, Memory, Reduction
from hiercoll.runtime import plan as executor
from hiercoll.runtime.addresses import NAMES, Addresses
from hiercoll.runtime.binding import Binding
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.native import mpi_library
from hiercoll.schedule import RECV, SEND, Get, Schedule
from hiercoll.schedule.lowering import lower
from hiercoll.schedule.transports import DIRECT, Transport
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


def addresses_of(comm: MPI.Intracomm, schedule: Schedule, memory: DeviceMemory, places: dict[Any, int]) -> Addresses:
    """As plans have them."""
    session = get_session(comm)
    own = {name: places[name] for name in NAMES if name in schedule.offered}
    wanted = [(op.peer, op.source.buffer) for op in schedule.ops if isinstance(op, Get)]
    least = partial(session.agreement.least, what="addresses")
    lanes = session.topology.lane_of
    return Addresses(RANK, lanes, session.node.size, memory, own, wanted, session.node.Allgather, least)


HOW = {"host": None, "direct": Transport(False, 0), "staged": Transport(False, 1), "peer": Transport(True, 1)}


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("way", HOW)
def test_plans_with_reductions(
    machine: Machine, on_layout: Callable[[str], MPI.Intracomm], way: str, layout: str
) -> None:
    """Plans of a schedule with reductions, on the host too, bound by hand: no call makes one yet."""
    why = machine.why_no_peers() if way == "peer" else machine.why_not_direct() if way == "direct" else ""
    if why:
        pytest.skip(why)
    transport, comm, how, items = HOW[way], on_layout(layout), Reduction(np.dtype("i4"), "sum"), 6
    topology = hiercoll.get_topology(comm)
    emit = partial(REGISTRY["allreduce"]["ring"].schedule, topology, params={}, inplace=False)
    schedule = (transport or DIRECT).schedule(emit, topology, RANK)
    memory: Memory = DeviceMemory(machine.device) if transport else HostMemory()
    values = np.arange(SIZE * items, dtype="i4") + RANK
    send, recv = (machine.put(v) if transport else v for v in (values.copy(), np.full_like(values, -1)))
    addresses = [address_of(array) if transport else array.ctypes.data for array in (send, recv)]
    (scratch, one), (host, two) = (
        memory.allocate(schedule.scratch * items * 4),
        memory.allocate_host(schedule.host * items * 4),
    )
    places: dict[Any, int] = dict(zip(("send", "recv", "scratch", "host"), (*addresses, scratch, host), strict=True))
    peers = None
    if transport and transport.peer:
        assert isinstance(memory, DeviceMemory)
        peers = addresses_of(comm, schedule, memory, places)
    block = BlockLayout(items * 4, 4, schedule.segments)
    binding = Binding(comm, topology.lane_of, memory, block, places, 0, peers=peers)
    plan = executor.plan_of(lower(schedule), replace(binding, reduction=how), "allreduce")
    if transport:
        plan.producers, plan.tell = Producers(None, (send, recv)), peers.tell if peers else None
    for salt in (0, 1):
        if transport:
            machine.fill(send, values + np.int32(salt))
        else:
            send += salt
        plan()
        expected = SIZE * (np.arange(SIZE * items) + salt) + SIZE * (SIZE - 1) // 2
        np.testing.assert_array_equal(machine.get(recv) if transport else recv, expected)
    plan.free()
    assert one is not None and two is not None
    if SIZE > 1:
        with pytest.raises(PlanError, match=r"Binding\.reduction"):
            executor.plan_of(lower(schedule), binding, "allreduce")


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
