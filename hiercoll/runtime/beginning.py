"""The first calls on a communicator, before hiercoll is set up on it.

A set-up (a duplicate, what ranks have in common, the topology) takes far longer than a short call, and many
communicators do not live long. So as long as "auto" is the MPI library's own anyway, since there is no table and
nothing is known from earlier jobs, blocking calls are left to it, and counted. Ranks set hiercoll up when the share
that learning may cost of the time of these calls pays for that, and for a part of importing hiercoll, or when a call
asks for anything else. Where calls take little longer than the links between nodes need for what they send, far more of
them must pay (`bound`).
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from mpi4py import MPI

from hiercoll import loading, settings
from hiercoll.folders import places_of, ranks_of
from hiercoll.runtime import compiled, progress
from hiercoll.runtime.library import mpi_library
from hiercoll.runtime.waiting import wait_for
from hiercoll.runtime.watch import UNKNOWN, Watch
from hiercoll.statistics import median
from hiercoll.tuning.share import LEADS, SHARE, Before, in_common, part_of_share

if TYPE_CHECKING:
    from hiercoll.collectives import Collective
    from hiercoll.runtime.arguments import Arguments
    from hiercoll.runtime.bound import Bound
    from hiercoll.runtime.memories import Memories
    from hiercoll.topology import Topology
    from hiercoll.tuning.policy import Policy

FOR_GOOD = 1 << 62  # calls, where hiercoll is never set up
FIRST = 48  # calls before ranks look at their time: an agreement may cost as much as two short calls
LONG = 1 << 16  # bytes of a first call, from which on ranks look earlier; for each power of two after half as many
MARGIN = 1.25  # times as many calls as are needed by what is known, until the next look: a look takes as long as a few
# Where as much is missing as so many looks cost, the next one is when half of it is there: what few calls tell is
# rough, and most often too much, since in these some rank was late.
FAR, HALF_WAY = 4, 0.5
GROWTH = 8  # times as many calls have been served at the next look, at most
# Where another communicator leads, which may have found something meanwhile:
SOONER = 3  # times as many at the next look, at most
LOOKING = 0.25  # of what may be spent, that later looks cost
PATIENCE = 8  # times as much must pay for a set-up, until it has; or where nothing was found
AT_BOUND = 64  # the same where links need nearly as long as calls take; then times as many calls at the next look:
DOUBLED = 2
LONGEST = 1 << 16  # calls between two looks
SET_UP = "set-up (the first call of hiercoll on a communicator)"
LEAST, MEETINGS = 2.5e-3, 4  # a set-up takes about so many seconds, and as long as so many agreements besides
LOOKS = 2  # agreements that a look at times costs as much as, until that is known
LOOK = 1.0  # seconds after which files are looked for again

# What a rank may wish, or have.
IS_SPECIAL, IS_QUIET, IS_FIRST, HAS_TABLE, HAS_THREADS, IS_DISABLED = 1, 2, 4, 8, 16, 32
HALF, HALVINGS = 64, 4  # one bit more for each time that ranks are to look after half as many calls, as bits are or'ed
HAS_LEARNED = HALF << HALVINGS
LENGTHS = HAS_LEARNED - HALF
ONCE = IS_FIRST | HAS_THREADS | LENGTHS  # of these, what goes for one communicator alone
SIZES = 53  # of communicators, that wishes tell apart


def _learned_on(size: int) -> int:
    """That earlier jobs have found something faster than native on so many ranks, in a wish."""
    return HAS_LEARNED << size % SIZES


def _length_of(nbytes: int) -> int:
    """That a first call has so many bytes, in a wish."""
    return (HALF << min((nbytes // LONG).bit_length(), HALVINGS)) - HALF


def until_changed() -> array[int]:
    """A counter of calls, and of nanoseconds, that lasts until it is set to 0."""
    return array("q", (FOR_GOOD, 0))


class Alike:
    """What communicators of one size have in common on which this process has the same rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.routes = compiled.make_routes(_cannot_fail, rank, size)  # their calls, by arguments
        self.routes.open(True)
        self.sound: set[object] = set()  # see Session
        self.choices = until_changed()  # which they never are
        self._rank, self._size = rank, size

    @cached_property
    def topology(self) -> Topology:
        """Not known yet: as if there were one node."""
        from hiercoll.topology import Topology

        return Topology((0,) * self._size)

    @cached_property
    def policy(self) -> Policy:
        """Native for everything."""
        from hiercoll.tuning.policy import Policy

        return Policy(self._rank, self.topology, "", True, list, list)


_alike = lru_cache(64)(Alike)


@cache
def _memories() -> Memories:
    """What `make_request` asks for the places of buffers."""
    import numpy as np

    from hiercoll.runtime.agreement import Agreement
    from hiercoll.runtime.memories import Memories

    return Memories(lambda: MPI.COMM_SELF, Agreement(0, np.copy, np.copy, lambda what: None), 0, 1)


class Beginning:
    """A communicator on which hiercoll is not set up; so far as `make_request` asks, it is like a session."""

    stages, check, library, unwatched, order, is_plain = False, False, "", True, None, True
    seconds = 0.0  # of calls so far
    agreed = 0.0  # seconds that it takes ranks to agree, equal on all of them
    is_settled = False  # whether it is known that nothing is faster on so many ranks, likewise
    since = 0.0  # when the call began in which ranks have agreed last; 0: it is over
    is_at_bound = False  # whether links between nodes need nearly as long as calls take, likewise
    _bound: Bound | None = None  # what calls take at least, once they could pay for a set-up
    _usual = 0.0  # seconds of a call of this rank
    _aside = 0.0  # seconds that such calls took this rank longer, which have not been agreed on
    _served = 0

    def __init__(self, comm: MPI.Intracomm, wishes: int, tally: array[int] | None = None) -> None:
        """``tally``: what has counted its calls, if there were any."""
        self.rank, self.size = comm.rank, comm.size
        self.is_special, self.is_disabled = bool(wishes & IS_SPECIAL), bool(wishes & IS_DISABLED)
        # Whether it is known what is faster: then a set-up is worth as much time as calls have taken before, and the
        # first one of a rank is made at once.
        self.is_informed = bool(wishes & (HAS_TABLE | _learned_on(self.size)))
        self.is_eager = self.is_special or (self.is_informed and bool(wishes & IS_FIRST))
        is_idle = self.size == 1 or bool(wishes & IS_QUIET and not self.is_informed)
        self._calls = FOR_GOOD if is_idle else FIRST >> (wishes & LENGTHS).bit_count()
        # Calls that are left, and nanoseconds that they took; of a communicator of which nothing else is known.
        self.untouched = array("q", (FOR_GOOD if is_idle else FIRST, 0))
        self.tally = array("q", (self._calls, 0)) if tally is None else tally
        self.user = self.comm = MPI.Intracomm(comm)  # mpi4py's own
        self.meeting = _meeting
        self._looks: list[float] = []  # seconds that each agreement so far took, and others because of it
        self._alike = alike = _alike(self.rank, self.size)
        self.routes, self.sound, self.choices = alike.routes, alike.sound, alike.choices

    @property
    def cost(self) -> float:
        """Seconds that agreements have taken so far, about. Some calls take far longer than others, and if it is one in
        which ranks agree, that is no cost: so the one in the middle counts."""
        looks = len(self._looks) * median(self._looks) if self._looks else 0.0
        return looks + (0.0 if self._bound is None else self._bound.cost)

    @property
    def topology(self) -> Topology:
        """See `Alike`."""
        return self._alike.topology

    @property
    def policy(self) -> Policy:
        """See `Alike`."""
        return self._alike.policy

    @property
    def memories(self) -> Memories:
        """See `Session`."""
        return _memories()

    def goes_on(self, known: float, collective: Collective | None = None, given: Arguments | None = None) -> bool:
        """Whether it is too early for a set-up. One took ``known`` seconds, 0 if this process has not seen any: then it
        is estimated by what it takes to agree. ``collective``, ``given``: the call that comes next, if there is one.
        Collective."""
        if self._bound is not None and self._bound.takes(collective, given):
            self.tally[0] = 1
            return True
        self.since = perf_counter()
        mine = [-self.tally[1] * 1e-9, -self.meeting, self._aside, -self._aside, known, loading.to_pay(), *self._news]
        found = largest(self.comm, [*mine, "numpy" not in sys.modules])
        least, meeting, slowest, negated, known, importing, part, gains, settled, lacks_numpy = found
        self.is_settled = bool(settled)
        aside = in_common(slowest, -negated, self.agreed) if self._served else 0.0
        self.meeting = min(self.meeting, perf_counter() - self.since)
        self.agreed = -meeting
        self._looks.append(aside or self.agreed)  # the first agreement: on wishes
        self._usual, self._aside = self.tally[1] * 1e-9 / self._calls, 0.0
        self.seconds -= least
        self._served += self._calls
        own = part if part >= LEADS and not self.is_settled else part / PATIENCE
        share = 1.0 if self.is_informed else SHARE * (1.0 if gains else own)
        needed = self.cost + self.agreed + (known or LEAST + MEETINGS * self.agreed) + importing
        self.is_at_bound = self._bound is not None and self._bound.is_near(-least, self._calls)
        has_looked = self._bound is not None and self._bound.is_fresh  # before, there was enough to pay
        if (needed <= share * self.seconds or has_looked) and not self.is_at_bound:
            if self.is_informed or gains or lacks_numpy or not self._looks_closer():
                return False
            assert self._bound is not None
            self._calls = self._bound.begin(-least / self._calls, collective, given)
            self.tally[:] = array("q", (1, 0))
            return True
        self._plan_next(needed, share / AT_BOUND if self.is_at_bound else share, part)
        return True

    def _plan_next(self, needed: float, share: float, part: float) -> None:
        """Look again when this share of the time of calls may pay for so many seconds."""
        # That this one will have cost, and the next one; nothing is known yet at the first one.
        look = max(self.agreed, median(self._looks) if len(self._looks) > 1 else LOOKS * self.agreed)
        lacking = (needed + 2 * look) / share - self.seconds
        self._calls = self._until_next(look, lacking, part)
        self.tally[:] = array("q", (self._calls, 0))

    def _looks_closer(self) -> bool:
        """Whether calls are to be looked at before a set-up: there are links between nodes, and they have not just
        been. Collective at first."""
        if self._bound is None:
            from hiercoll.runtime.bound import Bound

            begin, self._bound = perf_counter(), Bound(self.comm)
            self.since += perf_counter() - begin  # which it counts itself
        return self._bound.has_links and not self._bound.is_fresh

    def _until_next(self, look: float, lacking: float, part: float) -> int:
        """Calls until the next look, which costs so many seconds, where calls of so many seconds are ``lacking``."""
        each = self.seconds / self._served
        if not each:
            return min((GROWTH - 1) * self._served, LONGEST)
        most: float = ((DOUBLED if self.is_at_bound else GROWTH) - 1) * self._served
        if part < LEADS:
            most = min((SOONER - 1) * self._served, max(FIRST, look / (LOOKING * SHARE * part * each)))
        wait = lacking / each * (HALF_WAY if SHARE * lacking > FAR * look else MARGIN)
        return int(min(max(wait, min(look / (SHARE * each), FIRST), 1), most, LONGEST))

    @property
    def _news(self) -> tuple[float, bool, bool]:
        """On rank 0: which part of what learning may cost is for this communicator; where another one leads, whether
        something has been found meanwhile that is faster than native on so many ranks; whether it
        is known that nothing is."""
        if self.rank:
            return 0.0, False, False
        part = own_part(self.size)
        gains = part < LEADS and bool(_wishes(self.comm, is_first=True) & _learned_on(self.size))
        return part, gains, _is_settled(self.size)

    @property
    def paid(self) -> Before:
        """What its calls and agreements, with that on the set-up, have taken."""
        call = self.seconds / self._served if self._served else 0.0
        return Before(self.seconds, call, self.cost + self.agreed)

    def served(self) -> None:
        """A call is over."""
        if self.since:
            self._aside += perf_counter() - self.since - self._usual
            self.since = 0.0


def own_part(size: int) -> float:
    """See `part_of_share`: of a communicator of so many ranks, of which this process is the first. That of the first
    process of all leads, or one of all ranks."""
    world = MPI.COMM_WORLD
    return part_of_share(size, world.size, leads=world.rank == 0 or size >= world.size)


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """The ranks of MPI_COMM_WORLD that the ranks of ``comm`` have."""
    from hiercoll.topology import translated

    return translated(range(comm.size), comm, MPI.COMM_WORLD)


def first_watch(comm: MPI.Intracomm, seconds: float) -> Watch | None:
    """What keeps a deadline before anything is known of the ranks; None where there is none."""
    if not seconds:
        return None
    world = world_ranks(comm)
    name = f"{zlib.crc32(repr(world).encode()):08x}"
    return Watch(seconds, name, comm.rank, [UNKNOWN] * comm.size, world, lambda _: None)


_meeting = 0.0  # seconds that ranks last took to agree on wishes


def agree(comm: MPI.Intracomm, watch: Watch | None, nbytes: int, *, is_first: bool) -> int:
    """The wishes of all ranks for a communicator that hiercoll has not met. ``watch`` keeps this rank's deadline, if it
    has one; ``nbytes``: of this rank in the first call, as far as it is known; ``is_first``: hiercoll has not been set
    up on this rank yet. Raises CollectiveTimeout and CollectiveFailed. Collective."""
    global _meeting
    own = _wishes(comm, is_first=is_first) | _length_of(nbytes)
    own |= IS_FIRST * is_first | HAS_THREADS * progress.other_threads()
    wishes = array("q", [own])
    since = perf_counter()
    if comm.size > 1:
        found = array("q", [0])
        wait_for(MPI.Comm.Iallreduce(comm, wishes, found, op=MPI.BOR).Test, SET_UP, watch)
        wishes = found
    _meeting = perf_counter() - since
    # Where one rank wants nothing but the MPI library, all do without whatever others want.
    return wishes[0] & (IS_DISABLED | HAS_THREADS) | IS_QUIET if wishes[0] & IS_DISABLED else wishes[0]


# When, for communicators of how many ranks at most; whether there is a table; for how many ranks something is known
# that is faster than native.
_seen: tuple[float, int, bool, frozenset[int]] = (-LOOK, 0, False, frozenset())


def _wishes(comm: MPI.Intracomm, *, is_first: bool) -> int:
    """This rank's, by the environment and, on rank 0, by what the user has: a table, or what earlier jobs have found.
    Files are looked for once a second at most, as programs may make many communicators."""
    global _seen
    if settings.is_disabled():
        return IS_DISABLED
    is_threadless = MPI.Query_thread() != MPI.THREAD_MULTIPLE  # then each call is looked at
    wishes = IS_SPECIAL * (settings.is_special() or is_threadless) + IS_QUIET * (not settings.learns())
    if wishes & IS_SPECIAL or comm.rank:
        return wishes
    now, most = monotonic(), max(comm.size, MPI.COMM_WORLD.size)
    if now > _seen[0] + LOOK or most > _seen[1]:
        _seen = (now, most, settings.own_table() is not None, _gaining(most, is_first=is_first))
    _, _, has_table, gaining = _seen
    return wishes | HAS_TABLE * has_table | sum({_learned_on(size) for size in gaining})


def _gaining(most: int, *, is_first: bool) -> frozenset[int]:
    """Numbers of ranks, up to ``most``, for which something is known that is faster than native."""
    places = places_of(mpi_library(), settings.learned_folder())
    if is_first and not any(ranks_of(place.name) <= most for place in places):
        return frozenset()
    from hiercoll.learned import gaining_ranks

    return gaining_ranks(mpi_library(), most)


def _is_settled(size: int) -> bool:
    """Whether all there is has been tried for so many ranks, and nothing is faster than native."""
    if not any(ranks_of(place.name) == size for place in places_of(mpi_library(), settings.learned_folder())):
        return False
    from hiercoll.learned import settled_ranks

    return size in settled_ranks(mpi_library(), size)


def _cannot_fail(*_: object) -> None:
    """No programs are run here."""


def largest(comm: MPI.Intracomm, values: Sequence[float]) -> list[float]:
    """The largest of all ranks' values, each of several. Collective."""
    mine = array("d", values)
    most = array("d", mine)
    MPI.Comm.Allreduce(comm, mine, most, op=MPI.MAX)
    return most.tolist()
