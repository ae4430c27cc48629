"""What is under way in the background: non-blocking calls, and who lets them go on.

They go on in every call of hiercoll that waits or tests, and, if asked for, in a thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Protocol

PAUSE = 5e-5  # seconds between the thread's looks at what is under way
LISTEN = 1e-3  # seconds between its looks at what others may start
SHORTEST_REST, LONGEST_REST = 5e-4, 2e-3  # seconds between two looks at what takes long


class Background(Protocol):
    """Something that goes on when it is looked at."""

    def advance(self) -> None:
        """Go on; leave `active` when complete."""


active: list[Background] = []
listening: list[Background] = []  # goes on after what is under way, or may start something
abandoned: list[object] = []  # what MPI may still use; kept until it has ended (see `lifetime`)
lock = threading.RLock()
_wanted = threading.Event()
_thread: threading.Thread | None = None


def advance_all() -> None:
    """Let everything under way go on."""
    with lock:
        for each in [*active, *listening]:
            each.advance()


def wait_politely() -> None:
    """Let everything under way go on, and give way to other processes."""
    if active:
        advance_all()
    os.sched_yield()


def rest_until(is_over: Callable[[], bool]) -> None:
    """Wait until something ``is_over`` that takes long, and leave the core to others: who asks again and again takes
    as much of it as those that are waited for, if they share it."""
    pause = SHORTEST_REST
    while not is_over():
        if active:
            advance_all()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_REST)


@cache
def may_have_thread() -> bool:
    """Whether the MPI library lets threads of this process call it; the same as long as MPI runs."""
    from mpi4py import MPI  # here: commands that need no MPI come by this module

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def before_blocking() -> None:
    """This rank is about to wait in the MPI library, or may without notice: what is under way goes on in
    a thread, where there may be one."""
    if active and may_have_thread():
        want_thread()


def want_thread() -> None:
    """Let a thread do so too, as long as there is anything."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_run, name="hiercoll progress", daemon=True)
        _thread.start()
    _wanted.set()


def other_threads() -> bool:
    """Whether a thread of the program may make calls besides this one: any that Python knows but hiercoll's own."""
    own = {None if _thread is None else _thread.ident, threading.get_ident()}
    return not own.issuperset(sys._current_frames())


def stop() -> None:
    """Nothing goes on from now on: MPI is about to end."""
    with lock:
        active.clear()
        listening.clear()


def _run() -> None:
    while _wanted.wait():
        _wanted.clear()
        while active or listening:
            advance_all()
            time.sleep(PAUSE if active else LISTEN)
