"""Barriers: whatever serves them, nobody leaves before the last rank has come."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll import CollectiveMismatch, ConstraintError, ParameterError
from hiercoll.algorithms import REGISTRY, Params, get_algorithm
from hiercoll.calls import dropin
from hiercoll.cli import main
from hiercoll.collectives import BARRIER
from hiercoll.runtime.lifetime import get_session
from hiercoll.schedule import Join, Schedule
from hiercoll.tables import load
from hiercoll.tools.bench import measured_events
from hiercoll.tools.report import Recorder
from hiercoll.topology import Topology
from hiercoll.tuning.policy import Wanted
from hiercoll.verify import verify

OnLayout = Callable[[str], MPI.Intracomm]
RANK, SIZE = WORLD.rank, WORLD.size
VARIANTS = [(name, params) for name, entry in REGISTRY["barrier"].items() for params in entry.variants()]
ALL = [*VARIANTS, ("auto", {}), ("native", {})]
IDS = [" ".join([name, *(f"{key}={value}" for key, value in params.items())]) for name, params in ALL]
every_algorithm = pytest.mark.parametrize(("name", "params"), ALL, ids=IDS)
several_ranks = pytest.mark.mpi(min_size=2)


def too_early(comm: MPI.Intracomm, call: Callable[[], object], seed: int = 0) -> int:
    """How many ranks left before the last one came, of all calls in which each rank in turn comes late. The clock is
    the host's, one for all ranks."""
    delays, found = random.Random(seed), 0
    for late in range(SIZE):
        seconds = delays.uniform(0.002, 0.01)
        WORLD.Barrier()
        if late == RANK:
            sleep(seconds)
        came = perf_counter()
        call()
        left = perf_counter()
        last = WORLD.allreduce(came, op=MPI.MAX)
        found += WORLD.allreduce(int(left < last))
    return found


@pytest.mark.parametrize("layout", layouts())
@every_algorithm
def test_nobody_leaves_before_all_have_come(on_layout: OnLayout, name: str, params: Params, layout: str) -> None:
    """Calls that are new and that are known, plans, calls in the background."""
    comm = on_layout(layout)
    for seed in range(2):
        assert too_early(comm, lambda: hiercoll.barrier(comm, algorithm=name, **params), seed) == 0
    plan = hiercoll.barrier_init(comm, algorithm=name, **params)
    assert plan() is None and too_early(comm, plan) == 0
    plan.free()
    if name != "hierarchical":
        assert too_early(comm, lambda: hiercoll.ibarrier(comm, algorithm=name, **params).wait()) == 0
    else:
        with pytest.raises(ConstraintError, match="shares no memory"):
            hiercoll.ibarrier(comm, algorithm=name)


@pytest.mark.parametrize("algorithm", ["native", *REGISTRY["barrier"]])
def test_many_in_a_row(on_layout: OnLayout, algorithm: str) -> None:
    """What a rank has written before a barrier all others see after it."""
    comm = on_layout(layouts()[-1])
    counts = MPI.Win.Allocate_shared(8 if RANK == 0 else 0, 8, comm=WORLD)
    memory = memoryview(counts.Shared_query(0)[0]).cast("q")
    for number in range(1, 200):
        if number % SIZE == RANK:
            memory[0] = number
        hiercoll.barrier(comm, algorithm=algorithm)
        assert memory[0] == number
        hiercoll.barrier(comm, algorithm=algorithm)
    counts.Free()


def without_last_round(schedule: Schedule) -> Schedule:
    ends = [index for index, op in enumerate(schedule.ops) if isinstance(op, Join)]
    return replace(schedule, ops=schedule.ops[: ends[-2] + 1])


@several_ranks
def test_a_round_that_is_missing_is_seen(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the proof, and by what these tests look at."""
    good = get_algorithm("barrier", "dissemination")

    def function(topology: Topology, rank: int, **params: Any) -> Schedule:
        return without_last_round(good.function(topology, rank, **params))

    hasty = good._replace(name="hasty", function=function)
    monkeypatch.setitem(REGISTRY["barrier"], "hasty", hasty)
    proof = verify(hasty.system(Topology((0,) * SIZE), {}))
    assert not proof.ok and proof.findings[0].kind == "contract"
    assert too_early(comm, lambda: hiercoll.barrier(comm, algorithm="hasty")) > 0


@several_ranks
@pytest.mark.parametrize("layout", layouts()[1:])
def test_drop_in(on_layout: OnLayout, calls: dropin.Calls, layout: str) -> None:
    """All forms, as hiercoll serves them; with what mpi4py does not take, its own error."""
    comm = hiercoll.Intracomm(on_layout(layout))
    hiercoll.configure(comm, table="model")
    assert too_early(comm, comm.Barrier) == 0 == too_early(comm, lambda: comm.Ibarrier().Wait())
    request = comm.Barrier_init()

    def again() -> None:
        request.Start()
        request.Wait()

    assert too_early(comm, again) == 0
    request.Free()
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        assert calls == {"barrier": SIZE, "ibarrier": SIZE, "barrier_init": 1}
    with pytest.raises(TypeError):
        comm.Barrier(1)


@several_ranks
def test_drop_in_leaves_it_to_mpi(comm: MPI.Intracomm, calls: dropin.Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is known to be faster."""
    monkeypatch.delenv("HIERCOLL_TABLE", raising=False)
    ours = hiercoll.Intracomm(comm)
    hiercoll.configure(ours, tune="off")
    assert too_early(ours, ours.Barrier) == 0
    assert calls == {"barrier, native": SIZE}


def test_wrong_arguments(comm: MPI.Intracomm) -> None:
    for call in (hiercoll.barrier, hiercoll.barrier_init, hiercoll.ibarrier):
        for wrong in ({"radix": 1}, {"radix": 2.0}, {"root": 0}):
            with pytest.raises(ParameterError):
                call(comm, algorithm="dissemination", **wrong)
    with pytest.raises(TypeError):
        hiercoll.barrier(comm, None)  # type: ignore[call-arg]


@several_ranks
def test_ranks_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIERCOLL_CHECK", "1")
    comm = WORLD.Dup()
    with pytest.raises(CollectiveMismatch, match="barrier"):
        hiercoll.barrier(comm, algorithm="native" if RANK else "dissemination")
    assert too_early(comm, lambda: hiercoll.barrier(comm, algorithm="dissemination")) == 0
    comm.Free()


@pytest.mark.ranks([3, 4])
def test_online(on_layout: OnLayout) -> None:
    """The program's own calls try candidates, and settle."""
    comm = on_layout(layouts()[-1])
    hiercoll.configure(comm, table="model", tune="online")
    policy = get_session(comm).policy
    for _ in range(1000):
        hiercoll.barrier(comm)
        if policy.is_settled:
            break
    assert policy.is_settled and policy.learner(Wanted(BARRIER, 0, False)) is not None
    assert too_early(comm, lambda: hiercoll.barrier(comm)) == 0


@several_ranks
def test_report(comm: MPI.Intracomm) -> None:
    """What there is to say of calls without data."""
    ours, recorder = hiercoll.Intracomm(comm), Recorder(sync=True, trace=True)
    hiercoll.configure(ours, table="model")
    recorder.install()
    for _ in range(3):
        ours.Barrier()
    recorder.remove()
    records = recorder.gather(WORLD)
    if records is not None:
        (record,) = records
        assert (record["collective"], record["calls"], record["bytes"]) == ("barrier", 3, 0)
        assert not record["left"]


@pytest.mark.ranks([4])
def test_commands(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """There is one size, 0, whatever is asked for; what tune finds is what "auto" takes; a traced run."""
    monkeypatch.setenv("HIERCOLL_NODES", "2x2")
    world = WORLD.Dup()
    for module in ("tune", "measure"):
        monkeypatch.setattr(f"hiercoll.cli.{module}.world", lambda: world)
    path = folder / "table.json"
    for command in (
        ["tune", "barrier", "--budget", "3s", "-o", str(path), "--sizes", "10,4K"],
        ["bench", "barrier", "--seconds", ".02", "--table", str(path)],
    ):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.output
        WORLD.Barrier()
    (entry,) = load(path).entries
    assert entry.collective == "barrier" and {figure.size for figure in entry.figures} == {0}
    hiercoll.configure(world, table=path)
    assert get_session(world).policy.decide(Wanted(BARRIER, 0, False)).variant == entry.choice(0)
    events = measured_events(world, "barrier", "hierarchical", {}, 0)
    assert RANK or events
    world.Free()
