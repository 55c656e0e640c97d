"""A study's worker whose devices judge their own models by the run's whole test set, not by samples they set apart.

AproMFL is tested so (its Table 1): every client's model on the global test. A device of one modality is tested on that
modality alone, one without labels by retrieval. ``python -m benchmarks.accuracy.claims.test_set_worker``: answers as
``edgefl.api.study_worker`` does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from device_agent.trainer.local_trainer import LocalTrainer
from edgefl.api import study_worker
from edgefl.data.dataset import Dataset
from edgefl.plan.job import Job
from edgefl.storage.disk import TEST
from edgefl.training.batches import Split

_split = LocalTrainer._split  # noqa: SLF001 - put in the place of what a device sets apart


def split_with_test(trainer: LocalTrainer, job: Job) -> Split:
    """All samples of the device train; the test set, as the device could take it, in place of a hold-out."""
    made = _split(trainer, job)
    own = tuple(m for m in job.model.encoders if made.train.has(m).any())
    labelled = made.train.labels is not None and bool((made.train.labels >= 0).any())
    path = Path(trainer.settings.data).parent / f"{TEST}.npz"
    return made._replace(holdout=test_set(path, own, labelled=labelled))


@lru_cache(maxsize=8)
def test_set(path: Path, modalities: tuple[str, ...], *, labelled: bool) -> Dataset:
    """The test set of a run with these modalities; without its labels where they are not asked for."""
    data = Dataset.load_npz(path)
    labels = data.labels if labelled or data.labels is None else np.full_like(data.labels, -1)
    return replace(
        data,
        modalities={m: rows for m, rows in data.modalities.items() if m in modalities},
        present={m: flags for m, flags in data.present.items() if m in modalities},
        labels=labels,
    )


def main() -> None:
    """Serve until the study closes the pipe."""
    LocalTrainer._split = split_with_test  # type: ignore[method-assign, assignment]  # noqa: SLF001
    study_worker.main()


if __name__ == "__main__":
    main()
