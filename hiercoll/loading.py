"""What is imported when, and how long that takes, for which all ranks wait.

Where ranks share cores, or a slow file system, it is most of what a short program pays for hiercoll. So NumPy, too, is
imported when something of it is needed: a program that does not use it has no arrays to send.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import numpy as np

REST = "hiercoll.runtime.session"  # brings most of hiercoll
REST_TIMES, NUMPY_TIMES = 3.6, 2.3  # times as long as what was imported first, that the rest takes, and NumPy
# Of the rest, once in a job, that calls so far are to pay for: those to come gain by it, too. Of NumPy, all: where a
# program does without it, hiercoll should not bring it for little.
COUNTED = 0.25
_first = 0.0  # seconds that the first import took


def load(name: str) -> ModuleType:
    """Import a module; how long it takes is noted."""
    global _first
    begin = perf_counter()
    module = _imported(name)
    _first = max(_first, perf_counter() - begin)
    return module


def _imported(name: str) -> ModuleType:
    """A module. Python's garbage collector waits meanwhile: an import makes thousands of objects, none of them garbage,
    and to look at all again and again takes a tenth of its time, and in a program with many objects a third."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if is_collecting:
            gc.enable()


def to_pay() -> float:
    """Seconds of importing the rest of hiercoll that calls so far are to pay for, about; 0 where it has been."""
    if REST in sys.modules:
        return 0.0
    return (COUNTED * REST_TIMES + NUMPY_TIMES * ("numpy" not in sys.modules)) * _first


class LazyModule:
    """In place of a module, which is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(_imported(self._name), name)
        return found


def is_array(obj: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether it is an array of NumPy's, and of no type made from that: without importing NumPy."""
    return type(obj) is getattr(sys.modules.get("numpy"), "ndarray", None)
