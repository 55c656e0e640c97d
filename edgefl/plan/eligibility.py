"""Who may train what: predicted cost against a device's budget, the first limit that refuses, with both numbers."""

from __future__ import annotations

from edgefl.plan.cost import filled
from edgefl.plan.values import Candidate
from edgefl.records import Cost, Refusal


def verdict(cost: Cost, candidate: Candidate) -> Refusal | None:
    """None when ``cost`` fits every limit of the device's budget; else the first limit that refuses.

    The whole-process limit needs the idle trainer's own size, which the device measures; before it did, only
    ``step_memory_bytes`` speaks for memory.
    """
    budget, base = candidate.budget, candidate.capabilities.trainer_base_bytes
    first = filled(cost, cost.filling_flops, candidate)
    payload = max(cost.payload_down_bytes, cost.whole_down_bytes) + max(cost.payload_up_bytes, cost.whole_up_bytes)
    joules = budget.energy_j if first.energy_j else None
    checks = [
        ("step_memory", float(first.step_peak_bytes), budget.step_memory_bytes, "B", "memory above the idle trainer"),
        ("memory", float(base + first.step_peak_bytes), budget.memory_bytes if base else None, "B", "trainer process"),
        ("flops", first.flops, budget.flops, "FLOP", "one round"),
        ("payload", float(payload), budget.payload_bytes, "B", "tensors down and up in one round"),
        ("energy", first.energy_j, joules, "J", "one round, by the profile's power"),
        ("disk", float(cost.disk_bytes), budget.disk_bytes, "B", "objects and rows kept on the device"),
    ]
    for reason, needed, allowed, unit, detail in checks:
        if allowed is not None and needed > allowed:
            return Refusal(reason=reason, needed=needed, allowed=float(allowed), unit=unit, detail=detail)
    return None
