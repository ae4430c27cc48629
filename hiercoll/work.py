"""What a call is apart from its buffers, and what is kept from call to call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, TypeAlias

from hiercoll.algorithms import Params
from hiercoll.tables import NATIVE
from hiercoll.transports import DIRECT, Transport

Key: TypeAlias = "tuple[Hashable, ...]"


class Cache(OrderedDict[Key, Any]):
    """Entries with ``nbytes`` and ``free()``; the least recently used go when limits are met."""

    def __init__(self, entries: int, nbytes: int) -> None:
        super().__init__()
        self._entries, self._limit, self.nbytes = entries, nbytes, 0

    def keep(self, key: Key, entry: Any) -> None:
        """Add (or replace) an entry, which itself never goes, however large."""
        if key in self:
            self.drop(key)
        self[key] = entry
        self.nbytes += entry.nbytes
        while len(self) > 1 and (len(self) > self._entries or self.nbytes > self._limit):
            self.drop(next(iter(self)))

    def drop(self, key: Key) -> None:
        """Remove and free an entry."""
        entry = self.pop(key)
        self.nbytes -= entry.nbytes
        entry.free()

    def drop_all(self) -> None:
        """Remove and free all entries, oldest first."""
        while self:
            self.drop(next(iter(self)))


class Work:
    """One call, apart from its buffers: equal on all ranks."""

    def __init__(
        self,
        collective: str,
        algorithm: str,
        params: Params,
        block: int,
        inplace: bool,
        kind: str = "host",
        transport: Transport = DIRECT,
    ) -> None:
        self.collective, self.algorithm, self.params = collective, algorithm, params
        self.block, self.inplace, self.kind, self.transport = block, inplace, kind, transport
        self.key: Key = (collective, algorithm, tuple(params.items()), kind, transport, block, inplace)

    @property
    def is_native(self) -> bool:
        """Whether it is the MPI library's own call as a program makes it, the blocking one."""
        return self.algorithm == NATIVE and not self.params

    @property
    def family(self) -> str:
        """The collective whose algorithms serve this one."""
        return "allgather" if self.collective == "allgatherv" else self.collective

    @property
    def name(self) -> str:
        """Collective and algorithm in words."""
        return " ".join([self.collective, self.algorithm, *(f"{k}={v}" for k, v in self.params.items())])
