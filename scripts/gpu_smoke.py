"""One small alltoall of device arrays: whether CuPy, the MPI library and this library work together at all.

mpiexec -n 2 python scripts/gpu_smoke.py
"""

from __future__ import annotations

import cupy
import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll import cuda

WORLD = MPI.COMM_WORLD


def main() -> None:
    """Fails if the data are wrong."""
    cuda.bind(WORLD)
    numbers = np.arange(WORLD.size)
    received = hiercoll.alltoall(WORLD, cupy.asarray(10 * WORLD.rank + numbers))
    np.testing.assert_array_equal(cupy.asnumpy(received), 10 * numbers + WORLD.rank)
    if WORLD.rank == 0:
        print(f"{WORLD.size} ranks, {MPI.get_vendor()}, CuPy {cupy.__version__}: right data")


if __name__ == "__main__":
    main()
