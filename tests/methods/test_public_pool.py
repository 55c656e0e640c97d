"""Completion from public samples that no device holds: same class where labelled, priced, refused without a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share

from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, DataError
from edgefl.methods.fedmvp.completion import QUESTIONS, asked, completed_counts, completed_data
from edgefl.models.spec import EncoderSpec

ENCODERS = {m: EncoderSpec("sensor", (2, 1)) for m in "ab"}


def data(a: list[float], b: list[float | None], labels: list[int], names: tuple[str, ...] = ("x", "y")) -> Dataset:
    has = np.array([value is not None for value in b])
    values = {"a": a, "b": [value or 0.0 for value in b]}
    arrays = {m: np.repeat(np.array(own, np.float32)[:, None, None], 2, axis=1) for m, own in values.items()}
    present = {"a": np.ones(len(a), bool), "b": has}
    return Dataset(arrays, present, np.array(labels), names, [str(i) for i in range(len(a))])


def completed(own: Dataset, pool: Dataset, folder: Path):
    pool.save_npz(folder / "public.npz")
    options = {"checkpoint": "", "questions": ""}
    return completed_data(own, ENCODERS, generator="pool", pool=str(folder / "public.npz"), **options)


def test_the_most_alike_of_the_pools_samples_of_the_class_lends_its_half(tmp_path: Path) -> None:
    """0.9 is nearest to 1 of class x and to 0.8 of y: the sample's class is y, which has the number 0 in the pool.

    The device has no complete sample at all, so that local donors would make nothing. Class z is not in the pool.
    """
    own = data([0.9, 0.9, 5.0], [None, None, None], [0, 1, 2], ("x", "y", "z"))
    pool = data([1.0, 0.8, 5.0, 5.1], [10.0, 20.0, 30.0, None], [1, 0, 0, 1], ("y", "x"))
    done = completed(own, pool, tmp_path)
    assert done.dataset.modalities["b"][:, 0, 0].tolist() == [10.0, 20.0, 30.0]
    assert done.made == {"a": 0, "b": 3}
    assert done.metrics() == {"completed": 3.0, "completed_other_class": 1.0}
    assert len(done.dataset) == 3  # nothing of the pool is trained on but what was lent


def test_labels_that_came_as_numbers_are_the_models(tmp_path: Path) -> None:
    """As a device's own are: without names, class 1 of the pool is class y of the device."""
    own = data([0.9, 0.9], [None, None], [0, 1])
    done = completed(own, data([1.0, 0.9], [10.0, 20.0], [0, 1], ("0", "1")), tmp_path)
    assert done.dataset.modalities["b"][:, 0, 0].tolist() == [10.0, 20.0]
    assert done.metrics() == {"completed": 2.0, "completed_other_class": 0.0}
    unlike = data([0.9, 1.0, 0.9], [10.0, 20.0, 30.0], [1, 0, 1], ("0", "1"))
    assert completed(own, unlike, tmp_path).dataset.modalities["b"][:, 0, 0].tolist() == [20.0, 10.0]
    many = data([1.0, 0.9, 0.8], [10.0, 20.0, 30.0], [0, 1, 2], ("0", "1", "2"))
    with pytest.raises(DataError, match="numbers 3 classes, and the model has 2"):
        completed(own, many, tmp_path)


def test_a_pool_that_cannot_lend_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    own = data([0.9], [None], [0])
    with pytest.raises(DataError, match=r"public\.npz' has no sample with two of the model's modalities"):
        completed(own, data([1.0], [None], [0]), tmp_path)
    wide = {m: np.zeros((2, 5, 1), np.float32) for m in "ab"}
    with pytest.raises(DataError, match=r"public\.npz: samples of 'a' have shape \[5, 1\]"):
        completed(own, Dataset(wide, {m: np.ones(2, bool) for m in "ab"}, None, (), ["p", "q"]), tmp_path)
    with pytest.raises(DataError, match=r"no such file|nowhere\.npz"):
        completed_data(own, ENCODERS, generator="pool", pool="nowhere.npz", checkpoint="", questions="")


def test_what_a_pool_completes_is_priced() -> None:
    assert completed_counts({"": 9, "a": 9}, ENCODERS, generator="pool") == {"": 9, "a": 9, "b": 9}
    assert completed_counts({"": 9, "a": 5, "b": 4}, ENCODERS, generator="pool") == {"": 9, "a": 9, "b": 9}


def test_a_recipe_without_a_pool_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="completion by pool needs public samples; name them by pool: PATH"):
        plan_of(tmp_path, "fedmvp", "ab", 1, ["slots.missing={completion: {generator: pool}}"])


def test_a_device_with_one_sensor_is_completed_from_a_pool_in_a_run(tmp_path: Path) -> None:
    """No local sample is complete. All but the 4 that are held out are completed, as the assignment tells."""
    share(60, {"a": 1.0, "b": 1.0}, 9).save_npz(tmp_path / "public.npz")
    slot = f"slots.missing={{completion: {{generator: pool, pool: {tmp_path / 'public.npz'}}}}}"
    plan = plan_of(tmp_path, "fedmvp", "ab", 1, [slot, "training.rounds=[0, 1]", "training.batch_size=6"])
    own = share(24, {"a": 1.0}, 4)
    report = run_fleet(tmp_path, plan, {"one": own})
    assert report.status == "done"
    (row,) = [row for row in report.assignments if row.device == "one"]
    assert row.metrics["completed"] == 20


def test_questions_are_told_apart_by_their_marks() -> None:
    assert asked(" ".join(QUESTIONS)) == list(QUESTIONS)
    assert asked("What is the color of the petals? how many?") == ["What is the color of the petals?", "how many?"]
    assert asked("") == []
