"""Learning on links whose rate changes while a program runs."""

from __future__ import annotations

import json

import pytest
from conftest import ENVIRONMENT, Lab

pytestmark = pytest.mark.mpi_skip  # starts jobs of its own
# Calls that learn, before and after the first rank of each host has made its link fifty times slower.
PROGRAM = """
import json, subprocess
import numpy as np
from mpi4py import MPI
import hiercoll
from hiercoll.collectives import COLLECTIVES
from hiercoll.runtime.lifetime import get_session
from hiercoll.tuning.policy import Wanted

SIZE, MOST, SOON = 4096, 1500, 500  # bytes; calls until all has been tried, and until a change is followed
comm = MPI.COMM_WORLD
hiercoll.configure(comm, tune="online")
wanted = Wanted(COLLECTIVES["allgather"], SIZE, False)
made = 0

def call():
    global made
    made += 1
    tokens = np.arange(comm.size)[:, None] * 1000 + made
    got = hiercoll.allgather(comm, np.full(SIZE // 8, tokens[comm.rank, 0]))
    assert (got == tokens).all()

def find(since, most):
    for _ in range(most):
        call()
        learner = get_session(comm).policy.learner(wanted)
        if learner.finding is not None and learner.finding.calls > since and (since or learner.is_settled):
            return learner.finding.calls, learner.finding.native
    raise SystemExit(f"nothing found in {most} calls: {learner.finding}, {learner.trials} trials")

calls, before = find(0, MOST)
for _ in range(200):
    call()
if hiercoll.get_topology(comm).lane_of[comm.rank] == 0:
    subprocess.run("tc qdisc change dev eth0 root tbf rate 4mbit burst 16k limit 64mb".split(), check=True)
comm.Barrier()
_, after = find(calls, SOON)
if comm.rank == 0:
    print(json.dumps([before, after]))
"""


def test_links_that_become_slower(mpi_lab: Lab) -> None:
    """Data stay right, ranks notice, try candidates anew, and find what is best within 500 calls."""
    arguments = ["run", "-l", "2x3", "--env", str(ENVIRONMENT), "--", "python", "-c", PROGRAM]
    before, after = json.loads(mpi_lab.run(*arguments))
    assert after > 2 * before
