"""What is native is the user's blocking call, on the user's communicator; counted by a communicator that stands in."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HAS_PERSISTENT, WORLD
from mpi4py import MPI
from test_algorithms import filled, native

import hiercoll
from hiercoll import topology
from hiercoll.collectives import COLLECTIVES, Collective, Holds, InPlace, Sizes, get_collective
from hiercoll.errors import DeviceError, HiercollError
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.session import from_root
from hiercoll.tables import (
    COLD,
    NATIVE_VARIANT,
    PLAN,
    ROW,
    SINGLE,
    TIMINGS,
    Choice,
    Entry,
    Figure,
    Table,
    Variant,
    dump,
)
from hiercoll.tools.bench import CONTROL_VARIANT, Bench, provenance, record
from hiercoll.tools.measuring import Contest, DataError, arrays_of
from hiercoll.tuning.policy import Wanted
from hiercoll.tuning.search import NONBLOCKING, PERSISTENT, Search

SIZE = WORLD.size
SCRIPTS = Path(__file__).parents[2] / "scripts"
EVEN = ("alltoall", "allgather")
each_collective = pytest.mark.parametrize("collective", [*EVEN, "alltoallv", "allgatherv"])


class Counted(MPI.Intracomm):
    """A communicator that counts the calls of its collectives."""

    counts: Counter[str]


def _count(name: str) -> None:
    def method(self: Counted, *args: Any) -> Any:
        self.counts[name] += 1
        return getattr(super(Counted, self), name)(*args)

    setattr(Counted, name, method)


for _name in (*EVEN, "alltoallv", "allgatherv"):
    for _form in (_name.capitalize(), f"I{_name}", f"{_name.capitalize()}_init"):
        _count(_form)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Without a table, as a newcomer has it, but that nothing is learned, if nobody asks for it."""
    monkeypatch.setenv("HIERCOLL_LEARN", "0")
    monkeypatch.delenv("HIERCOLL_TABLE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    made = Counted(WORLD.Dup())
    made.counts = Counter()
    get_session(made).user = made  # else mpi4py's own, whatever a program has made of its communicator
    yield made
    made.Free()


@each_collective
def test_contest(counted: Counted, collective: str) -> None:
    """Singly, in rows and cold; the control is the same call."""
    contest = Contest(counted, collective, [NATIVE_VARIANT, CONTROL_VARIANT], 64)
    times = contest.times([(index, timing) for timing in (SINGLE, ROW, COLD) for index in (0, 1)], 2)
    assert all(0 < seconds < 60 for row in times for seconds in row)
    assert set(counted.counts) == {collective.capitalize()} and counted.counts.total() >= 2 * (3 * 2 + 3)
    contest.close()


@each_collective
def test_forms(counted: Counted, collective: str) -> None:
    """The library's nonblocking form on the user's communicator; plans on one of their own."""
    contest = Contest(counted, collective, [NATIVE_VARIANT, NONBLOCKING, PERSISTENT], 64)
    assert contest.able(1) and not contest.able(2)
    assert set(counted.counts) == {f"I{collective}"}
    assert contest.able(0) and set(counted.counts) == {f"I{collective}", collective.capitalize()}
    before = counted.counts.copy()
    assert contest.able(0, PLAN) and contest.able(1, PLAN)
    assert contest.able(2, PLAN) is (HAS_PERSISTENT and PERSISTENT.is_sound(mpi_library()))
    contest.times([(0, PLAN), (1, PLAN)], 2)
    assert counted.counts == before
    contest.close()


# Records that differ from each other in what they have: roots, operations, one buffer, sizes; by MPI's names.
EACH, ONE, VECTOR = Holds.EACH, Holds.ONE, Holds.VECTOR
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bcast": ("bcast", {"send": VECTOR, "recv": VECTOR, "root": True, "in_place": InPlace.ALWAYS}),
    "Gather": ("gather", {"send": ONE, "recv": EACH, "root": True}),
    "Gatherv": ("gather", {"send": ONE, "recv": EACH, "root": True, "sizes": Sizes.OWN}),
    "Scatter": ("scatter", {"send": EACH, "recv": ONE, "root": True}),
    "Scatterv": ("scatter", {"send": EACH, "recv": ONE, "root": True, "sizes": Sizes.OWN}),
    "Reduce": ("reduce", {"send": VECTOR, "recv": VECTOR, "root": True, "operation": True}),
    "Allreduce": ("allreduce", {"send": VECTOR, "recv": VECTOR, "operation": True}),
    "Reduce_scatter_block": ("reduce_scatter", {"send": EACH, "recv": ONE, "operation": True}),
}


@pytest.mark.parametrize("method", KINDS)
def test_contest_of_any_record(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data, and what is due of them, are what the MPI library delivers; a call that does nothing is found out."""
    name, fields = KINDS[method]
    monkeypatch.setitem(COLLECTIVES, "here", COLLECTIVES[name])  # and removed after the test
    Collective("here", COLLECTIVES[name].contract, native=method, **fields)
    comm = MPI.Intracomm(WORLD.Dup())
    for size in (1, 24, 1000):
        contest = Contest(comm, "here", [NATIVE_VARIANT, CONTROL_VARIANT], size)
        times = contest.times([(index, timing) for timing in (SINGLE, ROW) for index in (0, 1)], 2)
        assert all(0 < seconds < 60 for row in times for seconds in row)
        contest.close()
    if SIZE > 1:
        idle = type("Idle", (MPI.Intracomm,), {method: lambda self, *args, **options: None})(comm)
        with pytest.raises(DataError, match="here native with blocks of 24 bytes"):
            Contest(idle, "here", [NATIVE_VARIANT], 24).able(0)
    comm.Free()


@pytest.mark.parametrize("timing", TIMINGS)
def test_bench(counted: Counted, timing: str) -> None:
    """Whatever is measured, it is compared with the blocking call."""
    bench = Bench(counted, samples=6, timings=[timing])
    variants = [NATIVE_VARIANT, Variant("scatter_destination"), Variant("auto")]
    results = list(bench.run("alltoall", variants, [16]))
    assert [result.subject for result in results] == variants and counted.counts["Alltoall"] >= 6
    assert set(counted.counts) == {"Alltoall"}
    assert all(result.gain_low is not None and result.gain_low <= (result.gain or 0) for result in results)
    assert results[2].chosen == NATIVE_VARIANT
    assert results[0].gain == results[0].gain_low == results[0].gain_high == 1.0  # a call, whatever the others are


@pytest.mark.mpi(min_size=2)
def test_bench_says_what_serves_sums() -> None:
    """Of floats, which are to keep their bits, too: the one algorithm that a table of this layout has for a size; not
    what one of another layout has."""
    world = WORLD.Dup()
    session = get_session(world)
    sizes = tuple(len(node) for node in session.topology.nodes)
    entry = Entry("allreduce", session.library, "host", sizes, "block", (Choice(0, Variant("ring")),))
    for nodes, floats in ((sizes, "ring"), ((*sizes, 1), "native")):
        hiercoll.configure(world, table=Table((replace(entry, nodes=nodes),)))
        [result] = Bench(world, samples=6, timings=[SINGLE]).run("allreduce", [Variant("auto")], [16])
        assert result.chosen is not None and result.chosen.algorithm == floats
        if nodes == sizes:
            bench = Bench(world, samples=6, timings=[SINGLE])
            [result] = bench.run("allreduce", [Variant("auto")], [13])  # of bytes
            assert result.chosen is not None and result.chosen.algorithm == "ring"
    world.Free()


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_a_device_is_all_ranks_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host alone see what is wrong there."""

    def bind(comm: MPI.Intracomm) -> int:
        if comm.rank == SIZE - 1:
            raise DeviceError("devices", "at least one for every rank", "none", comm.rank)
        return 0

    monkeypatch.setattr("hiercoll.cuda.bind", bind)
    with pytest.raises(DeviceError, match=f"rank {SIZE - 1}: devices"):
        arrays_of(WORLD, "cuda")


def test_what_rank_0_cannot_read_is_all_ranks_error() -> None:
    """Whatever the error."""
    with pytest.raises(HiercollError, match="rank 0: ZeroDivisionError"):
        from_root(WORLD, lambda: 1 // 0)


@pytest.mark.mpi(min_size=2)  # what is drawn from one rank says nothing
def test_report_of_a_fresh_run(counted: Counted, folder: Path) -> None:
    """What bench writes now, the report of the figures reads: tuned, of both timings and collectives."""
    bench = Bench(counted, samples=6, timings=(SINGLE, ROW), rate=1e9)
    about, entries = provenance(counted, bench.topology), []
    records = []
    for collective in EVEN:
        subjects = [NATIVE_VARIANT, Variant("auto"), CONTROL_VARIANT]
        records += [record(result, about) for result in bench.run(collective, subjects, [8, 4096])]
        figure = Figure(8, NATIVE_VARIANT, 1e-3, 1e-3, 1e-3, 8)
        setting = (collective, about["mpi"], "host", bench.topology.node_sizes, bench.topology.placement)
        entries.append(Entry(*setting, (Choice(1, NATIVE_VARIANT),), (figure,)))
    if WORLD.rank == 0:
        (folder / "bench-here.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        (folder / "table-here.json").write_text(dump(Table(tuple(entries))))
        spec = importlib.util.spec_from_file_location("figures_report", SCRIPTS / "figures_report.py")
        assert spec is not None and spec.loader is not None
        report = sys.modules["figures_report"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(report)
        text = report.section("lab", folder)
        assert text.count("| native |") == 8 and "| 4K * |" in text and about["mpi"] in text


@pytest.mark.mpi(min_size=2)  # for one rank there is nothing to tune
def test_search(counted: Counted) -> None:
    bench = Bench(counted)
    search = Search("alltoall", bench.topology, bench.open, bench.clock, 0.5, bench.links())
    (found,) = search.run([32])
    assert {"Alltoall"} <= set(counted.counts) <= {"Alltoall", "Ialltoall"}
    assert WORLD.allgather(str(found)) == [str(found)] * SIZE


@pytest.mark.parametrize("collective", EVEN)
@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_public_calls(counted: Counted, collective: str, algorithm: str) -> None:
    """One call of ours is one of theirs, on buffers seen before or not, however they are given."""
    call, name = getattr(hiercoll, collective), collective.capitalize()
    for turn in range(4):
        send = filled(collective, counted, 24, turn // 2)
        want = native(collective, WORLD, send, 24)
        recv = np.full(24 * SIZE, 0xA5, np.uint8)
        for give in (lambda send=send: send, lambda send=send: [send, 24, MPI.BYTE]):
            recv[:] = 0xA5
            call(counted, give(), recv, algorithm=algorithm)
            assert np.array_equal(recv, want)
        assert np.array_equal(call(counted, send, algorithm=algorithm).reshape(-1), want)
        assert counted.counts == {name: 3 * (turn + 1)}


@pytest.mark.parametrize("collective", EVEN)
def test_forms_in_public_calls(counted: Counted, collective: str) -> None:
    call, init = getattr(hiercoll, collective), getattr(hiercoll, f"{collective}_init")
    send, recv = filled(collective, counted, 24), np.empty(24 * SIZE, np.uint8)
    want = native(collective, WORLD, send, 24)
    call(counted, send, recv, algorithm="native", form="nonblocking")
    assert np.array_equal(recv, want) and counted.counts == {f"I{collective}": 1}
    held = partial(init, counted, send, recv, algorithm="native")
    if HAS_PERSISTENT and PERSISTENT.is_sound(mpi_library()):
        with held(form="persistent") as plan:
            recv[:] = 0xA5
            plan.start()
            plan.wait()
            assert np.array_equal(recv, want)
            recv[:] = 0xA5
            assert np.array_equal(plan(), want)
    else:
        with pytest.raises(hiercoll.ConstraintError, match=r"persistent collectives"):
            held(form="persistent")
    for wrong, given in (("persistent", {}), ("blocking", {}), ("nonblocking", {"window": 2})):
        with pytest.raises(hiercoll.ParameterError, match="form=nonblocking at most with algorithm='native' in a call"):
            call(counted, send, recv, algorithm="native", form=wrong, **given)
    with pytest.raises(hiercoll.ParameterError, match="form=nonblocking or persistent at most"):
        init(counted, send, recv, algorithm="native", form="blocking")


@pytest.mark.mpi(min_size=2)  # for one rank there is nothing to tune
@pytest.mark.parametrize("collective", EVEN)
def test_online(counted: Counted, collective: str) -> None:
    """Trials: where native serves a call it is the blocking one, and nothing else calls the library."""
    hiercoll.configure(counted, tune="online")
    wanted = Wanted(get_collective(collective), 40, False)
    policy, call = get_session(counted).policy, getattr(hiercoll, collective)
    send, recv, served = filled(collective, counted, 40), np.empty(40 * SIZE, np.uint8), 0
    learner = policy.learner(wanted)
    assert learner is not None
    for _ in range(300):
        served += learner.begin().is_native
        call(counted, send, recv)
        assert counted.counts[collective.capitalize()] == served
        if learner.is_settled:
            break
    assert served > 3 and set(counted.counts) == {collective.capitalize()}


def test_alltoallv(counted: Counted) -> None:
    ones = np.ones(SIZE, int)
    send, recv = np.full(SIZE, WORLD.rank), np.empty(SIZE, int)
    for _ in range(5):
        hiercoll.alltoallv(counted, [send, ones], [recv, ones], algorithm="native")
    assert counted.counts == {"Alltoallv": 5} and np.array_equal(recv, np.arange(SIZE))
    with hiercoll.alltoallv_init(counted, [send, ones], [recv, ones]) as plan:
        assert plan.name == "alltoallv native"  # without a table


def test_wrong_data_of_the_library(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form of it that delivers nothing is left out, with a warning; the blocking call, or ours, is an error."""

    def nothing(self: Any, *args: Any) -> MPI.Request:
        return WORLD.Ibarrier()

    with monkeypatch.context() as patch:
        patch.setattr(Counted, "Ialltoall", nothing)
        contest = Contest(counted, "alltoall", [NATIVE_VARIANT, NONBLOCKING], 64)
        with pytest.warns(hiercoll.NativeWarning, match="form=nonblocking .*wrong bytes"):  # on all ranks alike
            assert not contest.able(1)
        assert contest.able(0)
    with monkeypatch.context() as patch:
        patch.setattr(Counted, "Alltoall", lambda *_: None)
        with pytest.raises(DataError, match="alltoall native with blocks of 64 bytes"):
            Contest(counted, "alltoall", [NATIVE_VARIANT], 64).able(0)


def test_hosts(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what processes see; by the MPI library, where one of them sees nothing."""
    monkeypatch.delenv("HIERCOLL_NODES", raising=False)
    by_mpi, cores, largest = topology.discover(comm, lambda: (WORLD.rank, -WORLD.rank))
    assert by_mpi.node_of == (0,) * SIZE and largest == [SIZE - 1, 0]  # tests run on one host
    bound = set(comm.allgather(frozenset(os.sched_getaffinity(0))))
    assert cores == min(1.0, sum(map(len, bound)) / SIZE)
    monkeypatch.setattr(topology, "_host", lambda: topology.UNKNOWN if WORLD.rank == SIZE - 1 else 7)
    assert topology.discover(comm)[0] == by_mpi
    monkeypatch.setattr(topology, "_host", lambda: 2**53 - 1 - WORLD.rank // 2)
    assert topology.discover(comm)[0].node_of == tuple(rank // 2 for rank in range(SIZE))
