"""What learning costs, and what it finds: "auto" without a table beside native, native again, and a tuned table.

Run under MPI. For each size a new communicator makes calls one at a time, each after a barrier, in turns with the
others; with ``--together`` one communicator makes those of all sizes and collectives, in turns, as a program does. A
call's time is that of the slowest rank. Prints a line of JSON per size:

- "first": the sum of the first calls' times ("seconds") over the mean of native's, which takes two turns, and "control"
  the one of these over the other; "together": how many sizes shared a communicator; "first_call": the seconds of each
  subject's first call; "spent": seconds of the set-up within them, and of all that finding out cost, by the budget's
  account
- "settled": after how many calls all had been tried, if it had
- "after": medians of the calls after that over native's, of "auto" those that were no trials; "tried": how many of
  these calls were, "late": the mean of all of them over native's; "found": what is known then to serve best

``HIERCOLL_LEARNED`` names where it is kept: a second run begins with it.

    mpiexec -n 16 python scripts/learning.py alltoall --sizes 8,64,512,4K,32K --table docs/lab/table-mpich-4x4.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.cli.common import SizesType
from hiercoll.collectives import COLLECTIVES, Collective
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session, known_session
from hiercoll.tools.cores import Cores
from hiercoll.tuning.learning import Learner
from hiercoll.tuning.policy import Wanted

WORLD = MPI.COMM_WORLD
Call = Callable[[], Any]
Record = dict[str, Any]
Times = dict[Hashable, list[float]]
STRIDE = 20  # calls between two looks at whether all has been tried
ENOUGH = 15  # calls after that which are no trials


def slowest(call: Call) -> float:
    """Seconds of the slowest rank."""
    WORLD.Barrier()
    begin = perf_counter()
    call()
    return float(WORLD.allreduce(perf_counter() - begin, op=MPI.MAX))


def in_turns(
    calls: Mapping[Any, Call],
    number: int,
    between: Callable[[], None] = lambda: None,
    after: Callable[[Any], None] = lambda name: None,
) -> Times:
    """Seconds of so many calls of each, each turn beginning with another one; what is to be done ``between`` turns, and
    ``after`` a call."""
    names = list(calls)
    times: Times = {name: [] for name in names}
    for turn in range(number):
        between()
        for name in (names[(turn + place) % len(names)] for place in range(len(names))):
            times[name].append(slowest(calls[name]))
            after(name)
    return times


def spent_on(comm: MPI.Intracomm) -> dict[str, float]:
    """Seconds that setting it up took, and of all that learning has cost on it."""
    session = known_session(comm)
    return {} if session is None else {"set_up": session.set_up_seconds, "all": session.policy.budget.cost}


def is_settled(comm: MPI.Intracomm) -> bool:
    """Whether all that calls of a communicator may try has been."""
    session = known_session(comm)
    return session is not None and session.policy.is_settled


def settle(comm: MPI.Intracomm, ours: Sequence[Call], calls: int, most: int) -> int | None:
    """Make each of a communicator's calls until all has been tried, so many times at most, ``calls`` of which are over.
    After how many that was; None if it was not."""
    while not WORLD.allreduce(is_settled(comm), op=MPI.LAND):
        if calls >= most:
            return None
        for call in STRIDE * list(ours):
            WORLD.Barrier()
            call()
        calls += STRIDE
    return calls


@dataclass
class Point:
    """A size of a collective, and its buffers."""

    collective: Collective
    size: int

    def __post_init__(self) -> None:
        blocks = (self.collective.blocks(end, WORLD.size) for end in (self.collective.send, self.collective.recv))
        send, recv = (np.zeros(self.size * number, np.uint8) for number in blocks)
        self.buffers = [recv] if self.collective.one_buffer else [send, recv]

    def native(self, comm: MPI.Intracomm) -> Call:
        """The MPI library's call."""
        return partial(getattr(comm, self.collective.native), *self.buffers)

    def ours(self, comm: MPI.Intracomm) -> Call:
        """hiercoll's, which imports the package the first time."""
        call = getattr(hiercoll, self.collective.name)
        return lambda: call(comm, *self.buffers)

    def learner(self, comm: MPI.Intracomm) -> Learner | None:
        """What has been learned of it."""
        return get_session(comm).policy.learner(Wanted(self.collective, self.size, self.collective.one_buffer))

    def trials(self, comm: MPI.Intracomm) -> int:
        """How many of its calls have been tried."""
        learner = self.learner(comm) if known_session(comm) is not None else None
        return 0 if learner is None else learner.trials


def in_turns_beside_trials(
    calls: Mapping[Any, Call], points: list[Point], comm: MPI.Intracomm, number: int, between: Callable[[], None]
) -> tuple[Times, list[list[bool]]]:
    """The same, and which of each point's calls by "auto" were trials; with more turns until `ENOUGH` were none."""
    counts: list[list[int]] = [[point.trials(comm)] for point in points]

    def count(name: Any) -> None:
        place, label = name
        if label == "auto":
            counts[place].append(points[place].trials(comm))

    times: Times = {name: [] for name in calls}
    turns = 0
    while True:
        for name, more in in_turns(calls, number, between, count).items():
            times[name] += more
        turns += number
        tried = [[after > before for before, after in pairwise(each)] for each in counts]
        if turns >= 4 * number or all(each.count(False) >= ENOUGH for each in tried):
            return times, tried


def measure(points: list[Point], first: int, after: int, patience: int, table: Path | None) -> Iterator[Record]:
    """The records of sizes whose calls take turns on one communicator."""
    comms = {label: WORLD.Dup() for label in ("native", "control", "auto")}
    ours = comms["auto"]
    calls = {
        (place, label): point.ours(comm) if label == "auto" else point.native(comm)
        for place, point in enumerate(points)
        for label, comm in comms.items()
    }
    cores = Cores(WORLD)
    cores.shuffle()  # once: a program's ranks stay where they are
    early = in_turns(calls, first)
    spent = spent_on(ours)
    settled = settle(ours, [calls[place, "auto"] for place in range(len(points))], first, patience)
    if table is not None:
        comms["table"] = WORLD.Dup()
        hiercoll.configure(comms["table"], table=table)
        tuned = {(place, "table"): point.ours(comms["table"]) for place, point in enumerate(points)}
        in_turns(tuned, 3)
        calls |= tuned
    late, tried = in_turns_beside_trials(calls, points, ours, after, cores.shuffle)
    for place, point in enumerate(points):
        sums = {label: sum(early[place, label]) for label in ("native", "control", "auto")}
        chosen = [time for time, is_trial in zip(late[place, "auto"], tried[place], strict=True) if not is_trial]
        medians = {label: median(chosen if label == "auto" else late[place, label]) for label in comms}
        learner = point.learner(ours)
        finding = None if learner is None else learner.finding
        name = point.collective.name
        yield {
            "collective": name, "size": point.size, "calls": first, "together": len(points),
            "first": 2 * sums["auto"] / (sums["native"] + sums["control"]), "control": sums["control"] / sums["native"],
            "seconds": sums, "first_call": {label: early[place, label][0] for label in sums},
            "spent": spent, "settled": settled, "native": medians["native"], "tried": sum(tried[place]),
            "late": fmean(late[place, "auto"]) / fmean(late[place, "native"]),
            "after": {label: each / medians["native"] for label, each in medians.items() if label != "native"},
            "found": None if finding is None else finding.variant.spelled(name),
            "found_after": None if finding is None else finding.calls,
            "chosen": "native" if finding is None else finding.variant.spelled(name), "mpi": mpi_library(),
            "layout": str(hiercoll.get_topology(ours)), "date": f"{datetime.now(timezone.utc):%F %T}",
        }  # fmt: skip
    for comm in comms.values():
        comm.Free()


@click.command()
@click.argument("collectives", nargs=-1, required=True, type=click.Choice(["alltoall", "allgather", "bcast"]))
@click.option("--sizes", "-s", type=SizesType(), default="8,64,512,4K,32K", help="Bytes per block.")
@click.option("--first", default=300, help="Calls whose times are added up.")
@click.option("--after", default=60, help="Calls after that, for the medians.")
@click.option(
    "--patience", default=0, help="Calls in all, at most, until all has been tried; before those for the medians."
)
@click.option("--together", is_flag=True, help="One communicator for all, whose calls take turns, as a program's do.")
@click.option("--table", type=click.Path(exists=True, path_type=Path), help="A tuned table to compare with.")
def main(
    collectives: tuple[str, ...], sizes: list[int], first: int, after: int, patience: int, together: bool,
    table: Path | None,
) -> None:  # fmt: skip
    """See the top of this file."""
    points = [Point(COLLECTIVES[name], size) for name in collectives for size in sizes]
    for group in [points] if together else [[point] for point in points]:
        for line in measure(group, first, after, patience, table):
            if WORLD.rank == 0:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
