"""What a program's collectives did, call site by call site."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

from hiercoll.calls.dropin import call_name, ignore, observe
from hiercoll.collectives import Collective, Contract
from hiercoll.runtime.lifetime import get_session, get_topology
from hiercoll.runtime.request import Mode
from hiercoll.runtime.session import Session
from hiercoll.runtime.specifications import block_message, vector_message
from hiercoll.tables import NATIVE
from hiercoll.tools.bench import provenance

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


@dataclass(frozen=True)
class Call:
    """A call that was watched, by ``collective`` in a form of its own ("alltoall_init"); times in seconds."""

    collective: str
    site: str
    nbytes: int  # received
    begin: float
    seconds: float
    ran: str
    waited: float = 0.0
    native: float | None = None


class Recorder:
    """Watches the drop-in collectives of this process, beside others like it: each counts every call once."""

    def __init__(self, *, sync: bool, trace: bool) -> None:
        self.sync, self.trace = sync, trace
        self.sites: dict[Key, Site] = {}
        self.events: list[tuple[str, float, float, int, str]] = []  # name, begin, seconds, bytes, what ran
        self._origin = perf_counter()

    def install(self) -> None:
        """Watch from now on."""
        observe(self)

    def remove(self) -> None:
        """Watch no longer."""
        ignore(self)

    def begin(self, comm: Any, collective: Collective, mode: Mode, buffers: tuple[Any, ...]) -> object:
        """See `dropin.Observer`."""
        site, begin, waited, native = _caller(), perf_counter(), 0.0, None
        nbytes = received(collective, comm.size, comm.rank, buffers)
        if mode is Mode.BLOCKING:
            session = get_session(comm)
            native = native_seconds(session, collective, nbytes)
            begin = perf_counter()
            if self.sync:
                session.comm.Barrier()
                waited = perf_counter() - begin
                begin += waited
        return Call(call_name(collective, mode), site, nbytes, begin, 0.0, NATIVE, waited, native)

    def end(self, begun: object, ran: str) -> None:
        """See `dropin.Observer`."""
        assert isinstance(begun, Call)
        self.note(replace(begun, seconds=perf_counter() - begun.begin, ran=ran.partition(" ")[2] or NATIVE))

    def note(self, call: Call) -> None:
        """Count a call."""
        site = self.sites.setdefault((call.site, call.collective), Site())
        site.calls, site.bytes, site.seconds = site.calls + 1, site.bytes + call.nbytes, site.seconds + call.seconds
        site.least, site.most = min(site.least, call.nbytes), max(site.most, call.nbytes)
        site.waited += call.waited
        site.ran[call.ran] += 1
        if call.native is not None:
            site.native, site.compared = site.native + call.native, site.compared + call.seconds
            site.estimated += 1
        if self.trace:
            self.events.append((call.collective, call.begin - self._origin, call.seconds, call.nbytes, call.ran))

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


def _caller() -> str:
    """Where the program calls the method that is watched."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "hiercoll":
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def native_seconds(session: Session, record: Collective, nbytes: int) -> float | None:
    """Seconds of native's single call that receives so much, by a table for this very layout; None outside of what was
    measured there, as blocks of uneven sizes are, of which a table knows one distribution."""
    if not record.is_even:
        return None
    entry = session.policy.table.find(record.name, session.library, "host", session.topology)
    if entry is None or not entry.is_for(session.topology):
        return None
    return entry.native_seconds(nbytes // record.blocks(record.recv, session.size))


def received(record: Collective, size: int, rank: int, args: Sequence[Any]) -> int:
    """Bytes that a call with these arguments, of a method of mpi4py, is to leave in the receive buffer of ``rank``.

    What is wrong with a root is mpi4py's to say."""
    names = ["buf"] if record.one_buffer else ["sendbuf", "recvbuf"]
    given = dict(zip([*names, *(["op"] if record.operation else []), "root"], args, strict=False))
    root = given.get("root", 0)
    if record.root and not (root in range(size) and Contract(record.name, size, root=root).shape(rank).due):
        return 0
    blocks = record.blocks(record.recv, size)
    if record.is_even:
        message = block_message(given[names[-1]], blocks, readonly=True)
        return int(message.counts) * message.element.size * blocks
    message = vector_message(given[names[-1]], blocks, readonly=True)
    return int(np.sum(message.counts)) * message.element.size


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
