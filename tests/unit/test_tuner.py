"""Choosing: the same on every rank, only what can run, and not always the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from hiercoll import tuner
from hiercoll.algorithms import REGISTRY
from hiercoll.algorithms.registry import automatic
from hiercoll.collectives import COLLECTIVES, Order, tuned
from hiercoll.model.cost import DEFAULT_LINKS, Link, count_rank, predict
from hiercoll.model.machine import get_machine
from hiercoll.tables import NATIVE_VARIANT, Choice, Entry, Table, Variant
from hiercoll.tools.proving import prove
from hiercoll.topology import Topology, parse_layout
from hiercoll.tuner import MOST_SHARED, NATIVE, SHORTEST, Candidate, Combining, decide, rank_by_model

LAYOUTS = ("1x2", "1x3", "2x1", "7x1", "2x4", "4x4:cyclic", "5+3", "1+4+2:random=1", "3x5")
SIZES = (0, 8, 512, 4096, 65536, 1 << 20)
EVEN = ("alltoall", "allgather", "bcast")  # for which the model chooses
each_collective = pytest.mark.parametrize("collective", EVEN)


def choose(collective: str, topology: Topology, block: int, *, inplace: bool = False) -> Candidate:
    """The cost model's choice, with its time if there is one."""
    decision = decide(collective, topology, block, inplace=inplace)
    return decision.ranking[0] if decision.ranking else Candidate(decision.variant, 0.0)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Candidates may be replaced: nothing is remembered from before, nor afterwards."""
    tuner._counted.cache_clear()
    tuner._decide.cache_clear()
    yield monkeypatch
    tuner._counted.cache_clear()
    tuner._decide.cache_clear()


@pytest.mark.parametrize(("layout", "nodes"), [("2+5", 2), ("5+2", 1), ("3x3", 1), ("1x1", 1)])
def test_the_roots_node_counts_too(layout: str, nodes: int) -> None:
    """Where there is a root: it has more to do than others, and a largest node may be elsewhere."""
    topology, entry = parse_layout(layout), REGISTRY["bcast"]["binomial"]
    counts = tuner._counted("bcast", topology, True, "binomial", (), Order.ANY)
    assert counts is not None and len(counts) == nodes
    root = count_rank(entry.schedule(topology, 0, inplace=True), topology)
    assert max(count.messages for node in counts for count in node) == root.messages
    assert len(tuner._counted("allgather", topology, False, "ring", (), Order.ANY) or ()) == 1


@each_collective
def test_candidates_exist(collective: str) -> None:
    """With these parameters, each once, and one at least that runs anywhere, in place too."""
    spelled = []
    for name, params in automatic(collective):
        entry = REGISTRY[collective][name]
        spelled.append((name, tuple(entry.resolve(params).items())))
    assert len(set(spelled)) == len(spelled)
    for layout in LAYOUTS:
        for inplace in (False, True):
            assert choose(collective, parse_layout(layout), 64, inplace=inplace).algorithm != NATIVE


@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_for_calls_in_place_is_ranked_for_those(inplace: bool) -> None:
    """Others move the same bytes with fewer messages in a row where there are two buffers."""
    ranked = rank_by_model("alltoall", parse_layout("4x4"), 1 << 20, inplace=inplace)
    assert inplace == ("inplace" in {candidate.algorithm for candidate in ranked})


@each_collective
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_ranked_can_run(collective: str, layout: str, inplace: bool) -> None:
    """Candidates are fastest first, and every one suits the layout and the buffers; none cuts short vectors."""
    topology = parse_layout(layout)
    for size in SIZES:
        ranked = rank_by_model(collective, topology, size, inplace=inplace)
        assert [c.seconds for c in ranked] == sorted(c.seconds for c in ranked)
        assert all(c.seconds > 0 for c in ranked)
        assert choose(collective, topology, size, inplace=inplace) == ranked[0]
        for candidate in ranked:
            entry = REGISTRY[collective][candidate.algorithm]
            assert entry.refusal(topology, candidate.params) is None
            assert entry.in_place or not inplace
        able = []
        for name, params in automatic(collective, inplace):
            entry = REGISTRY[collective][name]
            segments = entry.resolve(params).get("segments", 1)
            assert isinstance(segments, int)
            if COLLECTIVES[collective].is_cut and segments > 1 and size < segments * SHORTEST:
                continue
            if entry.refusal(topology, params) is None and (entry.in_place or not inplace):
                busiest = max(topology.nodes, key=len)[0]
                shared = entry.schedule(topology, busiest, params, inplace=inplace).shared
                if shared * size <= MOST_SHARED:  # hosts, above all containers, may have little of it
                    able.append((name, params))
        assert len(ranked) == len(able) and all((c.algorithm, c.params) in able for c in ranked)


@each_collective
@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_chosen_is_right(collective: str, inplace: bool) -> None:
    """Proved, on a layout without any regularity."""
    topology = parse_layout("1+4+2:random=1")
    for size in (8, 1 << 20):
        chosen = choose(collective, topology, size, inplace=inplace)
        assert prove(collective, chosen.algorithm, chosen.params, topology, inplace=inplace).ok


def test_choices_depend_on_size_and_layout() -> None:
    """Few messages for small blocks, few bytes for large ones."""
    for collective in EVEN:
        topology = parse_layout("4x8")
        assert len({choose(collective, topology, size).variant.key for size in SIZES}) > 1
        assert len({choose(collective, parse_layout(text), 512).variant.key for text in LAYOUTS}) > 1
    topology = parse_layout("64x1")
    small, large = (choose("alltoall", topology, size) for size in (1, 1 << 20))
    chosen = [REGISTRY["alltoall"][c.algorithm].schedule(topology, 0, c.params) for c in (small, large)]
    few, many = (count_rank(schedule, topology) for schedule in chosen)
    assert few.messages < many.messages and few.blocks > many.blocks


def test_in_place_is_another_choice() -> None:
    """Large blocks in place cannot go by what needs a send buffer."""
    topology = parse_layout("2x4")
    chosen = choose("alltoall", topology, 1 << 20)
    assert not REGISTRY["alltoall"][chosen.algorithm].in_place
    assert REGISTRY["alltoall"][choose("alltoall", topology, 1 << 20, inplace=True).algorithm].in_place


@each_collective
@pytest.mark.parametrize("layout", ["2x4", "1x9", "2+4", "5+3:cyclic"])
def test_predictions_are_the_cost_models(collective: str, layout: str) -> None:
    """Of the busiest node, all its ranks; or of the root's."""
    topology = parse_layout(layout)
    nodes = {max(topology.nodes, key=len), *([topology.node(0)] if COLLECTIVES[collective].root else [])}
    for candidate in rank_by_model(collective, topology, 4096):
        emit = partial(REGISTRY[collective][candidate.algorithm].schedule, topology, params=candidate.params)
        counts = [[count_rank(emit(rank), topology) for rank in ranks] for ranks in nodes]
        assert candidate.seconds == pytest.approx(max(predict(each, 4096) for each in counts))


def test_predictions_for_many_lanes() -> None:
    """Where not all lanes are counted, the prediction is still about that of all; in trees lanes differ more."""
    topology = parse_layout("2x20")
    for collective in EVEN:
        for candidate in rank_by_model(collective, topology, 4096):
            entry = REGISTRY[collective][candidate.algorithm]
            counts = [count_rank(entry.schedule(topology, r, candidate.params), topology) for r in topology.nodes[0]]
            near = 0.2 if COLLECTIVES[collective].root else 0.1
            assert candidate.seconds == pytest.approx(predict(counts, 4096), rel=near), candidate


def test_links_matter() -> None:
    """A slow network turns the choice."""
    topology = parse_layout("2x4")
    slow = type(DEFAULT_LINKS)(network=Link(1.0, 0.0))
    [first, *_] = rank_by_model("alltoall", topology, 4096, links=slow)
    assert first.seconds > 1 > choose("alltoall", topology, 4096).seconds


@pytest.mark.parametrize("collective", tuned())
def test_one_rank_has_nobody_to_talk_to(collective: str) -> None:
    """The library's own collective serves it."""
    assert choose(collective, parse_layout("1x1"), 4096).algorithm == NATIVE


def test_no_candidate_left(only: pytest.MonkeyPatch) -> None:
    """If all refuse, or none works in place, the library's own collective is left."""
    for collective, name in (("allgather", "neighbor_exchange"), ("alltoall", "pairwise")):
        one = {name: REGISTRY[collective][name]._replace(auto=({},))}
        only.setitem(REGISTRY, collective, one)
    odd, even = parse_layout("1x3"), parse_layout("1x4")
    assert choose("allgather", odd, 64).algorithm == NATIVE
    assert choose("allgather", even, 64).algorithm == "neighbor_exchange"
    assert choose("alltoall", even, 64, inplace=True).algorithm == NATIVE
    assert choose("alltoall", even, 64).algorithm == "pairwise"


CHOICES = """
from hiercoll.topology import parse_layout
from hiercoll.tuner import decide
for collective in ("alltoall", "allgather"):
    for layout in ("1x3", "2x4", "5+3:cyclic", "4x4:random=2"):
        for size in (1, 777, 50_000, 1 << 20):
            for inplace in (False, True):
                print(decide(collective, parse_layout(layout), size, inplace=inplace))
"""


def test_every_process_chooses_alike() -> None:
    """Whatever its hash seed."""
    said = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", CHOICES], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] and len(said[0].splitlines()) == 64
    here = str(decide("alltoall", parse_layout("1x3"), 1))
    assert said[0].splitlines()[0] == here


def test_equal_topologies_choose_alike() -> None:
    """However they came about."""
    one, other = parse_layout("2x2"), Topology((9, 9, 4, 4))
    assert choose("alltoall", one, 512) == choose("alltoall", other, 512)


def test_sums_in_a_wider_type_are_ranked_by_their_bytes() -> None:
    """Of float32's bytes partial sums have all, contributions and results half: what sends fewer sums gains."""
    topology, kind = parse_layout("1x8"), Combining(native=False)
    size = 1 << 20
    chosen = [
        decide("allreduce", topology, size, combining=kind._replace(accumulates=wide)).variant.algorithm
        for wide in (False, True)
    ]
    assert chosen == ["rabenseifner", "all_pairs"]
    assert str(kind) != str(kind._replace(accumulates=True)) != ""  # learned apart
    for machine in (None, get_machine("leonardo")):
        able = [("all_pairs", {}), ("recursive_doubling", {})]
        plain, half, wide = (
            {each.algorithm: each.seconds for each in rank_by_model(
                "allreduce", topology, nbytes, variants=able, machine=machine, accumulates=accumulates
            )}
            for nbytes, accumulates in ((size, False), (size // 2, False), (size, True))
        )  # fmt: skip
        for name in plain:
            assert half[name] < wide[name]
        assert wide["all_pairs"] / plain["all_pairs"] < wide["recursive_doubling"] / plain["recursive_doubling"]


@pytest.mark.parametrize("inplace", [False, True])
def test_the_layouts_table_may_choose_any_order_for_sums(inplace: bool) -> None:
    """One algorithm for a size gives the same bits again, in whatever order; not so what a table of another layout
    suggests, and not where a call asks for an order."""
    topology, ring = parse_layout("2x4"), Variant("ring", {})
    entry = Entry("allreduce", "MPICH", "host", (4, 4), "block", (Choice(1, NATIVE_VARIANT), Choice(4096, ring)))
    table, sums, ordered = Table((entry,)), Combining(changes=False), Combining(Order.FIXED, native=False)

    def algorithm(where: Topology, combining: Combining) -> str:
        given = {"inplace": inplace, "table": table, "mpi": "MPICH", "combining": combining}
        return decide("allreduce", where, 8192, **given).variant.algorithm

    assert algorithm(topology, sums) == "ring"
    assert algorithm(topology, ordered) not in ("ring", NATIVE)
    assert algorithm(parse_layout("4x4"), sums) != "ring"
