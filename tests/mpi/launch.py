"""Run the MPI tests on the MPI library of this environment.

    python tests/mpi/launch.py --ranks 1,2,8 [pytest arguments]

Starts mpiexec once per number of ranks, with a time limit. Passes only if every rank's
pytest passes, at least one test ran, and nothing was printed apart from pytest's own
output: an MPI library that complains at exit fails the run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
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
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "0",  # ranks outnumber cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}


def run_rank(output: Path, arguments: list[str]) -> int:
    """What each rank does: pytest, its output to a file of its own."""
    import pytest
    from mpi4py import MPI

    with (output / f"{MPI.COMM_WORLD.rank}.txt").open("w") as file, contextlib.redirect_stdout(file):
        return int(pytest.main(["-q", "--with-mpi", "-p", "no:cacheprovider", str(HERE), *arguments]))


def vendor() -> str:
    """Name of the MPI library here."""
    code = "from mpi4py import MPI; print(MPI.get_vendor()[0])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def launch(library: str, ranks: int, limit: float, arguments: list[str]) -> dict[str, int] | None:
    """Counts of outcomes on rank 0; None if anything is wrong, which is printed."""
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    with tempfile.TemporaryDirectory() as folder:
        command = [mpiexec, *FLAGS.get(library, []), "-n", str(ranks)]
        command += [sys.executable, __file__, "--rank-output", folder, *arguments]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **SETTINGS},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit,
            )
            code, noise = done.returncode, done.stdout.strip()
        except subprocess.TimeoutExpired as expired:
            code, noise = -1, f"no end after {limit:.0f} s\n{expired.stdout or ''}"
        texts = [path.read_text() for path in sorted(Path(folder).iterdir(), key=lambda p: int(p.stem))]
    last = texts[0].strip().splitlines()[-1] if texts else "no output"
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


def main() -> int:
    """Launch for each number of ranks; 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one launch")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.rank_output:
        return run_rank(options.rank_output, arguments)
    library = vendor()
    results = [launch(library, int(ranks), options.timeout, arguments) for ranks in options.ranks.split(",")]
    passed = sum(counts["passed"] for counts in results if counts)
    failed = sum(counts is None for counts in results)
    skipped = sum(counts.get("skipped", 0) for counts in results if counts)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
