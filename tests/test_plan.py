"""From a stage and a budget to what a device trains: by hand, on two modalities."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.models.sizes import encoder_of_size
from edgefl.models.spec import ModelSpec, part_names, token_count
from edgefl.plan.cost import Priced, cost_of
from edgefl.plan.eligibility import verdict
from edgefl.plan.fit import decline_of, micro_batches, place, trained_depth
from edgefl.plan.needs import LIBRARY_BYTES, complete_only, usable_samples
from edgefl.plan.prefix import prefixes, stored_bytes
from edgefl.plan.schedule import SCHEDULES, restrict
from edgefl.plan.values import Candidate, Decline, Hyper, Job, Lean, Placement, Slots, Stage, Transfer
from edgefl.records import GPU, GPU_MEMORY, HOST, Budget, Capabilities, Cost, Refusal
from edgefl.resources.cuda import SEGMENT_BYTES, allocator_bytes

SHAPE = (16, 3)
SENSOR = encoder_of_size("sensor", "tiny", SHAPE)
MODEL = ModelSpec({"a": SENSOR, "b": SENSOR}, stages=3, classes=2, label_names=("x", "y"))
SUPERVISED = Slots({"cross_entropy": {"weight": 1.0}}, {"zero": {}}, {"none": {}})
ALL = {"": 100, "a": 100, "b": 100}
PART_BYTES = dict.fromkeys(part_names(MODEL), 10)
TINY = dict.fromkeys(part_names(MODEL), 1)  # parts whose coming and going takes less than any step
HEADS = ["a/norm", "head/a", "b/norm", "head/b", "fusion", "task"]


def candidate(budget: Budget | None = None, **fields) -> Candidate:
    fields = {"device": "d", "samples": ALL, "modalities": {"a": SHAPE, "b": SHAPE}, **fields}
    return Candidate(budget=budget or Budget(), **fields)


def price(job: Job, samples) -> Priced:
    """A made-up price that grows with depth and micro-batch, as the real one does."""
    size = job.hyper.micro_batch or job.hyper.batch_size
    replays = 1.5 if job.hyper.micro_batch else 1.0
    return Priced(100 * trained_depth(job.stage) + 10 * size, 1000.0 * replays * trained_depth(job.stage))


def put(stage: Stage, device: Candidate, batch: int = 8, slots: Slots = SUPERVISED, part_bytes=PART_BYTES):
    return place(MODEL, stage, Hyper(batch_size=batch), slots, device, part_bytes, price)


def test_memory_while_parts_come_and_go_counts():
    """What trains in less still holds the model, and one part more while it is read, two while changes are packed."""
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    heavy = dict.fromkeys(part_names(MODEL), 100)
    assert put(stage, candidate(), part_bytes=heavy).cost.step_peak_bytes == 100 * (len(stage.present) + 1)
    packed = Transfer(up=(("*", "delta+int8"),))
    placed = place(MODEL, stage, Hyper(batch_size=8), SUPERVISED, candidate(), heavy, price, transfer=packed)
    assert placed.cost.step_peak_bytes == 100 * (len(stage.present) + 2)


def test_micro_batches_halve_down_to_a_thirty_second():
    assert micro_batches(16) == [0, 8, 4, 2, 1]
    assert micro_batches(24) == [0, 12, 6, 3, 1]
    assert micro_batches(256) == [0, 128, 64, 32, 16, 8]
    assert micro_batches(2) == [0, 1]


@given(st.integers(2, 5000))
def test_micro_batches_shrink_and_stay_below_the_batch(batch):
    whole, *sizes = micro_batches(batch)
    assert whole == 0
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(1 <= size < batch for size in sizes)


def test_the_order_of_retreat_micro_batch_then_depth_then_refusal():
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")  # prices: 100 per trained stage + 10 per row
    for limit, micro, depth in ((480, 0, 4), (479, 4, 4), (410, 1, 4), (409, 0, 3), (300, None, 2), (110, 1, 1)):
        placed = put(stage, candidate(Budget(step_memory_bytes=limit)), part_bytes=TINY)
        assert placed.refusal is None
        if micro is not None:
            assert (placed.hyper.micro_batch, trained_depth(placed.stage)) == (micro, depth)
        assert placed.cost.step_peak_bytes <= limit
        assert placed.predicted["step_peak_bytes"].kind == "predicted"
    refused = put(stage, candidate(Budget(step_memory_bytes=109)), part_bytes=TINY)
    assert refused.refusal == Refusal("step_memory", 110.0, 109.0, "B", "memory above the idle trainer")


def test_a_smaller_micro_batch_is_not_tried_against_a_limit_it_can_not_help():
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    seen = []

    def watched(job, samples):
        seen.append((trained_depth(job.stage), job.hyper.micro_batch))
        return price(job, samples)

    device = candidate(Budget(flops=2000))
    placed = place(MODEL, stage, Hyper(batch_size=8), SUPERVISED, device, PART_BYTES, watched)
    assert (placed.hyper.micro_batch, trained_depth(placed.stage)) == (0, 2)
    assert seen == [(4, 0), (3, 0), (2, 0)]


def stored(job: Job, samples) -> Priced:
    """As ``price``, with 60 less where the prefix is stored and 50 FLOPs to fill each part."""
    plain = price(job, samples)
    filling = {part: 50.0 for prefix in prefixes(job).values() for part in prefix.parts}
    return Priced(plain.peak - 60 * bool(filling), plain.flops - 500 * bool(filling), filling)


def put_stored(stage: Stage, device: Candidate, before: Stage | None = None):
    hyper = Hyper(batch_size=8, cache="f16")
    return place(MODEL, stage, hyper, SUPERVISED, device, PART_BYTES, stored, before=before)


def test_prefixes_are_stored_where_there_are_any_and_the_disk_allows():
    first, second, third = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "auto")
    assert put_stored(first, candidate()).hyper.cache == ""  # embeddings are trained
    placed = put_stored(third, candidate())
    assert (placed.hyper.cache, placed.cost.step_peak_bytes, placed.cost.filling_flops) == ("f16", 120, 300.0)
    rows = placed.cost.disk_bytes - put(third, candidate()).cost.disk_bytes
    assert rows == stored_bytes(Job(MODEL, third, Hyper(cache="f16"), SUPERVISED), ALL) > 0
    tight = put_stored(third, candidate(Budget(disk_bytes=placed.cost.disk_bytes - 1)))
    assert (tight.hyper.cache, tight.cost.step_peak_bytes, tight.refusal) == ("", 180, None)
    assert put_stored(second, candidate(Budget(step_memory_bytes=120))).hyper.cache == "f16"


def test_the_first_round_of_a_stage_computes_what_the_stage_before_has_not_stored():
    first, second, third = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "auto")
    flops = [put_stored(third, candidate(), before).predicted_first["flops"].value for before in (None, first, second)]
    usual = put_stored(third, candidate()).predicted["flops"].value
    assert flops == [usual + 6 * 50, usual + 6 * 50, usual + 2 * 50]  # of two modalities: embed, two stages; one stage
    assert put_stored(first, candidate()).predicted_first == {}


def test_filling_that_does_not_fit_is_left_away():
    """Filling takes 400 here, a step without it 180."""
    third = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "auto")[-1]

    def price_(job: Job, samples) -> Priced:
        return stored(job, samples)._replace(filling_peak=400 if prefixes(job) else 0)

    def put_(memory: int):
        hyper, device = Hyper(batch_size=8, cache="f16"), candidate(Budget(step_memory_bytes=memory))
        return place(MODEL, third, hyper, SUPERVISED, device, PART_BYTES, price_)

    assert (put_(400).hyper.cache, put_(400).predicted_first["step_peak_bytes"].value) == ("f16", 400.0)
    assert put_(400).predicted["step_peak_bytes"].value == 120.0
    assert (put_(399).hyper.cache, put_(399).hyper.micro_batch, put_(399).cost.step_peak_bytes) == ("", 0, 180)


def test_what_others_train_is_not_stored():
    """A device that can pay one stage of an end-to-end round: what is before it changes in every round."""
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    placed = put_stored(stage, candidate(Budget(flops=1000.0)))
    assert (trained_depth(placed.stage), placed.hyper.cache, placed.refusal) == (1, "", None)


@pytest.mark.parametrize("reason", ["disk", "cache"])
def test_what_can_not_be_stored_is_computed_in_every_step(reason):
    third = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "auto")[-1]
    device = candidate(declined=(Decline(1, 8, True, Refusal(reason, detail="no room")),))
    placed = put_stored(third, device)
    assert (placed.hyper.cache, placed.hyper.micro_batch, placed.refusal) == ("", 0, None)
    hot = candidate(declined=(Decline(1, 8, False, Refusal("ceiling", 2.0, 1.0, "B")),))
    assert (put_stored(third, hot).hyper.cache, put_stored(third, hot).hyper.micro_batch) == (
        "f16",
        0,
    )  # takes less than what failed
    hot = candidate(declined=(Decline(1, 8, True, Refusal("ceiling", 2.0, 1.0, "B")),))
    assert (put_stored(third, hot).hyper.cache, put_stored(third, hot).hyper.micro_batch) == ("f16", 4)
    told = candidate(declined=(Decline(1, 8, True, Refusal("packed", detail="unpacks to something else")),))
    assert (put_stored(third, told).hyper.cache, put_stored(third, told).hyper.micro_batch) == ("f16", 0)


def test_bytes_down_are_what_the_round_before_changed_and_bytes_up_what_is_trained():
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    placed = put(stage, candidate(Budget(flops=1000)))  # trains one encoder stage of 3, embeddings frozen
    assert placed.cost.payload_down_bytes == 10 * 14
    assert placed.cost.payload_up_bytes == 10 * (2 + 6)
    assert placed.cost.disk_bytes == 10 * 14 + 80
    refused = put(stage, candidate(Budget(payload_bytes=219)))
    assert refused.refusal == Refusal("payload", 220.0, 219.0, "B", "tensors down and up in one round")


def test_what_was_declined_is_not_offered_again_nor_anything_larger():
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    why = Refusal("ceiling", 3e9, 2e9, "B", "measured")
    device = candidate(declined=(Decline(4, 4, False, why),))
    placed = put(stage, device)
    assert (placed.hyper.micro_batch, trained_depth(placed.stage)) == (2, 4)
    device = candidate(declined=(Decline(4, 4, False, why), Decline(4, 1, False, why, True)))
    assert (put(stage, device).hyper.micro_batch, trained_depth(put(stage, device).stage)) == (0, 3)
    device = candidate(declined=(Decline(1, 1, False, why, True),))
    assert put(stage, device).refusal == why  # nothing smaller is left: the device's own numbers


def leaner(job: Job, samples) -> Priced:
    """As ``price``, with 5 less where blocks are computed anew, and 40 less with the lean optimiser."""
    plain = price(job, samples)
    return plain._replace(peak=plain.peak - 5 * job.hyper.checkpoint - 40 * (job.hyper.optimizer == "adafactor"))


LEAN = Lean("adafactor", {"head": 0.1})


def put_lean(budget: int | None, declined: tuple[Decline, ...] = (), lean: Lean | None = LEAN):
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    hyper = Hyper(batch_size=8, lr={"head": 0.2}, lean=lean)
    device = candidate(Budget(step_memory_bytes=budget), declined=declined)
    return place(MODEL, stage, hyper, SUPERVISED, device, PART_BYTES, leaner)


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
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    seen = []

    def watched(job, samples):
        seen.append((trained_depth(job.stage), job.hyper.optimizer))
        return price(job, samples)

    hyper = Hyper(batch_size=8, lean=Lean())
    placed = place(MODEL, stage, hyper, SUPERVISED, candidate(Budget(flops=2000)), PART_BYTES, watched)
    assert (placed.hyper.optimizer, seen) == ("adamw", [(4, "adamw"), (3, "adamw"), (2, "adamw")])


def test_the_lean_optimiser_is_tried_where_any_size_lacked_memory():
    """The whole batch lacks memory; smaller ones, which cost half as many FLOPs more, break that limit."""
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    hyper, device = Hyper(batch_size=8, lean=LEAN), candidate(Budget(step_memory_bytes=450, flops=5000))
    assert how(place(MODEL, stage, hyper, SUPERVISED, device, PART_BYTES, leaner)) == (0, False, "adafactor", 4)
    # Stored, it lacks disk; what is not stored was declined with the usual optimiser in every size.
    third = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "auto")[-1]
    why = Refusal("ceiling", 2.0, 1.0, "B")
    hot = candidate(Budget(disk_bytes=300), declined=(Decline(1, 1, False, why, True, False),))
    hyper = Hyper(batch_size=8, cache="f16", lean=LEAN)
    placed = place(MODEL, third, hyper, SUPERVISED, hot, PART_BYTES, leaner)
    assert (placed.refusal, placed.hyper.cache, placed.hyper.optimizer) == (None, "", "adafactor")


def test_bf16_is_for_trainers_on_a_gpu():
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    hyper = Hyper(batch_size=8, precision="bf16")
    for torch_device, precision in (("cpu", "f32"), ("", "f32"), ("cuda", "bf16"), ("cuda:1", "bf16")):
        device = candidate(capabilities=Capabilities(gpu="a card", torch_device=torch_device))
        assert place(MODEL, stage, hyper, SUPERVISED, device, PART_BYTES, price).hyper.precision == precision


DECLINES = st.builds(
    Decline,
    depth=st.integers(1, 4),
    micro_batch=st.integers(1, 8),
    cached=st.booleans(),
    refusal=st.just(Refusal("ceiling", 2.0, 1.0, "B")),
    checkpoint=st.booleans(),
    leaned=st.booleans(),
)


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.lists(DECLINES, max_size=4),
    st.none() | st.integers(50, 500),
    st.none() | st.integers(500, 8000),
    st.booleans(),
)
def test_a_placement_fits_and_is_less_than_all_that_was_declined(name, declined, memory, flops, lean):
    stage = SCHEDULES[name](MODEL, [1, 1, 1], "auto")[-1]
    device = candidate(Budget(step_memory_bytes=memory, flops=flops), declined=tuple(declined))
    hyper = Hyper(batch_size=8, cache="f16", lean=LEAN if lean else None)
    placed = place(MODEL, stage, hyper, SUPERVISED, device, PART_BYTES, leaner)
    if placed.refusal is not None:
        assert placed.refusal.needed is None or placed.refusal.needed > placed.refusal.allowed
        return
    assert verdict(placed.cost, device) is None
    now = decline_of(placed, Refusal())
    for was in declined:
        smaller = now.depth < was.depth or now.micro_batch < was.micro_batch
        assert smaller or now.cached != was.cached or now.checkpoint > was.checkpoint or now.leaned > was.leaned


def test_a_device_trains_only_modalities_it_has():
    stage = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "auto")[0]
    placed = put(stage, candidate(samples={"": 20, "a": 20}, modalities={"a": SHAPE}))
    assert placed.refusal is None
    assert not any("b" in part.split("/") for part in placed.stage.present)


def test_a_device_with_nothing_in_common_is_told_both_sides():
    stage = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "auto")[0]
    refusal = put(stage, candidate(samples={"": 100, "c": 100}, modalities={"c": (4,)})).refusal
    assert refusal.reason == "data"
    assert refusal.detail == "this device has c, the model takes a, b"


@pytest.mark.parametrize(
    ("fields", "slots", "allowed"),
    [
        ({"samples": {"": 7, "a": 7, "b": 7}}, SUPERVISED, 7.0),
        ({"class_counts": (2, 3)}, SUPERVISED, 5.0),
        ({"class_counts": (0, 0)}, SUPERVISED, 0.0),
        ({"samples": {"": 90, "a": 90, "b": 5}}, msgspec.structs.replace(SUPERVISED, missing={"ignore": {}}), 5.0),
        ({"samples": {"": 90, "a": 90, "b": 4}}, Slots({"clip": {"weight": 1.0}}, {"zero": {}}, {}), 4.0),
    ],
)
def test_a_share_that_can_not_fill_a_batch_is_refused_with_both_numbers(fields, slots, allowed):
    stage = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "auto")[0]
    refusal = put(stage, candidate(**fields), slots=slots).refusal
    assert (refusal.reason, refusal.needed, refusal.allowed, refusal.unit) == ("data", 8.0, allowed, "samples")


def test_samples_of_another_shape_are_refused():
    stage = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "auto")[0]
    refusal = put(stage, candidate(modalities={"a": (17, 3)})).refusal
    assert refusal.reason == "data"
    assert "(17, 3)" in refusal.detail
    assert "(16, 3)" in refusal.detail


def test_usable_samples_by_hand():
    samples = {"": 10, "a": 9, "b": 4}
    assert usable_samples(SUPERVISED, samples, ["a", "b"]) == 10
    assert usable_samples(SUPERVISED, samples, ["b"]) == 4
    assert usable_samples(SUPERVISED, samples, ["c"]) == 0
    ignoring = msgspec.structs.replace(SUPERVISED, missing={"ignore": {}})
    assert (complete_only(ignoring), usable_samples(ignoring, samples, ["a", "b"])) == (True, 4)


def test_each_limit_of_a_budget_refuses_with_its_own_name():
    cost = Cost(step_peak_bytes=10, flops=20.0, payload_down_bytes=15, payload_up_bytes=15, disk_bytes=40)
    for field, reason, needed in (
        ("step_memory_bytes", "step_memory", 10),
        ("flops", "flops", 20),
        ("payload_bytes", "payload", 30),
        ("disk_bytes", "disk", 40),
    ):
        assert verdict(cost, candidate(Budget(**{field: needed}))) is None
        refusal = verdict(cost, candidate(Budget(**{field: needed - 1})))
        assert (refusal.reason, refusal.needed, refusal.allowed) == (reason, needed, needed - 1)


def test_the_process_limit_speaks_once_the_idle_trainer_is_measured():
    cost, budget = Cost(step_peak_bytes=10), Budget(memory_bytes=105)
    assert verdict(cost, candidate(budget)) is None
    measured = candidate(budget, capabilities=Capabilities(trainer_base_bytes=96))
    assert verdict(cost, measured) == Refusal("memory", 106.0, 105.0, "B", "trainer process")


def test_libraries_of_the_encoders_that_a_device_has_count_for_its_process():
    seen = encoder_of_size("vision", "tiny", (16, 16, 3), depth=3)
    both = ModelSpec({"a": SENSOR, "b": seen}, stages=3, classes=2, label_names=("x", "y"))
    (stage,) = SCHEDULES["end_to_end"](both, [1, 1, 1], "auto")
    for modalities, expected in ((("a", "b"), LIBRARY_BYTES), (("a",), 0)):
        own = Job(both, restrict(stage, modalities), Hyper(batch_size=8), SUPERVISED)
        cost = cost_of(own, stage, candidate(), {}, Priced(10, 0.0))
        assert cost.library_bytes == expected
        has = Capabilities(trainer_base_bytes=50)
        assert verdict(cost, candidate(Budget(memory_bytes=60 + expected), capabilities=has)) is None
        short = verdict(cost, candidate(Budget(memory_bytes=59 + expected), capabilities=has))
        assert (short.reason, short.needed) == ("memory", 60.0 + expected)


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
    stage = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "frozen")[1]
    has = Capabilities(torch_device="cuda", gpu_memory_bytes=2**30)
    peak = put(stage, candidate(capabilities=has)).cost.step_peak_bytes
    placed = put(stage, candidate(Budget(gpu_memory_bytes=SEGMENT_BYTES + peak - 1), capabilities=has))
    assert (placed.refusal, placed.hyper.micro_batch) == (None, 4)
    full = msgspec.structs.replace(has, gpu_free_bytes=1)
    assert put(stage, candidate(capabilities=full)).refusal.detail == GPU_MEMORY


def test_what_a_card_s_round_takes_of_the_process_by_hand():
    """Copies of what is sent and of what stays, and one part in hand; or one batch: 2 x 16 x 3 floats a sample."""
    stage = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "frozen")[1]
    assert put(stage, candidate()).cost.staging_bytes == 8 * 2 * 16 * 3 * 4
    heavy = dict.fromkeys(part_names(MODEL), 10_000)
    assert put(stage, candidate(), part_bytes=heavy).cost.staging_bytes == 10_000 * (len(stage.trained) + 1)
    poor = msgspec.structs.replace(SUPERVISED, repair={"poverty": {}})
    twice = put(stage, candidate(), slots=poor, part_bytes=heavy).cost.staging_bytes
    assert twice == 10_000 * (2 * len(stage.trained) + 1)


def test_what_stored_prefixes_pass_through_a_card_s_process_by_hand():
    """Of each row in a batch both sensors' tokens are read, in f16; to store them, 32 rows at a time, 8 B a value."""
    stage = SCHEDULES["layerwise"](MODEL, [1, 1, 1], "frozen")[1]
    values = token_count(SENSOR) * SENSOR.width
    assert {prefix.tokens for prefix in prefixes(cached(stage, 256)).values()} == {token_count(SENSOR)}
    for batch, micro, expected in (
        (16, 0, 16 * values * 8),
        (256, 0, 256 * 2 * values * 2),  # only 32 of them at a time
        (256, 8, 256 * 2 * values * 2),
        (32, 8, 32 * 2 * values * 2),
    ):
        job = cached(stage, batch, micro)
        assert cost_of(job, stage, candidate(), {}, Priced(10, 0.0)).staging_bytes == expected
    # A frozen part is read to fill the store, and is not there any more when parts are sent.
    heavy = {"a/embed": 10**9}
    assert cost_of(cached(stage, 16), stage, candidate(), heavy, Priced(10, 0.0)).staging_bytes == 10**9


def cached(stage: Stage, batch: int, micro: int = 0) -> Job:
    return Job(MODEL, stage, Hyper(batch_size=batch, micro_batch=micro, cache="f16"), SUPERVISED)


def test_a_shortage_of_the_process_beside_a_card_is_answered_by_training_less():
    """Each stage trains 10 parts of 1 kB and more; what is sent of them passes through the process."""
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
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
    placed = place(MODEL, stage, Hyper(batch_size=8), SUPERVISED, less, heavy, noted)
    assert (placed.refusal, trained_depth(placed.stage), placed.hyper.micro_batch) == (None, 3, 0)
    assert tried == [(4, 0), (3, 0)]


@pytest.mark.parametrize(("where", "answer"), [(HOST, (3, 0)), (GPU, (4, 4))])
def test_a_decline_says_which_memory_was_short(where, answer):
    (stage,) = SCHEDULES["end_to_end"](MODEL, [1, 1, 1], "auto")
    why = Refusal("memory", 2.0, 1.0, "B", where=where)
    has = Capabilities(torch_device="cuda", gpu_memory_bytes=2**34)
    placed = put(stage, candidate(declined=(Decline(4, 8, False, why),), capabilities=has), part_bytes=TINY)
    assert (trained_depth(placed.stage), placed.hyper.micro_batch) == answer
