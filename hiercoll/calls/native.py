"""Blocking calls that are left to the MPI library's own collectives."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from hiercoll.calls.routes import remember_native
from hiercoll.collectives import Collective
from hiercoll.runtime import progress
from hiercoll.runtime.arguments import Arguments
from hiercoll.runtime.beginning import Beginning
from hiercoll.runtime.compiled import know_arrays
from hiercoll.tuning.share import count

if TYPE_CHECKING:
    from hiercoll.runtime.session import Session


def own_method(state: Session | Beginning, collective: Collective, given: Arguments) -> Callable[[], object]:
    """mpi4py's own call."""
    buffers = (given.send, given.recv)[2 - collective.buffers :]
    more = [getattr(given, name) for name in collective.more]
    return partial(getattr(state.user, collective.native), *buffers, *more)


def serve_first(first: Beginning, collective: Collective, given: Arguments, native: Callable[[], object]) -> None:
    """Leave a call to the MPI library, ``native``, on a communicator on which hiercoll is not set up."""
    if "numpy" in sys.modules:
        know_arrays()
    run_native(native, first.tally)
    remember_native(first, collective, given, None)
    first.served()


def serve_native(
    session: Session, collective: Collective, given: Arguments, native: Callable[[], object], tally: array[int] | None
) -> None:
    """Leave a call by "auto" to the MPI library, ``native``, and let it serve such calls, as many as are left; all of
    them without a ``tally``."""
    run_native(native, tally)
    remember_native(session, collective, given, tally)


def run_native(native: Callable[[], object], tally: array[int] | None) -> None:
    """The MPI library's own collective, counted, if there is a ``tally``."""
    if progress.active:
        progress.before_blocking()
    begin = perf_counter()
    native()
    if tally is not None:
        count(tally, perf_counter() - begin)
