"""How a request is served: without a plan, by one that is kept or that the program holds, or in the background.

Functions and drop-in communicators both come here, with calls that are not `known`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from time import perf_counter
from typing import TypeAlias, TypeVar

from mpi4py import MPI

from hiercoll.calls.aliases import uneven_alias
from hiercoll.calls.background import BackgroundCall
from hiercoll.calls.given import are_arrays, arrays_of, operation_and_order, suits_mpi4py, uses_device
from hiercoll.calls.known import (
    Copied,
    by_name,
    call_known,
    keep_if_broken,
    known_by_name,
    known_call,
    remember,
    remember_begun,
    remember_plan,
    run_copied,
    run_kept,
    run_known_on_device,
)
from hiercoll.calls.native import own_method, serve_native
from hiercoll.calls.plain import by_bytes, is_plain
from hiercoll.calls.routes import remember_typed
from hiercoll.collectives import NATIVE, Collective, Sizes
from hiercoll.cuda.arrays import NO_PRODUCERS
from hiercoll.errors import ArgumentError, ConstraintError
from hiercoll.runtime import progress
from hiercoll.runtime.arguments import LIMIT, NO_PARAMS, Arguments, Mode, spelled
from hiercoll.runtime.checking import Description
from hiercoll.runtime.factory import Lifetime
from hiercoll.runtime.plan import Plan
from hiercoll.runtime.reading import make_request, own_spread, served_by, within_reach
from hiercoll.runtime.request import Request
from hiercoll.runtime.session import Session
from hiercoll.tables import NATIVE_VARIANT
from hiercoll.tuning.learning import Learner
from hiercoll.tuning.policy import Wanted
from hiercoll.tuning.share import count

Made = TypeVar("Made")
Native: TypeAlias = "Callable[[], object] | None"
MOST_SPELLINGS = 256  # of calls, of which it is remembered what learns from them


def take_turn(
    learner: Learner, collective: Collective, comm: MPI.Intracomm, given: Arguments, native: Callable[[], object]
) -> str:
    """Serve a call on arrays, but for trials, where native takes turns with what was chosen, the shortest way for both.
    Returns what ran, "" where that way is not known."""
    if learner.tally[0] <= 0 or learner.is_trying:
        return ""
    variant = learner.begin()
    begin = perf_counter()
    if variant.is_native:
        progress.before_blocking()
        native()
    elif not call_known(
        collective, comm, given.send, given.recv, given.root, variant.algorithm, given.transport,
        *operation_and_order(collective, given), **given._replace(params=variant.params).named,
    ):  # fmt: skip
        return ""
    learner.note(perf_counter() - begin)
    return NATIVE if variant.is_native else spelled(collective, variant.algorithm, variant.params)


def serve(session: Session, request: Request, given: Arguments, native: Native = None) -> str:
    """Serve a blocking call; ``native``, if given, makes the MPI library's own, as the program spells it. Returns what
    ran, in words. Collective."""
    if session.check:
        session.same_call(request.described(given, session.rank, session.size))
    if request.is_empty:
        return request.name
    if request.learner is None:
        return or_native(session, partial(_serve, session, given), request)
    return _serve_learning(session, request.collective, given, request.learner, lambda: request, native)


def learner_of_plain(session: Session, collective: Collective, given: Arguments) -> Learner | None:
    """What learns from such a call, if it is on arrays and `remember_plain` knows it."""
    if not are_arrays(collective, given.send, given.recv):
        return None
    return session.policy.by_bytes.get(by_bytes(collective, given))


def serve_plain(
    session: Session,
    collective: Collective,
    given: Arguments,
    learner: Learner | None,
    native: Native = None,
    *,
    strict: bool,
) -> str:
    """Serve a blocking call on plain arrays in which all is left to hiercoll, without a request, if it is known what
    learns from such calls. Returns what ran, "" where nothing did. Collective."""
    if learner is None or not session.unwatched or not is_plain(session, collective, given):
        return ""
    if learner.is_fixed and not learner.current.is_native:
        return ""  # by a plan
    native = native or own_method(session, collective, given)
    if learner.is_fixed:
        serve_native(session, collective, given, native, learner.tally)
        return NATIVE
    make = partial(make_request, session, collective, given, strict=strict)
    return _serve_learning(session, collective, given, learner, make, native)


def remember_plain(session: Session, request: Request, given: Arguments) -> None:
    """Let `learner_of_plain` find what learns from such calls."""
    learner, collective = request.learner, request.collective
    if learner is None or not session.unwatched or not request.is_auto:
        return
    is_on_host = collective.is_even and request.memory == "host"
    is_plain = is_on_host and not request.is_empty and are_arrays(collective, given.send, given.recv)
    is_plain = is_plain and all(map(suits_mpi4py, arrays_of(collective, given)))  # its own method serves it
    if is_plain and (key := by_bytes(collective, given)) is not None:
        if len(session.policy.by_bytes) >= MOST_SPELLINGS:
            session.policy.by_bytes.clear()
        session.policy.by_bytes[key] = learner


def checked_request(
    session: Session, collective: Collective, given: Arguments, mode: Mode = Mode.BLOCKING, *, strict: bool
) -> Request:
    """The request of a call that all ranks make together. Where calls are checked, ranks whose arguments are sound wait
    for this one to say what it calls: if its are refused, all raise CollectiveMismatch, unless all ranks' are."""
    try:
        return make_request(session, collective, given, mode, strict=strict)
    except ArgumentError:
        if session.check:
            session.same_call(Description(f"{collective.name} with arguments that are refused"))
        raise


def or_native(session: Session, make: Callable[[Request], Made], request: Request) -> Made:
    """What is made of a request; by the MPI library's own collective where "auto" has chosen what cannot run here, such
    as for want of shared memory, or, where that one may not serve it, by another of hiercoll's. Of blocking calls ranks
    find that out together, once, since a rank that knows the call does not come here again. Collective."""
    may_be_other = request.is_auto and not request.is_native
    is_found_out_once = may_be_other and request.mode is Mode.BLOCKING
    if not (is_found_out_once and request.common in session.impossible):
        try:
            return make(request)
        except ConstraintError:
            if not may_be_other:
                raise
            if is_found_out_once:
                session.impossible.add(request.common)
    other = request._replace(learner=None)
    return make(other._replace(variant=NATIVE_VARIANT) if request.combining.native else session.factory.private(other))


def _serve(session: Session, given: Arguments, request: Request) -> str:
    try:
        return _serve_once(session, given, request)
    except BaseException:
        keep_if_broken(session, (given, request))
        raise


def _serve_once(session: Session, given: Arguments, request: Request) -> str:
    if request.memory == "host" and (not request.is_plain or request.collective.typed):
        return _serve_copied(session, request, given)
    plan = session.plan(request)
    if plan is None:
        ran = session.run_once(request)
        if request.variant.is_native:
            remember(session, request, given, None)
        return ran
    plan.producers = request.producers
    try:
        session.run(plan)
    finally:
        plan.producers = NO_PRODUCERS  # a plan that is kept keeps no array
    remember(session, request, given, plan)
    return plan.name


def _serve_copied(session: Session, request: Request, given: Arguments) -> str:
    """Serve a call on the host whose data are copied from and to other places: what lies there is as in other calls,
    and so are plans that are kept."""
    for copy in request.before:
        copy.start()
    inner = request._replace(before=(), after=())
    plan = session.plan(inner)
    if plan is None:
        ran = session.run_once(inner)
    else:
        session.run(plan)
        ran = plan.name
    for copy in request.after:
        copy.start()
    if plan is not None and plan.key is not None and request.collective.typed:
        if request.learner is not None:  # under the name of what serves it
            given = given._replace(algorithm=request.variant.algorithm, params=request.variant.params)
        if (alias := uneven_alias(request.collective, given)) is not None:
            session.copied.keep(alias, Copied(request.without_arrays(), plan))
    return ran


def _serve_learning(
    session: Session,
    collective: Collective,
    given: Arguments,
    learner: Learner,
    make: Callable[[], Request],
    native: Native,
) -> str:
    """Serve a blocking call from which "auto" learns, whose request ``make`` makes. Returns what ran. Collective."""
    own = partial(own_spread, session, collective, given) if collective.sizes is Sizes.OWN else None
    variant, begin, on_device = learner.begin(own), perf_counter(), uses_device(given)
    if on_device:
        variant = within_reach(session, variant)
    named = by_name(given, variant)
    ran = NATIVE if variant.is_native else spelled(collective, variant.algorithm, variant.params)
    quick: Callable[[], object] | None = None
    if native is not None and variant.is_native and session.unwatched and not on_device:
        quick = native
    elif learner.is_trying and on_device:
        quick = partial(run_known_on_device, session, collective, named)
    elif learner.is_trying or learner.compares:
        # While it is tried or compared, it is called as it is otherwise once it is settled on.
        quick = known_call(session, collective, named)
    made = make() if learner.is_trying and on_device else None
    if made is not None:  # what the program's kernels take is none of the call's
        session.memories[made.received.place].before_messages(made.producers.streams(), True)
    progress.before_blocking()
    if learner.is_trying and not learner.has_met:  # else this rank has met the others in a call that it could not make
        session.begin_together()
        learner.has_met = True
    # From here on as little is done as possible but the call: ranks may share cores, also with those that are through.
    together = perf_counter()
    is_served = quick is not None and quick() not in (False, "")
    seconds = perf_counter() - together
    if not is_served:
        request = served_by(session, made or make(), given, variant, learner)
        ran, is_possible = _serve_at_length(session, given, request)
        seconds = perf_counter() - together if is_possible else inf
    learner.note(seconds, together - begin)
    return ran


def _serve_at_length(session: Session, given: Arguments, request: Request) -> tuple[str, bool]:
    """Serve a call from which "auto" learns; by native, if what was chosen cannot run here. Returns what ran, and
    whether it could. Collective."""
    try:
        return _serve(session, given, request), True
    except ConstraintError:
        if request.is_native:
            raise
        by_name = given._replace(algorithm=NATIVE, params=NO_PARAMS)
        return _serve(session, by_name, request._replace(variant=NATIVE_VARIANT, learner=None)), False


def sizes_are_unknown(session: Session, collective: Collective, given: Arguments) -> bool:
    """Whether "auto" is to choose for blocks of which no rank knows all sizes."""
    unknown = collective.sizes is Sizes.OWN and session.policy.is_auto(collective, given.algorithm)
    return unknown and not given.params and bool(given.limit == LIMIT)


def learner_of_unknown(session: Session, collective: Collective, given: Arguments) -> Learner | None:
    """What learns from blocking calls of which no rank knows all sizes; None for others, and where nothing does."""
    if not sizes_are_unknown(session, collective, given):
        return None
    return session.policy.learner(Wanted(collective, 0, False))


def repeat(session: Session, comm: MPI.Intracomm, collective: Collective, given: Arguments) -> str | None:
    """Serve a call with blocks of any sizes whose arguments were seen before; the call is counted. Returns what ran."""
    if not session.unwatched:
        return None
    learner, named = learner_of_unknown(session, collective, given), given
    if learner is not None:
        if not learner.is_fixed:
            return None
        named = given._replace(algorithm=learner.current.algorithm, params=learner.current.params)
    tally = None if learner is None else learner.tally
    if collective.typed:
        begin = perf_counter()
        known = run_copied(session, collective, named)
        if known is None:
            return None
        if tally is not None:
            count(tally, perf_counter() - begin)
        remember_typed(session, collective, given, tally, known)
        return known.plan.name
    if learner is None and known_by_name(comm, collective, named):
        return spelled(collective, named.algorithm, named.params)
    plan, counter = session.recent.get(uneven_alias(collective, named), (None, None))
    if plan is None or plan.is_freed or (counter is not None and counter[0] <= 0):
        return None
    run_kept(session, plan, counter if tally is None else tally, named)
    return plan.name


def serve_unknown_sizes(
    session: Session, collective: Collective, given: Arguments, learner: Learner, native: Native, *, strict: bool
) -> str:
    """Serve a blocking call of which no rank knows all sizes, by what is learned; ``native`` makes the MPI library's
    own. Whatever a rank's arguments are, it takes part in what ranks agree on. Returns what ran. Collective."""

    def make() -> Request:
        request = checked_request(session, collective, given, strict=strict)
        if session.check:
            session.same_call(request.described(given, session.rank, session.size))
        return request

    if session.check and not learner.is_fixed:
        session.same_call(Description(f"{collective.name}, agreement on algorithms"))
    return _serve_learning(session, collective, given, learner, make, native)


def hold(session: Session, collective: Collective, given: Arguments, *, strict: bool) -> Plan:
    """A plan for the program to hold. Collective."""
    make = partial(session.factory.make, lifetime=Lifetime.HELD)
    return or_native(session, make, held_request(session, collective, given, strict=strict))


def held_request(session: Session, collective: Collective, given: Arguments, *, strict: bool) -> Request:
    """The request of a plan that a program holds. Collective where nobody knows all sizes."""
    asked = given
    if sizes_are_unknown(session, collective, given):
        if session.check:
            session.same_call(Description(f"persistent {collective.name}, agreement on algorithms"))
        whole = session.policy.whole(own_spread(session, collective, given))
        variant = session.policy.uneven_for_good(collective, whole)
        given = given._replace(algorithm=variant.algorithm, params=variant.params)
    request = checked_request(session, collective, given, Mode.HELD, strict=strict)
    request = request._replace(is_auto=request.is_auto or given is not asked)
    if session.check:
        session.same_call(request.described(asked, session.rank, session.size))
    return request


def begin(session: Session, collective: Collective, given: Arguments) -> BackgroundCall:
    """Start a call in the background. Local, but for what `make_request` says."""
    asked = given
    if sizes_are_unknown(session, collective, given):
        given = given._replace(algorithm=NATIVE)
    request = make_request(session, collective, given, Mode.BACKGROUND, strict=True)
    request = session.factory.private(request)
    if request.is_native and not request.is_empty:
        remember_begun(session, request, asked)
    plan, described = session.begun_plan(request), partial(request.described, given, session.rank, session.size)
    call = BackgroundCall(session, plan, request.result, described=described)
    remember_plan(session, request, asked, plan)
    return call
