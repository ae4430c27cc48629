"""The emulated hosts: placement of ranks, exit status, links, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT, Lab, finish, marked_processes, start, wait_until

pytestmark = pytest.mark.mpi_skip  # starts jobs of its own
HOSTS = """
import socket
from mpi4py import MPI
names = MPI.COMM_WORLD.gather(socket.gethostname())
if MPI.COMM_WORLD.rank == 0:
    print(*names)
"""
SPEED = """
import sys, time
import numpy as np
from mpi4py import MPI
comm, data = MPI.COMM_WORLD, np.zeros(int(sys.argv[1]), "u1")
seconds = []
for _ in range(3):
    comm.Barrier()
    begin = time.perf_counter()
    if comm.rank == 0:
        comm.Send(data, 1)
        comm.recv(source=1)
    else:
        comm.Recv(data, 0)
        comm.send(None, 0)
    seconds.append(time.perf_counter() - begin)
if comm.rank == 0:
    print(min(seconds))
"""
ENV = ("--env", str(ENVIRONMENT))


@pytest.mark.parametrize(
    ("layout", "hosts"),
    [
        ("2x2", "h0 h0 h1 h1"),
        ("2x2:cyclic", "h0 h1 h0 h1"),
        ("3+1", "h0 h0 h0 h1"),
        ("1+3:cyclic", "h0 h1 h1 h1"),
        ("0,1,1,0", "h0 h1 h1 h0"),
        ("1x2", "h0 h0"),
    ],
)
def test_ranks_are_where_the_layout_says(mpi_lab: Lab, layout: str, hosts: str) -> None:
    assert mpi_lab.run("run", "-l", layout, *ENV, "--", "python", "-c", HOSTS).split() == hosts.split()


def test_hosts_reach_each_other_by_name(lab: Lab) -> None:
    output = lab.run("shell", "-l", "2x1", "--", "sh", "-c", "hostname; getent hosts h0 h1; ip -brief addr show eth0")
    assert output.split()[:5] == ["h0", "10.77.0.1", "h0", "10.77.0.2", "h1"]
    assert "10.77.0.1/16" in output


def test_two_rails(lab: Lab) -> None:
    output = lab.run("shell", "-l", "2x1", "--rails", "2", "--", "ip", "-brief", "addr")
    assert "10.77.0.1/16" in output and "10.78.0.1/16" in output


def test_the_command_runs_where_the_user_is(lab: Lab) -> None:
    assert lab.run("shell", "-l", "1x1", "--", "pwd").strip() == os.getcwd()


def test_two_labs_at_once(mpi_lab: Lab) -> None:
    first = mpi_lab.start("shell", "-l", "1x1", "--", "sleep", "4")
    assert mpi_lab.run("run", "-l", "2x1", *ENV, "--", "python", "-c", HOSTS).split() == ["h0", "h1"]
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert not list(mpi_lab.folder.iterdir())


@pytest.mark.parametrize(
    ("command", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("no-such-program", 127)]
)
def test_exit_status_of_the_command(lab: Lab, command: str, status: int) -> None:
    assert lab.call("shell", "-l", "1x1", "--", "sh", "-c", command).returncode == status


def test_a_failing_rank_fails_the_run(mpi_lab: Lab) -> None:
    program = "from mpi4py import MPI; raise SystemExit(5 * MPI.COMM_WORLD.rank)"
    assert mpi_lab.call("run", "-l", "2x1", *ENV, "--", "python", "-c", program).returncode != 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--", "true"], "--env"),
        (["run", "--env", "/nonexistent", "--", "true"], "not a virtual environment"),
        (["run", "--env", "EMPTY", "--", "true"], "no MPI library"),
        (["shell", "-l", "0x4", "--", "true"], "layout"),
        (["shell", "-l", "1x1"], "no command"),
        (["shell", "-l", "1x1", "--rate", "fast", "--", "true"], "rate"),
    ],
)
def test_mistakes_are_named(lab: Lab, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "bin").mkdir()
    done = lab.call(*(str(tmp_path) if word == "EMPTY" else word for word in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(lab.folder.iterdir())


def test_a_command_has_a_time_limit(lab: Lab) -> None:
    mark = f"77{uuid.uuid4().int % 10**9}"
    done = lab.call("shell", "-l", "1x1", "--timeout", "1", "--", "sleep", mark)
    assert done.returncode == 124
    assert "longer than 1 s" in done.stderr
    assert wait_until(lambda: not marked_processes(mark), 5)


@pytest.mark.parametrize("action", ["shell", "run"])
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_an_interrupted_lab_leaves_nothing(mpi_lab: Lab, action: str, number: signal.Signals, status: int) -> None:
    """SIGINT goes to the whole process group, as from a terminal, others to the lab alone."""
    mark = f"77{uuid.uuid4().int % 10**9}"
    process = mpi_lab.start(action, "-l", "2x1", *ENV, "--", "sleep", mark)
    try:
        assert wait_until(lambda: bool(_sleeps(mark)), 30)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == status
    assert wait_until(lambda: not marked_processes(mark), 5), marked_processes(mark)
    if number == signal.SIGKILL:  # nobody was left to remove the folder: the next lab does
        mpi_lab.run("shell", "-l", "1x1", "--", "true")
    assert not list(mpi_lab.folder.iterdir())


def _sleeps(mark: str) -> list[str]:
    """The jobs themselves, without what started them."""
    return [line for line in marked_processes(mark) if line.split()[0].endswith("sleep")]


def test_a_folder_in_use_is_not_removed(lab: Lab) -> None:
    first = lab.start("shell", "-l", "1x1", "--", "sleep", "5")
    assert wait_until(lambda: any(lab.folder.glob("hiercoll-lab.*")), 20)
    before = list(lab.folder.iterdir())
    lab.run("shell", "-l", "1x1", "--", "true")
    assert list(lab.folder.iterdir()) == before
    first.communicate(timeout=30)


def test_links_have_the_rate_asked_for(mpi_lab: Lab) -> None:
    """4 MB at 40 Mbit/s: 1,448 bytes of payload cost 1,514 of the rate."""
    size, rate = 4_000_000, 40e6
    output = mpi_lab.run("run", "-l", "2x1", "--rate", "40mbit", *ENV, "--", "python", "-c", SPEED, str(size))
    bound = size * 8 * 1514 / 1448 / rate
    assert bound * 0.97 < float(output) < bound * 3


def test_an_ordinary_user_can_run_it(lab: Lab) -> None:
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", str(ROOT / "scripts" / "lab")]
    if os.geteuid() != 0:
        pytest.skip("all other tests here show this already")
    lab.folder.chmod(0o777)
    check = finish(start([*nobody, "check"], lab.folder), 60)
    if "the lab can run here" not in check.stdout:
        pytest.skip(f"not without root here: {check.stdout.strip()} {check.stderr.strip()}")
    program = "hostname; ip -brief addr show eth0; exit 3"
    done = finish(start([*nobody, "shell", "-l", "2x1", "--", "sh", "-c", program], lab.folder), 60)
    assert done.returncode == 3
    assert done.stdout.startswith("h0\n") and "10.77.0.1/16" in done.stdout
    assert not list(lab.folder.iterdir())
