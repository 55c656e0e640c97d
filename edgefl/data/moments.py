"""Mean and variance of each channel of a device's sensor data: what it sends of them to standardise a fleet."""

from __future__ import annotations

import numpy as np

from edgefl.data.arrays import chosen
from edgefl.data.dataset import Dataset
from edgefl.data.encoders import Encoders
from edgefl.records import Moments

#: Samples looked at at a time: bounds what is in memory of data that lies on disk.
_ROWS = 256
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
            found[m] = _of(data, m, rows)
    return found


def _of(data: Dataset, modality: str, rows: np.ndarray) -> Moments:
    values = chosen(data.modalities[modality], rows)
    count, mean, squares = 0, np.zeros(values.shape[-1]), np.zeros(values.shape[-1])
    for start in range(0, len(rows), _ROWS):
        block = np.asarray(values[start : start + _ROWS], np.float64).reshape(-1, values.shape[-1])
        own, size = block.mean(axis=0), len(block)
        total = count + size
        squares += ((block - own) ** 2).sum(axis=0) + (own - mean) ** 2 * count * size / total
        mean += (own - mean) * size / total
        count = total
    return Moments(count, tuple(mean.tolist()), tuple((squares / count).tolist()))
