"""Mistakes and freedoms of a first .npz of one's own: unlabelled, labels as names, arrays of unequal length, none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_fixture import SUPERVISED
from test_coordinator_machine import Play, of

from coordinator.core import moves as do
from coordinator.core import moves as e
from edgefl.data.dataset import Dataset
from edgefl.data.sources import load
from edgefl.errors import DataError
from edgefl.plan.job import Placement, Slots
from edgefl.plan.training_samples import unlabelled
from edgefl.records import Refusal
from edgefl.report.refusals import reason


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


ACC = np.ones((4, 5, 3), np.float32)


def test_labels_may_be_names(tmp_path: Path) -> None:
    data = Dataset.load_npz(saved(tmp_path / "a.npz", acc=ACC, label=np.array(["walk", "rest", "", "walk"])))
    assert data.label_names == ("rest", "walk")
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0, -1, 1]
    aligned = load(tmp_path / "a.npz", label_names=("run", "walk", "rest"))
    assert aligned.labels is not None
    assert aligned.labels.tolist() == [1, 2, -1, 1]


def test_label_names_number_labels_that_are_names(tmp_path: Path) -> None:
    names, label = np.array(["walk", "rest"]), np.array(["walk", "rest", "rest", "walk"])
    data = Dataset.load_npz(saved(tmp_path / "a.npz", acc=ACC, label=label, label_names=names))
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 1, 0]
    with pytest.raises(DataError, match="'run', which is not in 'label_names'"):
        Dataset.load_npz(saved(tmp_path / "b.npz", acc=ACC, label=np.array(["run"] * 4), label_names=names))


def test_labels_of_another_type_say_what_is_taken(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not integers or texts") as wrong:
        Dataset.load_npz(saved(tmp_path / "a.npz", acc=ACC, label=np.ones(4, bool)))
    assert "write their names" in wrong.value.remedy


def test_a_short_array_is_no_bad_sample(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="array 'gyro' has 3 rows, but there are 4 samples") as ragged:
        Dataset.load_npz(saved(tmp_path / "a.npz", acc=ACC, gyro=ACC[:3], label=np.arange(4)))
    assert "bad_samples" not in ragged.value.remedy
    assert "(array 'acc' 4, array 'gyro' 3, array 'label' 4)" in ragged.value.remedy


@pytest.mark.parametrize("bad_samples", ["error", "skip"])
def test_an_empty_file_holds_no_sample(tmp_path: Path, bad_samples: str) -> None:
    with pytest.raises(DataError, match=r"a\.npz: holds no sample"):
        load(saved(tmp_path / "a.npz", acc=ACC[:0], label=np.arange(0)), bad_samples=bad_samples)


# Unlabelled


def test_unlabelled_data_is_called_that() -> None:
    assert unlabelled(SUPERVISED, 100, 0) == Refusal("labels", detail="100 samples, none has a label")
    assert unlabelled(SUPERVISED, 100, 1) is None
    assert unlabelled(SUPERVISED, 0, 0) is None
    assert unlabelled(Slots(objective={"clip": {}}), 100, 0) is None
    assert unlabelled(Slots(objective={"cross_entropy": {}, "clip": {}}), 100, 0) is None
    assert reason(Refusal("labels")) == "unlabelled data"


def test_a_fleet_without_a_label_is_not_told_to_lower_the_batch_size() -> None:
    play = Play()
    play.hello("a")
    play.hello("b")
    refused = Refusal("labels", detail="100 samples, none has a label")
    asked = play.plans[-1]
    answers = tuple(Placement(one.device, refusal=refused) for one in asked.candidates)
    (failure,) = of(do.Fail, play.send(e.Planned(play.now, asked.ticket, answers)))
    assert failure.kind == "DataError"
    assert "100 samples, none has a label" in failure.message
    assert failure.remedy.startswith("Label the samples")
