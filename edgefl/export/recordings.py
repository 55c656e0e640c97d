"""Answers to recordings cut into windows: the mean of the windows' probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import THRESHOLD, classes_in, in_words, plain_names
from edgefl.data.levels import expected_value, levels_in
from edgefl.export.runtime import Answers


@dataclass(frozen=True)
class RecordingAnswer:
    """Answer to a recording. ``probabilities`` [C]: mean over ``windows`` windows; ``truth``: its label or None."""

    id: str
    windows: int
    label: str
    probabilities: npt.NDArray[np.float64]
    truth: str | None = None


def of_recordings(data: Dataset, answers: Sequence[Answers], labels: Sequence[str]) -> list[RecordingAnswer]:
    """One answer a recording, in the order of the data; none where the samples are no windows, or get no labels."""
    classified = [one for one in answers if len(one.prediction.classes)]
    if data.recordings is None or not classified:
        return []
    found, first, unit = np.unique(data.recordings, return_index=True, return_inverse=True)
    sums, counts = np.zeros((len(found), len(labels))), np.zeros(len(found), np.int64)
    for one in classified:
        np.add.at(sums, unit[one.rows], one.prediction.probabilities)
        np.add.at(counts, unit[one.rows], 1)
    levels = levels_in(labels)
    made = []
    for i in np.argsort(first):
        if counts[i]:
            mean = sums[i] / counts[i]
            label = _label(mean, labels) if levels is None else f"{expected_value(mean, levels):.6g}"
            made.append(RecordingAnswer(str(found[i]), int(counts[i]), label, mean, truth_of(data, int(first[i]))))
    return made


def _label(mean: npt.NDArray[np.float64], labels: Sequence[str]) -> str:
    several = classes_in(labels)
    return plain_names(labels)[int(mean.argmax())] if several is None else in_words(mean >= THRESHOLD, several)


def truth_of(data: Dataset, row: int) -> str | None:
    """The label of a sample in words; None: it has none."""
    words = data.label_words(row)
    return words if words is None or data.targets is None else f"{data.targets[row]:.6g}"
