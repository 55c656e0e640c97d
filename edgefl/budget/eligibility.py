"""Who may train what: predicted cost against a device's budget, the first limit that refuses, with both numbers."""

from __future__ import annotations

from edgefl.budget.stage_cost import filled
from edgefl.plan.job import Candidate
from edgefl.records import GPU, GPU_MEMORY, HOST, Budget, Capabilities, Cost, Refusal, has_card
from edgefl.resources.cuda import SEGMENT_BYTES


def gpu_limit(budget: Budget, has: Capabilities) -> int | None:
    """Most bytes a step may take of the GPU: what its budget and the card leave it; None: no limit of its own.

    ``gpu_free_bytes`` is without the CUDA context and what others use. Of either the allocator keeps what it held
    before a round, and takes up to a segment more than its tensors.
    """
    if not has.torch_device.startswith("cuda"):
        return None
    there = has.gpu_memory_bytes and (has.gpu_free_bytes or has.gpu_memory_bytes)
    whole = least(budget.gpu_memory_bytes, there)
    return None if whole is None else max(0, whole - has.gpu_idle_bytes - SEGMENT_BYTES)


def least(allowed: int | None, there: int) -> int | None:
    """The smaller of a limit, where there is one, and of what there is, where that is known (not 0)."""
    return min((n for n in (allowed, there or None) if n is not None), default=None)


def most_moved(cost: Cost, candidate: Candidate) -> int:
    """Bytes down and up of the round of the stage that moves most: the device's first one, or the last one."""
    first = {"joining": cost.joining_down_bytes, "entering": cost.entering_down_bytes, "staying": 0}[candidate.arrival]
    signature = cost.signature_bytes if candidate.arrival == "joining" else 0
    up = max(cost.payload_up_bytes, cost.whole_up_bytes)  # any round may be the stage's last
    return max(first + up + signature, cost.payload_down_bytes + up)


def verdict(cost: Cost, candidate: Candidate) -> Refusal | None:
    """None when ``cost`` fits every limit of the device's budget; else the first limit that refuses.

    The whole-process limit needs the idle trainer's own size, which the device measures; before it did, only
    ``step_memory_bytes`` speaks for memory. In a GPU's own memory the step has to fit there, and the process then holds
    what passes through it; where processor and GPU share one pool, both are one process with one budget.
    """
    budget, has = candidate.budget, candidate.capabilities
    base, card = has.trainer_base_bytes, has_card(has)
    first = filled(cost, cost.filling_flops, candidate)
    host = least(budget.memory_bytes, has.memory_total_bytes)
    process = base + (cost.staging_bytes if card else first.step_peak_bytes)
    payload = most_moved(cost, candidate)
    joules = budget.energy_j if first.energy_j else None
    step = float(first.step_peak_bytes)
    checks = [
        ("step_memory", step, budget.step_memory_bytes, "B", "memory above the idle trainer", GPU if card else ""),
        ("memory", float(process), host if base else None, "B", "trainer process", HOST if card else ""),
        ("memory", step, gpu_limit(budget, has), "B", GPU_MEMORY, GPU),
        ("flops", first.flops, budget.flops, "FLOP", "one round", ""),
        ("payload", float(payload), budget.payload_bytes, "B", "tensors down and up in one round", ""),
        ("energy", first.energy_j, joules, "J", "one round, by the profile's power", ""),
        ("disk", float(cost.disk_bytes), budget.disk_bytes, "B", "objects and rows kept on the device", ""),
    ]
    for reason, needed, allowed, unit, detail, where in checks:
        if allowed is not None and needed > allowed:
            return Refusal(reason, needed, float(allowed), unit, detail, where)
    return None
