"""The page on low-rank terms: its first sentence and its table, of rows that are known."""

from __future__ import annotations

from benchmarks.accuracy.lora import MIB, Row, page


def test_the_first_sentence_compares_rank_8_with_all_weights() -> None:
    rows = [
        *(Row("rank 8", seed, 2.0 * MIB, 100.0 * MIB, 150.0 * MIB, 160e9, 76.0 + seed, 75.0) for seed in (1, 2)),
        *(Row("all weights", seed, 90.0 * MIB, 500.0 * MIB, 375.0 * MIB, 234e9, 80.0, 79.0) for seed in (1, 2)),
    ]
    text = page(rows)
    assert "sends 45 times less a round than of all weights" in text
    assert "2.5 times less memory, at -2.5 points" in text
    assert "| rank 8 | 2.00 | 100 | 150 | 160 | 77.5 | 75.0 |" in text
    assert "Mean of 2 seeds." in text
    assert "rank 16" not in text.split("| trained |")[1]
