"""The page on privacy: losses by the number of devices of rows that are known, and shares of the windows."""

from __future__ import annotations

import numpy as np

from benchmarks.accuracy.privacy import Row, dealt, page, trained


def test_a_row_has_each_budget_and_the_head_the_losses_of_the_smallest_and_largest_fleet() -> None:
    rows = [
        *(Row("linear", 10, 0.0, seed, 90.0 + seed) for seed in (1, 2)),
        *(Row("linear", 10, 8.0, seed, 50.0 + seed) for seed in (1, 2)),
        Row("linear", 1000, 0.0, 1, 90.0),
        Row("linear", 1000, 8.0, 1, 88.5),
    ]
    text = page(rows)
    assert "takes 40 points from a linear model of 10 devices, and 1.5 of 1,000" in text
    assert "| 10 | 91.5 (91 to 92) | 51.5 (51 to 52) |  |  |" in text
    assert "Transformer\n" not in text
    split = page([*rows, Row("split", 30, 8.0, 1, 84.0, 8.0, 78.4)])
    assert "| 30: epsilon towards the server |  | 78 |  |  |" in split


def test_every_window_is_one_devices_and_steps_learn() -> None:
    people = np.repeat([3, 1, 2], [40, 30, 50])
    shares = dealt(people, 24, np.random.default_rng(0))
    assert sorted(np.concatenate(shares)) == list(range(120))
    assert max(len(set(people[share])) for share in shares) <= 2
    x, labels = np.eye(6), np.arange(6)
    assert ((x @ trained(np.zeros((6, 6), np.float32), x, labels)).argmax(1) == labels).all()
