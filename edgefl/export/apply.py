"""A data set through a folder of bundles: each sample by the bundle that takes most of what the sample has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.export.manifest import Manifest
from edgefl.export.serve import Prediction, load_bundle
from edgefl.export.session import Device
from edgefl.models.spec import EncoderSpec


@dataclass(frozen=True)
class Answers:
    """What one bundle said: ``rows`` of the data set [n], in the order of the prediction's samples.

    ``mask``: what stood in for the modalities the bundle does not take; "none": it takes them all.
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
    """The bundle that takes most of the modalities in ``has`` and nothing else; of equals the first. None: no such.

    So the complete bundle where everything is there, else a single modality's.
    """
    fitting = [path for path, manifest in bundles.items() if set(manifest.modalities) <= has]
    return max(fitting, key=lambda path: len(bundles[path].modalities), default=None)


def apply(
    bundles: Mapping[Path, Manifest], data: Dataset, *, mask: str | None = None, device: Device = "cpu"
) -> tuple[list[Answers], np.ndarray]:
    """What the bundles say, and the rows [n] that none of them can take. Loads only the bundles that are needed.

    ``mask`` applies to the bundles that fill something in. Raises as ``load_bundle`` and ``Bundle.predict``.
    """
    chosen: dict[Path, list[int]] = {}
    left = []
    for row in range(len(data)):
        has = frozenset(m for m in data.modalities if data.present[m][row])
        path = choose(bundles, has)
        if path is None:
            left.append(row)
        else:
            chosen.setdefault(path, []).append(row)
    answers = []
    for path, indices in chosen.items():
        rows = np.array(indices, np.int64)
        bundle = load_bundle(path, device=device)
        inputs = {m: data.modalities[m][rows] for m in bundle.modalities}
        used = (mask or bundle.manifest.mask) if bundle.manifest.absent else "none"
        prediction = bundle.predict(inputs, mask=None if used == "none" else used)
        answers.append(Answers(bundle.manifest.name, bundle.modalities, rows, prediction, used))
    return answers, np.array(left, np.int64)
