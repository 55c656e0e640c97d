"""Samples that two data sets share, by id and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from edgefl.data.dataset import Dataset, Flags

_Key = tuple[str, str, bytes]  # id, modality, digest of its value


def shared_rows(data: Dataset, others: Sequence[Dataset]) -> Flags:
    """Samples [N] of ``data`` with an id, and a value under it, of ``others``."""
    keys = {key for other in others for _, key in _keys(other)}
    flags = np.zeros(len(data), dtype=np.bool_)
    flags[[row for row, key in _keys(data) if key in keys]] = True
    return flags


def _keys(data: Dataset) -> Iterator[tuple[int, _Key]]:
    """Row and key of each value that is there."""
    for modality, values in data.modalities.items():
        rows = np.asarray(values)
        for row in np.flatnonzero(data.present[modality]).tolist():
            yield row, (data.ids[row], modality, blake2b(rows[row].tobytes(), digest_size=16).digest())
