"""Simple models beside a run: their scores, and the sentence of a run that is below them."""

from __future__ import annotations

import re
import sys

import msgspec
import numpy as np
import pytest

from edgefl.api import reference
from edgefl.api.reference import reference_scores
from edgefl.api.runs import referenced
from edgefl.data.dataset import Dataset
from edgefl.records import EvaluationRow
from edgefl.report import quality, story
from edgefl.run_records import AssignmentRow, DeviceRow, Reference, RunReport
from edgefl.storage.disk import REFERENCE


def dataset(seed: int, count: int = 60, *, text: bool = False, target: bool = False) -> Dataset:
    """Three classes that the first channel, or a word, tells."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    if text:
        values = rng.integers(10, 50, (count, 6))
        values[:, 2] = y + 2
    else:
        values = rng.normal(0, 0.1, (count, 8, 2)).astype(np.float32)
        values[:, :, 0] += y[:, None]
    names = ("a", "b", "c")
    return Dataset(
        {"m": values}, {"m": np.ones(count, bool)}, y.astype(np.int64), ("~0", "~1", "~2") if target else names,
        [str(i) for i in range(count)], targets=y.astype(np.float64) if target else None,
    )  # fmt: skip


@pytest.mark.parametrize("text", [False, True])
def test_simple_models_learn_what_the_shares_tell(text: bool) -> None:
    found = reference_scores([dataset(1, text=text), dataset(2, text=text)], dataset(3, text=text))
    assert found is not None
    assert (found.metric, found.samples) == ("accuracy", 120)
    assert found.scores["majority"] == pytest.approx(1 / 3)
    assert found.scores["logistic regression"] == 1.0
    assert found.scores.get("forest", 1.0) == 1.0


def test_a_modality_that_says_nothing_does_not_hide_one_that_does() -> None:
    def noisy(seed: int) -> Dataset:
        data, noise = dataset(seed, text=True), np.random.default_rng(seed).normal(5, 1, (60, 16, 16, 3))
        modalities = {"m": data.modalities["m"], "image": noise.astype(np.float32)}
        present = dict.fromkeys(modalities, np.ones(60, bool))
        return Dataset(modalities, present, data.labels, data.label_names, data.ids)

    found = reference_scores([noisy(1), noisy(2)], noisy(3))
    assert found is not None
    assert list(found.scores) == [
        "majority",
        *(f"logistic regression{x}" for x in ("", " on m alone", " on image alone")),
        "forest on image alone",
    ]
    assert found.scores["logistic regression on m alone"] == 1.0
    assert found.scores["logistic regression"] > 0.9
    assert found.scores["logistic regression on image alone"] < 0.6


def test_a_forest_says_on_how_few_of_the_samples_it_was_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MOST_CELLS", 1000)
    found = reference_scores([dataset(1), dataset(2)], dataset(3))
    assert found is not None
    (forest,) = (name for name in found.scores if name.startswith("forest"))
    told = re.fullmatch(r"forest on (\d+) samples", forest)
    assert told is not None
    assert int(told[1]) < found.samples
    assert found.scores[forest] == 1.0


def test_a_numeric_target_is_judged_by_r2() -> None:
    found = reference_scores([dataset(1, target=True)], dataset(3, target=True))
    assert found is not None
    assert found.metric == "r2"
    assert found.scores["ridge"] > 0.95


def test_without_labels_there_is_none() -> None:
    data = dataset(1)
    unlabelled = Dataset(data.modalities, data.present, None, (), data.ids)
    assert reference_scores([unlabelled], unlabelled) is None


def report(accuracy: float, **scores: float) -> RunReport:
    row = EvaluationRow(1, 1, ("m",), "none", "accuracy", accuracy, 60)
    return RunReport(evaluations=(row,), status="done", reference=Reference("accuracy", scores))


def test_a_run_below_a_simple_model_says_so_first() -> None:
    below = report(0.706, **{"logistic regression": 0.985, "forest": 0.971})
    assert story.troubles(below)[0] == (
        "Below a simple model: logistic regression has 98.5 % on the same samples, all in one place, "
        "and this run 70.6 %."
    )
    assert "logistic regression 98.5 %, forest 97.1 %" in " ".join(quality.evaluation(below).notes)


def test_a_simple_model_on_one_modality_is_a_way_out() -> None:
    below = report(0.3, **{"ridge": 0.2, "ridge on features alone": 0.5})
    assert story.troubles(below)[0].endswith("try a run file with the encoder of features only.")


def falling(metric: str, *levels: float, **encoder: str) -> RunReport:
    """A run below a simple model whose last stage had these levels of a loss, one a round, on two devices."""
    below = report(0.5, **{"logistic regression": 0.9})
    rows = [
        AssignmentRow(name, 2, number, status="done", metrics={metric: level + apart})
        for number, level in enumerate(levels, 1)
        for name, apart in (("left", 0.1), ("right", -0.1))
    ]
    rows.append(AssignmentRow("left", 1, 1, status="done", metrics={metric: 99}))
    config = {"run": {"model": {"encoders": {"note": {"kind": "text", "pretrained": "", **encoder}}}}}
    stages = ({"index": 1, "rounds": 3}, {"index": 2, "rounds": len(levels)})
    return msgspec.structs.replace(below, assignments=tuple(rows), stages=stages, config=config)


def test_a_run_below_a_simple_model_says_what_its_figures_suggest() -> None:
    """Of four rounds the last quarter is the fourth: 0.8 is 20 % below the third's 1.0."""
    more = "more rounds (--set training.rounds=[3,8]): the {} fell to the end, by 20.0 %."
    text = "Try a pretrained encoder of note (edgefl init … --pretrained)"
    assert story.troubles(falling("loss", 2, 1, 1, 0.8))[1] == f"{text}, or {more.format('training loss')}"
    held = falling("received_loss", 2, 1, 1, 0.8, pretrained="minilm")
    assert story.troubles(held)[1] == "Try " + more.format("loss on the devices' hold-outs")
    assert story.ways(falling("loss", 2, 1, 1, 0.99)) == story.ways(falling("loss", 2, 0.5)) == f"{text}."
    assert story.ways(falling("loss", 2, 1, 1, 1.2, kind="table")) == story.ways(RunReport()) == ""
    good = msgspec.structs.replace(falling("loss", 2, 1, 1, 0.8), reference=Reference("accuracy", {"forest": 0.4}))
    assert not any("Try" in trouble for trouble in story.troubles(good))


def test_a_forest_on_one_modality_is_admitted_as_much_as_one_on_all() -> None:
    assert story.below_reference(report(0.95, **{"forest on cells alone": 0.97})) == ""


def test_stages_that_lose_what_an_earlier_one_had_are_warned_of() -> None:
    def after(*scores: float) -> str:
        rows = [EvaluationRow(stage, 10, ("m",), "none", "r2", score, 60) for stage, score in enumerate(scores, 1)]
        return story.lost(RunReport(evaluations=tuple(rows), status="done"))

    assert after(0.28, 0.04, -0.08).startswith("Warning: R² 0.280 after stage 1, -0.0800 after stage 3:")
    assert after(0.28, 0.27, 0.26) == after(0.28) == after() == ""


def test_a_point_less_than_a_line_or_three_less_than_a_forest_is_no_trouble() -> None:
    assert story.below_reference(report(0.96, **{"logistic regression": 0.965, "forest": 0.985})) == ""
    assert "forest" in story.below_reference(report(0.95, **{"logistic regression": 0.955, "forest": 0.985}))


def test_a_runs_reference_is_made_once_and_kept(tmp_path) -> None:
    (tmp_path / "shares").mkdir()
    dataset(1).save_npz(tmp_path / "shares" / "left.npz")
    dataset(3).save_npz(tmp_path / "shares" / "test.npz")
    run = RunReport(status="done", devices=(DeviceRow(device="left"),))
    made = referenced(run, tmp_path)
    assert made.reference.scores["logistic regression"] == 1.0
    (tmp_path / "shares" / "left.npz").unlink()
    assert referenced(run, tmp_path) == made
    assert (tmp_path / REFERENCE).is_file()
    assert referenced(RunReport(status="done"), tmp_path / "elsewhere").reference.scores == {}


def test_a_run_without_scikit_learn_and_what_it_brings_has_no_reference(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shares").mkdir()
    for name in ("left", "test"):
        dataset(1).save_npz(tmp_path / "shares" / f"{name}.npz")
    run = RunReport(status="done", devices=(DeviceRow(device="left"),))
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert referenced(run, tmp_path) == run
