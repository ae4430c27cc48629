"""The MPI library's own collectives, in each form, with the arguments that a request makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hiercoll.collectives import ALLGATHER, ALLGATHERV, ALLTOALL, ALLTOALLV, BCAST, NATIVE, Collective
from hiercoll.errors import ConstraintError
from hiercoll.runtime import native
from hiercoll.runtime.request import Data, Request
from hiercoll.tables import Variant

RANK, RANKS = 1, 3


class Comm:
    """In place of a communicator: what was called, with which arguments."""

    rank = RANK

    def __init__(self, *lacking: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.lacking = lacking

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if name in self.lacking:
                raise NotImplementedError
            self.calls.append((name, args))
            return MPI.Prequest()

        return called


def of(collective: Collective, form: str = "", *, in_place: bool = False) -> Request:
    """A request of rank 1 of 3."""
    variant = Variant(NATIVE, {"form": form} if form else {})
    sizes, at = np.array([8, 0, 16]), np.array([0, 8, 8])
    received = Data(4096, collective.blocks(collective.recv, RANKS), 8)
    sent = Data(8192, collective.blocks(collective.send, RANKS), 8)
    if not collective.is_even:
        received = Data(4096, RANKS, 0, None, None, sizes, at)
        one = collective is ALLGATHERV
        sent = Data(8192, 1, 0, None, None, sizes[:1], at[1:2]) if one else received._replace(address=8192)
    root = 2 if collective.root else 0
    return Request(collective, None if in_place else sent, received, root, 8, variant)


def started(request: Request, *lacking: str, held: bool = False) -> tuple[str, tuple[Any, ...]]:
    """What runs, once."""
    comm: Any = Comm(*lacking)
    engine = native.engine(comm, request, RANK, 0 if request.sent is None else 8192, 4096, held=held)
    if not comm.calls:  # else it is persistent
        engine.start() if held else engine.run()
    (call,) = comm.calls
    return call


def spans(message: Any) -> tuple[int, int, list[Any]]:
    """Address and length of a message, and the rest of it."""
    buffer, *rest = message
    return buffer.address, buffer.nbytes, [each.tolist() if isinstance(each, np.ndarray) else each for each in rest]


@pytest.mark.parametrize(
    ("form", "held", "name"),
    [
        ("", False, "Alltoall"),
        ("", True, "Ialltoall"),
        ("nonblocking", False, "Ialltoall"),
        ("nonblocking", True, "Ialltoall"),
        ("persistent", True, "Alltoall_init"),
    ],
)
def test_forms(form: str, held: bool, name: str) -> None:
    """The blocking one in calls; one that can be started in plans."""
    assert started(of(ALLTOALL, form), held=held)[0] == name


def test_no_persistent_collectives() -> None:
    """Named, with what is lacking."""
    with pytest.raises(ConstraintError, match="persistent collectives") as refused:
        started(of(ALLTOALL, "persistent"), "Alltoall_init", held=True)
    assert refused.value.rank == RANK


def test_arguments() -> None:
    """Of equal blocks: the bytes of one; a root where there is one; one buffer where there is one."""
    name, (out, into) = started(of(ALLGATHER))
    assert (name, spans(out), spans(into)) == ("Allgather", (8192, 8, [8, MPI.BYTE]), (4096, 24, [8, MPI.BYTE]))
    _, (out, into) = started(of(ALLTOALL, in_place=True))
    assert out is MPI.IN_PLACE and spans(into) == (4096, 24, [8, MPI.BYTE])
    name, (buffer, root) = started(of(BCAST, in_place=True))
    assert (name, spans(buffer), root) == ("Bcast", (4096, 8, [8, MPI.BYTE]), 2)


def test_arguments_of_uneven_blocks() -> None:
    """Bytes of each, and where they are; of one that is sent just those."""
    whole: list[Any] = [[8, 0, 16], [0, 8, 8], MPI.BYTE]
    name, (out, into) = started(of(ALLTOALLV))
    assert (name, spans(out), spans(into)) == ("Alltoallv", (8192, 24, whole), (4096, 24, whole))
    name, (out, into) = started(of(ALLGATHERV))
    assert (name, spans(out), spans(into)) == ("Allgatherv", (8200, 8, [8, MPI.BYTE]), (4096, 24, whole))
    _, (out, into) = started(of(ALLGATHERV, in_place=True))
    assert out is MPI.IN_PLACE and spans(into) == (4096, 24, whole)
