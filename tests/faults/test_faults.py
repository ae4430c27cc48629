"""A rank that dies, stops, raises, is late or makes another call: the others say so, in time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "mpi"))
from launch import FLAGS, SETTINGS, vendor

pytestmark = pytest.mark.mpi_skip  # starts jobs of its own
HERE = Path(__file__).parent
LIBRARY = vendor()
SILENT = re.compile(r"rank 2 \(world rank 2(, node 1)?\): SILENT")
SURVIVE = {"MPICH": ["-disable-auto-cleanup"], "Open MPI": ["--enable-recovery"]}  # leave survivors alone
TIMEOUT = 3.0  # seconds, of HIERCOLL_TIMEOUT
ALGORITHMS = [
    "grouped",
    "alltoallv",
    "Ialltoall",
    "first call",
    "learning",
    *(
        pytest.param(name, marks=pytest.mark.slow(reason="the others show the same in other engines"))
        for name in ("bruck", "eager", "native", "Alltoall_init", "first alltoallv", "first aggregate", "growing")
    ),
]


def run(
    fault: str, algorithm: str, folder: Path, *flags: str, **settings: str
) -> tuple[int, dict[int, dict[str, Any]]]:
    """Exit status (None if it had to be ended), and what each rank has reported."""
    starter = str(Path(sys.executable).with_name("mpiexec"))
    environment = {
        **os.environ, **SETTINGS, "HIERCOLL_TIMEOUT": str(TIMEOUT), "HIERCOLL_NODES": "2x2",
        "HIERCOLL_DIAG_DIR": str(folder / "records"), **settings,
    }  # fmt: skip
    command = [
        starter,
        *FLAGS.get(LIBRARY, []),
        *flags,
        "-n",
        "4",
        sys.executable,
        str(HERE / "program.py"),
        fault,
        algorithm,
        str(folder),
    ]
    job = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    begin, ended = time.monotonic(), 0.0
    others = [folder / f"{rank}.json" for rank in range(4) if rank != 2]
    try:
        while time.monotonic() - begin < 20:
            if fault in ("stopped", "killed") and all(file.exists() for file in others):
                break  # a stopped rank never ends; a launcher may end before the survivors
            if job.poll() is not None:
                ended = ended or time.monotonic()
                if not flags or time.monotonic() - ended > TIMEOUT + 2:
                    break
            time.sleep(0.1)
    finally:
        _end(job)
    reports = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    return job.returncode, reports


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the job with all of its processes, stopped ones too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(HERE / "program.py").encode() in process.read_bytes():
                os.kill(int(process.parent.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue
    job.wait()


def diagnosis(folder: Path) -> str:
    """What ``hiercoll diagnose`` says."""
    command = [Path(sys.executable).with_name("hiercoll"), "diagnose", str(folder / "records")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_survivors(reports: dict[int, dict[str, Any]]) -> None:
    """Each of them has raised in time, and its communicator is of no use any more."""
    for rank in (0, 1, 3):
        report = reports[rank]
        assert report["problem"].startswith(("CollectiveTimeout: rank", "CollectiveFailed: rank")), report
        assert report["seconds"] < TIMEOUT + 2
        assert report["again"] == "CommunicatorError"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "fault", ["stopped", pytest.param("late", marks=pytest.mark.slow(reason="most end as those that are stopped do"))]
)
def test_a_silent_rank(tmp_path: Path, fault: str, algorithm: str) -> None:
    """The others raise within the deadline; the diagnosis names the one that is silent."""
    _, reports = run(fault, algorithm, tmp_path)
    check_survivors(reports)
    told = diagnosis(tmp_path)
    assert "rank 2 (world rank 2" in told
    if fault == "stopped":  # one that is late waits in vain itself, in the end
        assert SILENT.search(told), told
    if fault == "late" and algorithm in ("first call", "first aggregate"):  # not by native, which its data still reach
        assert reports[2]["problem"].startswith("CollectiveTimeout")
    if not algorithm.startswith(
        ("native", "Alltoall_init", "first", "growing", "learning")
    ):  # there MPI does not tell who is late
        assert any("rank 2" in reports[rank]["problem"][25:] for rank in (0, 1, 3))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_killed_rank(tmp_path: Path, algorithm: str) -> None:
    """Survivors say that it is silent. MPICH's launcher, asked to leave them alone, ends them
    all the same now and then; the job then ends without success."""
    code, reports = run("killed", algorithm, tmp_path, *SURVIVE[LIBRARY])
    if reports:
        check_survivors(reports)
        assert SILENT.search(diagnosis(tmp_path))
    else:
        assert code != 0


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    """Without flags that keep the survivors the launcher ends the job, at once and not with success."""
    begin = time.monotonic()
    code, _ = run("killed", "bruck", tmp_path)
    assert code != 0 and time.monotonic() - begin < TIMEOUT + 5


def test_a_raising_rank(tmp_path: Path) -> None:
    """It ends by its exception; the others say that it is silent, or the launcher ends them."""
    code, reports = run("raising", "bruck", tmp_path)
    assert code != 0
    assert all(report["problem"].startswith("Collective") for report in reports.values())


def test_another_call(tmp_path: Path) -> None:
    """Where it is not checked, all ranks time out or see wrong sizes; the diagnosis says who is elsewhere."""
    _, reports = run("other call", "bruck", tmp_path)
    assert {0, 1, 3} <= set(reports)
    assert all(reports[rank]["problem"] for rank in (0, 1, 3))
    assert "rank 2: IN ANOTHER CALL: #3 allgather direct" in diagnosis(tmp_path)


@pytest.mark.parametrize("algorithm", ["bruck", "alltoallv", "first alltoallv", "Ialltoall", "Ialltoallv", "learning"])
@pytest.mark.parametrize("fault", ["other call", "other size"])
def test_checked(tmp_path: Path, fault: str, algorithm: str) -> None:
    """HIERCOLL_CHECK=1: every rank raises, with both sides, before any data moves."""
    _, reports = run(fault, algorithm, tmp_path, HIERCOLL_CHECK="1")
    assert set(reports) == {0, 1, 2, 3}
    for report in reports.values():
        assert report["problem"].startswith("CollectiveMismatch"), report
        assert "rank 2" in report["problem"] and report["seconds"] < 2
