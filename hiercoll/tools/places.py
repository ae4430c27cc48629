"""Where on its host a process may run, as Linux says: socket, NUMA domain, caches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from hiercoll.errors import ArgumentError
from hiercoll.units import parse_size

SYSTEM = Path("/sys/devices/system")


class Place(NamedTuple):
    """The socket and NUMA domain that all CPUs of a process are in; None where they are in several, or not known."""

    socket: int | None
    domain: int | None


def place_of(cpus: Collection[int], system: Path = SYSTEM) -> Place:
    """The place of a process that is bound to ``cpus``."""
    sockets = {_number(system / "cpu" / f"cpu{cpu}" / "topology" / "physical_package_id") for cpu in cpus}
    domains = {_domain(system / "cpu" / f"cpu{cpu}") for cpu in cpus}
    return Place(*(found.pop() if len(found) == 1 else None for found in (sockets, domains)))


def caches_of(cpus: Collection[int], system: Path = SYSTEM) -> tuple[int, int]:
    """Bytes of a core's second level of cache, and of the third level of a socket; 0 where not known."""
    if not cpus:
        return 0, 0
    first = min(cpus)
    socket = _number(system / "cpu" / f"cpu{first}" / "topology" / "physical_package_id")
    third: dict[str, int] = {}
    for cpu in (system / "cpu").glob("cpu[0-9]*"):
        if _number(cpu / "topology" / "physical_package_id") == socket:
            third |= _caches(cpu, 3)
    own = _caches(system / "cpu" / f"cpu{first}", 2)
    return max(own.values(), default=0), sum(third.values())


def sizes_of(places: Sequence[Place]) -> tuple[int, int, str]:
    """How many lanes of a node share a domain, and a socket, with these places; 0 for both, and why, where lanes do not
    fill them in order, or nobody knows. A node in one place is one domain."""
    if any(None in place for place in places):
        return 0, 0, "ranks are not bound to a socket and a domain"
    sizes = []
    for which in ([(p.socket, p.domain) for p in places], [p.socket for p in places]):
        runs = [(place, len(list(lanes))) for place, lanes in groupby(which)]
        lengths = [length for _, length in runs]
        if len({place for place, _ in runs}) < len(runs) or len({*lengths[:-1], max(lengths)}) > 1:
            return 0, 0, "ranks do not fill sockets and domains in order"
        sizes.append(lengths[0])
    return sizes[0], sizes[1], ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _domain(cpu: Path) -> int | None:
    """The NUMA domain that the kernel has linked in a CPU's folder."""
    found = [path.name[4:] for path in cpu.glob("node[0-9]*")]
    return int(found[0]) if len(found) == 1 and found[0].isdecimal() else None


def _caches(cpu: Path, level: int) -> dict[str, int]:
    """Bytes of a CPU's caches of data of one level, by the CPUs that share them."""
    found = {}
    for index in (cpu / "cache").glob("index[0-9]*"):
        if _number(index / "level") == level and _text(index / "type") != "Instruction":
            try:
                found[_text(index / "shared_cpu_list")] = parse_size(_text(index / "size"))
            except ArgumentError:
                continue
    return found
