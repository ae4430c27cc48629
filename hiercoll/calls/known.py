"""Calls that have come before: what serves them is remembered by their arguments, and found again by these."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from hiercoll import settings
from hiercoll.calls.aliases import PLAIN_PARAMS, device_key, equal_alias, equal_key, may_come_again, uneven_alias
from hiercoll.calls.background import Again
from hiercoll.calls.devices import ends_of
from hiercoll.calls.given import (
    are_arrays,
    arrays_of,
    operation_and_order,
    suits_mpi4py,
)
from hiercoll.calls.routes import remember_call, remember_typed
from hiercoll.collectives import AUTO, NATIVE, Collective, InBackground, Sizes
from hiercoll.cuda import is_device_array
from hiercoll.cuda.arrays import NO_PRODUCERS, Producers
from hiercoll.errors import DeviceError
from hiercoll.memory import Now
from hiercoll.runtime import compiled
from hiercoll.runtime.arguments import LIMIT, Arguments
from hiercoll.runtime.lifetime import by_handle
from hiercoll.runtime.plan import Plan
from hiercoll.runtime.progress import abandoned
from hiercoll.runtime.request import Request
from hiercoll.runtime.session import Session
from hiercoll.runtime.specifications import EngineCopy, is_in_place
from hiercoll.tables import Variant
from hiercoll.tuning.learning import Learner
from hiercoll.tuning.share import count

_first = compiled.call()


def run_known(
    comm: MPI.Intracomm,
    collective: Collective,
    send: Any,
    recv: Any,
    root: Any,
    algorithm: str,
    transport: str,
    op: Any,
    order: Any,
    params: dict[str, Any],
    *,
    passes_native: bool = True,
) -> str:
    """Serve a call with equal blocks seen before with arrays at these addresses; ``send`` is None for collectives with
    one buffer, either one where only the root has it. Returns what ran, "" if it is not known (or, unless
    ``passes_native``, left to the MPI library).

    Equal addresses, sizes and types need no second check; contiguity is checked by
    `MPI.Get_address`, and that recv is writable below; True equals 1, but is no root. The slow path says what is
    wrong.
    """
    if type(root) is not int:
        return ""
    if params and not PLAIN_PARAMS.issuperset(map(type, params.values())):  # True and 2.0 equal numbers: refused
        return ""
    try:
        session = by_handle[comm.handle]
        plan, tally = session.recent[equal_key(collective, algorithm, transport, op, order, root, send, recv, params)]
    except (KeyError, AttributeError, BufferError, TypeError, MPI.Exception):
        return ""
    if plan.is_freed or not (recv is None or recv.flags.writeable) or session.check or session.broken is not None:
        return ""
    if (tally is not None and tally[0] <= 0) or (plan.schedule is None and not passes_native):
        return ""
    run_kept(session, plan, tally, (send, recv))
    return plan.name


def run_kept(session: Session, plan: Plan, tally: array[int] | None, given: object) -> None:
    """Run a plan once more, for a call that is counted, if there is a ``tally``, and was ``given`` these buffers."""
    session.touch(plan)
    begin = perf_counter()
    try:
        session.run(plan)
    except BaseException:
        keep_if_broken(session, given)
        raise
    if tally is not None:
        count(tally, perf_counter() - begin)


def keep_if_broken(session: Session, given: object) -> None:
    """A call was interrupted: MPI may still write to its buffers, whatever becomes of them in the program."""
    if session.broken is not None:
        abandoned.append(given)


def _known(
    collective: Collective,
    comm: MPI.Intracomm,
    send: Any,
    recv: Any,
    root: Any,
    algorithm: str,
    transport: str,
    op: Any = None,
    order: Any = None,
    /,
    **params: Any,
) -> bool:
    """Serve a call with equal blocks on arrays, if it is known; whether it has been."""
    if not are_arrays(collective, send, recv):
        return False
    return bool(run_known(comm, collective, send, recv, root, algorithm, transport, op, order, params))


def call_known(*call: Any, **params: Any) -> bool:
    """Serve a call with equal blocks, if it is known: the compiled engine first, if there is one."""
    return (_first is not None and _first(*call, **params)) or _known(*call, **params)


def known_by_name(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> bool:
    """Serve a call that names its algorithm, if it is known; whether it has been."""
    call = call_by_name(comm, collective, given)
    return call is not None and call()


def begin_known(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> tuple[Any, Any, Any] | None:
    """Start a call in the background that is known to be the MPI library's, or find plans that may serve it. Returns
    the request, or these, and the arrays that are sent and received; None if it is not known."""
    call = call_by_name(comm, collective, given, collective.in_background)
    return (call and call()) or None


def call_by_name(
    comm: MPI.Intracomm, collective: Collective, given: Arguments, form: InBackground | None = None
) -> Callable[[], Any] | None:
    """What does that; None where it cannot be known."""
    if (
        _first is None
        or (given.recv is None and collective.buffers and not collective.is_rooted)
        or type(given.limit) is not int
        or given.limit != LIMIT
        or given.stream is not None
    ):
        return None
    send = None if collective.one_buffer else given.send
    call = (form or collective, comm, send, given.recv, given.root, given.algorithm, given.transport)
    return partial(_first, *call, *operation_and_order(collective, given), **given.named)


def run_known_on_device(session: Session, collective: Collective, given: Arguments) -> str:
    """Serve a call with equal blocks seen before with device arrays at these addresses. Returns what ran, "" if it is
    not known, as on the host."""
    if session.check or session.broken is not None or not may_come_again(collective, given):
        return ""
    try:
        ends = ends_of(collective, given)
        known = None if ends is None else session.recent.get(device_key(collective, given, ends))
    except (TypeError, KeyError, RuntimeError, DeviceError):  # the slow path says what is wrong
        return ""
    if ends is None or known is None:
        return ""
    plan, tally = known
    if plan.is_freed or (tally is not None and tally[0] <= 0):
        return ""
    plan.producers = Producers(handles=ends.streams)
    try:
        run_kept(session, plan, tally, given)
    finally:
        plan.producers = NO_PRODUCERS
    return plan.name


@dataclass(eq=False, repr=False)
class Copied:
    """A call whose data are copied from and to other places as it was served, with the memory that it copies to."""

    request: Request
    plan: Plan
    used: int = 0  # see `Cache`
    holder: list[Copied] = field(default_factory=list)  # this, as long as it is kept: others know it by that

    def __post_init__(self) -> None:
        self.holder.append(self)

    @property
    def nbytes(self) -> int:
        """Bytes of memory beside the program's."""
        ends = (self.request.sent, self.request.received)
        return sum(data.nbytes for data in ends if data is not None and data.copying is not None)

    def free(self) -> None:
        """The memory goes with it."""
        self.holder.clear()

    def run(self, session: Session) -> None:
        """Serve the call again."""
        for copy in self.request.before:
            copy.start()
        session.touch(self.plan)
        self.request.place(self.plan.move)
        session.run(self.plan)
        for copy in self.request.after:
            copy.start()

    def moves(self) -> list[tuple[Any, int, int, int]] | None:
        """The copies before and after a start, for the compiled engine; None where it cannot make them."""
        found, request = [], self.request
        for data, copies in ((request.sent, request.before), (request.received, request.after)):
            if data is None or len(copies) > 1:
                return None
            action = copies[0].action if copies and isinstance(copies[0], Now) else None
            if copies and not isinstance(action, EngineCopy):
                return None
            found.append(action.move if isinstance(action, EngineCopy) else (b"", data.address, data.address, 0))
        return found


def run_copied(session: Session, collective: Collective, named: Arguments) -> Copied | None:
    """Serve a call again whose blocks have datatypes of their own, if it is known. Returns what it is."""
    known: Copied | None = session.copied.get(uneven_alias(collective, named))
    if known is None or known.plan.is_freed:
        return None
    try:
        known.run(session)
    except BaseException:
        keep_if_broken(session, (named, known.request))
        raise
    return known


def run_typed(session: Session, collective: Collective, named: Arguments) -> bool:
    """Serve a call again whose blocks have datatypes of their own, if it is known, and let the next one be found
    sooner; whether it has been."""
    known = run_copied(session, collective, named)
    if known is not None:
        remember_typed(session, collective, named, None, known)
    return known is not None


def known_call(session: Session, collective: Collective, named: Arguments) -> Callable[[], bool] | None:
    """What serves a call that names its algorithm, if it is known and nobody looks on, and says whether it has."""
    if not session.unwatched:
        return None
    call = call_by_name(session.user, collective, named)
    if not collective.typed:
        return call
    return lambda: (call is not None and call()) or run_typed(session, collective, named)


def remember(session: Session, request: Request, given: Arguments, plan: Plan | None) -> None:
    """Let calls with such arguments find the plan, if there is one, or mpi4py's own method."""
    if given.recv is None and (is_device_array(request.result) or _is_c_array(request.result)):
        given = given._replace(recv=request.result)
    learner = request.learner
    if learner is None:
        _remember(session, request, given, plan, None)
        return
    if learner.is_fixed:
        _remember(session, request, given, plan, learner)
    _remember(session, request, by_name(given, request.variant), plan, None)  # as trials call it


def _is_c_array(array: Any) -> bool:
    return type(array) is np.ndarray and array.flags.c_contiguous


def by_name(given: Arguments, variant: Variant) -> Arguments:
    """A call by "auto" as one that asks for what serves it."""
    transport = variant.transport if given.transport == AUTO else given.transport
    return given._replace(algorithm=variant.algorithm, params=variant.params, transport=transport)


def _remember(session: Session, request: Request, given: Arguments, plan: Plan | None, learner: Learner | None) -> None:
    """Let such calls find the plan or method; those that a ``learner`` counts, as long as it does not ask again."""
    collective, program = request.collective, None if plan is None else plan.program
    tally = None if learner is None else learner.tally
    if collective.typed:
        return
    if not collective.is_even:
        root_knows = collective.sizes is Sizes.ROOT  # then "auto" is one choice, and nothing is learned
        is_by_block = plan is not None and plan.is_by_block
        is_for_good = root_knows or given.algorithm == NATIVE or request.learner is None  # where it is native
        if is_by_block and given.limit == LIMIT:
            # "auto" goes by the sum of sizes where all ranks know them, which tells calls from each other there.
            goes_by_sum = collective.sizes is Sizes.KNOWN
            is_chosen = not session.policy.is_auto(collective, given.algorithm)  # by the program, or for all its calls
            if is_chosen or root_knows or goes_by_sum or learner is not None:
                remember_call(session, program, collective, given, tally)
        elif is_for_good and given.limit == LIMIT and _may_pass(session, request, given):
            remember_call(session, getattr(type(session.user), collective.native), collective, given, tally)
        if plan is not None and not is_by_block and (learner is None or collective.sizes is Sizes.KNOWN):
            session.remember(uneven_alias(collective, given), plan, tally)
        return
    is_seen = _is_readable(request, given)
    if program is not None:
        if is_seen:
            remember_call(session, program, collective, given, tally)
        return
    alias = equal_alias(collective, given)
    if (is_seen or alias is not None) and _may_pass(session, request, given):
        remember_call(session, getattr(type(session.user), collective.native), collective, given, tally)
    if plan is not None:
        session.remember(alias, plan, tally)


def remember_begun(session: Session, request: Request, given: Arguments) -> None:
    """Let mpi4py's own method serve such calls in the background, if it serves this one, until choices change; not
    where a thread is to let them go on."""
    collective = request.collective
    if given.limit != LIMIT or settings.wants_thread() or not _may_pass(session, request, given):
        return
    if collective.typed:
        remember_typed(session, collective, given, session.choices, is_begun=True)
    elif not collective.is_even or _is_told_apart(request, given):
        method = getattr(MPI.Intracomm, collective.nonblocking)
        remember_call(session, method, collective, given, session.choices, collective.in_background)


def remember_plan(session: Session, request: Request, given: Arguments, plan: Plan) -> None:
    """Let such calls in the background find plans as this one, if they serve several, until choices change."""
    collective = request.collective
    if plan.alike is None or collective.is_counted or collective.typed:
        return
    if given.limit != LIMIT or not session.unwatched:
        return
    if not collective.is_even or _is_readable(request, given):
        again = Again(session, plan.alike, plan.is_by_block), plan.alike
        remember_call(session, again, collective, given, session.choices, collective.in_background)


def _may_pass(session: Session, request: Request, given: Arguments) -> bool:
    """Whether the call may go to mpi4py as it is: its own, and nobody looks on."""
    is_known = request.memory == "host" and all(map(suits_mpi4py, arrays_of(request.collective, given)))
    is_its_own = request.variant.is_native and not request.accumulates
    return is_known and is_its_own and session.unwatched


def _is_told_apart(request: Request, given: Arguments) -> bool:
    """Whether the compiled engine tells a call with equal blocks from others by its arguments: not where these are in
    place on all ranks."""
    ends = (given.send, request.sent), (given.recv, request.received)
    in_place = any(data and data.blocks and is_in_place(spec) for spec, data in ends)
    return may_come_again(request.collective, given) and not (request.collective.buffers and in_place)


def _is_readable(request: Request, given: Arguments) -> bool:
    """Whether it sees besides where the data lie: of datatypes that are MPI's own, which nobody can free."""
    specs = [spec for spec in (given.send, given.recv) if type(spec) in (list, tuple)]
    types = [each for spec in specs for each in spec if isinstance(each, MPI.Datatype)]
    return _is_told_apart(request, given) and all(each.is_predefined for each in types)
