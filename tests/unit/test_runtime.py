"""The parts of a communicator that need no MPI: tags, what is kept within bounds, shared windows, agreement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.errors import ArgumentError, BufferSizeError, CollectiveTimeout, ConstraintError, ParameterError
from hiercoll.runtime import progress
from hiercoll.runtime.agreement import Agreement
from hiercoll.runtime.cache import Cache, Idle
from hiercoll.runtime.tags import Tags
from hiercoll.runtime.windows import Windows

quick = settings(deadline=None, derandomize=True, max_examples=60)

# Tags


@quick
@given(st.integers(64, 2**20), st.integers(1, 8), st.lists(st.integers(1, 12), max_size=40))
def test_ranges_of_tags_do_not_overlap(most: int, collectives: int, counts: list[int]) -> None:
    """Those of blocking calls and those of the background lie apart, below the largest tag."""
    tags = Tags(most, collectives)
    starts = [tags.of_blocking(number) for number in range(collectives)]
    assert all(first + tags.count <= second for first, second in pairwise(starts))
    counts = [min(count, tags.count) for count in counts]
    for count in counts:
        first = tags.in_background(count)
        assert starts[-1] + tags.count <= first and first + count - 1 <= most


@quick
@given(st.integers(10, 60), st.lists(st.integers(1, 5), min_size=30, max_size=60))
def test_tags_in_the_background_go_round(most: int, counts: list[int]) -> None:
    """A call takes those next to the call's before, so that they come again as late as can be."""
    tags = Tags(most, 1)
    counts = [min(count, tags.count) for count in counts]
    taken = [(tags.in_background(count), count) for count in counts]
    begin = min(first for first, _ in taken)
    assert begin == taken[0][0] == tags.count
    for (before, length), (first, count) in pairwise(taken):
        assert first == (before + length if before + length + count <= begin + tags.count else begin)


def test_more_tags_than_there_are_in_the_background() -> None:
    """The range itself is the most; an error takes no tags."""
    tags = Tags(99, 3, rank=2)
    assert tags.count == 24 and tags.in_background(24) == 72
    with pytest.raises(ConstraintError, match="at most 24 tags") as refused:
        tags.in_background(25)
    assert (refused.value.rank, refused.value.got) == (2, 25)
    assert tags.in_background(1) == 72 and tags.in_background(23) == 73


@quick
@given(st.integers(5, 50), st.lists(st.integers(0, 6), max_size=60))
def test_reserved_tags_are_never_given_again(most: int, counts: list[int]) -> None:
    """Not on the same communicator; a new one comes only when the next tags do not fit."""
    tags, taken, end = Tags(most, 3), list[set[int]](), most + 1
    for count in counts:
        first, is_new = tags.reserve(count)
        assert is_new == (not taken or end + count > most)
        if is_new:
            taken.append(set())
        mine = set(range(first, first + count))
        assert not mine & taken[-1] and all(0 <= tag <= most for tag in mine)
        taken[-1] |= mine
        end = first + count


def test_more_tags_than_a_communicator_has() -> None:
    """All of a communicator's are the most for a plan; an error takes none of them."""
    tags = Tags(99, 3, rank=1)
    assert tags.reserve(40) == (0, True)
    with pytest.raises(ConstraintError, match="at most 100 tags") as refused:
        tags.reserve(101)
    assert (refused.value.rank, refused.value.got) == (1, 101)
    assert tags.reserve(59) == (40, False) and tags.reserve(100) == (0, True)


# What is kept


@dataclass(eq=False)
class Entry:
    """What is kept. ``log`` has the names of those that have been freed."""

    name: object
    nbytes: int
    log: list[object]

    def free(self) -> None:
        assert self.name not in self.log
        self.log.append(self.name)


def test_least_recently_used_entries_go() -> None:
    """By their number, and by their bytes; what has been used goes later."""
    log: list[object] = []
    cache = Cache(3, 100)
    for name in "abc":
        cache.keep(name, Entry(name, 10, log))
    cache.touch("a")
    cache.keep("d", Entry("d", 10, log))
    assert log == ["b"] and list(cache) == ["a", "c", "d"]
    cache.keep("e", Entry("e", 90, log))
    assert log == ["b", "c", "a"] and list(cache) == ["d", "e"] and cache.nbytes == 100


def test_what_is_added_never_goes() -> None:
    """However large; the next one drops it."""
    log: list[object] = []
    cache = Cache(3, 100)
    cache.keep("small", Entry("small", 1, log))
    cache.keep("large", Entry("large", 1000, log))
    assert list(cache) == ["large"] and log == ["small"] and cache.nbytes == 1000
    cache.keep("next", Entry("next", 0, log))
    assert list(cache) == ["next"] and log == ["small", "large"] and cache.nbytes == 0


def test_replaced_entries_are_freed() -> None:
    """And are used last."""
    log: list[object] = []
    cache = Cache(3, 100)
    for name, entry in (("x", 1), ("y", 2), ("x", 3)):
        cache.keep(name, Entry(entry, 50, log))
    assert log == [1] and list(cache) == ["y", "x"] and cache.nbytes == 100
    cache.drop_all()
    assert log == [1, 2, 3] and not cache and cache.nbytes == 0


@quick
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.booleans()), max_size=60))
def test_bounds_of_what_is_kept(steps: list[tuple[int, int, bool]]) -> None:
    """Hold after every step, unless there is one entry; bytes are those of the entries; each is freed once."""
    log: list[object] = []
    cache, made = Cache(4, 100), 0
    for key, nbytes, use in steps:
        if use and key in cache:
            cache.touch(key)
            continue
        made += 1
        cache.keep(key, Entry(made, nbytes, log))
        assert next(reversed(cache)) == key and made not in log
        assert len(cache) <= 4 and cache.nbytes == sum(entry.nbytes for entry in cache.values())
        assert cache.nbytes <= 100 or len(cache) == 1
    assert len(log) == made - len(cache)


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.booleans()), max_size=60))
def test_what_nobody_uses(steps: list[tuple[int, int, bool]]) -> None:
    """Each is in use by one, or idle, or freed; bounds hold, and who knows a key sees no freed one."""
    log: list[object] = []
    idle, used, made = Idle[Entry](4, 100), list[tuple[int, Entry]](), 0
    known = {key: idle.alike(key) for key in range(4)}
    for key, nbytes, ends in steps:
        if ends and used:
            key, entry = used.pop(0)
            idle.put(known[key], entry)
        elif (found := idle.take(known[key])) is not None:
            used.append((key, found))
        else:
            made += 1
            used.append((key, Entry(made, nbytes, log)))
        left = [entry for alike in known.values() for entry in alike]
        assert idle.count <= 4 and idle.count == len(left) and not {entry.name for _, entry in used} & set(log)
        assert idle.nbytes <= 100 or idle.count == 1
        assert made == len(used) + idle.count + len(log)
    idle.drop_all()
    assert len(log) == made - len(used) and not any(known.values()) and idle.count == idle.nbytes == 0


# Windows


@dataclass(eq=False)
class FakeWindow:
    """A shared window; ``log`` has the numbers of those that have been freed."""

    number: int
    nbytes: int
    log: list[int]
    spoiled: bool = False

    def free(self) -> None:
        assert self.number not in self.log
        self.log.append(self.number)


@dataclass(eq=False)
class FakePlan:
    """A plan: of a session, or of a program."""

    window_key: object = None
    nbytes: int = 1
    active: bool = False
    broken: bool = False
    is_freed: bool = False
    on_free: Callable[[Any], None] | None = None

    def free(self) -> None:
        assert not self.active and not self.is_freed
        self.is_freed = True
        if self.on_free:
            self.on_free(self)


@dataclass
class Rank:
    """A rank's windows, and its plans: those of `session.Session`, in little."""

    entries: int = 3
    nbytes: int = 1000
    most_plans: int = 100
    others: Callable[[object], list[Any]] = lambda value: [value]
    freed: list[int] = field(default_factory=list)  # windows
    seen: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.windows = Windows(self.entries, self.nbytes, self.dropped, lambda value: self.others(value))
        self.plans = Cache(self.most_plans, 10**9)

    def dropped(self, kept: Cache) -> None:
        for key in [k for k, plan in self.plans.items() if plan.window_key and plan.window_key not in kept]:
            self.plans.drop(key)

    def make(self, nbytes: int) -> FakeWindow:
        return FakeWindow(self.windows.next_number(), nbytes, self.freed)

    def call(self, key: object, nbytes: int, address: int) -> str:
        """A blocking call whose window is that of ``key``, with a rank's own buffer."""
        if (plan := self.plans.get((key, nbytes, address))) is not None:
            assert plan.window_key in self.windows.kept and self.windows.kept[key].nbytes >= nbytes
            self.plans.touch((key, nbytes, address))
            self.windows.touch(key)
            return "hit"
        window = self.windows.keep(key, nbytes, self.make)
        assert window.nbytes >= nbytes and window.number not in self.freed
        if (key, address) in self.seen:
            self.plans.keep((key, nbytes, address), FakePlan(key))
        self.seen.add((key, address))
        return "miss"


def test_windows_are_kept_and_grow() -> None:
    """One that is large enough serves again; a larger need makes one of at least twice the size, in its place, and
    plans that used the old one go, no others."""
    rank = Rank()
    first, other = rank.windows.keep("a", 100, rank.make), rank.windows.keep("b", 10, rank.make)
    plans = {name: FakePlan(name[0]) for name in ("a1", "a2", "b1")} | {"none": FakePlan(None)}
    for name, plan in plans.items():
        rank.plans.keep(name, plan)
    assert rank.windows.keep("a", 60, rank.make) is first and rank.windows.made == 2
    grown = rank.windows.keep("a", 101, rank.make)
    assert (grown.number, grown.nbytes, rank.freed) == (3, 200, [1])
    assert [name for name, plan in plans.items() if plan.is_freed] == ["a1", "a2"]
    assert list(rank.plans) == ["b1", "none"]
    assert rank.windows.keep("a", 200, rank.make) is grown and rank.windows.keep("b", 1, rank.make) is other
    assert rank.windows.keep("a", 1000, rank.make).nbytes == 1000


def test_windows_used_last_stay() -> None:
    """Whether a plan was found (touch) or not (keep)."""
    rank = Rank()
    for name in "abc":
        rank.windows.keep(name, 1, rank.make)
    rank.windows.touch("a")
    rank.windows.keep("b", 1, rank.make)
    plan = FakePlan("c")
    rank.plans.keep("of c", plan)
    rank.windows.keep("d", 1, rank.make)
    assert rank.freed == [3] and plan.is_freed and list(rank.windows.kept) == ["a", "b", "d"]


def test_a_window_that_cannot_be_made_leaves_the_others() -> None:
    """The one that was too small has gone, with its plans."""
    rank = Rank()
    rank.windows.keep("a", 1, rank.make)
    rank.windows.keep("b", 1, rank.make)
    rank.plans.keep("of a", plan := FakePlan("a"))

    def refuse(nbytes: int) -> Any:
        raise ConstraintError("alltoall", "places in /dev/shm", nbytes)

    with pytest.raises(ConstraintError):
        rank.windows.keep("a", 5, refuse)
    assert rank.freed == [1] and plan.is_freed and list(rank.windows.kept) == ["b"]
    assert rank.windows.keep("a", 5, rank.make).nbytes == 5


CALLS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.sampled_from([10, 50, 300, 700]), st.integers(0, 2)), max_size=80
)


@quick
@given(CALLS)
def test_windows_go_in_the_same_order_on_all_ranks(calls: list[tuple[str, int, int]]) -> None:
    """Whatever plans ranks find: one always uses the same buffers, one always others, one keeps few plans, one none.
    Numbers of the windows that are made and freed are the same after every call."""
    always, never, few, none = ranks = [Rank(), Rank(), Rank(most_plans=2), Rank(most_plans=1)]
    for at, (key, nbytes, address) in enumerate(calls):
        always.call(key, nbytes, 0)
        never.call(key, nbytes, 1000 + at)
        few.call(key, nbytes, address)
        none.call(key, nbytes, address % 2)
        assert all(rank.freed == always.freed for rank in ranks)
        assert all(list(rank.windows.kept) == list(always.windows.kept) for rank in ranks)
        for rank in ranks:
            assert all(plan.window_key in rank.windows.kept for plan in rank.plans.values())


def test_ranks_do_hit_and_miss_differently() -> None:
    """The property above is about something."""
    same, other = Rank(), Rank()
    assert [same.call("a", 1, 0) for _ in range(4)] == ["miss", "miss", "hit", "hit"]
    assert [other.call("a", 1, address) for address in range(4)] == ["miss"] * 4


def held(ranks: Sequence[Rank], count: int) -> list[list[FakePlan]]:
    """Plans that the program holds on each rank, each with a window."""
    plans = [[FakePlan(on_free=rank.windows.release) for _ in range(count)] for rank in ranks]
    for rank, own in zip(ranks, plans, strict=True):
        for plan in own:
            rank.windows.own(plan, rank.make(10))
    return plans


def gathering(*values: object) -> Callable[[object], list[Any]]:
    """What every rank gives, where the others' values are known."""
    return lambda value: [value, *values]


def sound(*numbers: int) -> dict[int, bool]:
    """Windows that a rank does not need any more, none of them spoiled."""
    return dict.fromkeys(numbers, False)


def test_windows_of_freed_plans_wait_for_all_ranks() -> None:
    """They are freed by their numbers, in the same order however the ranks have freed their plans."""
    first, second = ranks = [Rank(), Rank()]
    mine, yours = held(ranks, 4)
    for index in (2, 0, 1):
        mine[index].free()
    for index in (3, 1, 2):
        yours[index].free()
    assert (first.windows.retired, second.windows.retired) == (3, 3) and not first.freed
    first.others, second.others = gathering(sound(4, 2, 3)), gathering(sound(3, 1, 2))
    first.windows.free_retired()
    second.windows.free_retired()
    assert first.freed == second.freed == [2, 3]
    assert (first.windows.retired, second.windows.retired) == (1, 1)
    mine[3].free()
    yours[0].free()
    first.others = second.others = gathering(sound(1, 4))
    first.windows.free_retired()
    second.windows.free_retired()
    assert first.freed == second.freed == [2, 3, 1, 4] and first.windows.retired == 0


def test_windows_to_which_mpi_may_write_stay() -> None:
    """Of plans that were interrupted, on whatever rank: retired, or at the end."""
    first, second = ranks = [Rank(), Rank()]
    mine, yours = held(ranks, 4)
    mine[0].broken = True
    for plan in (mine[0], mine[1], yours[0], yours[1]):
        plan.free()
    first.others, second.others = gathering(sound(1, 2)), gathering({1: True, 2: False})
    first.windows.free_retired()
    second.windows.free_retired()
    assert first.freed == second.freed == [2]
    assert (first.windows.retired, second.windows.retired) == (0, 0)
    mine[2].broken = yours[3].broken = True
    yours[3].free()
    first.others, second.others = gathering({4}), gathering({3})
    first.windows.free_all()
    second.windows.free_all()
    assert first.freed == second.freed == [2]


def test_nothing_to_retire() -> None:
    """A plan without a window, or one that is not held, retires nothing."""
    rank = Rank()
    rank.windows.own(plan := FakePlan(on_free=rank.windows.release), None)
    plan.free()
    rank.windows.release(FakePlan())
    rank.windows.retire(None)
    assert rank.windows.retired == 0
    rank.windows.retire(rank.make(1))  # of a plan that could not be made
    assert rank.windows.retired == 1


def test_the_end_frees_everything_but_what_is_busy() -> None:
    """Active plans, on whatever rank, keep their windows; all others are freed in the same order on all ranks. A plan
    that goes on after that has nobody to tell."""
    first, second = ranks = [Rank(), Rank()]
    for rank in ranks:
        rank.windows.keep("kept", 5, rank.make)  # number 1
    mine, yours = held(ranks, 4)  # 2, 3, 4, 5
    mine[3].free()  # retired on one rank, held on the other
    mine[1].active = yours[2].active = True
    first.others, second.others = gathering({4}), gathering({3})
    first.windows.free_all()
    second.windows.free_all()
    assert first.freed == second.freed == [1, 2, 5]
    assert not any(plan.is_freed for plan in (mine[1], yours[2])) and mine[2].is_freed and yours[1].is_freed
    assert all(plan.on_free is None for plan in (*mine[:3], *yours))
    mine[1].active = False
    mine[1].free()
    assert (first.windows.retired, second.windows.retired) == (0, 0) and not first.windows.kept


# Agreement


class Together:
    """Simulated ranks in threads: ``largest`` and ``total`` as MPI has them, in lock step."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier = size, threading.Barrier(size, timeout=10)
        self._given: list[Any] = [None] * size
        self.met: list[list[str]] = [[] for _ in range(size)]

    def _combined(self, rank: int, mine: Any, combine: Callable[..., Any]) -> Any:
        self._given[rank] = mine
        self._barrier.wait()
        assert len({(each.shape, each.dtype) for each in self._given}) == 1
        result = combine(np.stack(self._given), axis=0)
        self._barrier.wait()
        return result

    def agreement(self, rank: int) -> Agreement:
        def largest(mine: Any) -> Any:
            return self._combined(rank, mine, np.max)

        def total(mine: Any) -> Any:
            return self._combined(rank, mine, np.sum)

        return Agreement(rank, largest, total, self.met[rank].append)

    def run(self, what: Callable[[int, Agreement], Any]) -> list[Any]:
        """What each rank returns, or the ArgumentError that it raises."""

        def one(rank: int) -> Any:
            try:
                return what(rank, self.agreement(rank))
            except ArgumentError as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


VALUES = st.lists(st.lists(st.integers(-(2**50), 2**50), min_size=2, max_size=2), min_size=1, max_size=4)


@settings(quick, max_examples=20)
@given(VALUES)
def test_ranks_agree(values: list[list[int]]) -> None:
    """On the largest, the sums and the least, each of its kind."""
    together = Together(len(values))
    found = together.run(
        lambda rank, agreement: (
            agreement.slowest([value / 4 for value in values[rank]]),
            agreement.sums(values[rank]),
            agreement.least(values[rank][0], "a question"),
            agreement.same("alltoall", ("key",), 8, *values[rank]),
        )
    )
    columns = list(zip(*values, strict=True))
    largest = [max(column) for column in columns]
    assert found == [([value / 4 for value in largest], [sum(c) for c in columns], min(columns[0]), largest)] * len(
        values
    )
    assert [type(each) for each in (found[0][0][0], found[0][1][0], found[0][2], found[0][3][0])] == [
        float,
        int,
        int,
        int,
    ]
    assert together.met == [["agreement on algorithms"] * 2 + ["a question", "alltoall, set-up"]] * len(values)


@pytest.mark.parametrize("late", range(3))
@pytest.mark.parametrize(
    ("sizes", "keys", "lacking", "error", "words"),
    [
        ((8, 16), ("k", "k"), (0, 0), BufferSizeError, "between 8 and 16"),
        ((8, 0), ("k", "k"), (0, 0), BufferSizeError, "between 0 and 8"),
        ((8, 8), ("k", "other"), (0, 0), ParameterError, "same parameters on all ranks, got bcast"),
        ((8, 8), ("k", "k"), (0, 7), ConstraintError, "7 bytes more"),
        ((8, 16), ("k", "other"), (0, 7), BufferSizeError, "between 8 and 16"),
        ((8, 8), ("k", "other"), (0, 7), ParameterError, "algorithm"),
    ],
)
def test_disagreement_is_an_error_on_all_ranks(
    late: int,
    sizes: tuple[int, int],
    keys: tuple[str, str],
    lacking: tuple[int, int],
    error: type[ArgumentError],
    words: str,
) -> None:
    """Of the same kind, whichever rank differs, and naming the rank that raises it; the next agreement is as ever."""
    together = Together(3)

    def call(rank: int, agreement: Agreement) -> Any:
        differs = rank == late
        return agreement.same("bcast", (keys[differs],), sizes[differs], 1, lacking=lacking[differs])

    found = together.run(call)
    assert [type(each) for each in found] == [error] * 3
    assert [each.rank for each in found] == [0, 1, 2] and all(words in str(each) for each in found)
    assert together.run(lambda rank, agreement: agreement.same("bcast", (), 8, rank, 2 - rank)) == [[2, 2]] * 3


@pytest.mark.parametrize("question", ["slowest", "sums", "least", "same"])
def test_agreement_waits_with_a_deadline(question: str) -> None:
    """What meets the ranks comes first, and its CollectiveTimeout is the agreement's."""

    def meet(what: str) -> None:
        raise CollectiveTimeout(what)

    def never(mine: Any) -> Any:
        raise AssertionError("ranks are not there")

    agreement = Agreement(0, never, never, meet)
    ask: dict[str, Callable[[], object]] = {
        "slowest": lambda: agreement.slowest([1.0]),
        "sums": lambda: agreement.sums([1]),
        "least": lambda: agreement.least(1, "x"),
        "same": lambda: agreement.same("alltoall", (), 1),
    }
    with pytest.raises(CollectiveTimeout):
        ask[question]()


# Waiting


def test_a_rank_at_rest_lets_the_background_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps between its looks, longer and longer, up to a bound."""
    slept: list[float] = []
    monkeypatch.setattr(progress.time, "sleep", slept.append)
    going = Going()
    monkeypatch.setattr(progress, "active", [going])
    progress.rest_until(lambda: len(slept) == 5)
    assert slept == [5e-4, 1e-3, 2e-3, 2e-3, 2e-3] and going.advanced == 5


class Going:
    """Something in the background."""

    advanced = 0

    def advance(self) -> None:
        self.advanced += 1
