"""The lab as a machine of the model: four emulated hosts with links of 200 Mbit/s (docs/lab.md).

    python scripts/lab_machine.py [--into hiercoll/model/machines]

Writes lab.json. The measurements are those of three runs of

    scripts/lab run -l 4x4 --env .venv/mpich -- hiercoll calibrate --machine lab.json --seconds 0.5

(docs/lab/calibrate-mpich-4x4-*.jsonl), of each the median of the three: processes share two cores, and runs differ by
up to a factor of 2 in latencies. The machine is not fitted to times of collectives; how far those of the lab's benches
with the same MPI library are from it is written beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from hiercoll.algorithms import REGISTRY
from hiercoll.model.calibration import Key, Notes, Sample, Setting, analyse
from hiercoll.model.machine import SHIPPED, Machine
from hiercoll.tools.predicting import forecast
from hiercoll.topology import parse_layout

LAB = Path(__file__).resolve().parents[1] / "docs" / "lab"
RUNS = tuple(f"calibrate-mpich-4x4-{number}.jsonl" for number in (1, 2, 3))
BENCHES = "bench-mpich-*.jsonl"
VERSIONS = "2026-11-23, MPICH 5.0.2, mpi4py 4.1.2, Python 3.11.7, two cores, links of 200 Mbit/s"


def setting(path: Path) -> Setting:
    """Where a run took place, as its first line says."""
    with path.open(encoding="utf-8") as file:
        first = json.loads(file.readline())
    del first["hiercoll"]
    return Setting(**{**first, "caches": tuple(first["caches"])})


def pooled() -> dict[Key, Sample]:
    """Each measurement, with the median of the runs."""
    runs = [Notes(LAB / name, setting(LAB / name)).samples for name in RUNS]
    return {key: replace(each, median=median(run[key].median for run in runs)) for key, each in runs[0].items()}


def ratios(machine: Machine) -> Iterator[float]:
    """Measured / predicted, of each schedule that the benches timed by public calls, one at a time."""
    for path in sorted(LAB.glob(BENCHES)):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            subject, known = row["subject"], REGISTRY.get(row["collective"], {})
            if row["timing"] == "single" and subject["algorithm"] in known:
                entry = known[subject["algorithm"]]
                topology = parse_layout(row["layout"])
                [said], _ = forecast([(entry, subject["params"])], topology, machine, [row["size"]])
                yield row["median"] / said.seconds


def lab() -> Machine:
    """The machine, beside what the benches say of it."""
    about = setting(LAB / RUNS[0])
    sources = (f"docs/lab: {', '.join(RUNS)}, medians of the three ({VERSIONS})", f"spread: docs/lab/{BENCHES}")
    text = f"{about.hosts} emulated hosts ({about.layout}) on two cores, links of 200 Mbit/s; measured with {about.mpi}"
    machine = analyse(pooled(), about).machine("lab", about, sources, text)
    found = np.array(list(ratios(machine)))
    off = np.abs(1 / found - 1)
    low, high, middle, most = (
        float(f"{x:.3g}") for x in (*np.quantile(found, (0.1, 0.9)), *np.quantile(off, (0.5, 0.9)))
    )
    quality = {"held out rows": float(len(found)), "held out median": middle, "held out p90": most}
    return replace(machine, spread=(low, high), fitted=quality)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--into", type=Path, default=SHIPPED, help="folder of the file")
    machine, path = lab(), parser.parse_args().into / "lab.json"
    path.write_text(machine.to_json(), encoding="utf-8")
    print(path, machine.fitted, machine.spread)


if __name__ == "__main__":
    main()
