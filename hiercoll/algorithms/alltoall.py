"""Alltoall algorithms that treat all ranks alike, and the paper's eager algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from hiercoll.algorithms.registry import Parameter, grid, register, window_parameter
from hiercoll.collectives import ALLTOALL
from hiercoll.schedule import RECV, SCRATCH, SEND, Buffer, Builder, Region, Schedule
from hiercoll.topology import Topology


@register(
    ALLTOALL,
    window_parameter(32, "messages outstanding per rank, each way", 1, 4, 32),
    auto=({},),
    search=lambda topology: grid(window=(2, 4, 8, 16)),
)
def scatter_destination(topology: Topology, rank: int, *, window: int) -> Schedule:
    """Every rank sends straight to every other, ``window`` messages at a time.

    Contract: alltoall. Ranks start at different peers, so that no receiver is
    everyone's first.

        node 0: 0 1 2   | round 1 (window 2): 0 -> 1, 0 -> 2;  1 -> 2, 1 -> 3; ..
        node 1: 3 4 5   | round 2:            0 -> 3, 0 -> 4;  1 -> 4, 1 -> 5; ..

    Counts: rounds = ceil((p-1)/window); messages = p-1; blocks = p-1;
        network_messages = p-m; scratch = 0
    Constraints: none. Not in place.
    Reference: Singh et al. 2011 (scatter-destination); MPICH calls it scattered.
    """
    p, b = topology.size, Builder(rank)
    for first in range(0, p, window):
        with b.round():
            if first == 0:
                b.copy(SEND[rank], RECV[rank])
            for distance in range(first + 1, min(first + window, p - 1) + 1):
                source, target = (rank - distance) % p, (rank + distance) % p
                b.recv(source, RECV[source])
                b.send(target, SEND[target])
    return b.build()


def _power_of_two_for_xor(topology: Topology, params: dict[str, int | str]) -> str | None:
    p = topology.size
    return "a power-of-two number of ranks for exchange=xor" if params["exchange"] == "xor" and p & (p - 1) else None


@register(
    ALLTOALL,
    Parameter("exchange", "rotation", ("rotation", "xor"), "partner of step i: rank +/- i, or rank xor i"),
    constraint=_power_of_two_for_xor,
    auto=({},),
)
def pairwise(topology: Topology, rank: int, *, exchange: str) -> Schedule:
    """One exchange at a time: in step i send to one rank and receive from one rank.

    Contract: alltoall. At most one message per rank is in flight each way.

        node 0: 0 1 2   | rotation, step 1: 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 0
        node 1: 3 4 5   | rotation, step 2: 0 -> 2 -> 4 -> 0,  1 -> 3 -> 5 -> 1

    Counts: rounds = p-1; messages = p-1; blocks = p-1; network_messages = p-m; scratch = 0
    Constraints: exchange=xor needs a power of two (then partners are mutual).
    Not in place.
    Reference: Thakur, Rabenseifner, Gropp 2005, section 4.3.
    """
    p, b = topology.size, Builder(rank)
    if p == 1:
        b.copy(SEND[0], RECV[0])
    for i in range(1, p):
        source, target = (rank ^ i, rank ^ i) if exchange == "xor" else ((rank - i) % p, (rank + i) % p)
        with b.round():
            if i == 1:
                b.copy(SEND[rank], RECV[rank])
            b.recv(source, RECV[source])
            b.send(target, SEND[target])
    return b.build()


def bruck_exchange(b: Builder, peers: Sequence[int], me: int, data: Buffer, width: int, radix: int) -> list[int]:
    """Index algorithm among ``peers``: rounds in which items travel the digits of their distance.

    On entry item j of ``width`` blocks, bound for the peer j further on, lies in
    ``data[j*width:]``; ``data`` has room for 2 len(peers) items. Returns, for each j,
    where the item from the peer j back lies: received items land in the other half,
    so no block is copied between rounds.
    """
    n = len(peers)
    at = [j * width for j in range(n)]
    weight = 1
    while weight < n:
        moves = [[j for j in range(weight, n) if j // weight % radix == digit] for digit in range(1, radix)]
        with b.round():
            for digit, items in enumerate(moves, 1):
                if items:
                    there = {j: (at[j] + n * width) % (2 * n * width) for j in items}
                    b.recv(peers[(me - digit * weight) % n], data[[there[j] + i for j in items for i in range(width)]])
                    b.send(peers[(me + digit * weight) % n], data[[at[j] + i for j in items for i in range(width)]])
                    for j in items:
                        at[j] = there[j]
        weight *= radix
    return at


@register(
    ALLTOALL,
    Parameter("radix", 2, (2, 3, 4, 8), "base of the distances", 2),
    in_place=True,
    auto=({}, {"radix": 4}),
    search=lambda topology: grid(radix=[radix for radix in (3, 4, 8, isqrt(topology.size)) if radix > 1]),
)
def bruck(topology: Topology, rank: int, *, radix: int) -> Schedule:
    """Few messages, each with many blocks: a block travels the digits of its distance.

    Contract: alltoall, in place too. A block bound d ranks further on moves by
    digit(k) * radix**k in phase k; a phase has radix-1 messages.

        node 0: 0 1 2   | phase 0: r -> r+1, the blocks of distance 1, 3, 5
        node 1: 3 4 5   | phase 1: r -> r+2, distance 2, 3;  phase 2: r -> r+4, distance 4, 5

    Counts (radix 2, p a power of two): rounds = log2(p); messages = log2(p);
        blocks = p/2*log2(p); scratch = 2*p
    Constraints: none. Two local copies rotate in and out; regions of arbitrary
    blocks take the place of packing.
    Reference: Bruck et al. 1997 (index); radix: Fan et al., arXiv 2411.02581.
    """
    p, b = topology.size, Builder(rank)
    data = b.scratch(2 * p)
    with b.round():
        b.copy(SEND[[(rank + j) % p for j in range(p)]], data[0:p])
    at = bruck_exchange(b, range(p), rank, data, 1, radix)
    b.copy(data[at], RECV[[(rank - j) % p for j in range(p)]])
    return b.build()


@register(
    ALLTOALL,
    window_parameter(1, "partners exchanged with at a time = scratch blocks", 1, 4),
    in_place=True,
    auto=({},),
    auto_in_place=True,
)
def inplace(topology: Topology, rank: int, *, window: int) -> Schedule:
    """Swap blocks within the receive buffer; meant for sendbuf = MPI.IN_PLACE.

    Contract: alltoall, in place (otherwise the input is copied to recv first). In
    step i rank r meets rank (i - r) mod p, a round-robin tournament: mutual for any p.

        node 0: 0 1 2   | step 1: 0 <-> 1, 2 <-> 5, 3 <-> 4
        node 1: 3 4 5   | step 2: 0 <-> 2, 3 <-> 5 (1 and 4 meet themselves)

    The block to send is saved to scratch, then both directions run at once.
    Counts (window 1; a rank that meets itself pauses): rounds = p if p > 2 else p-1;
        messages = p-1; blocks = p-1; network_messages = p-m; scratch = min(window, p-1)
    Constraints: none.
    Reference: MPI 4.1, 6.8 (MPI_IN_PLACE); tournament: the circle method.
    """
    p, b = topology.size, Builder(rank)
    partners = [partner for i in range(p) if (partner := (i - rank) % p) != rank]
    spare = b.scratch(min(window, p - 1))
    with b.round():
        b.copy(SEND[0:p], RECV[0:p])
    for first in range(0, p - 1, window):
        batch = partners[first : first + window]
        with b.round():
            b.copy(RECV[batch], spare[0 : len(batch)])
        with b.round():
            for i, partner in enumerate(batch):
                b.recv(partner, RECV[partner])
                b.send(partner, spare[i])
    return b.build()


@register(ALLTOALL, in_place=True)
def recursive_doubling_alltoall(topology: Topology, rank: int) -> Schedule:
    """Store and forward over a hypercube: step k hands on all blocks whose bit k is wrong.

    Contract: alltoall, in place too. With q the largest power of two <= p, rank
    r >= q lets rank r - q act for it, before and after the steps.

        node 0: 0 1 2   | before: 4 -> 0, 5 -> 1;  step 0: 0 <-> 1, 2 <-> 3
        node 1: 3 4 5   | step 1: 0 <-> 2, 1 <-> 3;  after: 0 -> 4, 1 -> 5

    Counts (p a power of two): rounds = log2(p); messages = log2(p);
        blocks = p/2*log2(p); scratch = p-1+p/2 if p > 1 else 0
    Constraints: none (the hypercube itself needs a power of two).
    Reference: Thakur, Rabenseifner, Gropp 2005; the paper's Table I (RD).
    """
    p, b = topology.size, Builder(rank)
    q = 1 << (p.bit_length() - 1)
    others = [r for r in range(p) if r != rank]
    if rank >= q:
        with b.round():
            b.copy(SEND[rank], RECV[rank])
            b.send(rank - q, SEND[others])
        b.recv(rank - q, RECV[others])
        return b.build()
    hold = _Holdings(b)
    with b.round():
        b.copy(SEND[rank], RECV[rank])
        b.copy(SEND[others], hold.take([(rank, d) for d in others]))
        if rank + q < p:
            b.recv(rank + q, hold.take([(rank + q, d) for d in range(p) if d != rank + q]))
    for k in range(q.bit_length() - 1):
        bit, partner = 1 << k, rank ^ (1 << k)
        with b.round():
            incoming = hold.take(_crossing(p, q, partner, bit))
            b.recv(partner, incoming, tag=1)
            b.send(partner, hold.give(_crossing(p, q, rank, bit)), tag=1)
        hold.recycle()
    if rank + q < p:
        b.send(rank + q, hold.give([(s, rank + q) for s in range(p) if s != rank + q]))
    b.copy(hold.give([(s, rank) for s in others]), RECV[others])
    return b.build()


def _crossing(p: int, q: int, rank: int, bit: int) -> list[tuple[int, int]]:
    """(source, destination) of the blocks that ``rank`` hands over in the step of ``bit``."""
    sources = [s for s in range(p) if (s % q ^ rank) < bit]
    targets = [d for d in range(p) if (d % q ^ rank) & (2 * bit - 1) == bit]
    return [(s, d) for s in sources for d in targets]


class _Holdings:
    """Blocks in transit at one rank: where in scratch each lies, and which places are free."""

    def __init__(self, b: Builder) -> None:
        self._b = b
        self._at: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._given: list[int] = []

    def take(self, blocks: list[tuple[int, int]]) -> Region:
        """Places for ``blocks``, in free places first."""
        missing = len(blocks) - len(self._free)
        if missing > 0:
            start = self._b.scratch(missing).offset
            self._free.extend(range(start, start + missing))
        places, self._free = self._free[: len(blocks)], self._free[len(blocks) :]
        self._at.update(zip(blocks, places, strict=True))
        return SCRATCH[places]

    def give(self, blocks: list[tuple[int, int]]) -> Region:
        """Where ``blocks`` lie; the places are free after `recycle`."""
        places = [self._at.pop(block) for block in blocks]
        self._given += places
        return SCRATCH[places]

    def recycle(self) -> None:
        """What was given has left."""
        self._free = sorted(self._free + self._given)
        self._given = []


@register(
    ALLTOALL,
    window_parameter(0, "messages outstanding per stream, 0 = all", 0, 1, 4, minimum=0),
    search=lambda topology: grid(window=(2, 4, 8, 16)),
)
def eager(topology: Topology, rank: int, *, window: int) -> Schedule:
    """The paper's Algorithm 2: pairwise within the node overlapped with pairwise across nodes.

    Contract: alltoall. All receives are posted, then sends of two streams alternate.

        node 0: 0 1 2   | rank 0 across: 3 4 5
        node 1: 3 4 5   | rank 0 within: 1 2      order: 3 1 4 2 5

    As printed, the algorithm takes partners rank ^ i and rank ^ (i + gpn - 1), which
    needs powers of two, and its bounds leave out the last partner across; here each
    stream takes its partners in rotation (node by node, lane by lane), so that all
    are covered on any layout. ``window`` bounds each stream; the paper posts all.
    Counts: rounds = min(1, p-1); messages = p-1; blocks = p-1; network_messages = p-m; scratch = 0
    Constraints: none. Not in place.
    Reference: Khorassani et al. 2021, section III-B, Algorithm 2.
    """
    b = Builder(rank)
    node, lane, nodes = topology.node_of[rank], topology.lane_of[rank], topology.nodes
    by_distance = [nodes[(node + i) % len(nodes)] for i in range(len(nodes))]
    rotated = [[ranks[(lane + i) % len(ranks)] for i in range(len(ranks))] for ranks in by_distance]
    near, far = rotated[0][1:], [peer for ranks in rotated[1:] for peer in ranks]
    b.copy(SEND[rank], RECV[rank])
    for source in near + far:
        b.recv(source, RECV[source])
    sent: dict[bool, list[int]] = {True: [], False: []}
    for i in range(max(len(near), len(far))):
        for across, peers in ((True, far), (False, near)):
            if i < len(peers):
                stream = sent[across]
                after = [stream[i - window]] if window and i >= window else []
                stream.append(b.send(peers[i], SEND[peers[i]], after=after))
    return b.build()
