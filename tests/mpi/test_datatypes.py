"""Datatypes taken apart: their bytes are packed and unpacked as the MPI library does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from random_types import INT, bounds, data, random_type

from hiercoll.memory.regions import MOST_PIECES, Block, Piece, packing
from hiercoll.runtime import compiled
from hiercoll.runtime.datatypes import element_of
from hiercoll.runtime.specifications import Apart, copying

RANK = MPI.COMM_WORLD.rank
ENGINES = ["c", "python"]
PAIRS = (MPI.FLOAT_INT, MPI.DOUBLE_INT, MPI.LONG_INT, MPI.SHORT_INT, MPI.LONG_DOUBLE_INT, MPI.TWOINT)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who copies."""
    name: str = request.param
    if name == "c" and compiled.load()[0] is None:
        pytest.skip("there is no compiled engine")
    if name == "python":
        monkeypatch.setattr(compiled, "load", lambda: (None, "not wanted"))
    return name


def by_mpi(memory: Any, at: int, datatype: MPI.Datatype, count: int, packed: Any, outward: bool) -> None:
    """What the MPI library does: a message to oneself."""
    there = [MPI.buffer.fromaddress(MPI.Get_address(memory) + at, max(memory.nbytes - at, 0)), count, datatype]
    here = [packed, packed.nbytes, MPI.BYTE]
    ends = (there, here) if outward else (here, there)
    MPI.COMM_SELF.Sendrecv(ends[0], 0, 0, ends[1], 0, 0)


def check(datatype: MPI.Datatype, count: int, seed: int) -> None:
    """Pack and unpack so many elements in both ways."""
    random, nbytes = np.random.default_rng(seed), count * datatype.Get_size()
    low, high = bounds(datatype, count)
    memory, at = data(random, high - low + 16), 8 - low
    expected, packed = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    by_mpi(memory, at, datatype, count, expected, True)
    block = Block(at, count, element_of(datatype))
    assert block.element.pieces is not None
    assert block.bounds == ((low + at, high + at) if nbytes else (0, 0))
    where = Apart(MPI.Get_address(memory), memory.nbytes, (block,), [datatype])
    copying(where, packed, outward=True)()
    np.testing.assert_array_equal(packed, expected)
    new = data(random, nbytes)
    due = memory.copy()
    by_mpi(due, at, datatype, count, new, False)
    copying(where, new, outward=False)()
    np.testing.assert_array_equal(memory, due)  # what lies between is as it was


@pytest.mark.parametrize("part", range(8))
def test_random_types(engine: str, part: int) -> None:
    for seed in range(125):
        random = np.random.default_rng([part, seed, RANK])
        datatype = random_type(random, int(random.integers(49)))
        check(datatype, int(random.integers(4)), seed)
        datatype.Free()


@pytest.mark.parametrize("datatype", PAIRS, ids=MPI.Datatype.Get_name)
def test_pairs_with_gaps(engine: str, datatype: MPI.Datatype) -> None:
    check(datatype, 3, 1)
    strided = datatype.Create_vector(2, 2, 3).Commit()
    check(strided, 2, 1)
    strided.Free()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 100, 1024, 1025, 5000])
def test_runs_of_every_length(engine: str, length: int) -> None:
    datatype = MPI.BYTE.Create_vector(7, length, length + 3).Commit()
    check(datatype, 3, length)
    datatype.Free()


def test_large_runs_let_other_threads_run(engine: str) -> None:
    datatype = MPI.BYTE.Create_vector(3, 1 << 15, 1 << 16).Commit()
    check(datatype, 2, 0)
    datatype.Free()


def test_loops_that_go_on_are_one() -> None:
    """The middle of an array that is whole along its last axis."""
    datatype = MPI.DOUBLE.Create_subarray([4, 6, 8], [2, 3, 8], [1, 2, 0])
    assert element_of(datatype).pieces == (Piece((6 + 2) * 64, 3 * 64, ((2, 6 * 64),)),)
    whole = MPI.DOUBLE.Create_subarray([4, 6, 8], [2, 6, 8], [1, 0, 0])
    found = packing((Block(16, 1, element_of(whole)),))
    assert found is not None and found.runs is not None and found.runs.tolist() == [16 + 6 * 64]
    part = MPI.DOUBLE.Create_subarray([4, 6, 8], [2, 6, 4], [1, 0, 2])
    assert element_of(part).pieces == (Piece(6 * 64 + 16, 32, ((12, 64),)),)
    for each in (datatype, whole, part):
        each.Free()


def test_handles_that_come_again() -> None:
    """What is known of a datatype goes with it."""
    for stride in range(2, 40):
        datatype = MPI.INT.Create_vector(3, 1, stride).Commit()
        assert element_of(datatype).pieces == (Piece(0, INT, ((3, INT * stride),)),)
        assert element_of(datatype) is element_of(datatype)
        datatype.Free()


def test_types_that_only_mpi_takes_apart(engine: str) -> None:
    """Distributed arrays, and those of too many pieces, are copied by messages of the MPI library."""
    cyclic, size = [MPI.DISTRIBUTE_CYCLIC] * 2, [7, 9]
    spread = MPI.INT.Create_darray(4, 1, size, cyclic, [MPI.DISTRIBUTE_DFLT_DARG] * 2, [2, 2])
    many = MPI.BYTE.Create_indexed_block(1, [3 * each for each in range(MOST_PIECES + 1)])
    for datatype in (spread.Commit(), many.Commit()):
        element = element_of(datatype)
        assert element.pieces is None and packing((Block(0, 1, element),)) is None
        _, high = bounds(datatype, 1)
        memory, packed = data(np.random.default_rng(1), high), np.zeros(datatype.Get_size(), np.uint8)
        expected, back = packed.copy(), np.zeros_like(memory)
        by_mpi(memory, 0, datatype, 1, expected, True)
        blocks = Block(0, 1, element), Block(0, 0, element)
        copying(Apart(MPI.Get_address(memory), high, blocks, [datatype] * 2), packed, outward=True)()
        np.testing.assert_array_equal(packed, expected)
        where = Apart(MPI.Get_address(back), high, blocks, [datatype] * 2)
        copying(where, packed, outward=False)()
        by_mpi(memory, 0, datatype, 1, packed, False)
        by_mpi(back, 0, datatype, 1, expected, True)
        np.testing.assert_array_equal(packed, expected)
        datatype.Free()
