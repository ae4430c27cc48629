"""What published allgather, allreduce and reduce_scatter algorithms do, as the schedule of one of N like ranks.

Each algorithm is a list of rounds: messages out and in, all the same way, then a reduction. Only sizes and what waits
for what count here; peers are stand-ins. For allgather and reduce_scatter a block is what a rank contributes or keeps,
for allreduce the vector is cut into blocks. With h the doubling blocks 1, 2, 4, .., N - 2^k:

    allgather       ring                            N-1 messages of 1 block
                    neighbor                        1, then N/2-1 of 2 blocks (Chen et al. 2005)
                    recursive-doubling              h; N a power of two
                    bruck(s)                        h; all N blocks are copied at the end (Bruck et al. 1997)
                    sparbit, bine-block-by-block    h, each block its own message
                    bine-2-blocks                   h, each in two messages
                    bine-send, bine-permute         h, and a message of 1 block before, or a copy of N after
    reduce_scatter  ring, pairwise                  N-1 of 1 block, each reduced
                    recursive-halving, bine-*       h backwards, each reduced
    allreduce       recursive-doubling, bine-lat    log2 N vectors, each reduced
                    rabenseifner, bine-bdw          recursive halving, then doubling, of the vector
                    bine-block-by-block             the same, each block its own message; any even N
                    ring                            2 (N-1) messages of 1/N, half of them reduced

Where halving needs a power of two, the ranks beyond give their vector to another one before and get the result from it
after. Sources: Thakur, Rabenseifner, Gropp 2005 (ring, Bruck, recursive doubling and halving, Rabenseifner); Loch,
Koslovski 2021 (Sparbit); De Sensi et al. 2024 (Swing) and 2025 (Bine trees), whose doubling has the sizes of the
classic one between other ranks. Read from names and papers, not from the sources of the programs that were timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from hiercoll.collectives import ALLGATHER, ALLREDUCE, REDUCE_SCATTER
from hiercoll.errors import ConstraintError, ParameterError
from hiercoll.schedule import RECV, SEND, Builder, Schedule


class Round(NamedTuple):
    """Messages of so many blocks each, that are under way together: to, and from, a rank ``distance`` away. Blocks that
    are then copied or reduced. ``out`` and ``into``: whether there are messages that way."""

    sizes: Sequence[int]
    distance: int = 1
    reduced: int = 0
    copied: int = 0
    out: bool = True
    into: bool = True


Rounds: TypeAlias = "list[Round]"
ByRanks: TypeAlias = "Callable[[int], Rounds]"


class Algorithm(NamedTuple):
    """Rounds by the number of ranks, which is to be ``ranks``; into how many blocks it cuts a vector."""

    rounds: ByRanks
    ranks: str
    blocks: Callable[[int], int]


ANY, EVEN, POWER = "any number", "an even number", "a power of two"


def doubling(n: int) -> list[int]:
    """Blocks by round while the blocks held double, up to all ``n``."""
    found, have = [], 1
    while have < n:
        found.append(min(have, n - have))
        have += found[-1]
    return found


def _doubled(n: int, parts: Callable[[int], Sequence[int]] = lambda blocks: (blocks,)) -> Rounds:
    return [Round(parts(blocks), 2**index) for index, blocks in enumerate(doubling(n))]


def _block_by_block(n: int) -> Rounds:
    return _doubled(n, lambda blocks: [1] * blocks)


def _in_two(n: int) -> Rounds:
    return _doubled(n, lambda blocks: [blocks] if blocks == 1 else [blocks - blocks // 2, blocks // 2])


def _back(rounds: Rounds) -> Rounds:
    """The way back, on which what arrives is reduced."""
    return [each._replace(reduced=sum(each.sizes)) for each in reversed(rounds)]


def _power(n: int) -> int:
    """The largest power of two up to ``n``."""
    return 1 << (n.bit_length() - 1)


def _halved(n: int, blocks: int) -> Rounds:
    """Recursive halving of a vector of ``blocks`` among the largest power of two of ``n`` ranks."""
    steps = range(1, n.bit_length())
    return [Round([blocks >> step], 2 ** (step - 1), reduced=blocks >> step) for step in steps]


def _folded(n: int, vector: int, result: int, inner: Rounds) -> Rounds:
    """``inner``, seen by a rank that speaks for one of those beyond a power of two as well, if there are any."""
    if n == _power(n):
        return inner
    return [Round([vector], reduced=vector, out=False), *inner, Round([result], into=False)]


def _copy(blocks: int) -> Rounds:
    return [Round([], copied=blocks)]


def _ring(n: int) -> Rounds:
    return [Round([1])] * (n - 1)


def _neighbor(n: int) -> Rounds:
    return [Round([1]), *[Round([2])] * (n // 2 - 1)]


def _pairwise(n: int) -> Rounds:
    return [Round([1], step, reduced=1) for step in range(1, n)]


def _whole_vectors(n: int) -> Rounds:
    return _folded(n, 1, 1, [Round([1], 2**step, reduced=1) for step in range(n.bit_length() - 1)])


def _rabenseifner(n: int) -> Rounds:
    there, power = _halved(n, _power(n)), _power(n)
    return _folded(n, power, power, there + [each._replace(reduced=0) for each in there[::-1]])


def _gather(rounds: ByRanks, ranks: str = ANY) -> Algorithm:
    return Algorithm(lambda n: _copy(1) + rounds(n), ranks, lambda n: 1)


def _scatter(rounds: ByRanks, ranks: str = ANY) -> Algorithm:
    return Algorithm(rounds, ranks, lambda n: 1)


def _reduce(rounds: ByRanks, blocks: Callable[[int], int], ranks: str = ANY) -> Algorithm:
    return Algorithm(lambda n: _copy(blocks(n)) + rounds(n), ranks, blocks)


_bruck = _gather(lambda n: _doubled(n) + _copy(n))
_sent = _gather(lambda n: _ring(2) + _doubled(n), POWER)
_permuted = _gather(lambda n: _doubled(n) + _copy(n), POWER)
_halving = _reduce(_rabenseifner, _power)
_vectors = _reduce(_whole_vectors, lambda n: 1)
KNOWN: dict[str, dict[str, Algorithm]] = {
    ALLGATHER.name: {
        "ring": _gather(_ring),
        "neighbor": _gather(_neighbor, EVEN),
        "recursive-doubling": _gather(_doubled, POWER),
        "bruck": _bruck,
        "brucks": _bruck,
        "sparbit": _gather(_block_by_block),
        "bine-block-by-block": _gather(_block_by_block, POWER),
        "bine-block-by-block-any-even": _gather(_block_by_block, EVEN),
        "bine-2-blocks": _gather(_in_two, POWER),
        "bine-send-static": _sent,
        "bine-send-remap": _sent,
        "bine-permute-static": _permuted,
        "bine-permute-remap": _permuted,
    },
    REDUCE_SCATTER.name: {
        "ring": _scatter(lambda n: _back(_ring(n))),
        "pairwise": _scatter(_pairwise),
        "recursive-halving": _scatter(lambda n: _folded(n, n, 1, _halved(n, n))),
        "recursive-distance-doubling": _scatter(lambda n: _back(_doubled(n)), POWER),
        "bine-send-remap": _scatter(lambda n: _back(_doubled(n)) + _ring(2), POWER),
        "bine-permute-remap": _scatter(lambda n: _copy(n) + _back(_doubled(n)), POWER),
        "bine-block-by-block": _scatter(lambda n: _back(_block_by_block(n)), POWER),
        "bine-block-by-block-any-even": _scatter(lambda n: _back(_block_by_block(n)), EVEN),
    },
    ALLREDUCE.name: {
        "recursive-doubling": _vectors,
        "bine-lat": _vectors,
        "rabenseifner": _halving,
        "bine-bdw-static": _halving,
        "bine-bdw-remap": _halving,
        "bine-block-by-block-any-even": _reduce(
            lambda n: _back(_block_by_block(n)) + _block_by_block(n), lambda n: n, EVEN
        ),
        "ring": _reduce(lambda n: _back(_ring(n)) + _ring(n), lambda n: n),
    },
}


def known(collective: str, name: str, n: int) -> Algorithm:
    """What is known of an algorithm of ``n`` ranks. Raises ParameterError for a name that says too little, and
    ConstraintError for a number of ranks that does not suit."""
    found = KNOWN.get(collective, {}).get(name)
    if found is None:
        raise ParameterError("algorithm", f"one of {collective} whose messages are known", repr(name))
    if (found.ranks == EVEN and n % 2) or (found.ranks == POWER and n != _power(n)):
        raise ConstraintError("ranks", f"{found.ranks} for {name}", n)
    return found


def schedule(collective: str, name: str, n: int) -> Schedule:
    """What one of ``n`` ranks does. Raises as `known`."""
    algorithm = known(collective, name, n)
    b = Builder(0, blocks=algorithm.blocks(n))
    for index, each in enumerate(algorithm.rounds(n)):
        with b.round():
            for part, size in enumerate(each.sizes):
                tag = index * n + part
                if each.into:
                    b.recv(-each.distance % n, RECV[0:size], tag=tag)
                if each.out:
                    b.send(each.distance % n, SEND[0:size], tag=tag)
        with b.round():
            if each.copied:
                b.copy(SEND[0 : each.copied], RECV[0 : each.copied])
            if each.reduced:
                b.reduce(SEND[0 : each.reduced], RECV[0 : each.reduced], RECV[0 : each.reduced])
    return b.build()
