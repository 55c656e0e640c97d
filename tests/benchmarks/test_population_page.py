"""The page on large populations: a small one is run, and the sentence and table of given figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cost import population
from benchmarks.cost.population import ASKED, Measured, apart, text, write_samples


@pytest.mark.timeout(180)
def test_a_small_population_is_run_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population, "SAMPLES", 300)
    monkeypatch.setattr(population, "TESTED", 60)
    write_samples(tmp_path)
    found = apart(tmp_path, users=2_000, rounds=2)
    assert ASKED < found.met <= 2 * ASKED + 1, "those that were asked, and the first"
    assert 10_000 < found.parameters < 100_000
    assert 0 < found.begin_cpu_s < found.cpu_s
    assert 0 < found.round_cpu_s < found.cpu_s
    assert 2**27 < found.peak_bytes < 2**30
    assert found.ledger_bytes > 2**16


def test_the_sentence_is_of_the_largest_run() -> None:
    few = Measured(1_000, 100, 40_000, 5.0, 6.0, 0.7, 1.0, 80.0, 120.0, 500 * 2**20, 18 * 2**20, 850, 0.95)
    many = few._replace(users=10**6, rounds=10, cpu_s=20.0, wall_s=30.0, peak_bytes=540 * 2**20)
    sentence, header, _, *rows, about = text([few, many])
    assert sentence.startswith("10 rounds with 1,000,000 users took 20 s of one processor (0.5 minutes) and 540 MiB")
    assert rows[0] == "| 1,000 | 100 | 5.0 | 0.70 | 80 | 120 | 500 | 18.0 | 850 | 95.0% |"
    assert len(rows) == 2
    assert header.count("|") == rows[0].count("|")
    assert "40,000 parameters" in about
