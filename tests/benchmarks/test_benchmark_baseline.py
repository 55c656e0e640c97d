"""A task's simple baseline: measured once for the same data, without sight of the test, and shown on the page."""

from __future__ import annotations

import numpy as np
from memory_fleet import share

from benchmarks.accuracy.baselines import STRENGTHS, regression
from benchmarks.accuracy.claims import baseline
from benchmarks.accuracy.claims.page import write
from benchmarks.accuracy.claims.study import Study
from edgefl.data.named import Named


def test_a_simple_baseline_is_measured_once_for_all_tasks_of_the_same_data(monkeypatch, tmp_path):
    rng = np.random.default_rng(1)
    whole = share(200, {"a": 1.0, "b": 1.0}, seed=1)
    whole.modalities["a"][...] = rng.normal(0, 1, whole.modalities["a"].shape)
    whole.modalities["b"][...] = rng.normal(0, 1, whole.modalities["b"].shape)
    whole.modalities["a"].reshape(200, -1)[:, 0] = 9 * whole.labels
    halves = Named(whole.subset(range(100)), whole.subset(range(100, 200)), None)
    asked = []
    monkeypatch.setattr(baseline, "named", lambda name, options: asked.append(name) or halves)
    study, path = Study("mmic"), tmp_path / baseline.FILE
    study.tasks["again"] = study.tasks["har"]
    baseline.fill(study, ["har"], path)
    baseline.fill(study, study.tasks, path)
    assert asked == ["har_hapt", "av_digits"]
    found = baseline.kept(path)[baseline.key(study, "again")]
    assert found.complete > 0.9
    assert found.alone["a"] > 0.9 > 0.7 > found.alone["b"]
    assert found.text.startswith(f"{100 * found.complete:.1f} % (a alone ")
    write([(study, [], [])], tmp_path / "page.md", baseline.kept(path))
    assert (
        f"Simple baseline, logistic regression on all training samples, complete: {found.text}."
        in (tmp_path / "page.md").read_text()
    )


def test_regularisation_of_the_baseline_is_chosen_on_people_held_out():
    rng = np.random.default_rng(2)
    features, labels = rng.normal(0, 1, (300, 40)), rng.integers(0, 2, 300)
    features[:, 0] += 3 * labels
    groups = np.arange(300) // 10
    chosen = baseline.fitted(features, labels, groups)[-1].C
    assert chosen in STRENGTHS
    scores = {}
    own, others = next(baseline.GroupShuffleSplit(1, test_size=0.2, random_state=0).split(features, labels, groups))
    assert not set(groups[own]) & set(groups[others])
    for strength in STRENGTHS:
        scores[strength] = regression(strength).fit(features[own], labels[own]).score(features[others], labels[others])
    assert scores[chosen] == max(scores.values())
