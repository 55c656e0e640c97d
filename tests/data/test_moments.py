"""What a device tells of its sensor data to standardise a fleet: mean and variance, and of how few samples nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgefl.data.arrays import on_disk
from edgefl.data.dataset import Dataset
from edgefl.data.moments import moments_of
from edgefl.models.spec import EncoderSpec

FLEET = EncoderSpec(input_shape=(5, 2), standardize="fleet")


def data(rows: int, present: int, far: float = 0.0) -> Dataset:
    values = np.random.default_rng(4).normal((far, -3), (1, 2), (rows, 5, 2)).astype(np.float32)
    values[present:] = 0
    flags = np.arange(rows) < present
    other = {"photo": np.ones((rows, 5, 2), np.float32)}
    return Dataset(
        {"acc": values, **other}, {"acc": flags, "photo": np.ones(rows, bool)}, None, (), list(map(str, range(rows)))
    )


@pytest.mark.parametrize("far", [0.0, 1e5])
@pytest.mark.parametrize("disk", [False, True])
def test_mean_and_variance_of_what_is_there(tmp_path: Path, far: float, disk: bool):
    """Over blocks of 256 samples; at 1e5 a difference of squares in float32 would leave nothing of a variance of 1."""
    own = data(600, 520, far)
    there = own.modalities["acc"][:520].reshape(-1, 2).astype(np.float64)
    if disk:
        own = replace(own, modalities={m: on_disk(values, tmp_path) for m, values in own.modalities.items()})
    found = moments_of(own, {"acc": FLEET, "photo": EncoderSpec(input_shape=(5, 2))}, 2)
    assert list(found) == ["acc"]
    assert found["acc"].count == 520 * 5
    np.testing.assert_allclose(found["acc"].mean, there.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found["acc"].variance, there.var(axis=0), rtol=1e-9)


@pytest.mark.parametrize("rows", [20, 2000])
@pytest.mark.parametrize("spike", [1e4, -1e30])
def test_a_spike_in_a_thousand_steps_changes_nothing(rows: int, spike: float):
    own = data(rows, rows)
    values = own.modalities["acc"].reshape(-1, 2)
    values[7::1000, 1] = spike
    expected = values[:, 0], np.delete(values[:, 1], np.s_[7::1000])
    found = moments_of(own, {"acc": FLEET}, 2)["acc"]
    assert (found.count, found.counts) == (len(values), tuple(map(len, expected)))
    np.testing.assert_allclose(found.mean, [one.mean(dtype=np.float64) for one in expected], rtol=1e-9)
    np.testing.assert_allclose(found.variance, [one.var(dtype=np.float64) for one in expected], rtol=1e-9)


def test_rare_events_and_a_sensor_mostly_at_rest_are_no_spikes():
    """Steps of 1 in one of 300 where all others are 0; and one of 100 steps at 200 times the noise of the rest."""
    draw = np.random.default_rng(1)
    values = draw.normal(0, 0.01, (200, 30, 2)).astype(np.float32)
    values[:, :, 0] = 0
    values.reshape(-1, 2)[::300, 0] = 1
    values.reshape(-1, 2)[::100, 1] = 2
    own = Dataset({"acc": values}, {"acc": np.ones(200, bool)}, None, (), list(map(str, range(200))))
    assert moments_of(own, {"acc": FLEET}, 2)["acc"].counts == ()


@pytest.mark.parametrize(("present", "least", "tells"), [(1, 1, False), (2, 1, True), (4, 5, False), (5, 5, True)])
def test_nothing_is_told_of_few_samples(present: int, least: int, tells: bool):
    assert bool(moments_of(data(6, present), {"acc": FLEET}, least)) is tells
