"""What measured rounds teach about predictions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.plausibility import LEAST_RATIO, MOST_RATIO, learned
from edgefl.plan.job import Placement
from edgefl.records import Figure


def figures(**values: float | None) -> dict[str, Figure]:
    return {name: Figure(value) for name, value in values.items()}


def test_by_hand():
    """Predicted 100, measured 121: the factor goes half the way (by ratio) to 1.21, then to it."""
    first = learned({}, Placement(predicted=figures(flops=100.0)), figures(flops=121.0))
    assert first == {"flops": pytest.approx(1.1)}
    # The next plan holds the factor: its 110 mean 100 without it.
    second = learned(first, Placement(factors=first, predicted=figures(flops=110.0)), figures(flops=121.0))
    assert second == {"flops": pytest.approx(math.sqrt(1.1 * 1.21))}


@given(st.floats(0.3, 3.5), st.integers(6, 12))
def test_a_device_that_needs_the_same_share_more_each_round_is_predicted_right(share, rounds):
    factors: dict[str, float] = {}
    for _ in range(rounds):
        told = figures(step_peak_bytes=1000.0 * factors.get("step_peak_bytes", 1.0))
        placed = Placement(factors=factors, predicted=told)
        factors = learned(factors, placed, figures(step_peak_bytes=1000.0 * share))
    assert factors["step_peak_bytes"] == pytest.approx(share, rel=0.03)


def test_a_plan_that_holds_for_many_rounds_is_corrected_once():
    """All rounds of a stage carry one plan: its factor must not be applied again and again."""
    factors: dict[str, float] = {}
    placed = Placement(predicted=figures(compute_s=10.0))
    for _ in range(20):
        factors = learned(factors, placed, figures(compute_s=15.0))
    assert factors["compute_s"] == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("value", [None, 0.0, -5.0, math.inf, math.nan])
def test_what_is_no_measurement_teaches_nothing(value):
    assert learned({"flops": 1.5}, Placement(predicted=figures(flops=100.0)), figures(flops=value)) == {"flops": 1.5}
    assert learned({}, Placement(predicted=figures(flops=value)), figures(flops=100.0)) == {}
    assert learned({}, Placement(predicted={}), figures(flops=100.0)) == {}
    assert learned({}, Placement(predicted=figures(flops=100.0)), {}) == {}


def test_a_round_that_filled_a_store_is_no_usual_one():
    """100 FLOPs are usual, 300 were spent on the store: nothing is wrong with the prediction."""
    told = figures(flops=400.0, filling_flops=300.0, step_peak_bytes=900.0, energy_j=50.0)
    assert learned({}, Placement(predicted=figures(flops=100.0, step_peak_bytes=300.0, energy_j=10.0)), told) == {
        "flops": 1.0
    }


@given(st.floats(1e-9, 1e12), st.floats(1e-9, 1e12))
def test_no_measurement_moves_a_factor_beyond_its_bounds(predicted, measured):
    (factor,) = learned({}, Placement(predicted=figures(flops=predicted)), figures(flops=measured)).values()
    assert LEAST_RATIO <= factor <= MOST_RATIO
