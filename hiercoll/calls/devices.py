"""Calls with equal blocks on device arrays that have come before: found by what the arrays say of themselves, and run
again without a look at anything else."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from mpi4py import MPI

from hiercoll.collectives import Collective
from hiercoll.cuda import device_at
from hiercoll.cuda.arrays import new_like, stream_of
from hiercoll.errors import BufferTypeError
from hiercoll.runtime.arguments import Arguments

Place: TypeAlias = "tuple[object, ...]"


class Ends(NamedTuple):
    """The buffers of a call, as a key tells them apart, and handles of the streams that produce them."""

    places: tuple[Place, ...]
    streams: tuple[int, ...]


def ends_of(collective: Collective, given: Arguments) -> Ends | None:
    """The buffers of a call, if they are arrays of devices, or None where only the root has them, or in place; else
    None. Equal places are of equal sizes and types, and on the same device."""
    places, streams = list[Place](), list[int]()
    for array in (given.recv,) if collective.one_buffer else (given.recv, given.send):
        if (array is None and collective.is_rooted) or array is MPI.IN_PLACE:
            places.append((array,))
            continue
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None or interface.get("mask") is not None:
            return None
        address, is_read_only = interface["data"]
        if not address:
            return None
        what = (
            tuple(interface["shape"]),
            interface["typestr"],
            tuple(interface.get("strides") or ()),
            getattr(array, "dtype", None),
        )
        places.append((type(array), address, is_read_only, *what, device_at(address).name))
        streams.append(stream_of(array, interface))
    return Ends(tuple(places), tuple(streams)) if streams else None


def new_on_device(collective: Collective, comm: Any, send: Any) -> Any:
    """A new receive array for an array of a device in C's order; None for anything else."""
    try:
        interface = send.__cuda_array_interface__
        if interface.get("strides") is not None:
            return None
        shape = tuple(interface["shape"])
        return new_like(send, shape if collective.send is collective.recv else (comm.size, *shape), comm.rank)
    except (AttributeError, RuntimeError, BufferTypeError, MPI.Exception):  # the slow path says what is wrong
        return None
