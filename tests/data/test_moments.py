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


@pytest.mark.parametrize(("present", "least", "tells"), [(1, 1, False), (2, 1, True), (4, 5, False), (5, 5, True)])
def test_nothing_is_told_of_few_samples(present: int, least: int, tells: bool):
    assert bool(moments_of(data(6, present), {"acc": FLEET}, least)) is tells
