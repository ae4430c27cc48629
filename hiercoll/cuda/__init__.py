"""Device memory: what is known of a device, and the gate to it.

Importing this needs neither CuPy nor a driver; `device_at` does, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from hiercoll.cuda.arrays import is_device_array
from hiercoll.errors import NEEDED, DeviceError

if TYPE_CHECKING:
    from hiercoll.cuda.device import Device

__all__ = ["arrays", "bind", "device_at", "is_device_array", "unmap", "use"]

Provider: TypeAlias = "Callable[[int], Device]"


@lru_cache(maxsize=64)
def _real(number: int) -> Device:
    from hiercoll.cuda.cupy_device import CupyDevice

    return CupyDevice(number)


@lru_cache(maxsize=1)
def _driver() -> Callable[[int], int] | str:
    """What gives the number of an address' device; why there is none, which is found out once: an import that fails is
    tried anew each time, and costs milliseconds."""
    try:
        from hiercoll.cuda.cupy_device import device_number
    except ImportError as error:
        return str(error)
    return device_number


def current_device() -> int:
    """The number of this thread's current device."""
    from hiercoll.cuda.cupy_device import CupyDevices

    return CupyDevices().current()


def _of_driver(address: int) -> Device:
    number = _driver()
    if isinstance(number, str):
        raise DeviceError("device array", NEEDED, number)
    return _real(number(address) if address else current_device())


_provider: Provider = _of_driver


def device_at(address: int) -> Device:
    """The device whose memory is at ``address``; at 0, where empty arrays lie, the current one. Raises DeviceError
    without CuPy, a driver or such memory."""
    return _provider(address)


def arrays() -> Any:
    """`measuring.Arrays` on the current device. Raises DeviceError without CuPy."""
    try:
        from hiercoll.cuda.cupy_device import CupyArrays
    except ImportError as error:
        raise DeviceError("--memory", NEEDED, str(error)) from None
    return CupyArrays()


def bind(comm: Any) -> int:
    """See `hiercoll.cuda.binding.bind`; here so that importing this needs no mpi4py."""
    from hiercoll.cuda.binding import bind as bind_rank

    return bind_rank(comm)


def unmap(comm: Any) -> None:
    """End all mappings of other processes' device memory in this process; those that are needed again are made anew.
    When it returns, no rank of ``comm`` has any left, and memory that was exchanged may be given back to the driver
    (by ``torch.cuda.empty_cache()``, say); CUDA leaves open what happens if others still have it mapped. Collective."""
    from hiercoll.cuda.mappings import clear_all

    clear_all()
    comm.Barrier()


@contextmanager
def use(provider: Provider) -> Iterator[None]:
    """Ask ``provider`` for devices, as tests without a GPU do."""
    global _provider
    before, _provider = _provider, provider
    try:
        yield
    finally:
        _provider = before
