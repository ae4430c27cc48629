"""Requests, and the plans that serve them: what tells requests apart, what plans share, which ones are kept.

The session is real but for its communicators, so that rank 0 of four can be looked at alone.
"""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import pytest
from mpi4py import MPI

import hiercoll.runtime.factory
import hiercoll.runtime.session
from hiercoll.algorithms import REGISTRY
from hiercoll.calls.aliases import equal_alias
from hiercoll.calls.known import remember
from hiercoll.calls.serving import or_native, serve
from hiercoll.collectives import ALLGATHER, ALLGATHERV, ALLTOALL, ALLTOALLV, BCAST, Collective, Order, called
from hiercoll.errors import ConstraintError, ParameterError, UnknownAlgorithmError
from hiercoll.runtime import compiled, window
from hiercoll.runtime.agreement import Agreement
from hiercoll.runtime.arguments import Arguments, Mode
from hiercoll.runtime.binding import Binding
from hiercoll.runtime.cache import Cache, Idle
from hiercoll.runtime.factory import Lifetime, PlanFactory
from hiercoll.runtime.memories import Memories
from hiercoll.runtime.operations import Operation
from hiercoll.runtime.plan import Plan
from hiercoll.runtime.progress import abandoned
from hiercoll.runtime.reading import make_request
from hiercoll.runtime.request import Data, Request
from hiercoll.runtime.session import MAX_PLANS, MAX_SEEN, MAX_SHARED, MAX_SPARE, MAX_WINDOWS, Session
from hiercoll.runtime.tags import Tags
from hiercoll.runtime.window import (
    MOST_FLAGS,
    MOST_TOGETHER,
    PAGE,
    ROOM,
    SHARE,
    flags_together,
    header_bytes,
    room_together,
)
from hiercoll.runtime.windows import Windows
from hiercoll.schedule.lowering import Steps
from hiercoll.schedule.transports import Transport
from hiercoll.tables import NATIVE_VARIANT, Variant
from hiercoll.topology import parse_layout
from hiercoll.tuner import Candidate, Combining, Decision
from hiercoll.tuning.budget import Budget
from hiercoll.tuning.learning import Learner
from hiercoll.tuning.policy import Policy

RANKS = 4

# What tells requests apart

DATA = Data(4096, RANKS, 64, np.dtype("f8"))
SIZES, AT = np.array([8, 0, 16, 24]), np.array([0, 8, 8, 24])
UNEVEN = Data(4096, RANKS, 0, MPI.DOUBLE, None, SIZES, AT)
SUM = Operation(MPI.SUM, MPI.DOUBLE, 8, "SUM of float64", True, False)
EVEN = Request(ALLTOALL, DATA._replace(address=8192), DATA, 0, 64, Variant("bruck", {"radix": 2}), operation=SUM)
VARYING = Request(ALLTOALLV, UNEVEN._replace(address=8192), UNEVEN, 0, 0, Variant("pairwise"), limit=4096)


def of_uneven(**changes: Any) -> Request:
    assert VARYING.sent is not None
    return VARYING._replace(sent=VARYING.sent._replace(**changes))


CHANGED = {
    "collective": EVEN._replace(collective=ALLGATHER),
    "root": EVEN._replace(root=1),
    "algorithm": EVEN._replace(variant=Variant("pairwise", {"radix": 2})),
    "parameter": EVEN._replace(variant=Variant("bruck", {"radix": 4})),
    "transport": EVEN._replace(transport=Transport(peer=True)),
    "segments": EVEN._replace(transport=Transport(segments=2)),
    "memory": EVEN._replace(memory="cuda"),
    "place": EVEN._replace(received=DATA._replace(place="cuda:1")),
    "in place": EVEN._replace(sent=None),
    "operation": EVEN._replace(operation=SUM._replace(op=MPI.MAX, name="MAX of float64")),
    "operation of the same name": EVEN._replace(operation=SUM._replace(op=MPI.MAX)),
    "datatype of the operation": EVEN._replace(operation=SUM._replace(datatype=MPI.INT64_T)),
    "send address": EVEN._replace(sent=DATA._replace(address=8200)),
    "recv address": EVEN._replace(received=DATA._replace(address=4104)),
    "send type": EVEN._replace(sent=DATA._replace(address=8192, type=np.dtype("i8"))),
    "recv type": EVEN._replace(received=DATA._replace(type=MPI.DOUBLE)),
    "recv type of MPI": EVEN._replace(received=DATA._replace(type=MPI.INT64_T)),
    "block": EVEN._replace(received=DATA._replace(block=128), sent=DATA._replace(address=8192, block=128)),
    "blocks": EVEN._replace(received=DATA._replace(blocks=5)),
    "uneven": VARYING,
    "limit": VARYING._replace(limit=64),
    "send sizes": of_uneven(sizes=SIZES + 1),
    "send displacements": of_uneven(at=AT + 8),
    "recv sizes": VARYING._replace(received=UNEVEN._replace(sizes=SIZES[::-1].copy())),
    "recv displacements": VARYING._replace(received=UNEVEN._replace(at=AT[::-1].copy())),
    "uneven send address": of_uneven(address=0),
    "uneven recv address": VARYING._replace(received=UNEVEN._replace(address=0)),
    "uneven type": of_uneven(type=MPI.INT64_T),
    "uneven in place": VARYING._replace(sent=None),
}


@pytest.mark.parametrize("what", CHANGED)
def test_keys_leave_nothing_out(what: str) -> None:
    """Whatever differs, the keys do; those of all the others, too."""
    keys = {name: request.key for name, request in CHANGED.items() if name != what}
    mine = CHANGED[what].key
    assert mine not in {EVEN.key, *keys.values()} and (what == "uneven" or mine != VARYING.key)


def test_keys_do_not_tell_how_a_transport_was_chosen() -> None:
    """With the algorithm, or by the call: ranks that know a call may know it from either."""
    asked = EVEN._replace(transport=Transport(peer=True))
    assert asked._replace(variant=Variant("bruck", {"radix": 2}, "peer")).key == asked.key


def trying() -> Learner:
    """What learns, with the next call to be timed."""
    made = Learner(lambda own: [NATIVE_VARIANT, Variant("bruck", {"radix": 2})], list, Budget(inf))
    made.begin()
    assert made.is_trying
    return made


def test_equal_requests_have_equal_keys() -> None:
    """Also where data are other objects; what a call brings along does not count. Keys are frozen."""
    for request in (EVEN, VARYING):
        assert request.sent is not None
        again = [
            data._replace(owner=object(), sizes=None if data.sizes is None else SIZES.copy())
            for data in (request.sent, request.received)
        ]
        others = {"is_auto": True, "learner": trying(), "result": 1, "mode": Mode.HELD}
        same = request._replace(sent=again[0], received=again[1], **others)
        assert same.key == request.key and hash(same.key) == hash(request.key)
        assert same.common == request.common and len({same.key, request.key}) == 1
        for frozen in (same.key, same.common):
            with pytest.raises(AttributeError):
                setattr(frozen, frozen._fields[0], None)
    assert EVEN._replace(variant=Variant("bruck", {"radix": 2})).key == EVEN.key


def test_what_is_equal_on_all_ranks() -> None:
    """Not where data lie, nor uneven sizes; the size of equal blocks is."""
    for what in ("send address", "recv address", "send type", "place"):
        assert CHANGED[what].common == EVEN.common
    for what in ("send sizes", "recv sizes", "send displacements", "uneven type"):
        assert CHANGED[what].common == VARYING.common
    assert VARYING.common.size is None and EVEN.common.size == 64


# A session without others


class Comm:
    """In place of a communicator."""

    rank, size = 0, RANKS

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: None


class FakeArena:
    """In place of an MPI window; ``made``: what has been asked of all."""

    made: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, node: Any, flags: int, nbytes: int) -> None:
        self.made.append((flags, nbytes))
        self.room = [flags, nbytes]

    def fits(self, flags: int, nbytes: int) -> bool:
        return flags <= self.room[0] and nbytes <= self.room[1]

    def take(self, flags: int, nbytes: int) -> None:
        assert self.fits(flags, nbytes)
        self.room = [self.room[0] - flags, self.room[1] - nbytes]


class FakeWindow:
    """In place of shared memory."""

    def __init__(
        self, comm: Any, node: Any, arena: FakeArena, nbytes: int, flags: int, number: int, counted: int
    ) -> None:
        arena.take(header_bytes(node.size, flags), nbytes)
        self.number, self.nbytes, self.own = number, counted, np.zeros(nbytes, np.uint8)
        self.address, self.freed, self.spoiled, self.epoch, self.begun = self.own.ctypes.data, False, False, 0, 0

    def fits(self, flags: int, nbytes: int) -> bool:
        return not self.spoiled and nbytes <= self.own.nbytes

    def begin_anew(self, epoch: int) -> None:
        self.begun += 1

    def share_with(self, memory: Any) -> None:
        pass

    def tell_by_flags(self, *told: Any) -> None:
        pass

    def free(self) -> None:
        assert not self.freed
        self.freed = True


class Nothing:
    """An engine that has nothing to do."""

    def run(self) -> None:
        pass

    start = free = run


class Alone(Session):
    """Rank 0 of two nodes of two ranks; what it agrees on is what it says itself. ``agreed``: on what; ``bound``: what
    plans were made of; ``ran``: what was run."""

    def __init__(self) -> None:
        self.agreed: list[str] = []
        self.bound: list[Binding] = []
        self.ran: list[str] = []
        self.rank, self.size = 0, RANKS
        self.topology = parse_layout("2x2")
        comms: list[Any] = [Comm(name) for name in ("own", "user", "background", "node")]
        self.comm, self.user, self.background_comm, self._node = comms
        self.agreement = Agreement(0, np.copy, np.copy, self.agreed.append)
        self.disabled = self.stages = self.check = self.threadless = self.is_plain = False
        self.library, self.name, self.broken, self.watch, self.last = "MPICH 5.0.2", "x", None, None, ""
        self.shares: bool | None = True
        self.memories = Memories(lambda: self.node, self.agreement, 0, RANKS)
        self.numbers = {collective: number for number, collective in enumerate(called())}
        self.tags = Tags(2**20, len(self.numbers))
        self.windows = Windows(MAX_WINDOWS, MAX_SHARED, self._forget_plans_without_window, lambda value: [value])
        self.plans, self.recent, self._seen, self.impossible = Cache(MAX_PLANS, 2**28), {}, {}, set()
        self.copied, self.by_sizes = Cache(MAX_PLANS, 2**28), {}
        self.idle = Idle(MAX_PLANS, 2**28)
        self.routes = compiled.Routes(print)
        self._own_comms = []
        self._tagged = self.comm
        self.factory = PlanFactory(self)
        slowest, sums = self.agreement.slowest, self.agreement.sums
        self.policy = Policy(0, self.topology, self.library, False, slowest, sums, {})

    def run(self, plan: Any) -> None:
        self.ran.append(f"{type(plan).__name__}: {plan.name}")

    def request(
        self, collective: Collective = ALLTOALL, algorithm: str = "pairwise", block: int = 8, **how: Any
    ) -> Request:
        """Of new buffers, which live as long as it."""
        mode = how.pop("mode", Mode.BLOCKING)
        return make_request(self, collective, arguments(collective, algorithm, block, **how), mode, strict=True)


def arguments(collective: Collective = ALLTOALL, algorithm: str = "pairwise", block: int = 8, **how: Any) -> Arguments:
    """New buffers, and a choice."""
    full, one = np.zeros(block * RANKS, np.uint8), np.zeros(block, np.uint8)
    counts = [block] * RANKS
    if collective.one_buffer:
        given = Arguments(None, one)
    elif collective is ALLTOALLV:
        given = Arguments((np.zeros_like(full), counts), (full, counts))
    elif collective is ALLGATHERV:
        given = Arguments(one, (full, counts))
    else:
        given = Arguments(one if collective is ALLGATHER else np.zeros_like(full), full)
    return given._replace(algorithm=algorithm, **how)


@pytest.fixture(autouse=True)
def python_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans by Python's engines, also where there is a compiled one."""
    for module in (compiled, hiercoll.runtime.binding):
        monkeypatch.setattr(module, "load", lambda: (None, "a test"))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Alone:
    made = Alone()

    def plan_of(steps: Steps, binding: Binding, name: str) -> Plan:
        made.bound.append(binding)
        return Plan(Nothing(), name, steps.schedule, binding.memory)  # type: ignore[arg-type]

    monkeypatch.setattr(hiercoll.runtime.factory, "plan_of", plan_of)
    monkeypatch.setattr(hiercoll.runtime.factory, "Window", FakeWindow)
    monkeypatch.setattr(hiercoll.runtime.factory, "Arena", FakeArena)
    monkeypatch.setattr(FakeArena, "made", [])
    monkeypatch.setattr(hiercoll.runtime.session, "duplicate", lambda comm: Comm("tagged"))
    return made


SHARING = (Lifetime.KEPT, Lifetime.ONCE)
LIFETIMES = [*SHARING, Lifetime.BACKGROUND, Lifetime.HELD]


# What plans share


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_tags_of_plans(session: Alone, lifetime: Lifetime) -> None:
    """Those of blocking calls are of the collective; one in the background has some of its own on the same
    communicator, and one that a program holds on a communicator for such plans. Only that is agreed on."""
    for _ in range(2):
        session.factory.make(session.request(), lifetime)
    session.factory.make(session.request(BCAST, "binomial"), lifetime)
    comms = [binding.comm.name for binding in session.bound]  # type: ignore[attr-defined]
    first, second, other = (binding.tag for binding in session.bound)
    if lifetime in SHARING:
        assert first == second == session.tags.of_blocking(session.numbers[ALLTOALL])
        assert other == session.tags.of_blocking(session.numbers[BCAST]) != first
    else:
        assert first < second < other
    assert comms == ["tagged" if lifetime is Lifetime.HELD else "own"] * 3
    assert len(session.agreed) == (3 if lifetime is Lifetime.HELD else 0)


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_scratch_of_plans(session: Alone, lifetime: Lifetime) -> None:
    """That of blocking calls is the same for sizes of one class; all others have their own."""
    plans = [session.factory.make(session.request(algorithm="bruck", block=block), lifetime) for block in (65, 70, 300)]
    schedule = plans[0].schedule
    assert schedule is not None and schedule.scratch
    places = [binding.addresses["scratch"] for binding in session.bound]
    assert (places[0] == places[1]) == (lifetime in SHARING) and places[2] not in places[:2]
    assert [plan.nbytes for plan in plans] == [schedule.scratch * block for block in (65, 70, 300)]


def test_shared_scratch_goes_with_its_plans(session: Alone) -> None:
    """It is kept by plans only."""
    plans = [session.factory.make(session.request(algorithm="bruck"), Lifetime.KEPT) for _ in range(2)]
    pool = session.factory._scratch
    assert len(pool) == 1
    plans[0].free()
    assert len(pool) == 1
    plans[1].free()
    assert len(pool) == 0


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_windows_of_plans(session: Alone, lifetime: Lifetime) -> None:
    """Those of blocking calls share one by what is equal on all ranks; a plan that a program holds has its own, which
    waits for the other ranks when the plan is freed."""
    plans = [session.factory.make(session.request(ALLGATHER, "shared"), lifetime) for _ in range(2)]
    assert plans[0].schedule is not None and plans[0].schedule.shared
    windows = [binding.window for binding in session.bound]
    assert None not in windows
    if lifetime is Lifetime.HELD:
        assert windows[0] is not windows[1] and not session.windows.kept and session.windows.made == 2
        plans[1].free()
        session.factory.make(session.request(), Lifetime.HELD)
        assert session.windows.retired == 1 and not windows[1].freed  # type: ignore[union-attr]
        session.agreed.clear()
        session.factory.make(session.request(ALLGATHER, "shared"), Lifetime.HELD)
        assert session.bound[-1].window is windows[1] and session.windows.retired == 0 and session.windows.made == 2
        assert len(session.agreed) == 1  # nothing else is asked of the other ranks
    else:
        assert windows[0] is windows[1] and session.windows.made == 1
        assert [plan.window_key for plan in plans] == list(session.windows.kept) * 2


def test_windows_lie_together(session: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as there is room, for buffers and for flags; large ones lie alone, and so do those whose buffer is
    elsewhere."""
    monkeypatch.setattr(hiercoll.runtime.factory, "free_shared_memory", lambda: 2 * SHARE * MOST_TOGETHER)
    make, lanes, made = session.factory.new_window, session.node.size, FakeArena.made
    flags, common = header_bytes(lanes, 1), flags_together(lanes, header_bytes(lanes, 1))
    wanted = session.factory._wanted_bytes
    assert wanted(100, 1) == common + 2 * PAGE
    for _ in range(3):
        make(100, 1, 100)
    assert made == [(common, 2 * MOST_TOGETHER)] and wanted(100, 1) == PAGE
    make(MOST_TOGETHER + 1, 1, 0)
    make(0, 1, 0, alone=True)
    assert made[1:] == [(flags, MOST_TOGETHER + 1), (flags, 0)]
    make(MOST_TOGETHER, 1, 0)
    assert len(made) == 3 and wanted(MOST_TOGETHER, 1) == common + MOST_TOGETHER + PAGE
    assert wanted(MOST_TOGETHER + 1, 1) > MOST_TOGETHER and wanted(1, 1) == PAGE and wanted(1, 10_000) > 80_000
    for _ in range(2):
        make(MOST_TOGETHER, 1, 0)
    assert made[3:] == [(common, 2 * MOST_TOGETHER)]
    make(1, 10_000, 0)
    assert header_bytes(lanes, 10_000) > MOST_FLAGS and made[4:] == [(header_bytes(lanes, 10_000), 1)]


def test_windows_that_other_threads_make_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one adds up what nobody has touched."""

    class Led:
        def untouched_bytes(self) -> int:
            window._led.add(later)  # as another thread does that runs here
            return 5

    led, later = Led(), Led()
    monkeypatch.setattr(window, "_led", WeakSet([led]))
    assert window.untouched_bytes() == 5 and window.untouched_bytes() == 10


def test_room_for_windows_together() -> None:
    """For many, where memory is not scarce; for the first anyway."""
    assert room_together(1, None) == ROOM == room_together(MOST_TOGETHER, 1 << 40)
    assert room_together(1, 2 * MOST_TOGETHER * SHARE) == 2 * MOST_TOGETHER
    assert room_together(MOST_TOGETHER - 1, 1) == MOST_TOGETHER


def test_ranks_of_a_host_that_share_no_memory(session: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first window shows it: an error on all ranks, which other windows are not tried after."""
    tried: list[int] = []

    class Refused(FakeWindow):
        def __init__(self, *given: Any) -> None:
            tried.append(1)
            raise MPI.Exception(MPI.ERR_RMA_SHARED)

    monkeypatch.setattr(hiercoll.runtime.factory, "Window", Refused)
    session.shares = None
    for _ in range(2):
        with pytest.raises(ConstraintError, match="shared memory: expected ranks of a host that share memory"):
            session.factory.make(session.request(ALLGATHER, "shared"), Lifetime.KEPT)
    assert len(tried) == 1 and "agreement on shared memory" in session.agreed
    session.shares = True
    with pytest.raises(MPI.Exception):  # too little memory, or the like
        session.factory.make(session.request(ALLGATHER, "shared"), Lifetime.KEPT)


def test_windows_that_no_plan_takes_over(session: Alone) -> None:
    """One that is too small goes when a larger one is made; one whose plan was interrupted is left, as MPI may still
    write to it; few are kept."""

    def hold(block: int) -> Plan:
        return session.factory.make(session.request(ALLGATHER, "shared", block), Lifetime.HELD)

    (small := hold(8)).free()
    large = hold(64)
    assert session.bound[0].window.freed and session.windows.made == 2  # type: ignore[union-attr]
    large.broken = True
    large.free()
    hold(8).free()
    window: Any = session.bound[1].window
    assert not window.freed and window in abandoned and session.windows.made == 3 and small.is_freed
    for plan in [hold(8) for _ in range(MAX_SPARE + 1)]:
        plan.free()
    assert session.windows.retired == MAX_SPARE + 1
    session.factory.make(session.request(), Lifetime.HELD)
    assert session.windows.retired == 0


def test_a_held_plan_that_cannot_be_made_leaves_its_window(session: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the other ranks."""

    def refuse(*_: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(hiercoll.runtime.factory, "plan_of", refuse)
    with pytest.raises(MemoryError):
        session.factory.make(session.request(ALLGATHER, "shared"), Lifetime.HELD)
    assert session.windows.retired == 1
    with pytest.raises(MemoryError):
        session.factory.make(session.request(ALLGATHER, "shared"), Lifetime.KEPT)
    assert session.windows.retired == 1 and len(session.windows.kept) == 1


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_who_keeps_the_buffers(session: Alone, lifetime: Lifetime) -> None:
    """Plans that outlast the call, or may, keep the program's buffers, but for those of blocking calls."""
    request = session.request()
    plan = session.factory.make(request, lifetime)
    kept, lent = (any(owner is request.received.owner for owner in owners) for owners in (plan._owners, plan.guests))
    assert kept == (lifetime in (Lifetime.ONCE, Lifetime.HELD)) and lent == (lifetime is Lifetime.BACKGROUND)
    assert (plan.recvbuf is not None) == (lifetime is Lifetime.HELD) == (plan.on_free is not None)


def test_schedules_are_made_once(session: Alone) -> None:
    """For each algorithm, root and place, whatever the size."""
    schedule = session.factory.schedule
    assert schedule(session.request()) is schedule(session.request(block=100))
    roots = [schedule(session.request(BCAST, "binomial", root=root)) for root in (0, 1, 0)]
    assert roots[0] is roots[2] is not roots[1]
    assert schedule(session.request(algorithm="bruck")) is not schedule(
        session.request(algorithm="bruck", params={"radix": 4})
    )


def test_private_memory_for_the_background(session: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program asks for is refused if it has shared memory; what hiercoll chose becomes something else."""
    request = session.request(ALLGATHER, "shared", mode=Mode.BACKGROUND)
    with pytest.raises(ConstraintError, match="shares no memory"):
        session.factory.private(request)
    for names, expected in (
        (("shared", "ring", "bruck"), "ring"),
        (("shared", "native", "ring"), "native"),
        ((), "native"),
    ):
        ranking = tuple(Candidate(Variant(name), 1.0) for name in names)
        monkeypatch.setattr(session.policy, "decide", lambda wanted, r=ranking: Decision(NATIVE_VARIANT, "", r))
        other = session.factory.private(request._replace(is_auto=True))
        assert other.variant.algorithm == expected and other == request._replace(is_auto=True, variant=other.variant)
    for fine in (session.request(), session.request(algorithm="native")):
        assert session.factory.private(fine) is fine
    ordered = request._replace(is_auto=True, combining=Combining(Order.ANY, native=False))
    with pytest.raises(ConstraintError, match="one without shared memory, got order 'any'"):
        session.factory.private(ordered)


@pytest.mark.parametrize("mode", [Mode.BLOCKING, Mode.HELD])
@pytest.mark.parametrize("native", [True, False])
def test_what_cannot_be_run(session: Alone, monkeypatch: pytest.MonkeyPatch, mode: Mode, native: bool) -> None:
    """Native serves instead, or another algorithm where that may not; of blocking calls it is found out once, whatever
    becomes of plans that a program holds."""
    ranking = tuple(Candidate(Variant(name), 1.0) for name in ("shared", "ring"))
    monkeypatch.setattr(session.policy, "decide", lambda wanted: Decision(NATIVE_VARIANT, "", ranking))
    asked = session.request(ALLGATHER, "shared", mode=mode)
    request = asked._replace(is_auto=True, combining=Combining(Order.ANY, native))
    tried: list[str] = []

    def make(request: Request) -> str:
        tried.append(request.variant.algorithm)
        if tried[-1] == "shared":
            raise ConstraintError("shared", "room", "none")
        return tried[-1]

    expected = "native" if native else "ring"
    assert [or_native(session, make, request) for _ in range(2)] == [expected] * 2
    assert tried == ["shared", expected, *(["shared"] if mode is Mode.HELD else []), expected]
    with pytest.raises(ConstraintError):
        or_native(session, make, request._replace(is_auto=False))


def test_windows_that_a_program_has_no_room_for(session: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that have had room before still have it; and what has no schedule lacks no room."""
    request = session.request(ALLGATHER, "shared")
    request = request._replace(transport=request.transport._replace(shared=True))
    kept = session.factory.make(request, Lifetime.KEPT)
    monkeypatch.setattr(session, "reserve", lambda *given: (_ for _ in ()).throw(ConstraintError("x", "room", "none")))
    with pytest.raises(ConstraintError):
        session.factory.make(request, Lifetime.HELD)  # without places it needs a window, too
    assert not session.factory._roomless
    assert session.factory.make(request, Lifetime.KEPT).window_key == kept.window_key


@pytest.mark.parametrize("family", ["allgather", "bcast"])
@pytest.mark.parametrize("layout", ["2x3", "3+5", "1+3+4", "4+4:cyclic"])
def test_nodes_need_equally_large_windows(family: str, layout: str) -> None:
    """Of blocks whose sizes all ranks know: windows grow on all nodes together."""
    topology = parse_layout(layout)
    for algorithm in REGISTRY[family].values():
        for params in [
            {},
            *algorithm.together,
            *({p.name: value} for p in algorithm.parameters for value in p.choices),
        ]:
            if algorithm.refusal(topology, params) is None:
                each = [
                    algorithm.schedule(topology, rank, params, inplace=family == "bcast")
                    for rank in range(topology.size)
                ]
                assert len({(schedule.shared, tuple(sorted(schedule.holds))) for schedule in each}) == 1


# Which plans are kept


def test_a_first_call_makes_no_plan(session: Alone) -> None:
    """The second one does, and the third finds it; other buffers are another call."""
    request, other = session.request(), session.request()
    assert session.plan(request) is None and not session.bound and not session.plans
    plan = session.plan(request)
    assert plan is not None and len(session.bound) == 1
    assert session.plan(request) is plan and len(session.bound) == 1
    assert session.plan(other) is None
    assert session.plan(session.request()._replace(learner=trying())) is not None  # a call that is timed


def test_calls_are_remembered_within_bounds(session: Alone) -> None:
    """The oldest is forgotten first; one that has a plan is not among them."""
    requests = [EVEN._replace(received=DATA._replace(address=8 * at)) for at in range(MAX_SEEN + 1)]
    for request in requests:
        assert session.plan(request) is None
        assert len(session._seen) <= MAX_SEEN
    assert session.plan(requests[0]) is None  # forgotten, and the second with it
    assert session.plan(requests[2]) is not None and len(session._seen) == MAX_SEEN - 1
    assert session.plan(requests[1]) is None


def test_plans_are_kept_within_bounds(session: Alone) -> None:
    """Used last stays; aliases of plans that are freed find nothing, and are not kept for good."""
    for at in range(3 * MAX_PLANS):
        plan = session.plan(EVEN._replace(received=DATA._replace(address=8 * at), learner=trying()))
        assert plan is not None and not plan.is_freed
        session.remember((at,), plan)
        session.touch(session.recent[(0,)][0])
        assert len(session.plans) <= MAX_PLANS and len(session.recent) <= 2 * MAX_PLANS
    assert not session.recent[(0,)][0].is_freed
    live = [alias for alias, (plan, _) in session.recent.items() if not plan.is_freed]
    assert len(live) == MAX_PLANS
    session.drop_plans()
    assert not session.recent and not session.plans


def test_aliases_go_with_the_windows_of_their_plans(session: Alone) -> None:
    """When a window goes, so do the plans that use it, and what finds them."""
    given = arguments(ALLGATHER, "shared")
    request = make_request(session, ALLGATHER, given, strict=True)
    for _ in range(2):
        serve(session, request, given)
    (alias,) = session.recent
    assert alias == equal_alias(ALLGATHER, given)
    for block in range(1, MAX_WINDOWS + 2):
        assert (alias in session.recent) == (block <= MAX_WINDOWS)
        session.plan(session.request(ALLGATHER, "shared", block=100 * block)._replace(learner=trying()))
    assert not session.recent and len(session.windows.kept) == MAX_WINDOWS


def test_plans_not_kept_have_no_alias(session: Alone) -> None:
    """Calls that are tried have one by their name, none by "auto"."""
    request = session.request()
    session.remember((1,), session.factory.make(request, Lifetime.ONCE))
    assert not session.recent
    named = arguments()
    given = named._replace(algorithm="auto", params={})
    tried = make_request(session, ALLTOALL, named, strict=True)._replace(learner=trying())
    serve(session, tried._replace(learner=None), named)
    session.plans.clear()
    session.recent.clear()
    plan = session.plan(tried)
    assert plan is not None
    remember(session, tried, given, plan)
    assert list(session.recent) == [equal_alias(ALLTOALL, named._replace(params=dict(tried.variant.params)))]


def test_what_serves_a_first_call(session: Alone) -> None:
    """Steps in sequence run without a plan; all others, and those that must let others go on, have a plan once."""
    given = arguments()
    assert (
        serve(session, make_request(session, ALLTOALL, given, strict=True), given)
        == "alltoall pairwise exchange=rotation"
    )
    session.watch = Comm("a deadline")  # type: ignore[assignment]
    serve(session, session.request(), given)
    assert [each.split(":")[0] for each in session.ran] == ["Once", "Plan"]
    assert serve(session, session.request(block=0), given).startswith("alltoall") and len(session.ran) == 2


def test_kept_windows_are_used_by_calls_without_a_plan(session: Alone) -> None:
    """On other ranks they may have one: a call counts, whatever serves it."""
    for block in (8, 16):
        session.run_once(session.request(ALLGATHER, "shared", block=block))
    assert [key.size for key in session.windows.kept] == [8, 16]  # type: ignore[attr-defined]
    session.run_once(session.request(ALLGATHER, "shared", block=8))
    used = [window.used for window in session.windows.kept.values()]
    assert len(used) == 2 and used[0] > used[1] and session.windows.made == 2
    assert session.plan(request := session.request(ALLGATHER, "shared", block=16)) is None
    assert session.plan(request) is not None
    assert [key.size for key in session.windows.kept] == [8, 16]  # type: ignore[attr-defined]


def test_roots_are_checked(session: Alone) -> None:
    """True is none for functions."""
    for root in (True, -1, RANKS, 0.0, "0"):
        with pytest.raises(ParameterError, match="root"):
            session.request(BCAST, "binomial", root=root)
    assert session.request(BCAST, "binomial", root=np.int64(2)).root == 2


def test_choices_that_are_no_text(session: Alone) -> None:
    """Typed errors, also for arrays, which compare element by element."""
    for wrong in (np.array(["auto", "native"]), ["auto"], None, 1):
        with pytest.raises(UnknownAlgorithmError, match="a name"):
            make_request(session, ALLTOALL, arguments()._replace(algorithm=wrong), strict=True)
        with pytest.raises(ParameterError, match="transport"):
            make_request(session, ALLTOALL, arguments()._replace(transport=wrong), strict=True)
