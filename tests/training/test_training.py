"""Local training: batches, micro-batches, what changes in a round and what does not."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from training_fixture import (
    CLIP,
    CONTRAST,
    CROSS_ENTROPY,
    dataset,
    job,
    model_spec,
    parts_of,
    random_batch,
    stages_of,
    with_hyper,
)

from edgefl.errors import DataError, RunError
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import JointSpec
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Job
from edgefl.plan.stages import restrict
from edgefl.prototypes.mask import Table
from edgefl.prototypes.table import from_tensors
from edgefl.training.batches import Batch, make_batch, mixed_rows, split, training_batches, usable_rows
from edgefl.training.flop_cache import FlopCounts
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import LocalState, train_round
from edgefl.training.optimizers import parameters_of
from edgefl.training.step import make_optimizer, prepare, run_backward, run_forward, train_step

ROWS = {"b": [0, 2, 3]}


def ready(made: Job, seed: int = 0) -> StagedModel:
    """A model with random parts, its buffers off their first values, prepared to train."""
    model = build(made.model, made.stage.present, seed=seed)
    torch.manual_seed(7)
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    prepare(model, made.stage.trained)
    return model


def gradients(made: Job, batch: Batch, tables=None, seed: int = 3) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in double precision: batch norm over a handful of rows amplifies rounding."""
    model = ready(made).double()
    torch.manual_seed(seed)
    done = run_forward(model, made, doubled(batch), Auxiliary(tables or {}))
    run_backward(model, made, doubled(batch), done)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(done.loss.detach()), grads


def doubled(batch: Batch) -> Batch:
    return Batch(batch.size, {m: x.double() for m, x in batch.inputs.items()}, batch.rows, batch.labels)


# ---- batches


def test_a_batch_holds_only_the_rows_that_have_a_modality():
    data = dataset(6, {"b": [0, 4]})
    batch = make_batch(data, np.array([4, 5, 0, 1]), ["a", "b"], "cpu")
    assert batch.rows["a"] is None
    assert batch.rows["b"].tolist() == [1, 3]
    np.testing.assert_array_equal(batch.inputs["b"].numpy(), data.modalities["b"][[5, 1]])
    assert batch.labels.tolist() == [1, 2, 0, 1]
    assert batch.shape_key == (("", 1), ("&", 2), ("a", 4), ("b", 2))
    assert "b" not in make_batch(data, np.array([0, 1]), ["a", "b"], "cpu", least_rows=2).inputs


def test_an_epoch_is_full_batches_of_shuffled_samples():
    data = dataset(11)
    usable = np.arange(1, 11)
    batches = list(training_batches(data, mixed_rows(usable, 4, np.random.default_rng(0)), ["a", "b"], "cpu"))
    assert [b.size for b in batches] == [4, 4]
    seen = np.concatenate([b.inputs["a"].numpy()[:, 0, 0] for b in batches])
    assert len(set(seen.tolist())) == 8
    assert set(seen.tolist()) <= set(data.modalities["a"][1:, 0, 0].tolist())


def test_a_batch_without_two_rows_of_anything_is_left_out():
    data = dataset(2, {"a": [0], "b": [1]})
    assert list(training_batches(data, [np.arange(2)], ["a", "b"], "cpu")) == []
    with pytest.raises(DataError, match="no batch of 2 holds two samples of one modality"):
        train_round(job(batch_size=2), data, parts_of(job()))


# ---- micro-batches


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("objective", [CROSS_ENTROPY, CLIP, CONTRAST], ids=["cross_entropy", "clip", "contrast"])
def test_the_gradient_in_pieces_is_that_of_the_whole_batch(micro, objective):
    generator = torch.Generator().manual_seed(2)
    tables = {m: Table(torch.randn(3, 6, generator=generator).double(), torch.tensor([True] * 3)) for m in "ab"}
    for schedule in ("layerwise", "end_to_end"):
        spec = model_spec(classes=0 if objective is CLIP else 3)
        made = job(spec, stages_of(spec, schedule)[-1], objective=objective)
        for batch in (random_batch(), random_batch(ROWS)):
            whole, expected = gradients(made, batch, tables)
            pieces, found = gradients(with_hyper(made, micro_batch=micro), batch, tables)
            assert pieces == pytest.approx(whole, abs=1e-9)
            assert set(found) == set(expected)
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, atol=1e-9, rtol=1e-6)


def test_with_dropout_both_runs_of_a_piece_draw_the_same():
    """Numerically: the gradient in pieces is the slope of the loss in pieces, dropout and all."""
    spec = model_spec(dropout=0.4)
    made = with_hyper(job(spec, stages_of(spec, "end_to_end")[0]), micro_batch=4)
    batch = random_batch(ROWS)
    loss, grads = gradients(made, batch)
    assert (loss, sorted(grads)) == (gradients(made, batch)[0], sorted(gradients(made, batch)[1]))
    model = ready(made).double()
    batch = doubled(batch)

    def loss_at(parameter, index, step):
        with torch.no_grad():
            parameter.view(-1)[index] += step
        torch.manual_seed(3)
        value = float(run_forward(model, made, batch, Auxiliary()).loss.detach())
        with torch.no_grad():
            parameter.view(-1)[index] -= step
        return value

    torch.manual_seed(3)
    run_backward(model, made, batch, run_forward(model, made, batch, Auxiliary()))
    parameters = dict(model.named_parameters())
    checked = [name for name in parameters if "stage1" in name and name.endswith("qkv.weight")]
    checked += [name for name in parameters if "embed" in name and name.endswith("project.weight")]
    assert len(checked) == 4
    for name in checked:
        parameter = parameters[name]
        index = int(parameter.grad.abs().argmax())
        slope = (loss_at(parameter, index, 1e-6) - loss_at(parameter, index, -1e-6)) / 2e-6
        assert parameter.grad.view(-1)[index].item() == pytest.approx(slope, rel=1e-3, abs=1e-7)


def test_pieces_leave_the_generator_where_a_step_of_any_piece_size_leaves_it():
    spec = model_spec(dropout=0.4)
    made = job(spec, stages_of(spec, "end_to_end")[0])
    after = []
    for micro in (2, 3):
        gradients(with_hyper(made, micro_batch=micro), random_batch())
        after.append(torch.randint(2**31, ()).item())
    assert after[0] == after[1]


# ---- steps and rounds


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_groups_of_the_optimiser(optimizer):
    made = job(optimizer=optimizer, lr={"encoder": 0.1, "head": 0.2}, weight_decay={"encoder": 0.3, "head": 0.4})
    model = ready(made)
    groups = make_optimizer(model, made.stage.trained, made.hyper).groups
    assert [(g.lr, g.weight_decay) for g in groups] == [(0.1, 0.3), (0.2, 0.4)]
    counted = [sum(p.numel() for p in g.parameters) for g in groups]
    sizes = {name: sum(p.numel() for p in model.part(name).parameters()) for name in made.stage.trained}
    encoders = sum(size for name, size in sizes.items() if name in {"a/stage3", "b/stage3", "a/norm", "b/norm"})
    assert counted == [encoders, sum(sizes.values()) - encoders]


def test_gradients_are_cut_to_the_norm_that_is_set():
    made = with_hyper(job(), clip_norm=1e-3)
    model = ready(made)
    optimizer = make_optimizer(model, made.stage.trained, made.hyper)
    train_step(model, made, random_batch(), optimizer, Auxiliary())
    norm = torch.stack([p.grad.norm() for p in parameters_of(optimizer)]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("schedule", ["layerwise", "progressive", "end_to_end"])
@pytest.mark.parametrize("micro", [0, 4])
def test_only_trained_parts_change_and_frozen_ones_keep_every_bit(schedule, micro):
    spec = model_spec(dropout=0.2)
    stage = stages_of(spec, schedule)[-1]
    if schedule == "progressive":  # and a job with frozen heads, whose batch norm must not move
        stage = msgspec.structs.replace(stage, trained=("a/stage1", "b/stage1", "fusion"))
    made = with_hyper(job(spec, stage), micro_batch=micro)
    model = ready(made)
    before = {name: part_tensors(model, name) for name in stage.present}
    optimizer = make_optimizer(model, stage.trained, made.hyper)
    for _ in range(2):
        train_step(model, made, random_batch(ROWS), optimizer, Auxiliary())
    for name in stage.present:
        after = part_tensors(model, name)
        same = all(np.array_equal(before[name][key], after[key]) for key in after)
        assert same == (name not in stage.trained), name


def test_a_round_returns_what_it_trained_and_what_it_saw():
    data = dataset(14, {"b": [0, 1, 2]})
    made = job(epochs=2)
    seen = []
    result = train_round(made, data, parts_of(made), on_progress=lambda *told: seen.append(told))
    assert set(result.parts) == set(made.stage.trained)
    assert {result.samples[name] for name in ("a/stage3", "a/norm", "head/a", "fusion", "task")} == {14}
    assert {result.samples[name] for name in ("b/stage3", "b/norm", "head/b")} == {11}
    assert set(result.samples) == set(result.parts)
    assert [told[:3] for told in seen] == [(1, 1, 4), (1, 2, 4), (2, 3, 4), (2, 4, 4)]
    assert result.metrics["steps"] == 4
    assert result.metrics["loss"] == pytest.approx(np.mean([told[3] for told in seen]))
    assert result.metrics["loss_last"] == seen[-1][3]
    assert 0 <= result.metrics["train_accuracy"] <= 1
    assert "prototypes" not in result.parts
    assert result.flops > 0
    assert result.compute_s > 0


def test_a_round_can_be_repeated_and_differs_with_its_salt():
    data, made = dataset(14, {"b": [0, 1]}), job(model_spec(dropout=0.2))
    one, same, other = (train_round(made, data, parts_of(made), salt=salt) for salt in ("d/1", "d/1", "d/2"))
    for name, tensors in one.parts.items():
        for key, value in tensors.items():
            np.testing.assert_array_equal(value, same.parts[name][key])
    assert not np.array_equal(one.parts["task"]["weight"], other.parts["task"]["weight"])
    assert one.metrics["loss"] == same.metrics["loss"] != other.metrics["loss"]


def test_learning_makes_the_loss_smaller_and_the_answers_right():
    data, made = dataset(48), job(model_spec(stages=1), epochs=15, batch_size=16)
    losses = []
    result = train_round(made, data, parts_of(made), on_progress=lambda *told: losses.append(told[3]))
    assert result.metrics["loss_last"] < 0.3 * losses[0]
    assert result.metrics["train_accuracy"] > 0.7


def test_learning_by_contrast_pairs_the_modalities():
    spec = model_spec(stages=1, classes=0)
    made = job(spec, objective=CLIP, missing={"ignore": {}}, epochs=10, batch_size=12)
    losses = []
    rng = np.random.default_rng(0)
    data = dataset(24, labels=rng.permutation(24) % 3)
    result = train_round(made, data, parts_of(made), on_progress=lambda *told: losses.append(told[3]))
    assert "train_accuracy" not in result.metrics
    assert result.metrics["loss_last"] < 0.8 * losses[0]


def test_a_modality_that_nobody_in_the_share_has_is_neither_run_nor_returned():
    data = dataset(12, {"b": list(range(12))})
    made = job(missing={"prototype": {}}, prototypes={"class_mean": {"min_count": 1}})
    result = train_round(made, data, parts_of(made))
    assert {"head/b", "b/stage3", "b/norm"} & set(result.parts) == set()
    assert set(from_tensors(result.parts["prototypes"])) == {"a"}
    own = job(stage=restrict(made.stage, ["a"]), missing={"zero": {}})  # as the planner would have it
    alone = train_round(own, data, parts_of(own))
    assert set(alone.parts) == set(own.stage.trained)


def test_which_samples_can_be_trained_on():
    labels = [0, 1, 2, -1, 1, 0]
    data = dataset(6, {"a": [0, 1], "b": [1, 2]}, labels=labels)
    assert usable_rows(job(), data).tolist() == [0, 2, 4, 5]  # 1 has nothing, 3 no label
    assert usable_rows(job(missing={"ignore": {}}), data).tolist() == [4, 5]
    spec = model_spec(classes=0)
    assert usable_rows(job(spec, objective=CLIP), data).tolist() == [3, 4, 5]
    unlabelled = dataset(6)
    unlabelled = type(data)(unlabelled.modalities, unlabelled.present, None, (), unlabelled.ids)
    assert usable_rows(job(), unlabelled).tolist() == []


ADAPTIVE = {"adaptive": {"local_clusters": 3.0, "clusters": 2.0, "neighbours": 2.0}}
CLUSTERED = {**CROSS_ENTROPY, "cluster_contrast": {"weight": 1.0, "temperature": 0.07}}


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        (
            {"encoder_sharing": "multiway"},
            {"prototypes": {"class_mean": {"match": "cosine"}}},
        ),
        pytest.param({"fusion": "joint"}, {"prototypes": {"class_mean": {"match": "cosine"}}}, marks=pytest.mark.slow),
        ({"fusion": "mean"}, {"prototypes": ADAPTIVE, "objective": CLUSTERED}),
    ],
    ids=["multiway", "joint", "adaptive"],
)
def test_flops_follow_from_a_few_counts_exactly(changes, slots, monkeypatch):
    spec = msgspec.structs.replace(model_spec(stages=2), **changes, joint=JointSpec(width=8, heads=2, layers=1))
    stage = stages_of(spec)[-1]
    made = with_hyper(job(spec, stage, **slots), holdout=0.2)
    counts, counted, found = FlopCounts(), [], []
    monkeypatch.setattr(counts, "put", lambda *about: counted.append(about) or FlopCounts.put(counts, *about))

    def flops(known: FlopCounts) -> list[float]:
        return [
            train_round(made, half.train, parts_of(made), LocalState(half.holdout, counts=known)).flops
            for half in halves
        ]

    rows = np.random.default_rng(1).random(60)
    halves = []
    for count in (60, 36, 50, 42):  # devices of one process
        absent = {"a": list(np.flatnonzero(rows[:count] < 0.3)), "b": list(np.flatnonzero(rows[:count] > 0.6))}
        halves.append(split(made, dataset(count, absent), "d"))
    found = flops(counts)
    assert len(counted) < 30  # of some sixty shapes
    monkeypatch.setattr(FlopCounts, "get", lambda *_, **__: None)  # every shape is counted
    assert found == flops(FlopCounts())


def test_the_same_samples_are_set_apart_whatever_the_recipe_leaves_out_or_completes():
    data = dataset(40, {"b": list(range(0, 40, 4))})
    plain, ignore = (split(with_hyper(job(missing=m), holdout=0.25), data, "d") for m in ({"zero": {}}, {"ignore": {}}))
    assert plain.holdout.ids == ignore.holdout.ids
    assert len(plain.holdout) == 10
    assert sorted(plain.train.ids + plain.holdout.ids, key=int) == data.ids
    assert not all(ignore.holdout.has("b"))  # incomplete ones are judged too
    assert split(with_hyper(job(), holdout=0.25), data, "other").holdout.ids != plain.holdout.ids
    tight = split(with_hyper(job(missing={"ignore": {}}), holdout=0.5, batch_size=28), data, "d")
    assert tight.holdout.ids == split(with_hyper(job(), holdout=0.5, batch_size=28), data, "d").holdout.ids
    assert len(tight.holdout) == 12  # of 40, one batch of 28 stays
    assert not len(split(with_hyper(job(), holdout=0.25, batch_size=40), data, "d").holdout)


def test_windows_of_one_recording_are_never_on_both_sides_of_a_devices_hold_out():
    """Twelve recordings of 1, 2, …, 12 windows: at most a quarter of the 78, in whole recordings."""
    recordings = np.repeat([f"r{i}" for i in range(12)], np.arange(1, 13))
    data = replace(dataset(78), recordings=recordings)
    halves = split(with_hyper(job(), holdout=0.25), data, "d")
    train, held = set(halves.train.recordings), set(halves.holdout.recordings)
    assert train | held == set(recordings)
    assert not train & held
    assert 10 <= len(halves.holdout) <= 19


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        (dataset(5), {}, "5 usable samples, fewer than one batch of 6"),
        (
            dataset(12, {"a": list(range(6)), "b": list(range(6, 12))}),
            {"missing": {"ignore": {}}},
            "0 complete samples",
        ),
        (
            type(dataset())(dataset(12).modalities, dataset(12).present, None, (), dataset(12).ids),
            {},
            "12 samples, none has a label",
        ),
    ],
    ids=["few", "incomplete", "unlabelled"],
)
def test_a_share_that_can_not_fill_a_batch_says_why(data, changes, words):
    made = job(**changes)
    with pytest.raises(DataError, match=words):
        train_round(made, data, parts_of(made))


def test_a_loss_that_is_no_number_ends_the_round_with_the_way_out():
    made = job(lr={"encoder": 1e30, "head": 1e30}, optimizer="sgd", epochs=9)
    with pytest.raises(RunError, match="the loss became") as raised:
        train_round(made, dataset(24), parts_of(made))
    assert "training.lr" in raised.value.remedy


def test_class_means_by_hand():
    data = dataset(7, {"b": [0]}, labels=[0, 0, 1, 1, 1, -1, 0])
    made = job(
        prototypes={"class_mean": {"min_count": 1}}, lr={"encoder": 0.0, "head": 0.0}, weight_decay={}, batch_size=3
    )
    result = train_round(made, data, parts_of(made))
    model = build(made.model, made.stage.present)
    for name in made.stage.present:
        load_part(model, name, result.parts.get(name, parts_of(made).get(name)))
    model.eval()
    with torch.no_grad():
        r = {m: model.project(m, model.encode(m, torch.from_numpy(data.modalities[m]))) for m in "ab"}
        fused = model.fuse(r).numpy()
    tables = from_tensors(result.parts["prototypes"])
    a, b = (r[m].numpy() for m in "ab")
    assert tables["a"].counts.tolist() == [3, 3, 0]
    assert tables["b"].counts.tolist() == [2, 3, 0]
    assert tables["fused"].counts.tolist() == [2, 3, 0]
    np.testing.assert_allclose(tables["a"].means[0], a[[0, 1, 6]].mean(0), atol=1e-5)
    np.testing.assert_allclose(tables["b"].means[0], b[[1, 6]].mean(0), atol=1e-5)
    np.testing.assert_allclose(tables["fused"].means[1], fused[[2, 3, 4]].mean(0), atol=1e-5)
    assert (tables["a"].means[2] == 0).all()
    assert result.samples["prototypes"] == 6


def test_global_prototypes_are_used_from_the_second_round_on():
    data = dataset(12, {"b": [0, 1, 2, 3]})
    made = job(objective=CONTRAST, missing={"prototype": {"by": "label"}}, prototypes={"class_mean": {"min_count": 1}})
    first = train_round(made, data, parts_of(made))
    second = train_round(made, data, {**parts_of(made), **first.parts})
    assert second.metrics["loss"] != first.metrics["loss"]
    assert set(second.parts["prototypes"]) == {"a", "a.count", "b", "b.count", "fused", "fused.count"}
