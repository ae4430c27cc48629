"""calibrate: fits to a CSV file, and what is concluded from times that were measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from hiercoll.cli import main
from hiercoll.errors import MachineError
from hiercoll.model import calibration
from hiercoll.model.calibration import (
    LARGE,
    ROOTED,
    Key,
    Notes,
    Sample,
    Setting,
    analyse,
    curve,
    parted,
)
from hiercoll.model.evaluate import switch
from hiercoll.model.fit import Rows, without_influence
from hiercoll.model.machine import Machine, Parameters, get_machine, parameter_fields
from hiercoll.model.measurements import NEEDED, Measurement, read
from hiercoll.tools.places import Place, caches_of, place_of, sizes_of
from hiercoll.tools.published import predictable

SETTING = Setting("MPICH 5.0.2", "4x8", 4, 4, 8, 2, 4, "", (1 << 20, 32 << 20))
TRUTH = replace(
    Parameters(), domain=0.4e-6, node=1.7e-6, network=3e-6, node_byte=0.2e-9, rendezvous=3.3e-6, eager=4e3,
    network_rendezvous=6e-6, network_eager=2e4, adapter=0.05e-9, root_message=0.6e-6, piece=8e-9, copy_byte=0.25e-9,
)  # fmt: skip

# ---- curves


def times(size: float, found: calibration.Curve) -> float:
    jump = float(switch(np.array(size), found.threshold)) if found.threshold else 0.0
    return found.latency + size * found.byte + found.rendezvous * jump


SIZES = [1, 64, 256, *(1 << power for power in range(9, 21))]


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("threshold", [1500.0, 6000.0, 50e3])
def test_a_jump_is_found(threshold: float, noise: float) -> None:
    """Between the sizes where it is, with what it costs, in spite of noise and of one time that is far off."""
    truth = calibration.Curve(2e-6, 0.05e-9, 5e-6, threshold)
    random = np.random.default_rng(7)
    points = [(size, times(size, truth) * (1 + noise * random.standard_normal())) for size in SIZES]
    points[3] = (points[3][0], points[3][1] * 4)
    found = curve(points)
    assert threshold / 2 <= found.threshold <= 2 * threshold
    assert found.rendezvous == pytest.approx(5e-6, rel=0.25)
    assert found.byte == pytest.approx(0.05e-9, rel=0.2)
    assert found.latency == pytest.approx(2e-6, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_no_jump_is_found_where_there_is_none(seed: int) -> None:
    """Noise is none."""
    random = np.random.default_rng(seed)
    points = [(size, (2e-6 + size * 0.1e-9) * (1 + 0.05 * random.standard_normal())) for size in SIZES]
    found = curve(points)
    assert (found.rendezvous, found.threshold) == (0.0, 0.0)
    assert found.byte == pytest.approx(0.1e-9, rel=0.15)


def test_too_few_points() -> None:
    with pytest.raises(ValueError, match="4 points"):
        curve([(size, 1e-6) for size in SIZES[:4]])


@pytest.mark.parametrize(
    ("one", "together", "expected"),
    [(3.0, 9.0, (1.0, 2.0)), (2.0, 8.0, (0.0, 2.0)), (2.0, 1.0, (2.0, 0.0)), (1.0, 9.0, (0.0, 2.25))],
)
def test_own_and_shared(one: float, together: float, expected: tuple[float, float]) -> None:
    """Of 4; never below 0."""
    assert parted(one, together, 4) == pytest.approx(expected)


# ---- parameters


def sample(key: Key, seconds: float) -> Sample:
    return Sample(key, seconds, seconds, seconds, seconds, seconds, 9)


def made_samples(p: Parameters) -> dict[Key, Sample]:
    """Times by the model's equations, on 4 nodes of 8 ranks."""
    byte = {"domain": p.domain_byte, "socket": p.node_byte, "node": p.node_byte + 2 * p.socket_link}
    byte["network"] = p.network_byte + p.adapter
    found: dict[Key, float] = {}
    for at, each in byte.items():
        jump = (p.network_rendezvous, p.network_eager) if at == "network" else (p.rendezvous, p.eager)
        for size in SIZES:
            found[Key("ping-pong", at, size)] = times(size, calibration.Curve(getattr(p, at), each, *jump))
    far, near = p.network + p.network_rendezvous, p.node + p.rendezvous
    for count in (1, 4, 8):
        found[Key("messages", "network", 1, count)] = 16 * (1e-7 + count * p.adapter_message)
        found[Key("pairs", "network", LARGE, count)] = far + LARGE * (p.network_byte + count * p.adapter)
        found[Key("pairs", "node", LARGE, count)] = near + LARGE * (p.node_byte + 2 * count * p.socket_link)
    wire = 8 * p.adapter * (1 + p.congestion * (1 - 1 / 3))
    found[Key("all nodes", "network", LARGE, 8)] = 3 * (far + LARGE * (p.network_byte + wire))
    for count in (1, 16):
        found[Key("posted", "network", 1, count)] = p.network * (1 + (count - 1) * p.posted)
    first = 2 * p.node + 2 * 6 * p.root_message
    whole = ROOTED * byte["node"] + p.rendezvous
    found[Key("rooted", "node", 1, 7, 1)] = first
    found[Key("rooted", "node", ROOTED, 7, 1)] = first + whole + 6 * ROOTED * p.root_in
    found[Key("rooted", "node", 1, 7, ROOTED)] = first + whole + 6 * ROOTED * p.root_out
    for size in (16 << 10, 256 << 10):
        found[Key("copy", "", size)] = size * p.copy_byte
        found[Key("sum", "", size)] = size * p.reduce_byte
    for size in (8, 64):
        found[Key("pieces", "", size, 1024)] = 1024 * (p.piece + p.line * size / 64 + size * p.copy_byte)
    for count in (1, 8):
        found[Key("copy beyond cache", "", 1 << 26, count)] = (1 << 26) * (p.copy_byte + p.memory + count * p.bus)
    found[Key("first touch", "", 1 << 22, 8)] = 8 * (1 << 22) * p.fresh
    found[Key("flags", "node", 8, 2)] = 2 * p.flag
    return {key: sample(key, seconds) for key, seconds in found.items()}


def test_parameters_from_samples() -> None:
    """Those that made the samples; what samples cannot say is assumed, with a reason."""
    found = analyse(made_samples(TRUTH), SETTING)
    assumed = {"root_large", "root_factor", "root_out_domain", "cache_rank", "cache_socket", "network_small_byte"}
    assert set(found.reasons) == assumed
    for each in fields(Parameters):
        if each.name not in assumed:
            near = 0.3 if each.name in ("eager", "network_eager") else 0.12
            assert found.values[each.name] == pytest.approx(getattr(TRUTH, each.name), rel=near, abs=1e-13), each.name
    assert (found.values["cache_rank"], found.values["cache_socket"]) == (1 << 20, 32 << 20)


def test_parameters_of_one_node() -> None:
    """The network's are the defaults, and assumed; the machine can be read again and says why."""
    network = ("network", "network_byte", "network_rendezvous", "network_eager", "adapter", "adapter_message")
    samples = {key: each for key, each in made_samples(TRUTH).items() if key.level != "network"}
    setting = replace(SETTING, layout="1x8", hosts=1, nodes=1)
    machine = analyse(samples, setting).machine("ours", setting)
    assert set(network) < set(machine.assumed)
    assert all(getattr(machine.parameters, name) == getattr(Parameters(), name) for name in network)
    assert "no second node: adapter, adapter_message" in machine.about
    assert Machine.from_json(machine.to_json()) == machine
    assert (machine.domain, machine.socket) == (2, 4)


def test_parameters_of_one_rank() -> None:
    """Only copies can be measured."""
    samples = {key: each for key, each in made_samples(TRUTH).items() if not key.level and key.amount in (1, 1024)}
    samples[Key("first touch", "", 1 << 22)] = sample(Key("first touch", "", 1 << 22), 1e-3)
    setting = replace(SETTING, layout="1x1", nodes=1, lanes=1)
    found = analyse(samples, setting)
    assert set(found.values) >= {"copy_byte", "piece", "memory", "fresh"}
    assert {"domain", "network", "flag", "posted", "bus", "root_in"} <= set(found.reasons)


def test_a_sample_that_lacks() -> None:
    samples = made_samples(TRUTH)
    del samples[Key("posted", "network", 1, 1)]
    with pytest.raises(MachineError, match="posted network 1 B: expected a sample"):
        analyse(samples, SETTING)


# ---- the file of samples


def test_samples_are_kept(tmp_path: Path) -> None:
    """In a file that a second call goes on from, though its last line was cut off."""
    path = tmp_path / "out.jsonl"
    given = [sample(Key("copy", "", size), size * 1e-9) for size in (10, 20, 30)]
    Notes(path, SETTING).add(given)
    path.write_text(path.read_text()[:-20])
    again = Notes(path, SETTING)
    assert list(again.samples.values()) == given[:2]
    again.add(given[2:])
    assert list(Notes(path, SETTING).samples.values()) == given
    assert not Notes(path, SETTING, fresh=True).samples


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}\n", "row 1: expected samples taken on 4x8"),
        ("not JSON\n", "row 1: expected samples"),
        (None, "layout '4x8', not '2x2'"),
    ],
)
def test_samples_of_something_else(text: str | None, words: str, tmp_path: Path) -> None:
    """Are neither used nor overwritten."""
    path = tmp_path / "out.jsonl"
    Notes(path, SETTING)
    before = path.write_text(text) if text else None
    with pytest.raises(MachineError, match=r"out\.jsonl") as caught:
        Notes(path, SETTING if text else replace(SETTING, layout="2x2"))
    assert words in str(caught.value)
    assert before is None or path.read_text() == text


def test_a_sample_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    Notes(path, SETTING).add([sample(Key("copy"), 1e-6), sample(Key("copy", "", 8), -1.0), sample(Key("flags"), 1e-6)])
    with pytest.raises(MachineError, match=r"row 3: expected a sample, got times that are not positive"):
        Notes(path, SETTING)


# ---- places


def test_places_of_a_host(tmp_path: Path) -> None:
    """Two sockets of two domains of two CPUs, as Linux shows them."""
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology" / "physical_package_id").write_text(f"{cpu // 4}\n")
        (folder / f"node{cpu // 2}").mkdir()
        for level, size, shared in ((2, "1024K", f"{cpu}"), (3, "16M", f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}")):
            cache = folder / "cache" / f"index{level}"
            cache.mkdir(parents=True)
            for name, value in (("level", level), ("type", "Unified"), ("size", size), ("shared_cpu_list", shared)):
                (cache / name).write_text(f"{value}\n")
    assert place_of({5}, tmp_path) == Place(1, 2)
    assert place_of({4, 6}, tmp_path) == Place(1, None)
    assert place_of(range(8), tmp_path) == place_of((), tmp_path) == Place(None, None)
    assert caches_of({5}, tmp_path) == (1 << 20, 32 << 20)
    assert caches_of((), tmp_path) == (0, 0)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(0, 0), (0, 0), (0, 1), (0, 1), (1, 2), (1, 2), (1, 3), (1, 3)], (2, 4)),
        ([(0, 0), (0, 0), (0, 0), (1, 1)], (3, 3)),
        ([(0, 0)] * 4, (4, 4)),
        ([(0, 0), (1, 1), (0, 0), (1, 1)], (0, 0)),
        ([(0, 0), (0, 0), (0, None)], (0, 0)),
        ([(0, 0), (1, 1), (1, 1)], (0, 0)),
    ],
)
def test_sizes_of_domains(places: list[tuple[int, int]], expected: tuple[int, int]) -> None:
    """Where lanes fill them in order; else a reason."""
    *found, why = sizes_of([Place(*each) for each in places])
    assert tuple(found) == expected and bool(why) == (expected == (0, 0))


# ---- fits to a CSV file

Run = Callable[..., Result]


def rows_of(machine: Machine) -> list[Measurement]:
    """What the model says of benchmarks on this machine, as if it were measured."""
    rows = [
        Measurement("made", nodes, 8, "alltoall", name, tokens, size, 1.0, phase, "job")
        for nodes in (2, 4, 8)
        for name, groups, phases in (
            ("node-aware", "groups=1", ("inter", "intra", "total")),
            ("locality-aware", "groups=2", ("inter", "intra", "total")),
            ("hierarchical", "leaders=1", ("gather", "exchange", "scatter", "total")),
            ("multileader-node-aware", "leaders=4", ("gather", "inter", "intra", "scatter", "total")),
        )
        for phase in phases
        for tokens in [(groups,) if phase in ("gather", "scatter") else (groups, "pairwise")]
        for size in (4, 64, 512, 2048, 4096)
    ]
    return [row._replace(seconds=s) for row, s in zip(rows, Rows(machine, rows).seconds(machine), strict=True)]


def write(path: Path, rows: list[Measurement], **changed: Any) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*NEEDED, "seconds_min", "parameters", "source"])
        writer.writeheader()
        for row in rows:
            line = {"ranks_per_node": row.lanes, "bytes_per_pair": row.size, "seconds_min": row.seconds}
            line |= {name: getattr(row, name) for name in ("system", "nodes", "collective", "algorithm", "phase")}
            writer.writerow(line | {"parameters": ";".join(row.parameters), "source": row.source} | changed)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """calibrate, in an empty folder; whatever happens, there is no traceback."""
    monkeypatch.chdir(tmp_path)

    def invoke(*options: str) -> Result:
        result = CliRunner().invoke(main, ["calibrate", *options])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return invoke


FIT = ("--data", "t.csv", "--system", "made", "--domain", "2", "--socket", "4", "-m", "m.json")


def test_a_fit_finds_what_made_the_times(run: Run, tmp_path: Path) -> None:
    """Within a few per cent; all rows, those of more nodes too, are met; what no row tells is named."""
    pytest.importorskip("scipy")
    truth = Machine("made", TRUTH, domain=2, socket=4)
    write(tmp_path / "t.csv", rows_of(truth))
    result = run(*FIT, "--most-nodes", "4")
    assert result.exit_code == 0, result.output
    for words in ("predicted, more than 4 nodes", "multileader-node-aware", "barrier by flags"):
        assert words in result.output
    machine = get_machine(tmp_path / "m.json")
    assert {"flag", "posted", "root_large"} <= set(machine.assumed)
    assert machine.fitted["p90"] < 0.03
    for name in ("domain", "node", "network", "rendezvous", "root_message", "adapter", "copy_byte"):
        assert getattr(machine.parameters, name) == pytest.approx(getattr(TRUTH, name), rel=0.1), name
    far = [row for row in rows_of(truth) if row.nodes == 8]
    assert np.quantile(abs(Rows(machine, far).errors(machine)), 0.9) < 0.05


def test_parameters_without_influence() -> None:
    """No benchmark has flags; all have messages between nodes."""
    machine = Machine("made", TRUTH, domain=2, socket=4)
    silent = without_influence(machine, rows_of(machine))
    assert "flag" in silent and "network" not in silent


def test_what_is_predictable() -> None:
    """Pairwise exchanges, gathers and scatters of algorithms that are known; nothing else."""
    row = Measurement("s", 2, 4, "alltoall", "node-aware", ("groups=1", "pairwise"), 4, 1e-6, "inter", "")
    rooted = row._replace(algorithm="hierarchical", parameters=("leaders=1",), phase="gather")
    others = [
        row._replace(size=8192),
        row._replace(parameters=("groups=1", "nonblocking")),
        row._replace(algorithm="native", parameters=()),
        row._replace(collective="allgather"),
        rooted._replace(phase="total"),
    ]
    found = predictable([row, *others, rooted])
    assert [(each.phase, each.parameters) for each in found] == [("inter", ("groups=1",)), ("gather", ("leaders=1",))]


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (("--system", "another"), {}, "t.csv: system: expected one of made, got another"),
        (("--source", "night"), {}, "t.csv: source: expected the beginning of one of job, got night"),
        (("--most-nodes", "1"), {}, "t.csv: rows: expected some of at most 1 nodes, got none"),
        ((), {"algorithm": "bruck"}, "t.csv: rows: expected some of made with a schedule that the model knows"),
        ((), {"seconds_min": "soon"}, "t.csv: row 2, seconds_min: expected a number"),
        ((), {"seconds_min": "1e9"}, "t.csv: row 2, seconds_min: expected a number between"),
        ((), {"algorithm": "flat", "phase": "total", "parameters": "pairwise"}, "t.csv: rows: expected at least"),
        ((), {"phase": "never", "parameters": "pairwise"}, "t.csv: phase: expected total, or one of"),
        (("--start", "nowhere"), {}, "expected a file, or one of"),
        (("--start", "t.csv"), {}, "t.csv: text: expected JSON"),
        (("--socket", "3"), {}, "--socket: expected a multiple of --domain, 2"),
        (("-m", "no/such.json"), {}, "--machine: expected a file that can be written"),
        (("--data", "none.csv"), {}, "none.csv: file: expected a CSV file"),
        (("--seconds", "1"), {}, "--seconds is for measuring"),
    ],
)
def test_bad_data(run: Run, tmp_path: Path, options: tuple[str, ...], change: dict[str, str], words: str) -> None:
    """Files, rows and options are named, and no machine is written."""
    pytest.importorskip("scipy")
    write(tmp_path / "t.csv", rows_of(Machine("made", TRUTH, domain=2, socket=4)), **change)
    result = run(*FIT, *options)
    assert result.exit_code in (1, 2) and words in " ".join(result.output.split()), result.output
    assert not (tmp_path / "m.json").exists()


def test_contradictions(tmp_path: Path) -> None:
    """Of one source: the same thing does not take 200 times as long. Of two, it may."""
    row = Measurement("s", 2, 4, "alltoall", "flat", ("pairwise",), 4, 1e-6, "total", "monday")
    path = tmp_path / "t.csv"
    write(path, [row, row._replace(seconds=9e-5), row._replace(seconds=2e-4, source="tuesday")])
    assert len(read(path)) == 3
    write(path, [row, row._replace(size=8), row._replace(seconds=2e-4)])
    with pytest.raises(MachineError, match=r"row 4, seconds_min: expected about 1e-06, as in row 2 .*, got 0\.0002"):
        read(path)


def test_options_that_need_data(run: Run) -> None:
    assert "--system is for use with --data" in run("--system", "x", "-m", "m.json").output
    assert "--data needs --system" in run("--data", "x", "-m", "m.json").output


def test_without_scipy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said before anything is read."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(*FIT)
    assert result.exit_code == 1 and "pip install 'hiercoll[model]'" in result.output


def test_every_parameter_says_what_tells_it() -> None:
    assert all({"unit", "meaning", "measured"} <= set(each.metadata) for each in parameter_fields())
    assert json.dumps(asdict(Parameters()))
