"""A device's own judgement: its model on the samples it set apart, as received and as trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import PROTOTYPES
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job
from edgefl.plan.training_samples import needs_pairs, rows_of_step
from edgefl.prototypes.table import from_tensors
from edgefl.registry import chosen
from edgefl.training.embeddings import BATCH
from edgefl.training.evaluate import Criteria, Tensors, judge
from edgefl.training.exchanged_layers import by_part
from edgefl.training.fill import at_inference, matcher_of
from edgefl.training.flop_cache import counted, kind_of_step, linear_in


def personal_evaluation(
    job: Job,
    model: StagedModel,
    holdout: Dataset,
    parts: Mapping[str, Tensors],
    kept: Mapping[str, Tensors],
    statistics: Callable[[], None],
) -> dict[str, float]:
    """Metrics of MMiC's personal model on the device's hold-out set.

    Personal model: the weights ``kept`` from the device's last round, its poverty layer replaced by the one in
    ``parts`` (sent by the server). ``statistics``: recomputes batch-norm statistics. ``model`` is restored afterwards.
    {} if the recipe has no repair, the hold-out set is empty, or a trained part was not kept.
    """
    own = [part for part in job.stage.trained if part in kept]
    repair = chosen("repair", job.slots.repair)[0]
    if not repair.method.mend or not len(holdout) or len(own) < len(job.stage.trained):
        return {}
    better = by_part(parts.get(repair.name, {}))
    before = {part: part_tensors(model, part) for part in own}
    for part in own:
        load_part(model, part, {**kept[part], **better.get(part, {})})
    statistics()
    found = local_evaluation(job, model, holdout, parts, "personal")
    for part, tensors in before.items():
        load_part(model, part, tensors)
    return found


def losses_by_modalities(
    job: Job, model: StagedModel, holdout: Dataset, parts: Mapping[str, Tensors]
) -> dict[frozenset[str], float]:
    """Loss of ``model`` given only these of the device's modalities, the others filled in, for every set of them.

    On the labelled samples of ``holdout`` that have them all; {} when there is none.
    """
    own = [m for m in job.model.encoders if holdout.has(m).any()]
    complete = holdout.subset(holdout.complete(own)) if own else holdout
    found = {}
    for some in subsets(own):
        metrics = local_evaluation(job, model, _given(complete, some), parts, "given")
        if "given_loss" in metrics:
            found[frozenset(some)] = metrics["given_loss"]
    return found


def subsets(modalities: Sequence[str]) -> list[tuple[str, ...]]:
    """Every set of these modalities but the empty one."""
    return [some for n in range(1, len(modalities) + 1) for some in combinations(modalities, n)]


def _given(data: Dataset, modalities: Sequence[str]) -> Dataset:
    """The samples as if they had these modalities alone."""
    return replace(
        data,
        modalities={m: data.modalities[m] for m in modalities},
        present={m: data.present[m] for m in modalities},
        encoded={m: rows for m, rows in data.encoded.items() if m in modalities},
    )


def local_evaluation(
    job: Job,
    model: StagedModel,
    holdout: Dataset,
    parts: Mapping[str, Tensors],
    prefix: str,
    candidates: tuple[int, ...] = (),
) -> dict[str, float]:
    """Metrics "<prefix>_<name>" of a device's own model on the samples ``holdout`` it set apart; without samples none.

    "<prefix>_score" is what returns are made of: accuracy, R² of a numeric target, mean average precision, or without
    labels the mean recall at 1. Absent modalities are filled in as the recipe trains them; zeros where that takes
    prototypes and there are none yet, and in place of noise. ``candidates``: values of k, each with its right answers
    by the prototype mask among the metrics. ``model`` ends in evaluation mode.
    """
    if not len(holdout):
        return {}
    known = int((holdout.labels >= 0).sum()) if job.model.classes and holdout.labels is not None else 0
    asked = {"classification": known > 0, "retrieval": needs_pairs(job.slots)}
    tasks = frozenset(name for name, there in asked.items() if there)
    tables = from_tensors(parts[PROTOTYPES]) if PROTOTYPES in parts else {}
    own = [m for m in job.model.encoders if f"head/{m}" in job.stage.present]
    mask = at_inference(job.slots.missing, job.model, tables)
    matcher = matcher_of(job.slots, {}, job.k)
    together, missing = min(BATCH, rows_of_step(job)), job.slots.missing
    criteria = Criteria(tasks, mask=mask, matcher=matcher, candidates=candidates, missing=missing, together=together)
    compared = (f"k={k}" for k in candidates)
    kind = "+".join(("evaluation", *sorted(tasks), *compared)).encode() + kind_of_step(job, with_tables=bool(tables))
    complete = int(np.logical_and.reduce([holdout.has(m) for m in own]).sum())
    rows = sorted((m, int(holdout.has(m).sum())) for m in own)
    found = counted(
        kind,
        (("", len(holdout)), ("&", complete), ("labelled", known), *rows),
        lambda: judge(model, holdout, job.stage.depth, tables, own, criteria),
        linear="nothing" if tables else linear_in(job),  # matching costs by pairs of modalities
    )
    recalls = [value for name, value in found.items() if name.endswith("_recall_at_1")]
    metrics = {f"{prefix}_{name}": value for name, value in found.items()}
    share = max(0.0, found["r2"]) if "r2" in found else found.get("accuracy", found.get("mean_average_precision"))
    if share is not None or recalls:
        metrics[f"{prefix}_score"] = float(np.mean(recalls)) if share is None else share
    return metrics
