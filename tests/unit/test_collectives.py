"""Contracts: what is there before, what must be there after."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hiercoll.collectives import COLLECTIVES
from hiercoll.contracts import UNDEFINED, Contract
from hiercoll.errors import ArgumentError

EVEN = [name for name, record in COLLECTIVES.items() if record.is_even]
EVERY = [
    Contract(name, p, segments, root=p - 1, blocks=blocks)
    for name, p, segments, blocks in product(EVEN, (1, 2, 5), (1, 3), (1, 4))
]
each = pytest.mark.parametrize("contract", EVERY, ids=lambda c: f"{c.collective}-{c.size}-{c.segments}-{c.blocks}")


def held(contract: Contract, rank: int, block: int) -> list[int]:
    """The tokens of one block of a rank's send buffer."""
    k = contract.segments
    tokens: list[int] = contract.initial(rank)["send"][block * k : (block + 1) * k].tolist()
    return tokens


def due(contract: Contract, rank: int) -> list[list[int]]:
    """The tokens that each block of a rank's receive buffer must hold in the end."""
    tokens: list[list[int]] = contract.expected(rank).reshape(-1, contract.segments).tolist()
    return tokens


@pytest.mark.parametrize(
    ("collective", "send", "recv"),
    [  # of ranks 0, 1, 2 with root 1 and vectors of 4 blocks
        ("alltoall", (3, 3, 3), (3, 3, 3)),
        ("allgather", (1, 1, 1), (3, 3, 3)),
        ("barrier", (1, 1, 1), (3, 3, 3)),
        ("gather", (1, 1, 1), (0, 3, 0)),
        ("scatter", (0, 3, 0), (1, 1, 1)),
        ("bcast", (0, 4, 0), (4, 4, 4)),
        ("reduce", (4, 4, 4), (0, 4, 0)),
        ("allreduce", (4, 4, 4), (4, 4, 4)),
        ("reduce_scatter", (3, 3, 3), (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("segments", [1, 2])
def test_sizes(collective: str, send: tuple[int, ...], recv: tuple[int, ...], segments: int) -> None:
    """As MPI has them, in blocks; contents are in segments."""
    contract = Contract(collective, 3, segments, root=1, blocks=4)
    for rank in range(3):
        assert contract.sizes(rank) == {"send": send[rank], "recv": recv[rank]}
        initial = contract.initial(rank)
        assert initial["send"].shape == (send[rank] * segments,)
        assert initial["recv"].shape == (recv[rank] * segments,)
        assert contract.expected(rank).shape == (recv[rank] * segments,)


@each
def test_contents_before(contract: Contract) -> None:
    """No two segments in the world hold the same; nothing has been received."""
    tokens = np.concatenate([contract.initial(rank)["send"] for rank in range(contract.size)])
    assert len(set(tokens.tolist())) == len(tokens) and UNDEFINED not in tokens
    assert not any(contract.is_reduction(token) for token in tokens)
    for rank in range(contract.size):
        assert set(contract.initial(rank)["recv"].tolist()) <= {UNDEFINED}


@each
def test_contents_after(contract: Contract) -> None:
    """Each block comes from where the collective's definition says, segments in order."""
    c, everyone = contract, range(contract.size)
    for rank in everyone:
        after = due(c, rank)
        if c.collective == "alltoall":
            assert after == [held(c, source, rank) for source in everyone]
        elif c.collective in ("allgather", "barrier", "gather"):
            wanted = c.collective != "gather" or rank == c.root
            assert after == ([held(c, source, 0) for source in everyone] if wanted else [])
        elif c.collective == "scatter":
            assert after == [held(c, c.root, rank)]
        elif c.collective == "bcast":
            assert after == [held(c, c.root, block) for block in range(c.blocks)]
        else:
            if c.collective == "reduce_scatter":
                blocks = [rank]
            else:
                blocks = list(range(c.blocks)) if c.collective == "allreduce" or rank == c.root else []
            assert all(c.is_reduction(token) for tokens in after for token in tokens)
            parts = [[c.contributors(token) for token in tokens] for tokens in after]
            assert parts == [
                [[held(c, source, block)[part] for source in everyone] for part in range(c.segments)]
                for block in blocks
            ]


@pytest.mark.parametrize(
    ("collective", "where"),
    [  # where what was send[i] lies, by rank
        ("alltoall", ([0, 1, 2], [0, 1, 2], [0, 1, 2])),
        ("allgather", ([0], [1], [2])),
        ("allreduce", ([0, 1], [0, 1], [0, 1])),
        ("reduce_scatter", ([0, 1, 2], [0, 1, 2], [0, 1, 2])),
        ("bcast", ([], [0, 1], [])),
        ("scatter", ([], [0, 1, 2], [])),
    ],
)
@pytest.mark.parametrize("segments", [1, 2])
def test_in_place(collective: str, where: tuple[list[int], ...], segments: int) -> None:
    """The input lies in the receive buffer, which is large enough, and there is no send buffer."""
    plain = Contract(collective, 3, segments, root=1, blocks=2)
    contract = Contract(collective, 3, segments, root=1, blocks=2, in_place=True)
    for rank in range(3):
        sizes, initial = contract.sizes(rank), contract.initial(rank)
        assert sizes["send"] == len(initial["send"]) == 0
        assert sizes["recv"] * segments == len(initial["recv"])
        assert sizes["recv"] == max(len(where[rank]), plain.sizes(rank)["recv"])
        cells = initial["recv"].reshape(-1, segments).tolist()
        for block, position in enumerate(where[rank]):
            assert cells[position] == held(plain, rank, block)
        others = [cell for i, cell in enumerate(cells) if i not in where[rank]]
        assert all(cell == [UNDEFINED] * segments for cell in others)
        assert contract.expected(rank).tolist() == plain.expected(rank).tolist()


@each
def test_moves(contract: Contract) -> None:
    """Whether a rank's one buffer is read, and whether it is written."""
    for rank in range(contract.size):
        is_root = rank == contract.root
        expected = {"bcast": (is_root, not is_root), "alltoall": (True, contract.size > 1), "reduce": (True, is_root)}
        if contract.collective in expected:
            assert contract.moves(rank) == expected[contract.collective]


def test_in_words() -> None:
    """Tokens read as what they stand for."""
    contract = Contract("alltoall", 4)
    assert contract.describe(held(contract, 2, 3)[0]) == "block 3 of rank 2"
    assert contract.describe(UNDEFINED) == "nothing"
    cut = Contract("bcast", 2, 3, root=1, blocks=5)
    assert cut.describe(held(cut, 1, 4)[2]) == "block 4 segment 2 of rank 1"
    summed = Contract("reduce_scatter", 3)
    assert summed.describe(due(summed, 1)[0][0]) == "the reduction of block 1"


@pytest.mark.parametrize("name", ["neighbor_alltoall", "", "Alltoall"])
def test_unknown_collective(name: str) -> None:
    """The error names those that exist."""
    with pytest.raises(ArgumentError) as caught:
        Contract(name, 2)
    error = caught.value
    assert (error.argument, error.got) == ("collective", repr(name))
    assert all(known in error.expected for known in COLLECTIVES)
