"""Labels of an .npz: numbers, names, numeric targets, or 0 and 1 of every class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgefl.data.arrays import Array, Indices
from edgefl.data.label_sets import Sets, classes_in, first_classes, set_names
from edgefl.data.labels import MAX_CLASSES, class_name, merged, numbers_as_labels, texts_as_labels
from edgefl.data.levels import Targets, as_labels
from edgefl.errors import DataError


class Labels(NamedTuple):
    """Labels [N] as ``Dataset`` has them (-1: none), their names, and ``targets`` or ``sets``."""

    numbers: Indices | None
    names: tuple[str, ...]
    targets: Targets | None = None
    sets: Sets | None = None


def labels_of(given: Array | None, names: tuple[str, ...]) -> Labels:
    """Labels of the array ``given``: floating-point numbers are targets, a second axis [N, C] is that of the classes.

    Without ``names`` texts are numbered in alphabetical order, whole numbers in their own. Raises DataError.
    """
    if given is None:
        return Labels(None, names)
    if given.ndim == 2:
        return _of_every_class(given, names)
    if given.dtype.kind == "f" and given.ndim == 1:
        targets = given.astype(np.float64)
        return Labels(*as_labels(targets, names), targets)
    if given.dtype.kind == "U":
        return Labels(*texts_as_labels(given, names))
    if given.dtype.kind not in "iu":
        raise DataError(
            f"array 'label' has type {given.dtype}, not integers or texts",
            remedy="Number the labels from 0 (-1: no label), or write their names (an empty one: no label).",
        )
    return Labels(*(merged(given, names) if names else numbers_as_labels(given)))


def _of_every_class(given: Array, names: tuple[str, ...]) -> Labels:
    """Labels from an indicator matrix [N, C] of 0 and 1 (a row of -1: no label).

    Rows that all hold exactly one 1 are one-hot: a label of one class each.
    """
    rows, count = given.shape
    if given.dtype.kind not in "biuf" or not np.isin(given, (-1, 0, 1)).all():
        raise DataError(
            f"array 'label' has shape {list(given.shape)} and values besides 0 and 1",
            remedy="Give one label a sample, or 0 and 1 of every class (a row of -1: no label).",
        )
    if len(names or range(count)) != count or not 0 < count <= MAX_CLASSES:
        raise DataError(f"array 'label' has {count} columns, and 'label_names' {len(names)} names")
    sets, known = given == 1, ~(given == -1).any(axis=1)
    names = tuple(map(class_name, names)) or tuple(str(i) for i in range(count))
    if classes_in(names) is None and rows and (sets[known].sum(axis=1) == 1).all():
        return Labels(first_classes(sets, known), names)
    sets &= known[:, None]
    return Labels(first_classes(sets, known), names if classes_in(names) else set_names(names), sets=sets)
