"""Why a call was left to the MPI library: in words that say what a user may change."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from hiercoll.collectives import Sizes
from hiercoll.runtime.arguments import Mode
from hiercoll.runtime.session import Session
from hiercoll.tuning.learning import Learner
from hiercoll.tuning.policy import Policy, Wanted


class Reason(Enum):
    """The table in docs/reports.md says what can be done about each."""

    REFUSED = "arguments that the MPI library alone takes"
    DISABLED = "HIERCOLL_DISABLE is set"
    ONE_RANK = "one rank"
    OBJECTS = "objects to or from one rank: nothing is faster"
    OBJECTS_OF_NODE = "objects within one node: nothing is faster"
    TOO_SHORT = "not set up: blocking calls have not taken long enough to pay for it"
    AT_BOUND = "not set up: the links between nodes need nearly as long as calls take"
    THREADS = "nothing runs in the background: MPI has been begun without MPI_THREAD_MULTIPLE"
    FORCED = "asked for"
    ROOT_SIZES = "sizes are the root's alone: nothing is tried"
    EMPTY = "no data"
    TABLE = "the table says so"
    ORDER = "another order of contributions could change bits"
    TURN = "its turn: --compare lets native serve every other call"
    CANNOT_RUN = "what the table chooses cannot run here"
    NOT_LEARNING = "there is no table, and nothing is learned"
    BLOCKING_ONLY = "no blocking call like it has found anything faster"
    NOT_TRIED = "nothing tried yet: calls have not taken long enough to pay for it"
    TRYING = "trials go on"
    EARLIER_JOB = "an earlier job found nothing faster"
    NOT_FASTER = "trials found nothing faster"


class Unmet(NamedTuple):
    """In place of the session of a communicator on which hiercoll is not set up, why that is so; see `lifetime`."""

    is_disabled: bool
    is_settled: bool
    is_at_bound: bool


def reason(session: Session | Unmet, size: int, wanted: Wanted, mode: Mode) -> Reason:
    """Why such a call of a drop-in communicator of ``size`` ranks, whose arguments are no reason, has just been served
    by the MPI library: by what this rank knows now."""
    collective = wanted.collective
    if session.is_disabled if isinstance(session, Unmet) else session.disabled:
        return Reason.DISABLED
    if size == 1:
        return Reason.ONE_RANK
    if mode is Mode.OBJECTS and collective.is_rooted:
        return Reason.OBJECTS
    if isinstance(session, Unmet):
        if session.is_at_bound:
            return Reason.AT_BOUND
        return Reason.EARLIER_JOB if session.is_settled else Reason.TOO_SHORT
    if mode is Mode.OBJECTS:
        return Reason.OBJECTS_OF_NODE
    if mode is not Mode.BLOCKING and session.threadless:
        return Reason.THREADS
    policy = session.policy
    if collective.name in policy.forced:
        return Reason.FORCED
    if collective.sizes is Sizes.ROOT:
        return Reason.ROOT_SIZES
    if wanted.size == 0 and collective.buffers and collective.sizes is not Sizes.OWN:
        return Reason.EMPTY
    learner = policy.known_learner(wanted.key)
    if learner is not None and learner.takes_turns and not learner.is_trying and mode is Mode.BLOCKING:
        return Reason.TURN
    if policy.table.find(collective.family, session.library, wanted.memory, session.topology) is not None:
        tries = learner is not None and collective.sizes is Sizes.OWN  # what the table says, too
        return _of_learning(learner, mode) if tries else _of_table(policy, wanted)
    if not wanted.combining.changes:
        return Reason.ORDER
    if not policy.share:
        return Reason.NOT_LEARNING
    return _of_learning(learner, mode)


def _of_table(policy: Policy, wanted: Wanted) -> Reason:
    if not policy.decide(wanted, explains=False).variant.is_native:
        return Reason.CANNOT_RUN
    unbound = wanted._replace(combining=wanted.combining._replace(changes=True))
    return Reason.TABLE if policy.decide(unbound, explains=False).variant.is_native else Reason.ORDER


def _of_learning(learner: Learner | None, mode: Mode) -> Reason:
    if learner is None:
        return Reason.NOT_TRIED if mode is Mode.BLOCKING else Reason.BLOCKING_ONLY
    known = learner.known
    if not learner.trials and (known is None or not known.untried):
        return Reason.NOT_TRIED if known is None else Reason.EARLIER_JOB if known.date else Reason.NOT_FASTER
    return Reason.NOT_FASTER if learner.is_settled else Reason.TRYING
