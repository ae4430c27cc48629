"""What finding out what serves a communicator's calls best may cost: a share of the time that these calls take.

Ranks meet to agree on how long calls took. Such a meeting costs as much as several short calls, so that it is about the
calls of all kinds at once, and is put off until there is enough to spend.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from hiercoll.tuning.share import SHARE, in_common

if TYPE_CHECKING:
    from hiercoll.tables import Variant

REINVESTED = 0.25  # of what has been found already saves, that finding out may cost besides
CAUTION = 0.95  # of that, which is planned for: what is estimated may take longer
FIRST, FEWEST = 16, 3  # calls of a kind, at least, whose time says something; so few of long ones
NEARLY = 0.75  # of these, that are enough where ranks meet for other kinds
PLAN_SECONDS = 1e-3  # that a plan takes to make, until that is known
LONG_WAIT = 64  # calls of a kind, at most, before ranks first meet
LONGEST_WAIT = 4096  # calls between two such meetings, while there is too little time to spend
MEETINGS = 2.0  # that calls last longer in which ranks meet, until that is known; and besides
THINKING = 0.5e-3  # seconds that a rank thinks in such calls, of a core's time
DENSE = 2.0  # times as long as calls take at most, from the end of one to that of the next, where they are most of it
DEARER = 3.0  # times as long as estimated, that it takes to ask the model, until that is known

Agree: TypeAlias = "Callable[[Sequence[float]], list[float]]"


def _plan_of(variant: Variant) -> tuple[object, ...]:
    """What decides how long a plan takes to make: the algorithm, and where its memory is."""
    return variant.algorithm, variant.params.get("memory")


class Kind:
    """Calls of one kind, as they are counted; what is not this rank's alone is equal on all ranks.

    ``go_on`` is called when so many have been served as were planned, with how many more there are to be first, if
    ranks wanted to meet and cannot afford it yet, else 0. ``is_alone``: only in a call of this kind.
    """

    def __init__(self, go_on: Callable[[int], None]) -> None:
        self.go_on, self.is_alone = go_on, False
        self.first = FIRST  # calls, at least, whose time says something
        # Calls that are left, and nanoseconds of this rank that others took. An array for each choice: what serves
        # calls as long as there are some left in it serves none after the choice has changed.
        self.tally = array("q", [0, 0])
        self.planned, self.wants = 0, False  # calls, and whether ranks are to agree on how long they took
        self.calls = 0  # before those that are planned
        # Since it last went on: calls, those of them that ranks have agreed on, and their seconds.
        self.asked, self.seen, self.seen_seconds = 0, 0, 0.0
        self.is_tried = False  # whether the next call is a trial
        self.typical = inf  # seconds of a call, of the rank that waited the least
        self.usual = inf  # the same on this rank
        self.period = inf  # seconds from the end of one call to that of the next
        self.is_dense = False  # whether calls take most of that, on the rank in the middle
        self.seconds = 0.0  # that ranks have agreed on so far
        self.gain = 0.0  # seconds that each second saves that its calls take now
        self.promised = 0.0  # the same by trials
        self.natives = inf  # `pace` when native served
        self.pledged = 0.0  # seconds that it is going to spend, and has not yet
        self.waits = False  # whether there is too little to spend so far; then it goes on in any call
        self.seeks = False  # whether something is looked for that serves them better
        self.place = 0  # of the candidate that is tried among all
        self.since = 0.0  # seconds of the communicator's calls before the first one
        self.last = 0.0  # seconds of the communicator's calls when there have last been such calls
        self._left = 0  # calls in the tally when they were last added up
        # That ranks have not agreed on: calls, this rank's seconds in them, and between their ends.
        self._calls, self._seconds, self._between = 0, 0.0, 0.0
        self._since = 0.0  # when calls were last added up; 0: the next ones are trials
        self._credited = 0.0  # seconds that are thought of them so far

    def plan(self, calls: int, *, wants: bool = False, anew: bool = True) -> array[int]:
        """Count so many more calls, with an array of their own or the one before: that array."""
        self._add_up()
        if anew:
            self.tally[0] = 0
            self.tally = array("q", [0, 0])
        self.tally[0] = self._left = self.planned = calls
        self.wants = wants
        self._since = perf_counter() if calls else 0.0
        return self.tally

    def add(self, calls: int) -> None:
        """So many calls have been served."""
        self.calls += calls
        self.asked += calls

    def close(self) -> float:
        """Count the calls that have been served as served. Returns seconds that they are thought to have taken."""
        self.add(self.planned - self.tally[0])
        self.planned = self.tally[0]
        calls, *_ = self.unseen
        more = calls * self.typical - self._credited if self.typical < inf else 0.0
        self._credited += more
        return more

    @property
    def is_due(self) -> bool:
        """Whether most of the calls have been served that are planned, or they wait for what others earn, and it can go
        on in a call of another kind."""
        is_late = self.waits or 2 * self.tally[0] <= self.planned
        return is_late and 0 <= self.tally[0] < self.planned and not self.is_alone

    @property
    def is_unmet(self) -> bool:
        """Whether ranks want to agree on how long calls took, and have not on most of them."""
        return self.wants and 2 * self.seen < self.asked

    def forget(self) -> None:
        """What calls took so far says nothing of those to come."""
        self._add_up()
        self._clear()
        self.usual = inf
        self.renew()

    def renew(self) -> None:
        """It goes on."""
        self.asked, self.seen, self.seen_seconds = 0, 0, 0.0

    @property
    def unseen(self) -> tuple[int, float, float]:
        """Calls on which ranks have not agreed; their seconds on this rank, and those from before them to their end."""
        self._add_up()
        return self._calls, self._seconds, self._between

    def see(self, calls: int, seconds: float, most: float, between: float) -> float:
        """Ranks have agreed that these calls took so long, where it waited the least, and the ``most``; ``between``:
        seconds from before them to their end. Returns what that is more than was thought."""
        self.seconds += seconds
        self.seen += calls
        self.seen_seconds += seconds
        self.typical = self.seen_seconds / self.seen
        self.period, self.is_dense = between / calls, between <= DENSE * (seconds + most) / 2
        if self.pace:
            self.gain = min(self.promised, max(0.0, self.natives / self.pace - 1.0))
        more = seconds - self._credited
        self._clear()
        return more

    @property
    def pace(self) -> float:
        """Seconds that a call takes the program, about: with what it does besides where calls are most of the time."""
        return self.period if self.is_dense else self.typical

    def promise(self, gain: float, *, was_native: bool) -> None:
        """Trials promise that something else serves calls better from now on: what it saves is no more than that, nor
        than calls show. ``was_native``: native has served them so far."""
        self.gain = self.promised = gain
        if was_native:
            self.natives = self.pace

    def _clear(self) -> None:
        self._calls, self._seconds, self._between, self._credited = 0, 0.0, 0.0, 0.0

    def _add_up(self) -> None:
        self._calls += self._left - self.tally[0]
        self._seconds += self.tally[1] * 1e-9
        self._left, self.tally[1] = self.tally[0], 0
        if self._since:
            now = perf_counter()
            self._between += now - self._since
            self._since = now
        if self._calls >= self.first:
            self.usual = self._seconds / self._calls


@dataclass(eq=False, repr=False)
class Budget:
    """Of a communicator: seconds that its calls took, or would have taken without trials, and that finding out cost
    besides; calls that it made shorter are credited. ``set_up``: of the cost, what was for the communicator's set-up;
    ``meeting``: that it takes ranks to meet; ``plan``: that a plan takes to make, until that is known; ``call``: that a
    call took before kinds were told apart; ``cores``: of each rank, less than 1 where ranks share them; ``saved``: that
    calls took less than native would have. Equal on all ranks, but for what is said to be a rank's own."""

    share: float = SHARE
    calls: float = 0.0
    cost: float = 0.0
    set_up: float = 0.0
    meeting: float = 0.0
    plan: float = PLAN_SECONDS
    call: float = 0.0
    cores: float = inf
    plans: dict[tuple[object, ...], float] = field(default_factory=dict)  # the same by what `_plan_of` says
    saved: float = 0.0
    pledged: float = 0.0  # seconds that are going to be spent
    kinds: list[Kind] = field(default_factory=list)  # in the order in which their first calls came
    # This rank's seconds that are not in ``cost`` yet: what calls took longer in which it met others, or thought; for
    # which it asked the model, and waited for others that did; and what it took to keep what was found.
    aside: float = 0.0
    asking: float = 0.0
    keeping: float = 0.0
    visits: int = 0  # such calls, since ranks have last met
    is_visit: bool = False  # whether this call is one: not where ranks have met for a trial
    estimated: float = 0.0  # seconds that it should have taken to ask the model, since then
    dearer: float = DEARER  # times as long as estimated, that it took
    _visit: float = inf

    def join(self, kind: Kind, seconds: float = inf) -> None:
        """There are calls of this kind, too; ``seconds``: of one of them, by an earlier job."""
        kind.since = self.calls
        if call := seconds if seconds < inf else self.call:
            kind.first = ceil(min(max(self.visit_seconds / (SHARE * call), FEWEST), FIRST))
        self.kinds.append(kind)

    def between(self, kind: Kind) -> float:
        """Seconds that all calls on the communicator take, on average, from one of this kind to the next."""
        return max(kind.typical, (self.calls - kind.since) / max(1, kind.calls))

    def visited(self, seconds: float) -> None:
        """A call is over that took this rank so much longer, since it met others, or thought."""
        self.aside += seconds
        self.visits += 1

    def plan_seconds(self, variant: Variant) -> float:
        """That a plan takes to make, by those of the algorithm so far; of another algorithm, by the shortest: the first
        plan with memory of the node also makes what later ones find."""
        return self.plans.get(_plan_of(variant), min([self.plan, *self.plans.values()]))

    def planned(self, variant: Variant, seconds: float) -> None:
        """A plan has taken so long."""
        self.plans[_plan_of(variant)] = seconds

    @property
    def visit_seconds(self) -> float:
        """Seconds that a call lasts longer in which ranks meet, or think, about."""
        return self._visit if self._visit < inf else MEETINGS * self.meeting + THINKING / self.cores

    @property
    def unseen_visits(self) -> float:
        """Seconds of such calls that are not in ``cost`` yet, with this one if it is one, about."""
        return (self.visits + self.is_visit) * self.visit_seconds

    def behind(self, kind: Kind) -> int:
        """How many candidates more have been tried for this kind than for any other for which something is looked for,
        and that has had calls in the later half of the time: it still comes."""
        places = [each.place for each in self.kinds if each.seeks and self.calls < 2 * each.last]
        return max(0, kind.place - min(places, default=kind.place))

    def lacks(self, seconds: float) -> float:
        """Seconds of calls that are missing before so much may be spent. What has been saved pays for some of it."""
        spent = self.cost + self.pledged + seconds - REINVESTED * self.saved
        return max(0.0, spent / (CAUTION * self.share) - self.calls)

    def earn(self, kind: Kind, seconds: float) -> None:
        """Calls of a kind that are no trials have taken so many more seconds than was thought."""
        self.calls += seconds
        self.saved += kind.gain * seconds

    def pledge(self, kind: Kind, seconds: float) -> None:
        """It is going to spend so many."""
        kind.pledged += seconds
        self.pledged += seconds

    def release(self, kind: Kind) -> None:
        """It has spent what it pledged."""
        self.pledged -= kind.pledged
        kind.pledged = 0.0

    def visit(self, asker: Kind, agree: Agree) -> None:
        """What is to be done in a call of this kind; since it costs no more, also for others that are due, those first
        that take the most time. Collective if one of them wants ranks to meet, and they can afford it."""
        self.is_visit = True
        try:
            due = self._close(asker)
            unmet = [kind for kind in due if kind.is_unmet and kind.unseen[0] >= kind.first]
            if unmet and not all(self._missing(unmet)):
                self.meet(agree)
            self._go_on(due)
        finally:
            self.is_visit = False

    def go_round(self) -> None:
        """The same for kinds that are due after a trial, for which ranks have met."""
        self._go_on(self._close())

    def _close(self, asker: Kind | None = None) -> list[Kind]:
        """The kinds that are due."""
        due = [kind for kind in self.kinds if kind is asker or kind.is_due]
        for kind in due:
            self.earn(kind, kind.close())
            kind.last = self.calls
        return due

    def _go_on(self, due: Sequence[Kind]) -> None:
        unmet = [kind for kind in due if kind.is_unmet]
        missing = dict(zip(map(id, unmet), self._missing(unmet), strict=True))
        for kind in sorted(due, key=lambda kind: -kind.seconds):
            kind.go_on(max(kind.first, missing[id(kind)]) if id(kind) in missing else 0)

    def _missing(self, unmet: Sequence[Kind]) -> list[int]:
        """Calls of each kind that are missing before ranks may meet, about. Seconds of calls of which they know nothing
        count as what others take on average; they are not waited for for long."""
        if not unmet:
            return []
        known = [each.typical for each in self.kinds if each.typical < inf]
        average = sum(known) / len(known) if known else self.call
        unknown = sum(each.unseen[0] for each in self.kinds if each.typical == inf)
        lacking = self.lacks(self.unseen_visits) - unknown * average
        if lacking > 0.0:  # there will be another visit by then
            lacking += self.visit_seconds / (CAUTION * self.share)

        def missing(kind: Kind) -> int:
            most = (LONG_WAIT if kind.typical == inf else LONGEST_WAIT) - kind.asked
            each = kind.typical if kind.typical < inf else average
            return max(0, ceil(min(lacking / each if each else inf, most))) if lacking > 0.0 else 0

        return list(map(missing, unmet))

    def meet(self, agree: Agree, values: Sequence[float] = ()) -> list[float]:
        """The largest of all ranks' values, and, since ranks meet, what calls of all kinds took. Collective."""
        unseen = [kind.unseen for kind in self.kinds]
        own = [value for _, seconds, between in unseen for value in (-seconds, seconds, between)]
        # Who comes late to a question thinks longer before, and waits less in it: both together are what it costs.
        besides = (self.aside + self.asking, self.asking)
        ends = (sign * seconds for seconds in besides for sign in (1, -1))
        *agreed, slowest, fastest, longest, shortest, keeping = agree([*values, *own, *ends, self.keeping])
        seen = iter(agreed[len(values) :])
        for kind, (calls, *_), least, most, between in zip(self.kinds, unseen, seen, seen, seen, strict=True):
            if calls >= NEARLY * kind.first:
                self.earn(kind, kind.see(calls, -least, most, between))
                kind.last = self.calls
            if not kind.is_tried or self.calls > 2 * kind.last:  # it has spent that, or has no calls any more
                self.release(kind)
        self.cost += keeping
        self.keeping = 0.0
        least = self.meeting if self.visits else 0.0  # since they have met
        asking = in_common(longest, -shortest, 0.0)
        self._spend(in_common(slowest, -fastest, least + asking), asking)
        return agreed[: len(values)]

    def _spend(self, besides: float, asking: float) -> None:
        """Seconds that all of that took which was done besides calls, and those of them for which ranks asked."""
        self.cost += besides
        if self.visits:
            each = (besides - asking) / self.visits
            self._visit = each if self._visit == inf else (self._visit + each) / 2
        if self.estimated:
            self.dearer = max(1.0, (self.dearer + asking / self.estimated) / 2)
        self.aside, self.asking, self.visits, self.estimated = 0.0, 0.0, 0, 0.0
