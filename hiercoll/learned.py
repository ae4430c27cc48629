"""What jobs have learned, kept for the jobs after them: what "auto" has found in a program's own calls.

It lies in a folder of the user's (`settings.learned_folder`), in a sub-folder for each setting: MPI library, layout,
memory and network. There each job that learns something writes one file of its own (JSON, format "hiercoll learned",
version 1), whole and anew when all candidates of a size have been tried, now and then before that, and at its end. A
job that is killed leaves what it wrote last, and jobs at the same time do not disturb each other. Reading merges all
files of a setting; where there are many, the oldest are put together.

Nothing here needs MPI, and no call of a program raises for what it finds on disk: what cannot be read is left out, and
what cannot be written is lost, with one warning for each in a process.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

from hiercoll import settings
from hiercoll.collectives import COLLECTIVES, NATIVE, called, tuned
from hiercoll.errors import TableError
from hiercoll.folders import listed, places, places_of, plain, ranks_of, warn
from hiercoll.model.adapters import adapters
from hiercoll.tables import (
    MEMORIES,
    NATIVE_VARIANT,
    Choice,
    Entry,
    Figure,
    Reader,
    Table,
    Variant,
    no_constant,
    read_variant,
)
from hiercoll.topology import MOST_RANKS, Topology

FORMAT, VERSION = "hiercoll learned", 1
MOST_FILES = 16  # of a setting; with more, all but the newest half of that are put together
MOST_LOOKS = 10  # at a setting's files, while other jobs put some of them together
MOST_READ = 256  # files, of which it is remembered what is in them
MOST_BYTES = 1 << 20  # of a file
MOST_VARIANTS = 1024  # of which it is remembered what they are
VARIANT = ("algorithm", "params", "transport")  # names of what makes one, in a file
WRITING = 0.03  # seconds that it takes to write a file for the first time, where others keep the cores, about
PATIENCE = 100  # times as long as writing a file takes, until it is written again for what is not final
STALE = 24 * 3600.0  # seconds after which nobody goes on with a file that is half written

_variants: dict[str, Variant] = {}  # by what a file says; files of many jobs name the same few
_LAYOUT = re.compile(r"(?:(\d{1,7})x(\d{1,7})|(\d{1,7}(?:\+\d{1,7})*))(?::(cyclic|irregular)(?:=([0-9a-f]{12}))?)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d\+00:00)?")

Key: TypeAlias = tuple[str, int, bool]  # collective, size, in place
Lessons: TypeAlias = "dict[Key, Lesson]"
Known: TypeAlias = "dict[Setting, Lessons]"


class Setting(NamedTuple):
    """What lessons hold for; see `setting_of`."""

    mpi: str
    layout: str
    memory: str
    fabric: str

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(_shape(self.layout)[0])

    @property
    def folder(self) -> str:
        """The name of its sub-folder: one to read, and a digest that no other setting has."""
        return f"{plain(self.mpi)}_{self.ranks}_{plain(self.layout)}_{self.memory}_{_digest(self._asdict())}"


class Lesson(NamedTuple):
    """What "auto" has found for blocks from ``size`` bytes on (the least of those that learning does not tell apart):
    the seconds of a call by ``variant`` and by native, from so many ``calls``; see `now` for the ``date``.
    ``untried``: candidates with which a later job goes on, in their order; none where all have been tried."""

    collective: str
    size: int
    in_place: bool
    variant: Variant
    seconds: float
    native: float
    calls: int
    date: str
    untried: tuple[Variant, ...] = ()

    @property
    def says_nothing(self) -> bool:
        """Whether nothing is faster than native so far, and there are candidates left."""
        return self.variant.is_native and bool(self.untried)

    @property
    def key(self) -> Key:
        """What it is about."""
        return (self.collective, self.size, self.in_place)

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        about: dict[str, Any] = {"collective": self.collective, "size": self.size, "in_place": self.in_place}
        times = {"seconds": self.seconds, "native": self.native, "calls": self.calls, "date": self.date}
        rest = {"untried": [each.record() for each in self.untried]} if self.untried else {}
        return {**about, **self.variant.record(), **times, **rest}


def setting_of(mpi: str, topology: Topology, memory: str, fabric: str) -> Setting:
    """The setting of a communicator: ``mpi`` as in tables ("MPICH 5.0.2"), ``fabric`` as of rank 0's host.

    Where the placement of ranks is irregular, the layout has a digest of the nodes of all of them: two such layouts are
    the same only if each rank has the same node.
    """
    layout = str(topology)
    if topology.placement == "irregular":
        layout += "=" + _digest(topology.node_of)
    return Setting(mpi, layout, memory, fabric)


def fabric() -> str:
    """What this host's network is, in short: "InfiniBand 200 x4", "Ethernet 25", with "virtual nodes" before it where
    ``HIERCOLL_NODES`` makes some up; "" where nothing is known.

    Adapters' names are left out, since they differ between hosts that are alike. Of Ethernet only the fastest counts:
    hosts have more of it for other purposes, and for containers.
    """
    found = adapters()
    ethernet = [each for each in found if each.kind == "Ethernet"]
    if ethernet:
        found = [max(ethernet, key=lambda each: each.rate)]
    names = ["virtual nodes"] if settings.nodes() else []
    for name, count in sorted(Counter(f"{each.kind} {each.rate:g}" for each in found).items()):
        names.append(name if count == 1 else f"{name} x{count}")
    return ", ".join(names)


def now() -> str:
    """The date of what is learned now, as ISO 8601 has it, in UTC: later ones are greater as texts, too."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


# ---- reading


def known_ranks(mpi: str, folder: Path | None = None) -> frozenset[int]:
    """The sizes of communicators for which there may be something, with this MPI library: from the names in one folder,
    so that a program for which there is nothing reads no files; and from what this job has not written yet."""
    own = [] if folder is not None else [setting for setting in list(_job_files) if setting.mpi == mpi]
    found = (ranks_of(place.name) for place in places_of(mpi, _base(folder)))
    return frozenset([*found, *(setting.ranks for setting in own)])


def gaining_ranks(mpi: str, most: int) -> frozenset[int]:
    """Those, up to ``most``, for which something is known that is faster than the MPI library's own."""
    return frozenset(outlook.ranks for outlook in _outlooks(mpi, most) if outlook.gains)


def settled_ranks(mpi: str, most: int) -> frozenset[int]:
    """Those, up to ``most``, for which something is known, nothing of which is faster than the MPI library's own, and
    no candidate is left."""
    found = _outlooks(mpi, most)
    return frozenset(each.ranks for each in found) - frozenset(each.ranks for each in found if not each.is_settled)


class _Outlook(NamedTuple):
    """Of what is known for a setting: whether anything is faster than native, and whether nothing is or may be."""

    ranks: int
    gains: bool
    is_settled: bool


def _outlooks(mpi: str, most: int) -> list[_Outlook]:
    """Of all settings of an MPI library with so many ranks at most, on disk and in this job."""
    folders = [place for place in places_of(mpi, settings.learned_folder()) if ranks_of(place.name) <= most]
    found = [outlook for place in folders for outlook in _outlooks_in(place, _changed(place))]
    files = [file for file in list(_job_files.values()) if file.setting.mpi == mpi and file.setting.ranks <= most]
    return [*found, *(_outlook(file.setting, file.lessons) for file in files)]


def _outlook(setting: Setting, lessons: Iterable[Lesson]) -> _Outlook:
    """An empty one is not settled."""
    known = list(lessons)
    gains = any(not lesson.variant.is_native for lesson in known)
    is_settled = bool(known) and not gains and not any(lesson.untried for lesson in known)
    return _Outlook(setting.ranks, gains, is_settled)


def _changed(place: Path) -> int:
    """When files of a sub-folder were last written, which replaces them; 0 if it is gone."""
    try:
        return place.stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=64)
def _outlooks_in(place: Path, changed: int) -> list[_Outlook]:
    """Of the settings of a sub-folder."""
    known = _gathered(place) if changed else {}
    return [_outlook(setting, lessons.values()) for setting, lessons in known.items()]


def read(setting: Setting, folder: Path | None = None) -> Lessons:
    """All that is known for a setting, and what this job has not written yet; of several lessons about the same, the
    one of the latest date, or else of the most calls. Files that cannot be used are left out, with one LearnedWarning
    in a process; lessons with an algorithm or parameters that this hiercoll does not have are left out without."""
    base = _base(folder)
    found = _gathered(base / setting.folder).get(setting, {}) if base is not None else {}
    if folder is None and setting in _job_files:
        _merge(found, _job_files[setting].lessons)
    return found


def of_this_job(setting: Setting) -> Lessons:
    """What this job has learned for a setting so far, on any communicator."""
    file = _job_files.get(setting)
    return {lesson.key: lesson for lesson in file.lessons} if file is not None else {}


def read_all(folder: Path | None = None) -> Known:
    """All that is known, by setting; see `read`."""
    known: Known = {}
    for place in places(_base(folder)):
        known |= _gathered(place)
    return {setting: lessons for setting, lessons in known.items() if lessons}


class _File(NamedTuple):
    """What one file says; ``is_known``: there is nothing in it that this hiercoll does not have."""

    setting: Setting
    lessons: list[Lesson]
    is_known: bool


def _base(folder: Path | None) -> Path | None:
    return settings.learned_folder() if folder is None else folder


def _files(place: Path) -> list[Path]:
    """The files of a setting, oldest first: their names begin with a date."""
    return [place / name for name in listed(place) if name.endswith(".json") and not name.startswith(".")]


def _gathered(place: Path) -> Known:
    """All files of a sub-folder together. Anew, now and then, if one is gone before it is read: another job has put it
    together with others."""
    for _ in range(MOST_LOOKS):
        known: Known = {}
        wrong: list[str] = []
        is_whole = True
        for path in _files(place):
            try:
                file = _load(path)
            except FileNotFoundError:
                is_whole = False
            except OSError as error:
                wrong.append(f"{path}: {error.strerror}")
            except TableError as error:
                wrong.append(str(error))
            else:
                _merge(known.setdefault(file.setting, {}), file.lessons)
        if is_whole:
            break
    if wrong:
        others = f" (and {len(wrong) - 1} more there)" if len(wrong) > 1 else ""
        warn("read", f"{wrong[0]}{others}; what earlier jobs have learned there is not used")
    return known


def _merge(lessons: Lessons, more: Iterable[Lesson]) -> None:
    """Take up those that are to be believed rather than what is there."""

    def rank(lesson: Lesson) -> tuple[bool, str, int]:
        return not lesson.says_nothing, lesson.date, lesson.calls

    for lesson in more:
        other = lessons.get(lesson.key)
        if other is None or rank(lesson) >= rank(other):
            lessons[lesson.key] = lesson


def _load(path: Path) -> _File:
    """One file, which is read anew only if it is another one than before: each set-up of a communicator looks at all of
    a setting. Raises TableError, OSError."""
    about = path.stat()
    return _read(path, (about.st_ino, about.st_mtime_ns, about.st_size))


@lru_cache(MOST_READ)
def _read(path: Path, version: tuple[int, ...]) -> _File:
    """What is in it. Raises TableError, OSError."""
    del version
    reader = Reader(str(path))
    try:
        data = json.loads(_text(path), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise TableError(path, "file", "JSON", str(error)) from None
    top = reader.mapping(data, "")
    for name, expected in (("format", FORMAT), ("version", VERSION)):
        if top.get(name) != expected:
            raise reader.wrong(name, f"{expected!r} (written by this hiercoll)", top.get(name))
    setting = _setting(reader, top.get("setting"))
    if setting.folder != path.parent.name:
        raise reader.wrong("setting", f"that of the folder {path.parent.name}", setting)
    given = reader.items(top, "lessons", "")
    known = [lesson for lesson in (_lesson(reader, each, at) for at, each in given) if lesson is not None]
    untried = sum(len(each.get("untried", ())) for _, each in given)
    is_whole = len(known) == len(given) and untried == sum(len(lesson.untried) for lesson in known)
    return _File(setting, known, is_whole)


def _text(path: Path) -> str:
    """What is in a file: never waits, as a pipe would let it, and takes no more than a job would have written."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise TableError(path, "file", "a file", "something else")
        if about.st_size > MOST_BYTES:
            raise TableError(path, "file", f"at most {MOST_BYTES} bytes", str(about.st_size))
        return file.read(MOST_BYTES).decode("utf-8")


def _setting(reader: Reader, value: Any) -> Setting:
    data = reader.mapping(value, "setting")
    layout = reader.text(data, "layout", "setting")
    try:
        _shape(layout)
    except ValueError:
        raise reader.wrong("setting.layout", "a layout", layout) from None
    fabric = reader.get(data, "fabric", "setting", "a text", lambda value: isinstance(value, str))
    mpi, memory = reader.text(data, "mpi", "setting"), reader.one_of(data, "memory", "setting", MEMORIES)
    return Setting(mpi, layout, memory, fabric)


def _lesson(reader: Reader, value: Any, at: str) -> Lesson | None:
    """A lesson; None if it is about what this hiercoll does not have, candidates that are left out. Raises
    TableError."""
    data = reader.mapping(value, at)
    seconds, native = (_time(reader, data, name, at) for name in ("seconds", "native"))
    size, calls = reader.whole(data, "size", at, 0), reader.whole(data, "calls", at, 1)
    in_place = reader.get(data, "in_place", at, "true or false", lambda value: isinstance(value, bool))
    date = reader.get(data, "date", at, "a date", _is_date)
    collective = reader.text(data, "collective", at)
    variant = _variant(reader, data, at, collective)
    rest = reader.items(data, "untried", at) if "untried" in data else []
    untried = [_variant(reader, reader.mapping(each, place), place, collective) for place, each in rest]
    left = tuple(each for each in untried if each is not None)
    if variant is None or (variant.is_native and untried and not left):
        return None
    return Lesson(collective, size, in_place, variant, seconds, native, calls, date, left)


def _variant(reader: Reader, data: dict[str, Any], at: str, collective: str) -> Variant | None:
    """What is to run, if this hiercoll has it, and for calls. Raises TableError."""
    for name, kind in (("algorithm", str), ("params", dict)):
        if not isinstance(data.get(name), kind):
            raise reader.wrong(f"{at}.{name}", "a text" if kind is str else "an object", data.get(name))
    key = repr((collective, *(data.get(name) for name in VARIANT)))  # unlike hashes, tells 1 from true
    if (found := _variants.get(key)) is None and (found := _for_calls(reader, data, at, collective)) is not None:
        if len(_variants) >= MOST_VARIANTS:
            _variants.clear()
        _variants[key] = found
    return found


def _for_calls(reader: Reader, data: dict[str, Any], at: str, collective: str) -> Variant | None:
    if collective not in {each.name for each in called()}:
        return None
    try:
        variant = read_variant(reader, data, at, collective)
    except TableError:
        return None
    is_for_plans = variant.algorithm == NATIVE and variant.params.get("form") == "persistent"
    return None if is_for_plans else variant


def _time(reader: Reader, data: dict[str, Any], name: str, at: str) -> float:
    seconds = reader.seconds(data, name, at)
    if seconds == 0:
        raise reader.wrong(f"{at}.{name}", "a number of seconds above 0", seconds)
    return seconds


def _is_date(value: Any) -> bool:
    if not isinstance(value, str) or not _DATE.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


# ---- writing


class JobFile:
    """The file of this job for a setting; made with the first lesson. What cannot be written is a LearnedWarning, one
    in a process, and tried again with the next lesson. Lessons with untried candidates wait for the next one, or for
    `flush`, where writing would take more than a hundredth of the job's time."""

    def __init__(self, setting: Setting, folder: Path | None = None) -> None:
        self.setting = setting
        self.path: Path | None = None
        self._folder = folder
        self._lessons: Lessons = {}
        self._lock = Lock()
        self._next = time.perf_counter() + PATIENCE * WRITING  # when it may be written, though nothing is final
        self._waits = False  # whether there is something to be written

    def keep(self, lesson: Lesson) -> None:
        """Write the lesson, instead of what this job has learned about the same before. Never raises."""
        try:
            sound = _lesson(Reader("what was learned"), lesson.record(), "lesson")
            if sound is None:
                raise TableError("what was learned", "lesson", "an algorithm for calls", repr(lesson.variant.key))
        except TableError as error:
            warn("keep", f"{error}; it is not kept")
            return
        with self._lock:
            before = self._lessons.get(lesson.key)
            if before is not None and lesson.says_nothing and not before.says_nothing:
                return  # of another communicator, or of one on which it is slower
            self._lessons[lesson.key] = sound
            self._waits = True
            if not lesson.untried or time.perf_counter() >= self._next:
                self._write()

    @property
    def lessons(self) -> list[Lesson]:
        """What this job has learned so far."""
        with self._lock:
            return list(self._lessons.values())

    def flush(self) -> None:
        """Write what waits. Never raises."""
        with self._lock:
            if self._waits:
                self._write()

    def _write(self) -> None:
        begin = time.perf_counter()
        try:
            if self.path is None:
                self.path = self._place() / f"{_stamp()}.json"
            write_whole(self.path, _dumped(self.setting, self._lessons.values()))
            self._waits = False
        except OSError as error:
            warn("keep", f"{error.filename or self.path}: {error.strerror}; what this job learns is not kept")
        now = time.perf_counter()
        self._next = now + PATIENCE * (now - begin)

    def _place(self) -> Path:
        """The sub-folder, tidied."""
        base = _base(self._folder)
        if base is None:
            raise FileNotFoundError(2, "there is no home, and HIERCOLL_LEARNED is not set", "~")
        place = base / self.setting.folder
        place.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # of others' files; this job's own is another matter
            _sweep(place)
            _compact(place)
        return place


_job_files: dict[Setting, JobFile] = {}


def job_file(setting: Setting) -> JobFile:
    """The one that this process writes to, whatever number of communicators has the setting."""
    return _job_files.setdefault(setting, JobFile(setting))


def flush() -> None:
    """Write what waits in this process's files: the end has come. Never raises."""
    for file in list(_job_files.values()):
        file.flush()


def forget(folder: Path | None = None) -> int:
    """Delete what jobs have learned, and say how many files that were. Raises OSError."""
    count = 0
    for place in places(_base(folder)):
        for path in [*_files(place), *place.glob(".*.tmp")]:
            path.unlink(missing_ok=True)
            count += path.suffix == ".json"
        with suppress(OSError):  # there is something else in it
            place.rmdir()
    return count


def _dumped(setting: Setting, lessons: Iterable[Lesson]) -> str:
    """A file's text, a lesson on a line; without the oldest where all would be too much for a file."""
    begin = json.dumps({"format": FORMAT, "version": VERSION, "setting": setting._asdict()})[:-1] + ', "lessons": [\n'
    lines, room = [], MOST_BYTES - len(begin) - len("\n]}\n")
    for lesson in sorted(lessons, key=lambda lesson: (lesson.date, lesson.calls), reverse=True):
        line = json.dumps(lesson.record(), allow_nan=False)
        room -= len(line) + len(",\n")
        if room < 0:
            break
        lines.append(line)
    return begin + ",\n".join(lines) + "\n]}\n"


def write_whole(path: Path, text: str) -> None:
    """The file is there as a whole, or as it was. Raises OSError."""
    if path.exists() and not path.is_file():  # a device, or a pipe
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # of a link, what it leads to
    temporary = path.with_name(f".{_token()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _stamp() -> str:
    """A name that no other job gives its file, and that sorts by the time."""
    date = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return f"{date}_{plain(os.uname().nodename)}_{os.getpid()}_{_token()}"


def _token() -> str:
    return os.urandom(6).hex()  # the module random would change what a program draws from it


def _sweep(place: Path) -> None:
    """Remove what jobs have left that were killed while they wrote."""
    for path in place.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE:
                path.unlink()


def _compact(place: Path) -> None:
    """Where there are too many files, put the oldest together in one.

    Several jobs may do that at once, and those whose files they are may write them meanwhile: a file is renamed before
    it is read for good, so that what its job writes then is another file, and deleted after what was in it has been
    written. At any time every lesson is in some file; to be in two does no harm. Files that this hiercoll does not
    understand as a whole stay as they are.
    """
    if len(_files(place)) <= MOST_FILES:
        return
    known = [path for path in _files(place) if _mergeable(path) is not None]
    if len(known) <= MOST_FILES:
        return
    merged: Known = {}
    taken: list[Path] = []
    for path in known[: -MOST_FILES // 2]:
        mine = path.with_name(f"{path.name.partition('_')[0]}_{_token()}.json")
        with suppress(FileNotFoundError):  # another job was faster
            path.rename(mine)
            if (file := _mergeable(mine)) is not None:
                _merge(merged.setdefault(file.setting, {}), file.lessons)
                taken.append(mine)
    for setting, lessons in merged.items():
        date = taken[-1].name.partition("_")[0]
        write_whole(place / f"{date}_{_token()}.json", _dumped(setting, lessons.values()))
    for path in taken:
        path.unlink(missing_ok=True)


def _mergeable(path: Path) -> _File | None:
    """The file, if all that is in it is understood."""
    try:
        file = _load(path)
    except (OSError, TableError):
        return None
    return file if file.is_known else None


# ---- as a table


def table_of(known: Mapping[Setting, Mapping[Key, Lesson]]) -> Table:
    """What was learned, as a tuning table.

    At the sizes learned the choice is what was learned (out of place, or else in place: tables do not tell that apart),
    between them that of the nearer one, as a factor; native below half the smallest and above twice the largest. A
    table does not say which network there was, nor which nodes ranks had in an irregular placement: of settings that
    differ in nothing else, it has the one learned last. What says nothing so far (`Lesson.says_nothing`) is left out.
    """
    table = Table(source="what jobs have learned")
    for setting, lessons in known.items():
        for collective in tuned():
            here = {lesson.size: lesson for lesson in _by_size(collective, lessons.values())}
            if here:
                table = table.merged(Table((_entry(setting, collective, list(here.values())),)))
    return table


def _by_size(collective: str, lessons: Iterable[Lesson]) -> list[Lesson]:
    """Those of a collective, by size, those in place before those out of place, which replace them."""
    has_sizes = COLLECTIVES[collective].buffers > 0
    own = (lesson for lesson in lessons if lesson.collective == collective and (lesson.size > 0) is has_sizes)
    return sorted(
        (lesson for lesson in own if not lesson.says_nothing), key=lambda lesson: (lesson.size, not lesson.in_place)
    )


def _entry(setting: Setting, collective: str, lessons: list[Lesson]) -> Entry:
    nodes, placement = _shape(setting.layout)
    dates = sorted(lesson.date for lesson in lessons)
    about = {
        "date": dates[-1],
        "learned": f"from a program's own calls, {dates[0][:10]} to {dates[-1][:10]}",
        "calls": sum(lesson.calls for lesson in lessons),
        **setting._asdict(),
        "ranks": setting.ranks,
    }
    figures = tuple(figure for lesson in lessons for figure in _figures(lesson))
    return Entry(collective, setting.mpi, setting.memory, nodes, placement, _choices(lessons), figures, about)


def _figures(lesson: Lesson) -> Iterator[Figure]:
    times = {NATIVE_VARIANT.key: (NATIVE_VARIANT, lesson.native)}
    times[lesson.variant.key] = (lesson.variant, lesson.seconds)
    for variant, seconds in times.values():
        yield Figure(lesson.size, variant, seconds, seconds, seconds, lesson.calls)


def _choices(lessons: list[Lesson]) -> tuple[Choice, ...]:
    first, last = lessons[0], lessons[-1]
    if not last.size:
        return (Choice(0, last.variant),)
    wanted = [Choice(1, NATIVE_VARIANT), Choice((first.size + 1) // 2, first.variant)]
    for before, lesson in pairwise(lessons):
        wanted.append(Choice(max(round(sqrt(before.size * lesson.size)), before.size + 1), lesson.variant))
    wanted.append(Choice(2 * last.size + 1, NATIVE_VARIANT))
    found: list[Choice] = []
    for choice in {choice.start: choice for choice in wanted}.values():  # the later of two that start at the same size
        if not found or choice.variant.key != found[-1].variant.key:
            found.append(choice)
    return tuple(found)


# ---- small things


def _digest(value: Any) -> str:
    """Twelve digits, by checksums: hashlib takes a while to import, and this happens while other ranks wait."""
    text = json.dumps(value, sort_keys=True).encode()
    return f"{zlib.crc32(text):08x}{zlib.adler32(text) >> 16:04x}"


def _shape(layout: str) -> tuple[tuple[int, ...], str]:
    """The numbers of ranks of a layout's nodes, and its placement. Raises ValueError."""
    match = _LAYOUT.fullmatch(layout)
    if match is None or (match[4] == "irregular") != (match[5] is not None):
        raise ValueError(layout)
    if match[3] is None and int(match[1]) * int(match[2]) <= MOST_RANKS:
        nodes = (int(match[2]),) * int(match[1])
    else:
        nodes = tuple(map(int, (match[3] or "0").split("+")))
    if not nodes or min(nodes) < 1 or sum(nodes) > MOST_RANKS:
        raise ValueError(layout)
    return nodes, match[4] or "block"
