"""Which of a host's devices a rank uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from hiercoll.cuda.device import Devices
from hiercoll.cuda.nearness import are_near, share_out
from hiercoll.errors import NEEDED, DeviceError


def bind(
    comm: MPI.Intracomm,
    devices: Devices | None = None,
    nearness: Callable[[Sequence[str]], list[bool]] = are_near,
) -> int:
    """Make a device this rank's current one, and return its number. Collective.

    The ranks of a host that see the same devices share them out evenly, so that as many as
    possible get one that is near the CPUs they may run on; where that leaves a choice, and
    where nobody knows what is near, by their order in ``comm``, going round if there are
    fewer devices than ranks. So it suits CUDA_VISIBLE_DEVICES, and Slurm and jsrun where
    they have given each rank, or each resource set, devices of its own.

    ``devices`` are those of CuPy if not given, and ``nearness`` says which of them are near.
    Raises DeviceError, on all ranks of the host, where one sees no device.
    """
    host = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    problem, seen, near = None, list[str](), list[bool]()
    try:
        devices = devices or _devices()
        seen = devices.visible()
        near = nearness(seen)
    except DeviceError as error:
        problem = DeviceError(error.argument, error.expected, error.got, comm.rank)
    everyone: Sequence[tuple[list[str], list[bool]]] = host.allgather((seen, near))
    rank = host.rank
    host.Free()
    if problem is not None:
        raise problem
    if ([], []) in everyone:
        without = f"none (rank {everyone.index(([], []))} of this host)"
        raise DeviceError("devices", "at least one for every rank", without, comm.rank)
    assert devices is not None
    sharing = [other for other, (visible, _) in enumerate(everyone) if visible == seen]
    number = share_out([everyone[other][1] for other in sharing])[sharing.index(rank)]
    devices.select(number)
    return number


def _devices() -> Devices:
    try:
        from hiercoll.cuda.cupy_device import CupyDevices
    except ImportError as error:
        raise DeviceError("devices", NEEDED, str(error)) from None
    return CupyDevices()
