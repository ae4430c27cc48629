"""Machines of Power9 hosts, from published ping-pongs; the lab, from its calibration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hiercoll.model.machine import Parameters, get_machine

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import host_machines
import lab_machine


def test_the_file_is_what_the_script_derives() -> None:
    """`python scripts/host_machines.py` writes it anew. All but what the logs say is said to be assumed, and usual."""
    machine, usual = host_machines.summit(), Parameters()
    assert get_machine("summit") == machine
    for name, value in machine.parameters.__dict__.items():
        assert (name in machine.assumed) == (value == getattr(usual, name)), name


def test_the_fit_of_lassen_begins_there() -> None:
    """What its rows do not tell stays as the ping-pongs say, or usual; so does what is assumed."""
    start, machine = host_machines.lassen(), get_machine("lassen")
    assert set(machine.sources) > set(start.sources) and set(machine.assumed) == set(start.assumed)
    changed = {"domain", "network", "copy_byte"}
    for name in set(Parameters().__dict__) - changed:
        assert getattr(machine.parameters, name) == pytest.approx(getattr(start.parameters, name), rel=1e-3)


@pytest.mark.parametrize("logs", [host_machines.LASSEN, host_machines.SUMMIT])
def test_a_message_costs_what_was_measured(logs: host_machines.Logs) -> None:
    """A rate and a step from three points meet the others within 10 %; between nodes, small messages too."""
    p = host_machines.parameters(logs)
    for seconds, latency, byte in ((logs.socket, p.socket, p.domain_byte), (logs.cross, p.node, p.node_byte)):
        for size, measured in seconds.items():
            step = latency + (p.rendezvous if size > p.eager else 0)
            # Between sockets large messages step up by more than within one: there is one parameter for both.
            assert step + size * byte == pytest.approx(measured, rel=0.1 if seconds is logs.socket else 0.3)
    for size, measured in logs.network.items():
        large = size > p.network_eager
        step = p.network + (p.network_rendezvous if large else size * p.network_small_byte)
        assert step + size * p.network_byte == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("logs", [host_machines.LASSEN, host_machines.SUMMIT])
def test_rates_are_those_of_the_links(logs: host_machines.Logs) -> None:
    """Below the name-plates of two EDR ports, and more than one."""
    p = host_machines.parameters(logs)
    assert 0.85 * 25e9 < 1 / p.adapter < 25e9
    assert 12e9 < 1 / p.network_byte < 25e9


def test_the_lab_is_what_its_records_say() -> None:
    """`python scripts/lab_machine.py` writes it anew; a link has 25 MB/s, less framing."""
    machine = lab_machine.lab()
    assert get_machine("lab") == machine
    assert 17e6 < 1 / machine.parameters.adapter < 25e6
    assert machine.fitted["held out rows"] > 100
