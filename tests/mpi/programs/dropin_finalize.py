"""A program that ends MPI itself has its report, though the folder is not there.

Run by: python -m hiercoll --report-file /nonexistent/report.json --report=sync --algorithm alltoall=bruck
Expect: a report
"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
root = comm.size - 1
recv = np.empty(comm.size)
comm.Alltoall(np.arange(float(comm.size)), recv)
assert (recv == comm.rank).all()
# What ranks other than the root give for what they do not receive may be anything.
whole, counts = np.empty(comm.size) if comm.rank == root else None, [1] * comm.size
comm.Gatherv(recv[:1], (whole, counts), root=root)
comm.Gather(recv[:1], recv if comm.rank == root else np.empty(1), root=root)
comm.Gather(recv[:1], recv if comm.rank == root else [], root=root)
comm.Scatter(recv if comm.rank == root else None, recv[:1], root=root)
comm.Scatter(recv if comm.rank == root else None, MPI.IN_PLACE if comm.rank == root else recv[:1], root=root)
MPI.Finalize()
