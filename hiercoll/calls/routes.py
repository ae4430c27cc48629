"""Calls that the compiled engine is to find again by their arguments: what serves them is put among the routes of their
communicator."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hiercoll.calls.given import arrays_of, has_known_operation, is_in_elements, operation_and_order, suits_mpi4py
from hiercoll.collectives import Collective, InBackground
from hiercoll.loading import LazyModule, is_array
from hiercoll.runtime.arguments import LIMIT, Arguments
from hiercoll.runtime.beginning import Alike, Beginning
from hiercoll.runtime.direct import direct

if TYPE_CHECKING:
    import numpy as np

    from hiercoll.calls.known import Copied
    from hiercoll.runtime.session import Session
else:
    np = LazyModule("numpy")

MOST_AS_PASSED = 128  # known calls, up to which those are added that are known by the very objects that were passed


def remember_native(
    session: Session | Beginning, collective: Collective, given: Arguments, tally: array[int] | None
) -> None:
    """Let mpi4py's own method serve such calls by "auto", as many as are left, as long as nobody looks on."""
    method = getattr(type(session.user), collective.native)
    is_for_any = session.is_plain and not collective.is_even  # whatever the sizes
    if (collective.is_private or is_for_any) and session.unwatched:
        session.routes.remember_all(method, tally, collective)
    if collective.typed:
        if session.unwatched:
            remember_typed(session, collective, given, tally)
        return
    if collective.is_even or collective.is_rooted or collective.is_counted:
        arrays = arrays_of(collective, given)
    else:
        specs = [each for each in (given.send, given.recv) if type(each) in (list, tuple) and len(each) == 2]
        arrays = [each[0] for each in specs] if len(specs) == 2 else [None]
    if session.unwatched and all(map(suits_mpi4py, arrays)):
        remember_call(session, method, collective, given, tally)


def remember_all_begun(state: Session | Beginning | Alike, collective: Collective) -> None:
    """The same of all calls in the background of drop-in communicators on memory of the host."""
    method = getattr(MPI.Intracomm, collective.nonblocking)
    state.routes.remember_all(method, state.choices, collective.in_background)


def remember_typed(
    session: Session | Beginning,
    collective: Collective,
    given: Arguments,
    counter: array[int] | None,
    known: Copied | None = None,
    *,
    is_begun: bool = False,
) -> None:
    """Let the compiled engine find what serves calls whose blocks have datatypes of their own, as long as the very
    objects that are passed are as they are: mpi4py's method, or a ``known`` call's program. Of a program that makes new
    ones for each call there are not so many that other calls are forgotten. Nothing, where it would not see that
    numbers change."""
    if len(session.routes) >= MOST_AS_PASSED:
        return
    specs = [None if spec is MPI.IN_PLACE else spec for spec in (given.send, given.recv)]
    if any(type(spec) not in (list, tuple) for spec in specs if spec is not None) or given.stream is not None:
        return
    try:
        parts = tuple(None if spec is None else tuple(map(_as_it_is, spec[1:])) for spec in specs)
    except TypeError:
        return
    form, name = (collective.in_background, collective.nonblocking) if is_begun else (collective, collective.native)
    target, program = getattr(type(session.user), name), tuple[Any, ...]((None,) * 4)
    if known is not None:
        moves, request = known.moves(), known.request
        if moves is None or known.plan.program is None or request.sent is None or given.limit != LIMIT:
            return
        target, ends = known.plan.program, (request.sent, request.received)
        rows = np.concatenate([*(end.sizes for end in ends), *(end.at for end in ends)]).astype(np.int64)
        program = known.holder, *moves, rows.tobytes()
    choice = (given.root, given.algorithm, given.transport, None, None)
    session.routes.remember(
        target, counter, form, given.send, given.recv, *choice, (parts, *program), None, **given.params
    )


def _as_it_is(part: Any) -> Any:
    """What came with an array, for comparison: numbers of an array as bytes, lists and tuples as tuples. Raises
    TypeError for what may change, such as an array.array, and of which the compiled engine sees no more than that it is
    the same object."""
    if is_array(part):
        return part.tobytes()
    if type(part) in (list, tuple):
        return tuple(map(_as_it_is, part))
    if part is None or type(part) in (int, str, MPI.Datatype) or isinstance(part, np.generic):
        return part
    raise TypeError(type(part))


def remember_call(
    session: Session | Beginning,
    target: Any,
    collective: Collective,
    given: Arguments,
    counter: array[int] | None = None,
    form: InBackground | None = None,
) -> None:
    """Let the compiled engine find what serves such calls."""
    send = None if collective.one_buffer else given.send
    choice = (given.root, given.algorithm, given.transport, *operation_and_order(collective, given))
    if not has_known_operation(collective, given):
        return
    is_program = not callable(target)  # which moves elements of arrays, one of mpi4py's whatever there is
    if is_program and not collective.is_even and not all(map(is_in_elements, (send, given.recv))):
        return
    is_native = target is getattr(MPI.Intracomm, collective.native)
    function = direct(session.user, collective, given) if is_native else None
    key = form or collective
    session.routes.remember(target, counter, key, send, given.recv, *choice, None, function, **given.named)
