"""A program with its collectives through hiercoll.

MPI begins when the program imports `mpi4py.MPI`, as its `mpi4py.rc` says, or calls `MPI.Init`, and not before: then
hiercoll replaces the communicators.
"""

from __future__ import annotations

import atexit
import builtins
import copyreg
import gc
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any
from zipimport import ZipImportError, zipimporter

from mpi4py.run import run_command_line, set_abort_status

from hiercoll import settings
from hiercoll.errors import LayoutError
from hiercoll.loading import load

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # as at run time any class will do: these bring two dozen modules, which each rank would wait for
    Loader = MetaPathFinder = object


def run(
    program: list[str],
    forced: Mapping[str, tuple[str, dict[str, Any]]] | None = None,
    report: Path | None = None,
    sync: bool = False,
    compare: bool = False,
    trace: Path | None = None,
) -> None:
    """Run a program: words as Python takes them. ``forced``: algorithm and parameters by collective; the others are
    options of ``python -m hiercoll``, with the files to write."""
    settings.forced.update(forced or {})
    settings.compares = compare

    uses_mpi, ends_well = False, False

    def replace() -> None:
        nonlocal uses_mpi
        uses_mpi = True
        try:
            _replace(report, sync, trace, lambda: ends_well)
        except ImportError as error:  # which programs may take for there being no MPI
            sys.exit(f"python -m hiercoll: {error}")

    _when_loaded("mpi4py.MPI", partial(_when_initialised, replace))
    # What there is before the program stays: to look at it again and again at the end takes 5 ms.
    gc.freeze()
    try:
        try:
            _run_alone(program)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        ends_well = True
        if (report or trace) and not uses_mpi:
            print("hiercoll: the program has not used MPI: there is nothing to report", file=sys.stderr)
    except SystemExit as error:
        if error.code not in (None, 0):
            sys.last_value = error  # as Python does with other exceptions: at exit nobody is waited for
            if report or trace:
                status = error.code if isinstance(error.code, int) else 1
                print(f"hiercoll: no report, since the program ends with exit status {status}", file=sys.stderr)
        set_abort_status(error)
        raise
    except KeyboardInterrupt as error:
        set_abort_status(error)
        raise
    except BaseException:
        set_abort_status(1)
        raise


def _run_alone(program: list[str]) -> None:
    """Run a program, with its frames at the beginning of a chunk of Python's stack, as if nothing had called it.

    CPython (from 3.11 on) keeps frames in chunks of 16 KiB. A loop that calls a function across the end of one maps and
    unmaps the next each time. Below the frames of hiercoll that happened in other loops than where a program is run by
    itself: imports of some took up to a fifth longer.
    """
    code = _script(program[0])
    if code is None:
        run_command_line(program)
        return
    sys.argv[:] = program
    # With -I and -P its folder has no place there.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = os.path.realpath(os.path.dirname(program[0]))
    exec(code, _main_module(code.co_filename).__dict__)


_run_alone.__code__ = _run_alone.__code__.replace(co_stacksize=2000)  # words: this frame takes nearly all of a chunk


def _script(name: str) -> CodeType | None:
    """The code of a file in Python; None for anything else that Python runs: a module, a command, the standard input, a
    folder, an archive, compiled code. Raises OSError; SystemExit for what is no Python."""
    path = os.path.abspath(name)
    if name in ("-", "-c", "-m") or not os.path.isfile(path) or _is_archive(path):
        return None
    with io.open_code(path) as file:
        source = file.read()
    if source.startswith(MAGIC_NUMBER):
        return None
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:  # nothing has called it
        from traceback import format_exception_only

        sys.exit("".join(format_exception_only(error)).rstrip("\n"))


def _is_archive(path: str) -> bool:
    """Whether Python runs what is in a file, which may begin with anything, such as the line of an interpreter."""
    try:
        zipimporter(path)
    except ZipImportError:
        return False
    return True


def _main_module(path: str) -> ModuleType:
    """The module that a program is, as Python makes it: `runpy` gives it the name of its file as it was spelled, which
    is no longer one if the program changes its folder, and another one if a process that it spawns looks for itself."""
    made = ModuleType("__main__")
    made.__file__, made.__loader__, made.__package__ = path, SourceFileLoader("__main__", path), None
    made.__dict__.update(__builtins__=builtins, __cached__=None)
    if sys.version_info < (3, 14):
        made.__annotations__ = {}
    sys.modules["__main__"] = made
    return made


def _replace(report: Path | None, sync: bool, trace: Path | None, ends_well: Callable[[], bool]) -> None:
    """Replace the program's communicators, once there is MPI. ``ends_well``: whether no exception has ended the
    program, nor another exit status than 0."""
    from mpi4py import MPI
    from mpi4py.util import pkl5

    from hiercoll.runtime import lifetime

    _check_virtual_nodes()
    dropin = load("hiercoll.calls.dropin")
    plain = MPI.COMM_WORLD
    MPI.COMM_WORLD = dropin.drop_in(MPI.COMM_WORLD)  # type: ignore[misc]
    pkl5.Intracomm = dropin.Pkl5Intracomm  # type: ignore[misc]
    copyreg.pickle(MPI.Intracomm, dropin.reduced)  # objects that others make of COMM_WORLD
    lifetime.end_at_exit()  # after the program's own exit handlers, for which other ranks may wait
    if report or trace:
        from hiercoll.tools.report import Recorder

        recorder = Recorder(sync=sync, trace=trace is not None)
        recorder.install()
        _when_all_is_over(lambda: recorder.finish(plain, report, trace, compares=settings.compares), ends_well)


def _check_virtual_nodes() -> None:
    """End the program, on this rank, if ``HIERCOLL_NODES`` does not fit: its first call would, with a traceback. Not
    where hiercoll looks at it nowhere, nor in a process that another one has spawned, and which may call nothing."""
    from mpi4py import MPI

    nodes = settings.nodes()
    if nodes is None or settings.is_disabled() or MPI.Comm.Get_parent() != MPI.COMM_NULL:
        return
    from hiercoll.topology import virtual_nodes

    try:
        virtual_nodes(nodes, MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
    except LayoutError as error:
        sys.exit(f"python -m hiercoll: {error}")


def _when_all_is_over(finish: Callable[[], None], ends_well: Callable[[], bool]) -> None:
    """Call something once, in which ranks meet: when the program ends MPI, or after its own exit handlers, since other
    ranks may wait for what these do. Not if the program fails: then nobody is waited for."""
    from mpi4py import MPI

    is_left = True

    def once() -> None:
        nonlocal is_left
        if is_left and not MPI.Is_finalized():
            is_left = False
            finish()

    def finalize(original: Callable[[], None] = MPI.Finalize) -> None:
        """As mpi4py's."""
        once()
        original()

    def at_exit() -> None:
        if ends_well():
            once()

    MPI.Finalize = finalize
    atexit.register(at_exit)


def _when_initialised(then: Callable[[], None]) -> None:
    """Call something once MPI has begun: now, or when the program lets it begin."""
    from mpi4py import MPI

    if MPI.Is_initialized():
        then()
        return

    def initialise(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        then()
        return found

    for name in ("Init", "Init_thread"):
        setattr(MPI, name, wraps(getattr(MPI, name))(partial(initialise, getattr(MPI, name))))


def _when_loaded(name: str, then: Callable[[], None]) -> None:
    """Call something once a module is loaded: at once, or when it is imported, before whoever does gets it."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds one module, as others would, and lets it be loaded by `_Loader`."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib`."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(Loader):
    """Loads a module as another loader does, and calls something after that."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See `importlib`."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib`."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()
