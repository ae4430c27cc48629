"""The guide: short where it should be, no link leads nowhere, and every setting is in its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hiercoll.collectives import called

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_is_for_the_first_two_minutes() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_site_has_all_pages() -> None:
    listed = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES[1:])


def test_all_settings_are_in_the_table() -> None:
    """And nothing else is: what `settings` reads, and what the command line takes from the environment."""
    source = (ROOT / "hiercoll" / "settings.py").read_text(encoding="utf-8")
    read = set(re.findall(r"``HIERCOLL_([A-Z_]+)\b", source))
    assert read == set(re.findall(r"_(?:text|is_set|switch)\(\"([A-Z_]+)\"\)", source))
    rows = re.findall(r"^\| `HIERCOLL_([A-Z_]+)` \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows)) and set(rows) == read


def test_all_collectives_are_in_the_table() -> None:
    page = (ROOT / "docs" / "collectives.md").read_text(encoding="utf-8")
    for collective in called():
        for name in (collective.name, f"i{collective.name}", f"{collective.name}_init", collective.native):
            assert f"`{name}`" in page, name


def test_all_reasons_for_leaving_a_call_are_in_the_table() -> None:
    """And no others; and calls of a test are left for each of them."""
    source = (ROOT / "hiercoll" / "tools" / "reasons.py").read_text(encoding="utf-8")
    reasons = dict(re.findall(r"^    ([A-Z_]+) = \"(.+)\"$", source, re.MULTILINE))
    page = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| reason | what can be done |\n|---|---|\n")
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    assert len(rows) == len(set(rows)) and set(rows) == set(reasons.values())
    tested = (ROOT / "tests" / "mpi" / "test_report.py").read_text(encoding="utf-8")
    assert set(reasons) <= set(re.findall(r"\bReason\.([A-Z_]+)\b", tested))
