"""Simple models on a run's own samples, all in one place: a majority, a linear model and a forest, by scikit-learn.

Of several modalities the linear model is fitted to each alone, too, since one that says nothing may drown another, and
the forest to each without words, where words are among all. They say what a script of a few lines reaches on the same
split; a run far below them trains badly, whatever it costs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgefl.data.arrays import Array, Indices, Rows
from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import Sets
from edgefl.data.levels import target_errors
from edgefl.label_spaces import spaces_in
from edgefl.run_records import Reference
from edgefl.training.metrics import several_labels

#: Training samples at most, on which a forest takes seconds.
_MOST_SAMPLES = 20_000
#: Cells that a forest is fitted to at most, and columns beyond which each split looks at their square root.
_MOST_CELLS, _WIDE = 1_000_000, 100
#: Numbers of a series that are taken as they are, beside mean and deviation of each channel.
_MOST_NUMBERS = 1024
#: Pixels of a picture's side that are looked at.
_SIDE = 16
#: Columns of features that are held without sparsity; of token ids eight times as many are told apart.
_WIDEST = 2**15


def reference_scores(shares: Sequence[Dataset], test: Dataset) -> Reference | None:
    """Accuracy, or R² of a numeric target, on ``test`` of simple models fitted on all ``shares``.

    Of samples with several labels mean average precision. None without labels, and with several label sets: these
    models answer one. Raises ModuleNotFoundError without scikit-learn.
    """
    names, numeric = test.label_names, test.targets is not None
    labelled = [share.relabelled(names) for share in shares if share.labels is not None]
    truth = _truth(test)
    if not labelled or truth is None or len(spaces_in(names)) > 1:
        return None
    y = np.concatenate([_truth(share) for share in labelled])
    known, tested = _some_known(y), np.flatnonzero(~np.isnan(truth))
    if (len(np.unique(y[known])) < 2 and test.sets is None) or not len(tested):
        return None
    labelled, y = _rows_of(labelled, known), y[known]  # features of all of a large fleet's samples would be gigabytes
    modalities = list(test.signature())
    if test.sets is not None:
        sets = np.concatenate([share.sets for share in labelled if share.sets is not None])
        x, z = _features([*labelled, test], modalities, sum(map(len, labelled)))
        return _of_several(x, sets, z[tested], test.sets[tested])
    alone = {f" on {m} alone": [m] for m in modalities} if len(modalities) > 1 else {}
    scores, of_all = dict[str, float](), False
    for words, given in {"": modalities, **alone}.items():
        x, z = _features([*labelled, test], given, sum(map(len, labelled)))
        tokens = any(test.modalities[m].dtype.kind == "i" for m in given)
        of_all = of_all or not (words or tokens)  # then there is a forest of all modalities
        for name, model in _models(numeric, sparse=tokens):
            if words and (name == "majority" or (name == "forest" and of_all)):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a model that has not converged: the score says it
                answers = model.fit(x, y).predict(z[tested])
            right = truth[tested]
            score = target_errors(answers, right)["r2"] if numeric else float((answers == right).mean())
            if name == "forest" and (rows := _forest_rows(*x.shape)) < len(known):
                words += f" on {rows:,} samples"
            scores[name + words] = score
    return Reference("r2" if numeric else "accuracy", scores, len(known))


def rows_to_fit(share: Dataset, names: Sequence[str]) -> Indices:
    """Places of a share's training samples for simple models, labelled as in ``names``."""
    truth = _truth(share.relabelled(names))
    return np.empty(0, np.int64) if truth is None else _some_known(truth)


def _some_known(truth: Array) -> Indices:
    known = np.flatnonzero(~np.isnan(truth))
    some: Indices = known[np.linspace(0, len(known) - 1, min(len(known), _MOST_SAMPLES)).astype(int)]
    return some


def _rows_of(shares: Sequence[Dataset], rows: Indices) -> list[Dataset]:
    """These rows of all shares' samples, sorted, without shares that have none of them."""
    starts = np.cumsum([0, *map(len, shares)])
    parts = np.split(rows, np.searchsorted(rows, starts[1:-1]))
    return [
        share if len(part) == len(share) else share.subset(part - start)
        for share, part, start in zip(shares, parts, starts, strict=False)
        if len(part)
    ]


def _of_several(x: Any, sets: Sets, z: Any, truth: Sets) -> Reference:
    """Mean average precision of multi-label models, one-vs-rest.

    Fitted on features ``x`` [N, F] with ``sets`` [N, C], scored on ``z`` [M, F] with ``truth`` [M, C].
    """
    from sklearn.multiclass import OneVsRestClassifier

    scores = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as below; and of a label that all samples have, or none
        for name, model in _models(False, sparse=True):
            chances = OneVsRestClassifier(model).fit(x, sets.astype(np.int64)).predict_proba(z)
            scores[name] = several_labels(chances, truth).get("mean_average_precision", 0.0)
    return Reference("mean_average_precision", scores, len(sets))


def _truth(data: Dataset) -> Array | None:
    """Labels [N] as numbers, NaN: none; targets as they are."""
    if data.labels is None:
        return None
    return data.targets if data.targets is not None else np.where(data.labels < 0, np.nan, data.labels)


def _models(numeric: bool, *, sparse: bool) -> list[tuple[str, Any]]:
    """Name -> model. ``sparse``: without a forest, which takes minutes on counts of words."""
    from sklearn.dummy import DummyClassifier
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.linear_model import LogisticRegression, RidgeCV

    if numeric:
        models: list[tuple[str, Any]] = [("ridge", RidgeCV(np.logspace(-2, 4, 13)))]
        return models if sparse else [*models, ("forest", _Forest(RandomForestRegressor))]
    models = [("majority", DummyClassifier()), ("logistic regression", LogisticRegression(max_iter=500))]
    return models if sparse else [*models, ("forest", _Forest(RandomForestClassifier))]


def _forest_rows(samples: int, columns: int) -> int:
    """Samples that a forest is fitted on."""
    return min(samples, max(1, _MOST_CELLS // columns))


class _Forest:
    """A forest of 200 trees on rows so few, and columns so few a split, that it takes some seconds."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def fit(self, x: Any, y: Any) -> Any:
        rows = np.linspace(0, len(x) - 1, _forest_rows(*x.shape)).astype(int)
        wide = {"max_features": "sqrt"} if x.shape[1] > _WIDE else {}
        return self._kind(200, random_state=0, **wide).fit(x[rows], y[rows])


def _features(parts: Sequence[Dataset], modalities: Sequence[str], count: int) -> tuple[Any, Any]:
    """Rows of numbers of all modalities, scaled by the first ``count`` samples of ``parts``: of these, and of the rest.

    An absent modality is zeros. Of several modalities each has the same weight, however many numbers it has.
    """
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.preprocessing import StandardScaler

    blocks = []
    for m in modalities:
        like = next(part.modalities[m] for part in parts if m in part.modalities)
        values = [part.modalities.get(m, np.zeros((len(part), *like.shape[1:]), like.dtype)) for part in parts]
        words = like.dtype.kind == "i"
        block = sparse.vstack([_counts(v) if words else sparse.csr_matrix(_numbers(np.asarray(v))) for v in values])
        scale = TfidfTransformer(sublinear_tf=True) if words else StandardScaler(with_mean=False)
        scaled = scale.fit(block.tocsr()[:count]).transform(block)
        even = words or len(modalities) == 1  # rows of tf-idf have the length 1
        blocks.append(scaled if even else scaled / np.sqrt(scaled.shape[1]))
    whole = sparse.hstack(blocks).tocsr()
    whole = whole[:, np.unique(whole[:count].indices)]  # a token that no sample to fit on has keeps the weight 0
    whole = whole if whole.shape[1] > _WIDEST else whole.toarray()
    return whole[:count], whole[count:]


def _counts(values: Rows) -> Any:
    """Counts of token ids [N, ids], sparse."""
    from scipy import sparse

    ids = np.asarray(values)
    rows, _ = np.nonzero(ids)
    return sparse.csr_matrix((np.ones(len(rows), np.float32), (rows, ids[ids != 0])), shape=(len(ids), _WIDEST * 8))


def _numbers(values: Array) -> Array:
    """Numbers of samples [N, F]: small pictures, short series as they are, and moments of a series' channels."""
    if values.ndim == 4:
        tall, wide = (max(1, side // _SIDE) for side in values.shape[1:3])
        return values[:, ::tall, ::wide].reshape(len(values), -1)
    flat = values.reshape(len(values), -1)
    if values.ndim < 3 or values.shape[1] < 2:
        return flat
    moments = [values.mean(axis=1), values.std(axis=1)]
    return np.concatenate(moments if flat.shape[1] > _MOST_NUMBERS else [flat, *moments], axis=1)
