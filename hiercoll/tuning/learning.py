"""What "auto" learns from a program's own calls: what serves them best, found out at a bounded cost.

The calls of one kind (a collective, a class of sizes, a memory) begin as the MPI library's own, and are counted. After
so many of them, at a number that is equal on all ranks, ranks agree on how long they took. As soon as a share of all
that time pays for it, calls of the program try candidates, one after the other: a candidate and the best so far, at
first native, serve calls in pairs, and it replaces that one if these show it faster beyond chance. Then those that
differ from the winner in one parameter are candidates, too. A winner that cuts blocks into segments has their number
tuned as Blink does (Wang et al. 2020, section 4.2). From then on ranks look at their times every so many calls; where
these have changed, and a few calls that begin together show it too, it all begins anew.

Times are the collective's, not the program's: calls that are tried begin together, and of all other times the least of
all ranks counts, that of the rank that waited the least. Where ranks meet to agree on them, it is on those of calls of
all kinds (`Budget.meet`). But what trials cost is the program's time where ranks share cores: while calls begin
together, no rank computes while others communicate.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, comb, inf
from time import perf_counter
from typing import NamedTuple, TypeAlias

from hiercoll.statistics import chance_of_pairs, median
from hiercoll.tables import NATIVE_VARIANT, Variant
from hiercoll.tuner import Spread
from hiercoll.tuning.budget import FIRST, LONG_WAIT, LONGEST_WAIT, PLAN_SECONDS, Agree, Budget, Kind
from hiercoll.tuning.share import count, in_common

LONGEST = 240  # calls between two looks
FOREVER = 1 << 40  # calls
GROWTH = 4  # times as long calls have taken, at most, when ranks think again of what they can afford
SELDOM = 6.0  # times as long as what pays for it, calls last until a rank thinks again
MARGIN = 1.1  # times as many calls as are needed by what is known, after which it thinks of what it can afford
CROWD = 3  # times what a candidate costs, that later ones wait for besides, while other kinds try earlier ones
FEW = 5  # candidates besides native; where that may cost what it does: MANY
MANY = 7
LOOKS = 4  # pairs of calls that a candidate has at first
FEWER = 2  # of long calls
HOPELESS = 1.1  # times the best, from which on it has no more after `LOOKS`
TOO_DEAR = 1.5  # after `FEWER`
FAR_TOO_DEAR = 4  # after the first, which also makes its plan
# Seconds that calls last, far longer than a plan takes, of which the first is looked at alone. Of those after it, each
# is made twice and the second one counts: TCP connections on which data have been lost are slow in the next call, too.
ALONE = 0.25
DOUBT = 0.25  # of a call's time, by which a candidate may be slower, until that is known
CHECKS, PAIRS = 3, 8  # pairs of calls in which what an earlier job has found meets native: at first, and if need be
ROUNDS = (7, 12, 21, 36)  # pairs of calls after which two are compared, if those before do not decide
# How probable it is at most that chance alone makes an equal look faster, with all rounds. Less than half as many do,
# since few go on looking `PROMISING`: and what is slower than the best does far more seldom.
LEVEL = 0.1
APART = 1 / comb(2 * LOOKS, LOOKS)  # of that, that all of its first calls are shorter than all of the best's
CLEARLY = 1.25  # by how much their median is faster, at least, where that decides
PROMISING = 1.05  # by how much the median of pairs that do not decide is faster, from which on there are more of them
SURELY = 1.1  # the same of pairs that check what an earlier job has found, from which on there are no more
MOST_ALIKE = 12  # variants that differ from the best in one parameter, which are tried after the candidates
MOST_SEGMENTS = 64
CHANGED = 1.5  # times longer or shorter from which on conditions have changed
FAR = 8.0  # times longer or shorter from which on an earlier job's "native" says nothing of these calls
SLOWER = 1.05  # times native's time from which on what an earlier job has found is not believed
PROBES = 5  # calls that are timed to find out whether they have


class Serve(NamedTuple):
    """What is chosen serves so many calls; if ``look``, their seconds are wanted: of one call, of the rank that waited
    the least."""

    calls: int
    look: bool = True


class Try(NamedTuple):
    """These serve the next calls; the seconds of each are wanted, those of the slowest rank."""

    order: Sequence[Variant]


Step: TypeAlias = "Serve | Try"
Times: TypeAlias = "list[float]"
Pairs: TypeAlias = "Sequence[tuple[float, float]]"
Course: TypeAlias = "Generator[Step, Times, None]"
Own: TypeAlias = "Callable[[], Spread] | None"
Answer: TypeAlias = "Generator[Step, Times, bool]"


class Finding(NamedTuple):
    """What is known to serve calls best: the seconds of a call, and of one by native, from so many ``calls``, on a day
    (ISO 8601; "" in this job). ``untried``: candidates that it has not been compared with yet, in their order."""

    variant: Variant
    seconds: float
    native: float
    calls: int
    date: str = ""
    untried: tuple[Variant, ...] = ()


@dataclass(eq=False, repr=False)
class Learner:
    """What serves calls of one kind on a communicator.

    ``candidates`` tells what may serve them, the first of them native, if need be by the blocks that this rank sends
    now; ``agree`` gives the largest of all ranks' values, each of several. Both are collective: all ranks make the same
    calls in the same order, ask `begin` before and tell `note` after each. Where `is_fixed` holds, `count` is enough,
    or the compiled engine's count. ``found`` is called with what is found, so far and in the end; ``known`` is what an
    earlier job has found. ``rarely``: ranks that need not wait for each other in such calls do so ever more rarely.
    ``asking``: seconds that asking for candidates takes, about; ``alike``: what differs from a variant in a parameter.
    ``changed`` is called when something else has been found.

    With ``compares``, native serves every other call but for trials, whatever has been found, for those who want to see
    what that gains: one of each two calls, in an order that looks random, and is the same on all ranks. ``given`` is
    what a table chooses: then nothing is tried.
    """

    candidates: Callable[[Own], Sequence[Variant]]
    agree: Agree
    budget: Budget
    found: Callable[[Finding], None] = lambda finding: None
    known: Finding | None = None
    rarely: bool = False
    asking: Callable[[], float] = lambda: 0.0
    alike: Callable[[Variant], Sequence[Variant]] = lambda variant: ()
    changed: Callable[[], None] = lambda: None
    compares: bool = False
    given: Variant | None = None
    current: Variant = NATIVE_VARIANT
    has_met: bool = False  # whether this rank has met the others before a call that is tried, and not made it yet
    has_begun: bool = False  # whether the first call has been asked about; equal on all ranks
    is_settled: bool = False  # whether all candidates have been tried; until then something is found so far
    trials: int = 0  # calls that were tried
    tally: array[int] = field(default_factory=lambda: array("q", [0, 0]))  # of calls without a question: see `Kind`

    def __post_init__(self) -> None:
        self._own: Own = None
        self._finding = self.known
        self._kind = Kind(self._go_on)
        self._since = 0.0  # when the last call that was asked about began; 0: it is over
        self._step: Serve | Try = Serve(0, look=False)
        self._times: list[float] = []
        self._meetings: list[float] = []
        self._began = 0.0  # when calls were first tried of those whose times are wanted
        self._offered: Sequence[Variant] | None = None  # the candidates that were last asked for
        self._course = self._learn() if self.given is None else _follow()
        self.is_settled = self.given is not None
        self.current = self._serves = self._chosen

    # ---- what calls ask

    @property
    def finding(self) -> Finding | None:
        """What has been found so far, by an earlier job at first."""
        return self._finding

    @finding.setter
    def finding(self, finding: Finding | None) -> None:
        self._finding = finding
        self.changed()

    @property
    def is_fixed(self) -> bool:
        """Whether ``current`` serves the next call without a question."""
        return bool(self.tally[0] > 0) and not self.compares

    @property
    def is_trying(self) -> bool:
        """Whether the call that `begin` was asked for is to begin together on all ranks."""
        return isinstance(self._step, Try)

    def count(self, seconds: float = 0.0) -> None:
        """A call for which `is_fixed` holds has taken so long."""
        count(self.tally, seconds)

    def begin(self, own: Own = None) -> Variant:
        """What serves the next call; ``own`` tells the blocks that this rank sends, where nobody else knows. Collective
        where it is time for an agreement."""
        self._own, self._kind.is_alone = own, own is not None
        if not self.is_trying and self.tally[0] <= 0:
            self._since = perf_counter()
        while isinstance(self._step, Serve) and self.tally[0] <= 0:
            self._look()
        if self.is_trying:  # of the call that is tried, the time is wanted
            if self._since:
                self.budget.visited(perf_counter() - self._since)
            self._since = 0.0
        return NATIVE_VARIANT if self._is_natives_turn else self.current

    def note(self, seconds: float, waited: float = 0.0) -> None:
        """The call that `begin` was asked for has taken so long, and ranks so long to meet before; infinitely long if
        native had to serve it instead. Collective."""
        self.has_met = False
        since, self._since = self._since, 0.0
        if isinstance(self._step, Serve) and seconds < inf:
            if since and self._kind.usual < inf:  # what a call takes longer in which ranks look, or think
                self.budget.visited(perf_counter() - since - self._kind.usual)
            self.count(seconds)
            return
        if isinstance(self._step, Serve):
            self.count()
            untried = () if self.finding is None else self.finding.untried
            self.finding = Finding(NATIVE_VARIANT, inf, inf, self._kind.calls, untried=untried)
            self.current = NATIVE_VARIANT
            self.budget.earn(self._kind, self._kind.close())
            self._kind.promise(0.0, was_native=False)
            # Of a new array: nothing else serves calls in its place any more.
            self.tally = self._kind.plan(self.tally[0], wants=self._step.look)
            return
        self.trials += 1
        self._times.append(seconds)
        self._meetings.append(waited)
        if len(self._times) == len(self._step.order):
            self._learn_from(self._step)
        else:
            self.current = self._step.order[len(self._times)]

    @property
    def takes_turns(self) -> bool:
        """Whether native and what is chosen do, which is something else."""
        return self.compares and not self._chosen.is_native

    @property
    def _is_natives_turn(self) -> bool:
        """Whether native serves the next call for comparison."""
        if not self.compares or isinstance(self._step, Try):
            return False
        pair, second = divmod(self._kind.calls + self._kind.planned - self.tally[0], 2)
        return _scattered(pair) == second

    # ---- steps

    @property
    def _typical(self) -> float:
        """Seconds of a call that is no trial."""
        return self._kind.typical

    @property
    def _chosen(self) -> Variant:
        """What serves calls that are no trials."""
        return self.finding.variant if self.finding is not None else self.given or NATIVE_VARIANT

    def _take(self, step: Serve | Try) -> None:
        had_served, self._step = isinstance(self._step, Serve) and self._serves == self._chosen, step
        self._kind.is_tried = self.is_trying
        if isinstance(step, Serve):
            if self._serves != self._chosen:
                self._kind.forget()
            self.current = self._serves = self._chosen
            self.tally = self._kind.plan(step.calls, wants=step.look, anew=not had_served)
        else:
            self.current = step.order[0]
            self.tally = self._kind.plan(0)
            self._times, self._meetings, self._began = [], [], perf_counter()

    def _go_on(self, missing: int) -> None:
        """Serve so many more calls, or do what the course of things says next."""
        if missing:
            self._take(Serve(missing))
        else:
            self._send([self._typical])

    def _send(self, times: Times) -> None:
        self._kind.renew()
        try:
            step = self._course.send(times)
        except BaseException:  # may be of another call: from here on, what is known serves
            self._course = _follow()
            self._take(next(self._course))
            raise
        self._take(step)

    def _look(self) -> None:
        """Do what is to be done after the calls of a step; at first, begin."""
        if not self.has_begun:
            self.has_begun = True
            self.budget.join(self._kind, inf if self.known is None else self.known.seconds)
            self._take(next(self._course))
        else:
            self.budget.visit(self._kind, self.agree)

    def _learn_from(self, step: Try) -> None:
        """Agree on how long calls took that were tried."""
        took, number = perf_counter() - self._began, len(self._times)
        mine = [*self._times, *(-waited for waited in self._meetings), took, -took]
        *agreed, slowest, fastest = self.budget.meet(self.agree, mine)
        times, waits = agreed[:number], [max(0.0, -least) for least in agreed[number:]]
        self._kind.add(number)
        self.budget.meeting = median(waits)
        usual = self._usual(step.order, times)
        dearer = sum(time - usual for time in times if time < inf) if usual < inf else 0.0
        cost = dearer + sum(waits)
        if self.budget.cores < 1.0 and self._kind.is_dense:
            cost = max(cost, in_common(slowest, -fastest, 0.0) - number * self._kind.period)
        self.budget.cost += max(0.0, cost + self.budget.meeting)
        self.budget.release(self._kind)
        own = [self._typical if self._typical < inf else time for time in times]
        self.budget.calls += sum(time for time in own if time < inf)
        self._kind.last = self.budget.calls
        begin = perf_counter()
        self._send(times)
        self.budget.go_round()
        self.budget.aside += perf_counter() - begin

    def _usual(self, order: Sequence[Variant], times: Sequence[float]) -> float:
        """Seconds that a call takes which is no trial: so far, or more, if one like it among these did, since they are
        those of the slowest rank. Less it is not: calls that do not begin together may wait for each other's messages,
        and for a core."""
        alike = [time for time, variant in zip(times, order, strict=True) if variant == self._chosen]
        if not alike:
            return self._typical
        return max(median(alike), self._typical if self._typical < inf else 0.0)

    # ---- the course of things

    def _learn(self) -> Course:
        if self.known is not None:
            yield Serve(4 * self._kind.first)
            if not (yield from self._still_best()):
                self.finding = self.known = None
        elif self.budget.share < inf:
            yield Serve(self._kind.first)
        self.is_settled = self.finding is not None and not self.finding.untried
        if not self.is_settled:
            yield from self._choose(self.finding)
        while True:
            yield from self._until_changed()
            self.is_settled = False
            self._kind.promise(0.0, was_native=False)  # nobody knows
            yield from self._choose()

    def _still_best(self) -> Answer:
        """Whether what an earlier job has found is not slower than native here, and now."""
        assert self.finding is not None
        found = self.finding
        if found.variant.is_native and self._own is None:
            # Candidates are asked for when conditions have changed; where it was on other ones, that is now.
            knows = found.native < inf and not self.rarely  # whether both are times of a whole call
            return not knows or bool(found.native / FAR < self._typical < found.native * FAR)
        if self._own is not None:  # of other blocks there may be other candidates
            self._offered = yield from self._ask()
        if found.variant.is_native:
            return True
        pairs = yield from self._pairs(found.variant, NATIVE_VARIANT, CHECKS)
        if _ratio(pairs) < SURELY:
            pairs = yield from self._pairs(found.variant, NATIVE_VARIANT, PAIRS - CHECKS, pairs)
        native = float(median(seconds for _, seconds in pairs))
        if _ratio(pairs) < 1.0 / SLOWER:
            self._kind.typical = native  # it serves from now on
            return False
        self._take_over(found._replace(seconds=_seconds(pairs), native=native))
        return True

    def _choose(self, begun: Finding | None = None) -> Course:
        """Find what is fastest: candidates challenge the best so far, one after the other, so that what is gained by an
        early one pays for those after it. Then what differs from the best in one parameter does. ``begun``: what an
        earlier job has found, which goes on."""
        self._kind.seeks = True
        if begun is None:
            self._offered = yield from self._ask()
            best, *others = self._offered
            if not others and self._typical == inf:
                yield Serve(self._kind.first)  # how long its calls take is to be known, though nothing is to be tried
            native = self._typical
            self._remember(best, native, others)
        else:
            best, others, native = begun.variant, list(begun.untried), begun.native
            if self._own is not None:  # blocks may be others, for which it may not be a candidate
                offered = _keys(self._offered or ())
                others = [each for each in others if each.key in offered]
        first, seen, most = best, _keys([best, *others]), len(others) + MOST_ALIKE
        for self._kind.place, new in enumerate(others):  # which grow meanwhile
            look = yield from self._look_at(new, best)
            if best.is_native and len(look) == LOOKS:
                native = median(seconds for _, seconds in look)
            if not _is_hopeless(look) and (yield from self._is_faster(new, best, native, look)):
                best = new
            left = others[self._kind.place + 1 :]
            if not left and not best.is_native:
                left = [each for each in self.alike(best) if each.key not in seen][: most - len(others)]
                others += left
                seen |= _keys(left)
            if not left and "segments" in best.params:  # their number is to be tuned, after the last candidate
                left = [new]
            self._remember(best, native, left)
        self._kind.place = 0
        if best.is_native or (best == first and self.finding is None):
            self._settle(best, native)
        else:
            yield from self._segments(best)
        self._kind.seeks = False

    def _until_changed(self) -> Course:
        """What has been found serves calls as long as conditions are those in which it was."""
        assert self.finding is not None
        before, calls = 0.0, FIRST
        while True:
            calls = 2 * calls if self.rarely else min(2 * calls, LONGEST)
            (seconds,) = yield Serve(calls)
            if self._offered is not None and _keys(self._offers()) != _keys(self._offered):
                return
            if before and not _alike(seconds, before):
                yield from self._afford(lambda: self._extra(PROBES))
                times = yield Try([self.current] * PROBES)
                if not _alike(median(times), self.finding.seconds):
                    return
                before = 0.0
            before = before or seconds

    def _take_over(self, finding: Finding) -> None:
        """Calls have shown that this serves them better from now on, and by how much."""
        was_native, self.finding = self._chosen.is_native, finding
        gain = finding.native / finding.seconds - 1.0 if finding.native < inf else 0.0
        self._kind.promise(max(0.0, gain) / (2 if self.takes_turns else 1), was_native=was_native)

    def _remember(self, best: Variant, native: float, untried: Sequence[Variant]) -> None:
        """What is found so far, for later jobs, if there are candidates left. Not while what served before conditions
        changed still serves."""
        is_of_old = self.finding is not None and self.finding.variant != best
        if not untried or is_of_old or native == inf:
            return
        seconds = native if self.finding is None or best.is_native else self.finding.seconds
        self._tell(Finding(best, seconds, native, self._calls, untried=tuple(untried)))

    def _settle(self, variant: Variant, native: float, seconds: float | None = None) -> None:
        self.is_settled = True
        self._tell(Finding(variant, native if seconds is None else seconds, native, self._calls))

    def _tell(self, finding: Finding) -> None:
        """It is found; what it takes to keep it is no part of what it takes to look."""
        self.finding, begin = finding, perf_counter()
        self.found(finding)
        seconds = perf_counter() - begin
        self.budget.keeping += seconds
        self.budget.aside -= seconds

    @property
    def _calls(self) -> int:
        """Calls so far, with those of an earlier job that began."""
        return self._kind.calls + (self.known.calls if self.known is not None and self.known.untried else 0)

    # ---- trials

    def _ask(self) -> Generator[Step, Times, Sequence[Variant]]:
        """The candidates."""
        yield from self._afford(lambda: self.asking() * self.budget.dearer)
        self.budget.estimated += self.asking()
        return self._offers()

    def _offers(self) -> Sequence[Variant]:
        """The candidates; what it takes to find them is no part of what it takes to look."""
        begin = perf_counter()
        offered = self.candidates(self._own)
        seconds = perf_counter() - begin
        self.budget.asking += seconds
        self.budget.aside -= seconds
        return offered

    def _afford(self, seconds: Callable[[], float]) -> Course:
        """Wait until there are so many seconds to spend; how many it is may change meanwhile. Calls of all kinds earn
        them: a rank knows how many there are, by what ranks have agreed on, without asking the others. For a later
        candidate there must be more of them while earlier ones of other kinds, which are more promising, remain.
        """
        before, most = self._kind.calls, 0.0
        budget = self.budget
        while budget.lacks(wanted := seconds() * (1 + CROWD * budget.behind(self._kind)) + budget.unseen_visits):
            each = budget.between(self._kind)
            if (unseen := self._kind.calls - before) >= most:
                before, unseen = self._kind.calls, 0
                most = max(FIRST, (GROWTH - 1) * (budget.calls / each if each else inf))
                most = min(most, FOREVER if self.rarely else LONGEST_WAIT)
            lacking = budget.lacks(wanted + budget.visit_seconds)  # another visit by then
            needed = MARGIN * lacking / each if each else inf
            few = SELDOM * budget.visit_seconds / budget.share / each if each else 0.0
            calls = ceil(min(max(needed, few, 1), most - unseen))
            then = unseen + calls
            self._kind.waits = True
            yield Serve(calls, look=then > LONG_WAIT and (then >= most or calls >= needed))
        self._kind.waits = False
        budget.pledge(self._kind, seconds())

    def _extra(self, calls: int, dearer: float = 0.0) -> float:
        """Seconds that so many calls which begin together cost about; ``dearer``: by how much they are."""
        return (calls + 1) * (self.budget.meeting or min(self._typical, PLAN_SECONDS)) + max(dearer, 0.0)

    def _look_at(self, new: Variant, old: Variant) -> Generator[Step, Times, Pairs]:
        """A few pairs; of long calls fewer at first, or a single call, which may show that more would be too dear."""
        is_long = self.budget.share < inf and self._typical > self.budget.visit_seconds
        made: float | None = None
        if is_long and self._are_very_long and new != self._chosen:
            made = yield from self._make(new)
            if made > FAR_TOO_DEAR * self._typical:
                return [(made, self._typical)]
        pairs = yield from self._pairs(new, old, FEWER if is_long else LOOKS, made=made)
        if len(pairs) < LOOKS and not _is_hopeless(pairs, TOO_DEAR):
            pairs = yield from self._pairs(new, old, LOOKS - len(pairs), pairs)
        return pairs

    @property
    def _are_very_long(self) -> bool:
        """Whether calls last so long that their trials are made with more care: see `ALONE`."""
        return ALONE < self._typical < inf

    def _make(self, new: Variant) -> Generator[Step, Times, float]:
        """Seconds of a call that makes the plan of ``new``."""
        yield from self._afford(lambda: self._extra(1, DOUBT * self._typical) + self.budget.plan_seconds(new))
        (seconds,) = yield Try([new])
        return seconds

    def _pairs(
        self, new: Variant, old: Variant, number: int, before: Pairs = (), *, made: float | None = None
    ) -> Generator[Step, Times, Pairs]:
        """Seconds of both in so many pairs of calls besides those ``before``, each the first in every other pair. If
        there were none, a call that makes the plan of ``new`` comes first, unless that is ``made`` by a call of so many
        seconds, or serves other calls, too; its time says nothing. Of very long calls each is made twice, and the
        second one counts."""
        slower, repeat = self._slower(new, before, made), 2 if self._are_very_long else 1
        dearer = repeat * number * slower if slower < inf else 0.0
        making = [] if before or made is not None or new == self._chosen else [new]

        def cost() -> float:
            return self._extra(len(making) + repeat * 2 * number, dearer) + sum(map(self.budget.plan_seconds, making))

        yield from self._afford(cost)
        turned = [(len(before) + pair) % 2 == 1 for pair in range(number)]
        order = [each for turn in turned for each in ((old, new) if turn else (new, old)) for _ in range(repeat)]
        times = yield Try([*making, *order])
        if making and times[0] < inf > self._typical:
            self.budget.planned(new, max(times[0] - self._typical, 0.0))
        times = times[len(making) :][repeat - 1 :: repeat]
        both = zip(turned, times[::2], times[1::2], strict=True)
        return [*before, *((second, first) if turn else (first, second) for turn, first, second in both)]

    def _slower(self, new: Variant, before: Pairs, made: float | None) -> float:
        """By how many seconds one of a pair of calls is slower than what serves others, about."""
        if before:
            return _seconds(before) - median(seconds for _, seconds in before)
        if made is not None:
            return made - self._typical
        if new == self._chosen and self.finding is not None:  # native is, by an earlier job's times
            ratio = self.finding.native / self.finding.seconds
            return (ratio - 1.0) * self._typical if self._typical < inf else 0.0
        return DOUBT * self._typical

    def _is_faster(self, new: Variant, old: Variant, native: float, look: Pairs = ()) -> Answer:
        """Whether calls in pairs, those of a first ``look`` among them, show ``new`` faster; if so, it is what is
        found, so far. ``native``: its seconds, if it is not the other."""
        pairs, is_faster = look, _is_clearly_faster(look)
        for number in () if is_faster else ROUNDS:
            pairs = yield from self._pairs(new, old, number - len(pairs), pairs)
            is_faster = _ratio(pairs) > 1.0 and chance_of_pairs(pairs) <= (LEVEL - APART) / len(ROUNDS)
            if is_faster or _ratio(pairs) < PROMISING:
                break
        if is_faster and _seconds(pairs) < inf:
            other = float(median(seconds for _, seconds in pairs))
            self._take_over(Finding(new, _seconds(pairs), other if old.is_native else native, self._calls))
        return is_faster and _seconds(pairs) < inf

    def _segments(self, best: Variant) -> Course:
        """The best number of segments of what has been found, if it has any: increased by factors while that helps,
        then decreased by steps."""
        if "segments" in best.params:
            while 2 * (step := int(best.params["segments"])) <= MOST_SEGMENTS:
                if not (yield from self._step_to(more := _segmented(best, 2 * step), best)):
                    break
                best = more
            for segments in range(2 * step - 1, step, -max(1, step // 4)):
                if not (yield from self._step_to(fewer := _segmented(best, segments), best)):
                    break
                best = fewer
        assert self.finding is not None
        self._settle(best, self.finding.native, self.finding.seconds)

    def _step_to(self, new: Variant, best: Variant) -> Answer:
        assert self.finding is not None
        return (yield from self._is_faster(new, best, self.finding.native))


def _follow() -> Course:
    """Nothing is to be found out."""
    while True:
        yield Serve(LONGEST_WAIT, look=False)


def _scattered(number: int) -> int:
    """0 or 1, for successive numbers as if by chance (SplitMix64; Steele, Lea, Flood 2014)."""
    number = (number + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ number >> shift) * factor & 0xFFFFFFFFFFFFFFFF
    return (number ^ number >> 31) & 1


def _keys(variants: Iterable[Variant]) -> set[tuple[object, ...]]:
    return {each.key for each in variants}


def _ratios(pairs: Pairs) -> list[float]:
    """By how much the first of each pair is faster, for statistics: nothing can be infinitely fast."""
    tiny = 1e-12
    return [max(min(old, 1e9), tiny) / max(min(new, 1e9), tiny) for new, old in pairs]


def _ratio(pairs: Pairs) -> float:
    return float(median(_ratios(pairs)))


def _seconds(pairs: Pairs) -> float:
    """Of the first of each pair."""
    return float(median(seconds for seconds, _ in pairs))


def _is_clearly_faster(look: Pairs) -> bool:
    """Whether a whole first look decides: all times of the first are shorter than all of the other, and clearly so."""
    if len(look) < LOOKS:
        return False
    new, old = zip(*look, strict=True)
    return max(new) < min(old) and _ratio(look) >= CLEARLY


def _is_hopeless(look: Pairs, factor: float = HOPELESS) -> bool:
    """By the least times of both: in so few pairs one call may take far too long, or two."""
    new, old = (min(times) for times in zip(*look, strict=True))
    return bool(new >= factor * old)


def _alike(seconds: float, before: float) -> bool:
    return before / CHANGED < seconds < before * CHANGED


def _segmented(variant: Variant, segments: int) -> Variant:
    return Variant(variant.algorithm, {**variant.params, "segments": segments}, variant.transport)
