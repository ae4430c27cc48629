"""Calls of the MPI library's own collectives that the compiled engine makes by itself, without mpi4py's method.

That method finds out anew in each call what the buffers are, which takes as long as a short collective in a node's
memory. Of a known call all but the places of its buffers is the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpi4py import MPI

from hiercoll.collectives import Collective, Holds
from hiercoll.loading import is_array
from hiercoll.runtime.arguments import Arguments
from hiercoll.runtime.compiled import value_of

# Send and recv; one buffer, a root; an operation; send and recv, a root; an operation, a root. As in _calls.c
EXCHANGE, SPREAD, COMBINE, ROOTED, COMBINE_AT = range(5)
_ABSENT = object()  # a buffer that the collective does not have, or not on this rank


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


class _Block(NamedTuple):
    """Elements of a block in a buffer, and their type; nothing of a buffer that is in place, or not this rank's."""

    elements: int = 0
    type: int = 0


def direct(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> Direct | None:
    """How the MPI library's own collective is called on equal blocks, in arrays and other buffers alone, or with a
    predefined datatype, and perhaps a count; None for other calls, which mpi4py's method serves."""
    shape = _shape(collective)
    if shape is None or given.named:
        return None
    buffers = [given.send, given.recv]
    if collective.one_buffer or (collective.is_rooted and comm.rank != given.root):
        buffers[max(0, collective.of_root)] = _ABSENT
    holds = (collective.send, collective.recv)
    send, recv = blocks = [_block(*each, comm.size) for each in zip(buffers, holds, strict=True)]
    if send is None or recv is None:
        return None
    never_in_place = given.send if collective.of_root == 0 else given.recv
    if never_in_place is MPI.IN_PLACE or send == recv == _Block():
        return None
    if collective.operation and _Block() not in blocks and send != recv:
        return None
    # The other one does not matter, but is to be sound.
    send, recv = (recv if send == _Block() else send), (send if recv == _Block() else recv)
    operation = value_of(given.op) if collective.operation else 0
    return Direct(collective.native, shape, given.root, *send, *recv, operation)


def _shape(collective: Collective) -> int | None:
    """How MPI's function takes its arguments, if it is one of those that can be called."""
    if not collective.is_even or not collective.buffers:
        return None
    if collective.operation:
        is_whole = collective.send is collective.recv is Holds.VECTOR
        return None if not is_whole else COMBINE_AT if collective.is_rooted else COMBINE
    return ROOTED if collective.is_rooted else SPREAD if collective.one_buffer else EXCHANGE


def _block(buffer: Any, holds: Holds, size: int) -> _Block | None:
    """A block in a buffer, as mpi4py counts its elements; None where mpi4py has more to say."""
    if buffer is _ABSENT or buffer is MPI.IN_PLACE:
        return _Block()
    blocks, kind, count = size if holds is Holds.EACH else 1, None, None
    if type(buffer) in (list, tuple):
        buffer, *counts, kind = buffer if len(buffer) in (2, 3) else (None, None)
        count = counts[0] if counts else None
        if not isinstance(kind, MPI.Datatype) or not (count is None or type(count) is int):
            return None
    known: Any = MPI._typedict
    if is_array(buffer):
        if not buffer.flags.c_contiguous or not buffer.dtype.isnative:
            return None
        nbytes, kind = buffer.nbytes, known.get(buffer.dtype.char) if kind is None else kind
    elif (view := _view(buffer)) is not None:
        nbytes, kind = view.nbytes, known.get(view.format) if kind is None else kind
    else:
        return None
    if kind is None or not kind.is_predefined or kind.Get_extent() != (0, kind.Get_size()) or not kind.Get_size():
        return None
    every, rest = divmod(nbytes, blocks * kind.Get_size())
    if count is not None:
        return _Block(count, value_of(kind)) if 0 <= count <= every else None
    return None if rest else _Block(every, value_of(kind))


def _view(buffer: Any) -> memoryview | None:
    """Memory in one piece that is no array of NumPy's, such as a bytearray or an array.array; None for all else."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError):
        return None
    return view if view.c_contiguous else None
