"""Proof that schedules fulfil a contract, or a counter-example in words.

The rules, for all ranks' schedules together:

1. every (source, destination, tag) is unique, and every send has exactly one receive
   of the same size;
2. there is no deadlock when a send completes only together with its receive;
3. there is no data race when messages are buffered without limit: two operations that
   touch the same block, one of them writing, are ordered by dependencies. In ``shared``
   buffers, and in those that ranks of the node get from, the path may run through flags
   and messages between the ranks of the node, and two consecutive starts are looked at,
   since nothing separates them. What others get from a rank they get during its start;
4. nothing is read that was not written before;
5. the receive buffer ends with exactly the tokens of the contract; a reduction, which combines each contribution once
   in the order of the contract, is the same expression tree on all ranks that get it. Where wider elements are combined
   than the program's, a sum is rounded when it is written to a buffer of the program's type; the tree says where, and
   results are rounded once;
6. every operation's result is needed by somebody;
7. what a schedule says that a block of ``shared`` holds is what is written there.

Where blocks may differ in size (those of a vector that is cut, or of a reduce_scatter), what is said to be as long as
some block (`Region.like`) moves with data of that block only: by rules 1 and 5.

Where sizes are exchanged, an operation on blocks of ``shared`` reads, besides, the rows of
``sizes`` that give their lengths: rules 3, 4 and 6 hold for those as for blocks.

Why one start of private buffers is enough: an operation of the next start begins after
all of this rank's have completed, messages of one (source, destination, tag) match in
order, and by rule 4 nothing left over from the start before is ever read.
"""

from __future__ import annotations

from collections.abc import Sequence

from hiercoll.contracts import Contract
from hiercoll.errors import ArgumentError
from hiercoll.schedule import Schedule
from hiercoll.schedule.system import System
from hiercoll.topology import Topology
from hiercoll.verify.contents import contents
from hiercoll.verify.deadlock import deadlocks
from hiercoll.verify.form import malformed
from hiercoll.verify.matching import unmatched
from hiercoll.verify.numbered import Numbered
from hiercoll.verify.proof import Finding, Proof
from hiercoll.verify.races import races, shared_races
from hiercoll.verify.words import describe

__all__ = ["Finding", "Proof", "describe", "verify"]


def verify(
    schedules: System | Sequence[Schedule], contract: Contract | None = None, topology: Topology | None = None
) -> Proof:
    """Prove that a system, or ``schedules`` (one per rank, in order), fulfil ``contract``.

    A system has a contract and a topology of its own; schedules need a contract, and
    ``topology`` says which ranks share memory (default: none do). Findings stop at the
    first rule that is broken, with at most a few findings of it. Raises ArgumentError for
    schedules without a contract.
    """
    if isinstance(schedules, System):
        contract, topology = contract or schedules.contract, topology or schedules.topology
        schedules = schedules.schedules()
    if contract is None:
        raise ArgumentError("contract", "what the schedules are to fulfil", None)
    topology = topology or Topology(tuple(range(contract.size)))
    findings: list[Finding] = []
    given = Numbered(schedules, contract, topology)
    checks = (malformed, unmatched, deadlocks, races, shared_races, contents)
    for check in checks:
        for finding in check(given):
            findings.append(finding)
            if len(findings) >= 5:
                break
        if findings:
            break
    return Proof(contract, len(given.ops), tuple(findings), given.combined, given.roundings)
