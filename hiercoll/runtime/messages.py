"""Pieces of buffers as messages: counts, and datatypes where the pieces lie apart or are larger than MPI counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from mpi4py import MPI

INT_MAX = 2**31 - 1
Datatypes: TypeAlias = "dict[object, MPI.Datatype]"
Runs: TypeAlias = "Sequence[tuple[int, int]]"  # offset and length, in bytes


def typed(runs: Runs, cache: Datatypes) -> tuple[int, int, MPI.Datatype]:
    """Pieces of a buffer as MPI is told of them: where they begin, a count, and a datatype, which is BYTE or lies in
    the cache from then on."""
    if len(runs) == 1 and runs[0][1] <= INT_MAX:
        return *runs[0], MPI.BYTE
    start = min(offset for offset, _ in runs)
    key = tuple((offset - start, length) for offset, length in runs)
    if key not in cache:
        cache[key] = _datatype(key).Commit()
    return start, 1, cache[key]


def message(address: int, runs: Runs, cache: Datatypes) -> list[Any]:
    """Pieces of a buffer as an mpi4py message; given by address, so that no array is kept alive."""
    start, count, datatype = typed(runs, cache)
    span = max(offset + length for offset, length in runs) - start
    return [MPI.buffer.fromaddress(address + start, span), count, datatype]


def _datatype(runs: tuple[tuple[int, int], ...]) -> MPI.Datatype:
    """An uncommitted datatype of the given (offset, length) pieces, of any size."""
    lengths = [length for _, length in runs]
    offsets = [offset for offset, _ in runs]
    steps = {b - a for a, b in pairwise(offsets)}
    if max(lengths) > INT_MAX:  # MPI counts are ints: a piece in units of 1 MiB, and the rest
        unit = MPI.BYTE.Create_contiguous(1 << 20)
        pieces = [(unit, offset, length >> 20) for offset, length in runs]
        pieces += [(MPI.BYTE, offset + (length >> 20 << 20), length & (1 << 20) - 1) for offset, length in runs]
        datatype = MPI.Datatype.Create_struct([p[2] for p in pieces], [p[1] for p in pieces], [p[0] for p in pieces])
        unit.Free()
        return datatype
    if len(set(lengths)) == 1 and len(steps) == 1 and offsets[0] == 0 < max(offsets):
        return MPI.BYTE.Create_hvector(len(runs), lengths[0], steps.pop())
    return MPI.BYTE.Create_hindexed(lengths, offsets)


def native_message(address: int, block: int, blocks: int) -> tuple[list[Any], MPI.Datatype | None]:
    """A buffer of equal blocks for the MPI library's collectives, and a datatype to free with it."""
    buffer = MPI.buffer.fromaddress(address, block * blocks)
    if block <= INT_MAX:
        return [buffer, block, MPI.BYTE], None
    datatype = _datatype(((0, block),)).Commit()
    return [buffer, 1, datatype], datatype
