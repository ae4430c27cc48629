"""Data-parallel training: gradients averaged over ranks in the background, while the backward pass goes on.

    mpiexec -n 4 python examples/gradients.py --width 256 --layers 6 --steps 20

A network of dense layers in NumPy. The backward pass comes to the last layer first; as soon as the gradients of some
layers fill a bucket, `hiercoll.iallreduce` begins to add it up over the ranks, and the pass goes on with the layers
before. The same training with blocking calls after the pass, and in one process with the batches of all ranks, must
end with the same weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import hiercoll

Array = NDArray[np.float64]


class Network:
    """Dense layers with tanh between, squared error at the end; weights and gradients are one vector each."""

    def __init__(self, width: int, layers: int) -> None:
        self.layers = layers
        self.flat = np.random.default_rng(0).normal(0, width**-0.5, layers * width * width)
        self.gradient = np.zeros_like(self.flat)
        self.weights = self.flat.reshape(layers, width, width)
        self.gradients = self.gradient.reshape(layers, width, width)

    def backward(self, inputs: Array, wanted: Array, ready: Any) -> float:
        """The error; ``ready`` is called with each layer whose gradient is there, the last one first."""
        values = [inputs]
        for weight in self.weights:
            values.append(np.tanh(values[-1] @ weight))
        error = values[-1] - wanted
        slope = error
        for layer in reversed(range(self.layers)):
            slope = slope * (1 - values[layer + 1] ** 2)
            np.matmul(values[layer].T, slope, out=self.gradients[layer])
            slope = slope @ self.weights[layer].T
            ready(layer)
        return float((error**2).sum())


class Averaging:
    """Sums of gradients over ranks, bucket by bucket. A bucket is some layers, one after the other in memory."""

    def __init__(self, comm: MPI.Intracomm, network: Network, per_bucket: int, background: bool, how: Any) -> None:
        self.comm, self.network, self.per_bucket = comm, network, per_bucket
        self.background, self.how = background, how
        self.under_way: list[Any] = []

    def ready(self, layer: int) -> None:
        """The gradient of a layer, and those of all after it, are there."""
        if layer % self.per_bucket == 0 and self.comm.size > 1:
            bucket = self.network.gradients[layer : layer + self.per_bucket]
            if self.background:
                self.under_way.append(hiercoll.iallreduce(self.comm, MPI.IN_PLACE, bucket, **self.how))
            else:
                self.under_way.append(bucket)

    def finish(self) -> None:
        """All sums are there at return."""
        if self.background:
            hiercoll.waitall(self.under_way)
        else:
            for bucket in self.under_way:
                hiercoll.allreduce(self.comm, MPI.IN_PLACE, bucket, **self.how)
        self.under_way.clear()


def train(comm: MPI.Intracomm, options: Any, background: bool) -> tuple[Array, float]:
    """The weights after training on this communicator's batches, and the seconds of a step."""
    network = Network(options.width, options.layers)
    averaging = Averaging(comm, network, options.per_bucket, background, {"algorithm": options.algorithm})
    everything = np.random.default_rng(1).normal(size=(options.steps, 2, options.batch, options.width))
    mine = np.array_split(everything, comm.size, axis=2)[comm.rank]
    comm.Barrier()
    begin = MPI.Wtime()
    for inputs, wanted in mine:
        network.backward(inputs, np.tanh(wanted), averaging.ready)
        averaging.finish()
        network.flat -= options.rate / options.batch * network.gradient
    return network.flat, (MPI.Wtime() - begin) / options.steps


def main(arguments: Sequence[str] | None = None, comm: MPI.Intracomm = MPI.COMM_WORLD, quiet: bool = True) -> bool:
    """Train in all ways, and compare. Raises SystemExit on all ranks if any has other weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--per-bucket", type=int, default=2, help="layers whose gradients travel together")
    parser.add_argument("--batch", type=int, default=64, help="examples of a step, on all ranks together")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--algorithm", default="auto", help="of the allreduce")
    options = parser.parse_args(arguments)
    if options.layers % options.per_bucket:
        parser.error("--per-bucket must divide --layers")
    alone, _ = train(MPI.COMM_SELF, options, background=False)
    for background in (False, True):
        weights, seconds = train(comm, options, background)
        slowest = comm.allreduce(seconds, op=MPI.MAX)
        if not comm.allreduce(np.allclose(weights, alone, rtol=1e-9, atol=1e-12), MPI.LAND):
            raise SystemExit("gradients: other weights than in one process")
        if comm.rank == 0 and not quiet:
            print(f"{'in the background' if background else 'after the pass':18}{slowest * 1e3:8.2f} ms per step")
    if comm.rank == 0 and not quiet:
        print(f"{comm.size} ranks: the same weights as in one process")
    return True


if __name__ == "__main__":
    main(quiet=False)
