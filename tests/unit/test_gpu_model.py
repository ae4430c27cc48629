"""Lassen and Summit in the model, and the page that holds them against a paper."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hiercoll.algorithms import get_algorithm
from hiercoll.model.machine import Machine, Parameters, get_machine
from hiercoll.topology import parse_layout

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import gpu_machines  # noqa: E402
import paper_figures  # noqa: E402

PAGE = paper_figures.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("make", [gpu_machines.lassen, gpu_machines.summit])
def test_files_are_what_the_script_derives(make: Callable[[], Machine]) -> None:
    """`python scripts/gpu_machines.py` writes them anew. What is assumed is said to be."""
    machine = make()
    assert get_machine(machine.name) == machine
    assert set(gpu_machines.ASSUMED) <= set(machine.assumed) <= set(Parameters().__dict__)


def test_rates_are_those_of_the_links() -> None:
    """Measured ones are below the name-plates: 3 or 2 links of NVLink, X-Bus, two EDR ports."""
    for machine, links, gpus in ((gpu_machines.lassen(), 3, 2), (gpu_machines.summit(), 2, 3)):
        p = machine.parameters
        assert 0.9 * links * 25e9 < 1 / p.domain_byte < links * 25e9
        assert 0.5 * 64e9 < 1 / p.node_byte < 64e9
        assert 0.9 * 25e9 < 1 / p.network_byte < 25e9
        assert machine.domain == machine.socket == gpus


def test_a_message_costs_what_was_measured() -> None:
    """A rate and a step from two or three points meet the others within 5 %."""
    p = gpu_machines.lassen().parameters
    for size, seconds in gpu_machines.SOCKET_SECONDS.items():
        step = p.domain + (p.rendezvous if size > p.eager else 0)
        assert step + size * p.domain_byte == pytest.approx(seconds, rel=0.05)
    for size, seconds in gpu_machines.NETWORK_SECONDS.items():
        step = p.network + (p.network_rendezvous if size > p.network_eager else 0)
        assert step + size * p.network_byte == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("layout", ["2x4", "2x6"])
def test_names_of_the_paper_run(layout: str) -> None:
    """All that stand for one have schedules; what needs a power of two has another way."""
    topology = parse_layout(layout)
    for name in paper_figures.NAMES:
        if name.algorithm is not None:
            entry, params = paper_figures.variant(name.collective, name.algorithm, topology)
            assert get_algorithm(name.collective, name.algorithm) == entry
            assert not entry.refusal(topology, params)
            assert entry.schedule(topology, 0, params).ops


def test_busiest_links_by_hand() -> None:
    """Alltoall of 1000 bytes on 2 x 4: 16 blocks out of a node, 4 across its sockets each way; and no evaluator is
    faster than the busiest link."""
    case = "alltoall", "pairwise", "lassen", "2x4", 1000
    found, p = paper_figures.links(*case), gpu_machines.lassen().parameters
    assert found["ports"] == pytest.approx(16000 * p.adapter)
    assert found["gpu"] == pytest.approx(4000 * p.network_byte)
    assert found["x-bus"] == pytest.approx(4000 / 64e9)
    assert found["pair"] == pytest.approx(1000 * p.node_byte)
    for collective, names in paper_figures.EXISTING.items():
        for name in (*names, *paper_figures.PROPOSED[collective]):
            case = collective, name, "lassen", "2x4", paper_figures.MIB
            least = max(value for kind, value in paper_figures.links(*case).items() if kind != "x-bus")
            for evaluator in (paper_figures.ADDED, paper_figures.SHARED):
                assert paper_figures.seconds(evaluator, *case) > 0.999 * least


def test_the_page_is_current_as_far_as_that_is_quick() -> None:
    """Machines, names, and the rows of 8 nodes; `python scripts/paper_figures.py` writes it anew."""
    small = [claim for claim in paper_figures.CLAIMS if claim.layout == "8x4"]
    assert len(small) == 5
    for line in (*paper_figures.machine_lines(), *paper_figures.name_lines(), *paper_figures.claim_lines(small)):
        assert f"{line}\n" in PAGE
    assert len(PAGE.splitlines()) <= 120
