"""Plans: a schedule bound to a communicator and to addresses, started as often as wanted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from time import time
from typing import Any

from hiercoll.cuda.arrays import NO_PRODUCERS
from hiercoll.errors import PlanError
from hiercoll.memory import Memory, Transfer
from hiercoll.runtime import progress
from hiercoll.runtime.binding import Binding, bind_engine
from hiercoll.runtime.engines import Between, Dataflow, Engine, Pending, Traced
from hiercoll.runtime.engines import Sequence as InSequence
from hiercoll.runtime.programs import Compiled
from hiercoll.runtime.watch import BEGAN, SECONDS, Entry, Watch
from hiercoll.schedule import Schedule
from hiercoll.schedule.lowering import Steps
from hiercoll.schedule.transports import ON_HOST

REQUEST_BYTES = 1200  # that an MPI library keeps for a persistent request, measured: 0.9 to 1.3 kB


class Plan:
    """A collective, ready to run on fixed buffers.

    ``plan()`` runs it once and returns the receive array; ``plan.start()`` begins it,
    ``plan.test()`` says whether it has completed, ``plan.wait()`` completes it. All ranks
    of the communicator start the same plans in the same order. A context manager that
    frees it. Raises PlanError if started while active, or used after `free`.

    ``schedule`` is this rank's schedule (None for native plans), ``nbytes`` the bytes of
    scratch it holds.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        schedule: Schedule | None,
        memory: Memory | None,
        direct: bool = False,
    ) -> None:
        self.name = name
        self.schedule = schedule
        self.recvbuf: Any = None
        # Of devices: what is given, and produced, on which streams; what tells other ranks where buffers lie.
        self.producers = NO_PRODUCERS
        self.tell: Callable[[], None] | None = None
        self.active = False
        self.broken = False  # interrupted: nobody knows which messages are under way
        self.nbytes = 0
        self.key: Hashable = None  # what it is kept under, if it is
        self.program = engine.program if isinstance(engine, Compiled) else None  # of the compiled engine
        self.is_by_block = isinstance(engine, Compiled) and engine.by_block  # sizes and places come with each start
        if self.program is not None:
            self.program.name = name
        self._used = 0
        self.is_freed = False
        self.window_key: Hashable = None  # of the shared window that it uses, if it is kept
        self.on_free: Callable[[Plan], None] | None = None
        self.watch: Watch | None = None  # deadlines, if they are wanted
        self.entry: Entry | None = None  # of the current start, in the watch's record
        self._going: Going | None = None  # a start that others let go on, too
        self._engine: Engine | None = engine
        self._owners: tuple[object, ...] = ()
        # Of calls in the background: what is to live as long as the current start, how many tags it needs, and where it
        # is idle, if it is to serve others.
        self.guests: tuple[object, ...] = ()
        self.tags = 0
        self.alike: list[Plan] | None = None
        # Host memory needs no synchronisation: leave the call out of the hot path.
        self._memory = memory if memory is not None and memory.kind != "host" else None
        self._direct = direct  # whether messages are of, or about, that memory itself
        self._run: Callable[[], None] | None = engine.run

    def __repr__(self) -> str:
        state = "freed" if self.is_freed else "interrupted" if self.broken else "active" if self.active else "ready"
        return f"<hiercoll plan {self.name}: {state}>"

    @property
    def used(self) -> int:
        """When it was used last, in calls of its session; the compiled engine counts, too."""
        return self._used if self.program is None else int(self.program.used)

    @used.setter
    def used(self, number: int) -> None:
        if self.program is None:
            self._used = number
        else:
            self.program.used = number

    def move(self, send: int, recv: int, *blocks: Any) -> None:
        """The addresses of the program's buffers from now on, of a plan of the compiled engine; and the sizes and
        places of ``blocks``, in bytes, where they differ."""
        if isinstance(self._engine, Compiled):
            self._engine.move(send, recv, *blocks)

    def tag_from(self, tag: int) -> None:
        """The first tag of its messages from now on, of a plan of the compiled engine."""
        assert self.program is not None
        self.program.tag = tag

    def keep_alive(self, *owners: object, nbytes: int = 0) -> None:
        """Hold on to ``owners``, with ``nbytes`` of scratch, until the plan is freed."""
        self._owners += owners
        self.nbytes += nbytes

    def frame(self, before: Sequence[Transfer], after: Sequence[Transfer]) -> None:
        """Let transfers come before, and after, each start."""
        if self._engine is not None and (before or after):
            self._engine = Between(before, self._engine, after)
            self._run = self._engine.run

    def start(self) -> None:
        """Begin a start. Returns at once; nothing may touch the buffers until `wait`. It goes on in all calls of
        hiercoll that wait or test, as ranks may complete several in different orders."""
        self.begin()
        if self.schedule is not None:  # else MPI lets it go on
            self._going = Going(self)
            with progress.lock:
                progress.active.append(self._going)

    def begin(self) -> None:
        """A start that whoever asks for it lets go on."""
        engine = self._checked()
        if self._memory:
            self._prepare(self._memory)
        if self.watch is not None:
            self.entry = self.watch.begin(self)
        self.active = True
        try:
            engine.start()
        except BaseException:
            self.interrupt()
            raise

    def test(self) -> bool:
        """Whether the current start has completed (True if none is active); makes progress."""
        self._told()
        if not self.active:
            return True
        if self._going is not None:
            progress.advance_all()
            self._told()
            if not self._going.done:
                return False
            self._taken_back()
        elif not self.go_on(False):
            return False
        self.active = False
        return True

    def wait(self) -> Any:
        """Complete the current start. Returns the receive array."""
        self._told()
        if self.active:
            if self._taken_back():
                pass
            elif self.watch is not None:
                self.watch.complete(self)
            elif not progress.active:
                self.go_on(True)
            else:  # others may wait for what is under way here before they come to this call
                while not self.go_on(False):
                    progress.wait_politely()
            self.active = False
        elif self.broken:
            self._checked()
        return self.recvbuf

    def pending(self) -> list[Pending]:
        """What the current start waits for. It cannot go on after that."""
        self.interrupt()
        return self._engine.pending() if self._engine is not None else []

    def _taken_back(self) -> bool:
        """Nobody else lets the current start go on any more; whether it is complete."""
        going, self._going = self._going, None
        if going is None:
            return False
        with progress.lock:
            going.leave()
        if going.done and self.entry is not None:
            self.entry[SECONDS] = time() - self.entry[BEGAN]
        return going.done

    def _told(self) -> None:
        """Raises what went wrong while others let it go on."""
        if self._going is not None and (error := self._going.error) is not None:
            self._going = None
            raise error

    def interrupt(self) -> None:
        """It cannot go on: nobody knows what is under way."""
        self.active, self.broken = False, True
        if self._going is not None:
            with progress.lock:
                self._going.leave()

    def go_on(self, block: bool = False) -> bool:
        """Let the active start go on; an exception on the way breaks the plan for good."""
        engine = self._engine
        assert engine is not None
        try:
            return engine.progress(block)
        except BaseException:
            self.interrupt()
            raise

    def __call__(self) -> Any:
        """Run once: start and wait. Returns the receive array."""
        if self.watch is not None or progress.active:
            if self.watch is not None and not progress.active:
                return self._run_watched(self.watch)
            if self.watch is not None or self.schedule is not None:
                self.begin()
                return self.wait()
            # No start() here: on other ranks nothing may be under way, and in MPI a blocking collective
            # does not match a nonblocking one.
            progress.before_blocking()
        run = self._run
        if run is None or self.active or self.broken:
            self._checked()
        if self._memory:
            self._prepare(self._memory)
        try:
            run()  # type: ignore[misc]
        except BaseException:
            self.broken = True
            raise
        return self.recvbuf

    def _run_watched(self, watch: Watch) -> Any:
        """Start and wait, with a deadline, in few steps."""
        engine = self._engine
        if engine is None or self.active or self.broken:
            engine = self._checked()
        if self._memory:
            self._prepare(self._memory)
        self.entry = entry = watch.begin(self)
        self.active = True
        try:
            engine.start()
            if engine.progress(False):
                entry[SECONDS] = time() - entry[BEGAN]
            else:
                watch.complete(self)
        except BaseException:
            self.interrupt()
            raise
        self.active = False
        return self.recvbuf

    def _prepare(self, memory: Memory) -> None:
        """Order a start after what the caller has produced, and tell of the buffers that are there
        now: between calls, memory may have been freed and given out again at the same address.
        Nothing is under way yet: what is raised here leaves the plan as it was."""
        memory.before_messages(self.producers.streams(), self._direct)
        if self.tell is not None:
            self.tell()

    def settle(self) -> None:
        """Wait until nothing is under way where its buffers lie. Raises DeviceError while a stream is captured."""
        if self._memory:
            self._memory.settle()

    def free(self) -> None:
        """Free requests and scratch. Raises PlanError while a start is active."""
        if self._engine is not None:
            if self.active:
                raise PlanError(f"plan {self.name} is active: wait for it before freeing it")
            if self.broken:  # messages may be under way: MPI keeps the requests, we keep what they use
                progress.abandoned.append((self._engine, self._owners, self.guests))
            else:
                self._engine.free()
            self._engine, self._run, self._owners, self.guests, self.is_freed = None, None, (), (), True
            if self.on_free:
                self.on_free(self)

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *error: object) -> None:
        if self.active and error[0] is None:
            self.wait()
        if not self.active:
            self.free()

    def trace(self) -> list[Traced]:
        """Run once and record when each operation began and ended (slower than a plain run)."""
        engine = self._checked()
        if not isinstance(engine, (InSequence, Dataflow)):
            raise PlanError(f"plan {self.name} was not bound for tracing")
        engine.log, watch = [], self.watch
        self.watch = None  # what runs under a deadline is not recorded
        try:
            self()
        finally:
            self.watch, log, engine.log = watch, engine.log, None
        return log

    def _checked(self) -> Engine:
        if self._engine is None:
            raise PlanError(f"plan {self.name} has been freed")
        if self.broken:
            raise PlanError(f"plan {self.name} was interrupted and cannot be continued: free it")
        if self.active:
            raise PlanError(f"plan {self.name} is active: wait for it before starting it again")
        return self._engine


class Going:
    """A start of a plan that its program holds, as part of what is under way; see `progress.Background`."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.done = plan, False
        self.error: BaseException | None = None

    def advance(self) -> None:
        """Go on; what goes wrong is for who asks for the plan, but for Ctrl-C."""
        try:
            self.done = self._plan.go_on()
        except BaseException as error:
            self.error = error
        if self.done or self.error is not None:
            self.leave()
        if self.error is not None and not isinstance(self.error, Exception):
            raise self.error

    def leave(self) -> None:
        """Nothing lets it go on any more."""
        if self in progress.active:
            progress.active.remove(self)


def plan_of(steps: Steps, binding: Binding, name: str) -> Plan:
    """The plan that runs ``steps`` on the given addresses; whoever has allocated scratch keeps it alive. Local."""
    direct = not steps.buffers_of_messages <= set(ON_HOST)
    plan = Plan(bind_engine(steps, binding), name, steps.schedule, binding.memory, direct)
    if plan.program is None:
        plan.keep_alive(nbytes=REQUEST_BYTES * len(steps.messages))
    return plan
