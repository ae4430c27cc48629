"""A cache of things that are to be freed, limited in number and in bytes; the one used least lately goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any


class Cache(OrderedDict[Hashable, Any]):
    """Entries with ``nbytes`` and ``free()``; the least recently used go when limits are met."""

    def __init__(self, entries: int, nbytes: int) -> None:
        super().__init__()
        self._entries, self._limit, self.nbytes = entries, nbytes, 0

    def keep(self, key: Hashable, entry: Any) -> None:
        """Add (or replace) an entry, which itself never goes, however large."""
        if key in self:
            self.drop(key)
        self[key] = entry
        self.nbytes += entry.nbytes
        while len(self) > 1 and (len(self) > self._entries or self.nbytes > self._limit):
            self.drop(next(iter(self)))

    def drop(self, key: Hashable) -> None:
        """Remove and free an entry."""
        entry = self.pop(key)
        self.nbytes -= entry.nbytes
        entry.free()

    def drop_all(self) -> None:
        """Remove and free all entries, oldest first."""
        while self:
            self.drop(next(iter(self)))
