"""What the flight records of all ranks show together: who is silent, who is in another call, who is behind."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hiercoll.errors import DiagnosisError
from hiercoll.runtime.watch import UNKNOWN, ranks_in_words


def diagnose(folder: Path) -> list[str]:
    """What the records in a folder tell, line by line. Raises DiagnosisError."""
    records: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for file in sorted(folder.glob("hiercoll-*.json")):
        try:
            about = json.loads(file.read_text())
            records[about["communicator"]][about["rank"]] = about
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DiagnosisError(f"{file}: not a flight record of hiercoll ({error})") from None
    if not records:
        raise DiagnosisError(f"{folder}: no flight records (hiercoll-*.json)")
    return [line for ranks in records.values() for line in _one_communicator(ranks)]


def _one_communicator(ranks: dict[int, dict[str, Any]]) -> list[str]:
    some = next(iter(ranks.values()))
    size = len(some["world"])
    lines = [f"communicator of {size} ranks, {len(ranks)} of which have reported:"]
    calls: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, about in sorted(ranks.items()):
        calls[about["number"], about["call"]].append(rank)
        waits = ", ".join(f"{each['verb']} rank {each['peer']}" for each in about["pending"][:3]) or "the MPI library"
        step = f" step {about['pending'][0]['step']}" if about["pending"] else ""
        lines.append(
            f"  rank {rank} ({_who(about, rank)}, host {about['host']}): in #{about['number']} {about['call']}{step},"
            f" waits for {waits}, for {about['waited']:.1f} s"
        )
    silent = [rank for rank in range(size) if rank not in ranks]
    for rank in silent:
        waiting = [other for other, about in sorted(ranks.items()) if any(p["peer"] == rank for p in about["pending"])]
        told = f"; waited for by {ranks_in_words(waiting)}" if waiting else ""
        lines.append(f"  rank {rank} ({_who(some, rank)}): SILENT: dead, stopped, or not in a call of hiercoll{told}")
    if len(calls) > 1:
        usual = max(calls, key=lambda call: len(calls[call]))
        for (number, name), members in sorted(calls.items()):
            if (number, name) != usual:
                kind = "BEHIND" if number < usual[0] else "AHEAD" if number > usual[0] else "IN ANOTHER CALL"
                lines.append(
                    f"  {ranks_in_words(members)}: {kind}: #{number} {name}, where others are in #{usual[0]} {usual[1]}"
                )
    if not silent and len(calls) == 1:
        lines.append(
            "  all ranks are in the same call: messages of it are lost, or sizes differ (see HIERCOLL_CHECK=1)"
        )
    return lines


def _who(about: dict[str, Any], rank: int) -> str:
    node = about["node_of"][rank]
    return f"world rank {about['world'][rank]}" + ("" if node == UNKNOWN else f", node {node}")
