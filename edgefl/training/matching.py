"""The small networks that match a modality to classes, or to another modality: their training, and what they answer.

PmcmFL (arXiv 2312.13508, section 3.3 and appendix D): each client trains them in the final, closing round, on the
finished model. The model does not change; it only makes the projections that they learn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from edgefl.data.dataset import Dataset
from edgefl.methods.pmcmfl.matcher_networks import MatcherSettings, train_classifier, train_prior
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Job, Slots
from edgefl.prototypes import mask
from edgefl.prototypes.mask import Matcher
from edgefl.training.embeddings import device_of, projections_of
from edgefl.training.fill import matcher_of

Tensors = Mapping[str, np.ndarray]
#: "match/<m>" -> the names of its small networks, with their weights
Networks = Mapping[str, Mapping[str, float]]
#: The network of each device that has one, with its weight.
WeightedNetworks = Sequence[tuple[float, StagedModel]]


def matching(
    model: ModelSpec,
    parts: Mapping[str, Tensors],
    slots: Slots,
    networks: Networks,
    k: int | msgspec.UnsetType = msgspec.UNSET,
) -> tuple[Matcher, mask.Networks]:
    """``matcher_of``, and the small networks it needs.

    ``networks``: "match/<m>" -> the names among ``parts`` of the networks of m, with their weights.
    """
    matcher = matcher_of(slots, networks, k)
    if not matcher.trained:
        return matcher, {}
    built = {part.removeprefix("match/"): matcher_networks(model, parts, part, networks[part]) for part in networks}
    return matcher, {m: answers(each, m) for m, each in built.items()}


def matcher_networks(
    model: ModelSpec, parts: Mapping[str, Tensors], part: str, weights: Mapping[str, float]
) -> WeightedNetworks:
    """Each network of ``part``, "match/<m>", with its weight: ``weights`` by name among ``parts``."""
    found = []
    for name, weight in weights.items():
        built = build(model, [part])
        load_part(built, part, parts[name])
        found.append((weight, built.eval()))
    return found


def answers(networks: WeightedNetworks, modality: str) -> list[tuple[float, mask.Network]]:
    """The networks of ``modality`` as the prototype mask takes them."""
    return [(weight, partial(built.match, modality)) for weight, built in networks]


#: Fewest samples a small model is trained on.
_LEAST = 2


def match_parts(
    job: Job, model: StagedModel, dataset: Dataset, rng: np.random.Generator
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, int]]:
    """(parts "match/<m>" trained here, samples of each). A modality without samples to train on has none.

    ``model`` stays as it is, in evaluation mode.
    """
    model.requires_grad_(False).eval()
    parts: dict[str, dict[str, np.ndarray]] = {}
    samples: dict[str, int] = {}
    projections = projections_of(job, model, dataset)
    train = _train_classifier if job.model.matching == "classifier" else _train_priors
    for m in projections:
        if f"match/{m}" in model.parts_present and (count := train(model, m, projections, dataset, rng)):
            parts[f"match/{m}"], samples[f"match/{m}"] = part_tensors(model, f"match/{m}"), count
    return parts, samples


def _train_classifier(
    model: StagedModel, m: str, projections: Mapping[str, np.ndarray], dataset: Dataset, rng: np.random.Generator
) -> int:
    """Samples the classifier of ``m`` was trained on."""
    known = dataset.has(m) & (dataset.labels >= 0) if dataset.labels is not None else np.zeros(len(dataset), bool)
    if known.sum() < _LEAST or dataset.labels is None:
        return 0
    x, y = (torch.from_numpy(values[known]).to(device_of(model)) for values in (projections[m], dataset.labels))
    train_classifier(model.part(f"match/{m}"), x, y, MatcherSettings(), rng)
    return len(x)


def _train_priors(
    model: StagedModel, m: str, projections: Mapping[str, np.ndarray], dataset: Dataset, rng: np.random.Generator
) -> int:
    """Most samples a prior of ``m``, one for each other modality, was trained on."""
    most, settings = 0, MatcherSettings()
    for other in projections:
        both = dataset.has(m) & dataset.has(other)
        if other == m or both.sum() < _LEAST:
            continue
        own, theirs = (torch.from_numpy(projections[n][both]).to(device_of(model)) for n in (m, other))
        train_prior(model.part(f"match/{m}").get_submodule(f"to/{other}"), own, theirs, settings, rng)
        most = max(most, len(own))
    return most
