"""The examples run, on small sizes, and find their data right; and say so where data are wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import WORLD, layouts
from mpi4py import MPI

import hiercoll

FOLDER = Path(__file__).parents[2] / "examples"
SIZE = WORLD.size
CASES = [
    ("fft3d", f"--steps 2 --size {2 * SIZE} {SIZE} {3 * SIZE}"),  # Alltoall
    ("fft3d", "--steps 2 --size 7 11 13"),  # Alltoallv
    ("fft3d", "--steps 1 --size 1 2 3"),  # ranks without data
    ("moe", "--steps 3 --size 50 --width 7"),
    ("moe", "--steps 3 --size 2 --width 1"),
    ("moe", "--steps 1 --size 0"),
    ("kfac", "--steps 2 --size 12 --layers 9"),
    ("kfac", "--steps 2 --size 5 --layers 1"),
    ("conjugate_gradient", "--size 16 --steps 5"),
    ("conjugate_gradient", "--size 8 --steps 3 --algorithm rabenseifner"),
    ("conjugate_gradient", "--size 8 --steps 3 --algorithm all_pairs"),
    ("gradients", "--width 8 --steps 2 --batch 17"),
    ("gradients", "--width 3 --steps 2 --layers 3 --per-bucket 1 --algorithm ring"),
]


def load(name: str) -> ModuleType:
    """An example as a fresh module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_world(comm: MPI.Intracomm, name: str, arguments: str) -> None:
    """On the machine as it is."""
    assert load(name).main(arguments.split(), comm) is True


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_virtual_nodes(on_layout: Callable[[str], MPI.Intracomm], name: str, arguments: str, layout: str) -> None:
    """On several nodes."""
    assert load(name).main(arguments.split(), on_layout(layout)) is True


def spoiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """A collective after which one rank finds nothing in its buffer, unless that is for counts."""

    def wrong(comm: MPI.Intracomm, send: Any, recv: Any) -> None:
        call(comm, send, recv)
        array = recv[0] if isinstance(recv, list) else recv
        if comm.rank == comm.size - 1 and array.dtype.kind in "cf":
            array[:] = 0

    return wrong


@pytest.mark.parametrize("name", ["fft3d", "moe"])
def test_wrong_data(comm: MPI.Intracomm, name: str) -> None:
    """All ranks leave, if one has wrong data."""
    example = load(name)
    example.WAYS["hiercoll"] = (spoiled(hiercoll.alltoall), spoiled(hiercoll.alltoallv))
    arguments = dict(reversed(CASES))[name]
    with pytest.raises(SystemExit, match=f"{name}: wrong data in step 0 with hiercoll"):
        example.main(arguments.split(), comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("name", "size"), [("conjugate_gradient", "--size=8"), ("gradients", "--width=4")])
def test_wrong_sums(comm: MPI.Intracomm, name: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same."""
    allreduce = hiercoll.allreduce

    def other(comm: MPI.Intracomm, send: Any, recv: Any, **how: Any) -> None:
        allreduce(comm, send, recv, **how)
        recv += comm.size

    monkeypatch.setattr(hiercoll, "allreduce", other)
    with pytest.raises(SystemExit, match=f"{name}: other"):
        load(name).main(["--steps=3", size], comm)


def test_wrong_inverses(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same."""
    plan_of = hiercoll.allgatherv_init

    def other(comm: MPI.Intracomm, send: Any, recv: Any) -> Any:
        return plan_of(comm, send, [recv[0] if comm.rank else recv[0].copy(), recv[1]])

    monkeypatch.setattr(hiercoll, "allgatherv_init", other)
    with pytest.raises(SystemExit, match="kfac: wrong data in step 0 with hiercoll"):
        load("kfac").main(["--steps", "1", "--size", "4"], comm)
