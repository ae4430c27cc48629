"""Layouts, nodes, lanes, groups and placements."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.errors import ArgumentError, LayoutError
from hiercoll.topology import Topology, _virtual, cores_of_each, parse_layout

LAYOUT_PARTS = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sampled_from(["", ":block", ":cyclic"])
)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("2x3", (0, 0, 0, 1, 1, 1)),
        (" 2x3 ", (0, 0, 0, 1, 1, 1)),
        ("2x3:block", (0, 0, 0, 1, 1, 1)),
        ("2x3:cyclic", (0, 1, 0, 1, 0, 1)),
        ("3x1", (0, 1, 2)),
        ("1x3:cyclic", (0, 0, 0)),
        ("4", (0, 0, 0, 0)),
        ("3+5", (0, 0, 0, 1, 1, 1, 1, 1)),
        ("1+3:cyclic", (0, 1, 1, 1)),
        ("1+4+2:cyclic", (0, 1, 2, 1, 2, 1, 1)),
        ("0,0,1,1", (0, 0, 1, 1)),
        ("0,1,1,0", (0, 1, 1, 0)),
        ("7,7,3", (0, 0, 1)),
        ("1,0", (0, 1)),
    ],
)
def test_layouts(text: str, nodes: tuple[int, ...]) -> None:
    """Each form gives the node of each rank."""
    topology = parse_layout(text)
    assert topology.node_of == nodes and topology.size == len(nodes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "2x",
        "x4",
        "2x0",
        "0x2",
        "0",
        "3+0",
        "3+",
        "+3",
        "2x4x2",
        "2*4",
        "-2x4",
        "2.5x4",
        "2x4:diagonal",
        "2x4:Cyclic",
        "2x4:random=",
        "2x4:random=x",
        "2x4:random=-1",
        "2x4:cyclic=1",
        "0,0,1:cyclic",
        "0,,1",
        "0,1,",
        "0,-1",
        "a,b",
        "4x9999999",
        "99999999999999999999",
        "2x4\n:block",
    ],
)
def test_malformed_layouts(text: str) -> None:
    """The error says what a layout looks like and what was given."""
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    error = caught.value
    assert error.argument == "layout" and "2x4" in error.expected and error.got == repr(text)
    assert error.rank is None and "expected" in str(error) and repr(text) in str(error)
    assert isinstance(error, ArgumentError) and isinstance(error, ValueError)


def test_random_placement() -> None:
    """Same seed, same placement; node sizes are those asked for; other seeds differ."""
    one = parse_layout("3+5+8:random=1")
    assert parse_layout("3+5+8:random=1") == one
    assert sorted(one.node_sizes) == [3, 5, 8]
    assert parse_layout("3+5+8:random") == parse_layout("3+5+8:random=0")
    assert len({parse_layout(f"3+5+8:random={seed}") for seed in range(8)}) == 8
    assert one.placement == "irregular"


def test_random_placement_leaves_random_alone() -> None:
    """A program's own random numbers do not depend on layouts, nor layouts on them."""
    random.seed(5)
    first = parse_layout("4x4:random=3")
    drawn = random.random()
    random.seed(5)
    assert random.random() == drawn
    assert parse_layout("4x4:random=3") == first


def test_nodes_and_lanes() -> None:
    """Nodes come in the order of their lowest rank, lanes in the order of ranks."""
    topology = Topology((9, 4, 9, 4, 4, 2))
    assert topology.node_of == (0, 1, 0, 1, 1, 2)
    assert topology.nodes == ((0, 2), (1, 3, 4), (5,))
    assert topology.lane_of == (0, 0, 1, 1, 2, 0)
    assert topology.node_sizes == (2, 3, 1)
    assert [topology.node(rank) for rank in (3, 5)] == [(1, 3, 4), (5,)]
    assert topology.size == 6 and not topology.is_even


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12))
def test_nodes_and_lanes_of_anything(nodes: list[int]) -> None:
    """Every rank is where its node and its lane say; who shares a node still does."""
    topology = Topology(tuple(nodes))
    assert sorted(rank for ranks in topology.nodes for rank in ranks) == list(range(len(nodes)))
    for rank in range(topology.size):
        node_ranks = topology.nodes[topology.node_of[rank]]
        assert node_ranks == topology.node(rank) == tuple(sorted(node_ranks))
        assert node_ranks[topology.lane_of[rank]] == rank
        assert {r for r in range(topology.size) if nodes[r] == nodes[rank]} == set(node_ranks)
    assert [ranks[0] for ranks in topology.nodes] == sorted(ranks[0] for ranks in topology.nodes)
    assert topology.is_even == (len(set(map(len, topology.nodes))) == 1)


def test_equality() -> None:
    """Numbers of nodes do not matter, who is with whom does."""
    one, other = Topology((5, 5, 1, 1)), Topology((0, 0, 7, 7))
    assert one == other == parse_layout("2x2") and hash(one) == hash(other)
    assert one != parse_layout("2x2:cyclic") and one != parse_layout("4")
    assert len({one, other, parse_layout("2x2:cyclic")}) == 2


def test_no_ranks() -> None:
    """A topology has at least one rank."""
    with pytest.raises(LayoutError, match="at least one rank"):
        Topology(())


@pytest.mark.parametrize(
    ("layout", "node", "count", "groups"),
    [
        ("1x4", 0, 1, ((0, 1, 2, 3),)),
        ("1x4", 0, 2, ((0, 1), (2, 3))),
        ("1x4", 0, 4, ((0,), (1,), (2,), (3,))),
        ("1x3", 0, 5, ((0,), (1,), (2,))),
        ("2x2:cyclic", 1, 2, ((1,), (3,))),
        ("3+2", 1, 1, ((3, 4),)),
    ],
)
def test_groups(layout: str, node: int, count: int, groups: tuple[tuple[int, ...], ...]) -> None:
    """Contiguous lanes; never more groups than lanes."""
    assert parse_layout(layout).groups(node, count) == groups


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 25))
def test_groups_are_nearly_equal(lanes: int, count: int) -> None:
    """All lanes, in order, in groups of sizes that differ by one at most."""
    groups = parse_layout(f"2x{lanes}:cyclic").groups(1, count)
    assert [rank for group in groups for rank in group] == [1 + 2 * lane for lane in range(lanes)]
    sizes = [len(group) for group in groups]
    assert len(groups) == min(lanes, count) and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("text", "placement", "spelled"),
    [
        ("2x3", "block", "2x3"),
        ("2x3:cyclic", "cyclic", "2x3:cyclic"),
        ("3+5", "block", "3+5"),
        ("1+4+2:cyclic", "cyclic", "1+4+2:cyclic"),
        ("1x5:cyclic", "block", "1x5"),
        ("5x1:cyclic", "block", "5x1"),
        ("0,1,1,0", "irregular", "2x2:irregular"),
        ("0,1,1,0,0", "irregular", "3+2:irregular"),
    ],
)
def test_placement_and_words(text: str, placement: str, spelled: str) -> None:
    """Block, cyclic or neither."""
    topology = parse_layout(text)
    assert topology.placement == placement and str(topology) == spelled


@settings(deadline=None, derandomize=True)
@given(LAYOUT_PARTS)
def test_written_layouts_read_back(parts: tuple[list[int], str]) -> None:
    """The words for a block or cyclic topology describe it."""
    sizes, placement = parts
    topology = parse_layout("+".join(map(str, sizes)) + placement)
    again = parse_layout(str(topology))
    assert again == topology and hash(again) == hash(topology) and str(again) == str(topology)


# Virtual nodes


def test_virtual_nodes() -> None:
    """Ranks of a communicator are on the nodes that their ranks of the world are on."""
    hosts = [0, 0, 0, 0]
    assert _virtual("2x2", hosts, [0, 1, 2, 3], 4, 0) == parse_layout("2x2")
    assert _virtual("2x2", hosts, [3, 0, 2, 1], 4, 0) == Topology((1, 0, 1, 0))
    assert _virtual("2x3:cyclic", [0, 0], [1, 3], 6, 0) == Topology((0, 0))
    assert _virtual("2x2", [0, 0, 2, 2], [0, 1, 2, 3], 4, 0) == parse_layout("2x2")
    assert _virtual("4x1", [0, 0, 2, 2], [0, 1, 2, 3], 4, 0) == parse_layout("4x1")


@pytest.mark.parametrize(
    ("text", "hosts", "ranks", "world", "expected", "got"),
    [
        ("2 by 2", [0] * 4, [0, 1, 2, 3], 4, "NODESxLANES", "'2 by 2'"),
        ("2x3", [0] * 4, [0, 1, 2, 3], 4, "the 4 ranks", "'2x3', which describes 6"),
        ("2x2", [0, 0], [0, -1], 4, "only ranks of MPI_COMM_WORLD", "outside"),
        ("2x2", [0, 0], [0, 4], 4, "only ranks of MPI_COMM_WORLD", "outside"),
        ("2x2", [0, 1, 1, 1], [0, 1, 2, 3], 4, "within one host", "node 0 spans hosts"),
        ("2x2", [0, 0, 0, 3], [0, 1, 2, 3], 4, "within one host", "node 1 spans hosts"),
    ],
)
def test_virtual_nodes_that_do_not_fit(
    text: str, hosts: list[int], ranks: list[int], world: int, expected: str, got: str
) -> None:
    """The error names the variable, the rank, what was expected and what was found."""
    with pytest.raises(LayoutError) as caught:
        _virtual(text, hosts, ranks, world, 3)
    error = caught.value
    assert (error.argument, error.rank) == ("HIERCOLL_NODES", 3)
    assert expected in error.expected and got in str(error.got)
    assert re.match(r"rank 3: HIERCOLL_NODES: expected .*, got ", str(error))


@pytest.mark.parametrize(
    ("names", "numbers", "cores"),
    [
        ((1, 1, 1, 1), (4, 4, 4, 4), 1.0),  # two hosts of four cores, two ranks on each
        ((1, 1, 1, 1), (1, 1, 1, 1), 0.5),
        ((1, 2, 1, 2), (1, 1, 1, 1), 1.0),  # each bound to a core of its own
        ((1, 2, 3, 3), (1, 1, 1, 1), 0.5),  # those of the second host to the same
        ((1, 1, 2, 2), (1, 1, 0, 2), 1.0),  # one of them does not know
    ],
)
def test_cores_of_each(names: tuple[int, ...], numbers: tuple[int, ...], cores: float) -> None:
    """Of the host where there are the fewest to a rank."""
    assert cores_of_each((7, 7, 8, 8), names, numbers) == cores
