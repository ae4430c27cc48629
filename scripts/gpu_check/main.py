"""The check on real GPUs: tests of every algorithm and transport, figures, one table.

    scripts/gpu-check --prepare [FOLDER] [--python 3.12]     where there is a network: some 35 MB
    scripts/gpu-check --wheels FOLDER --out FOLDER --budget 540     where there are GPUs, CUDA and CuPy

The second runs row after row, each with a time limit, as long as the budget (seconds) lasts. A later call goes on
where this one stopped: it runs what has not been run, then what failed. --only, --ranks and --libraries leave rows out.

It makes an environment for each MPI library, beside the Python that runs it and its packages. Results are in
results.jsonl, figures.jsonl, summary.md and the folder logs of --out. Ranks share GPUs where there are fewer.

Exit status: 1 if a row failed, 2 for wrong use, else 0, even where rows were not run; the summary names these.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_check import figures, results
from gpu_check.commands import ROOT, command, settings
from gpu_check.environments import LIMIT, UCX_FILE, Environments, found, prepare
from gpu_check.processes import Outcome, last_lines, run
from gpu_check.results import FAILED, PASSED, TIMEOUT, Result
from gpu_check.rows import LIBRARIES, PARTS, Row, go, order, select


class Check:
    """A call of the check on this machine."""

    def __init__(self, rows: list[Row], environments: Environments, out: Path, left: Callable[[], float]) -> None:
        self.rows, self.environments, self.out = rows, environments, out
        self.left = left  # seconds of the budget
        self.record, self.figures, self.logs = out / "results.jsonl", out / "figures.jsonl", out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.version = told(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
        self.gpu = told(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
        self.notes: dict[str, str] = {}

    def run(self, again: bool) -> int:
        """Run what is left to do in the time that is left. 1 if a row failed."""
        rows = order(self.rows, results.read(self.record), again)
        self.summary()
        self.notes = go(rows, self.left, self.obstacle, self.attempt, self.done)
        print("\n" + self.summary())
        return results.exit_status(self.rows, results.read(self.record))

    def obstacle(self, row: Row) -> str:
        """Why a row cannot be run on this machine."""
        if row.gpus > 1 and row.gpus > (there := len(self.gpu.split("; "))):
            return f"it needs {row.gpus} GPUs, and there are not more than {there}"
        if row.part == "sanitizer" and shutil.which("compute-sanitizer") is None:
            return "compute-sanitizer is not installed"
        if row.part == "direct" and not (self.environments.wheels / UCX_FILE).exists():
            return f"{UCX_FILE} is not among the wheels"
        return ""

    def attempt(self, row: Row, limit: float) -> Result:
        """Run a row; its output stays in a file of its own."""
        print(f"== {row.name} (at most {limit:.0f} s)", flush=True)
        given, usual = min(LIMIT, self.left()), LIMIT
        outcome = self.environments.make(row.library, given)
        if outcome.status == PASSED:
            given, usual = min(limit, self.left()), row.limit
            outcome = self.outcome(row, given)
        # Tests that are still running when the row's time is nearly over end themselves, with their stacks.
        was_ended = outcome.status == TIMEOUT or (outcome.status == FAILED and "Timeout (" in outcome.output)
        cut = was_ended and given < usual
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        last = () if outcome.status == PASSED else last_lines(outcome.output)
        seconds = round(outcome.seconds, 1)
        return Result(row.name, outcome.status, seconds, date, self.version, self.gpu, cut, last)

    def outcome(self, row: Row, limit: float) -> Outcome:
        """Run a row's command. Tests that were all skipped have not passed."""
        ucx = self.environments.ucx() if row.part == "direct" else Path()
        words = command(row, self.environments.place / row.library, limit, self.figures)
        log = self.logs / (re.sub(r"\W+", "-", row.name) + ".txt")
        outcome = run(words, ROOT, settings(row, ucx), limit, log)
        if row.tests and outcome.status == PASSED and not re.search(r"[1-9]\d* passed", outcome.output):
            return outcome._replace(status=FAILED, output=outcome.output + "\nno test passed\n")
        return outcome

    def done(self, row: Row, result: Result) -> None:
        """Show and keep a result at once: a limit from outside may end this program at any time."""
        print("\n".join([*result.last, f"{result.status}, {result.seconds:.0f} s"]), flush=True)
        results.append(self.record, result)
        self.summary()

    def summary(self) -> str:
        """Write summary.md from what is known by now."""
        about = f"GPUs now: {self.gpu or 'none found'}; code now: {self.version or 'version unknown'}"
        warnings = figures.below(results.lines(self.figures))
        text = results.summary(about, self.rows, results.read(self.record), self.notes, warnings)
        (self.out / "summary.md").write_text(text, encoding="utf-8")
        return text


def told(command: list[str]) -> str:
    """What a command prints, on one line; nothing if it is not there, or fails."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(answer.split("\n")).strip("; ")


def _words(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Reads words, separated by commas, of those known."""

    def words(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := sorted(set(chosen) - set(known)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return chosen

    return words


def _ranks(text: str) -> list[int]:
    """Reads numbers of ranks."""
    numbers = [int(each) for each in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("numbers of ranks begin at 1")
    return numbers


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends, too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder: dict[str, Any] = {"type": Path, "metavar": "FOLDER"}
    wheels = ROOT / "gpu-wheels"
    parser.add_argument("--prepare", **folder, nargs="?", const=wheels, help="fetch wheels there, and end")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine with GPUs")
    parser.add_argument("--wheels", **folder, default=wheels, help="what --prepare has fetched (gpu-wheels)")
    parser.add_argument("--environments", **folder, default=ROOT / "gpu-environments", help="(gpu-environments)")
    parser.add_argument("--out", **folder, default=ROOT / "gpu-check-results", help="(gpu-check-results)")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="of all rows together (540)")
    parser.add_argument("--again", action="store_true", help="run rows that passed, too")
    parser.add_argument("--only", type=_words(PARTS), default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--ranks", type=_ranks, default=[1, 2, 3, 4, 8], help="for the tests (1,2,3,4,8)")
    known = ",".join(LIBRARIES)
    parser.add_argument("--libraries", type=_words(LIBRARIES), default=list(LIBRARIES), help=f"for the tests ({known})")
    options = parser.parse_args(arguments)
    if options.prepare:
        prepare(options.prepare, options.python)
        return 0
    if not options.wheels.is_dir():
        parser.error(f"--wheels: no folder {options.wheels}; --prepare makes it where there is a network")
    if not found("cupy"):
        parser.error(f"{sys.executable} cannot import CuPy: run this with a Python that can")
    rows = select(options.only, options.libraries, options.ranks)
    environments = Environments(options.environments.resolve(), options.wheels.resolve())
    check = Check(rows, environments, options.out.resolve(), lambda: options.budget - (time.monotonic() - begin))
    return check.run(options.again)
