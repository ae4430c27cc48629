"""What reductions are made of: partial results, and the steps in which ranks exchange and combine them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from hiercoll.collectives import fixed_tree
from hiercoll.schedule import SEND, Buffer, Builder, Region

END = object()


class Part(NamedTuple):
    """A partial result: where it is, and the operations after which it is there."""

    region: Region
    after: list[int]


class Line(NamedTuple):
    """Ranks that reduce together, in their order: as many of them as a power of two take part in the steps, of which
    ``place`` is this one's number; the second rank of each of the first ``pairs`` gives its part to the one before it,
    and gets the result from there."""

    ranks: Sequence[int]
    pairs: int
    place: int

    @classmethod
    def of(cls, ranks: Sequence[int], rank: int) -> Line:
        pairs = len(ranks) - (1 << len(ranks).bit_length() - 1)
        at = ranks.index(rank)
        return cls(ranks, pairs, at // 2 if at < 2 * pairs else at - pairs)

    @property
    def width(self) -> int:
        """How many take part in the steps: a power of two."""
        return len(self.ranks) - self.pairs

    def rank(self, place: int) -> int:
        """The rank of that number."""
        return self.ranks[2 * place if place < self.pairs else place + self.pairs]

    @property
    def partner(self) -> int | None:
        """The other one of a rank's pair, if it is in one."""
        if self.place >= self.pairs:
            return None
        return self.ranks[2 * self.place + 1]

    def distances(self) -> list[int]:
        """Of the places that exchange in each step, the nearest first."""
        return [1 << step for step in range(self.width.bit_length() - 1)]


# What takes several steps is a generator: it yields where it has begun messages that it waits for next, so that other
# segments can begin theirs.
Made = TypeVar("Made")
Course: TypeAlias = "Generator[None, None, Made]"


def at_once(course: Course[Made]) -> Made:
    """All steps, one after the other; what they come to."""
    while True:
        try:
            next(course)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def idle(steps: int) -> Course[None]:
    """Ranks that have nothing to do keep step: else segments of one would wait for other ones of the next."""
    for _ in range(steps):
        yield


def in_turns(b: Builder, course: Callable[[int], Course[object]]) -> None:
    """The steps of each segment, those of all segments in turns."""
    left = {number: course(number) for number in range(b.segments)}
    while left:
        for number in list(left):
            with b.segment(number):
                if next(left[number], END) is END:
                    del left[number]


def combined(b: Builder, own: Part, other: Region, came: list[int], target: Region, is_first: bool) -> Part:
    """``own`` and what has come, of lower ranks if it ``is_first``, as a new partial result."""
    left, right = (other, own.region) if is_first else (own.region, other)
    return Part(target, [b.reduce(left, right, target, after=[*own.after, *came])])


def folded(b: Builder, line: Line, own: Part, target: Region, spare: Region, tag: int) -> Course[tuple[bool, Part]]:
    """Whether this rank takes part in the steps, and what it begins with, or has given to its partner."""
    partner = line.partner
    if partner is None:
        yield from idle(line.pairs > 0)
        return True, own
    if partner == b.rank:
        part = Part(own.region, [b.send(line.rank(line.place), own.region, tag=tag, after=own.after)])
        yield
        return False, part
    came = [b.recv(partner, spare, tag=tag, after=own.after)]
    yield
    return True, combined(b, own, spare, came, target, is_first=False)


def _unfolded(b: Builder, line: Line, takes_part: bool, part: Part, target: Region, tag: int) -> Part:
    """The result, which partners get from those that took part."""
    if not takes_part:
        return Part(target, [b.recv(line.rank(line.place), target, tag=tag, after=part.after, partial=False)])
    if line.partner is not None:
        b.send(line.partner, target, tag=tag, after=part.after, partial=False)
    return part


def doubling(b: Builder, line: Line, own: Part, target: Region, spare: Buffer, tag: int) -> Course[Part]:
    """Whole partial results are exchanged, again and again; what comes lies in ``spare``."""
    into = spare[range(len(target.blocks))].of(target.blocks)
    takes_part, part = yield from folded(b, line, own, target, into, tag)
    yield from idle(0 if takes_part else len(line.distances()))
    for step, distance in enumerate(line.distances() if takes_part else [], tag + 1):
        peer = line.rank(line.place ^ distance)
        came = [b.recv(peer, into, tag=step, after=part.after), b.send(peer, part.region, tag=step, after=part.after)]
        yield
        part = combined(b, part, into, came, target, is_first=bool(line.place & distance))
    return _unfolded(b, line, takes_part, part, target, tag)


class Exchange(NamedTuple):
    """Of halves with a peer, in a step of so much: the blocks that this rank keeps, and those that the peer does."""

    peer: int
    distance: int
    kept: range
    given: range


def at(buffer: Buffer, blocks: range) -> Region:
    """Those blocks of the vector in the program's buffer, or in hiercoll's own."""
    return buffer[blocks] if buffer.name in ("send", "recv") else buffer[blocks].of(blocks)


def halved(
    b: Builder, line: Line, own: Part, target: Buffer, whole: range, spare: Buffer, tag: int
) -> Course[tuple[list[int], list[Exchange]]]:
    """Halves of partial results are exchanged, the nearest ranks first, until a rank has one block of the result.
    Blocks of ``whole`` are as many as ranks take part. Returns after what it is there, and the exchanges."""
    buffer = SEND if own.region.buffer == "send" else target
    part, after, steps = whole, own.after, list[Exchange]()
    for step, distance in enumerate(line.distances(), tag + 1):
        peer, half = line.rank(line.place ^ distance), len(part) // 2
        is_upper = bool(line.place & distance)
        kept, given = (part[half:], part[:half]) if is_upper else (part[:half], part[half:])
        into = spare[range(half)].of(kept)
        came = [b.recv(peer, into, tag=step, after=after), b.send(peer, at(buffer, given), tag=step, after=after)]
        yield
        after = combined(b, Part(at(buffer, kept), after), into, came, at(target, kept), is_upper).after
        steps.append(Exchange(peer, distance, kept, given))
        part, buffer = kept, target
    return after, steps


def halving(b: Builder, line: Line, own: Part, target: Buffer, whole: range, spare: Buffer, tag: int) -> Course[Part]:
    """`halved`, and then what is complete is exchanged, the other way."""
    takes_part, begun = yield from folded(b, line, own, target[whole], spare[range(len(whole))].of(whole), tag)
    if not takes_part:
        yield from idle(2 * len(line.distances()))
        return _unfolded(b, line, False, begun, target[whole], tag)
    after, steps = yield from halved(b, line, begun, target, whole, spare, tag)
    for number, (peer, _, kept, given) in enumerate(reversed(steps), tag + len(steps) + 1):
        came = [b.recv(peer, target[given], tag=number, after=after, partial=False)]
        after = [*came, b.send(peer, target[kept], tag=number, after=after, partial=False)]
        yield
    return _unfolded(b, line, True, Part(target[whole], after), target[whole], tag)


def around(
    b: Builder, ranks: Sequence[int], own: Part, target: Buffer, whole: range, spare: Buffer, tag: int,
    partial: bool = True,
) -> Course[Part]:  # fmt: skip
    """Sums go around a ring, and then around once more; as many blocks as ranks, times a number. Not ``partial``: all
    begin with what they contribute, not with sums."""
    p, me, each = len(ranks), ranks.index(b.rank), len(whole) // len(ranks)
    before, behind = ranks[me - 1], ranks[(me + 1) % p]
    source = SEND if own.region.buffer == "send" else target

    def share(number: int) -> range:
        return whole[number % p * each : (number % p + 1) * each]

    after = own.after
    for step in range(p - 1):
        out, into = share(me - step), share(me - step - 1)
        sums, is_partial = spare[range(each)].of(into), partial or step > 0
        came = [
            b.recv(before, sums, tag=tag + step, after=after, partial=is_partial),
            b.send(behind, (target if step else source)[out], tag=tag + step, after=after, partial=is_partial),
        ]
        yield
        after = [b.reduce(sums, source[into], target[into], after=came)]
    for step in range(p - 1):
        out, into = share(me + 1 - step), share(me - step)
        after = [
            b.recv(before, target[into], tag=tag + p + step, after=after, partial=False),
            b.send(behind, target[out], tag=tag + p + step, after=after, partial=False),
        ]
        yield
    return Part(target[whole], after)


def all_to_all(
    b: Builder, ranks: Sequence[int], own: Part, target: Buffer, whole: range, spare: Buffer, tag: int,
    partial: bool = True,
) -> Course[Part]:  # fmt: skip
    """Every rank gets its block of all others, combines them by the fixed tree, and sends the result to all. Not
    ``partial``: all begin with what they contribute, not with sums."""
    p, me = len(ranks), ranks.index(b.rank)
    source = SEND if own.region.buffer == "send" else target
    others = [(me + step) % p for step in range(1, p)]
    parts = {me: Part(source[whole[me]], own.after)}
    for slot, other in enumerate(others):
        into = spare[slot].of(whole[me])
        parts[other] = Part(into, [b.recv(ranks[other], into, tag=tag, partial=partial)])
    sent = {
        other: b.send(ranks[other], source[whole[other]], tag=tag, after=own.after, partial=partial) for other in others
    }
    yield
    result = over_tree(b, [parts[each] for each in range(p)], target[whole[me]])
    after = list(result.after)
    for other in others:
        after.append(b.send(ranks[other], target[whole[me]], tag=tag + 1, after=result.after, partial=False))
        after.append(b.recv(ranks[other], target[whole[other]], tag=tag + 1, after=[sent[other]], partial=False))
    yield
    return Part(target[whole], after)


def over_tree(b: Builder, parts: Sequence[Part], target: Region, before: Sequence[int] = ()) -> Part:
    """The fixed tree over several parts, at least two; what is in send stays as it is, and the target until all of
    ``before`` are complete."""
    left = len(parts) - 1

    def combine(one: Part, other: Part) -> Part:
        nonlocal left
        left -= 1
        mine = one if other.region.buffer == "send" else other
        into = mine.region if left else target
        after = [*one.after, *other.after, *([] if left else before)]
        return Part(into, [b.reduce(one.region, other.region, into, after=after)])

    return fixed_tree(parts, combine)


def to_one(b: Builder, line: Line, own: Part, end: int, target: Region, spare: Region, tag: int) -> Course[Part]:
    """Along a binomial tree to the first rank, and from there to ``end``, where the result comes to lie in ``target``;
    what others have of it, too. Operands are in the order of ranks, so that the tree cannot begin at another rank."""
    takes_part, part = yield from folded(b, line, own, target, spare, tag)
    distances = line.distances()
    for step, distance in enumerate(distances, 1):
        if takes_part and not line.place % (2 * distance):
            came = [b.recv(line.rank(line.place + distance), spare, tag=tag + step, after=part.after)]
            yield
            part = combined(b, part, spare, came, target, is_first=False)
            continue
        if takes_part and not line.place % distance:
            up = b.send(line.rank(line.place - distance), part.region, tag=tag + step, after=part.after)
            part = Part(part.region, [up])
        yield
    first, last = line.rank(0), tag + len(distances) + 1
    if b.rank == first != end:
        b.send(end, part.region, tag=last, after=part.after, partial=False)
    elif b.rank == end != first:
        part = Part(target, [b.recv(first, target, tag=last, after=part.after, partial=False)])
    return part


def halved_to_one(
    b: Builder, line: Line, own: Part, end: int, target: Buffer, whole: range, spare: Buffer, tag: int
) -> Course[Part]:
    """`halved`, and then a gather of the parts to ``end``, where the result comes to lie in ``target``. Blocks of
    ``whole`` are as many as ranks take part."""
    if len(line.ranks) == 1:
        return own
    goal, distances = Line.of(line.ranks, end), line.distances()
    first, last = line.rank(goal.place), tag + 2 * len(distances) + 1
    takes_part, part = yield from folded(b, line, own, at(target, whole), spare[range(len(whole))].of(whole), tag)
    if not takes_part:
        yield from idle(2 * len(distances))
        if b.rank == end:
            came = [b.recv(first, at(target, whole), tag=last, after=part.after, partial=False)]
            part = Part(at(target, whole), came)
        return part
    after, steps = yield from halved(b, line, part, target, whole, spare, tag)
    is_on = True
    for number, (peer, distance, kept, given) in enumerate(reversed(steps), tag + len(steps) + 1):
        if is_on and line.place & distance != goal.place & distance:
            is_on = False
            b.send(peer, at(target, kept), tag=number, after=after, partial=False)
        elif is_on:
            after = [*after, b.recv(peer, at(target, given), tag=number, after=after, partial=False)]
        yield
    if b.rank == first != end:
        b.send(end, at(target, whole), tag=last, after=after, partial=False)
    return Part(at(target, whole), after)
