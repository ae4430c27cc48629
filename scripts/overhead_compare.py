"""What calls cost in two commits: `overhead.py` of each, taking turns on one machine.

    python scripts/overhead_compare.py OLD [--rounds 5] [--ranks 2] [--json docs/overhead.jsonl]

OLD is a checkout of the other commit (``git worktree add OLD COMMIT``). Each round runs the old commit, the new one,
and the old one again. A figure is the median over rounds; the last column says by how much the old commit differs from
itself within a round, at most. Run it on an otherwise idle machine, with the Python of an environment with MPI.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent.parent


def commit(checkout: Path) -> str:
    """Its short name."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(checkout: Path, ranks: int) -> list[dict[str, Any]]:
    """The records of one run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.jsonl"
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        program = [sys.executable, str(checkout / "scripts/overhead.py"), "--json", str(file)]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "MPIR_CVAR_POLLS_BEFORE_YIELD": "0"}
        subprocess.run([mpiexec, "-n", str(ranks), *program], check=True, env=environment, capture_output=True)
        return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="append the records to this file (JSON Lines)")
    options = parser.parse_args()
    taken: dict[tuple[str, str], dict[str, list[float]]] = {}
    for turn in range(options.rounds):
        for name, checkout in (("old", options.old), ("new", HERE), ("again", options.old)):
            for record in run(checkout, options.ranks):
                record |= {"commit": commit(checkout), "round": turn, "turn": name}
                for subject, seconds in record["seconds"].items():
                    key = (record["timing"], subject)
                    taken.setdefault(key, {}).setdefault(name, []).append(seconds["median"])
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(record) + "\n")
        print(f"round {turn + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(f"{'timing':8}{'subject':46}{'old us':>9}{'new us':>9}{'new/old':>9}{'old/old':>16}")
    for (timing, subject), times in taken.items():
        if set(times) == {"old", "new", "again"}:
            both = [(a + b) / 2 for a, b in zip(times["old"], times["again"], strict=True)]
            ratio = median(new / old for new, old in zip(times["new"], both, strict=True))
            apart = sorted(max(a / b, b / a) for a, b in zip(times["old"], times["again"], strict=True))
            old, new = median(both) * 1e6, median(times["new"]) * 1e6
            print(f"{timing:8}{subject:46}{old:9.2f}{new:9.2f}{ratio:9.2f}   up to {apart[-1]:8.2f}")


if __name__ == "__main__":
    main()
