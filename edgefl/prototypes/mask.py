"""The prototype mask at inference: stand-ins for absent modalities from the one that is there (arXiv 2312.13508).

match the projection r_m to classes, by m's own table or by a small trained model, then mix the other modality's
prototypes of those classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from edgefl.errors import ModelError
from edgefl.prototypes.library import Array, ClassMeans
from edgefl.prototypes.matching import (
    METRICS,
    TRAINED_METRICS,
    Metric,
    TrainedMetric,
    ensemble,
    match,
    match_scores,
    mix,
    trained_scores,
)

#: Classes mixed and softmax temperature over cosines, in training, evaluation and exported bundles alike. So sharp that
#: only near ties are mixed: an even mixture of classes is what zeros already say (docs/decisions/0005).
TOP_K = 3
TEMPERATURE = 0.01
#: Each metric's own temperature. The paper's softmax of -distance, probability or score has none, which is 1; of
#: cosines that is an even mixture, whatever they are (docs/decisions/0005).
TEMPERATURES = {"cosine": TEMPERATURE, "l1": 1.0, "l2": 1.0, "classifier": 1.0, "prior": 1.0}

#: A small model: projections [B, d] of the modality at hand -> logits [B, C] (classifier), or a projection [B, d'] of
#: the absent modality (prior).
SmallModel = Callable[[Array], Array]
#: (weight, model) of each device that speaks: one alone, or an ensemble whose scores are averaged by weight.
SmallModels = Sequence[tuple[float, SmallModel]]


@dataclass(frozen=True)
class Matcher:
    """How an absent modality's class is guessed: by which score, among how many classes, how sharply.

    ``temperature`` divides the scores before the softmax; 0 becomes the metric's own (``TEMPERATURES``). Raises
    ModelError for an unknown metric and for settings out of range.
    """

    metric: Literal["cosine", "l1", "l2", "classifier", "prior"] = "cosine"
    k: int = TOP_K
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.metric not in METRICS and not self.trained:
            known = ", ".join((*METRICS, *TRAINED_METRICS))
            raise ModelError(f"unknown metric {self.metric!r}", remedy=f"Choose one of: {known}.")
        if self.k < 1 or self.temperature < 0:
            raise ModelError(f"a matcher needs k >= 1 and temperature >= 0, got {self.k} and {self.temperature}")
        if self.temperature == 0:
            object.__setattr__(self, "temperature", TEMPERATURES[self.metric])

    @property
    def trained(self) -> bool:
        """Whether it needs small models."""
        return self.metric in TRAINED_METRICS


DEFAULT_MATCHER = Matcher()


def prototype_mask(h: Array, own: ClassMeans, other: ClassMeans, matcher: Matcher = DEFAULT_MATCHER) -> Array:
    """Stand-ins [B, d'] of the other modality for projections ``h`` [B, d]; zeros when no class has both tables.

    For the metrics without a model; with one: :func:`trained_mask`.
    """
    among = own.present & other.present
    if not among.any():
        return np.zeros((len(h), other.means.shape[1]), np.float32)
    index, weights = match(h, own, cast("Metric", matcher.metric), matcher.k, matcher.temperature, among)
    return mix(index, weights, other)


def trained_mask(h: Array, other: ClassMeans, matcher: Matcher, small: SmallModels) -> Array:
    """Stand-ins [B, d'] of the other modality for ``h`` [B, d] by small models; zeros when it has no prototype.

    The classes' scores are the weighted mean of those the models give. Raises ModelError when there is no model.
    """
    if not small:
        raise ModelError(
            f"the matcher '{matcher.metric}' needs a small model, and there is none",
            remedy="Train them in the last round, or match by cosine, l1 or l2.",
        )
    if not other.present.any():
        return np.zeros((len(h), other.means.shape[1]), np.float32)
    metric = cast("TrainedMetric", matcher.metric)
    scores = np.stack([trained_scores(metric, model(h), other) for _, model in small])  # [D, B, C]
    combined = ensemble(scores, [weight for weight, _ in small])
    index, weights = match_scores(combined, other.present, matcher.k, matcher.temperature)
    return mix(index, weights, other)


def masked(
    projections: Mapping[str, Array],
    wanted: list[str],
    tables: Mapping[str, ClassMeans],
    kind: str,
    width: int,
    matcher: Matcher = DEFAULT_MATCHER,
    small: Mapping[tuple[str, str], SmallModels] | None = None,
) -> dict[str, Array]:
    """``projections`` ([B, d] each, at least one) with every other modality of ``wanted`` filled in.

    ``kind``: "zero" or "prototype" ("none": nothing is absent). With several modalities at hand, the first that has a
    table speaks; with a trained matcher the first that has a small model: ``small`` by (at hand, absent). A modality
    without a table of its own is filled with zeros. Raises ModelError for an unknown kind, and when a trained matcher
    has no model for the modalities at hand.
    """
    if kind not in ("none", "zero", "prototype"):
        raise ModelError(f"unknown mask {kind!r}", remedy="Choose zero or prototype.")
    batch = len(next(iter(projections.values())))
    filled = dict(projections)
    source = next((m for m in projections if m in tables), None)
    for modality in wanted:
        if modality in filled:
            continue
        if kind != "prototype" or modality not in tables:
            filled[modality] = np.zeros((batch, width), np.float32)
        elif matcher.trained:
            speaker, models = _speaker(list(projections), modality, small or {})
            filled[modality] = trained_mask(projections[speaker], tables[modality], matcher, models)
        elif source is not None:
            filled[modality] = prototype_mask(projections[source], tables[source], tables[modality], matcher)
        else:
            filled[modality] = np.zeros((batch, width), np.float32)
    return filled


def _speaker(
    at_hand: list[str], modality: str, small: Mapping[tuple[str, str], SmallModels]
) -> tuple[str, SmallModels]:
    for m in at_hand:
        if small.get((m, modality)):
            return m, small[m, modality]
    raise ModelError(
        f"no small model tells what '{modality}' is from {' or '.join(at_hand)}",
        remedy="Train the small models in the last round, or match by cosine, l1 or l2.",
    )
