"""Evaluation by the recipe: tasks of the global model, its matcher and the small networks of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from edgefl.data.dataset import Dataset
from edgefl.models.parts import load_part
from edgefl.models.spec import ModelSpec
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Slots
from edgefl.plan.training_samples import needs_pairs
from edgefl.prototypes import mask
from edgefl.prototypes.matcher import DEFAULT_MATCHER, TOP_K, Matcher
from edgefl.registry import chosen

Tensors = Mapping[str, np.ndarray]
#: "match/<m>" -> the names of its small networks, with their weights
Networks = Mapping[str, Mapping[str, float]]
#: The network of each device that has one, with its weight.
WeightedNetworks = Sequence[tuple[float, StagedModel]]


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
) -> tuple[Matcher, mask.Networks]:
    """``matcher_of``, and the small networks it needs.

    ``networks``: "match/<m>" -> the names among ``parts`` of the networks of m, with their weights.
    """
    matcher = matcher_of(slots, networks)
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
    return [(weight, partial(_answer, built, modality)) for weight, built in networks]


def _answer(built: StagedModel, modality: str, r: Tensor, absent: str) -> Tensor:
    """r [B, d] of ``modality`` -> logits [B, C] of a classifier, or a prior's [B, d] in the space of ``absent``."""
    return built.match(modality, r) if built.spec.matching == "classifier" else built.prior(modality, absent, r)
