"""What hiercoll keeps with a communicator: a private duplicate, the topology, plans, windows.

Everything collective happens in an order that is equal on all ranks: the duplicate at the
first call, windows when a schedule with shared memory meets a size that has none, tags
and windows of plans that users hold in the order of `*_init` calls.
"""

from __future__ import annotations

import os
import uuid
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from hiercoll import checking, native, progress
from hiercoll.algorithms import get_algorithm
from hiercoll.binding import Binding
from hiercoll.buffers import CARD, BlockLayout, Memory, Transfer
from hiercoll.checking import Later, Said, Saying, wait_for
from hiercoll.choices import Choices
from hiercoll.cuda import DeviceMemory
from hiercoll.engines import Between
from hiercoll.errors import (
    BufferSizeError,
    ConstraintError,
    DeviceError,
    DeviceMemoryError,
    ParameterError,
    TableError,
    TableWarning,
)
from hiercoll.executor import Plan, bind
from hiercoll.memories import Memories, Room, shared_memory_room, takes_device_memory
from hiercoll.schedule import HOST, RECV, SEND, BufferName, Schedule, most_tags
from hiercoll.sizes import Blocks
from hiercoll.tables import NATIVE, OLD, Table, environment_table, load
from hiercoll.topology import Topology, discover
from hiercoll.uneven import Uneven
from hiercoll.watch import UNKNOWN, Watch
from hiercoll.windows import Window
from hiercoll.work import Cache, Key, Work

COLLECTIVES = ("alltoall", "allgather", "alltoallv", "allgatherv")
SET_UP = "set-up (the first call of hiercoll on a communicator)"
MAX_PLANS = 128  # cached plans per communicator
MAX_SCRATCH = 256 << 20  # bytes of scratch of cached plans per communicator
MAX_BOARDS = 32  # shared windows per communicator
MAX_SHARED = 256 << 20  # bytes of shared windows of cached plans per communicator and node


def _seconds(text: str) -> float:
    """A number of seconds as the environment has it; 0 for none. Raises ParameterError."""
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ParameterError("HIERCOLL_TIMEOUT", "a number of seconds, 0 for no deadline", repr(text))
    return seconds


class _Scratch:
    """Bytes that the cached plans of one size class share: only one of them runs at a time."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.address, self.owner = memory.allocate(nbytes)


def meet(comm: MPI.Intracomm, what: str, watch: Watch | None) -> None:
    """Wait until all ranks have come here, while calls in the background go on: some ranks may
    complete those first. Raises CollectiveTimeout and CollectiveFailed. Collective."""
    for _ in range(2):  # one that is late finds all of the others' first marks, but not their second ones
        wait_for(MPI.Comm.Ibarrier(comm), what, watch)


def _meet_first(comm: MPI.Intracomm, seconds: float) -> None:
    """Wait for all ranks before anything is known of them. Raises CollectiveTimeout. Collective."""
    world = world_ranks(comm)
    name = f"{zlib.crc32(repr(world).encode()):08x}"
    watch = Watch(seconds, name, comm.rank, [UNKNOWN] * comm.size, world, lambda _: None) if seconds else None
    meet(comm, SET_UP, watch)


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """The ranks of MPI_COMM_WORLD that the ranks of ``comm`` have."""
    world, own = MPI.COMM_WORLD.Get_group(), comm.Get_group()
    ranks = own.Translate_ranks(list(range(comm.size)), world)
    world.Free()
    own.Free()
    return list(ranks)


def split(comm: MPI.Intracomm, color: int) -> MPI.Intracomm:
    """The ranks of ``comm`` with the same ``color``, in the same order; of mpi4py's own kind, for what
    is left to the MPI library. Collective."""
    progress.before_blocking()
    return cast(MPI.Intracomm, MPI.Comm.Split(comm, color, comm.rank))


def mpi_library() -> str:
    """Name and version of the MPI library, as in tables: "MPICH 5.0.2"."""
    vendor, version = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def from_root(comm: MPI.Intracomm, read: Callable[[], Table]) -> Table:
    """What rank 0 reads; its TableError on every rank. Collective."""
    found: Table | TableError | None = None
    if comm.rank == 0:
        try:
            found = read()
        except TableError as error:
            found = error
    found = comm.bcast(found)
    if isinstance(found, TableError):
        raise found
    assert found is not None
    return found


class State:
    """hiercoll's side of one communicator. Made and freed collectively."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        timeout = _seconds(os.environ.get("HIERCOLL_TIMEOUT", ""))
        _meet_first(comm, timeout)
        self.comm = split(comm, 0)  # unlike Dup, runs none of the user's callbacks
        self.user = MPI.Intracomm(comm)  # mpi4py's own: where calls that are left to the MPI library run
        self.rank, self.size = self.comm.rank, self.comm.size
        try:
            self.topology: Topology = discover(self.comm)
        except BaseException:
            self.comm.Free()
            raise
        disabled, check = (os.environ.get(name, "") not in ("", "0") for name in ("HIERCOLL_DISABLE", "HIERCOLL_CHECK"))
        threadless = MPI.Query_thread() != MPI.THREAD_MULTIPLE
        mine = np.array([disabled, not takes_device_memory(self.comm), check, threadless])
        anywhere = np.empty_like(mine)  # set on one rank is set for all
        # Not allreduce: mpi4py makes a communicator for it under a lock that threads share, so
        # threads on different communicators could wait for each other across ranks.
        self.comm.Allreduce(mine, anywhere, op=MPI.LOR)
        self.disabled, self.stages, self.check, self.threadless = map(bool, anywhere)
        progress.may_have_thread = not self.threadless
        self.library = mpi_library()
        self.name: str = self.comm.bcast(uuid.uuid4().hex)  # orders communicators alike on all ranks
        self.broken: str | None = None  # the call that was interrupted, if one was
        self.watch: Watch | None = None
        self.last = ""  # what the last blocking call ran
        self.background = 0  # calls under way in the background
        self._comparisons: deque[Later] = deque()  # before they start
        self._votes: list[object] = []
        self.memories = Memories(self.comm, lambda: self.node, self.meet)
        self.uneven = Uneven(self.comm, self.topology, lambda: self.node, self.meet, lambda: self.vectors.drop_all())
        self._fitted: set[Key] = set()  # work that there has been device memory for on all ranks
        self.plans = Cache(MAX_PLANS, MAX_SCRATCH)
        self.vectors = Cache(MAX_PLANS, MAX_SCRATCH)  # plans with uneven blocks
        self.boards = Cache(MAX_BOARDS, MAX_SHARED)
        self._scratch: weakref.WeakValueDictionary[Key, _Scratch] = weakref.WeakValueDictionary()
        self._schedules: dict[Key, Schedule] = {}
        self._node: MPI.Intracomm | None = None
        self._own: dict[Plan, Window | None] = {}  # plans that users hold
        self._retired: list[Window] = []  # boards of freed plans, until all ranks have freed theirs
        # Where comparisons are, and native calls that they precede, which start not in the order of all calls.
        self.background_comm = split(self.comm, 0) if self.check else self.comm
        self._own_comms = [self.background_comm] if self.check else []
        self._next_tag = 0
        self._tagged: MPI.Intracomm | None = None  # where plans of users have their tags
        self._background_next = 0
        self._boards_made = 0
        self.choices = Choices(self.rank, self.topology, self.library, self.disabled, self._slowest, self._total)
        self.use_table(None)
        self.set_timeout(timeout)

    def use_table(self, table: Table | str | Path | None) -> None:
        """Decide by ``table`` from now on, or one in a file, or (None) that of the environment.

        Rank 0 reads it and tells the others. Collective. Raises TableError on all ranks;
        what the environment names and cannot be used is a TableWarning instead.
        """

        def read() -> Table:
            if table is not None:
                return table if isinstance(table, Table) else load(table)
            try:
                return environment_table()
            except TableError as error:
                warnings.warn(TableWarning(f"{error}; the MPI library's own collectives are used"), stacklevel=4)
                return Table()

        def read_fresh() -> Table:
            found = read()
            if any(entry.is_old for entry in found.entries):
                warnings.warn(
                    TableWarning(f"{found.source}: made from {OLD}, not from calls: tune again"), stacklevel=5
                )
            return found

        self.meet(self.comm, "agreement on a table")
        self.choices.table = from_root(self.comm, read_fresh)
        self.forget_choices()

    @property
    def unwatched(self) -> bool:
        """Whether a call may go to the MPI library without another look."""
        return self.watch is None and not self.check and self.broken is None

    def set_timeout(self, seconds: float) -> None:
        """Let calls wait for at most so long, 0: for ever; what most on one rank holds for all. Collective."""
        (seconds,) = self._slowest([seconds])
        known = (self.name, self.rank, self.topology.node_of, world_ranks(self.comm))
        self.watch = Watch(seconds, *known, self._expired) if seconds else None
        self.choices.native_sizes.clear()
        self.plans.drop_all()

    def _expired(self, call: str) -> None:
        self.broken = call

    def meet(self, comm: MPI.Intracomm, what: str) -> None:
        """Wait for all ranks of ``comm``, up to the deadline, before ``what``, where MPI would wait without
        one. Raises CollectiveTimeout. Collective."""
        progress.before_blocking()
        if self.watch is not None:
            meet(comm, what, self.watch)

    def same_call(self, said: Said) -> None:
        """See `checking.same_call`."""
        checking.same_call(self.comm, said, self.watch)

    def compare_later(self, said: Saying | None) -> Later | None:
        """What is over, and then has raised CollectiveMismatch if need be, before a call in the
        background starts; None if calls are not checked, or nothing is said of it. Local."""
        if not self.check or said is None:
            return None
        return Later(self._comparisons, checking.comparison(self.background_comm, said()))

    def leaves_to_mpi(self, work: Work) -> bool:
        """Whether a call in the background may as well be the MPI library's, on the user's communicator."""
        return work.algorithm == NATIVE and not self.check

    def forget_plans(self) -> None:
        """Free the cached plans and their shared windows. Collective."""
        for cache in (self.plans, self.vectors, self.boards):
            cache.drop_all()

    def forget_choices(self) -> None:
        """Let "auto" decide anew for every size."""
        self.plans.drop_all()
        self.vectors.drop_all()
        self.choices.forget()
        progress.end_shortcuts()

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        """The largest values of all ranks, each of several. Collective."""
        mine = np.array(seconds, float)
        most = np.empty_like(mine)
        self.meet(self.comm, "agreement on algorithms")
        self.comm.Allreduce(mine, most, op=MPI.MAX)
        return [float(value) for value in most]

    def _total(self, numbers: Sequence[int]) -> list[int]:
        """The sums of all ranks. Collective."""
        total = np.empty(len(numbers), np.int64)
        self.meet(self.comm, "agreement on algorithms")
        self.comm.Allreduce(np.array(numbers, np.int64), total)
        return [int(number) for number in total]

    def schedule(self, work: Work) -> Schedule:
        """This rank's schedule, generated once. Raises ConstraintError."""
        key = (work.family, work.algorithm, tuple(work.params.items()), work.inplace, work.transport)
        if key not in self._schedules:
            entry = get_algorithm(work.family, work.algorithm)
            emit = partial(entry.schedule, self.topology, params=work.params, inplace=work.inplace)
            self._schedules[key] = work.transport.schedule(emit, self.topology, self.rank)
        return self._schedules[key]

    def cached_plan(self, work: Work, place: str, send: int, recv: int) -> Plan:
        """A plan for a blocking call on buffers at these addresses. Local, but for the first
        use of a schedule with a size: with shared memory it makes a window, and ranks with
        device memory agree that there is room for it."""
        if work.block == 0 or work.algorithm == NATIVE:
            return self._plain(work, place, send, recv)
        schedule, memory = self.schedule(work), self.memories[place]
        size_class = 1 << max(schedule.scratch * work.block - 1, 0).bit_length()

        def scratch() -> tuple[int, object]:
            known = self._scratch.get((place, size_class))
            if known is None:
                known = self._scratch[place, size_class] = _Scratch(memory, size_class)
            return known.address, known

        user = self._user(work, send, recv)
        first = memory.kind != "host" and work.key not in self._fitted
        room = self.memories.reserve(schedule, work.block, place, scratch, user, together=first)
        if first:
            self._fitted.add(work.key)
        board = None
        if schedule.shared:
            if work.key in self.boards:
                self.boards.move_to_end(work.key)  # in the same order on all ranks, see `touch`
            else:
                self.boards.keep(work.key, self._board(work, schedule, memory))
                self._forget_plans_without_board()
            board = self.boards[work.key]
        plan = self._bind(work, memory, (self.comm, self._tag(work)), room, board)
        plan.board_key = work.key if board else None
        return plan

    def _user(self, work: Work, send: int, recv: int) -> dict[BufferName, tuple[int, int]]:
        """Address and number of blocks of the user's buffers."""
        received: dict[BufferName, tuple[int, int]] = {"recv": (recv, self.size)}
        sent = 1 if work.collective == "allgather" else self.size
        return received if work.inplace else {**received, "send": (send, sent)}

    def touch(self, key: Key, plan: Plan) -> None:
        """A cached plan is used again: note it, and its window, as used last."""
        self.plans.move_to_end(key)
        if plan.board_key is not None:
            self.boards.move_to_end(plan.board_key)

    def _board(self, work: Work, schedule: Schedule, memory: Memory) -> Window:
        """A new shared window on every node; with transport peer, its buffer lies in the memory
        of lane 0's device. Collective.

        Raises BufferSizeError if the ranks' blocks differ, ConstraintError if the window
        does not fit into the shared memory of one host, DeviceMemoryError if the buffer does
        not fit into that of one device: on all ranks alike.
        """
        nbytes, leads = schedule.shared * work.block, self.topology.lane_of[self.rank] == 0
        if work.transport.peer:
            return self._device_board(work, schedule, memory, nbytes if leads else 0)
        room = shared_memory_room() if leads else None
        lacking = 0 if room is None or nbytes < room else nbytes - room
        flags, most = self._agree(work, schedule.flags, nbytes, lacking=lacking)
        self._boards_made += 1
        board = Window(self.comm, self.node, nbytes, flags, self._boards_made, most)
        self._attach(board, memory, partial(board.share_with, memory, nbytes))
        return board

    def _attach(self, board: Window, memory: Memory, reach: Callable[[], object]) -> None:
        """Let device memory ``reach`` the buffer of a board; if one rank cannot, the board is freed,
        and all raise. Collective, where there are devices."""
        problem = None
        try:
            reach()
        except DeviceError as error:
            problem = error
        if memory.kind != "host":
            try:
                self.memories.check(problem)
            except DeviceError:
                board.free()
                raise

    def _device_board(self, work: Work, schedule: Schedule, memory: Memory, nbytes: int) -> Window:
        """A board whose buffer of ``nbytes`` (0 on ranks that do not lead) lies on a device."""
        assert isinstance(memory, DeviceMemory)
        problem, address, owner = None, 0, None
        try:
            address, owner = memory.allocate(nbytes) if nbytes else (0, None)
        except DeviceMemoryError as error:
            problem = error
        self.memories.check(problem)
        flags, most = self._agree(work, schedule.flags, nbytes)
        self._boards_made += 1
        board = Window(self.comm, self.node, 0, flags, self._boards_made, most)
        card = memory.card(address).copy() if nbytes else np.empty(CARD, np.uint8)
        self.node.Bcast(card)

        def reach() -> None:
            board.put_elsewhere(*((address, owner) if nbytes else memory.find(card)))

        self._attach(board, memory, reach)
        return board

    def _forget_plans_without_board(self) -> None:
        """Free the cached plans whose window has been evicted."""
        for key in [k for k, plan in self.plans.items() if plan.board_key and plan.board_key not in self.boards]:
            self.plans.drop(key)

    def own_plan(self, work: Work, place: str, send: int, recv: int, *, traced: bool = False) -> Plan:
        """A plan for the user to hold, with tags, scratch and window of its own. Collective.

        ``traced``: bound so that `Plan.trace` can time its operations.
        """
        if work.block == 0 or work.algorithm == NATIVE:
            plan = self._plain(work, place, send, recv, own=True)
            self._own[plan] = None
        else:
            schedule, memory = self.schedule(work), self.memories[place]
            scratch = partial(memory.allocate, schedule.scratch * work.block)
            user = self._user(work, send, recv)
            room = self.memories.reserve(schedule, work.block, place, scratch, user, together=True)
            where = self._reserve_tags(work, schedule)
            board = self._board(work, schedule, memory) if schedule.shared else None
            try:
                plan = self._bind(work, memory, where, room, board, traced)
            except BaseException:
                self._retired += [board] if board else []
                raise
            self._own[plan] = board
        plan.on_free, plan.watch = self._release, self.watch
        return plan

    @property
    def node(self) -> MPI.Intracomm:
        """This rank's node. Collective at its first use."""
        if self._node is None:
            self.meet(self.comm, "agreement on nodes")
            self._node = split(self.comm, self.topology.node_of[self.rank])
        return self._node

    def _plain(
        self, work: Work, place: str, send: int, recv: int, *, own: bool = False, comm: MPI.Intracomm | None = None
    ) -> Plan:
        """A plan without a schedule: nothing for empty blocks, or the MPI library's collective, on the user's
        communicator if it is blocking there, so that it is what a program without hiercoll would run."""
        comm = comm or (self.comm if own else self.user)
        if work.block == 0:
            layout = BlockLayout(0, 1)
            return bind(Schedule(self.rank, ()), Binding(self.comm, (), self.memories[place], layout, {}, 0), work.name)
        memory = self.memories[place]
        if not work.transport.segments:
            return Plan(native.even(comm, work, send, recv, held=own), work.name, None, memory, direct=True)
        blocks = self.size if work.collective == "alltoall" else 1
        sent = range(self.rank, self.rank + 1) if work.inplace and blocks == 1 else range(blocks)
        layout = BlockLayout(work.block)
        host, owner = memory.allocate_host((self.size + (0 if work.inplace else blocks)) * work.block)
        apart = 0 if work.inplace else self.size  # in place: where they are received
        out = HOST[[block + apart for block in sent]]
        source = (recv, RECV[sent]) if work.inplace else (send, SEND[sent])
        before = memory.copy(layout, source, (host, out))
        after = memory.copy(layout, (host, HOST[0 : self.size]), (recv, RECV[0 : self.size]))
        assert isinstance(before, Transfer) and isinstance(after, Transfer)
        engine = Between([before], native.even(comm, work, host + apart * work.block, host, held=own), [after])
        plan = Plan(engine, work.name, None, memory)
        plan.keep_alive(owner)
        return plan

    def uneven_plan(
        self,
        work: Work,
        blocks: Blocks,
        addresses: tuple[int, int],
        limit: int,
        *,
        own: bool = False,
        background: bool = False,
        keep: bool = False,
    ) -> Plan:
        """A plan for blocks of uneven sizes, for one call, which may be in the ``background``, for more
        (``keep``), or (``own``; collective) for a user to hold."""
        if work.algorithm == NATIVE:
            comm = self.background_comm if background else self.comm if own else self.user
            plan = Plan(native.uneven(comm, work, blocks, addresses, held=own), work.name, None, None)
            if own:
                self._own[plan] = None
                plan.on_free, plan.watch = self._release, self.watch
            return plan
        schedule = self.schedule(work)
        if background:
            where, key = (self.comm, self._background_tag(schedule)), work.key
        elif not own:
            where, key = (self.comm, self._tag(work)), work.key
        else:
            where = self._reserve_tags(work, schedule)
            key = (*work.key, id(where[0]), where[1])
        plan = self.uneven.plan(work.collective, schedule, key, blocks, addresses, limit, where, work.name, own or keep)
        if own:
            board = self.uneven.give_away(key, limit)
            if board is not None:
                self._boards_made += 1
                board.number = self._boards_made
            self._own[plan] = board
            plan.on_free, plan.watch = self._release, self.watch
        return plan

    def without_shared(self, work: Work, free: bool) -> Work:
        """The call without shared memory: as it is, or (``free``) by the next algorithm that has
        none. Raises ConstraintError."""
        if work.algorithm == NATIVE or not self.schedule(work).shared:
            return work
        if not free:
            got = f"{work.name}, which uses shared memory"
            raise ConstraintError(
                f"algorithm {work.algorithm!r}", "private memory for calls in the background", got, self.rank
            )
        for candidate in self.choices.decide(work.family, max(work.block, 1), work.inplace).ranking:
            if candidate.algorithm == NATIVE:
                break
            params = get_algorithm(work.family, candidate.algorithm).resolve(candidate.params)
            other = Work(work.collective, candidate.algorithm, params, work.block, work.inplace)
            if not self.schedule(other).shared:
                return other
        return Work(work.collective, NATIVE, {}, work.block, work.inplace)

    def background_plan(self, work: Work, place: str, send: int, recv: int) -> Plan:
        """A plan for one call in the background, with tags and scratch of its own. Local."""
        if work.block == 0 or work.algorithm == NATIVE:
            return self._plain(work, place, send, recv, comm=self.background_comm)
        schedule, memory = self.schedule(work), self.memories[place]
        scratch = partial(memory.allocate, schedule.scratch * work.block)
        room = self.memories.reserve(schedule, work.block, place, scratch, self._user(work, send, recv), together=False)
        return self._bind(work, memory, (self.comm, self._background_tag(schedule)), room, None)

    def _background_tag(self, schedule: Schedule) -> int:
        """The first of as many tags as any rank's part of a schedule has, next to those of the call
        in the background before. Local: MPI lets no such call wait for others."""
        first, limit = self._tag_range(len(COLLECTIVES))
        count = most_tags(self.size, schedule.segments)
        if count > limit:
            expected = f"at most {limit} tags, which {self.library} has for calls in the background"
            raise ConstraintError("segments", expected, f"{count} for {schedule.segments}", self.rank)
        if self._background_next + count > limit:
            self._background_next = 0
        self._background_next += count
        return first + self._background_next - count

    def _bind(
        self,
        work: Work,
        memory: Memory,
        where: tuple[MPI.Intracomm, int],
        room: Room,
        board: Window | None,
        traced: bool = False,
    ) -> Plan:
        """The plan of ``work``, with messages on a communicator from a tag on."""
        schedule, places = self.schedule(work), room.places
        if board is not None:
            places["shared"] = board.address
        layout = BlockLayout(work.block, 1, schedule.segments)  # nothing but bytes is moved
        comm, tag = where
        binding = Binding(comm, self.topology.lane_of, memory, layout, places, tag, board)
        plan = bind(schedule, binding, work.name, traced=traced)
        plan.surround(room.before, room.after)
        plan.keep_alive(*room.owners, nbytes=(schedule.scratch + schedule.host) * work.block)
        return plan

    def _agree(self, work: Work, *values: int, lacking: int = 0) -> list[int]:
        """The largest of the ranks' ``values``; raises, on all alike, if they do not
        make the same call or bytes are ``lacking`` on one. Collective."""
        meet(self.comm, f"{work.name}, set-up", self.watch)
        key = zlib.crc32(repr(work.key[:-2]).encode())
        mine = np.array([work.block, -work.block, key, -key, lacking, *values], dtype=np.int64)
        most = np.empty_like(mine)
        self.comm.Allreduce(mine, most, op=MPI.MAX)
        if most[0] != -most[1]:
            got = f"between {-most[1]} and {most[0]}"
            raise BufferSizeError("bytes per block", "the same on all ranks", got, self.rank)
        if most[2] != -most[3]:
            raise ParameterError("algorithm", "the same with the same parameters on all ranks", work.name, self.rank)
        if most[4]:
            got = f"a window that needs {most[4]} bytes more than there are"
            raise ConstraintError(f"algorithm {work.algorithm!r}", "room in /dev/shm", got, self.rank)
        return [int(value) for value in most[5:]]

    def _tag(self, work: Work) -> int:
        """The first tag of blocking calls: different collectives never match each other's messages."""
        return self._tag_range(COLLECTIVES.index(work.collective))[0]

    @staticmethod
    def _tag_range(which: int) -> tuple[int, int]:
        """The first tag of a collective's, and their number; after all collectives come those in the background."""
        limit: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        count = int(limit // (len(COLLECTIVES) + 1))
        return which * count, count

    def _reserve_tags(self, work: Work, schedule: Schedule) -> tuple[MPI.Intracomm, int]:
        """A communicator, and the first of as many tags on it as the ranks need, which nobody else
        uses; and the windows of plans that are no more are freed. Collective."""
        count, retired = self._agree(work, schedule.tags, len(self._retired))
        if retired:
            self._free_retired()
        limit: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        if self._tagged is None or self._next_tag + count > limit:
            self._own_comms.append(split(self.comm, 0))
            self._tagged, self._next_tag = self._own_comms[-1], 0
        self._next_tag += count
        return self._tagged, self._next_tag - count

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

    def run(self, plan: Plan) -> None:
        """Run a cached plan. If it is interrupted, its messages may be under way and be taken
        for those of later calls: the communicator is broken."""
        self.last, plan.watch = plan.name, self.watch
        try:
            plan()
        except BaseException as error:
            self.broken = plan.name
            self._votes += [*self.plans.values(), *self.vectors.values(), plan]  # MPI may still use what they hold
            self.plans.clear()
            self.vectors.clear()
            if self.watch is not None and isinstance(error, MPI.Exception):
                raise self.watch.failed(plan, error) from error
            raise

    def vote(self, sound: bool) -> Callable[[float], bool]:
        """Ask all ranks whether they can free together. Collective, but does not wait.

        Returns a function that waits, a rank that is not ``sound`` only until the given
        time (of `monotonic`), and says whether all are of one mind: where an exception
        has separated the ranks, nothing collective can be freed.
        """
        while self.background and sound and self.broken is None:
            progress.wait_politely()
        mine, total = np.array([sound and self.broken is None], dtype=int), np.zeros(1, dtype=int)
        request = self.comm.Iallreduce(mine, total)
        self._votes += [mine, total, request]  # never to be collected while MPI may write to them

        def outcome(deadline: float) -> bool:
            if mine[0]:
                request.Wait()
            while not request.Test():
                if monotonic() > deadline:
                    return False
                os.sched_yield()
            return int(total[0]) in (0, self.size)

        return outcome

    def free(self) -> None:
        """Free everything. Collective. What active plans use is left to them."""
        own, self._own = self._own, {}
        busy = {board.number for plan, board in own.items() if board is not None and plan.active}
        if self._node is not None:
            busy = set().union(*self._node.allgather(busy))
        for plan in own:
            plan.on_free = None
            if not plan.active:
                plan.free()
        self.plans.drop_all()
        self.vectors.drop_all()
        self.boards.drop_all()
        boards = self._retired + [board for board in own.values() if board is not None]
        for board in sorted(boards, key=lambda board: board.number):
            if board.number not in busy:
                board.free()
        self.memories.forget()
        self.uneven.free()
        for comm in [*self._own_comms, *([self._node] if self._node else []), self.comm]:
            comm.Free()
