"""Buffer specifications: arrays that only DLPack knows, and that NumPy cannot import."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hiercoll.runtime.specifications import UNREADABLE, block_message, vector_message

SIGNED, FLOAT, OPAQUE = 0, 2, 3
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroyed(_: int) -> None:
    """What an array library does when a capsule goes, written in Python: it cannot, while an error is on its way."""
    len("anything")


class Tensor(ctypes.Structure):
    """A DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class OnlyDLPack:
    """Memory of the host, with elements of any kind."""

    def __init__(self, values: Any, code: int, bits: int, lanes: int = 1) -> None:
        self.values, self._shape = values, (ctypes.c_int64 * 1)(8 * values.nbytes // (bits * lanes))
        device = (ctypes.c_int32 * 2)(*self.__dlpack_device__())
        self._tensor = Tensor(values.ctypes.data, device, 1, code, bits, lanes, self._shape, None, 0, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, stream: None = None) -> object:
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor", ctypes.cast(_destroyed, ctypes.c_void_p))


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The exceptions that Python prints because nobody can catch them."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: found.append((each.object, each.exc_value)))
    return found


def test_arrays_that_only_dlpack_knows(ignored: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Elements are read without NumPy's types being asked for."""
    values = np.arange(6, dtype="i4")
    message = block_message(OnlyDLPack(values, SIGNED, 32), 2, readonly=True)
    assert (message.address, message.nbytes, message.counts) == (values.ctypes.data, 24, 3)
    assert message.datatype == MPI.INT32_T or message.element.size == 4
    assert not ignored and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("code", "bits", "lanes"), [(FLOAT, 64, 2), (SIGNED, 8, 4), (OPAQUE, 64, 1)], ids=["lanes", "bytes", "opaque"]
)
@pytest.mark.parametrize("read", [block_message, vector_message])
def test_elements_that_numpy_does_not_know(
    ignored: list[Any], capfd: pytest.CaptureFixture[str], read: Any, code: int, bits: int, lanes: int
) -> None:
    """Such buffers are read as mpi4py reads them, or left to mpi4py by one of the errors that say so. Nothing else is
    to be seen of what cannot be done with them."""
    array = OnlyDLPack(np.arange(4.0), code, bits, lanes)
    with contextlib.suppress(UNREADABLE):
        assert read(array, 2, readonly=True).nbytes == 32
    assert not ignored and capfd.readouterr() == ("", "")


def test_given_datatypes_need_no_look(ignored: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """With a datatype of MPI's such a buffer is just memory."""
    array = OnlyDLPack(np.arange(4.0), FLOAT, 64, 2)
    message = block_message([array, 2, MPI.DOUBLE], 2, readonly=True)
    assert (message.counts, message.element.size) == (2, 8)
    with pytest.raises(KeyError, match="no type"):
        block_message([array, 2, "no type"], 2, readonly=True)
    assert not ignored and capfd.readouterr() == ("", "")
