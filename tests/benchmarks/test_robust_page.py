"""The page on robust combination: falls, margins and blamed devices of rows that are known."""

from __future__ import annotations

from benchmarks.accuracy.robust import Row, page


def row(way: str, attack: str, seed: int, last: float, **more: tuple[str, ...]) -> Row:
    return Row(5, way, attack, seed, "done", (50.0, last), **more)


ROWS = [
    *(row("mean", "none", seed, 90.0 + seed) for seed in (1, 2)),
    *(row("mean", "flip", seed, 40.0) for seed in (1, 2)),
    row("median", "none", 1, 90.0),
    row("median", "flip", 1, 86.0, rejected=("d3",), quarantined=("d3", "d4")),
    row("median", "unequal", 1, 20.0),
]


def test_a_row_has_its_falls_and_the_head_the_largest() -> None:
    text = page(ROWS)
    assert "the mean loses up to 52 points to an attack, the median up to 4" in text
    assert "| mean | 91.5 (91 to 92) | **40.0 (40 to 40)** |  |" in text
    assert "| median | 90.0 | 86.0, 2 blamed |  |  |  | **20.0** |" in text


def test_a_run_that_did_not_end_has_nothing() -> None:
    assert Row(5, "mean", "flip", 1, "failed", (80.0,)).last == 0.0
