"""The tests of the compiled engine with AddressSanitizer and UndefinedBehaviorSanitizer.

    python scripts/sanitize.py [--ranks 1,2,3] [ARGUMENTS OF PYTEST ..]

Builds the engine anew in a copy of the package, and runs tests/unit/test_compiled.py and tests/mpi with it. Needs gcc.
Leaks are not looked for: Python and MPI libraries leave some at their end. Exit status 1 if a test fails, or a
sanitizer finds something, which ends the process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c11", "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fPIC", "-shared"]
LIMITED = ["-DPy_LIMITED_API=0x030B0000"] if sys.version_info >= (3, 11) else []
SAID = "import hiercoll.runtime._engine as engine; print(engine.__file__)"


def library(name: str) -> str:
    """Where gcc has a library of its own."""
    command = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Build and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,3")
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "hiercoll"
        shutil.copytree(HERE / "hiercoll", copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        runtime, include = copy / "runtime", sysconfig.get_path("include")
        built = ["-o", str(runtime / "_engine.abi3.so"), *map(str, runtime.glob("*.c")), "-ldl"]
        subprocess.run(["gcc", *FLAGS, *LIMITED, f"-I{include}", *built], check=True)
        environment = {
            **os.environ, "PYTHONPATH": folder, "HIERCOLL_ENGINE": "c",
            "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
            "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        }  # fmt: skip
        # Not from here: the package in the working directory would come first.
        said = subprocess.run([sys.executable, "-c", SAID], cwd=folder, env=environment, capture_output=True, text=True)
        assert said.stdout.startswith(folder), said.stdout + said.stderr
        unit = [str(Path(sys.executable).with_name("pytest")), "-q", "-p", "no:cacheprovider"]
        unit += ["-c", str(HERE / "pyproject.toml"), "--rootdir", str(HERE), str(HERE / "tests/unit/test_compiled.py")]
        launch = [sys.executable, str(HERE / "tests/mpi/launch.py"), "--ranks", options.ranks, "--timeout", "3600"]
        codes = [
            subprocess.run(command, cwd=folder, env=environment).returncode for command in (unit, [*launch, *rest])
        ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
