"""Four ranks, of which rank 2 does something wrong in its third call; started by test_faults.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import hiercoll
from hiercoll.settings import forced

CULPRIT = 2
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # with which MPICH's launcher tells survivors, and ends them
fault, algorithm, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
dropin = hiercoll.Intracomm(comm)
if algorithm != "learning":
    forced["alltoall"] = ("bruck", {})
FIRST = {"first call": None, "first alltoallv": "auto", "first aggregate": "aggregate"}  # on a communicator
fresh = [comm.Dup() for _ in range(3)] if algorithm in FIRST else []
for each in [comm, *(fresh if FIRST.get(algorithm) else [])]:
    hiercoll.get_topology(each)  # from now on hiercoll serves nonblocking calls


if algorithm == "learning":  # all calls are trials
    hiercoll.configure(comm, tune="online")


def of_the_day() -> MPI.Intracomm:
    """The third communicator in the third call, and in the fourth."""
    return fresh.pop() if len(fresh) > 1 else fresh[0]


sizes = iter((4, 4, 5000, 5000))  # of "growing", whose third call needs more shared memory


def call(items: int = 4) -> None:
    """One alltoall(v), or allgatherv, checked."""
    if algorithm == "growing":
        own, number = np.full(next(sizes), rank), np.arange(size)
        everyone, counts = np.full(size * len(own), -1), np.full(size, len(own))
        hiercoll.allgatherv(comm, own, [everyone, counts], algorithm="shared")
        assert (everyone == np.repeat(number, len(own))).all(), "wrong data returned as right"
        return
    send = np.arange(size * items) + 100 * rank
    recv = np.full(size * items, -1)
    if algorithm == "alltoallv":
        counts = np.full(size, items)
        hiercoll.alltoallv(comm, [send, counts], [recv, counts], algorithm="aggregate")
    elif algorithm == "first call":
        hiercoll.alltoall(of_the_day(), send, recv)
    elif algorithm in FIRST:
        counts = np.full(size, items)
        hiercoll.alltoallv(of_the_day(), [send, counts], [recv, counts], algorithm=FIRST[algorithm])
    elif algorithm == "Ialltoall":
        dropin.Ialltoall(send, recv).Wait()
    elif algorithm == "Ialltoallv":
        counts = np.full(size, items)
        dropin.Ialltoallv([send, counts], [recv, counts]).Wait()
    elif algorithm == "Alltoall_init":
        request = dropin.Alltoall_init(send, recv)
        request.Start()
        request.Wait()
        request.Free()
    else:
        hiercoll.alltoall(comm, send, recv, algorithm="auto" if algorithm == "learning" else algorithm)
    expected = np.concatenate([np.arange(items) + rank * items + 100 * peer for peer in range(size)])
    assert (recv == expected).all(), "wrong data returned as right"


def misbehave() -> None:
    """What the culprit does instead of calling on time."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raising":
        raise RuntimeError("on purpose")
    if fault == "late":
        time.sleep(8)
    if fault == "other call" and algorithm.startswith("I"):
        dropin.Iallgather(np.arange(4), np.empty(4 * size, int)).Wait()
    elif fault == "other call":
        hiercoll.allgather(fresh[0] if fresh else comm, np.arange(4), algorithm="direct")
    if fault == "other size":
        call(5)


for _ in range(2):
    call()
comm.Barrier()
begin = time.monotonic()
problem = ""
try:
    if rank == CULPRIT:
        misbehave()
    call()
except hiercoll.HiercollError as error:
    problem = f"{type(error).__name__}: {error}"
seconds = time.monotonic() - begin
again = ""
try:
    call()
except hiercoll.HiercollError as error:
    again = type(error).__name__
partial = folder / f"{rank}.part"
partial.write_text(json.dumps({"problem": problem, "seconds": seconds, "again": again}))
partial.rename(folder / f"{rank}.json")
late = fault == "late" and algorithm in FIRST  # then it is told, too
others = [peer for peer in range(size) if peer != CULPRIT or fault.startswith("other") or late]
patience = time.monotonic() + (12 if late else 5)
while time.monotonic() < patience and not all((folder / f"{peer}.json").exists() for peer in others):
    time.sleep(0.05)  # a launcher ends all ranks when one ends without success
os._exit(3 if problem else 0)  # after a fault MPI cannot be finalized together
