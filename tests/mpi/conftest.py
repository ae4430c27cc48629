"""Tests that all ranks of an mpiexec run together.

A failure on any rank fails the test on all, with that rank's report; a test that hangs
is ended with the stacks of the rank that noticed first.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from mpi4py import MPI

import hiercoll
from hiercoll import learned
from hiercoll.algorithms import REGISTRY
from hiercoll.calls import dropin
from hiercoll.runtime import progress
from hiercoll.tables import NATIVE_VARIANT, Variant
from hiercoll.tuning.policy import Policy

# Tests of device arrays that run on a simulated and on a real device, for the test modules that import them.
sys.path.append(str(Path(__file__).parent.parent / "device"))
pytest.register_assert_rewrite("machines", "device_memory", "device_sizes", "device_streams", "device_tools")
from machines import messages, peers, transport  # noqa: E402, F401  (fixtures)

WORLD = MPI.COMM_WORLD
VARIANTS = [
    (collective, name, params)
    for collective in ("alltoall", "allgather")
    for name, entry in REGISTRY[collective].items()
    for params in entry.variants()
]
CALLS = {"alltoall": hiercoll.alltoall, "allgather": hiercoll.allgather}
TIMEOUT = 120.0  # seconds for one test
PATIENCE = 10.0  # seconds that a rank whose test failed waits for the others without a word
STDERR = pytest.StashKey[int]()
# Shortly before launch.py ends the job, so that it is known which test hangs, and where.
END = float(os.environ.get("HIERCOLL_LAUNCH_END", "inf")) - 5.0  # by the clock


def _has_persistent() -> bool:
    """Whether the MPI library has persistent collectives. Open MPI 4.1, of Debian 12 and Ubuntu 22.04, has none."""
    try:
        WORLD.Barrier_init().Free()
    except NotImplementedError:
        return False
    return True


HAS_PERSISTENT = _has_persistent()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--sample K/N``: the k-th of n parts of the tests, always the same ones."""
    parser.addoption("--sample", default="1/1", metavar="K/N", help="the k-th of n parts of the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all as tests under MPI, for pytest-mpi; leave out, on all ranks alike, what needs another number of ranks.

    ``mpi(min_size=n)`` says that a test needs n ranks, ``ranks(counts)`` that it needs just so many, or that they
    are enough of what takes long."""
    part, parts = map(int, config.getoption("--sample").split("/"))
    chosen = {item for item in items if crc32(item.nodeid.encode()) % parts == part - 1}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
    for item in items:
        if item.path.parent.name not in ("mpi", "gpu"):
            continue  # others, in the same run
        if item.get_closest_marker("mpi") is None:
            item.add_marker(pytest.mark.mpi)
        marker = item.get_closest_marker("ranks")
        if marker and WORLD.size not in marker.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"for {list(marker.args[0])} ranks, not {WORLD.size}"))


def pytest_configure(config: pytest.Config) -> None:
    """Keep the way out for stacks: while tests run, pytest holds back what is written there."""
    config.stash[STDERR] = os.dup(2)


def _end_at(end: float, config: pytest.Config) -> None:
    """End this rank with its stack after the time for a test, and at this time at the latest."""
    seconds = max(min(TIMEOUT, end - time.time()), 1.0)
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _end_at(END, item.config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _printed_late(failure: str | None) -> Iterator[None]:
    """Print a failure if the other ranks do not come for it: they may wait for this rank until they are ended."""
    late = threading.Timer(PATIENCE, print, (failure,), {"file": sys.__stderr__, "flush": True})
    if failure:
        late.start()
    yield
    late.cancel()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "teardown":  # nobody waits for this rank there, and its own exit status is enough
        return report
    _end_at(END + 2, item.config)  # those who still run the test come first: it is their stack that tells something
    own = str(report.longrepr) if report.failed else None
    with _printed_late(own):
        failures = [text for text in WORLD.allgather(own) if text]
    _end_at(END, item.config)
    if failures and not report.failed:
        report.outcome = "failed"
        report.longrepr = "on another rank:\n" + failures[0]
    return report


@pytest.fixture(autouse=True)
def newly_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job that has not learned anything yet."""
    monkeypatch.setattr(learned, "_job_files", {})


@pytest.fixture
def calls() -> Iterator[dropin.Calls]:
    """Counts the calls of drop-in communicators."""
    counted = dropin.Calls()
    dropin.observe(counted)
    yield counted
    dropin.ignore(counted)


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """The ranks of MPI_COMM_WORLD on a communicator that takes nothing over from it."""
    made = WORLD.Split()
    yield made
    made.Free()


@pytest.fixture
def on_layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], MPI.Intracomm]]:
    """Makes communicators of all ranks that see the given virtual nodes."""
    made: list[MPI.Intracomm] = []

    def make(layout: str) -> MPI.Intracomm:
        monkeypatch.setenv("HIERCOLL_NODES", layout)
        made.append(WORLD.Dup())
        return made[-1]

    yield make
    for duplicate in made:
        duplicate.Free()


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Variant], None]:
    """Lets "auto" try one candidate, and nothing else."""

    def only(variant: Variant) -> None:
        monkeypatch.setattr(Policy, "_offered", lambda self, wanted, own: (NATIVE_VARIANT, variant))
        monkeypatch.setattr(Policy, "_alike", lambda self, wanted, other: [])

    return only


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder that all ranks see. (pytest's own is not made for ranks that share /tmp.)"""
    made = tempfile.mkdtemp(prefix="hiercoll-test-") if WORLD.rank == 0 else ""
    path = Path(WORLD.bcast(made))
    yield path
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(path)


def layouts() -> list[str]:
    """Block, cyclic and uneven ones for the number of ranks of this run."""
    size = WORLD.size
    chosen = [f"1x{size}"]
    if size > 1:
        chosen += [f"{size}x1", f"{size - size // 2}+{size // 2}", f"{size - size // 2}+{size // 2}:cyclic"]
    if size >= 4:
        chosen += [f"1+{size - 2}+1:random=3"]
    return list(dict.fromkeys(chosen))


def nothing_is_under_way() -> bool:
    """Whether no call is under way, or listens for its start. A thread may be about to leave the last one, whose
    request is complete already: hence the lock."""
    with progress.lock:
        return not progress.active and not progress.listening
