"""docs/performance.md says what the records say, and nothing else; the report reads fresh records, and can fail."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hiercoll.tables import Choice, Entry, Figure, Table, Variant, dump

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
NATIVE, AUTO, CONTROL = Variant("native"), Variant("auto"), Variant("control")
SHARE = Variant("grouped", {"form": "share"}, "staged:4")


def load() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("figures_report", ROOT / "scripts" / "figures_report.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["figures_report"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = load()


@pytest.mark.parametrize("name", report.SECTIONS)
def test_the_page_is_what_the_records_yield(name: str) -> None:
    text = report.section(name, ROOT / "docs" / "lab")
    assert len(text.splitlines()) > 4
    page = PAGE.read_text(encoding="utf-8")
    assert report.replaced(page, name, text) == page


def test_no_figures_elsewhere() -> None:
    """Nothing outside of the marks looks like a measurement, here and in the README."""
    page = PAGE.read_text(encoding="utf-8")
    for name in report.SECTIONS:
        page = report.replaced(page, name, "")
    page += (ROOT / "README.md").read_text(encoding="utf-8")
    measured = re.compile(r"\d[\d.,]*\s*(us|ms|µs|x|times|fold|GB/s|MB/s)\b")
    found = [match[0] for match in measured.finditer(page)]
    assert found == []


def test_links_of_the_page_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target


def lines(timing: str, size: int, gain: float, chosen: Variant = SHARE) -> list[dict[str, Any]]:
    """Records as bench writes them, of native, the control, auto and what it chose."""
    about = {"collective": "alltoall", "size": size, "timing": timing, "layout": "4x8", "hosts": 4,
             "mpi": "MPICH 5.0.2", "date": "2026-01-31T00:00:00+00:00", "mpi4py": "4", "python": "3",
             "processor": "x", "system": "y", "samples": 20, "clear": 0, "bound": 4e-4,
             "q1": 0.0, "q3": 0.0}  # fmt: skip
    found = []
    for subject, ratio in ((NATIVE, 1.0), (CONTROL, 1.0), (AUTO, gain), (chosen, gain * 1.1)):
        gains = {"gain": ratio, "gain_low": 0.99 * ratio, "gain_high": 1.01 * ratio, "median": 1e-3 / ratio}
        auto = {"chosen": chosen.record()} if subject == AUTO else {"chosen": None}
        found.append({**about, **gains, "subject": subject.record(), **auto})
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fresh records, one with a transport, of both timings; auto loses at 64 B, where it is native."""
    records = []
    for timing in ("single", "row"):
        for collective in ("alltoall", "allgather"):
            for size, gain, chosen in ((8, 2.0, SHARE), (64, 0.8, NATIVE), (4096, 1.5, SHARE)):
                records += [line | {"collective": collective} for line in lines(timing, size, gain, chosen)]
    (tmp_path / "bench-mpich-4x8.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    figures = (Figure(8, NATIVE, 1e-3, 1e-3, 1e-3, 8), Figure(64, NATIVE, 1e-3, 1e-3, 1e-3, 8))
    entries = [Entry(name, "MPICH 5.0.2", "host", (8,) * 4, "block", (Choice(1, NATIVE),), figures)
               for name in ("alltoall", "allgather")]  # fmt: skip
    (tmp_path / "table-mpich-4x8.json").write_text(dump(Table(tuple(entries))))
    (tmp_path / "commit").write_text("abcdef0\n")
    return tmp_path


def test_fresh_records(folder: Path) -> None:
    text = report.section("lab", folder)
    assert "commit abcdef0" in text and "grouped form=share staged:4" in text
    assert (
        "| single: never slower than native by more than 5 %, beyond the noise | slower at 2 of 6 points | missed |"
        in text
    )
    assert "| single: alltoall on 4x8, geometric mean 1.7 | 1.34 | missed |" in text
    assert "| 64 | 1000 | 1250 | native | 0.80 (0.79 to 0.81) | 1.00 (0.99 to 1.01) | 400 | - |" in text
    assert "At 2 of them the call *is* native" in text and "| 4K * |" in text
    rows = [line for line in text.splitlines() if line.startswith(("| single: ", "| row: "))]
    missed = [row.endswith("| missed |") for row in rows]
    assert missed == sorted(missed, reverse=True) and True in missed  # misses come first


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "bench-mpich-4x8.jsonl").unlink(), "no bench-"),
        (lambda folder: drop(folder, "auto"), "no record of auto"),
        (lambda folder: drop(folder, "control"), "no record of control"),
        (lambda folder: drop(folder, "row"), "no lab figures of public calls, in a row"),
    ],
)
def test_what_is_missing_is_an_error(folder: Path, spoil: Callable[[Path], None], problem: str) -> None:
    spoil(folder)
    with pytest.raises(report.MissingError, match=problem):
        report.section("lab", folder)


def drop(folder: Path, word: str) -> None:
    """Take away the records of an algorithm or a timing."""
    file = folder / "bench-mpich-4x8.jsonl"
    kept = [line for line in file.read_text().splitlines()
            if json.loads(line)["subject"]["algorithm"] != word and json.loads(line)["timing"] != word]  # fmt: skip
    file.write_text("\n".join(kept))


def test_the_command_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a record, or a place for a section, is missing."""
    monkeypatch.setattr(sys, "argv", ["figures_report.py", str(folder)])
    with pytest.raises(SystemExit, match=r"no native-\*.jsonl"):
        report.main()
    page = folder / "page.md"
    page.write_text("no marks")
    monkeypatch.setattr(sys, "argv", ["figures_report.py", str(folder), "--into", str(page)])
    with pytest.raises(SystemExit, match="no marks for lab"):
        report.main()
    assert page.read_text() == "no marks"
