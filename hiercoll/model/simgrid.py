"""Schedules and machines for SimGrid: traces that SMPI replays, and the platform that they run on.

SimGrid lets flows share links, as `hiercoll.model.fluid` does: two programs that were written apart, and what they
agree on is not the mistake of one. Format and meaning: the manual of SimGrid, "Replaying MPI traces" and "The network
models" (https://simgrid.org/doc); Casanova et al., "Versatile, scalable, and accurate simulation of distributed
applications and platforms" (JPDC 2014).

A trace is what a rank does, one action after the other, where a schedule may let operations overlap: they are written
in the order in which a run in the fluid evaluator comes to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from hiercoll.errors import ArgumentError, ConstraintError
from hiercoll.model.durations import Durations
from hiercoll.model.fluid import ready_seconds
from hiercoll.model.machine import LEVELS, Machine, Parameters
from hiercoll.schedule import (
    MESSAGES,
    OUTGOING,
    Copy,
    Get,
    Join,
    Op,
    Recv,
    Reduce,
    Schedule,
    Send,
    Signal,
    Wait,
    in_order,
)
from hiercoll.topology import Topology

# A fluid network and nothing else: no factors that stand for TCP, no copies of small messages on the way. Rates are
# computed anew at each event: SimGrid's lazy way lets some flows end early (5 % in rounds of eight ranks, 3.32).
OPTIONS = {
    "network/model": "CM02",
    "network/optim": "Full",
    "network/crosstraffic": "0",
    "network/TCP-gamma": "0",
    "network/weight-S": "0",
    "network/latency-factor": "1",
    "network/bandwidth-factor": "1",
    "smpi/send-is-detached-thresh": "0",
    "smpi/async-small-thresh": "0",
}


def star(latency: float, byte: float, adapter: float) -> Machine:
    """A machine that SimGrid can describe, too: one ``latency`` (s) between any two ranks, ``byte`` seconds per byte
    out of each rank and into it, ``adapter`` out of each node and into it. All else is free, and a message begins
    when both ends may."""
    free = dict.fromkeys(Parameters().__dict__, 0.0)
    steps = dict.fromkeys(LEVELS, latency)
    rates = dict.fromkeys(("domain_byte", "node_byte", "network_byte"), byte)
    return Machine("star", Parameters(**{**free, **steps, **rates, "adapter": adapter}))


def traces(schedules: Sequence[Schedule], topology: Topology, block: int, machine: Machine) -> Iterator[str]:
    """Each rank's trace of one start, with blocks of ``block`` bytes, in the order of a run on ``machine`` in which no
    message is buffered. Such a run waits for nothing that the schedules do not wait for.

    Messages keep their tags and bytes; offers and notices have no bytes. Copies and reductions are computations of a
    flop for each ns that they take on ``machine``; those that take no time are left out. They hold up what comes after
    them in the trace, as they do not in the fluid evaluator.

    Raises ConstraintError for what MPI has no message for: flags, and gets from other ranks' memory; else as
    `hiercoll.model.fluid.end_seconds`.
    """
    for schedule in schedules:
        if refused := next((op for op in schedule.ops if isinstance(op, (Get, Signal, Wait))), None):
            found = f"{type(refused).__name__} of rank {schedule.rank}"
            raise ConstraintError("schedules", "messages, copies and reductions only", found)
    unbuffered = replace(machine, parameters=replace(machine.parameters, eager=-1, network_eager=-1))
    ready = ready_seconds(schedules, topology, block, unbuffered)
    for schedule, times in zip(schedules, ready, strict=True):
        durations = Durations(topology, block, schedule, machine)
        lines = ["init", *_actions(_ordered(schedule, times.tolist()), durations), "finalize"]
        yield "".join(f"{schedule.rank} {line}\n" for line in lines)


def _ordered(schedule: Schedule, times: Sequence[float]) -> Schedule:
    """``schedule`` with its operations one after the other, by ``times``."""
    order = sorted(range(len(times)), key=times.__getitem__)  # stable: what waits comes after what it waits for
    place = {index: new for new, index in enumerate(order)}
    ops = [schedule.ops[index] for index in order]
    moved = tuple(op._replace(deps=tuple(sorted(place[dep] for dep in op.deps))) for op in ops)
    return in_order(replace(schedule, ops=moved))


def _actions(schedule: Schedule, durations: Durations) -> Iterator[str]:
    """The actions of a schedule in order; at its end, messages that nothing has waited for are waited for."""
    ops, under_way = schedule.ops, dict[int, str]()
    for index, op in enumerate(ops):
        if isinstance(op, MESSAGES):
            yield _begin(op, durations)
            under_way[index] = _wait(op, schedule.rank)
        elif isinstance(op, Join):
            yield from (under_way.pop(dep) for dep in op.deps if dep in under_way)
        elif isinstance(op, (Copy, Reduce)) and (seconds := durations.copy(op)):
            yield f"compute {seconds * 1e9:.3f}"
    yield from under_way.values()


def _begin(op: Op, durations: Durations) -> str:
    """The start of a message's end."""
    assert isinstance(op, MESSAGES)
    nbytes = durations.nbytes(op.region) if isinstance(op, (Send, Recv)) else 0
    return f"{'isend' if isinstance(op, OUTGOING) else 'irecv'} {op.peer} {op.tag} {nbytes}"


def _wait(op: Op, rank: int) -> str:
    """The wait for it: by source, destination and tag."""
    assert isinstance(op, MESSAGES)
    source, target = (rank, op.peer) if isinstance(op, OUTGOING) else (op.peer, rank)
    return f"wait {source} {target} {op.tag}"


def platform(topology: Topology, machine: Machine) -> str:
    """The platform of a `star`, in XML: a host for each rank (``r0``, ``r1``, ..), whose flops take a ns each; links
    out of and into each rank and each node.

    Raises ArgumentError for a machine that is no star: SimGrid has no name for what it knows."""
    p = machine.parameters
    if p != star(p.network, p.network_byte, p.adapter).parameters:
        raise ArgumentError("machine", "one that `star` has made", machine.name)
    ranks, nodes = range(topology.size), range(len(topology.nodes))
    ends = ([("r", rank, p.network_byte) for rank in ranks] if p.network_byte else []) + (
        [("n", node, p.adapter) for node in nodes] if p.adapter else []
    )
    lines = ["<?xml version='1.0'?>", '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">']
    lines += ['<platform version="4.1">', '<zone id="all" routing="Full">']
    lines += [f'<host id="r{rank}" speed="1Gf"/>' for rank in ranks]
    lines += [f'<link id="latency" bandwidth="1e18Bps" latency="{p.network!r}s" sharing_policy="FATPIPE"/>']
    for kind, number, byte in ends:
        for way in ("out", "in"):
            lines.append(f'<link id="{kind}{number}-{way}" bandwidth="{1 / byte!r}Bps" latency="0s"/>')
    for pair in permutations(ranks, 2):
        links = "".join(f'<link_ctn id="{link}"/>' for link in _route(*pair, topology, p))
        lines.append(f'<route src="r{pair[0]}" dst="r{pair[1]}" symmetrical="NO">{links}</route>')
    return "\n".join([*lines, "</zone>", "</platform>"]) + "\n"


def _route(source: int, target: int, topology: Topology, p: Parameters) -> Sequence[str]:
    """Links of a message, by name."""
    found = ["latency"]
    if p.network_byte:
        found += [f"r{source}-out", f"r{target}-in"]
    nodes = topology.node_of[source], topology.node_of[target]
    if p.adapter and nodes[0] != nodes[1]:
        found += [f"n{nodes[0]}-out", f"n{nodes[1]}-in"]
    return found
