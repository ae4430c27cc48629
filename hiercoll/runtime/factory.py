"""From a request to the plan that serves it, whoever is to start it.

One factory makes all plans. What differs is their lifetime: plans of blocking calls are kept and share tags, scratch
and windows, since one of them runs at a time; a plan in the background has tags and scratch of its own; a plan that a
program holds has a window of its own, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from hiercoll.algorithms import get_algorithm
from hiercoll.algorithms.alltoallv import TOGETHER
from hiercoll.collectives import Sizes
from hiercoll.errors import ConstraintError, DeviceError, DeviceMemoryError
from hiercoll.memory import HANDLE_BYTES, BlockLayout, Layout, Memory, Now, Transfer, UnevenLayout, WideLayout
from hiercoll.runtime import native, progress
from hiercoll.runtime.addresses import NAMES, Addresses
from hiercoll.runtime.binding import Binding, Once, Relocatable, can_compile, run_once
from hiercoll.runtime.engines import Between
from hiercoll.runtime.layouts import Lowered, known_layout, own_layout, vector_layout
from hiercoll.runtime.library import crashes_by_threads_windows
from hiercoll.runtime.memories import Places, free_shared_memory
from hiercoll.runtime.plan import Plan, plan_of
from hiercoll.runtime.request import Request
from hiercoll.runtime.sizes import Areas, GivenSizes, SizeTable, Slots, areas_of, rows_at
from hiercoll.runtime.turns import Turns
from hiercoll.runtime.window import (
    Arena,
    Window,
    arena_bytes,
    flags_together,
    header_bytes,
    in_pages,
    lies_with_others,
    room_together,
    untouched_bytes,
)
from hiercoll.schedule import HOST, PRIVATE, RECV, SEND, WIDE, BufferName, Get, Schedule, most_tags
from hiercoll.schedule.lowering import Steps, lower
from hiercoll.tables import NATIVE_VARIANT, Variant
from hiercoll.tuning.policy import Wanted

if TYPE_CHECKING:
    import numpy.typing as npt

    from hiercoll.runtime.session import Session

MOST_MOVED = 256  # schedules and block sizes of which it is remembered how they run wherever buffers lie
MOST_SHARED = 64 << 20  # bytes of a node's buffer for blocks of uneven sizes that travel together
TURNS = Turns()  # to make windows


def _is_crowd() -> bool:
    """Whether threads of this process must make windows one after the other."""
    return crashes_by_threads_windows() and progress.other_threads()


class Lifetime(Enum):
    """How long a plan lives, and what it shares with others."""

    KEPT = "for blocking calls with the same request"
    ONCE = "for one blocking call"
    BACKGROUND = "for one call in the background"
    HELD = "as long as the program holds it"


SHARING = (Lifetime.KEPT, Lifetime.ONCE)  # one of them runs at a time


class Laid(NamedTuple):
    """Where the bytes of blocks lie: the layout, the bytes of the node's buffer, and of a rank's own (`PRIVATE`)."""

    layout: Layout
    shared: int
    steps: Steps
    nbytes: Mapping[BufferName, int] = {}
    areas: Areas | Slots | None = None
    limit: int = 0

    @property
    def scratch(self) -> int:
        """Bytes of scratch, and of narrow behind it."""
        return self.nbytes.get("scratch", 0) + self.nbytes.get("narrow", 0)

    @property
    def host(self) -> int:
        """Bytes of what lies on the host beside a device's memory: of wide_host, and of host behind it."""
        return self.nbytes.get("wide_host", 0) + self.nbytes.get("host", 0)


class _Scratch:
    """Bytes that the kept plans of one size class share: only one of them runs at a time."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.address, self.owner = memory.allocate(nbytes)


class PlanFactory:
    """Makes the plans of a communicator."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._schedules: dict[object, Schedule] = {}
        self._lowered: dict[object, Lowered] = {}
        self._areas: dict[object, Areas | Slots] = {}
        self._scratch: weakref.WeakValueDictionary[tuple[str, str, int], _Scratch] = weakref.WeakValueDictionary()
        self._moved: dict[tuple[int, int], Relocatable | None] = {}
        self._tellings = count(1)  # of addresses, by all plans
        self._roomless: set[object] = set()  # requests that a node's memory had no room for
        self._fitted: set[object] = set()  # requests that there has been device memory for on all ranks
        self._common: Arena | None = None  # of windows that are not large

    def make(self, request: Request, lifetime: Lifetime, *, traced: bool = False) -> Plan:
        """The plan for a request. Local for plans in the background, and but for the first of some size for blocking
        calls; collective for those that programs hold. ``traced``: `Plan.trace` can time its operations.

        Raises BufferSizeError, ParameterError and ConstraintError on all ranks alike, DeviceMemoryError.
        """
        how = None if request.operation is None else request.operation.lasting
        if how is not request.operation:
            request = request._replace(operation=how)
        # All ranks come here for a plan that a program holds. Some know a call, for which it must stay as it is.
        is_found_out_once = request.transport.shared and lifetime is not Lifetime.HELD
        if is_found_out_once and request.common in self._roomless:
            request = request.sending
        if request.is_empty or request.is_native:
            plan, window = self._native(request, lifetime), None
        else:
            schedule = self.schedule(request)  # if it has none, that is no lack of room
            try:
                plan, window = self._scheduled(request, schedule, lifetime, traced)
            except ConstraintError:  # on all ranks: a node's memory may have no room for messages, which are sent then
                if not request.transport.shared:
                    raise
                if is_found_out_once:
                    self._roomless.add(request.common)
                return self.make(request.sending, lifetime, traced=traced)
            request.place(plan.move)
            plan.tags = self._tags(schedule)
        plan.frame(request.before, request.after)
        plan.keep_alive(how)
        if lifetime is Lifetime.BACKGROUND:
            plan.guests = request.owners
        elif lifetime is not Lifetime.KEPT:
            plan.keep_alive(*request.owners)
        if lifetime is Lifetime.HELD:
            plan.recvbuf, plan.producers = request.result, request.producers
            self._session.hold(plan, window)
        return plan

    def once(self, request: Request) -> Once | Plan:
        """What serves one blocking call on the host: a plan only where it must be."""
        schedule = self.schedule(request)
        # Others may wait for what is under way here before they come to this call: a plan lets that go on.
        waits = self._session.watch is not None or progress.active
        if waits or not request.is_plain or not lower(schedule).in_sequence:
            return self.make(request, Lifetime.ONCE)
        # A window is made by all ranks, even if this one has nothing to do with it.
        if request.collective.is_even and schedule.blocks == 1 and not schedule.shared:
            key = (id(schedule), request.received.block)  # schedules are kept as long as this is
            if key not in self._moved:
                if len(self._moved) >= MOST_MOVED:
                    self._moved.clear()
                self._moved[key] = Relocatable.of(lower(schedule), self._laid(request, schedule, False).layout)
            if (rounds := self._moved[key]) is not None:
                run = partial(rounds.run, *self._where(request, schedule, Lifetime.ONCE), addresses(request))
                return Once(run, request.name)
        steps, binding, places = self._bound(request, schedule, Lifetime.ONCE)
        return Once(partial(run_once, steps, binding), request.name, places)

    def moves(self, request: Request) -> bool:
        """Whether one plan serves such requests wherever their buffers lie."""
        if request.is_native or request.is_empty or not request.is_plain:
            return False
        by_block = not request.collective.is_even
        if by_block and (request.operation is not None or not request.counts_are_ints):
            return False
        return can_compile(lower(self.schedule(request)), request.memory, by_block)

    def _by_block(self, request: Request, traced: bool) -> bool:
        """Whether sizes and places of blocks come with each start; else a plan has them."""
        return not traced and not request.collective.is_even and self.moves(request)

    def schedule(self, request: Request) -> Schedule:
        """This rank's schedule, generated once. Raises ConstraintError, also for a device where it has slots."""
        variant, family = request.variant, request.collective.family
        key = (
            family,
            variant.algorithm,
            tuple(variant.params.items()),
            request.in_place,
            request.root,
            request.transport,
            request.combining.order,
            request.accumulates,
        )
        if key not in self._schedules:
            entry, topology = get_algorithm(family, variant.algorithm), self._session.topology
            how: dict[str, Any] = {"inplace": request.in_place, "transport": request.transport, "root": request.root}
            how |= {"order": request.combining.order, "accumulate": request.accumulates}
            system = entry.system(topology, variant.params, **how)
            self._schedules[key] = system[self._session.rank]
        found = self._schedules[key]
        if found.knows and not found.shared and request.memory != "host":  # with slots in scratch, on some rank
            got = f"the memory of {request.received.place}"
            what = f"algorithm {variant.algorithm!r}"
            raise ConstraintError(what, "arrays on the host", got, self._session.rank)
        return found

    def private(self, request: Request) -> Request:
        """The request without shared memory: as it is, or, where the choice is hiercoll's, by the next algorithm that
        needs none. Raises ConstraintError."""
        if request.is_native or request.is_empty or not self.schedule(request).shared:
            return request
        if not request.is_auto:
            got = f"{request.name}, which shares memory within nodes"
            what = f"algorithm {request.variant.algorithm!r}"
            wanted_one = "for calls in the background one that shares no memory"
            raise ConstraintError(what, wanted_one, got, self._session.rank)
        size = max(request.size, 1)
        wanted = Wanted(request.collective, size, request.in_place, combining=request.combining)
        for candidate in self._session.policy.decide(wanted).ranking:
            variant = candidate.variant
            if variant.algorithm == NATIVE_VARIANT.algorithm:
                break
            params = get_algorithm(request.collective.family, variant.algorithm).resolve(variant.params)
            other = request._replace(variant=Variant(variant.algorithm, params))
            if not self.schedule(other).shared:
                return other
        if not request.combining.native:
            order = request.combining.order.name.lower()
            raise ConstraintError(
                "algorithm 'auto'", "one without shared memory", f"order {order!r}", self._session.rank
            )
        return request._replace(variant=NATIVE_VARIANT)

    # ---- by a schedule

    def _scheduled(
        self, request: Request, schedule: Schedule, lifetime: Lifetime, traced: bool
    ) -> tuple[Plan, Window | None]:
        """The plan, and the window that it alone uses."""
        held = lifetime is Lifetime.HELD
        steps, binding, places = self._bound(request, schedule, lifetime, traced)
        try:
            if binding.peers is not None and held:  # once for all starts
                binding.peers.tell()
            plan = plan_of(steps, binding, request.name)
        except BaseException:
            if held:
                self._session.windows.retire(binding.window)
            raise
        plan.frame(places.before, places.after)
        plan.keep_alive(*places.owners, nbytes=places.nbytes)
        if binding.peers is not None and not held:
            plan.tell = binding.peers.tell
        if binding.window is not None and not held:
            plan.window_key = request.common
        return plan, binding.window if held else None

    def _bound(
        self, request: Request, schedule: Schedule, lifetime: Lifetime, traced: bool = False
    ) -> tuple[Steps, Binding, Places]:
        """Steps, everything that turns them into calls, and what keeps their buffers."""
        session, lane_of = self._session, self._session.topology.lane_of
        known, laid = session.memories[request.received.place], self._laid(request, schedule, traced)
        memory = known.of_plan()
        places = self._places(request, schedule, laid, lifetime, memory)
        window, table = None, None
        if lifetime is Lifetime.HELD:
            comm, tag, window = session.reserve(request, schedule, laid.shared)
        else:
            comm, tag = self._where(request, schedule, lifetime)
        if schedule.shared or request.transport.has_notices:
            make = partial(self._window, request, schedule, known)
            if lifetime is not Lifetime.HELD:
                window = session.windows.keep(request.common, laid.shared, make)
            elif window is None:
                window = make(laid.shared)
            elif known.kind != "host":  # it may have been of a plan on other memory
                self._attach(window, known, partial(window.share_with, known))
            places.places["shared"] = window.address
        given = None
        if self._by_block(request, traced):
            sent = 0 if request.sent is None else request.sent.blocks
            given = GivenSizes((sent, request.received.blocks), laid.areas, laid.limit)
        elif laid.areas is not None:
            layout: Any = laid.layout
            rows = None if window is None else _rows_in(window, laid.areas)
            table = SizeTable(laid.areas, rows, request.blocks(session.rank), laid.limit, layout, TOGETHER)
            places.places["sizes"] = table.address
        once = lifetime in (Lifetime.ONCE, Lifetime.BACKGROUND) and memory.kind == "host"
        where = (comm, lane_of, memory, laid.layout, places.places, tag, window)
        peers = self._addresses(schedule, memory, places) if request.transport.peer else None
        how, sleeps = request.operation, not request.collective.root
        binding = Binding(
            *where, once=once, sizes=table, traced=traced, given=given, peers=peers, operation=how, sleeps=sleeps
        )
        return laid.steps, binding, places

    def _addresses(self, schedule: Schedule, memory: Memory, places: Places) -> Addresses:
        """Where the ranks of the node tell each other what they copy from."""
        from hiercoll.cuda.memory import DeviceMemory  # where there are devices

        session = self._session
        assert isinstance(memory, DeviceMemory)
        own = {name: places.places[name] for name in NAMES if name in schedule.offered}
        wanted = list(dict.fromkeys((op.peer, op.source.buffer) for op in schedule.ops if isinstance(op, Get)))
        agreement, what = session.agreement, "agreement on addresses"
        least, equal = partial(agreement.least, what=what), partial(agreement.equal, what=what)
        where = (session.rank, session.topology.lane_of, session.node.size, memory, own, wanted)
        return Addresses(*where, session.node.Allgather, least, equal, partial(next, self._tellings))

    def _laid(self, request: Request, schedule: Schedule, traced: bool) -> Laid:
        """Where the bytes of a request's blocks lie."""
        laid = self._laid_out(request, schedule, traced)
        if not schedule.accumulates:
            return laid
        assert not isinstance(laid.layout, WideLayout)
        nbytes = {name: (1 + (name in WIDE)) * size for name, size in laid.nbytes.items()}
        return laid._replace(
            layout=WideLayout(laid.layout, request.received.type), shared=2 * laid.shared, nbytes=nbytes
        )

    def _laid_out(self, request: Request, schedule: Schedule, traced: bool) -> Laid:
        """The same, of elements of one type."""
        received, rank = request.received, self._session.rank
        if request.collective.is_even and schedule.blocks == 1:
            block = received.block
            layout = BlockLayout(block, request.item, schedule.segments)
            steps = lower(schedule, by_message=traced)
            return Laid(layout, schedule.shared * block, steps, _private(schedule, block))
        if request.collective.is_even:
            vector, block, shared = vector_layout(schedule, received.block, request.item)
            return Laid(vector, shared, lower(schedule, by_message=traced), _private(schedule, block))
        by_block, blocks = self._by_block(request, traced), request.blocks(rank)
        if request.collective.sizes is Sizes.KNOWN and by_block:
            return Laid(BlockLayout(0), 0, lower(schedule))
        if request.collective.sizes is Sizes.KNOWN:
            known, nbytes = known_layout(schedule, blocks, request.item)
            return Laid(known, nbytes["shared"], lower(schedule), nbytes)
        most = max(self._session.topology.node_sizes)  # blocks in a buffer: of a node, or of a rank
        if request.collective.sizes is not Sizes.ROOT:
            most *= 2 * self._session.size
        elif not schedule.shared:
            most = self._session.size
        limit = min(request.limit, MOST_SHARED // most)
        key = (id(schedule), limit)  # schedules are kept as long as this is
        if key not in self._lowered:
            self._lowered[key] = Lowered.of(schedule)
            if schedule.shared or schedule.knows:
                self._areas[key] = areas_of(schedule, self._session.topology, limit, request.collective)
        lowered, areas = self._lowered[key], self._areas.get(key)
        placed: dict[BufferName, int] = {} if areas is None else {areas.buffer: areas.nbytes}
        shared = placed.get("shared", 0)
        if by_block:  # the layout comes with each start
            return Laid(BlockLayout(0), shared, lowered.steps, placed, areas, limit)
        own, large, nbytes = own_layout(schedule, blocks, limit)
        steps = lowered.steps if large else lowered.small
        return Laid(own, shared, steps, {**nbytes, **placed}, areas, limit)

    def _places(self, request: Request, schedule: Schedule, laid: Laid, lifetime: Lifetime, memory: Memory) -> Places:
        """Where the plan's buffers lie, and what keeps them."""
        session, place = self._session, request.received.place
        nbytes = laid.scratch
        places = addresses(request)
        if memory.kind == "host" and not nbytes and not laid.host:
            return Places({"scratch": 0, "narrow": 0, **places}, [], [], [])

        def pooled(use: str, nbytes: int) -> tuple[int, object]:
            size_class = 1 << max(nbytes - 1, 0).bit_length()
            known = self._scratch.get((place, use, size_class))
            if known is None:
                known = self._scratch[place, use, size_class] = _Scratch(memory, size_class)
            return known.address, known

        user: dict[BufferName, tuple[int, int]] = {"recv": (request.received.address, request.received.nbytes)}
        aside = 0
        if (sent := request.sent) is not None:
            user["send"] = (sent.address, sent.span)
            aside = sent.span if sent.overwritten else 0
        first = lifetime is Lifetime.KEPT and memory.kind != "host" and request.common not in self._fitted

        def allocating(use: str, nbytes: int) -> Callable[[], tuple[int, object]]:
            return partial(pooled, use, nbytes) if lifetime in SHARING else partial(memory.allocate, nbytes)

        scratch, copied = allocating("scratch", nbytes), allocating("aside", aside) if aside else None
        together = first or lifetime is Lifetime.HELD
        reserved = session.memories.reserve(
            schedule, laid.host, memory, scratch, user, aside=copied, together=together,
            may_mirror=not request.is_learned,
        )  # fmt: skip
        if first:
            self._fitted.add(request.common)
        of = reserved.places
        of["narrow"] = of["scratch"] + laid.nbytes.get("scratch", 0)
        if "host" in of:
            of["wide_host"], of["host"] = of["host"], of["host"] + laid.nbytes.get("wide_host", 0)
        return reserved._replace(nbytes=laid.scratch + laid.host + aside)

    def _where(self, request: Request, schedule: Schedule, lifetime: Lifetime) -> tuple[MPI.Intracomm, int]:
        """The communicator of the messages of a plan that no program holds, and their first tag. Local: MPI lets no
        call in the background wait for others."""
        session = self._session
        if lifetime in SHARING:
            return session.comm, session.tags.of_blocking(session.numbers[request.collective])
        return session.comm, session.tags.in_background(self._tags(schedule))

    def _tags(self, schedule: Schedule) -> int:
        return most_tags(self._session.size, schedule.segments)

    def _window(self, request: Request, schedule: Schedule, memory: Memory, nbytes: int) -> Window:
        """A new shared window on every node; with transport peer, its buffer lies in the memory
        of lane 0's device. Collective.

        Raises BufferSizeError if the ranks' blocks differ, ConstraintError if the window
        does not fit into the shared memory of one host, DeviceMemoryError if the buffer does
        not fit into that of one device: on all ranks alike.
        """
        session, leads = self._session, self._session.topology.lane_of[self._session.rank] == 0
        if request.transport.peer and schedule.shared:
            return self._device_window(request, schedule, memory, nbytes if leads else 0)
        free = free_shared_memory() if leads else None
        needed = untouched_bytes() + self._wanted_bytes(nbytes, schedule.all_flags)
        lacking = 0 if free is None else max(needed - free, 0)
        flags, most, crowd = session.same_request(request, schedule.all_flags, nbytes, _is_crowd(), lacking=lacking)
        with self._turn(crowd):
            window = self.new_window(most, flags, most)
        if request.transport.has_notices:
            window.tell_by_flags(session.rank, session.node, schedule.flags, schedule.notices)
        self._attach(window, memory, partial(window.share_with, memory))
        return window

    def _turn(self, crowd: int) -> AbstractContextManager[None]:
        """To make a window, where threads of some rank may make some, too. Collective."""
        agreement = self._session.agreement
        say = "agreement on who makes a window"
        return TURNS.turn(self._session.name, lambda may: bool(agreement.least(may, say))) if crowd else nullcontext()

    def new_window(self, room: int, flags: int, counted: int, *, alone: bool = False) -> Window:
        """A window (see `Window`), in an arena of its own if it is to be ``alone``. The first one shows whether the
        ranks of a host share memory in the eyes of the MPI library, too: it may have been told to send messages between
        them. Raises ConstraintError on all ranks. Collective."""
        session, window, is_for_good = self._session, None, True
        got = f"{session.library}, which does not let them"
        number = session.windows.next_number()
        try:
            if session.shares is not False:
                arena = self._arena(room, flags, alone)
                window = Window(session.comm, session.node, arena, room, flags, number, counted)
        except MPI.Exception as error:
            if session.shares:
                raise
            got = str(error)
            is_for_good = error.Get_error_class() == MPI.ERR_RMA_SHARED
        if session.shares is None:
            found = 2 if window is not None else int(not is_for_good)
            least = session.agreement.least(found, "agreement on shared memory")
            session.shares = (False, None, True)[least]
            if window is not None and not session.shares:
                window.free()
        if window is None or not session.shares:
            raise ConstraintError("shared memory", "ranks of a host that share memory", got, session.rank)
        return window

    def _arena(self, room: int, flags: int, alone: bool) -> Arena:
        """Where a window lies: a large one alone, others together. Collective over the node where there is no room
        yet."""
        node = self._session.node
        header = header_bytes(node.size, flags)
        if alone or not lies_with_others(header, room):
            return Arena(node, header, room)
        if self._common is None or not self._common.fits(header, room):
            self._common = Arena(node, flags_together(node.size, header), room_together(room, free_shared_memory()))
        return self._common

    def _wanted_bytes(self, room: int, flags: int) -> int:
        """Of shared memory, that such a window takes which nobody has touched yet, about."""
        lanes = self._session.node.size
        header = header_bytes(lanes, flags)
        if not lies_with_others(header, room):
            return arena_bytes(header, room)
        fits = self._common is not None and self._common.fits(header, room)
        return in_pages(room) if fits else arena_bytes(flags_together(lanes, header), room)

    def _attach(self, window: Window, memory: Memory, reach: Callable[[], object]) -> None:
        """Let device memory ``reach`` the buffer of a window; if one rank cannot, the window is freed,
        and all raise. Collective, where there are devices."""
        problem = None
        try:
            reach()
        except DeviceError as error:
            problem = error
        if memory.kind != "host":
            try:
                self._session.memories.check(problem)
            except DeviceError:
                window.free()
                raise

    def _device_window(self, request: Request, schedule: Schedule, memory: Memory, nbytes: int) -> Window:
        """A window whose buffer of ``nbytes`` (0 on ranks that do not lead) lies on a device."""
        from hiercoll.cuda.memory import DeviceMemory  # where there are devices

        assert isinstance(memory, DeviceMemory)
        session, problem, address, owner = self._session, None, 0, None
        try:
            address, owner = memory.allocate(nbytes) if nbytes else (0, None)
        except DeviceMemoryError as error:
            problem = error
        session.memories.check(problem)
        flags, most, crowd = session.same_request(request, schedule.all_flags, nbytes, _is_crowd())
        with self._turn(crowd):
            # Alone: to free it waits for the others of the node, which have let go of the buffer by then.
            window = self.new_window(0, flags, most, alone=True)
        window.tell_by_flags(session.rank, session.node, schedule.flags, schedule.notices)
        handle = memory.address_handle(address).copy() if nbytes else np.empty(HANDLE_BYTES, np.uint8)
        session.node.Bcast(handle)

        def reach() -> None:
            window.put_elsewhere(*((address, owner) if nbytes else memory.find(handle)))

        self._attach(window, memory, reach)
        return window

    # ---- by the MPI library

    def _native(self, request: Request, lifetime: Lifetime) -> Plan:
        """A plan without a schedule: nothing for empty blocks, or the MPI library's collective, on the user's
        communicator if it is blocking there, so that it is what a program without hiercoll would run."""
        session, held = self._session, lifetime is Lifetime.HELD
        memory = session.memories[request.received.place].of_plan()
        if request.is_empty:
            nothing = Binding(session.comm, (), memory, BlockLayout(0, 1), {}, 0)
            return plan_of(lower(Schedule(session.rank, ())), nothing, request.name)
        comm = session.comm if held else session.background_comm if lifetime is Lifetime.BACKGROUND else session.user
        make = partial(native.engine, comm, request, session.rank, held=held)
        sent = 0 if request.sent is None else request.sent.address
        if not request.transport.segments and (memory.kind == "host" or not request.accumulates):
            return Plan(make(sent, request.received.address), request.name, None, memory, direct=True)
        return self._through_host(request, memory, make)

    def _through_host(self, request: Request, memory: Memory, make: Callable[[int, int], Any]) -> Plan:
        """The MPI library's collective on copies, on the host, of device arrays."""
        out = request.received if request.sent is None else request.sent
        ends = [(out, SEND if request.sent is not None else RECV), (request.received, RECV)]
        if request.sent is None:
            ends = ends[:1]  # in place: what is sent lies where it is received
        host, owner = memory.allocate_host(sum(data.span for data, _ in ends))
        starts, layout = [host, host + out.span][: len(ends)], UnevenLayout()
        copies: list[Transfer] = []
        for (data, buffer), start, outward in ((ends[0], starts[0], True), (ends[-1], starts[-1], False)):
            sizes, at = data.each_block()
            for name in (buffer.name, HOST.name):
                layout.place(name, None, at, sizes)
            device, there = (data.address, buffer[0 : data.blocks]), (start, HOST[0 : data.blocks])
            copy = memory.copy(layout, device, there) if outward else memory.copy(layout, there, device)
            copies.append(copy if isinstance(copy, Transfer) else Now(_nothing))
        plan = Plan(Between(copies[:1], make(starts[0], starts[-1]), copies[1:]), request.name, None, memory)
        plan.keep_alive(owner)
        return plan


def _nothing() -> None:
    """There are no bytes to copy."""


def _rows_in(window: Window, areas: Areas | Slots) -> npt.NDArray[np.int64]:
    """The rows of sizes that ranks of a node tell each other."""
    return rows_at(cast(Any, MPI.buffer.fromaddress(window.address, areas.nbytes)), areas)


def _private(schedule: Schedule, block: int) -> dict[BufferName, int]:
    """Bytes of a rank's own buffers, of blocks of so many."""
    return {name: getattr(schedule, name) * block for name in PRIVATE}


def addresses(request: Request) -> dict[BufferName, int]:
    """Where the program's buffers lie."""
    found: dict[BufferName, int] = {"recv": request.received.address}
    if request.sent is not None:
        found["send"] = request.sent.address
    return found
