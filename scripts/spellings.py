"""What calls cost, by how they are spelled: every collective and spelling, blocking, in the background, and as a plan.

    mpiexec -n 2 python scripts/spellings.py [--above 10] [--only alltoallv,...] [--rows 400]

Four doubles per pair, in rows, by each algorithm by name and by "auto" with nothing learned. Shown is what takes so
many microseconds more than mpi4py's own call of that form: on two ranks of a host that is Python's, as calls that come
again are found in some microseconds. Medians of five rows; of each row, the mean of rank 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.algorithms import REGISTRY
from hiercoll.collectives import COLLECTIVES, Collective

WORLD = MPI.COMM_WORLD
ITEMS, TYPE, ROWS = 4, MPI.DOUBLE, 5
Call = Callable[[], object]


class Spelling(NamedTuple):
    """Buffers of a call, as they are spelled."""

    name: str
    given: tuple[Any, ...]


def blocks(number: int) -> Any:
    """So many blocks of ones."""
    return np.ones(number * ITEMS)


def spellings(collective: Collective) -> Iterator[Spelling]:
    """The ways to spell a call's buffers."""
    p, name = WORLD.size, collective.name
    counts, places = [ITEMS] * p, [ITEMS * rank for rank in range(p)]
    one, other, all_, others = blocks(1), blocks(1), blocks(p), blocks(p)
    if name == "barrier":
        yield Spelling("no buffers", ())
    elif name == "alltoallw":
        nbytes = [8 * place for place in places]
        yield Spelling("types", ([all_, (counts, nbytes), [TYPE] * p], [others, (counts, nbytes), [TYPE] * p]))
    elif name == "bcast":
        yield from (Spelling("array", (one,)), Spelling("[array, type]", ([one, TYPE],)))
    elif collective.is_even:
        send = all_ if name in ("alltoall", "scatter", "reduce_scatter") else one
        recv = others if name in ("alltoall", "allgather", "gather") else other
        yield Spelling("arrays", (send, recv))
        yield Spelling("[array, type]", ([send, TYPE], [recv, TYPE]))
        if not collective.is_rooted:
            yield Spelling("new result", (send,))
            yield Spelling("in place", (MPI.IN_PLACE, all_ if name == "reduce_scatter" else recv))
    elif name == "reduce_scatterv":
        yield Spelling("counts", (all_, other, counts))
    else:
        for way, which in (
            ("counts", (counts,)),
            ("(counts, places)", ((counts, places),)),
            ("counts, places, type", (counts, places, TYPE)),
        ):
            equal = [one, TYPE] if "type" in way else one
            send = [all_, *which] if name in ("alltoallv", "scatterv") else equal
            recv = [others, *which] if name != "scatterv" else equal
            yield Spelling(way, (send, recv))


def forms(collective: Collective, spelling: Spelling, chosen: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    """The same call blocking, in the background, and as a plan."""
    name, given = collective.name, (WORLD, *spelling.given)
    yield "blocking", partial(getattr(hiercoll, name), *given, **chosen)
    if hasattr(hiercoll, f"i{name}"):
        yield "background", lambda: getattr(hiercoll, f"i{name}")(*given, **chosen).wait()
    if hasattr(hiercoll, f"{name}_init"):
        yield "plan", getattr(hiercoll, f"{name}_init")(*given, **chosen)


def natives(collective: Collective, spelling: Spelling) -> dict[str, Call]:
    """mpi4py's own calls, by form; none that MPI does not have."""
    if spelling.name == "new result":
        return {}
    given = spelling.given
    return {
        "blocking": partial(getattr(WORLD, collective.native), *given),
        "background": lambda: getattr(WORLD, collective.nonblocking)(*given).Wait(),
    }


def microseconds(call: Call, rows: int) -> float:
    """Of a call in a row."""
    for _ in range(20):
        call()
    times = []
    for _ in range(ROWS):
        WORLD.Barrier()
        begin = perf_counter()
        for _ in range(rows):
            call()
        times.append((perf_counter() - begin) / rows)
    return 1e6 * median(times)


def main() -> None:
    """Print a line for each call that takes long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--above", type=float, default=10.0, help="Microseconds.")
    parser.add_argument("--only", default="", help="Collectives.")
    parser.add_argument("--rows", type=int, default=400, help="Calls in a row.")
    options = parser.parse_args()
    hiercoll.configure(WORLD, tune="off")
    wanted = [each for each in options.only.split(",") if each] or list(COLLECTIVES)
    for collective in map(COLLECTIVES.__getitem__, wanted):
        if not hasattr(hiercoll, collective.name):
            continue
        for spelling in spellings(collective):
            own = {form: microseconds(call, options.rows) for form, call in natives(collective, spelling).items()}
            for algorithm in ("auto", "native", *REGISTRY[collective.family]):
                times = {}
                with suppress(hiercoll.ArgumentError):  # as an algorithm that does not work in place, or has no plan
                    for form, call in forms(collective, spelling, {"algorithm": algorithm}):
                        with suppress(hiercoll.ArgumentError):  # as one with shared memory, in the background
                            times[form] = microseconds(call, options.rows)
                for form, took in times.items():
                    beside = own.get(form, own.get("blocking", 0.0))
                    if WORLD.rank == 0 and took > beside + options.above:
                        what = f"{collective.name:<16} {spelling.name:<22} {algorithm:<22} {form:<12}"
                        print(f"{what} {took:8.1f} us, mpi4py {beside:6.1f}", flush=True)


if __name__ == "__main__":
    main()
