"""Matching a representation to classes, and mixing the other modality's prototypes (ProtoMix, arXiv 2312.13508).

s_c = -distance(h, P[c]) or cosine(h, P[c]); with a small model: its probability of c, or cosine(prior(h), Q[c]);
with several modalities at hand s_c is the mean over those that have scores of c (docs/decisions/0034);
of probabilities the logarithm: at T = 1 they are the weights themselves, renormalised (docs/decisions/0031);
top k;  weights = softmax(s / T);  mask = sum_j weights_j Q[index_j].
The devices' small models become one by the largest device, the mean parameters, or s = sum_n w_n s_n / sum_n w_n.
The ONNX bundles hold the model-free arithmetic in their graph (``edgefl.prototypes.torch_mask``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError
from edgefl.prototypes.matcher import TRAINED_METRICS
from edgefl.prototypes.table import Array, ClassMeans

Metric = Literal["cosine", "l1", "l2"]
TrainedMetric = Literal["classifier", "prior"]
Index = npt.NDArray[np.int64]

#: Norms below this count as this, so that a zero vector has cosine 0 with everything (the same guard as in torch).
_SMALLEST_NORM = 1e-12
#: A probability below this counts as this in logarithms: the smallest normal f32, which no runtime rounds to zero.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)


def _cosine(h: Array, means: Array) -> Array:
    return np.asarray(_unit(h) @ _unit(means).T, np.float32)


def _l1(h: Array, means: Array) -> Array:
    return np.stack([-np.abs(h - row).sum(axis=1) for row in means], axis=1)  # by class: no [B, C, d] array


def _l2(h: Array, means: Array) -> Array:
    return np.stack([-np.sqrt(((h - row) ** 2).sum(axis=1)) for row in means], axis=1)


#: Score functions (h [B, d], means [C, d]) -> [B, C]; larger is nearer.
METRICS: dict[str, Callable[[Array, Array], Array]] = {"cosine": _cosine, "l1": _l1, "l2": _l2}


def match(
    h: npt.ArrayLike,
    table: ClassMeans,
    metric: Metric = "cosine",
    k: int = 1,
    temperature: float = 1.0,
    among: npt.NDArray[np.bool_] | None = None,
) -> tuple[Index, Array]:
    """The ``k`` nearest classes of each row of ``h`` [B, d]: index [B, k], best first; weights [B, k], sum 1.

    Absent classes never match. ``among`` [C] narrows the choice further, for instance to the classes that the other
    modality's table holds as well. ``k`` is clamped to the number of classes left; equal scores: the lower class first.
    Raises ModelError when no class is left, the widths differ, or a setting is out of range.
    """
    rows = np.asarray(h, np.float32)
    if metric not in METRICS:
        raise ModelError(f"unknown metric {metric!r}", remedy=f"Choose one of: {', '.join(METRICS)}.")
    if rows.ndim != 2 or rows.shape[1] != table.means.shape[1]:
        raise ModelError(f"representations {list(rows.shape)} do not fit prototypes {list(table.means.shape)}")
    candidates = _candidates(table.present if among is None else table.present & among)
    return _top(METRICS[metric](rows, table.means[candidates]), candidates, k, temperature)


def match_scores(
    scores: npt.ArrayLike, among: npt.NDArray[np.bool_], k: int = 1, temperature: float = 1.0
) -> tuple[Index, Array]:
    """As :func:`match`, from ``scores`` [B, C] (larger is better) that a small model or several of them gave."""
    found = np.asarray(scores, np.float32)
    if found.ndim != 2 or found.shape[1:] != among.shape:
        raise ModelError(f"scores {list(found.shape)} do not fit {len(among)} classes as [B, C]")
    candidates = _candidates(among)
    return _top(found[:, candidates], candidates, k, temperature)


def trained_scores(metric: TrainedMetric, output: npt.ArrayLike, other: ClassMeans) -> Array:
    """Scores [B, C] from what a small model made of the modality at hand; ``other``: the absent modality's table.

    "classifier": ``output`` holds logits [B, C], the scores are probabilities. "prior": ``output`` [B, d] lives in the
    other modality's space, the scores are its cosines with that modality's prototypes.
    """
    found = np.asarray(output, np.float32)
    if metric not in TRAINED_METRICS:
        raise ModelError(f"unknown metric {metric!r}", remedy=f"Choose one of: {', '.join(TRAINED_METRICS)}.")
    expected = other.means.shape[0 if metric == "classifier" else 1]
    if found.ndim != 2 or found.shape[1] != expected:
        raise ModelError(f"a {metric} gave {list(found.shape)}, expected [B, {expected}]")
    return _softmax(found) if metric == "classifier" else _cosine(found, other.means)


class Scored(NamedTuple):
    """``scores`` [B, C] of every class (larger is better), and which of them may match ``among`` [C]."""

    scores: Array
    among: npt.NDArray[np.bool_]


def averaged(each: Sequence[Scored]) -> Scored:
    """The scores of several modalities at hand as one: of each class the mean over those that have a score of it.

    Of one modality its own, to the bit. At least one.
    """
    if len(each) == 1:
        return each[0]
    counts = np.sum([one.among for one in each], axis=0)
    total = np.sum([np.where(one.among, one.scores, np.float32(0)) for one in each], axis=0)
    return Scored(np.asarray(total / np.maximum(counts, 1), np.float32), counts > 0)


def logarithms(found: Scored) -> Scored:
    """The same with the logarithms of its probabilities: ln p / T in the softmax gives p^(1/T), at T = 1 p itself."""
    return found._replace(scores=np.log(np.maximum(found.scores, np.float32(SMALLEST_PROBABILITY))))


def mix(index: Index, weights: Array, other: ClassMeans) -> Array:
    """The weighted mean of ``other``'s rows at ``index`` [B, k]: [B, d].

    A class absent from ``other`` is left out and the rest renormalised; where none of the k is there, the row is zero
    (the zero mask).
    """
    usable = weights * other.present[index]
    total = usable.sum(axis=1, keepdims=True)
    shares = usable / np.where(total > 0, total, np.float32(1))
    return np.asarray(np.einsum("bk,bkd->bd", shares, other.means[index]), np.float32)


def largest(weights: npt.ArrayLike) -> int:
    """Which device's model speaks for all: the one with the most samples, of equals the first."""
    return int(np.argmax(_shares(weights)))


def ensemble(scores: npt.ArrayLike, weights: npt.ArrayLike) -> Array:
    """The weighted mean [B, C] of the devices' ``scores`` [D, B, C], by ``weights`` [D] (samples)."""
    each = np.asarray(scores, np.float64)
    shares = _shares(weights)
    if each.ndim != 3 or len(each) != len(shares):
        raise ModelError(f"scores {list(each.shape)} of {len(shares)} devices are not [devices, batch, classes]")
    return np.asarray(np.tensordot(shares, each, axes=1), np.float32)


def average_parameters(
    models: Sequence[Mapping[str, npt.NDArray[np.generic]]], weights: npt.ArrayLike
) -> dict[str, Array]:
    """The small model whose parameters are the weighted mean of the devices' (each name -> f32 array)."""
    shares = _shares(weights)
    shapes = [{name: np.shape(tensor) for name, tensor in model.items()} for model in models]
    if len(models) != len(shares) or any(each != shapes[0] for each in shapes):
        raise ModelError(f"{len(models)} small models, {len(shares)} weights, or tensors that differ: {shapes}")
    result = {}
    for name in models[0]:
        stacked = np.stack([np.asarray(model[name], np.float64) for model in models])  # [D, ...]
        result[name] = np.asarray(np.tensordot(shares, stacked, axes=1), np.float32)
    return result


def _candidates(among: npt.NDArray[np.bool_]) -> Index:
    found = np.flatnonzero(among)
    if not found.size:
        raise ModelError("no class has a prototype yet", remedy="Train at least one round with prototypes first.")
    return np.asarray(found, np.int64)


def _top(scores: Array, candidates: Index, k: int, temperature: float) -> tuple[Index, Array]:
    """Scores [B, C'] of the classes ``candidates`` [C'] -> the best k and their weights."""
    if k < 1 or temperature <= 0:
        raise ModelError(f"matching needs k >= 1 and temperature > 0, got k = {k}, temperature = {temperature}")
    nearest = np.argsort(-scores, axis=1, kind="stable")[:, : min(k, candidates.size)]
    weights = _softmax(np.take_along_axis(scores, nearest, axis=1) / np.float32(temperature))
    return candidates[nearest], weights


def _shares(weights: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Weights [D] that sum to one."""
    given = np.asarray(weights, np.float64)
    if given.ndim != 1 or not (given >= 0).all() or not given.sum() > 0 or not np.isfinite(given).all():
        raise ModelError(
            f"the devices' weights {given.tolist()} are not shares of anything",
            remedy="Weigh by samples: none below zero, and not all zero.",
        )
    return np.asarray(given / given.sum())


def _unit(rows: Array) -> Array:
    norms = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return np.asarray(rows / np.maximum(norms, np.float32(_SMALLEST_NORM)), np.float32)


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
