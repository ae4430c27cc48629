"""Deadlines, and the records of calls that ranks write when one passes.

A rank that has waited for longer than its deadline raises `CollectiveTimeout`, which names whom it
waits for, and writes what it knows to a folder that the hosts share. `hiercoll.tools.diagnosis` reads them all.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hiercoll import settings
from hiercoll.errors import CollectiveFailed, CollectiveTimeout
from hiercoll.runtime.progress import wait_politely

if TYPE_CHECKING:
    from hiercoll.runtime.engines import Pending

RECORDED = 100  # calls that a rank remembers
UNKNOWN = -1  # node of ranks of which nothing is known yet
LOOKS = 32  # at an operation that is not complete, between looks at the clock


class Running(Protocol):
    """A plan, as far as a watch looks at it."""

    name: str
    entry: Entry | None

    def test(self) -> bool:
        """Whether it is complete; makes progress."""

    def pending(self) -> list[Pending]:
        """What it waits for."""


# A call: its number on the communicator, its name, when it began (seconds since 1970), and how long
# it took (None: it is not complete). A list, because that is made in half the time of an object.
Entry: TypeAlias = "list[Any]"
FIELDS = ("number", "name", "began", "seconds")
NUMBER, _, BEGAN, SECONDS = range(len(FIELDS))


class Watch:
    """Deadline and record of one rank of a communicator. ``world`` gives the rank in MPI_COMM_WORLD
    of each of its ranks; ``expired`` is called with the call that ran into the deadline."""

    def __init__(
        self,
        timeout: float,
        name: str,
        rank: int,
        node_of: Sequence[int],
        world: Sequence[int],
        expired: Callable[[str], None],
    ) -> None:
        self.timeout, self.name, self.rank, self.expired = timeout, name, rank, expired
        self.node_of, self.world = node_of, world
        self.record: deque[Entry] = deque(maxlen=RECORDED)
        self.numbers = array("q", [0])  # that of the last call; see `number`

    @property
    def number(self) -> int:
        """Of the last call; the compiled engine counts, too."""
        return self.numbers[0]

    def begin(self, plan: Running) -> Entry:
        """Note that a plan is started."""
        self.numbers[0] += 1
        entry = [self.number, plan.name, time.time(), None]
        self.record.append(entry)
        return entry

    def complete(self, plan: Running) -> None:
        """Wait for a plan that has been started. Raises CollectiveTimeout."""
        test, begin, looks = plan.test, time.monotonic(), 0
        while not test():
            wait_politely()
            looks += 1
            if looks % LOOKS == 0 and time.monotonic() - begin > self.timeout:
                self.expire(plan, time.monotonic() - begin)
        if plan.entry is not None:
            plan.entry[SECONDS] = time.time() - plan.entry[BEGAN]

    def expire(self, plan: Running, waited: float) -> None:
        """A plan has waited for too long. Raises CollectiveTimeout."""
        text, file = self._describe(plan, waited)
        raise CollectiveTimeout(text + (f" (see hiercoll diagnose {file.parent})" if file else ""))

    def failed(self, plan: Running, problem: Exception) -> CollectiveFailed:
        """What to raise when the MPI library reports an error in the middle of a call."""
        text, _ = self._describe(plan, time.time() - (plan.entry[BEGAN] if plan.entry else time.time()))
        return CollectiveFailed(f"{text}: {problem}")

    def _describe(self, plan: Running, waited: float) -> tuple[str, Path | None]:
        """What this rank waits for, and the file where it is written."""
        pending, number = plan.pending(), plan.entry[NUMBER] if plan.entry else 0
        self.expired(plan.name)
        what = "; ".join(f"{each.verb} rank {each.peer} (node {self.node_of[each.peer]})" for each in pending[:3])
        more = f" and {len(pending) - 3} more" if len(pending) > 3 else ""
        step = f" step {pending[0].step}" if pending else ""
        collective, _, algorithm = plan.name.partition(" ")
        text = (
            f"rank {self.rank} waits in {collective} #{number} {algorithm}{step}"
            f" for {what or 'the MPI library'}{more}, for {waited:.1f} s"
        )
        return text, self._write(plan, pending, waited)

    def _write(self, plan: Running, pending: list[Pending], waited: float) -> Path | None:
        """The flight record, where ``HIERCOLL_DIAG_DIR`` names a folder."""
        folder = settings.record_folder()
        if folder is None:
            return None
        file = folder / f"hiercoll-{self.name[:8]}-{self.world[self.rank]}.json"
        about = {
            "communicator": self.name, "rank": self.rank, "world": list(self.world), "node_of": list(self.node_of),
            "host": os.uname().nodename, "process": os.getpid(), "call": plan.name,
            "number": plan.entry[NUMBER] if plan.entry else 0,
            "waited": waited, "timeout": self.timeout, "pending": [each._asdict() for each in pending],
            "record": [dict(zip(FIELDS, entry, strict=True)) for entry in self.record],
        }  # fmt: skip
        import json  # for each process that starts, too much

        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".part")
            partial.write_text(json.dumps(about) + "\n")
            partial.rename(file)  # whole, or not there
        except OSError:  # the error that is about to be raised says more
            return None
        return file


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Such as "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
