"""Waiting for something that other ranks take part in, by a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpi4py import MPI

from hiercoll.runtime.progress import wait_politely
from hiercoll.runtime.watch import Entry, Watch

if TYPE_CHECKING:
    from hiercoll.runtime.engines import Pending


class _Awaited:
    """What is waited for, for a watch; of who is late, MPI tells nothing."""

    def __init__(self, is_over: Callable[[], bool], name: str) -> None:
        self.name, self._is_over = name, is_over
        self.entry: Entry | None = None

    def test(self) -> bool:
        """See `Running`."""
        return self._is_over()

    def pending(self) -> list[Pending]:
        """See `Running`."""
        return []


def wait_for(is_over: Callable[[], bool], what: str, watch: Watch | None) -> None:
    """Wait until something ``is_over``, such as a request by its Test, while what is under way goes on: some ranks may
    complete that first. Raises CollectiveTimeout and CollectiveFailed."""
    awaited = _Awaited(is_over, what)
    if watch is not None:
        awaited.entry = watch.begin(awaited)
        try:
            watch.complete(awaited)
        except MPI.Exception as error:
            raise watch.failed(awaited, error) from error
    while not awaited.test():
        wait_politely()
