#!/usr/bin/env python3
"""Writes hiercoll/model/machines/*.json: machines fitted to published timings, and two that are assumed.

    python scripts/fit_machines.py --data FOLDER [--only lumi] [--to FOLDER]

FOLDER holds alltoall-clusters.csv and pico.csv (`hiercoll.tools.published`). Each machine is fitted to few nodes; how
it does on more is written beside that, and printed, and decides nothing. Needs SciPy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import host_machines

from hiercoll.model.fit import fit
from hiercoll.model.machine import SHIPPED, Machine, Parameters
from hiercoll.model.measurements import Measurement
from hiercoll.tools.published import COLLECTIVES, SYSTEMS, compared, excluded, held_out, profiles, rows_of, score

LOCALITY_AWARE = (
    "mpi-advance/locality_aware: BSD 3-Clause, (c) 2021 MPI Advance Project; its alltoall timings of {}, "
    "least of the jobs"
)
PICO = (
    "HLC-Lab/pico: MIT, (c) 2025 Daniele De Sensi and Saverio Pasqualoni; its timings of {} with one rank a node, "
    "host memory, median of the calls"
)

# Where the search begins: about what two-socket hosts with 200 Gbit/s have. The priors are centred here.
HOSTS = Parameters(
    domain=0.5e-6, socket=0.8e-6, node=2e-6, network=3e-6, domain_byte=0.3e-9, node_byte=0.6e-9, network_byte=0.2e-9,
    rendezvous=3e-6, eager=4096, network_rendezvous=5e-6, network_eager=16384, adapter=0.04e-9, congestion=0.5,
    socket_link=0.02e-9, cache_socket=100e6, cache_rank=2e6, memory=0.05e-9, bus=1e-12, root_message=0.3e-6,
    root_in=0.14e-9, root_out=0.07e-9, root_out_domain=0.07e-9, root_large=5e5, root_factor=0.3, piece=2e-9, line=10e-9,
    copy_byte=0.1e-9, fresh=10e-12,
)  # fmt: skip
UNSEEN = {
    "posted": 0.4,  # pairwise exchanges have one message under way at a time
    "flag": 0.3e-6,  # nothing in these programs uses flags
    "reduce_byte": 0.2e-9,  # nor reduces
}
DANE: dict[str, float | str] = {
    **UNSEEN,
    "cache_rank": 2e6,  # name-plate: L2 of a Sapphire Rapids core
    "root_out_domain": "root_out",  # scatters take no less within a domain
    "line": 0.0,  # pieces cost the same whatever their length
    "root_large": 1e18,  # rooted messages have no step with size
    "root_factor": 1.0,
}
TUOLUMNE: dict[str, float | str] = {
    **UNSEEN,
    "cache_rank": 1e6,  # name-plate: L2 of a Zen 4 core
    "memory": 0.0,  # copies and messages beyond the cache take no longer: memory is on the package
}
# What allgathers of up to 128 bytes a rank tell beyond ping-pongs: steps in a row of them, and copies.
LASSEN = ("domain", "network", "copy_byte")
# One rank a node tells these; nothing of what happens inside a node.
ONE_RANK = (
    "network", "network_byte", "network_small_byte", "network_rendezvous", "network_eager", "posted", "cache_socket",
    "memory", "copy_byte", "reduce_byte",
)  # fmt: skip
LINK_200G = 8 / 200e9  # s/B
SINGLE = Parameters(
    network_byte=0.06e-9,
    network_small_byte=0.3e-9,  # not 0, so that it is fitted
    adapter=LINK_200G,  # name-plate of one port; what a rank takes longer is network_byte
    congestion=0.0,  # one rank a node has few peers at a time
)


def dane(data: Path) -> Machine:
    """Dane: Open MPI 4.1.2, 112 ranks a node (14 in each of 8 domains), 2 to 8 nodes, both campaigns pooled."""
    about = "two sockets of 56 cores, Omni-Path; Open MPI 4.1.2, 112 ranks a node"
    start = Machine("Dane", HOSTS, 14, 56, (LOCALITY_AWARE.format("Dane"),), _assumed(DANE), about=about)
    return _fitted(data, start, DANE, rows_of(data, "Dane"))


def tuolumne(data: Path) -> Machine:
    """Tuolumne: Cray MPICH, 64 ranks a node (16 on each of 4 MI300A), 2 to 8 nodes, the later campaign. The earlier one
    (tuo08) is another machine below 64 B: exchanges within a node take up to three times as long there."""
    about = (
        "four MI300A, Slingshot; Cray MPICH, 64 ranks a node; another campaign took up to 3 times as long below 64 B"
    )
    # Domains of 8: chiplets. Scatters have a step between 8 and 16 ranks; no log says why.
    sources = (LOCALITY_AWARE.format("Tuolumne (10/2025)"),)
    start = Machine("Tuolumne", HOSTS, 8, 16, sources, _assumed(TUOLUMNE), about=about)
    return _fitted(data, start, TUOLUMNE, rows_of(data, "Tuolumne"))


def leonardo(data: Path) -> Machine:
    """Leonardo: Open MPI 4.1.6, one rank a node, 4 to 32 nodes."""
    more = "to 32 nodes: at 128 to 254 a message step took 3.6 us instead of 1.9, which fewer nodes cannot tell"
    return _one_rank_a_node(data, "Leonardo", f"24 GB/s into a node with one rank; Open MPI 4.1.6; fitted {more}")


def lumi(data: Path) -> Machine:
    """LUMI: Cray MPICH 8.1.29, one rank a node, 8 to 32 nodes."""
    return _one_rank_a_node(data, "LUMI", "Slingshot, dragonfly; Cray MPICH 8.1.29; fitted to 8 to 32 nodes")


def marenostrum5(data: Path) -> Machine:
    """MareNostrum 5 ACC: Open MPI 4.1.5, one rank a node, 32 and 60 nodes; no rows of more."""
    about = "accelerated partition; Open MPI 4.1.5 on one rail; fitted to 32 and 60 nodes, nothing held out"
    return _one_rank_a_node(data, "MareNostrum5", about)


def fugaku(data: Path) -> Machine:
    """Fugaku: Fujitsu MPI 4.0.1, one rank a node, 8 and 64 nodes. A torus, whose hops and shared links the model does
    not know: on more nodes, messages to far ranks take several times as long."""
    about = "torus (its hops are not modelled); Fujitsu MPI 4.0.1; fitted to 8 and 64 nodes"
    start = replace(SINGLE, network_byte=1 / 6.8e9, adapter=1 / 40.8e9)  # name-plates: of a link, of all six
    return _one_rank_a_node(data, "Fugaku", about, start)


def lassen(data: Path) -> Machine:
    """Lassen's hosts: Bruck's allgather in three forms, 4 or 16 ranks a node, 4 and 16 nodes. What these rows do not
    tell is as ping-pongs say (`host_machines`)."""
    start = host_machines.lassen()
    about = f"{start.about}; fitted to allgathers of up to 128 bytes a rank, and to ping-pongs"
    timings = "mpi-advance/locality_aware: BSD 3-Clause, (c) 2021 MPI Advance Project; its allgather timings of Lassen"
    fixed: dict[str, float | str] = {k: v for k, v in asdict(start.parameters).items() if k not in LASSEN}
    sources = (f"{timings}, least of the jobs", *start.sources)
    return _fitted(data, replace(start, sources=sources, about=about), fixed, rows_of(data, "Lassen"))


def generic(gigabits: int) -> Machine:
    """Hosts with so many Gbit/s between them: the defaults, and messages at the link's rate. Nothing is measured."""
    rate = 8 / (gigabits * 1e9)
    parameters = replace(Parameters(), network_byte=rate, adapter=rate)
    about = f"hosts with {gigabits} Gbit/s between them: assumed, not measured"
    return Machine(f"generic-{gigabits}g", parameters, assumed=_assumed(asdict(parameters)), about=about)


def _assumed(names: Sequence[str] | dict[str, float | str] | dict[str, float]) -> tuple[str, ...]:
    return tuple(sorted(names))


def _one_rank_a_node(data: Path, system: str, about: str, begin: Parameters = SINGLE) -> Machine:
    """Fitted to allgather and allreduce. Reduce_scatter is left out: where Open MPI runs, it takes two to five times
    what its messages and reductions do from some size on (1 MiB of vector on MareNostrum 5, 64 MiB on Leonardo)."""
    fixed: dict[str, float | str] = {key: value for key, value in asdict(begin).items() if key not in ONE_RANK}
    start = Machine(system, begin, sources=(PICO.format(system),), assumed=_assumed(fixed), about=about)
    rows = [row for row in rows_of(data, system) if row.collective != "reduce_scatter"]
    return _fitted(data, start, fixed, rows)


def _fitted(data: Path, start: Machine, fixed: dict[str, float | str], rows: Sequence[Measurement]) -> Machine:
    most = SYSTEMS[start.name].nodes
    found = fit(start, [row for row in rows if row.nodes <= most], fixed, profiles).machine
    beyond = [row for row in rows if row.nodes > most]
    quality = {**found.fitted, "nodes": float(max(row.nodes for row in rows if row.nodes <= most))}
    if beyond:
        result = score(compared(beyond, found))
        quality["held out rows"] = float(result.rows)
        quality |= {"held out median": round(result.median, 3), "held out p90": round(result.p90, 3)}
    values = {each.name: float(f"{getattr(found.parameters, each.name):.4g}") for each in fields(Parameters)}
    return replace(found, parameters=Parameters(**values), fitted=quality)


def report(data: Path, machine: Machine) -> None:
    """Prints the fit, what is held out, and which rows are left out."""
    print(f"{machine.name}: {machine.fitted}\n  not determined, or assumed: {', '.join(machine.assumed)}")
    for collective in ("alltoall", *COLLECTIVES):
        held = held_out(data, machine.name, collective, machine)
        if held:
            print(f"  held out, {collective}: {score(held)}")
    for rule, rows in excluded(data, machine.name).items():
        names = sorted({f"{row.collective} {row.algorithm}" for row in rows})
        if rows:
            print(f"  left out, {rule}: {len(rows)} rows: {', '.join(names)}")


FITTED: dict[str, Callable[[Path], Machine]] = {
    each.__name__: each for each in (dane, tuolumne, leonardo, lumi, marenostrum5, fugaku, lassen)
}


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the CSV files")
    parser.add_argument("--only", choices=list(FITTED), help="one machine")
    parser.add_argument("--to", type=Path, default=SHIPPED, help="folder to write to")
    given = parser.parse_args()
    for name in [given.only] if given.only else FITTED:
        machine = FITTED[name](given.data)
        report(given.data, machine)
        (given.to / f"{name}.json").write_text(machine.to_json(), encoding="utf-8")
    for gigabits in (100, 200):
        machine = generic(gigabits)
        (given.to / f"{machine.name}.json").write_text(machine.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
