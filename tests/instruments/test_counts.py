"""Which function of the MPI library our instruments call for what they name native: counted in the library.

A small library (count.c) is preloaded into each rank. Needs a C compiler, and the dynamic loader of Linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mpi"))
from launch import FLAGS, SETTINGS, vendor  # noqa: E402

from hiercoll.runtime import compiled  # noqa: E402

LIBRARY = vendor()
MESSAGES = ("Isend", "Irecv")
COMPILER = shutil.which("cc")
RANKS = 3
TIMEOUT = 120
pytestmark = [
    pytest.mark.mpi_skip,  # starts jobs of its own
    pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc) to build the library that counts"),
]
HIERCOLL = [str(Path(sys.executable).with_name("hiercoll"))]
FIXED = ["--sizes", "64", "--samples", "6"]


@pytest.fixture(scope="session")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that counts."""
    library = tmp_path_factory.mktemp("count") / "count.so"
    large = [] if LIBRARY == "Open MPI" else ["-DLARGE"]  # version 5.0 has no functions for large counts
    source = Path(__file__).with_name("count.c")
    command = [str(COMPILER), *large, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def counted(counting: Path, folder: Path, *program: str, messages: bool = False) -> Counter[str]:
    """Calls of collectives (and ``messages``) by all ranks of a job together, large counts or not. Allgathers come
    besides from finding out who is on which node, and from putting records together."""
    folder.mkdir()
    starter = [str(Path(sys.executable).with_name("mpiexec")), *FLAGS.get(LIBRARY, []), "-n", str(RANKS)]
    inner = ["env", f"LD_PRELOAD={counting}", f"COUNT_FOLDER={folder}", *program]
    environment = {**os.environ, **SETTINGS, "XDG_CONFIG_HOME": str(folder)}
    del environment["HIERCOLL_TABLE"]  # none: as a newcomer has it
    job = subprocess.Popen(
        [*starter, *inner],
        env=environment,
        cwd=folder.parent,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = job.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        pytest.fail(f"no end after {TIMEOUT} s:\n{job.communicate()[0]}")
    assert job.returncode == 0, output
    calls: Counter[str] = Counter()
    for file in folder.iterdir():
        for line in file.read_text().splitlines() if file.name.isdigit() else ():
            name, count = line.split()
            calls[name.removesuffix("_c")] += int(count)
    return calls if messages else Counter({name: calls[name] for name in calls if name not in MESSAGES})


PROGRAM = """
from mpi4py import MPI
import numpy as np, sys
comm = MPI.COMM_WORLD
send, recv = np.arange(2 * comm.size), np.empty(2 * comm.size, int)
ones = [np.full(comm.size, 2)]
for name, arguments in (("Alltoall", (send, recv)), ("Allgather", (send[:2], recv)),
                        ("Alltoallv", ([send, *ones], [recv, *ones]))):
    for _ in range(10):
        {call}
"""


@pytest.mark.skipif(compiled.load()[0] is None, reason="no compiled engine")
@pytest.mark.parametrize("call", ["ours.Alltoall(send, recv)", "hiercoll.alltoall(comm, send, recv)"])
def test_the_compiled_engine_does_not_go_past(counting: Path, tmp_path: Path, call: str) -> None:
    """What wraps MPI functions sees every message of its calls; each but the first two is found by its arguments."""
    program = f"""
from mpi4py import MPI
import hiercoll, numpy as np
from hiercoll.calls import functions
comm = MPI.COMM_WORLD
hiercoll.get_topology(comm)
hiercoll.runtime.lifetime.get_session(comm).policy.forced.update(
    hiercoll.tuning.policy.forced_variants({{"alltoall": ("scatter_destination", {{}})}}))
ours = hiercoll.Intracomm(comm)
send, recv = np.arange(2 * comm.size), np.empty(2 * comm.size, int)
for _ in range(10):
    {call}
"""
    calls = counted(counting, tmp_path / "messages", sys.executable, "-c", program, messages=True)
    assert {name: calls[name] for name in MESSAGES} == dict.fromkeys(MESSAGES, 10 * RANKS * (RANKS - 1))
    assert not calls["Alltoall"]


BLOCKING = {"Alltoall", "Allgather", "Alltoallv"}


def test_the_counter_counts(counting: Path, tmp_path: Path) -> None:
    """What mpi4py calls, and nothing else."""
    program = PROGRAM.format(call="getattr(comm, name)(*arguments)")
    assert counted(counting, tmp_path / "plain", sys.executable, "-c", program) == dict.fromkeys(BLOCKING, 10 * RANKS)
    program = PROGRAM.format(call="getattr(comm, 'I' + name.lower())(*arguments).Wait()")
    names = {f"I{name.lower()}" for name in BLOCKING}
    assert counted(counting, tmp_path / "i", sys.executable, "-c", program) == dict.fromkeys(names, 10 * RANKS)


@pytest.mark.parametrize(
    "call",
    [
        "getattr(ours, name)(*arguments)",
        "getattr(hiercoll, name.lower())(comm, *arguments)",
        "getattr(hiercoll, name.lower())(comm, *arguments, algorithm='native')",
    ],
)
def test_native_in_public_calls(counting: Path, tmp_path: Path, call: str) -> None:
    """ "auto" without a table, of the drop-in communicator and of functions, and "native" are the blocking call."""
    program = PROGRAM.format(call=call).replace("send,", "import hiercoll\nours = hiercoll.Intracomm(comm)\nsend,", 1)
    calls = counted(counting, tmp_path / "auto", sys.executable, "-c", program)
    assert calls["Alltoall"] == 10 * RANKS <= calls["Allgather"] <= 15 * RANKS
    assert 0 < calls["Alltoallv"] <= 10 * RANKS and set(calls) == BLOCKING  # of these, some are tried otherwise


@pytest.mark.parametrize("collective", ["alltoall", "allgather", "alltoallv"])
@pytest.mark.parametrize("timing", ["single", "row", "cold"])
def test_bench(counting: Path, tmp_path: Path, collective: str, timing: str) -> None:
    """native, and the control, are the blocking call; hiercoll's own algorithms call nothing of the kind."""
    algorithms = ["-a", "native", "-a", "scatter_destination" if collective != "allgather" else "direct", "--control"]
    command = [*HIERCOLL, "bench", collective, *algorithms, *FIXED, "--timing", timing]
    calls = counted(counting, tmp_path / "bench", *command)
    name = collective.capitalize()
    assert set(calls) == {name, "Allgather"} and calls[name] % RANKS == 0
    least = {"single": 2 * 6 * 1, "row": 2 * 6 * 2, "cold": 2 * 6}[timing]
    assert calls[name] >= RANKS * (least + 2 * 3)  # all samples, and three checks of the data, of both


def test_bench_of_other_forms(counting: Path, tmp_path: Path) -> None:
    """They are subjects of their own, beside the blocking call."""
    command = [*HIERCOLL, "bench", "alltoall", "-a", "native:form=nonblocking", *FIXED, "--timing", "single"]
    assert set(counted(counting, tmp_path / "calls", *command)) == {"Alltoall", "Ialltoall", "Allgather"}
    command[-1] = "plan-single"
    command[3:5] = ["-a", "native:form=persistent"]
    names = {"Alltoall", "Alltoall_init", "Allgather"}  # native is the call, also beside plans
    assert set(counted(counting, tmp_path / "plans", *command)) == names


def test_tune(counting: Path, tmp_path: Path) -> None:
    """The blocking call in every comparison of calls, as often as the table says at least; plans of native too."""
    command = [*HIERCOLL, "tune", "alltoall", "--budget", "2s", "--sizes", "64", "-o", str(tmp_path / "table.json")]
    calls = counted(counting, tmp_path / "tune", *command)
    assert calls["Alltoall"] >= 8 * 3 * RANKS and set(calls) == {"Alltoall", "Ialltoall", "Alltoall_init", "Allgather"}


def test_online(counting: Path, tmp_path: Path) -> None:
    """Trials call the blocking collective and candidates in turns, never the nonblocking one."""
    program = """
from mpi4py import MPI
import hiercoll, numpy as np
comm = MPI.COMM_WORLD
send, recv = np.arange(comm.size), np.empty(comm.size, int)
hiercoll.configure(comm, tune="online")
for _ in range(400):
    hiercoll.alltoall(comm, send, recv)
"""
    calls = counted(counting, tmp_path / "online", sys.executable, "-c", program)
    assert set(calls) == {"Alltoall", "Allgather"} and calls["Allgather"] < 10 * RANKS
    assert 400 * RANKS >= calls["Alltoall"] >= (1 + 3) * RANKS


def test_report(counting: Path, tmp_path: Path) -> None:
    """A program under the report makes the calls that it would make."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(call="getattr(comm, name)(*arguments)"))
    calls = counted(counting, tmp_path / "report", sys.executable, "-m", "hiercoll", "--report", str(file))
    assert calls["Alltoall"] == 10 * RANKS <= calls["Allgather"] <= 20 * RANKS and set(calls) == BLOCKING


@pytest.mark.parametrize(
    ("script", "arguments", "names"),
    [
        ("native_check.py", ["--sizes", "64"], {"Alltoall"}),
        ("uneven.py", ["--mean", "64", "--seconds", "0.2", "--warm", "0.2"], {"Alltoallv"}),
        ("cpu.py", ["alltoall", "64"], {"Alltoall"}),
    ],
)
def test_scripts(counting: Path, tmp_path: Path, script: str, arguments: list[str], names: set[str]) -> None:
    """What they call native is the blocking call."""
    program = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    assert set(counted(counting, tmp_path / "script", *program)) - {"Allgather"} == names
