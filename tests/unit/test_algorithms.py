"""Every algorithm: proved on odd layouts, counts as its docstring states them, and its form."""

from __future__ import annotations

import ast
import inspect
import re
from contextlib import suppress
from math import ceil, log2

import pytest
from entries import each_entry, entries_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.algorithms import REGISTRY, Algorithm
from hiercoll.collectives import COLLECTIVES, Order
from hiercoll.contracts import Contract
from hiercoll.errors import ConstraintError, ParameterError, UnknownAlgorithmError
from hiercoll.model.cost import RankCounts, count_rank
from hiercoll.model.simulate import count_rounds
from hiercoll.runtime.layouts import vector_layout
from hiercoll.schedule import Copy, Recv, Reduce, Schedule, Send, most_tags, writes
from hiercoll.schedule.transports import Transport
from hiercoll.tools.proving import generate, prove
from hiercoll.topology import Topology, parse_layout


def schedules_of(entry: Algorithm, topology: Topology, **params: int | str) -> list[Schedule]:
    """All ranks' schedules."""
    return generate(entry.collective, entry.name, entry.resolve(params), topology)


def stated_counts(entry: Algorithm) -> tuple[str, dict[str, str]]:
    """The condition and the formulas of the docstring's Counts."""
    match = re.search(r"Counts( \(.*?\))?: (.*?)\n    [A-Z]", entry.function.__doc__ or "", re.DOTALL)
    assert match, "the docstring states no counts"
    formulas = dict(part.split("=", 1) for part in re.sub(r"\s+", " ", match[2]).split("; "))
    return match[1] or "", {name.strip(): formula.strip() for name, formula in formulas.items()}


@each_entry
@pytest.mark.parametrize("layout", ["2x4", "4x4", "2x2", "1x1", "2x3", "3x5"])
def test_counts_are_as_stated(entry: Algorithm, layout: str) -> None:
    """What the docstring says of rounds, messages, blocks and scratch is what is counted."""
    topology = parse_layout(layout)
    p, nodes, lanes = topology.size, len(topology.nodes), len(topology.nodes[0])
    condition, formulas = stated_counts(entry)
    if ("power of two" in condition and p & (p - 1)) or ("2**k equal nodes" in condition and nodes & (nodes - 1)):
        pytest.skip(f"counts are stated for others: {condition.strip()}")
    if why := entry.refusal(topology, {}):
        pytest.skip(f"not on this layout: {why}")
    schedules = schedules_of(entry, topology)
    counts = [count_rank(schedule, topology) for schedule in schedules]
    # "leader" and "root" state what rank 0 does, all others the most that any rank does.
    chosen = counts[:1] if re.search("leader;|root;", condition) else counts
    params = entry.resolve({})
    values = {**params, "p": p, "N": nodes, "m": lanes, "ceil": ceil, "log2": log2, "min": min, "max": max}
    assert formulas
    for name, formula in formulas.items():
        stated = eval(formula, {"__builtins__": {}}, values)  # a formula of our own docstring
        if name == "rounds":
            assert count_rounds(schedules, topology) == stated, name
        else:
            assert name in RankCounts._fields, name
            assert max(getattr(count, name) for count in chosen) == pytest.approx(stated), name


@each_entry
def test_docstring(entry: Algorithm) -> None:
    """At most 25 lines, with contract, picture, counts, constraints and reference."""
    text = inspect.cleandoc(entry.function.__doc__ or "")
    assert len(text.splitlines()) <= 25
    for section in ("Contract:", "node 0:", "node 1:", "Counts", "Constraints:", "Reference:"):
        assert section in text


def functions() -> list[tuple[str, ast.FunctionDef]]:
    """All functions and methods of the algorithms."""
    from pathlib import Path

    import hiercoll.algorithms

    folder = Path(hiercoll.algorithms.__file__).parent
    return [
        (f"{path.name}:{node.name}", node)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


@pytest.mark.parametrize("function", [f for _, f in functions()], ids=[name for name, _ in functions()])
def test_an_algorithm_fits_on_a_screen(function: ast.FunctionDef) -> None:
    """At most 40 lines of code, docstring and signature aside."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    assert not body or body[-1].end_lineno - body[0].lineno + 1 <= 40  # type: ignore[operator]


LAYOUTS = st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
    lambda sizes: st.permutations([node for node, size in enumerate(sizes) for _ in range(size)])
)


@each_entry
@settings(max_examples=25, deadline=None, derandomize=True)
@given(nodes=LAYOUTS, data=st.data())
def test_proved_on_random_placements(entry: Algorithm, nodes: list[int], data: st.DataObject) -> None:
    """Any parameters, any placement on up to four nodes of up to four ranks."""
    topology = Topology(tuple(nodes))
    params = data.draw(st.sampled_from(list(entry.all_combinations())))
    root = data.draw(st.integers(0, topology.size - 1)) if COLLECTIVES[entry.collective].root else 0
    if entry.refusal(topology, params) is None:
        prove(entry.collective, entry.name, params, topology, root=root).require()


@each_entry
@pytest.mark.parametrize("layout", ["1x1", "2x3", "3+1"])
def test_what_is_only_read_is_not_written(entry: Algorithm, layout: str) -> None:
    """One buffer that holds what is due already may be read-only."""
    record, topology = COLLECTIVES[entry.collective], parse_layout(layout)
    assert entry.in_places == ((True,) if record.one_buffer else (False, True) if entry.in_place else (False,))
    for params in entry.all_combinations() if record.one_buffer else ():
        if entry.refusal(topology, params) is not None:
            continue
        for root in range(topology.size):
            contract = Contract(entry.collective, topology.size, root=root)
            schedules = generate(entry.collective, entry.name, params, topology, root=root)
            for rank, schedule in enumerate(schedules):
                is_written = any(region.buffer == "recv" for op in schedule.ops for region in writes(op))
                assert is_written == contract.moves(rank)[1], (params, root, rank)


@entries_of("alltoall", "allgather")
def test_in_place_is_what_can_be_proved(entry: Algorithm) -> None:
    """Entries that claim in-place use prove it; those that do not claim it could not."""
    from hiercoll.tools.proving import system_of
    from hiercoll.verify import verify

    for layout in ("2x2", "5+3", "1x4:cyclic"):
        topology = parse_layout(layout)
        outcomes = []
        for params in entry.variants():
            if entry.refusal(topology, params) is None:
                plain = system_of(entry.collective, entry.name, params, topology)
                outcomes.append(verify(plain.in_place()).ok)
        assert all(outcomes) if entry.in_place else not all(outcomes), layout


def entering(schedules: list[Schedule], topology: Topology) -> dict[tuple[int, int], int]:
    """How often each block of an allgather enters each foreign node."""
    times: dict[tuple[int, int], int] = {}
    for schedule in schedules:
        for op in schedule.ops:
            if isinstance(op, Recv) and topology.node_of[op.peer] != topology.node_of[schedule.rank]:
                for block in op.region.blocks:
                    key = (block, topology.node_of[schedule.rank])
                    times[key] = times.get(key, 0) + 1
    return times


@pytest.mark.parametrize("layout", ["2x3", "4x4:cyclic", "5+3", "1+4+2:random=1", "3x5:random=2", "5x2"])
@pytest.mark.parametrize("name", ["hierarchical", "node_aware", "ring"])
def test_each_block_enters_each_foreign_node_once(name: str, layout: str) -> None:
    """Also under cyclic and random placement, and on uneven nodes."""
    topology = parse_layout(layout)
    entry = REGISTRY["allgather"][name]
    for params in entry.variants():
        if entry.refusal(topology, params) is None and params.get("segments", 1) == 1:
            times = entering(schedules_of(entry, topology, **params), topology)
            if name == "ring":  # it enters a node at one rank, and leaves it at another, never to come back
                assert max(times.values()) == 1
            else:
                foreign = sum(topology.size - size for size in topology.node_sizes)
                assert len(times) == foreign and set(times.values()) == {1}


@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("layout", ["4x4", "4x3:cyclic", "5+3+4"])
def test_messages_between_nodes(layout: str, memory: str) -> None:
    """Lane form: N-1 per lane (equal nodes). Share form: N-1 per node. Leader form: N-1 per node."""
    topology = parse_layout(layout)
    entry = REGISTRY["alltoall"]["grouped"]
    others = len(topology.nodes) - 1
    sent = {}
    for form in ("lane", "share", "leader"):
        schedules = schedules_of(entry, topology, form=form, memory=memory)
        per_rank = [count_rank(schedule, topology).network_messages for schedule in schedules]
        sent[form] = [[per_rank[rank] for rank in ranks] for ranks in topology.nodes]
    if topology.is_even:
        assert all(count == others for node in sent["lane"] for count in node)
    assert all(sum(node) == others and max(node) - min(node) <= 1 for node in sent["share"])
    assert all(node == [others, *[0] * (len(node) - 1)] for node in sent["leader"])


@entries_of("alltoall", but=("bruck", "recursive_doubling"))
def test_blocks_between_nodes_are_no_more_than_needed(entry: Algorithm) -> None:
    """Alltoall without store and forward sends each block between nodes exactly once."""
    topology = parse_layout("5+3+4:random=1")
    for params in entry.variants():
        if entry.refusal(topology, params) is None and params.get("outer") != "bruck":
            counts = [count_rank(s, topology) for s in schedules_of(entry, topology, **params)]
            needed = sum(size * (topology.size - size) for size in topology.node_sizes)
            assert sum(count.network_blocks for count in counts) == needed


def test_shared_memory_is_copied_once_each_way() -> None:
    """The shared form moves data within a node by one copy in and one out, no message."""
    topology = parse_layout("4x4")
    for schedule in schedules_of(REGISTRY["alltoall"]["grouped"], topology, form="share", memory="shared"):
        inside = topology.node(schedule.rank)
        assert not [op for op in schedule.ops if isinstance(op, Send | Recv) and op.peer in inside]
        assert sum(op.target.size for op in schedule.ops if isinstance(op, Copy)) == 2 * topology.size
        sends = [op for op in schedule.ops if isinstance(op, Send)]
        assert all(isinstance(op.region.blocks, range) and op.region.blocks.step == 1 for op in sends)


def test_node_aware_needs_few_operations() -> None:
    """Strided regions: on 16 nodes of 8 lanes the lane form has some 50 operations a rank."""
    schedule = REGISTRY["alltoall"]["grouped"].schedule(parse_layout("16x8"), 5)
    assert len([op for op in schedule.ops if isinstance(op, Send | Recv | Copy | Reduce)]) <= 64


@each_entry
@pytest.mark.parametrize("layout", ["1x1", "1x2", "2x1", "4x4", "5+3", "8x1", "1+4+2:random"])
def test_tags_are_bounded(entry: Algorithm, layout: str) -> None:
    """Calls in the background take as many tags without asking other ranks, whatever the transport."""
    topology = parse_layout(layout)
    chosen = [entry.resolve(params) for params in (*entry.auto, *entry.search(topology))]
    for params in (*entry.all_combinations(), *chosen):
        if entry.refusal(topology, params) is None:
            for schedule in generate(entry.collective, entry.name, params, topology):
                assert schedule.tags <= most_tags(topology.size, schedule.segments)
    for transport in (Transport(peer=True), Transport(peer=True, segments=4), Transport(segments=4, shared=True)):
        for params in (params for params in chosen if entry.refusal(topology, params) is None):
            with suppress(ConstraintError):  # of transports that an algorithm does not go by
                schedule = entry.system(topology, params, transport=transport)[topology.size - 1]
                assert schedule.tags <= most_tags(topology.size, schedule.segments)


def test_errors() -> None:
    """Unknown algorithm and parameter, values out of range, constraints that do not hold."""
    from hiercoll.algorithms import get_algorithm

    with pytest.raises(UnknownAlgorithmError, match=r"expected one of .*bruck.* got 'brooke'"):
        get_algorithm("alltoall", "brooke")
    bruck = get_algorithm("alltoall", "bruck")
    for params, named in (({"radix": 1}, "radix"), ({"radix": True}, "radix"), ({"base": 2}, "base")):
        with pytest.raises(ParameterError, match=named):
            bruck.resolve(params)
    neighbours = get_algorithm("allgather", "neighbor_exchange")
    with pytest.raises(ConstraintError, match=r"rank 2: .*expected an even number of ranks, got 1x3"):
        neighbours.schedule(parse_layout("1x3"), 2)
    with pytest.raises(ConstraintError, match="separate send and receive buffers"):
        get_algorithm("alltoall", "pairwise").schedule(parse_layout("1x2"), 0, inplace=True)


REDUCTIONS = [record.name for record in COLLECTIVES.values() if record.operation]


@entries_of(*REDUCTIONS)
def test_orders_of_reductions(entry: Algorithm) -> None:
    """What an algorithm states is what its schedules are proved to have, whatever the root; more is refused."""
    for layout in ("1x1", "1x2", "2x3", "2x4", "3+2", "2x2:cyclic", "1+2+1"):
        topology = parse_layout(layout)
        for params in entry.variants():
            if entry.refusal(topology, params) is not None:
                continue
            stated = entry.order(topology, params)
            roots = range(topology.size if COLLECTIVES[entry.collective].root else 1)
            proofs = [prove(entry.collective, entry.name, params, topology, root=root).require() for root in roots]
            assert min(proof.order or Order.ANY for proof in proofs) is stated, (params, layout)
            for order in Order:
                if order > stated:
                    with pytest.raises(ConstraintError, match=f"expected order {stated.name.lower()!r}"):
                        entry.schedule(topology, 0, params, order=order)


@each_entry
def test_nodes_share_memory_together(entry: Algorithm) -> None:
    """All ranks make windows together: where one asks for a shared buffer, all do."""
    for layout in ("2x3", "3+1", "1+2+1"):
        topology = parse_layout(layout)
        for params in entry.variants():
            if entry.refusal(topology, params) is None:
                schedules = generate(entry.collective, entry.name, params, topology)
                assert len({schedule.shared > 0 for schedule in schedules}) == 1, (params, layout)


@entries_of("allreduce", "bcast", "reduce")
@pytest.mark.parametrize("layout", ["1x1", "2x4", "5+3", "3x3", "7x1"])
def test_vectors_of_one_element(entry: Algorithm, layout: str) -> None:
    """Most blocks are empty: it is known how long each is, in all buffers."""
    topology, rooted = parse_layout(layout), COLLECTIVES[entry.collective].root
    for params in entry.variants():
        if entry.refusal(topology, params) is not None:
            continue
        for root in range(topology.size if rooted else 1):
            for rank in range(topology.size):
                for inplace in entry.in_places:
                    schedule = entry.schedule(topology, rank, params, inplace=inplace, root=root)
                    # Segments of different blocks may be in one place at a time.
                    assert vector_layout(schedule, 8, 8)[1] in (8, 8 * schedule.segments)
