"""Sizes and times in words."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hiercoll.errors import ArgumentError
from hiercoll.units import format_size, format_time, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("64", 64),
        ("64B", 64),
        ("1K", 1024),
        ("4k", 4096),
        ("4 KiB", 4096),
        ("4KB", 4096),
        (" 2M ", 2 << 20),
        ("3GiB", 3 << 30),
        ("007", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Powers of 1024, in the usual spellings."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", " ", "K", "-1", "+1", "1.5K", "1e3", "1T", "1KK", "0x10", "1 2", "K1", "1_000", "1Kb/s"]
)
def test_sizes_that_are_none(text: str) -> None:
    """The error repeats what was given."""
    with pytest.raises(ArgumentError, match=r"^size: expected a whole number of bytes, K, M or G, got ") as caught:
        parse_size(text)
    assert caught.value.got == repr(text) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1, "1"),
        (1000, "1000"),
        (1024, "1K"),
        (1536, "1536"),
        (3 << 20, "3M"),
        (1 << 30, "1G"),
        (1 << 41, "2048G"),
    ],
)
def test_sizes_in_words(size: int, text: str) -> None:
    """The largest unit that divides."""
    assert format_size(size) == text


@settings(deadline=None, derandomize=True)
@given(st.one_of(st.integers(0, 1 << 50), st.integers(0, 1 << 20).map(lambda n: n << 10)))
@example(0)
@example(1024)
def test_sizes_read_back(size: int) -> None:
    """What is written is exact, and never longer than the plain number."""
    assert parse_size(format_size(size)) == size
    assert len(format_size(size)) <= len(str(size))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (1.5e-6, "1.5 us"),
        (123.456e-6, "123.5 us"),
        (1e-3, "1 ms"),
        (12.3456e-3, "12.35 ms"),
        (1.0, "1 s"),
        (61.237, "61.24 s"),
    ],
)
def test_times_in_words(seconds: float, text: str) -> None:
    """Four digits, in the unit that suits."""
    assert format_time(seconds) == text


@settings(deadline=None, derandomize=True)
@given(st.floats(1e-9, 1e4))
def test_times_read_back(seconds: float) -> None:
    """To four digits."""
    match = re.fullmatch(r"([0-9.e+-]+) (us|ms|s)", format_time(seconds))
    assert match is not None
    assert float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]] == pytest.approx(seconds, rel=6e-4)
