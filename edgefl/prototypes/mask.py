"""The prototype mask at inference: stand-ins for absent modalities from those that are there (arXiv 2312.13508).

match the projection r_m of each modality m at hand to classes, by m's own table or by a small trained model, average
the scores (of a classifier's probabilities then the logarithm), then mix the absent modality's prototypes of the best
classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from edgefl.errors import ModelError
from edgefl.prototypes.matcher import DEFAULT_MATCHER, Matcher
from edgefl.prototypes.matching import (
    METRICS,
    Scored,
    TrainedMetric,
    averaged,
    ensemble,
    logarithms,
    match_scores,
    mix,
    trained_scores,
)
from edgefl.prototypes.table import Array, ClassMeans

#: A small model: projections [B, d] of the modality at hand -> logits [B, C] (classifier), or a projection [B, d'] of
#: the absent modality (prior).
SmallModel = Callable[[Array], Array]
#: (weight, model) of each device that speaks: one alone, or an ensemble whose scores are averaged by weight.
SmallModels = Sequence[tuple[float, SmallModel]]


def prototype_mask(h: Array, own: ClassMeans, other: ClassMeans, matcher: Matcher = DEFAULT_MATCHER) -> Array:
    """Stand-ins [B, d'] of the other modality for projections ``h`` [B, d]; zeros when no class has both tables.

    For the metrics without a model; with one: :func:`trained_mask`.
    """
    return stand_ins([scored(h, own, other, matcher)], other, matcher)


def trained_mask(h: Array, other: ClassMeans, matcher: Matcher, small: SmallModels) -> Array:
    """Stand-ins [B, d'] of the other modality for ``h`` [B, d] by small models; zeros when it has no prototype.

    Raises ModelError when there is no model.
    """
    if not small:
        raise ModelError(
            f"the matcher '{matcher.metric}' needs a small model, and there is none",
            remedy="Train them in the closing round, or match by cosine, l1 or l2.",
        )
    return stand_ins([heard(h, other, matcher, small)], other, matcher)


def scored(h: Array, own: ClassMeans, other: ClassMeans, matcher: Matcher) -> Scored:
    """How near projections ``h`` [B, d] are to their ``own`` table, which matches where both have a row."""
    among = own.present & other.present
    scores = np.zeros((len(h), len(among)), np.float32)
    scores[:, among] = METRICS[matcher.metric](h, own.means[among]) if among.any() else 0
    return Scored(scores, among)


def heard(h: Array, other: ClassMeans, matcher: Matcher, small: SmallModels) -> Scored:
    """Scores of projections ``h`` [B, d] by the ``small`` models: the weighted mean of theirs.

    The rows of ``other`` beyond a classifier's classes can not match.
    """
    metric = cast("TrainedMetric", matcher.metric)
    said = [(weight, model(h)) for weight, model in small]
    rows = said[0][1].shape[1] if metric == "classifier" else len(other.counts)
    known = ClassMeans(other.means[:rows], other.counts[:rows])
    scores = ensemble(np.stack([trained_scores(metric, y, known) for _, y in said]), [weight for weight, _ in said])
    spare = (0, len(other.counts) - rows)
    return Scored(np.pad(scores, ((0, 0), spare)), np.pad(known.present, spare))


def combined(each: Sequence[Scored], matcher: Matcher) -> Scored:
    """The scores of all modalities at hand as the softmax takes them: averaged, of probabilities then the logarithm."""
    one = averaged(each)
    return logarithms(one) if matcher.metric == "classifier" else one


def stand_ins(each: Sequence[Scored], other: ClassMeans, matcher: Matcher) -> Array:
    """Stand-ins [B, d'] of the ``other`` modality by the scores of each at hand; zeros when no class may match."""
    scores, among = combined(each, matcher)
    if not among.any():
        return np.zeros((len(scores), other.means.shape[1]), np.float32)
    index, weights = match_scores(scores, among, matcher.k, matcher.temperature)
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

    ``kind``: "zero" or "prototype" ("none": nothing is absent). With several modalities at hand, all that have a table
    are matched and their scores averaged; with a trained matcher all that have a small model: ``small`` by (at hand,
    absent). A modality without a table of its own is filled with zeros. Raises ModelError for an unknown kind, and
    when a trained matcher has no model for any of the modalities at hand.
    """
    if kind not in ("none", "zero", "prototype"):
        raise ModelError(f"unknown mask {kind!r}", remedy="Choose zero or prototype.")
    batch = len(next(iter(projections.values())))
    filled = dict(projections)
    for modality in wanted:
        if modality in filled:
            continue
        each = _each(projections, modality, tables, matcher, small or {}) if kind == "prototype" else []
        zeros = np.zeros((batch, width), np.float32)
        filled[modality] = stand_ins(each, tables[modality], matcher) if each else zeros
    return filled


def _each(
    projections: Mapping[str, Array],
    modality: str,
    tables: Mapping[str, ClassMeans],
    matcher: Matcher,
    small: Mapping[tuple[str, str], SmallModels],
) -> list[Scored]:
    """Scores of the absent modality's classes by each one at hand; [] where that has no table, or none of them has."""
    if modality not in tables:
        return []
    other = tables[modality]
    if not matcher.trained:
        return [scored(h, tables[m], other, matcher) for m, h in projections.items() if m in tables]
    said = [heard(h, other, matcher, small[m, modality]) for m, h in projections.items() if small.get((m, modality))]
    if not said:
        raise ModelError(
            f"no small model tells what '{modality}' is from {' or '.join(projections)}",
            remedy="Train the small models in the closing round, or match by cosine, l1 or l2.",
        )
    return said
