"""Where buffers lie that the ranks of a node copy from (transport "peer"), and that all can be mapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hiercoll.errors import DeviceError
from hiercoll.memory import HANDLE_BYTES, Array
from hiercoll.schedule import BufferName

if TYPE_CHECKING:
    from hiercoll.cuda.memory import DeviceMemory

NAMES: tuple[BufferName, ...] = ("send", "recv", "scratch", "narrow")  # that others copy from


class Addresses:
    """Address handles of a plan's buffers on all ranks of the node, rewritten in place.

    ``own``: the buffers that others copy from, and where they lie here; ``wanted``: (rank, buffer) of what this rank
    copies from. ``gather`` puts rows of bytes of the node's ranks together, ``least`` gives the smallest value of all
    ranks, ``equal`` tells whether it is the same on all; these are collective. ``count`` numbers what ranks have told
    each other, for all plans of a communicator.
    """

    def __init__(
        self,
        rank: int,
        lane_of: Sequence[int],
        lanes: int,
        memory: DeviceMemory,
        own: Mapping[BufferName, int],
        wanted: Sequence[tuple[int, BufferName]],
        gather: Callable[[Array, Array], Any],
        least: Callable[[int], int],
        equal: Callable[[int], bool],
        count: Callable[[], int],
    ) -> None:
        self._rank, self._lane_of, self._memory, self._own, self._wanted = rank, lane_of, memory, own, wanted
        self._gather, self._least, self._equal, self._count = gather, least, equal, count
        self._rows = np.zeros((lanes, len(NAMES), HANDLE_BYTES), np.uint8)
        # The own buffers that the others know, by the numbers of their allocations; since when.
        self._told, self._number = list[int](), 0

    def handle(self, peer: int, buffer: BufferName) -> Array:
        """The handle of another rank's buffer, as it is at each start."""
        row: Array = self._rows[self._lane_of[peer], NAMES.index(buffer)]
        return row

    def tell(self) -> None:
        """Before data move: unless all ranks know from the same time where all buffers lie, tell all, and map what is
        to be copied from. (A rank that has come back to the buffers of an earlier plan knows where others had theirs
        then, not where they have them now.) Raises DeviceError on all ranks if one cannot. Collective."""
        own, problem = list[int](), ""
        try:
            own = [self._memory.device.number(address) for address in self._own.values()]
        except DeviceError as error:
            problem = str(error)
        is_told = not problem and own == self._told and self._number > 0
        unlike = -1 - self._rank  # any other rank's
        if self._equal(self._number if is_told else unlike) and is_told:
            return
        self._number = 0
        handles = np.zeros((len(NAMES), HANDLE_BYTES), np.uint8)
        for name, address in self._own.items():
            try:
                handles[NAMES.index(name)] = self._memory.address_handle(address)
            except DeviceError as error:
                problem = str(error)
        number = self._count()
        self._gather(handles, self._rows)
        for peer, buffer in self._wanted:
            try:
                self._memory.find(self.handle(peer, buffer))
            except DeviceError as error:
                problem = problem or str(error)
        if not self._least(not problem):
            got = problem or "some that another rank cannot"
            raise DeviceError("transport 'peer'", "memory that the ranks of a node can map", got, self._rank)
        self._told, self._number = own, number
