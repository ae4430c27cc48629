"""Calls on plain arrays, of which little has to be looked at to tell what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from hiercoll.collectives import Collective, Holds
from hiercoll.runtime.arguments import Arguments
from hiercoll.runtime.beginning import Beginning
from hiercoll.runtime.operations import find_operation
from hiercoll.runtime.session import Session

PLAIN = frozenset("bBhHiIlLqQfd")  # types of elements, as NumPy spells them


def by_bytes(collective: Collective, arguments: Arguments) -> Any:
    """What calls on arrays have in common from which the same is learned; None where that cannot be told."""
    if not collective.buffers:
        return collective
    in_place, array = arguments.send is MPI.IN_PLACE, getattr(arguments, collective.everywhere)
    if array is None:  # in place on the root, by its other buffer
        in_place, array = True, arguments.recv if arguments.send is None else arguments.send
    if not collective.operation:
        return collective, array.nbytes, in_place
    op = arguments.op
    if not isinstance(op, MPI.Op) or not op.is_predefined:
        return None  # it may be freed, and its handle be another's
    return collective, array.nbytes, in_place, op.handle, array.dtype


def is_plain(state: Session | Beginning, collective: Collective, given: Arguments) -> bool:
    """Whether the call is sound, as far as can be seen at little cost: arrays of one type of numbers, in the order of
    C, of the right sizes, that do not overlap. On ranks other than a root the second buffer does not matter."""
    send, recv = given.send, given.recv
    if not collective.is_even or not collective.buffers:
        return collective.is_even
    if collective.root and not (type(given.root) is int and 0 <= given.root < state.size):
        return False
    if collective.one_buffer or (collective.is_rooted and state.rank != given.root):
        own = getattr(given, collective.everywhere)
        fits = _is_plain_array(own) and (collective.everywhere == "send" or own.flags.carray)
    else:
        fits = _is_plain_array(send) and _is_plain_array(recv) and _go_together(collective, state.size, send, recv)
    if fits and collective.operation:
        find_operation(given.op, send.dtype, state.rank)
    return bool(fits)


def _is_plain_array(array: Any) -> bool:
    """Whether it is an array of a type of numbers, in the order of C, that is not empty."""
    if type(array) is not np.ndarray or array.dtype.char not in PLAIN:
        return False
    return bool(array.dtype.isnative and array.flags.c_contiguous and array.nbytes)


def _go_together(collective: Collective, ranks: int, send: np.ndarray[Any, Any], recv: np.ndarray[Any, Any]) -> bool:
    """Whether contiguous arrays are of one type and of sizes that suit each other, and have no byte in common."""
    sent, received = (collective.blocks(holds, ranks) for holds in (collective.send, collective.recv))
    if send.dtype != recv.dtype or not recv.flags.carray:
        return False
    if send.size % sent or recv.size % received or send.size // sent != recv.size // received:
        return False
    begin, end = MPI.Get_address(recv), MPI.Get_address(send)
    return bool(end >= begin + recv.nbytes or begin >= end + send.nbytes)


def new_result(collective: Collective, comm: Any, send: Any) -> Any:
    """A new receive array for a plain array; None for anything else."""
    if type(send) is not np.ndarray or not send.flags.c_contiguous:
        return None
    if collective.send is collective.recv:
        return np.empty_like(send)
    try:
        size = comm.size
    except (AttributeError, MPI.Exception):  # no communicator: the slow path says so
        return None
    if collective.send is Holds.EACH:  # one of its rows, if it has them
        shape = send.shape[1:] if send.shape[:1] == (size,) else (send.size // size,)
        return np.empty(shape, send.dtype)
    return np.empty((size, *send.shape), send.dtype)
