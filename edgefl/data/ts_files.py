"""Reader of .ts files, the text form of timeseriesclassification.com."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgefl.data.arrays import Array, Indices
from edgefl.errors import DataError

MAX_TS_BYTES = 16 * 2**20  # of a .ts file; BasicMotions has 0.25 MB


def read_ts(path: Path) -> tuple[Array, Indices, tuple[str, ...]]:
    """Series [S, time, dimensions], labels [S] and label names of a .ts file (timeseriesclassification.com).

    The series have equal lengths. Raises DataError.
    """
    remedy = "Install sktime again."
    try:
        if path.stat().st_size > MAX_TS_BYTES:
            raise DataError(f"{path}: more than {MAX_TS_BYTES} bytes", remedy=remedy)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}", remedy=remedy) from None
    names: tuple[str, ...] = ()
    series: list[list[list[float]]] = []
    labels: list[int] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.lower().startswith("@classlabel"):
            if labels:
                raise DataError(f"{path}:{number}: names labels after the first series", remedy=remedy)
            names = tuple(text.split()[2:])
        if not text or text[0] in "#@%":
            continue
        *dimensions, label = text.split(":")
        try:
            series.append([[float(value) for value in dimension.split(",")] for dimension in dimensions])
            labels.append(names.index(label))
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}", remedy=remedy) from None
    try:
        values = np.array(series, dtype=np.float32)
    except ValueError:
        values = np.empty(0, dtype=np.float32)
    if values.ndim != 3 or not np.isfinite(values).all():
        raise DataError(f"{path}: series of unequal length, or not finite", remedy=remedy)
    return values.transpose(0, 2, 1), np.array(labels, dtype=np.int64), names
