"""Whether all ranks make the same call (``HIERCOLL_CHECK=1``)."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from mpi4py import MPI

from hiercoll.engines import Requested
from hiercoll.errors import CollectiveMismatch
from hiercoll.executor import Plan
from hiercoll.interpreter import Sizes
from hiercoll.watch import Watch, ranks_in_words

SAID = 256  # bytes of a call's description that ranks show each other


def same_call(comm: MPI.Intracomm, what: str, sizes: tuple[Sizes, Sizes] | None, watch: Watch | None) -> None:
    """Make sure that all ranks make the same call, ``what``; ``sizes``: the bytes of each block
    that is sent, and that is to be received. Collective; not for longer than the ``watch``
    allows. Raises CollectiveMismatch on all ranks."""
    key, most = zlib.crc32(what.encode()), np.empty(2, np.int64)
    _wait(comm.Iallreduce(np.array([key, -key]), most, op=MPI.MAX), what, watch)
    if most[0] != -most[1]:
        raise CollectiveMismatch(f"rank {comm.rank}: ranks make different calls: {_sides(comm, what, watch)}")
    wrong = _different_sizes(comm, what, *sizes, watch) if sizes is not None else ""
    if wrong:
        raise CollectiveMismatch(f"rank {comm.rank}: {what}: sizes differ: {wrong}")


def _sides(comm: MPI.Intracomm, what: str, watch: Watch | None) -> str:
    """Which ranks make which call."""
    mine, texts = np.zeros(SAID, np.uint8), np.zeros((comm.size, SAID), np.uint8)
    data = np.frombuffer(what.encode()[:SAID], np.uint8)
    mine[: len(data)] = data
    _wait(comm.Iallgather(mine, texts), what, watch)
    sides: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        sides.setdefault(text.tobytes().rstrip(b"\0").decode(errors="replace"), []).append(rank)
    return "; ".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in sides.items())


def _different_sizes(comm: MPI.Intracomm, what: str, sent: Sizes, received: Sizes, watch: Watch | None) -> str:
    """Who sends other sizes than are received, the first of each rank; empty if nobody does."""
    coming = np.empty(comm.size, np.int64)
    _wait(comm.Ialltoall(sent.astype(np.int64), coming), what, watch)
    wrong = np.flatnonzero(coming != received)
    found = np.array([wrong[0], coming[wrong[0]], received[wrong[0]]] if len(wrong) else [-1, 0, 0], np.int64)
    everyone = np.empty((comm.size, 3), np.int64)
    _wait(comm.Iallgather(found, everyone), what, watch)
    return "; ".join(
        f"rank {source} sends {nbytes} bytes to rank {rank}, which receives {due}"
        for rank, (source, nbytes, due) in enumerate(everyone.tolist())
        if source >= 0
    )


def _wait(request: Any, what: str, watch: Watch | None) -> None:
    """Wait for a request; not for longer than the deadline."""
    if watch is None:
        request.Wait()
        return
    plan = Plan(Requested(request), f"{what} (checking)", None, None)
    plan.active, plan.entry = True, watch.begin(plan)
    watch.complete(plan)
