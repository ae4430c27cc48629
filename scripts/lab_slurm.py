"""A Slurm of the lab's own: slurmctld on the first host, one slurmd on each (scripts/lab slurm).

Its configuration, state and logs are in the lab's folder; the machine's own Slurm, if there
is one, is neither used nor touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "sbatch": "slurm-client",
    "scancel": "slurm-client",
    "scontrol": "slurm-client",
    "sinfo": "slurm-client",
    "squeue": "slurm-client",
}
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # where the daemons are, and a user's PATH may not look
LIBRARY_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib")
MPI_TYPE = {"mpich": "pmi2", "impi": "pmi2", "openmpi": "pmix"}  # the wrong one gives singletons, and no error
PATIENCE = 60.0  # seconds for the daemons to come up
ENDING = 10.0  # and for each to end

# auth/none: whoever is in the lab may do everything in it, and nobody else can reach it.
# config_overrides: take our word for CPUs and memory, which are not this machine's.
# SlurmdTimeout=0: a busy machine is no reason to call a host down.
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
TmpFS={tmp}
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault={mpi}
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdTimeout=0
InactiveLimit=0
OverTimeLimit=0
KillWait=5
MessageTimeout=30
GresTypes=gpu
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmError(Exception):
    """No Slurm here, or it did not come up."""


class Hosts(Protocol):
    """What this module needs of a lab."""

    hosts: list[str]
    folder: Path
    tmp: Path
    gpus: int
    rails: int

    @property
    def most_ranks(self) -> int: ...
    def address(self, node: int, rail: int = 0) -> str: ...
    def at(self, host: str) -> list[str]: ...


def missing() -> list[str]:
    """What a Slurm needs and this machine does not have."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    lacking = {p: package for p, package in PROGRAMS.items() if not shutil.which(p, path=path)}
    needs = [f"{program} (Debian package {package})" for program, package in lacking.items()]
    if os.geteuid() != 0:
        needs.append("root (Slurm's daemons set their groups, which an unprivileged user namespace does not allow)")
    return needs


def find_library(name: str, package: str) -> Path:
    """Where a shared library of the system's is. Raises SlurmError."""
    for folder in LIBRARY_FOLDERS:
        for path in sorted(Path("/").glob(f"{folder[1:]}/{name}")):
            return path
    raise SlurmError(f"{name} is missing (Debian package {package})")


class Slurm:
    """A running Slurm over the hosts of a lab; a context manager."""

    def __init__(self, lab: Hosts, library: str | None) -> None:
        """``library`` is the MPI library whose jobs srun is to start: mpich, openmpi, impi."""
        self.lab, self.library, self.folder = lab, library, lab.folder / "slurm"
        self.variables = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        if library == "impi":
            self.variables["I_MPI_PMI_LIBRARY"] = str(find_library("libpmi2.so.0", "libpmi2-0"))
            self.variables["I_MPI_SPIN_COUNT"] = "1"  # only its own mpiexec tells the ranks that cores are few
        if library == "mpich":  # Slurm's PMI2 now and then tears UCX's long addresses; libfabric's are short
            self.variables["MPIR_CVAR_CH4_NETMOD"] = os.environ.get("MPIR_CVAR_CH4_NETMOD", "ofi")
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        try:
            self._configure()
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop()

    def _configure(self) -> None:
        lab, count = self.lab, self.lab.most_ranks
        for name in ("state", *lab.hosts):
            (self.folder / name).mkdir(parents=True)
        gpus = f" Gres=gpu:{lab.gpus} Feature=gpu" if lab.gpus else ""
        nodes = [
            f"NodeName={host} NodeHostname={host} NodeAddr={lab.address(i)} CPUs={count} RealMemory=65536{gpus}"
            for i, host in enumerate(lab.hosts)
        ]
        text = CONFIGURATION.format(
            first=lab.hosts[0],
            folder=self.folder,
            tmp=lab.tmp,
            mpi=MPI_TYPE.get(self.library or "", "none"),
            nodes="\n".join(nodes),
        )
        (self.folder / "slurm.conf").write_text(text)
        if lab.gpus:
            # Slurm wants a device file for each GPU; without the cgroup plugin it does not open them.
            files = [self.folder / f"gpu{i}" for i in range(lab.gpus)]
            for file in files:
                file.touch()
            (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{lab.gpus - 1}]\n")

    def _pmix(self) -> list[str]:
        """Commands that let a host's slurmd find PMIx under the name it looks for.

        Slurm opens libpmix.so, which only the -dev package has; the host gets a copy of
        the library's folder with that name in it, mounted over the original.
        """
        original = find_library("pmix2/lib/libpmix.so.2", "libpmix2").parent
        if (original / "libpmix.so").exists():
            return []
        copy = self.folder / "pmix"
        if not copy.exists():
            shutil.copytree(original, copy, symlinks=True)
            (copy / "libpmix.so").symlink_to("libpmix.so.2")
        return ["mount", "--bind", str(copy), str(original)]

    def _start(self) -> None:
        mount = self._pmix() if self.library == "openmpi" else []
        environment = {**os.environ, **self.variables, "TMPDIR": str(self.lab.tmp)}
        environment["PATH"] = f"{environment.get('PATH', '')}:{SYSTEM_PATH}"
        commands = {"slurmctld": [*self.lab.at(self.lab.hosts[0]), "slurmctld", "-D", "-i"]}
        for host in self.lab.hosts:
            if mount:
                subprocess.run([*self.lab.at(host), *mount], check=True)
            commands[host] = [*self.lab.at(host), "slurmd", "-D", "-N", host]
        for name, command in commands.items():
            with (self.folder / f"{name}.out").open("wb") as output:
                self._daemons[name] = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
        end = time.monotonic() + PATIENCE
        while self._ask("sinfo", "--noheader", "--Node", "--format=%T").split() != ["idle"] * len(self.lab.hosts):
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                raise SlurmError(
                    f"Slurm did not come up on {', '.join(dead) or 'all hosts'}:\n{self._last_words(dead)}"
                )
            time.sleep(0.1)

    def _last_words(self, names: list[str]) -> str:
        """The ends of the logs of some daemons, or all."""
        ends = []
        for name in names or self._daemons:
            for path in (self.folder / f"{name}.log", self.folder / f"{name}.out"):
                lines = path.read_text(errors="replace").splitlines() if path.exists() else []
                ends += [f"  {name}: {line}" for line in lines[-5:]]
        return "\n".join(ends)

    def _ask(self, *command: str) -> str:
        """What a Slurm command prints on the first host, nothing if it fails."""
        try:
            done = subprocess.run(
                [*self.lab.at(self.lab.hosts[0]), *command],
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=10,
            )
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout if done.returncode == 0 else ""

    def _stop(self) -> None:
        """Jobs first, then the daemons; whatever is left then ends with the lab's PID namespace."""
        if self._daemons and self._daemons["slurmctld"].poll() is None:
            end = time.monotonic() + 5
            while self._ask("squeue", "--noheader", "--format=%i").strip() and time.monotonic() < end:
                self._ask("scancel", "--state=PENDING,RUNNING,SUSPENDED", "--user=root")
                time.sleep(0.2)
            self._ask("scontrol", "shutdown")
        for name, daemon in self._daemons.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(ENDING)
                continue
            print(f"lab: {name} did not stop by itself", file=sys.stderr)
            daemon.kill()
