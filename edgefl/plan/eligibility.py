"""Who may train what: predicted cost against a device's budget, the first limit that refuses, with both numbers."""

from __future__ import annotations

from edgefl.plan.cost import filled
from edgefl.plan.values import Candidate
from edgefl.records import GPU_MEMORY, Budget, Capabilities, Cost, Refusal


def has_card(has: Capabilities) -> bool:
    """Whether the trainer computes in a GPU's own memory."""
    return has.torch_device.startswith("cuda") and has.gpu_memory_bytes > 0


def gpu_limit(budget: Budget, has: Capabilities) -> int | None:
    """Most bytes a step may take of the GPU: what its budget and the card allow; None: no limit of its own.

    ``gpu_free_bytes`` is without the CUDA context and what others use.
    """
    if not has.torch_device.startswith("cuda"):
        return None
    return least(budget.gpu_memory_bytes, has.gpu_memory_bytes and (has.gpu_free_bytes or has.gpu_memory_bytes))


def least(allowed: int | None, there: int) -> int | None:
    """The smaller of a limit, where there is one, and of what there is, where that is known (not 0)."""
    return min((n for n in (allowed, there or None) if n is not None), default=None)


def verdict(cost: Cost, candidate: Candidate) -> Refusal | None:
    """None when ``cost`` fits every limit of the device's budget; else the first limit that refuses.

    The whole-process limit needs the idle trainer's own size, which the device measures before any model's libraries
    are loaded; until then only ``step_memory_bytes`` speaks for memory. In a GPU's own memory the step has to fit
    there, and the process then holds what passes through it; where processor and GPU share one pool, both are one
    process with one budget.
    """
    budget, has = candidate.budget, candidate.capabilities
    base = has.trainer_base_bytes
    first = filled(cost, cost.filling_flops, candidate)
    host = least(budget.memory_bytes, has.memory_total_bytes)
    process = base + cost.library_bytes + (cost.staging_bytes if has_card(has) else first.step_peak_bytes)
    payload = max(cost.payload_down_bytes, cost.whole_down_bytes) + max(cost.payload_up_bytes, cost.whole_up_bytes)
    joules = budget.energy_j if first.energy_j else None
    checks = [
        ("step_memory", float(first.step_peak_bytes), budget.step_memory_bytes, "B", "memory above the idle trainer"),
        ("memory", float(process), host if base else None, "B", "trainer process"),
        ("memory", float(first.step_peak_bytes), gpu_limit(budget, has), "B", GPU_MEMORY),
        ("flops", first.flops, budget.flops, "FLOP", "one round"),
        ("payload", float(payload), budget.payload_bytes, "B", "tensors down and up in one round"),
        ("energy", first.energy_j, joules, "J", "one round, by the profile's power"),
        ("disk", float(cost.disk_bytes), budget.disk_bytes, "B", "objects and rows kept on the device"),
    ]
    for reason, needed, allowed, unit, detail in checks:
        if allowed is not None and needed > allowed:
            return Refusal(reason=reason, needed=needed, allowed=float(allowed), unit=unit, detail=detail)
    return None
