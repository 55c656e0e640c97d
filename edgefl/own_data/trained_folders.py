"""A folder of new files as a model's samples, one for each stem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edgefl.data.dataset import Dataset
from edgefl.data.folder import MANIFEST
from edgefl.data.raw_sample import SAMPLES
from edgefl.errors import DataError, Problem
from edgefl.models.spec import EncoderSpec
from edgefl.own_data.samples import files_alone
from edgefl.own_data.trained_tables import read_known
from edgefl.own_data.understood import Sample

#: Unused files that are named.
_NAMED = 20


def is_new_folder(path: Path) -> bool:
    """True for a folder of files without a manifest."""
    return path.is_dir() and not (path / MANIFEST).exists()


def read_folder(
    folder: Path, encoders: Mapping[str, EncoderSpec], labels: Sequence[str], bad_samples: str = "error"
) -> Dataset:
    """The samples of a folder by the names of its files and sub-folders, as `edgefl init` reads them.

    A label in these is the truth where the model knows it. Files that no encoder takes are in ``Dataset.skipped``.
    Raises DataError.
    """
    kinds = {encoder.kind for encoder in encoders.values()}
    found = files_alone(folder, [suffix for suffix, of in SAMPLES.items() if kinds & set(of)])
    for sample in found.samples:
        sample.values, left = _by_encoder(sample, encoders)
        found.unused |= left
    samples = [sample for sample in found.samples if sample.values]
    if not samples:
        listed = "; ".join(f"{path}: {why}" for path, why in list(found.unused.items())[:3]) or "it has no files"
        raise DataError(
            f"{folder}: no file is a sample of these bundles ({listed})",
            remedy=f"They take {', '.join(f'{m} ({encoder.kind})' for m, encoder in encoders.items())}: lay the files "
            "out as those that trained, or write manifest.jsonl (docs/data.md).",
        )
    try:
        data = read_known(samples, folder, folder, encoders, labels, bad_samples)
    except DataError as error:
        files = re.sub(rf"{re.escape(MANIFEST)}:\d+: ", "", error.message)  # line numbers of the temporary manifest
        raise DataError(files, remedy="Mend or remove these files, or leave them out by --bad-samples skip.") from None
    unused = [Problem(path, why) for path, why in found.unused.items()]
    rest = [Problem(str(folder), f"{len(unused) - _NAMED} files more")] if len(unused) > _NAMED else []
    return replace(data, skipped=[*data.skipped, *unused[:_NAMED], *rest])


def _by_encoder(sample: Sample, encoders: Mapping[str, EncoderSpec]) -> tuple[dict[str, object], dict[str, str]]:
    """Files by the modality that takes them: the one they are called after, else the only one of their kind; and why
    others are left out.
    """
    values: dict[str, object] = {}
    left: dict[str, str] = {}
    for name, path in sample.values.items():
        kinds = SAMPLES[Path(str(path)).suffix.lower()]
        fitting = [m for m, encoder in encoders.items() if encoder.kind in kinds]
        fitting = [name] if name in fitting else fitting
        if len(fitting) != 1 or fitting[0] in values:
            left[str(path)] = f"may be {' or '.join(fitting)}: name a folder, or the end of the files' names, after it"
        else:
            values[fitting[0]] = path
    return values, left
