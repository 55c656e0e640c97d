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
    assert "| rank 8 | 2.00 | 100 | 150 | 160 | 77.5 ± 0.7 | 75.0 ± 0.0 |" in text
    assert "Mean of 2 seeds, with the deviation between them." in text
    assert "rank 16" not in text.split("| trained |")[1]


def test_one_seed_has_no_deviation_and_the_mixed_fleet_a_row() -> None:
    text = page([Row("ranks 4 to 16", 1, 1.5 * MIB, 90.0 * MIB, 150.0 * MIB, 160e9, 78.04, 77.0)])
    assert "| ranks 4 to 16 | 1.50 | 90 | 150 | 160 | 78.0 | 77.0 |" in text
    assert "One seed" in text
    assert "Budgets that admit" not in text


def test_the_mixed_fleet_is_compared_with_its_least_rank_seed_by_seed() -> None:
    rows = [
        Row(way, seed, MIB, MIB, MIB, 1e9, right, 70.0)
        for way, seed, right in (
            ("ranks 4 to 16", 1, 78.0),
            ("rank 4", 1, 76.0),
            ("ranks 4 to 16", 2, 80.0),
            ("rank 4", 2, 77.0),
            ("rank 4", 3, 9.0),
        )
    ]
    assert "Budgets that admit ranks 4 to 16 gain +2.5 ± 0.7 points over rank 4 on every device." in page(rows)
