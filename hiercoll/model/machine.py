"""A machine as the model sees it: levels of distance between ranks, each parameter with its unit and its source.

Ranks are in the same *domain* (cores that share a cache or a memory controller), else in the same *socket*, else in the
same *node*, else they meet over the *network*. Lanes fill domains and sockets in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hiercoll.errors import MachineError
from hiercoll.model.adapters import adapters, by_adapters
from hiercoll.topology import Topology

LEVELS = ("domain", "socket", "node", "network")
FAR = LEVELS.index("network")
VERSION = 1
AUTO = "auto"
SHIPPED = Path(__file__).parent / "machines"


def _parameter(unit: str, meaning: str, measured: str, default: float) -> Any:
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "measured": measured})


@dataclass(frozen=True)
class Parameters:
    """What the model's equations need (`hiercoll.model.evaluate`): seconds, seconds per byte, and bytes.

    The defaults stand for hosts with 100 Gbit/s between them.
    """

    domain: float = _parameter("s", "a message step within a domain", "ping-pong of 1 byte", 0.5e-6)
    socket: float = _parameter("s", "a message step within a socket", "ping-pong of 1 byte", 0.7e-6)
    node: float = _parameter("s", "a message step within a node", "ping-pong of 1 byte", 1.0e-6)
    network: float = _parameter("s", "a message step between nodes", "ping-pong of 1 byte", 2.0e-6)
    domain_byte: float = _parameter("s/B", "per byte of a rank's messages, in a domain", "ping-pong, 64 KiB", 0.06e-9)
    node_byte: float = _parameter("s/B", "the same, elsewhere in the node", "ping-pong, 64 KiB", 0.1e-9)
    network_byte: float = _parameter("s/B", "the same, between nodes", "ping-pong, 1 MiB", 0.08e-9)
    network_small_byte: float = _parameter("s/B", "more per byte of a small message between nodes: it is copied on the "
                                           "way", "ping-pong, by size", 0.0)  # fmt: skip
    rendezvous: float = _parameter("s", "more for a large message within a node", "ping-pong, by size", 2.0e-6)
    eager: float = _parameter("B", "from where on that is so", "ping-pong, by size", 8192.0)
    network_rendezvous: float = _parameter("s", "more for a large message between nodes", "ping-pong, by size", 4.0e-6)
    network_eager: float = _parameter("B", "from where on that is so", "ping-pong, by size", 16384.0)
    posted: float = _parameter("1", "share of a step that each message costs of several at once",
                               "many small messages at once", 0.4)  # fmt: skip
    adapter: float = _parameter("s/B", "per byte out of a node, by all ranks", "all pairs of two nodes", 0.08e-9)
    adapter_message: float = _parameter("s", "per message out of a node", "many small messages, all pairs", 5e-9)
    congestion: float = _parameter("1", "more of that with many nodes to speak with", "alltoall on 2 to 8 nodes", 0.2)
    socket_link: float = _parameter("s/B", "per byte between sockets, by all ranks", "alltoall in a node", 0.01e-9)
    cache_socket: float = _parameter("B", "cache that the ranks of a socket share", "alltoall in a node, by size", 32e6)
    cache_rank: float = _parameter("B", "cache of a rank", "name-plate", 1e6)
    memory: float = _parameter("s/B", "more per byte that is not in cache", "copy of 64 MiB, one rank", 0.1e-9)
    bus: float = _parameter("s/B", "the same, by all ranks of a node together", "copy of 64 MiB, all ranks", 4e-12)
    root_message: float = _parameter("s", "per message at the root of many", "gather of 1 byte", 0.4e-6)
    root_in: float = _parameter("s/B", "per byte into such a root", "gather of 64 KiB", 0.12e-9)
    root_out: float = _parameter("s/B", "per byte out of such a root", "scatter of 64 KiB", 0.1e-9)
    root_out_domain: float = _parameter("s/B", "the same, within its domain", "scatter of 64 KiB", 0.1e-9)
    root_large: float = _parameter("B", "from where on rooted messages are copied otherwise", "gather, by size", 1e18)
    root_factor: float = _parameter("1", "share of the time per byte that is left then", "gather, by size", 1.0)
    piece: float = _parameter("s", "per piece that is copied", "copy of many pieces", 5e-9)
    line: float = _parameter("s", "more per piece that fills a cache line", "copy of many pieces", 0.0)
    copy_byte: float = _parameter("s/B", "per byte that is copied", "copy in cache", 0.15e-9)
    reduce_byte: float = _parameter("s/B", "per byte that is reduced (of the result)", "sum in cache", 0.2e-9)
    fresh: float = _parameter("s/B", "per byte of new memory, by all ranks of a node", "first touch, all ranks", 4e-12)
    flag: float = _parameter("s", "per flag in the node's memory", "barrier by flags", 0.3e-6)


@dataclass(frozen=True)
class Machine:
    """``domain`` and ``socket``: ranks in each, as jobs place them; 0 where nobody says (then one for the node).

    ``fitted``: (name, value) of how good the fit is; ``sources``: where figures come from; ``assumed``: parameters that
    no data determine; ``spread``: by how much measured times differ from the model's, as 10 and 90 % of the ratio.
    """

    name: str
    parameters: Parameters = Parameters()
    domain: int = 0
    socket: int = 0
    sources: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    spread: tuple[float, float] = (0.5, 2.0)
    about: str = ""
    fitted: Mapping[str, float] = field(default_factory=dict, hash=False)

    def to_json(self) -> str:
        """The machine as it is written to a file."""
        values = {**asdict(self), "fitted": dict(self.fitted), "version": VERSION}
        return json.dumps(values, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, file: object = "machine") -> Machine:
        """What `to_json` has written. Raises MachineError, which names the file and what is wrong in it."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise MachineError(file, "text", "JSON", str(error)) from None
        if not isinstance(values, dict) or values.pop("version", None) != VERSION:
            raise MachineError(file, "version", f"a machine of version {VERSION}", "something else")
        known = {each.name: each for each in fields(Machine)}
        for name in values.keys() - known.keys():
            raise MachineError(file, name, f"one of {', '.join(known)}", "an unknown field")
        values.setdefault("name", None)
        for name, (expected, is_valid) in FORMS.items():
            if name in values and not is_valid(values[name]):
                raise MachineError(file, name, expected, repr(values[name]))
        given = values.pop("parameters", {})
        return Machine(parameters=_parameters(given, file), **{k: _tupled(v) for k, v in values.items()})


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(each) and each > 0 for each in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


# What fields of a machine's file must be, but for the parameters.
FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("a text", _is_text),
    "domain": ("a number of ranks, at least 0", _is_count),
    "socket": ("a number of ranks, at least 0", _is_count),
    "sources": ("a list of texts", _are_texts),
    "assumed": ("a list of texts", _are_texts),
    "spread": ("two numbers above 0", _is_pair),
    "about": ("a text", _is_text),
    "fitted": ("an object of numbers, at least 0", _are_numbers),
}


def parameter_fields() -> tuple[Field[Any], ...]:
    """The parameters, each with ``unit``, ``meaning`` and ``measured`` (what tells it) in its metadata."""
    return fields(Parameters)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _parameters(given: Any, file: object) -> Parameters:
    if not isinstance(given, dict):
        raise MachineError(file, "parameters", "an object", repr(given))
    known: dict[str, Field[Any]] = {each.name: each for each in parameter_fields()}
    for name, value in given.items():
        if name not in known:
            raise MachineError(file, name, f"one of {', '.join(known)}", "an unknown parameter")
        if not _is_number(value):
            raise MachineError(file, name, f"a number of {known[name].metadata['unit']}, at least 0", repr(value))
    return Parameters(**given)


def shipped() -> dict[str, Path]:
    """Files of the machines that come with hiercoll, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.json"))}


def get_machine(name: str | Path) -> Machine:
    """A machine that comes with hiercoll, by name, or that of a file; "auto": by this host's network adapters. Raises
    MachineError."""
    if str(name) == AUTO:
        found = by_adapters(adapters())
        return replace(get_machine(found.machine), about=found.why)
    path = shipped().get(str(name).lower()) or Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = f"a file, or one of {', '.join(shipped())}"
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise MachineError(path, "machine", expected, str(reason)) from None
    return Machine.from_json(text, path)


def level(machine: Machine, topology: Topology, rank: int, peer: int) -> int:
    """Index in ``LEVELS`` of the distance between two ranks."""
    if topology.node_of[rank] != topology.node_of[peer]:
        return FAR
    a, b = topology.lane_of[rank], topology.lane_of[peer]
    size = len(topology.node(rank))
    socket = machine.socket or size
    domain = machine.domain or socket
    return 0 if a // domain == b // domain else 1 if a // socket == b // socket else 2
