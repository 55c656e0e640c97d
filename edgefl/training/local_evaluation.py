"""A device's own judgement: its model on the samples it set apart, as received and as trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import PROTOTYPES
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job
from edgefl.plan.training_samples import needs_pairs
from edgefl.prototypes.table import from_tensors
from edgefl.registry import chosen
from edgefl.training.evaluate import judge
from edgefl.training.fill import at_inference
from edgefl.training.flop_cache import counted, kind_of_step, linear_in
from edgefl.training.scoring import matcher_of

Tensors = Mapping[str, np.ndarray]


def personal_evaluation(
    job: Job,
    model: StagedModel,
    holdout: Dataset,
    parts: Mapping[str, Tensors],
    kept: Mapping[str, Tensors],
    statistics: Callable[[], None],
) -> dict[str, float]:
    """Metrics of the personal model: that of the device's last round with the layer it was sent for its poverty layer.

    (MMiC.) ``statistics``: takes batch norm's of ``model`` where the job asks for it. ``model`` holds afterwards what
    it held before. Without such a model: no metrics.
    """
    own = [part for part in job.stage.trained if part in kept]
    repair = chosen("repair", job.slots.repair)[0].method
    if not repair.personal or not len(holdout) or len(own) < len(job.stage.trained):
        return {}
    better: dict[str, dict[str, np.ndarray]] = {}
    for key, value in parts.get(repair.part, {}).items():
        part, _, name = key.partition("|")
        better.setdefault(part, {})[name] = value
    before = {part: part_tensors(model, part) for part in own}
    for part in own:
        load_part(model, part, {**kept[part], **better.get(part, {})})
    statistics()
    found = local_evaluation(job, model, holdout, parts, "personal")
    for part, tensors in before.items():
        load_part(model, part, tensors)
    return found


def local_evaluation(
    job: Job, model: StagedModel, holdout: Dataset, parts: Mapping[str, Tensors], prefix: str
) -> dict[str, float]:
    """Metrics "<prefix>_<name>" on the samples ``holdout``; without samples none.

    "<prefix>_score" is what returns are made of: accuracy, or where nothing is labelled the mean recall at 1. Absent
    modalities are filled in as the recipe trains them; zeros where that takes prototypes and there are none yet, and in
    place of noise. ``model`` ends in evaluation mode.
    """
    if not len(holdout):
        return {}
    labelled = bool(job.model.classes) and holdout.labels is not None and bool((holdout.labels >= 0).any())
    tasks = frozenset(
        name for name, there in (("classification", labelled), ("retrieval", needs_pairs(job.slots))) if there
    )
    tables = from_tensors(parts[PROTOTYPES]) if PROTOTYPES in parts else {}
    own = [m for m in job.model.encoders if f"head/{m}" in job.stage.present]
    matcher = matcher_of(job.slots, {})
    mask = at_inference(job.slots.missing, job.model, tables)
    kind = "+".join(("evaluation", *sorted(tasks))).encode() + kind_of_step(job, with_tables=bool(tables))
    rows = {m: int(holdout.has(m).sum()) for m in own}
    complete = int(np.logical_and.reduce([holdout.has(m) for m in own]).sum())
    known = int((holdout.labels >= 0).sum()) if labelled and holdout.labels is not None else 0
    found = counted(
        kind,
        (("", len(holdout)), ("&", complete), ("labelled", known), *sorted(rows.items())),
        lambda: judge(model, holdout, job.stage.depth, tables, tasks, own, mask=mask, matcher=matcher),
        linear="nothing" if tables else linear_in(job),  # matching costs by pairs of modalities
    )
    recalls = [value for name, value in found.items() if name.endswith("_recall_at_1")]
    score = found.get("accuracy", float(np.mean(recalls)) if recalls else None)
    metrics = {f"{prefix}_{name}": value for name, value in found.items()}
    return metrics | ({f"{prefix}_score": score} if score is not None else {})
