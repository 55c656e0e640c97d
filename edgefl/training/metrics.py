"""How well a model answers: classes by macro averages, and retrieval between paired modalities.

accuracy = share of p_i = y_i.  For each class of the truth: precision = hits / predicted, recall = hits / true,
F1 = 2 hits / (predicted + true); macro = their plain mean over these classes.
top-k accuracy = share of #{c: p_ic >= p_i,y_i} <= k;  AUROC of a class = P(p of one of its samples > p of another's),
ties half (Mann and Whitney); macro_auroc = the mean over the classes that some samples are of and others are not.
Samples of several classes: average precision of a class over the samples by descending p, and F1 of p >= 1/2.
Retrieval of N pairs (VSE++, arXiv 1707.05612): rank_i = 1 + #{j != i: cos(a_i, b_j) >= cos(a_i, b_i)};
recall@k = share of rank_i <= k;  RSum = recall@1 + recall@5 + recall@10, both ways, in percent points.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from edgefl.data.arrays import Rows
from edgefl.data.label_sets import THRESHOLD
from edgefl.errors import DataError
from edgefl.models.vectors import SMALLEST_NORM

Integers = npt.NDArray[np.int64]

#: The k of recall at k. A k beyond the number of candidates is left out: it would be 1 whatever the model does.
RECALL_AT = (1, 5, 10, 50)
#: The k of top-k accuracy, and classes beyond which it is shown: of ten a guess has every second one.
TOP, MANY_CLASSES = 5, 10
#: Those whose sum is RSum; left out where one of them is.
RSUM_AT = (1, 5, 10)
#: Cosines nearer than this are equal: f32 carries seven digits, and equal inputs encoded in different batches differ in
#: the last one. So a model that maps everything to one point finds nothing, instead of whatever rounding favours.
TIE = 1e-6
#: Inputs looked at at a time.
_ROWS_TOGETHER = 256
#: Queries compared at once: similarities of 512 x N numbers, 20 MiB for N = 5000, not N x N.
_BLOCK = 512


def classification(predicted: npt.ArrayLike, truth: npt.ArrayLike) -> dict[str, float]:
    """accuracy, macro_precision, macro_recall and macro_f1 of class numbers ``predicted`` [N] against ``truth`` [N].

    The classes are those of ``truth``; one that is never predicted has precision 0 (scikit-learn's
    ``precision_recall_fscore_support(labels=unique(truth), average="macro", zero_division=0)``). Raises DataError when
    there is nothing to judge, or the lengths differ.
    """
    p, y = np.asarray(predicted, np.int64), np.asarray(truth, np.int64)
    _check(p, y)
    size = int(max(p.max(), y.max())) + 1
    true, answered, hits = (np.bincount(which, minlength=size) for which in (y, p, y[p == y]))  # [C] each
    there = true > 0
    true, answered, hits = true[there], answered[there], hits[there]
    return {
        "accuracy": float((p == y).mean()),
        "macro_precision": float((hits / np.maximum(answered, 1)).mean()),
        "macro_recall": float((hits / true).mean()),
        "macro_f1": float((2 * hits / (answered + true)).mean()),
    }


def ranking(scores: npt.ArrayLike, truth: npt.ArrayLike) -> dict[str, float]:
    """top5_accuracy and macro_auroc of the ``scores`` [N, C] of every class against ``truth`` [N].

    ``scores``: probabilities, or anything that ascends with them. The former only with more than ten classes, the
    latter only where ``truth`` has two (scikit-learn's ``roc_auc_score(multi_class="ovr")``). Errors as
    :func:`classification`.
    """
    s, y = np.asarray(scores, np.float64), np.asarray(truth, np.int64)
    _check(s[:, 0], y)
    figures = {}
    if s.shape[1] > MANY_CLASSES:
        ahead = (s >= s[np.arange(len(y)), y][:, None]).sum(axis=1)
        figures[f"top{TOP}_accuracy"] = float((ahead <= TOP).mean())
    classes = np.unique(y)
    if len(classes) > 1:
        figures["macro_auroc"] = float(np.mean([area_under_roc(s[:, c], y == c) for c in classes]))
    return figures


def area_under_roc(scores: npt.NDArray[np.float64], positive: npt.NDArray[np.bool_]) -> float:
    """Share of pairs of a positive and another sample [N] in which the positive has the larger score; ties half.

    There has to be one of each.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # from 1; of equal scores their mean
    ones = int(positive.sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * (len(scores) - ones)))


def several_labels(probabilities: npt.ArrayLike, sets: npt.NDArray[np.bool_]) -> dict[str, float]:
    """mean_average_precision and macro_f1 of classes' ``probabilities`` [N, C], of which samples have ``sets`` [N, C].

    Over the classes that some sample has; those answered are more likely than not (``THRESHOLD``). {} without any.
    Errors as :func:`classification`.
    """
    p = np.asarray(probabilities, np.float64)
    _check(p, sets)
    there = sets.any(axis=0)
    p, y = p[:, there], sets[:, there]
    if not there.any():
        return {}
    answered = p >= THRESHOLD
    f1 = 2 * (answered & y).sum(axis=0) / (answered.sum(axis=0) + y.sum(axis=0))
    precisions = [average_precision(p[:, c], y[:, c]) for c in range(y.shape[1])]
    return {"mean_average_precision": float(np.mean(precisions)), "macro_f1": float(f1.mean())}


def average_precision(scores: npt.NDArray[np.float64], positive: npt.NDArray[np.bool_]) -> float:
    """sum_n (R_n - R_{n-1}) P_n over the distinct scores [N], descending: P_n, R_n of the samples from there on.

    There has to be one that is ``positive`` [N].
    """
    _, place = np.unique(-scores, return_inverse=True)
    answered = np.cumsum(np.bincount(place))
    hits = np.cumsum(np.bincount(place, weights=positive))
    return float((np.diff(hits, prepend=0) * hits / answered).sum() / hits[-1])


def retrieval_ranks(
    queries: npt.ArrayLike, candidates: npt.ArrayLike, items: Sequence[npt.NDArray[np.int64]] = ()
) -> Integers:
    """The rank [N], from 1, of each query's own candidate, which is the same row of ``candidates`` [N, d].

    By cosine. Every other candidate that is as near as the own one, or cannot be compared (NaN), counts as ahead.
    ``items``: numbers [N]; a candidate that shares one of them with the query is as right as its own, and the best of
    these counts. Raises DataError when there is nothing to judge, or the shapes differ.
    """
    a, b = _unit(queries), _unit(candidates)
    _check(a, b)
    ranks = np.empty(len(a), np.int64)
    for start in range(0, len(a), _BLOCK):
        similarity = a[start : start + _BLOCK] @ b.T  # [n, N]
        rows = np.arange(len(similarity))
        right = np.zeros(similarity.shape, bool)
        right[rows, start + rows] = True
        for number in items:
            right |= number[start + rows, None] == number
        best = np.where(right & ~np.isnan(similarity), similarity, -np.inf).max(axis=1, keepdims=True)
        ranks[start : start + _BLOCK] = 1 + (~(similarity < best - TIE) & ~right).sum(axis=1)
    return ranks


def same_items(inputs: Rows) -> npt.NDArray[np.int64]:
    """[N]: a number for each distinct row of ``inputs`` [N, ...], the same for rows that are equal to the last byte."""
    seen: dict[bytes, int] = {}
    numbers: list[int] = []
    for start in range(0, len(inputs), _ROWS_TOGETHER):  # they may lie on disk
        rows = np.ascontiguousarray(inputs[start : start + _ROWS_TOGETHER])
        numbers += [seen.setdefault(hashlib.sha256(row.tobytes()).digest(), len(seen)) for row in rows]
    return np.array(numbers, np.int64)


def retrieval(
    a: str, b: str, z_a: npt.ArrayLike, z_b: npt.ArrayLike, items: Sequence[npt.NDArray[np.int64]] = ()
) -> dict[str, float]:
    """Recalls of modality ``a`` to ``b`` and back, and "rsum", from N paired rows ``z_a`` and ``z_b`` [N, d] each.

    ``items`` as in :func:`retrieval_ranks`: one text may describe several images. Named "{a}_to_{b}_recall_at_{k}", as
    shares; a k larger than N is left out, and then so may be the sum.
    """
    figures: dict[str, float] = {}
    for one, other, rows, against in ((a, b, z_a, z_b), (b, a, z_b, z_a)):
        ranks = retrieval_ranks(rows, against, items)
        figures |= {recall_name(one, other, k): float((ranks <= k).mean()) for k in RECALL_AT if k <= len(ranks)}
    parts = [recall_name(*way, k) for way in ((a, b), (b, a)) for k in RSUM_AT]
    if all(name in figures for name in parts):
        figures["rsum"] = 100 * sum(figures[name] for name in parts)
    return figures


def recall_name(a: str, b: str, k: int) -> str:
    """The metric's name: ``b`` looked for by ``a``."""
    return f"{a}_to_{b}_recall_at_{k}"


def pairs(modalities: Sequence[str]) -> list[tuple[str, str]]:
    """Every unordered pair, in the order of ``modalities``."""
    return list(combinations(modalities, 2))


def _check(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> None:
    if one.shape != other.shape:
        raise DataError(f"{list(one.shape)} answers cannot be judged by {list(other.shape)} true ones")
    if not len(one):
        raise DataError("there is no sample to judge the model by", remedy="Give it labelled or paired test samples.")


def _unit(rows: npt.ArrayLike) -> npt.NDArray[np.float64]:
    z = np.asarray(rows, np.float64)
    return np.asarray(z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), SMALLEST_NORM))
