"""A cache of things that are to be freed, limited in number and in bytes; the one used least lately goes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from typing import Any, Generic, Protocol, TypeVar


class Freed(Protocol):
    """What is to be freed."""

    nbytes: int

    def free(self) -> None:
        """It is not used any more."""


Kept = TypeVar("Kept", bound=Freed)


class Cache(dict[Hashable, Any]):
    """Entries with ``nbytes`` and ``free()``; the least recently used go when limits are met. ``tick`` counts uses: an
    entry's ``used`` is the number of its last one, which others may set, too."""

    def __init__(self, entries: int, nbytes: int, tick: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._entries, self._limit, self.nbytes = entries, nbytes, 0
        self._tick = count(1).__next__ if tick is None else tick

    def keep(self, key: Hashable, entry: Any) -> None:
        """Add (or replace) an entry, which itself never goes, however large."""
        if key in self:
            self.drop(key)
        while self and (len(self) >= self._entries or self.nbytes + entry.nbytes > self._limit):
            oldest, _ = min(self.items(), key=lambda known: known[1].used)
            self.drop(oldest)
        self[key] = entry
        self.nbytes += entry.nbytes
        self.touch(key)

    def touch(self, key: Hashable) -> None:
        """It is used again."""
        self[key].used = self._tick()

    def drop(self, key: Hashable) -> None:
        """Remove and free an entry."""
        entry = self.pop(key)
        self.nbytes -= entry.nbytes
        entry.free()

    def drop_all(self) -> None:
        """Remove and free all entries, in the order in which they came."""
        while self:
            self.drop(next(iter(self)))


class Idle(Generic[Kept]):
    """Things that nobody uses now, in lists of those that are alike, limited in number and in bytes; those of the list
    that was used least lately go."""

    def __init__(self, entries: int, nbytes: int) -> None:
        self._most, self._limit = entries, nbytes
        self._alike: dict[Hashable, list[Kept]] = {}
        self._filled: dict[int, list[Kept]] = {}  # by the list's own number; the last one was used last
        self.count = self.nbytes = 0

    def alike(self, key: Hashable) -> list[Kept]:
        """The list of those of a key, for `take` and `put`, which change it; the same one each time, but for a key that
        has not come for long."""
        if key not in self._alike and len(self._alike) >= self._most:
            self._alike.clear()
        return self._alike.setdefault(key, [])

    def take(self, alike: list[Kept]) -> Kept | None:
        """One of them, which is in use from now on; None if there is none."""
        if not alike:
            return None
        entry = alike.pop()
        self._use(alike)
        self._count(entry, -1)
        return entry

    def put(self, alike: list[Kept], entry: Kept) -> None:
        """It is not in use any more. It stays, however large."""
        while self._filled and (self.count >= self._most or self.nbytes + entry.nbytes > self._limit):
            self._drop_oldest()
        alike.append(entry)
        self._use(alike)
        self._count(entry, 1)

    def drop_all(self) -> None:
        """Free all."""
        while self._filled:
            self._drop_oldest()

    def _use(self, alike: list[Kept]) -> None:
        self._filled.pop(id(alike), None)
        if alike:
            self._filled[id(alike)] = alike

    def _drop_oldest(self) -> None:
        alike = self._filled.pop(next(iter(self._filled)))
        while alike:
            entry = alike.pop()
            self._count(entry, -1)
            entry.free()

    def _count(self, entry: Kept, one: int) -> None:
        self.count += one
        self.nbytes += one * entry.nbytes
