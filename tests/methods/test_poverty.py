"""The poverty layer: changes of a step by hand and from the optimiser, and which layer they name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from training_fixture import job

from edgefl.errors import ModelError
from edgefl.methods.mmic.poverty import observe, unreadable
from edgefl.methods.mmic.poverty_layer import (
    PovertyObserver,
    adam_change,
    exact_changes,
    optimizer_changes,
    poverty_layers,
    relative_change,
    sgd_change,
    weight_tensors,
)
from edgefl.models.spec import LAYERS
from edgefl.models.staged import build
from edgefl.plan.job import PeriodRound
from edgefl.registry import Observed
from edgefl.training.optimizers import EPS, SGD, AdamW, Group

torch.set_num_threads(1)
ORACLES = {
    case["id"]: case for case in json.loads((Path(__file__).parents[1] / "oracles/oracles.json").read_text())["cases"]
}


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def oracle(case: str):
    found = ORACLES[case]["inputs"]
    return {k: tensor(v) if isinstance(v, list) else v for k, v in found.items()}, tensor(ORACLES[case]["expect"])


def near(value: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(value, expected, atol=1e-9, rtol=0)


def test_relative_change_by_hand():
    """(.1/1 + .2/2 + 0/.5) / 3."""
    inputs, expected = oracle("poverty-1")
    near(relative_change(inputs["before"], inputs["after"]), expected)


def test_the_sgd_form_by_hand():
    inputs, expected = oracle("poverty-2")
    near(sgd_change(inputs["before"], inputs["gradient"], inputs["lr"]), expected)


def test_the_adam_form_by_hand():
    inputs, expected = oracle("poverty-3")
    near(adam_change(inputs["theta"], inputs["m_hat"], inputs["v_hat"], inputs["lr"], EPS), expected)
    # A large eps: .005 x .2 / (.5 (.1 + .1))
    assert adam_change(tensor(0.5), tensor(-0.2), tensor(0.01), 0.005, eps=0.1).item() == pytest.approx(0.01)


def test_a_weight_of_zero_counts_as_a_hundred_millionth():
    zero, step = tensor([0.0, -1e-9]), tensor([2e-8, 2e-8])
    near(relative_change(zero, zero + step), tensor(2.0))
    near(sgd_change(zero, step, 1.0), tensor([2.0, 2.0]))
    near(adam_change(zero, step, tensor([1.0, 1.0]), 1.0, eps=0.0), tensor([2.0, 2.0]))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 100))
def test_the_change_of_a_layer_does_not_depend_on_its_scale(seed, scale):
    before, after = (torch.randn(3, 2, generator=torch.Generator().manual_seed(seed + i)).double() for i in (0, 1))
    torch.testing.assert_close(relative_change(before * scale, after * scale), relative_change(before, after))
    near(relative_change(before, before), tensor(0.0))


# ---- from the optimiser


def three(seed: int) -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(seed)
    shapes = {"w": (3, 4), "bias": (3,), "idle": (2, 2)}
    return {name: torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}


def steps(optimizer, parameters, count: int) -> dict[str, torch.Tensor]:
    """Makes steps; ``idle`` never has a gradient. Returns copies from before the last one."""
    for _ in range(count):
        before = {name: p.detach().clone() for name, p in parameters.items()}
        for name in ("w", "bias"):
            parameters[name].grad = torch.randn_like(parameters[name])
        optimizer.step()
    return before


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_from_sgd_it_is_the_change_that_copies_show(momentum, decay):
    parameters = three(1)
    optimizer = SGD((Group(tuple(parameters.values()), 0.05, decay),), momentum)
    before = steps(optimizer, parameters, 3)
    found = optimizer_changes(optimizer, {p: name for name, p in parameters.items()})
    assert set(found) == {"w"}  # a bias is no layer, and idle was not changed
    assert found["w"] == pytest.approx(exact_changes(before, parameters)["w"], rel=1e-9)


def test_from_adamw_it_is_the_change_that_copies_show_but_for_the_decay():
    parameters = three(2)
    optimizer = AdamW((Group(tuple(parameters.values()), 0.05),))
    before = steps(optimizer, parameters, 3)
    found = optimizer_changes(optimizer, {p: name for name, p in parameters.items()})
    assert found == {"w": pytest.approx(exact_changes(before, parameters)["w"], rel=1e-9)}


def test_from_adamw_decay_is_no_part_of_the_change():
    parameters = three(3)
    optimizer = AdamW((Group((parameters["idle"],), 1.0), Group((parameters["w"], parameters["bias"]), 0.05, 0.1)))
    before = steps(optimizer, parameters, 3)
    moved = parameters["w"].detach() - before["w"] * (1 - 0.05 * 0.1)
    expected = (moved / before["w"]).abs().mean().item()
    assert optimizer_changes(optimizer, {parameters["w"]: "w"}) == {"w": pytest.approx(expected, rel=1e-9)}
    assert optimizer_changes(optimizer, {parameters["bias"]: "bias"}) == {}


def test_from_an_optimiser_it_does_not_know():
    class Other:
        groups = (Group((torch.nn.Parameter(torch.ones(1, 1)),), 0.1),)

        def step(self) -> None: ...

    parameter = Other.groups[0].parameters[0]
    assert optimizer_changes(Other(), {parameter: "w"}) == {}
    parameter.grad = torch.ones(1, 1)
    with pytest.raises(ModelError, match="optimiser Other"):
        optimizer_changes(Other(), {parameter: "w"})


def test_exact_changes_are_of_weights():
    before = {"w": tensor([[1, -2]]), "bias": tensor([1])}
    after = {"w": tensor([[1.5, -2]]), "bias": tensor([9]), "not watched": tensor([[1]])}
    assert exact_changes(before, after) == {"w": 0.25}


# ---- the meter


def test_the_poverty_layer_by_hand():
    """Epoch 1: transitions .2, .4 of x (mean .3) and .5, .1 of y (mean .3); epoch 2: x .1, y .31."""
    meter = PovertyObserver({})
    for complete, x, y in [(True, 9, 0), (False, 0.2, 0.5), (False, 9, 0), (True, 9, 0), (False, 0.4, 0.1)]:
        meter.batch(complete, {"x": x, "y": y})
    assert meter.poorest() is None  # the epoch is not closed
    meter.epoch()
    assert meter.poorest() == "x"  # equal: the first by name
    meter.batch(True, {})
    meter.batch(False, {"y": 0.31, "x": 0.1})
    meter.epoch()
    assert meter.poorest() == "y"
    meter.epoch()
    assert meter.poorest() == "y"


def test_a_transition_is_from_a_complete_batch_to_the_next_within_an_epoch():
    meter = PovertyObserver({})
    assert not meter.due(complete=False)
    meter.batch(False, {"x": 1.0})
    meter.batch(True, {"x": 1.0})
    assert meter.due(complete=False)
    assert not meter.due(complete=True)
    meter.epoch()
    assert not meter.due(complete=False)
    meter.batch(False, {"x": 1.0})
    meter.epoch()
    assert meter.poorest() is None


def test_data_are_complete_by_the_batches_of_the_round():
    """Complete batches, and none that lacks modalities after one; incomplete batches alone make no donor."""
    cases = {(): False, (True, True): True, (False, True): True, (True, False): False, (False, False): False}
    for batches, complete in cases.items():
        meter = PovertyObserver({})
        for one in batches:
            meter.batch(one, {"x": 0.25})
        meter.epoch()
        assert meter.complete is complete
        assert meter.change == (0.25 if batches == (True, False) else 0.0)


def test_a_change_is_divided_by_all_transitions_of_the_epoch():
    """Equation 9: two transitions, a .4 and then no gradient, b .3 and .3: a (.4 + 0)/2 = .2, b .3."""
    meter = PovertyObserver({})
    for changes in ({"a": 0.4, "b": 0.3}, {"b": 0.3}):
        meter.batch(True, {})
        meter.batch(False, changes)
    meter.epoch()
    assert (meter.poorest(), meter.change) == ("b", pytest.approx(0.3))
    # each epoch by its own transitions: one of a alone, .35
    meter.batch(True, {})
    meter.batch(False, {"a": 0.35})
    meter.epoch()
    assert (meter.poorest(), meter.change) == ("a", pytest.approx(0.35))


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_copies_and_the_optimiser_agree_on_a_layer_without_a_gradient(kind):
    """``idle`` is trained in the first transition only: by copies it changes by 0 in the second."""
    parameters, meters = three(4), {"exact": PovertyObserver({}), "optimiser": PovertyObserver({})}
    optimizer = kind((Group(tuple(parameters.values()), 0.05),))
    names = {p: name for name, p in parameters.items()}
    for trained in (("w", "bias", "idle"), ("w", "bias")):
        before = {name: p.detach().clone() for name, p in parameters.items()}
        for name, p in parameters.items():
            p.grad = torch.full_like(p, 0.1 if name != "idle" else 0.3) if name in trained else None
        optimizer.step()
        for form, changes in (
            ("exact", exact_changes(before, parameters)),
            ("optimiser", optimizer_changes(optimizer, names)),
        ):
            meters[form].batch(True, {})
            meters[form].batch(False, changes)
    for meter in meters.values():
        meter.epoch()
    assert meters["optimiser"].poorest() == meters["exact"].poorest()
    assert meters["optimiser"].change == pytest.approx(meters["exact"].change, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.floats(0, 1)), max_size=8), min_size=1, max_size=3)
)
def test_the_meter_is_the_argmax_of_the_max_of_means(epochs):
    meter, means = PovertyObserver({}), []
    for batches in epochs:
        for complete, *changes in batches:
            meter.batch(complete, dict(zip("xy", changes, strict=True)))
        meter.epoch()
        own = [two[1:] for one, two in itertools.pairwise(batches) if one[0] and not two[0]]
        means += [np.sum(own, axis=0) / len(own)] if own else []
    assert meter.poorest() == ("xy"[int(np.argmax(np.max(means, axis=0)))] if means else None)


@pytest.mark.parametrize("change", [float("nan"), float("inf")])
def test_a_step_that_diverged_is_named_with_its_layer(change):
    meter = PovertyObserver({})
    meter.batch(True, {"x": change})
    with pytest.raises(ModelError, match="'x' changed by"):
        meter.batch(False, {"x": change})


def test_the_layer_s_number_is_counted_as_the_server_counts_it():
    """By part, then by tensor: "head/acc" comes before "head/acc2", whatever stands between part and tensor."""
    observer = PovertyObserver({})
    observer.batch(True, {})
    observer.batch(False, {"head/acc|weight": 0.4, "head/acc2|weight": 0.3})
    observer.epoch()
    parts = {"head/acc2": {"weight": np.ones((2, 2))}, "head/acc": {"weight": np.ones((2, 2)), "bias": np.ones(2)}}
    server = weight_tensors(parts)
    assert server[observer.observed(parts).poverty] == ("head/acc", "weight")
    assert observer.observed(parts) == Observed(complete=False, poverty=0, poverty_change=0.4)


def test_a_layer_that_travels_alone_is_told_by_its_name():
    observer = PovertyObserver({}, named=True)
    assert observer.observed({}) == Observed(complete=False)
    observer.batch(True, {})
    observer.batch(False, {"head/acc|weight": 0.4})
    observer.epoch()
    alone = {LAYERS: {"head/acc|weight": np.ones((2, 2))}}
    assert observer.observed(alone) == Observed(complete=False, poverty_change=0.4, layer="head/acc|weight")


def test_copies_are_held_for_the_exact_form_alone():
    made = job()
    model = build(made.model, made.stage.present)
    weights = poverty_layers(made, model)
    assert {name.partition("|")[0] for name in weights.values()} == {
        "a/stage3",
        "b/stage3",
        "head/a",
        "head/b",
        "fusion",
        "task",
    }
    assert [id(one) for one in observe(made, model, form="exact").copied] == [id(one) for one in weights]
    assert observe(made, model, form="optimiser").copied == []


def test_in_a_period_a_device_names_layers_of_the_size_that_its_stage_admits():
    """A twentieth of the stage, which a device of one modality does not know: its offer names the largest layer."""
    made = job()
    model = build(made.model, made.stage.present)

    def named(largest: str) -> set[str]:
        return {*poverty_layers(replace(made, period=PeriodRound(largest=largest)), model).values()}

    every = {*poverty_layers(made, model).values()}
    above = {f"{m}/stage3|blocks.0.mlp.{layer}.weight" for m in "ab" for layer in (0, 2)}
    assert named("b/stage3|blocks.0.qkv.weight") == every - above, "of 192 values, and these have 256"
    assert named("a/stage3|blocks.0.mlp.0.weight") == every
    assert named("") == set()


def test_a_layer_cannot_be_read_from_an_optimiser_that_keeps_no_moments():
    text = "adafactor does not keep what repair: poverty reads; use adamw or sgd, or poverty: {form: exact}"
    assert [unreadable(name, form="optimiser") for name in ("adamw", "sgd", "adafactor")] == ["", "", text]
    assert unreadable("adafactor", form="exact") == ""
