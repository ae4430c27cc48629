"""Run a program with its collectives through hiercoll: ``python -m hiercoll [options] program.py [arguments]``."""

from __future__ import annotations

import os
import sys

from hiercoll import settings
from hiercoll.errors import ArgumentError


def start(words: list[str]) -> None:
    """Run the program that these words name, with the arguments and options that they give."""
    try:
        import hiercoll.calls  # noqa: F401 (looks for mpi4py)
    except ImportError as error:
        sys.exit(f"python -m hiercoll: {error}")
    if _is_plain(words):
        from hiercoll.tools.program import run as run_program

        run_program(words)
        return
    from hiercoll.options import parsed

    run = parsed(words)
    if run is not None:
        run()


def _is_plain(words: list[str]) -> bool:
    """Whether there are no options, and nothing is wrong with the words, or with variables."""
    try:
        settings.check()
    except ArgumentError:
        return False
    first = words[0] if words else "-"
    return (first in ("-m", "-c") and len(words) > 1) or (not first.startswith("-") and os.path.exists(first))


if __name__ == "__main__":
    start(sys.argv[1:])
