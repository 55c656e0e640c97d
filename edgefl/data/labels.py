"""Labels of samples, as names or numbers, to places in the names of classes.

A label is the class of that name: Unicode forms of one text (NFC, NFD) and blanks around it make no difference, and a
whole number is the class that is called so. Only where no class has a number as its name it counts the names from 0.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edgefl.data.arrays import Array, Indices
from edgefl.data.label_sets import Sets, plain_names, set_names
from edgefl.data.levels import Targets
from edgefl.data.levels import as_labels as levels_as_labels
from edgefl.data.regular_files import regular_file_inside
from edgefl.errors import DataError
from edgefl.storage.disk import read_at_most

#: More classes than any classifier here is built for; bounds what a stray label can make us allocate.
MAX_CLASSES = 100_000
MAX_LABELS_BYTES = 16 * 2**20  # of labels.json: 100,000 names of 160 bytes
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")


def class_name(text: str) -> str:
    """A name in the one spelling that is compared: NFC, without blanks around it."""
    return unicodedata.normalize("NFC", text).strip()


def class_names(given: Array) -> Array:
    """Texts [N] in that spelling."""
    found, places = np.unique(given, return_inverse=True)
    spelt = np.array([class_name(str(text)) for text in found], dtype=np.str_)
    return spelt[places.reshape(given.shape)]


def is_whole(name: str) -> bool:
    """Whether a class name is a whole number, such as "7"."""
    return _WHOLE_NUMBER.fullmatch(name) is not None


def places_of(names: Sequence[str]) -> dict[str, int]:
    """Label as text -> its place in ``names``; of whole numbers too, where no name is one."""
    places = {class_name(name): i for i, name in enumerate(names)}
    counted = not any(map(is_whole, places))
    return {str(i): i for i in range(len(names) if counted else 0)} | places


def numbers_as_labels(given: Array) -> tuple[Indices, tuple[str, ...]]:
    """Whole numbers [N] (-1: none) as places in those that occur, and the names of these."""
    values = given.astype(np.int64)
    found = np.unique(values[values >= 0])
    return np.where(values < 0, values, np.searchsorted(found, values)), tuple(map(str, found[:MAX_CLASSES].tolist()))


def texts_as_labels(given: Array, names: Sequence[str]) -> tuple[Indices, tuple[str, ...]]:
    """Texts [N] ("": none) as places in ``names``, or in those that occur, sorted. Raises DataError."""
    found, places = np.unique(class_names(given), return_inverse=True)
    occurring = [str(text) for text in found]
    known = tuple(dict.fromkeys(map(class_name, names))) or tuple(filter(None, occurring))[:MAX_CLASSES]
    number = {name: i for i, name in enumerate(known)} | {"": -1}
    if unknown := [text for text in occurring if text not in number]:
        raise DataError(
            f"array 'label' holds {unknown[0]!r:.60}, which is not in 'label_names'",
            remedy="Name every label in 'label_names', or leave that array out.",
        )
    table = np.array([number[text] for text in occurring], dtype=np.int64)
    return table[places.reshape(given.shape)], known


def merged(given: Array, names: Sequence[str]) -> tuple[Indices, tuple[str, ...]]:
    """Places [N] in ``names`` as places in those that differ in more than their spelling, and these."""
    labels, spelt = given.astype(np.int64), [class_name(name) for name in names]
    known = tuple(dict.fromkeys(spelt))
    if len(known) < len(names):
        place = {name: i for i, name in enumerate(known)}
        table = np.array([place[name] for name in spelt], dtype=np.int64)
        inside = (labels >= 0) & (labels < len(table))
        labels[inside] = table[labels[inside]]
    return labels, known


def named_labels(root: Path) -> tuple[str, ...]:
    """The names in ``labels.json`` of a folder, in their order; none where there is no such file. Raises DataError."""
    path = root / "labels.json"
    if not path.exists() and not path.is_symlink():
        return ()
    regular_file_inside(root, path.name, MAX_LABELS_BYTES)
    try:
        names = [class_name(name) for name in msgspec.json.decode(read_at_most(path, MAX_LABELS_BYTES), type=list[str])]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}", remedy='Write a JSON list of names, such as ["rest", "walk"].') from None
    if len(set(names)) != len(names) or not 0 < len(names) <= MAX_CLASSES:
        raise DataError(f"{path}: names have to differ, and there has to be one", remedy="Name each label once.")
    return tuple(names)


class Numbered(NamedTuple):
    """Numbers of the labels (-1: none; None: bad, a problem of its place), their names, and ``targets`` or ``sets``."""

    numbers: list[int | None]
    names: tuple[str, ...]
    targets: Targets | None = None
    sets: Sets | None = None


Label = str | int | float | list[str | int] | None
Given = Sequence[Label]


def as_sets(given: Given, names: tuple[str, ...], problem: Callable[[int, str], None]) -> Numbered:
    """Labels of samples that may have several: names and whole numbers, or lists of these."""
    lists = [label if isinstance(label, list) else [] if label is None else [label] for label in given]
    rows = [[class_name(str(name)) for name in row] for row in lists]
    classes = tuple(map(class_name, plain_names(names))) or tuple(sorted({name for row in rows for name in row}))
    number = {name: i for i, name in enumerate(classes)}
    sets = np.zeros((len(given), len(classes)), np.bool_)
    numbers: list[int | None] = []
    for i, row in enumerate(rows):
        unknown = [name for name in row if name not in number]
        if unknown:
            problem(i, f"label: {unknown[0]!r:.60} is out of range; valid: {', '.join(classes[:10])}")
        sets[i, [number[name] for name in row if name in number]] = True
        numbers.append(None if unknown else -1 if given[i] is None else int(sets[i].argmax()))
    return Numbered(numbers, set_names(classes), sets=sets)


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
    return Numbered([None if wrong else int(label) for wrong, label in zip(bad, found, strict=True)], names, targets)


def numbered(given: Given, names: tuple[str, ...], problem: Callable[[int, str], None]) -> Numbered:
    """Labels of classes: each sample's label as a number, and the names.

    Without ``names`` these are the texts that occur, sorted; else the whole numbers.
    """
    spelt = [class_name(label) or None if isinstance(label, str) else label for label in given]
    if not names:
        texts = {label for label in spelt if isinstance(label, str)}
        numbers = {label for label in spelt if isinstance(label, int) and label >= 0}
        names = tuple(sorted(texts)) if texts else tuple(map(str, sorted(numbers)[:MAX_CLASSES]))
    by_name, places = {name: i for i, name in enumerate(map(class_name, names))}, places_of(names)
    labels: list[int | None] = []
    for i, label in enumerate(spelt):
        place = by_name.get(label) if isinstance(label, str) else places.get(str(label))
        if label is None:
            labels.append(-1)
        elif isinstance(label, float):
            problem(i, f"label: {label!r:.60} is neither a name nor a whole number")
            labels.append(None)
        elif place is None:
            listed = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
            valid = (f"0 to {len(names) - 1} ({listed})" if "0" in places else listed) if names else "none"
            problem(i, f"label: {label!r:.60} is out of range; valid: {valid}")
            labels.append(None)
        else:
            labels.append(place)
    return Numbered(labels, names)
