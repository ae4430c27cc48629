"""The shared windows of a communicator: whose they are, and when they are freed.

Windows are made and freed by all ranks of a node together, so the order in which that happens must be the same on all
of them: those of blocking calls are kept by what is equal on all ranks, and used last goes last; a window of a plan
that its program has freed waits until all ranks have. Then another plan takes it over, or it is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

from hiercoll.runtime.cache import Cache
from hiercoll.runtime.progress import abandoned


class Windows:
    """Windows by what they are for. ``dropped`` is called with the keys that are still kept, when some have gone;
    ``gather`` gives every rank's value on the node, and is collective there; ``tick`` counts uses (see `Cache`);
    ``meet`` is called before ranks wait for each other to free a window, and may raise CollectiveTimeout."""

    def __init__(
        self,
        entries: int,
        nbytes: int,
        dropped: Callable[[Cache], None],
        gather: Callable[[object], list[Any]],
        tick: Callable[[], int] | None = None,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        self.kept = Cache(entries, nbytes, tick)
        self._dropped, self._gather, self._meet = dropped, gather, meet
        self._owned: dict[Any, Any] = {}  # by plan that a program holds; None for one without
        self._places: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # in bytes
        self._retired: list[Any] = []  # of freed plans, until all ranks have freed theirs
        self.made = 0

    def next_number(self) -> int:
        """What names the next window on all ranks."""
        self.made += 1
        return self.made

    def keep(self, key: Hashable, nbytes: int, make: Callable[[int], Any]) -> Any:
        """The window for ``key``, of at least ``nbytes``; made, collectively, where there is none, or none so large:
        then of twice the size that it had, at least."""
        window = self.kept.get(key)
        if window is not None and self._places[window] >= nbytes:
            self.kept.touch(key)
            return window
        if window is not None:
            self._meet()  # freeing waits for the others on the node
            nbytes = max(nbytes, 2 * self._places[window])
            self.kept.drop(key)
            self._dropped(self.kept)
        window = make(nbytes)
        self._places[window] = nbytes
        self.kept.keep(key, window)
        self._dropped(self.kept)
        return window

    def touch(self, key: Hashable) -> None:
        """It is used again."""
        self.kept.touch(key)

    def own(self, plan: Any, window: Any) -> None:
        """A program holds ``plan``, with its window or None."""
        self._owned[plan] = window

    def release(self, plan: Any) -> None:
        """The program has freed its plan on this rank; the window must wait for the others."""
        window = self._owned.pop(plan, None)
        if window is not None and plan.broken:
            window.spoiled = True
        self.retire(window)

    def retire(self, window: Any) -> None:
        """A window that this rank does not need any more, if it is one."""
        if window is not None:
            self._retired.append(window)

    @property
    def has_active(self) -> bool:
        """Whether a plan that the program holds is under way."""
        return any(plan.active for plan in self._owned)

    @property
    def retired(self) -> int:
        """How many wait to be freed."""
        return len(self._retired)

    def spare(self, flags: int, nbytes: int) -> Any:
        """The oldest window of a freed plan that this rank could use for another one; None if there is none."""
        fitting = [window for window in self._retired if window.fits(flags, nbytes)]
        return min(fitting, key=lambda window: window.number) if fitting else None

    def take_over(self, window: Any, epoch: int) -> None:
        """All ranks use a spare window for another plan; none has started the one before more often than ``epoch``
        says."""
        self._retired.remove(window)
        window.begin_anew(epoch)

    def free_retired(self) -> None:
        """Free those that no rank of the node needs any more, and let be those to which MPI may still write. Collective
        over the node."""
        retired = {window.number: window for window in self._retired}
        everyone = self._gather({number: window.spoiled for number, window in retired.items()})
        everywhere = set.intersection(*map(set, everyone))
        for number in sorted(everywhere):
            if any(each[number] for each in everyone):
                abandoned.append(retired[number])
            else:
                retired[number].free()
        self._retired = [window for window in self._retired if window.number not in everywhere]

    def free_all(self) -> None:
        """Free everything, the programs' plans too; what active plans use is left to them. Collective over the node."""
        own, self._owned = self._owned, {}
        in_use = {window.number for plan, window in own.items() if window is not None and (plan.active or plan.broken)}
        in_use.update(window.number for window in self._retired if window.spoiled)
        busy = set().union(*self._gather(in_use))
        for plan in own:
            plan.on_free = None
            if not plan.active:
                plan.free()
        self.kept.drop_all()
        left = [window for window in (*self._retired, *own.values()) if window is not None]
        for window in sorted(left, key=lambda window: window.number):
            if window.number not in busy:
                window.free()
            else:
                abandoned.append(window)
        self._retired = []
