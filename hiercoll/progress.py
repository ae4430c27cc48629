"""What is under way in the background: non-blocking calls, and who lets them go on.

They go on in every call of hiercoll that waits or tests, and, if asked for, in a thread.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

PAUSE = 5e-5  # seconds between the thread's looks


class Background(Protocol):
    """Something that goes on when it is looked at."""

    def advance(self) -> None:
        """Go on; leave `active` when complete."""


active: list[Background] = []
lock = threading.RLock()
_thread: threading.Thread | None = None


def advance_all() -> None:
    """Let everything under way go on."""
    with lock:
        for each in [*active]:
            each.advance()


def wait_politely() -> None:
    """Let everything under way go on, and give way to other processes."""
    if active:
        advance_all()
    os.sched_yield()


def start_thread() -> None:
    """Let a thread do so from now on, as long as the program runs."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_run, name="hiercoll progress", daemon=True)
        _thread.start()


def _run() -> None:
    while True:
        if active:
            advance_all()
        time.sleep(PAUSE)
