"""Missing modalities: rates, whole sensors, and what becomes of samples that lose everything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.config.settings import MissingConfig
from edgefl.data import partition
from edgefl.data.dataset import Dataset
from edgefl.errors import DataError


def drop(data: Dataset, options: dict[str, object], seed: int, *, device: str = "d") -> Dataset:
    return partition.drop(data, MissingConfig(**options), seed, device)


def pairs(count: int) -> Dataset:
    ones = np.ones((count, 2, 1), dtype=np.float32)
    flags = np.ones(count, dtype=bool)
    ids = [str(i) for i in range(count)]
    return Dataset({"acc": ones, "gyro": ones.copy()}, {"acc": flags, "gyro": flags.copy()}, None, (), ids)


def test_rates_of_a_thousand_pairs():
    """q = 0.5: a quarter of the pairs loses both, of the rest a third each is complete, acc only, gyro only."""
    data = pairs(1000)
    left = drop(data, {"rate": 0.5}, 0)
    acc, gyro = left.present["acc"], left.present["gyro"]
    assert len(left) == pytest.approx(750, abs=45)  # 3 standard deviations are 41
    for part in (acc & gyro, acc & ~gyro, gyro & ~acc):
        assert part.sum() == pytest.approx(250, abs=45)
    assert (left.modalities["acc"][~acc] == 0).all()
    assert (data.modalities["acc"] == 1).all()  # the argument is untouched
    assert len(drop(data, {"rate": 0.5, "keep": "one"}, 0)) == 1000


def test_a_fixed_share_of_samples_loses_exactly_one_modality():
    data = pairs(101)
    lone = np.arange(101) < 20
    data.present["gyro"][lone] = False  # these have one alone, and keep it
    left = drop(data, {"rate": 0.5, "lose": "one"}, 0)
    acc, gyro = left.present["acc"], left.present["gyro"]
    assert len(left) == 101
    assert (~acc & ~gyro).sum() == 0
    assert (acc & ~gyro)[20:].sum() + (gyro & ~acc)[20:].sum() == 50  # floor(0.5 * 101)
    assert min((acc & ~gyro)[20:].sum(), (gyro & ~acc).sum()) > 10  # either
    assert (acc & ~gyro)[:20].all()
    assert (left.modalities["acc"][~acc] == 0).all()
    some = drop(pairs(100), {"rate": 0.29, "lose": "one"}, 0)
    assert (some.present["acc"] ^ some.present["gyro"]).sum() == 29  # 0.29 * 100 is a little below that
    every = drop(data, {"rate": 1.0, "lose": "one"}, 0)
    assert (every.present["acc"] ^ every.present["gyro"]).all()
    assert drop(data, {"rate": 1.0, "lose": "one", "complete": ["d"]}, 0).samples() == data.samples()


def test_nothing_to_do_changes_nothing():
    for options in ({}, {"rate": 0.0}, {"rate": 0, "keep": "discard", "devices": {}}):
        assert drop(pairs(3), options, 0).samples() == {"": 3, "acc": 3, "gyro": 3}


def test_a_device_without_the_sensor():
    options = {"devices": {"watch": ["gyro"]}}
    assert drop(pairs(4), options, 0, device="watch").signature() == {"acc": (2, 1)}
    assert drop(pairs(4), options, 0, device="phone").signature() == {"acc": (2, 1), "gyro": (2, 1)}


def test_devices_that_the_rate_does_not_touch_and_devices_without_labels():
    options = {"rate": 1.0, "keep": "one", "complete": ["whole"], "unlabelled": ["mute"]}
    labelled = replace(pairs(4), labels=np.array([0, 1, 0, 1]), label_names=("rest", "run"))
    whole, mute = (drop(labelled, options, 0, device=name) for name in ("whole", "mute"))
    assert whole.samples() == {"": 4, "acc": 4, "gyro": 4}
    assert list(whole.labels) == [0, 1, 0, 1]
    assert sum(mute.present[m].sum() for m in mute.modalities) == 4  # one modality each
    assert (mute.labels, mute.label_names) == (None, ())


@given(seed=st.integers(0, 20), rate=st.floats(0, 1), lacking=st.booleans())
def test_keep_one_keeps_every_sample_with_something_it_had(seed, rate, lacking):
    data = pairs(12)
    data.present["acc"][:4] = False
    options = {"rate": rate, "keep": "one", "devices": {"d": ["gyro"]} if lacking else {}}
    left = drop(data, options, seed, device="d")
    assert len(left) == (8 if lacking else 12)
    has = np.stack([left.has("acc"), left.has("gyro")])
    assert has.any(axis=0).all()
    if not lacking:
        assert not has[0, :4].any()


def test_seeded_by_device_and_not_by_order():
    data = pairs(50)
    one = drop(data, {"rate": 0.5}, 3, device="a")
    turned = Dataset(dict(reversed(data.modalities.items())), data.present, None, (), data.ids)
    assert drop(turned, {"rate": 0.5}, 3, device="a").ids == one.ids
    assert drop(data, {"rate": 0.5}, 3, device="b").ids != one.ids
    assert drop(data, {"rate": 0.5}, 4, device="a").ids != one.ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.0}, "device 'd' loses every sample: of 3"),
        ({"devices": {"d": ["acc", "gyro"]}}, "device 'd' loses every sample"),
        ({"devices": {"d": ["gyros"]}}, r"missing\.devices\.d names gyros"),
    ],
)
def test_bad_options_and_empty_results(options, message):
    with pytest.raises(DataError, match=message):
        drop(pairs(3), options, 0, device="d")


@pytest.mark.parametrize("options", [{"rate": 1.5}, {"rate": float("nan")}, {"keep": "two"}, {"rates": 0.1}])
def test_options_that_the_run_file_refuses(options):
    with pytest.raises(pydantic.ValidationError, match=next(iter(options))):
        MissingConfig(**options)
