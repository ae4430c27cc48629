"""A real Slurm over the emulated hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ENVIRONMENT, Lab, library

pytestmark = pytest.mark.mpi_skip  # starts jobs of its own
HOSTS = """
import socket, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
names = comm.gather(socket.gethostname())
if comm.rank == 0:
    print(comm.size, *names, flush=True)
comm.Barrier()
sys.exit(7 if sys.argv[1:] == ["fail"] and comm.rank == comm.size - 1 else 0)
"""
ENV = ("--env", str(ENVIRONMENT))
# Slurm counts limits in minutes, and looks at them every 30 s; an end time may be any second.
TIME_LIMIT = """
id=$(sbatch --parsable -N2 -n2 --time=5 --output={folder}/%j.txt --wrap 'srun sleep 300')
until [ "$(squeue -h -o %t)" = R ]; do sleep 0.1; done
sleep 1
scontrol update JobId=$id EndTime=now+2seconds
until [ -z "$(squeue -h)" ]; do sleep 0.5; done
scontrol show job $id
"""


@pytest.fixture
def script(slurm_lab: Lab) -> Path:
    """A program of a job, outside the lab's own folder."""
    path = slurm_lab.folder / "hosts.py"
    path.write_text(HOSTS)
    return path


def test_srun_starts_one_mpi_job(slurm_lab: Lab, script: Path) -> None:
    """The wrong kind of start gives four jobs of one rank, without an error."""
    command = ["srun", "-N2", "-n4", "--ntasks-per-node=2", "python", str(script)]
    assert slurm_lab.run("slurm", "-l", "2x2", *ENV, "--", *command) == "4 h0 h0 h1 h1\n"


def test_srun_places_ranks_as_the_layout_says(slurm_lab: Lab, script: Path) -> None:
    command = f"SLURM_HOSTFILE=$HIERCOLL_LAB_FOLDER/hosts-by-rank srun -m arbitrary -n4 python {script}"
    output = slurm_lab.run("slurm", "-l", "1+3:cyclic", *ENV, "--", "sh", "-c", command)
    assert output == "4 h0 h1 h1 h1\n"


def test_exit_status_of_a_rank(slurm_lab: Lab, script: Path) -> None:
    command = ["srun", "-N2", "-n2", "python", str(script), "fail"]
    done = slurm_lab.call("slurm", "-l", "2x1", *ENV, "--", *command)
    assert done.stdout == "2 h0 h1\n"
    assert done.returncode == 7, done.stderr


def test_sbatch_writes_its_output_and_passes_its_status_on(slurm_lab: Lab, script: Path) -> None:
    job = slurm_lab.folder / "job.sh"
    job.write_text(f"#!/bin/sh\n#SBATCH -N2 -n2\nsrun python {script}\nexit 4\n")
    output = slurm_lab.folder / "job.txt"
    done = slurm_lab.call("slurm", "-l", "2x1", *ENV, "--", "sbatch", "--wait", f"--output={output}", str(job))
    assert done.returncode == 4, done.stderr
    assert output.read_text() == "2 h0 h1\n"


@pytest.mark.slow(reason="Slurm looks at limits every 30 s")
def test_a_time_limit_ends_a_job(slurm_lab: Lab) -> None:
    """Takes up to 40 s."""
    command = TIME_LIMIT.format(folder=slurm_lab.folder)
    state = slurm_lab.run("slurm", "-l", "2x1", *ENV, "--", "sh", "-e", "-c", command, timeout=90)
    assert "JobState=TIMEOUT" in state
    (output,) = slurm_lab.folder.glob("*.txt")
    assert "DUE TO TIME LIMIT" in output.read_text()


def test_a_job_that_still_runs_is_cancelled(slurm_lab: Lab) -> None:
    command = ["sbatch", "-N2", f"--output={slurm_lab.folder}/job.txt", "--wrap", "srun sleep 300"]
    done = slurm_lab.call("slurm", "-l", "2x1", *ENV, "--", *command)
    assert done.returncode == 0
    assert done.stderr == ""
    assert not list(slurm_lab.folder.glob("hiercoll-lab.*"))


def test_the_library_decides_how_srun_starts_it(slurm_lab: Lab) -> None:
    kind = slurm_lab.run("slurm", "-l", "1x1", *ENV, "--", "sh", "-c", "scontrol show config | grep MpiDefault")
    assert kind.split()[-1] == {"openmpi": "pmix"}.get(str(library()), "pmi2")
