"""Errors as values: what programs that are spread over processes do with them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from hiercoll import errors
from hiercoll.errors import HiercollError
from hiercoll.tools import proving

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HiercollError)]
FIELDS = {
    errors.MachineError: ("file", "field", "expected", "got"),
    errors.TableError: ("file", "field", "expected", "got"),
    errors.VerificationError: (("one finding", "another"),),
}


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_pickled(kind: type[HiercollError]) -> None:
    """They come out as they went in: to other ranks, or out of another process."""
    fields = ("argument", "expected", "got", 3) if issubclass(kind, errors.ArgumentError) else ("text",)
    error = kind(*FIELDS.get(kind, fields))
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind and str(found) == str(error)
    assert vars(found) == vars(error) and found.args == error.args


def _noted(case: proving.Case) -> proving.Outcome:
    with Path(case.algorithm).open("a") as file:
        file.write(".")
    if case.layout == "1x2":
        raise KeyboardInterrupt
    return proving.Outcome(case)


def test_proofs_that_are_interrupted_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that wait for a process are not begun."""
    monkeypatch.setattr(proving, "decide", _noted)
    cases = [proving.Case("alltoall", str(tmp_path / "noted"), {}, "1x2")] * 5000
    with pytest.raises(KeyboardInterrupt):
        list(proving.decide_all(cases, 2))
    assert len((tmp_path / "noted").read_text()) < 2500
