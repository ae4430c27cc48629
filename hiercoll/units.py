"""Sizes and times as people write them."""

from __future__ import annotations

import re

from hiercoll.errors import ArgumentError

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of ``"64"``, ``"64K"``, ``"1M"``, ``"2GiB"`` (powers of 1024).

    Raises ArgumentError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentError("size", "a whole number of bytes, K, M or G", repr(text))
    return int(match[1]) * _FACTORS[match[2].upper()]


def format_size(size: int) -> str:
    """Shortest exact spelling of ``size`` bytes that `parse_size` reads back."""
    for unit in ("G", "M", "K"):
        if size and size % _FACTORS[unit] == 0:
            return f"{size // _FACTORS[unit]}{unit}"
    return str(size)


def format_time(seconds: float) -> str:
    """``seconds`` in us, ms or s with four significant digits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds:.4g} s"
