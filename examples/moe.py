"""A mixture of experts: tokens go to the rank of their expert, and come back transformed.

    mpiexec -n 8 python examples/moe.py --size 4096 --width 64 --steps 50

Every rank has tokens (vectors) and one expert. A router, skewed by a power law, sends most
tokens to a few experts, other ones on every step. Ranks tell each other how many tokens come
(alltoall), dispatch them and bring them back (alltoallv), with mpi4py's own collectives and
with hiercoll's. Results are compared, bit by bit, with those computed without communication.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import hiercoll

Tokens = NDArray[np.float32]
WAYS: dict[str, tuple[Any, Any]] = {
    "native": (MPI.Intracomm.Alltoall, MPI.Intracomm.Alltoallv),
    "hiercoll": (hiercoll.alltoall, hiercoll.alltoallv),
}


def route(step: int, rank: int, tokens: int, experts: int) -> NDArray[np.int64]:
    """The expert of each token of a rank. All ranks favour the same ones in a step."""
    favour = np.random.default_rng(step).permutation(1.0 / np.arange(1, experts + 1) ** 1.5)
    return np.random.default_rng((step, rank)).choice(experts, tokens, p=favour / favour.sum())


def transform(tokens: Tokens, expert: Any) -> Tokens:
    """What an expert does: float32 throughout, so that it gives the same bits anywhere."""
    done: Tokens = np.maximum(tokens * (expert + np.float32(1)) - expert, np.float32(0))
    return done


class Layer:
    """The experts of all ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        # Kept from call to call: hiercoll finds the plan of buffers that it knows.
        self.outgoing, self.incoming = np.zeros(comm.size, int), np.zeros(comm.size, int)

    def __call__(self, tokens: Tokens, expert: NDArray[np.int64], way: str) -> Tokens:
        """The tokens of this rank, each transformed by its expert."""
        alltoall, alltoallv = WAYS[way]
        self.outgoing[:] = np.bincount(expert, minlength=self.comm.size)
        alltoall(self.comm, self.outgoing, self.incoming)
        order = np.argsort(expert, kind="stable")
        width = tokens.shape[1]
        there, back = self.incoming * width, self.outgoing * width
        received = np.empty((int(self.incoming.sum()), width), "f4")
        alltoallv(self.comm, [tokens[order], back], [received, there])
        done = transform(received, np.float32(self.comm.rank))
        returned = np.empty_like(tokens)
        alltoallv(self.comm, [done, there], [returned, back])
        result = np.empty_like(tokens)
        result[order] = returned
        return result


def main(arguments: Sequence[str] | None = None, comm: MPI.Intracomm = MPI.COMM_WORLD, quiet: bool = True) -> bool:
    """Dispatch, combine, check, time. Raises SystemExit on all ranks if any has wrong data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="tokens of each rank")
    parser.add_argument("--width", type=int, default=64, help="numbers in a token")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(arguments)
    layer = Layer(comm)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(options.steps + 1):
        expert = route(step, comm.rank, options.size, comm.size)
        for way in list(WAYS)[:: -1 if step % 2 else 1]:
            # Other tokens for each way: what the one before left in memory must not pass for a result.
            choice = np.random.default_rng((step, list(WAYS).index(way), comm.rank))
            tokens = choice.standard_normal((options.size, options.width), "f4")
            comm.Barrier()
            begin = MPI.Wtime()
            result = layer(tokens, expert, way)
            times[way].append(comm.allreduce(MPI.Wtime() - begin, MPI.MAX))
            good = np.array_equal(result, transform(tokens, expert[:, None].astype("f4")))
            if not comm.allreduce(good, MPI.LAND):
                raise SystemExit(f"moe: wrong data in step {step} with {way}")
    if comm.rank == 0 and not quiet:
        # The first step makes plans, and does not count.
        native, ours = (1e3 * float(np.median(times[way][1:])) for way in WAYS)
        print(f"moe, {comm.size} experts, {options.size} tokens of {options.width} per rank: data right;", end=" ")
        print(f"dispatch and combine: native {native:.2f} ms, hiercoll {ours:.2f} ms, ratio {native / ours:.2f}")
    return True


if __name__ == "__main__":
    main(quiet=False)
