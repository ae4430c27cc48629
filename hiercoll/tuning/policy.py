"""What serves the calls of a communicator: what was asked for, or what "auto" means there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf
from typing import Any, NamedTuple, TypeAlias

from hiercoll.algorithms import REGISTRY, get_algorithm
from hiercoll.algorithms.registry import automatic, neighbours
from hiercoll.collectives import AUTO, COLLECTIVES, NATIVE, Collective, Sizes
from hiercoll.errors import ConstraintError, ParameterError, UnknownAlgorithmError
from hiercoll.model.cost import DEFAULT_LINKS, Links
from hiercoll.tables import NATIVE_FORMS, NATIVE_VARIANT, Table, Variant
from hiercoll.topology import Topology
from hiercoll.tuner import FREE, Combining, Decision, Spread, decide, effort, is_able, modelled, uneven_choices
from hiercoll.tuning.budget import PLAN_SECONDS, Budget
from hiercoll.tuning.learning import FEW, MANY, Finding, Learner, Own
from hiercoll.tuning.share import SHARE, Before

Key: TypeAlias = "tuple[str, int, bool, str, str]"
ASKING = 2e-3  # seconds of a first question to the cost model at least, besides; or as long as a set-up took
AGAIN = 0.4e-3  # of later ones
PROBING = 4  # times as long as it takes ranks to meet, that it takes to measure links, about
KNOWN = 20e-6  # seconds that the model takes for an algorithm and a size, besides
MOST = 1 << 40  # bytes of a block that is never too short
PLANNED = 2  # set-ups that take as long as a plan with shared memory
PEER = "peer"  # the transport
OF_A_KIND = 3  # candidates that differ in parameters only


class Wanted(NamedTuple):
    """What is to be chosen for: ``size`` is the bytes of a block (their mean, 0 where not all ranks know it),
    ``memory`` a kind of memory, ``held`` a plan that a program holds, ``transport`` what the program asks for where
    the memory is a device's. Equal on all ranks."""

    collective: Collective
    size: int
    in_place: bool
    memory: str = "host"
    held: bool = False
    combining: Combining = FREE
    transport: str = AUTO

    @property
    def key(self) -> Key:
        """What is learned from calls together, of a size that stands for those near it."""
        return (self.collective.name, size_class(self.size), self.in_place, self.memory, str(self.combining))


def _but_size(key: Key) -> tuple[object, ...]:
    """What is alike in calls about which the model is asked at once."""
    collective, _, *rest = key
    return (collective, *rest)


def size_class(size: int) -> int:
    """The least of the sizes that are taken for alike: four classes from one power of two to the next."""
    step = max(1, (1 << size.bit_length() >> 1) // 4)
    return size // step * step


class Policy:
    """The choices of a communicator; the same on all ranks.

    ``slowest`` gives the largest of the ranks' values, for each of several, ``total`` adds numbers up; both are
    collective. ``forced``: algorithm and parameters instead of "auto", by collective.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        library: str,
        disabled: bool,
        slowest: Callable[[Sequence[float]], list[float]],
        total: Callable[[Sequence[int]], Sequence[int]],
        forced: Mapping[str, Variant] | None = None,
    ) -> None:
        self._rank, self._topology, self._library, self._disabled = rank, topology, library, disabled
        self._slowest, self._total = slowest, total
        self.forced = dict(forced or {})
        self.table = Table()
        self.links = DEFAULT_LINKS  # what the cost model goes by, where it decides
        # Gives links as measured, of those known before; collective, called once. None: they have been, or need not be.
        self.probe: Callable[[Links], Links] | None = None
        # Whether ranks can map the device memory of all ranks of their node; collective at first.
        self.reaches: Callable[[], bool] = lambda: False
        self.slowest_of_some = slowest  # the same as ``slowest``, where some ranks have much more to do before
        self._measured: Links | None = None  # what the model goes by where it names candidates
        self.known: dict[Key, Finding] = {}  # what earlier jobs have found
        self.found: Callable[[Wanted, Finding], None] = lambda wanted, finding: None  # called with what this one finds
        self._before, self._set_up, self._meeting = Before(), 0.0, 0.0
        self.changed: Callable[[], None] = lambda: None  # called when "auto" may mean something else from now on
        self.compares = False  # whether native serves every other blocking call by "auto"
        self.share = 0.0  # of the time of calls, that learning may cost; 0: nothing is learned
        self.forget()

    def forget(self) -> None:
        """Let "auto" decide anew for every size."""
        before = self._before
        cost = before.agreements + self._set_up if before.calls else 0.0
        # What calls that teach something took, and what learning cost.
        plan = max(PLANNED * self._set_up, PLAN_SECONDS)
        self.budget = Budget(self.share, before.calls, cost, cost, self._meeting, plan, before.call, self.links.cores)
        self._learners: dict[Key, Learner | None] = {}
        self._offers: dict[Key, tuple[Variant, ...]] = {}
        # Seconds that it takes to ask the model about calls that differ in size only, found out when there were so many
        # kinds of calls and offers.
        self._estimates: dict[tuple[object, ...], tuple[tuple[int, int] | None, float]] = {}
        self._dealt: dict[tuple[str, bool], list[list[int]]] = {}  # by collective, and whether in place: see `_shares`
        # Automatic variants, by their places, that the model has looked at.
        self._looked_at: set[tuple[str, bool, Combining, int]] = set()
        # What learns from calls on arrays, by `plain.by_bytes`.
        self.by_bytes: dict[Any, Learner] = {}
        self.changed()

    def learn(self, share: float = SHARE) -> None:
        """Learn from now on, at the cost of a share of the time of calls: infinite for all that it takes, 0 for not at
        all."""
        self.share = share
        self.forget()

    def pay(self, before: Before, set_up: float, meeting: float) -> None:
        """What was before the set-up; seconds that this one took, by which it is estimated how long a plan will take,
        and asking the model; and that it takes ranks to meet. Equal on all ranks."""
        self._before, self._set_up, self._meeting = before, set_up, meeting
        self.forget()

    def hurry(self) -> None:
        """What learns from now on need not wait until calls have taken so long that they pay for it."""
        self.budget.share = inf

    @property
    def is_settled(self) -> bool:
        """Whether all that "auto" learns from such calls as there were has been learned."""
        return all(each.is_settled for each in self._learners.values() if each is not None)

    def is_auto(self, collective: Collective, algorithm: Any) -> bool:
        """Whether the choice is this policy's."""
        is_left = isinstance(algorithm, str) and algorithm == "auto"
        return is_left and not self._disabled and collective.name not in self.forced

    def select(self, wanted: Wanted, algorithm: Any, params: Mapping[str, Any]) -> Variant:
        """The algorithm to run with all its parameters. Raises UnknownAlgorithmError or ParameterError."""
        collective, rank = wanted.collective, self._rank
        if not isinstance(algorithm, str):
            raise UnknownAlgorithmError("algorithm", "a name", repr(algorithm), rank)
        if algorithm == "auto" and params:
            name, value = next(iter(params.items()))
            raise ParameterError(f"parameter {name!r}", "none with algorithm='auto'", repr(value), rank)
        forced = self.forced.get(collective.name) if algorithm == "auto" and not self._disabled else None
        if algorithm == NATIVE:
            self._check_form(params, wanted.held)
        is_native = algorithm == NATIVE or (forced is not None and forced.is_native)
        if is_native and not wanted.combining.native and self._topology.size > 1:
            order = wanted.combining.order.name.lower()
            raise ConstraintError("algorithm 'native'", "order 'any'", repr(order), rank)
        if self._disabled:
            return NATIVE_VARIANT
        if algorithm == "auto":
            return forced if forced is not None else self._automatic(wanted)
        if algorithm == NATIVE:
            return Variant(NATIVE, dict(params))
        entries = REGISTRY[collective.family]
        if algorithm not in entries:
            expected = f"auto, native, {', '.join(entries)}"
            raise UnknownAlgorithmError("algorithm", expected, repr(algorithm), rank)
        try:
            return Variant(algorithm, get_algorithm(collective.family, algorithm).resolve(params))
        except ParameterError as error:
            raise ParameterError(error.argument, error.expected, error.got, rank) from None

    def _automatic(self, wanted: Wanted) -> Variant:
        """What "auto" means."""
        finding = self._finding(wanted)
        if wanted.collective.sizes in (Sizes.OWN, Sizes.ROOT):
            return finding.variant if finding is not None and not wanted.held else NATIVE_VARIANT
        chosen = finding.variant if finding is not None else self.decide(wanted, explains=False).variant
        if chosen.algorithm == NATIVE:
            # Forms of native are measured for equal blocks.
            return chosen if wanted.collective.is_even else NATIVE_VARIANT
        entry = get_algorithm(wanted.collective.family, chosen.algorithm)
        return Variant(chosen.algorithm, entry.resolve(chosen.params), chosen.transport)

    def _finding(self, wanted: Wanted) -> Finding | None:
        """What serves such calls best, as this job has learned, or an earlier one. Of transports that programs ask for
        nothing is learned."""
        if wanted.transport != AUTO:
            return None
        learner = self._learners.get(wanted.key)
        return learner.finding if learner is not None else self._known(wanted)

    def has_found(self, wanted: Wanted) -> bool:
        """Whether what "auto" means there has been learned."""
        return self._finding(wanted) is not None

    def _check_form(self, params: Mapping[str, Any], held: bool) -> None:
        """The one parameter of native. Raises ParameterError."""
        forms = NATIVE_FORMS if held else NATIVE_FORMS[:1]
        for name, value in params.items():
            if name != "form" or value not in forms:
                what = "plan" if held else "call"
                expected = f"form={' or '.join(forms)} at most with algorithm='native' in a {what}"
                raise ParameterError(f"parameter {name!r}", expected, repr(value), self._rank)

    def decide(self, wanted: Wanted, *, explains: bool = True) -> Decision:
        """What "auto" means, by the table, and why; see `tuner.decide`."""
        return decide(
            wanted.collective.family,
            self._topology,
            wanted.size,
            inplace=wanted.in_place,
            table=self.table,
            mpi=self._library,
            memory=wanted.memory,
            held=wanted.held and wanted.combining.changes,
            combining=wanted.combining,
            explains=explains,
            links=self.links,
        )

    def learner(self, wanted: Wanted) -> Learner | None:
        """What learns from blocking calls like this one by "auto"; None if nothing does."""
        if wanted.transport != AUTO:
            return None
        key = wanted.key
        if key not in self._learners:
            self._learners[key] = self._make_learner(wanted) if self._may_learn(wanted) else self._comparer(wanted)
        return self._learners[key]

    def known_learner(self, key: Key) -> Learner | None:
        """What `learner` has made for calls with this key (`Wanted`), if it has been asked."""
        return self._learners.get(key)

    def _comparer(self, wanted: Wanted) -> Learner | None:
        """What lets native take turns with what a table chooses, where that is to be compared."""
        if not self.compares or self._topology.size == 1 or not self.is_auto(wanted.collective, "auto"):
            return None
        chosen = self._automatic(wanted)
        if chosen.is_native:
            return None
        return Learner(_nothing, self._slowest, Budget(), known=self._known(wanted), compares=True, given=chosen)

    def _may_learn(self, wanted: Wanted) -> bool:
        collective = wanted.collective
        if not self.share or self._topology.size == 1 or not self.is_auto(collective, "auto"):
            return False
        if not (wanted.combining.native and wanted.combining.changes) or collective.sizes is Sizes.ROOT:
            return False
        if collective.sizes is Sizes.OWN:
            return True
        if wanted.size == 0 and collective.buffers:
            return False
        return self.share == inf or not self._is_in_table(wanted)

    def _is_in_table(self, wanted: Wanted) -> bool:
        return self.table.decides(wanted.collective.family, self._library, wanted.memory, self._topology)

    def _known(self, wanted: Wanted) -> Finding | None:
        """What earlier jobs have found, where it counts: a table comes before it, but for blocks of sizes that no rank
        knows all of."""
        if not self.share or (wanted.collective.sizes is not Sizes.OWN and self._is_in_table(wanted)):
            return None
        return self.known.get(wanted.key)

    def _make_learner(self, wanted: Wanted) -> Learner:
        offered = partial(self._surveyed if wanted.collective.sizes is Sizes.OWN else self._offered, wanted)
        found, agree, known = partial(self.found, wanted), self._slowest, self._known(wanted)
        asking = partial(self._asking, wanted, wanted.key)
        alike = partial(self._alike, wanted)
        more = (asking, alike, self.changed, self.compares)
        return Learner(offered, agree, self.budget, found, known, wanted.collective.root, *more)

    def _alike(self, wanted: Wanted, variant: Variant) -> list[Variant]:
        """What differs from a variant in one parameter; of blocks of any sizes nothing."""
        name = wanted.collective.family
        return variants_like(name, self._topology, wanted.in_place, variant) if wanted.collective.is_even else []

    def _asking(self, wanted: Wanted, key: Key) -> float:
        """Seconds that it takes to find candidates, about: most of it goes into looking at schedules. ``key``: its key,
        since this is asked often."""
        if wanted.collective.sizes is Sizes.OWN or key in self._offers:
            return 0.0
        now, alike = (len(self.budget.kinds), len(self._offers)), _but_size(key)
        before, estimate = self._estimates.get(alike, (None, 0.0))
        if before != now:
            asked, shares = self._asked_with(wanted), self._shares(wanted)
            efforts = self._efforts(asked[-1])
            most = max(sum(efforts[at] for at in share) + len(asked) * len(share) * KNOWN for share in shares)
            estimate = most + (AGAIN if self._looked_at else max(ASKING, self._set_up))
            estimate += PROBING * self.budget.meeting if self._due_probe is not None else 0.0
            self._estimates[alike] = now, estimate
        return estimate

    def _efforts(self, wanted: Wanted) -> list[float]:
        """Seconds that the model needs for each of the automatic variants, about, besides; those that it has looked at
        take none."""
        name, how = wanted.collective.family, (wanted.in_place, wanted.combining)
        block = wanted.size // (1 + wanted.combining.accumulates)  # of the program's elements
        return [
            0.0 if (name, *how, at) in self._looked_at else effort(name, self._topology, block, *each)
            for at, each in enumerate(automatic(name, wanted.in_place))
        ]

    def _shares(self, wanted: Wanted) -> list[list[int]]:
        """About which of the automatic variants each rank asks the model, by their places: always the same ones, since
        it keeps what it has counted; those that take the longest go to different ranks."""
        ranks, key = self._topology.size, (wanted.collective.family, wanted.in_place)
        if key not in self._dealt:
            efforts = [effort(key[0], self._topology, MOST, *each) for each in automatic(*key)]
            order = sorted(range(len(efforts)), key=lambda at: -efforts[at])
            self._dealt[key] = [order[rank::ranks] for rank in range(ranks)]
        return self._dealt[key]

    def _asked_with(self, wanted: Wanted) -> list[Wanted]:
        """What the model is asked about at once, since that costs little more: such calls of all sizes, if it has not
        been. The smallest first."""
        begun = (key for key, learner in self._learners.items() if learner is not None and learner.has_begun)
        alike = [key for key in (wanted.key, *begun) if _but_size(key) == _but_size(wanted.key)]
        return [wanted._replace(size=size) for size in sorted({key[1] for key in alike if key not in self._offers})]

    def _offered(self, wanted: Wanted, own: Own) -> tuple[Variant, ...]:
        """native, and the few that may be faster, by a table, or by the model. Collective at first."""
        del own
        if wanted.key not in self._offers:
            name = wanted.collective.family
            if self.table.find(name, self._library, wanted.memory, self._topology) is not None:
                self._offer(wanted, [each.variant for each in self.decide(wanted).ranking])
            else:
                alike = self._asked_with(wanted)
                for each, ranking in zip(alike, self._modelled(alike), strict=True):
                    self._offer(each, self._with_peers(each, ranking))
        return self._offers[wanted.key]

    def _with_peers(self, wanted: Wanted, ranking: Sequence[Variant]) -> Sequence[Variant]:
        """Of arrays on devices, each also by gets from other ranks' memory, where ranks can map it. The model knows
        nothing of devices: which of the two is faster, calls will tell. Collective."""
        if wanted.memory == "host" or not wanted.collective.is_even or not self.reaches():
            return ranking
        return [each for variant in ranking for each in (replace(variant, transport=PEER), variant)]

    def _offer(self, wanted: Wanted, ranking: Sequence[Variant]) -> None:
        name, most = wanted.collective.family, MANY if self.share == inf else FEW
        self._offers[wanted.key] = offered(name, ranking, most)

    def _modelled(self, alike: Sequence[Wanted]) -> list[list[Variant]]:
        """What the cost model ranks for calls that differ in size, the smallest first: fastest first. Each rank asks it
        about some algorithms, and tells the others: if one did all of it, the others would wait, and where ranks share
        cores, keep it from its core. Collective."""
        longest = alike[-1]
        name, topology = longest.collective.family, self._topology
        links = self._measured_links()
        named, efforts = automatic(name, longest.in_place), self._efforts(longest)
        variants, mine = [Variant(*each) for each in named], self._shares(longest)[self._rank]
        asked = [named[at] for at in mine]
        own: list[float] = []
        for each in alike:
            how = (each.size, each.in_place, each.combining, self.table.machine)
            found = {one.variant.key: one.seconds for one in modelled(name, topology, *how, asked, links)}
            own += [found.get(one.key, inf) if at in mine else 0.0 for at, one in enumerate(variants)]
        told = iter(self.slowest_of_some(own))
        self._looked_at |= {(name, longest.in_place, longest.combining, at) for at, each in enumerate(efforts) if each}
        rows = [list(islice(told, len(variants))) for _ in alike]
        return [[variants[at] for at in sorted(range(len(row)), key=row.__getitem__) if row[at] < inf] for row in rows]

    def _measured_links(self) -> Links:
        """What the model goes by where it names candidates. Not where it decides: what serves a call must not change
        while ranks remember such calls, each its own. Collective at first."""
        if (probe := self._due_probe) is not None:
            self.probe = None
            self._measured = probe(self.links)
        return self._measured or self.links

    @property
    def _due_probe(self) -> Callable[[Links], Links] | None:
        return self.probe if self.table.machine is None else None

    def _surveyed(self, wanted: Wanted, own: Own) -> tuple[Variant, ...]:
        """native, and what may be faster for blocks of the sizes that ranks send now. Collective."""
        assert own is not None
        record, known = wanted.collective, (self.table, self._library)
        return uneven_choices(record.family, self._topology, self.whole(own()), *known, packs=record.typed)

    def whole(self, own: Spread) -> Spread:
        """The blocks of all ranks, from those that each rank sends. Collective."""
        filled, small, nbytes, unfit = self._total([own.filled, own.small, own.nbytes, own.unfit])
        return Spread(filled, small, nbytes, int(self._slowest([own.most])[0]), unfit)

    def uneven_for_good(self, collective: Collective, whole: Spread) -> Variant:
        """What to take for a plan, where nothing can be tried, by the blocks of all ranks."""
        return uneven_choices(collective.family, self._topology, whole, self.table, self._library, held=True)[-1]


def _nothing(own: Own) -> tuple[Variant, ...]:
    """No candidates."""
    del own
    return ()


def offered(collective: str, ranking: Sequence[Variant], most: int) -> tuple[Variant, ...]:
    """native, and the first of a ranking, but of each algorithm only a few; with all parameters."""
    liked = _varied(ranking, most)
    full = [replace(each, params=REGISTRY[collective][each.algorithm].resolve(each.params)) for each in liked]
    return (NATIVE_VARIANT, *full)


def _varied(ranking: Sequence[Variant], most: int) -> list[Variant]:
    """The first of a ranking, but of each algorithm only a few."""
    found: list[Variant] = []
    for each in ranking:
        alike = sum(other.algorithm == each.algorithm for other in found)
        if each.algorithm != NATIVE and alike < OF_A_KIND and len(found) < most:
            found.append(each)
    return found


def variants_like(collective: str, topology: Topology, in_place: bool, variant: Variant) -> list[Variant]:
    """What can run there and differs from a variant in one parameter, but for the number of segments, which is tuned
    otherwise."""
    params = get_algorithm(collective, variant.algorithm).resolve(variant.params)  # earlier jobs may have known fewer
    found = [replace(variant, params=each) for each in neighbours(collective, topology, variant.algorithm, params)]
    cut = params.get("segments")
    return [v for v in found if v.params.get("segments") == cut and is_able(collective, topology, in_place, v)]


def forced_variants(given: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Variant]:
    """Algorithms with all their parameters, by collective. Raises UnknownAlgorithmError or ParameterError."""
    return {
        name: Variant(algorithm, get_algorithm(COLLECTIVES[name].family, algorithm).resolve(params))
        if algorithm != NATIVE
        else NATIVE_VARIANT
        for name, (algorithm, params) in given.items()
    }
