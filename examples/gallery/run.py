"""Programs that know nothing of hiercoll, run as they are: plain, and twice through ``python -m hiercoll``.

    python examples/gallery/run.py --environment .venv/gallery-mpich [--lab 4x4] [--ranks 4] [NAME ...]

The environment has mpi4py-fft, shenfun and pylops-mpi, or HeAT (see the Makefile, ``make gallery``). Each program runs
three times: plain, through hiercoll with nothing known, and again with what the first time has learned. Outputs are
compared, but for their order (ranks print when they come to it) and for times. Prints a table in Markdown: seconds
from start to end (the median of ``--repeat``, of plain runs with the least and the most) and, by reports in two runs
more, the seconds in collectives (the slowest rank's, site by site) of the MPI library and of the learned run, what
served the calls, and why any were left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FFT, MPI4PY, SHENFUN = "mpi4py_fft-2.0.6", "mpi4py-4.1.2", "shenfun-4.3.0"
HEAT, HEAT_URL = "v1.8.0", "https://github.com/helmholtz-analytics/heat.git"
PATIENCE = 1800  # seconds that a program may take
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
# With the spaces that fill their columns; minutes are in parentheses, if there are any.
FIGURES = re.compile(r" *\(\d+:\d\d:\d\d\)| *\d+(\.\d+)?(e[+-]\d+)?")


class Program(NamedTuple):
    """A script with arguments, where it is to run; ``is_timed``: it prints times, which differ."""

    name: str
    words: tuple[str, ...]
    is_timed: bool = False


def programs(sources: Path, packages: Path) -> list[Program]:
    """All of the gallery that the environment can run."""
    start = Program("nothing: to start and to end", ("-c", "from mpi4py import MPI; import numpy"))
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull)  # not by the settings of this project
    if (packages / "heat").exists():
        tests = sources / "heat" / "tests" / "core"
        names = ("test_communication", "test_manipulations", "linalg/test_basics", "linalg/test_qr")
        return [start, *(Program(f"HeAT {name}", (*pytest, str(tests / f"{name}.py")), True) for name in names)]
    tests, demos = sources / FFT / "tests", sources / MPI4PY / "demo"
    flow = (str(HERE / "taylor_green.py"), "--number", "64", "--steps", "20")
    inverse, examples = (*pytest, "--with-mpi"), packages / "examples"
    return [
        start,
        *(
            Program(f"mpi4py-fft test_{name}", (str(tests / f"test_{name}.py"),))
            for name in ("pencil", "darray", "mpifft")
        ),
        Program("Taylor-Green, slabs", flow),
        Program("Taylor-Green, pencils", (*flow, "--pencils")),
        *(
            Program(f"shenfun test_{name}", (*inverse, str(sources / SHENFUN / "tests" / f"test_{name}.py")), True)
            for name in ("curl", "fourier", "lagrangian_particles")
        ),
        *(
            Program(f"pylops-mpi test_{name}", (*inverse, str(packages / "tests" / f"test_{name}.py")), True)
            for name in ("distributedarray", "solver", "ffts", "matrixmult", "halo")
        ),
        *(Program(f"pylops-mpi plot_{name}", (str(examples / f"plot_{name}.py"),), True) for name in ("cgls", "ffts")),
        *(
            Program(f"mpi4py demo osu_{name}", (str(demos / f"osu_{name}.py"),), True)
            for name in ("alltoall", "alltoallv", "allgather", "bcast", "gather", "scatter")
        ),
    ]


def fetch(environment: Path, packages: Path, sources: Path) -> None:
    """The programs' own sources."""
    if (packages / "heat").exists():
        if not (sources / "heat").exists():
            clone = ["git", "clone", "-q", "--depth", "1", "--branch", HEAT, HEAT_URL]
            subprocess.run([*clone, str(sources / "heat")], check=True)
            shutil.rmtree(sources / "heat" / "heat")  # the one that is installed is tested
        return
    for package, folder in (("mpi4py-fft==2.0.6", FFT), ("mpi4py==4.1.2", MPI4PY), ("shenfun==4.3.0", SHENFUN)):
        if not (sources / folder).exists():
            pip = [str(environment / "bin" / "python"), "-m", "pip", "download", "-qq", "--no-deps"]
            own = ["--no-binary", "mpi4py-fft,mpi4py,shenfun", "--no-build-isolation", "-d", str(sources)]
            subprocess.run([*pip, *own, package], check=True)
    for packed in sources.glob("*.tar.gz"):
        shutil.unpack_archive(packed, sources)


class Runner(NamedTuple):
    """How programs are started; ``options``: of ``python -m hiercoll``."""

    environment: Path
    lab: str
    ranks: int
    options: tuple[str, ...] = ()

    def run(self, words: Sequence[str], learned: Path, settings: Mapping[str, str] = NO_SETTINGS) -> tuple[float, str]:
        """Seconds, and what was printed. Raises RuntimeError."""
        python = str(self.environment / "bin" / "python")
        if self.lab:
            start = [str(ROOT / "scripts" / "lab"), "run", "--layout", self.lab, "--env", str(self.environment), "--"]
            command = [*start, "python", *words]
        else:
            command = [str(self.environment / "bin" / "mpiexec"), "-n", str(self.ranks), python, *words]
        begin = time.perf_counter()
        done = subprocess.run(
            command,
            env={
                **os.environ,
                "HIERCOLL_LEARNED": str(learned),
                "OMP_NUM_THREADS": "1",
                "MPLBACKEND": "Agg",
                "OMPI_ALLOW_RUN_AS_ROOT": "1",  # in a container
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                **settings,
            },
            cwd=learned.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"[-4000:]
            )
        return seconds, done.stdout


class Reported(NamedTuple):
    """What a report says of all sites: ``seconds`` of the slowest rank; ``ran`` and ``left`` in words."""

    seconds: float
    ran: str
    left: str


def reported(report: Path) -> Reported:
    """The sum over sites."""
    ran, left = Counter[str](), Counter[str]()
    sites = json.loads(report.read_text())["sites"]
    for site in sites:
        left.update(site["left"])
        for name, calls in site["ran"].items():
            ran[f"{site['collective']} {name.split(' ')[0]}"] += calls
    words = ["; ".join(f"{calls} {name}" for name, calls in each.most_common(4)) for each in (ran, left)]
    return Reported(sum(site["seconds"]["most"] for site in sites), *words)


def letters(text: str) -> Counter[str]:
    """What was printed, whatever rank came first, and between which letters of another one's."""
    return Counter("".join(text.split()))


def row(program: Program, runner: Runner, repeat: int) -> str:
    """A program's line of the table. Raises RuntimeError where outputs differ."""
    with tempfile.TemporaryDirectory(prefix="hiercoll-gallery-") as folder:
        learned, report = Path(folder) / "learned", Path(folder) / "report.json"
        through = ("-m", "hiercoll", *runner.options)
        ways = {"plain": (), "first": through, "second": through}
        times, texts = dict[str, list[float]](), dict[str, str]()
        for _ in range(repeat):  # in turns, each time from the beginning
            shutil.rmtree(learned, ignore_errors=True)
            for name, how in ways.items():
                seconds, text = runner.run([*how, *program.words], learned)
                times.setdefault(name, []).append(seconds)
                texts[name] = FIGURES.sub("", text) if program.is_timed else text
                if letters(texts[name]) != letters(texts["plain"]):
                    raise RuntimeError(f"{program.name}: printed\n{texts['plain']}\nplain, and\n{texts[name]}")
        told = []
        for settings in ({"HIERCOLL_DISABLE": "1"}, {}):
            words = [*through, "--report=sync", "--report-file", str(report), *program.words]
            runner.run(words, learned, settings)
            told.append(reported(report))
        middle = {name: median(each) for name, each in times.items()}
        figures = [f"{middle[name]:.2f}" for name in ways]
        if repeat > 1:
            figures[0] += f" ({min(times['plain']):.2f} to {max(times['plain']):.2f})"
        within = " | ".join(f"{each.seconds:.2f}" for each in told)
        ratio = f"{middle['plain'] / middle['second']:.2f}"
        return f"| {program.name} | {' | '.join(figures)} | {ratio} | {within} | {told[1].ran} | {told[1].left} |"


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--lab", default="", metavar="LAYOUT", help="on emulated hosts (scripts/lab)")
    parser.add_argument("--ranks", type=int, default=2, help="where there is no lab")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--options", type=str.split, default=[], help='of python -m hiercoll: "--algorithm A=B"')
    parser.add_argument("names", nargs="*", help="parts of programs' names; default: all")
    options = parser.parse_args()
    environment = options.environment.resolve()
    sources = environment / "sources"
    sources.mkdir(exist_ok=True)
    packages = next((environment / "lib").glob("python*/site-packages"))
    fetch(environment, packages, sources)
    runner, good = Runner(environment, options.lab, options.ranks, tuple(options.options)), True
    heads = ["program", "plain, s", "first, s", "second, s", "plain/second"]
    heads += ["collectives: native, s", "learned, s", "calls ran by", "left to the MPI library, because"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for program in programs(sources, packages):
        if options.names and not any(name in program.name for name in options.names):
            continue
        try:
            print(row(program, runner, options.repeat), flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"| {program.name} | failed | | | | | | | |\n{error}", file=sys.stderr, flush=True)
            good = False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
