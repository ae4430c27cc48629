"""Tokens of reductions: the expression trees that values are made by."""

from __future__ import annotations

from hiercoll.collectives import Order, fixed_tree
from hiercoll.contracts import Contract


class Sums:
    """Tokens of partial reductions: the two operands of each. Equal trees have equal tokens."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._operands: dict[int, tuple[int, ...]] = {}  # two; one of what is rounded
        self._known: dict[tuple[int, ...], int] = {}
        self._roundings: dict[int, int] = {}
        self._exact: dict[int, int] = {}  # of values in which something is rounded, the token if nothing were

    def add(self, left: int, right: int) -> int:
        """The token of left (+) right."""
        return self._token((left, right))

    def rounded(self, token: int) -> int:
        """The token of a value in elements of the program's type: another one if it is a sum that has been made in
        wider ones."""
        return self._token((token,)) if len(self._operands.get(token, ())) > 1 else token

    def _token(self, operands: tuple[int, ...]) -> int:
        if operands not in self._known:
            self._known[operands] = token = -2 - len(self._known)
            self._operands[token] = operands
            if often := max(map(self.roundings, operands)) + (len(operands) == 1):
                exact = [self._exact.get(each, each) for each in operands]
                self._roundings[token] = often
                self._exact[token] = exact[0] if len(exact) == 1 else self.add(*exact)
        return self._known[operands]

    def order(self, want: int, have: int) -> Order | None:
        """The order in which the token ``have`` combines what the reduction ``want`` is of, each contribution once;
        None if it does not."""
        parts, due = self.parts(have), self._contract.contributors(want)
        if parts != due:
            return Order.ANY if sorted(parts) == due else None
        return Order.FIXED if self._exact.get(have, have) == fixed_tree(due, self.add) else Order.RANK

    def roundings(self, token: int) -> int:
        """How often a contribution to the value has been rounded, at most."""
        return self._roundings.get(token, 0)

    def parts(self, token: int) -> list[int]:
        """What the value is made of, in order."""
        found, todo = [], [token]
        while todo:
            operands = self._operands.get(last := todo.pop())
            if operands is None:
                found.append(last)
            else:
                todo += reversed(operands)
        return found

    def block_of(self, token: int) -> int:
        """The number of the block that a value is of."""
        while token in self._operands:
            token = self._operands[token][0]
        return self._contract.block_of(token)

    def describe(self, token: int) -> str:
        """The token in words."""
        return " + ".join(map(self._contract.describe, self.parts(token)))

    def tree(self, token: int) -> str:
        """The tree in numbers of ranks: "(0 + 1) + 2"."""
        operands = self._operands.get(token)
        if operands is None:
            return str(self._contract.rank_of(token))
        parts = [f"({self.tree(each)})" if each in self._operands else self.tree(each) for each in operands]
        return " + ".join(parts) if len(parts) > 1 else f"round{parts[0]}"
