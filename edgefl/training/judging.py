"""How the global model is judged by its recipe: by which tasks, and how a sample finds its classes at inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgefl.data.dataset import Dataset
from edgefl.models.build import StagedModel, build
from edgefl.models.spec import ModelSpec
from edgefl.models.state import load_part
from edgefl.plan.fit import needs_pairs
from edgefl.plan.values import Slots
from edgefl.prototypes.mask import DEFAULT_MATCHER, Matcher, SmallModels
from edgefl.training.evaluate import Small
from edgefl.training.matchers import in_numpy

Tensors = Mapping[str, np.ndarray]


def tasks_of(model: ModelSpec, slots: Slots, test: Dataset) -> frozenset[str]:
    """Classification where the model has classes, retrieval where pairs are learned and the test set has some.

    Only of what the devices send: a classifier that stays at home is untrained here, and alone nothing is learned here
    at all. What each device's own model is worth, it says itself (``edgefl.training.trial``).
    """
    paired = sum(bool(test.has(m).any()) for m in model.encoders) > 1
    classification = bool(model.classes) and slots.exchange == "all"
    retrieval = needs_pairs(slots) and paired and slots.exchange != "nothing"
    return frozenset(name for name, wanted in (("classification", classification), ("retrieval", retrieval)) if wanted)


def matching(
    model: ModelSpec, parts: Mapping[str, Tensors], slots: Slots, networks: Mapping[str, Mapping[str, float]]
) -> tuple[Matcher, Small | None]:
    """The recipe's matcher; cosine until the small networks it needs have been trained (in the last round).

    ``networks``: "match/<m>" -> the names among ``parts`` of those that speak for it, with their weights.
    """
    options: dict[str, Any] = slots.prototypes.get("class_mean", {})
    if not options:
        return DEFAULT_MATCHER, None
    metric = options.get("match", DEFAULT_MATCHER.metric)
    matcher = Matcher(metric, int(options.get("k", 3)), float(options.get("temperature", 0.01)))
    if not matcher.trained:
        return matcher, None
    small: dict[tuple[str, str], SmallModels] = {}
    for part, weights in networks.items():
        m = part.removeprefix("match/")
        for other in model.encoders:
            if other != m:
                speak = [(weight, _network(model, part, parts[name], m, other)) for name, weight in weights.items()]
                small[m, other] = speak
    return (matcher, small) if small else (DEFAULT_MATCHER, None)


def _network(
    model: ModelSpec, part: str, tensors: Tensors, modality: str, other: str
) -> Callable[[np.ndarray], np.ndarray]:
    built = build(model, [part])
    load_part(built, part, tensors)
    built.eval()

    def run(r: Tensor) -> Tensor:
        return _match(built, modality, other, r)

    return in_numpy(run)


def _match(built: StagedModel, modality: str, other: str, r: Tensor) -> Tensor:
    with torch.no_grad():
        if built.spec.matching == "classifier":
            return built.match(modality, r)
        return built.prior(modality, other, r)
