"""Activation checkpointing, matrices in bf16, parts handed over where they lie: less memory for the same training."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from training_fixture import dataset, job, model_spec, parts_of, random_batch, stages_of, with_hyper

from edgefl.models import encoder
from edgefl.models.check import encoder_of_size
from edgefl.models.parts import part_tensors
from edgefl.models.spec import HeadSpec, JointSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.plan.job import Hyper, Job, Slots
from edgefl.pricing.round_price import Pricer, price_step
from edgefl.registry import method
from edgefl.resources.tensor_counters import FlopCounter, LiveBytes
from edgefl.training import embeddings
from edgefl.training.batches import Batch
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import LocalState, train_round
from edgefl.training.step import computing_in, make_optimizer, prepare, train_step

CLIP = Slots({"clip": {"weight": 1.0, "temperature": 0.05}}, {"ignore": {}})


def trained(made: Job, steps: int = 3) -> dict[str, np.ndarray]:
    model = build(made.model, made.stage.present, seed=1)
    prepare(model, made.stage.trained, checkpoint=made.hyper.checkpoint)
    optimizer = make_optimizer(model, made.stage.trained, made.hyper)
    torch.manual_seed(5)
    for i in range(steps):
        train_step(model, made, random_batch({"b": [0, 2, 3]}, seed=i), optimizer, Auxiliary())
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("micro", [0, 2])
@pytest.mark.parametrize("sharing", ["own", "multiway", "joint"])
@pytest.mark.parametrize("schedule", ["end_to_end", "layerwise"])
def test_checkpointed_blocks_train_the_same(schedule, sharing, micro, monkeypatch):
    plain = model_spec(dropout=0.1)
    joint = {"fusion": "joint", "joint": JointSpec(8, 2, 1, shared=True)}
    changes = {"own": {}, "multiway": {"encoder_sharing": "multiway"}, "joint": joint}[sharing]
    spec = ModelSpec(plain.encoders, 3, plain.head, 10, 3, plain.label_names, **changes)
    monkeypatch.setattr("edgefl.training.optimizers.TOGETHER_BYTES", 0)  # updates inside backward
    made = job(spec, stages_of(spec, schedule)[-1], micro_batch=micro)
    kept = trained(made)
    again = []
    original = encoder._Checkpoint.backward

    def backward(ctx, *given):
        again.append(ctx)
        return original(ctx, *given)

    monkeypatch.setattr(encoder._Checkpoint, "backward", staticmethod(backward))
    assert (trained(made), again)[1] == []
    for name, value in trained(with_hyper(made, checkpoint=True)).items():
        np.testing.assert_allclose(value, kept[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert again


def pair(batch: int, **changes) -> Job:
    """Image and text end to end; a small share of the weights, most memory is activations."""
    encoders = {
        "image": encoder_of_size("vision", "tiny", (64, 64, 3), depth=4),
        "text": encoder_of_size("text", "tiny", (32,), depth=4),
    }
    model = ModelSpec(encoders, 2, HeadSpec(32, 16), 32, 0)
    stage = method("schedule", "end_to_end").stages(model, [0, 1], "auto")[0]
    return Job(model, stage, Hyper(batch_size=batch, **changes), CLIP)


def batch_of(made: Job) -> Batch:
    size = made.hyper.batch_size
    inputs = {"image": torch.rand(size, 64, 64, 3), "text": torch.randint(1, 100, (size, 32))}
    return Batch(size, inputs, dict.fromkeys(inputs), None, complete=size)


def run(made: Job) -> tuple[int, float, float]:
    """(live bytes of two steps, the FLOPs of a third, its loss) on the CPU."""
    torch.manual_seed(1)
    with LiveBytes() as live:
        model = build(made.model, made.stage.present)
        prepare(model, made.stage.trained, checkpoint=made.hyper.checkpoint)
        optimizer = make_optimizer(model, made.stage.trained, made.hyper)
        for _ in range(2):
            train_step(model, made, batch_of(made), optimizer, Auxiliary())
        peak, batch = live.peak, batch_of(made)
        with FlopCounter() as counter:
            loss, _ = train_step(model, made, batch, optimizer, Auxiliary())
    assert live.peak == pytest.approx(peak, rel=0.02)  # counting keeps nothing alive
    return peak, float(counter.flops), loss


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint": True},
        pytest.param({"checkpoint": True, "micro_batch": 8}, marks=pytest.mark.slow),
        pytest.param({"checkpoint": True, "micro_batch": 1}, marks=pytest.mark.slow),
        {"precision": "bf16"},
        pytest.param({"precision": "bf16", "checkpoint": True, "micro_batch": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_price_is_what_runs(changes):
    size = 4 if changes.get("micro_batch") == 1 else 32
    rows = dict.fromkeys(("image", "text"), size)
    made = pair(size, **changes)
    peak, flops, *_ = price_step(made, rows)
    live, counted, _ = run(made)
    assert flops == counted
    assert peak == pytest.approx(live, rel=0.05)
    plain, *_ = price_step(pair(size, micro_batch=changes.get("micro_batch", 0)), rows)
    assert peak < 0.85 * plain


def test_checkpointing_costs_a_forward_pass_of_the_blocks():
    rows = {"image": 32, "text": 32}
    plain, checkpointed = (price_step(pair(32, checkpoint=checkpoint), rows)[1] for checkpoint in (False, True))
    assert 1.2 < checkpointed / plain < 4 / 3 + 0.01


def test_a_second_run_is_as_narrow_as_the_first():
    """So that with bf16 the gradient is that of what ran."""
    seen = []

    def run_(tokens: torch.Tensor) -> torch.Tensor:
        made = torch.nn.functional.linear(tokens, weight)
        seen.append(made.dtype)
        return made.float()

    weight = torch.ones(2, 2, requires_grad=True)
    block = torch.nn.Linear(2, 2)
    with computing_in("bf16", torch.device("cpu")):
        value = encoder.checkpoint(run_, torch.ones(1, 2), [block])
    value.sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_gradients_at_hand_import_nothing():
    """torch's own way to hand them in imports sympy: 34 MiB in a device's first round."""
    code = (
        "import sys, torch; from edgefl.models.encoder import inject_gradients\n"
        "x = torch.ones(2, requires_grad=True); y = 3 * x\n"
        "inject_gradients([y], [torch.tensor([1.0, 2.0])]).backward()\n"
        "assert x.grad.tolist() == [3.0, 6.0] and 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hold_out_is_encoded_in_pieces_of_a_training_step(monkeypatch):
    """A step's price is then that of the largest moment, however many samples are held out."""
    made, rows = with_hyper(job(), micro_batch=2), []
    read = embeddings.input_of

    def noted(data, modality, index, device):
        rows.append(len(index))
        return read(data, modality, index, device)

    monkeypatch.setattr(embeddings, "input_of", noted)
    found = train_round(made, dataset(), parts_of(made), LocalState(dataset(9)))
    assert rows == [2, 2, 2, 2, 1] * 4  # as received and as trained, two modalities
    whole = train_round(job(), dataset(), parts_of(made), LocalState(dataset(9)))
    assert found.metrics["received_loss"] == pytest.approx(whole.metrics["received_loss"], rel=1e-5)


def test_a_round_with_hold_out_imports_no_masked_arrays():
    """A plain np.unique imports numpy.ma: 10 MiB in a device's first round."""
    code = (
        "import sys; from training_fixture import dataset, job, parts_of; data = dataset(12, {'b': [0, 2]})\n"
        "from edgefl.training.local_round import LocalState, train_round; made = job()\n"
        "data = data.relabelled(('x', *data.label_names))\n"
        "found = train_round(job(), dataset(), parts_of(made), LocalState(dataset(12, {'b': [0, 2]}))).metrics\n"
        "assert 'received_macro_f1' in found and 'numpy.ma' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


@pytest.mark.slow
def test_bf16_loses_little_and_f32_nothing():
    narrow, wide = run(pair(32, precision="bf16"))[2], run(pair(32))[2]
    assert narrow == pytest.approx(wide, rel=0.05)  # three steps from random weights
    assert narrow != wide
    with computing_in("f32", torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    for device in ("cpu", "meta"):
        with computing_in("bf16", torch.device(device)):
            narrowed = torch.nn.functional.linear(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device))
        assert narrowed.dtype == torch.bfloat16


def test_a_pricer_tells_optimisers_and_precisions_apart():
    pricer, made = Pricer(), job()
    samples = {"": 40, "a": 40, "b": 40}
    first = pricer(made, samples)
    lean = pricer(with_hyper(made, optimizer="adafactor"), samples)
    assert lean.peak < first.peak
    assert lean.flops == first.flops
    larger = {"": 64, "image": 64, "text": 64}
    assert pricer(pair(32, precision="bf16"), larger).peak < 0.8 * pricer(pair(32), larger).peak
    assert pricer(with_hyper(made, checkpoint=True), samples).flops > first.flops
    assert pricer(made, samples) == first


def test_what_is_sent_lies_where_the_model_left_it(monkeypatch):
    made, models = job(), []

    def noted(model, *rest):
        models.append(model)
        return make_optimizer(model, *rest)

    monkeypatch.setattr("edgefl.training.local_round.make_optimizer", noted)
    outcome = train_round(made, dataset(), parts_of(made))
    (model,) = models
    for part in made.stage.trained:
        for name, value in part_tensors(model, part, copy=False).items():
            assert np.shares_memory(value, outcome.parts[part][name])
        assert not any(
            np.shares_memory(value, outcome.parts[part][name]) for name, value in part_tensors(model, part).items()
        )
