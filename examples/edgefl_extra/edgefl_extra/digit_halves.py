"""Handwritten digits as two modalities: the upper and the lower half of each (UCI optical digits, in scikit-learn)."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from edgefl.data.dataset import Dataset
from edgefl.data.named import Named


def digit_halves(test_share: float = 0.25) -> Named:
    """1,797 pictures of 8 x 8: "upper" and "lower" [4, 8], 0 to 1; every fourth is for the test by default."""
    digits = load_digits()
    pictures = (digits.images / 16).astype(np.float32)
    number = np.arange(len(pictures))
    tested = number % max(2, round(1 / test_share)) == 0
    return Named(_cut(pictures, digits.target, ~tested), _cut(pictures, digits.target, tested), None)


def _cut(pictures: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> Dataset:
    chosen, everyone = pictures[rows], np.ones(int(rows.sum()), dtype=np.bool_)
    return Dataset(
        {"upper": chosen[:, :4], "lower": chosen[:, 4:]},
        {"upper": everyone, "lower": everyone},
        labels[rows].astype(np.int64),
        tuple(str(digit) for digit in range(10)),
        [f"digit-{i}" for i in np.flatnonzero(rows)],
    )
