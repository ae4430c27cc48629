"""Rule 1: messages match, and flags are raised."""

from __future__ import annotations

from collections.abc import Iterator

from hiercoll.schedule import MESSAGES, OUTGOING, Recv, Send, Wait, are_two_ends
from hiercoll.verify.numbered import Numbered
from hiercoll.verify.proof import Finding


def unmatched(given: Numbered) -> Iterator[Finding]:
    """Messages without another end, and waits for flags that nobody raises. Fills in ``send_of``."""
    sends: dict[tuple[int, int, int], int] = {}
    recvs: dict[tuple[int, int, int], int] = {}
    for gid, op in enumerate(given.ops):
        if isinstance(op, MESSAGES):
            rank, out = given.rank_of[gid], isinstance(op, OUTGOING)
            known, key = (sends, (rank, op.peer, op.tag)) if out else (recvs, (op.peer, rank, op.tag))
            if key in known:
                yield given.finding(
                    "unmatched",
                    gid,
                    f"{given.name(gid)} and {given.name(known[key])} have the same source, destination and tag "
                    f"{op.tag}: arrival order would decide which is which",
                    op.region if isinstance(op, (Send, Recv)) else None,
                )
            known[key] = gid
    for key in sends.keys() - recvs.keys():
        gid = sends[key]
        yield given.finding("unmatched", gid, f"rank {key[1]} never receives {given.name(gid)}")
    for key in recvs.keys() - sends.keys():
        gid = recvs[key]
        yield given.finding("unmatched", gid, f"rank {key[0]} never sends what {given.name(gid)} waits for")
    for key, recv in recvs.items():
        if key in sends:
            send, into = given.ops[sends[key]], given.ops[recv]
            if not are_two_ends(send, into):
                ends = f"{given.name(sends[key])} and {given.name(recv)} are not the two ends of one message"
                yield given.finding("unmatched", recv, ends)
            elif isinstance(send, Send) and isinstance(into, Recv):
                regions = (into.peer, send.region), (send.peer, into.region)
                if given.differ_in_size(*regions) or given.differ_in_width(*regions):
                    yield given.finding(
                        "unmatched",
                        recv,
                        f"{given.name(sends[key])} has {send.region}, its receive has {into.region}: the sizes differ",
                        into.region,
                    )
            given.send_of[recv] = sends[key]
    for gid, op in enumerate(given.ops):
        if isinstance(op, Wait):
            for peer in op.peers:
                if (peer, op.flag) not in given.signals:
                    yield given.finding("unmatched", gid, f"rank {peer} never raises flag {op.flag}: waits for ever")
