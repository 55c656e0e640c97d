"""Joint steps: the same losses, updates and figures as one by one, and refusals of what they are not shown for."""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from training_fixture import CLIP, CONTRAST, CROSS_ENTROPY, dataset, job, model_spec, parts_of, stages_of

from benchmarks.cost.joint.__main__ import devices_of
from device_agent.trainer.joint_rounds import JointRound, carry_out
from edgefl.errors import DivergedError, EdgeFLError, StoreError
from edgefl.models.parts import loaded
from edgefl.models.reuse import Models
from edgefl.models.spec import LoraSpec
from edgefl.plan.job import PeriodRound
from edgefl.training import batches, joint_trial
from edgefl.training.flop_cache import metered
from edgefl.training.forward import Auxiliary
from edgefl.training.joint_steps import Stack, halted, stacked, take_steps
from edgefl.training.joint_trial import Answer, JointSteps, most, refusal, together, trial
from edgefl.training.local_round import LocalState, Training, begin_round, train_round
from edgefl.training.step import prepare


def made_job(**changes):
    """A job with default heads, which have dropout and batch norm."""
    spec = model_spec(changes.pop("dropout", 0.0))
    head = msgspec.structs.replace(spec.head, dropout=changes.pop("head_dropout", 0.1))
    head = msgspec.structs.replace(head, norm=changes.pop("norm", "batch"))
    spec = msgspec.structs.replace(spec, head=head)
    stage = stages_of(spec, changes.pop("schedule", "layerwise"))[-1]
    return job(spec, stage, **changes)


def training(made, seed=0, data=None, samples=12, auxiliary=None):
    torch.manual_seed(100 + seed)
    model = loaded(made.model, list(made.stage.present), parts_of(made, seed))
    prepare(model, made.stage.trained, checkpoint=made.hyper.checkpoint)
    data = dataset(samples, seed=seed) if data is None else data
    usable = batches.usable_rows(made, data)
    return Training(made, model, data, usable, auxiliary or Auxiliary(), np.random.default_rng(seed), None)


def fleet(made, samples=(12, 12, 12), **changes):
    return [training(made, seed, samples=count, **changes) for seed, count in enumerate(samples)]


def alone(trainings):
    """Each one's steps by itself."""
    for seed, one in enumerate(trainings):
        torch.manual_seed(100 + seed)
        one.run()
    return trainings


def of_all(trainings):
    """The devices at the beginning of their steps, each with random numbers of its own."""
    found = []
    for seed, one in enumerate(trainings):
        torch.manual_seed(100 + seed)
        found.append(halted(one))
    return found


def jointly(trainings):
    """Their steps together, each one's model as it has become."""
    devices = of_all(trainings)
    take_steps(devices, 8.0)
    for one in devices:
        one.resume()
    return trainings


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


def check_same(made, within, tolerance, **changes):
    """Two fleets, one by one and together: their losses, figures and every tensor of their models."""
    each, joint = within(fleet(made, **changes)), within(fleet(made, **changes))
    assert [refusal(one) for one in joint] == [""] * 3
    started = [copy.deepcopy(one.model.state_dict()) for one in joint]
    alone(each)
    jointly(joint)
    for one, other, start in zip(each, joint, started, strict=True):
        assert other.taken.error is None
        assert other.loss == pytest.approx(one.loss, abs=1e-4)
        assert len(other.loss) == other.planned
        assert (one.correct, one.labelled) == (other.correct, other.labelled)
        found = other.model.state_dict()
        for name, value in one.model.state_dict().items():
            torch.testing.assert_close(
                found[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        changed = {name for name in start if not torch.equal(start[name], found[name])}
        assert changed
        assert all(any(f".{part}." in name for part in made.stage.trained) for name in changed)
    return each


@pytest.mark.parametrize("schedule", ["layerwise", "end_to_end"])
@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adamw", 0.0)])
def test_updates_and_metrics_are_those_of_one_by_one(schedule, optimizer, momentum, precision):
    """With dropout and batch norm, whose statistics and counts are each device's own."""
    within, epochs, tolerance = precision
    if optimizer == "adamw" and tolerance > 1e-9:
        tolerance = 4e-2  # two steps of 1e-2 either way: AdamW makes whole steps of gradients that are but rounding
    made = made_job(schedule=schedule, optimizer=optimizer, momentum=momentum, epochs=epochs)
    one, *_ = check_same(made, within, tolerance)
    counts = [value for name, value in one.model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(int(value) == 2 * epochs for value in counts)


@pytest.mark.parametrize(
    "case",
    [
        {"objective": CONTRAST},
        {"missing": {"zero": {"drop": 0.4}}},
        {"norm": "layer"},
        {"samples": (30, 12, 18)},
        {"absent": "b"},
    ],
    ids=lambda case: next(iter(case)) + str(len(case.get("objective", ()))),
)
def test_what_else_default_recipes_have(case, precision):
    """Several terms of loss, modalities hidden at random, rounds of different length, a modality that nobody has."""
    within, epochs, tolerance = precision
    case = dict(case)
    changes = {"samples": case.pop("samples")} if "samples" in case else {}
    if m := case.pop("absent", ""):
        changes["data"] = dataset(12, absent={m: list(range(12))})
    made = made_job(optimizer="sgd", momentum=0.9, epochs=epochs, schedule="end_to_end", **case)
    check_same(made, within, tolerance, **changes)


@pytest.mark.parametrize("frozen", [False, True])
def test_convolutions_and_pooling_are_those_of_one_by_one(frozen):
    """LeNet-5; frozen, one for all devices."""
    one, other = [], []
    for devices in (one, other):
        devices += devices_of("lenet", "sgd", 10)[:3]
        for number, device in enumerate(devices):
            device.rng = np.random.default_rng(number)
            if frozen:
                trained = tuple(part for part in device.job.stage.present if not part.startswith("x/"))
                stage = msgspec.structs.replace(device.job.stage, trained=trained)
                device.job = msgspec.structs.replace(device.job, stage=stage)
                device.model.load_state_dict(devices[0].model.state_dict())
                prepare(device.model, trained)
    alone(one)
    jointly(other)
    for mine, its in zip(one, other, strict=True):
        assert its.loss == pytest.approx(mine.loss, abs=1e-5)
        for name, value in mine.model.state_dict().items():
            torch.testing.assert_close(its.model.state_dict()[name], value, atol=1e-5, rtol=1e-5)


def test_a_loss_without_labels():
    check_same(made_job(objective=CLIP, optimizer="sgd", lr={"encoder": 1e-3, "head": 1e-3}), lambda d: d, 1e-5)


def test_rounds_that_take_their_steps_together_give_what_each_gives(tmp_path, monkeypatch):
    """Whole rounds through one model: stored prefixes, hold-outs, bills. One of four lacks a sensor in some samples."""
    monkeypatch.setattr(joint_trial, "LEAST_GAIN", 0.0)
    made = made_job(optimizer="sgd", epochs=2, cache="f32", head_dropout=0.2)
    shares = [dataset(24, seed=seed, absent={"b": [3]} if seed == 2 else None) for seed in range(4)]
    parts, holdout = parts_of(made), dataset(9, seed=9)
    told = []

    def state(models=None):
        return LocalState(holdout, models=models)

    expected = [train_round(made, data, parts, state(), salt=str(n)) for n, data in enumerate(shares)]
    models, notes = Models(), []

    def halting(n, data):
        """What is sent is shown where it lies, in the modules of all."""
        given = {"salt": str(n), "on_progress": lambda *told: notes.append(told)}
        result = yield from begin_round(made, data, parts, state(models), **given)
        return replace(result, parts=copy.deepcopy(result.parts))

    rounds = [JointRound(halting(n, data)) for n, data in enumerate(shares)]
    carry_out(rounds, JointSteps(tmp_path / "answers", told.append))
    assert told[0] == "stage 3: steps are taken one by one: samples without a modality"
    assert told[1].startswith("stage 3: steps of 3 devices are taken together")
    assert len(notes) == 32
    for one, other in zip(expected, (one.result() for one in rounds), strict=True):
        assert other.flops == one.flops > other.cache_fill_flops == one.cache_fill_flops > 0
        assert other.samples == one.samples
        assert other.metrics == pytest.approx(one.metrics, abs=1e-4)
        assert other.compute_s > 0
        for part, tensors in one.parts.items():
            for name, value in tensors.items():
                np.testing.assert_allclose(other.parts[part][name], value, atol=1e-4, err_msg=f"{part} {name}")


def test_a_trial_agrees_and_changes_nothing():
    devices = of_all(fleet(made_job()))
    before = [copy.deepcopy(one.values) for one in devices]
    random = torch.get_rng_state()
    turns = [(9.0, 9.0), (7.0, 2.0), (6.0, 3.0), (8.0, 2.5)]  # seconds one by one, and together
    times = iter([now for alone_s, joint_s in turns for now in (0.0, alone_s, 0.0, joint_s)])
    assert trial(devices, lambda: next(times)) == Answer(3, 3.0)
    assert torch.equal(torch.get_rng_state(), random)
    for one, values in zip(devices, before, strict=True):
        assert all(map(torch.equal, one.values, values))
        assert one.training.loss == []


def test_frozen_parts_are_there_once_and_not_gone_back_through():
    made = made_job(schedule="layerwise")
    same = [training(made, 0) for _ in range(3)]
    devices = of_all(same)
    stack = Stack(devices)
    stack.backward(stacked([next(joint_trial.batches_of(one, np.random.default_rng())) for one in same]))
    of_parts = {name.split(".")[2] for name in stack.values}
    assert of_parts == set(made.stage.trained)
    assert all(value.grad is not None for value in stack.values.values())
    assert set(made.stage.present) > of_parts


def test_a_device_that_diverges_or_is_left_off_stops_alone():
    made = made_job(epochs=2, norm="layer", head_dropout=0.0)
    others = jointly(fleet(made))
    devices = fleet(made)
    with torch.no_grad():
        next(devices[0].model.part("task").parameters()).fill_(float("nan"))

    def leave(epoch, step, planned, loss):
        assert (epoch, planned) == (1, 4)
        raise EdgeFLError("closed")

    devices[1].on_progress = leave
    first, second, third = jointly(devices)
    assert isinstance(first.taken.error, DivergedError)
    assert str(second.taken.error).startswith("closed")
    assert third.taken.error is None
    assert [len(one.loss) for one in devices] == [0, 1, 4]
    assert third.loss == pytest.approx(others[2].loss, abs=1e-5)
    with metered() as bill, pytest.raises(EdgeFLError, match="closed"):
        second.run()
    assert bill.flops == 8.0  # of its one step


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Answer(3, 2.26), "stage 3: steps of 3 devices are taken together, × 2.3 faster here"),
        (Answer(3, 1.1, "slow"), "stage 3: steps are taken one by one: slow"),
    ],
)
def test_the_answer_of_a_trial_is_kept_and_told(tmp_path, monkeypatch, answer, told):
    calls, said = [], []
    monkeypatch.setattr(joint_trial, "trial", lambda devices: calls.append(devices) or answer)
    for _ in range(2):  # the second time as a run that goes on
        joint = JointSteps(tmp_path / "answers.json", said.append)
        for _ in range(2):
            assert joint.agreed(of_all(fleet(made_job()))) == (answer.why == "")
    assert len(calls) == 1
    assert said == [told] * 2
    assert not joint.agreed(of_all(fleet(made_job())[:1]))


def test_answers_that_cannot_be_read_name_the_file(tmp_path):
    (tmp_path / "answers.json").write_text("[")
    with pytest.raises(StoreError, match=r"answers\.json"):
        JointSteps(tmp_path / "answers.json", print)


def test_groups_are_even_and_their_memory_is_bounded(monkeypatch):
    (device,) = of_all(fleet(made_job())[:1])
    assert most(device, 20) == 20
    monkeypatch.setattr(joint_trial, "MOST_ROWS", 6 * 16)
    assert most(device, 20) == 10
    monkeypatch.setattr(joint_trial, "MOST_BYTES", 1)
    assert most(device, 20) == 1


def test_only_devices_of_one_kind_go_together():
    made = made_job()
    one, same, longer = fleet(made, (12, 12, 18))
    assert together(one) == together(same) == together(longer)
    signed = msgspec.structs.replace(made, signature="sketch")
    assert together(training(signed)) == together(one)
    assert together(training(made_job(optimizer="sgd"))) != together(one)
    assert together(training(made, data=dataset(12, absent={"b": list(range(12))}))) != together(one)


LORA = LoraSpec(parts=("a/stage1",))
REFUSED = {
    "adafactor": (lambda: training(made_job(optimizer="adafactor")), "adafactor"),
    "apollo": (lambda: training(made_job(optimizer="apollo")), "apollo"),
    "one": (lambda: training(made_job(batch_size=1)), "one sample"),
    "micro-batches": (lambda: training(made_job(micro_batch=2)), "micro-batches"),
    "checkpointing": (lambda: training(made_job(checkpoint=True)), "checkpointing"),
    "clip": (lambda: training(made_job(clip_norm=1.0)), "norm of gradients"),
    "precision": (lambda: training(made_job(precision="bf16")), "mixed precision"),
    "disk": (lambda: training(made_job(weights="disk")), "on disk"),
    "proximal": (lambda: training(made_job(objective=CROSS_ENTROPY | {"proximal": {}})), "state of its own"),
    "period": (lambda: changed(lambda made: {"period": PeriodRound()}), "period"),
    "lora": (lambda: changed(lambda made: {"model": msgspec.structs.replace(made.model, lora=LORA)}), "low-rank"),
    "multiway": (lambda: of_model(encoder_sharing="multiway"), "shared attention"),
    "joint": (lambda: of_model(fusion="joint"), "fusion of tokens"),
    "label sets": (lambda: of_model(label_names=("@s:x", "@s:y", "@t:z")), "several label sets"),
    "library": (lambda: of_model(config="{}"), "transformers library"),
    "recurrent": (lambda: with_module(nn.GRU(2, 2)), "recurrent layer"),
    "processor": (lambda: on_device("meta"), "another processor"),
    "observer": (lambda: one_with(observer=object()), "observer"),
    "initial": (lambda: one_with(auxiliary=Auxiliary(initial={"a": object()})), "beside the model"),
    "private": (lambda: one_with(auxiliary=Auxiliary(private_heads={"a": object()})), "beside the model"),
    "absent": (lambda: one_with(dataset=dataset(absent={"a": [3]})), "without a modality"),
    "unlabelled": (lambda: one_with(dataset=dataset(labels=[-1] + [0] * 11)), "without a label"),
    "targets": (lambda: one_with(dataset=replace(dataset(), targets=np.zeros(12, np.float32))), "numbers or sets"),
}


def changed(change):
    """A device of another job, whose model is that of the plain one."""
    made = made_job()
    return replace(training(made), job=msgspec.structs.replace(made, **change(made)))


def of_model(config="", **changes):
    """A device whose job has another model."""

    def change(made):
        encoders = {m: msgspec.structs.replace(e, config=config) for m, e in made.model.encoders.items()}
        return {"model": msgspec.structs.replace(made.model, encoders=encoders, **changes)}

    return changed(change)


def with_module(module):
    """A device whose model has this layer as well."""
    one = training(made_job())
    one.model.add_module("extra", module)
    return one


def on_device(device):
    """A device that computes elsewhere."""
    one = training(made_job())
    one.model.to(device)
    return one


def one_with(**changes):
    """A device that differs."""
    return replace(training(made_job()), **changes)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_shown_is_refused(case):
    make, reason = REFUSED[case]
    assert reason in refusal(make())


@pytest.mark.parametrize(
    ("case", "why"),
    [({"dropout": 0.1}, "random"), ({"missing": {"random": {}}}, "random")],
    ids=["attention", "noise"],
)
def test_random_numbers_that_would_be_others_end_a_trial(case, why):
    """Dropout inside of attention, and noise for a modality that nobody has."""
    data = dataset(12, absent={"b": list(range(12))})
    answer = trial(of_all(fleet(made_job(**case), data=data)))
    assert answer.why.startswith("torch cannot stack the weights")
    assert why in answer.why


def test_gradients_that_differ_do_not_agree(monkeypatch):
    devices = of_all(fleet(made_job()))

    def shifted(every):
        found = stacked(every)
        return found._replace(inputs={m: x + 0.1 for m, x in found.inputs.items()})

    monkeypatch.setattr(joint_trial, "stacked", shifted)
    assert trial(devices).why.startswith("the gradients differ by")
