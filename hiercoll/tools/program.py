"""A program with its collectives through hiercoll."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpi4py import MPI
from mpi4py.run import run_command_line, set_abort_status
from mpi4py.util import pkl5

from hiercoll import settings
from hiercoll.calls import dropin


def run(
    program: list[str],
    forced: Mapping[str, tuple[str, dict[str, Any]]] | None = None,
    report: Path | None = None,
    sync: bool = False,
    compare: bool = False,
    trace: Path | None = None,
) -> None:
    """Replace the communicator and run a program: words as Python takes them. ``forced``: algorithm and parameters by
    collective; the others are options of ``python -m hiercoll``, with the files to write."""
    recorder: Any = None
    plain = MPI.COMM_WORLD
    MPI.COMM_WORLD = dropin.drop_in(MPI.COMM_WORLD)  # type: ignore[misc]
    pkl5.Intracomm = dropin.Pkl5Intracomm  # type: ignore[misc]
    settings.forced.update(forced or {})
    settings.compares = compare
    if report or trace:
        from hiercoll.tools.report import Recorder

        recorder = Recorder(sync=sync, trace=trace is not None)
        recorder.install()

    def finish() -> None:
        """The report, once."""
        nonlocal recorder
        if recorder is not None and not MPI.Is_finalized():
            whole, recorder = recorder, None
            whole.finish(plain, report, trace, compares=compare)

    def finalize(original: Callable[[], None] = MPI.Finalize) -> None:
        """As mpi4py's, after the report, for which ranks still need MPI."""
        finish()
        original()

    MPI.Finalize = finalize
    try:
        try:
            run_command_line(program)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        finish()
    except SystemExit as error:
        if error.code not in (None, 0):
            sys.last_value = error  # as Python does with other exceptions: at exit nobody is waited for
        set_abort_status(error)
        raise
    except KeyboardInterrupt as error:
        set_abort_status(error)
        raise
    except BaseException:
        set_abort_status(1)
        raise
