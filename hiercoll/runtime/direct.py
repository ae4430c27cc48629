"""Calls of the MPI library's own collectives that the compiled engine makes by itself, without mpi4py's method.

That method finds out anew in each call what the buffers are, which takes as long as a short collective in a node's
memory. Of a known call all but the places of its buffers is the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hiercoll.collectives import Collective, Holds
from hiercoll.runtime.compiled import value_of
from hiercoll.runtime.request import Arguments

EXCHANGE, SPREAD, COMBINE = range(3)  # send and recv; one buffer and a root; an operation; as in _calls.c


class Direct(NamedTuple):
    """What MPI's function is called with, as mpi4py's method would: its name, its ``shape``, and handles as numbers."""

    name: str
    shape: int
    root: int
    send_count: int
    send_type: int
    recv_count: int
    recv_type: int
    operation: int
    in_place: int  # the address that stands for it


class _Elements(NamedTuple):
    """Of a buffer; nothing of one that is in place."""

    number: int = 0
    type: int = 0


def direct(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> Direct | None:
    """How the MPI library's own collective is called on equal blocks that all ranks have, in arrays, alone or with a
    predefined datatype; None for other calls, which mpi4py's method serves."""
    shape = _shape(collective)
    send = _Elements() if collective.one_buffer else _elements(given.send)
    recv = _elements(given.recv)
    if shape is None or send is None or recv is None or given.named:
        return None
    if given.send is MPI.IN_PLACE:
        if shape != COMBINE:
            return None
    elif shape == COMBINE and send != recv:
        return None
    (send_count, send_rest), (recv_count, recv_rest) = (
        divmod(each.number, collective.blocks(holds, comm.size))
        for each, holds in ((send, collective.send), (recv, collective.recv))
    )
    if send_rest or recv_rest:
        return None
    operation = value_of(given.op) if shape == COMBINE else 0
    types, in_place = (send.type, recv.type), int(MPI.IN_PLACE) % (1 << 64)
    return Direct(collective.native, shape, given.root, send_count, types[0], recv_count, types[1], operation, in_place)


def _shape(collective: Collective) -> int | None:
    """How MPI's function takes its arguments, if it is one of those that can be called."""
    if not collective.is_even or collective.is_rooted or not collective.buffers:
        return None
    if collective.operation:
        return COMBINE if collective.send is collective.recv is Holds.VECTOR else None
    return SPREAD if collective.one_buffer else EXCHANGE


def _elements(buffer: Any) -> _Elements | None:
    """Of an array, or an array and a datatype, as mpi4py counts them; None for other buffers."""
    if buffer is MPI.IN_PLACE:
        return _Elements()
    kind = None
    if type(buffer) in (list, tuple) and len(buffer) == 2 and isinstance(buffer[1], MPI.Datatype):
        buffer, kind = buffer
    if type(buffer) is not np.ndarray or not buffer.flags.c_contiguous:
        return None
    known: Any = MPI._typedict
    if kind is None and buffer.dtype.isnative:
        kind = known.get(buffer.dtype.char)
    if kind is None or not kind.is_predefined or kind.Get_extent() != (0, kind.Get_size()) or not kind.Get_size():
        return None
    count, rest = divmod(buffer.nbytes, kind.Get_size())
    return None if rest else _Elements(count, value_of(kind))
