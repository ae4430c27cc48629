"""The MPI library: its name, and what it does in a way of its own."""

from __future__ import annotations

from functools import cache

from mpi4py import MPI


@cache
def mpi_library() -> str:
    """Name and version of the MPI library, as in tables: "MPICH 5.0.2"."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def crashes_by_threads_windows() -> bool:
    """Whether threads of a process must not make windows at the same time: Open MPI (seen with 5.0.11) ends the job
    then, by its component osc/ucx."""
    return MPI.get_vendor()[0] == "Open MPI"


def may_copy() -> bool:
    """Whether the MPI library copies attributes in duplicates alone, which all ranks make in the same order as other
    calls. Open MPI does in `Create_group`, too, which a thread may call while another one makes the first call."""
    return MPI.get_vendor()[0] != "Open MPI"
