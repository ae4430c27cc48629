"""All ranks' schedules together, with the contract that they are to fulfil and the topology that they are for.

A rank's schedule is emitted when it is first asked for. A pass makes another system of one: of
each schedule by itself (`with_pass`: `in_order`, `cut`, `staged`), or of those of its node
(`with_node_pass`: `peer`, any transport). A system can be saved as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeAlias, get_args

from hiercoll import schedule as operations
from hiercoll.collectives import InPlace
from hiercoll.contracts import Contract
from hiercoll.errors import ScheduleError
from hiercoll.schedule import Blocks, BufferName, Op, Region, Schedule
from hiercoll.topology import Topology

Emit: TypeAlias = "Callable[[int], Schedule]"
NodePass: TypeAlias = "Callable[[Emit, Topology, int], Schedule]"

VERSION = 1  # of the JSON
OPS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*operations.MESSAGES, *operations.LOCAL)}


class System:
    """``emit`` gives a rank's schedule. ``contract``'s numbers of segments and of blocks are those of the schedules."""

    def __init__(self, topology: Topology, contract: Contract, emit: Emit) -> None:
        self.topology = topology
        self._contract, self._emit = contract, emit
        self._emitted: dict[int, Schedule] = {}

    def __getitem__(self, rank: int) -> Schedule:
        """The schedule of ``rank``. Raises what its algorithm and passes raise."""
        if rank not in self._emitted:
            self._emitted[rank] = self._emit(rank)
        return self._emitted[rank]

    def schedules(self) -> list[Schedule]:
        """Those of all ranks, in order."""
        return [self[rank] for rank in range(self.topology.size)]

    @property
    def contract(self) -> Contract:
        """What the schedules are to fulfil, for as many segments, and blocks of a vector, as they have."""
        first = next(iter(self._emitted.values()), None) or self[0]
        return replace(self._contract, segments=first.segments, blocks=first.blocks)

    def with_pass(self, each: Callable[[Schedule], Schedule]) -> System:
        """The system of ``each(schedule)``."""
        return System(self.topology, self._contract, lambda rank: each(self[rank]))

    def with_node_pass(self, each: NodePass) -> System:
        """The system of ``each(emit, topology, rank)``, which may ask ``emit`` for the schedules of other ranks."""
        return System(self.topology, self._contract, lambda rank: each(self.__getitem__, self.topology, rank))

    def in_place(self) -> System:
        """The system with the input lying in the receive buffer (`schedule.in_place`)."""
        own = self._contract.record.in_place is InPlace.OWN
        moved = self.with_pass(lambda schedule: operations.in_place(schedule, own))
        return System(self.topology, replace(self._contract, in_place=True), moved.__getitem__)

    def accumulated(self) -> System:
        """The system with partial sums in wider elements than the program's (`schedule.accumulated`)."""
        contract = replace(self._contract, accumulate=True)

        def widened(emit: Callable[[int], Schedule], topology: Topology, rank: int) -> Schedule:
            schedule = operations.without_partial_contributions(emit, rank)

            def like(region: Region) -> Blocks | None:
                alike = region.like or contract.like(schedule.rank, region.buffer, region.blocks)
                return None if alike is None else operations.as_blocks(alike)

            return operations.accumulated(schedule, like)

        return System(self.topology, contract, self.with_node_pass(widened).__getitem__)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, System):
            return NotImplemented
        same = self.topology == other.topology and self.contract == other.contract
        return same and self.schedules() == other.schedules()

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> str:
        """The whole system as JSON, for `from_json`."""
        schedules = [_encoded_schedule(schedule) for schedule in self.schedules()]
        contract = asdict(self.contract)
        whole = {"version": VERSION, "node_of": self.topology.node_of, "contract": contract, "schedules": schedules}
        return json.dumps(whole)

    @staticmethod
    def from_json(text: str) -> System:
        """The system that `to_json` has written. Raises ScheduleError for anything else;
        whether it is right is for `verify` to say."""
        try:
            whole = json.loads(text)
            if whole["version"] != VERSION:
                raise ValueError(f"of version {whole['version']!r} instead of {VERSION}")
            topology, contract = Topology(tuple(whole["node_of"])), Contract(**whole["contract"])
            schedules = [_decoded_schedule(each) for each in whole["schedules"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"not a system: {type(error).__name__}: {error}") from None
        if len(schedules) != topology.size:
            raise ScheduleError(f"not a system: {len(schedules)} schedules for {topology.size} ranks")
        return System(topology, contract, schedules.__getitem__)


def _encoded_schedule(schedule: Schedule) -> dict[str, Any]:
    values = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    return {**values, "ops": [_encoded_op(op) for op in schedule.ops]}


def _decoded_schedule(values: dict[str, Any]) -> Schedule:
    ops = tuple(_decoded_op(op) for op in values["ops"])
    holds = tuple((int(source), int(block)) for source, block in values["holds"])
    return Schedule(**{**values, "ops": ops, "holds": holds, "knows": tuple(values.get("knows", ()))})


def _encoded_op(op: Op) -> dict[str, Any]:
    values = {
        name: _encoded_region(value) if isinstance(value, Region) else value for name, value in op._asdict().items()
    }
    return {"op": type(op).__name__, **values}


def _decoded_op(values: dict[str, Any]) -> Op:
    given = {name: _decoded_value(value) for name, value in values.items() if name != "op"}
    if given.get("buffer", "send") not in get_args(BufferName):
        raise ValueError(f"no buffer {given['buffer']!r}")
    op: Op = OPS[values["op"]](**given)
    return op


def _decoded_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _decoded_region(**value)
    return tuple(int(each) for each in value) if isinstance(value, list) else value


def _encoded_region(region: Region) -> dict[str, Any]:
    like = {} if region.like is None else {"like": _encoded_blocks(region.like)}
    return {"buffer": region.buffer, **_encoded_blocks(region.blocks), "part": region.part, **like}


def _encoded_blocks(blocks: Blocks) -> dict[str, Sequence[int]]:
    """Evenly spaced blocks as their start, stop and step."""
    return {"range": (blocks.start, blocks.stop, blocks.step)} if isinstance(blocks, range) else {"blocks": blocks}


def _decoded_region(
    buffer: BufferName, part: int | None, like: dict[str, list[int]] | None = None, **blocks: list[int]
) -> Region:
    if buffer not in get_args(BufferName):
        raise ValueError(f"no buffer {buffer!r}")
    return Region(buffer, _decoded_blocks(blocks), part, None if like is None else _decoded_blocks(like))


def _decoded_blocks(blocks: dict[str, list[int]]) -> Blocks:
    [(name, listed)] = blocks.items()
    return range(*listed) if name == "range" else tuple(int(block) for block in listed)
