"""Operations in words, for findings and `hiercoll show`."""

from __future__ import annotations

from hiercoll.schedule import (
    AcceptOffer,
    AwaitNotice,
    Copy,
    Get,
    Join,
    Notify,
    Offer,
    Op,
    Recv,
    Reduce,
    Send,
    Signal,
    Wait,
)


def describe(op: Op) -> str:
    """An operation in words."""
    match op:
        case Send():
            return f"send {op.region} to rank {op.peer} (tag {op.tag})"
        case Recv():
            return f"receive {op.region} from rank {op.peer} (tag {op.tag})"
        case Offer():
            return f"offer {op.buffer} to rank {op.peer} (tag {op.tag})"
        case AcceptOffer():
            return f"accept the offer of {op.buffer} from rank {op.peer} (tag {op.tag})"
        case Notify():
            return f"notify rank {op.peer} (tag {op.tag})"
        case AwaitNotice():
            return f"await the notice from rank {op.peer} (tag {op.tag})"
        case Copy():
            return f"copy {op.source} to {op.target}"
        case Get():
            return f"get {op.source} of rank {op.peer} into {op.target} (tag {op.tag})"
        case Reduce():
            return f"reduce {op.left} (+) {op.right} to {op.target}"
        case Signal():
            return f"raise flag {op.flag}"
        case Wait():
            return f"wait for flag {op.flag} of ranks {', '.join(map(str, op.peers))}" + (
                " (start before)" if op.previous else ""
            )
        case Join():
            return f"complete {', '.join(map(str, op.deps))}" if op.deps else "end of a round"
