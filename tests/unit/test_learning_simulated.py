"""scripts/learning_simulated.py: jobs that learn on a clock of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import click
import pytest
from click.testing import CliRunner

from hiercoll.tables import NATIVE_VARIANT, Variant
from hiercoll.tuning import learning

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import learning_simulated  # noqa: E402
from learning_simulated import UNKNOWN, Size, main  # noqa: E402

TABLE = str(ROOT / "docs/lab/table-mpich-4x4.json")


def lines(*given: str) -> list[str]:
    result = CliRunner().invoke(main, [TABLE, *given], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_jobs_are_the_same_each_time() -> None:
    """And learn: fewer calls find less, and the clock is theirs alone."""
    few, many = (["--jobs", "2", "--calls", calls] for calls in ("16", "150"))
    shown = lines(*many)
    assert shown == lines(*many) and len(shown) == 2
    assert shown[0].split("found")[1] == shown[1].split("found")[1]  # of one table, and of all
    before, after = (float(each[0].split("found")[1].split("%")[0]) for each in (lines(*few), shown))
    assert before < after
    assert learning.perf_counter is perf_counter


def test_constants_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are restored here by hand, as they are changed for the whole process."""
    monkeypatch.setattr(learning, "CROWD", learning.CROWD)
    learning_simulated.change("CROWD=5")
    assert learning.CROWD == 5 and isinstance(learning.CROWD, int)


@pytest.mark.parametrize("setting", ["CROWD", "CROWD=five", "NOTHING=5", "perf_counter=5", "="])
def test_no_such_constant(setting: str) -> None:
    """It is said what was expected."""
    with pytest.raises(click.UsageError, match=r"expected NAME=NUMBER"):
        learning_simulated.change(setting)


def test_what_was_not_measured_is_like_the_most_similar() -> None:
    """Of the same algorithm; where its memory is counts for more than anything else."""
    private, shared = (
        Variant("grouped", {"form": "lane", "flows": 0, "memory": each}) for each in ("private", "shared")
    )
    size = Size(
        "alltoall", 1e-3, {private.key: 0.9, shared.key: 0.5, NATIVE_VARIANT.key: 1.0}, 0.5, [NATIVE_VARIANT],
        [private, shared, NATIVE_VARIANT],
    )  # fmt: skip
    assert size.ratio(Variant("grouped", {"form": "share", "flows": 4, "memory": "shared"})) == 0.5
    assert size.ratio(Variant("grouped", {"form": "lane", "flows": 4, "memory": "private"})) == 0.9
    assert size.ratio(Variant("pairwise", {})) == UNKNOWN and size.ratio(NATIVE_VARIANT) == 1.0
