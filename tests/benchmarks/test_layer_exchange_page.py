"""The page of one layer between whole exchanges: its sentence and table by hand, and the page in docs of its lines."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.layer_exchange import (
    LINES,
    PAGE,
    RATES,
    ROUNDS,
    WAYS,
    WHOLE,
    Row,
    due,
    page,
    run_file,
    sentence,
)
from benchmarks.common.result_lines import rows_in

ROOT = Path(__file__).parents[2]


def row(task: str, way: str, seed: int, last: float) -> Row:
    return Row(task, way, seed, {8: 0.5, 16: 0.6, ROUNDS: last}, 2**20, 2**19, 3, 9)


def test_a_gain_is_paired_by_seed_and_a_mean_over_the_periods():
    rows = [row("har", WHOLE, seed, 0.9) for seed in (1, 2)]
    for k, gain in ((2, 0.01), (4, 0.02), (8, 0.03)):
        rows += [row("har", f"nothing, k = {k}", seed, 0.8) for seed in (1, 2)]
        rows += [row("har", f"one layer, k = {k}", seed, 0.8 + gain) for seed in (1, 2)]
    told = sentence(rows, "har")
    assert "+2.0 points (+2.0 to +2.0, 2 seeds) beside exchanging nothing" in told
    assert "-8.0 points (-8.0 to -8.0, 2 seeds) beside whole exchanges" in told
    assert sentence(rows[:2], "har") == ""
    assert "| har | one layer, k = 4 | 82.0 ± 0.0 | -8.0 ± 0.0 | +2.0 ± 0.0 | 1.000 MiB | 0.500 MiB | 2 |" in page(rows)


def test_what_is_there_is_not_run_again():
    every = list(due([], 1))
    assert len(every) == len(RATES) * len(WAYS)
    assert (every[0][0], every[0][1]) not in {(t, w) for t, w, _ in due([row(*every[0], 0.5)], 1)}


def test_a_way_changes_the_repair_alone():
    first, other = (run_file("har", way, 1) for way in ("one layer, k = 4", "nothing, k = 4"))
    assert first["slots"]["repair"] == {"poverty": {"exchange": "layer", "whole_every": 4, "layers": 1}}
    assert {k: v for k, v in first.items() if k != "slots"} == {k: v for k, v in other.items() if k != "slots"}


def test_the_page_is_that_of_its_lines():
    assert (ROOT / "docs" / "results" / PAGE).read_text(encoding="utf-8") == page(rows_in(ROOT / LINES, Row))
