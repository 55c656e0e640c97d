"""The rank of a device's low-rank terms: chosen by its budget, after the retreats that cost nothing, before depth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_fixture import MODEL, SUPERVISED, candidate, price

from edgefl.budget.fit import decline_of, place, trained_depth, verdict
from edgefl.budget.stage_cost import Priced
from edgefl.models.spec import LoraSpec, ModelSpec, adaptable_parts, is_encoder, is_lora, part_names, rank_start
from edgefl.plan.job import Candidate, Hyper, Job, LowMemoryOptimizer, Placement, Stage
from edgefl.plan.stages import narrower, planned
from edgefl.plan.training_samples import prefixes, with_cache
from edgefl.records import HOST, Budget, Refusal
from edgefl.registry import method

PARTS = tuple(part for part in adaptable_parts(MODEL) if is_encoder(part))
SLICED = replace(MODEL, lora=LoraSpec(16, 32.0, PARTS, fallback_ranks=(4, 8)))
#: Of the terms of a part a byte a rank dimension; of every other part one.
BYTES = {part: {0: 4, 4: 4, 8: 8}[rank_start(part)] if is_lora(part) else 1 for part in part_names(SLICED)}


def stage_of(schedule: str = "end_to_end", index: int = -1, spec: ModelSpec = SLICED) -> Stage:
    return planned(spec, method("schedule", schedule).stages(spec, [1, 1, 1], "auto"))[index]


def narrow_price(job: Job, samples) -> Priced:
    """As ``price``, and a byte for each rank dimension of the terms trained."""
    dimensions = sum(BYTES[part] for part in job.stage.trained if is_lora(part))
    plain = price(job, samples)
    return plain._replace(peak=plain.peak + dimensions, flops=plain.flops + dimensions)


def put(device: Candidate, schedule: str = "end_to_end", hyper: Hyper | None = None) -> Placement:
    job = Job(SLICED, stage_of(schedule), hyper or Hyper(batch_size=8), SUPERVISED)
    return place(job, device, BYTES, narrow_price)


def how(placed: Placement) -> tuple[int, int, int]:
    return placed.rank, trained_depth(placed.stage), placed.hyper.micro_batch


def up(rank: int, depth: int = 3) -> int:
    """Bytes of an update: two encoders' terms; norms, heads, fusion and task are frozen or 1 each."""
    return 2 * depth * rank + 4


def test_bytes_choose_the_rank_before_the_depth() -> None:
    largest = put(candidate())
    assert (how(largest), largest.shortened) == ((16, 3, 0), None)
    assert largest.cost.whole_up_bytes == up(16)
    down = largest.cost.joining_down_bytes
    for lacking, expected in (
        (0, (16, 3, 0)),
        (1, (8, 3, 0)),
        (2 * 2 * 3 * 8, (8, 3, 0)),
        (2 * 2 * 3 * 8 + 1, (4, 3, 0)),
    ):
        placed = put(candidate(Budget(payload_bytes=down + up(16) - lacking)))
        assert how(placed) == expected, lacking
        assert placed.cost.whole_up_bytes == up(expected[0])
        held = {part for part in placed.stage.present if is_lora(part)}
        assert held == {part for part in placed.stage.trained if is_lora(part)}
        assert {rank_start(part) for part in held} == {start for start in (0, 4, 8) if start < expected[0]}
        assert (placed.shortened is None) == (expected[0] == 16)
    assert placed.shortened is not None
    assert (placed.shortened.reason, placed.shortened.needed) == ("payload", float(down + up(16)))


def test_a_budget_that_no_rank_fits_takes_depth_and_then_refuses() -> None:
    least = put(candidate(Budget(flops=1000 + 8)))
    assert how(least) == (4, 1, 0)
    assert {rank_start(part) for part in least.stage.present} == {0}  # nor of what others train beside it
    none = put(candidate(Budget(flops=1000)))
    assert none.refusal is not None
    assert (none.refusal.needed, none.refusal.allowed, none.rank) == (1008.0, 1000.0, 0)
    assert how(put(candidate(Budget(flops=3000 + 24)))) == (4, 3, 0)
    assert how(put(candidate(Budget(flops=3000 + 23)))) == (16, 2, 0)  # depth again begins with the whole rank


def test_memory_is_spared_by_smaller_steps_and_the_optimiser_before_the_rank() -> None:
    """Depth 3 takes 300, a row 10, a rank dimension 6; the other optimiser 40 less."""

    def lean(job: Job, samples) -> Priced:
        plain = narrow_price(job, samples)
        return plain._replace(peak=plain.peak - 40 * (job.hyper.optimizer == "adafactor"))

    job = Job(SLICED, stage_of(), Hyper(batch_size=8, low_memory_optimizer=LowMemoryOptimizer()), SUPERVISED)
    for limit, expected in (
        (476, (16, 3, 0, "adamw")),
        (475, (16, 3, 4, "adamw")),
        (406, (16, 3, 1, "adamw")),
        (405, (16, 3, 4, "adafactor")),
        (366, (16, 3, 1, "adafactor")),
        (365, (8, 3, 1, "adamw")),
        (317, (4, 3, 2, "adafactor")),
        (293, (16, 2, 2, "adamw")),
    ):
        placed = place(job, candidate(Budget(step_memory_bytes=limit)), BYTES, lean)
        assert (*how(placed), placed.hyper.optimizer) == expected, limit


def test_a_device_that_declined_gets_a_smaller_rank_and_never_the_same() -> None:
    why = Refusal("payload", 9.0, 8.0, "B", "measured")
    seen, told = [], []
    while len(seen) < 60:
        placed = put(candidate(declined=tuple(told)))
        if placed.refusal is not None:
            break
        seen.append(how(placed))
        told.append(decline_of(placed, why))
    assert seen[:6] == [(16, 3, 0), (16, 3, 4), (16, 3, 2), (16, 3, 1), (16, 3, 1), (8, 3, 0)]
    assert told[5].rank == 8
    assert [rank for rank, depth, micro in seen if depth == 2 and micro == 0] == [16, 8, 4]
    assert len(seen) == 3 * 3 * 5  # depths, ranks, pieces
    assert placed.refusal == why
    host = replace(why, reason="memory", where=HOST)
    declined = decline_of(put(candidate()), host)
    assert how(put(candidate(declined=(declined,)))) == (8, 3, 0)  # no smaller step helps; fewer bytes do


def test_a_device_that_took_more_than_predicted_gets_a_smaller_rank() -> None:
    """Rank 16 is predicted to cost 3096 FLOPs, 8 3048 and 4 3024; it measured 2 % more."""
    exact = Budget(flops=3000 + 96)
    assert how(put(candidate(exact))) == (16, 3, 0)
    assert how(put(candidate(exact, factors={"flops": 1.02}))) == (4, 3, 0)


@given(st.integers(0, 700), st.integers(900, 3200), st.integers(0, 600))
def test_no_placement_is_over_budget_and_more_never_gives_less(payload: int, flops: int, memory: int) -> None:
    budget = Budget(payload_bytes=payload, flops=flops, step_memory_bytes=memory)
    placed, larger = put(candidate(budget)), put(candidate(replace(budget, payload_bytes=payload + 60)))
    if placed.refusal is None:
        assert verdict(placed.cost, candidate(budget)) is None
        assert (trained_depth(larger.stage), larger.rank) >= (trained_depth(placed.stage), placed.rank)
    else:
        assert placed.refusal.needed > placed.refusal.allowed


def test_frozen_terms_stay_whole_and_so_does_a_stored_prefix() -> None:
    last = stage_of("layerwise")
    small = narrower(last, last)[-1]
    gone = set(last.present) - set(small.present)
    assert gone == {f"lora/{k}/{m}/stage3" for k in (4, 8) for m in "ab"}
    stored = with_cache(Job(SLICED, small, Hyper(batch_size=8), SUPERVISED), "f16")
    assert prefixes(stored) == prefixes(replace(stored, stage=last))
    assert {"lora/8/a/stage2", "lora/4/a/stage1"} <= set(prefixes(stored)["a"].parts)


def test_one_rank_for_all_is_no_choice() -> None:
    whole = replace(SLICED, lora=LoraSpec(16, 32.0, PARTS))
    stage = stage_of(spec=whole)
    assert narrower(stage, stage) == [stage]
    job = Job(whole, stage, Hyper(batch_size=8), SUPERVISED)
    assert place(job, candidate(), dict.fromkeys(part_names(whole), 1), price).rank == 0
