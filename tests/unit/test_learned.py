"""What jobs have learned: what is kept can be read, nothing on disk is an error, no job harms another."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from hiercoll import folders, learned, settings
from hiercoll.algorithms import REGISTRY, get_algorithm
from hiercoll.cli import main
from hiercoll.errors import LearnedWarning
from hiercoll.learned import (
    MOST_BYTES,
    MOST_FILES,
    JobFile,
    Lesson,
    Setting,
    fabric,
    forget,
    gaining_ranks,
    job_file,
    known_ranks,
    now,
    of_this_job,
    read,
    read_all,
    setting_of,
    settled_ranks,
    table_of,
)
from hiercoll.model.adapters import Adapter
from hiercoll.tables import NATIVE_VARIANT, Choice, Variant, dump, load, parse
from hiercoll.topology import Topology, parse_layout
from hiercoll.tuner import decide

MPI = "MPICH 5.0.2"
SETTING = Setting(MPI, "2x4", "host", "InfiniBand 200 x4")


def variant(algorithm: str, collective: str = "alltoall", **params: int | str) -> Variant:
    return Variant(algorithm, get_algorithm(collective, algorithm).resolve(params))


BRUCK, PAIRWISE = variant("bruck"), variant("pairwise")
LESSON = Lesson("alltoall", 64, False, BRUCK, 1e-5, 2e-5, 40, "2026-11-22T10:00:00+00:00")


@pytest.fixture(autouse=True)
def first_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """As in a process that has warned of nothing; and what a test does not expect is found."""
    monkeypatch.setattr(folders, "_warned", set())
    yield
    assert "LearnedWarning" not in capsys.readouterr().err  # where warnings are errors, they are printed instead


def keep(folder: Path, *lessons: Lesson, setting: Setting = SETTING) -> Path:
    job = JobFile(setting, folder)
    for lesson in lessons:
        job.keep(lesson)
    job.flush()
    assert job.path is not None
    return job.path


def known(folder: Path, setting: Setting = SETTING) -> list[Lesson]:
    return list(read(setting, folder).values())


def by_key(*lessons: Lesson) -> learned.Lessons:
    return {lesson.key: lesson for lesson in lessons}


def files(folder: Path, setting: Setting = SETTING) -> list[str]:
    return sorted(os.listdir(folder / setting.folder))


# ---- settings


def test_settings_name_the_layout() -> None:
    assert setting_of(MPI, parse_layout("3+5:cyclic"), "cuda", "") == Setting(MPI, "3+5:cyclic", "cuda", "")
    assert setting_of(MPI, parse_layout("2x4"), "host", "") == Setting(MPI, "2x4", "host", "")


def test_irregular_layouts_are_told_apart() -> None:
    one, other = (setting_of(MPI, Topology(nodes), "host", "") for nodes in ((0, 1, 1, 0, 0, 1), (0, 1, 1, 0, 1, 0)))
    assert one != other and one.folder != other.folder
    assert all(re.fullmatch(r"2x3:irregular=\w{12}", each.layout) and each.ranks == 6 for each in (one, other))
    again = setting_of(MPI, Topology((5, 3, 3, 5, 5, 3)), "host", "")
    assert again == one  # the same ranks share nodes


@pytest.mark.parametrize(
    "other",
    [
        SETTING._replace(mpi="MPICH 5.0_2"),  # spelled alike in a name
        SETTING._replace(fabric=""),
        SETTING._replace(memory="cuda"),
        SETTING._replace(layout="2x4:cyclic"),
        SETTING._replace(layout="5+3"),
    ],
)
def test_settings_share_nothing(tmp_path: Path, other: Setting) -> None:
    keep(tmp_path, LESSON)
    assert known(tmp_path, other) == []
    keep(tmp_path, LESSON._replace(variant=PAIRWISE), setting=other)
    assert known(tmp_path) == [LESSON]
    assert read_all(tmp_path).keys() == {SETTING, other}


def test_names_of_folders_are_safe() -> None:
    layout = "+".join(["3", "5"] * 500)
    name = Setting("../A b\0/" + "x" * 300, layout, "host", "").folder
    assert len(name) < 200 and re.fullmatch(r"[A-Za-z0-9.+=_-]+", name)
    assert Setting(MPI, layout, "host", "").ranks == 4000


def test_known_ranks_reads_names_only(tmp_path: Path) -> None:
    assert known_ranks(MPI, tmp_path / "none") == frozenset()
    path = keep(tmp_path, LESSON)
    keep(tmp_path, LESSON, setting=SETTING._replace(layout="3+4"))
    keep(tmp_path, LESSON, setting=SETTING._replace(layout="4x4", mpi="MPICH 5.0.22"))
    path.write_text("{")
    (tmp_path / "notes_9_x").mkdir()
    assert known_ranks(MPI, tmp_path) == {7, 8}


def test_gaining_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those for which something but native is known; files that have changed are read again."""
    monkeypatch.setenv("HIERCOLL_LEARNED", str(tmp_path))
    assert gaining_ranks(MPI, 99) == frozenset()
    native = LESSON._replace(variant=NATIVE_VARIANT)
    keep(tmp_path, native)
    keep(tmp_path, LESSON, setting=SETTING._replace(layout="3+4"))
    keep(tmp_path, LESSON, setting=SETTING._replace(layout="4x4", mpi="MPICH 5.0.22"))
    assert gaining_ranks(MPI, 99) == {7}
    keep(tmp_path, LESSON._replace(size=2 * LESSON.size))
    assert gaining_ranks(MPI, 99) == gaining_ranks(MPI, 8) == {7, 8}


def test_settled_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where something is known, and nothing of it is faster than native, or may be."""
    monkeypatch.setenv("HIERCOLL_LEARNED", str(tmp_path))
    native = LESSON._replace(variant=NATIVE_VARIANT)
    assert settled_ranks(MPI, 99) == frozenset()
    keep(tmp_path, native)
    keep(tmp_path, native, setting=SETTING._replace(layout="3+4"))
    assert settled_ranks(MPI, 99) == {7, 8} and settled_ranks(MPI, 7) == {7}
    keep(tmp_path, native._replace(size=2 * LESSON.size, untried=(PAIRWISE,)))
    assert settled_ranks(MPI, 99) == {7}
    keep(tmp_path, LESSON._replace(size=2 * LESSON.size), setting=SETTING._replace(layout="3+4"))
    assert settled_ranks(MPI, 99) == frozenset()


def test_gaining_ranks_reads_what_is_not_too_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is read of settings of more ranks than any communicator has."""
    monkeypatch.setenv("HIERCOLL_LEARNED", str(tmp_path))
    keep(tmp_path, LESSON).write_text("{")
    keep(tmp_path, LESSON, setting=SETTING._replace(layout="3+4"))
    assert gaining_ranks(MPI, 7) == {7} and gaining_ranks(MPI, 6) == frozenset()
    with pytest.warns(LearnedWarning):
        assert gaining_ranks(MPI, 8) == {7}


def test_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(*found: Adapter) -> str:
        monkeypatch.setattr(learned, "adapters", lambda: list(found))
        return fabric()

    monkeypatch.delenv("HIERCOLL_NODES", raising=False)
    assert of() == ""
    assert of(*(Adapter("InfiniBand", f"mlx5_{i}", 200.0) for i in (0, 2)), Adapter("Omni-Path", "hfi1_0", 100.0)) == (
        "InfiniBand 200 x2, Omni-Path 100"
    )
    assert of(Adapter("Ethernet", "veth7", 10.0), Adapter("Ethernet", "eno1", 25.0)) == "Ethernet 25"
    monkeypatch.setenv("HIERCOLL_NODES", "2x4")
    assert of() == "virtual nodes" and of(Adapter("Ethernet", "eno1", 2.5)) == "virtual nodes, Ethernet 2.5"


def test_the_folder_is_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HIERCOLL_LEARNED", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.learned_folder() == tmp_path / "hiercoll" / "learned"
    monkeypatch.setenv("HIERCOLL_LEARNED", str(tmp_path / "mine"))
    assert settings.learned_folder() == tmp_path / "mine"
    assert known_ranks(MPI) == frozenset()
    keep(tmp_path / "mine", LESSON)
    assert read(SETTING) == {LESSON.key: LESSON} and known_ranks(MPI) == {8}
    monkeypatch.delenv("HIERCOLL_LEARNED")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings.learned_folder() == tmp_path / "home" / ".cache" / "hiercoll" / "learned"


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("HIERCOLL_LEARNED", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert settings.learned_folder() is None
    assert read(SETTING) == {} and read_all() == {} and known_ranks(MPI) == frozenset() and forget() == 0
    with pytest.warns(LearnedWarning, match="no home"):
        JobFile(SETTING).keep(LESSON)


# ---- what is kept can be read

VARIANTS = [
    (collective, Variant(name, entry.resolve({})))
    for collective, entries in REGISTRY.items()
    if collective in ("alltoall", "allgather", "alltoallv", "bcast")
    for name, entry in entries.items()
]
SECONDS = st.floats(1e-9, 1e3)


@given(
    st.sampled_from([*VARIANTS, ("alltoall", NATIVE_VARIANT), ("allgatherv", variant("ring", "allgather"))]),
    st.integers(0, 1 << 40),
    st.booleans(),
    SECONDS,
    SECONDS,
    st.integers(1, 1 << 40),
    st.integers(0, 3),
)
def test_round_trip(
    of: tuple[str, Variant], size: int, in_place: bool, seconds: float, native: float, calls: int, left: int
) -> None:
    collective, chosen = of
    untried = (chosen, NATIVE_VARIANT, chosen)[:left]
    lesson = Lesson(collective, size, in_place, chosen, seconds, native, calls, now(), untried)
    text = learned._dumped(SETTING, [lesson])
    data = json.loads(text)
    reader = learned.Reader("test")
    assert learned._setting(reader, data["setting"]) == SETTING
    assert [learned._lesson(reader, each, "") for each in data["lessons"]] == [lesson]


def test_a_job_keeps_one_file(tmp_path: Path) -> None:
    job = JobFile(SETTING, tmp_path)
    assert job.path is None and not (tmp_path / SETTING.folder).exists()
    job.keep(LESSON)
    job.keep(LESSON._replace(size=128))
    better = LESSON._replace(variant=PAIRWISE, date="2026-11-22T09:00:00+00:00")  # a job's last word is its word
    job.keep(better)
    assert job.path is not None and files(tmp_path) == [job.path.name]
    assert read(SETTING, tmp_path) == by_key(better, LESSON._replace(size=128))
    assert job_file(SETTING) is job_file(SETTING._replace())


def test_what_is_not_final_waits_where_writing_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as long as that takes, for the next lesson to come then, or the end; what is final does not."""
    clock = [0.0]
    monkeypatch.setattr(learned.time, "perf_counter", lambda: clock[0])
    job, write = JobFile(SETTING, tmp_path), learned.write_whole

    def slowly(path: Path, text: str) -> None:
        clock[0] += 1.0
        write(path, text)

    monkeypatch.setattr(learned, "write_whole", slowly)
    begun = LESSON._replace(variant=NATIVE_VARIANT, untried=(BRUCK, PAIRWISE))
    job.keep(begun)
    assert known(tmp_path) == [] and not (tmp_path / SETTING.folder).exists()
    job.flush()
    job.flush()
    assert known(tmp_path) == [begun] and clock == [1.0]
    clock[0] = 100.9
    further = LESSON._replace(untried=(PAIRWISE,))
    job.keep(further)
    assert known(tmp_path) == [begun] and clock == [100.9]
    other = LESSON._replace(size=128, untried=(PAIRWISE,))
    clock[0] = 101.0
    job.keep(other)
    assert known(tmp_path) == [further, other] and clock == [102.0]
    job.keep(LESSON)
    assert known(tmp_path) == [LESSON, other] and clock == [103.0]


def test_what_is_not_written_yet_is_known_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To communicators of this job that begin later; at its end others know it, too."""
    monkeypatch.setattr(learned, "_job_files", {})
    monkeypatch.setenv("HIERCOLL_LEARNED", str(tmp_path))
    begun = LESSON._replace(untried=(PAIRWISE,))
    assert known_ranks(MPI) == frozenset()
    job_file(SETTING).keep(begun)
    assert known_ranks(MPI) == {8} and known_ranks("Open MPI 5.0.11") == frozenset()
    assert gaining_ranks(MPI, 99) == {8} and gaining_ranks(MPI, 7) == frozenset()
    assert read(SETTING) == by_key(begun) and read(SETTING._replace(layout="3+5")) == {} == read(SETTING, tmp_path)
    learned.flush()
    assert known(tmp_path) == [begun]
    assert read(SETTING) == of_this_job(SETTING) == by_key(begun)
    monkeypatch.setattr(learned, "_job_files", {})
    assert read(SETTING) == by_key(begun) and of_this_job(SETTING) == {}


def test_candidates_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    path = given_file(tmp_path, text_of({**GOOD, "untried": [{"algorithm": "quantum", "params": {}}, BRUCK.record()]}))
    file = learned._load(path)
    assert file.lessons == [LESSON._replace(untried=(BRUCK,))] and not file.is_known
    nothing = {**GOOD, **NATIVE_VARIANT.record(), "untried": [{"algorithm": "quantum", "params": {}}]}
    assert learned._load(given_file(tmp_path, text_of(nothing))).lessons == []  # not that nothing is faster


def test_transports_and_forms_are_kept(tmp_path: Path) -> None:
    staged = LESSON._replace(variant=replace(BRUCK, transport="staged"))
    form = LESSON._replace(size=1, variant=Variant("native", {"form": "nonblocking"}))
    keep(tmp_path, staged, form)
    assert read(SETTING, tmp_path) == by_key(staged, form)


@pytest.mark.parametrize("order", [1, -1])
def test_what_says_nothing_replaces_nothing(tmp_path: Path, order: int) -> None:
    """Whichever comes later: of another job, or of another communicator of this one."""
    begun = LESSON._replace(variant=NATIVE_VARIANT, seconds=2e-5, date="2026-11-23", untried=(BRUCK, PAIRWISE))
    for lesson in [LESSON, begun][::order]:
        keep(tmp_path, lesson)
    assert known(tmp_path) == [LESSON]
    keep(tmp_path / "one", LESSON, begun)
    keep(tmp_path / "other", begun, LESSON)
    assert known(tmp_path / "one") == known(tmp_path / "other") == [LESSON]
    settled = begun._replace(untried=())
    keep(tmp_path, settled)
    assert known(tmp_path) == [settled]


@pytest.mark.parametrize("order", [1, -1])
def test_the_latest_lesson_is_believed_else_that_of_most_calls(tmp_path: Path, order: int) -> None:
    earlier = LESSON._replace(calls=1000)
    later = LESSON._replace(date="2026-11-22T10:00:01+00:00", variant=PAIRWISE, calls=2)
    more = later._replace(calls=3, seconds=7e-6)
    for lesson in [earlier, later, more][::order]:
        keep(tmp_path, lesson)
    assert known(tmp_path) == [more]


def test_a_day_is_a_date(tmp_path: Path) -> None:
    keep(tmp_path, LESSON._replace(date="2026-11-22"))
    keep(tmp_path, LESSON)
    assert known(tmp_path) == [LESSON]
    assert learned._is_date(now())


# ---- what cannot be used

GOOD: dict[str, Any] = LESSON.record()


def text_of(lesson: Any = GOOD, **top: Any) -> str:
    whole = {"format": "hiercoll learned", "version": 1, "setting": SETTING._asdict(), "lessons": [lesson], **top}
    return json.dumps({name: value for name, value in whole.items() if value is not ...})


def given_file(folder: Path, text: str | bytes) -> Path:
    """A file that some job may have left; and beside it a good one."""
    keep(folder, LESSON._replace(size=4096))
    path = folder / SETTING.folder / "20200101-000000_h_1_ab.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "JSON"),
    "truncated": (text_of()[:-20], "JSON"),
    "not UTF-8": (b'{"format": "\xff"}', "JSON"),
    "nested": ("[" * 100_000, "JSON"),
    "a list": ("[]", "expected an object"),
    "foreign": ('{"name": "x"}', "format: expected 'hiercoll learned'"),
    "a table": (text_of(format="hiercoll table"), "format: expected"),
    "newer": (text_of(version=2), "version: expected 1"),
    "no setting": (text_of(setting=...), "setting: expected"),
    "another setting": (text_of(setting={**SETTING._asdict(), "layout": "2x8"}), "setting: expected that of the fold"),
    "no layout": (text_of(setting={**SETTING._asdict(), "layout": "2x"}), "setting.layout"),
    "huge layout": (text_of(setting={**SETTING._asdict(), "layout": "9999999x9999999"}), "setting.layout"),
    "memory": (text_of(setting={**SETTING._asdict(), "memory": "disk"}), "setting.memory"),
    "lessons": (text_of(lessons={}), "lessons: expected a list"),
    "a lesson": (text_of(7), r"lessons\[0\]: expected an object"),
    "NaN": (text_of({**GOOD, "seconds": float("nan")}), "NaN is not a number"),
    "infinite": (text_of().replace("1e-05", "1e999"), r"lessons\[0\].seconds"),
    "no time": (text_of({**GOOD, "native": 0}), "native: expected a number of seconds above 0"),
    "negative": (text_of({**GOOD, "native": -1e-5}), "native"),
    "text": (text_of({**GOOD, "seconds": "1e-5"}), "seconds"),
    "true": (text_of({**GOOD, "calls": True}), "calls"),
    "no calls": (text_of({**GOOD, "calls": 0}), "calls"),
    "size": (text_of({**GOOD, "size": -1}), "size"),
    "fraction": (text_of({**GOOD, "size": 1.5}), "size"),
    "in place": (text_of({**GOOD, "in_place": 1}), "in_place"),
    "a date": (text_of({**GOOD, "date": "tomorrow"}), "date"),
    "no date": (text_of({**GOOD, "date": "2026-13-41"}), "date"),
    "collective": (text_of({**GOOD, "collective": None}), "collective"),
    "algorithm": (text_of({**GOOD, "algorithm": 7}), "algorithm"),
    "params": (text_of({**GOOD, "params": []}), "params"),
    "untried": (text_of({**GOOD, "untried": {}}), r"untried: expected a list"),
    "untried one": (text_of({**GOOD, "untried": ["bruck"]}), r"lessons\[0\].untried\[0\]: expected an object"),
    "untried params": (text_of({**GOOD, "untried": [{"algorithm": "bruck"}]}), r"untried\[0\].params"),
    "large": (text_of() + " " * MOST_BYTES, "at most"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_left_out(tmp_path: Path, case: str) -> None:
    text, why = BROKEN[case]
    path = given_file(tmp_path, text)
    with pytest.warns(LearnedWarning, match=f"{re.escape(str(path))}.*{why}") as found:
        assert [lesson.size for lesson in known(tmp_path)] == [4096]
    assert len(found) == 1
    assert list(read_all(tmp_path)) == [SETTING]  # without a second warning


UNKNOWN: dict[str, dict[str, Any]] = {
    "algorithm": {"algorithm": "quantum"},
    "collective": {"collective": "neighbor_alltoall"},
    "not called": {"collective": "allreduce", "algorithm": "ring"},
    "parameter": {"params": {"colour": 3}},
    "value": {"params": {"radix": 1}},
    "type": {"params": {"radix": "2"}},
    "form": {"algorithm": "native", "params": {"form": "persistent"}},
    "transport": {"transport": "pigeon"},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_another_version_knows_is_left_out(tmp_path: Path, case: str) -> None:
    given_file(tmp_path, text_of(lessons=[{**GOOD, **UNKNOWN[case]}, {**GOOD, "size": 8}]))
    assert [lesson.size for lesson in known(tmp_path)] == [8, 4096]


@pytest.mark.parametrize(
    ("kind", "why"), [("folder", "Is a directory"), ("pipe", "a file"), ("loop", "symbolic links")]
)
def test_other_things_in_the_place_of_files(tmp_path: Path, kind: str, why: str) -> None:
    path = given_file(tmp_path, "")
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    with pytest.warns(LearnedWarning, match=f"{re.escape(str(path))}.*{why}"):
        assert [lesson.size for lesson in known(tmp_path)] == [4096]


def test_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(tmp_path, LESSON)

    def refuse(name: Any, *rest: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(LearnedWarning, match=f"{path}: Permission denied"):
        assert known(tmp_path) == []


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.warns(LearnedWarning, match="Not a directory"):
        assert known_ranks(MPI, file) == frozenset() and read(SETTING, file) == {} and read_all(file) == {}
    with pytest.warns(LearnedWarning, match="what this job learns is not kept"):
        JobFile(SETTING, file).keep(LESSON)


def test_a_warning_is_never_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given_file(tmp_path, "{")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(known(tmp_path)) == 1
    assert capsys.readouterr().err.startswith("LearnedWarning: ")


# ---- what cannot be written


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("place", [(os, "replace"), (Path, "write_text"), (Path, "mkdir")])
def test_a_program_goes_on_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, place: tuple[Any, str]
) -> None:
    def refuse(*given: Any, **more: Any) -> Any:
        raise OSError(code, os.strerror(code), str(given[0]))

    job, other = JobFile(SETTING, tmp_path), JobFile(SETTING, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(*place, refuse)
        with pytest.warns(LearnedWarning, match=os.strerror(code)):
            job.keep(LESSON._replace(size=1))
        job.keep(LESSON._replace(size=2))  # without a second warning
        other.keep(LESSON)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    job.keep(LESSON._replace(size=3))  # there is room again
    assert [lesson.size for lesson in known(tmp_path)] == [1, 2, 3]


def test_what_was_there_stays_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobFile(SETTING, tmp_path)
    job.keep(LESSON)

    def half(path: Path, text: str, encoding: str = "") -> int:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.warns(LearnedWarning, match="No space left"):
        job.keep(LESSON._replace(size=128))
    assert known(tmp_path) == [LESSON] and len(files(tmp_path)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": float("nan")},
        {"native": float("inf")},
        {"seconds": 0.0},
        {"calls": 0},
        {"date": ""},
        {"variant": Variant("quantum")},
        {"variant": Variant("native", {"form": "persistent"})},
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, wrong: dict[str, Any]) -> None:
    job = JobFile(SETTING, tmp_path)
    with pytest.warns(LearnedWarning, match="it is not kept"):
        job.keep(LESSON._replace(**wrong))
    job.keep(LESSON)
    assert known(tmp_path) == [LESSON]


def test_parameters_left_out_are_filled_in(tmp_path: Path) -> None:
    keep(tmp_path, LESSON._replace(variant=Variant("bruck")))
    assert known(tmp_path) == [LESSON]


def test_numbers_of_numpy_are_kept(tmp_path: Path) -> None:
    keep(tmp_path, LESSON._replace(variant=Variant("bruck", {"radix": np.int64(2)}), seconds=np.float64(1e-5)))
    assert known(tmp_path) == [LESSON]


# ---- many files, many jobs


def left_by(folder: Path, number: int, *lessons: Lesson) -> Path:
    """A file of an earlier job."""
    path = folder / SETTING.folder / f"2026{number:04}-000000_h_1_ab.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(learned._dumped(SETTING, lessons))
    return path


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set-up of a communicator looks at all of them; a file that has changed since is read anew."""
    taken: list[Path] = []
    text = learned._text
    monkeypatch.setattr(learned, "_text", lambda path: taken.append(path) or text(path))
    for number in range(3):
        left_by(tmp_path, number, LESSON._replace(size=number + 1))
    before = read(SETTING, tmp_path)
    assert len(before) == 3 and len(taken) == 3
    assert read(SETTING, tmp_path) == before and len(taken) == 3
    learned.write_whole(taken[0], learned._dumped(SETTING, [LESSON._replace(size=9)]))
    assert set(read(SETTING, tmp_path)) == {LESSON._replace(size=size).key for size in (2, 3, 9)}
    assert taken[3:] == taken[:1]


def test_the_oldest_files_are_put_together(tmp_path: Path) -> None:
    for number in range(MOST_FILES + 1):
        left_by(tmp_path, number, LESSON._replace(size=number), LESSON._replace(size=1000, calls=number + 1))
    before = read(SETTING, tmp_path)
    assert len(before) == MOST_FILES + 2
    own = LESSON._replace(size=2000)
    keep(tmp_path, own)
    assert read(SETTING, tmp_path) == before | by_key(own)
    assert len(files(tmp_path)) <= MOST_FILES // 2 + 2
    assert f"2026{MOST_FILES:04}-000000_h_1_ab.json" in files(tmp_path)  # the newest are as they were


def test_few_files_stay_as_they_are(tmp_path: Path) -> None:
    left = {left_by(tmp_path, number, LESSON).name for number in range(MOST_FILES)}
    keep(tmp_path, LESSON)
    assert left < set(files(tmp_path))


def test_a_file_is_bounded(tmp_path: Path) -> None:
    lessons = [LESSON._replace(size=size, date=f"20{size % 90 + 10}-01-01") for size in range(9000)]
    path = left_by(tmp_path, 1, *lessons)
    assert MOST_BYTES - 300 < path.stat().st_size <= MOST_BYTES
    kept = {lesson.date for lesson in known(tmp_path)}
    assert "2099-01-01" in kept and "2010-01-01" not in kept


def test_files_that_are_not_understood_stay(tmp_path: Path) -> None:
    odd = [
        text_of(version=2),
        text_of({**GOOD, "algorithm": "quantum"}),
        "{",
    ]
    for number, text in enumerate(odd):
        left_by(tmp_path, number).write_text(text)
    for number in range(MOST_FILES + 1):
        left_by(tmp_path, 100 + number, LESSON._replace(size=number))
    keep(tmp_path, LESSON)
    for number, text in enumerate(odd):
        assert (tmp_path / SETTING.folder / f"2026{number:04}-000000_h_1_ab.json").read_text() == text
    assert len(files(tmp_path)) <= MOST_FILES // 2 + 2 + len(odd)


def test_nothing_is_lost_where_putting_together_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(MOST_FILES + 1):
        left_by(tmp_path, number, LESSON._replace(size=number))
    before = read(SETTING, tmp_path)

    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(learned, "write_whole", refuse)
    with pytest.warns(LearnedWarning, match="No space left"):
        JobFile(SETTING, tmp_path).keep(LESSON)
    assert read(SETTING, tmp_path) == before


def test_what_a_job_writes_while_its_file_is_taken_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = JobFile(SETTING, tmp_path)
    running.keep(LESSON._replace(size=1))
    assert running.path is not None
    running.path = running.path.rename(running.path.with_name("20260000-000000_h_1_ab.json"))  # the oldest
    for number in range(1, MOST_FILES + 1):
        left_by(tmp_path, number, LESSON)
    unlink = Path.unlink
    later = LESSON._replace(size=2)

    def write_first(path: Path, missing_ok: bool = False) -> None:
        if later.key not in running._lessons:
            running.keep(later)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", write_first)
    learned._compact(tmp_path / SETTING.folder)
    assert read(SETTING, tmp_path) == by_key(LESSON._replace(size=1), later, LESSON)


def test_a_file_that_is_gone_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(tmp_path, LESSON)
    load_file = learned._load

    def move_first(wanted: Path) -> Any:
        if path.exists():
            path.rename(path.with_name("20260101-000000_moved.json"))
        return load_file(wanted)

    monkeypatch.setattr(learned, "_load", move_first)
    assert known(tmp_path) == [LESSON]


def test_half_written_files_are_removed_in_the_end(tmp_path: Path) -> None:
    place = keep(tmp_path, LESSON).parent
    old, new = place / ".0a.tmp", place / ".0b.tmp"
    for path in (old, new):
        path.write_text('{"form')
    os.utime(old, (time.time() - 3 * 24 * 3600,) * 2)
    keep(tmp_path, LESSON)
    assert not old.exists() and new.exists() and known(tmp_path) == [LESSON]


JOBS, EACH = 3, 60


def work(folder: str, number: int) -> None:
    """A process with many jobs, each of which learns two things."""
    warnings.simplefilter("error")
    for turn in range(EACH):
        job = JobFile(SETTING, Path(folder))
        job.keep(LESSON._replace(size=number * EACH + turn))
        job.keep(LESSON._replace(size=100_000 + number * EACH + turn))
        if len(read(SETTING, Path(folder))) < 2 * (turn + 1):
            raise SystemExit(3)
    raise SystemExit(bool(folders._warned))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Any]]:
    context = multiprocessing.get_context("spawn")
    found = [context.Process(target=work, args=(str(tmp_path), number)) for number in range(JOBS)]
    yield found
    for process in found:
        if process.is_alive():
            process.kill()


def test_jobs_at_once_lose_nothing(tmp_path: Path, workers: list[Any]) -> None:
    for process in workers:
        process.start()
    for process in workers:
        process.join(120)
    assert [process.exitcode for process in workers] == [0] * JOBS
    sizes = {lesson.size for lesson in known(tmp_path)}
    assert sizes == {start + i for start in (0, 100_000) for i in range(JOBS * EACH)}
    assert len(files(tmp_path)) <= MOST_FILES + 2 * JOBS


# ---- forgetting


def test_forget_deletes_what_jobs_have_learned_and_nothing_else(tmp_path: Path) -> None:
    place = keep(tmp_path, LESSON).parent
    other = keep(tmp_path, LESSON, setting=SETTING._replace(layout="2x2")).parent
    (place / ".12.tmp").write_text("")
    (other / "README").write_text("mine")
    (tmp_path / "program.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data.json").write_text("{}")
    assert forget(tmp_path) == 2
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["README", "data.json", "program.json"] and not place.exists()
    assert forget(tmp_path) == 0 and read_all(tmp_path) == {}


# ---- as a table


def as_table(*lessons: Lesson, setting: Setting = SETTING) -> Any:
    table = table_of({setting: by_key(*lessons)})
    assert parse(dump(table)).entries == table.entries  # it is one that can be read
    return table


def test_table_of_lessons() -> None:
    small, large = LESSON._replace(size=100, date="2026-11-20"), LESSON._replace(size=400, variant=PAIRWISE)
    (entry,) = as_table(large, small, LESSON._replace(size=0)).entries
    assert entry.choices == (
        Choice(1, NATIVE_VARIANT),
        Choice(50, BRUCK),
        Choice(200, PAIRWISE),
        Choice(801, NATIVE_VARIANT),
    )
    assert entry.is_for(parse_layout("2x4")) and not entry.is_for(parse_layout("2x4:cyclic"))
    assert (entry.mpi, entry.memory) == (MPI, "host") and not entry.is_old
    assert [figure.median for figure in entry.measured(100)] == [1e-5, 2e-5]
    assert entry.native_seconds(400) == 2e-5 and {figure.samples for figure in entry.figures} == {40}
    assert entry.about["date"] == LESSON.date and entry.about["calls"] == 80
    assert entry.about["learned"] == "from a program's own calls, 2026-11-20 to 2026-11-22"


def test_table_of_native_lessons() -> None:
    (entry,) = as_table(LESSON._replace(variant=NATIVE_VARIANT, seconds=2e-5)).entries
    assert entry.choices == (Choice(1, NATIVE_VARIANT),) and len(entry.figures) == 1


def test_table_leaves_out_what_says_nothing_so_far() -> None:
    """That native is the best of none; not what is faster than it."""
    begun = LESSON._replace(size=128, variant=NATIVE_VARIANT, untried=(BRUCK,))
    assert as_table(begun).entries == ()
    (entry,) = as_table(LESSON._replace(untried=(PAIRWISE,)), begun).entries
    assert entry.choice(64) == BRUCK == entry.choice(128) and len(entry.figures) == 2


def test_table_begins_with_the_smallest_block() -> None:
    (entry,) = as_table(LESSON._replace(size=1), LESSON._replace(size=2, variant=PAIRWISE)).entries
    assert entry.choices == (Choice(1, BRUCK), Choice(2, PAIRWISE), Choice(5, NATIVE_VARIANT))


def test_table_of_what_has_no_sizes() -> None:
    best = variant("dissemination", "barrier")
    (entry,) = as_table(LESSON._replace(collective="barrier", size=0, variant=best)).entries
    assert entry.choices == (Choice(0, best),)
    assert [figure.size for figure in entry.measured(0)] == [0, 0] and entry.native_seconds(0) == 2e-5


def test_table_prefers_what_was_learned_out_of_place() -> None:
    inside, outside = LESSON._replace(in_place=True, variant=variant("inplace")), LESSON._replace(date="2020-01-01")
    assert as_table(inside).entries[0].choice(64) == variant("inplace")
    assert as_table(inside, outside).entries[0].choice(64) == as_table(outside, inside).entries[0].choice(64) == BRUCK


def test_table_leaves_out_what_has_none() -> None:
    assert as_table(LESSON._replace(collective="allgatherv", variant=variant("ring", "allgather"))).entries == ()


@pytest.mark.parametrize("order", [1, -1])
def test_table_has_the_latest_of_settings_that_it_cannot_tell_apart(order: int) -> None:
    newer = LESSON._replace(variant=PAIRWISE, date="2026-11-23")
    both = [(SETTING, LESSON), (SETTING._replace(fabric=""), newer)][::order]
    (entry,) = table_of({setting: {lesson.key: lesson} for setting, lesson in both}).entries
    assert entry.choice(64) == PAIRWISE and entry.about["fabric"] == ""


@pytest.mark.parametrize("layout", ["2x4", "2x4:cyclic", "3+5", "3+5:random=7", "1x1"])
def test_table_for_layouts(layout: str) -> None:
    topology = parse_layout(layout)
    (entry,) = as_table(LESSON, setting=setting_of(MPI, topology, "host", "")).entries
    assert entry.is_for(topology)


def test_a_learned_table_decides() -> None:
    decision = decide("alltoall", parse_layout("2x4"), 64, table=as_table(LESSON), mpi=MPI)
    assert decision.variant == BRUCK and decision.reason.startswith("what jobs have learned")


# ---- the commands


def hiercoll(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own."""
    monkeypatch.setenv("HIERCOLL_LEARNED", str(tmp_path / "own"))
    return tmp_path / "own"


def test_show(folder: Path, tmp_path: Path) -> None:
    keep(folder, LESSON, LESSON._replace(size=8192, in_place=True, variant=NATIVE_VARIANT, seconds=2e-5))
    keep(tmp_path / "other", LESSON, setting=SETTING._replace(layout="3+5"))
    said = hiercoll("table", "show", "--learned")
    assert said.exit_code == 0
    assert f"alltoall on 2x4 with {MPI}, host memory, InfiniBand 200 x4, learned" in said.output
    for text in ("bruck", "10 us", "20 us", "2.00x", "40", "2026-11-22", "8K", "yes", "native"):
        assert text in said.output
    assert "to be tried" in said.output and " 2 " not in said.output
    keep(folder, LESSON._replace(untried=(PAIRWISE, BRUCK), date="2026-11-23"))
    assert " 2 " in hiercoll("table", "show", "--learned").output
    other = hiercoll("table", "show", "--learned", tmp_path / "other")
    assert "3+5" in other.output and "2x4" not in other.output


def test_show_as_json(folder: Path, tmp_path: Path) -> None:
    keep(folder, LESSON)
    lines = tmp_path / "lines.jsonl"
    assert hiercoll("table", "show", "--learned", "--json", lines).exit_code == 0
    (line,) = [json.loads(line) for line in lines.read_text().splitlines()]
    assert line == {**SETTING._asdict(), "ranks": 8, **LESSON.record()}


def test_show_nothing(folder: Path) -> None:
    said = hiercoll("table", "show", "--learned")
    assert said.exit_code == 0 and said.output == f"{folder}: nothing learned yet\n"


def test_show_tells_of_broken_files(folder: Path) -> None:
    path = given_file(folder, "{")
    said = hiercoll("table", "show", "--learned")
    assert said.exit_code == 0 and f"Warning: {path}: file: expected JSON" in said.output and "4K" in said.output


def test_show_needs_something() -> None:
    assert "Missing argument 'FILE'" in hiercoll("table", "show").output
    assert "--json needs --learned" in hiercoll("table", "show", "x", "--json", "y").output


def test_without_a_home_commands_say_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "learned_folder", lambda: None)
    for command in (("show", "--learned"), ("merge", "--learned", "-o", "x.json"), ("forget", "-y")):
        said = hiercoll("table", *command)
        assert said.exit_code == 1 and "HIERCOLL_LEARNED: expected a folder" in said.output


def test_merge(folder: Path, tmp_path: Path) -> None:
    keep(folder, LESSON, LESSON._replace(collective="allgather", variant=variant("ring", "allgather")))
    measured = tmp_path / "measured.json"
    tuned = replace(as_table(LESSON._replace(variant=PAIRWISE)).entries[0], about={"date": "2020-01-01"})
    measured.write_text(dump(replace(as_table(), entries=(tuned,))))
    output = tmp_path / "table.json"
    said = hiercoll("table", "merge", "--learned", measured, "-o", output)
    assert said.exit_code == 0 and said.output == f"{output}: 2 entries\n"
    chosen = {entry.collective: entry.choice(64) for entry in load(output).entries}
    assert chosen == {"alltoall": PAIRWISE, "allgather": variant("ring", "allgather")}  # measured ones stay
    assert hiercoll("table", "merge", "--learned", "-o", output).exit_code == 0
    assert load(output).entries[0].choice(64) == BRUCK
    assert "bruck" in hiercoll("table", "show", output).output


def test_merge_without_anything(folder: Path, tmp_path: Path) -> None:
    said = hiercoll("table", "merge", "--learned", "-o", tmp_path / "table.json")
    assert said.exit_code == 1 and not (tmp_path / "table.json").exists()
    assert f"Error: {folder}: files: expected something that jobs have learned, got nothing" in said.output
    assert hiercoll("table", "merge", "-o", "x").exit_code == 2


def test_forget_asks(folder: Path) -> None:
    keep(folder, LESSON)
    assert hiercoll("table", "forget", text="n\n").exit_code == 1 and known(folder) == [LESSON]
    assert "1 files deleted" in hiercoll("table", "forget", text="y\n").output and known(folder) == []
    assert hiercoll("table", "forget", "--yes").output == f"{folder}: nothing learned yet\n"
    keep(folder, LESSON)
    assert hiercoll("table", "forget", "--yes", folder).exit_code == 0 and known(folder) == []
