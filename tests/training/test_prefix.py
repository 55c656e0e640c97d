"""The frozen prefix computed once: exact as f32, harmless as f16, from where the stage before left off, and swept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from training_fixture import CLIP, dataset, job, model_spec, parts_of, stages_of

from edgefl.data.dataset import Dataset
from edgefl.errors import PrecisionError, StoreError
from edgefl.models.checkpoints import initial_parts
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.plan.job import Job, Stage
from edgefl.plan.training_samples import built_parts, prefixes, stored_bytes, with_cache
from edgefl.pricing.round_price import Pricer
from edgefl.training.flop_cache import metered
from edgefl.training.local_round import LocalState, RoundResult, train_round
from edgefl.training.prefix_cache import PrefixCache

BERT = EncoderSpec("text", (5,), width=8, depth=3, heads=2, vocabulary=12, dropout=0.0)


def last_stage(**changes: object) -> Job:
    return job(epochs=2, **changes)


def run(made: Job, data: object, tmp_path: Path, **more: object) -> RoundResult:
    return train_round(made, data, parts_of(made), LocalState(cache=PrefixCache(tmp_path)), salt="x", **more)


def test_what_is_frozen_before_anything_trained() -> None:
    first, second, third = (job(stage=stage, cache="f16") for stage in stages_of(model_spec()))
    assert prefixes(first) == {}  # the embedding is trained with stage 1
    assert prefixes(second)["a"] == (("a/embed", "a/stage1"), 1, 3, 8, 24)
    assert prefixes(third)["b"] == (("b/embed", "b/stage1", "b/stage2"), 2, 3, 8, 24)
    assert prefixes(with_cache(third, "")) == {}
    assert not {"a/embed", "a/stage1", "a/stage2"} & set(built_parts(third))
    assert {"a/stage3", "a/norm", "head/a"} <= set(built_parts(third))


def test_of_a_whole_frozen_encoder_the_pooled_token_is_stored() -> None:
    every = stages_of(model_spec())[-1]
    heads = replace_trained(every, [part for part in every.trained if "stage" not in part])
    assert prefixes(job(stage=heads, cache="f16"))["a"] == (
        ("a/embed", "a/stage1", "a/stage2", "a/stage3"),
        3,
        1,
        8,
        24,
    )


def replace_trained(stage: Stage, trained: list[str]) -> Stage:
    return Stage(stage.index, stage.depth, stage.rounds, stage.present, tuple(trained))


@pytest.mark.parametrize("slots", [{}, {"objective": CLIP}, {"prototypes": {"class_mean": {}}}])
@pytest.mark.parametrize("micro", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_stored_as_f32_a_round_is_the_same(slots: dict, micro: int, tmp_path: Path) -> None:
    data = dataset(24, absent={"a": [3, 7], "b": [5]})
    made = last_stage(micro_batch=micro, holdout=0.25, optimizer="sgd", **slots)  # AdamW divides rounding by itself
    plain, cached = run(made, data, tmp_path), run(with_cache(made, "f32"), data, tmp_path)
    assert plain.parts.keys() == cached.parts.keys()
    assert distance(plain, cached, parts_of(made)) < 2e-3
    assert cached.samples == plain.samples
    assert cached.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-3)


def test_stored_as_f16_a_round_is_nearly_the_same(tmp_path: Path) -> None:
    data, made = dataset(24), last_stage(optimizer="sgd")
    plain, cached = run(made, data, tmp_path), run(with_cache(made, "f16"), data, tmp_path)
    assert 0 < distance(plain, cached, parts_of(made)) < 0.2  # batch norm over six samples magnifies it


def distance(one: RoundResult, other: RoundResult, before: dict) -> float:
    """How far two rounds' parts are from each other, of how far training moved them."""
    distance = moved = 0.0
    for part in before.keys() & one.parts.keys():
        for name, values in one.parts[part].items():
            distance += float(np.abs(values - other.parts[part][name]).sum())
            moved += float(np.abs(values - before[part][name]).sum())
    return distance / moved


def filled(cache: PrefixCache, made: Job, data: Dataset, parts: dict) -> float:
    """FLOPs of filling the cache."""
    with metered() as bill:
        cache.encoded(made, data, parts, "cpu")
    return bill.flops


def test_the_same_prefix_is_computed_once_and_the_next_stage_goes_on(tmp_path: Path) -> None:
    data, cache = dataset(24), PrefixCache(tmp_path)
    two, three = (job(stage=stage, cache="f16") for stage in stages_of(model_spec())[1:])
    parts = parts_of(three)

    def fill(made: Job, ids: dict[str, str] | None = None) -> float:
        cache.identify = lambda part: (ids or {}).get(part, part)
        return filled(cache, made, data, parts)

    whole = filled(PrefixCache(tmp_path), three, data, parts)
    first = fill(two)
    assert fill(two) == 0
    further = fill(three)
    assert 0 < further < first + further == whole
    assert fill(three, {"b/stage2": "another"}) == whole / 2  # of b anew
    assert fill(two) == first  # an earlier stage cannot be had from a later one
    cache.keep_only([])
    assert fill(two) == first


def test_rows_belong_to_their_encoder_and_to_those_who_ask(tmp_path: Path) -> None:
    data, cache = dataset(24), PrefixCache(tmp_path)
    made = with_cache(last_stage(), "f16")
    first = filled(cache, made, data, parts_of(made))
    one_head = {m: msgspec.structs.replace(e, heads=1) for m, e in made.model.encoders.items()}
    other = msgspec.structs.replace(made, model=msgspec.structs.replace(made.model, encoders=one_head))
    assert filled(cache, other, data, parts_of(made)) == first  # equal tensors, another function
    assert cache.used_bytes() > 0
    with metered() as bill:
        plain = cache.encoded(with_cache(made, ""), data, parts_of(made), "cpu")
    assert (bill.flops, plain.encoded, cache.used_bytes()) == (0, {}, 0)


@pytest.mark.parametrize("kind", ["next stage", "from nothing", "pooled"])
def test_no_more_disk_is_taken_than_was_priced(kind: str, tmp_path: Path) -> None:
    data = dataset(24, absent={"b": list(range(9))})
    two, three = (job(stage=stage, cache="f16") for stage in stages_of(model_spec())[1:])
    if kind == "pooled":
        trained = [part for part in three.stage.trained if "stage" not in part]
        three = job(stage=replace_trained(three.stage, trained), cache="f16")
    cache = PrefixCache(tmp_path)
    if kind == "next stage":
        cache.encoded(two, data, parts_of(three), "cpu")
    cache.limit_bytes = stored_bytes(three, data.samples())
    cache.encoded(three, data, parts_of(three), "cpu")
    least = PrefixCache(tmp_path, limit_bytes=cache.used_bytes() - 1)
    with pytest.raises(StoreError, match="bytes needed"):
        least.encoded(three, data, parts_of(three), "cpu")


def test_a_file_that_is_still_read_counts_against_the_disk_limit(tmp_path: Path) -> None:
    """From nothing, stage 3 is filled modality by modality through files of the stages below: what they take counts."""
    data = dataset(24)
    three = job(stage=stages_of(model_spec())[-1], cache="f16")
    free = PrefixCache(tmp_path / "free")
    free.encoded(three, data, parts_of(three), "cpu")
    least = PrefixCache(tmp_path / "least", limit_bytes=free.used_bytes())
    with pytest.raises(StoreError, match="bytes needed"):
        least.encoded(three, data, parts_of(three), "cpu")


def test_filling_can_be_left_off(tmp_path: Path) -> None:
    def leave() -> None:
        raise KeyError("left off")

    made = with_cache(last_stage(), "f16")
    with pytest.raises(KeyError):
        PrefixCache(tmp_path, check=leave).encoded(made, dataset(24), parts_of(made), "cpu")


def test_only_what_is_trained_is_loaded_and_the_prefix_part_by_part(tmp_path: Path) -> None:
    made = with_cache(last_stage(), "f16")
    asked: list[str] = []

    class Parts(dict):
        def __getitem__(self, part: str) -> object:
            asked.append(part)
            return super().__getitem__(part)

    cache, data = PrefixCache(tmp_path), dataset(24)
    local = LocalState(cache=cache)
    train_round(made, data, Parts(parts_of(made)), local, salt="x")
    assert set(asked) == set(made.stage.present)
    asked.clear()
    train_round(made, data, Parts(parts_of(made)), local, salt="y")
    assert set(asked) == set(built_parts(made))


def test_text_keeps_which_tokens_are_real(tmp_path: Path) -> None:
    model = ModelSpec({"t": BERT, "a": model_spec().encoders["a"]}, 3, HeadSpec(12, 6, 0.0), 10, 3, ("x", "y", "z"))
    made = Job(model, stages_of(model)[-1], last_stage().hyper, last_stage().slots)
    data = dataset(24)
    ids = np.random.default_rng(0).integers(1, 12, (24, 5))
    ids[::2, 3:] = 0
    values, present = {"t": ids, "a": data.modalities["a"]}, {"t": data.present["b"], "a": data.present["a"]}
    data = replace(data, modalities=values, present=present)
    parts = {k: v for k, v in initial_parts(model) if k in made.stage.present}
    plain, cached = (
        train_round(one, data, parts, LocalState(cache=PrefixCache(tmp_path)), salt="x")
        for one in (made, with_cache(made, "f32"))
    )
    assert distance(plain, cached, parts) < 2e-3


def test_values_beyond_f16_are_an_error_with_the_part(tmp_path: Path) -> None:
    made = with_cache(last_stage(), "f16")
    parts = parts_of(made)
    parts["a/embed"] = {name: values * 1e6 for name, values in parts["a/embed"].items()}
    with pytest.raises(PrecisionError, match="a/embed"):
        train_round(made, dataset(24), parts, LocalState(cache=PrefixCache(tmp_path)), salt="x")


def test_the_price_is_that_of_the_cached_step(tmp_path: Path) -> None:
    made = last_stage()
    plain_peak, plain, *_ = Pricer()(made, dataset(24).samples())
    peak, flops, cache_fill_flops, *_ = Pricer()(with_cache(made, "f16"), dataset(24).samples())
    assert peak < plain_peak
    local, data = LocalState(cache=PrefixCache(tmp_path)), dataset(24)
    ran = [train_round(with_cache(made, "f16"), data, parts_of(made), local, salt="x").flops for _ in range(2)]
    assert ran[1] == pytest.approx(flops, rel=1e-6)
    assert ran[0] == pytest.approx(flops + sum(cache_fill_flops.values()), rel=1e-6)
    assert flops < plain


def test_disk_by_hand() -> None:
    made = with_cache(last_stage(), "f16")
    rows = {"a": 24, "b": 10}
    # 3 tokens of width 8, 2 bytes; while a grows by its second stage, its rows of the first are there too
    assert stored_bytes(made, rows) == (24 + 10) * 3 * 8 * 2 + 24 * 3 * 8 * 2
    assert stored_bytes(with_cache(made, "f32"), rows) == 2 * stored_bytes(made, rows)
    assert stored_bytes(with_cache(made, ""), rows) == 0
