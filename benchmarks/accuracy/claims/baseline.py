"""The simple baseline of a task: logistic regression on simple features of the training samples, all in one place."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.accuracy.baselines import probe, simple
from benchmarks.accuracy.claims.study import Study, digest
from edgefl.data.named import named

#: File of the figures in the folder of results.
FILE = "baselines.json"


class Baseline(msgspec.Struct, frozen=True):
    """Accuracy on the test set, with all modalities and with each alone. ``data``: digest of the task's source."""

    data: str
    complete: float
    alone: dict[str, float]

    @property
    def text(self) -> str:
        """Such as 98.1 % (image alone 91.5 %, audio alone 96.7 %)."""
        each = ", ".join(f"{m} alone {100 * value:.1f} %" for m, value in self.alone.items())
        return f"{100 * self.complete:.1f} % ({each})"


def source_of(study: Study, task: str) -> dict[str, dict[str, object]]:
    """The data source of a task, as its run file names it."""
    found: dict[str, dict[str, object]] = study.tasks[task]["run"]["data"]["source"]
    return found


def key(study: Study, task: str) -> str:
    """Tasks of the same data have the same baseline."""
    return digest({"source": source_of(study, task)})


def kept(path: Path) -> dict[str, Baseline]:
    """The figures that there are, by ``key``."""
    rows = msgspec.json.decode(path.read_bytes(), type=list[Baseline]) if path.is_file() else []
    return {row.data: row for row in rows}


def fill(studies: Iterable[Study], path: Path) -> None:
    """Compute those that are not there yet; some minutes of a core each."""
    found = kept(path)
    for study in studies:
        for task in study.tasks:
            if key(study, task) not in found:
                found[key(study, task)] = measured(study, task)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(msgspec.json.format(msgspec.json.encode(list(found.values()))) + b"\n")


def measured(study: Study, task: str) -> Baseline:
    """The figures of a task: fitted to all training samples, complete, in one thread; as ``probe`` judges."""
    ((name, options),) = source_of(study, task).items()
    data = named(name, options)
    parts = (data.train, data.test)
    features = {m: [simple(np.asarray(part.modalities[m]), m) for part in parts] for m in data.train.modalities}
    labels = [np.asarray(part.labels) for part in parts]

    def score(modalities: Iterable[str]) -> float:
        train, test = (np.concatenate([features[m][i] for m in modalities], axis=1) for i in range(2))
        return round(probe((train, labels[0]), (test, labels[1])), 4)

    with threadpool_limits(1):
        return Baseline(key(study, task), score(features), {m: score([m]) for m in features})
