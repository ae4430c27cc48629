"""hiercoll: hierarchical, proved collectives (alltoall, allgather, allreduce, ...) for mpi4py programs.

    import hiercoll
    recvbuf = hiercoll.alltoall(comm, sendbuf)

Importing hiercoll needs no MPI; the calls below do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hiercoll.collectives import called
from hiercoll.errors import (
    ArgumentError,
    BufferOverlapError,
    BufferSizeError,
    BufferTypeError,
    CollectiveFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorError,
    ConstraintError,
    DeviceError,
    DeviceMemoryError,
    EngineWarning,
    HiercollError,
    LayoutError,
    LearnedWarning,
    NativeWarning,
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
from hiercoll.loading import load

if TYPE_CHECKING:
    from hiercoll.calls.background import Request
    from hiercoll.calls.dropin import Intracomm, Pkl5Intracomm
    from hiercoll.calls.functions import *  # noqa: F403

__version__ = "0.1.0"
_FUNCTIONS = [f"{begin}{each.name}{end}" for each in called() for begin, end in (("", ""), ("i", ""), ("", "_init"))]
_MODULES = {  # of what needs mpi4py
    "hiercoll.calls.functions": ("Plan", "config", "configure", "get_topology", "waitall", *_FUNCTIONS),
    "hiercoll.calls.dropin": ("Intracomm", "Pkl5Intracomm"),
    "hiercoll.calls.background": ("Request",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [  # noqa: F405
    "ArgumentError",
    "BufferOverlapError",
    "BufferSizeError",
    "BufferTypeError",
    "CollectiveFailed",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CommunicatorError",
    "ConstraintError",
    "DeviceError",
    "DeviceMemoryError",
    "EngineWarning",
    "HiercollError",
    "Intracomm",
    "LayoutError",
    "LearnedWarning",
    "NativeWarning",
    "ParameterError",
    "Pkl5Intracomm",
    "Plan",
    "PlanError",
    "Request",
    "ScheduleError",
    "TableError",
    "TableWarning",
    "ThreadError",
    "TransportWarning",
    "UnknownAlgorithmError",
    "VerificationError",
    "config",
    "configure",
    "get_topology",
    "waitall",
    *_FUNCTIONS,
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hiercoll' has no attribute {name!r}")
    found = getattr(load(_MODULE_OF[name]), name)
    globals()[name] = found
    return found
