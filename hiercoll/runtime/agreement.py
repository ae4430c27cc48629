"""What ranks find out together: largest and least values, sums, and whether they make the same request."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hiercoll.errors import BufferSizeError, ConstraintError, ParameterError

if TYPE_CHECKING:
    import numpy.typing as npt

Numbers: TypeAlias = "npt.NDArray[Any]"


class Agreement:
    """``largest`` and ``total`` combine arrays of all ranks; ``rested`` does what ``largest`` does, where some ranks
    come much later than others. ``meet`` is called before, with what is about to be agreed on, and may raise
    CollectiveTimeout. All methods are collective."""

    def __init__(
        self,
        rank: int,
        largest: Callable[[Numbers], Numbers],
        total: Callable[[Numbers], Numbers],
        meet: Callable[[str], None],
        rested: Callable[[Numbers], Numbers] | None = None,
    ) -> None:
        self._rank, self._largest, self._total, self._meet = rank, largest, total, meet
        self._rested = rested or largest

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The largest values of all ranks, each of several."""
        return self._slowest(seconds, self._largest)

    def slowest_of_some(self, seconds: Sequence[float]) -> list[float]:
        """The same, where only some ranks have something to do before, or much more than others."""
        return self._slowest(seconds, self._rested)

    def _slowest(self, seconds: Sequence[float], combine: Callable[[Numbers], Numbers]) -> list[float]:
        self._meet("agreement on algorithms")
        return [float(value) for value in combine(np.array(seconds, float))]

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """The sums of all ranks."""
        self._meet("agreement on algorithms")
        return [int(number) for number in self._total(np.array(numbers, np.int64))]

    def least(self, value: int, what: str) -> int:
        """The smallest value of all ranks."""
        self._meet(what)
        return -int(self._largest(np.array([-value], np.int64))[0])

    def equal(self, value: int, what: str) -> bool:
        """Whether it is the same on all ranks."""
        self._meet(what)
        most = self._largest(np.array([value, -value], np.int64))
        return bool(most[0] == -most[1])

    def same(self, name: str, key: Hashable, size: int, *values: int, lacking: int = 0) -> list[int]:
        """The largest of the ranks' ``values``, if all make the call with this ``key`` and blocks of ``size`` bytes,
        and no bytes are ``lacking`` on one.

        Raises BufferSizeError, ParameterError and ConstraintError on all ranks alike.
        """
        self._meet(f"{name}, set-up")
        number = zlib.crc32(repr(key).encode())
        mine = np.array([size, -size, number, -number, lacking, *values], dtype=np.int64)
        most = [int(value) for value in self._largest(mine)]
        if most[0] != -most[1]:
            got = f"between {-most[1]} and {most[0]}"
            raise BufferSizeError("bytes per block", "the same on all ranks", got, self._rank)
        if most[2] != -most[3]:
            raise ParameterError("algorithm", "the same with the same parameters on all ranks", name, self._rank)
        if most[4]:
            got = f"a window that needs {most[4]} bytes more than there are"
            raise ConstraintError(name, "places in /dev/shm", got, self._rank)
        return most[5:]
