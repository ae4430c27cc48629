"""Measurements of the machine at hand, from which `hiercoll.model.calibration` concludes the model's parameters.

All are in rows of calls that wait for each other, so that no barrier is in what is timed; those that are compared take
turns. A time is the slowest rank's, the median of samples after warm-up; quartiles, least and most are kept with it.
Ranks that have no part in a measurement sleep meanwhile, since they may share a core with those that have.
"""

from __future__ import annotations

import mmap
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from time import perf_counter, sleep
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hiercoll.model.calibration import AT_ONCE, LARGE, ROOTED, Key, Sample, Setting
from hiercoll.model.machine import LEVELS, Machine, level
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.session import duplicate
from hiercoll.statistics import quartiles
from hiercoll.tools.places import caches_of, place_of, sizes_of
from hiercoll.topology import cpus_here

Call: TypeAlias = "Callable[[], object]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"

FEWEST, MOST = 5, 100  # samples of a measurement
ROW = 2e-3  # seconds of a sample, about, where a call takes less
NAP = 1e-4  # seconds between looks of a rank that has no part
NEAR_SIZES = (1, 64, 256, *(1 << power for power in range(9, 19)))  # bytes of ping-pongs within a node
FAR_SIZES = (*NEAR_SIZES, 1 << 19, 1 << 20)  # and between nodes
CACHED = (16 << 10, 256 << 10)  # bytes of copies in cache
PIECES = 1024
LEAST_BEYOND, MOST_BEYOND = 8 << 20, 256 << 20  # bytes of copies out of cache
TOUCHED = 4 << 20


class Calibration:
    """Measurements on a communicator. All methods are collective.

    ``seconds``: for each, about; at least `FEWEST` samples are taken. ``domain``, ``socket``: ranks in each, where the
    caller knows better than the system.
    """

    def __init__(self, comm: MPI.Intracomm, seconds: float, domain: int = 0, socket: int = 0) -> None:
        self.session = get_session(comm)
        self.topology, self.seconds = self.session.topology, seconds
        self.comm = duplicate(self.session.comm)
        self.rank = self.comm.rank
        self.setting = self._setting(domain, socket)
        self.machine = Machine("", domain=self.setting.domain, socket=self.setting.socket)
        self.pairs = {LEVELS[self._level(peer)]: peer for peer in reversed(range(1, self.comm.size))}

    def _setting(self, domain: int, socket: int) -> Setting:
        first = self.topology.nodes[0]
        cpus = cpus_here()
        known = self.comm.allgather((platform.node(), place_of(cpus), caches_of(cpus) if self.rank == 0 else (0, 0)))
        found = sizes_of([known[rank][1] for rank in first])
        if domain or socket:
            found = domain or socket, socket or len(first), ""
        hosts = len({host for host, *_ in known})
        layout, nodes = str(self.topology), len(self.topology.nodes)
        return Setting(mpi_library(), layout, hosts, nodes, len(first), *found, caches=known[first[0]][2])

    def _level(self, peer: int) -> int:
        return level(self.machine, self.topology, 0, peer)

    def close(self) -> None:
        """Free the communicator."""
        self.comm.Free()

    def keys(self) -> list[Key]:
        """What there is to measure here."""
        found = [Key("ping-pong", at, size) for at in LEVELS if at in self.pairs for size in sizes_at(at)]
        if self.pairs:
            farthest = max(self.pairs, key=LEVELS.index)
            found += [Key("posted", farthest, 1, count) for count in (1, AT_ONCE)]
        for at in ("node", "network"):
            counts = {1, len(self.side(at))} if len(self.side(at)) > 1 else set()
            found += [Key("pairs", at, LARGE, count) for count in sorted(counts)]
            found += [Key("messages", at, 1, count) for count in sorted(counts) if at == "network"]
        if len(self.topology.nodes) > 2 and self.topology.is_even:
            found.append(Key("all nodes", "network", LARGE, self.setting.lanes))
        for at, members in (("node", self.topology.nodes[0]), ("domain", self._domain())):
            if len(members) > 2 and (at == "node" or len(members) < self.setting.lanes):
                ways = ((1, 1), (ROOTED, 1), (1, ROOTED))
                found += [Key("rooted", at, size, len(members) - 1, back) for size, back in ways]
        found += [Key(what, size=size) for what in ("copy", "sum") for size in CACHED]
        found += [Key("pieces", size=size, amount=PIECES) for size in (8, 64)]
        found += [Key("copy beyond cache", "", self._beyond(n), n) for n in sorted({1, self.setting.lanes})]
        found.append(Key("first touch", "", TOUCHED, self.setting.lanes))
        if self.setting.lanes > 1:
            found.append(Key("flags", "node", 8, 2))
        return found

    def side(self, at: str) -> list[tuple[int, int]]:
        """Pairs of ranks that far from each other, none of them in two pairs."""
        nodes = self.topology.nodes
        if at == "network":
            return list(zip(*nodes[:2], strict=False)) if len(nodes) > 1 else []
        half = self.setting.socket
        return list(zip(nodes[0][:half], nodes[0][half : 2 * half], strict=False)) if "node" in self.pairs else []

    def _domain(self) -> Sequence[int]:
        return self.topology.nodes[0][: self.setting.domain]

    def _beyond(self, ranks: int) -> int:
        """Bytes that each of so many ranks copies, so that they do not find them in cache."""
        third = self.setting.caches[1]
        most = max(LEAST_BEYOND, MOST_BEYOND // ranks)
        return min(max(2 * third // ranks, LEAST_BEYOND), most)

    def groups(self) -> list[list[Key]]:
        """`keys`, those together that are measured in turns."""
        return [list(group) for _, group in groupby(self.keys(), key=lambda key: (key.what, key.level))]

    def run(self, keys: Sequence[Key]) -> list[Sample]:
        """Measure a group in turns, so that what disturbs the machine for a while is not taken for a difference."""
        with ExitStack() as stack:
            calls = [stack.enter_context(MEASUREMENTS[key.what](self, key)) for key in keys]
            turns = self._turns(calls)
        return [_sample(key, times) for key, times in zip(keys, zip(*turns, strict=True), strict=True)]

    def _turns(self, calls: Sequence[Call | None]) -> list[list[float]]:
        """Times of this rank's calls, None where it has no part: in each turn, of each the slowest rank's."""
        begin, spent = perf_counter(), 0.0
        rows = [self._pace(call) for call in calls]
        turns: list[list[float]] = []
        while len(turns) < FEWEST or (spent < self.seconds * len(calls) and len(turns) < MOST):
            turns.append([self._row(call, row) for call, row in zip(calls, rows, strict=True)])
            spent = self._slowest(perf_counter() - begin, True)
        return turns

    def _pace(self, call: Call | None) -> int:
        """How many calls make a sample, after warm-up."""
        self._row(call, 2)
        return max(1, min(1000, int(min(ROW, self.seconds / FEWEST) / max(self._row(call, 2), 1e-7))))

    def _row(self, call: Call | None, calls: int) -> float:
        """Seconds of a call in a row, the slowest rank's."""
        self._slowest(0.0, call is not None)
        mine = 0.0
        if call is not None:
            call()  # until here ranks may wait for those that come late
            begin = perf_counter()
            for _ in range(calls):
                call()
            mine = (perf_counter() - begin) / calls
        return self._slowest(mine, call is not None)

    def _slowest(self, mine: float, active: bool) -> float:
        own = np.array([mine])
        most = np.empty_like(own)
        request = self.comm.Iallreduce(own, most, op=MPI.MAX)
        while not active and not request.Test():
            sleep(NAP)
        request.Wait()
        return float(most[0])


def _sample(key: Key, times: Sequence[float]) -> Sample:
    """Of a ping-pong, one way."""
    ways = 2 if key.what == "ping-pong" else 1
    low, middle, high = (time / ways for time in quartiles(times))
    return Sample(key, middle, low, high, min(times) / ways, max(times) / ways, len(times))


def sizes_at(at: str) -> Sequence[int]:
    """Sizes of ping-pongs, in bytes."""
    return FAR_SIZES if at == "network" else NEAR_SIZES


class _Messages:
    """Persistent messages of one rank: all are started together, then waited for."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._requests = comm, list[MPI.Prequest]()

    def send(self, peer: int, size: int, count: int = 1) -> _Messages:
        """Messages of so many bytes."""
        return self._add(self._comm.Send_init, peer, size, count)

    def recv(self, peer: int, size: int, count: int = 1) -> _Messages:
        """Messages of so many bytes."""
        return self._add(self._comm.Recv_init, peer, size, count)

    def _add(self, make: Any, peer: int, size: int, count: int) -> _Messages:
        # Ones, since memory that nobody has written is one and the same page of zeros.
        self._requests += [make([np.ones(size, np.uint8), MPI.BYTE], peer) for _ in range(count)]
        return self

    def __call__(self) -> None:
        MPI.Prequest.Startall(self._requests)
        MPI.Request.Waitall(self._requests)

    def free(self) -> None:
        """Free the requests."""
        for request in self._requests:
            request.Free()


@contextmanager
def _messages(here: Calibration, number: int) -> Iterator[list[_Messages]]:
    made = [_Messages(here.comm) for _ in range(number)]
    yield made
    for each in made:
        each.free()


@contextmanager
def ping_pong(here: Calibration, key: Key) -> Iterator[Call | None]:
    """A message to and fro between two ranks: domain, socket, node, network (1 byte), domain_byte, node_byte; by a jump
    of times rendezvous, eager, network_rendezvous, network_eager."""
    peer = here.pairs[key.level]
    with _messages(here, 2) as (out, back):
        if here.rank == 0:
            yield _in_turn(out.send(peer, key.size), back.recv(peer, key.size))
        elif here.rank == peer:
            yield _in_turn(out.recv(0, key.size), back.send(0, key.size))
        else:
            yield None


def _in_turn(*calls: Call) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


@contextmanager
def exchange(here: Calibration, key: Key) -> Iterator[Call | None]:
    """Two ranks send each other ``amount`` messages at once: posted."""
    farthest = here.pairs[key.level]
    with _messages(here, 1) as (both,):
        if here.rank in (0, farthest):
            peer = farthest - here.rank
            yield both.send(peer, key.size, key.amount).recv(peer, key.size, key.amount)
        else:
            yield None


@contextmanager
def pairs_at_once(here: Calibration, key: Key) -> Iterator[Call | None]:
    """``amount`` pairs of two nodes, or of two sockets, exchange a message each: adapter, network_byte, socket_link; or
    `AT_ONCE` of them: adapter_message."""
    chosen, count = here.side(key.level)[: key.amount], AT_ONCE if key.what == "messages" else 1
    with _messages(here, 1) as (both,):
        peer = next((a + b - here.rank for a, b in chosen if here.rank in (a, b)), None)
        yield None if peer is None else both.send(peer, key.size, count).recv(peer, key.size, count)


@contextmanager
def all_nodes(here: Calibration, key: Key) -> Iterator[Call | None]:
    """Each rank exchanges with its lane of every other node, one node at a time: congestion."""
    nodes, own = here.topology.nodes, here.topology.node_of[here.rank]
    lane, count = here.topology.lane_of[here.rank], len(nodes)
    with _messages(here, count - 1) as steps:
        for step, messages in enumerate(steps, 1):
            to, source = nodes[(own + step) % count][lane], nodes[own - step][lane]
            messages.send(to, key.size).recv(source, key.size)
        yield _in_turn(*steps)


@contextmanager
def rooted(here: Calibration, key: Key) -> Iterator[Call | None]:
    """A gather by messages of ``size`` bytes, then a scatter of ``back`` bytes: root_message, root_in, root_out,
    root_out_domain."""
    others = here.topology.nodes[0][1 : key.amount + 1]
    with _messages(here, 2) as (up, down):
        if here.rank == 0:
            for peer in others:
                up.recv(peer, key.size)
                down.send(peer, key.back)
            yield _in_turn(up, down)
        elif here.rank in others:
            yield _in_turn(up.send(0, key.size), down.recv(0, key.back))
        else:
            yield None


@contextmanager
def copy(here: Calibration, key: Key) -> Iterator[Call | None]:
    """The first ranks of the node copy ``size`` bytes each: in cache copy_byte, beyond it memory and bus."""
    if here.rank in here.topology.nodes[0][: key.amount]:
        source, target = np.ones(key.size, np.uint8), np.zeros(key.size, np.uint8)
        yield lambda: np.copyto(target, source)
    else:
        yield None


@contextmanager
def add(here: Calibration, key: Key) -> Iterator[Call | None]:
    """One rank adds up two arrays of ``size`` bytes, in cache: reduce_byte."""
    one, other = np.ones((2, key.size // 8))
    result = np.zeros_like(one)
    yield (lambda: np.add(one, other, result)) if here.rank == 0 else None


@contextmanager
def pieces(here: Calibration, key: Key) -> Iterator[Call | None]:
    """One rank copies ``amount`` pieces of ``size`` bytes that lie apart: piece, line."""
    if here.rank == 0:
        source, target = np.ones((2, key.amount, 2 * key.size), np.uint8)[:, :, : key.size]
        yield lambda: np.copyto(target, source)
    else:
        yield None


@contextmanager
def first_touch(here: Calibration, key: Key) -> Iterator[Call | None]:
    """All ranks of a node write to memory that is new to them: fresh."""

    def touch() -> None:
        with mmap.mmap(-1, key.size) as memory:
            for page in range(0, key.size, mmap.PAGESIZE):
                memory[page] = 1

    yield touch if here.rank in here.topology.nodes[0] else None


@contextmanager
def flags(here: Calibration, key: Key) -> Iterator[Call | None]:
    """Two ranks of a node each raise a flag and wait for both, as ping-pongs are of two ranks: flag."""
    node = here.session.node
    window = here.session.factory.new_window(0, 1, 0, alone=True)
    slots = [window.slot(lane, 0) for lane in range(key.amount)]

    def barrier() -> None:
        window.epoch += 1
        window.raise_flag(slots[node.rank])
        window.wait(slots, 0)

    yield barrier if here.rank in here.topology.nodes[0][: key.amount] else None
    window.free()


MEASUREMENTS = {
    "ping-pong": ping_pong,
    "posted": exchange,
    "pairs": pairs_at_once,
    "messages": pairs_at_once,
    "all nodes": all_nodes,
    "rooted": rooted,
    "copy": copy,
    "sum": add,
    "copy beyond cache": copy,
    "pieces": pieces,
    "first touch": first_touch,
    "flags": flags,
}
