"""What docs/gpu.md claims, on a real GPU: the tests of tests/device, which tests/mpi runs on the simulated one."""

from __future__ import annotations

import machines_gpu  # noqa: F401  (skips this module where there is no GPU)
from device_again import *  # noqa: F403
from device_in_place import *  # noqa: F403
from device_memory import *  # noqa: F403
from device_sizes import *  # noqa: F403
from device_streams import *  # noqa: F403
from device_tools import *  # noqa: F403
