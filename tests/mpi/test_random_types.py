"""Random derived types in all collectives that hiercoll serves with them: what the MPI library's own collectives give.

``HIERCOLL_TEST_EXAMPLES`` says how many examples (`make sweep` takes 2,000). Each draws a collective, an algorithm, a
placement of ranks, blocks of which some are empty, and datatypes of both ends: nested, with negative strides and lower
bounds. Some receive bytes that overlap, which MPI 4.1, 5.1.11, calls erroneous: hiercoll copies in the order of the
type map, and so do MPICH and Open MPI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import layouts
from mpi4py import MPI
from random_types import Random, bounds, data, overlapping_type, place, random_type

import hiercoll

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
PARTS = 20  # of the examples, each a test
EXAMPLES = int(os.environ.get("HIERCOLL_TEST_EXAMPLES", "40"))
UNIT = 12  # ints, which elements of all of these divide
ELEMENTS = (1, 2, 3, 4, 6, 12)
POISON = 0xA5
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "alltoall": ("scatter_destination", "pairwise", "bruck", "grouped", "native", "auto"),
    "alltoallv": ("scatter_destination", "pairwise", "aggregate", "native", "auto"),
    "alltoallw": ("scatter_destination", "pairwise", "aggregate", "native", "auto"),
    "allgatherv": ("direct", "bruck", "ring", "node_aware", "native", "auto"),
}
SHARING = ("aggregate", "grouped", "node_aware")  # memory of a node, which calls in the background cannot
METHODS = {"alltoall": "Alltoall", "alltoallv": "Alltoallv", "alltoallw": "Alltoallw", "allgatherv": "Allgatherv"}


def end(numbers: list[int], random: Random, kind: Callable[..., MPI.Datatype], items: list[int]) -> list[Any]:
    """Blocks of so many ints, in elements of one datatype, apart from each other: buffer, counts, places, datatype."""
    number = numbers[RANK]
    datatype, counts = kind(random, number), [each // number for each in items]
    extent, displs, at = datatype.Get_extent()[1], [0] * len(items), 0
    for each in random.permutation(len(items)):
        low, high = bounds(datatype, counts[each])
        displs[each] = max(-((low - at) // extent), 0) if counts[each] else 0
        at = displs[each] * extent + high if counts[each] else at
    return [data(random, at + 1), counts, displs, datatype]


def equal_end(numbers: list[int], random: Random, kind: Callable[..., MPI.Datatype], items: list[int]) -> list[Any]:
    """The same with equal blocks one after the other."""
    datatype, count = kind(random, numbers[RANK]), items[0] // numbers[RANK]
    low, high = bounds(datatype, count * len(items))
    displ = max(-(low // datatype.Get_extent()[1]), 0)
    return [data(random, displ * datatype.Get_extent()[1] + max(high, 0) + 1), count, displ, datatype]


def typed_end(random: Random, kind: Callable[..., MPI.Datatype], items: list[int]) -> list[Any]:
    """The same with a datatype for each block."""
    counts = [int(random.choice([each for each in range(1, n + 1) if n % each == 0])) if n else 0 for n in items]
    types = [kind(random, n // max(count, 1)) for n, count in zip(items, counts, strict=True)]
    displs, nbytes = place(random, [bounds(each, count) for each, count in zip(types, counts, strict=True)])
    return [data(random, nbytes), counts, displs, types]


@contextmanager
def example(seed: int, collective: str, overlaps: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """Both ends of a call."""
    common, random = np.random.default_rng(seed), np.random.default_rng([seed, RANK])
    received = overlapping_type if overlaps else random_type
    table = common.integers(0, 3, (SIZE, SIZE)) * UNIT
    sent, due = table[RANK].tolist(), table[:, RANK].tolist()
    elements = common.choice(ELEMENTS, (2, SIZE)).tolist()  # ints of an element, on each rank
    if collective == "alltoall":
        same = [int(table[0, 0])] * SIZE
        ends = equal_end(elements[0], random, random_type, same), equal_end(elements[1], random, received, same)
    elif collective == "allgatherv":
        # Open MPI 5.0.11's own hangs where ranks have elements of other sizes: each chooses its algorithm by its own.
        elements = [[numbers[0]] * SIZE for numbers in elements]
        send = equal_end(elements[0], random, random_type, [int(table[RANK, 0])])
        ends = send, end(elements[1], random, received, table[:, 0].tolist())
    elif collective == "alltoallv":
        ends = end(elements[0], random, random_type, sent), end(elements[1], random, received, due)
    else:
        ends = typed_end(random, random_type, sent), typed_end(random, received, due)
    yield ends
    for *_, datatypes in ends:
        for each in datatypes if isinstance(datatypes, list) else [datatypes]:
            each.Free()


# Open MPI's own ends a lone rank with a segmentation fault where it sends blocks of some types to itself.
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_the_library_gives(on_layout: Callable[[str], MPI.Intracomm], part: int) -> None:
    comms = [hiercoll.Intracomm(on_layout(layout)) for layout in layouts()]
    for seed in range(part, EXAMPLES, PARTS):
        common = np.random.default_rng([seed, 1])
        collective = list(ALGORITHMS)[common.integers(len(ALGORITHMS))]
        comm, algorithm = comms[common.integers(len(comms))], str(common.choice(ALGORITHMS[collective]))
        private = "auto" if algorithm in SHARING else algorithm
        # MPI's own allgatherv may pass on what it has received: where that overlaps, nothing is due.
        overlaps = bool(common.random() < 0.2) and collective != "allgatherv"
        call, begin = getattr(hiercoll, collective), getattr(hiercoll, f"i{collective}")
        with example(seed, collective, overlaps) as (send, recv):
            due = recv[0].copy()
            due[:] = POISON
            getattr(WORLD, METHODS[collective])(send, [due, *recv[1:]])
            sent = send[0].copy()
            by_name, method = partial(call, comm, algorithm=algorithm), getattr(comm, METHODS[collective])
            in_background = partial(begin, comm, algorithm=private)
            for turn in (by_name, by_name, method, in_background):
                recv[0][:] = POISON
                under_way = turn(send, recv)
                if turn is in_background:
                    under_way.wait()
                words = f"example {seed}: {collective} by {algorithm}, overlapping: {overlaps}"
                np.testing.assert_array_equal(recv[0], due, err_msg=words)
                np.testing.assert_array_equal(send[0], sent, err_msg=words)
