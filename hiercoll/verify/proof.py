"""What a proof says: nothing, or what is wrong and where."""

from __future__ import annotations

from dataclasses import dataclass

from hiercoll.collectives import Order
from hiercoll.contracts import Contract
from hiercoll.errors import VerificationError
from hiercoll.schedule import Region


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, and what would happen."""

    kind: str
    message: str
    rank: int | None = None
    op: int | None = None
    region: Region | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}" + ("" if self.op is None else f", op {self.op}")
        region = "" if self.region is None else f", {self.region}"
        return f"[{self.kind}] {where}{region}: {self.message}"


@dataclass(frozen=True)
class Proof:
    """What `verify` found; ``ok`` if nothing. ``order``: in which a reduction combines its contributions, None for
    others; ``roundings``: how often results are rounded, at most, where wider elements are combined, else None."""

    contract: Contract
    operations: int
    findings: tuple[Finding, ...]
    order: Order | None = None
    roundings: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the schedules are proved."""
        return not self.findings

    def require(self) -> Proof:
        """This proof; raises VerificationError if it failed."""
        if self.findings:
            raise VerificationError(self.findings)
        return self
