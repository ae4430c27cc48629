"""Run the MPI tests on the MPI library of this environment.

    python tests/mpi/launch.py --ranks 1,2,8 [pytest arguments]

Starts mpiexec once per number of ranks, with a time limit. Passes only if every rank's
pytest passes, at least one test ran, and nothing was printed apart from pytest's own
output: an MPI library that complains at exit fails the run. Then the programs beside
this file, which try how jobs end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = {
    "Open MPI": ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "--mca", "osc", "^ucx"]
}
SETTINGS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plug-ins that happen to be installed change nothing
    "PYTEST_PLUGINS": "",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "0",  # ranks outnumber cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "HIERCOLL_LEARNED": "/proc/learned",  # no test learns from another
    "HIERCOLL_TABLE": "model",  # else "auto" would be the MPI library's own wherever a test does not say otherwise
}


def run_rank(output: Path, folder: Path, arguments: list[str]) -> int:
    """What each rank does: pytest, its output to a file of its own."""
    import pytest
    from mpi4py import MPI

    with (output / f"{MPI.COMM_WORLD.rank}.txt").open("w") as file, contextlib.redirect_stdout(file):
        plugins = ["-p", "pytest_mpi", "-p", "no:cacheprovider"]
        return int(pytest.main(["-q", *plugins, "--with-mpi", str(folder), *arguments]))


def vendor() -> str:
    """Name of the MPI library here."""
    code = "from mpi4py import MPI; print(MPI.get_vendor()[0])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def mpiexec(library: str, ranks: int, limit: float, program: list[str]) -> tuple[int, str]:
    """Exit status and all output of a job; -1 if it did not end in time."""
    starter = [str(Path(sys.executable).with_name("mpiexec")), *FLAGS.get(library, []), "-n", str(ranks)]
    job = subprocess.Popen(
        [*starter, sys.executable, *program],
        env={**os.environ, **SETTINGS, "HIERCOLL_LAUNCH_END": str(time.time() + limit)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = job.communicate(timeout=limit)
        return job.returncode, output.strip()
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        return -1, f"no end after {limit:.0f} s\n{output}"


def run_tests(library: str, ranks: int, limit: float, tests: Path, arguments: list[str]) -> dict[str, int] | None:
    """Counts of outcomes on rank 0; None if anything is wrong, which is printed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        code, noise = mpiexec(
            library, ranks, limit, [__file__, "--rank-output", folder, "--tests", str(tests), *arguments]
        )
        texts = [path.read_text() for path in sorted(Path(folder).iterdir(), key=lambda p: int(p.stem))]
    last = texts[0].strip().splitlines()[-1] if any(texts) else "no output"
    print(f"{library}, {ranks} ranks: {last} (wall {time.monotonic() - begin:.0f} s)", flush=True)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if code == 0 and not noise and counts.get("passed") and len(texts) == ranks:
        return counts
    print(f"exit status {code}; printed outside of the tests:\n{noise}\n")
    for rank, text in enumerate(texts):
        if " passed" not in text or "failed" in text or "error" in text:
            print(f"---- rank {rank}\n{text[-6000:]}")
            break
    return None


def run_program(library: str, program: Path) -> bool:
    """A program on 4 ranks: a silent success, or, if its docstring expects it, a report, or a prompt failure."""
    begin = time.monotonic()
    text = program.read_text()
    expect_failure = "Expect: failure" in text
    runner = next(re.finditer(r"Run by: python (.*)", text), ["", ""])[1].split()
    code, noise = mpiexec(library, 4, 60, [*runner, str(program)])
    if "Expect: a report" in text:
        is_fine = "communicators set up" in noise and "Traceback" not in noise
        noise = "" if is_fine else f"no report, or an exception besides\n{noise}"
    good = code > 0 if expect_failure else code == 0 and not noise
    verdict = "as expected" if good else f"WRONG: exit status {code}, printed:\n{noise}\n"
    print(f"{library}, {program.stem}: {verdict} (wall {time.monotonic() - begin:.0f} s)", flush=True)
    return good


def main() -> int:
    """Launch for each number of ranks; 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one launch")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tests", type=Path, default=HERE, help="folder; only the default has programs beside it")
    parser.add_argument("--no-programs", action="store_true", help="only the tests")
    options, arguments = parser.parse_known_args()
    if options.rank_output:
        return run_rank(options.rank_output, options.tests, arguments)
    library = vendor()
    ranks = map(int, options.ranks.split(","))
    results = [run_tests(library, each, options.timeout, options.tests, arguments) for each in ranks]
    paths = [] if options.no_programs else sorted((options.tests / "programs").glob("*.py"))
    programs = [run_program(library, path) for path in paths]
    passed = sum(counts["passed"] for counts in results if counts) + sum(programs)
    failed = sum(counts is None for counts in results) + programs.count(False)
    skipped = sum(counts.get("skipped", 0) for counts in results if counts)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
