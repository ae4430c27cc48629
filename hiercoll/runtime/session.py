"""hiercoll's side of a communicator: a private duplicate, the topology, the policy, plans, tags and windows.

Everything collective happens in an order that is equal on all ranks: the duplicate at the
first call, windows when a schedule with shared memory meets a size that has none, tags
and windows of plans that users hold in the order of `*_init` calls.
"""

from __future__ import annotations

import os
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property, partial
from math import inf
from pathlib import Path
from time import monotonic, perf_counter, time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from mpi4py import MPI

from hiercoll import learned, settings
from hiercoll.collectives import COLLECTIVES, called
from hiercoll.errors import ArgumentError, HiercollError, TableError, TableWarning
from hiercoll.model.cost import DEFAULT_LINKS, Links
from hiercoll.runtime import checking, compiled, native, progress
from hiercoll.runtime.agreement import Agreement
from hiercoll.runtime.beginning import SET_UP, first_watch, own_part, until_changed, world_ranks
from hiercoll.runtime.binding import Once
from hiercoll.runtime.cache import Cache, Idle
from hiercoll.runtime.checking import Describe, Description, Later
from hiercoll.runtime.factory import Lifetime, PlanFactory
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.memories import Memories, takes_device_memory
from hiercoll.runtime.plan import Plan
from hiercoll.runtime.probing import Probe
from hiercoll.runtime.progress import abandoned
from hiercoll.runtime.request import Key as RequestKey
from hiercoll.runtime.request import Request
from hiercoll.runtime.tags import Tags
from hiercoll.runtime.waiting import wait_for
from hiercoll.runtime.watch import BEGAN, Entry, Watch
from hiercoll.runtime.window import Window
from hiercoll.runtime.windows import Windows
from hiercoll.schedule import Schedule
from hiercoll.tables import MEMORIES, OLD, Table, Variant, environment_table, load
from hiercoll.topology import Topology, discover
from hiercoll.tuner import is_able
from hiercoll.tuning.learning import Finding, Learner
from hiercoll.tuning.policy import Key as PolicyKey
from hiercoll.tuning.policy import Policy, Wanted
from hiercoll.tuning.share import SHARE

if TYPE_CHECKING:
    import numpy.typing as npt

STRICTNESS = ("any", None, "rank", "fixed")  # orders of reductions; None: the one that calls have had before
Alias: TypeAlias = "tuple[object, ...]"
Read = TypeVar("Read")

NAME_BITS = 52  # of a communicator's name, which is told as a float64
PROBED = 2  # messages there and back, of each size, that show how fast links are
MAX_PLANS = 128  # cached plans per communicator
MAX_SEEN = 1024  # requests that are remembered without a plan
MAX_SCRATCH = 256 << 20  # bytes of scratch of cached plans per communicator
MAX_WINDOWS = 32  # shared windows per communicator
MAX_SPARE = 4  # windows of plans that programs have freed, kept for other plans
MAX_SHARED = 256 << 20  # bytes of shared windows of cached plans per communicator and node


def meet(comm: MPI.Intracomm, what: str, watch: Watch | None) -> float:
    """Wait until all ranks have come here, while calls in the background go on: some ranks may
    complete those first. Returns the seconds that this takes where none is late. Raises CollectiveTimeout and
    CollectiveFailed. Collective."""
    # Not Barrier: MPICH's mixes up the calls after it where ranks have initialised MPI with different thread levels.
    wait_for(MPI.Comm.Ibarrier(comm).Test, what, watch)
    begin = perf_counter()  # who is late finds all of the others' first marks, but not their second ones
    wait_for(MPI.Comm.Ibarrier(comm).Test, what, watch)
    return perf_counter() - begin


def duplicate(comm: MPI.Intracomm) -> MPI.Intracomm:
    """The ranks of ``comm`` in the same order, without its attributes and callbacks, which ``Dup`` would run, and with
    fewer messages than ``Split`` takes; of mpi4py's own kind, for what is left to the MPI library. Collective."""
    progress.before_blocking()
    # MPICH 5.0 tells more ranks of a Cartesian communicator or graph than it has, where it is smaller than the one that
    # it was made from.
    told = comm.Get_group()
    group = told.Incl(range(comm.size))
    made = MPI.Comm.Create(comm, group)
    told.Free()
    group.Free()
    return cast(MPI.Intracomm, made)


def node_comm(comm: MPI.Intracomm, topology: Topology) -> MPI.Intracomm:
    """The ranks of this rank's node, in the same order. Collective over the node."""
    progress.before_blocking()
    everyone = comm.Get_group()
    group = everyone.Incl(topology.node(comm.rank))
    made = MPI.Intracomm.Create_group(comm, group)
    everyone.Free()
    group.Free()
    return made


def from_root(comm: MPI.Intracomm, read: Callable[[], Read]) -> Read:
    """What rank 0 reads; its error on every rank, a TableWarning too where warnings are errors. Collective."""
    found: Read | HiercollError | TableWarning | None = None
    if comm.rank == 0:
        try:
            found = read()
        except (TableError, TableWarning) as error:
            found = error
        except Exception as error:  # the others wait for rank 0: none of them may be left alone
            found = HiercollError(f"rank 0: {type(error).__name__}: {error}")
    found = comm.bcast(found)
    if isinstance(found, HiercollError | TableWarning):
        raise found
    assert found is not None
    return found


def read_table(table: Table | str | Path | None, library: str) -> Table:
    """A table, one in a file, or (None) that of the environment, for this MPI library. Raises TableError; what the
    environment names and cannot be used is a TableWarning instead, and so is a file in which nothing is about the
    library."""
    try:
        given = environment_table() if table is None else table
    except TableError as error:
        warnings.warn(TableWarning(f"{error}; the MPI library's own collectives are used"), stacklevel=4)
        return Table()
    found = given if isinstance(given, Table) else load(given)
    if any(entry.is_old for entry in found.entries):
        warnings.warn(TableWarning(f"{found.source}: made from {OLD}, not from calls: tune again"), stacklevel=4)
    is_named = isinstance(table, str | Path) or (table is None and settings.table() is not None)
    if is_named and found.entries and not found.knows(library):
        others = ", ".join(sorted({entry.mpi for entry in found.entries}))
        what = f"{found.source}: made with {others}, and says nothing about {library}: tune with that, too"
        warnings.warn(TableWarning(what), stacklevel=4)
    return found


class Settings(NamedTuple):
    """What ranks tell each other when hiercoll is set up, as numbers: the largest of each hold for all."""

    order: float  # of reductions, by its place in `STRICTNESS`
    disabled: float
    stages: float  # device memory, through the host
    checks: float  # calls
    threadless: float  # second threads are kept out of MPI
    compares: float  # native with what is chosen
    still: float  # nothing is learned
    hurries: float  # it is learned at once
    timeout: float  # seconds
    part: float  # of what learning may cost, of rank 0's job
    has_more: float  # to tell than numbers: rank 0
    name: float  # rank 0's number for one
    seconds: float  # since the set-up began
    meeting: float  # less than 0: seconds that ranks which come together wait for each other


class Session:
    """hiercoll's side of one communicator. Made and freed collectively.

    Its parts: what ranks agree on, the memories that plans work on, windows, tags, the policy that chooses, and the
    plans that are kept.
    """

    def __init__(self, comm: MPI.Intracomm, forced: Mapping[str, Variant], *, is_met: bool = False) -> None:
        """``is_met``: ranks know already that none of them has a deadline."""
        timeout = settings.timeout()
        progress.before_blocking()
        waited = meet(comm, SET_UP, None if is_met else first_watch(comm, timeout))
        began = perf_counter()  # by when MPI has connected ranks, and none is late: that is no part of the set-up
        self.comm = duplicate(comm)
        # mpi4py's own: where calls that are left to the MPI library run, and agreements of blocking calls: the first
        # collectives on a new communicator may take as long as ten later ones.
        self.user = MPI.Intracomm(comm)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.library = mpi_library()
        self._node: MPI.Intracomm | None = None
        self.shares: bool | None = None  # whether the ranks of a node share memory in MPI's eyes; None: not tried
        try:
            self.topology, cores, largest = discover(self.user, partial(self._settings, timeout, began, waited))
            common = Settings(*largest)
            self._agree_on(common)
            table, known = from_root(self.user, self._read_all) if common.has_more else (Table(), {})
        except BaseException:
            self._free_comms(self.comm)
            raise
        self.agreement = Agreement(self.rank, self._largest, self._sum, self.meet, self._largest_at_rest)
        self.is_plain = self.size == 1 or self.disabled  # all its collectives are left to the MPI library
        self.broken: str | None = None  # the call that was interrupted, if one was
        self.watch: Watch | None = None
        self.background = 0  # calls under way in the background
        self._comparisons: deque[Later] = deque()  # before they start
        self._votes: list[object] = []
        self._is_busy = False  # with plans that a program holds, on some rank, when it is to be freed
        self.memories = Memories(lambda: self.node, self.agreement, self.rank, self.size)
        self.numbers = {collective: number for number, collective in enumerate(called())}
        limit: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.tags = Tags(int(limit), len(self.numbers), self.rank)
        self.routes = routes = compiled.make_routes(self._interrupted_program, self.rank, self.size)
        dropped, gather = self._forget_plans_without_window, self._gather_on_node
        meeting = partial(self.meet, "agreement on a larger window")
        self.windows = Windows(MAX_WINDOWS, MAX_SHARED, dropped, gather, routes.tick, meeting)
        self.plans = Cache(MAX_PLANS, MAX_SCRATCH, routes.tick)
        # By arguments as they were given; with the calls that the plan still serves (see `Learner.tally`), None: all.
        self.impossible: set[Hashable] = set()  # requests by "auto" that cannot be served as chosen, on all ranks
        self.idle = Idle[Plan](MAX_PLANS, MAX_SCRATCH)  # of calls in the background
        self.recent: dict[Alias | None, tuple[Plan, array[int] | None]] = {}
        self.copied = Cache(MAX_PLANS, MAX_SCRATCH, routes.tick)  # calls, by their arguments, whose data are copied
        self.by_sizes: dict[object, Learner] = {}  # of calls with blocks of any sizes, by how they are spelled
        self.sound: set[object] = set()  # arguments of calls that may be left to the MPI library without another look
        self.choices = until_changed()  # see `choices_have_changed`
        self.refused = ""  # what was wrong with arguments that were left to the MPI library, for reports
        self._seen: dict[RequestKey, bool] = {}
        self.factory = PlanFactory(self)
        # Where comparisons are, and native calls that they precede, which start not in the order of all calls.
        self.background_comm = duplicate(self.comm) if self.check else self.user
        self._own_comms = [self.background_comm] if self.check else []
        self._tagged = self.comm  # where plans of users have their tags, once there are any
        sums = self.agreement.sums
        self.policy = Policy(
            self.rank, self.topology, self.library, self.disabled, self.agreement.slowest, sums, forced
        )
        if self.rank == 0:
            self.policy.found = self._keep
        self.policy.table, self.policy.known = table, known if self.learns else {}
        self.policy.reaches = self.memories.devices_in_reach
        self.policy.links, self.policy.probe = DEFAULT_LINKS._replace(cores=cores), self._probe
        self.policy.slowest_of_some = self.agreement.slowest_of_some
        self.policy.compares, self.policy.changed = self._compares, self.choices_have_changed
        self.policy.learn(self.learns)
        self._use_timeout(common.timeout)

    def _settings(self, timeout: float, began: float, meeting: float) -> Settings:
        """This rank's."""
        return Settings(
            order=STRICTNESS.index(settings.order()),
            disabled=settings.is_disabled(),
            stages=not takes_device_memory(self.user),
            checks=settings.checks_calls(),
            threadless=MPI.Query_thread() != MPI.THREAD_MULTIPLE,
            compares=settings.compares,
            still=not settings.learns(),
            hurries=settings.hurries(),
            timeout=timeout,
            part=0.0 if self.rank else own_part(self.size),
            has_more=self._has_more(),
            name=0 if self.rank else int.from_bytes(os.urandom(8), "little") >> (64 - NAME_BITS),
            seconds=perf_counter() - began,
            meeting=-meeting,
        )

    def _agree_on(self, common: Settings) -> None:
        """Take what holds for all ranks."""
        self.order = STRICTNESS[int(common.order)]
        self.disabled, self.stages, self.check = bool(common.disabled), bool(common.stages), bool(common.checks)
        self.threadless, self._compares = bool(common.threadless), bool(common.compares)
        self.learns = 0.0 if common.still else inf if common.hurries else SHARE * common.part
        self.name = f"{int(common.name):0{NAME_BITS // 4}x}"  # orders communicators alike on all ranks
        self.set_up_seconds, self.meeting_seconds = common.seconds, -common.meeting

    def _has_more(self) -> bool:
        """Whether there is a table, or something that earlier jobs have found; on rank 0. Who asks is told of errors
        later, with the others."""
        if self.rank:
            return False
        try:
            has_table = settings.table() or settings.own_table() or settings.machine()
            return bool(has_table) or (settings.learns() and self.size in learned.known_ranks(self.library))
        except Exception:
            return True

    def _read_all(self) -> tuple[Table, dict[PolicyKey, Finding]]:
        """The table of the environment, and what earlier jobs have found that can run here."""
        known: dict[PolicyKey, Finding] = {}
        for memory in MEMORIES if settings.learns() and self.size in learned.known_ranks(self.library) else ():
            setting = learned.setting_of(self.library, self.topology, memory, self._fabric)
            of_this_job = learned.of_this_job(setting)
            for key, lesson in learned.read(setting).items():
                can_run = partial(is_able, COLLECTIVES[lesson.collective].family, self.topology, lesson.in_place)
                if can_run(lesson.variant):
                    times, untried = (lesson.seconds, lesson.native), tuple(filter(can_run, lesson.untried))
                    date = "" if of_this_job.get(key) == lesson else lesson.date
                    found = Finding(lesson.variant, *times, lesson.calls, date, untried)
                    known[lesson.collective, lesson.size, lesson.in_place, memory, ""] = found
        return read_table(None, self.library), known

    def _keep(self, wanted: Wanted, finding: Finding) -> None:
        """Let later jobs know what has been found."""
        name, size, in_place, memory, _ = wanted.key
        about, times = (name, size, in_place, finding.variant), (finding.seconds, finding.native)
        lesson = learned.Lesson(*about, *times, finding.calls, learned.now(), finding.untried)
        learned.job_file(learned.setting_of(self.library, self.topology, memory, self._fabric)).keep(lesson)

    @cached_property
    def _fabric(self) -> str:
        return learned.fabric()

    # Not allreduce: mpi4py makes a communicator for it under a lock that threads share, so
    # threads on different communicators could wait for each other across ranks.

    def _largest(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        most = np.empty_like(mine)
        self.user.Allreduce(mine, most, op=MPI.MAX)
        return most

    def _largest_at_rest(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The same; where ranks share cores, those that wait sleep. Not with Open MPI, whose collectives stand still
        for a second now and then if ranks seldom look whether they are over."""
        if self.policy.links.cores >= 1.0 or self.library.startswith("Open MPI"):
            return self._largest(mine)
        most = np.empty_like(mine)
        request = self.user.Iallreduce(mine, most, op=MPI.MAX)
        try:
            progress.rest_until(request.Test)
        finally:  # after Ctrl-C, too: the others go on
            request.Wait()
        return most

    def _sum(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        total = np.empty_like(mine)
        self.user.Allreduce(mine, total)
        return total

    def _probe(self, known: Links) -> Links:
        """Links with the network as measured: networks differ by a factor of a thousand. Collective."""
        probe = Probe(self.comm, self.tags.in_background(1), PROBED, self.agreement.slowest_of_some, self.watch)
        try:
            return known._replace(network=probe.network(self.topology, known.network))
        except BaseException:  # later calls may take its messages for their own
            self.break_off("messages that show how fast links are")
            raise

    def _gather_on_node(self, value: object) -> list[Any]:
        """Every rank's value on the node, if any window has been made with its ranks."""
        return list(self.node.allgather(value)) if self.windows.made else [value]

    def use_table(self, table: Table | str | Path | None) -> None:
        """Decide by ``table`` from now on, or one in a file, or (None) that of the environment.

        Rank 0 reads it and tells the others. Collective. Raises TableError on all ranks;
        what the environment names and cannot be used is a TableWarning instead.
        """

        self.meet("agreement on a table")
        self.policy.table = from_root(self.user, partial(read_table, table, self.library))
        self.forget_choices()

    @property
    def unwatched(self) -> bool:
        """Whether a call may go to the MPI library without another look."""
        return self.watch is None and not self.check and self.broken is None

    def set_timeout(self, seconds: float) -> None:
        """Let calls wait for at most so long, 0: for ever; what most on one rank holds for all. Collective."""
        (seconds,) = self.agreement.slowest([seconds])
        self._use_timeout(seconds)
        self.policy.by_bytes.clear()
        self.drop_plans()

    def _use_timeout(self, seconds: float) -> None:
        known = (self.name, self.rank, self.topology.node_of, world_ranks(self.comm))
        self.watch = watch = Watch(seconds, *known, self.break_off) if seconds else None
        self.routes.limit(seconds, *((watch.numbers.buffer_info()[0], watch.record.append) if watch else (0, None)))
        self.routes.open(not self.check and self.broken is None)

    def break_off(self, call: str) -> None:
        """A call was interrupted: the communicator cannot be used any more."""
        self.broken = call
        self.routes.open(False)

    def meet(self, what: str) -> None:
        """Wait for all ranks, up to the deadline, before ``what``, where MPI would wait without one. Raises
        CollectiveTimeout. Collective."""
        progress.before_blocking()
        if self.watch is not None:
            meet(self.comm, what, self.watch)

    def begin_together(self) -> None:
        """Wait for all ranks before a call that is timed: else its time is that for which others were late. Raises
        CollectiveTimeout. Collective."""
        progress.before_blocking()
        if self.watch is not None or self.threadless:  # thread levels may differ: see `meet`
            meet(self.comm, "a trial", self.watch)
        else:
            self.user.Barrier()  # which ranks leave sooner after each other

    def same_call(self, described: Description) -> None:
        """See `checking.same_call`."""
        checking.same_call(self.comm, described, self.watch)

    def same_request(self, request: Request, *values: int, lacking: int = 0) -> list[int]:
        """See `Agreement.same`."""
        common = request.common._replace(size=None)
        return self.agreement.same(request.name, common, request.common.size or 0, *values, lacking=lacking)

    def compare_later(self, described: Describe | None) -> Later | None:
        """What is over, and then has raised CollectiveMismatch if need be, before a call in the
        background starts; None if calls are not checked, or there is nothing to compare. Local."""
        if not self.check or described is None:
            return None
        return Later(self._comparisons, checking.comparison(self.background_comm, described()))

    # ---- plans

    def plan(self, request: Request) -> Plan | None:
        """The plan that is kept for a blocking call. None where none is worth it: for calls on the host that have not
        come before. On the host nothing is left to be copied from or to other places."""
        moves = self.factory.moves(request)
        key = request.moving_key if moves else request.key
        plan: Plan | None = self.plans.get(key)
        if plan is not None:
            self.touch(plan)
            request.place(plan.move)
            return plan
        is_tried = request.learner is not None and request.learner.is_trying
        on_host = request.memory == "host" and not is_tried and not moves
        if on_host and self._is_new(key):
            return None
        plan = self.factory.make(request, Lifetime.KEPT if request.is_plain else Lifetime.ONCE)
        if request.is_plain:
            self.plans.keep(key, plan)
            plan.key = key
        return plan

    def begun_plan(self, request: Request) -> Plan:
        """The plan for a call in the background, until `end_plan`: that of an earlier one like it, if there is one that
        is over. Local."""
        alike = None
        if self.factory.moves(request):
            with progress.lock:  # calls may end in another thread
                alike = self.idle.alike(request.moving_key)
        plan = None if alike is None else self.idle_plan(alike, *request.owners)
        if plan is None:
            plan = self.factory.make(request, Lifetime.BACKGROUND)
            plan.alike, plan.producers = alike, request.producers
        else:
            request.place(plan.move)
        return plan

    def idle_plan(self, alike: list[Plan], *owners: object) -> Plan | None:
        """A plan of a call in the background that is over, for another one like it, on the memory of these owners: with
        tags of its own, as each has. None if there is none. Local."""
        with progress.lock:
            plan = self.idle.take(alike)
        if plan is not None:
            plan.tag_from(self.tags.in_background(plan.tags))
            plan.guests = owners
        return plan

    def end_plan(self, plan: Plan) -> None:
        """A call in the background is over."""
        if plan.alike is not None and not plan.broken:
            plan.guests = ()
            with progress.lock:
                self.idle.put(plan.alike, plan)
        elif plan.on_free is None:  # else it is somebody's, for more starts
            plan.free()

    def _is_new(self, key: RequestKey) -> bool:
        """Whether a request has not come before, as far as that is remembered."""
        if self._seen.pop(key, False):
            return False
        self._seen[key] = True
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return True

    def run_once(self, request: Request) -> str:
        """Serve a blocking call on the host for which no plan is kept. Returns what ran, in words."""
        if request.variant.is_native and self.watch is None:
            progress.before_blocking()
            native.call(self.user, request, self.rank)
            return request.name
        made = self.factory.make(request, Lifetime.ONCE) if request.is_native else self.factory.once(request)
        self.run(made)
        if isinstance(made, Plan):
            made.free()
        return made.name

    def remember(self, alias: Alias | None, plan: Plan, tally: array[int] | None = None) -> None:
        """Find a kept plan by the arguments of its call, as they were given, for as many calls as ``tally`` says."""
        if alias is not None and plan.key is not None:
            if len(self.recent) >= 2 * MAX_PLANS:
                self._forget_freed()
            if len(self.recent) >= 2 * MAX_PLANS:  # plans that many buffers have in common
                self.recent.clear()
            self.recent[alias] = (plan, tally)

    def _forget_freed(self) -> None:
        self.recent = {alias: found for alias, found in self.recent.items() if not found[0].is_freed}

    def touch(self, plan: Plan) -> None:
        """A kept plan is used again: note it, and its window, as used last."""
        self.plans.touch(plan.key)
        if plan.window_key is not None:
            self.windows.touch(plan.window_key)

    def hold(self, plan: Plan, window: Window | None) -> None:
        """A program holds a plan, with a window of its own or none."""
        self.windows.own(plan, window)
        plan.on_free, plan.watch = self.windows.release, self.watch

    def drop_plans(self) -> None:
        """Free the plans that are kept. Local."""
        self.forget_calls()
        self.plans.drop_all()
        with progress.lock:
            self.idle.drop_all()

    def forget_calls(self) -> None:
        """Look at the arguments of all calls anew."""
        self.recent.clear()
        self.copied.drop_all()
        self.by_sizes.clear()
        self.routes.clear()

    def choices_have_changed(self) -> None:
        """What "auto" means is asked anew by calls in the background that are known: these are, as long as this counter
        lasts. Blocking calls have their learner's."""
        self.choices[0] = 0
        self.choices = until_changed()

    def forget_plans(self) -> None:
        """Free the plans that are kept, with their windows. Collective."""
        self.drop_plans()
        self.windows.kept.drop_all()

    def forget_choices(self) -> None:
        """Let "auto" decide anew for every size."""
        self.drop_plans()
        self.impossible.clear()
        self.policy.forget()

    def _forget_plans_without_window(self, kept: Cache) -> None:
        """Free the kept plans whose window has gone."""
        for key in [k for k, plan in self.plans.items() if plan.window_key and plan.window_key not in kept]:
            self.plans.drop(key)
        self._forget_freed()

    def reserve(self, request: Request, schedule: Schedule, nbytes: int) -> tuple[MPI.Intracomm, int, Window | None]:
        """What a plan needs that a program holds: a communicator, and the first of as many tags on it as ranks need,
        which nobody else uses; and a window with a buffer of ``nbytes``, if it needs one and a plan that is no more has
        left one. Else such windows are freed, where they are in the way. Collective."""
        shares = schedule.shared or request.transport.has_notices
        on_device = schedule.shared and request.transport.peer
        window = self.windows.spare(schedule.all_flags, nbytes) if shares and not on_device else None
        number, epoch = (0, 0) if window is None else (window.number, window.epoch)
        mine = (schedule.tags, self.windows.retired, epoch, number, -number)
        tags, retired, epoch, most, least = self.same_request(request, *mine)
        if window is not None and most == -least:
            self.windows.take_over(window, epoch)
            if request.transport.has_notices:
                window.tell_by_flags(self.rank, self.node, schedule.flags, schedule.notices)
        else:
            window = None
            if retired > (0 if shares else MAX_SPARE):
                self.windows.free_retired()
        first, is_new = self.tags.reserve(tags)
        if is_new:
            self._tagged = duplicate(self.comm)
            self._own_comms.append(self._tagged)
        return self._tagged, first, window

    @property
    def node(self) -> MPI.Intracomm:
        """This rank's node. Collective at its first use."""
        if self._node is None:
            self.meet("agreement on nodes")
            self._node = node_comm(self.comm, self.topology)
        return self._node

    def run(self, plan: Plan | Once) -> None:
        """Run a cached plan. If it is interrupted, its messages may be under way and be taken
        for those of later calls: the communicator is broken."""
        plan.watch = self.watch
        try:
            plan()
        except BaseException as error:
            if isinstance(error, ArgumentError) and isinstance(plan, Plan) and not plan.broken:
                raise  # before it was started
            self._interrupted(plan)
            if self.watch is not None and isinstance(error, MPI.Exception) and isinstance(plan, Plan):
                raise self.watch.failed(plan, error) from error
            raise

    def _interrupted(self, plan: Plan | Once) -> None:
        self.break_off(plan.name)
        self._votes += [*self.plans.values(), plan]  # MPI may still use what they hold
        self.plans.clear()
        self.forget_calls()

    def _interrupted_program(self, program: object, entry: Entry | None, error: BaseException) -> None:
        """An exception was raised in a program that was started without its plan. Raises what is to be raised instead:
        CollectiveTimeout or CollectiveFailed where calls have a deadline."""
        for plan in [plan for plan in self.plans.values() if plan.program is program]:
            plan.entry = entry
            try:
                if self.watch is not None and entry is not None and isinstance(error, TimeoutError):
                    self.watch.expire(plan, time() - entry[BEGAN])
                if self.watch is not None and isinstance(error, MPI.Exception):
                    raise self.watch.failed(plan, error) from error
            finally:
                plan.interrupt()
                self._interrupted(plan)

    def vote(self, sound: bool) -> Callable[[float], bool]:
        """Ask all ranks whether they can free together. Collective, but does not wait.

        Returns a function that waits, a rank that is not ``sound`` only until the given
        time (of `monotonic`), and says whether all are sound: where an exception has
        separated the ranks, nothing collective can be freed.
        """
        while self.background and sound and self.broken is None:
            progress.wait_politely()
        mine = np.array([sound and self.broken is None, self.windows.has_active], dtype=int)
        total = np.zeros(2, dtype=int)
        request = self.comm.Iallreduce(mine, total)
        self._votes += [mine, total, request]  # never to be collected while MPI may write to them

        def outcome(deadline: float) -> bool:
            if mine[0]:
                request.Wait()
            while not request.Test():
                if monotonic() > deadline:
                    return False
                os.sched_yield()
            self._is_busy = bool(total[1])
            return int(total[0]) == self.size

        return outcome

    def free(self) -> None:
        """Free everything, after a `vote`. Collective. What active plans use is left to them, where there are any on a
        rank: the communicators, too."""
        self.drop_plans()
        self.windows.free_all()
        self.memories.forget()
        if self._is_busy:
            abandoned.append(self)
            return
        self._free_comms(*self._own_comms, self.comm)

    def _free_comms(self, *comms: MPI.Intracomm) -> None:
        for comm in (*([] if self._node is None else [self._node]), *comms):
            comm.Free()
