"""What docs/gpu.md claims, on the simulated device: the tests of tests/device, which tests/gpu runs on a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import WORLD
from device_again import *  # noqa: F403
from device_in_place import *  # noqa: F403
from device_memory import *  # noqa: F403
from device_sizes import *  # noqa: F403
from device_streams import *  # noqa: F403
from device_tools import *  # noqa: F403
from machines import Simulated

from hiercoll import cuda
from hiercoll.cuda.late import LateDevice

pytestmark = pytest.mark.ranks([1, 2, 3, 4])  # more would show nothing else, and share the cores


@pytest.fixture(params=["late", "early", "random"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    """The simulated device, in each of its orders; MPI may not be given its memory unless a test says so."""
    device = LateDevice(order=request.param, seed=WORLD.rank)
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", "0")
    with cuda.use(lambda address: device):
        yield Simulated(device, monkeypatch)
