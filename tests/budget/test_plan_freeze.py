"""Schedule freeze by the real price: whom the whole model does not fit, and what the stored prefix takes away."""

from __future__ import annotations

import msgspec
import pytest
from plan_fixture import SENSOR, SUPERVISED, candidate

from edgefl.budget.fit import place, trained_depth
from edgefl.models.parts import part_layout
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.plan.job import Hyper, Job, Placement, Stage
from edgefl.plan.packed_sizes import object_bytes
from edgefl.pricing.round_price import Pricer
from edgefl.records import Budget
from edgefl.registry import method

#: Small, since every try of the planner is traced.
NARROW = msgspec.structs.replace(SENSOR, width=64, depth=2, heads=2)
MODEL = ModelSpec({"a": NARROW, "b": NARROW}, 2, HeadSpec(width=8, out=8), classes=2, label_names=("x", "y"))
FIRST, LAST = method("schedule", "freeze").stages(MODEL, [1, 1])
PRICER = Pricer()


def placed(stage: Stage, limit: int | None, before: Stage | None = None) -> Placement:
    meta = build(MODEL, device="meta")
    sizes = {part: object_bytes(part_layout(meta, part)) for part in meta.parts_present}
    job = Job(MODEL, stage, Hyper(batch_size=2, cache="f16"), SUPERVISED)
    device = candidate(Budget(step_memory_bytes=limit), arrival="entering" if before else "joining")
    return place(job, device, sizes, PRICER, before=before)


def test_who_the_smallest_first_round_does_not_fit_waits_for_the_last_stage_and_is_told_both_numbers():
    whole, last = placed(FIRST, None), placed(LAST, None, FIRST)
    limit = last.cost.step_peak_bytes
    refused = placed(FIRST, limit).refusal
    assert (refused.reason, refused.allowed) == ("step_memory", limit)
    assert limit < refused.needed < whole.cost.step_peak_bytes
    fits = placed(LAST, limit, FIRST)
    assert (fits.refusal, fits.hyper.micro_batch, fits.hyper.cache, fits.shortened) == (None, 0, "f16", None)
    # between the two it trains less of the model in the first rounds, over a prefix that the others change
    short = placed(FIRST, int(refused.needed))
    assert (short.refusal, short.hyper.cache, trained_depth(short.stage)) == (None, "", 1)
    assert short.shortened.allowed < short.shortened.needed


@pytest.mark.slow
def test_the_last_stage_is_priced_as_that_of_layerwise_but_for_the_prefix_that_nobody_stored():
    layerwise = method("schedule", "layerwise").stages(MODEL, [1, 1], "frozen")
    ours, theirs = placed(LAST, None, FIRST), placed(layerwise[1], None, layerwise[0])
    entering = {"entering_down_bytes": 0}  # of freeze, everything: the rounds before have changed it all
    assert msgspec.structs.replace(ours.cost, **entering) == msgspec.structs.replace(theirs.cost, **entering)
    assert ours.cost.entering_down_bytes == ours.cost.joining_down_bytes > theirs.cost.entering_down_bytes
    filling = ours.predicted_first["flops"].value - ours.predicted["flops"].value
    assert filling > theirs.predicted_first["flops"].value - theirs.predicted["flops"].value > 0
