"""Fleet-wide constants from devices' moments: as if the data were in one place, and what is no basis for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.aggregation.channel_moments import LARGEST, combined, doubt
from edgefl.records import Moments


def moments(values: np.ndarray) -> Moments:
    return Moments(len(values), tuple(values.mean(axis=0).tolist()), tuple(values.var(axis=0).tolist()))


def test_two_devices_by_hand():
    """1, 3 and 5, 5: the mean of 1, 3, 5, 5 is 3.5, the variance (6.25 + 0.25 + 2.25 + 2.25) / 4 = 2.75."""
    found = combined({"a": Moments(2, (2.0,), (1.0,)), "b": Moments(2, (5.0,), (0.0,))}, 1.0, 100.0)
    assert found is not None
    assert (found.mean, found.devices, found.left_out) == ((3.5,), ("a", "b"), {})
    assert found.std == pytest.approx((math.sqrt(2.75),))


@given(st.lists(st.integers(2, 40), min_size=1, max_size=2), st.integers(0, 2**32 - 1))
def test_it_is_as_if_the_data_were_in_one_place(sizes: list[int], seed: int):
    draw = np.random.default_rng(seed)
    data = [draw.normal(draw.normal(size=3) * 9, 2, size=(size, 3)) for size in sizes]
    found = combined({str(i): moments(one) for i, one in enumerate(data)}, 1.0, 0)
    assert found is not None
    whole = np.concatenate(data)
    np.testing.assert_allclose(found.mean, whole.mean(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.std, whole.std(axis=0), rtol=1e-9)


def test_of_three_devices_none_weighs_more_than_half():
    """Shares 0.98, 0.01, 0.01 become 0.5, 0.25, 0.25; with largest_share 1/3 all weigh the same."""
    told = {"a": Moments(98, (3.0,), (1.0,)), "b": Moments(1, (0.0,), (1.0,)), "c": Moments(1, (0.0,), (1.0,))}
    for share, mean in ((1.0, 1.5), (1 / 3, 1.0)):
        found = combined(told, share, 0)
        assert found is not None
        assert found.mean == pytest.approx((mean,))


def test_a_device_out_of_line_is_left_out_where_two_others_can_tell():
    told = {name: Moments(10, (1.0,), (1.0,)) for name in "ab"} | {"c": Moments(10, (1e6,), (1.0,))}
    found = combined(told, 1.0, 100.0)
    assert found is not None
    assert (found.mean, found.devices, set(found.left_out)) == ((1.0,), ("a", "b"), {"c"})
    assert "channel 0: its values are about 1e+06, the median of the others 1.41" in found.left_out["c"]
    alone = combined({name: told[name] for name in "ac"}, 1.0, 100.0)
    assert alone is not None
    assert not alone.left_out


def test_one_devices_outliers_do_not_decide():
    """300 is less than what is left out. Of the others mean 8, deviation 1: 30 counts as 13, 300 as 5.

    Mean (3 * 8 + 13) / 4 = 9.25; variance (3 * (1 + 1.25^2) + 25 + 3.75^2) / 4 = 11.6875.
    """
    told = {name: Moments(10, (8.0,), (1.0,)) for name in "abc"} | {"d": Moments(10, (30.0,), (300.0**2,))}
    found = combined(told, 1.0, 100.0)
    assert found is not None
    assert set(found.devices) == set("abcd")
    assert (found.mean[0], found.std[0] ** 2) == (pytest.approx(9.25), pytest.approx(11.6875))
    backwards = combined(dict(reversed(told.items())), 1.0, 100.0)
    assert backwards is not None
    assert (backwards.mean, backwards.std) == (found.mean, found.std)


def test_outliers_of_a_minority_of_devices_do_not_decide():
    """Eight of deviation 1; the ninth counts as 5, the tenth as 5 sqrt((8 + 25) / 9): together 3.5, not 134."""
    told = {str(i): Moments(10, (0.0,), (1.0 if i < 8 else 300.0**2,)) for i in range(10)}
    found = combined(told, 1.0, 0)
    assert found is not None
    assert found.std[0] ** 2 == pytest.approx((8 + 25 + 25 * 33 / 9) / 10)


def test_of_devices_at_rest_the_one_that_moves_tells_the_deviation():
    told = {name: Moments(10, (1.0,), (1e-30,)) for name in "ab"} | {"c": Moments(10, (1.0,), (4.0,))}
    found = combined(told, 1.0, 100.0)
    assert found is not None
    assert found.std == pytest.approx((math.sqrt(4 / 3),))


def test_a_constant_channel_is_not_blown_up():
    found = combined({"a": Moments(9, (7.0, 0.0, 1e5), (0.0, 0.0, 1e-6))}, 1.0, 100.0)
    assert found is not None
    assert found.std == (1.0, 1.0, 1.0)  # rounding of float32 at 1e5 is 0.008
    small = combined({"a": Moments(9, (5e-5,), (1e-12,))}, 1.0, 100.0)  # teslas
    assert small is not None
    assert small.std == pytest.approx((1e-6,))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Moments(0, (1.0, 1.0), (1.0, 1.0)), "of 0 time steps"),
        (Moments(101, (1.0, 1.0), (1.0, 1.0)), "of 101 time steps, and it has 100"),
        (Moments(9, (1.0,), (1.0,)), "of 1 channels, and the model takes 2"),
        (Moments(9, (1.0, 1.0), (1.0,)), "of 2 channels"),
        (Moments(9, (1.0, 1.0), (1.0, -1.0)), "not finite, negative or too large"),
        (Moments(9, (1.0, math.nan), (1.0, 1.0)), "not finite"),
        (Moments(9, (1.0, 1.0), (1.0, math.inf)), "not finite"),
        (Moments(9, (1.0, 2 * LARGEST), (1.0, 1.0)), "too large"),
        (Moments(100, (1.0, -1.0), (1.0, 0.0)), ""),
    ],
)
def test_what_cannot_be_is_doubted(told: Moments, said: str):
    found = doubt(told, 2, 100)
    assert said in found
    assert bool(said) == bool(found)


def test_each_column_counts_the_cells_that_are_there():
    """Column 0: (2 * 1 + 4 * 4) / 6 = 3; column 1 is there on b alone; column 2 nowhere."""
    sent = {
        "a": Moments(4, (1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (2, 0, 0)),
        "b": Moments(4, (4.0, 7.0, 0.0), (0.0, 9.0, 0.0), (4, 4, 0)),
    }
    found = combined(sent, 1.0, 100.0)
    assert found is not None
    assert (found.mean, found.std) == (pytest.approx((3.0, 7.0, 0.0)), pytest.approx((math.sqrt(2.0), 3.0, 1.0)))
    assert doubt(sent["a"], 3, 4) == ""
    assert doubt(Moments(4, (0.0,), (1.0,), (5,)), 1, 4) == "of columns with more cells than samples"
    assert "of 1 channels" in doubt(Moments(4, (0.0,), (1.0,), (1, 1)), 1, 4)
