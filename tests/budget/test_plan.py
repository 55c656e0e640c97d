"""From a stage and a budget to what a device trains: by hand, on two modalities."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_fixture import ALL, MODEL, PART_BYTES, SHAPE, SUPERVISED, TINY, candidate, price, put

from edgefl.budget.fit import micro_batches, place, trained_depth, verdict
from edgefl.budget.stage_cost import Priced
from edgefl.models.spec import part_names
from edgefl.plan.job import Candidate, Decline, Hyper, Job, Slots, Stage, Transfer
from edgefl.plan.training_samples import complete_only, prefixes, stored_bytes, usable_samples
from edgefl.records import Budget, Capabilities, Cost, Refusal
from edgefl.registry import method


def test_memory_while_parts_come_and_go_counts():
    """What trains in less still holds the model, and one part more while it is read, two while changes are packed."""
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    heavy = dict.fromkeys(part_names(MODEL), 100)
    assert put(stage, candidate(), part_bytes=heavy).cost.step_peak_bytes == 100 * (len(stage.present) + 1)
    packed = Transfer(up=(("*", "delta+int8"),))
    placed = place(Job(MODEL, stage, Hyper(batch_size=8), SUPERVISED, transfer=packed), candidate(), heavy, price)
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
    (stage,) = method("schedule", "end_to_end").stages(
        MODEL, [1, 1, 1], "auto"
    )  # prices: 100 per trained stage + 10 per row
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
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    seen = []

    def watched(job, samples):
        seen.append((trained_depth(job.stage), job.hyper.micro_batch))
        return price(job, samples)

    device = candidate(Budget(flops=2000))
    placed = place(Job(MODEL, stage, Hyper(batch_size=8), SUPERVISED), device, PART_BYTES, watched)
    assert (placed.hyper.micro_batch, trained_depth(placed.stage)) == (0, 2)
    assert seen == [(4, 0), (3, 0), (2, 0)]


def stored(job: Job, samples) -> Priced:
    """As ``price``, with 60 less where the prefix is stored and 50 FLOPs to fill each part."""
    plain = price(job, samples)
    cache_fill_flops = {part: 50.0 for prefix in prefixes(job).values() for part in prefix.parts}
    return Priced(
        plain.peak - 60 * bool(cache_fill_flops), plain.flops - 500 * bool(cache_fill_flops), cache_fill_flops
    )


def put_stored(stage: Stage, device: Candidate, before: Stage | None = None):
    hyper = Hyper(batch_size=8, cache="f16")
    return place(Job(MODEL, stage, hyper, SUPERVISED), device, PART_BYTES, stored, before=before)


def test_prefixes_are_stored_where_there_are_any_and_the_disk_allows():
    first, second, third = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")
    assert put_stored(first, candidate()).hyper.cache == ""  # embeddings are trained
    placed = put_stored(third, candidate())
    assert (placed.hyper.cache, placed.cost.step_peak_bytes, placed.cost.filling_flops) == ("f16", 120, 300.0)
    rows = placed.cost.disk_bytes - put(third, candidate()).cost.disk_bytes
    assert rows == stored_bytes(Job(MODEL, third, Hyper(cache="f16"), SUPERVISED), ALL) > 0
    tight = put_stored(third, candidate(Budget(disk_bytes=placed.cost.disk_bytes - 1)))
    assert (tight.hyper.cache, tight.cost.step_peak_bytes, tight.refusal) == ("", 180, None)
    assert put_stored(second, candidate(Budget(step_memory_bytes=120))).hyper.cache == "f16"


def test_the_first_round_of_a_stage_computes_what_the_stage_before_has_not_stored():
    first, second, third = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")
    flops = [put_stored(third, candidate(), before).predicted_first["flops"].value for before in (None, first, second)]
    usual = put_stored(third, candidate()).predicted["flops"].value
    assert flops == [usual + 6 * 50, usual + 6 * 50, usual + 2 * 50]  # of two modalities: embed, two stages; one stage
    assert put_stored(first, candidate()).predicted_first == {}


def test_filling_that_does_not_fit_is_left_away():
    """Filling takes 400 here, a step without it 180."""
    third = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[-1]

    def price_(job: Job, samples) -> Priced:
        return stored(job, samples)._replace(cache_fill_peak=400 if prefixes(job) else 0)

    def put_(memory: int):
        hyper, device = Hyper(batch_size=8, cache="f16"), candidate(Budget(step_memory_bytes=memory))
        return place(Job(MODEL, third, hyper, SUPERVISED), device, PART_BYTES, price_)

    assert (put_(400).hyper.cache, put_(400).predicted_first["step_peak_bytes"].value) == ("f16", 400.0)
    assert put_(400).predicted["step_peak_bytes"].value == 120.0
    assert (put_(399).hyper.cache, put_(399).hyper.micro_batch, put_(399).cost.step_peak_bytes) == ("", 0, 180)


def test_what_others_train_is_not_stored():
    """A device that can pay one stage of an end-to-end round: what is before it changes in every round."""
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    placed = put_stored(stage, candidate(Budget(flops=1000.0)))
    assert (trained_depth(placed.stage), placed.hyper.cache, placed.refusal) == (1, "", None)


@pytest.mark.parametrize("reason", ["disk", "cache"])
def test_what_can_not_be_stored_is_computed_in_every_step(reason):
    third = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[-1]
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
    for reason in ("packed", "damaged"):
        told = candidate(declined=(Decline(1, 8, True, Refusal(reason, detail="of an object, not of its size")),))
        assert (put_stored(third, told).hyper.cache, put_stored(third, told).hyper.micro_batch) == ("f16", 0)


def test_bytes_down_are_what_the_round_before_changed_and_bytes_up_what_is_trained():
    (stage,) = method("schedule", "end_to_end").stages(MODEL, [1, 1, 1], "auto")
    placed = put(stage, candidate(Budget(flops=1000)))  # trains one encoder stage of 3, embeddings frozen
    assert placed.cost.payload_down_bytes == 10 * 14
    assert placed.cost.payload_up_bytes == 10 * (2 + 6)
    assert placed.cost.disk_bytes == 10 * 14 + 80
    refused = put(stage, candidate(Budget(payload_bytes=219)))
    assert refused.refusal == Refusal("payload", 220.0, 219.0, "B", "tensors down and up in one round")


def test_a_device_trains_only_modalities_it_has():
    stage = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[0]
    placed = put(stage, candidate(samples={"": 20, "a": 20}, modalities={"a": SHAPE}))
    assert placed.refusal is None
    assert not any("b" in part.split("/") for part in placed.stage.present)


def test_a_device_with_nothing_in_common_is_told_both_sides():
    stage = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[0]
    refusal = put(stage, candidate(samples={"": 100, "c": 100}, modalities={"c": (4,)})).refusal
    assert refusal.reason == "data"
    assert refusal.detail == "this device has c, the model takes a, b"


@pytest.mark.parametrize(
    ("fields", "slots", "allowed"),
    [
        ({"samples": {"": 7, "a": 7, "b": 7}}, SUPERVISED, 7.0),
        ({"class_counts": (2, 3)}, SUPERVISED, 5.0),
        ({"samples": {"": 90, "a": 90, "b": 5}}, msgspec.structs.replace(SUPERVISED, missing={"ignore": {}}), 5.0),
        ({"samples": {"": 90, "a": 90, "b": 4}}, Slots({"clip": {"weight": 1.0}}, {"zero": {}}, {}), 4.0),
    ],
)
def test_a_share_that_can_not_fill_a_batch_is_refused_with_both_numbers(fields, slots, allowed):
    stage = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[0]
    refusal = put(stage, candidate(**fields), slots=slots).refusal
    assert (refusal.reason, refusal.needed, refusal.allowed, refusal.unit) == ("data", 8.0, allowed, "samples")


def test_a_share_without_a_label_is_called_that():
    stage = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[0]
    refusal = put(stage, candidate(class_counts=(0, 0))).refusal
    assert (refusal.reason, refusal.detail, refusal.needed) == ("labels", "100 samples, none has a label", None)


def test_samples_of_another_shape_are_refused():
    stage = method("schedule", "layerwise").stages(MODEL, [1, 1, 1], "auto")[0]
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
    assert (complete_only(ignoring), usable_samples(ignoring, samples, ["a", "b"])) == (True, 3)


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
