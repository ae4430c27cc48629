"""Tuning on real communicators: the command, tables at run time, online tuning."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import WORLD
from mpi4py import MPI
from test_algorithms import filled, native
from test_dropin import Strided

import hiercoll
from hiercoll.algorithms import get_algorithm
from hiercoll.calls import dropin
from hiercoll.cli import main
from hiercoll.collectives import ALLTOALL, get_collective
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.tables import OLD, Choice, Entry, Figure, Table, Variant, dump, load
from hiercoll.tools.bench import Bench
from hiercoll.tools.cores import Cores
from hiercoll.tools.measuring import Contest
from hiercoll.tuning.policy import Wanted
from hiercoll.tuning.search import Search, variants

OnLayout = Callable[[str], MPI.Intracomm]


def table_for(comm: MPI.Intracomm, variant: Variant, collective: str = "alltoall") -> Table:
    """A table that always chooses ``variant`` on ``comm``."""
    topology = hiercoll.get_topology(comm)
    return Table(
        (Entry(collective, mpi_library(), "host", topology.node_sizes, topology.placement, (Choice(1, variant),)),)
    )


@pytest.mark.ranks([4])
def test_tune_command_on_two_by_two(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A budget of seconds gives a table that can be checked, and that "auto" then follows."""
    monkeypatch.setenv("HIERCOLL_NODES", "2x2")
    world = WORLD.Dup()
    monkeypatch.setattr("hiercoll.cli.tune.world", lambda: world)
    path = folder / "table.json"
    done = CliRunner().invoke(main, ["tune", "alltoall", "--budget", "4s", "--sizes", "8,4K", "-o", str(path)])
    assert done.exit_code == 0, done.output
    WORLD.Barrier()
    table = load(path)
    (entry,) = table.entries
    assert (entry.nodes, entry.placement, entry.mpi) == ((2, 2), "block", mpi_library())
    assert {8, 4096} <= {figure.size for figure in entry.figures}
    assert entry.about["ranks"] == 4 and entry.about["virtual_nodes"] is True
    assert all(figure.q1 <= figure.median <= figure.q3 for figure in entry.figures)
    assert not path.with_name("table.json.part").exists()
    hiercoll.configure(world, table=path)
    decision = get_session(world).policy.decide(Wanted(ALLTOALL, 8, False))
    assert decision.variant == entry.choice(8)
    assert str(path) in decision.reason
    for held in (False, True):
        held_decision = get_session(world).policy.decide(Wanted(ALLTOALL, 8, False, held=held))
        assert held_decision.variant == entry.choice(8, held=held)
    send = filled("alltoall", world, 8)
    recv = np.full(8 * world.size, 0xA5, np.uint8)
    assert np.array_equal(hiercoll.alltoall(world, send, recv), native("alltoall", world, send, 8))
    with hiercoll.alltoall_init(world, send, recv) as plan:
        recv[:] = 0xA5
        plan()
        assert np.array_equal(recv, native("alltoall", world, send, 8))
    world.Free()


@pytest.mark.ranks([4])
def test_tune_uneven(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A table for alltoallv; plans follow it, calls try what it says; the benchmark checks all data."""
    monkeypatch.setenv("HIERCOLL_NODES", "2x2")
    world = WORLD.Dup()
    for module in ("tune", "measure"):
        monkeypatch.setattr(f"hiercoll.cli.{module}.world", lambda: world)
    path = folder / "uneven.json"
    for command in (
        ["tune", "alltoallv", "--budget", "3s", "-o", str(path)],
        ["bench", "alltoallv", "--seconds", ".05"],
    ):
        done = CliRunner().invoke(main, [*command, "--sizes", "16,2K"])
        assert done.exit_code == 0, done.output
        WORLD.Barrier()
    (entry,) = load(path).entries
    assert entry.collective == "alltoallv" and {16, 2048} <= {figure.size for figure in entry.figures}
    assert any(figure.variant.is_native and figure.ranked for figure in entry.figures)
    done = CliRunner().invoke(main, ["tune", "alltoallv", "--memory", "cuda", "-o", str(path)])
    assert done.exit_code == 1 and (WORLD.rank or "expected host with alltoallv" in done.output)
    world.Free()


@pytest.mark.mpi(min_size=3)  # of two ranks, most blocks are never empty
@pytest.mark.parametrize("drop_in", [False, True])
def test_plans_follow_a_table_for_uneven_blocks(comm: MPI.Intracomm, calls: dropin.Calls, drop_in: bool) -> None:
    """By what blocks all ranks have together."""
    chosen = Variant("pairwise", {"exchange": "rotation"})
    hiercoll.configure(comm, table=table_for(comm, chosen, "alltoallv"))
    counts = np.arange(comm.size) + comm.rank + 1
    few = counts * (np.arange(comm.size) == comm.rank)
    send = np.repeat(100 * comm.rank + np.arange(comm.size), counts)
    for numbers, algorithm in ((few, "native"), (counts, "pairwise")):  # of the first most blocks are empty
        recv = np.full(counts.sum(), -1)
        if drop_in:
            calls.clear()
            request = hiercoll.Intracomm(comm).Alltoallv_init([send, numbers], [recv, numbers])
            request.Start()
            request.Wait()
            request.Free()
            served = algorithm != "native" and MPI.Query_thread() == MPI.THREAD_MULTIPLE
            assert calls == {"alltoallv_init" if served else "alltoallv_init, native": 1}
        else:
            with hiercoll.alltoallv_init(comm, [send, numbers], [recv, numbers]) as plan:
                assert plan.name.split()[:2] == ["alltoallv", algorithm]
                plan()
    np.testing.assert_array_equal(recv, np.repeat(100 * np.arange(comm.size) + comm.rank, counts))


@pytest.mark.ranks([3, 4])
def test_search_measures_everything_it_shows(on_layout: OnLayout) -> None:
    comm = on_layout("2+1" if WORLD.size == 3 else "2x2")
    bench = Bench(comm)
    links = bench.links()
    assert 0 < links.network.alpha < 1 and 0 < links.node.beta < 1e-3
    for collective in ("alltoall", "allgather"):
        search = Search(collective, bench.topology, bench.open, bench.clock, 2.0, links)
        results = search.run([16, 1024])
        assert WORLD.allgather(str(results)) == [str(results)] * WORLD.size
        assert all(figure.median > 0 for result in results for figure in result.figures)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not let processes choose cores")
def test_cores_are_shared_evenly_and_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {7, 9})
    moves: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: moves.append(set(cores)))
    cores = Cores(WORLD)
    for _ in range(20):
        cores.shuffle()
    monkeypatch.undo()
    taken = [WORLD.allgather(sorted(move)) for move in moves]
    if WORLD.size <= 2:  # a core for each
        assert not moves
        return
    assert taken[1::2] == [[[7, 9]] * WORLD.size] * 20
    places = [tuple(core for (core,) in each) for each in taken[::2]]
    assert all(abs(each.count(7) - each.count(9)) <= 1 for each in places)
    assert len(set(places)) > 1
    Cores(WORLD).shuffle()
    assert os.sched_getaffinity(0) == before


def test_contest_moves_ranks_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []
    monkeypatch.setattr(Cores, "shuffle", lambda self: moves.append(1))
    contest = Contest(WORLD, "alltoall", [Variant("native", {})], 24)
    contest.times([(0, "single"), (0, "row")], 3)
    contest.close()
    assert len(moves) == 3


def test_contest_runs_every_variant(on_layout: OnLayout) -> None:
    """All that may be tuned delivers the right data (the contest checks it) on uneven nodes."""
    size = WORLD.size
    comm = on_layout(f"{size - size // 2}+{size // 2}:cyclic" if size > 1 else "1x1")
    topology = hiercoll.get_topology(comm)
    for collective in ("alltoall", "allgather"):
        for variant in variants(collective, topology):
            contest = Contest(comm, collective, [variant], 24)
            assert contest.able(0)
            contest.close()


def test_table_is_read_by_rank_0(on_layout: OnLayout, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """HIERCOLL_TABLE of rank 0 counts for all, whatever the others have."""
    first = on_layout(f"1x{WORLD.size}")
    chosen = Variant("scatter_destination", {"window": 2})
    path = folder / "table.json"
    text = dump(table_for(first, chosen))
    if WORLD.rank == 0:
        path.write_text(text)
    WORLD.Barrier()
    monkeypatch.setenv("HIERCOLL_TABLE", str(path) if WORLD.rank == 0 else "/no/such/table")
    comm = on_layout(f"1x{WORLD.size}")
    variant = get_session(comm).policy.decide(Wanted(ALLTOALL, 64, False)).variant
    assert variant == (chosen if WORLD.size > 1 else Variant("native"))


@pytest.mark.parametrize("text", ["{", json.dumps({"format": "hiercoll table", "version": 99, "entries": []})])
def test_broken_table(on_layout: OnLayout, monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """From the environment: a warning on rank 0, and native. As an argument: an error on every rank."""
    path = folder / "table.json"
    if WORLD.rank == 0:
        path.write_text(text)
    WORLD.Barrier()
    monkeypatch.setenv("HIERCOLL_TABLE", str(path))
    comm = on_layout(f"1x{WORLD.size}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        send = filled("alltoall", comm, 8)
        assert np.array_equal(hiercoll.alltoall(comm, send), native("alltoall", comm, send, 8))
    told = [str(each.message) for each in caught if each.category is hiercoll.TableWarning]
    assert len(told) == (1 if WORLD.rank == 0 else 0)
    assert all(str(path) in message for message in told)
    monkeypatch.delenv("HIERCOLL_TABLE")
    with pytest.raises(hiercoll.TableError, match=r"table\.json: "):
        hiercoll.configure(comm, table=path)
    assert np.array_equal(hiercoll.alltoall(comm, send), native("alltoall", comm, send, 8))


def test_old_table(on_layout: OnLayout, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """One made from other timings than those of calls is used, with a warning on rank 0."""
    first, chosen = on_layout(f"1x{WORLD.size}"), Variant("scatter_destination", {"window": 2})
    table = table_for(first, chosen)
    old = Figure(64, chosen, 1e-5, 1e-5, 1e-5, 9, OLD, False)
    path = folder / "table.json"
    if WORLD.rank == 0:
        path.write_text(dump(Table((replace(table.entries[0], figures=(old,)),))))
    WORLD.Barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hiercoll.configure(first, table=path)
    told = [str(each.message) for each in caught if each.category is hiercoll.TableWarning]
    assert told == [f"{path}: made from held plans in a row, not from calls: tune again"] * (WORLD.rank == 0)
    assert get_session(first).policy.decide(Wanted(ALLTOALL, 64, False)).variant == (
        chosen if WORLD.size > 1 else Variant("native")
    )


@pytest.mark.parametrize("how", ["environment", "argument"])
def test_table_of_another_library(on_layout: OnLayout, monkeypatch: pytest.MonkeyPatch, folder: Path, how: str) -> None:
    """Whoever names it is told on rank 0 that nothing in it is about this one."""
    path = folder / "table.json"
    (entry,) = table_for(on_layout(f"1x{WORLD.size}"), Variant("pairwise")).entries
    if WORLD.rank == 0:
        path.write_text(dump(Table((replace(entry, mpi="Another MPI 7.0"),))))
    WORLD.Barrier()
    monkeypatch.setenv("HIERCOLL_TABLE", str(path) if how == "environment" else "")
    comm = on_layout(f"1x{WORLD.size}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "argument":
            hiercoll.configure(comm, table=path)
        send = filled("alltoall", comm, 8)
        assert np.array_equal(hiercoll.alltoall(comm, send), native("alltoall", comm, send, 8))
    told = [str(each.message) for each in caught if each.category is hiercoll.TableWarning]
    due = f"{path}: made with Another MPI 7.0, and says nothing about {mpi_library()}: tune with that, too"
    assert told == [due] * (WORLD.rank == 0)


def test_tune_leaves_nothing_beside_what_it_cannot_write(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What is there is no table: that is said before all work."""
    world, path = WORLD.Dup(), folder / "notes.txt"
    monkeypatch.setattr("hiercoll.cli.tune.world", lambda: world)
    if WORLD.rank == 0:
        path.write_text("mine")
    WORLD.Barrier()
    done = CliRunner().invoke(main, ["tune", "alltoall", "--budget", "4s", "-o", str(path)])
    WORLD.Barrier()
    assert done.exit_code == 1 and sorted(each.name for each in folder.glob("notes*")) == ["notes.txt"]
    world.Free()


@pytest.mark.ranks([3])
def test_bench_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was asked for; names may be written as they are printed."""
    world = WORLD.Dup()
    monkeypatch.setattr("hiercoll.cli.measure.world", lambda: world)
    command = ["bench", "alltoall", "-s", "8", "--seconds", ".02", "-a", "pairwise exchange=xor", "-a", "bruck radix=3"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    if WORLD.rank == 0:
        said = " ".join(done.output.split())
        assert "pairwise exchange=xor is left out: it needs a power-of-two" in said, said
        assert "bruck radix=3" in said.partition("native")[2]
    world.Free()


def test_configure_changes_what_auto_runs(on_layout: OnLayout) -> None:
    """Calls seen before, with their plans, follow the new table too."""
    comm = on_layout(f"1x{WORLD.size}")
    send, recv = filled("allgather", comm, 24), np.empty(24 * comm.size, np.uint8)
    want = native("allgather", comm, send, 24)
    for name in ("ring", "direct", "native"):
        params = {} if name == "native" else get_algorithm("allgather", name).resolve({})
        hiercoll.configure(comm, table=table_for(comm, Variant(name, params), "allgather"))
        for _ in range(3):
            recv[:] = 0xA5
            hiercoll.allgather(comm, send, recv)
            assert np.array_equal(recv, want)
        if comm.size > 1 and name != "native":
            assert any(name in plan.name for plan in get_session(comm).plans.values())
    with pytest.raises(hiercoll.ParameterError, match="'online', 'off' or None"):
        hiercoll.configure(comm, tune="always")  # type: ignore[arg-type]


@pytest.mark.parametrize("collective", ["alltoall", "allgather"])
def test_online_tuning(collective: str, on_layout: OnLayout) -> None:
    """Right data in every call, candidates change, all ranks agree, and the winner stays."""
    size = WORLD.size
    comm = on_layout(f"{size - size // 2}+{size // 2}" if size > 1 else "1x1")
    hiercoll.configure(comm, tune="online")
    call = getattr(hiercoll, collective)
    recv = np.empty(40 * size, np.uint8)
    tried = set()
    for salt in range(300):
        send = filled(collective, comm, 40, salt)
        recv[:] = 0xA5
        call(comm, send, recv)
        assert np.array_equal(recv, native(collective, comm, send, 40))
        learner = get_session(comm).policy.learner(Wanted(get_collective(collective), 40, False))
        if learner is None or learner.finding is not None:
            break
        tried.add(learner.current.key)
    assert (learner is None) == (size == 1) and (learner is None or learner.finding is not None)  # it has ended
    winner = get_session(comm).policy.select(Wanted(get_collective(collective), 40, False), "auto", {}).key
    assert WORLD.allgather(winner) == [winner] * size
    assert len(tried) > 1 or size == 1


@pytest.mark.mpi(min_size=2)  # for one rank there is nothing to tune
def test_online_tuning_of_the_drop_in() -> None:
    """However ranks spell a call, all take part in its trials."""
    comm, size = hiercoll.Intracomm(WORLD.Dup()), WORLD.size
    hiercoll.configure(comm, tune="online")
    for salt in range(300):
        if salt and get_session(comm).policy.is_settled:
            break
        send, strided = np.arange(3 * size, dtype="i4") + 100 * WORLD.rank + salt, Strided(3 * size)
        into = [strided.matrix, 3, strided.type] if WORLD.rank == 0 else strided.values.copy()
        comm.Alltoall(send, into)
        values = strided.values if WORLD.rank == 0 else into
        expected = [100 * peer + 3 * WORLD.rank + item + salt for peer in range(size) for item in range(3)]
        assert np.array_equal(values, expected)
        strided.type.Free()
    learner = get_session(comm).policy.learner(Wanted(ALLTOALL, 12, False))
    assert learner is not None and learner.finding is not None
    comm.Free()


@pytest.mark.mpi(min_size=2)  # calls of one rank are MPI's
def test_a_table_that_says_native(calls: dropin.Calls) -> None:
    """Then a drop-in call is MPI's own, for all ranks, however they spell it; until a deadline is wanted."""
    comm, size = hiercoll.Intracomm(WORLD.Dup()), WORLD.size
    table = table_for(comm, Variant("native"))
    for timeout, name in ((0, "alltoall, native"), (30, "alltoall")):
        hiercoll.configure(comm, table=table, timeout=timeout)
        send = np.arange(3 * size, dtype="i4") + 100 * WORLD.rank
        into = np.empty_like(send)
        hiercoll.alltoall(comm, send, into)  # leaves a plan for these arrays
        for turn in range(4):
            strided = Strided(3 * size)
            plain = WORLD.rank != turn % size
            into[:] = -1
            comm.Alltoall(send, into if plain else [strided.matrix, 3, strided.type])
            expected = [100 * peer + 3 * WORLD.rank + item for peer in range(size) for item in range(3)]
            assert np.array_equal(into if plain else strided.values, expected)
            strided.type.Free()
        assert calls[name] == 4
    hiercoll.configure(comm, timeout=0)
    comm.Free()
