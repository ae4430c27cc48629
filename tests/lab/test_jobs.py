"""The job scripts in jobs/: with hiercoll or a stub for it, Slurm in the lab or a stub for jsrun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, ROOT, Lab, finish, library, start

pytestmark = pytest.mark.mpi_skip  # starts jobs of its own
HERE = Path(__file__).parent
ENV = ("--env", str(ENVIRONMENT))
MPIEXEC = {
    "openmpi": "--oversubscribe --bind-to none --mca mpi_yield_when_idle 1 --mca osc ^ucx",
    "mpich": "",
    "impi": "",
}
SETTINGS = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "0",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
MACHINES = {"summit": ("42,6", 6), "lassen": ("40,4", 4)}  # usable cores and GPUs of a node, ranks on it


@pytest.fixture
def stubs(short_path: Path) -> Path:
    """A folder of programs that stand in for hiercoll and jsrun."""
    folder = short_path / "bin"
    folder.mkdir()
    (folder / "hiercoll").symlink_to(HERE / "hiercoll_stub")
    (folder / "jsrun").symlink_to(HERE / "jsrun_shim")
    return folder


def calls(log: Path) -> list[str]:
    """The commands of hiercoll that ran, each once."""
    return list(dict.fromkeys(" ".join(line.split()[:2]) for line in log.read_text().splitlines()))


def files(results: Path) -> set[str]:
    return {path.name for path in results.iterdir()}


COMPLETE = {"table.json", "table.txt", "bench.jsonl", "plots"}


def run_lsf(name: str, stubs: Path, folder: Path, nodes: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
    if library() is None:
        pytest.skip(f"{ENVIRONMENT} has no MPI library; set HIERCOLL_LAB_ENV")
    machine, ranks = MACHINES[name]
    hosts = ["batch1", *(f"node{i}" for i in range(nodes) for _ in range(ranks))]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    settings = {
        **SETTINGS,
        "PATH": f"{stubs}:{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        "JSRUN_MACHINE": f"{nodes},{machine}",
        "JSRUN_MPIEXEC": f"{ENVIRONMENT / 'bin' / 'mpiexec'} {MPIEXEC[str(library())]}",
        "LSB_JOBNAME": name,
        "LSB_DJOB_HOSTFILE": str(folder / "hosts"),
        "LS_SUBCWD": str(ROOT),
        "RESULTS": str(folder / "results"),
        "STUB_LOG": str(folder / "calls"),
    }
    return finish(start(["bash", f"jobs/{name}.lsf"], folder, **(settings | variables)), 100)


@pytest.mark.parametrize("name", MACHINES)
def test_lsf_job(name: str, stubs: Path, short_path: Path) -> None:
    done = run_lsf(name, stubs, short_path)
    assert done.returncode == 0, done.stderr
    assert f"{name}: {2 * MACHINES[name][1]} ranks" in done.stdout
    assert calls(short_path / "calls") == [
        "tune --budget",
        "table show",
        "bench all",
        "plot " + str(short_path / "results" / "bench.jsonl"),
    ]
    assert files(short_path / "results") == COMPLETE


def test_a_job_submitted_again_goes_on(stubs: Path, short_path: Path) -> None:
    done = run_lsf("lassen", stubs, short_path, nodes=1, STUB_FAIL="bench")
    assert done.returncode != 0
    assert files(short_path / "results") == {"table.json", "table.txt"}
    (short_path / "calls").unlink()
    assert run_lsf("lassen", stubs, short_path, nodes=1).returncode == 0
    assert "tune --budget" not in calls(short_path / "calls")
    assert files(short_path / "results") == COMPLETE


def test_a_wrong_number_of_ranks_fails_a_job(stubs: Path, short_path: Path) -> None:
    (stubs / "jsrun").unlink()
    (stubs / "jsrun").write_text('#!/bin/sh\nshift 16\nexec "$@"\n')
    (stubs / "jsrun").chmod(0o755)
    done = run_lsf("lassen", stubs, short_path, nodes=1)
    assert done.returncode != 0
    assert "MPI_COMM_WORLD has 1 ranks, not 4" in done.stderr
    assert not (short_path / "calls").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n 12 -r 6 -c 7 -g 1", ""),
        ("-n 13 -r 6 -c 7 -g 1", "13 sets"),
        ("-n 12 -r 6 -c 8 -g 1", "cores"),
        ("-n 12 -r 6 -c 7 -g 2", "GPUs"),
        ("-n 12 -r 6 -c 7 -a 2 -b packed:7", "bound"),
        ("-n 12 -r 6 -c 7 --unknown", "--unknown"),
        ("-n 12 -r 6 -c 7 -b rs", "packed"),
        ("-n 12", "-r"),
    ],
)
def test_jsrun_stub_is_strict(options: str, message: str, stubs: Path, short_path: Path) -> None:
    command = [str(stubs / "jsrun"), *options.split(), "program", "-x"]
    done = finish(start(command, short_path, JSRUN_MACHINE="2,42,6", JSRUN_MPIEXEC="echo mpiexec"), 30)
    assert done.returncode == 0 if not message else done.returncode != 0
    assert message in done.stderr
    assert done.stdout == ("" if message else "mpiexec -n 12 program -x\n")


@pytest.mark.slow(reason="a Slurm for each")
@pytest.mark.parametrize(
    ("name", "layout", "gpus", "options"),
    [
        ("generic", "2x4", 0, []),
        ("perlmutter", "2x4", 4, ["--cpus-per-task=1", "--nodes=2"]),
        ("dgx", "2x8", 8, ["--cpus-per-task=1", "--partition=lab"]),
    ],
)
def test_slurm_job(slurm_lab: Lab, stubs: Path, name: str, layout: str, gpus: int, options: list[str]) -> None:
    """Only what the lab does not have is overridden: that many cores or hosts, a partition's name."""
    folder = slurm_lab.folder
    command = ["sbatch", "--wait", f"--output={folder}/out.txt", *options, f"jobs/{name}.slurm"]
    variables = {"RESULTS": str(folder / "results"), "STUB_LOG": str(folder / "calls"), "MPI_TYPE": ""}
    command = ["env", f"PATH={stubs}:{ENVIRONMENT / 'bin'}:/usr/bin:/bin", *command]
    done = slurm_lab.call("slurm", "-l", layout, "--gpus", str(gpus), *ENV, "--", *command, **variables)
    output = (folder / "out.txt").read_text() if (folder / "out.txt").exists() else "no output"
    assert done.returncode == 0, f"{done.stderr}\n{output}"
    nodes, ranks = map(int, layout.split("x"))
    assert f"{name}: {nodes * ranks} ranks" in output
    assert len((folder / "calls").read_text().splitlines()) == 2 * nodes * ranks + 2  # two steps of all, two of one
    assert files(folder / "results") == COMPLETE


@pytest.mark.slow(reason="a Slurm for each")
def test_generic_job_with_hiercoll_itself(slurm_lab: Lab) -> None:
    program, folder = str(ENVIRONMENT / "bin" / "hiercoll"), slurm_lab.folder
    for words in (["tune", "--help"], ["table", "--help"], ["plot", "--help"]):
        if finish(start([program, *words], folder), 60).returncode:
            pytest.skip(f"this hiercoll has no command {words[0]}")
    command = ["sbatch", "--wait", f"--output={folder}/out.txt", "-N2", "--ntasks-per-node=1", "jobs/generic.slurm"]
    variables = {"RESULTS": str(folder / "results"), "BUDGET": "5s"}
    done = slurm_lab.call("slurm", "-l", "2x1", *ENV, "--", *command, timeout=100, **variables)
    output = (folder / "out.txt").read_text() if (folder / "out.txt").exists() else "no output"
    assert done.returncode == 0, f"{done.stderr}\n{output}"
    assert files(folder / "results") == COMPLETE
