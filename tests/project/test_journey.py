"""docs/journey.md names real files and real symbols."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "journey.md").read_text(encoding="utf-8")
STEPS = re.findall(r"`([\w/]+\.py)`\s+`(\w+)`", TEXT)


def test_the_journey_names_enough_places() -> None:
    assert len(STEPS) >= 20


@pytest.mark.parametrize(("file", "symbol"), STEPS)
def test_each_place_exists(file: str, symbol: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"(?m)^\s*(?:async )?(?:def|class) {symbol}\b", source), f"{file} has no {symbol}"


def test_every_file_named_exists() -> None:
    names = re.findall(r"`((?:edgefl|coordinator|device_agent|profiles)/[\w/.-]+\.(?:py|yaml))`", TEXT)
    assert len(names) >= 20
    for name in names:
        assert (ROOT / name).is_file(), name
