"""Simulated runs: when messages move, what they wait for, and that nothing is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import TypeAlias

import pytest
from entries import each_entry

from hiercoll.algorithms import REGISTRY, Algorithm
from hiercoll.model.cost import Link, Links
from hiercoll.model.simulate import Event, Settings, count_rounds, simulate
from hiercoll.schedule import RECV, SEND, Builder, Recv, Schedule, Send, Signal, Wait
from hiercoll.tools.proving import generate
from hiercoll.topology import Topology, parse_layout

Fill: TypeAlias = "Callable[[Builder], object]"

# Near: 1 s latency, 10 bytes a second. Far: 100 s latency, 1 byte a second. Nothing else takes time.
LINKS = Links(Link(1.0, 0.1), Link(100.0, 1.0), overhead=0.0, gap=0.0, operation=0.0)
RENDEZVOUS = Settings(LINKS, eager=-1)
EAGER = Settings(LINKS, eager=1 << 30)


def system(*fills: Fill, segments: int = 1) -> list[Schedule]:
    """The schedules of ranks that do what the given functions say."""
    builders = [Builder(rank, segments) for rank in range(len(fills))]
    for b, fill in zip(builders, fills, strict=True):
        fill(b)
    return [b.build() for b in builders]


def times(events: list[Event]) -> dict[tuple[int, int], tuple[float, float]]:
    """Begin and end of each (rank, operation)."""
    return {(event.rank, event.op): (event.begin, event.end) for event in events}


def ends(schedules: list[Schedule], layout: str, block: int, settings: Settings) -> dict[tuple[int, int], float]:
    """When each (rank, operation) ends."""
    events = simulate(schedules, parse_layout(layout), block, settings)
    return {place: end for place, (_, end) in times(events).items()}


def sends(peer: int, region: int = 1) -> Fill:
    return lambda b: b.send(peer, SEND[0:region])


def receives(peer: int, region: int = 1) -> Fill:
    return lambda b: b.recv(peer, RECV[0:region])


def nothing(b: Builder) -> None:
    """A rank that does nothing."""


@pytest.mark.parametrize(("layout", "blocks", "seconds"), [("1x2", 1, 6.0), ("1x2", 3, 16.0), ("2x1", 1, 150.0)])
@pytest.mark.parametrize("settings", [RENDEZVOUS, EAGER])
def test_one_message(layout: str, blocks: int, seconds: float, settings: Settings) -> None:
    """Latency once, and bytes at the bandwidth of the link."""
    schedules = system(sends(1, blocks), receives(0, blocks))
    assert ends(schedules, layout, 50, settings)[1, 0] == pytest.approx(seconds)


def test_segments_have_their_own_sizes() -> None:
    """Ten bytes in three segments: 3, 3 and 4."""
    settings = Settings(Links(Link(0.0, 1.0), Link(0.0, 1.0), 0.0, 0.0, 0.0), eager=-1)
    for part, seconds in enumerate((3, 3, 4)):
        schedules = system(
            lambda b, part=part: b.send(1, SEND[0].segment(part)),
            lambda b, part=part: b.recv(0, RECV[0].segment(part)),
            segments=3,
        )
        assert ends(schedules, "1x2", 10, settings)[1, 0] == pytest.approx(seconds)


def late(b: Builder) -> None:
    """Receive only after something else, which takes 20 s."""
    copied = b.copy(SEND[0:2], RECV[0:2])
    b.recv(0, RECV[2], after=[copied])


def test_eager_and_rendezvous() -> None:
    """A small message leaves when its sender comes to it, a large one when both have."""
    links = Links(Link(1.0, 0.1), Link(1.0, 0.1), overhead=0.0, gap=0.2, operation=0.0)
    schedules = system(sends(1), late)
    small = times(simulate(schedules, parse_layout("1x2"), 50, Settings(links, eager=50)))
    large = times(simulate(schedules, parse_layout("1x2"), 50, Settings(links, eager=49)))
    assert small[0, 0] == pytest.approx((0, 5)) and small[1, 1] == pytest.approx((20, 20))
    assert large[0, 0] == pytest.approx((0, 26)) and large[1, 1] == pytest.approx((20, 26))


def test_an_early_receive_waits() -> None:
    """Eager or not, nothing arrives before it was sent."""
    links = Links(Link(1.0, 0.1), Link(1.0, 0.1), overhead=0.0, gap=0.2, operation=0.0)

    def late_send(b: Builder) -> None:
        b.send(1, SEND[0], after=[b.copy(SEND[0:2], RECV[0:2])])

    for eager in (-1, 1 << 20):
        found = times(simulate(system(late_send, receives(0)), parse_layout("1x2"), 50, Settings(links, eager)))
        assert found[0, 1][0] == pytest.approx(20) and found[1, 0] == pytest.approx((0, 26))


@pytest.mark.parametrize(
    ("layout", "arrivals"),
    [
        ("2x2", [200.0, 300.0]),  # 0 -> 2, 1 -> 3: out of one node, into one node
        ("4x1", [200.0, 200.0]),  # nothing in common
        ("0,0,1,2", [200.0, 300.0]),  # out of one node
        ("0,1,2,2", [200.0, 300.0]),  # into one node
        ("4", [11.0, 11.0]),  # within a node, each rank moves its own
        ("2x2:cyclic", [11.0, 11.0]),
    ],
)
@pytest.mark.parametrize("settings", [RENDEZVOUS, EAGER])
def test_two_messages_share_a_link(layout: str, arrivals: list[float], settings: Settings) -> None:
    """Of 100 bytes each, where the link of a node is the narrow place they queue."""
    schedules = system(sends(2), sends(3), receives(0), receives(1))
    found = ends(schedules, layout, 100, settings)
    assert sorted([found[2, 0], found[3, 0]]) == pytest.approx(arrivals)


@pytest.mark.parametrize("settings", [RENDEZVOUS, EAGER])
def test_links_are_duplex(settings: Settings) -> None:
    """Both directions at once, between nodes and within."""

    def both(b: Builder) -> None:
        b.send(1 - b.rank, SEND[0])
        b.recv(1 - b.rank, RECV[0])

    for layout, seconds in (("2x1", 200.0), ("1x2", 11.0)):
        assert max(ends(system(both, both), layout, 100, settings).values()) == pytest.approx(seconds)


def test_messages_of_one_rank_queue() -> None:
    """Within a node too, a rank's own bytes go one after another."""
    schedules = system(lambda b: (b.send(1, SEND[0]), b.send(2, SEND[0])), receives(0), receives(0))
    found = ends(schedules, "3", 100, EAGER)
    assert sorted([found[1, 0], found[2, 0]]) == pytest.approx([11.0, 21.0])
    into = system(lambda b: (b.recv(1, RECV[0]), b.recv(2, RECV[1])), sends(0), sends(0))
    found = ends(into, "3", 100, EAGER)
    assert sorted([found[0, 0], found[0, 1]]) == pytest.approx([11.0, 21.0])


def test_overhead_is_the_ranks() -> None:
    """A rank pays for each of its messages, one after another, before they leave."""
    links = Links(Link(0.0, 0.0), Link(0.0, 0.0), overhead=1.0, gap=0.0, operation=0.0)
    fan = [receives(0)] * 3
    schedules = system(lambda b: [b.send(peer, SEND[0]) for peer in (1, 2, 3)], *fan)
    found = ends(schedules, "4", 8, Settings(links, eager=-1))
    assert sorted(found[rank, 0] for rank in (1, 2, 3)) == pytest.approx([1, 2, 3])


def test_copies_and_reductions_take_their_bytes() -> None:
    """An operation's price, and a price per byte."""
    links = Links(Link(0.0, 0.0), Link(0.0, 0.0), overhead=0.0, gap=0.5, operation=3.0)

    def fill(b: Builder) -> None:
        with b.round():
            b.copy(SEND[0:2], RECV[0:2])
        b.reduce(SEND[0], SEND[1], b.scratch(1)[0])

    found = times(simulate(system(fill), parse_layout("1"), 8, Settings(links)))
    assert found[0, 0] == pytest.approx((0, 11)) and found[0, 2] == pytest.approx((11, 18))


def flags(previous: bool) -> list[Schedule]:
    """Rank 0 copies 20 bytes, then raises its flag; rank 1 waits for it, then copies 10."""

    def first(b: Builder) -> None:
        b.signal(0, after=[b.copy(SEND[0:2], RECV[0:2])])

    def second(b: Builder) -> None:
        b.copy(SEND[0], RECV[0], after=[b.wait([0], 0, previous=previous)])
        b.signal(0, after=[])

    return system(first, second)


def test_flags() -> None:
    """A wait ends after the flag is raised; one for the start before does not wait."""
    links = Links(Link(0.0, 0.0), Link(0.0, 0.0), overhead=0.0, gap=1.0, operation=0.5)
    found = times(simulate(flags(False), parse_layout("1x2"), 10, Settings(links)))
    assert found[0, 1] == pytest.approx((20.5, 21.0))
    assert found[1, 0] == pytest.approx((0, 21.5)) and found[1, 1] == pytest.approx((21.5, 32.0))
    found = times(simulate(flags(True), parse_layout("1x2"), 10, Settings(links)))
    assert found[1, 0] == pytest.approx((0, 0.5)) and found[1, 1] == pytest.approx((0.5, 11.0))


def test_a_flag_that_is_up_already() -> None:
    """A wait that comes later than all the flags takes only its own time; it waits for the last of several."""
    links = Links(Link(0.0, 0.0), Link(0.0, 0.0), overhead=0.0, gap=1.0, operation=0.5)

    def raising(blocks: int) -> Fill:
        return lambda b: b.signal(0, after=[b.copy(SEND[0:blocks], RECV[0:blocks])])

    def waiting(b: Builder) -> None:
        b.wait([0, 1], 0)
        b.wait([0, 1], 0, after=[b.copy(SEND[0:9], RECV[0:9])])

    found = times(simulate(system(raising(1), raising(4), waiting), parse_layout("1x3"), 10, Settings(links)))
    assert found[2, 0] == pytest.approx((0, 41.5))
    assert found[2, 2] == pytest.approx((90.5, 91.0))


def test_what_cannot_run_is_left_out() -> None:
    """Sends that cross need buffering: eager they run, large they never do."""

    def crossing(b: Builder) -> None:
        b.recv(1 - b.rank, RECV[0], after=[b.send(1 - b.rank, SEND[0])])

    schedules = system(crossing, crossing)
    assert len(simulate(schedules, parse_layout("1x2"), 8, EAGER)) == 4
    assert simulate(schedules, parse_layout("1x2"), 8, RENDEZVOUS) == []


def test_no_operations() -> None:
    """Nothing happens, in no rounds."""
    assert simulate(system(nothing, nothing), parse_layout("1x2"), 8) == []
    assert count_rounds(system(nothing, nothing), parse_layout("1x2")) == 0


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("layout", ["1x{}", "{}x1"])
def test_rounds_of_known_algorithms(p: int, layout: str) -> None:
    """As the literature states them, wherever the ranks are."""
    topology = parse_layout(layout.format(p))
    for collective, name, rounds in (
        ("allgather", "ring", p - 1),
        ("allgather", "bruck", ceil(log2(p))),
        ("alltoall", "bruck", ceil(log2(p))),
        ("alltoall", "pairwise", p - 1),
        ("allreduce", "ring", 2 * (p - 1)),
        ("bcast", "binomial", int(log2(p))),
    ):
        schedules = generate(collective, name, REGISTRY[collective][name].resolve({}), topology)
        assert count_rounds(schedules, topology) == rounds, name


def test_rounds_are_chains_of_messages() -> None:
    """Messages at the same time are one round, copies between them none; eager sends do not shorten chains."""

    def star(b: Builder) -> None:
        for peer in range(1, 4):
            b.recv(peer, RECV[peer])

    assert count_rounds(system(star, sends(0), sends(0), sends(0)), parse_layout("4")) == 1

    def middle(b: Builder) -> None:
        copied = b.copy(RECV[0], b.scratch(1)[0], after=[b.recv(0, RECV[0])])
        b.send(2, RECV[0], after=[copied])

    assert count_rounds(system(sends(1), middle, receives(1)), parse_layout("3")) == 2


def layouts(entry: Algorithm) -> list[Topology]:
    """Even, uneven and scattered layouts on which the algorithm runs."""
    found = [parse_layout(text) for text in ("2x3", "5+3:random=1", "4x2:cyclic", "1x1")]
    return [topology for topology in found if entry.refusal(topology, {}) is None]


@each_entry
@pytest.mark.parametrize("block", [0, 64, 1 << 16])
def test_everything_runs_when_it_may(entry: Algorithm, block: int) -> None:
    """Every operation once, after what it waits for; messages after their sends, waits after their flags."""
    assert layouts(entry)
    for topology in layouts(entry):
        schedules = generate(entry.collective, entry.name, entry.resolve({}), topology)
        events = simulate(schedules, topology, block)
        found = times(events)
        assert len(found) == len(events)
        assert set(found) == {(s.rank, index) for s in schedules for index in range(len(s.ops))}
        assert [event.end for event in events] == sorted(event.end for event in events)
        sent = {
            (s.rank, op.peer, op.tag): found[s.rank, index]
            for s in schedules
            for index, op in enumerate(s.ops)
            if isinstance(op, Send)
        }
        raised = {
            (s.rank, op.flag): found[s.rank, index][1]
            for s in schedules
            for index, op in enumerate(s.ops)
            if isinstance(op, Signal)
        }
        for s in schedules:
            for index, op in enumerate(s.ops):
                begin, end = found[s.rank, index]
                assert 0 <= begin <= end
                assert begin >= max((found[s.rank, dep][1] for dep in op.deps), default=0.0)
                if isinstance(op, Recv):
                    assert end > sent[op.peer, s.rank, op.tag][0]
                elif isinstance(op, Wait) and not op.previous:
                    assert end >= max(raised[peer, op.flag] for peer in op.peers)


def test_runs_are_repeatable() -> None:
    """The same schedules, the same events."""
    topology = parse_layout("5+3:cyclic")
    schedules = generate("alltoall", "hierarchical", {}, topology)
    assert simulate(schedules, topology, 4096) == simulate(schedules, topology, 4096)


def test_more_bytes_take_longer() -> None:
    """From a byte to a megabyte."""
    topology = parse_layout("2x4")
    schedules = generate("alltoall", "pairwise", {"exchange": "rotation"}, topology)
    last = [max(event.end for event in simulate(schedules, topology, 16**power)) for power in range(6)]
    assert last == sorted(set(last))
