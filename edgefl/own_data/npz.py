"""An .npz file of the user's own: which arrays are modalities, labels, groups or split, and a copy as it is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl.data.arrays import Array, read_npz, write_npz
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.own_data.facts import Facts
from edgefl.records import is_modality

#: Array of the data set's file -> names that users have for it.
_ALIASES = {
    "label": re.compile(r"labels?|y|targets?|class(es)?|y_true", re.IGNORECASE),
    "label_names": re.compile(r"(label|class|target)_?names?|names", re.IGNORECASE),
    "group": re.compile(
        r"groups?|subjects?|persons?|people|users?|speakers?|participants?|patients?|clients?|devices?", re.IGNORECASE
    ),
    "ids": re.compile(r"ids?", re.IGNORECASE),
}
_SPLIT = re.compile(r"split|fold|is_?test|test", re.IGNORECASE)
#: Text of the split that stands for the test set.
_TEST = re.compile(r"(test|val|eval|dev|hold|held).*", re.IGNORECASE)
_SOUND = re.compile(r"audio|sound|mel|spec|speech|voice|mfcc", re.IGNORECASE)


class Arrays(NamedTuple):
    """The file's arrays by their part in a data set, as read. ``unused``: name -> why it is no part of it."""

    train: Mapping[str, Array]
    test: Mapping[str, Array]
    renamed: Mapping[str, str]
    unused: Mapping[str, str]


def read_arrays(path: Path) -> Arrays:
    """The arrays of ``path`` sorted out. Raises DataError (no .npz, no array that may be a modality)."""
    given = read_npz(path)
    renamed = _roles(given)
    flags = {name for name in given if name.endswith(".present")}
    axes = [len(array) for name, array in given.items() if array.ndim >= 2 and name not in renamed]
    if not axes:
        raise DataError(f"{path}: no array [samples, …] inside", remedy="Store one array [N, …] a modality.")
    count = max(set(axes), key=axes.count)
    kept, unused, split = {}, {}, None
    for name, array in given.items():
        role = renamed.get(name, name)
        if role == "label_names" or name in flags or (role in _ALIASES and len(array) == count):
            kept[role] = array
        elif role == "label":
            raise DataError(
                f"{path}: the array {name} has {len(array)} labels, and there are {count} samples",
                remedy="Store one label a sample; of one without, -1 or an empty text.",
            )
        elif _SPLIT.fullmatch(name) and array.shape == (count,) and len(np.unique(array)) == 2:
            split = array == _test_value(path, name, np.unique(array).tolist())
        elif array.ndim < 2 or len(array) != count or array.dtype.kind not in "fiub":
            unused[name] = f"has shape {list(array.shape)}, type {array.dtype}; modalities are numbers [{count}, …]"
        elif not is_modality(name):
            unused[name] = "cannot name a modality"
        else:
            kept[name] = array
    return Arrays(*_cut(kept, split), {old: new for old, new in renamed.items() if old != new}, unused)


def _test_value(path: Path, name: str, values: Sequence[object]) -> object:
    """The one of a split's two values, in order, that stands for the test set. Raises DataError."""
    if not isinstance(values[0], str):
        return values[1]
    tests = [value for value in values if _TEST.fullmatch(str(value))]
    if len(tests) != 1:
        raise DataError(
            f"{path}: the array {name} holds {values[0]!r:.60} and {values[1]!r:.60}: which one is the test set?",
            remedy="Call one of them test; or store 0 for training and 1 for the test set.",
        )
    return tests[0]


def _roles(given: Mapping[str, Array]) -> dict[str, str]:
    """Array -> its part, by its name; each part once, the exact name first."""
    found: dict[str, str] = {}
    for role, pattern in _ALIASES.items():
        flat = [name for name, array in given.items() if array.ndim == 1 or (role == "label" and _is_sets(array))]
        fitting = [name for name in flat if pattern.fullmatch(name)]
        if fitting:
            found[role if role in fitting else fitting[0]] = role
    return found


def _is_sets(array: Array) -> bool:
    """Whether an array is 0 and 1 of each label [N, C]."""
    return array.ndim == 2 and array.dtype.kind in "biuf" and bool(np.isin(array, (0, 1)).all())


def _cut(kept: dict[str, Array], split: Array | None) -> tuple[dict[str, Array], dict[str, Array]]:
    if split is None:
        return kept, {}
    per_sample = {name: array for name, array in kept.items() if name != "label_names"}
    named = {"label_names": kept["label_names"]} if "label_names" in kept else {}
    return ({n: a[~split] for n, a in per_sample.items()} | named, {n: a[split] for n, a in per_sample.items()} | named)


def write_arrays(arrays: Mapping[str, Array], path: Path) -> None:
    """Write arrays as a data set's file, whole or not at all. Half precision becomes single. Raises StoreError."""
    write_npz(path, {name: _plain(name, array) for name, array in arrays.items()})


def _plain(name: str, array: Array) -> Array:
    if name == "group":
        return array.astype(np.str_)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def facts_of_arrays(
    data: Dataset, rows: Collection[str] = (), kinds: Mapping[str, str] | None = None
) -> dict[str, Facts]:
    """The facts of each modality, with the kind that its shape and type suggest. ``kinds``: as the user says.

    ``rows``: arrays [N, d], which are tables of numbers.
    """
    found = {}
    for name, shape in data.signature().items():
        kind = (kinds or {}).get(name, "table" if name in rows else "")
        if kind == "table" and name in rows:
            found[name] = Facts("table")
        elif kind == "vision":
            found[name] = Facts("vision", sides=[min(shape[:2])])
        elif kind == "audio":
            found[name] = Facts("audio")
        elif data.modalities[name].dtype == np.int64:
            found[name] = Facts("text", words=[shape[0]])
        elif len(shape) == 3 and shape[2] <= 4:
            found[name] = Facts("vision", sides=[min(shape[:2])])
        elif len(shape) == 2 and _SOUND.search(name):
            found[name] = Facts("audio")
        elif len(shape) == 2:
            found[name] = Facts("sensor", steps=[shape[0]], channels=shape[1])
        else:
            raise DataError(
                f"array {name!r}: samples of shape {list(shape)} fit no encoder",
                remedy="Sensors are [time, channels], pictures [height, width, channels], sounds [frames, bands], "
                "texts [ids].",
            )
    return found
