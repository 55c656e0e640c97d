"""The simple baseline of a task: logistic regression on simple features of the training samples, all in one place."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import GroupShuffleSplit
from sklearn.pipeline import Pipeline
from threadpoolctl import threadpool_limits

from benchmarks.accuracy.baselines import STRENGTHS, regression, simple
from benchmarks.accuracy.claims.study import Study, digest
from edgefl.data.named import named

#: File of the baselines in the folder of results.
FILE = "baselines.json"
#: Share of the people or speakers in training whose samples choose the strength of regularisation.
HELD_OUT = 0.2
Array = NDArray[Any]


class Baseline(msgspec.Struct, frozen=True):
    """Accuracy on the test set, with all modalities and with each alone. ``data``: digest of the task's data source."""

    data: str
    complete: float
    alone: dict[str, float]

    @property
    def text(self) -> str:
        """Such as 98.1 % (image alone 91.5 %, audio alone 96.7 %)."""
        each = ", ".join(f"{m} alone {100 * value:.1f} %" for m, value in self.alone.items())
        return f"{100 * self.complete:.1f} % ({each})"

    @property
    def bounds(self) -> dict[str, float]:
        """In percent: "baseline" with all modalities, "baseline alone" the mean of each alone."""
        return {"baseline": 100 * self.complete, "baseline alone": 100 * fmean(self.alone.values())}


def source_of(study: Study, task: str) -> dict[str, dict[str, object]]:
    """The data source of a task, as its run file names it."""
    found: dict[str, dict[str, object]] = study.tasks[task]["run"]["data"]["source"]
    return found


def key(study: Study, task: str) -> str:
    """Digest of a task's data source: tasks of the same data have the same baseline."""
    return digest({"source": source_of(study, task)})


def kept(path: Path) -> dict[str, Baseline]:
    """The baselines in a file, by ``key``; none where it does not exist."""
    rows = msgspec.json.decode(path.read_bytes(), type=list[Baseline]) if path.is_file() else []
    return {row.data: row for row in rows}


def fill(study: Study, tasks: Iterable[str], path: Path) -> None:
    """Measure the baselines of these tasks that the file lacks, and add them; some minutes of a core each."""
    found = kept(path)
    for task in tasks:
        if key(study, task) not in found:
            found[key(study, task)] = measured(study, task)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(list(found.values()))) + b"\n")


def measured(study: Study, task: str) -> Baseline:
    """A task's baseline, fitted to all its training samples with all their modalities, in one thread."""
    ((name, options),) = source_of(study, task).items()
    data = named(name, options)
    features = {
        m: [simple(np.asarray(part.modalities[m]), m) for part in (data.train, data.test)]
        for m in data.train.modalities
    }
    labels, expected = np.asarray(data.train.labels), np.asarray(data.test.labels)
    groups = np.arange(len(labels)) if data.groups is None else data.groups

    def score(modalities: Iterable[str]) -> float:
        train, test = (np.concatenate([features[m][i] for m in modalities], axis=1) for i in range(2))
        return round(float(fitted(train, labels, groups).score(test, expected)), 4)

    with threadpool_limits(1):
        return Baseline(key(study, task), score(features), {m: score([m]) for m in features})


def fitted(features: Array, labels: Array, groups: Array) -> Pipeline:
    """A logistic regression whose regularisation is chosen on a fifth of the ``groups`` [N], then fitted to all."""
    ((own, others),) = GroupShuffleSplit(1, test_size=HELD_OUT, random_state=0).split(features, labels, groups)

    def fit(strength: float, rows: Array) -> Pipeline:
        return regression(strength).fit(features[rows], labels[rows])

    best = max(STRENGTHS, key=lambda strength: float(fit(strength, own).score(features[others], labels[others])))
    return fit(best, np.arange(len(labels)))
