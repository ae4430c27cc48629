"""What hangs on a communicator: a number, that its duplicates take over, and by which hiercoll hears of its end.

The compiled engine hears of it from the MPI library (`_attributes.c`); without it mpi4py does, which asks for the
communicator's topology first. MPICH 5.0 looks that up among attributes that it has just freed, if others have set
some, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hiercoll.runtime import compiled
from hiercoll.runtime.library import may_copy


class Attribute:
    """One number on each communicator; `MPI.Comm.Dup` copies even ones, where it `may_copy`. ``deleted`` is called with
    the handle of a communicator that is being freed, or whose number is taken away, if it is ``among`` those (None:
    always); not after Python has ended. MPI must have been initialised when this is made."""

    def __init__(self, deleted: Callable[[int], None], among: dict[int, Any] | None = None) -> None:
        copies = may_copy()
        engine: Any = compiled.load()[0]
        self._engine = engine
        self._everywhere: int | None = None
        self._group = MPI.GROUP_NULL
        self.key: int = (
            engine.attribute_key(deleted, among, copies)
            if engine
            else MPI.Comm.Create_keyval(
                copy_fn=lambda comm, key, number: number if copies and number % 2 == 0 else NotImplemented,
                delete_fn=lambda comm, key, number: deleted(comm.handle),
            )
        )

    def get(self, comm: MPI.Comm) -> int | None:
        """The number on ``comm``; None for COMM_NULL, too."""
        if self._engine is not None:
            return self._engine.attribute(self.key, comm, False)  # type: ignore[no-any-return]
        found: int | None = None if comm == MPI.COMM_NULL else comm.Get_attr(self.key)
        return found

    def find(self, comm: MPI.Comm) -> int | None:
        """The same, after it has taken over that of `everywhere`, where it has none."""
        if self._engine is not None:
            return self._engine.attribute(self.key, comm, True)  # type: ignore[no-any-return]
        found = self.get(comm)
        if found is None and self._everywhere is not None and comm != MPI.COMM_NULL and _is_of(comm, self._group):
            found = self._everywhere
            self.set(comm, found)
        return found

    def everywhere(self, number: int | None) -> None:
        """What intracommunicators take over that have none, if all of their processes are of COMM_WORLD; None: nothing
        any more."""
        self._everywhere = number
        self._group = MPI.GROUP_NULL if number is None else MPI.COMM_WORLD.Get_group()
        if self._engine is not None:
            self._engine.set_everywhere(self.key, number, compiled.value_of(self._group), MPI.UNDEFINED)

    def set(self, comm: MPI.Comm, number: int) -> None:
        """Put it there, where nothing is; nothing on COMM_NULL."""
        if self._engine is not None:
            self._engine.set_attribute(self.key, comm, number)
        elif comm != MPI.COMM_NULL:
            comm.Set_attr(self.key, number)

    def take(self, comm: MPI.Comm) -> None:
        """Take away what is there."""
        comm.Delete_attr(self.key)


def _is_of(comm: MPI.Comm, world: MPI.Group) -> bool:
    """Whether its processes are among these: others come with MPI's dynamic processes."""
    if comm.Is_inter():
        return False
    group = comm.Get_group()
    found = MPI.UNDEFINED not in group.Translate_ranks(None, world)
    group.Free()
    return found
