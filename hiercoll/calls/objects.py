"""Python objects as messages of drop-in communicators.

An object is pickled once, by `MPI.pickle`, which a program may have configured. Its size and first bytes travel
together, so that a small one takes one collective where mpi4py makes two; the rest of larger ones follows. All go by
the drop-in communicator's methods for buffers, and so by what "auto" has found for them. Results and errors are
mpi4py's. mpi4py serves the call where hiercoll is not set up, or leaves a communicator alone, and within one node:
there a second collective takes less time than this does in Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hiercoll.runtime.lifetime import by_handle

Bytes = npt.NDArray[np.uint8]
FIRST = 256  # bytes of a first message: 8 of the size, and the object's first ones


class ObjectMessages:
    """The methods of communicators that take objects, for `dropin.Collectives`."""

    def bcast(self: Any, obj: Any, root: int = 0) -> Any:
        """As mpi4py's."""
        if not _is_served(self) or type(root) is not int or not 0 <= root < self.size:
            return MPI.Comm.bcast(self, obj, root)
        is_root = self.rank == root
        data = np.frombuffer(MPI.pickle.dumps(obj), np.uint8) if is_root else np.empty(0, np.uint8)
        first = _first(data)
        self.Bcast(first, root)
        size = _sizes(first)[0]
        rest = data[FIRST - 8 :] if is_root else np.empty(max(size - FIRST + 8, 0), np.uint8)
        if rest.size:
            self.Bcast(rest, root)
        return MPI.pickle.loads(data if is_root else _joined(first, rest, size))

    def allgather(self: Any, sendobj: Any) -> list[Any]:
        """As mpi4py's."""
        if not _is_served(self):
            return MPI.Comm.allgather(self, sendobj)
        data = np.frombuffer(MPI.pickle.dumps(sendobj), np.uint8)
        firsts = np.empty((self.size, FIRST), np.uint8)
        self.Allgather(_first(data), firsts)
        sizes = _sizes(firsts)
        lengths = np.maximum(sizes - FIRST + 8, 0)
        rests = np.empty(lengths.sum(), np.uint8)
        if rests.size:
            self.Allgatherv(data[FIRST - 8 :], [rests, lengths])
        parts = np.split(rests, np.cumsum(lengths)[:-1])
        return [MPI.pickle.loads(_joined(*each)) for each in zip(firsts, parts, sizes.tolist(), strict=True)]

    def alltoall(self: Any, sendobj: Any) -> list[Any]:
        """As mpi4py's."""
        if not _is_served(self):
            return MPI.Comm.alltoall(self, sendobj)
        if sendobj is not None and len(sendobj) != self.size:
            raise ValueError(f"expecting {self.size} items, got {len(sendobj)}")
        pieces = [b""] * self.size if sendobj is None else [MPI.pickle.dumps(each) for each in sendobj]
        sizes, theirs = np.array([len(each) for each in pieces], np.int64), np.empty(self.size, np.int64)
        self.Alltoall(sizes, theirs)
        found = np.empty(theirs.sum(), np.uint8)
        self.Alltoallv([np.frombuffer(b"".join(pieces), np.uint8), sizes], [found, theirs])
        parts = np.split(found, np.cumsum(theirs)[:-1])
        return [MPI.pickle.loads(each) if each.size else None for each in parts]


def _is_served(comm: Any) -> bool:
    """Whether hiercoll is set up on the communicator: on all ranks, or on none."""
    session = None if comm == MPI.COMM_NULL else by_handle.get(comm.handle)
    return session is not None and not session.is_plain and len(session.topology.nodes) > 1


def _first(data: Bytes) -> Bytes:
    """The size of pickled data, and its first bytes."""
    first = np.zeros(FIRST, np.uint8)
    first[:8] = np.frombuffer(np.int64(data.size).tobytes(), np.uint8)
    first[8 : 8 + data.size] = data[: FIRST - 8]
    return first


def _sizes(firsts: Bytes) -> npt.NDArray[np.int64]:
    """The sizes in first messages."""
    return np.frombuffer(firsts.reshape(-1, FIRST)[:, :8].tobytes(), np.int64)


def _joined(first: Bytes, rest: Bytes, size: int) -> Bytes:
    """Pickled data of that size, from both messages."""
    return np.concatenate([first[8:], rest])[:size] if rest.size else first[8 : 8 + size]
