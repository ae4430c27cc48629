"""hiercoll: hierarchical, proved alltoall and allgather for mpi4py programs.

    import hiercoll
    recvbuf = hiercoll.alltoall(comm, sendbuf)

Importing hiercoll needs no MPI; the calls below do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hiercoll.errors import (
    ArgumentError,
    BufferOverlapError,
    BufferSizeError,
    BufferTypeError,
    CommunicatorError,
    ConstraintError,
    DeviceError,
    DeviceMemoryError,
    HiercollError,
    LayoutError,
    ParameterError,
    PlanError,
    ScheduleError,
    TableError,
    TableWarning,
    ThreadError,
    TransportWarning,
    UnknownAlgorithmError,
    VerificationError,
)

if TYPE_CHECKING:
    from hiercoll.api import Plan, allgather, allgather_init, alltoall, alltoall_init, configure, get_topology

__version__ = "0.1.0"
_CALLS = {"Plan", "allgather", "allgather_init", "alltoall", "alltoall_init", "configure", "get_topology"}

__all__ = [
    "ArgumentError",
    "BufferOverlapError",
    "BufferSizeError",
    "BufferTypeError",
    "CommunicatorError",
    "ConstraintError",
    "DeviceError",
    "DeviceMemoryError",
    "HiercollError",
    "LayoutError",
    "ParameterError",
    "Plan",
    "PlanError",
    "ScheduleError",
    "TableError",
    "TableWarning",
    "ThreadError",
    "TransportWarning",
    "UnknownAlgorithmError",
    "VerificationError",
    "allgather",
    "allgather_init",
    "alltoall",
    "alltoall_init",
    "configure",
    "get_topology",
]


def __getattr__(name: str) -> Any:
    if name not in _CALLS:
        raise AttributeError(f"module 'hiercoll' has no attribute {name!r}")
    api = import_module("hiercoll.api")
    globals().update({call: getattr(api, call) for call in _CALLS})
    return globals()[name]
