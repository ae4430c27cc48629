"""A distributed 3-D FFT: pencils on a two-dimensional grid of ranks, forward and back.

    mpiexec -n 8 python examples/fft3d.py --size 64 64 64 --steps 20

Each transform is three local ones, along one axis each, with a transposition in between
within a row, then within a column of the grid: an Alltoall on a sub-communicator, or an
Alltoallv where the grid does not divide the extents. Every step has new data, is done with
mpi4py's own collectives and with hiercoll's, and is checked against numpy.fft.fftn (large
arrays: only that the inverse brings the data back).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import hiercoll

Block = NDArray[np.complex128]
WAYS: dict[str, tuple[Any, Any]] = {
    "native": (MPI.Intracomm.Alltoall, MPI.Intracomm.Alltoallv),
    "hiercoll": (hiercoll.alltoall, hiercoll.alltoallv),
}
GATHERED = 1 << 22  # elements of the largest array that rank 0 transforms as a whole


def shares(extent: int, parts: int) -> list[int]:
    """An extent in parts as equal as can be, as numpy.array_split has them."""
    return [extent // parts + (i < extent % parts) for i in range(parts)]


def span(extent: int, parts: int, index: int) -> slice:
    """Where one of the parts lies."""
    return slice(sum(shares(extent, parts)[:index]), sum(shares(extent, parts)[: index + 1]))


class Transposition:
    """From an array whose axis ``apart`` is spread over the ranks, to one whose axis ``whole`` is."""

    def __init__(self, comm: MPI.Comm, shape: Sequence[int], apart: int, whole: int) -> None:
        self.comm, self.apart, self.whole = comm, apart, whole
        cut, joined = shares(shape[whole], comm.size), shares(shape[apart], comm.size)
        after = [*shape[:whole], cut[comm.rank], *shape[whole + 1 :]]
        self.shapes = [(*after[:apart], part, *after[apart + 1 :]) for part in joined]
        self.sent = np.array(cut) * joined[comm.rank] * shape[3 - apart - whole]
        self.received = np.array([prod(each) for each in self.shapes])
        self.even = len(set(cut)) == len(set(joined)) == 1  # the same on all ranks
        # Kept from call to call: hiercoll finds the plan of buffers that it knows.
        self.send, self.recv = np.empty(self.sent.sum(), "c16"), np.empty(self.received.sum(), "c16")

    def __call__(self, block: Block, way: str) -> Block:
        """This rank's part of the array, before to after."""
        alltoall, alltoallv = WAYS[way]
        np.concatenate([piece.ravel() for piece in np.array_split(block, self.comm.size, self.whole)], out=self.send)
        if self.even:
            alltoall(self.comm, self.send, self.recv)
        else:
            alltoallv(self.comm, [self.send, self.sent], [self.recv, self.received])
        pieces = np.split(self.recv, np.cumsum(self.received)[:-1])
        return np.concatenate([p.reshape(shape) for p, shape in zip(pieces, self.shapes, strict=True)], self.apart)


class Pencils:
    """The transform of arrays of one shape: axis 2 is whole before it, axis 0 after it."""

    def __init__(self, comm: MPI.Intracomm, shape: Sequence[int]) -> None:
        rows, columns = self.grid = MPI.Compute_dims(comm.size, 2)
        r, c = divmod(comm.rank, columns)
        self.row, self.column = comm.Split(r, c), comm.Split(c, r)
        self.before = (span(shape[0], rows, r), span(shape[1], columns, c), slice(0, shape[2]))
        self.after = (slice(0, shape[0]), span(shape[1], rows, r), span(shape[2], columns, c))
        in_row = (shares(shape[0], rows)[r], shape[1], shape[2])
        in_column = (shape[0], shape[1], shares(shape[2], columns)[c])
        self.there = Transposition(self.row, in_row, 1, 2), Transposition(self.column, in_column, 0, 1)
        self.back = Transposition(self.column, in_column, 1, 0), Transposition(self.row, in_row, 2, 1)

    def forward(self, block: Block, way: str) -> Block:
        """From ``before`` to ``after``."""
        block = self.there[0](np.fft.fft(block, axis=2), way)
        block = self.there[1](np.fft.fft(block, axis=1), way)
        return np.fft.fft(block, axis=0)

    def inverse(self, block: Block, way: str) -> Block:
        """From ``after`` to ``before``."""
        block = self.back[0](np.fft.ifft(block, axis=0), way)
        block = self.back[1](np.fft.ifft(block, axis=1), way)
        return np.fft.ifft(block, axis=2)


def gathered(comm: MPI.Intracomm, shape: Sequence[int], where: tuple[slice, ...], block: Block) -> Block:
    """The whole array, on rank 0."""
    whole = np.full(shape, np.nan, "c16")
    for place, part in comm.gather((where, block)) or []:
        whole[place] = part
    return whole


def main(arguments: Sequence[str] | None = None, comm: MPI.Intracomm = MPI.COMM_WORLD, quiet: bool = True) -> bool:
    """Transform, check, time. Raises SystemExit on all ranks if any has wrong data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=3, default=[64, 64, 64], help="extents of the array")
    parser.add_argument("--steps", type=int, default=20, help="transforms, forward and back, of each way")
    options = parser.parse_args(arguments)
    pencils = Pencils(comm, options.size)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(options.steps + 1):
        for way in list(WAYS)[:: -1 if step % 2 else 1]:
            choice = np.random.default_rng((step, list(WAYS).index(way), comm.rank))
            block = choice.standard_normal((*(s.stop - s.start for s in pencils.before), 2)).view("c16")[..., 0]
            comm.Barrier()
            begin = MPI.Wtime()
            spectrum = pencils.forward(block, way)
            again = pencils.inverse(spectrum, way)
            times[way].append(comm.allreduce(MPI.Wtime() - begin, MPI.MAX))
            good = np.allclose(again, block)
            if prod(options.size) <= GATHERED:
                data = gathered(comm, options.size, pencils.before, block)
                result = gathered(comm, options.size, pencils.after, spectrum)
                good &= comm.rank > 0 or np.allclose(result, np.fft.fftn(data))
            if not comm.allreduce(good, MPI.LAND):
                raise SystemExit(f"fft3d: wrong data in step {step} with {way}")
    if comm.rank == 0 and not quiet:
        # The first step makes plans, and does not count.
        native, ours = (1e3 * float(np.median(times[way][1:])) for way in WAYS)
        print(f"fft3d {options.size} on a grid of {pencils.grid}: data right;", end=" ")
        print(f"forward and back: native {native:.2f} ms, hiercoll {ours:.2f} ms, ratio {native / ours:.2f}")
    pencils.row.Free()
    pencils.column.Free()
    return True


if __name__ == "__main__":
    main(quiet=False)
