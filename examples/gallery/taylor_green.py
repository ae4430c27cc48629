"""The Taylor-Green vortex by a pseudo-spectral method, on mpi4py-fft: a program that knows nothing of hiercoll.

    mpiexec -n 4 python examples/gallery/taylor_green.py --number 32 --steps 5

The incompressible Navier-Stokes equations in rotational form on a periodic cube (Mortensen, Langtangen 2016), a
fourth-order Runge-Kutta step, 2/3 dealiasing by truncation. Each step makes 36 transforms, each of them one transpose
on slabs, two on pencils. Prints the kinetic energy.
"""

from __future__ import annotations

import argparse

import numpy as np
from mpi4py import MPI
from mpi4py_fft import PFFT, newDistArray

VISCOSITY, STEP = 1 / 1600, 0.01


def wavenumbers(transform: PFFT, number: int) -> list[np.ndarray]:
    """Of this rank's part of the spectrum, an open grid."""
    parts = transform.local_slice(True)
    each = [np.fft.fftfreq(number, 1 / number), np.fft.fftfreq(number, 1 / number), np.fft.rfftfreq(number, 1 / number)]
    return np.meshgrid(*(k[part] for k, part in zip(each, parts, strict=True)), indexing="ij", sparse=True)


class Flow:
    """Velocities on the cube, and their spectra."""

    def __init__(self, comm: MPI.Intracomm, number: int, slab: bool) -> None:
        self.transform = PFFT(comm, [number] * 3, axes=(0, 1, 2), dtype=float, slab=slab)
        self.k = wavenumbers(self.transform, number)
        square = sum(k * k for k in self.k)
        self.over = [k / np.where(square == 0, 1, square) for k in self.k]
        self.drag = VISCOSITY * square
        self.keep = np.logical_and.reduce(np.broadcast_arrays(*(abs(k) < number / 3 for k in self.k)))
        self.u = newDistArray(self.transform, False, rank=1)
        self.spectrum = newDistArray(self.transform, True, rank=1)
        x = [2 * np.pi * np.arange(number)[part] / number for part in self.transform.local_slice(False)]
        x, y, z = np.meshgrid(*x, indexing="ij", sparse=True)
        self.u[0], self.u[1], self.u[2] = np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z), 0
        for axis in range(3):
            self.transform.forward(self.u[axis], self.spectrum[axis])

    def rate(self, spectrum: np.ndarray) -> np.ndarray:
        """The time derivative of a spectrum."""
        (kx, ky, kz), u = self.k, self.u
        vorticity = np.empty_like(u)
        curl = [
            ky * spectrum[2] - kz * spectrum[1],
            kz * spectrum[0] - kx * spectrum[2],
            kx * spectrum[1] - ky * spectrum[0],
        ]
        for axis in range(3):
            self.transform.backward(spectrum[axis], u[axis])
            self.transform.backward(1j * curl[axis], vorticity[axis])
        found = np.empty_like(spectrum)
        for axis in range(3):
            one, other = (axis + 1) % 3, (axis + 2) % 3
            self.transform.forward(u[one] * vorticity[other] - u[other] * vorticity[one], found[axis])
        found *= self.keep
        pressure = sum(k * each for k, each in zip(self.k, found, strict=True))
        for axis in range(3):
            found[axis] -= pressure * self.over[axis] + self.drag * spectrum[axis]
        return found

    def advance(self) -> None:
        """A step."""
        begin = np.array(self.spectrum)
        total, at = begin.copy(), begin
        for weight, far in ((1 / 6, 0.5), (1 / 3, 0.5), (1 / 3, 1.0), (1 / 6, 0.0)):
            rate = self.rate(at)
            total += weight * STEP * rate
            at = begin + far * STEP * rate
        self.spectrum[:] = total

    def energy(self, comm: MPI.Intracomm) -> float:
        """Of the whole cube, per volume."""
        for axis in range(3):
            self.transform.backward(self.spectrum[axis], self.u[axis])
        mine = np.array([np.sum(np.square(self.u)), self.u[0].size], float)
        whole = np.empty_like(mine)
        comm.Allreduce(mine, whole)
        return float(whole[0] / whole[1] / 2)


def main() -> None:
    """Advance and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=32, help="points along each axis")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pencils", action="store_true", help="cut two axes, not one")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    flow = Flow(comm, options.number, not options.pencils)
    for step in range(options.steps):
        flow.advance()
        energy = flow.energy(comm)
        if comm.rank == 0:
            print(f"step {step + 1}: kinetic energy {energy:.12f}", flush=True)


if __name__ == "__main__":
    main()
