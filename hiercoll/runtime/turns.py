"""Threads of a process that do something one after the other which all ranks of a communicator do together.

A lock would not do: threads of another rank may come in another order, and each would wait for the other's. So ranks
agree whose turn it is: that of the communicator whose name comes first among those that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import sleep

PAUSE = 1e-3  # seconds before one asks again


class Turns:
    """Of the threads of a process; each has a communicator, by whose ``name`` it waits."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: list[str] = []
        self._taken = ""  # by whom

    @contextmanager
    def turn(self, name: str, all_may: Callable[[bool], bool]) -> Iterator[None]:
        """The turn of this communicator on all its ranks, which are in this call. ``all_may``: whether it is this
        value on all of them. Collective."""
        with self._lock:
            self._waiting.append(name)
        try:
            # Who has been asked says no to others until all have answered: so there is one at a time on each rank. The
            # first name is refused no more as soon as it waits on all of its ranks.
            while not all_may(self._take(name)):
                self._give_back(name)
                sleep(PAUSE)
            yield
        finally:
            self._give_back(name)
            with self._lock:
                self._waiting.remove(name)

    def _take(self, name: str) -> bool:
        with self._lock:
            if not self._taken and name == min(self._waiting):
                self._taken = name
            return self._taken == name

    def _give_back(self, name: str) -> None:
        with self._lock:
            if self._taken == name:
                self._taken = ""
