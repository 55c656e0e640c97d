"""Joint steps: the same losses, updates and figures as one by one, and refusals of what they are not shown for."""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from training_fixture import CONTRAST, CROSS_ENTROPY, dataset, job, model_spec, parts_of, stages_of

from benchmarks.cost.joint import steps as joint_steps
from benchmarks.cost.joint.refusals import refused
from benchmarks.cost.joint.steps import Trial, run_together, steps_together, trial
from edgefl.errors import DivergedError, EdgeFLError
from edgefl.models.parts import loaded
from edgefl.models.spec import LoraSpec
from edgefl.plan.job import PeriodRound
from edgefl.training import batches
from edgefl.training.flop_cache import FlopCounts, metered
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import _Training
from edgefl.training.step import prepare

#: A prototype that no program calls (docs/decisions/0105).
pytestmark = pytest.mark.slow

QUIET = [lambda *_: None] * 3


def plain(**changes):
    """A job whose steps may be taken together: without dropout and batch norm."""
    dropout = changes.pop("dropout", 0.0)
    spec = model_spec(dropout)
    spec = msgspec.structs.replace(spec, head=msgspec.structs.replace(spec.head, norm="layer", dropout=dropout))
    stage = stages_of(spec, changes.pop("schedule", "layerwise"))[-1]
    return job(spec, stage, **changes)


def training(made, seed=0, data=None, samples=12):
    model = loaded(made.model, list(made.stage.present), parts_of(made, seed))
    prepare(model, made.stage.trained, checkpoint=made.hyper.checkpoint)
    data = dataset(samples, seed=seed) if data is None else data
    return _Training(made, model, data, np.arange(len(data)), Auxiliary(), np.random.default_rng(seed), None)


def fleet(made, **changes):
    return [training(made, seed, **changes) for seed in range(3)]


@pytest.fixture(params=["f64", "f32"])
def precision(request, monkeypatch):
    """Steps in f64, where rounding does not grow, and in f32: (what models become, passes over the data, tolerance)."""
    if request.param == "f32":
        return lambda devices: devices, 1, 1e-5
    plain_input = batches.input_of
    monkeypatch.setattr(batches, "input_of", lambda *given: plain_input(*given).double())

    def doubled(devices):
        for one in devices:
            one.model.double()
        return devices

    return doubled, 3, 1e-9


@pytest.mark.parametrize("schedule", ["layerwise", "end_to_end"])
@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adamw", 0.0)])
def test_updates_and_metrics_are_those_of_one_by_one(schedule, optimizer, momentum, precision):
    within, epochs, tolerance = precision
    if optimizer == "adamw" and tolerance > 1e-9:
        tolerance = 2e-2  # two steps of 1e-2: AdamW makes whole steps of gradients that are nothing but rounding
    made = plain(schedule=schedule, optimizer=optimizer, momentum=momentum, epochs=epochs)
    alone, joint = within(fleet(made)), within(fleet(made))
    assert refused(joint) == ""
    started = [copy.deepcopy(one.model.state_dict()) for one in joint]
    for one in alone:
        one.run(lambda *_: None)
    assert steps_together(joint, QUIET) == [None, None, None]
    for one, other, start in zip(alone, joint, started, strict=True):
        assert one.metrics() == pytest.approx(other.metrics(), abs=1e-4)
        assert one.metrics()["steps"] == 2 * epochs
        assert (one.correct, one.labelled) == (other.correct, other.labelled)
        found = other.model.state_dict()
        for name, value in one.model.state_dict().items():
            torch.testing.assert_close(
                found[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        changed = {name for name in start if not torch.equal(start[name], found[name])}
        assert changed
        assert all(any(f".{part}." in name for part in made.stage.trained) for name in changed)


def test_a_trial_agrees_counts_a_step_as_one_by_one_and_changes_nothing():
    made = plain()
    devices = fleet(made)
    one = devices[0]
    before = copy.deepcopy(one.model.state_dict())
    counts = FlopCounts()
    times = iter([0.0, 6.0, 6.0, 8.0])
    found = trial(devices, counts, lambda: next(times))
    assert found is not None
    assert found.agrees
    assert found.gain == 3.0  # 6 s one by one, 2 s together
    assert all(torch.equal(value, before[name]) for name, value in one.model.state_dict().items())
    with metered() as bill:
        training(made).run(lambda *_: None)
    assert bill.flops == 2 * found.flops  # twelve samples in batches of six
    frozen = joint_steps.Stack([one.model for one in devices], made)
    frozen.backward(*joint_steps.stacked([next(joint_steps._batches(one, np.random.default_rng())) for one in devices]))
    with_gradient = {name.split(".")[2] for name, value in frozen.values.items() if value.grad is not None}
    assert with_gradient == set(made.stage.trained)  # frozen parts are not gone back through
    assert not Trial(1.0, 1e-3, 0.0).agrees


def test_a_device_that_diverges_or_is_left_off_stops_alone():
    made = plain(epochs=2)
    devices = fleet(made)
    with torch.no_grad():
        next(devices[0].model.part("task").parameters()).fill_(float("nan"))

    def leave(epoch, step, planned, loss):
        assert (epoch, planned) == (1, 4)
        raise EdgeFLError("closed")

    first, second, third = steps_together(devices, [QUIET[0], leave, QUIET[0]])
    assert isinstance(first, DivergedError)
    assert str(second).startswith("closed")
    assert third is None
    assert [len(one.loss) for one in devices] == [0, 1, 4]


@pytest.mark.parametrize(
    "tried",
    [None, Trial(1.1, 0.0, 8.0), Trial(3.0, 1e-3, 8.0), Trial(3.0, 0.0, 8.0)],
    ids=["rule", "gain", "gradients", "fits"],
)
def test_devices_go_together_where_a_trial_agrees_and_pays(monkeypatch, tried):
    calls = []
    monkeypatch.setattr(joint_steps, "trial", lambda *given: calls.append(given) or tried)
    trials = {}
    for _ in range(2):
        devices = fleet(plain())
        found = run_together(devices, QUIET, FlopCounts(), trials)
        if tried == Trial(3.0, 0.0, 8.0):
            assert found is not None
            assert (found.errors, found.flops) == ([None] * 3, [16.0] * 3)  # two steps each
        else:
            assert found is None
            assert [one.loss for one in devices] == [[], [], []]
            assert devices[1].rng.bit_generator.state == np.random.default_rng(1).bit_generator.state
    assert len(calls) == 1


def test_refused_devices_are_not_tried():
    trials = {}
    assert run_together(fleet(plain(clip_norm=1.0)), QUIET, FlopCounts(), trials) is None
    assert trials == {}


def test_flops_of_a_round_are_those_of_one_by_one(monkeypatch):
    monkeypatch.setattr(joint_steps, "LEAST_GAIN", 0.0)
    made = plain(epochs=2)
    found = run_together(fleet(made), QUIET, FlopCounts(), {})
    for place, one in enumerate(fleet(made)):
        with metered() as bill:
            one.run(lambda *_: None)
        assert found.flops[place] == bill.flops > 0


LORA = LoraSpec(parts=("a/stage1",))
REFUSED = {
    "one device": (lambda: fleet(plain())[:1], "one device alone"),
    "jobs": (lambda: [training(plain()), training(plain(optimizer="sgd"))], "different jobs"),
    "batches": (lambda: [training(plain()), training(plain(), samples=18)], "different numbers"),
    "batch norm": (lambda: fleet(job(model_spec())), "batch norm"),
    "dropout": (lambda: fleet(plain(dropout=0.1)), "dropout"),
    "adafactor": (lambda: fleet(plain(optimizer="adafactor")), "adafactor"),
    "apollo": (lambda: fleet(plain(optimizer="apollo")), "apollo"),
    "micro-batches": (lambda: fleet(plain(micro_batch=2)), "micro-batches"),
    "checkpointing": (lambda: fleet(plain(checkpoint=True)), "checkpointing"),
    "clip": (lambda: fleet(plain(clip_norm=1.0)), "norm of gradients"),
    "precision": (lambda: fleet(plain(precision="bf16")), "mixed precision"),
    "disk": (lambda: fleet(plain(weights="disk")), "on disk"),
    "pairs": (lambda: fleet(plain(objective=CONTRAST)), "a loss of several terms"),
    "proximal": (lambda: fleet(plain(objective=CROSS_ENTROPY | {"proximal": {}})), "a loss of several terms"),
    "drop": (lambda: fleet(plain(missing={"zero": {"drop": 0.4}})), "hidden at random"),
    "prototypes": (lambda: fleet(plain(prototypes={"adaptive": {}})), "prototypes"),
    "period": (lambda: changed(lambda made: {"period": PeriodRound()}), "period"),
    "lora": (lambda: changed(lambda made: {"model": msgspec.structs.replace(made.model, lora=LORA)}), "low-rank"),
    "multiway": (lambda: of_model(encoder_sharing="multiway"), "shared attention"),
    "joint": (lambda: of_model(fusion="joint"), "fusion of tokens"),
    "label sets": (lambda: of_model(label_names=("@s:x", "@s:y", "@t:z")), "several label sets"),
    "library": (lambda: of_model(config="{}"), "transformers library"),
    "recurrent": (lambda: with_module(nn.GRU(2, 2)), "recurrent layer"),
    "own dropout": (lambda: with_module(nn.Dropout(0.1)), "dropout"),
    "processor": (lambda: on_device("meta"), "another processor"),
    "observer": (lambda: one_with(observer=object()), "observer"),
    "tables": (lambda: one_with(auxiliary=Auxiliary(tables={"a": object()})), "beside the model"),
    "private": (lambda: one_with(auxiliary=Auxiliary(private_heads={"a": object()})), "beside the model"),
    "absent": (lambda: one_with(dataset=dataset(absent={"a": [3]})), "without a modality"),
    "unlabelled": (lambda: one_with(dataset=dataset(labels=[-1] + [0] * 11)), "without a label"),
    "targets": (lambda: one_with(dataset=replace(dataset(), targets=np.zeros(12, np.float32))), "numbers or sets"),
    "stored": (lambda: one_with(dataset=replace(dataset(), encoded={"a": object()})), "stored outcome"),
}


def changed(change):
    """Devices of another job, whose models are those of the plain one."""
    made = plain()
    devices = fleet(made)
    other = msgspec.structs.replace(made, **change(made))
    return [replace(one, job=other) for one in devices]


def of_model(config="", **changes):
    """Devices whose job has another model."""

    def change(made):
        encoders = {m: msgspec.structs.replace(e, config=config) for m, e in made.model.encoders.items()}
        return {"model": msgspec.structs.replace(made.model, encoders=encoders, **changes)}

    return changed(change)


def with_module(module):
    """Devices of which the last one's model has this layer as well."""
    devices = fleet(plain())
    devices[-1].model.add_module("extra", module)
    return devices


def on_device(device):
    """Devices of which the last one computes elsewhere."""
    devices = fleet(plain())
    devices[-1].model.to(device)
    return devices


def one_with(**changes):
    """Devices of which the last one differs."""
    *others, last = fleet(plain())
    return [*others, replace(last, **changes)]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_shown_is_refused(case):
    make, reason = REFUSED[case]
    assert reason in refused(make())


def test_hidden_randomness_has_no_rule_and_ends_a_trial(monkeypatch):
    made = plain()
    devices = fleet(made)
    monkeypatch.setattr(
        type(devices[0].model), "classify", lambda self, f: self.part("task")(torch.dropout(f, 0.5, True))
    )
    assert refused(devices) == ""
    assert trial(devices, FlopCounts()) is None


def test_gradients_that_differ_do_not_agree(monkeypatch):
    devices = fleet(plain())
    stacked = joint_steps.stacked

    def shifted(every):
        inputs, labels = stacked(every)
        return {m: x + 0.1 for m, x in inputs.items()}, labels

    monkeypatch.setattr(joint_steps, "stacked", shifted)
    found = trial(devices, FlopCounts())
    assert found is not None
    assert not found.agrees
