"""The compiled engine: whether there is one, the calls that it serves (`_calls.c`), and methods that make communicators
(`_communicators.c`).

It runs messages, copies and flags on buffers of the host as `programs` says. Python's engines run the same steps where
there is no compiled one, and all others.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from array import array
from collections.abc import Callable
from functools import cache
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mpi4py import MPI

from hiercoll import settings
from hiercoll.collectives import AUTO
from hiercoll.errors import EngineWarning
from hiercoll.runtime import progress

if TYPE_CHECKING:
    from inspect import Parameter

Function = TypeVar("Function", bound="Callable[..., Any]")
observers: list[Any] = []  # of drop-in calls, which do not pass the compiled engine while there are any


@cache
def load() -> tuple[ModuleType | None, str]:
    """The compiled engine, ready for this MPI library; or None, and why Python's engines run everything."""
    wanted = settings.engine()
    if wanted == "python":
        return None, "HIERCOLL_ENGINE=python"
    try:
        module = importlib.import_module("hiercoll.runtime._engine")
        _set_up(module)
    except (ImportError, OSError) as error:
        built = not isinstance(error, ModuleNotFoundError)
        why = str(error) if built else "it was not built: there was no C compiler when hiercoll was installed"
        if built or wanted == "c":
            warnings.warn(EngineWarning(f"no compiled engine, Python's run: {why}"), stacklevel=2)
        return None, why
    return module, ""


def _set_up(module: Any) -> None:
    """Raises OSError where a function of the MPI library is not found, or arrays are not as they were, if there are any
    so far."""
    handles = (MPI._sizeof(MPI.REQUEST_NULL), value_of(MPI.REQUEST_NULL), value_of(MPI.BYTE))
    module.setup(MPI.__file__, *handles, MPI.ANY_TAG, MPI._sizeof(MPI.Status), MPI.Exception)
    # Of the handle in an object: of communicators, and of datatypes.
    of_comm, of_type = (MPI._addressof(each) - id(each) for each in (MPI.COMM_SELF, MPI.DOUBLE))
    nulls = (of_comm, value_of(MPI.COMM_NULL)), (of_type, value_of(MPI.DATATYPE_NULL))
    module.setup_calls(
        *(MPI.Comm, nulls[0], MPI.Datatype, nulls[1], progress.active),
        *(observers, AUTO, MPI.SUM, MPI.IN_PLACE),
    )
    if "numpy" in sys.modules:
        _set_up_arrays(module)


def _set_up_arrays(module: Any) -> None:
    """Raises OSError where NumPy's arrays are not as they were."""
    import numpy as np

    example = np.zeros((3, 5), np.int64)
    counts = (np.dtype(np.int64), np.dtype(np.int32))
    module.setup_arrays(np.ndarray, (example, example.ctypes.data, example.flags.num), counts)


@cache
def know_arrays() -> None:
    """Let the compiled engine tell NumPy's arrays from other buffers, if NumPy was imported after it. It may be called
    again."""
    module: Any = load()[0]
    if module is not None:
        try:
            _set_up_arrays(module)
        except OSError as error:
            warnings.warn(EngineWarning(f"the compiled engine does not know arrays: {error}"), stacklevel=2)


def value_of(handle: Any) -> int:
    """An MPI handle as a number, with a sign, as C has it."""
    bits = 8 * MPI._sizeof(handle)
    number: int = handle.handle & (1 << bits) - 1
    return number - (number >> bits - 1 << bits)


class Routes:
    """In place of the compiled engine's: it knows no call."""

    def __init__(self, *_: Any) -> None:
        self.tick = count(1).__next__

    def __len__(self) -> int:
        return 0

    def clear(self) -> None:
        """Nothing to forget."""

    def remember(self, *_: Any, **params: Any) -> bool:
        """Python serves all calls."""
        return False

    def remember_all(self, *_: Any) -> None:
        """Python serves all calls."""

    def open(self, _: bool) -> None:
        """Nothing to serve."""

    def limit(self, seconds: float, number: int, record: object) -> None:
        """Nothing that could wait."""


def make_routes(failed: Callable[..., None], rank: int, size: int) -> Any:
    """The calls of a communicator whose programs are known, by their arguments; ``failed`` is called with a program in
    which an exception was raised, the entry of the call in the record (None without a deadline), and the exception."""
    module: Any = load()[0]
    return (Routes if module is None else module.Routes)(failed, rank, size)


def call() -> Callable[..., bool] | None:
    """What serves a call on arrays that is known: of a collective, the communicator, the buffers (None for those that
    there are not), each an array or, for blocks of any sizes, one with its counts, the root, algorithm, transport,
    operation and order (None where there are none), and by name the parameters. It returns whether it has.
    """
    module: Any = load()[0]
    return None if module is None else module.call


def watched() -> Callable[..., str] | None:
    """What serves a call of a drop-in communicator's method that is known, as the method does where nobody looks on:
    of a collective, the communicator, the buffers (None for those that there are not), root and operation (0 and
    None where there are none). It returns what ran: the name of the plan, or "native"; "" where the call is not known.
    None if there is no compiled engine."""
    module: Any = load()[0]
    return None if module is None else module.watched


# Arguments of methods, for `inspect`, which reads literals alone.
_WITH_DEFAULTS = {"root": "root=0", "op": "op=...", "recvcounts": "recvcounts=None"}


Begun: TypeAlias = "Callable[[Any, Any, Any], object] | None"


def method(
    kind: type, name: str, collective: object, buffers: int, more: tuple[str, ...], python: Function, begun: Begun
) -> Function:
    """A method of communicators that serves calls that are known, and leaves all others to ``python``; ``buffers``: how
    many it takes, ``more``: the arguments after them, "op" and "root"; ``begun``: of one in the background, what it
    returns where there are plans for it, of these, and of the arrays that are sent and received (None: there is none).
    """
    given = ("buf",) if buffers == 1 else ("sendbuf", "recvbuf")[:buffers]
    text = ", ".join(("$self", *given, *map(_WITH_DEFAULTS.__getitem__, more)))
    doc = f"{name}({text})\n--\n\n{python.__doc__}"
    return _entry(kind, None, name, doc, collective, buffers, more, python, begun) or python


class _NoLiteral:
    """In the place of a default, in a signature as text."""

    def __repr__(self) -> str:
        return "..."


def _in_text(parameter: Parameter) -> Parameter:
    """Without its type, and with a default that `inspect` can read."""
    is_literal = parameter.default is parameter.empty or isinstance(parameter.default, int | str | None)
    return parameter.replace(annotation=parameter.empty, default=parameter.default if is_literal else _NoLiteral())


def function(collective: object, buffers: int, begun: Begun, python: Function) -> Function:
    """The same for a public function, whose communicator comes first, and whose options have names; ``begun`` makes
    what it returns of the MPI library's requests, too."""
    from inspect import Signature, signature  # here: it takes a while, and methods do without

    found = signature(python)
    bare = list(map(_in_text, found.parameters.values()))
    text = str(found.replace(parameters=bare, return_annotation=Signature.empty))
    doc = f"{python.__name__}{text}\n--\n\n{python.__doc__}"
    options = tuple(found.parameters)
    more = (buffers, options, python, begun)
    return _entry(None, python.__module__, python.__name__, doc, collective, *more) or python


def _entry(*given: Any) -> Any:
    """None if there is no compiled engine, or too many of them."""
    module: Any = load()[0]
    return None if module is None else module.entry(*given)


def makes(kind: type, name: str, native: Function, python: Function) -> Function:
    """A method of communicators that makes others as ``python`` does, by ``native``, mpi4py's: the compiled engine does
    where nothing special is to be done; see `set_up_kinds`."""
    module: Any = load()[0]
    return python if module is None else module.makes(kind, name, _any_arguments(name, native), native, python)


def frees(kind: type, name: str, native: Function, python: Function) -> Function:
    """The method that frees a communicator, by ``native`` alone, mpi4py's, where Python knows nothing of it."""
    module: Any = load()[0]
    return python if module is None else module.frees(kind, name, _any_arguments(name, native), native, python)


def _any_arguments(name: str, native: Function) -> str:
    """What `inspect` and `help` say of it."""
    return f"{name}($self, *args, **options)\n--\n\n{native.__doc__}"


def set_up_kinds(kinds: dict[type, type], drop_in: Callable[[Any], Any]) -> None:
    """What communicators of mpi4py's types become in methods that make them, and what is called with all others."""
    module: Any = load()[0]
    if module is not None:
        module.setup_communicators(kinds, drop_in)


def register(handle: int, routes: Any, tally: array[int] | None = None) -> None:
    """Let the calls of a communicator be served by what its routes know; None: not any more. ``tally``: how many more
    calls, and the nanoseconds that they take, where the routes were not told; None: all."""
    module = load()[0]
    if module is not None:
        module.register(handle, routes, tally)


def tally(handle: int) -> array[int] | None:
    """What counts the calls of a communicator that is registered; None if nothing does."""
    module: Any = load()[0]
    return None if module is None else module.tally(handle)


def begin_so(key: int, attribute: int, rank: int, size: int, routes: Any, counts: array[int]) -> None:
    """Let communicators of which nothing is registered, with such a number by the ``key`` of an attribute, and of this
    rank and size, be registered in their first call, with a tally that begins with these ``counts``."""
    module = load()[0]
    if module is not None:
        module.begin_so(key, (attribute, rank, size), (routes, counts))


def close() -> None:
    """Nothing is registered any more, and nothing begins."""
    module = load()[0]
    if module is not None:
        module.close()
