"""Transforms of schedules: proved for every algorithm, and nothing of private memory is sent any more."""

from __future__ import annotations

import numpy as np
import pytest

from hiercoll.algorithms import REGISTRY
from hiercoll.collectives import Contract
from hiercoll.errors import ConstraintError
from hiercoll.schedule import Copy, Recv, Schedule, Send
from hiercoll.topology import Topology, parse_layout
from hiercoll.transports import ON_HOST, cut, staged
from hiercoll.verify import verify

LAYOUTS = ("1", "2x3", "3+1", "2x4:cyclic", "5+3")
CASES = [
    (collective, name, tuple(params.items()))
    for collective in ("alltoall", "allgather")
    for name, entry in REGISTRY[collective].items()
    for params in entry.variants()
]


def schedules(collective: str, name: str, params: object, topology: Topology, inplace: bool) -> list[Schedule]:
    entry = REGISTRY[collective][name]
    given = dict(params)  # type: ignore[call-overload]
    if entry.refusal(topology, given) or (inplace and not entry.in_place):
        pytest.skip("cannot run so")
    return [entry.schedule(topology, rank, given, inplace=inplace) for rank in range(topology.size)]


def proved(made: list[Schedule], collective: str, topology: Topology, inplace: bool) -> bool:
    contract = Contract(collective, topology.size, made[0].segments, in_place=inplace)
    return verify(made, contract, topology).require().ok


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("collective", "name", "params"), CASES)
@pytest.mark.parametrize("inplace", [False, True])
def test_staged(collective: str, name: str, params: object, layout: str, inplace: bool) -> None:
    """Proved; messages are of the host's memory only, and rounds stay rounds."""
    topology = parse_layout(layout)
    plain = schedules(collective, name, params, topology, inplace)
    made = [staged(schedule) for schedule in plain]
    assert proved(made, collective, topology, inplace)
    for before, after in zip(plain, made, strict=True):
        assert {op.region.buffer for op in after.ops if isinstance(op, Send | Recv)} <= set(ON_HOST)
        assert (before.rounds is None) == (after.rounds is None)
        assert before.is_in_order <= after.is_in_order or not before.flags
        assert (before.scratch, before.shared, before.flags, before.tags) == (
            after.scratch, after.shared, after.flags, after.tags,
        )  # fmt: skip


@pytest.mark.parametrize(("collective", "name", "params"), CASES)
def test_staged_in_parts(collective: str, name: str, params: object) -> None:
    """Three segments, each on its own."""
    topology = parse_layout("2x3")
    plain = schedules(collective, name, params, topology, False)
    if plain[0].flags or plain[0].segments > 1:
        with pytest.raises(ConstraintError, match="without segments and flags"):
            staged(plain[0], 3)
        return
    made = [staged(schedule, 3) for schedule in plain]
    assert proved(made, collective, topology, False)
    assert made[0].host == staged(plain[0]).host or made[0].rounds is None


def test_one_copy_out_and_one_in() -> None:
    """What a round sends from one buffer is copied out at once, and what it receives is copied in at once."""
    topology = parse_layout("2x3")
    made = staged(REGISTRY["alltoall"]["scatter_destination"].schedule(topology, 0))
    copies = [op for op in made.ops if isinstance(op, Copy)]
    assert sorted((op.source.buffer, op.target.buffer, op.source.size) for op in copies) == [
        ("host", "recv", 5), ("send", "host", 5), ("send", "recv", 1),
    ]  # fmt: skip


def test_what_goes_to_several_is_copied_out_once() -> None:
    """An allgather's own block."""
    made = staged(REGISTRY["allgather"]["direct"].schedule(parse_layout("2x3"), 0))
    out = [op for op in made.ops if isinstance(op, Copy) and op.target.buffer == "host"]
    assert [op.source.size for op in out] == [1]
    assert made.host == 1 + 5


def test_a_lost_copy_is_found() -> None:
    """The proof covers the host's buffer: without waiting for the copy out, it is refuted."""
    topology = parse_layout("2x3")
    made = [staged(REGISTRY["alltoall"]["eager"].schedule(topology, rank)) for rank in range(6)]
    ops = list(made[2].ops)
    at = next(i for i, op in enumerate(ops) if isinstance(op, Send))
    ops[at] = ops[at]._replace(deps=())
    made[2] = Schedule(2, tuple(ops), made[2].scratch, host=made[2].host)
    assert not verify(made, Contract("alltoall", 6), topology).ok


def test_cut_keeps_segments_apart() -> None:
    """Operations of one segment depend on, and touch, that segment only."""
    made = cut(REGISTRY["alltoall"]["bruck"].schedule(parse_layout("2x3"), 1), 4)
    part = {}
    for index, op in enumerate(made.ops):
        own = {part[dep] for dep in op.deps} | {r.part for r in (getattr(op, "region", None) and [op.region]) or []}  # type: ignore[union-attr]
        part[index] = index // (len(made.ops) // 4)
        assert own <= {part[index]}
    assert np.unique(list(part.values())).tolist() == [0, 1, 2, 3]
