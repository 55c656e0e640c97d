"""Reads the .ts files (timeseriesclassification.com) that the package sktime brings along, without importing sktime."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgefl.errors import DataError, MissingDependencyError

MAX_TS_BYTES = 16 * 2**20  # BasicMotions has 0.25 MB


def sktime_folder(name: str) -> Path:
    """The folder of one data set inside the installed sktime. Raises MissingDependencyError."""
    found = importlib.util.find_spec("sktime")  # finds a top-level package without executing it
    places = [] if found is None else list(found.submodule_search_locations or [])
    for place in places:
        folder = Path(place) / "datasets" / "data" / name
        if folder.is_dir():
            return folder
    raise MissingDependencyError("sktime", "demo")


def read_ts(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], tuple[str, ...]]:
    """Series [S, time, dimensions], labels [S] and label names of a .ts file of equal lengths. Raises DataError."""
    try:
        if path.stat().st_size > MAX_TS_BYTES:
            raise DataError(f"{path}: more than {MAX_TS_BYTES} bytes", remedy="Install sktime again.")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can not be read: {error}", remedy="Install sktime again.") from None
    names: tuple[str, ...] = ()
    series: list[list[list[float]]] = []
    labels: list[int] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.lower().startswith("@classlabel"):
            if labels:
                raise DataError(f"{path}:{number}: names labels after the first series", remedy="Install sktime again.")
            names = tuple(text.split()[2:])
        if not text or text[0] in "#@%":
            continue
        *dimensions, label = text.split(":")
        try:
            series.append([[float(value) for value in dimension.split(",")] for dimension in dimensions])
            labels.append(names.index(label))
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}", remedy="Install sktime again.") from None
    try:
        values = np.array(series, dtype=np.float32)
    except ValueError:
        values = np.empty(0, dtype=np.float32)
    if values.ndim != 3 or not np.isfinite(values).all():
        raise DataError(f"{path}: series of unequal length, or not finite", remedy="Install sktime again.")
    return values.transpose(0, 2, 1), np.array(labels, dtype=np.int64), names
