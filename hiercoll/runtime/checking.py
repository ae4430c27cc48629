"""Whether all ranks make the same call (``HIERCOLL_CHECK=1``)."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from hiercoll.errors import CollectiveMismatch
from hiercoll.runtime.progress import abandoned
from hiercoll.runtime.waiting import wait_for
from hiercoll.runtime.watch import Watch, ranks_in_words

if TYPE_CHECKING:
    import numpy.typing as npt

    from hiercoll.runtime.sizes import Sizes

SHOWN = 256  # bytes of a call's description that ranks show each other
BYTES = ("u1", "uint8")
ANY = -(2**62)  # less than what stands for any elements


class Description(NamedTuple):
    """A call as ranks compare it: in words, and the elements of its blocks (those of bytes go with
    any). Where blocks differ, the bytes of each that is sent, and of each to be received, and the
    elements of those that are sent, and to be received."""

    what: str
    elements: str = ""
    sizes: tuple[Sizes, Sizes] | None = None
    kinds: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        return f"{self.what} of {self.elements}" if self.elements else self.what


Describe: TypeAlias = "Callable[[], Description]"


def comparison(comm: MPI.Intracomm, described: Description) -> Iterator[MPI.Request]:
    """Compare what ranks call. Yields requests; each is complete before the next is asked for.
    Collective. Raises CollectiveMismatch on all ranks."""
    key, kind = (zlib.crc32(text.encode()) for text in (described.what, described.elements))
    kinds = [kind, -kind] if described.elements not in ("", *BYTES) else [ANY, ANY]
    # Kept here: mpi4py 4.1.2's request of a reduction does not keep its buffers.
    mine, most = np.array([key, -key, *kinds]), np.empty(4, np.int64)
    yield comm.Iallreduce(mine, most, op=MPI.MAX)
    if most[0] != -most[1] or most[2] not in (ANY, -most[3]):
        texts = np.zeros((comm.size, SHOWN), np.uint8)
        yield comm.Iallgather(np.frombuffer(str(described).encode()[:SHOWN].ljust(SHOWN, b"\0"), np.uint8), texts)
        raise CollectiveMismatch(f"rank {comm.rank}: ranks make different calls: {_sides(texts)}")
    if described.sizes is None:
        return
    going, due = (
        np.stack([sizes, np.full(comm.size, _number(kind))], axis=1).astype(np.int64)
        for sizes, kind in zip(described.sizes, described.kinds, strict=True)
    )
    coming = np.empty_like(due)
    yield comm.Ialltoall(going, coming)
    other = (coming[:, 1] != due[:, 1]) & (coming[:, 1] > 0) & (due[:, 1] > 0) & (due[:, 0] > 0)
    wrong = np.flatnonzero((coming[:, 0] != due[:, 0]) | other)
    first = [wrong[0], *coming[wrong[0]], *due[wrong[0]]] if len(wrong) else [-1, 0, 0, 0, 0]
    found, everyone = np.array(first, np.int64), np.empty((comm.size, 5), np.int64)
    yield comm.Iallgather(found, everyone)
    if (everyone[:, 0] >= 0).any():
        raise CollectiveMismatch(f"rank {comm.rank}: {described.what}: blocks differ: {_differences(everyone)}")


def _number(kind: str) -> int:
    """Elements as a number from which `_word` tells them; 0 for those that go with any."""
    return 0 if kind in BYTES else int.from_bytes(kind.encode()[:7], "little")


def _word(number: int) -> str:
    return number.to_bytes(7, "little").rstrip(b"\0").decode(errors="replace")


def _sides(texts: npt.NDArray[np.uint8]) -> str:
    """Which ranks make which call."""
    sides: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        sides.setdefault(text.tobytes().rstrip(b"\0").decode(errors="replace"), []).append(rank)
    return "; ".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in sides.items())


def _differences(found: Sizes) -> str:
    """Who sends other blocks than are received, the first of each rank."""
    return "; ".join(
        f"rank {source} sends {nbytes} bytes to rank {rank}, which receives {due}"
        if nbytes != due
        else f"rank {source} sends elements {_word(kind)} to rank {rank}, which receives {_word(wanted)}"
        for rank, (source, nbytes, kind, due, wanted) in enumerate(found.tolist())
        if source >= 0
    )


def same_call(comm: MPI.Intracomm, described: Description, watch: Watch | None) -> None:
    """Wait for a `comparison`; not for longer than the ``watch`` allows."""
    steps, request = comparison(comm, described), None
    try:
        for request in steps:
            wait_for(request.Test, f"{described.what} (checking)", watch)
    except CollectiveMismatch:
        raise
    except BaseException:
        abandoned.append((steps, request))  # with the buffers
        raise


class Successive:
    """Requests, each made when the one before is complete; ``result`` is what their generator returns, if it is one."""

    def __init__(self, requests: Iterator[MPI.Request]) -> None:
        self._requests, self._request, self._is_over = requests, MPI.REQUEST_NULL, False
        self.result: Any = None

    def is_over(self) -> bool:
        """Go on as far as can be; whether that was all."""
        try:
            while not self._is_over and self._request.Test():
                self._request = next(self._requests)
        except StopIteration as end:
            self.result, self._is_over = end.value, True
        return self._is_over


class Later:
    """A comparison that goes on whenever it is looked at, after those that are ``waiting`` already:
    MPI has all ranks start collectives in the same order, on a communicator of their own."""

    def __init__(self, waiting: deque[Later], steps: Iterator[MPI.Request]) -> None:
        self._waiting, self._steps = waiting, Successive(steps)
        waiting.append(self)

    def test(self) -> bool:
        """Whether it is over; not to be asked again then. Raises CollectiveMismatch on all ranks."""
        if self._waiting[0] is not self:
            return False
        is_over = True  # if they raise, too
        try:
            is_over = self._steps.is_over()
        finally:
            if is_over:
                self._waiting.popleft()
        return is_over
