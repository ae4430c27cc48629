"""How a request is served: without a plan, by one that is kept or that the program holds, or in the background.

Functions and drop-in communicators both come here. A call whose arguments were seen before finds its plan by them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

import numpy as np
from mpi4py import MPI

from hiercoll.calls.background import BackgroundCall
from hiercoll.collectives import Collective, Holds, Sizes
from hiercoll.cuda import is_device_array
from hiercoll.cuda.arrays import NO_PRODUCERS
from hiercoll.errors import ConstraintError
from hiercoll.runtime import compiled, progress
from hiercoll.runtime.checking import Description
from hiercoll.runtime.factory import Lifetime
from hiercoll.runtime.lifetime import by_handle
from hiercoll.runtime.plan import Plan
from hiercoll.runtime.request import LIMIT, Arguments, Mode, Request, make_request, own_spread, spelled
from hiercoll.runtime.session import Session
from hiercoll.schedule.transports import AUTO
from hiercoll.tables import NATIVE, NATIVE_VARIANT
from hiercoll.tuner import Spread

Made = TypeVar("Made")
Alias: TypeAlias = "tuple[object, ...]"
_address = MPI.Get_address
_PLAIN = frozenset((int, str))  # types of parameters


def known_plan(
    comm: MPI.Intracomm,
    collective: Collective,
    send: Any,
    recv: Any,
    algorithm: str,
    transport: str,
    params: dict[str, Any],
    root: Any = 0,
) -> tuple[Session, Plan] | tuple[None, None]:
    """The session, and the kept plan, of a call with equal blocks seen before with arrays at these addresses; ``send``
    is None for collectives with one buffer.

    Equal addresses, sizes and types need no second check; contiguity is checked by
    `MPI.Get_address`, and that recv is writable below; True equals 1, but is no root. The slow path says what is
    wrong.
    """
    if type(root) is not int:
        return None, None
    if params and not _PLAIN.issuperset(map(type, params.values())):  # True and 2.0 equal numbers, but are refused
        return None, None
    try:
        session = by_handle[comm.handle]
        plan = session.recent[_equal_key(collective, algorithm, transport, root, send, recv, params)]
    except (KeyError, AttributeError, BufferError, TypeError, MPI.Exception):
        return None, None
    if plan.is_freed or not recv.flags.writeable or session.check or session.broken is not None:
        return None, None
    session.touch(plan)
    return session, plan


def _known(
    collective: Collective,
    comm: MPI.Intracomm,
    send: Any,
    recv: Any,
    root: Any,
    algorithm: str,
    transport: str,
    /,
    **params: Any,
) -> bool:
    """Serve a call with equal blocks on arrays, if it is known; whether it has been."""
    if type(recv) is not np.ndarray or not (send is None or type(send) is np.ndarray):
        return False
    session, plan = known_plan(comm, collective, send, recv, algorithm, transport, params, root)
    if session is None or plan is None:
        return False
    session.run(plan)
    return True


_first = compiled.call()


def call_known(*call: Any, **params: Any) -> bool:
    """Serve a call with equal blocks, if it is known: the compiled engine first, if there is one."""
    return (_first is not None and _first(*call, **params)) or _known(*call, **params)


def blocks_known(comm: MPI.Intracomm, collective: Collective, given: Arguments) -> bool:
    """Serve a call with blocks of any sizes that names its algorithm, if it is known; whether it has been."""
    if _first is None or type(given.limit) is not int or given.limit != LIMIT or given.stream is not None:
        return False
    call = (collective, comm, given.send, given.recv, given.root, given.algorithm, given.transport)
    return _first(*call, **given.params)


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


def equal_alias(collective: Collective, given: Arguments) -> Alias | None:
    """What `known_plan` asks for, of arguments that have been found sound; None for what it does not know."""
    send, recv = given.send, given.recv
    if type(recv) is not np.ndarray or given.stream is not None or type(given.root) is not int:
        return None
    if collective.one_buffer:
        send = None
    elif type(send) is not np.ndarray:
        return None
    if not _PLAIN.issuperset(map(type, given.params.values())):
        return None
    return _equal_key(collective, given.algorithm, given.transport, given.root, send, recv, given.params)


def _equal_key(
    collective: Collective, algorithm: Any, transport: Any, root: int, send: Any, recv: Any, params: dict[str, Any]
) -> Alias:
    """The key of a call on arrays; ``send`` is None where one buffer serves. AttributeError: not arrays."""
    key: Alias = (collective, algorithm, transport, root, _address(recv), recv.nbytes, recv.dtype)
    if send is not None:
        key += (_address(send), send.nbytes, send.dtype)
    return (*key, *params.items()) if params else key


def uneven_alias(collective: Collective, given: Arguments) -> Alias | None:
    """What a call is, if its buffers are arrays with counts of the common kinds; else None. Calls with
    equal aliases have equal sizes in equal places of the same memory."""
    send, recv = given.send, given.recv
    if given.stream is not None or type(given.transport) is not str:
        return None
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


def _counted(array: Any, counts: Any) -> Alias:
    """Raises what there is to raise for others than an array with counts, or (counts, displacements), in arrays."""
    if type(counts) is not tuple:
        return _address(array), array.nbytes, array.itemsize, counts.itemsize, counts.tobytes()
    each = [(numbers.itemsize, numbers.tobytes()) for numbers in counts]
    return _address(array), array.nbytes, array.itemsize, *each


def serve(session: Session, request: Request, given: Arguments) -> str:
    """Serve a blocking call. Returns what ran, in words. Collective."""
    if session.check:
        session.same_call(request.described(given, session.rank, session.size))
    if request.is_empty:
        return request.name
    return or_native(partial(_serve, session, given), request)


def or_native(make: Callable[[Request], Made], request: Request) -> Made:
    """What is made of a request; by the MPI library's own collective where "auto" has chosen what cannot run here, such
    as for want of shared memory: ranks find that out together. Collective."""
    try:
        return make(request)
    except ConstraintError:
        if not request.is_auto or request.is_native:
            raise
        return make(replace(request, variant=NATIVE_VARIANT, note=None))


def _serve(session: Session, given: Arguments, request: Request) -> str:
    plan = session.plan(request)
    if plan is None:
        ran = session.run_once(request)
        if request.variant.is_native and request.note is None:
            remember(session, request, given, None)
        return ran
    plan.producers = request.producers
    if request.note is not None:
        session.begin_together()
    begin = perf_counter()
    session.run(plan)
    plan.producers = NO_PRODUCERS  # a plan that is kept keeps no array
    if request.note is not None:
        request.note(perf_counter() - begin)
    else:
        remember(session, request, given, plan)
    return plan.name


def remember(session: Session, request: Request, given: Arguments, plan: Plan | None) -> None:
    """Let calls with such arguments find the plan, if there is one, or mpi4py's own method."""
    collective = request.collective
    if given.recv is None and type(request.result) is np.ndarray and request.result.flags.c_contiguous:
        given = given._replace(recv=request.result)
    program = None if plan is None else plan.program
    if not collective.is_even:
        if program is not None and given.limit == LIMIT and given.algorithm != AUTO:
            _remember_call(session, program, collective, given)
            if request.is_auto:
                asked, policy = given._replace(algorithm=AUTO, params={}), session.policy.uneven(collective)
                if policy.is_fixed:
                    _remember_call(session, program, collective, asked, policy.left)
        elif plan is not None and program is None:
            session.remember(uneven_alias(collective, given), plan)
        return
    alias = equal_alias(collective, given)
    if alias is not None and (program is not None or _may_pass(session, request, given)):
        _remember_call(session, program or getattr(type(session.user), collective.native), collective, given)
    if plan is not None and program is None:
        session.remember(alias, plan)


def remember_native(session: Session, collective: Collective, given: Arguments) -> None:
    """Let mpi4py's own method serve calls with blocks of any sizes by "auto", as long as the policy does not ask again
    and nobody looks on."""
    specs = [each for each in (given.send, given.recv) if type(each) in (list, tuple) and len(each) == 2]
    if len(specs) == 2 and session.unwatched and all(_suits_mpi4py(each[0]) for each in specs):
        target, counter = getattr(type(session.user), collective.native), session.policy.uneven(collective).left
        _remember_call(session, target, collective, given, counter)


def _remember_call(
    session: Session, target: Any, collective: Collective, given: Arguments, counter: array[int] | None = None
) -> None:
    """Let the compiled engine find what serves such calls."""
    send = None if collective.one_buffer else given.send
    choice = (given.root, given.algorithm, given.transport)
    session.routes.remember(target, counter, collective, send, given.recv, *choice, **given.params)


def _may_pass(session: Session, request: Request, given: Arguments) -> bool:
    """Whether the call may go to mpi4py as it is: its own, and nobody looks on."""
    return _suits_mpi4py(given.recv) and request.variant.is_native and session.unwatched


def _suits_mpi4py(array: Any) -> bool:
    """Whether it is an array in the order of C, with elements that mpi4py knows."""
    elements: Any = MPI._typedict
    return type(array) is np.ndarray and array.flags.c_contiguous and array.dtype.char in elements


def is_on_device(spec: Any) -> bool:
    """Whether a buffer specification is of device memory."""
    return is_device_array(spec[0] if isinstance(spec, list | tuple) and spec else spec)


def sizes_are_unknown(session: Session, collective: Collective, given: Arguments) -> bool:
    """Whether "auto" is to choose for blocks of which no rank knows all sizes."""
    unknown = collective.sizes is Sizes.OWN and session.policy.is_auto(collective, given.algorithm)
    return unknown and not given.params and bool(given.limit == LIMIT)


def repeat(session: Session, comm: MPI.Intracomm, collective: Collective, given: Arguments) -> str | None:
    """Serve a call with blocks of any sizes whose arguments were seen before; the call is counted. Returns what ran."""
    if not session.unwatched:
        return None
    policy = session.policy.uneven(collective) if sizes_are_unknown(session, collective, given) else None
    if policy is not None:
        if not policy.is_fixed:
            return None
        given = given._replace(algorithm=policy.current.algorithm, params=policy.current.params)
    elif blocks_known(comm, collective, given):
        return spelled(collective, given.algorithm, given.params)
    if (plan := session.recent.get(uneven_alias(collective, given))) is None or plan.is_freed:
        return None
    session.touch(plan)
    session.run(plan)
    if policy is not None:
        policy.count()
    return plan.name


def serve_unknown_sizes(
    session: Session, collective: Collective, given: Arguments, native: Callable[[], object], *, strict: bool
) -> str:
    """Serve a blocking call of which no rank knows all sizes, by what the policy says; ``native`` makes the MPI
    library's own. Returns what ran. Collective."""
    policy = session.policy.uneven(collective)
    variant = policy.begin(partial(_survey, session, collective, given))
    if policy.is_trying:
        session.begin_together()
    begin = perf_counter()
    if variant.is_native and session.unwatched and not is_on_device(given.recv):
        progress.before_blocking()
        native()
        ran = f"{collective.name} {NATIVE}"
    else:
        given = given._replace(algorithm=variant.algorithm, params=variant.params)
        # While it is tried, it is called as it will be once it is settled on.
        if policy.is_trying and session.unwatched and blocks_known(session.user, collective, given):
            ran = spelled(collective, variant.algorithm, variant.params)
        else:
            request = replace(make_request(session, collective, given, strict=strict), is_auto=True)
            ran = serve(session, request, given)
    if policy.is_trying:
        policy.note(perf_counter() - begin)
    return ran


def _survey(session: Session, collective: Collective, given: Arguments) -> Spread:
    """The blocks that this rank sends, after a look, if calls are checked, whether all ranks are about to say so."""
    if session.check:
        session.same_call(Description(f"{collective.name}, agreement on algorithms"))
    return own_spread(session, collective, given)


def hold(session: Session, collective: Collective, given: Arguments, *, strict: bool) -> Plan:
    """A plan for the program to hold. Collective."""
    make = partial(session.factory.make, lifetime=Lifetime.HELD)
    return or_native(make, held_request(session, collective, given, strict=strict))


def held_request(session: Session, collective: Collective, given: Arguments, *, strict: bool) -> Request:
    """The request of a plan that a program holds. Collective where nobody knows all sizes."""
    asked = given
    if sizes_are_unknown(session, collective, given):
        if session.check:
            session.same_call(Description(f"persistent {collective.name}, agreement on algorithms"))
        whole = session.policy.uneven(collective).whole(own_spread(session, collective, given))
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
