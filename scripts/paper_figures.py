"""Figures 9 to 13 of the paper whose algorithms hiercoll has, in the model: writes docs/scale-gpu.md.

    python scripts/paper_figures.py [--out docs/scale-gpu.md] [--plots FOLDER]

The paper: Khorassani, Chu, Anthony, Subramoni, Panda 2021. Only numbers that its text states are held against the
model; its figures are pictures. The machines are those of `scripts/gpu_machines.py`; nothing is tuned. Takes a few
minutes: the fluid evaluator runs 384 ranks. ``--plots`` draws the closed form's times over sizes, too.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import log2
from pathlib import Path
from typing import NamedTuple

from gpu_machines import EDR_RATE, X_BUS_RATE, lassen, summit

from hiercoll.algorithms import Algorithm, Params, get_algorithm
from hiercoll.model.cost import Link, Links
from hiercoll.model.machine import FAR, Machine, level
from hiercoll.model.simulate import Settings, simulate
from hiercoll.schedule import Send
from hiercoll.tools.predicting import forecast
from hiercoll.topology import Topology, parse_layout
from hiercoll.units import format_size

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scale-gpu.md"
KIB, MIB = 1 << 10, 1 << 20
ADDED, SHARED = "added", "shared"  # evaluators: closed form, fluid


class Name(NamedTuple):
    """What the paper calls an algorithm, what the registry has for it (None: nothing), and where they differ."""

    paper: str
    collective: str
    algorithm: str | None
    given: Params
    differs: str


NAMES = (
    Name("Scatter Destination", "alltoall", "scatter_destination", {}, "the paper names no window; 32 is MPICH's"),
    Name("Pairwise", "alltoall", "pairwise", {"exchange": "xor"}, "rotation where the ranks are no power of two"),
    Name("Inplace", "alltoall", "inplace", {}, "the paper only names it; taken for MPI_IN_PLACE's"),
    Name("RD", "alltoall", "recursive_doubling", {}, "not below: the paper's own graphs lack values of it"),
    Name("Bruck", "alltoall", None, {}, "the paper leaves it out: not on GPU buffers"),
    Name("Proposed Eager, Algorithm 2", "alltoall", "eager", {}, "partners in rotation; none is left out"),
    Name("Proposed Hierarchical, Algorithm 3", "alltoall", "hierarchical", {"window": 1},
         "node by node, as text and figures 5 to 8 have it; Algorithm 3 as printed starts all nodes at once"),
    Name("Direct", "allgather", "direct", {}, "32 messages at a time"),
    Name("RD", "allgather", "recursive_doubling", {}, ""),
    Name("Ring", "allgather", "ring", {}, ""),
    Name("Proposed Hierarchical + Overlap, Algorithm 1", "allgather", "hierarchical", {}, ""),
)  # fmt: skip
PROPOSED = {"alltoall": ("eager", "hierarchical"), "allgather": ("hierarchical",)}
EXISTING = {"alltoall": ("scatter_destination", "pairwise", "inplace"), "allgather": ("ring", "direct")}


@dataclass(frozen=True)
class Claim:
    """A number that the text states: ``stated`` in per cent less time than ``against`` (an algorithm, or "" for the
    best existing one by the model), and where it stands; ``size``: bytes of a block."""

    figure: str
    stated: str
    collective: str
    machine: str
    layout: str
    size: int
    against: str = ""

    @property
    def least(self) -> float:
        """The least gain that is stated, as a share."""
        return float(self.stated.split(" ")[0]) / 100


FULL = Claim("9(d)", "39", "alltoall", "lassen", "64x4", MIB, "scatter_destination")
SUMMIT = Claim("10", "35", "alltoall", "summit", "64x4", 2 * MIB, "pairwise")
DENSE = replace(SUMMIT, layout="64x6")
RING = Claim("11", "9 to 18", "allgather", "lassen", "64x4", MIB, "ring")
CLAIMS = (
    FULL,
    *(Claim("9", "20 to 30", "alltoall", "lassen", layout, size)
      for layout, size in (("8x4", 8 * KIB), ("8x4", 64 * KIB), ("8x4", MIB), ("64x4", 8 * KIB), ("64x4", 64 * KIB))),
    SUMMIT,
    DENSE,
    *(replace(RING, layout=layout, size=size) for layout in ("8x4", "64x4") for size in (64 * KIB, MIB)),
)  # fmt: skip


def machine_of(name: str, topology: Topology) -> Machine:
    """The machine, with half of the ranks of a node in each socket."""
    half = topology.node_sizes[0] // 2
    return replace({"lassen": lassen, "summit": summit}[name](), domain=half, socket=half)


def variant(collective: str, algorithm: str, topology: Topology) -> tuple[Algorithm, Params]:
    """What stands for a name of the paper's on a layout."""
    [name] = (each for each in NAMES if (each.collective, each.algorithm) == (collective, algorithm))
    entry = get_algorithm(collective, algorithm)
    params = entry.resolve(dict(name.given))
    return entry, entry.resolve({}) if entry.refusal(topology, params) else params


@cache
def seconds(evaluator: str, collective: str, algorithm: str, machine: str, layout: str, size: int) -> float:
    """Of one algorithm, by the closed form (``ADDED``) or the fluid evaluator (``SHARED``)."""
    topology = parse_layout(layout)
    chosen = [variant(collective, algorithm, topology)]
    [found], _ = forecast(chosen, topology, machine_of(machine, topology), [size], fluid=evaluator == SHARED)
    return found.seconds


@cache
def queued(collective: str, algorithm: str, machine: str, layout: str, size: int) -> float:
    """Seconds by `hiercoll.model.simulate`: whole messages queue at ports and GPUs, a message that waits for where it
    goes to keeps those behind it waiting. It knows one kind of link in a node (here, across sockets) and one between
    nodes (here, all ports); large messages."""
    topology = parse_layout(layout)
    entry, params = variant(collective, algorithm, topology)
    p = machine_of(machine, topology).parameters
    near, far = Link(p.node + p.rendezvous, p.node_byte), Link(p.network + p.network_rendezvous, p.adapter)
    settings = Settings(Links(near, far, overhead=0.0, gap=p.copy_byte, operation=0.0), eager=0)
    schedules = [entry.schedule(topology, rank, params) for rank in range(topology.size)]
    return simulate(schedules, topology, size, settings)[-1].end


@cache
def links(collective: str, algorithm: str, machine: str, layout: str, size: int) -> dict[str, float]:
    """Seconds that the busiest link of each kind of the first node needs for all that is sent over it: ``ports`` of
    the node, a GPU's way to them (``gpu``), ``x-bus`` each way, between two GPUs (``pair``)."""
    topology = parse_layout(layout)
    entry, params = variant(collective, algorithm, topology)
    described = machine_of(machine, topology)
    p, load = described.parameters, defaultdict[tuple[str, int, int], float](float)
    for rank in topology.nodes[0]:
        for op in entry.schedule(topology, rank, params).ops:
            if not isinstance(op, Send):
                continue
            nbytes, far = op.region.size * size, level(described, topology, rank, op.peer)
            if far == FAR:
                load["ports", 0, 0] += nbytes * p.adapter
                load["gpu", rank, 0] += nbytes * p.network_byte
            else:
                load["pair", rank, op.peer] += nbytes * (p.node_byte if far else p.domain_byte)
                load["x-bus", topology.lane_of[rank] // described.socket, 0] += nbytes / X_BUS_RATE if far else 0
    kinds = sorted({kind for kind, _, _ in load})
    return {kind: max(value for key, value in load.items() if key[0] == kind) for kind in kinds}


def link_seconds(collective: str, algorithm: str, machine: str, layout: str, size: int) -> float:
    """Of the busiest link: no run on these links is faster."""
    return max(links(collective, algorithm, machine, layout, size).values())


class Gain(NamedTuple):
    """Of the proposed over the existing algorithms, as shares of the existing one's time: by the closed form, by the
    fluid evaluator; and by the latter if a proposed one took no longer than its busiest link needs."""

    added: float
    shared: float
    most: float


def gain(claim: Claim) -> Gain:
    """What the model has for a claim."""
    existing = (claim.against,) if claim.against else EXISTING[claim.collective]
    proposed = PROPOSED[claim.collective]
    added, shared = (fastest(evaluator, claim, existing) for evaluator in (ADDED, SHARED))
    least = min(link_seconds(*case_of(claim, each)) for each in proposed)
    return Gain(
        1 - fastest(ADDED, claim, proposed) / added, 1 - fastest(SHARED, claim, proposed) / shared, 1 - least / shared
    )


def case_of(claim: Claim, algorithm: str) -> tuple[str, str, str, str, int]:
    """What `seconds` and `links` ask for."""
    return claim.collective, algorithm, claim.machine, claim.layout, claim.size


def fastest(evaluator: str, claim: Claim, algorithms: Iterable[str]) -> float:
    """Seconds of the fastest algorithm. Those whose links alone need longer are not evaluated."""
    best = float("inf")
    for each in algorithms:
        if link_seconds(*case_of(claim, each)) < best:
            best = min(best, seconds(evaluator, *case_of(claim, each)))
    return best


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def per_cent(share: float) -> str:
    """Of a gain; what is slower is said to be."""
    rounded = round(100 * share)
    return f"{rounded}" if rounded >= 0 else f"{-rounded} slower"


def milliseconds(value: float) -> str:
    """Three digits."""
    return f"{1e3 * value:.3g}"


def gigabytes(byte: float) -> str:
    """GB/s of seconds per byte."""
    return f"{1e-9 / byte:.1f}"


def microseconds(value: float) -> str:
    """Of seconds."""
    return f"{1e6 * value:.2f}"


def machine_lines() -> list[str]:
    """What the machines' parameters are."""
    a, b = lassen().parameters, summit().parameters
    measured, plate, same = "measured, one pair", "name-plate", "as on Lassen"
    rows = [
        ["between GPUs of a socket, GB/s", gigabytes(a.domain_byte), gigabytes(b.domain_byte), measured, measured],
        ["across sockets, GB/s", gigabytes(a.node_byte), gigabytes(b.node_byte), measured, measured],
        ["between nodes, one GPU, GB/s", gigabytes(a.network_byte), gigabytes(b.network_byte), measured, same],
        ["out of a node, all GPUs, GB/s", gigabytes(a.adapter), gigabytes(b.adapter), plate, "the centre's guide"],
        ["X-Bus each way, GB/s", f"{X_BUS_RATE / 1e9:.1f}", f"{X_BUS_RATE / 1e9:.1f}", plate, plate],
        ["4 bytes: socket, node, network, us",
         ", ".join(map(microseconds, (a.domain, a.node, a.network))), "the same", measured, same],
        ["more from 16 KiB on in a node, us", microseconds(a.rendezvous), "the same", measured, same],
        ["more from 4 KiB on between nodes, us", microseconds(a.network_rendezvous), "the same", measured, same],
    ]  # fmt: skip
    return table(["", "Lassen", "Summit", "Lassen: from", "Summit: from"], rows)


def name_lines() -> list[str]:
    """What stands for the paper's names."""
    rows = []
    for each in NAMES:
        given = "".join(f" {key}={value}" for key, value in each.given.items())
        rows.append(
            [each.paper, each.collective, f"`{each.algorithm}{given}`" if each.algorithm else "-", each.differs]
        )
    return table(["the paper's", "collective", "hiercoll's", "where they differ"], rows)


def place(claim: Claim) -> str:
    """Machine, layout and size."""
    return f"{claim.machine.capitalize()} {claim.layout.replace('x', ' x ')}, {format_size(claim.size)}"


def claim_lines(claims: Sequence[Claim]) -> list[str]:
    """The paper's numbers beside the model's."""
    rows = []
    for each in claims:
        against = each.against or "the best existing"
        rows.append([each.figure, each.collective, place(each), against, each.stated, *map(per_cent, gain(each))])
    head = ["figure", "collective", "nodes x GPUs, bytes", "less time than", "paper", "added", "shared", "at most"]
    return table(head, rows)


def time_lines(claims: Sequence[Claim]) -> list[str]:
    """Milliseconds of all algorithms."""
    rows = []
    for each in claims:
        for algorithm in (*EXISTING[each.collective], *PROPOSED[each.collective]):
            case = case_of(each, algorithm)
            values = [seconds(ADDED, *case), seconds(SHARED, *case), queued(*case)]
            values += [link_seconds(*case), links(*case)["x-bus"]]
            rows.append([place(each), f"{each.collective} `{algorithm}`", *map(milliseconds, values)])
    return table(["nodes x GPUs, bytes", "algorithm", "added", "shared", "queued", "busiest link", "X-Bus"], rows)


def in_text() -> dict[str, str]:
    """Numbers that the text names: milliseconds, GB/s and per cent."""
    flat, leader = (case_of(FULL, name) for name in ("scatter_destination", "hierarchical"))
    dense, ring, tree = case_of(DENSE, "pairwise"), case_of(RING, "ring"), case_of(RING, "hierarchical")
    waiting = 1 - queued(*leader) / queued(*flat)
    nodes, gpus = (int(each) for each in RING.layout.split("x"))
    return {
        "ports": f"{EDR_RATE / 1e9:.0f}",
        "needed": f"{(1 - FULL.least) * EDR_RATE / 1e9:.0f}",
        "needed_share": f"{100 * (1 - FULL.least):.0f}",
        "flat_bus": f"{100 * links(*flat)['x-bus'] / links(*flat)['ports']:.1f}",
        "dense_bus": f"{100 * links(*dense)['x-bus'] / links(*dense)['ports']:.1f}",
        "leader_bus": f"{100 * links(*leader)['x-bus'] / links(*leader)['ports']:.0f}",
        "leader_gpu": milliseconds(links(*leader)["gpu"]),
        "queued_flat": milliseconds(queued(*flat)),
        "queued_pairwise": milliseconds(queued(*case_of(FULL, "pairwise"))),
        "queued_leader": milliseconds(queued(*leader)),
        "waiting": per_cent(waiting),
        "flat_ports": milliseconds(links(*flat)["ports"]),
        "leader_shared": milliseconds(seconds(SHARED, *leader)),
        "ring": milliseconds(seconds(SHARED, *ring)),
        "ring_added": milliseconds(seconds(ADDED, *ring)),
        "tree": milliseconds(seconds(SHARED, *tree)),
        "tree_link": milliseconds(link_seconds(*tree)),
        "formula": milliseconds(log2(nodes) * (RING.size / EDR_RATE) * (gpus - 1)),
        "received": f"{(nodes - 1) * gpus * RING.size >> 20}",
        "least": milliseconds((nodes - 1) * gpus * RING.size / EDR_RATE),
    }


def page() -> str:
    """The whole of docs/scale-gpu.md."""
    lines = [HEAD, "## Machines", "", *machine_lines(), ASSUMPTIONS, "## Names", "", *name_lines(), ""]
    lines += [GAINS, *claim_lines(CLAIMS), BEHIND]
    lines += [*time_lines((FULL, RING)), "", filled(REASONS.format(**in_text()).strip())]
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """Paragraphs and list items with lines as long as they may be."""
    blocks = [each.replace("\n- ", "\n\0- ").split("\n\0") for each in text.split("\n\n")]
    fill = partial(textwrap.fill, width=118, break_on_hyphens=False, break_long_words=False)
    return "\n\n".join(
        "\n".join(
            fill(" ".join(item.split()), subsequent_indent="  " if item.startswith("- ") else "") for item in block
        )
        for block in blocks
    )


BEHIND = """
Milliseconds behind two of these rows; X-Bus: its busier direction; *queued*: `hiercoll.model.simulate`, see below:
"""
HEAD = """# A paper's GPU figures in the model

Khorassani, Chu, Anthony, Subramoni and Panda (2021) propose the alltoall and allgather that hiercoll has as `eager` and
`hierarchical`, and time them with MVAPICH2-GDR on Lassen (4 V100 a node) and Summit (6). This page holds the numbers
that their text states (section IV-B; the figures are pictures) against the model of [scale.md](scale.md), on machines
made of published ping-pongs and name-plates. No parameter was fitted to a collective, and none was tuned to the paper.
`python scripts/paper_figures.py` writes the page.

**Result.** The model does not show the paper's gains, and says that stated link rates cannot yield those of large
alltoalls: at full rate the flat algorithms already fill the ports of a node. They must have stayed below that rate in
MVAPICH2-GDR, for which we found no parameter. For allgather the model cannot decide.
"""
ASSUMPTIONS = """
Measured: ping-pongs between GPUs that others ran on Lassen with MVAPICH2 in April 2021, and on Summit with Spectrum MPI
(its rates only). Jobs, points and the arithmetic stand in `scripts/gpu_machines.py`; `hiercoll machines lassen-gpu`
lists all parameters. Assumed: a message that is one of many costs 0.4 of its latency; a fat tree that carries every
pattern at full rate; copies at the speed of a GPU's memory, without the start of a kernel. For Summit, all latencies.
"""
GAINS = """## Gains

How much less time the fastest proposed algorithm takes (the paper, too, takes the faster alltoall at each size), in per
cent of the existing one's, by two evaluators; "1 MB" is taken for 1 MiB:

- *added*: the closed form. A GPU's bytes and those of its node's ports add up, even where they are the same bytes.
- *shared*: the fluid evaluator. Messages run beside each other and share GPUs and ports, so it knows overlap.
- *at most*: the existing one as in *shared*, the proposed one as if it took only what its busiest link needs: perfect
  overlap, no latency. At 8 KiB, and for ring at 64 KiB, latency rules, and this limit says little.
"""
REASONS = """
## Why they differ

**Alltoall at 1 MiB and more (figures 9 and 10).** Every algorithm has to send the same bytes out of a node, and in
the model the flat ones do so at the full {ports} GB/s of two EDR ports ({flat_ports} ms on Lassen).
Nothing is left to gain. For 39 % the best flat one must have left a node at {needed} GB/s or less, {needed_share} %
of the ports. The paper names contention for InfiniBand as the cause. A third evaluator shows how much hangs on it:
where whole messages queue at the ports, and one that waits holds up those behind it, scatter_destination takes
{queued_flat} ms, the leaders {queued_leader} ({waiting} % less), but pairwise {queued_pairwise}. How ports behave
is a parameter that
we have found nowhere; setting it to fit would be tuning.

**A single leader** has to carry the node's bytes alone: {leader_gpu} ms at the rate of one GPU, even if all else
overlaps. The fluid evaluator has {leader_shared} ms, because what the leader scatters shares its time with what it
sends out. Real GPUs have NVLinks of their own for each neighbour, so the truth lies between. The faster of
the two proposed is therefore `eager` in every row. Its small gains below 1 MiB come from posting all messages at once.

**The X-Bus.** The paper gives hiding its contention as the reason for more gain on Summit. By the stated rates it is
almost idle: what a flat alltoall sends across takes {flat_bus} % of the time of the ports on Lassen, {dense_bus} % on
Summit (64 x 6); the leader's gather and scatter take {leader_bus} %. Bytes on their way to the other socket's port, if
any, are not in the model.

**Allgather (figure 11).** At 1 MiB on 256 GPUs ring takes {ring} ms in the fluid evaluator, and the proposed algorithm
{tree} ms, as the leader hands each block on three times at the cost of its own time; with perfect overlap it would
take {tree_link} ms. Between these two the model cannot tell, as no parameter says which links of a GPU are apart. The
paper's gain is partly within reach on 32 GPUs, where ring sends a tenth more out of a node than the leaders do; on 256
GPUs only if ring is slower than its slowest hop. The closed form has {ring_added} ms for ring: it counts the same bytes
at the GPU and at the ports. At 64 KiB latency within the node rules, which is assumed where messages are many.

## What is not modelled

- **Figures 12 and 13** (30 % less latency than other libraries for alltoall, 20 to 60 % for allgather): the paper does
  not say which algorithms Spectrum MPI, Open MPI and NCCL ran.
- **Equation 3**, log(N) (M / B + t) (GPUs - 1), gives {formula} ms for allgather of 1 MiB on 64 x 4 without t. A node
  has to receive {received} MiB, {least} ms at {ports} GB/s: M cannot be what a rank contributes. It is not used.
- **Settings of MVAPICH2**, which the paper does not state: in the logs, 1 MiB differs twofold between two of them.
- **The paper's own numbers disagree** in places: 256 GPUs of Summit are no whole number of nodes of 6 (both 64 x 4 and
  64 x 6 are above); gains start "beyond 64KB" and at 8 KB in one paragraph; 22 % and 30 % belong to allgather and
  alltoall in the abstract, the other way round in the conclusion; Summit is said to gain more (35 %, 39 %).
"""


def draw(folder: Path) -> None:
    """Times by the closed form over sizes, a picture for each collective and layout of `CLAIMS`."""
    from hiercoll.tools.plots.prediction import draw_prediction

    folder.mkdir(parents=True, exist_ok=True)
    sizes = [KIB << power for power in range(13)]
    for collective, machine, layout in dict.fromkeys((c.collective, c.machine, c.layout) for c in CLAIMS):
        topology = parse_layout(layout)
        chosen = [variant(collective, each, topology) for each in (*EXISTING[collective], *PROPOSED[collective])]
        found, _ = forecast(chosen, topology, machine_of(machine, topology), sizes)
        title = f"{collective} on {machine}-gpu, {topology}: predicted"
        draw_prediction(found, title, folder / f"{machine}-gpu-{collective}-{layout}.svg")


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--plots", type=Path, help="folder for pictures")
    given = parser.parse_args()
    given.out.write_text(page(), encoding="utf-8")
    if given.plots:
        draw(given.plots)


if __name__ == "__main__":
    main()
