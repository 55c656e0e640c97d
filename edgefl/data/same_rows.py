"""Samples of one data set that another holds, by their values."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from edgefl.data.dataset import Dataset, Flags


def rows_in(data: Dataset, other: Dataset) -> Flags:
    """The samples [N] of ``data`` whose values of all modalities a sample of ``other`` has."""
    names = sorted(data.modalities.keys() | other.modalities.keys())
    known = set(_digests(other, names))
    return np.array([digest in known for digest in _digests(data, names)], dtype=np.bool_)


def _digests(data: Dataset, names: list[str]) -> list[bytes]:
    found = [blake2b(digest_size=16) for _ in range(len(data))]
    for m in (m for m in names if m in data.modalities):
        values, present = np.asarray(data.modalities[m]), data.present[m]
        for i in np.flatnonzero(present):
            found[i].update(m.encode() + b"=" + values[i].tobytes())
    return [one.digest() for one in found]
