"""Which core a rank runs on while it is measured."""

from __future__ import annotations

import os
from random import Random

from mpi4py import MPI

from hiercoll.topology import cpus_here


class Cores:
    """Moves ranks to other cores where a host has fewer cores than ranks: at random, as many to each.

    Which ranks share a core decides how long a short call takes, by a factor of three and more, and which algorithm is
    fastest. Ranks that yield while they wait, and do not sleep, stay on their core for the whole job. So a figure is to
    be taken with ranks placed in many ways.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Collective."""
        host = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._rank, self._ranks = host.rank, host.size
        self._random = Random(host.bcast(comm.rank))  # the same on all ranks of a host
        host.Free()
        self._cores = sorted(cpus_here())

    def shuffle(self) -> None:
        """Move this rank; it may be moved again. All ranks of the host do."""
        if not 1 < len(self._cores) < self._ranks:
            return
        places = self._random.sample(range(self._ranks), self._ranks)
        os.sched_setaffinity(0, {self._cores[places[self._rank] % len(self._cores)]})
        os.sched_setaffinity(0, self._cores)
