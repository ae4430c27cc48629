"""As for the MPI tests; without a GPU everything is skipped, and says why (see `machines_gpu`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from hiercoll import cuda

_path = Path(__file__).parent.parent / "mpi" / "conftest.py"
_spec = importlib.util.spec_from_file_location("mpi_conftest", _path)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({name: value for name, value in vars(_module).items() if not name.startswith("_")})


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[Any]:
    """A device for each rank, and a stream that is not the default one."""
    from cupy.cuda import Stream

    cuda.bind(MPI.COMM_WORLD)
    with Stream(non_blocking=True) as stream:
        yield stream


@pytest.fixture
def machine(own_stream: Any) -> Any:
    """The GPU of this rank, for the tests of tests/device."""
    from machines_gpu import Gpu

    return Gpu()
