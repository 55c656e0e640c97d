"""Training of low-rank terms: what has a gradient, what stays, what travels, and the same by every way of saving."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from training_fixture import CLIP, dataset, job, model_spec, parts_of, random_batch, stages_of, with_hyper

from edgefl.models.spec import LoraSpec, ModelSpec, adaptable_parts, is_encoder, is_lora
from edgefl.models.staged import build
from edgefl.plan.job import Job
from edgefl.plan.stages import planned, restrict, shallower
from edgefl.plan.training_samples import built_parts, prefixes
from edgefl.pricing.round_price import Pricer, price_step
from edgefl.registry import methods
from edgefl.resources.tensor_counters import FlopCounter, LiveBytes
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import LocalState, RoundResult, train_round
from edgefl.training.prefix_cache import PrefixCache
from edgefl.training.step import make_optimizer, prepare, run_backward, run_forward, train_step


def adapted(spec: ModelSpec | None = None, *, heads: bool = False) -> ModelSpec:
    spec = spec or model_spec()
    parts = tuple(part for part in adaptable_parts(spec) if heads or is_encoder(part))
    return replace(spec, lora=LoraSpec(2, 4.0, parts))


def made_for(schedule: str, stage: int = -1, spec: ModelSpec | None = None, **changes: object) -> Job:
    spec = spec or adapted()
    return job(spec, planned(spec, stages_of(spec, schedule))[stage], **changes)


def learned(parts: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    """B as if earlier rounds had trained it."""
    rng = np.random.default_rng(3)
    return {
        part: {n: rng.normal(0, 0.2, v.shape).astype(np.float32) if n.endswith(".B") else v for n, v in tensors.items()}
        for part, tensors in parts.items()
    }


def ran(made: Job, tmp_path: Path, **more: object) -> RoundResult:
    local = LocalState(cache=PrefixCache(tmp_path))
    return train_round(made, dataset(24, absent={"a": [3]}), learned(parts_of(made)), local, salt="x", **more)


@pytest.mark.parametrize("schedule", methods("schedule"))
def test_gradients_reach_a_and_b_alone_and_of_an_encoder_nothing_else_is_trained(schedule: str) -> None:
    for stage in planned(adapted(), stages_of(adapted(), schedule)):
        made = job(adapted(), stage)
        assert not [part for part in made.stage.trained if is_encoder(part) and not is_lora(part)]
        assert {"head/a", "head/b", "fusion", "task"} < set(stage.trained)
        model = build(made.model, made.stage.present)
        prepare(model, made.stage.trained)
        batch = random_batch()
        run_backward(model, made, batch, run_forward(model, made, batch, Auxiliary()))
        for part in made.stage.present:
            reached = [p.grad is not None for p in model.part(part).parameters()]
            assert all(reached) if part in made.stage.trained else not any(reached), part


def test_a_stage_trains_its_own_terms_over_the_frozen_ones_of_those_before() -> None:
    spec = adapted()
    first, second, third = (job(spec, s, cache="f16") for s in planned(spec, stages_of(spec)))
    assert [part for part in second.stage.trained if is_lora(part)] == ["lora/a/stage2", "lora/b/stage2"]
    assert prefixes(first)["a"].parts == ("a/embed",)
    assert prefixes(third)["a"].parts == ("a/embed", "a/stage1", "lora/a/stage1", "a/stage2", "lora/a/stage2")
    assert prefixes(third)["a"].depth == 2
    assert set(built_parts(third)).isdisjoint(prefixes(third)["a"].parts)
    assert {"a/stage3", "lora/a/stage3", "a/norm"} <= set(built_parts(third))
    whole = made_for("end_to_end")
    assert [[p for p in s.trained if is_lora(p)] for s in shallower(whole.stage)][-1] == [
        "lora/a/stage3",
        "lora/b/stage3",
    ]
    assert [p for p in restrict(whole.stage, ["b"]).present if is_lora(p)] == [f"lora/b/stage{k}" for k in (1, 2, 3)]


def test_only_the_terms_of_one_encoder_where_the_other_has_none() -> None:
    spec = replace(model_spec(), lora=LoraSpec(2, 4.0, ("a/stage3",)))
    (whole,) = planned(spec, stages_of(spec, "end_to_end"))
    assert [p for p in whole.trained if p.startswith(("a/", "lora/"))] == ["lora/a/stage3"]
    assert {"b/embed", "b/stage1", "b/norm"} < set(whole.trained)
    (heads,) = planned(spec, stages_of(spec, "heads"))
    assert [p for p in heads.trained if is_encoder(p)] == ["lora/a/stage3"]
    of_heads = replace(spec, lora=LoraSpec(2, 4.0, ("head/a",)))
    (heads,) = planned(of_heads, stages_of(of_heads, "heads"))
    assert heads.trained == ("head/b", "fusion", "task", "lora/head/a")


@pytest.mark.parametrize("schedule", ["end_to_end", "layerwise"])
def test_a_round_receives_the_base_and_sends_the_terms(schedule: str, tmp_path: Path) -> None:
    made = made_for(schedule, cache="f16")
    before = learned(parts_of(made))
    model = build(made.model, made.stage.present)
    received: dict[str, object] = {}

    class Watched(dict):
        def __getitem__(self, part: str) -> object:
            received[part] = super().__getitem__(part)
            return received[part]

    result = train_round(made, dataset(24), Watched(before), LocalState(cache=PrefixCache(tmp_path)), salt="x")
    assert set(result.parts) == set(made.stage.trained)
    assert set(received) == set(made.stage.present) == set(model.parts_present)
    for part, tensors in result.parts.items():
        if is_lora(part):
            assert all((tensors[name] != before[part][name]).any() for name in tensors), part


@pytest.mark.parametrize("schedule", ["end_to_end", "layerwise"])
@pytest.mark.parametrize(
    "changes",
    [
        {"cache": "f32"},
        pytest.param({"micro_batch": 2}, marks=pytest.mark.slow),
        pytest.param({"checkpoint": True}, marks=pytest.mark.slow),
        {"checkpoint": True, "micro_batch": 2},
    ],
    ids=str,
)
def test_every_way_of_saving_trains_the_same(schedule: str, changes: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("edgefl.training.optimizers.TOGETHER_BYTES", 0)  # updates inside backward
    made = made_for(schedule, optimizer="sgd")
    plain, other = ran(made, tmp_path), ran(with_hyper(made, **changes), tmp_path)
    moved = 0.0
    for part, tensors in plain.parts.items():
        for name, value in tensors.items():
            np.testing.assert_allclose(other.parts[part][name], value, rtol=1e-3, atol=1e-5, err_msg=f"{part} {name}")
            moved = max(moved, float(np.abs(value - learned(parts_of(made))[part][name]).max()))
    assert moved > 1e-3


def test_stored_rows_are_of_the_terms_they_went_through(tmp_path: Path) -> None:
    made, data = made_for("layerwise", cache="f32", optimizer="sgd"), dataset(24)
    parts, cache = parts_of(made), PrefixCache(tmp_path)
    cache.identify = lambda part: float(sum(np.abs(value).sum() for value in held[part].values()))
    held = parts
    first = train_round(made, data, held, LocalState(cache=cache), salt="x")
    held = learned(parts)
    later = train_round(made, data, held, LocalState(cache=cache), salt="x")
    fresh = train_round(made, data, held, LocalState(cache=PrefixCache(tmp_path)), salt="x")
    assert first.cache_fill_flops > 0 < later.cache_fill_flops
    np.testing.assert_array_equal(later.parts["task"]["weight"], fresh.parts["task"]["weight"])


@pytest.mark.parametrize("schedule", ["end_to_end", "layerwise"])
@pytest.mark.parametrize("changes", [{}, {"micro_batch": 4}, {"checkpoint": True}], ids=str)
@pytest.mark.parametrize("rows", [{}, {"b": [0, 2, 3]}], ids=["complete", "incomplete"])
def test_flops_on_shapes_alone_are_those_of_the_step_itself(schedule: str, changes: dict, rows: dict) -> None:
    made, batch = made_for(schedule, **changes), random_batch(rows)
    model = build(made.model, made.stage.present)
    prepare(model, made.stage.trained, checkpoint=made.hyper.checkpoint)
    optimizer = make_optimizer(model, made.stage.trained, made.hyper)
    with FlopCounter() as counter:
        train_step(model, made, batch, optimizer, Auxiliary())
    assert price_step(made, {m: len(x) for m, x in batch.inputs.items()}).flops == counter.flops > 0


def test_a_round_costs_what_was_predicted(tmp_path: Path) -> None:
    made, data = made_for("layerwise", cache="f16"), dataset(24)
    price = Pricer()(made, data.samples())
    found = train_round(made, data, parts_of(made), LocalState(cache=PrefixCache(tmp_path)), salt="x")
    assert found.flops == pytest.approx(price.flops + sum(price.cache_fill_flops.values()), rel=1e-6)
    assert found.cache_fill_flops == pytest.approx(sum(price.cache_fill_flops.values()), rel=1e-6)


def test_a_step_takes_less_memory_and_as_much_as_predicted() -> None:
    wide = {m: replace(e, width=64) for m, e in model_spec().encoders.items()}
    plain = replace(model_spec(), encoders=wide)
    whole, small = (made_for("end_to_end", spec=spec) for spec in (plain, adapted(plain)))
    peaks = []
    for made in (whole, small):
        with LiveBytes() as live:
            model = build(made.model, made.stage.present)
            prepare(model, made.stage.trained)
            optimizer = make_optimizer(model, made.stage.trained, made.hyper)
            for _ in range(2):
                train_step(model, made, random_batch(), optimizer, Auxiliary())
        assert price_step(made, {"a": 6, "b": 6}).peak == pytest.approx(live.peak, rel=0.05)
        peaks.append(live.peak)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_what_is_adapted_stays_to_the_last_bit_with_its_batch_statistics(optimizer: str) -> None:
    made = made_for("end_to_end", spec=adapted(heads=True), optimizer=optimizer)
    made = with_hyper(made, weight_decay={"encoder": 0.1, "head": 0.1})
    model = build(made.model, made.stage.present)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prepare(model, made.stage.trained)
    updates = make_optimizer(model, made.stage.trained, made.hyper)
    for seed in range(3):
        train_step(model, made, random_batch(seed=seed), updates, Auxiliary())
    for part in made.stage.present:
        same = [torch.equal(value, before[f"_parts.{part}.{n}"]) for n, value in model.part(part).state_dict().items()]
        assert not any(same) if part in made.stage.trained else all(same), part
    assert {"head/a", "a/norm"}.isdisjoint(made.stage.trained)
    assert "lora/head/a" in made.stage.trained


def test_without_labels_too(tmp_path: Path) -> None:
    spec = adapted(model_spec(classes=0))
    result = ran(made_for("end_to_end", spec=spec, objective=CLIP, missing={"ignore": {}}), tmp_path)
    assert result.metrics["loss"] > 0
    assert torch.isfinite(torch.tensor(result.metrics["loss"]))
