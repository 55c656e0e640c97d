"""Donors from outside: public samples that no device holds, from which completion lends other halves.

FedMVP (arXiv 2406.11048, section 3.2) completes by models trained elsewhere: what is made brings knowledge that no
device has. A pool does so without a model: of its complete samples of the same class, the most alike lends its half.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.data.encoders import Encoder
from edgefl.data.sources import load
from edgefl.errors import DataError


def public_pool(path: str, encoders: Mapping[str, Encoder]) -> Dataset:
    """The pool's samples, as the encoders take them. Raises DataError: it cannot be read, or no sample can lend."""
    pool = load(path, modalities=encoders)
    held = [pool.has(m) for m in encoders if m in pool.modalities]
    if not held or int(np.sum(held, axis=0).max()) < 2:
        raise DataError(
            f"the pool {path!r} has no sample with two of the model's modalities, so that none can lend",
            remedy="Give public samples that have them together, or set generator: nearest.",
        )
    return pool
