"""A plugin of pytest for mutants: the fastest tests first, and no shrinking of examples: a mutant dies early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import Phase, settings

#: Where mutmut keeps how long each test took, seen from where it runs the tests.
STATS = Path("mutmut-stats.json")


def pytest_configure() -> None:
    """That there is a failing example is enough: it need not be the smallest."""
    kept = settings.get_profile("edgefl")
    settings.register_profile("mutants", kept, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    settings.load_profile("mutants")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by duration; tests that were never timed come first."""
    if STATS.is_file():
        took = json.loads(STATS.read_text(encoding="utf-8"))["duration_by_test"]
        items.sort(key=lambda item: took.get(item.nodeid, 0.0))
