"""Deadlines without MPI: who is blamed, what is written, what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from hiercoll import CollectiveTimeout
from hiercoll.cli import main
from hiercoll.errors import DiagnosisError
from hiercoll.runtime.watch import NUMBER, RECORDED, SECONDS, Entry, Watch
from hiercoll.tools.diagnosis import diagnose


class Pending(NamedTuple):
    """As in engines, which need MPI."""

    step: int
    verb: str
    peer: int


class Stuck:
    """A plan that completes after some looks, or never."""

    def __init__(self, name: str, looks: float, *waits: Pending) -> None:
        self.name, self.looks, self.waits = name, looks, list(waits)
        self.entry: Entry | None = None

    def test(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def pending(self) -> Any:
        return self.waits


def watch(rank: int, timeout: float = 0.05) -> tuple[Watch, list[str]]:
    expired: list[str] = []
    return Watch(timeout, "abcdef0123456789", rank, (0, 0, 1, 1), (4, 5, 6, 7), expired.append), expired


def run(made: Watch, plan: Stuck) -> None:
    plan.entry = made.begin(plan)
    made.complete(plan)


def test_in_time() -> None:
    """Calls are recorded, the last hundred of them."""
    made, expired = watch(0)
    for number in range(RECORDED + 20):
        run(made, Stuck(f"alltoall {number}", 5))
    assert not expired and len(made.record) == RECORDED
    assert made.record[-1][NUMBER] == RECORDED + 20 and made.record[0][NUMBER] == 21
    assert all(entry[SECONDS] is not None for entry in made.record)


def test_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says who waits for whom, where and how long; the record is on disk."""
    monkeypatch.setenv("HIERCOLL_DIAG_DIR", str(tmp_path / "made"))
    made, expired = watch(1)
    run(made, Stuck("allgather ring", 1))
    stuck = Stuck("alltoall bruck radix=2", float("inf"), Pending(7, "a receive from", 2), Pending(9, "a send to", 3))
    expected = (
        r"rank 1 waits in alltoall #2 bruck radix=2 step 7 for a receive from rank 2 \(node 1\); a send to rank 3"
    )
    with pytest.raises(CollectiveTimeout, match=expected):
        run(made, stuck)
    assert expired == ["alltoall bruck radix=2"]
    about = json.loads((tmp_path / "made" / "hiercoll-abcdef01-5.json").read_text())
    assert about["pending"][0] == {"step": 7, "verb": "a receive from", "peer": 2}
    assert [entry["name"] for entry in about["record"]] == ["allgather ring", "alltoall bruck radix=2"]


def reported(folder: Path, monkeypatch: pytest.MonkeyPatch, calls: dict[int, tuple[int, str, int]]) -> list[str]:
    """The diagnosis of ranks that are in their n-th call, of this name, and wait for a rank."""
    monkeypatch.setenv("HIERCOLL_DIAG_DIR", str(folder))
    for rank, (number, name, waits) in calls.items():
        made, _ = watch(rank)
        for _ in range(number - 1):
            run(made, Stuck("before", 1))
        with pytest.raises(CollectiveTimeout):
            run(made, Stuck(name, float("inf"), Pending(3, "a receive from", waits)))
    return diagnose(folder)


def test_a_silent_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = reported(tmp_path, monkeypatch, dict.fromkeys((0, 1, 3), (3, "alltoall bruck", 2)))
    assert lines[0] == "communicator of 4 ranks, 3 of which have reported:"
    assert any("rank 2 (world rank 6, node 1): SILENT" in line and "ranks 0, 1, 3" in line for line in lines)
    assert sum("in #3 alltoall bruck step 3, waits for a receive from rank 2" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("call", "word"),
    [((3, "allgather ring", 0), "IN ANOTHER CALL"), ((2, "alltoall bruck", 0), "BEHIND"), ((4, "x", 0), "AHEAD")],
)
def test_a_rank_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[int, str, int], word: str
) -> None:
    calls = {0: (3, "alltoall bruck", 2), 1: (3, "alltoall bruck", 2), 3: (3, "alltoall bruck", 2), 2: call}
    lines = reported(tmp_path, monkeypatch, calls)
    assert any(line.startswith(f"  rank 2: {word}: #{call[0]} {call[1]}") for line in lines)
    assert not any("SILENT" in line for line in lines)


def test_all_in_the_same_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = reported(tmp_path, monkeypatch, dict.fromkeys(range(4), (1, "alltoall bruck", 0)))
    assert "HIERCOLL_CHECK=1" in lines[-1]


def test_nothing_to_diagnose(tmp_path: Path) -> None:
    """Typed errors; the command prints no traceback."""
    with pytest.raises(DiagnosisError, match="no flight records"):
        diagnose(tmp_path)
    (tmp_path / "hiercoll-x-1.json").write_text("{}")
    with pytest.raises(DiagnosisError, match="not a flight record"):
        diagnose(tmp_path)
    done = CliRunner().invoke(main, ["diagnose", str(tmp_path)])
    assert done.exit_code == 1 and "Error" in done.output and "Traceback" not in done.output
