"""Mean and variance of a device's sensor channels and table columns: what it sends of them to standardise a fleet.

Of a table, each column is over the cells that are there, and a cell far out counts as the bound it lies beyond: median
+- FENCE * (upper quartile of the distances from it that are not 0). One cell of 1e6 would else make all others alike.
"""

from __future__ import annotations

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
#: A mean over fewer samples would say too much of one, whatever a run asks for.
LEAST = 2


def moments_of(data: Dataset, encoders: Encoders, least: int) -> dict[str, Moments]:
    """Moments of each standardised modality with at least ``least`` samples here; means and variances in float64.

    Blocks are joined by their means (Chan, Golub, LeVeque 1983), so that a large mean costs no digits.
    """
    found = {}
    for m, encoder in encoders.items():
        rows = np.flatnonzero(data.has(m))
        if encoder.standardize == "fleet" and len(rows) >= max(least, LEAST):
            values = chosen(data.modalities[m], rows)
            found[m] = _of_columns(values, encoder, max(least, LEAST)) if encoder.kind == "table" else _of(values)
    return found


def _of(values: Rows) -> Moments:
    count, mean, squares = 0, np.zeros(values.shape[-1]), np.zeros(values.shape[-1])
    for start in range(0, len(values), _ROWS):
        block = np.asarray(values[start : start + _ROWS], np.float64).reshape(-1, values.shape[-1])
        own, size = block.mean(axis=0), len(block)
        total = count + size
        squares += ((block - own) ** 2).sum(axis=0) + (own - mean) ** 2 * count * size / total
        mean += (own - mean) * size / total
        count = total
    return Moments(count, tuple(mean.tolist()), tuple((squares / count).tolist()))


def _of_columns(values: Rows, encoder: Encoder, least: int) -> Moments:
    """Of cells [N, C, 2]; a category, and a column with fewer than ``least`` cells, count none."""
    columns = values.shape[1]
    low, high = _fences(np.asarray(values[:: max(1, len(values) // _FENCED)], np.float64))
    count, mean, squares = np.zeros(columns), np.zeros(columns), np.zeros(columns)
    for start in range(0, len(values), _ROWS):
        block = np.asarray(values[start : start + _ROWS], np.float64)
        there, cells = block[:, :, 1] > 0.5, np.clip(block[:, :, 0], low, high)
        size = there.sum(axis=0)
        total = np.maximum(count + size, 1)
        own = np.where(there, cells, 0.0).sum(axis=0) / np.maximum(size, 1)
        squares += (np.where(there, cells - own, 0.0) ** 2).sum(axis=0) + (own - mean) ** 2 * count * size / total
        mean += (own - mean) * size / total
        count += size
    plain = np.array([not column.values for column in encoder.columns] or [True] * columns)
    used = plain & (count >= least)
    variance = squares / np.maximum(count, 1)
    kept = [np.where(used, one, 0) for one in (mean, variance, count)]
    return Moments(
        len(values), tuple(kept[0].tolist()), tuple(kept[1].tolist()), tuple(kept[2].astype(np.int64).tolist())
    )


def _fences(cells: Array) -> tuple[Array, Array]:
    """Bounds [C] of each column of cells [n, C, 2]; infinite where there is nothing to go by."""
    low, high = np.full(cells.shape[1], -np.inf), np.full(cells.shape[1], np.inf)
    for c in range(cells.shape[1]):
        own = cells[cells[:, c, 1] > 0.5, c, 0]
        if not len(own):
            continue
        middle = np.median(own)
        far = np.abs(own - middle)
        if (far > 0).any():
            reach = FENCE * np.quantile(far[far > 0], 0.75)
            low[c], high[c] = middle - reach, middle + reach
    return low, high
