"""Flows that share ranks and adapters: against values worked out by hand, and bounds that no run may beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

import numpy as np
import pytest
from entries import each_entry, small_systems
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.algorithms import REGISTRY, Algorithm
from hiercoll.errors import ArgumentError, ScheduleError
from hiercoll.model.durations import Durations
from hiercoll.model.evaluate import Design
from hiercoll.model.fairness import fair_rates
from hiercoll.model.fluid import end_seconds, flow_seconds, levels
from hiercoll.model.machine import Machine, Parameters, level
from hiercoll.model.profile import profile
from hiercoll.schedule import RECV, SEND, AcceptOffer, Builder, Get, Notify, Offer, Schedule, Send
from hiercoll.schedule.transports import Transport
from hiercoll.tools.proving import generate
from hiercoll.topology import Topology, parse_layout

Fill: TypeAlias = "Callable[[Builder], object]"

# Steps of 1, 2, 3 and 100 s; 0.1 s a byte in a domain, 0.2 elsewhere in the node, 1 between nodes. All else is free.
SLOW = Parameters(
    domain=1.0, socket=2.0, node=3.0, network=100.0, domain_byte=0.1, node_byte=0.2, network_byte=1.0, rendezvous=10.0,
    eager=1e9, network_rendezvous=20.0, network_eager=1e9, posted=0.0, adapter=1.0, adapter_message=0.0, piece=0.0,
    line=0.0, copy_byte=0.5, flag=0.0,
)  # fmt: skip


def machine(domain: int = 0, socket: int = 0, **changed: float) -> Machine:
    """A slow one, on which seconds are easily worked out."""
    return Machine("slow", replace(SLOW, **changed), domain, socket)


def system(*fills: Fill, segments: int = 1) -> list[Schedule]:
    """The schedules of ranks that do what the given functions say."""
    builders = [Builder(rank, segments) for rank in range(len(fills))]
    for b, fill in zip(builders, fills, strict=True):
        fill(b)
    return [b.build() for b in builders]


def ends(schedules: Sequence[Schedule], layout: str, block: int, on: Machine) -> list[float]:
    return end_seconds(schedules, parse_layout(layout), block, on)


def sends(*peers: int, blocks: int = 1) -> Fill:
    """All at once."""
    return lambda b: [b.send(peer, SEND[0:blocks]) for peer in peers]


def receives(*peers: int, blocks: int = 1) -> Fill:
    return lambda b: [b.recv(peer, RECV[0:blocks]) for peer in peers]


def nothing(b: Builder) -> None:
    """A rank that does nothing."""


@pytest.mark.parametrize(
    ("target", "seconds"), [(1, 1 + 50 * 0.1), (2, 2 + 50 * 0.2), (4, 3 + 50 * 0.2), (8, 100 + 50.0)]
)
def test_one_message(target: int, seconds: float) -> None:
    """A step and bytes, as the distance of the ranks says: two ranks a domain, four a socket, eight a node."""
    schedules = system(sends(target), *(receives(0) if rank == target else nothing for rank in range(1, 9)))
    found = ends(schedules, "8+1", 50, machine(2, 4))
    assert found[0] == found[target] == pytest.approx(seconds)
    assert sum(found) == pytest.approx(2 * seconds)


@pytest.mark.parametrize("block", [1, 8192, 8193, 16384, 16385, 1 << 20])
def test_one_message_takes_what_a_message_takes(block: int) -> None:
    """On the default machine, at the sizes where it changes its way."""
    parameters = Parameters(adapter_message=0.0, network_small_byte=1e-9)
    on = Machine("any", domain=1, socket=2, parameters=parameters)
    for target in range(1, 5):
        schedules = system(sends(target), *(receives(0) if rank == target else nothing for rank in range(1, 5)))
        topology = parse_layout("4+1")
        expected = Durations(topology, block, Schedule(0, ()), on).message(level(on, topology, 0, target), block)
        assert flow_seconds(schedules, topology, block, on) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["2x8", "5+3+9:random=2", "3x4:cyclic"])
@pytest.mark.parametrize(("domain", "socket"), [(0, 0), (2, 4), (0, 3), (2, 0)])
def test_levels_are_those_of_the_machine(text: str, domain: int, socket: int) -> None:
    """Of all pairs at once."""
    topology, on = parse_layout(text), machine(domain, socket)
    pairs = [(a, b) for a in range(topology.size) for b in range(topology.size)]
    found = levels(*np.array(pairs).T, topology, on)
    assert found.tolist() == [level(on, topology, a, b) for a, b in pairs]


@pytest.mark.parametrize("flows", [1, 2, 3, 5])
def test_flows_share_an_adapter(flows: int) -> None:
    """Out of one node, into another, from and to ranks of their own."""
    schedules = system(*(sends(flows + i) for i in range(flows)), *(receives(i) for i in range(flows)))
    assert ends(schedules, f"2x{flows}", 100, machine()) == pytest.approx([100 + flows * 100] * 2 * flows)


@pytest.mark.parametrize(("layout", "last"), [("0,0,1,2", 300), ("0,1,2,2", 300), ("4x1", 200), ("2x2:cyclic", 21)])
def test_only_what_is_shared_is_slower(layout: str, last: float) -> None:
    """0 -> 2 and 1 -> 3: out of one node, into one node, nothing in common, within two nodes."""
    schedules = system(sends(2), sends(3), receives(0), receives(1))
    assert ends(schedules, layout, 100, machine(socket=1)) == pytest.approx([last if last > 21 else 23] * 4)


def test_a_flow_that_comes_later() -> None:
    """The first is alone for 50 s, then both have half of the adapter, then the second is alone."""

    def later(b: Builder) -> None:
        b.send(3, SEND[0], after=[b.copy(SEND[0], RECV[0])])  # 50 s

    found = ends(system(sends(2), later, receives(0), receives(1)), "2x2", 100, machine())
    assert found == pytest.approx([250, 300, 250, 300])


@pytest.mark.parametrize("senders", [1, 2, 4])
def test_incast(senders: int) -> None:
    """A rank's messages share its time, whether they come from nodes or from beside it; both ways at once."""
    schedules = system(receives(*range(1, senders + 1)), *[sends(0)] * senders)
    assert max(ends(schedules, f"{senders + 1}x1", 60, machine())) == pytest.approx(100 + 60 * senders)
    assert max(ends(schedules, f"{senders + 1}", 60, machine())) == pytest.approx(1 + 6 * senders)

    def both(b: Builder) -> None:
        b.send(1 - b.rank, SEND[0])
        b.recv(1 - b.rank, RECV[0])

    assert ends(system(both, both), "2x1", 60, machine()) == pytest.approx([160, 160])


def test_a_rank_shares_its_time_among_levels() -> None:
    """To a rank beside it (0.1 s a byte) and to another node (1): equal rates of 1 / 1.1 until the near one is done."""
    fast = machine(domain=0, socket=0, network=1.0)
    found = ends(system(sends(1, 2), receives(0), receives(0)), "2+1", 110, fast)
    assert found == pytest.approx([1 + 121, 1 + 121, 1 + 121])
    other = system(lambda b: (b.send(1, SEND[0]), b.send(2, SEND[0:2])), receives(0), receives(0, blocks=2))
    assert ends(other, "2+1", 110, fast) == pytest.approx([1 + 121 + 110, 1 + 121, 1 + 121 + 110])


def test_what_is_left_goes_to_others() -> None:
    """Two flows into one rank leave the rest of their adapter to a third."""
    # 0 and 1 (node 0) and 3 (node 1) send to 4; 2 (node 0) sends to 5: at 4 each has 1/3, so that 2 -> 5 has 1/3 as
    # well, of node 0's adapter, until the others are done.
    on = machine(network=0.0, network_byte=1.0, adapter=1.0)
    schedules = system(sends(4), sends(4), sends(5), sends(4), receives(0, 1, 3), receives(2))
    found = ends(schedules, "0,0,0,1,2,3", 30, on)
    assert found == pytest.approx([90, 90, 90, 90, 90, 90])
    wide = replace(on, parameters=replace(on.parameters, adapter=0.5))
    # Node 0 has 2 bytes a second: 1/3 each to rank 4, and 2 -> 5 as much as a rank can, 1.
    assert ends(schedules, "0,0,0,1,2,3", 30, wide) == pytest.approx([90, 90, 30, 90, 90, 30])


def late(b: Builder) -> None:
    """Receive only after something else, which takes 50 s."""
    b.recv(0, RECV[2], after=[b.copy(SEND[0:2], RECV[0:2])])


def test_eager_and_rendezvous() -> None:
    """A small message leaves when its sender comes to it, a large one when both have, and after a longer step."""
    schedules = system(sends(1), late)
    assert ends(schedules, "2", 50, machine(eager=50)) == pytest.approx([6, 50])
    assert ends(schedules, "2", 50, machine(eager=49)) == pytest.approx([50 + 16, 50 + 16])
    assert ends(schedules, "2x1", 50, machine(eager=49)) == pytest.approx([150, 150])
    assert ends(schedules, "2x1", 50, machine(network_eager=49)) == pytest.approx([50 + 170, 50 + 170])


def test_chains_add_up() -> None:
    """A message that waits for another, a copy in between, and a join of both ends."""

    def middle(b: Builder) -> None:
        b.send(2, RECV[0], after=[b.copy(RECV[0], SEND[0], after=[b.recv(0, RECV[0])])])

    found = ends(system(sends(1), middle, receives(1)), "2+1", 10, machine())
    assert found == pytest.approx([2, 2 + 5 + 110, 2 + 5 + 110])

    def rounds(b: Builder) -> None:
        for _ in range(3):
            with b.round():
                b.send(1 - b.rank, SEND[0], tag=b.gated[0] if b.gated else 0)
                b.recv(1 - b.rank, RECV[0], tag=b.gated[0] if b.gated else 0)

    assert ends(system(rounds, rounds), "2x1", 10, machine()) == pytest.approx([330, 330])


def test_messages_at_once_cost_a_share_of_their_step() -> None:
    """The first a whole step, each other one ``posted`` of it; out of a rank, and into one."""
    on = machine(posted=0.25, network_byte=0.0, adapter=0.0)
    out = system(sends(1, 2, 3), receives(0), receives(0), receives(0))
    assert ends(out, "4x1", 8, on) == pytest.approx([150, 100, 125, 150])
    into = system(receives(1, 2, 3), sends(0), sends(0), sends(0))
    assert ends(into, "4x1", 8, on) == pytest.approx([150, 100, 125, 150])
    # 2 hears of 1 at once, of 0 when that comes to it, at 25: nobody waits for a message that is not under way.
    mixed = system(sends(3, 2), sends(2), receives(0, 1), receives(0))
    assert ends(mixed, "4x1", 8, on) == pytest.approx([125, 100, 125, 100])
    # Gaps and bytes go on side by side: the last message begins while the bytes of the first are on their way.
    assert ends(out, "4x1", 60, replace(on, parameters=replace(on.parameters, network_byte=1.0)))[0] == 100 + 3 * 60


@pytest.mark.parametrize("block", [0, 2, 8])
@pytest.mark.parametrize("adapter", [0.0, 1.0])
def test_an_adapter_has_a_message_rate(block: int, adapter: float) -> None:
    """Of small messages as many pass as it says; of large ones as many as their bytes allow."""
    on = machine(adapter=adapter, adapter_message=5.0, network_byte=0.0)
    schedules = system(*[sends(*range(3, 6))] * 3, *[receives(*range(3))] * 3)
    assert flow_seconds(schedules, parse_layout("3,3,3,0,1,2"), block, on) == pytest.approx(
        100 + 9 * max(5, block * adapter)
    )


def test_copies_take_their_ranks_time() -> None:
    """By pieces, by lines of 64 bytes, and by bytes; one after the other, and beside messages."""
    on = machine(piece=1.0, line=2.0, reduce_byte=0.75)
    whole, apart = RECV[0:4], SEND[0:8:2]
    assert ends(system(lambda b: b.copy(SEND[0:4], whole)), "1", 16, on) == pytest.approx([1 + 2 + 32])
    assert ends(system(lambda b: b.copy(apart, whole)), "1", 16, on) == pytest.approx([4 * (1 + 2 / 4) + 32])
    assert ends(system(lambda b: b.copy(SEND[0, 1, 4, 5], whole)), "1", 64, on) == pytest.approx([2 * 3 + 128])
    assert ends(system(lambda b: b.reduce(whole, apart, whole)), "1", 16, on) == pytest.approx([6 + 48])
    assert ends(system(lambda b: b.copy(SEND[0:0], RECV[0:0])), "1", 16, on) == [0]

    def twice(b: Builder) -> None:
        b.copy(SEND[0], RECV[0])
        b.copy(SEND[1], RECV[1])
        b.send(1, SEND[0])

    assert ends(system(twice, receives(0)), "2", 16, machine()) == pytest.approx([16, 2.6])


def test_segments_have_their_own_sizes() -> None:
    """Ten bytes in three segments: 3, 3 and 4."""
    for part, seconds in enumerate((103, 103, 104)):
        schedules = system(
            lambda b, part=part: b.send(1, SEND[0].segment(part)),
            lambda b, part=part: b.recv(0, RECV[0].segment(part)),
            segments=3,
        )
        assert ends(schedules, "2x1", 10, machine()) == pytest.approx([seconds] * 2)


def test_flags() -> None:
    """A wait takes its time when the last of its flags is up; one for the start before at once."""

    def raising(blocks: int) -> Fill:
        return lambda b: b.signal(0, after=[b.copy(SEND[0:blocks], RECV[0:blocks])])

    for previous, seconds in ((False, 40 + 4 + 4), (True, 4)):
        schedules = system(raising(2), raising(8), lambda b, p=previous: b.wait([0, 1], 0, previous=p))
        assert ends(schedules, "3", 10, machine(flag=4.0)) == pytest.approx([14, 44, seconds])


def test_a_get_is_its_ranks_own() -> None:
    """After an offer, two ranks get from a third: each takes its own time only."""
    offers = tuple(Offer(peer, 0, "send", ()) for peer in (1, 2))
    gets = [
        (AcceptOffer(0, 0, "send", ()), Get(0, 0, SEND[0:2], RECV[0:2], (0,)), Get(0, 0, SEND[2:4], RECV[2:4], (0,)))
    ] * 2
    schedules = [Schedule(rank, ops) for rank, ops in enumerate([offers, *gets])]
    assert ends(schedules, "3", 10, machine()) == pytest.approx([1, 1 + 1 + 4, 1 + 1 + 4])


def test_what_cannot_run_is_an_error() -> None:
    """Sends that cross need buffering: eager they run, large they never do."""

    def crossing(b: Builder) -> None:
        b.recv(1 - b.rank, RECV[0], after=[b.send(1 - b.rank, SEND[0])])

    schedules = system(crossing, crossing)
    assert ends(schedules, "2", 10, machine()) == pytest.approx([2, 2])
    with pytest.raises(ScheduleError, match=r"rank 0: operation 0 \(Send\) never comes to its end"):
        ends(schedules, "2", 10, machine(eager=1))
    with pytest.raises(ScheduleError, match="from rank 0 to rank 1 with tag 0 lacks one end"):
        ends(system(sends(1), nothing), "2", 10, machine())
    with pytest.raises(ScheduleError, match="from rank 1 to rank 0 with tag 0 lacks one end"):
        ends(system(sends(1), lambda b: (b.recv(0, RECV[0]), b.send(0, SEND[0]))), "2", 10, machine())
    with pytest.raises(ScheduleError, match="rank 1 waits for flag 0 of rank 0, which is never raised"):
        ends(system(nothing, lambda b: b.wait([0], 0)), "2", 10, machine())


def test_arguments_are_checked() -> None:
    """Bytes, seconds, and schedules of all ranks in order."""
    schedules = system(sends(1), receives(0))
    with pytest.raises(ArgumentError, match="block: expected at least 0 bytes, got -1"):
        ends(schedules, "2", -1, machine())
    with pytest.raises(ArgumentError, match="grain: expected at least 0 s"):
        end_seconds(schedules, parse_layout("2"), 1, machine(), grain=float("nan"))
    with pytest.raises(ArgumentError, match="schedules: expected one for each of 3 ranks, got 2"):
        ends(schedules, "3", 1, machine())
    with pytest.raises(ArgumentError, match="schedules: expected that of rank 0 next, got that of rank 1"):
        ends(schedules[::-1], "2", 1, machine())


def test_no_operations() -> None:
    """Nothing happens; zero bytes take a step."""
    assert ends(system(nothing, nothing), "2", 8, machine()) == [0, 0]
    assert ends(system(sends(1), receives(0)), "2", 0, machine()) == [1, 1]


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[list[int]], list[list[float]], int]:
    """Flows of up to three links, with weights; the last link is none."""
    count = draw(st.integers(3, 8))
    flow = st.lists(st.integers(0, count - 1), min_size=3, max_size=3, unique=True)
    flows = draw(st.lists(flow, max_size=9))
    weights = [[draw(st.sampled_from([0.25, 0.5, 1.0, 3.0])) for _ in flow] for flow in flows]
    return flows, weights, count


@given(networks())
def test_rates_are_max_min_fair(case: tuple[list[list[int]], list[list[float]], int]) -> None:
    """No link is overfull, and each flow has a full one on which none is faster."""
    flows, weights, count = case
    links, taken = np.array(flows, np.int64).reshape(-1, 3), np.array(weights, float).reshape(-1, 3)
    rates = fair_rates(links, taken, count)
    use, fastest = np.zeros(count), np.zeros(count)
    for flow, rate, share in zip(links, rates, taken, strict=True):
        for link, weight in zip(flow, share, strict=True):
            use[link] += rate * weight
            fastest[link] = max(fastest[link], rate)
    assert (use[:-1] <= 1 + 1e-6).all()
    for flow, rate in zip(links, rates, strict=True):
        assert any(use[link] > 1 - 1e-6 and fastest[link] <= rate * (1 + 1e-6) for link in flow if link < count - 1)


def test_rates_of_a_textbook() -> None:
    """One flow over two links, one on the first beside it, two on the second: 1/3, 2/3, 1/3, 1/3."""
    links = np.array([[0, 1], [0, 2], [1, 2], [1, 2]])
    assert fair_rates(links, np.ones((4, 2)), 3) == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert fair_rates(np.array([[2, 2]]), np.zeros((1, 2)), 3).tolist() == [np.inf]


@st.composite
def traffic(draw: st.DrawFn) -> tuple[Topology, list[Schedule]]:
    """Messages between random ranks of a random layout; each rank sends its own in a chain or at once."""
    topology = Topology(tuple(draw(st.lists(st.integers(0, 3), min_size=2, max_size=8))))
    rank = st.integers(0, topology.size - 1)
    messages = draw(st.lists(st.tuples(rank, rank, st.integers(0, 3), st.booleans()), max_size=20))
    builders = [Builder(rank) for rank in range(topology.size)]
    last: dict[int, int] = {}
    for tag, (source, target, blocks, chained) in enumerate(messages):
        after = [last[source]] if chained and source in last else []
        last[source] = builders[source].send(target, SEND[0:blocks], tag=tag, after=after)
        builders[target].recv(source, RECV[0:blocks], tag=tag, after=[])
    return topology, [b.build() for b in builders]


@given(traffic(), st.sampled_from([0.0, 0.4]), st.sampled_from([0.0, 30.0]), st.sampled_from([0, 10, 90]))
@settings(deadline=None)
def test_nothing_is_faster_than_its_links(
    case: tuple[Topology, list[Schedule]], posted: float, message: float, block: int
) -> None:
    """No adapter passes more bytes, or messages, and no rank moves more bytes than it can, out or in; and all messages
    one after the other take no less."""
    topology, schedules = case
    on = machine(2, 3, posted=posted, adapter_message=message, eager=20.0, network_eager=100.0)
    seconds = flow_seconds(schedules, topology, block, on)
    ranks, adapters = np.zeros((2, topology.size)), np.zeros((2, 4))
    longest = 0.0
    for source, op in ((s.rank, op) for s in schedules for op in s.ops if isinstance(op, Send)):
        far, nbytes = level(on, topology, source, op.peer), op.region.size * block
        for end, (rank, used) in enumerate(((source, ranks), (op.peer, ranks))):
            used[end, rank] += nbytes * (0.1, 0.2, 0.2, 1.0)[far]
            if far == 3:
                adapters[end, topology.node_of[rank]] += max(nbytes, message)
        longest += (1, 2, 3, 100)[far] + 20 + max(nbytes, message)
    assert max(chain(ranks.flat, adapters.flat)) <= seconds * (1 + 1e-6)
    assert seconds <= longest


@each_entry
def test_every_algorithm_ends(entry: Algorithm) -> None:
    """In all variants, small and large. Many bytes take longer; with a few, messages may come in a better order."""
    for topology, params, schedules in small_systems(entry):
        found = [flow_seconds(schedules, topology, block, Machine("any")) for block in (0, 64, 1 << 20)]
        assert 0 < found[0] <= 1.1 * found[1] < found[2] < 1, (params, topology)


@pytest.mark.parametrize("transport", [Transport(peer=True), Transport(segments=1, shared=True)], ids=str)
@pytest.mark.parametrize(("collective", "name"), [("alltoall", "pairwise"), ("allgather", "ring")])
def test_notices_and_gets_end(collective: str, name: str, transport: Transport) -> None:
    """Messages of a node through its memory, or from a peer's."""
    for layout in ("2x3", "3+2"):
        topology, params = parse_layout(layout), REGISTRY[collective][name].resolve({})
        schedules = generate(collective, name, params, topology, transport=transport)
        assert any(isinstance(op, (Notify, Offer)) for s in schedules for op in s.ops)
        assert 0 < flow_seconds(schedules, topology, 1 << 20, Machine("any")) < 1


def test_runs_are_repeatable_and_a_grain_changes_little() -> None:
    """Ranks that are out of step: the same schedules, the same seconds; with a grain, nearly."""
    topology = parse_layout("5+3+4:random=1")
    schedules = generate("alltoall", "pairwise", {"exchange": "rotation"}, topology)
    found = [end_seconds(schedules, topology, 4096, Machine("any")) for _ in range(2)]
    assert found[0] == found[1]
    assert end_seconds(iter(schedules), topology, 4096, Machine("any"), grain=1e-8) == pytest.approx(found[0], rel=0.02)


@pytest.mark.parametrize(
    ("collective", "name", "block"),
    [("alltoall", "eager", 8), ("alltoall", "bruck", 256), ("allgather", "recursive_doubling", 64)],
)
def test_agrees_with_the_closed_form_where_nothing_is_shared(collective: str, name: str, block: int) -> None:
    """Rounds, and many messages at once, within a node."""
    topology, on = parse_layout("8"), Machine("any")
    schedules = generate(collective, name, REGISTRY[collective][name].resolve({}), topology)
    [each] = profile(schedules.__getitem__, topology, on)
    [expected] = Design([(each, float(block))], on).evaluate(on).seconds
    assert flow_seconds(schedules, topology, block, on) == pytest.approx(expected, rel=0.03)
