"""Random derived datatypes of so many ints, whose bytes do not overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

Random = np.random.Generator
INT = MPI.INT.Get_size()


def random_type(random: Random, items: int, depth: int = 0) -> MPI.Datatype:
    """A datatype of ``items`` ints, committed."""
    if not items or depth == 3:
        return MPI.INT.Create_contiguous(items).Commit()
    makers: list[Callable[[Random, int, int], MPI.Datatype]] = [
        _contiguous, _vector, _hvector, _indexed, _blocks, _struct, _subarray
    ]  # fmt: skip
    made = makers[random.integers(len(makers))](random, items, depth)
    if random.random() < 0.2:
        made, before = made.Dup(), made
        before.Free()
    return _tidy(random, made)


def _tidy(random: Random, datatype: MPI.Datatype) -> MPI.Datatype:
    """With an extent that elements one after the other need, at least, and any lower bound."""
    lower, extent = datatype.Get_true_extent()
    resized = datatype.Create_resized(lower + int(random.integers(-12, 13)), extent + INT * int(random.integers(3)))
    datatype.Free()
    return resized.Commit()


def _inner(random: Random, items: int, depth: int) -> tuple[MPI.Datatype, int, int]:
    """A datatype, its extent, and how many of it have so many ints."""
    count = int(random.choice([each for each in range(1, items + 1) if items % each == 0]))
    made = random_type(random, items // count, depth + 1)
    return made, made.Get_extent()[1], count


def _contiguous(random: Random, items: int, depth: int) -> MPI.Datatype:
    inner, _, count = _inner(random, items, depth)
    return _freeing(inner, inner.Create_contiguous(count))


def _split(random: Random, count: int, factors: int) -> list[int]:
    """Factors of a number."""
    found = []
    for _ in range(factors - 1):
        found.append(int(random.choice([each for each in range(1, count + 1) if count % each == 0])))
        count //= found[-1]
    return [*found, count]


def _sign(random: Random) -> int:
    return int(random.choice([-1, 1]))


def _vector(random: Random, items: int, depth: int) -> MPI.Datatype:
    inner, _, number = _inner(random, items, depth)
    count, length = _split(random, number, 2)
    stride = _sign(random) * (length + int(random.integers(3)))
    return _freeing(inner, inner.Create_vector(count, length, stride))


def _hvector(random: Random, items: int, depth: int) -> MPI.Datatype:
    inner, extent, number = _inner(random, items, depth)
    count, length = _split(random, number, 2)
    stride = _sign(random) * (length * extent + int(random.integers(9)))
    return _freeing(inner, inner.Create_hvector(count, length, stride))


def _places(random: Random, lengths: list[int]) -> list[int]:
    """Where blocks of such lengths begin, in any order, apart from each other."""
    places, at = [0] * len(lengths), int(random.integers(-3, 4))
    for each in random.permutation(len(lengths)):
        places[each] = at
        at += lengths[each] + int(random.integers(3))
    return places


def _indexed(random: Random, items: int, depth: int) -> MPI.Datatype:
    inner, extent, number = _inner(random, items, depth)
    lengths = [int(each) for each in np.bincount(random.integers(4, size=number), minlength=4)]  # some may be 0
    if random.random() < 0.5:
        return _freeing(inner, inner.Create_indexed(lengths, _places(random, lengths)))
    places = _places(random, [each * extent for each in lengths])
    return _freeing(inner, inner.Create_hindexed(lengths, places))


def _blocks(random: Random, items: int, depth: int) -> MPI.Datatype:
    inner, extent, number = _inner(random, items, depth)
    count, length = _split(random, number, 2)
    if random.random() < 0.5:
        return _freeing(inner, inner.Create_indexed_block(length, _places(random, [length] * count)))
    return _freeing(inner, inner.Create_hindexed_block(length, _places(random, [length * extent] * count)))


def _struct(random: Random, items: int, depth: int) -> MPI.Datatype:
    first = int(random.integers(items + 1))
    inner = [_inner(random, each, depth) for each in (first, items - first) if each]
    lengths = [count for _, _, count in inner]
    # From the first byte of each one on.
    places = _places(random, [count * extent for _, extent, count in inner])
    lowest = [each.Get_true_extent()[0] for each, _, _ in inner]
    places = [place - low for place, low in zip(places, lowest, strict=True)]
    made = MPI.Datatype.Create_struct(lengths, places, [each for each, _, _ in inner])
    for each, _, _ in inner:
        each.Free()
    return made


def _subarray(random: Random, items: int, depth: int) -> MPI.Datatype:
    inner, _, number = _inner(random, items, depth)
    parts = _split(random, number, int(random.integers(1, 4)))
    starts = [int(random.integers(3)) for _ in parts]
    sizes = [part + start + int(random.integers(3)) for part, start in zip(parts, starts, strict=True)]
    order = MPI.ORDER_C if random.random() < 0.5 else MPI.ORDER_FORTRAN
    return _freeing(inner, inner.Create_subarray(sizes, parts, starts, order))


def _freeing(inner: MPI.Datatype, made: MPI.Datatype) -> MPI.Datatype:
    inner.Free()
    return made


def bounds(datatype: MPI.Datatype, count: int) -> tuple[int, int]:
    """The first byte of so many elements, and the one behind the last."""
    if not count or not datatype.Get_size():
        return 0, 0
    (lower, length), extent = datatype.Get_true_extent(), datatype.Get_extent()[1]
    reach = (count - 1) * extent
    return lower + min(reach, 0), lower + length + max(reach, 0)


def place(random: Random, ends: list[tuple[int, int]]) -> tuple[list[int], int]:
    """Displacements at which regions with such bounds lie apart in a buffer, and its bytes."""
    displs, at = [0] * len(ends), 0
    for each in random.permutation(len(ends)):
        low, high = ends[each]
        displs[each] = at - low
        at += high - low + int(random.integers(9))
    return displs, at + 1


def data(random: Random, nbytes: int) -> Any:
    """Bytes of which no two neighbours are alike by chance."""
    return random.integers(0, 256, nbytes, np.uint8)


def overlapping_type(random: Random, items: int) -> MPI.Datatype:
    """A datatype of ``items`` ints of which several may have bytes in common, committed."""
    if not items:
        return random_type(random, 0)
    inner, extent, number = _inner(random, items, 1)
    places = random.integers(0, number * extent, number).tolist()
    return _tidy(random, _freeing(inner, inner.Create_hindexed_block(1, places)))
