"""How a request is served: without a plan, by one that is kept or that the program holds, or in the background.

Functions and drop-in communicators both come here. A call whose arguments were seen before finds its plan by them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

import numpy as np
from mpi4py import MPI

from hiercoll.calls.background import BackgroundCall
from hiercoll.calls.devices import Ends, ends_of
from hiercoll.calls.plain import by_bytes, is_plain
from hiercoll.collectives import Collective, Holds, Sizes
from hiercoll.cuda import is_device_array
from hiercoll.cuda.arrays import NO_PRODUCERS, Producers
from hiercoll.errors import ConstraintError, DeviceError
from hiercoll.memory import Now
from hiercoll.runtime import compiled, progress
from hiercoll.runtime.beginning import Beginning
from hiercoll.runtime.checking import Description
from hiercoll.runtime.datatypes import element_of
from hiercoll.runtime.direct import direct
from hiercoll.runtime.factory import Lifetime
from hiercoll.runtime.lifetime import by_handle
from hiercoll.runtime.plan import Plan, abandoned
from hiercoll.runtime.request import (
    LIMIT,
    NO_PARAMS,
    Arguments,
    Mode,
    Request,
    make_request,
    own_spread,
    served_by,
    spelled,
    within_reach,
)
from hiercoll.runtime.session import Session
from hiercoll.runtime.specifications import EngineCopy, buffer_of, is_in_place
from hiercoll.schedule.transports import AUTO
from hiercoll.tables import NATIVE, NATIVE_VARIANT, Variant
from hiercoll.tuning.learning import Learner, count
from hiercoll.tuning.policy import Wanted

Made = TypeVar("Made")
Native: TypeAlias = "Callable[[], object] | None"
Alias: TypeAlias = "tuple[object, ...]"
_address = MPI.Get_address
_PLAIN = frozenset((int, str))  # types of parameters
MOST_SPELLINGS = 256  # of calls, of which it is remembered what learns from them
MOST_AS_PASSED = 128  # known calls, up to which those are added that are known by the very objects that were passed


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
    if params and not _PLAIN.issuperset(map(type, params.values())):  # True and 2.0 equal numbers, but are refused
        return ""
    try:
        session = by_handle[comm.handle]
        plan, tally = session.recent[_equal_key(collective, algorithm, transport, op, order, root, send, recv, params)]
    except (KeyError, AttributeError, BufferError, TypeError, MPI.Exception):
        return ""
    if plan.is_freed or not (recv is None or recv.flags.writeable) or session.check or session.broken is not None:
        return ""
    if (tally is not None and tally[0] <= 0) or (plan.schedule is None and not passes_native):
        return ""
    _run_kept(session, plan, tally, (send, recv))
    return plan.name


def _run_kept(session: Session, plan: Plan, tally: array[int] | None, given: object) -> None:
    """Run a plan once more, for a call that is counted, if there is a ``tally``, and was ``given`` these buffers."""
    session.touch(plan)
    begin = perf_counter()
    try:
        session.run(plan)
    except BaseException:
        _keep_if_broken(session, given)
        raise
    if tally is not None:
        count(tally, perf_counter() - begin)


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


_first = compiled.call()


def call_known(*call: Any, **params: Any) -> bool:
    """Serve a call with equal blocks, if it is known: the compiled engine first, if there is one."""
    return (_first is not None and _first(*call, **params)) or _known(*call, **params)


def known_by_name(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> bool:
    """Serve a call that names its algorithm, if it is known; whether it has been."""
    call = call_by_name(comm, collective, given)
    return call is not None and call()


def call_by_name(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> Callable[[], bool] | None:
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
    call = (collective, comm, send, given.recv, given.root, given.algorithm, given.transport)
    return partial(_first, *call, *_how(collective, given), **given.named)


def _how(collective: Collective, given: Arguments) -> tuple[Any, Any]:
    """Operation and order of a reduction."""
    return (given.op, given.order) if collective.operation else (None, None)


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
        *_how(collective, given), **given._replace(params=variant.params).named,
    ):  # fmt: skip
        return ""
    learner.note(perf_counter() - begin)
    return NATIVE if variant.is_native else spelled(collective, variant.algorithm, variant.params)


def new_result(collective: Collective, comm: Any, send: Any) -> Any:
    """A new receive array for a plain array; None for anything else."""
    if type(send) is not np.ndarray or not send.flags.c_contiguous:
        return None
    if collective.send is collective.recv:
        return np.empty_like(send)
    try:
        return np.empty((comm.size, *send.shape), send.dtype)
    except (AttributeError, MPI.Exception):  # no communicator: the slow path says so
        return None


def are_arrays(collective: Collective, send: Any, recv: Any) -> bool:
    """Whether the buffers of a call are arrays, or None where only the root has them, or on all ranks in place; of one
    buffer, ``recv``; where there is no buffer: always."""
    if not collective.buffers:
        return True
    if type(recv) is np.ndarray:
        if type(send) is np.ndarray or collective.one_buffer:
            return True
        return send is (None if collective.is_rooted else MPI.IN_PLACE)
    return recv is None and collective.is_rooted and type(send) is np.ndarray


def equal_alias(collective: Collective, given: Arguments) -> Alias | None:
    """What `run_known`, or `run_known_on_device`, asks for, of arguments that have been found sound; None for what
    they do not know."""
    if not _may_come_again(collective, given):
        return None
    send, recv = given.send, given.recv
    if not are_arrays(collective, send, recv):
        ends = ends_of(collective, given)
        return None if ends is None else _device_key(collective, given, ends)
    if collective.one_buffer:
        send = None
    how = _how(collective, given)
    return _equal_key(collective, given.algorithm, given.transport, *how, given.root, send, recv, given.named)


def _may_come_again(collective: Collective, given: Arguments) -> bool:
    """Whether a call is told from others by its buffers and by arguments that can be compared."""
    return (
        given.stream is None
        and type(given.root) is int
        and _has_known_operation(collective, given)
        and _PLAIN.issuperset(map(type, given.params.values()))
    )


def _equal_key(
    collective: Collective,
    algorithm: Any,
    transport: Any,
    op: Any,
    order: Any,
    root: int,
    send: Any,
    recv: Any,
    params: dict[str, Any],
) -> Alias:
    """The key of a call on arrays; ``send`` is None where one buffer serves, and either one where the rank has none.
    AttributeError: not arrays. Operations are MPI's own, whose handles stay."""
    key: Alias = (collective, algorithm, transport, op and op.handle, order, root)
    for each in (recv, send):
        key += (each,) if each is None or each is MPI.IN_PLACE else (_address(each), each.nbytes, each.dtype)
    return (*key, *params.items()) if params else key


def _device_key(collective: Collective, given: Arguments, ends: Ends) -> Alias:
    op, order = _how(collective, given)
    how = (op and op.handle, order, given.root)
    return (collective, given.algorithm, given.transport, *how, *ends.places, *given.named.items())


def run_known_on_device(session: Session, collective: Collective, given: Arguments) -> str:
    """Serve a call with equal blocks seen before with device arrays at these addresses. Returns what ran, "" if it is
    not known, as on the host."""
    if session.check or session.broken is not None or not _may_come_again(collective, given):
        return ""
    try:
        ends = ends_of(collective, given)
        known = None if ends is None else session.recent.get(_device_key(collective, given, ends))
    except (TypeError, KeyError, RuntimeError, DeviceError):  # the slow path says what is wrong
        return ""
    if ends is None or known is None:
        return ""
    plan, tally = known
    if plan.is_freed or (tally is not None and tally[0] <= 0):
        return ""
    plan.producers = Producers(handles=ends.streams)
    try:
        _run_kept(session, plan, tally, given)
    finally:
        plan.producers = NO_PRODUCERS
    return plan.name


def uneven_alias(collective: Collective, given: Arguments) -> Alias | None:
    """What a call is, if its buffers are arrays with counts of the common kinds; else None. Calls with
    equal aliases have equal sizes in equal places of the same memory."""
    send, recv = given.send, given.recv
    if given.stream is not None or type(given.transport) is not str or collective.more:
        return None
    if collective.typed:
        return _typed_alias(collective, given)
    kinds = (np.ndarray,) if collective.send is Holds.ONE else (list, tuple)
    if type(recv) not in (list, tuple) or type(send) not in kinds:
        return None
    try:
        sent = (_address(send), send.nbytes, send.itemsize) if collective.send is Holds.ONE else _counted(*send)
        if not recv[0].flags.writeable:
            return None
        key = (collective, given.algorithm, given.transport, given.limit, *given.params.items(), sent, _counted(*recv))
        hash(key)
    except (TypeError, ValueError, AttributeError, BufferError, MPI.Exception):
        return None
    return key


def _typed_alias(collective: Collective, given: Arguments) -> Alias | None:
    """The same of blocks with datatypes of their own. An element says what a datatype is, whatever its handle."""
    try:
        ends = [spec if spec is MPI.IN_PLACE else _typed(*spec) for spec in (given.send, given.recv)]
        if not given.recv[0].flags.writeable:
            return None
        key = (collective, given.algorithm, given.transport, given.limit, *given.params.items(), *ends)
        hash(key)
    except (TypeError, ValueError, AttributeError, BufferError, MPI.Exception):
        return None
    return key


def _typed(array: Any, *how: Any) -> Alias:
    """Raises what there is to raise for others than arrays."""
    *numbers, datatypes = how
    given = numbers[0] if len(numbers) == 1 else numbers
    each = [tuple(one) if type(one) is list else (one.itemsize, one.tobytes()) for one in given]
    return _address(array), array.nbytes, *each, *map(element_of, datatypes)


def _counted(array: Any, counts: Any) -> Alias:
    """Raises what there is to raise for others than an array with counts, or (counts, displacements), in arrays."""
    if type(counts) is not tuple:
        return _address(array), array.nbytes, array.itemsize, counts.itemsize, counts.tobytes()
    each = [(numbers.itemsize, numbers.tobytes()) for numbers in counts]
    return _address(array), array.nbytes, array.itemsize, *each


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


def own_method(state: Session | Beginning, collective: Collective, given: Arguments) -> Callable[[], object]:
    """mpi4py's own call."""
    buffers = (given.send, given.recv)[2 - collective.buffers :]
    more = [getattr(given, name) for name in collective.more]
    return partial(getattr(state.user, collective.native), *buffers, *more)


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
    if is_plain and (key := by_bytes(collective, given)) is not None:
        if len(session.policy.by_bytes) >= MOST_SPELLINGS:
            session.policy.by_bytes.clear()
        session.policy.by_bytes[key] = learner


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
    other = replace(request, learner=None)
    return make(replace(other, variant=NATIVE_VARIANT) if request.combining.native else session.factory.private(other))


def _keep_if_broken(session: Session, given: object) -> None:
    """A call was interrupted: MPI may still write to its buffers, whatever becomes of them in the program."""
    if session.broken is not None:
        abandoned.append(given)


def _serve(session: Session, given: Arguments, request: Request) -> str:
    try:
        return _serve_once(session, given, request)
    except BaseException:
        _keep_if_broken(session, (given, request))
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
    inner = replace(request, before=(), after=())
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


@dataclass
class Copied:
    """A call as `_serve_copied` has served it, with the memory that it copies to."""

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


def _remember_typed(
    session: Session | Beginning,
    collective: Collective,
    given: Arguments,
    counter: array[int] | None,
    known: Copied | None = None,
) -> None:
    """Let the compiled engine find what serves calls whose blocks have datatypes of their own, as long as the very
    objects that are passed are as they are: mpi4py's method, or a ``known`` call's program. Of a program that makes new
    ones for each call there are not so many that other calls are forgotten."""
    if len(session.routes) >= MOST_AS_PASSED:
        return
    specs = [None if spec is MPI.IN_PLACE else spec for spec in (given.send, given.recv)]
    if any(type(spec) not in (list, tuple) for spec in specs if spec is not None) or given.stream is not None:
        return
    parts = tuple(None if spec is None else tuple(map(_as_it_is, spec[1:])) for spec in specs)
    target, program = getattr(type(session.user), collective.native), tuple[Any, ...]((None,) * 4)
    if known is not None:
        moves, request = known.moves(), known.request
        if moves is None or known.plan.program is None or request.sent is None or given.limit != LIMIT:
            return
        target, ends = known.plan.program, (request.sent, request.received)
        rows = np.concatenate([*(end.sizes for end in ends), *(end.at for end in ends)]).astype(np.int64)
        program = known.holder, *moves, rows.tobytes()
    choice = (given.root, given.algorithm, given.transport, None, None)
    session.routes.remember(
        target, counter, collective, given.send, given.recv, *choice, (parts, *program), None, **given.params
    )


def _as_it_is(part: Any) -> Any:
    """What came with an array, for comparison: numbers of an array as bytes, lists and tuples as tuples."""
    if type(part) is np.ndarray:
        return part.tobytes()
    return tuple(map(_as_it_is, part)) if type(part) in (list, tuple) else part


def _run_copied(session: Session, collective: Collective, named: Arguments) -> Copied | None:
    """Serve a call again whose blocks have datatypes of their own, if it is known. Returns what it is."""
    known: Copied | None = session.copied.get(uneven_alias(collective, named))
    if known is None or known.plan.is_freed:
        return None
    try:
        known.run(session)
    except BaseException:
        _keep_if_broken(session, (named, known.request))
        raise
    return known


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
    named = _by_name(given, variant)
    ran = NATIVE if variant.is_native else spelled(collective, variant.algorithm, variant.params)
    quick: Callable[[], object] | None = None
    if native is not None and variant.is_native and session.unwatched and not on_device:
        quick = native
    elif learner.is_trying and on_device:
        quick = partial(run_known_on_device, session, collective, named)
    elif learner.is_trying or learner.compares:
        # While it is tried or compared, it is called as it is otherwise once it is settled on.
        quick = _known_call(session, collective, named)
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
        return _serve(session, by_name, replace(request, variant=NATIVE_VARIANT, learner=None)), False


def _known_call(session: Session, collective: Collective, named: Arguments) -> Callable[[], bool] | None:
    """What serves a call that names its algorithm, if it is known and nobody looks on, and says whether it has."""
    if not session.unwatched:
        return None
    call = call_by_name(session.user, collective, named)
    if not collective.typed:
        return call
    return lambda: (call is not None and call()) or _run_typed(session, collective, named)


def _run_typed(session: Session, collective: Collective, named: Arguments) -> bool:
    """Serve a call again whose blocks have datatypes of their own, if it is known, and let the next one be found
    sooner; whether it has been."""
    known = _run_copied(session, collective, named)
    if known is not None:
        _remember_typed(session, collective, named, None, known)
    return known is not None


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
    _remember(session, request, _by_name(given, request.variant), plan, None)  # as trials call it


def _is_c_array(array: Any) -> bool:
    return type(array) is np.ndarray and array.flags.c_contiguous


def _by_name(given: Arguments, variant: Variant) -> Arguments:
    """A call by "auto" as one that asks for what serves it."""
    transport = variant.transport if given.transport == AUTO else given.transport
    return given._replace(algorithm=variant.algorithm, params=variant.params, transport=transport)


def _remember(session: Session, request: Request, given: Arguments, plan: Plan | None, learner: Learner | None) -> None:
    """Let such calls find the plan or method; those that a ``learner`` counts, as long as it does not ask again."""
    collective, program = request.collective, None if plan is None else plan.program
    tally = None if learner is None else learner.tally
    if not collective.is_even and (collective.operation or collective.typed):
        return
    if not collective.is_even:
        root_knows = collective.sizes is Sizes.ROOT  # then "auto" is one choice, and nothing is learned
        if program is not None and given.limit == LIMIT:
            if given.algorithm != AUTO or root_knows or (learner is not None and collective.sizes is Sizes.OWN):
                _remember_call(session, program, collective, given, tally)
        elif root_knows and request.is_native:
            if _may_pass(session, request, given):
                _remember_call(session, getattr(type(session.user), collective.native), collective, given, tally)
        elif plan is not None and program is None and learner is None:
            session.remember(uneven_alias(collective, given), plan)
        return
    if program is not None:
        if _may_come_again(collective, given) and _is_readable(request, given):
            _remember_call(session, program, collective, given, tally)
        return
    alias = equal_alias(collective, given)
    if alias is not None and _may_pass(session, request, given):
        _remember_call(session, getattr(type(session.user), collective.native), collective, given, tally)
    if plan is not None:
        session.remember(alias, plan, tally)


def serve_first(first: Beginning, collective: Collective, given: Arguments, native: Callable[[], object]) -> None:
    """Leave a call to the MPI library, ``native``, on a communicator on which hiercoll is not set up."""
    run_native(native, first.tally)
    _remember_native(first, collective, given, None)
    first.served()


def serve_native(
    session: Session, collective: Collective, given: Arguments, native: Callable[[], object], tally: array[int] | None
) -> None:
    """Leave a call by "auto" to the MPI library, ``native``, and let it serve such calls, as many as are left; all of
    them without a ``tally``."""
    run_native(native, tally)
    _remember_native(session, collective, given, tally)


def run_native(native: Callable[[], object], tally: array[int] | None) -> None:
    """The MPI library's own collective, counted, if there is a ``tally``."""
    if progress.active:
        progress.before_blocking()
    begin = perf_counter()
    native()
    if tally is not None:
        count(tally, perf_counter() - begin)


def _remember_native(
    session: Session | Beginning, collective: Collective, given: Arguments, tally: array[int] | None
) -> None:
    """Let mpi4py's own method serve such calls by "auto", as many as are left, as long as nobody looks on."""
    method = getattr(type(session.user), collective.native)
    is_for_any = session.is_plain and not collective.is_even and not collective.more  # whatever the sizes
    if (collective.is_private or is_for_any) and session.unwatched:
        session.routes.remember_all(method, tally, collective)
    if collective.typed:
        if session.unwatched:
            _remember_typed(session, collective, given, tally)
        return
    if collective.is_even or collective.is_rooted:
        arrays = _arrays(collective, given)
    else:
        specs = [each for each in (given.send, given.recv) if type(each) in (list, tuple) and len(each) == 2]
        arrays = [each[0] for each in specs] if len(specs) == 2 else [None]
    is_known = collective.is_even or not collective.operation
    if session.unwatched and is_known and all(map(_suits_mpi4py, arrays)):
        _remember_call(session, method, collective, given, tally)


def _arrays(collective: Collective, given: Arguments) -> list[Any]:
    """Of the buffers that a call has, without the counts or datatypes that they may come with: mpi4py reads them."""
    left_out = None if collective.is_rooted else MPI.IN_PLACE
    ends = [given.recv] if collective.one_buffer else [given.send, given.recv]
    return [buffer_of(each) for each in ends if each is not left_out]


def _remember_call(
    session: Session | Beginning,
    target: Any,
    collective: Collective,
    given: Arguments,
    counter: array[int] | None = None,
) -> None:
    """Let the compiled engine find what serves such calls."""
    send = None if collective.one_buffer else given.send
    choice = (given.root, given.algorithm, given.transport, *_how(collective, given))
    if not _has_known_operation(collective, given):
        return
    is_native = target is getattr(MPI.Intracomm, collective.native)
    function = direct(session.user, collective, given) if is_native else None
    session.routes.remember(target, counter, collective, send, given.recv, *choice, None, function, **given.named)


def _may_pass(session: Session, request: Request, given: Arguments) -> bool:
    """Whether the call may go to mpi4py as it is: its own, and nobody looks on."""
    is_known = request.memory == "host" and all(map(_suits_mpi4py, _arrays(request.collective, given)))
    is_its_own = request.variant.is_native and not request.accumulates
    return is_known and is_its_own and session.unwatched


def _suits_mpi4py(buffer: Any) -> bool:
    """Whether it is, if it is an array of NumPy's, in the order of C, with elements that mpi4py knows."""
    if type(buffer) is not np.ndarray:
        return True
    known: Any = MPI._typedict
    return bool(buffer.flags.c_contiguous and buffer.dtype.isnative and buffer.dtype.char in known)


def _is_readable(request: Request, given: Arguments) -> bool:
    """Whether the compiled engine sees where the data of a call with equal blocks lie: in arguments, but for what is
    in place on all ranks, and of datatypes that are MPI's own, which nobody can free."""
    ends = (given.send, request.sent), (given.recv, request.received)
    if any(data is not None and data.blocks and is_in_place(spec) for spec, data in ends):
        return False
    specs = [spec for spec, _ in ends if type(spec) in (list, tuple)]
    types = [each for spec in specs for each in spec if isinstance(each, MPI.Datatype)]
    return all(each.is_predefined for each in types)


def _has_known_operation(collective: Collective, given: Arguments) -> bool:
    """Whether a reduction's operation is one of MPI's own: others may be freed, and mean something else later."""
    return not collective.operation or (isinstance(given.op, MPI.Op) and bool(given.op.is_predefined))


def is_on_device(spec: Any) -> bool:
    """Whether a buffer specification is of device memory."""
    return is_device_array(spec[0] if isinstance(spec, list | tuple) and spec else spec)


def uses_device(given: Arguments) -> bool:
    """Whether a call is on device memory. Ranks may have but one of the buffers."""
    return is_on_device(given.recv) or is_on_device(given.send)


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
        known = _run_copied(session, collective, named)
        if known is None:
            return None
        if tally is not None:
            count(tally, perf_counter() - begin)
        _remember_typed(session, collective, given, tally, known)
        return known.plan.name
    if learner is None and known_by_name(comm, collective, named):
        return spelled(collective, named.algorithm, named.params)
    plan, _ = session.recent.get(uneven_alias(collective, named), (None, None))
    if plan is None or plan.is_freed:
        return None
    _run_kept(session, plan, tally, named)
    return plan.name


def serve_unknown_sizes(
    session: Session, collective: Collective, given: Arguments, learner: Learner, native: Native, *, strict: bool
) -> str:
    """Serve a blocking call of which no rank knows all sizes, by what is learned; ``native`` makes the MPI library's
    own. Whatever a rank's arguments are, it takes part in what ranks agree on. Returns what ran. Collective."""

    def make() -> Request:
        request = make_request(session, collective, given, strict=strict)
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
    request = make_request(session, collective, given, Mode.HELD, strict=strict)
    request = replace(request, is_auto=request.is_auto or given is not asked)
    if session.check:
        session.same_call(request.described(asked, session.rank, session.size))
    return request


def begin(session: Session, request: Request, given: Arguments) -> BackgroundCall:
    """Start a call in the background. Local."""
    request = session.factory.private(request)
    plan = session.factory.make(request, Lifetime.BACKGROUND)
    plan.producers = request.producers
    described = partial(request.described, given, session.rank, session.size)
    return BackgroundCall(session, plan, request.result, described=described)
