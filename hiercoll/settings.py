"""What the environment says: all ``HIERCOLL_*`` variables, and what a launcher sets for the whole process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hiercoll.errors import ParameterError

OFF, ON = ("0", "false", "off", "no"), ("1", "true", "on", "yes")  # of switches
ORDERS = ("any", "rank", "fixed")  # of reductions
# Algorithm and parameters instead of "auto", by collective; for communicators that hiercoll meets from then on.
forced: dict[str, tuple[str, dict[str, Any]]] = {}
# Whether native serves every other blocking call by "auto", for comparison; for such communicators.
compares = False


def _text(name: str) -> str:
    return os.environ.get(f"HIERCOLL_{name}", "")


def _is_set(name: str) -> bool:
    return _text(name) not in ("", "0")


def _switch(name: str, expected: str = "1 or 0") -> bool | None:
    """Whether it is switched on; None where it is not set. Raises ParameterError."""
    text = _text(name).strip().lower()
    if text not in ("", *OFF, *ON):
        raise ParameterError(f"HIERCOLL_{name}", expected, repr(_text(name)))
    return None if not text else text in ON


def timeout() -> float:
    """``HIERCOLL_TIMEOUT``: seconds that a call may wait, 0 for ever. Raises ParameterError."""
    text = _text("TIMEOUT")
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ParameterError("HIERCOLL_TIMEOUT", "a number of seconds, 0 for no deadline", repr(text))
    return seconds


def is_disabled() -> bool:
    """``HIERCOLL_DISABLE``: everything is left to the MPI library."""
    return bool(_switch("DISABLE"))


def checks_calls() -> bool:
    """``HIERCOLL_CHECK``: ranks compare what they call."""
    return bool(_switch("CHECK"))


def is_special() -> bool:
    """Whether calls need more than the MPI library from the first one on, as far as the environment says."""
    needs_more = bool(forced) or checks_calls() or hurries()
    return not is_disabled() and (needs_more or any(map(_is_set, ("TIMEOUT", "TABLE", "NODES", "ORDER"))))


def learns() -> bool:
    """``HIERCOLL_LEARN``: whether "auto" learns from a program's calls; 0: it does not. Raises ParameterError."""
    return hurries() or _switch("LEARN", "online, 1 or 0") is not False


def hurries() -> bool:
    """``HIERCOLL_LEARN=online``: "auto" learns at once, whatever that costs."""
    return _text("LEARN").strip().lower() == "online"


def order() -> str | None:
    """``HIERCOLL_ORDER``: the order of reductions that do not name one: "any", "rank" or "fixed"; None where it is not
    set. Raises ParameterError."""
    name = _text("ORDER")
    if name not in ("", *ORDERS):
        raise ParameterError("HIERCOLL_ORDER", " or ".join(ORDERS), repr(name))
    return name or None


def wants_thread() -> bool:
    """``HIERCOLL_PROGRESS=thread``: calls in the background go on in a thread. Raises ParameterError."""
    name = _text("PROGRESS").strip().lower()
    if name not in ("", "thread", *OFF):
        raise ParameterError("HIERCOLL_PROGRESS", "thread or 0", repr(_text("PROGRESS")))
    return name == "thread"


def engine() -> str:
    """``HIERCOLL_ENGINE``: "python" or "c", "" for the compiled one where there is one. Raises ParameterError."""
    name = _text("ENGINE")
    if name not in ("", "python", "c"):
        raise ParameterError("HIERCOLL_ENGINE", "python or c", repr(name))
    return name


def check() -> None:
    """Raises ParameterError where a variable has none of the values that it may have."""
    for read in (engine, timeout, is_disabled, checks_calls, learns, order, wants_thread, is_cuda_aware):
        read()


def is_cuda_aware() -> bool | None:
    """``HIERCOLL_CUDA_AWARE``: whether the MPI library takes device memory; None where it is not set."""
    return _switch("CUDA_AWARE")


def cray_takes_devices() -> bool:
    """``MPICH_GPU_SUPPORT_ENABLED=1``, which Cray MPICH reads: it is to take device memory."""
    return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


def nodes() -> str | None:
    """``HIERCOLL_NODES``: virtual nodes."""
    return _text("NODES") or None


def record_folder() -> Path | None:
    """``HIERCOLL_DIAG_DIR``: where ranks that wait too long write what they know."""
    text = _text("DIAG_DIR")
    return Path(text) if text else None


def table() -> Path | None:
    """``HIERCOLL_TABLE``: a tuning table's file, or a name for one."""
    text = _text("TABLE")
    return Path(text) if text else None


def machine() -> str:
    """``HIERCOLL_MACHINE``: what the model takes the machine for: a name, a file, or "auto"; "" where it is not set."""
    return _text("MACHINE")


def own_table() -> Path | None:
    """A user's own table, if there is one: ``hiercoll/table.json`` in the configuration folder."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = Path(base) / "hiercoll" / "table.json"
    return path if os.path.exists(path) else None  # False, too, in a home that may not be entered


def learned_folder() -> Path | None:
    """``HIERCOLL_LEARNED``: where jobs keep what they have learned; where it is not set, ``hiercoll/learned`` in the
    cache folder, or None for a user who has no home."""
    if text := _text("LEARNED"):
        return Path(text)
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "hiercoll" / "learned"
