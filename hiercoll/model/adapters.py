"""The network adapters of this host, as Linux lists them, and the machine that they speak for.

``/sys/class/infiniband`` has InfiniBand, Omni-Path and RoCE adapters with their rates (kernel documentation,
ABI/stable/sysfs-class-infiniband), ``/sys/class/cxi`` has HPE's Slingshot (200 Gbit/s each), ``/sys/class/net`` has
Ethernet with its speed in Mbit/s (ABI/testing/sysfs-class-net).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SYS = Path("/sys/class")
SLINGSHOT = 200.0  # Gbit/s of an adapter
FAST = 150.0  # Gbit/s out of a host, from which on it is like one of 200 rather than of 100


class Adapter(NamedTuple):
    """``kind``: InfiniBand, Omni-Path, Slingshot or Ethernet; ``rate`` in Gbit/s."""

    kind: str
    name: str
    rate: float


class Found(NamedTuple):
    """The name of a machine that comes with hiercoll, and why."""

    machine: str
    why: str


def adapters(folder: Path = SYS) -> list[Adapter]:
    """Those that this host has, of those that are up; Ethernet only where there is nothing faster."""
    fast = [*_infiniband(folder / "infiniband"), *_slingshot(folder / "cxi")]
    return fast or list(_ethernet(folder / "net"))


def by_adapters(found: Sequence[Adapter]) -> Found:
    """The generic machine that is nearest."""
    total = sum(each.rate for each in found)
    names = ", ".join(f"{each.name} ({each.kind}, {each.rate:g} Gbit/s)" for each in found) or "none that is known"
    machine = "generic-200g" if total >= FAST else "generic-100g"
    return Found(machine, f"{machine}, by the adapters of this host: {names}")


def _infiniband(folder: Path) -> list[Adapter]:
    found = []
    for adapter in sorted(folder.glob("*")):
        rates = [_number(port / "rate") for port in sorted((adapter / "ports").glob("*")) if _is_up(port)]
        if any(rates):
            kind = "Omni-Path" if adapter.name.startswith("hfi") else "InfiniBand"
            found.append(Adapter(kind, adapter.name, sum(rates)))
    return found


def _is_up(port: Path) -> bool:
    return "ACTIVE" in _text(port / "state")


def _slingshot(folder: Path) -> list[Adapter]:
    return [Adapter("Slingshot", each.name, SLINGSHOT) for each in sorted(folder.glob("cxi*"))]


def _ethernet(folder: Path) -> list[Adapter]:
    up = [each for each in sorted(folder.glob("*")) if each.name != "lo" and _text(each / "operstate") == "up"]
    return [Adapter("Ethernet", each.name, rate / 1000) for each in up if (rate := _number(each / "speed")) > 0]


def _number(path: Path) -> float:
    """The number that a file begins with; 0 for others."""
    match = re.match(r"\d+(\.\d+)?", _text(path))
    return float(match[0]) if match else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):  # gone, or an interface that does not say
        return ""
