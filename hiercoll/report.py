"""What a program's collectives did, call site by call site."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

from hiercoll.bench import provenance
from hiercoll.communicator import State
from hiercoll.dropin import Collectives
from hiercoll.lifetime import get_state, get_topology
from hiercoll.messages import block_message, vector_message
from hiercoll.requests import Driven
from hiercoll.tables import NATIVE

BLOCKING = {"Alltoall": "alltoall", "Alltoallv": "alltoallv", "Allgather": "allgather", "Allgatherv": "allgatherv"}
RETURNING = {
    **{f"I{collective}": f"i{collective}" for collective in BLOCKING.values()},
    **{f"{name}_init": f"{collective}_init" for name, collective in BLOCKING.items()},
}
Key: TypeAlias = "tuple[str, str]"  # call site, collective


@dataclass
class Site:
    """The calls of one collective at one place of the program, on one rank; times in seconds."""

    calls: int = 0
    bytes: int = 0  # received
    least: int = sys.maxsize
    most: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # for ranks that came later, if that was measured
    native: float = 0.0  # what the MPI library's own would have taken, by the table
    compared: float = 0.0  # seconds of those calls of which the table knows that
    estimated: int = 0  # their number
    ran: Counter[str] = field(default_factory=Counter)


class Recorder:
    """Watches the drop-in collectives of this process."""

    def __init__(self, *, sync: bool, trace: bool) -> None:
        self.sync, self.trace = sync, trace
        self.sites: dict[Key, Site] = {}
        self.events: list[tuple[str, float, float, int, str]] = []  # name, begin, seconds, bytes, what ran
        self._origin = perf_counter()

    def install(self) -> None:
        """Watch from now on."""
        for name, collective in BLOCKING.items():
            setattr(Collectives, name, self._watched(collective, getattr(Collectives, name)))
        for name, collective in RETURNING.items():
            setattr(Collectives, name, self._noted(collective, getattr(Collectives, name)))

    def _site(self, collective: str) -> Site:
        """Of the program's call of a method that is watched."""
        caller = sys._getframe(2)
        return self.sites.setdefault((f"{caller.f_code.co_filename}:{caller.f_lineno}", collective), Site())

    def _noted(self, collective: str, method: Callable[..., MPI.Request]) -> Callable[..., MPI.Request]:
        """A method that returns a request: its own time is all that is known of it."""

        @wraps(method)
        def call(comm: Any, sendbuf: Any, recvbuf: Any, *args: Any, **options: Any) -> MPI.Request:
            site, begin = self._site(collective), perf_counter()
            request = method(comm, sendbuf, recvbuf, *args, **options)
            seconds = perf_counter() - begin
            ran = request.stand_in.name.partition(" ")[2] if isinstance(request, Driven) else NATIVE
            self._add(site, collective, _received(collective, recvbuf, comm.size), begin, seconds, ran)
            return request

        return call

    def _add(self, site: Site, collective: str, nbytes: int, begin: float, seconds: float, ran: str) -> None:
        site.calls, site.bytes, site.seconds = site.calls + 1, site.bytes + nbytes, site.seconds + seconds
        site.least, site.most = min(site.least, nbytes), max(site.most, nbytes)
        site.ran[ran] += 1
        if self.trace:
            self.events.append((collective, begin - self._origin, seconds, nbytes, ran))

    def _watched(self, collective: str, method: Callable[..., None]) -> Callable[..., None]:
        """A method that returns when the call is complete."""

        @wraps(method)
        def call(comm: Any, sendbuf: Any, recvbuf: Any) -> None:
            site = self._site(collective)
            state = get_state(comm)
            begin = perf_counter()
            if self.sync:
                state.comm.Barrier()
                now = perf_counter()
                site.waited += now - begin
                begin = now
            state.last = ""
            method(comm, sendbuf, recvbuf)
            seconds = perf_counter() - begin
            ran = state.last.partition(" ")[2] or NATIVE
            nbytes = _received(collective, recvbuf, state.size)
            self._add(site, collective, nbytes, begin, seconds, ran)
            native = native_seconds(state, collective, nbytes // state.size)
            if native is not None:
                site.native, site.compared = site.native + native, site.compared + seconds
                site.estimated += 1

        return call

    def gather(self, comm: MPI.Intracomm) -> list[dict[str, Any]] | None:
        """On rank 0 a record for each site, those that took longest first. Collective."""
        everyone = comm.gather(self.sites)
        if everyone is None:
            return None
        records = []
        for key in dict.fromkeys(key for sites in everyone for key in sites):
            own = [sites[key] for sites in everyone if key in sites]
            ran: Counter[str] = sum((site.ran for site in own), Counter())
            times = {
                name: {"most": max(values), "median": float(np.median(values)), "least": min(values)}
                for name in ("seconds", "waited", "native", "compared")
                for values in [[getattr(site, name) for site in own]]
            }
            records.append(
                {
                    "site": key[0],
                    "collective": key[1],
                    "ranks": len(own),
                    "calls": max(site.calls for site in own),
                    "bytes": sum(site.bytes for site in own),
                    "bytes_per_call": [min(site.least for site in own), max(site.most for site in own)],
                    "estimated_calls": max(site.estimated for site in own),
                    "ran": dict(ran.most_common()),
                    **times,
                }
            )
        return sorted(records, key=lambda record: -record["seconds"]["most"])

    def finish(self, comm: MPI.Intracomm, report: Path | None, trace: Path | None) -> None:
        """Print and write what was seen, on rank 0. Collective."""
        about = provenance(comm, get_topology(comm))
        records, events = self.gather(comm), comm.gather(self.events) if trace else None
        if records is None:
            return
        if report is not None:
            report.write_text(
                json.dumps({"about": about, "synchronised": self.sync, "sites": records}, indent=1) + "\n"
            )
            _print(records, self.sync, report)
        if trace is not None and events is not None:
            trace.write_text(json.dumps({"traceEvents": _events(events)}) + "\n")


def native_seconds(state: State, collective: str, block: int) -> float | None:
    """Seconds of native's single call by a table for this very layout; None outside of what was measured there,
    as blocks of uneven sizes are, of which a table knows one distribution."""
    if collective not in ("alltoall", "allgather"):
        return None
    entry = state.choices.table.find(collective, state.library, "host", state.topology)
    return entry.native_seconds(block) if entry is not None and entry.is_for(state.topology) else None


def _received(collective: str, recvbuf: Any, size: int) -> int:
    """Bytes that a call receives."""
    if "alltoallv" in collective or "allgatherv" in collective:
        message = vector_message(recvbuf, size, readonly=False)
        return int(np.sum(message.counts)) * message.element.size
    message = block_message(recvbuf, size, readonly=False)
    return int(message.counts) * message.element.size * size


def _events(everyone: list[list[tuple[str, float, float, int, str]]]) -> list[dict[str, Any]]:
    """In the Trace Event Format, in microseconds; a row for each rank."""
    return [
        {
            "name": name, "ph": "X", "pid": 0, "tid": rank, "ts": begin * 1e6, "dur": seconds * 1e6,
            "args": {"bytes": nbytes, "algorithm": ran},
        }
        for rank, events in enumerate(everyone)
        for name, begin, seconds, nbytes, ran in events
    ]  # fmt: skip


def _print(records: list[dict[str, Any]], sync: bool, file: Path) -> None:
    table = Table(title="hiercoll: collectives by call site (times: the slowest rank)", box=None)
    for name in ("where", "collective"):
        table.add_column(name)
    times = ("seconds", *(["waited"] if sync else []), "of calls compared", "native's, by the table")
    for name in ("calls", "bytes per call", *times):
        table.add_column(name, justify="right")
    table.add_column("ran")
    for record in records:
        least, most = record["bytes_per_call"]
        compared = [
            f"{record[name]['most']:.3g}" if record["estimated_calls"] else "" for name in ("compared", "native")
        ]
        table.add_row(
            "/".join(record["site"].split("/")[-2:]),
            record["collective"],
            str(record["calls"]),
            str(most) if least == most else f"{least}-{most}",
            f"{record['seconds']['most']:.3g}",
            *([f"{record['waited']['most']:.3g}"] if sync else []),
            *compared,
            ", ".join(record["ran"]),
        )
    console = Console(stderr=True, width=160)
    console.print(table)
    console.print(f"written to {file}", highlight=False)
