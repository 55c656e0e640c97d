"""How the global model is judged by its recipe: by which tasks, and how a sample finds its classes at inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from edgefl.data.dataset import Dataset
from edgefl.methods.prototypes.matcher_networks import in_numpy
from edgefl.models.parts import load_part
from edgefl.models.spec import ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Slots
from edgefl.plan.usable_samples import needs_pairs
from edgefl.prototypes.mask import SmallModels
from edgefl.prototypes.matcher import DEFAULT_MATCHER, TOP_K, Matcher
from edgefl.registry import chosen
from edgefl.training.evaluate import Small

Tensors = Mapping[str, np.ndarray]
#: "match/<m>" -> the names of the networks that speak for it, with their weights
Networks = Mapping[str, Mapping[str, float]]


def tasks_of(model: ModelSpec, slots: Slots, test: Dataset) -> frozenset[str]:
    """Classification where the model has classes, retrieval where pairs are learned and the test set has some.

    Only of what the devices send: a classifier that stays at home is untrained here, and alone nothing is learned here
    at all. What each device's own model is worth, it says itself (``edgefl.training.local_evaluation``).
    """
    paired = sum(bool(test.has(m).any()) for m in model.encoders) > 1
    classification = bool(model.classes) and slots.exchange == "all"
    retrieval = needs_pairs(slots) and paired and slots.exchange != "nothing"
    return frozenset(name for name, wanted in (("classification", classification), ("retrieval", retrieval)) if wanted)


def matcher_of(slots: Slots, networks: Networks) -> Matcher:
    """The recipe's matcher; cosine until the small networks it needs have been trained (in the closing round)."""
    options = chosen("prototypes", slots.prototypes)[0].options
    metric = options.get("match", DEFAULT_MATCHER.metric)
    matcher = Matcher(metric, int(options.get("k", TOP_K)), float(options.get("temperature", 0.0)))
    return DEFAULT_MATCHER if matcher.trained and not networks else matcher


def matching(
    model: ModelSpec, parts: Mapping[str, Tensors], slots: Slots, networks: Networks
) -> tuple[Matcher, Small | None]:
    """``matcher_of``, and the small networks it asks, by (modality at hand, absent one).

    ``networks``: "match/<m>" -> the names among ``parts`` of those that speak for it, with their weights.
    """
    matcher = matcher_of(slots, networks)
    if not matcher.trained:
        return matcher, None
    speaking = {part.removeprefix("match/"): speakers(model, parts, part, networks[part]) for part in networks}
    return matcher, {(m, o): answers(speak, m, o) for m, speak in speaking.items() for o in model.encoders if o != m}


def speakers(
    model: ModelSpec, parts: Mapping[str, Tensors], part: str, weights: Mapping[str, float]
) -> list[tuple[float, StagedModel]]:
    """Each network that speaks as ``part``, "match/<m>", with its weight: ``weights`` by name among ``parts``."""
    found = []
    for name, weight in weights.items():
        built = build(model, [part])
        load_part(built, part, parts[name])
        found.append((weight, built.eval()))
    return found


def answers(speaking: Sequence[tuple[float, StagedModel]], modality: str, other: str) -> SmallModels:
    """The networks of ``modality`` as masks take them: what each says of ``other``."""
    return [(weight, in_numpy(partial(said, built, modality, other))) for weight, built in speaking]


def said(built: StagedModel, modality: str, other: str, r: Tensor) -> Tensor:
    """r [B, d] of ``modality`` -> logits [B, C] of a classifier, or a prior's [B, d] in the space of ``other``."""
    return built.match(modality, r) if built.spec.matching == "classifier" else built.prior(modality, other, r)
