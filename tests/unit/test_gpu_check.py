"""scripts/gpu-check, as far as it needs no GPU; and that tests on one do not skip for a wrong reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from gpu_check import commands, environments, figures, main, processes, results  # noqa: E402
from gpu_check.processes import Outcome  # noqa: E402
from gpu_check.results import FAILED, PASSED, TIMEOUT, Result  # noqa: E402
from gpu_check.rows import GROUPS, PARTS, Row, go, order, select, time_for  # noqa: E402

LIBRARIES = ["mpich", "openmpi"]
ONE, TWO, THREE = (Row(name, "tests", "mpich", 2, 100) for name in ("one", "two", "three"))


class Clock:
    """A budget; attempts take from it what they take."""

    def __init__(self, budget: float, takes: dict[str, float], failing: tuple[str, ...] = ()) -> None:
        self.budget, self.takes, self.failing = budget, takes, failing
        self.limits: dict[str, float] = {}
        self.results: dict[str, Result] = {}

    def attempt(self, row: Row, limit: float) -> Result:
        self.limits[row.name] = limit
        seconds = min(self.takes[row.name], limit)
        self.budget -= seconds
        status = TIMEOUT if self.takes[row.name] > limit else FAILED if row.name in self.failing else PASSED
        return Result(row.name, status, seconds, cut=status == TIMEOUT and limit < row.limit)

    def done(self, row: Row, result: Result) -> None:
        self.results[row.name] = result

    def go(self, *rows: Row, obstacle: Callable[[Row], str] = lambda row: "") -> dict[str, str]:
        return go(rows, lambda: self.budget, obstacle, self.attempt, self.done)


def test_rows_come_in_the_order_of_the_parts_each_once() -> None:
    rows = select(PARTS, LIBRARIES, [1, 2, 4])
    assert len({row.name for row in rows}) == len(rows)
    assert [row.name for row in rows[:5]] == [
        "smoke, mpich, 2 ranks",
        "kernels, mpich, 1 ranks",
        "figures, mpich, 1 ranks",
        "figures, mpich, 2 ranks",
        "figures, mpich, 4 ranks on one GPU",
    ]
    assert [(row.part, row.ranks) for row in rows[5:9]] == [("peer", 2), ("peer", 2), ("peer", 4), ("peer", 4)]
    assert {row.part for row in rows[9:-3]} == {"tests", "smoke"}
    assert [row.part for row in rows[-3:]] == ["links", "sanitizer", "direct"]
    assert rows[0].limit <= 20 and not rows[-1].counts
    for row in rows:
        assert row.limit <= 240


def test_parts_libraries_and_ranks_leave_rows_out() -> None:
    rows = select(["peer", "tests"], ["openmpi"], [2, 3])
    assert {row.library for row in rows} == {"openmpi"}
    assert {row.ranks for row in rows if row.part == "peer"} == {2}
    assert {row.ranks for row in rows if row.part == "tests"} == {1, 2, 3}  # 1: the kernels
    assert [row.name for row in rows if row.part == "peer"] == [row.name for row in rows][:2]


def test_each_test_on_a_gpu_is_in_one_group(tmp_path: Path) -> None:
    found = re.findall(r"^tests/gpu/(\S+::.+)$", collect(tmp_path, "return 1"), re.MULTILINE)
    assert len(found) > 200 and any("test_claims" in test for test in found)
    for test in found:
        chosen = [group for group, words in GROUPS.items() if _selects(words, test)]
        assert len(chosen) == 1, (test, chosen)


def _selects(words: str, test: str) -> bool:
    """What pytest does with -k."""
    return bool(eval(re.sub(r"\b(?!(?:and|not)\b)\w+", lambda word: str(word[0] in test), words)))


def test_without_time_a_row_is_not_run() -> None:
    clock = Clock(150, {"one": 90, "two": 90, "three": 5})
    notes = clock.go(ONE, TWO, THREE._replace(limit=20))
    assert clock.limits == {"one": 100, "two": 60}  # of 60 seconds left, the second one gets no more
    assert notes == {"two": "the budget ended it after 60 s", "three": "0 s of the budget were left"}
    assert clock.results["two"].cut


def test_a_row_that_would_hardly_end_does_not_start_but_a_shorter_one_does() -> None:
    clock = Clock(110, {"one": 90, "three": 5})
    notes = clock.go(ONE, TWO, THREE._replace(limit=20))
    assert clock.limits == {"one": 100, "three": 20}
    assert notes == {"two": "20 s of the budget were left"}
    assert (time_for(TWO, 24), time_for(TWO, 25), time_for(TWO, 1000), time_for(TWO, -1)) == (0, 25, 100, 0)


def test_an_obstacle_is_a_reason_not_to_run() -> None:
    clock = Clock(1000, {"two": 1})
    assert clock.go(ONE, TWO, obstacle=lambda row: "no tool" if row == ONE else "") == {"one": "no tool"}
    assert list(clock.results) == ["two"]


def test_a_second_call_goes_on_and_comes_to_failures_last() -> None:
    known = {"one": Result("one", PASSED, 1), "two": Result("two", FAILED, 1)}
    assert order([ONE, TWO, THREE], known) == [THREE, TWO]
    assert order([ONE, TWO, THREE], known, again=True) == [ONE, TWO, THREE]
    assert order([ONE, TWO], known | {"two": Result("two", TIMEOUT, 1)}) == [TWO]


def test_results_are_kept_the_latest_counts_and_what_the_budget_cut_does_not(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert results.read(file) == {}
    results.append(file, Result("one", FAILED, 3, "2024-05-01", "v1", "a GPU", last=("wrong data",)))
    results.append(file, Result("two", PASSED, 3))
    results.append(file, Result("two", TIMEOUT, 3, cut=True))
    results.append(file, Result("three", TIMEOUT, 3, cut=True))
    assert results.read(file)["one"].last == ("wrong data",)
    assert {name: result.status for name, result in results.read(file).items()} == {"one": FAILED, "two": PASSED}
    results.append(file, Result("one", PASSED, 3))
    assert results.read(file)["one"].status == PASSED


def test_a_line_that_was_torn_is_as_if_the_row_had_not_run(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results.append(file, Result("one", PASSED, 3))
    file.write_text(file.read_text() + '{"row": "two", "sta')
    results.append(file, Result("three", PASSED, 3))
    assert list(results.read(file)) == ["one", "three"]


def test_the_summary_says_row_by_row_what_passed_failed_and_was_not_run() -> None:
    known = {
        "one": Result("one", PASSED, 3, "2024-05-01", "v1"),
        "two": Result("two", TIMEOUT, 100, "2024-05-02", "v2", last=("rank 1: waits",)),
    }
    rows = [ONE, TWO, THREE]
    text = results.summary("a GPU", rows, known, {"three": "2 s of the budget were left"}, ["slow"])
    assert "1 passed, 1 failed, 1 **not run**" in text
    assert "| one | passed | 3 s | 2024-05-01 | v1 |" in text
    assert "| two | TIMEOUT | 100 s | 2024-05-02 | v2 |" in text
    assert "| three | **not run**: 2 s of the budget were left |" in text
    assert "- slow\n" in text and "several versions of the code: v1, v2" in text and "    rank 1: waits" in text


def test_exit_status_is_that_of_failures_only() -> None:
    failed = {"one": Result("one", FAILED, 1)}
    assert results.exit_status([ONE, TWO], failed) == 1
    assert results.exit_status([TWO], failed) == 0
    assert results.exit_status([ONE._replace(counts=False)], failed) == 0  # an experiment
    assert results.exit_status([ONE], {"one": Result("one", TIMEOUT, 1)}) == 1
    assert results.exit_status([ONE, TWO], {"one": Result("one", PASSED, 1)}) == 0


BOUNDS = [goal.bound for goal in figures.GOALS]


def test_figures_below_their_bounds_are_warnings() -> None:
    low, high = "pack scattered, in blocks of 1024 B, 256 MiB", "unpack evenly spaced, in blocks of 1024 B, 16 MiB"
    peer = "alltoall {} peer, 4 ranks, 4 on a device, 16777216 B per pair"
    shares = [(low, 0.9), (low, 0.5), (high, 0.86), ("over a table: pack scattered, in blocks of 8 B, 256 MiB", 0.1)]
    shares += [
        ("staged:1, 16 MiB", 0.4),
        ("staged:4, 16 MiB", 0.9),
        ("staged:4, 4 MiB", 0.1),
        ("staged:1, 64 MiB", 0.8),
    ]
    shares += [(peer.format("pairwise"), 0.6), (peer.format("grouped"), 0.71)]
    lines: list[dict[str, Any]] = [
        {"figure": name, "seconds": 2.0, "bounds": dict.fromkeys(BOUNDS, 2.0 * share)} for name, share in shares
    ]
    warnings = figures.below([*lines, {"figure": "device copy, 16 MiB", "seconds": 1.0, "bounds": {}}])
    assert warnings == [f"{low}: 50% of its bound, not 80%", "64 MiB: 80% of its bound, not 85%"]


def test_the_goals_are_of_names_that_the_benchmark_has() -> None:
    text = (ROOT / "scripts" / "gpu_bench.py").read_text(encoding="utf-8")
    for part in (
        '"pack scattered"',
        'f"{name}, in blocks of {block} B"',
        'f"{way}, {total // MIB} MiB"',
        *(f'"{bound}": ' for bound in BOUNDS),
        'f"staged:{parts}, {block // MIB} MiB"',
        'f"{collective} {algorithm} {transport}, {what}"',
        'f"{comm.size} ranks, {sharing} on a device, {block} B per pair"',
    ):
        assert part in text


def test_a_row_that_runs_on_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """Also a child in a session of its own, as mpiexec is."""
    script = "sleep 100 & echo $!; setsid sleep 100 & echo $!; wait"
    outcome = processes.run(["bash", "-c", script], tmp_path, {}, 0.5, tmp_path / "log")
    assert outcome.status == TIMEOUT and outcome.seconds < 20
    assert "no end after" in outcome.output
    children = [int(word) for word in outcome.output.split()[:2]]
    assert len(children) == 2
    deadline = time.monotonic() + 10
    while alive := [child for child in children if _runs(child)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


def test_what_a_row_leaves_behind_is_ended_too(tmp_path: Path) -> None:
    """Ranks whose mpiexec was ended have another parent by then, and a session of their own."""
    outcome = processes.run(["bash", "-c", "setsid sleep 100 & echo $!"], tmp_path, {}, 20, tmp_path / "log")
    assert outcome.status == PASSED and outcome.seconds < 20
    assert not _runs(int(outcome.output))


def _runs(process: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_passes_or_fails_by_its_status(tmp_path: Path) -> None:
    good = processes.run(["bash", "-c", "echo $WORD"], tmp_path, {"WORD": "good"}, 20, tmp_path / "log")
    assert (good.status, good.output) == (PASSED, "good\n")
    assert processes.run(["bash", "-c", "exit 3"], tmp_path, {}, 20, tmp_path / "log").status == FAILED
    lines = "\n".join(f"line {number}\0" for number in range(100))
    assert processes.last_lines(lines, 2) == ("line 98", "line 99")


def test_launches_have_less_time_than_their_row(tmp_path: Path) -> None:
    for row in select(PARTS, LIBRARIES, [1, 2]):
        words = commands.command(row, tmp_path, 60, tmp_path / "figures.jsonl")
        if "tests/mpi/launch.py" in words:
            assert words[words.index("--timeout") + 1] == "55.0" and words[words.index("-k") + 1] == row.tests
        for word in words:
            if word.endswith(".py"):
                assert (ROOT / word).exists()
        assert ("HIERCOLL_CUDA_AWARE" in commands.settings(row, tmp_path)) == (row.part == "direct")


def test_ranks_share_one_gpu_where_the_bound_is_of_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node with more GPUs, too: else no figure would be held against it."""
    rows = [row for row in select(["figures", "links"], LIBRARIES, []) if row.ranks == 4]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,0,1")
    assert [commands.settings(row, tmp_path).get("CUDA_VISIBLE_DEVICES") for row in rows] == ["2", None]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert commands.settings(rows[0], tmp_path)["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setattr(main, "told", lambda command: "one; two")
    obstacle = main.Check(rows, environments.Environments(tmp_path, tmp_path), tmp_path, lambda: 0.0).obstacle
    assert [obstacle(row) for row in rows] == ["", "it needs 4 GPUs, and there are not more than 2"]


def test_rows_know_nothing_of_a_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PMI_RANK", "0")
    script = "echo ${SLURM_JOB_ID-none} ${PMI_RANK-none} $CUDA_VISIBLE_DEVICES $PMIX_MCA_ptl_tcp_if_include"
    given = {"CUDA_VISIBLE_DEVICES": "3", **commands.SETTINGS}
    assert processes.run(["bash", "-c", script], tmp_path, given, 20, tmp_path / "log").output == "none none 3 lo\n"


def test_an_environment_has_all_that_its_python_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is neither in its own folder of packages nor in the environment's, beneath what is installed there."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "only_there.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "elsewhere")])
    run = environments.run

    def no_network(words: list[str], *given: Any) -> Outcome:
        return Outcome(PASSED, 0.0, "") if "pip" in words else run(words, *given)

    monkeypatch.setattr(environments, "run", no_network)
    made = environments.Environments(tmp_path / "made", tmp_path)
    assert made.make("mpich", 60).status == PASSED
    code = "import numpy, only_there, sys; print(sys.prefix); print(*sys.path, sep='\\n')"
    words = [tmp_path / "made" / "mpich" / "bin" / "python", "-c", code]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[0] == str(tmp_path / "made" / "mpich")
    first, beneath = (
        next(n for n, line in enumerate(told[1:]) if end in line) for end in ("made/mpich/lib", "elsewhere")
    )
    assert first < beneath and str(ROOT / "scripts") not in told


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the command with words for the first two rows, beside a CuPy that can be imported."""
    monkeypatch.setattr(main, "found", lambda module: True)
    monkeypatch.setattr(main.Environments, "make", lambda *given: Outcome(PASSED, 0.0, ""))
    monkeypatch.setattr(main.signal, "signal", lambda *given: None)

    def run(smoke: str, kernels: str, *options: str) -> tuple[int, str]:
        scripts = {"smoke": smoke, "kernels": kernels}
        monkeypatch.setattr(main, "command", lambda row, *given: ["bash", "-c", scripts[row.part]])
        folders = ["--wheels", str(tmp_path), "--out", str(tmp_path / "out")]
        code = main.main([*folders, "--only", "smoke,kernels", *options])
        return code, (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")

    return run


def test_calls_go_on_where_the_last_one_stopped(check: Callable[..., tuple[int, str]]) -> None:
    code, text = check("true", "sleep 100", "--budget", "0")
    assert code == 0 and "0 passed, 0 failed, 2 **not run**" in text
    code, text = check("true", "echo 3 passed; echo wrong; false")
    assert code == 1 and "1 passed, 1 failed, 0 **not run**" in text and "    wrong" in text
    code, text = check("false", "echo 3 passed")  # what passed is not run again
    assert code == 0 and "2 passed, 0 failed" in text
    assert check("false", "echo 3 passed", "--again")[0] == 1


def test_a_test_that_the_budget_ended_has_not_failed(check: Callable[..., tuple[int, str]]) -> None:
    """Within the row's own limit it has."""
    ended = "echo 'Timeout (0:00:02.5)!'; false"
    code, text = check("true", ended, "--budget", "100")
    assert code == 0 and "1 passed, 0 failed, 1 **not run**" in text and "the budget ended it" in text
    assert check("true", ended, "--budget", "1000")[0] == 1


def test_tests_that_are_all_skipped_have_not_passed(check: Callable[..., tuple[int, str]]) -> None:
    code, text = check("true", "echo 40 skipped")
    assert code == 1 and "no test passed" in text


def test_a_failure_of_an_environment_is_one_of_its_rows(
    check: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main.Environments, "make", lambda *given: Outcome(FAILED, 1.0, "no such wheel"))
    code, text = check("true", "echo 3 passed")
    assert code == 1 and "2 failed" in text and "    no such wheel" in text


def test_warnings_do_not_fail(check: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    line = {"figure": "staged:1, 16 MiB", "seconds": 1.0, "bounds": {"the slower of these": 0.2}}
    (tmp_path / "out" / "figures.jsonl").write_text(json.dumps(line) + "\n")
    code, text = check("true", "echo 3 passed")
    assert code == 0 and "16 MiB: 20% of its bound" in text


@pytest.mark.parametrize(
    "wrong",
    [["--only", "nothing"], ["--ranks", "0"], ["--ranks", "two"], ["--libraries", "lam"], ["--wheels", "/nowhere"]],
)
def test_wrong_use(wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(main.signal, "signal", lambda *given: None)
    with pytest.raises(SystemExit) as ended:
        main.main(wrong)
    assert ended.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_the_script_starts() -> None:
    told = subprocess.run([sys.executable, ROOT / "scripts" / "gpu-check", "--help"], capture_output=True, text=True)
    assert told.returncode == 0 and "--budget" in told.stdout


CUPY = """
import warnings
from types import ModuleType
ndarray = object
def RawKernel(*given): pass
warnings.warn("several packages of CuPy are installed")
"""
RUNTIME = """
class CUDARuntimeError(RuntimeError): pass
def getDeviceCount():
    {count}
"""


def collect(folder: Path, count: str) -> str:
    """What pytest says of tests/gpu beside a CuPy that warns when it is imported."""
    (folder / "cupy" / "cuda").mkdir(parents=True)
    (folder / "cupy" / "__init__.py").write_text(CUPY)
    (folder / "cupy" / "cuda" / "__init__.py").touch()
    (folder / "cupy" / "cuda" / "runtime.py").write_text(RUNTIME.format(count=count))
    (folder / "cupyx.py").touch()
    pytest_words = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "pytest_mpi", "-p", "no:cacheprovider"]
    settings = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", **{"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
    words = [*pytest_words, "--with-mpi", "--collect-only", "tests/gpu"]
    return subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True).stdout


def test_a_warning_while_cupy_is_imported_skips_nothing(tmp_path: Path) -> None:
    """Warnings are errors in tests, and an error there must not be taken for a CuPy that is not installed."""
    told = collect(tmp_path, "return 1")
    assert "several packages of CuPy" in told  # it did warn
    assert re.search(r"\d\d+ tests collected", told) and "skipped" not in told, told


@pytest.mark.parametrize(
    ("count", "outcome"),
    [
        ("return 0", "SKIPPED .* there is no GPU: no device"),
        (
            "raise CUDARuntimeError('cudaErrorInsufficientDriver: too old')",
            "SKIPPED .* there is no GPU: cudaErrorInsuff",
        ),
        ("raise CUDARuntimeError('cudaErrorInitializationError: broken')", "ERROR|error"),
    ],
)
def test_only_a_machine_without_a_gpu_skips(tmp_path: Path, count: str, outcome: str) -> None:
    told = collect(tmp_path, count)
    assert re.search(outcome, told), told
    assert ("SKIPPED" in told) == outcome.startswith("SKIPPED")


def test_plug_ins_beside_pytest_change_nothing(tmp_path: Path) -> None:
    """One that cannot even be imported; tests/mpi/launch.py starts a rank all the same."""
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('this plug-in is not for us')")
    about = tmp_path / "broken-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[pytest11]\nbroken = broken_plugin\n")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_nothing.py").write_text("def test_nothing(): pass\n")
    launch = [sys.executable, "tests/mpi/launch.py", "--ranks", "1", "--tests", str(tests), "--timeout", "60"]
    settings = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_PLUGINS": "broken_plugin"}
    told = subprocess.run(launch, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert told.returncode == 0 and "1 passed, 0 failed" in told.stdout, told.stdout
