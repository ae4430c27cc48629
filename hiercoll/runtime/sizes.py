"""The sizes of uneven blocks, and what the ranks of a node learn of each other's.

A rank knows the sizes of its own blocks from its arguments, at both ends of a message alike.
Where blocks of several ranks lie together in the node's shared buffer, their places depend on
the sizes of the other ranks' blocks: operations of the schedule exchange those through shared
memory. Nothing about sizes crosses the network, but for what the root of a scatter tells the leaders of other nodes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from hiercoll.collectives import Collective
from hiercoll.memory import Action, UnevenLayout
from hiercoll.schedule import BufferName, Copy, Schedule
from hiercoll.topology import Topology

if TYPE_CHECKING:
    import numpy.typing as npt

Sizes: TypeAlias = "npt.NDArray[np.int64]"


class Blocks(NamedTuple):
    """Lengths and offsets in bytes of a rank's blocks, by peer, in its send and its receive buffer."""

    sent: Sizes
    sent_at: Sizes
    received: Sizes
    received_at: Sizes


Places: TypeAlias = "list[tuple[int, list[int]]]"  # where some blocks begin; of each, see `Areas.learned`, in turns


class Areas:
    """Where the blocks of a node's shared buffer lie, whatever their sizes.

    The buffer begins with the rows of `SizeTable`. Each lane then has an area for what it writes,
    so that it need not know the others' sizes, and one area is for what comes from other nodes.
    ``most``: bytes that a block may have there.
    """

    ends: tuple[BufferName, ...] = ("send", "recv")  # whose blocks a row has the sizes of
    buffer: BufferName = "shared"  # where the places are

    def __init__(self, schedule: Schedule, topology: Topology, most: int) -> None:
        node, lane_of = topology.node_of[schedule.rank], topology.lane_of
        lanes, size = len(topology.nodes[node]), topology.size
        self.lane, self.lanes, self.size = lane_of[schedule.rank], lanes, size
        self.nbytes = 16 * lanes * size + 2 * lanes * size * most
        # Which row has the size of a block: its lane's, whether as sent (0) or received (1), the other end.
        where = [(lane_of[s], 0, d) if topology.node_of[s] == node else (lane_of[d], 1, s) for s, d in schedule.holds]
        by_lane, by_end, by_peer = np.array(where, dtype=np.intp).reshape(-1, 3).T
        area = np.where(by_end == 0, by_lane, lanes)
        self._order = np.argsort(area, kind="stable")  # blocks, area by area
        self._entry = ((by_lane * 2 + by_end) * size + by_peer)[self._order]
        self._area = area[self._order]
        self._first = np.searchsorted(self._area, np.arange(lanes + 1))
        self._bases = 16 * lanes * size + np.arange(lanes + 1) * size * most
        own = np.flatnonzero((by_end == 0) & (by_lane == self.lane))
        self._own, self._own_peers = own, by_peer[own]
        self.blocks = len(where)

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.lanes

    @property
    def width(self) -> int:
        """Numbers in a lane's row."""
        return 2 * self.size

    def fill(self, rows: Sizes, blocks: Blocks) -> None:
        """With what a rank with such blocks knows at the beginning."""
        rows[self.lane] = np.concatenate([blocks.sent, blocks.received])

    def at_first(self) -> Places:
        """What is known before others' sizes are learned: this lane's area."""
        return [self._place(self.lane)]

    def learned(self) -> Places:
        """Where a lane's area begins, or, after those, that for what comes from other nodes; and of its blocks, in
        order, the entry in all lanes' rows that has the size, and the block."""
        return [self._place(number) for number in range(self.lanes + 1)]

    def _place(self, number: int) -> tuple[int, list[int]]:
        here = self._area == number
        return int(self._bases[number]), np.column_stack([self._entry[here], self._order[here]]).reshape(-1).tolist()

    def own(self, rows: Sizes, limit: int) -> tuple[Sizes, Sizes]:
        """Offsets and sizes of all blocks, of which those that this lane writes are right. Blocks of
        ``limit`` bytes or more do not come here."""
        at, length = np.zeros((2, self.blocks), np.int64)
        taken = _below(rows[self.lane, self._own_peers], limit)
        at[self._own] = self._bases[self.lane] + np.cumsum(taken) - taken
        length[self._own] = taken
        return at, length

    def all(self, rows: Sizes, limit: int) -> tuple[Sizes, Sizes]:
        """The same of all blocks, from all lanes' rows."""
        at, length = np.empty((2, self.blocks), np.int64)
        taken = _below(rows.reshape(-1)[self._entry], limit)
        before = np.cumsum(taken) - taken
        first = np.append(before, 0)[self._first]
        at[self._order] = before + (self._bases - first)[self._area]
        length[self._order] = taken
        return at, length


class Slots:
    """The same of one block for each lane, which has a place of its own: that of its rank in the ``collective``. Rows
    are the sizes of all ranks' blocks, which the root knows (`Schedule.knows`). Or of such places in a rank's own
    scratch (`Schedule.slots`)."""

    width = 1

    def __init__(self, schedule: Schedule, topology: Topology, most: int, collective: Collective) -> None:
        is_root, gathers = len(schedule.knows) == topology.size, collective.everywhere == "send"
        self.ends: tuple[BufferName, ...] = ("recv",) if is_root is gathers else ("send",)
        # To the root all rows are one.
        self.lane, self.lanes = (0, 1) if is_root else (schedule.rank, topology.size)
        self.buffer: BufferName = "shared" if schedule.shared else "scratch"
        ranks, first = (topology.node(schedule.rank), 8 * topology.size) if schedule.shared else (schedule.slots, 0)
        self.blocks, self._knows = len(ranks), list(schedule.knows)
        self._ranks, self.rows = np.array(ranks, np.intp), topology.size
        self._at = first + np.arange(self.blocks, dtype=np.int64) * most
        self.nbytes = first + self.blocks * most

    def fill(self, rows: Sizes, blocks: Blocks) -> None:
        """See `Areas`."""
        rows[self._knows, 0] = blocks.sent if self.ends == ("send",) else blocks.received

    def at_first(self) -> Places:
        """See `Areas`."""
        places = zip(self._at.tolist(), self._ranks.tolist(), strict=True)
        return [(at, [rank, lane]) for lane, (at, rank) in enumerate(places)]

    learned = at_first

    def all(self, rows: Sizes, limit: int) -> tuple[Sizes, Sizes]:
        """See `Areas`."""
        return self._at, _below(rows[self._ranks, 0], limit)

    own = all


def areas_of(schedule: Schedule, topology: Topology, most: int, collective: Collective) -> Areas | Slots:
    """Where blocks of up to ``most`` bytes lie in the node's buffer."""
    return Slots(schedule, topology, most, collective) if schedule.knows else Areas(schedule, topology, most)


class GivenSizes(NamedTuple):
    """Of blocks whose sizes and places each start says: how many send and recv have; and, where those of less than
    ``limit`` bytes travel together, where these come to lie."""

    blocks: tuple[int, int]
    areas: Areas | Slots | None = None
    limit: int = 0


def _below(sizes: Sizes, limit: int) -> Sizes:
    """``sizes``, with 0 for those that are not below the limit."""
    return sizes * (sizes < limit) if sizes.max(initial=0) >= limit else sizes


class SizeTable:
    """Sizes of the blocks of a node's ranks: a row per lane, with the bytes that it sends to each rank
    and receives from each, or one per rank (`Slots`). The buffers ``sizes``, and ``shared_sizes`` at ``address``, hold
    such rows.

    Places blocks of the ``shared`` buffer (or of scratch, where nothing is shared), of which ``part`` fits it, in the
    layout: at first this rank's own.
    """

    def __init__(
        self,
        areas: Areas | Slots,
        shared: Sizes | None,
        blocks: Blocks,
        limit: int,
        layout: UnevenLayout,
        part: int | None,
    ) -> None:
        self._areas, self._shared, self._limit, self._layout, self._part = areas, shared, limit, layout, part
        self._rows = np.zeros((areas.rows, areas.width), np.int64)
        areas.fill(self._rows, blocks)
        self.address = self._rows.ctypes.data
        lengths = np.full(areas.rows, 8 * areas.width)
        layout.place("sizes", None, np.cumsum(lengths) - lengths, lengths)
        layout.place(areas.buffer, part, *areas.own(self._rows, limit))

    @property
    def rows(self) -> bytes:
        """All rows as they are now."""
        return self._rows.tobytes()

    def place(self) -> None:
        """Place all blocks as the rows say."""
        self._layout.place(self._areas.buffer, self._part, *self._areas.all(self._rows, self._limit))

    def copy(self, op: Copy) -> Action:
        """What publishes, or learns, the rows that the operation names."""
        assert self._shared is not None
        source, target = (self._rows, self._shared) if op.source.buffer == "sizes" else (self._shared, self._rows)
        blocks = op.source.blocks
        which: Any = list(blocks)
        if isinstance(blocks, range):
            which = slice(blocks.start, blocks.stop, blocks.step)
        return partial(_copy_rows, target, source, which)


def _copy_rows(target: Sizes, source: Sizes, which: Any) -> None:
    target[which] = source[which]


def rows_at(view: Any, areas: Areas | Slots) -> Sizes:
    """The rows at the beginning of a shared buffer."""
    rows: Sizes = np.frombuffer(view, np.int64, areas.rows * areas.width).reshape(areas.rows, areas.width)
    return rows
