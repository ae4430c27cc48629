"""Every algorithm against the MPI library's own collective, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import VARIANTS, WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY, Params
from hiercoll.tools.workload import tokens

CASES = [
    *VARIANTS,
    *((collective, name, {}) for collective in ("alltoall", "allgather") for name in ("auto", "native")),
]
IDS = [" ".join([c, n, *(f"{k}={v}" for k, v in p.items())]) for c, n, p in CASES]


def call(collective: str) -> Callable[..., np.ndarray]:
    """hiercoll's collective of that name."""
    return getattr(hiercoll, collective)


def filled(collective: str, comm: MPI.Intracomm, nbytes: int, salt: int = 0) -> np.ndarray:
    """A send buffer of ``nbytes`` per block whose bytes name source, destination, position and ``salt``."""
    peers = range(comm.size) if collective == "alltoall" else [comm.rank]
    return np.concatenate([tokens(comm.rank + salt * 97, peer, nbytes) for peer in peers])


def native(collective: str, comm: MPI.Intracomm, send: np.ndarray, block: int) -> np.ndarray:
    """What the MPI library makes of ``send``."""
    want = np.zeros(block * comm.size, np.uint8)
    (comm.Alltoall if collective == "alltoall" else comm.Allgather)(send, want)
    return want


def skip_what_is_refused(collective: str, name: str, params: Params, comm: MPI.Intracomm) -> None:
    """That it is refused, alike on all ranks, `test_equals_native` shows."""
    entry = REGISTRY[collective].get(name)
    if entry and (why := entry.refusal(hiercoll.get_topology(comm), params)):
        pytest.skip(f"not on this layout: {why}")


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize(("collective", "name", "params"), CASES, ids=IDS)
def test_equals_native(
    collective: str, name: str, params: Params, layout: str, on_layout: Callable[[str], MPI.Intracomm]
) -> None:
    """Sizes 0, one element, odd ones and a large one; one refusal, alike on all ranks, if constrained."""
    comm = on_layout(layout)
    entry = REGISTRY[collective].get(name)
    topology = hiercoll.get_topology(comm)
    if entry and entry.refusal(topology, params):
        with pytest.raises(hiercoll.ConstraintError):
            call(collective)(comm, filled(collective, comm, 8), algorithm=name, **params)
        return
    for nbytes in (0, 1, 8, 13, 4099):
        send = filled(collective, comm, nbytes)
        recv = np.full(nbytes * comm.size, 0xA5, np.uint8)
        assert call(collective)(comm, send, recv, algorithm=name, **params) is recv
        assert np.array_equal(recv, native(collective, comm, send, nbytes)), f"{nbytes} bytes"


@pytest.mark.parametrize(("collective", "name", "params"), CASES, ids=IDS)
def test_one_mebibyte_blocks(
    collective: str, name: str, params: Params, on_layout: Callable[[str], MPI.Intracomm]
) -> None:
    """Blocks of 1 MiB (512 KiB from 6 ranks on): rendezvous on every library."""
    size = WORLD.size
    comm = on_layout(f"{size - size // 2}+{size // 2}" if size > 1 else "1x1")
    skip_what_is_refused(collective, name, params, comm)
    nbytes = (1 << 20 if size < 6 else 1 << 19) + 24
    send = filled(collective, comm, nbytes)
    recv = np.full(nbytes * size, 0xA5, np.uint8)
    call(collective)(comm, send, recv, algorithm=name, **params)
    assert np.array_equal(recv, native(collective, comm, send, nbytes))


def can_be_in_place(collective: str, name: str) -> bool:
    """Whether a case takes MPI.IN_PLACE."""
    return name in ("auto", "native") or REGISTRY[collective][name].in_place


@pytest.mark.parametrize(
    ("collective", "name", "params"),
    [case for case in CASES if can_be_in_place(*case[:2])],
    ids=[name for name, case in zip(IDS, CASES, strict=True) if can_be_in_place(*case[:2])],
)
def test_in_place(collective: str, name: str, params: Params, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """MPI.IN_PLACE gives what separate buffers give."""
    size = WORLD.size
    comm = on_layout(f"{size - size // 2}+{size // 2}:cyclic" if size > 1 else "1x1")
    skip_what_is_refused(collective, name, params, comm)
    for nbytes in (0, 3, 1000):
        send = filled(collective, comm, nbytes)
        want = native(collective, comm, send, nbytes)
        recv = np.full(nbytes * size, 0xA5, np.uint8)
        if collective == "alltoall":
            recv[:] = send
        else:
            recv[comm.rank * nbytes : (comm.rank + 1) * nbytes] = send
        call(collective)(comm, MPI.IN_PLACE, recv, algorithm=name, **params)
        assert np.array_equal(recv, want)


@pytest.mark.parametrize(("collective", "name", "params"), CASES, ids=IDS)
def test_repeated_starts(collective: str, name: str, params: Params, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """One plan, started again and again without a barrier, send rewritten in between."""
    size = WORLD.size
    comm = on_layout(f"{size - size // 2}+{size // 2}" if size > 1 else "1x1")
    skip_what_is_refused(collective, name, params, comm)
    send = filled(collective, comm, 40)
    recv = np.empty(40 * size, np.uint8)
    peers = range(size)
    with getattr(hiercoll, f"{collective}_init")(comm, send, recv, algorithm=name, **params) as plan:
        for start in range(12):
            send[:] = filled(collective, comm, 40, salt=start)
            recv[:] = 0xA5
            assert plan() is recv
            sources = [(peer, comm.rank if collective == "alltoall" else peer) for peer in peers]
            want = np.concatenate([tokens(source + start * 97, target, 40) for source, target in sources])
            assert np.array_equal(recv, want), f"start {start}"
