"""Scores of predictions on samples with a truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.data.levels import target_errors
from edgefl.data.same_rows import shared_rows
from edgefl.export.runtime import Answers
from edgefl.report import units
from edgefl.storage.disk import SHARES, TEST
from edgefl.training.metrics import classification, ranking, several_labels


class Seen(NamedTuple):
    """Samples of a file that the bundles' run trained on, and the same file with the truth of its test set alone.

    ``held`` None: none of the file's samples are of that test set.
    """

    trained: int = 0
    held: Dataset | None = None


def seen(folder: Path, data: Dataset) -> Seen:
    """Training and test samples in ``data`` of the run whose bundles lie in ``folder``.

    Shares on other machines are not known. A score on what was trained on says little of new samples.
    """
    shares = next((path for above in folder.absolute().parents[:2] if (path := above / SHARES).is_dir()), None)
    if shares is None or data.labels is None:
        return Seen()
    parts = {path.stem: Dataset.load_npz(path) for path in sorted(shares.glob("*.npz"))}
    test = parts.pop(TEST, None)
    trained = int(shared_rows(data, list(parts.values())).sum())
    kept = shared_rows(data, [] if test is None else [test])
    if not trained or not kept.any():
        return Seen(trained)
    targets = None if data.targets is None else np.where(kept, data.targets, np.nan)
    return Seen(trained, replace(data, labels=np.where(kept, data.labels, -1), targets=targets))


def accuracy(data: Dataset, answers: list[Answers]) -> float | None:
    """Share of right answers among the labelled samples; None when none has a label, the label is a number, or a sample
    may have several.
    """
    if data.labels is None or data.targets is not None or data.sets is not None:
        return None
    pairs = [(one.prediction.classes, data.labels[one.rows]) for one in answers if len(one.prediction.classes)]
    total = sum(int((truth >= 0).sum()) for _, truth in pairs)
    return sum(int(((found == truth) & (truth >= 0)).sum()) for found, truth in pairs) / total if total else None


def averages(data: Dataset, answers: list[Answers]) -> dict[str, float]:
    """Averages over classes among the labelled samples, {} where there is none, or the label is a number.

    macro_f1, top5_accuracy and macro_auroc; of several labels mean_average_precision and macro_f1.
    """
    if data.labels is None or data.targets is not None:
        return {}
    judged = [(one.prediction.probabilities, one.rows) for one in answers if len(one.prediction.classes)]
    scores, rows = (np.concatenate(side) for side in zip(*judged, strict=True)) if judged else (np.empty((0, 0)),) * 2
    told = data.labels[rows.astype(np.int64)] >= 0
    if not told.any():
        return {}
    scores, rows = scores[told], rows[told]
    if data.sets is not None:
        return several_labels(scores, data.sets[rows])
    truth = data.labels[rows]
    return {"macro_f1": classification(scores.argmax(1), truth)["macro_f1"], **ranking(scores, truth)}


def errors(data: Dataset, answers: list[Answers]) -> dict[str, float]:
    """R² and the mean errors among the samples with a numeric target; {} where there is none."""
    if data.targets is None:
        return {}
    pairs = [(one.prediction.values, data.targets[one.rows]) for one in answers if one.prediction.values is not None]
    values, truth = (np.concatenate(side) for side in zip(*pairs, strict=True)) if pairs else (np.empty(0), np.empty(0))
    told = ~np.isnan(truth)
    return target_errors(values[told], truth[told]) if told.any() else {}


def in_words(data: Dataset, answers: list[Answers]) -> list[str]:
    """The scores as a sentence; [] where no sample has a truth."""
    if wrong := errors(data, answers):
        return [", ".join(f"{units.metric_words(name)} {units.number(x)}" for name, x in wrong.items()) + "."]
    share, told = accuracy(data, answers), averages(data, answers)
    more = ", ".join(f"{units.metric_words(m)} {units.score(m, x)}" for m, x in told.items())
    if share is None:
        return [f"{more[:1].upper()}{more[1:]}."] if told else []
    each = [f"{given(a)} {units.percent(value)}" for a in answers if (value := accuracy(data, [a])) is not None]
    parts = f" ({', '.join(each)})" if len(each) > 1 else ""
    return [f"Accuracy {units.percent(share)}{parts}, {more}."]


def known(data: Dataset) -> int:
    """Number of samples with a truth."""
    return 0 if data.labels is None else int((data.labels >= 0).sum())


def given(one: Answers) -> str:
    """The modalities that answered, such as "acc+gyro"."""
    return "+".join(one.modalities)
