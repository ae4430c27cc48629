"""As for the MPI tests; without a GPU everything is skipped, and says why."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_path = Path(__file__).parent.parent / "mpi" / "conftest.py"
_spec = importlib.util.spec_from_file_location("mpi_conftest", _path)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({name: value for name, value in vars(_module).items() if not name.startswith("_")})
