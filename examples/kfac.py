"""A step as in K-FAC: ranks invert the factors of their own layers, and gather those of all.

    mpiexec -n 8 python examples/kfac.py --size 128 --layers 20 --steps 20

A layer has two symmetric matrices, its factors, as large as its input and its output. Layers
are of many sizes, and given to ranks such that the work is balanced, so every rank has another
number of them, and of bytes. Inverses are computed where their layer is, then gathered on all
ranks: with mpi4py's Allgatherv, and with a plan of hiercoll's that is made once and started once
per step. They are compared with those that each rank computes alone. The times are those of
gathering: all else is the same for both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import hiercoll

Matrix = NDArray[np.float64]
DAMPING = 0.1


def share_out(widths: Sequence[int], ranks: int) -> list[list[int]]:
    """The layers of each rank: the costliest first, each to the rank with the least work."""
    cost = [widths[i] ** 3 + widths[i + 1] ** 3 for i in range(len(widths) - 1)]
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for layer in sorted(range(len(cost)), key=lambda i: -cost[i]):
        min(owned, key=lambda mine: sum(cost[i] for i in mine)).append(layer)
    return owned


def inverses(widths: Sequence[int], layer: int, step: int) -> Matrix:
    """Those of a layer's two damped factors, one after the other. The factors stand for statistics of training."""
    choice = np.random.default_rng((step, layer))
    made = []
    for width in widths[layer : layer + 2]:
        samples = choice.standard_normal((2 * width, width))
        factor = samples.T @ samples / len(samples)
        made.append(np.linalg.inv(factor + DAMPING * np.eye(width)).ravel())
    return np.concatenate(made)


def main(arguments: Sequence[str] | None = None, comm: MPI.Intracomm = MPI.COMM_WORLD, quiet: bool = True) -> bool:
    """Invert, gather, check, time. Raises SystemExit on all ranks if any has wrong data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128, help="width of the widest layer")
    parser.add_argument("--layers", type=int, default=20, help="if fewer than ranks, some ranks have none")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    choice = np.random.default_rng(options.layers)
    widths = [int(width) for width in choice.integers(1, options.size + 1, options.layers + 1)]
    owned = share_out(widths, comm.size)
    counts = [sum(widths[i] ** 2 + widths[i + 1] ** 2 for i in mine) for mine in owned]
    own, everything = np.empty(counts[comm.rank]), np.empty(sum(counts))
    plan = hiercoll.allgatherv_init(comm, own, [everything, counts])
    ways: dict[str, Callable[[], Any]] = {
        "native": lambda: comm.Allgatherv(own, [everything, counts]),
        "hiercoll": plan,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    nothing = np.empty(0)
    for step in range(options.steps + 1):
        own[:] = np.concatenate([nothing, *(inverses(widths, i, step) for i in owned[comm.rank])])
        expected = np.concatenate([nothing, *(inverses(widths, i, step) for mine in owned for i in mine)])
        for way in list(ways)[:: -1 if step % 2 else 1]:
            everything.fill(np.nan)
            comm.Barrier()
            begin = MPI.Wtime()
            ways[way]()
            times[way].append(comm.allreduce(MPI.Wtime() - begin, MPI.MAX))
            if not comm.allreduce(np.allclose(everything, expected), MPI.LAND):
                raise SystemExit(f"kfac: wrong data in step {step} with {way}")
    plan.free()
    if comm.rank == 0 and not quiet:
        # The first step is the first use of connections, and does not count.
        native, ours = (1e3 * float(np.median(times[way][1:])) for way in ways)
        print(f"kfac, {options.layers} layers, {everything.nbytes:,} bytes of inverses: data right;", end=" ")
        print(f"gathering: native {native:.2f} ms, hiercoll {ours:.2f} ms, ratio {native / ours:.2f}")
    return True


if __name__ == "__main__":
    main(quiet=False)
