"""Levels of a numeric target: two neighbouring weights whose mean is the target, and what becomes of labels."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import plain_names
from edgefl.data.levels import (
    MOST_LEVELS,
    as_labels,
    between_levels,
    central_interval,
    expected_value,
    level_names,
    levels_in,
    nearest_level,
    ranked_probability_score,
    target_errors,
)
from edgefl.data.sources import load
from edgefl.errors import DataError


def test_levels_are_quantiles_and_their_names_give_them_back() -> None:
    targets = np.array([1.0, 2.0, 4.0, np.nan])
    names = level_names(targets)
    levels = levels_in(names)
    assert levels is not None
    assert (levels[0], levels[-1], len(levels)) == (1.0, 4.0, MOST_LEVELS)  # 33 quantiles of three values
    assert levels[MOST_LEVELS // 2] == 2.0
    assert levels_in(("walk", "run")) is None
    assert level_names(np.array([5.0, 5.0])) == ("~5",)  # of one device, perhaps
    assert levels_in(("~2", "~1")) is None
    assert levels_in(("~1", "~nan")) is None
    assert plain_names(("~-2.5", "~1")) == ("-2.5", "1")
    assert plain_names(("~a", "~1")) == ("~a", "~1")


def test_a_target_is_the_mean_of_two_neighbouring_levels_by_hand() -> None:
    levels = np.array([0.0, 10.0, 30.0])
    weights = between_levels(torch.tensor([0.0, 15.0, 99.0, float("nan")]), levels)
    # 15 lies a quarter of the way from 10 to 30; 99 is beyond the last level; NaN is as the first.
    assert weights.tolist() == [[1, 0, 0], [0, 0.75, 0.25], [0, 0, 1], [1, 0, 0]]
    assert expected_value(weights.numpy(), levels).tolist() == [0, 15, 30, 0]
    assert nearest_level(np.array([4.9, 5.1, 21.0, np.nan]), levels).tolist() == [0, 1, 2, -1]


def test_the_central_interval_is_read_off_the_distribution_by_hand() -> None:
    """Levels 0, 10, 20 with 0.25, 0.5, 0.25: below the levels and half at them lie 0.125, 0.5, 0.875; 0.1 is under the
    first of these, 0.9 over the last. With 0, 1, 0 they lie at 0, 0.5, 1: 0.1 is a fifth of the way from 0 to 10."""
    levels = np.array([0.0, 10.0, 20.0])
    assert central_interval([0.25, 0.5, 0.25], levels) == [0, 20]
    assert central_interval([0, 1, 0], levels) == pytest.approx([2, 18])


def test_the_ranked_probability_score_counts_only_rows_with_a_target() -> None:
    levels = np.array([0.0, 10.0, 30.0])
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    # of 15, W = 0, 0.75: (0.5 - 0)^2 * 10 + (0.75 - 0.75)^2 * 20 over the mean step of 15
    score = ranked_probability_score(logits, torch.tensor([15.0, float("nan")]), levels)
    assert score.item() == pytest.approx(2.5 / 15)
    assert ranked_probability_score(logits[:1], torch.tensor([float("nan")]), levels).item() == 0
    sure = torch.tensor([[-99.0, 0.0, -99.0]])
    assert ranked_probability_score(sure, torch.tensor([10.0]), levels).item() == pytest.approx(0, abs=1e-12)


def test_the_score_is_the_integral_over_fine_levels() -> None:
    # Of a standard normal forecast and the target 0: 0.2337, from the closed form (Gneiting and Raftery 2007, eq. 21)
    levels = np.linspace(-6, 6, 2401)
    logits = -0.5 * torch.as_tensor(levels)[None] ** 2
    score = (
        ranked_probability_score(logits, torch.zeros(1, dtype=torch.float64), levels).item() * np.diff(levels).mean()
    )
    assert score == pytest.approx((np.sqrt(2) - 1) / np.sqrt(np.pi), rel=2e-3)


def test_errors_by_hand() -> None:
    # truth 1, 3: mean 2, spread 2; answers 1, 2: squares 1
    assert target_errors([1, 2], [1, 3]) == {"r2": 0.5, "mae": 0.5, "rmse": pytest.approx(0.5**0.5)}
    assert target_errors([2, 2], [2, 2])["r2"] == 1.0


def test_floating_labels_of_an_npz_are_targets_and_come_back(tmp_path) -> None:
    targets = np.array([1.5, 2.5, np.nan, 9.0])
    np.savez(tmp_path / "a.npz", acc=np.zeros((4, 8, 1), np.float32), label=targets)
    data = Dataset.load_npz(tmp_path / "a.npz")
    data.save_npz(tmp_path / "b.npz")
    again = Dataset.load_npz(tmp_path / "b.npz")
    np.testing.assert_array_equal(again.targets, targets)
    assert again.label_names == data.label_names
    assert again.labels.tolist() == as_labels(targets)[0].tolist()
    assert again.subset([3]).targets.tolist() == [9.0]


def test_whole_numbers_become_targets_where_the_model_predicts_a_number(tmp_path) -> None:
    np.savez(tmp_path / "a.npz", acc=np.zeros((3, 8, 1), np.float32), label=np.array([3, 7, -1]))
    data = load(tmp_path / "a.npz", label_names=("~0", "~5", "~10"))
    np.testing.assert_array_equal(data.targets, [3, 7, np.nan])
    assert data.labels.tolist() == [1, 1, -1]


def test_names_and_numbers_are_not_mixed_up(tmp_path) -> None:
    acc = np.zeros((2, 8, 1), np.float32)
    np.savez(tmp_path / "names.npz", acc=acc, label=np.array(["walk", "run"]))
    np.savez(tmp_path / "numbers.npz", acc=acc, label=np.array([1.5, 2.5]))
    with pytest.raises(DataError, match="labels are names"):
        load(tmp_path / "names.npz", label_names=("~0", "~5"))
    with pytest.raises(DataError, match=r"numbers such as 2, and the model knows: walk"):
        load(tmp_path / "numbers.npz", label_names=("walk", "run"))


def test_a_manifest_names_the_label_that_is_no_number(tmp_path) -> None:
    lines = [{"acc": [[0.0]] * 4, "label": label} for label in (1.5, 2, "three")]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match="'three' is no finite number, as the other labels are"):
        load(tmp_path)
    data = load(tmp_path, bad_samples="skip")
    assert data.targets.tolist() == [1.5, 2.0]
