"""What hiercoll keeps with a communicator: a private duplicate, the topology, plans, windows.

The state hangs on the user's communicator as an MPI attribute, so it is found again
through any alias of the handle and freed with it, or at the latest at exit. Everything
collective happens in an order that is equal on all ranks: the duplicate at the first
call, windows at the first use of a schedule and size, tags in the order of `*_init` calls.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from time import monotonic
from typing import Any, TypeAlias, cast

import numpy as np
from mpi4py import MPI

from hiercoll.algorithms import REGISTRY, Params, get_algorithm
from hiercoll.buffers import BlockLayout, HostMemory
from hiercoll.engines import Board, Native
from hiercoll.errors import CommunicatorError, ParameterError, ThreadError, UnknownAlgorithmError
from hiercoll.executor import Binding, Plan, bind, native_message
from hiercoll.schedule import BufferName, Schedule
from hiercoll.topology import Topology, discover
from hiercoll.tuner import NATIVE, choose

MAX_PLANS = 128  # cached plans per communicator
MAX_SCRATCH = 256 << 20  # bytes of scratch of cached plans per communicator
MAX_BOARDS = 32  # shared windows per communicator
MAX_SHARED = 256 << 20  # bytes of shared windows of cached plans per communicator and node

Key: TypeAlias = "tuple[Hashable, ...]"


class Cache(OrderedDict[Key, Any]):
    """Entries with ``nbytes`` and ``free()``; the least recently used go when limits are met."""

    def __init__(self, entries: int, nbytes: int) -> None:
        super().__init__()
        self._entries, self._limit, self.nbytes = entries, nbytes, 0

    def keep(self, key: Key, entry: Any) -> None:
        """Add (or replace) an entry, which itself never goes, however large."""
        if key in self:
            self.drop(key)
        self[key] = entry
        self.nbytes += entry.nbytes
        while len(self) > 1 and (len(self) > self._entries or self.nbytes > self._limit):
            self.drop(next(iter(self)))

    def drop(self, key: Key) -> None:
        """Remove and free an entry."""
        entry = self.pop(key)
        self.nbytes -= entry.nbytes
        entry.free()

    def drop_all(self) -> None:
        """Remove and free all entries, oldest first."""
        while self:
            self.drop(next(iter(self)))


class _Scratch:
    """Bytes that the cached plans of one size class share: only one of them runs at a time."""

    def __init__(self, memory: HostMemory, nbytes: int) -> None:
        self.address, self.owner = memory.allocate(nbytes)


class Work:
    """One call, apart from its buffers' addresses: equal on all ranks."""

    def __init__(self, collective: str, algorithm: str, params: Params, block: int, item: int, inplace: bool) -> None:
        self.collective, self.algorithm, self.params = collective, algorithm, params
        self.block, self.item, self.inplace = block, item, inplace
        self.key: Key = (collective, algorithm, tuple(params.items()), block, item, inplace)

    @property
    def name(self) -> str:
        """Collective and algorithm in words."""
        return " ".join([self.collective, self.algorithm, *(f"{k}={v}" for k, v in self.params.items())])


def split(comm: MPI.Intracomm, color: int) -> MPI.Intracomm:
    """The ranks of ``comm`` with the same ``color``, in the same order. Collective."""
    return cast(MPI.Intracomm, comm.Split(color, comm.rank))


class State:
    """hiercoll's side of one communicator. Made and freed collectively."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = split(comm, 0)  # unlike Dup, runs none of the user's callbacks
        self.rank, self.size = self.comm.rank, self.comm.size
        try:
            self.topology: Topology = discover(self.comm)
        except BaseException:
            self.comm.Free()
            raise
        disabled = os.environ.get("HIERCOLL_DISABLE", "") not in ("", "0")
        self.disabled = bool(self.comm.allreduce(disabled, op=MPI.LOR))  # set on one rank is set for all
        self.memory = HostMemory()
        self.plans = Cache(MAX_PLANS, MAX_SCRATCH)
        self.boards = Cache(MAX_BOARDS, MAX_SHARED)
        self._scratch: weakref.WeakValueDictionary[int, _Scratch] = weakref.WeakValueDictionary()
        self._schedules: dict[Key, Schedule] = {}
        self._node: MPI.Intracomm | None = None
        self._own: dict[Plan, Board | None] = {}  # plans that users hold
        self._retired: list[Board] = []  # boards of freed plans, until all ranks have freed theirs
        self._own_comms: list[MPI.Intracomm] = []
        self._next_tag = 0
        self._boards_made = 0

    def select(
        self, collective: str, algorithm: str, params: dict[str, Any], block: int, inplace: bool
    ) -> tuple[str, Params]:
        """The algorithm to run and all its parameters; equal on all ranks by construction.

        Raises UnknownAlgorithmError or ParameterError.
        """
        if algorithm in ("auto", NATIVE) and params:
            name, value = next(iter(params.items()))
            raise ParameterError(f"parameter {name!r}", f"none with algorithm={algorithm!r}", repr(value), self.rank)
        if self.disabled:
            return NATIVE, {}
        if algorithm == "auto":
            chosen = choose(collective, self.topology, block, inplace=inplace)
            algorithm, params = chosen.algorithm, dict(chosen.params)
        if algorithm == NATIVE:
            return NATIVE, {}
        if algorithm not in REGISTRY[collective]:
            expected = f"auto, native, {', '.join(REGISTRY[collective])}"
            raise UnknownAlgorithmError("algorithm", expected, repr(algorithm), self.rank)
        try:
            return algorithm, get_algorithm(collective, algorithm).resolve(params)
        except ParameterError as error:
            raise ParameterError(error.argument, error.expected, error.got, self.rank) from None

    def schedule(self, work: Work) -> Schedule:
        """This rank's schedule, generated once. Raises ConstraintError."""
        key = (work.collective, work.algorithm, tuple(work.params.items()), work.inplace)
        if key not in self._schedules:
            entry = get_algorithm(work.collective, work.algorithm)
            schedule = entry.schedule(self.topology, self.rank, work.params, inplace=work.inplace)
            self._schedules[key] = schedule
        return self._schedules[key]

    def cached_plan(self, work: Work, send: int, recv: int) -> Plan:
        """A plan for a blocking call on buffers at these addresses. Local, but for the
        window that the first use of a schedule with shared memory and a size makes."""
        if work.block == 0 or work.algorithm == NATIVE:
            return self._plain(work, send, recv)
        schedule = self.schedule(work)
        board = None
        if schedule.shared:
            if work.key in self.boards:
                self.boards.move_to_end(work.key)  # in the same order on all ranks, see `touch`
            else:
                self.boards.keep(work.key, self._board(schedule, work.block))
                self._forget_plans_without_board()
            board = self.boards[work.key]
        size_class = 1 << (schedule.scratch * work.block).bit_length()
        scratch = self._scratch.get(size_class)
        if scratch is None:
            scratch = self._scratch[size_class] = _Scratch(self.memory, size_class)
        binding = self._binding(work, schedule, self.comm, 0, (send, recv, scratch.address), board)
        plan = bind(schedule, binding, work.name)
        plan.keep_alive(scratch, nbytes=schedule.scratch * work.block)
        plan.board_key = work.key if board else None
        return plan

    def touch(self, key: Key, plan: Plan) -> None:
        """A cached plan is used again: note it, and its window, as used last."""
        self.plans.move_to_end(key)
        if plan.board_key is not None:
            self.boards.move_to_end(plan.board_key)

    def _board(self, schedule: Schedule, block: int) -> Board:
        """A new shared window. Collective over the node."""
        self._boards_made += 1
        flags = self._most(self.node, schedule.flags)
        return Board(self.node, schedule.shared * block, flags, self._boards_made)

    def _forget_plans_without_board(self) -> None:
        """Free the cached plans whose window has been evicted."""
        for key in [k for k, plan in self.plans.items() if plan.board_key and plan.board_key not in self.boards]:
            self.plans.drop(key)

    def own_plan(self, work: Work, send: int, recv: int, *, traced: bool = False) -> Plan:
        """A plan for the user to hold, with tags, scratch and window of its own. Collective.

        ``traced``: bound so that `Plan.trace` can time its operations.
        """
        if work.block == 0 or work.algorithm == NATIVE:
            plan = self._plain(work, send, recv)
            self._own[plan] = None
        else:
            schedule = self.schedule(work)
            board = self._board(schedule, work.block) if schedule.shared else None
            comm, tag = self._reserve_tags(self._most(self.comm, schedule.tags))
            address, owner = self.memory.allocate(schedule.scratch * work.block)
            binding = self._binding(work, schedule, comm, tag, (send, recv, address), board)
            plan = bind(schedule, binding, work.name, traced=traced)
            plan.keep_alive(owner, nbytes=schedule.scratch * work.block)
            self._own[plan] = board
        self._free_retired()
        plan.on_free = self._release
        return plan

    @property
    def node(self) -> MPI.Intracomm:
        """This rank's node. Collective at its first use."""
        if self._node is None:
            self._node = split(self.comm, self.topology.node_of[self.rank])
        return self._node

    def _plain(self, work: Work, send: int, recv: int) -> Plan:
        """A plan without a schedule: the MPI library's collective, or nothing for empty blocks."""
        if work.block == 0:
            nothing = Schedule(self.rank, ())
            return bind(nothing, self._binding(work, nothing, self.comm, 0, (send, recv, 0), None), work.name)
        comm, alltoall = self.comm, work.collective == "alltoall"
        sendbuf: Any = MPI.IN_PLACE
        datatypes = []
        if not work.inplace:
            sendbuf, datatype = native_message(send, work.block, self.size if alltoall else 1)
            datatypes.append(datatype)
        recvbuf, datatype = native_message(recv, work.block, self.size)
        datatypes.append(datatype)
        calls = (comm.Alltoall, comm.Ialltoall) if alltoall else (comm.Allgather, comm.Iallgather)
        engine = Native(*calls, (sendbuf, recvbuf), [datatype for datatype in datatypes if datatype])
        return Plan(engine, work.name, None, None)

    def _binding(
        self,
        work: Work,
        schedule: Schedule,
        comm: MPI.Intracomm,
        tag: int,
        addresses: tuple[int, int, int],
        board: Board | None,
    ) -> Binding:
        """How to bind ``schedule`` to send, recv and scratch at ``addresses``."""
        send, recv, scratch = addresses
        places: dict[BufferName, int] = {"send": send, "recv": recv, "scratch": scratch}
        if board is not None:
            places["shared"] = board.address
        layout = BlockLayout(work.block, work.item, schedule.segments)
        return Binding(comm, self.topology.lane_of, self.memory, layout, places, tag, board)

    def _most(self, comm: MPI.Intracomm, value: int) -> int:
        """The largest ``value`` of the ranks of ``comm``. Collective."""
        return int(comm.allreduce(value, op=MPI.MAX))

    def _reserve_tags(self, count: int) -> tuple[MPI.Intracomm, int]:
        """A communicator and the first of ``count`` tags that nobody else uses on it. Collective."""
        limit: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        if not self._own_comms or self._next_tag + count > limit:
            self._own_comms.append(split(self.comm, 0))
            self._next_tag = 0
        self._next_tag += count
        return self._own_comms[-1], self._next_tag - count

    def _release(self, plan: Plan) -> None:
        """The user has freed a plan on this rank; its window must wait for the others."""
        board = self._own.pop(plan, None)
        if board is not None:
            self._retired.append(board)

    def _free_retired(self) -> None:
        """Free the windows whose plans all ranks of the node have freed. Collective."""
        if self._node is not None:
            retired = {board.number: board for board in self._retired}
            everywhere = set.intersection(*map(set, self._node.allgather(list(retired))))
            for number in sorted(everywhere):
                retired[number].free()
            self._retired = [board for board in self._retired if board.number not in everywhere]

    def unharmed(self) -> bool:
        """Whether no rank ends by an uncaught exception. Collective, but never waits for others
        on a rank that does: they may be anywhere, and what is collective cannot be freed."""
        sound = getattr(sys, "last_value", None) is None
        everywhere = np.empty(1, dtype=bool)
        request = self.comm.Iallreduce(np.array([sound]), everywhere, op=MPI.LAND)
        if not sound:
            deadline = monotonic() + 1.0
            while not request.Test() and monotonic() < deadline:
                os.sched_yield()
            return False
        request.Wait()
        return bool(everywhere[0])

    def free(self) -> None:
        """Free everything. Collective; plans that are still active are left alone."""
        if _live.pop(id(self), None) is None or MPI.Is_finalized():
            return
        boards = self._retired + [board for board in self._own.values() if board is not None]
        for plan in list(self._own):
            plan.on_free = None
            if not plan.active:
                plan.free()
        self.plans.drop_all()
        self.boards.drop_all()
        for board in sorted(boards, key=lambda board: board.number):
            board.free()
        for comm in [*self._own_comms, *([self._node] if self._node else []), self.comm]:
            comm.Free()


_live: dict[int, State] = {}  # in the order of creation, which is equal on all ranks of a communicator
by_handle: dict[int, State] = {}  # for speed; a handle is not used again before `_deleted` has run
_main_thread = threading.get_ident()
_threads_allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _deleted(comm: MPI.Comm, keyval: int, state: State) -> None:
    by_handle.pop(comm.handle, None)
    state.free()


def _free_all(*_: object) -> None:
    """Free the states of all communicators, but for those that an exception has torn apart."""
    if not MPI.Is_finalized():
        for state in list(_live.values()):
            if state.unharmed():
                state.free()


STATE = MPI.Comm.Create_keyval(delete_fn=_deleted)
MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_free_all), True)  # for an explicit MPI.Finalize()
atexit.register(_free_all)


def get_state(comm: MPI.Intracomm) -> State:
    """The state of ``comm``; collective at the first call for a communicator.

    Raises CommunicatorError for what is not a live intracommunicator, ThreadError for
    calls from a second thread without MPI_THREAD_MULTIPLE, LayoutError for a bad
    ``HIERCOLL_NODES``.
    """
    state: Any
    try:
        state = comm.Get_attr(STATE)
    except (AttributeError, MPI.Exception):
        state = None
    if state is None:
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            got = "MPI.COMM_NULL (or a freed one)" if isinstance(comm, MPI.Intracomm) else type(comm).__name__
            raise CommunicatorError("comm", "an intracommunicator", got)
        check_thread()
        state = State(comm)
        comm.Set_attr(STATE, state)
        _live[id(state)] = by_handle[comm.handle] = state
    elif not _threads_allowed:
        check_thread()
    return cast(State, state)


def check_thread() -> None:
    """Raises ThreadError where this thread may not call MPI."""
    if not _threads_allowed and threading.get_ident() != _main_thread:
        raise ThreadError(
            "hiercoll was called from a second thread, but the MPI library was initialised without "
            "MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level)"
        )


def get_topology(comm: MPI.Intracomm) -> Topology:
    """Nodes and lanes of the ranks of ``comm`` (collective at the first call).

    Nodes share memory, or are the virtual ones of ``HIERCOLL_NODES``. Raises
    CommunicatorError and LayoutError.
    """
    return get_state(comm).topology
