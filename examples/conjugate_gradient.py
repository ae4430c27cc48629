"""Conjugate gradients whose every bit is the same on 1, 2, 4 or 8 ranks, wherever they are placed.

    mpiexec -n 4 python examples/conjugate_gradient.py --size 256 --steps 100

The matrix is the 5-point Laplacian of a square grid; each rank has some of its rows. All that ranks do by themselves
is element by element, so only the two dot products of a step could differ with the number of ranks. Here they do not:

- The grid is cut into `CHUNKS` equal parts, whatever the number of ranks; a part's sum is formed in one place.
- A rank combines the sums of its parts by neighbours, again and again: that is a subtree of the tree over all parts.
- `hiercoll.allreduce(..., order="fixed")` combines the ranks' sums by the rest of that tree, with any algorithm that
  is proved to do so.

Each run solves the problem on every rank alone, too, and compares the residuals of all steps, bit by bit. With
--native, where the MPI library chooses the order, they may differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import hiercoll

CHUNKS = 8
Grid = NDArray[np.float64]


def neighbours_combined(sums: list[float]) -> float:
    """The sum of a power of two of numbers, by neighbours."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


class Laplacian:
    """The rows of the grid that this rank has, and what it takes from its neighbours."""

    def __init__(self, comm: MPI.Intracomm, size: int, algorithm: str = "auto", native: bool = False) -> None:
        if CHUNKS % comm.size or size % CHUNKS:
            raise SystemExit(f"{comm.size} ranks must divide {CHUNKS}, and that the size, {size}")
        self.comm, self.algorithm, self.native = comm, algorithm, native
        self.rows, self.size = size // comm.size, size
        last = comm.size - 1
        self.above = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
        self.below = comm.rank + 1 if comm.rank < last else MPI.PROC_NULL
        self.padded = np.zeros((self.rows + 2, size + 2))  # outside of the grid all is 0

    def __call__(self, x: Grid) -> Grid:
        """The matrix times a vector."""
        inner, padded = slice(1, -1), self.padded
        padded[inner, inner] = x
        self.comm.Sendrecv(x[0], self.above, recvbuf=padded[-1, inner], source=self.below)
        self.comm.Sendrecv(x[-1], self.below, recvbuf=padded[0, inner], source=self.above)
        return 4 * x - padded[:-2, inner] - padded[2:, inner] - padded[inner, :-2] - padded[inner, 2:]

    def dot(self, x: Grid, y: Grid) -> float:
        """The dot product of two vectors."""
        products = np.ascontiguousarray(x * y)
        sums = [float(np.add.reduce(part, axis=None)) for part in np.split(products, CHUNKS // self.comm.size)]
        mine, total = np.array([neighbours_combined(sums)]), np.empty(1)
        if self.native:
            self.comm.Allreduce(mine, total)
        else:
            hiercoll.allreduce(self.comm, mine, total, order="fixed", algorithm=self.algorithm)
        return float(total[0])


def solve(matrix: Laplacian, right: Grid, steps: int) -> tuple[Grid, list[float]]:
    """The solution after so many steps, and the squares of the residuals' norms."""
    x, residual = np.zeros_like(right), right.copy()
    direction, square = residual.copy(), matrix.dot(residual, residual)
    squares = [square]
    for _ in range(steps):
        image = matrix(direction)
        length = square / matrix.dot(direction, image)
        x += length * direction
        residual -= length * image
        before, square = square, matrix.dot(residual, residual)
        direction = residual + square / before * direction
        squares.append(square)
    return x, squares


def rows_of(size: int, rank: int, ranks: int) -> Grid:
    """A rank's rows of a right-hand side, from numbers that do not depend on how many ranks there are."""
    whole = np.random.default_rng(1).normal(size=(size, size)) * 10.0 ** np.linspace(-6, 6, size)
    return np.split(whole, ranks)[rank].copy()


def main(arguments: Sequence[str] | None = None, comm: MPI.Intracomm = MPI.COMM_WORLD, quiet: bool = True) -> bool:
    """Solve, on each rank alone, too, and compare. Raises SystemExit on all ranks if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help=f"rows and columns of the grid, a multiple of {CHUNKS}")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--algorithm", default="auto", help="of the allreduce")
    parser.add_argument("--native", action="store_true", help="by the MPI library's own, in whatever order it has")
    options = parser.parse_args(arguments)
    ranks = min(CHUNKS, 1 << comm.size.bit_length() - 1)  # of more, the last ones only look on
    part = comm.Split(comm.rank < ranks, comm.rank)
    good, seconds, squares = True, 0.0, [0.0]
    if comm.rank < ranks:
        right, begin = rows_of(options.size, part.rank, part.size), MPI.Wtime()
        squares = solve(Laplacian(part, options.size, options.algorithm, options.native), right, options.steps)[1]
        seconds = MPI.Wtime() - begin
        alone = Laplacian(MPI.COMM_SELF, options.size)
        good = solve(alone, rows_of(options.size, 0, 1), options.steps)[1] == squares
    if comm.rank == 0 and not quiet:
        digest = sha256(np.array(squares).tobytes()).hexdigest()[:16]
        print(f"{ranks} ranks, {seconds:.2f} s: residual {squares[0] ** 0.5:.3e} -> {squares[-1] ** 0.5:.3e},", end=" ")
        print(f"digest {digest}, {'the same bits as on one rank' if good else 'other bits than on one rank'}")
    part.Free()
    if not comm.allreduce(good, MPI.LAND) and not options.native:
        raise SystemExit("conjugate_gradient: other bits than on one rank")
    return True


if __name__ == "__main__":
    main(quiet=False)
