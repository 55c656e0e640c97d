"""Placement where a GPU trains: a card's memory, the process beside it, one pool."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_fixture import MODEL, SENSOR, SUPERVISED, TINY, candidate, price, put

from edgefl.budget.fit import place, trained_depth, verdict
from edgefl.budget.stage_cost import Priced, StageTraffic, cost_of
from edgefl.models.check import token_count
from edgefl.models.spec import part_names
from edgefl.plan.job import Decline, Hyper, Job, Stage
from edgefl.plan.training_samples import prefixes
from edgefl.records import GPU, GPU_MEMORY, HOST, Budget, Capabilities, Cost, Refusal
from edgefl.registry import method
from edgefl.resources.gpu_memory import SEGMENT_BYTES, allocator_bytes


def test_a_step_on_a_card_fits_the_card_and_what_passes_through_the_process_fits_there():
    """100 B on the card, of which 99 to 120 are left beside what the allocator keeps; 50 + 30 B in the process."""
    cost, kept = Cost(step_peak_bytes=100, staging_bytes=30), 7 + SEGMENT_BYTES

    def told(free: int, **limits: int) -> Refusal | None:
        card = {"gpu_memory_bytes": 120 + kept, "gpu_free_bytes": free, "gpu_idle_bytes": 7}
        has = Capabilities(trainer_base_bytes=50, torch_device="cuda", **card)
        return verdict(cost, candidate(Budget(**limits), capabilities=has))

    assert told(100 + kept, memory_bytes=80) is None
    assert told(0) is None  # not measured: the card is large enough
    assert told(99 + kept) == Refusal("memory", 100.0, 99.0, "B", GPU_MEMORY, GPU)
    assert told(110 + kept, gpu_memory_bytes=99 + kept) == Refusal("memory", 100.0, 99.0, "B", GPU_MEMORY, GPU)
    assert told(99 + kept, gpu_memory_bytes=110 + kept).allowed == 99.0
    assert told(110 + kept, gpu_memory_bytes=5).allowed == 0.0
    assert told(110 + kept, memory_bytes=79) == Refusal("memory", 80.0, 79.0, "B", "trainer process", HOST)
    assert told(110 + kept, step_memory_bytes=99).reason == "step_memory"


@given(st.integers(0, 2**40), st.integers(0, 2**31), st.integers(0, 2**40))
def test_what_fits_the_plan_fits_the_allocator(budget, idle, step):
    """The allocator may hold the step beside what it kept, and a segment more, whatever limit it is given for it."""
    has = Capabilities(torch_device="cuda", gpu_memory_bytes=2**41, gpu_idle_bytes=idle)
    limit = allocator_bytes(Budget(gpu_memory_bytes=budget), shared=False, base_bytes=0, host_bytes=0, idle_bytes=idle)
    if (
        step
        and verdict(Cost(step_peak_bytes=step), candidate(Budget(gpu_memory_bytes=budget), capabilities=has)) is None
    ):
        assert idle + step + SEGMENT_BYTES <= limit


def test_where_processor_and_gpu_share_one_pool_there_is_one_budget():
    cost = Cost(step_peak_bytes=100, staging_bytes=30)
    for torch_device in ("cuda", "cpu", "auto"):
        has = Capabilities(trainer_base_bytes=50, torch_device=torch_device)
        assert verdict(cost, candidate(Budget(memory_bytes=150), capabilities=has)) is None
        refused = Refusal("memory", 150.0, 149.0, "B", "trainer process")
        assert verdict(cost, candidate(Budget(memory_bytes=149), capabilities=has)) == refused
        # Nobody can have more than there is, whatever the budget.
        small = msgspec.structs.replace(has, memory_total_bytes=149)
        assert verdict(cost, candidate(Budget(memory_bytes=200), capabilities=small)) == refused


def test_a_card_that_nobody_trains_on_is_no_memory():
    has = Capabilities(trainer_base_bytes=50, torch_device="cpu", gpu_memory_bytes=10, gpu_free_bytes=5)
    cost = Cost(step_peak_bytes=100, staging_bytes=30)
    assert verdict(cost, candidate(Budget(memory_bytes=150, gpu_memory_bytes=5), capabilities=has)) is None


def test_a_small_card_gets_smaller_micro_batches():
    """Whole batches of 8 take 180 B of the card in one stage (100 + 10 a sample), of 4 they take 140."""
    stage = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "frozen")[1]
    has = Capabilities(torch_device="cuda", gpu_memory_bytes=2**30)
    peak = put(stage, candidate(capabilities=has)).cost.step_peak_bytes
    placed = put(stage, candidate(Budget(gpu_memory_bytes=SEGMENT_BYTES + peak - 1), capabilities=has))
    assert (placed.refusal, placed.hyper.micro_batch) == (None, 4)
    full = msgspec.structs.replace(has, gpu_free_bytes=1)
    assert put(stage, candidate(capabilities=full)).refusal.detail == GPU_MEMORY


def test_what_a_card_s_round_takes_of_the_process_by_hand():
    """Copies of what is sent and of what stays, and one part in hand; or one batch: 2 x 16 x 3 floats a sample."""
    stage = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "frozen")[1]
    assert put(stage, candidate()).cost.staging_bytes == 8 * 2 * 16 * 3 * 4
    heavy = dict.fromkeys(part_names(MODEL), 10_000)
    assert put(stage, candidate(), part_bytes=heavy).cost.staging_bytes == 10_000 * (len(stage.trained) + 1)
    poor = msgspec.structs.replace(SUPERVISED, repair={"poverty": {}})
    twice = put(stage, candidate(), slots=poor, part_bytes=heavy).cost.staging_bytes
    assert twice == 10_000 * (2 * len(stage.trained) + 1)


def test_what_stored_prefixes_pass_through_a_card_s_process_by_hand():
    """Of each row in a batch both sensors' tokens are read, in f16; to store them, 32 rows at a time, 8 B a value."""
    stage = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "frozen")[1]
    values = token_count(SENSOR) * SENSOR.width
    assert {prefix.tokens for prefix in prefixes(cached(stage, 256)).values()} == {token_count(SENSOR)}
    for batch, micro, expected in (
        (16, 0, 16 * values * 8),
        (256, 0, 256 * 2 * values * 2),  # only 32 of them at a time
        (256, 8, 256 * 2 * values * 2),
        (32, 8, 32 * 2 * values * 2),
    ):
        job = cached(stage, batch, micro)
        assert cost_of(job, candidate(), Priced(10, 0.0), StageTraffic(stage, {})).staging_bytes == expected
    # A frozen part is read to fill the store, and is not there any more when parts are sent.
    heavy = {"a/embed": 10**9}
    assert cost_of(cached(stage, 16), candidate(), Priced(10, 0.0), StageTraffic(stage, heavy)).staging_bytes == 10**9


def cached(stage: Stage, batch: int, micro: int = 0) -> Job:
    return Job(MODEL, stage, Hyper(batch_size=batch, micro_batch=micro, cache="f16"), SUPERVISED)


def test_a_shortage_of_the_process_beside_a_card_is_answered_by_training_less():
    """Each stage trains 10 parts of 1 kB and more; what is sent of them passes through the process."""
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    heavy = dict.fromkeys(part_names(MODEL), 1_000_000)
    has = Capabilities(trainer_base_bytes=50, torch_device="cuda", gpu_memory_bytes=2**34)
    whole = put(stage, candidate(capabilities=has), part_bytes=heavy)
    assert (trained_depth(whole.stage), whole.hyper.micro_batch) == (4, 0)
    limit = 50 + whole.cost.staging_bytes - 1
    tried = []

    def noted(job: Job, samples) -> Priced:
        tried.append((trained_depth(job.stage), job.hyper.micro_batch))
        return price(job, samples)

    less = candidate(Budget(memory_bytes=limit), capabilities=has)
    placed = place(Job(MODEL, stage, Hyper(batch_size=8), SUPERVISED), less, heavy, noted)
    assert (placed.refusal, trained_depth(placed.stage), placed.hyper.micro_batch) == (None, 3, 0)
    assert tried == [(4, 0), (3, 0)]


@pytest.mark.parametrize(("where", "answer"), [(HOST, (3, 0)), (GPU, (4, 4))])
def test_a_decline_says_which_memory_was_short(where, answer):
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    why = Refusal("memory", 2.0, 1.0, "B", where=where)
    has = Capabilities(torch_device="cuda", gpu_memory_bytes=2**34)
    placed = put(stage, candidate(declined=(Decline(4, 8, False, why),), capabilities=has), part_bytes=TINY)
    assert (trained_depth(placed.stage), placed.hyper.micro_batch) == answer
