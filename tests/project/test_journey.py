"""docs/journey.md names real files and real symbols, and its figures are those of the demo run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgefl.config.profiles import load_run
from edgefl.models.checkpoints import initial_parts
from edgefl.plan.compile import compile_run
from edgefl.protocol.chunks import DEFAULT_CHUNK_BYTES, DEFAULT_CREDIT
from edgefl.protocol.tensors import encode_part
from edgefl.storage.partials import chunk_count

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


def test_the_story_goes_through_ten_files_in_order() -> None:
    sections = re.findall(r"(?m)^## (\d+)\. .+: `([\w/]+\.py)`$", TEXT)
    assert [int(number) for number, _ in sections] == list(range(1, 11))
    assert len({file for _, file in sections}) == 10
    assert all((ROOT / file).is_file() for _, file in sections)


def test_the_figures_are_those_of_the_demo() -> None:
    config, recipe = load_run("demo")
    plan = compile_run(
        config, recipe, run="demo", shapes={"acc": (20, 3), "gyro": (20, 3)}, label_names=("walking", "running")
    )
    part = dict(initial_parts(plan.model, plan.seed))["acc/stage3"]
    size = len(encode_part(part))
    assert len(part) == 12
    assert "twelve tensors" in TEXT
    assert f"{size:,} bytes" in TEXT
    assert chunk_count(size, DEFAULT_CHUNK_BYTES) == 9
    assert "nine chunks" in TEXT
    assert f"at most {DEFAULT_CHUNK_BYTES:,} bytes" in TEXT
    assert f"credit={DEFAULT_CREDIT}" in TEXT
    stage = plan.stages[2]
    assert "acc/stage3" in stage.trained
    assert {"acc/stage1", "acc/stage2"} <= set(stage.present) - set(stage.trained)
    assert (stage.rounds, config.round.deadline_s) == (2, 120)
