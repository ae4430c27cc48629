"""Which tags messages have, so that those of different calls never match each other.

On a communicator of hiercoll's own, each collective has a range for its blocking calls, of which one runs at a time;
one more range is for calls in the background, which take tags from it in turns. Plans that programs hold keep theirs,
on communicators of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from hiercoll.errors import ConstraintError


class Reserved(NamedTuple):
    """Tags of a plan: the first of them, and whether they are on a new communicator."""

    first: int
    is_new: bool


class Tags:
    """The tags of a communicator for ``collectives`` collectives; ``most`` is the largest tag that MPI allows."""

    def __init__(self, most: int, collectives: int, rank: int = 0) -> None:
        self._most, self._rank = most, rank
        self.count = most // (collectives + 1)  # in a range
        self._background, self.background_next = collectives * self.count, 0
        self._reserved = most + 1  # next tag of a plan: there is no communicator for them yet

    def of_blocking(self, number: int) -> int:
        """The first tag of the blocking calls of the collective with this number."""
        return number * self.count

    def in_background(self, count: int) -> int:
        """The first of so many tags, next to those of the call in the background before. Raises ConstraintError."""
        if count > self.count:
            expected = f"at most {self.count} tags, which the MPI library has for calls in the background"
            raise ConstraintError("segments", expected, count, self._rank)
        if self.background_next + count > self.count:
            self.background_next = 0
        self.background_next += count
        return self._background + self.background_next - count

    def reserve(self, count: int) -> Reserved:
        """So many tags for a plan, never to be given again on the same communicator. Raises ConstraintError."""
        if count > self._most + 1:
            expected = f"at most {self._most + 1} tags, which the MPI library has on a communicator"
            raise ConstraintError("segments", expected, count, self._rank)
        is_new = self._reserved + count > self._most
        first = 0 if is_new else self._reserved
        self._reserved = first + count
        return Reserved(first, is_new)
