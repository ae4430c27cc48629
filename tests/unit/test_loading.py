"""How long importing hiercoll takes."""

import gc
import subprocess
import sys
from contextlib import nullcontext
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

import pytest

from hiercoll import loading

COUNTED = """
import sys
from hiercoll import loading
assert loading.to_pay() == 0.0  # nothing is known
loading.load("hiercoll.tables")
first = loading.to_pay()
assert first > 0.0
loading.load("hiercoll.tables")  # which is there
assert loading.to_pay() == first
assert "numpy" not in sys.modules
sys.modules["numpy"] = loading
assert loading.to_pay() < first  # NumPy is there already
sys.modules[loading.REST] = loading
assert loading.to_pay() == 0.0
"""


def test_what_is_imported_is_counted() -> None:
    """Until the rest has been imported."""
    subprocess.run([sys.executable, "-c", COUNTED], check=True, timeout=60)


def test_the_rest_is_a_module() -> None:
    """One of hiercoll's."""
    assert find_spec(loading.REST) is not None


def test_a_module_that_is_imported_when_it_is_needed() -> None:
    """Not before."""
    name = "colorsys"  # which nobody else needs
    sys.modules.pop(name, None)
    module = loading.LazyModule(name)
    assert name not in sys.modules
    assert module.hls_to_rgb(0.0, 1.0, 0.0) == (1.0, 1.0, 1.0) and name in sys.modules


WHETHER = """
import gc
is_collecting = gc.isenabled()
if {fails}:
    raise RuntimeError("wrong")
"""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_collecting", [True, False])
def test_no_garbage_is_collected_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, is_collecting: bool
) -> None:
    """Then as before, whether the import fails or not."""
    name = "module_that_looks"
    (tmp_path / f"{name}.py").write_text(WHETHER.format(fails=fails))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    invalidate_caches()
    if not is_collecting:
        gc.disable()
    try:
        with pytest.raises(RuntimeError, match="wrong") if fails else nullcontext():
            assert not loading.load(name).is_collecting
        assert gc.isenabled() == is_collecting
    finally:
        gc.enable()
        sys.modules.pop(name, None)
