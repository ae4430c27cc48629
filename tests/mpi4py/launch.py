"""Run mpi4py's own tests of collectives with hiercoll's communicators in place of its own.

    python tests/mpi4py/launch.py --ranks 1,2,3 [--timeout 600] [--arrays ArrayNumPy]

The tests loop over kinds of arrays, most of which are written in Python there, and over all roots and counts: on many
ranks, ``--arrays`` names the kinds that are to be left, as mpi4py's ``arrayimpl`` calls them.

The tests come with mpi4py's source distribution of the installed version, which pip fetches into a folder beside this
environment. More than one rank are on two virtual nodes, or on those of ``HIERCOLL_NODES``. Passes if all of them do,
and calls of each kind went through hiercoll.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "mpi"))
from launch import mpiexec, vendor

KINDS = "buf vec nb_buf nb_vec pr_buf pr_vec ngh_buf obj obj_inter buf_inter vec_inter"
MODULES = (*(f"test_cco_{kind}" for kind in KINDS.split()), "test_util_pkl5")
SERVED = ("alltoall", "allgather", "allgatherv", "alltoallv", "bcast", "allreduce", "reduce_scatter", "reduce")
SERVED += ("gather", "scatter", "alltoallw", "barrier")
REQUESTS = ("ialltoall", "iallgather", "iallgatherv", "alltoall_init", "allgather_init", "allgatherv_init")
REQUESTS += ("ibcast", "bcast_init", "ialltoallw", "alltoallw_init", "ibarrier", "barrier_init")


def sources() -> Path:
    """The folder of mpi4py's tests; fetched if it is not there."""
    number = version("mpi4py")
    folder = Path(__file__).resolve().parents[2] / ".venv" / "mpi4py-sources"
    tests = folder / f"mpi4py-{number}" / "test"
    if not tests.exists():
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "mpi4py", "-d", str(folder)]
        subprocess.run([*fetch, f"mpi4py=={number}"], check=True)
        shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder)
    return tests


def run_rank(tests: Path, kinds: list[str]) -> None:
    """What each rank does, with arrays of these ``kinds``; of all without one."""
    import unittest

    from mpi4py import MPI
    from mpi4py.util import pkl5

    from hiercoll import settings
    from hiercoll.calls import dropin

    settings.forced["alltoallw"] = "pairwise", {"exchange": "rotation"}  # what is learned would serve few of its calls
    settings.forced["barrier"] = "dissemination", {"radix": 3}  # likewise: of its requests there are few
    os.environ["HIERCOLL_LEARN"] = "online"  # so that alltoallv, which no table decides, is served, too
    os.environ["HIERCOLL_LEARNED"] = "/proc/learned"  # nothing from earlier jobs
    MPI.COMM_WORLD = dropin.drop_in(MPI.COMM_WORLD)  # type: ignore[misc]
    MPI.COMM_SELF = dropin.drop_in(MPI.COMM_SELF)  # type: ignore[misc]
    pkl5.Intracomm = dropin.Pkl5Intracomm  # type: ignore[misc]
    calls = dropin.Calls()
    dropin.observe(calls)
    sys.path.insert(0, str(tests))
    os.chdir(tests)
    if kinds:
        import arrayimpl  # mpi4py's

        arrayimpl.ArrayBackends[:] = [kind for kind in arrayimpl.ArrayBackends if kind.__name__ in kinds]
        assert len(arrayimpl.ArrayBackends) == len(kinds), f"{kinds} are not all among mpi4py's kinds"
    suite = unittest.defaultTestLoader.loadTestsFromNames(MODULES)
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=0).run(suite)
    bad = [str(test) for test, _ in [*result.failures, *result.errors]] + [
        str(test) for test in result.unexpectedSuccesses
    ]
    everyone = MPI.COMM_WORLD.gather((result.testsRun, bad, dict(calls)))
    if everyone is not None:
        wrong = [test for _, tests_of_rank, _ in everyone for test in tests_of_rank]
        print("RESULT " + json.dumps({"run": everyone[0][0], "wrong": wrong, "calls": everyone[0][2]}), flush=True)


def main() -> int:
    """Launch for each number of ranks; 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one launch")
    parser.add_argument("--arrays", default="", help="kinds of arrays, separated by commas (default: all)")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, list(filter(None, options.arrays.split(","))))
        return 0
    library, tests, good, nodes = vendor(), sources(), True, os.environ.get("HIERCOLL_NODES")
    for ranks in map(int, options.ranks.split(",")):
        if ranks > 1:  # on two nodes, else mpi4py serves all messages of objects
            os.environ["HIERCOLL_NODES"] = nodes or f"{ranks // 2}+{ranks - ranks // 2}"
        code, output = mpiexec(
            library, ranks, options.timeout, [__file__, "--rank", str(tests), "--arrays", options.arrays]
        )
        lines = [line.partition("RESULT ")[2] for line in output.splitlines()]  # others write, too
        line = next((line for line in lines if line.startswith("{")), None)
        result = json.loads(line) if line else None
        served = result is not None and (ranks == 1 or all(result["calls"].get(name) for name in (*SERVED, *REQUESTS)))
        if code or result is None or result["wrong"] or not served:
            print(f"{library}, {ranks} ranks: WRONG, exit status {code}\n{output[-6000:]}")
            good = False
        else:
            print(
                f"{library}, {ranks} ranks: {result['run']} of mpi4py's tests passed; served: {result['calls']}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
