"""Device arrays of any library, by the CUDA array interface (version 3), else by DLPack."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from hiercoll.errors import NEEDED, BufferTypeError, DeviceError, ParameterError
from hiercoll.loading import LazyModule, is_array

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

ON_CUDA = (2, 13)  # DLPack's numbers for memory of a CUDA device, and managed memory
READ_ONLY = ("jax", "jaxlib")  # libraries whose arrays never change
LEGACY = 1  # the legacy default stream, as the CUDA array interface numbers it


class DeviceArray(NamedTuple):
    """A contiguous device array: where it lies, what it holds, and the stream that produces it."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stream: int
    in_c_order: bool = True  # the last axis varies fastest

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Producers(NamedTuple):
    """What a start comes after: all that is enqueued then on the stream that was ``given`` or, if that is None, on
    those of ``arrays``; and on those of arrays that were ``made`` for the result. All of them are asked anew at each
    start: the stream of a CuPy or a PyTorch array is the one that is current."""

    given: Any = None
    arrays: tuple[Any, ...] = ()
    made: tuple[Any, ...] = ()
    handles: tuple[int, ...] | None = None  # of `now`

    def now(self) -> Producers:
        """The same, asked now, for a start that is put off. Raises as `streams`."""
        return self._replace(handles=tuple(self.streams()))

    def streams(self) -> list[int]:
        """Their handles. Raises ParameterError for what is given and is none."""
        if self.handles is not None:
            return list(self.handles)
        asked = (*self.arrays, *self.made) if self.given is None else self.made
        given = [] if self.given is None else [stream_handle(self.given)]
        return [*given, *(stream_of(*_interface(array, "array", -1)) for array in asked)]


NO_PRODUCERS = Producers()


def stream_handle(stream: Any) -> int:
    """The handle of a stream: a number, an object with ``__cuda_stream__`` (NVIDIA's protocol for Python), or one of
    CuPy's, PyTorch's, Numba's. Raises ParameterError."""
    handle = stream
    if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        handle = (protocol() if callable(protocol) else protocol)[1]
    else:
        for name in ("ptr", "cuda_stream", "handle"):  # CuPy, PyTorch, Numba
            if hasattr(stream, name):
                handle = getattr(stream, name)
                break
    if hasattr(handle, "value"):  # Numba's are of ctypes, in which None is 0
        handle = handle.value or 0
    if isinstance(handle, bool) or not hasattr(handle, "__index__"):
        raise ParameterError("stream", "a CUDA stream, or its handle", repr(stream))
    return int(handle) or LEGACY


def is_device_array(obj: object) -> bool:
    """Whether ``obj`` is an array in the memory of a CUDA device."""
    try:
        if hasattr(obj, "__cuda_array_interface__"):
            return True
    except RuntimeError:  # PyTorch, of tensors that require gradients
        return True
    asked: Any = getattr(obj, "__dlpack_device__", None)
    return not is_array(obj) and callable(asked) and asked()[0] in ON_CUDA


def device_array(obj: Any, argument: str, rank: int, *, writable: bool) -> DeviceArray:
    """What the CUDA array interface of ``obj`` says, or of what CuPy makes of its DLPack capsule.

    Raises BufferTypeError for arrays that are not contiguous, have a mask, or are
    read-only where they must be written.
    """
    if writable and _library(obj) in READ_ONLY:
        raise BufferTypeError(argument, "a writable array", f"an array of {_library(obj)}, which never changes", rank)
    obj, interface = _interface(obj, argument, rank)
    shape, dtype = tuple(interface["shape"]), _dtype(obj, interface["typestr"])
    if interface.get("mask") is not None:
        raise BufferTypeError(argument, "an array without a mask", "one with a mask", rank)
    strides = interface.get("strides")
    if strides is not None and not any(
        _lie_together(shape, tuple(strides), dtype.itemsize, c_order=c_order) for c_order in (True, False)
    ):
        raise BufferTypeError(argument, "a contiguous array", f"shape {shape} with strides {tuple(strides)}", rank)
    address, read_only = interface["data"]
    if writable and read_only:
        raise BufferTypeError(argument, "a writable array", "a read-only one", rank)
    in_c_order = strides is None or _lie_together(shape, tuple(strides), dtype.itemsize, c_order=True)
    return DeviceArray(address, shape, dtype, stream_of(obj, interface), in_c_order)


def _dtype(array: Any, typestr: str) -> np.dtype[Any]:
    """The type of an array's elements. The interface has no name for bfloat16; PyTorch calls it float16 there."""
    if str(getattr(array, "dtype", "")).rpartition(".")[2] != "bfloat16":
        return np.dtype(typestr)
    try:
        found: np.dtype[Any] = np.dtype(import_module("ml_dtypes").bfloat16)
        return found
    except ImportError:
        return np.dtype("V2")


def _interface(obj: Any, argument: str, rank: int) -> tuple[Any, dict[str, Any]]:
    """An array, or what CuPy makes of its DLPack capsule, with what its CUDA array interface says. Raises
    BufferTypeError."""
    try:
        if not hasattr(obj, "__cuda_array_interface__"):
            obj = _cupy().from_dlpack(obj)
        return obj, obj.__cuda_array_interface__
    except RuntimeError as error:
        raise BufferTypeError(argument, "a device array", f"{type(obj).__name__} ({error})", rank) from None


def _lie_together(shape: tuple[int, ...], strides: tuple[int, ...], item: int, *, c_order: bool) -> bool:
    """Whether the elements do, in C's order or in Fortran's."""
    pairs = [(n, step) for n, step in zip(shape, strides, strict=True) if n != 1]
    if any(n == 0 for n, _ in pairs):
        return True
    expected = item
    for n, step in reversed(pairs) if c_order else pairs:
        if step != expected:
            return False
        expected *= n
    return True


def stream_of(obj: Any, interface: dict[str, Any]) -> int:
    """The stream that ``obj`` is produced on; the legacy default stream waits for all that know it."""
    stream = interface.get("stream")
    if stream:
        return int(stream)
    if _library(obj) in READ_ONLY and hasattr(obj, "block_until_ready"):
        obj.block_until_ready()  # JAX has streams of its own, of which nobody is told
    if _library(obj) == "torch":  # its interface is older than streams
        torch: Any = import_module("torch")
        return int(torch.cuda.current_stream(obj.device).cuda_stream) or LEGACY
    return LEGACY


def _cupy() -> Any:
    """Raises DeviceError where it is not installed."""
    try:
        return import_module("cupy")
    except ImportError as error:
        raise DeviceError("device array", NEEDED, str(error)) from None


def _library(obj: object) -> str:
    """The package that the type of ``obj`` comes from."""
    return type(obj).__module__.partition(".")[0]


def new_like(obj: Any, shape: tuple[int, ...], rank: int) -> Any:
    """A new device array of the library that ``obj`` comes from, of its type, on its device.

    Raises BufferTypeError where that library is not known.
    """
    library = _library(obj)
    if library == "torch":
        return obj.new_empty(shape)
    if library == "cupy":
        with obj.device:
            return _cupy().empty(shape, obj.dtype)
    if library == "numba":
        return import_module("numba.cuda").device_array(shape, obj.dtype)
    if hasattr(obj, "__array_namespace__") and library not in READ_ONLY:
        return obj.__array_namespace__().empty(shape, dtype=obj.dtype)
    raise BufferTypeError("recvbuf", f"a device array that can be written, for a sendbuf of {library}", "None", rank)


def with_axes_reversed(array: Any, first: int, rank: int) -> Any:
    """A view of a device array with its axes in reverse, but for the ``first`` so many. Raises BufferTypeError where
    its library has none."""
    axes = (*range(first), *reversed(range(first, len(array.shape))))
    for name in ("permute", "transpose"):  # PyTorch, CuPy
        if callable(turned := getattr(array, name, None)):
            return turned(axes)
    raise BufferTypeError("recvbuf", "an array, for a sendbuf in Fortran's order", "None", rank)
