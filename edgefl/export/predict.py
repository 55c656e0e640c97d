"""A data set through a folder of bundles: each sample by a bundle that uses every modality the sample has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.errors import DataError
from edgefl.export.manifest import Manifest
from edgefl.export.runtime import Bundle, Prediction, load_bundle
from edgefl.export.session import Device
from edgefl.models.spec import EncoderSpec


@dataclass(frozen=True)
class Answers:
    """One bundle's predictions for samples that have the same ``modalities``, all of which it used.

    ``rows`` of the data set [n], in the order of the prediction's samples. ``mask``: what stood in for the model's
    other modalities; "none": there are no others.
    """

    bundle: str
    modalities: tuple[str, ...]
    rows: np.ndarray
    prediction: Prediction
    mask: str = "none"


def encoders(bundles: Mapping[Path, Manifest]) -> dict[str, EncoderSpec]:
    """Every modality that at least one of the bundles takes."""
    return {m: encoder for manifest in bundles.values() for m, encoder in manifest.encoders.items()}


def choose(bundles: Mapping[Path, Manifest], has: frozenset[str]) -> Path | None:
    """The bundle that answers samples with exactly the modalities ``has``; of several the one that takes fewest.

    So a single modality's bundle where there is one modality, else the one of all. None: there is no such bundle.
    """
    fitting = [path for path, manifest in bundles.items() if manifest.serves(has)]
    return min(fitting, key=lambda path: len(bundles[path].modalities), default=None)


def apply(
    bundles: Mapping[Path, Manifest], data: Dataset, *, mask: str | None = None, device: Device = "cpu"
) -> tuple[list[Answers], np.ndarray]:
    """Predictions of the bundles, and the rows [n] that none of them can take. Loads only the bundles that are needed.

    ``mask`` applies where something is filled in. Raises DataError for samples of which the bundles could use a part
    only, and as ``load_bundle`` and ``Bundle.predict``.
    """
    names = tuple(m for m in encoders(bundles) if m in data.modalities)
    has = np.stack([data.present[m] for m in names], axis=1)  # [N, M]
    answers: list[Answers] = []
    left: list[int] = []
    loaded: dict[Path, Bundle] = {}
    for pattern in np.unique(has, axis=0)[::-1]:  # the most complete samples first
        rows = np.flatnonzero((has == pattern).all(axis=1))
        given = tuple(m for m, there in zip(names, pattern.tolist(), strict=True) if there)
        path = choose(bundles, frozenset(given))
        if path is None:
            _refuse_parts(bundles, given, data.ids[rows[0]])
            left += rows.tolist()
            continue
        if path not in loaded:
            loaded[path] = load_bundle(path, device=device)
        bundle = loaded[path]
        fills = set(bundle.manifest.fills) - set(given)
        used = (mask or bundle.manifest.mask) if fills else "none"
        inputs = {m: data.modalities[m][rows] for m in given}
        prediction = bundle.predict(inputs, mask=None if used == "none" else used)
        answers.append(Answers(bundle.manifest.name, given, rows, prediction, used))
    return answers, np.array(sorted(left), np.int64)


def _refuse_parts(bundles: Mapping[Path, Manifest], given: tuple[str, ...], sample: str) -> None:
    """Raise for a sample that a bundle could answer only by dropping some of what it has."""
    usable = [manifest.modalities for manifest in bundles.values() if set(manifest.modalities) < set(given)]
    if usable:
        most = max(usable, key=len)
        unused = ", ".join(m for m in given if m not in most)
        raise DataError(
            f"sample {sample} has {' + '.join(given)}, and no bundle uses them together: {unused} would be dropped",
            remedy="Export the run again, whose bundle of all modalities then takes any of them, or choose what to use "
            f"with {' '.join(f'--modality {m}' for m in most)}.",
        )
