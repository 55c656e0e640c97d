"""Price of a run end to end: the planner's prediction for its devices with all parts trained at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from edgefl.aggregation.weights import wanted
from edgefl.budget.fit import verdict
from edgefl.budget.stage_cost import StageTraffic, cost_of
from edgefl.models.parts import part_layout
from edgefl.models.staged import build
from edgefl.plan.job import Candidate, Job, RunPlan
from edgefl.plan.packed_sizes import object_bytes
from edgefl.plan.stages import restrict
from edgefl.pricing.round_price import Pricer, process_pricer
from edgefl.records import Cost
from edgefl.registry import Choice, default, method
from edgefl.run_records import DeviceRow, EndToEnd

replace = msgspec.structs.replace


class _Whole(NamedTuple):
    """The job of training all parts, with its pricer."""

    job: Job
    traffic: StageTraffic
    price: Pricer

    def cost(self, row: DeviceRow) -> Cost:
        """Cost of a round for a device, by its samples and speed."""
        held = [m for m in self.job.model.encoders if row.samples.get(m)]
        job = replace(self.job, stage=restrict(self.job.stage, held))
        device = Candidate(row.device, row.capabilities, samples=row.samples)
        return cost_of(job, device, self.price(job, row.samples), self.traffic)


def price_end_to_end(plan: RunPlan, devices: Sequence[DeviceRow]) -> dict[str, EndToEnd]:
    """Device -> price of end-to-end training without low-rank terms; {} if the run itself is end to end."""
    schedule, spec = method("schedule", default("schedule")), replace(plan.model, lora=msgspec.UNSET)
    stage = Choice(schedule, {}).bind(schedule.stages)(spec, [stage.rounds for stage in plan.stages])[0]
    held = [one for one in plan.stages if one.rounds]
    if all(set(stage.trained) <= set(one.trained) and not (one.fallback_depth or one.draw) for one in held):
        return {}
    model = build(spec, device="meta")
    layouts = {part: part_layout(model, part) for part in model.parts_present}
    sizes = {part: object_bytes(layout) for part, layout in layouts.items()}
    hyper = replace(plan.hypers[0], cache="", precision="f32")
    job = Job(spec, stage, hyper, plan.slots, transfer=plan.transfer)
    whole = _Whole(job, StageTraffic(stage, sizes, None, wanted(plan.server), layouts=layouts), process_pricer())
    trains = [row for row in devices if any(row.samples.get(m) for m in plan.model.encoders)]
    return {row.device: _price(whole, row) for row in trains}


def _price(whole: _Whole, row: DeviceRow) -> EndToEnd:
    rounds = max(1, whole.job.stage.rounds)
    cost = whole.cost(row)
    usual = (rounds - 1) * (cost.payload_down_bytes + cost.payload_up_bytes)
    payload = (cost.joining_down_bytes + cost.signature_bytes + cost.whole_up_bytes + usual) / rounds
    device = Candidate(row.device, row.capabilities, row.budget, row.samples)
    return EndToEnd(cost.step_peak_bytes, cost.flops, payload, verdict(cost, device), cost.compute_s, cost.energy_j)
