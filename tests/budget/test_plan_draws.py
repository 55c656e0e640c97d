"""Placements in stages of which each round trains a draw: the bound holds for every draw, and nobody gets less."""

from __future__ import annotations

import msgspec
import pytest
from plan_fixture import MODEL, PART_BYTES, SUPERVISED, TINY, candidate, price, put

from edgefl.budget.fit import limits, place, verdict
from edgefl.budget.stage_cost import Priced
from edgefl.models.spec import HeadSpec
from edgefl.plan.job import Hyper, Job, LowMemoryOptimizer, Stage
from edgefl.plan.stages import draws, encoder_stage
from edgefl.plan.training_samples import can_cache, prefixes
from edgefl.pricing.round_price import Pricer
from edgefl.records import Budget
from edgefl.registry import method

(SAMPLED,) = method("schedule", "sampled").stages(MODEL, [1, 1, 1])


def job(stage: Stage = SAMPLED, **hyper) -> Job:
    return Job(MODEL, stage, Hyper(batch_size=8, **hyper), SUPERVISED)


def test_the_bound_holds_every_draw_by_the_step_itself() -> None:
    """The real price: the first draw goes back through the whole model, the last through one encoder stage."""
    small = msgspec.structs.replace(MODEL, head=HeadSpec(width=16, out=8), fusion_width=8)
    one = msgspec.structs.replace(job(lr={"encoder": 1e-3, "head": 1e-3}), model=small)
    placed = place(one, candidate(), PART_BYTES, Pricer())
    assert [one.stage for one in placed.draws] == draws(SAMPLED)
    bound = placed.cost
    for one in placed.draws:
        for name in ("step_peak_bytes", "flops", "payload_up_bytes", "payload_down_bytes", "whole_up_bytes"):
            assert getattr(one.cost, name) <= getattr(bound, name), name
        assert one.cost.disk_bytes <= bound.disk_bytes
        assert one.predicted["flops"].value == one.cost.flops
    first, *_, last = placed.draws
    assert bound.flops == first.cost.flops > 1.2 * last.cost.flops
    assert bound.step_peak_bytes == first.cost.step_peak_bytes > last.cost.step_peak_bytes


def test_bytes_are_those_of_a_draw_and_down_at_most_those_that_were_missed() -> None:
    """Of 10 bytes each: norms, heads, fusion, task are 6 parts; a draw has 2 of encoders, the first 4."""
    placed = put(SAMPLED, candidate())
    assert [one.cost.payload_up_bytes for one in placed.draws] == [100, 80, 80]
    assert [one.cost.payload_down_bytes for one in placed.draws] == [100, 80, 80]
    assert (placed.cost.payload_up_bytes, placed.cost.payload_down_bytes) == (100, 140)


def peaked(one: Job, samples) -> Priced:
    """Memory that falls with the draw's number: 300, 200, 100, and 10 a row."""
    number = max((encoder_stage(part) or 0) for part in one.stage.trained)
    size = one.hyper.micro_batch or one.hyper.batch_size
    return Priced(100 * (4 - number) + 10 * size, 1000.0 * (4 - number))


@pytest.mark.parametrize("lacking", range(0, 90, 10))
def test_no_draw_exceeds_a_budget_and_the_largest_decides_the_pieces(lacking: int) -> None:
    budget = Budget(step_memory_bytes=380 - lacking)
    placed = place(job(), candidate(budget), TINY, peaked)
    if lacking > 70:  # 300 and 10 a row at least
        assert placed.refusal is not None
        assert (placed.refusal.needed, placed.stage) == (310.0, SAMPLED)
        return
    assert placed.refusal is None
    assert placed.hyper.micro_batch == next(size for size in (0, 4, 2, 1) if 10 * (size or 8) <= 80 - lacking)
    assert placed.shortened is None
    for one in placed.draws:
        assert verdict(one.cost, candidate(budget)) is None
        for own, most in zip(limits(one.cost, candidate(budget)), limits(placed.cost, candidate(budget)), strict=True):
            assert own.needed <= most.needed


def test_a_short_budget_is_refused_not_given_fewer_encoder_stages() -> None:
    """Rounds that draw what it gave up would train none of its encoders. 3000 are those of the first draw."""
    assert place(job(), candidate(Budget(flops=3000)), TINY, peaked).refusal is None
    refusal = place(job(), candidate(Budget(flops=2999)), TINY, peaked).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.needed, refusal.allowed) == ("flops", 3000.0, 2999.0)


def test_no_prefix_is_stored_of_what_other_rounds_change() -> None:
    placed = put(SAMPLED, candidate())
    whole = job(cache="f16")
    last = msgspec.structs.replace(whole, stage=draws(SAMPLED)[-1])
    assert not can_cache(whole)
    assert prefixes(last) == {}
    assert prefixes(msgspec.structs.replace(last, stage=msgspec.structs.replace(last.stage, draw="")))
    assert place(whole, candidate(), PART_BYTES, price).hyper.cache == placed.hyper.cache == ""


def test_a_device_of_one_modality_has_the_same_draws() -> None:
    placed = put(SAMPLED, candidate(samples={"": 100, "b": 100}))
    own = [{n for part in one.stage.trained if (n := encoder_stage(part))} for one in placed.draws]
    assert own == [{1}, {2}, {3}]
    assert not any(part.startswith("a/") for one in placed.draws for part in one.stage.trained)


def test_a_device_without_the_drawn_encoder_stage_trains_what_follows_it() -> None:
    """As with low-rank terms of some parts: a has none of encoder stage 1, which rounds draw for the sake of b."""
    some = tuple(part for part in SAMPLED.trained if part not in {"a/embed", "a/stage1"})
    placed = put(msgspec.structs.replace(SAMPLED, trained=some), candidate(samples={"": 100, "a": 100}))
    own = [{n for part in one.stage.trained if (n := encoder_stage(part))} for one in placed.draws]
    assert own == [set(), {2}, {3}]
    assert "head/a" in placed.draws[0].stage.trained


def test_the_lean_optimiser_holds_for_every_draw() -> None:
    lean = LowMemoryOptimizer("adafactor", {"encoder": 0.02, "head": 0.02})

    def leaner(one: Job, samples) -> Priced:
        plain = peaked(one, samples)
        return plain._replace(peak=plain.peak - 100 * one.hyper.low_memory)

    placed = place(job(low_memory_optimizer=lean), candidate(Budget(step_memory_bytes=280)), TINY, leaner)
    assert placed.refusal is None
    assert (placed.hyper.optimizer, [one.cost.step_peak_bytes for one in placed.draws]) == ("adafactor", [280, 180, 80])
