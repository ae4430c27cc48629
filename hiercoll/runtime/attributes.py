"""What hangs on a communicator: found through any object for it, and told when it is freed.

An MPI attribute holds a number, by which the value is found here. The compiled engine hears of its end from the MPI
library (`_attributes.c`); without it mpi4py does, which asks for the communicator's topology first. MPICH 5.0 looks
that up among attributes that it has just freed, if others have set some, too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from mpi4py import MPI

from hiercoll.runtime import compiled

Value = TypeVar("Value")


class Attribute(Generic[Value]):
    """One value on each communicator. ``deleted`` is called with the communicator's handle and a value that is taken
    away, or whose communicator is being freed; not after Python has ended. MPI must have been initialised when this is
    made."""

    def __init__(self, deleted: Callable[[int, Value], object]) -> None:
        self._tell, self._numbers = deleted, count(1)
        self._values: dict[int, tuple[int, Value]] = {}
        engine, _ = compiled.load()
        self._key: int = (
            engine.attribute_key(self._deleted)
            if engine
            else MPI.Comm.Create_keyval(delete_fn=lambda comm, key, number: self._deleted(number))
        )

    def get(self, comm: MPI.Comm) -> Value | None:
        """The value on ``comm``. Raises MPI.Exception for COMM_NULL."""
        number = comm.Get_attr(self._key)
        return None if number is None else self._values[number][1]

    def set(self, comm: MPI.Comm, value: Value) -> None:
        """Put it there; one that is there is taken away."""
        self.take(comm)
        number = next(self._numbers)
        self._values[number] = comm.handle, value
        comm.Set_attr(self._key, number)

    def take(self, comm: MPI.Comm) -> None:
        """Take away what is there, if anything is."""
        if comm.Get_attr(self._key) is not None:
            comm.Delete_attr(self._key)

    def _deleted(self, number: int) -> None:
        self._tell(*self._values.pop(number))
