"""Simple baselines on raw samples: the scripts of a few lines that a user would try first, by scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def baseline_accuracies(
    kind: str, values: Sequence[Any], labels: Sequence[str], train: Sequence[int], test: Sequence[int]
) -> dict[str, float]:
    """Baseline -> percent right on ``test`` after fitting on ``train``; of a numeric target 100 R²."""
    if kind == "numeric":
        return _numeric(values, np.asarray(labels, float), train, test)
    y = np.asarray(labels)
    most = max(set(y[train].tolist()), key=y[train].tolist().count)
    scores = {"majority": 100 * float((y[test] == most).mean())}
    for name, model, x in _models(kind, values):
        model.fit([x[i] for i in train], y[train])
        scores[name] = 100 * float((model.predict([x[i] for i in test]) == y[test]).mean())
    return scores


def _models(kind: str, values: Sequence[Any]) -> list[tuple[str, Any, Sequence[Any]]]:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def logreg(*first: Any) -> Any:
        return make_pipeline(*first, LogisticRegression(max_iter=2000))

    def forest(*first: Any) -> Any:
        return make_pipeline(*first, RandomForestClassifier(300, random_state=0))

    if kind == "table":
        cells = [{k: _cell(v) for k, v in row.items()} for row in values]
        vector = (DictVectorizer(sparse=False), SimpleImputer())
        return [("logreg", logreg(*vector, StandardScaler()), cells), ("forest", forest(*vector), cells)]
    if kind == "text":
        return [("tf-idf", logreg(TfidfVectorizer(sublinear_tf=True)), list(values))]
    if kind == "sound":
        mel = [_mel_statistics(samples, rate) for samples, rate in values]
        return [("mel", logreg(StandardScaler()), mel), ("forest", forest(), mel)]
    if kind == "mixed":
        pictures = [np.ravel(picture) for picture, _ in values]
        texts = [text for _, text in values]
        return [("logreg", logreg(StandardScaler()), pictures), ("tf-idf", logreg(TfidfVectorizer()), texts)]
    flat = [np.ravel(value) for value in values]
    return [("logreg", logreg(StandardScaler()), flat), ("forest", forest(), flat)]


def _numeric(values: Sequence[Any], y: np.ndarray, train: Sequence[int], test: Sequence[int]) -> dict[str, float]:
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import RidgeCV
    from sklearn.metrics import r2_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    first = (DictVectorizer(sparse=False), SimpleImputer())
    models = {
        "ridge": make_pipeline(*first, StandardScaler(), RidgeCV(np.logspace(-3, 3, 13))),
        "forest": make_pipeline(*first, RandomForestRegressor(300, random_state=0)),
    }
    rows = [{k: _cell(v) for k, v in row.items()} for row in values]
    scores = {"majority": 0.0}
    for name, model in models.items():
        answers = model.fit([rows[i] for i in train], y[train]).predict([rows[i] for i in test])
        scores[name] = 100 * float(r2_score(y[test], answers))
    return scores


def _cell(value: Any) -> Any:
    """A table's cell for DictVectorizer: numbers as they are (NaN: imputed), texts and dates one-hot or as days."""
    if hasattr(value, "timestamp"):
        return value.timestamp() / 86400 if value == value else float("nan")
    return value if isinstance(value, str) else float("nan") if value is None else float(value)


def _mel_statistics(samples: np.ndarray, rate: int) -> np.ndarray:
    """Mean and deviation over time of a log-mel spectrogram, [2 x bands]."""
    from edgefl.data.log_mel import log_mel

    mel = log_mel(samples.astype(np.float32), rate, 40, None)
    return np.concatenate([mel.mean(axis=0), mel.std(axis=0)])
