"""What a plan asks of a kind of memory: who allocates scratch, who copies, who synchronises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from hiercoll.schedule import Region

if TYPE_CHECKING:
    import numpy.typing as npt

    from hiercoll.memory.layouts import Layout

Array: TypeAlias = "npt.NDArray[Any]"
Action: TypeAlias = "Callable[[], object]"
Combine: TypeAlias = "Callable[[Array, Array, Array], object]"
HANDLE_BYTES = 112  # bytes that tell of a buffer of another process


class Reduction(NamedTuple):
    """How elements are combined: a type of NumPy's, and one of `OPERATIONS`."""

    dtype: np.dtype[Any]
    operation: str


OPERATIONS: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class Transfer(ABC):
    """A copy that goes on in the background; it may be started again when it is done."""

    @abstractmethod
    def start(self) -> None:
        """Begin."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it is complete."""

    @abstractmethod
    def wait(self) -> None:
        """Until it is complete."""


class Now(Transfer):
    """Work on the host, on the memory of ``owners``, that is done when it is started."""

    def __init__(self, action: Action, *owners: object) -> None:
        self.action, self._owners = action, owners

    def start(self) -> None:
        """All of it."""
        self.action()

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class Memory(Protocol):
    """What a plan needs of the memory that its buffers lie in; ``shared`` and ``host`` lie on the host."""

    kind: str

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Address of ``nbytes`` of scratch, and the object that keeps it alive."""

    def allocate_host(self, nbytes: int) -> tuple[int, object]:
        """The same for the ``host`` buffer."""

    def share(self, address: int, nbytes: int) -> object:
        """Make host memory at ``address`` known as a ``shared`` buffer, while the result lives."""

    def copy(self, layout: Layout, source: tuple[int, Region], target: tuple[int, Region]) -> Action | Transfer | None:
        """What copies between regions of the buffers at two addresses, and converts elements where a `WideLayout` says
        that these are of two types; None if there is nothing to do."""

    def reduce(
        self,
        layout: Layout,
        how: Reduction,
        left: tuple[int, Region],
        right: tuple[int, Region],
        target: tuple[int, Region],
    ) -> Action | Transfer | None:
        """What puts ``left (+) right``, element by element, into ``target``; None if there is
        nothing to do. ``layout.item`` is the size of an element."""

    def address_handle(self, address: int) -> Array:
        """`HANDLE_BYTES` bytes that tell another process of this host how to `get` from the buffer at
        ``address``. Raises DeviceError for memory that only its own process can reach."""

    def get(self, layout: Layout, handle: Array, source: Region, target: tuple[int, Region], peer: int) -> Transfer:
        """What copies ``source`` of rank ``peer``'s buffer, of the address ``handle`` at each start, to a region
        of the buffer at an address."""

    def settle(self) -> None:
        """Wait until nothing is under way there, whoever began it. Raises DeviceError while a stream is captured."""

    def before_messages(self, handles: Iterable[int], direct: bool) -> None:
        """Order what the caller has produced on the streams with these handles before the first copy and,
        if ``direct``, before messages of (or about) this memory itself. Raises ParameterError for streams that
        cannot be waited for."""

    def of_plan(self) -> Memory:
        """The same memory for a plan of its own: what that waits for holds up no other one."""
