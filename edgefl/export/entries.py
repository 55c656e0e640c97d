"""Answers as JSON entries, the same in ``edgefl predict`` and in a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import THRESHOLD, classes_in, plain_names
from edgefl.data.levels import central_interval, levels_in
from edgefl.export.recordings import of_recordings
from edgefl.export.runtime import Answers

#: Grows when a field changes its meaning or goes away.
SCHEMA = "edgefl.predictions/1"


def entry(answers: Answers, at: int, name: str, labels: Sequence[str], truth: str | None = None) -> dict[str, object]:
    """One sample's answer: label, probabilities and stand-ins for absent modalities; or its embeddings.

    Where a sample may have several labels, they are under "labels" too.
    """
    found = answers.prediction
    told: dict[str, object] = {"id": name, "bundle": answers.bundle, "given": list(answers.modalities)}
    if not len(found.classes):
        return {**told, "embeddings": {m: vectors[at].tolist() for m, vectors in embeddings(answers).items()}}
    likeliest = None if found.values is not None else float(found.probabilities[at].max())
    told |= {"label": found.labels[at], "probability": likeliest, "truth": truth}
    if found.values is not None:
        told |= {"value": float(found.values[at]), "interval": interval(found.probabilities[at], labels)}
    if (several := classes_in(labels)) is not None:
        likely = zip(several, found.probabilities[at], strict=True)
        told["labels"] = [name for name, probability in likely if probability >= THRESHOLD]
    told["probabilities"] = dict(zip(plain_names(labels), found.probabilities[at].tolist(), strict=True))
    if found.matched:
        told["matched"] = {m: matched(answers, m, at, labels) for m in found.matched if m not in answers.modalities}
    return told


def interval(probabilities: npt.ArrayLike, labels: Sequence[str]) -> list[float] | None:
    """The 80 % interval of a number, by the probabilities [K] of its levels; None: the labels are classes."""
    levels = levels_in(labels)
    return None if levels is None else central_interval(probabilities, levels)


def recording_entries(data: Dataset, answers: Sequence[Answers], labels: Sequence[str]) -> list[dict[str, object]]:
    """Answers of recordings cut into windows: means over their windows."""
    return [
        {
            "id": row.id,
            "windows": row.windows,
            "label": row.label,
            "truth": row.truth,
            "interval": interval(row.probabilities, labels),
            "probabilities": dict(zip(plain_names(labels), row.probabilities.tolist(), strict=True)),
        }
        for row in of_recordings(data, answers, labels)
    ]


def matched(answers: Answers, modality: str, at: int, labels: Sequence[str]) -> list[dict[str, object]]:
    """Prototypes in place of an absent modality, best first: labels with weights."""
    match, names = answers.prediction.matched[modality], plain_names(labels)
    return [
        {"label": names[c] if c < len(labels) else str(c), "weight": w}
        for c, w in zip(match.rows[at].tolist(), match.weights[at].tolist(), strict=True)
        if c >= 0
    ]


def embeddings(answers: Answers) -> dict[str, np.ndarray]:
    """Modality -> embeddings, of the samples' modalities."""
    return {m: e for m, e in answers.prediction.embeddings.items() if m in answers.modalities}
