"""What calls send, as far as it matters how long links between nodes need for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hiercoll.collectives import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    ALLTOALLV,
    ALLTOALLW,
    BARRIER,
    REDUCE_SCATTER,
    Collective,
)
from hiercoll.runtime.arguments import Arguments
from hiercoll.runtime.bound import Sample, neighbour, sent_by
from hiercoll.topology import parse_layout

COUNTS, DISPLACEMENTS = [1, 0, 4], [0, 1, 1]
NUMBERS, BYTES = np.arange(6.0), np.zeros(48, np.uint8)
PAIR = MPI.DOUBLE.Create_contiguous(2)
TYPES = [MPI.DOUBLE, PAIR, MPI.BYTE]
SENT: dict[str, tuple[Collective, Any, list[int]]] = {
    "equal blocks": (ALLTOALL, NUMBERS, [16, 16, 16]),
    "equal blocks with a datatype": (ALLTOALL, [NUMBERS, MPI.DOUBLE], [0, 0, 0]),
    "equal blocks without counts": (ALLTOALLV, NUMBERS, [16, 16, 16]),
    "counts": (ALLTOALLV, [NUMBERS, COUNTS], [8, 0, 32]),
    "counts of an array": (ALLTOALLV, [NUMBERS, np.array(COUNTS)], [8, 0, 32]),
    "counts and displacements": (ALLTOALLV, [NUMBERS, (COUNTS, DISPLACEMENTS)], [8, 0, 32]),
    "one after the other": (ALLTOALLV, (NUMBERS, COUNTS, DISPLACEMENTS), [8, 0, 32]),
    "elements of a datatype": (ALLTOALLV, [NUMBERS, COUNTS, DISPLACEMENTS, PAIR], [16, 0, 64]),
    "counts, and elements of a datatype": (ALLTOALLV, [BYTES, (COUNTS, DISPLACEMENTS), MPI.DOUBLE], [8, 0, 32]),
    "datatypes": (ALLTOALLW, [NUMBERS, TYPES], [8, 16, 1]),
    "datatypes and counts": (ALLTOALLW, [NUMBERS, COUNTS, DISPLACEMENTS, TYPES], [8, 0, 4]),
    "datatypes and both": (ALLTOALLW, [NUMBERS, (COUNTS, DISPLACEMENTS), TYPES], [8, 0, 4]),
    "to all": (ALLGATHER, NUMBERS, [0, 0, 0]),
    "a sum": (ALLREDUCE, NUMBERS, [0, 0, 0]),
    "a sum of blocks": (REDUCE_SCATTER, NUMBERS, [0, 0, 0]),
    "nothing": (BARRIER, None, [0, 0, 0]),
}
LEFT = {
    "nothing": (ALLTOALLV, None),
    "bytes alone": (ALLTOALLV, bytes(8)),
    "no counts": (ALLTOALLV, [NUMBERS]),
    "too few counts": (ALLTOALLV, [NUMBERS, [1, 2]]),
    "words": (ALLTOALLV, [NUMBERS, "counts"]),
    "a name of a type": (ALLTOALLV, [b"", COUNTS, "d"]),
    "numbers as datatypes": (ALLTOALLW, [NUMBERS, [1, 2, 3]]),
    "too few datatypes": (ALLTOALLW, [NUMBERS, TYPES[:2]]),
}


@pytest.mark.parametrize("how", SENT)
def test_bytes_to_each_rank(how: str) -> None:
    """However they are spelled; in place, of the receive buffer."""
    collective, spec, want = SENT[how]
    for given in (Arguments(spec, None), Arguments(MPI.IN_PLACE, spec)):
        assert sent_by(collective, given, 3).tolist() == want


@pytest.mark.parametrize("how", LEFT)
def test_what_cannot_be_told_counts_as_nothing(how: str) -> None:
    """The MPI library will say what is wrong, if it is."""
    collective, spec = LEFT[how]
    sample = Sample(3, 3)
    sample.add(collective, Arguments(spec, None))
    sample.add(ALLTOALL, Arguments(NUMBERS, None))
    sample.add(None, None)
    assert sample.calls == 3 and sample.sent.tolist() == [16, 16, 16]


@pytest.mark.parametrize("layout", ["2x1", "2x4", "4x2:cyclic", "3+1", "1+4+2:random=3"])
def test_all_ranks_send_to_the_next_node(layout: str) -> None:
    """Each to one rank, that of its lane where there is one, and nobody to its own node."""
    topology = parse_layout(layout)
    nodes = len(topology.nodes)
    for rank in range(topology.size):
        other = neighbour(topology, rank)
        assert topology.node_of[other] == (topology.node_of[rank] + 1) % nodes
        lanes = len(topology.node(other))
        assert topology.lane_of[other] == topology.lane_of[rank] % lanes
