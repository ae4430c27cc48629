"""Types of what hiercoll uses of CuPy 13 and 14, which has none of its own."""

from typing import Any

import numpy as np
import numpy.typing as npt
from cupy import cuda as cuda
from cupy.cuda.memory import MemoryPointer

__version__: str

class ndarray:
    data: MemoryPointer
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    def __getitem__(self, which: slice) -> ndarray: ...
    def set(self, arr: npt.NDArray[Any]) -> None: ...

class RawKernel:
    def __init__(self, code: str, name: str) -> None: ...
    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None: ...

def asarray(a: object) -> ndarray: ...
def asnumpy(a: ndarray) -> npt.NDArray[Any]: ...
