"""What a device gives up, and in which order, when it declined or its budget is short."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from plan_fixture import MODEL, PART_BYTES, SUPERVISED, candidate, price, put

from edgefl.budget.fit import decline_of, place, trained_depth, verdict
from edgefl.budget.stage_cost import Priced, StageTraffic, cost_of
from edgefl.plan.job import Decline, Hyper, Job, LowMemoryOptimizer, Placement
from edgefl.records import Budget, Capabilities, Refusal
from edgefl.registry import method, methods


def test_what_was_declined_is_not_offered_again_nor_anything_larger():
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    why = Refusal("ceiling", 3e9, 2e9, "B", "measured")
    device = candidate(declined=(Decline(4, 4, False, why),))
    placed = put(stage, device)
    assert (placed.hyper.micro_batch, trained_depth(placed.stage)) == (2, 4)
    device = candidate(declined=(Decline(4, 4, False, why), Decline(4, 1, False, why, True)))
    assert (put(stage, device).hyper.micro_batch, trained_depth(put(stage, device).stage)) == (0, 3)
    device = candidate(declined=(Decline(1, 1, False, why, True),))
    assert put(stage, device).refusal == why  # nothing smaller is left: the device's own numbers


def test_a_device_that_lacks_a_method_is_not_asked_for_less_of_it():
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    why = Refusal("method", detail="not installed on this device: objective: gmc2")
    assert put(stage, candidate(declined=(Decline(4, 8, False, why),))).refusal == why


def leaner(job: Job, samples) -> Priced:
    """As ``price``, with 5 less where blocks are computed anew, and 40 less with the lean optimiser."""
    plain = price(job, samples)
    return plain._replace(peak=plain.peak - 5 * job.hyper.checkpoint - 40 * (job.hyper.optimizer == "adafactor"))


LEAN = LowMemoryOptimizer("adafactor", {"head": 0.1})


def put_lean(budget: int | None, declined: tuple[Decline, ...] = (), lean: LowMemoryOptimizer | None = LEAN):
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    hyper = Hyper(batch_size=8, lr={"head": 0.2}, low_memory_optimizer=lean)
    device = candidate(Budget(step_memory_bytes=budget), declined=declined)
    return place(Job(MODEL, stage, hyper, SUPERVISED), device, PART_BYTES, leaner)


def how(placed: Placement) -> tuple[int, bool, str, int]:
    hyper = placed.hyper
    return hyper.micro_batch, hyper.checkpoint, hyper.optimizer, trained_depth(placed.stage)


def test_blocks_are_computed_anew_before_the_optimiser_changes_and_that_before_depth():
    for limit, expected in (
        (480, (0, False, "adamw", 4)),
        (410, (1, False, "adamw", 4)),
        (409, (1, True, "adamw", 4)),
        (404, (4, False, "adafactor", 4)),
        (365, (1, True, "adafactor", 4)),
        (364, (4, False, "adamw", 3)),
    ):
        assert how(put_lean(limit)) == expected, limit
    assert put_lean(404).hyper.lr == {"head": 0.1}
    assert put_lean(480).hyper.lr == {"head": 0.2}
    assert how(put_lean(404, lean=None)) == (0, False, "adamw", 3)


def test_what_trains_less_than_the_stage_keeps_the_limit_that_the_whole_stage_exceeds():
    assert put_lean(365).shortened is None  # all stages are trained, if in pieces
    # In its smallest pieces with the lean optimiser the whole stage takes 365: see above.
    assert put_lean(364).shortened == Refusal("step_memory", 365.0, 364.0, "B", "memory above the idle trainer")
    why = Refusal("ceiling", 3e9, 2e9, "B", "measured")
    assert put_lean(None, (Decline(4, 1, False, why, True, True),)).shortened == why  # as measured by the device


def test_no_pieces_are_priced_where_what_they_do_not_spare_is_too_much():
    """Weights and the like take 100 for each depth, activations 10 for each row of a piece."""
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    seen: list[tuple[int, int]] = []

    def watched(job: Job, samples) -> Priced:
        seen.append((trained_depth(job.stage), job.hyper.micro_batch))
        activations = 10 * (job.hyper.micro_batch or job.hyper.batch_size)
        return price(job, samples)._replace(memory={"weights": 100 * seen[-1][0], "activations": activations})

    def tried(limit: int) -> list[tuple[int, int]]:
        seen.clear()
        device = candidate(Budget(step_memory_bytes=limit))
        place(Job(MODEL, stage, Hyper(batch_size=8), SUPERVISED), device, PART_BYTES, watched)
        return seen

    assert tried(330) == [(4, 0), (3, 0), (3, 4), (3, 2)]
    assert tried(400) == [(4, 0), (4, 4), (4, 2), (4, 1), (4, 1), (3, 0)]  # 400 would do if pieces had no rows
    assert tried(90) == [(4, 0), (3, 0), (2, 0), (1, 0), (1, 4), (1, 2), (1, 1), (1, 1)]  # the least it lacks is told


def test_a_decline_leaves_what_takes_less():
    why = Refusal("ceiling", 2.0, 1.0, "B")
    placed = put_lean(480)
    declined = decline_of(placed, why)
    assert declined == Decline(4, 8, False, why, False, False)
    seen, told = [how(placed)], [declined]
    while placed.refusal is None and len(seen) < 60:
        placed = put_lean(None, tuple(told))
        seen.append(how(placed))
        told.append(decline_of(placed, why))
    assert seen[:5] == [
        (0, False, "adamw", 4),
        (4, False, "adamw", 4),
        (2, False, "adamw", 4),
        (1, False, "adamw", 4),
        (1, True, "adamw", 4),
    ]
    assert seen[5:7] == [(0, False, "adafactor", 4), (4, False, "adafactor", 4)]
    assert placed.refusal == why
    assert len(seen) == 1 + 4 * 10  # at each of four depths: four sizes and one anew, with either optimiser


def test_what_is_not_for_want_of_memory_keeps_its_optimiser():
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    seen = []

    def watched(job, samples):
        seen.append((trained_depth(job.stage), job.hyper.optimizer))
        return price(job, samples)

    hyper = Hyper(batch_size=8, low_memory_optimizer=LowMemoryOptimizer())
    placed = place(Job(MODEL, stage, hyper, SUPERVISED), candidate(Budget(flops=2000)), PART_BYTES, watched)
    assert (placed.hyper.optimizer, seen) == ("adamw", [(4, "adamw"), (3, "adamw"), (2, "adamw")])


def test_the_lean_optimiser_is_tried_where_any_size_lacked_memory():
    """The whole batch lacks memory; smaller ones, which cost half as many FLOPs more, break that limit."""
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    hyper, device = Hyper(batch_size=8, low_memory_optimizer=LEAN), candidate(Budget(step_memory_bytes=450, flops=5000))
    assert how(place(Job(MODEL, stage, hyper, SUPERVISED), device, PART_BYTES, leaner)) == (0, False, "adafactor", 4)
    # Stored, it lacks disk; what is not stored was declined with the usual optimiser in every size.
    third = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[-1]
    why = Refusal("ceiling", 2.0, 1.0, "B")
    hot = candidate(Budget(disk_bytes=300), declined=(Decline(1, 1, False, why, True, False),))
    hyper = Hyper(batch_size=8, cache="f16", low_memory_optimizer=LEAN)
    placed = place(Job(MODEL, third, hyper, SUPERVISED), hot, PART_BYTES, leaner)
    assert (placed.refusal, placed.hyper.cache, placed.hyper.optimizer) == (None, "", "adafactor")


def test_bf16_is_for_trainers_on_a_gpu():
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    hyper = Hyper(batch_size=8, precision="bf16")
    for torch_device, precision in (("cpu", "f32"), ("", "f32"), ("cuda", "bf16"), ("cuda:1", "bf16")):
        device = candidate(capabilities=Capabilities(gpu="a card", torch_device=torch_device))
        assert place(Job(MODEL, stage, hyper, SUPERVISED), device, PART_BYTES, price).hyper.precision == precision


DECLINES = st.builds(
    Decline,
    depth=st.integers(1, 4),
    micro_batch=st.integers(1, 8),
    cached=st.booleans(),
    refusal=st.just(Refusal("ceiling", 2.0, 1.0, "B")),
    checkpoint=st.booleans(),
    low_memory=st.booleans(),
    on_disk=st.booleans(),
)


def on_disk(job: Job, samples) -> Priced:
    """``leaner``, with 200 less and in files where weights lie on disk."""
    lean, moved = leaner(job, samples), 200 * (job.hyper.weights == "disk")
    return lean._replace(peak=lean.peak - moved, in_files=moved)


def put_auto(budget: int, weights: str = "auto", device: str = "cpu", declined: tuple[Decline, ...] = ()):
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    hyper = Hyper(batch_size=8, lr={"head": 0.2}, low_memory_optimizer=LEAN, weights=weights)
    has = candidate(Budget(step_memory_bytes=budget), declined=declined, capabilities=Capabilities(torch_device=device))
    with patch("edgefl.budget.fit.LEAST_BYTES_ON_DISK", 1):
        return place(Job(MODEL, stage, hyper, SUPERVISED), has, PART_BYTES, on_disk)


def test_weights_go_to_disk_after_smaller_steps_and_before_the_optimiser_changes():
    for needed in (410, 409):
        assert put_auto(needed).hyper.weights == "memory"
    placed = put_auto(404)
    assert (placed.hyper.weights, placed.hyper.optimizer, placed.hyper.micro_batch) == ("disk", "adamw", 0)
    assert placed.cost.disk_bytes - put_auto(480).cost.disk_bytes == 200
    assert put_auto(404, "memory").hyper.optimizer == "adafactor"
    assert put_auto(480, "disk").hyper.weights == "disk"
    assert put_auto(404, device="cuda").hyper.weights == "memory"  # a card's own memory
    assert put_auto(480, "disk", device="cuda").hyper.weights == "memory"


def test_what_was_declined_with_weights_in_memory_is_offered_with_weights_on_disk():
    why = Refusal("ceiling", 3e9, 2e9, "B", "measured")
    placed = put_auto(480, declined=(Decline(4, 1, False, why, True),))
    assert (placed.hyper.weights, trained_depth(placed.stage)) == ("disk", 4)
    both = Decline(4, 1, False, why, True), Decline(4, 1, False, why, True, on_disk=True)
    assert put_auto(480, declined=both).hyper.optimizer == "adafactor"


def test_weights_go_to_disk_where_smaller_steps_cost_too_many_flops():
    """440 is short of a whole batch in memory, and smaller ones take half as many FLOPs again."""
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    job = Job(MODEL, stage, Hyper(batch_size=8, weights="auto"), SUPERVISED)
    has = candidate(Budget(step_memory_bytes=440, flops=4000))
    with patch("edgefl.budget.fit.LEAST_BYTES_ON_DISK", 1):
        placed = place(job, has, PART_BYTES, on_disk)
    assert placed.refusal is None
    assert (placed.hyper.weights, placed.hyper.micro_batch, trained_depth(placed.stage)) == ("disk", 0, 4)


def test_a_frozen_part_lies_on_disk_while_its_outcome_is_stored():
    third = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[-1]
    disk, memory = (
        Job(MODEL, third, Hyper(batch_size=8, cache="f16", weights=where), SUPERVISED) for where in ("disk", "memory")
    )
    parts = PART_BYTES | {"a/embed": 10_000}
    with patch("edgefl.budget.fit.LEAST_BYTES_ON_DISK", 1):
        far, near = (place(job, candidate(), parts, on_disk).cost for job in (disk, memory))
    assert far.disk_bytes - near.disk_bytes == 10_000  # of the step's own weights there are 200


def test_what_is_sent_from_files_is_in_memory_twice():
    """Of the largest part the pages, and it encoded; the rest stays in files."""
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    job = Job(MODEL, stage, Hyper(batch_size=8, weights="disk"), SUPERVISED)
    traffic = StageTraffic(stage, PART_BYTES, None, "", {}, {})
    cost = cost_of(job, candidate(), Priced(0, 0.0, in_files=10**9), traffic)
    largest = max(PART_BYTES.values())
    assert cost.memory == {"weights": 0, "transit": 2 * largest}


def test_a_full_disk_rules_out_weights_on_it_alone():
    why = Refusal("disk", detail="No space left on device")
    full = (Decline(4, 8, False, why, on_disk=True),)
    assert put_auto(480, declined=full).hyper.weights == "memory"
    assert put_auto(404, declined=full).hyper.optimizer == "adafactor"
    assert put_auto(404, declined=full).hyper.weights == "memory"


@given(
    st.sampled_from(sorted(methods("schedule"))),
    st.lists(DECLINES, max_size=4),
    st.none() | st.integers(50, 500),
    st.none() | st.integers(500, 8000),
    st.booleans(),
)
def test_a_placement_fits_and_is_less_than_all_that_was_declined(name, declined, memory, flops, lean):
    stage = method("schedule", name).stages(MODEL, [1, 1, 1], "auto")[-1]
    device = candidate(Budget(step_memory_bytes=memory, flops=flops), declined=tuple(declined))
    hyper = Hyper(batch_size=8, cache="f16", low_memory_optimizer=LEAN if lean else None)
    placed = place(Job(MODEL, stage, hyper, SUPERVISED), device, PART_BYTES, leaner)
    if placed.refusal is not None:
        assert placed.refusal.needed is None or placed.refusal.needed > placed.refusal.allowed
        return
    assert verdict(placed.cost, device) is None
    now = decline_of(placed, Refusal())
    for was in declined:
        smaller = now.depth < was.depth or now.micro_batch < was.micro_batch
        spared = now.checkpoint > was.checkpoint or now.low_memory > was.low_memory or now.on_disk > was.on_disk
        assert smaller or now.cached != was.cached or spared
