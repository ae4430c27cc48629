"""Rule 2: no deadlock without buffering. Also finds the order in which to replay."""

from __future__ import annotations

from collections.abc import Iterator

from hiercoll.schedule import Join, Wait
from hiercoll.verify.numbered import Numbered
from hiercoll.verify.proof import Finding


def deadlocks(given: Numbered) -> Iterator[Finding]:
    """A chain of operations that wait for each other, if there is one. Fills in ``order``."""
    transfer = {send: recv for recv, send in given.send_of.items()}  # a message is one event, its receive
    waiting = [0] * len(given.ops)
    dependents: list[list[int]] = [[] for _ in given.ops]
    for gid, op in enumerate(given.ops):
        event = transfer.get(gid, gid)
        base = given.base[given.rank_of[gid]]
        waiting[event] += len(op.deps)
        for dep in op.deps:
            dependents[transfer.get(base + dep, base + dep)].append(event)
        if isinstance(op, Wait) and not op.previous:
            waiting[event] += len(op.peers)
            for peer in op.peers:
                dependents[given.signals[peer, op.flag]].append(event)
    ready = [gid for gid in range(len(given.ops)) if not waiting[gid] and gid not in transfer]
    for gid in ready:  # grows while it is walked through
        for event in dependents[gid]:
            waiting[event] -= 1
            if not waiting[event]:
                ready.append(event)
    given.order = ready
    if len(ready) + len(transfer) < len(given.ops):
        yield _cycle(given, {gid for gid in range(len(given.ops)) if waiting[gid]}, transfer)


def _cycle(given: Numbered, stuck: set[int], transfer: dict[int, int]) -> Finding:
    """A chain of operations that wait for each other."""
    blocked_by: dict[int, int] = {}
    for gid, op in enumerate(given.ops):
        event, base = transfer.get(gid, gid), given.base[given.rank_of[gid]]
        needs = [base + dep for dep in op.deps]
        if isinstance(op, Wait) and not op.previous:
            needs += [given.signals[peer, op.flag] for peer in op.peers]
        for need in needs:
            if event in stuck and transfer.get(need, need) in stuck:
                blocked_by[event] = transfer.get(need, need)
    seen: dict[int, None] = {}
    gid = min(stuck)
    while gid not in seen:
        seen[gid] = None
        gid = blocked_by[gid]
    chain = list(seen)
    chain = chain[chain.index(gid) :]
    text = ", which waits for ".join(given.name(g) for g in [*chain[:6], gid] if not isinstance(given.ops[g], Join))
    return given.finding("deadlock", gid, f"without buffering nobody can go on: {text}")
