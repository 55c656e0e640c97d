"""The closing round: the small models that match a modality to classes, or to another modality, on the finished model.

PmcmFL (arXiv 2312.13508, section 3.3 and appendix D): each client trains them in the final round. The model does not
change; it only makes the projections that they learn from.
"""

from __future__ import annotations

import numpy as np
import torch

from edgefl.data.dataset import Dataset
from edgefl.methods.prototypes.matcher_networks import MatcherSettings, train_classifier, train_prior
from edgefl.models.parts import part_tensors
from edgefl.models.staged import StagedModel
from edgefl.plan.job import Job
from edgefl.resources.flops import FlopCounter
from edgefl.training.auxiliary import projections_of
from edgefl.training.flop_cache import FlopCounts

#: Fewest samples a small model is trained on.
_LEAST = 2


def match_parts(
    job: Job, model: StagedModel, dataset: Dataset, device: str, counts: FlopCounts, rng: np.random.Generator
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, int], float]:
    """(parts "match/<m>" trained here, samples of each, FLOPs). A modality without samples that can teach has none.

    ``model`` stays as it is, in evaluation mode.
    """
    model.requires_grad_(False).eval()
    settings = MatcherSettings()
    parts: dict[str, dict[str, np.ndarray]] = {}
    samples: dict[str, int] = {}
    projections, flops = projections_of(job, model, dataset, counts)
    for m, r in projections.items():
        if f"match/{m}" not in model.parts_present:
            continue
        if job.model.matching == "classifier":
            count, spent = _classify(model, m, r, dataset, settings, counts, rng, device)
        else:
            with FlopCounter() as counter:  # a contrast compares every row with every other: not a sum over rows
                count = _prior(model, m, projections, dataset, settings, rng, device)
            spent = float(counter.flops)
        flops += spent
        if count:
            parts[f"match/{m}"], samples[f"match/{m}"] = part_tensors(model, f"match/{m}"), count
    return parts, samples, flops


def _classify(
    model: StagedModel,
    m: str,
    r: np.ndarray,
    dataset: Dataset,
    settings: MatcherSettings,
    counts: FlopCounts,
    rng: np.random.Generator,
    device: str,
) -> tuple[int, float]:
    """(samples, FLOPs)."""
    known = dataset.has(m) & (dataset.labels >= 0) if dataset.labels is not None else np.zeros(len(dataset), bool)
    if known.sum() < _LEAST or dataset.labels is None:
        return 0, 0.0
    x, y = torch.from_numpy(r[known]).to(device), torch.from_numpy(dataset.labels[known]).to(device)
    small = model.part(f"match/{m}")
    kind = f"classifier {r.shape[1]} {model.spec.classes} {settings}".encode()
    _, flops = counts.run(
        kind, (("rows", len(x)),), lambda: train_classifier(small, x, y, settings, rng), linear="rows"
    )
    return len(x), flops


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
