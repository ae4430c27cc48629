"""calibrate on real communicators: machines are written, interrupted runs go on, errors reach all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import WORLD

from hiercoll.cli import main
from hiercoll.errors import HiercollError
from hiercoll.model.calibration import Key, Sample
from hiercoll.model.machine import Machine, get_machine
from hiercoll.tools import calibrating
from hiercoll.tools.calibrating import Calibration

pytestmark = pytest.mark.ranks([2, 4])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """On virtual nodes, and with copies that take little memory."""
    monkeypatch.setenv("HIERCOLL_NODES", "2x1" if WORLD.size == 2 else "2x2")
    monkeypatch.setattr(calibrating, "MOST_BEYOND", 8 << 20)


def calibrate(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> Result:
    world = WORLD.Dup()
    monkeypatch.setattr("hiercoll.cli.calibrate.world", lambda: world)
    out, machine = folder / "out.jsonl", folder / "machine.json"
    options = ("--out", str(out), "--machine", str(machine), "--seconds", "0.01", *options)
    done = CliRunner().invoke(main, ["calibrate", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    WORLD.Barrier()
    world.Free()
    return done


def check(machine: Machine) -> None:
    """Two nodes, and what only three show is assumed."""
    assert not {"network", "posted", "copy_byte", "piece", "fresh"} & set(machine.assumed)
    assert all(getattr(machine.parameters, name) > 0 for name in ("network", "copy_byte", "piece", "fresh"))
    assert {"congestion", "socket_link", "root_large"} <= set(machine.assumed)
    assert ("flag" in machine.assumed) == (WORLD.size == 2)
    assert "no third node: congestion" in machine.about


def test_interrupted_and_gone_on(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What was measured is not measured again; a line that was cut off is. A third call measures nothing."""
    out, run, groups = folder / "out.jsonl", Calibration.run, []

    def fail(self: Calibration, keys: Sequence[Key]) -> list[Sample]:
        groups.append(tuple(keys))
        if len(groups) == 3:
            raise HiercollError("interrupted")
        return run(self, keys)

    monkeypatch.setattr(Calibration, "run", fail)
    done = calibrate(monkeypatch, folder)
    assert done.exit_code == 1 and ("interrupted" in done.output) == (WORLD.rank == 0)
    assert not (folder / "machine.json").exists()
    first = out.read_text().splitlines()
    assert len(first) == 1 + sum(map(len, groups[:2]))
    WORLD.Barrier()
    if WORLD.rank == 0:
        out.write_text("\n".join(first)[:-30])
    WORLD.Barrier()
    before = groups[:2]
    done = calibrate(monkeypatch, folder)
    assert done.exit_code == 0, done.output
    assert before[0] not in groups[3:] and before[1] in groups[3:]
    lines = out.read_text().splitlines()
    assert lines[: len(first) - 1] == first[:-1]
    check(get_machine(folder / "machine.json"))
    count = len(groups)
    assert calibrate(monkeypatch, folder).exit_code == 0
    assert len(groups) == count and out.read_text().splitlines() == lines
    for line in lines[1:]:
        if line.endswith("}"):
            sample = Sample.of(json.loads(line))
            assert sample.least <= sample.q1 <= sample.median <= sample.q3 <= sample.most


def test_errors_reach_all_ranks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Before anything is measured: a machine that cannot be written, samples of something else."""
    for options, words in (
        (("--machine", str(folder / "no" / "m.json")), "--machine: expected a file that can be written"),
        (("--domain", "3", "--socket", "4"), "--socket: expected a multiple of --domain, 3"),
        (("--out", __file__), "test_calibrate.py: row 1: expected samples taken on"),
        (("--out", str(folder)), "is a directory"),
    ):
        done = calibrate(monkeypatch, folder, *options)
        assert done.exit_code in (1, 2), done.output
        assert WORLD.rank or words in " ".join(done.output.split())


@pytest.mark.ranks([4])
def test_domains_as_told(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Ranks of one node in two sockets of two, as options say: each level is measured, and the link between sockets."""
    monkeypatch.setenv("HIERCOLL_NODES", "1x4")
    done = calibrate(monkeypatch, folder, "--domain", "1", "--socket", "2")
    assert done.exit_code == 0, done.output
    machine = get_machine(folder / "machine.json")
    assert (machine.domain, machine.socket) == (1, 2)
    assert not {"socket", "node", "socket_link", "root_in", "flag"} & set(machine.assumed)
    assert {"domain", "network", "adapter", "congestion"} <= set(machine.assumed)
