"""What the environment says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hiercoll import settings
from hiercoll.errors import ParameterError

SWITCHES: dict[str, Callable[[], bool | None]] = {
    "DISABLE": settings.is_disabled,
    "CHECK": settings.checks_calls,
    "LEARN": settings.learns,
    "CUDA_AWARE": settings.is_cuda_aware,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the usual words, in any case; by others not at all."""
    for word, meant in (("0", False), ("false", False), ("Off", False), (" no ", False), ("1", True), ("TRUE", True)):
        monkeypatch.setenv(f"HIERCOLL_{name}", word)
        assert SWITCHES[name]() is meant, word
    monkeypatch.setenv(f"HIERCOLL_{name}", "maybe")
    expected = "online, 1 or 0" if name == "LEARN" else "1 or 0"
    with pytest.raises(ParameterError, match=f"HIERCOLL_{name}: expected {expected}, got 'maybe'"):
        SWITCHES[name]()


def test_a_thread_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, meant in (("", False), ("0", False), ("thread", True), ("Thread", True)):
        monkeypatch.setenv("HIERCOLL_PROGRESS", word)
        assert settings.wants_thread() is meant
    monkeypatch.setenv("HIERCOLL_PROGRESS", "threads")
    with pytest.raises(ParameterError, match="HIERCOLL_PROGRESS: expected thread or 0, got 'threads'"):
        settings.wants_thread()


def test_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(f"HIERCOLL_{name}", raising=False)
    assert [ask() for ask in SWITCHES.values()] == [False, False, True, None]
    monkeypatch.setenv("HIERCOLL_LEARN", "online")
    assert settings.learns() and settings.hurries()
