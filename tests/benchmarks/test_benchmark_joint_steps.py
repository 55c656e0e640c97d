"""Stacked steps of several devices give each device's own gradients."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from benchmarks.cost import joint_steps


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # what the figure of this kind of attention shows
@pytest.mark.parametrize("attention", [joint_steps.plain, nullcontext])
def test_stacked_steps_have_the_same_gradients(attention):
    assert 0 < joint_steps.difference(2, 4, attention) < joint_steps.ROUNDING


def test_other_gradients_are_noticed(monkeypatch):
    monkeypatch.setattr(joint_steps, "ROUNDING", -1.0)
    with pytest.raises(SystemExit, match="the gradients differ"):
        joint_steps.row(2, 4, 1)


def test_models_of_devices_differ():
    one, other = joint_steps.fleet_of(2, 4).models
    assert not one.part("task").weight.equal(other.part("task").weight)
