"""Donors from outside: public samples that no device holds, from which completion lends other halves.

FedMVP (arXiv 2406.11048, section 3.2) completes by models trained elsewhere: what is made brings knowledge that no
device has. A pool does so without a model: of its complete samples of the same class, the most alike lends its half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.data.encoders import Encoder
from edgefl.data.labels import is_whole
from edgefl.data.sources import load
from edgefl.errors import DataError


def public_pool(path: str, encoders: Mapping[str, Encoder], names: Sequence[str]) -> Dataset:
    """The pool's samples, as the encoders take them; whole numbers as labels count ``names`` without one.

    Raises DataError: it cannot be read, no sample can lend, or it numbers more classes than there are names.
    """
    pool = load(path, modalities=encoders)
    held = [pool.has(m) for m in encoders if m in pool.modalities]
    if not held or int(np.sum(held, axis=0).max()) < 2:
        raise DataError(
            f"the pool {path!r} has no sample with two of the model's modalities, so that none can lend",
            remedy="Give public samples that have them together, or set generator: nearest.",
        )
    if not names or any(map(is_whole, names)) or not all(map(is_whole, pool.label_names)):
        return pool
    count = max((int(name) + 1 for name in pool.label_names), default=0)
    if count > len(names):
        raise DataError(
            f"the pool {path!r} numbers {count} classes, and the model has {len(names)}",
            remedy="Name its classes in the array label_names, so that those of the model are found among them.",
        )
    return pool.relabelled(names)
