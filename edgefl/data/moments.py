"""Mean and variance of a device's sensor channels and table columns: what it sends of them to standardise a fleet.

Of a table, each column is over the cells that are there, and a cell far out counts as the bound it lies beyond: median
+- FENCE * (upper quartile of the distances from it that are not 0). One cell of 1e6 would else make all others alike.
Of a sensor's channel, values beyond median +- SPIKE * (0.995 quantile of those distances) do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from edgefl.data.arrays import Array, Rows, chosen
from edgefl.data.dataset import Dataset
from edgefl.data.encoders import Encoder, Encoders
from edgefl.records import Moments

#: Samples looked at at a time: bounds what is in memory of data that lies on disk.
_ROWS = 256
#: Samples that tell where a column's bounds are.
_FENCED = 4096
#: Of a normal distribution the bounds are 5.8 deviations from the mean.
FENCE = 5.0
#: Of a normal distribution the bounds are 11 deviations from the mean: events in one of 200 steps lie within.
SPIKE, _RARE = 4.0, 0.995
#: Time steps that tell where a channel's bounds are.
_FENCED_STEPS = 2**20
#: A mean over fewer samples would say too much of one, whatever a run asks for.
LEAST = 2


def moments_of(data: Dataset, encoders: Encoders, least: int) -> dict[str, Moments]:
    """Moments of each standardised modality with at least ``least`` samples here; means and variances in float64."""
    found = {}
    for m, encoder in encoders.items():
        rows = np.flatnonzero(data.has(m))
        if encoder.standardize == "fleet" and len(rows) >= max(least, LEAST):
            values = chosen(data.modalities[m], rows)
            found[m] = _of_columns(values, encoder, max(least, LEAST)) if encoder.kind == "table" else _of_steps(values)
    return found


def _of_steps(values: Rows) -> Moments:
    """Moments of each channel over all time steps [N, ..., C], outliers left out."""
    channels, steps = values.shape[-1], len(values) * math.prod(values.shape[1:-1])
    some = np.asarray(values[:: max(1, steps // _FENCED_STEPS)], np.float64).reshape(-1, channels)
    low, high = _bounds(some.T, SPIKE, _RARE)
    blocks = (block.reshape(-1, channels) for block in _blocks(values))
    count, mean, variance = _joined((block, (block >= low) & (block <= high)) for block in blocks)
    counts = () if (count == steps).all() else tuple(count.tolist())
    return Moments(steps, tuple(mean.tolist()), tuple(variance.tolist()), counts)


def _of_columns(values: Rows, encoder: Encoder, least: int) -> Moments:
    """Of cells [N, C, 2]; a category, and a column with fewer than ``least`` cells, count none."""
    columns = values.shape[1]
    some = np.asarray(values[:: max(1, len(values) // _FENCED)], np.float64)
    low, high = _bounds([some[some[:, c, 1] > 0.5, c, 0] for c in range(columns)], FENCE, 0.75)
    count, mean, variance = _joined(
        (np.clip(block[:, :, 0], low, high), block[:, :, 1] > 0.5) for block in _blocks(values)
    )
    plain = np.array([not column.values for column in encoder.columns] or [True] * columns)
    used = plain & (count >= least)
    kept = [np.where(used, one, 0) for one in (mean, variance, count)]
    return Moments(len(values), *(tuple(one.tolist()) for one in kept))


def _blocks(values: Rows) -> Iterator[Array]:
    return (np.asarray(values[start : start + _ROWS], np.float64) for start in range(0, len(values), _ROWS))


def _joined(blocks: Iterable[tuple[Array, Array]]) -> tuple[Array, Array, Array]:
    """Count, mean and variance [C] over blocks of values [n, C] with masks [n, C] (True: counted).

    Blocks are joined by their means (Chan, Golub, LeVeque 1983), so that a large mean costs no digits.
    """
    count, mean, squares = np.int64(0), np.float64(0), np.float64(0)
    for values, there in blocks:
        size = there.sum(axis=0)
        total = np.maximum(count + size, 1)
        own = np.where(there, values, 0.0).sum(axis=0) / np.maximum(size, 1)
        within = (np.where(there, values - own, 0.0) ** 2).sum(axis=0)
        squares = squares + (within + (own - mean) ** 2 * count * size / total)
        mean = mean + (own - mean) * size / total
        count = count + size
    return np.asarray(count), np.asarray(mean), np.asarray(squares / np.maximum(count, 1))


def _bounds(columns: Sequence[Array], times: float, share: float) -> tuple[Array, Array]:
    """Median -+ ``times`` the quantile ``share`` of the distances from it that are not 0, of each column [C].

    Infinite where there is nothing to go by.
    """
    low, high = np.full(len(columns), -np.inf), np.full(len(columns), np.inf)
    for c, column in enumerate(columns):
        if not len(column):
            continue
        middle = np.median(column)
        far = np.abs(column - middle)
        if (far > 0).any():
            reach = times * np.quantile(far[far > 0], share, method="lower")  # of few, no mean with the one spike
            low[c], high[c] = middle - reach, middle + reach
    return low, high
