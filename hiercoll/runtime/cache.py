"""A cache of things that are to be freed, limited in number and in bytes; the one used least lately goes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from typing import Any


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
