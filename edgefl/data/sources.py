"""The front door: any source of data to a Dataset that fits the model, or one error that says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

import numpy as np

from edgefl.data.arrays import read_npz
from edgefl.data.dataset import Dataset, decide
from edgefl.data.encoders import Encoders, fits, shown
from edgefl.data.folder import MANIFEST, folder_of, read_manifest
from edgefl.data.named import named, names
from edgefl.data.values import pixel_fault
from edgefl.errors import DataError, Problem

#: A folder or .npz file, the name of a data set, or {name: options}.
Source = str | Path | Mapping[str, Mapping[str, object] | None]

MANIFEST_SUFFIX = Path(MANIFEST).suffix

#: What the option ``part`` of a named data set takes of it.
_PARTS: dict[object, tuple[str, ...]] = {"train": ("train", "test"), "test": ("test",), "reserved": ("reserved",)}


def load(
    source: Source, *, bad_samples: str = "error", modalities: Encoders | None = None, label_names: Sequence[str] = ()
) -> Dataset:
    """All samples of ``source``: a folder with manifest.jsonl, a manifest that names its folder, an .npz file, or a
    named data set.

    Of a named data set the option ``part`` says which: train (default), test, or reserved (of the option ``reserve``).
    ``modalities``: read only these, as their encoders take them (kind, shape, vocabulary); None: all, shapes as found.
    ``label_names``: the model's numbering of labels. ``bad_samples`` "error": one DataError that lists them; "skip":
    left out, and kept in ``Dataset.skipped``. Raises DataError also when nothing is left, or a shape does not fit.
    """
    return load_pair(source, bad_samples=bad_samples, modalities=modalities, label_names=label_names)[0]


def as_test(source: str | Mapping[str, Mapping[str, object] | None]) -> Source:
    """A test set's source: of a named data set the test part, unless its options say another ``part``."""
    named_set = {source: {}} if isinstance(source, str) and source in names() and not Path(source).exists() else source
    if not isinstance(named_set, Mapping):
        return named_set
    return {name: {"part": "test", **(options or {})} for name, options in named_set.items()}


def load_pair(
    source: Source, *, bad_samples: str = "error", modalities: Encoders | None = None, label_names: Sequence[str] = ()
) -> tuple[Dataset, Dataset | None]:
    """The same, with the official test set where ``source`` is a named data set."""
    if isinstance(source, str) and source in names() and not Path(source).exists():
        source = {source: {}}
    if isinstance(source, Mapping):
        if len(source) != 1:
            raise DataError(f"a source is one name with its options, not {len(source)}", remedy=_forms())
        ((where, given),) = source.items()
        options = dict(given or {})
        part = options.pop("part", "train")
        if part not in _PARTS:
            raise DataError(f"{where}: part is {part!r}", remedy=f"Valid: {', '.join(map(str, _PARTS))}.")
        found = named(where, options)
        halves = [half for half in (getattr(found, name) for name in _PARTS[part]) if half is not None]
        if not halves:
            raise DataError(f"{where}: no share is reserved", remedy="Set the option reserve, such as to 0.33.")
    else:
        path, where = Path(source), str(source)
        if has_manifest(path):
            root, manifest = manifest_of(path)
            halves = [
                read_manifest(root, manifest, bad_samples=bad_samples, encoders=modalities, label_names=label_names)
            ]
        elif path.suffix == ".npz":
            halves = [Dataset.load_npz(path, modalities)]
        else:
            raise _no_source(path)
    fitted = [fit(half, where, bad_samples, modalities, label_names) for half in halves]
    return fitted[0], fitted[1] if len(fitted) > 1 else None


def has_manifest(source: Source) -> TypeGuard[str | Path]:
    """True for a data folder and for a manifest file (.jsonl)."""
    if isinstance(source, Mapping):
        return False
    return Path(source).is_dir() or Path(source).suffix == MANIFEST_SUFFIX


def manifest_of(source: str | Path) -> tuple[Path, Path]:
    """Data folder and manifest of a source, which is either of them. Raises DataError."""
    path = Path(source)
    return (path, path / MANIFEST) if path.is_dir() else (folder_of(path), path)


def check_source(source: str) -> None:
    """Raise DataError for a source that is not there or is none, without reading its samples."""
    path = Path(source)
    if source in names() and not path.exists():
        return
    if path.suffix == ".npz" and not path.is_dir():
        read_npz(path, ())
    elif path.is_file() and has_manifest(path):
        folder_of(path)
    elif not path.is_dir():
        raise _no_source(path)
    elif not (path / MANIFEST).exists():
        files = sorted(path.glob("*.npz"))
        there = f"It holds {', '.join(str(file) for file in files[:3])}: name one. " if files else ""
        raise DataError(f"data source {str(path)!r} has no manifest.jsonl", remedy=there + _forms())


def _no_source(path: Path) -> DataError:
    what = "is neither a folder nor an .npz or .jsonl file" if path.exists() else "does not exist"
    return DataError(f"data source {str(path)!r} {what}", remedy=_forms())


def _forms() -> str:
    return f"Give a folder with manifest.jsonl, a manifest (.jsonl), an .npz file, or one of: {', '.join(names())}."


def fit(
    data: Dataset, where: str, bad_samples: str, modalities: Encoders | None, label_names: Sequence[str]
) -> Dataset:
    """``data`` as a model takes it: its modalities only, shapes checked, labels numbered, bad samples dealt with.

    For data that was loaded before the model was known; ``where`` names it in messages. Raises DataError.
    """
    if label_names:
        try:
            data = data.relabelled(label_names)
        except DataError as error:
            raise DataError(f"{where}: {error.message}", remedy=error.remedy) from None
    if modalities is not None:
        data = _only(data, where, modalities)
    if not len(data):
        decide([], 0, bad_samples, where)
    bad = _bad_samples(data, modalities or {})
    problems = [Problem(f"{where}:{i}", f"sample {data.ids[i]}: {bad[i]}") for i in sorted(bad)]
    decide(problems, len(data) - len(bad), bad_samples, where)
    if not bad:
        return data
    kept = np.ones(len(data), dtype=bool)
    kept[list(bad)] = False
    return replace(data.subset(kept), skipped=data.skipped + problems)


def _only(data: Dataset, where: str, modalities: Encoders) -> Dataset:
    names = [m for m in modalities if m in data.modalities]
    if not names:
        raise DataError(
            f"{where}: has {', '.join(data.modalities)}, and the model takes {', '.join(modalities)}",
            remedy="Name the model's encoders as the data names its modalities.",
        )
    for m in names:
        shape, expected = data.modalities[m].shape[1:], tuple(modalities[m].input_shape)
        if not fits(shape, expected):
            raise DataError(
                f"{where}: samples of {m!r} have shape {list(shape)}, the encoder takes {shown(expected)}",
                remedy="Prepare the arrays in that shape; of a picture encoder, set image_size to theirs.",
            )
        integers = data.modalities[m].dtype == np.int64
        if integers != (modalities[m].kind == "text"):
            what = "token ids" if integers else "no token ids"
            raise DataError(f"{where}: {m!r} holds {what}, and its encoder is of kind {modalities[m].kind}")
    return replace(data, modalities={m: data.modalities[m] for m in names}, present={m: data.present[m] for m in names})


def _all_finite(rows: np.ndarray) -> np.ndarray:
    """Rows of finite values only: [N, D] -> [N]."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite: np.ndarray = np.isfinite(rows.sum(axis=1))  # ten times as fast as all values; large ones overflow
    finite[~finite] = np.isfinite(rows[~finite]).all(axis=1)
    return finite


def _bad_samples(data: Dataset, modalities: Encoders) -> dict[int, str]:
    """Row by row what a manifest's reader has already seen to: finite values, known tokens, at least one modality."""
    bad: dict[int, str] = {}
    anything = np.zeros(len(data), dtype=bool)
    for m, values in data.modalities.items():
        anything |= data.present[m]
        flat = np.asarray(values).reshape(len(values), -1)
        vocabulary = modalities[m].vocabulary if m in modalities else 0
        if values.dtype == np.int64:
            wrong = (flat < 0).any(axis=1) | ((flat >= vocabulary).any(axis=1) if vocabulary else False)
            message = f"{m}: token ids below 0" + (f" or above {vocabulary - 1}" if vocabulary else "")
        else:
            wrong, message = ~_all_finite(flat), f"{m}: holds values that are not finite (NaN or infinite)"
        for i in np.flatnonzero(wrong):
            bad.setdefault(int(i), message)
        if m in modalities and modalities[m].kind == "vision" and pixel_fault(flat):
            for row, pixels in enumerate(flat):
                if fault := pixel_fault(pixels):
                    bad.setdefault(row, f"{m}: {fault}; store bytes, or numbers in 0..1")
    for i in np.flatnonzero(~anything):
        bad.setdefault(int(i), "has no modality" + (f" of {', '.join(modalities)}" if modalities else ""))
    return bad
