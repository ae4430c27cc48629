"""Counting messages, blocks and chains, and predicting times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.algorithms import REGISTRY
from hiercoll.model.cost import ALONE, DEFAULT_LINKS, Link, Links, RankCounts, count_rank, predict
from hiercoll.schedule import RECV, SEND, Builder, in_order
from hiercoll.tools.proving import generate
from hiercoll.topology import parse_layout

PAIRS = parse_layout("2x2")  # ranks 0 and 1 on one node, 2 and 3 on the other
NO_LINKS = Links(Link(0.0, 0.0), Link(0.0, 0.0), overhead=0.0, gap=0.0, operation=0.0, dispatch=0.0)


def test_counts_by_link_class() -> None:
    """A hand-made schedule with every kind of operation, counted by hand."""
    b = Builder(0)
    piece, board = b.scratch(5), b.shared(7)
    b.send(1, SEND[0:2])
    b.send(2, SEND[0:3])
    b.send(3, SEND[[3, 1]], tag=1)
    b.recv(1, RECV[1])
    b.recv(3, piece[0:4])
    b.copy(SEND[0:4], board[0:4])
    b.reduce(piece[0], piece[1], piece[4])
    b.signal(0)
    b.wait([1], 0)
    b.wait([1], 1, previous=True)
    b.join([0])
    assert count_rank(b.build(), PAIRS) == RankCounts(
        messages=3,
        blocks=7,
        network_messages=2,
        network_blocks=5,
        received=2,
        received_blocks=5,
        network_received_blocks=4,
        copies=2,
        copied_blocks=5,
        synchronisations=3,
        dispatched=11,
        chain=1,
        network_chain=1,
        scratch=5,
        shared=7,
    )


def test_what_completions_drive() -> None:
    """Operations with neither rounds nor an order between them cost a dispatch each; those of algorithms that are put
    in order do not."""
    b = Builder(0)
    first = b.recv(1, RECV[1])
    b.recv(2, RECV[2])
    b.send(3, RECV[1], after=[first])
    free = b.build()
    assert count_rank(free, PAIRS).dispatched == 3 and count_rank(in_order(free), PAIRS).dispatched == 0
    ordered = generate("allreduce", "ring", {}, PAIRS)[0]
    assert ordered.rounds is None and count_rank(ordered, PAIRS).dispatched == 0


def test_the_class_of_a_link_is_the_layouts() -> None:
    """The same messages, on one node, on two, and dealt out."""
    b = Builder(0)
    for peer in (1, 2, 3):
        b.send(peer, SEND[peer], tag=peer)
    schedule = b.build()
    far = {layout: count_rank(schedule, parse_layout(layout)).network_messages for layout in ("4", "2x2", "4x1")}
    assert far == {"4": 0, "2x2": 2, "4x1": 3}
    b.send(2, SEND[0:5])
    plain, dealt = (count_rank(b.build(), parse_layout(layout)) for layout in ("2x2", "2x2:cyclic"))
    assert (plain.network_blocks, dealt.network_blocks) == (7, 2)


def test_nothing_costs_nothing() -> None:
    """A schedule without operations."""
    assert count_rank(Builder(0).build(), PAIRS) == RankCounts()
    assert predict([RankCounts()], 1 << 20) == 0.0


def test_segments_are_fractions_of_blocks() -> None:
    """Three segments that travel alone are three messages and one block."""
    b = Builder(0, segments=3)
    for part in range(3):
        b.send(2, SEND[1].segment(part), tag=part)
        b.recv(3, RECV[2:4].segment(part), tag=part)
    counts = count_rank(b.build(), PAIRS)
    assert (counts.messages, counts.received) == (3, 3)
    assert counts.blocks == counts.network_blocks == pytest.approx(1)
    assert counts.received_blocks == counts.network_received_blocks == pytest.approx(2)


def test_copied_segments_are_fractions_of_blocks() -> None:
    """Three segments that are copied alone are one block."""
    b = Builder(0, segments=3)
    for part in range(3):
        b.copy(SEND[1].segment(part), RECV[1].segment(part))
    assert count_rank(b.build(), PAIRS).copied_blocks == pytest.approx(1)


def test_chains() -> None:
    """Messages that wait for each other add up, others do not; far ones are counted on their own."""
    b = Builder(0)
    first = b.recv(1, RECV[1])
    copied = b.copy(RECV[1], b.scratch(1)[0], after=[first])
    second = b.send(2, RECV[1], after=[b.join([copied])])
    b.send(3, SEND[3], after=[])
    assert (count_rank(b.build(), PAIRS).chain, count_rank(b.build(), PAIRS).network_chain) == (2, 1)
    b.send(1, SEND[1], tag=1, after=[second])
    assert (count_rank(b.build(), PAIRS).chain, count_rank(b.build(), PAIRS).network_chain) == (3, 1)


def test_chains_of_rounds() -> None:
    """A ring of p-1 rounds is a chain of p-1 messages."""
    topology = parse_layout("2x3")
    counts = [count_rank(s, topology) for s in generate("allgather", "ring", {"segments": 1}, topology)]
    assert {count.chain for count in counts} == {5}


COUNTS = RankCounts(
    messages=4,
    blocks=10,
    network_messages=1,
    network_blocks=3,
    received=5,
    received_blocks=11,
    network_received_blocks=2,
    copies=6,
    copied_blocks=7,
    synchronisations=8,
    dispatched=13,
    chain=9,
    network_chain=2,
)


@pytest.mark.parametrize(
    ("links", "seconds"),
    [
        (NO_LINKS._replace(node=Link(1.0, 0.0)), 7.0),  # nine in the chain, two of them far
        (NO_LINKS._replace(network=Link(1.0, 0.0)), 2.0),
        (NO_LINKS._replace(node=Link(0.0, 1.0)), 900.0),  # blocks received within the node
        (NO_LINKS._replace(network=Link(0.0, 1.0)), 300.0 * (1 + ALONE)),  # blocks sent out of it, by one rank
        (NO_LINKS._replace(node=Link(0.0, 1.0), network=Link(0.0, 1.0)), 900.0),  # both at once
        (NO_LINKS._replace(overhead=1.0), 9.0),
        (NO_LINKS._replace(operation=1.0), 14.0),
        (NO_LINKS._replace(dispatch=1.0), 13.0),
        (NO_LINKS._replace(gap=1.0), 700.0),
        (NO_LINKS, 0.0),
    ],
)
def test_prediction_of_one_rank(links: Links, seconds: float) -> None:
    """Each parameter of the model, alone, with blocks of 100 bytes."""
    assert predict([COUNTS], 100, links) == pytest.approx(seconds)


def test_ranks_share_the_network_but_not_the_node() -> None:
    """What leaves a node adds up, and is there sooner the more ranks share it; within it, the busiest rank decides."""
    three = [COUNTS, COUNTS, COUNTS._replace(received_blocks=21)]
    assert predict(three, 100, NO_LINKS._replace(network=Link(0.0, 1.0))) == pytest.approx(900.0 + 300.0 * ALONE)
    assert predict(three, 100, NO_LINKS._replace(node=Link(0.0, 1.0))) == pytest.approx(1900.0)
    assert predict(three, 100, NO_LINKS._replace(overhead=1.0)) == pytest.approx(9.0)
    alone, idle = RankCounts(network_blocks=9), RankCounts()
    slow = NO_LINKS._replace(network=Link(0.0, 1.0))
    assert predict([RankCounts(network_blocks=3)] * 3, 100, slow) < predict([alone, idle, idle], 100, slow)
    incoming = [COUNTS._replace(network_received_blocks=8)] * 2
    assert predict(incoming, 100, NO_LINKS._replace(network=Link(0.0, 1.0))) == pytest.approx(1600.0 + 800.0 * ALONE)


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 1 << 24), st.integers(1, 1 << 20))
def test_more_bytes_take_longer(block: int, more: int) -> None:
    """The prediction grows with the size of the blocks."""
    assert predict([COUNTS], block + more) > predict([COUNTS], block) > 0


@pytest.mark.parametrize("collective", ["alltoall", "allgather"])
def test_every_prediction_grows_with_size(collective: str) -> None:
    """Of every algorithm, for every rank."""
    topology = parse_layout("2x4")
    for name, entry in REGISTRY[collective].items():
        counts = [count_rank(s, topology) for s in generate(collective, name, entry.resolve({}), topology)]
        times = [predict(counts, 8**power) for power in range(9)]
        assert times == sorted(set(times)) and times[0] > 0, name


def test_messages_are_conserved() -> None:
    """Whatever is sent is received, in number and in blocks, of each link class."""
    topology = parse_layout("5+3:cyclic")
    for collective, entries in REGISTRY.items():
        for name, entry in entries.items():
            if entry.refusal(topology, {}) is not None:
                continue
            counts = [count_rank(s, topology) for s in generate(collective, name, entry.resolve({}), topology)]
            for sent, received in (
                ("messages", "received"),
                ("blocks", "received_blocks"),
                ("network_blocks", "network_received_blocks"),
            ):
                out, into = (sum(getattr(c, field) for c in counts) for field in (sent, received))
                assert out == pytest.approx(into) and out > 0, (name, sent)


def test_a_vector_is_cut_into_blocks() -> None:
    """Of a vector, a block is as many bytes less as it has blocks; of a whole one, all."""
    b = Builder(0, blocks=4)
    b.recv(2, RECV[0:3])
    counts = count_rank(b.build(), PAIRS)
    assert counts.pieces == 4 and counts.nbytes(counts.received_blocks, 100) == 75
    assert predict([counts], 100, NO_LINKS._replace(network=Link(0.0, 1.0))) == pytest.approx(75.0 * (1 + ALONE))
    assert predict([COUNTS._replace(pieces=2)], 100, NO_LINKS._replace(gap=1.0)) == pytest.approx(350.0)


def test_defaults_make_sense() -> None:
    """Memory is nearer than the network, and nothing is free."""
    assert 0 < DEFAULT_LINKS.node.alpha < DEFAULT_LINKS.network.alpha
    assert all(v > 0 for v in (DEFAULT_LINKS.node.beta, DEFAULT_LINKS.network.beta, DEFAULT_LINKS.gap))
    assert DEFAULT_LINKS.overhead > 0 and DEFAULT_LINKS.operation > 0


def test_ranks_that_share_cores() -> None:
    """What a node's ranks do adds up; what they wait for does not."""
    links = NO_LINKS._replace(node=Link(7.0, 0.0), overhead=1.0)
    leader, other = RankCounts(messages=5, received=3, chain=1), RankCounts(received=2)
    counts = [leader, other, other, other]
    assert predict(counts, 8, links) == predict(counts, 8, links._replace(cores=1.0)) == 7 + 8
    assert predict(counts, 8, links._replace(cores=0.5)) == 7 + 8  # 14 seconds of work for two cores
    assert predict(counts, 8, links._replace(cores=0.25)) == 7 + 14
    far = [leader._replace(network_blocks=2, network_received_blocks=1), other, other, other]
    assert predict(far, 8, links._replace(gap=0.5, cores=0.25)) == 7 + 14 + 0.5 * 24
