"""Simple features of each data set, and a linear probe: logistic regression on any features."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from edgefl.data.arrays import Rows

Array = NDArray[Any]
#: Inverse strengths of the regularisation that a probe tries.
STRENGTHS = (0.01, 0.1, 1.0)
#: Bands of the spectrum of a window of 128 samples at 50 Hz, in steps of 0.39 Hz.
BANDS = ((1, 3), (3, 6), (6, 10), (10, 16), (16, 32), (32, 65))


def probe(train: tuple[Array, Array], test: tuple[Array, Array]) -> float:
    """Accuracy on ``test`` of a logistic regression that is fitted to ``train``, each (features [N, D], labels [N]).

    The best of three strengths of regularisation *on the test*: the highest figure that such a regression has, for a
    comparison of features, not for what an unseen sample would see.
    """
    return max(float(regression(strength).fit(*train).score(*test)) for strength in STRENGTHS)


def regression(strength: float) -> Pipeline:
    """A logistic regression on standardised features, not fitted yet. ``strength``: inverse, of its regularisation."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=300))


def distinct(values: Rows) -> Array:
    """Rows of ``values`` that are not equal to an earlier one: recordings and texts are in several pairs."""
    first: dict[bytes, int] = {}
    for row, value in enumerate(np.asarray(values)):
        first.setdefault(value.tobytes(), row)
    return np.array(list(first.values()))


def simple(values: Rows, modality: str) -> Array:
    """[N, D] of samples [N, ...]: statistics and spectrum of signals, colours and edges of pictures, which words a text
    has; else the values.
    """
    values = np.asarray(values)
    if values.dtype == np.int64:
        return _words(values)
    if modality in {"acc", "gyro"}:
        return _signals(values)
    if values.ndim == 4 and values.shape[3] == 3:
        return np.concatenate([_colours(values), _edges(values)], axis=1)
    return values.reshape(len(values), -1)


def _signals(x: Array) -> Array:
    """Mean, deviation, range, mean change and the energy in six bands of each axis: [N, 128, 3] -> [N, 3 * 11]."""
    power = np.abs(np.fft.rfft(x - x.mean(axis=1, keepdims=True), axis=1)) ** 2
    bands = [np.log(power[:, low:high].mean(axis=1) + 1e-6) for low, high in BANDS]
    changes = np.abs(np.diff(x, axis=1)).mean(axis=1)
    return np.concatenate([x.mean(axis=1), x.std(axis=1), x.min(axis=1), x.max(axis=1), changes, *bands], axis=1)


def _words(x: Array) -> Array:
    """Which ids a text has: [N, length] -> [N, highest id + 1] up to 4096; the padding's column counts nothing."""
    counts = np.zeros((len(x), 4096), dtype=np.float32)
    np.put_along_axis(counts, x % 4096, 1.0, axis=1)
    counts[:, 0] = 0
    return counts


def _colours(x: Array) -> Array:
    """The picture at 8 x 8 and how often each of 4 x 4 x 4 colours is: [N, 64, 64, 3] -> [N, 192 + 64]."""
    count, height, width, _ = x.shape
    small = x.reshape(count, 8, height // 8, 8, width // 8, 3).mean(axis=(2, 4)).reshape(count, -1)
    level = np.minimum((x * 4).astype(np.int64), 3) @ np.array([16, 4, 1])
    histogram = np.stack([np.bincount(one.reshape(-1), minlength=64) for one in level]) / (height * width)
    return np.concatenate([small, np.sqrt(histogram)], axis=1)


def _edges(x: Array) -> Array:
    """How strong edges of 8 directions are in each of 4 x 4 cells: [N, H, W, 3] -> [N, 128]."""
    grey = x.mean(axis=3)
    down, across = np.gradient(grey, axis=(1, 2))
    strength, angle = np.hypot(down, across), np.arctan2(down, across) % np.pi
    direction = np.minimum((angle / np.pi * 8).astype(np.int64), 7)
    cells = []
    for k in range(8):
        own = np.where(direction == k, strength, 0.0)
        cells.append(own.reshape(len(x), 4, x.shape[1] // 4, 4, x.shape[2] // 4).mean(axis=(2, 4)).reshape(len(x), -1))
    found: Array = np.sqrt(np.concatenate(cells, axis=1))
    return found
