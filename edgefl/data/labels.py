"""Labels of a folder's samples, as names or numbers, to numbers from 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgefl.data.dataset import MAX_CLASSES
from edgefl.data.levels import Targets
from edgefl.data.levels import as_labels as levels_as_labels
from edgefl.data.regular_files import regular_file_inside
from edgefl.errors import DataError
from edgefl.storage.disk import read_at_most

MAX_LABELS_BYTES = 16 * 2**20  # of labels.json: 100,000 names of 160 bytes


def named_labels(root: Path) -> tuple[str, ...]:
    """The names in ``labels.json`` of a folder, in their order; none where there is no such file. Raises DataError."""
    path = root / "labels.json"
    if not path.exists() and not path.is_symlink():
        return ()
    regular_file_inside(root, path.name, MAX_LABELS_BYTES)
    try:
        names = msgspec.json.decode(read_at_most(path, MAX_LABELS_BYTES), type=list[str])
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}", remedy='Write a JSON list of names, such as ["rest", "walk"].') from None
    if len(set(names)) != len(names) or not 0 < len(names) <= MAX_CLASSES:
        raise DataError(f"{path}: names have to differ, and there has to be one", remedy="Name each label once.")
    return tuple(names)


#: Numbers of the labels (-1: none; None: bad, a problem of its place), their names, and numeric targets [N] or None.
Numbered = tuple[list[int | None], tuple[str, ...], Targets | None]
Given = Sequence[str | int | float | None]


def as_targets(given: Given, names: tuple[str, ...], problem: Callable[[int, str], None]) -> Numbered:
    """Labels of a numeric target: every one a finite number, or none."""
    targets = np.full(len(given), np.nan)
    for i, label in enumerate(given):
        if isinstance(label, int | float) and math.isfinite(label):
            targets[i] = label
        elif label is not None:
            problem(i, f"label: {label!r:.60} is no finite number, as the other labels are")
    found, names = levels_as_labels(targets, names)
    bad = [label is not None and math.isnan(targets[i]) for i, label in enumerate(given)]
    return [None if wrong else int(label) for wrong, label in zip(bad, found, strict=True)], names, targets


def numbered(given: Given, names: tuple[str, ...], problem: Callable[[int, str], None]) -> Numbered:
    """Labels of classes: each sample's label as a number, and the names."""
    if not names:
        texts = {label for label in given if isinstance(label, str)}
        numbers = [label for label in given if isinstance(label, int) and 0 <= label < MAX_CLASSES]
        names = tuple(sorted(texts)) if texts else tuple(str(i) for i in range(max(numbers, default=-1) + 1))
    number = {name: i for i, name in enumerate(names)}
    labels: list[int | None] = []
    for i, label in enumerate(given):
        if label is None:
            labels.append(-1)
        elif isinstance(label, str) and label in number:
            labels.append(number[label])
        elif isinstance(label, int) and 0 <= label < len(names):
            labels.append(label)
        elif isinstance(label, float):
            problem(i, f"label: {label!r:.60} is neither a name nor a whole number")
            labels.append(None)
        else:
            listed = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
            valid = f"0 to {len(names) - 1} ({listed})" if names else "none"
            problem(i, f"label: {label!r:.60} is out of range; valid: {valid}")
            labels.append(None)
    return labels, names, None
