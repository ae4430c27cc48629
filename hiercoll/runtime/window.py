"""What the ranks of a node share: the ``shared`` buffer, and flags that say how far each rank has come."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from array import array
from collections.abc import Sequence
from functools import partial
from threading import RLock
from typing import Any, cast
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from hiercoll.memory import Memory

NEEDS_FENCE = platform.machine() not in ("x86_64", "AMD64", "i686")
LINE = 8  # flags (of 8 bytes) per cache line
PROGRESS_EVERY = 8  # looks at flags between calls that let the MPI library make progress
PAGE = mmap.PAGESIZE
MOST_TOGETHER = 1 << 20  # bytes of a buffer, at most, that lies in an arena with others
MOST_FLAGS = 1 << 16  # bytes of its flags, at most
# Bytes for buffers in such an arena. What windows that are gone have touched is given back with the last of them.
ROOM = 4 << 20
NEIGHBOURS = 16  # windows like the first one for whose flags it has room, at least
SHARE = 8  # such an arena may take one byte in so many of the free memory
MINCORE: Any = getattr(ctypes.CDLL(None), "mincore", None)
if MINCORE is not None:
    MINCORE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_led: WeakSet[Window] = WeakSet()
_leading = RLock()  # threads may make windows, and free them, while another adds up what these have


def header_bytes(lanes: int, flags: int) -> int:
    """Of the flags of so many ranks, in whole cache lines for each, and of one that says how many sleep."""
    return (lanes * -(-max(flags, 1) // LINE) + 1) * LINE * 8


def in_pages(nbytes: int) -> int:
    """In whole ones."""
    return -(-nbytes // PAGE) * PAGE


def arena_bytes(flags: int, nbytes: int) -> int:
    """Of an `Arena`, whose buffers begin with a page."""
    return flags + in_pages(nbytes) + PAGE


def lies_with_others(flags: int, nbytes: int) -> bool:
    """Whether a window with so many bytes of flags and of a buffer does."""
    return flags <= MOST_FLAGS and nbytes <= MOST_TOGETHER


def flags_together(lanes: int, header: int) -> int:
    """Bytes of flags in an arena for several windows, the first of which has a ``header`` of so many."""
    return NEIGHBOURS * max(2 * header_bytes(lanes, 1), header)


def room_together(nbytes: int, free: int | None) -> int:
    """Bytes for buffers in an arena for several windows, the first of which has so many, where so many are ``free``;
    None: nobody knows. What no window takes nobody touches, so that it takes no memory; but MPI libraries may want it
    to be there."""
    return ROOM if free is None else max(in_pages(nbytes), min(ROOM, free // SHARE))


def untouched_bytes() -> int:
    """Of the windows whose memory this process has asked for: what nobody has touched yet. The system does not count
    it as taken, and when it is, ends who touches what there is no room for (SIGBUS)."""
    with _leading:
        windows = list(_led)
    return sum(window.untouched_bytes() for window in windows)


class Arena:
    """An MPI window: memory that the ranks of a node share, of which several `Window` have a part each, so that to make
    another one of them asks nobody. ``flags``: bytes for flags, all 0 at first; ``nbytes``: for buffers, as lane 0
    says.

    What was taken once is not taken again. All ranks of the node make and free the parts in the same order, and with
    the last of them goes the arena. Made collectively over the node.
    """

    def __init__(self, node: MPI.Intracomm, flags: int, nbytes: int) -> None:
        leads = node.rank == 0
        self.window = MPI.Win.Allocate_shared(arena_bytes(flags, nbytes) * leads, 1, comm=node)
        base, _ = self.window.Shared_query(0)
        self._flags_room, self._room, self._parts = flags, (base.nbytes - flags - PAGE) // PAGE * PAGE, 0
        self.window.Lock_all(MPI.MODE_NOCHECK)
        self._flags_at = MPI.Get_address(base)
        self._at = in_pages(self._flags_at + flags)
        if leads:
            ctypes.memset(self._flags_at, 0, flags)
        self.window.Sync()
        node.Barrier()
        self.window.Sync()

    def fits(self, flags: int, nbytes: int) -> bool:
        """Whether there is room for so many bytes of flags and of a buffer."""
        return flags <= self._flags_room and nbytes <= self._room

    def take(self, flags: int, nbytes: int) -> tuple[int, int]:
        """Addresses of flags, all 0, and of a buffer in pages of its own. Local."""
        flags_at, at, taken = self._flags_at, self._at, in_pages(nbytes)
        self._flags_at, self._flags_room = flags_at + flags, self._flags_room - flags
        self._at, self._room = at + taken, self._room - taken
        self._parts += 1
        return flags_at, at

    def release(self) -> None:
        """One of its parts is not needed any more. Collective over the node for the last one."""
        self._parts -= 1
        if not self._parts:
            self._flags_room = 0
            self.window.Unlock_all()
            self.window.Free()


class Window:
    """The ``shared`` buffer, of ``room`` bytes, and the flags of a node, in an ``arena`` that has place for them.

    Each rank has a line of flags of its own. A flag holds the number of the last start
    that raised it; ``epoch`` counts this rank's starts. ``number`` names the window on all
    ranks of the node; ``counted`` is the size that all nodes take it for when they make places for
    others. ``comm`` is of all ranks. Local, but in the same order on all ranks of the node.
    """

    def __init__(
        self, comm: MPI.Intracomm, node: MPI.Intracomm, arena: Arena, room: int, flags: int, number: int, counted: int
    ) -> None:
        self.number, self.nbytes, self._room = number, counted, room
        # A probe for what nobody sends. Not on MPI_COMM_SELF: there MPICH does not look at the network.
        self._make_progress = partial(comm.Iprobe, comm.rank)
        self._width = -(-max(flags, 1) // LINE) * LINE
        header = header_bytes(node.size, flags)
        self._arena, self.window = arena, arena.window
        address, self.address = arena.take(header, room)
        self.flags = memoryview(cast(Any, MPI.buffer.fromaddress(address, header))).cast("q")
        self._flags_address, self._sleepers_address = address, address + header - 8 * LINE
        self._is_crowded = node.size > (os.cpu_count() or node.size)
        self.lane = node.rank
        self.counts = array("q", [0, 0])  # starts, and when it was used last; the compiled engine counts, too
        self.notices: dict[tuple[int, int, int], int] = {}  # slots by source, destination and tag (see `tell_by_flags`)
        self._known: dict[int, object] = {}  # by memory, what keeps the buffer known to it
        self._elsewhere: object = None  # what keeps the buffer, if it is not in the window
        self.spoiled = False  # by a start that was interrupted: a rank may still write to it
        if node.rank == 0:
            with _leading:
                _led.add(self)

    def addresses(self, sleeps: bool) -> tuple[int, int, int]:
        """Of the flags, of ``counts``, and of how many ranks sleep until a flag is raised; 0 where they do not: it
        answers sooner, where each has a core, while they look all the time."""
        sleepers = self._sleepers_address if sleeps and self._is_crowded else 0
        return self._flags_address, self.counts.buffer_info()[0], sleepers

    @property
    def epoch(self) -> int:
        """The number of this rank's starts."""
        return self.counts[0]

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.counts[0] = number

    @property
    def used(self) -> int:
        """When it was used last, in calls of the session."""
        return self.counts[1]

    @used.setter
    def used(self, number: int) -> None:
        self.counts[1] = number

    def tell_by_flags(self, rank: int, node: MPI.Intracomm, first: int, notices: Sequence[tuple[int, int]]) -> None:
        """Let flags from ``first`` on stand for what this rank tells others (peer, tag). Collective on the node."""
        numbered = node.allgather((rank, first, notices))
        self.notices = {
            (source, peer, tag): self.slot(lane, start + index)
            for lane, (source, start, told) in enumerate(numbered)
            for index, (peer, tag) in enumerate(told)
        }

    def slot(self, lane: int, flag: int) -> int:
        """Index in ``flags`` of a lane's flag."""
        return lane * self._width + flag

    def raise_flag(self, slot: int) -> None:
        """Raise a flag of this rank to the number of the current start."""
        if NEEDS_FENCE:
            self.window.Sync()  # what was written and read before is done before the flag is seen
        self.flags[slot] = self.counts[0]

    def all_raised(self, slots: list[int], back: int) -> bool:
        """Whether flags have been raised in the current start, or ``back`` starts before."""
        flags, goal = self.flags, self.counts[0] - back
        for slot in slots:
            if flags[slot] < goal:
                self._make_progress()  # as in `wait`
                return False
        if NEEDS_FENCE:
            self.window.Sync()  # what is read next is read after the flags
        return True

    def wait(self, slots: list[int], back: int) -> None:
        """Until `all_raised`."""
        flags, goal, looks = self.flags, self.counts[0] - back, 0
        for slot in slots:
            while flags[slot] < goal:
                looks += 1
                if looks % PROGRESS_EVERY == 0:
                    # What others wait for may still be in the MPI library's queues: a send that
                    # has completed need not have left, and a large one needs its receiver.
                    self._make_progress()
                os.sched_yield()
        if NEEDS_FENCE:
            self.window.Sync()  # what is read next is read after the flags

    def fits(self, flags: int, nbytes: int) -> bool:
        """Whether another plan can use it, with so many flags and so large a buffer."""
        return not self.spoiled and self._elsewhere is None and flags <= self._width and nbytes <= self._room

    def begin_anew(self, epoch: int) -> None:
        """Another plan uses it from now on, whose starts come after ``epoch``, which no rank's flags exceed: all of
        this rank's count as raised then. All ranks of the node must be through with the plan before."""
        own = self.lane * self._width
        self.flags[own : own + self._width] = memoryview(array("q", [epoch] * self._width))
        self.epoch = epoch
        if NEEDS_FENCE:
            self.window.Sync()

    def untouched_bytes(self) -> int:
        """Of the buffer: pages that nobody has touched; 0 where the system does not say."""
        first, end = self.address // PAGE * PAGE, self.address + self._room
        pages = np.zeros(-(-(end - first) // PAGE), np.uint8)
        known = MINCORE is not None and self._elsewhere is None and MINCORE(first, end - first, pages.ctypes.data) == 0
        return PAGE * int(np.count_nonzero(pages & 1 == 0)) if known else 0

    def put_elsewhere(self, address: int, owner: object) -> None:
        """The buffer lies at ``address`` here, not in the window; the flags do."""
        self.address, self._elsewhere = address, owner

    def share_with(self, memory: Memory) -> None:
        """Make the buffer, if there is one, known to the memory that is copied from and to. CUDA takes no 0 bytes."""
        if self._room and self._elsewhere is None and id(memory) not in self._known:
            self._known[id(memory)] = memory.share(self.address, self._room)

    def free(self) -> None:
        """Free it (collective over the node)."""
        with _leading:
            _led.discard(self)
        self._known.clear()
        if self.lane:
            self._elsewhere = None  # a mapping of what lane 0 has
        self.flags.release()
        self._arena.release()
        self._elsewhere = None
