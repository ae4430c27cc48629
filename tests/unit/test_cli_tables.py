"""The commands about tables: show, check, merge, diff, explain."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from test_tables import ENTRY, LANE, MPI, PAIRWISE

from hiercoll.cli import main
from hiercoll.cli.tune import _Notes
from hiercoll.collectives import NATIVE
from hiercoll.learned import JobFile, Lesson, setting_of
from hiercoll.tables import PLAN, Choice, Entry, Table, Variant, dump, load
from hiercoll.topology import parse_layout
from hiercoll.tuning.search import Selection


def hiercoll(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "table.json"
    file.write_text(dump(Table((ENTRY,))), encoding="utf-8")
    return file


def test_show(path: Path) -> None:
    said = hiercoll("table", "show", path)
    assert said.exit_code == 0
    for text in (f"alltoall on 2x4 with {MPI}", "bruck", "native", "grouped", "2.00x", "2.50x", "8K"):
        assert text in said.output


def test_check(path: Path, tmp_path: Path) -> None:
    assert hiercoll("table", "check", path).output == f"{path}: good, 1 entries\n"
    broken = tmp_path / "broken.json"
    broken.write_text(path.read_text().replace('"version": 1', '"version": 7'))
    said = hiercoll("table", "check", path, broken, tmp_path / "none.json")
    assert said.exit_code == 1
    assert "broken.json: version: expected 1" in said.output
    assert "none.json: file: expected a readable table, got No such file" in said.output


def test_merge(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(dump(Table((replace(ENTRY, nodes=(8, 8)), replace(ENTRY, collective="allgather", figures=(),
                                choices=(Choice(1, Variant(NATIVE)),))))))  # fmt: skip
    merged = tmp_path / "merged.json"
    said = hiercoll("table", "merge", path, other, "-o", merged)
    assert said.exit_code == 0 and "3 entries" in said.output
    assert len(load(merged).entries) == 3


def test_diff(path: Path, tmp_path: Path) -> None:
    assert hiercoll("table", "diff", path, path).exit_code == 0
    other = tmp_path / "other.json"
    choices = (ENTRY.choices[0], Choice(100, PAIRWISE), Choice(5000, LANE))
    other.write_text(dump(Table((replace(ENTRY, choices=choices), replace(ENTRY, memory="cuda")))))
    said = hiercoll("table", "diff", path, other)
    assert said.exit_code == 1
    assert "from 100: native | pairwise" in said.output
    assert f"cuda memory: only in {other}" in said.output


def test_explain(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("HIERCOLL_TABLE", raising=False)
    said = hiercoll("explain", "alltoall", "--size", "64", "--layout", "2x4", "--table", path)
    assert "alltoall of 64 on 2x4: bruck" in said.output
    assert f"by {path}: measured for 2x4" in said.output
    assert said.output.count("\n") >= 5  # the runners-up
    monkeypatch.setenv("HIERCOLL_TABLE", str(path))
    assert "nearest entry, 2x4" in hiercoll("explain", "alltoall", "--size", "64K", "--layout", "64x4").output
    none = hiercoll("explain", "allgather", "-s", "64K", "-l", "64x4")
    assert none.exit_code == 0 and "64x4: native\nby default: no table for allgather" in none.output
    model = hiercoll("explain", "allgather", "-s", "64K", "-l", "64x4", "--table", "model")
    assert model.exit_code == 0 and "by the cost model" in model.output


def test_explain_says_why_the_fastest_is_not_taken(tmp_path: Path) -> None:
    """Where it was measured: more than its median counts."""
    faster, said = replace(ENTRY, choices=(Choice(0, PAIRWISE),)), "not the first of these: "
    (tmp_path / "table.json").write_text(dump(Table((faster,))))
    asked = ("explain", "alltoall", "-s", "64", "--table", tmp_path / "table.json")
    assert f"{said}it was not faster beyond chance" in hiercoll(*asked, "-l", "2x4").output
    assert f"{said}these are times of calls" in hiercoll(*asked, "-l", "2x4", "--plan").output
    assert said not in hiercoll(*asked, "-l", "64x4").output  # the model's


@pytest.mark.parametrize(
    ("collective", "due"),
    [
        ("allgatherv", "allgatherv of 64 on 2x4: ring\\nby .*table.json: measured for 2x4"),  # by allgather's table
        ("gatherv", r"gatherv of 64 on 2x4: native\nby its nature: the root alone knows.*linear, .*aggregate"),
        ("alltoallw", "alltoallw of 64 on 2x4: native\nby no table for alltoallv"),
    ],
)
def test_explain_blocks_that_differ(tmp_path: Path, collective: str, due: str) -> None:
    """What has no table of its own goes by another's, or says why it has none."""
    entry = Entry("allgather", MPI, "host", (4, 4), "block", (Choice(0, Variant("ring")),))
    (tmp_path / "table.json").write_text(dump(Table((entry,))))
    said = hiercoll("explain", collective, "-s", "64", "-l", "2x4", "--table", tmp_path / "table.json")
    assert said.exit_code == 0 and re.match(due, said.output), said.output


@pytest.mark.parametrize(
    ("collective", "due"), [("allgatherv", "the table of allgather goes for it"), ("scatterv", "the root alone knows")]
)
def test_tune_says_what_has_no_table(collective: str, due: str) -> None:
    said = hiercoll("tune", collective)
    assert said.exit_code == 1 and due in " ".join(said.output.split()), said.output


def test_explain_without_a_size(tmp_path: Path) -> None:
    """Of what takes no buffers there is one size; others need one."""
    entry = Entry("barrier", MPI, "host", (4, 4), "block", (Choice(0, Variant("hierarchical")),))
    (tmp_path / "table.json").write_text(dump(Table((entry,))))
    asked = ("-l", "2x4", "--table", tmp_path / "table.json")
    for size in ([], ["-s", "4K"]):
        assert hiercoll("explain", "barrier", *asked, *size).output.startswith("barrier on 2x4: hierarchical\n")
    missing = hiercoll("explain", "alltoall", *asked)
    assert missing.exit_code == 2 and "Missing option '--size'" in missing.output


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Keeps lessons, as jobs do, in the user's folder; there is no table."""
    monkeypatch.setenv("HIERCOLL_LEARNED", str(tmp_path / "learned"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    for name in ("HIERCOLL_TABLE", "HIERCOLL_LEARN"):
        monkeypatch.delenv(name, raising=False)

    def keep(lesson: Lesson, layout: str = "2x4", mpi: str = MPI) -> None:
        job = JobFile(setting_of(mpi, parse_layout(layout), "host", "Ethernet 25"))
        job.keep(lesson)
        job.flush()

    return keep


LESSON = Lesson("alltoall", 64, False, LANE, 6.1e-5, 1e-4, 324, "2026-11-22T10:00:00+00:00")


def test_explain_what_was_learned(kept: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    kept(LESSON)
    asked = ("explain", "alltoall", "-l", "2x4", "-s")
    said = hiercoll(*asked, "70").output  # learned together with 64
    assert said.startswith("alltoall of 70 on 2x4: grouped")
    assert f"learned on 2026-11-22 from 324 calls ({MPI}, Ethernet 25), in 0.61 of native's time" in said
    assert "without that: native\nby default: no table" in said
    assert "0.61" in hiercoll(*asked, "64", "--plan").output
    for other in (["90"], ["64", "--in-place"], ["64", "--mpi", "Open MPI 5.0.11"], ["64", "-l", "4x2"]):
        assert hiercoll(*asked, *other).exit_code == 0 and "learned" not in hiercoll(*asked, *other).output
    kept(LESSON._replace(date="2026-11-23T10:00:00+00:00", variant=Variant(NATIVE)))
    said = hiercoll(*asked, "64").output
    assert "2x4: native\nlearned on 2026-11-23" in said and "nothing was faster" in said
    kept(LESSON._replace(date="2026-11-24", untried=(Variant("pairwise"), Variant("bruck", {"radix": 2}))))
    assert "learned so far, with 2 more to be tried, on 2026-11-24 from 324 calls" in hiercoll(*asked, "64").output
    monkeypatch.setenv("HIERCOLL_LEARN", "0")
    assert "learned" not in hiercoll(*asked, "64").output


def test_explain_a_table_before_what_was_learned(kept: Callable[..., None], tmp_path: Path) -> None:
    kept(LESSON)
    entry = Entry("alltoall", MPI, "host", (4, 4), "block", (Choice(0, Variant("pairwise")),))
    (tmp_path / "table.json").write_text(dump(Table((entry,))))
    said = hiercoll("explain", "alltoall", "-l", "2x4", "-s", "64", "--table", str(tmp_path / "table.json")).output
    assert said.startswith("alltoall of 64 on 2x4: pairwise") and "learned" not in said


@pytest.mark.parametrize(("order", "due"), [("", "ring"), ("any", "ring"), ("fixed", "")])
def test_explain_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, due: str) -> None:
    """Sums of floats keep their bits by a table of the layout, too, which has one choice for a size; but it does not
    serve where another order is asked for."""
    entry = Entry("allreduce", MPI, "host", (4, 4), "block", (Choice(0, Variant("ring")),))
    (tmp_path / "table.json").write_text(dump(Table((entry,))))
    monkeypatch.setenv("HIERCOLL_ORDER", order)
    asked = ("explain", "allreduce", "-l", "2x4", "-s", "64", "--table", str(tmp_path / "table.json"))
    first = hiercoll(*asked).output.splitlines()[0]
    assert first.split(": ")[1].startswith(due) and not (order == "fixed" and first.endswith((" native", " ring")))
    assert ("always the same bits" in first) == (order != "any")
    if not order:
        assert hiercoll(*asked, "--exact").output.startswith("allreduce of 64 on 2x4: ring")


def test_explain_what_was_learned_of_any_sizes(kept: Callable[..., None]) -> None:
    variant = Variant("aggregate", {"form": "share", "window": 4})
    kept(LESSON._replace(collective="alltoallv", size=0, variant=variant))
    asked = ("explain", "alltoallv", "-l", "2x4", "-s", "640")
    assert "learned on" in hiercoll(*asked).output and "learned on" not in hiercoll(*asked, "--plan").output


def test_explain_wants_to_know_with_which_library_it_was_learned(kept: Callable[..., None]) -> None:
    kept(LESSON)
    kept(LESSON._replace(seconds=5e-5), mpi="Open MPI 5.0.11")
    asked = ("explain", "alltoall", "-l", "2x4", "-s", "64")
    assert hiercoll(*asked).exit_code == 1
    assert "0.50 of" in hiercoll(*asked, "--mpi", "Open MPI 5.0.11").output


def test_plans_are_shown_and_explained(tmp_path: Path) -> None:
    persistent = Variant(NATIVE, {"form": "persistent"})
    held = ENTRY.figures[1]._replace(variant=persistent, timing=PLAN, median=1.6e-5)
    file = tmp_path / "plans.json"
    entry = replace(ENTRY, plans=(Choice(1, persistent),), figures=(*ENTRY.figures, held))
    file.write_text(dump(Table((entry,))), encoding="utf-8")
    said = hiercoll("table", "show", file).output
    assert "held plans, one at a time" in said and "native form=persistent" in said and "1.25x" in said
    said = hiercoll("explain", "alltoall", "-s", "64", "-l", "2x4", "--table", file, "--plan").output
    assert "alltoall of 64 on 2x4: native form=persistent" in said


def test_tables_of_an_older_version(tmp_path: Path) -> None:
    """They can be used; that they were made from other timings is said."""
    file = tmp_path / "old.json"
    data = json.loads(dump(Table((ENTRY,))))
    for figure in data["entries"][0]["figures"]:
        del figure["timing"], figure["ranked"]
    file.write_text(json.dumps(data))
    for command in ("check", "show"):
        said = hiercoll("table", command, file)
        assert said.exit_code == 0 and "made from held plans in a row: tune again" in said.output


def test_explain_wants_to_know_the_library(path: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.json"
    both.write_text(dump(Table((ENTRY, replace(ENTRY, mpi="Open MPI 5.0.11")))))
    said = hiercoll("explain", "alltoall", "-s", "64", "-l", "2x4", "--table", both)
    assert said.exit_code == 1 and "--mpi: expected one of" in said.output
    assert hiercoll("explain", "alltoall", "-s", "64", "-l", "2x4", "--table", both, "--mpi", MPI).exit_code == 0


def test_broken_table_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[]")
    for arguments in (("table", "show"), ("table", "merge", "-o", tmp_path / "o.json")):
        said = hiercoll(*arguments, tmp_path / "t.json")
        assert said.exit_code == 1 and "t.json: file: expected an object" in said.output
        assert "Traceback" not in said.output


def test_notes_of_an_interrupted_run(tmp_path: Path) -> None:
    """What was noted is found again in the same setting, without a line that was cut off."""
    about = {"mpi": MPI, "layout": "2x4", "memory": "host", "hiercoll": "0.1.0", "ranks": 8}
    path = tmp_path / "table.json.part"
    result = Selection(64, (ENTRY.choices[0].variant,), (), ENTRY.figures[:2])
    notes = _Notes(path, about, fresh=False)
    notes.add("alltoall", result)
    with path.open("a") as file:
        file.write('{"collective": "alltoall", "size": 12')
    assert _Notes(path, about, fresh=False).done("alltoall") == {64: result}
    assert _Notes(path, about, fresh=False).done("allgather") == {}
    assert _Notes(path, {**about, "layout": "4x2"}, fresh=False).done("alltoall") == {}
    _Notes(path, about, fresh=False).add("alltoall", result)
    assert _Notes(path, about, fresh=True).done("alltoall") == {}
    assert json.loads(path.read_text()) == about
    notes.remove()
    assert not path.exists()
