"""The last round's extra: the small models that match a modality to classes, or to another modality (PmcmFL)."""

from __future__ import annotations

import numpy as np
import torch

from edgefl.data.dataset import Dataset
from edgefl.models.build import StagedModel
from edgefl.models.state import part_tensors
from edgefl.plan.values import Job
from edgefl.resources.flops import FlopCounter
from edgefl.training.companions import projections_of
from edgefl.training.matchers import MatcherSettings, train_classifier, train_prior

#: Fewest samples a small model is trained on.
_LEAST = 2


def match_parts(
    job: Job, model: StagedModel, dataset: Dataset, device: str, rng: np.random.Generator
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, int], float]:
    """(parts "match/<m>" trained here, samples of each, FLOPs). A modality without samples that can teach has none."""
    if job.model.matching == "none" or not job.last:
        return {}, {}, 0.0
    settings = MatcherSettings()
    parts: dict[str, dict[str, np.ndarray]] = {}
    samples: dict[str, int] = {}
    with FlopCounter() as counter:
        projections = projections_of(job, model, dataset)
        for m, r in projections.items():
            if f"match/{m}" not in model.parts_present:
                continue
            if job.model.matching == "classifier":
                count = _classify(model, m, r, dataset, settings, rng, device)
            else:
                count = _prior(model, m, projections, dataset, settings, rng, device)
            if count:
                parts[f"match/{m}"], samples[f"match/{m}"] = part_tensors(model, f"match/{m}"), count
    return parts, samples, float(counter.flops)


def _classify(
    model: StagedModel,
    m: str,
    r: np.ndarray,
    dataset: Dataset,
    settings: MatcherSettings,
    rng: np.random.Generator,
    device: str,
) -> int:
    known = dataset.has(m) & (dataset.labels >= 0) if dataset.labels is not None else np.zeros(len(dataset), bool)
    if known.sum() < _LEAST or dataset.labels is None:
        return 0
    x, y = torch.from_numpy(r[known]).to(device), torch.from_numpy(dataset.labels[known]).to(device)
    train_classifier(model.part(f"match/{m}"), x, y, settings, rng)
    return int(known.sum())


def _prior(
    model: StagedModel,
    m: str,
    projections: dict[str, np.ndarray],
    dataset: Dataset,
    settings: MatcherSettings,
    rng: np.random.Generator,
    device: str,
) -> int:
    most = 0
    for other, r in projections.items():
        both = dataset.has(m) & dataset.has(other)
        if other == m or both.sum() < _LEAST:
            continue
        own, theirs = (torch.from_numpy(values[both]).to(device) for values in (projections[m], r))
        train_prior(model.part(f"match/{m}").get_submodule(f"to/{other}"), own, theirs, settings, rng)
        most = max(most, int(both.sum()))
    return most
