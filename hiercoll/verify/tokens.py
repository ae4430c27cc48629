"""Tokens of reductions: which contributions a value is made of."""

from __future__ import annotations

from hiercoll.collectives import Contract


class Sums:
    """Tokens of partial reductions: the contributors of each, in order."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._parts: dict[int, tuple[int, ...]] = {}
        self._known: dict[tuple[int, ...], int] = {}

    def add(self, left: int, right: int) -> int:
        """The token of left (+) right."""
        parts = self._parts.get(left, (left,)) + self._parts.get(right, (right,))
        token = self._known.setdefault(parts, -2 - len(self._known))
        self._parts[token] = parts
        return token

    def same(self, want: int, have: int) -> bool:
        """Whether the token ``have`` is what the contract calls ``want``."""
        if not self._contract.is_reduction(want):
            return want == have
        parts = list(self._parts.get(have, (have,)))
        if self._contract.commutative:
            parts.sort()
        return parts == self._contract.contributors(want)

    def describe(self, token: int) -> str:
        """The token in words."""
        parts = self._parts.get(token)
        return " + ".join(map(self._contract.describe, parts)) if parts else self._contract.describe(token)
