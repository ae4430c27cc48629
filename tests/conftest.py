"""What the tests of all folders have in common.

No test learns from an earlier job, nor teaches a later one: nobody can write where they keep what they learn.
"""

from __future__ import annotations

import os
from collections import defaultdict
from zlib import crc32

import pytest

os.environ.setdefault("HIERCOLL_LEARNED", "/proc/learned")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--thin N``: one case of N of each test that has several, always the same ones."""
    parser.addoption("--thin", type=int, default=1, metavar="N", help="one case of N of each test that has several")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases whose names come first by checksum: a mixture of all parameters' values."""
    thin = config.getoption("--thin")
    cases: dict[str, list[str]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item.nodeid)
    kept = {
        nodeid
        for ids in cases.values()
        for nodeid in sorted(ids, key=lambda each: crc32(each.encode()))[: -(-len(ids) // thin)]
    }
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
