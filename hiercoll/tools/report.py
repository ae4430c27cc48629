"""What a program's collectives did, call site by call site, and how long native's and hiercoll's calls took there."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

from hiercoll import settings
from hiercoll.calls.dropin import call_name, ignore, observe
from hiercoll.calls.given import is_on_device
from hiercoll.collectives import NATIVE, Collective, Holds, Sizes
from hiercoll.contracts import Contract
from hiercoll.errors import ArgumentError
from hiercoll.learned import write_whole
from hiercoll.runtime import progress
from hiercoll.runtime.arguments import Mode
from hiercoll.runtime.lifetime import get_topology, is_at_bound, is_disabled, is_settled, known_session, set_ups
from hiercoll.runtime.operations import Operation, find_operation
from hiercoll.runtime.reading import combining_of
from hiercoll.runtime.session import Session
from hiercoll.runtime.specifications import (
    UNREADABLE,
    apart,
    block_message,
    is_in_place,
    typed_message,
    vector_message,
)
from hiercoll.tools.bench import provenance
from hiercoll.tools.comparison import MOST_KINDS, Kind, Learned, compared, lines, ran_words
from hiercoll.tools.reasons import Reason, Unmet, reason
from hiercoll.tuning.budget import Budget
from hiercoll.tuning.learning import Learner
from hiercoll.tuning.policy import Key as PolicyKey
from hiercoll.tuning.policy import Wanted
from hiercoll.units import format_time

Key: TypeAlias = "tuple[str, str]"  # call site, collective
MOST_ASKED = 1000  # kinds of calls that are known by their arguments


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
    left: Counter[str] = field(default_factory=Counter)  # to the MPI library by "auto", by why
    kinds: dict[object, Kind] = field(default_factory=dict)

    def kind(self, asked: Asked) -> Kind | None:
        """Where such calls are compared; None where too many others are."""
        if asked.kind not in self.kinds and len(self.kinds) < MOST_KINDS:
            operation = "" if asked.operation is None else asked.operation.name
            self.kinds[asked.kind] = Kind(asked.ranks, asked.wanted.size, asked.wanted.size, operation)
        return self.kinds.get(asked.kind)


class Asked(NamedTuple):
    """What a call asks for among so many ranks: bytes that it is to receive on this one, what is to be chosen for, and
    under which key that is known, and the operation; ``kind``: what calls that are compared have in common."""

    ranks: int
    nbytes: int
    wanted: Wanted
    key: PolicyKey
    operation: Operation | None
    kind: tuple[object, ...]

    @classmethod
    def of(cls, ranks: int, nbytes: int, wanted: Wanted, operation: Operation | None) -> Asked:
        """With its keys."""
        *like, _ = wanted.key  # but for what a reduction asks of algorithms, which is known where hiercoll is set up
        kind = (ranks, *like, None if operation is None else operation.name)
        return cls(ranks, nbytes, wanted, wanted.key, operation, kind)


class Call(NamedTuple):
    """A call that has begun; times in seconds."""

    comm: Any
    collective: Collective
    mode: Mode
    site: str
    asked: Asked
    is_set_up: bool  # whether hiercoll was
    trials: int  # before it
    waited: float
    begin: float


class Event(NamedTuple):
    """A call: when it began and how long it took, in seconds, and its algorithm."""

    name: str
    begin: float
    seconds: float
    nbytes: int
    ran: str


class Recorder:
    """Watches the drop-in collectives of this process, beside others like it: each counts every call once."""

    def __init__(self, *, sync: bool, trace: bool) -> None:
        self.sync, self.trace = sync, trace
        self.sites: dict[Key, Site] = {}
        self.budgets: dict[int, Budget] = {}
        self.events: list[Event] = []
        self._asked: dict[object, Asked] = {}  # by calls' arguments

    def install(self) -> None:
        """Watch from now on."""
        observe(self)

    def remove(self) -> None:
        """Watch no longer."""
        ignore(self)

    def begin(self, comm: Any, collective: Collective, mode: Mode, buffers: tuple[Any, ...]) -> object:
        """See `dropin.Observer`."""
        site, waited = _caller(), 0.0
        session = known_session(comm)
        if session is not None:
            session.refused = ""
        asked = self._ask(collective, comm, session, buffers)
        learner = session.policy.known_learner(asked.key) if session is not None else None
        if mode is Mode.BLOCKING and self.sync:
            since = perf_counter()
            progress.before_blocking()
            MPI.Comm.Barrier(comm)  # on the program's own communicator: nothing need be set up for it
            waited = perf_counter() - since
        trials = 0 if learner is None else learner.trials
        known = mode is Mode.BLOCKING and session is not None, trials, waited
        return Call(comm, collective, mode, site, asked, *known, perf_counter())

    def _ask(self, collective: Collective, comm: Any, session: Session | None, buffers: tuple[Any, ...]) -> Asked:
        """What a call asks for; it is kept for calls on such arrays, as it takes longer to find than a short call."""
        alike = _alike(collective, comm, session, buffers)
        if alike is not None and (known := self._asked.get(alike)) is not None:
            return known
        asked = _asked(collective, comm, session, buffers)
        if alike is not None:
            if len(self._asked) >= MOST_ASKED:
                self._asked.clear()
            self._asked[alike] = asked
        return asked

    def end(self, begun: object, ran: str) -> None:
        """See `dropin.Observer`."""
        now = perf_counter()
        assert isinstance(begun, Call)
        seconds, nbytes = now - begun.begin, begun.asked.nbytes
        name, ran = call_name(begun.collective, begun.mode), ran.partition(" ")[2] or NATIVE
        site = self.sites.get((begun.site, name))
        if site is None:
            site = self.sites[begun.site, name] = Site()
        site.calls, site.bytes, site.seconds = site.calls + 1, site.bytes + nbytes, site.seconds + seconds
        site.least, site.most = min(site.least, nbytes), max(site.most, nbytes)
        site.waited += begun.waited
        site.ran[ran] += 1
        if ran == NATIVE:
            site.left[_why(begun)] += 1
        if begun.mode is Mode.BLOCKING:
            self._compare(site, begun, seconds, ran)
        if self.trace:
            self.events.append(Event(name, begun.begin, seconds, nbytes, ran))

    def _compare(self, site: Site, call: Call, seconds: float, ran: str) -> None:
        """Take up a blocking call's time, unless hiercoll was set up in it."""
        session = known_session(call.comm)
        learner: Learner | None = None
        if session is not None:
            native = native_seconds(session, call.collective, call.asked.nbytes) if call.is_set_up else None
            if native is not None:
                site.native, site.compared = site.native + native, site.compared + seconds
                site.estimated += 1
            budget, learner = session.policy.budget, session.policy.known_learner(call.asked.key)
            self.budgets[id(budget)] = budget
            if not call.is_set_up:
                return
        kind = site.kind(call.asked)
        if kind is not None:
            is_trial = learner is not None and learner.trials != call.trials
            kind.add(ran, call.asked.wanted.size, seconds, is_trial)
            kind.learned = Learned.by(learner, call.collective.name)

    def gather(self, comm: MPI.Intracomm) -> list[dict[str, Any]] | None:
        """On rank 0 a record for each site, those that took longest first. Collective."""
        everyone = comm.gather(self.sites)
        if everyone is None:
            return None
        records = []
        for key in dict.fromkeys(key for sites in everyone for key in sites):
            own = [sites[key] for sites in everyone if key in sites]
            ran = sum((site.ran for site in own), Counter[str]())
            left = sum((site.left for site in own), Counter[str]())
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
                    "left": dict(left.most_common()),
                    "kinds": _kinds(own),
                    **times,
                }
            )
        return sorted(records, key=lambda record: -record["seconds"]["most"])

    def costs(self, comm: MPI.Intracomm) -> dict[str, float] | None:
        """On rank 0 what the communicators of a rank have cost in sum, each the most of all ranks. Collective."""
        budgets = self.budgets.values()
        own = {
            "set_ups": set_ups.count,
            "set_up_seconds": set_ups.seconds,
            "learning_seconds": sum(budget.cost - budget.set_up for budget in budgets),
            "calls_seconds": sum(budget.calls for budget in budgets),
            "saved_seconds": sum(budget.saved for budget in budgets),
        }
        everyone = comm.gather(own)
        return None if everyone is None else {name: max(each[name] for each in everyone) for name in own}

    def all_events(self, comm: MPI.Intracomm) -> list[list[Event]] | None:
        """On rank 0 the events of all ranks, in seconds of one clock: ranks of a host share its own, and clocks of
        hosts are set by when their first rank leaves a barrier. Collective."""
        comm.Barrier()
        everyone = comm.gather((gethostname(), perf_counter(), self.events))
        if everyone is None:
            return None
        left = {host: min(now for other, now, _ in everyone if other == host) for host, _, _ in everyone}
        aligned = [[event._replace(begin=event.begin - left[host]) for event in own] for host, _, own in everyone]
        first = min((event.begin for own in aligned for event in own), default=0.0)
        return [[event._replace(begin=event.begin - first) for event in own] for own in aligned]

    def finish(self, comm: MPI.Intracomm, report: Path | None, trace: Path | None, *, compares: bool = False) -> None:
        """Print and write what was seen, on rank 0; ``compares``: native took turns. What comes after is not seen any
        more. Collective."""
        self.remove()
        records, events = self.gather(comm), self.all_events(comm) if trace else None
        costs = self.costs(comm)
        about = provenance(comm, get_topology(comm))
        if records is None or costs is None:
            return
        if report is not None:
            data = {"about": about, "synchronised": self.sync, "compared": compares, "costs": costs, "sites": records}
            is_written = _write(report, json.dumps(data, indent=1))  # first: who reads the rest may close the pipe
            console = Console(stderr=True, width=160, highlight=False)
            _print(console, records, self.sync)
            _print_left(console, records)
            _print_compared(console, records, compares)
            console.print(_cost_words(costs))
            if is_written:
                console.print(f"written to {report}")
        if trace is not None and events is not None:
            _write(trace, json.dumps({"traceEvents": _events(events)}))


def _write(path: Path, text: str) -> bool:
    """Whether it could be written: a job that has done its work does not fail for this."""
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        print(f"hiercoll: {path}: {error.strerror}; not written", file=sys.stderr)
        return False
    return True


def _alike(collective: Collective, comm: Any, session: Session | None, args: tuple[Any, ...]) -> object:
    """What calls on NumPy's arrays have in common that ask for the same; None for calls on others."""
    found: list[object] = [collective.name, comm.size, comm.rank, "" if session is None else session.name]
    for each in args:
        if isinstance(each, np.ndarray):
            found += [each.nbytes, each.dtype, each.flags.forc]
        elif isinstance(each, MPI.Op) and each.is_predefined:
            found.append(("operation", each.handle))
        elif each is None or type(each) is int or each is MPI.IN_PLACE:
            found.append((type(each), each))
        else:
            return None
    return tuple(found)


def _asked(collective: Collective, comm: Any, session: Session | None, args: tuple[Any, ...]) -> Asked:
    if not args:  # objects, whose bytes mpi4py alone knows
        return Asked.of(comm.size, 0, Wanted(collective, 0, False), None)
    try:
        matter = _that_matter(collective, comm, args)
        total = message_bytes(collective, comm.size, matter)
        operation = _operation(collective, comm, matter)
        wanted = _asking(_wanted(collective, comm.size, total, matter), session, operation)
    except UNREADABLE:  # mpi4py says what is wrong
        total, operation, wanted = 0, None, Wanted(collective, 0, False)
    nbytes = total if is_due(collective, comm.size, comm.rank, args) else 0
    return Asked.of(comm.size, nbytes, wanted, operation)


def _that_matter(record: Collective, comm: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments; None for the receive buffer of a rank that receives nothing, which may be anything."""
    if not record.is_rooted or is_due(record, comm.size, comm.rank, args):
        return args
    return (args[0], None, *args[2:])


def _caller() -> str:
    """Where the program calls the method that is watched."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "hiercoll":
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
    """Bytes that a call with these arguments, of a method of mpi4py, is to leave in the receive buffer of ``rank``."""
    return message_bytes(record, size, args) if is_due(record, size, rank, args) else 0


def is_due(record: Collective, size: int, rank: int, args: Sequence[Any]) -> bool:
    """Whether such a call is to leave anything in the receive buffer. What is wrong with a root is mpi4py's to say."""
    root = _named(record, args).get("root", 0)
    return not record.root or (root in range(size) and bool(Contract(record.name, size, root=root).shape(rank).due))


def message_bytes(record: Collective, size: int, args: Sequence[Any]) -> int:
    """Bytes of the receive buffer that such a call names, or of the one buffer; 0 where a rank need not name one."""
    given, blocks = _named(record, args).get("recv"), record.blocks(record.recv, size)
    if is_in_place(given):
        return 0
    if record.is_even:
        message = block_message(given, blocks, readonly=True)
        return int(message.counts) * message.element.size * blocks
    if record.typed:
        return sum(block.nbytes for block in apart(typed_message(given, size, readonly=True), size).blocks)
    reader = vector_message if record.recv is Holds.EACH else block_message
    message = reader(given, blocks, readonly=True)
    return int(np.sum(message.counts)) * message.element.size


def _named(record: Collective, args: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a method of mpi4py by name."""
    names = ["send", "recv"][2 - record.buffers :]
    return dict(zip([*names, *record.more], args, strict=False))


def _operation(record: Collective, comm: Any, args: Sequence[Any]) -> Operation | None:
    """What such a call combines by; None of other calls, of ranks that name no elements, and where it is wrong, which
    is mpi4py's to say."""
    given = _named(record, args)
    elements = given.get("send") if given.get("recv") is None or is_in_place(given["recv"]) else given["recv"]
    if not record.operation or elements is None or is_in_place(elements):
        return None
    try:
        return find_operation(given.get("op", MPI.SUM), block_message(elements, 1, readonly=True).datatype, comm.rank)
    except ArgumentError:
        return None


def _why(call: Call) -> str:
    """A call has been left to the MPI library."""
    session = known_session(call.comm)
    if session is not None and session.refused:
        return f"{Reason.REFUSED.value}: {session.refused}"
    wanted = _asking(call.asked.wanted, session, call.asked.operation)
    unmet = Unmet(settings.is_disabled() or is_disabled(call.comm), is_settled(call.comm), is_at_bound(call.comm))
    return reason(session or unmet, call.comm.size, wanted, call.mode).value


def _asking(wanted: Wanted, session: Session | None, operation: Operation | None) -> Wanted:
    """With what the operation asks of algorithms on that communicator."""
    if session is None or operation is None:
        return wanted
    return wanted._replace(combining=combining_of(session, None, operation))


def _wanted(record: Collective, size: int, total: int, args: Sequence[Any]) -> Wanted:
    """What is to be chosen for such a call, for which the receive buffer has so many bytes."""
    given = _named(record, args)
    memory = "cuda" if record.is_even and is_on_device(given.get("recv")) else "host"
    block = 0 if record.sizes in (Sizes.OWN, Sizes.ROOT) else -(-total // record.blocks(record.recv, size))
    if record.is_rooted and record.is_even and is_in_place(given["recv"]):  # only the root has two buffers
        message = block_message(given["send"], record.blocks(record.send, size), readonly=True)
        block = int(message.counts) * message.element.size
    in_place = block > 0 and (record.one_buffer or (is_in_place(given["send"]) and not record.is_rooted))
    return Wanted(record, block, in_place, memory)


def _events(everyone: list[list[Event]]) -> list[dict[str, Any]]:
    """In the Trace Event Format, in microseconds; a row for each rank."""
    return [
        {
            "name": name, "ph": "X", "pid": 0, "tid": rank, "ts": begin * 1e6, "dur": seconds * 1e6,
            "args": {"bytes": nbytes, "algorithm": ran},
        }
        for rank, events in enumerate(everyone)
        for name, begin, seconds, nbytes, ran in events
    ]  # fmt: skip


def _kinds(sites: Sequence[Site]) -> list[dict[str, Any]]:
    """The records of the kinds of calls at a place, of those who made them."""
    keys = dict.fromkeys(key for site in sites for key in site.kinds)
    return [compared([site.kinds[key] for site in sites if key in site.kinds]) for key in keys]


def _print(console: Console, records: list[dict[str, Any]], sync: bool) -> None:
    if not records:
        console.print("hiercoll: the program has called no collectives that hiercoll serves")
        return
    table = Table(title="hiercoll: collectives by call site (times: the slowest rank)", box=None)
    for name in ("where", "collective"):
        table.add_column(name)
    by_table = any(record["estimated_calls"] for record in records)
    times = [
        "seconds",
        *(["waited"] if sync else []),
        *(["of calls compared", "native's, by the table"] if by_table else []),
    ]
    for name in ("calls", "bytes per call", *times):
        table.add_column(name, justify="right")
    table.add_column("ran")
    for record in records:
        least, most = record["bytes_per_call"]
        compared = [
            f"{record[name]['most']:.3g}" if record["estimated_calls"] else "" for name in ("compared", "native")
        ]
        table.add_row(
            _short(record["site"]),
            record["collective"],
            str(record["calls"]),
            str(most) if least == most else f"{least}-{most}",
            f"{record['seconds']['most']:.3g}",
            *([f"{record['waited']['most']:.3g}"] if sync else []),
            *(compared if by_table else []),
            ran_words(record["ran"]),
        )
    console.print(table)


def _print_left(console: Console, records: list[dict[str, Any]]) -> None:
    """Why calls were left to the MPI library."""
    sites = [record for record in records if record["left"]]
    if sites:
        console.print("\nleft to the MPI library, and why (calls of all ranks)", style="italic")
    for record in sites:
        why = "; ".join(f"{reason} ({calls})" for reason, calls in record["left"].items())
        console.print(f"{_short(record['site'])}, {record['collective']}: {why}", markup=False, soft_wrap=True)


def _short(site: str) -> str:
    return "/".join(site.split("/")[-2:])


TAKING_TURNS = "Native and hiercoll took turns."
NOTHING_TO_COMPARE = "All calls were native's: hiercoll had chosen nothing else that could take turns with it."
ONE_AFTER_THE_OTHER = (
    "Native's calls were mostly earlier ones than hiercoll's; with --compare, they take turns through the whole run."
)
WHAT_TIMES_ARE = (
    "Medians of the slowest rank with their 95 % intervals; a rank's time includes its waiting for late ranks. "
    "What was learned is from calls that began together, and is the better comparison. "
    "Calls that set hiercoll up are left out, and trials are counted apart."
)


def _print_compared(console: Console, records: list[dict[str, Any]], compares: bool) -> None:
    """The times of native's and of hiercoll's blocking calls."""
    kinds = [(record, kind) for record in records for kind in record["kinds"]]
    if not kinds:
        return
    console.print("\nnative and hiercoll, by call site and size", style="italic")
    for record, kind in kinds:
        for line in lines(record["collective"], _short(record["site"]), kind):
            console.print(line, markup=False, soft_wrap=True)
    console.print(WHAT_TIMES_ARE)
    if any(kind["gain"] for _, kind in kinds):
        console.print(TAKING_TURNS if compares else ONE_AFTER_THE_OTHER)
    elif compares:
        console.print(NOTHING_TO_COMPARE)


def _cost_words(costs: dict[str, float]) -> str:
    calls, learning = costs["calls_seconds"], max(0.0, costs["learning_seconds"])
    of_calls = f"of the {format_time(calls)} that calls took the rank that waited the least"
    share = f", {100 * learning / calls:.1f} % {of_calls}" if calls else ""
    set_up = f"communicators set up: {costs['set_ups']:.0f}, in {format_time(costs['set_up_seconds'])}"
    saved = f"; what it found has saved {format_time(costs['saved_seconds'])}" if costs["saved_seconds"] > 0.0 else ""
    return f"{set_up}; learning cost {format_time(learning)} besides{share}{saved}"
