"""The model: machines, profiles of schedules, and the fast evaluator against times computed by hand."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hiercoll.algorithms import REGISTRY, get_algorithm
from hiercoll.cli import main
from hiercoll.errors import MachineError, ParameterError, TableError
from hiercoll.model import benchmarks
from hiercoll.model.adapters import adapters, by_adapters
from hiercoll.model.evaluate import BOUNDS, Design
from hiercoll.model.fluid import flow_seconds
from hiercoll.model.machine import LEVELS, Machine, Parameters, get_machine, level, shipped
from hiercoll.model.measurements import Measurement, pooled, read
from hiercoll.model.profile import Profile, count, profile
from hiercoll.schedule import RECV, SEND, Builder, Schedule
from hiercoll.tables import environment_table
from hiercoll.tools.predicting import by_size, candidates, forecast
from hiercoll.topology import Topology, parse_layout
from hiercoll.tuner import decide

US = 1e-6
NOTHING = Parameters(**dict.fromkeys(Parameters().__dict__, 0.0) | {"posted": 1.0, "root_factor": 1.0})
MACHINE = Machine("made up", NOTHING, domain=2, socket=4)


def seconds(machine: Machine, profiles: list[Profile], size: int) -> float:
    return float(Design([(each, size) for each in profiles], machine).evaluate(machine).seconds.max())


def profiled(collective: str, name: str, layout: str, **params: Any) -> list[Profile]:
    topology, entry = parse_layout(layout), get_algorithm(collective, name)
    return profile(lambda rank: entry.schedule(topology, rank, params), topology, MACHINE)


# ---- machines


def test_machines_are_written_and_read() -> None:
    """As they were, with all that is said of them."""
    machine = Machine("x", replace(NOTHING, domain=2e-6), 4, 8, ("a log",), ("bus",), (0.7, 1.5), "about", {"p90": 0.3})
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("name", shipped())
def test_machines_that_come_with_hiercoll(name: str) -> None:
    """Named as their files; what nobody measured is said to be assumed, and sources are stated where something was."""
    machine = get_machine(name)
    assert machine.name.lower() == name and machine.about
    known = set(Parameters().__dict__)
    assert set(machine.assumed) <= known
    assert machine.sources or not machine.fitted
    assert machine.spread[0] < 1 < machine.spread[1]
    assert all(value >= 0 for value in machine.parameters.__dict__.values())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[]", "version"),
        ('{"version": 1}', "name"),
        ('{"version": 1, "name": "x", "parameters": {"bus": -1}}', "bus: expected a number of s/B, at least 0, got -1"),
        ('{"version": 1, "name": "x", "parameters": {"bus": true}}', "bus: expected a number"),
        ('{"version": 1, "name": "x", "parameters": {"buss": 1}}', "an unknown parameter"),
        ('{"version": 1, "name": "x", "parameters": 3}', "an object"),
        ('{"version": 1, "name": "x", "level": 3}', "an unknown field"),
        ('{"version": 1, "name": 1}', "name: expected a text, got 1"),
        ('{"version": 1, "name": "x", "socket": "20"}', "socket: expected a number of ranks, at least 0, got '20'"),
        ('{"version": 1, "name": "x", "domain": -1}', "domain: expected a number of ranks"),
        ('{"version": 1, "name": "x", "domain": 1.5}', "domain: expected a number of ranks"),
        ('{"version": 1, "name": "x", "spread": 5}', "spread: expected two numbers above 0, got 5"),
        ('{"version": 1, "name": "x", "spread": [0, 2]}', "spread: expected two numbers above 0"),
        ('{"version": 1, "name": "x", "sources": "me"}', "sources: expected a list of texts"),
        ('{"version": 1, "name": "x", "assumed": [1]}', "assumed: expected a list of texts"),
        ('{"version": 1, "name": "x", "about": 1}', "about: expected a text"),
        ('{"version": 1, "name": "x", "fitted": {"p90": "low"}}', "fitted: expected an object of numbers"),
        ("\udcff", "a file, or one of"),  # a byte that no UTF-8 begins with
    ],
)
def test_what_is_no_machine(text: str, words: str, tmp_path: Path) -> None:
    """Named with its file."""
    path = tmp_path / "machine.json"
    path.write_bytes(os.fsencode(text))
    with pytest.raises(MachineError, match=r"machine\.json") as caught:
        get_machine(path)
    assert words in str(caught.value)


def test_a_machine_that_is_not_there() -> None:
    with pytest.raises(MachineError, match=r"expected a file, or one of .*generic-100g"):
        get_machine("nowhere")


def test_levels() -> None:
    """Lanes fill domains and sockets in order; a machine that knows none has one for the node."""
    topology = parse_layout("2x8")
    found = [LEVELS[level(MACHINE, topology, 0, peer)] for peer in range(1, 9)]
    assert found == ["domain", "socket", "socket", "node", "node", "node", "node", "network"]
    assert level(Machine("flat"), topology, 0, 7) == 0


@pytest.mark.parametrize(
    ("files", "machine", "words"),
    [
        ({}, "generic-100g", "none that is known"),
        ({"infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)", "infiniband/mlx5_0/ports/1/state": "4: ACTIVE"},
         "generic-100g", "mlx5_0 (InfiniBand, 100 Gbit/s)"),
        ({"infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)", "infiniband/mlx5_0/ports/1/state": "1: DOWN",
          "net/eth0/speed": "25000", "net/eth0/operstate": "up", "net/lo/speed": "1", "net/lo/operstate": "up"},
         "generic-100g", "eth0 (Ethernet, 25 Gbit/s)"),
        ({"infiniband/hfi1_0/ports/1/rate": "100 Gb/sec (4X EDR)", "infiniband/hfi1_0/ports/1/state": "4: ACTIVE",
          "infiniband/hfi1_1/ports/1/rate": "100 Gb/sec (4X EDR)", "infiniband/hfi1_1/ports/1/state": "4: ACTIVE"},
         "generic-200g", "hfi1_1 (Omni-Path, 100 Gbit/s)"),
        ({"cxi/cxi0/device": "", "net/eth0/speed": "10000", "net/eth0/operstate": "up"}, "generic-200g", "Slingshot"),
        ({"net/eth0/speed": "-1", "net/eth0/operstate": "up"}, "generic-100g", "none that is known"),
    ],
)  # fmt: skip
def test_adapters_of_a_host(files: dict[str, str], machine: str, words: str, tmp_path: Path) -> None:
    """What is up, and the fastest kind; the machine says why it was taken."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    found = by_adapters(adapters(tmp_path))
    assert found.machine == machine and words in found.why


def test_a_machine_for_auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What HIERCOLL_MACHINE names ranks what there is to try, and decides where the model is asked to."""
    slow = Machine("slow starts", Parameters(network=1e-3, domain=1e-3, socket=1e-3, node=1e-3))
    path = tmp_path / "slow.json"
    path.write_text(slow.to_json())
    monkeypatch.setenv("HIERCOLL_MACHINE", str(path))
    monkeypatch.setenv("HIERCOLL_TABLE", "model")
    table = environment_table()
    assert table.machine == slow
    topology = parse_layout("8x1")
    decided = decide("alltoall", topology, 512, table=table)
    assert decided.variant.algorithm in ("bruck", "recursive_doubling") and len(decided.ranking) > 3
    assert decide("alltoall", topology, 1 << 20, table=table).variant != decided.variant
    shown = CliRunner().invoke(main, ["explain", "alltoall", "-s", "512", "-l", "8x1"])
    assert shown.exit_code == 0 and "the cost model, as asked for" in shown.output
    given = ["explain", "alltoall", "-s", "8", "-l", "8x1", "-m", "generic-100g"]
    monkeypatch.delenv("HIERCOLL_TABLE")
    assert "the cost model of generic-100g says" in CliRunner().invoke(main, given).output
    monkeypatch.setenv("HIERCOLL_MACHINE", "nowhere")
    with pytest.raises(TableError, match=r"HIERCOLL_MACHINE: machine: expected a file, or one of"):
        environment_table()


# ---- profiles


@pytest.mark.parametrize("layout", ["2x8", "3+5", "4x4:cyclic", "8x1", "1x6"])
@pytest.mark.parametrize(
    ("collective", "name"), [(c, n) for c in ("alltoall", "allgather", "bcast") for n in REGISTRY[c]]
)
def test_messages_and_bytes_are_those_of_the_schedules(collective: str, name: str, layout: str) -> None:
    """Of the first node, whatever phases and classes they are put in."""
    topology, entry = parse_layout(layout), get_algorithm(collective, name)
    if entry.refusal(topology, entry.resolve({})):
        pytest.skip("cannot run so")
    found = profile(lambda rank: entry.schedule(topology, rank, {}), topology, MACHINE)[0]
    schedules = [entry.schedule(topology, rank, {}) for rank in topology.nodes[0]]
    counts = [count(schedule, topology, MACHINE) for schedule in schedules]
    far = [sum(b * n for p in each.phases for (at, b), n in p.sent.items() if at == 3) for each in counts]
    assert sum(total.out for total in found.totals) == pytest.approx(sum(far))
    assert sum(ranks for _, ranks in found.classes) == len(schedules)
    sent = [sum(b * n for p in each.phases for (_, b), n in p.sent.items()) * ranks for each, ranks in found.classes]
    assert sum(sent) == pytest.approx(sum(b * n for c in counts for p in c.phases for (_, b), n in p.sent.items()))


def test_large_nodes_are_not_looked_at_rank_by_rank() -> None:
    """Where ranks between two do the same; leaders are found."""
    topology, entry, asked = parse_layout("4x96"), get_algorithm("alltoall", "grouped"), set[int]()
    params = entry.resolve({"form": "leader", "leaders": 4})

    def emit(rank: int) -> Schedule:
        asked.add(rank)
        return entry.schedule(topology, rank, params)

    found = profile(emit, topology, MACHINE, 4)[0]
    assert len(asked) < 40
    everyone = [count(entry.schedule(topology, rank, params), topology, MACHINE) for rank in range(96)]
    out = sum(b * n for each in everyone for p in each.phases for (at, b), n in p.sent.items() if at == 3)
    assert sum(total.out for total in found.totals) == out


def test_a_copy_ends_a_phase() -> None:
    """What is sent after it is the next one's; what waits for nothing is not in the chain."""
    b = Builder(0)
    with b.round():
        b.send(1, SEND[0:3])
        b.recv(2, RECV[0])
    with b.round():
        b.send(2, SEND[0])
    with b.round():
        b.copy(RECV[0:4:2], SEND[0:2])
    with b.round():
        for peer in (1, 2, 3):
            b.recv(peer, RECV[peer])
    found = count(b.build(), parse_layout("2x2"), MACHINE)
    assert [phase.chain for phase in found.phases] == [2, 1]
    assert [sum(phase.received.values()) for phase in found.phases] == [1, 3]
    assert found.copies == [(2, 2, False)] and found.phases[0].sent == {(0, 3): 1, (3, 1): 1}


# ---- the evaluator, by hand


def test_a_chain_of_steps() -> None:
    """Ring: each step pays latency and bytes of its level; a rank has P-1 of them."""
    machine = replace(MACHINE, parameters=replace(NOTHING, domain=1 * US, network=5 * US, network_byte=1e-9))
    ring = profiled("allgather", "ring", "4x1")
    assert seconds(machine, ring, 1000) == pytest.approx(3 * (5 * US + 1000e-9))


def test_messages_at_once_cost_a_share() -> None:
    """Three messages to other nodes, all under way at once: one waits for none of the others."""
    machine = replace(MACHINE, parameters=replace(NOTHING, network=6 * US, posted=0.5))
    at_once = profiled("alltoall", "scatter_destination", "4x1")
    assert seconds(machine, at_once, 8) == pytest.approx(6 * US * 3 * (1 / 3 + 2 / 3 * 0.5))


def test_ranks_of_a_node_share_its_adapter() -> None:
    """All that leaves; more of it with many nodes to speak with."""
    machine = replace(MACHINE, parameters=replace(NOTHING, adapter=1e-9, congestion=0.5))
    found = profiled("alltoall", "pairwise", "4x4")
    assert seconds(machine, found, 1000) == pytest.approx(4 * 12 * 1000e-9 * (1 + 0.5 * (1 - 1 / 3)))
    lane = profiled("alltoall", "grouped", "4x4")
    assert seconds(machine, lane, 1000) == pytest.approx(seconds(machine, found, 1000))


def test_between_sockets() -> None:
    """Each rank receives from the four of the other socket."""
    machine = replace(MACHINE, parameters=replace(NOTHING, socket_link=1e-9))
    assert seconds(machine, profiled("alltoall", "pairwise", "1x8"), 10) == pytest.approx(8 * 4 * 10e-9)


def test_beyond_the_cache() -> None:
    """What does not fit costs memory's time, the copy of the own block too; what fits costs next to nothing."""
    slow = replace(NOTHING, memory=1e-9, cache_socket=1e6)
    machine = replace(MACHINE, parameters=slow)
    found = profiled("alltoall", "pairwise", "1x4")
    assert seconds(machine, found, 10**7) == pytest.approx(4 * 10**7 * 1e-9, rel=0.01)
    assert seconds(machine, found, 100) < 1e-9


def test_large_messages_meet_first() -> None:
    """From ``eager`` on, half of it there, a message costs a rendezvous."""
    machine = replace(MACHINE, parameters=replace(NOTHING, network_rendezvous=8 * US, network_eager=1000))
    found = profiled("allgather", "ring", "2x1")
    assert [seconds(machine, found, size) for size in (10, 1000, 10**6)] == pytest.approx([0, 4 * US, 8 * US], abs=1e-8)


def rooted(topology: Topology, gather: bool, rank: int) -> Schedule:
    return benchmarks._rooted(len(topology.node(0)), 1, gather, topology, rank)


@pytest.mark.parametrize("gather", [True, False])
def test_a_root(gather: bool) -> None:
    """One whole message, and for each other one what the root adds."""
    parameters = replace(NOTHING, node=2 * US, socket=2 * US, domain=2 * US, root_message=1 * US)
    parameters = replace(parameters, root_in=1e-9, root_out=3e-9, root_out_domain=3e-9)
    machine, topology = replace(MACHINE, parameters=parameters), parse_layout("1x8")
    found = profile(partial(rooted, topology, gather), topology, machine)
    byte = 1e-9 if gather else 3e-9
    assert seconds(machine, found, 1000) == pytest.approx(2 * US + 6 * US + 6 / 7 * 7 * 1000 * byte)


def test_copies_flags_and_bounds() -> None:
    """By pieces and bytes; what takes most is what bounds."""
    machine = replace(MACHINE, parameters=replace(NOTHING, piece=1 * US, copy_byte=1e-9, flag=1 * US))
    found = profiled("alltoall", "bruck", "4x1")
    first = found[0].classes[0][0]
    blocks, pieces = sum(c.blocks for c in first.copies), sum(c.pieces for c in first.copies)
    design = Design([(each, 100) for each in found], machine).evaluate(machine)
    assert design.seconds[0] == pytest.approx(pieces * US + blocks * 100e-9)
    assert design.bound(0) == "copies" and len(BOUNDS) == design.parts.shape[1]
    flags = profiled("allgather", "shared", "1x4")
    assert seconds(machine, flags, 0) >= 4 * US


@pytest.mark.parametrize("lanes", [3, 8])
def test_no_size_of_sockets_is_one_for_the_node(lanes: int) -> None:
    """As many ranks in it as the node has."""
    machine = replace(MACHINE, domain=0, socket=0, parameters=replace(Parameters(), cache_rank=0.0))
    whole = replace(machine, domain=lanes, socket=lanes)
    found = profiled("allgather", "shared", f"1x{lanes}")
    for size in (64, 1 << 16, 1 << 22):
        assert seconds(machine, found, size) == pytest.approx(seconds(whole, found, size))


@pytest.mark.parametrize("layout", ["8x1", "1x8", "4x2"])
@pytest.mark.parametrize(
    ("collective", "name", "size"),
    [
        *(("alltoall", name, size) for name in ("bruck", "recursive_doubling") for size in (64, 1 << 16)),
        *(("allgather", name, size) for name in ("recursive_doubling", "neighbor_exchange") for size in (64, 1 << 16)),
        *(("allgather", name, 64) for name in ("ring", "bruck", "shared", "node_aware")),
        *(("alltoall", name, 64) for name in ("eager", "grouped")),
    ],
)
def test_both_evaluators_agree_without_contention(collective: str, name: str, size: int, layout: str) -> None:
    """Where nothing is shared, and nothing overlaps."""
    parameters = replace(
        Parameters(), adapter=0.0, adapter_message=0.0, congestion=0.0, memory=0.0, bus=0.0, socket_link=0.0, posted=1.0
    )
    machine, topology = Machine("x", parameters), parse_layout(layout)
    schedules = [get_algorithm(collective, name).schedule(topology, rank, {}) for rank in range(8)]
    quick = seconds(machine, profile(schedules.__getitem__, topology, machine), size)
    assert flow_seconds(schedules, topology, size, machine) == pytest.approx(quick, rel=0.02)


# ---- published benchmarks


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", benchmarks.ALGORITHMS[1:])
def test_each_algorithm_sends_each_byte_once_between_nodes(name: str, groups: int) -> None:
    """N-1 nodes times q q blocks leave a node, however they are grouped; phases add up to the total."""
    found = benchmarks.profiled(MACHINE, name, "total", 3, 8, groups)
    assert sum(total.out for each in found for total in each.totals) == 2 * 8 * 8
    machine = replace(MACHINE, parameters=Parameters(piece=0, copy_byte=0, fresh=0, line=0, memory=0, bus=0))
    phases = list(benchmarks._phases(name, 3, 8, groups))
    parts = [seconds(machine, benchmarks.profiled(machine, name, phase, 3, 8, groups), 64) for phase in phases]
    whole = Design([(each, 64) for each in found], machine).evaluate(machine).seconds.sum()
    assert whole == pytest.approx(sum(parts))


def test_unknown_algorithms_and_phases() -> None:
    with pytest.raises(ParameterError, match="one of flat"):
        benchmarks.profiled(MACHINE, "circular", "total", 2, 2)
    with pytest.raises(ParameterError, match="one of inter, intra"):
        benchmarks.profiled(MACHINE, "node-aware", "gather", 2, 2)


HEADER = "system,nodes,ranks_per_node,collective,algorithm,parameters,bytes_per_pair,seconds_min,phase,source\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "columns"),
        (HEADER, "at least one"),
        (HEADER + "D,2,4,alltoall,flat,,8,,total,x\n", "row 2, seconds_min: expected a number between 1e-09 and 10000"),
        (HEADER + "D,2,4,alltoall,flat,,8,12000,total,x\n", "row 2, seconds_min"),
        (HEADER + "D,2,4,alltoall,flat,,8,1e-5,total,x\nD,0,4,alltoall,flat,,8,1,total,x\n", "row 3, nodes"),
        (HEADER + "D,2,4,alltoall,flat,,x,1e-5,total,x\n", "row 2, bytes: expected"),
    ],
)
def test_rows_that_are_wrong(text: str, words: str, tmp_path: Path) -> None:
    """Named by file and row."""
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(MachineError, match=r"rows\.csv") as caught:
        read(path)
    assert words in str(caught.value)


def test_pooled_rows() -> None:
    """The least time of jobs; a gather is one schedule, whatever algorithm it was timed in."""
    row = Measurement("D", 2, 4, "alltoall", "hierarchical", ("leaders=1",), 8, 2.0, "gather", "a")
    other = row._replace(algorithm="multileader-node-aware", seconds=1.0, source="b")
    [found] = pooled([row, other])
    assert (found.seconds, found.worst) == (1.0, 2.0)
    assert len(pooled([row, other._replace(size=16)])) == 2


# ---- predictions


def test_the_fastest_first() -> None:
    """Of each size; what cannot run is said to be left out."""
    found, refused = forecast(candidates("allgather"), parse_layout("3x3"), get_machine("generic-100g"), [8, 65536])
    for listed in by_size(found).values():
        times = [each.seconds for each in listed]
        assert times == sorted(times)
        assert all(each.low < each.seconds < each.high and each.bound in BOUNDS for each in listed)
        assert all(np.isclose(sum(each.parts), each.seconds) for each in listed)
    assert {each.algorithm for each in refused} >= {"neighbor_exchange"}


def test_the_command(tmp_path: Path) -> None:
    """A table, a record, a picture; what is wrong is said without a traceback."""
    run, record, picture = CliRunner(), tmp_path / "record.jsonl", tmp_path / "picture.svg"
    given = ["predict", "alltoall", "-l", "4x4", "-s", "8:4K:8", "--json", str(record), "--plot", str(picture)]
    shown = run.invoke(main, given)
    assert shown.exit_code == 0 and "fastest" in shown.output and "bound by" in shown.output
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert {line["size"] for line in lines} == {8, 64, 512, 4096} and lines[0]["layout"] == "4x4"
    assert "<svg" in picture.read_text()
    flows = run.invoke(main, ["predict", "alltoall", "-l", "2x3", "-s", "64", "--fluid", "--json", str(record)])
    slower = [json.loads(line)["seconds"] for line in record.read_text().splitlines()[len(lines) :]]
    assert flows.exit_code == 0 and min(slower) > 0
    many = run.invoke(main, ["predict", "alltoall", "-l", "64x64", "--fluid"])
    assert many.exit_code == 1 and "at most 2048 ranks" in many.output
    goal = tmp_path / "ring.goal"
    drawn = run.invoke(main, ["timeline", "allgather", "ring", "-l", "2x2", "--goal", str(goal)])
    assert drawn.exit_code == 0 and goal.read_text().startswith("num_ranks 4")
    only = run.invoke(main, ["predict", "allgather", "-a", "ring", "-a", "bruck", "--every"])
    assert only.exit_code == 0 and "recursive" not in only.output
    for wrong, words in (
        (["-m", "nowhere"], "expected a file, or one of"),
        (["-l", "2x"], "layout"),
        (["-s", "0"], "at least one byte"),
        (["-a", "circular"], "circular"),
        (["--plot", "times.xyz"], "--plot: expected a name that ends in .png, .svg, .pdf, got times.xyz"),
        (["-l", "3x1", "-a", "neighbor_exchange"], "neighbor_exchange"),
    ):
        failed = run.invoke(main, ["predict", "allgather", *wrong])
        assert failed.exit_code and words in failed.output and "Traceback" not in failed.output


def test_machines_are_shown() -> None:
    run = CliRunner()
    assert "generic-100g" in run.invoke(main, ["machines"]).output
    shown = run.invoke(main, ["machines", "generic-100g"])
    assert shown.exit_code == 0 and "s/B" in shown.output
    assert run.invoke(main, ["machines", "nowhere"]).exit_code == 1
