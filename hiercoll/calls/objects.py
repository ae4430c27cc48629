"""Python objects as messages of drop-in communicators.

An object is pickled once, by `MPI.pickle`, which a program may have configured. Its size and first bytes travel
together, so that a small one takes one collective where mpi4py makes two; the rest of larger ones follows. All go by
the drop-in communicator's methods for buffers, and so by what "auto" has found for them. Results and errors are
mpi4py's. mpi4py serves the call where hiercoll is not set up, or leaves a communicator alone, and within one node:
there a second collective takes less time than this does in Python. So it does where objects go to or from one rank:
that rank alone waits, and what mpi4py sends second arrives with the first.

Communicators of `mpi4py.util.pkl5` keep large buffers out of pickles (PEP 574). What is left of an object, and the
sizes of its buffers, then travel as above, and the buffers after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI
from mpi4py.util import pkl5

from hiercoll.collectives import ALLGATHER, ALLTOALL, BCAST, GATHER, NATIVE, SCATTER, Collective
from hiercoll.loading import LazyModule
from hiercoll.runtime.arguments import Mode
from hiercoll.runtime.compiled import observers
from hiercoll.runtime.lifetime import by_handle

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
FIRST = 256  # bytes of a first message: 8 of the size, and the object's first ones
ALIGNED = 64  # bytes, of which the places of buffers that are out of band are multiples


class ObjectMessages:
    """The methods of communicators that take objects, for `dropin.Collectives`."""

    __slots__ = ()

    def bcast(self: Any, obj: Any, root: int = 0) -> Any:
        """As mpi4py's."""
        if not _is_served(self) or (place := _rank(root, self.size)) is None:
            native = super().bcast  # type: ignore[misc]
            return _left(self, BCAST, native, obj, root) if observers else native(obj, root)
        root = place
        is_root = self.rank == root
        data = np.frombuffer(_dumped(obj), np.uint8) if is_root else np.empty(0, np.uint8)
        first = _first(data)
        self.Bcast(first, root)
        size = _sizes(first)[0]
        rest = data[FIRST - 8 :] if is_root else np.empty(max(size - FIRST + 8, 0), np.uint8)
        if rest.size:
            self.Bcast(rest, root)
        return _loaded(data if is_root else _joined(first, rest, size))

    def allgather(self: Any, sendobj: Any) -> list[Any]:
        """As mpi4py's."""
        if not _is_served(self):
            native = super().allgather  # type: ignore[misc]
            return _left(self, ALLGATHER, native, sendobj) if observers else native(sendobj)  # type: ignore[no-any-return]
        data = np.frombuffer(_dumped(sendobj), np.uint8)
        firsts = np.empty((self.size, FIRST), np.uint8)
        self.Allgather(_first(data), firsts)
        sizes = _sizes(firsts)
        lengths = np.maximum(sizes - FIRST + 8, 0)
        rests = np.empty(lengths.sum(), np.uint8)
        if rests.size:
            self.Allgatherv(data[FIRST - 8 :], [rests, lengths])
        parts = np.split(rests, np.cumsum(lengths)[:-1])
        return [_loaded(_joined(*each)) for each in zip(firsts, parts, sizes.tolist(), strict=True)]

    def gather(self: Any, sendobj: Any, root: int = 0) -> list[Any] | None:
        """mpi4py's."""
        return _left(self, GATHER, super().gather, sendobj, root)  # type: ignore[misc, no-any-return]

    def scatter(self: Any, sendobj: Any, root: int = 0) -> Any:
        """mpi4py's."""
        return _left(self, SCATTER, super().scatter, sendobj, root)  # type: ignore[misc]

    def alltoall(self: Any, sendobj: Any) -> list[Any]:
        """As mpi4py's."""
        if not _is_served(self):
            native = super().alltoall  # type: ignore[misc]
            return _left(self, ALLTOALL, native, sendobj) if observers else native(sendobj)  # type: ignore[no-any-return]
        pieces = [b""] * self.size if sendobj is None else [_dumped(each) for each in _items(self, sendobj)]
        sizes, theirs = np.array([len(each) for each in pieces], np.int64), np.empty(self.size, np.int64)
        self.Alltoall(sizes, theirs)
        found = np.empty(theirs.sum(), np.uint8)
        self.Alltoallv([np.frombuffer(b"".join(pieces), np.uint8), sizes], [found, theirs])
        parts = np.split(found, np.cumsum(theirs)[:-1])
        return [_loaded(each) if each.size else None for each in parts]


class BuffersOutOfBand(ObjectMessages):
    """The same for communicators of `mpi4py.util.pkl5`."""

    __slots__ = ()

    def bcast(self: Any, obj: Any, root: int = 0) -> Any:
        """As pkl5's."""
        if not _is_served(self) or (place := _rank(root, self.size)) is None:
            return super().bcast(obj, root)
        root = place
        is_root = self.rank == root
        data, own = pkl5.pickle.dumps_oob(obj if is_root else None)
        data, sizes = super().bcast((data, [len(each) for each in own]), root)
        buffers: list[Any] = list(own) if is_root else [np.empty(size, np.uint8) for size in sizes]
        for each in buffers:
            self.Bcast(np.frombuffer(each, np.uint8), root)
        return pkl5.pickle.loads_oob(data, buffers)

    def allgather(self: Any, sendobj: Any) -> list[Any]:
        """As pkl5's, but that what is received has its memory together."""
        if not _is_served(self):
            return super().allgather(sendobj)
        data, buffers = pkl5.pickle.dumps_oob(sendobj)
        heads = super().allgather((data, [len(each) for each in buffers]))
        lengths = [sum(map(_padded, sizes)) for _, sizes in heads]
        found = np.empty(sum(lengths), np.uint8)
        if found.size:
            self.Allgatherv(_packed(buffers), [found, lengths])
        return _unpacked(found, heads)

    def alltoall(self: Any, sendobj: Any) -> list[Any]:
        """As pkl5's, but that what is received has its memory together."""
        if not _is_served(self):
            return super().alltoall(sendobj)
        items = [None] * self.size if sendobj is None else _items(self, sendobj)
        pickled = [pkl5.pickle.dumps_oob(each) for each in items]
        heads = super().alltoall([(data, [len(each) for each in buffers]) for data, buffers in pickled])
        packed = [_packed(buffers) for _, buffers in pickled]
        lengths = [sum(map(_padded, sizes)) for _, sizes in heads]
        found = np.empty(sum(lengths), np.uint8)
        self.Alltoallv([np.concatenate(packed), [each.size for each in packed]], [found, lengths])
        return _unpacked(found, heads)


def _left(comm: Any, collective: Collective, native: Callable[..., Any], *given: Any) -> Any:
    """A call that is left to mpi4py; observers see it."""
    begun = [observer.begin(comm, collective, Mode.OBJECTS, ()) for observer in observers]
    found = native(*given)
    for observer, each in zip(observers, begun, strict=True):
        observer.end(each, NATIVE)
    return found


def _dumped(obj: Any) -> bytes:
    """An object, pickled. Raises TypeError, as mpi4py does, where the program's own way gives something else."""
    data = MPI.pickle.dumps(obj)
    if type(data) is not bytes:
        raise TypeError(f"expected bytes, {type(data).__name__} found")
    return data


def _loaded(data: Bytes) -> Any:
    """The object; the program's own way gets what mpi4py gives it."""
    return MPI.pickle.loads(MPI.buffer(data))


def _items(comm: Any, objects: Any) -> list[Any]:
    """As many as there are ranks. Raises ValueError, as mpi4py does."""
    items = list(objects)
    if len(items) != comm.size:
        raise ValueError(f"expecting {comm.size} items, got {len(items)}")
    return items


def _is_served(comm: Any) -> bool:
    """Whether hiercoll is set up on the communicator: on all ranks, or on none."""
    session = None if comm == MPI.COMM_NULL else by_handle.get(comm.handle)
    return session is not None and not session.is_plain and len(session.topology.nodes) > 1


def _rank(root: Any, size: int) -> int | None:
    """However it is spelled: ranks may do so in different ways. None: it is none, or no more than an index, which
    mpi4py refuses."""
    if not hasattr(root, "__int__"):
        return None
    try:
        place = index(root)
    except TypeError:
        return None
    return place if 0 <= place < size else None


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


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _packed(buffers: Sequence[Any]) -> Bytes:
    """One after the other, each in an aligned place."""
    sizes = [_padded(len(each)) for each in buffers]
    packed = np.empty(sum(sizes), np.uint8)
    for each, end in zip(buffers, np.cumsum(sizes), strict=True):
        start = end - _padded(len(each))
        packed[start : start + len(each)] = np.frombuffer(each, np.uint8)
    return packed


def _unpacked(found: Bytes, heads: Sequence[tuple[bytes, Sequence[int]]]) -> list[Any]:
    """The objects whose buffers have been found, of all ranks."""
    objects, start = [], 0
    for data, sizes in heads:
        buffers = []
        for size in sizes:
            buffers.append(found[start : start + size])
            start += _padded(size)
        objects.append(pkl5.pickle.loads_oob(data, buffers))
    return objects


for _kind in (ObjectMessages, BuffersOutOfBand):
    for _name, _each in vars(_kind).items():
        if isinstance(_each, FunctionType):
            _each.__qualname__ = _name  # which a TypeError names
