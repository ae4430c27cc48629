"""What measured calls work on: data and sizes by the record, and what must pass the links."""

from __future__ import annotations

import numpy as np
import pytest

from hiercoll.collectives import COLLECTIVES, get_collective
from hiercoll.tools.workload import POISON, Workload, block_sizes, buffers, tokens
from hiercoll.topology import Topology, parse_layout

LAYOUTS = ("1x1", "1x4", "4x1", "2x4", "2x4:cyclic", "3+1", "1+4+2:random=3")
SIZES = (0, 1, 24, 1000)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def workload(collective: str, size: int, ranks: int, root: int = 0) -> Workload:
    return Workload(get_collective(collective), size, ranks, root)


def test_equal_blocks() -> None:
    sent, due = buffers("alltoall", 24, 1, 3)
    assert np.array_equal(sent, np.concatenate([tokens(1, peer, 24) for peer in range(3)]))
    assert np.array_equal(due, np.concatenate([tokens(peer, 1, 24) for peer in range(3)]))
    sent, due = buffers("allgather", 24, 1, 3)
    assert np.array_equal(sent, tokens(1, 0, 24))
    assert np.array_equal(due, np.concatenate([tokens(peer, 0, 24) for peer in range(3)]))


def test_sizes_of_pairs() -> None:
    """What a rank passes fits what the others pass, and the mean is about the size."""
    works = [workload("alltoallv", 1000, 8).arguments(rank, None, None)[0] for rank in range(8)]
    sent, received = (np.array([each[end][1] for each in works]) for end in (0, 1))
    assert np.array_equal(sent, received.T) and 800 < sent.mean() < 1200 and sent.min() < 300 < 1700 < sent.max()
    assert np.array_equal(workload("alltoallv", 1000, 8).sent(), sent.ravel())
    own, due = buffers("alltoallv", 1000, 3, 8)
    assert own.size == sent[3].sum() and due.size == sent[:, 3].sum()


def test_sizes_that_all_know() -> None:
    """One for each rank; counts are the same on all ranks."""
    every = [workload("allgatherv", 100, 5).arguments(rank, "send", "recv") for rank in range(5)]
    for rank, ((send, (recv, counts)), options) in enumerate(every):
        assert (send, recv, options) == ("send", "recv", {}) and np.array_equal(counts, every[0][0][1][1])
        assert buffers("allgatherv", 100, rank, 5)[0].size == counts[rank]
        assert buffers("allgatherv", 100, rank, 5)[1].size == counts.sum()


def test_one_buffer_with_a_root() -> None:
    """The root's vector; on the others something else."""
    root, other = (workload("bcast", 24, 4, root=2).before(rank) for rank in (2, 1))
    assert np.array_equal(workload("bcast", 24, 4, root=2).due(1), tokens(2, 0, 24))
    assert np.array_equal(root, tokens(2, 0, 24))
    assert other.size == (24 if COLLECTIVES["bcast"].one_buffer else 0) and (other == POISON).all()
    buffers, options = workload("bcast", 24, 4, root=2).arguments(2, "send", "recv")
    assert buffers == (["recv"] if COLLECTIVES["bcast"].one_buffer else ["send", "recv"]) and options == {"root": 2}


def test_roots() -> None:
    """What is not a rank's to send, or to receive, is empty."""
    gather, scatter = workload("gather", 24, 3, root=1), workload("scatter", 24, 3, root=1)
    assert [gather.due(rank).size for rank in range(3)] == [0, 72, 0] == [scatter.before(r).size for r in range(3)]
    assert np.array_equal(scatter.due(2), tokens(1, 2, 24)) and np.array_equal(gather.before(2), tokens(2, 0, 24))


def test_reductions() -> None:
    """Exact sums, of single precision or of bytes: a contribution that is left out, or counts twice, shows."""
    for size, dtype, most in ((24, "f4", (1 << 24) // 3), (23, "u1", 85)):
        load = workload("allreduce", size, 3)
        words = [tokens(rank, 0, size).view("u4" if dtype == "f4" else "u1") % most for rank in range(3)]
        assert load.elements == dtype and np.array_equal(load.before(2).view(dtype), words[2])
        assert np.array_equal(load.due(1).view(dtype), np.sum(words, axis=0, dtype=np.int64))
    words = [tokens(rank, 1, 24).view("u4") % (1 << 23) for rank in range(2)]
    assert np.array_equal(workload("reduce_scatter", 24, 2).due(1).view("f4"), words[0] + words[1])


def test_no_buffers() -> None:
    """Nothing is passed to a barrier, and nothing passes the links."""
    load = workload("barrier", 0, 4)
    assert load.arguments(2, load.before(2), load.due(2)) == ([], {})
    assert load.busiest(parse_layout("2x2")) == 0


def closed_form(collective: str, topology: Topology, size: int) -> int:
    """Bytes on the busiest link."""
    p, nodes = topology.size, topology.node_sizes
    others = [m if len(nodes) > 1 else 0 for m in nodes]
    if collective == "alltoall":
        return size * max(m * (p - m) for m in nodes)
    if collective == "allgather":
        return size * max(max(p - m, some) for m, some in zip(nodes, others, strict=True))
    if collective in ("alltoallv", "alltoallw"):
        sizes, node_of = block_sizes(get_collective(collective), size, p), np.array(topology.node_of)
        across = sizes * (node_of[:, None] != node_of)
        return int(max(np.bincount(node_of, across.sum(axis=axis)).max() for axis in (0, 1)))
    if collective in ("gather", "scatter"):
        return size * (p - nodes[topology.node_of[0]])
    if collective in ("gatherv", "scatterv", "reduce_scatterv"):
        table, node_of = block_sizes(get_collective(collective), size, p), np.array(topology.node_of)
        each = table[:, 0] if collective == "gatherv" else table[0]
        held = np.bincount(node_of, each)
        if len(nodes) == 1:
            return 0
        if collective == "reduce_scatterv":
            return int(max(held.max(), each.sum() - held.min()))
        return int(each.sum() - held[node_of[0]])
    if collective == "reduce_scatter":  # each node's part of what is due elsewhere
        return size * max(max(p - m, some) for m, some in zip(nodes, others, strict=True)) * (len(nodes) > 1)
    if collective == "allreduce":  # the mean of nodes: partial results come together, and the result goes to all
        return -(-2 * (len(nodes) - 1) * size // len(nodes))
    return size * (len(nodes) > 1)  # a vector


@each_layout
@pytest.mark.parametrize("collective", sorted(set(COLLECTIVES) - {"allgatherv", "barrier"}))
def test_busiest_link(collective: str, layout: str) -> None:
    topology = parse_layout(layout)
    for size in SIZES:
        assert workload(collective, size, topology.size).busiest(topology) == closed_form(collective, topology, size)


@each_layout
def test_busiest_link_of_blocks_that_differ(layout: str) -> None:
    topology = parse_layout(layout)
    sizes, node_of = workload("allgatherv", 100, topology.size).sent(), np.array(topology.node_of)
    held = np.bincount(node_of, sizes)
    expected = max(held.max(), (sizes.sum() - held).max()) if len(held) > 1 else 0
    assert workload("allgatherv", 100, topology.size).busiest(topology) == expected


@pytest.mark.parametrize("layout", ["64x16", "1024x1"])
def test_busiest_link_of_many_ranks(layout: str) -> None:
    topology = parse_layout(layout)
    assert workload("alltoall", 8, 1024).busiest(topology) == closed_form("alltoall", topology, 8)
