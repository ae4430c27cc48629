"""How a row is run: its command, and what is set for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from gpu_check.rows import Row

ROOT = Path(__file__).resolve().parents[2]
MARGIN = 5.0  # seconds that tests/mpi/launch.py has for saying which job did not end

# All ranks are on this host, whose other networks may be closed, or slow to say that they are. Nothing for PRRTE:
# it takes the loopback interface where there is no other, and refuses to be told to where there is one.
LOOPBACK = {
    "HYDRA_IFACE": "lo",  # mpiexec of MPICH
    "FI_PROVIDER": "tcp",  # libfabric
    "FI_TCP_IFACE": "lo",
    "UCX_NET_DEVICES": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "PMIX_MCA_ptl_tcp_if_include": "lo",  # between mpiexec of Open MPI and its ranks
}
# For all rows. Plug-ins that happen to be installed beside pytest must change nothing.
SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "0",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **LOOPBACK,
    }
)
STARTER_FLAGS = {"openmpi": ["--oversubscribe", "--bind-to", "none"]}


def command(row: Row, environment: Path, limit: float, figures: Path) -> list[str]:
    """The words of a row's command, which has ``limit`` seconds; ``figures`` is the file that they are added to."""
    python = str(environment / "bin" / "python")
    start = [str(environment / "bin" / "mpiexec"), *STARTER_FLAGS.get(row.library, []), "-n", str(row.ranks), python]
    select = ["-rs", "-k", row.tests]
    if row.part == "smoke":
        return [*start, "scripts/gpu_smoke.py"]
    if row.part in ("figures", "links"):
        return [*start, "scripts/gpu_bench.py", "--json", str(figures)]
    if row.part == "sanitizer":
        tool = [shutil.which("compute-sanitizer") or "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
        return [*tool, python, "-m", "pytest", "-q", "-p", "pytest_mpi", "--with-mpi", "tests/gpu", *select]
    launch = [python, "tests/mpi/launch.py", "--tests", "tests/gpu", "--timeout", str(max(limit - MARGIN, 1))]
    return [*launch, "--ranks", str(row.ranks), *select]


def settings(row: Row, ucx: Path) -> dict[str, str]:
    """What is set for a row; ``ucx`` is the folder of the UCX that knows CUDA."""
    if row.gpus == 1:
        return {**SETTINGS, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    if row.part != "direct":
        return dict(SETTINGS)
    return {
        **SETTINGS,
        "LD_LIBRARY_PATH": f"{ucx}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "HIERCOLL_CUDA_AWARE": "1",
        "UCX_TLS": "self,sm,tcp,cuda_copy,cuda_ipc",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "OMPI_MCA_pml": "ucx",
        # Left to itself, this component serves only what it knows for a fast network.
        "OMPI_MCA_pml_ucx_tls": "any",
        "OMPI_MCA_pml_ucx_devices": "any",
    }
