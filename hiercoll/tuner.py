"""Choosing an algorithm: for now by the cost model, from values that are equal on all ranks."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from hiercoll.algorithms import REGISTRY, Params
from hiercoll.cost import DEFAULT_LINKS, Links, RankCounts, count_rank, predict
from hiercoll.topology import Topology

NATIVE = "native"


class Candidate(NamedTuple):
    """An algorithm with its parameters, and its predicted time in seconds."""

    algorithm: str
    params: Params
    seconds: float

    @property
    def spelled(self) -> str:
        """Name and parameters in words."""
        return " ".join([self.algorithm, *(f"{k}={v}" for k, v in self.params.items())])


# What "auto" considers: those variants that some machine, size or layout makes the best.
CANDIDATES: dict[str, tuple[tuple[str, Params], ...]] = {
    "alltoall": (
        ("bruck", {}),
        ("bruck", {"radix": 4}),
        ("scatter_destination", {}),
        ("pairwise", {}),
        ("inplace", {}),
        ("hierarchical", {}),
        ("grouped", {"form": "lane"}),
        ("grouped", {"form": "share"}),
        ("grouped", {"form": "leader"}),
        ("grouped", {"form": "share", "memory": "shared"}),
        ("grouped", {"form": "lane", "memory": "shared"}),
        ("grouped", {"form": "lane", "outer": "bruck"}),
    ),
    "allgather": (
        ("bruck", {}),
        ("direct", {}),
        ("recursive_doubling", {}),
        ("ring", {}),
        ("hierarchical", {}),
        ("node_aware", {}),
        ("node_aware", {"outer": "ring"}),
        ("node_aware", {"outer": "recursive_doubling"}),
        ("shared", {"form": "share"}),
        ("shared", {"form": "lane"}),
    ),
}


SAMPLE = 8  # lanes of a node that are looked at
MOST_SHARED = 8 << 20  # bytes of shared memory per node that "auto" may take; containers have 64 MiB


@lru_cache(maxsize=256)
def _counted(collective: str, topology: Topology, inplace: bool) -> list[tuple[str, Params, list[RankCounts]]]:
    """The candidates that can run, with the counts of the ranks of a largest node.

    Of a node with many lanes, some are counted and stand for those that follow them;
    lane 0, the leader, stands for itself.
    """
    busiest = max(topology.nodes, key=len)
    others = len(busiest) - 1
    sample = sorted({1 + i * others // SAMPLE for i in range(SAMPLE)}) if others else []
    weights = [b - a for a, b in pairwise([*sample, others + 1])]
    counted = []
    for name, given in CANDIDATES[collective]:
        entry = REGISTRY[collective][name]
        if (entry.in_place or not inplace) and entry.refusal(topology, given) is None:
            counts = []
            for lane, weight in [(0, 1), *zip(sample, weights, strict=True)]:
                schedule = entry.schedule(topology, busiest[lane], given, inplace=inplace)
                counts += [count_rank(schedule, topology)] * weight
            counted.append((name, given, counts))
    return counted


def rank_by_model(
    collective: str, topology: Topology, block: int, *, inplace: bool = False, links: Links = DEFAULT_LINKS
) -> list[Candidate]:
    """The candidates for blocks of ``block`` bytes, fastest first by the cost model.

    Deterministic in its arguments, so all ranks that call it alike choose alike.
    """
    ranked = [
        Candidate(name, params, predict(counts, block, links))
        for name, params, counts in _counted(collective, topology, inplace)
        if counts[0].shared * block <= MOST_SHARED
    ]
    return sorted(ranked, key=lambda candidate: candidate.seconds)


def choose(collective: str, topology: Topology, block: int, *, inplace: bool = False) -> Candidate:
    """What ``algorithm="auto"`` runs."""
    if topology.size == 1 or not CANDIDATES.get(collective):
        return Candidate(NATIVE, {}, 0.0)
    ranked = rank_by_model(collective, topology, block, inplace=inplace)
    return ranked[0] if ranked else Candidate(NATIVE, {}, 0.0)
